import pytest

from alambique.core.errors import UserError
from alambique.data.chat import encode_chat, require_template
from alambique.data.readers import Document
from tests.tiny_models import MARKED_TEMPLATE, PLAIN_TEMPLATE, tiny_tokenizer

MESSAGES = (
    {"role": "system", "content": "rain"},
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": "on the mat"},
    {"role": "user", "content": "dogs?"},
    {"role": "assistant", "content": "over hills 🙂"},
)
CHAT = Document("x.jsonl, line 1", messages=MESSAGES)


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_only_what_the_assistant_said_is_a_target(template: str) -> None:
    tokenizer = tiny_tokenizer(template=template)
    ids, mask = encode_chat(tokenizer, CHAT)
    assert len(ids) == len(mask)
    expected = (
        "<|system|>rain<end><|user|>the cat?<end><|assistant|>on the mat<end>"
        "<|user|>dogs?<end><|assistant|>over hills 🙂<end>"
    )
    assert tokenizer.decode(ids) == expected
    said = tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept])
    assert said == "on the mat<end>over hills 🙂<end>"


def test_both_ways_agree_token_by_token() -> None:
    plain = encode_chat(tiny_tokenizer(template=PLAIN_TEMPLATE), CHAT)
    assert encode_chat(tiny_tokenizer(template=MARKED_TEMPLATE), CHAT) == plain


def test_special_tokens_are_the_templates_business() -> None:
    ids, _ = encode_chat(tiny_tokenizer(template="<bos>" + PLAIN_TEMPLATE, bos=True), CHAT)
    assert ids.count(1) == 1  # the tokenizer's own BOS would double it


def test_a_conversation_without_an_answer_has_no_target() -> None:
    _, mask = encode_chat(tiny_tokenizer(template=PLAIN_TEMPLATE), Document("x", messages=MESSAGES[:2]))
    assert not any(mask)


@pytest.mark.parametrize("date", ["{{ strftime_now('%d %b %Y') }}", "{{ date_string }}"])
def test_templates_that_print_the_date_print_a_fixed_one(date: str) -> None:
    tokenizer = tiny_tokenizer(template=date + PLAIN_TEMPLATE)
    ids, _ = encode_chat(tokenizer, CHAT)
    assert tokenizer.decode(ids).startswith("26 Jul 2024")


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    rewriting = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content[:2] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(UserError, match=r"x.jsonl, line 1: the chat template renders message 3 differently once"):
        encode_chat(tiny_tokenizer(template=rewriting), CHAT)


def test_a_template_that_refuses_is_quoted() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        UserError, match=r"line 1: the chat template refuses this conversation \(roles must alternate\)"
    ):
        encode_chat(tiny_tokenizer(template=template), CHAT)


def test_a_conversation_that_begins_with_the_assistant_is_refused() -> None:
    with pytest.raises(UserError, match="a conversation can't begin with the assistant"):
        encode_chat(tiny_tokenizer(template=PLAIN_TEMPLATE), Document("x", messages=MESSAGES[2:]))


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(UserError, match="the teacher's tokenizer has no chat template: use an instruct model"):
        require_template(tiny_tokenizer())
