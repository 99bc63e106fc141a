"""Work of torch's that no test is about, done once or not at all.

What tests see of torch stays the same. It took a tenth of the processor time of all tests.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._sharding_prop import ShardingPropagator


def spare_torch_costs() -> None:
    """Make torch cheaper in this process from now on."""
    _seed_only_what_is_there()
    _remember_tensor_metas()


def _seed_only_what_is_there() -> None:
    """Keep `torch.manual_seed` from noting the seed for devices that are not there.

    Each note has a formatted stack, and each stack looks at the sources of all its frames.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def _remember_tensor_metas() -> None:
    """Keep what DTensor found out about the shapes of an operation's results from one process group to the next.

    DTensor runs each operation on fake tensors once per mesh, and its memory of that has to be cleared with the mesh
    (see `forget_meshes`). The shapes do not depend on the mesh.
    """
    find = ShardingPropagator._propagate_tensor_meta_non_cached
    remembered: dict[Hashable, Any] = {}

    def remember(self: ShardingPropagator, schema: Any) -> Any:
        if detect_fake_mode() is not None:  # shapes can be symbolic
            return find(self, schema)
        key = (
            schema.op,
            torch.get_default_dtype(),
            _frozen(schema.args_schema),
            _frozen(schema.kwargs_schema),
        )
        try:
            return remembered[key]
        except KeyError:
            found = remembered[key] = find(self, schema)
            return found
        except TypeError:  # an argument cannot be hashed
            return find(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = remember  # type: ignore[assignment, method-assign]


def _frozen(argument: Any) -> Hashable:
    """A value that is equal for arguments with which an operation has results of equal shapes."""
    if isinstance(argument, DTensorSpec):
        return argument.mesh.device_type, argument.tensor_meta
    if isinstance(argument, tuple | list):
        return type(argument), tuple(_frozen(each) for each in argument)
    if isinstance(argument, dict):
        return tuple((name, _frozen(each)) for name, each in argument.items())
    return type(argument), argument  # 1, 1.0 and True are equal
