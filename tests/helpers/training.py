"""One training run, the same for one process, torch's FSDP2 and fullshard, so that they can be compared.

Everything is returned whole (gathered), on every rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.helpers.models import Decoder, ModelOptions, make_decoder, tokens_for
from tests.helpers.rank_worker import tensor_of, to_bytes

ONE_PROCESS, TORCH, FULLSHARD = "one process", "torch", "fullshard"

needs_torch_2_13 = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="compares with what torch's FSDP2 can since 2.13"
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What to train and how; a value, so that it travels to the ranks."""

    model: ModelOptions = field(default_factory=ModelOptions)
    steps: int = 2
    microbatches: int = 1
    """Backwards per optimizer step; gradients are reduced in the last one only."""
    sync_every_microbatch: bool = False
    master_dtype: torch.dtype | None = None
    """What the model is cast to before it is sharded, and so what rests and is optimized."""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    """Only fullshard has it."""
    replicas: int = 1
    """More than one: HSDP."""
    reshard_after_forward: bool | int | None = None
    keep_between_microbatches: bool = False
    group_blocks: bool = True
    """A group per block, or one for everything."""
    optimizer: str = "AdamW"
    clip: float | None = None
    batch_per_rank: int = 2


@dataclass
class Record:
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the last step."""
    params: dict[str, Tensor] = field(default_factory=dict)


def shard(model: Decoder, api: str, run: Run, **kwargs: Any) -> Decoder:
    """Apply `fully_shard` of torch or of fullshard as the run says."""
    library = importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")
    fully_shard, policy = library.fully_shard, library.MixedPrecisionPolicy
    world = dist.get_world_size()
    if run.replicas > 1:
        shape = (run.replicas, world // run.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    wire = {"wire_dtype": run.wire_dtype} if api == FULLSHARD else {}
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy(run.param_dtype, run.reduce_dtype, **wire),
        "reshard_after_forward": run.reshard_after_forward,
        **kwargs,
    }
    if run.group_blocks:
        for block in model.blocks:
            fully_shard(block, **options)
    return fully_shard(model, **options)


def train(api: str, run: Run, world_size: int = 1) -> Record:
    """Train on the ranks of the default group, or in one process on the batch of ``world_size`` ranks."""
    model = make_decoder(run.model).to(run.master_dtype)
    if api != ONE_PROCESS:
        shard(model, api, run)
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = ShardOptimizer(run.optimizer, trainable)
    record = Record()
    for step in range(run.steps):
        record.losses.append(_step(model, run, step, world_size if api == ONE_PROCESS else None))
        if run.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(trainable, run.clip)
            record.losses.append(float(whole(norm)))
        if step == run.steps - 1:
            record.gradients = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    record.params = weights(model)
    return record


class ShardOptimizer:
    """AdamW or SGD, of this rank's shards: with DTensors, planning their operations takes as long as a step.

    Tests of optimizers of DTensors are in tests/fsdp2.
    """

    def __init__(self, name: str, params: list[nn.Parameter], lr: float = 1e-2) -> None:
        self._params = params
        self._shards = [nn.Parameter(_shard_of(param)) for param in params]
        self._optimizer: torch.optim.Optimizer
        if name == "AdamW":
            self._optimizer = torch.optim.AdamW(self._shards, lr=lr, fused=True)
        else:
            assert name == "SGD"
            self._optimizer = torch.optim.SGD(self._shards, lr=lr, foreach=True)

    def step(self) -> None:
        for param, shard in zip(self._params, self._shards, strict=True):
            assert _shard_of(param).data_ptr() == shard.data_ptr(), "the parameter has moved"
            shard.grad = None if param.grad is None else _shard_of(param.grad)
        self._optimizer.step()

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


@torch.no_grad()
def _shard_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _step(model: Any, run: Run, step: int, whole_batch_of: int | None) -> float:
    """All microbatches of one optimizer step; returns the loss over the global batch."""
    if whole_batch_of is not None:
        loss = model(tokens_for(step, run.batch_per_rank * run.microbatches * whole_batch_of))
        loss.backward()
        return float(loss.detach())
    total = forward_and_backward(model, run, step)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def forward_and_backward(model: Any, run: Run, step: int) -> Tensor:
    """All microbatches of one step on this rank; returns its loss."""
    rows = run.batch_per_rank * run.microbatches
    batch = mine(tokens_for(step, rows * dist.get_world_size()))
    total = torch.zeros(())
    for index, microbatch in enumerate(batch.chunk(run.microbatches)):
        last = index == run.microbatches - 1
        model.set_requires_gradient_sync(last or run.sync_every_microbatch)
        if run.keep_between_microbatches:
            model.set_reshard_after_backward(last)
        loss = model(microbatch) / run.microbatches
        loss.backward()
        total += loss.detach()
    return total


def of_both(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What ``function`` returns for fullshard and for torch, in one job: DTensor plans for it once.

    Not for functions that make DTensors of their own and shard them: the second library would get
    them on the first one's mesh, which DTensor remembers because it is equal.
    """
    results = []
    for api in (FULLSHARD, TORCH):
        torch.manual_seed(0)
        results.append(function(api, *args, **kwargs))
    ours, theirs = results
    return ours, theirs


def whole(tensor: Any) -> Tensor:
    """A tensor gathered from its shards, cut loose from everything."""
    return all_whole({"it": tensor})["it"]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole."""
    return all_whole(dict(model.named_parameters()))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """All gradients, whole."""
    return all_whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@torch.no_grad()
def all_whole(tensors: dict[Any, Any]) -> dict[Any, Tensor]:
    """Like `whole`, for many.

    There is one exchange per group of ranks: DTensor's several operations per tensor took a third of the time of tests.
    """
    found = {}
    parts: dict[dist.ProcessGroup, dict[Any, Tensor]] = {}
    for name, tensor in tensors.items():
        cut = _the_cut(tensor)
        if cut is None:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = full.detach().clone()
        else:
            parts.setdefault(tensor.device_mesh.get_group(cut), {})[name] = tensor.to_local()
    for group, mine in parts.items():
        by_rank: list[list[tuple[torch.Size, bytes]]] = [[]] * group.size()
        # As bytes: torch takes half a millisecond to pickle a tensor.
        sent = [(each.shape, to_bytes(each)) for each in mine.values()]
        dist.all_gather_object(by_rank, sent, group=group)
        for name, of_ranks in zip(mine, zip(*by_rank, strict=True), strict=True):
            tensor = tensors[name]
            shards = [tensor_of(data, tensor.dtype, shape) for shape, data in of_ranks]
            full = torch.cat(shards, tensor.placements[_the_cut(tensor)].dim)
            assert full.shape == tensor.shape
            found[name] = full.to(tensor.device)
    return {name: found[name] for name in tensors}


def _the_cut(tensor: Any) -> int | None:
    """The dimension of the mesh along which a DTensor is cut; None if it is not cut plainly along one only."""
    if type(tensor) is not DTensor or type(tensor.to_local()) is not Tensor:
        return None
    cut = [dim for dim, each in enumerate(tensor.placements) if not isinstance(each, Replicate)]
    return cut[0] if len(cut) == 1 and type(tensor.placements[cut[0]]) is Shard else None


def mine(batch: Tensor) -> Tensor:
    """This rank's rows of a global batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def batch_of(step: int) -> Tensor:
    """A global batch with two rows for every rank."""
    return tokens_for(step, 2 * dist.get_world_size())
