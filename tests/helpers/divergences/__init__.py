"""Programs in which one rank does something else than the others, and what must become of each.

    @kind(names=["layers.1"])
    def a_rank_skips_a_layer(me: Rank) -> None:
        run = Training(me)
        run.steps(2)
        if me.diverges():
            run.net.order.remove(1)
        run.go_on()

All ranks run the program; `me.diverges()` is true on the odd one. A divergence must end every rank that survives in
`DivergenceError` within `LIMIT_S`, and the message must name the odd rank and a module or a function. A legal
difference (`legal=True`) must end well.

    python -m tests.helpers.divergences            # prints the table of all kinds
    python -m tests.helpers.divergences --backend stand-in

The kinds are in the modules of this package; `all_kinds` imports them.
"""

from __future__ import annotations

import importlib
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.mesh.backends import backend_named
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers import stand_in
from tests.helpers.fake import fake_world
from tests.helpers.rank_programs import Job, JobResult, Rank, why_not_apart

LIMIT_S = 15.0
"""How long after the divergence the last rank may end, on a machine that has a processor whenever a rank needs one."""

MODULES = ("legal", "exits", "collectives", "steps", "meshes", "wrapper", "modules")
"""The modules with kinds. Those that wait longest come first."""

NOBODY = -1
"""Instead of the odd rank, where all ranks do the same."""

FULLY_SHARD = "fully_shard"
WRAPPER = "wrapper"

Program = Callable[[Rank], None]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of divergence, or of a difference that is legal."""

    name: str
    job: Job
    api: str
    legal: bool
    odd_ends: str
    """How the odd rank ends: the type of an exception, "well", "exit CODE", "SIGKILL" or "stopped"."""
    others_end: str
    """How the other ranks end. Those that wait in torch's own collectives may get a RuntimeError with a note."""
    names: tuple[str, ...]
    """Modules or functions, of which the message must name one."""
    needs_meetings: bool
    """Whether it is found only where ranks meet before each collective."""
    needs_aborts: bool
    """Whether it can happen only on a backend with an abort."""
    needs_host_waits: bool
    """Whether it is found only where the host waits for torch's own collectives. On NCCL hosts go on, ranks seem to wait alike, and
    only the limit for hung collectives ends them."""
    is_variant: bool
    """Whether another kind goes the same way. Variants are in the table that is printed, not among the tests."""

    def without_divergence(self) -> Kind:
        """Return the same program without an odd rank: all must end well."""
        return replace(self, legal=True, job=replace(self.job, odd=NOBODY))

    def why_not_on(self, backend: str) -> str | None:
        """Return why it cannot be shown on a backend, if so."""
        manners = backend_named(backend)
        if self.needs_meetings and not manners.has_meetings:
            return f"ranks do not meet before each collective on {backend}"
        if self.needs_aborts and not manners.has_aborts:
            return f"{backend} has no abort"
        if self.needs_host_waits and manners.is_on_stream:
            return f"the host does not wait for torch's own collectives on {backend}"
        return why_not_apart() if self.job.is_apart else None

    def on(self, backend: str, ranks: int = 0) -> Kind:
        """Return the same on another backend, and on at least so many ranks."""
        job = replace(self.job, backend=backend, ranks=max(self.job.ranks, ranks))
        if backend in (stand_in.NAME, "nccl"):
            # Threads of the stand-in are Python's. One that comes back from gloo while the interpreter ends would abort the process.
            # So does torch's thread for NCCL if it asks the GPU while the driver shuts down.
            job = replace(job, tears_down=False)
        return replace(self, job=job)

    def problems(self, result: JobResult) -> list[str]:
        """Return what is wrong with the way a job of this kind ended."""
        odd = self.job.odd
        problems = []
        if result.diverged is None and odd != NOBODY:
            problems.append(f"rank {odd} did not get to the divergence")
        for rank, end in enumerate(result.ends):
            expected = "well" if self.legal else self.odd_ends if rank == odd else self.others_end
            actual = outcome(end)
            if actual not in expected.split(" or "):
                problems.append(f"rank {rank}: {actual}, and not {expected}")
            elif actual == "DivergenceError" or "onnection closed" in end.message:
                problems += [f"rank {rank}: {each}" for each in self._missing_in(end.message)]
            limit = LIMIT_S + result.starved
            if not self.legal and actual != "stopped" and result.seconds(rank) > limit:
                problems.append(
                    f"rank {rank} ended {result.seconds(rank):.1f} s after the divergence"
                )
        return problems

    def _missing_in(self, message: str) -> list[str]:
        missing = []
        if not re.search(rf"\branks? ([\d, ]|and )*\b{self.job.odd}\b", message, re.IGNORECASE):
            missing.append(f"the message does not name rank {self.job.odd}")
        if self.names and not any(name in message for name in self.names):
            missing.append(f"the message names none of {', '.join(self.names)}")
        library = re.search(r"\b(contextlib|threading|functools)\.py:\d+", message)
        if library is not None:
            missing.append(f"the message names {library[0]}, which is not the user's line")
        headline = message.partition("\n")[0]
        gone = re.search(r"diverged: (.*), while others wait", headline)
        if self.is_killed and (gone is None or gone[1] != f"rank {self.job.odd} died"):
            missing.append(f"the message does not begin with the death of rank {self.job.odd}")
        return missing

    @property
    def is_killed(self) -> bool:
        """Whether others see the odd rank die without a word. They end because of that, and must not be taken for the first."""
        return self.odd_ends in ("SIGKILL", "SIGSEGV", "exit 3") and not self.job.is_apart


def outcome(end: Any) -> str:
    """Return in a word or two how a rank ended."""
    if end.hung:
        return "hung"
    if end.code is None:
        return "stopped"
    if end.code < 0:
        return signal.Signals(-end.code).name
    if end.raised and end.raised != "SystemExit":
        return str(end.raised) if end.code == 1 else f"{end.raised}, then exit {end.code}"
    return "well" if end.code == 0 else f"exit {end.code}"


KINDS: dict[str, Kind] = {}


def kind(
    *,
    ranks: int = 2,
    odd: int = 1,
    api: str = FULLY_SHARD,
    legal: bool = False,
    odd_ends: str = "DivergenceError",
    others_end: str = "DivergenceError",
    names: Sequence[str] = (),
    needs_meetings: bool = False,
    needs_aborts: bool = False,
    needs_host_waits: bool = False,
    is_apart: bool = False,
    store_on_rank_0: bool = False,
    resumed_after_s: float | None = None,
    tears_down: bool = False,
    is_variant: bool = False,
) -> Callable[[Program], Program]:
    """Add a program to the kinds."""

    def add(program: Program) -> Program:
        job = Job(
            program=program,
            ranks=ranks,
            odd=odd,
            store_on_rank_0=store_on_rank_0,
            is_apart=is_apart,
            resumed_after_s=resumed_after_s,
            tears_down=tears_down,
        )
        name = program.__name__
        assert name not in KINDS, f"two kinds are called {name}"
        KINDS[name] = Kind(
            name=name,
            job=job,
            api=api,
            legal=legal,
            odd_ends=odd_ends,
            others_end=others_end,
            names=tuple(names),
            needs_meetings=needs_meetings,
            needs_aborts=needs_aborts,
            needs_host_waits=needs_host_waits,
            is_variant=is_variant,
        )
        return program

    return add


def all_kinds() -> dict[str, Kind]:
    """Return all kinds by name."""
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
    return KINDS


# --- what the programs train --------------------------------------------------------------------------------------

WIDTH = 4
MANY_STEPS = 6
"""How many steps follow a divergence: enough to notice it, few enough to end soon where no rank does."""
UNMET_STEPS = 100
UNMET_PAUSE_S = 0.1
"""How many steps more, and how far apart, where ranks compare their journals in the background only."""


def device_type() -> str:
    """Return the type of device that ranks train on."""
    return torch.get_default_device().type


class Block(nn.Module):
    """Two parameters of equal size."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width, bias=False)
        self.second = nn.Linear(width, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    """Three equal blocks, a branch of another size, and a head."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(width), Block()])
        self.branch = Block(7)
        self.head = nn.Linear(WIDTH, 3)
        self.order = [0, 1, 2]
        """Which layers are called."""
        self.takes_branch = False

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        if self.takes_branch:
            x = self.branch(x)
        return self.head(x)


def shard(net: Net, **options: Any) -> Net:
    """Shard each block and the root."""
    for module in [*net.layers, net.branch]:
        fully_shard(module, **options)
    fully_shard(net, **options)
    return net


def wrap(net: Net, **options: Any) -> FullyShardedDataParallel:
    """Wrap each block and the root."""
    policy = ModuleWrapPolicy({Block})
    arguments = {"auto_wrap_policy": policy, "device_id": torch.device(device_type()), **options}
    return FullyShardedDataParallel(net, **arguments)


def plan_operations() -> None:
    """Let DTensor plan the operations of `Training`, so that new processes need not.

    Planning took more time in a rank than training. Plans are kept by `spare_torch_costs`.
    """
    for world_size in (2, 3, 4):
        for rank in range(world_size):
            with fake_world(world_size, rank):
                _plan_operations(shard(Net()))
                if world_size == 4:
                    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
                    _plan_operations(shard(Net(), mesh=mesh))


def _plan_operations(net: Net) -> None:
    optimizer = new_optimizer(net)
    for _ in range(2):  # the first step makes the momentum
        for param in net.parameters():
            param.grad = param.detach()
        optimizer.step()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters that are trained."""
    trainable = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.SGD(trainable, lr=0.01, momentum=0.9)


class Training:
    """A rank that trains a small net: by default one that `fully_shard` was applied to."""

    def __init__(self, me: Rank, model: nn.Module | None = None) -> None:
        self.me = me
        self.model: Any = shard(Net()) if model is None else model
        self.net: Any = getattr(self.model, "module", self.model)
        self.optimizer = new_optimizer(self.model)

    def batch(self, rows: int = 2) -> Tensor:
        """Return this rank's next batch."""
        return torch.randn(rows, WIDTH)

    def loss(self, rows: int = 2) -> Tensor:
        """Return the loss of the next batch."""
        return self.model(self.batch(rows)).square().mean()

    def update(self) -> None:
        """Step, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, number: int, rows: int = 2) -> None:
        """Train for some steps."""
        for _ in range(number):
            self.loss(rows).backward()
            self.update()

    def go_on(self) -> None:
        """Train for long enough that a divergence must show, and end as a good program does."""
        self.steps(MANY_STEPS)
        if not backend_named(self.me.backend).has_meetings:
            for _ in range(UNMET_STEPS):
                time.sleep(UNMET_PAUSE_S)
                self.steps(1)
        self.end()

    def end(self) -> None:
        """End as a good program does."""
        dist.destroy_process_group()
