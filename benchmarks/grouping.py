"""What planned groups save: host time and collectives of one step of a model of many small layers.

One process is rank 0 of a `fake` group, as in step.py. The same model is sharded with a group per
layer, and by `plan_groups`; unsharded is what the layers cost themselves.

    python benchmarks/grouping.py                                # 48 layers, 8 ranks
    python benchmarks/grouping.py --layers 96 --width 128 --device cpu

host         until backward returns, nothing awaited; on the CPU the processor time of the step
extra host   host beyond unsharded's
collectives  of one step, forward and backward
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import (
    DTYPES,
    Contestant,
    Setting,
    build_fsdp2,
    build_fullshard,
    build_unsharded,
    join_fake_group,
)
from benchmarks.estimate import Spread
from benchmarks.measure import collector_paused, timed
from benchmarks.report import commit_of, hardware, markdown, milliseconds
from benchmarks.transformer import Shape, initialise
from fullshard import GroupPlan, MixedPrecisionPolicy, plan_groups

WARMUP = 3


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, with defaults that depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=48)
    add("--width", type=int, default=64)
    add("--world", type=int, default=8, help="ranks of the fake group (default 8)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--rounds", type=int, default=20, help="timed steps of each contestant (default 20)")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options


def planned(setting: Setting) -> GroupPlan:
    """Plan the model, which has no memory yet."""
    policy = MixedPrecisionPolicy(**setting.mixed_precision)
    return plan_groups(setting.meta_model(DTYPES[setting.master]), mp_policy=policy)


def build_planned(setting: Setting) -> nn.Module:
    """Build with the groups of a plan."""
    mesh = init_device_mesh(setting.device.type, (setting.world,))
    model = planned(setting).apply(mesh=mesh).to_empty(device=setting.device)
    initialise(model)
    return model


BUILDERS: dict[str, Callable[[Setting], nn.Module]] = {
    "unsharded": build_unsharded,
    "torch, group per layer": build_fsdp2,
    "group per layer": build_fullshard,
    "plan": build_planned,
}


def collectives(contestant: Contestant) -> int:
    """Count the collectives of one step."""
    with warnings.catch_warnings(), CommDebugMode() as counter:
        warnings.simplefilter("ignore")  # about the counter's own hooks
        contestant.forward_backward()
    return int(counter.get_total_counts())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all, in turns, and print the plan and one table."""
    options = parse_arguments(arguments)
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    shape = Shape(
        layers=options.layers, width=options.width, head_width=32, batch=1, context=32, vocab=256
    )
    setting = Setting(
        shape=shape,
        device=device,
        world=options.world,
        precision="bf16" if device.type == "cuda" else "fp32",
        master="fp32",
    )
    torch.manual_seed(0)
    join_fake_group(options.world)
    contestants = [Contestant(name, build(setting), setting) for name, build in BUILDERS.items()]
    samples: dict[str, list[float]] = {name: [] for name in BUILDERS}
    for contestant in contestants:
        for _ in range(WARMUP):
            contestant.forward_backward()
    with collector_paused():
        for _ in range(options.rounds):
            for contestant in contestants:
                contestant.zero_grad()
                samples[contestant.name].append(timed(contestant.forward_backward, device).host_s)
    counts = {contestant.name: collectives(contestant) for contestant in contestants}
    dist.destroy_process_group()

    plan = planned(setting)
    least = median(samples["unsharded"])
    groups = {"unsharded": 0, "plan": len(plan.groups)}
    rows = [
        (
            name,
            str(groups.get(name, shape.num_groups)),
            str(counts[name]),
            milliseconds(Spread.of(times)),
            f"{(median(times) - least) * 1e3:.2f}",
        )
        for name, times in samples.items()
    ]
    print(
        f"{hardware(device)}, torch {torch.__version__}, commit {commit_of(Path(__file__).parent)}; "
        f"{shape.layers} layers x {shape.width}, {options.world} ranks, {options.rounds} rounds, "
        "medians [interquartile range]\n"
    )
    print(markdown(("", "groups", "collectives", "host ms", "extra host ms"), rows))
    print(f"\n{plan}")


if __name__ == "__main__":
    main()
