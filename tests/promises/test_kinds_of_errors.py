"""Misuse raises errors of torch's built-in kinds, and what torch warns of is warned of here."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

import fullshard
from fullshard import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.fake import fake_world
from tests.helpers.groups import alone
from tests.helpers.training import FULLSHARD, TORCH, needs_torch_2_13
from tests.helpers.wrapped_nets import library

KINDS = (ValueError, TypeError, RuntimeError, NotImplementedError)
CPU = torch.device("cpu")
X = torch.ones(2, 4)


def line() -> nn.Module:
    return nn.Linear(4, 4)


def pair() -> nn.Sequential:
    return nn.Sequential(line(), line())


def ranks(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc")[: len(shape)])


class Plain(nn.Module):
    """Has a parameter and no `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Apis:
    """Both apis of one library, in the same words."""

    def __init__(self, name: str) -> None:
        self.all = library(name)
        self.wrap_policies = self.all.wrap
        self.FSDP = self.all.FullyShardedDataParallel
        self.strategy = self.all.ShardingStrategy
        self.kind = self.all.StateDictType

    def shard(self, module: Any, **options: Any) -> Any:
        return self.all.fully_shard(module, **options)

    def sharded(self) -> Any:
        model = pair()
        self.shard(model[0])
        return self.shard(model)

    def wrap(self, module: Any, **options: Any) -> Any:
        return self.FSDP(module, **{"device_id": CPU, **options})

    def by_policy(self, policy: Any) -> Any:
        return self.wrap(pair(), auto_wrap_policy=policy)

    def wrapped(self) -> Any:
        """A wrapper with another one below, after a forward."""
        model = self.wrap(nn.Sequential(self.wrap(line()), line()))
        model(X)
        return model

    def trained(self, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
        model = self.wrap(line(), use_orig_params=True, **options)
        optimizer = torch.optim.Adam(model.parameters())
        model(X).sum().backward()
        optimizer.step()
        return model, optimizer

    def summon(self, **options: Any) -> None:
        module = self.wrap(line(), use_orig_params="offload_to_cpu" in options)
        with self.FSDP.summon_full_params(module, **options):
            pass


def forward_on_meta(apis: Apis) -> None:
    apis.shard(pair().to("meta"))(X)


def shared_by_two_groups(apis: Apis) -> None:
    model = pair()
    model[1].weight = model[0].weight
    apis.shard(model[0])
    apis.shard(model[1])
    apis.shard(model)(X)


def reset_below_the_root(apis: Apis) -> None:
    model = apis.sharded()
    model(X)
    model[0].reset_iter_state()


def half_frozen(apis: Apis) -> None:
    model = pair()
    model[0].weight.requires_grad_(False)
    apis.wrap(model)


def half_in_half(apis: Apis) -> None:
    model = pair()
    model[0].half()
    apis.wrap(model)


def ignored_of_both_kinds(apis: Apis) -> None:
    model = pair()
    apis.wrap(model, ignored_states=[model[0], model[1].weight])


def ignored_wrapper(apis: Apis) -> None:
    inner = apis.wrap(line())
    apis.wrap(nn.Sequential(inner, line()), ignored_modules=[inner])


def no_sync_within_forward(apis: Apis) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = line()

        def forward(self, x: Tensor) -> Any:
            with model.no_sync():
                return self.layer(x)

    model = apis.wrap(Net())
    model(X)


def local_states_with_a_mesh(apis: Apis) -> None:
    model, optimizer = apis.trained(device_mesh=ranks(2))
    apis.FSDP.set_state_dict_type(model, apis.kind.LOCAL_STATE_DICT)
    apis.FSDP.optim_state_dict(model, optimizer)


def nested_enable_wrap(apis: Apis) -> None:
    for_all = apis.wrap_policies.enable_wrap
    with for_all(wrapper_cls=apis.FSDP), for_all(wrapper_cls=apis.FSDP):
        pass


FULLY_SHARD: dict[str, Callable[[Apis], Any]] = {
    "list without forward": lambda d: d.shard(nn.ModuleList([line()])),
    "dict without forward": lambda d: d.shard(nn.ModuleDict({"a": line()})),
    "mesh of three axes": lambda d: d.shard(line(), mesh=ranks(1, 1, 2)),
    "reshard_after_forward as text": lambda d: d.shard(line(), reshard_after_forward="x"),
    "reshard_after_forward, float": lambda d: d.shard(line(), reshard_after_forward=1.5),
    "reshard_after_forward, no divisor": lambda d: d.shard(line(), reshard_after_forward=3),
    "reshard_after_forward, negative": lambda d: d.shard(line(), reshard_after_forward=-1),
    "ignored_params, int": lambda d: d.shard(line(), ignored_params=3),
    "placement that is none": lambda d: d.shard(line(), shard_placement_fn=lambda p: Replicate()),
    "placement, int": lambda d: d.shard(line(), shard_placement_fn=lambda p: 1),
    "placement function, int": lambda d: d.shard(line(), shard_placement_fn=3),
    "no data-parallel axis": lambda d: d.all.DataParallelMeshDims(),
    "unknown axis": lambda d: d.shard(
        line(), mesh=ranks(2), dp_mesh_dims=d.all.DataParallelMeshDims(shard="z")
    ),
    "axes and plain parameters": lambda d: d.shard(
        line(), mesh=ranks(2), dp_mesh_dims=d.all.DataParallelMeshDims(shard="a")
    ),
    "parameter of two groups": shared_by_two_groups,
    "forward on meta": forward_on_meta,
    "root in a list": lambda d: d.shard([line(), line()])[0](X),
    "prefetch of a plain module": lambda d: d.sharded().set_modules_to_forward_prefetch([line()]),
    "prefetch of text": lambda d: d.sharded().set_modules_to_backward_prefetch(["x"]),
    "prefetch of no list": lambda d: d.sharded().set_modules_to_forward_prefetch(3),
    "set_reshard_after_forward, int": lambda d: d.sharded().set_reshard_after_forward(1),
    "input buffers, bool": lambda d: d.sharded().set_reduce_scatter_max_input_buffers(True),
    "input buffers, none": lambda d: d.sharded().set_reduce_scatter_max_input_buffers(0),
    "input buffers, text": lambda d: d.sharded().set_reduce_scatter_max_input_buffers("x"),
    "unknown symmetric memory": lambda d: d.sharded().set_symm_mem_for_comm("x"),
    "reset below the root": reset_below_the_root,
    "hook's stream with replicas": lambda d: d.shard(line(), mesh=ranks(1, 2)).set_all_reduce_hook(
        print, stream=3
    ),
    "shared streams of a plain module": lambda d: d.all.share_comm_ctx([line()]),
    "shared streams of no list": lambda d: d.all.share_comm_ctx(3),
    "unknown method": lambda d: d.all.register_fsdp_forward_method(d.shard(line()), "x"),
    "load plain tensors": lambda d: d.shard(line()).load_state_dict(line().state_dict()),
    "load nothing": lambda d: d.shard(line()).load_state_dict({}),
    "too many arguments": lambda d: d.shard(line()).unshard(1, 2, 3),
}

WRAPPER: dict[str, Callable[[Apis], Any]] = {
    "group and mesh": lambda d: d.wrap(
        line(), process_group=dist.group.WORLD, device_mesh=ranks(2)
    ),
    "one group for replicas": lambda d: d.wrap(
        line(), process_group=dist.group.WORLD, sharding_strategy=d.strategy.HYBRID_SHARD
    ),
    "texts for groups": lambda d: d.wrap(
        line(), process_group=("a", "b"), sharding_strategy=d.strategy.HYBRID_SHARD
    ),
    "one axis for replicas": lambda d: d.wrap(
        line(), device_mesh=ranks(2), sharding_strategy=d.strategy.HYBRID_SHARD
    ),
    "policy, int": lambda d: d.by_policy(3),
    "policy, set": lambda d: d.by_policy({nn.Linear}),
    "policy without arguments": lambda d: d.by_policy(lambda: True),
    "policy, its answer": lambda d: d.by_policy(d.wrap_policies.CustomPolicy(lambda m: 3)),
    "policy, its options": lambda d: d.by_policy(
        d.wrap_policies.CustomPolicy(lambda m: {"x": 1} if type(m) is nn.Linear else False)
    ),
    "policy of no function": lambda d: d.by_policy(d.wrap_policies.CustomPolicy(3)),
    "policy of a class": lambda d: d.by_policy(d.wrap_policies.ModuleWrapPolicy(nn.Linear)),
    "policy of texts": lambda d: d.by_policy(d.wrap_policies.ModuleWrapPolicy({"x"})),
    "policy of texts, function": lambda d: d.wrap_policies.transformer_auto_wrap_policy(
        line(), False, 1, {"x"}
    ),
    "policy over wrappers": lambda d: d.wrap(
        nn.Sequential(d.wrap(line())),
        auto_wrap_policy=d.wrap_policies.ModuleWrapPolicy({nn.Linear}),
    ),
    "device, float": lambda d: d.wrap(line(), device_id=1.5),
    "device, unknown": lambda d: d.wrap(line(), device_id="x"),
    "meta and no function": lambda d: d.wrap(line().to("meta"), param_init_fn=3),
    "meta left": lambda d: d.wrap(Plain().to("meta"), param_init_fn=lambda m: None),
    "ignored twice": lambda d: d.wrap(pair(), ignored_modules=[line()], ignored_states=[line()]),
    "ignored, both kinds": ignored_of_both_kinds,
    "ignored modules, texts": lambda d: d.wrap(pair(), ignored_modules=["x"]),
    "ignored modules, int": lambda d: d.wrap(pair(), ignored_modules=3),
    "ignored modules, module": lambda d: d.wrap(pair(), ignored_modules=line()),
    "ignored states, int": lambda d: d.wrap(pair(), ignored_states=3),
    "ignored states, tensor": lambda d: d.wrap(pair(), ignored_states=[torch.ones(1)]),
    "ignored wrapper": ignored_wrapper,
    "frozen in part": half_frozen,
    "two dtypes": half_in_half,
    "no dtype": lambda d: d.wrap(line(), mixed_precision=d.all.MixedPrecision(param_dtype="x"))(X),
    "deepcopy": lambda d: copy.deepcopy(d.wrap(line())),
    "no_sync below": lambda d: d.wrapped().module[0].no_sync().__enter__(),
    "no_sync within forward": no_sync_within_forward,
    "clip below": lambda d: d.wrapped().module[0].clip_grad_norm_(1.0),
    "clip to text": lambda d: d.wrapped().clip_grad_norm_("x"),
    "hook of no function": lambda d: d.wrap(line()).register_comm_hook(None, 3),
    "summon, rank 0 writes": lambda d: d.summon(rank0_only=True),
    "summon, gradients offloaded": lambda d: d.summon(with_grads=True, offload_to_cpu=True),
    "summon, flat gradients": lambda d: d.summon(with_grads=True),
    "config of another kind": lambda d: d.FSDP.set_state_dict_type(
        d.wrap(line()), d.kind.FULL_STATE_DICT, d.all.ShardedStateDictConfig()
    ),
    "optimizer's config of another kind": lambda d: d.FSDP.set_state_dict_type(
        d.wrap(line()), d.kind.FULL_STATE_DICT, None, d.all.ShardedOptimStateDictConfig()
    ),
    "load nothing": lambda d: d.wrap(line()).load_state_dict({}),
    "load other shapes": lambda d: d.wrap(line()).load_state_dict(nn.Linear(3, 3).state_dict()),
    "optimizer's state dict without state": lambda d: d.FSDP.optim_state_dict_to_load(
        *d.trained(), {}
    ),
    "local optimizer states with a mesh": local_states_with_a_mesh,
    "use of a sharded parameter": lambda d: d.wrap(line()).module.weight + 1,
    "enable_wrap without class": lambda d: d.wrap_policies.enable_wrap().__enter__(),
    "enable_wrap twice": nested_enable_wrap,
}


def kinds_of(misuse: Callable[[Apis], Any], apis: Apis) -> tuple[set[type], BaseException | None]:
    with contextlib.redirect_stdout(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            misuse(apis)
        except Exception as error:
            return {kind for kind in KINDS if isinstance(error, kind)}, error
    return set(), None


@needs_torch_2_13
@pytest.mark.parametrize("table", [FULLY_SHARD, WRAPPER], ids=["fully_shard", "wrapper"])
def test_misuse_raises_what_torch_raises(table: dict[str, Callable[[Apis], Any]]) -> None:
    theirs, ours = Apis(TORCH), Apis(FULLSHARD)
    wrong = []
    with fake_world(2):
        for name, misuse in table.items():
            expected, their_error = kinds_of(misuse, theirs)
            found, our_error = kinds_of(misuse, ours)
            assert expected, f"{name}: torch raises none of these kinds: {their_error!r}"
            if not expected <= found:
                wrong.append(f"{name}: torch {their_error!r}, ours {our_error!r}")
    assert not wrong, "\n".join(wrong)


# --- warnings ---------------------------------------------------------------------------------------


def warned(build: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()
    return [str(each.message) for each in caught if each.filename == __file__]


def test_what_torch_warns_of_is_warned_of() -> None:
    with fake_world(2):
        ignored = line()
        (text,) = warned(lambda: FSDP(ignored, ignored_modules=[ignored]))
        assert "Linear" in text and "nothing in it is sharded" in text
        low, linear = MixedPrecision(param_dtype=torch.bfloat16), ModuleWrapPolicy({nn.Linear})
        net = nn.Sequential(line(), nn.BatchNorm1d(4))
        (text,) = warned(lambda: FSDP(net, mixed_precision=low, auto_wrap_policy=linear))
        assert "without mixed precision: ['1']" in text and "_BatchNorm" in text
        quiet = [
            lambda: FSDP(pair(), mixed_precision=low, auto_wrap_policy=linear),
            lambda: FSDP(nn.Sequential(line(), nn.BatchNorm1d(4)), auto_wrap_policy=linear),
            lambda: FSDP(pair(), ignored_modules=[line()]),
            lambda: FSDP(pair(), sharding_strategy=ShardingStrategy.NO_SHARD),
        ]
        assert [warned(build) for build in quiet] == [[], [], [], []]
    with alone():
        for strategy in (None, ShardingStrategy.SHARD_GRAD_OP):
            build = (lambda s: lambda: FSDP(line(), sharding_strategy=s))(strategy)
            (text,) = warned(build)
            assert "one rank" in text and "NO_SHARD instead of" in text
        assert warned(lambda: FSDP(line(), sharding_strategy=ShardingStrategy.NO_SHARD)) == []


def test_errors_of_two_kinds_are_caught_as_either() -> None:
    assert issubclass(fullshard.OptionTypeError, (fullshard.ConfigurationError, TypeError))
    for kind in (fullshard.ConfigurationError, fullshard.LifecycleError, ValueError, RuntimeError):
        assert issubclass(fullshard.UsageError, kind)
