"""An interpreter for the pickle of a torch distributed checkpoint's metadata, which does not trust the file.

Python's unpickler runs code that the file names, and a few bytes can make it fill the memory or run forever: objects
that contain each other twice, over and over; an index of 2 billion; a size that is copied a million times. This
interpreter knows the instructions and the names that such files have, and refuses all others.

- Nothing is imported or called: an object becomes a `Record` of what it would be built from.
- Keys of dicts are strings, integers and records, which are hashed in constant time.
- The time and memory of an instruction depend on its own operands, not on what these contain.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

from fullshard.layout.blocks import MAX_DIMS, are_sizes

MAX_TUPLE = 256
"""Values in a tuple; sizes, paths and arguments have fewer."""


class Record:
    """An object as data: the name of its class and what it would be built from."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, state: Any) -> None:
        self.kind = kind
        self.state = state


class _Kind:
    """The name of a class."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # Written by torch before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    # The path that was saved to; Python 3.13 has these classes in another module.
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _size(args: tuple[Any, ...]) -> tuple[int, ...]:
    if len(args) != 1 or not are_sizes(args[0]):
        raise ValueError(f"a torch.Size has at most {MAX_DIMS} sizes")
    return tuple(args[0])


def _layout(args: tuple[Any, ...]) -> str:
    if len(args) != 1 or type(args[0]) is not str:
        raise ValueError("a layout is a name")
    return args[0]


def _empty_dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    if args:
        raise ValueError("an OrderedDict begins empty")
    return {}


_MADE: dict[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): _empty_dict,
}


def unpickle(content: bytes) -> Any:
    """Return the value in a pickle.

    Raises:
        Exception: of any kind, if it is damaged, or not what torch writes.
    """
    return _Reader(content).read()


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        content, instructions = self._content, _INSTRUCTIONS
        while True:
            code = content[self._at]
            self._at += 1
            if code == _STOP:
                (result,) = self._stack
                return result
            instruction = instructions.get(code)
            if instruction is None:
                raise ValueError(
                    f"metadata never have the instruction {code:#04x}, at {self._at - 1}"
                )
            instruction(self)

    # --- bytes

    def _bytes(self, count: int) -> bytes:
        start = self._at
        if count > len(self._content) - start:
            raise ValueError("it ends too early")
        self._at = start + count
        return self._content[start : self._at]

    def _count(self, width: int) -> int:
        return int.from_bytes(self._bytes(width), "little")

    def _line(self) -> str:
        end = self._content.index(b"\n", self._at)
        text = self._content[self._at : end].decode()
        self._at = end + 1
        return text

    # --- values

    def proto(self) -> None:
        if self._count(1) > 5:
            raise ValueError("its protocol is not known")

    def frame(self) -> None:
        self._count(8)

    def none(self) -> None:
        self._stack.append(None)

    def true(self) -> None:
        self._stack.append(True)

    def false(self) -> None:
        self._stack.append(False)

    def int_of_1(self) -> None:
        self._stack.append(self._count(1))

    def int_of_2(self) -> None:
        self._stack.append(self._count(2))

    def int_of_4(self) -> None:
        self._stack.append(int.from_bytes(self._bytes(4), "little", signed=True))

    def long_1(self) -> None:
        width = self._count(1)
        if width > 16:
            raise ValueError("it has an integer of more than 128 bits")
        self._stack.append(int.from_bytes(self._bytes(width), "little", signed=True))

    def float_of_8(self) -> None:
        self._stack.append(struct.unpack(">d", self._bytes(8))[0])

    def text_1(self) -> None:
        self._stack.append(self._bytes(self._count(1)).decode())

    def text_4(self) -> None:
        self._stack.append(self._bytes(self._count(4)).decode())

    def text_8(self) -> None:
        self._stack.append(self._bytes(self._count(8)).decode())

    # --- the memo

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put_1(self) -> None:
        self._memo[self._count(1)] = self._stack[-1]

    def put_4(self) -> None:
        self._memo[self._count(4)] = self._stack[-1]

    def get_1(self) -> None:
        self._stack.append(self._memo[self._count(1)])

    def get_4(self) -> None:
        self._stack.append(self._memo[self._count(4)])

    # --- containers

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def _from_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _push_tuple(self, count: int) -> None:
        # The stack must have so many values above the last open mark.
        first = len(self._stack) - count
        if first < (self._marks[-1] if self._marks else 0):
            raise ValueError("it has fewer values than it uses")
        values = tuple(self._stack[first:])
        del self._stack[first:]
        self._stack.append(values)

    def tuple_0(self) -> None:
        self._stack.append(())

    def tuple_1(self) -> None:
        self._push_tuple(1)

    def tuple_2(self) -> None:
        self._push_tuple(2)

    def tuple_3(self) -> None:
        self._push_tuple(3)

    def tuple_from_mark(self) -> None:
        values = self._from_mark()
        if len(values) > MAX_TUPLE:
            raise ValueError(f"it has a tuple of {len(values)} values")
        self._stack.append(tuple(values))

    def empty_list(self) -> None:
        self._stack.append([])

    def append(self) -> None:
        value = self._stack.pop()
        self._last(list).append(value)

    def appends(self) -> None:
        values = self._from_mark()
        self._last(list).extend(values)

    def empty_dict(self) -> None:
        self._stack.append({})

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._last(dict)[_hashable(key)] = value

    def set_items(self) -> None:
        values = self._from_mark()
        target = self._last(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_hashable(key)] = value

    def _last(self, kind: type) -> Any:
        value = self._stack[-1]
        if type(value) is not kind:
            raise ValueError(f"{type(value).__name__} where a {kind.__name__} should be")
        return value

    # --- objects

    def named(self) -> None:
        module, name = self._line(), self._line()
        self._stack.append(_named(module, name))

    def stack_named(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("names are strings")
        self._stack.append(_named(module, name))

    def make(self) -> None:
        args, maker = self._stack.pop(), self._stack.pop()
        if type(args) is not tuple:
            raise ValueError("arguments are a tuple")
        if type(maker) is _Kind:
            self._stack.append(Record(maker.name, args))
        elif maker in _MADE.values():
            self._stack.append(maker(args))
        else:
            raise ValueError(f"a {type(maker).__name__} makes nothing")

    def build(self) -> None:
        state = self._stack.pop()
        self._last(Record).state = state


def _named(module: str, name: str) -> Any:
    if name in _RECORDS.get(module, ()):
        return _Kind(name)
    if (module, name) in _MADE:
        return _MADE[module, name]
    if module == "torch" and name in _DTYPES:
        return _DTYPES[name]
    raise ValueError(f"{module}.{name} is not part of any metadata; the file would run it")


def _hashable(key: Any) -> Any:
    """Return a key if it is hashed in constant time."""
    if type(key) not in (str, int, Record):
        raise ValueError(f"a key is a {type(key).__name__}")
    return key


_STOP = ord(".")
_INSTRUCTIONS: dict[int, Callable[[_Reader], None]] = {
    0x80: _Reader.proto,
    0x95: _Reader.frame,
    ord("N"): _Reader.none,
    0x88: _Reader.true,
    0x89: _Reader.false,
    ord("K"): _Reader.int_of_1,
    ord("M"): _Reader.int_of_2,
    ord("J"): _Reader.int_of_4,
    0x8A: _Reader.long_1,
    ord("G"): _Reader.float_of_8,
    0x8C: _Reader.text_1,
    ord("X"): _Reader.text_4,
    0x8D: _Reader.text_8,
    0x94: _Reader.memoize,
    ord("q"): _Reader.put_1,
    ord("r"): _Reader.put_4,
    ord("h"): _Reader.get_1,
    ord("j"): _Reader.get_4,
    ord("("): _Reader.mark,
    ord(")"): _Reader.tuple_0,
    0x85: _Reader.tuple_1,
    0x86: _Reader.tuple_2,
    0x87: _Reader.tuple_3,
    ord("t"): _Reader.tuple_from_mark,
    ord("]"): _Reader.empty_list,
    ord("a"): _Reader.append,
    ord("e"): _Reader.appends,
    ord("}"): _Reader.empty_dict,
    ord("s"): _Reader.set_item,
    ord("u"): _Reader.set_items,
    ord("c"): _Reader.named,
    0x93: _Reader.stack_named,
    ord("R"): _Reader.make,
    0x81: _Reader.make,
    ord("b"): _Reader.build,
}
"""Instructions by code: those of protocols 2 to 5 that write values, names and objects."""
