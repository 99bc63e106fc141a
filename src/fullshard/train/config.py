"""What a training run can be told: one dataclass per section of the file, every field explained.

    [model]
    size = "small"

    [train]
    steps = 2000

A file names what differs from the defaults here; `--set train.steps=10` differs from the file. This
module imports no torch: a wrong configuration is answered at once.

Fields marked `FIXED` decide the trajectory of a run; a run that is resumed must have them as they
were.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DeviceChoice = Literal["auto", "cpu", "cuda"]
Size = Literal["tiny", "small", "medium", "large"]
Tokens = Literal["auto", "text", "array"]
TokenDtype = Literal["uint8", "uint16", "int32", "int64"]
OptimizerName = Literal["adamw", "adam", "sgd", "adagrad"]
Schedule = Literal["cosine", "linear", "constant"]
Door = Literal["fully_shard", "wrapper"]
Grouping = Literal["blocks", "plan"]
Precision = Literal["fp32", "bf16"]
Blocks = Literal["none", "blocks"]
BadStep = Literal["stop", "skip", "ignore"]


DEFAULT_FOLDER = Path("runs/default")

FIXED = {"fixed": True}
"""Marks a field that a resumed run must have as it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    """Where a run takes place, and where it leaves what it makes."""

    folder: Path = DEFAULT_FOLDER
    """Folder of the run: configuration, metrics, checkpoints, traces, report. If a run is in it, it goes on."""

    ranks: int | None = None
    """Ranks to start here; none given takes those of a launcher, else 2 on CPU and one per GPU."""

    device: DeviceChoice = "auto"
    """Where to train; auto takes CUDA when there is a GPU."""

    seed: int = field(default=0, metadata=FIXED)
    """Decides starting weights, the order of the data, and samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """What is trained: the built-in decoder, or a model of transformers."""

    size: Size = field(default="tiny", metadata=FIXED)
    """Size of the built-in decoder."""

    layers: int | None = field(default=None, metadata=FIXED)
    """Its blocks, if not those of the size."""

    width: int | None = field(default=None, metadata=FIXED)
    """Width of its residual stream, if not that of the size."""

    heads: int | None = field(default=None, metadata=FIXED)
    """Its attention heads, if not those of the size; width / heads is even."""

    vocabulary: int | None = field(default=None, metadata=FIXED)
    """Tokens it knows, if not those of the tokenizer; to be given for arrays without one."""

    huggingface: Path | None = field(default=None, metadata=FIXED)
    """Folder with the `config.json` of a causal language model of transformers, instead of the built-in decoder."""

    pretrained: bool = field(default=False, metadata=FIXED)
    """Start from the weights in the Hugging Face folder, not from drawn ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """What is learned from."""

    path: Path | None = field(default=None, metadata=FIXED)
    """File or folder; none given takes the sources of Python's standard library."""

    kind: Tokens = field(default="auto", metadata=FIXED)
    """text (files are tokenised when the run starts) or array (`.npy`, or `.bin` without a header, memory-mapped);
    auto goes by the file's name."""

    dtype: TokenDtype = field(default="uint16", metadata=FIXED)
    """Of the tokens in a `.bin` file."""

    tokenizer: Path | None = field(default=None, metadata=FIXED)
    """Folder or file of a Hugging Face tokenizer for text; none given takes that of the model's folder if there is
    one, else bytes."""

    context: int = field(default=128, metadata=FIXED)
    """Tokens the model sees at once."""

    held_out: float = field(default=0.05, metadata=FIXED)
    """Part of the tokens kept back for evaluation, from the end."""

    max_bytes: int = field(default=8_000_000, metadata=FIXED)
    """Read no more text than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSection:
    """The steps."""

    steps: int = 240
    """Optimizer steps of the whole run."""

    batch: int = field(default=16, metadata=FIXED)
    """Windows per step, of all ranks together; any number of ranks that divides it sees the same batches."""

    accumulate: int = 1
    """Parts a rank's share of the batch is computed in, one after the other."""

    clip: float = field(default=1.0, metadata=FIXED)
    """Largest norm of the gradients; larger ones are scaled down to it. 0 does not clip."""

    on_bad_step: BadStep = field(default="stop", metadata=FIXED)
    """What to do when loss or gradient norm are not finite, or the norm exceeds `max_norm`: stop the run, skip the
    update, or ignore it."""

    max_norm: float = field(default=0.0, metadata=FIXED)
    """Norm of the gradients above which a step is bad; 0 for none."""

    max_bad_steps: int = 10
    """With skip: so many bad steps in a row stop the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSection:
    """How gradients become updates."""

    name: OptimizerName = field(default="adamw", metadata=FIXED)
    """Which optimizer of torch.optim."""

    lr: float = field(default=3e-3, metadata=FIXED)
    """Highest learning rate."""

    weight_decay: float = field(default=0.1, metadata=FIXED)
    """Of matrices; vectors (norms, biases) are not decayed."""

    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata=FIXED)
    """Of adam and adamw."""

    eps: float = field(default=1e-8, metadata=FIXED)
    """Of adam, adamw and adagrad."""

    momentum: float = field(default=0.9, metadata=FIXED)
    """Of sgd."""

    flat: bool = True
    """Update whole shards at once (fullshard.optim), not parameter by parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSection:
    """The learning rate over the run."""

    kind: Schedule = field(default="cosine", metadata=FIXED)
    """Its way down after the warm-up."""

    warmup: float = field(default=0.1, metadata=FIXED)
    """Part of the steps in which it rises from 0, if below 1; else so many steps."""

    last: float = field(default=0.1, metadata=FIXED)
    """Part of the highest rate that it ends at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingSection:
    """How the model is spread over the ranks."""

    door: Door = "fully_shard"
    """fully_shard, or wrapper: FullyShardedDataParallel."""

    groups: Grouping = "blocks"
    """One group per block, or those of `plan_groups`, which merges small ones."""

    replicas: int = 1
    """Copies of the sharded model (HSDP); ranks / replicas ranks share one."""

    reshard_after_forward: bool = True
    """Give gathered parameters back between forward and backward."""

    prefetch: int = 1
    """Groups that are gathered ahead of the one that computes."""

    offload: bool = False
    """Keep shards and optimizer state in host memory; fully_shard on CUDA only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSection:
    """How a step is computed."""

    precision: Precision = field(default="fp32", metadata=FIXED)
    """fp32, or bf16: compute in bfloat16, keep parameters and reduce gradients in float32."""

    wire: Precision = field(default="fp32", metadata=FIXED)
    """In what gradients travel; with bf16 they are still summed in float32."""

    checkpoint_activations: Blocks = "none"
    """Recompute the activations of blocks in backward instead of keeping them."""

    compile: Blocks = "none"
    """torch.compile each block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSection:
    """The loss on held-out data; always taken at the start and the end."""

    every: int = 0
    """Steps between evaluations; 0 for none in between."""

    windows: int = 64
    """At most so many windows, spread evenly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    """What is kept, so that a run can go on."""

    every: int = 100
    """Steps between checkpoints, written while training goes on; 0 for none but the last."""

    keep: int = 2
    """So many of the newest stay."""

    export: bool = False
    """At the end, write the model as a Hugging Face folder `model`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSection:
    """A few steps are recorded for the report's timeline."""

    start: int = 20
    """The first of them, counted from 1."""

    steps: int = 3
    """How many; 0 for none."""

    ranks: int = 8
    """So many of the first ranks record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSection:
    """What is written down and shown."""

    every: int = 1
    """Steps between lines of `metrics.jsonl`."""

    tensorboard: bool = False
    """Write metrics for TensorBoard, too; needs the package tensorboard."""

    report: bool = True
    """Write `report.html` at the end; needs the package plotly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesSection:
    """Text the model writes at the end."""

    count: int = 1
    """How many samples; 0 for none."""

    prompt: str = "def "
    """How each begins."""

    tokens: int = 120
    """How many tokens each gets."""

    temperature: float = 0.8
    """0 always takes the likeliest token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run, as the user asked for it."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    sharding: ShardingSection = field(default_factory=ShardingSection)
    compute: ComputeSection = field(default_factory=ComputeSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    trace: TraceSection = field(default_factory=TraceSection)
    log: LogSection = field(default_factory=LogSection)
    samples: SamplesSection = field(default_factory=SamplesSection)
