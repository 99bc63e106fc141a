"""The states of a group: which changes its methods make, which are refused, and what the docs say of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import fully_shard
from fullshard.engine.gather import Gather
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.sharded_state import TRANSITIONS, ShardedState
from fullshard.storage.shard_storage import ShardStorage
from fullshard.transport.streams import FSDPCommContext
from tests.helpers.fake import fake_world
from tests.helpers.param_groups import make_group

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"

SHARDED = ShardedState.SHARDED
GATHERING = ShardedState.GATHERING
GATHERED = ShardedState.GATHERED
UNSHARDED = ShardedState.UNSHARDED
POST_FORWARD = ShardedState.SHARDED_POST_FORWARD

METHODS = {
    "unshard": FSDPParamGroup.unshard,
    "wait": FSDPParamGroup.wait,
    "use_sharded_params": FSDPParamGroup.use_sharded_params,
    "reshard": FSDPParamGroup.reshard,
    "reshard_after_forward": FSDPParamGroup.reshard_after_forward,
    "drop_post_forward_shard": FSDPParamGroup.drop_post_forward_shard,
    "repack": FSDPParamGroup.repack,
}
"""Methods that change the state, and need nothing but the group."""

WAYS: dict[ShardedState, list[str]] = {
    SHARDED: [],
    GATHERING: ["unshard"],
    GATHERED: ["unshard", "wait", "use_sharded_params"],
    UNSHARDED: ["unshard", "wait"],
    POST_FORWARD: ["unshard", "wait", "reshard_after_forward"],
}
"""How to bring a new group to a state."""


def group_in(state: ShardedState) -> FSDPParamGroup:
    group = make_group(nn.Linear(4, 6), post_forward_size=2)
    for method in WAYS[state]:
        METHODS[method](group)
    assert group.sharded_state is state
    return group


@pytest.mark.parametrize("state", ShardedState)
def test_every_method_leads_from_every_state_to_the_state_it_says(state: ShardedState) -> None:
    gathered = state in (GATHERING, GATHERED, UNSHARDED)
    expected = {
        "unshard": state if gathered else GATHERING,
        "wait": UNSHARDED if gathered else AssertionError,
        "use_sharded_params": GATHERED if state is UNSHARDED else state,
        "reshard": SHARDED,
        "reshard_after_forward": POST_FORWARD if gathered else SHARDED,
        "drop_post_forward_shard": SHARDED if state is POST_FORWARD else state,
        "repack": GATHERED if state is UNSHARDED else state,
    }
    with fake_world(4):
        found: dict[str, Any] = {}
        for name, method in METHODS.items():
            group = group_in(state)
            try:
                method(group)
                found[name] = group.sharded_state
            except AssertionError:
                found[name] = AssertionError
    assert found == expected


@pytest.mark.parametrize("state", ShardedState)
def test_what_is_in_memory_and_on_the_modules_follows_the_state(state: ShardedState) -> None:
    with fake_world(4):
        group = group_in(state)
        (module,) = {owner.module for param in group.params for owner in param.owners}
        full, part = 4 * 6 * 4 + 6 * 4, 2
        on_module = dict(module.named_parameters())
        assert all(
            on_module[param.name]
            is (param.unsharded_param if state is UNSHARDED else param.sharded_param.param)
            for param in group.params
        )
        held = group.held_bytes
        if state is SHARDED:
            assert held == 0
        elif state is POST_FORWARD:
            assert full / part <= held < full
        else:
            assert held >= full
        assert group.gathered == (state not in (SHARDED, POST_FORWARD))
        assert bool(group.gathered_addresses) == (state in (GATHERED, UNSHARDED))


def test_changes_that_the_table_does_not_have_are_refused_in_tests() -> None:
    with fake_world(4):
        for state in ShardedState:
            for following in set(ShardedState) - TRANSITIONS[state]:
                group = group_in(state)
                with pytest.raises(AssertionError, match="is followed by"):
                    group.sharded_state = following
                assert group.sharded_state is state


def test_the_design_states_the_same_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", DESIGN.read_text(), flags=re.MULTILINE)
    found = {
        ShardedState[state]: frozenset(
            ShardedState[name] for name in re.findall(r"`(\w+)`", following)
        )
        for state, following in rows
        if state in ShardedState.__members__
    }
    assert found == TRANSITIONS


def test_a_gather_is_issued_once_and_says_so() -> None:
    with fake_world(4):
        group = make_group(nn.Linear(4, 6))
        assert group.unshard() and not group.unshard()
        group.wait()
        assert not group.unshard()
        group.reshard()
        assert group.unshard()


def test_a_gather_nobody_used_is_waited_for_before_its_memory_is_given_back() -> None:
    with fake_world(4):
        group = make_group(nn.Linear(4, 6))
        group.unshard()
        waited: list[bool] = []
        assert group.gather.unfinished and group.gather.work is not None
        group.gather.work = Told(waited)  # type: ignore[assignment]
        group.reshard()
        assert waited == [True] and group.held_bytes == 0


class Told:
    """A work that notes that somebody has waited for it."""

    def __init__(self, waited: list[bool]) -> None:
        self._waited = waited

    def wait(self) -> None:
        self._waited.append(True)


def is_outdated(group: FSDPParamGroup) -> bool:
    return group.outdated


def test_gathered_parameters_are_used_again_only_if_they_may_stay_and_shards_are_as_they_were() -> (
    None
):
    with fake_world(4):
        group = make_group(nn.Linear(4, 6))
        group.unshard()
        assert is_outdated(group)  # nobody said that they may stay
        group.reshard()
        assert not is_outdated(group)  # there is nothing to use
        group.unshard(may_stay=True)
        version = group.weight_version
        assert not is_outdated(group)
        with torch.no_grad():
            group.sharded_params[0].param.add_(1)
        assert is_outdated(group)
        assert group.weight_version == version  # what was gathered has not changed
        group.reshard()
        assert group.weight_version != version  # what will be gathered has


def test_a_group_joins_another_model_with_its_gather_finished() -> None:
    with fake_world(4):
        group = make_group(nn.Linear(4, 6))
        group.unshard()
        group.connect(FSDPCommContext(group.device), "elsewhere")
        assert group.sharded_state is GATHERED and group.name == "elsewhere"


def test_gathers_wait_for_shards_that_were_packed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(2):
        linear = nn.Linear(4, 6)
        model: Any = fully_shard(linear)
        model(torch.ones(2, 4))
        calls: list[str] = []

        def noting(owner: type, name: str) -> None:
            method = getattr(owner, name)

            def noted(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return method(*args, **kwargs)

            monkeypatch.setattr(owner, name, noted)

        noting(FSDPCommContext, "gathers_wait_for")
        noting(ShardStorage, "adopt")
        noting(Gather, "start")
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model(torch.ones(2, 4))
    packed = len(calls) - 1 - calls[::-1].index("adopt")
    assert "gathers_wait_for" in calls[packed : calls.index("start", packed)]
