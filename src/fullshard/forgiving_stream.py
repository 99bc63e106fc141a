"""Output that nobody may read any more: what shows progress must not end what makes it."""

from __future__ import annotations

import os
from typing import IO, cast


def forgiving(stream: IO[str]) -> IO[str]:
    """Return a `ForgivingStream` as what it is for whoever only writes to it."""
    return cast("IO[str]", ForgivingStream(stream))


class ForgivingStream:
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
        try:
            descriptor = self._stream.fileno()
        except OSError:
            return
        # What is still in the buffer is written when the process ends, which must not fail either.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
