"""Kill and resume, bit for bit, where more moves than a policy: critic, KL coefficient, snapshots, rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_folders import check_resumed, checkpoints, killed_at_each, learned, metrics
from run_processes import Nursery

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run and what it was made for: `moves` is true of its folder when that part did something."""

    keys: tuple[str, ...]
    kills: tuple[tuple[str, int], ...]
    moves: Callable[[Path], bool]


def states(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((checkpoint / "state.json").read_text()) for checkpoint in checkpoints(folder)]


def differ(folder: Path, file: str) -> bool:
    """Whether that file is another one in every checkpoint."""
    contents = [(checkpoint / file).read_bytes() for checkpoint in checkpoints(folder)]
    return len(set(contents)) == len(contents)


def ppo_moves(folder: Path) -> bool:
    coefficients = [state["algorithm"]["kl_coef"] for state in states(folder)]
    counts = [state["critic"]["num_steps"] for state in states(folder)]
    return (
        len(set(coefficients)) > 2
        and counts == [1, 2, 3, 4, 5]
        and differ(folder, "critic/head.safetensors")
        and differ(folder, "critic/adapter_model.safetensors")
        and differ(folder, "reference/adapter_model.safetensors")
    )


def is_resampled(folder: Path) -> bool:
    sampled = [line["sampled/completions"] for line in metrics(folder)]
    return max(sampled) > 3 * 4 and len(set(sampled)) > 1


def snapshots_move(folder: Path) -> bool:
    references = [(c / "reference" / "adapter_model.safetensors").read_bytes() for c in checkpoints(folder)]
    old = [(c / "old" / "adapter_model.safetensors").read_bytes() for c in checkpoints(folder)]
    policy = [(c / "policy" / "adapter_model.safetensors").read_bytes() for c in checkpoints(folder)]
    # The reference is renewed after steps 2 and 4; old is the policy that samples next.
    return references[1:] == [policy[1], policy[1], policy[3], policy[3]] and old == policy


def reward_learns(folder: Path) -> bool:
    weights = [(c / "reward_learned" / "adapter_model.safetensors").read_bytes() for c in checkpoints(folder)]
    trained = [line["step"] for line in metrics(folder) if "reward_model/loss" in line]
    said = {line["reward/learned"] for line in metrics(folder) if line["step"] > 2}
    return trained == [2, 4] and weights[1] == weights[2] != weights[3] and 0.0 not in said


def follows_a_schedule(folder: Path) -> bool:
    # The critic alone; warm; then (1 + cos(pi k / 3)) / 2 of the recipe's 1e-3, for k = 0, 1, 2.
    rates = [line["policy/lr"] for line in metrics(folder)]
    return rates == pytest.approx([0.0, 1e-3, 1e-3, 0.75e-3, 0.25e-3], rel=1e-12)


UPDATE = "rlft.trainer.optimizer:Optimizer.update"
TRAINED = "rlft.trainer.reward_training:RewardRefresh.train_if_due"
SAVED = "rlft.runs.checkpoint:save"
CASES = {
    # Two epochs of two minibatches, and two optimizers: eight updates a step, resumed from steps 1 and 3.
    "ppo with critic, adaptive KL, ema and value normalisation": Case(
        keys=(
            "algorithm=ppo", "critic.kind=adapter", "critic.lr=1e-3", "critic.normalize_values=true",
            "snapshot.reference=ema", "snapshot.ema_decay=0.9", "algorithm.kl_coef=0.05",
            "algorithm.kl_controller=adaptive", "algorithm.kl_target=0.01", "prompts_per_step=2", "epochs=2",
            "minibatches=2",
        ),
        kills=((UPDATE, 8 + 5), (UPDATE, 2 * 8 + 6)),
        moves=ppo_moves,
    ),
    "dynamic sampling": Case(
        keys=("dynamic_sampling.max_rounds=2",),
        kills=(("rlft.loop.sampling:uninformative", 4), ("rlft.loop.sampling:replaced", 2)),
        moves=is_resampled,
    ),
    "a curriculum that counts the run's own groups": Case(
        keys=("curriculum.running=true", "curriculum.replay=0.5", "curriculum.below=1", "data.size=8"),
        kills=((UPDATE, 2), (SAVED, 2)),
        moves=lambda folder: metrics(folder)[-1]["curriculum/known_fraction"] > 3 / 8,
    ),
    "old and reference copies": Case(
        keys=(
            "snapshot.old=copy", "snapshot.reference=copy", "snapshot.refresh_every=2", "algorithm.kl_coef=0.1",
            "epochs=2",
        ),
        kills=(("rlft.model.roles:Roles.refresh", 2), ("rlft.model.roles:Roles.refresh", 3)),
        moves=snapshots_move,
    ),
    "a learned reward trained in the loop": Case(
        keys=(
            "reward=[exact_match,format,learned]", "reward_model.refresh_every=2", "reward_model.labels=exact_match",
            "reward_model.replay=0.5", "generation.max_tokens=32",
        ),
        # In the training after step 2; with pairs of step 3 waiting and earlier ones kept; in that after step 4.
        kills=((TRAINED, 2), (SAVED, 2), (TRAINED, 1)),
        moves=reward_learns,
    ),
    "pretraining text, a shared critic that learns first, a schedule, and a reset of the moments": Case(
        keys=(
            "algorithm=ppo_ptx", "pretrain.path=embedded:arithmetic-text", "pretrain.sequences_per_update=4",
            "pretrain.held_out=4", "critic.kind=shared", "critic.lr=1e-3", "critic.warmup_steps=1",
            "snapshot.reference=base", "algorithm.kl_coef=0.05", "trainer.schedule=cosine", "trainer.warmup=2",
            "trainer.reset_every=3", "eval.kl_base=true",
        ),
        kills=((SAVED, 2), (UPDATE, 2 * 2 + 1)),
        moves=lambda folder: differ(folder, "critic/head.safetensors") and follows_a_schedule(folder),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_killed_and_resumed_it_is_the_same_run(
    case: Case,
    quiet: Nursery,
    rough: Nursery,
    tiny: tuple[str, ...],
    all_checkpoints: tuple[str, ...],
    tmp_path: Path,
) -> None:
    replaced = {key.partition("=")[0] for key in case.keys}
    keys = [*(key for key in tiny if key.partition("=")[0] not in replaced), *case.keys]
    quiet.run("train", *keys, *all_checkpoints, "hydra.run.dir=undisturbed", cwd=tmp_path, ends=0)
    undisturbed = tmp_path / "undisturbed"
    assert learned(undisturbed)
    assert case.moves(undisturbed)
    events = [{"at": place, "call": call, "do": "kill", "when": "after"} for place, call in case.kills]
    killed_at_each(rough, tmp_path, ["train", *keys, "checkpoint.every=1"], events, undisturbed)
    check_resumed(rough, tmp_path, undisturbed)
