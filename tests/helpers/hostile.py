"""Files that nobody wrote: mutations of good ones, and a process to read them in, with little memory and time.

Mutations are drawn from a generator with a seed, so that what fails once fails again.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUM_INPUTS = int(os.environ.get("FULLSHARD_HOSTILE_INPUTS", "300"))
"""A thousand and more are for when it matters."""
MEMORY_BYTES = 1 << 30
"""More than the process had: parsers of small files need nothing near it."""
CPU_SECONDS = 20

NAMES = ("", "\x1b[2Jx", "a\x00b", "../../x", "\ud800", "é\u202e", "x" * 3000, "0", "-1", "1e999")
NUMBERS = (
    *(0, -1, 1, 2, 63, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 10**5000),
    *(0.5, -0.0, 1e-300, 1e308, 1.7e308, -1e300, float("nan"), float("inf"), float("-inf")),
)
STRETCHES = (
    b"\xff" * 8,
    b"\x00" * 8,
    b"\x7f\xff\xff\xff",
    b"9" * 5000,
    b"[" * 5000,
    b'{"a":' * 5000,
)


def value(random: random.Random, depth: int = 0) -> Any:
    """Something that may be in JSON, and was not expected."""
    kind = random.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return random.choice((None, True, False))
    if kind in (1, 2, 3):
        return random.choice(NUMBERS)
    if kind in (4, 5):
        return random.choice(NAMES)
    if kind == 6:
        return [value(random, depth + 1) for _ in range(random.randrange(5))]
    if kind == 7:
        return {random.choice(NAMES): value(random, depth + 1) for _ in range(random.randrange(4))}
    return nested(random.choice((list, dict)), random.choice((5, 120, 250)))


def nested(kind: type, depth: int) -> Any:
    """A list in a list in a list, or a dict."""
    found: Any = kind()
    for _ in range(depth):
        found = [found] if kind is list else {"a": found}
    return found


def mutated_tree(random: random.Random, tree: Any) -> Any:
    """A copy of what JSON says with one to three changes at any depth."""
    tree = _copied(tree)
    for _ in range(random.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return value(random)
        container, key = random.choice(places)
        change = random.randrange(5)
        if change == 0:
            del container[key]
        elif change == 1:  # what is elsewhere in the tree
            other, at = random.choice(places)
            container[key] = _copied(other[at])
        elif change == 2 and isinstance(container, dict):
            container[random.choice(NAMES)] = container[key]
        elif change == 2:
            container.extend([container[key]] * random.choice((1, 100)))
        else:
            container[key] = value(random)
    return tree


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(each) for key, each in tree.items()}
    return [_copied(each) for each in tree] if isinstance(tree, list) else tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            inner = list(each.items() if isinstance(each, dict) else enumerate(each))
            yield from ((each, key) for key, _ in inner)
            waiting += [inside for _, inside in inner]


def json_text(tree: Any) -> bytes:
    """As JSON with all that Python's writes and others do not: NaN, integers of any length."""
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(tree).encode("utf-8", "surrogatepass")
    finally:
        sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)


def mutated_bytes(random: random.Random, content: bytes) -> bytes:
    """A copy with one to four changes: bits, cuts, parts that are left out, doubled or put elsewhere."""
    data = bytearray(content)
    for _ in range(random.randint(1, 4)):
        begin = random.randrange(len(data) + 1)
        end = min(begin + random.choice((1, 2, 8, 50)), len(data))
        change = random.randrange(7)
        if change == 0:
            del data[begin:]
        elif change == 1:
            del data[begin:end]
        elif change == 2:
            data[begin:begin] = data[begin:end]
        elif change == 3:
            data[begin:end] = random.randbytes(end - begin)
        elif change == 4:
            at = random.randrange(len(data) + 1)
            data[at:at] = data[begin:end]
        elif change == 5:
            data[begin:end] = random.choice(STRETCHES)
        elif data:
            data[begin % len(data)] ^= 1 << random.randrange(8)
    return bytes(data)


def rewrite(path: Path, content: bytes) -> None:
    """Let a file have other content; in place, since file systems take their time to empty one."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def in_small_process(task: Callable[[], None]) -> None:
    """Run a task in a copy of this process that may use `MEMORY_BYTES` more, and `CPU_SECONDS`.

    Raises:
        AssertionError: it failed, with its traceback, or was ended: it ran too long.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there may be threads, which are not there in the copy
        process = os.fork()
    if process == 0:
        _run_and_leave(task, writer)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as stream:
        text = stream.read()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        raise AssertionError(f"ended by {signal.Signals(os.WTERMSIG(status)).name}")
    if text:
        raise AssertionError(text)


def _run_and_leave(task: Callable[[], None], writer: int) -> None:
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        task()
    except BaseException:
        text = traceback.format_exc()[-8000:]
        os.write(writer, text.encode("utf-8", "backslashreplace"))
    finally:
        os._exit(0)
