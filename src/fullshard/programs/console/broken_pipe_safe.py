"""Output whose reader may have gone.

A run must not end because its progress has no reader any more: `broken_pipe_safe` swallows such errors. A program that
does nothing but print ends with an error instead (`WatchedStream`).
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any, cast


def broken_pipe_safe(stream: IO[str]) -> IO[str]:
    """Return a stream that ignores errors of writing, for callers that only write and flush."""
    if isinstance(stream, WatchedStream):
        stream = stream.stream  # an error that is ignored must not count as lost output
    return cast("IO[str]", BrokenPipeSafeStream(stream))


class BrokenPipeSafeStream:
    """A text stream that is silent after the first error: its reader has left, its terminal is closed, its disk is full."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_broken = False

    @property
    def encoding(self) -> str | None:
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None)

    def isatty(self) -> bool:
        """Say whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return its descriptor; OSError if it has none."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write the text, or drop it after an error."""
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
        """Flush the stream, unless there was an error."""
        if not self._is_broken:
            try:
                self._stream.flush()
            except OSError:
                self._give_up()

    def _give_up(self) -> None:
        self._is_broken = True
        _redirect_to_null(self._stream)


def open_standard_streams() -> None:
    """Make sure that this process has all three standard streams, and that they take any text.

    A stream that was closed (`>&-`) is opened as the null device. Otherwise the next file that is opened would get its
    number, and what libraries and ranks print would go into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
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
        """Write to the stream, and remember an error."""
        try:
            return self.stream.write(text)
        except OSError as error:
            self._lost = error
            raise

    def lost(self) -> OSError | None:
        """Flush the stream, and return the error if anything could not be written. After an error it leads to the null device."""
        try:
            self.stream.flush()
        except OSError as error:
            self._lost = error
        if self._lost is not None:
            _redirect_to_null(self.stream)
        return self._lost


def _redirect_to_null(stream: IO[str]) -> None:
    """Redirect a stream to the null device: Python flushes its buffer when the process ends, and that must not fail."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
