"""Stage student@PAIR: the student before training, a pruned teacher or a model by URI."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alambique.core.files import atomic_folder, write_json, write_manifest
from alambique.core.measure import default_device, versions
from alambique.core.params import Config, Params, validate
from alambique.data.dataset import PreparedData
from alambique.models.fetch import ModelSource, fetch_model
from alambique.models.importance import Importance, measure_importance
from alambique.models.load import SplitModel, load_model, load_tokenizer, stored_dtype, tokenizer_sha256
from alambique.models.prune import copy_model, facts, prune_model, require_prunable_width, vocab_rows
from alambique.models.student import Cut, StudentConfig, decide, scores
from alambique.models.vocab import shared_vocab_size
from pipeline.job import job_main, leave

_SIZES = ("layers", "intermediate_size", "num_key_value_heads")


class Settings(Config):
    """What decides the student, beside the prepared data if the teacher is measured on them."""

    student: StudentConfig
    teacher: str
    teacher_model: str


def settings(params: Params, pair: str) -> Settings:
    """Read the stage's sections of params.yaml."""
    student = params.section(StudentConfig, "student", f"pairs.{pair}.student")
    teacher = params.get(f"pairs.{pair}.teacher")
    values = {"student": student, "teacher": teacher, "teacher_model": params.get(f"teachers.{teacher}.model")}
    return validate(Settings, values, f"{params.source}: teachers.{teacher}.model")


def run(pair: str) -> None:
    """Write artifacts/student/PAIR and results/student/PAIR.json, once teacher and student are known to fit."""
    config = settings(Params.load(), pair)
    teacher = fetch_model(config.teacher_model)
    source = teacher if config.student.model is None else fetch_model(config.student.model)
    tokenizer = load_tokenizer(source.path)
    vocab_size = shared_vocab_size(
        load_tokenizer(teacher.path), tokenizer, vocab_rows(teacher.path), vocab_rows(source.path)
    )
    before = facts(teacher.path)
    cut, importance = (None, None) if config.student.model else _decide(config, teacher.path, before)
    with atomic_folder(Path("artifacts/student") / pair) as folder:
        _make(source, cut, folder)
        after = facts(folder)
        results = {
            **after,
            "teacher_parameters": before["num_parameters"],
            "parameters_kept": after["num_parameters"] / before["num_parameters"],
            "strategy": config.student.strategy,
            "teacher_sizes": {name: before[name] for name in _SIZES},
            "layers_kept": None if cut is None else list(cut.layers),
            "layers_removed": None if cut is None else sorted(set(range(before["layers"])) - set(cut.layers)),
            "vocab_size": vocab_size,
        }
        identity = {
            "sources": [{"uri": source.uri, "sha256": source.sha256}],
            "config": config.student.model_dump(mode="json"),
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "versions": versions(),
            "created_by": "alambique student",
        }
        write_manifest(folder, {**identity, **results})
    # The scores stay out of the manifest: their last digits are the device's, the student's bytes are not.
    results["importance"] = None if importance is None or cut is None else scores(importance, cut)
    write_json(Path("results/student") / f"{pair}.json", results)


def _decide(config: Settings, teacher: Path, sizes: Mapping[str, Any]) -> tuple[Cut, Importance | None]:
    """What stays of the teacher; it is run only where the strategy needs it, and when nothing else is wrong."""
    student = config.student
    student.require(*(sizes[name] for name in _SIZES))
    if student.width is not None:
        require_prunable_width(teacher, student.width)
    if not student.measured:
        return decide(student, sizes["layers"]), None
    rows = PreparedData.open(Path("artifacts/prepare") / config.teacher).train
    count = student.measure.rows
    model = load_model(
        teacher, dtype=stored_dtype(teacher), device=default_device(), attention=student.measure.attention
    )
    importance = measure_importance(
        SplitModel(model),
        rows.input_ids_RS[:count],
        rows.document_ids_RS[:count],
        block=student.drop_block.count if student.drop_block else 1,
        width=student.width is not None,
    )
    return decide(student, sizes["layers"], importance), importance


def _make(source: ModelSource, cut: Cut | None, folder: Path) -> None:
    """Write the model, then load it once: a student that can't be split, packed or loaded is refused here."""
    if cut is None:
        copy_model(source, folder)
    else:
        prune_model(source.path, cut, folder)
    model = load_model(folder, dtype=stored_dtype(folder), device=default_device(), attention="eager")
    SplitModel(model).check()


if __name__ == "__main__":
    leave(job_main(run))
