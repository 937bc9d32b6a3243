import subprocess
import sys
import time

import torch

from alambique.core.measure import Stopwatch, default_device, device_name, peak_mib, versions

CPU = torch.device("cpu")


def test_peak_grows_with_what_was_used_and_never_falls() -> None:
    before = peak_mib(CPU)
    block = bytearray(200 << 20)
    block[::4096] = b"x" * len(block[::4096])
    during = peak_mib(CPU)
    assert during >= 200
    del block
    assert peak_mib(CPU) > during - 1  # the kernel counts pages in batches
    assert during >= before


def test_a_peak_is_the_process_s_own_and_not_its_parent_s() -> None:
    block = bytearray(900 << 20)
    block[::4096] = b"x" * len(block[::4096])
    code = "import torch; from alambique.core.measure import peak_mib; print(peak_mib(torch.device('cpu')))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 50 < float(child.stdout) < 900 <= peak_mib(CPU)


def test_stopwatch_measures_and_restarts() -> None:
    watch = Stopwatch(CPU)
    time.sleep(0.03)
    assert watch.seconds() >= 0.03
    watch.restart()
    assert watch.seconds() < 0.03


def test_device_and_its_name() -> None:
    assert default_device().type in ("cpu", "cuda")
    assert device_name(CPU).startswith("cpu (")


def test_versions_name_what_is_installed_and_what_is_not() -> None:
    found = versions()
    assert set(found) == {"python", "torch", "transformers", "tokenizers", "safetensors"}
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions("no-such-package-here")["no-such-package-here"] == "absent"
