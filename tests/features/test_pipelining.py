"""`torch.distributed.pipelining` with sharded stages: every schedule trains as one process does, and reduces once in a step.

Four ranks: two places in the pipeline, each with two data-parallel ranks.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fullshard.engine.state import state_of
from fullshard.errors import LifecycleError
from fullshard.layout.names import clean_name
from tests.helpers.compare import assert_close
from tests.helpers.traffic import GATHER, REDUCE_SCATTER, Traffic
from tests.helpers.training import FULLSHARD, TORCH, ShardOptimizer, gradients, weights

WIDTH = 4
STEPS = 2
WRAPPER, FLAT = "wrapper", "wrapper with flat parameters"
"""Beside `FULLSHARD` and `TORCH`, which are `fully_shard`."""


class WithoutReduction(pipelining.ScheduleInterleaved1F1B):
    """The step of torch's oldest class for several stages: it scales gradients at its end, and does not reduce them."""

    _step_microbatches = PipelineScheduleMulti._step_microbatches


class LateWeights(pipelining.ScheduleInterleavedZeroBubble):
    """Runs a forward of a stage just before the second part of an earlier backward, which finds it resharded."""

    def _prepare_schedule_with_comms(self, actions: Any, format: Any = "compute_only") -> None:
        order = actions[1]
        names = [str(action) for action in order]
        first, second = names.index("3I1"), names.index("3W0")  # behind 3I0 and 3F1
        assert names.index("3I0") < names.index("3F1") < first < second
        order[first], order[second] = order[second], order[first]
        super()._prepare_schedule_with_comms(actions, format)


class Block(nn.Module):
    """The residual connection and the norm give a split backward paths to part; the gradient of a factor needs the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.left = nn.Parameter(torch.randn(5, 2) / 2)
        self.right = nn.Parameter(torch.randn(2, WIDTH) / 2)
        self.down = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(self.norm(x), self.left @ self.right)
        y: Tensor = x + self.down(torch.tanh(h))
        return y


def make_chunks(number: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)) for _ in range(number)]


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: type[Any]
    stages_per_rank: int = 2
    folded: bool = False
    """Whether the first rank has the last stage, too: the shape of a V."""
    api: str = FULLSHARD
    reshard_after_forward: Sequence[bool] = (True, False)
    """Of even and odd stages."""
    param_dtype: torch.dtype | None = None
    static: bool = True
    """Whether shapes are given; if not, the first step finds them out by running each stage once."""

    scale_grads: bool = True
    """Whether gradients are divided by the number of microbatches."""

    @property
    def microbatches(self) -> int:
        """More than there are stages."""
        return 3 * self.stages_per_rank

    def places(self, index: int) -> int:
        """Return which of the two places in the pipeline has a stage."""
        return (0, 1, 1, 0)[index] if self.folded else index % 2


class Pipeline:
    """The stages of one rank, and one process's model that sees the same data."""

    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self.case, self.mesh = case, mesh
        number = 2 * case.stages_per_rank
        self.reference = make_chunks(number)
        place = mesh["pp"].get_local_rank()
        self.own: dict[int, Any] = {
            index: self._sharded(chunk, index)
            for index, chunk in enumerate(make_chunks(number))
            if case.places(index) == place
        }
        example = torch.empty(1, WIDTH, requires_grad=True)
        shapes = {"input_args": example, "output_args": example} if case.static else {}
        stages = [
            pipelining.PipelineStage(
                chunk, index, number, torch.device("cpu"), group=mesh["pp"].get_group(), **shapes
            )
            for index, chunk in self.own.items()
        ]
        several = case.stages_per_rank > 1
        self.schedule = case.schedule(
            stages if several else stages[0],
            case.microbatches,
            loss_fn=F.mse_loss,
            **({} if case.scale_grads else {"scale_grads": False}),
        )
        params = [param for chunk in self.own.values() for param in chunk.parameters()]
        self.optimizers = [
            ShardOptimizer("SGD", params),
            ShardOptimizer("SGD", [p for chunk in self.reference for p in chunk.parameters()]),
        ]

    def _sharded(self, chunk: nn.Sequential, index: int) -> nn.Module:
        case, mesh = self.case, self.mesh["dp"]
        reshard = case.reshard_after_forward[index % 2]
        if case.api in (WRAPPER, FLAT):
            strategy = ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
            options: dict[str, Any] = {
                "process_group": mesh.get_group(),
                "use_orig_params": case.api == WRAPPER,
                "sharding_strategy": strategy,
            }
            chunk[0] = FullyShardedDataParallel(chunk[0], **options)
            return FullyShardedDataParallel(chunk, **options)
        library = importlib.import_module(
            "torch.distributed.fsdp" if case.api == TORCH else "fullshard"
        )
        policy, float32 = library.MixedPrecisionPolicy, torch.float32
        options = {"mesh": mesh, "reshard_after_forward": reshard}
        library.fully_shard(chunk[0], mp_policy=policy(case.param_dtype, float32), **options)
        made: nn.Module = library.fully_shard(
            chunk, mp_policy=policy(case.param_dtype, float32, float32), **options
        )
        return made

    def train(self) -> None:
        """Train a few steps; losses, gradients, weights and collectives of each are asserted."""
        generator = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            x, target = torch.randn(2, 2 * self.case.microbatches, WIDTH, generator=generator)
            expected_losses = self._reference_step(x, target)
            # Counting takes time. The first step may run stages once more, to find out shapes.
            with Traffic() if step == STEPS - 1 else nullcontext() as traffic:
                losses = self._step(x, target)
            if losses:
                self._assert_close(losses, expected_losses)
            for index, chunk in self.own.items():
                if self.case.api != FLAT:
                    expected = gradients(self.reference[index])
                    self._assert_close(self._gradients(chunk), expected)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for index, chunk in self.own.items():
            self._assert_close(self._weights(chunk), weights(self.reference[index]))
            if self.case.api == FULLSHARD:
                options = state_of(chunk).options  # type: ignore[union-attr]
                assert options.requires_gradient_sync and options.is_last_backward
                assert not options.manual_finalization, "a plain backward ends by itself again"
        assert traffic is not None
        self._check_collectives(traffic)

    def _assert_close(self, actual: Any, expected: Any) -> None:
        if self.case.param_dtype is None:
            assert_close(actual, expected, rtol=1e-4, atol=1e-6)
        else:
            assert_close(actual, expected, rtol=5e-2, atol=1e-2)

    def _check_collectives(self, traffic: Traffic) -> None:
        """Each stage has two groups, the block and the rest."""
        case = self.case
        assert traffic.sizes(REDUCE_SCATTER).total() == 2 * len(self.own)
        if case.api == TORCH:
            return
        # A forward gives back what it gathered, a backward keeps it until the end of the step. So what is resharded after
        # forward is gathered for each forward and once more, whatever the order of forwards and backwards. The root of a
        # wrapper is kept.
        again = case.microbatches + 1
        resharded = 2 * again if case.api == FULLSHARD else 1 + again
        assert traffic.sizes(GATHER).total() == sum(
            resharded if case.reshard_after_forward[index % 2] else 2 for index in self.own
        )

    def _reference_step(self, x: Tensor, target: Tensor) -> list[Tensor]:
        """Return the losses of this rank's microbatches, after the backward of all ranks' mean loss."""
        output = nn.Sequential(*self.reference)(x)
        factor = 1 if self.case.scale_grads else self.case.microbatches
        (F.mse_loss(output, target) * factor).backward()
        microbatches = zip(
            self._mine(output.detach()).split(1), self._mine(target).split(1), strict=True
        )
        return [F.mse_loss(one, aim) for one, aim in microbatches]

    def _step(self, x: Tensor, target: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        inputs = [self._mine(x)] if 0 in self.own else []
        last = len(self.reference) - 1 in self.own
        self.schedule.step(*inputs, target=self._mine(target) if last else None, losses=losses)
        return [loss.detach() for loss in losses]

    def _mine(self, rows: Tensor) -> Tensor:
        return rows.chunk(2)[self.mesh["dp"].get_local_rank()]

    def _gradients(self, chunk: Any) -> dict[str, Tensor]:
        if self.case.api != WRAPPER:
            return gradients(chunk)
        with FullyShardedDataParallel.summon_full_params(chunk, with_grads=True):
            return named(chunk, lambda param: param.grad)

    def _weights(self, chunk: Any) -> dict[str, Tensor]:
        if self.case.api not in (WRAPPER, FLAT):
            return weights(chunk)
        with FullyShardedDataParallel.summon_full_params(chunk):
            return named(chunk, lambda param: param)


def named(chunk: nn.Module, wanted: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    found = {clean_name(name): wanted(param) for name, param in chunk.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in found.items() if tensor is not None}


def train(*cases: Case) -> None:
    """Train the pipelines of all cases, one after the other; see `Pipeline.train` for what is asserted."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for case in cases:
        Pipeline(case, mesh).train()


CASES = {
    "GPipe": Case(schedule=pipelining.ScheduleGPipe, stages_per_rank=1),
    "1F1B": Case(schedule=pipelining.Schedule1F1B, stages_per_rank=1),
    "looped BFS": Case(schedule=pipelining.ScheduleLoopedBFS),
    "interleaved 1F1B": Case(schedule=pipelining.ScheduleInterleaved1F1B),
    "a user's, without a reduction": Case(schedule=WithoutReduction),
    "interleaved zero bubble": Case(schedule=pipelining.ScheduleInterleavedZeroBubble),
    "late weights": Case(schedule=LateWeights, reshard_after_forward=(False, True)),
    "ZBV zero bubble": Case(schedule=pipelining.ScheduleZBVZeroBubble, folded=True),
    "DualPipeV": Case(schedule=pipelining.ScheduleDualPipeV, folded=True),
}
folds = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch lets a rank send to itself, which gloo cannot"
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[folds] * case.folded) for name, case in CASES.items()]
)
def test_every_schedule_trains_as_one_process_and_reduces_once_in_a_step(world, name: str) -> None:
    world(4).run(train, CASES[name])


@folds
def test_a_split_backward_trains_with_mixed_precision_and_with_wrappers(world) -> None:
    case = CASES["ZBV zero bubble"]
    world(4).run(
        train,
        replace(case, param_dtype=torch.bfloat16, static=False),
        replace(case, api=WRAPPER),
        replace(case, api=FLAT),
    )


def train_installed(*cases: Case) -> None:
    fullshard.install()
    try:
        assert torch.distributed.fsdp.FSDPModule is fullshard.FSDPModule
        train(*cases)
        gc.collect()  # uninstall warns of models that exist
    finally:
        fullshard.uninstall()


@folds
def test_schedules_that_gather_whole_stages_do_so_after_install(world) -> None:
    """Torch's stages then take the modules for torch's: actions UNSHARD and RESHARD, other options, cleaning up."""
    world(4).run(
        train_installed,
        replace(CASES["1F1B"], static=False),
        CASES["ZBV zero bubble"],
        replace(CASES["ZBV zero bubble"], scale_grads=False),
    )


@folds
def test_the_comparison_holds_for_torch_where_torch_is_right(world) -> None:
    """With parameters that are resharded after forward, its split backward loses gradients."""
    world(4).run(
        train, replace(CASES["ZBV zero bubble"], api=TORCH, reshard_after_forward=(False, False))
    )


# --- one stage, which is the first and the last ------------------------------------------------------


class Mishap(Exception):
    """What a test raises in a step."""


class OneStage:
    """A pipeline of one stage on two data-parallel ranks, with three microbatches of a row each."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
        self.chunk: Any = make_chunks(1)[0]
        fully_shard(self.chunk, mesh=self.mesh["dp"])
        self.stage = pipelining.PipelineStage(
            self.chunk,
            0,
            1,
            torch.device("cpu"),
            input_args=torch.empty(1, WIDTH),
            output_args=torch.empty(1, WIDTH),
            group=self.mesh["pp"].get_group(),
        )
        self.losses_left = 3
        self.batch = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(self, losses: int = 3) -> None:
        """Run a step, in which the loss fails after so many microbatches."""
        self.losses_left = losses
        schedule = pipelining.Schedule1F1B(self.stage, 3, loss_fn=self._loss)
        schedule.step(self.batch, target=self.batch)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.losses_left == 0:
            raise Mishap
        self.losses_left -= 1
        return F.mse_loss(output, target)


def steps_that_reduce_nothing() -> None:
    pipeline = OneStage()
    pipeline.step()
    once = gradients(pipeline.chunk)
    pipeline.chunk.zero_grad()
    pipeline.chunk.set_requires_gradient_sync(False)
    pipeline.step()
    assert not gradients(pipeline.chunk)
    pipeline.chunk.set_requires_gradient_sync(True)
    pipeline.step()
    twice = {name: 2 * gradient for name, gradient in once.items()}
    assert_close(gradients(pipeline.chunk), twice, rtol=1e-5, atol=1e-6)


def steps_that_fail() -> None:
    pipeline = OneStage()
    optimizer = torch.optim.SGD(pipeline.chunk.parameters(), lr=0.1)
    pipeline.step()
    expected = gradients(pipeline.chunk)
    optimizer.zero_grad()
    with pytest.raises(Mishap):
        pipeline.step(losses=2)
    with pytest.raises(LifecycleError, match=r"not reduced: \['0.left of stage 0', .*zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    pipeline.step()
    assert_close(gradients(pipeline.chunk), expected, rtol=1e-5, atol=1e-6)
    optimizer.step()
    optimizer.zero_grad()
    # Without a pipeline, the options are the user's again after a reset.
    with pytest.raises(Mishap):
        pipeline.step(losses=2)
    pipeline.chunk.reset_iter_state()
    pipeline.chunk(pipeline.batch).sum().backward()
    assert gradients(pipeline.chunk).keys() == expected.keys()


def test_a_step_may_reduce_nothing(world) -> None:
    world(2).run(steps_that_reduce_nothing)


def test_a_failed_step_is_not_optimized_and_the_next_one_is_right(world) -> None:
    world(2).run(steps_that_fail)
