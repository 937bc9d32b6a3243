"""The real pip, offline, on wheels made here."""

import base64
import hashlib
import multiprocessing
import zipfile
from pathlib import Path

import pytest

from alambique.core import wheels
from alambique.core.errors import UserError
from alambique.core.files import sha256_bytes
from alambique.core.sources import fetch

CONTENT = {"data_dist/a.txt": b"alpha", "data_dist/folder/b.txt": b"beta", "data_dist/folder/sub/c.txt": b"gamma"}
PIN = sha256_bytes(b"alpha")


def make_wheel(folder: Path, name: str = "data_dist", files: dict[str, bytes] | None = None) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Python: <3\nRequires-Dist: absent-thing\n"
    members = {
        **(CONTENT if files is None else files),
        f"{name}/__init__.py": b"raise SystemExit('imported')",
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    records = [
        f"{member},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
        for member, data in members.items()
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*records, f"{info}/RECORD,,", ""]))
    return path


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    (tmp_path / "shop").mkdir()
    make_wheel(tmp_path / "shop")
    monkeypatch.setenv("ALAMBIQUE_ASSETS", str(tmp_path / "assets"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shop"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "shop"


def test_a_member_and_a_folder_are_fetched_once(shop: Path) -> None:
    path = fetch(f"wheel://data-dist==1.0/data_dist/a.txt#sha256={PIN}")
    assert path.read_bytes() == b"alpha"
    (shop / "data_dist-1.0-py3-none-any.whl").unlink()  # from here on, pip would find nothing
    assert fetch(f"wheel://data-dist==1.0/data_dist/a.txt#sha256={PIN}") == path
    lines = sorted([f"{sha256_bytes(b'beta')}  b.txt\n", f"{sha256_bytes(b'gamma')}  sub/c.txt\n"])
    pin = sha256_bytes("".join(lines).encode())
    folder = fetch(f"wheel://data-dist==1.0/data_dist/folder#sha256={pin}")
    assert (folder / "sub/c.txt").read_bytes() == b"gamma"


def test_the_sentence_gives_the_pin_to_write(shop: Path) -> None:
    right = rf"write wheel://data-dist==1\.0/data_dist/a\.txt#sha256={PIN}$"
    with pytest.raises(UserError, match=rf"data_dist/a.txt in data-dist==1.0 must be pinned: .*{right}"):
        fetch("wheel://data-dist==1.0/data_dist/a.txt")
    with pytest.raises(UserError, match=rf"data_dist/a.txt in data-dist==1.0 differs from its pin: .*{right}"):
        fetch(f"wheel://data-dist==1.0/data_dist/a.txt#sha256={'0' * 64}")


def test_a_damaged_extraction_is_made_again(shop: Path) -> None:
    path = fetch(f"wheel://data-dist==1.0/data_dist/a.txt#sha256={PIN}")
    path.write_bytes(b"alp")
    assert fetch(f"wheel://data-dist==1.0/data_dist/a.txt#sha256={PIN}").read_bytes() == b"alpha"


def test_a_damaged_wheel_is_fetched_again(shop: Path, tmp_path: Path) -> None:
    path = fetch(f"wheel://data-dist==1.0/data_dist/a.txt#sha256={PIN}")
    path.unlink()
    stored = tmp_path / "assets/wheels/data-dist==1.0.whl"
    stored.write_bytes(stored.read_bytes()[:200])
    assert fetch(f"wheel://data-dist==1.0/data_dist/a.txt#sha256={PIN}").read_bytes() == b"alpha"


def test_what_a_killed_download_left_is_not_used(shop: Path, tmp_path: Path) -> None:
    part = tmp_path / "assets/wheels/data-dist==1.0.part"
    part.mkdir(parents=True)
    (part / "data_dist-1.0-py3-none-any.whl").write_bytes(b"half")
    assert fetch(f"wheel://data-dist==1.0/data_dist/a.txt#sha256={PIN}").read_bytes() == b"alpha"
    assert not part.exists()


def test_an_extraction_cut_short_leaves_nothing(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels.shutil, "copyfileobj", fail)
    for member in ("a.txt", "folder"):
        with pytest.raises(KeyboardInterrupt):
            fetch(f"wheel://data-dist==1.0/data_dist/{member}#sha256={PIN}")
    assert list((tmp_path / "assets/members/data-dist==1.0/data_dist").iterdir()) == []


def _fetch(uri: str) -> bytes:
    return fetch(uri).read_bytes()


def test_processes_at_once_download_once(shop: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        contents = pool.map(_fetch, [f"wheel://data-dist==1.0/data_dist/a.txt#sha256={PIN}"] * 3)
    assert contents == [b"alpha"] * 3
    assert capfd.readouterr().err.count("fetching data-dist==1.0 with pip") == 1


def test_what_is_not_there_is_told(shop: Path) -> None:
    with pytest.raises(UserError, match=r"data-dist==1.0 holds no data_dist/floder; did you mean data_dist/folder\?"):
        fetch(f"wheel://data-dist==1.0/data_dist/floder#sha256={PIN}")
    with pytest.raises(UserError, match=r"^data-dist==1.0 holds no zzzzzz\.$"):
        fetch(f"wheel://data-dist==1.0/zzzzzz#sha256={PIN}")
    message = (
        r"pip could not download data-dist==2.0 \(Could not find a version that satisfies .*==2.0\): check the ver"
    )
    with pytest.raises(UserError, match=message):
        fetch(f"wheel://data-dist==2.0/data_dist/a.txt#sha256={PIN}")


def test_a_source_distribution_is_never_built(shop: Path) -> None:
    import tarfile

    with tarfile.open(shop / "built-1.0.tar.gz", "w:gz") as archive:
        (shop / "setup.py").write_text("raise SystemExit('built')")
        archive.add(shop / "setup.py", "built-1.0/setup.py")
    with pytest.raises(UserError, match=r"pip could not download built==1.0"):
        fetch(f"wheel://built==1.0/x#sha256={PIN}")


def test_a_member_that_would_escape_is_refused(shop: Path, tmp_path: Path) -> None:
    make_wheel(shop, "evil", {"evil/folder/../../../escaped.txt": b"x", "evil/folder/fine.txt": b"y"})
    with pytest.raises(UserError, match="has a member that points outside it"):
        fetch(f"wheel://evil==1.0/evil/folder#sha256={PIN}")
    assert not list(tmp_path.rglob("escaped.txt"))
