"""Places in code where the host is, as far as readers want to know: lines of fullshard and of the user, none of torch."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

from fullshard.checks.stream_order import Place

_DEPTH = 3
"""Lines of fullshard that are shown. Fewer would not tell the callers of a shared function apart."""
_PACKAGE = Path(__file__).parents[1]
_HIDDEN = tuple(str(_PACKAGE / name) for name in ("checks", "virtual", "torch_border"))
_FOREIGN = (str(Path(torch.__file__).parent), str(Path(functools.__file__).parent))


def here() -> Place:
    """Return the innermost lines of fullshard, and the user's line that led there."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = _name_of(frame.f_code)
        if name is not None:
            is_own, text = name
            if not is_own:
                found.append(f"{text.format(line=frame.f_lineno)}")
                break
            if len(found) < _DEPTH:
                found.append(text.format(line=frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@functools.cache
def _name_of(code: CodeType) -> tuple[bool, str] | None:
    """Return whether code is fullshard's, and how its lines are named; None for code that is left out."""
    path = code.co_filename
    if path.startswith(str(_PACKAGE)):
        if path.startswith(_HIDDEN):
            return None
        return True, f"{Path(path).relative_to(_PACKAGE.parent)}:{{line}} {code.co_qualname}"
    if path.startswith(("<", *_FOREIGN)):
        return None
    return False, f"{Path(path).name}:{{line}} {code.co_qualname}"
