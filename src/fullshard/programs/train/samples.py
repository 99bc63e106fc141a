"""Text that the model generates, on all ranks together: each forward of a sharded model is a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import SamplesSection
from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.tokenised_records import Prompts
from fullshard.programs.train.tokenizer import Tokenizer


@torch.no_grad()
def write_samples(
    model: nn.Module,
    source: ModelSource,
    tokenizer: Tokenizer,
    section: SamplesSection,
    *,
    opening: Sequence[int],
    prompts: Prompts | None = None,
    seed: int,
    context: int,
    device: torch.device,
) -> list[str]:
    """Return texts that continue the prompt, prompts included. All ranks call it, and get the same.

    Args:
        model: The model, sharded or not.
        source: Source of the model.
        tokenizer: Tokenizer of its tokens.
        section: Number and kind of the texts.
        opening: The tokens of the prompt, if the section has none.
        prompts: Prompts for the model; None if it goes on from a text.
        seed: Decides the texts.
        context: Tokens the model sees at once.
        device: Device that computes.

    Raises:
        ConfigurationError: the prompt has tokens that the model does not know. Raised before the first forward.
    """
    if not section.count:
        return []
    prompt = list(opening)
    if section.prompt is not None or not prompt:
        text = section.prompt or ""
        asked = prompts.asking(text) if prompts is not None else tokenizer.encode(text)
        prompt = _prompt(asked, tokenizer, text, source.vocabulary)
    end = len(prompt) + section.tokens
    # Filled from the left and always of one shape, which compilers need: no position sees what is to its right.
    texts = torch.zeros(section.count, end, dtype=torch.int64)
    texts[:, : len(prompt)] = torch.tensor(prompt)
    generator = torch.Generator().manual_seed(seed)
    width = min(end, context)
    was_training = model.training
    model.eval()
    try:
        for position in range(len(prompt), end):
            start = max(0, position - width)
            scores = source.scores(model, texts[:, start : start + width].to(device))
            last = scores[:, position - 1 - start].float().cpu()
            texts[:, position] = _agreed(_choose(last, section.temperature, generator), device)
    finally:
        model.train(was_training)
    mark = "" if prompts is None else prompts.end
    return [_shown(text, len(prompt), tokenizer, mark) for text in texts.tolist()]


def _shown(tokens: list[int], num_asked: int, tokenizer: Tokenizer, end: str) -> str:
    """Return the text of a prompt and what the model writes, up to where its answer ends."""
    if not end:
        return tokenizer.decode(tokens)
    answer = tokenizer.decode(tokens[num_asked:])
    return tokenizer.decode(tokens[:num_asked]) + answer.partition(end)[0].rstrip()


def _prompt(tokens: list[int], tokenizer: Tokenizer, text: str, vocabulary: int) -> list[int]:
    """Return the tokens of the prompt: at least one, even if the text has none."""
    tokens = tokens or tokenizer.encode("\n") or [0]
    unknown = sorted({token for token in tokens if token >= vocabulary})
    if unknown:
        raise ConfigurationError(
            f"samples.prompt must be made of tokens below the model's vocabulary of {vocabulary}, but "
            f"{text!r} has {', '.join(map(str, unknown))}. Give another prompt, or samples.count 0."
        )
    return tokens


def _choose(scores: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Return a token for each row of scores. NaNs of a model that has diverged count as zero."""
    scores = scores.nan_to_num()
    if temperature == 0:
        return scores.argmax(dim=-1)
    chances = torch.softmax(scores / temperature, dim=-1)
    return torch.multinomial(chances, 1, generator=generator)[:, 0]


def _agreed(tokens: Tensor, device: torch.device) -> Tensor:
    """Return the tokens of rank 0: ranks on different machines may differ in the last bit of a score."""
    if not dist.is_initialized():
        return tokens
    tokens = tokens.to(device)
    dist.broadcast(tokens, src=0)
    return tokens.cpu()
