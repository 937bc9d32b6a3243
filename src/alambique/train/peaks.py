"""What known GPUs can do at most: the denominator of the model FLOP/s utilisation."""

# Dense bfloat16 products on the tensor cores, in 1e12 FLOP/s, by words of the driver's name for the device, the more
# particular first. Sources: NVIDIA's data sheets of each product, halved where they count sparsity.
_PEAK_TFLOP_PER_S = {
    "B200": 2250.0,  # source: HGX B200, 36 PFLOP/s of 8 GPUs with sparsity
    "H200 NVL": 835.5,  # source: H200, 1,671 with sparsity
    "H200": 989.5,  # source: H200 SXM, 1,979 with sparsity
    "GH200": 989.5,  # source: as H200 SXM
    "H100 NVL": 835.5,  # source: H100 NVL, 1,671 with sparsity
    "H100 PCIe": 756.5,  # source: H100 PCIe, 1,513 with sparsity
    "H100": 989.5,  # source: H100 SXM, 1,979 with sparsity
    "A100": 312.0,  # source: A100, SXM and PCIe
    "A30": 165.0,  # source: A30
    "L40S": 362.0,  # source: L40S
    "L40": 181.0,  # source: L40
    "L4": 121.0,  # source: L4, 242 with sparsity
}


def peak_tflop_per_s(device_name: str) -> float | None:
    """Peak of the device that the driver calls ``device_name``; None if it isn't known, or is a part of one."""
    words = device_name.replace("-", " ").split()
    if "MIG" in words or "Laptop" in words:
        return None
    for name, peak in _PEAK_TFLOP_PER_S.items():
        wanted = name.split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return peak
    return None
