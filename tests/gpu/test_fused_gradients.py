"""Gradients written once on a GPU: as exact as products in fp32, in fewer kernels; see tests/features/fused_gradients/test_fused_linear.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.engine import reduction
from fullshard.storage.reduce_buffer import ReduceBuffer
from tests.helpers.fake import fake_world

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reduce_scatter_that_reduces")]

WIDTH, WORLD = 256, 4
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class OnTwoStreams(nn.Module):
    """Three layers read one tensor. One runs on another stream; in backward the others are late."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.stream = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        current, y = torch.cuda.current_stream(), x * 2
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            key = self.key(y)
        current.wait_stream(self.stream)
        query, value = self.query(y), self.value(y)
        query.register_hook(lambda _: torch.cuda._sleep(20_000_000))  # type: ignore[no-untyped-call]
        return query * key + value  # type: ignore[no-any-return]


def make_model(
    fuse: bool,
    dtype: torch.dtype = BF16,
    reduce_dtype: torch.dtype = FP32,
    *,
    is_compiled: bool = False,
) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(Block() for _ in range(3)))
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cuda", (WORLD,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype),
        "fuse_gradients": fuse,
    }
    for block in model:
        if is_compiled:
            block.compile(fullgraph=True)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batches(number: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(4, 64, WIDTH, device="cuda", generator=generator) for _ in range(number)]


def gradients(model: Any, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Accumulate over the inputs, and reduce with the last one."""
    for number, x in enumerate(inputs, 1):
        model.set_requires_gradient_sync(number == len(inputs))
        model(x).float().pow(2).mean().backward()
    return {name: param.grad.to_local().clone() for name, param in model.named_parameters()}


def exact_gradients(model: Any, inputs: list[Tensor]) -> dict[str, Tensor]:
    """The products of what the model computes with, in double precision: outputs' gradients and inputs of linear layers."""
    sums: dict[str, Tensor] = {}
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            x = args[0].detach().flatten(0, -2).double()

            def arrives(gradient: Tensor) -> None:
                product = gradient.flatten(0, -2).double().t() @ x
                sums[name] = sums[name] + product if name in sums else product

            output.register_hook(arrives)

        handles.append(module.register_forward_hook(after))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            watch(f"{name}.weight", module)
    gradients(model, inputs)
    for handle in handles:
        handle.remove()
    # The stand-in for the reduce-scatter sums the pieces of all ranks, and the average divides by their number, or not:
    # either way by a power of two, which is exact.
    return {name: total.view(WORLD, -1).sum(0) for name, total in sums.items()}


def distance(found: Tensor, exact: Tensor) -> float:
    """The relative error, whatever power of two both differ by."""
    found = found.double().flatten()
    scale = 2.0 ** torch.log2(exact.norm() / found.norm()).round()
    return float((found * scale - exact).norm() / exact.norm())


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_written_gradients_are_closer_to_exact_products(
    dtype: torch.dtype, microbatches: int
) -> None:
    inputs = batches(microbatches)
    with fake_world(WORLD):
        exact = exact_gradients(make_model(False, dtype), inputs)
        ordinary = gradients(make_model(False, dtype), inputs)
        model = make_model(True, dtype)
        written = gradients(model, inputs)
        fused = [name for name, reason in model.fused_gradients().items() if not reason]
    assert len(fused) == 6
    for name in fused:
        before, now = distance(ordinary[name], exact[name]), distance(written[name], exact[name])
        assert now < 2e-5 < before, f"{name}: {now} was {before}"
    for name in written.keys() - set(fused):  # biases
        assert torch.equal(written[name], ordinary[name])


def test_compiled_blocks_write_what_eager_ones_do() -> None:
    inputs = batches(3)
    with fake_world(WORLD):
        eager = gradients(make_model(True), inputs)
        compiled = gradients(make_model(True, is_compiled=True), inputs)
    for name, gradient in compiled.items():
        # Activations are rounded to bf16 elsewhere.
        assert distance(gradient, eager[name].double().flatten()) < 0.02, name


def test_equal_dtypes_give_equal_bits() -> None:
    inputs = batches(1)
    with fake_world(WORLD):
        ordinary = gradients(make_model(False, reduce_dtype=BF16), inputs)
        written = gradients(make_model(True, reduce_dtype=BF16), inputs)
    assert all(torch.equal(written[name], ordinary[name]) for name in ordinary)


def test_layers_on_several_streams_add_nothing_to_each_others_gradients() -> None:
    found = []
    for fuse in (False, True):
        torch.manual_seed(0)
        with fake_world(WORLD), torch.device("cuda"):
            model = nn.Sequential(OnTwoStreams())
            mesh = init_device_mesh("cuda", (WORLD,))
            fully_shard(model[0], mesh=mesh, fuse_gradients=fuse)
            fully_shard(model, mesh=mesh, fuse_gradients=fuse)
            x = batches(1)[0].requires_grad_()
            for _ in range(3):
                model(x).sum().backward()
            torch.cuda.synchronize()
            assert x.grad is not None
            found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_written_gradients_are_not_copied(
    monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    copied: list[int] = []
    fill = reduction.fill

    def count(buffer: ReduceBuffer, gradients: Any, *args: Any) -> None:
        copied.extend(gradient.ndim for gradient in gradients.values())
        fill(buffer, gradients, *args)

    monkeypatch.setattr(reduction, "fill", count)
    with fake_world(WORLD):
        gradients(make_model(True, is_compiled=is_compiled), batches(1))
    # The biases. A compiled layer whose input needs no gradient gives autograd its weight's.
    assert sorted(copied) == [1] * 3 + [2] * is_compiled
