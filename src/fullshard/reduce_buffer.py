"""Where a group's gradients are from their arrival until they are reduced, and how the result is cut.

    segment after segment   | weight: rank 0, rank 1, .. | bias: rank 0, rank 1, .. |     one message per segment
    rank after rank         | rank 0: weight, bias | rank 1: weight, bias | ..            one message

Gradients are copied here in any case, to be cast, so both cost the same copy. Segment after segment
the copy of all is one kernel on an accelerator, whose backends take many messages in one call. Rank
after rank is for backends that carry each message by itself, and for exchanges (`gradients`,
[Note: narrow on the wire]), which no backend coalesces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .buffers import Buffer, rank_chunks, staged_chunks
from .layout import Division, Layout, Placement, place


class Cuts:
    """Ranges of a flat tensor, cut out of it at once: a view each costs several times as much."""

    def __init__(self, ranges: Sequence[tuple[int, int]], total: int) -> None:
        """Prepare for (start, length) of each range, in order, of a tensor with ``total`` elements."""
        self._sizes: list[int] = []
        self._chosen: list[int] = []
        end = 0
        for start, numel in ranges:
            if start > end:
                self._sizes.append(start - end)
            self._chosen.append(len(self._sizes))
            self._sizes.append(numel)
            end = start + numel
        if total > end:
            self._sizes.append(total - end)

    def of(self, flat: Tensor) -> list[Tensor]:
        """The ranges, as views."""
        parts = torch.split_with_sizes(flat, self._sizes)
        return [parts[index] for index in self._chosen]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradient:
    """Where a parameter's reduced gradient, or that of a whole segment, lies in the output of its run."""

    param: int
    """Of a segment, the first."""
    shape: tuple[int, ...]
    start: int
    numel: int
    """In elements of the run's output."""


class ReduceRun:
    """Segments reduced together: the same dtypes on the wire, of the sum and of the result."""

    def __init__(
        self,
        *,
        kind: tuple[torch.dtype, torch.dtype],
        exchanged: bool,
        numel: int,
        inputs: Sequence[Tensor],
        pieces: Sequence[tuple[int, int]],
        packing: Sequence[tuple[int, int]] = (),
        gradients: Sequence[LocalGradient],
        unfilled: Sequence[Tensor],
    ) -> None:
        self.reduce_dtype, self.gradient_dtype = kind
        self.exchanged = exchanged
        """Whether the inputs are in a narrower dtype than that of the sum, which is the receiver's to make."""
        self.numel = numel
        """Elements of the run's output."""
        self._inputs = tuple(inputs)
        self._packing = tuple(packing)
        """If the inputs are parts of rows, (world, elements): start and length of each in rows of one message."""
        self.pieces = tuple(pieces)
        """Per input, start and length of its reduced piece in the run's output, in elements."""
        self.gradients = tuple(gradients)
        self.unfilled = tuple(unfilled)
        """Parts of the inputs that belong to parameters without a gradient: zero, since a message travels whole."""
        self._piece_cuts = Cuts(self.pieces, numel)
        self._gradient_cuts = Cuts([(each.start, each.numel) for each in gradients], numel)
        self._shapes = [each.shape if len(each.shape) != 1 else None for each in gradients]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the collective reads, rank after rank; what does not lie so is copied."""
        if not self._packing:
            return self._inputs
        rows = self._inputs[0].new_zeros(len(self._inputs[0]), self.numel)
        torch._foreach_copy_([rows.narrow(1, *span) for span in self._packing], self._inputs)
        return (rows.view(-1),)

    def outputs(self, reduced: Tensor) -> list[Tensor]:
        """Where the reduced pieces go, one for each of the inputs."""
        return [reduced] if self.pieces == ((0, self.numel),) else self._piece_cuts.of(reduced)

    def cut(self, reduced: Tensor) -> list[Tensor]:
        """The gradients of `gradients` in the run's output, as views."""
        parts = self._gradient_cuts.of(reduced)
        return [
            part if shape is None else part.view(shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]


class ReduceBuffer:
    """The whole gradients of a group's trainable parameters in the dtype in which they travel, or accumulate.

    Filled by one fused cast-copy when gradients arrive; kept over steps that accumulate without
    reducing; given back when the collective has read it.
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
        """
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
        """Per segment, bytes before it."""
        self._gaps: dict[int, int] = {}
        """Rank after rank: per segment, elements from the end of a rank's piece to what follows it."""
        nbytes = self._arrange()
        self._buffer = Buffer(nbytes, device)
        self._runs: dict[frozenset[int], tuple[ReduceRun, ...]] = {}
        self.targets = {param: self._target(param) for param in params}
        """Per parameter, where its gradient goes; parallel to what `sources` returns."""
        self._pads = [pad for segment in self._kinds for pad in self._padding(segment)]

    def _arrange(self) -> int:
        """Give every segment its place, and return the bytes of all."""
        layout = self.layout
        numels = {index: layout.segments[index].piece_numel for index in self._kinds}
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
            for index, start, following in zip(
                members, row.starts, (*row.starts[1:], row.nbytes), strict=True
            ):
                self._starts[index] = end + start
                self._strides[index] = row.nbytes // itemsize
                self._gaps[index] = (following - start) // itemsize - numels[index]
            end += row.nbytes * layout.world
        return end

    def _row(self, segments: Sequence[int]) -> Placement:
        """How one rank's pieces of segments of a kind lie, one after the other."""
        numels = [self.layout.segments[index].piece_numel for index in segments]
        return place(numels, [self._dtype(index) for index in segments])

    def _dtype(self, segment: int) -> torch.dtype:
        """Of a segment's gradients here."""
        return self._wire_dtype or self._kinds[segment][0]

    def _of_kind(self, kind: tuple[torch.dtype, torch.dtype]) -> list[int]:
        return [index for index, other in self._kinds.items() if other == kind]

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
            return [self._view(segment, 0, (self.layout.world,), (step,))]
        if not self.rank_major:
            return [self._view(segment, slot.start, slot.shape, slot.strides)]
        piece = self.layout.segments[segment].piece_numel
        ranks, rest = self._filled(param)
        views = [self._view(segment, 0, (ranks, piece), (step, 1))] if ranks else []
        return views + ([self._view(segment, ranks * step, (rest,), (1,))] if rest else [])

    def sources(self, param: int, gradient: Tensor) -> list[Tensor]:
        """A parameter's gradient cut to match its `targets`."""
        division = self.layout.slots[param].division
        if division is Division.CHUNKS:
            return rank_chunks(self.layout, param, gradient)
        if division is Division.REPLICATED:
            return [gradient.expand(self.layout.world)]
        if not self.rank_major:
            return [gradient]
        targets = self.targets[param]
        if len(targets) == 1:
            return [gradient.reshape(targets[0].shape)]
        sizes = [target.numel() for target in targets]
        parts = gradient.flatten().split(sizes)
        return [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]

    def runs(self, used: frozenset[int]) -> tuple[ReduceRun, ...]:
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
    ) -> ReduceRun:
        layout, members = self.layout, self._of_kind(kind)
        chosen = [index for index in members if index in segments]
        row, itemsize = self._row(chosen), self._dtype(chosen[0]).itemsize
        starts = [start // itemsize for start in row.starts]
        numel = row.nbytes // itemsize
        gradients, unfilled = [], []
        for index, start in zip(chosen, starts, strict=True):
            segment = layout.segments[index]
            for param in segment.params:
                if param not in self.targets:
                    continue  # frozen: its part is padding
                if param not in used:
                    unfilled += self.targets[param]
                # All that travelled land: of a parameter that this rank did not use, others may have,
                # and then all ranks have parts of its gradient.
                if not self._by_segment:
                    piece = layout.piece(param, self._rank)
                    gradients.append(_local_gradient(param, piece.shape, start + piece.offset))
            if self._by_segment:
                gradients.append(_local_gradient(segment.params[0], (segment.piece_numel,), start))
        numels = [layout.segments[index].piece_numel for index in chosen]
        pieces, packing = list(zip(starts, numels, strict=True)), list[tuple[int, int]]()
        inputs = [self._pieces_of_all_ranks(index) for index in chosen]
        if self.rank_major and chosen == members:  # they are a row in the buffer, too
            pieces = [(0, numel)]
            inputs = [self._view(chosen[0], 0, (numel * layout.world,), (1,))]
        elif self.rank_major:
            pieces, packing = [(0, numel)], pieces
            inputs = [tensor.view(layout.world, -1) for tensor in inputs]
        return ReduceRun(
            kind=kind,
            exchanged=self._wire_dtype is not None,
            numel=numel,
            inputs=inputs,
            pieces=pieces,
            packing=packing,
            gradients=gradients,
            unfilled=unfilled,
        )

    def _pieces_of_all_ranks(self, segment: int) -> Tensor:
        """A segment with its padding: flat, or if it does not lie so, (world, elements of a piece)."""
        piece, step = self.layout.segments[segment].piece_numel, self._strides[segment]
        if piece == step:
            return self._view(segment, 0, (piece * self.layout.world,), (1,))
        return self._view(segment, 0, (self.layout.world, piece), (step, 1))

    def _padding(self, segment: int) -> list[Tensor]:
        """Views of what no gradient ever fills, to be cleared once."""
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
        pads = [self._view(segment, piece, (layout.world, self._gaps[segment]), (step, 1))]
        if ranks < layout.world:
            pads.append(self._view(segment, ranks * step + rest, (piece - rest,), (1,)))
            empty = layout.world - ranks - 1
            pads.append(self._view(segment, (ranks + 1) * step, (empty, piece), (step, 1)))
        return [pad for pad in pads if pad.numel()]

    def copy_from(self, other: ReduceBuffer, params: Collection[int]) -> None:
        """Take what another buffer of the same layout holds of parameters, in this one's dtype."""
        segments = {self.layout.slots[param].segment for param in params}
        here, there = (
            [buffer._pieces_of_all_ranks(i).view(self.layout.world, -1) for i in segments]
            for buffer in (self, other)
        )
        torch._foreach_copy_(here, there)

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


def _local_gradient(param: int, shape: tuple[int, ...], start: int) -> LocalGradient:
    return LocalGradient(param=param, shape=shape, start=start, numel=math.prod(shape))
