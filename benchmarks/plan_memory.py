"""Whether the memory that `fullshard plan` foretells is the memory that a step then takes.

One process is rank 0 of a `fake` group on a GPU, as in step.py. Each configuration runs in a process of its own, since what
one leaves in the allocator would be the next one's.

    python benchmarks/plan_memory.py --json benchmarks/results/plan-memory-h200.json    # on a GPU
    python benchmarks/plan_memory.py --only large-blocks --only large-hsdp              # some of them
    python benchmarks/plan_memory.py --no-measure                                       # only foretell; a CPU is enough

allocated     most bytes of tensors at a time, within the second step
reserved      most that the caching allocator has taken from the device by then
off           foretold over measured, less one; at most 5 % for allocated and 10 % for reserved is promised
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import join_fake_group
from benchmarks.report import header, headline, markdown, write_json
from benchmarks.transformer import local_tensor
from fullshard.programs.plan_tool.memory_use import memory_use
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.plan_tool.step_program import record_step
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.evaluation import window_losses
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.optimizer import build_optimizer
from fullshard.programs.train.sharded_model import build_model

PROMISED = {"allocated": 0.05, "reserved": 0.10}
COLUMNS = ("configuration", "world", "allocated GiB", "foretold", "off", "reserved GiB", "foretold", "off")  # fmt: skip
GIB = 1 << 30

BF16 = "compute.precision=bf16"
SIZES = {
    "medium": ["model.size=medium", "model.vocabulary=32000", "data.context=1024"],
    "large": ["model.size=large", "model.vocabulary=32000", "data.context=2048"],
    "wide": [
        "model.layers=12",
        "model.width=4096",
        "model.heads=32",
        "model.vocabulary=128256",
        "data.context=4096",
    ],
}
"""0.16, 1.3 and 3.5 billion parameters."""
ROWS = {"medium": 8, "large": 4, "wide": 1}
"""Windows of a rank."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A run, by what differs from the built-in defaults."""

    size: str
    settings: tuple[str, ...] = ()
    world: int = 8

    def config(self) -> RunConfig:
        """Return the whole."""
        batch = f"train.batch={ROWS[self.size] * self.world}"
        return read_config(None, [*SIZES[self.size], BF16, batch, *self.settings])


RECOMPUTED = "compute.checkpoint_activations=blocks"
SELECTIVE = "compute.checkpoint_activations=selective"
CONFIGURATIONS = {
    **{size: Configuration(size) for size in SIZES},
    **{f"{size}-recomputed": Configuration(size, (RECOMPUTED,)) for size in SIZES},
    **{f"{size}-selective": Configuration(size, (SELECTIVE,)) for size in SIZES},
    "medium-64": Configuration("medium", world=64),
    "large-64": Configuration("large", world=64),
    "wide-recomputed-64": Configuration("wide", (RECOMPUTED,), 64),
    "large-kept": Configuration("large", ("sharding.reshard_after_forward=false",)),
    "large-no-prefetch": Configuration("large", ("sharding.prefetch=0",)),
    "large-prefetch-3": Configuration("large", ("sharding.prefetch=3",)),
    "large-hsdp": Configuration("large", ("sharding.replicas=2",)),
    "large-hsdp-64": Configuration("large", ("sharding.replicas=8",), 64),
    "large-wire": Configuration("large", ("compute.wire=bf16",)),
    "large-fp32": Configuration("large", ("compute.precision=fp32",)),
    "large-accumulated": Configuration("large", ("train.accumulate=2",)),
    "large-sgd": Configuration("large", ("optimizer.name=sgd",)),
    "large-muon": Configuration("large", ("optimizer.name=muon",)),
    "large-adamw8bit": Configuration("large", ("optimizer.name=adamw8bit",)),
    "large-not-flat": Configuration("large", ("optimizer.flat=false",)),
}


def foretold(configuration: Configuration, profile: str) -> dict[str, int]:
    """Return the bytes that the plan says."""
    config = configuration.config()
    program = record_step(config, configuration.world, open_model(config)).program
    use = memory_use(program, load_profile(profile))
    return {"allocated": use.allocated, "reserved": use.reserved}


def measured_here(configuration: Configuration) -> dict[str, int]:
    """Take two steps on the GPU; return the bytes of the second."""
    config, device = configuration.config(), torch.device("cuda")
    join_fake_group(configuration.world)
    source = open_model(config)
    model = build_model(config, source, device)
    for each in (*model.module.parameters(), *model.module.buffers()):
        local_tensor(each).detach().zero_()
    optimizer = build_optimizer(config.optimizer, model)
    rows = config.train.batch // configuration.world
    windows = torch.zeros(rows, config.data.context + 1, dtype=torch.int64, device=device)
    micro = rows // config.train.accumulate
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for begin in range(0, rows, micro):
            is_last = begin + micro >= rows
            with nullcontext() if is_last else model.accumulating():
                part = windows[begin : begin + micro]
                (window_losses(source, model.module, part).sum() / rows).backward()
        model.clip_gradients(config.train.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    found = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    dist.destroy_process_group()
    return found


def measured(name: str) -> dict[str, int] | None:
    """Measure in a process of its own; None if it failed, for lack of memory or otherwise."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure-here", name]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        print(f"{name}: {(finished.stderr.splitlines() or ['failed'])[-1]}", file=sys.stderr)
        return None
    found: dict[str, int] = json.loads(finished.stdout.splitlines()[-1])
    return found


def row(name: str, plan: dict[str, int], truth: dict[str, int] | None) -> list[str]:
    """Return the cells of a configuration."""
    cells = [name, str(CONFIGURATIONS[name].world)]
    for kind in PROMISED:
        if truth is None:
            cells += ["-", f"{plan[kind] / GIB:.2f}", "-"]
        else:
            off = plan[kind] / truth[kind] - 1
            cells += [f"{truth[kind] / GIB:.2f}", f"{plan[kind] / GIB:.2f}", f"{off:+.1%}"]
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Foretell and measure; return 1 if something is further off than promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", action="append", choices=list(CONFIGURATIONS), help="may be repeated")
    add("--profile", default="h200", help="of the machine, for what its libraries hold")
    add("--no-measure", action="store_true", help="only foretell")
    add("--measure-here", choices=list(CONFIGURATIONS), help=argparse.SUPPRESS)
    add("--json", type=Path, metavar="FILE")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    options = parser.parse_args(arguments)
    if options.measure_here:
        print(json.dumps(measured_here(CONFIGURATIONS[options.measure_here])))
        return 0
    device = torch.device("cpu" if options.no_measure else "cuda")
    head = header("plan_memory.py", device, options.commit, arguments)
    rows, results, is_off = [], [], False
    for name in options.only or CONFIGURATIONS:
        plan = foretold(CONFIGURATIONS[name], options.profile)
        truth = None if options.no_measure else measured(name)
        rows.append(row(name, plan, truth))
        results.append({"name": name, **asdict(CONFIGURATIONS[name]), "foretold": plan, "measured": truth})  # fmt: skip
        if truth is not None:
            offs = {kind: abs(plan[kind] / truth[kind] - 1) for kind in PROMISED}
            is_off |= any(offs[kind] > most for kind, most in PROMISED.items())
    print(headline(head))
    print(markdown(COLUMNS, rows))
    write_json(options.json, head, results)
    return int(is_off)


if __name__ == "__main__":
    sys.exit(main())
