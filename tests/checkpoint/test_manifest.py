"""A manifest says exactly what it was told, and one that was changed or crafted is refused."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard import CheckpointError
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.manifest import FileRecord, Manifest, StoredTensor
from fullshard.checkpoint.source import TensorRef
from fullshard.layout.sharding import Sharding, replicated

PATH = Path("run/step-3")


def example() -> Manifest:
    rows = Sharding(shape=(5, 4), cuts=(range(0, 5, 3), (0,)), holders=((0, 1),))
    flat = Sharding(
        shape=(2, 2, 3), order=(0, 2, 1), flat=True, cuts=(range(-4, 12, 8),), holders=((0, 1),)
    )
    grid = Sharding(shape=(4, 4), cuts=((0, 1), (0, 2)), holders=((3, 2, 1, 0),))
    return Manifest(
        data="data-0123456789ab",
        world=4,
        tensors={
            "model/w": StoredTensor(torch.float32, rows),
            "model/conv": StoredTensor(torch.bfloat16, flat),
            "model/grid": StoredTensor(torch.float32, grid),
            "model/count": StoredTensor(torch.int64, replicated((), [2])),
            "model/nothing": StoredTensor(torch.float32, replicated((0, 3), [0])),
            "optimizer/w/exp_avg": StoredTensor(torch.float32, rows),
        },
        files={rank: FileRecord(100 + rank, 0xDEADBEEF - rank) for rank in range(4)},
        tied={"head": "w"},
        optimizer={
            "state": {
                "w": {"step": torch.tensor(3.0), "exp_avg": TensorRef("optimizer/w/exp_avg")}
            },
            "param_groups": [{"params": ["w"], "lr": 1e-3, "betas": (0.9, 0.999)}],
        },
        extra={"step": 3, "data": [1, 2.5, None]},
        serial=7,
        created="2026-11-15T12:00:00Z",
        fullshard="0.1.0",
        torch="2.13.0",
    )


def test_what_is_written_is_read() -> None:
    manifest = example()
    found = manifests.parse(manifests.text_of(manifest).encode(), PATH)
    assert repr(found) == repr(manifest)
    assert found.tensors["model/conv"].shape == (2, 3, 2)


def test_a_tensor_of_thousands_of_ranks_is_one_short_line() -> None:
    world = 4096
    ranks = tuple(range(world))
    tensors = {
        f"model/{i}": StoredTensor(
            torch.float32,
            Sharding(shape=(8192, 8192), cuts=(range(0, 8192, 2), (0,)), holders=(ranks,)),
        )
        for i in range(100)
    }
    base = Manifest(data="data-0123456789ab", world=world, tensors={}, files={})
    more = Manifest(data="data-0123456789ab", world=world, tensors=tensors, files={})
    lines = len(manifests.text_of(more)) - len(manifests.text_of(base))
    assert lines < 6 * world + 100 * 120  # one list of ranks, and a line for each tensor
    assert repr(manifests.parse(manifests.text_of(more).encode(), PATH)) == repr(more)


def signed(parts: dict[str, Any]) -> bytes:
    """A manifest with a right checksum, as somebody who means harm would write it."""
    parts = {key: value for key, value in parts.items() if key != "crc32"}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return json.dumps({**parts, "crc32": f"{zlib.crc32(text.encode()):08x}"}).encode()


def test_every_edit_is_noticed() -> None:
    text = manifests.text_of(example())
    parts = json.loads(text)
    assert repr(manifests.parse(signed(parts), PATH)) == repr(example())
    parts["tensors"]["model/w"]["shape"] = [5, 5]
    with pytest.raises(CheckpointError, match=r"run/step-3/manifest.json .* was changed"):
        manifests.parse(json.dumps(parts).encode(), PATH)


Change = Callable[[dict[str, Any]], Any]

CRAFTED: dict[str, Change] = {
    "another format": lambda m: m.update(format="zip"),
    "a later version": lambda m: m.update(version=2),
    "data elsewhere": lambda m: m.update(data="../data-0123456789ab"),
    "data at an absolute path": lambda m: m.update(data="/etc"),
    "no tensors": lambda m: m.pop("tensors"),
    "tensors in a list": lambda m: m.update(tensors=[1]),
    "a key of nobody": lambda m: m["tensors"].update({"../x": m["tensors"]["model/w"]}),
    "an unknown dtype": lambda m: m["tensors"]["model/w"].update(dtype="pickle"),
    "a negative size": lambda m: m["tensors"]["model/w"].update(shape=[-5, 4]),
    "a size that is none": lambda m: m["tensors"]["model/w"].update(shape=[5.0, 4]),
    "an absurd size": lambda m: m["tensors"]["model/w"].update(shape=[1 << 60, 4]),
    "too many pieces": lambda m: m["tensors"]["model/w"].update(cuts=[[0, 1], {"at": [0]}]),
    "pieces that leave a gap": lambda m: m["tensors"]["model/w"].update(cuts=[[3, 3], {"at": [0]}]),
    "pieces that overlap": lambda m: m["tensors"]["model/grid"].update(
        cuts=[{"at": [0, 3, 1]}, [0, 4]]
    ),
    "pieces without end": lambda m: m["tensors"]["model/w"].update(cuts=[[0, 0], {"at": [0]}]),
    "cuts of another shape": lambda m: m["tensors"]["model/w"].update(cuts=[[0, 3]]),
    "dimensions twice": lambda m: m["tensors"]["model/conv"].update(order=[0, 0, 1]),
    "a list of ranks that is not there": lambda m: m["tensors"]["model/w"].update(ranks=9),
    "a rank beyond the world": lambda m: m["ranks"].__setitem__(0, [0, 4]),
    "a rank twice": lambda m: m["ranks"].__setitem__(0, [1, 1]),
    "a file of a strange rank": lambda m: m["files"].update({"9": m["files"]["0"]}),
    "a file named as a path": lambda m: m["files"].update({"../../x": m["files"]["0"]}),
    "a tied name without a tensor": lambda m: m["tied"].update(head="nobody"),
    "a state without a tensor": lambda m: m["tensors"].pop("optimizer/w/exp_avg"),
    "a tensor without a state": lambda m: m["optimizer"]["state"]["w"].pop("exp_avg"),
    "an optimizer that is none": lambda m: m.update(optimizer=[]),
    "a value that would run": lambda m: m.update(extra={"!": "pickle", "data": ""}),
}


@pytest.mark.parametrize("change", CRAFTED.values(), ids=CRAFTED.keys())
def test_crafted_manifests_are_refused(change: Change) -> None:
    parts = json.loads(manifests.text_of(example()))
    change(parts)
    with pytest.raises(CheckpointError, match="manifest"):
        manifests.parse(signed(parts), PATH)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\x80\x04\x95",
        b"{",
        b'{"a": NaN}',
        b'{"format": 1, "format": 2}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"step-3/manifest.json is not a usable manifest"):
        manifests.parse(text, PATH)


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has none"):
        manifests.read(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        manifests.read(tmp_path / "nobody")
