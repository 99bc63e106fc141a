"""Plain parameters that an optimizer updates beside sharded ones: who is told, and who has reduced them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate as replicate_by_ddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fullshard import FullyShardedDataParallel, fully_shard, optim, replicate
from fullshard.engine import plain_params
from tests.helpers.fake import fake_world

Model = Any


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def root_forgotten(**options: Any) -> Model:
    net = Net()
    for layer in net.layers:
        fully_shard(layer, **options)
    return net


def average(param: Tensor) -> None:
    assert param.grad is not None
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


def average_all(params: Iterable[Tensor]) -> None:
    for param in params:
        average(param)


def train(
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[], object] = lambda: None,
    rank: int | None = None,
) -> list[str]:
    """Warnings of three steps, each rank on tokens of its own."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
    rank = dist.get_rank() if rank is None else rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            tokens = torch.arange(3) + step + 2 * rank
            model(tokens % 7).square().sum().backward()
            before_step()
            optimizer.step()
    return [str(each.message) for each in caught if "plain parameters" in str(each.message)]


# --- who is told --------------------------------------------------------------------------------------


def root_not_sharded() -> list[str]:
    return train(root_forgotten())


def root_not_wrapped() -> list[str]:
    net = Net()
    for index in range(2):
        options = {"use_orig_params": index == 0, "device_id": torch.device("cpu")}
        net.layers[index] = FullyShardedDataParallel(net.layers[index], **options)
    return train(net)


def root_not_replicated() -> list[str]:
    net = Net()
    for layer in net.layers:
        replicate(layer)
    return train(net)


def by_our_optimizer() -> list[str]:
    net = root_forgotten()
    return train(net, optim.ShardedOptimizer(torch.optim.AdamW, net.parameters(), lr=0.1))


def after_a_step_without_gradients() -> list[str]:
    net = root_forgotten()
    train(root_forgotten())  # so that hooks are there
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step()
    return train(net, optimizer)


def rows_of_an_embedding() -> list[str]:
    net = root_forgotten()
    net.embed.sparse = True
    net.head.requires_grad_(False)
    return train(net, torch.optim.SGD(net.parameters(), lr=0.1))


FORGOTTEN: dict[Callable[[], list[str]], str] = {
    root_not_sharded: "embed.weight, head.weight, head.bias.",
    root_not_wrapped: "embed.weight, head.weight, head.bias.",
    root_not_replicated: "embed.weight, head.weight, head.bias.",
    by_our_optimizer: "embed.weight, head.weight, head.bias.",
    after_a_step_without_gradients: "embed.weight, head.weight, head.bias.",
    rows_of_an_embedding: "embed.weight.",
}


@pytest.mark.parametrize("run", FORGOTTEN, ids=lambda run: run.__name__)
def test_parameters_that_drift_apart_are_named_once(world, run: Callable[[], list[str]]) -> None:
    for messages in world(2).run(run):
        assert len(messages) == 1, messages
        assert f"has those of one rank: {FORGOTTEN[run]} Call fully_shard" in messages[0]


def of_two_optimizers() -> list[int]:
    return [len(root_not_sharded()) for _ in range(2)]


def test_each_optimizer_is_told(world) -> None:
    assert world(2).run(of_two_optimizers) == [[1, 1], [1, 1]]


# --- who has reduced them, or need not ------------------------------------------------------------------


def all_sharded() -> list[str]:
    net = root_forgotten()
    return train(fully_shard(net))


def by_ddp() -> list[str]:
    net: Any = root_forgotten()
    sharded = [name for name, param in net.named_parameters() if isinstance(param, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, sharded)
    return train(DistributedDataParallel(net))


def by_ddp_in_it() -> list[str]:
    net = root_forgotten()
    net.embed, net.head = DistributedDataParallel(net.embed), DistributedDataParallel(net.head)
    return train(net)


def by_composable_ddp() -> list[str]:
    net = root_forgotten()
    replicate_by_ddp(net.embed)
    replicate_by_ddp(net.head)
    return train(net)


def by_hooks() -> list[str]:
    net = root_forgotten()
    for param in (*net.embed.parameters(), *net.head.parameters()):
        param.register_post_accumulate_grad_hook(average)
    return train(net)


def by_hand() -> list[str]:
    net = root_forgotten()
    plain = [*net.embed.parameters(), *net.head.parameters()]
    return train(net, before_step=lambda: average_all(plain))


def before_an_optimizer_of_ours() -> list[str]:
    net = root_forgotten()
    plain = [*net.embed.parameters(), *net.head.parameters()]
    optimizer = optim.ShardedOptimizer(torch.optim.AdamW, net.parameters(), lr=0.1)
    return train(net, optimizer, lambda: average_all(plain))


def ignored() -> list[str]:
    net = Net()
    plain = {*net.embed.parameters(), *net.head.parameters()}
    for layer in net.layers:
        fully_shard(layer)
    return train(fully_shard(net, ignored_params=plain))


def ignored_modules() -> list[str]:
    net = Net()
    return train(
        FullyShardedDataParallel(
            net,
            ignored_modules=[net.head],
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    )


def frozen() -> list[str]:
    net = root_forgotten()
    net.embed.requires_grad_(False)
    net.head.requires_grad_(False)
    return train(net)


def the_same_batch() -> list[str]:
    return train(root_forgotten(), rank=0)


def another_optimizer() -> list[str]:
    """It updates nothing that is sharded; a discriminator that is a rank's own, say."""
    train(fully_shard(root_forgotten()))
    return train(Net())


def on_one_rank_only() -> list[str]:
    """No rank waits long for one that has no such parameters."""
    net = root_forgotten()
    if dist.get_rank():
        net.embed.requires_grad_(False)
        net.head.requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_params, "_PATIENCE_S", 0.1)
        return train(net)


REDUCED = [
    *(all_sharded, by_ddp, by_ddp_in_it, by_composable_ddp, by_hooks, by_hand),
    *(before_an_optimizer_of_ours, ignored, ignored_modules, frozen, the_same_batch),
    *(another_optimizer, on_one_rank_only),
]


@pytest.mark.parametrize("run", REDUCED, ids=lambda run: run.__name__)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_nothing_is_said_of_parameters_that_are_reduced_or_left_alone(
    world, run: Callable[[], list[str]]
) -> None:
    assert world(2).run(run) == [[], []]


def test_nothing_is_said_on_one_rank(world) -> None:
    assert world(1).run(root_not_sharded) == [[]]
    with fake_world(4):
        assert train(root_forgotten()) == []


def hybrid() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = root_forgotten(mesh=mesh)
    return train(net, rank=dist.get_rank() // 2)  # equal within a row of the mesh


def test_replicas_are_compared_too(world) -> None:
    for messages in world(4).run(hybrid):
        assert len(messages) == 1
