"""The verbs of `fullshard checkpoint`: arguments in, exit code out.

Torch is imported only when a verb runs.

Exit codes:
    0     done; for `verify`, no faults; for `diff`, no differences
    1     `verify` found faults, or `diff` found differences
    2     an error: the checkpoint cannot be read, an option is wrong, or the target or the output cannot be written;
          one message, no traceback
    130   stopped by Ctrl-C
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fullshard.errors import CheckpointError, ConfigurationError, FullshardError
from fullshard.programs.console.tables import print_error
from fullshard.programs.given_path import existing_path, given_path
from fullshard.programs.train.origin import find_origin
from fullshard.programs.train.run_folder import CONFIG, RunFolder
from fullshard.programs.version_option import Version

if TYPE_CHECKING:
    from fullshard.checkpoint.source import Source
    from fullshard.checkpoint.sources.differences import Differences

app = typer.Typer(no_args_is_help=True)

Checkpoint = Annotated[
    Path,
    typer.Argument(
        parser=existing_path,
        metavar="PATH",
        show_default=False,
        help="A folder of fullshard, Hugging Face or torch.distributed.checkpoint, a file of torch.save, or a run, "
        "which stands for its newest checkpoint.",
    ),
]

All = Annotated[bool, typer.Option("--all", help="List everything, not the first five.")]


@app.callback()
def checkpoint(version: Version = False) -> None:
    """Look into checkpoints of any format, check, convert and compare them."""


@app.command()
def inspect(
    path: Checkpoint,
    list_all: All = False,
    pieces: Annotated[
        bool, typer.Option("--pieces", help="List the files and bytes of every tensor.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    version: Version = False,
) -> None:
    """Show what a checkpoint has: tensors, optimizer state, who wrote it."""
    with errors_as_exit_codes():
        from fullshard.checkpoint.sources.formats import use_source
        from fullshard.programs.checkpoint_tool import contents, output

        path = newest_checkpoint(path)
        found = use_source(path, lambda source: contents.describe(source, pieces=pieces))
        if as_json:
            output.print_json(found)
        else:
            output.print_contents(Console(), found, list_all=list_all)


@app.command()
def verify(path: Checkpoint, list_all: All = False, version: Version = False) -> None:
    """Read all of a checkpoint and check it against its checksums.

    Exit code 1 if anything is wrong.
    """
    with errors_as_exit_codes(trouble=1):
        from fullshard.checkpoint.sources.formats import use_source
        from fullshard.programs.checkpoint_tool import output, verification

        def check(source: Source) -> verification.Report:
            with output.progress(Console(), "verify", verification.bytes_in(source)) as advance:
                return verification.check(source, advance)

        path = newest_checkpoint(path)
        report = use_source(path, check, is_good=lambda report: not report.faults)
        output.print_report(Console(), path, report, list_all=list_all)
        if report.faults:
            raise typer.Exit(1)


@app.command()
def convert(
    source: Checkpoint,
    target: Annotated[
        Path,
        typer.Argument(
            parser=given_path,
            metavar="TARGET",
            show_default=False,
            help="A path where nothing is yet.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="[fullshard|huggingface|dcp|torch]",
            show_default=False,
            help="The format to write. huggingface: the weights only; fullshard export writes what transformers loads.",
        ),
    ],
    files: Annotated[
        int, typer.Option(help="Files to divide the tensors over, for fullshard.")
    ] = 1,
    version: Version = False,
) -> None:
    """Write a checkpoint in another format."""
    with errors_as_exit_codes():
        from fullshard.checkpoint.source import MODEL
        from fullshard.checkpoint.sources import conversion
        from fullshard.checkpoint.sources.formats import use_source, with_base
        from fullshard.programs.checkpoint_tool import output, verification

        began = time.perf_counter()
        weights_only = to == "huggingface"
        if weights_only:
            _refuse_checkpoint_of_run(source, target)
        source = newest_checkpoint(source)

        def write(found: Source) -> None:
            opened = with_base(found)
            nbytes = verification.bytes_in(opened, MODEL if weights_only else "")
            with output.progress(Console(), "convert", nbytes) as advance:
                conversion.write(opened, target, to=to, files=files, on_bytes=advance)

        use_source(source, write)
        output.print_written(Console(), target, time.perf_counter() - began)
        if weights_only and not (source / "config.json").exists():
            output.print_weights_only(Console(), source)


def _refuse_checkpoint_of_run(source: Path, target: Path) -> None:
    """Refuse to write weights that transformers cannot load, where it is known how it could."""
    if (source / CONFIG).is_file() or find_origin(source, None).run is not None:
        raise ConfigurationError(
            "transformers needs configuration, tokenizer and its own names of weights, which convert does not know and the "
            f"run of {source} does. Use: fullshard export {source} --to {target}"
        )


@app.command()
def diff(
    first: Checkpoint, second: Checkpoint, list_all: All = False, version: Version = False
) -> None:
    """Compare two checkpoints of any formats, tensor by tensor, to the last bit.

    Exit code 0 if they are equal, 1 if they differ.
    """
    with errors_as_exit_codes():
        from fullshard.checkpoint.sources.differences import differences
        from fullshard.checkpoint.sources.formats import use_source
        from fullshard.programs.checkpoint_tool import output, verification

        def compare(one: Source, other: Source) -> Differences:
            with output.progress(Console(), "compare", verification.bytes_in(one)) as advance:
                return differences(one, other, compared=advance)

        paths = newest_checkpoint(first), newest_checkpoint(second)
        found = use_source(
            paths[0], lambda one: use_source(paths[1], lambda other: compare(one, other))
        )
        output.print_differences(Console(), paths, found, list_all=list_all)
        if found:
            raise typer.Exit(1)


def newest_checkpoint(path: Path) -> Path:
    """Return the newest checkpoint of a run, if the path is that of a run or of its checkpoints; else the path.

    Raises:
        CheckpointError: the run has none yet.
    """
    run = RunFolder(path)
    if not run.config.is_file():
        run = RunFolder(path.absolute().parent)
        if path.absolute() != run.checkpoints or not run.config.is_file():
            return path
        run = RunFolder(path.parent)
    from fullshard.checkpoint import latest

    newest = latest(run.checkpoints)
    if newest is None:
        raise CheckpointError(
            f"The run in {run.path} has no complete checkpoint yet. Train first: fullshard train {run.config}"
        )
    return newest


@contextmanager
def errors_as_exit_codes(*, trouble: int = 2) -> Iterator[None]:
    """Print errors and warnings of the block as lines, and end with an exit code after an error."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print_error(f"Warning: {message}")
        try:
            yield
        except FullshardError as error:
            print_error(f"Error: {error}")
            raise typer.Exit(trouble) from None
        except KeyboardInterrupt:
            print_error("Stopped.")
            raise typer.Exit(130) from None
