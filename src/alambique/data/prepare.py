"""From corpora to prepared data: de-duplicate, split by document, encode once, pack, write."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from alambique.core.errors import UserError
from alambique.core.files import atomic_folder, write_manifest
from alambique.core.measure import versions
from alambique.core.params import Config
from alambique.core.progress import Progress
from alambique.data.chat import encode_chat, require_template
from alambique.data.dataset import SPLITS, PackedRows
from alambique.data.pack import Ids, Mask, Piece, cut, pack
from alambique.data.readers import CorpusConfig, Document, read_corpus

_BATCH_DOCUMENTS = 256  # assumption: keeps the tokenizer's threads busy and the bar moving
# Documents are encoded until a row budget is exceeded by this factor, so that packing has small ones to fill gaps with.
_SURPLUS = 1.25  # assumption
# What happens to documents on the way; `cut` are those longer than a row.
_COUNTS = ("documents", "duplicates", "unmatched", "too_short", "without_target", "cut")


class PrepareConfig(Config):
    """How text becomes rows. A budget of None takes everything."""

    seq_len: int = Field(256, ge=2, le=1 << 20)  # assumption: small enough for a CPU; real pairs use 4,096 and more
    train_rows: int | None = Field(None, ge=1)
    valid_rows: int | None = Field(None, ge=1)
    valid_fraction: float = Field(0.1, gt=0, lt=1)  # share of documents held out; assumption
    seed: int = 0
    corpora: list[CorpusConfig] = Field(min_length=1)


def prepare(
    corpora: Sequence[tuple[CorpusConfig, Path]],
    tokenizer: PreTrainedTokenizerBase,
    config: PrepareConfig,
    out: Path,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Write ``out`` (both splits and a manifest holding ``facts``) and return the manifest.

    The same corpora, tokenizer and config give the same bytes.

    Raises:
        UserError: a corpus can't be read or teaches nothing, or holds fewer rows than the budget asks for.
    """
    counts = Counter(dict.fromkeys(_COUNTS, 0))
    documents = _distinct(corpora, counts)
    splits = split_documents(documents, config.valid_fraction, config.seed)
    budgets = {"train": config.train_rows, "valid": config.valid_rows}
    with Progress("prepare", sum(len(part) for part in splits.values()), unit="documents") as progress:
        packed = {
            name: _encode_and_pack(name, splits[name], tokenizer, config.seq_len, budgets[name], counts, progress)
            for name in SPLITS
        }
    facts = {
        **facts,
        "seq_len": config.seq_len,
        "config": config.model_dump(mode="json"),
        "versions": versions("transformers", "tokenizers"),
        "counts": dict(counts),
        "splits": {name: _split_facts(rows, documents) for name, (rows, documents) in packed.items()},
        "created_by": "alambique prepare",
    }
    with atomic_folder(out) as scratch:
        for name, (rows, _) in packed.items():
            rows.save(scratch / f"{name}.safetensors")
        return write_manifest(scratch, facts)


def split_documents(documents: Iterable[Document], valid_fraction: float, seed: int) -> dict[str, list[Document]]:
    """Order documents by a seeded hash of their content and hold the first ones out, at least one on either side.

    The order depends on nothing but content and seed, and serves as the shuffle.
    """
    ordered = sorted(documents, key=lambda document: hashlib.sha256(f"{seed}:{document.key}".encode()).digest())
    if len(ordered) < 2:
        raise UserError(
            "the corpus holds a single document, which can't be split into train and valid: add documents, "
            "or set `separator` to cut a text file into several."
        )
    held_out = min(max(1, round(valid_fraction * len(ordered))), len(ordered) - 1)
    return {"train": ordered[held_out:], "valid": ordered[:held_out]}


def _distinct(corpora: Sequence[tuple[CorpusConfig, Path]], counts: Counter[str]) -> list[Document]:
    """All documents of all corpora, the first of each set of duplicates."""
    distinct: dict[str, Document] = {}
    for config, path in corpora:
        documents, skipped = read_corpus(path, config)
        counts["documents"] += len(documents)
        counts.update(skipped)
        for document in documents:
            distinct.setdefault(document.key, document)
    counts["duplicates"] = counts["documents"] - len(distinct)
    return list(distinct.values())


def _encode_and_pack(
    name: str,
    documents: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    max_rows: int | None,
    counts: Counter[str],
    progress: Progress,
) -> tuple[PackedRows, set[int]]:
    """Encode the documents of one split in order, as many as its budget needs, and pack them."""
    wanted_tokens = math.inf if max_rows is None else _SURPLUS * max_rows * seq_len
    pieces: list[Piece] = []
    num_tokens, without_target = 0, []
    for start in range(0, len(documents), _BATCH_DOCUMENTS):
        batch = documents[start : start + _BATCH_DOCUMENTS]
        if num_tokens >= wanted_tokens:
            progress.update(len(documents) - start)
            break
        for offset, (ids, is_target) in enumerate(encode(tokenizer, batch)):
            found = cut(ids, is_target, start + offset, seq_len)
            counts["cut"] += len(ids) > seq_len
            if not found:
                without_target.append(batch[offset].where)
            pieces += found
            num_tokens += sum(len(piece.ids) for piece in found)
        progress.update(len(batch))
    counts["without_target"] += len(without_target)
    if not pieces:
        raise UserError(
            f"no document of the {name} split yields a token to learn (the first: {without_target[0]}): "
            "chats need assistant messages, other documents at least one token."
        )
    rows, used = pack(pieces, seq_len, tokenizer.eos_token_id, max_rows)
    if max_rows is not None and rows.num_rows < max_rows:
        raise UserError(
            f"the {name} split has {rows.num_rows} rows of {seq_len} tokens, prepare.{name}_rows asks for {max_rows}: "
            f"lower it{', raise valid_fraction' if name == 'valid' else ''} or add documents."
        )
    return rows, used


def encode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[tuple[Ids, Mask]]:
    """Token ids of each document, uncut, and which of them may be targets.

    A text gets the special tokens that the tokenizer adds (such as BOS) and ends with the end-of-sequence token, which
    is a target like any other. A chat is what its template renders.

    Raises:
        UserError: the tokenizer lacks an end-of-sequence token or a chat template that the documents need.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError("the teacher's tokenizer has no end-of-sequence token, which ends every document: set one.")
    texts = [document.text for document in documents if not document.messages]
    encoded = iter(tokenizer(texts, truncation=False, verbose=False)["input_ids"] if texts else [])
    result = []
    for document in documents:
        if document.messages:
            require_template(tokenizer)
            ids, is_target = encode_chat(tokenizer, document)
        else:
            ids = list(next(encoded))
            ids += [] if ids[-1:] == [end] else [end]
            is_target = [True] * len(ids)
        result.append((np.asarray(ids, dtype=np.int32), np.asarray(is_target, dtype=np.bool_)))
    return result


def _split_facts(rows: PackedRows, documents: set[int]) -> dict[str, int]:
    return {
        "rows": rows.num_rows,
        "tokens": rows.num_tokens,
        "target_tokens": rows.num_target_tokens,
        "padding_tokens": rows.num_rows * rows.seq_len - rows.num_tokens,
        "documents": len(documents),
    }
