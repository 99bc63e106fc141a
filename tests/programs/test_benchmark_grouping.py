"""The benchmark of planned groups runs, and counts what it should."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_planned_groups_need_fewer_collectives(preloaded_python: str) -> None:
    arguments = "--device cpu --layers 8 --width 32 --world 4 --rounds 1".split()
    command = [preloaded_python, str(ROOT / "benchmarks" / "grouping.py"), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=130, check=False)
    assert finished.returncode == 0, finished.stderr
    rows = [line.split("|") for line in finished.stdout.splitlines() if line.startswith("| ")]
    counts = {row[1].strip(): (row[2].strip(), row[3].strip()) for row in rows[2:]}
    # A gather for forward, one for backward and a reduction per group; the root stays gathered.
    assert counts["group per layer"] == counts["torch, group per layer"] == ("9", "26")
    assert counts["plan"] == ("5", "14")
    assert "merged to reach" in finished.stdout
