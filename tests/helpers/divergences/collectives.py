"""Ranks that call alone what all must call: norms, state dicts, checkpoints, torch's own collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from fullshard import checkpoint, clip_grad_norm_
from tests.helpers.divergences import Training, kind
from tests.helpers.rank_programs import Rank

FULL = StateDictOptions(full_state_dict=True)


@kind(names=["clip_grad_norm_", "norm"], ranks=3)
def a_rank_clips_alone(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    run.loss().backward()
    if me.diverges():
        clip_grad_norm_(run.model, 1.0)
    run.update()
    run.go_on()


@kind(names=["a_rank_clips_alone_with_torch"])
def a_rank_clips_alone_with_torch(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    run.loss().backward()
    if me.diverges():
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        print(norm.full_tensor())
    run.update()
    run.go_on()


@kind(names=["full_tensor"], needs_host_waits=True)
def a_rank_asks_for_a_full_tensor(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.layers[1].first.weight.full_tensor()
    run.go_on()


@kind(names=["state_dict"], ranks=3, odd=0, needs_host_waits=True)
def a_rank_asks_for_a_full_state_dict(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        get_model_state_dict(run.model, options=FULL)
    run.go_on()


@kind(is_variant=True, names=["state_dict"], needs_host_waits=True)
def a_rank_asks_for_a_full_optimizer_state_dict(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        get_optimizer_state_dict(run.model, run.optimizer, options=FULL)
    run.go_on()


@kind(names=["checkpoint", "new_group"], odd=0)
def a_rank_saves_alone(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        checkpoint.save(me.folder / "saved", run.model, run.optimizer)
    run.go_on()


@kind(names=["a_rank_saves_alone_in_the_end"], odd=1, odd_ends="well")
def a_rank_saves_alone_in_the_end(me: Rank) -> None:
    """The odd one is the rank that does not save."""
    run = Training(me)
    run.steps(2)
    if not me.diverges():
        checkpoint.save(me.folder / "saved", run.model, run.optimizer)


@kind(names=["checkpoint", "new_group"])
def a_rank_saves_alone_in_the_background(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        checkpoint.async_save(me.folder / "saved", run.model, run.optimizer).wait()
    run.go_on()


@kind(is_variant=True, names=["checkpoint"])
def a_rank_loads_alone(me: Rank) -> None:
    run = Training(me)
    run.steps(1)
    checkpoint.save(me.folder / "saved", run.model, run.optimizer)
    if me.diverges():
        checkpoint.load(me.folder / "saved", run.model, run.optimizer)
    run.go_on()


@kind(names=["all_reduce"], odd=0, needs_host_waits=True)
def a_rank_averages_its_loss_alone(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        dist.all_reduce(torch.ones(()))
    run.go_on()


@kind(is_variant=True, names=["barrier"], ranks=3)
def a_rank_waits_at_a_barrier(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        dist.barrier()
    run.go_on()


@kind(names=["clip_grad_norm_ to 2"])
def a_rank_clips_to_another_norm(me: Rank) -> None:
    run = Training(me)
    run.loss().backward()
    clip_grad_norm_(run.model, 2.0 if me.diverges() else 1.0)
    run.update()
    run.go_on()


@kind(is_variant=True, names=["order 1"])
def a_rank_clips_to_a_norm_of_another_order(me: Rank) -> None:
    run = Training(me)
    run.loss().backward()
    clip_grad_norm_(run.model, 1.0, norm_type=1.0 if me.diverges() else 2.0)
    run.update()
    run.go_on()


@kind(names=["Work.wait for all_reduce"], ranks=3, needs_host_waits=True)
def a_rank_waits_for_a_collective_that_it_called_alone(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        work = dist.all_reduce(torch.ones(()), async_op=True)
        work.wait()
    run.go_on()


@kind(names=["recv"], needs_meetings=True)
def a_rank_receives_what_nobody_sends(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        dist.recv(torch.ones(()), src=0)
    run.go_on()


@kind(names=["new_group"], needs_meetings=True)  # elsewhere ranks connect later
def a_rank_makes_a_process_group_alone(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        dist.new_group([0, 1])
    run.go_on()


@kind(names=["checkpoint (load)"])
def a_rank_loads_while_others_save(me: Rank) -> None:
    run = Training(me)
    checkpoint.save(me.folder / "saved", run.model)
    if me.diverges():
        checkpoint.load(me.folder / "saved", run.model)
    else:
        checkpoint.save(me.folder / "saved", run.model)
    run.go_on()
