"""All of torch.optim on both APIs: it computes what it computes in one process, or is refused by name.

`docs/optimizers.md` says which, and the tests run every entry of its table.
"""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Replicate

from fullshard import (
    FullyShardedDataParallel,
    ShardingStrategy,
    UnsupportedError,
    fully_shard,
    replicate,
)
from fullshard.engine import optimizer_checks
from fullshard.engine.optimizer_checks import RULES
from fullshard.optim import ShardedOptimizer
from fullshard.torch_border import ELEMENTWISE
from tests.helpers.training import all_whole, needs_torch_2_13

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"

COLUMNS = [
    "fully_shard",
    "replicate",
    "wrapper, orig",
    "wrapper, flat",
    "no shard, orig",
    "ShardedOptimizer",
]
"""Of the table, from left to right."""

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def table() -> dict[str, list[str]]:
    """The entries of the page's table: for every optimizer, what is said of it per column."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        for call in re.findall(r"`(\w+\([^`]*\))`", cells[0]):
            rows[call] = cells[1:]
    return rows


def parsed(call: str) -> tuple[type[optim.Optimizer], dict[str, Any]]:
    """`Adam(fused=True)` as a class and its options."""
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    assert isinstance(tree.func, ast.Name)
    options = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
    return getattr(optim, tree.func.id), options


class Net(nn.Module):
    """Rows that do not divide, ranks without any, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return (self.b(self.a(x).tanh()) * self.scale - 1).square().mean()


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def wrapped(net: nn.Module, **options: Any) -> Any:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)


def built(column: str) -> Any:
    net = make_net()
    if column == "replicate":
        return replicate(net)
    if column in ("fully_shard", "ShardedOptimizer"):
        fully_shard(net.a)
        return fully_shard(net)
    options: dict[str, Any] = {"use_orig_params": column.endswith("orig")}
    if column.startswith("no shard"):
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    return wrapped(net, **options) if column else net


def trained(model: Any, column: str, call: str, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank holds of the parameters after training from ``start``."""
    cls, options = parsed(call)
    for name, param in model.named_parameters():
        param.data.copy_(start[name])
    params = list(model.parameters())
    if cls is optim.Muon and "wrapper" not in column:
        params = [param for param in params if param.ndim == 2]
    make: Callable[..., optim.Optimizer] = cls
    if column == "ShardedOptimizer":
        make = partial(ShardedOptimizer, cls)
    optimizer = make(params, lr=0.1, **options)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).double()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        return loss

    if cls is optim.LBFGS:
        optimizer.step(closure)
    else:
        for _ in range(2):
            closure()
            optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def whole(params: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The same, gathered, under the names of the unwrapped model."""
    if not isinstance(model, FullyShardedDataParallel):
        return all_whole(params)
    for name, param in model.named_parameters():
        param.data.copy_(params[name])
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def in_one_process(calls: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    net = make_net()
    start = {name: param.detach().clone() for name, param in net.named_parameters()}
    return {call: trained(net, "", call, start) for call in calls}


def what_happens(column: str, calls: list[str], expected: dict[str, Any]) -> dict[str, str]:
    """What each optimizer does in a column of the table, on this rank."""
    model = built(column)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    found = {}
    for call in calls:
        try:
            params = trained(model, column, call, start)
        except (UnsupportedError, ValueError) as error:
            by_name = call.split("(")[0] in str(error)
            unchanged = all(torch.equal(p, start[n]) for n, p in model.named_parameters())
            found[call] = "refused" if by_name and unchanged else f"refused badly: {error}"
            model.zero_grad()
            continue
        gathered = whole(params, model)
        same = gathered.keys() == expected[call].keys() and all(
            torch.allclose(gathered[name], value, rtol=1e-6, atol=1e-9)
            for name, value in expected[call].items()
        )
        found[call] = "equal" if same else "different"
    return found


def in_columns(columns: list[str], calls: list[str], expected: dict[str, Any]) -> dict[str, Any]:
    return {column: what_happens(column, calls, expected) for column in columns}


@needs_torch_2_13
def test_every_optimizer_does_what_the_table_says(world):
    said = table()
    expected = in_one_process(call for call in said if not call.startswith("SparseAdam"))
    for found in world(2).run(in_columns, COLUMNS, list(said), expected):
        for index, column in enumerate(COLUMNS):
            assert found[column] == {call: cells[index] for call, cells in said.items()}


def test_the_table_has_all_of_torch_optim():
    classes = {
        name
        for name, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, optim.Optimizer)
    }
    assert {call.split("(")[0] for call in table()} == classes - {"Optimizer"}
    assert {cls.__name__ for cls in RULES} == {
        call.split("(")[0] for call, row in table().items() if "refused" in row[:-1]
    }


def test_a_flat_parameter_that_is_whole_is_a_vector_but_no_matrix(world):
    calls = ["LBFGS()", "Adafactor()"]
    expected = in_one_process(calls)
    for found in world(2).run(in_columns, ["no shard, flat"], calls, expected):
        assert found == {"no shard, flat": {"LBFGS()": "equal", "Adafactor()": "refused"}}


def without_checks(calls: list[str], expected: dict[str, Any]) -> list[str]:
    """What becomes of refused optimizers on `fully_shard` and on the wrapper's pieces if nothing refuses them."""
    rules = optimizer_checks.RULES.copy()
    optimizer_checks.RULES.clear()
    optimizer_checks._rule_of.cache_clear()
    try:
        found = []
        for call in calls:
            for column in ("fully_shard", "wrapper, orig"):
                try:
                    found.append(what_happens(column, [call], expected)[call])
                except Exception:
                    found.append("fails")
        return found
    finally:
        optimizer_checks.RULES.update(rules)
        optimizer_checks._rule_of.cache_clear()


def test_what_is_refused_would_fail_in_torch_or_compute_something_else(world):
    # A rule that torch has made needless shows up here.
    calls = ["Adafactor()"]
    expected = in_one_process(calls)
    for found in world(2).run(without_checks, calls, expected):
        assert found == ["fails", "different"]


def types_in_updates() -> list[dict[str, Any]]:
    """What arithmetic and state are made of: as torch is used, after a state was placed otherwise, differentiable."""
    found = []
    module: Any = importlib.import_module("torch.optim.sgd")
    original = module._single_tensor_sgd
    for case in ("", "moved", "differentiable"):
        net = make_net()
        model: Any = fully_shard(net)
        options: dict[str, Any] = {
            "momentum": 0.9,
            "differentiable": bool(case == "differentiable"),
        }
        optimizer = optim.SGD(model.parameters(), lr=0.1, **options)
        model(torch.ones(2, 5).double()).backward()
        if case == "moved":
            for param in model.parameters():
                state = torch.zeros_like(param).redistribute(placements=[Replicate()])
                optimizer.state[param]["momentum_buffer"] = state
        seen: set[type] = set()

        def single(params: list[Tensor], *args: Any, seen: Any = seen, **options: Any) -> None:
            seen.update(map(type, params))
            original(params, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_single_tensor_sgd", single)
            try:
                optimizer.step()
            except RuntimeError:
                assert case, "only what torch cannot do may fail"
        states = [optimizer.state[param].get("momentum_buffer") for param in model.parameters()]
        found.append(
            {
                "computed on": {each.__name__ for each in seen},
                "keys": list(map(id, optimizer.state)) == list(map(id, model.parameters())),
                "placed alike": [
                    isinstance(state, DTensor) and state.placements == param.placements
                    for param, state in zip(model.parameters(), states, strict=True)
                ],
            }
        )
    return found


def test_updates_work_on_local_tensors_and_states_are_placed_like_parameters(world):
    for used, moved, differentiable in world(2).run(types_in_updates):
        assert used == {"computed on": {"Tensor"}, "keys": True, "placed alike": [True] * 4}
        assert moved["computed on"] == differentiable["computed on"] == {"DTensor"}


def noting_types(
    seen: set[str], update: Any, params: list[Tensor], *args: Any, **options: Any
) -> None:
    seen.update(type(each).__name__ for each in params)
    update(params, *args, **options)


def types_by_class() -> dict[str, set[str]]:
    """What each elementwise optimizer of torch computes on, with and without lists of tensors."""
    model: Any = fully_shard(make_net())
    model(torch.ones(2, 5).double()).backward()
    found = {}
    for cls in ELEMENTWISE:
        name = "adam" if cls is optim.AdamW else cls.__name__.lower()
        module = importlib.import_module(f"torch.optim.{name}")
        for foreach, kind in ((False, "single"), (True, "multi")):
            function = f"_{kind}_tensor_{name}"
            original = getattr(module, function)
            seen: set[str] = set()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, function, partial(noting_types, seen, original))
                cls(model.parameters(), lr=0.1, foreach=foreach).step()  # type: ignore[call-arg]
            found[f"{cls.__name__}, {kind}"] = seen
    return found


def test_every_elementwise_optimizer_computes_on_local_tensors(world):
    for found in world(2).run(types_by_class):
        assert len(found) == 2 * len(ELEMENTWISE)
        assert {name: types for name, types in found.items() if types != {"Tensor"}} == {}


class SameStep(optim.Adafactor):
    """Torch's under another name."""


class OwnStep(optim.Adafactor):
    """Might know what it has parts of."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        pass


class Whitening(optim.Optimizer):
    """Computes with matrices, and does not know that it may see pieces."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            matrix = param.grad.view(param.shape[0], -1) if param.ndim else param.grad.view(1, 1)
            update = matrix / (matrix @ matrix.T).diagonal().sum().sqrt()
            param.sub_(update.view(param.shape), alpha=self.param_groups[0]["lr"])


class Normed(optim.Adam):
    """An update like Adam's, with steps as long as the parameter: it would take the norm of a piece."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(param.grad.sign() * param.norm(), alpha=1e-3)


class Renamed(optim.AdamW):
    """Torch's under another name."""


class Aware(Whitening):
    takes_pieces = True


def refusals() -> list[str]:
    net = make_net()
    judged = (optim.Adafactor, SameStep, OwnStep, Whitening, Normed)
    silent = (Aware, Whitening, Renamed, optim.SGD)
    before = [cls(net.parameters(), lr=0.1) for cls in (*judged, *silent)]
    model = wrapped(net, use_orig_params=True)
    model(torch.ones(2, 5).double()).backward()
    found = []
    for optimizer in before:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                optimizer.step()
                found.append("\n".join(str(each.message) for each in warned))
            except UnsupportedError as error:
                found.append(str(error))
    return found


def test_optimizers_that_may_need_whole_tensors_are_named_with_the_parameters(world):
    first, *others = world(2).run(refusals)
    itself, derived, own_step, custom, normed, *silent = first
    assert others == [first]
    assert itself.startswith("Adafactor computes with whole matrices")
    assert all(name in itself for name in ("scale", "a.weight", "a.bias", "b.weight"))
    assert derived == itself.replace("Adafactor", "SameStep")
    for name, text in (("OwnStep", own_step), ("Whitening", custom), ("Normed", normed)):
        assert f"{name} is not one of torch's optimizers, and it sees flat pieces" in text
        assert "a.weight" in text and f"{name}.takes_pieces = True" in text
    assert silent == [""] * 4, "known, or told before"


def custom_steps(expected: dict[str, Tensor]) -> list[str]:
    """Let an optimizer of which nothing is known update DTensors; return its warnings and what differs."""
    model = built("fully_shard")
    optimizer = Whitening(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model(torch.ones(2, 5).double()).backward()
        optimizer.step()
    found = all_whole(dict(model.named_parameters()))
    different = [n for n, v in expected.items() if not torch.allclose(found[n], v)]
    return [str(each.message) for each in warned if "pieces" in str(each.message)] + different


def test_custom_optimizers_compute_with_whole_matrices_on_dtensors(world):
    net = make_net()
    optimizer = Whitening(net.parameters(), lr=0.1)
    net(torch.ones(2, 5).double()).backward()
    optimizer.step()
    expected = {name: param.detach() for name, param in net.named_parameters()}
    assert world(2).run(custom_steps, expected) == [[], []]
