"""Output that nobody may read any more: what shows progress must not end what makes it.

Programs whose output is all they do end with an error instead (`WatchedStream`).
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any, cast


def broken_pipe_safe(stream: IO[str]) -> IO[str]:
    """Return a `BrokenPipeSafeStream` as what it is for whoever only writes to it."""
    if isinstance(stream, WatchedStream):
        stream = stream.stream  # what is forgiven is not lost
    return cast("IO[str]", BrokenPipeSafeStream(stream))


class BrokenPipeSafeStream:
    """A text stream that says nothing more once it cannot: its reader has left, its terminal is closed, its disk full."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_broken = False

    @property
    def encoding(self) -> str | None:
        """As the stream has it."""
        return getattr(self._stream, "encoding", None)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return its descriptor; OSError if it has none."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write, or forget it."""
        if not self._is_broken:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self.encoding or "ascii"
                self.write(text.encode(encoding, "backslashreplace").decode(encoding))
            except OSError:
                self._give_up()
        return len(text)

    def flush(self) -> None:
        """Let the reader have what was written, if there is one."""
        if not self._is_broken:
            try:
                self._stream.flush()
            except OSError:
                self._give_up()

    def _give_up(self) -> None:
        self._is_broken = True
        _redirect_to_null(self._stream)


def open_standard_streams() -> None:
    """Let this process have all three standard streams, and let them take any text.

    A stream that was closed (`>&-`) leads nowhere then. Without it, the next file that is opened would get its number,
    and what libraries and ranks print would go into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


class WatchedStream:
    """A text stream that remembers whether it could be written to."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self._lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """As the stream does."""
        try:
            return self.stream.write(text)
        except OSError as error:
            self._lost = error
            raise

    def lost(self) -> OSError | None:
        """Write what is still to be written; return why something could not be. Then the stream leads nowhere."""
        try:
            self.stream.flush()
        except OSError as error:
            self._lost = error
        if self._lost is not None:
            _redirect_to_null(self.stream)
        return self._lost


def _redirect_to_null(stream: IO[str]) -> None:
    """Let a stream take all it is given: what is in its buffer is written when the process ends, and must not fail."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
