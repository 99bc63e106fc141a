"""State dicts of wrapped models: what torch's wrapper makes and takes, and where ours does more."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import (
    ConfigurationError,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    LifecycleError,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.training import FULLSHARD, TORCH
from tests.helpers.wrapped_nets import (
    LIBRARIES,
    TOKENS,
    Layer,
    described,
    library,
    make_net,
    state_dict,
    state_dict_type,
    wrap,
)

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")


def plain(seed: int = 0) -> dict[str, Tensor]:
    """The state dict of the model without wrappers."""
    return {key: value.clone() for key, value in make_net(seed).state_dict().items()}


def full(model: nn.Module) -> dict[str, Tensor]:
    return state_dict(FULLSHARD, model, "FULL")


def quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


# --- the same as torch's --------------------------------------------------------------------------


def same_entries(options: dict[str, Any], kinds: list[tuple[str, dict[str, Any]]]) -> None:
    """Keys in order, kinds of tensors, shapes, dtypes, devices, shards and values are torch's."""
    models = {api: wrap(api, make_net(), **options) for api in LIBRARIES}
    for kind, config in kinds:
        made = {
            api: [
                (key, quietly(described, value))
                for key, value in state_dict(api, models[api], kind, **config).items()
            ]
            for api in LIBRARIES
        }
        assert made[FULLSHARD] == made[TORCH], (options, kind, config)
        if kind != "LOCAL" and not config.get("rank0_only"):
            assert [key for key, _ in made[FULLSHARD]] == list(plain())


def same_entries_of_two_ranks() -> None:
    full_and_sharded: list[tuple[str, dict[str, Any]]] = [("FULL", {}), ("SHARDED", {})]
    all_kinds = [*full_and_sharded, ("FULL", {"rank0_only": True}), ("LOCAL", {})]
    same_entries({"use_orig_params": False}, all_kinds)
    same_entries({"use_orig_params": True}, all_kinds[:3])
    same_entries({"use_orig_params": True, "mesh": (2,)}, full_and_sharded)
    same_entries({"strategy": "SHARD_GRAD_OP"}, all_kinds)
    same_entries({"strategy": "NO_SHARD", "use_orig_params": True}, full_and_sharded)
    same_entries({"strategy": "NO_SHARD", "mesh": (2,)}, full_and_sharded)
    same_entries({"layers": False}, full_and_sharded)


def same_entries_of_four_ranks() -> None:
    kinds: list[tuple[str, dict[str, Any]]] = [("FULL", {}), ("SHARDED", {})]
    hybrid = {"strategy": "HYBRID_SHARD", "mesh": (2, 2)}
    same_entries({**hybrid, "use_orig_params": False}, kinds)
    same_entries({**hybrid, "use_orig_params": True}, kinds)
    same_entries({"use_orig_params": True}, kinds)  # some ranks have no rows


def test_entries_are_those_of_torch(world) -> None:
    world(2).run(same_entries_of_two_ranks)


def test_entries_are_those_of_torch_on_four_ranks_and_in_hybrid_strategies(world) -> None:
    world(4).run(same_entries_of_four_ranks)


def same_buffers_and_submodules() -> None:
    models = {
        api: wrap(
            api,
            make_net(),
            precision={"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16},
            use_orig_params=True,
        )
        for api in LIBRARIES
    }
    for model in models.values():
        model(TOKENS)
    ours = models[FULLSHARD]
    assert ours.first.scale.dtype == torch.bfloat16
    whole = {api: state_dict(api, model, "FULL") for api, model in models.items()}
    assert_equal(whole[FULLSHARD], whole[TORCH])
    assert whole[FULLSHARD]["first.scale"].dtype == torch.float32
    assert ours.first.scale.dtype == torch.bfloat16, "only the state dict has it otherwise"
    parts = {api: model.first.state_dict() for api, model in models.items()}
    assert_equal(parts[FULLSHARD], parts[TORCH])
    assert list(parts[FULLSHARD]) == list(Layer().state_dict())
    prefixed = {
        api: model.first.state_dict(prefix="up.", destination={"kept": torch.ones(1)})
        for api, model in models.items()
    }
    assert_equal(prefixed[FULLSHARD], prefixed[TORCH])
    assert list(prefixed[FULLSHARD]) == list(prefixed[TORCH])
    containers = {api: nn.Sequential(nn.Linear(2, 2), model) for api, model in models.items()}
    of_container = {api: model.state_dict() for api, model in containers.items()}
    assert list(of_container[FULLSHARD]) == list(of_container[TORCH])
    with state_dict_type(FULLSHARD, containers[FULLSHARD], "SHARDED"):
        sharded = containers[FULLSHARD].state_dict()
    assert isinstance(sharded["1.first.linear.weight"], ShardedTensor)
    assert type(sharded["0.weight"]) is Tensor
    # Loaded values are full precision again.
    ours.load_state_dict(plain(1))
    assert_close(full(ours), plain(1), rtol=1e-2, atol=1e-3)
    ours.load_state_dict(plain(2), assign=True)
    ours(TOKENS)
    assert ours.first.scale.dtype == torch.bfloat16, "cast again"


def test_buffers_are_in_their_own_dtypes_and_submodules_have_their_own_state_dicts(world) -> None:
    world(2).run(same_buffers_and_submodules)


# --- what torch cannot do on the CPU, or not at all ------------------------------------------------


def kept_apart() -> None:
    rank = dist.get_rank()
    model = wrap(FULLSHARD, make_net(), use_orig_params=True)
    made = state_dict(FULLSHARD, model, "FULL", rank0_only=True, offload_to_cpu=True)
    assert list(made) == (list(plain()) if rank == 0 else [])
    if rank == 0:
        assert_equal(made, plain())
        del made["head.weight"], made["alias.weight"], made["alias.bias"]  # other names of others
        storages = {value.untyped_storage().data_ptr() for value in made.values()}
        assert len(storages) == len(made), "each has memory of its own"
        assert all(
            value.untyped_storage().nbytes() == value.nbytes
            for key, value in made.items()
            if key.endswith(("weight", "bias"))
        )
    sharded = state_dict(FULLSHARD, model, "SHARDED", offload_to_cpu=True)
    places = {str(part.placement) for part in sharded["norm.weight"].metadata().shards_metadata}
    assert places == {"rank:0/cpu", "rank:1/cpu"}
    # What was saved does not follow the model.
    before = full(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    assert_equal(before, plain())
    # As parameters, if asked for.
    for use_orig_params in (False, True):
        model = wrap(FULLSHARD, make_net(), use_orig_params=use_orig_params)
        with_vars = model.state_dict(keep_vars=True)
        assert isinstance(with_vars["first.linear.weight"], nn.Parameter)
        assert with_vars["head.weight"] is with_vars["embed.weight"]
        assert_equal(with_vars, plain())
        assert all(
            param.ndim == 1 and (param is not with_vars["norm.bias"] or param.numel() < 5)
            for param in model.parameters()
        )
        assert type(full(model)["norm.bias"]) is Tensor
    # The metadata are those of the unwrapped model, for its versions.
    assert full(model)._metadata == make_net().state_dict()._metadata  # type: ignore[attr-defined]


def test_state_dicts_stand_alone(world) -> None:
    world(2).run(kept_apart)


class Versioned(nn.Linear):
    _version = 7
    seen: Any = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *args: Any) -> Any:
        Versioned.seen = metadata.get("version")
        return super()._load_from_state_dict(state_dict, prefix, metadata, *args)  # type: ignore[no-untyped-call]


class Renaming(nn.Module):
    """Its state dict has ``kernel`` where the module has ``weight``, and both halves of ``pair``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(4, 3))
        self.pair = nn.Parameter(torch.arange(6.0))
        self.register_state_dict_post_hook(Renaming.rename)
        self.register_load_state_dict_pre_hook(Renaming.rename_back)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")
        state[f"{prefix}low"], state[f"{prefix}high"] = state.pop(f"{prefix}pair").chunk(2)

    @staticmethod
    def rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        halves = [state.pop(f"{prefix}low"), state.pop(f"{prefix}high")]
        state[f"{prefix}pair"] = torch.cat(halves)


def hooks_and_other_wrappers() -> None:
    for kind in ("FULL", "SHARDED"):
        for use_orig_params in (False, True):
            inner = FSDP(Renaming(), use_orig_params=use_orig_params)
            model = FSDP(nn.Sequential(inner, nn.Linear(4, 4)), use_orig_params=use_orig_params)
            before = {key: value.clone() for key, value in full(model).items()}
            assert list(before) == ["0.kernel", "0.low", "0.high", "1.weight", "1.bias"]
            with state_dict_type(FULLSHARD, model, kind):
                saved = model.state_dict()
                assert isinstance(saved["0.kernel"], ShardedTensor) == (kind == "SHARDED")
                with torch.no_grad():
                    for param in model.parameters():
                        param.zero_()
                model.load_state_dict(saved)
            assert_equal(full(model), before)
    # Checkpointed layers, inside and outside of wrappers, with buffers in another dtype.
    for kind in ("FULL", "SHARDED"):
        net: Any = make_net()
        net.first = checkpoint_wrapper(net.first)
        net.second = checkpoint_wrapper(
            FSDP(net.second, mixed_precision=fullshard.MixedPrecision(buffer_dtype=torch.bfloat16))
        )
        net.first = FSDP(
            net.first, mixed_precision=fullshard.MixedPrecision(buffer_dtype=torch.bfloat16)
        )
        model = FSDP(net)
        model(TOKENS)
        assert model.first.scale.dtype == model.second.scale.dtype == torch.bfloat16
        before = full(model)
        assert list(before) == list(plain())
        assert before["first.scale"].dtype == before["second.scale"].dtype == torch.float32
        with state_dict_type(FULLSHARD, model, kind):
            saved = model.state_dict()
            model.load_state_dict(plain(1))
            model.load_state_dict(saved)
        assert_equal(full(model), before)
    # Versions of modules find their way through wrappers.
    model = FSDP(nn.Sequential(FSDP(Versioned(3, 3))))
    model.load_state_dict(model.state_dict())
    assert Versioned.seen == 7


def checkpointed_afterwards() -> None:
    """The order that torch's tutorials recommend: first wrappers, then activation checkpointing."""
    for use_orig_params in (False, True):
        models: dict[str, Any] = {}
        for api in LIBRARIES:
            models[api] = model = wrap(api, make_net(), use_orig_params=use_orig_params)
            apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, Layer))
            assert type(model.first.module) is Layer
            model(TOKENS).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        for kind in ("FULL", "SHARDED", "LOCAL")[: 2 if use_orig_params else 3]:
            made = {api: state_dict(api, model, kind) for api, model in models.items()}
            keys = {api: list(saved) for api, saved in made.items()}
            assert keys[FULLSHARD] == keys[TORCH]
            if kind == "FULL":
                assert_close(made[FULLSHARD], made[TORCH], rtol=1e-5, atol=1e-6)
            ours, expected = models[FULLSHARD], full(models[FULLSHARD])
            with state_dict_type(FULLSHARD, ours, kind):
                saved = quietly(copy.deepcopy, made[FULLSHARD])
                with torch.no_grad():
                    for param in ours.parameters():
                        param.zero_()
                quietly(ours.load_state_dict, saved)
            assert_equal(full(ours), expected)
        names = []
        for api in LIBRARIES:
            with library(api).FullyShardedDataParallel.summon_full_params(models[api]):
                names.append([name for name, _ in models[api].named_parameters()])
        assert names[0] == names[1]
        models[FULLSHARD](TOKENS).sum().backward()


def test_checkpointing_may_come_after_wrapping(world) -> None:
    world(2).run(checkpointed_afterwards)


def test_hooks_checkpointing_and_versions_work_inside_of_wrappers(world) -> None:
    world(2).run(hooks_and_other_wrappers)


# --- loading --------------------------------------------------------------------------------------


def resting(model: nn.Module) -> bool:
    """Whether everything is sharded, and works."""
    names = [name for name, _ in model.named_parameters()]
    logits = model(TOKENS)
    assert [name for name, _ in model.named_parameters()] == names
    return all(param.ndim == 1 for param in model.parameters()) and bool(logits.isfinite().all())


def loading() -> None:
    expected = make_net(1)(TOKENS)
    for options in (
        {"use_orig_params": False},
        {"use_orig_params": True},
        {"use_orig_params": True, "mesh": (2,)},
        {"strategy": "SHARD_GRAD_OP"},
        {"strategy": "NO_SHARD"},
    ):
        for kind in ("FULL", "SHARDED", "LOCAL"):
            if kind == "LOCAL" and options.get("strategy") == "NO_SHARD":
                continue
            one, other = (wrap(FULLSHARD, make_net(seed), **options) for seed in (1, 2))
            identities = [id(param) for param in other.parameters()]
            other(TOKENS).sum().backward()  # something is gathered, and has gradients
            saved = state_dict(FULLSHARD, one, kind)
            with state_dict_type(FULLSHARD, other, kind):
                assert str(other.load_state_dict(saved)) == "<All keys matched successfully>"
            assert_equal(full(other), plain(1))
            assert_close(other(TOKENS), expected, rtol=1e-6, atol=1e-6)
            assert [id(param) for param in other.parameters()] == identities
        # From and to models without wrappers.
        model = wrap(FULLSHARD, make_net(), **options)
        model.load_state_dict(plain(1))
        assert_equal(full(model), plain(1))
        model.load_state_dict(plain(3), assign=True)
        assert_equal(full(model), plain(3))
        unwrapped = make_net()
        unwrapped.load_state_dict(full(model))
        assert_equal(unwrapped.state_dict(), plain(3))
        # Into a part, and into a plain module around.
        first = {key[6:]: value for key, value in plain(4).items() if key.startswith("first.")}
        model.first.load_state_dict(first)
        outer = nn.Sequential(nn.Linear(2, 2), model)
        outer.load_state_dict({**outer.state_dict(), "0.bias": torch.ones(2)})
        assert_equal(
            full(model),
            {k: (plain(4) if k.startswith("first.") else plain(3))[k] for k in plain()},
        )
        assert outer[0].bias.tolist() == [1, 1]


def test_what_was_saved_can_be_loaded(world) -> None:
    world(2).run(loading)


class Odd(nn.Conv2d):
    """Parameters that are scalar, empty, integers, or in an order of memory of their own."""

    def __init__(self, *, integers: bool) -> None:
        super().__init__(2, 3, 2)
        self.to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.numbers = nn.Parameter(torch.arange(4), requires_grad=False) if integers else None


def odd_parameters() -> None:
    for use_orig_params in (False, True):
        for mesh in (None, (2,)):
            module = Odd(integers=use_orig_params)
            expected = {key: value.clone() for key, value in module.state_dict().items()}
            model = wrap(
                FULLSHARD, module, layers=False, mesh=mesh, use_orig_params=use_orig_params
            )
            for kind in ("FULL", "SHARDED", "LOCAL"):
                saved = quietly(copy.deepcopy, state_dict(FULLSHARD, model, kind))
                with torch.no_grad():
                    for param in model.parameters():
                        param.zero_()
                with state_dict_type(FULLSHARD, model, kind):
                    quietly(model.load_state_dict, saved)
                now = full(model)
                assert_equal(now, expected)
                assert now["weight"].is_contiguous(memory_format=torch.channels_last)


def test_odd_parameters_can_be_saved_and_loaded(world) -> None:
    world(2).run(odd_parameters)


def refused_loads() -> list[str]:
    return [*refused_loads_of(use_orig_params=False), *refused_loads_of(use_orig_params=True)]


def refused_loads_of(*, use_orig_params: bool) -> list[str]:
    texts = []
    model = wrap(FULLSHARD, make_net(), use_orig_params=use_orig_params)
    given = plain(1)
    del given["first.linear.bias"], given["norm.weight"]
    given["second.extra"] = torch.ones(1)
    given["extra"] = torch.ones(1)
    result = model.load_state_dict(given, strict=False)
    assert sorted(result.missing_keys) == ["first.linear.bias", "norm.weight"]
    assert sorted(result.unexpected_keys) == ["extra", "second.extra"]
    now = full(model)
    assert_equal(now, {**now, **{k: v for k, v in plain(1).items() if k in given}})
    assert_equal(now["first.linear.bias"], plain()["first.linear.bias"])
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(given)
    texts.append(str(error.value))
    assert resting(model)

    before = full(model)
    wrong = {**before, "first.linear.weight": torch.ones(7, 6), "norm.bias": torch.ones(4)}
    for kind in ("FULL", "SHARDED"):
        with state_dict_type(FULLSHARD, model, kind):
            with pytest.raises(RuntimeError, match=r"size mismatch for first\.linear\.weight"):
                model.load_state_dict(wrong)
        assert_equal(full(model), before)
        assert resting(model)

    # A module that raises while it saves or loads leaves nothing behind, wherever it is.
    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    inner = model.second.module.linear
    for register, act in (
        (inner.register_state_dict_pre_hook, model.state_dict),
        (inner.register_state_dict_pre_hook, nn.Sequential(model).state_dict),
        (inner.register_load_state_dict_pre_hook, partial(model.load_state_dict, plain(2))),
        (
            inner.register_load_state_dict_pre_hook,
            partial(
                nn.Sequential(model).load_state_dict,
                {f"0.{key}": value for key, value in plain(2).items()},
            ),
        ),
    ):
        handle = register(fail)
        with pytest.raises(KeyError, match="on purpose"):
            act()
        handle.remove()
        # The module around the wrappers does not clean up, but forward does.
        if "Sequential" in repr(act):
            model(TOKENS)
        assert resting(model)
        assert_equal(
            {k: v for k, v in full(model).items() if k.startswith("second.linear")},
            {k: v for k, v in before.items() if k.startswith("second.linear")},
        )

    local = state_dict(FULLSHARD, wrap(FULLSHARD, make_net(width=4)), "LOCAL")
    if not use_orig_params:
        with state_dict_type(FULLSHARD, model, "LOCAL"):
            with pytest.raises(ConfigurationError, match="same wrapping") as refused:
                model.load_state_dict(local)
            texts.append(str(refused.value))
        assert resting(model)
    with FSDP.summon_full_params(model):
        for act in (model.state_dict, lambda: model.load_state_dict(plain())):
            with pytest.raises(LifecycleError, match="within summon_full_params"):
                act()
    assert resting(model)
    return texts


def test_what_cannot_be_loaded_is_named_and_nothing_is_left_half_done(world) -> None:
    texts, others = world(2).run(refused_loads)
    assert len(texts) == len(others) == 3
    for text in (texts[0], texts[-1]):
        assert "_fsdp_wrapped_module" not in text
        assert "first.linear.bias" in text and "second.extra" in text


def sharded_entries_of_some_ranks() -> str:
    """Rank 1 lacks one and has another twice, as it were."""
    model = wrap(FULLSHARD, make_net())
    before = full(model)
    saved = state_dict(FULLSHARD, wrap(FULLSHARD, make_net(seed=1)), "SHARDED")
    if dist.get_rank() == 1:
        saved["second.other"] = saved.pop("second.linear.weight")
    with state_dict_type(FULLSHARD, model, "SHARDED"):
        with pytest.raises(ConfigurationError) as refused:
            model.load_state_dict(saved)
    assert resting(model)
    ours = {k: v for k, v in full(model).items() if k.startswith("second.")}
    assert_equal(ours, {k: v for k, v in before.items() if k.startswith("second.")})
    return str(refused.value)


def test_sharded_entries_must_be_those_of_all_ranks(world) -> None:
    text, other = world(2).run(sharded_entries_of_some_ranks)
    assert text == other
    assert "rank 0: second.linear.weight" in text and "rank 1: second.other" in text


def local_state_dict_of_one_element() -> None:
    """Of which the last rank holds nothing."""
    torch.manual_seed(0)
    saved = state_dict(FULLSHARD, wrap(FULLSHARD, nn.Linear(1, 1, bias=False)), "LOCAL")
    model = wrap(FULLSHARD, nn.Linear(1, 1, bias=False))
    with state_dict_type(FULLSHARD, model, "LOCAL"):
        model.load_state_dict(saved)
    torch.manual_seed(0)
    assert_equal(full(model), nn.Linear(1, 1, bias=False).state_dict())


def test_a_rank_may_hold_nothing_of_a_local_state_dict(world) -> None:
    world(2).run(local_state_dict_of_one_element)


def no_local_state_dict() -> None:
    for options in ({"strategy": "NO_SHARD"}, {"strategy": "NO_SHARD", "use_orig_params": True}):
        model = wrap(FULLSHARD, make_net(), **options)
        with pytest.raises(LifecycleError, match="does not shard"):
            state_dict(FULLSHARD, model, "LOCAL")
        assert_equal(full(model), plain())
    alone = FSDP(make_net(), use_orig_params=True)
    if dist.get_world_size() == 1:
        assert alone.sharding_strategy is fullshard.ShardingStrategy.NO_SHARD
        assert_equal(state_dict(FULLSHARD, alone, "SHARDED"), plain())


def test_without_shards_there_is_no_local_state_dict(world) -> None:
    world(1).run(no_local_state_dict)


# --- other libraries ------------------------------------------------------------------------------


def through_files(folder: str) -> None:
    for mesh, use_orig_params in ((None, False), ((2,), True)):
        options = {"mesh": mesh, "use_orig_params": use_orig_params}
        for source, target in ((TORCH, FULLSHARD), (FULLSHARD, TORCH)):
            one, other = (
                wrap(source, make_net(1), **options),
                wrap(target, make_net(2), **options),
            )
            for kind in ("FULL", "SHARDED"):
                saved = state_dict(source, one, kind)
                other.load_state_dict(plain(2))
                with quietly(state_dict_type, target, other, kind):
                    quietly(other.load_state_dict, saved)
                assert_equal(state_dict(target, other, "FULL"), plain(1))
            where = f"{folder}/{mesh}{source}"
            quietly(dcp.save, saved, checkpoint_id=where)
            other.load_state_dict(plain(2))
            template = state_dict(target, other, "SHARDED")
            quietly(dcp.load, template, checkpoint_id=where)
            with quietly(state_dict_type, target, other, "SHARDED"):
                quietly(other.load_state_dict, template)
            assert_equal(state_dict(target, other, "FULL"), plain(1))


def test_checkpoints_travel_between_torch_and_ours(world, tmp_path: Path) -> None:
    world(2).run(through_files, str(tmp_path))


def save_sharded(folder: str) -> dict[str, Tensor]:
    model = wrap(FULLSHARD, make_net(1), use_orig_params=True, mesh=(dist.get_world_size(),))
    quietly(dcp.save, state_dict(FULLSHARD, model, "SHARDED"), checkpoint_id=folder)
    return full(model)


def load_sharded(folder: str, whole: dict[str, Tensor]) -> None:
    model = wrap(FULLSHARD, make_net(2))
    template = state_dict(FULLSHARD, model, "SHARDED")
    quietly(dcp.load, template, checkpoint_id=folder)
    with state_dict_type(FULLSHARD, model, "SHARDED"):
        model.load_state_dict(template)
    assert_equal(full(model), plain(1))
    model = wrap(FULLSHARD, make_net(2), strategy="HYBRID_SHARD", mesh=(2, 2))
    model.load_state_dict(whole)
    assert_equal(full(model), plain(1))
    with state_dict_type(FULLSHARD, model, "SHARDED"):
        saved = {key: value.clone() for key, value in model.state_dict().items()}
        assert isinstance(saved["norm.weight"], DTensor)
        model.load_state_dict({key: torch.zeros_like(value) for key, value in saved.items()})
        model.load_state_dict(saved)
    assert_equal(full(model), plain(1))


def test_another_number_of_ranks_can_load_them(world, tmp_path: Path) -> None:
    whole = world(2).run(save_sharded, str(tmp_path))[0]
    world(4).run(load_sharded, str(tmp_path), whole)


def distributed_checkpoint_functions() -> None:
    rank = dist.get_rank()
    for options in (
        {"use_orig_params": False},
        {"use_orig_params": True},
        {"use_orig_params": True, "mesh": (2,)},
        {"strategy": "NO_SHARD"},
    ):
        model = wrap(FULLSHARD, make_net(1), **options)
        found = quietly(get_model_state_dict, model)
        assert list(found) == list(plain())
        model.load_state_dict(plain(2))
        quietly(set_model_state_dict, model, found)
        assert_equal(full(model), plain(1))
        whole = StateDictOptions(full_state_dict=True)
        assert_equal(get_model_state_dict(model, options=whole), plain(1))
        set_model_state_dict(model, plain(2), options=whole)
        assert_equal(full(model), plain(2))
        offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = get_model_state_dict(model, options=offloaded)
        assert list(found) == (list(plain()) if rank == 0 else [])
        broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, plain(3) if rank == 0 else {}, options=broadcast)
        assert_equal(full(model), plain(3))


def test_functions_of_distributed_checkpoint_know_the_wrapper(world) -> None:
    world(2).run(distributed_checkpoint_functions)


def with_safetensors(path: str) -> None:
    from safetensors.torch import load_file, save_file

    model = wrap(FULLSHARD, make_net(tied=False), use_orig_params=True)
    saved = {k: v for k, v in full(model).items() if not k.startswith("alias")}
    if dist.get_rank() == 0:
        save_file(saved, path)
    dist.barrier()
    assert_equal(load_file(path), saved)


@pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="needs safetensors")
def test_safetensors_saves_a_full_state_dict(world, tmp_path: Path) -> None:
    world(2).run(with_safetensors, str(tmp_path / "model.safetensors"))


# --- settings -------------------------------------------------------------------------------------


def test_settings_hold_for_a_while_or_for_good() -> None:
    with fake_world(2):
        model = nn.Sequential(FSDP(nn.Linear(3, 3)), FSDP(nn.Linear(3, 3)))
        settings = FSDP.get_state_dict_type(model)
        assert settings.state_dict_type is StateDictType.FULL_STATE_DICT
        assert settings.state_dict_config == FullStateDictConfig()
        assert settings.optim_state_dict_config == FullOptimStateDictConfig()
        with pytest.raises(KeyError, match="on purpose"):
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                inner = FSDP.get_state_dict_type(model)
                assert inner.state_dict_type is StateDictType.SHARDED_STATE_DICT
                raise KeyError("on purpose")
        assert FSDP.get_state_dict_type(model) == settings
        config = FullStateDictConfig(rank0_only=True)
        before = FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, config)
        assert before == settings
        assert FSDP.get_state_dict_type(model).state_dict_config == config
        FSDP.set_state_dict_type(model[0], StateDictType.LOCAL_STATE_DICT)
        for ask in (
            lambda: FSDP.get_state_dict_type(model),
            lambda: FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT),
        ):
            with pytest.raises(ConfigurationError, match="must have the same settings"):
                ask()
        FSDP.set_state_dict_type(model[0], StateDictType.FULL_STATE_DICT, config)
        assert FSDP.get_state_dict_type(model).state_dict_config == config
        # Wrappers with and without a mesh make DTensors and ShardedTensors, by the same settings.
        mesh = init_device_mesh("cpu", (2,))
        mixed = nn.Sequential(FSDP(nn.Linear(3, 3), device_mesh=mesh), FSDP(nn.Linear(3, 3)))
        sharded = ShardedStateDictConfig(_use_dtensor=True)  # as if it were the user's to say
        with FSDP.state_dict_type(mixed, StateDictType.SHARDED_STATE_DICT, sharded):
            saved = mixed.state_dict()
            assert [type(value).__name__ for value in saved.values()] == [
                *["DTensor"] * 2,
                *["ShardedTensor"] * 2,
            ]
            FSDP.set_state_dict_type(mixed[0], StateDictType.LOCAL_STATE_DICT)
        assert FSDP.get_state_dict_type(mixed) == settings


def test_wrong_settings_are_refused_and_change_nothing() -> None:
    torch_api = importlib.import_module("torch.distributed.fsdp")
    with fake_world(2):
        model = FSDP(nn.Linear(3, 3))
        before = FSDP.get_state_dict_type(model)
        wrong: list[tuple[Any, ...]] = [
            (StateDictType.FULL_STATE_DICT, ShardedStateDictConfig()),
            (StateDictType.FULL_STATE_DICT, torch_api.FullStateDictConfig()),
            (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(), FullOptimStateDictConfig()),
            (torch_api.StateDictType.FULL_STATE_DICT,),
            ("FULL_STATE_DICT",),
            ([],),
        ]
        for arguments in wrong:
            with pytest.raises(ConfigurationError, match="fullshard"):
                FSDP.set_state_dict_type(model, *arguments)
            with pytest.raises(ConfigurationError):
                with FSDP.state_dict_type(model, *arguments):
                    raise AssertionError("must not get here")
        assert FSDP.get_state_dict_type(model) == before
