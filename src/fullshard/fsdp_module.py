"""Sharded modules: the public names of `fullshard.fsdp2.fsdp_module`."""

from fullshard.features.backward_finalization import GradientReductionHandle
from fullshard.features.unshard_handle import UnshardHandle
from fullshard.fsdp2.fsdp_module import (
    FSDPModule,
    ReplicateModule,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)

__all__ = [
    "FSDPModule",
    "GradientReductionHandle",
    "ReplicateModule",
    "UnshardHandle",
    "disable_fsdp_module_new_init",
    "get_cls_to_fsdp_cls",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
