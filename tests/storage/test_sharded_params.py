"""Sharded and unsharded parameters of one group: which are on the modules, and what users may put there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import ConfigurationError
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.storage.flat_parameter import FlatParameter, ShardedAttribute
from fullshard.storage.sharded_params import group_of, unsharded_name
from tests.helpers.compare import assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.param_groups import FORMATS, make_group

each_format = pytest.mark.parametrize("shard_format", FORMATS)


class Listing(nn.Linear):
    """Keeps a list of what is assigned to it, as recurrent layers do."""

    assigned: list[str]

    def __init__(self) -> None:
        object.__setattr__(self, "assigned", [])
        super().__init__(4, 4)

    def __setattr__(self, name: str, value: Any) -> None:
        self.assigned.append(name)
        super().__setattr__(name, value)


class Tied(nn.Module):
    """Two layers with one weight, one of which notices assignments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = Listing()
        self.second.weight = self.first.weight


def unshard(group: FSDPParamGroup) -> None:
    group.unshard()
    group.wait()


# --- the swap ------------------------------------------------------------------------------------------


@each_format
def test_all_owners_of_a_parameter_have_the_same_one_sharded_or_not(shard_format: str) -> None:
    with fake_world(2):
        model = Tied()
        group = make_group(model, shard_format=shard_format)
        sharded = model.first.weight
        assert model.second.weight is sharded
        for _ in range(2):
            unshard(group)
            unsharded = model.first.weight
            assert unsharded is model.second.weight is group.params[0].unsharded_param
            assert unsharded_name(unsharded) == "first.weight" and unsharded.shape == (4, 4)
            group.use_sharded_params()
            assert model.first.weight is model.second.weight is sharded
            group.wait()
            assert model.first.weight is unsharded, "the same objects in every step"
            group.reshard()
            assert model.first.weight is sharded


def test_modules_that_notice_assignments_do_and_others_are_written_directly() -> None:
    with fake_world(2):
        model = Tied()
        group = make_group(model)
        model.second.assigned.clear()
        unshard(group)
        assert model.second.assigned == ["weight", "bias"]
        group.reshard()
        assert model.second.assigned == ["weight", "bias"] * 2


@each_format
def test_each_format_has_its_own_sharded_parameters(shard_format: str) -> None:
    with fake_world(2):
        model = nn.Linear(4, 6)
        original = model.weight
        group = make_group(model, shard_format=shard_format)
        names = dict(model.named_parameters())
        if shard_format == "rows":
            assert names["weight"].shape == (6, 4) and group.sharded_params[0].local.shape == (3, 4)
        elif shard_format == "flat":
            assert names["weight"] is original and original.shape == (15,)
        else:
            assert [*names] == ["_flat_param"] and isinstance(names["_flat_param"], FlatParameter)
            assert isinstance(model.weight, ShardedAttribute) and model.weight.shape == (6, 4)
        assert all(group_of(param) == "group" for param in names.values())


def test_unsharded_parameters_follow_what_users_freeze() -> None:
    with fake_world(2):
        model = nn.Linear(4, 6)
        group = make_group(model)
        unshard(group)
        group.reshard()
        model.weight.requires_grad_(False)
        unshard(group)
        assert [param.requires_grad for param in model.parameters()] == [False, True]
        assert [param.trainable for param in group.params] == [False, True]


# --- replaced by users ---------------------------------------------------------------------------------


def replaced(group: FSDPParamGroup) -> bool:
    return group.shards.are_replaced(on_modules=True)


@each_format
def test_only_what_was_replaced_is_noticed(shard_format: str) -> None:
    with fake_world(2):
        model = nn.Linear(4, 6)
        group = make_group(model, shard_format=shard_format)
        param: Any = next(model.parameters())
        owner, name = (
            group.sharded_params[0].owners[0].module,
            group.sharded_params[0].owners[0].name,
        )
        with torch.no_grad():
            param.mul_(2)
        assert not replaced(group), "writing is not replacing"
        if shard_format == "rows":
            param._local_tensor = param._local_tensor.clone()
        else:
            param.data = param.data.clone()
        assert replaced(group), "other data"
        group.notice_replacements()
        assert not replaced(group)
        setattr(owner, name, nn.Parameter(param.detach().clone()))
        assert replaced(group), "another parameter"
        assert not group.shards.are_replaced(on_modules=False), "nobody looked at the modules"
        group.notice_replacements()
        assert not replaced(group) and group.sharded_params[0].param is not param


def test_the_same_memory_in_another_dtype_is_another_parameter() -> None:
    with fake_world(2):
        model = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        group = make_group(model, shard_format="flat")
        assert not replaced(group)
        model.weight.data = model.weight.data.view(torch.float16)
        assert replaced(group)


@each_format
def test_what_is_adopted_keeps_its_values_and_lies_in_a_new_buffer(shard_format: str) -> None:
    with fake_world(2):
        model = nn.Linear(4, 6)
        group = make_group(model, shard_format=shard_format)
        buffer, found = group.shards.buffer, group.sharded_params[0]
        local = found.local.clone()
        owner = found.owners[0]
        setattr(owner.module, owner.name, nn.Parameter(found.param.detach().double()))
        if shard_format != "rows" and shard_format != "flat parameter":
            model.bias.data = model.bias.data.double()  # they are one segment
        group.notice_replacements()
        assert group.shards.buffer is not buffer
        assert found.local.dtype == torch.float64 and found.param is owner.current()
        assert_equal(found.local, local.double())
        begin = group.shards.buffer.bytes.data_ptr()
        inside = range(begin, begin + group.shards.buffer.nbytes)
        held = [each.local for each in group.sharded_params if each.local.numel()]
        assert held and all(local.data_ptr() in inside for local in held)


def test_what_cannot_replace_a_parameter_is_named_and_nothing_changes() -> None:
    with fake_world(2):
        model = nn.Linear(4, 6)
        group = make_group(model)
        before = [each.param for each in group.sharded_params]
        buffer = group.shards.buffer
        model.weight = nn.Parameter(torch.zeros(6, 4))
        with pytest.raises(ConfigurationError, match=r"weight: expected a DTensor, got Parameter"):
            group.notice_replacements()
        assert [each.param for each in group.sharded_params] == before
        assert group.shards.buffer is buffer


def test_data_that_are_assigned_to_unsharded_parameters_are_kept_if_they_fit() -> None:
    with fake_world(2):
        model = nn.Linear(4, 6)
        group = make_group(model)
        unshard(group)
        model.weight.data = torch.full((6, 4), 7.0)
        group.refresh_shards()
        assert_equal(group.sharded_params[0].local, torch.full((3, 4), 7.0))
        unshard(group)
        model.weight.data = torch.zeros(6, 5)
        with pytest.raises(ConfigurationError, match=r"weight, of shape \(6, 4\).*\(6, 5\)"):
            group.refresh_shards()
        group.refresh_shards()  # the parameter has its own data again
        assert_equal(group.sharded_params[0].local, torch.full((3, 4), 7.0))


# --- the version guard ---------------------------------------------------------------------------------


def test_backward_is_refused_while_the_memory_is_not_there_and_only_then() -> None:
    with fake_world(2):
        model = nn.Linear(4, 6)
        group = make_group(model)
        unshard(group)
        x = torch.ones(2, 4, requires_grad=True)

        def backward(output: Tensor) -> None:
            torch.autograd.grad(output.sum(), x, retain_graph=True)

        output = model(x)
        group.reshard()
        with pytest.raises(RuntimeError):
            backward(output)
        group.unshard()
        with pytest.raises(RuntimeError):
            backward(output)  # compute has not waited for the gather
        group.wait()
        backward(output)
        group.use_sharded_params()
        backward(output)  # the memory is kept


def test_one_rank_s_parameters_are_never_guarded_since_their_memory_stays() -> None:
    with fake_world(1):
        model = nn.Linear(4, 6)
        group = make_group(model)
        unshard(group)
        x = torch.ones(2, 4, requires_grad=True)
        output = model(x)
        group.reshard()
        (gradient,) = torch.autograd.grad(output.sum(), x)
        assert gradient.shape == (2, 4)
