import json
from pathlib import Path

import pytest

from benchmarks import plots, records

STAMP = {"device": "test"}
MEMORY = [
    {"contender": name, "tokens": tokens, "counted_gib": tokens / 8192 * factor, "peak_gib": None, **STAMP}
    for name, factor in (("fused", 1.0), ("dense", 9.0))
    for tokens in (8192, 16384)
]
SPEED = [{"contender": "fused", "shape": "2048x576x49152", "dtype": "float32", "median_s": 1.0, **STAMP}]


def test_plots_are_drawn_from_rows_and_are_the_same_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for case, rows in (("loss_memory", MEMORY), ("loss_speed", SPEED)):
        (tmp_path / f"{case}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    texts = []
    for name in ("one", "two"):
        assert plots.main(tmp_path / name) == 0
        texts.append([(tmp_path / name / f"{plot}.svg").read_text() for plot in ("loss_memory", "loss_time")])
    assert texts[0] == texts[1]
    assert all(text.startswith("<?xml") for text in texts[0])


def test_only_the_newest_row_of_a_kind_counts() -> None:
    rows = [{"contender": "a", "tokens": 1, "v": 1}, {"contender": "b", "tokens": 1, "v": 2}]
    rows.append({"contender": "a", "tokens": 1, "v": 3})
    assert [row["v"] for row in plots.newest(rows, ("contender", "tokens"))] == [3, 2]


def test_without_rows_there_is_nothing_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert plots.main(tmp_path / "plots") == 0
    assert list((tmp_path / "plots").iterdir()) == []
