"""The command ``alambique``: plans a run, looks into a teacher's cache, and writes the page over all reports."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from alambique.cache import compare
from alambique.cache.capture import engine
from alambique.cache.drift import Drift
from alambique.cache.reader import TeacherCache
from alambique.cache.score import DtypeName, Teacher
from alambique.core.errors import UserError
from alambique.core.measure import default_device
from alambique.core.params import Config, Params, validate
from alambique.pages import write_index

EXIT_USER_ERROR = 2
_BINS = 8  # lines of the table of tail mass by position


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a UserError becomes one line on stderr and exit status 2.

    ``diff`` and ``rescore`` end with status 1 when they find a difference.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int | None = options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `alambique cache info … | head`
        sys.stderr.close()
        return 0
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="alambique", description="Looks into what the pipeline has made, or will.")
    subjects = parser.add_subparsers(required=True, metavar="SUBJECT")
    plan = subjects.add_parser("plan", help="memory, disk and time of what params.yaml asks for, before it runs")
    plan.add_argument("--params", type=Path, default=Path("params.yaml"), help="file to plan (default params.yaml)")
    plan.add_argument("--gpu", help="plan for this GPU, such as H100 (default: the visible one, or this host)")
    plan.add_argument("--memory-gib", type=float, help="memory to fit (default: that of the GPU, or of this host)")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(command=_plan)
    report = subjects.add_parser("report", help="write the page over all pairs", description="Writes index.html.")
    report.add_argument("path", type=Path, nargs="?", default=Path("results/report"), help="default: results/report")
    report.set_defaults(command=lambda options: print(write_index(options.path)))
    cache = subjects.add_parser("cache", help="a teacher's cache")
    commands = cache.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("info", _info, "what it holds, from what, how big"),
        ("verify", _verify, "hash every shard and decode every row"),
        ("show", _show, "the teacher's distribution at one position"),
        ("diff", _diff, "what differs from another cache: settings, rows, distributions (status 1 if anything does)"),
        ("rescore", _rescore, "score a sample of its rows again, with the teacher as it runs here and now"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("path", type=Path, help="folder of the cache, such as artifacts/teacher/smollm2_135m")
        sub.set_defaults(command=command)
        if name == "show":
            sub.add_argument("--row", type=int, default=0, help="row number (default 0)")
            sub.add_argument("--position", type=int, default=0, help="position in the row (default 0)")
            sub.add_argument("--top", type=int, default=20, help="entries to show (default 20)")
            sub.add_argument("--tokenizer", type=Path, help="folder of a tokenizer, to show tokens instead of ids")
        elif name == "diff":
            sub.add_argument("other", type=Path, help="folder of the other cache")
            sub.add_argument("--rows", type=int, help="rows in common to compare, evenly spaced (default all)")
        elif name == "rescore":
            sub.add_argument("--data", type=Path, required=True, help="prepared rows, such as artifacts/prepare/NAME")
    return parser


def _plan(options: argparse.Namespace) -> None:
    from alambique.plan import plan  # transformers: seconds
    from alambique.planning.machine import machine
    from alambique.planning.screen import show

    params = Params.load(options.params)
    found = plan(params, machine(options.gpu, options.memory_gib))
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        show(found)


def _info(options: argparse.Namespace) -> None:
    cache = TeacherCache.open(options.path)
    manifest = cache.manifest
    size = sum(file["bytes"] for file in manifest["files"].values())
    engine, codec_kl = manifest["engine"], manifest["codec_kl_nats"]
    facts: dict[str, Any] = {
        "rows": f"{cache.num_rows:,} of {cache.seq_len:,} positions",
        "tokens": f"{manifest['num_tokens']:,} captured",
        "kept": f"{cache.kept} of {cache.vocab_size:,} tokens",
        **({"hidden states": cache.states.text()} if cache.states else {}),
        "codec": f"{manifest['codec']} ({'lossless' if manifest['lossless'] else f'lossy, KL {codec_kl:.1e} nats'})",
        "size": f"{size / 2**20:,.1f} MiB in {len(manifest['files'])} shards",
        "bytes per token": f"{manifest['bytes_per_token']:.1f}",
        **manifest["identity"],
        "device": engine["device"],
        "logits": engine["logits_dtype"],
        "versions": ", ".join(f"{name} {version}" for name, version in engine["versions"].items()),
    }
    for name, value in facts.items():
        print(f"{name:<18} {value}")
    if cache.sampled:
        return  # every token can be drawn, so there is no tail
    tail = manifest["tail_mass"]
    quantiles = "  ".join(f"{float(q):.0%} {value:.4f}" for q, value in tail["quantiles"].items())
    print(f"{'mass not kept':<18} mean {tail['mean']:.4f}; quantiles {quantiles}")
    if (again := manifest["rescored"]) is not None:
        agreed = f"mean KL {again['mean_kl_nats']:.1e} nats, {again['same_top1']:.2%} same top-1"
        print(f"{'rows scored twice':<18} {again['rows']:,}: {agreed}")
    tail_S = cache.tail_mass_by_position()
    for part in np.array_split(np.arange(cache.seq_len), min(_BINS, cache.seq_len)):
        values = tail_S[part][~np.isnan(tail_S[part])]
        shown = f"{values.mean():.4f}" if len(values) else "nothing captured"
        print(f"  positions {part[0]:>6} to {part[-1]:<6} mean {shown}")


def _verify(options: argparse.Namespace) -> None:
    cache = TeacherCache.open(options.path)
    cache.verify()
    print(f"{options.path}: {len(cache.manifest['files'])} shards, {cache.num_rows:,} rows, every byte as captured")


def _show(options: argparse.Namespace) -> None:
    cache = TeacherCache.open(options.path)
    for name, value, count in (("row", options.row, cache.num_rows), ("position", options.position, cache.seq_len)):
        if not 0 <= value < count:
            raise UserError(f"--{name} {value} is outside the cache: choose 0 to {count - 1}.")
    signal = cache.read([options.row]).flatten()
    logprobs_K = signal.logprobs_NK[options.position].double()
    filled_K = ~logprobs_K.isneginf()  # a cut to a mass, and draws that were alike, leave slots empty
    ids_K, logprobs_K = signal.ids_NK[options.position][filled_K].tolist(), logprobs_K[filled_K]
    tail_mass = float(signal.tail_mass_N[options.position])
    if not ids_K:
        print(f"row {options.row}, position {options.position}: not captured (padding, a prompt, or a document's end)")
        return
    shown = ids_K[: options.top]
    tokens = [""] * len(shown) if options.tokenizer is None else _tokens(options.tokenizer, shown, cache)
    what = "draws of the teacher's next token, by weight" if cache.sampled else "the teacher's next token"
    print(f"row {options.row}, position {options.position}: {what}")
    for token_id, probability, token in zip(shown, logprobs_K.exp().tolist(), tokens, strict=False):
        print(f"{probability:>9.4%}  {token_id:>7}  {token}")
    print(f"{float(logprobs_K.exp()[options.top :].sum()):>9.4%}  in {max(0, len(ids_K) - len(shown))} more entries")
    if not cache.sampled:
        print(f"{tail_mass:>9.4%}  in the rest of the vocabulary")


def _diff(options: argparse.Namespace) -> int:
    if options.rows is not None and options.rows < 1:
        raise UserError(f"--rows {options.rows} compares nothing: choose at least 1.")
    first, second = TeacherCache.open(options.path), TeacherCache.open(options.other)
    if first.manifest == second.manifest:
        print(f"equal: {first.num_rows:,} rows in {len(first.manifest['files'])} shards of the same sha256")
        return 0
    _print_fields(compare.differing_fields(first.manifest, second.manifest))
    pairs = compare.rows_in_common(first, second)
    print(f"{'rows in common':<32} {len(pairs):,} of {first.num_rows:,} | of {second.num_rows:,}")
    sizes = " | ".join(f"{cache.manifest['bytes_per_token']:.1f}" for cache in (first, second))
    print(f"{'bytes per token':<32} {sizes}")
    if first.manifest["sampling"] or second.manifest["sampling"]:
        print("draws differ by chance, so the distributions are not compared")
        return 1
    found = compare.compare(first, second, pairs, options.rows)
    if found is None:
        print("the rows in common have no captured position")
    else:
        _print_drift([found])
    return 1


def _rescore(options: argparse.Namespace) -> int:
    from alambique.data.dataset import PreparedData

    cache, data, device = TeacherCache.open(options.path), PreparedData.open(options.data), default_device()
    named = {name: value for name, value in cache.manifest["identity"].items() if name in _Origin.model_fields}
    origin = validate(_Origin, named, f"{cache.path}: identity")
    now = compare.rescore(cache, data.train, lambda: _load(origin, device), device)
    _print_fields(compare.differing_fields(cache.manifest["engine"], engine(device, origin.dtype)))
    then = cache.manifest["rescored"]
    print(f"{'':<32} at capture | now")
    _print_drift([None if then is None else Drift(**then), now])
    drifted = now.mean_kl_nats > compare.DRIFT_LIMIT_NATS
    verdict = "capture it again here, or go back to its engine" if drifted else "this teacher is still the cache's"
    print(f"mean KL {'above' if drifted else 'within'} {compare.DRIFT_LIMIT_NATS} nats: {verdict}")
    return int(drifted)


class _Origin(Config):
    """The part of a manifest's identity that loads its teacher."""

    teacher: str
    teacher_sha256: str
    dtype: DtypeName
    attention: str
    device_map: Literal["auto", "balanced", "sequential"] | None = None  # source: of captures by one GPU
    tensor_parallel: int = 1  # source: as above


def _load(origin: _Origin, device: torch.device) -> Teacher:
    """The teacher as it was loaded for the capture; where several processes split it, spread by this one instead."""
    from alambique.models.fetch import fetch_model  # transformers: seconds
    from alambique.models.load import SplitModel, load_model

    source = fetch_model(origin.teacher)
    if source.sha256 != origin.teacher_sha256:
        raise UserError(f"{source.uri} has sha256 {source.sha256}, but the cache is of {origin.teacher_sha256}.")
    spread = origin.device_map or ("auto" if origin.tensor_parallel > 1 else None)
    loaded = load_model(source.path, dtype=origin.dtype, device=device, attention=origin.attention, device_map=spread)
    model = SplitModel(loaded)
    if spread is not None:
        model.gather_head()
    return model


def _print_fields(fields: dict[str, tuple[Any, Any]]) -> None:
    for name, values in fields.items():
        print(f"{name:<32} {' | '.join(_short(value) for value in values)}")


def _short(value: Any) -> str:
    return "none" if value is None else f"{str(value)[:12]}…" if len(str(value)) == 64 else str(value)


def _print_drift(columns: list[Drift | None]) -> None:
    """A line per measure, a column per drift."""
    lines: dict[str, Callable[[Drift], str]] = {
        "compared: rows, positions": lambda drift: f"{drift.rows:,}, {drift.positions:,}",
        "same top-1": lambda drift: f"{drift.same_top1:.2%}",
        "mean KL, nats": lambda drift: f"{drift.mean_kl_nats:.3g}",
        "largest KL, nats": lambda drift: f"{drift.max_kl_nats:.3g}",
        "largest |Δ logprob|, nats": lambda drift: f"{drift.max_logprob_difference_nats:.3g}",
        "mass on ids that both keep": lambda drift: f"{drift.shared_mass:.2%}",
    }
    for name, show in lines.items():
        print(f"{name:<32} {' | '.join('not known' if drift is None else show(drift) for drift in columns)}")
    print("KL(first ‖ second) over the ids that both keep and one bucket for the rest: at most that of the whole")


def _tokens(folder: Path, ids: list[int], cache: TeacherCache) -> list[str]:
    from alambique.models.load import load_tokenizer, tokenizer_sha256  # seconds, which `info` needn't wait for

    tokenizer = load_tokenizer(folder)
    captured = cache.manifest["identity"].get("tokenizer_sha256")
    if captured != tokenizer_sha256(tokenizer):
        raise UserError(f"{folder} is not the tokenizer that {cache.path} was captured with: name the teacher's.")
    return [repr(tokenizer.decode([token_id])) for token_id in ids]


if __name__ == "__main__":
    sys.exit(main())
