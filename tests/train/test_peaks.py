import pytest

from alambique.train.peaks import peak_tflop_per_s


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10", None),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", None),
        ("cpu (x86_64)", None),
    ],
)
def test_a_known_device_has_its_peak_and_no_other_one_has(name: str, peak: float | None) -> None:
    assert peak_tflop_per_s(name) == peak
