"""A checkpoint whose model has the averages of its parameters (`fullshard.optim.EMA`) in place of the trained weights."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fullshard.checkpoint.source import MODEL, Source, averages_in
from fullshard.errors import CheckpointError
from fullshard.plan.blocks import Block


def averages_as_model(source: Source) -> Source:
    """Return a checkpoint as one of a model that has the averages as its weights, without an optimizer.

    What is not averaged stays: frozen parameters, and buffers.

    Raises:
        CheckpointError: the checkpoint has no averages.
    """
    return _Averages(source)


class _Averages:
    """A `Source` that reads averages for weights. Closing it closes the other one."""

    def __init__(self, source: Source) -> None:
        found = averages_in(source.optimizer)
        if found is None:
            raise CheckpointError(
                f"The averages of a model's parameters were asked for, and {source.path} has none. Train with optimizer.ema, "
                "or save with ema=."
            )
        self.path, self.format = source.path, source.format
        self.tied, self.extra, self.optimizer = source.tied, source.extra, None
        self._source = source
        self._keys = {MODEL + name: reference.key for name, reference in found[1].items()}
        self.tensors = {
            key: source.tensors[self._key(key)] for key in source.tensors if key.startswith(MODEL)
        }

    def _key(self, key: str) -> str:
        return self._keys.get(key, key)

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        self._source.read(self._key(key), wanted, out)

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        return self._source.verify([(self._key(key), block) for key, block in wanted])

    def close(self) -> None:
        self._source.close()
