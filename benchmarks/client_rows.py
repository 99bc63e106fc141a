"""The rows of `clients.py`: programs of `examples/clients` with their options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ROWS", "Row"]

BF16_TOLERANCE = 2e-2
"""Against one process, which rounds elsewhere."""
EIGHT_BITS_TOLERANCE = 2e-3
"""Against one process, which scales activations over the whole batch."""


RESUMING = ("resume", "torch to fullshard", "fullshard to torch")
EMPTY_OPTIMIZER = dict.fromkeys(RESUMING, "Accelerate resumes an empty optimizer")
NO_ADAPTERS = dict.fromkeys(("save", *RESUMING), "PEFT saves no adapters")

NOT_SAVED = dict.fromkeys(("save", *RESUMING), "DCP cannot save them")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One program and its options."""

    client: str
    api: str
    """`fully_shard` or the wrapper."""
    options: str
    """What a reader of the table is told of the arguments."""
    program: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...]
    """Packages that must be installed."""
    tolerance: float = 1e-5
    """The largest relative difference of losses."""
    numbers_per_step: int = 1
    """2 if the program returns each step's gradient norm after its loss."""
    known: Mapping[str, str] = field(default_factory=dict)
    """By column: a bug of others that makes this cell bad, and whose."""
    world: int | None = None
    """How many ranks it needs, if it cannot do with any number."""
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def name(self) -> str:
        """The row in one line."""
        return f"{self.client}, {self.api}, {self.options}"


def _accelerate(version: int, options: str, *arguments: str, **rest: object) -> Row:
    return Row(
        client="Accelerate",
        api="fully_shard" if version == 2 else "wrapper",
        options=options,
        program="examples.clients.accelerate_training",
        arguments=("--fsdp-version", str(version), *arguments),
        needs=("accelerate", "transformers"),
        **rest,  # type: ignore[arg-type]
    )


def _trainer(version: int, options: str, *arguments: str, **rest: object) -> Row:
    return Row(
        client="Trainer",
        api="fully_shard" if version == 2 else "wrapper",
        options=options,
        program="examples.clients.trainer_lora",
        arguments=("--fsdp-version", str(version), *arguments),
        needs=("accelerate", "transformers", *(("peft",) if "LoRA" in options else ())),
        **rest,  # type: ignore[arg-type]
    )


def _trl(version: int, options: str, *arguments: str, **rest: object) -> Row:
    return Row(
        client="TRL",
        api="fully_shard" if version == 2 else "wrapper",
        options=options,
        program="examples.clients.trl_sft",
        arguments=("--fsdp-version", str(version), *arguments),
        needs=("accelerate", "transformers", "peft", "trl", "datasets"),
        **rest,  # type: ignore[arg-type]
    )


def _trl_script(script: str) -> Row:
    return Row(
        client="TRL's script",
        api="fully_shard",
        options=script,
        program="examples.clients.trl_scripts",
        arguments=(script,),
        numbers_per_step=2,
        needs=("accelerate", "transformers", "peft", "trl", "datasets"),
    )


def _lightning(version: int, options: str, *arguments: str, **rest: object) -> Row:
    return Row(
        client="Lightning",
        api="fully_shard" if version == 2 else "wrapper",
        options=options,
        program="examples.clients.lightning_training",
        arguments=("--fsdp-version", str(version), *arguments),
        needs=("lightning", "transformers"),
        **rest,  # type: ignore[arg-type]
    )


def _torchao(options: str, *arguments: str, **rest: object) -> Row:
    return Row(
        client="torchao",
        api="fully_shard",
        options=options,
        program="examples.clients.torchao_training",
        arguments=arguments,
        needs=("torchao", "transformers"),
        **rest,  # type: ignore[arg-type]
    )


UNEVEN = ("--rows", "97")
EIGHT_BITS: dict[str, Any] = {"tolerance": EIGHT_BITS_TOLERANCE, "devices": ("cpu",)}


ROWS = (
    _accelerate(2, "sharded checkpoint"),
    _accelerate(2, "full checkpoint", "--state-dict", "full"),
    _accelerate(2, "bf16", "--bf16"),
    _accelerate(
        2,
        "activation checkpointing, 2 microbatches",
        "--activation-checkpointing",
        "--microbatches",
        "2",
    ),
    _accelerate(2, "tied weights", "--tied"),
    _accelerate(2, "regional compilation", "--compile"),
    _accelerate(2, "cpu_ram_efficient_loading", "--cpu-ram-efficient-loading"),
    _accelerate(1, "full checkpoint", "--state-dict", "full"),
    _accelerate(1, "sharded checkpoint", known=EMPTY_OPTIMIZER),
    _accelerate(1, "flat parameters", "--flat-parameters", "--state-dict", "full"),
    _accelerate(1, "bf16", "--bf16", "--state-dict", "full", tolerance=BF16_TOLERANCE),
    _accelerate(
        1,
        "cpu_ram_efficient_loading",
        "--cpu-ram-efficient-loading",
        "--state-dict",
        "full",
        devices=("cuda",),  # Accelerate refuses it on a CPU
    ),
    _trainer(2, "all parameters, evaluate, generate", "--rank-of-lora", "0"),
    _trainer(2, "LoRA, evaluate, generate"),
    _trainer(
        1, "all parameters, evaluate, generate", "--rank-of-lora", "0", "--state-dict", "full"
    ),
    _trainer(1, "LoRA, evaluate, generate", "--state-dict", "full", known=NO_ADAPTERS),
    _trl(2, "SFT"),
    _trl(2, "SFT, LoRA", "--lora"),
    _trl(1, "SFT", "--state-dict", "full"),
    _trl(1, "SFT, LoRA", "--lora", "--state-dict", "full", known=NO_ADAPTERS),
    *map(_trl_script, ("sft", "dpo", "kto", "reward", "grpo", "rloo")),
    _lightning(2, "ModelParallelStrategy"),
    _lightning(1, "FSDPStrategy"),
    _lightning(1, "FSDPStrategy, flat parameters", "--flat-parameters"),
    Row(
        client="torchtitan",
        api="fully_shard",
        options="apply_fsdp_to_decoder",
        program="examples.clients.torchtitan_decoder",
        needs=("torchtitan",),
    ),
    Row(
        client="torchtitan",
        api="fully_shard",
        options="apply_compile, apply_fsdp_to_decoder",
        program="examples.clients.torchtitan_decoder",
        arguments=("--compile", "aot_eager"),
        needs=("torchtitan",),
    ),
    _torchao("float8, a scale per gather"),
    _torchao("float8, all scales at once", "--tensors", "float8-scales"),
    _torchao("float8, uneven rows", *UNEVEN, **EIGHT_BITS),
    _torchao("float8, groups of matrices only", "--only-matrices", tolerance=EIGHT_BITS_TOLERANCE),
    _torchao("int8 weights", "--tensors", "int8", known=NOT_SAVED),
    _torchao(
        "int8 weights, uneven rows", "--tensors", "int8", *UNEVEN, known=NOT_SAVED, **EIGHT_BITS
    ),
    _torchao("int8 products", "--tensors", "int8-products"),
    _torchao("int8 products, uneven rows", "--tensors", "int8-products", *UNEVEN, **EIGHT_BITS),
    Row(
        client="torch.distributed.pipelining",
        api="fully_shard",
        options="1F1B, 2 stages of 2 ranks",
        program="examples.clients.pipelining",
        needs=("transformers",),
        world=4,
        devices=("cpu",),
    ),
)
