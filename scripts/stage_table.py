"""Prints what each stage of a pipeline reached, from the folders that its script has made.

    python scripts/stage_table.py --in runs/r1 "cold start=1-cold-start" "GRPO=2-grpo"
    python scripts/stage_table.py --in runs/r1 --json runs/r1/stages.json "cold start=1-cold-start"   # numbers, too

A stage's line is the last one of its eval.jsonl; the first stage's first line, before any step, is the model it began
from. A stage that only sampled or learned to rank shows what it has instead of an accuracy; a reward that a stage does
not measure is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from rlft.runs.forecast import seconds_without_pauses
from rlft.runs.lines import EVALUATIONS, METRICS, read_lines
from rlft.system.files import write_atomically

REWARDS = ("format", "language")
AGREEMENT = "teacher/agreement"
HEADINGS = {
    "accuracy": "held-out accuracy",
    "pairs": "held-out pairs",
    "format": "format",
    "language": "language",
    "learned": "reward model's score",
    "agreement": "in common with the teacher",
    "kept": "completions kept",
    "seconds": "seconds of steps",
}
"""The numbers of a stage, and what a table calls them."""


def numbers(folder: Path) -> dict[str, float]:
    """What the stage reached, by the keys of HEADINGS; `accuracy_se` and `pairs_se` are standard errors."""
    config = read_config(folder)
    if config["command"] == "sample":
        state = json.loads((folder / "progress.json").read_text())
        return {"kept": state["kept"], "sampled": state["sampled"], "prompts": state["prompts_kept"]}
    last, steps = read_lines(folder / EVALUATIONS)[-1], read_lines(folder / METRICS)
    seconds = {"seconds": sum(map(seconds_without_pauses, steps))}
    if config["command"] == "rm":
        return {"pairs": last["accuracy"], "pairs_se": last["accuracy_se"], **seconds}
    taught = {} if not steps or AGREEMENT not in steps[-1] else {"agreement": steps[-1][AGREEMENT]}
    return measured(last) | taught | seconds


def measured(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of one evaluation of a policy."""
    rewards = {name: line[f"eval/reward/{name}"] for name in (*REWARDS, "learned") if f"eval/reward/{name}" in line}
    return {"accuracy": line["accuracy"], "accuracy_se": line["accuracy_se"], **rewards}


def stages(named: Sequence[tuple[str, Path]]) -> Iterator[dict[str, Any]]:
    """{"stage": its name, ...numbers} of each stage in order, a model that one began from before it."""
    models: set[str] = set()
    for name, folder in named:
        config = read_config(folder)
        model = config["model"]["path"]
        # What another stage made is a line of its own already.
        begins = (config.get("lora") or {}).get("path") is None and "/checkpoints/" not in model
        if config["command"] in ("sft", "train") and begins and model not in models:
            models.add(model)
            yield {"stage": f"{model}, as it is", **measured(read_lines(folder / EVALUATIONS)[0])}
        yield {"stage": name, **numbers(folder)}


def read_config(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text())


def text_of(stage: dict[str, Any], key: str) -> str:
    """A number of the stage as the table shows it; empty where the stage has none."""
    if key not in stage:
        return ""
    if key == "kept":
        return f"{stage['kept']:,} of {stage['sampled']:,}, {stage['prompts']:,} prompts"
    digits = {"seconds": 0, "learned": 2}.get(key, 3)
    error = f" ± {stage[f'{key}_se']:.{digits}f}" if f"{key}_se" in stage else ""
    return f"{stage[key]:.{digits}f}{error}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="stage_table.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--in", dest="root", type=Path, default=Path(), help="folder that the stages' folders are in")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("stages", nargs="+", metavar="NAME=FOLDER")
    options = parser.parse_args(arguments)
    named = [(name, options.root / folder) for name, _, folder in (word.partition("=") for word in options.stages)]
    rows = list(stages(named))
    if options.json is not None:
        write_atomically(options.json, json.dumps(rows, indent=2) + "\n")
    shown = [key for key in HEADINGS if any(key in row for row in rows)]
    table = Table("stage", *(HEADINGS[key] for key in shown))
    for row in rows:
        table.add_row(row["stage"], *(text_of(row, key) for key in shown))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
