"""Ranks that raise, leave, are killed or are stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.divergence import monitor
from tests.helpers.divergences import WRAPPER, Net, Training, device_type, kind, shard, wrap
from tests.helpers.rank_programs import Rank


class Mishap(Exception):
    """What goes wrong on one rank."""


def raise_mishap(*_: Any) -> None:
    raise Mishap("a bad sample")


class Mute(Exception):
    """An exception that cannot say what went wrong."""

    def __str__(self) -> str:
        raise Mishap("in __str__")


def raise_mute(*_: Any) -> None:
    raise Mute


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise Mishap("in backward")


# --- that raise ---------------------------------------------------------------------------------------------------


@kind(odd_ends="Mishap", names=["layers.1"])
def a_rank_raises_in_forward(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.layers[1].second.register_forward_pre_hook(raise_mishap)
    run.go_on()


@kind(is_variant=True, odd=0, odd_ends="Mishap", names=["layers"])
def a_rank_raises_in_its_first_forward(me: Rank) -> None:
    run = Training(me)
    if me.diverges():
        run.net.layers[1].first.register_forward_pre_hook(raise_mishap)
    run.go_on()


@kind(odd_ends="Mishap", names=["layers.1"], tears_down=True)
def a_rank_raises_in_backward(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.layers[1].first.register_forward_hook(lambda *args: FailingBackward.apply(args[2]))
    run.go_on()


@kind(is_variant=True, api=WRAPPER, odd=0, odd_ends="Mishap", names=["layers.1"])
def a_wrapped_rank_raises_in_forward(me: Rank) -> None:
    run = Training(me, wrap(Net()))
    run.steps(2)
    if me.diverges():
        run.net.layers[1].second.register_forward_pre_hook(raise_mishap)
    run.go_on()


@kind(odd_ends="Mishap", names=["optimizer"])
def a_rank_raises_in_the_optimizer(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.optimizer.register_step_pre_hook(raise_mishap)
    run.go_on()


@kind(odd_ends="Mute", names=["Mute: (no message"])
def a_rank_raises_what_has_no_message(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.layers[1].second.register_forward_pre_hook(raise_mute)
    run.go_on()


@kind(odd_ends="well", names=["Mishap"])
def a_thread_that_trains_raises_and_its_process_lives_on(me: Rank) -> None:
    def train() -> None:
        run = Training(me)
        run.steps(2)
        if me.diverges():
            raise Mishap("a bad sample")
        run.go_on()

    if me.is_odd:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        time.sleep(10)
    else:
        train()


@kind(
    is_variant=True,
    odd_ends="FloatingPointError",
    names=["a_rank_raises_after_its_loss"],
)
def a_rank_raises_after_its_loss(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    loss = run.loss()
    if me.diverges():
        raise FloatingPointError("the loss is not finite")
    loss.backward()
    run.go_on()


@kind(odd_ends="Mishap", names=["root", "raise_mishap"], store_on_rank_0=True, odd=0)
def the_rank_with_the_store_raises_in_its_data(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.batch = raise_mishap  # type: ignore[assignment]
    run.go_on()


@kind(odd_ends="Mishap", names=["agreement on the model"])
def a_rank_raises_before_its_model_is_built(me: Rank) -> None:
    monitor.install()  # as `fullshard.install` and the trainer do at the beginning
    dist.barrier()  # others that still connect to this rank have torch's error before ours
    if me.diverges():
        raise Mishap("no such file")
    Training(me).go_on()


@kind(is_variant=True, odd_ends="well", names=["agreement on the model"])
def a_rank_ends_before_its_model_is_built(me: Rank) -> None:
    monitor.install()
    dist.barrier()
    if not me.diverges():
        Training(me).go_on()


@kind(names=["layers", "root"])
def a_rank_catches_an_error_and_skips_the_batch(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        hook = run.net.layers[1].second.register_forward_pre_hook(raise_mishap)
        try:
            run.steps(1)
        except Mishap:
            hook.remove()
            run.model.reset_iter_state()
    run.go_on()


@kind(is_variant=True, names=["layers", "root"])
def a_rank_catches_an_error_of_backward(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        layer = run.net.layers[1].first
        hook = layer.register_forward_hook(lambda *args: FailingBackward.apply(args[2]))
        try:
            run.steps(1)
        except Mishap:
            hook.remove()
            run.model.reset_iter_state()
            run.optimizer.zero_grad()
    run.go_on()


# --- that leave ---------------------------------------------------------------------------------------------------


@kind(odd_ends="well", names=["root", "layers"], tears_down=True)
def a_rank_has_less_data(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if not me.diverges():
        run.steps(3)
    run.end()


@kind(is_variant=True, odd_ends="well", names=["layers", "root"], tears_down=True)
def a_rank_ends_without_destroying_its_groups(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if not me.diverges():
        run.go_on()


@kind(odd_ends="well", names=["agreement on the model"])
def a_rank_has_no_data_at_all(me: Rank) -> None:
    run = Training(me)
    if not me.diverges():
        run.go_on()


@kind(odd_ends="exit 0 or well", names=["layers", "root"])
def a_rank_calls_sys_exit(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        sys.exit(0)
    run.go_on()


@kind(is_variant=True, ranks=3, odd_ends="exit 3", names=["layers", "root"])
def a_rank_calls_os_exit(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        os._exit(3)
    run.go_on()


@kind(odd_ends="KeyboardInterrupt", names=["layers", "root"])
def a_rank_is_interrupted(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        signal.raise_signal(signal.SIGINT)
    run.go_on()


@kind(is_variant=True, odd_ends="SIGTERM", names=["layers", "root"])
def a_rank_is_terminated(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        signal.raise_signal(signal.SIGTERM)
    run.go_on()


@kind(ranks=3, odd_ends="well", names=["layers", "root"])
def a_rank_destroys_its_groups_and_lives_on(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.end()
        time.sleep(4)
    else:
        run.go_on()


# --- that are killed or stopped -----------------------------------------------------------------------------------


def kill_at(run: Training, number: int) -> None:
    """Let a signal reach this rank in the middle of its next forward."""
    run.net.layers[1].first.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), number))


@kind(ranks=3, odd_ends="SIGKILL", names=["layers", "root"])
def a_rank_is_killed(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        kill_at(run, signal.SIGKILL)
    run.go_on()


@kind(is_variant=True, ranks=3, odd_ends="SIGKILL", names=["agreement on the model"])
def a_rank_is_killed_before_its_first_forward(me: Rank) -> None:
    run = Training(me)
    if me.diverges():
        os.kill(os.getpid(), signal.SIGKILL)
    run.go_on()


@kind(ranks=3, odd=0, odd_ends="SIGKILL", names=["layers", "root"], store_on_rank_0=True)
def the_rank_with_the_store_is_killed(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        kill_at(run, signal.SIGKILL)
    run.go_on()


@kind(
    is_variant=True,
    ranks=3,
    odd=0,
    odd_ends="SIGKILL",
    names=["layers", "root"],
    store_on_rank_0=True,
)
def the_rank_with_the_store_is_killed_in_its_first_forward(me: Rank) -> None:
    run = Training(me)
    if me.diverges():
        kill_at(run, signal.SIGKILL)
    run.go_on()


@kind(
    ranks=3,
    odd=0,
    odd_ends="SIGKILL",
    names=["layers", "root"],
    store_on_rank_0=True,
    resumed_after_s=2.0,
)
def the_rank_with_the_store_is_killed_and_another_rank_looks_late(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        kill_at(run, signal.SIGKILL)
    elif me.number == 1:  # it goes on when rank 2 has ended, too
        kill_at(run, signal.SIGSTOP)
    run.go_on()


@kind(is_variant=True, odd_ends="SIGSEGV", names=["layers", "root"])
def a_rank_crashes(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        kill_at(run, signal.SIGSEGV)
    run.go_on()


@kind(ranks=3, odd_ends="stopped", names=["layers", "root"])
def a_rank_is_stopped(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        kill_at(run, signal.SIGSTOP)
    run.go_on()


@kind(ranks=3, odd_ends="SIGKILL", names=["layers", "root"])
def a_rank_is_killed_while_others_compute(me: Rank) -> None:
    """The backend notes it in the background, and refuses the next call."""
    run = Training(me)
    run.steps(2)
    if me.diverges():
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(()), async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    run.go_on()


@kind(odd_ends="DivergenceError", names=["layers", "root"], needs_aborts=True)
def a_rank_aborts_its_process_group(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        dist.group.WORLD.abort()
    run.go_on()


@kind(ranks=3, odd_ends="SIGKILL", names=["layers", "root"], is_apart=True)
def a_rank_in_a_container_is_killed(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        kill_at(run, signal.SIGKILL)
    run.go_on()


@kind(ranks=4, odd=2, odd_ends="SIGKILL", names=["layers", "root"])
def a_rank_of_a_hybrid_mesh_is_killed(me: Rank) -> None:
    mesh = dist.init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    run = Training(me, shard(Net(), mesh=mesh))
    run.steps(2)
    if me.diverges():
        kill_at(run, signal.SIGKILL)
    run.go_on()
