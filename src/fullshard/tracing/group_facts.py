"""Facts about a model's groups: sizes, bytes on the wire, dtypes.

Nothing is run and nothing is communicated, so this also works on the meta device and for any number of ranks. Traces and
`fullshard inspect` use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState, named_states, state_of
from fullshard.errors import ConfigurationError
from fullshard.layout.balanced_placement import least_padded_dim
from fullshard.layout.segments import Division, Layout, flat_layout, per_row_layout
from fullshard.storage.param import FSDPParam
from fullshard.tracing.schema import GroupFacts


def group_facts(model: nn.Module) -> tuple[GroupFacts, ...]:
    """Return facts about all groups of a sharded model, in the order of forward as far as it is known.

    Raises:
        ConfigurationError: nothing in ``model`` is sharded.
    """
    return tuple(facts for _, facts in facts_of_groups(model))


def facts_of_groups(model: nn.Module) -> list[tuple[FSDPParamGroup, GroupFacts]]:
    """Return the groups with their facts, in the same order."""
    found = [
        (group, name, modules)
        for state, name, modules in states_in(model)
        for group in state.groups
    ]
    counts = Counter(name for _, name, _ in found)
    seen: Counter[str] = Counter()
    result = []
    for group, name, modules in found:
        seen[name] += 1
        unique = name if counts[name] == 1 else f"{name} ({seen[name]})"
        result.append((group, _facts(group, unique, modules)))
    return result


def states_in(model: nn.Module) -> Iterator[tuple[FSDPState, str, tuple[str, ...]]]:
    """Yield all states in ``model``, each with its name and the names of its modules, in order of forward.

    The names are those that the engine uses. If ``model`` contains several sharded models, the path of each comes first.
    """
    roots = outermost_states(model)
    for path, root in roots.items():
        names = named_states(root.modules[0])
        order = root.step.schedule.forecast if root.step is not None else ()
        for state in dict.fromkeys((*order, *names)):
            modules = [f"{path}.{name}".strip(".") for name in names[state]]
            name = ", ".join(names[state]) or "root"
            yield state, f"{path}: {name}" if len(roots) > 1 else name, tuple(modules)


def outermost_states(model: nn.Module) -> dict[str, FSDPState]:
    """Return the roots of all sharded models in ``model``, by their paths in it.

    Raises:
        ConfigurationError: nothing in ``model`` is sharded.
    """
    roots: dict[str, FSDPState] = {}
    for path, state in _uppermost(model, ""):
        root = state if state.step is None else state.step.root
        if root not in roots.values():
            roots[path] = root
    if not roots:
        raise ConfigurationError(
            f"Only a sharded model has groups; nothing in this {type(model).__name__} is sharded. "
            "Apply fully_shard or FullyShardedDataParallel first, and pass the result."
        )
    return roots


def _uppermost(module: nn.Module, path: str) -> Iterator[tuple[str, FSDPState]]:
    """Yield the states of modules that are in no other sharded module, in order, with their paths."""
    state = state_of(module)
    if state is not None:
        yield path, state
        return
    for name, child in module.named_children():
        yield from _uppermost(child, f"{path}.{name}".strip("."))


def _facts(group: FSDPParamGroup, name: str, modules: tuple[str, ...]) -> GroupFacts:
    group.notice_replacements()
    layout, axes, reduction = group.layout, group.mesh_info, group.reduction
    gathers, (reduce_bytes, all_reduce_bytes) = group.routes.traffic(), reduction.traffic()
    reduce_dtypes = {
        dtype
        for param, dtype in zip(group.params, reduction.dtypes.reduce, strict=True)
        if param.trainable
    }
    numels = [slot.numel for slot in layout.slots]
    trained = sum(
        numel for param, numel in zip(group.params, numels, strict=True) if param.trainable
    )
    return GroupFacts(
        name=name,
        modules=modules,
        parameters=len(group.params),
        numel=sum(numels),
        padded_numel=padded_numel(layout),
        shard_bytes=group.shards.nbytes,
        gathered_bytes=gathers.memory,
        gather_bytes=gathers.received,
        reduce_bytes=reduce_bytes,
        all_reduce_bytes=all_reduce_bytes,
        param_dtype=_names({param.dtype for param in group.params}),
        compute_dtype=_names({*group.routes.compute_dtypes}),
        reduce_dtype=_names(reduce_dtypes),
        wire_dtype=_names({reduction.dtypes.wire or dtype for dtype in reduce_dtypes}),
        world=axes.shard_mesh_size,
        replicas=axes.replicate_mesh_size,
        trained_share=trained / (sum(numels) or 1),
        division="flat" if any(s.division is Division.FLAT for s in layout.slots) else "rows",
        **_padded_otherwise(group.params, layout.world),
    )


def _padded_otherwise(params: Sequence[FSDPParam], world: int) -> dict[str, int]:
    """Return the elements of all shards if the parameters were cut in other ways."""
    shapes = [param.shape for param in params]
    # A parameter without dimensions cannot be cut; the layout knows.
    balanced = [least_padded_dim(shape, world) if shape else 0 for shape in shapes]
    ways = {
        "flat_padded_numel": flat_layout(shapes, world=world, kinds=[p.dtype for p in params]),
        "balanced_padded_numel": per_row_layout(shapes, world=world, dims=balanced),
    }
    if world % 2 == 0:
        ways["halved_padded_numel"] = per_row_layout(shapes, world=world // 2)
    return {name: padded_numel(layout) for name, layout in ways.items()}


def padded_numel(layout: Layout) -> int:
    """Return the elements of the shards of all ranks."""
    return sum(segment.piece_numel for segment in layout.segments) * layout.world


def _names(dtypes: Collection[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
