#!/usr/bin/env bash
# Everything about the loss that only a GPU can tell: tests, memory, speed, precision. One command, under 8 minutes on
# one H200 with torch >= 2.11 and triton >= 3.6, from a plain checkout: nothing is installed but what WHEELS names, and
# nothing of DVC, Prefect or MLflow is imported.
#
#   bash benchmarks/gpu.sh                 rows go to $OUT (default benchmarks/results) as CASE.jsonl
#   WHEELS=folder bash benchmarks/gpu.sh   install wheels from a folder first, for packages that are missing
#                                          (on a machine with a network, for Python 3.12: pip download -d folder --no-deps
#                                          --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64
#                                          -c constraints.txt pydantic pydantic-core annotated-types typing-inspection
#                                          typing-extensions ruamel-yaml liger-kernel cut-cross-entropy)
#   GPU_SH_DRY=1 bash benchmarks/gpu.sh    the same steps on a CPU with tiny shapes; nothing is recorded
#
# Exit status: 0 if every step passed, 2 if something is missing, otherwise that of the first step that failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
DRY=${GPU_SH_DRY:-0}
export ALAMBIQUE_BENCH_RESULTS=${OUT:-benchmarks/results}
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 COLUMNS=160 DO_NOT_TRACK=true
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
started=$SECONDS
if [ "$DRY" = 1 ]; then
  export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
  flags=(--quick --skip-tests --device cpu) marked='not slow and gpu'
else
  # cuBLAS is deterministic only with a workspace of its own, which the tests ask for.
  export TRITON_INTERPRET=0 CUBLAS_WORKSPACE_CONFIG=:4096:8
  flags=(--record --device cuda) marked=gpu
fi

step() {  # run a step; its failure ends the script, and is the script's
  local name=$1; shift
  echo; echo "=== $name (${SECONDS}s)"
  "$@"; local status=$?
  if [ $status -ne 0 ]; then
    echo "gpu.sh: FAILED at '$name', status $status, after $((SECONDS - started)) s"
    exit $status
  fi
}

check() {
  "$PYTHON" - "$DRY" <<'PY'
import importlib.util
import sys

needed = ["torch", "triton", "pydantic", "ruamel.yaml", "rich", "pytest", "pytest_timeout", "hypothesis"]
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
missing = [name for name in needed if not there(name)]
if missing:
    print("gpu.sh: missing:", ", ".join(missing), "- put their wheels in a folder and name it in WHEELS.")
    sys.exit(2)
import torch
import triton

print("python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)
for peer in ("liger_kernel", "cut_cross_entropy"):
    print(peer, "installed" if there(peer) else "not installed: it will be reported as absent")
if sys.argv[1] != "1":
    if not torch.cuda.is_available():
        print("gpu.sh: torch sees no GPU; GPU_SH_DRY=1 rehearses on a CPU.")
        sys.exit(2)
    print(torch.cuda.get_device_name(), f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB")
PY
}

if [ -n "${WHEELS:-}" ]; then
  step "wheels" "$PYTHON" -m pip install -q --no-index --no-deps --find-links "$WHEELS" "$WHEELS"/*.whl
fi
step "environment" check
# The cases run these tests once more and record nothing when one fails; first here, so that a failure shows alone.
step "correctness" "$PYTHON" -m pytest -x -m "$marked" -W default tests/losses tests/kernels
step "cases" "$PYTHON" -m benchmarks.run loss_precision loss_memory loss_speed "${flags[@]}"
if [ "$DRY" != 1 ]; then
  echo; echo "=== rows"
  for case in loss_precision loss_memory loss_speed; do cat "$ALAMBIQUE_BENCH_RESULTS/$case.jsonl"; done
fi
echo; echo "gpu.sh: all steps passed in $((SECONDS - started)) s"
