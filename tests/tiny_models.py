"""Tiny tokenizers and models that tests build in moments, without any download."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PLAIN_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<end>{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
)
WORDS = "the cat sat on the mat while two old dogs ran over green hills and saw nothing but rain in silver rivers"


def tiny_tokenizer(
    *, vocab_size: int = 300, template: str | None = None, bos: bool = False, eos: str | None = "<end>"
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text round-trips."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<end>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS] * 4, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=eos, pad_token="<pad>", chat_template=template
    )


def tiny_model(config_class: type[PreTrainedConfig], *, attention: str = "sdpa", **settings: object) -> PreTrainedModel:
    """A random model of three layers and 32 hidden units, in eval mode, peaked enough that differences show."""
    torch.manual_seed(0)
    defaults: dict[str, object] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = AutoModelForCausalLM.from_config(config_class(**(defaults | settings)), attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model.eval()


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write a model folder as transformers does."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
