"""The optimizers of torch that can update sharded parameters, and the refusal of those that cannot.

An optimizer sees what a rank holds of a parameter: a DTensor (`fully_shard`), a flat piece or a
`FlatParameter` (the wrapper). Most update each element from its own gradient and state, so that is
enough. Some need more:

    Adafactor, Muon     the matrix: means of rows and columns, or a product of the matrix with itself
    LBFGS               dot products over all parameters, and the same loss on all ranks
    SparseAdam          sparse gradients; reduced gradients are dense

Without a check the first two compute something else on the wrapper's pieces, or let ranks run apart until
they hang. `RULES` says what each needs. `docs/optimizers.md` has the table; a test compares the two.

Optimizers that are not torch's are never refused: nothing is known about them. On DTensors they compute what they would on
whole tensors, because that is what operators on DTensors do. On the wrapper's pieces they may not, so a warning names them
(`warn_of_pieces`). `process_hooks` calls `check` before every step.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from fullshard.engine.known_groups import groups_of
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.errors import UnsupportedError
from fullshard.storage.flat_parameter import FlatParameter
from fullshard.torch_border import ELEMENTWISE

__all__ = ["RULES", "Rule", "check", "params_of", "warn_of_pieces"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters that a class of optimizers cannot update, and the remedy."""

    refuses: Callable[[nn.Parameter, FSDPParamGroup], bool]
    """Whether a sharded parameter, of this group, cannot be updated."""
    reason: str
    remedy: str


def _has_part(param: nn.Parameter, group: FSDPParamGroup) -> bool:
    """Whether this rank, or another, has only a part of the parameter."""
    if isinstance(param, DTensor):
        return any(
            param.device_mesh.size(axis) > 1 and not placement.is_replicate()
            for axis, placement in enumerate(param.placements)
        )
    return _is_piece(param, group)


def _is_piece(param: nn.Parameter, group: FSDPParamGroup) -> bool:
    """Whether a plain parameter is a part of what the user had, or of what tensor parallelism had divided."""
    return group.layout.world > 1 or any(
        each.placement.parallel for each in group.params if each.sharded_param.param is param
    )


def _is_not_its_matrix(param: nn.Parameter, group: FSDPParamGroup) -> bool:
    """Whether the updated tensor is not one full matrix: it is a part of one, or several parameters in one."""
    return _has_part(param, group) or isinstance(param, FlatParameter)


def _is_sharded(param: nn.Parameter, group: FSDPParamGroup) -> bool:
    """As `_has_part`; a DTensor that is sharded over one rank counts, since torch treats it so."""
    if isinstance(param, DTensor):
        return not all(placement.is_replicate() for placement in param.placements)
    return _is_piece(param, group)


def _is_sharded_or_flat(param: nn.Parameter, group: FSDPParamGroup) -> bool:
    return _is_sharded(param, group) or isinstance(param, FlatParameter)


def _is_flat_piece(param: nn.Parameter, group: FSDPParamGroup) -> bool:
    return not isinstance(param, DTensor) and _is_sharded_or_flat(param, group)


def _any(param: nn.Parameter, group: FSDPParamGroup) -> bool:
    return True


_NEEDS_MATRIX = "computes with whole matrices, and a rank has a part of each of these parameters, or several in one"
_KEEP_WHOLE = (
    "Keep these parameters whole (fullshard.replicate; the wrapper's NO_SHARD with use_orig_params=True; "
    "ignored parameters), or use an optimizer that updates each element for itself, such as AdamW"
)

RULES: dict[type[optim.Optimizer], Rule] = {
    optim.Adafactor: Rule(_is_sharded_or_flat, _NEEDS_MATRIX, _KEEP_WHOLE),
    optim.Muon: Rule(
        _is_not_its_matrix,
        _NEEDS_MATRIX,
        "Use fullshard.optim.Muon, which brings whole matrices to their owners",
    ),
    optim.LBFGS: Rule(
        _is_sharded,
        "needs dot products over whole parameters, and a rank has a part of each of these",
        _KEEP_WHOLE,
    ),
    optim.SparseAdam: Rule(
        _any,
        "needs sparse gradients, and those of these parameters are dense: they are averaged over ranks",
        "Use Adam for these parameters, or leave them out of sharding (ignored_params, ignored_states)",
    ),
}
"""Rules by class. Subclasses are judged like their base, unless they have a step of their own."""


def check(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer of torch's that would not compute on sharded parameters what it does on whole ones.

    Costs nothing for most classes, and looks at the parameters of the others. All ranks find the same.

    Raises:
        UnsupportedError: names the parameters.
    """
    cls = type(optimizer)
    rule = _rule_of(cls)  # type: ignore[arg-type]  # classes can be hashed
    if rule is None:
        return
    refused = _names_of(optimizer, rule.refuses)
    if refused:
        raise UnsupportedError(
            f"{cls.__name__} {rule.reason}:\n  "
            + "\n  ".join(refused)
            + f"\n{rule.remedy}. docs/optimizers.md has a table of torch's optimizers."
        )


def _names_of(
    optimizer: optim.Optimizer, is_meant: Callable[[nn.Parameter, FSDPParamGroup], bool]
) -> list[str]:
    """Return the names of the sharded parameters of an optimizer for which something is true, by group."""
    params = set(map(id, params_of(optimizer)))
    return [
        f"{group.name}: {', '.join(names)}"
        for group in groups_of(params_of(optimizer))
        if (
            names := [
                sharded_param.name
                for sharded_param in group.sharded_params
                if id(sharded_param.param) in params and is_meant(sharded_param.param, group)
            ]
        )
    ]


_WARNED: set[type[optim.Optimizer]] = set()


def warn_of_pieces(optimizer: optim.Optimizer) -> None:
    """Say, once for each class, that an optimizer of which nothing is known updates pieces of parameters."""
    cls = type(optimizer)
    if cls in _WARNED or _is_known(cls):
        return
    pieces = _names_of(optimizer, _is_flat_piece)
    if pieces:
        _WARNED.add(cls)
        warnings.warn(
            f"{cls.__name__} is not one of torch's optimizers, and it sees flat pieces of these parameters:\n  "
            + "\n  ".join(pieces)
            + "\nThat is enough if it updates each element from its own gradient and state; then say so with "
            f"{cls.__name__}.{TAKES_PIECES} = True. If it computes with matrices, or with norms of parameters, use fully_shard: "
            "its parameters are DTensors, on which operators compute what they do on whole tensors.",
            stacklevel=2,
        )


def params_of(optimizer: optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


@functools.cache
def _rule_of(cls: type[optim.Optimizer]) -> Rule | None:
    return next((rule for base, rule in RULES.items() if _steps_as(cls, base)), None)


TAKES_PIECES = "takes_pieces"
"""Attribute of a class of optimizers: whether it knows that an updated tensor may be a piece of a parameter."""


def _is_known(cls: type[optim.Optimizer]) -> bool:
    """Return whether it is right on pieces, or refused."""
    is_right = getattr(cls, TAKES_PIECES, False) or any(
        _steps_as(cls, base) for base in ELEMENTWISE
    )
    return bool(is_right) or _rule_of(cls) is not None  # type: ignore[arg-type]


def _steps_as(cls: type[optim.Optimizer], base: type[optim.Optimizer]) -> bool:
    """Return whether a class is, or derives from, a class of torch's and has its step, not one of its own."""
    return issubclass(cls, base) and _step_of(cls) is _step_of(base)


def _step_of(cls: type[optim.Optimizer]) -> object:
    """Return the function behind its decorators: torch decorates a class when its first instance is made."""
    return inspect.unwrap(cls.step)
