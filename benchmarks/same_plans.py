"""Compare the planned steps of two checkouts: bytes at their peaks, and times.

    python -m benchmarks.same_plans OLD_CHECKOUT NEW_CHECKOUT

A plan runs the engine on a virtual device, so it sees each allocation and each wait. A change of structure changes neither. The
exit status is 1 if a configuration differs.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import markdown

WORLD, GPU = 8, "h100"
MODEL = {"layers": 6, "heads": 4}
WIDTHS = (512, 2048)
CONFIGURATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "fp32": {},
    "bf16": {"compute": {"precision": "bf16"}},
    "recomputed": {"compute": {"precision": "bf16", "checkpoint_activations": "full"}},
    "fused gradients": {"compute": {"precision": "bf16", "fuse_gradients": True}},
    "separate gradients": {"compute": {"precision": "bf16", "fuse_gradients": False}},
    "microbatches": {"train": {"batch": 32, "accumulate": 2}},
    "wrapper": {"sharding": {"api": "fsdp1"}, "compute": {"precision": "bf16"}},
    "replicas": {"sharding": {"replicas": 2}},
    "offloaded": {"sharding": {"offload": True}},
    "kept after forward": {"sharding": {"reshard_after_forward": False}},
}


def planned() -> dict[str, list[float]]:
    """Return peak, reserved, resting and host bytes and microseconds of each configuration, of the fullshard on the path."""
    from fullshard.programs.plan_tool.planned_step import plan_step
    from fullshard.programs.plan_tool.profile_file import load_profile
    from fullshard.programs.train.config import RunConfig
    from fullshard.programs.train.model_source import open_model

    machine, found = load_profile(GPU), {}
    for name, sections in CONFIGURATIONS.items():
        for width in WIDTHS:
            config = RunConfig()
            given = {"model": {**MODEL, "width": width}, "data": {"context": 512}, **sections}
            for section, fields in given.items():
                config = replace(config, **{section: replace(getattr(config, section), **fields)})
            step = plan_step(config, WORLD, machine, open_model(config))
            use = step.memory
            found[f"{name}, width {width}"] = [
                *(use.allocated, use.reserved, use.at_rest, use.host_allocated),
                round(step.seconds * 1e6, 2),
            ]
    return found


def of_checkout(checkout: Path) -> dict[str, list[float]]:
    """Return what `planned` returns in a process that imports fullshard from a checkout."""
    source, here = checkout.resolve() / "src", Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.same_plans", "--print"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{here}"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print a table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="old and new")
    parser.add_argument("--print", action="store_true", help="of this fullshard, for programs")
    options = parser.parse_args(arguments)
    if options.print:
        print(json.dumps(planned()))
        return 0
    if len(options.checkouts) != 2:
        parser.error("give two checkouts: the old one and the new one")
    old, new = map(of_checkout, options.checkouts)
    rows = [
        [name, "equal" if old[name] == new[name] else f"{old[name]} became {new[name]}"]
        for name in old
    ]
    print(markdown(["configuration", "peak, reserved, resting, host bytes; microseconds"], rows))
    differing = sum(old[name] != new[name] for name in old)
    print(f"\n{len(old) - differing} of {len(old)} equal")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
