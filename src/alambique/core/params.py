"""params.yaml: strict, frozen sections, and a record of which of them were read."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from alambique.core.errors import UserError, did_you_mean

KEY = re.compile(r"[a-z0-9_]+")


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
        walked: list[str] = []
        for part in dotted.split("."):
            if not isinstance(node, Mapping) or part not in node:
                where = ".".join(walked) or "the top level"
                known = node if isinstance(node, Mapping) else ()
                raise UserError(f"{self.source}: {where} has no key {part}{did_you_mean(part, known)}")
            node = node[part]
            walked.append(part)
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
        problems = [_sentence(schema, detail) for detail in error.errors()]
        raise UserError(f"{where}: {'; '.join(problems)}") from error


def _sentence(schema: type[BaseModel], detail: ErrorDetails) -> str:
    path = [str(part) for part in detail["loc"]]
    name = ".".join(path)
    if detail["type"] == "extra_forbidden":
        return f"unknown key {name}{did_you_mean(path[-1], _fields_at(schema, path[:-1]))}"
    if detail["type"] == "missing":
        return f"{name} is missing"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    shown = "" if isinstance(detail["input"], Mapping) else f" = {detail['input']!r}"
    return f"{name or 'the section'}{shown} {message}"


def _fields_at(schema: type[BaseModel], path: list[str]) -> list[str]:
    """Field names of the model that ``path`` leads to; empty where the path leaves pydantic models."""
    current: type[BaseModel] = schema
    for part in path:
        if part.isdigit() or part not in current.model_fields:
            continue  # a list index, or a union tag, which is not a field
        inner = _models_in(current.model_fields[part].annotation)
        if not inner:
            return []
        current = inner[0]
    return list(current.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in getattr(annotation, "__args__", ()) for model in _models_in(arg)]
