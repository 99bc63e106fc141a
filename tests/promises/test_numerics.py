"""Sharded training computes what one process computes, and what torch's own FSDP2 computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.models import ModelOptions
from tests.helpers.training import FULLSHARD, ONE_PROCESS, TORCH, Record, Run, train

two_blocks = partial(ModelOptions, depth=2)
small = partial(Run, model=two_blocks())

CASES = {
    "plain": small(),
    "one group": small(group_blocks=False),
    "kept after forward": small(reshard_after_forward=False),
    "released after forward, root too": small(reshard_after_forward=True),
    "accumulation": small(microbatches=3),
    "accumulation, reduced every time": small(microbatches=2, sync_every_microbatch=True),
    "accumulation, kept unsharded": small(microbatches=2, keep_between_microbatches=True),
    "reentrant checkpointing": Run(model=two_blocks(checkpointing="reentrant")),
    "non-reentrant checkpointing": Run(model=two_blocks(checkpointing="non_reentrant")),
    "non-reentrant checkpointing and accumulation": Run(
        model=two_blocks(checkpointing="non_reentrant"), microbatches=2
    ),
    "frozen": Run(model=two_blocks(frozen=("up.weight", "norm.bias", "embed.weight"))),
    "frozen, checkpointed": Run(
        model=two_blocks(frozen=("up.weight",), checkpointing="non_reentrant")
    ),
    "frozen block": Run(model=two_blocks(frozen=("blocks.1.up.weight", "embed.weight"))),
    "tied": Run(model=two_blocks(tied=True)),
    "tied, checkpointed": Run(model=two_blocks(tied=True, checkpointing="reentrant")),
    "blocks called twice": Run(model=two_blocks(repeat=2)),
    "blocks called twice, checkpointed": Run(
        model=two_blocks(repeat=2, checkpointing="non_reentrant")
    ),
    "blocks called twice, reentrant": Run(model=two_blocks(repeat=2, checkpointing="reentrant")),
    "clipped, SGD": small(clip=0.5, optimizer="SGD"),
    "deep and narrow": Run(model=ModelOptions(depth=5, width=3, hidden=5)),
}
ZERO_D = {"0-d parameters": Run(model=two_blocks(scalar=True), clip=0.1)}


def train_and_compare(run: Run, expected: Record) -> None:
    record = train(FULLSHARD, run)
    assert_close(record.losses, expected.losses, rtol=1e-5, atol=1e-7)
    assert_close(record.gradients, expected.gradients, rtol=1e-5, atol=1e-6)
    assert_close(record.params, expected.params, rtol=1e-5, atol=1e-6)


def train_both_and_compare(run: Run, bit_for_bit: bool) -> None:
    ours, theirs = train(FULLSHARD, run), train(TORCH, run)
    if bit_for_bit:
        assert_equal([ours.losses, ours.gradients], [theirs.losses, theirs.gradients])
        assert_equal(ours.params, theirs.params)
    else:
        # Over more than two ranks the order of a sum depends on how the data is cut for the wire.
        low = torch.finfo(run.reduce_dtype or run.param_dtype or torch.float32).eps
        assert_close(ours.losses, theirs.losses, rtol=max(1e-5, low), atol=1e-6)
        assert_close(ours.gradients, theirs.gradients, rtol=0.05, atol=max(1e-6, low))
        assert_close(ours.params, theirs.params, rtol=1e-4, atol=max(1e-6, low))


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("plain", 1),
        ("plain", 4),
        ("tied", 3),
        ("frozen", 3),
        ("0-d parameters", 3),
        ("0-d parameters", 4),
    ],
)
def test_training_equals_one_process(world, name: str, world_size: int) -> None:
    _assert_equals_one_process(world, world_size, {**CASES, **ZERO_D}[name])


def test_ten_steps_equal_one_process(world) -> None:
    _assert_equals_one_process(world, 3, small(steps=10))


# On three ranks, of two options that go together, each alone is enough.
ALIKE_ON_THREE_RANKS = (
    "accumulation, reduced every time",
    "non-reentrant checkpointing and accumulation",
    "frozen, checkpointed",
    "frozen block",
    "tied, checkpointed",
    "blocks called twice, checkpointed",
)


@pytest.mark.parametrize(
    "name",
    [name for name in CASES if name not in ("plain", "tied", "frozen", *ALIKE_ON_THREE_RANKS)],
)
def test_three_ranks_equal_one_process_with_every_option(world, name: str) -> None:
    _assert_equals_one_process(world, 3, CASES[name])


# torch 2.13 itself is off from one process here, by 1e-3 in the second loss; ours is not (above).
TORCH_IS_WRONG = ("blocks called twice, reentrant",)


@pytest.mark.parametrize("name", [name for name in CASES if name not in TORCH_IS_WRONG])
def test_two_ranks_equal_torch_to_the_last_bit(world, name: str) -> None:
    world(2).run(train_both_and_compare, CASES[name], True)


MIXED = {
    "bf16": small(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16, reduced in bf16": small(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "bf16, reduced as by default": small(param_dtype=torch.bfloat16),
    "bf16, accumulation": small(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, microbatches=3
    ),
    "bf16, frozen and tied": Run(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        model=two_blocks(frozen=("up.weight",), tied=True),
    ),
    "bf16, reentrant checkpointing": Run(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        model=two_blocks(checkpointing="reentrant"),
    ),
    "bf16, non-reentrant checkpointing": Run(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        model=two_blocks(checkpointing="non_reentrant"),
    ),
    "bf16 masters": small(master_dtype=torch.bfloat16),
    "bf16 masters, reduced in fp32, accumulation": small(
        master_dtype=torch.bfloat16, reduce_dtype=torch.float32, microbatches=3
    ),
    "bf16 masters, fp32 compute": small(
        master_dtype=torch.bfloat16,
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
    ),
    "fp16": small(param_dtype=torch.float16, reduce_dtype=torch.float16),
    "fp16 masters": small(master_dtype=torch.float16, optimizer="SGD"),
    "fp32 compute, bf16 reduced": small(reduce_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_precision_on_two_ranks_equals_torch_to_the_last_bit(world, name: str) -> None:
    world(2).run(train_both_and_compare, MIXED[name], True)


def test_mixed_precision_on_three_ranks_equals_torch(world) -> None:
    world(3).run(train_both_and_compare, MIXED["bf16"], False)
    world(3).run(train_both_and_compare, MIXED["bf16, reduced in bf16"], False)


HSDP = {
    "accumulation": small(replicas=2, microbatches=2),
    "bf16": small(replicas=2, param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "all replicas": small(replicas=4),
}


@pytest.mark.parametrize("name", HSDP)
def test_hsdp_on_four_ranks_equals_torch(world, name: str) -> None:
    bit_for_bit = name != "all replicas"
    world(4).run(train_both_and_compare, HSDP[name], bit_for_bit)


@pytest.mark.parametrize("name", ["accumulation", "all replicas"])
def test_hsdp_on_four_ranks_equals_one_process(world, name: str) -> None:
    _assert_equals_one_process(world, 4, HSDP[name])


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + torch.tanh(self.key(memory)) * self.value(memory)


class Readers(nn.Module):
    """Like a decoder's layers, each reads the encoder's output twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(32, 32)
        self.layers = nn.ModuleList(Reader() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        for layer in self.layers:
            x = layer(x, memory)
        return x


def gradients_of_readers(api: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: Any = Readers()
    if api == "fully_shard":
        for module in (*model.layers, model):
            fullshard.fully_shard(module)
    elif api == "wrapper":
        for number, layer in enumerate(model.layers):
            model.layers[number] = FullyShardedDataParallel(layer, use_orig_params=True)
        model = FullyShardedDataParallel(model, use_orig_params=True)
    model(torch.randn(8, 32)).square().sum().backward()
    gradients = {
        name.replace("_fsdp_wrapped_module.", ""): param.grad
        for name, param in model.named_parameters()
    }
    return {
        name: (each.full_tensor() if api == "fully_shard" else each).flatten()
        for name, each in gradients.items()
    }


# torch's FSDP2 adds up what a layer contributes first, since it puts a node before each layer. Nothing here does.
@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
def test_gradients_of_a_tensor_that_layers_share_are_added_in_the_order_of_one_process(
    world, api: str
) -> None:
    (found,) = world(1).run(gradients_of_readers, api)
    assert_equal(found, gradients_of_readers("one process"))


def _assert_equals_one_process(world, world_size: int, run: Run) -> None:
    expected = train(ONE_PROCESS, run, world_size)
    world(world_size).run(train_and_compare, run, expected)
