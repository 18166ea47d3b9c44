"""`rlft report <run> ..`: writes one HTML file with curves, alarms, configs and completions, which needs no network."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import rlft
from rlft.commands.tables import html_page
from rlft.commands.watch import runs as runs_command
from rlft.commands.watch.report_completions import MAX_IMAGE_BYTES, choose, safe, shown_images
from rlft.commands.watch.runs import REPORT, differing, names_of, read_words, same_settings, text_of
from rlft.config import command as commands
from rlft.runs.chain import CHAIN
from rlft.runs.find import LATEST, named_folder
from rlft.runs.forecast import seconds_of
from rlft.runs.lines import ALARMS, EVALUATIONS, METRICS, last_line, read_lines, silent
from rlft.runs.run_folder import ORIGIN, flatten, read
from rlft.runs.words import changed_keys, choices_of, words_of
from rlft.system import interrupt
from rlft.system.disk import blame_key, writing
from rlft.system.files import write_atomically
from rlft.system.terminal import command_line, say
from rlft.types import UserError, require

MAX_BYTES = 8_000_000
"""The most bytes of completions as JSON, before compression. Random letters, which compress worst, then take 5.6 MB of
the file, and the page is usable 0.55 to 0.85 s after it is opened (test_report_in_a_browser.py)."""


def command(arguments: Sequence[str]) -> None:
    print(report(arguments))


def report(arguments: Sequence[str]) -> Path:
    words, values, _ = read_words("report", arguments)
    words = words or [LATEST]
    folders = folders_of(words)
    default = folders[0] / REPORT if len(folders) == 1 else Path(REPORT)
    out = Path(values.get("out", default))
    is_html = out.suffix == ".html" and not out.is_dir()
    require(is_html, "out", "must be an HTML file", got=out, remedy="name one such as out=report.html")
    text = page(report_of(folders, MAX_BYTES, words))
    with blame_key("out"):
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, text)
    interrupt.set_interrupt_message(f"the report is {out}")
    return out


def page(data: Mapping[str, Any]) -> str:
    """The whole page of the runs' values."""
    return html_page(
        f"rlft: {data['runs'][0]['name']}",
        "report/report.html",
        ("report/uPlot.min.css", "report/report.css"),
        ("report/uPlot.iife.min.js", "report/dom.js", "report/report.js"),
        data=gzip.compress(json.dumps(data, ensure_ascii=True, allow_nan=False).encode(), mtime=0),
    )


MAX_POINTS = 2000  # the most points of a curve; in a longer run neighbours are averaged, and the page says so
DIGITS = 5
SWEEP = "sweep.csv"  # the file in a sweep's folder with a line for each job or trial

Line = Mapping[str, Any]


def folders_of(words: Sequence[str]) -> list[Path]:
    """The named runs; a folder above runs, such as a sweep's, means all runs below it.

    Of several runs, those without metrics are left out, with a line on stderr.
    """
    named_runs: list[Path] = []
    for word in words:
        runs = runs_in(named_folder(word, "report", say))
        named_runs += [run for run in runs if run not in named_runs]
    reported = [run for run in named_runs if any(read_lines(run / name, silent) for name in (METRICS, EVALUATIONS))]
    if not reported:
        raise no_metrics(named_runs[0])
    for run in (run for run in named_runs if run not in reported):
        say(f"{run} is left out: the run has no {METRICS}")
    return reported


def runs_in(folder: Path) -> list[Path]:
    """The runs in this folder and below it, without damaged ones, about which a line is printed on stderr."""
    rows = {path: runs_command.read(path, silent) for path in sorted(runs_command.run_folders(folder))}
    runs = [path for path, row in rows.items() if row is not None and row.status != runs_command.DAMAGED]
    for path, row in rows.items():
        if runs and row is not None and path not in runs:
            say(f"{path} is left out: {row.reason}")
    if not runs:
        read(folder, "report")  # says what is missing
        for path, row in rows.items():
            if row is not None:
                raise UserError("report", row.reason, got=path, remedy="restore it from a copy, or name another run")
        raise UserError("report", "there is no run in that folder", got=folder, remedy="rlft runs lists all runs")
    return runs


def no_metrics(folder: Path) -> UserError:
    command = read(folder, "report")["command"]
    if commands.named(command).headline is None:
        problem, remedy = f"a run of rlft {command} writes no {METRICS}", "look into the files of its folder"
    else:
        problem, remedy = f"the run has no {METRICS}", "it has one once its first step is done"
    return UserError("report", f"{problem}, which a report needs", got=folder, remedy=remedy)


def report_of(folders: Sequence[Path], max_bytes: int, words: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that the page shows, with at most `max_bytes` of completions as JSON for all runs together.

    `words` are the folders as they were typed, which may be those of sweeps or above them.
    """
    plain = [read(folder, "report") for folder in folders]
    share = max_bytes // len(folders), MAX_IMAGE_BYTES // len(folders)
    runs = [run_of(folder, config, *share) for folder, config in zip(folders, plain, strict=True)]
    configs = [run["config"] for run in runs]
    for run, (name, setting) in zip(runs, names_of(folders, plain), strict=True):
        run |= {"label": safe(name), "setting": safe(setting)}
    return {
        "made": f"{datetime.now():%Y-%m-%d %H:%M}",
        "rlft": rlft.__version__,
        "runs": runs,
        "differences": [{"key": name, "values": values} for name, values in differing(configs, "")],
        "seeds": same_settings(plain),
        "sweeps": [sweep for folder in sweep_folders(words, folders) if (sweep := sweep_of(folder)) is not None],
    }


def sweep_folders(words: Sequence[str], runs: Sequence[Path]) -> list[Path]:
    """The folders that may be those of sweeps: the named ones, and those between them and their runs."""
    lineage = {}
    for named in map(Path, words):
        between = [above for run in runs for above in run.parents if named in above.parents]
        lineage |= dict.fromkeys([named, *sorted(between)])
    return list(lineage)


def sweep_of(folder: Path) -> dict[str, Any] | None:
    """The table of a sweep's jobs or trials from its sweep.csv; None for a folder without that file."""
    try:
        with (folder / SWEEP).open(newline="", encoding="utf-8") as stream:
            lines = [[_number(cell) for cell in line] for line in csv.reader(stream)]
    except (OSError, ValueError, csv.Error):
        return None
    if not lines:
        return None
    return {"name": safe(str(folder)), "columns": lines[0], "rows": lines[1:]}


def _number(cell: str) -> str:
    """The text of a cell, with numbers rounded as elsewhere on the page."""
    try:
        return str(_rounded(float(cell))) if "." in cell or "e" in cell else safe(cell)
    except ValueError:
        return safe(cell)


def run_of(folder: Path, config: Mapping[str, Any], max_bytes: int, max_image_bytes: int) -> dict[str, Any]:
    """The data of one run with this plain config. Raises UserError if the run has no metrics."""
    row = runs_command.read(folder, silent)
    lines, evaluations = read_lines(folder / METRICS), read_lines(folder / EVALUATIONS)
    if row is None or not (lines or evaluations):
        raise no_metrics(folder)
    points, alarms = thinned(lines), alarms_of(folder, lines, evaluations)
    completions, machine = choose(folder, max_bytes), last_line(folder / CHAIN, silent).get("machine", {})
    return {
        "name": safe(str(folder)),
        "command": row.command,
        "status": row.status,
        "reason": safe(row.reason),
        "step": row.step,
        "planned": row.steps,
        "averaged": len(lines) > MAX_POINTS and round(len(lines) / len(points), 1),
        "seconds": sum(map(seconds_of, lines)),
        "peak": max((line.get("memory/peak_bytes") or 0 for line in lines), default=0),
        "steps": [line["step"] for line in points],
        "metrics": columns(points),
        "evaluated": [line["step"] for line in evaluations],
        "evaluations": columns(evaluations),
        "alarms": alarms,
        "config": {safe(name): safe(text_of(value)) for name, value in flatten(config).items()},
        "machine": {name: safe(str(value)) for name, value in machine.items()},
        **begun_with({key: value for key, value in config.items() if key != ORIGIN}, row.command),
        "completions": completions,
        "images": shown_images(config, completions["groups"], max_image_bytes),
    }


def begun_with(config: Mapping[str, Any], command: str) -> dict[str, Any]:
    """What a run was begun with: its choices, the keys that differ from the defaults, and the command that repeats it.

    The keys and the command are left out (None) where rlft has no words for them, as for a class that is gone.
    """
    words, changed = None, None
    with suppress(UserError):
        words, changed = words_of(config, command), changed_keys(config, command)
    return {
        "choices": choices_of(config, command),
        "changed": changed and {safe(k): [safe(text_of(value)) for value in values] for k, values in changed.items()},
        "repeat": words if words is None else safe(command_line("rlft", command, *words)),
    }


def thinned(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """At most MAX_POINTS lines: neighbours are averaged, each mean placed at its last step."""
    if len(lines) <= MAX_POINTS:
        return [dict(line) for line in lines]
    kept = []
    for i in range(MAX_POINTS):
        neighbours = lines[i * len(lines) // MAX_POINTS : (i + 1) * len(lines) // MAX_POINTS]
        names = dict.fromkeys(name for line in neighbours for name in line)
        means: dict[str, Any] = {}
        for name in names:
            values = [line[name] for line in neighbours if line.get(name) is not None]
            means[name] = sum(values) / len(values) if values else None
        kept.append(means | {"step": neighbours[-1]["step"]})
    return kept


def columns(lines: Sequence[Line]) -> dict[str, list[float | None]]:
    """{metric: its value in each line, or None}, without metrics that have no value and without those of alarms."""
    names = sorted({name for line in lines for name in line} - {"step", "examples"})
    numbers = [name for name in names if not name.startswith("alarm/")]
    result = {safe(name): [_rounded(line.get(name)) for line in lines] for name in numbers}
    return {name: values for name, values in result.items() if any(value is not None for value in values)}


def alarms_of(folder: Path, lines: Sequence[Line], evaluations: Sequence[Line]) -> list[dict[str, Any]]:
    """The alarms in alarms.jsonl with their texts, and without a text those that only the metrics mention."""
    logged = read_lines(folder / ALARMS)
    alarms = [{"step": a["step"], "name": safe(a["name"]), "text": safe(a["text"])} for a in logged]
    known = {(alarm["step"], alarm["name"]) for alarm in alarms}
    for line in (*lines, *evaluations):
        marked = [safe(name.removeprefix("alarm/")) for name in line if name.startswith("alarm/") and line[name]]
        alarms += [{"step": line["step"], "name": m, "text": ""} for m in marked if (line["step"], m) not in known]
    return sorted(alarms, key=lambda alarm: alarm["step"])


def _rounded(value: Any) -> float | None:
    return value if not isinstance(value, float) else float(f"{value:.{DIGITS}g}")
