"""Torch distributed checkpoints: what torch wrote is read, what is written torch reads, and nothing in them is run."""

from __future__ import annotations

import copy
import io
import os
import pickle
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import fullshard
from fullshard import CheckpointError
from fullshard.checkpoint.load_plan import load_source
from fullshard.checkpoint.source import TensorRef
from fullshard.checkpoint.sources import dcp
from fullshard.checkpoint.sources.dcp import DcpCheckpoint, write_dcp
from fullshard.layout.blocks import Block, whole
from tests.helpers.checkpoints import MemorySource, plain_source, value_of
from tests.helpers.models import ModelOptions, make_decoder, tokens_for
from tests.helpers.ranks import World

MakeWorld = Callable[[int], World]

SMALL = ModelOptions(depth=1)
EXTRA = {"step": 7, "nested": {"rate": 0.5, "seen": [1, 2], "rng": [torch.arange(5)]}}


def trained(shard: Callable[[nn.Module], Any] = lambda model: model, seed: int = 0) -> Any:
    """A model and its optimizer after a step."""
    model = make_decoder(SMALL, seed)
    model = shard(model) or model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9), fused=True)
    model(tokens_for(0, 4)).backward()
    optimizer.step()
    return model, optimizer


def save(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=path)


def load(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(state, checkpoint_id=path)


def by_torch_fsdp2(model: Any) -> None:
    torch_fsdp.fully_shard(model.blocks[0])
    torch_fsdp.fully_shard(model)


def by_wrapper(model: nn.Module) -> nn.Module:
    wrapped = fullshard.FullyShardedDataParallel(model, use_orig_params=True)
    kind = fullshard.StateDictType.SHARDED_STATE_DICT
    fullshard.FullyShardedDataParallel.set_state_dict_type(wrapped, kind)
    return wrapped


SHARDINGS = {"FSDP2": by_torch_fsdp2, "FSDP1": by_wrapper}


def save_sharded(path: str, sharding: str) -> None:
    model, optimizer = trained(SHARDINGS[sharding])
    if sharding == "FSDP1":
        states = (
            model.state_dict(),
            fullshard.FullyShardedDataParallel.optim_state_dict(model, optimizer),
        )
    else:
        states = get_state_dict(model, optimizer)
    save(Path(path), {"model": states[0], "optimizer": states[1], **EXTRA})


def differences(found: DcpCheckpoint, expected: MemorySource) -> list[str]:
    faults = sorted(set(found.tensors) ^ set(expected.tensors))
    for key in set(found.tensors) & set(expected.tensors):
        if not torch.allclose(value_of(found, key), expected.whole[key], atol=1e-6):
            faults.append(f"{key} differs")
    if expected.optimizer is not None:
        assert found.optimizer is not None
        for name, state in expected.optimizer["state"].items():
            if found.optimizer["state"][name] != state:
                faults.append(f"state of {name}: {found.optimizer['state'][name]}")
        (group,), (other,) = expected.optimizer["param_groups"], found.optimizer["param_groups"]
        faults += [f"{key}: {other[key]}" for key in group if group[key] != other[key]]
    return faults + found.verify((key, whole(info.shape)) for key, info in found.tensors.items())


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_what_ranks_saved_is_read_whole(world: MakeWorld, tmp_path: Path, sharding: str) -> None:
    world(3).run(save_sharded, str(tmp_path), sharding)
    assert differences(DcpCheckpoint(tmp_path), plain_source(*trained())) == []


def test_blocks_cross_the_chunks_of_ranks(world: MakeWorld, tmp_path: Path) -> None:
    world(3).run(save_sharded, str(tmp_path), "FSDP2")
    source = DcpCheckpoint(tmp_path)
    key = "model/blocks.0.up.weight"
    expected = value_of(source, key)
    assert len(list(source.pieces(key))) == 3
    for block in (Block((3, 2), (7, 3)), Block((12, 0), (1, 6)), Block((0, 5), (13, 1))):
        out = torch.zeros(block.shape[::-1]).t()  # strided
        source.read(key, block, out)
        assert torch.equal(out, expected[block.slices_in(whole(expected.shape))])


def test_every_way_to_nest_is_understood(tmp_path: Path) -> None:
    model, optimizer = trained()
    nested = get_state_dict(model, optimizer)
    flat = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    full, bare = plain_source(model, optimizer), plain_source(model)
    for name, state, expected in [
        ("nested", {"model": nested[0], "optimizer": nested[1]}, full),
        ("flattened", {"model": flat[0], "optim": flat[1]}, full),
        ("bare and flattened", {**flat[0], "optimizer": flat[1]}, full),
        ("model", {"model": nested[0]}, bare),
        ("bare", dict(nested[0]), bare),
    ]:
        save(tmp_path / name, state)
        found = DcpCheckpoint(tmp_path / name)
        assert differences(found, expected) == [], name
        assert (found.optimizer is None) == (expected.optimizer is None)
        assert found.extra is None
    save(tmp_path / "extra", {"model": nested[0], **EXTRA})
    found = DcpCheckpoint(tmp_path / "extra")
    assert torch.equal(found.extra["nested"]["rng"].pop(), torch.arange(5))
    assert found.extra == {"step": 7, "nested": {"rate": 0.5, "seen": [1, 2], "rng": []}}


def test_groups_with_different_options_come_back_from_a_flattened_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.25)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_state_dict(model, optimizer, options=options)
    save(tmp_path, {"model": state[0], "optimizer": state[1]})
    source = DcpCheckpoint(tmp_path)
    found = source.optimizer
    assert found is not None
    assert found["state"] == {}
    write_dcp(source, tmp_path / "nested")
    assert DcpCheckpoint(tmp_path / "nested").optimizer == {"state": {}, **found}
    assert [(group["lr"], group["params"]) for group in found["param_groups"]] == [
        (0.25, ["0.weight", "0.bias"]),
        (0.5, ["1.weight", "1.bias"]),
    ]


def test_names_of_parameters_are_known_from_the_model(tmp_path: Path) -> None:
    flat = {"state.a.w.inner.value": torch.ones(3), "param_groups.a.w.lr": 0.1}
    save(tmp_path, {"model": {"a.w": torch.ones(3)}, "optimizer": flat})
    found = DcpCheckpoint(tmp_path).optimizer
    assert found == {
        "state": {"a.w": {"inner.value": TensorRef("optimizer/a.w/inner.value")}},
        "param_groups": [{"params": ["a.w"], "lr": 0.1}],
    }


def test_lists_of_tensors_are_found_everywhere(tmp_path: Path) -> None:
    pair = [torch.zeros(1), torch.ones(1)]
    save(tmp_path / "bare", {"w": torch.ones(2), "pair": pair})
    bare = DcpCheckpoint(tmp_path / "bare")
    assert list(bare.tensors) == ["model/w"]
    assert torch.equal(bare.extra["pair"][1], torch.ones(1))
    save(tmp_path / "nested", {"model": {"w": torch.ones(2), "pair": pair}})
    nested = DcpCheckpoint(tmp_path / "nested")
    assert sorted(nested.tensors) == ["model/pair.0", "model/pair.1", "model/w"]
    assert torch.equal(value_of(nested, "model/pair.1"), torch.ones(1))


def test_large_tensors_of_extra_are_read_when_they_are_wanted(tmp_path: Path) -> None:
    large = torch.arange(1 << 18, dtype=torch.float64)
    save(tmp_path, {"model": {"w": torch.ones(2)}, "mean": {"w": large}})
    source = DcpCheckpoint(tmp_path)
    assert source.extra == {"mean": {"w": TensorRef("extra/mean/w")}}
    assert torch.equal(value_of(source, "extra/mean/w"), large)


# --- writing -----------------------------------------------------------------------------------------------


def loaded_by_torch(path: str, shard: Callable[[nn.Module], Any]) -> list[str]:
    """Load into another model by torch's own means, and compare with what was written."""
    model, optimizer = trained(shard, seed=1)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    states["step"] = 0
    load(Path(path), states)
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    assert states["step"] == 7
    options = StateDictOptions(full_state_dict=True)
    found: Any = get_state_dict(model, optimizer, options=options)
    params, state = found
    expected, other = trained()
    faults = [
        name for name, value in expected.state_dict().items() if not value.equal(params[name])
    ]
    for name, param in expected.named_parameters():
        for key, value in other.state[param].items():
            if not value.equal(state["state"][name][key]):
                faults.append(f"{name}.{key}")
    assert state["param_groups"][0]["betas"] == (0.8, 0.9)
    return faults


def unsharded(model: nn.Module) -> None:
    pass


def test_torch_loads_what_is_written(
    world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "CHUNK_BYTES", 40)
    model, optimizer = trained()
    source = plain_source(model, optimizer, EXTRA)
    write_dcp(source, tmp_path)
    assert source.largest_read <= 10, "in chunks"
    assert loaded_by_torch(str(tmp_path), unsharded) == []
    assert world(2).run(loaded_by_torch, str(tmp_path), by_torch_fsdp2) == [[], []]
    assert differences(DcpCheckpoint(tmp_path), source) == []


@pytest.mark.parametrize(
    "extra", [None, 5, [1, (2.0, None)], {"a": {"b": 1}}, {"extra": 1}, {"model": 1, "x": "y"}]
)
def test_extra_comes_back_whatever_it_is(tmp_path: Path, extra: Any) -> None:
    write_dcp(MemorySource({"model/w": torch.ones(2)}, extra=extra), tmp_path)
    source = DcpCheckpoint(tmp_path)
    assert source.extra == extra
    assert list(source.tensors) == ["model/w"]


def test_unusual_tensors_survive_both_ways(tmp_path: Path) -> None:
    values: dict[str, Tensor] = {
        "model/empty": torch.empty(0, 3),
        "model/scalar": torch.tensor(3, dtype=torch.int64),
        "model/bf16": torch.randn(3, 2).bfloat16(),
        "model/f8": torch.randn(5).to(torch.float8_e4m3fn),
        "model/complex": torch.randn(2, 2, dtype=torch.complex64),
        "model/bool": torch.tensor([True, False]),
    }
    write_dcp(MemorySource(values, tied={"again": "bf16"}), tmp_path)
    source = DcpCheckpoint(tmp_path)
    assert set(source.tensors) == {*values, "model/again"}
    for key, value in values.items():
        found = value_of(source, key)
        assert found.dtype == value.dtype
        assert found.view(torch.uint8).equal(value.view(torch.uint8)) if value.ndim else True
        assert found.shape == value.shape
    assert torch.equal(value_of(source, "model/again"), values["model/bf16"])


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    source = plain_source(nn.Linear(2, 2))
    del source.whole["model/bias"]
    with pytest.raises(CheckpointError, match=r"is damaged:\n  model/bias: is not there"):
        write_dcp(source, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "new" / "notes").touch()
    with pytest.raises(CheckpointError, match="a new or empty folder"):
        write_dcp(source, tmp_path / "new")


# --- damage and malice -------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    write_dcp(MemorySource({"model/w": torch.arange(6.0).reshape(3, 2)}, extra={"n": 1}), tmp_path)
    return tmp_path


class Runs:
    """Unpickling this calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, torch.load, torch.nn.Linear])
def test_metadata_run_nothing(plain: Path, function: Callable[..., Any]) -> None:
    target = plain / "was_run"
    entries: Any = {"w": Runs(function, str(target))}
    metadata = Metadata(entries, storage_data={})
    (plain / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not part of any metadata") as caught:
        DcpCheckpoint(plain)
    assert function.__name__ in str(caught.value)
    assert not target.exists()


def test_metadata_cannot_change_torch_s_classes(plain: Path) -> None:
    # GLOBAL Metadata, then BUILD with a state that sets attributes: on the class, not on an instance.
    attack = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}(X\x04\x00\x00\x00evilK\x01utb."
    (plain / ".metadata").write_bytes(attack)
    with pytest.raises(CheckpointError):
        DcpCheckpoint(plain)
    assert not hasattr(Metadata, "evil")


def test_values_run_nothing(plain: Path) -> None:
    target = plain / "was_run"
    data = bytearray((plain / "__0_0.distcp").read_bytes())
    metadata = pickle.loads((plain / ".metadata").read_bytes())
    (place,) = (v for k, v in metadata.storage_data.items() if k.fqn == "n")
    item = io.BytesIO()
    torch.save(Runs(os.mkdir, str(target)), item)
    place.offset, place.length = len(data), len(item.getvalue())
    (plain / "__0_0.distcp").write_bytes(data + item.getvalue())
    (plain / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"n .*cannot be read by torch.load"):
        DcpCheckpoint(plain)
    assert not target.exists()


def places(**changes: Any) -> Callable[[Any], None]:
    """Change all records of where something is."""

    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.__dict__.update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.state_dict_metadata["model.w"].chunks.clear(),
            "model.w: its chunks do not cover",
        ),
        (lambda m: m.state_dict_metadata["model.w"].chunks.append("x"), "ChunkStorageMetadata"),
        (lambda m: m.storage_data.clear(), "model.w is in no file"),
        (lambda m: m.planner_data.update({"n": ("model", "w", "n")}), "within another"),
        (lambda m: m.planner_data.update({"n": ()}), r"'n' cannot be at \(\)"),
        (lambda m: m.planner_data.update({"n": (None,)}), "cannot be at"),
        (lambda m: m.planner_data.update({"n": 5}), "TypeError"),
        (places(relative_path="../x"), "'../x', which is not in the folder"),
        (places(relative_path="lost"), "lost: No such file"),
        (places(offset=10**9), "entries up to"),
        (places(offset=-1), "-1 where a size"),
        (places(transform_descriptors=["z"]), "extension"),
    ],
)
def test_metadata_that_make_no_sense_are_refused(
    plain: Path, change: Callable[[Any], Any], message: str
) -> None:
    metadata = pickle.loads((plain / ".metadata").read_bytes())
    change(metadata)
    (plain / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=message):
        DcpCheckpoint(plain)


@pytest.mark.parametrize(
    ("blocks", "is_tiled"),
    [
        ([((0, 0), (2, 2)), ((2, 0), (1, 2))], True),
        ([((0, 0), (3, 1)), ((0, 1), (3, 1)), ((0, 0), (0, 2))], True),
        ([((0, 0), (2, 2)), ((1, 0), (1, 2))], False),  # overlap and gap, and the sizes add up
        ([((0, 0), (3, 2)), ((0, 0), (3, 2)), ((0, 0), (3, 2))], False),
        ([((0, 0), (4, 2))], False),
    ],
)
def test_chunks_must_be_the_whole_tensor_once(
    blocks: list[tuple[tuple[int, int], tuple[int, int]]], is_tiled: bool
) -> None:
    from fullshard.checkpoint.sources.dcp_metadata import _is_tiled

    assert _is_tiled(whole((3, 2)), [Block(*block) for block in blocks]) == is_tiled


def test_a_flipped_bit_is_found_by_verify(plain: Path) -> None:
    file = plain / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(torch.tensor([4.0, 5.0]).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    (fault,) = DcpCheckpoint(plain).verify([("model/w", whole((3, 2)))])
    assert "__0_0.distcp, model/w (bytes" in fault
    assert "checksum" in fault


def test_a_flipped_bit_in_a_value_is_found_on_opening(plain: Path) -> None:
    extra = {"rate": 0.123456, "t": torch.tensor(1.2345)}
    write_dcp(MemorySource({"model/w": torch.ones(2)}, extra=extra), plain / "two")
    file = plain / "two" / "__0_0.distcp"
    content = file.read_bytes()
    for value in (struct.pack(">d", 0.123456), struct.pack("<f", 1.2345)):
        data = bytearray(content)
        data[data.index(value)] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"is damaged:\n.*the checksum of"):
            DcpCheckpoint(plain / "two")


def test_items_without_checksums_can_be_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        write_dcp(MemorySource({"model/w": torch.ones(2)}, extra={"n": 1}), tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    source = DcpCheckpoint(tmp_path)
    assert source.extra == {"n": 1}
    assert source.verify([("model/w", whole((2,)))]) == []


def test_a_file_cut_short_is_refused(plain: Path) -> None:
    os.truncate(plain / "__0_0.distcp", 1000)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: has 1000 bytes, and entries up to"):
        DcpCheckpoint(plain)


def test_every_byte_of_the_metadata_may_be_wrong(plain: Path) -> None:
    content = (plain / ".metadata").read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 0x55
        (plain / ".metadata").write_bytes(changed)
        try:
            DcpCheckpoint(plain).close()
        except CheckpointError:
            continue
    (plain / ".metadata").write_bytes(content[:-20])
    with pytest.raises(CheckpointError, match="can be used"):
        DcpCheckpoint(plain)


def test_files_without_metadata_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a folder with a file \.metadata"):
        DcpCheckpoint(tmp_path)


class Counting(nn.Linear):
    """A module with a state of its own."""

    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("state", "other"),
    [
        ({"calls": [1, 2], "rate": 0.5}, {"calls": [], "rate": 0.0}),
        ("text", ""),
        (torch.arange(3), torch.zeros(3, dtype=torch.int64)),
    ],
)
@pytest.mark.parametrize("is_bare", [False, True])
def test_states_of_modules_come_and_go(
    tmp_path: Path, state: Any, other: Any, is_bare: bool
) -> None:
    saved = Counting(2, 2)
    saved.state = state
    content = saved.state_dict()
    save(tmp_path / "torch", content if is_bare else {"model": content})
    source = DcpCheckpoint(tmp_path / "torch")
    assert source.extra is None
    loaded = Counting(2, 2)
    loaded.state = other
    load_source(source, loaded)
    assert str(loaded.state) == str(state)
    assert torch.equal(loaded.weight, saved.weight)
    # And back: torch finds what it has saved.
    write_dcp(DcpCheckpoint(tmp_path / "torch"), tmp_path / "ours")
    again = {"model": {**content, "_extra_state": copy.deepcopy(other)}}
    load(tmp_path / "ours", again)
    assert str(again["model"]["_extra_state"]) == str(state)


def test_entries_of_a_model_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": torch.ones(2), "b.c": "text"}})
    with pytest.raises(CheckpointError, match=r"these are not: \['b.c'\]"):
        DcpCheckpoint(tmp_path)
