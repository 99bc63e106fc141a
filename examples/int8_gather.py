"""Gather weights as int8: a quarter of float32's bytes on the wire, with float32 shards.

    torchrun --nproc-per-node 2 examples/int8_gather.py

trains a small language model twice, with float32 and with int8 gathers, and prints the held-out loss and the bytes that
each rank sends per step. Model, data and loss are those of `fullshard train`.

`Int8Gathered` is a tensor subclass with the all-gather extension of FSDP2. Its shard is ordinary float32 data that the
optimizer updates. Before a gather it is turned into int8 numbers and one scale per row; afterwards every rank computes the
unsharded weight from them, in the compute dtype. So only compute sees rounded weights, and gradients are reduced as usual.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import FSDPModule, fully_shard
from fullshard.comm import DefaultAllGather
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.data import open_data
from fullshard.programs.train.evaluation import held_out_loss, window_losses
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.sampler import Sampler
from fullshard.programs.train.weights import materialise

_aten = torch.ops.aten
_SAME_KIND = {
    _aten.detach.default,
    _aten.clone.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.new_zeros.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}
"""Operators whose result is an `Int8Gathered` again: slicing, copying and moving. All others compute."""


class Int8Gathered(Tensor):
    """A weight that is gathered as int8."""

    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> Int8Gathered:
        return Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self.data_ = data

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8Gathered({self.data_})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the data; wrap the result if it is still a weight."""
        plain_args, plain_kwargs = torch.utils._pytree.tree_map_only(
            cls, lambda weight: weight.data_, (tuple(args), kwargs or {})
        )
        result = func(*plain_args, **plain_kwargs)
        if func in _SAME_KIND:
            return torch.utils._pytree.tree_map_only(Tensor, cls, result)
        is_in_place = func._schema.name.endswith("_") and func._schema.returns
        return args[0] if is_in_place else result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this rank sends: int8 rows and their scales. fullshard pads shards with fewer rows."""
        scales = self.data_.abs().amax(dim=1).clamp_min(1e-12) / 127
        rows = torch.round(self.data_ / scales[:, None]).to(torch.int8)
        return (rows, scales), outer_size

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        outer_size: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Return the unsharded weight from the rows of all ranks, without the padding at the end."""
        rows, scales = (output[: outer_size[0]] for output in outputs)
        if out is not None:
            with torch.no_grad():
                torch.mul(rows, scales[:, None], out=out.data)
            return None
        whole = (rows * scales[:, None]).to(param_dtype)
        return whole, (whole,)


def gather_linear_weights_as_int8(model: nn.Module) -> None:
    """Wrap the weights of all linear layers. Call it before `fully_shard`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Int8Gathered(module.weight.detach().clone()))


class CountingAllGather(DefaultAllGather):
    """An all-gather that counts the bytes this rank sends."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Count and gather."""
        self.nbytes += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


@dataclass(frozen=True)
class Outcome:
    """The result of one training."""

    held_out: float
    """Loss in nats per byte."""
    bytes_per_step: float
    """Sent by one rank in gathers."""


def train(*, int8: bool, steps: int, seed: int = 0) -> Outcome:
    """Train over the ranks of the default process group."""
    config, device = RunConfig(), torch.device("cpu")
    source = open_model(config)
    data = open_data(config, source)
    model = source.build()
    materialise(model, device)
    source.fill(model, seed=seed)
    if int8:
        gather_linear_weights_as_int8(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh, counter = init_device_mesh("cpu", (world,)), CountingAllGather()
    for module in (*source.blocks(model), model):
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(counter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    order, rows = Sampler(len(data.training), seed), config.train.batch // world
    for step in range(steps):
        windows = order.windows(step * config.train.batch + rank * rows, rows)
        window_losses(source, model, data.training.rows(windows)).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    sent = counter.nbytes / steps
    held_out = held_out_loss(source, model, data.held_out, limit=64, rows=rows, device=device)
    return Outcome(held_out, sent)


def main() -> None:
    """Train both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1, help="how many runs of each kind")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    for seed in range(options.seeds):
        for int8 in (False, True):
            outcome = train(int8=int8, steps=options.steps, seed=seed)
            if dist.get_rank() == 0:
                print(
                    f"seed {seed}, {'int8' if int8 else 'float32'} gathers: held-out loss "
                    f"{outcome.held_out:.4f}, {outcome.bytes_per_step / 1e6:.3f} MB sent per step",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
