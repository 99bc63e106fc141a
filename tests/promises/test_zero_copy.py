"""Between the all-gather and the use of a parameter nothing is copied."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard.layout.segments
from fullshard import fully_shard
from fullshard.engine.state import state_of
from tests.helpers.fake import fake_world
from tests.helpers.models import ModelOptions, make_decoder, tokens_for


class TraceRecorder(TorchDispatchMode):
    """Every operator that runs, by name, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def is_copy(name: str) -> bool:
    return any(word in name for word in ("copy", "cat", "clone", "split", "chunk"))


def gathers_and_what_follows(model: nn.Module, inputs: torch.Tensor) -> list[list[str]]:
    """For each all-gather of one forward, the operators between it and the first use of parameters."""
    recorder = TraceRecorder()
    with recorder:
        model(inputs)
    # What is copied right before a gather is what this rank sends.
    names = [
        name
        for name, after in zip(recorder.names, [*recorder.names[1:], ""], strict=True)
        if not ("copy" in name and "gather" in after)
    ]
    positions = [i for i, name in enumerate(names) if "gather" in name]
    users = ("mm", "embedding", "layer_norm")
    following = []
    for position in positions:
        rest = names[position + 1 :]
        until = next(i for i, name in enumerate(rest) if any(user in name for user in users))
        following.append(rest[:until])
    return following


def group_of(module: nn.Module):
    return state_of(module).groups[0]


def test_large_pieces_are_gathered_in_place_by_default() -> None:
    with fake_world(2):
        model = nn.Linear(1024, 1024, bias=False)  # 2 MiB a piece
        fully_shard(model)
        (following,) = gathers_and_what_follows(model, torch.randn(3, 1024))
        assert not any(map(is_copy, following)), following
        assert model.weight.data_ptr() in group_of(model).gathered_addresses


def test_nothing_is_copied_after_a_gather_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0)
    with fake_world(3):
        model = make_decoder(ModelOptions(depth=4))
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        for _ in range(2):  # without and with a forecast
            following = gathers_and_what_follows(model, tokens_for(0, 2))
            assert len(following) >= 4
            assert not any(is_copy(name) for names in following for name in names), following


def test_small_pieces_are_gathered_in_one_message_and_copied_once() -> None:
    with fake_world(3):
        model = make_decoder(ModelOptions(depth=1))
        fully_shard(model)
        recorder = TraceRecorder()
        with recorder:
            model(tokens_for(0, 2))
        assert sum("gather" in name for name in recorder.names) == 1
        assert sum("copy" in name for name in recorder.names) == 2  # in and out


def unsharded_parameters_lie_in_the_gather_storage(in_place: bool) -> None:
    fullshard.layout.segments.IN_PLACE_FROM = 0 if in_place else 1 << 20
    try:
        model = make_decoder(ModelOptions(scalar=True))
        expected = {name: param.detach().clone() for name, param in model.named_parameters()}
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        for module in [*model.blocks, model]:
            module.unshard()
            group = group_of(module)
            for param in group.params:
                whole = param.unsharded_param
                assert whole.is_contiguous()
                if dist.get_world_size() > 1:
                    assert whole.data_ptr() in group.gathered_addresses, param.name
                else:  # which holds everything, and computes with it
                    assert whole.data_ptr() == param.sharded_param.local.data_ptr(), param.name
        for name, param in model.named_parameters():
            assert torch.equal(param, expected[name]), name
        dist.barrier()
    finally:
        fullshard.layout.segments.IN_PLACE_FROM = 1 << 20


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_unsharded_parameters_lie_in_the_gather_storage(
    world, world_size: int, in_place: bool
) -> None:
    world(world_size).run(unsharded_parameters_lie_in_the_gather_storage, in_place)
