"""Allocating and giving back the memory of a group.

    ShardBuffer     this rank's pieces of all parameters, for the life of the group
    GatherBuffer    the whole parameters, while they are needed
    ReduceBuffer    the whole gradients in the reduce dtype, from their arrival until they are reduced

A `Buffer` can give its memory back and take it again without its views noticing: the storage is resized, not
replaced. Tensors that autograd saved keep their storage object and see the data again after the next gather,
and every view a step needs is made once. Views are made with `set_`, so they are no autograd views: each has a
version counter of its own, and a gather does not look to autograd like a change of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Division, Layout, Slot, place


class Buffer:
    """One storage whose memory can be given back and taken again."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Allocate at once, on the current stream, as views can only be made of present memory."""
        self.nbytes = nbytes
        self._storage = torch.UntypedStorage(nbytes, device=device)

    @property
    def allocated(self) -> bool:
        """Whether the memory is present; an empty buffer always counts as given back."""
        return self._storage.nbytes() > 0

    @property
    def data_ptr(self) -> int:
        """Address of the memory, 0 when given back."""
        return self._storage.data_ptr()

    def allocate(self) -> None:
        """Take memory from the current stream's pool; contents are undefined."""
        self._storage.resize_(self.nbytes)

    def release(self) -> None:
        """Give the memory back to the pool of the stream that allocated it."""
        self._storage.resize_(0)

    def view(self, dtype: torch.dtype, start: int, shape: Sequence[int]) -> Tensor:
        """A contiguous tensor at byte ``start``; an alias of the storage without autograd history."""
        assert self._storage.nbytes() == self.nbytes, "set_ on absent memory would allocate it"
        tensor = torch.empty(0, dtype=dtype, device=self._storage.device)
        return tensor.set_(self._storage, start // dtype.itemsize, tuple(shape), strides(shape))


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    result, step = [], 1
    for size in reversed(shape):
        result.append(step)
        step *= max(size, 1)
    return tuple(reversed(result))


def rank_chunks(layout: Layout, param: int, whole: Tensor) -> list[Tensor]:
    """The blocks of a whole parameter (or gradient) that the ranks hold, empty ones included."""
    slot = layout.slots[param]
    pieces = [layout.piece(param, rank) for rank in range(layout.world)]
    return [whole.narrow(slot.dim, piece.start, piece.shape[slot.dim]) for piece in pieces]


class ShardBuffer:
    """This rank's pieces of all parameters of a group, in the parameters' own dtypes."""

    def __init__(
        self, layout: Layout, rank: int, dtypes: Sequence[torch.dtype], device: torch.device
    ) -> None:
        segment_dtypes = [dtypes[segment.params[0]] for segment in layout.segments]
        numels = [segment.piece_numel for segment in layout.segments]
        placement = place(numels, segment_dtypes)
        self._buffer = Buffer(placement.nbytes, device)
        self.nbytes = placement.nbytes
        self.pieces = [
            self._buffer.view(dtype, start, (numel,))
            for dtype, start, numel in zip(segment_dtypes, placement.starts, numels, strict=True)
        ]
        """Per segment, this rank's piece with its padding, flat: what a gather sends."""

        self.locals = []
        """Per parameter, what of it this rank holds: the data of its sharded face."""
        for index, slot in enumerate(layout.slots):
            piece = layout.piece(index, rank)
            start = placement.starts[slot.segment] + piece.offset * dtypes[index].itemsize
            self.locals.append(self._buffer.view(dtypes[index], start, piece.shape))
        if device.type != "meta":
            for piece_tensor in self.pieces:
                piece_tensor.zero_()  # padding travels with every gather; let it be the same everywhere


class GatherBuffer:
    """The whole parameters of a group in the compute dtype, while the group is unsharded.

    Zero-copy segments are gathered in place: `outputs` are segments of this buffer and `inputs` this rank's
    pieces of them. A `Division.CHUNKS` segment is gathered into a staging buffer, rank after rank, and
    rearranged by `copy_out`.
    """

    def __init__(
        self, layout: Layout, rank: int, dtypes: Sequence[torch.dtype], device: torch.device
    ) -> None:
        """Allocate on the current stream (the all-gather stream) and make every view a step needs."""
        self._layout = layout
        self._dtypes = [dtypes[segment.params[0]] for segment in layout.segments]
        staged = [not _is_zero_copy(layout, index) for index in range(len(layout.segments))]
        whole = [segment.piece_numel * layout.world for segment in layout.segments]
        homes = place(
            [
                layout.slots[segment.params[0]].numel if is_staged else numel
                for segment, is_staged, numel in zip(layout.segments, staged, whole, strict=True)
            ],
            self._dtypes,
        )
        staging = place(
            [numel if is_staged else 0 for numel, is_staged in zip(whole, staged, strict=True)],
            self._dtypes,
        )
        self.nbytes = homes.nbytes
        self.homes = Buffer(homes.nbytes, device)
        self.staging = Buffer(staging.nbytes, device)
        self.starts = homes.starts

        self.outputs: list[Tensor] = []
        """Per segment, the bytes it is gathered into."""
        self.inputs: list[Tensor] = []
        """Per segment, the bytes of this rank's piece within its output."""
        self.own_pieces: list[Tensor] = []
        """`inputs` in the compute dtype: what the shard is cast and copied into."""
        for index, segment in enumerate(layout.segments):
            buffer, start = (
                (self.staging, staging.starts[index])
                if staged[index]
                else (self.homes, homes.starts[index])
            )
            dtype = self._dtypes[index]
            piece_bytes = segment.piece_numel * dtype.itemsize
            own = start + rank * piece_bytes
            self.own_pieces.append(buffer.view(dtype, own, (segment.piece_numel,)))
            if piece_bytes:  # a collective has nothing to do for a parameter without elements
                self.outputs.append(buffer.view(torch.uint8, start, (piece_bytes * layout.world,)))
                self.inputs.append(buffer.view(torch.uint8, own, (piece_bytes,)))

        self.params = [
            self.homes.view(dtype, _home(homes.starts, slot, dtype), slot.shape)
            for slot, dtype in zip(layout.slots, dtypes, strict=True)
        ]
        """Per parameter, the data of its unsharded face."""

        self._copy_out: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index, slot in enumerate(layout.slots):
            if not slot.zero_copy:
                start, dtype = staging.starts[slot.segment], dtypes[index]
                self._copy_out[0].extend(rank_chunks(layout, index, self.params[index]))
                self._copy_out[1].extend(_staged_chunks(layout, index, self.staging, start, dtype))

    def allocate(self) -> None:
        """Take memory, on the current stream (the all-gather stream)."""
        self.homes.allocate()
        if self.staging.nbytes:
            self.staging.allocate()

    def copy_out(self) -> None:
        """Rearrange what was staged; after the collective, on the stream that ran it."""
        if self._copy_out[0]:
            torch._foreach_copy_(*self._copy_out)
            self.staging.release()

    def copy_out_packed(self, packed: Tensor, starts: Sequence[int]) -> None:
        """Distribute a packed gather: ``packed`` is (world, bytes of a shard), pieces at byte ``starts``."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, segment in enumerate(self._layout.segments):
            numel, dtype = segment.piece_numel, self._dtypes[index]
            piece = packed[:, starts[index] : starts[index] + numel * dtype.itemsize].view(dtype)
            param = segment.params[0]
            if _is_zero_copy(self._layout, index):
                shape = (self._layout.world, numel)
                targets.append(self.homes.view(dtype, self.starts[index], shape))
                sources.append(piece)
                continue
            targets.extend(rank_chunks(self._layout, param, self.params[param]))
            for rank in range(self._layout.world):
                held = self._layout.piece(param, rank)
                sources.append(piece[rank, : held.numel].view(held.shape))
        torch._foreach_copy_(targets, sources)
        if self.staging.nbytes:
            self.staging.release()

    def release(self) -> None:
        """Give the memory back."""
        self.homes.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradient:
    """Where a parameter's reduced gradient lies in the output of its run."""

    param: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    """In elements of the run's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceRun:
    """Segments reduced by one call: the same dtype on the wire and the same dtype at rest."""

    reduce_dtype: torch.dtype
    shard_dtype: torch.dtype
    numel: int
    """Elements of the run's output."""
    inputs: tuple[Tensor, ...]
    """Per segment, what the reduce-scatter reads."""
    outputs: tuple[tuple[int, int], ...]
    """Per segment, start and length of its reduced piece in the run's output, in elements."""
    gradients: tuple[LocalGradient, ...]
    unfilled: tuple[Tensor, ...]
    """Parts of the inputs that belong to parameters without a gradient: zero, since a segment travels whole."""


class ReduceBuffer:
    """The whole gradients of a group's trainable parameters in the reduce dtype, rank after rank.

    Filled by one fused cast-copy when gradients arrive; kept over steps that accumulate without reducing;
    given back when the reduce-scatter has read it.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        params: Sequence[int],
        reduce_dtypes: Sequence[torch.dtype],
        shard_dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> None:
        """Allocate on the current stream (the compute stream) and make every view a step needs.

        Args:
            layout: The group's layout.
            rank: This rank's place along the shard axis.
            params: Indices of the parameters that can have gradients.
            reduce_dtypes: Reduce dtype of each of the group's parameters.
            shard_dtypes: Dtype at rest of each of the group's parameters.
            device: Where gradients are.
        """
        self.layout = layout
        self._rank = rank
        segments = sorted({layout.slots[param].segment for param in params})
        first = {index: layout.segments[index].params[0] for index in segments}
        dtypes = [reduce_dtypes[first[index]] for index in segments]
        numels = [layout.segments[index].piece_numel * layout.world for index in segments]
        placement = place(numels, dtypes)
        starts = dict(zip(segments, placement.starts, strict=True))
        self._buffer = Buffer(placement.nbytes, device)
        self.inputs = {
            index: self._buffer.view(dtype, starts[index], (numel,))
            for index, dtype, numel in zip(segments, dtypes, numels, strict=True)
        }
        """Per segment, what the reduce-scatter reads."""
        self._kinds = {
            index: (reduce_dtypes[first[index]], shard_dtypes[first[index]]) for index in segments
        }
        self._runs: dict[frozenset[int], tuple[ReduceRun, ...]] = {}
        self.targets = {
            param: self._target(param, starts[layout.slots[param].segment], reduce_dtypes[param])
            for param in params
        }
        """Per parameter, where its gradient goes; parallel to what `sources` returns."""
        self._pads = [pad for index in segments for pad in self._padding(index)]

    def _target(self, param: int, start: int, dtype: torch.dtype) -> list[Tensor]:
        slot = self.layout.slots[param]
        if slot.division is Division.CHUNKS:
            return _staged_chunks(self.layout, param, self._buffer, start, dtype)
        shape = (self.layout.world,) if slot.division is Division.REPLICATED else slot.shape
        return [self._buffer.view(dtype, start + slot.start * dtype.itemsize, shape)]

    def sources(self, param: int, gradient: Tensor) -> list[Tensor]:
        """A parameter's gradient cut to match its `targets`."""
        division = self.layout.slots[param].division
        if division is Division.CHUNKS:
            return rank_chunks(self.layout, param, gradient)
        if division is Division.REPLICATED:
            return [gradient.expand(self.layout.world)]
        return [gradient]

    def runs(self, used: frozenset[int]) -> tuple[ReduceRun, ...]:
        """The calls that reduce the gradients of parameters ``used``; planned once for each such set."""
        if used not in self._runs:
            segments = {self.layout.slots[param].segment for param in used}
            kinds = dict.fromkeys(kind for i, kind in self._kinds.items() if i in segments)
            self._runs[used] = tuple(self._run(kind, segments, used) for kind in kinds)
        return self._runs[used]

    def _run(
        self, kind: tuple[torch.dtype, torch.dtype], segments: set[int], used: frozenset[int]
    ) -> ReduceRun:
        layout = self.layout
        chosen = [i for i, other in self._kinds.items() if other == kind and i in segments]
        numels = [layout.segments[index].piece_numel for index in chosen]
        placement = place(numels, [kind[0]] * len(chosen))
        starts = [start // kind[0].itemsize for start in placement.starts]
        gradients, unfilled = [], []
        for index, start in zip(chosen, starts, strict=True):
            for param in layout.segments[index].params:
                if param not in used:
                    unfilled += self.targets.get(param, [])
                    continue
                piece = layout.piece(param, self._rank)
                gradients.append(
                    LocalGradient(
                        param=param,
                        shape=piece.shape,
                        strides=strides(piece.shape),
                        start=start + piece.offset,
                    )
                )
        return ReduceRun(
            reduce_dtype=kind[0],
            shard_dtype=kind[1],
            numel=placement.nbytes // kind[0].itemsize,
            inputs=tuple(self.inputs[index] for index in chosen),
            outputs=tuple(zip(starts, numels, strict=True)),
            gradients=tuple(gradients),
            unfilled=tuple(unfilled),
        )

    def _padding(self, segment: int) -> list[Tensor]:
        """Flat views of what no gradient ever fills, to be cleared once."""
        flat = self.inputs[segment]
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


def _is_zero_copy(layout: Layout, segment: int) -> bool:
    return layout.slots[layout.segments[segment].params[0]].zero_copy


def _home(starts: Sequence[int], slot: Slot, dtype: torch.dtype) -> int:
    return starts[slot.segment] + slot.start * dtype.itemsize


def _staged_chunks(
    layout: Layout, param: int, buffer: Buffer, start: int, dtype: torch.dtype
) -> list[Tensor]:
    """The ranks' blocks of a CHUNKS parameter as they lie in a rank-after-rank segment at byte ``start``."""
    piece_bytes = layout.segments[layout.slots[param].segment].piece_numel * dtype.itemsize
    return [
        buffer.view(dtype, start + rank * piece_bytes, layout.piece(param, rank).shape)
        for rank in range(layout.world)
    ]
