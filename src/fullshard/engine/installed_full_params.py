"""Full parameters that stay on the modules of one state while a state dict is made or loaded.

They are installed before the state dict's first hook and uninstalled after its last one. An exception in between leaves
them installed, so the next code that needs the sharded parameters uninstalls them first: the next forward, the next
state dict, or a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from fullshard.engine import full_params
from fullshard.engine.param_group import FSDPParamGroup


class InstalledFullParams:
    """Groups of one state whose full parameters are on the modules, with these tensors."""

    def __init__(self) -> None:
        self._tensors: dict[FSDPParamGroup, Sequence[Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._tensors)

    @property
    def groups(self) -> Collection[FSDPParamGroup]:
        """The groups whose full parameters are installed."""
        return self._tensors.keys()

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors that were installed."""
        return (tensor for tensors in self._tensors.values() for tensor in tensors)

    def install(self, group: FSDPParamGroup, tensors: Sequence[Tensor]) -> None:
        """Put these full parameters of a group on its modules."""
        full_params.install_full_params(group, tensors)
        self._tensors[group] = tensors

    def uninstall(self, *, write: bool = False) -> None:
        """Put the sharded parameters back on the modules; with ``write``, with the values installed now."""
        while self._tensors:
            group, _ = self._tensors.popitem()
            full = full_params.uninstall_full_params(group)
            if write:
                full_params.write(group, full)
