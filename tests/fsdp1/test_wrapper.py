"""`FullyShardedDataParallel`: what can be wrapped, how, and what a wrapper can do; against torch's where it can."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import (
    BackwardPrefetch,
    ConfigurationError,
    CPUOffload,
    FlatParameter,
    FullyShardedDataParallel as FSDP,
    LifecycleError,
    MixedPrecision,
    ShardingStrategy,
    UnshardHandle,
    UsageError,
)
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap as wrap_by_hand
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.groups import alone
from tests.helpers.training import FULLSHARD, TORCH
from tests.helpers.wrapped_nets import (
    LIBRARIES,
    TOKENS,
    Layer,
    Net,
    library,
    make_net,
    policy,
    state_dict,
    wrap,
)

CPU = torch.device("cpu")


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def pair(*, width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


# --- signatures -----------------------------------------------------------------------------------


def parameters_of(function: Callable[..., Any]) -> list[tuple[str, Any, str]]:
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, str(each.default)) for each in parameters]


def test_signatures_are_those_of_torch() -> None:
    theirs = library(TORCH).FullyShardedDataParallel
    own = [each for each in parameters_of(FSDP.__init__) if each[0] != "fuse_gradients"]
    assert own == parameters_of(theirs.__init__)  # torch has no such option
    public = [
        name
        for name in dir(theirs)
        if not name.startswith("_") and getattr(theirs, name) is not getattr(nn.Module, name, None)
    ]
    done_elsewhere = [name for name in public if "optim_state_dict" in name]
    assert {"summon_full_params", "no_sync", "module", "apply"} < set(public)
    for name in public:
        if name in done_elsewhere and not hasattr(FSDP, name):
            continue
        ours = inspect.getattr_static(FSDP, name)
        assert type(ours) is type(inspect.getattr_static(theirs, name)), name
        if not isinstance(ours, property):
            assert parameters_of(getattr(FSDP, name)) == parameters_of(getattr(theirs, name)), name
    for name in ("state_dict", "load_state_dict", "_unshard", "named_buffers"):
        assert parameters_of(getattr(FSDP, name)) == parameters_of(getattr(theirs, name)), name


def test_all_names_are_there() -> None:
    exported = set(importlib.import_module("torch.distributed.fsdp").__all__)
    missing = {name for name in exported if not hasattr(fullshard, name)}
    assert not missing
    for name in exported:
        theirs, ours = getattr(library(TORCH), name), getattr(fullshard, name)
        if inspect.isclass(theirs) and name.endswith(
            ("Config", "Precision", "Offload", "Settings")
        ):
            own = [
                each for each in parameters_of(ours) if each[0] != "wire_dtype"
            ]  # torch has none
            assert own == parameters_of(theirs), name


# --- ranks ----------------------------------------------------------------------------------------


def test_one_rank_shards_nothing_and_keeps_shapes() -> None:
    with alone():
        for options in ({}, {"device_mesh": init_device_mesh("cpu", (1,))}):
            model = FSDP(make_net(), use_orig_params=True, **options)
            assert model.sharding_strategy is ShardingStrategy.NO_SHARD
            assert [p.shape for p in model.parameters()] == [p.shape for p in Net().parameters()]
            model(TOKENS).sum().backward()
            assert all(p.grad.shape == p.shape for p in model.parameters())
            assert_equal(model.state_dict(), make_net().state_dict())
        flat = FSDP(make_net())
        (param,) = flat.parameters()
        assert isinstance(param, FlatParameter)
        assert flat.rank == 0 and flat.world_size == 1


def in_all_ways() -> None:
    """On four ranks: groups, pairs of groups and meshes."""
    rank = dist.get_rank()
    shard, _ = dist.new_subgroups(2)
    replicate, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    batch = TOKENS + rank
    expected = make_net()
    (sum(expected(TOKENS + each).sum() for each in range(4)) / 4).backward()
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    for options, world in (
        ({}, 4),
        ({"device_mesh": init_device_mesh("cpu", (4,))}, 4),
        ({**hybrid, "process_group": (shard, replicate)}, 2),
        ({**hybrid, "device_mesh": mesh}, 2),
        ({**hybrid, "device_mesh": init_device_mesh("cpu", (2, 2))}, 2),
        ({"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "device_mesh": mesh}, 2),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, 4),
    ):
        model = FSDP(make_net(), auto_wrap_policy=ModuleWrapPolicy({Layer}), **options)
        assert {each.world_size for each in FSDP.fsdp_modules(model)} == {world}
        assert model.rank == (rank if world == 4 else rank % 2)
        model(batch).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        actual = model.state_dict()
        for name, param in expected.named_parameters():
            assert_close(actual[name], param.detach() - param.grad, rtol=1e-5, atol=1e-6)
    own = FSDP(make_net(), process_group=shard)
    assert own.process_group is shard and own.world_size == 2
    comm_hook = (None, lambda state, gradient, output: None)
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        with pytest.raises(ConfigurationError, match="hybrid strategies have two"):
            FSDP(nn.Linear(2, 2), sharding_strategy=strategy, device_mesh=mesh).register_comm_hook(
                *comm_hook
            )


def test_ranks_are_groups_or_meshes(world) -> None:
    world(4).run(in_all_ways)


def test_options_that_cannot_be_are_refused() -> None:
    theirs = library(TORCH)
    with fake_world(4):
        group, line = dist.group.WORLD, init_device_mesh("cpu", (4,))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        hybrid = ShardingStrategy.HYBRID_SHARD
        some, layer = nn.Linear(2, 2), nn.Linear(2, 2)
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("got both", {"process_group": group, "device_mesh": line}),
            ("takes one process group, got 2", {"process_group": (group, group)}),
            ("two process groups", {"process_group": group, "sharding_strategy": hybrid}),
            ("two process groups", {"process_group": (group,), "sharding_strategy": hybrid}),
            ("2 axes", {"device_mesh": line, "sharding_strategy": hybrid}),
            ("1 axis", {"device_mesh": square}),
            ("must be a DeviceMesh", {"device_mesh": group}),
            ("must be a ProcessGroup", {"process_group": "all"}),
            ("LOCAL_WORLD_SIZE", {"sharding_strategy": hybrid}),
            ("fullshard.ShardingStrategy", {"sharding_strategy": "FULL_SHARD"}),
            (
                "Import it from fullshard",
                {"sharding_strategy": theirs.ShardingStrategy.FULL_SHARD},
            ),
            ("Import it from fullshard", {"mixed_precision": theirs.MixedPrecision()}),
            ("Import it from fullshard", {"cpu_offload": theirs.CPUOffload()}),
            (
                "Import it from fullshard",
                {"backward_prefetch": theirs.BackwardPrefetch.BACKWARD_PRE},
            ),
            ("cpu_offload must be", {"cpu_offload": True}),
            ("use_orig_params must be True or False", {"use_orig_params": "no"}),
            ("param_init_fn must be a function", {"param_init_fn": 3}),
            ("ModuleWrapPolicy", {"auto_wrap_policy": {nn.Linear}}),
            ("device_id must be", {"device_id": 1.5}),
            ("device_id must be", {"device_id": True}),
            ("a device of this machine", {"device_id": "nonsense"}),
            ("got both", {"ignored_modules": [some], "ignored_states": [some.weight]}),
            ("parameters only or modules only", {"ignored_states": [some, layer.weight]}),
            ("collection of modules", {"ignored_modules": ["some"]}),
            ("collection of modules", {"ignored_modules": some}),
            ("collection of parameters", {"ignored_states": [torch.ones(1)]}),
        ]
        for text, options in wrong:
            with pytest.raises(ValueError, match=text):
                FSDP(layer, **options)
        with pytest.raises(
            ConfigurationError, match=r"module must be an instance of torch\.nn\.Module"
        ):
            FSDP("layer")
        assert names(layer) == ["weight", "bias"] and layer.weight.shape == (2, 2)
        assert FSDP(layer, device_id="cpu").compute_device == CPU
        assert FSDP(nn.Linear(2, 2), device_id=CPU).compute_device == CPU
        offloaded = FSDP(nn.Linear(2, 2), cpu_offload=CPUOffload(offload_params=True))
        assert offloaded.cpu_offload.offload_params
        late = FSDP(nn.Linear(2, 2), backward_prefetch=BackwardPrefetch.BACKWARD_POST)
        assert late.backward_prefetch is BackwardPrefetch.BACKWARD_POST


def on_meta() -> str:
    with pytest.raises(UsageError, match="a device of this machine") as refused:
        FSDP(nn.Linear(2, 2, device="meta"), device_id=torch.device("meta"))
    return str(refused.value)


def test_only_ranks_that_do_not_exist_may_compute_on_the_meta_device(world) -> None:
    world(1).run(on_meta)
    with fake_world(4):
        wrapper = FSDP(
            nn.Linear(2, 2, device="meta"), device_id=torch.device("meta"), use_orig_params=True
        )
        assert wrapper.weight.is_meta and wrapper.weight.shape == (2,)


# --- parameters -----------------------------------------------------------------------------------


def test_parameters_that_do_not_go_together_are_named() -> None:
    with fake_world(2):
        frozen = pair().requires_grad_(False)
        frozen[1].weight.requires_grad_(True)
        with pytest.raises(ConfigurationError) as error:
            FSDP(frozen)
        assert "['0.weight', '0.bias', '1.bias']" in str(error.value)
        assert "use_orig_params=True" in str(error.value)
        half = pair()
        half[1].half()
        with pytest.raises(ConfigurationError, match=r"1\.weight: torch\.float16"):
            FSDP(half)
        for module in (frozen, half):
            assert all(param.ndim > 1 or param.numel() == 3 for param in module.parameters())
            model = FSDP(module, use_orig_params=True)
            assert {param.ndim for param in model.parameters()} == {1}
        wrong = nn.Linear(2, 2)
        wrong.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
        wire = MixedPrecision(reduce_dtype=torch.float32, wire_dtype=torch.bfloat16)
        with pytest.raises(ConfigurationError, match=r"these are complex: \['weight'\]"):
            FSDP(wrong, mixed_precision=wire, use_orig_params=True)


def test_parameters_of_several_wrappers_are_named_before_any_is_made() -> None:
    with fake_world(2):
        tied = pair()
        tied[1].weight = tied[0].weight
        with pytest.raises(ConfigurationError) as error:
            FSDP(tied, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        assert "0.weight (in 0), 1.weight (in 1)" in str(error.value)
        net = make_net()
        with pytest.raises(ConfigurationError, match=r"embed\.weight \(in embed\), head\.weight"):
            FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}))
        for module in (tied, net):
            assert not FSDP.fsdp_modules(module)
        tied[0] = FSDP(tied[0])
        with pytest.raises(ConfigurationError, match="sharded before"):
            FSDP(tied)
        # A module that is shared is wrapped once, in all its places.
        twin = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        twin["c"] = twin["a"]
        twin.forward = lambda x: x  # type: ignore[method-assign]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            FSDP(twin, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        assert twin["a"] is twin["c"] and len(FSDP.fsdp_modules(twin)) == 2


def test_ignored_modules_and_parameters_are_left_alone() -> None:
    with fake_world(2):
        for given in ("ignored_modules", "ignored_states"):
            net: Any = make_net(tied=False)
            layer, before = net.first, dict(net.first.named_parameters())
            model = FSDP(
                net,
                auto_wrap_policy=ModuleWrapPolicy({Layer}),
                use_orig_params=True,
                **{given: (each for each in [layer])},
            )
            assert model.first is layer
            assert dict(layer.named_parameters()) == before
            assert len(FSDP.fsdp_modules(model)) == 2
        layers = pair()
        weight = layers[0].weight
        wrapped = FSDP(layers, ignored_states=[weight])
        assert layers[0].weight is weight
        assert len(names(wrapped)) == 2
        # A wrapper below an ignored module manages itself; it cannot be ignored.
        inner: Any = nn.Sequential(pair(), nn.Linear(3, 3))
        inner[0][1] = FSDP(inner[0][1])
        wrapped = FSDP(inner, ignored_modules=[inner[0]])
        assert [clean for name in names(wrapped) if (clean := name.split("module.", 1)[1])] == [
            "_flat_param",
            "0.0.weight",
            "0.0.bias",
            "0.1._fsdp_wrapped_module._flat_param",
        ]
        with pytest.raises(ConfigurationError, match="cannot be ignored"):
            FSDP(pair(), ignored_modules=[FSDP(nn.Linear(2, 2))])
        nothing = pair()
        with pytest.warns(UserWarning, match="nothing in it is sharded"):
            assert len(names(FSDP(nothing, ignored_modules=[nothing]))) == 4


def test_scalars_empty_and_channels_last_parameters() -> None:
    with alone():
        module = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        module.scalar = nn.Parameter(torch.tensor(2.0))
        module.empty = nn.Parameter(torch.ones(0, 3))
        before = {name: param.detach().clone() for name, param in module.named_parameters()}
        model = FSDP(module)
        for _ in range(2):
            saved = model.state_dict()
            assert_equal(saved, before)
            assert saved["weight"].is_contiguous(memory_format=torch.channels_last)
            model.load_state_dict(saved)


# --- meta device and rank 0's values ---------------------------------------------------------------


def reset(module: nn.Module) -> None:
    """What a user's `param_init_fn` does."""
    module.to_empty(device=CPU, recurse=False)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 0.5)


def test_meta_modules_get_memory_and_values() -> None:
    with fake_world(2):
        for use_orig_params in (False, True):
            with torch.device("meta"):
                net = make_net()
            seen: list[str] = []

            def init(module: nn.Module, seen: list[str] = seen) -> None:
                seen.append(type(module).__name__)
                reset(module)

            model = FSDP(
                net,
                auto_wrap_policy=ModuleWrapPolicy({Layer}),
                param_init_fn=init,
                use_orig_params=use_orig_params,
            )
            layer = ["Layer", "Linear", "Linear"]
            assert seen == [*layer, *layer, "Net", "Embedding", "LayerNorm", "Linear"]
            assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
            assert all(bool((param == 0.5).all()) for param in model.parameters())
            assert model.head.weight is model.embed.weight
        seen = []
        FSDP(pair(), param_init_fn=lambda module: seen.append("called"))
        assert not seen, "it is for modules on the meta device"
        with torch.device("meta"):
            by_reset, helpless, left = pair(), make_net(), pair()
        by_reset[1].weight = by_reset[0].weight
        by_reset.append(nn.Linear(3, 3))  # one that has values
        model = FSDP(by_reset, use_orig_params=True)
        assert not any(param.is_meta for param in model.parameters())
        assert model[0].weight is model[1].weight
        with pytest.raises(ConfigurationError, match=r"have none: \['first', 'second'\]"):
            FSDP(helpless)
        with pytest.raises(ConfigurationError, match=r"meta device: \['0\.weight', '0\.bias'"):
            FSDP(left, param_init_fn=lambda module: None)


class Odd(nn.Module):
    """Buffers of all kinds, and a convolution that lies in memory in its own way."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(float(value)))
        self.register_buffer("mask", torch.tensor([value == 0, value == 1]))
        self.register_buffer("phase", torch.tensor(value + 1j))
        self.register_buffer("steps", torch.tensor(value))
        self.register_buffer("kept", torch.full((2,), float(value)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def from_rank_0() -> None:
    rank = dist.get_rank()
    expected = make_net(0).state_dict()
    for use_orig_params in (False, True):
        options = {"sync_module_states": True, "use_orig_params": use_orig_params}
        model = wrap(FULLSHARD, make_net(seed=rank), **options)
        assert_equal(model.state_dict(), expected)
        with torch.device("meta" if rank else "cpu"):
            net = make_net(seed=rank)
        empty = functools.partial(nn.Module.to_empty, device=CPU, recurse=False)
        model = wrap(FULLSHARD, net, **options, param_init_fn=empty if rank else None)
        assert_equal(model.state_dict(), expected)
        assert_equal(model.first.cache, torch.full((5,), 0.1))
    torch.manual_seed(rank)
    odd = FSDP(Odd(rank), sync_module_states=True, use_orig_params=True)
    torch.manual_seed(0)
    assert_equal(odd.state_dict(), Odd(0).state_dict())
    assert_equal(odd.kept, torch.zeros(2))


def test_all_ranks_get_the_values_of_rank_0(world) -> None:
    world(2).run(from_rank_0)


def some_rank_cannot_receive() -> list[str]:
    rank = dist.get_rank()
    texts = []
    with torch.device("meta" if rank else "cpu"):
        net, other = make_net(), nn.Linear(3, 3)
    for module in (net, pair(width=3 + rank), nn.Sequential(other, pair()) if rank else pair()):
        with pytest.raises(ConfigurationError) as error:
            FSDP(module, sync_module_states=True)
        texts.append(str(error.value))
    return texts


def test_if_one_rank_cannot_receive_them_all_raise(world) -> None:
    first, second = world(2).run(some_rank_cannot_receive)
    assert first == second
    assert "have none: ['first', 'second']" in first[0]
    assert "0.weight: torch.float32 of shape (4, 4)" in first[1]


# --- what is wrapped ------------------------------------------------------------------------------


def test_containers_without_forward_are_warned_of() -> None:
    with fake_world(2):
        for container in (
            nn.ModuleList([nn.Linear(2, 2)]),
            nn.ModuleDict({"a": nn.Linear(2, 2)}),
        ):
            with pytest.warns(UserWarning, match=f"{type(container).__name__} has no forward"):
                model = FSDP(container)
            assert names(model) == ["_fsdp_wrapped_module._flat_param"]
        with pytest.raises(LifecycleError, match=r"a\.weight, a\.bias is sharded now|a\.weight"):
            model["a"](torch.ones(1, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            FSDP(pair())


def test_wrappers_can_be_in_wrappers_but_not_with_a_policy() -> None:
    with fake_world(2):
        twice = FSDP(FSDP(nn.Linear(2, 2)))
        assert names(twice) == ["_fsdp_wrapped_module._fsdp_wrapped_module._flat_param"]
        assert list(twice.state_dict()) == ["weight", "bias"]
        twice(torch.ones(1, 2)).sum().backward()
        assert twice.check_is_root() and not twice.module.check_is_root()
        with pytest.raises(ConfigurationError, match=r"these are: \['0'\]"):
            FSDP(
                nn.Sequential(FSDP(nn.Linear(2, 2))), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
            )
        inner = FSDP(nn.Linear(2, 2))
        inner(torch.ones(1, 2))
        outer = FSDP(nn.Sequential(inner, nn.Linear(2, 2)))
        outer(torch.ones(1, 2))
        assert outer.check_is_root() and not inner.check_is_root()


def test_policies_choose_wrappers_and_their_options() -> None:
    with fake_world(2):
        low = MixedPrecision(param_dtype=torch.bfloat16)
        model = FSDP(
            make_net(),
            auto_wrap_policy=CustomPolicy(
                lambda module: (
                    {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
                    if isinstance(module, Layer)
                    else isinstance(module, nn.LayerNorm)
                )
            ),
            mixed_precision=low,
            use_orig_params=True,
        )
        assert model.first.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
        assert model.norm.sharding_strategy is ShardingStrategy.FULL_SHARD
        assert model.alias is model.norm
        assert {each.mixed_precision.param_dtype for each in FSDP.fsdp_modules(model)} == {
            torch.bfloat16
        }
        with pytest.raises(
            ConfigurationError, match="must give arguments that FullyShardedDataParallel takes"
        ):
            FSDP(make_net(), auto_wrap_policy=CustomPolicy(lambda module: {"colour": "red"}))
        with enable_wrap(wrapper_cls=FSDP, use_orig_params=True, mixed_precision=low):
            by_hand: Any = nn.Sequential(
                wrap_by_hand(nn.Linear(2, 2)),
                wrap_by_hand(nn.Linear(2, 2), use_orig_params=False),
            )
        assert all(type(each) is FSDP for each in by_hand)
        assert names(by_hand)[0].endswith(".weight") and names(by_hand)[-1].endswith("_flat_param")
        assert by_hand[0].mixed_precision is low
        assert type(wrap_by_hand(nn.Linear(2, 2))) is nn.Linear


def batch_norm() -> None:
    made: dict[str, Any] = {}
    for api in LIBRARIES:
        torch.manual_seed(0)
        found = library(api)
        module = nn.Sequential(
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = found.FullyShardedDataParallel(
                module,
                auto_wrap_policy=policy(api, nn.Sequential),
                mixed_precision=found.MixedPrecision(
                    param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
                ),
                device_id=CPU,
            )
        output = model(torch.linspace(-1, 1, 12).view(3, 4))
        output.float().sum().backward()
        wrappers = found.FullyShardedDataParallel.fsdp_modules(model)
        made[api] = (
            [(type(each.module).__name__, each.mixed_precision.param_dtype) for each in wrappers],
            output.tolist(),
            [(buffer.dtype, buffer.tolist()) for buffer in model.buffers()],
            {key: value.tolist() for key, value in state_dict(api, model, "FULL").items()},
        )
    assert made[FULLSHARD] == made[TORCH]
    assert len(made[FULLSHARD][0]) == 4


def test_batch_norm_is_wrapped_by_itself_in_full_precision(world) -> None:
    world(2).run(batch_norm)


# --- members --------------------------------------------------------------------------------------


def test_a_wrapper_stands_for_its_module() -> None:
    with fake_world(2):
        net: Any = make_net()
        net.colour = "red"
        model: Any = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Layer}))
        assert model.module is net and model.colour == "red" and model.norm is net.norm
        with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
            _ = model.nothing
        assert FSDP(pair())[1].out_features == 3
        checkpointed: Any = FSDP(checkpoint_wrapper(pair()))
        assert type(checkpointed.module) is nn.Sequential
        assert checkpointed[0] is checkpointed.module[0]
        assert "(first): FullyShardedDataParallel(" in repr(model)
        assert FSDP.fsdp_modules(model) == [model, model.first, model.second]
        assert FSDP.fsdp_modules(model, root_only=True) == [model]
        both = nn.ModuleList([model, FSDP(nn.Linear(2, 2))])
        assert FSDP.fsdp_modules(both, root_only=True) == list(both)
        with pytest.raises(RuntimeError, match="cannot be copied"):
            copy.deepcopy(model)
        assert model.check_is_root() and not model.first.check_is_root()
        assert FSDP.fsdp_modules(model.module, root_only=True) == []  # as torch
        assert [name.count("_fsdp_wrapped_module") for name, _ in model.named_buffers()] == [2] * 6


def test_flattened_parameters_leave_stand_ins() -> None:
    with fake_world(2):
        model: Any = FSDP(make_net(), auto_wrap_policy=ModuleWrapPolicy({Layer}))
        flat = list(model.parameters())
        assert len(flat) == 3
        assert all(isinstance(param, FlatParameter) and param.requires_grad for param in flat)
        assert not isinstance(nn.Parameter(torch.ones(1)), FlatParameter)
        # Optimizers have no fast implementations for other classes.
        assert all(type(param) is nn.Parameter for param in flat)
        stand_in = model.first.module.linear.weight
        assert stand_in.shape == (7, 5) and stand_in.dtype == torch.float32
        assert stand_in.device == CPU and stand_in.numel() == 35
        assert "linear.weight" in repr(stand_in)
        for use in (
            lambda: stand_in + 1,
            lambda: stand_in.sum(),
            lambda: nn.init.zeros_(stand_in),
            lambda: model.first.module.linear(torch.ones(1, 5)),
        ):
            with pytest.raises(LifecycleError, match=r"linear\.weight.*is sharded now"):
                use()
        model(TOKENS).sum().backward()
        assert type(model.first.module.linear.weight) is type(stand_in)
        model.double()
        assert model.first.module.linear.weight.dtype == torch.float64
        assert model(TOKENS).dtype == torch.float64


def test_methods_of_the_outermost_wrapper_are_refused_below_it() -> None:
    with fake_world(2):
        model: Any = FSDP(make_net(), auto_wrap_policy=ModuleWrapPolicy({Layer}))
        assert model.check_is_root()
        hook = functools.partial(print)
        for method, call in (
            ("no_sync", lambda: model.first.no_sync().__enter__()),
            ("clip_grad_norm_", lambda: model.first.clip_grad_norm_(1.0)),
            ("register_comm_hook", lambda: model.first.register_comm_hook(None, hook)),
        ):
            with pytest.raises(
                LifecycleError, match=rf"{method} must be called on the outermost.*'first'"
            ):
                call()
        with pytest.raises(ValueError, match="must be callable, got str"):
            model.register_comm_hook(None, "hook")
        with pytest.raises(ConfigurationError, match="norm_type"):
            model.clip_grad_norm_(1.0, norm_type=math.nan)
        with pytest.warns(UserWarning, match="no gradients"):
            model.clip_grad_norm_(1.0)
        model.register_comm_hook(None, hook)
        with pytest.raises(
            LifecycleError, match=r"takes one communication hook.*'first', 'second'"
        ):
            model.register_comm_hook(None, hook)

        class Registers(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                with pytest.raises(LifecycleError, match="within forward"):
                    other.register_comm_hook(None, hook)
                return super().forward(x)

        other = FSDP(Registers(2, 2))
        other(torch.ones(1, 2))


def unsharding() -> None:
    expected = make_net()(TOKENS)
    for use_orig_params in (False, True):
        for ran in (False, True):
            model = wrap(FULLSHARD, make_net(), use_orig_params=use_orig_params)
            if ran:
                model(TOKENS).sum().backward()
            handle = model._unshard(async_op=True)
            other = model.first._unshard(async_op=True)
            assert isinstance(handle, UnshardHandle)
            handle.wait()
            handle.wait()
            assert model.module.norm.weight.shape == (5,)
            assert_close(model.module.norm(torch.ones(5)), torch.zeros(5), rtol=0, atol=1e-6)
            assert model.second._unshard() is None
            assert model.second.module.linear.weight.shape == (7, 5)
            assert_close(model(TOKENS), expected, rtol=1e-6, atol=1e-6)
            other.wait()
            assert_equal(model.state_dict(), make_net().state_dict())
            model(TOKENS).sum().backward()


def test_unsharding_by_hand(world) -> None:
    world(2).run(unsharding)


def other_modes_and_modules() -> None:
    expected = make_net()(TOKENS)
    for use_orig_params in (False, True):
        with torch.inference_mode():
            model = wrap(FULLSHARD, make_net(), use_orig_params=use_orig_params)
            for _ in range(2):
                assert_close(model(TOKENS), expected, rtol=1e-6, atol=1e-6)
        model = wrap(FULLSHARD, make_net(), use_orig_params=use_orig_params)
        with torch.inference_mode():
            assert_close(model(TOKENS), expected, rtol=1e-6, atol=1e-6)
            saved = model.state_dict()
            model.load_state_dict(make_net(1).state_dict())
        assert not any(value.is_inference() for value in saved.values())
        model.load_state_dict(saved)
        model(TOKENS).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        # Modules that keep their parameters in ways of their own.
        torch.manual_seed(0)
        for module, example in (
            (nn.LSTM(4, 5, 2), torch.ones(3, 2, 4)),
            (nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), torch.ones(2, 4)),
            (nn.TransformerEncoderLayer(4, 2, 7, dropout=0.0), torch.ones(3, 2, 4)),
        ):
            before = {key: value.clone() for key, value in module.state_dict().items()}
            result = module(example)
            wrapped = FSDP(module, use_orig_params=use_orig_params)
            for _ in range(2):
                assert_close(wrapped(example), result, rtol=1e-5, atol=1e-6)
                saved = wrapped.state_dict()
                assert list(saved) == list(before)
                assert_equal(saved, before)
                wrapped.load_state_dict(saved)
                with FSDP.summon_full_params(wrapped):
                    assert_equal(dict(wrapped.named_parameters()), dict(before.items()))
                wrapped(example)  # and again


def test_inference_mode_and_modules_of_all_kinds(world) -> None:
    world(2).run(other_modes_and_modules)


def net_to_compile() -> Any:
    net = make_net()
    net.second = nn.Identity()  # type: ignore[assignment]
    return net


def compiled() -> None:
    expected = net_to_compile()
    expected(TOKENS).sum().backward()
    for use_orig_params in (False, True):
        torch._dynamo.reset()
        model = wrap(FULLSHARD, net_to_compile(), use_orig_params=use_orig_params)
        step = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            output = step(TOKENS)
            output.sum().backward()
        assert_close(output, net_to_compile()(TOKENS), rtol=1e-6, atol=1e-6)
        optimizer.step()
        now = model.state_dict()
        for name, param in expected.named_parameters():
            assert_close(now[name], param.detach() - param.grad, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def test_wrapped_models_can_be_compiled(world) -> None:
    world(2).run(compiled)
