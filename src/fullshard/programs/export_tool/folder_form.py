"""A model that transformers knows from a folder: for checkpoints of which only the weights are known."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fullshard.checkpoint.sources.formats import use_source
from fullshard.errors import CheckpointError, names_text
from fullshard.programs.train.config import ModelSection, RunConfig
from fullshard.programs.train.exported_model import ExportForm
from fullshard.programs.train.stored_weights import fit_of
from fullshard.programs.train.transformers_model import TransformersModel


def form_of_folder(folder: Path, checkpoint: Path) -> ExportForm:
    """Return the form of the model in a folder of Hugging Face, for the weights of a checkpoint.

    Raises:
        ConfigurationError: the folder has no model that transformers knows.
        CheckpointError: the checkpoint's weights are not those of the model.
    """
    model = TransformersModel(RunConfig(model=ModelSection(huggingface=folder))).build()
    fit = use_source(checkpoint, partial(fit_of, model))
    faults = [
        *_line("missing", fit.missing),
        *_line("unknown", fit.unknown),
        *_line("wrong", fit.shapes),
    ]
    if faults:
        raise CheckpointError(
            f"The weights of {checkpoint} must have the names and shapes of a {type(model).__name__}, which is the model of "
            f"{folder / 'config.json'}:\n  "
            + "\n  ".join(faults)
            + "\nGive the folder of the model that was trained; or rename weights with fullshard.checkpoint.save_huggingface(rename=...)."
        )
    return ExportForm(companions=(folder,))


def _line(kind: str, names: list[str]) -> list[str]:
    return [f"{kind}: {names_text(names)}"] if names else []
