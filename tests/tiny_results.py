"""Results of a whole chain, as its stages would write them: pair ``p`` of teacher ``t``, benchmarks boolq and mmlu."""

import math
from pathlib import Path
from typing import Any

from alambique.core.files import write_bytes, write_json

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
    "cache_bytes": 9056617,
}  # fmt: skip
DISTILL = {
    "tokens_per_s": 270.1, "peak_mib": 6400.0, "tflop_per_s": 0.21, "seconds": 151.6, "num_tokens": 40960,
    "method": "fused", "loss_impl": "fused", "steps": 20, "loss_nats": {"first": 1.1, "last": 0.6},
}  # fmt: skip
STUDENT = {
    "num_parameters": 113274432, "teacher_parameters": 134515008, "strategy": "drop_layers",
    "layers_removed": [14, 15, 16, 17, 18, 19], "intermediate_size": 1536, "num_key_value_heads": 3,
    "teacher_sizes": {"layers": 30, "intermediate_size": 1536, "num_key_value_heads": 3},
}  # fmt: skip
CURVE = "step,tokens,loss_nats,kd_nats,ce_nats,learning_rate,grad_norm\n" + "".join(
    f"{step},{2048 * step},{0.5 + 0.5 / step},{0.5 + 0.5 / step},{3 + 1 / step},0.0003,1.5\n" for step in range(1, 21)
)


def write_results(root: Path) -> Path:
    """Write results/ below ``root`` and return it."""
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
            }
            key = "t" if kind == "teacher" else "p"
            write_json(results / "evaluate" / kind / key / f"{name}.json", found)
    write_json(results / "evaluate/heldout/p.json", HELDOUT)
    write_json(results / "teacher/t.json", TEACHER)
    write_json(results / "student/p.json", STUDENT)
    write_json(results / "distill/p.json", DISTILL)
    write_bytes(results / "distill/p_curve.csv", CURVE.encode())
    return results
