"""The folders of published models, by their names. This file imports no torch."""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER = Path(__file__).parent


def published_names() -> list[str]:
    """Return the names of all published models that are known."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def published_folder(name: str) -> Path | None:
    """Return the folder of a published model; None if there is no such model."""
    return FOLDER / name if name in published_names() else None


def nearest_name(name: str) -> str | None:
    """Return the published name that is written most like a name, if any is."""
    names = {_letters(each): each for each in published_names()}
    near = difflib.get_close_matches(_letters(name), names, n=1, cutoff=0.75)
    return names[near[0]] if near else None


def _letters(name: str) -> str:
    """Return a name without what people write in different ways."""
    return "".join(each for each in name.lower() if each.isalnum())


def name_of(folder: Path) -> str | None:
    """Return the name of the published model whose folder this is; None if it is another folder."""
    return folder.name if folder.parent == FOLDER else None
