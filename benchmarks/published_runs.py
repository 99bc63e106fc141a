"""Published training runs, planned with the shipped profiles: predicted and published throughput side by side.

    python benchmarks/published_runs.py
    python benchmarks/published_runs.py --match torchtitan --parts       # and where the time goes

Rows say what their authors say: the model, the GPUs, the network, the options. Nothing is tuned per row. Where a source
says nothing about its network, the profile's default stands.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_models import PublishedModel
from fullshard.programs.plan_tool.machine import GIB, Machine
from fullshard.programs.plan_tool.planned_step import PlannedStep, plan_step
from fullshard.programs.plan_tool.playback import Playback
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.train.config import (
    ComputeSection,
    DataSection,
    Precision,
    Recomputation,
    RunConfig,
    ShardingSection,
    TrainSection,
)
from fullshard.programs.train.model_source import ModelSource

GOAL, WORST = 0.10, 0.20
"""Errors: at least 80 % of the rows within the first, none beyond the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A published run. Throughput is in tokens per second and GPU."""

    source: str
    model: str
    gpu: str
    gpus: int
    batch: int
    """Per GPU."""
    length: int
    tokens_per_second: float
    recompute: Recomputation = "none"
    """Selective is torchtitan's policy `op`."""
    recomputed_blocks: int = 0
    """If only some."""
    is_compiled: bool = False
    replicas: int = 1
    """HSDP, if there are several."""
    wire: Precision = "fp32"
    """Of gradients."""
    network: float | None = None
    """Gb/s per host, if the source says it."""
    reserved_gib: float | None = None
    """Memory that the allocator took, if the source says it."""
    is_listed: bool = True
    """One of those that were given to us; the others were found later, as a check."""
    is_new: bool = False
    """It was first planned after the profiles were settled."""

    @property
    def group(self) -> str:
        """How it came here."""
        return "listed" if self.is_listed else "new" if self.is_new else "found later"

    @property
    def machine(self) -> Machine:
        """The profile, with the network of the source."""
        machine = load_profile(self.gpu)
        return machine.with_network(gbit_per_host=self.network) if self.network else machine


def yafsdp(
    model: str, gpus: int, length: int, seconds: float, *, listed: bool, blocks: int = 0
) -> Row:
    """A row of YaFSDP's README: seconds per iteration of torch's FSDP with one sequence per GPU."""
    return Row(
        source="YaFSDP README",
        model=model,
        gpu="a100-80",
        gpus=gpus,
        batch=1,
        length=length,
        tokens_per_second=length / seconds,
        recomputed_blocks=blocks,
        is_listed=listed,
    )


def foundry(
    model: str,
    gpu: str,
    gpus: int,
    batch: int,
    tokens_per_second: float,
    *,
    recompute: Recomputation = "none",
    wire: Precision = "fp32",
) -> Row:
    """A row of llm-foundry's benchmarks, with windows of 2048 tokens; a batch is a microbatch.

    The gradients of 30 B would not fit without sharding, so Composer must have reduced them after each microbatch, and each is
    planned as a step. The optimizer, which ran once for all, is then counted too often.
    """
    return Row(
        source="llm-foundry 2023",
        model=model,
        gpu=gpu,
        gpus=gpus,
        batch=batch,
        length=2048,
        recompute=recompute,
        wire=wire,
        network=1600 if gpu.startswith("a100") else None,
        tokens_per_second=tokens_per_second,
        is_listed=False,
        is_new=True,
    )


TITAN = Row(
    source="torchtitan 2024-12",
    model="Llama 3 8B",
    gpu="h100-500w",
    gpus=8,
    batch=2,
    length=8192,
    recompute="selective",
    tokens_per_second=5762,
    reserved_gib=82.4,
)
TITAN_165 = replace(TITAN, source="torchtitan#165", model="Llama 2 7B", batch=8, length=2048)
TITAN_A100 = replace(
    TITAN,
    source="torchtitan 2024-06",
    gpu="a100-80",
    gpus=64,
    batch=1,
    network=1600,  # not in the source: what a DGX A100 has
    reserved_gib=None,
    is_listed=False,
)
IBM_A100 = Row(
    source="IBM and Meta 2024-03",
    model="Llama 2 7B",
    gpu="a100-80",
    gpus=128,
    batch=2,
    length=4096,
    network=400,
    tokens_per_second=3700,
)
IBM_H100 = replace(IBM_A100, gpu="h100", gpus=96, network=800, tokens_per_second=7500)
IBM_EARLY = replace(IBM_A100, source="fms-fsdp README", is_listed=False, is_new=True)
TORCHAO = replace(
    TITAN,
    source="torchao README",
    batch=1,
    is_compiled=True,
    tokens_per_second=6150,
    reserved_gib=47.65,
    is_listed=False,
    is_new=True,
)
TITAN_A100_NEW = replace(TITAN_A100, is_new=True)
PAPER = Row(
    source="FSDP paper",
    model="GPT 175B",
    gpu="a100-80",
    gpus=128,
    batch=1,
    length=2048,
    recompute="blocks",
    network=2000,
    # 173 TFLOPS per GPU, which count recomputation, as Megatron does: 8 per parameter and token, and attention.
    tokens_per_second=173e12 / (8 * 174.6e9 * (1 + 2048 / (6 * 12288))),
)

ROWS = (
    TITAN,
    replace(TITAN, is_compiled=True, tokens_per_second=6667, reserved_gib=77.0),
    replace(TITAN_165, recompute="blocks", tokens_per_second=6200, reserved_gib=0.326 * 95),
    replace(TITAN_165, tokens_per_second=6700, reserved_gib=0.625 * 95),
    replace(TITAN_165, is_compiled=True, tokens_per_second=8250, reserved_gib=0.538 * 95),
    replace(
        TITAN_165,
        recompute="none",
        is_compiled=True,
        tokens_per_second=9200,
        reserved_gib=0.903 * 95,
    ),
    replace(
        TITAN,
        source="torchtitan#929",
        batch=1,
        is_compiled=True,
        tokens_per_second=6500,
        reserved_gib=44,
    ),
    IBM_A100,
    IBM_H100,
    yafsdp("Llama 2 7B", 64, 2048, 0.90, listed=True),
    yafsdp("Llama 2 7B", 64, 4096, 1.21, listed=True),
    yafsdp("Llama 2 7B", 64, 8192, 2.29, listed=True),
    yafsdp("Llama 2 7B", 128, 2048, 0.97, listed=True),
    yafsdp("Llama 2 7B", 128, 4096, 1.22, listed=True),
    yafsdp("Llama 2 7B", 128, 8192, 2.31, listed=True),
    PAPER,
    replace(PAPER, gpus=512),
    # Those that were found later.
    replace(TITAN, gpus=128, tokens_per_second=5605, reserved_gib=67.0, is_listed=False),
    replace(
        TITAN,
        gpus=128,
        is_compiled=True,
        tokens_per_second=6514,
        reserved_gib=62.0,
        is_listed=False,
    ),
    replace(TITAN_A100, tokens_per_second=2973),
    replace(TITAN_A100, model="Llama 3 70B", recompute="blocks", tokens_per_second=323),
    replace(
        TITAN_A100,
        model="Llama 2 13B",
        batch=2,
        length=4096,
        recompute="none",
        tokens_per_second=2162,
    ),
    replace(TITAN_A100, model="Llama 2 13B", batch=2, length=4096, tokens_per_second=1904),
    replace(
        TITAN_A100,
        model="Llama 2 70B",
        batch=2,
        length=4096,
        recompute="blocks",
        tokens_per_second=353,
    ),
    replace(
        IBM_A100, model="Llama 2 34B", recompute="blocks", tokens_per_second=700, is_listed=False
    ),
    replace(
        IBM_A100, model="Llama 2 70B", recompute="blocks", tokens_per_second=370, is_listed=False
    ),
    replace(
        IBM_H100, model="Llama 2 34B", recompute="blocks", tokens_per_second=1550, is_listed=False
    ),
    replace(
        IBM_H100, model="Llama 2 70B", recompute="blocks", tokens_per_second=800, is_listed=False
    ),
    yafsdp("Llama 2 13B", 128, 2048, 1.76, listed=False),
    yafsdp("Llama 2 13B", 128, 4096, 2.14, listed=False),
    yafsdp("Llama 2 34B", 128, 2048, 4.27, listed=False),
    yafsdp("Llama 2 34B", 256, 2048, 4.50, listed=False),
    yafsdp("Llama 2 70B", 256, 2048, 8.87, listed=False, blocks=10),
    yafsdp("Llama 2 70B", 256, 4096, 11.93, listed=False, blocks=50),
    yafsdp("Llama 3 8B", 64, 2048, 1.10, listed=False),
    yafsdp("Llama 3 8B", 64, 4096, 1.48, listed=False),
    # Those that were found after the profiles were settled.
    replace(TITAN_A100_NEW, recompute="none", recomputed_blocks=16, tokens_per_second=2904),
    replace(
        TITAN_A100_NEW,
        model="Llama 2 13B",
        batch=2,
        length=4096,
        recompute="none",
        recomputed_blocks=20,
        tokens_per_second=1914,
    ),
    replace(TITAN_A100_NEW, model="Llama 2 70B", length=4096, tokens_per_second=355),
    TORCHAO,
    # Replicas of fms-fsdp reduce in bfloat16. Those of fullshard always do in float32.
    replace(IBM_EARLY, replicas=16, tokens_per_second=3760),
    replace(IBM_EARLY, model="Llama 2 13B", batch=1, replicas=16, tokens_per_second=1700),
    replace(IBM_EARLY, model="Llama 2 34B", batch=8, recompute="blocks", tokens_per_second=772),
    replace(IBM_EARLY, model="Llama 2 70B", batch=6, recompute="blocks", tokens_per_second=380),
    foundry("MPT 760M", "h100", 32, 24, 67971),
    foundry("MPT 1B", "h100", 8, 14, 45455),
    foundry("MPT 7B", "h100", 8, 6, 10643),
    foundry("MPT 13B", "h100", 8, 2, 4792),
    foundry("MPT 13B", "h100", 64, 2, 4800),
    foundry("MPT 30B", "h100", 32, 14, 2308, recompute="blocks"),
    foundry("MPT 70B", "h100", 64, 8, 1039, recompute="blocks"),
    foundry("MPT 1B", "a100-80", 8, 14, 20513),
    foundry("MPT 7B", "a100-80", 8, 6, 4641),
    foundry("MPT 13B", "a100-80", 8, 2, 2262),
    foundry("MPT 30B", "a100-80", 8, 3, 916, recompute="blocks"),
    foundry("MPT 70B", "a100-80", 64, 8, 410, recompute="blocks", wire="bf16"),
    foundry("MPT 7B", "a100-40", 8, 12, 3679, recompute="blocks", wire="bf16"),
    foundry("MPT 30B", "a100-40", 128, 6, 865, recompute="blocks", wire="bf16"),
    foundry("MPT 70B", "a100-40", 64, 2, 276, recompute="blocks", wire="bf16"),
)
"""Sources: /pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md, issues 165 and 929, docs/performance.md of June
2024; pytorch.org/blog/maximizing-training; README of yandex/YaFSDP; arXiv 2304.11277; README of
foundation-model-stack/fms-fsdp, commit 0d31998; docs of /pytorch/ao on float8 and mxfp8 training, rows in bfloat16;
scripts/train/benchmarking of mosaicml/llm-foundry. Ranges stand as their middle."""


def plan_of(row: Row) -> PlannedStep:
    """Plan the step of a row."""
    config = RunConfig(
        data=DataSection(context=row.length),
        train=TrainSection(batch=row.batch * row.gpus),
        sharding=ShardingSection(replicas=row.replicas),
        compute=ComputeSection(
            precision="bf16",
            checkpoint_activations=row.recompute,
            wire=row.wire,
            compile="blocks" if row.is_compiled else "none",
        ),
    )
    model = PublishedModel(row.model, recomputed_blocks=row.recomputed_blocks)
    # The planner never asks a source for weights, a tokenizer or an export.
    return plan_step(config, row.gpus, row.machine, cast(ModelSource, model))


def parts_of(played: Playback) -> str:
    """Return where the time goes, in milliseconds."""
    parts = {**played.compute, **{f"idle for {reason}": t for reason, t in played.idle.items()}}
    shown = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in parts.items())
    wire = ", ".join(f"{kind} {seconds * 1e3:.0f}" for kind, seconds in played.collectives.items())
    return f"    {played.seconds * 1e3:.0f} ms: {shown}; on the wire: {wire}; host {played.host_seconds * 1e3:.0f}"


def describe(row: Row) -> str:
    """Return what distinguishes a row."""
    options = [
        row.recompute if row.recompute != "none" else "",
        f"{row.recomputed_blocks} blocks" if row.recomputed_blocks else "",
        f"{row.replicas} replicas" if row.replicas > 1 else "",
        f"{row.wire} wire" if row.wire != "fp32" else "",
        "compiled" if row.is_compiled else "",
    ]
    run = f"{row.source}, {row.model}, {row.gpus} {row.gpu}, {row.batch} x {row.length}"
    return " ".join(filter(None, [run, *options]))


def compared(predicted: float, published: float) -> str:
    """Return two numbers and their difference."""
    return f"{predicted:7.4g} {published:7.4g} {predicted / published - 1:+7.1%}"


def main() -> None:
    """Plan the rows, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--match", default="", help="only rows with this text")
    parser.add_argument("--listed", action="store_true", help="only the rows that were given to us")
    parser.add_argument("--parts", action="store_true", help="also print where the time goes")
    options = parser.parse_args()
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for row in ROWS:
        if options.match not in describe(row) or (options.listed and not row.is_listed):
            continue
        planned = plan_of(row)
        errors[row.group].append(abs(planned.tokens_per_second / row.tokens_per_second - 1))
        line = f"{describe(row):80} {compared(planned.tokens_per_second, row.tokens_per_second)}"
        if row.reserved_gib:
            line += f"  GiB {compared(planned.memory.reserved / GIB, row.reserved_gib)}"
        print(line if row.is_listed else f"{line}  ({row.group})", flush=True)
        if options.parts:
            print(parts_of(planned.playback), flush=True)
    for group, found in errors.items():
        good = sum(error <= GOAL for error in found) / len(found)
        print(
            f"{group}: {good:.0%} of {len(found)} within {GOAL:.0%}, worst {max(found):.1%}, "
            f"median {statistics.median(found):.1%}"
        )


if __name__ == "__main__":
    main()
