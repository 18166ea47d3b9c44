"""What samples the next step: the policy that is published, or with a lag the one before, ahead of time.

With a lag of 1 step k trains on what policy version max(0, k - lag) sampled. The groups of step k + 1 are sampled by
version k, the policy that step k starts from: during its update where engines have devices of their own, else before
it. Either way the groups are the same, so that a run stays a function of its config and seed: it never trains on
whatever is ready, and never loads an adapter during sampling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from rlft.loop.freshness import Freshness, StaleAdapterError
from rlft.loop.sampling import StepSampler
from rlft.runs.checkpoint import SAMPLED, SAMPLER, Checkpoint
from rlft.runs.lines import turn_of
from rlft.system import digests
from rlft.types import Adapter, Branch, Completion, FinishReason, Group, Prompt, Rollout


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
            return {SAMPLED: tensors}, values | origin
        assert self._previous is not None, "a step was published before this one"
        return {SAMPLER: self._previous.weights}, origin | {"scores": self.freshness.history.get(step - 1)}

    def restore(self, saved: Checkpoint, adapter_config: Mapping[str, Any]) -> None:
        """Restores the groups that were sampled ahead, or the adapter that samples them, unless a fork needs others."""
        values = saved.state.get(SAMPLED)
        if values is None or not self.lag or values["derived_from"] != derived_from(self.sampler, saved.step):
            return
        if SAMPLED in saved.tensors:
            self._groups = {saved.step: unpacked(saved.tensors[SAMPLED], values, self.sampler, saved.step)}
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
    return digests.of_bytes(json.dumps(values).encode())
