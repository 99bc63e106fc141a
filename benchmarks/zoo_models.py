"""Small models of all language model classes that transformers has, for `zoo.py`.

Classes come from the library's own mappings: causal, masked and sequence-to-sequence. A class's configuration is built from its
defaults. Every number is made small by a rule for its name (`_RULES`), as are the numbers of configurations within it. Lists
with an entry per layer are shortened, and keep every kind of layer. What the rules cannot know stands in `_SPECIAL`, by
the configuration's `model_type`.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["MAPPINGS", "Batch", "class_names", "layers_of", "make_batch", "small_model"]

Batch = dict[str, Tensor]

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, SEQUENCES = 2, 64, 4, 128, 16, 2
FEWEST_TOKENS = 30
"""No vocabulary is smaller."""
MAX_NUMEL = 10_000_000
HEAD_WIDTH = WIDTH // HEADS

_RULES: tuple[tuple[str, float], ...] = (
    (r"dropout|drop(_|$)|pdrop|jitter|layerdrop", 0.0),
    (r"vocab(ulary)?_size", VOCABULARY),
    (r"^pad_token_id", 0),
    (r"^(bos|decoder_start)_token_id", 1),
    (r"^eos_token_id", 2),
    (r"_token_(id|index)$", 3),
    (r"lora_(rank|dim)|_rank$", 16),
    (r"first_k_dense_replace", 1),
    (r"^(n_group|num_expert_group)$", 2),
    (r"topk_group", 1),
    (r"(experts?_per_tok(en)?|experts?_top_?k|moe_top_?k|moe_k|_top_?k(_experts?)?)$", 2),
    (r"shared_experts?$", 1),
    (r"(num|n).*_experts?$|moe_num_experts$", 4),
    (r"mamba_(n|num)_heads|(^|_)ssm_num_heads", 2 * HEADS),
    (r"(n|num).*(kv|key_value)_heads|multi_query_group_num|linear_num_key_heads", HEADS // 2),
    (r"(num|n)_?(.*_)?heads?$|attention_heads", HEADS),
    (r"qk_rope_head_dim|qk_pos_emb_head_dim", HEAD_WIDTH // 2),
    (r"qk_nope_head_dim|qk_head_dim", HEAD_WIDTH),
    (r"head_(dim|size)$|^d_kv$|kv_channels|_d_head$|rotary_dim", HEAD_WIDTH),
    (r"(num|n).*_layers?$|^(en|de)coder_layers$|^num_(en|de)coder_blocks|n_layer$|^num_blocks$", LAYERS),
    (r"(state_size|d_state)$", 16),
    (r"(moe|expert).*(intermediate|ffn|hidden).*(size|dim)", WIDTH // 2),
    (r"intermediate|ffn|(^|_)d_ff|n_inner|ff_(size|dim)|inner_size|feed_forward", 2 * WIDTH),
    (r"^(hidden|embedding|embed|emb|model|encoder_hidden|decoder_hidden|output|true_hidden)_(size|dim)$", WIDTH),
    (r"^(d_model|n_embd|dim|hidden_dim|attention_hidden_size|lru_width|word_embed_proj_dim|dim_model)$", WIDTH),
    (r"max_.*(position|len)|n_positions|n_ctx|max_seq|context_length|_positions$", 4 * LENGTH),
    (r"chunk_size|block_size$", LENGTH),
    (r"sliding_window$|attention_window", LENGTH // 2),
)  # fmt: skip
"""What the name of a number looks like, and what it becomes; the first that fits counts."""

_MISSING: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "head_dim": HEAD_WIDTH,
    "num_key_value_heads": HEADS // 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""Numbers that some configurations leave to the user."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LINEAR_AND_HYBRID = {  # whose hybrid layers share weights, so there have to be two
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_hidden_layers": 4,
    "attention_hidden_size": 2 * WIDTH,
}
_SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE),
    },
    "funnel": {"block_sizes": [1, 1]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 2 * HEADS},  # of twice the width
    "mobilebert": {"intra_bottleneck_size": WIDTH, "embedding_size": WIDTH},
    "perceiver": {
        "max_position_embeddings": LENGTH,
        "num_latents": LENGTH,
        "d_latents": WIDTH,
        "num_self_attends_per_block": LAYERS,
    },
    "reformer": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [WIDTH // 4, 3 * WIDTH // 4],
        "attn_layers": ["local", "lsh"],
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": _LINEAR_AND_HYBRID,
    "zamba2": _LINEAR_AND_HYBRID,
}  # fmt: skip
"""By model_type, or name of the class: what the rules cannot know."""


def class_names() -> dict[str, str]:
    """Return the kinds of all language model classes, by the names of the classes."""
    module = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, str] = {}
    for kind, mapping in MAPPINGS.items():
        for names in getattr(module, mapping).values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return dict(sorted(found.items()))


def small_model(name: str) -> nn.Module:
    """Build a model of a class in float32, always with the same weights; ValueError if it is not small."""
    model_class = getattr(transformers, name)
    config = small_config(model_class.config_class)
    for field, value in _SPECIAL.get(name, {}).items():
        setattr(config, field, value)
    torch.manual_seed(0)
    model: nn.Module = model_class(config)
    numel = sum(param.numel() for param in model.parameters())
    if numel > MAX_NUMEL:
        raise ValueError(f"no small configuration is known: {numel:,} parameters")
    return model.float().train()


def small_config(config_class: Any) -> Any:
    """Return a configuration of a class with small numbers."""
    default = config_class()
    config = config_class(**_small_values(default))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def _small_values(default: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name.startswith("_"):
            continue
        if isinstance(value, transformers.PretrainedConfig):
            values[name] = small_config(type(value))
        elif name in ("head_dim", "qk_head_dim") and "qk_rope_head_dim" in vars(default):
            # Latent attention: a head has two parts, and only the part with positions counts here.
            if name == "head_dim":
                values[name] = HEAD_WIDTH // 2
        elif name == "num_key_value_heads" and value == getattr(default, "num_attention_heads", 0):
            values[name] = HEADS  # every head has its own
        elif value is None and name in _MISSING:
            values[name] = _MISSING[name]
        else:
            small = _small(name, value)
            if small is not None:
                values[name] = small
    values |= {"use_cache": False, **_SPECIAL.get(default.model_type, {})}
    layers = {
        value
        for name, value in vars(default).items()
        if isinstance(value, int) and re.search(r"(num|n).*_layers?$|^n_layer$", name)
    }
    trial = type(default)(**values)
    for name, value in vars(trial).items():
        if isinstance(value, (list, tuple)) and len(value) > LAYERS and len(value) in layers:
            values[name] = _shorter(value)
    return values


def _small(name: str, value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    for pattern, small in _RULES:
        if re.search(pattern, name):
            if small == 0.0 and isinstance(small, float):
                return type(value)(0)
            if isinstance(value, float) or value == 0:
                return None
            return int(small) if value > small or "token" in name else None
    return None


def _shorter(values: Any) -> Any:
    """Shorten a list with an entry per layer: keep its first two kinds of layer."""
    kinds = list(dict.fromkeys(map(repr, values)))
    first = [next(v for v in values if repr(v) == kind) for kind in kinds[:LAYERS]]
    return type(values)([*first, *values[: LAYERS - len(first)]])


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers: all modules in lists that are not within another layer, and share no parameter with another."""
    found: dict[nn.Module, None] = {}

    def look(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList):
                found[child] = None
            else:
                look(child)

    look(model)
    users = Counter(param for layer in found for param in set(layer.parameters()))
    return [
        layer
        for layer in found
        if (params := list(layer.parameters())) and all(users[param] == 1 for param in params)
    ]


def make_batch(seed: int) -> Batch:
    """Return token ids and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, FEWEST_TOKENS, (SEQUENCES, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
