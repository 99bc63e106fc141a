"""Private names of torch's FSDP that other programs read or set: one place, and for each name the programs that need it.

On parameters of a wrapper:

    _fsdp_flattened    Lightning tells by it whether an optimizer has parameters of a wrapper (`mark_flattened`)
    _fqns              Accelerate names what it upcasts; `torch.distributed.checkpoint.state_dict` reads the names that a
                       flat parameter stands for (`mark_flat_parameter`)

On wrappers (`ClientAttributes`):

    _has_params        Accelerate skips wrappers without parameters when it upcasts
    _flat_param        Accelerate reads dtype, device and requires_grad of it, and assigns its data in float32;
                       `torch.distributed.checkpoint.state_dict` asks for its names
    _handle            Accelerate assigns `_handle._orig_param_dtype` after that

On modules whose parameters have an all-gather extension (`show_state`):

    _get_fsdp_state()  TransformerEngine's quantised tensors ask the module's state for its group, and that whether it
                       releases parameters after forward, and whether it gathers for backward

On modules:

    the composable registry
                       `torch.distributed._composable.replicate` leaves modules with the entry "fully_shard" alone, and
                       torch's `fully_shard` those with "replicate" (`register_composable`, `composable_functions`)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem, _get_registry

from fullshard.torch_border.autograd import backward_pass_id

# --- parameters -----------------------------------------------------------------------------------


def mark_flattened(param: Tensor) -> None:
    """Say of a parameter that its wrapper has flattened it."""
    cast(Any, param)._fsdp_flattened = True


def mark_flat_parameter(param: Tensor, names: Sequence[str]) -> None:
    """Say of a flat parameter for which parameters it stands: their names in the wrapped module."""
    mark_flattened(param)
    cast(Any, param)._fqns = tuple(names)


# --- wrappers -------------------------------------------------------------------------------------


class JoinedParams:
    """The parameters of a wrapper with ``use_orig_params=True`` as if they were one, flattened one after the other.

    Torch has a flat parameter in this case, too. Here each parameter is over memory of its own in the shard buffer.
    """

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._params = tuple(params)
        self._fqns = tuple(names)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter; a wrapper seldom has several."""
        return self._params[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the shards."""
        return self._params[0].device

    @property
    def requires_grad(self) -> bool:
        """Whether any of the parameters is trainable."""
        return any(param.requires_grad for param in self._params)

    @property
    def data(self) -> Tensor:
        """A copy of this rank's shards. Assign a tensor of the same size, in any dtype, to change them."""
        return torch.cat([param.detach().flatten() for param in self._params])

    @data.setter
    def data(self, value: Tensor) -> None:
        parts = value.split([param.numel() for param in self._params])
        for param, part in zip(self._params, parts, strict=True):
            param.data = part.view(param.shape)


class FlatParamHandle:
    """The part of a wrapper's handle of its flat parameter that Accelerate reads."""

    def __init__(self, flat_param: Any) -> None:
        self.flat_param = flat_param

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype of the shards. Assigning another one casts them."""
        return cast(torch.dtype, self.flat_param.dtype)

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        if self.flat_param.dtype != dtype:
            self.flat_param.data = self.flat_param.data.to(dtype)


class ClientAttributes:
    """A mixin of wrappers: what other programs ask torch's for."""

    def _named_sharded_params(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return the wrapper's own sharded parameters by their names in its module; one if it is a flat parameter."""
        raise NotImplementedError

    @property
    def _has_params(self) -> bool:
        return bool(self._named_sharded_params())

    @property
    def _flat_param(self) -> Any:
        """The flat parameter, what stands for it with ``use_orig_params=True``, or None without parameters."""
        named = self._named_sharded_params()
        if not named:
            return None
        names, params = zip(*named, strict=True)
        return params[0] if hasattr(params[0], "_fqns") else JoinedParams(params, names)

    @property
    def _handle(self) -> FlatParamHandle | None:
        flat_param = self._flat_param
        return None if flat_param is None else FlatParamHandle(flat_param)


# --- modules with all-gather extensions -------------------------------------------------------------


class _Phase(enum.Enum):
    """Phases equal to the members of torch's enumeration with the same names."""

    FORWARD = enum.auto()
    PRE_BACKWARD = enum.auto()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, enum.Enum) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class _GroupView:
    def __init__(self, reshards_after_forward: Callable[[], bool]) -> None:
        self._reshards_after_forward = reshards_after_forward

    @property
    def _reshard_after_forward(self) -> bool:
        return self._reshards_after_forward()

    @property
    def _training_state(self) -> _Phase:
        return _Phase.FORWARD if backward_pass_id() == -1 else _Phase.PRE_BACKWARD


class _StateView:
    """The readable part of a module's state; a copy of the module has it, too."""

    def __init__(self, group: _GroupView) -> None:
        self._fsdp_param_group = group

    def __call__(self) -> _StateView:
        return self


def show_state(module: nn.Module, reshards_after_forward: Callable[[], bool]) -> None:
    """Give a module what its parameters' all-gather extensions may read."""
    cast(Any, module)._get_fsdp_state = _StateView(_GroupView(reshards_after_forward))


# --- modules --------------------------------------------------------------------------------------


def composable_functions(module: nn.Module) -> Collection[str]:
    """Return the names of functions that were applied to a module, as torch's composable registry has them."""
    return _get_registry(module) or ()


def register_composable(module: nn.Module, name: str) -> None:
    """Note in torch's composable registry that the function ``name`` was applied to a module."""
    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()
