"""Prints what each stage of a pipeline reached, from the folders that its script has made.

    python scripts/stage_table.py "cold start=runs/r1/1-cold-start" "GRPO=runs/r1/2-grpo"

A stage's line is the last one of its eval.jsonl; the first stage's first line, before any step, is the model it began
from. A stage that only sampled or learned to rank shows what it has instead of an accuracy; a reward that a stage does
not measure is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from rlft.logger.jsonl import EVALUATIONS, METRICS, read_lines

REWARDS = ("format", "language")


def rows(name: str, folder: Path, with_start: bool) -> Iterator[list[str]]:
    """(stage, held-out accuracy, format, language, what else is to say, seconds of steps)."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    if config["verb"] == "sample":
        state = json.loads((folder / "progress.json").read_text())
        said = f"kept {state['kept']:,} of {state['sampled']:,} completions, {state['prompts_kept']:,} prompts"
        yield [name, "", "", "", said, ""]
        return
    evaluations = read_lines(folder / EVALUATIONS)
    seconds = sum(line["time/step"] for line in read_lines(folder / METRICS))
    if config["verb"] == "rm":
        pairs = f"held-out pairs {evaluations[-1]['accuracy']:.3f} ± {evaluations[-1]['accuracy_se']:.3f}"
        yield [name, "", "", "", pairs, f"{seconds:.0f}"]
        return
    if with_start:
        yield [f"{config['model']['path']}, as it is", *measured(evaluations[0]), ""]
    yield [name, *measured(evaluations[-1]), f"{seconds:.0f}"]


def measured(line: dict[str, Any]) -> list[str]:
    accuracy = f"{line['accuracy']:.3f} ± {line['accuracy_se']:.3f}"
    shares = [f"{line[f'eval/reward/{name}']:.3f}" if f"eval/reward/{name}" in line else "" for name in REWARDS]
    learned = line.get("eval/reward/learned")
    return [accuracy, *shares, "" if learned is None else f"reward model's score {learned:.2f}"]


def main(words: list[str]) -> None:
    table = Table("stage", "held-out accuracy", *REWARDS, "besides", "seconds of steps")
    models: set[str] = set()
    for word in words:
        name, _, folder = word.partition("=")
        config = yaml.safe_load((Path(folder) / "config.yaml").read_text())
        adapter = (config.get("lora") or {}).get("path")
        model = config["model"]["path"]
        # What another stage made is a line of its own already.
        begins = adapter is None and "/checkpoints/" not in model and model not in models
        fresh = config["verb"] in ("sft", "train") and begins
        for row in rows(name, Path(folder), fresh):
            table.add_row(*row)
        if fresh:
            models.add(model)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
