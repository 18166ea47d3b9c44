"""`rlft eval`: a trained run, one of its checkpoints, or a bare model on the held-out split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlft.config import compose
from rlft.place import Place, check_base, check_own_model, find_checkpoint
from rlft.roots import Verb
from rlft.types import Evaluation, Group, Scores, UserError

USAGE = """\
usage: rlft eval run=<run or checkpoint folder> [<key>=<value>] ...
       rlft eval model.path=<model> [data=<name>] [<key>=<value>] ...

Samples the held-out split and prints mean@k and pass@k with standard errors; every completion goes to a JSONL file.
  rlft eval run=runs/grpo_arithmetic/<time> eval.num_samples=8
  rlft eval run=runs/grpo_arithmetic/<time>/checkpoints/step_000060
  rlft eval model.path=embedded:tiny-arithmetic data=arithmetic generation.max_tokens=48"""


def as_training(place: Place) -> dict[str, Any]:
    """The run's config with the root of `rlft train`, whose sections another verb's run has in part; it may be changed.

    Raises:
        UserError: the run has no policy.
    """
    config = place.config
    verb = config.get("verb", Verb.train)
    if verb == Verb.train:
        return config
    if verb != Verb.sft:
        problem, remedy = f"is a run of rlft {verb}, which has no policy", "name one of rlft train or rlft sft"
        raise UserError("run", problem, got=place.run, remedy=remedy)
    common = compose([])
    shared = {key: value for key, value in config.items() if key in common and key not in ("verb", "epochs", "steps")}
    weights: dict[str, Any] = {}
    if config["lora"] is None:  # the model that came out is named by its run, as an adapter could be
        weights = {"lora": common["lora"], "model": {**config["model"], "path": str(place.checkpoint or place.run)}}
    return {**common, "data": {}, **shared, **weights}


def as_evaluation(plain: dict[str, Any]) -> dict[str, Any]:
    """The config as it is evaluated: once, without loggers."""
    if not isinstance(plain["eval"], Mapping):
        return plain  # which is refused where the config is typed
    return {**plain, "logger": {}, "resume": None, "eval": {**plain["eval"], "every": 1, "kl_base": False}}


def run(plain: dict[str, Any], place: Place | None, say: Callable[[str], None]) -> Evaluation:
    """Evaluates and prints; the file lies in the run's folder, or under runs/eval for a bare model."""
    from rlft.engine import Engines
    from rlft.plan import make_plan
    from rlft.session import open_session
    from rlft.trainer import checkpoint

    plan = make_plan(as_evaluation(plain), trains=False)
    saved = None
    if place is not None:
        found = find_checkpoint(place, say)
        saved = checkpoint.load(found)
        if saved.adapters:
            check_base(found, plan.config.model)
        else:  # its weights are the model's own
            check_own_model(found, plan.config.model)
    for note in plan.warnings:
        say(f"note: {note}")
    folder = place.run if place is not None else Path("runs") / "eval" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    with Engines() as engines, open_session(plan, folder, engines, say) as session:
        if saved is not None and saved.adapters:
            session.roles.restore(saved.adapters, saved.heads)
            session.publish(saved.step)
        assert plan.held_out is not None, "eval.every is 1 here"
        prompts = plan.held_out.prompts[: plan.config.eval.num_prompts]
        session.logger.stage("evaluate")
        evaluation, groups, scores = session.evaluate(prompts, 0 if saved is None else saved.step)
    what = plan.config.model.path if saved is None else f"{place.run if place else ''} after step {saved.step}"
    file = write(folder, evaluation, groups, scores)
    print_table(what, evaluation, len(prompts), plan.config.eval.num_samples, file)
    return evaluation


def write(folder: Path, evaluation: Evaluation, groups: Sequence[Group], scores: Scores) -> Path:
    """evaluations/step_N_<time>.jsonl: a line of metrics, then a line a completion."""
    from rlft import interrupt
    from rlft.logger.jsonl import encode, number
    from rlft.trainer.checkpoint import write_atomically

    file = folder / "evaluations" / f"step_{evaluation.step:06d}_{datetime.now():%Y-%m-%d_%H-%M-%S}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"step": evaluation.step, "accuracy": evaluation.accuracy, **evaluation.metrics}]
    for p, group in enumerate(groups):
        for i, rollout in enumerate(group.rollouts):
            rewards = {name: number(float(values[p, i])) for name, values in scores.by_reward.items()}
            completion = rollout.completion
            lines.append(
                {
                    "prompt_id": group.prompt.id,
                    "index": i,
                    "prompt": [dict(m) for m in group.prompt.messages],
                    "answer": group.prompt.answer,
                    "completion": completion.text,
                    "rewards": rewards,
                    "finish_reason": str(completion.finish_reason),
                }
            )
    write_atomically(file, b"".join(encode(line) for line in lines).decode())
    interrupt.keeps(f"every completion is in {file}")
    return file


def print_table(what: str, evaluation: Evaluation, num_prompts: int, num_samples: int, file: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{what}: {num_prompts} held-out prompts x {num_samples} samples", title_justify="left")
    for column in ("metric", "value", "standard error"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    metrics = evaluation.metrics
    for name, value in metrics.items():
        if not name.endswith("_se"):
            error = metrics.get(f"{name}_se")
            label = name.removeprefix("eval/")
            if f"{name}_se" in metrics and not label.startswith("pass@"):
                label = f"mean@{num_samples} ({label})"
            table.add_row(label, f"{value:.4f}", "" if error is None else f"{error:.4f}")
    console = Console()
    console.print(table)
    console.print(f"every completion: {file}", markup=False, highlight=False)
