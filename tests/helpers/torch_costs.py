"""Work of torch's that no test is about, done once or not at all.

What tests see of torch stays the same. It took a tenth of the processor time of all tests.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator


def spare_torch_costs() -> None:
    """Make torch cheaper in this process from now on."""
    _seed_only_what_is_there()
    _remember_plans_of_dtensor()


def spare_torchrun_costs() -> None:
    """Make torchrun cheaper in this process and in those that it forks.

    Its rendezvous looks up the method that it is in many times a second. It does so through `inspect.stack`, which
    finds the source of every frame among all modules that are imported: most of the time that torchrun took.
    """
    dynamic_rendezvous.inspect = SimpleNamespace(  # type: ignore[attr-defined, assignment]
        stack=partial(inspect.stack, context=0)
    )


def _seed_only_what_is_there() -> None:
    """Keep `torch.manual_seed` from noting the seed for devices that are not there.

    Each note has a formatted stack, and each stack looks at the sources of all its frames.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def _remember_plans_of_dtensor() -> None:
    """Keep DTensor's plans of operations from one process group to the next.

    DTensor plans each operation once per mesh. Its memory of that has to be cleared with the mesh (see
    `forget_meshes`), but a plan depends on the mesh's shape only. Here plans are kept without their mesh, and get the
    mesh of the operation.
    """
    make = ShardingPropagator.propagate_op_sharding_non_cached
    plans: dict[Hashable, _Plan] = {}

    def remember(self: ShardingPropagator, schema: OpSchema) -> OutputSharding:
        meshes = {
            id(spec.mesh): spec.mesh for spec in _specs((schema.args_schema, schema.kwargs_schema))
        }
        if (
            len(meshes) != 1 or detect_fake_mode() is not None
        ):  # while tracing, shapes can be symbolic
            return make(self, schema)
        [mesh] = meshes.values()
        key = (
            schema.op,
            torch.get_default_dtype(),
            *_place(mesh),
            _frozen(schema.args_schema),
            _frozen(schema.kwargs_schema),
        )
        try:
            plan = plans.get(key)
        except TypeError:  # an argument cannot be hashed
            return make(self, schema)
        if plan is not None:
            return plan.on(mesh)
        made = make(self, schema)
        if all(spec.mesh is mesh for spec in _specs(_parts(made))):
            plans[key] = _Plan(made)
        return made

    ShardingPropagator.propagate_op_sharding_non_cached = remember  # type: ignore[assignment, method-assign]


class _Plan:
    """What DTensor planned for an operation, without the mesh."""

    def __init__(self, made: OutputSharding) -> None:
        self._made = replace(made, output_spec=None, redistribute_schema=None)
        self._parts = _with_mesh(_parts(made), None)

    def on(self, mesh: DeviceMesh) -> OutputSharding:
        output, schema = _with_mesh(self._parts, mesh)
        schema = None if schema is None else OpSchema(*schema)
        return replace(self._made, output_spec=output, redistribute_schema=schema)


def _parts(made: OutputSharding) -> tuple[Any, Any]:
    """All of a plan that has a mesh."""
    schema = made.redistribute_schema
    if schema is not None:
        schema = (schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info)  # type: ignore[assignment]
    return made.output_spec, schema


def _with_mesh(value: Any, mesh: DeviceMesh | None) -> Any:
    """A copy of specs, and of what has them, with another mesh."""
    if isinstance(value, DTensorSpec):
        spec = copy.copy(value)
        spec.mesh = mesh  # type: ignore[assignment]
        return spec
    if type(value) in (tuple, list):
        return type(value)(_with_mesh(each, mesh) for each in value)
    if type(value) is dict:
        return {name: _with_mesh(each, mesh) for name, each in value.items()}
    return value


def _specs(value: Any) -> Iterator[DTensorSpec]:
    if isinstance(value, DTensorSpec):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _specs(each)
    elif isinstance(value, dict):
        yield from _specs(tuple(value.values()))


def _place(mesh: DeviceMesh) -> tuple[Hashable, ...]:
    """Which ranks a mesh has in which order, and which of them this process is."""
    where = mesh.get_coordinate()
    return (
        mesh.device_type,
        mesh.mesh_dim_names,
        mesh.mesh.shape,
        tuple(mesh.mesh.flatten().tolist()),
        where and tuple(where),
    )


def _frozen(argument: Any) -> Hashable:
    """A value that is equal for arguments with which DTensor plans alike."""
    if isinstance(argument, DTensorSpec):
        own = {
            name: value for name, value in vars(argument).items() if name not in ("mesh", "_hash")
        }
        return tuple(map(type, argument.placements)), tuple(own.items())
    if isinstance(argument, tuple | list):
        return type(argument), tuple(_frozen(each) for each in argument)
    if isinstance(argument, dict):
        return tuple((name, _frozen(each)) for name, each in argument.items())
    return type(argument), argument  # 1, 1.0 and True are equal
