"""The configurations whose order of streams is proven: those of `same_numbers.py`, and features with streams of their own.

A configuration is a function that trains a few steps as rank 0 of a world that does not exist. Tests run all of them, and
`stream_order.py` prints what was found.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from benchmarks.number_models import Decoder, DecoderOptions
from benchmarks.number_rank import Place, Training
from benchmarks.number_settings import CONFIGURATIONS as NUMBERS
from benchmarks.stream_capture import CapturedStep, faults_of_capture
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, torch_border
from fullshard.checkpoint import host_copies
from fullshard.checks.stream_check import StreamCheck
from fullshard.engine.state import state_of
from fullshard.mesh import FSDPMeshInfo, ShardPlacementResult
from fullshard.optim import EMA, AdamW8bit, Muon, ShardedOptimizer
from fullshard.transport import comm_objects
from fullshard.transport.streams import comm_contexts

__all__ = ["SETTINGS", "Setting", "checked"]

META = torch.device("meta")
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
WIRE = MixedPrecisionPolicy(torch.bfloat16, torch.float32, wire_dtype=torch.bfloat16)
STEPS = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """Something whose order of streams is proven."""

    run: Callable[[StreamCheck], None]
    """Trains within the block of a check."""
    world: int = 8
    offloads: bool = False
    """Whether tensors of the CPU are memory beside the device."""


SETTINGS: dict[str, Setting] = {}


def checked(name: str) -> StreamCheck:
    """Run a configuration and return its check; races are found, but not raised."""
    setting = SETTINGS[name]
    torch.manual_seed(0)
    check = StreamCheck(setting.world, offloads=setting.offloads, raises=False)
    with check:
        setting.run(check)
    return check


def setting(name: str, *, world: int = 8, offloads: bool = False) -> Callable[[Any], Any]:
    """Add a function as a configuration."""

    def add(run: Callable[[StreamCheck], None]) -> Callable[[StreamCheck], None]:
        assert name not in SETTINGS, name
        SETTINGS[name] = Setting(run, world, offloads)
        return run

    return add


# --- models and steps ----------------------------------------------------------------------------------


def tokens() -> Tensor:
    """Return a batch."""
    return torch.zeros(2, 7, dtype=torch.int64, device=META)


def mesh(replicas: int = 1) -> DeviceMesh:
    """Return all ranks as (shard,) or as (replicate, shard)."""
    size = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("meta", (size,))
    names = ("replicate", "shard")
    return init_device_mesh("meta", (replicas, size // replicas), mesh_dim_names=names)


def decoder(*, on: torch.device = META, depth: int = 4, **options: Any) -> Any:
    """Build a model whose widths divide by the ranks: large enough that pieces are matrices."""
    sizes = {"width": 16, "hidden": 64, "depth": depth, "scale": False}
    return Decoder(DecoderOptions(**{**sizes, **options})).to(on)


def sharded(model: Any, *, replicas: int = 1, **options: Any) -> Any:
    """Shard each block and the root."""
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh(replicas), **options)
    return model


def adamw(model: nn.Module) -> optim.Optimizer:
    """Return the optimizer of most configurations."""
    return optim.AdamW(model.parameters(), lr=1e-3)


def step(model: Any, optimizer: optim.Optimizer | None = None, microbatches: int = 1) -> None:
    """Train a step."""
    for _ in range(microbatches):
        model(tokens()).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def train(
    model: Any,
    optimizer: optim.Optimizer | None = None,
    *,
    microbatches: int = 1,
    before: Callable[[int], None] = lambda number: None,
) -> None:
    """Train some steps."""
    optimizer = adamw(model) if optimizer is None else optimizer
    for number in range(STEPS):
        before(number)
        step(model, optimizer, microbatches)


# --- those of same_numbers.py ---------------------------------------------------------------------------

WITHOUT_VALUES = ("save_and_load", "state_dicts")
"""Configurations that write or read the values of weights: a virtual device has none."""


def train_numbers(name: str, check: StreamCheck) -> None:
    """Train a configuration of `same_numbers.py`."""
    on_host = SETTINGS[name].offloads
    with tempfile.TemporaryDirectory() as folder:
        size = dist.get_world_size()
        place = Place(rank=0, size=size, device=META, folder=Path(folder), begins_on_host=on_host)
        training: Training = NUMBERS[name].build(place)
        for number in range(STEPS):
            training.optimizer.zero_grad()
            for microbatch in range(training.microbatches):
                with training.around(microbatch + 1 == training.microbatches):
                    training.model(tokens()).backward()
            training.before_optimizer()
            training.optimizer.step()
            training.after_step(number)


for _name, _configuration in NUMBERS.items():
    if not any(each in _name for each in WITHOUT_VALUES):
        setting(_name, world=max(_configuration.worlds), offloads="offload" in _name)(
            partial(train_numbers, _name)
        )


# --- precision, shapes, meshes --------------------------------------------------------------------------

for _replicas in (1, 2):
    for _policy, _precision in ((BF16, "bf16"), (WIRE, "wire")):
        for _kept in (True, False, 2):

            @setting(f"{_precision}, {_replicas} replicas, reshard {_kept}")
            def _(
                check: StreamCheck,
                replicas: int = _replicas,
                policy: MixedPrecisionPolicy = _policy,
                kept: Any = _kept,
            ) -> None:
                options = {"mp_policy": policy, "reshard_after_forward": kept}
                train(sharded(decoder(), replicas=replicas, **options))


@setting("seven ranks, wire", world=7)
def seven(check: StreamCheck) -> None:
    """Shard what no number of ranks divides."""
    train(sharded(decoder(), mp_policy=WIRE), microbatches=2)


@setting("large pieces, in place")
def in_place(check: StreamCheck) -> None:
    """Gather segments in place."""
    with patch("fullshard.layout.segments.IN_PLACE_FROM", 0):
        train(sharded(decoder(), mp_policy=BF16))


@setting("parameters on several meshes")
def several_meshes(check: StreamCheck) -> None:
    """Shard norms over two ranks, the rest over all."""
    pairs = init_device_mesh("meta", (4, 2), mesh_dim_names=("a", "b"))
    some, every = FSDPMeshInfo(pairs["b"], shard_mesh_dim=0), FSDPMeshInfo(mesh(), shard_mesh_dim=0)
    model = decoder()
    train(
        sharded(
            model,
            shard_placement_fn=lambda param: ShardPlacementResult(
                None, some if param.ndim == 1 else every
            ),
        )
    )


# --- when gathers and reductions happen -----------------------------------------------------------------


@setting("unshard by hand")
def by_hand(check: StreamCheck) -> None:
    """Gather all blocks before a step, in one call each."""
    model = sharded(decoder(), mp_policy=BF16)

    def gather(number: int) -> None:
        handles = [block.unshard(async_op=True) for block in model.blocks]
        for handle in handles[:2]:
            handle.wait()

    train(model, before=gather)


@setting("a gather that is not used")
def unused(check: StreamCheck) -> None:
    """Reshard a block that was gathered and never waited for, then write its shards."""
    model = sharded(decoder(), mp_policy=BF16)
    train(model)
    for block in model.blocks:
        block.unshard(async_op=True)
    for block in model.blocks:
        block.reshard()
    write_unseen(model)
    train(model)


@setting("unshard by hand after a write that is not counted")
def by_hand_after_data(check: StreamCheck) -> None:
    """Write by `.data`, as fused optimizers write: torch's counter of versions does not see it."""
    model = sharded(decoder(), mp_policy=BF16)
    train(model)
    model.blocks[0].unshard()
    model.blocks[0].reshard()
    write_unseen(model)
    model.blocks[0].unshard()
    model.blocks[0](torch.zeros(2, 7, 16, device=META)).sum().backward()


def write_unseen(model: nn.Module, ending: str = "") -> None:
    """Write to the shards as fused optimizers do."""
    for name, param in model.named_parameters():
        if name.endswith(ending):
            locally(param.data).data.mul_(0.5)


@setting("a write that is not counted before backward")
def unseen_before_backward(check: StreamCheck) -> None:
    """Write to biases, which backward does not need, by `.data` between forward and backward."""
    model = sharded(decoder(), mp_policy=BF16)
    train(model)
    loss = model(tokens())
    write_unseen(model, "bias")
    loss.backward()


@setting("a part that is run on its own")
def a_part(check: StreamCheck) -> None:
    """Run one block by itself between steps, after a fused optimizer's step."""
    model = sharded(decoder(), mp_policy=BF16)
    train(model)
    write_unseen(model)
    model.blocks[0](torch.zeros(2, 7, 16, device=META)).sum().backward()
    train(model)


@setting("weights written by their own forward")
def own_weight(check: StreamCheck) -> None:
    """Normalise a weight in forward."""
    model = decoder()

    def normalise(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight.div_(module.weight.norm())

    for block in model.blocks:
        block.up.register_forward_pre_hook(normalise)
    train(sharded(model, mp_policy=BF16))


@setting("a block used twice that writes its bias")
def own_weight_twice(check: StreamCheck) -> None:
    """Normalise a bias, which backward does not need, in each of two calls; the second one gathers again."""
    model = decoder(depth=2)

    def normalise(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.bias.div_(module.bias.norm())

    model.blocks[0].up.register_forward_pre_hook(normalise)
    sharded(model, mp_policy=BF16, reshard_after_forward=True)
    model.blocks = nn.ModuleList([*model.blocks, model.blocks[0]])
    train(model)


@setting("a later block's weights written in forward")
def later_block(check: StreamCheck) -> None:
    """Write the shards of a block that has been gathered ahead."""
    model = sharded(decoder(), mp_policy=BF16)

    def write(module: Any, args: Any, output: Any) -> None:
        with torch.no_grad():
            for param in model.blocks[2].parameters():
                param.mul_(0.9)

    model.blocks[0].register_forward_hook(write)
    train(model)


@setting("nothing gathered in backward")
def not_in_backward(check: StreamCheck) -> None:
    """Keep every second block, and do not gather it in backward."""
    model = sharded(decoder(), mp_policy=BF16)
    for block in model.blocks[::2]:
        block.set_reshard_after_forward(False)
        block.set_unshard_in_backward(False)
    train(model)


@setting("kept over microbatches, 2 replicas")
def kept(check: StreamCheck) -> None:
    """Keep parameters, and sum over replicas in the last microbatch only."""
    model = sharded(decoder(), replicas=2, mp_policy=BF16)
    optimizer = adamw(model)
    for _ in range(STEPS):
        for last in (False, False, True):
            model.set_requires_all_reduce(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            model(tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()


@setting("kept storage")
def kept_storage(check: StreamCheck) -> None:
    """Keep gathered memory."""
    model = sharded(decoder(), mp_policy=BF16)
    model.set_keep_unsharded_storage(True)
    train(model)


@setting("finalised by hand")
def finalised(check: StreamCheck) -> None:
    """End backward by hand, with a handle."""
    model = sharded(decoder(), mp_policy=BF16)
    model.set_manual_backward_finalization(True)
    optimizer = adamw(model)
    for _ in range(STEPS):
        model(tokens()).backward()
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        optimizer.step()
        optimizer.zero_grad()


@setting("three inputs of reductions, of their own group")
def three_inputs(check: StreamCheck) -> None:
    """Let several reductions be in flight, over a process group of their own."""
    model = sharded(decoder(), mp_policy=BF16)
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_separate_reduce_scatter_group(dist.new_group())
    train(model, microbatches=2)


@setting("an all-reduce hook on a stream of its own")
def hook_on_a_stream(check: StreamCheck) -> None:
    """Run a hook on a stream of the user's."""
    model = sharded(decoder(), mp_policy=BF16)
    stream = torch_border.device_for(META).new_stream(priority=0)
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5), stream=stream)
    train(model)


@setting("an event after the optimizer")
def optimizer_event(check: StreamCheck) -> None:
    """Step on another stream, and let gathers wait for its event."""
    model = sharded(decoder(), mp_policy=BF16)
    optimizer = adamw(model)
    device = torch_border.device_for(META)
    stream, event = device.new_stream(priority=0), device.new_event()
    for _ in range(STEPS):
        model(tokens()).backward()
        stream.wait_stream(torch_border.current_stream(META))
        with stream:
            optimizer.step()
            event.record()
        model.set_post_optim_event(event)
        # Gradients are the compute stream's memory.
        torch_border.current_stream(META).wait_event(event)
        optimizer.zero_grad()


@setting("shards written on a stream of their own, gathers not before")
def written_aside(check: StreamCheck) -> None:
    """Write shards on a stream that compute never waits for; each group's next gather does."""
    model = sharded(decoder(), mp_policy=BF16)
    device = torch_border.device_for(META)
    stream, event = device.new_stream(priority=0), device.new_event()
    states: Any = [state_of(module) for module in (*model.blocks, model)]
    for _ in range(STEPS):
        model(tokens()).backward()
        stream.wait_stream(torch_border.current_stream(META))
        with stream, torch.no_grad():
            for param in model.parameters():
                param.to_local().mul_(0.5)
            event.record()
        for state in states:
            for group in state.groups:
                group.not_before(event)
        model.zero_grad()


@setting("an optimizer in backward")
def in_backward(check: StreamCheck) -> None:
    """Step in hooks of parameters, while backward goes on."""
    model = sharded(decoder(), mp_policy=BF16)
    steppers = {param: optim.SGD([param], lr=0.1) for param in model.parameters()}

    def update(param: Tensor) -> None:
        steppers[param].step()
        steppers[param].zero_grad()

    for param in steppers:
        param.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        model(tokens()).backward()


# --- comm objects ---------------------------------------------------------------------------------------


class Kept:
    """Staging memory that is handed out again."""

    recycles = True

    def __init__(self) -> None:
        self.free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of the size."""
        found = self.free.get((size[0], dtype))
        return found.pop() if found else torch.empty(*size, dtype=dtype, device=device)

    def release(self, tensor: Tensor) -> None:
        """Keep memory for the next."""
        self.free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)


class KeptAllGather(Kept, comm_objects.DefaultAllGather):
    """An all-gather in such memory."""


class KeptReduceScatter(Kept, comm_objects.DefaultReduceScatter):
    """A reduce-scatter in such memory."""


class OwnAllGather(comm_objects.AllGather):
    """A user's all-gather: asynchronous, on its communicator's stream."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gather."""
        work = torch_border.all_gather_single(group)(
            output_tensor, input_tensor, torch_border.all_gather_options(async_op=True)
        )
        work.wait()


@contextlib.contextmanager
def registered_memory() -> Iterator[None]:
    """Let groups allocate memory, as NCCL does."""

    def empty(numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=META)

    with (
        patch.object(torch_border, "symmetric_bytes", lambda n, *_: empty(n, torch.uint8)),
        patch.object(torch_border, "allocate_tensor", lambda _, n, dtype, *__: empty(n, dtype)),
    ):
        yield


def with_comms(gather: Any, scatter: Any, **options: Any) -> None:
    """Train with comm objects."""
    model = sharded(decoder(), mp_policy=BF16, **options)
    states: Any = {module: state_of(module) for module in (*model.blocks, model)}
    for module in (*model.blocks, model):
        for group in states[module].groups:
            group.set_custom_all_gather(gather)
            if scatter is not None:
                group.set_custom_reduce_scatter(scatter)
    train(model, microbatches=2)


@setting("comm objects that keep memory")
def keeping(check: StreamCheck) -> None:
    """Stage in memory that is handed out again."""
    with_comms(KeptAllGather(), KeptReduceScatter())


@setting("comm objects that keep memory, 2 replicas")
def keeping_replicas(check: StreamCheck) -> None:
    """Stage in such memory, and sum over replicas."""
    with_comms(KeptAllGather(), KeptReduceScatter(), replicas=2)


@setting("an asynchronous comm object")
def asynchronous(check: StreamCheck) -> None:
    """Gather on a communicator's own stream."""
    with_comms(OwnAllGather(), None)


@setting("symmetric memory")
def symmetric(check: StreamCheck) -> None:
    """Stage in memory of a pool that all ranks know."""
    with registered_memory():
        group = mesh().get_group()
        gather = comm_objects.SymmetricAllGather(group, META)
        with_comms(gather, comm_objects.SymmetricReduceScatter(group, META))


@setting("memory of the process group")
def group_memory(check: StreamCheck) -> None:
    """Stage in memory of the backend's allocator."""
    with registered_memory():
        group = mesh().get_group()
        gather = comm_objects.ProcessGroupAllGather(group, META)
        with_comms(gather, comm_objects.ProcessGroupReduceScatter(group, META))


# --- features -------------------------------------------------------------------------------------------

for _replicas in (1, 2):
    for _checkpointing in ("none", "non_reentrant", "reentrant"):

        @setting(f"fused gradients, {_replicas} replicas, recomputation {_checkpointing}")
        def _(
            check: StreamCheck, replicas: int = _replicas, checkpointing: str = _checkpointing
        ) -> None:
            model = decoder(checkpointing=checkpointing)
            options: dict[str, Any] = {"mp_policy": BF16, "fuse_gradients": True}
            train(sharded(model, replicas=replicas, **options), microbatches=2)


@setting("fused gradients of the wrapper")
def fused_wrapper(check: StreamCheck) -> None:
    """Write gradients once, into flat arrays."""
    from benchmarks.number_models import Block
    from fullshard import FullyShardedDataParallel, MixedPrecision
    from fullshard.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        decoder(),
        device_id=META,
        device_mesh=mesh(),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
        fuse_gradients=True,
    )
    train(model)


@setting("gradients of gradients")
def penalties(check: StreamCheck) -> None:
    """Penalise gradients."""
    model = sharded(decoder(), mp_policy=BF16)
    optimizer = adamw(model)
    for _ in range(STEPS):
        x = torch.zeros(2, 7, 16, device=META, requires_grad=True)
        y = model.blocks[0](x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (gradient.square().sum() + model(tokens())).backward()
        optimizer.step()
        optimizer.zero_grad()


@setting("two passes in one graph")
def two_passes(check: StreamCheck) -> None:
    """Go forward twice, then backward once."""
    model = sharded(decoder(), mp_policy=BF16, reshard_after_forward=False)
    optimizer = adamw(model)
    for _ in range(STEPS):
        (model(tokens()) + model(tokens())).backward()
        optimizer.step()
        optimizer.zero_grad()


@setting("evaluation between steps")
def evaluation(check: StreamCheck) -> None:
    """Evaluate after each step."""
    model = sharded(decoder(), mp_policy=BF16)

    def evaluate(number: int) -> None:
        with torch.no_grad():
            model(tokens())

    train(model, before=evaluate)


@setting("a step that is broken off")
def broken_off(check: StreamCheck) -> None:
    """Raise in the middle of a forward, and of a backward."""
    model = sharded(decoder(), mp_policy=BF16)

    def fail(*args: Any) -> None:
        raise RuntimeError("the test's")

    optimizer = adamw(model)
    train(model, optimizer)
    for register in ("register_forward_hook", "register_full_backward_hook"):
        hook = getattr(model.blocks[1], register)(fail)
        with contextlib.suppress(RuntimeError):
            model(tokens()).backward()
        hook.remove()
        model.zero_grad()
        train(model, optimizer)


@setting("guarded steps")
def guarded(check: StreamCheck) -> None:
    """Let a guarded step fail."""
    model = sharded(decoder(), mp_policy=BF16)
    optimizer = adamw(model)
    for number in range(STEPS):
        with fullshard.guarded_step(model, on_error="skip"):
            model(tokens()).backward()
            if number == 1:
                raise ValueError("the test's")
            optimizer.step()
        optimizer.zero_grad()


@setting("ranks that run out of batches")
def joined(check: StreamCheck) -> None:
    """Train within `join`."""
    model = sharded(decoder(), mp_policy=BF16)
    optimizer = adamw(model)
    with fullshard.join(model, [tokens()] * STEPS) as batches:
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@setting("a skipped block")
def skipped(check: StreamCheck) -> None:
    """Skip a block in every second step."""
    model = sharded(decoder(), mp_policy=BF16)
    inner = model._run

    def run(block: Any, x: Tensor) -> Any:
        is_skipped = block is model.blocks[1] and model.number % 2
        return block.skip_forward(x) if is_skipped else inner(block, x)

    model._run, model.number = run, 0

    def count(number: int) -> None:
        model.number = number

    train(model, before=count)


@setting("stages that share streams")
def shared_streams(check: StreamCheck) -> None:
    """Run two models by turns as stages, on the streams of the first."""
    stages = [sharded(decoder(depth=2), mp_policy=BF16) for _ in range(2)]
    for stage in stages:
        step(stage)  # on streams of its own
        stage.zero_grad()
    fullshard.share_comm_ctx(stages)
    optimizers = [adamw(stage) for stage in stages]
    for _ in range(STEPS):
        losses = [stage(tokens()) for stage in stages for _ in range(2)]
        for loss in losses[::-1]:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@setting("a pipeline's stage", world=4)
def pipeline(check: StreamCheck) -> None:
    """Be the first stage of two, by torch's schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    grid = init_device_mesh("meta", (2, 2), mesh_dim_names=("pp", "dp"))
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(META)
    for module in (*model, model):
        fully_shard(module, mesh=grid["dp"], mp_policy=BF16)
    stage = PipelineStage(
        model,
        0,
        2,
        META,
        input_args=torch.zeros(2, 16, device=META),
        output_args=torch.zeros(2, 16, device=META, dtype=torch.bfloat16),
        group=grid["pp"].get_group(),
    )
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=None)
    optimizer = adamw(model)
    for _ in range(STEPS):
        schedule.step(torch.zeros(8, 16, device=META))
        optimizer.step()
        optimizer.zero_grad()


# --- optimizers, checkpoints ----------------------------------------------------------------------------


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return what Muon updates."""
    return [param for param in model.parameters() if param.ndim == 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "muon": lambda model: Muon(matrices(model), lr=1e-3),
    "adamw8bit": lambda model: AdamW8bit(model.parameters(), lr=1e-3),
    "sharded adamw": lambda model: ShardedOptimizer(optim.AdamW, model.parameters(), lr=1e-3),
    "adamw over replicas": lambda model: ShardedOptimizer(
        optim.AdamW, model.parameters(), lr=1e-3, shard_over_replicas=True
    ),
    "adamw8bit over replicas": lambda model: AdamW8bit(
        model.parameters(), lr=1e-3, shard_over_replicas=True
    ),
    "fused adamw": lambda model: optim.AdamW(model.parameters(), lr=1e-3, fused=True),
}

for _name, _build in OPTIMIZERS.items():

    @setting(f"{_name}, 2 replicas, clipping, EMA")
    def _(check: StreamCheck, build: Callable[[nn.Module], optim.Optimizer] = _build) -> None:
        model = sharded(decoder(), replicas=2, mp_policy=BF16)
        optimizer, ema = build(model), EMA(model, decay=0.9)
        for _ in range(STEPS):
            model(tokens()).backward()
            fullshard.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.update()


def device_tensors(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    """Return what a checkpoint copies from the device."""
    held: list[Any] = [*model.parameters()]
    held += [each for state in optimizer.state.values() for each in state.values()]
    return [each for each in map(locally, held) if each.numel() and each.is_meta]


def locally(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@setting("a snapshot beside the next step", offloads=True)
def snapshot(check: StreamCheck) -> None:
    """Copy weights and optimizer state to host memory while the next step runs, as `async_save` does."""
    model = sharded(decoder(on=META), mp_policy=BF16)
    optimizer = adamw(model)
    memory = host_copies.HostMemory()
    for _ in range(STEPS):
        step(model, optimizer)
        taken = host_copies.Snapshot(device_tensors(model, optimizer), memory)
        taken.hold_back(optimizer)
        step(model, optimizer)
        taken.wait()
        torch.stack([copy.sum() for copy in taken.copies])  # as the writing thread reads them


@setting("a snapshot that is dropped, and the next one", offloads=True)
def dropped_snapshot(check: StreamCheck) -> None:
    """Take a snapshot into memory that an earlier one may still be copied to; then write averages."""
    model = sharded(decoder(on=META), mp_policy=BF16)
    optimizer, ema = adamw(model), EMA(model, decay=0.9)
    memory = host_copies.HostMemory()
    for _ in range(STEPS):
        step(model, optimizer)
        ema.update()
        averages = [locally(each) for each in ema.averages.values()]
        host_copies.Snapshot(device_tensors(model, optimizer), memory).hold_back(optimizer, ema)
        taken = host_copies.Snapshot(averages, memory)
        taken.hold_back(optimizer, ema)
        ema.update()
        taken.wait()


@setting("offloaded, 2 replicas, without pinning", offloads=True)
def unpinned(check: StreamCheck) -> None:
    """Rest in host memory that is not pinned."""
    policy = CPUOffloadPolicy(pin_memory=False)
    model = sharded(
        decoder(on=torch.device("cpu")), replicas=2, mp_policy=BF16, offload_policy=policy
    )
    train(model, microbatches=2)


@setting("offloaded, three inputs of reductions", offloads=True)
def offloaded_inputs(check: StreamCheck) -> None:
    """Let several reductions be in flight whose results are copied to host memory."""
    model = sharded(
        decoder(on=torch.device("cpu")), mp_policy=BF16, offload_policy=CPUOffloadPolicy()
    )
    model.set_reduce_scatter_max_input_buffers(3)
    train(model, microbatches=2)


@setting("offloaded, a write behind an evaluation", offloads=True)
def offloaded_evaluation(check: StreamCheck) -> None:
    """Write shards in host memory when an evaluation has gathered them."""
    model = sharded(
        decoder(on=torch.device("cpu")), mp_policy=BF16, offload_policy=CPUOffloadPolicy()
    )
    train(model)
    with torch.no_grad():
        model(tokens())
        for param in model.parameters():
            param.mul_(0.5)


@setting("offloaded, a hook that reads gradients", offloads=True)
def read_at_once(check: StreamCheck) -> None:
    """Read gradients in host memory while backward goes on."""
    model = sharded(
        decoder(on=torch.device("cpu")), mp_policy=BF16, offload_policy=CPUOffloadPolicy()
    )
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(0.5))
    train(model)


# --- captured steps -------------------------------------------------------------------------------------


CAPTURED: dict[str, dict[str, Any]] = {
    "plain": {"mp_policy": BF16},
    "kept": {"mp_policy": BF16, "reshard_after_forward": False},
    "2 replicas": {"mp_policy": BF16, "replicas": 2},
    "fused gradients": {"mp_policy": BF16, "fuse_gradients": True},
    "wire": {"mp_policy": WIRE},
}

for _kind, _options in CAPTURED.items():

    @setting(f"captured step, {_kind}")
    def _(check: StreamCheck, options: dict[str, Any] = _options) -> None:
        train_captured(check, **options)


@setting("captured step, gathered by hand")
def captured_by_hand(check: StreamCheck) -> None:
    """Gather within a capture, between forward and backward."""

    def gathered_between(model: Any) -> None:
        loss = model(tokens())
        model.blocks[-1].unshard(async_op=True)  # which backward uses first
        loss.backward()

    train_captured(check, step=gathered_between, mp_policy=BF16)


def train_captured(
    check: StreamCheck, *, step: Callable[[Any], None] = step, **options: Any
) -> None:
    """Train, capture a step, replay it, and train on."""
    model = sharded(decoder(), **options)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    model.zero_grad(set_to_none=False)
    captured = CapturedStep(check)
    with captured.capture():
        step(model)
        optimizer.step()
    faults = faults_of_capture(captured.entries)
    assert not faults, "\n".join(faults)
    for _ in range(3):
        captured.replay()
        for context in comm_contexts():
            if context.device == META:  # others are of programs that ran before
                context.note_replay()
    train(model, optimizer)
