"""Ranks compare the weights with which they have built a model: those of other seeds would be mixed.

Each rank keeps its shard of what it had. A model of different weights on each rank is a mixture of all of them, and still
trains, only worse. So the agreement on the model (`agreement`) takes along what `storage.initial_values` has kept. It is a
warning, not an error: the mixture is a model.

Only values that are still there count. A checkpoint that was loaded, or an initialisation after sharding, has replaced them.
A model from the meta device had none: its shards are initialised by each rank for itself, and may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import nn

from fullshard.divergence.model_description import full_name, ranks_in_common
from fullshard.engine.state import FSDPState
from fullshard.errors import names_text
from fullshard.layout.names import clean_name
from fullshard.storage.initial_values import unchanged
from fullshard.transport.streams import is_capturing

Weights = Mapping[str, str]
"""Digests of initial values, by names of parameters."""

_NAMED = 10
"""A warning names so many parameters: with other seeds all matrices differ."""


def take_initial_weights(
    root: nn.Module, states: Sequence[FSDPState]
) -> dict[tuple[int, ...], dict[str, str]]:
    """Return digests of initial weights that the shards still have, by the ranks to compare them with; forget them."""
    if is_capturing():
        return {}  # the host may not wait
    paths = {module: clean_name(name) for name, module in root.named_modules()}
    weights: dict[tuple[int, ...], dict[str, str]] = {}
    for group in (group for state in states for group in state.groups):
        initial = [(param, param.initial) for param in group.params if param.initial is not None]
        for param, _ in initial:
            param.initial = None
        ranks_in_group = ranks_in_common(group.mesh_info) if initial else []
        if not ranks_in_group:
            continue
        samples = unchanged([(each, param.sharded_param.local) for param, each in initial])
        for (param, _), sample in zip(initial, samples, strict=True):
            for ranks in ranks_in_group if sample is not None else ():
                digest = hashlib.sha256(sample or b"").hexdigest()[:8]
                weights.setdefault(ranks, {})[full_name(param, paths)] = digest
    return weights


def weights_text(reports: Sequence[Weights]) -> str:
    """Return the text about different initial weights; "" if those that several ranks have are equal."""
    digests: dict[str, set[str]] = {}
    for weights in reports:
        for name, digest in weights.items():
            digests.setdefault(name, set()).add(digest)
    names = [name for name, found in digests.items() if len(found) > 1]
    if not names:
        return ""
    return (
        f"Ranks have initialised {len(names)} parameters differently, with other seeds perhaps, and each has kept its shard: "
        f"the model is a mixture of theirs. Different are {names_text(names, _NAMED)}. Call torch.manual_seed with the same number on "
        "all ranks before the model is built, load a checkpoint, or build the model on the meta device and initialise its "
        "shards. The wrapper sends the weights of rank 0 to all with sync_module_states=True."
    )
