"""`install` and `uninstall`: which names are rebound, and that torch is afterwards what it was."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.pipelining
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import LifecycleError
from tests.helpers.compare import assert_equal

fsdp: Any = torch.distributed.fsdp
"""For mypy, its names can never mean ours."""

PUBLIC = ("", ".api", ".fully_sharded_data_parallel", ".wrap", ".sharded_grad_scaler")


@pytest.fixture(autouse=True)
def not_installed() -> Iterator[None]:
    """Let no test leave fullshard installed."""
    yield
    with warnings.catch_warnings(action="ignore"):
        fullshard.uninstall()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hide what `install` says about subclasses and models of other tests in this process."""
    module = importlib.import_module("fullshard.drop_in.install")
    with warnings.catch_warnings(), mock.patch.object(module, "_refuse_torch_models"):
        warnings.filterwarnings("ignore", message="install does not change")
        warnings.filterwarnings("ignore", message="fullshard is no longer installed")
        yield


def names_of_modules() -> dict[str, object]:
    """All names of the modules of torch's FSDP, and the names of its and our classes and functions everywhere."""
    return {
        f"{module}.{name}": value
        for module, found in list(sys.modules.items())
        for name, value in list(getattr(found, "__dict__", {}).items())
        if module.startswith("torch.distributed.fsdp")
        or (
            issubclass(type(value), (type, types.FunctionType))
            and module != "sys"  # a process group sets its excepthook
            and str(value.__module__).startswith(("torch.distributed.", "fullshard."))
        )
    }


def changed(before: dict[str, object]) -> list[str]:
    """Names that mean something else than before."""
    now = names_of_modules()
    return sorted(name for name, value in before.items() if now.get(name) is not value)


def unchanged(before: dict[str, object]) -> bool:
    if names := changed(before):
        pytest.fail(f"changed: {', '.join(names)}")
    return True


def test_all_public_names_of_torch_are_rebound_and_its_engine_is_left_alone() -> None:
    before = names_of_modules()
    with undisturbed():
        record = fullshard.install()
    assert record.left_alone == []
    assert changed(before) == [name for name in record.rebound if name in before]
    for part in PUBLIC:
        module = sys.modules[f"torch.distributed.fsdp{part}"]
        for name in getattr(module, "__all__", ["ShardedGradScaler"]):
            value = getattr(module, name)
            assert value.__module__.startswith("fullshard."), f"{module.__name__}.{name}"
            assert name not in fullshard.__all__ or getattr(fullshard, name) is value
    private = [name for name in record.rebound if name.startswith("torch.distributed.fsdp._")]
    prefix = "torch.distributed.fsdp._fully_shard"
    assert {name.rpartition(".")[0] for name in private} == {
        prefix,
        f"{prefix}._fsdp_common",
        f"{prefix}._fsdp_init",
    }
    assert fullshard.install() is record


# --- training ---------------------------------------------------------------------------------------------


def test_torch_trains_with_the_same_bits_after_fullshard_was_installed(world, tmp_path) -> None:
    (tmp_path / "imported_while_installed.py").write_text(
        "from fullshard import FSDPModule as Ours\n"
        "from torch.distributed.fsdp import FSDPModule, fully_shard as shard\n"
        "import torch.distributed.fsdp as fsdp\n"
        "Policy = fsdp.MixedPrecisionPolicy\n"
        "import fullshard\n"
        "own_policy = fullshard.MixedPrecisionPolicy\n"
    )
    world(2).run(install_between_two_trainings, str(tmp_path))


def install_between_two_trainings(folder: str) -> None:
    first = trained()
    gc.collect()
    mine = types.ModuleType("alias_of_torch")
    mine.shard = fsdp.fully_shard
    mine.own = fullshard.fully_shard
    sys.modules[mine.__name__] = mine
    sys.path.insert(0, folder)
    before = names_of_modules()
    try:
        with undisturbed():
            fullshard.install()
            assert mine.shard is mine.own is fullshard.fully_shard
            later = importlib.import_module("imported_while_installed")
            assert later.shard is fullshard.fully_shard
            assert later.FSDPModule is later.Ours is fullshard.FSDPModule
            ours = trained(fullshard.FSDPModule)
            gc.collect()
            fullshard.uninstall()
        assert unchanged(before)
        assert later.shard is mine.shard is fsdp.fully_shard
        assert later.FSDPModule is fsdp.FSDPModule is not fullshard.FSDPModule
        assert later.Policy is fsdp.MixedPrecisionPolicy
        assert later.Ours is fullshard.FSDPModule
        assert later.own_policy is fullshard.MixedPrecisionPolicy
        assert mine.own is fullshard.fully_shard
    finally:
        sys.path.remove(folder)
        del sys.modules[mine.__name__]
        sys.modules.pop("imported_while_installed", None)
    assert_equal(trained(), first)
    assert_equal(ours, first)


def trained(kind: type | None = None) -> list[Tensor]:
    """Train three steps with what torch calls `fully_shard`; the losses, and the parameters of this rank."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    mesh = init_device_mesh("cpu", (2,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    assert isinstance(model, kind or FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(2 + torch.distributed.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(param.to_local().detach().clone() for param in model.parameters())]


# --- state dicts ------------------------------------------------------------------------------------------


def test_torch_s_functions_for_state_dicts_know_what_install_put_in_its_place(world) -> None:
    world(2).run(save_and_load_both_apis)


def save_and_load_both_apis() -> None:
    single = net()
    expected = states(single, step(single))
    with undisturbed(), fullshard.installed():
        for shard in (by_fully_shard, by_wrapper, by_flat_wrapper):
            model = shard(net())
            optimizer = step(model)
            assert_equal(states(model, optimizer, full_state_dict=True), expected)
            other = shard(net())
            new = torch.optim.AdamW(other.parameters(), lr=0.1)
            weights, moments = get_state_dict(model, optimizer)
            set_state_dict(other, new, model_state_dict=weights, optim_state_dict=moments)
            assert_equal(states(other, new, full_state_dict=True), expected)
        del model, other


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))


def by_fully_shard(model: nn.Sequential) -> nn.Module:
    for part in (model[0], model):
        fsdp.fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    return model


def by_wrapper(model: nn.Sequential) -> nn.Module:
    policy = fsdp.wrap.ModuleWrapPolicy({nn.Linear})
    return fsdp.FullyShardedDataParallel(model, use_orig_params=True, auto_wrap_policy=policy)


def by_flat_wrapper(model: nn.Sequential) -> nn.Module:
    return fsdp.FullyShardedDataParallel(model)


def step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def states(model: nn.Module, optimizer: torch.optim.Optimizer, **options: bool) -> list[object]:
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return [weights, moments["state"]]


# --- refusals and warnings --------------------------------------------------------------------------------


def test_models_and_subclasses_that_exist_are_named(world) -> None:
    world(1).run(install_too_late)


def install_too_late() -> None:
    mesh = init_device_mesh("cpu", (1,))
    theirs = fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh)
    before = names_of_modules()
    with pytest.raises(LifecycleError, match=r"it has sharded\n(?s:.*)FSDPLinear\nInstall first"):
        fullshard.install()
    assert unchanged(before)
    del theirs

    class Mine(fsdp.FullyShardedDataParallel):  # type: ignore[misc]
        pass

    with pytest.warns(UserWarning, match=r"do(?s:.*)install_too_late.<locals>.Mine\n"):
        record = fullshard.install()
    assert any(name.endswith("Mine") for name in record.subclasses)
    model = fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.warns(UserWarning, match=r"no longer installed(?s:.*)FSDPLinear\nThey keep"):
        fullshard.uninstall()
    assert isinstance(model, fullshard.FSDPModule)
    assert unchanged(before)
    with undisturbed(), fullshard.installed(), fullshard.installed():  # the model existed before
        assert fsdp.fully_shard is fullshard.fully_shard
    assert unchanged(before)
    with warnings.catch_warnings(action="error"):
        fullshard.uninstall()


# --- names that others rebind ---------------------------------------------------------------------------


@pytest.mark.parametrize("again", [fullshard.uninstall, fullshard.install], ids=str)
def test_a_patch_that_ends_after_uninstall_is_told_and_undone(again: Any) -> None:
    before = names_of_modules()
    with undisturbed():
        fullshard.install()
        with mock.patch("torch.distributed.fsdp.fully_shard") as patched:
            with pytest.warns(
                UserWarning, match=r"rebound names(?s:.*)torch\.distributed\.fsdp\.fully_shard"
            ):
                fullshard.uninstall()
            assert fsdp.fully_shard is patched, "it is another's"
        assert fsdp.fully_shard is fullshard.fully_shard, "the patch has put back what it found"
        again()
        fullshard.uninstall()
    assert unchanged(before)


def test_a_patch_that_ends_before_uninstall_or_never_is_left_alone() -> None:
    before = names_of_modules()
    theirs = fsdp.fully_shard
    with undisturbed():
        with mock.patch("torch.distributed.fsdp.fully_shard"):
            fullshard.install()
        with pytest.warns(UserWarning, match="They are left alone"):
            fullshard.uninstall()
        assert fsdp.fully_shard is theirs
        fullshard.install()
        with mock.patch("torch.distributed.fsdp.FSDPModule"):
            pass
        with warnings.catch_warnings(action="error"):
            warnings.filterwarnings(
                "ignore", message="fullshard is no longer installed, but it has sharded"
            )
            fullshard.uninstall()
        assert fsdp.fully_shard is theirs
        fullshard.install()
        fsdp.fully_shard = wrapper = lambda *args: args
        with pytest.warns(UserWarning, match="They are left alone"):
            fullshard.uninstall()
        fullshard.uninstall()
        assert fsdp.fully_shard is wrapper
        fsdp.fully_shard = theirs
    assert unchanged(before)
