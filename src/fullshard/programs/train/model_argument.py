"""The argument MODEL of programs that look at a model and do not train it: `inspect`, `plan`. It imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from fullshard.errors import ConfigurationError
from fullshard.files import local_path
from fullshard.programs.named_models.published import nearest_name, published_folder
from fullshard.programs.train.config import Size
from fullshard.programs.train.config_file import toml_value
from fullshard.programs.train.run_folder import CONFIG

DEFAULT_WORLD = 8
"""Ranks, if neither the command line nor the file names them."""

MAX_WORLD = 1_000_000
"""More ranks than any machine has. The mesh lists them all, so more would take too much memory and time."""


def is_factory(model: str) -> bool:
    """Say whether it is `module:function`."""
    return re.fullmatch(r"[\w.]+:[\w.]+", model) is not None and not Path(model).exists()


def file_and_settings(model: str, *, takes_factories: bool = True) -> tuple[Path | None, list[str]]:
    """Return the TOML file that MODEL stands for, if there is one, and the settings that it stands for.

    Args:
        model: As on the command line.
        takes_factories: Whether the program takes `module:function`; a message says so.

    Raises:
        ConfigurationError: it is nothing that is known.
    """
    path = local_path(model)
    if model in get_args(Size):
        return None, [f"model.size={model}"]
    if is_factory(model):
        return None, ["sharding.groups=plan"]
    if (path / CONFIG).is_file():
        return path / CONFIG, []
    if (path / "config.json").is_file():
        return None, [f"model.huggingface={toml_value(path)}"]
    if path.is_file():
        return path, []
    published = published_folder(model)
    if published is not None:
        return None, [f"model.huggingface={toml_value(published)}"]
    known = [
        f"a size ({', '.join(get_args(Size))})",
        "a published model (llama3-8b, gpt2, ...)",
        "a folder with a config.json of Hugging Face",
        "a run or its TOML file",
    ]
    if takes_factories:
        known.append("module:function, a callable that returns a model")
    near = nearest_name(model)
    raise ConfigurationError(
        f"A model must be {', '.join(known[:-1])}, or {known[-1]}; {model or 'an empty name'} is none of them."
        + (f" Did you mean {near}?" if near else "")
    )
