"""Checkpoints against `torch.distributed.checkpoint`: save, load, load on other ranks; planning for thousands.

The script starts its own processes, which share one sharded model and take turns, in another order each time.

    python benchmarks/checkpoint.py                        # a model of 1.07 GB, and AdamW's state, on 2 ranks
    python benchmarks/checkpoint.py --megabytes 64 --rounds 2

On a GPU it measures, with one rank, how long steps take while `async_save` copies and writes, and nothing else.

save, load   model and AdamW's state, from a barrier until the slowest rank is done; both flush to the disk. Ours
             also has checksums: written by save, verified by load. Files were just written, so reading
             them is reading memory
resume       the same load into an optimizer that has no state yet, as after a restart
reshard      the same load of what four ranks have written
planning     what a rank computes before it writes, and before it reads, as one of so many ranks of the fake
             group; no file is touched, and no other rank is asked
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import join_fake_group
from benchmarks.report import header, headline, markdown, write_json
from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.load_plan import compare as compare_with_source
from fullshard.checkpoint.manifest import FileRecord, Manifest
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.save_plan import new_checkpoint
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.programs.train.processes import run_in_processes

T = TypeVar("T")
NAMES = ("fullshard", "dcp")
WRITERS_BEFORE_RESHARD = 4


def build(
    megabytes: int, device: str = "cpu", layers: int = 16
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded stack of linear layers with so many bytes of parameters, and AdamW after one step."""
    width = max(8, int((megabytes * 1e6 / 4 / layers) ** 0.5))
    model = nn.Sequential(*[nn.Linear(width, width, device=device) for _ in range(layers)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    train(model, optimizer, rows=1)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> None:
    """A step."""
    first = next(iter(model.parameters()))
    model(torch.rand(rows, first.shape[1], device=first.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- contestants -----------------------------------------------------------------------------------


def save(name: str, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint as users of either would."""
    if name == "fullshard":
        checkpoint.save(path, model, optimizer)
        return
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path)


def load(name: str, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read one into a model and an optimizer."""
    if name == "fullshard":
        checkpoint.load(path, model, optimizer)
        return
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=state["optimizer"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank of a job."""

    rank: int
    ranks: int
    folder: Path
    megabytes: int
    rounds: int
    job: str


def run_rank(place: Place) -> None:
    """Be one rank, from the process group's beginning to its end."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(place.folder / f"store-{place.job}"), place.ranks)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.ranks)
    model, optimizer = build(place.megabytes)
    if place.job == "write":
        for name in NAMES:
            save(name, place.folder / f"written-{name}", model, optimizer)
    else:
        samples = compare(place, model, optimizer)
        if place.rank == 0:
            (place.folder / "samples.json").write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


def compare(
    place: Place, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, list[float]]]:
    """Seconds by what was done and who did it; the first round is not counted."""
    samples: dict[str, dict[str, list[float]]] = {}
    for turn in range(place.rounds + 1):
        for name in NAMES if turn % 2 else reversed(NAMES):
            path = place.folder / f"{name}-{turn}"
            other = place.folder / f"written-{name}"
            for what, call in (
                ("save", lambda name=name, path=path: save(name, path, model, optimizer)),
                ("load", lambda name=name, path=path: load(name, path, model, optimizer)),
                ("resume", lambda name=name, path=path: load(name, path, model, optimizer)),
                ("reshard", lambda name=name, other=other: load(name, other, model, optimizer)),
            ):
                if what == "resume":
                    optimizer.state.clear()
                seconds = timed(call)
                if turn:
                    samples.setdefault(what, {}).setdefault(name, []).append(seconds)
            dist.barrier()
            if place.rank == 0:
                shutil.rmtree(path)
    return samples


def timed(call: Callable[[], None]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    began = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measure(
    folder: Path, megabytes: int, ranks: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Let four ranks write what is read by others, then compare."""
    for job, count in (("write", WRITERS_BEFORE_RESHARD), ("compare", ranks)):
        places = [
            Place(
                rank=rank,
                ranks=count,
                folder=folder,
                megabytes=megabytes,
                rounds=rounds,
                job=job,
            )
            for rank in range(count)
        ]
        run_in_processes(run_rank, places)
    found: dict[str, dict[str, list[float]]] = json.loads((folder / "samples.json").read_text())
    return found


# --- saving while training goes on ------------------------------------------------------------------


def saving_beside(folder: Path, megabytes: int, steps: int = 6) -> dict[str, Any]:
    """Seconds of steps on a GPU before and after `async_save` was called, of the call, and of a save that waits."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer = build(megabytes, "cuda")

    def seconds_of(call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def step() -> float:
        return seconds_of(lambda: train(model, optimizer, rows=2048))

    checkpoint.async_save(
        folder / "a", model, optimizer
    ).wait()  # pins memory, makes a process group
    step()
    found: dict[str, Any] = {"before": [step() for _ in range(steps)]}
    began = time.perf_counter()
    pending = checkpoint.async_save(folder / "a", model, optimizer)
    found["call"] = time.perf_counter() - began
    found["after"] = [step() for _ in range(steps)]
    found["bytes"] = pending.wait().nbytes
    found["until complete"] = time.perf_counter() - began
    found["save"] = seconds_of(lambda: checkpoint.save(folder / "a", model, optimizer))
    dist.destroy_process_group()
    return found


# --- planning --------------------------------------------------------------------------------------


class SimulatedRankGroup(RankGroup):
    """All ranks say what this one says."""

    def collect(self, value: T) -> list[T]:
        """See `RankGroup`."""
        return [value] * len(self.ranks)

    def on_each(self, function: Callable[[], T]) -> T:
        """See `RankGroup`."""
        return function()


@contextmanager
def fake_ranks(world: int) -> Any:
    """Be rank 0 of so many."""
    join_fake_group(world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plan_times(world: int, layers: int) -> dict[str, float]:
    """Seconds of one rank's planning, as one of ``world``; 9 tensors a layer, with two states of each."""
    with fake_ranks(world):
        model = nn.Sequential(
            *[
                nn.Sequential(*[nn.Linear(64, 64, bias=i == 0) for i in range(8)])
                for _ in range(layers)
            ]
        )
        for layer in model:
            fully_shard(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for param in model.parameters():
            optimizer.state[param] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
        found: dict[str, float] = {}
        began = time.perf_counter()
        plan = new_checkpoint(SimulatedRankGroup(), "unused", model, optimizer, {"step": 1}, None)
        found["write"] = time.perf_counter() - began
        began = time.perf_counter()
        text = manifests.text_of(
            Manifest(
                data="data-000000000000",
                world=world,
                tensors=plan.tensors,
                files={rank: FileRecord(0, 0) for rank in range(world)},
                tied=plan.tied,
                optimizer=plan.optimizer,
            )
        )
        found["manifest"] = time.perf_counter() - began
        found["manifest bytes"] = len(text)
        began = time.perf_counter()
        source = StoredCheckpoint(Path("unused"), manifests.parse(text.encode(), Path("unused")))
        for target in compare_with_source(source, model, optimizer).targets:
            for want in target.requests:
                for block, _ in want.parts:
                    list(plan.tensors[want.key].sharding.overlapping(block))
        found["read"] = time.perf_counter() - began
        found["tensors"] = len(plan.tensors)
    return found


# --- output ----------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--megabytes", type=int, default=1074, help="of parameters in fp32 (default 1074)")
    add("--ranks", type=int, default=2, help="processes (default 2)")
    add("--rounds", type=int, default=5, help="turns of each contestant (default 5)")
    add("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    add("--worlds", type=int, nargs="*", default=[8, 64, 512, 4096], help="for planning")
    add("--layers", type=int, default=80, help="of the model that is planned for (default 80)")
    add("--json", type=Path, metavar="FILE", help="write samples")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    return parser.parse_args(arguments)


def beside_table(found: dict[str, Any]) -> str:
    """What was measured on a GPU."""
    rows = [
        ("step, median before", f"{median(found['before']) * 1e3:.1f} ms"),
        ("the call of async_save", f"{found['call'] * 1e3:.1f} ms"),
        *[
            (f"step {number} after it", f"{seconds * 1e3:.1f} ms")
            for number, seconds in enumerate(found["after"], start=1)
        ],
        (f"until {found['bytes'] / 1e9:.2f} GB were complete", f"{found['until complete']:.2f} s"),
        ("a save that waits", f"{found['save']:.2f} s"),
    ]
    return markdown(("what", "time"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then print the tables."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        head = header("checkpoint.py", torch.device("cuda"), options.commit, arguments)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = saving_beside(Path(folder), options.megabytes)
        write_json(options.json, head, found)
        print(f"\n{headline(head)}\n\n{beside_table(found)}")
        return
    head = header("checkpoint.py", torch.device("cpu"), options.commit, arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        samples = measure(Path(folder), options.megabytes, options.ranks, options.rounds)
    rows = []
    for what, by_name in samples.items():
        ours, theirs = (by_name[name] for name in NAMES)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        rows.append(
            (
                what,
                f"{median(ours):.2f}",
                f"{median(theirs):.2f}",
                f"{median(ratios):.3f}",
                f"{min(ratios):.3f} to {max(ratios):.3f}",
            )
        )
    planning = {world: plan_times(world, options.layers) for world in options.worlds}
    write_json(options.json, head, {"samples": samples, "planning": planning})
    print(f"\n{headline(head)}\n")
    print(
        f"{options.megabytes / 1e3:.2f} GB of parameters and twice as much AdamW state on {options.ranks} ranks; medians "
        f"of {options.rounds} rounds, ratios within rounds.\n"
    )
    print(markdown(("what", "fullshard s", "DCP s", "ratio", "all rounds"), rows))
    print()
    print(
        markdown(
            ("ranks", "tensors", "plan a write, s", "manifest, s", "its MB", "plan a read, s"),
            [
                (
                    str(world),
                    str(found["tensors"]),
                    f"{found['write']:.3f}",
                    f"{found['manifest']:.3f}",
                    f"{found['manifest bytes'] / 1e6:.2f}",
                    f"{found['read']:.3f}",
                )
                for world, found in planning.items()
            ],
        )
    )


if __name__ == "__main__":
    main()
