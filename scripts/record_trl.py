"""Records what TRL's GRPOTrainer computes, as the lines that `rlft audit <file> of=trl` reads (docs/audit.md).

It needs TRL 1.16 alone: copy it beside your script, and put its class in the place of GRPOTrainer.

    from record_trl import RecordedGRPOTrainer

    trainer = RecordedGRPOTrainer(..., record_to="run.jsonl")
    trainer.train()

The file has the settings, then a line for each completion that is sampled, and for each update a line with its loss and
the log-probs that this was computed from. Runs of several processes are refused, as each has only a part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

METRICS = {"kl": "kl", "clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean"}
"""{name in a line: TRL's}."""


class RecordedGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer that writes into the file `record_to` what it computes while it trains."""

    def __init__(self, *args: Any, record_to: str | Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.accelerator.num_processes > 1:
            raise ValueError("a recording is of one process")
        self.record_to, self.recorded_step = Path(record_to), 0
        self.recorded_batches: list[dict[str, Any]] = []
        self.group_size: int = kwargs["args"].num_generations
        self.record_to.write_text("")
        self.record({"settings": self.recorded_settings()})

    @property
    def is_training(self) -> bool:
        model: Any = self.model
        return model.training

    def record(self, line: dict[str, Any]) -> None:
        with self.record_to.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def recorded_settings(self) -> dict[str, Any]:
        args: Any = self.args
        others = {
            "entropy bonus": self._entropy_bonus_enabled,
            "top_entropy_quantile": args.top_entropy_quantile < 1,
            "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
            "vllm_importance_sampling_correction": args.use_vllm and args.vllm_importance_sampling_correction,
            "router_aux_loss": self.aux_loss_enabled,
        }
        names = (
            "multi_objective_aggregation", "loss_type", "mask_truncated_completions", "importance_sampling_level",
            "epsilon", "epsilon_high", "delta", "beta", "max_completion_length", "sapo_temperature_pos",
            "sapo_temperature_neg",
        )  # fmt: skip
        return {
            **{name: getattr(args, name) for name in names},
            "scale_rewards": self.scale_rewards,
            "reward_weights": self.reward_weights.tolist(),
            "kl_estimator": "k3_unbiased" if args.use_bias_correction_kl else "k3",
            "also_in_loss": [name for name, is_on in others.items() if is_on],
        }

    def _generate(self, prompts: Any) -> Any:
        generated = super()._generate(prompts)
        self.recorded_ids = [list(ids) for ids in generated[1]]
        return generated

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        self.recorded_rewards = super()._calculate_rewards(*args, **kwargs)
        return self.recorded_rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if not self.is_training:
            return output
        self.recorded_step += 1
        mask, ends = output["completion_mask"], [*self.eos_token_ids, self._tokenizer.pad_token_id]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        for row, ids in enumerate(self.recorded_ids):
            rewards = self.recorded_rewards[row].tolist()
            line = {
                "step": self.recorded_step,
                "group": row // self.group_size,
                "rewards": {n: None if r != r else r for n, r in zip(self.reward_func_names, rewards, strict=True)},
                "advantage": output["advantages"][row].item(),
                "completion_ids": ids,
                "truncated": not ids or ids[-1] not in ends,
                "mask": mask[row].tolist(),
            }
            for name, tensor in (("old_logprobs", "old_per_token_logps"), ("ref_logprobs", "ref_per_token_logps")):
                if tensor in output:
                    line[name] = output[tensor][row].tolist()
            if "tool_mask" in output:
                line["tool_mask"] = output["tool_mask"][row].int().tolist()
            self.record({"old_logprobs": "current", **line})
        output["row"] = torch.arange(len(self.recorded_ids))  # shuffled with the other tensors
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        computed = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.recorded_logprobs = computed[0].detach()
        return computed

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        if self.is_training:
            batch = {"rows": inputs["row"].tolist(), "logprobs": self.recorded_logprobs.tolist(), "loss": loss.item()}
            batch |= {
                name: self._metrics["train"][key][-1] for name, key in METRICS.items() if self._metrics["train"][key]
            }
            self.recorded_batches.append(batch)
            if len(self.recorded_batches) == self.current_gradient_accumulation_steps:
                self.record_update()
        return loss

    def record_update(self) -> None:
        batches, number = self.recorded_batches, len(self.recorded_batches)
        line: dict[str, Any] = {"step": self.recorded_step, "loss": sum(batch["loss"] for batch in batches)}
        line |= {name: sum(batch[name] for batch in batches) / number for name in METRICS if name in batches[0]}
        line |= {"rows": [batch["rows"] for batch in batches], "logprobs": [batch["logprobs"] for batch in batches]}
        self.record(line)
        self.recorded_batches = []
