"""Training with the wrapper, the same for one process, torch's FSDP1 and fullshard, so that they can be compared.

A `Case` says what is built, how it is wrapped and how it is trained. Cases hold functions, so they
stay in their test's module and travel to the ranks by name.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.models import Block, Decoder, ModelOptions, make_decoder, tokens_for
from tests.helpers.training import ONE_PROCESS, TORCH

ROWS = 2
"""Rows of a batch per rank and microbatch."""
CPU = torch.device("cpu")


def library(api: str) -> Any:
    """The public names of one library, with those of its `wrap`."""
    name = "torch.distributed.fsdp" if api == TORCH else "fullshard"
    names = vars(importlib.import_module(f"{name}.wrap"))
    public = importlib.import_module(name)
    return SimpleNamespace(
        **{key: value for key, value in names.items() if not key.startswith("__")},
        **{key: getattr(public, key) for key in WRAPPER_NAMES},
        api=api,
        FSDP=public.FullyShardedDataParallel,
    )


WRAPPER_NAMES = (
    "BackwardPrefetch",
    "CPUOffload",
    "MixedPrecision",
    "ShardingStrategy",
)

Options = Callable[[Any], dict[str, Any]]
"""From a library's names to arguments of its wrapper."""


def wrap_blocks(lib: Any, model: nn.Module, **options: Any) -> nn.Module:
    """Wrap every block, and the whole."""
    policy = lib.ModuleWrapPolicy({Block})
    wrapped: nn.Module = lib.FSDP(
        model, **{"auto_wrap_policy": policy, "device_id": CPU, **options}
    )
    return wrapped


def two_blocks() -> Decoder:
    """Return a decoder that is as small as a case needs: with the root, there are three groups."""
    return make_decoder(ModelOptions(depth=2))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it is wrapped and how it is trained."""

    build: Callable[[], nn.Module] = two_blocks
    batch: Callable[[int, int], Tensor] = tokens_for
    """Inputs of a step with so many rows; the model returns the loss of them."""
    wrap: Callable[..., nn.Module] = wrap_blocks
    options: Options = lambda lib: {}
    steps: int = 2
    microbatches: int = 1
    """Backwards per step, all but the last within `no_sync`."""
    sync_every_microbatch: bool = False
    optimizer: str = "AdamW"
    optimizer_first: bool = False
    """Build the optimizer before wrapping."""
    clip: tuple[float, float] | None = None
    """Maximum and type of the norm."""
    between: Callable[[Any, nn.Module, int], Any] | None = None
    """Called after every step with the library (or None), the model and the step."""
    low: bool = False
    """Whether anything is computed in low precision."""
    pieces: bool = False
    """Only with use_orig_params=True."""


@dataclass
class Steps:
    """What every step left on this rank: one entry per step."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    params: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    wholes: dict[str, Tensor] = field(default_factory=dict)
    """At the end, whole and by their own names."""


def train(
    api: str, case: Case, world_size: int = 1, *, use_orig_params: bool | None = None
) -> Steps:
    """Train on the ranks of the default group, or in one process on the batches of ``world_size`` ranks."""
    torch.manual_seed(0)
    lib = None if api == ONE_PROCESS else library(api)
    model: Any = case.build()
    first = new_optimizer(case, model) if case.optimizer_first else None
    if lib is not None:
        options = case.options(lib)
        if use_orig_params is not None:
            options["use_orig_params"] = use_orig_params
        model = case.wrap(lib, model, **options)
    optimizer = first or new_optimizer(case, model)
    steps = Steps()
    for step in range(case.steps):
        if lib is None:
            batch = case.batch(step, ROWS * case.microbatches * world_size)
            rows: Any = [batch]
        else:
            batch = case.batch(step, ROWS * case.microbatches * dist.get_world_size())
            rows = batch.chunk(dist.get_world_size())[dist.get_rank()].split(ROWS)
        steps.losses.append(forward_and_backward(model, case, rows, lib))
        if case.clip is not None:
            steps.norms.append(_clip(lib, model, *case.clip))
        steps.gradients.append(named_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        steps.params.append({name: copied(param) for name, param in model.named_parameters()})
        steps.buffers.append({name: copied(buffer) for name, buffer in model.named_buffers()})
        if case.between is not None:
            case.between(lib, model, step)
    steps.wholes = full_params(lib, model)
    return steps


def new_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    result: torch.optim.Optimizer = getattr(torch.optim, case.optimizer)(
        model.parameters(), lr=1e-2
    )
    return result


def forward_and_backward(model: Any, case: Case, rows: list[Tensor], lib: Any) -> Tensor:
    """All microbatches of one optimizer step; returns the losses."""
    losses = []
    for index, microbatch in enumerate(rows):
        last = index == len(rows) - 1
        alone = lib is None or last or case.sync_every_microbatch
        with contextlib.nullcontext() if alone else model.no_sync():
            loss = model(microbatch) / len(rows)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def _clip(lib: Any, model: Any, max_norm: float, norm_type: float) -> Tensor:
    if lib is None:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
    return norm


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: copied(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def full_params(lib: Any, model: nn.Module) -> dict[str, Tensor]:
    """All parameters whole, by the names they have without wrappers."""
    with contextlib.nullcontext() if lib is None else lib.FSDP.summon_full_params(model):
        return {clean(name): copied(param) for name, param in model.named_parameters()}


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")
