"""The verb `fullshard train`: arguments in, exit code out.

Exit codes:
    0     trained
    1     a rank failed; its traceback was shown
    2     wrong options; one message, no traceback, no rank was started
    130   stopped by Ctrl-C
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from fullshard.errors import ConfigurationError
from fullshard.train.launch import start
from fullshard.train.options import DeviceChoice, Precision, TrainOptions
from fullshard.train.processes import RankFailedError

DEFAULTS = TrainOptions()


def train(
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks to start.", show_default="2 on CPU, all GPUs on CUDA"),
    ] = DEFAULTS.ranks,
    device: Annotated[
        str, typer.Option(metavar="[auto|cpu|cuda]", help="Where to train.")
    ] = DEFAULTS.device,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = DEFAULTS.steps,
    batch: Annotated[int, typer.Option(help="Windows of text per rank and step.")] = DEFAULTS.batch,
    context: Annotated[int, typer.Option(help="Bytes the model sees at once.")] = DEFAULTS.context,
    layers: Annotated[int, typer.Option(help="Decoder blocks.")] = DEFAULTS.layers,
    width: Annotated[int, typer.Option(help="Width of the model.")] = DEFAULTS.width,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = DEFAULTS.heads,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = DEFAULTS.lr,
    seed: Annotated[
        int, typer.Option(help="Decides starting weights and order of the text.")
    ] = DEFAULTS.seed,
    text: Annotated[
        Path | None,
        typer.Option(
            help="File or folder to learn from.", show_default="the Python standard library"
        ),
    ] = DEFAULTS.text,
    precision: Annotated[
        str,
        typer.Option(
            metavar="[fp32|bf16]", help="Compute precision; bf16 still reduces in float32."
        ),
    ] = DEFAULTS.precision,
) -> None:
    """Train a small byte-level language model, sharded over ranks.

    Without options, two CPU ranks (or all GPUs) learn from the Python
    standard library's sources. Under torchrun it joins the ranks it is given.
    """
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    is_first = os.environ.get("RANK", "0") == "0"  # under a launcher every rank comes through here
    try:
        options = TrainOptions(
            ranks=ranks,
            device=cast(DeviceChoice, device),  # checked by TrainOptions
            steps=steps,
            batch=batch,
            context=context,
            layers=layers,
            width=width,
            heads=heads,
            lr=lr,
            seed=seed,
            text=text,
            precision=cast(Precision, precision),
        )
        if is_first:
            print("Starting; importing torch takes a few seconds.", flush=True)
        start(options)
    except ConfigurationError as error:
        if is_first:  # the others find the same
            errors.print(f"Error: {error}")
        raise typer.Exit(2) from None
    except RankFailedError as error:
        _restore_terminal()
        errors.print(str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _restore_terminal()
        errors.print("Stopped.")
        raise typer.Exit(130) from None


def _restore_terminal() -> None:
    """Close the live line that rank 0 may have had no time to close: a new line, and the cursor back."""
    console = Console()
    if console.is_terminal:
        console.print()
        console.show_cursor(True)
