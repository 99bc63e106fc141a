"""Options of `fully_shard`: precision, offloading, and which axes of a mesh are data-parallel.

They are frozen: many modules may share one value, and it never changes during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace

import torch
from torch import nn

from fullshard.errors import ConfigurationError, OptionTypeError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a group computes, reduces and returns; its shards keep their own dtype."""

    param_dtype: torch.dtype | None = None
    """Dtype of the unsharded parameters, hence of gather and compute; None keeps the shard's."""

    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are summed over ranks and accumulated.

    None does as torch's FSDP2 of the installed version: up to torch 2.14 the compute dtype, from 2.15 on `grad_dtype` of
    the parameter, which is its own dtype unless the user chooses another.
    """

    output_dtype: torch.dtype | None = None
    """Dtype to which floating-point outputs of the module are cast; None leaves them alone."""

    cast_forward_inputs: bool = True
    """Cast floating-point inputs of the module to ``param_dtype``."""

    wire_dtype: torch.dtype | None = None
    """Dtype in which gradients are sent to the rank that sums them in ``reduce_dtype``, which is wider; None means
    ``reduce_dtype``. All gradients of the group are rounded to it, once."""

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )
    """Chooses the dtype of single unsharded parameters; called once for each floating-point one, when it is sharded.

    It returns the parameter's own dtype to compute in that, or ``param_dtype`` or None. Inputs are cast to ``param_dtype``.
    """

    def __post_init__(self) -> None:
        if self.param_dtype_override_fn is not None and not callable(self.param_dtype_override_fn):
            raise OptionTypeError(
                "param_dtype_override_fn must be a function of a parameter, or None, got "
                f"{self.param_dtype_override_fn!r}."
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_dtype") and value is not None:
                check_floating_dtype(each.name, value)
        casts = switch("cast_forward_inputs", self.cast_forward_inputs)
        object.__setattr__(self, "cast_forward_inputs", casts)
        check_wire_dtype(self.wire_dtype, self.reduce_dtype)

    def overrides(
        self, params: Iterable[tuple[str, nn.Parameter]]
    ) -> dict[nn.Parameter, torch.dtype]:
        """Return the dtypes that ``param_dtype_override_fn`` chooses in the place of ``param_dtype``.

        Raises:
            ConfigurationError: names the parameters for which it returns something else than it may.
        """
        choose, chosen, faults = self.param_dtype_override_fn, {}, list[str]()
        for name, param in () if choose is None else params:
            dtype = choose(param) if choose is not None and param.is_floating_point() else None
            if dtype is not None and dtype not in (param.dtype, self.param_dtype):
                faults.append(f"{name}, of {param.dtype}: {dtype!r}")
            elif dtype is not None and dtype is not self.param_dtype:
                chosen[param] = dtype
        if faults:
            raise ConfigurationError(
                "param_dtype_override_fn must return the parameter's own dtype, param_dtype "
                f"({self.param_dtype}) or None, but it returned:\n  " + "\n  ".join(faults)
            )
        return chosen

    def of_param(self, override: torch.dtype | None) -> MixedPrecisionPolicy:
        """Return the policy of one parameter, for which ``override`` was chosen."""
        if self.param_dtype_override_fn is None:
            return self
        param_dtype = self.param_dtype if override is None else override
        return replace(self, param_dtype=param_dtype, param_dtype_override_fn=None)


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards are between steps. This base class means: on the compute device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state are in host memory between steps."""

    pin_memory: bool = True
    """Page-locked host memory: copies run beside compute, at the price of memory the host cannot page out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pin_memory", switch("pin_memory", self.pin_memory))


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a mesh are for data parallelism, by name; several names for one role act as one axis."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Iterator):  # can be read once
                object.__setattr__(self, each.name, tuple(value))
        if not self.shard_names and not self.replicate_names:
            raise ConfigurationError(
                "DataParallelMeshDims must name a shard axis, a replicate axis or both; got neither."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Axes over which parameters are sharded."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Axes over which shards are replicated."""
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


_WIDER: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
"""For each dtype on the wire, the dtypes that hold all its values and sum more precisely."""


def check_wire_dtype(wire_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> None:
    """Raise an error unless gradients are summed in a wider dtype than they travel in."""
    if wire_dtype is not None and reduce_dtype not in _WIDER.get(wire_dtype, ()):
        pairs = [f"{narrow}: {' or '.join(map(str, wide))}" for narrow, wide in _WIDER.items()]
        raise ConfigurationError(
            "wire_dtype needs a reduce_dtype that is wider and holds all its values, as gradients are summed in "
            f"that; got wire_dtype={wire_dtype} with reduce_dtype={reduce_dtype}. Allowed are {', '.join(pairs)}. "
            "Pass one of these, or leave wire_dtype out."
        )


def switch(name: str, value: object) -> bool:
    """Return the truth of a value for an option that is on or off: 1 and `numpy.True_` are on, as in torch.

    Text is refused, because "False" would be true. So is a value without a truth, such as a tensor of several elements.
    """
    try:
        if not isinstance(value, (str, bytes)):
            return bool(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise OptionTypeError(f"{name} must be True or False, got {value!r}.")


def check_type(name: str, value: object, expected: type, *, home: str = "fullshard") -> None:
    """Refuse a value of option ``name`` that is no instance of ``expected``, which users import from ``home``."""
    if isinstance(value, expected):
        return
    found = type(value)
    kind, text = f"{found.__module__}.{found.__qualname__}", repr(value)
    is_short = len(text) <= 100 and "\n" not in text  # a model's is not
    is_namesake = found.__name__ == expected.__name__  # torch's class of the same name
    raise OptionTypeError(
        f"{name} must be an instance of {home}.{expected.__name__}, got "
        f"{f'{text} ({kind})' if is_short else kind}.{f' Import it from {home}.' if is_namesake else ''}"
    )


def check_floating_dtype(name: str, value: object) -> None:
    """Raise an error unless the value of option ``name`` is a floating-point dtype."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise OptionTypeError(
            f"{name} must be a floating-point torch.dtype or None, got {value!r}. "
            "Use for example torch.bfloat16."
        )
