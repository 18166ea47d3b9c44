"""Updates of every family on the pretended card and on the CPU, from the same rollouts; and whole steps there."""

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import model_folders
import torch
from pretended_card import COUNTS
from torch import Tensor

from rlft import cli
from rlft.batch import collate
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.loop.metrics import Clock
from rlft.loop.parts import load_teacher, open_roles, open_trainer
from rlft.model.roles import Roles
from rlft.plan.train_plan import TrainPlan
from rlft.types import Batch, Completion, FinishReason, Group, Rollout, Scores, StepScores

PROMPTS, GROUP = 4, 3
SHORT = (
    "generation=transformers", "generation.max_tokens=8", f"prompts_per_step={PROMPTS}", f"group_size={GROUP}",
    "lora.rank=4", "lora.dropout=0", "data.size=16", "data.held_out_size=4", "eval.every=0", "minibatches=1",
    "epochs=1", "scoring.workers=0", "console=null", "model.gradient_checkpointing=false",
)  # fmt: skip
FAMILIES = (
    "a2c", "cispo", "dapo", "dr_grpo", "gdpo", "gmpo", "grpo", "grpo_process", "gspo", "gspo_token", "kimi", "opd",
    "ppo", "ppo_penalty", "ppo_ptx", "reinforce", "reinforce_pp", "rloo", "sapo",
)  # fmt: skip
TEACHER = "snapshot.teacher=MODEL"
MORE = {
    "dapo": "dynamic_sampling.max_rounds=0",
    "opd": f"{TEACHER} snapshot.reference=base",
    "ppo_ptx": "pretrain.sequences_per_update=4 pretrain.held_out=4",
}
CASES: dict[str, str] = {
    **{name: f"+recipe={name}_arithmetic {MORE.get(name, '')}" for name in FAMILIES},
    "ppo with a shared head": "+recipe=ppo_arithmetic critic.kind=shared critic.normalize_values=true",
    "opd in the loss": f"+recipe=opd_arithmetic {TEACHER} algorithm.teacher_in=loss algorithm.top_k=3",
    "kl, entropy and mismatch": "+recipe=grpo_arithmetic snapshot.reference=copy algorithm.kl_coef=0.05"
    " algorithm.entropy_coef=0.01 algorithm.mismatch=token_mask algorithm.off_policy_limit=0.1",
    "dora": "+recipe=grpo_arithmetic lora.use_dora=true",
    "checkpointing": "+recipe=grpo_arithmetic model.gradient_checkpointing=true",
    "plain kernels": "+recipe=grpo_arithmetic model.kernels=plain",
    "bfloat16": "+recipe=grpo_arithmetic model.dtype=bfloat16",
    "bfloat16 with a critic": "+recipe=ppo_arithmetic model.dtype=bfloat16",
    "float16": "+recipe=grpo_arithmetic model.dtype=float16",
}
QUICK = ("ppo_ptx", "opd in the loss", "kl, entropy and mismatch", "checkpointing", "plain kernels", "bfloat16")
SPLIT = ("ppo_ptx", "opd in the loss", "plain kernels", "bfloat16")
"""Those of them that are also split into several micro-batches."""


ROUNDINGS = 2**9 * 2.0**-23
"""Float32 sums of some hundred numbers in another order, one after the other, are off by so much of the whole."""


def far(host: dict[str, float], card: dict[str, float]) -> dict[str, tuple[float, float]]:
    """The metrics that differ by more than roundings."""
    assert host.keys() == card.keys()
    pairs = {name: (host[name], card[name]) for name in host}
    return {name: (a, b) for name, (a, b) in pairs.items() if not abs(a - b) <= ROUNDINGS * max(1.0, abs(a))}


@dataclass(frozen=True, kw_only=True)
class Done:
    """An update: its metrics, the gradient `[n]` of all that learns, and what it did on the card."""

    metrics: dict[str, float]
    gradient: torch.Tensor
    counts: dict[str, Any]


def main(*names: str) -> dict[str, Any]:
    """{case: its metrics on both devices, gradients `[n]` of both, and of the CPU in float32 if that was in 16 bits,
    counts for 1 and for 4 micro-batches}."""
    cases = sorted(names, key=lambda name: "dtype" in CASES[name])  # one base is loaded at a time
    with tempfile.TemporaryDirectory() as folder:
        model_folders.of_half_its_layers(Path(folder))
        plans = {name: planned(name, folder) for name in cases}
        exact = {name: planned(name, folder, dtype="float32") for name in cases if "dtype" in CASES[name]}
        truths = {name: updated(plan, "cpu", [1])[0] for name, plan in exact.items()}
        on_host = {name: updated(plan, "cpu", [1])[0] for name, plan in plans.items()}
        on_card = {
            name: updated(plan, "cuda", [1] if name in QUICK and name not in SPLIT else [1, PROMPTS])
            for name, plan in plans.items()
        }
    return {name: compared(on_host[name], on_card[name], truths.get(name)) for name in names}


def compared(host: Done, on_card: Sequence[Done], truth: Done | None) -> dict[str, Any]:
    whole = on_card[0]

    def distance(one: Done, other: Done) -> float:
        return float((one.gradient - other.gradient).norm() / other.gradient.norm())

    return {
        "metrics": [host.metrics, whole.metrics],
        "distance": distance(whole, host),
        "to_truth": None if truth is None else [distance(host, truth), distance(whole, truth)],
        "counts": {number: done.counts for number, done in zip((1, PROMPTS), on_card, strict=False)},
    }


def planned(name: str, folder: str, **model: str) -> TrainPlan:
    words = CASES[name].replace("MODEL", folder).split()
    keys = {"device": "cpu", "dtype": "float32"} | ({} if "opd" in name else {"path": folder})
    given = [f"model.{key}={value}" for key, value in keys.items() if f"model.{key}" not in CASES[name]]
    return resolve(compose([*SHORT, *given, *words, *(f"model.{key}={value}" for key, value in model.items())])).plan()


def updated(plan: TrainPlan, device: str, numbers: Sequence[int]) -> list[Done]:
    """The first update of a run from made-up rollouts, for each number of micro-batches."""
    config = replace(plan.config, model=replace(plan.config.model, device=device))
    plan = replace(plan, config=config)
    with open_roles(config, load_teacher(config.snapshot, config.model)) as roles:
        learned = [parameter for role in roles.learning_roles for _, parameter in roles.named_parameters(role)]
        dice = torch.Generator().manual_seed(1)
        weights = [p.detach().cpu() + 0.01 * torch.randn(p.shape, generator=dice) for p in learned]
        return [_updated(plan, roles, list(zip(learned, weights, strict=True)), number) for number in numbers]


def _updated(plan: TrainPlan, roles: Roles, weights: Sequence[tuple[Tensor, Tensor]], number: int) -> Done:
    for parameter, values in weights:
        parameter.data.copy_(values)
    trainer = open_trainer(plan, roles)
    groups, scores = rollouts(plan)
    batch = collate(groups, scores, roles.backbone.decode)
    if number > 1:
        roles.token_budget = max(roles.forward.network_tokens(of_group(batch, group)) for group in range(PROMPTS))
    assert len(roles.forward.micro_batches(batch, torch.arange(len(batch.rewards)), roles.token_budget)) == number
    nobody = plan.algorithm.zero_gradient_rows(batch)
    batch = plan.algorithm.credit(trainer.annotate(batch, nobody))
    COUNTS.clear()
    metrics = trainer.update(plan.algorithm, batch, nobody, 0)
    counts = {"waits": dict(COUNTS.waits), "uploads": dict(COUNTS.uploads), "launches": COUNTS.launches.total()}
    # AdamW's first moments are a tenth of the gradient; weights would add a rounding of their own.
    states = [optimizer.state() for optimizer in trainer.optimizers.values()]
    moments = [moment for state in states for name, moment in state.items() if name.startswith("exp_avg/")]
    gradient = torch.cat([moment.cpu().double().flatten() for moment in moments])
    return Done(metrics=metrics, gradient=gradient, counts=counts)


def of_group(batch: Batch, group: int) -> Batch:
    return batch.select((batch.group_ids == group).nonzero()[:, 0])


def rollouts(plan: Any, length: int | None = None) -> tuple[list[Group], Scores]:
    """Made-up completions of a step's prompts, all of this length or of several; each has a scored step."""
    dice, groups, steps = random.Random(3), [], []
    for prompt in plan.train_prompts.prompts[: plan.config.prompts_per_step]:
        siblings = []
        for i in range(plan.config.group_size):
            ids = [dice.randrange(30, 200) for _ in range(length or (dice.randrange(2, 8) if i else 8))]
            logprobs = [-dice.uniform(1, 4) for _ in ids]
            completion = Completion(text="", token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.stop)
            siblings.append(Rollout(prompt=prompt, completion=completion, policy_version=0))
        groups.append(Group(prompt=prompt, rollouts=tuple(siblings)))
        steps.append([StepScores(values=(dice.random(),), ends=(0,)) for _ in siblings])
    total = torch.tensor([[dice.random() for _ in group.rollouts] for group in groups])
    halves = {"exact_match": total / 2, "format": total.flip(1) / 2}
    scored = plan.algorithm.needs_steps
    return groups, Scores(
        total=total, by_reward=halves, outcome=total if scored else None, steps=steps if scored else None
    )


def of_whole_steps(*words: str) -> list[dict[str, Any]]:
    """Of each step but the first, what was done since the one before: {stage: its counts}; "" has what no stage has."""
    steps: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    enter, end_step = Clock.__call__, Clock.end_step

    def take(stage: str) -> None:
        counts = {"waits": COUNTS.waits, "uploads": COUNTS.uploads, "launches": COUNTS.launches}
        for kind, counter in counts.items():
            found.setdefault(stage, {k: type(counter)() for k in counts})[kind].update(counter)
        COUNTS.clear()

    @contextmanager
    def counted(clock: Clock, stage: str) -> Iterator[None]:
        take("")
        with enter(clock, stage):
            yield
        take(stage)

    def ended(clock: Clock) -> dict[str, float]:
        nonlocal found
        take("")
        steps.append(found)
        found = {}
        return end_step(clock)

    Clock.__call__, Clock.end_step = counted, ended  # type: ignore[method-assign,assignment]
    code = cli.run(list(words))
    assert code == 0, f"exit {code}"
    return steps[2:]
