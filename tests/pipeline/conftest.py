"""A project of fake stages that runs the real orchestration, in real processes, against one real Prefect server."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORCHESTRATION = (
    "__init__", "run", "flow", "code", "job", "jobs", "parts", "observer", "processes", "repro", "rows", "server",
    "terminal", "tracking", "deploy",
)  # fmt: skip
STAGES = ("prepare", "teacher", "student", "distill", "evaluate", "report")

# The last word of the key says how the job behaves.
FAKE_STAGE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from alambique.core.progress import Progress

stage, key = Path(__file__).stem, sys.argv[1:]
how, here = key[-1], Path("seen")
here.mkdir(exist_ok=True)
with (here / "-".join([stage, *key])).open("a") as seen:
    seen.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\\n")

def ended(number, frame):
    (here / "saved").touch()
    sys.exit(75)

if how in ("sleep", "stubborn"):
    signal.signal(signal.SIGTERM, ended if how == "sleep" else signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    (here / "started").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(300)
if how == "refused":
    sys.exit("error: the value is wrong." if print("error: the value is wrong.", file=sys.stderr) else 2)
if how == "broken":
    sys.exit(7)
if how == "killed_once" and not (here / "once").exists():
    (here / "once").touch()
    os.kill(os.getpid(), signal.SIGKILL)
with Progress("fake", total=4) as progress:
    for step in range(4):
        progress.update(1, loss_nats=1.0 / (step + 1))
        time.sleep(float(os.environ.get("FAKE_SECONDS", "0.2")) / 4)
print("a line for the log", file=sys.stderr)
results = Path("results", stage, *key).with_suffix(".json")
results.parent.mkdir(parents=True, exist_ok=True)
results.write_text(json.dumps({"tokens_per_s": 12.5, "nested": {"n": 3}}))
"""


DVC_YAML = """
stages:
  prepare:
    cmd: exec python -m pipeline.run prepare ok
    params: [prepare]
    metrics: [results/prepare/ok.json]
  distill:
    cmd: exec python -m pipeline.run distill ${how}
    deps: [results/prepare/ok.json]
    metrics: ["results/distill/${how}.json"]
  report:
    cmd: cp dvc.lock seen/lock && exec python -m pipeline.run report ok
    deps: ["results/distill/${how}.json"]
    params: [prepare]
    metrics: [results/report/ok.json]
"""


class Project:
    """The fake project in ``root``, with the means to run it and to look for what was left behind."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[subprocess.Popen[bytes]] = []
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "DVC"))}
        self.env["SHELL"] = "/bin/sh"  # dash, where it is Debian's: unlike bash it stays between DVC and the command
        self.env |= {"ALAMBIQUE_RETRY_DELAY_SECONDS": "0", "ALAMBIQUE_STOP_SECONDS": "2", "CUDA_VISIBLE_DEVICES": ""}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}"

    def make_checkout(self, how: str) -> None:
        """Make it a checkout of Git and DVC with three of the stages; the second behaves as ``how`` says."""
        (self.root / "params.yaml").write_text(f"how: {how}\nprepare: {{a: 1}}\n")
        (self.root / "dvc.yaml").write_text(DVC_YAML)
        (self.root / ".dvc").mkdir()
        (self.root / ".dvc" / "config").write_text("[core]\n    analytics = false\n    check_update = false\n")
        (self.root / ".dvc" / ".gitignore").write_text("/config.local\n/tmp\n/cache\n")
        (self.root / ".gitignore").write_text(
            "results\nseen\n.work\n.prefect\noutput\nmlflow.db\nmlruns\n.mlflow.lock\n__pycache__\n"
        )
        (self.root / "seen").mkdir()
        (self.root / "pipeline" / "check.py").write_text(
            "def main(unknown):\n    open('seen/checked', 'a').write('x')\n"
        )
        (self.root / "pipeline" / "last_screen.py").write_text("def show():\n    print('LAST SCREEN')\n")
        self.git("init", "-q", ".")

    def git(self, *words: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        done = subprocess.run(["git", *identity, *words], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self) -> str:
        """Commit all that Git doesn't ignore; the commit's name."""
        self.git("add", "-A")
        self.git("commit", "-qm", "as it is")
        return self.git("rev-parse", "HEAD")

    def start(self, *words: str, module: str = "pipeline.run", **env: str) -> subprocess.Popen[bytes]:
        with (self.root / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=self.root,
                env={**self.env, **env},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def make_repro(self) -> subprocess.Popen[bytes]:
        """`make repro`, in this Python's environment."""
        command = ["make", "-f", str(ROOT / "Makefile"), "-o", ".venv/.ok", "repro"]
        process = subprocess.Popen(command, cwd=self.root, env=self.env)
        self.processes.append(process)
        return process

    def run(self, *words: str, module: str = "pipeline.run", **env: str) -> tuple[int, str]:
        code = self.start(*words, module=module, **env).wait(120)
        return code, self.output()

    def output(self) -> str:
        return (self.root / "output").read_text()

    def attempts(self, *words: str) -> int:
        return len((self.root / "seen" / "-".join(words)).read_text().splitlines())

    def started_pids(self) -> list[int]:
        """Wait for a fake `sleep` or `stubborn` job; its process and its child's."""
        file = self.root / "seen" / "started"
        wait_for(lambda: file.is_file() and len(file.read_text().split()) == 2, 30)
        return [int(pid) for pid in file.read_text().split()]

    def left_behind(self, words: str = "") -> dict[int, str]:
        """Living processes whose working folder is this project, with their command lines, in which are ``words``."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    process.joinpath("cwd").resolve() == self.root
                    and process.joinpath("stat").read_text().split()[2] != "Z"
                ):
                    found[int(process.name)] = process.joinpath("cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return {pid: line for pid, line in found.items() if words in line}

    def assert_all_end(self, seconds: float) -> None:
        """Wait for the last process to end."""
        end = time.monotonic() + seconds
        while left := self.left_behind():
            assert time.monotonic() < end, left
            time.sleep(0.1)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(0.05)


def make_project(root: Path) -> None:
    (root / "pipeline").mkdir(parents=True)
    for name in ORCHESTRATION:
        (root / "pipeline" / f"{name}.py").symlink_to(ROOT / "pipeline" / f"{name}.py")
    for stage in STAGES:
        (root / "pipeline" / f"{stage}.py").write_text(FAKE_STAGE)


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def prefect_server(prefect_home: Path) -> Iterator[str]:
    """The API's address of one server for all tests."""
    from pipeline import server

    url = server.url_of(port := server.free_port())
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # for the server's start only
            for name in [name for name in os.environ if name.startswith("PREFECT")]:
                patch.delenv(name)
            patch.setenv("PREFECT_HOME", str(prefect_home))
            patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
            patch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
            stack.enter_context(server.local_server(port))
        server.wait_until_ready(url)
        yield url


@pytest.fixture(scope="session")
def prefect_database(prefect_server: str, prefect_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the server's database, whole although the server is using it."""
    copy = tmp_path_factory.mktemp("database") / "prefect.db"
    with (
        contextlib.closing(sqlite3.connect(prefect_home / "prefect.db")) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
    return copy


@pytest.fixture
def bare_project(tmp_path: Path) -> Iterator[Project]:
    """Without a server."""
    make_project(tmp_path)
    project = Project(tmp_path)
    yield project
    for process in project.processes:  # of a test that failed
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def project(bare_project: Project, prefect_server: str) -> Project:
    bare_project.env["PREFECT_API_URL"] = prefect_server
    return bare_project


@pytest.fixture(scope="session")
def new_mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow store, made once: its migrations take seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    code = "from pipeline import tracking\nwith tracking._store() as client: client.search_experiments()"
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{path}", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=path.parent, env=env, check=True)
    return path


@pytest.fixture
def mlflow_database(new_mlflow_database: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(new_mlflow_database, tmp_path / "mlflow.db"))
