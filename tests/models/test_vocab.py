import pytest

from alambique.core.errors import UserError
from alambique.models.vocab import shared_vocab_size
from tests.tiny_models import tiny_tokenizer


def test_padding_on_either_side_is_allowed() -> None:
    teacher, student = tiny_tokenizer(), tiny_tokenizer()
    assert shared_vocab_size(teacher, student, 320, 512) == 300
    assert shared_vocab_size(teacher, student, 512, 300) == 300


def test_a_different_token_is_named() -> None:
    student = tiny_tokenizer()
    student.add_tokens(["surplus"])
    with pytest.raises(UserError, match="300 against 301 tokens, and id 300 is absent against 'surplus'; choose a st"):
        shared_vocab_size(tiny_tokenizer(), student, 320, 320)
    with pytest.raises(UserError, match="different vocabularies: 299 against 300 tokens, and id 299 is absent"):
        shared_vocab_size(tiny_tokenizer(vocab_size=299), tiny_tokenizer(), 320, 320)


def test_same_size_is_not_same_vocabulary() -> None:
    one, other = tiny_tokenizer(), tiny_tokenizer()
    one.add_tokens(["left"])
    other.add_tokens(["right"])
    with pytest.raises(UserError, match="301 against 301 tokens, and id 300 is 'left' against 'right'"):
        shared_vocab_size(one, other, 320, 320)


@pytest.mark.parametrize(("rows", "who"), [((299, 320), "teacher"), ((320, 299), "student")])
def test_a_head_too_small_for_the_tokenizer_is_refused(rows: tuple[int, int], who: str) -> None:
    with pytest.raises(UserError, match=f"the {who}'s output head has 299 rows for a tokenizer of 300 tokens"):
        shared_vocab_size(tiny_tokenizer(), tiny_tokenizer(), *rows)
