"""A model that transformers knows from a folder: for checkpoints of which only the weights are known."""

from __future__ import annotations

from pathlib import Path

from fullshard.checkpoint.formats import use_source
from fullshard.checkpoint.source import MODEL, Source
from fullshard.errors import CheckpointError, names_text
from fullshard.programs.train.config import ModelSection, RunConfig
from fullshard.programs.train.exported_model import ExportForm
from fullshard.programs.train.transformers_model import TransformersModel


def form_of_folder(folder: Path, checkpoint: Path) -> ExportForm:
    """Return the form of the model in a folder of Hugging Face, for the weights of a checkpoint.

    Raises:
        ConfigurationError: the folder has no model that transformers knows.
        CheckpointError: the checkpoint's weights are not those of the model.
    """
    model = TransformersModel(RunConfig(model=ModelSection(huggingface=folder))).build()
    state = model.state_dict(keep_vars=True)
    first = {tensor: name for name, tensor in reversed(state.items())}

    def faults_of(source: Source) -> list[str]:
        stored = {
            key.removeprefix(MODEL): info.shape
            for key, info in source.tensors.items()
            if key.startswith(MODEL)
        }
        stored |= {name: stored[other] for name, other in source.tied.items() if other in stored}
        by_tensor = {first[state[name]] for name in stored if name in state}
        missing = [name for name, tensor in state.items() if first[tensor] not in by_tensor]
        others = [name for name in stored if name not in state]
        shapes = [
            f"{name} is {stored[name]} and not {tuple(tensor.shape)}"
            for name, tensor in state.items()
            if name in stored and stored[name] != tuple(tensor.shape)
        ]
        return [*_line("missing", missing), *_line("unknown", others), *_line("wrong", shapes)]

    faults = use_source(checkpoint, faults_of)
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
