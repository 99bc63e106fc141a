"""Dropout that is active in a forward without gradients: `model.eval()` was forgotten.

Every rank draws random numbers of its own. So ranks that generate text choose different tokens and may end after different
numbers of forwards; the others then wait for them in a gather. The warning comes before that, at the first such forward.
"""

from __future__ import annotations

import warnings

from torch import nn

from fullshard.errors import names_text

DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)

MOST_NAMES = 3
"""Most modules that the warning names."""


def active_dropout(root: nn.Module) -> list[str]:
    """Return the full names of modules that drop something now, as modules of torch, or by an attribute of that name."""
    return [
        name or type(root).__name__
        for name, module in root.named_modules()
        if module.training and _drops(module)
    ]


def _drops(module: nn.Module) -> bool:
    if isinstance(module, DROPOUT):
        return module.p > 0
    return any(
        "dropout" in name and isinstance(value, float) and value > 0
        for name, value in vars(module).items()
    )


def warn_of_active_dropout(root: nn.Module) -> None:
    """Warn if a model whose forward runs without gradients has active dropout."""
    names = active_dropout(root)
    if not names:
        return
    warnings.warn(
        f"model.eval() was not called: {type(root).__name__} runs without gradients in training mode, and its dropout is "
        f"active ({names_text(names, most=MOST_NAMES)}). Every rank draws its own random numbers, so ranks get different "
        "outputs; ranks that generate text would choose different tokens, end at different lengths, and wait for each other. "
        "Call model.eval() before, and model.train() after.",
        stacklevel=2,
    )
