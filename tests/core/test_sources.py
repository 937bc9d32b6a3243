from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from alambique.core import sources
from alambique.core.errors import UserError
from alambique.core.files import sha256_bytes
from alambique.core.sources import TOKENIZER_FILES, content_sha256, fetch, parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIN = "a" * 64


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_uris_come_apart() -> None:
    model = parse(f"hf://org/na.me-1@{COMMIT}")
    assert (model.scheme, model.place, model.member, model.pin) == ("hf", "org/na.me-1", "", COMMIT)
    data = parse(f"hf://datasets/org/name@{COMMIT}/sub/x.parquet")
    assert (data.place, data.member, data.pin) == ("datasets/org/name", "sub/x.parquet", COMMIT)
    file = parse(f"file:data/x y.txt#sha256={PIN}")
    assert (file.scheme, file.place, file.pin) == ("file", "data/x y.txt", PIN)
    wheel = parse(f"wheel://my-dist==1.2.post1+cpu/in/side/#sha256={PIN}")
    assert (wheel.scheme, wheel.place, wheel.member, wheel.pin) == ("wheel", "my-dist==1.2.post1+cpu", "in/side", PIN)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("hf://org/name", "must be pinned to a commit of 40 hex digits"),
        ("hf://org/name@main", "must be pinned to a commit of 40 hex digits .* because branches and tags move"),
        ("hf://name@" + COMMIT, "is not a source that can be fetched: write hf://ORG/NAME@COMMIT, file:PATH#sha256=HA"),
        ("s3://bucket/x", "'s3://bucket/x' is not a source that can be fetched"),
        ("/plain/path", "is not a source"),
        ("", "'' is not a source"),
        ("file:x#sha256=ABC", "has a malformed pin: #sha256= takes 64 lower-case hex digits"),
        ("file:x#md5=abc", "is not a source"),
        (f"wheel://dist/x#sha256={PIN}", "is not a source"),
        ("wheel://dist==1/x#sha256=12", "has a malformed pin"),
        (f"wheel://dist==1/a/../b#sha256={PIN}", "points outside the wheel"),
    ],
)
def test_malformed_uris_are_refused_in_one_sentence(uri: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fetch(uri)


def test_a_file_is_verified_and_the_pin_is_told(here: Path) -> None:
    (here / "x.txt").write_bytes(b"content")
    pin = sha256_bytes(b"content")
    with pytest.raises(
        UserError, match=rf"^x.txt must be pinned: if its content is right, write file:x.txt#sha256={pin}$"
    ):
        fetch("file:x.txt")
    with pytest.raises(
        UserError, match=rf"^x.txt has changed: if its content is right, write file:x.txt#sha256={pin}$"
    ):
        fetch(f"file:x.txt#sha256={PIN}")
    assert fetch(f"file:x.txt#sha256={pin}") == Path("x.txt")
    with pytest.raises(UserError, match=r"file:y.txt.*: y.txt does not exist; paths start at the checkout's root"):
        fetch(f"file:y.txt#sha256={pin}")


def test_a_folder_is_verified_by_its_list(here: Path) -> None:
    (here / "d").mkdir()
    (here / "d/x").write_bytes(b"content")
    pin = content_sha256(here / "d")
    assert fetch(f"file:d#sha256={pin}") == Path("d")
    (here / "d/new").touch()
    with pytest.raises(UserError, match="d has changed"):
        fetch(f"file:d#sha256={pin}")


def test_an_experiment_finds_untracked_data_in_the_main_checkout(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "x.txt").write_bytes(b"content")
    copy = here / ".dvc/tmp/exps/tmp1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    assert fetch(f"file:x.txt#sha256={sha256_bytes(b'content')}") == here / "x.txt"


@pytest.fixture
def hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the hub's client: records what it was asked, and raises ``hub["error"]`` if there is one."""
    asked: dict[str, Any] = {"error": None}

    def snapshot_download(repository: str, **options: Any) -> str:
        if asked["error"] is not None:
            raise asked["error"]
        asked.update(options, repository=repository)
        (here / "snapshot/sub").mkdir(parents=True, exist_ok=True)
        (here / "snapshot/sub/x.parquet").touch()
        return str(here / "snapshot")

    monkeypatch.setattr(sources, "snapshot_download", snapshot_download)
    return asked


def test_models_are_fetched_without_pickles_or_second_copies(here: Path, hub: dict[str, Any]) -> None:
    assert fetch(f"hf://org/name@{COMMIT}") == here / "snapshot"
    assert (hub["repository"], hub["repo_type"], hub["revision"]) == ("org/name", "model", COMMIT)
    assert "*.safetensors" in hub["allow_patterns"]
    assert not {"*.bin", "*.pth", "*"} & set(hub["allow_patterns"])
    assert "original/*" in hub["ignore_patterns"]
    fetch(f"hf://org/name@{COMMIT}", TOKENIZER_FILES)
    assert "*.safetensors" not in hub["allow_patterns"]


def test_one_file_of_a_dataset(here: Path, hub: dict[str, Any]) -> None:
    assert fetch(f"hf://datasets/org/name@{COMMIT}/sub/x.parquet") == here / "snapshot/sub/x.parquet"
    assert hub["repo_type"] == "dataset"
    assert hub["allow_patterns"] == ["sub/x.parquet", "sub/x.parquet/*"]
    with pytest.raises(UserError, match=r"the repository has no sub/y.parquet at that commit"):
        fetch(f"hf://datasets/org/name@{COMMIT}/sub/y.parquet")


def answer(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "hub:"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            GatedRepoError("no", response=answer(403)),
            "is gated: accept its terms on the Hub, then log in with `hf auth",
        ),
        (RevisionNotFoundError("no", response=answer(404)), "the repository has no such commit"),
        (RepositoryNotFoundError("no", response=answer(404)), "is not on the Hub, or private: check the name"),
        (
            LocalEntryNotFoundError("no"),
            r"is not complete on this machine and the Hub can't be reached \(LocalEntryNot",
        ),
        (HfHubHTTPError("no", response=answer(500)), r"the Hub can't be reached \(HfHubHTTPError\): connect once"),
        (httpx2.ConnectError("no"), r"the Hub can't be reached \(ConnectError\)"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(hub: dict[str, Any], error: Exception, message: str) -> None:
    hub["error"] = error
    with pytest.raises(UserError, match=rf"hf://org/name@{COMMIT}.*{message}"):
        fetch(f"hf://org/name@{COMMIT}")


def test_the_real_client_works_offline_from_a_whole_snapshot_only(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache as its client lays it out, with the listing that tells a whole snapshot from half of one."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "cache"))
    with pytest.raises(UserError, match="is not complete on this machine"):
        fetch(f"hf://org/name@{COMMIT}")
    from huggingface_hub import _snapshot_download as client

    snapshot = here / "cache/models--org--name/snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    entry = client.TreeCacheEntry(size=2, blob_id="1", lfs_sha256=None, lfs_size=None, xet_hash=None)
    client.write_tree_cache(
        str(here / "cache/models--org--name"),
        COMMIT,
        {"config.json": entry, "model.safetensors": entry, "x.bin": entry},
    )
    with pytest.raises(UserError, match="is not complete on this machine"):
        fetch(f"hf://org/name@{COMMIT}")
    (snapshot / "model.safetensors").write_text("{}")
    assert fetch(f"hf://org/name@{COMMIT}") == snapshot
