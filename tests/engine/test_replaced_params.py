"""Parameters that users replace behind our back: whoever reads or writes them next sees the present ones."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from fullshard.checkpoint import load, save
from fullshard.tracing.group_facts import group_facts
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.training import all_whole

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WRAPPER = FullyShardedDataParallel
FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
X = torch.linspace(-1.0, 1.0, 6).view(2, 3)


class Net(nn.Module):
    """Tied weights, a bias that one rank holds alone, and pieces that no world divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.tied(self.second(self.first(x))))


def wrapped(orig: bool, strategy: str = "FULL_SHARD") -> Any:
    options: dict[str, Any] = {
        "use_orig_params": orig,
        "device_id": torch.device("cpu"),
        "sharding_strategy": ShardingStrategy[strategy],
    }
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
        )
    net: Any = Net()
    net.inner = WRAPPER(net.inner, **options)
    return WRAPPER(net, **options)


def gathered(whole: dict[str, Any]) -> dict[str, Tensor]:
    """Entries of a sharded state dict, whole."""
    result = {}
    for name, value in whole.items():
        if hasattr(value, "full_tensor"):
            result[name] = value.full_tensor()
        elif hasattr(value, "gather"):
            out = torch.empty(value.size()) if dist.get_rank() == 0 else None
            value.gather(0, out)
            made = [out]
            dist.broadcast_object_list(made, src=0)
            assert made[0] is not None
            result[name] = made[0]
        else:
            result[name] = value
    return result


# --- replacing -----------------------------------------------------------------------------------------
# Each of them changes every parameter to what `EXPECTED` makes of the one before.


def by_data(model: Any) -> None:
    for param in model.parameters():
        param.data = param.data * 2


def by_vector(model: Any) -> None:
    params = list(model.parameters())
    vector_to_parameters(parameters_to_vector(params) * 2, params)


def by_new_parameters(model: Any) -> None:
    """With a FlatParameter, that one is replaced; its members are replaced below."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                new.setdefault(param, nn.Parameter(param.detach() * 2))
                setattr(module, name, new[param])


def by_casting(model: Any) -> None:
    """Modules inside of the wrappers, which the wrappers do not hear of."""
    model.module.double()
    for param in model.parameters():
        param.data = param.data * 2
    model.module.float()


def by_loading(model: Any) -> None:
    """``assign=True`` on the modules inside."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            new = {name: param.detach() * 2 for name, param in module.named_parameters()}
            if module is model.tied:
                del new["weight"]  # the other has been replaced, and with it this one
            module.load_state_dict(new, strict=False, assign=True)


REPLACEMENTS: dict[str, Callable[[Any], None]] = {
    each.__name__: each for each in (by_data, by_vector, by_new_parameters, by_casting, by_loading)
}


def expected() -> dict[str, Tensor]:
    return {name: value * 2 for name, value in Net().state_dict().items()}


# --- seeing --------------------------------------------------------------------------------------------


def in_full(model: Any, _: Path) -> None:
    assert_equal(dict(model.state_dict()), expected())


def in_sharded(model: Any, _: Path) -> None:
    with WRAPPER.state_dict_type(model, SHARDED):
        assert_equal(gathered(model.state_dict()), expected())


def in_local(model: Any, _: Path) -> None:
    with WRAPPER.state_dict_type(model, LOCAL):
        before = model.state_dict()
        model.load_state_dict(before)
    in_full(model, _)


def in_summon(model: Any, _: Path) -> None:
    with WRAPPER.summon_full_params(model):
        for name, param in model.named_parameters():
            assert_equal(param.detach(), expected()[name])
            with torch.no_grad():
                param.add_(1)
    assert_equal(dict(model.state_dict()), {n: v + 1 for n, v in expected().items()})


def in_apply(model: Any, _: Path) -> None:
    def double(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module is not tied:
            with torch.no_grad():
                module.weight.mul_(2)

    tied = model.tied
    model.apply(double)
    weights = {n: v * 2 if "weight" in n else v for n, v in expected().items()}
    assert_equal(dict(model.state_dict()), weights)


def in_load(model: Any, _: Path) -> None:
    new = {name: value - 7 for name, value in expected().items()}
    model.load_state_dict(new)
    assert_equal(dict(model.state_dict()), new)
    model(X)
    assert_equal(dict(model.state_dict()), new)


def in_sharded_load(model: Any, _: Path) -> None:
    other = wrapped(model._use_orig_params)
    with WRAPPER.state_dict_type(other, SHARDED), WRAPPER.state_dict_type(model, SHARDED):
        model.load_state_dict(other.state_dict())
    assert_equal(dict(model.state_dict()), dict(Net().state_dict()))


def in_unshard(model: Any, _: Path) -> None:
    model._unshard()
    assert_equal(model.second.weight.detach(), expected()["second.weight"])
    model._fsdp_state.reshard()


def in_forward(model: Any, _: Path) -> None:
    net = Net()
    net.load_state_dict(expected())
    assert_close(model(X).detach(), net(X).detach(), rtol=1e-6, atol=1e-6)


def in_optimizer_state(model: Any, _: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(
        WRAPPER.optim_state_dict_to_load(
            model, optimizer, WRAPPER.optim_state_dict(model, optimizer)
        )
    )


def in_facts(model: Any, _: Path) -> None:
    facts = group_facts(model)
    assert {each.param_dtype for each in facts} == {"float32"}


def in_checkpoint(model: Any, folder: Path) -> None:
    save(folder / "saved", model)
    other = wrapped(model._use_orig_params)
    by_data(other)
    by_data(other)
    load(folder / "saved", other)
    in_full(other, folder)


READERS = (
    in_full,
    in_sharded,
    in_local,
    in_summon,
    in_apply,
    in_load,
    in_sharded_load,
    in_unshard,
    in_forward,
    in_optimizer_state,
    in_facts,
    in_checkpoint,
)


def seen(orig: bool, replacement: str, folder: Path) -> None:
    # Every reader meets models with and without a runtime, and so does every replacement.
    for index, reader in enumerate(READERS, list(REPLACEMENTS).index(replacement)):
        trained = index % 2 == 0
        model = wrapped(orig)
        if trained:
            model(X).sum().backward()
            with torch.no_grad():
                model(X)
        REPLACEMENTS[replacement](model)
        try:
            reader(model, folder / reader.__name__)
        except Exception as error:
            raise AssertionError(f"{reader.__name__}, {trained=}: {error}") from error


@pytest.mark.parametrize("replacement", [*REPLACEMENTS])
@pytest.mark.parametrize("orig", [True, False])
def test_everybody_sees_what_was_put_in_a_parameters_place(
    world, orig: bool, replacement: str, tmp_path: Path
) -> None:
    if not orig and replacement == "by_loading":
        pytest.skip("modules inside have no parameters of their own to load")
    world(2).run(seen, orig, replacement, tmp_path)


# --- parameters within a FlatParameter -----------------------------------------------------------------


def members_assigned(as_parameter: bool, folder: Path) -> None:
    """Whole tensors, in the place of those that a FlatParameter stands for."""
    for reader in READERS:
        model = wrapped(False)
        new = expected()
        for name, value in new.items():
            path, _, attribute = name.rpartition(".")
            if path == "tied":
                continue  # it is the first's, too
            module = model.module.get_submodule(path.replace("inner", "inner.module"))
            setattr(module, attribute, nn.Parameter(value) if as_parameter else value)
        reader(model, folder / reader.__name__)
        flat = [name for name, _ in model.named_parameters()]
        assert all(name.endswith("_flat_param") for name in flat), flat
        assert len(flat) == 2
        model(X).sum().backward()
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("as_parameter", [True, False])
def test_whole_tensors_may_be_assigned_in_the_place_of_a_flat_parameters_members(
    world, as_parameter: bool, tmp_path: Path
) -> None:
    world(2).run(members_assigned, as_parameter, tmp_path)


# --- other layouts -------------------------------------------------------------------------------------


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def in_another_memory_order() -> None:
    """A parameter that rests whole, channels last; and data that are not."""
    for orig in (True, False):
        model: Any = WRAPPER(
            Pictures(),
            use_orig_params=orig,
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.NO_SHARD,
        )
        new = torch.arange(24.0).view(3, 2, 2, 2)
        if orig:
            model.conv.weight.data = new.clone()
        else:
            model.conv.weight = nn.Parameter(new.clone())
        assert_equal(model.state_dict()["conv.weight"], new)
        net = Pictures()
        net.conv.weight.data = new
        images = torch.ones(1, 2, 3, 3)
        assert_equal(model(images).detach(), net(images).detach())
        model.module.to(memory_format=torch.contiguous_format)
        assert_equal(model.state_dict()["conv.weight"], new)


def in_replicas(folder: Path) -> None:
    for orig in (True, False):
        for reader in (in_full, in_sharded, in_summon, in_load, in_forward, in_optimizer_state):
            model = wrapped(orig, "HYBRID_SHARD")
            by_data(model)
            reader(model, folder)


def test_other_memory_orders_and_replicas(world, tmp_path: Path) -> None:
    world(2).run(in_another_memory_order)
    world(4).run(in_replicas, tmp_path)


# --- what cannot take a parameter's place --------------------------------------------------------------


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return "nothing"


def refusals(orig: bool) -> dict[str, str]:
    """What is said of a wrong replacement on one rank; all is well once it is taken back."""
    model = wrapped(orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if orig:
        param = model.second.weight
        before = param.data
        if dist.get_rank() == 1:
            param.data = torch.ones(3, 4)
    elif dist.get_rank() == 1:
        model.second.weight = nn.Parameter(torch.ones(3, 4))
    sharded = expected()
    found = {
        "full": said(model.state_dict),
        "summon": said(lambda: WRAPPER.summon_full_params(model).__enter__()),
        "apply": said(lambda: model.apply(lambda module: None)),
        "load": said(lambda: model.load_state_dict(sharded)),
        "optimizer": said(lambda: WRAPPER.optim_state_dict(model, optimizer)),
    }
    with WRAPPER.state_dict_type(model, SHARDED):
        found["sharded"] = said(model.state_dict)
    if dist.get_rank() == 1:
        if orig:
            param.data = before
        else:
            model.second.weight = nn.Parameter(Net().second.weight.detach())
    assert_equal(dict(model.state_dict()), dict(Net().state_dict()))
    return found


@pytest.mark.parametrize("orig", [True, False])
def test_what_cannot_take_a_parameters_place_is_the_same_error_on_all_ranks(
    world, orig: bool
) -> None:
    first, second = world(2).run(refusals, orig)
    assert first == second
    for case, message in first.items():
        pattern = r"On ranks \[1\]:.*\n  second.weight: expected .*shape .*got \(3, 4\)"
        assert re.search(pattern, message, re.DOTALL), f"{case}: {message}"


def taken_apart() -> dict[str, str]:
    """Parameters that are taken off their modules, or replaced while they are gathered."""
    found = {}
    model = wrapped(True)
    nn.utils.parametrize.register_parametrization(model.second, "weight", nn.Identity())
    found["parametrized"] = said(model.state_dict)
    model = wrapped(True)
    del model.second.weight
    found["deleted"] = said(lambda: model(X))
    model = wrapped(True)
    model._unshard()
    model.second.weight = nn.Parameter(torch.ones(3, 3))
    found["unsharded"] = said(model.state_dict)
    model = sharded()
    model.unshard()
    model.second.weight = nn.Parameter(torch.ones(3, 3))
    found["unsharded, fully_shard"] = said(model.state_dict)
    assert_close(model(X).detach(), Net()(X).detach(), rtol=1e-6, atol=1e-6)
    for orig in (True, False):
        model = wrapped(orig)
        for module, factor in ((model.first, 2), (model.tied, 3)):
            # A piece of the whole tensor, or the whole tensor.
            new = module.weight.detach() if orig else torch.ones(3, 3)
            module.weight = nn.Parameter(new * factor + factor)
        found[f"tied {orig}"] = said(model.state_dict)
        model = wrapped(orig)
        if dist.get_rank() == 1:
            model.module.double()
        found[f"dtypes {orig}"] = said(model.state_dict)
    return found


def test_parameters_that_cannot_be_taken_over_are_named(world) -> None:
    first, second = world(2).run(taken_apart)
    assert first == second
    for case in ("parametrized", "deleted"):
        assert "second.weight: expected a plain parameter, got NoneType" in first[case]
    for case in ("unsharded", "unsharded, fully_shard"):
        assert re.search(r"replaced while they were gathered.*weight", first[case]), first[case]
    for orig in (True, False):
        assert "first.weight: shared by several modules" in first[f"tied {orig}"]
        message = first[f"dtypes {orig}"]
        assert "first.weight: torch.float32 on ranks [0]" in message, message


def tied_late() -> dict[str, str]:
    """Parameters that are put in the place of others while these are sharded, and what is said to it."""
    models = {
        "one group": fully_shard(Net()),
        "two groups": sharded_parts(),
        "NO_SHARD": wrapped(True, "NO_SHARD"),
        "FULL_SHARD": wrapped(True),
    }
    found = {}
    for case, model in models.items():
        own = model.second.weight
        model.second.weight = model.first.weight
        found[case] = said(functools.partial(model, X))
        model.second.weight = own
        assert_close(model(X).detach(), Net()(X).detach(), rtol=1e-6, atol=1e-6)
    model = fully_shard(Net())
    new = nn.Parameter(model.second.weight.detach().clone())
    model.first.weight = model.tied.weight = model.second.weight = new
    found["new"] = said(lambda: model(X))
    return found


def sharded_parts() -> Net:
    model = Net()
    fully_shard(model.second)
    return fully_shard(model)


def test_parameters_that_are_tied_after_they_were_sharded_are_named(world) -> None:
    first, second = world(2).run(tied_late)
    assert first == second
    for case in ("one group", "two groups", "NO_SHARD", "FULL_SHARD"):
        assert re.search(
            r"tied afterwards:\n  (second\.)?weight is first\.weight now\nTie them before",
            first[case],
        )
    assert "second.weight is first.weight now" in first["new"]


def exchanged() -> None:
    model, reference = fully_shard(Net()), Net()
    for net in (model, reference):
        first, second = net.first.bias, net.second.bias
        net.first.bias, net.second.bias = second, first
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            net(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model(X).detach(), reference(X).detach(), rtol=1e-6, atol=1e-6)


def test_parameters_may_change_places(world) -> None:
    world(2).run(exchanged)


# --- gradients -----------------------------------------------------------------------------------------


def norms() -> list[float]:
    model = wrapped(True)
    model(X).sum().backward()
    whole = model.clip_grad_norm_(1e9)
    for param in model.parameters():
        param.data = param.data * 2
    same = model.clip_grad_norm_(1e9)
    model.second.weight = nn.Parameter(model.second.weight.detach())
    less = model.clip_grad_norm_(1e9)
    return [whole.item(), same.item(), less.item()]


def test_norms_are_of_the_present_parameters(world) -> None:
    for whole, same, less in world(2).run(norms):
        assert whole == same > less > 0


# --- fully_shard ---------------------------------------------------------------------------------------


def sharded() -> Any:
    net = Net()
    fully_shard(net.inner)
    return fully_shard(net)


def by_local_tensors(model: Any) -> None:
    for param in model.parameters():
        param._local_tensor = param.to_local().detach() * 2


def wholes_of(model: Any) -> dict[str, Tensor]:
    return all_whole(model.state_dict())


def with_dtensors(folder: Path) -> None:
    for index, replace in enumerate((by_local_tensors, by_new_parameters)):

        def replaced(replace: Any = replace) -> Any:
            model = sharded()
            replace(model)
            return model

        assert_equal(wholes_of(replaced()), expected())
        model = replaced()
        model.unshard()
        assert_equal(model.second.weight.detach(), expected()["second.weight"])
        in_forward(replaced(), folder)
        save(folder / str(index), replaced())
        model = replaced()
        load(folder / str(index), model)
        assert_equal(wholes_of(model), expected())
        model.load_state_dict(sharded().state_dict())
        assert_equal(wholes_of(model), dict(Net().state_dict()))


def kept_after_backward() -> None:
    """Memory that is kept after backward is no reason to show what it held before the step."""
    model = sharded()
    model.set_reshard_after_backward(False)
    model(X).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    model.unshard()
    assert_equal(model.second.weight.detach(), expected()["second.weight"])


def wrong_dtensors() -> list[str]:
    found = []
    model = sharded()
    model.second.weight._local_tensor = torch.ones(5, 3)
    found.append(said(model.unshard))
    model = sharded()
    model.second.weight = nn.Parameter(torch.ones(3, 3))
    found.append(said(model.unshard))
    return found


def test_fully_shard_sees_replaced_dtensors(world, tmp_path: Path) -> None:
    world(2).run(with_dtensors, tmp_path)
    world(2).run(kept_after_backward)
    for shape, plain in world(2).run(wrong_dtensors):
        assert "second.weight: expected a part of shape" in shape
        assert "got (5, 3)" in shape
        assert "second.weight: expected a DTensor, got Parameter" in plain
