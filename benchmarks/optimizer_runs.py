"""What the benchmarks of optimizers share: their options, and the model whose shards rank 0 updates."""

import argparse
from pathlib import Path

import torch

from benchmarks.contestants import Setting
from benchmarks.transformer import PRESETS


def new_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all of them have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), help="default: 1.2b, or tiny on a CPU")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--world", type=int, default=8, help="ranks of the fake group (default 8)")
    add("--rounds", type=int, default=12, help="turns of each (default 12)")
    add("--json", type=Path, metavar="FILE", help="write samples")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    return parser


def setting_of(options: argparse.Namespace) -> tuple[str, Setting]:
    """Return the name of the preset, and its model on the device, in bf16 on a GPU."""
    on_cuda = (options.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    preset = options.preset or ("1.2b" if on_cuda else "tiny")
    return preset, Setting(
        shape=PRESETS[preset],
        device=torch.device("cuda", 0) if on_cuda else torch.device("cpu"),
        world=options.world,
        precision="bf16" if on_cuda else "fp32",
        master="fp32",
    )
