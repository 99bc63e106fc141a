"""Whether an optimizer can go on with the state of another: by their classes, their options, and the names of states.

    the same class            yes, if the options that decide which state there is are the same (`_DECIDING`)
    one derives from the      yes, if the checkpoint has the state that the optimizer keeps, and no other. So are Adam
    other                     and AdamW: their state is the same, and means the same. Where they decay weights in
                              different ways, the optimizer keeps its own decay
    other classes             no
    the checkpoint does not   as if one derived from the other; and its options must be ones the optimizer knows. So
    say (other formats, old   it is for the classes of torch.optim; of others it is not known which state they keep
    checkpoints)

Checkpoints have names of classes, never classes: nothing is imported to find out.
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
"""Options that decide which state torch's optimizers keep, and the state."""

_DECAY = ("weight_decay", "decoupled_weight_decay")
"""Options whose meaning is not the same in Adam and AdamW."""

_COMPUTING = ("foreach", "fused", "capturable", "differentiable", "maximize", _DECAY[1])
"""Options that versions of torch have added to classes: they do not tell classes apart."""


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
"""Names of the states that classes keep of a parameter, by the options of its group: one of several sets."""


def class_names(optimizer: Optimizer) -> list[str]:
    """The optimizer's class and those that it derives from, for a checkpoint.

    Of one that lets another make its updates, the other's: it has the state of that.
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
    """A parameter's saved state, with the number of steps as a tensor where torch's optimizers now have one.

    Older versions of torch have saved it as a number, and their present ones fail at the first step with that.
    """
    known = next((each for each in _classes(optimizer) if each in STATES), optim.SparseAdam)
    count = state.get("step")
    if known is optim.SparseAdam or isinstance(count, bool) or not isinstance(count, int | float):
        return state
    return {**state, "step": torch.tensor(float(count), dtype=torch.float32)}


@dataclass(slots=True)
class Compatibility:
    """Whether an optimizer can take what a checkpoint has."""

    faults: list[str] = field(default_factory=list)
    """Why not; sentences for people."""
    notes: list[str] = field(default_factory=list)
    """What is converted."""
    own_options: list[frozenset[str]] = field(default_factory=list)
    """Parallel to the optimizer's groups: options that it does not take from the checkpoint."""


def check_compatibility(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    saved_groups: Sequence[Group],
    saved_states: Sequence[Mapping[str, Mapping[str, Any]]],
) -> Compatibility:
    """Compare an optimizer with a checkpoint's.

    Args:
        optimizer: That is loaded into.
        saved: The checkpoint's: see `source.Source.optimizer`.
        saved_groups: Parallel to the optimizer's groups: the checkpoint's that have the same parameters.
        saved_states: Parallel to these: the checkpoint's states of their parameters, by names.
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
        # One of the same class may have state that its options do not ask for any more.
        result.faults += _state_faults(classes, group, states, may_have_more=is_same)
        keeps_decay = (
            not is_same and optim.Adam in classes and _decays_otherwise(group, saved_group, found)
        )
        result.own_options.append(frozenset(_DECAY if keeps_decay else ()))
    if any(result.own_options):
        result.notes.append(
            f"The checkpoint is of {found[0] if found else 'an optimizer'} that decays weights in another way than "
            f"{names[0]}, which has the same state. The state was loaded, and weight_decay stays as it is here."
        )
    result.faults = list(dict.fromkeys(result.faults))
    return result


def _relation(own: Sequence[str], saved: Sequence[str]) -> tuple[bool, bool]:
    """Whether two classes are the same, and whether one derives from the other; of nothing, neither."""
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
    """Options that decide on state and differ; if the checkpoint's class is ``unknown``, also ones of other classes."""
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
    """Parameters whose saved state is not what the optimizer keeps."""
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
        if may_have_more or known is not classes[0]:  # of users' classes more is not known
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
    """Whether a checkpoint of Adam or AdamW decays weights in the other way."""
    decoupled = saved.get(_DECAY[1], _name(optim.AdamW) in found if found else group.get(_DECAY[1]))
    return bool(decoupled) != bool(group.get(_DECAY[1]))


def _is_on(group: Group, option: str) -> bool:
    value = group.get(option)
    value = value.value if isinstance(value, DeviceScalar) else value
    return bool(torch.any(value)) if isinstance(value, Tensor) else bool(value)


def _text(value: Any) -> str:
    return repr(value.value if isinstance(value, DeviceScalar) else value)[:60]
