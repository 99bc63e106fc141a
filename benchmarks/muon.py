"""The optimizer step of Muon on sharded matrices, beside AdamW's and a Muon that gathers everything.

One process is rank 0 of a `fake` group, as in step.py: it does the work of one rank, and nothing waits for a network.

    python benchmarks/muon.py                       # 1.2b on a GPU, tiny on a CPU

adamw         AdamW over whole ranges of the shards (`ShardedOptimizer`, foreach)
muon          `fullshard.optim.Muon`: each matrix is orthogonalised by its owner
gathering     every rank gathers every matrix, and orthogonalises all of them

step ms       device time of `optimizer.step`, median of interleaved rounds [interquartile range]; wall time on the CPU
peak          memory that a step takes at its peak, beyond what is there between steps
sent, got     MiB that rank 0 sends to and gets from other ranks in a step
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import Contestant, Setting, adamw_over_shards, build, join_fake_group
from benchmarks.estimate import of_some
from benchmarks.measure import collector_paused, peak_of, timed
from benchmarks.optimizer_runs import new_parser, setting_of
from benchmarks.report import header, headline, markdown, milliseconds, number, write_json
from benchmarks.transformer import local_tensor
from fullshard.optim.matrices.muon import Muon, hidden_matrices
from fullshard.optim.matrices.newton_schulz import orthogonalize

MIB = 1 << 20
COLUMNS = ("optimizer", "step ms", "x adamw", "peak GiB", "sent MiB", "got MiB")


class Gathering(torch.optim.Optimizer):
    """Muon as a program without owners has it: `full_tensor`, then Newton-Schulz, on every rank."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update each matrix after the other."""
        for param in self.param_groups[0]["params"]:
            state, gradient = self.state[param], param.grad
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
            average = state["momentum_buffer"]
            average.lerp_(gradient, 0.05)
            update = gradient.lerp(average, 0.95).bfloat16().full_tensor()
            found = orthogonalize(update[None])[0]
            rows = local_tensor(param).shape[0]  # rank 0 has the first ones
            local_tensor(param).add_(found[:rows], alpha=-self.param_groups[0]["lr"])


def bytes_on_the_wire(optimizer: Muon, itemsize: int) -> tuple[float, float]:
    """Return the MiB that rank 0 sends and gets in a step, without what it sends to itself."""
    sent = got = 0
    for group in optimizer.param_groups:
        if group["use_muon"]:
            for _, _, buckets in optimizer._orthogonalizer_of(group["params"])._parts:
                for bucket in buckets:
                    sent += sum(bucket.sent.sizes[1:]) + sum(bucket.scattered.sizes[1:])
                    got += sum(bucket.gathered.sizes[1:]) + sum(bucket.received.sizes[1:])
    return sent * itemsize / MIB, got * itemsize / MIB


def measure(
    contestant: Contestant, setting: Setting, rounds: int
) -> tuple[dict[str, list[float]], dict[str, tuple[float, float, float]]]:
    """Take turns; return device times, and peak memory in GiB with MiB sent and got."""
    model, device = contestant.model, setting.device
    contestant.check()
    contestant.fill_gradients()
    matrices = hidden_matrices(model)
    itemsize = 2 if device.type == "cuda" else 4
    whole = sum(p.numel() for p in matrices) * itemsize / MIB
    share = (setting.world - 1) / setting.world
    muon = Muon(model, lr=1e-5)
    makers: dict[str, torch.optim.Optimizer] = {
        "adamw": adamw_over_shards(model.parameters()),
        "muon": muon,
        "gathering": Gathering(matrices, lr=1e-5),
    }
    wire = {
        "adamw": (0.0, 0.0),
        "muon": bytes_on_the_wire(muon, itemsize),
        "gathering": (whole * share, whole * share),
    }
    facts: dict[str, tuple[float, float, float]] = {}
    samples: dict[str, list[float]] = {name: [] for name in makers}
    for name, optimizer in makers.items():
        optimizer.step()
        peak = peak_of(optimizer.step, device)
        facts[name] = (peak, *wire[name])
    names = list(makers)
    with collector_paused():
        for turn in range(rounds):
            for name in names[turn % 3 :] + names[: turn % 3]:
                samples[name].append(timed(makers[name].step, device).device_s)
    return samples, facts


def rows(
    samples: dict[str, list[float]], facts: dict[str, tuple[float, float, float]]
) -> list[list[str]]:
    """Write the table's rows."""
    found = []
    base = of_some(samples["adamw"]).median
    for name, values in samples.items():
        spread = of_some(values)
        peak, sent, got = facts[name]
        found.append(
            [
                name,
                milliseconds(spread),
                number(spread.median / base, 2),
                number(peak, 2),
                number(sent, 0),
                number(got, 0),
            ]
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then print the table."""
    parser = new_parser(__doc__)
    options = parser.parse_args(arguments)
    preset, setting = setting_of(options)
    torch.manual_seed(0)
    head = header("muon.py", setting.device, options.commit, arguments)
    join_fake_group(options.world)
    samples, facts = measure(build("fullshard", setting), setting, options.rounds)
    dist.destroy_process_group()
    write_json(options.json, head, {"preset": preset, "samples": samples, "facts": facts})
    print(f"{headline(head)}\n\n{preset}, world {options.world}, {options.rounds} rounds.\n")
    print(markdown(COLUMNS, rows(samples, facts)))


if __name__ == "__main__":
    main()
