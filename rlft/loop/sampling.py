"""Samples the groups of a step, which may be sampled ahead; its prompts and seeds are functions of (seed, step).

With a curriculum its prompts are functions of (seed, step) and of what was counted before (rlft/data/curriculum.py).
With dynamic sampling, groups of fresh prompts replace groups that are all right or all wrong (arXiv 2503.14476).

With a lag of 1 step k trains on what policy version max(0, k - lag) sampled. The groups of step k + 1 are sampled by
version k, the policy that step k starts from: during its update where engines have devices of their own, else before
it. Either way the groups are the same, so that a run stays a function of its config and seed: it never trains on
whatever is ready, and never loads an adapter during sampling.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rlft.config.schema import RunConfig
from rlft.data.curriculum import Curriculum
from rlft.data.prompts import permutation, prompts_for_step
from rlft.generation.drafts import Drafts
from rlft.generation.engine import Generator
from rlft.loop.freshness import Freshness, StaleAdapterError
from rlft.loop.metrics import Clock
from rlft.runs.checkpoint import DRAFTS, SAMPLED, SAMPLER, Checkpoint
from rlft.runs.lines import turn_of
from rlft.system.files import digest_of_bytes
from rlft.system.seeds import derive, sampling_seeds
from rlft.types import Adapter, Branch, Completion, FinishReason, Group, Prompt, Rollout, Rollouts, Sampling, Scores


class StepSampler:
    """Samples the groups of each step from the training prompts, with the adapter that the generator has loaded."""

    def __init__(
        self, generator: Generator, prompts: Sequence[Prompt], config: RunConfig, curriculum: Curriculum | None = None
    ) -> None:
        self.generator, self.prompts, self.config, self.curriculum = generator, prompts, config, curriculum
        self.drafts: Drafts | None = None
        # {number of finished steps: counts of drafts of the groups that follow them}, until they are logged.
        self.draft_counts: dict[int, Counter[str]] = {}
        self._index_of: dict[str, int] = {}  # with a curriculum, of each prompt that was taken: {id: index}

    @property
    def sampling(self) -> Sampling:
        """How the completions of a step are drawn."""
        return replace(self.config.sampling, drafts=self.drafts)

    def prompts_at(self, step: int) -> list[Prompt]:
        """The prompts of the step that follows `step` finished steps; no cursor is needed.

        With a curriculum the first call decides, by what has been counted up to then.
        """
        number = self.config.prompts_per_step
        if self.curriculum is None:
            indices = prompts_for_step(len(self.prompts), number, self.config.seed, step)
        else:
            indices = self.curriculum.of_step(step, number)
        return list(self._taken(indices))

    def _taken(self, indices: Iterable[int]) -> Iterator[Prompt]:
        for index in indices:
            prompt = self.prompts[index]
            if self.curriculum is not None:
                self._index_of[prompt.id] = index
            yield prompt

    def count(self, groups: Sequence[Group], scores: Scores) -> None:
        """Counts the right completions of these groups for the curriculum, if there is one."""
        if self.curriculum is not None:
            right_PG = _right(scores, self.config.eval.correct_at)
            indices = [self._index_of[group.prompt.id] for group in groups]
            self.curriculum.count(indices, right_PG.sum(1).tolist(), right_PG.shape[1])

    def sample(self, step: int) -> list[Group]:
        """The groups of the step that follows `step` finished steps."""
        return self.sample_prompts(self.prompts_at(step), step, "sample")

    def sample_prompts(self, prompts: Sequence[Prompt], step: int, purpose: str) -> list[Group]:
        """Groups of these prompts, sampled with seeds that derive from (seed, step, purpose).

        Afterwards the engine sleeps, because it is usually not used again before the next publish.
        """
        run = self.config
        seeds = sampling_seeds(run.seed, step, len(prompts), run.group_size, purpose)
        groups = self.generator.sample(prompts, run.group_size, seeds, self.sampling)
        self.generator.sleep()
        if self.drafts is not None:  # with a lag groups are sampled before those of the step before are logged
            self.draft_counts.setdefault(step, Counter()).update(self.drafts.taken())
        return groups

    def fresh_prompts(self, step: int, purpose: str, num: int, used_ids: set[str]) -> list[Prompt]:
        """Up to `num` prompts whose ids are not in `used_ids`, in an order that derives from (seed, step, purpose)."""
        order: Iterable[int]
        if self.curriculum is None:
            order = permutation(len(self.prompts), derive(self.config.seed, step, purpose), 0)
        else:
            order = self.curriculum.order(step, purpose)
        fresh = (prompt for prompt in self._taken(order) if prompt.id not in used_ids)
        return list(islice(fresh, num))


def replace_uninformative_groups(
    sampler: StepSampler,
    score: Callable[[Sequence[Group]], Scores],
    step: int,
    clock: Clock,
    groups: list[Group],
    scores: Scores,
) -> Rollouts:
    """Replaces the step's uninformative groups, at their positions, in at most `max_rounds` rounds.

    A group is informative if some of its completions are right and some wrong, by the first reward and
    `eval.correct_at`. Each round samples one fresh prompt for every group still to be replaced; groups that are
    left at the end stay (they have no advantage, and cost no forward). Prompts and seeds of a round derive from
    (seed, step, round) alone, so a resumed run repeats them exactly.
    """
    max_rounds, correct_at = sampler.config.dynamic_sampling.max_rounds, sampler.config.eval.correct_at
    num_sampled = sum(len(group.rollouts) for group in groups)
    used_ids = {group.prompt.id for group in groups}
    for round_number in range(1, max_rounds + 1):
        lacking, purpose = uninformative(scores, correct_at), f"resample {round_number}"
        prompts = sampler.fresh_prompts(step, purpose, len(lacking), used_ids)
        if not prompts:
            break
        with clock("sample"):
            new = sampler.sample_prompts(prompts, step, purpose)
        with clock("score"):
            new_scores = score(new)
        num_sampled += sum(len(group.rollouts) for group in new)
        used_ids |= {prompt.id for prompt in prompts}
        still_uninformative = set(uninformative(new_scores, correct_at))
        informative = [i for i in range(len(new)) if i not in still_uninformative]
        positions = lacking[: len(informative)]
        for position, i in zip(positions, informative, strict=True):
            groups[position] = new[i]
        scores = replaced(scores, positions, new_scores, informative)
    return Rollouts(groups=groups, scores=scores, num_sampled=num_sampled)


def uninformative(scores: Scores, correct_at: float) -> list[int]:
    """Indices of the groups whose completions are all right, or all wrong, by the first reward."""
    right_PG = _right(scores, correct_at)
    return (right_PG.all(1) | ~right_PG.any(1)).nonzero()[:, 0].tolist()


def _right(scores: Scores, correct_at: float) -> Tensor:
    """Whether each completion is right by the first reward, bool `[P, G]`."""
    return next(iter(scores.by_reward.values())) >= correct_at


def replaced(scores: Scores, positions: Sequence[int], new: Scores, rows: Sequence[int]) -> Scores:
    """`scores` with the rows at `positions` replaced by `rows` of `new`."""
    targets, sources = torch.tensor(positions, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)
    source_of = dict(zip(positions, rows, strict=True))

    def chosen(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        return [after[source_of[p]] if p in source_of else row for p, row in enumerate(before)]

    steps = None if scores.steps is None or new.steps is None else chosen(scores.steps, new.steps)
    outcome = None
    if scores.outcome is not None or new.outcome is not None:
        # Where one side has no rewards of turns, its whole total belongs to completions.
        outcomes, new_outcomes = (s.total if s.outcome is None else s.outcome for s in (scores, new))
        outcome = outcomes.index_copy(0, targets, new_outcomes[sources])
    zeros, new_zeros = torch.zeros_like(scores.total), torch.zeros_like(new.total)
    return Scores(
        total=scores.total.index_copy(0, targets, new.total[sources]),
        by_reward={
            name: scores.by_reward.get(name, zeros).index_copy(0, targets, new.by_reward.get(name, new_zeros)[sources])
            for name in {**scores.by_reward, **new.by_reward}
        },
        outcome=outcome,
        steps=steps,
        weights={**scores.weights, **new.weights},
        answers={name: chosen(rows, new.answers[name]) for name, rows in scores.answers.items()},
    )


# -- ahead of time -----------------------------------------------------------------------------------------------------
class NextSamples:
    """The groups of each step, by the version of the policy that is to sample them.

    Without a lag that is the published one. With a lag of 1 it is the one that was published before: its groups have
    been sampled ahead, or where a run goes on past its former last step, it is loaded once more.

    last_step: number of steps of the run; nothing is sampled ahead for later ones.
    concurrently: whether sampling ahead runs in a thread, during the update.
    """

    def __init__(
        self, sampler: StepSampler, freshness: Freshness, lag: int, last_step: int, *, concurrently: bool
    ) -> None:
        self.sampler, self.freshness, self.lag, self.last_step = sampler, freshness, lag, last_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampling ahead") if lag and concurrently else None
        self._groups: dict[int, list[Group]] = {}
        self._running: tuple[int, Future[list[Group]]] | None = None
        # With a lag, the adapter that is published, and the one before it.
        self._published: Adapter | None = None
        self._previous: Adapter | None = None

    def note_published(self, adapter: Adapter) -> None:
        """Remembers the adapter that the engine samples from, now that it is loaded."""
        if self.lag:
            self._previous, self._published = self._published or self._previous, adapter

    def sample(self, step: int, publish: Callable[[int], None]) -> list[Group]:
        """The groups of the step that follows `step` finished steps: those sampled ahead, else sampled now.

        publish: publishes a version of the policy, where another one has sampled in between.
        Raises StaleAdapterError: a version other than this step's sampled them.
        """
        previous = self._previous
        if previous is not None and step not in self._groups and previous.version == step - 1:
            self.sampler.generator.load(previous)
            self.freshness.check_again(previous.version, self.sampler.generator, previous)
            self._groups = {step: self.sampler.sample(step)}
            publish(step)
        groups = self._groups.pop(step) if step in self._groups else self.sampler.sample(step)
        if self.lag:
            check_versions(groups, {max(0, step - self.lag), step})
        return groups

    def sample_ahead(self, step: int) -> None:
        """Samples the groups of that step, or starts to in a thread, with the policy that is published now.

        Does nothing without a lag. Until `wait` returns, the engine must not be used.
        """
        if not self.lag:
            return
        # Chosen before this step's groups are counted, and also if only a continued run has that step.
        self.sampler.prompts_at(step)
        if step >= self.last_step or step in self._groups:
            return
        if self._thread is None:
            self._groups[step] = self.sampler.sample(step)
        else:
            self._running = (step, self._thread.submit(self.sampler.sample, step))

    @property
    def is_running(self) -> bool:
        """Whether a thread samples, or has sampled groups that `wait` has not yet collected."""
        return self._running is not None

    def wait(self) -> None:
        """Waits until nothing is being sampled ahead; raises what sampling raised."""
        if self._running is not None:
            (step, groups), self._running = self._running, None
            self._groups[step] = groups.result()

    def close(self) -> None:
        """Starts no more sampling; sampling that is under way ends with its engine."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # -- in a checkpoint -----------------------------------------------------------------------------------------------
    def state(self, step: int) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
        """(tensors, values) of the groups sampled ahead for the next step, or of the adapter that would sample them."""
        if not self.lag:
            return {}, {}
        origin = {"derived_from": derived_from(self.sampler, step)}
        if (groups := self._groups.get(step)) is not None:
            tensors, values = packed(groups, self.sampler.prompts_at(step))
            counts = self.sampler.draft_counts.get(step)
            return {SAMPLED: tensors}, values | origin | ({} if counts is None else {DRAFTS: counts})
        assert self._previous is not None, "a step was published before this one"
        return {SAMPLER: self._previous.weights}, origin | {"scores": self.freshness.history.get(step - 1)}

    def restore(self, saved: Checkpoint, adapter_config: Mapping[str, Any]) -> None:
        """Restores the groups that were sampled ahead, or the adapter that samples them, unless a fork needs others."""
        values = saved.state.get(SAMPLED)
        if values is None or not self.lag or values["derived_from"] != derived_from(self.sampler, saved.step):
            return
        if SAMPLED in saved.tensors:
            self._groups = {saved.step: unpacked(saved.tensors[SAMPLED], values, self.sampler, saved.step)}
            if DRAFTS in values:
                self.sampler.draft_counts[saved.step] = Counter(values[DRAFTS])
            return
        self._previous = Adapter(version=saved.step - 1, weights=saved.tensors[SAMPLER], config=adapter_config)
        if len(values["scores"] or ()) == self.freshness.num_tokens:  # another device may have compared fewer
            self.freshness.history[saved.step - 1] = values["scores"]


def check_versions(groups: Sequence[Group], versions: set[int]) -> None:
    """Raises StaleAdapterError if another policy version sampled any of these groups; without a version they pass."""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if rollout.policy_version is not None and rollout.policy_version not in versions:
            expected = " or ".join(map(str, sorted(versions)))
            raise StaleAdapterError(
                f"overlap.lag: prompt {rollout.prompt.id} was sampled by policy version {rollout.policy_version}, and"
                f" not by {expected}; stopped rather than train on stale rollouts"
            )


def packed(groups: Sequence[Group], step_prompts: Sequence[Prompt]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, plain values) of groups that a checkpoint keeps; `step_prompts` are the prompts of their step.

    Tensors: token_ids int64 `[N]` and logprobs float64 `[N]` of all completions, one after the other, and their
    lengths, int64 `[B]`; mask bool `[N]`, if an environment put tokens into any; experts `[.., layers, k]`, of prompts
    and completions, if the engine has noted them. Prompts are included only if an environment has extended some.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    completions = [rollout.completion for rollout in rollouts]
    tensors = {
        "token_ids": torch.tensor([token for c in completions for token in c.token_ids], dtype=torch.int64),
        "logprobs": torch.tensor([value for c in completions for value in c.logprobs], dtype=torch.float64),
        "lengths": torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64),
    }
    values: dict[str, Any] = {
        "texts": [c.text for c in completions],
        "finish_reasons": [str(c.finish_reason) for c in completions],
        "versions": [rollout.policy_version for rollout in rollouts],
        "sizes": [len(group.rollouts) for group in groups],
    }
    if any(c.mask is not None for c in completions):
        masks = [sampled for c in completions for sampled in c.mask or [True] * len(c.token_ids)]
        tensors["mask"] = torch.tensor(masks, dtype=torch.bool)
        values["masked"] = [c.mask is not None for c in completions]
    if all(c.experts is not None for c in completions):
        tensors["experts"] = torch.cat([torch.tensor(c.experts) for c in completions])
    if any(c.turns for c in completions):
        values["turns"] = [[asdict(turn) for turn in c.turns] for c in completions]
    if any(c.branches for c in completions):
        values["branches"] = [[asdict(branch) for branch in c.branches] for c in completions]
    group_prompts = [group.prompt for group in groups]
    pairs = zip(group_prompts, step_prompts, strict=True)
    if any(prompt.token_ids != original.token_ids for prompt, original in pairs):
        # messages as pairs: checkpoints sort the keys of objects, and rollout files keep their order
        values["prompts"] = [
            {"token_ids": list(prompt.token_ids), "messages": [list(message.items()) for message in prompt.messages]}
            for prompt in group_prompts
        ]
    return tensors, values


def unpacked(tensors: Mapping[str, Tensor], values: Mapping[str, Any], sampler: StepSampler, step: int) -> list[Group]:
    """The groups that `packed` converted, with the prompts of that step."""
    lengths = tensors["lengths"].tolist()
    token_ids, logprobs = (tensors[name].split(lengths) for name in ("token_ids", "logprobs"))
    masks: Sequence[Tensor | None] = [None] * len(lengths)
    if "mask" in tensors:
        masks_of_all = tensors["mask"].split(lengths)
        masks = [mask if has_mask else None for mask, has_mask in zip(masks_of_all, values["masked"], strict=True)]
    turns, branches = (values.get(name, [[]] * len(lengths)) for name in ("turns", "branches"))
    columns = (values["texts"], token_ids, logprobs, values["finish_reasons"], masks, turns, branches)
    completions = iter(zip(*columns, values["versions"], strict=True))
    experts, start, groups = tensors.get("experts"), 0, []
    prompts = sampler.prompts_at(step)
    for p, saved_prompt in enumerate(values.get("prompts", ())):
        ids, messages = tuple(saved_prompt["token_ids"]), tuple(map(dict, saved_prompt["messages"]))
        prompts[p] = replace(prompts[p], token_ids=ids, messages=messages)
    for prompt, size in zip(prompts, values["sizes"], strict=True):
        rollouts = []
        for _ in range(size):
            text, ids, token_logprobs, reason, mask, turn_values, branch_values, version = next(completions)
            end = start + len(prompt.token_ids) + len(ids)
            completion = Completion(
                text=text,
                token_ids=tuple(ids.tolist()),
                logprobs=tuple(token_logprobs.tolist()),
                finish_reason=FinishReason(reason),
                mask=None if mask is None else tuple(mask.tolist()),
                turns=tuple(map(turn_of, turn_values)),
                branches=tuple(Branch(**branch) for branch in branch_values),
                experts=None if experts is None else experts[start:end].numpy(),
            )
            start = end
            rollouts.append(Rollout(prompt=prompt, completion=completion, policy_version=version))
        groups.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
    return groups


def derived_from(sampler: StepSampler, step: int) -> str:
    """The sha256 of everything besides the policy that the groups of that step derive from, which a fork may change."""
    run = sampler.config
    prompts = [(prompt.id, list(prompt.token_ids)) for prompt in sampler.prompts_at(step)]
    values = [run.seed, run.group_size, sampler.sampling.settings, run.overlap.lag, prompts]
    return digest_of_bytes(json.dumps(values).encode())
