"""One GPU stage as one Prefect flow around its job: `python -m pipeline.flow STAGE KEY...`, started by `pipeline.run`.

A capture on several GPUs has a job for each, mapped side by side, before the one that puts their work together.

The first jobs start at once, before what they don't need is imported, and Prefect records them from beside. Nothing
that Prefect and MLflow do can fail a job: it is said once on stderr, and the job goes on. Prefect caches nothing; DVC
alone decides what runs.
"""

import atexit
import contextlib
import gc
import importlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from alambique.core.errors import UserError
from pipeline import jobs, processes
from pipeline.jobs import Job, Outcome, Status
from pipeline.parts import cut
from pipeline.server import API_URL, free_port, local_server, set_defaults, url_of, wait_until_ready

if TYPE_CHECKING:
    from prefect.futures import PrefectFuture

EXIT_INTERRUPTED = 130  # what shells use for ^C


class JobFailed(Exception):
    """An attempt ended without success; ``may_pass`` says whether another one could end better."""

    def __init__(self, job: Job, outcome: Outcome) -> None:
        super().__init__(f"{job.label} {outcome.reason}")
        self.may_pass = outcome.status is Status.RETRYABLE and not job.cancelled


def say(sentence: str) -> None:
    """Tell the person at the terminal, on a line of its own."""
    print(f"\n{sentence}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Run the job under Prefect and return the stage's exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # started with `&`, a process ignores SIGINT
    signal.signal(signal.SIGTERM, _as_interrupt)
    stage, *key = argv
    try:
        with contextlib.ExitStack() as stack:
            job, parts = cut(stage, key)
            for each in (job, *parts):
                stack.enter_context(each)
            stack.callback(_cancel, parts)
            for first in parts or [job]:
                first.try_start()
            return _exit_status(job, _run_recorded(job, parts))
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


def _cancel(parts: Sequence[Job]) -> None:
    """Stop all parts at once, rather than one after the other."""
    for part in parts:
        part.cancel()
    for part in parts:
        part.stop()


def _in_vain(parts: Sequence[Job]) -> Outcome | None:
    """The outcome of ended parts that makes a job after them useless: a refusal, or no success at all; else None."""
    ended = [part.outcome for part in parts if part.outcome is not None]
    refused = [outcome for outcome in ended if outcome.status is Status.USER_ERROR]
    failed = [outcome for outcome in ended if outcome.status is not Status.OK]
    return next(iter(refused), None) or (failed[0] if failed and len(failed) == len(parts) else None)


def _run_recorded(job: Job, parts: Sequence[Job]) -> Outcome:
    """Run the jobs to their end as a flow run; without one, and without retries, if Prefect can't be used."""
    set_defaults()
    if API_URL not in os.environ:
        port = free_port()
        os.environ[API_URL] = url_of(port)
        server = contextlib.ExitStack()
        server.enter_context(local_server(port))
        atexit.register(server.close)  # after Prefect's threads have sent their last logs and events
    with processes.interrupts_deferred():  # an import that is cut short raises whatever it likes
        _import_behind("prefect.flows")
        import httpx
        import prefect.flows  # noqa: F401
        from prefect.exceptions import PrefectException

    try:
        wait_until_ready(os.environ[API_URL])
        _flow(job, parts)
    except JobFailed:
        pass
    except (PrefectException, httpx.HTTPError, OSError, RuntimeError) as error:  # its client raises all four
        first_line = next(iter(str(error).splitlines()), "")
        say(f"Prefect can't record {job.label} ({type(error).__name__}: {first_line}); the job is not affected.")
    for part in parts if job.outcome is None else ():
        _ = part.outcome or part.wait()
    return _in_vain(parts) or job.outcome or job.wait()


def _import_behind(module: str) -> None:
    """Import in a thread that steps back; the caller's own import says what is wrong, if anything is."""

    def behind() -> None:
        processes.step_back()
        with contextlib.suppress(Exception):
            importlib.import_module(module)

    thread = threading.Thread(target=behind, name=f"import {module}")
    thread.start()
    thread.join()


def _flow(job: Job, parts: Sequence[Job]) -> None:
    """Define the flow for these jobs and call it."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.task_runners import ThreadPoolTaskRunner

    jobs_by_label = {each.label: each for each in (job, *parts)}
    threads: Any = ThreadPoolTaskRunner(max_workers=max(1, len(parts)))

    @task(
        name=job.stage,
        task_run_name="{label}",
        retries=job.limits.retries,
        retry_delay_seconds=job.limits.retry_delay_seconds,
        retry_condition_fn=lambda task, run, state: getattr(state.result(raise_on_failure=False), "may_pass", False),
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def attempt(label: str) -> None:
        _attempt(jobs_by_label[label])

    @flow(
        name=job.stage,
        flow_run_name=job.label,
        task_runner=threads,
        persist_result=False,
        validate_parameters=False,
    )
    def stage_flow() -> None:
        if parts:
            _watch(parts, attempt.map([part.label for part in parts]))
            if (outcome := _in_vain(parts)) is not None:
                raise JobFailed(job, outcome)
        attempt(job.label)

    # The heartbeat's thread would hold every flow for up to a second at its end, and nothing here reads it.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        stage_flow()


def _watch(parts: Sequence[Job], futures: "Sequence[PrefectFuture[None]]") -> None:
    """Wait for the end of all parts. One that is refused stops the others; what any other leaves, the rest takes over.

    Each part runs in a thread of Prefect's; only this one hears of ^C.
    """
    ended: queue.SimpleQueue[tuple[str, Outcome | None]] = queue.SimpleQueue()
    for part, future in zip(parts, futures, strict=True):
        future.add_done_callback(partial(_put, ended, part))
    try:
        for _ in parts:
            label, outcome = ended.get()
            if outcome is not None and outcome.status is Status.USER_ERROR:
                return
            others = any(part.outcome is None or part.outcome.status is Status.OK for part in parts)
            if outcome is not None and outcome.status is not Status.OK and others:
                say(f"{label} {outcome.reason}; the other jobs take over what it had left.")
    finally:
        _cancel(parts)
        for future in futures:
            future.wait()


def _put(ended: "queue.SimpleQueue[tuple[str, Outcome | None]]", part: Job, future: object) -> None:
    ended.put((part.label, part.outcome))


def _attempt(job: Job) -> None:
    """One attempt, watched: raise unless it ended well."""
    from prefect.logging import get_run_logger

    from pipeline.observer import Observer

    logger: Any = get_run_logger()
    with Observer(job, logger) as observer, contextlib.ExitStack() as stack:
        stack.callback(job.reset)  # before the observer's own end: whatever happens, the job is stopped first
        _wait_for_slot(job, logger)
        while (outcome := job.poll(0.2)) is None:
            observer.look()
        observer.finish(outcome)
    if outcome.status is not Status.OK:
        raise JobFailed(job, outcome)


def _wait_for_slot(job: Job, logger: logging.Logger) -> None:
    if job.try_start():
        return
    say(f"{job.label} waits for a free GPU slot.")
    logger.info("waiting for a free GPU slot")
    while not job.try_start():
        time.sleep(0.5)


if __name__ == "__main__":
    # Importing makes so many objects that looking for garbage among them takes a tenth of the time, here in a process
    # that shares its cores with a job's own start.
    gc.set_threshold(50_000)
    status = 1  # what Python gives an exception that nobody caught
    # First in, last out: after Prefect's threads have sent what they hold. Taking MLflow apart would take a second.
    atexit.register(lambda: importlib.import_module("pipeline.job").leave(status))
    status = main(sys.argv[1:])
