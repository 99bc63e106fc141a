"""The built-in decoder as a source of models, and its export as a Llama of transformers.

Its weights are those of a Llama under other names, so exporting it means renaming them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fullshard.errors import ConfigurationError
from fullshard.programs.train.chat_template import template_files
from fullshard.programs.train.config import Precision, RunConfig
from fullshard.programs.train.decoder import NORM_EPS, ROTARY_BASE, Decoder
from fullshard.programs.train.decoder_shape import VOCABULARY_UNKNOWN, DecoderShape, decoder_shape
from fullshard.programs.train.exported_model import ExportForm
from fullshard.programs.train.packed_windows import visible
from fullshard.programs.train.tokenizer import open_tokenizer
from fullshard.programs.train.weights import DrawnWeights, fill, seed_of

DTYPES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16"}
"""Dtypes of weights, as transformers names them."""

LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "blocks": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
"""The names of the decoder's modules in a Llama of transformers."""


class BuiltInDecoder:
    """The built-in decoder; a `ModelSource`."""

    def __init__(self, config: RunConfig) -> None:
        """Take the sizes from the configuration, and the vocabulary from there or the tokenizer."""
        self.tokenizer = open_tokenizer(config)
        self._config = config
        self._context = config.data.context
        vocabulary = config.model.vocabulary or self.tokenizer.vocabulary
        if vocabulary is None:
            raise ConfigurationError(VOCABULARY_UNKNOWN)
        self.shape = decoder_shape(config.model, vocabulary)
        self.vocabulary = self.shape.vocabulary
        self.description = (
            f"decoder of {self.shape.layers} layers x {self.shape.width}, {self.shape.heads} heads"
        )

    def build(self) -> nn.Module:
        """Return the decoder on the meta device."""
        return empty_decoder(self.shape)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return its blocks."""
        assert isinstance(model, Decoder)
        return list(model.blocks)

    def fill(self, model: nn.Module, *, seed: int) -> None:
        """Draw its starting weights."""
        fill(model, starting_weights(self.shape, seed=seed))

    def scores(self, model: nn.Module, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return the model's scores. Rotary positions are relative, so they go on from one segment to the next."""
        scores: Tensor = model(tokens, None if segments is None else visible(segments))
        return scores

    def export_form(self) -> ExportForm:
        """Return its form as a Llama."""
        companions = (
            LlamaConfiguration(self.shape, self._context, DTYPES[self._config.model.dtype]),
            self.tokenizer,
            *template_files(self._config),
        )
        return ExportForm(companions=companions, rename=llama_name)


def empty_decoder(shape: DecoderShape) -> Decoder:
    """Return a decoder on the meta device."""
    with torch.device("meta"):
        return Decoder(shape)


def starting_weights(shape: DecoderShape, *, seed: int) -> DrawnWeights:
    """Return the starting weights of a decoder. Each parameter has a generator of its own."""
    skeleton = empty_decoder(shape)
    deviations = {name: deviation for name, _, deviation in skeleton.starting_deviations()}

    def draw(name: str) -> dict[str, Tensor]:
        parameter = torch.empty(skeleton.get_parameter(name).shape)
        deviation = deviations[name]
        if deviation is None:
            parameter.fill_(1.0)
        else:
            generator = torch.Generator().manual_seed(seed_of(f"{seed} {name}"))
            parameter.normal_(std=deviation, generator=generator)
        return {name: parameter}

    return DrawnWeights(skeleton, draw)


def llama_name(name: str) -> str:
    """Return the name of a decoder's parameter in a Llama of transformers."""
    module, _, parameter = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{LLAMA_NAMES[module]}.{parameter}"
    blocks, number, inner = module.split(".", 2)
    return f"{LLAMA_NAMES[blocks]}.{number}.{LLAMA_NAMES[inner]}.{parameter}"


@dataclass(frozen=True, slots=True)
class LlamaConfiguration:
    """The decoder's sizes as a configuration of transformers."""

    shape: DecoderShape
    context: int
    dtype: str

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json`."""
        content = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.shape.vocabulary,
            "hidden_size": self.shape.width,
            "intermediate_size": self.shape.hidden,
            "num_hidden_layers": self.shape.layers,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.heads,
            "head_dim": self.shape.width // self.shape.heads,
            "hidden_act": "silu",
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROTARY_BASE,
            "max_position_embeddings": self.context,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            # The defaults are tokens of Llama's own tokenizer.
            "bos_token_id": None,
            "eos_token_id": None,
        }
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
