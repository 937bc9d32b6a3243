"""Causal language models from a local folder, with the backbone and the output head apart.

The losses and the teacher's capture project hidden states chunk by chunk, so they never call ``lm_head`` on a sequence.

Dimensions: B rows, S positions, D hidden size, V rows of the output head (padding included).
"""

import contextlib
import json
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Mxfp4Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.masking_utils import create_masks_for_generate

from alambique.core.errors import UserError
from alambique.core.files import read_json, sha256_json
from alambique.core.products import fast_dtype

DtypeName = Literal["float32", "bfloat16", "float16"]
DeviceMap = Literal["auto", "balanced", "sequential"]
# Largest difference between packed and separate runs that rounding explains, as a share of the largest logit.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # assumption, per significand bits

_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"}  # transformers' names for such layers


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local model folder.

    Raises:
        UserError: the folder has no tokenizer that transformers can read.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} has no tokenizer that can be loaded ({reason}): name a model with its own.") from error
    return tokenizer


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash what decides token ids: vocabulary, merges, normaliser, special tokens and chat template.

    Names of files, versions and settings of one call (padding, truncation) don't count.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = {"vocab": tokenizer.get_vocab()}
    else:
        rules = json.loads(backend.to_str())
        rules = {key: value for key, value in rules.items() if key not in ("padding", "truncation", "version")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return sha256_json({"rules": rules, "special": special, "chat_template": tokenizer.chat_template})


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Ids that the tokenizer can produce: the largest one + 1. Rows of a model beyond it are padding."""
    ids: dict[str, int] = tokenizer.get_vocab()
    return max(ids.values()) + 1


def stored_dtype(path: Path) -> DtypeName:
    """The dtype that the weights in ``path`` are stored in, as its configuration says (float32 where it doesn't)."""
    dtype = AutoConfig.from_pretrained(path, local_files_only=True).dtype
    name = str(dtype or "float32").removeprefix("torch.")
    if name not in get_args(DtypeName):
        raise UserError(f"{path} is stored as {name}: only {', '.join(get_args(DtypeName))} can be loaded.")
    return cast(DtypeName, name)


def load_model(
    path: Path,
    *,
    dtype: Literal["auto"] | DtypeName,
    device: torch.device,
    attention: str = "sdpa",
    device_map: DeviceMap | None = None,
    tensor_parallel: int = 1,
) -> PreTrainedModel:
    """Load a causal language model from a local folder, in eval mode, without remote code.

    MXFP4 checkpoints (gpt-oss) are expanded to ``dtype``: packed experts can be neither trained nor pruned.

    Args:
        path: a folder that holds a transformers model.
        dtype: of its weights and activations; auto is the device's ``fast_dtype``.
        attention: transformers' attention implementation.
        device: where the whole model goes, or with ``device_map`` where its inputs come from.
        device_map: spread whole layers over the visible GPUs, and the CPU where they are full (accelerate).
        tensor_parallel: this many processes of one process group split each layer between them; all call this.

    Raises:
        UserError: the folder is no causal language model, ``attention`` doesn't suit it, or it can't be split so.
    """
    settings = read_json(path / "config.json", "Name a folder that holds a transformers model.")
    quantised = (settings.get("quantization_config") or {}).get("quant_method")
    extra: dict[str, Any] = {"quantization_config": Mxfp4Config(dequantize=True)} if quantised == "mxfp4" else {}
    if tensor_parallel > 1:
        require_divisible(path, tensor_parallel)
        extra["distributed_config"] = DistributedConfig(tp_size=tensor_parallel, tp_plan="auto")
    elif device_map is not None:
        extra["device_map"] = device_map
    elif device.type == "cuda":
        extra["device_map"] = {"": device}  # weights go straight to the GPU
    try:
        model: PreTrainedModel
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, fast_dtype(device) if dtype == "auto" else dtype),
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
            **extra,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} can't be loaded as a causal language model: {reason}") from error
    if info["missing_keys"]:  # transformers would go on with random numbers in their place
        missing = sorted(info["missing_keys"])
        raise UserError(f"{path} lacks {len(missing)} weights of its model ({missing[0]}, …): fetch or make it again.")
    return model


def require_divisible(path: Path, processes: int) -> None:
    """Refuse a model whose layers transformers can't split between ``processes`` processes.

    Raises:
        UserError: it has no plan for the layers (only for the embeddings, say), or its heads don't divide.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    if not any("*" in rule for rule in config.base_model_tp_plan or {}):  # `layers.*.mlp.up_proj`
        raise UserError(
            f"transformers has no plan to split the layers of a {config.model_type} model, so tensor_parallel = "
            f"{processes} would not make it smaller: use device_map = auto instead."
        )
    heads = {getattr(config, name, None) or 0 for name in ("num_attention_heads", "num_key_value_heads")}
    if any(number % processes for number in heads):
        raise UserError(
            f"{path} has {' and '.join(map(str, sorted(heads, reverse=True)))} attention heads, which tensor_parallel "
            f"= {processes} processes can't share out evenly: choose a divisor, or use device_map = auto."
        )


class SplitModel:
    """A causal language model as a backbone that gives hidden states and a head that is only a weight.

    The logits of a position are ``cap·tanh(z / cap)`` with ``z = logit_scale · (hidden · head_weightᵀ + bias)``, or z
    itself where ``logit_softcap`` is None. ``head_weight_VD`` is the live parameter, tied to the embeddings where
    the model ties them.

    Raises:
        UserError: the model has no plain linear output head, or has recurrent layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or not head.weight.dtype.is_floating_point:
            kind = type(head).__name__
            raise UserError(f"{type(model).__name__} has a {kind} as its output head; only a plain linear one will do.")
        self.model = model
        self.config = model.config.get_text_config()
        recurrent = _RECURRENT.intersection(getattr(self.config, "layer_types", None) or ())
        if recurrent:
            raise UserError(
                f"{type(model).__name__} has {sorted(recurrent)[0]} layers, whose state would run on from one packed "
                "document into the next: choose a model that has only attention."
            )
        self.head_weight_VD = cast(nn.Parameter, head.weight)
        self.head_bias_V: Tensor | None = head.bias
        self.logit_softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.logit_scale = _logit_scale(self.config)
        self.backbone = model.get_decoder() if model.get_decoder() is not model else model.base_model
        self._flatten = "flash" in (self.config._attn_implementation or "")

    def hidden(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, S, D]; each document attends only to itself, from position 0.

        The block-diagonal masks come from transformers' own mask builder, which sees documents where positions
        restart. They are passed in because not every model forwards its positions to that builder (gpt-oss in 5.24
        doesn't, and silently attends across documents). Flash kernels take no mask and read the positions, but only
        of a single row, hence the flattening.
        """
        shape, position_ids_BS = input_ids_BS.shape, positions(document_ids_BS)
        if self._flatten:
            input_ids_BS, position_ids_BS = input_ids_BS.reshape(1, -1), position_ids_BS.reshape(1, -1)
        mask = create_masks_for_generate(
            config=self.config,
            # for its shape, dtype and device; the head may be on another one than the ids
            inputs_embeds=self.head_weight_VD.new_empty((*input_ids_BS.shape, 0), device=input_ids_BS.device),
            attention_mask=None,
            cache=None,
            position_ids=position_ids_BS,
        )
        output = self.backbone(
            input_ids=input_ids_BS, position_ids=position_ids_BS, attention_mask=mask, use_cache=False
        )
        hidden_BSD: Tensor = output.last_hidden_state
        return hidden_BSD.reshape(shape[0], -1, hidden_BSD.shape[-1])  # part of S where processes share rows

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits of hidden states [..., D] -> [..., V]: the plain definition, for checks and small evaluations."""
        z_NV = self.logit_scale * nn.functional.linear(hidden_ND, self.head_weight_VD, self.head_bias_V)
        if self.logit_softcap is None:
            return z_NV
        return self.logit_softcap * torch.tanh(z_NV / self.logit_softcap)

    @torch.no_grad()
    def gather_head(self) -> None:
        """Take a whole copy of the head for scoring, where it is split over processes or waits on the CPU for its turn.

        Every process of a tensor-parallel group must call this.
        """
        head = self.model.get_output_embeddings()
        with contextlib.ExitStack() as stack:
            if head.weight.is_meta:  # offloaded by accelerate, which takes seconds to import
                from accelerate.utils import align_module_device

                stack.enter_context(align_module_device(head))
            weight_VD, bias_V = _whole(head.weight), None if head.bias is None else _whole(head.bias)
        self.head_weight_VD, self.head_bias_V = cast(nn.Parameter, weight_VD), bias_V

    @torch.no_grad()
    def check(self, device: torch.device | None = None) -> None:
        """Prove on eight tokens that this model can be split and packed, before hours depend on it.

        Compares the split logits of packed documents with the model's own logits of each document alone. An
        architecture that transforms logits in another way, or whose attention or state leaks between packed
        documents (recurrent models, attention kernels that ignore positions), shows here.

        ``device`` is where ids go in; the head's by default.

        Raises:
            UserError: they differ by more than rounding.
        """
        device = device or self.head_weight_VD.device
        documents_BS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]], device=device)
        ids_BS = (torch.arange(16, device=device).reshape(2, 8) * 7 + 3) % self.head_weight_VD.shape[0]
        packed_BSV = self.logits(self.hidden(ids_BS, documents_BS).to(self.head_weight_VD.device))
        for row, cut in ((0, 3), (1, 5)):
            for part in (slice(0, cut), slice(cut, 8)):
                alone_SV = self.model(input_ids=ids_BS[row : row + 1, part], use_cache=False).logits[0]
                alone_SV = alone_SV.to(packed_BSV.device)
                worst = (packed_BSV[row, part] - alone_SV).abs().max() / alone_SV.abs().max()
                if not worst <= ROUNDING[self.head_weight_VD.dtype]:
                    raise UserError(
                        f"{type(self.model).__name__} with {self.config._attn_implementation} attention gives logits "
                        f"that differ by {worst:.0%} when documents are packed or the head is applied apart: "
                        "choose another `attention`, or another model."
                    )


def _whole(weight: Tensor) -> Tensor:
    """The whole of a weight that may be split over processes, and that stays when an offloaded one goes."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach().clone()


def positions(document_ids_BS: Tensor) -> Tensor:
    """Position of each token in its document, [B, S] int64, from 0 at every change of document id."""
    index_S = torch.arange(document_ids_BS.shape[1], device=document_ids_BS.device)
    starts_BS = torch.zeros_like(document_ids_BS, dtype=torch.bool)
    starts_BS[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    first_BS = torch.where(starts_BS, index_S, 0).cummax(dim=1).values
    return index_S - first_BS


def _logit_scale(config: object) -> float:
    """The factor between the head's product and the logits: families name it, and even invert it, differently."""
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        inverted = not str(getattr(config, "model_type", "")).startswith("hyperclovax")
        return 1.0 / float(scaling) if inverted else float(scaling)  # Granite divides, HyperCLOVA X multiplies
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere, Falcon-H1, Muse
        if (scale := getattr(config, name, None)) is not None:
            return float(scale)
    return 1.0
