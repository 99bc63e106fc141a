"""Other people's programs, run with fullshard in the place of torch's FSDP.

    python -m fullshard.run train.py --epochs 3
    torchrun --nproc-per-node 8 -m fullshard.run -m package.train --epochs 3

fullshard is installed first. Then the program runs as Python itself would run it: `sys.argv`, `sys.path`, `__main__`, the
traceback of an exception and the exit code are the program's own. Nothing here imports torch before it has to.
"""

from __future__ import annotations

import os
import pkgutil
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from fullshard import __version__

USAGE = """\
usage: {command} [--list] script.py [arguments]
       {command} [--list] -m module [arguments]

Run a program with fullshard in the place of torch's FSDP.

  --list      print every name of torch that now means fullshard's
  --version   print the version
"""


def version_text() -> str:
    """Return the versions that a report of a problem needs."""
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    return f"fullshard {__version__} ({torch}, Python {platform.python_version()})"


def cap_cpu_instructions() -> None:
    """Keep oneDNN from using AMX, unless the user has set its limit.

    Some machines advertise AMX but do not let processes use it. A bf16 matmul on the CPU then ends in an illegal
    instruction. oneDNN reads the variable once, so it has to be set before torch is imported.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def keep_process_after_nccl_errors() -> None:
    """Let NCCL's process groups end their collectives after an error, and not the process, unless the user has chosen.

    Otherwise a thread of torch aborts the process before any rank can say which one has failed. After an error that thread sleeps
    for four times as long as a dump may take, 60 seconds by default, and whoever calls a collective waits for it.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, as Python's command line names it."""

    target: str
    """A script, a folder or zip file with a `__main__.py`, or the name of a module."""
    is_module: bool
    arguments: list[str]

    @property
    def is_script(self) -> bool:
        """Whether it is one file of Python, not a module, a folder or an archive."""
        return not self.is_module and pkgutil.get_importer(self.target) is None

    @property
    def import_folder(self) -> str:
        """The first place where Python looks for what the program imports."""
        if self.is_module:
            return os.getcwd()
        path = os.path.realpath(self.target)
        return os.path.dirname(path) if self.is_script else path


class CannotStart(Exception):
    """There is no such program; its arguments are a message and the exit code that Python has for it."""


def main(arguments: list[str], command: str) -> None:
    """Run the program that the arguments of a command name."""
    try:
        program, is_listing = _read(arguments, USAGE.format(command=command))
        source = _source(program)
        cap_cpu_instructions()
        keep_process_after_nccl_errors()
        if not sys.flags.safe_path:  # python -P: the first folder is an ordinary one
            sys.path[0] = program.import_folder
        _install(is_listing)
        sys.argv = [program.target, *program.arguments]
        module, code = _script(program, source) if program.is_script else _module(program)
    except CannotStart as error:
        message, exit_code = error.args
        print(f"{command}: {message}", file=sys.stderr)
        sys.exit(exit_code)
    _run(module, code)


def _read(arguments: list[str], usage: str) -> tuple[Program, bool]:
    """Return the program that is asked for, and whether to list names."""
    is_listing = False
    while arguments and arguments[0].startswith("-"):
        option, *arguments = arguments
        if option in ("-h", "--help"):
            print(usage, end="")
            sys.exit(0)
        if option == "--version":
            print(version_text())
            sys.exit(0)
        if option == "-m" and arguments:
            return Program(target=arguments[0], is_module=True, arguments=arguments[1:]), is_listing
        if option != "--list":
            problem = "needs the name of a module" if option == "-m" else "is no option"
            raise CannotStart(f"{option} {problem}\n{usage}", 2)
        is_listing = True
    if not arguments:
        raise CannotStart(f"name a script, or a module after -m\n{usage}", 2)
    return Program(target=arguments[0], is_module=False, arguments=arguments[1:]), is_listing


def _install(is_listing: bool) -> None:
    """Install fullshard; the first rank says so in one line, or lists all names."""
    from fullshard.drop_in.install import install

    record = install()
    if os.environ.get("RANK", "0") == "0":
        print(record.listing() if is_listing else record, file=sys.stderr, flush=True)


# --- what Python does with a program --------------------------------------------------------------


def _source(program: Program) -> bytes:
    """Return the text of a script; nothing for modules, which their loaders read."""
    try:
        return Path(program.target).read_bytes() if program.is_script else b""
    except OSError as error:
        raise CannotStart(
            f"can't open file {program.target!r}: [Errno {error.errno}] {error.strerror}", 2
        ) from error


def _script(program: Program, source: bytes) -> tuple[ModuleType, Callable[[], CodeType]]:
    """Return the module `__main__` of a script, and what compiles its code."""
    path = os.path.abspath(program.target)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    vars(module)["__cached__"] = None
    # Without dont_inherit, the script would be compiled with the __future__ of this file.
    return module, lambda: compile(source, path, "exec", dont_inherit=True)


def _module(program: Program) -> tuple[ModuleType, Callable[[], CodeType]]:
    """Return the module `__main__` of a module, folder or archive, and what reads its code."""
    spec = _module_spec(program.target) if program.is_module else _spec_in(program.target)
    get_code = getattr(spec.loader, "get_code", None)
    if get_code is None:
        raise CannotStart(f"No code object available for {spec.name}", 1)
    module = module_from_spec(spec)
    module.__name__ = "__main__"
    if program.is_module:
        sys.argv[0] = str(spec.origin)
    return module, lambda: get_code(spec.name)


def _spec_in(folder: str) -> ModuleSpec:
    importer = pkgutil.get_importer(folder)
    spec = importer.find_spec("__main__") if importer is not None else None
    if spec is None:
        raise CannotStart(f"can't find '__main__' module in {folder!r}", 1)
    return spec


def _module_spec(name: str) -> ModuleSpec:
    """Find a module, or the `__main__` of a package. Packages around it are imported."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # something that a package around it imports
        spec = None
    if spec is None:
        raise CannotStart(f"No module named {name}", 1)
    if spec.submodule_search_locations is None:
        return spec
    spec = find_spec(f"{name}.__main__")
    if spec is None:
        raise CannotStart(
            f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed",
            1,
        )
    return spec


def _run(module: ModuleType, code: Callable[[], CodeType]) -> None:
    """Run code as the module `__main__`, and end as the code does.

    An exception goes on to the interpreter, which notes it in ``sys.last_value``, shows it and chooses the exit code. Others
    read what it notes: the watchdog, which tells other ranks, and threads that write checkpoints.
    """
    sys.modules["__main__"] = module
    try:
        exec(code(), vars(module))
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            _say_if_nothing_was_sharded()
        raise
    except BaseException as error:
        _show_only_the_program(error)
        raise
    _say_if_nothing_was_sharded()


def _show_only_the_program(error: BaseException) -> None:
    """Let the traceback that ends this process begin in the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        sys.last_traceback = trace
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def _say_if_nothing_was_sharded() -> None:
    """Say on the first rank that fullshard was not used: a program may train in another way without a word."""
    from fullshard.drop_in import children
    from fullshard.engine.state import FSDPState

    if FSDPState.num_made or children.have_started() or os.environ.get("RANK", "0") != "0":
        return
    print(
        "fullshard: the program has sharded no model in this process, so fullshard did nothing. If it should have, look at "
        "its configuration: FSDP must be on, and on the device that it uses.",
        file=sys.stderr,
        flush=True,
    )
