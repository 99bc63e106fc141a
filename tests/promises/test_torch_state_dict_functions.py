"""`torch.distributed.checkpoint.state_dict` with our wrappers: what it does with torch's, on the same ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as functions
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from fullshard import ConfigurationError, FullyShardedDataParallel, UnsupportedError
from fullshard.drop_in.install import installed
from tests.helpers.compare import assert_equal
from tests.helpers.training import FULLSHARD, TORCH
from tests.helpers.wrapped_nets import TOKENS, described, make_net, state_dict, wrap


def trained(api: str, steps: int = 1, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """A wrapped model, and its optimizer with two groups, after a step or none."""
    model = wrap(api, make_net(seed, tied=False), **options)
    decayed = [param for name, param in model.named_parameters() if "first" in name]
    others = [param for name, param in model.named_parameters() if "first" not in name]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others}])
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(10 * step + dist.get_rank())
    model(torch.randint(11, TOKENS.shape)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def comparable(found: Any) -> Any:
    """A state dict in which tensors are what can be compared, and order does not matter."""
    if isinstance(found, dict):
        return {key: comparable(value) for key, value in sorted(found.items())}
    if isinstance(found, list):
        return [comparable(value) for value in found]
    return described(found) if isinstance(found, Tensor) or hasattr(found, "metadata") else found


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ShardedTensor, and of the order of torch's own keys
        return function(*args, **kwargs)


def saved(model: nn.Module, optimizer: Any, options: StateDictOptions) -> list[Any]:
    # A copy, since torch changes what it loads.
    return [*copy.deepcopy(quietly(functions.get_state_dict, model, optimizer, options=options))]


def load(model: nn.Module, optimizer: Any, options: StateDictOptions, states: list[Any]) -> None:
    quietly(functions.set_model_state_dict, model, states[0], options=options)
    quietly(functions.set_optimizer_state_dict, model, optimizer, states[1], options=options)


SHARDED = StateDictOptions()
FLAT_NAMES = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True)
ALIKE = {"sharded": SHARDED, "flat names": FLAT_NAMES, "full": FULL}
"""What torch's own wrapper can do as well."""
OFFLOADED = StateDictOptions(full_state_dict=True, cpu_offload=True)
# Not strict: torch sends one of the names of a shared module.
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)


def as_with_torch(orig: bool, mesh: tuple[int, ...] | None) -> None:
    wrapping = {"use_orig_params": orig, "mesh": mesh}
    ours, theirs = trained(FULLSHARD, **wrapping), trained(TORCH, **wrapping)
    states = {name: saved(*theirs, options) for name, options in ALIKE.items()}
    for name, options in ALIKE.items():
        assert comparable(saved(*ours, options)) == comparable(states[name]), name
    full = comparable(states["full"])
    # Torch's own fails to offload without an accelerator.
    states["offloaded"] = saved(*ours, OFFLOADED)
    assert comparable(states["offloaded"]) == (full if dist.get_rank() == 0 else [{}, {}])
    for name, options, steps in (
        ("sharded", SHARDED, 0),
        ("flat names", FLAT_NAMES, 0),
        ("full", FULL, 1),
        ("offloaded", FROM_RANK_0, 1),
    ):
        others = trained(FULLSHARD, steps=steps, seed=1, **wrapping)
        load(*others, options, states[name])
        assert comparable(saved(*others, FULL)) == full, name
    if orig:
        # Torch drops the states of parameters of which this rank has trained nothing; and aborts with its own wrapper.
        with pytest.raises(ConfigurationError, match="All ranks must load the same tensors"):
            load(*others, FLAT_NAMES, saved(*ours, FLAT_NAMES))


@pytest.mark.parametrize(("orig", "mesh"), [(True, None), (False, (2,))])
def test_state_dicts_are_those_of_torch_s_wrapper_and_are_loaded(
    world, orig: bool, mesh: Any
) -> None:
    world(2).run(as_with_torch, orig, mesh)


def in_a_hybrid_strategy() -> None:
    wrapping = {"strategy": "HYBRID_SHARD", "mesh": (2, 2), "use_orig_params": True}
    model, optimizer = trained(FULLSHARD, **wrapping)
    full, offloaded = saved(model, optimizer, FULL), saved(model, optimizer, OFFLOADED)
    assert comparable(offloaded) == (comparable(full) if dist.get_rank() == 0 else [{}, {}])
    others = trained(FULLSHARD, steps=0, seed=1, **wrapping)
    load(*others, FROM_RANK_0, offloaded)
    assert comparable(saved(*others, FULL)) == comparable(full)


def test_one_rank_of_a_hybrid_strategy_has_what_is_offloaded(world) -> None:
    world(4).run(in_a_hybrid_strategy)


def what_is_not_there() -> None:
    for orig in (False, True):
        model, _ = trained(FULLSHARD, steps=0, use_orig_params=orig)
        before = state_dict(FULLSHARD, model, "FULL")
        given = {"norm.weight": torch.full((5,), 7.0)}
        options = StateDictOptions(full_state_dict=True, strict=False)
        functions.set_model_state_dict(model, dict(given), options=options)
        after = state_dict(FULLSHARD, model, "FULL")
        assert_equal(after, {**before, **given, "alias.weight": given["norm.weight"]})
    mixed = nn.Sequential(wrap(FULLSHARD, nn.Linear(2, 2)), wrap(TORCH, nn.Linear(2, 2)))
    with pytest.raises(UnsupportedError, match=r"these by fullshard's: .*Linear"):
        functions.get_model_state_dict(mixed)


def test_what_is_not_loaded_stays_and_mixtures_are_refused(world) -> None:
    world(2).run(what_is_not_there)


def with_install() -> None:
    expected = {
        orig: saved(*trained(FULLSHARD, use_orig_params=orig), FULL) for orig in (True, False)
    }
    with installed():
        for orig, full in expected.items():
            wrapped = trained(TORCH, use_orig_params=orig)  # whose names are ours now
            assert isinstance(wrapped[0], FullyShardedDataParallel)
            assert comparable(saved(*wrapped, FULL)) == comparable(full)
            others = trained(TORCH, steps=0, seed=1, use_orig_params=orig)
            load(*others, SHARDED, saved(*wrapped, SHARDED))
            assert comparable(saved(*others, FULL)) == comparable(full)
    for orig, full in expected.items():
        wrapped = trained(TORCH, use_orig_params=orig)
        assert not isinstance(wrapped[0], FullyShardedDataParallel)
        assert comparable(saved(*wrapped, FULL)) == comparable(full)


def test_they_know_the_wrapper_while_fullshard_is_installed_and_torch_s_afterwards(world) -> None:
    world(2).run(with_install)
