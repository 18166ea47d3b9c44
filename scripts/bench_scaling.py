"""Seconds and memory of a step against group size, prompt length and completion length: a table and a picture.

    python scripts/bench_scaling.py
    python scripts/bench_scaling.py --axes group --groups 2 8 32

Each point is a process of its own that takes a few steps of `rlft train`; the others are held at 8 prompts x G 8,
128 + 64 tokens. Leaves scaling.md and scaling.png in <out>. Needs `pip install 'rlft[bench]'` (matplotlib).
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from bench_work import default_dtype, run_rlft, table, where_and_when

from rlft.commands.doctor.work import SIZES, Workload, make_model

MIDDLE = Workload(prompt_tokens=128, completion_tokens=64)
AXES = {
    "group": ("group", [2, 4, 8, 16, 32, 64]),
    "prompt": ("prompt_tokens", [64, 128, 256, 512, 1024, 2048]),
    "completion": ("completion_tokens", [16, 32, 64, 128, 256]),
}
TITLES = {"group": "completions of a prompt (G)", "prompt": "prompt, tokens", "completion": "completion, tokens"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    for axis, (_, values) in AXES.items():
        parser.add_argument(f"--{axis}s", nargs="+", type=int, default=values)
    parser.add_argument("--size", choices=list(SIZES), default="17m")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--override", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("bench"))
    asked = parser.parse_args()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = str(make_model(out / asked.size, SIZES[asked.size], default_dtype()))
    points = []
    for axis in asked.axes:
        for value in getattr(asked, f"{axis}s"):
            work = replace(MIDDLE, **{AXES[axis][0]: value})
            measured = run_rlft(out / "run", model, work, asked.steps, asked.override, embedded=False)
            middle = {s: statistics.median(step[s] for step in measured.seconds) for s in ("step", "sample", "train")}
            points.append({"axis": axis, "value": value, "work": work, "peak": measured.peak, **middle})
            print(f"{work.name}: {middle['step']:.2f} s, {measured.peak / 1e9:.2f} GB", flush=True)
    head = ["along", "work", "step, s", "sample, s", "train, s", "step, ms a completion", "peak memory"]
    rows = [
        [
            p["axis"], p["work"].name, f"{p['step']:.2f}", f"{p['sample']:.2f}", f"{p['train']:.2f}",
            f"{1000 * p['step'] / p['work'].completions:.1f}", f"{p['peak'] / 1e9:.2f} GB",
        ]
        for p in points
    ]  # fmt: skip
    text = table(head, rows) + f"\n\nMedians of {asked.steps} steps. {where_and_when()}."
    (out / "scaling.md").write_text(text + "\n")
    print(text)
    draw(points, asked.axes, out / "scaling.png")


def draw(points: list[dict], axes: list[str], file: Path) -> None:
    """A column an axis: milliseconds a completion above, peak memory below."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, cells = pyplot.subplots(2, len(axes), figsize=(4 * len(axes), 6), squeeze=False, layout="constrained")
    for column, axis in enumerate(axes):
        along = [p for p in points if p["axis"] == axis]
        values = [p["value"] for p in along]
        upper, lower = cells[0][column], cells[1][column]
        for stage in ("step", "sample", "train"):
            upper.plot(values, [1000 * p[stage] / p["work"].completions for p in along], marker="o", label=stage)
        lower.plot(values, [p["peak"] / 1e9 for p in along], marker="o", color="tab:gray")
        for cell in (upper, lower):
            cell.set_xscale("log", base=2)
            cell.set_xticks(values, [str(v) for v in values])
            cell.set_ylim(bottom=0)
            cell.grid(alpha=0.3)
        lower.set_xlabel(TITLES[axis])
    cells[0][0].set_ylabel("milliseconds a completion")
    cells[1][0].set_ylabel("peak memory, GB")
    cells[0][-1].legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
