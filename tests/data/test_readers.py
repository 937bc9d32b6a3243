import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alambique.core.errors import UserError
from alambique.core.params import validate
from alambique.data.readers import CorpusConfig, Document, read_corpus


def corpus(format: str, **settings: Any) -> CorpusConfig:
    return validate(CorpusConfig, {"uri": "file:here", "format": format, **settings}, "params.yaml: corpora[0]")


def jsonl(path: Path, *records: Any) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return path


def texts(path: Path, config: CorpusConfig) -> list[str]:
    return [document.text for document in read_corpus(path, config)[0]]


def test_text_files_are_documents_or_cut_at_a_separator(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second ünïcode 🙂\n")
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\n three ")
    (tmp_path / "c.md").write_text("third")
    (tmp_path / "ignored.json").write_text("{}")
    assert texts(tmp_path, corpus("text")) == ["one\n\ntwo\n\n\n three", "second ünïcode 🙂", "third"]
    assert texts(tmp_path / "a.txt", corpus("text", separator=r"\n\n+")) == ["one", "two", "three"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_jsonl_fields_patterns_and_lengths(tmp_path: Path, name: str) -> None:
    records = [{"doc": {"query": f"Title: t\nBackground: {text}\nQuestion: ?"}} for text in ("long enough", "no", "")]
    path = jsonl(tmp_path / name, *records, {"doc": {"query": "other"}})
    config = corpus("jsonl", field="doc.query", pattern=r"(?s)Background: (.*?)\nQ", min_chars=3)
    documents, skipped = read_corpus(path, config)
    assert [document.text for document in documents] == ["long enough"]
    assert skipped == {"unmatched": 1, "too_short": 2}
    assert documents[0].where == f"{name}, line 1"


def test_unicode_line_separators_do_not_end_a_record(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "one\u2028still one"}\n')
    assert texts(tmp_path / "x.jsonl", corpus("jsonl")) == ["one\u2028still one"]


def test_parquet_reads_the_wanted_column(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "meta": [{"k": "x"}, {"k": "y"}]})
    pq.write_table(table, tmp_path / "x.parquet")
    assert texts(tmp_path / "x.parquet", corpus("parquet")) == ["a", "b"]
    assert texts(tmp_path, corpus("parquet", field="meta.k")) == ["x", "y"]
    with pytest.raises(UserError, match=r"x.parquet, row 1 has no field texts; did you mean text\?"):
        read_corpus(tmp_path, corpus("parquet", field="texts"))


def test_chats_from_jsonl_and_parquet(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "n"}]
    jsonl(tmp_path / "x.jsonl", {"messages": messages})
    pq.write_table(pa.table({"conversation": [messages]}), tmp_path / "y.parquet")
    from_jsonl, _ = read_corpus(tmp_path / "x.jsonl", corpus("chat"))
    from_parquet, _ = read_corpus(tmp_path / "y.parquet", corpus("chat", field="conversation"))
    assert from_jsonl[0].messages == from_parquet[0].messages == tuple(messages)
    assert from_jsonl[0].key == from_parquet[0].key


def test_max_documents_takes_the_first(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", *({"text": str(n)} for n in range(5)))
    assert texts(path, corpus("jsonl", max_documents=2)) == ["0", "1"]


def test_keys_ignore_whitespace_only() -> None:
    assert Document("a", "x  y\n").key == Document("b", " x y").key
    assert Document("a", "x y").key != Document("a", "xy").key
    assert Document("a", "lone \ud800 surrogate").key  # JSON allows them


@pytest.mark.parametrize(
    ("format", "settings", "records", "message"),
    [
        ("jsonl", {}, [{"txt": "a"}], r"x.jsonl, line 1 has no field text; did you mean txt\?"),
        ("jsonl", {"field": "a.b"}, [{"a": {"c": 1}}], "line 1 has no field a.b; known: c"),
        ("jsonl", {}, ["bare"], "line 1 has no field text"),
        ("jsonl", {}, [{"text": 3}], "line 1: text is int, not text; name another `field`"),
        ("jsonl", {"pattern": "q(.)"}, [{"text": "a"}, {"text": "b"}], r"no usable document \(2 without a match of"),
        ("jsonl", {}, [{"text": "  "}], r"no usable document \(0 without a match of `pattern`, 1 shorter than min_"),
        ("jsonl", {}, [], "file:here holds no usable document"),
        ("chat", {}, [{"messages": "hello"}], "line 1: a chat must be a list of messages, not str"),
        ("chat", {}, [{"messages": []}], "line 1: a chat must be a list of messages"),
        ("chat", {}, [{"messages": [{"text": "a"}]}], "line 1: every message needs `role` and `content`, unlike"),
    ],
)
def test_bad_records_are_refused_in_one_sentence(
    tmp_path: Path, format: str, settings: dict[str, Any], records: list[Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_corpus(jsonl(tmp_path / "x.jsonl", *records), corpus(format, **settings))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"x.jsonl, line 2 is not JSON"):
        read_corpus(tmp_path / "x.jsonl", corpus("jsonl"))
    whole = gzip.compress(b'{"text": "a"}\n' * 50)
    (tmp_path / "x.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"x.jsonl.gz can't be read as UTF-8 text"):
        read_corpus(tmp_path / "x.jsonl.gz", corpus("jsonl"))
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"x.txt can't be read as UTF-8 text"):
        read_corpus(tmp_path / "x.txt", corpus("text"))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"x.parquet is not a parquet file that can be read"):
        read_corpus(tmp_path / "x.parquet", corpus("parquet"))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"file:here holds no file ending in .jsonl, .jsonl.gz: check `format`"):
        read_corpus(tmp_path, corpus("jsonl"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "("}, r"pattern = '\(' is not a regular expression"),
        ({"pattern": "abc"}, "pattern = 'abc' needs a group in parentheses: group 1 is what is kept"),
        ({"separator": "["}, r"separator = '\[' is not a regular expression"),
        ({"feild": "a"}, r"unknown key feild; did you mean field\?"),
        ({"min_chars": 0}, "min_chars = 0 should be greater than or equal to 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        corpus("jsonl", **settings)
    with pytest.raises(UserError, match="format = 'csv' should be 'text', 'jsonl', 'parquet' or 'chat'"):
        corpus("csv")
