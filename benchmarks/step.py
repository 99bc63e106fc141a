"""Time and memory of one training step, with and without sharding, side by side.

The contestants are the unsharded model, torch FSDP2 and fullshard's `fully_shard`, torch FSDP1 and
fullshard's wrapper. One process is rank 0 of a `fake` group of any size, so one device suffices and
nothing waits for a network.

    python benchmarks/step.py --preset 12x768 --preset 1.2b --world 8
    python benchmarks/step.py --preset tiny --world 8 --contestants unsharded fsdp2 fullshard
    python benchmarks/step.py --preset 1.2b --compile --contestants unsharded fsdp2 fullshard

fwd+bwd     device time from an idle device, by events on the current stream; wall time on the CPU
host        until backward returns, nothing awaited; on the CPU the processor time of the step.
            With a full launch queue it includes waiting for the device: read it from small models
extra host  host beyond unsharded's
x rival     over FSDP2's, or FSDP1's for wrappers
optimizer   AdamW(foreach=True); "plain shards" is the same over plain tensors of the shards' shapes
peak        of forward and backward, without optimizer state, each contestant alone
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import BUILDERS, Setting, join_fake_group
from benchmarks.measure import Comparison, Effort
from benchmarks.profiling import profiler_of
from benchmarks.report import Case, as_json, header, headline, table, write_json
from benchmarks.transformer import PRESETS, Shape, count_parameters

OPTIMIZER_LIMIT = 1_000_000_000
"""Parameters above which the optimizer is only measured when asked for: its state needs room."""

DEFAULT_CONTESTANTS = ["unsharded", "fsdp2", "fullshard", "fsdp1", "wrapper"]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, with defaults that depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", action="append", choices=list(PRESETS), help="model size; may be repeated")
    for name in ("layers", "width", "batch", "context", "vocab"):
        add(f"--{name}", type=int, help=f"override the preset's {name}")
    add("--world", type=int, default=8, help="ranks of the fake group (default 8)")
    add("--contestants", nargs="+", choices=list(BUILDERS), default=DEFAULT_CONTESTANTS)
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--precision", choices=("fp32", "bf16"), help="of the computation; default bf16 on cuda")
    add("--master", choices=("fp32", "bf16"), default="fp32", help="dtype of the shards")
    add(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="compile every block before it is sharded; default backend inductor",
    )
    add("--rounds", type=int, help="turns of each contestant (default 6, 24 on cpu)")
    add("--steps", type=int, help="timed steps of each turn (default 5, 2 on cpu)")
    add("--warmup", type=int, default=3, help="steps after each build that are not timed")
    add("--isolate", action="store_true", help="build and delete each contestant in every round")
    add(
        "--optimizer",
        action=argparse.BooleanOptionalAction,
        help="time the optimizer step; default: below 1 B parameters",
    )
    add("--threads", type=int, help="CPU threads; default 1 on cpu, torch's own on cuda")
    add("--json", type=Path, metavar="FILE", help="write samples and summaries")
    add("--profile", type=Path, metavar="DIR", help="write a trace of one step of each contestant")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = options.device == "cuda"
    options.preset = options.preset or ["12x768" if on_cuda else "tiny"]
    options.precision = options.precision or ("bf16" if on_cuda else "fp32")
    if options.threads is None and not on_cuda:
        options.threads = 1
    # Processors drift more than a GPU does: short turns, so that a drift hits all alike.
    if options.rounds is None:
        options.rounds = 6 if on_cuda else 24
    if options.steps is None:
        options.steps = 5 if on_cuda else 2
    options.contestants = list(dict.fromkeys(options.contestants))
    return options


def shape_of(preset: str, options: argparse.Namespace) -> Shape:
    """Apply the overrides of the command line to a preset."""
    given = {
        name: getattr(options, name) for name in ("layers", "width", "batch", "context", "vocab")
    }
    return replace(
        PRESETS[preset], **{name: size for name, size in given.items() if size is not None}
    )


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Lay out what will be compared, so that wrong sizes are refused before anything is built."""
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    cases = []
    for preset in options.preset:
        shape = shape_of(preset, options)
        num_parameters = count_parameters(shape)
        small = num_parameters < OPTIMIZER_LIMIT
        setting = Setting(
            shape=shape,
            device=device,
            world=options.world,
            precision=options.precision,
            master=options.master,
            compiler=options.compile,
        )
        effort = Effort(
            rounds=options.rounds,
            steps=options.steps,
            warmup=options.warmup,
            isolate=options.isolate,
            optimizer=small if options.optimizer is None else options.optimizer,
        )
        cases.append(
            Case(preset=preset, num_parameters=num_parameters, setting=setting, effort=effort)
        )
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every preset, then print all tables; 1 if a contestant failed."""
    options = parse_arguments(arguments)
    try:
        cases = cases_of(options)
    except ValueError as error:
        raise SystemExit(f"step.py: {error}") from error
    device = cases[0].setting.device
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    head = header("step.py", device, options.commit, arguments)
    join_fake_group(options.world)
    if options.compile is not None:
        # Else the compiler would give up after some attempts, and blocks would run as they are.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    # What was imported stays; frozen, it is not searched again in the collection before every turn.
    gc.freeze()
    tables, results, failed = [], [], False
    for case in cases:
        print(f"{case.preset}: {case.num_parameters / 1e6:,.1f} M parameters", file=sys.stderr)
        comparison = Comparison(tuple(options.contestants), case.setting, case.effort)
        comparison.run()
        if options.profile is not None:
            comparison.visit(profiler_of(options.profile, case.preset, device))
        comparison.close()
        if options.compile is not None:
            torch.compiler.reset()  # or the next size would be taken for one that varies
        tables.append(table(case, comparison.records))
        results.append(as_json(case, comparison.records))
        failed |= any(record.status == "failed" for record in comparison.records.values())
    dist.destroy_process_group()
    write_json(options.json, head, results)
    print(f"\n{headline(head)}\n")
    print("\n\n".join(tables))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
