"""The facts that must be equal on all ranks that share a model, as text: names, shapes, dtypes, meshes, policies, options.

A description has sections, a general one and one for each group of parameters, in the order of the model. A
section has items, and an item has a text:

    layers.7      mesh of layers.7                    [[0, 1, 2, 3]]
                  reduce_dtype of layers.7            float32
                  layers.7.mlp.up.weight              (1024, 2048)
                  dtype of layers.7.mlp.up.weight     float32

Only what is equal by right is in it. Ranks of other pipeline stages have other modules, and those of other places along
a tensor-parallel axis have other local shapes: they share no process group of data parallelism with this rank, and a
description is for the ranks of one such group. Not in it are what differs by right from one microbatch to the next
(whether gradients are synchronised, whether parameters stay after backward), which changes the order of collectives and
is found there; the number of a device; and how many reductions are in flight.

Ranks of a tensor-parallel mesh compare what they have in common by right, too: the global shapes, dtypes and placements
of the parameters that are DTensors there. So all of them learn of a difference that some have found along other axes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fullshard.engine.ownership import names_in_common
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.reduction_state import ReduceSettings
from fullshard.engine.state import FSDPState
from fullshard.errors import ConfigurationError
from fullshard.layout.segments import Division
from fullshard.mesh.axes import DataParallelAxes, ranks_by_replica
from fullshard.mesh.backends import has_imagined_ranks, has_peers
from fullshard.policies import MixedPrecisionPolicy
from fullshard.storage.param import FSDPParam

Section = dict[str, str]
Description = dict[str, Section]
"""Sections by title, and texts by item; the order counts."""

GENERAL = "general"
_LISTED_RANKS = 64
"""For larger meshes, a digest stands for the ranks, which would otherwise be in the text of every group."""


def describe(
    root: nn.Module, states: Sequence[FSDPState], occasion: str
) -> dict[tuple[int, ...], Description]:
    """Return the facts that must be equal, by the ranks that must have them in common, this one among them.

    ``occasion`` says what the ranks are about to do together. Groups without other ranks are left out. Smaller sets of ranks come first, and those of tensor parallelism last: the
    order is the same on all ranks.
    """
    paths = names_in_common(root, [state.ignored for state in states])
    general = _general(occasion)
    data_parallel: dict[tuple[int, ...], Description] = {}
    tensor_parallel: dict[tuple[int, ...], Description] = {}
    ranks_of = _RanksInCommon()
    for state in states:
        state_name = (
            state.name_in_common or type(state.modules[0]).__name__
        )  # before the first forward
        options = _options(state, state_name)
        for group in state.groups:
            axes = group.mesh_info
            names = [full_name(param, paths) for param in group.params]
            sharing = ranks_of.axes(axes)
            if sharing:
                section = _section(group, state_name, ranks_of.text(axes), names) | options
            for ranks in sharing:
                description = data_parallel.setdefault(ranks, {GENERAL: general})
                description[_title(description, state_name)] = section
                if len(sharing) == 2:  # process groups that form no grid; next come the replicas
                    section = section | {f"shard of {state_name}": str(axes.shard_mesh_rank)}
            for param, name in zip(group.params, names, strict=True):
                mesh = param.placement.unsharded_mesh
                if mesh is not None and (ranks := ranks_of.mesh(mesh)):
                    description = tensor_parallel.setdefault(ranks, {})
                    _add_common_facts(description.setdefault(state_name, {}), param, name)
    return _in_order(data_parallel) | {
        ranks: data_parallel.get(ranks, {})
        | {f"tensor parallelism of {title}": each for title, each in sections.items()}
        for ranks, sections in _in_order(tensor_parallel).items()
    }


def _in_order(
    descriptions: Mapping[tuple[int, ...], Description],
) -> dict[tuple[int, ...], Description]:
    return dict(sorted(descriptions.items(), key=lambda each: (len(each[0]), each[0])))


class _RanksInCommon:
    """The ranks of meshes, each asked for once: a model has many groups on few meshes."""

    def __init__(self) -> None:
        self._of_axes: dict[object, tuple[list[tuple[int, ...]], str]] = {}
        self._of_meshes: dict[int, tuple[int, ...]] = {}

    def axes(self, axes: DataParallelAxes) -> list[tuple[int, ...]]:
        """Return the sets of ranks that have the same parameters as this one."""
        return self._found(axes)[0]

    def text(self, axes: DataParallelAxes) -> str:
        """Return the ranks by replica and shard, for a description."""
        return self._found(axes)[1]

    def _found(self, axes: DataParallelAxes) -> tuple[list[tuple[int, ...]], str]:
        key = axes.communicates_over
        if key not in self._of_axes:
            self._of_axes[key] = ranks_in_common(axes), _mesh(axes)
        return self._of_axes[key]

    def mesh(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """Return all ranks of a mesh of tensor parallelism; none if this is the only one."""
        if id(mesh) not in self._of_meshes:
            is_of_ranks = mesh.size() > 1 and not has_imagined_ranks(mesh.get_group(0))
            ranks = mesh.mesh.flatten().tolist() if is_of_ranks else []
            self._of_meshes[id(mesh)] = tuple(sorted(ranks))
        return self._of_meshes[id(mesh)]


def ranks_in_common(axes: DataParallelAxes) -> list[tuple[int, ...]]:
    """Return the global ranks that have the same parameters as this one, in order; without others, none.

    Replicas and shards are one set where every rank knows all of it. Two process groups that form no grid are two.
    """
    groups = [each for each in (axes.shard_peers, axes.replicate_process_group) if _has_peers(each)]
    if len(groups) == 2:
        try:
            return [tuple(sorted(rank for row in ranks_by_replica(axes) for rank in row))]
        except ConfigurationError:
            pass
    return [tuple(sorted(dist.get_process_group_ranks(group))) for group in groups]


def process_groups(states: Sequence[FSDPState]) -> dict[ProcessGroup, torch.device]:
    """Return the process groups over which states communicate with other ranks, and on which device."""
    return {
        process_group: group.device
        for state in states
        for group in state.groups
        for process_group in (group.mesh_info.shard_peers, group.mesh_info.replicate_process_group)
        if process_group is not None and _has_peers(process_group)
    }


def _has_peers(group: ProcessGroup | None) -> bool:
    return group is not None and has_peers(group)


def _title(description: Mapping[str, Section], name: str) -> str:
    """Return the name of a group, numbered if its state has several."""
    title, number = name, 1
    while title in description:
        number += 1
        title = f"{name} ({number})"
    return title


def _general(occasion: str) -> Section:
    from fullshard import __version__  # as it is now

    return {
        "what comes next": occasion,
        "version of fullshard": __version__,
        "version of torch": str(torch.__version__),
    }


def _mesh(axes: DataParallelAxes) -> str:
    """Return the ranks by replica and shard."""
    try:
        rows = ranks_by_replica(axes)
    except ConfigurationError:  # known on every rank: the sizes of its own two process groups
        return f"{axes.replicate_mesh_size} replicas of {axes.shard_mesh_size} shards"
    text = str([list(row) for row in rows])
    if sum(map(len, rows)) > _LISTED_RANKS:
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        text = f"{len(rows)} x {len(rows[0])} ranks ({digest})"
    return text


def _options(state: FSDPState, name: str) -> Section:
    """Return the options of a state that change which collectives it calls, or when."""
    options = state.options
    return {
        f"reshard_after_forward of {name}": str(options.reshard_after_forward),
        f"forward prefetch of {name}": _prefetch(options.forward_prefetch),
        f"backward prefetch of {name}": _prefetch(options.backward_prefetch)
        + (", late" if options.prefetches_late else ""),
        f"unshard_in_backward of {name}": str(options.unshard_in_backward),
        f"fuse_gradients of {name}": str(options.fuse_gradients),
    }


def _prefetch(states: Sequence[FSDPState] | None) -> str:
    return (
        "what comes next"
        if states is None
        else f"[{', '.join(each.name_in_common for each in states)}]"
    )


def _section(group: FSDPParamGroup, name: str, mesh: str, param_names: Sequence[str]) -> Section:
    post_forward = group.routes.post_forward
    section = {
        f"mesh of {name}": mesh,
        f"device of {name}": group.device.type,
        f"shard format of {name}": group.shards.format_name,
        f"post-forward mesh size of {name}": str(
            group.layout.world if post_forward is None else post_forward.size
        ),
        f"all-gather of {name}": _class_of(group.routes.custom) + _codec_of(group),
        f"offload_policy of {name}": type(group.offload_policy).__name__,
    }
    for option, text in _policy(group.mp_policy):
        section[f"{option} of {name}"] = text
    for option, text in _reduction(group.reduction.settings, group.mesh_info).items():
        section[f"{option} of {name}"] = text
    for param, slot, param_name in zip(group.params, group.layout.slots, param_names, strict=True):
        section[param_name] = str(param.shape)
        section[f"shard dimension of {param_name}"] = str(param.shard_dim)
        _add_common_facts(section, param, param_name)
        if slot.division is Division.FLAT:
            section[f"strides of {param_name}"] = str(slot.strides)
        if param.sharded_param not in group.shards.shard_views:
            section[f"class of {param_name}"] = type(param.sharded_param.local).__name__
    return section


def full_name(param: FSDPParam, paths: Mapping[nn.Module, str]) -> str:
    """Return the name of a parameter in the model whose modules have these ``paths``."""
    return param.owners[0].path_in(paths) or param.name


@functools.cache
def _policy(policy: MixedPrecisionPolicy) -> list[tuple[str, str]]:
    return [
        (field.name, _plain(getattr(policy, field.name)))
        for field in fields(policy)
        if not field.name.endswith("_fn")  # what it has chosen is compared by parameter
    ]


def _reduction(settings: ReduceSettings, axes: DataParallelAxes) -> Section:
    separate = settings.process_group is not axes.shard_peers
    return {
        "gradient divide factor": "the number of ranks"
        if settings.divide_by is None
        else str(settings.divide_by),
        "force_sum": str(settings.force_sum),
        "reduce_scatter_unused_params": str(settings.zero_unused),
        "reduce-scatter": _class_of(settings.custom),
        "process group of reductions": "its own" if separate else "that of gathers",
        "communication hook": "none" if settings.replacement is None else "set",
        "all-reduce hook": "none" if settings.hook is None else "set",
    }


def _add_common_facts(section: Section, param: FSDPParam, name: str) -> None:
    """Add the facts that ranks of tensor parallelism have in common, too."""
    section[f"dtype of {name}"] = _plain(param.dtype)
    if param.param_dtype is not None:
        section[f"param_dtype of {name}"] = _plain(param.param_dtype)
    section[f"requires_grad of {name}"] = str(param.sharded_param.param.requires_grad)
    placement = param.placement
    if placement.unsharded_mesh is not None:
        mesh, placements = placement.unsharded_mesh, placement.unsharded_placements
        section[f"tensor parallelism of {name}"] = (
            f"{placement.shape} as {placements} on {mesh.mesh_dim_names or ''}{tuple(mesh.shape)}"
        )


def _codec_of(group: FSDPParamGroup) -> str:
    codec = group.routes.codec
    return "" if codec is None else f", as {codec.__name__}"


def _class_of(comm: object) -> str:
    return "the process group's" if comm is None else type(comm).__name__


@functools.cache
def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")
