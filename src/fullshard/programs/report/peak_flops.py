"""The most that a GPU can compute, as its vendor states it. What is not in the table is not known, and never guessed."""

from __future__ import annotations

TERA = 1e12

PEAK_FLOPS: dict[str, dict[str, float]] = {
    "NVIDIA A100": {"bf16": 312 * TERA, "fp32": 19.5 * TERA},
    "NVIDIA H100 80GB HBM3": {"bf16": 989 * TERA, "fp32": 67 * TERA},
    "NVIDIA H100 PCIe": {"bf16": 756 * TERA, "fp32": 51 * TERA},
    "NVIDIA H200": {"bf16": 989 * TERA, "fp32": 67 * TERA},
    "NVIDIA L4": {"bf16": 121 * TERA, "fp32": 30.3 * TERA},
    "NVIDIA L40S": {"bf16": 362 * TERA, "fp32": 91.6 * TERA},
}
"""FLOP/s in NVIDIA's data sheets, by the beginning of a device's name and by the precision of the run. They are without
sparsity. float32 is without tensor cores, as torch computes it unless a program asks for TF32."""

FLOPS_PER_PARAMETER = 6
"""A token costs two operations per parameter in forward and four in backward. Attention's products of tokens with tokens
are not counted."""


def peak_flops(device: str, precision: str) -> float | None:
    """Return the FLOP/s of a device; None if they are not known.

    A name counts up to a space or a hyphen: "NVIDIA A100-SXM4-80GB" is an A100, "NVIDIA L40" is no L4. Part of a GPU
    ("MIG 1g.10gb") computes less than all of it.
    """
    if "MIG" in device:
        return None
    for name, peaks in PEAK_FLOPS.items():
        if device == name or device.startswith((f"{name} ", f"{name}-")):
            return peaks.get(precision)
    return None
