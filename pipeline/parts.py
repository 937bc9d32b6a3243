"""Into how many jobs a stage is cut, and how many GPUs each of them gets.

Only a capture is cut: its blocks of rows don't depend on each other. How much of the machine one teacher needs is a
setting in params.yaml; how many teachers share the rows is not, because it changes no result. Nor is it how many
processes train a student between them: they are one job, which starts them itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from alambique.core.errors import UserError
from pipeline.jobs import Job, Limits, visible_gpus


def cut(stage: str, key: Sequence[str]) -> tuple[Job, list[Job]]:
    """The job of a stage, and the parts that are to run before it, side by side; one part alone is left out.

    Raises:
        UserError: more jobs are asked for than there are GPUs to run them.
    """
    number, gpus = share(stage, key, Limits.from_env(), len(visible_gpus()))
    words = [f"{part}/{number}" for part in range(1, number + 1)] if number > 1 else []
    return Job(stage, key, gpus), [Job(stage, [*key, word], gpus, beside=number) for word in words]


def share(stage: str, key: Sequence[str], limits: Limits, visible: int) -> tuple[int, int]:
    """How many jobs a stage is cut into on a host with ``visible`` GPUs, and the GPUs that each needs."""
    usable = min(visible, limits.slots or visible)
    if stage == "distill":
        if visible and limits.train_processes > usable:
            raise UserError(
                f"ALAMBIQUE_TRAIN_PROCESSES={limits.train_processes} needs as many GPUs, and {usable} can be used: "
                "lower it, or make more visible (CUDA_VISIBLE_DEVICES, ALAMBIQUE_SLOTS)."
            )
        return 1, limits.train_processes
    if stage != "teacher" or not key:
        return 1, 1
    device_map, processes = _spread(key)
    asked = limits.capture_jobs
    if device_map is not None:
        if asked > max(1, usable):
            raise UserError(
                f"ALAMBIQUE_CAPTURE_JOBS={asked} with teacher.device_map = {device_map} needs at least {asked} GPUs, "
                f"one for each job, and {usable} can be used: lower it, or unset it for one job on all GPUs."
            )
        jobs = asked or 1
        return jobs, max(1, usable // jobs)
    if processes > 1 and visible:
        jobs = asked or max(1, usable // processes)
        if jobs * processes > usable:
            raise UserError(
                f"{jobs} capture job{'s' if jobs > 1 else ''} with teacher.tensor_parallel = {processes} need"
                f"{'' if jobs > 1 else 's'} {jobs * processes} GPUs, and {usable} can be used: lower tensor_parallel"
                f"{' or ALAMBIQUE_CAPTURE_JOBS' if asked > 1 else ''}, or make more visible (CUDA_VISIBLE_DEVICES, "
                "ALAMBIQUE_SLOTS)."
            )
        return jobs, processes
    return asked or max(1, usable), 1


def _spread(key: Sequence[str]) -> tuple[Any, int]:
    """The settings that say on how many GPUs a teacher lies; the job itself checks them."""
    from alambique.core.params import Params  # a tenth of a second, which no other job waits for

    params = Params.load()
    capture: dict[str, Any] = {}
    for section in ("teacher", f"teachers.{key[0]}.capture"):
        found = params.get(section)
        capture |= found if isinstance(found, Mapping) else {}
    processes = capture.get("tensor_parallel")
    return capture.get("device_map"), processes if isinstance(processes, int) else 1
