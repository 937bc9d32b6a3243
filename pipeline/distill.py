"""Stage distill@PAIR: trains the student against its teacher, and ships it as a model folder.

Every method has the teacher's cache as a dependency, `online` too, which reads no row of it: the graph can't depend on
a value, and the cache's manifest says which teacher runs live and in which precision, so that methods differ in nothing
else.
"""

import contextlib
import dataclasses
import math
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from alambique.cache.reader import TeacherCache
from alambique.cache.sampled import require_tail
from alambique.core.environment import seconds, whole_number
from alambique.core.errors import UserError
from alambique.core.files import (
    MANIFEST,
    read_manifest,
    require_free_space,
    sha256_file,
    sha256_json,
    write_bytes,
    write_json,
)
from alambique.core.measure import default_device, device_name, versions
from alambique.core.params import Config, Params, validate
from alambique.core.places import SHIPPED, forget_shipped, work_dir
from alambique.data.dataset import PreparedData
from alambique.models.fetch import fetch_model
from alambique.models.load import SplitModel, load_model, load_tokenizer, tokenizer_sha256
from alambique.models.ranks import Group, launch, local_rank
from alambique.train.checkpoint import weights
from alambique.train.config import DistillConfig
from alambique.train.context import require_shareable
from alambique.train.export import export_model, hub_repositories, model_card, sources_text
from alambique.train.hidden import HiddenConfig
from alambique.train.loop import distill
from alambique.train.sharded import (
    Processes,
    Stopped,
    TooLarge,
    collect,
    fitting_rows,
    note_fitting_rows,
)
from alambique.train.state import DistillResult, Interrupted
from alambique.train.validation import Validate, validator
from pipeline.code import code_of
from pipeline.job import EXIT_USER_ERROR, fingerprint, job_main, leave

_TORN = re.compile(r"Connection (?:closed|reset) by peer")  # of gloo: another process has ended, and said why
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: a checkpoint is saved, run the same command again


class Settings(Config):
    """What decides this stage's result."""

    teacher: str
    distill: DistillConfig


def settings(params: Params, pair: str) -> Settings:
    """Read the stage's sections of params.yaml."""
    values = {
        "teacher": params.get(f"pairs.{pair}.teacher"),
        "distill": params.section(DistillConfig, "distill", f"pairs.{pair}.distill"),
    }
    return validate(Settings, values, f"{params.source}: pairs.{pair}")


def run(pair: str) -> None:
    """Write artifacts/distill/PAIR and results/distill/PAIR.json and PAIR_curve.csv.

    SIGTERM saves a checkpoint and exits with status 75; the same command then continues from it.
    """
    number, rank = whole_number("ALAMBIQUE_TRAIN_PROCESSES", 1), local_rank()
    with _stop_on_sigterm() as stop:
        try:
            if rank is not None:
                leave(_together(pair, stop, rank))
            elif number > 1:
                _launch(Job.open(pair), Processes(0, number, _context()))
            else:
                _run(Job.open(pair), stop, Processes(0, 1, _context()))
        except Interrupted as interrupted:
            print(interrupted, file=sys.stderr)
            raise SystemExit(EXIT_RESUMABLE) from interrupted


@dataclasses.dataclass(frozen=True)
class Job:
    """One training, before anything is loaded: what was asked for, known to fit what there is."""

    pair: str
    config: DistillConfig
    inputs: "Inputs"
    device: torch.device
    scratch: Path
    out: Path

    @classmethod
    def open(cls, pair: str, rank: int | None = None) -> "Job":
        """For the process ``rank`` of this host; None for a process alone.

        Raises:
            UserError: something is missing, doesn't belong together, or can't be done.
        """
        resolved = settings(Params.load(), pair)
        inputs = Inputs.open(resolved.teacher, pair)
        out = Path(f"artifacts/distill/{pair}")
        require_free_space(out.parent, inputs.student_bytes, f"the distilled {pair}")
        device = default_device()
        if rank is not None and device.type == "cuda":
            device = torch.device("cuda", rank)
        config = resolved.distill.resolved(device)
        config = config.model_copy(update={"hidden": inputs.matched(config)})
        resolved = resolved.model_copy(update={"distill": config})  # no run goes on in another precision
        if config.method != "online":  # which reads no cache
            require_tail(inputs.cache.sampled, config.loss.tail, str(inputs.cache.path))
        scratch = work_dir() / "distill" / fingerprint("distill", resolved, *inputs.manifests)
        return cls(pair, config, inputs, device, scratch, out)


def _context() -> int:
    """How many processes share each row."""
    return max(1, whole_number("ALAMBIQUE_CONTEXT_PROCESSES", 1))


def _launch(job: Job, processes: Processes) -> None:
    """Train in several processes on this host; memory that ran out in one has them all start again, with less."""
    require_shareable(processes, job.inputs.data.train.seq_len, job.config.rows_per_step)
    number = processes.size
    found = torch.cuda.device_count()
    if 0 < found < number:
        raise UserError(
            f"ALAMBIQUE_TRAIN_PROCESSES={number} needs {number} GPUs, and {found} can be seen: lower it, or make more "
            "visible (CUDA_VISIBLE_DEVICES)."
        )
    grace = math.ceil(seconds("ALAMBIQUE_STOP_SECONDS", 10))  # as in pipeline/jobs.py
    while True:
        tried = fitting_rows(job.scratch)
        code = launch(number, "-m", "pipeline.distill", job.pair, grace_seconds=grace)
        if code == 0:
            return
        if (fitting := fitting_rows(job.scratch)) == tried:
            leave(EXIT_RESUMABLE if code == 128 + signal.SIGTERM else code)
        print(f"out of memory: going on with micro-batches of {fitting} rows per process", file=sys.stderr)


def _together(pair: str, stop: threading.Event, rank: int) -> int:
    """Train as one of several processes, those that :func:`launch` or torchrun started; returns the exit status."""
    with Group(torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")) as group:
        job = None
        try:
            if not group.leads:
                disable_progress_bar()  # rank 0 shows one
            job = Job.open(pair, rank)
            _run(job, stop, Processes.of_group(_context()))
        except UserError as error:
            if group.is_first(str(error)):
                print(f"error: {error}", file=sys.stderr)
            leave(EXIT_USER_ERROR)
        except Stopped:
            leave(EXIT_USER_ERROR)
        except TooLarge as error:
            assert job is not None
            note_fitting_rows(job.scratch, error.rows)
            leave(EXIT_RESUMABLE)
        except Interrupted as interrupted:
            if group.leads:
                print(interrupted, file=sys.stderr)
            leave(EXIT_RESUMABLE)
        except RuntimeError as error:
            if not _TORN.search(str(error)):
                raise
            leave(1)
    return 0


def _run(job: Job, stop: threading.Event, processes: Processes) -> None:
    config, inputs, device = job.config, job.inputs, job.device
    require_shareable(processes, inputs.data.train.seq_len, config.rows_per_step)
    teacher, validate = inputs.teacher_and_validation(config, device, processes)
    student = inputs.load_student(config, device)
    student.check()
    result = distill(
        student,
        inputs.data.train,
        teacher,
        config,
        vocab_size=inputs.vocab_size,
        scratch=job.scratch,
        device=device,
        stop=stop.is_set,
        validate=validate,
        processes=processes,
    )
    trained = collect(weights(student.model), processes.leads) if processes.size > 1 else None
    if not processes.leads:
        return
    if trained is not None:  # into a model that FSDP2 has not touched
        student = inputs.load_student(config, torch.device("cpu"))
        with torch.no_grad():
            for name, value in weights(student.model):
                value.copy_(trained[name])
    _ship(job, student, result, processes.size)


def _ship(job: Job, student: SplitModel, result: DistillResult, processes: int) -> None:
    inputs, config, lineage = job.inputs, job.config, job.inputs.lineage()
    device = device_name(job.device) if processes == 1 else f"{processes} x {device_name(job.device)}"
    facts = {
        "created_by": "alambique distill",
        "config": config.model_dump(mode="json"),
        "lineage": lineage,
        "tokenizer_sha256": inputs.student_manifest["tokenizer_sha256"],
        "vocab_size": inputs.vocab_size,
        "versions": versions(),
        "device": device,
    }
    card = model_card(job.pair, result, config, lineage, inputs.hub_header())
    export_model(student.model, load_tokenizer(inputs.student), job.out, config.precision, card, facts)
    _write_results(job.pair, result, device)
    if job.scratch.is_dir():  # a run of one stop may have made no checkpoint
        (job.scratch / SHIPPED).touch()
    forget_shipped(spare=job.scratch)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the earlier stages made, known to belong together."""

    data: PreparedData
    cache: TeacherCache
    student: Path
    student_manifest: dict[str, Any]
    manifests: tuple[Path, ...]

    @classmethod
    def open(cls, teacher: str, pair: str) -> "Inputs":
        """Open the three folders.

        Raises:
            UserError: one is missing or damaged, the cache holds other rows, or the vocabularies differ.
        """
        prepared, captured = Path(f"artifacts/prepare/{teacher}"), Path(f"artifacts/teacher/{teacher}")
        student = Path(f"artifacts/student/{pair}")
        data, cache = PreparedData.open(prepared), TeacherCache.open(captured)
        cache.require(data.train.row_hashes(), data.manifest["tokenizer_sha256"])
        manifest = read_manifest(student, f"Run the student stage again (`dvc repro --force student@{pair}`).")
        if manifest["vocab_size"] != cache.vocab_size:
            raise UserError(
                f"{student} shares {manifest['vocab_size']:,} token ids with its teacher, but {captured} was captured "
                f"over {cache.vocab_size:,}: run the student stage again (`dvc repro --force student@{pair}`)."
            )
        manifests = tuple(folder / MANIFEST for folder in (prepared, captured, student))
        return cls(data, cache, student, manifest, manifests)

    def matched(self, config: DistillConfig) -> HiddenConfig | None:
        """``distill.hidden`` with the pairs that it means for this student.

        Raises:
            UserError: layers that aren't there, or a cache without their states.
        """
        if config.hidden is None:
            return None
        student = self.student_manifest
        return config.hidden.with_pairs(
            (student["layers"], student["teacher_sizes"]["layers"]),
            student["layers_kept"],
            None if config.method == "online" else self.cache.states.layers if self.cache.states else (),
            str(self.cache.path),
        )

    @property
    def vocab_size(self) -> int:
        """Ids that mean the same token to teacher and student; the student stage compared them by content."""
        return self.cache.vocab_size

    def teacher_and_validation(
        self, config: DistillConfig, device: torch.device, processes: Processes
    ) -> tuple[TeacherCache | SplitModel, Validate | None]:
        """What to train against, and the comparison on the valid rows if there is one.

        A teacher that only that comparison needs has read its rows and is gone before the student is loaded.
        """
        online, validating = config.method == "online", config.validate_every is not None
        live = self.live_teacher(device) if online or validating else None
        validate = None
        if live and validating:
            validate = validator(live, self.data.valid, self.vocab_size, config, device, processes)
        return (live if online and live else self.cache), validate

    def load_student(self, config: DistillConfig, device: torch.device) -> SplitModel:
        """The student before training, in fp32."""
        return SplitModel(load_model(self.student, dtype="float32", device=device, attention=config.attention))

    def live_teacher(self, device: torch.device) -> SplitModel:
        """The model that was captured, in the precision in which it was.

        Raises:
            UserError: its source now gives another model or tokenizer.
        """
        identity = self.cache.manifest["identity"]
        source = fetch_model(identity["teacher"])
        tokenizer = tokenizer_sha256(load_tokenizer(source.path))
        if (source.sha256, tokenizer) != (identity["teacher_sha256"], self.data.manifest["tokenizer_sha256"]):
            raise UserError(
                f"{source.uri} is no longer the model or tokenizer that {self.cache.path} was captured from: "
                "capture it again (`dvc repro`)."
            )
        model = load_model(source.path, dtype=identity["dtype"], device=device, attention=identity["attention"])
        teacher = SplitModel(model.requires_grad_(False))
        teacher.check()
        return teacher

    @property
    def student_bytes(self) -> int:
        """Size of the student's weights, which the trained ones won't exceed by more than fp32 over bf16."""
        return 2 * int(self.student_manifest["bytes"])

    def hub_header(self) -> dict[str, list[str]]:
        """What a model card's header names of the Hub: the model that was trained, and the texts."""
        header = {
            "base_model": hub_repositories(self.student_manifest, ""),
            "datasets": hub_repositories(self.data.manifest, "datasets/"),
        }
        return {key: names for key, names in header.items() if names}

    def lineage(self) -> dict[str, str]:
        """Where the result comes from: sources by URI, folders by the hash of their manifest, code by its hash."""
        prepared, captured, student = (sha256_file(path) for path in self.manifests)
        identity, states = self.cache.manifest["identity"], self.cache.states
        kept = self.cache.kept + (f", hidden states {states.text()}" if states else "")
        return {
            "teacher": sources_text({"sources": [{"uri": identity["teacher"], "sha256": identity["teacher_sha256"]}]}),
            "student before training": sources_text(self.student_manifest),
            "corpus": sources_text(self.data.manifest),
            "teacher's cache": f"{self.cache.num_rows:,} rows of {self.cache.seq_len}, {kept}",
            "prepared data (sha256 of manifest)": prepared,
            "teacher's cache (sha256 of manifest)": captured,
            "student (sha256 of manifest)": student,
            "code (sha256)": sha256_json({str(path): sha256_file(path) for path in code_of("distill")}),
        }


@contextlib.contextmanager
def _stop_on_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets; repeated signals change nothing, the supervisor knows when to kill."""
    stop = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, previous)


def _write_results(pair: str, result: DistillResult, device: str) -> None:
    """The numbers of the run as JSON, and its curve as CSV, in which nothing depends on the clock."""
    write_json(Path(f"results/distill/{pair}.json"), {**result.measured(), "device": device})
    write_bytes(Path(f"results/distill/{pair}_curve.csv"), result.curve_csv().encode())


if __name__ == "__main__":
    leave(job_main(run))
