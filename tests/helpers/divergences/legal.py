"""Differences between ranks that are legal, and must not be taken for a divergence."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist

from fullshard import FullyShardedDataParallel, StateDictType
from tests.helpers.divergences import WRAPPER, Net, Training, kind, wrap
from tests.helpers.rank_programs import Rank

SLOW_S = 8.0
"""Longer than the patience, and a round after it."""
LOCKED_S = 17.0
"""Longer than the patience and a round that waits for a silent rank: two seconds more than a divergence may take."""


@kind(legal=True)
def a_rank_is_slow_between_two_steps(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        time.sleep(SLOW_S)
    run.go_on()


@kind(legal=True, odd=0)
def a_rank_is_slow_to_build_its_model(me: Rank) -> None:
    if me.diverges():
        time.sleep(SLOW_S)
    Training(me).go_on()


@kind(legal=True, api=WRAPPER)
def a_rank_is_slow_in_a_layer(me: Rank) -> None:
    run = Training(me, wrap(Net()))
    run.steps(2)
    if me.diverges():
        run.net.branch.register_forward_hook(lambda *_: time.sleep(SLOW_S * 0.75))
    run.net.takes_branch = True
    run.steps(2)
    run.end()


@kind(legal=True, is_apart=True)
def a_rank_in_a_container_holds_the_interpreter_lock(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        ctypes.PyDLL(None).usleep(int(LOCKED_S * 1e6))
    run.go_on()


@kind(legal=True, resumed_after_s=1)
def a_rank_is_paused_and_resumed(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        os.kill(os.getpid(), signal.SIGSTOP)
    run.go_on()


@kind(legal=True)
def a_rank_has_longer_sequences(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    for step in range(5):
        run.steps(1, rows=5 + step if me.diverges() else 2)
    run.end()


@kind(legal=True)
def a_rank_ends_while_others_work_on(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if not me.diverges():
        time.sleep(6)


@kind(legal=True)
def a_rank_evaluates_without_the_model(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        torch.linalg.svd(torch.randn(50, 50))
        (me.folder / "metrics").write_text("1.0")
    with torch.no_grad():
        run.model(run.batch(rows=3))
    dist.barrier()
    run.go_on()


@kind(legal=True, api=WRAPPER)
def a_wrapped_rank_asks_for_another_kind_of_state_dict(me: Rank) -> None:
    run = Training(me, wrap(Net()))
    run.steps(2)
    full, sharded = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(run.model, full if me.diverges() else sharded):
        run.model.state_dict()
    run.go_on()


class Stop(Exception):
    """Ends a forward early: what a hook has seen is enough."""


@kind(legal=True)
def all_leave_a_forward_by_an_exception_and_one_is_slow_then(me: Rank) -> None:
    run = Training(me)
    run.steps(2)

    def stop(*_: object) -> None:
        raise Stop

    hook = run.net.layers[2].register_forward_pre_hook(stop)
    with torch.no_grad(), contextlib.suppress(Stop):
        run.model(run.batch())
    hook.remove()
    if me.diverges():
        time.sleep(SLOW_S)
    run.go_on()


@kind(legal=True)
def a_rank_waits_for_an_asynchronous_collective_before_others_do(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    work = dist.all_reduce(torch.ones(()), async_op=True)
    if me.diverges():
        work.wait()
    run.steps(1)
    work.wait()
    if me.number == 0:
        dist.recv(torch.ones(()), src=1)
    elif me.number == 1:
        time.sleep(SLOW_S)
        dist.send(torch.ones(()), dst=0)
    run.go_on()
