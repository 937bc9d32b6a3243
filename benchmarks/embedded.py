"""Real logits: the embedded pair's student before healing, its teacher, and text that both can read.

Needs what ``dvc repro student@smollm2_24l`` leaves in ``artifacts/``, and transformers; imported only where it is used.

Dimension letters: N tokens, D hidden size, V vocabulary.
"""

from pathlib import Path

import torch

from alambique.core.errors import UserError
from alambique.core.params import Params
from alambique.core.signal import TopKSignal
from alambique.data.dataset import PreparedData
from alambique.models.fetch import fetch_model
from alambique.models.load import SplitModel, load_model
from benchmarks.cases import TOP_K
from benchmarks.problems import Problem
from benchmarks.records import ROOT
from benchmarks.teacher_data import hidden_states

_PAIR, _TEACHER = "smollm2_24l", "smollm2_135m"


def problem(tokens: int, device: torch.device, folder: Path = ROOT) -> Problem:
    """A float32 problem of the first ``tokens`` targets of the training rows.

    Raises:
        UserError: the artifacts aren't there.
    """
    student_folder, prepared = folder / f"artifacts/student/{_PAIR}", folder / f"artifacts/prepare/{_TEACHER}"
    if not (student_folder.is_dir() and prepared.is_dir()):
        raise UserError(f"benchmarks: real logits need {student_folder}: run dvc repro student@{_PAIR} first.")
    rows = PreparedData.open(prepared).train
    uri = Params.load(folder / "params.yaml").get(f"teachers.{_TEACHER}.model")
    student = SplitModel(load_model(student_folder, dtype="float32", device=device))
    teacher = SplitModel(load_model(fetch_model(uri).path, dtype="float32", device=device))
    hidden_ND = hidden_states(student, rows, tokens)
    with torch.no_grad():
        teacher_NV = teacher.logits(hidden_states(teacher, rows, tokens))
        logprobs_NK, ids_NK = torch.log_softmax(teacher_NV, 1).topk(TOP_K, 1)
    signal = TopKSignal(ids_NK.int(), logprobs_NK, 1 - logprobs_NK.double().exp().sum(1).float())
    weight_VD = student.head_weight_VD.detach().float().clone()
    return Problem(hidden_ND.requires_grad_(), weight_VD.requires_grad_(), signal, ids_NK[:, 0])
