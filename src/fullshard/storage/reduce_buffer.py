"""The input of a group's reductions: how gradients lie in it, and how its output is divided.

    segment after segment   | weight: rank 0, rank 1, .. | bias: rank 0, rank 1, .. |     one message per segment
    row after row           | rank 0: weight, bias | rank 1: weight, bias | ..            one message, a row per rank

`arrangement` decides how gradients lie: in one of three orders, and in two ways that come on top:

| gradients lie | when | filled by | read by | memory goes back | test |
|---|---|---|---|---|---|
| SEGMENTS | the rule: a backend takes many messages in a call, one kernel copies all gradients | compute; small ones of a captured step by the reduce-scatter stream | reduce-scatter | when compute has waited for the read | `gradients_lie_segment_after_segment` |
| ROWS | on the CPU, where each message of a call is sent by itself; for a `wire_dtype` if pieces are small, as no backend coalesces exchanges | compute, cut by rank | reduce-scatter, exchange | as above | `gradients_lie_row_after_row` |
| FLAT | segments of the wrapper, each row after row by itself; all of them always travel | as SEGMENTS | reduce-scatter, exchange | as above | `gradients_lie_flat` |
| staged | besides, for a transport that is not in place: a comm object | compute copies messages once more, row after row | the transport | as above; the transport's is released after it | `gradients_are_staged` |
| written | besides, with `fuse_gradients`, and then not as ROWS, since a product is one piece | backward; compute adds other gradients | as above | as above; taken at the first product | `gradients_are_written_by_backward` |

This file is arithmetic and views. It calls no collective and knows no stream, and a step reads what it has planned:
`reduction` fills a buffer once per reduction.

[Note: one sum for all copies]
Every rank holds a copy of a 0-d parameter, and needs the same gradient to the last bit. A reduce-scatter of copies
does not give that: each rank gets a sum made in another order. So ranks send what they have side by side, each at an
offset of its own and zero at all others, to every rank:

    rank 0 sends   | g0  0  0 |       all get | g0 g1 g2 |, in whatever order zeros are added
    rank 1 sends   |  0 g1  0 |
    rank 2 sends   |  0  0 g2 |

and each rank sums these by itself, in the same order. Replicas have offsets of their own, too. The contributions lie
behind all reduced shards, and their sum lies where the reduced shard would be. They travel in the message that is sent
anyway, and are the square of the number of ranks: 4 MiB for each 0-d parameter on 1,024 ranks, 64 MiB on 4,096. There,
give the parameter the shape (1,).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.layout.segments import (
    ROW_ALIGNMENT,
    Division,
    Layout,
    Slot,
    block_offsets,
    contiguous_strides,
    has_large_pieces,
    shard_offsets,
)
from fullshard.storage.buffers import Buffer, rank_chunks, staged_chunks


class OutputView(NamedTuple):
    """A view of a bucket's reduce output, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


Cut = Sequence[OutputView] | Callable[[Tensor], list[Tensor]] | None
"""The parts of a gradient: views of it, if it is contiguous, or a function that returns them; None if it is not cut."""


class Order(Enum):
    """The order of gradients in a reduce buffer."""

    SEGMENTS = "segment after segment"
    ROWS = "row after row"
    FLAT = "flat"


class Arrangement(NamedTuple):
    """The places of a group's gradients until they are sent: see the table above."""

    order: Order
    is_staged: bool
    """Whether they are copied once more, into memory of a transport."""
    is_written: bool
    """Whether backward may write them."""


def arrangement(
    layout: Layout,
    device: torch.device,
    *,
    wire_dtype: torch.dtype | None,
    is_written: bool,
    is_staged: bool,
) -> Arrangement:
    """Decide on the arrangement of gradients on ``device``: see the table above."""
    if any(slot.division is Division.FLAT for slot in layout.slots):
        order = Order.FLAT
    elif wire_dtype is not None:
        large = has_large_pieces(layout, [wire_dtype] * len(layout.slots))
        order = Order.SEGMENTS if large else Order.ROWS
    else:
        order = Order.ROWS if device.type == "cpu" and not is_written else Order.SEGMENTS
    return Arrangement(order, is_staged, is_written)


@dataclass(eq=False, slots=True, kw_only=True)
class ReduceBucket:
    """Segments that are reduced together: in the same dtypes of the messages, of the sum and of the result.

    Made once for each set of parameters that have gradients, and kept with its buffer.
    """

    reduce_dtype: torch.dtype
    gradient_dtype: torch.dtype
    numel: int
    """Elements of the reduce output."""
    messages: list[Tensor]
    """Views of the buffer: flat, or if they do not lie so, (world, elements for a rank) each."""
    inputs: Sequence[Tensor] = field(init=False)
    """Inputs of the collective, rank after rank; empty if messages must be copied first (`copy_into`)."""
    shaped_inputs: Sequence[Tensor]
    """`inputs` in the shapes of parameters, each reduced into one of `gradients`; empty if they cannot be."""
    ranges: Sequence[tuple[int, int]]
    """Per segment, start and length of its message's part of the reduce output."""
    output_ranges: Sequence[tuple[int, int]]
    """Per input, start and length of its part of the reduce output."""
    is_whole: bool = field(init=False)
    """Whether one input brings all."""
    params: tuple[int, ...]
    """Parameters that get a gradient; of a segment that gets one gradient, its first."""
    gradients: Sequence[OutputView]
    """Parallel to `params`, each gradient's place in the reduce output."""
    unsummed: Sequence[OutputView] = field(init=False)
    """`gradients` before `sum_copies`: for 0-d parameters, all contributions."""
    unfilled: Sequence[Tensor]
    """Parts of the messages that belong to parameters without a gradient: zeroed, since a message is sent as a whole."""
    contributions: Mapping[int, tuple[int, int]]
    """For 0-d parameters, start and number of all ranks' contributions in the reduce output."""
    has_copies: bool = field(init=False)
    """Whether `sum_copies` has anything to do."""
    _sums: list[tuple[int, int, int]] = field(init=False)
    """For 0-d parameters: the gradient's place, and start and number of the contributions to it."""
    _cuts: tuple[list[int], list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = self.messages if self.messages[0].ndim == 1 else []
        self.is_whole = self.output_ranges == [(0, self.numel)]
        self._cuts = _cuts(self.output_ranges, self.numel)
        brought = list(zip(self.gradients, map(self.contributions.get, self.params), strict=True))
        self.unsummed = [OutputView((c[1],), (1,), c[0]) if c else view for view, c in brought]
        self._sums = [(view.start, *c) for view, c in brought if c]
        self.has_copies = bool(self._sums)

    def outputs_in(self, reduced: Tensor) -> list[Tensor]:
        """Return the parts of the reduce output that the inputs are reduced into."""
        # One call: a view for each would take the host twice as long.
        lengths, places = self._cuts
        parts = torch.unsafe_split_with_sizes(reduced, lengths)
        return [parts[place] for place in places]

    def copy_into(self, rows: Tensor) -> None:
        """Copy messages into one of (world, `numel`), with zeros in the gaps."""
        rows.zero_()
        ranges = self.output_ranges if self.inputs else self.ranges
        messages = [message.view(len(rows), -1) for message in self.messages]
        torch._foreach_copy_([rows.narrow(1, *each) for each in ranges], messages)

    def zero_gaps(self, reduced: Tensor) -> None:
        """Zero the gaps between the reduced gradients, which belong to no parameter; after `sum_copies`."""
        sums = {start: summed for summed, start, _ in self._sums}
        filled = sorted((sums[s], 1) if s in sums else (s, numel) for s, numel in self.ranges)
        ends = [0, *(start + numel for start, numel in filled)]
        starts = [*(start for start, _ in filled), self.numel]
        for end, start in zip(ends, starts, strict=True):
            reduced[end:start].zero_()

    def sum_copies(self, reduced: Tensor) -> None:
        """Sum the contributions to 0-d parameters, when all have arrived: [Note: one sum for all copies].

        On the reduction's stream, which alone uses what is allocated here.
        """
        _, first, number = self._sums[0]  # they lie one after the other
        contributions = reduced.narrow(0, first, len(self._sums) * number).view(-1, number)
        # In double precision, the order hardly matters even where a kernel chooses it by the address.
        sums = contributions.sum(1, dtype=torch.promote_types(self.reduce_dtype, torch.float64))
        targets = [reduced.narrow(0, summed, 1) for summed, _, _ in self._sums]
        torch._foreach_copy_(targets, list(sums.view(-1, 1).unbind()))


def cause_of_pieces(slot: Slot, *, rank_major: bool) -> str:
    """Return why a reduce buffer does not hold a parameter's gradient as one contiguous tensor of its shape; "" if it does."""
    if tuple(slot.strides) != contiguous_strides(slot.shape):
        return "its memory is not in the order of its dimensions"
    # A flat segment lies rank after rank in any case, and its parameters one after the other.
    if slot.division is Division.FLAT:
        return ""
    if slot.division is not Division.ROWS:
        return "its shard dimension is not 0"
    return (
        "its group is small and has a wire_dtype, so gradients lie rank after rank"
        if rank_major
        else ""
    )


def _cuts(ranges: Sequence[tuple[int, int]], numel: int) -> tuple[list[int], list[int]]:
    """Return the cuts of ``numel`` elements into parts with these starts and lengths, which do not overlap.

    They are lengths of the ranges before, in and between the parts, in the order of memory; and each part's place among these.
    """
    in_memory = sorted(range(len(ranges)), key=ranges.__getitem__)
    ends = [(start, start + length) for start, length in sorted(ranges)]
    borders = [0, *itertools.chain.from_iterable(ends), numel]
    lengths = [end - start for start, end in itertools.pairwise(borders)]
    return lengths, [2 * in_memory.index(each) + 1 for each in range(len(ranges))]


class _Row(NamedTuple):
    """The places of one rank's shards of some segments, in elements."""

    starts: dict[int, int]
    """Per segment, the place of its reduced shard in the end."""
    arrivals: dict[int, int]
    """Per segment, the place of its message: the same, but for contributions to 0-d parameters."""
    numel: int


class ReduceBuffer(Buffer):
    """The unsharded gradients of a group's trainable parameters, in the dtype in which they travel.

    Lives until dtypes or trainable parameters change. Its memory lives from the first copy, or from the first gradient that
    backward writes, until the reduce-scatter has read it.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        params: Sequence[int],
        reduce_dtypes: Sequence[torch.dtype],
        gradient_dtypes: Sequence[torch.dtype],
        device: torch.device,
        *,
        by_segment: bool,
        rank_major: bool = False,
        wire_dtype: torch.dtype | None = None,
        replica: tuple[int, int] = (0, 1),
    ) -> None:
        """Allocate on the current stream (the compute stream) and make every view a step needs.

        Args:
            layout: The group's layout.
            rank: This rank's number along the shard axis.
            params: Indices of the parameters that can have gradients.
            reduce_dtypes: Reduce dtype of each of the group's parameters.
            gradient_dtypes: Dtype of each parameter's reduced gradient.
            device: The device of the gradients.
            by_segment: Whether a segment gets one gradient, not one for each of its parameters.
            rank_major: Whether gradients lie row after row. Flat segments do so each by itself.
            wire_dtype: Dtype of gradients in this buffer, to be exchanged and summed in their reduce dtypes; None
                for the reduce dtypes themselves.
            replica: This rank's number among replicas, and how many there are.
        """
        self._contributors = replica[1] * layout.world
        """Number of ranks that have gradients of the same parameter."""
        self._contributor = replica[0] * layout.world + rank
        """This rank's number among them."""
        self.layout, self._rank = layout, rank
        self._by_segment, self._wire_dtype = by_segment, wire_dtype
        self._always_whole = any(slot.division is Division.FLAT for slot in layout.slots)
        """Whether all segments always travel. Ranks may use different parameters of a flat group, and must call the
        same collectives."""
        self.rank_major = rank_major and not self._always_whole
        self._kinds: dict[int, tuple[torch.dtype, torch.dtype]] = {}
        """Per segment, dtypes of the reduction and of the result."""
        for param in sorted(params):
            self._kinds[layout.slots[param].segment] = reduce_dtypes[param], gradient_dtypes[param]
        self._strides: dict[int, int] = {}
        """Per segment, elements from one rank's shard to the next rank's."""
        self._starts: dict[int, int] = {}
        """Per segment, bytes before its message."""
        self._row_starts: dict[tuple[torch.dtype, torch.dtype], int] = {}
        """Per kind of segments, bytes before all, if they lie rank after rank."""
        super().__init__(self._arrange(), device)
        self.planned: dict[frozenset[int], tuple[ReduceBucket, ...]] = {}
        """`buckets` by the parameters that have gradients: few sets, as backward uses the same ones in most steps."""
        self.targets = {param: self._target(param) for param in params}
        """Per parameter, the views that its gradient is copied to."""
        self.copies: dict[tuple[int, ...], tuple[list[Tensor], list[Cut]]] = {}
        """`plan_copy` by the parameters that have gradients."""
        self.below_autograd = torch_border.below_autograd()
        """Made once, which takes longer than to enter it. Never entered twice: only operators and collectives run within."""
        self.pads = [pad for segment in self._kinds for pad in self._padding(segment)]
        """Padding: parts that are sent, and that no gradient ever fills."""

    def _arrange(self) -> int:
        """Give every segment its offset, and return the bytes of all."""
        layout = self.layout
        numels = {index: self._message_numel(index) for index in self._kinds}
        if not self.rank_major:
            wholes = [numel * layout.world for numel in numels.values()]
            placement = block_offsets(wholes, [self._dtype(index) for index in numels])
            self._strides = numels
            self._starts = dict(zip(numels, placement.starts, strict=True))
            return placement.nbytes
        end = 0
        for kind in dict.fromkeys(self._kinds.values()):
            members = self._of_kind(kind)
            row, itemsize = self._row(members), self._dtype(members[0]).itemsize
            self._row_starts[kind] = end
            for index in members:
                self._starts[index] = end + row.arrivals[index] * itemsize
                self._strides[index] = row.numel
            end += row.numel * itemsize * layout.world
        return end

    def _row(self, segments: Sequence[int]) -> _Row:
        """Return the places of one rank's shards of segments of a kind."""
        itemsize = self._dtype(segments[0]).itemsize
        placed = shard_offsets(self.layout, segments, [self._dtype(index) for index in segments])
        starts = {i: start // itemsize for i, start in zip(segments, placed.starts, strict=True)}
        arrivals, end = dict(starts), placed.nbytes // itemsize
        for index in filter(self._is_copied, segments):
            arrivals[index] = end
            end += self._contributors
        return _Row(starts, arrivals, -(-end // ROW_ALIGNMENT) * ROW_ALIGNMENT)

    def _is_copied(self, segment: int) -> bool:
        """Return whether several ranks hold copies of a segment's one element: [Note: one sum for all copies]."""
        slot = self.layout.slots[self.layout.segments[segment].params[0]]
        return slot.division is Division.REPLICATED and self.layout.world > 1

    def _message_numel(self, segment: int) -> int:
        """Return the number of a segment's elements that go to each rank."""
        if self._is_copied(segment):
            return self._contributors
        return self.layout.segments[segment].piece_numel

    def _dtype(self, segment: int) -> torch.dtype:
        """Return the dtype of a segment's gradients in this buffer."""
        return self._wire_dtype or self._kinds[segment][0]

    def _of_kind(self, kind: tuple[torch.dtype, torch.dtype]) -> list[int]:
        """Return the segments of a kind, in the order in which a rank's shards of them lie in memory."""
        segments = [index for index, other in self._kinds.items() if other == kind]
        return [segments[number] for number in self.layout.memory_order(segments)]

    def _view(
        self, segment: int, start: int, shape: Sequence[int], strides: Sequence[int]
    ) -> Tensor:
        """Return a view of a segment, ``start`` elements after its beginning."""
        dtype = self._dtype(segment)
        return self.view(dtype, self._starts[segment] + start * dtype.itemsize, shape, strides)

    def _filled(self, param: int) -> tuple[int, int]:
        """Return the number of ranks' shards that a parameter fills, and of elements of the next; not for flat segments."""
        layout = self.layout
        slot = layout.slots[param]
        if slot.division is Division.REPLICATED:
            return layout.world, 0
        piece = layout.segments[slot.segment].piece_numel
        return divmod(slot.numel, piece) if piece else (layout.world, 0)

    def _target(self, param: int) -> list[Tensor]:
        slot = self.layout.slots[param]
        segment, step = slot.segment, self._strides[slot.segment]
        if slot.division is Division.CHUNKS:
            return staged_chunks(
                self.layout, param, self, self._starts[segment], self._dtype(segment), step
            )
        if slot.division is Division.REPLICATED:
            own = self._contributor if self._is_copied(segment) else 0
            return [self._view(segment, own, (self.layout.world,), (step,))]
        if not self.rank_major:
            return [self._view(segment, slot.start, slot.shape, slot.strides)]
        piece = self.layout.segments[segment].piece_numel
        ranks, rest = self._filled(param)
        views = [self._view(segment, 0, (ranks, piece), (step, 1))] if ranks else []
        return views + ([self._view(segment, ranks * step, (rest,), (1,))] if rest else [])

    def slot(self, param: int) -> Tensor:
        """Return the memory of a parameter's gradient, in its shape; for parameters that lie in one piece (`cause_of_pieces`)."""
        (target,) = self.targets[param]
        return target

    def plan_copy(self, params: tuple[int, ...]) -> tuple[list[Tensor], list[Cut]]:
        """Return the views that gradients of parameters go to, and each one's cut to match; no cuts if there is nothing to cut."""
        cuts = [self._cut(param) for param in params]
        targets = [target for param in params for target in self.targets[param]]
        self.copies[params] = targets, cuts if any(cuts) else []
        return self.copies[params]

    def _cut(self, param: int) -> Cut:
        division, layout = self.layout.slots[param].division, self.layout
        if division is Division.CHUNKS:
            return functools.partial(rank_chunks, layout, param)
        if division is Division.REPLICATED:
            return [OutputView((layout.world,), (0,), 0)]
        if not self.rank_major:
            return None
        shapes = [tuple(target.shape) for target in self.targets[param]]
        starts = itertools.accumulate((math.prod(shape) for shape in shapes), initial=0)
        return [
            OutputView(shape, contiguous_strides(shape), start)
            for shape, start in zip(shapes, starts, strict=False)
        ]

    # --- each reduction ---------------------------------------------------------------------------

    def buckets(self, used: frozenset[int]) -> tuple[ReduceBucket, ...]:
        """Return the buckets with the segments of parameters ``used``; planned once for each such set."""
        if used not in self.planned:
            segments = {self.layout.slots[param].segment for param in used}
            if self._always_whole:
                segments = set(self._kinds)
            kinds = dict.fromkeys(kind for i, kind in self._kinds.items() if i in segments)
            self.planned[used] = tuple(self._bucket(kind, segments, used) for kind in kinds)
        return self.planned[used]

    def _bucket(
        self, kind: tuple[torch.dtype, torch.dtype], segments: set[int], used: frozenset[int]
    ) -> ReduceBucket:
        layout, members = self.layout, self._of_kind(kind)
        chosen = [index for index in members if index in segments]
        row = self._row(chosen)
        params: list[int] = []
        gradients: list[OutputView] = []
        unfilled: list[Tensor] = []
        for index in chosen:
            segment, start = layout.segments[index], row.starts[index]
            if self._by_segment:
                params.append(segment.params[0])
                gradients.append(OutputView((segment.piece_numel,), (1,), start))
            for param in segment.params:
                if param not in self.targets:
                    continue  # frozen: its elements are padding
                if param not in used:
                    unfilled += self.targets[param]
                # All that travelled get a gradient: of a parameter that this rank did not use, others may
                # have, and then all ranks have shards of its gradient.
                if not self._by_segment:
                    held = layout.piece(param, self._rank)
                    params.append(param)
                    strides = contiguous_strides(held.shape)
                    gradients.append(OutputView(held.shape, strides, start + held.offset))
        messages = [self._message(index) for index in chosen]
        if self.rank_major and chosen == members:
            # All segments of a kind lie in the buffer as they do in a message: nothing is copied once more.
            numel, begin = row.numel * layout.world, self._row_starts[kind]
            messages = [self.view(self._dtype(chosen[0]), begin, (numel,), (1,))]
        ranges = {index: (row.arrivals[index], self._message_numel(index)) for index in chosen}
        return ReduceBucket(
            reduce_dtype=kind[0],
            gradient_dtype=kind[1],
            numel=row.numel,
            messages=messages,
            shaped_inputs=self._shaped(chosen),
            ranges=list(ranges.values()),
            output_ranges=[(0, row.numel)] if self.rank_major else list(ranges.values()),
            params=tuple(params),
            gradients=gradients,
            unfilled=unfilled,
            contributions={
                layout.segments[index].params[0]: ranges[index]
                for index in filter(self._is_copied, chosen)
            },
        )

    def _shaped(self, segments: Sequence[int]) -> list[Tensor]:
        """Return the messages of segments in the shapes of their parameters, if all consist of one gradient each."""
        layout, shaped = self.layout, list[Tensor]()
        if self._by_segment or self._wire_dtype is not None:
            return []
        for index in segments:
            params = layout.segments[index].params
            slot = layout.slots[params[0]]
            whole = slot.numel == self._message_numel(index) * layout.world
            one_piece = not cause_of_pieces(slot, rank_major=self.rank_major)
            in_rows = slot.division is Division.ROWS  # a rank's gradient has the parameter's shape
            if len(params) > 1 or not whole or not one_piece or not in_rows:
                return []
            shaped.append(self.slot(params[0]))
        return shaped

    def _message(self, segment: int) -> Tensor:
        """Return a segment with its padding: flat, or row after row, (world, elements for a rank)."""
        piece, step = self._message_numel(segment), self._strides[segment]
        if not self.rank_major:
            return self._view(segment, 0, (piece * self.layout.world,), (1,))
        return self._view(segment, 0, (self.layout.world, piece), (step, 1))

    def _padding(self, segment: int) -> list[Tensor]:
        """Return views of the elements of a segment that no gradient ever fills.

        Memory between segments, for alignment, belongs to no parameter and may hold anything.
        """
        if self._is_copied(segment):  # what the other ranks contribute
            return [self._message(segment)]
        if self.rank_major:
            return self._padding_of_ranks(segment)
        flat = self._message(segment)
        filled = [
            (int(target.storage_offset() - flat.storage_offset()), target.numel())
            for param in self.layout.segments[segment].params
            for target in self.targets.get(param, ())
        ]
        pads: list[Tensor] = []
        end = 0
        for start, numel in sorted(filled):
            pads.append(flat[end:start])
            end = start + numel
        pads.append(flat[end:])
        return [pad for pad in pads if pad.numel()]

    def _padding_of_ranks(self, segment: int) -> list[Tensor]:
        layout, step = self.layout, self._strides[segment]
        piece = layout.segments[segment].piece_numel
        ranks, rest = self._filled(layout.segments[segment].params[0])
        if ranks == layout.world:
            return []
        partly = self._view(segment, ranks * step + rest, (piece - rest,), (1,))
        empty = layout.world - ranks - 1
        return [partly, self._view(segment, (ranks + 1) * step, (empty, piece), (step, 1))]
