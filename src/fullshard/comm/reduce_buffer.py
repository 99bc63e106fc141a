"""Where a group's gradients are from their arrival until they are reduced, and how the result is cut.

    segment after segment   | weight: rank 0, rank 1, .. | bias: rank 0, rank 1, .. |     one message per segment
    rank after rank         | rank 0: weight, bias | rank 1: weight, bias | ..            one message

Gradients are copied here in any case, to be cast, so both cost the same copy. Segment after segment
the copy of all is one kernel on an accelerator, whose backends take many messages in one call. Rank
after rank is for backends that carry each message by itself, and for exchanges (`gradients`,
[Note: narrow on the wire]), which no backend coalesces.

[Note: one sum for all copies]
Every rank holds a copy of a 0-d parameter, and needs the same gradient to the last bit. A reduce-scatter of copies
does not give that: each rank gets a sum made in another order. So ranks send what they have side by side, each in a
place of its own and zero in all others, to every rank:

    rank 0 sends   | g0  0  0 |       all get | g0 g1 g2 |, in whatever order zeros are added
    rank 1 sends   |  0 g1  0 |
    rank 2 sends   |  0  0 g2 |

and each rank sums these by itself, in the same order. Replicas have places of their own, too. The contributions lie
behind all reduced pieces, and their sum where the reduced piece would be. They travel in the message that is sent anyway,
and are the square of the number of ranks: 4 MiB for each 0-d parameter on 1,024 ranks, 64 MiB on 4,096. There, give the
parameter the shape (1,).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.plan.layout import (
    ROW_ALIGNMENT,
    Division,
    Layout,
    contiguous_strides,
    place,
    place_row,
)
from fullshard.storage.buffers import Buffer, rank_chunks, staged_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradient:
    """Where a parameter's reduced gradient, or that of a whole segment, lies in the output of its run."""

    param: int
    """Of a segment, the first."""
    shape: tuple[int, ...]
    start: int
    """In elements of the run's output."""


class ReduceBucket:
    """Segments reduced together: the same dtypes on the wire, of the sum and of the result."""

    def __init__(
        self,
        *,
        kind: tuple[torch.dtype, torch.dtype],
        exchanged: bool,
        numel: int,
        inputs: Sequence[Tensor],
        pieces: Sequence[tuple[int, int]],
        joined: bool,
        gradients: Sequence[LocalGradient],
        unfilled: Sequence[Tensor],
        copied: Mapping[int, tuple[int, int]],
    ) -> None:
        self.reduce_dtype, self.gradient_dtype = kind
        self.exchanged = exchanged
        """Whether the inputs are in a narrower dtype than that of the sum, which is the receiver's to make."""
        self.numel = numel
        """Elements of the run's output."""
        self._inputs = tuple(inputs)
        """Messages; or the parts of a message's rows, (world, elements of a piece) each."""
        self.pieces = tuple(pieces)
        """Per segment, start and length of what its message brings to the run's output, in elements."""
        self.outputs = ((0, numel),) if joined else self.pieces
        """The same per input: one for all, or one per segment."""
        self.gradients = tuple(gradients)
        self.unfilled = tuple(unfilled)
        """Parts of the inputs that belong to parameters without a gradient: zero, since a message travels whole."""
        self._cuts = [
            (each.shape, contiguous_strides(each.shape), each.start) for each in gradients
        ]
        self._sums = [
            (each.start, *copied[each.param]) for each in gradients if each.param in copied
        ]
        """Of 0-d parameters, where the gradient is to be, and start and number of the contributions to it."""
        self._unsummed = [
            cut
            if each.param not in copied
            else (copied[each.param][1:], (1,), copied[each.param][0])
            for each, cut in zip(gradients, self._cuts, strict=True)
        ]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the collective reads, rank after rank; what does not lie so is copied."""
        if self._inputs[0].ndim == 1:
            return self._inputs
        rows = self._inputs[0].new_zeros(len(self._inputs[0]), self.numel)
        torch._foreach_copy_([rows.narrow(1, *piece) for piece in self.pieces], self._inputs)
        return (rows.view(-1),)

    def cut_outputs(self, reduced: Tensor) -> list[Tensor]:
        """Where the reduced pieces go, one for each of the inputs."""
        return [reduced.as_strided((numel,), (1,), start) for start, numel in self.outputs]

    def clear_gaps(self, reduced: Tensor) -> None:
        """Let there be zeros between the reduced gradients, where nobody's elements are; after `sum_copies`."""
        sums = {start: place for place, start, _ in self._sums}
        filled = sorted((sums[s], 1) if s in sums else (s, numel) for s, numel in self.pieces)
        ends = [0, *(start + numel for start, numel in filled)]
        starts = [*(start for start, _ in filled), self.numel]
        for end, start in zip(ends, starts, strict=True):
            reduced[end:start].zero_()

    def cut(self, reduced: Tensor) -> list[Tensor]:
        """The gradients of `gradients` in the run's output, as views."""
        return _cut(reduced, self._cuts)

    def cut_unsummed(self, reduced: Tensor) -> list[Tensor]:
        """The same before `sum_copies`: of 0-d parameters, all contributions."""
        return _cut(reduced, self._unsummed)

    def sum_copies(self, reduced: Tensor) -> None:
        """Sum the contributions to 0-d parameters, when all are there: [Note: one sum for all copies].

        On the reduction's stream, which alone uses what is allocated here.
        """
        if not self._sums:
            return
        _, first, number = self._sums[0]  # they lie one after the other
        contributions = reduced.narrow(0, first, len(self._sums) * number).view(-1, number)
        # In double precision, the order hardly matters even where a kernel chooses it by the address.
        sums = contributions.sum(1, dtype=torch.promote_types(self.reduce_dtype, torch.float64))
        places = [reduced.narrow(0, place, 1) for place, _, _ in self._sums]
        torch._foreach_copy_(places, list(sums.view(-1, 1).unbind()))


def _cut(
    reduced: Tensor, cuts: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]]
) -> list[Tensor]:
    begin = reduced.storage_offset()  # a comm object's memory may be part of a larger block
    # Not narrow, split or view: this takes half of their time.
    return [reduced.as_strided(shape, strides, begin + start) for shape, strides, start in cuts]


class _Row(NamedTuple):
    """How what one rank gets of some segments lies, in elements."""

    starts: dict[int, int]
    """Per segment, where its reduced piece is in the end."""
    arrivals: dict[int, int]
    """... and where its message goes: the same, but for contributions to 0-d parameters."""
    numel: int


class ReduceBuffer:
    """The whole gradients of a group's trainable parameters in the dtype in which they travel.

    Filled by one fused cast-copy when gradients are sent off; given back when the collective has read it.
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
            rank: This rank's place along the shard axis.
            params: Indices of the parameters that can have gradients.
            reduce_dtypes: Reduce dtype of each of the group's parameters.
            gradient_dtypes: Dtype of each parameter's reduced gradient.
            device: Where gradients are.
            by_segment: Reduced gradients are those of whole segments, not of single parameters.
            rank_major: Lie rank after rank. Flat segments cannot, except one by itself, which does anyway.
            wire_dtype: In which gradients are here, to be exchanged and summed in their reduce dtypes; None for
                the reduce dtypes themselves.
            replica: This rank's place among replicas, and how many they are.
        """
        self._contributor = replica[0] * layout.world + rank
        self._contributors = replica[1] * layout.world
        """Ranks that have gradients of the same parameter, and this rank's place among them."""
        self.layout = layout
        self._rank = rank
        self._by_segment = by_segment
        self._wire_dtype = wire_dtype
        flat = any(slot.division is Division.FLAT for slot in layout.slots)
        self._always_whole = flat
        """Ranks may use different parameters of a flat group, so all of it travels, always."""
        self.rank_major = rank_major and not flat
        self._kinds: dict[int, tuple[torch.dtype, torch.dtype]] = {}
        """Per segment, dtypes of the reduction and of the result."""
        for param in sorted(params):
            self._kinds[layout.slots[param].segment] = reduce_dtypes[param], gradient_dtypes[param]
        self._strides: dict[int, int] = {}
        """Per segment, elements from one rank's piece to the next rank's."""
        self._starts: dict[int, int] = {}
        """Per segment, bytes before its message."""
        self._row_starts: dict[tuple[torch.dtype, torch.dtype], int] = {}
        """Per kind of segments, bytes before all, if they lie rank after rank."""
        nbytes = self._arrange()
        self._buffer = Buffer(nbytes, device)
        self._runs: dict[frozenset[int], tuple[ReduceBucket, ...]] = {}
        self.targets = {param: self._target(param) for param in params}
        """Per parameter, where its gradient goes."""
        self._cutters = {param: self._cutter(param) for param in params}
        """Per parameter, how its gradient is cut to match its targets."""
        self._pads = [pad for segment in self._kinds for pad in self._padding(segment)]

    def _arrange(self) -> int:
        """Give every segment its place, and return the bytes of all."""
        layout = self.layout
        numels = {index: self._message_numel(index) for index in self._kinds}
        if not self.rank_major:
            wholes = [numel * layout.world for numel in numels.values()]
            placement = place(wholes, [self._dtype(index) for index in numels])
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
        """How one rank's pieces of segments of a kind lie."""
        itemsize = self._dtype(segments[0]).itemsize
        placed = place_row(self.layout, segments, [self._dtype(index) for index in segments])
        starts = {i: start // itemsize for i, start in zip(segments, placed.starts, strict=True)}
        arrivals, end = dict(starts), placed.nbytes // itemsize
        for index in filter(self._is_copied, segments):
            arrivals[index] = end
            end += self._contributors
        return _Row(starts, arrivals, -(-end // ROW_ALIGNMENT) * ROW_ALIGNMENT)

    def _is_copied(self, segment: int) -> bool:
        """Whether several ranks hold copies of a segment's one element: [Note: one sum for all copies]."""
        slot = self.layout.slots[self.layout.segments[segment].params[0]]
        return slot.division is Division.REPLICATED and self.layout.world > 1

    def _message_numel(self, segment: int) -> int:
        """Elements of a segment that go to each rank."""
        if self._is_copied(segment):
            return self._contributors
        return self.layout.segments[segment].piece_numel

    def _dtype(self, segment: int) -> torch.dtype:
        """Of a segment's gradients here."""
        return self._wire_dtype or self._kinds[segment][0]

    def _of_kind(self, kind: tuple[torch.dtype, torch.dtype]) -> list[int]:
        """Segments of a kind, in the order in which a rank's pieces of them lie in memory."""
        segments = [index for index, other in self._kinds.items() if other == kind]
        return [segments[place] for place in self.layout.memory_order(segments)]

    def _view(
        self, segment: int, start: int, shape: Sequence[int], strides: Sequence[int]
    ) -> Tensor:
        """A part of a segment, ``start`` elements after its beginning."""
        dtype = self._dtype(segment)
        return self._buffer.view(
            dtype, self._starts[segment] + start * dtype.itemsize, shape, strides
        )

    def _filled(self, param: int) -> tuple[int, int]:
        """How many ranks' pieces a parameter fills, and elements of the one after them; not for flat segments."""
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
                self.layout,
                param,
                self._buffer,
                self._starts[segment],
                self._dtype(segment),
                step,
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

    def _cutter(self, param: int) -> Callable[[Tensor], list[Tensor]]:
        division, layout = self.layout.slots[param].division, self.layout
        if division is Division.CHUNKS:
            return functools.partial(rank_chunks, layout, param)
        if division is Division.REPLICATED:
            return lambda gradient: [gradient.expand(layout.world)]
        if not self.rank_major:
            return lambda gradient: [gradient]
        shapes = [tuple(target.shape) for target in self.targets[param]]
        starts = itertools.accumulate((math.prod(shape) for shape in shapes), initial=0)
        cuts = [
            (shape, contiguous_strides(shape), start)
            for shape, start in zip(shapes, starts, strict=False)
        ]

        def cut(gradient: Tensor) -> list[Tensor]:
            flat = gradient if gradient.is_contiguous() else gradient.contiguous()
            begin = flat.storage_offset()
            return [
                flat.as_strided(shape, strides, begin + start) for shape, strides, start in cuts
            ]

        return cut

    def put(self, gradients: dict[int, Tensor]) -> None:
        """Copy gradients of parameters here, in one fused cast-copy."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for param, gradient in gradients.items():
            targets += self.targets[param]
            sources += self._cutters[param](gradient)
        torch._foreach_copy_(targets, sources)

    def runs(self, used: frozenset[int]) -> tuple[ReduceBucket, ...]:
        """The calls that reduce the segments of parameters ``used``; planned once for each such set."""
        if used not in self._runs:
            segments = {self.layout.slots[param].segment for param in used}
            if self._always_whole:
                segments = set(self._kinds)
            kinds = dict.fromkeys(kind for i, kind in self._kinds.items() if i in segments)
            self._runs[used] = tuple(self._run(kind, segments, used) for kind in kinds)
        return self._runs[used]

    def _run(
        self, kind: tuple[torch.dtype, torch.dtype], segments: set[int], used: frozenset[int]
    ) -> ReduceBucket:
        layout, members = self.layout, self._of_kind(kind)
        chosen = [index for index in members if index in segments]
        row = self._row(chosen)
        gradients, unfilled = [], []
        for index in chosen:
            segment, start = layout.segments[index], row.starts[index]
            for param in segment.params:
                if param not in self.targets:
                    continue  # frozen: its part is padding
                if param not in used:
                    unfilled += self.targets[param]
                # All that travelled land: of a parameter that this rank did not use, others may have,
                # and then all ranks have parts of its gradient.
                if not self._by_segment:
                    piece = layout.piece(param, self._rank)
                    gradients.append(
                        LocalGradient(param=param, shape=piece.shape, start=start + piece.offset)
                    )
            if self._by_segment:
                shape = (segment.piece_numel,)
                gradients.append(LocalGradient(param=segment.params[0], shape=shape, start=start))
        inputs = [self._pieces_of_all_ranks(index) for index in chosen]
        if self.rank_major and chosen == members:  # they are a row in the buffer, too
            numel, begin = row.numel * layout.world, self._row_starts[kind]
            inputs = [self._buffer.view(self._dtype(chosen[0]), begin, (numel,), (1,))]
        elif self.rank_major:
            inputs = [tensor.view(layout.world, -1) for tensor in inputs]
        arrivals = {index: (row.arrivals[index], self._message_numel(index)) for index in chosen}
        return ReduceBucket(
            kind=kind,
            exchanged=self._wire_dtype is not None,
            numel=row.numel,
            inputs=inputs,
            pieces=list(arrivals.values()),
            joined=self.rank_major,
            gradients=gradients,
            unfilled=unfilled,
            copied={
                layout.segments[index].params[0]: arrivals[index]
                for index in filter(self._is_copied, chosen)
            },
        )

    def _pieces_of_all_ranks(self, segment: int) -> Tensor:
        """A segment with its padding: flat, or if it does not lie so, (world, elements of a piece)."""
        piece, step = self._message_numel(segment), self._strides[segment]
        if piece == step:
            return self._view(segment, 0, (piece * self.layout.world,), (1,))
        return self._view(segment, 0, (self.layout.world, piece), (step, 1))

    def _padding(self, segment: int) -> list[Tensor]:
        """Views of what no gradient ever fills, to be cleared once.

        Of the segments; what lies between them, for alignment, is nobody's and may be anything.
        """
        if self._is_copied(segment):  # all that the others contribute
            return [self._pieces_of_all_ranks(segment)]
        if self.rank_major:
            return self._padding_of_ranks(segment)
        flat = self._pieces_of_all_ranks(segment)
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

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, whether it has it now or not."""
        return self._buffer.nbytes

    @property
    def allocated(self) -> bool:
        """Whether gradients are, or are about to be, held."""
        return self._buffer.allocated

    def allocate(self) -> None:
        """Take memory on the current stream (the compute stream) and clear the padding."""
        self._buffer.allocate()
        if self._pads:
            torch._foreach_zero_(self._pads)

    def release(self) -> None:
        """Give the memory back; the compute stream must be ordered after the last read of it."""
        self._buffer.release()
