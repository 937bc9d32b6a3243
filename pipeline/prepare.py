"""Stage prepare@TEACHER: text -> token ids of the teacher's tokenizer -> packed rows, split by document."""

from pathlib import Path
from typing import Any

from alambique.core.errors import UserError
from alambique.core.files import read_json, write_json
from alambique.core.params import Config, Params, validate
from alambique.core.sources import fetch, parse
from alambique.data.prepare import PrepareConfig, prepare
from alambique.models.fetch import fetch_tokenizer
from alambique.models.load import load_tokenizer, tokenizer_sha256, vocab_size
from pipeline.job import job_main, leave


class Settings(Config):
    """What decides the prepared data."""

    prepare: PrepareConfig
    model: str


def settings(params: Params, teacher: str) -> Settings:
    """Read the stage's sections of params.yaml."""
    values = {"prepare": params.section(PrepareConfig, "prepare"), "model": params.get(f"teachers.{teacher}.model")}
    return validate(Settings, values, f"{params.source}: teachers.{teacher}")


def run(teacher: str) -> None:
    """Write artifacts/prepare/TEACHER and results/prepare/TEACHER.json."""
    config = settings(Params.load(), teacher)
    folder = fetch_tokenizer(config.model)
    _require_context(folder, config.prepare.seq_len)
    tokenizer = load_tokenizer(folder)
    corpora = [(corpus, fetch(corpus.uri)) for corpus in config.prepare.corpora]
    manifest = prepare(
        corpora,
        tokenizer,
        config.prepare,
        Path("artifacts/prepare") / teacher,
        {
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "vocab_size": vocab_size(tokenizer),
            "sources": [{"uri": corpus.uri, "sha256": parse(corpus.uri).pin} for corpus, _ in corpora],
            "tokenizer": config.model,
        },
    )
    write_json(Path("results/prepare") / f"{teacher}.json", summary(manifest))


def summary(manifest: dict[str, Any]) -> dict[str, Any]:
    """The counts that DVC shows as metrics."""
    return {"seq_len": manifest["seq_len"], **manifest["counts"], **manifest["splits"]}


def _require_context(folder: Path, seq_len: int) -> None:
    """Refuse rows that are longer than the teacher can read."""
    if not (folder / "config.json").is_file():
        return
    model = read_json(folder / "config.json")
    longest = model.get("text_config", model).get("max_position_embeddings")
    if longest is not None and seq_len > longest:
        raise UserError(f"prepare.seq_len = {seq_len} is more than the teacher reads: lower it to {longest} or less.")


if __name__ == "__main__":
    leave(job_main(run))
