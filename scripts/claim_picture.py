"""The picture of docs/claims.md: a panel a claim, in which each arm has a point a seed and its mean, or curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from significance import half_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""{arm: {seed: {quantity: a number, or a list with one for each step}}}"""
COLUMNS = 3
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def draw(panels: Sequence[tuple[str, str, Values]], file: Path) -> None:
    """panels: (title, the quantity that is drawn, its values)."""
    from matplotlib.figure import Figure

    height = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(3.5 * COLUMNS, 2.7 * height), dpi=150, layout="constrained")
    axes = figure.subplots(height, COLUMNS, squeeze=False)
    for panel in axes.flat[len(panels) :]:
        panel.set_axis_off()
    for panel, (title, quantity, values) in zip(axes.flat, panels, strict=False):
        by_arm = {arm: [seed[quantity] for seed in seeds.values()] for arm, seeds in values.items()}
        curves = any(isinstance(number, list) for numbers in by_arm.values() for number in numbers)
        (draw_curves if curves else draw_arms)(panel, by_arm)
        panel.set_xlabel("step" if curves else quantity, fontsize=8)
        if curves:
            panel.set_ylabel(quantity, fontsize=8)
        panel.set_title(fill(title, 36), fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.locator_params("x", nbins=5, integer=curves)
        panel.grid(color="#EEEEEE", linewidth=0.6, zorder=0)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Software": None})


def draw_curves(panel: Axes, by_arm: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """A faint line a seed, and their mean."""
    for (arm, curves), colour in zip(by_arm.items(), COLOURS, strict=False):
        for curve in curves:
            panel.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.3, linewidth=0.8)
        mean = [statistics.fmean(step) for step in zip(*curves, strict=True)]
        panel.plot(range(1, len(mean) + 1), mean, color=colour, linewidth=1.6, label=arm)
    panel.legend(fontsize=7, frameon=False)


def draw_arms(panel: Axes, by_arm: Mapping[str, Sequence[float]]) -> None:
    """A row an arm: a point a seed, under them the mean with its 95 % interval."""
    for i, (numbers, colour) in enumerate(zip(by_arm.values(), COLOURS, strict=False)):
        panel.plot(numbers, [i] * len(numbers), "o", color=colour, alpha=0.5, markersize=4, markeredgewidth=0)
        mean, half = statistics.fmean(numbers), half_interval(numbers) or 0.0
        panel.errorbar(mean, i + 0.25, xerr=half, fmt="|", color=colour, markersize=7, capsize=3)
    panel.set_yticks(range(len(by_arm)), [fill(arm, 18) for arm in by_arm])
    panel.set_ylim(len(by_arm) - 0.4, -0.5)
