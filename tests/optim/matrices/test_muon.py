"""`Muon` on shards computes what it computes on whole matrices, in one process and written down anew here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard.checkpoint
from fullshard import ConfigurationError, FullyShardedDataParallel, UnsupportedError, fully_shard
from fullshard.optim import Muon
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.groups import alone

STEPS = 20
FEW = 6
"""Steps where the path to the shards is tested, not the long run."""


class Layer(nn.Module):
    """Matrices with fewer rows than ranks, uneven ones, and a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.experts = nn.Parameter(torch.randn(3, 9, 7) / 3)
        self.down = nn.Linear(7, 6, bias=False)
        self.gate = nn.Linear(6, 3)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        found = torch.einsum("bi,eij->bej", torch.tanh(self.up(x)), self.experts)
        return self.norm(x + self.down((gates.unsqueeze(-1) * found).sum(1)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.narrow = nn.Linear(6, 2, bias=False)  # two rows: some ranks hold nothing
        self.widen = nn.Linear(2, 6)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + self.widen(self.narrow(x)))


MATRICES = ("experts", "up.weight", "down.weight", "gate.weight", "narrow.weight", "widen.weight")


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(11, (2, 16), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens[0]), tokens[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(model: Any) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): param.detach().clone()
                for name, param in model.named_parameters()
            }
    return {
        name: param.detach().full_tensor().clone()
        if isinstance(param, DTensor)
        else param.detach().clone()
        for name, param in model.named_parameters()
    }


# --- one process ------------------------------------------------------------------------------------


def polar(matrix: Tensor) -> Tensor:
    x = matrix / matrix.norm().clamp(min=1e-7)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if transposed else x


class Reference(NamedTuple):
    """What one process has computed."""

    losses: list[float]
    after: dict[int, dict[str, Tensor]]
    """The parameters after FEW steps and after all."""


def reference() -> Reference:
    """Train one process with Muon in a few lines, one matrix after the other, and torch's AdamW."""
    model = Model()
    named = dict(model.named_parameters())
    matrices = {name: param for name, param in named.items() if name.endswith(MATRICES)}
    others = [param for name, param in named.items() if name not in matrices]
    adamw = torch.optim.AdamW(others, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))
    averages = {name: torch.zeros_like(param) for name, param in matrices.items()}
    after, losses = {}, []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, param in matrices.items():
                averages[name] = 0.95 * averages[name] + 0.05 * param.grad
                update = 0.05 * param.grad + 0.95 * averages[name]
                each = update if update.ndim == 3 else update[None]
                update = torch.stack([polar(matrix) for matrix in each]).view(update.shape)
                scale = 0.2 * math.sqrt(max(update.shape[-2:]))
                param.mul_(1 - 0.02 * 0.1).sub_(0.02 * scale * update)
        adamw.step()
        model.zero_grad()
        if step + 1 in (FEW, STEPS):
            after[step + 1] = {name: param.detach().clone() for name, param in named.items()}
    return Reference(losses, after)


@pytest.fixture(scope="module")
def expected() -> Reference:
    return reference()


# --- many -------------------------------------------------------------------------------------------


def sharded(kind: str) -> nn.Module:
    model = Model()
    if kind == "wrapper":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    mesh = None
    if kind == "replicas":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "tensor parallel":
        axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = axes["dp"]
        plan = {"narrow": ColwiseParallel(), "widen": RowwiseParallel()}
        parallelize_module(model, axes["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(kind: str, steps: int, **options: Any) -> dict[str, Tensor]:
    model = sharded(kind)
    optimizer = Muon(model, lr=0.02, **options)
    chosen = [len(group["params"]) for group in optimizer.param_groups if group["use_muon"]]
    assert chosen == [2 * 4 + 2], chosen
    train(model, optimizer, range(steps))
    return full(model)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = ((found[name] - value).norm() / value.norm()).item()
        assert error <= limit, (name, error)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("shards", 1),
        ("shards", 2),
        ("shards", 3),
        ("shards", 4),
        ("wrapper", 3),
        ("replicas", 4),
        ("tensor parallel", 4),
    ],
)
def test_it_trains_as_one_process(world, expected, kind: str, ranks: int) -> None:
    steps = FEW if kind == "wrapper" else STEPS
    for found in world(ranks).run(trained, kind, steps, bucket_numel=60):
        assert_near(found, expected.after[steps], 1e-5)


# --- checkpoints ------------------------------------------------------------------------------------


def begun(kind: str, folder: Path, first: int, last: int) -> tuple[list[float], dict[str, Tensor]]:
    """Go on with a run from a checkpoint, if there is one, up to a step; save it there."""
    model = sharded(kind)
    optimizer = Muon(model, lr=0.02)
    if first:
        fullshard.checkpoint.load(folder / str(first), model=model, optimizer=optimizer)
    losses = train(model, optimizer, range(first, last))
    fullshard.checkpoint.save(folder / str(last), model=model, optimizer=optimizer)
    return losses, full(model)


def test_a_run_goes_on_over_other_ranks_and_by_the_other_api(world, expected, tmp_path) -> None:
    for kind, ranks, first in (("shards", 2, 0), ("wrapper", 3, 2), ("replicas", 4, 4)):
        for losses, found in world(ranks).run(begun, kind, tmp_path, first, first + 2):
            assert losses == pytest.approx(expected.losses[first : first + 2], rel=1e-5)
            if first + 2 == FEW:
                assert_near(found, expected.after[FEW], 1e-5)


def saved_by_torch(folder: Path) -> dict[str, Tensor]:
    model = sharded("shards")
    optimizer = Muon(model, lr=0.02)
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)
    return {}


def loaded_by_torch(folder: Path) -> dict[str, Tensor]:
    model = sharded("shards")
    optimizer = Muon(model, lr=0.02)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, range(3, FEW))
    return full(model)


def test_torch_s_checkpoints_hold_it_too(world, expected, tmp_path: Path) -> None:
    world(2).run(saved_by_torch, tmp_path)
    for found in world(3).run(loaded_by_torch, tmp_path):
        assert_near(found, expected.after[FEW], 1e-5)


# --- what is not as usual -------------------------------------------------------------------------


def unusual() -> dict[str, Any]:
    """Parameters without gradient, gradients of zeros and NaN; what a rank finds afterwards."""
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = Muon(model, lr=0.02, dtype=torch.bfloat16)
    before = full(model)
    loss_of(model, 0).backward()
    up, down = model.layers[0].up.weight, model.layers[0].down.weight
    model.narrow.weight.grad = None
    up.grad.to_local().zero_()
    if dist.get_rank() == 0:
        down.grad.to_local().fill_(float("nan"))
    optimizer.step()
    after = full(model)
    return {
        "changed": {name for name in before if not torch.equal(before[name], after[name])},
        "NaN": {name for name in after if after[name].isnan().any()},
        "all NaN": bool(after["layers.0.down.weight"].isnan().all()),
        "only decayed": torch.allclose(
            after["layers.0.up.weight"], before["layers.0.up.weight"] * (1 - 0.02 * 0.1)
        ),
        "state": {
            name for name, param in model.named_parameters() if not optimizer.state.get(param)
        },
    }


def test_missing_zero_and_nan_gradients_do_what_is_documented_on_every_rank(world) -> None:
    for found in world(3).run(unusual):
        assert found["NaN"] == {"layers.0.down.weight"}
        assert found["all NaN"]
        assert found["only decayed"]
        assert found["state"] == {"narrow.weight"}
        assert found["changed"] == set(dict(Model().named_parameters())) - {"narrow.weight"}


def refusals() -> list[str]:
    found = []

    def refuse(make: Any, kind: type[Exception]) -> None:
        with pytest.raises(kind) as caught:
            make()
        found.append(str(caught.value))

    convolution = fully_shard(nn.Conv2d(3, 4, 2))
    complex_ = fully_shard(nn.Linear(3, 4, dtype=torch.complex64))
    refuse(lambda: Muon(convolution.parameters()), UnsupportedError)
    refuse(lambda: Muon(complex_), UnsupportedError)
    flat = FullyShardedDataParallel(nn.Linear(3, 4), device_id=torch.device("cpu"))
    refuse(lambda: Muon(flat), UnsupportedError)
    refuse(lambda: Muon(nn.Linear(3, 4), lr=-1, momentum=1), ConfigurationError)
    refuse(lambda: Muon(nn.Linear(3, 4), adjust_lr_fn="other"), ConfigurationError)
    later = Muon(nn.Linear(3, 4))
    refuse(lambda: later.add_param_group({"params": convolution.parameters()}), UnsupportedError)
    assert len(later.param_groups) == 2
    embedding = nn.Embedding(4, 3, sparse=True)
    sparse = Muon(embedding)
    embedding(torch.tensor([1])).sum().backward()
    refuse(sparse.step, UnsupportedError)
    wrong = {"params": [nn.Parameter(torch.ones(2, 2))], "adjust_lr_fn": "orignal", "ns_steps": 0}
    refuse(lambda: Muon([wrong]), ConfigurationError)
    refuse(lambda: later.add_param_group(wrong), ConfigurationError)
    assert len(later.param_groups) == 2
    linear: Any = fully_shard(nn.Linear(3, 4))
    adamw = torch.optim.AdamW([linear.weight])
    other = Muon([linear.weight])
    linear(torch.ones(1, 3)).sum().backward()
    adamw.step()
    other.load_state_dict(adamw.state_dict())
    before = full(linear)
    refuse(other.step, ConfigurationError)
    assert_near(full(linear), before, 0.0)
    other = Muon([linear.weight])
    other.step()
    other.param_groups[0]["use_muon"] = False
    refuse(other.step, ConfigurationError)
    changed = Muon(linear)
    changed.param_groups[1]["use_muon"] = True
    refuse(changed.step, UnsupportedError)
    return found


def test_what_it_cannot_update_is_refused_with_all_names_on_every_rank(world) -> None:
    first, second = world(2).run(refusals)
    assert first == second
    convolution, complex_, flat, numbers, scale, later, sparse, *others = first
    *groups, of_adamw, switched, changed = others
    assert later == convolution
    assert "weight: shape (4, 3, 2, 2)" in convolution and "bias: shape (4,)" in convolution
    assert '"use_muon": False' in convolution
    assert "weight: shape (4, 3)" in complex_
    assert "use_orig_params=True" in flat
    assert "lr must be at least 0" in numbers and "momentum must be" in numbers
    assert "'other'" in scale
    assert "sparse=False" in sparse
    for text in groups:
        assert "'orignal'" in text and "ns_steps must be" in text
    assert "group 0, parameter 0 of shape (4, 3): step, exp_avg, exp_avg_sq" in of_adamw
    assert "group 0, parameter 0 of shape (4, 3): momentum_buffer" in switched
    assert "bias: shape (4,)" in changed


def test_convolutions_embeddings_and_output_layers_are_adamw_s() -> None:
    model = Model()
    model.convolution = nn.Conv1d(2, 3, 2)
    optimizer = Muon(model)
    names = {id(param): name for name, param in model.named_parameters()}
    chosen = {names[id(p)] for g in optimizer.param_groups if g["use_muon"] for p in g["params"]}
    assert chosen == {name for name in names.values() if name.endswith(MATRICES)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "weight_decay": 0.5},
        {"momentum": 0.5, "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 3.0},
    ],
    ids=str,
)
def test_options_and_state_dicts_are_those_of_torch_s_muon(options: dict[str, Any]) -> None:
    """One goes on where the other was. Torch's rounds to bf16 at other places."""
    options = {"lr": 1e-2, "adjust_lr_fn": None, **options}
    makers = {
        "torch": lambda params: torch.optim.Muon(params, **options),
        "ours": lambda params: Muon(params, dtype=torch.bfloat16, **options),
    }
    found = {}
    for first, second in (("torch", "torch"), ("torch", "ours"), ("ours", "torch")):
        model = Model()
        params = [p for n, p in model.named_parameters() if n.endswith(MATRICES) and p.ndim == 2]
        saving, going_on = makers[first](params), makers[second](params)
        train(model, saving, range(2))
        going_on.load_state_dict(saving.state_dict())
        train(model, going_on, range(2, 4))
        found[first, second] = {n: p - Model().get_parameter(n) for n, p in full(model).items()}
    expected = found.pop(("torch", "torch"))
    for changes in found.values():
        for name, change in changes.items():
            assert (change - expected[name]).norm() <= 0.05 * expected[name].norm(), name


def test_the_learning_rate_may_be_a_tensor_and_the_scale_the_original_one() -> None:
    found = []
    for lr in (0.02, torch.tensor(0.02)):
        model = Model()
        train(model, Muon(model, lr=lr, adjust_lr_fn="original", nesterov=False), range(2))
        found.append(full(model))
    assert_near(found[0], found[1], 1e-6)
    with alone():
        linear: Any = fully_shard(nn.Linear(3, 12, bias=False))
        before = full(linear)["weight"]
        linear(torch.eye(3)).square().sum().backward()
        gradient = linear.weight.grad.full_tensor()
        Muon(linear, lr=1.0, weight_decay=0, adjust_lr_fn="original", nesterov=False).step()
        assert torch.allclose(
            full(linear)["weight"], before - 2 * polar(0.05 * gradient), atol=1e-5
        )
