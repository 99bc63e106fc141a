"""The training loop on real ranks: the same run, whatever the number of ranks."""

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard.train import built_in
from fullshard.train.loop import build_model, learning_rate, train
from fullshard.train.model import Decoder, DecoderShape
from fullshard.train.options import TrainOptions
from fullshard.train.progress import Silence
from fullshard.train.result import TrainResult
from fullshard.train.text import Text
from fullshard.train.weights import fill
from tests.helpers.compare import assert_equal
from tests.helpers.ranks import World

MakeWorld = Callable[[int], World]

# The width makes uneven shapes: 3 ranks cannot share its 20 rows evenly.
OPTIONS = TrainOptions(steps=8, batch=6, context=16, layers=2, width=20, heads=2, lr=1e-2)


def some_text() -> Text:
    draw = random.Random(0)
    words = [b"for ", b"in ", b"range(", b"x", b"):\n", b"    ", b"return ", b"if "]
    content = b"".join(draw.choices(words, k=2000))
    return Text(source="a test", training=content[:-500], held_out=content[-500:])


def starting_weights(options: TrainOptions, world: int) -> dict[str, torch.Tensor]:
    model = build_model(options, init_device_mesh("cpu", (world,)))
    weights = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        weights[name] = parameter.full_tensor().detach()
    return weights


def run(options: TrainOptions) -> TrainResult:
    return train(options, some_text(), device=torch.device("cpu"), watcher=Silence())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_starting_weights_do_not_depend_on_the_number_of_ranks(world: MakeWorld, size: int) -> None:
    shape = DecoderShape(layers=OPTIONS.layers, width=OPTIONS.width, heads=OPTIONS.heads)
    model = Decoder(shape)
    fill(model, built_in.starting_weights(shape, seed=OPTIONS.seed))
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for weights in world(size).run(starting_weights, OPTIONS, size):
        assert_equal(weights, expected)


def test_losses_do_not_depend_on_the_number_of_ranks(world: MakeWorld) -> None:
    [one] = world(1).run(run, OPTIONS)
    for size in (2, 3):
        share = dataclasses.replace(OPTIONS, batch=OPTIONS.batch // size)
        for result in world(size).run(run, share):
            assert result.losses == pytest.approx(one.losses, rel=1e-4)
            assert result.held_out_before == pytest.approx(one.held_out_before, rel=1e-4)
            assert result.held_out_after == pytest.approx(one.held_out_after, rel=1e-4)


def test_training_lowers_the_loss_and_counts_what_it_did(world: MakeWorld) -> None:
    for result in world(2).run(run, OPTIONS):
        assert len(result.losses) == 8
        assert result.losses[-1] < result.losses[0] - 1
        assert result.held_out_after < result.held_out_before - 1
        assert result.tokens == 8 * 2 * 6 * 16
        assert result.facts.ranks == 2


def test_ranks_hold_all_parameters_between_them_and_none_twice(world: MakeWorld) -> None:
    for result in world(3).run(run, OPTIONS):
        assert sum(result.rank_bytes) == result.unsharded_bytes == 4 * result.facts.parameters
        assert result.rank_bytes[0] < 0.4 * result.unsharded_bytes


def test_bf16_stays_close_to_fp32(world: MakeWorld) -> None:
    [exact, _] = world(2).run(run, OPTIONS)
    [rounded, _] = world(2).run(run, dataclasses.replace(OPTIONS, precision="bf16"))
    assert rounded.losses != exact.losses
    assert rounded.losses == pytest.approx(exact.losses, rel=0.05)
    assert rounded.rank_bytes == exact.rank_bytes, "parameters at rest stay in float32"


def test_the_learning_rate_warms_up_then_falls_to_a_tenth() -> None:
    options = TrainOptions(steps=100, lr=1.0)
    rates = [learning_rate(step, options) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert 0.1 < rates[-1] < 0.11


def test_a_single_step_has_a_learning_rate() -> None:
    assert learning_rate(0, TrainOptions(steps=1, lr=1.0)) == 1.0
