"""Tensor parallel over two processes on a CPU (gloo), against one process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from alambique.models.load import SplitModel, load_model
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
WORKER = "tests.models.ranks_worker"
# launch() changes the signal handlers of its process, so it gets one of its own.
LAUNCH = "import sys; from alambique.models.ranks import launch; sys.exit(launch(int(sys.argv[1]), *sys.argv[2:]))"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_model(LlamaConfig), tiny_tokenizer())


def launched(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LAUNCH, "2", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.slow
def test_two_processes_give_the_logits_of_one_and_a_refusal_ends_both(model: Path, tmp_path: Path) -> None:
    done = launched("-m", WORKER, str(model), str(tmp_path / "out"), "refuse")
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith("error: no more\n")
    assert "Traceback" not in done.stderr
    found = load_file(tmp_path / "out")
    assert found["local"] == 3 * 32 * 64 // 2  # a process holds half of a layer
    whole = SplitModel(load_model(model, dtype="float32", device=torch.device("cpu")))
    for rows in (2, 1):
        ids_BS = torch.arange(rows * 12).reshape(rows, 12) + 5
        documents_BS = (torch.arange(12) >= 5).int().repeat(rows, 1)
        with torch.no_grad(), whole.recording([0]) as states:
            expected = whole.logits(whole.hidden(ids_BS, documents_BS))
        torch.testing.assert_close(found[f"state_{rows}"], states[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(found[f"logits_{rows}"].argmax(-1), expected.argmax(-1))
        torch.testing.assert_close(found[f"logits_{rows}"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_out_of_memory_is_no_hang(model: Path, tmp_path: Path) -> None:
    done = launched("-m", WORKER, str(model), str(tmp_path / "out"), "no memory")
    assert done.returncode == 2, done.stderr
    assert (
        "error: 12 tokens don't fit in the memory of 2 tensor-parallel processes: lower teacher.batch_tokens, or raise "
        "teacher.tensor_parallel.\n"
    ) in done.stderr


def test_the_exit_status_is_that_of_the_process_that_failed() -> None:
    ends = ["sys.exit(0)", "sys.exit(7 * rank)", "sys.exit(2 - rank)", "os.kill(os.getpid(), 9)"]
    start = "import os, sys; rank = int(os.environ['RANK']); "
    code = f"from alambique.models.ranks import launch; print([launch(2, '-c', {start!r} + end) for end in {ends}])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{[0, 7, 2, 128 + 9]}\n"
    assert "Traceback" not in done.stderr


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_launcher_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """The processes only sleep in a collective, as followers do while rank 0 writes."""
    code = (
        "import os, torch; from alambique.models.ranks import Ranks\n"
        "with Ranks(torch.device('cpu')) as ranks:\n"
        f"    open(r'{tmp_path}/' + str(os.getpid()), 'w').close()\n"
        "    __import__('time').sleep(300) if ranks.leads else ranks.follow(None)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH, "2", "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 100
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    launcher.send_signal(number)
    assert launcher.wait(20) == (128 + number if number == signal.SIGTERM else -number)
    end = time.monotonic() + 5
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)
