"""Source of a run's model: the built-in decoder, or transformers.

The loop knows a model only as a `ModelSource`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.exported_model import ExportForm
from fullshard.programs.train.tokenizer import Tokenizer


class ModelSource(Protocol):
    """Source of a model, with all that depends on the source."""

    vocabulary: int
    """All tokens are below it."""

    description: str
    """Text for people."""

    tokenizer: Tokenizer
    """The tokenizer of the model's tokens."""

    def build(self) -> nn.Module:
        """Return the model; its parameters are on the meta device, its buffers have their values."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers of a model that was built here and is not sharded yet, in the order of forward."""

    def fill(self, model: nn.Module, *, seed: int) -> None:
        """Give a sharded and materialised model the weights it starts with. All ranks call it.

        The values do not depend on the API, the number of ranks, or the device.
        """

    def scores(self, model: nn.Module, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return the scores (rows, length, vocabulary) of the token after each of `tokens` (rows, length).

        With ``segments``, numbers of the same shape, no token sees one that has another number.
        """

    def export_form(self) -> ExportForm:
        """Return how transformers knows the model."""


def open_model(config: RunConfig) -> ModelSource:
    """Return the model of a run.

    Raises:
        ConfigurationError: there is no such model.
    """
    # Imported when needed: transformers is optional, and takes seconds.
    if config.model.huggingface is not None:
        from fullshard.programs.train.transformers_model import TransformersModel

        return TransformersModel(config)
    from fullshard.programs.train.built_in import BuiltInDecoder

    return BuiltInDecoder(config)
