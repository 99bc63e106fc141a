"""A checkpoint whose tensors stand for those of a model under other names: averages, or weights of another library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fullshard.checkpoint.source import MODEL, Source, TensorInfo, averages_in
from fullshard.errors import CheckpointError
from fullshard.layout.blocks import Block


class RenamedSource:
    """A `Source` of a model only, which reads the tensors of another source. Closing it closes the other one."""

    def __init__(
        self, source: Source, keys: Mapping[str, str], tied: Mapping[str, str] | None = None
    ) -> None:
        """Make a source of some tensors.

        Args:
            source: Has the tensors.
            keys: For each key here, the key there.
            tied: See `Source.tied`; that of ``source`` by default.
        """
        self.path, self.format, self.extra = source.path, source.format, source.extra
        self.optimizer: Mapping[str, Any] | None = None
        self.tied = source.tied if tied is None else tied
        self.tensors: Mapping[str, TensorInfo] = {
            key: source.tensors[stored] for key, stored in keys.items()
        }
        self._source = source
        self._keys = keys

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        """Read a block of the tensor that stands for ``key``."""
        self._source.read(self._keys[key], wanted, out)

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        """Check the tensors that stand for these."""
        return self._source.verify([(self._keys[key], block) for key, block in wanted])

    def close(self) -> None:
        """Close the other source."""
        self._source.close()


def averages_as_model(source: Source) -> Source:
    """Return a checkpoint as one of a model that has the averages (`fullshard.optim.EMA`) as its weights.

    What is not averaged stays: frozen parameters, and buffers.

    Raises:
        CheckpointError: the checkpoint has no averages.
    """
    found = averages_in(source.optimizer)
    if found is None:
        raise CheckpointError(
            f"The averages of a model's parameters were asked for, and {source.path} has none. Train with optimizer.ema, "
            "or save with ema=."
        )
    averages = {MODEL + name: reference.key for name, reference in found[1].items()}
    keys = {key: averages.get(key, key) for key in source.tensors if key.startswith(MODEL)}
    return RenamedSource(source, keys)


def renamed(source: Source, names: Mapping[str, str]) -> Source:
    """Return the model of a checkpoint with other names: ``names`` has the new ones by the old; others stay."""

    def new(name: str) -> str:
        return names.get(name, name)

    stored = [key.removeprefix(MODEL) for key in source.tensors if key.startswith(MODEL)]
    keys = {MODEL + new(name): MODEL + name for name in stored}
    return RenamedSource(source, keys, {new(a): new(b) for a, b in source.tied.items()})
