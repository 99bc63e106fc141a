"""`MixedPrecisionPolicy(param_dtype_override_fn=)`: parameters of one group that compute in different dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import (
    ConfigurationError,
    DivergenceError,
    MixedPrecisionPolicy,
    OptionTypeError,
    fully_shard,
)
from fullshard.fsdp2.group_plan import plan_groups
from tests.helpers.compare import assert_equal
from tests.helpers.training import FULLSHARD, TORCH, gradients, of_both, weights
from tests.helpers.wrapped_nets import library

BF16, FP32 = torch.bfloat16, torch.float32
TORCH_HAS_IT = "param_dtype_override_fn" in library(TORCH).MixedPrecisionPolicy.__dataclass_fields__


class Layer(nn.Module):
    """A product in one dtype, and a scale in another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.scale = nn.Parameter(torch.randn(5))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.weight.dtype, self.scale.dtype]
        return (x @ self.weight).to(self.scale.dtype) * self.scale


def vectors_in_fp32(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.ndim == 1 else None


def sharded(lib: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    for module in (*model, model):
        lib.fully_shard(module, mp_policy=lib.MixedPrecisionPolicy(BF16, **options))
    return model


def train(api: str, reduce_dtype: torch.dtype | None) -> list[Any]:
    model = sharded(
        library(api), reduce_dtype=reduce_dtype, param_dtype_override_fn=vectors_in_fp32
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, record = torch.Generator().manual_seed(dist.get_rank()), list[Any]()
    for _ in range(2):
        loss = model(torch.randn(4, 5, generator=generator)).float().square().mean()
        loss.backward()
        assert model[0].seen == [BF16, BF16, FP32]
        record += [loss.detach(), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*record, weights(model)]


def compare(reduce_dtype: torch.dtype | None) -> None:
    if TORCH_HAS_IT:
        assert_equal(*of_both(train, reduce_dtype))
    else:
        train(FULLSHARD, reduce_dtype)


@pytest.mark.parametrize("reduce_dtype", [None, BF16, FP32], ids=str)
def test_parameters_of_a_group_compute_in_their_dtypes_as_with_torch(world, reduce_dtype) -> None:
    world(2).run(compare, reduce_dtype)


def asked_for() -> list[tuple[Any, ...]]:
    seen = list[tuple[Any, ...]]()

    def choose(param: nn.Parameter) -> None:
        seen.append((type(param), tuple(param.shape)))

    layer = Layer()
    layer.register_parameter("index", nn.Parameter(torch.zeros(2, dtype=torch.int64), False))
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=choose))
    for _ in range(2):
        layer(torch.zeros(1, 5)).sum().backward()
    return seen


def test_the_function_is_asked_once_for_each_parameter_that_has_a_choice(world) -> None:
    expected = [(nn.Parameter, (5, 5)), (nn.Parameter, (5,))]
    assert world(2).run(asked_for) == [expected, expected]


def wrong_answers() -> None:
    layer = Layer()
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda _: torch.float16)
    with pytest.raises(ConfigurationError) as refused:
        fully_shard(layer, mp_policy=policy)
    for each in ("weight, of torch.float32: torch.float16", "scale, of torch.float32"):
        assert each in str(refused.value)
    assert type(layer) is Layer, "nothing was changed"
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda _: BF16))


def test_other_answers_are_refused_before_anything_is_changed(world) -> None:
    world(2).run(wrong_answers)
    with pytest.raises(OptionTypeError, match="a function of a parameter"):
        MixedPrecisionPolicy(param_dtype_override_fn=BF16)  # type: ignore[arg-type]


def choose_by_rank() -> None:
    choice = FP32 if dist.get_rank() else None
    layer = Layer()
    fully_shard(
        layer, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda _: choice)
    )
    with pytest.raises(DivergenceError, match=r"param_dtype of .*weight"):
        layer(torch.zeros(1, 5))


def test_ranks_that_choose_differently_are_told_so(world) -> None:
    world(2).run(choose_by_rank)


def test_a_plan_counts_the_bytes_of_each_dtype(world) -> None:
    world(1).run(planned_bytes)


def planned_bytes() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    half, mixed = (
        plan_groups(model, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=choose))
        for choose in (None, vectors_in_fp32)
    )
    extra = [b.num_bytes - a.num_bytes for a, b in zip(half.groups, mixed.groups, strict=True)]
    assert sum(extra) == 4 * 64 * 2
