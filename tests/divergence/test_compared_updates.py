"""Ranks that update their shards differently are told; differences that change nothing are no error."""

from __future__ import annotations

import subprocess

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.errors import DivergenceError


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fullshard.fully_shard(layer)
    return fullshard.fully_shard(model)


def steps_after_a_difference(kind: str) -> tuple[str, bool]:
    """Step with what is different on rank 1, then train on. Return the error, and whether the next step was one."""
    model, odd = sharded(), dist.get_rank() == 1
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    message, options = "", first.param_groups[0]
    if odd and kind == "order":
        first, second = second, first
    elif odd and kind == "learning rate":
        options["lr"] = 0.2
    elif odd and kind == "last digits":
        options["lr"] = 0.1000001
    elif odd and kind == "not a number":
        options["eps"] = float("nan")
    elif kind == "its own state":
        options["steps_of_this_rank"] = float(odd)
    elif kind == "tensor":
        options["lr"] = torch.tensor(0.2 if odd else 0.1)
    elif kind == "parameters" and odd:
        first = second
    first.step()
    if kind != "parameters":
        second.step()
    try:
        model(x)
    except DivergenceError as error:
        message = str(error)
    options["lr"] = 0.1
    model(x).sum().backward()  # after the error, too
    return message, model[0].weight.grad is not None


@pytest.mark.parametrize("kind", ["order", "last digits", "not a number", "its own state"])
def test_differences_that_change_nothing_are_no_error(world, kind: str) -> None:
    assert world(2).run(steps_after_a_difference, kind) == [("", True)] * 2


@pytest.mark.parametrize(
    ("kind", "named"),
    [("learning rate", "lr 0.2"), ("tensor", "lr 0.2"), ("parameters", "rank 1: SGD of 1: bias")],
)
def test_ranks_with_other_updates_raise_the_same_error_and_can_go_on(
    world, kind: str, named: str
) -> None:
    (message, goes_on), other = world(2).run(steps_after_a_difference, kind)
    assert (message, goes_on) == other
    assert goes_on
    assert "Optimizers must update the shards of all ranks in the same way" in message
    assert named in message


def train_without_an_empty_group() -> int:
    """Step with the wrapper's pieces in two groups, and leave out what this rank holds nothing of."""
    torch.manual_seed(0)
    model = fullshard.FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True)
    pairs = zip(model.parameters(), (0.1, 0.2), strict=True)
    optimizer = torch.optim.SGD(
        [{"params": [param], "lr": lr} for param, lr in pairs if param.numel()]
    )
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(optimizer.param_groups)


def test_a_rank_may_leave_out_a_group_of_which_it_holds_nothing(world) -> None:
    assert world(2).run(train_without_an_empty_group) == [1, 2]


FIRST_STEP = """
import torch, torch.distributed as dist
from torch import nn
import fullshard
from fullshard.divergence.journal import journal_of

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = {shard}(nn.Linear(4, 4))
torch.optim.SGD(model.parameters()).step()
print("steps:", journal_of(dist.group.WORLD).step)
"""


@pytest.mark.parametrize("shard", ["fullshard.fully_shard", "fullshard.FullyShardedDataParallel"])
def test_a_step_before_the_first_forward_counts_in_a_process_that_has_sharded_nothing_before(
    shard: str, preloaded_python: str
) -> None:
    """Other ranks may have, and count it: all must be in the same step."""
    program = [preloaded_python, "-c", FIRST_STEP.format(shard=shard)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "steps: 1\n", ended.stderr
