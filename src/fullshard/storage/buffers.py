"""The memory of a group: allocated, viewed and released here.

    FlatShard       one rank's shard, as flat tensors
    GatherBuffer    the full parameters, while they are needed
    ShardBuffer     this rank's pieces of all parameters, for the life of the group (`shard_buffer`)

A `Buffer` can give its memory back and take it again without its views noticing: the storage is
resized, not replaced. Tensors that autograd saved keep their storage object and see the data again
after the next all-gather, and every view a step needs is made once. Views are made with `set_`, so they
are no autograd views: each has a version counter of its own, and an all-gather does not look to autograd
like a change of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fullshard.layout.segments import (
    Division,
    Layout,
    block_offsets,
    contiguous_strides,
    shard_offsets,
)
from fullshard.storage.copy_out import (
    CELL,
    CELL_DTYPE,
    FEW_PIECES,
    Indices,
    by_cells,
    by_pieces,
    by_rows,
    can_be_indexed,
    cell_index,
)


class Buffer:
    """One storage whose memory can be given back and taken again."""

    def __init__(self, nbytes: int, device: torch.device, *, pinned: bool = False) -> None:
        """Allocate at once, on the current stream, as views can only be made of present memory.

        Pinned memory is host memory, and is kept until the buffer's end.
        """
        self.nbytes = nbytes
        self.storage = (
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
            if pinned
            else torch.UntypedStorage(nbytes, device=device)
        )

    @property
    def allocated(self) -> bool:
        """Whether the memory is present; an empty buffer always counts as given back."""
        return self.storage.nbytes() > 0

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it has now."""
        return self.storage.nbytes()

    @property
    def data_ptr(self) -> int:
        """Address of the memory, 0 when given back."""
        return self.storage.data_ptr()

    def allocate(self) -> None:
        """Take memory from the current stream's pool, unless there is some already; contents are undefined.

        A new buffer already has memory. Resizing it would allocate the same amount again and copy, before the first is
        freed.
        """
        if not self.storage.nbytes():
            self.storage.resize_(self.nbytes)

    def release(self) -> None:
        """Give the memory back to the pool of the stream that allocated it."""
        self.storage.resize_(0)

    def view(
        self,
        dtype: torch.dtype,
        start: int,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """A tensor at byte ``start``, contiguous by default: an alias of the storage without autograd history."""
        assert self.storage.nbytes() == self.nbytes, "set_ on absent memory would allocate it"
        tensor = torch.empty(0, dtype=dtype, device=self.storage.device)
        strides = contiguous_strides(shape) if strides is None else tuple(strides)
        return tensor.set_(self.storage, start // dtype.itemsize, tuple(shape), strides)


def take_storages(tensors: Iterable[Tensor]) -> None:
    """Take memory from the current stream's pool for tensors whose own was given back."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        needed = int(tensor.storage_offset() + tensor.numel()) * tensor.itemsize
        if storage.nbytes() < needed:
            storage.resize_(needed)


def release_storages(tensors: Iterable[Tensor]) -> None:
    """Give the memory of tensors back to the pool of the stream that allocated it."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def views_of_params(
    buffer: Buffer, layout: Layout, starts: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Return the full parameters in a buffer whose segments begin at these bytes."""
    return [
        buffer.view(
            dtype, starts[slot.segment] + slot.start * dtype.itemsize, slot.shape, slot.strides
        )
        for slot, dtype in zip(layout.slots, dtypes, strict=True)
    ]


def shard_of(layout: Layout, param: int, rank: int, full: Tensor) -> Tensor:
    """Return ``rank``'s part of a full parameter, as a view of it."""
    slot, piece = layout.slots[param], layout.piece(param, rank)
    if slot.division is Division.REPLICATED:
        return full
    if slot.division is Division.FLAT:
        return in_memory_order(full, slot.strides).narrow(0, piece.start, piece.numel)
    return full.narrow(slot.dim, piece.start, piece.shape[slot.dim])


def in_memory_order(full: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor's elements in the order in which they would lie in memory with ``strides``, flat.

    A view if they do lie so.
    """
    by_stride = sorted(range(full.ndim), key=lambda dim: (-strides[dim], dim))
    return full.permute(by_stride).reshape(-1)


def rank_chunks(layout: Layout, param: int, full: Tensor) -> list[Tensor]:
    """Return the blocks of a full parameter (or gradient) that the ranks hold, empty ones included."""
    slot = layout.slots[param]
    pieces = [layout.piece(param, rank) for rank in range(layout.world)]
    return [full.narrow(slot.dim, piece.start, piece.shape[slot.dim]) for piece in pieces]


@dataclass(frozen=True, slots=True)
class FlatShard:
    """One rank's shard of a group as flat tensors; an all-gather sends it, or reads it before a cast."""

    segments: list[Tensor]
    """The rank's piece of each segment."""
    row: Tensor | None
    """All pieces with the gaps between them, if they lie one after the other (`layout.shard_offsets`) in one dtype."""

    def copy_into(self, target: FlatShard) -> None:
        """Cast and copy to another flat shard of the same layout, on the current stream."""
        if self.row is not None and target.row is not None:
            # Pieces have the same offsets in every dtype, so one copy casts all of them, gaps included.
            target.row.copy_(self.row)
        elif len(self.segments) == 1:
            # One copy that rounds fp32 to bf16 has 1.2 to 1.6 times the bandwidth of a fused one (H200).
            target.segments[0].copy_(self.segments[0])
        elif self.segments:
            torch._foreach_copy_(target.segments, self.segments)

    def read(self, reader: Callable[[FlatShard], object]) -> None:
        """Call ``reader`` with the shard on the device."""
        reader(self)


class Source(Protocol):
    """The holder of this rank's shard, to be read: a `FlatShard` on the device, or an `UploadBuffer`."""

    def copy_into(self, target: FlatShard) -> None:
        """Cast and copy the shard to ``target``, on the current stream."""

    def read(self, reader: Callable[[FlatShard], object]) -> None:
        """Call ``reader`` with the shard on the device."""


class GatherBuffer:
    """The full parameters of a group in the compute dtype, while the group is gathered.

    Where messages lie when they arrive, and what copies them to the full parameters then (`copy_out`):

        arranged     segment                           message          copied by
        in place     zero-copy                         a segment of it  nothing: it lies where its parameters do
                     `Division.CHUNKS`                 staged           pieces, one for each rank
        one message  on the CPU, or not uniform        staged           pieces, one for each segment (CHUNKS: and rank)
                     on accelerators: with an index    staged           cells
                     ... else up to `FEW_PIECES`       staged           pieces, one for each segment and rank
                     ... else                          staged           rows
                     in memory of a transport          there            pieces of that memory (`copy_out_of`)
        a codec's    with ``message_nbytes``           staged, or there  the codec

    A message is staged rank after rank: (world, bytes of a shard). With one message, the full parameters take their
    memory only when it is copied out. Where memory counts, that is late: by that time the group used before has given
    its own memory back, so staging costs no peak.

    Invariants: views are made once, of present memory, and stay. The buffer belongs to the all-gather stream, which
    allocates, fills and frees it. Staging has memory from `allocate` to `copy_out` or `release`, and at no other time.
    """

    source: Source
    """The holder of this rank's shard, which `fill` reads; set by a codec."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        *,
        packed: bool,
        into: GatherBuffer | None = None,
        indices: Indices | None = None,
        message_nbytes: int | None = None,
    ) -> None:
        """Allocate on the current stream (the all-gather stream) and make every view a step needs.

        With ``packed``, all travels in one message. With ``into``, the full parameters are those of another buffer,
        whose memory is present. It is for a multiple of this one's ranks: then its padding is at least as long, and all
        segments fit. With ``indices``, of this stream, rows may be distributed by one of them. With ``message_nbytes``, a
        codec has messages of so many bytes for each rank.
        """
        self._layout, self._rank, self.device, self.packed = layout, rank, device, packed
        self._dtypes = [dtypes[segment.params[0]] for segment in layout.segments]
        placement = block_offsets([*_numels_in_full(layout)], self._dtypes)
        self._borrows_memory = into is not None
        self.full: Buffer = Buffer(placement.nbytes, device) if into is None else into.full
        """The memory of the full parameters."""
        self.nbytes = placement.nbytes
        """Bytes of the full parameters, padding included."""
        self._starts: tuple[int, ...] = placement.starts if into is None else into._starts
        self.params = views_of_params(self.full, layout, self._starts, dtypes)
        """Per parameter, the data of its unsharded parameter."""
        self.outputs: list[Tensor] = []
        """Bytes that collectives gather into."""
        self.inputs: list[Tensor] = []
        """Parallel to `outputs`, the bytes that this rank sends, which lie in them."""
        self._packing = shard_offsets(layout, range(len(layout.segments)), self._dtypes)
        self.message_nbytes = self._packing.nbytes if message_nbytes is None else message_nbytes
        """Bytes of one rank's message, if all travels in one."""
        self._is_one_dtype = len(set(self._dtypes)) == 1
        uniform = self._is_one_dtype and message_nbytes is None
        self.dtype = self._dtypes[0] if uniform else torch.uint8
        """The dtype of a transport's memory for messages."""
        self._is_staged = [packed or not _is_zero_copy(layout, i) for i in range(len(self._dtypes))]
        """Per segment, whether it arrives elsewhere than its parameters lie."""
        self._targets = self._staged_targets()
        """Parts of the full parameters, parallel to `_staged_sources`."""
        self._cells: tuple[Tensor, Tensor] | None = None
        """Staged rows and full parameters, as cells that are copied by an index."""
        self._copy: Callable[[], object] | None = None
        """Copies what is staged to the full parameters; None if nothing is, or a codec does."""
        if not packed:
            self._arrange_in_place()
        else:
            self._arrange_in_one_message(indices, is_decoded=message_nbytes is not None)
        # Views are made of present memory only. Now only what `fill` would have allocated stays.
        if into is not None:
            self._staging.release()
        elif packed:
            self.full.release()

    def _arrange_in_place(self) -> None:
        pieces = self._pieces_in_place()
        self.own_shard = FlatShard([piece[self._rank] for piece in pieces], None)
        """This rank's pieces in the compute dtype: the shard is cast and copied into them."""
        self._copy = by_pieces(self._targets, self._staged_sources(pieces))

    def _arrange_in_one_message(self, indices: Indices | None, *, is_decoded: bool) -> None:
        world = self._layout.world
        self._staging = Buffer(self.message_nbytes * world, self.device)
        self._add_message(self._staging, 0, self.message_nbytes)
        self.rows = self._staging.view(torch.uint8, 0, (world, self.message_nbytes))
        """The message of each rank, if all travels in one."""
        if not is_decoded:
            self.own_shard = self.shard_in(self.rows)
            self._copy = self._copy_of_rows(indices)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it has now, staging included; full parameters of another buffer are that one's."""
        own_memory = 0 if self._borrows_memory else self.full.held_bytes
        return own_memory + self._staging.held_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of a gather's outputs that come from other ranks."""
        sent = sum(tensor.nbytes for tensor in self.inputs)
        return sent * (self._layout.world - 1)

    # --- what is made once ------------------------------------------------------------------------

    def _pieces_in_place(self) -> list[Tensor]:
        """Add a message for each segment, and return the ranks' pieces of each; staging has memory now."""
        layout, world = self._layout, self._layout.world
        numels = [segment.piece_numel for segment in layout.segments]
        staging = block_offsets(
            [n * world * flag for n, flag in zip(numels, self._is_staged, strict=True)],
            self._dtypes,
        )
        self._staging = Buffer(staging.nbytes, self.device)
        pieces = []
        for index, (numel, dtype) in enumerate(zip(numels, self._dtypes, strict=True)):
            staged = self._is_staged[index]
            buffer = self._staging if staged else self.full
            start = (staging.starts if staged else self._starts)[index]
            self._add_message(buffer, start, numel * dtype.itemsize)
            pieces.append(buffer.view(dtype, start, (world, numel)))
        return pieces

    def _add_message(self, buffer: Buffer, start: int, piece_bytes: int) -> None:
        if piece_bytes:  # a collective has nothing to do for parameters without elements
            own = start + self._rank * piece_bytes
            output = buffer.view(torch.uint8, start, (piece_bytes * self._layout.world,))
            self.outputs.append(output)
            self.inputs.append(buffer.view(torch.uint8, own, (piece_bytes,)))

    def _pieces_in(self, rows: Tensor) -> list[Tensor]:
        """Return the ranks' pieces of each segment, in one message of each rank."""
        pieces = []
        for segment, dtype, start in zip(
            self._layout.segments, self._dtypes, self._packing.starts, strict=True
        ):
            piece = rows[:, start : start + segment.piece_numel * dtype.itemsize]
            # Rows without a byte have no stride that could be another dtype's.
            pieces.append(piece.view(dtype) if piece.numel() else piece.to(dtype))
        return pieces

    def _staged_targets(self) -> list[Tensor]:
        layout, targets = self._layout, list[Tensor]()
        for index, segment in enumerate(layout.segments):
            if not self._is_staged[index]:
                continue
            param, start, dtype = segment.params[0], self._starts[index], self._dtypes[index]
            # Other aliases than `params`, whose versions writing would raise.
            if _is_zero_copy(layout, index):
                shape = (layout.world, segment.piece_numel)
                targets.append(self.full.view(dtype, start, shape))
            else:
                alias = self.full.view(dtype, start, layout.slots[param].shape)
                targets += rank_chunks(layout, param, alias)
        return targets

    def _staged_sources(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return parts of ``pieces``, which has those of all ranks for each segment."""
        layout, sources = self._layout, list[Tensor]()
        for index, piece in enumerate(pieces):
            if self._is_staged[index] and _is_zero_copy(layout, index):
                sources.append(piece)
            elif self._is_staged[index]:
                for rank in range(layout.world):
                    held = layout.piece(layout.segments[index].params[0], rank)
                    sources.append(piece[rank, : held.numel].view(held.shape))
        return sources

    def _copy_of_rows(self, indices: Indices | None) -> Callable[[], object] | None:
        """Choose the copy of `rows` to the full parameters: see the table."""
        targets, sources = self._targets, self._staged_sources(self._pieces_in(self.rows))
        self._in_pieces = by_pieces(targets, sources)
        # On accelerators one kernel copies contiguous tensors of one dtype. So the ranks' pieces are copied one by one
        # as long as they are few. Many are split by another kernel. Both take the host a time for each piece. With an
        # index the host does not know the pieces, and the device is done as soon; but the index takes memory.
        on_cpu = self.device.type == "cpu"
        if on_cpu or not self._is_uniform or not min(map(Tensor.numel, targets)):
            return self._in_pieces
        if indices is not None and can_be_indexed(self.nbytes, self.dtype):
            full = self.full.view(CELL_DTYPE, 0, (self.nbytes // CELL,))
            self._cells = self.rows.view(CELL_DTYPE).view(-1), full
            return by_cells(*self._cells, self._index(indices))
        if len(targets) * self._layout.world <= FEW_PIECES:
            unbound = (
                [part for each in side for part in each.unbind()] for side in (targets, sources)
            )
            return by_pieces(*unbound)
        order = sorted(range(len(self._dtypes)), key=self._packing.starts.__getitem__)
        return by_rows(self.rows.view(self.dtype), [targets[index] for index in order])

    @property
    def _is_uniform(self) -> bool:
        """Whether a rank's pieces are of one dtype, without gaps, and full parameters are made of them by splitting."""
        layout = self._layout
        numel = sum(segment.piece_numel for segment in layout.segments)
        return (
            self._is_one_dtype
            and numel * self.dtype.itemsize == self._packing.nbytes
            and all(slot.zero_copy for slot in layout.slots)
        )

    def _index(self, indices: Indices) -> Tensor:
        """Return the place that each cell of the full parameters is copied from."""
        layout = self._layout
        sizes = [segment.piece_numel * self.dtype.itemsize for segment in layout.segments]
        pieces = [*zip(sizes, self._packing.starts, self._starts, strict=True)]
        row = self.message_nbytes
        return cell_index(indices, self.device, layout.world, row, self.nbytes, pieces)

    def change_indices(self, indices: Indices | None) -> None:
        """Take the index from others, of the current stream; None if none can be made. For a group that changes streams."""
        if self._cells is not None:
            self._copy = self._in_pieces
            if indices is not None:
                self._copy = by_cells(*self._cells, self._index(indices))

    # --- in memory of a transport -----------------------------------------------------------------

    def shard_in(self, rows: Tensor) -> FlatShard:
        """This rank's pieces in ``rows``, bytes of shape (world, `message_nbytes`)."""
        each = [pieces[self._rank] for pieces in self._pieces_in(rows)]
        has_row = self._is_one_dtype and rows.numel() > 0
        return FlatShard(each, rows[self._rank].view(self._dtypes[0]) if has_row else None)

    def copy_out_of(self, rows: Tensor) -> None:
        """Distribute a message that was gathered in memory of a transport."""
        self.allocate_params()
        torch._foreach_copy_(self._targets, self._staged_sources(self._pieces_in(rows)))
        self._staging.release()

    # --- in every step ----------------------------------------------------------------------------

    def allocate(self) -> None:
        """Take memory to gather into, on the current stream (the all-gather stream)."""
        if not self.packed:
            self.full.allocate()
        if self._staging.nbytes:
            self._staging.allocate()

    def fill(self) -> None:
        """Take memory to gather into and copy this rank's shard to it, on the current stream."""
        # The cast into the buffer and the collective are on one stream, so no event is needed between them.
        self.allocate()
        self.source.copy_into(self.own_shard)

    def allocate_params(self) -> None:
        """Take memory for the full parameters of a packed gather, unless they have it."""
        if self.packed and not self.full.allocated:
            self.full.allocate()

    def copy_out(self) -> None:
        """Distribute staged messages; after the collective, on the stream that ran it.

        Before: a packed gather has staged everything. After: the full parameters are complete, and staging
        has no memory.
        """
        full = self.full
        present = full.storage.nbytes()
        if self.packed and not present:
            full.allocate()
        assert self.packed or present or not full.nbytes, "there must be memory to copy to"
        if self._copy is not None:
            self._copy()
            self._staging.release()

    def release(self) -> None:
        """Give the memory back."""
        self.full.release()
        if self._staging.storage.nbytes():  # the gather was not finished
            self._staging.release()


def _numels_in_full(layout: Layout) -> Iterator[int]:
    """Yield the number of elements of each segment's full parameters; with padding, if they are gathered in place."""
    for index, segment in enumerate(layout.segments):
        if _is_zero_copy(layout, index):
            yield segment.piece_numel * layout.world
        else:
            yield layout.slots[segment.params[0]].numel


def _is_zero_copy(layout: Layout, segment: int) -> bool:
    return layout.slots[layout.segments[segment].params[0]].zero_copy


def staged_chunks(
    layout: Layout,
    param: int,
    buffer: Buffer,
    start: int,
    dtype: torch.dtype,
    step: int | None = None,
) -> list[Tensor]:
    """The ranks' blocks of a CHUNKS parameter: the first at byte ``start``, the others ``step`` elements apart.

    By default they follow each other.
    """
    if step is None:
        step = layout.segments[layout.slots[param].segment].piece_numel
    return [
        buffer.view(dtype, start + rank * step * dtype.itemsize, layout.piece(param, rank).shape)
        for rank in range(layout.world)
    ]
