"""State dicts of optimizers of wrapped models: as torch's FSDP1 makes them, over any ranks and wrapping."""

from __future__ import annotations

import copy
import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import (
    ConfigurationError,
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    LifecycleError,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from fullshard.transport import collectives
from tests.helpers.compare import assert_close, assert_equal

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
    api = fsdp(name)
    if name == "fullshard" or not model._use_orig_params:
        return api.optim_state_dict(model, optimizer)
    own = optimizer.state_dict()
    result = api.optim_state_dict(model, optimizer, own)
    states = own["state"].values()
    for each in sorted(
        {n for state in states for n, v in state.items() if isinstance(v, Tensor) and v.ndim}
    ):
        alone = {key: {each: state[each]} for key, state in own["state"].items()}
        made = api.optim_state_dict(model, optimizer, {**own, "state": alone})
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
    api = fsdp(name)
    for each in optimizers:
        model, optimizer = trained(name, each, orig)
        whole = whole_of(name, model, optimizer)
        made[f"{each} full"] = digest(whole)
        form, data = digest(api.optim_state_dict_to_load(model, optimizer, whole))
        if (
            name == "torch"
        ):  # its own gets elements in the wrong order, where memory is not contiguous
            data = digest(own_state(optimizer, list(data)))[1]
        made[f"{each} to load"] = unordered(form), data
    model, optimizer = trained(name, "Adagrad", orig, inner=("a",), net=WithoutConv())
    with of_kind(name, model, SHARDED):
        parts = api.optim_state_dict(model, optimizer)
        made["sharded"] = digest(parts)
        form, data = digest(api.optim_state_dict_to_load(model, optimizer, parts))
        made["sharded to load"] = unordered(form), data
    with of_kind(name, model, LOCAL):
        made["local"] = digest(api.optim_state_dict(model, optimizer))
    config = library(name).FullOptimStateDictConfig(rank0_only=True)
    with of_kind(name, model, FULL, config):
        first = api.optim_state_dict(model, optimizer)
        made["rank 0"] = digest(first)
        form, data = digest(api.optim_state_dict_to_load(model, optimizer, first))
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
    api, made = fsdp(name), {}
    key_type = library(name).OptimStateKeyType if name == "fullshard" else None
    made["old full"] = digest(api.full_optim_state_dict(model, optimizer))
    whole = api.full_optim_state_dict(model, optimizer, rank0_only=False)
    made["old full of all"] = digest(whole)
    parts = api.sharded_optim_state_dict(model, optimizer)
    made["old sharded"] = digest(parts)
    sent = whole if dist.get_rank() == 0 else None
    for what, result in {
        "shard": api.shard_full_optim_state_dict(whole, model, optim=optimizer),
        "shard for the model's": api.shard_full_optim_state_dict(whole, model),
        "shard for an input": api.shard_full_optim_state_dict(
            whole, model, [{"params": list(model.parameters())}]
        ),
        "flatten": api.flatten_sharded_optim_state_dict(parts, model, optimizer),
        "scatter": api.scatter_full_optim_state_dict(sent, model, optim=optimizer),
    }.items():
        form, data = digest(result)
        made[f"old {what}"] = unordered(form), data
    if key_type is None:
        key_type = importlib.import_module(f"{LIBRARIES[name]}.fully_sharded_data_parallel")
        key_type = key_type.OptimStateKeyType
    plain = WithoutConv()
    by_id = api.rekey_optim_state_dict(whole, key_type.PARAM_ID, plain)
    made["old by id"] = digest(by_id)
    made["old by name"] = digest(api.rekey_optim_state_dict(by_id, key_type.PARAM_NAME, plain))
    return made


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_state_dicts_are_those_of_torch(world, size: int, orig: bool) -> None:
    others = ["Adam", "SGD"] if orig else ["Adam", "Adagrad"]
    optimizers = others if size == 2 else ["Odd"]
    theirs = world(size).run(made_by, "torch", orig, optimizers)
    ours = world(size).run(made_by, "fullshard", orig, optimizers)
    for their_rank, our_rank in zip(theirs, ours, strict=True):
        assert our_rank.keys() == their_rank.keys()
        for what, (form, data) in their_rank.items():
            our_form, our_data = our_rank[what]
            assert our_form == form, what
            assert_close(our_data, data, rtol=2e-6, atol=1e-7)


class WithScale(WithoutConv):
    """Has a parameter that no wrapper manages, and that checkpoints of its base class lack."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored.register_parameter("scale", nn.Parameter(torch.ones(2)))


def numbers_to_add_to(name: str, orig: bool) -> list[Any]:
    """The numbers in state dicts that lack a parameter; shows that they can be loaded once it has been added."""
    api, options = fsdp(name), {"inner": ("a",)}
    old, its_optimizer = trained(name, "Adam", orig, net=WithoutConv(), **options)
    whole = api.full_optim_state_dict(old, its_optimizer, rank0_only=False)
    parts = api.sharded_optim_state_dict(old, its_optimizer)
    model = wrapped(name, orig, net=WithScale(), **options)
    params, numbers = list(model.parameters()), []
    added = [param is model.ignored.scale for param in params].index(True)
    for load in (
        lambda o: api.shard_full_optim_state_dict(whole, model, optim=o),
        lambda o: api.shard_full_optim_state_dict(whole, model, params),
        lambda o: api.scatter_full_optim_state_dict(whole, model, optim=o),
        lambda o: api.flatten_sharded_optim_state_dict(parts, model, o),
    ):
        optimizer = torch.optim.Adam(params, lr=99.0)
        loaded = load(optimizer)
        (group,) = loaded["param_groups"]
        numbers.append([*group["params"]])
        assert added not in loaded["state"]
        group["params"] = sorted([*group["params"], added])
        optimizer.load_state_dict(loaded)
        train(model, optimizer, 1)
    return numbers


@pytest.mark.parametrize("orig", [True, False])
def test_old_methods_leave_parameters_that_a_state_dict_lacks_to_the_caller(
    world, orig: bool
) -> None:
    theirs, ours = (world(2).run(numbers_to_add_to, name, orig) for name in LIBRARIES)
    assert ours == theirs


def crossed(source: str, target: str, orig: bool) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint: of the library that wrote it, and of the other one, wrapped in another way."""
    model, optimizer = trained(source, "Adam", orig, inner=("a",), net=WithoutConv())
    weights, states = model.state_dict(), whole_of(source, model, optimizer)
    other = wrapped(target, not orig, inner=("z", "c"), net=WithoutConv())
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    other.load_state_dict(weights)
    others = torch.optim.Adam(other.parameters(), lr=99.0)
    others.load_state_dict(fsdp(target).optim_state_dict_to_load(other, others, states))
    return train(model, optimizer, 3, first=5), train(other, others, 3, first=5)


def crossings() -> dict[str, tuple[list[float], list[float]]]:
    return {
        f"{source} {orig}": crossed(source, target, orig)
        for source, target in (("torch", "fullshard"), ("fullshard", "torch"))
        for orig in (True, False)
    }


def test_checkpoints_cross_over_from_torch_and_to_torch(world) -> None:
    for by_case in world(2).run(crossings):
        for case, (wrote, read) in by_case.items():
            assert len(set(wrote)) == 3, case
            assert_close(read, wrote, rtol=1e-5, atol=0.0)


# --- other ranks and wrapping ------------------------------------------------------------------------


def checkpoint() -> Any:
    model, optimizer = trained("fullshard", "Adam", orig=True)
    return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def reloaded(states: Any, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """From whole tensors to this layout, to sharded ones, to whole ones on rank 0 and back to whole ones."""
    api = FullyShardedDataParallel
    found = {}
    for case, options in layouts.items():
        options = dict(options)
        if "mesh" in options:
            shape = options.pop("mesh")
            names = ("replicate", "shard")[-len(shape) :]
            options["device_mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = mixed() if options.get("mixed") else wrapped("fullshard", **options)
        one = torch.optim.Adam(model.parameters(), lr=7.0)
        before = copy.deepcopy(states)
        one.load_state_dict(api.optim_state_dict_to_load(model, one, states))
        train(model, one, 1)
        assert_equal(states["state"], before["state"])  # memory of its own
        one.load_state_dict(api.optim_state_dict_to_load(model, one, states))
        with api.state_dict_type(model, SHARDED):
            parts = api.optim_state_dict(model, one)
            # Not contiguous in memory, and yet sharded.
            assert tuple(model.state_dict()["conv.weight"].shape) == (5, 3, 2, 2)
            other = torch.optim.Adam(model.parameters(), lr=8.0)
            other.load_state_dict(api.optim_state_dict_to_load(model, other, parts))
        with api.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
            sent = api.optim_state_dict(model, other)
            assert bool(sent) is (dist.get_rank() == 0)
            other = torch.optim.Adam(model.parameters(), lr=9.0)
            other.load_state_dict(api.optim_state_dict_to_load(model, other, sent))
        whole = api.optim_state_dict(model, other)
        kept = copy.deepcopy(whole)
        train(model, other, 1)
        assert_equal(whole["state"], kept["state"])
        kinds = sorted({type(state["exp_avg"]).__name__ for state in parts["state"].values()})
        found[case] = whole["state"], whole["param_groups"][0], kinds
    return found


def mixed() -> Any:
    """A FlatParameter within parameters that are themselves; torch refuses it."""
    net = Net()
    net.b = wrapped_alone(net.b, use_orig_params=False)
    net.a = wrapped_alone(net.a, use_orig_params=True)
    return wrapped_alone(net, use_orig_params=True, ignored_modules=[net.ignored])


def wrapped_alone(module: nn.Module, **options: Any) -> Any:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


NO_SHARD, HYBRID = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    3: {
        "flat": {"orig": False, "inner": ("b", "conv")},
        "one wrapper": {"orig": True, "inner": ()},
        "mixed": {"mixed": True},
        "mesh": {"orig": False, "mesh": (3,)},
        "nothing sharded": {"orig": False, "sharding_strategy": NO_SHARD},
        "nothing sharded, itself": {"orig": True, "sharding_strategy": NO_SHARD},
    },
    4: {
        "hybrid": {"orig": True, "mesh": (2, 2), "sharding_strategy": HYBRID},
    },
}


@pytest.mark.parametrize("size", [3, 4])
def test_a_checkpoint_loads_over_other_ranks_and_wrappers(world, size: int) -> None:
    states = world(2).run(checkpoint)[0]
    for by_case in world(size).run(reloaded, states, LAYOUTS[size]):
        for case, (state, group, kinds) in by_case.items():
            assert_equal(state, states["state"])
            assert group["lr"] == 0.1
            assert sorted(group["params"]) == sorted(states["param_groups"][0]["params"])
            expected = ["Tensor"]  # of the ignored ones
            if "nothing" not in case:
                expected.append(
                    "DTensor" if "hybrid" in case or case == "mesh" else "ShardedTensor"
                )
            assert kinds == sorted(expected), case


# --- unusual state -----------------------------------------------------------------------------------

WRAPPER = FullyShardedDataParallel


def load(model: Any, optimizer: Any, states: Any, **options: Any) -> Any:
    return WRAPPER.optim_state_dict_to_load(model, optimizer, states, **options)


def in_low_precision(orig: bool) -> Any:
    """Parameters in bf16 whose optimizer keeps float64."""
    model = wrapped("fullshard", orig, net=Net().bfloat16())
    optimizer = Odd(model.parameters(), wide=torch.float64)
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.numel() else None
    optimizer.step()
    whole = WRAPPER.optim_state_dict(model, optimizer)
    ready = load(model, optimizer, whole)["state"]
    own = optimizer.state_dict()["state"]
    assert_equal(
        *({k: {n: local(v) for n, v in s.items()} for k, s in d.items()} for d in (ready, own))
    )
    return {
        (v["zeta"].dtype, v["alpha"].dtype, v["alpha"].sum().item())
        for v in whole["state"].values()
    }


def with_parameters_left_out(orig: bool) -> Any:
    """The names with state, saved and loaded, where one module is frozen and one not the optimizer's."""
    net = Net()
    net.b.requires_grad_(False)
    model = wrapped("fullshard", orig, net=net)
    left_out = {p for n, p in model.named_parameters() if ".a." in n}
    optimizer = torch.optim.Adam(p for p in model.parameters() if p not in left_out)
    train(model, optimizer)
    whole = WRAPPER.optim_state_dict(model, optimizer)
    other = torch.optim.Adam(p for p in model.parameters() if p not in left_out)
    other.load_state_dict(load(model, other, whole))
    assert_equal(WRAPPER.optim_state_dict(model, other)["state"], whole["state"])
    return sorted(whole["state"]), sorted(whole["param_groups"][0]["params"])


def in_groups(orig: bool) -> Any:
    """Options by names, after groups were loaded in another order."""
    model = wrapped("fullshard", orig)
    small = [p for n, p in model.named_parameters() if ".b." in n or ".ignored." in n]
    rest = [p for p in model.parameters() if all(p is not other for other in small)]
    one = torch.optim.Adam(
        [{"params": small, "lr": 0.5, "tag": "small"}, {"params": rest}], lr=0.25
    )
    train(model, one)
    whole = WRAPPER.optim_state_dict(model, one)
    other = torch.optim.Adam([{"params": rest}, {"params": small}], lr=9.0)
    load(model, other, whole, load_directly=True)
    groups = WRAPPER.optim_state_dict(model, other)["param_groups"]
    assert_equal(WRAPPER.optim_state_dict(model, other)["state"], whole["state"])
    return [(group["lr"], group.get("tag"), sorted(group["params"])[0]) for group in groups]


def by_names(orig: bool) -> Any:
    """What optimizers get and give that know parameters by names."""
    model = wrapped("fullshard", orig)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    whole = WRAPPER.optim_state_dict(model, optimizer)
    named = load(model, optimizer, whole, is_named_optimizer=True)
    names = [name for name, _ in model.named_parameters()]
    assert named["param_groups"][0]["params"] == names == named["param_groups"][0]["param_names"]
    assert set(named["state"]) <= set(names)
    assert_equal(WRAPPER.optim_state_dict(model, optimizer, named)["state"], whole["state"])
    optimizer.load_state_dict(load(model, optimizer, whole))
    return True


def beside_parameters(orig: bool) -> Any:
    """What an optimizer keeps that is of no parameter, of a single number, or beside its state."""
    model = wrapped("fullshard", orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    optimizer.state["mine"] = {"rounds": 3}  # type: ignore[index]
    for state in optimizer.state.values():
        state["number"] = torch.full((1,), 5.0)
    own = {**optimizer.state_dict(), "version": 2}
    whole = WRAPPER.optim_state_dict(model, optimizer, own)
    ready = load(model, optimizer, whole)
    assert_equal(
        {k: s["number"] for k, s in ready["state"].items()},
        {k: torch.full((1,), 5.0) for k in ready["state"]},
    )
    return whole["state"]["mine"]["rounds"], ready["state"]["mine"]["rounds"], ready["version"]


def without_wrappers() -> Any:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    whole = WRAPPER.optim_state_dict(model, optimizer)
    assert_equal(load(model, optimizer, whole)["state"], optimizer.state_dict()["state"])
    return list(whole["state"])


def unusual(orig: bool) -> dict[str, Any]:
    return {
        "low precision": in_low_precision(orig),
        "left out": with_parameters_left_out(orig),
        "groups": in_groups(orig),
        "names": by_names(orig),
        "beside": beside_parameters(orig),
        "no wrappers": without_wrappers(),
        "traffic": traffic(orig),
    }


def traffic(orig: bool) -> tuple[int, int]:
    """How many objects and tensors are gathered for a state dict of two states and three wrappers."""
    model, optimizer = trained("fullshard", "Adam", orig)
    calls = {"values_of_all_ranks": 0, "all_gather": 0}

    def counting(name: str, real: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(collectives, name, counting(name, getattr(collectives, name)))
        whole = WRAPPER.optim_state_dict(model, optimizer)
        saved = tuple(calls.values())
        load(model, optimizer, whole)
    # Loading whole tensors needs nobody else, but to know that all ranks can.
    assert tuple(calls.values()) == (saved[0] + 1, saved[1])
    return saved  # type: ignore[return-value]


@pytest.mark.parametrize("orig", [True, False])
def test_unusual_state_is_kept(world, orig: bool) -> None:
    names = [name for name, _ in Net().named_parameters()]
    for found in world(2).run(unusual, orig):
        sums = {(torch.bfloat16, torch.float64, float(p.numel())) for p in Net().parameters()}
        assert found["low precision"] == sums
        with_state = sorted(n for n in names if n[0] not in "ab")
        assert found["left out"] == (with_state, sorted(n for n in names if n[0] != "a"))
        assert found["groups"] == [(0.25, None, "a.bias"), (0.5, "small", "b.0.bias")]
        assert found["beside"] == (3, 3, 2)
        assert found["no wrappers"] == names
        assert found["traffic"] == (1, 6)


# --- misuse ------------------------------------------------------------------------------------------


def said(call: Callable[[], Any]) -> str:
    """The message of a refusal."""
    try:
        call()
    except (ConfigurationError, LifecycleError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def changed(states: Any, change: Callable[[Any], Any]) -> Any:
    result = copy.deepcopy(states)
    change(result)
    return result


class Factored(torch.optim.SGD):
    """State of other shapes than the parameters'."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["rows"] = torch.ones(3)
            state["both"] = [torch.ones(2), 1]


def refusals_of_saving(orig: bool) -> dict[str, str]:
    model = wrapped("fullshard", orig)
    unknown = [nn.Parameter(torch.ones(2, 3))] if dist.get_rank() == 1 else []
    optimizer = torch.optim.Adam([*model.parameters(), *unknown])
    found = {"unknown parameter": said(lambda: WRAPPER.optim_state_dict(model, optimizer))}
    known = torch.optim.Adam(model.parameters())
    found["given"] = said(lambda: WRAPPER.optim_state_dict(model, known, {"param_groups": []}))
    other = {"state": {99: {}}, "param_groups": [{"params": [0, "z.nothing"]}]}
    found["given others"] = said(lambda: WRAPPER.optim_state_dict(model, known, other))
    factored = Factored(model.parameters(), momentum=0.9)
    train(model, factored, 1)
    found["shapes"] = said(lambda: WRAPPER.optim_state_dict(model, factored))
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, 1)
    if dist.get_rank() == 0:
        for state in adam.state.values():
            state["exp_avg"] = state["exp_avg"].double()
    found["dtypes"] = said(lambda: WRAPPER.optim_state_dict(model, adam))
    with WRAPPER.summon_full_params(model):
        found["summoned"] = said(lambda: WRAPPER.optim_state_dict(model, adam))
    found["no model"] = said(lambda: WRAPPER.optim_state_dict(adam, adam))  # type: ignore[arg-type]
    found["no optimizer"] = said(
        lambda: WRAPPER.optim_state_dict(model, model, {"state": {}, "param_groups": []})
    )
    mesh = init_device_mesh("cpu", (2,))
    on_mesh = wrapped("fullshard", orig, device_mesh=mesh)
    with WRAPPER.state_dict_type(on_mesh, LOCAL):
        found["local"] = said(lambda: WRAPPER.optim_state_dict(on_mesh, adam))
    return found


def refusals_of_loading(orig: bool) -> dict[str, str]:
    model, optimizer = trained("fullshard", "Adam", orig)
    good = WRAPPER.optim_state_dict(model, optimizer)

    def refused(change: Callable[[Any], Any], **options: Any) -> str:
        return said(lambda: load(model, optimizer, changed(good, change), **options))

    found = {
        "unknown": refused(lambda s: s["state"].update({"nobody.weight": s["state"]["z.bias"]})),
        "unknown in group": refused(lambda s: s["param_groups"][0]["params"].append("who")),
        "shape": refused(lambda s: s["state"]["z.weight"].update(exp_avg=torch.ones(3, 5))),
        "step": refused(lambda s: s["state"]["z.weight"].update(step=torch.tensor(9.0))),
        "missing": refused(lambda s: s["state"].pop("z.weight")),
        "missing state": refused(lambda s: s["state"]["z.weight"].pop("exp_avg")),
        "dtype": refused(lambda s: s["state"]["z.bias"].update(exp_avg=torch.ones(5).double())),
        "split": refused(
            lambda s: s["param_groups"].append(
                {**s["param_groups"][0], "params": [s["param_groups"][0]["params"].pop()]}
            )
        ),
        "no dict": said(lambda: load(model, optimizer, {})),
    }
    part = torch.optim.Adam([p for n, p in model.named_parameters() if ".a." not in n])
    found["other optimizer"] = said(lambda: load(model, part, good))
    first_only = FullOptimStateDictConfig(rank0_only=True)
    with WRAPPER.state_dict_type(model, FULL, None, first_only):
        found["sent"] = said(lambda: load(model, optimizer, {"param_groups": []}))
    with WRAPPER.state_dict_type(model, SHARDED):
        parts = WRAPPER.optim_state_dict(model, optimizer)
        if dist.get_rank() == 1:
            del parts["state"]["a.weight"]["exp_avg"], parts["state"]["a.bias"]["exp_avg"]
        found["other parts"] = said(lambda: load(model, optimizer, parts))
    with WRAPPER.state_dict_type(model, FULL, None, first_only):
        spread = said(lambda: load(model, optimizer, parts))
    found["sent parts"] = spread
    found["both"] = said(
        lambda: WRAPPER.shard_full_optim_state_dict(good, model, [*model.parameters()], optimizer)
    )
    key_type, plain = OptimStateKeyType.PARAM_ID, Net()
    found["rekey"] = said(
        lambda: WRAPPER.rekey_optim_state_dict(
            changed(good, lambda s: s["state"].update(who={})), key_type, plain
        )
    )
    found["rekey flat"] = said(lambda: WRAPPER.rekey_optim_state_dict(good, key_type, model))
    return found


def refusals(orig: bool) -> dict[str, str]:
    return refusals_of_saving(orig) | refusals_of_loading(orig)


EXPECTED = {
    "unknown parameter": r"must be parameters of the model.*shape \(2, 3\).*Pass the model",
    "shapes": r"one value per element.*b.*both is a list.*b.*rows of shape \(3,\).*ignored_states",
    "given": r"have the key 'state', .* got a dict with keys \['param_groups'\]",
    "given others": r"numbers of the optimizer's parameters.*\n  'z.nothing'\n  99\n",
    "dtypes": "one dtype on all ranks.*exp_avg.*torch.float",
    "summoned": "LifecycleError: optim_state_dict was called within summon_full_params",
    "no model": "model must be an instance of torch.nn.Module, got torch.optim.adam.Adam",
    "no optimizer": "optim must be an instance of torch.optim.Optimizer, got fullshard.*FullyShardedDataParallel",
    "local": "device_mesh have no LOCAL_STATE_DICT.*SHARDED_STATE_DICT",
    "unknown": r"must be names of the model's parameters.*\n  nobody.weight\n",
    "unknown in group": r"must be names of the model's parameters.*\n  who\n",
    "shape": r"z.weight: exp_avg has shape \(3, 5\), the parameter has \(5, 3\)",
    "split": "have the same parameters.*group 0 of the optimizer is in groups.*Build the optimizer",
    "no dict": r"have the key 'state', .* got a dict with keys \[\]",
    "other optimizer": r"only in the model.*\n  a.bias \(not of this optimizer\)\n  a.weight",
    "sent": r"have the key 'state', .* got a dict with keys \['param_groups'\]",
    "other parts": r"must load the same tensors.*\n  a.bias: exp_avg, not on ranks \[1\]\n  a.weight: exp_avg",
    "sent parts": r"must have full tensors.*\n  a.bias: exp_avg\n.*SHARDED_STATE_DICT",
    "both": "optim or optim_input.*, got both",
    "rekey": r"must be a parameter of the optimizer.*\['who'\]",
}
EXPECTED_FLAT = {
    "step": r"\n  z.weight: step is tensor\(9.\).*one state for all of its parameters|that of z.weight",
    "missing": r"\n  z.weight: exp_avg is missing",
    "missing state": r"\n  z.weight: exp_avg is missing",
    "dtype": r"\n  z.bias: exp_avg is .*float64",
    "rekey flat": "FlatParameters of wrappers stand for several",
}


@pytest.mark.parametrize("orig", [True, False])
def test_what_cannot_be_accounted_for_is_refused_by_name_on_all_ranks(world, orig: bool) -> None:
    first, second = world(2).run(refusals, orig)
    assert first == second
    for case, pattern in (EXPECTED if orig else EXPECTED | EXPECTED_FLAT).items():
        message = first.pop(case)
        assert re.search(pattern, message, re.DOTALL), f"{case}: {message}"
    assert set(first.values()) <= {"nothing"}, first


class Scaled(nn.Module):
    """Two 0-d parameters beside others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.shift


def zero_d_parameters() -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        torch.manual_seed(dist.get_rank())
        model(torch.randn(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for orig in (False, True):
        for kind, mesh in ((FULL, None), (SHARDED, None), (SHARDED, init_device_mesh("cpu", (2,)))):
            models = [WRAPPER(Scaled(), use_orig_params=orig, device_mesh=mesh) for _ in range(2)]
            (model, optimizer), (other, loaded) = (
                (each, torch.optim.Adam(each.parameters(), lr=0.1)) for each in models
            )
            step(model, optimizer)
            for each in models:
                WRAPPER.set_state_dict_type(each, kind)
            found = WRAPPER.optim_state_dict(model, optimizer)
            assert found["state"]["scale"]["exp_avg"].shape == ()
            other.load_state_dict(model.state_dict())
            loaded.load_state_dict(WRAPPER.optim_state_dict_to_load(other, loaded, found))
            step(model, optimizer)
            step(other, loaded)
            assert_equal(list(other.parameters()), list(model.parameters()))


def test_states_of_zero_d_parameters_are_loaded(world) -> None:
    world(2).run(zero_d_parameters)


def old_methods_and_warnings() -> dict[str, list[str]]:
    model, optimizer = trained("fullshard", "Adam", orig=True)
    whole = WRAPPER.full_optim_state_dict(model, optimizer, rank0_only=False)
    parts = WRAPPER.sharded_optim_state_dict(model, optimizer)
    params = list(model.parameters())
    calls = {
        "full_optim_state_dict": (model, optimizer, params),
        "sharded_optim_state_dict": (model, optimizer),
        "shard_full_optim_state_dict": (whole, model, params),
        "flatten_sharded_optim_state_dict": (parts, model, optimizer),
        "scatter_full_optim_state_dict": (whole, model, params),
    }
    found = {}
    for name, args in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(WRAPPER, name)(*args)
        found[name] = [
            str(each.message)
            for each in caught
            if each.category is FutureWarning and each.filename == __file__
        ]
    return found


def test_old_methods_say_what_replaces_them(world) -> None:
    for found in world(2).run(old_methods_and_warnings):
        for name, messages in found.items():
            assert f"FullyShardedDataParallel.{name} is deprecated" in messages[0]
            assert "optim_state_dict" in messages[0].partition("Use ")[2]
            takes_input = name.startswith(("full", "shard_", "scatter"))
            assert len(messages) == 2 if takes_input else 1
            assert not takes_input or "optim_input is deprecated" in messages[1]
