import numpy as np
import pytest

from alambique.cache.codec import DamageError
from alambique.cache.codecs import quantized
from alambique.cache.pco import PLAIN, compress


def test_ends_are_exact_and_the_error_is_half_a_step() -> None:
    rng = np.random.default_rng(0)
    logprobs = -np.sort(rng.exponential(4.0, (50, 30)), axis=1).astype(np.float16)
    codes, scales = quantized.quantize(logprobs)
    decoded = np.empty_like(logprobs)
    quantized.dequantize(codes, scales, decoded)
    assert np.array_equal(decoded[:, 0], logprobs[:, 0])
    assert np.array_equal(decoded[:, -1], logprobs[:, -1])
    half_step = (scales[:, 0].astype(np.float64) - scales[:, 1]) / 254 / 2
    rounding = np.abs(logprobs).astype(np.float64) * 2**-10
    assert (np.abs(decoded.astype(np.float64) - logprobs) <= half_step[:, None] + rounding).all()
    assert np.abs(decoded.astype(np.float64) - logprobs).max() > 0.5 * half_step.max()  # it does round


def test_equal_and_empty_slots() -> None:
    logprobs = np.array([[-1.5, -1.5], [-0.25, -np.inf], [-np.inf, -np.inf], [0.0, -60_000.0]], np.float16)
    codes, scales = quantized.quantize(logprobs)
    assert codes.tolist() == [[0, 0], [0, 255], [255, 255], [0, 254]]
    decoded = np.empty_like(logprobs)
    quantized.dequantize(codes, scales, decoded)
    assert np.array_equal(decoded, logprobs)


def test_an_infinite_scale_is_damage() -> None:
    ranges = {
        "ids": compress(np.zeros((1, 2), np.uint32), PLAIN),
        "codes": compress(np.zeros((1, 2), np.uint8), PLAIN),
        "scales": compress(np.array([[np.inf, 0]], np.float16), PLAIN),
    }
    with pytest.raises(DamageError, match="a scale is not finite"):
        quantized.decode(np.arange(3, dtype=np.int32), ranges, np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float16))
