"""The options of `fullshard plan`, as types of arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from fullshard.programs.given_path import given_path
from fullshard.programs.train.config import Size
from fullshard.programs.train.model_argument import DEFAULT_WORLD

Model = Annotated[
    str,
    typer.Argument(
        show_default=False,
        help=f"A published model (llama3-8b, gpt2, ...), a size ({', '.join(get_args(Size))}), a Hugging Face folder, a run or its "
        "TOML file; or calibrate, which measures a profile.",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(min=1, help="How many.", show_default=f"{DEFAULT_WORLD}, or what the file says"),
]
Gpu = Annotated[
    str | None, typer.Option(help="Its name, such as h100 or a100-80.", show_default=False)
]
Profile = Annotated[
    Path | None,
    typer.Option(
        parser=given_path,
        metavar="FILE",
        help="A profile in the place of --gpu.",
        show_default=False,
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="GBIT[/host]",
        help="Gbit/s of a GPU, or of a host, to other hosts.",
        show_default="that of the profile",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Windows per step, of all GPUs: --set train.batch=N",
        show_default="what the file says, or what fits",
    ),
]
Seq = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of a window: --set data.context=N",
        show_default="what the file says, or the model takes, up to 8,192",
    ),
]
Compiled = Annotated[bool, typer.Option("--compile", help="--set compute.compile=blocks")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="As in fullshard train."),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Tokens of the whole run, such as 15T or 300B: how many days and GPU hours it takes.",
        show_default="those of the file, or a billion",
    ),
]
Price = Annotated[
    float | None,
    typer.Option(min=0, help="Of a GPU for an hour.", show_default=False),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Print all that the profile assumes, with sources.")
]
Searches = Annotated[
    bool, typer.Option("--search/--no-search", help="Look for better configurations.")
]
Toml = Annotated[
    Path | None,
    typer.Option(
        "--toml",
        parser=given_path,
        metavar="FILE",
        help="Write the best configuration for fullshard train.",
        show_default=False,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        parser=given_path,
        metavar="PAGE",
        help="Write a page: timeline, memory, scaling, what-ifs.",
        show_default=False,
    ),
]
