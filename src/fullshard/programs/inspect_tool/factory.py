"""Models of users: `module:function`, a callable without arguments that returns a module.

It is called with the meta device as the default one, so most models take no memory; what is somewhere else is moved there.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import ConfigurationError


class FactoryModel:
    """A model that a function returns."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: nn.Module | None = self._built()
        self.description = f"{type(self._first).__name__} of {name}"

    def build(self) -> nn.Module:
        """Return a model that no other caller has."""
        model, self._first = self._first or self._built(), None
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the items of the `ModuleList` with the most parameters: the layers of most models.

        Raises:
            ConfigurationError: there is no such list.
        """
        lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each)]
        if not lists:
            raise ConfigurationError(
                f"--groups blocks makes a group of each item of a ModuleList; {self.description} has none. Leave it out: "
                "--groups plan works for all models."
            )
        return [*max(lists, key=lambda each: sum(param.numel() for param in each.parameters()))]

    def _built(self) -> nn.Module:
        module_name, _, path = self._name.partition(":")
        if os.getcwd() not in sys.path:  # a command that is installed does not look there
            sys.path.insert(0, os.getcwd())
        try:
            module: Any = importlib.import_module(module_name)
            factory = reduce(getattr, path.split("."), module)
            with torch.device("meta"):
                model = factory()
        except Exception as error:
            raise ConfigurationError(
                f"{self._name} must be a callable without arguments that returns a module, importable from here. It raised "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(model, nn.Module):
            raise ConfigurationError(
                f"{self._name} must return a module; it returned {type(model).__name__}. Name a function that builds the model, "
                "or its class."
            )
        return model.to("meta")


def inputs_of(texts: Sequence[str]) -> list[Tensor]:
    """Return tensors on the meta device for descriptions such as `8x1024:int64`; the dtype is float32 if none is given.

    Raises:
        ConfigurationError: a description is wrong.
    """
    tensors = []
    for text in texts:
        sizes, _, dtype_name = text.partition(":")
        dtype = getattr(torch, dtype_name or "float32", None)
        if not re.fullmatch(r"\d+(x\d+)*", sizes) or not isinstance(dtype, torch.dtype):
            raise ConfigurationError(
                f"--input takes sizes and a dtype, such as 8x1024:int64 or 8x3x224x224; got {text}."
            )
        tensors.append(torch.empty([*map(int, sizes.split("x"))], dtype=dtype, device="meta"))
    return tensors
