import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

import fullshard

ROOT = Path(__file__).parents[2]
TINY = "--layers 2 --width 32 --batch 1 --context 8 --vocab 64".split()
SHORT = "--device cpu --world 4 --rounds 1 --steps 2 --warmup 1".split()


def run_benchmark(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, str(ROOT / "benchmarks" / "step.py"), *SHORT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=130, check=False)


def test_every_contestant_is_in_the_table_and_in_the_samples(
    tmp_path: Path, preloaded_python: str
) -> None:
    expected = ["unsharded", "fsdp2"]
    if hasattr(fullshard, "fully_shard"):
        expected.append("fullshard")
    file = tmp_path / "step.json"
    names = ["unsharded", "fsdp2", "fullshard"]
    finished = run_benchmark(preloaded_python, *TINY, "--contestants", *names, "--json", str(file))
    assert finished.returncode == 0, finished.stderr
    written = json.loads(file.read_text())
    (result,) = written["results"]
    assert result["num_groups"] == 3
    assert str(tmp_path) not in written["header"]["command"]
    for name in expected:
        assert f"\n| {name} " in finished.stdout
        contestant = result["contestants"][name]
        assert contestant["status"] == "measured", contestant["reason"]
        for quantity in ("forward_backward_s", "host_s", "optimizer_s"):
            assert len(contestant["samples"][quantity]) == 2
            assert contestant["summary"][quantity]["median"] > 0
        assert contestant["memory"] is None  # nothing untrue is said about memory on the CPU
    assert "\n| plain shards " in finished.stdout


def test_blocks_are_compiled_once_per_contestant_and_not_in_timed_steps(
    tmp_path: Path, preloaded_python: str
) -> None:
    file = tmp_path / "step.json"
    names = ["unsharded", "fsdp2", "fullshard"]
    compiled = ["--compile", "aot_eager", "--no-optimizer"]
    finished = run_benchmark(
        preloaded_python, *TINY, *compiled, "--contestants", *names, "--json", str(file)
    )
    assert finished.returncode == 0, finished.stderr
    assert "; blocks compiled by aot_eager. " in finished.stdout
    (result,) = json.loads(file.read_text())["results"]
    assert result["compiler"] == "aot_eager"
    for name in names:
        contestant = result["contestants"][name]
        assert contestant["status"] == "measured", contestant["reason"]
        # A frame for the block; sharded, it is in parts around the hooks.
        assert 1 <= contestant["compilations"] <= 4
        assert contestant["timed_compilations"] == 0
        assert contestant["summary"]["over_rival"] > 0


def test_sizes_that_do_not_fit_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.transformer import PRESETS

    with pytest.raises(ValueError, match="multiple of head_width, got 40 and 16"):
        dataclasses.replace(PRESETS["tiny"], width=40)
