"""A Python that has imported torch before it is started, for programs that tests start as processes.

    def test_the_program_runs(preloaded_python):
        subprocess.run([preloaded_python, "-m", "fullshard", "train", ...])

Importing torch and what training needs takes four seconds of processor time. Here it is done once, by the server that
ranks are forked from, too.

With several workers (pytest -n), there is one server for all of them. The process that distributes the tests starts it.
It imports the tests, too, and the workers themselves and the servers that their ranks are forked from run on it.

    program that starts it      preloaded_python     an executable: `_run_client`
    client                 ->   server               arguments, environment, folder, open files, the network
    server                 ->   process              forked: runs the program
    client                 ->   process              every signal that can be passed on; SIGKILL when the client is gone
    process                ->   client               how it ended; the client ends in the same way

Use `sys.executable` where starting an interpreter is what the test is about, and `-X tear_down` where ending it is: a
process otherwise ends without the destructors of its objects, which take seconds. Variables that torch reads when it is
imported have the values that they have in the tests.

The client runs this file itself and imports nothing else, so nothing heavy is imported at its top.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
NETWORK = "/proc/self/ns/net"
CLONE_NEWNET = 0x40000000  # of Linux
MAX_FILES = 64
TEAR_DOWN = "tear_down"
IMPORT_TIMEOUT_S = 300
TRANSFORMERS = "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"
"""For the ranks of a few tests. All other tests do without."""

started_as: str | None = None
"""The executable that this process was started with, if that was a preloaded Python."""


@contextmanager
def preloaded_python() -> Iterator[str]:
    """Within it, the path that this gives can be used like `sys.executable`."""
    from tests.helpers.ranks import FORK_SERVER

    if started_as is not None:
        yield started_as
        return
    with _executable() as (executable, listener):
        ours, theirs = socket.socketpair()
        server = FORK_SERVER.Process(target=_serve, args=(executable, listener, theirs))
        server.start()
        listener.close()
        theirs.close()
        try:
            yield executable
        finally:
            ours.close()
            server.join()


@contextmanager
def preloaded_tests(arguments: Sequence[str]) -> Iterator[str]:
    """Like `preloaded_python`, but with the tests that pytest collects for these arguments imported, too.

    The server is a process of its own. The one that calls this does not import torch.
    """
    program = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as it; it._serve_tests(*sys.argv[1:])"
    with _executable() as (executable, listener):
        ours, theirs = socket.socketpair()
        files = listener.fileno(), theirs.fileno()
        server = subprocess.Popen(
            [sys.executable, "-c", program, executable, *map(str, files), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=files,
        )
        listener.close()
        theirs.close()
        try:
            yield executable
        finally:
            ours.close()
            server.wait()


def start_fork_server(executable: str) -> None:
    """Let the server of `multiprocessing` that ranks are forked from run on a preloaded Python."""
    from multiprocessing import forkserver, spawn

    usual = spawn.get_executable()
    spawn.set_executable(executable)
    try:
        forkserver.ensure_running()
    finally:
        spawn.set_executable(usual)


@contextmanager
def _executable() -> Iterator[tuple[str, socket.socket]]:
    """A program that connects to a socket, and the socket."""
    with tempfile.TemporaryDirectory(prefix="fullshard-python-") as name:
        address, executable = Path(name, "socket"), Path(name, "python")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen()
        client = f'"{sys.executable}" -I -S "{__file__}" "{address}"'
        executable.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
        executable.chmod(0o755)
        yield str(executable), listener


# --- in the server -----------------------------------------------------------------------------------------


def _serve_tests(executable: str, listener: str, distributor: str, *arguments: str) -> None:
    """Import the tests and what ranks import, then serve."""
    import faulthandler
    import gc
    import threading
    from importlib.util import find_spec

    import pytest

    from tests.helpers.ranks import PRELOADED

    faulthandler.dump_traceback_later(IMPORT_TIMEOUT_S, exit=True)
    pytest.main(["--collect-only", "--quiet", "-p", "no:cacheprovider", *arguments])
    for module in (*PRELOADED, *(TRANSFORMERS if find_spec("transformers") else ())):
        importlib.import_module(module)
    faulthandler.cancel_dump_traceback_later()
    # Whoever is forked has one thread only, and what others have locked stays locked.
    if threading.active_count() > 1:
        raise RuntimeError(f"Importing the tests has started threads: {threading.enumerate()}.")
    gc.unfreeze()
    gc.collect()  # what pytest has collected; the modules stay
    _serve(executable, socket.socket(fileno=int(listener)), socket.socket(fileno=int(distributor)))


def _serve(executable: str, listener: socket.socket, tests: socket.socket) -> None:
    """Fork a process for every client, until the tests are gone."""
    import gc

    for module in (
        *("fullshard.programs.train.rank", "fullshard.programs.train.built_in"),
        *("torch.distributed.run", "typer._adapters", "psutil"),
    ):
        importlib.import_module(module)
    importlib.import_module("fullshard.programs.cli").build_app()
    importlib.import_module("tests.helpers.torch_costs").spare_torchrun_costs()
    os.register_at_fork(after_in_child=_renew_thread_pool)
    global started_as
    started_as = executable
    gc.freeze()  # what is there now is never collected, so processes do not copy it to count references
    os.setsid()
    caretakers: set[int] = set()
    while True:
        ready, _, _ = select.select([listener, tests], [], [])
        if tests in ready:
            os._exit(0)
        client, _ = listener.accept()
        caretaker = os.fork()
        if caretaker == 0:
            listener.close()
            tests.close()
            _look_after(client)
        client.close()
        caretakers = {each for each in caretakers if os.waitpid(each, os.WNOHANG) == (0, 0)}
        caretakers.add(caretaker)


def _renew_thread_pool() -> None:
    """Make torch's pool of threads anew, which a fork leaves behind, while this process has one thread.

    Torch would do it later, and two of its threads at once abort the process: "Invalid thread pool".
    """
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _look_after(client: socket.socket) -> None:
    """Start the program of a client, pass its signals on, and tell it how the program ended."""
    _, files, _, _ = socket.recv_fds(client, 1, MAX_FILES + 1)
    if not files:  # the client was ended before it had asked
        os._exit(0)
    network = files.pop()
    request = json.loads(client.makefile().readline())
    process = os.fork()
    if process == 0:
        _join_network(network)
        os.close(client.detach())
        _number(files, request.pop("numbers"))
        _become(**request)
    for file in (*files, network):
        os.close(file)
    has_ended = os.pidfd_open(process)
    while True:
        ready, _, _ = select.select([has_ended, client.fileno()], [], [])
        if has_ended in ready:
            _, status = os.waitpid(process, 0)
            client.sendall(bytes([abs(os.waitstatus_to_exitcode(status)), os.WIFSIGNALED(status)]))
            os._exit(0)
        told = client.recv(1)
        os.kill(process, told[0] if told else signal.SIGKILL)
        if not told:
            os._exit(0)


def _join_network(namespace: int) -> None:
    """Move to the network namespace of a client that was started in another one than the server."""
    if not os.path.sameopenfile(namespace, ours := os.open(NETWORK, os.O_RDONLY)):
        import ctypes

        c_library = ctypes.CDLL(None, use_errno=True)
        if c_library.setns(namespace, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    os.close(ours)
    os.close(namespace)


def _number(files: list[int], numbers: list[int]) -> None:
    """Give the files of a client the numbers that they have there."""
    import fcntl

    out_of_the_way = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(out_of_the_way, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _become(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Be an interpreter that was started like this, from its first line to its end."""
    import atexit
    import ctypes
    import runpy
    import threading
    import types

    be_main_process()
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    buffering = 1 if arguments[0] == "-u" else -1
    tears_down = arguments[:2] == ["-X", TEAR_DOWN]
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        arguments = arguments[1 + (arguments[0] in ("-W", "-X")) :]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering), open(2, "w", 1)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    code: Any = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, folder)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path.insert(0, "")
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(arguments[1], vars(main))
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.last_value = error  # as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if tears_down:
        ctypes.pythonapi.Py_Exit(code or 0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        if not file.closed:
            file.flush()
    os._exit(code or 0)


def be_main_process() -> None:
    """Let this process be nobody's child in the eyes of `multiprocessing`."""
    import multiprocessing.process

    multiprocessing.current_process().name = "MainProcess"
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]


# --- in the client -----------------------------------------------------------------------------------------


def _run_client(address: str, arguments: list[str]) -> None:
    """Have the program run, and end as it does."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    open_files = [int(number) for number in os.listdir("/proc/self/fd")]
    inherited = [number for number in sorted(open_files) if _is_inherited(number)]
    socket.send_fds(server, [b"f"], [*inherited, os.open(NETWORK, os.O_RDONLY)])
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "numbers": inherited,
    }
    server.sendall(json.dumps(request).encode() + b"\n")
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    code, is_signal = server.recv(2, socket.MSG_WAITALL) or (1, False)
    if is_signal:
        signal.signal(code, signal.SIG_DFL)
        os.kill(os.getpid(), code)
    os._exit(code)


def _is_inherited(number: int) -> bool:
    """Whether a file of this process comes from whoever started it: programs that are started do not get our own."""
    try:
        return os.get_inheritable(number)
    except OSError:  # of the folder that was listed
        return False


if __name__ == "__main__":
    _run_client(sys.argv[1], sys.argv[2:])
