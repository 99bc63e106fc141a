"""Places of 8-bit state in memory, and the scales that ranks must find together.

A **strip** is memory that is updated together: a range of a group's shard buffer (`FusedShard`), or one parameter. Its codes lie as
its elements do. Whole blocks are rows of it, with one scale each. The parts of blocks at its edges are fragments; the fragments
of all strips have their scales in one table, in which some are of blocks that are shared with other ranks:

    strip         | fragment | row | row | row | fragment | fragment | row | ...      two parameters, one after the other
    row scales               |  0  |  1  |  2  |                     |  3  | ...
    table         | 0        |                 | 1        | 2        |                of all strips
    exchange      | 0        |                 | -        | 1        |                only of blocks that are shared

An exchange has all shared blocks of all parameters, whether this rank has elements of them, or gradients, or not. So all ranks
exchange the same, always. If replicas divide a strip (`eight_bit.replicas`), all of this holds for this replica's part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.engine.known_groups import groups_of
from fullshard.errors import UnsupportedError
from fullshard.layout.segments import has_no_gaps
from fullshard.mesh.axes import DataParallelAxes, global_rank
from fullshard.mesh.backends import NOTHING, backend_of
from fullshard.optim.eight_bit.replicas import ReplicaBucket, ReplicaCut, replica_cut
from fullshard.optim.eight_bit.rows import CellBlocks, blocks_of_cell, shared_blocks
from fullshard.optim.fused_shards import FusedShard, check_shards, local_of, plan_fused_shards
from fullshard.optim.param_cuts import ParamCut, cuts_of_members, listed
from fullshard.transport import collectives
from fullshard.transport.tags import Tag, tag


class _OneShard:
    """This rank's elements of one parameter that is in no fused shard; see `FusedShard`."""

    def __init__(self, param: nn.Parameter, name: str) -> None:
        local = local_of(param).detach()
        if not has_no_gaps(local.shape, local.stride()):
            raise UnsupportedError(
                f"AdamW8bit takes parameters whose elements fill a range of memory; {name or 'one'} of shape "
                f"{tuple(param.shape)} with strides {local.stride()} does not. Make it contiguous."
            )
        self.params = [param]
        self.starts = [0]
        self.tensor = _flat(local)
        self._local = local
        self._address = local.data_ptr()

    def has_moved(self) -> bool:
        return local_of(self.params[0]).data_ptr() != self._address

    def gradients(self) -> list[Tensor | None]:
        if isinstance(self.params[0], DTensor):
            return torch_border.local_gradients_of(self.params)
        return [self.params[0].grad]

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        return in_order_of(parts[0], self._local)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor without gaps, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def in_order_of(tensor: Tensor, local: Tensor) -> Tensor:
    """Return the elements of a tensor in the order in which those of ``local`` are in memory; a view, if it has that order."""
    if tensor.stride() != local.stride():
        tensor = torch.empty_like(local, dtype=tensor.dtype).copy_(tensor)
    return _flat(tensor)


_KEPT_NUMEL = 1 << 15
"""Fragments with no more elements keep where these are, in 12 bytes for each. Those at the edges of shards have so few; those of a
tensor that is cut along its last dimension are all of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Parts of blocks in a strip, as tensors with one number for each."""

    starts: Tensor
    """The first element in the strip."""
    lengths: Tensor
    firsts: Tensor
    """The first element's index in the whole tensor."""
    slots: Tensor
    """Number of the block's scale in the table."""
    count: int = field(init=False)
    _kept: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)
    """The result of `elements`: every step asks for it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.starts))

    def __len__(self) -> int:
        return self.count

    def part(self, begin: int, end: int) -> Fragments:
        """Return some of them."""
        return Fragments(*(each[begin:end] for each in self._tensors()))

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.starts, self.lengths, self.firsts, self.slots

    @property
    def nbytes(self) -> int:
        """Memory of the numbers, and of what is kept of `elements`."""
        kept = [each for pair in self._kept for each in pair]
        return sum(each.nbytes for each in (*self._tensors(), *kept))

    @staticmethod
    def joined(parts: Sequence[Fragments]) -> Fragments:
        """Return the fragments of several pieces."""
        if len(parts) == 1:
            return parts[0]
        return Fragments(*map(torch.cat, zip(*(part._tensors() for part in parts), strict=True)))

    def elements(self, width: int, *, keep: bool = False) -> tuple[Tensor, Tensor]:
        """Return each element's place in the strip, and its index in the whole tensor modulo 2**32, in rows of one width.

        Rows of shorter fragments are filled with their first element: computed several times, it has the same result, and
        does not change the largest magnitude. With ``keep``, the next call returns the same, if they are few.
        """
        if self._kept:
            return self._kept[0]
        columns = torch.arange(width, device=self.starts.device)
        columns = torch.where(columns < self.lengths[:, None], columns, 0)
        indices = (self.firsts[:, None] + columns).to(torch.int32)
        found = (self.starts[:, None] + columns, indices)
        if keep and found[0].numel() <= _KEPT_NUMEL:
            self._kept.append(found)
        return found


@dataclass(frozen=True, slots=True)
class Rows:
    """Whole blocks that follow each other in a strip."""

    start: int
    count: int
    slot: int
    """Number of the first one's scale in the strip."""


class RowViews(NamedTuple):
    """The memory of rows: elements as (rows, size), and what there is for each row."""

    param: Tensor
    mean_codes: Tensor
    square_codes: Tensor
    mean_scale: Tensor
    square_scale: Tensor
    blocks: Tensor


class Strip:
    """Memory that is updated together, with its state."""

    def __init__(
        self, shard: FusedShard | _OneShard, size: int, group: int, cut: ReplicaCut | None
    ) -> None:
        self.shard = shard
        self.group = group
        """Index of the optimizer's parameter group."""
        self.whole = shard.tensor.detach().reshape(-1)
        """The memory, also that of other replicas' parts."""
        self.cut = cut
        begin, end = (0, self.whole.numel()) if cut is None else cut.windows[cut.rank]
        self._window = slice(begin, end)
        self.memory = self.whole[self._window]
        """The part of `whole` that this replica updates."""
        self.starts = [start - begin for start in shard.starts]
        """The first element of each parameter; negative, if the replica before this one has it."""
        self.size = size
        self._rows: list[list[Rows]] = []
        self._fragments: list[Fragments] = []
        self.blocks = torch.zeros(0, dtype=torch.int32, device=self.memory.device)
        """The block of each row, by slot."""
        self.counts = [0] * len(shard.params)
        """Steps of each parameter, by its number."""
        self.old: dict[int, tuple[Tensor, Tensor]] = {}
        """Averages that are not in codes, by the parameter's number: those of elements in `memory`, in their order."""
        self._codes: Tensor | None = None
        self._scales: Tensor | None = None
        self._all: tuple[list[Rows], Fragments] | None = None
        self._kept_views: dict[Rows, RowViews] = {}
        self.repeats: dict[tuple[Rows, torch.dtype], torch_border.Repeat | None] = {}
        """Compiled updates of `views`, to be called with other gradients and numbers, by rows and the dtype of gradients."""

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order of memory."""
        return self.shard.params

    def add(self, members: Sequence[tuple[int, CellBlocks, Tensor]]) -> None:
        """Add the next parameter: for each of its members the first element, its blocks, and the slots of its fragments."""
        device, start = self.memory.device, self.starts[len(self._rows)]
        rows, fragments, blocks = [], [], [self.blocks]
        slot = len(self.blocks)
        for offset, found, slots in members:
            if len(found.row_blocks):
                first = start + offset + found.row_start
                rows.append(Rows(first, len(found.row_blocks), slot))
                slot += len(found.row_blocks)
                blocks.append(found.row_blocks.to(device, torch.int32))
            numbers = (start + offset + found.starts, found.lengths, found.firsts, slots)
            fragments.append(Fragments(*(each.to(device) for each in numbers)))
        self._rows.append(rows)
        self._fragments.append(Fragments.joined(fragments))
        self.blocks = torch.cat(blocks)

    def parts(self, numbers: Sequence[int]) -> tuple[list[Rows], Fragments]:
        """Return the rows and fragments of some parameters, by their numbers in the strip."""
        if len(numbers) < len(self.params):
            return self._parts(numbers)
        if self._all is None:
            self._all = self._parts(numbers)
        return self._all

    def _parts(self, numbers: Sequence[int]) -> tuple[list[Rows], Fragments]:
        rows: list[Rows] = []
        for each in (each for number in numbers for each in self._rows[number]):
            last = rows[-1] if rows else None
            if (
                last is not None
                and last.start + last.count * self.size == each.start
                and last.slot + last.count == each.slot
            ):
                rows[-1] = Rows(last.start, last.count + each.count, last.slot)
            else:
                rows.append(each)
        return rows, Fragments.joined([self._fragments[number] for number in numbers])

    def gradient(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the parameters' gradients as one tensor, in which those that are None have any values."""
        present = [gradient for gradient in gradients if gradient is not None]
        dtypes = {gradient.dtype for gradient in present}
        if len(present) < len(gradients) or len(dtypes) > 1:
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
            present = [
                torch.zeros_like(local_of(param), dtype=dtype) if each is None else each.to(dtype)
                for param, each in zip(self.params, gradients, strict=True)
            ]
        found = self.shard.fuse(present)
        # Each view takes as long as a kernel's launch, so only those are made that change something.
        if found.ndim != 1 or not found.is_contiguous() or found.requires_grad:
            found = found.detach().reshape(-1).contiguous()
        return found if self.cut is None else found[self._window]

    def own_part(self, number: int) -> slice:
        """Return which of this rank's elements of a parameter are in `memory`."""
        start = self.starts[number]
        first = max(-start, 0)
        last = min(local_of(self.params[number]).numel(), self.memory.numel() - start)
        return slice(first, max(first, last))

    # --- state ------------------------------------------------------------------------------------

    def has_state(self, number: int) -> bool:
        """Return whether a parameter has averages, in codes or in `old`."""
        return self.counts[number] > 0 or number in self.old

    def own_averages(self, number: int, means: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part of a parameter's averages that `old` keeps: all, or this replica's part."""
        if self.cut is None:
            return means, squares
        part = self.own_part(number)
        return means[part].clone(), squares[part].clone()  # not to keep the whole

    @property
    def codes(self) -> Tensor:
        """Codes of means and of squares, one for each element."""
        if self._codes is None:
            shape = (2, self.memory.numel())
            self._codes = torch.zeros(shape, dtype=torch.uint8, device=self.memory.device)
        return self._codes

    @property
    def scales(self) -> Tensor:
        """Scales of means and of squares, one for each row."""
        if self._scales is None:
            self._scales = torch.zeros(2, len(self.blocks), device=self.memory.device)
        return self._scales

    def release(self) -> None:
        """Forget the state. It is zero afterwards."""
        self.counts = [0] * len(self.counts)
        self.old.clear()
        self._codes = self._scales = None
        self._kept_views.clear()
        self.repeats.clear()

    def views(self, rows: Rows, *, keep: bool) -> RowViews:
        """Return the memory of rows. With ``keep``, the next call returns the same: eight views take longer than a launch."""
        found = self._kept_views.get(rows)
        if found is None:
            begin, end = rows.start, rows.start + rows.count * self.size
            slots = slice(rows.slot, rows.slot + rows.count)
            found = RowViews(
                self.memory[begin:end].view(-1, self.size),
                self.codes[0, begin:end].view(-1, self.size),
                self.codes[1, begin:end].view(-1, self.size),
                self.scales[0, slots],
                self.scales[1, slots],
                self.blocks[slots],
            )
            if keep:
                self._kept_views[rows] = found
        return found

    @property
    def state_bytes(self) -> int:
        """Memory of the state, and of the tables of its blocks."""
        parts = self._fragments if self._all is None else [*self._fragments, self._all[1]]
        tables = sum(part.nbytes for part in dict.fromkeys(parts))
        held = [self._codes, self._scales, self.blocks, *chain.from_iterable(self.old.values())]
        return tables + sum(each.nbytes for each in held if each is not None)


@dataclass(slots=True, eq=False)
class _Exchange:
    """The shared blocks of parameters of one process group."""

    group: ProcessGroup
    labels: list[str] = field(default_factory=list)
    """The parameters' labels."""
    count: int = 0
    slots: list[Tensor] = field(default_factory=list)
    """Numbers in the table of the scales that this rank has elements of."""
    positions: list[Tensor] = field(default_factory=list)
    """Numbers of the same scales in the exchange."""


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """An exchange with its tensors."""

    group: ProcessGroup
    count: int
    slots: Tensor
    positions: Tensor
    wire: torch.device
    tag: Tag

    def run(self, table: Tensor) -> None:
        """Make the numbers of shared blocks in the table those of the rank with the largest ones. Collective."""
        message = torch.zeros(2, self.count, device=table.device)
        message[:, self.positions] = table[:, self.slots]
        message = message.to(self.wire)
        collectives.all_reduce(message, self.group, ReduceOp.MAX, self.tag)
        table[:, self.slots] = message.to(table.device)[:, self.positions]


class BlockState:
    """The strips of an optimizer's parameters, and the scales of their fragments, on each device."""

    def __init__(
        self, groups: Sequence[Sequence[nn.Parameter]], size: int, bucket_numel: int | None = None
    ) -> None:
        """Lay out the strips of parameter groups. Collective, when a process group of all ranks of a mesh is made.

        Args:
            groups: Parameters.
            size: Elements in a block.
            bucket_numel: Elements that replicas gather at once, if they divide strips among them.

        Raises:
            UnsupportedError: parameters of wrappers that are also tensor-parallel, or with gaps in memory.
        """
        self._size = size
        self._counts: dict[torch.device, int] = {}
        self._exchanges: dict[tuple[ProcessGroup, torch.device], _Exchange] = {}
        self.width = 1
        """Length of the longest fragment."""
        number_of = {param: number for number, group in enumerate(groups) for param in group}
        params = list(number_of)
        cuts = dict(zip(params, cuts_of_members(params), strict=True))
        held = {param: [self._blocks(cut) for cut in cuts[param]] for param in params}
        check_shards(number_of)
        fused = plan_fused_shards(number_of)
        in_fused = {param for shard in fused for param in shard.params}
        single = [_OneShard(p, cuts[p][0].name) for p in params if p not in in_fused]
        shards: list[FusedShard | _OneShard] = [*fused, *single]
        axes = {} if bucket_numel is None else _axes_of(params)
        self.strips = [
            Strip(shard, size, number_of[shard.params[0]], self._cut(shard, cuts, held, axes))
            for shard in shards
        ]
        self.places = {
            param: (strip, number)
            for strip in self.strips
            for number, param in enumerate(strip.params)
        }
        """The strip of each parameter, and the parameter's number there."""
        # In the order of parameters, which is that of all ranks.
        members = {
            param: [
                self._member(cut, blocks, *self.places[param])
                for cut, blocks in zip(cuts[param], held[param], strict=True)
            ]
            for param in params
        }
        for strip in self.strips:
            for param in strip.params:
                strip.add(members[param])
        self.turns = _turns(self.strips, bucket_numel or 0)
        """Strips in the order of updates: those of each bucket, and at last those of none."""
        self.tables = {
            device: torch.zeros(2, count, device=device) for device, count in self._counts.items()
        }
        """Scales of means and of squares of all fragments, for each device."""
        self._joined = [
            (device, _joined(exchange, device, size))
            for (_, device), exchange in self._exchanges.items()
            if exchange.count
        ]

    def _blocks(self, cut: ParamCut) -> CellBlocks:
        """Return the blocks of a tensor that this rank has elements of."""
        return blocks_of_cell(cut.sharding, cut.sharding.cell_of(global_rank()), self._size)

    def _cut(
        self,
        shard: FusedShard | _OneShard,
        cuts: Mapping[nn.Parameter, Sequence[ParamCut]],
        held: Mapping[nn.Parameter, Sequence[CellBlocks]],
        axes: Mapping[nn.Parameter, DataParallelAxes],
    ) -> ReplicaCut | None:
        """Return how replicas divide what is to be a strip."""
        if shard.params[0] not in axes:
            return None
        starts = [
            start + cut.offset + blocks.all_starts(self._size)
            for param, start in zip(shard.params, shard.starts, strict=True)
            for cut, blocks in zip(cuts[param], held[param], strict=True)
        ]
        return replica_cut(shard.tensor, torch.cat(starts), axes[shard.params[0]])

    def _member(
        self, cut: ParamCut, found: CellBlocks, strip: Strip, number: int
    ) -> tuple[int, CellBlocks, Tensor]:
        """Return the blocks of a tensor that this rank updates, and number the scales of its fragments."""
        device = local_of(cut.param).device
        if strip.cut is not None:
            first = strip.starts[number] + cut.offset
            found = found.between(-first, strip.memory.numel() - first, self._size)
        if len(found.lengths):
            self.width = max(self.width, int(found.lengths.max()))
        blocks, numbers = torch.unique(found.firsts // self._size, return_inverse=True)
        base = self._counts.get(device, 0)
        self._counts[device] = base + len(blocks)
        if cut.group is not None:
            exchange = self._exchanges.setdefault((cut.group, device), _Exchange(cut.group))
            exchange.labels.append(cut.label)
            shared = shared_blocks(cut.sharding, self._size)
            held = torch.isin(blocks, shared)
            exchange.slots.append(base + held.nonzero().flatten())
            exchange.positions.append(exchange.count + torch.searchsorted(shared, blocks[held]))
            exchange.count += len(shared)
        return cut.offset, found, base + numbers

    def steps_of(self, param: nn.Parameter) -> int:
        """Return how many steps a parameter has had."""
        strip, number = self.places[param]
        return strip.counts[number]

    @property
    def has_shared_blocks(self) -> bool:
        """Whether `exchange` is collective."""
        return bool(self._joined)

    def exchange(self, tables: Mapping[torch.device, Tensor]) -> None:
        """Make the numbers of shared blocks those of the rank with the largest ones. Collective, if there are any."""
        for device, exchange in self._joined:
            exchange.run(tables[device])

    def release(self) -> None:
        """Forget the state. It is zero afterwards."""
        for strip in self.strips:
            strip.release()
        for table in self.tables.values():
            table.zero_()

    @property
    def fits(self) -> bool:
        """Whether the parameters are where they were."""
        return not any(strip.shard.has_moved() for strip in self.strips)

    @property
    def state_bytes(self) -> int:
        """Memory of the state on this rank."""
        tables = sum(table.nbytes for table in self.tables.values())
        return tables + sum(strip.state_bytes for strip in self.strips)


def _axes_of(params: Sequence[nn.Parameter]) -> dict[nn.Parameter, DataParallelAxes]:
    return {
        sharded_param.param: group.mesh_info
        for group in groups_of(params)
        for sharded_param in group.sharded_params
    }


Turn = tuple[ReplicaBucket | None, list[Strip]]


def _turns(strips: Sequence[Strip], bucket_numel: int) -> list[Turn]:
    """Return strips in buckets of at most ``bucket_numel`` elements, or of one strip; at last those that are not cut."""
    by_kind: dict[Any, list[list[tuple[Strip, ReplicaCut]]]] = {}
    for strip in strips:
        if strip.cut is None:
            continue
        kind = (strip.cut.group, strip.memory.dtype, strip.memory.device)
        buckets = by_kind.setdefault(kind, [])
        numel = sum(each.whole.numel() for each, _ in buckets[-1]) if buckets else 0
        if not buckets or numel + strip.whole.numel() > bucket_numel:
            buckets.append([])
        buckets[-1].append((strip, strip.cut))
    turns: list[Turn] = [
        (
            ReplicaBucket(
                [param for strip, _ in pairs for param in strip.params],
                [strip.whole for strip, _ in pairs],
                [cut for _, cut in pairs],
                bucket_numel,
            ),
            [strip for strip, _ in pairs],
        )
        for buckets in by_kind.values()
        for pairs in buckets
    ]
    return [*turns, (None, [strip for strip in strips if strip.cut is None])]


def _joined(exchange: _Exchange, device: torch.device, size: int) -> _Joined:
    wire = device
    if backend_of(exchange.group, device) is NOTHING:
        # Shards are kept in host memory, and the process group has a backend for the accelerator only.
        accelerator = torch.accelerator.current_accelerator()
        wire = device if accelerator is None else accelerator
    return _Joined(
        exchange.group,
        exchange.count,
        torch.cat(exchange.slots).to(device),
        torch.cat(exchange.positions).to(device),
        wire,
        tag(
            f"AdamW8bit: scales of {exchange.count} shared blocks of {size} elements, {listed(exchange.labels)}"
        ),
    )
