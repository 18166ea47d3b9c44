"""What `rlft rm` and `rlft dpo` learn from rankings of completions: a reward model, or a policy without sampling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rlft.algorithm.ops.aggregate import row_sum
from rlft.algorithm.preference import RankedValues
from rlft.batch import batch_of_rows, to_device
from rlft.data.examples import RankedTokens
from rlft.loop.driver import Outcome
from rlft.loop.engines import Engines
from rlft.loop.metrics import mean_and_error
from rlft.loop.supervised import SupervisedTask, open_policy, train_supervised
from rlft.model.adapter_folder import has_head
from rlft.model.packing import Layout
from rlft.model.reward_model import ENDING, last_scores, numbers_of_rows, parts_within, rows_of
from rlft.model.roles import POLICY, Roles
from rlft.plan.preference_plan import PreferencePlan
from rlft.runs.checkpoint import Checkpoint
from rlft.system.terminal import Say
from rlft.trainer.update import added_up, numbers_of
from rlft.types import Batch, Evaluation

REWARD = "reward"
BIAS = f"{REWARD}.head.bias"
REFERENCE_LOGPROBS = "reference_logprobs"
"""The file of a checkpoint that holds them, and the value of state.json that says what they are of."""


class PreferenceTask(SupervisedTask[PreferencePlan]):
    """A head gives each completion of a prompt a value; the loss, a mean over rankings, wants the better one higher.

    The bias of a reward model's head is not trained, because no difference of scores depends on it. It is 0 during the
    run; only the saved head has the value that `center` requires, so that centring does not change what is learned.

    Log-probs by a reference are computed once for each ranking, when an update first has it, and saved: a resumed run
    has them to the last bit, whatever micro-batch they were computed in.
    """

    def __init__(self, plan: PreferencePlan, roles: Roles) -> None:
        super().__init__(plan, roles, REWARD if plan.trains_reward else POLICY)
        self.roles = roles
        self.ending = (ENDING,) * plan.trains_reward  # tokens that are added to each row
        self.known: dict[int, tuple[float, ...]] = {}
        self._held_out: list[RankedTokens] | None = None
        self._reset_bias()

    def parameters(self) -> list[tuple[str, Parameter]]:
        return [(name, p) for name, p in super().parameters() if name != BIAS]

    # -- an update -----------------------------------------------------------------------------------------------------
    def backward(self, step: int) -> dict[str, float]:
        positions, rankings = self.plan.positions(step), self.plan.train.rankings
        new = [i for i in dict.fromkeys(positions) if i not in self.known]
        compared = self._with_reference([rankings[i] for i in new])
        self.known |= {i: ranking.reference for i, ranking in zip(new, compared, strict=True)}
        of_step = [replace(rankings[i], reference=self.known[i]) for i in positions]
        return self.learn([*of_step, *self.plan.replayed(step)])

    def rehearse(self) -> None:
        self.learn(self._with_reference(self.largest_part()))

    def learn(self, rankings: Sequence[RankedTokens]) -> dict[str, float]:
        """Adds the gradient of the mean loss over the rankings; returns the means of the metrics."""
        roles, losses, measured = self.roles, [], []
        parts = self.micro_batches(rankings)
        micros = roles.forward.placed([self._batch_of(part) for part in parts])
        dtype = torch.promote_types(roles.backbone.model.dtype, torch.float32)
        facts = to_device([facts_of(part, dtype) for part in parts], roles.backbone.device)
        with roles.training():
            for part, micro, of_part in zip(parts, micros, facts, strict=True):
                with roles.learning(self.role):
                    values = ranked_values(self.values(micro.batch, micro.layout), part, of_part)
                    terms = [self.plan.loss(v, r.scores) for v, r in zip(values, part, strict=True)]
                    loss = torch.stack([loss for loss, _ in terms]).sum() / len(rankings)
                    loss.backward()
                roles.check_gradients(self.role)
                losses.append(loss.detach())
                measured += [metrics for _, metrics in terms]
        of_losses, *numbers = numbers_of([{str(i): loss for i, loss in enumerate(losses)}, *measured])
        sums: dict[str, float] = defaultdict(float)
        for part in parts:
            of_part, numbers = numbers[: len(part)], numbers[len(part) :]
            for name in of_part[0]:
                sums[name] += sum(metrics[name] for metrics in of_part)
        means = {name: value / len(rankings) for name, value in sums.items()}
        num_tokens = sum(micro.real_tokens for micro in micros)
        return {"loss/total": added_up(of_losses.values()), **means, "tokens/trained": num_tokens}

    def micro_batches(self, rankings: Sequence[RankedTokens]) -> list[list[RankedTokens]]:
        """Splits the rankings in order to fit the token budget; a ranking that exceeds it is not split."""
        packed, ending = self.roles.forward.packed, len(self.ending)
        return parts_within(rankings, self.config.token_budget, packed=packed, ending=ending)

    def largest_part(self) -> list[RankedTokens]:
        """The micro-batch with the most tokens of an update on the rankings that have most, padding included."""
        forward = self.roles.forward

        def tokens_of(ranking: RankedTokens) -> int:
            lengths = [len(completion) + len(self.ending) for completion in ranking.completions]
            if forward.packed:
                return len(ranking.prompt) + sum(lengths)
            return len(lengths) * (len(ranking.prompt) + max(lengths))

        rankings = sorted(self.plan.train.rankings, key=tokens_of, reverse=True)[: self.config.rankings_per_step]
        return max(self.micro_batches(rankings), key=lambda part: forward.network_tokens(self._batch_of(part)))

    def values(self, batch: Batch, layout: Layout) -> Tensor:
        """`[B]` by the active role: the rows' scores, or log-probs of their completions in nats, summed over tokens."""
        if self.plan.trains_reward:
            return last_scores(self.roles, REWARD, batch, layout)
        return row_sum(self.roles.forward(batch, 1.0, layout=layout).logprobs, batch.loss_mask)

    def _batch_of(self, rankings: Sequence[RankedTokens]) -> Batch:
        return batch_of_rows(rows_of(rankings, self.ending))

    def _values_by(self, role: str | None, rankings: Sequence[RankedTokens]) -> Tensor:
        """float64 `[rows]` on the CPU, without gradient or dropout: the values by this role (None: the bare base)."""
        return numbers_of_rows(self.roles, role, self._batch_of(rankings), self.config.token_budget, self.values)

    def _with_reference(self, rankings: Sequence[RankedTokens]) -> list[RankedTokens]:
        """The rankings with the log-probs by the reference, in one pass over all of them."""
        if self.plan.reference == "none" or not rankings:
            return list(rankings)
        values = split_by_ranking(self._values_by(self.roles.reference_role, rankings), rankings)
        return [replace(r, reference=tuple(v.tolist())) for r, v in zip(rankings, values, strict=True)]

    # -- an evaluation -------------------------------------------------------------------------------------------------
    def evaluate(self, step: int) -> Evaluation:
        """Accuracy on the held-out pairs (mean over each ranking, then over rankings), and means of other metrics."""
        if self._held_out is None:
            self._held_out = self._with_reference(self.plan.held_out.rankings[: self.config.eval.num_rankings])
        values_B = self._values_by(self.role, self._held_out)
        values = ranked_values(values_B, self._held_out, facts_of(self._held_out, values_B.dtype))
        measured = [self.plan.loss.evaluated(v, r.scores) for v, r in zip(values, self._held_out, strict=True)]
        means = {name: mean_and_error([metrics[name].item() for metrics in measured]) for name in measured[0]}
        value, error = means.pop("accuracy/pairs")
        metrics = {"eval/pairs": value, "eval/pairs_se": error}
        metrics |= {f"eval/{name}": mean for name, (mean, _) in means.items()}
        return Evaluation(step=step, accuracy=value, accuracy_se=error, metrics=metrics, examples=())

    # -- a checkpoint --------------------------------------------------------------------------------------------------
    def saved(
        self, step: int, optimizer: Mapping[str, Any], state: Mapping[str, Any], *, for_chain: bool = False
    ) -> Checkpoint:
        made = super().saved(step, optimizer, state)
        if self.plan.trains_reward:
            learned = {"weight": self.roles.heads[REWARD].weights()["weight"]}
            return replace(made, heads={REWARD: learned if for_chain else self._head_weights()})
        if self.plan.reference == "none":
            return made
        logprobs = [logprob for values in self.known.values() for logprob in values]
        known = {
            "positions": torch.tensor(list(self.known), dtype=torch.int64),
            "logprobs": torch.tensor(logprobs, dtype=torch.float64),
        }
        state = {**made.state, REFERENCE_LOGPROBS: self.plan.reference_fingerprint}
        return replace(made, state=state, tensors={REFERENCE_LOGPROBS: known})

    def restore(self, saved: Checkpoint) -> None:
        """Of a fork with other preferences or another reference the log-probs are computed anew."""
        super().restore(saved)
        if self.plan.trains_reward:
            self.roles.heads[REWARD].load_state_dict(saved.heads[REWARD])
            self._reset_bias()
        elif saved.state.get(REFERENCE_LOGPROBS) == self.plan.reference_fingerprint:
            tensors, rankings = saved.tensors[REFERENCE_LOGPROBS], self.plan.train.rankings
            values = iter(tensors["logprobs"].tolist())
            self.known = {i: tuple(islice(values, len(rankings[i].completions))) for i in tensors["positions"].tolist()}

    def _head_weights(self) -> dict[str, Tensor]:
        """The scalar head; if `center` is set, its bias gives the best held-out completions a mean score of 0."""
        weights = self.roles.heads[REWARD].weights()
        if self.config.center:
            held_out = self.plan.held_out.rankings[: self.config.eval.num_rankings]
            best = [replace(r, completions=r.completions[:1], scores=r.scores[:1]) for r in held_out]
            weights["bias"] = weights["bias"] - self._values_by(REWARD, best).mean().to(weights["bias"])
        return weights

    def _reset_bias(self) -> None:
        if self.plan.trains_reward:
            with torch.no_grad():
                self.roles.heads[REWARD].bias.zero_()


def facts_of(rankings: Sequence[RankedTokens], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(the lengths of all completions, their log-probs by the reference or nothing), both `[rows]`."""
    lengths = [len(completion) for ranking in rankings for completion in ranking.completions]
    reference = [value for ranking in rankings for value in ranking.reference]
    return torch.tensor(lengths, dtype=dtype), torch.tensor(reference, dtype=dtype)


def ranked_values(
    values_B: Tensor, rankings: Sequence[RankedTokens], facts: tuple[Tensor, Tensor]
) -> list[RankedValues]:
    """The values of the rows of these rankings, as the losses take them; facts: as `facts_of` gives them."""
    lengths_B, reference_B = facts
    references = split_by_ranking(reference_B, rankings) if len(reference_B) else [None] * len(rankings)
    apart = zip(*(split_by_ranking(x, rankings) for x in (values_B, lengths_B)), references, strict=True)
    return [RankedValues(values=v, lengths=lengths, reference=reference) for v, lengths, reference in apart]


def split_by_ranking(values: Tensor, rankings: Sequence[RankedTokens]) -> Sequence[Tensor]:
    """The values `[rows]` of the rows of these rankings, apart for each ranking."""
    return values.split([len(ranking.completions) for ranking in rankings])


def open_task(plan: PreferencePlan, stack: ExitStack) -> PreferenceTask:
    """Loads the model with a reward's adapter and head, or with a policy's adapter and the reference's."""
    lora = plan.config.lora
    if not plan.trains_reward:
        return PreferenceTask(plan, open_policy(plan.config, lora, stack, reference=plan.reference))
    roles = open_policy(plan.config, replace(lora, path=None), stack)
    if lora.path is None or has_head(lora.path):
        roles.add_scalar_role(REWARD, lora.path, "lora.path", learns=True)
    else:  # a policy's adapter, for instance from supervised fine-tuning: the head starts at zero
        roles.add_scalar_role(REWARD, None, "lora.path", learns=True)
        roles.load_role(REWARD, lora.path, "lora.path")
    return PreferenceTask(plan, roles)


def run(plan: PreferencePlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    return train_supervised(plan, folder, lambda stack: open_task(plan, stack), say)
