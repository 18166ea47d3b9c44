"""Short runs of the real TRL, recorded for `rlft audit of=trl`, and known bugs that are planted in its trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

Plant = Callable[[pytest.MonkeyPatch], None]
SETTINGS = {
    # 16 completions, four of each prompt, in four micro-batches: two updates, each made twice.
    "num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "steps_per_generation": 4, "num_iterations": 2, "max_steps": 4, "max_completion_length": 12,
    "beta": 0.04, "learning_rate": 3e-3, "loss_type": "grpo", "reward_weights": [1.0, 0.5],
    "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
    "bf16": False, "seed": 1,
}  # fmt: skip


# Rewards that float32 holds exactly, and that differ within nearly every group.
def parity(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def quarters(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [sum(ids[:9]) % 4 / 4 for ids in completion_ids]


def recorded(folder: Path, base: Path, **settings: Any) -> Path:
    """The recording of a run of the base on the CPU."""
    from datasets import Dataset
    from record_trl import RecordedGRPOTrainer
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig

    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    model.generation_config.eos_token_id = tokenizer.eos_token_id  # else TRL takes None for a list of numbers
    rows = [{"prompt": [{"role": "user", "content": f"{a} + {a + 3}"}]} for a in range(12, 40)]
    trainer = RecordedGRPOTrainer(
        model=model.float(),
        reward_funcs=[parity, quarters],
        args=GRPOConfig(output_dir=str(folder), **{**SETTINGS, **settings}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        record_to=folder / "run.jsonl",
    )
    trainer.train()
    return folder / "run.jsonl"


# -- bugs --------------------------------------------------------------------------------------------------------------
def theirs() -> Any:
    """TRL's module; importing it takes seconds."""
    import trl.trainer.grpo_trainer

    return trl.trainer.grpo_trainer


def in_loss(
    change: Callable[[Any, dict[str, Any]], dict[str, Any]], factor: Callable[[Any], float] = lambda _: 1.0
) -> Plant:
    """Changes what the loss is computed from, and multiplies it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = theirs().GRPOTrainer._compute_loss

        def wrong(trainer: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            return right(trainer, model, {**inputs, **change(trainer, inputs)}) * factor(trainer)

        patch.setattr(theirs().GRPOTrainer, "_compute_loss", wrong)

    return plant


def in_advantages(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Plant:
    """Changes advantages, as a function of them and of the weighted rewards `[16]`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        score, right = theirs().GRPOTrainer._calculate_rewards, theirs().GRPOTrainer._generate_and_score_completions
        kept: list[torch.Tensor] = []

        def keep(trainer: Any, *args: Any) -> torch.Tensor:
            rewards = score(trainer, *args)
            kept[:] = [(rewards * trainer.reward_weights).sum(1)]
            return rewards

        def wrong(trainer: Any, inputs: Any) -> dict[str, Any]:
            output = right(trainer, inputs)
            return {**output, "advantages": change(output["advantages"], kept[0])}

        patch.setattr(theirs().GRPOTrainer, "_calculate_rewards", keep)
        patch.setattr(theirs().GRPOTrainer, "_generate_and_score_completions", wrong)

    return plant


def in_std(change: Callable[[torch.Tensor, Any], torch.Tensor]) -> Plant:
    """Changes the standard deviations, as a function of them and of the number of what they are of."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = theirs().nanstd

        def wrong(values: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
            number = values.numel() if dim is None else values.shape[dim]
            return change(right(values, dim=dim, keepdim=keepdim), number)

        patch.setattr(theirs(), "nanstd", wrong)

    return plant


def nothing(patch: pytest.MonkeyPatch) -> None:
    """No bug."""


def in_groups_of_four(rewards: torch.Tensor) -> torch.Tensor:
    """Advantages `[16]` of groups of four."""
    groups = rewards.view(4, 4)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def without_old(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"old_per_token_logps": None}


def with_padding(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"completion_mask": torch.ones_like(inputs["completion_mask"])}


def shifted(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"advantages": inputs["advantages"].roll(1)}


def same(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {}


def without_kl(patch: pytest.MonkeyPatch) -> None:
    right = theirs().GRPOTrainer._compute_loss

    def wrong(trainer: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        beta, trainer.beta = trainer.beta, 0.0
        try:
            return right(trainer, model, inputs)
        finally:
            trainer.beta = beta

    patch.setattr(theirs().GRPOTrainer, "_compute_loss", wrong)


BUGS: dict[str, tuple[dict[str, Any], Plant, dict[str, Any], str, str]] = {
    # name: (settings of TRL, what is planted, settings that are claimed, the row that is wrong, its explanation)
    "scaled by the batch": (
        {"scale_rewards": "batch"}, nothing, {"scale_rewards": "group"}, "advantages", "scale_rewards=batch",
    ),
    "not scaled": ({"scale_rewards": "none"}, nothing, {"scale_rewards": "group"}, "advantages", "scale_rewards=none"),
    "biased std": ({}, in_std(lambda std, n: std * ((n - 1) / n) ** 0.5), {}, "advantages", "std=population"),
    "another eps": ({}, in_std(lambda std, n: std - 1e-4 + 1e-3), {}, "advantages", "eps=0.001"),
    "weights ignored": (
        {"reward_weights": None}, nothing, {"reward_weights": [1.0, 0.5]}, "advantages", "reward_weights=null",
    ),
    "normalised one by one": (
        {"multi_objective_aggregation": "normalize_then_sum"}, nothing,
        {"multi_objective_aggregation": "sum_then_normalize"}, "advantages",
        "multi_objective_aggregation=normalize_then_sum",
    ),
    "groups off by one": (
        {}, in_advantages(lambda _, rewards: in_groups_of_four(rewards.roll(1)).roll(-1)), {}, "advantages",
        "groups that begin a row too early",
    ),
    "advantages off by one": (
        {}, in_advantages(lambda advantages, _: advantages.roll(1)), {}, "advantages", "advantages of the row before",
    ),
    "truncated counted": (
        {}, nothing, {"mask_truncated_completions": True}, "masks", "mask_truncated_completions=false",
    ),
    "truncated masked": (
        {"mask_truncated_completions": True}, nothing, {"mask_truncated_completions": False}, "masks",
        "mask_truncated_completions=true",
    ),
    "bnpo": ({"loss_type": "bnpo"}, nothing, {"loss_type": "grpo"}, "losses", "loss_type=bnpo"),
    "dapo": ({"loss_type": "dapo"}, nothing, {"loss_type": "grpo"}, "losses", "loss_type=dapo"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, nothing, {"loss_type": "grpo"}, "losses", "loss_type=dr_grpo"),
    "ratios of sequences": (
        {"importance_sampling_level": "sequence", "beta": 0.0}, nothing, {"importance_sampling_level": "token"},
        "losses", "importance_sampling_level=sequence",
    ),
    "a narrow clip": ({"epsilon": 0.1}, nothing, {"epsilon": 0.2}, "losses", "epsilon=0.1 epsilon_high=null"),
    "no old policy": ({}, in_loss(without_old), {}, "losses", "old_logprobs that are those of the update"),
    "padding counted": ({}, in_loss(with_padding), {}, "losses", "padding counted"),
    "advantages of other rows": (
        {}, in_loss(shifted), {}, "losses", "advantages of the row before in the micro-batch",
    ),
    "gradients not averaged": (
        {}, in_loss(same, lambda trainer: trainer.current_gradient_accumulation_steps), {}, "losses",
        "divide_by_micro_batches=false",
    ),
    "no KL": ({}, without_kl, {}, "losses", "beta=0"),
    "another KL": (
        {"use_bias_correction_kl": False}, nothing, {"kl_estimator": "k3_unbiased"}, "losses", "kl_estimator=k3",
    ),
}  # fmt: skip
