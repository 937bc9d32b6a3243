"""Case ``capture``: a whole capture, compression and files included, against the teacher's bare forward pass.

The bare pass is what transformers does: backbone, then the output head on every position, in the model's own dtype,
with nothing done to the logits. Like the capture it runs the first row a second time, alone: on real data that is one
row in 4,096, of these few rows it would be 4 %.
"""

import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alambique.cache.capture import capture
from alambique.cache.config import CaptureConfig
from alambique.core.measure import peak_mib
from alambique.core.products import fast_dtype
from alambique.data.dataset import PackedRows
from alambique.models.load import SplitModel
from benchmarks.cases import TOP_K, Options, Outcome
from benchmarks.teacher_data import load_rows, load_teacher
from benchmarks.timing import interleaved

_ROWS, _BATCH_ROWS = 48, 8
_DRAWN_TOP_K, _DRAWS = 50, 16  # as the embedded pair's params.yaml


def run(options: Options) -> Outcome:
    """Interleave captures and bare passes of the same rows in the same batches."""
    rows = load_rows(4 if options.quick else _ROWS, options.quick)
    teacher = load_teacher(fast_dtype(options.device), options.device, options.quick)
    batch_rows = 2 if options.quick else _BATCH_ROWS
    config = CaptureConfig(
        top_k=min(TOP_K, len(teacher.head_weight_VD)),
        batch_tokens=batch_rows * rows.seq_len,
        shard_mib=batch_rows * rows.seq_len * TOP_K * 2.7 / 2**20 + 1e-6,  # a block per batch: the finest overlap
    )
    with tempfile.TemporaryDirectory() as folder, _Largest(teacher) as largest:
        _capture(rows, teacher, config, Path(folder), options.device)
    largest_mib, peak = largest.num_bytes / 2**20, peak_mib(options.device)
    drawing = config.model_copy(update={"keep": "top_k_and_draws", "top_k": _DRAWN_TOP_K, "draws": _DRAWS})
    with tempfile.TemporaryDirectory() as folder:
        seconds = interleaved(
            {
                "forward": lambda: _forward(rows, teacher, batch_rows),
                "capture": lambda: _capture(rows, teacher, config, Path(folder), options.device),
                "capture_with_draws": lambda: _capture(rows, teacher, drawing, Path(folder), options.device),
            },
            options.repeats,
            options.device,
        )
    tokens = rows.num_rows * rows.seq_len
    ratio, ratio_with_draws = (
        median(seconds["forward"]) / median(seconds[name]) for name in ("capture", "capture_with_draws")
    )
    outcome = Outcome(
        rows=[{"contender": name, "tokens_per_s": tokens / median(runs)} for name, runs in seconds.items()],
        summary={
            "ratio_to_forward": ratio,
            "ratio_with_draws": ratio_with_draws,
            "peak_mib": peak,
            "largest_tensor_mib": largest_mib,
        },
        notes=["ratio_to_forward: throughput of the capture over that of the bare forward pass, medians"],
    )
    outcome.rows.append({"contender": "ratio", **outcome.summary})
    return outcome


@torch.inference_mode()
def _forward(rows: PackedRows, teacher: SplitModel, batch_rows: int) -> None:
    device = teacher.head_weight_VD.device
    for batch in (slice(0, 1), *(slice(start, start + batch_rows) for start in range(0, rows.num_rows, batch_rows))):
        hidden_BSD = teacher.hidden(rows.input_ids_RS[batch].to(device), rows.document_ids_RS[batch].to(device))
        torch.nn.functional.linear(hidden_BSD, teacher.head_weight_VD, teacher.head_bias_V)


def _capture(rows: PackedRows, teacher: SplitModel, config: CaptureConfig, folder: Path, device: torch.device) -> None:
    shutil.rmtree(folder / "store", ignore_errors=True)
    vocab = len(teacher.head_weight_VD)
    capture(rows, lambda: teacher, folder / "out", folder / "store", {"benchmark": "capture"}, config, vocab, device)


class _Largest(TorchDispatchMode):
    """The largest storage that any operation returns, the model's own weights aside."""

    def __init__(self, teacher: SplitModel) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage().data_ptr() for weight in teacher.model.parameters()}
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self._weights:
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return out
