import pytest

from alambique.core.errors import UserError
from alambique.planning import machine as module
from alambique.planning.machine import gib, host_mib, machine


def test_this_host_is_timed_and_its_memory_known() -> None:
    found = machine(None, None)
    assert found.device == "cpu"
    assert found.flop_per_s > 1e9
    assert found.memory_mib == host_mib() > 500
    assert "assumption" in found.assumed


def test_a_container_s_limit_counts(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"  # type: ignore[operator]
    limit.write_text("1073741824\n")
    monkeypatch.setattr(module, "_CGROUP", limit)
    assert host_mib() == 1024


@pytest.mark.parametrize("name", module._GPU_MIB)
def test_every_gpu_that_can_be_named_has_a_peak(name: str) -> None:
    found = machine(name, None)
    assert found.flop_per_s > 1e13
    assert machine(name, 10).memory_mib == 10 * 1024


def test_what_can_not_be_planned_for_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean H100"):
        machine("H1000", None)
    with pytest.raises(UserError, match="--memory-gib 0 leaves nothing"):
        machine(None, 0)


def test_a_prediction_may_be_wrong_before_anything_is_impossible() -> None:
    found = machine("H100", 10)
    tight, much = (found.need(0, size * 2**30) for size in (10.5, 13))
    assert not tight.fits
    assert not found.impossible(tight)
    assert found.impossible(much)


def test_memory_is_told_to_three_digits() -> None:
    assert [gib(mib) for mib in (512, 10 * 1024, 2000 * 1024)] == ["0.5", "10", "2,000"]
