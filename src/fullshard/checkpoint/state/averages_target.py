"""Averages of parameters (`fullshard.optim.EMA`) that a checkpoint is loaded into, whichever API wrote it."""

from __future__ import annotations

from fullshard.checkpoint.source import Source, averages_in
from fullshard.checkpoint.state.local_state import LocalModelState, LocalTensor, local_of
from fullshard.checkpoint.state.model_target import Faults, ReadRequest, StoredNames
from fullshard.checkpoint.state.optimizer_local_state import averaged_params
from fullshard.optim import EMA


class AveragesTarget:
    """Averages that are loaded into. They have their memory already, and files are read into it."""

    def __init__(self, ema: EMA, model: LocalModelState, source: Source) -> None:
        """Compare averages with a source that has some."""
        self.faults = Faults()
        self.notes: list[str] = []
        self.requests: list[ReadRequest] = []
        self._ema = ema
        saved = averages_in(source.optimizer)
        assert saved is not None, "the caller has looked"
        self._updates, references = saved
        names = StoredNames(model, source.tied, references)
        taken = set()
        for _, members, average in averaged_params(ema, model):
            for member in members:
                stored = names.stored(member.name)
                if stored is None:
                    self.faults.missing.append(f"{member.name}, in the averages")
                    continue
                taken.add(stored)
                key = references[stored].key
                info = source.tensors[key]
                local = member.part_of(local_of(average))
                if info.shape != member.shape:
                    self.faults.shapes.append(f"{key}: {info.shape}, not {member.shape}")
                elif parts := list(
                    LocalTensor(key, info.dtype, member.shape, member.sharding, local).parts()
                ):
                    self.requests.append(ReadRequest(key, parts))
        self.faults.unexpected += [
            f"{name}, in the averages" for name in references if name not in taken
        ]

    def install(self) -> None:
        """Take over the number of updates. All requests must have been read."""
        self._ema.updates = self._updates
