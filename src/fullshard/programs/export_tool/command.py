"""The subcommand `fullshard export`.

Exit codes: 0; 2 with one message if the model cannot be exported, and then the target is unchanged; 130 after Ctrl-C.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fullshard.errors import ConfigurationError, size_text
from fullshard.programs.checkpoint_tool.command import errors_as_exit_codes
from fullshard.programs.console.tables import print_line
from fullshard.programs.given_path import existing_path, given_path
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.exported_model import ExportMark, check_target
from fullshard.programs.train.origin import Origin, find_origin
from fullshard.programs.version_option import Version

if TYPE_CHECKING:
    from fullshard.programs.train.exported_model import ExportForm


def export(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            parser=existing_path,
            show_default=False,
            help="The folder of a run, or a checkpoint of any format.",
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", show_default="the newest", help="Which checkpoint."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            parser=given_path,
            metavar="FOLDER",
            show_default="RUN/model",
            help="New, empty, or an earlier export, which is replaced.",
        ),
    ] = None,
    ema: Annotated[
        bool,
        typer.Option(
            "--ema",
            help="Averages of the parameters (optimizer.ema of a run), not trained weights.",
        ),
    ] = False,
    config_from: Annotated[
        Path | None,
        typer.Option(
            parser=given_path,
            metavar="FOLDER",
            show_default=False,
            help="A Hugging Face folder with configuration and tokenizer of the model, for a checkpoint that is not of a run.",
        ),
    ] = None,
    version: Version = False,
) -> None:
    """Write a model as a folder that transformers loads.

    The built-in decoder becomes a Llama, with its tokenizer. The folder
    appears, or replaces an earlier export, when it is complete.
    """
    with errors_as_exit_codes():
        origin = find_origin(path, step)
        target = _target(path, origin, to)
        _check_form_is_known(path, origin, config_from)
        from fullshard.programs.train.export import export_checkpoint, newest_checkpoint

        if origin.checkpoint is not None:
            checkpoint = origin.checkpoint
        else:
            assert origin.run is not None, "other paths are checkpoints"
            checkpoint = newest_checkpoint(origin.run)
        form = _form(origin, checkpoint, config_from)
        mark = export_checkpoint(checkpoint, form, target, ema=ema)
        _print_result(target, checkpoint, mark)


def _print_result(target: Path, checkpoint: Path, mark: ExportMark) -> None:
    size = sum((target / name).stat().st_size for name in mark.files)
    averaged = ", its averages" if mark.ema else ""
    after = "" if mark.step is None else f" after step {mark.step}"
    text = f"{target} has the model of {checkpoint}{after}{averaged}: {size_text(size)}."
    print_line(Console(), text)


def _target(path: Path, origin: Origin, to: Path | None) -> Path:
    if to is None and origin.run is None:
        raise ConfigurationError(
            f"A checkpoint that does not belong to a run needs a folder to be exported to; {path} is neither the "
            "folder of a run nor a checkpoint in one. Name the target folder with --to."
        )
    target = to if to is not None else origin.run.exported_model if origin.run else path
    check_target(target)
    return target


def _check_form_is_known(path: Path, origin: Origin, config_from: Path | None) -> None:
    if origin.run is None and config_from is None:
        raise ConfigurationError(
            f"transformers needs the configuration of a model beside its weights, and {path} has only weights. Give a "
            "Hugging Face folder with config.json and tokenizer of the model: --config-from FOLDER."
        )


def _form(origin: Origin, checkpoint: Path, config_from: Path | None) -> ExportForm:
    if config_from is not None:
        from fullshard.programs.export_tool.folder_form import form_of_folder

        return form_of_folder(config_from, checkpoint)
    from fullshard.programs.train.model_source import open_model

    assert origin.run is not None, "checked before"
    return open_model(read_config(origin.run.config)).export_form()
