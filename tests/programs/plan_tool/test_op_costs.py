"""The costs of operations: flops are those that torch counts, bytes are those of the tensors, and nothing is overlooked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fullshard.optim import Muon
from fullshard.programs.plan_tool import recording
from fullshard.programs.plan_tool.op_costs import is_listed, kernel_of
from fullshard.programs.plan_tool.program import Kernel
from fullshard.programs.plan_tool.step_program import record_step
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.decoder import Decoder
from fullshard.programs.train.decoder_shape import DecoderShape
from fullshard.programs.train.model_source import open_model
from fullshard.torch_border import Operator
from tests.programs.plan_tool.watched_kernels import WatchedKernels

aten = torch.ops.aten


def cost(operator: Operator, *args: Any, **kwargs: Any) -> Kernel | None:
    return kernel_of(operator, args, kwargs, operator(*args, **kwargs))


def known_cost(operator: Operator, *args: Any, **kwargs: Any) -> Kernel:
    found = cost(operator, *args, **kwargs)
    assert found is not None
    assert is_listed(operator)
    return found


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def tokens(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device="meta")


class Picture(nn.Module):
    """Convolutions, one of them transposed, and what goes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.norm = nn.BatchNorm2d(16)
        self.mix = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.widen = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.gelu(self.mix(self.norm(self.patches(x)))), 2)
        found: Tensor = self.head(self.layer(self.widen(x).flatten(2).mT).mean(1))
        return found


class Experts(nn.Module):
    """Each token goes to two of four experts, by sorting and by adding up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.empty(4, 8, 32))

    def forward(self, given: Tensor) -> Tensor:
        x = self.embedding(given).flatten(0, 1)
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        rows = x[order // 2] * weights.flatten()[order].unsqueeze(-1)
        counts = F.one_hot(chosen.flatten(), 4).sum(0).cumsum(0)
        out = torch.bmm(rows.view(4, -1, 8), self.experts).flatten(0, 1) * counts.sum()
        return x.new_zeros(len(x), 32).index_add(0, order // 2, out)


def decoder() -> nn.Module:
    shape = DecoderShape(vocabulary=64, width=32, layers=2, heads=4)
    return Decoder(shape).to(torch.bfloat16)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def step(model: nn.Module, given: Tensor, optimizers: Callable[[nn.Module], list[Any]]) -> None:
    """Train one step."""
    found = model(given)
    scores = getattr(found, "logits", found).flatten(0, -2).float()
    F.cross_entropy(scores, tokens(len(scores))).backward()
    for each in optimizers(model):
        each.step()


def adamw(model: nn.Module) -> list[Any]:
    params = [each for each in model.parameters() if each.grad is not None]
    return [torch.optim.AdamW(params, foreach=True), torch.optim.AdamW(params, foreach=False)]


def sgd(model: nn.Module) -> list[Any]:
    kinds = ({"foreach": True}, {"foreach": False})
    return [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, **kind) for kind in kinds]


def muon(model: nn.Module) -> list[Any]:
    return [Muon(model)]


@pytest.mark.parametrize(
    ("build", "given", "optimizers"),
    [
        (decoder, (2, 16), muon),
        (llama, (2, 16), adamw),
        (Picture, (2, 3, 32, 32), sgd),
        (Experts, (2, 16), adamw),
    ],
)
def test_flops_are_those_that_torch_counts_and_no_operation_is_overlooked(
    build: Any, given: Any, optimizers: Any
) -> None:
    with torch.device("meta"):
        model = build()
    inputs = meta(*given, dtype=torch.float32) if build is Picture else tokens(*given)
    with FlopCounterMode(display=False) as counter, WatchedKernels() as watch:
        step(model, inputs, optimizers)
    assert sum(each.flops for each in watch.kernels) == counter.get_total_flops() > 0
    assert not watch.unlisted


def test_operations_of_the_engine_are_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Operator] = set()

    def noted(operator: Operator, *call: Any) -> Kernel | None:
        seen.add(operator)
        return kernel_of(operator, *call)

    monkeypatch.setattr(recording, "kernel_of", noted)
    monkeypatch.setattr(recording, "_KERNELS", {})
    sizes = ["model.layers=2", "model.width=32", "model.heads=2", "data.context=16"]
    choices = ["optimizer.name=muon", "optimizer.ema=0.9", "sharding.replicas=2"]
    config = read_config(None, [*sizes, *choices, "train.batch=16", "train.accumulate=2"])
    record_step(config, 8, open_model(config))
    assert len(seen) > 20
    assert not [operator for operator in seen if not is_listed(operator)]


def test_products_know_their_shape() -> None:
    a, b, bias = meta(64, 32), meta(32, 16), meta(16)
    product = known_cost(aten.mm.default, a, b)
    assert product == Kernel(
        "aten.mm", "matmul", "bfloat16", 2 * 64 * 32 * 16, 2 * (64 * 32 + 32 * 16 + 64 * 16),
        (1, 64, 16, 32),
    )  # fmt: skip
    assert known_cost(aten.addmm.default, bias, a, b).nbytes == product.nbytes + 2 * 16
    assert known_cost(aten.bmm.default, meta(3, 4, 5), meta(3, 5, 6)).shape == (3, 4, 6, 5)
    grouped = known_cost(aten._grouped_mm.default, meta(64, 32), meta(4, 32, 16), tokens(4).int())
    assert (grouped.shape, grouped.flops) == ((4, 16, 16, 32), 2 * 64 * 32 * 16)


def test_groups_of_a_convolution_are_products_of_their_own() -> None:
    x, weight, flags = meta(2, 16, 8, 8), meta(32, 4, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0])
    forward = known_cost(aten.convolution.default, x, weight, None, *flags, 4)
    assert forward.shape == (4, 2 * 8 * 8, 8, 4 * 3 * 3)
    assert forward.flops == 2 * 4 * 128 * 8 * 36
    # torch counts the gradient of the weight as if there were no groups.
    gradients = (meta(2, 32, 8, 8), x, weight, None, *flags, 4, [True, True, False])
    backward = known_cost(aten.convolution_backward.default, *gradients)
    assert backward.flops == 2 * forward.flops


def test_attention_counts_half_where_it_is_causal_and_all_heads_of_backward() -> None:
    query, key = meta(2, 8, 200, 48), meta(2, 2, 200, 48)
    whole, causal = (
        known_cost(aten._scaled_dot_product_flash_attention.default, query, key, key, 0.0, flag)
        for flag in (False, True)
    )
    assert whole.kind == "attention"
    assert whole.shape == (16, 200, 200, 48)
    assert whole.flops == 2 * causal.flops == 4 * 16 * 200 * 200 * 48
    assert whole.nbytes == query.nbytes * 2 + key.nbytes + 4 * 16 * 200 + 24 + 0
    out, sums = meta(2, 8, 200, 48), meta(2, 8, 200, dtype=torch.float32)
    state = torch.empty(2, dtype=torch.uint64, device="meta")
    backward = aten._scaled_dot_product_flash_attention_backward.default
    arguments = (None, None, 200, 200, 0.0, False, state, state)
    found = known_cost(backward, out, query, key, key, out, sums, *arguments)
    assert found.flops * 2 == whole.flops * 5
    # The gradient of query in float32, in tiles of 128 rows and 32 columns; those of key and value for each of the heads.
    assert found.scratch == 4 * 16 * 256 * (64 + 1) + 2 * 16 * 200 * 96


def test_what_only_looks_at_memory_starts_no_kernel() -> None:
    x = meta(4, 6)
    for operator, args in (
        (aten.t.default, (x,)),
        (aten.view.default, (x, [24])),
        (aten.detach.default, (x,)),
        (aten.split.Tensor, (x, 2)),
        (aten.expand.default, (meta(1, 6), [4, 6])),
        (aten.as_strided.default, (x, [2], [1])),
        (aten._unsafe_view.default, (x, [24])),
        (aten.empty_like.default, (x,)),
        (aten.add.Tensor, (meta(0, 6), meta(0, 6))),
        (aten.add.Tensor, (torch.ones(2), torch.ones(2))),
    ):
        assert cost(operator, *args) is None, operator


def test_traffic_counts_each_region_once_and_what_changes_in_place_twice() -> None:
    x, y, small = meta(64, 32), meta(64, 32), meta(1, 32)
    one = x.nbytes
    assert known_cost(aten.add.Tensor, x, y).nbytes == 3 * one
    assert known_cost(aten.mul.Tensor, x, x).nbytes == 2 * one
    assert known_cost(aten.mul.Tensor, x, x.detach()).nbytes == 2 * one
    assert known_cost(aten.add_.Tensor, x, y).nbytes == 3 * one
    assert known_cost(aten.mul_.Tensor, x, x).nbytes == 2 * one
    assert known_cost(aten.add.Tensor, x, small.expand(64, 32)).nbytes == 2 * one + small.nbytes
    assert known_cost(aten.copy_.default, x, y).nbytes == 2 * one
    assert known_cost(aten.zero_.default, x).nbytes == one
    assert known_cost(aten.zeros_like.default, x).nbytes == one
    assert known_cost(aten._to_copy.default, x, dtype=torch.float32).nbytes == 3 * one
    assert known_cost(aten.cat.default, [x, y]).nbytes == 4 * one
    assert known_cost(aten.add.out, x, y, out=meta(64, 32)).nbytes == 3 * one
    parts = [meta(64, 16), meta(64, 16)]
    assert known_cost(aten.split_with_sizes_copy.out, x, [16, 16], 1, out=parts).nbytes == 2 * one
    assert known_cost(aten.where.self, x.bool(), x, y).dtype == "bfloat16"


def test_operations_on_many_tensors_start_few_kernels() -> None:
    many = [meta(100) for _ in range(130)]
    found = known_cost(aten._foreach_mul_.Scalar, many, 2.0)
    assert (found.launches, found.nbytes) == (2, 2 * 130 * 200)
    assert known_cost(aten._foreach_copy_.default, many, many).launches == 3
    large = [meta(65536 * 641)]
    assert known_cost(aten._foreach_mul_.Scalar, large, 2.0).launches == 3
    norms = known_cost(aten._foreach_norm.Scalar, large, 2.0)
    assert norms.scratch == 4 * 641


def test_a_fused_optimizer_does_not_write_gradients_unless_it_scales_them() -> None:
    lists = [[meta(10, dtype=torch.float32)] for _ in range(4)]
    numbers: Any = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    counts = [meta(dtype=torch.float32)]
    fused = aten._fused_adamw_.default
    plain = known_cost(fused, *lists, [], counts, **numbers, **flags)
    assert plain.nbytes == 7 * 40 + 4
    scale = meta(dtype=torch.float32)
    scaled = known_cost(fused, *lists, [], counts, **numbers, **flags, grad_scale=scale)
    assert scaled.nbytes == 8 * 40 + 4 + 4


def test_an_embedding_touches_rows_and_its_gradient_the_whole_table() -> None:
    table, given = meta(1000, 64), tokens(2, 50)
    assert known_cost(aten.embedding.default, table, given).nbytes == 2 * 100 * 128 + 800
    backward = aten.embedding_dense_backward.default
    few = known_cost(backward, meta(2, 50, 64), given, 1000, -1, False)
    assert few.nbytes == table.nbytes + 3 * 100 * 128 + 800
    assert few.scratch == 0
    # Sorted: a float32 row for each of the 1,000 entries, and one for every ten tokens.
    many = known_cost(backward, meta(2, 2000, 64), tokens(2, 2000), 1000, -1, False)
    assert many.scratch == 8 * (5 * 4000 + 2 * 1000 + 1400) + 4 * 1400 * 64


def test_a_loss_reads_one_score_per_row_and_its_gradient_is_zero_elsewhere() -> None:
    scores, targets = meta(100, 5000, dtype=torch.float32), tokens(100)
    weight = meta(dtype=torch.float32)
    forward = known_cost(aten.nll_loss_forward.default, scores, targets, None, 1, -100)
    assert forward.nbytes == 100 * (32 + 8)
    backward = aten.nll_loss_backward.default
    found = known_cost(backward, weight, scores, targets, None, 1, -100, weight)
    assert found.nbytes == scores.nbytes + forward.nbytes
    assert found.launches == 2


def test_an_operator_that_nobody_thought_of_counts_like_a_plain_one_and_says_so() -> None:
    x = meta(8, 8, dtype=torch.float32)
    found = cost(aten.linalg_inv_ex.default, x)
    assert found is not None
    assert found.nbytes == 2 * x.nbytes + 4
    assert not is_listed(aten.linalg_inv_ex.default)
