"""The kernel by itself: what it writes where, and what it leaves alone."""

import pytest
import torch
from torch import Tensor

from alambique.kernels import topk_rows
from alambique.losses.config import LossConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.gpu
KL = topk_rows.constants(LossConfig(), None)


def problem(rows: int, columns: int, kept: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits, ids, log p, log r; the logits beyond the vocabulary are NaN."""
    generator = torch.Generator().manual_seed(0)
    z_CV = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 3
    z_CV[:, vocab:] = torch.nan
    teacher_CV = torch.log_softmax(torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3, 1)
    log_p_CK, ids_CK = teacher_CV.topk(kept, 1)
    log_r_C = torch.log1p(-log_p_CK.exp().sum(1))
    return tuple(x.to(DEVICE) for x in (z_CV.to(dtype), ids_CK, log_p_CK.to(dtype), log_r_C.to(dtype)))


def by_autograd(z_CV: Tensor, ids_CK: Tensor, log_p_CK: Tensor, log_r_C: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """KL with a tail bucket, and its gradient."""
    z_CV = z_CV[:, :vocab].double().requires_grad_()
    log_q_CV = torch.log_softmax(z_CV, 1)
    inside_CV = torch.zeros_like(z_CV, dtype=torch.bool).scatter_(1, ids_CK, True)
    log_t_C = log_q_CV.masked_fill(inside_CV, -1e30).logsumexp(1)
    log_p_CK, log_r_C = log_p_CK.double(), log_r_C.double()
    kd_C = (log_p_CK.exp() * (log_p_CK - log_q_CV.gather(1, ids_CK))).sum(1) + log_r_C.exp() * (log_r_C - log_t_C)
    (grad_CV,) = torch.autograd.grad(kd_C.sum(), z_CV)
    return kd_C.detach(), grad_CV


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradient_in_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_rows, "BLOCK_COLUMNS", 16)
    z_CV, ids_CK, log_p_CK, log_r_C = problem(3, 70, 5, 61, dtype)
    kd_C, grad_CV = by_autograd(z_CV, ids_CK, log_p_CK, log_r_C, 61)
    ones_C = torch.ones(3, dtype=dtype, device=DEVICE)
    rows_5C, dz_CV = topk_rows.topk_rows(z_CV, None, ids_CK, log_p_CK, log_r_C, None, ones_C, dtype, 61, KL)
    assert dz_CV.data_ptr() == z_CV.data_ptr()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(rows_5C[0].double(), kd_C, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dz_CV[:, :61].double(), grad_CV, rtol=tolerance, atol=tolerance)
    assert torch.equal(dz_CV[:, 61:], torch.zeros_like(dz_CV[:, 61:]))  # padding, NaN before


@pytest.mark.parametrize("columns", [64, 70, 128])
def test_two_byte_gradients_lie_in_the_front_half_of_their_row(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_rows, "BLOCK_COLUMNS", 16)
    z_CV, ids_CK, log_p_CK, log_r_C = problem(4, columns, 5, columns - 3, torch.float32)
    _, grad_CV = by_autograd(z_CV, ids_CK, log_p_CK, log_r_C, columns - 3)
    ones_C = torch.ones(4, device=DEVICE)
    _, dz_CV = topk_rows.topk_rows(z_CV, None, ids_CK, log_p_CK, log_r_C, None, ones_C, torch.bfloat16, columns - 3, KL)
    assert dz_CV.dtype == torch.bfloat16
    assert dz_CV.untyped_storage().data_ptr() == z_CV.untyped_storage().data_ptr()
    expected_CV = torch.nn.functional.pad(grad_CV, (0, 3)).to(torch.bfloat16)
    torch.testing.assert_close(dz_CV, expected_CV, rtol=2**-7, atol=1e-7)  # one unit in the last place


def test_a_row_at_full_block_size() -> None:
    """The size that production uses, with a vocabulary of one and a bit tiles."""
    vocab = topk_rows.BLOCK_COLUMNS + 100
    z_CV, ids_CK, log_p_CK, log_r_C = problem(2, vocab, 100, vocab, torch.float32)
    kd_C, grad_CV = by_autograd(z_CV, ids_CK, log_p_CK, log_r_C, vocab)
    ones_C = torch.ones(2, device=DEVICE)
    rows_5C, dz_CV = topk_rows.topk_rows(z_CV, None, ids_CK, log_p_CK, log_r_C, None, ones_C, torch.bfloat16, vocab, KL)
    torch.testing.assert_close(rows_5C[0].double(), kd_C, rtol=1e-5, atol=1e-5)
    assert (dz_CV.double() - grad_CV).norm() < 0.004 * grad_CV.norm()


def test_values_alone_need_no_gradient() -> None:
    z_CV, ids_CK, log_p_CK, log_r_C = problem(3, 20, 5, 20, torch.float64)
    kd_C, _ = by_autograd(z_CV, ids_CK, log_p_CK, log_r_C, 20)
    rows_5C, _ = topk_rows.topk_rows(z_CV, None, ids_CK, log_p_CK, log_r_C, None, None, torch.float64, 20, KL)
    torch.testing.assert_close(rows_5C[0], kd_C, rtol=1e-12, atol=1e-12)


def test_meta_tensors_have_shapes_alone() -> None:
    z_CV = torch.empty(3, 20, device="meta")
    ids_CK = torch.empty(3, 5, dtype=torch.int64, device="meta")
    log_p_CK, log_r_C = torch.empty(3, 5, device="meta"), torch.empty(3, device="meta")
    rows_5C, dz_CV = topk_rows.topk_rows(z_CV, None, ids_CK, log_p_CK, log_r_C, None, None, torch.bfloat16, 20, KL)
    assert (rows_5C.shape, dz_CV.shape, dz_CV.dtype) == ((5, 3), (3, 20), torch.bfloat16)
