"""Private names of torch's FSDP that other programs use: the same answers as torch's, on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate

from fullshard import ConfigurationError
from tests.helpers.compare import assert_equal
from tests.helpers.training import FULLSHARD, TORCH
from tests.helpers.wrapped_nets import TOKENS, Net, library, make_net, wrap

# --- wrappers -------------------------------------------------------------------------------------


def upcast_as_accelerate_does(api: str, *, orig: bool) -> tuple[Any, Tensor]:
    """Wrap a model in bfloat16 and let its shards be float32; returns all answers, and the loss of the second step."""
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    model = wrap(api, make_net().bfloat16(), precision=precision, use_orig_params=orig)
    answers: list[Any] = []
    for wrapper in library(api).FullyShardedDataParallel.fsdp_modules(model):
        flat_param = wrapper._flat_param
        answers += [wrapper._has_params, list(flat_param._fqns), wrapper._handle._orig_param_dtype]
        answers += [flat_param.dtype, flat_param.device, flat_param.requires_grad]
        flat_param.data = flat_param.data.to(torch.float32)
        wrapper._handle._orig_param_dtype = torch.float32
        answers += [wrapper._flat_param.dtype, wrapper._handle._orig_param_dtype]
    params = list(model.named_parameters())
    if (
        api == TORCH and orig
    ):  # its parameters are views of the flat one only after the first forward
        model(TOKENS)
    answers += [(name, getattr(param, "_fsdp_flattened", False)) for name, param in params]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(TOKENS).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    answers += [param.dtype for param in model.parameters()]
    return answers, loss.detach()


def upcasts() -> None:
    ours = [upcast_as_accelerate_does(FULLSHARD, orig=orig) for orig in (False, True)]
    theirs = [upcast_as_accelerate_does(TORCH, orig=orig) for orig in (False, True)]
    assert [answers for answers, _ in ours] == [answers for answers, _ in theirs]
    # After the upcast, torch's first step is lost with use_orig_params=True.
    assert_equal([loss for _, loss in ours], [theirs[0][1]] * 2)
    empty = wrap(FULLSHARD, nn.ReLU(), layers=False)
    assert not empty._has_params and empty._flat_param is None and empty._handle is None


def test_a_wrapper_answers_and_is_upcast_as_torch_s(world) -> None:
    world(2).run(upcasts)


def assigned_dtype() -> None:
    for orig in (False, True):
        model = wrap(FULLSHARD, Net(), use_orig_params=orig)
        expected = [param.detach().half() for param in model.parameters()]
        for wrapper in library(FULLSHARD).FullyShardedDataParallel.fsdp_modules(model):
            wrapper._handle._orig_param_dtype = torch.float16
        assert_equal([param.detach() for param in model.parameters()], expected)
        flat = model.half()._flat_param  # moving a module may make other parameters
        assert flat.dtype == torch.float16 and "norm.weight" in flat._fqns


def test_assigning_the_dtype_of_a_handle_casts_the_shards(world) -> None:
    world(2).run(assigned_dtype)


# --- torch's composable replicate -----------------------------------------------------------------


def small_net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2))


def trained(model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()
        for name, param in model.named_parameters()
    }


def replicated_around_sharded(api: str) -> list[Any]:
    fully_shard = library(api).fully_shard
    around, inside, both = small_net(), small_net(), small_net()
    fully_shard(around[1])
    replicate(around)
    replicate(inside[0])
    fully_shard(inside)
    fully_shard(both)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(both)
    kinds = [[type(param.data).__name__ for param in net.parameters()] for net in (around, inside)]
    return [*kinds, trained(around), trained(inside)]


def replicates() -> None:
    ours, theirs = replicated_around_sharded(FULLSHARD), replicated_around_sharded(TORCH)
    assert ours[:2] == theirs[:2]
    assert_equal(ours[2:], theirs[2:])
    net = replicate(small_net())  # torch's fully_shard silently does nothing here
    with pytest.raises(ConfigurationError, match=r"replicate was applied: .*DDPSequential"):
        library(FULLSHARD).fully_shard(net)


def test_torch_s_replicate_leaves_sharded_modules_alone_and_the_other_way_round(world) -> None:
    world(2).run(replicates)
