"""What a report tells of runs, as plain values: series, evaluations, alarms, configs, differences, completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import rlft
from rlft import runs_verb
from rlft.logger.jsonl import ALARMS, EVALUATIONS, METRICS, read_lines
from rlft.report_completions import choose, safe
from rlft.run.naming import named_folder, short_names
from rlft.runfolder import ORIGIN, flatten, read
from rlft.types import UserError
from rlft.work import say

MAX_POINTS = 2000
"""Points of a curve; of a longer run neighbours are averaged, which is said."""

DIGITS = 5
MAX_KEYS_OF_LABEL = 3
OF_ITS_OWN = ("seed", "name", "resume")
"""Keys in which seeds of one experiment may differ."""

Line = Mapping[str, Any]


def folders_of(words: Sequence[str]) -> list[Path]:
    """The runs that are named; a folder above runs, such as a sweep's, stands for all that have left metrics.

    Of several runs, those without metrics are left out, which is said on stderr.

    Raises:
        UserError: none named, none there, or none with metrics.
    """
    if not words:
        raise UserError("report", "needs a run", remedy="write rlft report runs/<name>/<time>; rlft runs lists them")
    named: list[Path] = []
    for word in words:
        runs = runs_in(named_folder(word, "report", say))
        named += [run for run in runs if run not in named]
    reported = [run for run in named if has_metrics(run)]
    if not reported:
        raise no_metrics(named[0])
    for run in (run for run in named if run not in reported):
        say(f"{run} is left out: the run has left no {METRICS}")
    return reported


def runs_in(folder: Path) -> list[Path]:
    """The run in this folder, and those below it, without damaged ones, which are named on stderr."""
    rows = {path: runs_verb.read(path) for path in sorted(runs_verb.run_folders(folder))}
    runs = [path for path, row in rows.items() if row is not None and row.status != runs_verb.DAMAGED]
    for path, row in rows.items():
        if runs and row is not None and path not in runs:
            say(f"{path} is left out: {row.reason}")
    if not runs:
        read(folder, "report")  # says what is missing
        raise UserError("report", "there is no run in that folder", got=folder, remedy="rlft runs lists them")
    return runs


def has_metrics(folder: Path) -> bool:
    return any(read_lines(folder / name) for name in (METRICS, EVALUATIONS))


def no_metrics(folder: Path) -> UserError:
    problem = f"the run has left no {METRICS}, from which reports are made"
    return UserError("report", problem, got=folder, remedy="leave jsonl among its loggers")


def report_of(folders: Sequence[Path], max_bytes: int) -> dict[str, Any]:
    """Everything the page shows; max_bytes: of completions as JSON, for all runs together."""
    runs = [run_of(folder, max_bytes // len(folders)) for folder in folders]
    configs = [run["config"] for run in runs]
    for run, label, family in zip(runs, labels(runs), labels(runs, without=OF_ITS_OWN), strict=True):
        run |= {"label": label, "family": family}
    return {
        "made": f"{datetime.now():%Y-%m-%d %H:%M}",
        "rlft": rlft.__version__,
        "runs": runs,
        "differences": differences(configs),
        "seeds": same_but_seeds(configs),
    }


def run_of(folder: Path, max_bytes: int) -> dict[str, Any]:
    """One run. Raises UserError if it has left no metrics."""
    config, row = flatten(read(folder, "report")), runs_verb.read(folder)
    lines, evaluations = read_lines(folder / METRICS), read_lines(folder / EVALUATIONS)
    if row is None or not (lines or evaluations):
        raise no_metrics(folder)
    points = thinned(lines)
    return {
        "name": safe(str(folder)),
        "verb": row.verb,
        "status": row.status,
        "reason": safe(row.reason),
        "step": row.step,
        "planned": row.steps,
        "averaged": len(lines) > MAX_POINTS and round(len(lines) / len(points), 1),
        "seconds": sum(line.get("time/step") or 0.0 for line in lines),
        "peak": max((line.get("memory/peak_bytes") or 0 for line in lines), default=0),
        "steps": [line["step"] for line in points],
        "metrics": columns(points),
        "evaluated": [line["step"] for line in evaluations],
        "evaluations": columns(evaluations),
        "alarms": alarms_of(folder, lines, evaluations),
        "config": {safe(name): safe(_text(value)) for name, value in config.items()},
        "completions": choose(folder, max_bytes).as_dict(),
    }


def thinned(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """At most MAX_POINTS lines: neighbours are averaged, each mean at the last step that it is of."""
    if len(lines) <= MAX_POINTS:
        return [dict(line) for line in lines]
    found = []
    for i in range(MAX_POINTS):
        some = lines[i * len(lines) // MAX_POINTS : (i + 1) * len(lines) // MAX_POINTS]
        names = dict.fromkeys(name for line in some for name in line)
        means: dict[str, Any] = {}
        for name in names:
            values = [line[name] for line in some if line.get(name) is not None]
            means[name] = sum(values) / len(values) if values else None
        found.append(means | {"step": some[-1]["step"]})
    return found


def columns(lines: Sequence[Line]) -> dict[str, list[float | None]]:
    """{metric: its value in each line, None where it has none}, of those with any; marks of alarms are told apart."""
    names = sorted({name for line in lines for name in line} - {"step", "examples"})
    numbers = [name for name in names if not name.startswith("alarm/")]
    found = {safe(name): [_rounded(line.get(name)) for line in lines] for name in numbers}
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def alarms_of(folder: Path, lines: Sequence[Line], evaluations: Sequence[Line]) -> list[dict[str, Any]]:
    """Those in alarms.jsonl with their words; of a run that has none of it yet, what is marked in its metrics."""
    told = read_lines(folder / ALARMS)
    found = [{"step": a["step"], "name": safe(a["name"]), "text": safe(a["text"])} for a in told]
    known = {(alarm["step"], alarm["name"]) for alarm in found}
    for line in (*lines, *evaluations):
        marks = [safe(name.removeprefix("alarm/")) for name in line if name.startswith("alarm/") and line[name]]
        found += [{"step": line["step"], "name": m, "text": ""} for m in marks if (line["step"], m) not in known]
    return sorted(found, key=lambda alarm: alarm["step"])


def differences(configs: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Keys whose values are not the same in all runs, those of their origin last."""
    names = dict.fromkeys(name for config in configs for name in config if name != "resume")
    found = [{"key": name, "values": [config.get(name, "") for config in configs]} for name in names]
    return sorted(
        (row for row in found if len(set(row["values"])) > 1), key=lambda row: row["key"].startswith(f"{ORIGIN}.")
    )


def labels(runs: Sequence[Mapping[str, Any]], without: Sequence[str] = ("name",)) -> list[str]:
    """What to call each run: the keys in which it differs from the others, or its folder where they are many or none.

    without: keys that are not said. With its seed left out, seeds of one experiment have the same label.
    """
    rows = [row for row in differences([run["config"] for run in runs]) if not row["key"].startswith(f"{ORIGIN}.")]
    rows = sorted((row for row in rows if row["key"] not in without), key=lambda row: row["key"] in OF_ITS_OWN)
    folders = ["/".join(Path(run["name"]).parts[-2:]) for run in runs]
    if not 0 < len(rows) <= MAX_KEYS_OF_LABEL:
        return folders
    names = short_names([row["key"] for row in rows])
    found = [
        ", ".join(f"{name}={row['values'][i]}" for name, row in zip(names, rows, strict=True)) for i in range(len(runs))
    ]
    if "seed" in without:
        return found
    pairs = zip(found, folders, strict=True)
    return [f"{text} ({folder})" if found.count(text) > 1 else text for text, folder in pairs]


def same_but_seeds(configs: Sequence[Mapping[str, str]]) -> list[list[int]]:
    """Runs, by their place, that differ in nothing but their seed (and where they came from): two or more of each."""
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place, config in enumerate(configs):
        kept = {k: v for k, v in config.items() if k not in OF_ITS_OWN and not k.startswith(f"{ORIGIN}.")}
        found.setdefault(tuple(sorted(kept.items())), []).append(place)
    return [places for places in found.values() if len(places) > 1]


def _rounded(value: Any) -> float | None:
    return value if not isinstance(value, float) else float(f"{value:.{DIGITS}g}")


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
