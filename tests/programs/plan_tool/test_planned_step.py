"""A planned step: what is said of it follows from its program, and few layers tell what many do."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from torch import nn

from fullshard.features import padding
from fullshard.programs.plan_tool.answers import About
from fullshard.programs.plan_tool.memory_use import MOST_MOMENTS
from fullshard.programs.plan_tool.output import print_planned
from fullshard.programs.plan_tool.planned_step import (
    DEPTHS,
    estimate_step,
    model_flops,
    plan_microbatches,
    plan_step,
)
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.plan_tool.program import Kernel
from fullshard.programs.train.model_source import open_model
from tests.programs.plan_tool.test_recording import WORLD, config, launched, recorded

H100 = load_profile("h100")
DEEP = {"layers": DEPTHS[1] + 4, "width": 512, "heads": 4}


def test_few_layers_tell_what_many_take() -> None:
    run = config(
        model=DEEP,
        data={"context": 1024},
        compute={"precision": "bf16", "checkpoint_activations": "selective"},
    )
    source = open_model(run)
    planned = plan_step(run, WORLD, H100, source)
    estimated = estimate_step(run, WORLD, H100, source)
    assert estimated.seconds == pytest.approx(planned.seconds, rel=0.01)
    assert estimated.flops == pytest.approx(planned.flops)
    assert estimated.memory.allocated == pytest.approx(planned.memory.allocated, rel=0.05)
    assert estimated.memory.reserved == pytest.approx(planned.memory.reserved, rel=0.1)
    assert estimated.memory.at_rest == pytest.approx(planned.memory.at_rest, rel=0.01)
    assert estimated.playback.idle["gather"] == pytest.approx(
        planned.playback.idle["gather"], rel=0.05
    )
    assert estimated.trace is None


def test_few_microbatches_tell_what_many_take() -> None:
    run = config(train={"batch": 6 * WORLD, "accumulate": 6})
    source = open_model(run)
    planned = plan_step(run, WORLD, H100, source)
    for few in (
        plan_microbatches(run, WORLD, H100, source, most=4),
        estimate_step(run, WORLD, H100, source),
    ):
        assert few.config == run and few.tokens == planned.tokens
        assert few.seconds == pytest.approx(planned.seconds, rel=1e-3)
        assert few.flops == pytest.approx(planned.flops)
        assert few.memory.allocated == pytest.approx(planned.memory.allocated, rel=1e-3)
        assert few.memory.reserved == pytest.approx(planned.memory.reserved, rel=0.02)
        assert few.playback.gradient_seconds == pytest.approx(
            planned.playback.gradient_seconds, rel=1e-3
        )


def test_a_step_of_the_wrapper_has_the_wrapper_s_groups() -> None:
    """Ranks divide neither the rows of matrices nor those of vectors, but the flat array nearly."""
    ranks, model = 7, {"layers": 2, "width": 20, "heads": 2}
    padded = {}
    for api in ("fsdp2", "fsdp1"):
        run = config(model=model, sharding={"api": api}, train={"batch": ranks})
        planned = plan_step(run, ranks, H100)
        assert planned.trace is not None and planned.padding is None
        groups = planned.trace.groups
        padded[api] = sum(group.padded_numel for group in groups)
        numel = sum(group.numel for group in groups)
    assert padded["fsdp1"] < 1.001 * numel < 1.01 * numel < padded["fsdp2"]


def test_much_padding_is_named_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "WORTH_SAYING", 1)
    ranks = 512
    planned = plan_step(config(model={"layers": 1}, train={"batch": ranks}), ranks, H100)
    assert planned.padding is not None and "rows along dimension 0 for 512 ranks" in planned.padding
    console = Console(file=io.StringIO(), width=500)
    print_planned(console, planned, About(description="a decoder", parameters=1))
    assert "padded by more than a quarter" in console.file.getvalue()  # type: ignore[attr-defined]


def test_whole_gradients_between_microbatches_are_told_apart_from_temporary_tensors() -> None:
    source = open_model(config())
    whole = 4 * sum(param.numel() for param in source.build().parameters())
    one, two = (
        plan_step(config(train={"batch": 2 * WORLD, "accumulate": each}), WORLD, H100, source)
        for each in (1, 2)
    )
    assert "accumulated" not in one.memory.at_peak
    assert two.memory.at_peak["accumulated"] == pytest.approx(whole, rel=0.1)


def test_a_plan_is_a_trace_that_the_report_can_read() -> None:
    planned = plan_step(config(), WORLD, H100)
    trace = planned.trace
    assert trace is not None
    assert trace.world == WORLD
    [step] = [span for span in trace.spans if span.kind == "step"]
    assert step.duration_us == pytest.approx(planned.seconds * 1e6, rel=0.05)
    waits = sum(span.duration_us for span in trace.spans if span.kind == "wait")
    idle = planned.playback.idle["gather"] + planned.playback.idle["reduction"]
    assert waits >= idle * 1e6 * 0.99
    gathers = [span for span in trace.spans if span.kind == "gather"]
    assert {span.group for span in gathers} == {group.name for group in trace.groups}
    most = max(sample.allocated or 0 for sample in trace.memory)
    assert 0.9 * planned.memory.allocated < most + H100.workspace_bytes <= planned.memory.allocated


def test_memory_at_the_peak_is_all_of_it() -> None:
    planned = plan_step(config(compute={"precision": "bf16"}), WORLD, H100)
    memory = planned.memory
    assert sum(memory.at_peak.values()) == memory.allocated
    assert memory.at_rest < memory.allocated <= memory.reserved
    assert planned.fits
    assert not plan_step(
        config(model={"layers": 2, "width": 16384, "heads": 128, "vocabulary": 100_000}), 1, H100
    ).fits


def test_recomputation_trades_memory_for_time() -> None:
    plans = [
        plan_step(
            config(
                model={**DEEP, "layers": 3},
                data={"context": 1024},
                compute={"precision": "bf16", "checkpoint_activations": what},
            ),
            WORLD,
            H100,
        )
        for what in ("none", "selective", "blocks")
    ]
    allocated = [plan.memory.allocated for plan in plans]
    arithmetic = [plan.playback.compute["matmul"] for plan in plans]
    assert allocated == sorted(allocated, reverse=True)
    assert arithmetic == sorted(arithmetic)
    assert len({plan.flops for plan in plans}) == 1


def test_compiled_blocks_keep_less_for_backward_and_compute_faster() -> None:
    eager, compiled = (
        plan_step(
            config(
                model={**DEEP, "layers": 2},
                data={"context": 1024},
                compute={"precision": "bf16", "compile": what},
            ),
            WORLD,
            H100,
        )
        for what in ("none", "blocks")
    )
    ratio = compiled.memory.at_peak["activations"] / eager.memory.at_peak["activations"]
    assert ratio == pytest.approx(H100.compiled.activations, rel=0.01)
    assert sum(compiled.memory.at_peak.values()) == compiled.memory.allocated
    assert compiled.playback.compute["memory"] < eager.playback.compute["memory"]


@pytest.mark.parametrize(
    ("trainable", "least", "most"),
    [
        (None, 3.0, 3.0),
        # Backward of frozen blocks computes gradients of activations only; attention has no parameters.
        ("*norm*", 2.0, 2.2),
        ("head*", 1.0, 1.1),
    ],
)
def test_gradients_of_frozen_parameters_are_no_arithmetic_of_the_model(
    trainable: str | None, least: float, most: float
) -> None:
    for again in ("none", "blocks"):
        run = config(
            model={"layers": 3, "width": 64, "heads": 2, "trainable": trainable},
            compute={"checkpoint_activations": again},
        )
        program = recorded(run)
        forward = sum(
            entry.work.flops
            for entry in launched(program)
            if entry.phase == "forward" and isinstance(entry.work, Kernel)
        )
        assert least <= model_flops(program) / forward <= most


def test_memory_over_the_step_has_its_peak_and_ends_with_the_step() -> None:
    run = config(model={**DEEP, "layers": 3}, data={"context": 1024})
    planned = plan_step(run, WORLD, H100)
    moments = planned.memory_moments
    assert 50 < len(moments) <= MOST_MOMENTS + 1
    assert max(moment.total for moment in moments) == planned.memory.allocated
    times = [moment.seconds for moment in moments]
    assert times == sorted(times) and (times[0], times[-1]) == (0.0, planned.seconds)
    # The host has issued all of it long before.
    kept = [moment.by_kind.get("activations", 0) for moment in moments]
    highest = max(range(len(kept)), key=kept.__getitem__)
    assert 0.2 * planned.seconds < times[highest] < 0.5 * planned.seconds
    assert kept[-1] < 0.01 * kept[highest]


def test_layers_in_several_lists_are_planned_as_a_whole() -> None:
    run = config(model={**DEEP, "layers": 10})
    source = open_model(run)

    class Scattered:
        def __getattr__(self, name: str) -> object:
            return getattr(source, name)

        def blocks(self, model: nn.Module) -> list[nn.Module]:
            return source.blocks(model)[::2]

    scattered = Scattered()
    whole = plan_step(run, WORLD, H100, scattered)
    assert estimate_step(run, WORLD, H100, scattered).seconds == whole.seconds


@pytest.mark.parametrize("trainable", ["blocks.9.*", "blocks.0.* head*"])
def test_layers_of_which_some_are_frozen_are_planned_as_a_whole(trainable: str) -> None:
    run = config(model={**DEEP, "layers": 10, "trainable": trainable})
    source = open_model(run)
    whole, estimated = plan_step(run, WORLD, H100, source), estimate_step(run, WORLD, H100, source)
    assert (estimated.seconds, estimated.memory) == (whole.seconds, whole.memory)
    alike = config(model={**DEEP, "layers": 10, "trainable": "*norm*"})
    few, all_of_them = (plan(alike, WORLD, H100, source) for plan in (estimate_step, plan_step))
    assert few.seconds == pytest.approx(all_of_them.seconds, rel=0.05)
    assert few.seconds != all_of_them.seconds
