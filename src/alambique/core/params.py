"""params.yaml: strict, frozen sections, and a record of which of them were read."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from alambique.core.errors import UserError, did_you_mean

KEY = re.compile(r"[a-z0-9_]+")
_LONGEST = 80  # characters of a wrong value that are shown


class Config(BaseModel):
    """Base of every configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


ConfigT = TypeVar("ConfigT", bound=Config)


class Params:
    """A parsed params.yaml that remembers, in ``reads``, each dotted section it handed out.

    DVC reruns a stage only for the params that dvc.yaml lists; the record lets a test hold the two together.
    """

    def __init__(self, tree: Mapping[str, Any], source: str = "params.yaml") -> None:
        self.tree = tree
        self.source = source
        self.reads: list[str] = []

    @classmethod
    def load(cls, path: Path = Path("params.yaml")) -> "Params":
        """Read ``path`` as YAML 1.2, as DVC does (PyYAML would read 1e-3 as a string)."""
        if not path.is_file():
            raise UserError(f"{path} does not exist: run in the project's folder, or copy one of presets/*.yaml there.")
        try:
            tree = YAML(typ="safe").load(path.read_text())
        except YAMLError as error:
            place = str(error).replace("\n", " ")
            raise UserError(f"{path} is not valid YAML: {place}") from error
        if not isinstance(tree, dict):
            raise UserError(f"{path} must hold a mapping of sections, not {type(tree).__name__}.")
        return cls(tree, str(path))

    def get(self, dotted: str) -> Any:
        """Return the raw value under ``dotted`` (such as ``pairs.KEY.teacher``) and record the read."""
        node: Any = self.tree
        parts = dotted.split(".")
        for depth, part in enumerate(parts):
            if not isinstance(node, Mapping) or part not in node:
                where = ".".join(parts[:depth]) or "the top level"
                known = node if isinstance(node, Mapping) else ()
                raise UserError(f"{self.source}: {where} has no key {part}{did_you_mean(part, known)}")
            node = node[part]
        self.reads.append(dotted)
        return node

    def section(self, schema: type[ConfigT], *dotted: str) -> ConfigT:
        """Validate the sections named, later ones overriding earlier ones key by key, against ``schema``.

        Mappings are merged in depth; lists and scalars are replaced.

        Raises:
            UserError: one sentence naming the file, the key and the remedy.
        """
        merged: dict[str, Any] = {}
        for name in dotted:
            value = self.get(name)
            if not isinstance(value, Mapping):
                raise UserError(f"{self.source}: {name} must be a mapping, not {value!r}.")
            merged = _merge(merged, value)
        return validate(schema, merged, f"{self.source}: {dotted[-1] if len(dotted) == 1 else ' + '.join(dotted)}")

    def keys(self, dotted: str) -> list[str]:
        """Names in a dictionary section such as ``pairs``, checked against ``[a-z0-9_]+``."""
        value = self.get(dotted)
        if not isinstance(value, Mapping) or not value:
            raise UserError(f"{self.source}: {dotted} must name at least one entry.")
        for key in value:
            if not isinstance(key, str) or not KEY.fullmatch(key):
                raise UserError(
                    f"{self.source}: {dotted}.{key} is not a usable name: use lower-case letters, digits and _ only."
                )
        return list(value)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def validate(schema: type[ConfigT], values: Mapping[str, Any], where: str) -> ConfigT:
    """Build ``schema`` from ``values``; a failure is one sentence that starts with ``where``."""
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        problems: dict[str, dict[str, None]] = {}  # a value that suits no member of a union has a complaint for each
        for subject, complaint in (_problem(schema, detail) for detail in error.errors()):
            problems.setdefault(subject, {})[complaint] = None
        sentences = [f"{subject} {' or '.join(complaints)}".strip() for subject, complaints in problems.items()]
        raise UserError(f"{where}: {'; '.join(sentences)}") from error


def _problem(schema: type[BaseModel], detail: ErrorDetails) -> tuple[str, str]:
    """What is wrong, and how: the two halves of a sentence."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        parent, fields = _locate(schema, detail["loc"][:-1])
        key = str(detail["loc"][-1])
        return f"unknown key {parent}{'.' if parent else ''}{key}{did_you_mean(key, fields)}", ""
    name, _ = _locate(schema, detail["loc"])
    if kind == "missing":
        return name, "is missing"
    if kind.startswith("union_tag"):
        tag = context["discriminator"].strip("'")
        known = f": one of {context['expected_tags']}" if "expected_tags" in context else ""
        return f"{name}.{tag}", f"must say which kind this is{known}"
    value = repr(detail["input"])
    value = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
    shown = "" if isinstance(detail["input"], Mapping) else f" = {value}"
    if kind in ("model_type", "dict_type"):
        return f"{name}{shown}", "should be a mapping"
    return f"{name or 'the section'}{shown}", detail["msg"].removeprefix("Value error, ").removeprefix("Input ")


def _locate(schema: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, list[str]]:
    """The dotted name that a pydantic location means to a person, and the fields known there.

    Locations also hold the tags of unions, which nobody wrote; they choose a model and leave the name alone.
    """
    name = ""
    annotation: Any = schema
    for part in loc:
        models = _models_in(annotation)
        owners = [model for model in models if part in model.model_fields]
        if isinstance(part, int):
            name, annotation = f"{name}[{part}]", _argument(annotation, list)
        elif owners:
            name, annotation = f"{name}.{part}", owners[0].model_fields[part].annotation
        elif models and any(_answers_to(model, part) for model in models):
            annotation = next(model for model in models if _answers_to(model, part))
        elif (values := _argument(annotation, dict)) is not None:
            name, annotation = f"{name}.{part}", values
    return name.removeprefix("."), [field for model in _models_in(annotation) for field in model.model_fields]


def _answers_to(model: type[BaseModel], tag: str) -> bool:
    """Whether ``tag`` is how pydantic calls ``model`` in a union: its name, or the value of its discriminator."""
    literals = (get_args(field.annotation) for field in model.model_fields.values())
    return tag == model.__name__ or any(tag in values for values in literals)


def _argument(annotation: Any, container: type) -> Any:
    """The element type of a list, or the value type of a mapping, wherever in a union it stands; else None."""
    if get_origin(annotation) is container:
        return get_args(annotation)[-1]
    found = (_argument(member, container) for member in get_args(annotation))
    return next((element for element in found if element is not None), None)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a value of this type may be; those inside its lists and mappings are not."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (list, dict, tuple, Literal):
        return []
    return [model for member in get_args(annotation) for model in _models_in(member)]
