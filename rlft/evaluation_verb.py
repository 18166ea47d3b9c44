"""`rlft eval`: a trained run, one of its checkpoints, or a bare model on the held-out split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rlft import runfolder
from rlft.types import Evaluation, Group, Scores, UserError

USAGE = """\
usage: rlft eval run=<run or checkpoint folder> [<key>=<value>] ...
       rlft eval model.path=<model> [data=<name>] [<key>=<value>] ...

Samples the held-out split and prints mean@k and pass@k with standard errors; every completion goes to a JSONL file.
  rlft eval run=runs/grpo_arithmetic/<time> eval.num_samples=8
  rlft eval run=runs/grpo_arithmetic/<time>/checkpoints/step_000060
  rlft eval model.path=embedded:tiny-arithmetic data=arithmetic generation.max_tokens=48"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A run, or one checkpoint of it. config: the run's plain config. checkpoint: its folder, None for the newest."""

    run: Path
    config: dict[str, Any]
    checkpoint: Path | None


def find(path: Path) -> Place:
    """The run that this folder is, or belongs to as a checkpoint."""
    is_checkpoint = (path / "state.json").is_file()
    run = path.parents[1] if is_checkpoint else path
    config = runfolder.read(run, "run")
    config.pop(runfolder.ORIGIN, None)
    return Place(run=run, config=config, checkpoint=path if is_checkpoint else None)


def run(plain: dict[str, Any], place: Place | None, say: Callable[[str], None]) -> Evaluation:
    """Evaluates and prints; the file lies in the run's folder, or under runs/eval for a bare model."""
    from rlft.engine import Engines
    from rlft.plan import make_plan
    from rlft.session import open_session
    from rlft.trainer import checkpoint

    plain = {**plain, "logger": {}, "resume": None, "eval": {**plain["eval"], "every": 1, "kl_base": False}}
    plan = make_plan(plain)
    saved = None
    if place is not None:
        root = runfolder.checkpoints(place.run)
        saved = checkpoint.load_newest(root, say) if place.checkpoint is None else _load_one(place.checkpoint)
        if saved is None:
            raise UserError(
                "run",
                "there is no checkpoint in that run yet",
                got=place.run,
                remedy="let it reach checkpoint.every steps first",
            )
        if saved.state.get("base_fingerprint") != plan.fingerprints["base_fingerprint"]:
            raise UserError(
                "model.path",
                "is not the base this run was trained on",
                got=plan.config.model.path,
                remedy="leave it as it was",
            )
    folder = place.run if place is not None else Path("runs") / "eval" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    with Engines() as engines, open_session(plan, folder, engines, say) as session:
        if saved is not None:
            session.roles.restore(saved.adapters, saved.heads)
            session.publish(saved.step)
        assert plan.held_out is not None, "eval.every is 1 here"
        prompts = plan.held_out.prompts[: plan.config.eval.num_prompts]
        evaluation, groups, scores = session.evaluate(prompts, 0 if saved is None else saved.step)
    what = plan.config.model.path if saved is None else f"{place.run if place else ''} after step {saved.step}"
    file = write(folder, evaluation, groups, scores)
    print_table(what, evaluation, len(prompts), plan.config.eval.num_samples, file)
    return evaluation


def _load_one(folder: Path) -> Any:
    from rlft.trainer import checkpoint

    damage = checkpoint.find_damage(folder)
    if damage is not None:
        raise UserError("run", f"the checkpoint is damaged ({damage})", got=folder, remedy="evaluate another one")
    return checkpoint.load(folder)


def write(folder: Path, evaluation: Evaluation, groups: Sequence[Group], scores: Scores) -> Path:
    """evaluations/step_N_<time>.jsonl: a line of metrics, then a line a completion."""
    from rlft.logger.jsonl import encode, number

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
    file.write_bytes(b"".join(encode(line) for line in lines))
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
