"""Whether two models speak the same tokens: decided by content, because sizes mislead both ways."""

from transformers import PreTrainedTokenizerBase

from alambique.core.errors import UserError
from alambique.models.load import vocab_size


def shared_vocab_size(
    teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase, teacher_rows: int, student_rows: int
) -> int:
    """The number of token ids that both models share, after checking that each id means the same token to both.

    ``teacher_rows`` and ``student_rows`` are the rows of the output heads. Either may be padded beyond the tokenizer
    (Qwen2.5: 151,665 tokens, 151,936 rows in small models and 152,064 in large ones); the padding carries no signal.

    Raises:
        UserError: the vocabularies differ, or a head has fewer rows than there are tokens.
    """
    teacher_ids, student_ids = teacher.get_vocab(), student.get_vocab()
    if teacher_ids != student_ids:
        raise UserError(
            f"teacher and student have different vocabularies: {_difference(teacher_ids, student_ids)}; "
            "choose a student whose tokenizer has the same token for every id, or prune the teacher."
        )
    size = vocab_size(teacher)
    for who, rows in (("teacher", teacher_rows), ("student", student_rows)):
        if rows < size:
            raise UserError(
                f"the {who}'s output head has {rows:,} rows for a tokenizer of {size:,} tokens: "
                "the model and its tokenizer don't belong together."
            )
    return size


def _difference(teacher_ids: dict[str, int], student_ids: dict[str, int]) -> str:
    """Describe the first id, in order, at which the vocabularies part."""
    teacher_tokens = {index: token for token, index in teacher_ids.items()}
    student_tokens = {index: token for token, index in student_ids.items()}
    first = min(
        index
        for index in teacher_tokens.keys() | student_tokens.keys()
        if teacher_tokens.get(index) != student_tokens.get(index)
    )
    mine, theirs = (
        "absent" if tokens.get(first) is None else repr(tokens[first]) for tokens in (teacher_tokens, student_tokens)
    )
    return f"{len(teacher_ids):,} against {len(student_ids):,} tokens, and id {first} is {mine} against {theirs}"
