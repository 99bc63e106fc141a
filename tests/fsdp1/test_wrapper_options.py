"""The wrapper's options are torch's in name, field, default and equality, and wrong values are refused at once."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import api as torch_api

from fullshard import ConfigurationError, api
from fullshard.api import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

NAMES = sorted([*torch_api.__all__, "OptimStateKeyType"])
ENUMS = [name for name in NAMES if issubclass(getattr(api, name), Enum)]
DATACLASSES = [name for name in NAMES if name not in ENUMS]


def ours_and_torch_s(name: str) -> tuple[Any, Any]:
    return getattr(api, name), getattr(torch_fsdp, name, getattr(torch_api, name, None))


def settings(library: Any) -> tuple[Any, Any, Any]:
    """Arguments of `StateDictSettings`, which has no defaults."""
    return (
        library.StateDictType.FULL_STATE_DICT,
        library.FullStateDictConfig(),
        library.FullOptimStateDictConfig(),
    )


def instance(cls: Any, library: Any) -> Any:
    return cls(*settings(library)) if cls.__name__ == "StateDictSettings" else cls()


# --- the same as torch's -----------------------------------------------------------------------------


def test_every_option_of_torch_is_here_and_no_other() -> None:
    ours = {
        name
        for name, value in inspect.getmembers(api, inspect.isclass)
        if value.__module__ == api.__name__ and not name.startswith("_")
    }
    assert sorted(ours) == NAMES


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_torch_s_members(name: str) -> None:
    ours, theirs = ours_and_torch_s(name)
    assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in theirs]


OURS = {"MixedPrecision": ["wire_dtype"]}
"""Fields that torch does not have; last, so that torch's stay where they are, and None."""


@pytest.mark.parametrize("name", DATACLASSES)
def test_dataclasses_have_torch_s_fields_order_and_defaults(name: str) -> None:
    ours, theirs = ours_and_torch_s(name)
    own = OURS.get(name, [])

    def described(cls: Any) -> list[tuple[object, ...]]:
        return [
            (f.name, f.default, f.default_factory, f.init, f.repr, f.compare, f.kw_only)
            for f in dataclasses.fields(cls)
        ]

    def signature(cls: Any) -> list[tuple[object, ...]]:
        parameters = inspect.signature(cls).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    last = len(described(ours)) - len(own)
    assert described(ours)[:last] == described(theirs)
    assert signature(ours)[:last] == signature(theirs)
    assert [(f.name, f.default) for f in dataclasses.fields(ours)[last:]] == [
        (n, None) for n in own
    ]


@pytest.mark.parametrize("name", DATACLASSES)
def test_dataclasses_are_as_frozen_comparable_and_hashable_as_torch_s(name: str) -> None:
    ours, theirs = ours_and_torch_s(name)
    flags = ("frozen", "eq", "order", "unsafe_hash", "repr")
    assert [getattr(ours.__dataclass_params__, flag) for flag in flags] == [
        getattr(theirs.__dataclass_params__, flag) for flag in flags
    ]
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)


@pytest.mark.parametrize("name", DATACLASSES)
def test_options_derive_from_one_another_as_torch_s_do(name: str) -> None:
    ours, theirs = ours_and_torch_s(name)

    def options_among(bases: tuple[type, ...]) -> list[str]:
        return [base.__name__ for base in bases if base.__name__ in NAMES]

    assert options_among(ours.__mro__) == options_among(theirs.__mro__)


@pytest.mark.parametrize("name", DATACLASSES)
def test_options_print_as_torch_s_do(name: str) -> None:
    ours, theirs = ours_and_torch_s(name)
    own = "".join(f", {field}=None" for field in OURS.get(name, []))
    assert repr(instance(ours, api)).replace(own, "") == repr(instance(theirs, torch_api))


# --- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATACLASSES)
def test_options_compare_by_value_and_survive_copying_and_pickling(name: str) -> None:
    option = instance(getattr(api, name), api)
    assert option == instance(type(option), api)
    for twin in (copy.copy(option), copy.deepcopy(option), pickle.loads(pickle.dumps(option))):
        assert twin == option and twin is not option


def test_options_of_different_kinds_are_not_equal() -> None:
    assert StateDictConfig() != FullStateDictConfig()
    assert MixedPrecision() != MixedPrecision(param_dtype=torch.float16)


def test_options_can_be_changed() -> None:
    precision = MixedPrecision()
    precision.param_dtype = torch.bfloat16
    precision.param_dtype = None
    precision.cast_forward_inputs = True
    assert precision == MixedPrecision(cast_forward_inputs=True)
    config = FullStateDictConfig()
    config.offload_to_cpu = config.rank0_only = True
    assert config == FullStateDictConfig(True, True)
    made = StateDictSettings(*settings(api))
    made.state_dict_type = StateDictType.SHARDED_STATE_DICT
    made.state_dict_config = ShardedStateDictConfig()
    assert made.state_dict_type is StateDictType.SHARDED_STATE_DICT


def test_the_local_optimizer_config_alone_stays_on_the_device() -> None:
    assert not LocalOptimStateDictConfig().offload_to_cpu
    assert OptimStateDictConfig().offload_to_cpu and FullOptimStateDictConfig().offload_to_cpu


@pytest.mark.parametrize(
    "classes", [(), [], {nn.BatchNorm1d}, (nn.LayerNorm, nn.Embedding)], ids=repr
)
def test_classes_without_mixed_precision_come_in_any_collection(classes: Any) -> None:
    assert MixedPrecision(_module_classes_to_ignore=classes)._module_classes_to_ignore is classes


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATACLASSES)
def test_every_field_refuses_what_makes_no_sense_when_made_and_when_changed(name: str) -> None:
    option = instance(getattr(api, name), api)
    before = copy.copy(option)
    for field in dataclasses.fields(option):
        with pytest.raises(ConfigurationError, match=field.name):
            dataclasses.replace(option, **{field.name: "3.5"})
        with pytest.raises(ConfigurationError, match=field.name):
            setattr(option, field.name, "3.5")
    assert option == before


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "buffer_dtype", "wire_dtype"])
@pytest.mark.parametrize("wrong", [torch.int32, torch.bool, "bfloat16", float], ids=repr)
def test_a_dtype_must_be_floating_point(field: str, wrong: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MixedPrecision(**{field: wrong})
    assert str(caught.value) == (
        f"{field} must be a floating-point torch.dtype or None, got {wrong!r}. "
        "Use for example torch.bfloat16."
    )


@pytest.mark.parametrize("wrong", ["yes", b"", torch.ones(2)], ids=repr)
def test_a_switch_is_a_yes_or_no(wrong: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CPUOffload(wrong)
    assert str(caught.value) == f"offload_params must be True or False, got {wrong!r}."


@pytest.mark.parametrize("wrong", [None, nn.LayerNorm, "LayerNorm"], ids=repr)
def test_classes_to_ignore_are_a_collection(wrong: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MixedPrecision(_module_classes_to_ignore=wrong)
    assert str(caught.value) == (
        f"_module_classes_to_ignore must be a collection of classes, got {wrong!r}. "
        "Use for example (torch.nn.LayerNorm,), or () for none."
    )


def test_classes_to_ignore_are_classes() -> None:
    mixed: Any = [nn.LayerNorm, "Linear", 3]
    with pytest.raises(ConfigurationError) as caught:
        MixedPrecision(_module_classes_to_ignore=mixed)
    assert str(caught.value) == (
        "_module_classes_to_ignore must hold only classes, got also ['Linear', 3]. "
        "Use for example torch.nn.LayerNorm."
    )


def test_torch_s_own_values_are_named_as_such() -> None:
    with pytest.raises(ConfigurationError) as caught:
        StateDictSettings(*settings(torch_api))
    assert str(caught.value) == (
        "state_dict_type must be an instance of fullshard.StateDictType, got <StateDictType.FULL_STATE_DICT: 1> "
        "(torch.distributed.fsdp.api.StateDictType). Import it from fullshard."
    )


def test_an_optimizer_s_config_is_not_a_model_s() -> None:
    kind, model, optimizer = settings(api)
    with pytest.raises(ConfigurationError, match=r"^state_dict_config must be"):
        StateDictSettings(kind, optimizer, optimizer)
    with pytest.raises(ConfigurationError, match=r"^optim_state_dict_config must be"):
        StateDictSettings(kind, model, model)
