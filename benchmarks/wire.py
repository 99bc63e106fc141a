"""What it costs and what it gives to send gradients in bf16 and to sum them in fp32 (`wire_dtype`).

Three ways to reduce bf16 gradients are compared: in bf16, in fp32, and exchanged in bf16 and summed in
fp32. One process is rank 0 of a `fake` group, as in step.py; accuracy is of real gloo ranks, and of sums
as ranks would make them where there are too many for one machine.

    python benchmarks/wire.py --preset 12x768 --preset 1.2b --world 8    # on a GPU
    python benchmarks/wire.py                                            # on a CPU

sent      bytes that a rank sends in a step to reduce gradients: (world - 1) / world of what is handed to
          collectives, in a reduce-scatter as in an all-to-all
fwd+bwd   as in step.py; the fake group sends nothing, so these are the copies, casts and sums around it
error     root mean square of the difference from the fp64 mean over ranks, over that of the mean
"""

import argparse
import gc
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import (
    Contestant,
    Setting,
    build_functional,
    build_wrapped,
    join_fake_group,
)
from benchmarks.measure import collector_paused, peaks_of, release_memory, timed
from benchmarks.report import commit_of, hardware, markdown
from benchmarks.transformer import PRESETS, Shape
from fullshard import MixedPrecisionPolicy, fully_shard

BF16, FP32 = torch.bfloat16, torch.float32
REDUCTIONS: Mapping[str, dict[str, torch.dtype]] = MappingProxyType(
    {
        "bf16": {"reduce_dtype": BF16},
        "fp32": {"reduce_dtype": FP32},
        "bf16 wire, fp32 sum": {"reduce_dtype": FP32, "wire_dtype": BF16},
    }
)
APIS = MappingProxyType(
    {
        "fully_shard": partial(build_functional, "fullshard"),
        "wrapper": partial(build_wrapped, "fullshard", flat=False),
    }
)
GLOO_WORLDS, SIMULATED_WORLDS = (2, 4), (8, 64, 512)
GRADIENT = (64, 256)
"""Shape of the gradient whose accuracy is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireSetting(Setting):
    """A setting with one of the ways to reduce."""

    reduction: str

    @property
    def mixed_precision(self) -> dict[str, Any]:
        """Keyword arguments of fullshard's mixed precision policy."""
        return {"param_dtype": BF16, **REDUCTIONS[self.reduction]}


class Sent(TorchDispatchMode):
    """Bytes that this rank would send to reduce gradients while the mode is active."""

    def __init__(self, world: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world = world
        self.nbytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d" and (
            "reduce_scatter" in func.name() or "alltoall" in func.name()
        ):
            handed = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            self.nbytes += sum(t.nbytes for t in handed) * (self.world - 1) / self.world
        return func(*args, **(kwargs or {}))


def peaks_beyond(
    before: tuple[int, int], contestant: Contestant, device: torch.device
) -> list[str]:
    """Peak GiB of allocated and reserved memory beyond what was there before the contestant."""
    if device.type != "cuda":
        return ["n/a", "n/a"]
    peaks = peaks_of(contestant, device)
    return [f"{(peak - was) / 2**30:.3f}" for peak, was in zip(peaks, before, strict=True)]


def built(api: str, reduction: str, shape: Shape, device: torch.device, world: int) -> Contestant:
    """A contestant that has taken a few steps."""
    setting = WireSetting(
        shape=shape,
        device=device,
        world=world,
        precision="bf16",
        master="fp32",
        reduction=reduction,
    )
    contestant = Contestant(f"{api}, {reduction}", APIS[api](setting), setting)
    contestant.check()
    for _ in range(3):
        contestant.zero_grad()
        contestant.forward_backward()
    return contestant


def steps_table(shape: Shape, device: torch.device, world: int, rounds: int, steps: int) -> str:
    """Bytes, memory and time of a step, for each api and way to reduce."""
    facts: dict[str, list[str]] = {}
    samples: dict[str, tuple[list[float], list[float]]] = {}
    pairs = [(api, reduction) for api in APIS for reduction in REDUCTIONS]
    for api, reduction in pairs:
        release_memory(device)
        before = (0, 0)
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        contestant = built(api, reduction, shape, device, world)
        contestant.zero_grad()
        with Sent(world) as sent:
            contestant.forward_backward()
        peaks = peaks_beyond(before, contestant, device)
        facts[contestant.name] = [f"{sent.nbytes / 2**20:,.1f}", *peaks]
        del contestant
    release_memory(device)
    contestants = [built(api, reduction, shape, device, world) for api, reduction in pairs]
    for turn in range(rounds):
        shift = turn % len(contestants)
        for contestant in contestants[shift:] + contestants[:shift]:
            device_ms, host_ms = samples.setdefault(contestant.name, ([], []))
            with collector_paused():
                contestant.zero_grad()
                contestant.forward_backward()  # not timed: it fills the caches again
                for _ in range(steps):
                    contestant.zero_grad()
                    timing = timed(contestant.forward_backward, device)
                    device_ms.append(1e3 * timing.device_s)
                    host_ms.append(1e3 * timing.host_s)
    columns = (
        "reduction",
        "sent MiB",
        "peak alloc GiB",
        "peak reserved GiB",
        "fwd+bwd ms",
        "host ms",
    )
    medians = {name: [f"{statistics.median(each):.2f}" for each in samples[name]] for name in facts}
    return markdown(columns, [(name, *facts[name], *medians[name]) for name in facts])


# --- accuracy -----------------------------------------------------------------------------------------


class Given(nn.Module):
    """A weight whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(GRADIENT))

    def forward(self, gradient: Tensor) -> Tensor:
        """Return what has the gradient ``gradient``."""
        return (self.weight * gradient).sum()


def gradients_of(world: int) -> Tensor:
    """One bf16 gradient per rank: noise around something that all have in common."""
    generator = torch.Generator().manual_seed(world)
    common = torch.randn(GRADIENT, generator=generator)
    return (common + torch.randn(world, *GRADIENT, generator=generator)).to(BF16)


def error_of(mean: Tensor, world: int) -> float:
    """See the module docstring."""
    exact = gradients_of(world).double().mean(0)
    return float((mean.double() - exact).norm() / exact.norm())


def rank_main(rank: int, world: int, folder: str) -> None:
    """Reduce in all ways on one of several gloo ranks; rank 0 writes the errors to a file."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    errors = []
    for dtypes in REDUCTIONS.values():
        policy = MixedPrecisionPolicy(
            BF16, dtypes["reduce_dtype"], wire_dtype=dtypes.get("wire_dtype")
        )
        mesh = init_device_mesh("cpu", (world,))
        model: Any = fully_shard(Given(), mesh=mesh, mp_policy=policy)
        model(gradients_of(world)[rank]).backward()
        errors.append(error_of(model.weight.grad.full_tensor(), world))
    if rank == 0:
        torch.save(errors, f"{folder}/errors")
    dist.destroy_process_group()


def errors_on_ranks(world: int) -> list[float]:
    """Of every way to reduce, as this machine's ranks compute it."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (world, folder), nprocs=world)
        errors: list[float] = torch.load(f"{folder}/errors")
    return errors


def errors_of_sums(world: int) -> list[float]:
    """The same of sums as ranks make them: one after the other around a ring, or all at once by the receiver."""
    gradients = gradients_of(world)
    errors = []
    for dtypes in REDUCTIONS.values():
        if "wire_dtype" in dtypes:
            total = torch.sum(gradients, 0, dtype=dtypes["reduce_dtype"])
        else:
            total = gradients[0].to(dtypes["reduce_dtype"])
            for gradient in gradients[1:]:
                total = total + gradient.to(total.dtype)
        errors.append(error_of(total / world, world))
    return errors


def accuracy_table() -> str:
    """Errors by number of ranks."""
    rows = [(f"{n}, gloo", *map("{:.1e}".format, errors_on_ranks(n))) for n in GLOO_WORLDS]
    rows += [
        (f"{n}, sums alone", *map("{:.1e}".format, errors_of_sums(n))) for n in SIMULATED_WORLDS
    ]
    return markdown(("ranks", *REDUCTIONS), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", action="append", choices=list(PRESETS), help="model size; may be repeated")
    add("--world", type=int, default=8, help="ranks of the fake group (default 8)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--rounds", type=int, default=8, help="turns of each contestant")
    add("--steps", type=int, default=3, help="timed steps of each turn")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    options = parser.parse_args(arguments)
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cpu":
        torch.set_num_threads(1)
    commit = options.commit or commit_of(Path(__file__).parent)
    print(f"{hardware(device)}, torch {torch.__version__}, commit {commit}\n")
    print(f"Error:\n\n{accuracy_table()}\n", flush=True)
    join_fake_group(options.world)
    gc.freeze()
    for preset in options.preset or ["12x768" if kind == "cuda" else "tiny"]:
        table = steps_table(PRESETS[preset], device, options.world, options.rounds, options.steps)
        print(f"{preset}, world {options.world}:\n\n{table}\n", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
