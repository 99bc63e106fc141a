"""The `fullshard` command: the list of its subcommands, and what must be set before torch is imported.

Nothing here imports torch, so `fullshard --help` and a mistyped option answer at once. Each program has its own
`command` module (`fullshard.programs.train.command`, ...).
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, NoReturn, cast

from fullshard.drop_in import program
from fullshard.programs.console.broken_pipe_safe import (
    WatchedStream,
    broken_pipe_safe,
    open_standard_streams,
)
from fullshard.programs.env_tool.environment import print_environment

if TYPE_CHECKING:
    import typer

CLI_LIBRARIES = ("typer", "rich")
"""Packages of the extra `cli`, which every subcommand but `run` and `env` needs."""
ALL_ARGUMENTS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Lets a subcommand read its arguments itself."""


def main() -> None:
    """Run the `fullshard` command with this process's arguments."""
    if sys.argv[1:2] == [
        "run"
    ]:  # streams, exit code and traceback are those of the program that is run
        program.main(sys.argv[2:], "fullshard run")
        return
    open_standard_streams()
    if sys.argv[1:] == ["env"]:  # variables are those of the user, and the extra may be missing
        _run_and_exit(print_environment)
    program.cap_cpu_instructions()
    program.keep_process_after_nccl_errors()
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        if error.name not in CLI_LIBRARIES:
            raise
        sys.exit(
            f"The fullshard command needs {' and '.join(CLI_LIBRARIES)}; {error.name} is not "
            "installed. Install the extra: pip install 'fullshard[cli]'"
        )
    _run_and_exit(app)


def _run_and_exit(app: Callable[[], object]) -> NoReturn:
    """Run a subcommand, and exit with its code; or with 2 and a message if its output could not be written."""
    output, errors = WatchedStream(sys.stdout), WatchedStream(sys.stderr)
    sys.stdout = cast("IO[str]", output)
    code: str | int | None = 0
    try:
        app()
    except SystemExit as leaving:
        code = leaving.code
    except OSError:
        if output.lost() is None:
            raise
    lost = output.lost()
    if lost is not None:
        code = _report_lost_output(lost)
    errors.lost()  # there is no stream left to report it on
    sys.exit(code)


def _report_lost_output(lost: OSError) -> int:
    """Say that the output could not be written, and return the exit code. Say nothing if the reader has left, like `head`."""
    if lost.errno == errno.EPIPE:
        return 1
    stream = broken_pipe_safe(sys.stderr)
    print(f"Error: The output cannot be written: {lost.strerror}.", file=stream, flush=True)
    return 2


def run(arguments: list[str]) -> None:
    """Run a script, or a module (-m), with fullshard in the place of torch's FSDP."""
    program.main(arguments, "fullshard run")


def build_app() -> typer.Typer:
    """Return the command with all its subcommands."""
    import typer

    from fullshard.programs.checkpoint_tool.command import app as checkpoint
    from fullshard.programs.env_tool.command import env
    from fullshard.programs.evaluate_tool.command import evaluate
    from fullshard.programs.export_tool.command import export
    from fullshard.programs.inspect_tool.command import inspect
    from fullshard.programs.plan_tool.command import app as plan
    from fullshard.programs.report.command import report
    from fullshard.programs.train.command import train
    from fullshard.programs.version_option import fullshard

    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    app.callback()(fullshard)
    app.command()(train)
    app.command()(inspect)
    app.add_typer(plan, name="plan")
    app.command()(report)
    app.command(add_help_option=False, context_settings=ALL_ARGUMENTS)(run)
    app.command()(evaluate)
    app.command()(export)
    app.add_typer(checkpoint, name="checkpoint")
    app.command()(env)
    return app
