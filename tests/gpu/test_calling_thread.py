"""Hooks of backward on a GPU run on the thread that calls backward: with a sharded model's graph, and only then."""

from __future__ import annotations

import signal
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard.torch_border import local_of
from tests.gpu.test_streams import WIDTH, make_model
from tests.helpers.fake import fake_world

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reduce_scatter_that_reduces")]


def note_thread(threads: set[int], _: Tensor) -> None:
    threads.add(threading.get_ident())


def threads_of_pass(forward: Any) -> set[int]:
    x = torch.randn(16, WIDTH, device="cuda", requires_grad=True)
    threads: set[int] = set()
    x.register_hook(partial(note_thread, threads))
    y = forward(x)
    y.register_hook(partial(note_thread, threads))
    y.float().sum().backward()
    return threads


def test_backward_of_a_sharded_model_runs_on_the_calling_thread() -> None:
    here = threading.get_ident()
    with fake_world(4):
        model, other = make_model(), nn.Linear(WIDTH, WIDTH, device="cuda")
        for _ in range(2):
            assert threads_of_pass(model) == {here}
        # A reentrant checkpoint around all of the model hides its graph until it is recomputed.
        assert len(threads_of_pass(partial(checkpoint, model, use_reentrant=True))) == 1
        assert here not in threads_of_pass(other)
        for layer in list(model)[1:]:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=True)
        assert threads_of_pass(model) == {here}
        found: list[set[int]] = []
        thread = threading.Thread(target=lambda: found.append(threads_of_pass(model)))
        thread.start()
        thread.join()
        assert found == [{thread.ident}]


def test_a_signal_handler_runs_within_backward_and_the_next_step_is_right() -> None:
    with fake_world(4):
        model = make_model()
        x = torch.randn(16, WIDTH, device="cuda")

        def step() -> list[Tensor]:
            model.zero_grad()
            model(x).float().square().sum().backward()
            return [local_of(param.grad).clone() for param in model.parameters()]

        step()
        expected = step()
        y = model(x)
        y.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            y.float().square().sum().backward()
        with pytest.warns(UserWarning, match="did not finish"):
            found = step()
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, step(), expected))
