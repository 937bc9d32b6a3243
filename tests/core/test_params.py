from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, ValidationError

from alambique.core.errors import UserError
from alambique.core.params import Config, Params, validate


class Linear(Config):
    kind: Literal["linear"] = "linear"
    slope: float = 1.0


class Cosine(Config):
    kind: Literal["cosine"] = "cosine"
    warmup: int = 0


class Corpus(Config):
    uri: str
    rows: int | None = Field(None, ge=1)


class Section(Config):
    seq_len: int = Field(256, ge=2)
    mode: Literal["fast", "slow"] = "fast"
    size: int | Literal["auto"] = "auto"
    corpora: list[Corpus] = Field(default_factory=list)
    named: dict[str, Corpus] = Field(default_factory=dict)
    schedule: Linear | Cosine = Field(Linear(), discriminator="kind")
    extra: Corpus | None = None
    text: str = ""


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"seqlen": 3}, "unknown key seqlen; did you mean seq_len?"),
        ({"zzz": 3}, "unknown key zzz; known: corpora, extra, mode, named, schedule, seq_len, size, text"),
        ({"seq_len": 1}, "seq_len = 1 should be greater than or equal to 2"),
        ({"seq_len": "x"}, "seq_len = 'x' should be a valid integer, unable to parse string as an integer"),
        ({"seq_len": 2.5}, "seq_len = 2.5 should be a valid integer, got a number with a fractional part"),
        ({"mode": "fest"}, "mode = 'fest' should be 'fast' or 'slow'"),
        (
            {"size": "atuo"},
            "size = 'atuo' should be a valid integer, unable to parse string as an integer or should be 'auto'",
        ),
        ({"corpora": {"a": 1}}, "corpora should be a valid list"),
        ({"corpora": ["x"]}, "corpora[0] = 'x' should be a mapping"),
        ({"corpora": [{"uri": "a"}, {}]}, "corpora[1].uri is missing"),
        ({"corpora": [{"uri": "a", "row": 1}]}, "unknown key corpora[0].row; did you mean rows?"),
        ({"corpora": [{"uri": "a", "rows": 0}]}, "corpora[0].rows = 0 should be greater than or equal to 1"),
        ({"named": {"one": {"uri": "a", "row": 1}}}, "unknown key named.one.row; did you mean rows?"),
        ({"schedule": {"kind": "cosine", "warmpu": 1}}, "unknown key schedule.warmpu; did you mean warmup?"),
        ({"schedule": {"kind": "linear", "warmup": 1}}, "unknown key schedule.warmup; known: kind, slope"),
        ({"schedule": {"kind": "cubic"}}, "schedule.kind must say which kind this is: one of 'linear', 'cosine'"),
        ({"schedule": {"slope": 1}}, "schedule.kind must say which kind this is"),
        ({"extra": {"uri": "a", "rwos": 3}}, "unknown key extra.rwos; did you mean rows?"),
        ({"extra": 3}, "extra = 3 should be a mapping"),
        ({"text": ["long"] * 100}, "text = " + repr(["long"] * 100)[:80] + "… should be a valid string"),
    ],
)  # fmt: skip
def test_every_mistake_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(Section, values, "params.yaml: prepare")
    assert str(caught.value) == f"params.yaml: prepare: {sentence}"


def test_infinity_and_nan_are_refused() -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(UserError, match=r"slope = (inf|nan) should be a finite number"):
            validate(Section, {"schedule": {"kind": "linear", "slope": value}}, "here")


def test_configs_are_frozen() -> None:
    section = Section()
    with pytest.raises(ValidationError, match="frozen"):
        section.seq_len = 3


def load(tmp_path: Path, text: str) -> Params:
    (tmp_path / "params.yaml").write_text(text)
    return Params.load(tmp_path / "params.yaml")


def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path) -> None:
    params = load(tmp_path, "distill: {schedule: {kind: linear, slope: 1e-3}, text: yes}\n")
    assert params.get("distill.schedule.slope") == 0.001
    assert params.get("distill.text") == "yes"  # YAML 1.2: not a boolean


def test_sections_are_merged_in_depth_and_reads_recorded() -> None:
    params = Params({
        "prepare": {"seq_len": 8, "named": {"a": {"uri": "x", "rows": 1}}, "corpora": [{"uri": "x"}]},
        "pairs": {"p": {"prepare": {"named": {"a": {"rows": 2}}, "corpora": [{"uri": "y"}]}}},
    })  # fmt: skip
    section = params.section(Section, "prepare", "pairs.p.prepare")
    assert section.seq_len == 8
    assert section.named == {"a": Corpus(uri="x", rows=2)}
    assert section.corpora == [Corpus(uri="y")]  # lists are replaced
    assert params.reads == ["prepare", "pairs.p.prepare"]
    assert params.tree["prepare"]["named"]["a"]["rows"] == 1  # the file's own values stay


def test_an_override_replaces_a_scalar_by_a_mapping_and_back() -> None:
    params = Params({"a": {"extra": None, "named": {"k": {"uri": "x"}}}, "b": {"extra": {"uri": "y"}, "named": {}}})
    section = params.section(Section, "a", "b")
    assert section.extra == Corpus(uri="y")
    assert section.named == {"k": Corpus(uri="x")}


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("pears.p", r"^params.yaml: the top level has no key pears; did you mean pairs\?"),
        ("pairs.q", r"^params.yaml: pairs has no key q; known: p$"),
        ("pairs.p.student.x", r"^params.yaml: pairs.p.student has no key x$"),
    ],
)
def test_missing_keys_are_named(dotted: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Params({"pairs": {"p": {"student": 3}}}).get(dotted)


def test_a_section_must_be_a_mapping() -> None:
    with pytest.raises(UserError, match=r"params.yaml: prepare must be a mapping, not \[1\]"):
        Params({"prepare": [1]}).section(Section, "prepare")
    with pytest.raises(UserError, match=r"params.yaml: a \+ b: unknown key seqlen"):
        Params({"a": {}, "b": {"seqlen": 1}}).section(Section, "a", "b")


def test_dictionary_keys_are_checked() -> None:
    assert Params({"pairs": {"a_1": 1, "b": 2}}).keys("pairs") == ["a_1", "b"]
    with pytest.raises(
        UserError, match=r"pairs.Big-One is not a usable name: use lower-case letters, digits and _ only"
    ):
        Params({"pairs": {"Big-One": 1}}).keys("pairs")
    with pytest.raises(UserError, match=r"pairs.3 is not a usable name"):
        Params({"pairs": {3: 1}}).keys("pairs")
    for empty in ({}, None, []):
        with pytest.raises(UserError, match="pairs must name at least one entry"):
            Params({"pairs": empty}).keys("pairs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not valid YAML: "),
        ("a: 1\na: 2\n", "is not valid YAML: .*duplicate key"),
        ("- 1\n", "must hold a mapping of sections, not list"),
        ("", "must hold a mapping of sections, not NoneType"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"params.yaml does not exist: run in the project's folder, or copy one of preset"
    ):
        Params.load(tmp_path / "params.yaml")
