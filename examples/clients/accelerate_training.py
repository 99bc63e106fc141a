"""Train with Accelerate, which shards with FSDP2 or FSDP1.

    torchrun --nproc-per-node 2 -m examples.clients.accelerate_training                    # torch's FSDP
    torchrun --nproc-per-node 2 -m fullshard.run -m examples.clients.accelerate_training   # fullshard

`accelerate launch` in the place of `torchrun` works, too.
"""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import TorchDynamoPlugin

from examples.clients import accelerate_on_cpu, small_task
from examples.clients.small_task import BATCH, Trained


def command_line() -> argparse.ArgumentParser:
    """Return the options of this program."""
    parser = small_task.parser(__doc__)
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument("--state-dict", choices=("full", "sharded"), default="sharded")
    parser.add_argument("--flat-parameters", action="store_true", help="FSDP1 only")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--cpu-ram-efficient-loading", action="store_true")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="each layer by itself")
    parser.add_argument("--tied", action="store_true", help="one embedding for input and output")
    return parser


def make_accelerator(options: argparse.Namespace) -> Accelerator:
    """Choose FSDP's options as Accelerate names them."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=options.fsdp_version,
        reshard_after_forward=True if options.fsdp_version == 2 else "FULL_SHARD",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=f"{options.state_dict.upper()}_STATE_DICT",
        use_orig_params=None if options.fsdp_version == 2 else not options.flat_parameters,
        cpu_ram_efficient_loading=options.cpu_ram_efficient_loading,
        activation_checkpointing=options.activation_checkpointing,
    )
    return Accelerator(
        cpu=not small_task.on_gpu(),
        mixed_precision="bf16" if options.bf16 else "no",
        gradient_accumulation_steps=options.microbatches,
        fsdp_plugin=None if options.unsharded else plugin,
        dynamo_plugin=TorchDynamoPlugin(
            backend="aot_eager" if options.compile else "no", use_regional_compilation=True
        ),
    )


def train(options: argparse.Namespace) -> Trained:
    """Train, save after one of the steps, and return the losses."""
    if not options.unsharded:
        accelerate_on_cpu.allow_fsdp()
    accelerator = make_accelerator(options)
    share = BATCH // accelerator.num_processes // options.microbatches
    model = small_task.small_llama(seed=1 if options.resume else 0, tied=options.tied)
    if (
        options.flat_parameters
    ):  # the optimizer's parameters are there only after the model is wrapped
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(small_task.loader(share))
    first = 0
    if options.resume:
        accelerator.load_state(str(options.resume))
        first = options.save_after
        loader = accelerator.skip_first_batches(loader, first * options.microbatches)

    losses: list[float] = []
    microbatches: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        microbatches.append(loss.item())
        if not accelerator.sync_gradients:
            continue
        losses.append(sum(microbatches) / len(microbatches))
        microbatches = []
        step = first + len(losses)
        if options.folder and step == options.save_after:
            accelerator.save_state(str(options.folder))
        if step == options.steps:
            break
    return Trained(losses=losses, model=model)


if __name__ == "__main__":
    small_task.run(train, command_line())
