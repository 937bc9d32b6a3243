"""Results of a whole chain, as its stages would write them: pair ``p`` of teacher ``t``, benchmarks boolq and mmlu."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from alambique.core.files import write_bytes, write_json, write_manifest

BENCHMARKS = ["boolq", "mmlu"]
HELDOUT: dict[str, Any] = {
    "kl_nats": {"before": 0.9, "after": 0.45},
    "agreement": {"before": 0.5, "after": 0.6},
    "perplexity": {"teacher": 26.8, "before": 55.5, "after": 32.7},
    "calibration_error": {"teacher": 0.04, "before": 0.05, "after": 0.03},
    "stderr": {
        "kl_nats": {"before": 0.02, "after": 0.01},
        "agreement": {"before": 0.008, "after": 0.009},
        "perplexity": {"teacher": 2.1, "before": 4.5, "after": 2.6},
    },
    "num_tokens": 7487,
    "num_rows": 32,
    "peak_mib": 1737.1,
    "seconds": 23.9,
    "device": "cpu",
    "models": {
        "teacher": {"uri": "wheel://x==1/model.gguf", "sha256": "a" * 64},
        "before": {"uri": "artifacts/student/p", "manifest_sha256": "b" * 64},
        "after": {"uri": "artifacts/distill/p", "manifest_sha256": "c" * 64},
    },
}
# A gap on boolq of many standard errors, and none on mmlu.
ACCURACY = {"boolq": {"teacher": 0.8, "student": 0.5, "distill": 0.74}, "mmlu": dict.fromkeys(
    ("teacher", "student", "distill"), 0.25)}  # fmt: skip
TEACHER = {
    "tokens_per_s": 812.4, "peak_mib": 2100.5, "cache_bytes_per_token": 236.2, "num_tokens": 38343, "seconds": 47.2,
    "cache_bytes": 9056617, "device": "cpu",
}  # fmt: skip
DISTILL = {
    "tokens_per_s": 270.1, "peak_mib": 6400.0, "tflop_per_s": 0.21, "seconds": 151.6, "num_tokens": 40960,
    "method": "fused", "loss_impl": "fused", "steps": 20, "loss_nats": {"first": 1.1, "last": 0.6},
    "device": "cpu",
}  # fmt: skip
STUDENT = {
    "num_parameters": 113274432, "teacher_parameters": 134515008, "strategy": "drop_layers",
    "layers_removed": [14, 15, 16, 17, 18, 19], "intermediate_size": 1536, "num_key_value_heads": 3,
    "teacher_sizes": {"layers": 30, "intermediate_size": 1536, "num_key_value_heads": 3},
}  # fmt: skip
CACHE_MANIFEST = {
    "top_k": 100, "vocab_size": 49152, "codec": "exact", "lossless": True, "codec_kl_nats": 0.0, "sampling": None,
    "num_tokens": 10, "tail_mass": {"mean": 0.092, "quantiles": {}}, "identity": {"dtype": "bfloat16"},
}  # fmt: skip
MODEL_MANIFEST = {
    "lineage": {"teacher": "`wheel://x==1/model.gguf`", "corpus": "`file:text` (sha256 5)", "code (sha256)": "d" * 64},
    "tokenizer_sha256": "e" * 64, "versions": {"python": "3.11", "torch": "2.13"}, "config": {"precision": "bf16"},
}  # fmt: skip
CURVE = "step,tokens,loss_nats,kd_nats,ce_nats,learning_rate,grad_norm\n" + "".join(
    f"{step},{2048 * step},{0.5 + 0.5 / step},{0.5 + 0.5 / step},{3 + 1 / step},0.0003,1.5\n" for step in range(1, 21)
)


def write_results(root: Path) -> Path:
    """Write results/ below ``root``, and of artifacts/ what a report reads; return results/."""
    results = root / "results"
    for name, rows in ACCURACY.items():
        for kind, value in rows.items():
            n = 400
            found = {
                "benchmark": name,
                "metric": "acc",
                "value": value,
                "stderr": math.sqrt(value * (1 - value) / (n - 1)),
                "n": n,
                "seconds": 40.0 if kind == "teacher" else 32.0,
                "chance": 0.5 if name == "boolq" else None,
                "peak_mib": 1188.7,
                "device": "cpu",
            }
            key = "t" if kind == "teacher" else "p"
            write_json(results / "evaluate" / kind / key / f"{name}.json", found)
    write_json(results / "evaluate/heldout/p.json", HELDOUT)
    write_json(results / "teacher/t.json", TEACHER)
    write_json(results / "student/p.json", STUDENT)
    write_json(results / "distill/p.json", DISTILL)
    write_bytes(results / "distill/p_curve.csv", CURVE.encode())
    write_artifacts(root / "artifacts")
    return results


def write_artifacts(artifacts: Path) -> None:
    """A teacher's cache of 10 tokens in one shard, and a distilled model's manifest."""
    cache = artifacts / "teacher/t"
    cache.mkdir(parents=True)
    sizes = {"ids": 1200, "id_classes": 200, "logprobs": 700, "mask": 32}
    tensors = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
    tensors |= {"ids_offsets": np.zeros(4, np.int64), "logprobs_offsets": np.zeros(4, np.int64)}
    save_file({**tensors, "tail_mass": np.zeros(10, np.float32)}, cache / f"{'0' * 32}.safetensors")
    write_manifest(cache, CACHE_MANIFEST)
    (artifacts / "distill/p").mkdir(parents=True)
    write_manifest(artifacts / "distill/p", MODEL_MANIFEST)
