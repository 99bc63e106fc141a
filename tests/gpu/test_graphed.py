"""`graphed` on a GPU: replays equal eager steps, and are captured again, or not at all, when they should be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import fullshard
from fullshard import CPUOffloadPolicy
from fullshard.optim import ShardedOptimizer
from tests.gpu.graph_cases import (
    BATCH,
    CASES,
    Case,
    adamw_case,
    clear,
    compiled_model,
    graphed_of,
    inputs,
    local,
    loss_of,
    plain_step,
    results,
)
from tests.gpu.test_streams import WIDTH, equal, make_model
from tests.helpers.fake import fake_world

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reduce_scatter_that_reduces")]


@pytest.mark.parametrize("name", ["fused sharded adamw", "adamw", "muon", "wrapper"])
def test_fifty_graphed_steps_equal_eager_ones(name: str) -> None:
    with fake_world(4):
        eager, case = CASES[name](), CASES[name]()
        step = graphed_of(case)
        for number, x in enumerate(inputs(50)):
            clear(eager)
            expected = results(eager, eager.step(x))
            assert equal(results(case, step(x.cpu() if number % 2 else x)), expected), number
        assert step.num_graphs == 1
        assert step.eager_reason is None


def test_each_shape_and_mode_has_a_graph_in_one_pool() -> None:
    with fake_world(4):
        eager, case = adamw_case(), adamw_case()
        step = graphed_of(case, warmup=1)
        sizes = []
        for number, x in enumerate(inputs(12)):
            x = x[: BATCH // 2] if number % 2 else x
            for each in (eager, case):
                each.model.train(number < 8)
            clear(eager)
            assert equal(results(case, step(x)), results(eager, eager.step(x))), number
            sizes.append(step.pool_bytes)
        assert step.num_graphs == 4
        assert sizes[1] == 0 < sizes[2] <= sizes[-1] < 3 * sizes[2]
        step.reset()
        clear(case)
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
        assert step.num_graphs == step.pool_bytes == 0
        for x in inputs(3):
            clear(eager)
            assert equal(results(case, step(x)), results(eager, eager.step(x)))
        assert step.num_graphs == 1
        assert torch.cuda.memory_reserved() >= held + step.pool_bytes // 2


def replace_parameter(case: Case) -> None:
    param = next(case.model.parameters())
    param.data = param.data.clone()


def set_option(case: Case) -> None:
    case.model.set_reshard_after_forward(False)


def load_state(case: Case) -> None:
    assert case.optimizer is not None
    case.optimizer.load_state_dict(copy.deepcopy(case.optimizer.state_dict()))


def decay_more(case: Case) -> None:
    assert case.optimizer is not None
    case.optimizer.param_groups[0]["weight_decay"] = 0.2


CHANGES: dict[Callable[[Case], None], str] = {
    replace_parameter: "the parameters",
    set_option: "options of the model",
    load_state: "the optimizer's state",
    decay_more: "options of the optimizer",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_baked_in_and_has_changed_is_captured_again(
    change: Callable[[Case], None], caplog: pytest.LogCaptureFixture
) -> None:
    with fake_world(4), caplog.at_level("INFO", "fullshard"):
        # Data can be assigned to the parameters of a wrapper, but not to DTensors; it has no such option.
        make = adamw_case if change is set_option else CASES["wrapper, sharded adamw"]
        eager, case = make(), make()
        step = graphed_of(case, warmup=1)
        for number, x in enumerate(inputs(8)):
            if number == 4:
                change(eager)
                change(case)
            clear(eager)
            assert equal(results(case, step(x)), results(eager, eager.step(x))), number
        assert [text for text in caplog.messages if "captured again" in text] == [
            f"A graphed step is captured again: {CHANGES[change]} changed."
        ]
        assert step.num_graphs == 1


def test_the_state_of_the_optimizer_can_be_read_between_replays() -> None:
    with fake_world(4):
        case = adamw_case()
        step = graphed_of(case, warmup=1)
        for number, x in enumerate(inputs(8), 1):
            step(x)
            if number % 3 == 0:
                assert case.optimizer is not None
                steps = {float(each["step"]) for each in case.optimizer.state.values()}
                assert steps == {float(number)}
        assert step.num_graphs == 1


def test_rates_may_be_changed_by_a_scheduler_or_by_assignment() -> None:
    with fake_world(4):
        rates, finals = [], []
        for is_graphed in (False, True):
            model = make_model()
            optimizer = ShardedOptimizer(
                optim.AdamW,
                model.parameters(),
                lr=torch.tensor(0.01, device="cuda"),
                capturable=True,
            )
            scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

            def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
                loss = loss_of(model, x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            run: Any = step
            if is_graphed:
                run = fullshard.graphed(step, inputs(1), model=model, optimizer=optimizer, warmup=1)
            for number, x in enumerate(inputs(8)):
                run(x)
                if number < 5:
                    scheduler.step()
                else:
                    rate = torch.tensor(0.003, device="cuda")
                    optimizer.param_groups[0]["lr"] = float(rate) if is_graphed else rate
            rates.append(float(optimizer.param_groups[0]["lr"]))
            finals.append([local(param) for param in model.parameters()])
            assert all(param.grad is None for param in model.parameters())
        assert rates[0] == pytest.approx(rates[1])
        assert equal(*finals)


def test_dropout_drops_other_elements_in_each_replay() -> None:
    with fake_world(4):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25))
        fullshard.fully_shard(model)

        def step(x: Tensor) -> Tensor:
            kept = model(x)
            kept.sum().backward()
            return kept != 0

        run = fullshard.graphed(step, inputs(1), model=model, warmup=1)
        masks = [run(inputs(1)[0]) for _ in range(6)]
        assert run.num_graphs == 1
        for one, other in itertools.pairwise(masks):
            assert 0.7 < one.float().mean() < 0.8
            assert 0.5 < (one == other).float().mean() < 0.7  # independent: 0.75 ** 2 + 0.25 ** 2
        torch.manual_seed(7)
        first = run(inputs(1)[0])
        torch.manual_seed(7)
        assert torch.equal(run(inputs(1)[0]), first)


def test_compiled_blocks_are_graphed() -> None:
    with fake_world(4):
        eager, case = plain_step(compiled_model()), plain_step(compiled_model())
        step = graphed_of(case)
        for x in inputs(6):
            clear(eager)
            assert equal(results(case, step(x)), results(eager, eager.step(x)))
        assert step.num_graphs == 1


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("reads", "could not be captured"),
        ("offload", "host memory"),
        ("optimizer", "not given as optimizer="),
    ],
)
def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why_once(
    caplog: pytest.LogCaptureFixture, obstacle: str, reason: str
) -> None:
    with fake_world(4):
        offload: Any = {"offload": CPUOffloadPolicy()} if obstacle == "offload" else {}
        if obstacle == "optimizer":
            eager, case = adamw_case(), adamw_case()
        else:
            eager, case = (plain_step(make_model(**offload)) for _ in range(2))

        def step(x: Tensor) -> Tensor:
            loss = case.step(x)
            if obstacle == "reads":
                assert loss.item() > 0  # the host waits
            return loss

        run = fullshard.graphed(step, inputs(1), model=case.model, warmup=2)
        for number, x in enumerate(inputs(6)):
            clear(eager)
            assert equal(results(case, run(x)), results(eager, eager.step(x))), number
            torch.randn(1, device="cuda")
        told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert len(told) == 1
        assert reason in told[0]
        assert run.eager_reason is not None
        assert run.num_graphs == 0


def test_traced_and_evaluated_steps_run_eagerly_between_replays(tmp_path: Path) -> None:
    with fake_world(4):
        eager, case = adamw_case(), adamw_case()
        step = graphed_of(case, warmup=1)
        for number, x in enumerate(inputs(9)):
            clear(eager)
            expected = results(eager, eager.step(x))
            if number == 5:
                with fullshard.trace(case.model, tmp_path) as recording:
                    loss = step(x)
                    recording.step()
                assert step.eager_reason == "a trace is recorded"
            else:
                loss = step(x)
            assert equal(results(case, loss), expected), number
            with torch.no_grad():
                assert torch.equal(case.model(x), eager.model(x))
