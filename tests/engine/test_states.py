"""Which parameters are sharded when: the same as with torch, at every hook a user can register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from tests.helpers.models import Decoder, make_decoder
from tests.helpers.training import FULLSHARD, TORCH, Run, batch_of, mine, shard

Row = tuple[str, str]
"""An event, and a letter per group, the root's last: s(harded) or u(nsharded)."""


class Table:
    """What is sharded, noted at every event of interest."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.rows: list[Row] = []

    def note(self, event: str) -> None:
        probes = [*(block.up.weight for block in self.model.blocks), self.model.head.weight]
        sharded_params = "".join("s" if isinstance(probe, DTensor) else "u" for probe in probes)
        self.rows.append((event, sharded_params))

    def noting(self, event: str) -> Callable[..., None]:
        """A hook of any kind."""
        return lambda *_: self.note(event)

    def watch_modules(self, when: str) -> None:
        """Hooks around forward, before or after sharding: inside or outside of the library's own."""
        for name, module in self._modules():
            module.register_forward_pre_hook(self.noting(f"{name} begins ({when})"))
            module.register_forward_hook(self.noting(f"{name} ends ({when})"))

    def watch_backward(self) -> None:
        """Hooks around backward: of modules, of their outputs, of the parameters seen in forward."""
        for name, module in self._modules():
            module.register_full_backward_pre_hook(self.noting(f"{name} backward begins"))
            module.register_full_backward_hook(self.noting(f"{name} backward ends"))
            module.register_forward_hook(self._watch_tensors(name))
        for name, module in self._modules()[1:]:
            module.register_forward_pre_hook(self._watch_parameter(name))

    def _modules(self) -> list[tuple[str, Any]]:
        blocks = [(f"block {index}", block) for index, block in enumerate(self.model.blocks)]
        return [("model", self.model), *blocks]

    def _watch_tensors(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(self.noting(f"gradient of the output of {name}"))

        return hook

    def _watch_parameter(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            if not torch.is_grad_enabled():
                return
            handles: list[RemovableHandle] = []

            def note_once(gradient: Tensor) -> None:  # the parameter is the same in every step
                self.note(f"gradient of a weight of {name}")
                handles.pop().remove()

            handles.append(module.up.weight.register_hook(note_once))

        return hook


Program = Callable[[Any, Table], None]


def states(api: str, program: Program, reshard_after_forward: bool | None) -> list[Row]:
    model = make_decoder()
    table = Table(model)
    table.watch_modules("inside")
    shard(model, api, Run(reshard_after_forward=reshard_after_forward))
    table.watch_modules("outside")
    table.watch_backward()
    program(model, table)
    return table.rows


def three_steps(model: Any, table: Table) -> None:
    for step in range(3):
        loss = model(mine(batch_of(step)))
        table.note("between")
        loss.backward()
        table.note("after")


def unshard_between_steps(model: Any, table: Table) -> None:
    three_steps(model, table)
    handle = model.blocks[2].unshard(async_op=True)
    table.note("issued")
    handle.wait()
    table.note("waited for")
    model.blocks[2].reshard()
    table.note("sharded")
    model.blocks[0].unshard()
    model.unshard()
    table.note("unsharded")
    three_steps(model, table)


def unshard_before_the_first_forward(model: Any, table: Table) -> None:
    model.blocks[1].unshard()
    model.unshard()
    table.note("unsharded")
    three_steps(model, table)


def accumulate(model: Any, table: Table) -> None:
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model(mine(batch_of(step))).backward()
        table.note("after")


def two_forwards(model: Any, table: Table) -> None:
    losses = [model(mine(batch_of(step))) for step in range(2)]
    table.note("between")
    for loss in losses:
        loss.backward()
        table.note("after")


def change_after_forward(model: Any, table: Table) -> None:
    three_steps(model, table)
    model.blocks[1].set_reshard_after_forward(False)
    three_steps(model, table)
    model.set_reshard_after_forward(True)
    three_steps(model, table)


def keep_after_backward(model: Any, table: Table) -> None:
    model.set_reshard_after_backward(False)
    three_steps(model, table)


def evaluate_and_train(model: Any, table: Table) -> None:
    with torch.no_grad():
        model(mine(batch_of(0)))
    table.note("evaluated")
    three_steps(model, table)


PROGRAMS = {
    program.__name__: program
    for program in (
        unshard_before_the_first_forward,
        unshard_between_steps,
        accumulate,
        two_forwards,
        change_after_forward,
    )
}


def on_any_rank(world: Any, *args: Any) -> list[Row]:
    rows = world(2).run(states, *args)
    assert rows[0] == rows[1]
    return rows[0]


def released_by_the_next(rows: list[Row]) -> list[Row]:
    """Torch's rows as ours are to be: a block is released by the hook on the output of the one before.

    A full backward pre-hook runs before that hook, and so it still sees what was unsharded before.
    """
    result: list[Row] = []
    for event, sharded_params in rows:
        result.append(
            (event, result[-1][1] if event.endswith("backward begins") else sharded_params)
        )
    return result


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_parameters_are_sharded_when_torch_s_are(
    world, program: Program, reshard_after_forward: bool | None
) -> None:
    ours = on_any_rank(world, FULLSHARD, program, reshard_after_forward)
    theirs = on_any_rank(world, TORCH, program, reshard_after_forward)
    assert ours == released_by_the_next(theirs)


# --- where torch's are not, on purpose ---------------------------------------------------------------


def kept_and_evaluated(reshard_after_forward: bool | None) -> list[list[Row]]:
    programs = (three_steps, keep_after_backward, evaluate_and_train)
    return [states(FULLSHARD, program, reshard_after_forward) for program in programs]


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_what_is_kept_after_backward_or_evaluated_before_shows_its_sharded_face(
    world, reshard_after_forward: bool | None
) -> None:
    for trained, kept, rows in world(2).run(kept_and_evaluated, reshard_after_forward):
        assert kept == trained
        evaluated = rows.index(("evaluated", "ssss"))
        assert rows[evaluated + 1 :] == trained
