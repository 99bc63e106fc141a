"""One rank of `same_numbers.py`: train every configuration and write down the bits of every step.

`same_numbers.py` starts this module once per rank, with the ``src`` of the compared checkout first on the path
and a `Job` as JSON for its argument. Lines of the output file, in the order in which configurations end:

    {"name": "fully_shard.plain", "digests": [["step 0, loss", "9f..."], ...]}
"""

import contextlib
import gc
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from benchmarks.number_models import batch_of

__all__ = ["Digests", "Job", "Place", "Training", "digests_of", "train"]

STEPS = 4
GLOO_TIMEOUT = timedelta(minutes=3)

Digests = list[tuple[str, str]]
"""What a tensor is, and its digest; in the order of training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a rank is told."""

    source: str
    """The folder that fullshard must be imported from."""
    folder: str
    """Where the ranks meet and write."""
    names: tuple[str, ...]
    """Configurations to train, in this order."""
    rank: int
    size: int
    backend: str
    device: str

    @property
    def output(self) -> Path:
        """The file with this rank's digests."""
        return Path(self.folder) / f"rank_{self.rank}.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a configuration is trained."""

    rank: int
    size: int
    device: torch.device
    folder: Path
    """For what a configuration writes; the same for all ranks."""
    begins_on_host: bool = False
    """Whether a model is built on the CPU, wherever it is trained."""

    @property
    def built_on(self) -> torch.device:
        """The device on which a model is built."""
        return torch.device("cpu") if self.begins_on_host else self.device


@dataclass(kw_only=True)
class Training:
    """A model that was sharded, and how it is trained."""

    model: nn.Module
    optimizer: optim.Optimizer
    microbatches: int = 1
    around: Callable[[bool], contextlib.AbstractContextManager[Any]] = field(
        default=lambda is_last: contextlib.nullcontext()
    )
    """Entered around each microbatch, told whether it is the step's last."""
    before_optimizer: Callable[[], Mapping[str, Any]] = dict
    """Called when gradients are complete; returns what else to digest."""
    after_step: Callable[[int], Mapping[str, Any]] = field(default=lambda step: {})
    """Called after the optimizer's step; returns what else to digest."""


def train(training: Training, place: Place) -> Digests:
    """Train a few steps and return the digests of losses, gradients, parameters and the rest."""
    found: Digests = []

    def note(step: int, kind: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            found.append((f"step {step}, {kind} {name}".rstrip(), digest(value)))

    for step in range(STEPS):
        training.optimizer.zero_grad()
        for microbatch in range(training.microbatches):
            with training.around(microbatch + 1 == training.microbatches):
                tokens = batch_of(step, microbatch, place.rank, place.device)
                loss = training.model(tokens)
                loss.backward()
            if not torch.isfinite(loss):
                raise FloatingPointError(f"step {step}: the loss is {loss}, so bits mean nothing")
            note(step, "loss", {f"{microbatch}" if microbatch else "": loss})
        extra = training.before_optimizer()
        params = dict(training.model.named_parameters())
        note(step, "gradient of", {name: param.grad for name, param in params.items()})
        note(step, "before the optimizer,", extra)
        training.optimizer.step()
        note(step, "parameter", dict(training.model.named_parameters()))
        note(step, "afterwards,", training.after_step(step))
    return found


def digest(value: Any) -> str:
    """Return a digest of what this rank holds of a value: types, shapes and bits."""
    state = hashlib.sha256()
    for part in _parts(value):
        state.update(part)
    return state.hexdigest()[:24]


def _parts(value: Any) -> Iterator[bytes]:
    """Yield the bytes that tell a value from others."""
    if isinstance(value, DTensor):
        yield f"DTensor {tuple(value.shape)} {value.placements}".encode()
        yield from _parts(value.to_local())
    elif hasattr(value, "local_shards"):  # a ShardedTensor
        yield f"ShardedTensor {tuple(value.size())}".encode()
        for shard in value.local_shards():
            yield f"{shard.metadata.shard_offsets} {shard.metadata.shard_sizes}".encode()
            yield from _parts(shard.tensor)
    elif hasattr(value, "fsdp_pre_all_gather"):
        yield from _parts(value.data_)
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        data = value.detach().cpu().contiguous().view(-1)
        yield bytes(data.view(torch.uint8).tolist()) if data.numel() else b""
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield f"{key}:".encode()
            yield from _parts(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _parts(each)
    else:
        yield repr(value).encode()


def digests_of(name: str, place: Place) -> Digests:
    """Build one configuration, train it, and leave no trace of it."""
    from benchmarks.number_settings import CONFIGURATIONS

    torch.manual_seed(0)
    found = train(CONFIGURATIONS[name].build(place), place)
    gc.collect()
    return found


def run(job: Job) -> None:
    """Train all configurations of a job; print each name when it is done."""
    import fullshard

    if not Path(fullshard.__file__).is_relative_to(job.source):
        raise RuntimeError(
            f"fullshard was imported from {fullshard.__file__}, not from {job.source}"
        )
    device = torch.device(job.device)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False
    with _process_group(job), job.output.open("w") as output:
        for number, name in enumerate(job.names):
            folder = Path(job.folder) / f"files_{number}"
            place = Place(rank=job.rank, size=job.size, device=device, folder=folder)
            line = {"name": name, "digests": digests_of(name, place)}
            print(json.dumps(line), file=output, flush=True)
            if job.rank == 0:
                print(name, flush=True)


@contextlib.contextmanager
def _process_group(job: Job) -> Iterator[None]:
    """Be a rank of the default process group; after an error, leave without waiting for others."""
    store: dist.Store = dist.FileStore(str(Path(job.folder) / "store"), job.size)
    if job.backend == "echo":
        from benchmarks import echo_group as echo_group

        store = dist.HashStore()
    dist.init_process_group(
        job.backend, store=store, rank=job.rank, world_size=job.size, timeout=GLOO_TIMEOUT
    )
    yield
    dist.barrier()  # a gloo rank that leaves early takes its last message with it
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when whoever started it is gone: its end of our standard input closes."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    told = json.loads(sys.argv[1])
    run(Job(**{**told, "names": tuple(told["names"])}))
