"""Conversations as token ids with a mask of what the assistant said: the model's own template, prompts masked."""

import re
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from alambique.core.errors import UserError
from alambique.data.readers import Document, Message

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"strftime_now\(\s*(?P<quote>['\"])(?P<format>.*?)(?P=quote)\s*\)")
# Templates that print today's date would make other tokens tomorrow. Llama 3.1's template falls back to this date.
_DATE = datetime(2024, 7, 26)


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that has no chat template."""
    if not tokenizer.chat_template:
        raise UserError(
            "the corpus holds chats, but the teacher's tokenizer has no chat template: use an instruct model, "
            "or a corpus of another format."
        )


def encode_chat(tokenizer: PreTrainedTokenizerBase, document: Document) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and for each token whether the assistant wrote it.

    Uses the template's own ``{% generation %}`` marks, or else renders the conversation up to each turn.

    Raises:
        UserError: the template refuses the conversation, or rewrites earlier turns so that they can't be told apart.
    """
    messages = list(document.messages)
    if _GENERATION.search(str(tokenizer.chat_template)):
        encoded = _render(tokenizer, document.where, messages, tokenize=True, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]
    text: str = _render(tokenizer, document.where, messages)
    spans = _assistant_spans(tokenizer, document.where, messages, text)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    mask = [
        any(first <= start and end <= last for first, last in spans) and end > start
        for start, end in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), mask


def _assistant_spans(
    tokenizer: PreTrainedTokenizerBase, where: str, messages: list[Message], text: str
) -> list[tuple[int, int]]:
    """Character ranges of ``text`` from the end of each generation prompt to the end of the turn that follows it."""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise UserError(f"{where}: a conversation can't begin with the assistant; begin with a prompt.")
        prompt = _render(tokenizer, where, messages[:index], add_generation_prompt=True)
        turn = _render(tokenizer, where, messages[: index + 1])
        if not (turn.startswith(prompt) and text.startswith(turn)):
            raise UserError(
                f"{where}: the chat template renders message {index + 1} differently once the conversation goes on, "
                "so prompts can't be masked: use a template with {% generation %} marks, or one answer per chat."
            )
        spans.append((len(prompt), len(turn)))
    return spans


def _render(tokenizer: PreTrainedTokenizerBase, where: str, messages: list[Message], **options: Any) -> Any:
    """Render with a fixed date. ``tokenize=True`` gives a mapping with ids, otherwise the text."""
    template = _NOW.sub(lambda match: repr(_DATE.strftime(match["format"])), str(tokenizer.chat_template))
    try:
        return tokenizer.apply_chat_template(
            messages,
            **{"tokenize": False, **options},
            return_dict=bool(options.get("tokenize")),
            date_string=_DATE.strftime("%d %b %Y"),
            chat_template=template,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}: the chat template refuses this conversation ({error}); repair or remove it."
        ) from error
