"""Real text and a real teacher for the cache's cases: what params.yaml names first, or tiny stand-ins for --quick.

Dimensions: R rows, S positions, N tokens, D hidden size, V vocabulary.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from alambique.core.params import Params
from alambique.core.sources import fetch
from alambique.data.dataset import PackedRows, PreparedData
from alambique.data.prepare import prepare
from alambique.models.fetch import fetch_model
from alambique.models.load import DtypeName, SplitModel, load_model, load_tokenizer, tokenizer_sha256, vocab_size
from pipeline import prepare as prepare_stage

_QUICK_VOCAB, _QUICK_SEQ_LEN = 300, 32
_BATCH_ROWS = 8  # source: docs/log.md, faster than 32 on a CPU


def load_teacher(dtype: DtypeName, device: torch.device, quick: bool) -> SplitModel:
    """The first teacher of params.yaml, or a random Llama of two layers."""
    if quick:
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        return random_llama(getattr(torch, dtype), device, vocab_size=_QUICK_VOCAB, **shape)
    params = Params.load()
    source = fetch_model(params.get(f"teachers.{params.keys('teachers')[0]}.model"))
    return SplitModel(load_model(source.path, dtype=dtype, device=device))


def load_rows(num_rows: int, quick: bool) -> PackedRows:
    """Packed rows of the corpora in params.yaml, made by the prepare stage's own code; or random ids."""
    return load_splits(num_rows, 1, quick).train


def load_splits(train_rows: int, valid_rows: int, quick: bool) -> PreparedData:
    """The same with held-out rows; the manifest holds ``tokenizer_sha256`` and ``vocab_size``."""
    if quick:
        facts = {"tokenizer_sha256": "", "vocab_size": _QUICK_VOCAB}
        # The same rows in each call, as real ones are.
        train, valid = (
            random_rows(number, _QUICK_SEQ_LEN, _QUICK_VOCAB, torch.Generator().manual_seed(number))
            for number in (train_rows, valid_rows)
        )
        return PreparedData(train, valid, facts)
    params = Params.load()
    settings = prepare_stage.settings(params, params.keys("teachers")[0])
    config = settings.prepare.model_copy(update={"train_rows": train_rows, "valid_rows": valid_rows})
    tokenizer = load_tokenizer(fetch_model(settings.model).path)
    facts = {"tokenizer_sha256": tokenizer_sha256(tokenizer), "vocab_size": vocab_size(tokenizer)}
    with tempfile.TemporaryDirectory() as folder:
        corpora = [(corpus, fetch(corpus.uri)) for corpus in config.corpora]
        prepare(corpora, tokenizer, config, Path(folder) / "data", facts)
        return PreparedData.open(Path(folder) / "data")


def random_rows(num_rows: int, seq_len: int, vocab: int, generator: torch.Generator) -> PackedRows:
    """Rows of one document each."""
    ids_RS = torch.randint(vocab, (num_rows, seq_len), dtype=torch.int32, generator=generator)
    mask_RS = torch.ones_like(ids_RS, dtype=torch.bool)
    mask_RS[:, -1] = False
    return PackedRows(ids_RS, torch.zeros_like(ids_RS), mask_RS)


def random_llama(dtype: torch.dtype, device: torch.device, **shape: int) -> SplitModel:
    """A Llama of that shape, made where it is to be."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return SplitModel(LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval())
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def hidden_states(model: SplitModel, rows: PackedRows, tokens: int | None = None) -> Tensor:
    """Hidden states of the captured positions, the first ``tokens`` or all, [N, D], where the model is."""
    device, parts, found = model.head_weight_VD.device, list[Tensor](), 0
    for start in range(0, rows.num_rows, _BATCH_ROWS):
        batch = slice(start, start + _BATCH_ROWS)
        hidden_BSD = model.hidden(rows.input_ids_RS[batch].to(device), rows.document_ids_RS[batch].to(device))
        parts.append(hidden_BSD[rows.loss_mask_RS[batch].to(device)])
        found += len(parts[-1])
        if tokens is not None and found >= tokens:
            break
    return torch.cat(parts)[:tokens].clone()


def widen(head_weight_VD: Tensor, vocab: int) -> Tensor:
    """A head of ``vocab`` rows, [vocab, D]: those given and noisy copies of them, permuted.

    Stands in for a larger vocabulary's frequencies. The numbering says nothing about them, where a real tokenizer's
    says much, so ids compress worse than real ones would.
    """
    generator = torch.Generator().manual_seed(0)
    weight_VD = head_weight_VD.detach().float().cpu()
    source_X = torch.randint(0, len(weight_VD), (vocab - len(weight_VD),), generator=generator)
    noise_XD = torch.randn(len(source_X), weight_VD.shape[1], generator=generator) * (0.5 * weight_VD.std())
    wide_VD = torch.cat([weight_VD, weight_VD[source_X] + noise_XD])
    order_V = torch.randperm(vocab, generator=generator)
    return wide_VD[order_V].to(head_weight_VD)
