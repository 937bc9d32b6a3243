"""`make repro`: check what can be checked, run `dvc repro` with one Prefect server beside it, show what came out.

`python -m pipeline.repro [TARGET or dvc option...]` passes its words on to DVC; with `-S section.name=value` among them
they go to `dvc exp run`, and params.yaml is changed for an experiment. The server starts when params.yaml is checked or
a stage asks for it, so a run in which nothing changed doesn't pay for one.
"""

import contextlib
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from alambique.core.errors import UserError
from alambique.core.files import sha256_file, sha256_json
from alambique.core.places import forget_shipped, work_dir
from pipeline import jobs, processes, run, server
from pipeline.job import leave

EXIT_USER_ERROR = 2
_LAST_SCREEN = "pipeline.last_screen"
_UNKNOWN = 3  # the check's status when all is well as far as it can tell
# Importing makes so many objects that looking for garbage among them takes a fifth of the time.
_CHECK = f"import gc; gc.disable(); from pipeline.check import main; main(unknown={_UNKNOWN})"


def main(words: list[str]) -> int:
    """Run the pipeline and return DVC's exit status; 2 if it can't start."""
    try:
        if "MAKELEVEL" in os.environ:  # a killed `make` tells nobody; without one, `nohup` and `disown` must work
            processes.die_with_parent(signal.SIGTERM)
        require_checkout(Path.cwd())
        require_environment()
        with only_repro(), server.Service() as prefect:
            mend_rwlock(Path(".dvc/tmp/rwlock"))
            mend_lock(Path("dvc.lock"))
            check_params_once(prefect)
            status = run_dvc(words, prefect)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:  # before DVC, which tells of its own
        return 128 + signal.SIGINT
    if status == 0:
        forget_shipped()  # DVC has their students
        importlib.import_module(_LAST_SCREEN).show()
    return status


def require_checkout(folder: Path) -> None:
    """Refuse a folder in which DVC can't work.

    Raises:
        UserError: it isn't the project's folder, or it has no Git.
    """
    if not (folder / ".dvc").is_dir() or not (folder / "dvc.yaml").is_file():
        raise UserError(f"{folder} has no .dvc and dvc.yaml: change to the project's own folder and run again.")
    local = folder / ".dvc" / "config.local"
    without_git = local.is_file() and "no_scm" in local.read_text()
    if not without_git and not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        raise UserError(
            f"{folder} is a checkout without Git, which DVC needs: run `git init`, or "
            "`.venv/bin/dvc config --local core.no_scm true` to go on without (experiments and queues then don't work)."
        )


def require_environment() -> None:
    """Refuse a Python that isn't the project's, and wrong values of environment variables, before anything starts."""
    if sentence := run.problem([run.STAGES[0]]):
        raise UserError(sentence)
    jobs.Limits.from_env()


@contextlib.contextmanager
def only_repro() -> Iterator[None]:
    """Hold this checkout's lock: two `dvc repro` at once can lose a finished job's result.

    Raises:
        UserError: another `make repro` runs here.
    """
    descriptor = os.open(".dvc", os.O_RDONLY)  # locking the folder itself makes no file that could be left behind
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another `make repro` is running in {Path.cwd()}: wait for it, or stop it with ^C in its terminal."
            ) from None
        yield
    finally:
        os.close(descriptor)


def mend_rwlock(path: Path) -> None:
    """Remove DVC's record of running stages if a kill cut it short, or every later `dvc repro` would refuse to start.

    DVC rewrites the file in place. A whole one is left alone: DVC itself drops the entries of dead processes.
    """
    try:
        json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        path.unlink(missing_ok=True)
        print(f"removed {path}, which a killed DVC left half-written", file=sys.stderr)


def mend_lock(path: Path) -> None:
    """Remove a dvc.lock that a kill cut short, which DVC, rewriting it in place too, would refuse from then on.

    Nothing runs again for that: DVC's run cache knows what every finished stage gave. A cut after a whole line that
    opens nothing is left: DVC takes such a file, knows less, and asks its run cache.
    """
    if path.is_file() and (not (end := path.read_bytes()[-2:]).endswith(b"\n") or end == b":\n"):
        path.unlink()
        print(f"removed {path}, which a killed DVC left half-written; its run cache knows the stages", file=sys.stderr)


def check_params_once(prefect: server.Service) -> None:
    """Validate params.yaml, unless it and the code are those of the last check that passed.

    It is not the last word while a model's shapes are unknown, on a fresh machine, so that the next run looks again.
    Where there is something to check there will be something to run: ``prefect`` starts beside it, on another core.
    """
    files = [Path("params.yaml"), Path("dvc.yaml"), *Path("src").rglob("*.py"), *Path("pipeline").glob("*.py")]
    state = sha256_json({str(path): sha256_file(path) for path in sorted(files) if path.is_file()})
    stamp = work_dir() / "params-checked"
    if stamp.is_file() and stamp.read_text() == state:
        return
    prefect.start()
    if check():
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(state)


def check() -> bool:
    """Check params.yaml in a process of its own, which imports torch: half a gigabyte that jobs would go without.

    Returns whether everything could be looked at. Leaves with the check's status, which has said why, if it refuses.
    """
    child = processes.start([sys.executable, "-c", _CHECK])
    try:
        status = child.wait()
    finally:
        processes.stop(child, 0.0)
    if status not in (0, _UNKNOWN):
        raise SystemExit(status if status > 0 else 128 - status)
    return status == 0


def run_dvc(words: list[str], prefect: server.Service) -> int:
    """Run `dvc repro` to its end, however that comes; start ``prefect`` when a stage wants it."""
    processes.adopt_orphans()
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    wanted = Path(".dvc/tmp/alambique-server-wanted").resolve()  # only one `make repro` works here
    wanted.unlink(missing_ok=True)
    env |= prefect.env()
    dvc = _start_dvc(words, env | {run.SERVER_WANTED: str(wanted)})
    importlib.import_module(_LAST_SCREEN)  # half a second, while DVC itself starts on another core
    while dvc.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            dvc.wait(0.2)
        if wanted.exists():
            prefect.start()
            prefect.announce()
    # A killed DVC leaves its stage saving a checkpoint, and its flow telling the server: wait for them.
    grace = jobs.Limits.from_env().stop_seconds + run.REPORT_SECONDS
    processes.stop_children(grace, prefect.pids())
    wanted.unlink(missing_ok=True)
    code = int(dvc.returncode)
    return code if code >= 0 else 128 - code


def is_experiment(words: list[str]) -> bool:
    """Whether ``words`` change params, which only `dvc exp run` does."""
    return any(word.startswith(("-S", "--set-param")) for word in words)


def _start_dvc(words: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start DVC in our own process group: ^C reaches it from the terminal; SIGTERM and SIGHUP are passed on."""
    dvc: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        if dvc is not None and number != signal.SIGINT:
            dvc.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    dvc = subprocess.Popen(
        [sys.executable, "-m", "dvc", *(("exp", "run") if is_experiment(words) else ("repro",)), *words],
        env=env,
        preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM),
    )
    return dvc


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
