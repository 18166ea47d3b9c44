"""The metrics of a step (rewards, lengths, waste, memory, seconds), and of an evaluation on held-out prompts or texts.

An evaluation samples, scores, and computes what `loop/evaluations.py` has a row of.

Values of single tokens of a few completions are for people to look at (`rlft report`): the policy reads some of the
step's groups before and after the update, without gradient and without dropout. That shows what an update did to each
token, and where engine and trainer disagree. The run is not affected.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlft.algorithm.objective import Objective
from rlft.algorithm.ops.aggregate import row_sum
from rlft.algorithm.ops.kl import k3
from rlft.batch import Decode
from rlft.environment.protocol import Cause
from rlft.generation.drafts import Drafts
from rlft.generation.engine import Generator
from rlft.loop.evaluations import METRICS, filled
from rlft.model.adapter_folder import POLICY
from rlft.model.networks import Networks
from rlft.runs.lines import TokenValues
from rlft.system.device import peak_memory_bytes
from rlft.system.seeds import sampling_seeds
from rlft.types import Batch, Completion, Evaluation, FinishReason, Group, Prompt, Rollouts, Scores

CAUSES = (Cause.malformed, Cause.raised, Cause.time, Cause.died)
"""Why calls fail; a call beyond the limit is not here, because it ends its conversation."""


class Clock:
    """Measures the seconds of each stage: `with clock("sample"): ..`. Calls `tell` with a stage's name at its start.

    A step begins where the metrics of the one before were taken, so that the steps of a run are all of its loop's time:
    logging, sealing, an evaluation and a checkpoint after a step count in the next one.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.start = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.monotonic()
        self.tell(stage)
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start

    def end_step(self) -> dict[str, float]:
        """The seconds of the step that ends here and of its stages, and the most memory that was taken so far."""
        start, self.start = self.start, time.monotonic()
        seconds, self.seconds = self.seconds | {"step": self.start - start}, {}
        return {f"time/{stage}": s for stage, s in seconds.items()} | {"memory/peak_bytes": peak_memory_bytes()}


def rollout_metrics(rollouts: Rollouts, batch: Batch, algorithm: Objective) -> dict[str, float]:
    """The rewards, lengths and tokens of a step, from the batch with credit.

    policy/entropy is estimated from the sampled tokens' log-probs, at no cost, in nats per token; an algorithm that
    computes it exactly overwrites it.
    """
    groups, scores = rollouts.groups, rollouts.scores
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    lengths = [completion.num_sampled for completion in completions]
    metrics = {"reward/mean": scores.total.mean().item(), "reward/std": scores.total.std(correction=0).item()}
    metrics |= {f"reward/{name}": values.double().mean().item() for name, values in scores.by_reward.items()}
    metrics["length/mean"] = sum(lengths) / len(lengths)
    metrics["length/truncated_fraction"] = sum(c.finish_reason == "length" for c in completions) / len(completions)
    metrics["tokens/prompt"] = sum(len(group.prompt.token_ids) for group in groups)
    metrics["tokens/completion"] = sum(lengths)
    metrics |= turn_metrics(completions)
    metrics["sampled/completions"] = rollouts.num_sampled
    if rollouts.num_sampled:
        metrics["waste/resampled_fraction"] = 1 - len(completions) / rollouts.num_sampled
    metrics["waste/zero_advantage_fraction"] = algorithm.rows_without_signal(batch).float().mean().item()
    if batch.old_values is not None and (earned_BT := algorithm.earned(batch)) is not None:
        metrics["value/explained_variance"] = explained_variance(batch.old_values, earned_BT, batch.loss_mask)
    metrics["policy/entropy"] = -(batch.sampled_logprobs.sum() / batch.loss_mask.sum()).item()
    return metrics


def unknown_token_metrics(groups: Sequence[Group], unknown: Collection[int]) -> dict[str, float]:
    """The number of sampled ids for which the tokenizer has no token; empty if the model can sample none of them."""
    if not unknown:
        return {}
    rows = (rollout.completion.token_ids for group in groups for rollout in group.rollouts)
    return {"sampled/unknown_tokens": float(sum(token in unknown for row in rows for token in row))}


def turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Metrics of turns, tool calls, ends, and tokens that the policy only read; empty where no completion has turns."""
    turns = [turn for completion in completions for turn in completion.turns]
    if not turns and all(completion.mask is None for completion in completions):
        return {}
    calls = [call for turn in turns for call in turn.calls]
    ends = Counter(str(completion.finish_reason) for completion in completions)
    causes = Counter(call.cause for call in calls if call.cause)
    return {
        **{f"finish/{reason}": ends[reason] / len(completions) for reason in FinishReason},
        **{f"calls/{cause}_fraction": causes[cause] / max(1, len(calls)) for cause in CAUSES},
        "tokens/environment": sum(len(c.token_ids) - c.num_sampled for c in completions),
        "turns/branches": sum(len(c.branches) for c in completions) / len(completions),
        "turns/mean": sum(max(1, len(c.turns)) for c in completions) / len(completions),
        "turns/calls": len(calls) / len(completions),
        "turns/failed_calls_fraction": sum(call.failed for call in calls) / max(1, len(calls)),
    }


def explained_variance(values: Tensor, earned: Tensor, mask: Tensor) -> float:
    """1 - var(earned - values) / var(earned) over the masked tokens; 0 if what was earned does not vary.

    Against the critic's own target it would be wrong: with a lambda below 1 that is mostly made of the values, and
    random ones seem to explain it.
    """
    error, target = (earned - values)[mask].double(), earned[mask].double()
    variance = target.var(correction=0).item()
    return 1 - error.var(correction=0).item() / variance if variance > 0 else 0.0


# -- evaluations -------------------------------------------------------------------------------------------------------
def evaluate(
    generator: Generator,
    scorer: Callable[[Sequence[Group]], Scores],
    prompts: Sequence[Prompt],
    config: Any,
    step: int,
    drafts: Drafts | None = None,
) -> tuple[Evaluation, list[Group], Scores]:
    """Samples and scores the prompts, always with the same seeds, as the sections `eval` and `generation` say.

    A completion is right if its first reward is `eval.correct_at` or more.
    """
    settings, sampling = config.eval, config.eval.drawn(replace(config.generation.sampling, drafts=drafts))
    seeds = sampling_seeds(config.seed, 0, len(prompts), settings.num_samples, "evaluate")
    groups = generator.sample(prompts, settings.num_samples, seeds, sampling)
    scores = scorer(groups)
    evaluation = summarise(
        groups, scores, step=step, correct_at=settings.correct_at, num_examples=settings.num_examples
    )
    return evaluation, groups, scores


def summarise(
    groups: Sequence[Group], scores: Scores, *, step: int, correct_at: float, num_examples: int
) -> Evaluation:
    """The metrics of scored groups; errors are standard errors over prompts."""
    primary = next(iter(scores.by_reward))
    right = (scores.by_reward[primary] >= correct_at).tolist()
    prompts = list(zip(right, scores.answers.get(primary, [()] * len(right)), strict=True))
    metrics: dict[str, float] = {}
    for metric in METRICS:
        if metric.of_prompt is not None and (primary in scores.answers or not metric.of_answers):
            for k in metric.sizes(len(right[0])):
                name = filled(metric.name, k, primary)
                metrics[name], metrics[f"{name}_se"] = mean_and_error([metric.of_prompt(k, *p) for p in prompts])
    for name, values in scores.by_reward.items():
        metrics[f"eval/reward/{name}"] = values.float().mean().item()
    completions = [r.completion for g in groups for r in g.rollouts]
    metrics["eval/length/mean"] = sum(c.num_sampled for c in completions) / len(completions)
    metrics["eval/length/truncated_fraction"] = sum(c.finish_reason == "length" for c in completions) / len(completions)
    metrics |= {f"eval/{name}": value for name, value in turn_metrics(completions).items()}
    shown = groups[:num_examples]
    return Evaluation(
        step=step,
        accuracy=metrics[f"eval/{primary}"],
        accuracy_se=metrics[f"eval/{primary}_se"],
        metrics=metrics,
        examples=tuple(g.rollouts[0] for g in shown),
        example_scores=tuple(scores.by_reward[primary][: len(shown), 0].tolist()),
    )


def kl_to_base(roles: Networks, batch: Batch) -> float:
    """KL(policy || base) on the policy's own completions, in nats, mean over tokens (k3: unbiased, never negative)."""
    gaps_BT = k3(roles.logprobs(batch, POLICY), roles.logprobs(batch, None))
    return row_sum(gaps_BT.double(), batch.loss_mask).sum().item() / max(1, int(batch.loss_mask.sum()))


def text_loss(learner: Networks, batch: Batch, token_budget: int) -> float:
    """Mean negative log-prob per token (nats) of these texts, with the active adapter, at temperature 1, no gradient.

    The mean is over learned tokens, not texts: the sum over the batch of -log p(token | earlier tokens of its text) /
    number of learned tokens.
    """
    total, forward = 0.0, learner.forward
    with torch.no_grad():
        for _, micro in forward.parts(batch, token_budget):
            # Outside the mask the forward gives 0.
            total -= forward(micro.batch, 1.0, layout=micro.layout).logprobs.double().sum().item()
    return total / int(batch.loss_mask.sum())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error of the mean); the error of a single value is 0.

    >>> mean_and_error([0.0, 1.0])
    (0.5, 0.5)
    """
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, 0.0
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)


# -- single tokens -----------------------------------------------------------------------------------------------------
DIGITS = 5
UNFINISHED = "\ufffd"  # a tokenizer decodes part of a character to this


@contextmanager
def inspecting(
    roles: Networks,
    batch: Batch,
    prompt_lengths: Sequence[int],
    zero_gradient_B: Tensor,
    num_groups: int,
    decode: Decode,
    clock: Clock,
) -> Iterator[dict[int, TokenValues]]:
    """Inspects at most so many groups of a step before and after its update, which happens inside.

    Yields {row of the step's batch: the values of its tokens}, empty until the end. `zero_gradient_B`, bool `[B]`, are
    rows that contribute nothing; groups of other rows come first.
    """
    found: dict[int, TokenValues] = {}
    with clock("inspect"):
        rows, reference = chosen_rows(batch.group_ids, zero_gradient_B, num_groups), roles.reference_role
        batch = batch.select(rows)
        old_BT = roles.logprobs(batch, POLICY)
        reference_BT = roles.logprobs(batch, reference) if roles.has(reference) else None
    yield found
    with clock("inspect"):
        after_BT, entropy_BT = _logprobs_and_entropies(roles, batch)
        advantages = torch.zeros_like(old_BT) if batch.advantages is None else batch.advantages
        for i, row in enumerate(rows.tolist()):
            completion = slice(prompt_lengths[row], int(batch.attention_mask[i].sum()))
            sampled_T = batch.loss_mask[i, completion]
            old, after, of_reference, entropy, advantage = (
                _of_sampled(None if values_BT is None else values_BT[i, completion], sampled_T)
                for values_BT in (old_BT, after_BT, reference_BT, entropy_BT, advantages)
            )
            found[row] = TokenValues(
                text=pieces(batch.token_ids[i, completion].tolist(), decode),
                old=old,
                after=after,
                reference=of_reference,
                entropy=entropy,
                advantage=advantage,
            )


def _logprobs_and_entropies(roles: Networks, batch: Batch) -> tuple[Tensor, Tensor]:
    """The current policy's log-probs and entropies `[B, T]`."""
    logprobs, entropy = torch.zeros_like(batch.sampled_logprobs), torch.zeros_like(batch.sampled_logprobs)
    with torch.no_grad():
        for part, micro in roles.forward.parts(batch, roles.token_budget):
            with roles.replaying(micro.batch, micro.layout):
                outputs = roles.forward(micro.batch, roles.temperature, True, layout=micro.layout)
            assert outputs.entropy is not None, "it was requested"
            logprobs[part], entropy[part] = outputs.logprobs.to(logprobs), outputs.entropy.to(entropy)
    return logprobs, entropy


def chosen_rows(group_ids: Tensor, zero_gradient_B: Tensor, num_groups: int) -> Tensor:
    """Rows of whole groups, in order: groups with a row that has a gradient take precedence over the others."""
    groups = list(dict.fromkeys(group_ids.tolist()))
    is_zero = {group: bool(zero_gradient_B[group_ids == group].all()) for group in groups}
    chosen = sorted(groups, key=lambda group: is_zero[group])[:num_groups]
    return torch.isin(group_ids, torch.tensor(chosen, device=group_ids.device)).nonzero()[:, 0]


def pieces(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds; of the tokens of one character, only the last adds text.

    Tokens are decoded together with those of the previous piece, as a tokenizer may join a token to the one before.
    """
    texts = []
    start = end = 0  # the start of the previous piece, and the end of the tokens whose text has been added
    for i in range(len(token_ids)):
        previous, text = decode(token_ids[start:end]), decode(token_ids[start : i + 1])
        if text.endswith(UNFINISHED) and i + 1 < len(token_ids):
            texts.append("")
            continue
        texts.append(text[len(previous) :])
        start, end = end, i + 1
    return texts


def _of_sampled(values_T: Tensor | None, sampled_T: Tensor) -> list[float | None]:
    """The values of sampled tokens, and None for the others; None for all without values."""
    if values_T is None:
        return [None] * len(sampled_T)
    return [
        round(value, DIGITS) + 0.0 if is_sampled else None  # + 0.0: no -0.0
        for value, is_sampled in zip(values_T.tolist(), sampled_T.tolist(), strict=True)
    ]
