"""Every preset is a complete params.yaml: valid for every stage, without a download."""

from pathlib import Path

import pytest

from alambique.core.params import Params
from alambique.core.sources import parse
from pipeline.check import check_params

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "params.yaml", *sorted((ROOT / "presets").glob("*.yaml"))]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_stage_accepts_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # evals/ is found from the checkout
    check_params(path)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_source_is_pinned(path: Path) -> None:
    params = Params.load(path)
    uris = [corpus["uri"] for corpus in params.get("prepare.corpora")]
    uris += [teacher["model"] for teacher in params.get("teachers").values()]
    uris += [pair["student"]["model"] for pair in params.get("pairs").values() if "model" in pair["student"]]
    for uri in uris:
        assert parse(uri).pin, uri


def test_the_real_pairs_that_the_project_promises() -> None:
    assert {path.stem for path in FILES[1:]} == {
        "llama31_8b_pruned_3b",
        "llama31_8b_llama32_3b",
        "qwen25_7b_qwen25_1b5",
        "gpt_oss_20b_pruned_32k",
    }
