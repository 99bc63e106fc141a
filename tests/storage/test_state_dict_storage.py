"""What torch saves of a state dict: the shards that are in it, not the memory of the whole group."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from tests.helpers.fake import fake_world


class Adapted(nn.Module):
    """A large frozen layer, a small adapter that two layers share, and a group within the group."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(256, 64).requires_grad_(False)
        self.adapter = nn.Linear(64, 64)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.adapter.weight
        self.inner = nn.Linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.again(self.adapter(self.base(x))))
        return out


def sharded() -> Any:
    model = Adapted()
    fully_shard(model.inner)
    return fully_shard(model)


def local(value: Any) -> Tensor:
    assert type(value) is DTensor
    return value._local_tensor


def size(content: Any) -> int:
    file = io.BytesIO()
    torch.save(content, file)
    return file.tell()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_of_a_state_dict_is_saved_without_the_rest_of_its_group(ranks: int) -> None:
    overhead = 5000
    with fake_world(ranks):
        state = sharded().state_dict()
        for name, value in state.items():
            nbytes = local(value).nbytes
            assert size({name: value}) < nbytes + overhead, name
            assert len(pickle.dumps(local(value))) < nbytes + overhead, name
            assert local(copy.deepcopy(value)).untyped_storage().nbytes() == nbytes, name
        everything = sum(local(value).nbytes for value in state.values())
        tied = local(state["adapter.weight"]).nbytes
        assert size(state) < everything - tied + len(state) * overhead


def test_a_state_dict_is_the_memory_of_the_parameters() -> None:
    with fake_world(2):
        model = sharded()
        state = model.state_dict()
        for name, param in model.named_parameters():
            version = param._version
            with torch.no_grad():
                state[name].fill_(3.0)
            assert bool((local(param) == 3).all()), name
            assert param._version > version, name
            with torch.no_grad():
                param.fill_(4.0)
            assert bool((local(state[name]) == 4).all()), name
        del model
        assert bool((local(state["base.weight"]) == 4).all())  # it keeps the memory
        kept = sharded().state_dict(keep_vars=True)
        assert all(isinstance(value, nn.Parameter) for value in kept.values())


def test_names_of_one_parameter_are_saved_once_and_tied_when_they_are_loaded() -> None:
    with fake_world(2):
        state = sharded().state_dict()
        file = io.BytesIO()
        torch.save({name: local(value) for name, value in state.items()}, file)
        file.seek(0)
        loaded = torch.load(file)
        one, other = (loaded[f"{name}.weight"].untyped_storage() for name in ("adapter", "again"))
        assert one.data_ptr() == other.data_ptr()
        assert loaded["base.weight"].untyped_storage().data_ptr() != one.data_ptr()


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_goes_on_with_its_own_state_dict(assign: bool) -> None:
    with fake_world(2):
        model = sharded()
        for _ in range(2):
            model.load_state_dict(model.state_dict(), assign=assign)
            model(torch.ones(2, 256)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        assert size({"adapter.bias": model.state_dict()["adapter.bias"]}) < 5000


class Holder(nn.Module):
    """Parameters of several dtypes, some with fewer rows than ranks or none."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        for dtype in dtypes:
            for rows in (0, 2, 8):
                param = nn.Parameter(torch.ones(rows, 5).to(dtype), requires_grad=False)
                self.register_parameter(f"{rows}-{len(self._parameters)}", param)

    def forward(self) -> None:
        """Compute nothing."""


def test_shards_of_any_dtype_and_empty_ones_are_in_a_state_dict() -> None:
    dtypes = (torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.int8)
    with fake_world(4, rank=3):
        state = fully_shard(Holder(*dtypes)).state_dict()
        assert {local(value).numel() for value in state.values()} == {0, 10}
        for name, value in state.items():
            assert local(value).untyped_storage().nbytes() == local(value).nbytes, name
            assert size(value) < 5000, name
