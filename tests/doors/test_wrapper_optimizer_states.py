"""State dicts of optimizers of wrapped models: as torch's FSDP1 makes them, over any ranks and wrapping."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import (
    StateDictType,
)
from tests.helpers.compare import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

LIBRARIES = {"torch": "torch.distributed.fsdp", "fullshard": "fullshard"}
FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


class Net(nn.Module):
    """Sizes that no number of ranks divides, one parameter smaller than a world, one in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.z = nn.Linear(3, 5)
        self.b = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 12))
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.a = nn.Linear(5, 5)
        self.ignored = nn.Linear(5, 2)
        self.c = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.b(self.z(x)).view(-1, 3, 2, 2)
        return self.c(self.ignored(self.a(self.conv(pixels).flatten(1))))


class Odd(torch.optim.Optimizer):
    """Keeps tensors in other dtypes, 0-d tensors and what is no tensor."""

    def __init__(self, params: Any, lr: float = 0.1, wide: torch.dtype = torch.float32) -> None:
        super().__init__(params, {"lr": lr})
        self._wide = wide

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["zeta"] = torch.zeros_like(param)
                    state["note"] = "hello"
                    state["count"] = 0
                    state["beta"] = torch.zeros((), dtype=torch.float64)
                    state["alpha"] = torch.zeros_like(param, dtype=self._wide)
                state["count"] += 1
                state["beta"] += 1
                state["zeta"] += param.grad
                state["alpha"] += param.grad**2
                param.sub_(param.grad, alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Odd": Odd,
}


def library(name: str) -> Any:
    """torch's classes, or ours of the same names."""
    return importlib.import_module(LIBRARIES[name])


def fsdp(name: str) -> Any:
    return library(name).FullyShardedDataParallel


def wrapped(
    name: str, orig: bool, *, inner: Sequence[str] = ("a", "b"), net: Any = None, **options: Any
) -> Any:
    """The net with wrappers around some of its modules; "ignored" stays plain."""
    model = Net() if net is None else net
    options = {"use_orig_params": orig, "device_id": torch.device("cpu"), **options}
    for each in inner:
        setattr(model, each, fsdp(name)(getattr(model, each), **options))
    return fsdp(name)(model, ignored_modules=[model.ignored], **options)


def train(model: Any, optimizer: Any, steps: int = 2, first: int = 0) -> list[float]:
    """Losses of some steps, each rank on a batch of its own."""
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(name: str, optimizer: str, orig: bool, **options: Any) -> tuple[Any, Any]:
    model = wrapped(name, orig, **options)
    made = OPTIMIZERS[optimizer](model.parameters())
    train(model, made)
    return model, made


def of_kind(name: str, model: Any, kind: StateDictType, config: Any = None) -> Any:
    """The context in which state dicts are of a kind."""
    theirs = library(name).StateDictType[kind.name]
    return fsdp(name).state_dict_type(model, theirs, None, config)


# --- as torch's --------------------------------------------------------------------------------------


def described(value: Any) -> Any:
    """Everything about a state but a tensor's elements."""
    if not isinstance(value, Tensor):
        return value
    kind = type(value).__name__
    if kind == "ShardedTensor":
        parts = value.metadata().shards_metadata
        places = [(part.shard_offsets, part.shard_sizes, str(part.placement)) for part in parts]
        return kind, tuple(value.shape), value.dtype, places
    placements = value.placements if isinstance(value, DTensor) else None
    return kind, tuple(value.shape), value.stride(), value.dtype, str(value.device), placements


def local(value: Any) -> Any:
    """This rank's elements."""
    if isinstance(value, DTensor):
        return value.to_local()
    if type(value).__name__ == "ShardedTensor":
        return [shard.tensor for shard in value.local_shards()]
    return value if isinstance(value, Tensor) else []


def digest(state_dict: Any) -> tuple[Any, Any]:
    """A state dict's description, in order, and its data."""
    if not state_dict:
        return state_dict, []
    states = state_dict["state"]
    form = [(key, [(n, described(v)) for n, v in state.items()]) for key, state in states.items()]
    data = {key: {n: local(v) for n, v in state.items()} for key, state in states.items()}
    return (form, state_dict["param_groups"]), data


def unordered(form: Any) -> Any:
    """A form without the order of states, which in what torch gives to optimizers changes from run to run."""
    states, groups = form
    return sorted((key, sorted(state)) for key, state in states), groups


def whole_of(name: str, model: Any, optimizer: Any) -> Any:
    """A state dict of whole tensors.

    On the CPU, torch's gathers all states of a parameter with use_orig_params=True into the same
    memory, so that all have the values of the last. One by one they are right.
    """
    door = fsdp(name)
    if name == "fullshard" or not model._use_orig_params:
        return door.optim_state_dict(model, optimizer)
    own = optimizer.state_dict()
    result = door.optim_state_dict(model, optimizer, own)
    states = own["state"].values()
    for each in sorted(
        {n for state in states for n, v in state.items() if isinstance(v, Tensor) and v.ndim}
    ):
        alone = {key: {each: state[each]} for key, state in own["state"].items()}
        made = door.optim_state_dict(model, optimizer, {**own, "state": alone})
        for key, state in made["state"].items():
            result["state"][key][each] = copy.deepcopy(state[each])
    return result


def own_state(optimizer: Any, keys: Sequence[Any]) -> Any:
    """An optimizer's state dict with the states of some parameters only."""
    state_dict = optimizer.state_dict()
    return {**state_dict, "state": {key: state_dict["state"][key] for key in keys}}


def made_by(name: str, orig: bool, optimizers: Sequence[str]) -> dict[str, Any]:
    """What a library makes of the state of several optimizers."""
    made: dict[str, Any] = {}
    door = fsdp(name)
    for each in optimizers:
        model, optimizer = trained(name, each, orig)
        whole = whole_of(name, model, optimizer)
        made[f"{each} full"] = digest(whole)
        form, data = digest(door.optim_state_dict_to_load(model, optimizer, whole))
        if (
            name == "torch"
        ):  # its own gets elements in the wrong order, where memory is not contiguous
            data = digest(own_state(optimizer, list(data)))[1]
        made[f"{each} to load"] = unordered(form), data
    model, optimizer = trained(name, "Adagrad", orig, inner=("a",), net=WithoutConv())
    with of_kind(name, model, SHARDED):
        parts = door.optim_state_dict(model, optimizer)
        made["sharded"] = digest(parts)
        form, data = digest(door.optim_state_dict_to_load(model, optimizer, parts))
        made["sharded to load"] = unordered(form), data
    with of_kind(name, model, LOCAL):
        made["local"] = digest(door.optim_state_dict(model, optimizer))
    config = library(name).FullOptimStateDictConfig(rank0_only=True)
    with of_kind(name, model, FULL, config):
        first = door.optim_state_dict(model, optimizer)
        made["rank 0"] = digest(first)
        form, data = digest(door.optim_state_dict_to_load(model, optimizer, first))
        made["sent"] = unordered(form), data
    return made | made_by_old_methods(name, model, optimizer)


class WithoutConv(nn.Module):
    """torch's ShardedTensors are contiguous only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.z, self.a = nn.Linear(3, 5), nn.Linear(5, 5)
        self.ignored, self.c = nn.Linear(5, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.ignored(self.a(self.z(x))))


def made_by_old_methods(name: str, model: Any, optimizer: Any) -> dict[str, Any]:
    door, made = fsdp(name), {}
    key_type = library(name).OptimStateKeyType if name == "fullshard" else None
    made["old full"] = digest(door.full_optim_state_dict(model, optimizer))
    whole = door.full_optim_state_dict(model, optimizer, rank0_only=False)
    made["old full of all"] = digest(whole)
    parts = door.sharded_optim_state_dict(model, optimizer)
    made["old sharded"] = digest(parts)
    sent = whole if dist.get_rank() == 0 else None
    for what, result in {
        "shard": door.shard_full_optim_state_dict(whole, model, optim=optimizer),
        "shard for the model's": door.shard_full_optim_state_dict(whole, model),
        "shard for an input": door.shard_full_optim_state_dict(
            whole, model, [{"params": list(model.parameters())}]
        ),
        "flatten": door.flatten_sharded_optim_state_dict(parts, model, optimizer),
        "scatter": door.scatter_full_optim_state_dict(sent, model, optim=optimizer),
    }.items():
        form, data = digest(result)
        made[f"old {what}"] = unordered(form), data
    if key_type is None:
        key_type = importlib.import_module(f"{LIBRARIES[name]}.fully_sharded_data_parallel")
        key_type = key_type.OptimStateKeyType
    plain = WithoutConv()
    by_id = door.rekey_optim_state_dict(whole, key_type.PARAM_ID, plain)
    made["old by id"] = digest(by_id)
    made["old by name"] = digest(door.rekey_optim_state_dict(by_id, key_type.PARAM_NAME, plain))
    return made


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_state_dicts_are_those_of_torch(world, size: int, orig: bool) -> None:
    optimizers = [*OPTIMIZERS] if size == 2 else ["Odd"]
    theirs = world(size).run(made_by, "torch", orig, optimizers)
    ours = world(size).run(made_by, "fullshard", orig, optimizers)
    for their_rank, our_rank in zip(theirs, ours, strict=True):
        assert our_rank.keys() == their_rank.keys()
        for what, (form, data) in their_rank.items():
            our_form, our_data = our_rank[what]
            assert our_form == form, what
            assert_close(our_data, data, rtol=2e-6, atol=1e-7)
