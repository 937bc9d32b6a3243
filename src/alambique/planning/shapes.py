"""The shapes of a params.yaml's models, from their configurations alone: no weight is read or downloaded."""

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PreTrainedConfig

from alambique.core.errors import UserError
from alambique.core.files import MANIFEST, read_json
from alambique.core.places import assets_dir
from alambique.core.sources import Source, fetch, local_path, parse
from alambique.models.prune import pruned_config
from alambique.models.student import StudentConfig

_CONFIG = "config.json"


class NotAtHand(UserError):
    """The configuration of a model isn't on this machine, or can't be counted."""


def shapes(uri: str, *, download: bool) -> PreTrainedConfig:
    """The configuration of the model behind ``uri``, whose content isn't hashed here: the stages do that.

    ``download`` says whether what is missing may be fetched: a hub model's config.json, or a wheel.

    Raises:
        NotAtHand: it isn't on this machine, and may not or can't be fetched.
        UserError: the URI is malformed, or names no transformers model.
    """
    source = parse(uri)
    if source.scheme == "file":
        path = local_path(source)
    else:
        path = _of_hub(source, download) if source.scheme == "hf" else _of_wheel(source, download)
    try:
        if path.suffix == ".gguf":
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{uri} is no model that transformers knows ({' '.join(str(error).split())[:200]}).") from error


def student_shapes(teacher: PreTrainedConfig, student: StudentConfig, *, download: bool) -> PreTrainedConfig:
    """The configuration of a pair's student; of a measured choice of layers the first of as many, which are alike.

    Raises:
        NotAtHand: as :func:`shapes`.
        UserError: the student can't be had of this teacher.
    """
    if student.model is not None:
        return shapes(student.model, download=download)
    text = teacher.get_text_config()
    layers, width = text.num_hidden_layers, student.width
    student.require(layers, getattr(text, "intermediate_size", None), getattr(text, "num_key_value_heads", None))
    dropped = student.measured_depth
    kept = student.kept_layers(layers) if dropped is None else range(layers - dropped)
    return pruned_config(
        teacher, kept, width.intermediate_size if width else None, width.num_key_value_heads if width else None
    )


def _of_hub(source: Source, download: bool) -> Path:
    name = f"{source.member}/{_CONFIG}" if source.member else _CONFIG
    found = try_to_load_from_cache(source.place, name, revision=source.pin)
    if isinstance(found, str):
        return Path(found).parent
    remedy = f"run `hf download {source.place} {name} --revision {source.pin}` (a few kB) where the Hub can be reached"
    if not download:
        raise NotAtHand(f"{_CONFIG} of {source.uri} is not on this machine: {remedy}.")
    try:
        return fetch(f"hf://{source.place}@{source.pin}", (name,)) / source.member
    except UserError as error:
        raise NotAtHand(f"{error} For its shapes alone, {remedy}.") from error


def _of_wheel(source: Source, download: bool) -> Path:
    """The folder that a GGUF was converted to, else the member itself, whose header has the shapes too."""
    for manifest in sorted((assets_dir() / "models").glob(f"{Path(source.member).stem}-*/{MANIFEST}")):
        if read_json(manifest, "").get("source_sha256") == source.pin:
            return manifest.parent
    member = assets_dir() / "members" / source.place / source.member
    if member.exists():
        return member
    if not download:
        raise NotAtHand(f"{source.uri} has not been fetched yet: `alambique plan` does so, as does `make repro`.")
    try:
        return fetch(source.uri)
    except UserError as error:
        raise NotAtHand(str(error)) from error
