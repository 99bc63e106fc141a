"""A group's shards: their memory, and the sharded parameters over it.

One buffer holds this rank's pieces, and every sharded parameter is a view of it. Users move, cast, re-materialise
and assign parameters, or their data; afterwards the objects on the modules are the truth:

    replacements   what users put in place of sharded parameters, if anything
    adopt          copies that into a new buffer; the sharded parameters are over the new buffer then

Every forward looks for replacements, and so does all code that reads or writes shards outside of a step
(`FSDPParamGroup.refresh_shards`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.errors import ConfigurationError
from fullshard.layout.placement import local_tensor
from fullshard.mesh.axes import DataParallelAxes
from fullshard.storage.buffers import shard_of
from fullshard.storage.flat_parameter import FlatShardedParam
from fullshard.storage.param import FSDPParam, fits_in_buffers, has_all_gather_extension
from fullshard.storage.shard_buffer import ShardBuffer
from fullshard.storage.shard_formats import ShardFormat
from fullshard.storage.sharded_params import ShardedParam, holder_of

# Looked up once: asked several times a step.
_plain_attributes = torch_border.plain_attributes
_dtype_of = operator.attrgetter("dtype")


class ShardStorage:
    """This rank's memory of a group's parameters, and the sharded parameters over it."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        shard_format: ShardFormat,
        mesh_info: DataParallelAxes,
        device: torch.device,
        group: str,
        *,
        pinned: bool,
    ) -> None:
        """Copy this rank's pieces into one shard buffer and put the sharded parameters on the modules.

        Args:
            params: The group's parameters.
            shard_format: Kind of their sharded parameters, and the layout by which they are cut.
            mesh_info: Ranks over which they are sharded.
            device: Device of the shards; those on the meta device stay there for now.
            group: The group's name.
            pinned: Whether in page-locked memory.
        """
        self._params = params
        self.buffered = [p for p in params if fits_in_buffers(local_tensor(p.the_original))]
        """Parameters that lie in the buffer; each of the others is in memory of its own."""
        self._format = shard_format
        self._rank, self._world = mesh_info.shard_mesh_rank, mesh_info.shard_mesh_size
        self.device, self._pins = device, pinned
        self.layout = shard_format.layout(params, mesh_info.shard_mesh_size)
        """The layout of all parameters."""
        self.buffered_layout = shard_format.layout(self.buffered, mesh_info.shard_mesh_size)
        """The layout of the parameters that lie in the buffer."""
        self.num_replaced = 0
        """Grows whenever users' replacements are adopted: a part of `version`."""
        self._shard_originals(group)
        self.sharded_params = tuple(dict.fromkeys(param.sharded_param for param in params))
        self._find_shard_views()
        self._find_module_entries()

    @torch.no_grad()
    def _shard_originals(self, group: str) -> None:
        # With a parameter that has no values yet, the others are in memory of their own until it has: see `adopt`.
        on_meta = any(param.the_original.is_meta for param in self._params)
        device = torch.device("meta") if on_meta else self.device
        self.buffer = self._new_buffer(device)
        packed = dict(zip(self.buffered, self.buffer.locals, strict=True))
        locals_ = []
        for index, param in enumerate(self._params):
            piece = shard_of(self.layout, index, self._rank, local_tensor(param.the_original))
            if param not in packed or (on_meta and not piece.is_meta):
                target = torch.device("meta") if piece.is_meta else self.device
                locals_.append(self._on_shard_device(_copy_of(piece), target))
                continue
            if not on_meta:
                packed[param].copy_(piece)
            locals_.append(packed[param])
        self._format.make_sharded_params(self._params, locals_, self.layout, group)

    def _new_buffer(self, device: torch.device) -> ShardBuffer:
        return ShardBuffer(
            self.buffered_layout,
            self._rank,
            [param.dtype for param in self.buffered],
            device,
            pinned=self._pins and device.type == "cpu",
        )

    def _on_shard_device(self, shard: Tensor, device: torch.device) -> Tensor:
        """Return a shard that is in no buffer, in memory like the buffer's."""
        shard = shard.to(device)
        if self._pins and device.type == "cpu":
            pinned = shard.pin_memory()
            if type(pinned) is type(shard):  # not every subclass knows how
                return pinned
        return shard

    def _find_shard_views(self) -> None:
        self.shard_views = self._format.shard_views(self.buffered, self.buffer)
        """The memory in the buffer that each sharded parameter is over, of those that have some there."""

    def _find_module_entries(self) -> None:
        """Note the entries of modules while the group is sharded, their memory, and the tensors that count writes to it.

        Before: the sharded parameters are on their modules and lie in the buffer.
        """
        tensors = [
            tensor for sharded_param in self.sharded_params for tensor in sharded_param.versioned
        ]
        self.versioned = [tensor for tensor in tensors if not tensor.is_inference()]
        """Tensors whose version counters tell of writes to the shards."""
        entries = [
            entry
            for sharded_param in self.sharded_params
            for entry in sharded_param.values_on_modules()
        ]
        self._tables = [torch_border.table_for(owner.module, value) for owner, value in entries]
        are_dicts = all(isinstance(table, dict) for table in self._tables)
        self._entry_of = (
            dict.get if are_dicts else _entry_of_any
        )  # modules of torch.jit have others
        self._names = [owner.name for owner, _ in entries]
        self._values = [value for _, value in entries]
        self._identity = self.sharded_params[0].memory  # those of a group are of one kind
        self.leaves = [sharded_param.param for sharded_param in self.sharded_params]
        """The parameters of `sharded_params`."""
        self._memory = [*map(self._identity.of, self.leaves)]
        self._dtypes = torch_border.dtypes_of(self.leaves)
        self.remember_trainable()

    @property
    def format_name(self) -> str:
        """The class of the shard format, for messages."""
        return type(self._format).__name__

    @property
    def are_elsewhere(self) -> bool:
        """Whether a user replaced the data of a sharded parameter. Asked in every forward, so no loop in Python."""
        identity = self._identity
        found = map(identity.of, self.leaves)
        return not all(map(identity.is_same, found, self._memory))

    @property
    def on_modules(self) -> bool:
        """Whether the modules have the sharded parameters. Asked in every forward, so no loop in Python."""
        found = map(self._entry_of, self._tables, self._names)
        return all(map(operator.is_, found, self._values))

    # --- replaced by users ------------------------------------------------------------------------

    def are_replaced(self, *, on_modules: bool) -> bool:
        """Return whether a user replaced a sharded parameter, or its data: ``param.data = ...``.

        Parameters on the modules can be compared only if the sharded ones should be ``on_modules``. Asked in
        every forward, so no loop in Python.
        """
        if on_modules:
            present = map(self._entry_of, self._tables, self._names)
            if not all(map(operator.is_, present, self._values)):
                return True
        if self.are_elsewhere:
            return True
        with _plain_attributes():
            return [*map(_dtype_of, self.leaves)] != self._dtypes

    def remember_trainable(self) -> None:
        """Note whether sharded parameters were trainable at their last look."""
        self.trainable = [sharded_param.trainable for sharded_param in self.sharded_params]
        """Whether each of `leaves` was trainable when the group last looked; a user may have frozen one since."""

    def replacements(self, group: str) -> dict[ShardedParam, Tensor]:
        """Return the values on the modules where sharded parameters should be; empty if all is as it was.

        ``group`` is the group's name. Nothing has changed if it raises.

        Raises:
            ConfigurationError: some of it cannot replace a sharded parameter.
        """
        if not self.are_replaced(on_modules=True):
            return {}
        self._check_not_tied()
        found = {sharded_param: sharded_param.found() for sharded_param in self.sharded_params}
        faults = [
            sharded_param.fault(candidate) or sharded_param.tie_fault()
            for sharded_param, candidate in found.items()
        ]
        if any(faults):
            raise ConfigurationError(
                "Sharded parameters may be replaced by others of their kind only, of the same shape and "
                "placements:\n  "
                + "\n  ".join(fault for fault in faults if fault)
                + "\nConvert full tensors with torch.distributed.tensor.distribute_tensor, or load them with "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict. With FullyShardedDataParallel, assign "
                "whole parameters within summon_full_params, or load a state dict."
            )
        candidates = {
            sharded_param: candidate
            for sharded_param, candidate in found.items()
            if candidate is not None
        }
        devices = {str(local_tensor(candidate).device) for candidate in candidates.values()}
        if len(devices) > 1:
            raise ConfigurationError(
                f"All parameters of a group must be on one device; group {group!r} has them on "
                f"{sorted(devices)}. Move the whole module."
            )
        self._check_dtypes_of_segments(candidates, group)
        return candidates

    def _check_not_tied(self) -> None:
        """Refuse a parameter that is in two places with memory of its own in each: updates would reach only one of them."""
        first: dict[int, ShardedParam] = {}
        assigned = [
            (each, new) for each in self.sharded_params for new in each.others() if new is not None
        ]
        pairs = [
            f"{each.name} is {twin.name} now"
            for each, new in assigned
            if (twin := holder_of(new) or first.setdefault(id(new), each)) is not each
        ]
        if pairs:
            raise ConfigurationError(
                "Parameters must be tied before they are sharded, but these were tied afterwards:\n  "
                + "\n  ".join(dict.fromkeys(pairs))
                + "\nTie them before fully_shard or FullyShardedDataParallel. Modules that share a parameter belong to "
                "the same call: fully_shard([a, b])."
            )

    def adopt(self, replacements: Mapping[ShardedParam, Tensor], group: str) -> None:
        """Take the tensors that `replacements` has found as sharded parameters, with their data in a new buffer."""
        members = {
            sharded_param: sharded_param.assigned_members() for sharded_param in replacements
        }
        for sharded_param, candidate in replacements.items():
            sharded_param.adopt(candidate, group)
        self.num_replaced += _MORE_THAN_WRITES
        # A user may put a subclass in the place of a plain shard, and `to_empty` makes plain ones of some subclasses.
        self._take_buffer(
            [p for p in self._params if fits_in_buffers(p.sharded_param.local)],
            self.sharded_params[0].local.device,
        )
        for sharded_param, view in self.shard_views.items():
            if not sharded_param.local.is_meta:
                view.copy_(sharded_param.in_buffer_order())
            sharded_param.replace_local(view)
            if members[sharded_param]:
                self._write_members(sharded_param, members[sharded_param])
        self._find_module_entries()

    @torch.no_grad()
    def take_over(self, fulls: Mapping[int, Tensor]) -> None:
        """Write this rank's shards of full parameters, by their places in `buffered`, where these differ.

        They may be in another dtype. An element that is equal in that dtype keeps the precision that it has here.
        Not counted by `version`.
        """
        for index, full in fulls.items():
            piece = shard_of(self.buffered_layout, index, self._rank, full)
            shard = self.buffer.locals[index].detach()
            held = shard.to(piece.device)
            changed = torch.where(held.to(piece.dtype) == piece, held, piece.to(held.dtype))
            with torch_border.versions_kept((shard,)):
                shard.copy_(changed)

    def move_out_of_buffer(self, params: Sequence[FSDPParam]) -> None:
        """Leave these parameters in memory of their own from now on: each in its present local tensor."""
        self._take_buffer([p for p in self.buffered if p not in params], self.buffer.device)
        for sharded_param, view in self.shard_views.items():
            if not sharded_param.local.is_meta:
                view.copy_(sharded_param.in_buffer_order())
            sharded_param.replace_local(view)
        self._find_module_entries()

    def _take_buffer(self, params: list[FSDPParam], device: torch.device) -> None:
        """Have a new buffer for these parameters, into which their shards are still to be copied."""
        if params != self.buffered:
            self.buffered = params
            self.buffered_layout = self._format.layout(params, self._world)
        self.buffer = self._new_buffer(device)
        self._find_shard_views()

    def _write_members(self, sharded_param: ShardedParam, values: Mapping[int, Tensor]) -> None:
        """Take this rank's shard of full tensors that were assigned where members of a `FlatParameter` were."""
        assert isinstance(sharded_param, FlatShardedParam), "others have no members"
        indices = [
            index
            for index, param in enumerate(self._params)
            if param.sharded_param is sharded_param
        ]
        for member, value in values.items():
            index = indices[member]
            full = self._params[index].placement.local_part(value.detach())
            self.buffer.locals[index].copy_(shard_of(self.layout, index, self._rank, full))
        sharded_param.put_stand_ins_back()

    def _check_dtypes_of_segments(
        self, candidates: Mapping[ShardedParam, Tensor], group: str
    ) -> None:
        """Refuse different dtypes of parameters that are in one segment."""
        dtypes = [candidates[param.sharded_param].dtype for param in self._params]
        mixed = [
            f"{self._params[index].name}: {dtypes[index]}"
            for segment in self.layout.segments
            if len({dtypes[index] for index in segment.params}) > 1
            for index in segment.params
        ]
        if mixed:
            raise ConfigurationError(
                f"Parameters that were flattened together must be cast together; in group {group!r} there are "
                "now:\n  "
                + "\n  ".join(mixed)
                + "\nCast the whole wrapped module, or before it is wrapped."
            )

    # --- what is said about them ------------------------------------------------------------------

    def shard_views_in_order(self) -> list[tuple[ShardedParam, Tensor]]:
        """Return the sharded parameters that are in the buffer with their memory, in the order of addresses.

        Nothing but padding is between two that follow each other.
        """
        return sorted(
            self.shard_views.items(), key=lambda item: item[1].storage_offset() * item[1].itemsize
        )

    def misplaced(self) -> list[str]:
        """Return names of parameters that are on another device than shards should be, with that device."""
        return [
            f"{sharded_param.name} is on {sharded_param.local.device}"
            for sharded_param in self.sharded_params
            if sharded_param.local.device != self.device
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards, those included that are in no buffer."""
        unbuffered = (
            sharded_param.local.nbytes
            for sharded_param in self.sharded_params
            if sharded_param not in self.shard_views
        )
        return self.buffer.nbytes + sum(unbuffered)


_MORE_THAN_WRITES = 1 << 40


def _entry_of_any(table: Mapping[str, Any], name: str) -> Any:
    return table[name] if name in table else None


def _copy_of(shard: Tensor) -> Tensor:
    """Return a copy in memory of its own, by operators that a subclass must have to be sharded."""
    if has_all_gather_extension(shard):
        return shard.clone()
    copied: Tensor = shard.new_zeros(shard.shape)
    return copied.copy_(shard)
