"""Weights that a new run starts from (`model.weights`): of another run, a checkpoint of any format, a Hugging Face folder.

Only weights are taken. Step, schedule and optimizer begin anew. Names and shapes are compared with the model's before
the run's folder is touched, so that a wrong `model.weights` can be corrected by the same command.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fullshard.checkpoint.load_plan import load_source
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.source import MODEL, Source
from fullshard.checkpoint.sources.formats import open_source, with_base
from fullshard.checkpoint.sources.renamed_source import renamed
from fullshard.errors import CheckpointError, ConfigurationError, fault_paragraphs
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.export import newest_checkpoint
from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.origin import find_origin


@dataclass(frozen=True, slots=True)
class WeightsFit:
    """Fit of stored weights to a model, by the model's names."""

    fitting: frozenset[str]
    """Tensors of the model that are stored with the same shape; of a tied one, its first name."""
    missing: list[str]
    """Tensors of the model that are not stored."""
    unknown: list[str]
    """Stored tensors that the model does not have."""
    shapes: list[str]
    """Tensors that are stored with other shapes, and both shapes."""

    @property
    def is_complete(self) -> bool:
        """Whether exactly the tensors of the model are stored."""
        return not (self.missing or self.unknown or self.shapes)


def fit_of(model: nn.Module, source: Source) -> WeightsFit:
    """Compare stored weights with a model, which may be on the meta device."""
    state = model.state_dict(keep_vars=True)
    first = {tensor: name for name, tensor in reversed(state.items())}
    stored = {
        key.removeprefix(MODEL): info.shape
        for key, info in source.tensors.items()
        if key.startswith(MODEL)
    }
    stored |= {name: stored[other] for name, other in source.tied.items() if other in stored}
    found = {first[state[name]] for name in stored if name in state}
    shapes = {
        first[tensor]: f"{name}: {stored[name]}, not {tuple(tensor.shape)}"
        for name, tensor in state.items()
        if name in stored and stored[name] != tuple(tensor.shape)
    }
    return WeightsFit(
        fitting=frozenset(found - shapes.keys()),
        missing=[name for name, tensor in state.items() if first[tensor] not in found],
        unknown=[name for name in stored if name not in state],
        shapes=list(shapes.values()),
    )


def weights_path(weights: Path) -> Path:
    """Return the checkpoint that a path names: the newest of a run, or the path itself.

    Raises:
        CheckpointError: the run has no checkpoint.
    """
    origin = find_origin(weights, None)
    if origin.checkpoint is not None:
        return origin.checkpoint
    assert origin.run is not None, "other paths are checkpoints"
    return newest_checkpoint(origin.run)


def check_weights(config: RunConfig, source: ModelSource) -> None:
    """Raise unless the weights of a configuration fit its model. Each rank may call it by itself.

    Raises:
        ConfigurationError: there are no weights; or names or shapes differ, and all are named.
    """
    weights = config.model.weights
    if weights is None:
        return
    try:
        skeleton = source.build()
        with closing(_open(weights_path(weights), source, skeleton)) as stored:
            fit = fit_of(skeleton, stored)
    except CheckpointError as error:
        raise ConfigurationError(f"model.weights cannot be read: {error}") from error
    faults = [] if fit.is_complete else _faults(fit, strict=config.model.weights_strict)
    if faults:
        raise ConfigurationError(
            f"The weights of model.weights ({weights}) must have the names and shapes of the model, which is a "
            f"{source.description}.\n" + "\n".join(faults)
        )


def _faults(fit: WeightsFit, *, strict: bool) -> list[str]:
    if not strict:
        return [] if fit.fitting else ["None of its tensors is one of the model. Choose others."]
    remedy = "Choose the model that was trained, or set model.weights_strict = false to initialise them at random."
    left_out = (
        "Choose the model that was trained, or set model.weights_strict = false to leave them out."
    )
    return [
        *fault_paragraphs(fit.missing, "These of the model are not stored:", remedy),
        *fault_paragraphs(fit.shapes, "These are stored with other shapes:", remedy),
        *fault_paragraphs(fit.unknown, "These are stored, and the model lacks them:", left_out),
    ]


def load_weights(config: RunConfig, source: ModelSource, model: nn.Module) -> str:
    """Fill a sharded model with the weights of a configuration, and return a text about them. All ranks call it.

    Raises:
        CheckpointError: the weights cannot be read, or do not fit; the same on all ranks.
    """
    weights, ranks = config.model.weights, RankGroup()
    assert weights is not None, "the caller has looked"
    # The first rank decides for all: another run may write a newer checkpoint at the same time.
    path = ranks.on_first(lambda: weights_path(weights))
    skeleton = source.build()
    stored = ranks.on_each(lambda: _open(path, source, skeleton))
    if config.model.weights_strict:
        load_source(stored, model, without_optimizer=True, cast=True)
        return f"weights of {path}"
    fit = fit_of(skeleton, stored)
    source.fill(model, seed=config.run.seed)
    load_source(stored, model, without_optimizer=True, cast=True, only=fit.fitting)
    drawn, left_out = len(fit.missing) + len(fit.shapes), len(fit.unknown)
    return f"weights of {path} ({drawn} tensors drawn, {left_out} left out)"


def _open(path: Path, source: ModelSource, skeleton: nn.Module) -> Source:
    """Open stored weights; those of an exported model get the names that the model has here."""
    stored = with_base(open_source(path))
    rename = source.export_form().rename
    if rename is None:
        return stored
    names = {rename(name): name for name in skeleton.state_dict()}
    return renamed(stored, {new: name for new, name in names.items() if new is not None})
