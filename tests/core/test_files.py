import hashlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from alambique.core import files
from alambique.core.errors import UserError
from alambique.core.files import (
    atomic_folder,
    atomic_path,
    exclusive,
    link_or_copy,
    read_json,
    read_manifest,
    require_free_space,
    sha256_bytes,
    sha256_file,
    sha256_folder,
    sha256_json,
    write_bytes,
    write_json,
    write_manifest,
)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


def test_hashes(tmp_path: Path) -> None:
    content = b"x" * (3 << 20)
    (tmp_path / "f").write_bytes(content)
    assert sha256_file(tmp_path / "f") == sha256_bytes(content) == hashlib.sha256(content).hexdigest()
    assert sha256_json({"b": 1, "a": [1, None]}) == sha256_bytes(b'{"a":[1,null],"b":1}')


def test_folder_hash_is_of_paths_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a/sub").mkdir(parents=True)
    (tmp_path / "a/z").write_text("1")
    (tmp_path / "a/sub/b").write_text("2")
    one, two = sha256_bytes(b"1"), sha256_bytes(b"2")
    lines = sorted([f"{one}  z\n", f"{two}  sub/b\n"])
    before = sha256_folder(tmp_path / "a")
    assert before == sha256_bytes("".join(lines).encode())
    (tmp_path / "a/z").rename(tmp_path / "a/y")
    assert sha256_folder(tmp_path / "a") != before


def test_atomic_file_replaces_or_leaves_alone(tmp_path: Path) -> None:
    target = tmp_path / "new/f"
    write_bytes(target, b"old")
    assert target.stat().st_mode & 0o777 == 0o644

    def fail() -> None:
        with atomic_path(target) as scratch:
            scratch.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert target.read_bytes() == b"old"
    assert leftovers(target.parent) == []


def _write_and_hang(target: Path) -> None:
    with atomic_path(target) as scratch:
        scratch.write_bytes(b"half")
        time.sleep(60)


def test_a_killed_writer_leaves_the_target_alone(tmp_path: Path) -> None:
    write_bytes(tmp_path / "f", b"old")
    process = multiprocessing.get_context("fork").Process(target=_write_and_hang, args=(tmp_path / "f",))
    process.start()
    while not leftovers(tmp_path):
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "f").read_bytes() == b"old"
    assert len(leftovers(tmp_path)) == 1
    with atomic_path(tmp_path / "f") as other:  # of a writer that lives
        write_bytes(tmp_path / "f", b"new")
        assert leftovers(tmp_path) == [other.name]
        other.write_bytes(b"newer")
    assert (tmp_path / "f").read_bytes() == b"newer"


def test_json_round_trip_refuses_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "f.json", {"a": 1.5})
    assert read_json(tmp_path / "f.json") == {"a": 1.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "f.json", {"a": math.nan})
    assert read_json(tmp_path / "f.json") == {"a": 1.5}


def test_unreadable_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"f.json does not exist. Do this\."):
        read_json(tmp_path / "f.json", "Do this.")
    for content in (b'{"a":', b"\xff\xfe"):
        (tmp_path / "f.json").write_bytes(content)
        with pytest.raises(UserError, match=r"f.json is not valid JSON \(.*\). Do this\."):
            read_json(tmp_path / "f.json", "Do this.")


def test_atomic_folder_replaces_or_leaves_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with atomic_folder(target) as scratch:
        (scratch / "a").write_text("1")
        (scratch / "private").write_text("2")
        (scratch / "private").chmod(0o600)  # as safetensors writes it
    assert target.stat().st_mode & 0o777 == 0o755
    assert (target / "private").stat().st_mode & 0o777 == 0o644

    def fail() -> None:
        with atomic_folder(target) as scratch:
            (scratch / "b").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert sorted(path.name for path in target.iterdir()) == ["a", "private"]
    with atomic_folder(target) as scratch:
        (scratch / "c").write_text("3")
    assert [path.name for path in target.iterdir()] == ["c"]
    assert leftovers(tmp_path) == []


def test_a_folder_that_a_killed_writer_left_goes_with_the_next(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    here = os.uname().nodename
    ours, live = f".out.{here}-{dead.pid}-abc.part", f".out.{here}-{os.getpid()}-abc.part"
    names = [ours, live, f".out.elsewhere-{dead.pid}-abc.part", f".out.json.{here}-1-abc.part", ".out.abc.part"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    with atomic_folder(tmp_path / "out"):
        pass
    assert sorted(leftovers(tmp_path)) == sorted(names[1:])


def test_links_share_the_disk_or_fall_back_to_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_text("1")
    link_or_copy(tmp_path / "source", tmp_path / "sub/link")
    assert (tmp_path / "sub/link").samefile(tmp_path / "source")

    def refuse(*_: object) -> None:
        raise OSError("cross-device link")

    monkeypatch.setattr(files.os, "link", refuse)
    link_or_copy(tmp_path / "source", tmp_path / "sub/link")
    assert not (tmp_path / "sub/link").samefile(tmp_path / "source")
    assert (tmp_path / "sub/link").read_text() == "1"


def test_manifest_lists_every_file_with_hash_and_size(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a").write_bytes(b"123")
    manifest = write_manifest(tmp_path, {"kind": "test"})
    assert manifest == {"kind": "test", "files": {"sub/a": {"sha256": sha256_bytes(b"123"), "bytes": 3}}}
    assert read_manifest(tmp_path, "") == manifest
    assert write_manifest(tmp_path, {"kind": "test"}) == manifest  # does not count itself


@pytest.mark.parametrize("content", [[], {"files": 3}, {}])
def test_something_else_is_no_manifest(tmp_path: Path, content: object) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"manifest.json is not a manifest. Make it again"):
        read_manifest(tmp_path, "Make it again.")


def test_too_little_space_is_refused_with_numbers(tmp_path: Path) -> None:
    require_free_space(tmp_path / "new", 1, "the cache")
    with pytest.raises(
        UserError, match=r"^the cache needs about 1,099,511,627,776 MiB in .*, but [\d,]+ MiB are free: fr"
    ):
        require_free_space(tmp_path, 1 << 60, "the cache")


def _hold(lock: Path, log: Path) -> None:
    with exclusive(lock):
        with log.open("a") as stream:
            stream.write("in\n")
        time.sleep(0.05)
        with log.open("a") as stream:
            stream.write("out\n")


def test_exclusive_lets_one_process_in_at_a_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_hold, args=(tmp_path / "locks/l", tmp_path / "log")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (tmp_path / "log").read_text().split() == ["in", "out"] * 3


def _hang(lock: Path, started: Path) -> None:
    with exclusive(lock):
        started.touch()
        time.sleep(60)


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_hang, args=(tmp_path / "l", tmp_path / "started"))
    process.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with exclusive(tmp_path / "l"):
        pass
