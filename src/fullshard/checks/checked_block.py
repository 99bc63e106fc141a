"""A block of a program in which accesses, marks and waits are written down, and whose races are found at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from fullshard.checks.memory_names import named_storages
from fullshard.checks.race_report import race_text, stream_namer
from fullshard.checks.stream_order import Access, Entry, Race, Taken, find_races
from fullshard.errors import StreamOrderError, UsageError


class CheckedBlock(ABC):
    """A block that is checked; what ``with fullshard.debug("streams")`` gives."""

    def __init__(self, *, raises: bool = True) -> None:
        """Make a check; with ``raises`` False, races are kept in `races` and `text` only."""
        self._raises = raises
        self._stack = ExitStack()
        self.races: list[Race] = []
        """Pairs of accesses that are not ordered; known after the block."""
        self.text = ""
        """The same in words; empty if there are none."""

    @property
    @abstractmethod
    def program(self) -> list[Entry]:
        """The accesses, marks and waits that the host has issued so far."""

    @property
    @abstractmethod
    def stream_names(self) -> Sequence[str]:
        """The names of streams, by number."""

    @abstractmethod
    def enter(self, stack: ExitStack) -> None:
        """Begin to write down."""

    @abstractmethod
    def memory_by_storage(self) -> dict[int, int]:
        """Return for each memory, the storage that has it or had it, as `torch_border.id_of_storage` numbers storages."""

    @property
    def accesses(self) -> int:
        """Number of accesses so far."""
        return sum(isinstance(each, Access) for each in self.program)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.enter(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.races = find_races(self.program)
                self.text = self._text()  # while memory has its names
                self._refuse_to_say_nothing()
        finally:
            self._stack.__exit__(kind, error, trace)
        if self.races and self._raises:
            raise StreamOrderError(self.text, self.races)

    def _refuse_to_say_nothing(self) -> None:
        if self._raises and not self.accesses:
            raise UsageError(
                "fullshard.debug('streams') has seen no access to memory, so it proves nothing. Train within the block, on the "
                "GPU, or on the meta device with world_size given; see docs/streams.md."
            )

    def _text(self) -> str:
        if not self.races:
            return ""
        names = dict(named_storages())
        storages = self.memory_by_storage()
        taken = {each.memory: each.place for each in self.program if isinstance(each, Taken)}

        def name_of(memory: int) -> str:
            name = names.get(storages.get(memory, 0))
            place = taken.get(memory)
            return name or f"memory taken at {place[0] if place else 'a place before the block'}"

        return race_text(self.races, stream_namer(self.stream_names), name_of)
