"""``python -m benchmarks.run CASE [--record]``: test, measure, print a table, and end with one line of JSON."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from alambique.core.errors import UserError
from alambique.core.measure import default_device
from benchmarks import records
from benchmarks.cases import CASES, Case, Options, Outcome


def main(arguments: list[str] | None = None) -> int:
    """Run the cases named on the command line; the exit status is 0, or 1 if tests failed, or 2 for bad input."""
    parsed = _parse(arguments)
    try:
        return _run(parsed)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _run(parsed: argparse.Namespace) -> int:
    cases: dict[str, Case] = {name: CASES[name] for name in parsed.case}
    if parsed.record and (parsed.quick or parsed.skip_tests):
        raise UserError("benchmarks: --record keeps only tested figures of full size: leave out --quick, --skip-tests.")
    if not parsed.skip_tests:
        status = run_tests(sorted({path for case in cases.values() for path in case.tests}), parsed.device)
        if status != 0:
            print("benchmarks: the tests of this code fail, so it is not timed: make them pass first.", file=sys.stderr)
            return 1
    options = Options(parsed.device, parsed.quick, parsed.repeats, tuple(parsed.only))
    summaries = {name: _measure(name, case, options, parsed.record) for name, case in cases.items()}
    print(json.dumps(summaries if len(summaries) > 1 else next(iter(summaries.values()))))
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    about = "\n".join(f"  {name:15} {case.about}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=f"{__doc__}\n\ncases:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", nargs="+", choices=sorted(CASES), metavar="CASE")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/results/CASE.jsonl")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: shows that it runs, measures nothing")
    parser.add_argument("--skip-tests", action="store_true", help="for development: nothing can be recorded")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each contender (default 5)")
    parser.add_argument("--only", nargs="*", default=[], help="shapes or contenders to keep")
    parser.add_argument(
        "--device", type=torch.device, default=default_device(), help="default: the GPU if there is one"
    )
    return parser.parse_args(arguments)


def run_tests(paths: list[str], device: torch.device) -> int:
    """Run pytest on ``paths`` in a child process, on a GPU those marked for one; return its exit status."""
    present = [path for path in paths if (records.ROOT / path).exists()]
    missing = sorted(set(paths) - set(present))
    if missing:
        raise UserError(f"benchmarks: {', '.join(missing)} is not there, so the code can't be vouched for.")
    marked, environment = [], {**os.environ, "PYTHONPATH": os.pathsep.join([str(records.ROOT), *sys.path[1:]])}
    if device.type == "cuda":  # other versions than the pinned ones have warnings of their own
        marked = ["-m", "gpu", "-W", "default"]
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # tests ask for determinism
    command = [sys.executable, "-m", "pytest", "-x", *marked, *present]
    print("$", *command[1:], flush=True)
    return subprocess.run(command, cwd=records.ROOT, env=environment, check=False).returncode


def _measure(name: str, case: Case, options: Options, record: bool) -> dict[str, Any]:
    try:
        module = importlib.import_module(case.module)
    except ModuleNotFoundError as error:
        raise UserError(f"benchmarks: case {name} needs {error.name}, which is not installed.") from error
    stamped = records.stamp(options.device, case.measures)
    outcome: Outcome = module.run(options)
    _print(name, outcome, stamped)
    if record:
        print(f"{len(outcome.rows)} rows appended to {records.append(name, outcome.rows, stamped)}")
    return outcome.summary


def _print(name: str, outcome: Outcome, stamped: dict[str, Any]) -> None:
    columns = list(dict.fromkeys(key for row in outcome.rows for key in row))
    table = Table(*columns, title=f"{name}: {stamped['device']}, {stamped['threads']} threads, code {stamped['code']}")
    for row in outcome.rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for note in outcome.notes:
        console.print(f"- {note}", highlight=False, markup=False)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
