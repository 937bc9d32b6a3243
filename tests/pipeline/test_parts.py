import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alambique.core.errors import UserError
from pipeline import jobs
from pipeline.parts import cut, share

LIMITS = jobs.Limits(0, 0, 1, 1, 10.0, 100.0, 10.0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    write_params()
    return tmp_path


def write_params(section: dict[str, Any] | None = None, capture: dict[str, Any] | None = None) -> None:
    tree = {"teacher": section or {}, "teachers": {"tiny": {"model": "x", "capture": capture or {}}}}
    Path("params.yaml").write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ("section", "capture", "asked", "visible", "found"),
    [
        ({}, {}, 0, 0, (1, 1)),  # a CPU
        ({}, {}, 2, 0, (2, 1)),
        ({}, {}, 0, 1, (1, 1)),
        ({}, {}, 0, 8, (8, 1)),
        ({}, {}, 3, 8, (3, 1)),
        ({}, {}, 2, 1, (2, 1)),  # two small teachers on one GPU
        ({"device_map": "auto"}, {}, 0, 0, (1, 1)),
        ({"device_map": "auto"}, {}, 0, 8, (1, 8)),
        ({}, {"device_map": "auto"}, 2, 8, (2, 4)),
        ({"device_map": "auto"}, {"device_map": None}, 0, 8, (8, 1)),
        ({"tensor_parallel": 2}, {}, 0, 0, (1, 1)),
        ({"tensor_parallel": 4}, {"tensor_parallel": 2}, 0, 8, (4, 2)),
        ({"tensor_parallel": 4}, {}, 1, 8, (1, 4)),
        ({"tensor_parallel": "two"}, {}, 0, 2, (2, 1)),  # the job refuses it
    ],
)
def test_how_many_jobs_and_gpus_for_each(
    here: Path,
    section: dict[str, Any],
    capture: dict[str, Any],
    asked: int,
    visible: int,
    found: tuple[int, int],
) -> None:
    write_params(section, capture)
    assert share("teacher", ["tiny"], replace(LIMITS, capture_jobs=asked), visible) == found


def test_only_as_many_gpus_as_there_are_slots(here: Path) -> None:
    assert share("teacher", ["tiny"], replace(LIMITS, slots=2), 8) == (2, 1)
    write_params({"device_map": "auto"})
    assert share("teacher", ["tiny"], replace(LIMITS, slots=2), 8) == (1, 2)


@pytest.mark.parametrize(
    ("section", "asked", "visible", "message"),
    [
        (
            {"device_map": "auto"},
            3,
            2,
            "ALAMBIQUE_CAPTURE_JOBS=3 with teacher.device_map = auto needs at least 3 GPUs, one for each job, and 2 "
            "can be used: lower it, or unset it for one job on all GPUs.",
        ),
        (
            {"device_map": "balanced"},
            2,
            0,
            "ALAMBIQUE_CAPTURE_JOBS=2 with teacher.device_map = balanced needs at least 2 GPUs, one for each job, and "
            "0 can be used: lower it, or unset it for one job on all GPUs.",
        ),
        (
            {"tensor_parallel": 4},
            0,
            2,
            "1 capture job with teacher.tensor_parallel = 4 needs 4 GPUs, and 2 can be used: lower tensor_parallel, or "
            "make more visible (CUDA_VISIBLE_DEVICES, ALAMBIQUE_SLOTS).",
        ),
        (
            {"tensor_parallel": 2},
            3,
            4,
            "3 capture jobs with teacher.tensor_parallel = 2 need 6 GPUs, and 4 can be used: lower tensor_parallel or "
            "ALAMBIQUE_CAPTURE_JOBS, or make more visible (CUDA_VISIBLE_DEVICES, ALAMBIQUE_SLOTS).",
        ),
    ],
)
def test_jobs_without_gpus_of_their_own_are_refused(
    here: Path, section: dict[str, Any], asked: int, visible: int, message: str
) -> None:
    write_params(section)
    with pytest.raises(UserError) as refused:
        share("teacher", ["tiny"], replace(LIMITS, capture_jobs=asked), visible)
    assert str(refused.value) == message


def test_other_stages_are_not_cut_and_read_no_params(here: Path) -> None:
    Path("params.yaml").unlink()
    assert share("distill", ["pair"], replace(LIMITS, capture_jobs=4), 8) == (1, 1)
    assert share("teacher", [], LIMITS, 8) == (1, 1)  # the job says what is missing


def test_processes_that_train_together_are_one_job_with_a_gpu_each() -> None:
    two = replace(LIMITS, train_processes=2)
    assert share("distill", ["pair"], two, 8) == (1, 2)
    assert share("distill", ["pair"], two, 0) == (1, 2)  # on a CPU any number will do
    with pytest.raises(UserError) as refused:
        share("distill", ["pair"], replace(two, slots=1), 8)
    assert str(refused.value) == (
        "ALAMBIQUE_TRAIN_PROCESSES=2 needs as many GPUs, and 1 can be used: lower it, or make more visible "
        "(CUDA_VISIBLE_DEVICES, ALAMBIQUE_SLOTS)."
    )


def test_parts_are_named_and_one_alone_is_none(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.delenv("ALAMBIQUE_CAPTURE_JOBS", raising=False)
    whole, parts = cut("teacher", ["tiny"])
    assert whole.label == "teacher tiny"
    assert [part.label for part in parts] == ["teacher tiny 1/3", "teacher tiny 2/3", "teacher tiny 3/3"]
    assert len({part.progress_file.name for part in (whole, *parts)}) == 4
    assert parts[0].progress_file.name.startswith("teacher-tiny-1of3-")
    monkeypatch.setenv("ALAMBIQUE_CAPTURE_JOBS", "1")
    assert cut("teacher", ["tiny"])[1] == []
