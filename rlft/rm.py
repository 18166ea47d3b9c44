"""`rlft rm`: a reward model from preferences, an adapter with a scalar head on the frozen base.

What comes out is a folder that `reward=learned` and `critic.init` take as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from rlft import check
from rlft.check_adapters import check_adapters
from rlft.checks.rm import check_config, replayed, uses_of
from rlft.engine import Engines
from rlft.evaluate import mean_and_error
from rlft.examples import RankedTokens, Rankings, scan_rankings
from rlft.model.adapter_folder import content_fingerprint, has_head, load_adapter
from rlft.model.backbone import fingerprint, load_tokenizer, read_config
from rlft.model.reward_model import Row as ScoredRow
from rlft.model.reward_model import last_scores, score_rows, scoring_batch
from rlft.model.roles import Roles, policy_alone
from rlft.ops.preference import accuracy, pairs_of_ranking, ranking_loss
from rlft.roots import RmConfig
from rlft.run.extent import steps_done
from rlft.sizes import Facts, Row, facts_of
from rlft.supervised import learn
from rlft.targets import instantiate
from rlft.trainer.checkpoint import Checkpoint
from rlft.training_base import load_for_training
from rlft.types import Evaluation, Logger, Split, UserError
from rlft.work import Outcome, Say, Work, command_line, override, overrides, program

REWARD = "reward"
BIAS = f"{REWARD}.head.bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class RmPlan:
    """Everything known before a weight is loaded. replay: rankings of earlier rounds, None where there are none."""

    config: RmConfig
    plain: Mapping[str, Any]
    train: Rankings
    held_out: Rankings
    replay: Rankings | None
    loggers: tuple[Logger, ...]
    fingerprints: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def num_new(self) -> int:
        """Rankings of this round in an update, at least one."""
        size = self.config.rankings_per_step
        return size if self.replay is None else max(1, size - round(size * self.config.replay.fraction))

    @property
    def num_steps(self) -> int:
        """The steps that are asked for, or those that the epochs take."""
        each_epoch = max(1, len(self.train.rankings) // self.num_new)
        return self.config.steps or self.config.epochs * each_epoch

    def at(self, step: int) -> list[RankedTokens]:
        """The rankings of the update that follows `step` steps: this round's, then the replayed ones."""
        found = self.train.at(self.config.seed, step, self.num_new, "rankings")
        num_replayed = self.config.rankings_per_step - self.num_new
        if self.replay is None or not num_replayed:
            return found
        return [*found, *self.replay.at(self.config.seed, step, num_replayed, "replay")]


def make_plan(plain: Mapping[str, Any], *, runs_here: bool = True) -> RmPlan:
    """Checks the whole config, reads the model's config.json and tokenizer, and scans the data.

    runs_here: False if the run is only planned: what 4-bit weights need may be missing here.

    Raises:
        UserError: for whatever a user can mend.
    """
    config, loggers = check_config(plain)
    check.check_machine(config.model, runs_here=runs_here)
    model_config, base_fingerprint = read_config(config.model), fingerprint(config.model)
    limit = config.max_completion_tokens
    check.check_row(config.prompts.max_tokens, limit, "max_completion_tokens", model_config)
    check.check_targets(config.lora, config.model, model_config)
    check_adapters(uses_of(config), config.lora, config.model, base_fingerprint, model_config)
    tokenizer = load_tokenizer(config.model)
    notes: list[str | None] = []

    def scanned(preferences: Mapping[str, Any], split: Split) -> Rankings:
        found = instantiate(preferences, "preferences").scan(split)
        rankings = scan_rankings(found.rankings, tokenizer, config.prompts, limit, split)
        notes.extend([found.note, rankings.note])
        return rankings

    train, held_out = scanned(config.preferences, Split.train), scanned(config.preferences, Split.held_out)
    replay = None
    if config.replay.path is not None:
        try:
            replay = scanned(replayed(config), Split.train)
        except UserError as error:
            raise UserError("replay.path", error.problem, got=error.got, remedy=error.remedy) from None
    plan = RmPlan(
        config=config,
        plain=plain,
        train=train,
        held_out=held_out,
        replay=replay,
        loggers=loggers,
        fingerprints={
            "preferences_fingerprint": train.fingerprint,
            "held_out_preferences_fingerprint": held_out.fingerprint,
            **({} if replay is None else {"replay_fingerprint": replay.fingerprint}),
            "base_fingerprint": base_fingerprint,
            **{f"{use.key}_fingerprint": content_fingerprint(use.path) for use in uses_of(config)},
        },
        notes=tuple(note for note in notes if note),
    )
    if replay is not None and plan.num_new == config.rankings_per_step:
        problem = f"gives the replay none of the {plan.num_new} rankings of an update"
        remedy = "raise it or rankings_per_step, or leave replay.path out"
        raise UserError("replay.fraction", problem, got=config.replay.fraction, remedy=remedy)
    check.check_enough("rankings_per_step", config.rankings_per_step, plan.num_new, len(train.rankings), "rankings")
    return plan


class Ranked:
    """The lesson: score the better completion higher.

    The head's bias is not trained: no difference of scores depends on it. It is 0 in the run, and what `center` asks
    for in the saved head; so centring changes nothing that is learned.
    """

    def __init__(self, plan: RmPlan, roles: Roles) -> None:
        self.plan, self.config, self.roles, self.role = plan, plan.config, roles, REWARD
        self._forget_bias()

    def parameters(self) -> list[tuple[str, Parameter]]:
        return [(name, p) for name, p in self.roles.named_parameters(REWARD) if name != BIAS]

    def backward(self, step: int) -> dict[str, float]:
        """Adds the gradient of the mean ranking loss over the step's prompts."""
        return self._learn(self.plan.at(step))

    def rehearse(self) -> None:
        rankings = sorted(self.plan.train.rankings, key=lambda r: -sum(map(len, r.completions)))
        parts = self._micro_batches(rankings[: self.config.rankings_per_step])
        self._learn(parts[0])

    def rehearse_evaluation(self, step: int) -> None:
        """Nothing is sampled."""

    def _learn(self, rankings: Sequence[RankedTokens]) -> dict[str, float]:
        roles = self.roles
        total = right = 0.0
        num_tokens = 0
        with roles.training():
            for part in self._micro_batches(rankings):
                batch = roles.to_device(scoring_batch(rows_of(part)))
                with roles.learning(REWARD):
                    scores = last_scores(roles, REWARD, batch).split([len(r.completions) for r in part])
                    losses = [ranking_loss(s, r.scores, self.config.margin) for s, r in zip(scores, part, strict=True)]
                    loss = torch.stack(losses).sum() / len(rankings)
                    loss.backward()
                roles.check_gradients(REWARD)
                total += loss.item()
                right += sum(pair_accuracy(s.detach(), r) for s, r in zip(scores, part, strict=True))
                num_tokens += roles.forward.real_tokens(batch)
        return {"loss/total": total, "accuracy/pairs": right / len(rankings), "tokens/trained": num_tokens}

    def _micro_batches(self, rankings: Sequence[RankedTokens]) -> list[list[RankedTokens]]:
        """The rankings in order, as many at a time as fit the token budget; one that exceeds it is not torn."""
        parts: list[list[RankedTokens]] = []
        for ranking in rankings:
            tokens = self.roles.forward.network_tokens
            if parts and tokens(scoring_batch(rows_of([*parts[-1], ranking]))) <= self.config.token_budget:
                parts[-1].append(ranking)
            else:
                parts.append([ranking])
        return parts

    def evaluate(self, step: int) -> Evaluation:
        """Accuracy on the held-out pairs (of each ranking, then over rankings) and the loss, no margin asked for."""
        rankings = self.plan.held_out.rankings[: self.config.eval.num_rankings]
        scores = self._scores(rankings)
        value, error = mean_and_error([pair_accuracy(s, r) for s, r in zip(scores, rankings, strict=True)])
        losses = [ranking_loss(s, r.scores, 0.0).item() for s, r in zip(scores, rankings, strict=True)]
        metrics = {
            "eval/pairs": value,
            "eval/pairs_se": error,
            "eval/loss": sum(losses) / len(losses),
            "eval/score_best": sum(s[0].item() for s in scores) / len(scores),
            "eval/score_worst": sum(s[-1].item() for s in scores) / len(scores),
        }
        return Evaluation(step=step, accuracy=value, accuracy_se=error, metrics=metrics, examples=())

    def _scores(self, rankings: Sequence[RankedTokens]) -> Sequence[torch.Tensor]:
        found = score_rows(self.roles, REWARD, rows_of(rankings), self.config.token_budget)
        return torch.tensor(found, dtype=torch.float64).split([len(r.completions) for r in rankings])

    def saved(self, step: int, optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> Checkpoint:
        head = self.roles.heads[REWARD].weights()
        if self.config.center:
            best = [replace(r, completions=r.completions[:1], scores=r.scores[:1]) for r in self.plan.held_out.rankings]
            scores = self._scores(best[: self.config.eval.num_rankings])
            head["bias"] = head["bias"] - torch.stack(list(scores)).mean().to(head["bias"])
        return Checkpoint(
            step=step,
            adapters={REWARD: self.roles.weights(REWARD)},
            adapter_config=self.roles.adapter_config(),
            optimizer=optimizer,
            state=state,
            heads={REWARD: head},
        )

    def restore(self, saved: Checkpoint) -> None:
        self.roles.restore_role(REWARD, saved.adapters[REWARD])
        self.roles.heads[REWARD].restore(saved.heads[REWARD])
        self._forget_bias()

    def _forget_bias(self) -> None:
        with torch.no_grad():
            self.roles.heads[REWARD].bias.zero_()

    def sizes(self) -> Sequence[Row]:
        return size_rows(
            self.plan, facts_of(self.roles.model, self.parameters(), self.roles.backbone, self.roles.forward)
        )


def size_rows(plan: RmPlan, facts: Facts) -> list[Row]:
    """Every size of `rlft rm` that people ask about."""
    run, rankings = plan.config, plan.train.rankings
    pairs = sum(len(pairs_of_ranking(r.scores)[0]) for r in rankings)
    replayed = "" if plan.replay is None else f", {run.rankings_per_step - plan.num_new} of them replayed"
    return [
        facts.model_row(run.model.path),
        ("trainable", f"{facts.trainable:,}", f"{run.lora.kind} rank {run.lora.rank} and a scalar head"),
        facts.forward_row(),
        ("rankings", f"{len(rankings):,}", f"{pairs:,} pairs; {len(plan.held_out.rankings):,} rankings held out"),
        ("a step", f"{run.rankings_per_step}", f"rankings in one optimizer update{replayed}"),
        ("total", f"{plan.num_steps} steps", f"{plan.num_steps * plan.num_new / len(rankings):.1f} epochs"),
    ]


def rows_of(rankings: Sequence[RankedTokens]) -> list[ScoredRow]:
    """Every completion once, ranking by ranking; those of one prompt are a group, even in two rankings."""
    groups = {prompt: number for number, prompt in enumerate(dict.fromkeys(r.prompt for r in rankings))}
    return [(groups[r.prompt], r.prompt, completion) for r in rankings for completion in r.completions]


def pair_accuracy(scores: torch.Tensor, ranking: RankedTokens) -> float:
    """The share of the ranking's pairs whose better completion scores higher; equal scores count half."""
    better, worse = pairs_of_ranking(ranking.scores)
    return accuracy(scores[better], scores[worse]).item()


def open_lesson(plan: RmPlan, stack: ExitStack) -> Ranked:
    """Loads the model, with the reward's adapter and head on it."""
    config = plan.config
    fresh = replace(config.lora, path=None)
    backbone = load_for_training(config.model, config.token_budget)
    roles = policy_alone(backbone, fresh, token_budget=config.token_budget, seed=config.seed)
    stack.callback(roles.close)
    path = config.lora.path
    if path is None or has_head(path):
        roles.add_scalar_role(REWARD, path, "lora.path", learns=True)
    else:  # a policy's adapter, from supervised fine-tuning, say: the head begins as zeros
        roles.add_scalar_role(REWARD, None, "lora.path", learns=True)
        roles.restore_role(REWARD, load_adapter(path, "lora.path"))
    return Ranked(plan, roles)


def do(plan: RmPlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    """Trains to the last step or an interruption."""
    return learn(plan, folder, lambda stack: open_lesson(plan, stack), say)


def closing(plan: RmPlan, folder: Path) -> None:
    """The page at the end of a run."""
    from rlft.logger.summary import print_summary

    words = ["train", "+recipe=ppo_arithmetic", override("model.path", plan.config.model.path)]
    words += [*overrides(plan.config.lora.keys_of_shape), "reward=[exact_match,learned]"]
    words += [override("reward.learned.path", folder), "critic.init=reward"]
    print_summary(folder, [("train a policy with it, its critic begun from it", command_line(program(), *words))])


WORK = Work(
    make_plan=make_plan,
    check=lambda plain: check.check_machine(check_config(plain)[0].model),
    do=do,
    steps_done=steps_done,
    closing=closing,
)
