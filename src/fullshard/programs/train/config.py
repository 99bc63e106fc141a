"""The settings of a training run: one dataclass per section of the file, every field explained.

    [model]
    size = "small"

    [train]
    steps = 2000

A file changes the defaults here, and `--set train.steps=10` changes the file. This module imports no torch, so a wrong
configuration is reported at once.

The text below a field is its documentation: `config_fields` uses it for configuration files, error messages and the
docs. The type of a field limits its values. Rules about several fields are in the `problems` of their section, or of
`RunConfig`, and nowhere else.

Fields marked `FIXED` decide the trajectory of a run. A resumed run must have the same values. What is done about bad steps
also affects the trajectory, but is not fixed: otherwise a run that a bad step has stopped could not go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fullshard.errors import ConfigurationError
from fullshard.programs.run_events import BadStepAction, ErrorAction
from fullshard.programs.train.limits import Limits

DeviceChoice = Literal["auto", "cpu", "cuda"]
Size = Literal["tiny", "small", "medium", "large"]
Tokens = Literal["auto", "text", "array", "records"]
Learned = Literal["answers", "all"]
TokenDtype = Literal["uint8", "uint16", "int32", "int64"]
OptimizerName = Literal["adamw", "adam", "sgd", "adagrad", "muon", "adamw8bit"]
Schedule = Literal["cosine", "linear", "constant"]
Api = Literal["fsdp2", "fsdp1"]
Grouping = Literal["blocks", "plan"]
Precision = Literal["fp32", "bf16"]
Blocks = Literal["none", "blocks"]
Recomputation = Literal["none", "selective", "blocks"]

Count = Annotated[int, Limits(0)]
PositiveCount = Annotated[int, Limits(1)]
NotNegative = Annotated[float, Limits(0)]
Positive = Annotated[float, Limits(0, open_low=True)]
Timeout = Annotated[float, Limits(0, 7 * 24 * 3600, open_low=True)]
Fraction = Annotated[float, Limits(0, 1)]
FractionBelowOne = Annotated[float, Limits(0, 1, open_high=True)]
ProperFraction = Annotated[float, Limits(0, 1, open_low=True, open_high=True)]

DEFAULT_FOLDER = Path("runs/default")

FIXED = {"fixed": True}
"""Marks a field whose value a resumed run must have, too."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a configuration that is more than the value of one field."""

    about: tuple[str, ...]
    """The fields (`train.batch`) or sections (`model`) that it follows from. If the value of one of them was refused, the
    problem may disappear."""

    text: str
    """The rule, what was found, the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    """The folder, the ranks and the device of a run."""

    folder: Path = DEFAULT_FOLDER
    """Folder of the run: configuration, metrics, checkpoints, traces, report. If it has a run, that run is resumed."""

    ranks: PositiveCount | None = None
    """Ranks to start here. Not set: as many as the launcher starts; without a launcher, 2 on CPU and one per GPU."""

    device: DeviceChoice = "auto"
    """Where to train; auto is CUDA if there is a GPU."""

    timeout: Timeout = 600.0
    """Seconds that a rank waits for the others before it gives up. After a host is lost, the other ranks end that much later."""

    seed: Count = field(default=0, metadata=FIXED)
    """Decides the initial weights, the order of the data, and samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """What is trained: the built-in decoder, or a model of transformers."""

    size: Size = field(default="tiny", metadata=FIXED)
    """Size of the built-in decoder."""

    layers: PositiveCount | None = field(default=None, metadata=FIXED)
    """Number of its blocks. Not set: that of `size`."""

    width: PositiveCount | None = field(default=None, metadata=FIXED)
    """Width of its residual stream. Not set: that of `size`."""

    heads: PositiveCount | None = field(default=None, metadata=FIXED)
    """Number of its attention heads; width / heads must be even. Not set: that of `size`."""

    vocabulary: PositiveCount | None = field(default=None, metadata=FIXED)
    """Size of its vocabulary. Not set: that of the tokenizer. Needed for arrays without a tokenizer."""

    huggingface: Path | None = field(default=None, metadata=FIXED)
    """Folder with the `config.json` of a causal language model of transformers, instead of the built-in decoder."""

    pretrained: bool = field(default=False, metadata=FIXED)
    """Start from the weights in the Hugging Face folder, not from random ones."""

    weights: Path | None = field(default=None, metadata=FIXED)
    """Start from the weights of another run (its folder: the newest checkpoint), of a checkpoint of any format, or of a
    Hugging Face folder. Step, schedule and optimizer start afresh."""

    dtype: Precision = field(default="fp32", metadata=FIXED)
    """Dtype of the weights between steps. bf16 halves the memory of weights, gradients and optimizer state, but small updates are
    lost in rounding."""

    weights_strict: bool = field(default=True, metadata=FIXED)
    """Names and shapes of `weights` must be those of the model. false: parameters without a fitting weight are
    initialised at random, and other weights are left out."""

    trainable: str | None = field(default=None, metadata=FIXED)
    """Train only parameters whose names match one of these patterns, separated by spaces: `blocks.5.* *norm.weight`. Not set:
    all."""

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of fields that do not go together."""
        if self.pretrained and self.huggingface is None:
            yield Problem(
                ("model.pretrained", "model.huggingface"),
                "model.pretrained needs a folder with weights to start from. Set model.huggingface, or leave "
                "model.pretrained out.",
            )
        if self.pretrained and self.weights is not None:
            yield Problem(
                ("model.pretrained", "model.weights"),
                "model.pretrained and model.weights both say which weights to start from. Leave one of them out.",
            )
        own = [
            name
            for name in ("layers", "width", "heads", "vocabulary")
            if getattr(self, name) is not None
        ]
        if self.huggingface is not None and own:
            yield Problem(
                ("model.huggingface", *(f"model.{name}" for name in own)),
                f"{', '.join(f'model.{name}' for name in own)} shape the built-in decoder; the model of "
                f"{self.huggingface} is shaped by its config.json. Leave them out, or model.huggingface.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """The data."""

    path: Path | None = field(default=None, metadata=FIXED)
    """File or folder. Not set: the sources of Python's standard library."""

    kind: Tokens = field(default="auto", metadata=FIXED)
    """text (files are tokenised when the run starts), array (`.npy`, or `.bin` without a header, read when it is used) or
    records (chats, instructions or documents in `.jsonl`, `.parquet` or compressed files); auto goes by the file's name."""

    dtype: TokenDtype = field(default="uint16", metadata=FIXED)
    """Dtype of the tokens in a `.bin` file."""

    tokenizer: Path | None = field(default=None, metadata=FIXED)
    """Folder or file of a Hugging Face tokenizer for text and records. Not set: the tokenizer in the model's folder if it has one,
    otherwise bytes."""

    context: PositiveCount = field(default=128, metadata=FIXED)
    """Tokens the model sees at once."""

    held_out: ProperFraction = field(default=0.05, metadata=FIXED)
    """Share of the tokens, or of the records, from the end, that is held out for evaluation."""

    loss_on: Learned = field(default="answers", metadata=FIXED)
    """What is learned of chats and instructions: the answers, or all tokens. Of documents, all tokens are."""

    packing: bool = field(default=True, metadata=FIXED)
    """Put several records into one window, where no token sees those of another record. false: each has its own window."""

    template: Path | None = field(default=None, metadata=FIXED)
    """File with the chat template, in Jinja. Not set: the tokenizer's; a plain one if it has none."""

    max_bytes: PositiveCount | None = field(default=None, metadata=FIXED)
    """Most bytes of text to read. Not set: all of it, and 8 million bytes of the standard library."""

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of fields that do not go together."""
        if self.kind == "array" and self.path is None:
            yield Problem(
                ("data.kind", "data.path"),
                'data.kind = "array" needs an array to read. Set data.path to a .npy or .bin file, or leave '
                "data.kind out.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSection:
    """The steps."""

    steps: PositiveCount = 240
    """Optimizer steps of the whole run."""

    batch: PositiveCount = field(default=16, metadata=FIXED)
    """Windows per step, of all ranks together. It must be divisible by the number of ranks; any such number sees the
    same batches."""

    accumulate: PositiveCount = 1
    """Number of microbatches into which a rank's share of the batch is divided."""

    clip: NotNegative = field(default=1.0, metadata=FIXED)
    """Largest norm of the gradients; gradients of a larger norm are scaled down. 0 does not clip."""

    on_bad_step: BadStepAction = "stop"
    """What to do when loss or gradient norm are not finite, or the norm exceeds `max_norm`: stop the run, skip the
    update, or ignore it."""

    max_norm: NotNegative = 0.0
    """Norm of the gradients above which a step is bad; 0 for none."""

    on_error: ErrorAction = "stop"
    """What to do when a rank raises an exception while it computes gradients, for lack of memory or because of a bad
    sample: stop the run, or skip the step on all ranks as a bad step."""

    max_bad_steps: PositiveCount = 10
    """With skip: this many bad steps in a row stop the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSection:
    """The optimizer."""

    name: OptimizerName = field(default="adamw", metadata=FIXED)
    """An optimizer of torch.optim or fullshard.optim. muon updates all parameters except hidden matrices with adamw;
    adamw8bit is adamw with its state in 8 bits."""

    lr: Positive = field(default=3e-3, metadata=FIXED)
    """Highest learning rate."""

    muon_lr: Positive = field(default=1.0, metadata=FIXED)
    """Learning rate of muon's hidden matrices, as a multiple of `lr`, the learning rate of all other parameters."""

    weight_decay: NotNegative = field(default=0.1, metadata=FIXED)
    """Weight decay of matrices; vectors (norms, biases) are not decayed."""

    betas: tuple[FractionBelowOne, FractionBelowOne] = field(default=(0.9, 0.95), metadata=FIXED)
    """Betas of adam, adamw, adamw8bit and muon's adamw."""

    eps: Positive = field(default=1e-8, metadata=FIXED)
    """Epsilon of adam, adamw, adamw8bit, adagrad and muon's adamw."""

    momentum: FractionBelowOne = field(default=0.9, metadata=FIXED)
    """Momentum of sgd. Muon's is 0.95."""

    ema: ProperFraction | None = field(default=None, metadata=FIXED)
    """Keep an exponential moving average of the parameters (EMA) with this decay, for instance 0.999."""

    ema_warmup: NotNegative = field(default=0.0, metadata=FIXED)
    """Lets early averages forget the initial parameters: step n keeps at most n / (n + ema_warmup) of them. 0 for none."""

    flat: bool = True
    """Update whole shards at once (fullshard.optim), not parameter by parameter."""

    shard_over_replicas: bool = False
    """With `sharding.replicas`, shard the optimizer state over replicas: less memory, the same result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSection:
    """The learning rate over the run."""

    kind: Schedule = field(default="cosine", metadata=FIXED)
    """How it falls after the warm-up."""

    warmup: NotNegative = field(default=0.1, metadata=FIXED)
    """Share of the steps in which it rises from 0, if below 1; otherwise the number of these steps."""

    last: Fraction = field(default=0.1, metadata=FIXED)
    """The last learning rate, as a share of the highest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingSection:
    """How the model is spread over the ranks."""

    api: Api = "fsdp2"
    """fsdp2 (fully_shard), or fsdp1: FullyShardedDataParallel, which adds up microbatches in the dtype of compute."""

    groups: Grouping = "blocks"
    """One group per block, or the groups of `plan_groups`, which merges small blocks."""

    replicas: PositiveCount = 1
    """Number of replicas of the sharded model (HSDP); each is sharded over ranks / replicas ranks."""

    reshard_after_forward: bool = True
    """Release unsharded parameters between forward and backward."""

    prefetch: Count = 1
    """Number of groups that are gathered ahead of the group that computes."""

    offload: bool = False
    """Keep shards and optimizer state in host memory; fully_shard on CUDA only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSection:
    """How a step is computed."""

    precision: Precision = field(default="fp32", metadata=FIXED)
    """fp32, or bf16: compute in bfloat16, keep parameters and reduce gradients in float32."""

    wire: Precision = field(default="fp32", metadata=FIXED)
    """Dtype in which gradients travel between ranks; with bf16 they are still summed in float32."""

    checkpoint_activations: Recomputation = "none"
    """Recompute the activations of blocks in backward instead of keeping them. selective: keep the results of
    attention and of every second matrix product."""

    compile: Blocks = "none"
    """torch.compile each block."""

    graph: bool = False
    """Capture forward, backward and clipping in a CUDA graph after three steps, and replay it. It has an effect only
    on CUDA."""

    fuse_gradients: bool | None = None
    """Let the backward of linear layers write weight gradients where they are reduced: less memory traffic and, on a GPU, no
    rounding before the sum, for the memory of one more reduction. Not set: in captured steps (`graph`), which it makes faster."""

    def fuses_gradients(self, device_type: str) -> bool:
        """Return whether weight gradients are written where they are reduced, on devices of this type."""
        if self.fuse_gradients is None:
            return self.graph and device_type == "cuda"
        return self.fuse_gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSection:
    """The loss on held-out data; always taken at the start and the end."""

    every: Count = 0
    """Steps between evaluations; 0 for none in between."""

    windows: PositiveCount = 64
    """At most this many windows, spread evenly."""

    patience: Count = 0
    """End the run when this many evaluations in a row have found no lower loss; 0 for never."""

    ema: bool = False
    """Evaluate the averages of `optimizer.ema`, and generate the samples with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    """Checkpoints, from which a run can be resumed."""

    every: Count = 100
    """Steps between checkpoints, written while training goes on; 0 for none but the last."""

    keep: PositiveCount = 2
    """Number of the newest checkpoints to keep."""

    best: bool = False
    """Keep the weights with the lowest held-out loss so far in `best`, and export them at the end (`export`)."""

    only_trainable: bool = False
    """Leave frozen parameters out (`model.trainable`). They are saved once, in `base`, unless the Hugging Face folder
    of `model.pretrained` has them."""

    export: bool = False
    """At the end, write the model as a Hugging Face folder `model`, in place of an earlier export. A finished run is exported, too."""

    export_ema: bool = False
    """Export the averages of `optimizer.ema` in place of the trained weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSection:
    """The steps that are recorded for the report's timeline."""

    start: PositiveCount = 20
    """The first recorded step, counted from 1."""

    steps: Count = 3
    """How many steps to record; 0 for none."""

    ranks: Count = 8
    """Number of ranks that record, from rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSection:
    """Metrics and the report."""

    every: PositiveCount = 1
    """Steps between lines of `metrics.jsonl`."""

    console: PositiveCount | None = None
    """Without a terminal: steps between lines of progress. Not set: a tenth of the run. After a minute there is a line in any
    case."""

    tensorboard: bool = False
    """Write metrics for TensorBoard, too; needs the package tensorboard."""

    wandb: bool = False
    """Send metrics to Weights & Biases, too; needs the package wandb, which reads its environment variables
    (WANDB_ENTITY, ...)."""

    wandb_project: str = "fullshard"
    """Project of W&B in which the run appears."""

    wandb_offline: bool = False
    """Send nothing, and write to the folder `wandb` what `wandb sync` sends later."""

    mlflow: bool = False
    """Send metrics to MLflow, too; needs the package mlflow, which reads its environment variables (MLFLOW_TRACKING_URI,
    ...)."""

    mlflow_experiment: str = "fullshard"
    """Experiment of MLflow in which the run appears."""

    report: bool = True
    """Write `report.html` at the end; needs the package plotly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesSection:
    """Text that the model generates at the end."""

    count: Count = 1
    """How many samples; 0 for none."""

    prompt: str | None = None
    """The beginning of each sample. Not set: the first tokens of the held-out data."""

    tokens: PositiveCount = 120
    """Number of tokens to generate for each."""

    temperature: NotNegative = 0.8
    """Randomness of the tokens; 0 always takes the most likely one."""


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

    def problems(self) -> Iterator[Problem]:
        """Yield the problems that do not depend on the machine or the number of ranks."""
        yield from self.model.problems()
        yield from self.data.problems()
        if self.sharding.offload and self.sharding.api == "fsdp1":
            yield Problem(
                ("sharding.offload", "sharding.api"),
                "sharding.offload is for fsdp2 only, and sharding.api is fsdp1. Leave one of them out.",
            )
        if self.sharding.prefetch != 1 and self.sharding.api == "fsdp1":
            yield Problem(
                ("sharding.prefetch", "sharding.api"),
                f"sharding.prefetch is for fsdp2 only: fsdp1 gathers 1 group ahead, and not "
                f"{self.sharding.prefetch}. Leave it out, or sharding.api.",
            )
        if self.checkpoint.only_trainable and self.model.trainable is None:
            yield Problem(
                ("checkpoint.only_trainable", "model.trainable"),
                "checkpoint.only_trainable leaves frozen parameters out, and all are trained. Say with model.trainable which "
                "are, or leave it out.",
            )
        if self.model.dtype == "bf16" and self.compute.precision != "bf16":
            yield Problem(
                ("model.dtype", "compute.precision"),
                "Weights that are in bfloat16 between steps are computed with in bfloat16: model.dtype is bf16, and "
                f"compute.precision is {self.compute.precision}. Set compute.precision to bf16, or leave model.dtype out.",
            )
        for name, is_wanted in (
            ("evaluation.patience", self.evaluation.patience > 0),
            ("checkpoint.best", self.checkpoint.best),
        ):
            if is_wanted and not self.evaluation.every:
                yield Problem(
                    (name, "evaluation.every"),
                    f"{name} needs evaluations between the steps, and evaluation.every is 0. Set it, for instance to "
                    f"{max(1, self.train.steps // 10)}, or leave {name} out.",
                )
        for name, is_set in (
            ("evaluation.ema", self.evaluation.ema),
            ("checkpoint.export_ema", self.checkpoint.export_ema),
        ):
            if is_set and self.optimizer.ema is None:
                yield Problem(
                    (name, "optimizer.ema"),
                    f"{name} needs averages of the parameters, and optimizer.ema is not set. Set it, for instance to 0.999, "
                    f"or leave {name} out.",
                )
        if self.optimizer.muon_lr != 1.0 and self.optimizer.name != "muon":
            yield Problem(
                ("optimizer.muon_lr", "optimizer.name"),
                f"optimizer.muon_lr is for muon only, and optimizer.name is {self.optimizer.name}. Leave it out, or choose muon.",
            )
        yield from self._replica_problems()
        if self.sharding.offload and self.run.device == "cpu":
            yield Problem(("sharding.offload", "run.device"), OFFLOAD_ON_CPU)
        if self.compute.graph:
            yield from self._graph_problems()

    def _replica_problems(self) -> Iterator[Problem]:
        """Yield what state that is divided over replicas does not go together with."""
        if not self.optimizer.shard_over_replicas:
            return
        if self.optimizer.name == "muon":
            yield Problem(
                ("optimizer.shard_over_replicas", "optimizer.name"),
                "optimizer.shard_over_replicas needs an optimizer that updates each element for itself, or adamw8bit, and "
                "optimizer.name is muon, which divides its work over replicas, but not its state. Leave one of them out.",
            )
        if not self.optimizer.flat and self.optimizer.name != "adamw8bit":
            yield Problem(
                ("optimizer.shard_over_replicas", "optimizer.flat"),
                "optimizer.shard_over_replicas is an option of the optimizer that optimizer.flat chooses, which is false. "
                "Leave one of them out.",
            )

    def _graph_problems(self) -> Iterator[Problem]:
        """Yield what a step in a CUDA graph does not go together with."""
        if self.sharding.offload:
            yield Problem(
                ("compute.graph", "sharding.offload"),
                "compute.graph needs steps in which the host does not wait, and with sharding.offload it waits for every "
                "gradient. Leave one of them out.",
            )
        if self.train.on_error == "skip":
            yield Problem(
                ("compute.graph", "train.on_error"),
                'With train.on_error = "skip" ranks may leave a step at every collective, and a graph is replayed as a '
                "whole. Leave compute.graph or train.on_error out.",
            )

    def check(self, world: int) -> None:
        """Raise unless the configuration goes together, and with this number of ranks.

        For callers that do not use the launcher, which checks the same rules before it starts ranks.

        Raises:
            ConfigurationError: with all problems.
        """
        found = [problem.text for problem in (*self.problems(), *self.world_problems(world))]
        if found:
            raise ConfigurationError("\n".join(found))

    def world_problems(self, world: int) -> Iterator[Problem]:
        """Yield the problems with this number of ranks."""
        train = self.train
        parts = world * train.accumulate
        if train.batch % parts:
            below = train.batch // parts * parts
            yield Problem(
                ("run.ranks", "train.batch", "train.accumulate"),
                "train.batch must be divisible by ranks * train.accumulate: "
                f"{train.batch} / ({world} * {train.accumulate}) leaves {train.batch % parts}. "
                f"{_either(*([below] if below else []), below + parts)} would do as train.batch"
                f"{self._ranks_that_would_do(world)}.",
            )
        if world % self.sharding.replicas:
            yield Problem(
                ("run.ranks", "sharding.replicas"),
                f"The number of ranks must be divisible by sharding.replicas: {world} / "
                f"{self.sharding.replicas} leaves {world % self.sharding.replicas}. "
                f"{_either(*_divisors(world, world))} would do as sharding.replicas.",
            )
        if self.compute.wire != "fp32" and 1 < self.sharding.replicas == world:
            yield Problem(
                ("run.ranks", "sharding.replicas", "compute.wire"),
                f"compute.wire is for gradients that are reduce-scattered, and {world} replicas on {world} ranks have nothing "
                "to shard: they average whole gradients. Leave compute.wire out, or set sharding.replicas to less.",
            )

    def _ranks_that_would_do(self, world: int) -> str:
        shares, rest = divmod(self.train.batch, self.train.accumulate)
        return (
            "" if rest else f", or {_either(*_divisors(shares, 2 * world))} as the number of ranks"
        )


OFFLOAD_ON_CPU = (
    "sharding.offload needs CUDA: on the CPU shards are in host memory in any case. Leave it out."
)


def _divisors(number: int, highest: int) -> list[int]:
    """Return the divisors up to `highest`, and none above 10,000."""
    return [n for n in range(1, min(highest, 10_000) + 1) if number % n == 0]


def _either(*numbers: int) -> str:
    """Return numbers as a text: `1, 2 or 4`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
