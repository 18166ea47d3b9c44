"""Verifies a run's files by its chain, which needs neither weights nor data; what an audit has found, as table rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlft.config.instantiate import from_mapping
from rlft.config.schema import RolloutsConfig
from rlft.runs import checkpoint, run_folder, run_status
from rlft.runs.chain import CHAIN, metrics_part, sealed
from rlft.runs.fork import FORKED_FROM
from rlft.runs.lines import ALARMS, EVALUATIONS, METRICS, encode, rollout_file, rollout_files
from rlft.runs.run_folder import CONFIG, ORIGIN
from rlft.runs.run_status import FORMAT, Status
from rlft.system.files import digest_of_bytes, digest_of_file, digest_of_json, digest_of_tensors
from rlft.system.terminal import CheckRow, Status as Verdict
from rlft.types import UserError, counted, require

Line = Mapping[str, Any]
SHOWN = 4  # differences of one check that have a row each


class Findings:
    """Collects rows: `ok` is confirmed, `skipped` could not be confirmed, `wrong` differs."""

    def __init__(self) -> None:
        self.rows: list[CheckRow] = []

    @property
    def differs(self) -> bool:
        return any(row.status is Verdict.wrong for row in self.rows)

    def confirm(self, what: str, how: str) -> None:
        self.rows.append(CheckRow(what, Verdict.ok, how))

    def leave_open(self, what: str, why: str) -> None:
        self.rows.append(CheckRow(what, Verdict.skipped, why))

    def differ(self, where: str, how: str) -> None:
        """where: the file or part; how: the step, and what differs."""
        self.rows.append(CheckRow(where, Verdict.wrong, how))

    @contextmanager
    def checking(self, what: str, confirmed: str) -> Iterator[None]:
        """Confirms this if nothing inside differs; at most SHOWN differences have rows of their own."""
        before = len(self.rows)
        yield
        wrong = [row for row in self.rows[before:] if row.status is Verdict.wrong]
        if not wrong and confirmed:
            self.rows.insert(before, CheckRow(what, Verdict.ok, confirmed))
        if more := wrong[SHOWN:]:
            folded = {id(row) for row in more}
            self.rows = [row for row in self.rows if id(row) not in folded]
            text = f"{len(more)} more differences, the last of them: {more[-1].name}: {more[-1].value}"
            self.rows.append(CheckRow(what, Verdict.wrong, text))


def steps_text(steps: list[int]) -> str:
    """Steps in words, without those in the middle of a long list.

    >>> steps_text([3]), steps_text([1, 2, 3]), steps_text(list(range(1, 90)))
    ('step 3', 'steps 1, 2, 3', 'steps 1, 2, 3 .. 89')
    """
    shown = ", ".join(map(str, steps)) if len(steps) <= 4 else f"{', '.join(map(str, steps[:3]))} .. {steps[-1]}"
    return f"step{'s' * (len(steps) > 1)} {shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A run with the lines of its chain by step."""

    folder: Path
    config: Mapping[str, Any]
    lines: Mapping[int, Line]
    findings: Findings

    @property
    def last(self) -> int:
        return max(self.lines)

    @property
    def is_finished(self) -> bool:
        return run_status.read(self.folder)[0] is Status.finished

    @property
    def forked_from(self) -> int:
        """The step after which the run was forked from another one; 0 if it was not."""
        return (self.config.get(ORIGIN, {}).get(FORKED_FROM) or {}).get("step", 0)

    def may_be_cut_off(self, step: int) -> bool:
        """Whether a kill may have left something of this step, which has no line: the last one's comes a step later."""
        return not self.is_finished and self.last < step <= self.last + 2


def read_chain(folder: Path, findings: Findings) -> dict[int, Line]:
    """{step: line} of the chain's lines, at least one, whose digests and links are checked."""
    require(folder.is_dir(), "run", "there is no such folder", got=folder, remedy="rlft runs lists all runs")
    try:
        raw_lines = (folder / CHAIN).read_bytes().split(b"\n")
    except OSError as error:
        problem = f"has no {CHAIN} that can be read ({error.strerror}), and cannot be audited"
        remedy = "name a run that was trained by this rlft or a later one"
        raise UserError("run", problem, got=folder, remedy=remedy) from None
    found: dict[int, Line] = {}
    number = len(raw_lines) - 1
    with findings.checking(CHAIN, f"{counted(number, 'line')}, each with the digest of the one before"):
        if raw_lines.pop():
            findings.differ(CHAIN, "its last line is cut short")
        previous: Line | None = None
        for place, raw in enumerate(raw_lines, start=1):
            line = _line_of(raw)
            if line is None:
                findings.differ(CHAIN, f"line {place} is damaged")
                continue
            step = line["step"]
            made = sealed(step, line["previous"], line["machine"], line["sha256"], line["metrics_line"])
            if made != line or encode(line) != raw + b"\n":
                findings.differ(CHAIN, f"step {step}: its line does not have the digest that it says")
            expected = 0 if previous is None else previous["step"] + 1
            if previous is None and step and line["previous"] is None:
                findings.leave_open(CHAIN, f"steps before step {step} have no line: an rlft without chains did them")
            elif step != expected:
                findings.differ(CHAIN, f"step {expected} is left out: step {step} follows")
            if previous is not None and line["previous"] != previous["digest"]:
                findings.differ(CHAIN, f"step {step}: its line does not continue the one before")
            elif previous is None and not step and line["previous"] is not None:
                findings.differ(CHAIN, "step 0: its line continues another one")
            found[step], previous = line, line
    if not found:
        raise UserError("run", f"has a {CHAIN} without a line that can be read", got=folder, remedy="restore the file")
    return found


def _line_of(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
        right = isinstance(line["step"], int) and all(isinstance(line[name], dict) for name in ("machine", "sha256"))
        return line if right and {"previous", "metrics_line", "digest"} <= line.keys() else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def check_files(run: Audited) -> None:
    _check_config(run)
    _check_status(run)
    _check_metrics(run)
    _check_by_step(run, EVALUATIONS, "evaluation", "evaluations of {}", "is not the evaluation of the chain")
    _check_by_step(run, ALARMS, "alarms", "{} with alarms", "its alarms are not those of the chain")
    _check_rollouts(run)
    _check_checkpoints(run)


def _check_config(run: Audited) -> None:
    digest, findings = digest_of_file(run.folder / CONFIG), run.findings
    steps = [step for step, line in run.lines.items() if line["sha256"].get("config") == digest]
    with findings.checking(CONFIG, f"is the one of {steps_text(steps)}" if steps else ""):
        if run.last not in steps:
            findings.differ(CONFIG, f"step {run.last} was made with another one")
        elif min(steps) > 0:
            why = "was another: the run was resumed with other keys, or is a fork"
            findings.leave_open(CONFIG, f"{why}, before step {min(steps)}")


def _check_status(run: Audited) -> None:
    file, findings = run.folder / run_status.FILE, run.findings
    with findings.checking(run_status.FILE, "agrees with the chain"):
        try:
            content = file.read_bytes()
            fields = json.loads(content)
            known = {name: fields[name] for name in ("format", "status", "steps")}
            whole = json.dumps({**known, **{n: fields[n] for n in ("reason", "error") if n in fields}}).encode() + b"\n"
            Status(fields["status"])
        except run_status.UNREADABLE:
            findings.differ(run_status.FILE, "is missing or damaged")
            return
        if known["format"] != FORMAT or (content != whole and known["status"] != Status.running):
            findings.differ(run_status.FILE, "is not as a run writes it")
        if known["status"] == Status.finished and known["steps"] != run.last:
            findings.differ(run_status.FILE, f"says {counted(known['steps'], 'step')}, and the chain has {run.last}")


def _lines(run: Audited, name: str) -> Iterator[tuple[int, bytes, Line]]:
    """(step, line as it is in the file, its values) of a JSONL file; damaged ones differ."""
    file = run.folder / name
    content = file.read_bytes() if file.is_file() else b""
    for place, raw in enumerate(content.splitlines(keepends=True), start=1):
        try:
            values = json.loads(raw)
            step = values["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            values, step = {}, None
        if type(step) is not int or not raw.endswith(b"\n"):
            if raw.endswith(b"\n") or run.is_finished:  # a kill leaves a last line that is cut short
                run.findings.differ(name, f"line {place} is damaged")
            continue
        yield step, raw, values


def _check_metrics(run: Audited) -> None:
    findings, expected = run.findings, [step for step in run.lines if step > 0]
    with findings.checking(METRICS, counted(len(expected), "line")):
        found: list[int] = []
        for step, raw, values in _lines(run, METRICS):
            found.append(step)
            line = run.lines.get(step)
            if line is None and run.may_be_cut_off(step):
                findings.leave_open(METRICS, f"step {step} was not sealed")
            elif line is None or not step:
                findings.differ(METRICS, f"step {step} is not in the chain")
            elif metrics_part(values) != line["sha256"].get("metrics"):
                findings.differ(METRICS, f"step {step}: its numbers are not those of the chain")
            elif digest_of_bytes(raw) != line["metrics_line"]:
                findings.differ(METRICS, f"step {step}: its times or memory are not those of the chain")
        _check_order(findings, METRICS, found, expected)


def _check_order(findings: Findings, name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    for step in expected:
        if step not in found:
            findings.differ(name, f"step {step} is missing")
    for before, step in pairwise(found):
        if step <= before:
            findings.differ(name, f"step {step} comes after step {before}")


def _check_by_step(run: Audited, name: str, part: str, unit: str, problem: str) -> None:
    """Compares a file whose lines have one digest a step in the chain."""
    findings, by_step = run.findings, dict[int, bytes]()
    expected = {step: line["sha256"][part] for step, line in run.lines.items() if part in line["sha256"]}
    with findings.checking(name, unit.format(counted(len(expected), "step")) if expected else ""):
        for step, raw, _ in _lines(run, name):
            by_step[step] = by_step.get(step, b"") + raw
        for step in sorted(step for step in {*expected, *by_step} if not run.may_be_cut_off(step)):
            if step not in by_step or step not in expected:
                findings.differ(name, f"step {step} is {'missing' if step in expected else 'not in the chain'}")
            elif digest_of_bytes(by_step[step]) != expected[step]:
                findings.differ(name, f"step {step}: {problem}")
        _check_order(findings, name, list(by_step), [])


def _check_rollouts(run: Audited) -> None:
    findings = run.findings
    having = [step for step, line in run.lines.items() if "rollouts" in line["sha256"]]
    if not having:
        return
    present = {step: file for file, step in rollout_files(run.folder) if file.suffix != ".tmp"}
    confirmed = [step for step in present if step in having]
    with findings.checking("rollouts", f"completions of {counted(len(confirmed), 'step')}"):
        for step, file in present.items():
            name = str(file.relative_to(run.folder))
            if step not in having and not run.may_be_cut_off(step):
                findings.differ(name, f"step {step} is not in the chain")
            elif step in having and digest_of_file(file) != run.lines[step]["sha256"]["rollouts"]:
                findings.differ(name, f"step {step}: are not the completions of the chain")
        settings = from_mapping(RolloutsConfig, run.config["rollouts"], "rollouts")
        written = [step for step in having if settings.writes(step)]
        for step in written if settings.keep is None else written[-settings.keep :]:
            if step not in present and made_with_config_now(run, step):
                findings.differ(str(rollout_file(run.folder, step).relative_to(run.folder)), f"step {step} is missing")
    if absent := [step for step in having if step not in present]:
        findings.leave_open("rollouts", f"{steps_text(absent)}: completions are not on disk")


def made_with_config_now(run: Audited, step: int) -> bool:
    """Whether the step was made with the config of the run's last one; else a resume has changed keys after it."""
    return run.lines[step]["sha256"].get("config") == run.lines[run.last]["sha256"].get("config")


def _check_checkpoints(run: Audited) -> None:
    findings = run.findings
    folders = checkpoint.finished(run_folder.checkpoints(run.folder))
    unchained: set[str] = set()
    with findings.checking("checkpoints", f"{counted(len(folders), 'checkpoint')}, with adapters, optimizer and state"):
        for folder in folders:
            step, name = checkpoint.step_of(folder), str(folder.relative_to(run.folder))
            if (damage := checkpoint.find_damage(folder)) is not None:
                findings.differ(name, f"step {step}: {damage}")
            elif step not in run.lines:
                findings.differ(name, f"step {step} is not in the chain")
            else:
                found, expected = checkpoint.parts_of(checkpoint.load(folder)), run.lines[step]["sha256"]
                unchained |= {part for part in found if part not in expected}
                for part in sorted(part for part in found if part in expected and found[part] != expected[part]):
                    if part == "state" and step == run.forked_from:
                        findings.leave_open(name, f"step {step}: a fork changes its state")
                    else:
                        findings.differ(name, f"step {step}: {part} differs from the chain")
                stem = ("adapters/", "heads/", "tensors/")
                for part in sorted(p for p in expected if p.startswith(stem) and p not in found):
                    findings.differ(name, f"step {step}: {part} is missing")
        saved = [checkpoint.step_of(folder) for folder in folders]
        if run.is_finished and run.last not in saved:
            findings.differ("checkpoints", f"step {run.last} is missing, and a finished run saves its last step")
    if unchained:
        parts = ", ".join(sorted(unchained))
        findings.leave_open("checkpoints", f"{parts}: not in the chain, and only compared with their MANIFEST")


def check_export(folder: Path, lines: Mapping[int, Line], findings: Findings) -> None:
    """Compares an exported adapter and its card with the chain next to it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from rlft.model.adapter_folder import RECORD, WEIGHTS

    last = lines[max(lines)]
    with findings.checking("README.md", "names the last digest of the chain"):
        card = folder / "README.md"
        if not card.is_file() or last["digest"] not in card.read_text(errors="replace"):
            findings.differ("README.md", f"step {last['step']}: does not name the last digest of the chain")
    if not (folder / WEIGHTS).is_file():
        findings.leave_open("weights", "a merged model: export it again from the run, and compare")
        return
    with findings.checking(WEIGHTS, f"is the adapter of step {last['step']}"):
        try:
            record = json.loads((folder / RECORD).read_text())
            role, tensors = record["role"], load_file(folder / WEIGHTS)
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            findings.differ(WEIGHTS, f"or {RECORD} cannot be read ({type(error).__name__})")
            return
        roles = {part.split("/")[1] for part in last["sha256"] if part.startswith(("adapters/", "heads/"))}
        if digest_of_json({role: record}) != last["sha256"].get("records") and len(roles) == 1:
            findings.differ(RECORD, f"step {last['step']}: differs from the chain")
        if digest_of_tensors(tensors) != last["sha256"].get(f"adapters/{role}"):
            findings.differ(WEIGHTS, f"step {last['step']}: is not the {role} of the chain")
