"""How a `DeviceMesh` is read: the public names of `fullshard.plan.mesh`."""

from fullshard.plan.mesh import (
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
