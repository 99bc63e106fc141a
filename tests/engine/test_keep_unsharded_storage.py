"""`set_keep_unsharded_storage`: memory of gathered parameters stays, at its address, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fullshard.layout.segments
from fullshard import OptionTypeError, fully_shard
from fullshard.engine.state import state_of
from tests.helpers.compare import assert_equal
from tests.helpers.models import make_decoder
from tests.helpers.training import batch_of, gradients, mine
from tests.helpers.wrapped_nets import library

KEPT = hasattr(library("torch").FSDPModule, "set_keep_unsharded_storage")


def held(model: Any) -> list[int]:
    """Bytes of gathered memory of each module that is sharded."""
    states = (state_of(module) for module in model.modules())
    return [group.held_bytes for state in states if state is not None for group in state.groups]


def sharded(options: dict[str, Any]) -> Any:
    model = make_decoder()
    for module in (*model.blocks, model):
        fully_shard(module, **options)
    return model


def train(model: Any, steps: int) -> tuple[list[Tensor], list[set[int]]]:
    """Losses and gradients of each step, and by parameter the addresses at which it was used."""
    seen: dict[str, set[int]] = {}

    def look(module: Any, _: Any) -> None:
        for name, param in module.named_parameters():
            seen.setdefault(f"{id(module)} {name}", set()).add(param.data_ptr())

    hooks = [block.register_forward_pre_hook(look) for block in model.blocks]
    record: list[Any] = []
    for step in range(steps):
        loss = model(mine(batch_of(step)))
        loss.backward()
        record += [loss.detach(), gradients(model)]
        model.zero_grad()
    for hook in hooks:
        hook.remove()
    return record, list(seen.values())


def keeps(options: dict[str, Any], in_place_from: int) -> None:
    fullshard.layout.segments.IN_PLACE_FROM, usual = (
        in_place_from,
        fullshard.layout.segments.IN_PLACE_FROM,
    )
    try:
        kept, other = sharded(options), sharded(options)
        kept.set_keep_unsharded_storage(True)
        found, addresses = train(kept, 3)
        assert all(len(each) == 1 for each in addresses)
        assert all(held(kept)) and not any(held(other))
        assert_equal(found, train(other, 3)[0])
        kept.blocks[0].set_keep_unsharded_storage(False)
        assert [bool(nbytes) for nbytes in held(kept)].count(False) == 1
        kept.set_keep_unsharded_storage(False)
        assert not any(held(kept))
        assert_equal(train(kept, 2)[0], train(other, 2)[0])
        assert not any(held(kept))
    finally:
        fullshard.layout.segments.IN_PLACE_FROM = usual


BIG = 2**30


@pytest.mark.parametrize(
    ("ranks", "options", "in_place_from"),
    [(2, {}, BIG), (2, {}, 0), (4, {"reshard_after_forward": 2}, BIG)],
    ids=["staged", "in place", "gathered over fewer ranks in backward"],
)
def test_each_gather_finds_its_memory_where_it_was(
    world, ranks: int, options: dict[str, Any], in_place_from: int
) -> None:
    world(ranks).run(keeps, options, in_place_from)


def by_hand(api: str) -> list[Any]:
    """What a user sees of it: how many addresses a weight had, and bytes after each reshard."""
    layer: Any = library(api).fully_shard(torch.nn.Linear(4, 4))
    layer.set_keep_unsharded_storage(True)
    record, addresses = [], set()
    for _ in range(3):
        layer.unshard()
        addresses.add(layer.weight.data_ptr())
        storage = layer.weight.untyped_storage()
        layer.reshard()
        record.append(storage.nbytes() > 0)
    layer.set_keep_unsharded_storage(False)
    layer.unshard()
    layer.reshard()
    return [*record, storage.nbytes(), len(addresses)]


def test_unshard_and_reshard_keep_it_as_with_torch(world) -> None:
    expected = [True, True, True, 0, 1]
    for api in ("fullshard", "torch") if KEPT else ("fullshard",):
        assert world(2).run(by_hand, api) == [expected, expected]


def text() -> None:
    with pytest.raises(OptionTypeError, match="keep must be True or False"):
        sharded({}).set_keep_unsharded_storage("no")


def test_text_is_no_choice(world) -> None:
    world(2).run(text)
