"""Whether a checkpoint fits is known, with all names, before anything is read; what is no memory is put in place last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from fullshard import (
    CheckpointError,
    FullyShardedDataParallel,
    MixedPrecision,
    checkpoint,
    fully_shard,
)
from fullshard.checkpoint.source import TensorRef
from fullshard.checkpoint.state.local_state import LocalModelState
from fullshard.checkpoint.state.model_target import Faults, ModelTarget
from fullshard.checkpoint.state.optimizer_target import OptimizerTarget
from tests.helpers.checkpoints import MemorySource, load_into, snapshot, source_of
from tests.helpers.compare import assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.groups import alone
from tests.helpers.odd_nets import make_odd_net, odd_loss, odd_net_behind, wrapped_odd_net


def saved(model: nn.Module, optimizer: optim.Optimizer | None = None) -> MemorySource:
    return source_of([snapshot(model, optimizer)])


def faults_of(model: nn.Module, source: MemorySource, *, cast: bool = False) -> Faults:
    return ModelTarget(LocalModelState(model, "load"), source, cast=cast).faults


def stepped(params: Any, cls: Any = optim.Adam, **options: Any) -> Any:
    optimizer = cls(params, **options)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


# --- models ------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_named_alike_on_all_ranks() -> None:
    source = saved(make_odd_net())
    whole = {**source.whole, "model/new": torch.ones(1)}
    del whole["model/middle.count"]
    whole["model/pixels.weight"] = torch.ones(5, 3, 2, 1)
    whole["model/middle.up.bias"] = torch.ones(7, dtype=torch.float64)
    for rank in range(3):
        with fake_world(3, rank):
            for api in ("fully_shard", "wrapper", "flat wrapper"):
                faults = faults_of(odd_net_behind(api), MemorySource(whole, source.tied))
                assert faults == Faults(
                    missing=["middle.count"],
                    unexpected=["new"],
                    shapes=["pixels.weight: (5, 3, 2, 1), not (5, 3, 2, 2)"],
                    dtypes=["middle.up.bias: torch.float64, not torch.float32"],
                )
                assert all(name in "\n".join(faults.paragraphs()) for name in ("new", "count"))


def test_dtypes_may_differ_if_they_are_cast() -> None:
    net = nn.Linear(2, 2)
    source = saved(nn.Linear(2, 2).double())
    assert faults_of(net, source).dtypes and not faults_of(net, source, cast=True)


@pytest.mark.parametrize(
    ("stored", "wanted", "may_be_cast"),
    [
        (torch.float64, torch.bfloat16, True),
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.bfloat16, torch.float8_e5m2, True),
        (torch.float32, torch.complex64, True),
        (torch.int8, torch.int64, True),
        (torch.uint8, torch.int16, True),
        (torch.bool, torch.uint8, True),
        (torch.int32, torch.int32, True),
        (torch.complex64, torch.float32, False),
        (torch.complex64, torch.int64, False),
        (torch.int8, torch.bfloat16, False),
        (torch.uint8, torch.float32, False),
        (torch.bool, torch.float32, False),
        (torch.float32, torch.int64, False),
        (torch.int64, torch.int32, False),
        (torch.int8, torch.uint8, False),
        (torch.int64, torch.bool, False),
    ],
)
def test_a_cast_keeps_what_numbers_mean(
    stored: torch.dtype, wanted: torch.dtype, may_be_cast: bool
) -> None:
    """Quantised weights become no floating-point numbers without their scales, and nothing loses its imaginary part."""
    net, other = nn.Module(), nn.Module()
    net.register_buffer("number", torch.ones(2).to(wanted))
    other.register_buffer("number", torch.ones(2).to(stored))
    faults = faults_of(net, saved(other), cast=True)
    assert faults == Faults(casts=[] if may_be_cast else [f"number: {stored} to {wanted}"])
    assert ("quantised" in "\n".join(faults.paragraphs())) != may_be_cast


def test_tied_parameters_are_found_by_any_of_their_names() -> None:
    source = saved(make_odd_net())
    (tied,) = (name for name, stored in source.tied.items() if stored == "head.weight")
    renamed = {**source.whole, f"model/{tied}": source.whole["model/head.weight"] + 1}
    del renamed["model/head.weight"]
    net = make_odd_net(1)
    norms = {"alias.weight": "norm.weight", "alias.bias": "norm.bias"}
    load_into(net, None, MemorySource(renamed, norms))  # under the other name only
    assert_equal(net.head.weight.data, renamed[f"model/{tied}"])
    untied = make_odd_net(1)
    untied.tail.weight = nn.Parameter(torch.zeros(5, 5))
    load_into(untied, None, source)  # tied there, and not here
    assert_equal(untied.tail.weight.data, source.whole["model/head.weight"])
    both = {**source.whole, "model/tail.weight": torch.zeros(5, 5)}
    load_into(net, None, MemorySource(both, norms))  # not tied there, and here
    assert_equal(net.head.weight.data, both["model/head.weight"])


def test_states_of_modules_come_back() -> None:
    source = saved(make_odd_net(3))
    net = make_odd_net()
    load_into(net, None, source)
    assert net.middle.seen == {"words": ["a", (1, 2.5)], "seed": 3}
    net.middle.seen = torch.arange(4)
    other = make_odd_net()
    other.middle.seen = torch.zeros(1)  # of another shape: only the module knows what it means
    load_into(other, None, saved(net))
    assert_equal(other.middle.seen, torch.arange(4))


def test_states_of_modules_that_are_no_json_are_refused() -> None:
    source = saved(make_odd_net())
    for text in (b"[" * 100_000, b"9" * 5000, b"\xff", b'{"!": "array"}'):
        state = torch.tensor(list(text), dtype=torch.uint8)
        hostile = MemorySource({**source.whole, "model/middle._extra_state": state}, source.tied)
        with pytest.raises(CheckpointError):
            load_into(make_odd_net(), None, hostile)


def test_buffers_that_are_cast_for_compute_are_loaded() -> None:
    with alone():
        net = make_odd_net()
        precision = MixedPrecision(buffer_dtype=torch.bfloat16)
        model = wrapped_odd_net(net, mixed_precision=precision)
        odd_loss(model, 0)
        before = net.middle.shift
        load_into(model, None, saved(make_odd_net(2)))
        assert net.middle.shift is before and before.dtype == torch.bfloat16
        assert_equal(before.float(), make_odd_net(2).middle.shift)


class StrangeBuffers(nn.Module):
    """Buffers, and an ignored parameter, whose memory is not their elements one by one."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        row, column = values[:3].clone(), values[:4].clone()
        self.register_buffer("row", row)
        self.register_buffer("rows", row.expand(2, 3))
        self.register_buffer("number", values[3].clone().expand(5))
        self.register_buffer("windows", column.unfold(0, 2, 1))
        self.register_buffer("gaps", torch.stack([row, row])[:, ::2])
        phases = torch.complex(row, row + 1)
        self.register_buffer("conjugates", phases.conj())
        self.register_buffer("negative", phases[:1].conj().imag)  # contiguous: of one element
        self.fixed = nn.Parameter(values[:2].clone().expand(3, 2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def behind_api(api: str, module: StrangeBuffers) -> nn.Module:
    if api == "plain":
        return module
    if api == "wrapper":
        return FullyShardedDataParallel(module, ignored_states=[module.fixed])
    return fully_shard(module, ignored_params={module.fixed})


def strange_buffers_come_back(folder: str) -> None:
    saved_values = torch.tensor([1.0, 2.0, -3.0, 4.0])
    for api in ("plain", "wrapper", "fully_shard"):
        module = StrangeBuffers(saved_values)
        checkpoint.save(f"{folder}/{api}", behind_api(api, module))
        other = StrangeBuffers(torch.zeros(4))
        row, rows = other.row, other.rows
        checkpoint.load(f"{folder}/{api}", behind_api(api, other))
        for name, value in module.named_buffers():
            assert torch.equal(other.get_buffer(name), value), name
        assert_equal(other.fixed.data, module.fixed.data)
        # What shared memory shares it still, and whoever has the tensors has the new values.
        assert rows is other.rows and rows.data_ptr() == row.data_ptr()
        assert_equal(row, saved_values[:3])


def test_tensors_that_are_not_plain_memory_come_back(world: Any, tmp_path: Path) -> None:
    world(2).run(strange_buffers_come_back, str(tmp_path))


def test_values_that_shared_memory_cannot_hold_get_new_memory(tmp_path: Path) -> None:
    dense, expanded = nn.Module(), nn.Module()
    dense.register_buffer("scale", torch.tensor([1.0, 2.0]))
    number = torch.tensor(5.0)
    expanded.register_buffer("scale", number.expand(2))
    checkpoint.save(tmp_path / "a", dense)
    checkpoint.load(tmp_path / "a", expanded)
    assert_equal(expanded.scale, torch.tensor([1.0, 2.0]))
    assert number == 5
    dense.scale.fill_(torch.nan)
    checkpoint.save(tmp_path / "b", dense)
    expanded.scale = number.expand(2)
    checkpoint.load(tmp_path / "b", expanded)
    assert number.isnan() and expanded.scale.stride() == (0,)


# --- optimizers --------------------------------------------------------------------------------------


def two_groups(net: nn.Module, first: int) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [{"params": params[:first]}, {"params": params[first:], "lr": 0.5}]


def target_of(net: nn.Module, optimizer: optim.Optimizer, source: MemorySource) -> OptimizerTarget:
    return OptimizerTarget(optimizer, LocalModelState(net, "load"), source)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def test_groups_are_those_of_the_same_parameters() -> None:
    net = layers()
    source = saved(net, stepped(two_groups(net, 2)))
    other = optim.Adam(two_groups(net, 2)[::-1])
    load_into(net, other, source)  # in another order
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.001]
    assert target_of(net, optim.Adam(two_groups(net, 3)), source).faults.others == [
        "group 0 has parameters of the checkpoint's groups [0, 1]"
    ]
    faults = target_of(net, optim.Adam(net[0].parameters()), source).faults
    assert faults.unexpected == ["1.weight, in the optimizer", "1.bias, in the optimizer"]
    small = saved(net, stepped(net[0].parameters()))
    faults = target_of(net, optim.Adam(net.parameters()), small).faults
    assert faults.missing == ["1.weight, in the optimizer", "1.bias, in the optimizer"]
    whole = saved(net, stepped(net.parameters()))
    assert target_of(net, optim.Adam(two_groups(net, 2)), whole).faults.others == [
        "the optimizer has 2 groups of parameters, and the checkpoint has 1"
    ]
    assert target_of(net, optim.Adam(net.parameters()), saved(net)).faults.missing


def test_options_are_the_saved_ones_and_how_to_compute_is_one_s_own() -> None:
    net = layers()
    options = {"betas": (0.5, 0.25), "foreach": False, "lr": torch.tensor(0.125)}
    source = saved(net, stepped(net.parameters(), **options))
    assert source.optimizer is not None
    del source.optimizer["param_groups"][0]["eps"]
    mine = optim.Adam(net.parameters(), fused=True, lr=torch.tensor(1.0), eps=0.25)
    load_into(net, mine, source)
    (group,) = mine.param_groups
    assert (group["betas"], group["fused"], group["foreach"]) == ((0.5, 0.25), True, None)
    assert_equal(group["lr"], torch.tensor(0.125))
    assert group["eps"] == 0.25  # the checkpoint has none
    load_into(net, plain := optim.Adam(net.parameters()), source)
    assert isinstance(plain.param_groups[0]["lr"], Tensor)
    load_into(net, mine, saved(net, stepped(net.parameters(), lr=0.75)))
    assert_equal(group["lr"], torch.tensor(0.75))  # which a compiled step may have as a tensor only


def test_old_state_stays_until_all_was_read() -> None:
    net = layers()
    source = saved(net, stepped(net.parameters()))
    optimizer = stepped(net.parameters(), lr=0.5)
    before = {param: dict(state) for param, state in optimizer.state.items()}
    target = target_of(net, optimizer, source)
    assert target._new is None  # nothing is allocated yet
    assert len(target.requests) == 8
    assert optimizer.param_groups[0]["lr"] == 0.5
    for param, state in before.items():
        assert all(optimizer.state[param][key] is value for key, value in state.items())


def test_expanded_state_and_views_in_extra_come_back(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = stepped(net.parameters(), optim.SGD, momentum=0.9)
    for state in optimizer.state.values():
        state["momentum_buffer"] = torch.tensor(3.0).expand(state["momentum_buffer"].shape)
    negative = torch.complex(torch.ones(1), torch.ones(1)).conj().imag
    extra = {"rows": torch.arange(3.0).expand(2, 3), "negative": negative, "one": negative[0]}
    checkpoint.save(tmp_path / "a", net, optimizer, extra=extra)
    loaded = checkpoint.load(tmp_path / "a", net, optimizer).extra
    assert all((state["momentum_buffer"] == 3).all() for state in optimizer.state.values())
    assert all(torch.equal(loaded[name], value) for name, value in extra.items())


def test_state_that_the_checkpoint_has_not_is_gone() -> None:
    net = layers()
    source = saved(net, optim.Adam(net.parameters()))  # before its first step
    optimizer = stepped(net.parameters())
    load_into(net, optimizer, source)
    assert not optimizer.state


def test_a_flat_parameter_needs_the_same_state_of_all_it_stands_for() -> None:
    net = layers()
    optimizer = stepped(net.parameters())
    optimizer.state[net[0].bias]["step"] += 1
    other_steps = saved(net, optimizer)
    del optimizer.state[net[1].bias]["exp_avg"]
    lacking = saved(net, optimizer)
    with fake_world(2):
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
        faults = target_of(model, optim.Adam(model.parameters()), other_steps).faults
        assert [line.split("'")[1] for line in faults.others] == ["step"]
        assert "0.weight, 0.bias, 1.weight, 1.bias" in faults.others[0]
        faults = target_of(model, optim.Adam(model.parameters()), lacking).faults
        assert faults.kinds == ["state of 1.bias: missing: exp_avg"]


def test_a_flat_parameter_of_one() -> None:
    net = nn.Linear(3, 3, bias=False)
    source = saved(net, stepped(net.parameters()))
    with alone():
        model = FullyShardedDataParallel(nn.Linear(3, 3, bias=False), device_id=torch.device("cpu"))
        optimizer = optim.Adam(model.parameters())
        load_into(model, optimizer, source)
        again = saved(model, optimizer)
        assert_equal(again.whole, source.whole)


def test_counts_that_are_stored_as_tensors_are_counts() -> None:
    """As in other formats."""
    net = layers()
    source = saved(net, stepped(net.parameters()))
    assert source.optimizer is not None
    whole = dict(source.whole)
    for name, state in source.optimizer["state"].items():
        whole[f"optimizer/{name}/step"] = state["step"]
        state["step"] = TensorRef(f"optimizer/{name}/step")
    other = MemorySource(whole, source.tied, source.optimizer)
    with alone():
        cpu = torch.device("cpu")
        wrapped = FullyShardedDataParallel(layers(), use_orig_params=True, device_id=cpu)
        for model in (fully_shard(layers()), wrapped):
            optimizer = optim.Adam(model.parameters())
            load_into(model, optimizer, other)
            for state in optimizer.state.values():
                assert type(state["step"]) is Tensor and state["step"].item() == 1
