"""One step of AdamW over strips: fragments, the exchange of shared blocks, fragments again, rows. See `adamw8bit`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import torch_border
from fullshard.optim.eight_bit.codes import SMALLEST_SCALE, largest
from fullshard.optim.eight_bit.replicas import ReplicaBucket
from fullshard.optim.eight_bit.strips import BlockState, Fragments, Rows, Strip
from fullshard.optim.eight_bit.update import (
    can_compile,
    codes,
    compiled,
    moments,
    step_numbers,
    stored_values,
    update_rows,
    updated,
)

_CHUNK_NUMEL = {"cpu": 1 << 16}
"""Elements computed with at once, by operators: on a CPU as many as its cache holds."""
_DEVICE_CHUNK_NUMEL = 1 << 24

_VARYING = (1, 8)
"""The arguments of `update_rows` that are other tensors in every step: the gradient, and the numbers."""

Averages = tuple[Tensor, Tensor]
"""Averages of gradients, and of their squares."""


def _chunk_numel(device: torch.device) -> int:
    return _CHUNK_NUMEL.get(device.type, _DEVICE_CHUNK_NUMEL)


def chunks_of_rows(rows: Iterable[Rows], strip: Strip) -> Iterator[Rows]:
    """Yield rows in parts that are computed at once."""
    count = max(_chunk_numel(strip.memory.device) // strip.size, 1)
    for each in rows:
        for done in range(0, each.count, count):
            yield Rows(
                each.start + done * strip.size, min(count, each.count - done), each.slot + done
            )


def chunks_of_fragments(fragments: Fragments, width: int) -> Iterator[Fragments]:
    """Yield fragments in parts that are computed at once."""
    count = max(_chunk_numel(fragments.starts.device) // width, 1)
    if 0 < len(fragments) <= count:
        yield fragments  # itself: it keeps what it has computed
        return
    for done in range(0, len(fragments), count):
        yield fragments.part(done, done + count)


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """Parameters of a strip that are updated with the same numbers."""

    strip: Strip
    members: Sequence[int]
    """The parameters, by their numbers in the strip."""
    rows: Sequence[Rows]
    fragments: Fragments
    gradient: Tensor
    """The gradient of the whole strip."""
    numbers: Tensor
    old: Averages | None
    """Averages in fp32 in place of the codes; of one parameter."""
    start: int
    """The first element of `old` in the strip."""

    @property
    def params(self) -> Sequence[nn.Parameter]:
        params = self.strip.params
        if len(self.members) == len(params):
            return params
        return [params[number] for number in self.members]

    def update_rows(self, compile: bool | None) -> None:
        strip, size = self.strip, self.strip.size
        device = strip.memory.device
        is_compiled = can_compile(device) if compile is None else compile
        note_kernel = torch_border.device_for(device).note_kernel
        for rows in self.rows if is_compiled else chunks_of_rows(self.rows, strip):
            begin, end = rows.start, rows.start + rows.count * size
            gradient = self.gradient
            if rows.count * size < gradient.numel():
                gradient = gradient[begin:end]
            gradient = gradient.view(-1, size)
            old = None
            if self.old is not None:
                span = slice(begin - self.start, end - self.start)
                old = (self.old[0][span].view(-1, size), self.old[1][span].view(-1, size))
            elif is_compiled and (repeat := strip.repeats.get((rows, gradient.dtype))):
                repeat(gradient, self.numbers)
                continue
            # Parts that are computed at once are many, so their views are not kept.
            param, *state = strip.views(rows, keep=is_compiled)
            arguments: tuple[Any, ...] = (param, gradient, old, *state, self.numbers)
            if not is_compiled:
                update_rows(*arguments)
                continue
            if note_kernel is not None:
                averages = state[:4] if old is None else old
                read = (param, gradient, *averages, strip.blocks[: rows.count])
                note_kernel("AdamW8bit.update_rows", read, (param, *state[:4]))
                continue
            found = compiled().run(arguments, varying=_VARYING)
            if old is None:
                strip.repeats[rows, gradient.dtype] = found


class _Batch:
    """Fragments of several strips that are computed at once."""

    def __init__(self, parts: Sequence[tuple[_Item, Fragments]], width: int) -> None:
        self._parts = parts
        self._width = width
        self._slots = torch.cat([fragments.slots for _, fragments in parts])
        self._numbers = parts[0][0].numbers
        self.device = self._slots.device

    def find_maxima(self, table: Tensor, maxima: Tensor) -> None:
        """Find the largest magnitudes of new averages in each block."""
        for row, values in zip(maxima, self._averages(table, self._elements()), strict=True):
            row.scatter_reduce_(0, self._slots, largest(values), "amax")

    def update(self, table: Tensor, scales: Tensor) -> None:
        """Update parameters and codes, with the scales of the table before and the new ones after."""
        elements = self._elements()
        means, squares = self._averages(table, elements)
        param = torch.cat([item.strip.memory[at] for (item, _), (at, _) in self._zip(elements)])
        param = updated(param, means, squares, self._numbers).to(param.dtype)
        new = (scales[0, self._slots], scales[1, self._slots])
        indices = torch.cat([each for _, each in elements])
        found = codes(means, squares, new, indices, self._numbers)
        begin = 0
        for (item, fragments), (places, _) in self._zip(elements):
            span = slice(begin, begin + len(fragments))
            begin = span.stop
            item.strip.memory[places] = param[span]
            for own, each in zip(item.strip.codes, found, strict=True):
                own[places] = each[span]

    def keep_scales(self, table: Tensor, scales: Tensor) -> None:
        """Write the new scales to the table."""
        table[:, self._slots] = scales[:, self._slots]

    def _elements(self) -> list[tuple[Tensor, Tensor]]:
        return [fragments.elements(self._width, keep=True) for _, fragments in self._parts]

    def _zip(self, elements: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Any]:
        return zip(self._parts, elements, strict=True)

    def _averages(self, table: Tensor, elements: Sequence[tuple[Tensor, Tensor]]) -> Averages:
        """Return the new averages. They are computed twice, before and after the exchange, and are the same."""
        gradient = torch.cat([item.gradient[at] for (item, _), (at, _) in self._zip(elements)])
        if self._parts[0][0].old is None:
            both = torch.cat(
                [item.strip.codes[:, at] for (item, _), (at, _) in self._zip(elements)], 1
            )
            old = stored_values(*both, *table[:, self._slots])
        else:
            found = [
                (item.old[0][at - item.start], item.old[1][at - item.start])
                for (item, _), (at, _) in self._zip(elements)
            ]
            old = (torch.cat([m for m, _ in found]), torch.cat([s for _, s in found]))
        return moments(gradient, *old, self._numbers)


class BlockStep:
    """One step: what has gradients is added, then `run`."""

    def __init__(self, blocks: BlockState, compile: bool | None) -> None:
        self._blocks = blocks
        self._compile = compile
        self._items: list[_Item] = []
        self._numbers: dict[tuple[int, int, torch.device], Tensor] = {}
        self._received: list[nn.Parameter] = []
        """Parameters of which other replicas may have updated parts."""

    def add(
        self,
        strip: Strip,
        numbers: Sequence[int],
        gradient: Tensor,
        group: Mapping[str, Any],
        count: int,
        old: Averages | None,
    ) -> None:
        """Add parameters of a strip, by their numbers in it.

        Args:
            strip: The strip.
            numbers: Those with the same ``count``; one, if it has ``old``.
            gradient: That of the strip.
            group: The options.
            count: Number of this step, from 1.
            old: Averages in fp32 that replace the codes.
        """
        key = (strip.group, count, strip.memory.device)
        if key not in self._numbers:
            self._numbers[key] = step_numbers(group, count, strip.memory.device)
        rows, fragments = strip.parts(numbers)
        start = max(strip.starts[numbers[0]], 0)
        self._items.append(
            _Item(strip, numbers, rows, fragments, gradient, self._numbers[key], old, start)
        )

    @property
    def written(self) -> list[nn.Parameter]:
        """The parameters that `run` has written to."""
        found = [param for item in self._items for param in item.params]
        return list(dict.fromkeys([*found, *self._received])) if self._received else found

    def run(self) -> None:
        """Update everything. Collective, if ranks share blocks, also where nothing was added."""
        batches = list(self._batches())
        if batches or self._blocks.has_shared_blocks:
            self._update_fragments(batches)
        self._update_rows()
        for item in self._items:
            if item.old is not None:  # in codes now
                del item.strip.old[item.members[0]]

    def _update_fragments(self, batches: Sequence[_Batch]) -> None:
        """Find the scales of blocks that fragments belong to, with other ranks where these have parts; then update."""
        blocks = self._blocks
        maxima = {device: torch.zeros_like(table) for device, table in blocks.tables.items()}
        for batch in batches:
            batch.find_maxima(blocks.tables[batch.device], maxima[batch.device])
        blocks.exchange(maxima)
        scales = {device: found.clamp_(min=SMALLEST_SCALE) for device, found in maxima.items()}
        for batch in batches:
            batch.update(blocks.tables[batch.device], scales[batch.device])
        for batch in batches:  # not before: several batches may have parts of one block
            batch.keep_scales(blocks.tables[batch.device], scales[batch.device])

    def _update_rows(self) -> None:
        """Update rows bucket by bucket. Replicas gather each bucket while the next one is updated."""
        by_strip: dict[int, list[_Item]] = {}
        for item in self._items:
            by_strip.setdefault(id(item.strip), []).append(item)
        on_its_way: ReplicaBucket | None = None
        for bucket, strips in self._blocks.turns:
            for item in (item for strip in strips for item in by_strip.get(id(strip), ())):
                item.update_rows(self._compile)
            if bucket is not None and bucket.is_trained:
                bucket.start()
                self._received += bucket.params
            if on_its_way is not None:
                on_its_way.land()
            on_its_way = bucket

    def _batches(self) -> Iterator[_Batch]:
        """Yield all fragments, in batches of one kind and of limited size."""
        width = self._blocks.width
        by_kind: dict[Any, list[tuple[_Item, Fragments]]] = {}
        for item in self._items:
            for part in chunks_of_fragments(item.fragments, width):
                kind = (
                    item.strip.memory.dtype,
                    item.gradient.dtype,
                    id(item.numbers),
                    item.old is None,
                )
                by_kind.setdefault(kind, []).append((item, part))
        for parts in by_kind.values():
            limit = max(_chunk_numel(parts[0][0].strip.memory.device) // width, 1)
            taken: list[tuple[_Item, Fragments]] = []
            for item, part in parts:
                if taken and sum(len(each) for _, each in taken) + len(part) > limit:
                    yield _Batch(taken, width)
                    taken = []
                taken.append((item, part))
            yield _Batch(taken, width)
