"""Prepared data: packed rows of token ids, made once and read by teacher and student alike.

Dimensions: R rows, S positions in a row.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from alambique.core.errors import UserError
from alambique.core.files import read_manifest, sha256_file, write_bytes

PADDING_DOCUMENT = -1
SPLITS = ("train", "valid")
_REMEDY = "Run the prepare stage again (`dvc repro --force prepare@TEACHER`)."


@dataclass(frozen=True)
class PackedRows:
    """Rows of packed documents, on the CPU.

    ``input_ids_RS`` int32 token ids; ``document_ids_RS`` int32, numbered from 0 in each row, −1 on padding (which
    stands at the end of a row); ``loss_mask_RS`` bool, True where the *next* position's token is a target. The shift
    is made here and nowhere else: position i predicts position i + 1.
    """

    input_ids_RS: Tensor
    document_ids_RS: Tensor
    loss_mask_RS: Tensor

    def __post_init__(self) -> None:
        expected = {"input_ids_RS": torch.int32, "document_ids_RS": torch.int32, "loss_mask_RS": torch.bool}
        for name, dtype in expected.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.ndim != 2 or tensor.shape != self.input_ids_RS.shape:
                raise ValueError(f"{name} must be {dtype} [rows, seq_len], not {tensor.dtype} {tuple(tensor.shape)}")

    @property
    def num_rows(self) -> int:
        """R."""
        return self.input_ids_RS.shape[0]

    @property
    def seq_len(self) -> int:
        """S."""
        return self.input_ids_RS.shape[1]

    @property
    def num_target_tokens(self) -> int:
        """Positions that predict something: what the loss averages over and the teacher's cache holds."""
        return int(self.loss_mask_RS.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of documents, without padding."""
        return int((self.document_ids_RS != PADDING_DOCUMENT).sum())

    def row_hashes(self) -> list[str]:
        """Hex sha256 of each row's content: ids, document ids and mask, as little-endian bytes."""
        ids, documents, mask = (t.numpy() for t in (self.input_ids_RS, self.document_ids_RS, self.loss_mask_RS))
        return [
            hashlib.sha256(ids[r].tobytes() + documents[r].tobytes() + mask[r].tobytes()).hexdigest()
            for r in range(self.num_rows)
        ]

    def save(self, path: Path) -> None:
        """Write safetensors, atomically; the same rows give the same bytes."""
        tensors = {"input_ids": self.input_ids_RS, "document_ids": self.document_ids_RS, "loss_mask": self.loss_mask_RS}
        write_bytes(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    @classmethod
    def load(cls, path: Path) -> "PackedRows":
        """Read what :meth:`save` wrote; a UserError if the file is missing, damaged, or holds something else."""
        try:
            tensors = load_file(path)
            return cls(tensors["input_ids"], tensors["document_ids"], tensors["loss_mask"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{path} is not a file of packed rows ({error}). {_REMEDY}") from error


@dataclass(frozen=True)
class PreparedData:
    """The two splits that ``prepare`` made, and the manifest that says from what."""

    train: PackedRows
    valid: PackedRows
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> "PreparedData":
        """Read a folder of prepared data; a UserError if a file or its rows are not what the manifest says."""
        manifest, splits = read_manifest(folder, _REMEDY), {}
        for split in SPLITS:
            path = folder / f"{split}.safetensors"
            recorded = manifest["files"].get(path.name, {}).get("sha256")
            if recorded is None or not path.is_file():
                raise UserError(f"{path} is missing. {_REMEDY}")
            if sha256_file(path) != recorded:
                raise UserError(f"{path} differs from the sha256 in its manifest, so it is damaged. {_REMEDY}")
            rows = splits[split] = PackedRows.load(path)
            found = {"rows": rows.num_rows, "target_tokens": rows.num_target_tokens}
            recorded = {key: manifest.get("splits", {}).get(split, {}).get(key) for key in found}
            if found != recorded:
                raise UserError(
                    f"{folder}: the {split} split holds {json.dumps(found)}, recorded {recorded}. {_REMEDY}"
                )
        return cls(splits["train"], splits["valid"], manifest)
