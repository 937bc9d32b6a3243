"""The Prefect deployment `alambique/repro`: a laptop submits a commit, a GPU host runs it in a checkout of its own.

`prefect.yaml` declares it, a stock process worker runs it; docs/orchestration.md sets up both sides. Everything after
the checkout is a child process of the commit's own code, not of the code that the worker started with.
"""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from alambique.core.errors import UserError
from pipeline import jobs, processes, run
from pipeline.terminal import Relay

_LOOK_SECONDS = 1.0  # assumption: how old a line of the run's log may be
_WRITTEN_BY_RUNS = (":!dvc.lock", ":!params.yaml")  # the second by `dvc exp run -S`


@flow(name="alambique", flow_run_name="repro {commit}", retries=0, persist_result=False)
def repro(commit: str = "HEAD", targets: list[str] | None = None, set_params: list[str] | None = None) -> None:
    """Check out, pull what the run needs, run what changed, push what came out, finished stages of a failed run too.

    Args:
        commit: hash, tag or origin/BRANCH; HEAD is what the worker's checkout holds.
        targets: stages such as report@PAIR; all, if there are none.
        set_params: changes to params.yaml such as distill.learning_rate=1e-3; the run is then a DVC experiment.
    """
    check_out(commit)
    words = [word for change in set_params or () for word in ("-S", change)]
    python = [sys.executable, "-m"]
    code, last_line = follow([*python, "pipeline.repro", "--pull", *words, *(targets or ())])
    pushed, push_line = follow([*python, "dvc", "push", "--run-cache"])
    if code:
        raise UserError(f"`make repro` ended with exit status {code}: {last_line}")
    if pushed:
        raise UserError(f"the run is whole, but `dvc push` ended with exit status {pushed}: {push_line}")


def check_out(commit: str) -> None:
    """Put the working folder at ``commit``, fetched from the remote `origin` if there is one.

    Raises:
        UserError: somebody has edited files here, or Git doesn't know the commit.
    """
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN_BY_RUNS)
    if changed:
        raise UserError(
            f"{Path.cwd()} has changes that are not committed ({changed.split()[1]}): give the worker a checkout of "
            "its own, or commit them."
        )
    if "origin" in _git("remote").split():
        _git("fetch", "--quiet", "--tags", "origin")
    _git("checkout", "--quiet", "--force", "--detach", commit)
    get_run_logger().info("at %s", _git("log", "-1", "--oneline"))


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next(iter(done.stderr.splitlines()), f"exit status {done.returncode}")
        raise UserError(f"`git {' '.join(words)}` in {Path.cwd()}: {reason}: push the commit, or correct its name.")
    return done.stdout.strip()


def follow(command: Sequence[str]) -> tuple[int, str]:
    """Run ``command``, log its lines to the flow run, and return its exit status and last line.

    However this ends, cancellation included, the command has been asked to stop and has had its time to.
    """
    logger: Any = get_run_logger()
    relay, last = Relay(), ""
    process = processes.start(command, stdout=relay.write_end, stderr=relay.write_end)
    relay.close_write_end()

    def tell() -> str:
        lines = relay.new_lines()
        if lines:
            logger.info("\n".join(lines))
        return lines[-1] if lines else last

    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
            last = tell()
    finally:
        processes.stop(process, jobs.Limits.from_env().stop_seconds + run.REPORT_SECONDS)
        relay.finish()
        last = tell()
    return process.returncode, last
