"""Who takes part, and how each of them is built from the same model.

A builder makes its model on the meta device and shards it there, so the full fp32 model never
exists on the device. Compiled, every block is, before it is sharded. The sharded contestants keep their shards in the master dtype and compute in
the compute dtype; the unsharded one has its weights in the compute dtype, so all of them run the
same kernels.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.transformer import Block, CutBlock, Shape, Transformer, initialise, local_tensor

__all__ = [
    "BUILDERS",
    "OPTIMIZERS",
    "RIVALS",
    "Contestant",
    "Precision",
    "Setting",
    "Unavailable",
    "adamw",
    "build",
    "join_fake_group",
    "plain_shards",
]

Precision = Literal["fp32", "bf16"]
DTYPES: Mapping[Precision, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16}
)


class Unavailable(Exception):
    """A contestant does not exist or cannot run here; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all contestants of one comparison have in common."""

    shape: Shape
    device: torch.device
    world: int
    precision: Precision
    """Dtype of the computation."""
    master: Precision
    """Dtype of the sharded contestants' shards."""
    compiler: str | None = None
    """Backend of torch.compile for the blocks; None: they are not compiled."""

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"world must be at least 1, got {self.world}.")
        if self.precision == "fp32" and self.master == "bf16":
            raise ValueError("bf16 masters need bf16 computation, but precision is fp32.")

    @property
    def mixed_precision(self) -> dict[str, Any]:
        """Keyword arguments of either torch's or fullshard's mixed precision policy."""
        if self.precision == "fp32":
            return {}
        return {"param_dtype": DTYPES[self.precision], "reduce_dtype": torch.float32}

    def mesh(self) -> DeviceMesh:
        """The first `world` ranks; the default group may have more."""
        return DeviceMesh(self.device.type, torch.arange(self.world))

    @property
    def described(self) -> str:
        """The dtypes and the compiler in words, for the head of the table."""
        compiled = "" if self.compiler is None else f"; blocks compiled by {self.compiler}"
        if self.precision == "fp32":
            return f"fp32 throughout{compiled}"
        return (
            f"sharded: {self.master} shards, {self.precision} compute, fp32 reduction; "
            f"unsharded: {self.precision} weights{compiled}"
        )

    def meta_model(self, dtype: torch.dtype) -> Transformer:
        """Make the model without memory."""
        with torch.device("meta"):
            model = Transformer(self.shape).to(dtype)
        if self.compiler is not None:
            for block in model.blocks:
                block.compile(backend=self.compiler)  # at its first call, then for all alike
        return model


def join_fake_group(world: int) -> None:
    """Become rank 0 of a group whose other ranks do not exist.

    Its collectives repeat rank 0's piece for everyone: the bytes move, the values mean nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def build_unsharded(setting: Setting) -> nn.Module:
    """Build the model as one process would have it."""
    model = setting.meta_model(DTYPES[setting.precision]).to_empty(device=setting.device)
    initialise(model)
    return model


def build_functional(module_name: str, setting: Setting, **options: Any) -> nn.Module:
    """Build with `module_name`'s `fully_shard`: every block a group, the rest in the root's."""
    try:
        library: Any = importlib.import_module(module_name)
        fully_shard, policy = library.fully_shard, library.MixedPrecisionPolicy
    except (ImportError, AttributeError) as error:
        raise Unavailable(str(error)) from error
    mesh = setting.mesh()
    mp_policy = policy(**setting.mixed_precision)
    model = setting.meta_model(DTYPES[setting.master])
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=mp_policy, **options)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy, **options)
    model.to_empty(device=setting.device)
    initialise(model)
    return model


def build_fsdp2(setting: Setting) -> nn.Module:
    """Build with torch's `fully_shard`."""
    return build_functional("torch.distributed.fsdp", setting)


def build_fullshard(setting: Setting) -> nn.Module:
    """Build with fullshard's `fully_shard`, by the same calls as torch's."""
    return build_functional("fullshard", setting)


def build_wrapped(module_name: str, setting: Setting, *, flat: bool, **options: Any) -> nn.Module:
    """Build with `module_name`'s wrapper class: every block a flat array, of one parameter or of all."""
    library: Any = importlib.import_module(module_name)
    wrap: Any = importlib.import_module(f"{module_name}.wrap")

    def materialise(module: nn.Module) -> None:
        module.to_empty(device=setting.device, recurse=False)
        initialise(module, recurse=False)

    try:
        wrapped: nn.Module = library.FullyShardedDataParallel(
            setting.meta_model(DTYPES[setting.master]),
            process_group=setting.mesh().get_group(),
            auto_wrap_policy=wrap.ModuleWrapPolicy({Block, CutBlock}),
            mixed_precision=library.MixedPrecision(**setting.mixed_precision),
            param_init_fn=materialise,
            device_id=setting.device,
            use_orig_params=not flat,
            **options,
        )
    except RuntimeError as error:
        if setting.device.type == "cuda":
            raise
        # Written for accelerators; some versions of torch let it run on the CPU when told to.
        raise Unavailable(f"{module_name}'s wrapper refuses the CPU: {error}") from error
    return wrapped


BUILDERS: Mapping[str, Callable[[Setting], nn.Module]] = MappingProxyType(
    {
        "unsharded": build_unsharded,
        "fsdp2": build_fsdp2,
        "fullshard": build_fullshard,
        "fused": partial(build_functional, "fullshard", fuse_gradients=True),
        "unmet": build_fullshard,
        "fsdp1": partial(build_wrapped, "torch.distributed.fsdp", flat=False),
        "wrapper": partial(build_wrapped, "fullshard", flat=False),
        "wrapper-fused": partial(build_wrapped, "fullshard", flat=False, fuse_gradients=True),
        "fsdp1-flat": partial(build_wrapped, "torch.distributed.fsdp", flat=True),
        "wrapper-flat": partial(build_wrapped, "fullshard", flat=True),
    }
)
"""`fused` and `wrapper-fused` have gradients written once. `unmet` is fullshard without the meetings of ranks before each collective (`gloo_step.py`). `fsdp1` and `wrapper` have ``use_orig_params=True``, the flat ones a `FlatParameter` per block."""

RIVALS: Mapping[str, str] = MappingProxyType(
    {
        "fullshard": "fsdp2",
        "unmet": "fullshard",
        "fsdp1": "fsdp1",
        "wrapper": "fsdp1",
        "wrapper-fused": "fsdp1",
        "fsdp1-flat": "fsdp1-flat",
        "wrapper-flat": "fsdp1-flat",
    }
)
"""Whom of torch's each is compared with; FSDP2 where nothing is said."""


LEARNING_RATE = 1e-5


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make torch's optimizer, as for a model in one process."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=True)


def adamw_over_shards(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the same over whole ranges of the shards."""
    optim: Any = importlib.import_module("fullshard.optim")
    over_shards: torch.optim.Optimizer = optim.ShardedOptimizer(
        torch.optim.AdamW, parameters, lr=LEARNING_RATE, foreach=True
    )
    return over_shards


OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = (
    MappingProxyType({"fullshard": adamw_over_shards, "fused": adamw_over_shards})
)
"""Whose users make AdamW in another way, by contestant; everybody else has torch's."""


class Contestant:
    """One built model with its batch; lives as long as its weights are on the device."""

    def __init__(self, name: str, model: nn.Module, setting: Setting) -> None:
        self.name = name
        self.model = model
        size = (setting.shape.batch, setting.shape.context)
        self.tokens = torch.randint(setting.shape.vocab, size, device=setting.device)
        self.targets = torch.randint(setting.shape.vocab, size, device=setting.device).flatten()
        self._optimizer: torch.optim.Optimizer | None = None
        self._torch_optimizer: torch.optim.Optimizer | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW over its parameters, made at first use: its state is no part of the memory of a step."""
        if self._optimizer is None:
            self._optimizer = OPTIMIZERS.get(self.name, adamw)(self.model.parameters())
        return self._optimizer

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """AdamW of torch over its parameters, where users may have another one; made at first use."""
        if self.name not in OPTIMIZERS:
            return self.optimizer
        if self._torch_optimizer is None:
            self._torch_optimizer = adamw(self.model.parameters())
        return self._torch_optimizer

    def forward_backward(self) -> Tensor:
        """Run what is timed, and return the loss."""
        loss = F.cross_entropy(self.model(self.tokens).flatten(0, 1), self.targets)
        torch.autograd.backward(loss)
        return loss

    def zero_grad(self) -> None:
        """Drop the gradients, so that the next backward makes new ones."""
        self.model.zero_grad(set_to_none=True)

    def check(self) -> None:
        """Run one step, and raise unless it did what a training step has to do.

        Gradients are checked for presence and shape, not for values: the fake group makes them up.
        """
        self.zero_grad()
        loss = self.forward_backward()
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss must be finite, got {loss.item()}")
        wrong = []
        for name, parameter in self.model.named_parameters():
            piece, grad = local_tensor(parameter), parameter.grad
            if not parameter.requires_grad or piece.numel() == 0:
                continue  # FSDP1 gives no gradient to a parameter of which this rank holds nothing
            if grad is None:
                wrong.append(f"{name} has none")
            elif (grad.shape, local_tensor(grad).shape) != (parameter.shape, piece.shape):
                wrong.append(f"{name} {tuple(parameter.shape)} has {tuple(grad.shape)}")
        if wrong:
            raise RuntimeError(f"every parameter needs a gradient of its shape; {'; '.join(wrong)}")

    @torch.no_grad()
    def fill_gradients(self) -> None:
        """Put small random values in place of whatever the fake group left in the gradients.

        Before: after a backward. Garbage could be NaN, which would reach the weights with the next
        optimizer step and the loss with the next forward.
        """
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                local_tensor(parameter.grad).normal_(std=1e-3)


def build(name: str, setting: Setting) -> Contestant:
    """Build a contestant by its name."""
    return Contestant(name, BUILDERS[name](setting), setting)


def plain_shards(setting: Setting) -> list[nn.Parameter]:
    """Make plain tensors of rank 0's shard shapes, with gradients: an optimizer's best case."""
    shards = []
    for parameter in setting.meta_model(DTYPES[setting.master]).parameters():
        rows, *rest = parameter.shape
        size = (-(-rows // setting.world), *rest)
        piece = torch.empty(size, dtype=parameter.dtype, device=setting.device).normal_(std=0.02)
        shards.append(nn.Parameter(piece))
        shards[-1].grad = torch.empty_like(piece).normal_(std=1e-3)
    return shards
