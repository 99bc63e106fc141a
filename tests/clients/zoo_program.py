"""In the place of `benchmarks.zoo_training`: models whose second rank dies or hangs in fullshard's wrapper, and others."""

import argparse
import os
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--api")
    parser.add_argument("--join-inputs", action="store_true")
    return parser


def train(options: argparse.Namespace) -> SimpleNamespace:
    model: nn.Module = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    if options.api == "fully_shard":
        fsdp.fully_shard(model)
    elif options.api == "wrapper":
        model = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    ours = fsdp.fully_shard.__module__.startswith("fullshard") and options.api != "unsharded"
    if ours and options.api == "wrapper" and dist.get_rank() == 1:
        if options.name == "Dies":
            os._exit(3)
        if options.name == "Hangs":
            time.sleep(1000)
    if options.name == "Unknown":
        raise ValueError("no configuration is known")
    loss = 2.0 if ours and options.name == "Wrong" else 1.0
    return SimpleNamespace(losses=[loss], checks=[], saved=[1.0], model=model)
