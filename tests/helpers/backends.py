"""The backends that ranks of tests may have: gloo, the stand-in for NCCL, and NCCL with all ranks on one GPU."""

from __future__ import annotations

import os

import torch

from tests.helpers import stand_in

ENVIRONMENTS = {
    # As docs/divergence.md asks for: otherwise torch ends processes before any of them can say why.
    stand_in.NAME: {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"},
    "nccl": {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
    },
}
"""By backend, variables of its ranks."""


def own_device(backend: str, rank: int) -> torch.device | None:
    """Return the device to which a rank's default process group belongs; None if it belongs to none."""
    if backend != "nccl":
        return None
    os.environ["NCCL_HOSTID"] = f"host{rank}"  # NCCL refuses two ranks of one host on one device
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)
