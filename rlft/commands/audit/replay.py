"""Replays random steps of a run from their checkpoints, and compares what they leave with the run's chain."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlft.commands.audit.files import Audited, made_with_config_now
from rlft.config import command as commands
from rlft.logger.interface import Logger, StepRecord
from rlft.logger.jsonl import METRICS, Rollouts, number, read_lines, silent
from rlft.loop.engines import Engines
from rlft.plan.fit import fit_to_device
from rlft.runs import checkpoint, run_folder
from rlft.runs.chain import CHAIN, MEASURED
from rlft.runs.run_folder import CONFIG
from rlft.system.crash import one_line
from rlft.system.locks import owned_folder
from rlft.types import UserError

BOUND = 1e-3
"""On another machine, metrics of the same tokens count as replayed up to this difference, relative above 1."""
REPEATABLE = ("transformers",)
"""Engines that sample the same bits again on the same machine."""


class OneStep(Logger):
    """Keeps the first step's metrics, and ends the run after it by the signal of Ctrl-C, as a user would."""

    def __init__(self) -> None:
        self.metrics: Mapping[str, float] = {}

    def step(self, record: StepRecord) -> None:
        self.metrics = record.metrics
        signal.raise_signal(signal.SIGINT)


def replayable(run: Audited) -> list[int]:
    """Steps that begin with a checkpoint that is whole, or with the run."""
    folders = checkpoint.finished(run_folder.checkpoints(run.folder))
    whole = {checkpoint.step_of(folder) for folder in folders if checkpoint.find_damage(folder) is None}
    first = set() if run.forked_from else {0}
    return sorted(step for step in run.lines if step - 1 in (whole | first))


def check_replay(run: Audited, plan: Any, steps: int, unrepeatable: set[str]) -> None:
    """Replays that many random steps of those that can be."""
    candidates = replayable(run)
    chosen = sorted(random.SystemRandom().sample(candidates, min(steps, len(candidates))))
    if not chosen:
        run.findings.leave_open("replay", "no step was chosen, or none begins with a checkpoint that is kept")
    for step in chosen:
        try:
            again, metrics = replayed(run, plan, step)
        except (UserError, RuntimeError, OSError) as error:
            run.findings.leave_open("replay", f"step {step} cannot be replayed here: {one_line(error)}")
            continue
        compare(run, plan, step, again, metrics, unrepeatable)


def replayed(run: Audited, plan: Any, step: int) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """(the step's line of the chain, its metrics), of a resume in a temporary folder from the checkpoint before it."""
    stop = OneStep()
    rollouts = [logger for logger in plan.loggers if isinstance(logger, Rollouts)]
    config = replace(plan.config, checkpoint=replace(plan.config.checkpoint, on_signal="step"))
    # What was recorded of the inputs, which are the same: older rlft recorded less.
    parts = run.lines[step]["sha256"]
    recorded = {n: parts[what] for n in plan.fingerprints if (what := n.removesuffix("_fingerprint")) in parts}
    plan = replace(fit_to_device(plan), config=config, loggers=(*rollouts, stop), fingerprints=recorded)
    with owned_folder() as folder, Engines() as engines:
        shutil.copyfile(run.folder / CONFIG, folder / CONFIG)
        if step > 1:
            source = run_folder.checkpoints(run.folder) / f"step_{step - 1:06d}"
            shutil.copytree(source, run_folder.checkpoints(folder) / source.name)
        commands.named(plan.config.command).run(plan, folder, engines, lambda text: None)
        return read_lines(folder / CHAIN, silent)[-1], stop.metrics


def compare(
    run: Audited, plan: Any, step: int, again: Mapping[str, Any], metrics: Mapping[str, float], unrepeatable: set[str]
) -> None:
    """Confirms, or says what differs: bit for bit where the machine allows that, else within BOUND."""
    findings, line = run.findings, run.lines[step]
    parts, new = line["sha256"], again["sha256"]
    differing = [part for part in sorted({*parts, *new} - {"config"}) if parts.get(part) != new.get(part)]
    if not differing:
        findings.confirm("replay", f"step {step}, bit for bit: {', '.join(sorted(new.keys() - {'config'}))}")
        return
    if not made_with_config_now(run, step):
        text = f"was made with another config.yaml than the run has now, with which {', '.join(differing)} differs"
        findings.leave_open("replay", f"step {step} {text}")
        return
    then, now = line["machine"], again["machine"]
    changed = [what for what in sorted({*then, *now}) if then.get(what) != now.get(what)]
    plays = getattr(plan, "environment", None) is not None
    if not changed and plan.engine in (None, *REPEATABLE) and not unrepeatable and not plays:
        text = f"{', '.join(differing)} differ from what the checkpoint before it gives"
        findings.differ("replay", f"step {step}: {text}")
        return
    why = f"other {', '.join(changed)}" if changed else "its engine, environment or rewards do not repeat their bits"
    recorded = next((line for line in read_lines(run.folder / METRICS, silent) if line["step"] == step), {})
    gap = None if parts.get("masks") != new.get("masks") else largest_gap(recorded, metrics)
    if gap is not None and gap <= BOUND:
        findings.confirm("replay", f"step {step}, metrics within {BOUND:g}, tokens the same; not bit for bit: {why}")
        return
    beyond = "samples other tokens" if gap is None else f"has metrics that differ by up to {gap:.2g}"
    findings.leave_open("replay", f"step {step} {beyond} here, which says nothing: {why}")


def largest_gap(recorded: Mapping[str, Any], metrics: Mapping[str, float]) -> float | None:
    """The largest difference of two steps' metrics, relative to numbers above 1; None if there are none."""
    names = [name for name in recorded if name in metrics and not name.startswith(MEASURED)]
    pairs = [(recorded[name], number(metrics[name])) for name in names]
    return max((abs(a - b) / max(1.0, abs(a)) for a, b in pairs if a is not None and b is not None), default=None)
