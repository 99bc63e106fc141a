"""Which of torch's optimizers can update sharded parameters, and the refusal of those that cannot.

An optimizer sees what a rank holds of a parameter: a DTensor (`fully_shard`), a flat piece or a
`FlatParameter` (the wrapper). Most update each element from its own gradient and state, so that is
enough. Some need more:

    Adafactor, Muon     the matrix: means of rows and columns, or a product of the matrix with itself
    LBFGS               dot products over all parameters, and the same loss on all ranks
    SparseAdam          sparse gradients; reduced gradients are dense

Without a check the first two compute something else on the wrapper's pieces, or let ranks run apart until
they hang. `RULES` says what each needs. `docs/optimizers.md` has the table; a test compares the two.

Optimizers that are not torch's are never refused: nothing is known about them. `process_hooks` calls `check`
before every step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from fullshard.engine.param_group import FSDPParamGroup, groups_of
from fullshard.errors import UnsupportedError
from fullshard.storage.flat_parameter import FlatParameter

__all__ = ["RULES", "Rule", "check", "params_of"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a class of optimizers cannot update, and what to do instead."""

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
    """Whether what is updated is not one full matrix: it is a part of one, or several parameters in one."""
    return _has_part(param, group) or isinstance(param, FlatParameter)


def _is_sharded(param: nn.Parameter, group: FSDPParamGroup) -> bool:
    """As `_has_part`; a DTensor that is sharded over one rank counts, since torch treats it so."""
    if isinstance(param, DTensor):
        return not all(placement.is_replicate() for placement in param.placements)
    return _is_piece(param, group)


def _is_sharded_or_flat(param: nn.Parameter, group: FSDPParamGroup) -> bool:
    return _is_sharded(param, group) or isinstance(param, FlatParameter)


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
"""By class. Subclasses are judged like their base, unless they have a step of their own."""


def check(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer of torch's that would not compute on sharded parameters what it does on whole ones.

    Costs nothing for most classes, and looks at the parameters of the others. All ranks find the same.

    Raises:
        UnsupportedError: names the parameters.
    """
    rule = _rule_of(type(optimizer))  # type: ignore[arg-type]  # classes can be hashed
    if rule is None:
        return
    params = set(map(id, params_of(optimizer)))
    refused = [
        f"{group.name}: {', '.join(names)}"
        for group in groups_of(params_of(optimizer))
        if (
            names := [
                sharded_param.name
                for sharded_param in group.sharded_params
                if id(sharded_param.param) in params and rule.refuses(sharded_param.param, group)
            ]
        )
    ]
    if refused:
        raise UnsupportedError(
            f"{type(optimizer).__name__} {rule.reason}:\n  "
            + "\n  ".join(refused)
            + f"\n{rule.remedy}. docs/optimizers.md has a table of torch's optimizers."
        )


def params_of(optimizer: optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


@functools.cache
def _rule_of(cls: type[optim.Optimizer]) -> Rule | None:
    for base, rule in RULES.items():
        if issubclass(cls, base) and _step_of(cls) is _step_of(base):
            return rule
    return None


def _step_of(cls: type[optim.Optimizer]) -> object:
    """Return the function behind its decorators: torch decorates a class when its first instance is made."""
    return inspect.unwrap(cls.step)
