"""The three laws of the house, and the smaller rules that keep it small: an exception is a visible line in a diff."""

import ast
import importlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest
from dvc.repo import Repo

from alambique.core.params import Params
from pipeline.code import code_of

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("prepare", "teacher", "student", "distill", "evaluate", "report")
CODE = "code"  # a stage without settings: it hashes the code of the others
# How jobs are run, never what they compute: a change here must not make a result stale, so no stage may import them.
ORCHESTRATION = {
    f"pipeline.{name}"
    for name in (
        "run",
        "flow",
        "jobs",
        "parts",
        "observer",
        "processes",
        "server",
        "terminal",
        "repro",
        "check",
        "deploy",
    )
}
SOURCES = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("pipeline/*.py")])


@cache
def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph("alambique", "pipeline", cache_dir=None, exclude_type_checking_imports=True)


@cache
def dvc_stages() -> list[Any]:
    with Repo(str(ROOT)) as repo:
        return list(repo.index.stages)


def stage_name(dvc_stage: Any) -> str:
    """`evaluate_teacher@smollm2-boolq` belongs to the stage `evaluate`: a suffix tells variants of one module apart."""
    return str(dvc_stage.name).split("@")[0].split("_")[0]


def file_of(module: str) -> str:
    base = ROOT / ("src" if module.startswith("alambique") else "") / module.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "src" else parts).removesuffix(".__init__")


# ---- law 1: one word, four places


def test_a_stage_has_one_name_in_four_places() -> None:
    params = Params.load(ROOT / "params.yaml").tree
    assert {stage_name(stage) for stage in dvc_stages()} == {*STAGES, CODE}
    assert set(params) == {*STAGES, "teachers", "pairs"}
    for name in (*STAGES, CODE):
        assert (ROOT / f"pipeline/{name}.py").is_file()
        assert (ROOT / f"tests/pipeline/test_{name}.py").is_file()
    for stage in dvc_stages():
        assert f"{stage.cmd} ".startswith(f"exec python -m pipeline.run {stage_name(stage)} "), stage.cmd


# ---- law 2: an import is a cache edge

# The public API only names modules until someone asks for one, so it can't change what a stage computes.
LAZY = "src/alambique/__init__.py"


def test_the_public_api_imports_nothing_by_itself() -> None:
    code = "import sys, alambique; sys.exit(any(m.startswith(('alambique.', 'torch')) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", STAGES)
def test_every_module_that_a_stage_imports_is_a_dependency(name: str) -> None:
    graph = import_graph()
    root = f"pipeline.{name}"
    modules = {root, *graph.find_upstream_modules(root)}
    # Python runs the __init__.py of every package on the way to a module.
    modules |= {module.rsplit(".", i)[0] for module in modules for i in range(1, module.count(".") + 1)}
    files = {file_of(module) for module in modules}
    files = {file for file in files if (ROOT / file).stat().st_size > 0} - {LAZY}
    listed = {path.as_posix() for path in code_of(name)}
    missing = files - listed
    assert not missing, f"{name} imports these, so they belong in its list in pipeline/code.yaml: {sorted(missing)}"


def test_every_stage_depends_on_its_list_of_code_and_that_on_all_code() -> None:
    for stage in dvc_stages():
        deps = {dep.def_path for dep in stage.deps}
        if stage.name == CODE:
            assert deps == {"pipeline", "src/alambique"}
            assert {out.def_path for out in stage.outs} == {f"results/code/{name}.txt" for name in STAGES}
        else:
            assert f"results/code/{stage_name(stage)}.txt" in deps, stage.name
    for path in {path for name in STAGES for path in code_of(name)}:
        assert path.as_posix().startswith(("pipeline/", "src/alambique/")), path


@pytest.mark.parametrize("name", STAGES)
def test_no_stage_imports_the_orchestration(name: str) -> None:
    reached = import_graph().find_upstream_modules(f"pipeline.{name}") & ORCHESTRATION
    assert not reached, f"changing {reached} would make {name} stale"


def test_the_dear_teacher_stage_knows_nothing_of_losses_and_training() -> None:
    reached = import_graph().find_upstream_modules("pipeline.teacher")
    assert not {m for m in reached if m.startswith(("alambique.losses", "alambique.train", "alambique.kernels"))}


def test_the_params_that_a_stage_reads_are_those_that_dvc_watches() -> None:
    for stage in dvc_stages():
        if (name := stage_name(stage)) == CODE:
            continue
        declared = {key for dep in stage.deps for key in getattr(dep, "params", [])}
        key = stage.cmd.split()[5:]
        params = Params.load(ROOT / "params.yaml")
        importlib.import_module(f"pipeline.{name}").settings(params, *key)
        reads = set(params.reads)
        hidden = {r for r in reads if not any(r == d or r.startswith(f"{d}.") for d in declared)}
        assert not hidden, f"{stage.name} reads {sorted(hidden)}, which dvc.yaml does not list"
        idle = {d for d in declared if not any(r == d or r.startswith(f"{d}.") for r in reads)}
        assert not idle, f"{stage.name} lists {sorted(idle)} in dvc.yaml but never reads it"


# ---- layers

SIBLINGS = ("data", "models", "losses", "kernels", "cache")
MAY_IMPORT = {
    "core": (),
    **dict.fromkeys(SIBLINGS, ("core",)),
    "losses": ("core", "kernels"),
    "train": ("core", *SIBLINGS, "heldout"),
    "evaluate": ("core", *SIBLINGS),
    "scoring": ("core", *SIBLINGS, "evaluate"),
    "heldout": ("core", *SIBLINGS),
    "provenance": ("core",),
    "report": ("core", "provenance"),
    "pages": ("core", "plots", "report"),
    "plots": ("core",),
    "screen": (),
    "planning": ("core", *SIBLINGS, "train", "screen"),
    "plan": ("core", *SIBLINGS, "train", "evaluate", "heldout", "planning"),
    "cli": ("core", *SIBLINGS, "pages", "plan", "planning"),
}


def test_imports_go_one_way() -> None:
    graph = import_graph()
    for module in graph.modules:
        parts = module.split(".")
        if parts[0] != "alambique" or len(parts) == 1:
            continue
        for imported in graph.find_modules_directly_imported_by(module):
            assert imported.startswith("alambique."), f"{module} imports {imported}"
            layer = imported.split(".")[1]
            assert layer == parts[1] or layer in MAY_IMPORT[parts[1]], f"{module} must not import {imported}"


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("prefect", {"pipeline/flow.py", "pipeline/observer.py", "pipeline/deploy.py"}),
        ("mlflow", {"pipeline/tracking.py"}),
        ("dvc", set()),
    ],
)
def test_each_orchestrator_has_one_door(package: str, homes: set[str]) -> None:
    pattern = re.compile(rf"^\s*(import|from) {package}\b", re.M)
    users = {path.relative_to(ROOT).as_posix() for path in SOURCES if pattern.search(path.read_text())}
    assert users <= homes


# ---- small is readable


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") < 400, f"{path} is too long"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            code = node.body[1:] if ast.get_docstring(node) else node.body  # documenting at length is welcome
            length = (node.end_lineno or 0) - code[0].lineno + 1 if code else 0
            # A kernel keeps its tiles in registers from the first line to the last: cutting it up hides that.
            limit = 70 if "triton.jit" in {ast.unparse(mark) for mark in node.decorator_list} else 50
            assert length < limit, f"{path.name}: {node.name} has {length} lines"


def test_init_files_are_empty_but_for_the_public_api() -> None:
    for path in SOURCES:
        if path.name == "__init__.py" and path != ROOT / "src/alambique/__init__.py":
            assert path.read_text() == "", path


BANNED = {
    r"except Exception|except BaseException|except:": "catch what you can handle, by name",
    r"\bpickle\b|weights_only=False": "nothing loads pickles",
    r"trust_remote_code=True": "nothing loads remote code",
    r"https?://(?!127\.0\.0\.1|localhost)": "no host is named in code",
}


@pytest.mark.parametrize("pattern", BANNED)
def test_banned_words(pattern: str) -> None:
    guilty = [path.name for path in SOURCES if re.search(pattern, path.read_text())]
    assert not guilty, f"{guilty}: {BANNED[pattern]}"


def test_no_utils() -> None:
    assert not [path for path in SOURCES if path.stem in {"utils", "helpers", "common", "misc"}]


def test_tests_mirror_the_tree() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.stem.removeprefix("test_")
        folder = path.parent.relative_to(ROOT / "tests")
        homes = [ROOT / "src/alambique" / folder, ROOT / folder, ROOT]
        found = any((home / f"{name}.py").exists() or (home / name).is_dir() for home in homes)
        assert found or name in WHOLE_HOUSE, f"{path} tests nothing of its own name"


# Tests of properties that no single module owns.
WHOLE_HOUSE = {
    "architecture", "public_api", "contract", "end_to_end", "presets", "loss_cases", "compiles", "on_gpu", "kills",
    "four_checkouts", "in_a_browser",
}  # fmt: skip


def test_the_readme_tree_is_the_tree() -> None:
    tree = re.search(r"```text\n(README\.md.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert tree, "README.md shows the tree in a ```text block that starts with README.md"
    named = {word for line in tree[1].splitlines() for word in re.findall(r"[\w./-]+", line.split("   ")[0])}
    for word in named:
        assert (ROOT / word).exists() or any(ROOT.glob(f"**/{word}")), f"README.md names {word}, which does not exist"
    for entry in sorted(ROOT.iterdir()):
        if entry.name in TRACKED_TOP and entry.name not in {word.split("/")[0] for word in named}:
            pytest.fail(f"README.md's tree leaves out {entry.name}")


TRACKED_TOP = {
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt",
    "dvc.yaml", "params.yaml", "prefect.yaml", "presets", "pipeline", "src", "evals", "tests", "benchmarks", "docs",
}  # fmt: skip
