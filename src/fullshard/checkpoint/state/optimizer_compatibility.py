"""Whether an optimizer can take the state of another, by their classes, their options, and the names of states.

    the same class            yes, if the options that decide which state there is are the same (`_DECIDING`)
    one derives from the      yes, if the checkpoint has exactly the state that the optimizer keeps. This includes Adam
    other                     and AdamW, whose state has the same meaning. If they decay weights in different ways, the
                              optimizer keeps its own decay
    other classes             no
    the class is not known    for classes of torch.optim: as if one derived from the other, and the optimizer must know
    (other formats, old       all saved options. For other classes: yes, because it is not known which state they keep
    checkpoints)

Checkpoints have names of classes. Nothing is imported to compare them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from fullshard import torch_border
from fullshard.checkpoint.json_values import DeviceScalar
from fullshard.checkpoint.source import CLASS

Group = Mapping[str, Any]
States = frozenset[str]

_DECIDING = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""Options that decide which state torch's optimizers keep, with that state."""

_DECAY = ("weight_decay", "decoupled_weight_decay")
"""Options that mean different things in Adam and AdamW."""

_COMPUTING = ("foreach", "fused", "capturable", "differentiable", "maximize", _DECAY[1])
"""Options that some versions of torch have and others have not. They do not tell classes apart."""


def _always(*states: str) -> Callable[[Group], list[States]]:
    return lambda group: [frozenset(states)]


def _deciding(*states: str, options: Sequence[str]) -> Callable[[Group], list[States]]:
    return lambda group: [
        frozenset([*states, *(_DECIDING[option] for option in options if _is_on(group, option))])
    ]


STATES: dict[type[Optimizer], Callable[[Group], list[States]]] = {
    optim.ASGD: _always("step", "eta", "mu", "ax"),
    optim.Adadelta: _always("step", "square_avg", "acc_delta"),
    optim.Adafactor: lambda group: [
        frozenset({"step", "row_var", "col_var"}),
        frozenset({"step", "variance"}),
    ],
    optim.Adagrad: _always("step", "sum"),
    optim.Adam: _deciding("step", "exp_avg", "exp_avg_sq", options=["amsgrad"]),
    optim.AdamW: _deciding("step", "exp_avg", "exp_avg_sq", options=["amsgrad"]),
    optim.Adamax: _always("step", "exp_avg", "exp_inf"),
    optim.Muon: _always("momentum_buffer"),
    optim.NAdam: _always("step", "exp_avg", "exp_avg_sq", "mu_product"),
    optim.RAdam: _always("step", "exp_avg", "exp_avg_sq"),
    optim.RMSprop: _deciding("step", "square_avg", options=["momentum", "centered"]),
    optim.Rprop: _always("step", "prev", "step_size"),
    optim.SGD: _deciding(options=["momentum"]),
    optim.SparseAdam: _always("step", "exp_avg", "exp_avg_sq"),
}
"""The states that a class may keep for a parameter, by the options of its group."""


def class_names(optimizer: Optimizer) -> list[str]:
    """Return the names of the optimizer's class and of the classes it derives from.

    For an optimizer that delegates to an inner one, they are the inner one's: it has that state.
    """
    return [_name(each) for each in _classes(optimizer)]


def _classes(optimizer: Optimizer) -> list[type[Optimizer]]:
    if isinstance(optimizer, torch_border.DelegatingOptimizer):
        optimizer = optimizer.inner
    return [
        each
        for each in type(optimizer).__mro__
        if issubclass(each, Optimizer) and each is not Optimizer
    ]


def _name(of: type[Optimizer]) -> str:
    if getattr(optim, of.__name__, None) is of:
        return f"{optim.__name__}.{of.__name__}"
    name = f"{of.__module__}.{of.__qualname__}"
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def with_counts_it_can_read(optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parameter's saved state, with the step count as a tensor where torch's optimizers have one now.

    Older versions of torch saved a number, with which the present ones fail at their first step.
    """
    known = next((each for each in _classes(optimizer) if each in STATES), optim.SparseAdam)
    count = state.get("step")
    if known is optim.SparseAdam or isinstance(count, bool) or not isinstance(count, int | float):
        return state
    return {**state, "step": torch.tensor(float(count), dtype=torch.float32)}


@dataclass(slots=True)
class Compatibility:
    """Whether an optimizer can take the state of a checkpoint."""

    faults: list[str] = field(default_factory=list)
    """Reasons why it cannot."""
    notes: list[str] = field(default_factory=list)
    """Sentences about state that is not taken exactly as it was saved."""
    own_options: list[frozenset[str]] = field(default_factory=list)
    """Options that it does not take from the checkpoint, for each of the optimizer's groups."""


def check_compatibility(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    saved_groups: Sequence[Group],
    saved_states: Sequence[Mapping[str, Mapping[str, Any]]],
) -> Compatibility:
    """Compare an optimizer with a checkpoint's.

    Args:
        optimizer: The optimizer that is loaded into.
        saved: The checkpoint's optimizer: see `source.Source.optimizer`.
        saved_groups: For each of the optimizer's groups, the saved group with the same parameters.
        saved_states: For each of these, the saved states of its parameters, by names.
    """
    classes = _classes(optimizer)
    own, names = classes[0], [_name(each) for each in classes]
    found: Sequence[str] = saved.get(CLASS) or ()
    result = Compatibility()
    is_same, is_related = _relation(names, found)
    if found and not is_related:
        result.faults.append(f"it was saved from {found[0]}, and this is {names[0]}")
    pairs = list(zip(optimizer.param_groups, saved_groups, saved_states, strict=True))
    for number, (group, saved_group, states) in enumerate(pairs):
        if not found or is_related:
            result.faults += _option_faults(own, names[0], number, group, saved_group, not found)
        # An optimizer of the same class may have state that its options do not need any more.
        result.faults += _state_faults(classes, group, states, may_have_more=is_same)
        keeps_decay = (
            not is_same and optim.Adam in classes and _decays_otherwise(group, saved_group, found)
        )
        result.own_options.append(frozenset(_DECAY if keeps_decay else ()))
    if any(result.own_options):
        result.notes.append(
            f"The checkpoint is of {found[0] if found else 'an optimizer'} that decays weights in another way than "
            f"{names[0]}, which has the same state. The state was loaded. weight_decay was not: it keeps its present "
            "value."
        )
    result.faults = list(dict.fromkeys(result.faults))
    return result


def _relation(own: Sequence[str], saved: Sequence[str]) -> tuple[bool, bool]:
    """Return whether two classes are the same, and whether one derives from the other; both False if one is not known."""
    if not saved:
        return False, False
    ours, theirs = own[0], saved[0]
    of_torch = any(each.startswith(f"{optim.__name__}.") for each in (ours, theirs))
    # A user's class may have moved to another module.
    same = ours == theirs or (not of_torch and ours.rpartition(".")[2] == theirs.rpartition(".")[2])
    return same, same or ours in saved or theirs in own


def _option_faults(
    own: type[Optimizer], name: str, number: int, group: Group, saved: Group, unknown: bool
) -> Iterator[str]:
    """Yield options that decide on state and differ; if the saved class is ``unknown``, also options of other classes."""
    if own in STATES and STATES[own](group) != STATES[own]({**group, **saved}):
        for option, state in _DECIDING.items():
            if (
                option in saved
                and option in group
                and _is_on(saved, option) != _is_on(group, option)
            ):
                has = "has" if _is_on(saved, option) else "has no"
                yield (
                    f"group {number}: {option} is {_text(group[option])} here, and {_text(saved[option])} in the "
                    f"checkpoint, which {has} {state}"
                )
    if unknown and own in STATES:
        foreign = (saved.keys() & _options_of_torch()) - group.keys() - set(_COMPUTING)
        if foreign:
            yield f"group {number} has options that {name} does not have: {', '.join(sorted(foreign))}"


def _options_of_torch() -> set[str]:
    return {option for each in STATES for option in inspect.signature(each).parameters} - {"params"}


def _state_faults(
    classes: Sequence[type[Optimizer]],
    group: Group,
    states: Mapping[str, Mapping[str, Any]],
    *,
    may_have_more: bool,
) -> Iterator[str]:
    """Yield a line for parameters whose saved state is not what the optimizer keeps."""
    known = next((each for each in classes if each in STATES), None)
    if known is None:
        return
    kept = STATES[known](group)
    names_by_difference: dict[tuple[States, States], list[str]] = {}
    for name, state in states.items():
        there = frozenset(state)
        missing, left = min(
            ((each - there, there - each) for each in kept), key=lambda sets: sum(map(len, sets))
        )
        if may_have_more or known is not classes[0]:  # a user's class may keep more than torch's
            left = frozenset()
        if state and (missing or left):
            names_by_difference.setdefault((missing, left), []).append(name)
    for (missing, left), names in names_by_difference.items():
        texts = [
            f"{what}: {', '.join(sorted(map(str, keys)))}"
            for what, keys in (("missing", missing), ("left over", left))
            if keys
        ]
        yield f"state of {', '.join(names)}: {'; '.join(texts)}"


def _decays_otherwise(group: Group, saved: Group, found: Sequence[str]) -> bool:
    """Return whether a checkpoint of Adam or AdamW decays weights in the other way."""
    decoupled = saved.get(_DECAY[1], _name(optim.AdamW) in found if found else group.get(_DECAY[1]))
    return bool(decoupled) != bool(group.get(_DECAY[1]))


def _is_on(group: Group, option: str) -> bool:
    value = group.get(option)
    value = value.value if isinstance(value, DeviceScalar) else value
    return bool(torch.any(value)) if isinstance(value, Tensor) else bool(value)


def _text(value: Any) -> str:
    return repr(value.value if isinstance(value, DeviceScalar) else value)[:60]
