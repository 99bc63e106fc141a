"""Real streams: nothing is read before it is written, nothing is overwritten before it is read.

Sleeps are put into the streams before and after collectives and kernels, at random, and the
gradients must equal those of an undisturbed run bit for bit. That the test can see a missing wait
is itself tested: each wait of the engine is taken out in turn, and the gradients must differ then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard.layout.segments
from examples.int8_gather import Int8Gathered, gather_linear_weights_as_int8
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard, replicate
from fullshard.engine import reduction
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.reduction import Reduction, ReductionInFlight
from fullshard.engine.reduction_state import ReduceEvents
from fullshard.transport import collectives
from fullshard.transport.streams import FSDPCommContext
from fullshard.transport.transports import Coalesced, Exchanged
from tests.helpers.fake import fake_world

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reduce_scatter_that_reduces")]

WIDTH, DEPTH, STEPS = 768, 6, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def make_model(
    hsdp: bool = False,
    reduce_dtype: torch.dtype | None = torch.float32,
    offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    int8: bool = False,
    replicated: bool = False,
    part: int | None = None,
    wire: bool = False,
    fuse: bool = False,
) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(DEPTH)))
    if int8:
        gather_linear_weights_as_int8(model)
    mesh = (
        init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        if hsdp
        else init_device_mesh("cuda", (4,))
    )
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=reduce_dtype,
        wire_dtype=torch.bfloat16 if wire else None,
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    if part is not None:
        options["reshard_after_forward"] = part
    if fuse:
        options["fuse_gradients"] = True
    api = replicate if replicated else fully_shard
    for layer in model[1:]:
        api(layer, **options)
    return api(model, **options)


def train(model: nn.Module, rng: random.Random | None = None) -> list[Tensor]:
    """A few steps with an optimizer; what it computed, all gradients and the final shards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator("cuda").manual_seed(1)
    results = []
    for step in range(STEPS):
        x = torch.randn(256, WIDTH, device="cuda", generator=generator)
        with torch.no_grad():
            results.append(model(x))
        if step == 1:  # accumulate once
            model.set_requires_gradient_sync(False)
            model(x).float().pow(2).mean().backward()
            model.set_requires_gradient_sync(True)
        model(x).float().pow(2).mean().backward()
        results += [p.grad.to_local().clone() for p in model.parameters()]
        if rng is not None:
            pause(rng)
        optimizer.step()
        optimizer.zero_grad()
    results += [plain_local(p) for p in model.parameters()]
    return results


def plain_local(param: Any) -> Tensor:
    """A copy of a shard."""
    local = param.to_local().detach()
    return (local.data_ if isinstance(local, Int8Gathered) else local).clone()  # type: ignore[no-any-return]


def pause(rng: random.Random) -> None:
    """Keep the current stream busy for up to about a millisecond, or not at all."""
    if rng.random() < 0.5:
        torch.cuda._sleep(rng.randrange(2_000_000))


@contextmanager
def disturbed(seed: int) -> Iterator[random.Random]:
    """Sleeps before and after every collective, on its stream, and around some kernels, on theirs."""
    rng = random.Random(seed)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def disturbed_function(*args: Any, **kwargs: Any) -> Any:
            pause(rng)
            result = function(*args, **kwargs)
            pause(rng)
            return result

        return disturbed_function

    def on_compute(*_: Any) -> None:
        pause(rng)

    with pytest.MonkeyPatch.context() as patch:
        for transport, name in (
            (Coalesced, "gather"),
            (Coalesced, "reduce"),
            (Exchanged, "reduce"),
            (collectives, "all_reduce"),
        ):
            patch.setattr(transport, name, around(getattr(transport, name)))
        # On the compute stream, or in a captured step on the reduce-scatter stream.
        patch.setattr(reduction, "fill", around(reduction.fill))
        handles = [
            nn.modules.module.register_module_forward_pre_hook(on_compute),
            nn.modules.module.register_module_forward_hook(on_compute),
        ]
        try:
            yield rng
        finally:
            for handle in handles:
                handle.remove()


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    torch.cuda.synchronize()
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("hsdp", "reduce_dtype"),
    [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)],
)
def test_disturbed_streams_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, hsdp: bool, reduce_dtype: torch.dtype, in_place: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    with fake_world(4):
        expected = train(make_model(hsdp, reduce_dtype))
        assert equal(train(make_model(hsdp, reduce_dtype)), expected)
        for seed in range(12):
            with disturbed(seed) as rng:
                result = train(make_model(hsdp, reduce_dtype), rng)
            assert equal(result, expected), f"seed {seed}"


@pytest.mark.parametrize(
    "options",
    [
        {"part": 2},
        {"part": 2, "hsdp": False, "offload": CPUOffloadPolicy()},
        {"int8": True},
        {"int8": True, "hsdp": True},
        {"int8": True, "offload": CPUOffloadPolicy()},
        {"replicated": True},
        {"wire": True},
        {"wire": True, "hsdp": True},
        {"wire": True, "offload": CPUOffloadPolicy()},
        {"fuse": True},
        {"fuse": True, "hsdp": True},
        {"fuse": True, "wire": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("in_place", [True, False])
def test_disturbed_streams_give_the_same_bits_on_every_mesh(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], in_place: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    with fake_world(4):
        expected = train(make_model(**options))
        for seed in range(8):
            with disturbed(seed) as rng:
                result = train(make_model(**options), rng)
            assert equal(result, expected), f"seed {seed}"


def two_inputs_in_flight(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(2)


def three_inputs_in_flight(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(3)


def separate_group(model: Any) -> None:
    model.set_separate_reduce_scatter_group()


def prefetch_two(model: Any) -> None:
    layers = list(model)[1:]
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(list(reversed(layers[max(i - 2, 0) : i])))


def kept_between_microbatches(model: Any) -> None:
    model.set_reshard_after_backward(False)


def hook_in_a_stream_of_its_own(model: Any) -> None:
    stream = torch.Stream(torch.device("cuda", 0))
    for layer in list(model)[1:]:
        layer.set_all_reduce_hook(lambda reduced: reduced.mul_(1.5), stream=stream)


SETTERS = [
    two_inputs_in_flight,
    three_inputs_in_flight,
    separate_group,
    prefetch_two,
    kept_between_microbatches,
    hook_in_a_stream_of_its_own,
]


@pytest.mark.parametrize("setter", SETTERS, ids=[s.__name__ for s in SETTERS])
@pytest.mark.parametrize("in_place", [True, False])
def test_disturbed_streams_give_the_same_bits_with_every_setter(
    monkeypatch: pytest.MonkeyPatch, setter: Callable[[Any], None], in_place: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)

    def run(rng: random.Random | None = None) -> list[Tensor]:
        model = make_model()
        setter(model)
        return train(model, rng)

    with fake_world(4):
        expected = run()
        for seed in range(6):
            with disturbed(seed) as rng:
                result = run(rng)
            assert equal(result, expected), f"seed {seed}"


def partial_sums(rng: random.Random | None = None) -> list[Tensor]:
    """HSDP, accumulating twice without all-reduce; the optimizer waits for an event of its own."""
    model: Any = make_model(hsdp=True)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    generator = torch.Generator("cuda").manual_seed(1)
    results = []
    for _ in range(STEPS):
        for microbatch in range(3):
            model.set_requires_all_reduce(microbatch == 2)
            model.set_is_last_backward(microbatch == 2)
            x = torch.randn(64, WIDTH, device="cuda", generator=generator)
            model(x).float().pow(2).mean().backward()
        results += [p.grad.to_local().clone() for p in params]
        if rng is not None:
            pause(rng)
        optimizer.step()
        event = torch.Event("cuda")
        event.record()
        model.set_post_optim_event(event)
        optimizer.zero_grad()
    return results


def test_disturbed_partial_sums_give_the_same_bits() -> None:
    with fake_world(4):
        expected = partial_sums()
        for seed in range(12):
            with disturbed(seed) as rng:
                result = partial_sums(rng)
            assert equal(result, expected), f"seed {seed}"


def nothing(*_: Any, **__: Any) -> None:
    pass


def forget_releases(context: FSDPCommContext) -> None:
    context.releases.clear()


def finish_input_at_once(flight: ReductionInFlight) -> None:
    flight.buffer.release()
    forget_memory(flight)


def forget_memory(flight: ReductionInFlight) -> None:
    for part in flight.parts:
        part.inputs = part.outputs = part.totals = part.lent = ()


def wait_not_for_gather(group: FSDPParamGroup) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group.gather, "_gathered", HostEvent(), raising=False)
        original_wait_for_gather(group)


original_wait_for_gather = FSDPParamGroup._wait_for_gather


class HostEvent:
    """An event for which no stream waits."""

    record = wait = nothing


original_new_events = ReduceEvents.new


def events_not_ready(context: FSDPCommContext) -> ReduceEvents:
    return replace(original_new_events(context), ready=HostEvent())


SABOTAGE = {
    "gathers do not wait for releases": (FSDPCommContext, "wait_for_releases", forget_releases),
    "compute does not wait for gathers": (FSDPParamGroup, "_wait_for_gather", wait_not_for_gather),
    "gathers do not wait for the optimizer": (
        FSDPCommContext,
        "gathers_wait_for",
        nothing,
    ),
    "reduce inputs are freed at once": (ReductionInFlight, "finish_input", finish_input_at_once),
    "reductions do not wait for compute": (ReduceEvents, "new", events_not_ready),
    "the optimizer does not wait for reductions": (FSDPCommContext, "join", nothing),
}


@pytest.mark.parametrize("options", [{}, {"part": 2}, {"int8": True}, {"wire": True}], ids=str)
@pytest.mark.parametrize("name", SABOTAGE)
def test_a_missing_wait_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    owner, method, replacement = SABOTAGE[name]
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0)
    with fake_world(4):
        expected = train(make_model(**options))
        monkeypatch.setattr(owner, method, replacement)
        for seed in range(20):
            with disturbed(seed) as rng:
                result = train(make_model(**options), rng)
            if not equal(result, expected):
                return
    pytest.fail("no seed showed a difference")


original_reduce = Reduction.reduce


def forget_received(group: Reduction, **options: bool) -> None:
    original_reduce(group, **options)
    if group.context.reduce_inputs:
        latest: Any = group.context.reduce_inputs[-1]
        for part in latest.parts:
            part.outputs = part.totals = part.lent = ()


def test_received_gradients_that_are_given_back_at_once_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_world(4):
        expected = train(make_model(wire=True))
        monkeypatch.setattr(Reduction, "reduce", forget_received)
        for seed in range(20):
            with disturbed(seed) as rng:
                result = train(make_model(wire=True), rng)
            if not equal(result, expected):
                return
    pytest.fail("no seed showed a difference")


def test_inputs_are_moved_to_the_device() -> None:
    with fake_world(4):
        model = make_model()
        x = torch.randn(8, WIDTH)
        assert torch.equal(model(x), model(x.cuda()))


def test_replaced_data_is_packed_before_it_is_gathered() -> None:
    """The forward that notices it has let gathers wait for the compute stream already."""
    with fake_world(4):
        x = torch.randn(8, WIDTH, device="cuda")
        for _ in range(3):
            model, twin = make_model(), make_model()
            for each in (model, twin):
                each(x).sum().backward()
            state = {name: value.clone().mul_(2) for name, value in model.state_dict().items()}
            twin.load_state_dict(state)
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)
            model.load_state_dict(
                {name: value.clone() for name, value in state.items()}, assign=True
            )
            assert torch.equal(model(x), twin(x))


def test_nothing_uses_record_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(Tensor, "record_stream", lambda *args: calls.append(args))
    with fake_world(4):
        train(make_model())
    assert not calls


@pytest.mark.parametrize("wire", [False, True])
def test_the_host_never_waits(wire: bool) -> None:
    with fake_world(4):
        model = make_model(wire=wire)
        x = torch.randn(8, WIDTH, device="cuda")
        for _ in range(2):
            model(x).float().mean().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).float().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
