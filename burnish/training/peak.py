"""How fast a GPU multiplies matrices at best, by its name.

The makers' figures for dense bfloat16 and float16 with float32 accumulation, in TFLOP/s; what a real product reaches is
less (790 of an H200's 989). A GPU that is not in the table has no share of a peak, only a rate.
"""

from __future__ import annotations

import torch

HALF_TFLOPS = {
    "B200": 2250.0,
    "B300": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 150.0,
    "A30": 165.0,
    "A10": 125.0,
    "A10G": 70.0,
    "A6000": 155.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 209.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
HALF = (torch.bfloat16, torch.float16)


def half_peak(name: str) -> float | None:
    """Operations a second in a half type of the GPU that calls itself `name`; None where the table has none.

    Of the rows whose words are all in the name the one with the most counts: "H100 PCIe" before "H100".
    """
    words = set(name.replace("-", " ").split())
    found = [row for row in HALF_TFLOPS if set(row.split()) <= words]
    return HALF_TFLOPS[max(found, key=lambda row: len(row.split()))] * 1e12 if found else None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak of a device for products in a type; None where it is not known (a CPU, an unknown GPU, a wide type)."""
    if device.type != "cuda" or dtype not in HALF:
        return None
    return half_peak(torch.cuda.get_device_name(device))
