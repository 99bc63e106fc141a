"""Meshes, process groups and their backends: the axes along which a group is sharded and replicated.

It may import the vocabulary: `errors`, `policies`, `torch_border`.
It owns the making of process groups, and what must be known of a backend. The names below are the public ones.
"""

from fullshard.mesh.axes import (
    DataParallelAxes,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ProcessGroupAxes,
    ShardPlacementResult,
    sharding_mesh_info,
)

__all__ = [
    "DDPMeshInfo",
    "DataParallelAxes",
    "DataParallelMeshInfo",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "ProcessGroupAxes",
    "ShardPlacementResult",
    "sharding_mesh_info",
]
