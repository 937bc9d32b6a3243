"""What a capture may be told: the ``teacher`` section of params.yaml."""

from typing import Literal

import torch
from pydantic import Field, model_validator

from alambique.cache.codec import find_codec
from alambique.cache.sampled import MAX_DRAWS, Sampling
from alambique.cache.states import HiddenStates
from alambique.core.errors import UserError
from alambique.core.params import Config
from alambique.core.products import fast_dtype


class CaptureConfig(Config):
    """How the teacher is run and what is kept.

    Attributes:
        keep: the most probable tokens (``top_k``), or draws from the whole distribution (``sampled``), or the most
            probable and draws from the others (``top_k_and_draws``).
        top_k: entries kept at each position.
        top_p: keep fewer entries where they hold this mass already; 1 keeps K everywhere.
        draws: with replacement, at each position; ``top_k`` has none, and ``sampled`` ignores the setting ``top_k``.
        seed: of the draws.
        hidden_layers: of the teacher, counted from 0, whose hidden states are kept too, for ``distill.hidden``: two
            bytes of each dimension, layer and position.
        codec: how they are stored; a module in alambique.cache.codecs.
        dtype: of the teacher's weights and activations; the softmax is always fp32.
        attention: transformers' attention implementation.
        device_map: spread the teacher's layers over the visible GPUs, and the CPU where they are full.
        tensor_parallel: GPUs that split each of its layers between them, one process each.
        batch_tokens: tokens of one forward pass, whole rows; halved when memory runs out.
        logits_mib: memory for the logits of one chunk of tokens.
        shard_mib: size of a shard, and so of what a kill can lose.
    """

    keep: Literal["top_k", "sampled", "top_k_and_draws"] = "top_k"  # source: as top_k; docs/cache-format.md compares
    top_k: int = Field(default=100, ge=1, le=65_536)  # source: the published system caches the top 100
    top_p: float = Field(default=1.0, gt=0, le=1)  # source: as above
    draws: int = Field(default=50, ge=1, le=MAX_DRAWS)  # source: Sparse Logit Sampling, 12 different tokens of 50 draws
    seed: int = Field(default=0, ge=0)  # assumption: any will do
    hidden_layers: tuple[int, ...] = ()  # assumption: logits are enough; a state is often larger than a top 100
    codec: str = "exact"  # source: benchmarks/cache_cases.py, smaller than the lossy formats of the field
    # source: bfloat16 is what teachers are published in; auto is float32 on CPUs that would emulate its products
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention: str = "sdpa"  # source: transformers' default
    device_map: Literal["auto", "balanced", "sequential"] | None = None  # assumption: the teacher fits on one GPU
    tensor_parallel: int = Field(default=1, ge=1)  # assumption: as above
    batch_tokens: int = Field(default=8192, ge=1)  # assumption: fills a GPU, and a 70B teacher's activations still fit
    # assumption: 2,000 tokens at V = 128,256 keep the head's product compute-bound on a GPU; a CPU takes 96 MiB
    logits_mib: int = Field(default=2048, ge=1)
    shard_mib: float = Field(default=256, gt=0)  # source: files of 256 MB to 1 GB suit DVC; docs/cache-format.md

    @model_validator(mode="after")
    def _store_what_is_kept(self) -> "CaptureConfig":
        if self.top_p < 1 and self.codec != "top_p":
            raise ValueError(f"needs codec = top_p for top_p = {self.top_p}: {self.codec} would store the empty slots")
        if self.top_p < 1 and self.keep != "top_k":
            raise ValueError(f"can't cut draws to a mass: top_p = {self.top_p} needs keep = top_k")
        if self.hidden_layers:
            HiddenStates(layers=self.hidden_layers, size=1)
        if self.device_map is not None and self.tensor_parallel > 1:
            raise ValueError(f"can't have tensor_parallel = {self.tensor_parallel} and a device_map, only one of them")
        return self

    def resolved(self, device: torch.device) -> "CaptureConfig":
        """With the dtype that ``auto`` means on ``device``."""
        return self.model_copy(update={"dtype": fast_dtype(device)}) if self.dtype == "auto" else self

    @property
    def sampling(self) -> Sampling | None:
        """What decides the draws, or None for the top K."""
        if self.keep == "top_k":
            return None
        return Sampling(draws=self.draws, seed=self.seed, top_k=0 if self.keep == "sampled" else self.top_k)

    def row_bytes(self, seq_len: int, slots: int, states: HiddenStates | None) -> float:
        """Rough upper estimate of a row's size, to size blocks and to check free space."""
        entries = seq_len * slots * find_codec(self.codec, "teacher.codec").BYTES_PER_ENTRY
        return entries + (seq_len * states.bytes_per_token if states else 0)

    def states(self, num_layers: int, size: int) -> HiddenStates | None:
        """What ``hidden_layers`` is of a teacher with so many layers and a hidden state of that size.

        Raises:
            UserError: a layer that it doesn't have.
        """
        if not self.hidden_layers:
            return None
        if max(self.hidden_layers) >= num_layers:
            raise UserError(
                f"teacher.hidden_layers names layer {max(self.hidden_layers)}, but the teacher's layers are 0 to "
                f"{num_layers - 1}."
            )
        return HiddenStates(layers=self.hidden_layers, size=size)

    def require_vocabulary(self, vocab_size: int) -> None:
        """Refuse to keep more entries than there are tokens."""
        if self.keep != "sampled" and self.top_k > vocab_size:
            raise UserError(
                f"teacher.top_k = {self.top_k} is larger than the vocabulary of {vocab_size} tokens: choose at most "
                f"{vocab_size}."
            )
