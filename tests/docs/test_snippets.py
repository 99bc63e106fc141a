"""The short snippets of README and docs/ run as they stand. (guide.md and how_do_i.md have tests of their own.)"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fullshard
from fullshard import checkpoint, fully_shard
from tests.helpers.page_programs import DOCS, blocks

PAGES = ("../README.md", "checkpoints.md", "divergence.md", "migration.md", "migration_fsdp1.md", "optimizers.md", "tracing.md")  # fmt: skip
"""Their snippets run here, in the order of the page."""

ELSEWHERE = {
    "api.md": "docstrings; signatures, mostly",
    "clients.md": "tests/drop_in/test_install.py",
    "graphs.md": "tests/gpu/test_graphed.py",
    "guide.md": "tests/docs/test_guide.py",
    "how_do_i.md": "tests/docs/test_how_do_i.py",
    "pipelining.md": "tests/features/test_pipelining.py",
    "streams.md": "tests/checks/test_debug.py",
    "report.md": "tests/docs/test_commands.py writes reports",
}
NOT_A_PROGRAM = "self.vision"  # a line of a module; tests/promises/test_skipped_forward.py


class Net(nn.Module):
    """A model with layers that returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def names_given(page: str) -> dict[str, Any]:
    model = Net()
    model.layers[0].requires_grad_(page != "checkpoints.md")  # which leaves frozen parameters out
    if page != "../README.md":
        fully_shard(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    batches = [torch.ones(2, 4) for _ in range(23)]
    return {
        "torch": torch,
        "fullshard": fullshard,
        "checkpoint": checkpoint,
        "model": model,
        "optimizer": torch.optim.AdamW(trained, lr=0.1),
        "batches": batches,
        "batch": batches[:2],
        "loader": batches[:2],
        "evaluate": lambda model: model(batches[0]),
    }


def run_snippets(folder: str) -> list[str]:
    """Run all snippets; returns what failed. The models still train afterwards."""
    wrong = []
    for page in PAGES:
        names = names_given(page)
        for code in blocks((DOCS / page).read_text(), "python"):
            if NOT_A_PROGRAM in code:
                continue
            try:
                with contextlib.chdir(folder):
                    if "base_of" in code:
                        checkpoint.save("runs/a/base", names["model"])
                    exec(compile(code, page, "exec"), names)
            except Exception as error:
                wrong.append(f"{page}: {error!r} in\n{code}")
        names["model"](torch.ones(2, 4)).backward()
        names["optimizer"].step()
    return wrong


def test_snippets_of_the_pages_run(world, tmp_path: Path) -> None:
    with_snippets = {page.name for page in DOCS.glob("*.md") if blocks(page.read_text(), "python")}
    assert with_snippets == {*PAGES[1:], *ELSEWHERE}, "which test runs these?"
    for wrong in world(2).run(run_snippets, str(tmp_path)):
        assert not wrong
    assert checkpoint.latest(tmp_path / "runs/a") is not None
    assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == [
        "rank_00000.json",
        "rank_00001.json",
    ]
