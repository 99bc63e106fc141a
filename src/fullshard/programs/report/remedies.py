"""All remedies, each with the check that is made before it is given.

A function here returns the remedy for a run, or None if the run has it already, cannot have it, or would not gain by it.
What it would gain is computed from the recorded steps and the facts of the trace: the plan for the model, which knows
ties, and what padding other divisions would need. A run of the trainer gets settings, another program gets code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import linear_regression
from typing import Literal

from fullshard.errors import ConfigurationError
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.findings import Call, Remedy, Setting
from fullshard.programs.report.run_files import Run
from fullshard.programs.report.units import size
from fullshard.programs.train.config_file import read_config, toml_value
from fullshard.tracing.schema import GroupFacts, Kind, PlannedFacts

SMALL_GROUP_BYTES = 1 << 20
"""A group with fewer gathered bytes is small: on wires of 10 GB/s and more its time is mostly latency."""

BYTES_COUNT = 0.3
"""Fewer bytes are recommended if bytes, and not latency, take at least this share of the time on the wire."""

LESS = 0.9
"""A remedy is worth it if at most this share of what it is about would remain."""

REMEDIES: dict[str, tuple[str, str]] = {
    "plan": (
        "`sharding.groups`; `fully_shard` on named modules, or `plan_groups`",
        "compared with the groups of the run, the plan for this model (which keeps tied modules together) has a "
        "smaller first group, fewer small groups, or less gathered at once",
    ),
    "unshard early": (
        "`model.unshard(async_op=True)`",
        "the step does something before the first gather; the user's own program, with `fully_shard`",
    ),
    "deeper prefetch": (
        "`sharding.prefetch`; `set_modules_to_forward_prefetch` and its like",
        "a replay at that depth has fewer waits; not for programs with the wrapper, which has no depth",
    ),
    "larger batch": (
        "`train.accumulate`, or `train.batch` in a new run; a larger batch in each forward",
        "the ranks can divide it",
    ),
    "half of the bytes": (
        "`compute.precision` in a new run; `MixedPrecisionPolicy(param_dtype=...)`",
        "some group computes in float32, and larger gathers take longer",
    ),
    "keep gathered": (
        "`sharding.reshard_after_forward`",
        "groups are gathered again in backward, and a tenth of the waits is in backward",
    ),
    "replicas": (
        "`sharding.replicas`; a 2-D mesh",
        "an even number of more than 2 ranks shares a copy, and larger gathers take longer; or less padding remains",
    ),
    "narrow wire": (
        "`compute.wire` in a new run; `MixedPrecisionPolicy(wire_dtype=...)`",
        "gradients are sent in float32, and larger reductions take longer",
    ),
    "cut regardless of rows": (
        '`sharding.api = "fsdp1"`',
        "less padding remains; a run of the trainer with `fully_shard`",
    ),
    "balanced placement": (
        "`shard_placement_fn`",
        "less padding remains; the user's own program, with `fully_shard`",
    ),
    "release after forward": (
        "`sharding.reshard_after_forward`",
        "groups are kept until backward, and less would be gathered at once",
    ),
    "smaller groups": (
        "`sharding.groups`; `plan_groups`",
        "groups are released after forward, and with one group per block, or with the plan, less would be gathered at once",
    ),
    "flat optimizer": (
        "`optimizer.flat`; `fullshard.optim.ShardedOptimizer`",
        "there are more parameters than groups; the trainer does not have it already",
    ),
    "skip bad steps": (
        "`train.on_bad_step`",
        "the gradient norm had not risen before: only this step is bad, not the run",
    ),
    "lower rate": (
        "`optimizer.lr` in a new run",
        "the gradient norm had risen before: the run diverges",
    ),
    "clip": ("`train.clip` in a new run", "the same, and the run does not clip"),
    "smaller microbatches": (
        "`train.accumulate`",
        "memory ran out, and the ranks' shares can be divided",
    ),
    "recompute": (
        "`compute.checkpoint_activations`",
        "memory ran out, and activations are kept",
    ),
    "look": ("advice: where to look", "none: it changes nothing"),
}
"""Means of each kind of remedy, and the checks before it is given."""


def look(text: str) -> Remedy:
    """Return advice: where to look for a cause that the data do not show."""
    return Remedy(kind="look", text=text)


def given(*remedies: Remedy | None) -> tuple[Remedy, ...]:
    """Return the remedies that passed their checks."""
    return tuple(remedy for remedy in remedies if remedy is not None)


def _remedy(
    run: Run, kind: str, text: str, *, settings: Sequence[Setting] = (), call: Call | None = None
) -> Remedy | None:
    """Return a remedy as settings for a run of the trainer, as code for other programs; None if there is no such way."""
    if not run.is_of_trainer:
        return None if call is None else Remedy(kind=kind, text=text, call=call)
    wanted = tuple(setting for setting in settings if not setting.is_in(run))
    if not wanted or not _are_accepted(run, wanted):
        return None
    return Remedy(kind=kind, text=text, settings=wanted)


def _are_accepted(run: Run, settings: Iterable[Setting]) -> bool:
    """Say whether the trainer takes the run's configuration with these settings."""
    now = [
        f"{section}.{name}={toml_value(value)}"
        for section in ("train", "sharding", "compute")
        for name, value in _section(run, section).items()
        if isinstance(value, bool | int | float | str)
    ]
    world = run.world
    try:
        config = read_config(None, [*now, *map(str, settings)])
        if world:
            config.check(world)
    except ConfigurationError:
        return False
    return True


def _section(run: Run, name: str) -> Mapping[str, object]:
    fields = run.config.get(name)
    return fields if isinstance(fields, Mapping) else {}


# --- groups -----------------------------------------------------------------------------------------


def is_flat(analysis: Analysis) -> bool:
    """Say whether the wrapper made the groups."""
    return any(group.division == "flat" for group in analysis.groups.values())


def smaller_beginning(analysis: Analysis, name: str) -> Remedy | None:
    """Return groups that take parameters out of the outermost one, which is gathered first and reduced last."""
    run, planned, now = analysis.run, analysis.planned, analysis.groups.get(name)
    if now is None or "" not in now.modules or not planned:
        return None
    named = {module for group in analysis.groups.values() for module in group.modules}
    outside = [g for g in planned[1:] if not any(_is_within(module, named) for module in g.modules)]
    # The outermost group and the first one within it are both needed before anything computes.
    beginning = sum(group.gathered_bytes for group in planned[:2])
    if not run.is_of_trainer:
        beginning = now.gathered_bytes - sum(group.gathered_bytes for group in outside[1:])
    if beginning > LESS * now.gathered_bytes:
        return None
    return _remedy(
        run,
        "plan",
        f"Less in the group that comes first: {size(beginning)} instead of {size(now.gathered_bytes)}",
        settings=[Setting("sharding", "groups", "plan")],
        call=Call("wrapper", ("auto_wrap_policy=plan_groups(model).wrap_policy()",))
        if is_flat(analysis)
        else Call("before", tuple(f"fully_shard({_modules(group)})" for group in outside)),
    )


def _is_within(module: str, others: set[str]) -> bool:
    """Say whether a module is one of others, other than the outermost, or within one, or has one inside."""
    return any(
        f"{module}.".startswith(f"{other}.") or f"{other}.".startswith(f"{module}.")
        for other in others
        if other
    )


def _modules(group: PlannedFacts) -> str:
    """Return the modules of a group as code."""
    paths = [
        f"model.{name}"
        if all(part.isidentifier() for part in name.split("."))
        else f'model.get_submodule("{name}")'
        for name in group.modules
    ]
    return paths[0] if len(paths) == 1 else f"[{', '.join(paths)}]"


def fewer_groups(analysis: Analysis) -> Remedy | None:
    """Return the plan, if it has fewer small groups."""
    small = [group for group in analysis.planned if _is_small(group)]
    num_now = sum(map(_is_small, analysis.groups.values()))
    if not analysis.planned or len(small) > LESS * num_now:
        return None
    run = analysis.run
    settings = [Setting("sharding", "groups", "plan")]
    if run.setting("sharding", "api") == "fsdp1":  # it has one module in each group
        settings.append(Setting("sharding", "api", "fsdp2"))
    return _remedy(
        run,
        "plan",
        f"Merge neighbours: the plan for this model has {len(analysis.planned)} groups, {len(small)} of them small",
        settings=settings,
        call=None if is_flat(analysis) else Call("instead", ("plan_groups(model).apply()",)),
    )


def _is_small(group: GroupFacts | PlannedFacts) -> bool:
    return 0 < group.gathered_bytes < SMALL_GROUP_BYTES


def smaller_groups(analysis: Analysis) -> Remedy | None:
    """Return groups so that less is gathered at once: one per block instead of a plan, or a plan instead of few."""
    run, groups = analysis.run, [*analysis.groups.values()]
    text = "More and smaller groups"
    if (
        not analysis.gathers_again
    ):  # then all are there at the end of forward, however small they are
        return None
    if run.setting("sharding", "groups") == "plan":
        merged = [group for group in groups if len(group.modules) > 1]
        alone = sum(g.gathered_bytes for g in groups if len(g.modules) == 1)
        split = [
            g.gathered_bytes // len(g.modules)
            for g in merged
            for _ in g.modules  # modules with a group of their own may go to the outermost
        ]
        if not _is_less(analysis, [alone, *split]):
            return None
        return _remedy(
            run, "smaller groups", text, settings=[Setting("sharding", "groups", "blocks")]
        )
    if not analysis.planned or not _is_less(
        analysis, [group.gathered_bytes for group in analysis.planned]
    ):
        return None
    return _remedy(
        run,
        "smaller groups",
        text,
        settings=[Setting("sharding", "groups", "plan")],
        call=None if is_flat(analysis) else Call("instead", ("plan_groups(model).apply()",)),
    )


def _is_less(analysis: Analysis, sizes: Sequence[int]) -> bool:
    """Say whether less would be gathered at once with groups of these sizes, the outermost first.

    That group is kept; of the others, the one that computes and those that are prefetched are there.
    """
    configured = analysis.run.setting("sharding", "prefetch")
    depth = configured if isinstance(configured, int) else analysis.prefetch or 1
    others = sizes[1:]
    peak = sizes[0] + max((sum(others[i : i + depth + 1]) for i in range(len(others))), default=0)
    return peak <= LESS * analysis.gathered_peak


# --- gathers and reductions -------------------------------------------------------------------------


def unshard_early(analysis: Analysis) -> Remedy | None:
    """Return the call that issues the first gather before the batch is read, if the step begins with anything else."""
    gaps = [
        gather.start_us - step.start_us
        for step in analysis.judged
        for gather in step.of("gather")[:1]
    ]
    if not gaps or sum(gaps) / len(gaps) < 0.01 * analysis.step_us or is_flat(analysis):
        return None
    return _remedy(
        analysis.run,
        "unshard early",
        "Issue it earlier",
        call=Call("batch", ("model.unshard(async_op=True)",)),
    )


def deeper_prefetch(analysis: Analysis, depth: int) -> Remedy | None:
    """Return a prefetch of so many groups; the caller has replayed it."""
    settings = [Setting("sharding", "prefetch", depth)]
    if analysis.run.setting("sharding", "api") == "fsdp1":  # it has no depth to set
        settings.append(Setting("sharding", "api", "fsdp2"))
    code = (
        f"layers[i].set_modules_to_forward_prefetch(layers[i + 1 : i + {depth + 1}])",
        f"layers[i].set_modules_to_backward_prefetch(layers[max(0, i - {depth}) : i][::-1])",
    )
    return _remedy(
        analysis.run,
        "deeper prefetch",
        f"Gather {depth} groups ahead",
        settings=settings,
        call=None if is_flat(analysis) else Call("layer", code),
    )


def larger_batch(analysis: Analysis, *, per: Literal["gather", "reduction"]) -> Remedy | None:
    """Return more work per forward: fewer microbatches, or a larger batch. Reductions are once a step, in any case."""
    run = analysis.run
    text = (
        f"More work per {per}: twice as much in each forward, at the cost of memory for activations"
    )
    if not run.is_of_trainer:
        return Remedy(kind="larger batch", text=text)
    accumulate, batch = run.setting("train", "accumulate"), run.setting("train", "batch")
    if per == "gather" and isinstance(accumulate, int) and accumulate and accumulate % 2 == 0:
        return _remedy(
            run, "larger batch", text, settings=[Setting("train", "accumulate", accumulate // 2)]
        )
    if not isinstance(batch, int):
        return None
    return _remedy(run, "larger batch", text, settings=[Setting("train", "batch", 2 * batch)])


def half_of_the_bytes(analysis: Analysis) -> Remedy | None:
    """Return compute in bfloat16, if some group computes in float32 and bytes take time."""
    groups = analysis.groups.values()
    if not any("float32" in group.compute_dtype for group in groups):
        return None
    if not bytes_take_time(analysis, "gather"):
        return None
    return _remedy(
        analysis.run,
        "half of the bytes",
        "Half of the bytes",
        settings=[Setting("compute", "precision", "bf16")],
        call=_precision(analysis, "param_dtype"),
    )


def _precision(analysis: Analysis, changed: str) -> Call:
    """Return the code that makes one dtype of a policy bfloat16, and leaves the others as they are."""
    first = next(iter(analysis.groups.values()))
    dtypes = {
        "param_dtype": (first.compute_dtype, first.param_dtype),
        "reduce_dtype": (first.reduce_dtype, first.compute_dtype),
        "wire_dtype": (first.wire_dtype, first.reduce_dtype),
    }
    # A dtype that is not given follows the one before it.
    chosen = {name: dtype for name, (dtype, before) in dtypes.items() if dtype != before}
    if changed == "wire_dtype":  # it must be narrower than the dtype of the sums
        chosen["reduce_dtype"] = "float32"
    chosen[changed] = "bfloat16"
    code = ", ".join(f"{name}=torch.{chosen[name]}" for name in dtypes if name in chosen)
    if is_flat(analysis):
        return Call("wrapper", (f"mixed_precision=MixedPrecision({code})",))
    return Call("fully_shard", (f"mp_policy=MixedPrecisionPolicy({code})",))


def bytes_take_time(analysis: Analysis, kind: Kind) -> bool:
    """Say whether larger collectives take longer, so that fewer bytes would help: a line through sizes and times.

    If all have the same size nothing can be compared, and only large ones count.
    """
    spans = [span for step in analysis.judged for span in step.of(kind)]
    sizes, times = [span.nbytes for span in spans], [span.duration_us for span in spans]
    if len({*sizes}) < 2:
        return bool(sizes) and sizes[0] >= SMALL_GROUP_BYTES
    slope = linear_regression(sizes, times).slope
    return slope * sum(sizes) >= BYTES_COUNT * sum(times)


def keep_gathered(analysis: Analysis) -> Remedy | None:
    """Return groups that are kept until backward, if they are gathered again and waited for there."""
    waits = [wait for wait in analysis.judged_waits if wait.awaited == "gather"]
    again = sum(wait.mean_us for wait in waits if wait.phase == "backward")
    if again < (1 - LESS) * sum(wait.mean_us for wait in waits):
        return None
    return _remedy(
        analysis.run,
        "keep gathered",
        f"Fewer gathers, at the cost of memory for the whole model, {size(analysis.gathered_bytes)}",
        settings=[Setting("sharding", "reshard_after_forward", False)],
        call=_strategy(analysis, "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
        if is_flat(analysis)
        else Call("fully_shard", ("reshard_after_forward=False",)),
    )


def _strategy(analysis: Analysis, name: str, hybrid: str) -> Call:
    has_replicas = any(group.replicas > 1 for group in analysis.groups.values())
    chosen = hybrid if has_replicas else name
    return Call("wrapper", (f"sharding_strategy=ShardingStrategy.{chosen}",))


def replicas(analysis: Analysis) -> Remedy | None:
    """Return two copies of the model, each shared by half of the ranks, if they can be."""
    groups = analysis.groups.values()
    if not groups or not all(g.replicas == 1 and g.world > 2 and g.world % 2 == 0 for g in groups):
        return None
    half = next(iter(groups)).world // 2
    names = 'mesh_dim_names=("replicate", "shard")'
    device = analysis.run.traces[0].device
    mesh = f'init_device_mesh("{device}", (2, {half}), {names})'
    return _remedy(
        analysis.run,
        "replicas",
        "Gather over fewer and nearer ranks (HSDP), at the cost of twice the memory for shards",
        settings=[Setting("sharding", "replicas", 2)],
        call=Call(
            "wrapper",
            (f"device_mesh={mesh}", "sharding_strategy=ShardingStrategy.HYBRID_SHARD"),
        )
        if is_flat(analysis)
        else Call("fully_shard", (f"mesh={mesh}",)),
    )


def narrow_wire(analysis: Analysis) -> Remedy | None:
    """Return gradients in bfloat16 on the wire, if they travel in float32 and bytes take time."""
    groups = analysis.groups.values()
    if not any("float32" in group.wire_dtype for group in groups):
        return None
    if not bytes_take_time(analysis, "reduce"):
        return None
    return _remedy(
        analysis.run,
        "narrow wire",
        "Half of the bytes, still summed in float32",
        settings=[Setting("compute", "wire", "bf16")],
        call=_precision(analysis, "wire_dtype"),
    )


# --- memory and padding -----------------------------------------------------------------------------


def release_after_forward(analysis: Analysis) -> Remedy | None:
    """Return groups that are released after forward, if they are kept and less would be gathered at once."""
    sizes = [group.gathered_bytes for group in analysis.groups.values()]
    if analysis.gathers_again or not _is_less(analysis, sizes):
        return None
    return _remedy(
        analysis.run,
        "release after forward",
        "Release them after forward",
        settings=[Setting("sharding", "reshard_after_forward", True)],
        call=_strategy(analysis, "FULL_SHARD", "HYBRID_SHARD")
        if is_flat(analysis)
        else Call("fully_shard", ("reshard_after_forward=True",)),
    )


def less_padding(analysis: Analysis) -> tuple[Remedy, ...]:
    """Return the other divisions that need less padding."""
    groups, run = analysis.groups.values(), analysis.run
    real = sum(group.numel for group in groups)
    now = sum(group.padded_numel for group in groups) - real

    def is_less(padded: Sequence[int]) -> bool:
        return 0 not in padded and sum(padded) - real <= LESS * now

    cut_flat = _remedy(
        run,
        "cut regardless of rows",
        "Cut parameters regardless of rows",
        settings=[Setting("sharding", "api", "fsdp1"), Setting("sharding", "prefetch", 1)],
    )
    balanced = _remedy(
        run,
        "balanced placement",
        "Cut each parameter along a dimension with little padding",
        call=Call("fully_shard", ("shard_placement_fn=fullshard.balanced_placement",)),
    )
    return given(
        replicas(analysis) if is_less([g.halved_padded_numel for g in groups]) else None,
        cut_flat if is_less([g.flat_padded_numel for g in groups]) else None,
        balanced
        if is_less([g.balanced_padded_numel for g in groups]) and not is_flat(analysis)
        else None,
    )


# --- the optimizer, and bad steps ---------------------------------------------------------------------


def flat_optimizer(analysis: Analysis) -> Remedy | None:
    """Return an optimizer that updates whole shards, if these are fewer than parameters."""
    groups = analysis.groups.values()
    if sum(group.parameters for group in groups) <= len(groups):
        return None
    return _remedy(
        analysis.run,
        "flat optimizer",
        "Update whole shards at once",
        settings=[Setting("optimizer", "flat", True)],
        call=Call(
            "optimizer",
            ("fullshard.optim.ShardedOptimizer(torch.optim.AdamW, model.parameters())",),
        ),
    )


def skip_bad_steps(run: Run) -> Remedy | None:
    """Return that updates of bad steps are left out."""
    return _remedy(
        run,
        "skip bad steps",
        "Skip such updates",
        settings=[Setting("train", "on_bad_step", "skip")],
    )


def lower_rate(run: Run) -> Remedy | None:
    """Return a third of the learning rate."""
    rate = run.setting("optimizer", "lr")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0:
        return None
    lower = Setting("optimizer", "lr", float(f"{rate / 3:.2g}"))
    return _remedy(run, "lower rate", "A third of the learning rate", settings=[lower])


def clip(run: Run) -> Remedy | None:
    """Return clipping, if the run does not clip."""
    if run.setting("train", "clip") != 0:
        return None
    return _remedy(run, "clip", "Clip gradients", settings=[Setting("train", "clip", 1.0)])


def smaller_microbatches(run: Run) -> Remedy | None:
    """Return twice the microbatches, each with half of the activations, if the ranks can share them."""
    accumulate = run.setting("train", "accumulate")
    if not isinstance(accumulate, int):
        return None
    return _remedy(
        run,
        "smaller microbatches",
        "Half of the windows at a time: half of their activations, but gradients of the whole model between microbatches",
        settings=[Setting("train", "accumulate", 2 * accumulate)],
    )


def recompute(run: Run) -> Remedy | None:
    """Return that activations of blocks are computed again instead of kept."""
    return _remedy(
        run,
        "recompute",
        "Keep no activations of blocks",
        settings=[Setting("compute", "checkpoint_activations", "blocks")],
    )
