"""`rlft eval`: evaluates a run, one of its checkpoints, or a bare model on the held-out split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rlft.commands.launch import import_libraries, settled
from rlft.commands.policy import check_base, sampled_by
from rlft.commands.training import check_train
from rlft.config.keys import is_below, known
from rlft.config.model import SnapshotConfig
from rlft.config.overrides import key_of
from rlft.config.resolved import Resolved, resolve
from rlft.config.schema import RunConfig
from rlft.loop.evaluations import label_of
from rlft.plan.rules import models_of
from rlft.runs.find import NamedRun, check_own_model, find_checkpoint
from rlft.system.terminal import say, show
from rlft.types import Evaluation, Group, Scores, counted

NO_TEACHER = {field.name: field.default for field in fields(SnapshotConfig) if field.name.startswith("teacher")}
"""{key of `snapshot`: its value without a teacher}. An evaluation uses none, and its folder may no longer exist."""
ALONE = {"kind": "local", "address": None, "engines": 0, "ranks": 1, "gpus_per_engine": 1, "scoring": False}
"""{key of `cluster`: its value for a single process}."""


def notes(overrides: Sequence[str]) -> list[str]:
    unread = [key for key in map(key_of, overrides) if known(RunConfig, key).only_trains or is_below(key, ["hydra"])]
    return [f"{key} has no effect: an evaluation does not read it" for key in unread]


def command(arguments: list[str]) -> None:
    parsed, source, plain = sampled_by(arguments, trained=True)
    resolved = resolve_evaluation(settled(plain))
    for note in notes(parsed.overrides):
        say(f"note: {note}")
    if source is not None:
        find_checkpoint(source, lambda damage: None)
    import_libraries(f"rlft eval: {source.run if source else resolved.config.model.path}", models_of(resolved.config))
    run(resolved, source, say)


def resolve_evaluation(plain: dict[str, Any]) -> Resolved:
    """Reads a config for a single evaluation by this process, without loggers and teacher."""
    changes = {"eval": {"every": 1, "kl_base": False}, "snapshot": NO_TEACHER, "cluster": ALONE}
    sections = {name: {**plain[name], **keys} for name, keys in changes.items() if isinstance(plain[name], Mapping)}
    plain = {**plain, **sections, "logger": {}, "resume": None}  # what is no section is refused when it is typed
    return resolve(plain, check=partial(check_train, trains=False))


def run(resolved: Resolved, source: NamedRun | None, say: Callable[[str], None]) -> Evaluation:
    """Evaluates and prints. The completions go to the run's folder, or to runs/eval for a bare model."""
    from rlft.loop.parts import Engines
    from rlft.loop.session import open_session
    from rlft.plan.fit import settled_here
    from rlft.runs import checkpoint

    plan = settled_here(resolved.plan(trains=False))
    saved = None
    if source is not None:
        checkpoint_folder = find_checkpoint(source, say)
        saved = checkpoint.load(checkpoint_folder)
        if saved.adapters:
            check_base(checkpoint_folder, plan.config.model)
        else:  # the checkpoint holds a whole model
            check_own_model(checkpoint_folder, plan.config.model)
    for note in plan.notes:
        say(f"note: {note}")
    folder = source.run if source is not None else Path("runs") / "eval" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    with Engines() as engines, open_session(plan, folder, engines, say) as session:
        if saved is not None and saved.adapters:
            session.roles.restore(saved.adapters, saved.heads)
            session.publish(saved.step)
        assert plan.held_out is not None, "eval.every is 1 here"
        prompts = tuple(plan.held_out.prompts[: plan.config.eval.num_prompts])
        session.logger.stage("evaluate")
        session.check_decoding()
        evaluation, groups, scores = session.evaluate(prompts, 0 if saved is None else saved.step)
    title = plan.config.model.path if saved is None else f"{source.run if source else ''} after step {saved.step}"
    # The table comes first: if the completions cannot be written, the measurement is not lost.
    print_table(title, evaluation, len(prompts), plan.config.eval.num_samples)
    file = write(folder, evaluation, groups, scores)
    show(f"every completion: {file}")
    return evaluation


def write(folder: Path, evaluation: Evaluation, groups: Sequence[Group], scores: Scores) -> Path:
    """Writes evaluations/step_N_<time>.jsonl: one line of metrics, then one line per completion."""
    from rlft.runs.lines import encode, number
    from rlft.system import interrupt
    from rlft.system.disk import writing
    from rlft.system.files import write_atomically

    file = folder / "evaluations" / f"step_{evaluation.step:06d}_{datetime.now():%Y-%m-%d_%H-%M-%S}.jsonl"
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"step": evaluation.step, "accuracy": evaluation.accuracy, **evaluation.metrics}]
    for p, group in enumerate(groups):
        for i, rollout in enumerate(group.rollouts):
            line = {"prompt_id": group.prompt.id, "index": i, "prompt": [dict(m) for m in group.prompt.messages]}
            line |= {"answer": group.prompt.answer, "completion": rollout.completion.text}
            line["rewards"] = {name: number(float(values[p, i])) for name, values in scores.by_reward.items()}
            if scores.answers:
                line["read"] = {name: answers[p][i] for name, answers in scores.answers.items()}
            lines.append({**line, "finish_reason": str(rollout.completion.finish_reason)})
    write_atomically(file, map(encode, lines))
    interrupt.set_interrupt_message(f"every completion is in {file}")
    return file


def print_table(what: str, evaluation: Evaluation, num_prompts: int, num_samples: int) -> None:
    from rlft.logger.console import open_terminal
    from rlft.logger.tables import Column, WordTable

    metrics, terminal = evaluation.metrics, open_terminal()
    terminal.print(f"{what}: {counted(num_prompts, 'held-out prompt')} x {counted(num_samples, 'sample')}")
    errors = {name: metrics.get(f"{name}_se") for name in metrics if not name.endswith("_se")}
    rows = (
        (label_of(name, num_samples), f"{metrics[name]:.4f}", "" if error is None else f"{error:.4f}")
        for name, error in errors.items()
    )
    columns = (Column("metric"), Column("value", right=True), Column("standard error", right=True))
    terminal.print(WordTable(columns, rows))
