"""What every test starts from: one thread, a fixed seed, Triton's interpreter, NaN in scratch memory, no network."""

import os

# Set before torch, triton and the hub libraries are imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
for _offline in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[_offline] = "1"

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed_and_nan_scratch() -> None:
    """Seed torch, and fill memory that nobody wrote with NaN so that a missed write shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills torch.empty (the flag below), and refuses racy kernels
    torch.utils.deterministic.fill_uninitialized_memory = True
