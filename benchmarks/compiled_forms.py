"""Show in which forms compiled blocks train when they are sharded, as with torch's FSDP2: losses, graphs, recompilations.

    python -m benchmarks.compiled_forms                   # all forms, on two gloo ranks
    python -m benchmarks.compiled_forms --only wrapper    # forms with this in the name

Every form trains a small decoder for 50 steps that include what makes compilers compile again: every second step only
accumulates, some steps are followed by an evaluation without gradients or in inference mode, one block is frozen, and one is
recomputed in backward. Blocks are compiled with ``fullgraph=True``, so a break in one is an error. ``new graphs`` counts what
was compiled after the first 12 steps. Losses must be those of the same form under torch's FSDP2 to the last bit, and for
the wrapper, which torch cannot train on a CPU, those of the same model without compiler. The exit status is 1 if one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

STEPS, WARM = 50, 12
BACKEND = "aot_eager"
WIDTH = 8


class Mlp(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        y: Tensor = x + self.mlp(self.norm(x))
        return y


class Net(nn.Module):
    """Blocks between two layers; the last block is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        x = self.first(x)
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x)
        x = checkpoint(last, x, use_reentrant=False) if self.training else last(x)
        y: Tensor = self.last(x).square().mean()
        return y


@dataclass(frozen=True)
class Library:
    """The two APIs of one library."""

    fully_shard: Callable[..., Any]
    wrapper: Callable[..., Any]


def library(name: str) -> Library:
    """Return torch's functions, or fullshard's."""
    if name == "torch":
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        return Library(fully_shard, FullyShardedDataParallel)
    import fullshard

    return Library(fullshard.fully_shard, fullshard.FullyShardedDataParallel)


Form = Callable[[Any, Library, dict[str, Any]], Any]
"""Compiles and shards a model, with these options of `torch.compile`."""


def block_compile_then_shard(net: Any, to: Library, how: dict[str, Any]) -> Any:
    """`block.compile()`, then `fully_shard`."""
    for block in net.blocks:
        block.compile(fullgraph=True, **how)
        to.fully_shard(block)
    return to.fully_shard(net)


def shard_then_block_compile(net: Any, to: Library, how: dict[str, Any]) -> Any:
    """`fully_shard`, then `block.compile()`."""
    for block in net.blocks:
        to.fully_shard(block).compile(fullgraph=True, **how)
    return to.fully_shard(net)


def torch_compile_then_shard(net: Any, to: Library, how: dict[str, Any]) -> Any:
    """`torch.compile(block)`, then `fully_shard`."""
    for index, block in enumerate(net.blocks):
        net.blocks[index] = compiled = torch.compile(block, fullgraph=True, **how)
        to.fully_shard(compiled)
    return to.fully_shard(net)


def shard_then_torch_compile(net: Any, to: Library, how: dict[str, Any]) -> Any:
    """`fully_shard`, then `torch.compile(block)`."""
    for index, block in enumerate(net.blocks):
        net.blocks[index] = torch.compile(to.fully_shard(block), fullgraph=True, **how)
    return to.fully_shard(net)


def lists_of_compiled_blocks(net: Any, to: Library, how: dict[str, Any]) -> Any:
    """Lists of compiled blocks."""
    for block in net.blocks:
        block.compile(fullgraph=True, **how)
    to.fully_shard([net.blocks[0], net.blocks[1]])
    to.fully_shard([net.blocks[2], net.blocks[3], net.last])
    return to.fully_shard(net)


def compiled_in_a_checkpoint_wrapper(net: Any, to: Library, how: dict[str, Any]) -> Any:
    """Compiled blocks in checkpoint wrappers."""
    for index, block in enumerate(net.blocks):
        net.blocks[index] = to.fully_shard(
            checkpoint_wrapper(cast(Any, torch.compile(block, fullgraph=True, **how)))
        )
    return to.fully_shard(net)


def compiled_forward(net: Any, to: Library, how: dict[str, Any]) -> Any:
    """`torch.compile(block.forward)`."""
    for block in net.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, **how)
        to.fully_shard(block)
    return to.fully_shard(net)


def part_of_a_block(net: Any, to: Library, how: dict[str, Any]) -> Any:
    """A part of each block."""
    for block in net.blocks:
        block.mlp.compile(fullgraph=True, **how)
        to.fully_shard(block)
    return to.fully_shard(net)


def compiled_root(net: Any, to: Library, how: dict[str, Any]) -> Any:
    """`root.compile()`, then `fully_shard`."""
    net.compile(**how)
    for block in net.blocks:
        to.fully_shard(block)
    return to.fully_shard(net)


def torch_compile_of_the_root(net: Any, to: Library, how: dict[str, Any]) -> Any:
    """`fully_shard`, then `torch.compile(root)`."""
    for block in net.blocks:
        to.fully_shard(block)
    return torch.compile(to.fully_shard(net), **how)


FULLY_SHARD: dict[str, Form] = {
    (form.__doc__ or "").rstrip("."): form
    for form in (
        block_compile_then_shard,
        shard_then_block_compile,
        torch_compile_then_shard,
        shard_then_torch_compile,
        lists_of_compiled_blocks,
        compiled_in_a_checkpoint_wrapper,
        compiled_forward,
        part_of_a_block,
        compiled_root,
        torch_compile_of_the_root,
    )
}


def wrapped(use_orig_params: bool, form: str) -> Form:
    """Return a form with `FullyShardedDataParallel`."""

    def build(net: Any, to: Library, how: dict[str, Any]) -> Any:
        options: dict[str, Any] = {
            "use_orig_params": use_orig_params,
            "device_id": torch.device("cpu"),
        }
        for index, block in enumerate(net.blocks):
            inner: Any = block
            if form == "block.compile()":
                block.compile(fullgraph=True, **how)
            elif form == "torch.compile(block)":
                inner = torch.compile(block, fullgraph=True, **how)
            net.blocks[index] = to.wrapper(inner, **options)
        root = to.wrapper(net, **options)
        return torch.compile(root, **how) if form == "torch.compile(wrapper)" else root

    return build


WRAPPER: dict[str, Form] = {
    f"wrapper, `{form}`, `use_orig_params={flag}`": wrapped(flag, form)
    for form in ("block.compile()", "torch.compile(block)", "torch.compile(wrapper)")
    for flag in (True, False)
}


@dataclass(frozen=True)
class Trained:
    """What training a form has shown."""

    losses: list[float]
    graphs: int
    """Graphs of the first steps."""
    new_graphs: int
    """Graphs of all later steps."""


def train(form: Form, to: Library, steps: int = STEPS, backend: str = BACKEND) -> Trained:
    """Train a form on this rank."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model: Any = form(Net(), to, {"backend": backend})
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    losses, graphs = [], []
    for step in range(steps):
        model.train()
        with without_reducing(model) if step % 2 == 0 else contextlib.nullcontext():
            loss = model(batch(step))
            losses.append(loss.item())
            loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        if step % 5 == 0:
            model.eval()
            with torch.inference_mode() if step % 10 == 5 else torch.no_grad():
                losses.append(model(batch(step)).item())
        graphs.append(int(dynamo.utils.counters["stats"]["unique_graphs"]))
    return Trained(losses, graphs[min(WARM, steps) - 1], graphs[-1] - graphs[min(WARM, steps) - 1])


def batch(step: int) -> Tensor:
    """Return this rank's part of a batch."""
    whole = torch.randn(
        4 * dist.get_world_size(), WIDTH, generator=torch.Generator().manual_seed(step)
    )
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


@contextlib.contextmanager
def without_reducing(model: Any) -> Iterator[None]:
    """Within it, gradients add up on each rank, with both APIs."""
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "set_requires_gradient_sync"):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


# --- the table ------------------------------------------------------------------------------------


def run_rank(rank: int, folder: str, names: list[str]) -> None:
    """Train all forms on a rank; the first one prints the table."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    ok = True
    for name in names:
        form = (FULLY_SHARD | WRAPPER)[name]
        ours = outcome(form, library("fullshard"), BACKEND)
        others = outcome(form, library("torch"), BACKEND)
        expected = others
        if name in WRAPPER:  # torch's needs an accelerator
            expected = outcome(form, library("fullshard"), "eager")
        same = good = False
        if isinstance(ours, Trained) and isinstance(expected, Trained):
            same = ours.losses == expected.losses
            good = same and ours.graphs <= expected.graphs and not ours.new_graphs
        ok = ok and good
        if rank == 0:
            cells = [name, cell(ours), cell(others), "equal" if same else "differ"]
            print("| " + " | ".join(cells) + " |", flush=True)
    dist.destroy_process_group()
    if not ok:
        raise SystemExit(1)


def outcome(form: Form, to: Library, backend: str) -> Trained | str:
    """Return what a form has shown, or its error's first line."""
    try:
        return train(form, to, backend=backend)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


def cell(found: Trained | str) -> str:
    """Return graphs and new graphs, or the error."""
    return found if isinstance(found, str) else f"{found.graphs}, {found.new_graphs} new"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="forms with this in the name")
    only = parser.parse_args().only
    names = [name for name in FULLY_SHARD | WRAPPER if only in name]
    print(f"torch {torch.__version__}, 2 gloo ranks, {STEPS} steps, {BACKEND}\n", flush=True)
    print(
        "| form | graphs with fullshard | graphs with torch | losses |\n|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, names), nprocs=2)


if __name__ == "__main__":
    main()
