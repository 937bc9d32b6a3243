"""What a stage needs at its fullest moment, counted: its own code runs over tensors that have shapes and no values.

The model is built with few layers, twice, and the line through the two counts is followed to its real depth: layers are
alike, and so are the counts.

Dimensions: B rows of a batch, S positions, N tokens, K kept entries.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from alambique.cache.config import CaptureConfig
from alambique.cache.head import Head, top_entries
from alambique.core.signal import TopKSignal
from alambique.losses import project
from alambique.losses.chunked import chunk_tokens
from alambique.models.load import SplitModel
from alambique.models.prune import pruned_config
from alambique.planning.counting import CountedMemory
from alambique.planning.shapes import NotAtHand
from alambique.train.config import DistillConfig
from alambique.train.data import MicroBatch
from alambique.train.flops import FlopCounter
from alambique.train.state import Run
from alambique.train.step import Setup, add_gradients

_FEW, _MORE = 2, 3  # layers; the first alone has less beside it than the others
_MOMENTS_BYTES, _TRAINED_BYTES = 8, 16  # of a parameter: AdamW's moments; with its weight and gradient, all in fp32
_CHUNKS = 2  # of a chunked loss
_BLOCKS = 8  # of the head's products on a CPU
_CPU = torch.device("cpu")  # of shapes alone; what differs on a GPU is said in docs/plan.md


# Kernels that need a GPU or a compiler keep as little as sdpa without a mask, in whose place they are counted.
_FLASH = "counted"
AttentionInterface.register(_FLASH, sdpa_attention_forward)
AttentionMaskInterface.register(_FLASH, lambda *args, **kwargs: None)


@dataclass(frozen=True)
class Count:
    """What a count found."""

    parameters: float  # of the model, tied ones once
    lasting_bytes: float  # weights, and in training their gradients and moments: what is there between two batches
    peak_bytes: float  # alive at the fullest moment, the lasting ones among them
    row_flops: float  # products and attentions of one row

    def towards(self, other: "Count", factor: float) -> "Count":
        """The point of the line through both: 0 gives this one, 1 the other."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Count(*(one + factor * (two - one) for one, two in pairs))


def capture(model: PreTrainedConfig, config: CaptureConfig, seq_len: int) -> Count:
    """The teacher's forward pass over a batch of rows, and the choice of a chunk's entries; one teacher, whole."""
    rows = max(1, config.batch_tokens // seq_len)
    dtype = getattr(torch, config.dtype)

    def count(shallow: PreTrainedConfig) -> Count:
        teacher = _build(shallow, dtype, config.attention)
        head = Head(teacher.head_weight_VD, teacher.head_bias_V, teacher.logit_softcap, teacher.logit_scale)
        with _counted(teacher) as memory, FlopCounter() as flops, torch.no_grad():
            hidden_ND = teacher.hidden(*_ids(rows, seq_len)).flatten(0, 1)
            chunk_ND = hidden_ND[: head.chunk_tokens(config.logits_mib)]
            backbone_flops = flops.flops
            top_entries(chunk_ND, head, min(config.top_k, head.weight_VD.shape[0]), config.logits_mib)
        head_flops = 2 * seq_len * head.weight_VD.numel()
        parameters = _parameters(teacher)
        lasting_bytes = parameters * dtype.itemsize
        return Count(parameters, lasting_bytes, memory.peak_bytes, backbone_flops / rows + head_flops)

    return _to_depth(model, count)


def train(
    student: PreTrainedConfig,
    config: DistillConfig,
    seq_len: int,
    top_k: int,
    teacher: PreTrainedConfig,
    capture_config: CaptureConfig,
) -> Count:
    """Forward, loss and backward of a step's micro-batches, beside AdamW's moments and with ``online`` the teacher."""

    def count(shallow: PreTrainedConfig) -> Count:
        model = _build(shallow, torch.float32, config.attention)
        live = None
        if config.method == "online":
            live = _build(_with_layers(teacher, _FEW), getattr(torch, capture_config.dtype), capture_config.attention)
            live.model.requires_grad_(False)
        vocab = min(c.get_text_config().vocab_size for c in (student, teacher))  # rows beyond are one's padding
        return _step(model, live, config, seq_len, min(top_k, vocab), vocab)

    found = _to_depth(student, count)
    if config.method == "online" and (rest := teacher.get_text_config().num_hidden_layers - _FEW) > 0:
        found = _with_whole_teacher(found, teacher, capture_config, seq_len, rest)
    return found


def rough_bytes(config: PreTrainedConfig, tokens: int, seq_len: int, layers: int) -> float:
    """What comes and goes with ``tokens`` in ``layers`` layers, several times too much, in no time.

    assumption: 24 bytes of each hidden unit and MLP channel, where the embedded pair has 4; 16 of an attention score.
    """
    text = config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    units = text.hidden_size + 3 * experts * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    scores = text.num_attention_heads * seq_len
    return float(tokens * layers * (24 * units + 16 * scores))


def _with_whole_teacher(
    found: Count, teacher: PreTrainedConfig, config: CaptureConfig, seq_len: int, rest: int
) -> Count:
    """Add the layers that the counted teacher lacked: weights that stay, activations that never meet the student's."""
    few, more = (capture(_with_layers(teacher, n), config, seq_len) for n in (_FEW, _MORE))
    layers = rest / (_MORE - _FEW)
    weights = (more.lasting_bytes - few.lasting_bytes) * layers
    row_flops = found.row_flops + (more.row_flops - few.row_flops) * layers
    return Count(found.parameters, found.lasting_bytes + weights, found.peak_bytes + weights, row_flops)


def _step(
    student: SplitModel, teacher: SplitModel | None, config: DistillConfig, seq_len: int, top_k: int, vocab: int
) -> Count:
    """The gradients of one step, as training makes them; of more than two micro-batches, two: the others are alike.

    A chunked loss gets the tokens of a few chunks. Of each further one it would hold its hidden state and the gradient
    of that, and multiply as often again.
    """
    micro = min(config.micro_batch_rows, config.rows_per_step)
    batches = min(2, -(-config.rows_per_step // micro))
    model = student.model.train()
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    loss = config.loss.model_copy(update={"logit_softcap": student.logit_softcap, "logit_scale": student.logit_scale})
    setup = Setup(student, teacher, config, loss, vocab, _CPU, lambda: False)
    run, tokens, head_VD = Run(micro), micro * seq_len, student.head_weight_VD
    seen = tokens
    if config.method not in ("dense", "forward_chunked"):
        seen = min(tokens, _CHUNKS * chunk_tokens(loss, len(head_VD), sparse=teacher is None))
    with _counted(student, *([teacher] if teacher else [])) as memory, _few_blocks(head_VD.numel()):
        add_gradients(setup, run, _Batches(batches, micro, seq_len, seen, None if teacher else top_k))  # type: ignore[arg-type]
    parameters = _parameters(student)
    lasting_bytes = _TRAINED_BYTES * parameters
    products = 8 if run.meters.loss_impl in ("recompute", "tiled") else 6
    unseen_bytes = (2 if config.precision == "bf16" else 4) * 2 * head_VD.shape[1]
    unseen_flops = products * head_VD.numel()
    if teacher:
        lasting_bytes += _parameters(teacher) * teacher.head_weight_VD.element_size()
        unseen_bytes += teacher.head_weight_VD.shape[1] * teacher.head_weight_VD.element_size()
        unseen_flops += 2 * teacher.head_weight_VD.numel()
    unseen = tokens - seen
    peak_bytes = memory.peak_bytes + _MOMENTS_BYTES * parameters + unseen * unseen_bytes
    row_flops = run.meters.flops_per_row + unseen / micro * unseen_flops
    return Count(parameters, lasting_bytes, peak_bytes, row_flops)


@dataclass(frozen=True)
class _Batches:
    """Stands in for ``StepRows``: ``number`` micro-batches of which ``tokens`` positions have a target."""

    number: int
    rows: int
    seq_len: int
    tokens: int
    top_k: int | None

    @property
    def num_rows(self) -> int:
        return self.number * self.rows

    @property
    def num_target_tokens(self) -> int:
        return self.number * self.tokens

    def micro_batches(self, num_rows: int, device: torch.device) -> Iterator[MicroBatch]:
        for _ in range(self.number):
            everywhere = self.tokens == self.rows * self.seq_len
            index_N = torch.zeros(self.tokens, dtype=torch.int64)
            signal = None
            if self.top_k is not None:
                ids_NK = torch.zeros(self.tokens, self.top_k, dtype=torch.int32)
                signal = TopKSignal(ids_NK, ids_NK.half(), torch.zeros(self.tokens))
            ids_BS, documents_BS = _ids(self.rows, self.seq_len)
            yield MicroBatch(ids_BS, documents_BS, None if everywhere else index_N, index_N, signal)


def _to_depth(config: PreTrainedConfig, count: Callable[[PreTrainedConfig], Count]) -> Count:
    """The count at the model's own depth."""
    layers = config.get_text_config().num_hidden_layers

    def at(number: int) -> Count:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return count(_with_layers(config, number))

    try:
        if layers <= _MORE:
            return at(layers)
        return at(_FEW).towards(at(_MORE), (layers - _FEW) / (_MORE - _FEW))
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise NotAtHand(f"a {config.model_type} model can't be counted on shapes alone ({reason}).") from error


def _with_layers(config: PreTrainedConfig, number: int) -> PreTrainedConfig:
    return pruned_config(config, range(min(number, config.get_text_config().num_hidden_layers)))


def _build(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> SplitModel:
    kernel = attention if attention in ("eager", "sdpa") else _FLASH
    return SplitModel(AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel))


def _counted(*models: SplitModel) -> CountedMemory:
    return CountedMemory(tensor for model in models for tensor in (*model.model.parameters(), *model.model.buffers()))


@contextlib.contextmanager
def _few_blocks(head_elements: int) -> Iterator[None]:
    """Let a CPU take a large head in fewer blocks than it would: each costs time here, and a GPU needs none."""
    before = project._BLOCK_BYTES
    project._BLOCK_BYTES = max(before, 4 * head_elements // _BLOCKS)
    try:
        yield
    finally:
        project._BLOCK_BYTES = before


def _parameters(model: SplitModel) -> float:
    return float(sum(parameter.numel() for parameter in model.model.parameters()))


def _ids(rows: int, seq_len: int) -> tuple[Any, Any]:
    return (torch.zeros(rows, seq_len, dtype=torch.int64), torch.zeros(rows, seq_len, dtype=torch.int32))
