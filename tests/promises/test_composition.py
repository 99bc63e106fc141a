"""Sharded modules with torch's checkpoints, communication counts, profiler and activation offload."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from fullshard import fully_shard
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.models import ModelOptions, make_decoder, tokens_for
from tests.helpers.training import (
    FULLSHARD,
    TORCH,
    Run,
    all_whole,
    batch_of,
    gradients,
    mine,
    shard,
    weights,
)

# --- checkpoints -------------------------------------------------------------------------------------


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shard(make_decoder(ModelOptions(depth=1)), FULLSHARD, Run())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(2):
        model(mine(batch_of(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def untrained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shard(make_decoder(ModelOptions(depth=1), seed=9), FULLSHARD, Run())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    return {names[param]: all_whole(state) for param, state in optimizer.state.items()}


def state_dict_round_trip(full: bool, offload: bool, broadcast: bool) -> None:
    model, optimizer = trained()
    options = StateDictOptions(full_state_dict=full, cpu_offload=offload)
    model_state = get_model_state_dict(model, options=options)
    # A copy, since the state dict and what is loaded from it share tensors with the optimizer.
    optim_state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    if not full:
        assert all(isinstance(value, DTensor) for value in model_state.values())
    load = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast)
    if broadcast and dist.get_rank() != 0:
        model_state, optim_state = {}, {}
    other, other_optimizer = untrained()
    set_model_state_dict(other, model_state, options=load)
    set_optimizer_state_dict(other, other_optimizer, optim_state, options=load)
    assert_equal(weights(other), weights(model))
    assert_equal(optimizer_state(other, other_optimizer), optimizer_state(model, optimizer))
    for m, o in ((model, optimizer), (other, other_optimizer)):
        m(mine(batch_of(2))).backward()
        o.step()
    assert_equal(weights(other), weights(model))


@pytest.mark.parametrize(
    ("full", "offload", "broadcast"),
    [(False, False, False), (True, False, False), (True, True, True)],
)
def test_state_dicts_of_models_and_optimizers_round_trip(
    world, full: bool, offload: bool, broadcast: bool
) -> None:
    world(2).run(state_dict_round_trip, full, offload, broadcast)


def save(path: str, in_background: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model, optimizer = trained()
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optim_state}
    if in_background:
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)
    return weights(model), optimizer_state(model, optimizer)


def load(path: str, expected: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    model, optimizer = untrained()
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optim_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert_equal(weights(model), expected[0])
    assert_equal(optimizer_state(model, optimizer), expected[1])


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "in_background"), [(1, 3, False), (3, 2, False), (2, 1, True)]
)
def test_distributed_checkpoints_are_read_by_any_number_of_ranks(
    world, tmp_path: Path, saved_on: int, loaded_on: int, in_background: bool
) -> None:
    expected = world(saved_on).run(save, str(tmp_path), in_background)[0]
    world(loaded_on).run(load, str(tmp_path), expected)


# --- counting, offloading ----------------------------------------------------------------------------


def collectives(api: str) -> tuple[int, int]:
    """All-gathers and reduce-scatters of a step in steady state."""
    model = shard(make_decoder(), api, Run())
    for step in range(2):
        model(mine(batch_of(step))).backward()
    from torch.distributed.tensor.debug import (
        CommDebugMode,
    )  # seconds, which not every worker needs

    comm = CommDebugMode()
    with comm:
        model(mine(batch_of(2))).backward()
    counts = {str(op): count for op, count in comm.get_comm_counts().items()}
    gathers = sum(count for op, count in counts.items() if "gather" in op)
    reductions = sum(count for op, count in counts.items() if "reduce_scatter" in op)
    return gathers, reductions


def test_comm_debug_mode_counts_as_many_collectives_as_torch_s(world) -> None:
    ours = world(2).run(collectives, FULLSHARD)
    assert ours == world(2).run(collectives, TORCH)
    assert ours == [(7, 4)] * 2  # three blocks twice, the root once; four reductions


def profile_of_a_step(api: str) -> list[FunctionEvent]:
    """What a profiler sees of a step in steady state, in order."""
    with fake_world(2):
        model = shard(make_decoder(ModelOptions(depth=2)), api, Run())
        for step in range(2):
            model(tokens_for(step, 2)).backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(tokens_for(2, 2)).backward()
    return sorted(profiler.events() or [], key=lambda event: event.time_range.start)


def labels(events: list[FunctionEvent], *kinds: str) -> list[str]:
    """The ranges of some kinds, in order; torch does not name the root."""
    found = [event.name for event in events if event.name.split(" ")[0] in kinds]
    return [name if " " in name else f"{name} (root)" for name in found]


def test_a_profiler_sees_the_ranges_it_sees_with_torch() -> None:
    ours, theirs = (profile_of_a_step(api) for api in (FULLSHARD, TORCH))
    around = ("FSDP::pre_forward", "FSDP::post_forward", "FSDP::pre_backward")
    assert labels(ours, *around) == labels(theirs, *around)
    reduction = "FSDP::post_backward_reduce"
    assert set(labels(ours, reduction)) == set(labels(theirs, reduction))
    assert "FSDP::root_post_backward_callback" in {event.name for event in ours}


def ranges_around(event: FunctionEvent) -> list[str]:
    """Our ranges that an event lies in, outermost first."""
    names: list[str] = []
    parent: Any = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("FSDP::"):
            names.insert(0, parent.name.removeprefix("FSDP::"))
        parent = parent.cpu_parent
    return names


def test_a_profiler_sees_for_whom_a_collective_is() -> None:
    events = profile_of_a_step(FULLSHARD)
    around = [ranges_around(event) for event in events if event.name.startswith("c10d::")]
    assert [names[-2:] for names in around] == [
        ["pre_forward (root)", "all_gather (root)"],
        ["forward_prefetch for blocks.0", "all_gather (blocks.0)"],
        ["forward_prefetch for blocks.1", "all_gather (blocks.1)"],
        ["backward_prefetch for blocks.1", "all_gather (blocks.1)"],
        ["backward_prefetch for blocks.0", "all_gather (blocks.0)"],
        ["post_backward_reduce (blocks.1)"],
        ["post_backward_reduce (blocks.0)"],
        ["post_backward_reduce (root)"],
    ]


def offloaded_activations() -> None:
    model, reference = shard(make_decoder(), FULLSHARD, Run()), make_decoder()
    for step in range(2):
        with torch.autograd.graph.save_on_cpu():
            loss = model(mine(batch_of(step)))
        loss.backward()
        reference(batch_of(step)).backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


def test_activations_may_be_saved_elsewhere(world) -> None:
    world(2).run(offloaded_activations)


class Scaled(torch.autograd.Function):
    """Reads a parameter in backward that it saved, and one it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        assert torch.equal(ctx.module.weight, weight)  # the unsharded one is on the module
        return grads[0] @ weight, grads[0].t() @ x, None


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(torch.sin(x), self.linear.weight, self.linear)


def custom_function() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Custom(), Custom())
    torch.manual_seed(0)
    model = nn.Sequential(Custom(), Custom())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(2 * dist.get_world_size(), 5)
    model(mine(x)).square().mean().backward()
    reference(x).square().mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-7)


def test_custom_autograd_functions_find_the_unsharded_parameters(world) -> None:
    world(2).run(custom_function)
