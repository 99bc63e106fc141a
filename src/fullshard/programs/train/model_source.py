"""What is trained: the built-in decoder, or a model of transformers.

The loop knows a model through `ModelSource` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.tokenizer import Tokenizer


class ModelSource(Protocol):
    """Where a model comes from, and all that depends on which one it is."""

    vocabulary: int
    """Tokens are below it."""

    description: str
    """In words."""

    tokenizer: Tokenizer
    """What its tokens mean."""

    def build(self) -> nn.Module:
        """Return the model; its parameters are on the meta device, its buffers have their values."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers of a model that was built here and not sharded yet, in the order of forward."""

    def fill(self, model: nn.Module, *, seed: int) -> None:
        """Give a sharded and materialised model the weights it starts with. All ranks call it.

        The values do not depend on the door, the number of ranks, or the device.
        """

    def scores(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return the scores (rows, length, vocabulary) of the token after each of `tokens` (rows, length)."""

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write a folder that transformers loads, with configuration and tokenizer. All ranks call it."""


def open_model(config: RunConfig) -> ModelSource:
    """Return what a run trains.

    Raises:
        ConfigurationError: there is no such model.
    """
    # Imported when needed: transformers is not there for everybody, and takes seconds.
    if config.model.huggingface is not None:
        from fullshard.programs.train.transformers_model import TransformersModel

        return TransformersModel(config)
    from fullshard.programs.train.built_in import BuiltInDecoder

    return BuiltInDecoder(config)
