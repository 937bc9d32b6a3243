import copy
import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from alambique import plots
from alambique.core.errors import UserError
from alambique.core.files import write_json
from alambique.pages import TEMPLATES, index_page, inline, kl_points, pair_page, write_index
from alambique.report import read_curve, summarise
from tests.browser import CHROMIUM, browser
from tests.tiny_results import BENCHMARKS, write_results

HOSTILE = '<script>alert("x")</script> & $\\frac{1}'
SETTINGS = {"distill.learning_rate": 3e-4, "student.drop_layers": [1, 2]}


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    return {**summarise(write_results(tmp_path), "p", "t", BENCHMARKS), "fingerprint": "f" * 16, "git_commit": "c" * 40}


@pytest.fixture
def curve(tmp_path: Path, summary: Any) -> Any:
    return read_curve(tmp_path / "results/distill/p_curve.csv")


def parse(page: str) -> ElementTree.Element:
    """The page, known to be well-formed, to hold each id once, and to load nothing from elsewhere."""
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for element in root.iter():
        assert element.tag not in ("script", "link", "iframe", "img", "object", "embed", "base")
        for name, value in element.attrib.items():
            assert "src" not in name
            assert not name.startswith("on")
            if name == "href":
                assert re.fullmatch(r"#[\w-]+|[\w%.-]+\.html", value), value
            for target in re.findall(r"url\((.*?)\)", value):
                assert target.strip("#") in ids
    style = root.findtext("head/style")
    assert style
    assert "url(" not in style
    assert "@import" not in style
    return root


def text_of(root: ElementTree.Element) -> str:
    return re.sub(r"\s+", " ", " ".join(root.itertext()))


def test_a_page_tells_what_the_summary_holds(summary: Any, curve: Any) -> None:
    page = pair_page(summary, curve, SETTINGS, "artifacts/distill/p")
    root = parse(page)
    text = text_of(root)
    for part in (
        "113 M parameters, 84% of its teacher t",
        "0.450 ± 0.010", "0.900 ± 0.020", "26.8 ± 2.1", "0.740 ± 0.022", "50% ± 2%", "80% ±",
        "says nothing: gap of 0.000 within two standard errors",
        "Left out of the teacher: 6 of 30 layers",
        "6,400", "2,100", "812", "270", "1,737",
        "100 of 49,152 tokens", "90.8%", "143.2", "73.2",
        "wheel://x==1/model.gguf", "c" * 64, "d" * 64, "torch 2.13", "f" * 16,
        f"git checkout {'c' * 40}", "make repro T=report@p",
        "distill.learning_rate: 0.0003", "student.drop_layers: [1, 2]",
        'from_pretrained("artifacts/distill/p")',
    ):  # fmt: skip
        assert part in text, part
    assert len(root.findall(".//svg")) == 6  # three plots, each for a column and for a phone
    assert len(page) < 200_000


def test_every_colour_of_the_plots_follows_the_scheme(summary: Any, curve: Any) -> None:
    page = pair_page(summary, curve, {}, "m")
    variables = set(re.findall(r"var\((--\w+)\)", page))
    style = (TEMPLATES / "style.css").read_text()
    for scheme in style.split("@media (prefers-color-scheme: dark)"):
        assert variables <= set(re.findall(r"(--\w+):", scheme))
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        assert not re.search(r"#[0-9a-f]{6}\b", svg)


def contrast(one: str, other: str) -> float:
    """By WCAG 2: from 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_text_is_legible_in_both_schemes() -> None:
    style = (TEMPLATES / "style.css").read_text()
    for block in re.findall(r":root \{(.*?)\}", style, re.S)[:2]:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
        for name in ("ink", "muted", "teacher", "before", "after"):
            assert contrast(colours[name], colours["paper"]) >= 4.5, name


def drop(*names: str) -> Any:
    def change(summary: dict[str, Any]) -> None:
        for name in names:
            del summary[name]

    return change


def without_errors(summary: dict[str, Any]) -> None:
    summary["stderr"] = {name: dict.fromkeys(errors) for name, errors in summary["stderr"].items()}
    for row in summary["benchmarks"].values():
        for who in ("teacher", "before", "after"):
            row[who] |= {"stderr": None, "n": 1}


def not_numbers(summary: dict[str, Any]) -> None:
    for name in ("kl_nats", "agreement", "perplexity", "calibration_error"):
        summary[name] = dict.fromkeys(summary[name], math.nan)
    for row in summary["benchmarks"].values():
        for who in ("teacher", "before", "after"):
            row[who] |= {"value": math.nan, "stderr": math.nan}


@pytest.mark.parametrize(
    "change",
    [
        drop("cache", "lineage", "evaluate", "validation", "git_commit", "fingerprint", "models"),
        drop("gap_recovered", "gap_recovered_stderr"),
        lambda summary: summary["benchmarks"].pop("mmlu"),
        lambda summary: summary["benchmarks"].clear(),
        lambda summary: summary["gap_recovered"].update(kl_nats=-0.3),
        lambda summary: summary["gap_recovered"].update(kl_nats=math.nan),
        lambda summary: summary["cache"].update(draws=50, mass_kept=None, lossless=False),
        lambda summary: summary["distill"].update(tflop_per_s=None, steps=0),
        without_errors,
        not_numbers,
    ],
)
def test_what_is_missing_leaves_the_rest(change: Any, summary: Any) -> None:
    whole = copy.deepcopy(summary)
    change(summary)
    text = text_of(parse(pair_page(summary, [], {}, "m")))
    assert "nan" not in text.lower().split()
    assert "None" not in text
    assert whole["distill"]["method"] in text
    parse(index_page([{**summary, "page": None}]))


def test_names_from_files_are_text(summary: Any, curve: Any) -> None:
    summary["pair"] = summary["teacher"]["key"] = summary["distill"]["method"] = summary["git_commit"] = HOSTILE
    summary["benchmarks"] = {HOSTILE: summary["benchmarks"]["boolq"]}
    summary["lineage"]["from"][HOSTILE] = summary["distill"]["device"] = HOSTILE
    page = pair_page(summary, curve, {HOSTILE: HOSTILE}, HOSTILE)
    assert "<script" not in page
    assert text_of(parse(page)).count("<script>alert(") >= 8
    index = index_page([{**summary, "page": "p.html"}], [HOSTILE])
    assert "<script" not in index
    parse(index)


def test_the_curve_of_divergence_passes_through_the_validations(summary: Any) -> None:
    assert kl_points(summary) == [(0, 0.9, 0.02), (40960, 0.45, 0.01)]
    summary["validation"] = {"10": {"kl_nats": 0.6}, "5": {"kl_nats": 0.7}, "20": {"kl_nats": 0.451}}
    assert kl_points(summary)[1:3] == [(5 * 2048, 0.7, None), (10 * 2048, 0.6, None)]


def pairs(summary: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Pairs of three teachers whose accuracies lie close together."""
    made = []
    for index in range(number):
        one = copy.deepcopy(summary)
        one |= {"pair": f"llama_pruned_to_{index:02}", "page": f"llama_pruned_to_{index:02}.html"}
        one["teacher"]["key"] = f"teacher_{index % 3}"
        one["student"]["num_parameters"] = 50_000_000 + 4_000_000 * index
        one["kl_nats"]["after"] = 0.8 - 0.01 * index
        made.append(one)
    return made


@pytest.mark.parametrize("number", [0, 1, 20])
def test_the_index_lists_every_pair_with_a_link(number: int, summary: Any) -> None:
    root = parse(index_page(pairs(summary, number)))
    assert {link.get("href") for link in root.iter("a")} == {
        f"llama_pruned_to_{index:02}.html" for index in range(number)
    }
    text = text_of(root)
    assert f"{number} pair" in text
    for index in range(number):
        assert f"{0.8 - 0.01 * index:.3f} ± 0.010" in text
        wide = root.find(".//svg[@class='wide']")
        assert wide is not None
        assert f"llama_pruned_to_{index:02}" in text_of(wide)
    assert ("0.740 ± 0.022" in text) == (number > 0)


def test_pairs_without_a_common_benchmark_have_no_plot(summary: Any) -> None:
    two = pairs(summary, 2)
    del two[0]["benchmarks"]["mmlu"], two[1]["benchmarks"]["boolq"]
    root = parse(index_page(two))
    assert root.find(".//svg") is None
    assert "no benchmark in common" in text_of(root)


def test_the_index_is_written_from_the_files(summary: Any, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    with pytest.raises(UserError, match=r"report does not exist: name the folder"):
        write_index(folder)
    write_json(folder / "p.json", summary)
    for name, content in {"old": '{"pair": "old"}', "list": "[1]", "broken": "{", "null": "null"}.items():
        (folder / f"{name}.json").write_text(content)
    text = text_of(parse(write_index(folder).read_text()))
    assert "1 pair " in text
    assert "no reports of this version: broken.json, list.json, null.json, old.json" in text
    assert not list(parse((folder / "index.html").read_text()).iter("a"))  # p has no page yet
    (folder / "p.html").write_text("")
    assert [link.get("href") for link in parse(write_index(folder).read_text()).iter("a")] == ["p.html"]
    json.loads((folder / "p.json").read_text())


def test_plots_in_a_page_keep_their_own_ids(summary: Any) -> None:
    svg = plots.accuracy(summary["benchmarks"])
    first, second = (inline(svg, prefix, "wide", "x") for prefix in ("a", "b"))
    assert set(re.findall(r' id="(.*?)"', first)).isdisjoint(re.findall(r' id="(.*?)"', second))
    for target in re.findall(r'href="#(.*?)"', first):
        assert f' id="{target}"' in first


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
def test_nothing_is_cut_on_a_desk_or_a_phone(summary: Any, curve: Any, tmp_path: Path) -> None:
    """Neither page is wider than the window, nor the table over all pairs wider than its place."""
    summary["benchmarks"] = dict.fromkeys(("boolq", "hellaswag", "mmlu"), summary["benchmarks"]["boolq"])
    index = [{**summary, "pair": f"llama31_8b_pruned_3b_{number}", "page": "p.html"} for number in range(2)]
    pages = {"index": index_page(index), "p": pair_page(summary, curve, SETTINGS, "artifacts/distill/p")}
    wide = "[...document.querySelectorAll('html, .wide-table')].filter(e => e.scrollWidth > e.clientWidth).length"
    with browser(tmp_path / "profile") as screen:
        for name, page in pages.items():
            (tmp_path / f"{name}.html").write_text(page)
            screen.open((tmp_path / f"{name}.html").as_uri())
            assert "0.450" in screen.text_with("0.450")
            for width in (1400, 1100, 390):
                screen.look(width)
                assert screen.value("innerWidth") == width
                assert screen.value(wide) == 0, (name, width)
