"""The store of the default process group, used in a thread of its own.

A store's operation can block without limit: the process that serves the store may be stopped. So the watchdog's thread
never calls it. It hands operations to this client's thread, and waits for their results for some seconds only.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, TimeoutError as LateError
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

LIMIT_S = 3.0
"""Longest time of an operation."""
CHUNK = 1024
"""Most keys that one operation reads."""


class KeyStore(Protocol):
    """The methods that the watchdog needs of a store; `torch.distributed.Store` has them."""

    def set(self, key: str, value: str) -> Any:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """Return a value; waits for it."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Store a value if the present one is as expected, "" for none; return the value that is there then."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values; waits for them."""


class StoreFailedError(Exception):
    """The store does not answer, or is gone."""

    def __init__(self, text: str, *, is_late: bool) -> None:
        super().__init__(text)
        self.is_late = is_late
        """Whether it has not answered in time, rather than failed at once."""


class StoreOperations(ABC):
    """The operations of the watchdog on a store; its keys begin with a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    @abstractmethod
    def _do(self, operation: Callable[[KeyStore], T], limit_s: float = LIMIT_S) -> T:
        """Return the result of an operation; it may take ``limit_s``."""

    def set(self, key: str, value: str, limit_s: float = LIMIT_S) -> None:
        """Store a value."""
        self._do(lambda store: store.set(self._prefix + key, value), limit_s)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        return self._do(lambda store: store.add(self._prefix + key, amount))

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        names = [self._prefix + key for key in keys]
        return self._do(
            lambda store: all(
                store.check(names[first : first + CHUNK]) for first in range(0, len(names), CHUNK)
            )
        )

    def set_and_has(self, key: str, value: str, other: str) -> bool:
        """Store a value, and return whether another key is there."""
        name, sought = self._prefix + key, self._prefix + other

        def operation(store: KeyStore) -> bool:
            store.set(name, value)
            return store.check([sought])

        return self._do(operation)

    def claim(self, key: str, value: str, limit_s: float = LIMIT_S) -> bool:
        """Store a value unless there is one; return whether this value is there now."""
        name = self._prefix + key
        return self._do(lambda store: store.compare_set(name, "", value), limit_s) == value.encode()

    def find(self, key: str) -> bytes | None:
        """Return a value, or None if there is none."""
        name = self._prefix + key
        return self._do(lambda store: store.get(name) if store.check([name]) else None)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return values that are there."""
        names = [self._prefix + key for key in keys]
        return self._do(
            lambda store: [
                value
                for first in range(0, len(names), CHUNK)
                for value in store.multi_get(names[first : first + CHUNK])
            ]
        )


class OpenStore(StoreOperations):
    """A store whose operations may block."""

    def __init__(self, store: KeyStore, prefix: str) -> None:
        super().__init__(prefix)
        self._store = store

    def _do(self, operation: Callable[[KeyStore], T], limit_s: float = LIMIT_S) -> T:
        return operation(self._store)


class StoreClient(StoreOperations):
    """A store whose operations never block for long. One thread uses it at a time."""

    def __init__(self, store: Callable[[], KeyStore], prefix: str) -> None:
        """Use the store that ``store`` returns, which is called in the client's thread; keys begin with ``prefix``."""
        super().__init__(prefix)
        self._pending: _Call | None = None
        """The last operation that was handed over."""
        self._failure: StoreFailedError | None = None
        """The reason why the store can never be used again: a connection that has broken is not made anew."""
        self.num_done = 0
        """Number of operations that have come back in time."""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=_serve, args=(store, self._calls), name="fullshard-watchdog-store", daemon=True
        )
        self.thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether an operation has not come back."""
        return self._pending is not None and not self._pending.is_over

    def close(self) -> None:
        """Let the thread end after its present operation."""
        self._calls.put(None)

    def _do(self, operation: Callable[[KeyStore], T], limit_s: float = LIMIT_S) -> T:
        if self._failure is not None:
            raise self._failure
        if self.is_stuck:
            raise StoreFailedError("the store does not answer", is_late=True)
        self._pending = call = _Call(operation)
        result: Future[T] = call.result
        self._calls.put(call)
        try:
            found = result.result(limit_s)
            self.num_done += 1
            return found
        except Exception as error:
            if isinstance(error, LateError) and not result.done():
                result.cancel()  # or it would be done much later, when other things are true
                text = f"the store has not answered for {limit_s:.0f} s"
                raise StoreFailedError(text, is_late=True) from None
            reason = str(error).partition("\n")[0]
            self._failure = StoreFailedError(f"the store is gone ({reason})", is_late=False)
            raise self._failure from error


class _Call:
    """An operation that is handed to the thread."""

    def __init__(self, operation: Callable[[KeyStore], Any]) -> None:
        self.operation = operation
        self.result: Future[Any] = Future()
        self.is_over = False
        """Whether the thread has done it, or left it out since it was cancelled."""


def _serve(store: Callable[[], KeyStore], calls: queue.SimpleQueue[_Call | None]) -> None:
    opened: KeyStore | None = None
    while (call := calls.get()) is not None:
        try:
            if opened is None:
                opened = store()  # which may take long
            is_wanted = call.result.set_running_or_notify_cancel()
            found = call.operation(opened) if is_wanted else None
        except BaseException as error:
            call.is_over = True  # before the result, with which the next operation comes
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                call.result.set_exception(error)
        else:
            call.is_over = True
            if is_wanted:
                call.result.set_result(found)
