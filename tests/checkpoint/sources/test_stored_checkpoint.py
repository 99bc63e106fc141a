"""Whatever way ranks had cut a tensor, any block of it can be read, and damage is found where it matters."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fullshard.checkpoint import tensor_files
from fullshard.checkpoint.dtypes import DTYPE_CODES
from fullshard.checkpoint.manifest import Manifest, StoredTensor, file_name
from fullshard.checkpoint.source import Source, TensorInfo
from fullshard.checkpoint.sources import stored_checkpoint as stored_module
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.checkpoint.tensor_files import NewEntry, write_file
from fullshard.errors import CheckpointError
from fullshard.layout.blocks import Block, whole
from fullshard.layout.sharding import Sharding, replicated
from tests.helpers.shardings import blocks_in, shardings


def cell_of(x: Tensor, sharding: Sharding, cell: int) -> Tensor:
    """What a rank writes, by torch's own indexing."""
    as_stored = x if sharding.order is None else x.permute(sharding.order)
    if sharding.flat:
        as_stored = as_stored.reshape(-1)
    return as_stored[sharding.extent(cell).slices_in(whole(as_stored.shape))].contiguous()


def store(path: Path, tensors: Mapping[str, tuple[Tensor, Sharding]]) -> Manifest:
    """Write the files of all ranks."""
    entries: dict[int, list[NewEntry]] = defaultdict(list)
    for key, (x, sharding) in tensors.items():
        for cell, rank in zip(range(sharding.cells), sharding.holders[0], strict=False):
            part = cell_of(x, sharding, cell)
            if part.numel():
                entries[rank].append(NewEntry(key, part.dtype, tuple(part.shape), part.contiguous))
    (path / "data-0").mkdir(parents=True)
    return Manifest(
        data="data-0",
        world=1 + max(entries, default=0),
        tensors={key: StoredTensor(x.dtype, sharding) for key, (x, sharding) in tensors.items()},
        files={
            rank: write_file(path / "data-0" / file_name(rank), new)
            for rank, new in entries.items()
        },
    )


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[Tensor, Sharding]:
    """A tensor with no element like another, and how it is cut."""
    sharding = draw(shardings())
    order = sharding.order or tuple(range(len(sharding.shape)))
    sizes = dict(zip(order, sharding.shape, strict=True))
    shape = [sizes[dim] for dim in range(len(order))]
    dtype = draw(st.sampled_from((torch.int64, torch.int16)))
    return torch.arange(math.prod(shape), dtype=dtype).reshape(shape), sharding


@contextmanager
def small_limits(draw: st.DataObject) -> Iterator[int]:
    """Chunks, gaps and scratch memory such that small tensors need all ways of reading."""
    direct, gap = draw.draw(st.integers(1, 60)), draw.draw(st.integers(0, 60))
    chunk = draw.draw(st.sampled_from((16, 64)))
    with (
        mock.patch.multiple(
            tensor_files,
            CHUNK_BYTES=chunk,
            MAX_GAP=gap,
            SMALLEST_DIRECT_READ=direct,
            SCRATCH_BYTES=direct + gap + draw.draw(st.integers(8, 60)),
        ),
        mock.patch("os.fsync"),  # which would take most of the time
        mock.patch.object(stored_module, "CHUNK_BYTES", chunk),
    ):
        yield chunk


def strided_like(draw: st.DataObject, block: Block, dtype: torch.dtype) -> Tensor:
    """Memory for a block: contiguous, permuted, or a part of something larger."""
    order = draw.draw(st.permutations(range(len(block.shape))))
    more = draw.draw(st.integers(0, 2))
    permuted = torch.full([block.shape[dim] + more for dim in order], -1, dtype=dtype)
    back = [order.index(dim) for dim in range(len(order))]
    return permuted.permute(back)[tuple(slice(0, n) for n in block.shape)]


@settings(max_examples=60)
@given(cut_tensors(), st.data())
def test_any_block_of_any_sharding_can_be_read(
    cut: tuple[Tensor, Sharding], data: st.DataObject
) -> None:
    x, sharding = cut
    with TemporaryDirectory() as folder, small_limits(data):
        checkpoint = StoredCheckpoint(
            Path(folder), store(Path(folder), {"model/x": cut, "model/y": (x + 1, sharding)})
        )
        assert checkpoint.tensors["model/x"] == TensorInfo(x.dtype, tuple(x.shape))
        for _ in range(3):
            wanted = data.draw(blocks_in(tuple(x.shape)))
            out = strided_like(data, wanted, x.dtype)
            assert checkpoint.verify([("model/x", wanted)]) == []
            checkpoint.read("model/x", wanted, out)
            assert torch.equal(out, x[wanted.slices_in(whole(x.shape))])


@settings(max_examples=60)
@given(cut_tensors(), st.data())
def test_damage_is_found_in_the_chunks_of_what_is_wanted_and_only_there(
    cut: tuple[Tensor, Sharding], data: st.DataObject
) -> None:
    x, sharding = cut
    with TemporaryDirectory() as name, small_limits(data) as chunk:
        manifest = store(Path(name), {"model/x": cut})
        wanted = data.draw(blocks_in(tuple(x.shape)))
        marked = torch.zeros(x.shape, dtype=torch.bool)
        marked[wanted.slices_in(whole(x.shape))] = True
        for cell, rank in zip(range(sharding.cells), sharding.holders[0], strict=False):
            if rank not in manifest.files:
                continue
            path = Path(name) / manifest.data / file_name(rank)
            needed = cell_of(marked, sharding, cell).flatten().repeat_interleave(x.itemsize)
            place = data.draw(st.integers(0, len(needed) - 1))
            good = path.read_bytes()
            bad = bytearray(good)
            bad[place - len(needed)] ^= 4
            path.write_bytes(bad)
            faults = StoredCheckpoint(Path(name), manifest).verify([("model/x", wanted)])
            path.write_bytes(good)
            begin = place // chunk * chunk
            assert len(faults) == needed[begin : begin + chunk].any()
            assert all(str(path) in fault and "'model/x'" in fault for fault in faults)


def test_all_dtypes_can_be_read_strided(tmp_path: Path) -> None:
    sharding = Sharding(shape=(3, 4), cuts=((0, 2), (0, 1)), holders=((0, 1, 2, 3),))
    tensors = {
        code: (torch.arange(12).reshape(3, 4).to(dtype), sharding)
        for dtype, code in DTYPE_CODES.items()
    }
    checkpoint = StoredCheckpoint(tmp_path, store(tmp_path, tensors))
    for code, (x, _) in tensors.items():
        out = torch.empty(2, 3, dtype=x.dtype).t()
        checkpoint.read(code, Block((0, 1), (3, 2)), out)
        expected = x[:, 1:3].contiguous().view(torch.uint8)
        assert torch.equal(out.contiguous().view(torch.uint8), expected), code


def test_it_is_a_source(tmp_path: Path) -> None:
    manifest = Manifest(
        data="data-0",
        world=1,
        tensors={},
        files={},
        tied={"a": "b"},
        optimizer={"state": {}},
        extra=[1],
    )
    source: Source = StoredCheckpoint(tmp_path, manifest)
    assert (source.path, source.format, source.tensors) == (tmp_path, "fullshard", {})
    assert (source.tied, source.optimizer, source.extra) == ({"a": "b"}, {"state": {}}, [1])
    assert source.verify([]) == []
    source.close()


def rows(size: int, ranks: int) -> Sharding:
    return Sharding(
        shape=(size,), cuts=(range(0, size, size // ranks),), holders=(tuple(range(ranks)),)
    )


def test_only_files_with_wanted_parts_are_opened_and_few_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(12)
    manifest = store(tmp_path, {"model/x": (x, rows(12, 6)), "model/y": (-x, rows(12, 6))})
    checkpoint = StoredCheckpoint(tmp_path, manifest)
    monkeypatch.setattr(stored_module, "MAX_OPEN_FILES", 2)
    out = torch.empty(3, dtype=torch.int64)
    with mock.patch("os.open", wraps=os.open) as opened:
        checkpoint.read("model/x", Block((5,), (3,)), out)
        checkpoint.read("model/y", Block((5,), (3,)), out)
    assert out.tolist() == [-5, -6, -7]
    assert [call.args[0].name for call in opened.call_args_list] == [file_name(2), file_name(3)]

    for key, sign in (("model/x", 1), ("model/y", -1)):
        out = torch.empty(12, dtype=torch.int64)
        checkpoint.read(key, whole((12,)), out)
        assert torch.equal(out, sign * x)
        assert sum(file._descriptor is not None for file in checkpoint._files.values()) == 2
    checkpoint.close()
    checkpoint.read("model/x", Block((0,), (1,)), out[:1])
    assert out[0] == 0


def test_the_files_used_last_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "MAX_OPEN_FILES", 2)
    x = torch.arange(3)
    checkpoint = StoredCheckpoint(tmp_path, store(tmp_path, {"model/x": (x, rows(3, 3))}))
    with mock.patch("os.open", wraps=os.open) as opened:
        for rank in (0, 1, 0, 2, 0, 1):
            checkpoint.read("model/x", Block((rank,), (1,)), torch.empty(1, dtype=x.dtype))
    names = [call.args[0].name for call in opened.call_args_list]
    assert names == [file_name(rank) for rank in (0, 1, 2, 1)]


def test_a_chunk_between_two_wanted_rows_is_not_read(tmp_path: Path) -> None:
    chunk = tensor_files.CHUNK_BYTES
    x = torch.zeros(2, 2 * chunk, dtype=torch.uint8)
    manifest = store(tmp_path, {"model/x": (x, replicated(x.shape, [0]))})
    checkpoint = StoredCheckpoint(tmp_path, manifest)
    with (tmp_path / "data-0" / file_name(0)).open("r+b") as file:
        file.seek(-2 * chunk - 1, os.SEEK_END)
        file.write(b"x")
    assert checkpoint.verify([("model/x", Block((0, 0), (2, chunk)))]) == []
    assert len(checkpoint.verify([("model/x", Block((0, 0), (2, chunk + 1)))])) == 1


def test_threads_can_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "MAX_OPEN_FILES", 1)
    x = torch.arange(60)
    checkpoint = StoredCheckpoint(tmp_path, store(tmp_path, {"model/x": (x, rows(60, 6))}))
    wrong: list[object] = []

    def read_often(first: int) -> None:
        out = torch.empty(60 - first, dtype=torch.int64)
        try:
            for _ in range(100):
                checkpoint.read("model/x", Block((first,), (60 - first,)), out.zero_())
                if not torch.equal(out, x[first:]):
                    wrong.append(out)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=read_often, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_files_that_are_not_as_the_manifest_says_are_all_named_once(tmp_path: Path) -> None:
    x = torch.arange(12.0)
    manifest = store(tmp_path, {"model/x": (x, rows(12, 6)), "model/y": (x, rows(12, 6))})
    files = [tmp_path / "data-0" / file_name(rank) for rank in range(6)]
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-1])
    files[3].write_bytes(files[4].read_bytes())  # equal shapes, but other checksums
    manifest = dataclasses.replace(
        manifest, files={rank: record for rank, record in manifest.files.items() if rank != 5}
    )
    checkpoint = StoredCheckpoint(tmp_path, manifest)
    wanted = [(key, whole((12,))) for key in ("model/x", "model/y", "model/x")]
    missing, cut, other, forgotten = checkpoint.verify(wanted)
    assert missing == f"{files[1]} cannot be used: it cannot be opened: No such file or directory."
    assert cut.startswith(f"{files[2]} cannot be used: it has")
    assert other.startswith(f"{files[3]} cannot be used: the header is not the one")
    assert str(tmp_path) in forgotten
    assert "rank 5" in forgotten
    assert checkpoint.verify([("model/x", Block((0,), (2,))), ("model/y", Block((8,), (1,)))]) == []
    with pytest.raises(CheckpointError, match="cannot be opened"):
        checkpoint.read("model/x", whole((12,)), x)


def test_tensors_that_are_not_as_the_manifest_says_are_all_named_once(tmp_path: Path) -> None:
    flat = Sharding(shape=(4, 5), flat=True, cuts=((0, 18),), holders=((0, 1),))
    x = torch.arange(20.0).reshape(4, 5)
    manifest = store(tmp_path, {"model/x": (x, flat), "model/y": (x, flat)})
    manifest = dataclasses.replace(
        manifest,
        tensors={
            "model/x": StoredTensor(torch.int32, flat),  # a cell of three blocks
            "model/y": StoredTensor(torch.float32, replicated((4, 5), [0])),
            "model/z": StoredTensor(torch.float32, replicated((), [1])),
        },
    )
    checkpoint = StoredCheckpoint(tmp_path, manifest)
    first, second = (tmp_path / "data-0" / file_name(rank) for rank in (0, 1))
    wanted = [(key, whole(info.shape)) for key, info in checkpoint.tensors.items()]
    assert checkpoint.verify(wanted) == [
        f"{first} has tensor 'model/x' as torch.float32 (18,); the manifest says torch.int32 (18,).",
        f"{first} has tensor 'model/y' as torch.float32 (18,); the manifest says torch.float32 (4, 5).",
        f"{second} has tensor 'model/x' as torch.float32 (2,); the manifest says torch.int32 (2,).",
        f"{second} does not have tensor 'model/z', although the manifest says so.",
    ]
    for key, block in wanted:
        with pytest.raises(CheckpointError, match=f"tensor '{key}'"):
            checkpoint.read(
                key, block, torch.empty(block.shape, dtype=checkpoint.tensors[key].dtype)
            )
