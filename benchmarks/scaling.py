"""What grows with the number of ranks, and with the number of parameters in a group.

One process is rank 0 of a `fake` group; subgroups of it are the smaller worlds, so all worlds take
turns in the same rounds and a drift of the machine hits them alike.

    python benchmarks/scaling.py                     # about eight minutes on a CPU
    python benchmarks/scaling.py --study padding     # arithmetic only, a second

worlds      extra host time per group and step, memory and time to build, over world sizes
parameters  extra host time per group over the number of parameters a group's weight is cut into
padding     bytes at rest that belong to no parameter, by the layout: nothing is built

host        processor time of forward and backward beyond unsharded's, without the next two
copy        ... within the fused copies that pack and distribute what is communicated: on the CPU memory
            traffic, which would be a GPU's time
collective  ... within the group, of 8 ranks, in `parameters`. In `worlds` collectives do nothing: the fake
            group works for every rank, in the call and when its result is dropped, as no real one does
build       processor time from modules to sharded modules on the device
shard       bytes that rest on rank 0
            Times are lower quartiles [interquartile range] of all steps (estimate.py says why)
peak        bytes of CPU memory that one step allocates at most beyond what was there before it, by
            torch's profiler; the models compute next to nothing, so it is gather and reduce buffers

Models of worlds: `even` is 8 blocks of 4 parameters of 4096 x 32, which every world up to 4096 divides
without padding, so nothing but the world changes; `tiny` is step.py's, whose 64 rows are mostly padding
beyond 64 ranks.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clock import Part, silent_collectives
from benchmarks.contestants import Contestant, Setting, join_fake_group
from benchmarks.estimate import Spread, of_some
from benchmarks.measure import Comparison, Effort
from benchmarks.report import header, headline, markdown, write_json
from benchmarks.transformer import PRESETS, Shape, Transformer, local_tensor
from fullshard.layout.segments import Layout, flat_layout, per_row_layout

WORLDS = (8, 16, 64, 256, 1024, 4096)
EVEN = Shape(
    layers=8, width=32, head_width=32, batch=1, context=2, vocab=4096, cut=(4 * WORLDS[-1], 4)
)
MODELS: Mapping[str, Shape] = {"even": EVEN, "tiny": PRESETS["tiny"]}

PARAMETERS = (4, 16, 64, 256)
PARAMETERS_WORLD = 8
CUT_ROWS = PARAMETERS_WORLD * PARAMETERS[-1]
"""So that the smallest part has a row for every rank."""

PADDED_PRESETS = ("12x768", "1.2b", "3.8b", "7b", "65b")
CONTESTANTS = ("unsharded", "fsdp2", "fullshard")
SHARDED = CONTESTANTS[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One contestant at one size."""

    study: str
    model: str
    contestant: str
    world: int
    params_per_group: int
    num_groups: int
    host_s: Spread
    copy_s: Spread
    collective_s: Spread | None
    """All three per group and step; what unsharded takes is subtracted from the first."""
    build_s: float
    shard_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Bytes of one model at rest that belong to no parameter."""

    preset: str
    world: int
    parameter_bytes: int
    rows_bytes: int
    """Padding if every parameter is divided by rows: `fully_shard`, ours and torch's."""
    flat_bytes: int
    """Padding if a block's parameters are one array: the wrappers."""


def measure(
    cases: Mapping[tuple[str, str, int, int], Setting], rounds: int, steps: int, *, silent: bool
) -> list[Point]:
    """Compare the contestants at every setting, all settings in the same rounds.

    With `silent`, collectives do nothing in the rounds; else their time is measured.
    """
    parts: tuple[Part, ...] = ("copy_s",) if silent else ("copy_s", "collective_s")
    effort = Effort(
        rounds=rounds, steps=steps, warmup=1, isolate=False, optimizer=False, parts=parts
    )
    comparisons = {key: Comparison(CONTESTANTS, case, effort) for key, case in cases.items()}
    for key, comparison in comparisons.items():
        print(f"{key[0]} {key[1]}: world {key[2]}, {key[3]} parameters", file=sys.stderr)
        comparison.prepare()
    gc.collect()
    gc.freeze()  # what is built stays; frozen, it is not searched again before every turn
    with silent_collectives() if silent else nullcontext():
        for turn in range(rounds):
            print(f"  round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
            for comparison in comparisons.values():
                comparison.take_round(turn)
    gc.unfreeze()
    points = []
    for key, comparison in comparisons.items():
        memories: dict[str, tuple[int, int]] = {}
        comparison.visit(partial(note_memory, memories))
        for name in SHARDED:
            points.append(point_of(key, name, comparison, memories[name]))
        comparison.close()
    return points


def note_memory(to: dict[str, tuple[int, int]], contestant: Contestant) -> None:
    """Write down what the shards take, and what a step takes beyond them."""
    held = {}
    for parameter in contestant.model.parameters():
        storage = local_tensor(parameter).untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    contestant.zero_grad()
    to[contestant.name] = sum(held.values()), peak_of(contestant.forward_backward)
    contestant.zero_grad()


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that a call has allocated on the CPU at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        call()
    results: Any = trace.profiler
    present, peak = 0, 0
    for event in sorted(results.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            present += event.nbytes()
            peak = max(peak, present)
    return peak


def point_of(
    key: tuple[str, str, int, int], name: str, comparison: Comparison, memory: tuple[int, int]
) -> Point:
    """Summarise one contestant of one comparison."""
    study, model, world, params_per_group = key
    num_groups = comparison.setting.shape.num_groups
    samples = comparison.records[name].samples
    base_s = of_some(comparison.records["unsharded"].samples["host_s"]).lower_quartile

    def per_group(values: Iterable[float]) -> Spread:
        return of_some([value / num_groups for value in values])

    collective = samples.get("collective_s")
    parts = (samples["host_s"], samples["copy_s"], collective or [0.0] * len(samples["host_s"]))
    own = (host - copy - within - base_s for host, copy, within in zip(*parts, strict=True))
    return Point(
        study=study,
        model=model,
        contestant=name,
        world=world,
        params_per_group=params_per_group,
        num_groups=num_groups,
        host_s=per_group(own),
        copy_s=per_group(samples["copy_s"]),
        collective_s=None if collective is None else per_group(collective),
        build_s=samples["build_s"][0],
        shard_bytes=memory[0],
        peak_bytes=memory[1],
    )


def setting_of(shape: Shape, world: int) -> Setting:
    """Everything in fp32 on the CPU."""
    device = torch.device("cpu")
    return Setting(shape=shape, device=device, world=world, precision="fp32", master="fp32")


def params_per_block(shape: Shape) -> int:
    """How many parameters a block's group has."""
    with torch.device("meta"):
        return len(list(Transformer(shape).blocks[0].parameters()))


def cut_shape(parts: int) -> Shape:
    """Blocks of the same weight and computation, cut into more or fewer parameters."""
    return Shape(
        layers=8, width=16, head_width=16, batch=1, context=2, vocab=64, cut=(CUT_ROWS, parts)
    )


def study_worlds(worlds: Sequence[int], rounds: int, steps: int) -> list[Point]:
    """Both models at every world size."""
    points = []
    for model, shape in MODELS.items():
        per_block = params_per_block(shape)
        cases = {("worlds", model, world, per_block): setting_of(shape, world) for world in worlds}
        points += measure(cases, rounds, steps, silent=True)
    return points


def study_parameters(rounds: int, steps: int) -> list[Point]:
    """The same weight in more and more parameters."""
    world = PARAMETERS_WORLD
    cases = {
        ("parameters", "cut", world, parts): setting_of(cut_shape(parts), world)
        for parts in PARAMETERS
    }
    return measure(cases, rounds, steps, silent=False)


def study_padding(worlds: Sequence[int]) -> list[Padding]:
    """Ask the layouts of every group, in fp32."""
    found = []
    for preset in PADDED_PRESETS:
        with torch.device("meta"):
            model = Transformer(PRESETS[preset])
        groups = [[tuple(p.shape) for p in block.parameters()] for block in model.blocks]
        in_blocks = {id(p) for p in model.blocks.parameters()}
        groups.append([tuple(p.shape) for p in model.parameters() if id(p) not in in_blocks])
        for world in worlds:
            found.append(
                Padding(
                    preset=preset,
                    world=world,
                    parameter_bytes=4 * sum(p.numel() for p in model.parameters()),
                    rows_bytes=sum(padding(per_row_layout(g, world=world)) for g in groups),
                    flat_bytes=sum(padding(flat_layout(g, world=world)) for g in groups),
                )
            )
    return found


def padding(layout: Layout) -> int:
    """Bytes of a group, over all ranks, that belong to no parameter, in fp32."""
    return 4 * sum(layout.padding(segment) for segment in range(len(layout.segments)))


def slope_s(points: Sequence[Point], *, part: Literal["host_s", "copy_s", "collective_s"]) -> float:
    """Seconds that one more parameter in a group costs it: least squares."""
    sizes = [point.params_per_group for point in points]
    return statistics.linear_regression(
        sizes, [getattr(point, part).lower_quartile for point in points]
    ).slope


def slopes_text(points: Sequence[Point], name: str) -> str:
    """Write what one more parameter costs a contestant."""
    own = [point for point in points if point.contestant == name]
    host, copy, collective = (
        slope_s(own, part=part) * 1e6 for part in ("host_s", "copy_s", "collective_s")
    )
    return f"{name} {host + copy:.1f} ({host:.1f} host, {copy:.1f} copy), and {collective:.1f} in the fake group"


def microseconds(spread: Spread | None) -> str:
    """Write the lower quartile with the interquartile range."""
    if spread is None:
        return "n/a"
    return f"{spread.lower_quartile * 1e6:.0f} [{spread.iqr * 1e6:.0f}]"


def points_table(points: Sequence[Point], size: str) -> str:
    """Write points over one of their sizes, a line for each contestant."""
    columns = [size, "contestant", "host us", "copy us", "collective us"]
    columns += ["build ms", "shard KiB", "peak KiB"]
    rows = [
        [
            str(getattr(point, size)),
            point.contestant,
            microseconds(point.host_s),
            microseconds(point.copy_s),
            microseconds(point.collective_s),
            f"{point.build_s * 1e3:.0f}",
            f"{point.shard_bytes / 1024:.1f}",
            f"{point.peak_bytes / 1024:.0f}",
        ]
        for point in sorted(points, key=lambda point: SHARDED.index(point.contestant))
    ]
    if all(point.collective_s is None for point in points):
        del columns[4]
        for row in rows:
            del row[4]
    return markdown(columns, rows)


def padding_table(found: Sequence[Padding]) -> str:
    """Write the share of padding, by rows and flat."""
    worlds = dict.fromkeys(one.world for one in found)
    presets = dict.fromkeys(one.preset for one in found)
    rows = [
        [preset, *(padding_cell(one) for one in found if one.preset == preset)]
        for preset in presets
    ]
    return markdown(["model", *(f"{world} ranks" for world in worlds)], rows)


def padding_cell(one: Padding) -> str:
    """Write padding as a share of the parameters: by rows / flat."""
    rows, flat = (100 * size / one.parameter_bytes for size in (one.rows_bytes, one.flat_bytes))
    return f"{rows:.3f} / {flat:.3f} %"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--study", nargs="+", choices=STUDIES, default=list(STUDIES))
    add("--worlds", nargs="+", type=int, default=list(WORLDS), help="world sizes")
    add("--rounds", type=int, default=16, help="turns of each contestant (default 16)")
    add("--steps", type=int, default=2, help="timed steps of each turn (default 2)")
    add("--json", type=Path, metavar="FILE", help="write all points")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    return parser.parse_args(arguments)


STUDIES = ("worlds", "parameters", "padding")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the studies and print their tables."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_flush_denormal(True)  # memory that no collective wrote may look like such numbers
    head = header("scaling.py", torch.device("cpu"), options.commit, arguments)
    join_fake_group(max(*options.worlds, PARAMETERS_WORLD))
    texts, points, found = [], [], []
    if "worlds" in options.study:
        points += study_worlds(options.worlds, options.rounds, options.steps)
        for model in MODELS:
            texts.append(f"**worlds, {model}**, per group and step")
            texts.append(points_table([p for p in points if p.model == model], "world"))
    if "parameters" in options.study:
        cut = study_parameters(options.rounds, options.steps)
        points += cut
        texts.append(f"**parameters**, per group and step, {PARAMETERS_WORLD} ranks")
        texts.append(points_table(cut, "params_per_group"))
        slopes = "; ".join(slopes_text(cut, name) for name in SHARDED)
        texts.append(f"One more parameter in a group costs, in us: {slopes}.")
    if "padding" in options.study:
        found = study_padding(options.worlds)
        texts.append("**padding** / parameters: by rows (`fully_shard`) / flat (wrappers)")
        texts.append(padding_table(found))
    dist.destroy_process_group()
    results = {
        "points": [asdict(point) for point in points],
        "padding": [asdict(one) for one in found],
    }
    write_json(options.json, head, results)
    print(f"\n{headline(head)}\n")
    print("\n\n".join(texts))


if __name__ == "__main__":
    main()
