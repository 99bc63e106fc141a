"""A Python that has imported torch before it is started can be told from another one by that only."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import atexit, os, sys
atexit.register(print, "what was registered is called")
print(os.getpid(), "torch" in sys.modules, os.environ["COLOUR"], os.getcwd(), sys.argv[1:], flush=True)
word = sys.stdin.readline().strip()
if word == "error":
    raise ValueError("the program has failed")
sys.exit(int(word))
"""


def start(python: str, folder: Path) -> subprocess.Popen[str]:
    file = folder / "program.py"
    file.write_text(PROGRAM)
    return subprocess.Popen(
        [python, str(file), "first", "second"],
        cwd=folder,
        env={"COLOUR": "blue"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("word", "code", "said"), [("7", 7, ""), ("error", 1, "ValueError: the")])
def test_a_program_has_all_that_it_was_started_with_and_ends_as_it_should(
    preloaded_python: str, tmp_path: Path, word: str, code: int, said: str
) -> None:
    with start(preloaded_python, tmp_path) as program:
        output, errors = program.communicate(f"{word}\n")
    assert program.returncode == code
    assert said in errors
    _, facts = output.split(" ", 1)
    assert facts.splitlines() == [
        f"True blue {tmp_path} ['first', 'second']",
        "what was registered is called",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_gets_the_signals_of_its_process(
    preloaded_python: str, tmp_path: Path, number: signal.Signals
) -> None:
    with start(preloaded_python, tmp_path) as program:
        assert program.stdout is not None
        process = psutil.Process(int(program.stdout.readline().split()[0]))
        program.send_signal(number)
        assert program.wait() == -number
        process.wait(30)


def test_a_program_is_code_and_gets_the_files_that_are_passed(preloaded_python: str) -> None:
    reader, writer = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), f'{__name__} {sys.argv[2:]}'.encode())"
    command = [preloaded_python, "-X", "utf8", "-c", code, str(writer), "last"]
    subprocess.run(command, pass_fds=[writer], check=True)
    os.close(writer)
    with open(reader) as told:
        assert told.read() == "__main__ ['last']"
