"""The deployment, on one host: a real server, a real process worker, and a folder as DVC's remote."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import wait_for

ROOT = Path(__file__).parents[2]


class Host:
    """A worker with a checkout of its own, cloned from ``laptop``."""

    def __init__(self, laptop: Any, root: Path) -> None:
        self.laptop, self.root = laptop, root
        laptop.git("clone", "-q", str(laptop.root), str(root))
        (root / "seen").mkdir()  # where the fake stages leave word
        self.env = {
            **laptop.env,
            "ALAMBIQUE_CHECKOUT": str(root),
            "PREFECT_HOME": str(laptop.root / ".prefect"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        }

    def prefect(self, *words: str) -> str:
        command = [sys.executable, "-m", "prefect", "--no-prompt", *words]
        done = subprocess.run(command, cwd=self.laptop.root, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def worker(self, pool: str) -> Iterator[None]:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
        with (self.laptop.root / "output").open("w") as output:
            process = subprocess.Popen(command, cwd=self.root, env=self.env, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def host(project: Any, tmp_path_factory: pytest.TempPathFactory) -> Host:
    project.make_checkout("ok")
    store = tmp_path_factory.mktemp("store")
    with (project.root / ".dvc" / "config").open("a") as config:
        config.write(f"    remote = store\n['remote \"store\"']\n    url = {store}\n")
    shutil.copy(ROOT / "prefect.yaml", project.root / "prefect.yaml")
    project.commit()
    return Host(project, tmp_path_factory.mktemp("host") / "checkout")


def submit(host: Host, **parameters: Any) -> str:
    words = [word for name, value in parameters.items() for word in ("--param", f"{name}={json.dumps(value)}")]
    output = host.prefect("deployment", "run", "alambique/repro", *words)
    return next(line.split()[-1] for line in output.splitlines() if "UUID" in line)


def state(host: Host, run: str) -> tuple[str, str]:
    import httpx

    found = httpx.get(f"{host.env['PREFECT_API_URL']}/flow_runs/{run}").json()
    return found["state"]["type"], found["state"]["message"] or ""


def logs(host: Host, run: str) -> str:
    import httpx

    query = {"logs": {"flow_run_id": {"any_": [run]}}}
    found = httpx.post(f"{host.env['PREFECT_API_URL']}/logs/filter", json=query).json()
    return "\n".join(line["message"] for line in found)


@pytest.mark.skipif(
    not os.environ.get("ALAMBIQUE_LONG_TESTS"),
    reason="a minute and a half of a real server and worker: runs with ALAMBIQUE_LONG_TESTS=1",
)
@pytest.mark.slow
def test_a_laptop_submits_and_a_worker_works(host: Host) -> None:
    """Completed, pushed, fetched by the laptop without running anything; then refused, then cancelled."""
    laptop = host.laptop
    host.prefect("work-pool", "create", "gpu", "--type", "process")
    host.prefect("deploy", "--all")
    first = laptop.git("rev-parse", "HEAD")
    with host.worker("gpu"):
        run = submit(host, commit=first)
        wait_for(lambda: state(host, run)[0] in ("COMPLETED", "FAILED", "CRASHED"), 90)
        assert state(host, run)[0] == "COMPLETED", state(host, run)[1] + logs(host, run) + laptop.output()
        # Prefect sends a run's last lines when its process ends, after the state.
        wait_for(lambda: all(words in logs(host, run) for words in ("Running stage 'distill'", "LAST SCREEN")), 30)
        assert (host.root / "results/report/ok.json").is_file()

        code, output = laptop.run("--pull", module="pipeline.repro")
        assert code == 0, output
        assert "Running stage" not in output
        assert json.loads((laptop.root / "results/distill/ok.json").read_text())["tokens_per_s"] == 12.5

        run = submit(host, set_params=["how=sleep"])
        wait_for((host.root / "seen/started").is_file, 60)
        host.prefect("flow-run", "cancel", run)
        wait_for(lambda: state(host, run)[0] in ("CANCELLED", "CRASHED"), 60)
        wait_for((host.root / "seen/saved").is_file, 20)
        assert state(host, run)[0] == "CANCELLED"

        (host.root / "dvc.yaml").write_text("edited")
        run = submit(host, commit=first)
        wait_for(lambda: state(host, run)[0] in ("COMPLETED", "FAILED", "CRASHED"), 60)
        assert "has changes that are not committed (dvc.yaml): give the worker a checkout" in state(host, run)[1]
