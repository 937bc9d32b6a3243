"""The command ``alambique``: looks into a teacher's cache."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alambique.cache.reader import TeacherCache
from alambique.core.errors import UserError

EXIT_USER_ERROR = 2
_BINS = 8  # lines of the table of tail mass by position


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a UserError becomes one line on stderr and exit status 2."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `alambique cache info … | head`
        sys.stderr.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="alambique", description="Looks into what the pipeline has made.")
    cache = parser.add_subparsers(required=True, metavar="cache").add_parser("cache", help="a teacher's cache")
    commands = cache.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("info", _info, "what it holds, from what, how big"),
        ("verify", _verify, "hash every shard and decode every row"),
        ("show", _show, "the teacher's distribution at one position"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("path", type=Path, help="folder of the cache, such as artifacts/teacher/smollm2_135m")
        sub.set_defaults(command=command)
        if name == "show":
            sub.add_argument("--row", type=int, default=0, help="row number (default 0)")
            sub.add_argument("--position", type=int, default=0, help="position in the row (default 0)")
            sub.add_argument("--top", type=int, default=20, help="entries to show (default 20)")
            sub.add_argument("--tokenizer", type=Path, help="folder of a tokenizer, to show tokens instead of ids")
    return parser


def _info(options: argparse.Namespace) -> None:
    cache = TeacherCache.open(options.path)
    manifest = cache.manifest
    size = sum(file["bytes"] for file in manifest["files"].values())
    engine, top_p, codec_kl = manifest["engine"], manifest["top_p"], manifest["codec_kl_nats"]
    facts: dict[str, Any] = {
        "rows": f"{cache.num_rows:,} of {cache.seq_len:,} positions",
        "tokens": f"{manifest['num_tokens']:,} captured",
        "kept": f"top {cache.top_k} of {cache.vocab_size:,}" + (f", at most mass {top_p}" if top_p < 1 else ""),
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
    tail = manifest["tail_mass"]
    quantiles = "  ".join(f"{float(q):.0%} {value:.4f}" for q, value in tail["quantiles"].items())
    print(f"{'mass not kept':<18} mean {tail['mean']:.4f}; quantiles {quantiles}")
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
    ids_K, logprobs_K = signal.ids_NK[options.position].tolist(), signal.logprobs_NK[options.position].double()
    tail_mass = float(signal.tail_mass_N[options.position])
    if bool(logprobs_K.isneginf().all()):
        print(f"row {options.row}, position {options.position}: not captured (padding, a prompt, or a document's end)")
        return
    shown = ids_K[: options.top]
    tokens = [""] * len(shown) if options.tokenizer is None else _tokens(options.tokenizer, shown, cache)
    print(f"row {options.row}, position {options.position}: the teacher's next token")
    for token_id, probability, token in zip(shown, logprobs_K.exp().tolist(), tokens, strict=False):
        print(f"{probability:>9.4%}  {token_id:>7}  {token}")
    print(f"{float(logprobs_K.exp()[options.top :].sum()):>9.4%}  in {max(0, len(ids_K) - len(shown))} more entries")
    print(f"{tail_mass:>9.4%}  in the rest of the vocabulary")


def _tokens(folder: Path, ids: list[int], cache: TeacherCache) -> list[str]:
    from alambique.models.load import load_tokenizer, tokenizer_sha256  # seconds, which `info` needn't wait for

    tokenizer = load_tokenizer(folder)
    captured = cache.manifest["identity"].get("tokenizer_sha256")
    if captured != tokenizer_sha256(tokenizer):
        raise UserError(f"{folder} is not the tokenizer that {cache.path} was captured with: name the teacher's.")
    return [repr(tokenizer.decode([token_id])) for token_id in ids]


if __name__ == "__main__":
    sys.exit(main())
