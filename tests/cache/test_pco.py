import numpy as np
import pytest

from alambique.cache.codec import DamageError
from alambique.cache.pco import DELTAS, PLAIN, compress, decompress_into


@pytest.mark.parametrize("config", [PLAIN, DELTAS])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.float16])
def test_round_trip(config: object, dtype: type) -> None:
    array = np.random.default_rng(0).integers(0, 200, (30, 7)).astype(dtype)
    target = np.zeros_like(array)
    decompress_into(compress(array, config), target)
    assert np.array_equal(target, array)


def test_nothing_is_no_bytes() -> None:
    assert compress(np.zeros((0, 5), np.uint32), PLAIN) == b""
    decompress_into(b"", np.zeros((0, 5), np.uint32))
    with pytest.raises(DamageError, match="bytes where no entries are expected"):
        decompress_into(b"x", np.zeros(0, np.uint32))


@pytest.mark.parametrize("size", [9, 11])
def test_another_number_of_elements_is_damage(size: int) -> None:
    data = compress(np.arange(10, dtype=np.uint32), PLAIN)
    with pytest.raises(DamageError, match=f"entries where {size} are expected"):
        decompress_into(data, np.zeros(size, np.uint32))


def test_another_type_and_noise_are_damage() -> None:
    data = compress(np.arange(10, dtype=np.uint32), PLAIN)
    for damaged, dtype in ((data, np.float16), (data[:-3], np.uint32), (b"", np.uint32), (b"\xff" * 40, np.uint32)):
        with pytest.raises(DamageError):
            decompress_into(damaged, np.zeros(10, dtype))
