"""Where a module is in the step: what each kind of step makes of it, and that the table allows no more than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.engine.state import FSDPState, state_of
from fullshard.engine.training_state import TRANSITIONS, TrainingState
from tests.helpers.fake import fake_world
from tests.helpers.life_cycle import CheckedAttribute

IDLE, FORWARD = TrainingState.IDLE, TrainingState.FORWARD
PRE_BACKWARD, POST_BACKWARD = TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD

Steps = list[tuple[TrainingState, TrainingState]]


class Recorded(CheckedAttribute):
    """Notes the changes of every state, beside checking them."""

    def __init__(self) -> None:
        super().__init__("training_state", TRANSITIONS, may_stay=True)
        self.changes: dict[FSDPState, Steps] = {}

    def __set__(self, owner: Any, following: Any) -> None:
        before = owner.__dict__.get("training_state")
        super().__set__(owner, following)
        if before is not None and before is not following:
            self.changes.setdefault(owner, []).append((before, following))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr(FSDPState, "training_state", found)
    return found


class Net(nn.Module):
    """Two layers, run as ``run`` says."""

    def __init__(self, run: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def in_order(net: Net, x: Tensor) -> Tensor:
    return net.second(net.first(x))


def first_twice(net: Net, x: Tensor) -> Tensor:
    return net.second(net.first(net.first(x)))


def first_around_second(net: Net, x: Tensor) -> Tensor:
    return net.first(net.second(net.first(x)))


def recomputed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.second, checkpoint(net.first, x, use_reentrant=True), use_reentrant=True)


def recomputed_together(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda y: net.second(net.first(y)), x, use_reentrant=False)


class Penalised(nn.Module):
    """A layer whose forward runs a backward pass, through all of its own parameters or through one of two."""

    def __init__(self, *, all_params: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
        self.all_params = all_params

    def forward(self, x: Tensor) -> Tensor:
        penalty = (x.detach() @ self.weight).sum()
        if self.all_params:
            penalty = penalty + self.bias.sum()
        penalty.backward()
        return x @ self.weight + self.bias

    @classmethod
    def below_a_root(cls, *, all_params: bool) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), cls(all_params=all_params))
        fully_shard(model[1])
        return fully_shard(model)


def sharded(run: Callable[[Net, Tensor], Tensor]) -> Net:
    net = Net(run)
    fully_shard(net.first)
    fully_shard(net.second)
    fully_shard(net)
    return net


def changes_of(module: nn.Module, recorded: Recorded) -> Steps:
    state = state_of(module)
    assert state is not None and state.training_state is IDLE
    return recorded.changes[state]


STEP = [
    (IDLE, FORWARD),
    (FORWARD, IDLE),
    (IDLE, PRE_BACKWARD),
    (PRE_BACKWARD, POST_BACKWARD),
    (POST_BACKWARD, IDLE),
]


def test_a_step_leads_every_module_once_around(recorded: Recorded) -> None:
    with fake_world(2):
        net = sharded(in_order)
        net(torch.ones(1, 4)).sum().backward()
        for module in (net.first, net.second, net):
            assert changes_of(module, recorded) == STEP


def test_a_module_that_is_used_again_is_reached_again(recorded: Recorded) -> None:
    with fake_world(2):
        net = sharded(first_around_second)
        net(torch.ones(1, 4)).sum().backward()
        assert changes_of(net.first, recorded) == [
            *STEP[:2],
            *STEP[:2],
            *STEP[2:4],
            (POST_BACKWARD, PRE_BACKWARD),
            *STEP[3:],
        ]


def test_a_recomputation_is_a_forward(recorded: Recorded) -> None:
    with fake_world(2):
        net = sharded(recomputed)
        net(torch.ones(1, 4, requires_grad=True)).sum().backward()
        assert changes_of(net.first, recorded) == [*STEP[:2], *STEP]
        assert state_of(net.first).recomputes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("all_params", "inside"),
    [
        # Gradients that have all arrived are sent off at once, others when the pass ends.
        (True, [(FORWARD, PRE_BACKWARD), (PRE_BACKWARD, POST_BACKWARD), (POST_BACKWARD, FORWARD)]),
        (False, [(FORWARD, PRE_BACKWARD), (PRE_BACKWARD, FORWARD)]),
    ],
)
def test_a_forward_goes_on_after_a_backward_inside_of_it(
    recorded: Recorded, all_params: bool, inside: Steps
) -> None:
    with fake_world(2):
        model = Penalised.below_a_root(all_params=all_params)
        model(torch.ones(1, 4)).sum().backward()
        assert changes_of(model[1], recorded) == [STEP[0], *inside, *STEP[1:]]


def test_a_failed_step_is_given_up(recorded: Recorded) -> None:
    def refuse(_: Tensor) -> Tensor:
        raise ArithmeticError

    def fail_in_first(net: Net, x: Tensor) -> Tensor:
        hidden = net.first(x)
        hidden.register_hook(refuse)
        return net.second(hidden)

    with fake_world(2):
        net: Any = sharded(fail_in_first)
        loss = net(torch.ones(1, 4)).sum()
        with pytest.raises(ArithmeticError):
            loss.backward()
        step = state_of(net).step  # type: ignore[union-attr]
        assert step is not None and step.busy
        net.reset_iter_state()
        assert not step.busy
        assert changes_of(net.second, recorded)[-1][1] is IDLE
        assert (PRE_BACKWARD, IDLE) in changes_of(net, recorded)


def test_every_allowed_change_happens_in_some_step(recorded: Recorded) -> None:
    with fake_world(2):
        for run in (in_order, first_around_second, recomputed, recomputed_together, first_twice):
            net = sharded(run)
            net(torch.ones(1, 4, requires_grad=True)).sum().backward()
        for all_params in (False, True):
            Penalised.below_a_root(all_params=all_params)(torch.ones(1, 4)).sum().backward()
    seen = {change for changes in recorded.changes.values() for change in changes}
    allowed = {(before, after) for before, following in TRANSITIONS.items() for after in following}
    # The first is of failed steps, see above.
    assert allowed - seen == {(PRE_BACKWARD, IDLE)}


def test_a_change_that_the_table_does_not_have_is_refused_in_tests() -> None:
    with fake_world(2):
        state: Any = state_of(fully_shard(nn.Linear(4, 4)))
        with pytest.raises(AssertionError, match="is followed by"):
            state.training_state = POST_BACKWARD
