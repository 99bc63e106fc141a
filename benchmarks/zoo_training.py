"""The program that the ranks of `zoo.py` run: three steps of one small language model, sharded or not.

Whose FSDP it is depends on the rank: `client_ranks.py` has installed fullshard or not. Without FSDP, every rank keeps the
model, and the gradients of all ranks are averaged. In real life it computes with bf16 copies of its weights, as FSDP does, and
adds up their gradients in float32.
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
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

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
    parser.add_argument(
        "--join-inputs",
        action="store_true",
        help="put a node before each layer, which joins its inputs' gradients, as torch's FSDP2 does",
    )
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
    layers = layers_of(model)
    model = shard(model, layers, options)
    for layer in layers if options.join_inputs else ():
        layer.register_forward_pre_hook(join_inputs, with_kwargs=True)
    unsharded = Unsharded(model, layers, options.real_life) if options.api == "unsharded" else None
    params = unsharded.masters if unsharded else list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3)
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
            if unsharded:
                unsharded.take_gradients()
        if unsharded:
            average(params)
        if options.real_life:
            norms.append(clip(model, params, options.api))
        optimizer.step()
        optimizer.zero_grad()
        if options.real_life:
            with torch.no_grad():
                for param in params:
                    param.mul_(0.999)
        if unsharded:
            unsharded.update()
    return Trained(
        losses=losses, checks=norms, saved=[digest(model, params, options.api)], model=model
    )


def shard(model: Any, layers: Sequence[nn.Module], options: argparse.Namespace) -> Any:
    """Shard the layers, and then the model."""
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
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


class Unsharded:
    """A model without FSDP; in real life, bf16 weights and their float32 masters."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], real_life: bool) -> None:
        self._params = list(model.parameters())
        self.masters: list[Tensor] = list(self._params)
        if real_life:
            self.masters = [param.detach().clone().requires_grad_() for param in self._params]
            for param in self._params:
                param.data = param.data.bfloat16()
            for module in (*layers, model):
                module.register_forward_pre_hook(in_bf16, with_kwargs=True)

    def take_gradients(self) -> None:
        """Add what a backward left to the masters' gradients."""
        for param, master in zip(self._params, self.masters, strict=True):
            if param is not master and param.grad is not None:
                gradient = param.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                param.grad = None

    @torch.no_grad()
    def update(self) -> None:
        """Compute with what the masters are now."""
        for param, master in zip(self._params, self.masters, strict=True):
            if param is not master:
                param.copy_(master)


class Join(torch.autograd.Function):
    """A node that lets all gradients through together."""

    @staticmethod
    def forward(_: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs."""
        return inputs

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients."""
        return gradients


def join_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """Send all inputs that need a gradient through one node."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if places and torch.is_grad_enabled():
        joined = Join.apply(*(leaves[place] for place in places))  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, joined, strict=True):
            leaves[place] = tensor
    return tree_unflatten(leaves, spec)


def in_bf16(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast inputs as FSDP does."""

    def cast(leaf: Any) -> Any:
        floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.bfloat16() if floats else leaf

    return tree_map(cast, (args, kwargs))


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


def clip(model: Any, params: Sequence[Tensor], api: str) -> float:
    """Clip gradients and return their norm."""
    if api == "wrapper":
        return float(model.clip_grad_norm_(MAX_NORM))
    norm: Any = nn.utils.clip_grad_norm_(params, MAX_NORM)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def digest(model: Any, params: Sequence[Tensor], api: str) -> float:
    """Return a number that depends on every bit of the full parameters."""
    names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
    whole = (
        fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False)
        if api == "wrapper"
        else contextlib.nullcontext()
    )
    found = hashlib.sha256()
    with whole, torch.no_grad():
        now = params if api == "unsharded" else list(model.parameters())
        for name, param in sorted(zip(names, now, strict=True), key=lambda pair: pair[0]):
            full: Any = param.full_tensor() if hasattr(param, "full_tensor") else param
            # A copy: memory that numpy has seen cannot be freed by FSDP.
            copy = full.clone(memory_format=torch.contiguous_format)
            found.update(name.encode() + copy.numpy().tobytes())
    return float(int.from_bytes(found.digest()[:6]))
