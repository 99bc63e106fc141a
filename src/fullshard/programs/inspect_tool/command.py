"""The subcommand `fullshard inspect`.

Exit codes: 0; 2 with one message if the model or its sharding is impossible.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, get_args

import typer
from rich.console import Console

from fullshard.errors import FullshardError
from fullshard.programs.console.tables import print_error
from fullshard.programs.train.config import Problem, RunConfig, Size
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_argument import (
    DEFAULT_WORLD,
    MAX_WORLD,
    file_and_settings,
    is_factory,
)
from fullshard.programs.train.preflight import model_problems
from fullshard.programs.version_option import Version

Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SIZES[:DTYPE]",
        help="Shape and dtype of an argument that a rank passes to the model of module:function, such as 8x1024:int64; "
        "once for each argument. Needed for activations.",
    ),
]
"""The option `--input`."""


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            show_default=False,
            help=f"A published model (llama3-8b, gpt2, ...), a size ({', '.join(get_args(Size))}), a Hugging Face folder, a run or its "
            "TOML file, or module:function, a callable that returns a model.",
        ),
    ],
    world: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks.", show_default=f"{DEFAULT_WORLD}, or what the file says"),
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(metavar="N", help="--set sharding.replicas=N", show_default=False)
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="[fp32|bf16]", help="--set compute.precision=...", show_default=False),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(metavar="[blocks|plan]", help="--set sharding.groups=...", show_default=False),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="As in fullshard train."),
    ] = None,
    inputs: Inputs = None,
    version: Version = False,
) -> None:
    """Show how a model would be grouped and sharded, without running it.

    Shows what each rank would hold and send. Nothing is allocated and no
    other rank is needed.
    """
    short = {
        "sharding.replicas": replicas,
        "compute.precision": precision,
        "sharding.groups": groups,
    }
    given = [f"{field}={value}" for field, value in short.items() if value is not None]
    wanted = [*(settings or ()), *given]
    try:
        config, ranks = _configuration(model, world, wanted)
        from fullshard.programs.inspect_tool.cost import measure
        from fullshard.programs.inspect_tool.factory import FactoryModel, inputs_of
        from fullshard.programs.inspect_tool.output import print_plan

        source = FactoryModel(model) if is_factory(model) else None
        print_plan(Console(), measure(config, ranks, source, inputs_of(inputs or ())))
    except FullshardError as error:
        print_error(f"Error: {error}")
        raise typer.Exit(2) from None


def _configuration(model: str, world: int | None, settings: list[str]) -> tuple[RunConfig, int]:
    """Return the run that would train the model, and on how many ranks."""
    file, of_model = file_and_settings(model)

    def ranks(config: RunConfig) -> int:
        return world or config.run.ranks or DEFAULT_WORLD

    def problems(config: RunConfig) -> Iterator[Problem]:
        # Nothing is read or computed, so neither the batch nor the length of windows matters.
        for problem in (*config.world_problems(ranks(config)), *model_problems(config)):
            if not {"train.batch", "data.context"}.intersection(problem.about):
                yield problem
        if ranks(config) > MAX_WORLD:
            yield Problem(
                ("run.ranks",),
                f"A model can be inspected for at most {MAX_WORLD:,} ranks; got {ranks(config):,}. "
                "Set --world to fewer.",
            )

    config = read_config(file, [*of_model, *settings], checks=[problems])
    return config, ranks(config)
