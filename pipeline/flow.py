"""One GPU stage as one Prefect flow around its job: `python -m pipeline.flow STAGE KEY...`, started by `pipeline.run`.

The job starts first and Prefect, which takes two seconds to import, records it from beside. Nothing that Prefect or
MLflow do can fail a job: it is said once on stderr, and the job goes on. Prefect caches nothing; DVC alone decides what
runs.
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from alambique.core.errors import UserError
from pipeline import jobs, processes
from pipeline.jobs import Job, Outcome, Status
from pipeline.observer import Observer
from pipeline.server import API_URL, free_port, local_server, set_defaults, url_of, wait_until_ready

EXIT_INTERRUPTED = 130  # what shells use for ^C


class JobFailed(Exception):
    """An attempt ended without success; Prefect's task decides by its job's outcome whether to try again."""


def say(sentence: str) -> None:
    """Tell the person at the terminal, on a line of its own."""
    print(f"\n{sentence}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Run the job under Prefect and return the stage's exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # started with `&`, a process ignores SIGINT
    signal.signal(signal.SIGTERM, _as_interrupt)
    stage, *key = argv
    try:
        with Job(stage, key) as job:
            job.try_start()
            return _exit_status(job, _run_recorded(job))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return jobs.EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _exit_status(job: Job, outcome: Outcome) -> int:
    if outcome.status in (Status.OK, Status.USER_ERROR):
        return outcome.returncode  # a refused job has said why
    again = "the next `make repro` resumes it" if outcome.status is not Status.FAILED else "see its last lines above"
    tries = f" (attempt {job.attempts})" if job.attempts > 1 else ""
    say(f"error: {job.label} {outcome.reason}{tries}; {again}.")
    code = outcome.returncode
    return (code if code > 0 else 128 - code) or 1


def _run_recorded(job: Job) -> Outcome:
    """Run the job to its end as a flow run; without one, and without retries, if Prefect can't be used."""
    set_defaults()
    if API_URL not in os.environ:
        port = free_port()
        os.environ[API_URL] = url_of(port)
        server = contextlib.ExitStack()
        server.enter_context(local_server(port))
        atexit.register(server.close)  # after Prefect's threads have sent their last logs and events
    with processes.interrupts_deferred():  # an import that is cut short raises whatever it likes
        import httpx
        import prefect.flows  # noqa: F401
        from prefect.exceptions import PrefectException

    try:
        wait_until_ready(os.environ[API_URL])
        _flow(job)
    except JobFailed:
        pass
    except (PrefectException, httpx.HTTPError, OSError, RuntimeError) as error:  # its client raises all four
        first_line = next(iter(str(error).splitlines()), "")
        say(f"Prefect can't record {job.label} ({type(error).__name__}: {first_line}); the job is not affected.")
    return job.outcome or job.wait()


def _flow(job: Job) -> None:
    """Define the flow for this job and call it."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    @task(
        name=job.stage,
        task_run_name=job.label,
        retries=job.limits.retries,
        retry_delay_seconds=job.limits.retry_delay_seconds,
        retry_condition_fn=lambda *_: job.outcome is not None and job.outcome.status is Status.RETRYABLE,
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def attempt() -> None:
        _attempt(job)

    @flow(name=job.stage, flow_run_name=job.label, persist_result=False, validate_parameters=False)
    def stage_flow() -> None:
        attempt()

    # The heartbeat's thread would hold every flow for up to a second at its end, and nothing here reads it.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        stage_flow()


def _attempt(job: Job) -> None:
    """One attempt, watched: raise unless it ended well."""
    from prefect.logging import get_run_logger

    logger: Any = get_run_logger()
    with Observer(job, logger) as observer, contextlib.ExitStack() as stack:
        stack.callback(job.reset)  # before the observer's own end: whatever happens, the job is stopped first
        _wait_for_slot(job, logger)
        while (outcome := job.poll(0.2)) is None:
            observer.look()
        observer.finish(outcome)
    if outcome.status is not Status.OK:
        raise JobFailed(f"{job.label} {outcome.reason}")


def _wait_for_slot(job: Job, logger: logging.Logger) -> None:
    if job.try_start():
        return
    say(f"{job.label} waits for a free GPU slot.")
    logger.info("waiting for a free GPU slot")
    while not job.try_start():
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
