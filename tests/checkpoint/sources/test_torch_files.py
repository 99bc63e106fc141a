"""Files of torch.save: all layouts come to the same, nothing in them is run, and what does not fit is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fullshard import CheckpointError, FullyShardedDataParallel, checkpoint, fully_shard
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.json_values import DeviceScalar, encode
from fullshard.checkpoint.load_plan import load_source
from fullshard.checkpoint.source import TensorInfo, TensorRef
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.checkpoint.sources.torch_files import TorchFile, write_torch_file
from fullshard.layout.blocks import Block, whole
from tests.helpers.compare import assert_equal


class Net(nn.Module):
    """Two names for one weight, an uneven shape, and a buffer on demand."""

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        if buffer:
            self.register_buffer("seen", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(x)))


STORED = ["embed.weight", "inner.weight", "inner.bias"]


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.arange(5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(net: nn.Module, params: Any = None) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params or net.parameters(), lr=0.1)
    step(net, optimizer)
    return optimizer


def saved(content: Any, tmp_path: Path) -> TorchFile:
    torch.save(content, tmp_path / "file.pt")
    return TorchFile(tmp_path / "file.pt")


def read(source: TorchFile, key: str, block: Block | None = None) -> Tensor:
    info = source.tensors[key]
    block = block or whole(info.shape)
    out = torch.empty(block.shape, dtype=info.dtype)
    source.read(key, block, out)
    return out


def test_a_bare_state_dict_is_a_model(tmp_path: Path) -> None:
    net = Net().to(torch.bfloat16)
    source = saved(net.state_dict(), tmp_path)
    assert list(source.tensors) == [f"model/{name}" for name in STORED]
    assert source.tensors["model/embed.weight"] == TensorInfo(torch.bfloat16, (5, 3))
    assert source.tied == {"head.weight": "embed.weight"}
    assert source.optimizer is None and source.extra is None
    part = read(source, "model/embed.weight", Block((1, 1), (3, 2)))
    assert_equal(part, net.embed.weight.detach()[1:4, 1:3])
    strided = torch.zeros(3, 5, dtype=torch.bfloat16).t()
    source.read("model/embed.weight", whole((5, 3)), strided)
    assert_equal(strided, net.embed.weight.detach())


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("model", "optimizer"),
        ("state_dict", "optim"),
        ("model_state_dict", "optimizer_state_dict"),
    ],
)
def test_model_and_optimizer_go_by_several_names(
    model: str, optimizer: str, tmp_path: Path
) -> None:
    net = Net()
    content = {model: net.state_dict(), optimizer: trained(net).state_dict(), "epoch": 3}
    source = saved(content, tmp_path)
    assert source.extra == {"epoch": 3}
    assert source.optimizer is not None
    assert list(source.optimizer["state"]) == STORED
    assert source.optimizer["param_groups"][0]["params"] == STORED
    assert source.optimizer["param_groups"][0]["lr"] == 0.1


def numbered(net: Net) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = trained(net)
    return optimizer, optimizer.state_dict()


def given_names(net: Net) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = trained(net, list(net.named_parameters())[::-1])
    return optimizer, optimizer.state_dict()


def by_names(net: Net) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = trained(net)
    return optimizer, get_optimizer_state_dict(net, optimizer)


@pytest.mark.parametrize("form", [numbered, given_names, by_names])
def test_an_optimizer_s_state_goes_by_names_however_it_was_saved(form: Any, tmp_path: Path) -> None:
    net = Net()
    optimizer, state = form(net)
    source = saved({"model": net.state_dict(), "optimizer": state}, tmp_path)
    assert source.optimizer is not None
    assert set(source.optimizer["state"]) == set(STORED)
    for name, param in net.named_parameters():
        found = source.optimizer["state"][name]
        assert found["exp_avg"] == TensorRef(f"optimizer/{name}/exp_avg")
        assert_equal(found["step"], torch.tensor(1.0))
        assert_equal(read(source, found["exp_avg"].key), optimizer.state[param]["exp_avg"])
    (group,) = source.optimizer["param_groups"]
    assert sorted(group["params"]) == sorted(STORED)
    assert group["betas"] == (0.9, 0.999) and "param_names" not in group


def test_numbers_that_may_mean_other_parameters_are_refused(tmp_path: Path) -> None:
    net = Net(buffer=True)
    content = {"model": net.state_dict(), "optimizer": trained(net).state_dict()}
    with pytest.raises(CheckpointError, match=r"3 parameters and .* 4 tensors.*named_parameters"):
        saved(content, tmp_path)
    net = Net()
    content = {
        "model": net.state_dict(),
        "optimizer": trained(net, list(net.parameters())[::-1]).state_dict(),
    }
    with pytest.raises(CheckpointError, match=r"exp_avg of parameter 0 has shape \[3\] and embed"):
        saved(content, tmp_path)


def test_tensors_that_share_memory_may_not_be_far_larger_than_the_file(tmp_path: Path) -> None:
    """Each of them is small enough, and all of them together would fill any memory."""
    one = torch.ones(1)
    model = {f"w{number}": one.expand(1 << 20, 1 + number) for number in range(8)}
    with pytest.raises(CheckpointError, match=r"its tensors have 150994944 bytes.*w7 has 33554432"):
        saved(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"its tensors have .*extra\.0 has 134217728"):
        saved({"model": {"w": one}, "extra": [one.expand(1 << 25)]}, tmp_path)
    data = torch.ones(1 << 15)
    views = {f"w{number}": data[number:] for number in range(600)}
    with pytest.raises(CheckpointError, match="because elements or tensors share memory"):
        saved(views, tmp_path)
    # A mask that is expanded, many names of one tensor, parts of one tensor, and all that is dense.
    mask = {"mask": torch.ones(1, 1, 1, dtype=torch.bool).expand(32, 1024, 1024)}
    names = {f"name{number}": data for number in range(600)}
    parts = {f"part{number}": data[100 * number : 100 * number + 100] for number in range(300)}
    found = saved({**mask, **names, **parts}, tmp_path)
    assert found.tensors["model/mask"].shape == (32, 1024, 1024)
    assert len(found.tied) == 599


class Trap:
    """Creates a file when it is unpickled by who runs what is in a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_file_that_needs_code_is_refused_and_nothing_is_run(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    with pytest.raises(CheckpointError, match=r"posix\.mkdir.*No code in it was run") as caught:
        saved({"model": Net().state_dict(), "trap": Trap(trap)}, tmp_path)
    assert "weights_only" not in str(caught.value)
    assert not trap.exists()
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert trap.exists()


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    with pytest.raises(CheckpointError, match="No such file"):
        TorchFile(path)
    for content in (b"", b"no file of torch.save"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="was refused"):
            TorchFile(path)
    torch.save(Net().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a zip file"):
        TorchFile(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.ones(2)], "has a list"),
        ({1: torch.ones(2)}, "has a dict"),
        ({}, "has nothing"),
        ({"weights": {"a": torch.ones(2)}}, "has weights"),
        ({"model": {"a": torch.ones(2)}, "state_dict": {"a": torch.ones(2)}}, "model, state_dict"),
        ({"model": {"a": torch.ones(2)}, "optim": {}, "optimizer": {}}, "at most one optimizer"),
        (
            {"model": {"a": 3, "b": torch.ones(2).to_sparse()}},
            "a is of type int, not a tensor\n  b is a tensor",
        ),
        ({"model": {"a": torch.empty(2, device="meta")}}, "a is a tensor on the meta device"),
        ({"model": {"a": torch.ones(2)}, "optim": {"state.a.step": 1}}, "flattened"),
        ({"model": {}, "optim": {"state": {}, "param_groups": [{"params": [[]]}]}}, "flattened"),
        ({"model": {}, "optim": {"state": {7: {}}, "param_groups": []}}, r"state of \[7\]"),
        (
            {"model": {}, "optim": {"state": {}, "param_groups": [{"params": ["a", "a"]}]}},
            "2 parameters, 1 of them different",
        ),
    ],
)
def test_what_is_not_understood_is_said(content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        saved(content, tmp_path)


def test_what_a_checkpoint_cannot_hold_is_left_out_with_a_warning(tmp_path: Path) -> None:
    content = {
        "model": Net().state_dict(),
        "step": 7,
        "rng": torch.ones(3),
        "big": torch.ones(2**19),
    }
    with pytest.warns(UserWarning, match="big: a tensor of 2097152 bytes"):
        source = saved(content, tmp_path)
    assert_equal(source.extra, {"step": 7, "rng": torch.ones(3)})


def test_parts_of_one_storage_are_not_tied(tmp_path: Path) -> None:
    whole_weight = torch.arange(6.0).view(3, 2)
    content = {
        "a": whole_weight,
        "b": whole_weight[1:],
        "c": whole_weight[:2].t(),
        "d": whole_weight.view(3, 2),
    }
    source = saved({**content, "none": torch.empty(0), "no_more": torch.empty(0)}, tmp_path)
    assert source.tied == {"d": "a"}
    for name in ("a", "b", "c"):
        assert_equal(read(source, f"model/{name}"), content[name])


def as_json(tree: Any) -> Any:
    return encode(tree, "", [])


def test_what_is_written_is_read_again_and_loads_into_a_model(tmp_path: Path) -> None:
    net = Net(buffer=True)
    optimizer = trained(net)
    extra = {"step": 3, "seeds": (1, 2), "rng": torch.arange(4)}
    content = {
        "model": net.state_dict(),
        "optimizer": get_optimizer_state_dict(net, optimizer),
        "extra": extra,
    }
    first = saved(content, tmp_path)
    assert_equal(first.extra, extra)
    path = tmp_path / "new" / "again.pt"
    write_torch_file(first, path)
    assert [each.name for each in path.parent.iterdir()] == ["again.pt"]

    again = TorchFile(path)
    assert (again.tensors, again.tied) == (first.tensors, first.tied)
    assert as_json([again.optimizer, again.extra]) == as_json([first.optimizer, first.extra])
    loaded = torch.load(path, weights_only=True)
    (other := Net(buffer=True)).load_state_dict(loaded["model"])
    assert_equal(other.state_dict(), net.state_dict())
    assert_equal(loaded["optimizer"]["state"], content["optimizer"]["state"])
    assert loaded["optimizer"]["param_groups"] == content["optimizer"]["param_groups"]


def test_a_file_is_replaced_at_once_and_kept_if_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.pt"
    source = saved({"a": torch.ones(2)}, tmp_path)
    old = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"file\.pt cannot be written: no space left"):
            write_torch_file(source, path)
    assert path.read_bytes() == old
    assert [each.name for each in tmp_path.iterdir()] == ["file.pt"]
    with path.open("rb") as reader:
        write_torch_file(source, path)
        assert reader.read() == old
    assert path.read_bytes() != old


class Damaged(TorchFile):
    """A source that finds a fault."""

    def verify(self, wanted: Any) -> list[str]:
        return [f"{key}: flipped" for key, _ in wanted]


def test_nothing_is_written_of_a_damaged_checkpoint_or_where_it_cannot_be(tmp_path: Path) -> None:
    saved({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointError, match="model/a: flipped"):
        write_torch_file(Damaged(tmp_path / "file.pt"), tmp_path / "new.pt")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_torch_file(TorchFile(tmp_path / "file.pt"), tmp_path / "file.pt" / "below.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["file.pt"]


def test_numbers_of_an_accelerator_are_written_as_numbers(tmp_path: Path) -> None:
    source = saved({"model": {"a": torch.ones(2)}}, tmp_path)
    source.optimizer = {
        "state": {"a": {"step": DeviceScalar(torch.tensor(2.0))}},
        "param_groups": [],
    }
    write_torch_file(source, tmp_path / "new.pt")
    state = torch.load(tmp_path / "new.pt", weights_only=True)["optimizer"]["state"]
    assert_equal(state, {"a": {"step": torch.tensor(2.0)}})


def by_hand(net: Net) -> nn.Module:
    fully_shard(net.inner)
    return fully_shard(net)


def by_wrapper(net: Net) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def by_flat_parameter(net: Net) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"))


APIS = [by_hand, by_wrapper, by_flat_parameter]


def resume(path: Path) -> None:
    for api in APIS:
        net = api(Net())
        optimizer = torch.optim.AdamW(net.parameters(), lr=7.0)
        load_source(TorchFile(path), net, optimizer)
        step(net, optimizer)
        checkpoint.save(path.with_name(api.__name__), net, optimizer)


def test_training_goes_from_one_process_to_ranks_and_back(world: Any, tmp_path: Path) -> None:
    """The batch is the same on all ranks, and so is every bit."""
    net = Net()
    optimizer = trained(net)
    torch.save(
        {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt"
    )
    world(2).run(resume, tmp_path / "file.pt")
    step(net, optimizer)
    for api in APIS:
        path = tmp_path / api.__name__
        write_torch_file(StoredCheckpoint(path, manifests.read(path)), tmp_path / "back.pt")
        loaded = torch.load(tmp_path / "back.pt", weights_only=True)
        assert_equal(loaded["model"], net.state_dict())
        expected: Any = get_optimizer_state_dict(net, optimizer)
        assert_equal(loaded["optimizer"]["state"], expected["state"])
        (group,), (expected_group,) = loaded["optimizer"]["param_groups"], expected["param_groups"]
        assert group == {**expected_group, "params": group["params"]}
        assert sorted(group["params"]) == sorted(expected_group["params"])
