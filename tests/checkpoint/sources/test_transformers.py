"""Models of transformers: saved by it, loaded in shards, trained, saved, and loaded by it again.

Only the ranks import transformers, which takes seconds, and once for all that is here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.checkpoint.sources.huggingface import (
    HuggingFaceFolder,
    load_huggingface,
    save_huggingface,
)
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.compare import assert_equal

TOKENS = torch.arange(24).view(2, 12) % 19


def llama() -> nn.Module:
    """Several files when saved; uneven for two ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 19, "hidden_size": 12, "intermediate_size": 15, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            **sizes, num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=16
        )
    )


def gpt2() -> nn.Module:
    """The head is the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=19,
            n_positions=16,
            n_embd=12,
            n_layer=2,
            n_head=3,
            bos_token_id=0,
            eos_token_id=0,
            **dropout,
        )
    )


def layers_of(model: nn.Module) -> Any:
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def sharded(model: nn.Module) -> nn.Module:
    for layer in layers_of(model):
        fully_shard(layer)
    return fully_shard(model)


def wrapped(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({type(layers_of(model)[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def trained(model: nn.Module) -> nn.Module:
    """Two steps on the same batch on all ranks: their mean is what one process has, to the last bit."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    return model.eval()(TOKENS).logits


def there_and_back(folder: Path, build: Any, max_bytes: int) -> list[str]:
    """What transformers makes of a model that went through shards; names of files on the way back."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    origin = folder / "origin"
    first = build()
    if dist.get_rank() == 0:
        first.save_pretrained(origin, max_shard_size=max_bytes)
    dist.barrier()
    alone = trained(type(first).from_pretrained(origin))
    found = []
    for api in (sharded, wrapped):
        torch.manual_seed(1)
        model = api(build())
        load_huggingface(origin, model)
        trained(model)
        save_huggingface(
            folder / api.__name__, model, config_from=first.config, max_file_bytes=max_bytes
        )
        again = type(first).from_pretrained(folder / api.__name__)
        assert_equal(again.state_dict(), alone.state_dict())
        assert_equal(logits_of(again), logits_of(alone))
        found = sorted(path.name for path in (folder / api.__name__).iterdir())
        assert set(HuggingFaceFolder(folder / api.__name__).tensors) == set(
            HuggingFaceFolder(origin).tensors
        )

    bf16 = folder / "bf16"
    save_huggingface(bf16, model, config_from=origin, dtype=torch.bfloat16)
    assert json.loads((bf16 / "config.json").read_text())["dtype"] == "bfloat16"
    assert_equal(
        type(first).from_pretrained(bf16, dtype="auto").state_dict(),
        alone.to(torch.bfloat16).state_dict(),
    )
    return found


def test_a_llama_in_several_files_goes_there_and_back(world: Any, tmp_path: Path) -> None:
    (files, _) = world(2).run(there_and_back, tmp_path, llama, 4000)
    assert files[0] == "config.json" and files[-1] == "model.safetensors.index.json"
    assert len(files) > 4


def test_a_gpt2_with_tied_embeddings_goes_there_and_back(world: Any, tmp_path: Path) -> None:
    (files, _) = world(2).run(there_and_back, tmp_path, gpt2, 10**9)
    assert files == ["config.json", "model.safetensors"]
