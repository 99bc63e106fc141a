"""The decoder by itself: shapes, causality, positions, starting weights."""

import math

import pytest
import torch
import torch.nn.functional as F

from fullshard.programs.train.built_in import starting_weights
from fullshard.programs.train.decoder import Decoder, rotate
from fullshard.programs.train.decoder_shape import DecoderShape
from fullshard.programs.train.weights import fill

SHAPE = DecoderShape(layers=2, width=32, heads=4)


@pytest.fixture
def model() -> Decoder:
    model = Decoder(SHAPE)
    fill(model, starting_weights(SHAPE, seed=0))
    return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (3, 10))


def test_each_position_scores_every_byte(model: Decoder, tokens: torch.Tensor) -> None:
    assert model(tokens).shape == (3, 10, 256)


def test_there_are_no_biases_and_no_buffers(model: Decoder) -> None:
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    assert not list(model.buffers())


def test_a_future_byte_does_not_change_past_scores(model: Decoder, tokens: torch.Tensor) -> None:
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :6], before[:, :6], rtol=0, atol=0)
    assert (after[:, 6:] - before[:, 6:]).abs().amax(dim=-1).min() > 0


def test_the_order_of_past_bytes_matters(model: Decoder, tokens: torch.Tensor) -> None:
    swapped = tokens.clone()
    swapped[:, 0], swapped[:, 1] = tokens[:, 1], tokens[:, 0]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])


def test_rotation_keeps_lengths_and_leaves_the_first_position_alone() -> None:
    x = torch.randn(2, 4, 10, 8)
    turned = rotate(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[..., 0, :], x[..., 0, :], rtol=0, atol=0)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    query = rotate(torch.randn(8).expand(10, 8))
    key = rotate(torch.randn(8).expand(10, 8))
    products = query @ key.T
    for distance in range(-9, 10):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_rotation_keeps_the_dtype() -> None:
    assert rotate(torch.randn(10, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_the_loss_starts_at_that_of_guessing(model: Decoder, tokens: torch.Tensor) -> None:
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


def test_starting_weights_depend_on_the_seed_and_differ_between_layers(model: Decoder) -> None:
    other = Decoder(SHAPE)
    fill(other, starting_weights(SHAPE, seed=1))
    first, second = (block.get_parameter("attention.query.weight") for block in model.blocks)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other.get_parameter("blocks.0.attention.query.weight"))
    assert torch.equal(model.norm.weight, torch.ones(32))
