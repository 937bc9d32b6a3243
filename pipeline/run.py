"""What dvc.yaml runs: `python -m pipeline.run STAGE KEY...`.

Stages that use a GPU run as a job inside a Prefect flow (`pipeline.flow`), the others as a plain job; either way in a
session of its own, so that ^C, SIGTERM and a killed DVC end it in order. Standard library only at import: when `python`
isn't the project's, there must still be one clear sentence.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import signal
import sys

from pipeline import processes

GPU_STAGES = ("teacher", "distill", "evaluate")
CPU_STAGES = ("prepare", "student", "report")
STAGES = (*GPU_STAGES, *CPU_STAGES)
CODE = "code"  # no job: it hashes the code of the others (pipeline.code)
EXIT_USER_ERROR = 2
# A file that `make repro` watches for: a GPU stage makes it, or one before those, and one Prefect server starts for the
# whole run. A report alone needs none.
SERVER_WANTED = "ALAMBIQUE_SERVER_WANTED"
# Time that a flow has to tell Prefect, after its job's own time to stop (pipeline.jobs).
REPORT_SECONDS = 15.0  # assumption


def problem(argv: list[str]) -> str | None:
    """One sentence on why the stage can't start, or None."""
    missing = [name for name in ("prefect", "alambique") if importlib.util.find_spec(name) is None]
    if missing:
        return (
            f"{sys.executable} has no {missing[0]}, so it isn't this project's Python: "
            "use `make repro`, or put .venv/bin first on PATH."
        )
    if not argv:
        return f"usage: python -m pipeline.run STAGE KEY..., where STAGE is one of {', '.join(STAGES)}."
    if argv[0] not in (*STAGES, CODE):
        close = difflib.get_close_matches(argv[0], STAGES, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(STAGES)}."
        return f"there is no stage {argv[0]}; {hint}"
    return None


def main(argv: list[str]) -> int:
    """Run one stage and return its exit status."""
    sentence = problem(argv)
    if sentence:
        print(f"error: {sentence}", file=sys.stderr)
        return EXIT_USER_ERROR
    from alambique.core.errors import UserError  # the library is needed from here on

    stage, *key = argv
    try:
        if stage == CODE:
            from pipeline import code

            code.record()
            return 0
        from pipeline import jobs

        grace = jobs.Limits.from_env().stop_seconds
        wanted = os.environ.get(SERVER_WANTED)
        if wanted and stage != "report":
            os.close(os.open(wanted, os.O_CREAT | os.O_WRONLY))
        if stage in GPU_STAGES:
            command = [sys.executable, "-m", "pipeline.flow", *argv]
            return processes.supervise(command, signal.SIGINT, grace, REPORT_SECONDS)
        with jobs.stage_lock(stage, key) as lock:
            return processes.supervise(jobs.command(stage, key), signal.SIGTERM, grace, pass_fds=[lock])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
