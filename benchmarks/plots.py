"""Draw the page's plots from the JSON files of scaling.py and targets.py, beside them.

    python benchmarks/plots.py benchmarks/results/*.json

    scaling-*.json   -> ...-worlds.svg      extra host time, and peak memory of a step, over ranks
                        ...-parameters.svg  extra host time over parameters in a group
                        ...-padding.svg     padding over ranks
    targets-*.json   -> ....svg             every ratio beside its target

Needs matplotlib: the extra `benchmarks`. A file of another kind is an error.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which all kinds of eyes can tell apart; markers differ, too.
STYLES: Mapping[str, dict[str, str]] = {
    "fsdp2": {"color": "#D55E00", "marker": "s", "label": "torch FSDP2"},
    "fullshard": {"color": "#0072B2", "marker": "o", "label": "fullshard"},
}
NEUTRAL, TARGET_MARK = "#999999", "#000000"
PRESET_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MIB = 1 << 20

Figure = Any
"""matplotlib's; it is optional, so its types are not ours to know."""


def figure(columns: int, *, height: float = 3.2) -> tuple[Figure, list[Any]]:
    """Make one row of axes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fullshard"  # the same data give the same file
    from matplotlib import pyplot

    made, axes = pyplot.subplots(
        1, columns, figsize=(4.6 * columns, height), squeeze=False, layout="constrained"
    )
    return made, list(axes[0])


def over_worlds(axes: Any, worlds: Sequence[int]) -> None:
    """Label the x axis with world sizes."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    axes.set_xlabel("ranks")


def finish(axes: Any, title: str, unit: str) -> None:
    """Title, unit, a zero line to compare against, a legend."""
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)


def host_times(axes: Any, points: Sequence[dict[str, Any]], size: str) -> None:
    """Draw extra host time per group, in microseconds, with bars from the lower to the upper quartile."""
    for name, style in STYLES.items():
        own = [point for point in points if point["contestant"] == name]
        spreads = [point["host_s"] for point in own]
        axes.errorbar(
            [point[size] for point in own],
            [spread["lower_quartile"] * 1e6 for spread in spreads],
            yerr=([0.0] * len(own), [spread["iqr"] * 1e6 for spread in spreads]),
            capsize=2,
            **style,
        )


def draw_worlds(points: Sequence[dict[str, Any]]) -> Figure:
    """Host time and peak memory over ranks, for the model that all worlds divide evenly."""
    even = [point for point in points if point["model"] == "even"]
    worlds = sorted({point["world"] for point in even})
    made, (hosts, peaks) = figure(2)
    host_times(hosts, even, "world")
    over_worlds(hosts, worlds)
    finish(hosts, "extra host time per group and step, without collectives", "us")
    for name, style in STYLES.items():
        own = [point for point in even if point["contestant"] == name]
        peaks.plot(
            [point["world"] for point in own], [point["peak_bytes"] / MIB for point in own], **style
        )
    over_worlds(peaks, worlds)
    finish(peaks, "peak memory of a step beyond the shards", "MiB")
    return made


def draw_parameters(points: Sequence[dict[str, Any]]) -> Figure:
    """Host time over the number of parameters of a group."""
    made, (axes,) = figure(1)
    host_times(axes, points, "params_per_group")
    axes.set_xlabel("parameters of a group, all together of the same size")
    finish(axes, "extra host time per group and step", "us")
    return made


def draw_padding(found: Sequence[dict[str, Any]]) -> Figure:
    """Padding over ranks, by model: by rows and flat."""
    worlds = sorted({one["world"] for one in found})
    made, both = figure(2)
    titles = {"rows_bytes": "by rows: fully_shard", "flat_bytes": "flat: wrappers"}
    for axes, (kind, title) in zip(both, titles.items(), strict=True):
        presets = dict.fromkeys(one["preset"] for one in found)
        for preset, colour in zip(presets, PRESET_COLOURS, strict=True):
            own = [one for one in found if one["preset"] == preset]
            shares = [100 * one[kind] / one["parameter_bytes"] for one in own]
            axes.plot([one["world"] for one in own], shares, color=colour, marker=".", label=preset)
        over_worlds(axes, worlds)
        finish(axes, f"padding, {title}", "% of the parameters")
    return made


def draw_targets(rows: Mapping[str, dict[str, Any]]) -> Figure:
    """A bar for every ratio and a mark at its target; FSDP2 (or what is divided by) is at 1."""
    shown = {row: found for row, found in rows.items() if "value" in found}
    made, (axes,) = figure(1, height=0.8 + 0.32 * len(shown))
    heights = range(len(shown))
    axes.barh(
        heights,
        [found["value"] for found in shown.values()],
        xerr=[
            (found["ratio"] or {"by_round": {"iqr": 0}})["by_round"]["iqr"] / 2
            for found in shown.values()
        ],
        color=[
            STYLES["fullshard"]["color"] if found["met"] != "no" else NEUTRAL
            for found in shown.values()
        ],
        height=0.6,
        capsize=2,
        label="measured (grey: target missed)",
    )
    marks = [
        (height, found["target"])
        for height, found in enumerate(shown.values())
        if found["target"] is not None
    ]
    axes.plot(
        [target for _, target in marks],
        [height for height, _ in marks],
        linestyle="none",
        marker="|",
        markersize=14,
        markeredgewidth=2,
        color=TARGET_MARK,
        label="target: at most",
    )
    axes.axvline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.set_yticks(heights, list(shown), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ratio; smaller is better")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.18))
    return made


def drawings(results: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Find what can be drawn of one file's results, each with the end of its name."""
    points = results.get("points", [])
    worlds = [point for point in points if point["study"] == "worlds"]
    cut = [point for point in points if point["study"] == "parameters"]
    if worlds:
        yield "-worlds", lambda: draw_worlds(worlds)
    if cut:
        yield "-parameters", lambda: draw_parameters(cut)
    if results.get("padding"):
        yield "-padding", lambda: draw_padding(results["padding"])
    if "rows" in results:
        yield "", lambda: draw_targets(results["rows"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw everything that the files have."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    files = parser.parse_args(arguments).files
    for file in files:
        results = json.loads(file.read_text())["results"]
        found = list(drawings(results)) if isinstance(results, dict) else []
        if not found:
            raise SystemExit(f"plots.py: {file} must come from scaling.py or targets.py.")
        for ending, draw in found:
            target = file.with_name(f"{file.stem}{ending}.svg")
            try:
                draw().savefig(target, metadata={"Date": None})
            except ImportError as error:
                raise SystemExit(
                    f"plots.py: plots need matplotlib ({error}). Install the extra `benchmarks`, or run "
                    "this where it is; the files are all it needs."
                ) from error
            print(target)


if __name__ == "__main__":
    main()
