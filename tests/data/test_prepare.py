import json
from pathlib import Path
from typing import Any

import pytest

from alambique.core.errors import UserError
from alambique.core.params import validate
from alambique.data.dataset import PreparedData
from alambique.data.prepare import PrepareConfig, encode, prepare, split_documents
from alambique.data.readers import CorpusConfig, Document
from tests.tiny_models import PLAIN_TEMPLATE, tiny_tokenizer


def config(**settings: Any) -> PrepareConfig:
    corpora = [{"uri": "file:x.jsonl", "format": settings.pop("format", "jsonl")}]
    return validate(PrepareConfig, {"seq_len": 16, "corpora": corpora, **settings}, "params.yaml: prepare")


def run(folder: Path, records: list[Any], settings: PrepareConfig, **tokenizer: Any) -> PreparedData:
    folder.mkdir(exist_ok=True)
    (folder / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    corpora: list[tuple[CorpusConfig, Path]] = [(settings.corpora[0], folder / "x.jsonl")]
    prepare(
        corpora, tiny_tokenizer(**tokenizer), settings, folder / "out", {"tokenizer_sha256": "t", "vocab_size": 300}
    )
    return PreparedData.open(folder / "out")


def texts(count: int) -> list[dict[str, str]]:
    return [{"text": f"{n} the cat sat on the mat" + " and saw rain" * (n % 4)} for n in range(count)]


def decoded(data: PreparedData) -> dict[str, list[str]]:
    """The documents of each split, as text."""
    tokenizer = tiny_tokenizer()
    found: dict[str, list[str]] = {}
    for name, rows in (("train", data.train), ("valid", data.valid)):
        found[name] = []
        for r in range(rows.num_rows):
            for number in range(int(rows.document_ids_RS[r].max()) + 1):
                ids = rows.input_ids_RS[r][rows.document_ids_RS[r] == number]
                found[name].append(tokenizer.decode(ids))
    return found


def test_documents_are_whole_split_once_and_end_in_eos(tmp_path: Path) -> None:
    records = texts(40)
    data = run(tmp_path, records, config(seq_len=64))
    found = decoded(data)
    assert sorted(found["train"] + found["valid"]) == sorted(record["text"] + "<end>" for record in records)
    assert not set(found["train"]) & set(found["valid"])
    assert len(found["valid"]) == 4
    facts = data.manifest["splits"]
    assert facts["train"]["documents"] == 36
    assert facts["train"]["tokens"] + facts["train"]["padding_tokens"] == data.train.num_rows * 64
    assert data.manifest["vocab_size"] == 300
    assert data.manifest["seq_len"] == 64


def test_duplicates_are_dropped_and_counted(tmp_path: Path) -> None:
    records = texts(20) + [{"text": record["text"].replace(" ", "  ") + "\n"} for record in texts(20)]
    data = run(tmp_path, records, config(seq_len=64))
    assert data.manifest["counts"]["duplicates"] == 20
    assert sum(split["documents"] for split in data.manifest["splits"].values()) == 20


def test_same_input_same_bytes_whatever_the_order(tmp_path: Path) -> None:
    settings = config(seed=3)
    files = []
    for name, records in (("a", texts(40)), ("b", texts(40)[::-1])):
        run(tmp_path / name, records, settings)
        files.append({p.name: p.read_bytes() for p in sorted((tmp_path / name / "out").iterdir())})
    assert files[0] == files[1]
    run(tmp_path / "c", texts(40), config(seed=4))
    assert (tmp_path / "c/out/train.safetensors").read_bytes() != files[0]["train.safetensors"]


def test_growing_the_corpus_keeps_the_order_of_documents() -> None:
    documents = [Document(str(n), text=f"document {n}") for n in range(100)]
    small, large = split_documents(documents[:80], 0.1, 0), split_documents(documents, 0.1, 0)
    order = [document.where for document in large["valid"] + large["train"]]
    assert [where for where in order if int(where) < 80] == [d.where for d in small["valid"] + small["train"]]
    assert (len(small["valid"]), len(large["valid"])) == (8, 10)


def test_budgets_cut_rows(tmp_path: Path) -> None:
    data = run(tmp_path, texts(60), config(train_rows=5, valid_rows=2))
    assert (data.train.num_rows, data.valid.num_rows) == (5, 2)
    full = run(tmp_path / "full", texts(60), config())
    assert full.train.num_rows > 5


def test_long_documents_are_cut_not_truncated(tmp_path: Path) -> None:
    records = [{"text": f"{n} " + "rain in silver rivers " * 30} for n in range(4)]
    data = run(tmp_path, records, config(seq_len=16))
    tokenizer = tiny_tokenizer()
    total = sum(len(tokenizer(record["text"].strip())["input_ids"]) + 1 for record in records)
    kept = sum(split["tokens"] for split in data.manifest["splits"].values())
    assert total - 4 <= kept <= total  # at most one lone token at the end of each
    assert data.manifest["counts"]["cut"] == 4


def test_bos_comes_once_and_eos_is_not_doubled() -> None:
    (ids, targets), (short, _) = encode(
        tiny_tokenizer(bos=True), [Document("a", text="the cat"), Document("b", text="x<end>")]
    )
    assert ids[0] == 1
    assert ids[-1] == 2
    assert targets.all()
    assert short[-2:].tolist().count(2) == 1


def test_chats_train_on_answers_only(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "the cat"}]}
        for n in range(20)
    ]
    silent = [{"messages": [{"role": "user", "content": f"only {n}"}]} for n in range(5)]
    data = run(tmp_path, chats + silent, config(format="chat", seq_len=32), template=PLAIN_TEMPLATE)
    tokenizer = tiny_tokenizer()
    answer = tokenizer("the cat<end>")["input_ids"]
    targets = data.train.input_ids_RS[:, 1:][data.train.loss_mask_RS[:, :-1]].tolist()
    assert targets == answer * (len(targets) // len(answer))
    assert data.manifest["counts"]["without_target"] == 5
    assert data.train.num_target_tokens + data.valid.num_target_tokens == 20 * len(answer)


def test_no_target_at_all_names_the_first_document(tmp_path: Path) -> None:
    silent = [{"messages": [{"role": "user", "content": f"only {n}"}]} for n in range(5)]
    with pytest.raises(
        UserError, match=r"no document of the train split yields a token to learn \(the first: x.jsonl, "
    ):
        run(tmp_path, silent, config(format="chat"), template=PLAIN_TEMPLATE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train_rows": 500},
            r"the train split has \d+ rows of 16 tokens, prepare.train_rows asks for 500: lower it or",
        ),
        ({"valid_rows": 500}, r"the valid split has \d+ rows .* asks for 500: lower it, raise valid_fraction or add"),
    ],
)
def test_too_small_a_corpus_is_refused_with_numbers(tmp_path: Path, settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, texts(40), config(**settings))


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds a single document, which can't be split into train and valid"):
        run(tmp_path, texts(1) * 3, config())
    assert decoded(run(tmp_path, texts(2), config(seq_len=64)))["valid"]


def test_a_tokenizer_without_eos_or_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no end-of-sequence token, which ends every document"):
        run(tmp_path, texts(5), config(), eos=None)
    chat = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(3)]
    with pytest.raises(UserError, match="has no chat template"):
        run(tmp_path, chat, config(format="chat"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corpora": []}, "corpora"),
        ({"seq_len": 1}, "seq_len = 1 should be greater than or equal to 2"),
        ({"valid_fraction": 1.0}, "valid_fraction = 1.0 should be less than 1"),
        (
            {"corpora": [{"uri": "file:x", "format": "jsonl", "filed": "a"}]},
            r"unknown key corpora\[0\].filed; did you mea",
        ),
        ({"train_row": 3}, r"unknown key train_row; did you mean train_rows\?"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**settings)
