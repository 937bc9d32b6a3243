import fcntl
import http.server
import json
import os
import shutil
import signal
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def ask(api: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{api}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def runs_named(api: str, label: str) -> list[dict[str, Any]]:
    """Flow runs of that name; other tests use the same server."""
    return list(ask(api, "/flow_runs/filter", flow_runs={"name": {"any_": [label]}}))


def states(api: str, label: str) -> list[str]:
    return [run["state_type"] for run in runs_named(api, label)]


def test_a_stage_is_a_flow_run_with_logs_and_results(project: Any, prefect_server: str) -> None:
    code, output = project.run("evaluate", "distill", "pair_1", "ok", FAKE_SECONDS="5")
    assert code == 0
    assert "a line for the log" in output
    (run,) = runs_named(prefect_server, "evaluate distill pair_1 ok")
    assert run["state_type"] == "COMPLETED"
    logs = ask(prefect_server, "/logs/filter", logs={"flow_run_id": {"any_": [run["id"]]}})
    assert any("a line for the log" in log["message"] for log in logs)
    artifacts = ask(prefect_server, "/artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}})
    found = {artifact["key"]: artifact for artifact in artifacts}
    assert float(found["progress-evaluate-distill-pair-1-ok"]["data"]) == 100.0
    rows = json.loads(found["results-evaluate-distill-pair-1-ok"]["data"])
    assert rows == [{"name": "tokens_per_s", "value": 12.5}, {"name": "nested.n", "value": 3}]


def test_a_killed_job_is_retried_once(project: Any) -> None:
    code, _ = project.run("evaluate", "killed_once")
    assert code == 0
    assert project.attempts("evaluate", "killed_once") == 2


@pytest.mark.parametrize(("how", "status", "said"), [
    ("refused", 2, "error: the value is wrong."),
    ("broken", 7, "error: evaluate broken failed with exit status 7; see its last lines above."),
])  # fmt: skip
def test_what_a_retry_cannot_help_is_not_retried(
    project: Any, prefect_server: str, how: str, status: int, said: str
) -> None:
    code, output = project.run("evaluate", how)
    assert code == status
    assert project.attempts("evaluate", how) == 1
    assert said in output
    assert "Traceback" not in output
    assert states(prefect_server, f"evaluate {how}") == ["FAILED"]


def test_out_of_attempts(project: Any) -> None:
    (project.root / "pipeline" / "evaluate.py").write_text("import os; os.kill(os.getpid(), 9)")
    code, output = project.run("evaluate", "x", ALAMBIQUE_JOB_RETRIES="2")
    assert code == 128 + 9
    assert "evaluate x was killed (signal 9; often the machine's memory was full) (attempt 3)" in output
    assert "the next `make repro` resumes it" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_stage_saves_and_leaves_nothing(project: Any, prefect_server: str, number: signal.Signals) -> None:
    label = f"evaluate signal{number.value} sleep"
    process = project.start(*label.split())
    project.started_pids()
    wait_for(lambda: states(prefect_server, label) == ["RUNNING"], 60)
    process.send_signal(number)
    time.sleep(0.02)
    process.send_signal(number)  # DVC's own SIGTERM arrives twice
    assert process.wait(15) == 130, project.output()
    assert_nothing_left(project)
    assert (project.root / "seen" / "saved").exists()
    assert states(prefect_server, label) == ["CRASHED"]


@pytest.mark.parametrize(
    ("victim", "how"), [("supervisor", "stubborn"), ("flow", "sleep"), ("flow", "stubborn"), ("job", "sleep")]
)
def test_any_killed_process_leaves_nothing(project: Any, victim: str, how: str) -> None:
    process = project.start("evaluate", how, ALAMBIQUE_JOB_RETRIES="0")
    job_pid, _ = project.started_pids()
    flow_pid = parent_of(job_pid)
    os.kill({"supervisor": process.pid, "flow": flow_pid, "job": job_pid}[victim], signal.SIGKILL)
    assert process.wait(15) != 0
    project.assert_all_end(10)  # a job that ignores SIGTERM outlives a killed supervisor by the time it has to stop
    assert_nothing_left(project)
    if victim != "job" and how == "sleep":
        assert (project.root / "seen" / "saved").exists()


def test_a_stop_before_the_flow_begins(project: Any) -> None:
    process = project.start("evaluate", "sleep")
    project.started_pids()  # Prefect is being imported
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 130, project.output()
    assert "Traceback" not in project.output()
    assert_nothing_left(project)
    assert (project.root / "seen" / "saved").exists()


def test_a_second_interrupt_ends_a_job_that_does_not_listen(project: Any) -> None:
    process = project.start("evaluate", "stubborn", ALAMBIQUE_STOP_SECONDS="100")
    project.started_pids()
    process.send_signal(signal.SIGINT)
    time.sleep(3.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(5) != 0
    assert_nothing_left(project)


def test_prefect_out_of_order_does_not_fail_the_job(project: Any) -> None:
    class Broken(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path.endswith("/health") else 500)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *words: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = f"http://127.0.0.1:{server.server_address[1]}/api"
        code, output = project.run("evaluate", "ok", PREFECT_API_URL=api)
        server.shutdown()
    assert code == 0
    assert "Prefect can't record evaluate ok" in output
    assert "the job is not affected." in output
    assert project.attempts("evaluate", "ok") == 1


# A teacher that does nothing, in two parts that wait for each other; HOW_1of2 and so on say how they end.
FAKE_TEACHER = """
import os, sys, time
from pathlib import Path
from alambique.core.progress import Progress

part = sys.argv[2].replace("/", "of") if len(sys.argv) > 2 else "whole"
how, here = os.environ.get("HOW_" + part, "ok"), Path("seen")
here.mkdir(exist_ok=True)
with (here / part).open("a") as seen:
    seen.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
end = time.monotonic() + 60
while not all((here / name).exists() for name in ("1of2", "2of2")):
    assert time.monotonic() < end
    time.sleep(0.02)
if how == "killed":
    os.kill(os.getpid(), 9)
if how == "refused":
    print("error: the value is wrong.", file=sys.stderr)
    sys.exit(2)
if how == "sleep":
    time.sleep(300)
with Progress("capture", total=1) as progress:
    progress.update(1)
    time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
"""


@pytest.fixture
def in_two_parts(project: Any) -> Any:
    """The command is `teacher tiny`, on a machine with two GPUs."""
    (project.root / "params.yaml").write_text("{teacher: {}, teachers: {tiny: {model: x, capture: {}}}}")
    (project.root / "pipeline/teacher.py").write_text(FAKE_TEACHER)
    project.env["CUDA_VISIBLE_DEVICES"] = "4,GPU-b"
    return project


def seen_by(project: Any) -> dict[str, list[str]]:
    """The GPUs of each attempt, by part."""
    return {path.name: path.read_text().split() for path in (project.root / "seen").iterdir()}


def test_parts_run_side_by_side_on_a_gpu_each_and_then_the_whole(in_two_parts: Any, prefect_server: str) -> None:
    before = {run["id"] for run in runs_named(prefect_server, "teacher tiny")}
    code, output = in_two_parts.run("teacher", "tiny", FAKE_SECONDS="4")
    assert code == 0, output
    assert seen_by(in_two_parts) == {"1of2": ["4"], "2of2": ["GPU-b"], "whole": ["4"]}
    (run,) = [run for run in runs_named(prefect_server, "teacher tiny") if run["id"] not in before]
    assert run["state_type"] == "COMPLETED"
    tasks = ask(prefect_server, "/task_runs/filter", task_runs={"flow_run_id": {"any_": [run["id"]]}})
    assert {(task["name"], task["state_type"]) for task in tasks} == {
        (name, "COMPLETED") for name in ("teacher tiny 1/2", "teacher tiny 2/2", "teacher tiny")
    }
    artifacts = ask(prefect_server, "/artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}})
    assert {"progress-teacher-tiny-1-of-2", "progress-teacher-tiny-2-of-2"} <= {each["key"] for each in artifacts}


def test_a_part_that_is_killed_again_and_again_leaves_its_work_to_the_others(in_two_parts: Any) -> None:
    code, output = in_two_parts.run("teacher", "tiny", HOW_2of2="killed")
    assert code == 0, output
    assert {name: len(gpus) for name, gpus in seen_by(in_two_parts).items()} == {"1of2": 1, "2of2": 2, "whole": 1}
    assert "teacher tiny 2/2 was killed" in output
    assert "; the other jobs take over what it had left." in output


@pytest.mark.parametrize(
    ("first", "second", "status"), [("sleep", "refused", 2), ("killed", "killed", 128 + 9)], ids=["refused", "in vain"]
)
def test_what_nobody_can_take_over_ends_the_stage(in_two_parts: Any, first: str, second: str, status: int) -> None:
    code, output = in_two_parts.run("teacher", "tiny", HOW_1of2=first, HOW_2of2=second, ALAMBIQUE_JOB_RETRIES="0")
    assert code == status, output
    assert set(seen_by(in_two_parts)) == {"1of2", "2of2"}
    assert ("error: the value is wrong." in output) == (status == 2)
    assert_nothing_left(in_two_parts)


@pytest.mark.parametrize("victim", ["supervisor", "flow", "nobody"])
def test_a_stop_reaches_all_parts(in_two_parts: Any, prefect_server: str, victim: str) -> None:
    before = {run["id"] for run in runs_named(prefect_server, "teacher tiny")}
    process = in_two_parts.start("teacher", "tiny", HOW_1of2="sleep", HOW_2of2="sleep")
    wait_for(
        lambda: any(
            run["state_type"] == "RUNNING"
            for run in runs_named(prefect_server, "teacher tiny")
            if run["id"] not in before
        ),
        60,
    )
    if victim == "nobody":
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 130, in_two_parts.output()
    else:
        (flow,) = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if b"pipeline.flow\0teacher" in read(path) and parent_of(int(path.parent.name)) == process.pid
        ]
        os.kill(process.pid if victim == "supervisor" else flow, signal.SIGKILL)
        assert process.wait(15) != 0
    in_two_parts.assert_all_end(30)  # 2 s to stop, 15 to tell Prefect, for two jobs, on a busy host
    assert_nothing_left(in_two_parts)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_without_a_server_a_stage_brings_its_own(bare_project: Any, prefect_database: Path) -> None:
    home = bare_project.root / ".prefect"
    home.mkdir()
    shutil.copy(prefect_database, home / "prefect.db")  # making a new one takes ten seconds
    code, output = bare_project.run("evaluate", "ok")
    assert code == 0
    assert "Prefect" not in output
    assert bare_project.left_behind() == {}
    with sqlite3.connect(home / "prefect.db") as database:
        latest = "(select id from flow_run order by created desc limit 1)"
        runs = database.execute(f"select name, state_type from flow_run where id = {latest}").fetchall()
        logs = database.execute(f"select message from log where flow_run_id = {latest}").fetchall()
    database.close()
    assert runs == [("evaluate ok", "COMPLETED")]
    assert any("a line for the log" in message for (message,) in logs)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def assert_nothing_left(project: Any) -> None:
    assert project.left_behind() == {}
    for lock in (project.root / ".work").glob("*/*"):
        if lock.parent.name in ("slots", "locks"):
            with lock.open() as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
