"""The configurations that `same_numbers.py` trains, by name; only public names of fullshard are used.

A configuration is a function from a `Place` to a `Training`. All differ from a plain one by what their name says.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from benchmarks.number_models import Block, Decoder, DecoderOptions
from benchmarks.number_rank import Place, Training
from fullshard import FullyShardedDataParallel as FSDP

__all__ = ["CONFIGURATIONS", "ECHO", "Configuration"]

BF16, FP32 = torch.bfloat16, torch.float32
ECHO = 8
"""Ranks of the echo group."""
SOME, ALL, FOUR = (3, ECHO), (1, 2, 3, 4, ECHO), (4, ECHO)
"""Worlds: those of most configurations, all, and those that have two axes."""

PLAIN = DecoderOptions()

Build = Callable[[Place], Training]


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """Something to train."""

    build: Build
    worlds: tuple[int, ...]
    """Numbers of ranks it is trained with; `ECHO` stands for the group in one process."""


CONFIGURATIONS: dict[str, Configuration] = {}
"""In the order in which they are trained."""


def add(name: str, worlds: tuple[int, ...], build: Build) -> None:
    """Make a configuration known."""
    assert name not in CONFIGURATIONS, name
    CONFIGURATIONS[name] = Configuration(build=build, worlds=worlds)


def adamw(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Make the optimizer of most configurations."""
    return optim.AdamW(params, lr=1e-2)


def sgd(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Make an optimizer whose step shows every gradient as it is."""
    # One by one: on a GPU, lists of parameters and gradients must have one dtype, and some gradients are in bf16.
    return optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)


def sharded_adamw(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Make fullshard's own."""
    from fullshard.optim import ShardedOptimizer

    return ShardedOptimizer(optim.AdamW, params, lr=1e-2)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return what an optimizer is given."""
    return [param for param in model.parameters() if param.requires_grad]


def mesh_of(place: Place, *, replicas: int = 1) -> DeviceMesh:
    """Return all ranks as (shard,), or as (replicate, shard)."""
    if replicas == 1:
        return init_device_mesh(place.device.type, (place.size,))
    shape, names = (replicas, place.size // replicas), ("replicate", "shard")
    return init_device_mesh(place.device.type, shape, mesh_dim_names=names)


# --- fully_shard ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Functional:
    """How `fully_shard` or `replicate` is applied, and how the model is trained."""

    model: DecoderOptions = PLAIN
    options: Callable[[Place], dict[str, Any]] = lambda place: {}
    """Keyword arguments of `fully_shard`, for blocks and root."""
    apply: Callable[..., Any] = fullshard.fully_shard
    replicas: int = 1
    blocks: bool = True
    """Whether each block is a group of its own."""
    optimizer: Callable[[Iterable[nn.Parameter]], optim.Optimizer] = adamw
    settle: Callable[[Any], None] = lambda model: None
    """Called with the sharded model, for its methods."""
    finish: Callable[[Training, Place], None] = lambda training, place: None
    """Called at last, to change how it is trained."""

    def __call__(self, place: Place) -> Training:
        """Build the model and shard it."""
        model = Decoder(self.model).to(place.built_on)
        options = {"mesh": mesh_of(place, replicas=self.replicas), **self.options(place)}
        for module in (*(model.blocks if self.blocks else ()), model):
            self.apply(module, **options)
        self.settle(model)
        training = Training(model=model, optimizer=self.optimizer(trainable(model)))
        self.finish(training, place)
        return training


def functional(name: str, worlds: tuple[int, ...], **how: Any) -> None:
    """Add a configuration of `fully_shard`; ``options`` may be a dict, too."""
    if isinstance(how.get("options"), dict):
        fixed = how["options"]
        how["options"] = lambda place: fixed
    if isinstance(how.get("model"), dict):
        how["model"] = DecoderOptions(**how["model"])
    add(f"fully_shard.{name}", worlds, Functional(**how))


def precision(*dtypes: Any, **others: Any) -> dict[str, Any]:
    """Return options with a policy of mixed precision."""
    return {"mp_policy": fullshard.MixedPrecisionPolicy(*dtypes, **others)}


def offloaded(place: Place, **others: Any) -> dict[str, Any]:
    """Return options that let shards rest in host memory."""
    pinned = place.device.type != "cpu"
    return {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=pinned), **others}


def along_the_last_dim(param: nn.Parameter) -> Shard | None:
    """Shard matrices along columns."""
    return Shard(1) if param.ndim > 1 else None


def accumulate(training: Training, place: Place, *, keep: bool = False, what: str = "") -> None:
    """Reduce gradients in the last of three microbatches only."""
    model: Any = training.model

    @contextmanager
    def around(is_last: bool) -> Iterator[None]:
        getattr(model, what or "set_requires_gradient_sync")(is_last)
        model.set_is_last_backward(is_last)
        if keep:
            model.set_reshard_after_backward(is_last)
        yield

    training.microbatches, training.around = 3, around


def clip(training: Training, place: Place, *, norm_type: float = 2.0) -> None:
    """Clip gradients before the optimizer's step, and digest the norm."""

    def before_optimizer() -> Mapping[str, Any]:
        return {"norm": fullshard.clip_grad_norm_(training.model, 0.05, norm_type)}

    training.before_optimizer = before_optimizer


def show_state(training: Training, place: Place) -> None:
    """Digest the state dicts of model and optimizer, evaluate, and gather by hand between steps."""
    model: Any = training.model

    def after_step(step: int) -> Mapping[str, Any]:
        from benchmarks.number_models import batch_of

        with torch.no_grad():
            loss = model(batch_of(99, 0, place.rank, place.device))
        model.blocks[0].unshard()
        gathered = model.blocks[0].up.weight.detach().clone()
        model.blocks[0].reshard()
        states = {
            "model": model.state_dict(),
            "optimizer": training.optimizer.state_dict()["state"],
        }
        return {**states, "evaluated loss": loss, "gathered weight": gathered}

    training.after_step = after_step


def save_and_load(training: Training, place: Place) -> None:
    """Write a checkpoint after the second step, and go back to it after the third."""
    from fullshard import checkpoint

    def after_step(step: int) -> Mapping[str, Any]:
        if step == 1:
            checkpoint.save(place.folder / "saved", training.model, training.optimizer)
        if step == 2:
            checkpoint.load(place.folder / "saved", training.model, training.optimizer)
        return training.optimizer.state_dict()["state"] if step > 1 else {}

    training.after_step = after_step


def of_all_groups(method: str, *arguments: Any) -> Callable[[Any], None]:
    """Return a call of one method for the root and every block."""

    def settle(model: Any) -> None:
        for module in (model, *model.blocks):
            getattr(module, method)(*arguments)

    return settle


def prefetch_by_hand(model: Any) -> None:
    """Name what each block gathers ahead: two blocks in forward, one in backward."""
    blocks = list(model.blocks)
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
        block.set_modules_to_backward_prefetch(blocks[max(number - 1, 0) : number])


def custom_comm(model: Any) -> None:
    """Communicate by comm objects."""
    from fullshard.comm import DefaultAllGather, DefaultReduceScatter

    of_all_groups("set_custom_all_gather", DefaultAllGather())(model)
    of_all_groups("set_custom_reduce_scatter", DefaultReduceScatter())(model)


def double(gradient: Tensor) -> None:
    """Be an all-reduce hook."""
    gradient.mul_(2)


def planned(place: Place) -> Training:
    """Shard by plan."""
    model = Decoder(DecoderOptions(depth=6)).to(place.device)
    policy = fullshard.MixedPrecisionPolicy(BF16, FP32)
    fullshard.plan_groups(model, mp_policy=policy, min_bytes=600).apply(mesh=mesh_of(place))
    return Training(model=model, optimizer=adamw(trainable(model)))


def ignoring_head(place: Place) -> Training:
    """Leave a parameter alone; nobody averages its gradient."""
    model = Decoder(DecoderOptions()).to(place.device)
    options: dict[str, Any] = {"mesh": mesh_of(place), "ignored_params": {model.head.weight}}
    for module in (*model.blocks, model):
        fullshard.fully_shard(module, **options)
    return Training(model=model, optimizer=sgd(trainable(model)))


def tensor_parallel(place: Place) -> Training:
    """Shard tensor-parallel parameters over the other axis of a mesh."""
    from torch.distributed.tensor import parallel

    mesh = init_device_mesh(place.device.type, (2, place.size // 2), mesh_dim_names=("dp", "tp"))
    model = Decoder(DecoderOptions(hidden=12)).to(place.device)
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    for block in model.blocks:
        parallel.parallelize_module(block, mesh["tp"], plan)
    for module in (*model.blocks, model):
        fullshard.fully_shard(module, mesh=mesh["dp"])
    return Training(model=model, optimizer=sharded_adamw(trainable(model)))


def add_functional() -> None:
    """Make the configurations of `fully_shard` and `replicate` known."""
    mixed, wire = precision(BF16, FP32), precision(BF16, FP32, wire_dtype=BF16)
    functional("plain", ALL)
    functional("one_group", SOME, blocks=False)
    functional("sgd", SOME, optimizer=sgd)
    functional("sharded_optimizer", ALL, optimizer=sharded_adamw)
    functional("bf16_fp32_reduce", ALL, options=mixed)
    functional("bf16_reduce", (2, ECHO), options=precision(BF16))
    functional("output_dtype", (2,), options=precision(BF16, FP32, BF16), blocks=False)
    functional("fp16_reduce", SOME, options=precision(torch.float16))
    functional("wire_dtype", SOME, options=wire)
    functional("offload", ALL, options=offloaded)
    functional("offload_bf16", SOME, options=partial(offloaded, **mixed), optimizer=sharded_adamw)
    functional("hsdp", FOUR, replicas=2)
    functional("hsdp_bf16", FOUR, replicas=2, options=mixed)
    functional("hsdp_offload", FOUR, replicas=2, options=offloaded)
    functional(
        "hsdp_accumulate",
        FOUR,
        replicas=2,
        finish=partial(accumulate, what="set_requires_all_reduce"),
    )
    functional("keep_after_forward", SOME, options={"reshard_after_forward": False})
    functional("reshard_root_too", SOME, options={"reshard_after_forward": True})
    functional("post_forward_mesh", FOUR, options={"reshard_after_forward": 2})
    post_forward_bf16 = {"reshard_after_forward": 2, **mixed}
    functional("post_forward_mesh_bf16", FOUR, options=post_forward_bf16, finish=accumulate)
    functional("accumulate", (2, 3, 4, ECHO), finish=accumulate)
    functional("accumulate_bf16", SOME, options=mixed, finish=accumulate)
    functional("accumulate_keep", SOME, finish=partial(accumulate, keep=True))
    functional("accumulate_offload", SOME, options=offloaded, finish=accumulate)
    functional("extension", (1, 3, 4, ECHO), model={"extension": True})
    functional("extension_bf16", SOME, model={"extension": True}, options=mixed)
    functional("extension_hsdp", FOUR, model={"extension": True}, replicas=2)
    extension_kept = {"reshard_after_forward": False}
    functional("extension_kept", SOME, model={"extension": True}, options=extension_kept)
    add("fully_shard.planned_groups", SOME, planned)
    for kind in ("reentrant", "non_reentrant"):
        functional(f"checkpointing_{kind}", SOME, model={"checkpointing": kind}, options=mixed)
    functional("tied", SOME, model={"tied": True})
    functional("frozen", SOME, model={"frozen": ("up.weight", "norm.bias", "1.scale")})
    functional(
        "shard_dim_1",
        (2, ECHO),
        options={"shard_placement_fn": along_the_last_dim},
        model={"width": 16, "hidden": 32},
    )
    add("fully_shard.tensor_parallel", (4,), tensor_parallel)
    add("fully_shard.ignored_params", (2,), ignoring_head)
    functional("clip", (1, 2, 3, 4, ECHO), finish=clip)
    functional("clip_inf", SOME, finish=partial(clip, norm_type=float("inf")), options=mixed)
    functional("prefetch_lists", SOME, settle=prefetch_by_hand)
    functional("divide_factor", SOME, settle=of_all_groups("set_gradient_divide_factor", 3.0))
    force_sum = of_all_groups("set_force_sum_reduction_for_comms", True)
    functional("force_sum", SOME, settle=force_sum, options=mixed)
    functional("all_reduce_hook", SOME, settle=of_all_groups("set_all_reduce_hook", double))
    functional("comm_objects", SOME, settle=custom_comm, options=mixed)
    unused = of_all_groups("set_reduce_scatter_unused_params", True)
    functional("unused_params", SOME, settle=unused, model={"unused_scale": True})
    functional("state_dict", SOME, finish=show_state)
    functional("state_dict_offload", SOME, finish=show_state, options=offloaded)
    functional("save_and_load", (2, 3), finish=save_and_load, optimizer=sharded_adamw)
    replicated = {"apply": fullshard.replicate}
    functional("replicate", ALL, **replicated)
    functional("replicate_bf16", SOME, options=mixed, finish=accumulate, **replicated)
    functional("replicate_offload", (2, ECHO), options=offloaded, **replicated)


# --- the wrapper ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped:
    """How `FullyShardedDataParallel` is applied, and how the model is trained."""

    model: DecoderOptions = PLAIN
    use_orig_params: bool
    replicas: int = 1
    options: Mapping[str, Any]
    ignore_head: bool = False
    optimizer: Callable[[Iterable[nn.Parameter]], optim.Optimizer] = adamw
    finish: Callable[[Training, Place], None] = lambda training, place: None

    def __call__(self, place: Place) -> Training:
        """Build the model and wrap it."""
        from fullshard.wrap import ModuleWrapPolicy

        model = Decoder(self.model)
        if place.built_on.type == "meta":
            model.to(place.built_on)
        options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), **self.options}
        if self.ignore_head:
            options["ignored_modules"] = [model.head.to(place.device)]
        wrapped = FSDP(
            model,
            device_id=None if place.device.type == "cpu" else place.device,
            device_mesh=mesh_of(place, replicas=self.replicas),
            use_orig_params=self.use_orig_params,
            **options,
        )
        training = Training(model=wrapped, optimizer=self.optimizer(trainable(wrapped)))
        self.finish(training, place)
        return training


def wrapped(
    name: str, worlds: tuple[int, ...], *, orig: tuple[bool, ...] = (True, False), **how: Any
) -> None:
    """Add a configuration of the wrapper, with ``use_orig_params`` and without."""
    fields = {key: how.pop(key) for key in tuple(how) if key in Wrapped.__slots__}
    if isinstance(fields.get("model"), dict):
        fields["model"] = DecoderOptions(**fields["model"])
    for use_orig_params in orig:
        built = Wrapped(use_orig_params=use_orig_params, options=how, **fields)
        add(f"wrapper.{name}.{'orig' if use_orig_params else 'flat'}", worlds, built)


def without_sync(training: Training, place: Place) -> None:
    """Reduce gradients in the last of three microbatches only."""
    model: Any = training.model

    @contextmanager
    def around(is_last: bool) -> Iterator[None]:
        if is_last:
            yield
        else:
            with model.no_sync():
                yield

    training.microbatches, training.around = 3, around


def clip_wrapped(training: Training, place: Place) -> None:
    """Clip by the wrapper's own method."""
    model: Any = training.model
    training.before_optimizer = lambda: {"norm": model.clip_grad_norm_(0.05)}


def show_wrapped_state(training: Training, place: Place) -> None:
    """Digest state dicts of all types, and change full parameters between steps."""
    model, optimizer = training.model, training.optimizer

    def after_step(step: int) -> Mapping[str, Any]:
        shown: dict[str, Any] = {}
        for kind in fullshard.StateDictType:
            with FSDP.state_dict_type(model, kind):
                shown[kind.name] = model.state_dict()
                if kind.name != "LOCAL_STATE_DICT":
                    shown[f"optimizer, {kind.name}"] = FSDP.optim_state_dict(model, optimizer)
        with FSDP.summon_full_params(model, writeback=True), torch.no_grad():
            shown["full parameters"] = {n: p.clone() for n, p in model.named_parameters()}
            for param in model.parameters():
                param.mul_(0.99)
        if step == 1:
            model.load_state_dict(shown["FULL_STATE_DICT"])
            full = shown["optimizer, FULL_STATE_DICT"]
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, full))
        return shown

    training.after_step = after_step


def average(state: Any, gradient: Tensor, output: Tensor) -> None:
    """Be a communication hook: reduce, and leave this rank's part in the output."""
    import torch.distributed as dist

    dist.all_reduce(gradient)
    size, rank = dist.get_world_size(), dist.get_rank()
    output.copy_(gradient.view(size, -1)[rank]).div_(size)


def hook_up(training: Training, place: Place) -> None:
    """Reduce by a communication hook."""
    model: Any = training.model
    model.register_comm_hook(None, average)


def add_wrapped() -> None:
    """Make the configurations of the wrapper known."""
    strategy = fullshard.ShardingStrategy
    mixed = fullshard.MixedPrecision(BF16, FP32, BF16)
    wrapped("full_shard", ALL)
    wrapped("shard_grad_op", SOME, sharding_strategy=strategy.SHARD_GRAD_OP)
    wrapped("no_shard", (1, 2, ECHO), sharding_strategy=strategy.NO_SHARD)
    wrapped("hybrid_shard", FOUR, sharding_strategy=strategy.HYBRID_SHARD, replicas=2)
    hybrid_mixed: dict[str, Any] = {
        "sharding_strategy": strategy.HYBRID_SHARD,
        "mixed_precision": mixed,
    }
    wrapped("hybrid_shard_bf16", FOUR, replicas=2, finish=without_sync, **hybrid_mixed)
    wrapped("mixed_precision", SOME, mixed_precision=mixed)
    wire = fullshard.MixedPrecision(BF16, FP32, wire_dtype=BF16)
    wrapped("wire_dtype", SOME, mixed_precision=wire)
    low = fullshard.MixedPrecision(BF16, keep_low_precision_grads=True)
    wrapped("low_precision_grads", (2, ECHO), orig=(True,), mixed_precision=low, optimizer=sgd)
    offload = fullshard.CPUOffload(offload_params=True)
    wrapped("offload", SOME, cpu_offload=offload)
    wrapped("offload_bf16", SOME, cpu_offload=offload, mixed_precision=mixed)
    wrapped("no_sync", SOME, finish=without_sync)
    wrapped("no_sync_bf16", (2, ECHO), finish=without_sync, mixed_precision=mixed)
    wrapped("ignored_modules", (2, ECHO), ignore_head=True)
    wrapped("one_wrapper", SOME, auto_wrap_policy=None)
    wrapped("sharded_optimizer", SOME, optimizer=sharded_adamw)
    wrapped("clip", SOME, finish=clip_wrapped)
    # A flat parameter's optimizer state with that of a 0-d parameter cannot be loaded again.
    wrapped("state_dicts", (1, 2, 3), finish=show_wrapped_state, model={"scale": False})
    wrapped("save_and_load", (2,), finish=save_and_load)
    post = fullshard.BackwardPrefetch.BACKWARD_POST
    wrapped("backward_post", (2, ECHO), backward_prefetch=post)
    wrapped("no_prefetch", (2, ECHO), backward_prefetch=None)
    wrapped("comm_hook", (2, 3), finish=hook_up)
    wrapped("checkpointing", SOME, model={"checkpointing": "non_reentrant"}, mixed_precision=mixed)
    wrapped("tied", SOME, model={"tied": True})
    wrapped("frozen", SOME, orig=(True,), model={"frozen": ("up.weight", "norm.bias")})


add_functional()
add_wrapped()
