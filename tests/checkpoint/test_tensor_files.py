"""A file of tensors is what was written, or it is refused."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import resource
import socket
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fullshard.checkpoint import tensor_files
from fullshard.checkpoint.dtypes import DTYPE_CODES, DTYPES_BY_CODE
from fullshard.checkpoint.manifest import FileRecord
from fullshard.checkpoint.tensor_files import (
    CHUNK_BYTES as CHUNK,
    FileEntry,
    NewEntry,
    TensorFile,
    write_file,
)
from fullshard.errors import CheckpointError
from fullshard.layout.blocks import Block, whole


def entries_of(tensors: Mapping[str, Tensor]) -> list[NewEntry]:
    return [NewEntry(key, x.dtype, tuple(x.shape), x.contiguous) for key, x in tensors.items()]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def read(file: TensorFile, key: str) -> Tensor:
    entry = file.entries[key]
    out = torch.empty(entry.shape, dtype=entry.dtype)
    file.read_into(key, 0, out)
    return out


def overwrite(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def data_at(content: bytes) -> int:
    return 8 + struct.unpack("<Q", content[:8])[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.safetensors"


@pytest.fixture
def small(path: Path) -> FileRecord:
    """The record of a small file with three tensors."""
    a, b = torch.arange(3.0), torch.tensor([[True], [False]])
    return write_file(
        path, entries_of({"model/a": a, "model/b": b, "model/none": torch.empty(0, 4)})
    )


# --- what is written is what is read ---------------------------------------------------------------------


def test_tensors_of_all_dtypes_come_back_bit_by_bit(path: Path) -> None:
    tensors = {
        f"model/{code} {shape}": random_bits(shape, dtype)
        for dtype, code in DTYPE_CODES.items()
        for shape in ((), (3,), (0,), (5, 0, 2), (7, 3))
    }
    record = write_file(path, entries_of(tensors))
    file = TensorFile(path, record)
    assert set(file.entries) == set(tensors)
    for key, tensor in tensors.items():
        assert same_bits(read(file, key), tensor), key
    assert file.verify([(0, sum(tensor.nbytes for tensor in tensors.values()))]) == []


def test_the_library_reads_what_we_write_and_the_other_way_round(path: Path) -> None:
    tensors = {code: random_bits((7, 3), dtype) for dtype, code in DTYPE_CODES.items()}
    write_file(path, entries_of(tensors))
    theirs = load_file(path)
    assert set(theirs) == set(tensors)
    assert all(same_bits(theirs[key], tensors[key]) for key in tensors)
    with safe_open(path, "pt") as opened:
        assert opened.metadata()["format"] == "pt"

    save_file(tensors, other := path.with_name("theirs.safetensors"), {"who": "they"})
    ours = TensorFile(other, None)
    assert ours.metadata == {"who": "they"}
    assert {key: ours.entries[key].dtype for key in tensors} == DTYPES_BY_CODE
    assert all(same_bits(read(ours, key), tensors[key]) for key in tensors)
    assert ours.verify([(0, 100)]) == []


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3 * CHUNK) | st.integers(0, 9), max_size=5))
def test_chunks_run_across_tensors(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "chunks.safetensors"
    path.unlink(missing_ok=True)
    tensors = {str(n): torch.full((size,), n, dtype=torch.uint8) for n, size in enumerate(sizes)}
    told: list[int] = []
    record = write_file(path, entries_of(tensors), on_bytes=told.append)
    file = TensorFile(path, record)
    assert file.verify([(0, sum(sizes))]) == []
    assert sum(told) == sum(sizes)
    content = path.read_bytes()
    assert record.nbytes == len(content)
    assert data_at(content) % 64 == 0
    assert file.metadata["crc32"] == "".join(
        f"{zlib.crc32(content[begin : begin + CHUNK]):08x}"
        for begin in range(data_at(content), len(content), CHUNK)
    )


def test_large_elements_come_first_so_that_all_are_aligned(path: Path) -> None:
    dtypes = (torch.bool, torch.float32, torch.int64, torch.bfloat16, torch.uint8)
    order: list[torch.dtype] = []

    def fetch(dtype: torch.dtype) -> Tensor:
        order.append(dtype)
        return torch.ones(3, dtype=dtype)

    write_file(path, [NewEntry(str(dtype), dtype, (3,), partial(fetch, dtype)) for dtype in dtypes])
    assert order == [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8]
    entries = TensorFile(path, None).entries.values()
    assert all(entry.begin % entry.dtype.itemsize == 0 for entry in entries)


def test_a_fetch_may_use_the_memory_of_the_one_before(path: Path) -> None:
    buffer = torch.empty(CHUNK, dtype=torch.uint8)
    crc32 = zlib.crc32

    def slow_crc32(data: memoryview, start: int = 0) -> int:
        time.sleep(0.02)
        return crc32(data, start)

    with mock.patch("zlib.crc32", slow_crc32):
        record = write_file(
            path,
            [NewEntry(str(n), torch.uint8, (CHUNK,), partial(buffer.fill_, n)) for n in range(3)],
        )
    assert TensorFile(path, record).verify([(0, 3 * CHUNK)]) == []


def test_a_file_without_tensors_is_a_file(path: Path) -> None:
    record = write_file(path, [])
    assert TensorFile(path, record).entries == {}
    assert load_file(path) == {}


def test_entries_say_where_their_bytes_are(path: Path, small: FileRecord) -> None:
    assert TensorFile(path, small).entries == {
        "model/a": FileEntry(torch.float32, (3,), 0, 12),
        "model/none": FileEntry(torch.float32, (0, 4), 12, 12),
        "model/b": FileEntry(torch.bool, (2, 1), 12, 14),
    }


def test_any_part_of_a_tensor_can_be_read_and_no_more(path: Path) -> None:
    tensors = {"before": torch.zeros(5), "x": torch.arange(100.0), "after": torch.zeros(5)}
    file = TensorFile(path, write_file(path, entries_of(tensors)))
    out = torch.full((2, 3), -1.0)
    file.read_into("x", 94, out)
    assert out.tolist() == [[94, 95, 96], [97, 98, 99]]
    for first in (-1, 95):
        with pytest.raises(AssertionError, match="x has no such elements"):
            file.read_into("x", first, out)
    with pytest.raises(AssertionError, match=r"x is torch\.float32, not torch\.int32"):
        file.read_into("x", 0, torch.empty(1, dtype=torch.int32))
    with pytest.raises(AssertionError, match="other tensors are not contiguous"):
        file.read_into("x", 0, out.t())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("wanted", "sizes"),
    [
        (Block((0, 0), (600, 1000)), [2_400_000]),
        (Block((5, 0), (300, 1000)), [1_200_000]),
        (Block((5, 7), (300, 900)), [4 * (299 * 1000 + 900)]),  # with the gaps
        (Block((5, 7), (1, 900)), [3600]),
        (Block((0, 999), (600, 1)), [4 * (599 * 1000 + 1)]),
    ],
)
def test_rows_near_each_other_are_read_together(
    path: Path, wanted: Block, sizes: list[int], transposed: bool
) -> None:
    x = torch.arange(600_000, dtype=torch.int32).reshape(600, 1000)
    out = torch.empty(wanted.shape[::-1] if transposed else wanted.shape, dtype=torch.int32)
    assert reads_of_block(path, x, wanted, out.t() if transposed else out) == sizes


def test_rows_far_apart_are_read_alone_and_long_rows_straight_into_their_place(path: Path) -> None:
    x = torch.arange(20 * 100_000, dtype=torch.int32).reshape(20, 100_000)
    out = torch.empty(20, 3, dtype=torch.int32)
    assert reads_of_block(path, x, Block((0, 5), (20, 3)), out) == [12] * 20
    path.unlink()
    out = torch.zeros(20, 100_001, dtype=torch.int32)[:, 1:]
    with (
        mock.patch.object(tensor_files, "SMALLEST_DIRECT_READ", 400_000),
        mock.patch.object(torch, "empty", side_effect=AssertionError("memory for a copy")),
    ):
        assert reads_of_block(path, x, whole(x.shape), out) == [400_000] * 20


def reads_of_block(path: Path, x: Tensor, wanted: Block, out: Tensor) -> list[int]:
    """Bytes of each call that it took to read a block of a file that has ``x``."""
    file = TensorFile(path, write_file(path, entries_of({"x": x})))
    with mock.patch("os.preadv", wraps=os.preadv) as preadv:
        file.read_block("x", wanted, out, of=whole(x.shape))
    assert torch.equal(out, x[wanted.slices_in(whole(x.shape))])
    return [len(call.args[1][0]) for call in preadv.call_args_list]


# --- what is damaged or not a file of tensors is refused -------------------------------------------------


def test_every_flipped_bit_is_noticed_and_its_file_named(path: Path, small: FileRecord) -> None:
    good = path.read_bytes()
    for place, byte in enumerate(good):
        in_data = place >= data_at(good)
        for bit in range(8):
            overwrite(path, place, bytes([byte ^ 1 << bit]))
            try:
                faults = TensorFile(path, small).verify([(0, 14)])
            except CheckpointError as error:
                assert not in_data
                faults = [str(error)]
            assert len(faults) == 1, f"bit {bit} of byte {place}"
            assert str(path) in faults[0]
            assert "'model/a', 'model/b'" in faults[0] or not in_data
        overwrite(path, place, bytes([byte]))
    assert TensorFile(path, small).verify([(0, 14)]) == []


def test_only_the_chunks_around_a_range_are_read_and_all_their_tensors_named(path: Path) -> None:
    sizes = {"a": CHUNK + 5, "b": 10, "c": 3 * CHUNK, "d": CHUNK}
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    file = TensorFile(path, write_file(path, entries_of(tensors)))
    for position in (CHUNK + 100, 3 * CHUNK - 1, 4 * CHUNK):
        overwrite(path, data_at(path.read_bytes()) + position, b"x")

    def faults(*ranges: tuple[int, int]) -> list[str]:
        return [fault.split("is damaged: ")[1] for fault in file.verify(ranges)]

    assert faults((0, CHUNK), (3 * CHUNK, 4 * CHUNK), (2 * CHUNK + 7, 2 * CHUNK + 7)) == []
    assert faults((2 * CHUNK - 1, 2 * CHUNK)) == [
        "bytes 1048576 to 2097152 of its data are not those that were written (CRC-32 differs), "
        "in tensors 'a', 'b', 'c'."
    ]
    assert [fault[:24] for fault in faults((0, 5 * CHUNK + 15), (0, 9))] == [
        "bytes 1048576 to 3145728",
        "bytes 4194304 to 5242880",
    ]
    with mock.patch("os.preadv", wraps=os.preadv) as preadv:
        faults((0, 1), (1, 2), (CHUNK - 1, CHUNK + 1))
    assert preadv.call_count == 2


def test_a_file_cut_short_is_refused_wherever_it_was_cut(path: Path, small: FileRecord) -> None:
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(
            CheckpointError, match=rf"{path}.* {length} bytes, but {len(good)} were"
        ):
            TensorFile(path, small)
        with pytest.raises(CheckpointError, match=str(path)):
            TensorFile(path, None)


def test_a_file_cut_short_or_replaced_while_it_is_open_is_an_error(
    path: Path, small: FileRecord
) -> None:
    file = TensorFile(path, small)
    os.truncate(path, small.nbytes - 4)
    with pytest.raises(CheckpointError, match=r"ends after .* before the end of tensor 'model/a'"):
        read(file, "model/a")
    (fault,) = file.verify([(0, 1)])
    assert "before the end of its data. These bytes are in tensors 'model/a', 'model/b'." in fault
    file.close()
    with pytest.raises(CheckpointError, match="changed or replaced since"):
        read(file, "model/a")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        read(file, "model/a")


def test_a_closed_file_is_opened_again_and_closed_when_it_is_let_go(
    path: Path, small: FileRecord
) -> None:
    def is_open() -> bool:
        names = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return any(os.path.realpath(name) == str(path.resolve()) for name in names)

    file = TensorFile(path, small)
    assert is_open()
    file.close()
    assert not is_open()
    assert read(file, "model/a").tolist() == [0, 1, 2]
    assert is_open()
    del file
    assert not is_open()


def header(fields: object, data: bytes = b"") -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(dtype: Any, shape: Any, *offsets: Any, data: bytes = b"x") -> bytes:
    """A file of one tensor."""
    return header({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, data)


def two(first: tuple[int, int], second: tuple[int, int], data: bytes) -> bytes:
    """A file of two tensors of bytes."""
    return header(
        {
            key: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for key, (begin, end) in {"a": first, "b": second}.items()
        },
        data,
    )


class Trap:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return pytest.fail, ("something in the file was executed",)


BYTE = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
CRAFTED = {
    "empty": (b"", "too few"),
    "seven bytes": (b"1234567", "too few"),
    "pickle": (pickle.dumps(Trap()), "its header would have"),
    "length 0": (struct.pack("<Q", 0), "not valid"),
    "length 2**63": (struct.pack("<Q", 1 << 63) + b"{}", f"would have {1 << 63} bytes"),
    "length 2**64 - 1": (b"\xff" * 8 + b"{}", "would have"),
    "length one too many": (struct.pack("<Q", 3) + b"{}", "would have 3 bytes"),
    "not JSON": (header(b"{x}"), "not valid"),
    "not UTF-8": (header(b'{"\xff": 1}'), "not valid"),
    "UTF-16": (header("{}".encode("utf-16")), "not valid"),
    "a list": (header([]), "must be a JSON object"),
    "text after it": (header(b"{} {}"), "not valid"),
    "deep lists": (header(b"[" * 100_000), "not valid"),
    "deep objects": (header(b'{"a":' * 100_000), "not valid"),
    "long number": (header(b'{"a": ' + b"9" * 5000 + b"}"), "not valid"),
    "tensor twice": (header(b'{"a":%b,"a":%b}' % (BYTE, BYTE), b"x"), "repeated: 'a'"),
    "field twice": (header(b'{"a":{"dtype":"U8","dtype":"I8"}}', b"x"), "repeated: 'dtype'"),
    "metadata twice": (header(b'{"__metadata__":{},"__metadata__":{}}'), "repeated"),
    "metadata a list": (header({"__metadata__": []}), "must be an object of strings"),
    "metadata numbers": (header({"__metadata__": {"a": 1}}), "must be an object of strings"),
    "tensor a list": (header({"a": []}), "tensor 'a' must be an object"),
    "tensor empty": (header({"a": {}}), "tensor 'a' has the dtype None"),
    "unknown dtype": (one("F7", [1], 0, 1), "'a' has the dtype 'F7'"),
    "dtype a list": (one(["U8"], [1], 0, 1), "'a' has the dtype"),
    "dtype long": (one("U" * 10_000, [1], 0, 1), "'a' has the dtype"),
    "negative size": (one("U8", [-1], 0, 1), "none of them negative"),
    "negative sizes": (one("U8", [-1, -1], 0, 1), "none of them negative"),
    "size a float": (one("U8", [1.0], 0, 1), "'a' must have 64 sizes"),
    "size true": (one("U8", [True], 0, 1), "'a' must have 64 sizes"),
    "size NaN": (one("U8", [float("nan")], 0, 1), "'a' must have 64 sizes"),
    "size 2**64 + 1": (one("U8", [2**64 + 1], 0, 1), "'a' must have 64 sizes"),
    "shape a number": (one("U8", 1, 0, 1), "'a' must have 64 sizes"),
    "many dims": (one("U8", [2**62] * 100_000, 0, 1), "'a' must have 64 sizes"),
    "overflow": (one("U8", [2**32, 2**32], 0, 0), f"needs {2**64} bytes, not those from 0 to 0"),
    "negative offset": (one("U8", [1], -1, 0), "'a' must have two data_offsets"),
    "one offset": (one("U8", [1], 0), "'a' must have two data_offsets"),
    "three offsets": (one("U8", [1], 0, 1, 2), "'a' must have two data_offsets"),
    "end before begin": (one("U8", [1], 1, 0), "not those from 1 to 0"),
    "too few bytes": (one("F32", [2], 0, 4, data=b"1234"), "needs 8 bytes"),
    "too many bytes": (one("F16", [2], 0, 8, data=b"12345678"), "needs 4 bytes"),
    "beyond the end": (one("U8", [9], 0, 9), "have 9 bytes, but 1 follow"),
    "data left over": (one("U8", [1], 0, 1, data=b"xy"), "have 1 bytes, but 2 follow"),
    "hole at the start": (one("U8", [1], 1, 2, data=b"xy"), "'a' must begin"),
    "hole": (two((0, 1), (2, 3), b"xyz"), "'b' must begin where the one before it ends, at 1, not"),
    "overlap": (two((0, 2), (1, 3), b"xyz"), "'b' must begin where the one before it ends, at 2,"),
    "the same bytes": (two((0, 1), (0, 1), b"x"), "'b' must begin"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_refused(path: Path, name: str) -> None:
    content, why = CRAFTED[name]
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        TensorFile(path, None)
    assert str(path) in str(caught.value)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_what_the_library_refuses_is_refused_and_the_rest_read_as_by_the_library(
    tmp_path_factory: pytest.TempPathFactory, chance: random.Random
) -> None:
    """Of files in which a few bytes of the header have changed."""
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.unlink(missing_ok=True)
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.int16), "c": torch.ones(())}
    save_file(tensors, path)
    content = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 3)):
        content[chance.randrange(8, data_at(content))] = chance.choice(
            b'0123456789-,:{}[]"abFUI \\'
        )
    path.write_bytes(content)
    try:
        with safe_open(path, "pt") as opened:
            theirs = {key: opened.get_tensor(key) for key in opened.keys()}
    except SafetensorError:
        with pytest.raises(CheckpointError):
            TensorFile(path, None)
        return
    try:
        ours = TensorFile(path, None)
    except CheckpointError as error:
        assert "repeated" in str(error)  # the library takes the last of two tensors of one name
        return
    assert set(ours.entries) == set(theirs)
    assert all(same_bits(read(ours, key), theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, "chunks of 1048576 bytes"),
        ({"chunk_bytes": "1", "crc32": "00" * 4}, "chunks of 1048576 bytes"),
        ({"chunk_bytes": str(CHUNK)}, "must be 1 checksums"),
        ({"chunk_bytes": str(CHUNK), "crc32": "0123456"}, "not valid"),
        ({"chunk_bytes": str(CHUNK), "crc32": "x" * 8}, "not valid"),
        ({"chunk_bytes": str(CHUNK), "crc32": "00" * 8}, "must be 1 checksums"),
    ],
)
def test_a_file_of_ours_has_a_checksum_for_every_chunk(
    path: Path, metadata: dict[str, str], why: str
) -> None:
    content = header({"__metadata__": metadata, "a": json.loads(BYTE)}, b"x")
    path.write_bytes(content)
    assert set(TensorFile(path, None).entries) == {"a"}
    with pytest.raises(CheckpointError, match=why):
        TensorFile(path, FileRecord(len(content), zlib.crc32(content[:-1])))


def test_links_folders_pipes_and_sockets_are_not_files(
    path: Path, small: FileRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)  # the name of a socket must be short
    Path("folder").mkdir()
    Path("link").symlink_to(path)
    Path("link to nothing").symlink_to("nothing")
    os.mkfifo("pipe")
    with closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind("socket")
        for name in ("folder", "link to nothing", "pipe", "socket", "/dev/zero", "nothing"):
            for record in (small, None):
                with pytest.raises(CheckpointError, match=f"^{name} cannot be used"):
                    TensorFile(Path(name), record)
    with pytest.raises(CheckpointError, match=r"^link cannot be used: it is a link"):
        TensorFile(Path("link"), small)
    assert "model/a" in TensorFile(Path("link"), None).entries  # as in the caches of Hugging Face


# --- what cannot be written leaves nothing behind --------------------------------------------------------


def two_tensors(size: int) -> list[NewEntry]:
    return entries_of({"model/first": torch.ones(5), "model/big": torch.ones(size)})


def test_a_full_disk_is_told_with_file_and_tensor(path: Path) -> None:
    real = os.open

    def on_a_full_disk(name: Path, flags: int, mode: int) -> int:
        os.close(real(name, flags, mode))
        return real("/dev/full", os.O_WRONLY)

    with mock.patch("os.open", on_a_full_disk), pytest.raises(CheckpointError) as caught:
        write_file(path, two_tensors(10))
    assert str(caught.value).startswith(
        f"Cannot write {path}, at tensor 'model/first', after 0 of 60 bytes: "
        "No space left on device."
    )
    assert list(path.parent.iterdir()) == []


def test_a_limit_reached_on_the_way_is_told_and_the_part_removed(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            write_file(path, two_tensors(CHUNK))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{path}, at tensor 'model/big', after 20 of" in str(caught.value)
    assert os.strerror(errno.EFBIG) in str(caught.value)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_a_disk_that_fails_at_the_end_is_told_and_the_file_removed(path: Path, call: str) -> None:
    real = getattr(os, call)

    def failing(descriptor: int) -> None:
        real(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with mock.patch(f"os.{call}", failing), pytest.raises(CheckpointError) as caught:
        write_file(path, two_tensors(5))
    assert str(path) in str(caught.value)
    assert os.strerror(errno.EDQUOT) in str(caught.value)
    assert list(path.parent.iterdir()) == []


def test_a_folder_that_is_not_there_or_takes_no_files_is_told(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Cannot create .*/no/x: No such file or directory"):
        write_file(path.parent / "no" / "x", two_tensors(5))
    with pytest.raises(CheckpointError, match=r"Cannot create /proc/x: "):
        write_file(Path("/proc/x"), two_tensors(5))


def test_what_is_there_is_never_overwritten(path: Path) -> None:
    path.write_text("mine")
    (link := path.with_name("link")).symlink_to(path)
    for name in (path, link):
        with pytest.raises(CheckpointError, match=f"Cannot create {name}: File exists"):
            write_file(name, two_tensors(5))
    assert path.read_text() == "mine"


def test_a_fetch_that_fails_leaves_no_file(path: Path) -> None:
    def interrupted() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(path, [*two_tensors(5), NewEntry("model/x", torch.uint8, (1,), interrupted)])
    assert list(path.parent.iterdir()) == []


def test_what_a_file_cannot_have_is_told_before_anything_is_written(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"these have others: model/x \(torch\.complex128\)"):
        write_file(path, entries_of({"model/x": torch.ones(1, dtype=torch.complex128)}))
    with (
        mock.patch.object(tensor_files, "MAX_HEADER", 100),
        pytest.raises(CheckpointError, match="can have at most 100 bytes"),
    ):
        write_file(path, two_tensors(5))
    assert list(path.parent.iterdir()) == []
