"""An exception may come at any line, as a signal handler's does. After it, the next step is right, and says what was dropped."""

from __future__ import annotations

import linecache
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from tests.helpers.fake import echo_world

WIDTH = 4
STRIDE = 11
"""Of so many lines, one is tried in a run of the tests."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def by_module(model: nn.Sequential) -> nn.Module:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def by_wrapper(model: nn.Sequential) -> nn.Module:
    wrapped = nn.Sequential(*(FullyShardedDataParallel(block) for block in model))
    return FullyShardedDataParallel(wrapped)


APIS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "fully_shard": by_module,
    "FullyShardedDataParallel": by_wrapper,
}


def make_model(api: str) -> nn.Module:
    torch.manual_seed(0)
    return APIS[api](nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3)))


def step(model: nn.Module) -> list[Tensor]:
    """Return all gradients of this rank's shards."""
    model.zero_grad()
    model(torch.ones(2, WIDTH)).square().sum().backward()
    return gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for name, param in model.named_parameters():
        assert param.grad is not None, f"{name} has none"
        found.append(getattr(param.grad, "_local_tensor", param.grad).clone())
    return found


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line of fullshard that is executed from now on."""

    FOLDER = str(Path(fullshard.__file__).parent)

    def __init__(self, line: int) -> None:
        self._left = line
        self.place = ""

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._trace if frame.f_code.co_filename.startswith(self.FOLDER) else None

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not _is_with(frame):
            self._left -= 1
            if not self._left:
                sys.settrace(None)
                self.place = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace


def _is_with(frame: FrameType) -> bool:
    """Python comes to the line of a `with` again to leave it. Signals do not, where the context is torch's own."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ")


def interrupted_forward(model: nn.Module, line: int) -> str:
    with InterruptAt(line) as interrupt:
        model(torch.ones(2, WIDTH))
    return interrupt.place


def interrupted_backward(model: nn.Module, line: int) -> str:
    loss = model(torch.ones(2, WIDTH)).square().sum()
    with InterruptAt(line) as interrupt:
        loss.backward()
    return interrupt.place


@pytest.mark.parametrize("interrupted", [interrupted_forward, interrupted_backward])
@pytest.mark.parametrize("api", APIS)
def test_the_step_after_an_interrupt_at_any_line_is_right(
    api: str, interrupted: Callable[[nn.Module, int], str]
) -> None:
    with echo_world(2):
        model = make_model(api)
        step(model)
        expected = step(model)
        line, tried = 1, 0
        while place := interrupted(model, line):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                found = step(model)
            assert all(map(torch.equal, found, expected)), place
            # Nothing is to be said of the first lines, nor of those after a backward's last.
            assert all("did not finish" in str(each.message) for each in warned), place
            tried += bool(warned)
            line += STRIDE
        assert tried > 400 / STRIDE
        assert all(map(torch.equal, step(model), expected))


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["forward", "backward", "a part's forward", "a part's backward"])
@pytest.mark.parametrize("api", APIS)
def test_after_an_interrupt_in_the_models_code_the_next_pass_is_right(api: str, where: str) -> None:
    """Torch calls no hooks after a KeyboardInterrupt."""
    with echo_world(2):
        model = make_model(api)
        step(model)
        expected = step(model)
        block = next(module for module in model.modules() if isinstance(module, Block))
        if "backward" in where:
            handle = block.down.register_full_backward_pre_hook(interrupt)
        else:
            handle = block.down.register_forward_pre_hook(interrupt)
        called = block if "part" in where else model
        with pytest.raises(KeyboardInterrupt):
            called(torch.ones(2, WIDTH)).sum().backward()
        handle.remove()
        # The wrapper's own forward sees every exception, and cleans up by itself.
        cleaned_up = api == "FullyShardedDataParallel" and where == "forward"
        with nullcontext() if cleaned_up else pytest.warns(UserWarning, match="did not finish"):
            called(torch.ones(2, WIDTH))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = step(model)
        assert all(map(torch.equal, found, expected))


class Recursive(nn.Module):
    """Calls itself, as its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = torch.tanh(self.layer(x))
        return self(x, times - 1) if times else x


def called_directly(wrapper: nn.Module) -> Callable[..., Tensor]:
    """Call the module inside, which gathers, too."""
    return cast(FullyShardedDataParallel, wrapper).module


def compiled(module: nn.Module) -> Callable[..., Tensor]:
    return cast("Callable[..., Tensor]", torch.compile(module, backend="eager"))


@pytest.mark.parametrize(
    ("shard", "called"),
    [
        (fully_shard, lambda module: module),
        (fully_shard, compiled),
        (FullyShardedDataParallel, lambda module: module),
        (FullyShardedDataParallel, called_directly),
    ],
    ids=["fully_shard", "compiled", "wrapper", "wrapped module"],
)
def test_a_model_that_calls_itself_has_not_been_interrupted(shard: Any, called: Any) -> None:
    with echo_world(2):
        torch.manual_seed(0)
        model = shard(Recursive())
        found = []
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*did not finish")
            for _ in range(2):
                model.zero_grad()
                called(model)(torch.ones(2, WIDTH)).sum().backward()
                found.append(gradients(model))
        assert all(map(torch.equal, *found))
