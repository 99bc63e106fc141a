"""The full parameters of a group in their own dtypes, outside of training: to be read, saved, written.

    refresh_shards_together   adopt what users have put in the parameters' place; comes before all that follows
    gather_params             full parameters in new memory; collective, like everything that gathers
    install_full_params       put full parameters on the modules
    uninstall_full_params     take them off again, with what was done to them
    uninstall_all             ... of all groups of a state, if a state dict has put them there
    write_to_shards           copy this rank's shard of full parameters into the shard buffer

This is not part of a training step. Forward may compute in another dtype, and always computes in other memory. For
groups whose parameters are divided flat.

A state dict is made and loaded with full parameters on the modules, from its first hook to its last one. An exception in between
leaves them there, so whatever needs the sharded parameters next calls `uninstall_all`: a forward, a state dict, a checkpoint.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState
from fullshard.errors import ConfigurationError
from fullshard.layout.segments import Layout
from fullshard.storage.buffers import in_memory_order, shard_of
from fullshard.storage.sharded_params import OrigParamShard, PlainShardedParam
from fullshard.transport import collectives
from fullshard.transport.tags import Tag, tag

_AGREEING = tag(
    "full parameters (state_dict, optim_state_dict, load_state_dict or summon_full_params)"
)


def refresh_shards_together(groups: Sequence[FSDPParamGroup]) -> None:
    """Adopt what users have put in place of sharded parameters, on all ranks or on none. Collective.

    Only some ranks may have assigned what cannot be used: those raise, and so do all others.
    """
    faults = []
    for group in groups:
        try:
            group.refresh_shards()
        except ConfigurationError as error:
            faults.append(str(error))
    process_groups = _process_groups(groups)
    dtypes = [f"{param.name}: {param.dtype}" for group in groups for param in group.params]
    # One small message per process group, whatever the ranks have found: is there a fault, and are dtypes the same?
    kind = zlib.crc32("\n".join(dtypes).encode())
    found = [bool(faults), kind, -kind]
    for process_group, device in process_groups:
        message = torch.tensor(found, dtype=torch.int64, device=device)
        collectives.all_reduce(message, process_group, ReduceOp.MAX, _AGREEING)
        found = message.tolist()
    if found[0] or found[1] != -found[2]:
        everyone = collectives.values_by_rank(
            (faults, dtypes), [each for each, _ in process_groups], _AGREEING
        )
        _raise_together(everyone)


def _process_groups(groups: Iterable[FSDPParamGroup]) -> list[tuple[ProcessGroup, torch.device]]:
    """Return the process groups over which groups communicate, each with a device that it can reach."""
    found = ((each, group.device) for group in groups for each in _process_groups_of(group))
    return [*dict.fromkeys(found)]


def _process_groups_of(group: FSDPParamGroup) -> list[ProcessGroup]:
    axes = group.mesh_info
    both = axes.shard_process_group, axes.replicate_process_group
    return [each for each in both if each is not None]


def _raise_together(everyone: Mapping[int, tuple[list[str], list[str]]]) -> NoReturn:
    """Raise what ranks have found, or how their dtypes differ."""
    ranks: dict[str, list[int]] = {}
    for rank, (faults, _) in everyone.items():
        for fault in faults:
            ranks.setdefault(fault, []).append(rank)
    if ranks:
        raise ConfigurationError(
            "\n".join(f"On ranks {theirs}: {fault}" for fault, theirs in ranks.items())
        )
    for rank, (_, dtypes) in everyone.items():
        for each in dtypes:
            ranks.setdefault(each, []).append(rank)
    raise ConfigurationError(
        "Parameters must have the same dtypes on all ranks, but there are:\n  "
        + "\n  ".join(
            f"{each} on ranks {theirs}"
            for each, theirs in ranks.items()
            if len(theirs) < len(everyone)
        )
        + "\nCast them on every rank."
    )


def gather_params(group: FSDPParamGroup) -> list[Tensor]:
    """Return all parameters in their own dtypes, in new memory on the compute device. Collective."""
    return [full for full in gather(group, group.shards.buffer.pieces) if full is not None]


@torch.no_grad()
def gather(group: FSDPParamGroup, pieces: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gather the ranks' pieces of each segment; return one full tensor per parameter, or None for a piece of None.

    Collective.
    """
    if group.observer is not None:
        group.observer.gathered_aside(group)
    return all_gather_full(
        group.layout,
        [None if piece is None else piece.to(group.device) for piece in pieces],
        group.mesh_info.shard_peers,
        tag(f"{group.gather_tag.text}, outside of a step"),
    )


def install_full_params(group: FSDPParamGroup, values: Sequence[Tensor]) -> None:
    """Let the modules have these as parameters, one for each of the group's, until `uninstall_full_params`."""
    group.use_sharded_params()
    group.full_params_installed = True
    for sharded_param, members in _members_of_sharded_params(group):
        sharded_param.install_full_params([values[index] for index in members])


def uninstall_full_params(group: FSDPParamGroup) -> list[Tensor]:
    """Put the sharded parameters back on the modules and return the full ones as they are now."""
    values: dict[int, Tensor] = {}
    for sharded_param, members in _members_of_sharded_params(group):
        values.update(zip(members, sharded_param.uninstall_full_params(), strict=True))
    group.full_params_installed = False
    return [values[index] for index in range(len(group.params))]


def uninstall_all(state: FSDPState, *, write: bool = False) -> None:
    """Put the sharded parameters of a state back, unless it is summoned; with ``write``, with the values installed now."""
    for group in () if state.summoned else state.groups:
        if group.full_params_installed:
            fulls = uninstall_full_params(group)
            if write:
                write_to_shards(group, fulls)


def installed_on_modules(state: FSDPState) -> list[Tensor]:
    """Return the full parameters that are on the modules of a state; of tensor-parallel ones, this rank's part."""
    installed = [group for group in state.groups if group.full_params_installed]
    return [
        param.placement.local_part(found)
        for group in installed
        for param in group.params
        if (found := param.owners[0].current()) is not None
    ]


def _members_of_sharded_params(
    group: FSDPParamGroup,
) -> Iterator[tuple[PlainShardedParam, list[int]]]:
    for sharded_param in group.sharded_params:
        assert isinstance(sharded_param, PlainShardedParam), "the shard format of the wrapper"
        yield (
            sharded_param,
            [
                index
                for index, param in enumerate(group.params)
                if param.sharded_param is sharded_param
            ],
        )


@torch.no_grad()
def changed_anywhere(
    fulls: Mapping[FSDPParamGroup, Sequence[Tensor]],
) -> dict[FSDPParamGroup, bool]:
    """Return for each group whether full parameters differ, on any rank, from the shards they were gathered from. Collective.

    What did not change need not be written: a backward that is still to come may use these weights. Ranks decide that
    together, since each looks at its own shards only.
    """
    changed = {group: _differs(group, full) for group, full in fulls.items()}
    for process_group, device in _process_groups(fulls):
        members = [each for each in fulls if process_group in _process_groups_of(each)]
        message = torch.tensor([changed[each] for each in members], dtype=torch.int64).to(device)
        collectives.all_reduce(message, process_group, ReduceOp.MAX, _AGREEING)
        changed |= zip(members, map(bool, message.tolist()), strict=True)
    return changed


def _differs(group: FSDPParamGroup, fulls: Sequence[Tensor]) -> bool:
    rank = group.mesh_info.shard_mesh_rank
    for index, (full, local) in enumerate(zip(fulls, group.shards.buffer.locals, strict=True)):
        if tuple(full.shape) != group.params[index].shape:
            return True
        part = shard_of(group.layout, index, rank, full).to(local).reshape(-1)
        # As bytes: zeros have signs, and a NaN is equal to itself.
        if not torch.equal(part.view(torch.uint8), local.reshape(-1).view(torch.uint8)):
            return True
    return False


@torch.no_grad()
def write_to_shards(group: FSDPParamGroup, fulls: Sequence[Tensor]) -> None:
    """Copy this rank's shard of full parameters into the shard buffer."""
    group.reshard()  # what is gathered is outdated
    rank = group.mesh_info.shard_mesh_rank
    for index, (full, local) in enumerate(zip(fulls, group.shards.buffer.locals, strict=True)):
        local.copy_(shard_of(group.layout, index, rank, full))
    # Pieces of the users' own parameters do not share a version counter with the buffer.
    torch.autograd.graph.increment_version(group.shards.leaves)


# --- gradients, with use_orig_params=True ---------------------------------------------------------


@torch.no_grad()
def gather_gradients(group: FSDPParamGroup) -> list[Tensor | None]:
    """Return the full gradients of all parameters; None of those that have none on any rank. Collective."""
    layout, rank = group.layout, group.mesh_info.shard_mesh_rank
    present = [param.sharded_param.param.grad is not None for param in group.params]
    peers = group.mesh_info.shard_peers
    if peers is not None:
        everybody = collectives.values_of_all_ranks(
            present, peers, tag(f"{group.gather_tag.text}, its gradients")
        )
        present = [any(found) for found in zip(*everybody, strict=True)]
    pieces = [
        torch.zeros(
            segment.piece_numel,
            dtype=group.reduction.dtypes.gradient[segment.params[0]],
            device=group.shard_device,
        )
        for segment in layout.segments
    ]
    for index, (param, slot) in enumerate(zip(group.params, layout.slots, strict=True)):
        gradient, piece = param.sharded_param.param.grad, layout.piece(index, rank)
        if gradient is not None:
            held = pieces[slot.segment].narrow(0, piece.offset, piece.numel)
            held.copy_(in_memory_order(gradient, gradient.stride()))
    fulls = gather(group, pieces)
    return [full if found else None for full, found in zip(fulls, present, strict=True)]


def install_full_gradients(group: FSDPParamGroup, fulls: Sequence[Tensor | None]) -> None:
    """Give full parameters that are installed these gradients, until `uninstall_full_gradients`."""
    for sharded_param, full in zip(_orig_param_shards(group), fulls, strict=True):
        sharded_param.install_full_gradient(full)


def uninstall_full_gradients(group: FSDPParamGroup) -> list[Tensor | None]:
    """Take the full gradients off and return them as they are now; before `uninstall_full_params`."""
    return [sharded_param.uninstall_full_gradient() for sharded_param in _orig_param_shards(group)]


@torch.no_grad()
def restore_sharded_gradients(group: FSDPParamGroup, fulls: Sequence[Tensor | None] | None) -> None:
    """Give parameters their sharded gradients back: as they were, or this rank's shard of ``fulls``."""
    rank = group.mesh_info.shard_mesh_rank
    for index, sharded_param in enumerate(_orig_param_shards(group)):
        sharded_param.restore_sharded_gradient()
        if fulls is None:
            continue
        full, held = fulls[index], sharded_param.param.grad
        part = None if full is None else shard_of(group.layout, index, rank, full)
        if part is not None and held is not None:
            in_memory_order(held, held.stride()).copy_(part)
        else:
            sharded_param.set_gradient(
                None if part is None else part.to(group.shard_device, copy=True)
            )


def _orig_param_shards(group: FSDPParamGroup) -> list[OrigParamShard]:
    return [cast(OrigParamShard, param.sharded_param) for param in group.params]


def all_gather_full(
    layout: Layout, pieces: Sequence[Tensor | None], process_group: ProcessGroup | None, tag: Tag
) -> list[Tensor | None]:
    """Gather the ranks' pieces of each segment, and return per parameter what they make up.

    The pieces are those of parameters, or of something shaped like them. Where all ranks give None, the parameters
    of that segment are None. The result is in new memory of the current stream, which is ordered after the gather.
    For layouts without `Division.CHUNKS`.
    """
    segments = [
        None if piece is None else piece.new_empty(piece.numel() * layout.world) for piece in pieces
    ]
    pairs = [
        (segment, piece)
        for segment, piece in zip(segments, pieces, strict=True)
        if segment is not None and piece is not None and piece.numel()
    ]
    if process_group is None:
        for segment, piece in pairs:
            segment.copy_(piece)
    else:
        work = collectives.all_gather(
            [segment.view(torch.uint8) for segment, _ in pairs],
            [piece.view(torch.uint8) for _, piece in pairs],
            process_group,
            tag,
            async_op=False,
        )
        assert work is None, "not asynchronous"
    return [
        None if segment is None else segment.as_strided(slot.shape, slot.strides, slot.start)
        for slot, segment in ((slot, segments[slot.segment]) for slot in layout.slots)
    ]
