"""Stage student@PAIR: the student before training, a pruned teacher or a model by URI."""

from pathlib import Path

from alambique.core.files import atomic_folder, write_json, write_manifest
from alambique.core.measure import default_device, versions
from alambique.core.params import Config, Params, validate
from alambique.models.fetch import ModelSource, fetch_model
from alambique.models.load import SplitModel, load_model, load_tokenizer, stored_dtype, tokenizer_sha256
from alambique.models.student import StudentConfig, copy_model, facts, layers_of, prune_layers, vocab_rows
from alambique.models.vocab import shared_vocab_size
from pipeline.job import job_main, leave


class Settings(Config):
    """What decides the student."""

    student: StudentConfig
    teacher_model: str


def settings(params: Params, pair: str) -> Settings:
    """Read the stage's sections of params.yaml."""
    student = params.section(StudentConfig, "student", f"pairs.{pair}.student")
    teacher = params.get(f"pairs.{pair}.teacher")
    values = {"student": student, "teacher_model": params.get(f"teachers.{teacher}.model")}
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
    kept = None if config.student.model else config.student.kept_layers(layers_of(teacher.path))
    with atomic_folder(Path("artifacts/student") / pair) as folder:
        _make(source, kept, folder)
        results = {
            **facts(folder),
            "teacher_parameters": facts(teacher.path)["num_parameters"],
            "layers_kept": kept,
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
    write_json(Path("results/student") / f"{pair}.json", results)


def _make(source: ModelSource, kept: list[int] | None, folder: Path) -> None:
    """Write the model, then load it once: a student that can't be split, packed or loaded is refused here."""
    if kept is None:
        copy_model(source, folder)
    else:
        prune_layers(source.path, kept, folder)
    model = load_model(folder, dtype=stored_dtype(folder), device=default_device(), attention="eager")
    SplitModel(model).check()


if __name__ == "__main__":
    leave(job_main(run))
