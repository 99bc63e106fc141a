"""`fully_shard` and the methods of `FSDPModule`, against torch's where torch can do it."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard import FSDPModule, LifecycleError, MixedPrecisionPolicy, UnshardHandle, fully_shard
from fullshard.engine.state import state_of
from fullshard.fsdp2.fsdp_module import disable_fsdp_module_new_init, get_cls_to_fsdp_cls
from fullshard.transport.comm_objects import DefaultAllGather, DefaultReduceScatter, ReduceScatter
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.models import Decoder, ModelOptions, make_decoder, tokens_for
from tests.helpers.training import FULLSHARD, Run, all_whole, gradients, mine, shard, weights, whole


def sharded_decoder(options: ModelOptions | None = None, **kwargs: Any) -> Decoder:
    return shard(make_decoder(options), FULLSHARD, Run(), **kwargs)


def reference_gradients(batch: Tensor, options: ModelOptions | None = None) -> dict[str, Tensor]:
    model = make_decoder(options)
    model(batch).backward()
    return gradients(model)


# --- what a sharded module is ---------------------------------------------------------------------


def test_a_sharded_module_is_what_it_was_and_an_fsdp_module() -> None:
    with fake_world(4, rank=1):
        model = make_decoder()
        names = [name for name, _ in model.named_parameters()]
        assert sharded_decoder_of(model) is model
        assert type(model).__name__ == "FSDPDecoder"
        assert isinstance(model, Decoder) and isinstance(model, FSDPModule)
        assert [name for name, _ in model.named_parameters()] == names
        assert type(model.blocks[0]) is type(model.blocks[1])


def sharded_decoder_of(model: Decoder) -> Decoder:
    return shard(model, FULLSHARD, Run())


def test_parameters_are_dtensors_with_torch_chunks() -> None:
    with fake_world(4, rank=3):
        original = make_decoder()
        model = sharded_decoder()
        for (name, param), full in zip(
            model.named_parameters(), original.parameters(), strict=True
        ):
            assert isinstance(param, DTensor) and isinstance(param, nn.Parameter), name
            assert param.placements == (Shard(0),) and param.shape == full.shape
            chunks = full.detach().chunk(4)
            expected = chunks[3] if len(chunks) > 3 else full.detach()[:0]
            assert torch.equal(param.to_local(), expected), name


def test_zero_d_parameters_are_replicated() -> None:
    with fake_world(4):
        model = sharded_decoder(ModelOptions(scalar=True))
        scale = model.blocks[0].scale
        assert isinstance(scale, DTensor) and scale.placements == (Replicate(),)


def test_a_list_of_modules_forms_one_group_and_is_returned() -> None:
    with fake_world(2):
        pair = [nn.Linear(3, 4), nn.Linear(4, 5)]
        assert fully_shard(pair) is pair
        state = state_of(pair[0])
        assert state is state_of(pair[1])
        assert len(state.groups) == 1 and len(state.groups[0].params) == 4


def test_attributes_on_parameters_survive() -> None:
    with fake_world(2):
        layer = nn.Linear(3, 4)
        layer.weight.no_decay = True
        fully_shard(layer)
        assert layer.weight.no_decay is True


def test_ignored_parameters_are_left_alone() -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
        weight = model[0].weight
        fully_shard(model, ignored_params={weight})
        assert model[0].weight is weight and not isinstance(weight, DTensor)
        assert isinstance(model[0].bias, DTensor)


def test_deepcopy_is_refused() -> None:
    with fake_world(2), pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(fully_shard(nn.Linear(2, 2)))


# --- devices, dtypes, state dicts -----------------------------------------------------------------


def meta_then_to_empty() -> None:
    expected = {name: param.detach().clone() for name, param in make_decoder().named_parameters()}
    with torch.device("meta"):
        model = Decoder(ModelOptions())
    shard(model, FULLSHARD, Run())
    assert all(param.is_meta for param in model.parameters())
    before = dict(model.named_parameters())
    model.to_empty(device="cpu")
    assert all(before[name] is param for name, param in model.named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(
                torch.distributed.tensor.distribute_tensor(expected[name], param.device_mesh)
            )
    batch = tokens_for(0, 2 * dist.get_world_size())
    model(mine(batch)).backward()
    assert_close(gradients(model), reference_gradients(batch), rtol=1e-5, atol=1e-6)


def test_a_model_built_on_meta_is_materialised_after_sharding(world) -> None:
    world(3).run(meta_then_to_empty)


def cast_after_sharding() -> None:
    model = sharded_decoder(ModelOptions(tied=True))
    batch = tokens_for(0, 2 * dist.get_world_size())
    model(mine(batch))
    model.to(torch.float64)
    model(mine(batch)).backward()
    reference = make_decoder(ModelOptions(tied=True)).double()
    reference(batch).backward()
    assert model.embed.weight is model.head.weight
    assert all(param.grad.dtype is torch.float64 for param in model.parameters())
    assert_close(gradients(model), gradients(reference), rtol=1e-6, atol=1e-7)


def test_a_sharded_model_can_be_cast(world) -> None:
    world(2).run(cast_after_sharding)


def state_dict_needs_no_communication() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    model = sharded_decoder()
    model(mine(tokens_for(0, 4)))  # leaves the root unsharded
    comm = CommDebugMode()
    with comm:
        state = model.state_dict()
    assert comm.get_total_counts() == 0
    original = make_decoder().state_dict()
    assert list(state) == list(original)
    assert all(isinstance(value, DTensor) for value in state.values())
    assert_equal(all_whole(state), dict(original))


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_state_dict_can_be_copied_deeply(keep_vars: bool) -> None:
    with fake_world(2):
        model = sharded_decoder()
        saved = model.state_dict(keep_vars=keep_vars)
        copied = copy.deepcopy(saved)
        param = copy.deepcopy(model.head.weight)
    # The parameters themselves lie in the storage of their group.
    assert any(value.to_local().storage_offset() for value in saved.values()) == keep_vars
    assert_equal(locals_in(copied), locals_in(saved))
    assert all(value.placements == saved[name].placements for name, value in copied.items())
    memory = {value.to_local().untyped_storage().data_ptr() for value in saved.values()}
    assert not memory & {value.to_local().untyped_storage().data_ptr() for value in copied.values()}
    assert isinstance(param, nn.Parameter) and param.requires_grad


def test_parameters_are_copied_with_their_gradients_and_optimizers() -> None:
    with fake_world(2):
        model = sharded_decoder()
        model(tokens_for(0, 2)).backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        copied = copy.deepcopy(optimizer)
    found = [param for group in copied.param_groups for param in group["params"]]
    for param, twin in zip(model.parameters(), found, strict=True):
        assert_equal(twin.to_local(), param.to_local())
        assert_equal(twin.grad.to_local(), param.grad.to_local())
        assert_equal(
            copied.state[twin]["exp_avg"].to_local(), optimizer.state[param]["exp_avg"].to_local()
        )


@pytest.mark.parametrize("keep_vars", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
def test_each_rank_may_write_its_shards_with_torch_save(
    weights_only: bool, keep_vars: bool
) -> None:
    file = io.BytesIO()
    with fake_world(2):
        saved = sharded_decoder().state_dict(keep_vars=keep_vars)
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
    assert any(value.to_local().storage_offset() for value in saved.values()) == keep_vars
    assert_equal(locals_in(loaded), locals_in(saved))
    assert all(value.placements == saved[name].placements for name, value in loaded.items())


def locals_in(state_dict: dict[str, DTensor]) -> dict[str, Tensor]:
    return {name: value.to_local() for name, value in state_dict.items()}


def test_state_dict_has_dtensors_and_needs_no_communication(world) -> None:
    world(2).run(state_dict_needs_no_communication)


def load_state_dict(assign: bool) -> None:
    batch = tokens_for(0, 2 * dist.get_world_size())
    source, target = sharded_decoder(), shard(make_decoder(seed=5), FULLSHARD, Run())
    target(mine(batch)).backward()  # everything initialised, with other values
    target.zero_grad()
    state = {name: value.clone() for name, value in source.state_dict().items()}
    target.load_state_dict(state, assign=assign)
    target(mine(batch)).backward()
    assert_close(gradients(target), reference_gradients(batch), rtol=1e-5, atol=1e-6)
    if assign:  # parameters on the module are the ones that are trained
        torch.optim.SGD(target.parameters(), lr=0.1, foreach=True).step()
        expected = make_decoder()
        expected(batch).backward()
        torch.optim.SGD(expected.parameters(), lr=0.1, foreach=True).step()
        actual = weights(target)
        assert_close(actual, dict(expected.named_parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(world, assign: bool) -> None:
    world(2).run(load_state_dict, assign)


def load_while_unsharded(assign: bool, left_by: str) -> None:
    model = shard(make_decoder(seed=5), FULLSHARD, Run())
    batch = tokens_for(0, 2 * dist.get_world_size())
    if left_by == "forward":
        model(mine(batch))
    else:
        model.unshard()
        model.blocks[0].unshard()
    state = {name: value.clone() for name, value in sharded_decoder().state_dict().items()}
    model.load_state_dict(state, assign=assign)
    actual = weights(model)
    assert_equal(actual, dict(make_decoder().named_parameters()))
    model(mine(batch)).backward()
    assert_close(gradients(model), reference_gradients(batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("left_by", ["forward", "unshard"])
def test_loading_while_unsharded_loses_nothing(world, assign: bool, left_by: str) -> None:
    world(2).run(load_while_unsharded, assign, left_by)


def load_full_tensors() -> str:
    model = sharded_decoder()
    try:
        model.load_state_dict(make_decoder().state_dict(), assign=True)
    except ValueError as error:
        return str(error)
    return "no error"


def test_assigning_full_tensors_is_an_error_that_names_them_all(world) -> None:
    messages = world(2).run(load_full_tensors)
    assert messages[0] == messages[1]
    assert "up.weight" in messages[0] and "norm.bias" in messages[0]
    assert "distribute_tensor" in messages[0]


# --- unshard, reshard, prefetch -------------------------------------------------------------------


def unshard_and_reshard() -> None:
    model = sharded_decoder()
    original = make_decoder()
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    handle.wait()
    assert torch.equal(model.blocks[0].up.weight, original.blocks[0].up.weight)
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    assert isinstance(model.blocks[1].up.weight, DTensor)  # not recursive
    model.blocks[0].reshard()
    assert isinstance(model.blocks[0].up.weight, DTensor)
    assert model.blocks[1].unshard() is None
    model.blocks[2].unshard(async_op=True)  # forward waits
    batch = tokens_for(0, 2 * dist.get_world_size())
    model(mine(batch)).backward()
    assert_close(gradients(model), reference_gradients(batch), rtol=1e-5, atol=1e-6)


def test_unshard_and_reshard(world) -> None:
    world(2).run(unshard_and_reshard)


def which_are_sharded(after: str) -> list[bool]:
    model = sharded_decoder()
    if after == "forward":
        model(mine(tokens_for(0, 4)))
    elif after == "evaluation":
        with torch.no_grad():
            model(mine(tokens_for(0, 4)))
    elif after == "backward":
        model(mine(tokens_for(0, 4))).backward()
    return [isinstance(param, DTensor) for param in (model.head.weight, model.blocks[0].up.weight)]


@pytest.mark.parametrize(
    ("after", "root", "block"),
    [("forward", False, True), ("evaluation", True, True), ("backward", True, True)],
)
def test_which_parameters_are_sharded_when(world, after: str, root: bool, block: bool) -> None:
    assert world(2).run(which_are_sharded, after) == [[root, block]] * 2


def prefetch_lists() -> list[str]:
    model = sharded_decoder(ModelOptions(depth=4))
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(i - 2, 0) : i])))
    issued: list[str] = []
    for i, block in enumerate(blocks):
        group = state_of(block).groups[0]
        record_gathers(group, f"block {i}", issued)
    batch = tokens_for(0, 2 * dist.get_world_size())
    for _ in range(2):
        model.zero_grad()
        issued.clear()
        model(mine(batch)).backward()
    assert_close(
        gradients(model), reference_gradients(batch, ModelOptions(depth=4)), rtol=1e-5, atol=1e-6
    )
    return issued


def record_gathers(group: Any, name: str, issued: list[str]) -> None:
    unshard = group.unshard

    def recording(**options: bool) -> bool:
        if was_issued := unshard(**options):
            issued.append(name)
        return was_issued

    group.unshard = recording


def test_prefetch_lists_are_followed(world) -> None:
    issued = world(2).run(prefetch_lists)[0]
    assert issued == [
        *("block 0", "block 1", "block 2", "block 3"),
        *("block 3", "block 2", "block 1", "block 0"),
    ]


def gather_order() -> tuple[list[str], list[str]]:
    model = sharded_decoder()
    events: list[str] = []
    for name, module in [("root", model), *((f"b{i}", b) for i, b in enumerate(model.blocks))]:
        state = state_of(module)
        record_gathers(state.groups[0], f"gather {name}", events)
        module.register_forward_pre_hook(lambda *_, name=name: events.append(f"forward {name}"))
    batch = tokens_for(0, 2 * dist.get_world_size())
    model(mine(batch)).backward()
    first = list(events)
    events.clear()
    model(mine(batch)).backward()
    return first, events


def test_the_recorded_order_is_prefetched(world) -> None:
    first, second = world(2).run(gather_order)[0]
    assert first[:4] == ["gather root", "forward root", "gather b0", "forward b0"]
    assert second == [
        *("gather root", "gather b0", "forward root"),
        *("gather b1", "forward b0", "gather b2", "forward b1", "forward b2"),
        *("gather b2", "gather b1", "gather b0"),
    ]


class PassesOn(nn.Module):
    """Returns its input beside its output: a tensor that another module produced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(pair[0])), pair[0]


def inputs_passed_on() -> list[str]:
    torch.manual_seed(0)
    reference = nn.Sequential(*(PassesOn() for _ in range(3)))
    model = copy.deepcopy(reference)
    issued: list[str] = []
    for i, layer in enumerate(model):
        fully_shard(layer)
        record_gathers(state_of(layer).groups[0], f"layer {i}", issued)
    fully_shard(model)
    x = torch.randn(2 * dist.get_world_size(), 5)
    for m, cut in ((reference, lambda x: x), (model, mine)):
        for _ in range(2):
            issued.clear()
            m.zero_grad()
            left, right = m((cut(x), cut(x)))
            (left + right).square().mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)
    return issued


def test_an_input_passed_on_does_not_bring_a_module_back(world) -> None:
    recorded = world(2).run(inputs_passed_on)[0]
    assert recorded == [
        *("layer 0", "layer 1", "layer 2"),
        *("layer 2", "layer 1", "layer 0"),
    ]


class ReducesInPartOfABlock(DefaultReduceScatter):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full((math.prod(size) + 5,), 77, dtype=dtype, device=device)[5:].view(*size)


def custom_comms(uneven: bool, reduce_scatter: type[ReduceScatter]) -> None:
    options = ModelOptions(width=6 if uneven else 8, hidden=13 if uneven else 16)
    model = sharded_decoder(options)
    for module in [*model.blocks, model]:
        module.set_custom_all_gather(DefaultAllGather())
        module.set_custom_reduce_scatter(reduce_scatter())
    batch = tokens_for(0, 2 * dist.get_world_size())
    model(mine(batch)).backward()
    assert_close(gradients(model), reference_gradients(batch, options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("uneven", "reduce_scatter"),
    [(False, DefaultReduceScatter), (True, DefaultReduceScatter), (True, ReducesInPartOfABlock)],
)
def test_comm_objects_take_the_packed_path(
    world, uneven: bool, reduce_scatter: type[ReduceScatter]
) -> None:
    world(3).run(custom_comms, uneven, reduce_scatter)


def shard_along(dim: int) -> None:
    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(dim) if param.ndim > 1 else None

    model = sharded_decoder(shard_placement_fn=placement)
    assert model.blocks[0].up.weight.placements == (Shard(dim % 2),)
    batch = tokens_for(0, 2 * dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    reference = make_decoder()
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        model(mine(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference(batch).backward()
        expected.step()
        expected.zero_grad()
    actual = weights(model)
    assert_close(actual, dict(reference.named_parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("world_size", "dim"), [(2, 1), (3, -1), (3, 0)])
def test_sharding_along_other_dimensions_even_or_not(world, world_size: int, dim: int) -> None:
    world(world_size).run(shard_along, dim)


# --- steps of unusual shape -----------------------------------------------------------------------


def several_forwards_before_a_backward(retain: bool) -> None:
    model, reference = sharded_decoder(), make_decoder()
    first = tokens_for(0, 2 * dist.get_world_size())
    second = tokens_for(1, 2 * dist.get_world_size())
    if retain:
        loss, expected = model(mine(first)), reference(first)
        for each in (loss, expected):
            each.backward(retain_graph=True)
            each.backward()
    else:
        (model(mine(first)) + 2 * model(mine(second))).backward()
        (reference(first) + 2 * reference(second)).backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("retain", [False, True])
def test_several_forwards_or_several_backwards(world, retain: bool) -> None:
    world(2).run(several_forwards_before_a_backward, retain)


def two_losses_two_backwards() -> None:
    model, reference = sharded_decoder(), make_decoder()
    batches = [tokens_for(step, 2 * dist.get_world_size()) for step in range(2)]
    losses = [model(mine(batch)) for batch in batches]
    for loss in losses:
        loss.backward()
    for batch in batches:
        reference(batch).backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


def test_two_forwards_then_two_backwards(world) -> None:
    world(2).run(two_losses_two_backwards)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.inner(torch.tanh(self.first(x)))))
        return result


def forwards_and_backwards_interleaved() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Outer(), Outer())
    model = copy.deepcopy(reference)
    for outer in model:
        fully_shard(outer.get_submodule("inner"))
        fully_shard(outer)
    fully_shard(model)
    xs = [torch.randn(2 * dist.get_world_size(), 16) for _ in range(4)]
    for m, cut in ((model, mine), (reference, lambda x: x)):
        losses = [m(cut(x)).square().mean() for x in xs[:2]]
        losses[0].backward()
        losses.append(m(cut(xs[2])).square().mean())
        losses[1].backward()  # its calls are older than those of the third forward
        losses.append(m(cut(xs[3])).square().mean())
        losses[3].backward()
        losses[2].backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


def test_forwards_and_backwards_may_interleave(world) -> None:
    world(2).run(forwards_and_backwards_interleaved)


class Sometimes(nn.Module):
    """Layers of which a step uses only some, and which may be used without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.extra = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, use: tuple[int, ...], extra: bool = False) -> Tensor:
        for index in use:
            x = torch.tanh(self.layers[index](x))
        return x * self.extra if extra else x


def steps_that_use_different_layers() -> None:
    torch.manual_seed(0)
    reference = Sometimes()
    model = copy.deepcopy(reference)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(2 * dist.get_world_size(), 5)
    for use, extra in [
        ((0, 1, 2, 3), False),
        ((0, 2), True),
        ((3, 1, 0), False),
        ((2,), False),
        ((0, 1, 2, 3), True),
        ((1, 1, 2), False),
    ]:
        for module, inputs in ((model, mine(x)), (reference, x)):
            module.zero_grad()
            module(inputs, use, extra).pow(2).mean().backward()
        assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert not any(
            group.gathered
            for module in model.modules()
            if (state := state_of(module))
            for group in state.groups
        )


def test_unused_parameters_get_no_gradient_and_the_order_may_change(world) -> None:
    world(2).run(steps_that_use_different_layers)


class LateUse(nn.Module):
    """Uses a weight detached after its gradient is complete: it must still be there in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Detached()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 300) / 17)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(torch.sin(x), self.weight.detach())
        return F.linear(x, self.weight)


def detached_use() -> None:
    torch.manual_seed(0)
    reference = LateUse()
    model = copy.deepcopy(reference)
    fully_shard(model.inner)
    fully_shard(model)
    x = torch.randn(2 * dist.get_world_size(), 300)
    ours, theirs = mine(x).clone().requires_grad_(), x.clone().requires_grad_()
    model(ours).pow(2).mean().backward()
    reference(theirs).pow(2).mean().backward()
    assert ours.grad is not None and theirs.grad is not None
    assert_close(ours.grad / dist.get_world_size(), mine(theirs.grad), rtol=1e-4, atol=1e-7)


def test_a_weight_is_kept_until_backward_has_left_its_module(world) -> None:
    world(2).run(detached_use)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Output:
    value: Tensor
    other: dict[str, Tensor]


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        z = torch.sin(y)
        if self.kind == "dict":
            return OrderedDict(y=y, z=[z])
        if self.kind == "dataclass":
            return Output(value=y, other={"z": z})
        if self.kind == "namedtuple":
            return Pair(y, z)
        return (y, (z, None, 3, x))


class Consumes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = Returns(kind), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        kind = self.first.kind
        if kind == "dict":
            z = out["z"][0]
        elif kind == "dataclass":
            z = out.other["z"]
        elif kind == "namedtuple":
            z = out.right
        else:
            z = out[1][0]
        return self.second(z)


def outputs_of_kind(kind: str) -> None:
    torch.manual_seed(0)
    reference = Consumes(kind)
    model = copy.deepcopy(reference)
    policy = MixedPrecisionPolicy(output_dtype=torch.float64)
    fully_shard(model.first, mp_policy=policy)
    fully_shard(model.second, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    fully_shard(model)
    x = torch.randn(2 * dist.get_world_size(), 3)
    model(mine(x)).pow(2).mean().backward()
    reference(x).pow(2).mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)
    out = model.first(mine(x))
    leaf = {"dict": lambda: out["y"], "dataclass": lambda: out.value}.get(kind, lambda: out[0])()
    assert leaf.dtype is torch.float64


@pytest.mark.parametrize("kind", ["dict", "dataclass", "namedtuple", "tuple"])
def test_outputs_in_containers(world, kind: str) -> None:
    world(2).run(outputs_of_kind, kind)


def evaluation_between_steps(fused: bool) -> None:
    model, reference = sharded_decoder(), make_decoder()
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused) for m in (model, reference)
    ]
    weights = [w for m in (model, reference) for w in (m.head.weight, m.blocks[1].up.weight)]
    for step in range(3):
        batch = tokens_for(step, 2 * dist.get_world_size())
        with torch.no_grad():
            evaluated = [model(mine(batch)), reference(mine(batch))]
        assert_close(evaluated[0], evaluated[1], rtol=1e-5, atol=0)
        with torch.inference_mode():
            assert_close(model(mine(batch)), evaluated[1], rtol=1e-5, atol=0)
        model(mine(batch)).backward()
        reference(batch).backward()
        model(mine(batch))  # leaves the root gathered while the optimizer steps
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # A forward whose backward never comes leaves the root gathered; then the shards change.
        model(mine(batch))
        with torch.no_grad():
            for param in weights:
                param.mul_(0.9)


@pytest.mark.parametrize("fused", [False, True])
def test_evaluation_sees_the_weights_of_the_last_step(world, fused: bool) -> None:
    world(2).run(evaluation_between_steps, fused)


def first_forward_in_inference_mode() -> None:
    model = sharded_decoder()
    batch = tokens_for(0, 2 * dist.get_world_size())
    with torch.inference_mode():
        model(mine(batch))
    model(mine(batch)).backward()
    assert_close(gradients(model), reference_gradients(batch), rtol=1e-5, atol=1e-6)


def test_a_first_forward_in_inference_mode_does_not_spoil_training(world) -> None:
    world(2).run(first_forward_in_inference_mode)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def lstm() -> None:
    torch.manual_seed(0)
    reference = Recurrent()
    model = copy.deepcopy(reference)
    fully_shard(model.lstm)
    fully_shard(model)
    x = torch.randn(2 * dist.get_world_size(), 5, 4)
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        model(mine(x)).pow(2).mean().backward()
        reference(x).pow(2).mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


def test_modules_that_keep_lists_of_their_parameters(world) -> None:
    world(2).run(lstm)


def grouped_modules() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    model = copy.deepcopy(reference)
    fully_shard([model[0], model[1]])
    fully_shard(model)
    x = torch.randn(2 * dist.get_world_size(), 3)
    for _ in range(2):
        for m, inputs in ((model, mine(x)), (reference, x)):
            m.zero_grad()
            m(inputs).pow(2).mean().backward()
        assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


def test_a_group_of_several_modules(world) -> None:
    world(2).run(grouped_modules)


def deep_nesting() -> None:
    torch.manual_seed(0)

    def nest(depth: int) -> nn.Module:
        inner = [nest(depth - 1)] if depth else []
        return nn.Sequential(nn.Linear(4, 4), *inner, nn.Tanh(), nn.Linear(4, 4))

    reference = nest(4)
    model = copy.deepcopy(reference)
    modules = [m for m in model.modules() if isinstance(m, nn.Sequential)]
    for module in reversed(modules):
        fully_shard(module, reshard_after_forward=True)
    x = torch.randn(2 * dist.get_world_size(), 4)
    for _ in range(3):
        for m, inputs in ((model, mine(x)), (reference, x)):
            m.zero_grad()
            m(inputs).pow(2).mean().backward()
        assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


def test_deep_nesting(world) -> None:
    world(2).run(deep_nesting)


def trainable_changes_between_steps() -> None:
    model, reference = sharded_decoder(), make_decoder()
    for step, frozen in enumerate([(), ("up.weight",), ("up.weight", "norm.bias"), ()]):
        batch = tokens_for(step, 2 * dist.get_world_size())
        for m, inputs in ((model, mine(batch)), (reference, batch)):
            m.zero_grad()
            for name, param in m.named_parameters():
                param.requires_grad_(not (frozen and name.endswith(frozen)))
            m(inputs).backward()
        assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


def test_parameters_may_be_frozen_and_unfrozen_between_steps(world) -> None:
    world(2).run(trainable_changes_between_steps)


def optimizer_in_backward() -> None:
    model, reference = sharded_decoder(), make_decoder()
    for m in (model, reference):
        for param in m.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)

            def step(p: Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(step)
    for index in range(3):
        batch = tokens_for(index, 2 * dist.get_world_size())
        model(mine(batch)).backward()
        reference(batch).backward()
    assert all(param.grad is None for param in model.parameters())
    actual = weights(model)
    assert_close(actual, dict(reference.named_parameters()), rtol=1e-5, atol=1e-6)


def test_the_optimizer_may_step_in_backward(world) -> None:
    world(2).run(optimizer_in_backward)


def not_contiguous() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 4))
    reference[0].to(memory_format=torch.channels_last)
    reference[2].weight = nn.Parameter(torch.randn(20, 4).t())
    assert not reference[0].weight.is_contiguous() and not reference[2].weight.is_contiguous()
    model = copy.deepcopy(reference)
    fully_shard(model)
    x = torch.randn(2 * dist.get_world_size(), 3, 4, 4)
    model(mine(x)).pow(2).mean().backward()
    reference(x).pow(2).mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


def test_parameters_need_not_be_contiguous(world) -> None:
    world(3).run(not_contiguous)


def mixed_dtypes() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4).double())
    counter = nn.Parameter(torch.arange(5), requires_grad=False)
    reference[0].register_parameter("counter", counter)
    model = copy.deepcopy(reference)
    for m in (model, reference):
        m[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    fully_shard(model)
    x = torch.randn(2 * dist.get_world_size(), 3)
    model(mine(x)).pow(2).mean().backward()
    reference(x).pow(2).mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)
    assert model[1].weight.grad.dtype is torch.float64
    assert torch.equal(whole(model[0].counter), torch.arange(5))


def test_one_group_may_mix_dtypes(world) -> None:
    world(3).run(mixed_dtypes)


def test_a_deleted_model_leaves_nothing_behind() -> None:
    with fake_world(2):
        model = sharded_decoder()
        loss = model(tokens_for(0, 2))
        loss.backward()
        state = weakref.ref(state_of(model))
        buffer = weakref.ref(state().groups[0].routes.from_shards)
        del model
        gc.collect()
        assert loss is not None  # its graph alone does not keep the model
        assert state() is None and buffer() is None


def test_hsdp_parameters_are_replicated_and_sharded() -> None:
    with fake_world(4, rank=3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        layer = nn.Linear(3, 5)
        weight = layer.weight.detach().clone()
        fully_shard(layer, mesh=mesh)
        assert layer.weight.placements == (Replicate(), Shard(0))
        assert torch.equal(layer.weight.to_local(), weight[3:])


# --- the class -----------------------------------------------------------------------------------------


def test_a_slice_of_a_sharded_container_is_an_ordinary_container() -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        part = model[:2]
        assert type(part) is nn.Sequential and list(part) == [model[0], model[1]]
        assert isinstance(part[0], FSDPModule)
        with disable_fsdp_module_new_init():
            assert not hasattr(type(model)(), "_modules")
        assert get_cls_to_fsdp_cls()[nn.Sequential] is type(model)


def test_the_class_of_methods_is_not_for_making() -> None:
    with pytest.raises(LifecycleError, match="has no instances of its own"):
        FSDPModule()
