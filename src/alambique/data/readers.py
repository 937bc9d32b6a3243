"""Documents from text, JSONL, parquet and chat files: read, cut to the wanted field, counted."""

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, field_validator

from alambique.core.errors import UserError, did_you_mean
from alambique.core.params import Config

Message = dict[str, Any]
_SUFFIXES = {
    "text": (".txt", ".md", ".txt.gz"),
    "jsonl": (".jsonl", ".jsonl.gz"),
    "parquet": (".parquet",),
    "chat": (".jsonl", ".jsonl.gz", ".parquet"),
}


class CorpusConfig(Config):
    """One source of documents, and which part of each record is the document."""

    uri: str
    format: Literal["text", "jsonl", "parquet", "chat"]
    # Dotted path into a record; by default "text", or "messages" for chats (the names that public datasets use).
    field: str | None = None
    # Regular expression searched in each text: group 1 is the document, a record without a match is left out.
    pattern: str | None = None
    # Regular expression between the documents of a text file; by default a file is one document.
    separator: str | None = None
    min_chars: int = Field(1, ge=1)  # assumption: only empty documents are useless as such
    max_documents: int | None = Field(None, ge=1)  # the first ones, for corpora that are larger than the need

    @field_validator("pattern", "separator")
    @classmethod
    def _compiles(cls, value: str | None, info: Any) -> str | None:
        if value is None:
            return value
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"is not a regular expression ({error})") from error
        if info.field_name == "pattern" and groups < 1:
            raise ValueError("needs a group in parentheses: group 1 is what is kept")
        return value


@dataclass(frozen=True)
class Document:
    """One document: a text, or a conversation. ``where`` says where it came from, for error messages."""

    where: str
    text: str = ""
    messages: tuple[Message, ...] = ()

    @property
    def key(self) -> str:
        """Hash of the content, whitespace normalised: equal keys mean duplicates."""
        content = json.dumps(self.messages, sort_keys=True, ensure_ascii=False) if self.messages else self.text
        return hashlib.sha256(" ".join(content.split()).encode("utf-8", "surrogatepass")).hexdigest()


def read_corpus(path: Path, config: CorpusConfig) -> tuple[list[Document], Counter[str]]:
    """Read every document of a corpus, in the order of its files; and the records that gave none, by reason.

    Raises:
        UserError: no files of this format, a damaged record, a missing field, or not one usable document.
    """
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    for where, value in _values(path, config):
        if len(documents) == config.max_documents:
            break
        if config.format == "chat":
            documents.append(Document(where, messages=_messages(where, value)))
            continue
        text = _text(where, value, config, skipped)
        if text is not None:
            documents.append(Document(where, text=text))
    if not documents:
        raise UserError(
            f"{config.uri} holds no usable document ({skipped['unmatched']} without a match of `pattern`, "
            f"{skipped['too_short']} shorter than min_chars = {config.min_chars}): check format, field and pattern."
        )
    return documents, skipped


def _text(where: str, value: Any, config: CorpusConfig, skipped: Counter[str]) -> str | None:
    if not isinstance(value, str):
        raise UserError(f"{where}: {config.field or 'text'} is {type(value).__name__}, not text; name another `field`.")
    if config.pattern:
        match = re.search(config.pattern, value)
        if match is None or match[1] is None:
            skipped["unmatched"] += 1
            return None
        value = match[1]
    text: str = value.strip()
    if len(text) < config.min_chars:
        skipped["too_short"] += 1
        return None
    return text


def _messages(where: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where}: a chat must be a list of messages, not {type(value).__name__}; name another `field`."
        )
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"{where}: every message needs `role` and `content`, unlike {str(message)[:80]}.")
    # Parquet fills the keys that a message lacks with None; templates ask whether a key is defined.
    return tuple({key: part for key, part in message.items() if part is not None} for message in value)


def _values(path: Path, config: CorpusConfig) -> Iterator[tuple[str, Any]]:
    """Yield (place, value of the wanted field) for every record of every file."""
    suffixes = _SUFFIXES[config.format]
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(suffixes)) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{config.uri} holds no file ending in {', '.join(suffixes)}: check `format`.")
    for file in files:
        if config.format == "text":
            parts = re.split(config.separator, _read(file)) if config.separator else [_read(file)]
            yield from ((f"{file.name}, part {n}", part) for n, part in enumerate(parts, start=1))
        else:
            field = config.field or ("messages" if config.format == "chat" else "text")
            rows = _parquet(file, field.split(".")[0]) if file.name.endswith(".parquet") else _jsonl(file)
            yield from ((where, _field(where, row, field)) for where, row in rows)


def _read(file: Path) -> str:
    """The text of a file, unpacked if its name says .gz."""
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if file.name.endswith(".gz") else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{file} can't be read as UTF-8 text ({error}): repair or replace it.") from error


def _jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_read(file).split("\n"), start=1):
        if line.strip():
            where = f"{file.name}, line {number}"
            try:
                yield where, json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where} is not JSON ({error}): repair the line, or check `format`.") from error


def _parquet(file: Path, column: str) -> Iterator[tuple[str, Any]]:
    """Rows of one column: the others are not read, and may be much larger."""
    number = 0
    try:
        table = pq.ParquetFile(file)
        columns = [column] if column in table.schema_arrow.names else None  # all of them, to name them in the error
        for batch in table.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{file.name}, row {number}", row
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file} is not a parquet file that can be read ({error}): replace it.") from error


def _field(where: str, row: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        if not isinstance(row, dict) or part not in row:
            known = row if isinstance(row, dict) else ()
            raise UserError(f"{where} has no field {dotted}{did_you_mean(part, known)}")
        row = row[part]
    return row
