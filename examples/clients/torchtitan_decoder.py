"""Train torchtitan's Llama 3 decoder, sharded by torchtitan's own `apply_fsdp_to_decoder`; checkpoints with DCP.

torchrun --nproc-per-node 2 -m examples.clients.torchtitan_decoder                    # torch's FSDP
torchrun --nproc-per-node 2 -m fullshard.run -m examples.clients.torchtitan_decoder   # fullshard

With `--compile BACKEND`, torchtitan's `apply_compile` compiles each block as one graph before it is sharded.
"""

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

from examples.clients import small_task
from examples.clients.small_task import BATCH, CONTEXT, VOCABULARY, Trained

WIDTH, HEADS, LAYERS = 32, 4, 2
WEIGHT: dict[str, Any] = {"weight": partial(nn.init.trunc_normal_, std=0.02)}
NORM = RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": nn.init.ones_})


def command_line() -> argparse.ArgumentParser:
    """Return the options of this program."""
    made = small_task.parser(__doc__)
    made.add_argument(
        "--compile", metavar="BACKEND", help="compile the blocks: inductor, aot_eager"
    )
    return made


def decoder_config() -> Llama3Model.Config:
    """Describe the model as torchtitan does."""
    layer = Llama3TransformerBlock.Config(
        attention_norm=NORM,
        ffn_norm=NORM,
        attention=make_gqa_config(
            dim=WIDTH,
            n_heads=HEADS,
            wqkv_param_init=WEIGHT,
            wo_param_init=WEIGHT,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=CONTEXT),
        ),
        feed_forward=make_ffn_config(
            dim=WIDTH, hidden_dim=2 * WIDTH, w1_param_init=WEIGHT, w2w3_param_init=WEIGHT
        ),
    )
    return Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=WEIGHT
        ),
        norm=NORM,
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=WEIGHT),
        layers=[layer] * LAYERS,
    )


def compile_blocks(model: Llama3Model, backend: str) -> None:
    """Compile each block with `fullgraph=True`, as torchtitan does."""
    ranks = dist.get_world_size()
    others = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep"), 1)
    apply_compile(
        model,
        compile_config=CompileConfig(enable=True, components=["model"], backend=backend),
        parallel_dims=ParallelDims(dp_shard=ranks, world_size=ranks, **others),
    )


def make_model(device: torch.device, seed: int, backend: str | None) -> Llama3Model:
    """Build on meta, compile, shard, then allocate and initialize the shards."""
    with torch.device("meta"):
        model = decoder_config().build()
    if backend:
        compile_blocks(model, backend)
    apply_fsdp_to_decoder(
        model,
        init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        pp_enabled=False,
    )
    if (
        device.type == "cpu"
    ):  # gloo has no scaled sum, with which torch would divide gradients by one
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_states(buffer_device=device)
    return model


def train(options: argparse.Namespace) -> Trained:
    """Train, save after one of the steps, and return the losses."""
    device = torch.device("cuda" if small_task.on_gpu() else "cpu")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if small_task.on_gpu() else "gloo")
    model = make_model(device, 1 if options.resume else 0, options.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if options.resume:
        weights, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": optimizer_state}, checkpoint_id=options.resume)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
        first = options.save_after

    losses = []
    for step, batch in enumerate(small_task.rank_batches(first, options.steps, device), first + 1):
        logits = model(batch["input_ids"][:, :-1]).float()
        targets = batch["labels"][:, 1:]
        # torchtitan sums gradients over ranks, so the loss is divided by the tokens of all of them.
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / (BATCH * targets.shape[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if options.folder and step == options.save_after:
            weights, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=options.folder)
    return Trained(losses=losses, model=model)


if __name__ == "__main__":
    small_task.run(train, command_line())
