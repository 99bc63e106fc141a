"""Prints what fullshard has changed in this process, as JSON; run as a program in an interpreter of its own.

import           after `import fullshard`, after all public names, and after all modules of the library
change           after changes made for a test of this file
train FOLDER     on rank 0 of 2, after a model was sharded, trained for a step, and saved in the folder
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import multiprocessing.util
import os
import pkgutil
import signal
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = os.path.join(os.path.dirname(__file__), *("..",) * 2, "src", "fullshard", "")
OURS = (os.path.realpath(PACKAGE) + os.sep, os.path.realpath(__file__))
PYTHON = sysconfig.get_path("stdlib") + os.sep
NOT_OF_THE_LIBRARY = (
    "fullshard.programs",
    "fullshard.__main__",
    "fullshard.run",
    "fullshard.report",
)

_CALLS: set[str] = set()
_ENVIRONMENT = dict(os.environ)


def note_calls(owner: Any, name: str) -> None:
    """Note from now on that fullshard calls a function, by itself or by Python's library."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((PYTHON, "<")):
            if "site-packages" in frame.f_code.co_filename:
                break
            frame = frame.f_back
        if frame is not None and is_ours(frame.f_code):
            of = owner.__qualname__ if isinstance(owner, type) else ""
            module = owner.__module__ if of else owner.__name__
            _CALLS.add(".".join(filter(None, (module, of, name))))
        return original(*args, **kwargs)

    setattr(owner, name, noted)


def is_ours(code: types.CodeType) -> bool:
    """Whether code is of fullshard, or of this file."""
    return os.path.realpath(code.co_filename).startswith(OURS)


def is_our_function(value: object) -> bool:
    """Whether a value is a function or a class of fullshard, or a part of one."""
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, (classmethod, staticmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, type):
        return str(value.__module__).startswith("fullshard.")
    return isinstance(value, types.FunctionType) and is_ours(value.__code__)


def replaced() -> Iterator[str]:
    """Names of other libraries that stand for something of fullshard now."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.startswith(
            ("fullshard", "__m", "tests")
        ):
            continue
        for attribute, value in list(vars(module).items()):
            yield from _ours_in(f"{name}.{attribute}", value)
            if isinstance(value, type) and value.__module__ == name:
                for inner, found in list(vars(value).items()):
                    yield from _ours_in(f"{name}.{attribute}.{inner}", found)


def _ours_in(name: str, value: object) -> Iterator[str]:
    if is_our_function(value) and getattr(value, "__code__", None) not in _NOTING:
        yield name
    elif isinstance(value, dict | list):
        values = list(value.values() if isinstance(value, dict) else value)
        if any(map(is_our_function, values)):
            yield f"{name}[]"


_NOTING: set[types.CodeType] = set()


def tell() -> None:
    """Print what has changed until now."""
    facts = {
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == "fullshard"),
        "calls": sorted(_CALLS),
        "environment": sorted(
            name
            for name in {*os.environ, *_ENVIRONMENT}
            if os.environ.get(name) != _ENVIRONMENT.get(name) and not name.startswith("TORCH")
        ),
        "replaced": sorted(set(replaced())),
        "threads": sorted(
            each.name for each in threading.enumerate() if each is not threading.main_thread()
        ),
    }
    print(json.dumps(facts), flush=True)


def import_all() -> None:
    import fullshard

    tell()
    for name in fullshard.__all__:
        getattr(fullshard, name)
    tell()
    for module in pkgutil.walk_packages(fullshard.__path__, "fullshard."):
        if not module.name.startswith(NOT_OF_THE_LIBRARY):
            importlib.import_module(module.name)
    tell()


def change() -> None:
    """Change what `tell` looks at, as a library would."""
    from torch import nn

    original = nn.Module.zero_grad
    nn.Module.zero_grad = lambda self: original(self)  # type: ignore[assignment, method-assign, misc]
    sys.excepthook = lambda *error: None
    os.environ["SOMETHING"] = "1"
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    atexit.register(lambda: None)
    os.register_at_fork(after_in_child=lambda: None)
    multiprocessing.util.Finalize(None, lambda: None, exitpriority=0)
    threading.Thread(target=threading.Event().wait, name="something", daemon=True).start()
    tell()


def train(folder: Path) -> None:
    """Train and save as one of two ranks; rank 0 tells."""
    import torch
    import torch.distributed as dist

    rank = int(os.fork() == 0)
    if rank:
        sys.stdout = open(os.devnull, "w")
    import fullshard

    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    model = fullshard.fully_shard(torch.nn.Linear(4, 4))
    tell()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    tell()
    fullshard.checkpoint.async_save(folder / "saved", model, optimizer).wait()
    tell()
    dist.destroy_process_group()


NOTED: tuple[tuple[Any, str], ...] = (
    (atexit, "register"),
    (os, "register_at_fork"),
    (signal, "signal"),
    (multiprocessing.util, "Finalize"),
    (multiprocessing.util, "register_after_fork"),
    (threading.Thread, "start"),
)

if __name__ == "__main__":
    for each in NOTED:
        note_calls(*each)
        _NOTING.add(getattr(*each).__code__)
    actions: dict[str, Callable[..., None]] = {
        "import": import_all,
        "change": change,
        "train": lambda folder: train(Path(folder)),
    }
    actions[sys.argv[1]](*sys.argv[2:])
