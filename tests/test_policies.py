"""Option values cannot be changed, and wrong ones are refused where they are written."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from fullshard import (
    ConfigurationError,
    CPUOffloadPolicy,
    FullshardError,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptionTypeError,
)
from fullshard.policies import check_type


def test_by_default_nothing_is_cast_but_inputs_would_be() -> None:
    policy = MixedPrecisionPolicy()
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)
    assert policy.cast_forward_inputs is True


def test_arguments_stand_in_torch_s_order() -> None:
    assert MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, torch.float16, False
    ) == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float16,
        cast_forward_inputs=False,
    )


@pytest.mark.parametrize(
    "policy", [MixedPrecisionPolicy(torch.bfloat16), CPUOffloadPolicy()], ids=repr
)
def test_a_policy_cannot_be_changed(policy: Any) -> None:
    for field in dataclasses.fields(policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, None)
    assert {policy: 1}[dataclasses.replace(policy)] == 1


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype", "wire_dtype"])
@pytest.mark.parametrize(
    "wrong", [torch.int32, torch.bool, torch.complex64, "bfloat16", float, torch.ones(1)], ids=repr
)
def test_a_dtype_must_be_floating_point(field: str, wrong: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MixedPrecisionPolicy(**{field: wrong})  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"{field} must be a floating-point torch.dtype or None, got {wrong!r}. "
        "Use for example torch.bfloat16."
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_point_dtypes_are_taken(dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    assert policy.param_dtype is policy.reduce_dtype is policy.output_dtype is dtype


NARROWER = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float32, torch.float64),
]
NOT_NARROWER = [
    (torch.bfloat16, None),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float8_e5m2, torch.float32),
]


@pytest.mark.parametrize("kind", [MixedPrecisionPolicy, MixedPrecision])
@pytest.mark.parametrize(("wire_dtype", "reduce_dtype"), NARROWER, ids=str)
def test_gradients_may_travel_in_a_narrower_dtype_than_they_are_summed_in(
    kind: Any, wire_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    assert kind(reduce_dtype=reduce_dtype, wire_dtype=wire_dtype).wire_dtype is wire_dtype
    assert kind(reduce_dtype=reduce_dtype).wire_dtype is None


@pytest.mark.parametrize("kind", [MixedPrecisionPolicy, MixedPrecision])
@pytest.mark.parametrize(("wire_dtype", "reduce_dtype"), NOT_NARROWER, ids=str)
def test_gradients_do_not_travel_in_any_other_dtype(
    kind: Any, wire_dtype: torch.dtype, reduce_dtype: torch.dtype | None
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        kind(reduce_dtype=reduce_dtype, wire_dtype=wire_dtype)
    assert str(caught.value) == (
        "wire_dtype needs a reduce_dtype that is wider and holds all its values, as gradients are summed in that; "
        f"got wire_dtype={wire_dtype} with reduce_dtype={reduce_dtype}. Allowed are torch.bfloat16: torch.float32 "
        "or torch.float64, torch.float16: torch.float32 or torch.float64, torch.float32: torch.float64. Pass one "
        "of these, or leave wire_dtype out."
    )


@pytest.mark.parametrize("wrong", ["yes", b"", torch.ones(2)], ids=repr)
def test_casting_inputs_is_a_yes_or_no(wrong: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MixedPrecisionPolicy(cast_forward_inputs=wrong)  # type: ignore[arg-type]
    assert str(caught.value) == f"cast_forward_inputs must be True or False, got {wrong!r}."


def test_a_replaced_policy_is_checked_anew() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match="reduce_dtype"):
        dataclasses.replace(policy, reduce_dtype=torch.int8)


def test_wrong_options_can_be_caught_as_value_errors_and_as_ours() -> None:
    with pytest.raises(ValueError):
        MixedPrecisionPolicy(param_dtype=torch.int8)
    with pytest.raises(FullshardError):
        MixedPrecisionPolicy(param_dtype=torch.int8)


def test_offloading_to_the_host_pins_memory_and_is_an_offload_policy() -> None:
    assert isinstance(CPUOffloadPolicy(), OffloadPolicy)
    assert CPUOffloadPolicy().pin_memory is True
    assert CPUOffloadPolicy(pin_memory=False) != CPUOffloadPolicy()
    assert OffloadPolicy() == OffloadPolicy()
    assert OffloadPolicy() != CPUOffloadPolicy()


# --- types of options --------------------------------------------------------------------------------


def test_a_value_of_another_class_is_refused_with_both_classes() -> None:
    check_type("policy", OffloadPolicy(), OffloadPolicy)
    with pytest.raises(OptionTypeError) as caught:
        check_type("policy", 3, OffloadPolicy)
    assert str(caught.value) == (
        "policy must be an instance of fullshard.OffloadPolicy, got 3 (builtins.int)."
    )


def test_a_class_of_the_same_name_is_told_where_ours_is() -> None:
    with pytest.raises(
        OptionTypeError, match=r"\(torch\..*OffloadPolicy\)\. Import it from fullshard\.$"
    ):
        check_type("policy", torch.distributed.fsdp.OffloadPolicy(), OffloadPolicy)


def test_a_long_value_is_described_by_its_class_only() -> None:
    with pytest.raises(OptionTypeError, match=r"got torch\.nn\.modules\.container\.Sequential\.$"):
        check_type("policy", torch.nn.Sequential(torch.nn.Linear(1, 1)), OffloadPolicy)
