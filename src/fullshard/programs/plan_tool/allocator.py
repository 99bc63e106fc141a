"""Rules of torch's caching allocator for a CUDA device's memory: bytes reserved for what is allocated.

The rules are those of torch's notes on memory management:

    sizes        rounded up to 512 bytes
    pools        one for requests of up to 1 MiB and one for larger ones, for each stream
    segments     what comes from the device: 2 MiB for small requests, 20 MiB for those below 10 MiB, and for larger ones
                 their own size, rounded up to 2 MiB
    best fit     the smallest free block of the pool that is large enough, of equal ones the one with the lowest address
    splitting    what is left of a block becomes a free block, from 512 bytes on in small pools, above 1 MiB in large ones
    merging      a block that becomes free joins its free neighbours in the segment
    giving back  nothing, until the device is full; then all segments that are wholly free

With expandable segments there is one segment for each pool, which grows at its end, by 2 MiB for small requests and by
20 MiB for others. Blocks are then split down to 512 bytes, and the block at the end is taken only if no other fits. A
full device takes back the parts of 2 or 20 MiB in which nothing is allocated.

Blocks of one stream are not used by another. The engine does not let torch watch over streams (it holds buffers until
events say that they are done), so a free block is free at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

MIB = 1 << 20
SMALLEST = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT_FROM = 10 * MIB
OWN_SEGMENT_MULTIPLE = 2 * MIB
LARGE_REMAINDER = MIB
_DISTANCE = 1 << 48
"""Bytes between the addresses of expandable segments."""


class _Block:
    """A part of a segment, either allocated or free."""

    __slots__ = ("address", "after", "before", "is_free", "pool", "size")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.is_free = False
        self.before: _Block | None = None
        self.after: _Block | None = None

    def split(self, size: int) -> _Block:
        """Keep that size, and return the block of the rest."""
        rest = _Block(self.pool, self.address + size, self.size - size)
        rest.before, rest.after = self, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after, self.size = rest, size
        return rest

    def join_next(self) -> None:
        """Take in the next block."""
        other = self.after
        assert other is not None
        self.size += other.size
        self.after = other.after
        if self.after is not None:
            self.after.before = self


class _Pool:
    """The free blocks of a stream, for small or for large requests."""

    __slots__ = ("_blocks", "_free", "end", "is_small", "next_address")

    def __init__(self, is_small: bool, address: int) -> None:
        self.is_small = is_small
        self._free: list[tuple[int, int]] = []
        """Sizes and addresses, sorted."""
        self._blocks: dict[int, _Block] = {}
        self.end: _Block | None = None
        """The last block of an expandable segment."""
        self.next_address = address

    def add(self, block: _Block) -> None:
        block.is_free = True
        insort(self._free, (block.size, block.address))
        self._blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self._free[bisect_left(self._free, (block.size, block.address))]
        del self._blocks[block.address]

    def best_fit(self, size: int) -> _Block | None:
        """Take the smallest block that is large enough; that at the end of an expandable segment only if no other is."""
        free = self._free
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        block = self._blocks[free[index][1]]
        if block is self.end and index + 1 < len(free):
            index += 1
            block = self._blocks[free[index][1]]
        del free[index]
        del self._blocks[block.address]
        block.is_free = False
        return block

    def free_blocks(self) -> list[_Block]:
        return list(self._blocks.values())


class CachingAllocator:
    """The state of a device's memory, from the first allocation on."""

    def __init__(self, *, capacity: int | None = None, expandable_segments: bool = False) -> None:
        """Begin with nothing.

        Args:
            capacity: The bytes of the device that torch can have; None for as many as it takes.
            expandable_segments: As in ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
        """
        self._capacity = capacity
        self._expands = expandable_segments
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._live: dict[int, _Block | None] = {}
        self._next_address = 0
        self.allocated = 0
        """Bytes of blocks that are in use, as ``torch.cuda.memory_allocated`` has them."""
        self.peak_allocated = 0
        self.reserved = 0
        """Bytes that were taken from the device, as ``torch.cuda.memory_reserved`` has them."""
        self.peak_reserved = 0
        self.missing = 0
        """Bytes by which the device is too small. A real one ends the run; this one goes on, to know the peak."""
        self.retries = 0
        """Number of times that the device was full and free segments were given back; each time the host waits for the device."""

    def allocate(self, memory: int, nbytes: int, stream: int = 0) -> None:
        """Give memory of that number its bytes, from the pool of a stream."""
        if memory in self._live:
            raise ValueError(f"memory {memory} is allocated already")
        self._live[memory] = self._take(nbytes, stream) if nbytes else None

    def free(self, memory: int) -> None:
        """Take the bytes back into the pool that they are from."""
        if (block := self._live.pop(memory)) is not None:
            self._give_back(block)

    def use_meanwhile(self, nbytes: int, stream: int = 0) -> None:
        """Allocate bytes and free them at once, as kernels do with their scratch memory."""
        if nbytes:
            self._give_back(self._take(nbytes, stream))

    def give_back_free_segments(self) -> None:
        """Give back what is wholly free, as ``torch.cuda.empty_cache`` does."""
        self._release()

    def reset_peaks(self) -> None:
        """Forget the peaks so far, as ``torch.cuda.reset_peak_memory_stats`` does."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def blocks(self) -> Iterator[tuple[int, int, bool]]:
        """Yield the address and the size of each block, and whether it is in use."""
        for block in self._live.values():
            if block is not None:
                yield block.address, block.size, True
        for pool in self._pools.values():
            for block in pool.free_blocks():
                yield block.address, block.size, False

    def _take(self, nbytes: int, stream: int) -> _Block:
        size = -(-nbytes // SMALLEST) * SMALLEST
        is_small = size <= SMALL_REQUEST
        pool = self._pools.get((stream, is_small))
        if pool is None:
            address = (len(self._pools) + 1) * _DISTANCE
            pool = self._pools[stream, is_small] = _Pool(is_small, address)
        block = pool.best_fit(size)
        if block is None:
            block = self._expanded(pool, size) if self._expands else self._segment(pool, size)
        rest = block.size - size
        if rest > LARGE_REMAINDER or (rest and (is_small or self._expands)):
            following = block.split(size)
            if pool.end is block:
                pool.end = following
            pool.add(following)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def _give_back(self, block: _Block) -> None:
        self.allocated -= block.size
        pool, before, after = block.pool, block.before, block.after
        if after is not None and after.is_free:
            pool.remove(after)
            block.join_next()
            if pool.end is after:
                pool.end = block
        if before is not None and before.is_free:
            pool.remove(before)
            before.join_next()
            if pool.end is block:
                pool.end = before
            block = before
        pool.add(block)

    def _segment(self, pool: _Pool, size: int) -> _Block:
        """Return a block that is a new segment."""
        if pool.is_small:
            length = SMALL_SEGMENT
        elif size < OWN_SEGMENT_FROM:
            length = LARGE_SEGMENT
        else:
            length = -(-size // OWN_SEGMENT_MULTIPLE) * OWN_SEGMENT_MULTIPLE
        if not self._has_room_for(length):
            self._retry()
        self._reserve(length)
        block = _Block(pool, self._next_address, length)
        self._next_address += length
        return block

    def _expanded(self, pool: _Pool, size: int) -> _Block:
        """Return the block at the end of the pool's segment, after it has grown."""
        if not self._has_room_for(_growth(pool, size)):
            self._retry()
        # The block at the end may be shorter now.
        length = _growth(pool, size)
        self._reserve(length)
        end = pool.end
        if end is not None and end.is_free:
            pool.remove(end)
            end.size += length
        else:
            grown = _Block(pool, pool.next_address, length)
            if end is not None:
                end.after, grown.before = grown, end
            pool.end = end = grown
        pool.next_address += length
        return end

    def _has_room_for(self, length: int) -> bool:
        return self._capacity is None or self.reserved + length <= self._capacity

    def _reserve(self, length: int) -> None:
        """Take bytes from the device, and note what it has too few."""
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self._capacity is not None:
            self.missing = max(self.missing, self.reserved - self._capacity)

    def _retry(self) -> None:
        self.retries += 1
        self._release()

    def _release(self) -> None:
        """Give everything back to the device that is wholly free."""
        for pool in self._pools.values():
            for block in pool.free_blocks():
                if self._expands:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        """Give back the whole parts of a free block of an expandable segment.

        torch fills such holes again. Here the segment grows at its end instead, which reserves as much.
        """
        granule = _granule(pool)
        base = block.address - block.address % _DISTANCE
        begin = base - (base - block.address) // granule * granule
        stop = base + (block.address + block.size - base) // granule * granule
        if begin >= stop:
            return
        self.reserved -= stop - begin
        pool.remove(block)
        if stop < block.address + block.size:
            pool.add(block.split(stop - block.address))
        # The gap between is no block: neighbours do not merge over it.
        hole_before, hole_after = block.before, block.after
        if begin > block.address:
            block.split(begin - block.address)
            pool.add(block)
            hole_before = block
        if hole_before is not None:
            hole_before.after = None
        if hole_after is not None:
            hole_after.before = None
        if pool.end is block and hole_after is None:
            pool.end = hole_before
            pool.next_address = begin


def _granule(pool: _Pool) -> int:
    """Return by what an expandable segment grows."""
    return SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT


def _growth(pool: _Pool, size: int) -> int:
    """Return how much an expandable segment must grow for a block at its end."""
    end, granule = pool.end, _granule(pool)
    present = end.size if end is not None and end.is_free else 0
    return -(-(size - present) // granule) * granule
