"""Tensors are found and replaced in whatever modules take and return; what does not change is not copied."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fullshard.engine.tensor_trees import (
    cast_floating,
    map_tensors,
    tensors_in,
    tensors_within,
    to_device,
)

A, B, C = (torch.tensor([float(i)]) for i in range(3))
WHOLE = torch.tensor([7])
"""An integer tensor: found, never cast."""


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: Any
    y: Any = None


@dataclasses.dataclass
class Partial:
    """One field comes only after construction, one with a computed value."""

    x: Any
    later: Any = dataclasses.field(init=False)
    doubled: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.x * 2


class ModelOutput(OrderedDict[str, Any]):
    """What transformers returns: a dict of those fields that are not None, each also an attribute."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        make, _, *rest = reduced
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return make, tuple(getattr(self, field.name) for field in fields), *rest


@dataclasses.dataclass
class CausalOutput(ModelOutput):
    logits: Any = None
    loss: Any = None
    hidden_states: Any = None


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "named tuple": Pair,
    "dict": lambda x, y: {"x": x, "y": y},
    "OrderedDict": lambda x, y: OrderedDict([("x", x), ("y", y)]),
    "defaultdict": lambda x, y: defaultdict(list, {"x": x, "y": y}),
    "UserDict": lambda x, y: UserDict({"x": x, "y": y}),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "frozen dataclass with slots": FrozenSlots,
    "ModelOutput": CausalOutput,
}
every_container = pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())


def same(found: Any, expected: list[Tensor]) -> bool:
    """Whether these are the very tensors, in this order."""
    found = list(found)
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


def negated(tensor: Tensor) -> Tensor:
    return -tensor


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


# --- all containers --------------------------------------------------------------------------------------


@every_container
def test_tensors_are_found_in_order(make: Callable[[Any, Any], Any]) -> None:
    assert same(tensors_in(make(A, B)), [A, B])
    assert same(tensors_in(make("text", B)), [B])
    assert same(tensors_in(make(None, 3)), [])


@every_container
def test_tensors_are_found_deep_inside(make: Callable[[Any, Any], Any]) -> None:
    nested = make(make(A, [B]), {"deep": make((1, C), WHOLE)})
    assert same(tensors_in(nested), [A, B, C, WHOLE])


@every_container
def test_tensors_are_replaced_in_a_new_value_of_the_same_type(
    make: Callable[[Any, Any], Any],
) -> None:
    value = make(make(A, "text"), B)
    result = map_tensors(negated, value)
    assert type(result) is type(value)
    assert result is not value
    inner, outer = children(result)
    assert type(inner) is type(children(value)[0])
    assert torch.equal(children(inner)[0], -A) and children(inner)[1] == "text"
    assert torch.equal(outer, -B)
    # What the caller holds is as it was.
    assert same(tensors_in(value), [A, B])


@every_container
def test_what_does_not_change_is_not_copied(make: Callable[[Any, Any], Any]) -> None:
    untouched = make("text", 3)
    value = make(make(A, B), untouched)
    assert map_tensors(unchanged, value) is value
    assert map_tensors(negated, untouched) is untouched
    assert cast_floating(value, torch.float32) is value
    # Only the way to the change is new.
    changed = map_tensors(negated, make(untouched, A))
    assert children(changed)[0] is untouched


@every_container
def test_floating_point_tensors_are_cast_and_no_others(make: Callable[[Any, Any], Any]) -> None:
    truth, complex_number = torch.tensor([True]), torch.tensor([1j])
    value = make((A, WHOLE), [truth, complex_number, 1.5])
    result = cast_floating(value, torch.bfloat16)
    found = list(tensors_in(result))
    assert [tensor.dtype for tensor in found[:1]] == [torch.bfloat16]
    assert same(found[1:], [WHOLE, truth, complex_number])
    assert children(result)[1][2] == 1.5
    assert A.dtype is torch.float32


def children(value: Any) -> list[Any]:
    """The parts of a container."""
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, MutableMapping):
        return list(value.values())
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


# --- leaves ----------------------------------------------------------------------------------------------


def test_a_tensor_is_a_tree_of_its_own() -> None:
    assert same(tensors_in(A), [A])
    assert torch.equal(map_tensors(negated, B), -B)
    assert cast_floating(A, torch.float16).dtype is torch.float16
    assert cast_floating(A, torch.float32) is A
    assert cast_floating(WHOLE, torch.float16) is WHOLE


@pytest.mark.parametrize(
    "leaf",
    [None, 3, "text", b"bytes", {A}, Plain, SimpleNamespace(x=A), torch.float32, iter([A])],
    ids=lambda leaf: type(leaf).__name__,
)
def test_anything_else_is_left_as_it_is(leaf: Any) -> None:
    assert same(tensors_in(leaf), [])
    assert map_tensors(negated, leaf) is leaf


def test_an_iterator_is_not_consumed() -> None:
    iterator = iter([A, B])
    list(tensors_in([iterator]))
    map_tensors(negated, [iterator])
    assert next(iterator) is A


@pytest.mark.parametrize("empty", [(), [], {}, OrderedDict()], ids=repr)
def test_an_empty_container_is_left_as_it_is(empty: Any) -> None:
    assert same(tensors_in(empty), [])
    assert map_tensors(negated, empty) is empty


def test_a_subclass_of_tensor_is_a_leaf() -> None:
    parameter = torch.nn.Parameter(A)
    assert same(tensors_in([parameter]), [parameter])


def test_a_cast_can_be_differentiated() -> None:
    x = torch.ones(2, requires_grad=True)
    cast_floating({"x": x}, torch.bfloat16)["x"].sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32


# --- containers with a life of their own -----------------------------------------------------------------


def test_keys_of_any_type_and_their_order_are_kept() -> None:
    value = {3: A, "name": 1, (1, 2): B, None: C}
    assert list(map_tensors(negated, value)) == [3, "name", (1, 2), None]


def test_a_defaultdict_keeps_its_factory() -> None:
    result = map_tensors(negated, defaultdict(list, {"x": A}))
    assert result["new"] == []


def test_the_shape_of_a_tensor_is_no_place_for_tensors() -> None:
    size = torch.Size([2, 3])
    assert map_tensors(negated, size) is size


def test_what_torch_functions_return_is_a_named_tuple_too() -> None:
    result = cast_floating(torch.max(torch.eye(2), dim=0), torch.bfloat16)
    assert result.values.dtype is torch.bfloat16
    assert result.indices.dtype is torch.int64


def test_a_packed_sequence_is_cast_and_stays_one() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    result = cast_floating(packed, torch.float64)
    assert isinstance(result, PackedSequence)
    assert result.data.dtype is torch.float64
    assert result.batch_sizes is packed.batch_sizes


def test_fields_that_are_not_set_or_not_given_to_init_are_no_obstacle() -> None:
    value = Partial(A)
    assert same(tensors_in(value), [A, value.doubled])
    result = map_tensors(negated, value)
    assert torch.equal(result.x, -A)
    assert torch.equal(result.doubled, -value.doubled)
    assert not hasattr(result, "later")


def test_attributes_beside_the_fields_of_a_dataclass_are_kept() -> None:
    value = Plain(A)
    value.note = "kept"  # type: ignore[attr-defined]
    assert map_tensors(negated, value).note == "kept"


def test_a_model_output_has_the_new_tensors_as_items_and_as_attributes() -> None:
    value = CausalOutput(logits=A, hidden_states=(B, C))
    assert same(tensors_in(value), [A, B, C])
    result = cast_floating(value, torch.bfloat16)
    assert type(result) is CausalOutput
    assert list(result) == ["logits", "hidden_states"]
    assert result.logits is result["logits"] and result.logits.dtype is torch.bfloat16
    assert result.hidden_states is result["hidden_states"]
    assert [tensor.dtype for tensor in result.hidden_states] == [torch.bfloat16] * 2
    assert result.loss is None and "loss" not in result
    # The original has kept its own.
    assert value.logits is A and value["logits"] is A
    assert cast_floating(value, torch.float32) is value


def test_a_model_output_look_alike_copies_as_the_real_one_does() -> None:
    # What the test above rests on.
    value = CausalOutput(logits=A)
    twin = copy.copy(value)
    assert type(twin) is CausalOutput and twin.logits is A and list(twin) == ["logits"]


def test_tensors_are_moved_and_the_rest_is_the_same() -> None:
    label = object()
    moved = to_device({"x": (torch.ones(2), label)}, torch.device("meta"))
    assert moved["x"][0].is_meta and moved["x"][1] is label


# --- objects of other classes ------------------------------------------------------------------------


class Slotted:
    __slots__ = ("unset", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Keeping:
    def __init__(self, **items: Any) -> None:
        self.__dict__.update(items)


def test_tensors_are_found_in_attributes_slots_views_of_dicts_and_sets() -> None:
    value = [
        Keeping(a=A, name="text", inner=Slotted(MappingProxyType({"b": (B,)}))),
        frozenset([C]),
    ]
    assert same(tensors_within(value), [A, B, C])


def test_each_tensor_is_found_once() -> None:
    value = Keeping(a=A, again=[A])
    value.itself = value  # type: ignore[attr-defined]
    assert same(tensors_within(value), [A])
    assert same(tensors_within(CausalOutput(logits=A)), [A])


def test_modules_functions_and_iterators_are_not_looked_into() -> None:
    value = Keeping(
        module=torch.nn.Linear(2, 2), function=lambda: A, iterator=iter([A]), kind=Slotted
    )
    assert tensors_within(value) == []
    assert next(value.iterator) is A  # type: ignore[attr-defined]
