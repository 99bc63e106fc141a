"""The program that the ranks of `zoo.py` run: three steps of one small language model, sharded or not.

Whose FSDP it is depends on the rank: `client_ranks.py` has installed fullshard or not. Without FSDP, every rank keeps the
model and the gradients of all ranks are averaged.
"""

import argparse
import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import CustomPolicy

from benchmarks.zoo_models import layers_of, make_batch, small_model
from examples.clients.small_task import Trained

__all__ = ["APIS", "command_line", "train"]

APIS = ("unsharded", "fully_shard", "wrapper")
STEPS = 3
MAX_NORM = 0.5


def command_line() -> argparse.ArgumentParser:
    """Return the options of this program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="the class")
    parser.add_argument("--api", choices=APIS, required=True)
    parser.add_argument("--real-life", action="store_true")
    parser.add_argument("--compile", action="store_true")
    return parser


def train(options: argparse.Namespace) -> Trained:
    """Train; return the losses of every microbatch, then the gradient norms, and what the weights are in the end."""
    torch._dynamo.reset()
    model: Any = small_model(options.name)
    if options.real_life and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options.compile:
        for layer in layers_of(model):
            layer.compile(backend="aot_eager")
    model = shard(model, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    microbatches = 2 if options.real_life else 1
    losses, norms = [], []
    for step in range(STEPS):
        for microbatch in range(microbatches):
            number = (step * microbatches + microbatch) * dist.get_world_size() + dist.get_rank()
            torch.manual_seed(number)
            with synchronized(model, options.api, microbatch == microbatches - 1):
                outputs = model(**make_batch(number))
                loss = outputs.loss if hasattr(outputs, "loss") else outputs[0]
                (loss / microbatches).backward()
            losses.append(float(loss))
        if options.api == "unsharded":
            average(list(model.parameters()))
        if options.real_life:
            norms.append(clip(model, options.api))
        optimizer.step()
        optimizer.zero_grad()
        if options.real_life:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.999)
    return Trained(losses=losses, checks=norms, saved=[digest(model, options.api)], model=model)


def shard(model: Any, options: argparse.Namespace) -> Any:
    """Shard the layers, and then the model."""
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    layers = layers_of(model)
    if options.api == "fully_shard":
        policy = fsdp.MixedPrecisionPolicy(**(low if options.real_life else {}))  # type: ignore[arg-type]
        for module in (*layers, model):
            fsdp.fully_shard(module, mp_policy=policy)
    elif options.api == "wrapper":
        chosen = {id(layer) for layer in layers}
        return fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen),
            mixed_precision=fsdp.MixedPrecision(**low) if options.real_life else None,  # type: ignore[arg-type]
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    return model


@contextlib.contextmanager
def synchronized(model: Any, api: str, last: bool) -> Iterator[None]:
    """Reduce gradients in the last microbatch only."""
    if api == "fully_shard":
        model.set_requires_gradient_sync(last)
    with model.no_sync() if api == "wrapper" and not last else contextlib.nullcontext():
        yield


def average(params: Sequence[Tensor]) -> None:
    """Average gradients over the ranks; a rank without one, as of an expert that it did not use, counts as zero."""
    anywhere = torch.tensor([param.grad is not None for param in params], dtype=torch.int)
    dist.all_reduce(anywhere)
    for param, number in zip(params, anywhere.tolist(), strict=True):
        if number:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())


def clip(model: Any, api: str) -> float:
    """Clip gradients and return their norm."""
    if api == "wrapper":
        return float(model.clip_grad_norm_(MAX_NORM))
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def digest(model: Any, api: str) -> float:
    """Return a number that depends on every bit of the full parameters."""
    whole = (
        fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False)
        if api == "wrapper"
        else contextlib.nullcontext()
    )
    found = hashlib.sha256()
    with whole, torch.no_grad():
        params = {
            name.replace("_fsdp_wrapped_module.", ""): param
            for name, param in model.named_parameters()
        }
        for name, param in sorted(params.items()):
            full: Any = param.full_tensor() if hasattr(param, "full_tensor") else param
            # A copy: memory that numpy has seen cannot be freed by FSDP.
            copy = full.clone(memory_format=torch.contiguous_format)
            found.update(name.encode() + copy.numpy().tobytes())
    return float(int.from_bytes(found.digest()[:6]))
