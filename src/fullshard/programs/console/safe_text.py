"""Texts that others wrote, for terminals and pages: names in files, values, messages, what a model writes.

A terminal obeys escape sequences: such a name could clear the screen, set the window's title, or hide other lines. And
half a character cannot be written at all. So whatever shows a text that may come from a file shows it through here.
"""

from __future__ import annotations


def safe_text(text: str) -> str:
    """A text without what a terminal would obey; it may have several lines."""
    return text if text.isprintable() else "".join(map(_shown, text))


def safe_line(text: str) -> str:
    """The same as one line, as the cell of a table."""
    return text if text.isprintable() else safe_text(text).replace("\n", "\\n").replace("\t", "\\t")


def _shown(character: str) -> str:
    """Escapes, marks of direction and the like as the number that they are."""
    if character.isprintable() or character in "\n\t":
        return character
    code = ord(character)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )
