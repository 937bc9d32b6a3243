"""A teacher of a few thousand numbers and rows for it; run as a script, it captures slowly so that it can be killed.

python fake_teacher.py OUT STORE SECONDS_PER_BATCH
python fake_teacher.py MEETING STORE SECONDS_PER_BATCH I/N PROCESSES: a part, once so many have come to MEETING
"""

import contextlib
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from alambique.cache.capture import CaptureResult, capture
from alambique.cache.config import CaptureConfig
from alambique.cache.fill import fill, parse_part

VOCAB, PADDED, HIDDEN, SEQ_LEN = 300, 320, 16, 24
LAYERS = 6
IDENTITY = {"uri": "file:fake", "sha256": "0" * 64, "tokenizer_sha256": "1" * 64}
# 4 rows per block: the codec reckons with 24 · 8 · 2.7 bytes per row.
CONFIG = CaptureConfig(top_k=8, dtype="float32", batch_tokens=48, shard_mib=4 * 24 * 8 * 2.7 / 2**20 + 1e-9)


class FakeTeacher:
    """Hidden states that depend on a token and the one before it in its document; after layer n, n times those."""

    def __init__(self, dtype: torch.dtype = torch.float32, seconds: float = 0.0, largest_batch: int = 1 << 30) -> None:
        generator = torch.Generator().manual_seed(7)
        self._embedding_VD = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
        self.head_weight_VD = torch.randn(PADDED, HIDDEN, generator=generator).to(dtype)
        self.head_bias_V: Tensor | None = None
        self.logit_softcap: float | None = None
        self.logit_scale = 1.0
        self.seconds, self.largest_batch = seconds, largest_batch
        self.rows_seen: list[int] = []
        self._recorded: dict[int, Tensor] = {}

    def hidden(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        if len(input_ids_BS) > self.largest_batch:
            raise torch.OutOfMemoryError("fake")
        time.sleep(self.seconds)
        self.rows_seen.append(len(input_ids_BS))
        embedded_BSD = self._embedding_VD[input_ids_BS]
        same_BS = torch.zeros_like(document_ids_BS, dtype=torch.bool)
        same_BS[:, 1:] = document_ids_BS[:, 1:] == document_ids_BS[:, :-1]
        hidden_BSD = embedded_BSD + 0.5 * embedded_BSD.roll(1, dims=1) * same_BS[..., None]
        self._recorded.update((layer, layer * hidden_BSD) for layer in self._recorded)
        return hidden_BSD

    @contextlib.contextmanager
    def recording(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        self._recorded = dict.fromkeys(layers, torch.empty(0))
        yield self._recorded
        self._recorded = {}


@dataclass
class FakeRows:
    input_ids_RS: Tensor
    document_ids_RS: Tensor
    loss_mask_RS: Tensor

    def row_hashes(self) -> list[str]:
        parts = (self.input_ids_RS, self.document_ids_RS, self.loss_mask_RS)
        return [
            hashlib.sha256(b"".join(part[row].numpy().tobytes() for part in parts)).hexdigest()
            for row in range(len(self.input_ids_RS))
        ]


def make_rows(num_rows: int = 14, masked: bool = True) -> FakeRows:
    """Rows with two documents each; row 3 has no target at all, when ``masked``."""
    generator = torch.Generator().manual_seed(11)
    ids_RS = torch.randint(0, VOCAB, (64, SEQ_LEN), generator=generator, dtype=torch.int32)[:num_rows]
    documents_RS = (torch.arange(SEQ_LEN) >= 10).to(torch.int32).repeat(num_rows, 1)
    mask_RS = torch.ones(num_rows, SEQ_LEN, dtype=torch.bool)
    if masked:
        mask_RS[:, 9] = False
        mask_RS[1::3, 20:] = False
        mask_RS[3] = False
    return FakeRows(ids_RS, documents_RS, mask_RS)


def run(
    out: Path, store: Path, *, teacher: FakeTeacher | None = None, rows: FakeRows | None = None, **settings: object
) -> CaptureResult:
    """Capture with the defaults of the tests; ``settings`` change the configuration."""
    config = CaptureConfig.model_validate({**CONFIG.model_dump(), **settings})
    teacher, rows, states = teacher or FakeTeacher(), rows or make_rows(), config.states(LAYERS, HIDDEN)
    return capture(rows, lambda: teacher, out, store, IDENTITY, config, VOCAB, torch.device("cpu"), states)


def run_part(store: Path, teacher: FakeTeacher, part: str) -> None:
    """As one of several processes; prints how many rows this one scored."""
    fill(make_rows(), lambda: teacher, store, IDENTITY, CONFIG, VOCAB, torch.device("cpu"), parse_part(part))
    print(sum(teacher.rows_seen))


if __name__ == "__main__":
    slow = FakeTeacher(seconds=float(sys.argv[3]))
    if len(sys.argv) > 4:
        meeting = Path(sys.argv[1])
        (meeting / sys.argv[4].replace("/", "of")).touch()
        while len(list(meeting.iterdir())) < int(sys.argv[5]):
            time.sleep(0.01)
        run_part(Path(sys.argv[2]), slow, sys.argv[4])
    else:
        run(Path(sys.argv[1]), Path(sys.argv[2]), teacher=slow)
