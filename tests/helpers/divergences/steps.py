"""Ranks whose steps are not equal: other layers, branches, microbatches, backwards and updates."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard import guarded_step, register_fsdp_forward_method
from tests.helpers.divergences import (
    UNMET_PAUSE_S,
    UNMET_STEPS,
    Block,
    Net,
    Training,
    device_type,
    kind,
    shard,
)
from tests.helpers.rank_programs import Rank


@kind(names=["layers.1"], tears_down=True)
def a_rank_skips_a_layer(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.order.remove(1)
    run.go_on()


@kind(is_variant=True, names=["layers.2", "layers.1"], ranks=3)
def a_rank_calls_equal_layers_in_another_order(me: Rank) -> None:
    run = Training(me)
    if me.diverges():
        run.net.order = [0, 2, 1]
    run.go_on()


@kind(names=["layers.2", "layers.1"])
def a_rank_calls_equal_layers_in_another_order_later(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.order = [0, 2, 1]
    run.go_on()


@kind(names=["layers.0", "layers.1"])
def a_rank_calls_layers_of_other_sizes_in_another_order(me: Rank) -> None:
    net = Net()
    net.layers[0] = Block(7)
    run = Training(me, shard(net))
    run.steps(2)
    if me.diverges():
        net.order = [1, 0, 2]
    run.go_on()


@kind(names=["branch"], ranks=3)
def a_rank_takes_another_branch(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.takes_branch = True
    run.go_on()


@kind(is_variant=True, names=["branch", "layers.2"])
def a_rank_no_longer_takes_a_branch(me: Rank) -> None:
    run = Training(me)
    run.net.takes_branch = True
    run.steps(3)
    if me.diverges():
        run.net.takes_branch = False
    run.go_on()


@kind(names=["layers", "root"], ranks=4)
def ranks_drop_layers_at_random(me: Rank) -> None:
    run = Training(me)
    run.steps(1)
    if me.diverges():
        torch.manual_seed(7)
    for _ in range(12):
        run.net.order = [index for index in range(3) if torch.rand(()) < 0.5]
        run.steps(1)
    run.end()


@kind(names=["layers", "root"])
def a_rank_has_three_microbatches_instead_of_two(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    for _ in range(3):
        microbatches = 3 if me.diverges() else 2
        for index in range(microbatches):
            run.model.set_requires_gradient_sync(index == microbatches - 1)
            run.loss().backward()
        run.update()
    run.end()


@kind(is_variant=True, names=["layers", "root"], ranks=3)
def a_rank_reduces_one_microbatch_later(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    last = 1 if me.diverges() else 0
    for index in range(2):
        run.model.set_requires_gradient_sync(index == last)
        run.loss().backward()
    run.update()
    run.go_on()


@kind(names=["layers", "root"])
def a_rank_evaluates_alone(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        with torch.no_grad():
            run.model(run.batch())
    run.go_on()


@kind(is_variant=True, names=["layers", "root"])
def a_rank_generates_more_tokens(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    with torch.inference_mode():
        for _ in range(5 if me.diverges() else 3):
            run.model(run.batch(rows=1))
    run.go_on()


@kind(names=["layers", "head", "forward", "backward"])
def a_rank_does_not_run_backward(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    loss = run.loss()
    if not me.diverges():  # its loss was not finite, say
        loss.backward()
        run.update()
    run.go_on()


@kind(is_variant=True, names=["layers", "root"])
def a_rank_runs_backward_twice(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    loss = run.loss()
    if me.diverges():
        loss.backward(retain_graph=True)
    loss.backward()
    run.update()
    run.go_on()


@kind(names=["layers.2", "layers.1"])
def a_rank_has_another_loss(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    outputs = []
    run.net.layers[0].register_forward_hook(lambda *args: outputs.append(args[2]))
    loss = run.loss()
    if me.diverges():
        loss = outputs[0].sum()
    loss.backward()
    run.update()
    run.go_on()


@kind(names=["layers.1", "encode"])
def a_rank_calls_another_method(me: Rank) -> None:
    net = Net()
    layer: Any = net.layers[1]
    layer.encode = layer.forward
    run = Training(me, shard(net))
    register_fsdp_forward_method(layer, "encode")
    run.steps(2)
    if me.diverges():
        layer.encode(run.batch())
    run.go_on()


@kind(names=["step "])
def a_rank_does_not_update(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    run.loss().backward()
    if not me.diverges():
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.go_on()


@kind(is_variant=True, names=["step "], ranks=3)
def a_rank_updates_twice(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    run.loss().backward()
    if me.diverges():
        run.optimizer.step()
    run.update()
    run.go_on()


@kind(names=["to be added to gradients"])
def a_rank_does_not_drop_its_gradients(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    run.loss().backward()
    run.optimizer.step()
    if not me.diverges():
        run.optimizer.zero_grad()
    run.go_on()


@kind(is_variant=True, names=["layers", "reshard_after_forward"])
def a_rank_keeps_parameters_after_forward_from_now_on(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.model.set_reshard_after_forward(False)
    run.go_on()


@kind(is_variant=True, names=["layers", "reshard_after_backward"])
def a_rank_keeps_parameters_after_backward(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.model.set_reshard_after_backward(False)
    for _ in range(2):
        run.loss().backward()
    run.update()
    run.go_on()


@kind(names=["layers.2", "layers.0"])
def a_rank_unshards_alone(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.layers[2].unshard()
    run.go_on()


# --- several models and optimizers ---------------------------------------------------------------------------------


@kind(names=["all-gather of root (model 2)"])
def a_rank_runs_equal_models_in_another_order(me: Rank) -> None:
    runs = [Training(me), Training(me)]
    for run in runs:
        run.steps(1)
    for run in reversed(runs) if me.diverges() else runs:
        with torch.no_grad():
            run.model(run.batch())
    runs[0].go_on()


@kind(names=["in the order of fully_shard"], ranks=3)
def a_rank_runs_equal_models_in_another_order_from_the_start(me: Rank) -> None:
    runs = [Training(me), Training(me)]
    for run in reversed(runs) if me.diverges() else runs:
        run.steps(1)
    runs[0].go_on()


@kind(names=["layers.0", "layers.1"], ranks=3)
def a_rank_evaluates_in_another_order(me: Rank) -> None:
    """The blocks are equal, so every collective finds its size, and no step of an optimizer follows."""
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.order = [1, 0, 2]
    evaluate(run)


@kind(is_variant=True, names=["layers.0", "layers.1"])
def a_rank_accumulates_in_another_order(me: Rank) -> None:
    run = Training(me)
    if me.diverges():
        run.net.order = [1, 0, 2]
    for _ in range(UNMET_STEPS):
        run.loss().backward()
        time.sleep(UNMET_PAUSE_S)


@kind(is_variant=True, names=["layers.0", "layers.1"])
def a_rank_evaluates_once_in_another_order(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.order = [1, 0, 2]
    with torch.no_grad():
        run.model(run.batch())
    run.net.order = [0, 1, 2]
    evaluate(run)


def evaluate(run: Training) -> None:
    """Evaluate for as long as it takes that a divergence must show."""
    with torch.no_grad():
        for _ in range(UNMET_STEPS):
            run.model(run.batch())
            time.sleep(UNMET_PAUSE_S)


@kind(names=["SGD of layers.1"], needs_meetings=True)
def a_rank_steps_another_optimizer(me: Rank) -> None:
    run = Training(me)
    layers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in run.net.layers]
    run.loss().backward()
    layers[1 if me.diverges() else 0].step()
    run.optimizer.zero_grad()
    run.go_on()


@kind(names=["lr 0.5"], needs_meetings=True)
def a_rank_has_another_learning_rate(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.optimizer.param_groups[0]["lr"] = 0.5
    run.go_on()


@kind(is_variant=True, names=["AdamW"], ranks=3, needs_meetings=True)
def a_rank_has_another_optimizer(me: Rank) -> None:
    run = Training(me)
    if me.diverges():
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01)
    run.go_on()


@kind(is_variant=True, names=["lr 0.5"], ranks=4, odd=2, needs_meetings=True)
def a_replica_has_another_learning_rate(me: Rank) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    run = Training(me, shard(Net(), mesh=mesh))
    run.steps(2)
    if me.diverges():
        run.optimizer.param_groups[0]["lr"] = 0.5
    run.go_on()


# --- recomputation --------------------------------------------------------------------------------------------------


class Recomputing(Net):
    """Recomputes two layers, and drops one of them then if it is told to."""

    drops = False

    def forward(self, x: Tensor) -> Tensor:
        times = itertools.count()

        def two_layers(x: Tensor) -> Tensor:
            recomputed = next(times) > 0
            x = self.layers[1](x)
            return x if recomputed and self.drops else self.layers[2](x)

        x = checkpoint(two_layers, self.layers[0](x), use_reentrant=False)
        return self.head(x)


@kind(is_variant=True, names=["layers"], odd_ends="CheckpointError")
def a_rank_recomputes_other_layers(me: Rank) -> None:
    run = Training(me, shard(Recomputing()))
    run.steps(2)
    if me.diverges():
        run.net.drops = True
    run.go_on()


# --- guarded steps ----------------------------------------------------------------------------------------------------


@kind(names=["beginning of guarded steps"], ranks=3)
def a_rank_guards_its_step_alone(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    with guarded_step(run.model) if me.diverges() else contextlib.nullcontext():
        run.loss().backward()
    run.update()
    run.go_on()


@kind(names=["all_reduce"], needs_host_waits=True)
def a_rank_fails_a_guarded_step_while_others_average(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    with guarded_step(run.model):
        loss = run.loss()
        if me.diverges():
            raise ValueError("a bad sample")
        dist.all_reduce(loss.detach())
        loss.backward()
    run.go_on()
