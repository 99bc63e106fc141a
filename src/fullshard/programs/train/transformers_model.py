"""Models of transformers: any folder with the configuration of a causal language model.

A model is built with its parameters on the meta device and with real buffers: buffers such as the frequencies of rotary
positions are computed where they are registered, and are in no checkpoint.

Starting weights are drawn by the model's own `_init_weights`, one **unit** at a time. A layer with all its modules is a
unit, because some models initialise a layer's modules from the layer (GPT-2 scales its projections). Outside of layers
each module is a unit.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fullshard.checkpoint import load_huggingface
from fullshard.errors import ConfigurationError
from fullshard.programs.named_models.published import name_of
from fullshard.programs.train.chat_template import template_files
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.exported_model import ExportForm
from fullshard.programs.train.packed_windows import positions, visible
from fullshard.programs.train.tokenizer import copy_files, open_tokenizer
from fullshard.programs.train.weights import DrawnWeights, fill, materialise, seed_of

POSITIONS = "position_ids"

CONFIGURATION_FILES = ("config.json", "generation_config.json", "*.py")
"""Names of the files in a model's folder that describe the model."""


class TransformersModel:
    """A causal language model of transformers; a `ModelSource`."""

    def __init__(self, config: RunConfig) -> None:
        """Read the model's configuration.

        Raises:
            ConfigurationError: transformers is missing, or cannot build a causal language model from the folder.
        """
        folder = config.model.huggingface
        assert folder is not None, "other models are not transformers'"
        self._config = config
        self._folder = folder
        self._takes_positions = False
        """Whether the model that was built last takes the positions of tokens."""
        self._pretrained = config.model.pretrained
        self.tokenizer = open_tokenizer(config)
        self._configuration = _configuration(folder)
        self.vocabulary: int = self._configuration.get_text_config().vocab_size
        kind = f"{self._configuration.model_type} of transformers"
        self.description = (
            f"{name} ({kind})" if (name := name_of(folder)) else f"{kind} in {folder}"
        )

    def build(self) -> nn.Module:
        """Return the model: parameters on the meta device, in float32, and real buffers."""
        from transformers import AutoModelForCausalLM

        # The model owns its configuration and changes it.
        configuration = copy.deepcopy(self._configuration)
        try:
            with parameters_on_meta():
                model: nn.Module = AutoModelForCausalLM.from_config(
                    configuration, trust_remote_code=False
                )
        except (
            ValueError,
            ImportError,
        ) as error:  # not a causal model; code or a package is missing
            raise ConfigurationError(
                f"transformers must be able to make a causal language model of {self._folder}: {error}"
            ) from error
        self._takes_positions = POSITIONS in inspect.signature(model.forward).parameters
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return its layers: the outermost list of modules with the most parameters."""
        lists = [list(each) for each in _outermost_lists(model)]
        return max(lists, key=_numel, default=[])

    def fill(self, model: nn.Module, *, seed: int) -> None:
        """Draw its starting weights, or read those of the folder."""
        if self._pretrained:
            load_huggingface(self._folder, model)
        else:
            skeleton = self.build()
            fill(model, starting_weights(skeleton, self.blocks(skeleton), seed=seed))

    def scores(self, model: nn.Module, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return the model's scores."""
        options: dict[str, Tensor] = {}
        if segments is not None:
            # Added to the products of queries and keys; the model has the dtype of compute, and casts it.
            seen = visible(segments)
            options["attention_mask"] = torch.zeros(seen.shape, device=seen.device).masked_fill(
                ~seen, -torch.inf
            )
            if self._takes_positions:
                options["position_ids"] = positions(segments)
        scores: Tensor = model(input_ids=tokens, use_cache=False, **options).logits
        return scores

    def export_form(self) -> ExportForm:
        """Return its configuration and tokenizer; its weights have the names that transformers knows."""
        return ExportForm(
            companions=(
                _ConfigurationFiles(self._folder),
                self.tokenizer,
                *template_files(self._config),
            )
        )


def _configuration(folder: Path) -> Any:
    """Return the configuration in a folder, with float32 as the dtype of parameters. Compute may use another one."""
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    except ImportError as error:
        raise ConfigurationError(
            f"model.huggingface needs the package transformers: {error}. "
            "Install fullshard[transformers]."
        ) from error
    try:
        configuration = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (
        Exception
    ) as error:  # whatever transformers raises on a configuration it does not understand
        raise ConfigurationError(
            f"model.huggingface must be a folder with the config.json of a model; {folder}: {error}"
        ) from error
    if type(configuration) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigurationError(
            f"model.huggingface must be a causal language model that transformers knows; {folder} has a "
            f"{type(configuration).__name__}. Take the folder of another model."
        )
    # The name was torch_dtype until transformers 4.56.
    setattr(
        configuration, "dtype" if hasattr(configuration, "dtype") else "torch_dtype", torch.float32
    )
    return configuration


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move parameters of modules that are built within the block to the meta device, as they are registered.

    Their memory is freed at once. It is rarely touched, because modules initialise parameters after registering them.
    """

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # tied ones are registered again, and stay tied
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]  # may return one
    try:
        yield
    finally:
        handle.remove()


def starting_weights(skeleton: nn.Module, blocks: list[nn.Module], *, seed: int) -> DrawnWeights:
    """Return the starting weights of a model of transformers."""
    names = {module: name for name, module in skeleton.named_modules()}
    prefixes = [f"{names[block]}." for block in blocks]

    def draw(name: str) -> dict[str, Tensor]:
        block = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        unit = name.rpartition(".")[0] if block is None else block.removesuffix(".")
        tensors = _drawn_unit(skeleton, unit, with_submodules=block is not None, seed=seed)
        return {f"{unit}.{part}" if unit else part: tensor for part, tensor in tensors.items()}

    return DrawnWeights(skeleton, draw)


@torch.no_grad()
def _drawn_unit(
    skeleton: nn.Module, unit: str, *, with_submodules: bool, seed: int
) -> dict[str, Tensor]:
    """Return the tensors of a module; with those of its submodules if ``with_submodules``."""
    module = skeleton.get_submodule(unit)
    kept = {} if with_submodules else {id(child): child for child in module.children()}
    module = copy.deepcopy(module, kept)
    materialise(module, torch.device("cpu"), recurse=with_submodules)
    for parameter in module.parameters(recurse=with_submodules):
        parameter.fill_(torch.nan)  # to notice parameters that are not initialised
    initialise = _initialiser(skeleton, unit)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(f"{seed} {unit}"))
        if with_submodules:
            module.apply(initialise)
        else:
            initialise(module)
    found = {name: each for name, each in module.state_dict().items() if not each.is_meta}
    forgotten = [
        f"{unit}.{name}"
        for name, each in found.items()
        if each.is_floating_point() and each.isnan().any()
    ]
    if forgotten:
        raise ConfigurationError(
            f"Models must initialise all of their parameters; {type(skeleton).__name__} does not initialise "
            f"{', '.join(forgotten)}. Start from existing weights: model.pretrained."
        )
    return found


def _initialiser(skeleton: nn.Module, unit: str) -> Callable[[nn.Module], None]:
    """Return the function that initialises a unit's modules: that of the innermost model of transformers around it."""
    parts = unit.split(".")
    around = [skeleton.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    innermost: Any = [module for module in around if hasattr(module, "_init_weights")][-1]
    initialise: Callable[[nn.Module], None] = innermost._init_weights
    return initialise


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _numel(modules: list[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


class _ConfigurationFiles:
    """The files in a folder that describe a model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save_pretrained(self, folder: Path) -> None:
        """Copy the files."""
        copy_files(self._folder, CONFIGURATION_FILES, folder)
