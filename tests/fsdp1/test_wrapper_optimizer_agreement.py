"""Optimizers of wrapped models that are not made alike on all ranks: state is never swapped, lost or made up."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    ConfigurationError,
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from fullshard.layout.names import clean_name
from tests.helpers.compare import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WRAPPER = FullyShardedDataParallel
FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
FIRST_ONLY = FullOptimStateDictConfig(rank0_only=True)


class Net(nn.Module):
    """Layers of equal shapes, whose states could be swapped unnoticed; a small one, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        self.small = nn.Linear(3, 1, bias=False)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        self.plain = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.frozen(self.small(self.layers(x))))


def wrapped(orig: bool, **options: Any) -> Any:
    options = {"use_orig_params": orig, "device_id": torch.device("cpu"), **options}
    net: Any = Net()
    for index, layer in enumerate(net.layers):
        if index < 2 or not orig:  # two in the same wrapper, where it may be
            net.layers[index] = WRAPPER(layer, **options)
    net.frozen = WRAPPER(net.frozen, **options)
    return WRAPPER(net, ignored_modules=[net.plain], **options)


def groups_of(model: Any, *, swapped: bool, shuffled: bool) -> list[dict[str, Any]]:
    """Two groups of the model's parameters; on each rank in an order of its own."""
    params = list(model.named_parameters())
    if shuffled:
        random.Random(dist.get_rank()).shuffle(params)
    first = [p for n, p in params if "layers.0" in n or "plain" in n]
    rest = [p for n, p in params if "layers.0" not in n and "plain" not in n]
    groups = [{"params": first, "lr": 0.1}, {"params": rest, "lr": 0.2, "weight_decay": 0.5}]
    return groups[::-1] if swapped else groups


def made_unlike(model: Any, lr: float = 7.0) -> torch.optim.Adam:
    """An optimizer whose parameters and groups are in another order on every rank."""
    return torch.optim.Adam(
        groups_of(model, swapped=dist.get_rank() % 2 == 1, shuffled=True), lr=lr
    )


def train(model: Any, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(2, 3)).square().sum().backward()
        for param in model.plain.parameters():  # which no wrapper reduces
            dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()


def states_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """What the optimizer has of each parameter, by name; and the options of its group."""
    options = {
        p: {k: group[k] for k in ("lr", "weight_decay")}
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return {
        clean_name(name): {**copy.deepcopy(optimizer.state[param]), **options[param]}
        for name, param in model.named_parameters()
        if param in optimizer.state
    }


def saved_in_all_ways(model: Any, optimizer: Any, *, mesh: bool = False) -> dict[str, Any]:
    made = {"full": WRAPPER.optim_state_dict(model, optimizer)}
    for kind in (SHARDED, *([] if mesh else [LOCAL])):
        with WRAPPER.state_dict_type(model, kind):
            made[kind.name] = WRAPPER.optim_state_dict(model, optimizer)
    with WRAPPER.state_dict_type(model, FULL, None, FIRST_ONLY):
        made["first"] = WRAPPER.optim_state_dict(model, optimizer)
    made["old full"] = WRAPPER.full_optim_state_dict(model, optimizer, rank0_only=False)
    made["old sharded"] = WRAPPER.sharded_optim_state_dict(model, optimizer)
    return made


def loaded_in_all_ways(model: Any, made: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """What makes of each state dict what an optimizer loads."""

    def of_kind(kind: StateDictType, states: Any, config: Any = None) -> Callable[[Any], Any]:
        def load(optimizer: Any) -> Any:
            with WRAPPER.state_dict_type(model, kind, None, config):
                return WRAPPER.optim_state_dict_to_load(model, optimizer, states)

        return load

    ways = {
        "full": of_kind(FULL, made["full"]),
        "sharded": of_kind(SHARDED, made[SHARDED.name]),
        "first": of_kind(FULL, made["first"], FIRST_ONLY),
        "shard": lambda o: WRAPPER.shard_full_optim_state_dict(made["old full"], model, optim=o),
        "flatten": lambda o: WRAPPER.flatten_sharded_optim_state_dict(
            made["old sharded"], model, o
        ),
        "scatter": lambda o: WRAPPER.scatter_full_optim_state_dict(
            made["first"] or None, model, optim=o
        ),
    }
    if LOCAL.name in made:
        ways["local"] = of_kind(LOCAL, made[LOCAL.name])
    return ways


def keys_of(state_dict: Any) -> Any:
    """Everything about a state dict but its tensors, in order."""
    return (
        [(name, [*state]) for name, state in state_dict["state"].items()],
        [{**group} for group in state_dict["param_groups"]],
    )


def round_trips(orig: bool, mesh: tuple[int, ...] | None) -> dict[str, Any]:
    """Every way to save and load with optimizers that are made in another order on every rank."""
    options: dict[str, Any] = {}
    if mesh is not None:
        names = ("replicate", "shard")
        options["device_mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    model = wrapped(orig, **options)
    optimizer = made_unlike(model)
    train(model, optimizer)
    before = states_of(model, optimizer)
    assert len({str(state) for state in before.values()}) == len(before)  # all are different
    made = saved_in_all_ways(model, optimizer, mesh=mesh is not None)
    for way, to_load in loaded_in_all_ways(model, made).items():
        other = made_unlike(model, lr=99.0)
        random.Random(7 * dist.get_rank()).shuffle(other.param_groups[0]["params"])
        other.load_state_dict(to_load(other))
        after = states_of(model, other)
        assert after.keys() == before.keys(), way
        for name, state in before.items():
            assert_equal(after[name], state)
    return {way: keys_of(states) for way, states in made.items() if states}


def as_one(ranks: list[dict[str, Any]]) -> Any:
    """What was made on each rank, once it is the same on all that have it."""
    for rank in ranks[1:]:
        for way, keys in rank.items():
            assert keys == ranks[0][way], way
    return ranks[0]["full"]


@pytest.mark.parametrize(
    ("size", "mesh", "orig"), [(2, None, True), (2, None, False), (4, (2, 2), True)]
)
def test_the_order_of_parameters_and_groups_on_a_rank_does_not_matter(
    world, size: int, mesh: tuple[int, ...] | None, orig: bool
) -> None:
    states, groups = as_one(world(size).run(round_trips, orig, mesh))
    in_model = [name for name, _ in Net().named_parameters()]
    assert [name for name in in_model if name in dict(states)] == [
        name for name in in_model if not name.startswith("frozen")
    ]
    assert [group["lr"] for group in groups] == [0.1, 0.2]  # as on rank 0
    for group in groups if orig else ():  # a FlatParameter is registered before those below it
        assert group["params"] == [name for name in in_model if name in group["params"]]


# --- parameters of which a rank has nothing ----------------------------------------------------------


def without_empty_pieces() -> Any:
    """Optimizers that have only parameters of which their rank holds something."""
    model = wrapped(True)
    held = [param for param in model.parameters() if param.numel()]
    optimizer = torch.optim.Adam(held, lr=0.1)
    train(model, optimizer)
    before = states_of(model, optimizer)
    made = saved_in_all_ways(model, optimizer)
    for to_load in loaded_in_all_ways(model, made).values():
        other = torch.optim.Adam(held, lr=99.0)
        other.load_state_dict(to_load(other))
        assert_equal(states_of(model, other), before)
    return len(held), {way: keys_of(states) for way, states in made.items() if states}


def test_an_optimizer_may_leave_out_what_its_rank_has_nothing_of(world) -> None:
    results = world(3).run(without_empty_pieces)
    assert len({count for count, _ in results}) > 1  # ranks do hold different numbers of parameters
    _, groups = as_one([keys for _, keys in results])
    assert groups[0]["params"] == [name for name, _ in Net().named_parameters()]


# --- what differs is refused -------------------------------------------------------------------------


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return "nothing"


def one_without(model: Any, part: str, rank: int = 1) -> torch.optim.Adam:
    """An optimizer that on one rank lacks some parameters."""
    lacks = dist.get_rank() == rank
    return torch.optim.Adam(
        [p for n, p in model.named_parameters() if not lacks or part not in n], lr=0.1
    )


def refusals(orig: bool) -> dict[str, str]:
    model = wrapped(orig)
    good = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, good)
    made = saved_in_all_ways(model, good)
    rank = dist.get_rank()
    found = {}

    def save(name: str, optimizer: Any) -> None:
        found[name] = said(lambda: WRAPPER.optim_state_dict(model, optimizer))
        for other in (
            lambda: WRAPPER.full_optim_state_dict(model, optimizer),
            lambda: WRAPPER.sharded_optim_state_dict(model, optimizer),
        ):
            assert said(other) == found[name], name

    lacking = one_without(model, "layers.1")
    train(model, lacking, 1)
    save("lacking", lacking)
    for way, to_load in loaded_in_all_ways(model, made).items():
        fresh = one_without(model, "layers.1")
        found[f"lacking, {way}"] = said(lambda load=to_load, fresh=fresh: load(fresh))  # type: ignore[misc]
    (param,) = [p for n, p in model.named_parameters() if "layers.0" in n and "bias" not in n]
    other = copy.copy(good.state[param])
    if rank == 1:
        del good.state[param]
    save("no state", good)
    good.state[param] = other
    if rank == 1:
        good.state[param] = {**other, "step": other["step"] + 1}
    save("steps", good)
    good.state[param] = other
    good.param_groups[0]["lr"] = 0.5 if rank == 1 else 0.1
    save("options", good)
    save(
        "groups",
        torch.optim.Adam(groups_of(model, swapped=False, shuffled=False)) if rank else good,
    )
    divided = groups_of(model, swapped=False, shuffled=False)
    if rank == 1:
        moved = next(p for n, p in model.named_parameters() if "layers.1" in n)
        divided[1]["params"] = [p for p in divided[1]["params"] if p is not moved]
        divided[0]["params"].append(moved)
    save("divided", torch.optim.Adam(divided))
    no_groups = good.state_dict()
    if rank == 1:
        del no_groups["param_groups"]
    found["no groups"] = said(lambda: WRAPPER.optim_state_dict(model, good, no_groups))
    less = copy.deepcopy(made["full"])
    if rank == 1:
        del less["state"]["layers.0.weight"], less["state"]["layers.0.bias"]
    found["less"] = said(lambda: WRAPPER.optim_state_dict_to_load(model, good, less))
    mixed = made["old full"] if rank == 1 else made["old sharded"]
    found["mixed"] = said(lambda: WRAPPER.optim_state_dict_to_load(model, good, mixed))
    unreadable = {} if rank == 1 else made["full"]
    found["unreadable"] = said(lambda: WRAPPER.optim_state_dict_to_load(model, good, unreadable))
    plain = [p for n, p in model.named_parameters() if "plain" in n]
    if rank == 0:
        for each in plain:
            del good.state[each]
    good.param_groups[0]["lr"] = 0.1
    with WRAPPER.state_dict_type(model, FULL, None, FIRST_ONLY):
        found["plain"] = said(lambda: WRAPPER.optim_state_dict(model, good))
    return found


LACKING = r"must have the same parameters.*\n  layers.1.*: on ranks \[0\], but not on rank 1\n"
REFUSED = {
    "lacking": LACKING,
    **{
        f"lacking, {way}": LACKING
        for way in ("full", "sharded", "first", "shard", "flatten", "scatter", "local")
    },
    "no state": r"must have the states that other ranks have.*\n  layers.0.*exp_avg on rank 1\n",
    "steps": r"must be the same on all ranks.*\n  layers.0.*: step is .*2.* on rank 0, .*3.* on rank 1\n",
    "options": r"options.*must be the same on all ranks.*\n  group 0: lr is 0.1 on rank 0, 0.5 on rank 1\n",
    "groups": r"same groups of parameters.*number of groups, by rank: \{0: 1, 1: 2\}",
    "divided": r"same groups.*\n  layers.1.*: in group 0 of ranks \[1\], in group 1 of ranks \[0\]\n",
    "no groups": r"must have 'param_groups' or none; those of ranks \[1\]",
    "less": r"must load the same tensors.*\n  layers.0.bias: exp_avg, not on ranks \[1\]\n",
    "mixed": r"must load the same tensors.*\n  layers.0.*exp_avg, only ranks \[0\] have sharded tensors\n",
    "unreadable": r"On ranks \[1\]: An optimizer's state dict must have the key 'state'",
    "plain": r"that no wrapper manages.*\n  plain.bias on rank 1\n  plain.weight on rank 1\n",
}


@pytest.mark.parametrize("orig", [True, False])
def test_what_differs_between_ranks_is_the_same_error_on_all(world, orig: bool) -> None:
    first, second = world(2).run(refusals, orig)
    assert first == second
    assert first.keys() == REFUSED.keys()
    for case, pattern in REFUSED.items():
        assert re.search(pattern, first[case], re.DOTALL), f"{case}: {first[case]}"


# --- what is not in a state dict ---------------------------------------------------------------------


def partly_loaded(orig: bool) -> dict[str, Any]:
    """Names with state and learning rates after state dicts that lack something."""
    model = wrapped(orig)
    old = torch.optim.Adam(groups_of(model, swapped=False, shuffled=False))
    train(model, old)
    before = states_of(model, old)
    whole = WRAPPER.optim_state_dict(model, old)
    found = {}

    def load(case: str, change: Callable[[Any], Any]) -> None:
        states = copy.deepcopy(whole)
        change(states)
        new = torch.optim.Adam(groups_of(model, swapped=False, shuffled=False), lr=99.0)
        for group in new.param_groups:
            group["lr"] = 5.0
        WRAPPER.optim_state_dict_to_load(model, new, states, load_directly=True)
        after = states_of(model, new)
        for name, state in after.items():
            for key in ("exp_avg", "step"):
                assert_equal(state[key], before[name][key])
        found[case] = (
            sorted(before.keys() - after.keys()),
            [group["lr"] for group in new.param_groups],
        )

    def drop(states: Any, *parts: str, groups: bool = True) -> None:
        dropped = [name for name in states["state"] if any(part in name for part in parts)]
        for name in dropped:
            del states["state"][name]
        for group in states["param_groups"] if groups else ():
            group["params"] = [name for name in group["params"] if name not in dropped]

    load("no groups", lambda s: s.pop("param_groups"))
    load("no state of one", lambda s: drop(s, "layers.1", groups=False))
    load("nothing of one", lambda s: drop(s, "layers.1"))
    load("no group of some", lambda s: drop(s, "layers.0", "plain"))
    own = old.state_dict()
    del own["param_groups"]
    saved = WRAPPER.optim_state_dict(model, old, own)
    assert "param_groups" not in saved
    assert_equal(saved["state"], whole["state"])
    assert "param_groups" not in WRAPPER.shard_full_optim_state_dict(saved, model)
    return found


@pytest.mark.parametrize("orig", [True, False])
def test_what_is_there_is_loaded(world, orig: bool) -> None:
    for found in world(2).run(partly_loaded, orig):
        assert found["no groups"] == ([], [5.0, 5.0])
        for case in ("no state of one", "nothing of one"):
            missing, rates = found[case]
            assert missing and all("layers.1" in name for name in missing)
            assert rates == [0.1, 0.2]
        missing, rates = found["no group of some"]
        assert missing and all("layers.0" in name or "plain" in name for name in missing)
        assert 5.0 in rates and 0.2 in rates
