"""A module's tables, and the names under which torch wraps modules and saves their state."""

from __future__ import annotations

import gc
import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

ACTIVATION_CHECKPOINTED = "_checkpoint_wrapped_module"
"""The child of torch's wrapper for activation checkpointing; part of all names below it."""

COMPILED = "_orig_mod"
"""The child of a module that `torch.compile` has wrapped; part of all names below it."""

EXTRA_STATE = "_extra_state"
"""The last part of the name under which torch saves what a module's `get_extra_state` returns."""

BatchNorm: type[nn.Module] = _BatchNorm
"""The base class of all batch norms, synchronised ones too."""

parameter_table: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter(
    "_parameters"
)
"""The table of a module's own parameters; writing there has no side effects."""


def table_for(module: nn.Module, value: Tensor) -> dict[str, Any]:
    """Return the dict in which a module keeps ``value``: parameters have one of their own."""
    return parameter_table(module) if isinstance(value, nn.Parameter) else module.__dict__


def child_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children under all their names; None stands for a child that was not set or was removed."""
    return module._modules


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own buffers that state dicts have."""
    hidden = module._non_persistent_buffers_set
    return {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in hidden
    }


def without_activation_wrapper(module: nn.Module) -> nn.Module:
    """Return the module inside of torch's wrapper for activation checkpointing, or the module itself."""
    return getattr(module, ACTIVATION_CHECKPOINTED, module)


def without_wrappers(module: nn.Module) -> nn.Module:
    """Return the module inside of torch's wrappers for activation checkpointing and for the compiler, or the module itself."""
    for name in (ACTIVATION_CHECKPOINTED, COMPILED):
        inner = child_table(module).get(name)
        if inner is not None:
            return without_wrappers(inner)
    return module


def num_running(modules: Collection[nn.Module]) -> int:
    """Return how many calls of ``modules``, or of modules in them, run on this thread. Looks at its stack, which takes time."""
    within = {id(inner) for module in modules for inner in module.modules()}
    frame, running = inspect.currentframe(), 0
    while frame is not None:
        if frame.f_code is _CALL.__code__:
            running += id(frame.f_locals["self"]) in within
        frame = frame.f_back
    return running


_CALL: Any = nn.Module._call_impl


def names_in_modules(params: Sequence[Tensor]) -> list[str]:
    """Return the names of parameters in the outermost modules that have them, or their shapes.

    No parameter knows its module, so all objects of the process are looked through, which takes time.
    """
    # Not `isinstance`, which asks lazy objects for their class.
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parents: dict[int, tuple[nn.Module, str]] = {}
    owners: dict[int, tuple[nn.Module, str]] = {}
    for module in modules:
        for name, child in module.__dict__.get("_modules", {}).items():
            parents.setdefault(id(child), (module, name))
        for name, param in module.__dict__.get("_parameters", {}).items():
            owners.setdefault(id(param), (module, name))
    result = []
    for param in params:
        found, names = owners.get(id(param)), list[str]()
        while found is not None and len(names) < len(modules):
            names.insert(0, found[1])
            found = parents.get(id(found[0]))
        result.append(".".join(names) or f"one of shape {tuple(param.shape)}")
    return result


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module go to code that `torch.compile` makes, or `module.compile()`."""
    return COMPILED in child_table(module) or module._compiled_call_impl is not None


def is_sharded_by_torch(module: nn.Module) -> bool:
    """Return whether torch's own FSDP has sharded a module, or wrapped one. Does not import torch's FSDP."""
    return any(cls.__module__.startswith("torch.distributed.fsdp.") for cls in type(module).__mro__)


def dcp_item_place(file: str, offset: int, nbytes: int) -> Any:
    """Return the location of an item of a torch distributed checkpoint, as its metadata has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, nbytes)


def module_versions(state_dict: object) -> dict[str, Any] | None:
    """Return a state dict's versions of its modules, by their names; None if it is a plain dict."""
    found: dict[str, Any] | None = getattr(state_dict, "_metadata", None)
    return found


def with_module_versions(
    state_dict: Mapping[str, Any], versions: dict[str, Any]
) -> OrderedDict[str, Any]:
    """Return a copy of a state dict that says ``versions`` about its modules."""
    copied: Any = OrderedDict(state_dict)
    copied._metadata = versions
    return cast("OrderedDict[str, Any]", copied)


class ConvertibleModule:
    """A mixin of modules that must know when `to`, `cuda`, `half` and their like convert their tensors."""

    def _before_conversion(self) -> None:
        raise NotImplementedError

    def _after_conversion(self) -> None:
        raise NotImplementedError

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Convert all tensors: torch calls this for every such method, and for every child of a module."""
        self._before_conversion()
        result = super()._apply(fn, recurse)  # type: ignore[misc]  # the class this is mixed with has it
        self._after_conversion()
        return result
