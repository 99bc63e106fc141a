"""The parameters and buffers that belong to one `fully_shard` call or wrapper: all below it that no other one has taken."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard import torch_border
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.plain_params import mark_ignored
from fullshard.engine.state import IgnoredParams, state_of
from fullshard.errors import ConfigurationError
from fullshard.layout.names import clean_name, is_wrapper
from fullshard.storage.param import check_can_be_sharded
from fullshard.storage.sharded_params import (
    ParamModuleInfo,
    group_of,
    reads_gradients,
    unsharded_name,
)


@dataclass(frozen=True, slots=True)
class OwnedParam:
    """A parameter that belongs to a call."""

    name: str
    """Its name, relative to the call's module."""
    param: nn.Parameter
    owners: list[ParamModuleInfo]


def has_forward(module: nn.Module) -> bool:
    """Whether a module computes anything itself; containers of torch do not. A forward may be set on the instance."""
    # Looked up without descriptors: that of modules of torch.jit raises an error when it is asked of a class.
    of_class = inspect.getattr_static(type(module), "forward")
    return of_class is not nn.Module.forward or "forward" in vars(module)


def managed_modules(
    modules: Iterable[nn.Module], ignored: Collection[nn.Module] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose parameters belong to a call: the given ones and those below.

    Left out are modules that have a state of their own, and those that torch's `replicate` (DDP) keeps in step.
    """
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str, given: bool) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or module in ignored or (not given and _is_of_others(module)):
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from visit(child, f"{name}.{child_name}" if name else child_name, False)

    for module in modules:
        yield from visit(module, "", True)


def _is_of_others(module: nn.Module) -> bool:
    return state_of(module) is not None or is_replicated_by_ddp(module)


def is_replicated_by_ddp(module: nn.Module) -> bool:
    """Whether `torch.distributed._composable.replicate` keeps a module's parameters equal on all ranks."""
    return state_of(module) is None and "replicate" in torch_border.composable_functions(module)


def owned_params(
    modules: Iterable[tuple[str, nn.Module]], ignored_params: Iterable[nn.Parameter]
) -> list[OwnedParam]:
    """Return the parameters of these modules themselves, each once, with all modules that have it."""
    ignored = {id(param) for param in ignored_params}
    found: dict[int, OwnedParam] = {}
    for prefix, module in modules:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in ignored:
                full_name = f"{prefix}.{name}" if prefix else name
                owned = found.setdefault(id(param), OwnedParam(full_name, param, []))
                owned.owners.append(ParamModuleInfo(module, name))
    return list(found.values())


def params_by_owner(
    groups: Iterable[FSDPParamGroup],
) -> dict[nn.Module, dict[str, tuple[FSDPParamGroup, int]]]:
    """Return the groups' parameters by module and by attribute, each as its group and its index there.

    The attributes may be missing on the modules now: a `FlatParameter` takes their place.
    """
    found: dict[nn.Module, dict[str, tuple[FSDPParamGroup, int]]] = {}
    for group in groups:
        for index, param in enumerate(group.params):
            for owner in param.owners:
                found.setdefault(owner.module, {})[owner.name] = (group, index)
    return found


def ignored_below(
    modules: Iterable[nn.Module],
    ignored_params: Iterable[nn.Parameter],
    ignored_modules: Collection[nn.Module] = (),
) -> IgnoredParams:
    """Return the names of ignored parameters: a user may replace the parameters themselves."""
    modules = tuple(modules)
    replicated = [
        below for each in modules for below in each.modules() if is_replicated_by_ddp(below)
    ]
    ignored_modules = {
        *ignored_modules,
        *(below for each in replicated for below in each.modules()),
    }
    ignored = {id(param) for param in ignored_params}
    found: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
    for each in modules:
        for module in each.modules():
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                if module in ignored_modules or id(param) in ignored:
                    mark_ignored(param)
                    found.setdefault(module, set()).add(name)
    return found


def unmanaged_params(root: nn.Module, ignored: Sequence[IgnoredParams]) -> list[str]:
    """Return the full names of trainable parameters below ``root`` that no group has and nothing is known to reduce.

    Not returned are ignored ones, those below DDP or torch's `replicate`, and those with a hook of the user's on their gradients.
    """
    reduced = {
        below
        for module in root.modules()
        if isinstance(module, nn.parallel.DistributedDataParallel) or is_replicated_by_ddp(module)
        for below in module.modules()
    }
    return [
        clean_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in root.named_modules()
        if module not in reduced
        for name, param in torch_border.parameter_table(module).items()
        if param is not None
        and param.requires_grad
        and not group_of(param)
        and not unsharded_name(param)
        and not reads_gradients(param)
        and not any(name in each.get(module, ()) for each in ignored)
    ]


def names_in_common(root: nn.Module, ignored: Sequence[IgnoredParams]) -> dict[nn.Module, str]:
    """Return the names of all modules by which ranks compare their models: numbers do not count ignored modules.

    A rank may ignore more modules of a list than others, experts of its own for example. What follows in the list has
    other numbers there, and is the same.
    """
    names: dict[nn.Module, str] = {}
    left_out = _wholly_ignored(root, ignored)

    def visit(module: nn.Module, prefix: str, name: str) -> None:
        if module in names:
            return
        full_name = prefix if is_wrapper(name) else ".".join(filter(None, (prefix, name)))
        names[module] = full_name
        num_left_out = 0
        for child_name, child in module.named_children():
            if not child_name.isdecimal():
                visit(child, full_name, child_name)
            elif child in left_out:
                num_left_out += 1
            else:
                visit(child, full_name, str(int(child_name) - num_left_out))

    visit(root, "", "")
    return names


def _wholly_ignored(root: nn.Module, ignored: Sequence[IgnoredParams]) -> set[nn.Module]:
    """Return the modules that have parameters, themselves or below, all of which are ignored."""
    if not any(ignored):
        return set()  # as of most models

    def is_ignored(module: nn.Module) -> bool:
        owned = [
            any(name in each.get(below, ()) for each in ignored)
            for below in module.modules()
            for name in torch_border.parameter_table(below).keys()
        ]
        return bool(owned) and all(owned)

    return {module for module in root.modules() if is_ignored(module)}


BY_ONE_OF_THE_TWO = (
    "A model is sharded by torch's FSDP or by fullshard, not by both. Import fully_shard and FullyShardedDataParallel from "
    "fullshard for all modules, or call fullshard.install() before torch's are imported"
)


def check_not_sharded_by_torch(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse modules that torch's own FSDP has sharded: both would gather and reduce the same parameters."""
    found = [
        name or type(module).__name__
        for name, module in modules
        if torch_border.is_sharded_by_torch(module)
    ]
    if found:
        raise ConfigurationError(
            f"{BY_ONE_OF_THE_TWO}. torch.distributed.fsdp has sharded these modules: {', '.join(found)}."
        )


def check_can_be_owned(found: Sequence[OwnedParam], remedy: str) -> None:
    """Refuse parameters that cannot be sharded, or that another call has; ``remedy`` is about the latter."""
    taken = [f"{each.name} (by {group})" for each in found if (group := group_of(each.param))]
    if taken:
        raise ConfigurationError(
            "A parameter belongs to one group, but these have been sharded before:\n  "
            + "\n  ".join(taken)
            + f"\n{remedy}"
        )
    faults = [fault for each in found if (fault := check_can_be_sharded(each.name, each.param))]
    faults += [
        f"{each.name}: has sparse gradients (sparse=True)" for each in found if _is_sparse(each)
    ]
    if faults:
        raise ConfigurationError(
            "Parameters to be sharded must be strided, floating-point or complex where they are trainable, and have "
            "both methods of the all-gather extension or none; gradients must be dense:\n  "
            + "\n  ".join(faults)
            + "\nFreeze them, or leave them out: ignored_params, or ignored_states of the wrapper."
        )


def _is_sparse(owned: OwnedParam) -> bool:
    """Whether an embedding makes sparse gradients, which cannot be reduced with others."""
    return owned.param.requires_grad and any(
        isinstance(owner.module, (nn.Embedding, nn.EmbeddingBag)) and owner.module.sparse
        for owner in owned.owners
    )


def check_real_for_wire(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse complex gradients for a ``wire_dtype``: it is real, and would lose their imaginary parts."""
    complex_ones = [name for name, param in params if param.is_complex() and param.requires_grad]
    if complex_ones:
        raise ConfigurationError(
            f"wire_dtype is for gradients of real parameters, but these are complex: {complex_ones}. Shard them in a call of "
            "their own without wire_dtype, or leave it out."
        )


def move_buffers(modules: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    """Move buffers to the device; those on the meta device stay there."""
    for _, module in modules:
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta and buffer.device != device:
                setattr(module, name, buffer.to(device))
