"""A Python that has imported torch before it is started, for programs that tests start as processes.

    def test_the_program_runs(preloaded_python):
        subprocess.run([preloaded_python, "-m", "fullshard", "train", ...])

Importing torch and what training needs takes four seconds of processor time. Here it is done once, by the server that
ranks are forked from, too.

    program that starts it      preloaded_python     an executable: `_run_client`
    client                 ->   server               arguments, environment, folder, the three standard files, the network
    server                 ->   process              forked: runs the program
    client                 ->   process              every signal that can be passed on; SIGKILL when the client is gone
    process                ->   client               how it ended; the client ends in the same way

Use `sys.executable` where starting or ending an interpreter is what the test is about. Variables that torch reads when
it is imported have the values that they have in the tests.

The client runs this file itself and imports nothing else, so nothing heavy is imported at its top.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
NETWORK = "/proc/self/ns/net"
CLONE_NEWNET = 0x40000000  # of Linux


@contextmanager
def preloaded_python() -> Iterator[str]:
    """Within it, the path that this gives can be used like `sys.executable`."""
    from tests.helpers.ranks import FORK_SERVER

    with tempfile.TemporaryDirectory(prefix="fullshard-python-") as name:
        address, executable = Path(name, "socket"), Path(name, "python")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen()
        client = f'"{sys.executable}" -I -S "{__file__}" "{address}"'
        executable.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
        executable.chmod(0o755)
        ours, theirs = socket.socketpair()
        server = FORK_SERVER.Process(target=_serve, args=(listener, theirs))
        server.start()
        listener.close()
        theirs.close()
        try:
            yield str(executable)
        finally:
            ours.close()
            server.join()


# --- in the server -----------------------------------------------------------------------------------------


def _serve(listener: socket.socket, tests: socket.socket) -> None:
    """Fork a process for every client, until the tests are gone."""
    for module in (
        *("fullshard.programs.train.rank", "fullshard.programs.train.built_in"),
        *("torch.distributed.run", "typer._adapters", "psutil"),
    ):
        importlib.import_module(module)
    importlib.import_module("fullshard.programs.cli").build_app()
    importlib.import_module("tests.helpers.torch_costs").spare_torchrun_costs()

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


def _look_after(client: socket.socket) -> None:
    """Start the program of a client, pass its signals on, and tell it how the program ended."""
    _, files, _, _ = socket.recv_fds(client, 1, 4)
    if not files:  # the client was ended before it had asked
        os._exit(0)
    network = files.pop()
    request = json.loads(client.makefile().readline())
    process = os.fork()
    if process == 0:
        client.close()
        _join_network(network)
        for number, file in enumerate(files):
            os.dup2(file, number)
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


def _become(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Be an interpreter that was started like this, from its first line to its end."""
    import atexit
    import runpy
    import threading
    import traceback

    be_main_process()
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    buffering = 1 if arguments[0] == "-u" else -1
    arguments = arguments[arguments[0] == "-u" :]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering), open(2, "w", 1)
    code: Any = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, folder)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
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
    socket.send_fds(server, [b"f"], [0, 1, 2, os.open(NETWORK, os.O_RDONLY)])
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    server.sendall(json.dumps(request).encode() + b"\n")
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    code, is_signal = server.recv(2, socket.MSG_WAITALL) or (1, False)
    if is_signal:
        signal.signal(code, signal.SIG_DFL)
        os.kill(os.getpid(), code)
    os._exit(code)


if __name__ == "__main__":
    _run_client(sys.argv[1], sys.argv[2:])
