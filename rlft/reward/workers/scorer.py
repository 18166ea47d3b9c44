"""Makes `Scores` of groups: runs the rewards, and decides what a failed one means.

This file runs in the trainer only; workers import worker.py, which does not import torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlft.reward.workers.pool import InProcess, Pool, RewardError, StopWhen, WorkerPool
from rlft.reward.workers.reward_spec import TURNS, OnError, RewardSpec, specs
from rlft.reward.workers.worker import Cause, Failure, Outcome, Reply, Task, checked
from rlft.system.interrupt import SKEW_S, may_have_disturbed
from rlft.types import Group, Scores, StepScores, Verdict, counted

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RewardError", "RewardSpec", "Scorer", "specs"]

MAX_TIME_LIMITS_ALONE = 2
MAX_SHOWN_CHARS = 200

Resident = Callable[[Sequence[Group]], list[list[float]]]
"""A reward that this process itself computes, for all groups at once: `[P][G]` scores."""

Rows = list[Sequence[float | StepScores]]  # scores of one reward, `[P][G]`

Outcomes = dict[tuple[int, str], Outcome]
"""{(key of a task, reward): the outcome in the workers}; the key is the index of a group, where groups are scored."""


class Scorer:
    """Scores groups with every reward; results don't depend on which worker is faster.

    Make and use it in the thread that runs the loop. `num_failures` counts the completions that have got a fixed score
    because a reward failed on them; `last_failure` says what happened to the last one.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardSpec],
        # Number of processes, which start in the background; 0 scores in the calling process (no isolation).
        workers: int,
        timeout_s: float,  # seconds that a reward may take for a group
        # `stop` raises a RewardError, a number is the score of a completion on which a reward failed; a reward's own
        # `on_error` has priority. For a process reward the number is a score of the completion as a whole, which then
        # has no steps: no steps are made up, and the score also exists for an empty completion.
        on_error: OnError,
        # {name: callable} of rewards that this process computes for all groups at once, after those of the workers; a
        # reward that `runs_in_trainer` needs one. Wrong scores of theirs always stop the run.
        resident: Mapping[str, Resident] = MappingProxyType({}),
        # Opens the workers elsewhere; None: processes of this machine.
        open_pool: Callable[[Sequence[RewardSpec]], Pool] | None = None,
        *,
        allow_unscorable: bool = False,  # data.allow_unscorable, which has priority over `on_error`
    ) -> None:
        if unknown := [name for name in resident if name not in rewards]:
            raise ValueError(f"resident rewards {unknown} are not among the rewards {list(rewards)}")
        if missing := [name for name, spec in rewards.items() if spec.runs_in_trainer and name not in resident]:
            raise ValueError(f"rewards {missing} run in the trainer, and no resident callable was given for them")
        self._rewards = dict(rewards)
        self._resident = dict(resident)
        self._on_error: OnError = on_error
        self._allow_unscorable = allow_unscorable
        pooled = [spec for name, spec in rewards.items() if name not in resident]
        self._pooled = tuple(spec.name for spec in pooled)
        self._process = tuple(spec.name for spec in pooled if spec.scores_steps)
        self._reading = tuple(spec.name for spec in pooled if spec.reads_answers)
        self._pool: Pool | InProcess
        if workers and pooled:
            self._pool = WorkerPool(pooled, workers, timeout_s) if open_pool is None else open_pool(pooled)
        else:
            self._pool = InProcess(pooled, timeout_s)
        self.num_failures = 0
        self.last_failure: str | None = None

    def __call__(self, groups: Sequence[Group]) -> Scores:
        """Scores `[P, G]` of P groups of equal size G.

        Raises RewardError: a reward failed and its on_error is `stop`, workers could not start, or a resident reward
        did not give a finite number for each completion.
        """
        by_workers = self._by_workers(groups, {})
        by_reward: dict[str, Rows] = {name: by_workers.get(name, []) for name in self._rewards}
        for name, compute in self._resident.items():
            by_reward[name].extend(resident_scores(name, compute(groups), groups))
        if not by_reward:  # the total is 0, to which the environment's rewards are added
            import torch

            zeros = torch.zeros(len(groups), len(groups[0].rollouts) if groups else 0, dtype=torch.float64)
            return with_turns(Scores(total=zeros, by_reward={TURNS: zeros}, outcome=zeros), groups)
        scores = mixed(by_reward, {name: spec.weight for name, spec in self._rewards.items()}, self._process)
        answers = {
            name: [[score.answer if isinstance(score, Verdict) else None for score in row] for row in by_reward[name]]
            for name in self._reading
        }
        return with_turns(replace(scores, answers=answers), groups)

    def _by_workers(self, groups: Sequence[Group], known: Outcomes) -> dict[str, Rows]:
        """The scores `[P][G]` of each reward that workers compute, given the outcomes that exist already."""
        tasks, outcomes = self._tasks(groups), dict(known)
        self._raise_first_stop(groups, outcomes)
        # The reply of a killed worker is about one reward only, and a signal may have disturbed some: then the other
        # rewards of the task are still to do.
        while todo := _remaining(tasks, outcomes):
            outcomes |= self.run(todo, self._stops)
            self._raise_first_stop(groups, outcomes)
        by_reward: dict[str, Rows] = {name: [] for name in self._pooled}
        for (index, group), name in product(enumerate(groups), self._pooled):
            outcome = outcomes[index, name]
            by_reward[name].append(self._settle(group, name, outcome) if isinstance(outcome, Failure) else outcome)
        return by_reward

    def stop(self) -> None:
        """Makes a call in another thread raise soon. Only `close` may follow."""
        self._pool.stop()

    def close(self) -> None:
        """Ends the workers. Safe to call twice."""
        self._pool.close()

    def _tasks(self, groups: Sequence[Group]) -> list[Task]:
        return [Task(key=index, group=group, rewards=self._pooled) for index, group in enumerate(groups)]

    def _policy(self, name: str, failure: Failure) -> OnError:
        return policy_on(failure, self._rewards[name], self._on_error, allow_unscorable=self._allow_unscorable)

    def _stops(self, reply: Reply) -> bool:
        return any(isinstance(o, Failure) and self._policy(name, o) == "stop" for name, o in reply.items())

    def _raise_first_stop(self, groups: Sequence[Group], outcomes: Outcomes) -> None:
        for (index, group), name in product(enumerate(groups), self._pooled):
            outcome = outcomes.get((index, name))
            if isinstance(outcome, Failure) and self._policy(name, outcome) == "stop":
                self._settle(group, name, outcome)

    def _settle(self, group: Group, name: str, failure: Failure) -> list[float | StepScores]:
        """The group's scores, with the fixed one where the reward failed. RewardError if on_error is `stop`."""
        scores = self._isolate(group, name, failure)
        failed = [index for index, score in enumerate(scores) if isinstance(score, Failure)]
        on_error = self._policy(name, failure)
        # If each completion can be scored alone, the failure belongs to the group as a whole.
        culprit = scores[failed[0]] if failed else failure
        assert isinstance(culprit, Failure)
        message = describe(name, group, culprit, failed[0] if failed and failed_alone(failure) else None)
        if on_error == "stop":
            raise RewardError(message) from (RuntimeError(culprit.traceback) if culprit.traceback else None)
        self.num_failures += len(failed) if failed else len(scores)
        self.last_failure = message
        return [on_error if isinstance(score, Failure) or not failed else score for score in scores]

    def _isolate(self, group: Group, name: str, failure: Failure) -> list[float | StepScores | Failure]:
        """Each completion's score if it can be computed, else a Failure.

        The completion that the reward looked at last is suspected; it is to blame if all others can be scored alone.
        """
        all_indices = range(len(group.rollouts))
        if failure.scores is not None:
            return [failure if score is None else score for score in failure.scores]
        if not failed_alone(failure):
            return [failure for _ in all_indices]
        suspect = 0 if len(all_indices) == 1 else failure.completion
        scores = self._score_alone(group, name, [index for index in all_indices if index != suspect], failure)
        if suspect is not None:
            innocent = any(isinstance(score, Failure) for score in scores.values())
            scores |= self._score_alone(group, name, [suspect], failure) if innocent else {suspect: failure}
        return [scores[index] for index in all_indices]

    def _score_alone(
        self, group: Group, name: str, indices: Sequence[int], failure: Failure
    ) -> dict[int, float | StepScores | Failure]:
        """Scores these completions as groups of one; stops after two time limits, so that hangs don't add up."""
        hangs = 0

        def enough(reply: Reply) -> bool:
            nonlocal hangs
            hangs += any(isinstance(o, Failure) and o.cause is Cause.time_limit for o in reply.values())
            return hangs >= MAX_TIME_LIMITS_ALONE

        tasks = [
            Task(key=i, group=Group(prompt=group.prompt, rollouts=(group.rollouts[i],)), rewards=(name,))
            for i in indices
        ]
        scores: dict[int, float | StepScores | Failure] = dict.fromkeys(indices, failure)
        while tasks:
            outcomes = self.run(tasks, enough)
            for (index, _), outcome in outcomes.items():
                scores[index] = outcome if isinstance(outcome, Failure) else outcome[0]
            unsure = [task for task in tasks if (task.key, name) not in outcomes]
            tasks = unsure if hangs < MAX_TIME_LIMITS_ALONE else []
        return scores

    def run(self, tasks: Sequence[Task], stop_when: StopWhen) -> Outcomes:
        """The outcomes of these tasks, without those that a signal to the job may have disturbed.

        A signal reaches a job's processes one after the other: perhaps a program that a reward runs before this
        process.
        """
        outcomes: Outcomes = {}
        sensitive: dict[tuple[int, str], float] = {}
        for task, reply in self._pool.run([with_tail(task) for task in tasks], stop_when):
            outcomes |= {(task.key, name): without_tail(outcome, task.group) for name, outcome in reply.items()}
            now = time.monotonic()
            for name, outcome in reply.items():
                if self._pool.ran_programs or isinstance(outcome, Failure):
                    sensitive[task.key, name] = now
        if sensitive:
            time.sleep(max(0.0, max(sensitive.values()) + SKEW_S - time.monotonic()))
        disturbed = {key for key, done_at in sensitive.items() if may_have_disturbed(done_at)}
        return {key: outcome for key, outcome in outcomes.items() if key not in disturbed}


class AheadScorer(Scorer):
    """Gives the same scores, but its workers begin before it is called: while other groups are still sampled (`begin`).

    One thread uses the workers, so that two threads never use them at a time. Rewards that the trainer computes wait
    for the whole call, in the calling thread.
    """

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring ahead")
        self._lock = threading.Lock()
        self._begun: list[tuple[Sequence[Group], Future[Outcomes]]] = []

    def begin(self, groups: Sequence[Group]) -> None:
        """Begins to score these groups; a later call with them uses the scores."""
        if not self._pooled:
            return
        with self._lock:
            self._begun.append((groups, self._thread.submit(self.run, self._tasks(groups), self._stops)))

    def _by_workers(self, groups: Sequence[Group], known: Outcomes) -> dict[str, Rows]:
        positions = {id(group): position for position, group in enumerate(groups)}
        with self._lock:
            relevant = [begun for begun in self._begun if any(id(group) in positions for group in begun[0])]
            self._begun = [begun for begun in self._begun if begun not in relevant]
        begun_before = {
            (positions[id(begun[index])], name): outcome
            for begun, future in relevant
            for (index, name), outcome in future.result().items()
            if id(begun[index]) in positions
        }
        return self._thread.submit(super()._by_workers, groups, known | begun_before).result()

    def close(self) -> None:
        """Ends the thread and the workers. Safe to call twice."""
        self.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)
        super().close()


def policy_on(failure: Failure, spec: RewardSpec, usual: OnError, *, allow_unscorable: bool) -> OnError:
    """What a reward's failure means for the run: `stop`, or the score that a completion gets.

    Args:
        failure: what failed.
        spec: the reward, whose own `on_error` has priority.
        usual: scoring.on_error.
        allow_unscorable: data.allow_unscorable, which has priority over both.
    """
    if failure.cause is Cause.not_built:
        return "stop"
    if failure.cause is Cause.unscorable and allow_unscorable:
        return 0.0
    return usual if spec.on_error is None else spec.on_error


def with_tail(task: Task) -> Task:
    """The task as rewards read it: completions begin with what their prompt has begun to say for the policy."""
    tail = task.group.prompt.tail
    if not tail:
        return task
    rollouts = tuple(
        replace(rollout, completion=replace(rollout.completion, text=tail + rollout.completion.text))
        for rollout in task.group.rollouts
    )
    return replace(task, group=replace(task.group, rollouts=rollouts))


def without_tail(outcome: Outcome, group: Group) -> Outcome:
    """The outcome for a task made by `with_tail`, with offsets into the texts of the completions themselves.

    A step that ends in the tail counts for the completion's first character; an empty completion has no steps.
    """
    num_chars = len(group.prompt.tail)
    if not num_chars or isinstance(outcome, Failure):
        return outcome
    moved: list[Any] = []
    for score, rollout in zip(outcome, group.rollouts, strict=True):
        if isinstance(score, StepScores):
            is_empty = len(rollout.completion.text) == num_chars
            steps = [] if is_empty else zip(score.values, score.ends, strict=True)
            each = [StepScores(values=(value,), ends=(max(1, end - num_chars),)) for value, end in steps]
            moved.append(merged_steps(each, [1.0] * len(each)))
        else:
            moved.append(score)
    return moved


def _remaining(tasks: Sequence[Task], outcomes: Outcomes) -> list[Task]:
    """The tasks with those rewards that have no outcome yet."""
    missing = [tuple(name for name in task.rewards if (task.key, name) not in outcomes) for task in tasks]
    return [replace(task, rewards=names) for task, names in zip(tasks, missing, strict=True) if names]


def failed_alone(failure: Failure) -> bool:
    """Whether a failure may be due to one completion, unlike a wrong number of scores or a reward that isn't built."""
    return failure.cause not in (Cause.not_built, Cause.invalid) or failure.scores is not None


def describe(name: str, group: Group, failure: Failure, completion: int | None) -> str:
    """Which reward failed, how, on which prompt and completion, and what to do."""
    where = f"prompt {group.prompt.id!r}" if failure.cause is Cause.not_built else whereabouts(group, completion)
    usual = "fix the reward, or give such completions a fixed score with scoring.on_error=0"
    remedies = {
        Cause.time_limit: f"raise scoring.timeout, {usual}",
        Cause.not_built: "fix the reward",
        Cause.unscorable: "correct the reference answer, or give completions of such prompts 0 with "
        "data.allow_unscorable=true",
    }
    return f"reward.{name}: {failure.problem} on {where}; {failure.remedy or remedies.get(failure.cause, usual)}"


def whereabouts(group: Group, completion: int | None) -> str:
    where, size = f"prompt {group.prompt.id!r}", len(group.rollouts)
    if completion is None:
        return f"{where}, its {counted(size, 'completion')} as a whole"
    return f"{where}, completion {completion + 1} of {size}: {shortened(group.rollouts[completion].completion.text)}"


def shortened(text: str) -> str:
    """The text on one line, without its middle if it is long."""
    if len(text) <= MAX_SHOWN_CHARS:
        return repr(text)
    half = MAX_SHOWN_CHARS // 2
    return f"{text[:half]!r} ... {text[-half:]!r} ({counted(len(text), 'character')})"


def resident_scores(name: str, returned: list[list[float]], groups: Sequence[Group]) -> list[list[float]]:
    """The checked scores of a resident reward. RewardError unless they are a finite number for each completion."""
    remedy = "look at the model, adapter and numbers this reward is made of"
    is_list = isinstance(returned, Sequence)
    if not is_list or len(returned) != len(groups):
        what = f"scores of {counted(len(returned), 'group')}" if is_list else type(returned).__name__
        raise RewardError(f"reward.{name}: returned {what}, not a list for each of {len(groups)} groups; {remedy}")
    scores: list[list[float]] = []
    for group, row in zip(groups, returned, strict=True):
        outcome = checked(row, len(group.rollouts))
        if isinstance(outcome, Failure):
            raise RewardError(f"reward.{name}: {outcome.problem} on {whereabouts(group, outcome.completion)}; {remedy}")
        scores.append(outcome)
    return scores


def mixed(by_reward: Mapping[str, Rows], weights: Mapping[str, float], process: Sequence[str]) -> Scores:
    """The scores of all rewards, `[P, G]` float64; the rewards in `process` give steps.

    total[p, g] = sum over rewards of weight x score; the score of a process reward is the sum of its steps.
    """
    import torch

    def exact(rows: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.float64)

    def weighted_sum(scores: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([weights[name] * values for name, values in scores.items()]).sum(0)

    sums = {name: exact([[number(score) for score in row] for row in rows]) for name, rows in by_reward.items()}
    total = weighted_sum(sums)
    if not process:
        return Scores(total=total, by_reward=sums, weights=weights)
    # A process reward scores a completion as a whole only by the fixed score of one on which it failed.
    whole = {
        name: exact([[0.0 if isinstance(score, StepScores) else score for score in row] for row in by_reward[name]])
        for name in process
    }
    factors = [weights[name] for name in process]
    rows_of_each = zip(*(by_reward[name] for name in process), strict=True)
    steps = [[merged_steps(parts, factors) for parts in zip(*rows, strict=True)] for rows in rows_of_each]
    return Scores(total=total, by_reward=sums, outcome=weighted_sum(sums | whole), steps=steps, weights=weights)


def number(score: float | StepScores) -> float:
    """The score of a completion, which of steps is their sum."""
    return sum(score.values) if isinstance(score, StepScores) else float(score)


def with_turns(scores: Scores, groups: Sequence[Group]) -> Scores:
    """The scores, to whose totals the environments' rewards for turns are added; unchanged if there are none.

    The rewards of a completion's turns are given where its turns end (`rlft.batch.step_rewards`), so `outcome` is what
    remains for the completion as a whole.
    """
    turn_rewards = [
        [[turn.reward for turn in rollout.completion.turns if turn.reward is not None] for rollout in group.rollouts]
        for group in groups
    ]
    if not any(rewards for row in turn_rewards for rewards in row):
        return scores
    import torch

    earned = torch.tensor([[sum(rewards) for rewards in row] for row in turn_rewards], dtype=torch.float64)
    return replace(
        scores,
        total=scores.total + earned,
        by_reward={**scores.by_reward, TURNS: earned},
        outcome=scores.total if scores.outcome is None else scores.outcome,
    )


def merged_steps(scores: Sequence[float | StepScores], weights: Sequence[float]) -> StepScores:
    """A completion's steps by several process rewards, weighted and merged; values of steps with the same end add up.

    A reward of weight 0 is only reported: its steps are left out. Fixed scores are no steps.
    """
    by_end: dict[int, float] = {}
    for each, weight in zip(scores, weights, strict=True):
        if isinstance(each, StepScores) and weight:
            for value, end in zip(each.values, each.ends, strict=True):
                by_end[end] = by_end.get(end, 0.0) + weight * value
    ends = tuple(sorted(by_end))
    return StepScores(values=tuple(by_end[end] for end in ends), ends=ends)
