"""Texts from files, made safe to show on terminals and pages: names, values, messages, samples of a model.

Terminals obey escape sequences, so a name in a file could clear the screen, set the window's title or hide other lines.
Lone surrogates cannot be encoded at all. So every text that may come from a file is shown through these functions.
"""

from __future__ import annotations


def safe_text(text: str) -> str:
    """Return the text with control characters escaped; newlines and tabs stay."""
    return text if text.isprintable() else "".join(map(_shown, text))


def safe_line(text: str) -> str:
    """Return the text as one line: newlines and tabs are escaped, too."""
    return text if text.isprintable() else safe_text(text).replace("\n", "\\n").replace("\t", "\\t")


def _shown(character: str) -> str:
    """Return a character, or its number as an escape: control characters, marks of direction and the like."""
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
