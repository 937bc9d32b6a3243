"""Four checkouts that share one MLflow database and nothing else run at once: each row is as whole as a lone run's.

Minutes long: it runs with ALAMBIQUE_LONG_TESTS set. Run it with `-s` to watch.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_checkout import Checkout, say

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("ALAMBIQUE_LONG_TESTS"), reason="six minutes: runs with ALAMBIQUE_LONG_TESTS=1"
    ),
]

# Different sections, so that the checkouts are never in step; each ends in a row of its own.
CHANGES: tuple[dict[str, dict[str, Any]], ...] = (
    {"distill": {"seed": 1}},
    {"distill": {"learning_rate": 1e-3}},
    {"prepare": {"seed": 5}},
    {"teacher": {"top_k": 8}},
)
SILENT = re.compile(r"database is locked|can't (?:follow|record)|alembic|Traceback|error:", re.IGNORECASE)


def start(checkout: Checkout, log: Path) -> subprocess.Popen[bytes]:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline.repro"],
            cwd=checkout.root, env=checkout.env, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip


def clone(original: Checkout, root: Path, change: dict[str, dict[str, Any]], uri: str) -> Checkout:
    original.command("git", "clone", "--quiet", ".", str(root))
    checkout = Checkout(root)
    checkout.env |= {"MLFLOW_TRACKING_URI": uri, "CUDA_VISIBLE_DEVICES": ""}
    checkout.params = {**original.params, **{name: original.params[name] | new for name, new in change.items()}}
    checkout.write_params()
    checkout.commit()
    return checkout


def wait_for_all(runs: list[subprocess.Popen[bytes]], logs: list[Path], seconds: float) -> None:
    """Wait for the runs, telling every fifteen seconds which stage each is at."""
    for look in range(round(seconds)):
        if look % 15 == 0:
            say(" | ".join((Checkout.stages_run(log.read_text()) or ["-"])[-1] for log in logs))
        if all(run.poll() is not None for run in runs):
            return
        time.sleep(1)
    pytest.fail(str([log.read_text()[-1500:] for log in logs]))


def test_four_at_once_write_four_whole_rows(tmp_path: Path) -> None:
    original = Checkout(tmp_path / "lone")
    original.build()
    began = time.monotonic()
    original.command(sys.executable, "-m", "pipeline.repro")
    say(f"a lone run: {time.monotonic() - began:.0f} s")
    (lone,) = original.rows()

    (tmp_path / "shared").mkdir()
    uri = f"sqlite:///{tmp_path}/shared/mlflow.db"
    checkouts = [clone(original, tmp_path / f"checkout{i}", change, uri) for i, change in enumerate(CHANGES)]
    logs = [tmp_path / f"checkout{i}.log" for i in range(len(CHANGES))]
    began = time.monotonic()
    runs = [start(checkout, log) for checkout, log in zip(checkouts, logs, strict=True)]
    wait_for_all(runs, logs, 900)
    say(f"four at once: {time.monotonic() - began:.0f} s")

    for run, log in zip(runs, logs, strict=True):
        assert run.returncode == 0, log.read_text()[-4000:]
        assert SILENT.findall(log.read_text()) == [], log.read_text()
    servers = [port for log in logs for port in re.findall(r"Prefect shows the jobs at \S+:(\d+)", log.read_text())]
    assert len(set(servers)) == len(CHANGES), servers

    found = {row["tags"]["fingerprint"]: row for row in original.rows(uri)}
    assert len(found) == len(CHANGES)
    for checkout, change in zip(checkouts, CHANGES, strict=True):
        report = checkout.read("results/report/tiny_half.json")
        row = found[report["fingerprint"]]
        for kind in ("params", "metrics", "tags"):
            assert row[kind].keys() == lone[kind].keys(), kind
        for kind in ("status", "artifacts", "versions"):
            assert row[kind] == lone[kind], kind
        assert [name for name, _ in row["datasets"]] == [name for name, _ in lone["datasets"]]
        for section, values in change.items():
            assert all(row["params"][f"{section}.{name}"] == str(value) for name, value in values.items())
        assert row["metrics"]["eval/kl_nats"] == report["kl_nats"]["after"]
        assert row["tags"]["model_path"] == str(checkout.root / "artifacts/distill/tiny_half")
