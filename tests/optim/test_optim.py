"""`ShardedOptimizer` does to the last bit what its optimizer does on the sharded parameters themselves.

A program trains with an optimizer that it is given a maker of, and returns what to compare. It is run
twice on the same ranks: with the optimizer itself, and with ours. What is compared is what this rank
holds, with the types in which it is held.
"""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import fullshard
from examples.int8_gather import gather_linear_weights_as_int8
from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel,
    LifecycleError,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from fullshard.optim import ShardedOptimizer
from fullshard.sharded_grad_scaler import ShardedGradScaler
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.compare import assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.groups import alone
from tests.helpers.models import Block, ModelOptions, make_decoder
from tests.helpers.training import batch_of

Make = Callable[..., optim.Optimizer]
"""Makes an optimizer of parameters, with options."""

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

ODD = ModelOptions(depth=1, scalar=True, tied=True, frozen=("up.bias",))
"""Uneven rows, ranks without any, 0-d, tied and frozen parameters."""


def sharded(options: ModelOptions = ODD, *, by_block: bool = True, **kwargs: Any) -> Any:
    model = make_decoder(options)
    if by_block:
        for block in model.blocks:
            fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def wrapped(options: ModelOptions = ODD, **kwargs: Any) -> Any:
    model = make_decoder(options)
    policy = ModuleWrapPolicy({Block})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, **kwargs)


@pytest.fixture
def model() -> Any:
    with alone():
        yield sharded(ModelOptions(depth=1))


def backward(model: Any, step: int) -> None:
    model(batch_of(step)).backward()


def train(model: Any, optimizer: Any, steps: int = 2, first: int = 0) -> None:
    for step in range(first, first + steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def held(value: Any) -> Any:
    """What this rank holds of tensors in containers, and as what: something to compare."""
    if isinstance(value, DTensor):
        return {f"{value.placements} of {tuple(value.shape)}": value.to_local().detach().clone()}
    if isinstance(value, dict):
        return {str(key): held(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [held(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().clone()
    return {repr(value): torch.zeros(())}


def record(model: Any, optimizer: optim.Optimizer) -> Any:
    state = optimizer.state_dict()
    return held({"params": dict(model.named_parameters()), **state})


def compare(program: Callable[..., Any], optimizer_class: Any, *args: Any) -> None:
    expected = program(optimizer_class, *args)
    actual = program(partial(ShardedOptimizer, optimizer_class), *args)
    assert_equal(actual, expected)


# --- numbers -----------------------------------------------------------------------------------------

CHOICES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.AdamW, {"lr": torch.tensor(0.02)}),  # without foreach, which wants capturable then
    (optim.NAdam, {}),
    (optim.RAdam, {"decoupled_weight_decay": True}),
    (optim.Adamax, {}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    (optim.Adadelta, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
    (optim.ASGD, {"t0": 1}),
]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class OnLocals:
    """An optimizer over plain aliases of the local tensors, one for each: what it should come to."""

    def __init__(self, optimizer_class: Any, params: Any, **options: Any) -> None:
        self.params = list(params)
        self.plain = [nn.Parameter(local(param.detach())) for param in self.params]
        self.optimizer = optimizer_class(self.plain, **options)

    def step(self) -> None:
        for param, plain in zip(self.params, self.plain, strict=True):
            plain.grad = None if param.grad is None else local(param.grad)
        self.optimizer.step()

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def every_choice(make_model: Callable[[], Any]) -> None:
    size = dist.get_world_size()
    for optimizer_class, options in CHOICES[size % 2 :: 2]:  # others by other numbers of ranks
        kwargs = {"lr": 0.03, **options, "foreach": size > 2 and "lr" not in options}
        one, other = make_model(), make_model()
        expected = OnLocals(optimizer_class, one.parameters(), **copy.deepcopy(kwargs))
        actual = ShardedOptimizer(optimizer_class, other.parameters(), **kwargs)
        train(one, expected, steps=2)
        train(other, actual, steps=2)
        assert_equal([local(p) for p in other.parameters()], [local(p) for p in one.parameters()])
        states = {
            index: {key: local(value) for key, value in state.items()}
            for index, state in actual.state_dict()["state"].items()
        }
        assert_equal(states, expected.optimizer.state_dict()["state"])


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_optimizer_of_torch_does_the_same(world, ranks: int) -> None:
    world(ranks).run(every_choice, sharded)


@pytest.mark.parametrize("orig", [True, False])
def test_so_it_does_in_the_wrapper(world, orig: bool) -> None:
    model = partial(wrapped, ODD if orig else ModelOptions(depth=1), use_orig_params=orig)
    world(3 if orig else 2).run(every_choice, model)


class Watching(optim.SGD):
    """Notes what it updates: for each tensor its address, that of its gradient, and its elements."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.seen: list[tuple[int, int, int]] = []
        super().__init__(params, **options)

    def step(self, closure: Any = None) -> Any:
        tensors = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.seen = [(p.data_ptr(), p.grad.data_ptr(), p.numel()) for p in tensors]
        return super().step(closure)


def watched(params: Any, **options: Any) -> Any:
    return ShardedOptimizer(Watching, params, elementwise=True, lr=0.1, **options)


def updates_of(model: Any) -> tuple[list[tuple[int, int, int]], list[nn.Parameter]]:
    optimizer: Any = watched(model.parameters())
    backward(model, 0)
    optimizer.step()
    return optimizer.inner.seen, list(model.parameters())


@pytest.mark.parametrize("policy", [{}, {"reduce_dtype": torch.bfloat16}])
def test_a_group_is_one_tensor_with_its_gradients_where_they_are(policy: dict[str, Any]) -> None:
    with fake_world(4):
        model = sharded(ModelOptions(depth=2), mp_policy=MixedPrecisionPolicy(**policy))
        seen, params = updates_of(model)
        firsts: list[Any] = [model.embed.weight, *(block.up.weight for block in model.blocks)]
        assert sorted(at for at, _, _ in seen) == sorted(p.to_local().data_ptr() for p in firsts)
        gradients = sorted(p.grad.to_local().data_ptr() for p in firsts)
        assert sorted(at for _, at, _ in seen) == gradients, "gradients were copied"
        numels = [p.to_local().numel() for p in params if isinstance(p, DTensor)]
        assert sum(numel for _, _, numel in seen) >= sum(numels)


def test_matrices_and_vectors_with_different_options_are_two_tensors() -> None:
    with fake_world(4):
        model = sharded(ModelOptions(depth=2))
        matrices = [param for param in model.parameters() if param.ndim > 1]
        vectors = [param for param in model.parameters() if param.ndim < 2]
        optimizer: Any = watched([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
        backward(model, 0)
        optimizer.step()
        at = {local(p).data_ptr(): local(p.grad).data_ptr() for p in model.parameters()}
        assert len(optimizer.inner.seen) == 2 * 3
        assert all(at[address] == gradient for address, gradient, _ in optimizer.inner.seen)


def test_neighbouring_storages_are_not_taken_for_one() -> None:
    with alone():
        model = sharded(ModelOptions(depth=1))
        optimizer = ShardedOptimizer(optim.SGD, model.blocks.parameters(), lr=1.0)
        before = [local(param).clone() for param in model.blocks.parameters()]
        starts = [local(p).storage_offset() * 4 for p in model.blocks.parameters()]
        memory = bytearray(torch.ones(max(starts)).numpy().tobytes())
        for param, start in zip(model.blocks.parameters(), starts, strict=True):
            part = torch.frombuffer(memory, dtype=torch.float32, count=param.numel(), offset=start)
            mesh = param.device_mesh
            param.grad = DTensor.from_local(part.view(param.shape), mesh, [Shard(0)])
        optimizer.step()
        assert_equal([local(p) for p in model.blocks.parameters()], [b - 1 for b in before])


def test_pieces_of_a_wrapper_are_one_tensor_too() -> None:
    with fake_world(4, rank=1):
        model = wrapped(ModelOptions(depth=2), use_orig_params=True)
        seen, params = updates_of(model)
        assert len(seen) == 3
        at = {p.data_ptr(): p.grad.data_ptr() for p in params if p.grad is not None}
        assert all(at[address] == gradient for address, gradient, _ in seen)


# --- which parameters take part ------------------------------------------------------------------------


def with_holes(make: Make, make_model: Callable[[], Any]) -> Any:
    """Different parameters have gradients in different steps; some never, some are frozen in between."""
    model = make_model()
    optimizer = make(model.parameters(), lr=0.03, weight_decay=0.1, foreach=True)
    named = list(model.named_parameters())
    for step in range(5):
        named[4 % len(named)][1].requires_grad_(step != 3)
        backward(model, step)
        for index, (_, param) in enumerate(named):
            if index == 2 or (step and (step + index) % 3 == 0):
                param.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return record(model, optimizer)


def accumulating(make: Make) -> Any:
    """Gradients of several backwards, with and without reducing each; and some that the user replaced."""
    model = sharded()
    optimizer = make(model.parameters(), lr=0.03, foreach=True)
    for step in range(4):
        model.set_requires_gradient_sync(step != 2)
        backward(model, step)
        if step == 1:
            for param in list(model.parameters())[::2]:
                param.grad = None if param.grad is None else param.grad.clone()
        if step != 2:
            optimizer.step()
        if step == 1:
            optimizer.zero_grad(set_to_none=False)
    return record(model, optimizer)


def mixed_dtypes(make: Make) -> Any:
    model = make_decoder(ModelOptions(depth=2))
    for block in model.blocks:
        block.up.double()
        block.up.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        block.up.register_forward_hook(lambda _, args, output: output.float())
        fully_shard(block)
    fully_shard(model)
    optimizer = make(model.parameters(), lr=0.03, foreach=True)
    train(model, optimizer)
    return record(model, optimizer)


def replicated(make: Make) -> Any:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    optimizer = make(model.named_parameters(), lr=0.03, foreach=True)
    train(model, optimizer)
    return record(model, optimizer)


def beside_plain(make: Make) -> Any:
    """Parameters that nobody shards, in another memory order, with sparse gradients."""
    torch.manual_seed(1)
    model = sharded(ModelOptions())
    head = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = make([*model.parameters(), *head.parameters(), *table.parameters()], lr=0.03)
    for step in range(2):
        backward(model, step)
        head(torch.ones(1, 2, 3, 3)).sum().backward()
        table(torch.tensor([step])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [record(model, optimizer), held(dict(head.named_parameters())), held(table.weight)]


def beside_dtensors(make: Make) -> Any:
    """DTensors of which no group knows, all in one call of operators on lists."""
    model = sharded()
    mesh = model.head.weight.device_mesh
    whole = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    part = nn.Parameter(distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)]))
    optimizer = make([whole, *model.parameters(), part], lr=0.03, foreach=True)
    for step in range(2):
        backward(model, step)
        whole.grad, part.grad = torch.ones_like(whole), torch.ones_like(part)
        optimizer.step()
        optimizer.zero_grad()
    return [record(model, optimizer), held([whole, part])]


def beside_self_gathered(make: Make) -> Any:
    """Tensor subclasses, which are in no buffer."""
    model = make_decoder(ModelOptions(depth=1))
    gather_linear_weights_as_int8(model.blocks)
    fully_shard(model)
    optimizer = make(model.parameters(), lr=0.1, foreach=True)
    train(model, optimizer)
    shards = [local(param.detach()) for param in model.parameters()]
    return [getattr(shard, "data_", shard).clone() for shard in shards]


def lists_of_parameters(make: Make) -> Any:
    """A user takes parameters and groups out of an optimizer, and puts them in again."""
    model = sharded()
    blocks = list(model.blocks.parameters())
    groups: list[dict[str, Any]] = [{"params": blocks}, {"params": [model.head.weight], "lr": 0.1}]
    optimizer = make(groups, lr=0.03, foreach=True)
    train(model, optimizer, 1)
    taken = optimizer.param_groups[0]["params"].pop(1)
    train(model, optimizer, 1, first=1)
    group = optimizer.param_groups.pop()
    optimizer.param_groups[0]["params"].append(taken)
    train(model, optimizer, 1, first=2)
    optimizer.param_groups.append(group)
    train(model, optimizer, 1, first=3)
    return record(model, optimizer)


def made_on_meta(make: Make) -> Any:
    with torch.device("meta"):
        model = make_decoder(ODD)
    fully_shard(model)
    optimizer = make(model.parameters(), lr=0.03, foreach=True)
    model.to_empty(device="cpu")
    for index, param in enumerate(model.parameters()):
        nn.init.constant_(param, 0.1 * index)
    train(model, optimizer)
    return record(model, optimizer)


@pytest.mark.parametrize(
    ("ranks", "optimizer_class"), [(1, optim.AdamW), (3, optim.AdamW), (2, optim.SGD)]
)
def test_parameters_without_gradients_are_left_alone(world, ranks: int, optimizer_class) -> None:
    world(ranks).run(compare, with_holes, optimizer_class, sharded)


@pytest.mark.parametrize("orig", [True, False])
def test_in_the_wrapper_too(world, orig: bool) -> None:
    model = partial(wrapped, ModelOptions(depth=2), use_orig_params=orig)
    world(2).run(compare, with_holes, optim.AdamW, model)


@pytest.mark.parametrize(
    ("program", "ranks", "optimizer_class"),
    [
        (accumulating, 2, optim.AdamW),
        (mixed_dtypes, 3, optim.AdamW),
        (replicated, 4, optim.AdamW),
        (beside_plain, 2, optim.SGD),
        (beside_dtensors, 2, optim.AdamW),
        (beside_self_gathered, 2, optim.SGD),
        (lists_of_parameters, 2, optim.AdamW),
        (made_on_meta, 2, optim.AdamW),
    ],
)
def test_kinds_of_parameters_and_gradients(world, program, ranks: int, optimizer_class) -> None:
    world(ranks).run(compare, program, optimizer_class)


# --- an optimizer as any -------------------------------------------------------------------------------


def scheduled(make: Make) -> Any:
    """Groups of different options, one added later, a schedule, hooks and a closure."""
    model = sharded()
    last = list(model.blocks[-1].parameters())
    rest = [p for p in model.parameters() if all(p is not other for other in last)]
    groups = [
        {"params": [p for p in rest if p.ndim > 1]},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0, "lr": 0.01},
    ]
    optimizer = make(groups, lr=0.03, weight_decay=0.1, foreach=True)
    optimizer.add_param_group({"params": last, "betas": (0.8, 0.9)})
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("after"))
    for step in range(3):
        optimizer.zero_grad()

        def closure(step: int = step) -> Any:
            loss = model(batch_of(step))
            loss.backward()
            return loss

        calls.append(str(optimizer.step(closure).item()))
        schedule.step()
    everywhere.remove()
    return [record(model, optimizer), held(calls), held(schedule.state_dict())]


def scaled(make: Make, scaler_class: Any, fused: bool) -> Any:
    """Losses are scaled; the second step has a gradient that is not finite."""
    model = sharded()
    optimizer = make(model.parameters(), lr=0.03, fused=fused)
    scaler = scaler_class("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(model(batch_of(step))).backward()
        if step == 1:
            model.norm.weight.grad.to_local().fill_(math.inf)
        if step == 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [record(model, optimizer), scaler.get_scale()]


def test_schedules_hooks_groups_and_closures(world) -> None:
    world(2).run(compare, scheduled, optim.AdamW)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ShardedGradScaler])
def test_loss_scaling(world, scaler_class: Any) -> None:
    world(2).run(compare, scaled, optim.AdamW, scaler_class, False)


def scaled_and_fused(scaler_class: Any) -> None:
    actual = scaled(partial(ShardedOptimizer, optim.AdamW), scaler_class, True)
    expected = scaled(optim.AdamW, scaler_class, True)
    # The fused kernels for CPUs round differently in whole vectors and in what is left over.
    torch.testing.assert_close(actual, expected)


def test_loss_scaling_with_a_fused_step(world) -> None:
    world(2).run(scaled_and_fused, ShardedGradScaler)


class Counting(optim.SGD):
    """Counts its steps where its options are, and fails in the third."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            if group["count"] == 3:
                raise ArithmeticError
        return super().step(closure)


def test_an_optimizer_may_write_to_its_groups_and_keeps_no_gradients(model) -> None:
    optimizer: Any = ShardedOptimizer(Counting, model.parameters(), elementwise=True, lr=0.1)
    train(model, optimizer, 2)
    assert optimizer.param_groups[0]["count"] == 2
    backward(model, 2)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    tensors = [p for group in optimizer.inner.param_groups for p in group["params"]]
    assert tensors
    assert all(tensor.grad is None for tensor in tensors)


def updated_while_gathered(fused: bool) -> None:
    """The forward after a step computes with what the step wrote, though the parameters stayed gathered."""
    model = sharded(ModelOptions(depth=2), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    optimizer = ShardedOptimizer(optim.AdamW, model.parameters(), lr=0.1, fused=fused)
    backward(model, 0)
    versions = [param._version for param in optimizer.param_groups[0]["params"]]
    optimizer.step()
    assert all(
        param._version > before
        for param, before in zip(optimizer.param_groups[0]["params"], versions, strict=True)
    )
    loss = model(batch_of(1)).item()
    model.reshard()
    for block in model.blocks:
        block.reshard()
    assert loss == model(batch_of(1)).item()


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_that_stay_gathered_are_gathered_again(world, fused: bool) -> None:
    world(2).run(updated_while_gathered, fused)


# --- state ---------------------------------------------------------------------------------------------


def changed_by_hand(make: Make) -> Any:
    """Everything a user may do to the state of an optimizer, between steps."""
    model = sharded(ModelOptions(depth=2))
    optimizer = make(model.parameters(), lr=0.03, foreach=True)
    first, second, third, *_, last = model.parameters()
    train(model, optimizer, 2)
    optimizer.state[first]["exp_avg"].fill_(0.5)
    optimizer.state[second]["exp_avg"] = torch.full_like(second, 0.25)
    optimizer.state[third]["step"].fill_(7.0)
    optimizer.state.pop(last)
    train(model, optimizer, 2, first=2)
    half = record(model, optimizer)
    optimizer.state.clear()
    train(model, optimizer, 1, first=4)
    return [half, record(model, optimizer)]


def moved(make: Make) -> Any:
    """The parameters get other memory, and another dtype, while they are being optimized."""
    model = sharded(ModelOptions(depth=2))
    optimizer = make(model.parameters(), lr=0.03, foreach=True)
    train(model, optimizer, 2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    train(model, optimizer, 2, first=2)
    backward(model, 4)
    for param in list(model.parameters())[::3]:
        param.data = param.data.clone()
    optimizer.step()
    train(model, optimizer, 1, first=5)
    return record(model, optimizer)


@pytest.mark.parametrize("program", [changed_by_hand, moved])
def test_state_and_memory_are_the_user_s(world, program) -> None:
    world(3).run(compare, program, optim.AdamW)


def handed_over(make_first: Make, make_second: Make, make_model: Any, how: str, path: str) -> Any:
    """Train, save, load into another optimizer of another model, train on."""
    model = make_model()
    optimizer = make_first(model.parameters(), lr=0.03, foreach=True)
    train(model, optimizer, 1)
    backward(model, 1)
    for param in list(model.parameters())[1::3]:
        param.grad = None  # these have another count of steps
    optimizer.step()
    optimizer.zero_grad()
    other = make_model()
    other.load_state_dict(model.state_dict())
    second = make_second(other.parameters(), lr=0.01, foreach=True)
    options = StateDictOptions(full_state_dict=how == "full", cpu_offload=how == "full")
    if how == "plain":
        second.load_state_dict(optimizer.state_dict())
    elif how == "wrapper":
        theirs = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        second.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(other, second, theirs)
        )
    elif how == "files":
        dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
        into = get_optimizer_state_dict(other, second)
        dcp.load({"optim": into}, checkpoint_id=path)
        set_optimizer_state_dict(other, second, into)
    else:
        state = get_optimizer_state_dict(model, optimizer, options=options)
        options = StateDictOptions(
            full_state_dict=how == "full", broadcast_from_rank0=how == "full"
        )
        set_optimizer_state_dict(other, second, state, options=options)
    loaded = held(second.state_dict())
    train(other, second, 1, first=2)
    return [loaded, record(other, second)]


def all_hand_overs(make_model: Any, how: str, path: str) -> None:
    ours, plain = partial(ShardedOptimizer, optim.AdamW), optim.AdamW
    makers: list[tuple[Any, Any]] = [(plain, plain), (plain, ours), (ours, plain)]
    expected, *others = (
        handed_over(first, second, make_model, how, f"{path}/{index}")
        for index, (first, second) in enumerate(makers)
    )
    for actual in others:
        assert_equal(actual, expected)


@pytest.mark.parametrize("how", ["plain", "sharded", "full", "files"])
def test_state_dicts_are_those_of_the_optimizer_itself(world, how: str, tmp_path: Path) -> None:
    # torch cannot load whole states of 0-d DTensors.
    model = partial(sharded, ModelOptions(depth=1, scalar=how != "full"))
    world(2).run(all_hand_overs, model, how, str(tmp_path))


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
def test_state_dicts_of_the_wrapper(world, orig: bool, kind: StateDictType) -> None:
    world(2).run(all_hand_overs, partial(wrapped_with_kind, orig, kind), "wrapper", "")


def wrapped_with_kind(orig: bool, kind: StateDictType) -> Any:
    model = wrapped(ModelOptions(depth=1), use_orig_params=orig)
    FullyShardedDataParallel.set_state_dict_type(model, kind)
    return model


def saved_by_ranks(path: str) -> Any:
    model = sharded()
    optimizer = ShardedOptimizer(optim.AdamW, model.parameters(), lr=0.03)
    train(model, optimizer)
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    return get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )


def loaded_by_ranks(path: str) -> Any:
    model = sharded()
    optimizer = ShardedOptimizer(optim.AdamW, model.parameters(), lr=0.01)
    into = get_optimizer_state_dict(model, optimizer)
    dcp.load({"optim": into}, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, into)
    return get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )


def test_checkpoints_of_other_numbers_of_ranks_load(world, tmp_path: Path) -> None:
    saved = world(2).run(saved_by_ranks, str(tmp_path))[0]
    for ranks in (1, 3):
        loaded = world(ranks).run(loaded_by_ranks, str(tmp_path))[0]
        assert_equal(held(loaded), held(saved))


# --- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer_class", [optim.LBFGS, optim.Adafactor, optim.SparseAdam, Watching]
)
def test_optimizers_that_may_not_be_elementwise_are_refused(model, optimizer_class) -> None:
    with pytest.raises(ConfigurationError, match=f"{optimizer_class.__name__}.*elementwise=True"):
        ShardedOptimizer(optimizer_class, model.parameters())


class RowSums(optim.SGD):
    """Keeps something that is neither a number nor like the parameter."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["sums"] = torch.zeros(2, 3)


def test_a_broken_promise_is_told(model) -> None:
    optimizer = ShardedOptimizer(RowSums, model.parameters(), elementwise=True)
    optimizer.step()
    with pytest.raises(ConfigurationError, match=re.escape("'sums' has shape (2, 3)")):
        optimizer.state_dict()


def test_steps_that_autograd_sees_are_refused(model) -> None:
    with pytest.raises(ConfigurationError, match="takes no differentiable=True"):
        ShardedOptimizer(optim.SGD, model.parameters(), differentiable=True)
    optimizer = ShardedOptimizer(optim.SGD, model.blocks.parameters())
    with pytest.raises(ConfigurationError, match="takes no differentiable=True"):
        optimizer.add_param_group({"params": [model.head.weight], "differentiable": True})
    assert len(optimizer.param_groups) == 1


def test_options_are_checked_by_the_optimizer(model) -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ShardedOptimizer(optim.AdamW, model.parameters(), lr=-1.0)
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        ShardedOptimizer(
            optim.AdamW, [{"params": model.head.weight}, {"params": model.head.weight}]
        )


def test_parameters_that_were_replaced_are_not_optimized(model) -> None:
    optimizer = ShardedOptimizer(optim.AdamW, model.parameters())
    backward(model, 0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    backward(model, 1)
    with pytest.raises(
        LifecycleError, match=r"shape \(11, 6\).*\n.*Build the optimizer after that"
    ):
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(LifecycleError, match="Build the optimizer after that"):
        ShardedOptimizer(optim.AdamW, optimizer.param_groups[0]["params"])


def test_whole_parameters_are_not_optimized() -> None:
    with alone():
        model = wrapped(ModelOptions(depth=1), use_orig_params=True)
        with FullyShardedDataParallel.summon_full_params(model):
            with pytest.raises(LifecycleError, match="outside of FullyShardedDataParallel"):
                ShardedOptimizer(optim.AdamW, model.parameters())


def test_whole_states_are_not_taken_for_sharded_ones(model) -> None:
    optimizer = ShardedOptimizer(optim.AdamW, model.parameters())
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(11, 6)
    with pytest.raises(
        ConfigurationError, match=r"embed.weight: 'exp_avg'(.|\n)*set_optimizer_state"
    ):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(model, duplicate: Callable[[Any], Any]) -> None:
    with pytest.raises(LifecycleError, match="use state_dict and load_state_dict"):
        duplicate(ShardedOptimizer(optim.AdamW, model.parameters()))


def test_the_module_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(fullshard), "optim")  # as before anybody has imported it
    assert "optim" in dir(fullshard)
    assert fullshard.optim.ShardedOptimizer is ShardedOptimizer
