"""The optimizer step of AdamW8bit on shards, beside fused AdamW's, and the memory of both states.

One process is rank 0 of a `fake` group, as in step.py: it does the work of one rank, and nothing waits for a network.

    python benchmarks/adamw8bit.py                       # 1.2b on a GPU, tiny on a CPU
    python benchmarks/adamw8bit.py --world 7             # shards that do not end where blocks do

fused         AdamW(fused=True) over whole ranges of the shards (`ShardedOptimizer`)
fused torch   torch's AdamW(fused=True) of the DTensors
8 bits        `fullshard.optim.AdamW8bit`, compiled
eager         the same without compiling

step ms       device time of `optimizer.step`, median of interleaved rounds [interquartile range]; wall time on the CPU
host ms       time until `optimizer.step` returns
bytes         of state, for each element of rank 0's shards
peak          memory that a step takes at its peak, beyond what is there between steps
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import Contestant, Setting, build, join_fake_group
from benchmarks.estimate import of_some
from benchmarks.measure import collector_paused, peak_of, timed
from benchmarks.optimizer_runs import new_parser, setting_of
from benchmarks.report import header, headline, markdown, milliseconds, number, write_json
from benchmarks.transformer import local_tensor
from fullshard.optim import AdamW8bit, ShardedOptimizer

COLUMNS = ("optimizer", "step ms", "x fused", "host ms", "bytes", "peak GiB")
LIMIT = 1.5
"""What the step of 8 bits may take on a GPU, in steps of fused AdamW."""


def optimizers(contestant: Contestant, *, compiles: bool) -> dict[str, torch.optim.Optimizer]:
    """Make the optimizers that are compared, of the same parameters."""
    params = list(contestant.model.parameters())
    found: dict[str, torch.optim.Optimizer] = {
        "fused": ShardedOptimizer(torch.optim.AdamW, params, lr=1e-5, fused=True),
        "fused torch": torch.optim.AdamW(params, lr=1e-5, fused=True),
        "8 bits": AdamW8bit(params, lr=1e-5, compile=True),
        "eager": AdamW8bit(params, lr=1e-5, compile=False),
    }
    if not compiles:
        del found["8 bits"]
    return found


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    """Return the memory of an optimizer's state on this rank."""
    if isinstance(optimizer, AdamW8bit):
        return optimizer.state_bytes
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(local_tensor(each).nbytes for each in tensors if isinstance(each, Tensor))


def measure(
    contestant: Contestant, setting: Setting, rounds: int, *, compiles: bool
) -> tuple[dict[str, list[float]], dict[str, tuple[float, float, float]]]:
    """Take turns; return device times, and host time, bytes of state and peak memory in GiB."""
    contestant.check()
    contestant.fill_gradients()
    numel = sum(local_tensor(param).numel() for param in contestant.model.parameters())
    compared = optimizers(contestant, compiles=compiles)
    facts: dict[str, tuple[float, float, float]] = {}
    samples: dict[str, list[float]] = {name: [] for name in compared}
    host: dict[str, list[float]] = {name: [] for name in compared}
    states = {}
    for name, optimizer in compared.items():
        for _ in range(3):  # compiles, too
            optimizer.step()
        states[name] = bytes_of_state(optimizer) / numel
        optimizer.step()  # whose state may have been split
    names = list(compared)
    with collector_paused():
        for turn in range(rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                compared[name].step()
                timing = timed(compared[name].step, setting.device)
                samples[name].append(timing.device_s)
                host[name].append(timing.host_s)
    for name, optimizer in compared.items():
        peak = peak_of(optimizer.step, setting.device)
        facts[name] = (of_some(host[name]).median, states[name], peak)
    return samples, facts


def rows(
    samples: dict[str, list[float]], facts: dict[str, tuple[float, float, float]]
) -> list[list[str]]:
    """Write the table's rows."""
    base = of_some(samples["fused"]).median
    return [
        [
            name,
            milliseconds(of_some(values)),
            number(of_some(values).median / base, 2),
            number(facts[name][0] * 1e3, 2),
            number(facts[name][1], 3),
            number(facts[name][2], 2),
        ]
        for name, values in samples.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled step out")
    options = parser.parse_args(arguments)
    preset, setting = setting_of(options)
    torch.manual_seed(0)
    head = header("adamw8bit.py", setting.device, options.commit, arguments)
    join_fake_group(options.world)
    samples, facts = measure(
        build("fullshard", setting), setting, options.rounds, compiles=not options.no_compile
    )
    dist.destroy_process_group()
    write_json(options.json, head, {"preset": preset, "samples": samples, "facts": facts})
    print(f"{headline(head)}\n\n{preset}, world {options.world}, {options.rounds} rounds.\n")
    print(markdown(COLUMNS, rows(samples, facts)))
    if setting.device.type == "cuda" and not options.no_compile:
        found = of_some(samples["8 bits"]).median / of_some(samples["fused"]).median
        print(f"\n8 bits: {found:.2f} x fused AdamW; the limit is {LIMIT}.")


if __name__ == "__main__":
    main()
