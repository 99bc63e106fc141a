"""`python -m fullshard.run`: a program runs as Python itself runs it, with fullshard in the place of torch's FSDP."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType

import pytest

import fullshard
from fullshard.drop_in import children, program
from fullshard.engine.state import FSDPState
from tests.drop_in.test_install import fsdp, undisturbed

SEEN = """\
import sys
main = sys.modules["__main__"]
loader = type(__loader__).__name__
print(__name__, __file__, __package__, __cached__, __spec__ and __spec__.name, loader, vars(main) is globals())
print(sys.argv, sys.path[0])
def value(x: "not a name") -> 1: ...
print(value.__annotations__)
"""
ENDS = {
    "script.py": 'def fail():\n    raise ValueError("too bad")\nfail()\n',
    "package/__main__.py": "sys.exit(3)\n",
    "package/__init__.py": "",
    "wrong.py": "def broken(:\n",
}


def output(folder: Path, executable: str, *arguments: str, **variables: str) -> tuple[object, ...]:
    """Exit code, standard output and errors, but for the line in which fullshard says that it is there."""
    source = str(Path(fullshard.__file__).parents[1])
    done = subprocess.run(
        [executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=130,
    )
    lines = done.stderr.splitlines()
    ours = [line for line in lines if line.startswith("fullshard has replaced torch's FSDP: ")]
    assert len(ours) == (executable != sys.executable), done.stderr
    return done.returncode, done.stdout, [line for line in lines if line not in ours]


@pytest.mark.parametrize(
    "arguments",
    [
        ["script.py", "-m", "--list", "--help"],
        ["wrong.py"],
        ["package", "1"],
        ["-m", "package", "-x"],
    ],
    ids=" ".join,
)
def test_a_program_sees_what_python_shows_it_and_ends_as_there(
    arguments: list[str], tmp_path: Path, preloaded_python: str
) -> None:
    (tmp_path / "package").mkdir()
    for name, end in ENDS.items():
        (tmp_path / name).write_text(SEEN + end if name != "package/__init__.py" else "")
    expected = output(tmp_path, sys.executable, *arguments)
    actual = output(tmp_path, preloaded_python, "-m", "fullshard.run", *arguments)
    assert actual == expected
    assert expected[0] in (1, 3)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere.py"], 2, "can't open file 'nowhere.py': [Errno 2] No such file or directory"),
        (["-m", "nowhere.at_all"], 1, "No module named nowhere.at_all"),
        (["-m", "fullshard.layout"], 1, "No module named fullshard.layout.__main__; "),
        ([], 2, "name a script, or a module after -m\nusage: run [--list] script.py"),
        (["--what", "script.py"], 2, "--what is no option"),
        (["-m"], 2, "-m needs the name of a module"),
    ],
    ids=str,
)
def test_a_program_that_is_not_there_is_a_message_and_an_exit_code(
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "_install", lambda is_listing: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        program.main(arguments, "run")
    assert end.value.code == code
    assert f"run: {message}" in capsys.readouterr().err


FAILS = """\
import atexit, sys, threading
import torch
from fullshard import checkpoint
from fullshard.checkpoint.folders import publication
from fullshard.divergence.watchdog import process_end

atexit.register(lambda: print("last", repr(getattr(sys, "last_value", None))))
process_end._Hooks.unwatched = lambda error: print("told", repr(error))
publication.begin = lambda _: threading.Event().wait()
checkpoint.async_save(sys.argv[1], torch.nn.Linear(2, 2))

def fail():
    raise {error}("too bad")

fail()
"""
ERRORS = ("ValueError", "KeyboardInterrupt", "GeneratorExit")


@pytest.mark.parametrize("error", ERRORS)
def test_a_failed_program_waits_for_no_save_and_tells_others_why_in_its_own_lines(
    error: str, tmp_path: Path, preloaded_python: str
) -> None:
    (tmp_path / "script.py").write_text(FAILS.replace("{error}", error))
    code, told, errors = output(
        tmp_path, preloaded_python, "-m", "fullshard.run", "script.py", "saved"
    )
    # `checkpoint.process_exit` chooses the code while a thread is stuck.
    assert code == (130 if error == "KeyboardInterrupt" else 1)
    assert {*str(told).splitlines()} == {f"told {error}('too bad')", f"last {error}('too bad')"}
    assert isinstance(errors, list)
    files = [line.split('"')[1] for line in errors if line.startswith("  File")]
    assert files == [str(tmp_path / "script.py")] * 2, errors
    assert errors[0].startswith("Traceback") and errors[-1] == f"{error}: too bad"


@pytest.mark.parametrize("error", ERRORS)
def test_a_failed_program_ends_as_under_python(
    error: str, tmp_path: Path, preloaded_python: str
) -> None:
    (tmp_path / "script.py").write_text(f"def fail():\n    raise {error}\nfail()\n")
    actual = output(tmp_path, preloaded_python, "-m", "fullshard.run", "script.py")
    assert actual[1:] == output(tmp_path, sys.executable, "script.py")[1:]
    # The interpreter that has imported torch before does not end by SIGINT, as Python does.
    assert actual[0] == 1


NOTHING = "fullshard: the program has sharded no model in this process"


@pytest.mark.parametrize(
    ("source", "ends", "is_said"),
    [
        ("", None, True),
        ("import sys; sys.exit()", SystemExit, True),
        ("import sys; sys.exit(3)", SystemExit, False),
        ("raise ValueError", ValueError, False),
        ("from fullshard.engine.state import FSDPState; FSDPState.num_made += 1", None, False),
        (
            "from multiprocessing import spawn; spawn.get_preparation_data('of a rank')",
            None,
            False,
        ),
    ],
)
def test_a_program_that_has_sharded_nothing_is_told_so_when_it_ends_well(
    source: str,
    ends: type[BaseException] | None,
    is_said: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FSDPState, "num_made", 0)
    monkeypatch.setattr(children._Children, "have_started", False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for rank, says in (("0", is_said), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        with undisturbed(), fullshard.installed():
            with pytest.raises(ends) if ends else nullcontext():
                program._run(ModuleType("__main__"), lambda: compile(source, "script.py", "exec"))
        assert capsys.readouterr().err.startswith(NOTHING) == says


SHARDED = """\
import json, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(4, 2))
model(torch.ones(1, 4)).sum().backward()
kinds = [kind.__module__ for kind in (*type(model).__mro__, FullyShardedDataParallel)]
open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w").write(json.dumps([isinstance(model, FSDPModule), kinds]))
dist.destroy_process_group()
"""


def test_a_script_under_torchrun_gets_modules_of_fullshard(
    tmp_path: Path, preloaded_python: str
) -> None:
    (tmp_path / "script.py").write_text(SHARDED)
    arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    code, _, errors = output(
        tmp_path,
        preloaded_python,
        *(*arguments, "-m", "fullshard.run", "script.py", str(tmp_path)),
        PYTHON_EXEC=preloaded_python,
        OMP_NUM_THREADS="1",
    )
    assert code == 0, errors
    for rank in range(2):
        is_sharded, kinds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert is_sharded
        assert "fullshard.fsdp2.fsdp_module" in kinds and kinds[-1] == "fullshard.fsdp1.wrapper"
        assert not [kind for kind in kinds if kind.startswith("torch.distributed.fsdp")]


def test_a_process_that_multiprocessing_starts_installs_it_before_it_imports_the_program() -> None:
    original = spawn.get_preparation_data
    with undisturbed(), fullshard.installed():
        new = spawn.get_preparation_data("child")
        fact = pickle.dumps({name: new[name] for name in new.keys() - original("child").keys()})
    assert spawn.get_preparation_data is original
    theirs = fsdp.fully_shard
    with undisturbed():
        pickle.loads(fact)
        assert fsdp.fully_shard is fullshard.fully_shard
        fullshard.uninstall()
    assert fsdp.fully_shard is theirs
