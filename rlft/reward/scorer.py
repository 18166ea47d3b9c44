"""Groups in, `Scores` out: runs the rewards, and decides what a failed one means.

This file runs in the trainer only; workers import worker.py, which knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlft.reward.pool import InProcess, RewardError, WorkerPool
from rlft.reward.spec import OnError, RewardSpec, specs
from rlft.reward.worker import Cause, Failure, Outcome, Reply, Task
from rlft.types import Group, Scores

__all__ = ["RewardError", "RewardSpec", "Scorer", "specs"]

MAX_TIME_LIMITS_ALONE = 2
MAX_SHOWN_CHARS = 200


class Scorer:
    """Scores groups with every reward; results don't depend on which worker is faster.

    workers: processes, which start in the background; 0 scores in the calling process (no isolation).
    timeout_s: seconds a reward may take for a group.
    on_error: `stop` raises a RewardError, a number is the score of a completion whose reward failed; a reward's own
        `on_error` goes before it.
    Make and use it in the thread that runs the loop.

    num_failures counts the completions that got such a score so far; last_failure says what happened to the last one.
    """

    def __init__(self, rewards: Mapping[str, RewardSpec], workers: int, timeout_s: float, on_error: OnError) -> None:
        if not rewards or workers < 0 or timeout_s <= 0:
            raise ValueError(f"needs rewards, workers >= 0 and timeout_s > 0, got {rewards}, {workers}, {timeout_s}")
        self._rewards = dict(rewards)
        self._on_error: OnError = on_error
        ordered = list(self._rewards.values())
        self._pool = WorkerPool(ordered, workers, timeout_s) if workers else InProcess(ordered, timeout_s)
        self.num_failures = 0
        self.last_failure: str | None = None

    def __call__(self, groups: Sequence[Group]) -> Scores:
        """Scores `[P, G]` of P groups of equal size G.

        Raises:
            RewardError: a reward failed and its on_error is `stop`, or a worker could not start.
        """
        outcomes = self._outcomes(groups)
        by_reward: dict[str, list[list[float]]] = {name: [] for name in self._rewards}
        for index, group in enumerate(groups):
            for name in self._rewards:
                outcome = outcomes[index, name]
                settled = self._settle(group, name, outcome) if isinstance(outcome, Failure) else outcome
                by_reward[name].append(settled)
        return weighted_sum(by_reward, {name: spec.weight for name, spec in self._rewards.items()})

    def close(self) -> None:
        """Ends the workers. Safe to call twice."""
        self._pool.close()

    def _outcomes(self, groups: Sequence[Group]) -> dict[tuple[int, str], Outcome]:
        """Every group with every reward; where a failure stops the run, at least all that comes before it."""
        outcomes: dict[tuple[int, str], Outcome] = {}
        todo = [Task(key=index, group=group, rewards=tuple(self._rewards)) for index, group in enumerate(groups)]
        while todo:
            for task, reply in self._pool.run(todo, self._stops):
                outcomes |= {(task.key, name): outcome for name, outcome in reply.items()}
            self._raise_first_stop(groups, outcomes)
            # A worker that was killed answers for one reward only: the task's others are still to do.
            missing = {task.key: [n for n in task.rewards if (task.key, n) not in outcomes] for task in todo}
            todo = [Task(key=k, group=groups[k], rewards=tuple(names)) for k, names in missing.items() if names]
        return outcomes

    def _policy(self, name: str, failure: Failure) -> OnError:
        own = self._rewards[name].on_error
        if failure.cause is Cause.not_built:
            return "stop"
        return self._on_error if own is None else own

    def _stops(self, reply: Reply) -> bool:
        return any(isinstance(o, Failure) and self._policy(name, o) == "stop" for name, o in reply.items())

    def _raise_first_stop(self, groups: Sequence[Group], outcomes: Mapping[tuple[int, str], Outcome]) -> None:
        order = {name: place for place, name in enumerate(self._rewards)}
        for index, name in sorted(outcomes, key=lambda key: (key[0], order[key[1]])):
            outcome = outcomes[index, name]
            if isinstance(outcome, Failure) and self._stops({name: outcome}):
                self._settle(groups[index], name, outcome)

    def _settle(self, group: Group, name: str, failure: Failure) -> list[float]:
        """The group's scores, the fixed one where the reward failed; or a RewardError that names the completion."""
        scores = self._isolate(group, name, failure)
        failed = [index for index, score in enumerate(scores) if isinstance(score, Failure)]
        fixed = self._policy(name, failure)
        # Where each completion can be scored alone, the fault is the group's as a whole.
        culprit = scores[failed[0]] if failed else failure
        assert isinstance(culprit, Failure)
        message = describe(name, group, culprit, failed[0] if failed and failed_alone(failure) else None)
        if fixed == "stop":
            raise RewardError(message) from (RuntimeError(culprit.traceback) if culprit.traceback else None)
        self.num_failures += len(failed) if failed else len(scores)
        self.last_failure = message
        return [fixed if isinstance(score, Failure) or not failed else score for score in scores]

    def _isolate(self, group: Group, name: str, failure: Failure) -> list[float | Failure]:
        """Each completion's score where it can be had, a Failure where not.

        The completion the reward was at is suspected; if the others can all be scored one at a time, it was that one.
        """
        everyone = range(len(group.rollouts))
        if failure.scores is not None:
            return [failure if score is None else score for score in failure.scores]
        if not failed_alone(failure):
            return [failure for _ in everyone]
        suspect = 0 if len(everyone) == 1 else failure.completion
        found = self._score_alone(group, name, [index for index in everyone if index != suspect], failure)
        if suspect is not None:
            innocent = any(isinstance(score, Failure) for score in found.values())
            found |= self._score_alone(group, name, [suspect], failure) if innocent else {suspect: failure}
        return [found[index] for index in everyone]

    def _score_alone(
        self, group: Group, name: str, indices: Sequence[int], failure: Failure
    ) -> dict[int, float | Failure]:
        """These completions scored as groups of one; given up after two time limits, so that hangs don't add up."""
        hangs = 0

        def enough(reply: Reply) -> bool:
            nonlocal hangs
            hangs += any(isinstance(o, Failure) and o.cause is Cause.time_limit for o in reply.values())
            return hangs >= MAX_TIME_LIMITS_ALONE

        tasks = [
            Task(key=i, group=Group(prompt=group.prompt, rollouts=(group.rollouts[i],)), rewards=(name,))
            for i in indices
        ]
        found: dict[int, float | Failure] = dict.fromkeys(indices, failure)
        for task, reply in self._pool.run(tasks, enough):
            outcome = reply[name]
            found[task.key] = outcome if isinstance(outcome, Failure) else outcome[0]
        return found


def failed_alone(failure: Failure) -> bool:
    """Whether a failure may be one completion's; a wrong number of scores, or a reward that isn't there, is not."""
    return failure.cause not in (Cause.not_built, Cause.invalid) or failure.scores is not None


def describe(name: str, group: Group, failure: Failure, completion: int | None) -> str:
    """Which reward did what on which prompt and completion, and the way out."""
    where = f"prompt {group.prompt.id!r}"
    if completion is not None:
        text = group.rollouts[completion].completion.text
        where += f", completion {completion + 1} of {len(group.rollouts)}: {shortened(text)}"
    elif failure.cause is not Cause.not_built:
        where += f", its {len(group.rollouts)} completions as a whole"
    remedy = "mend the reward, or give such completions a fixed score with scoring.on_error=0"
    if failure.cause is Cause.time_limit:
        remedy = f"raise scoring.timeout, {remedy}"
    if failure.cause is Cause.not_built:
        remedy = "mend the reward"
    return f"reward.{name}: {failure.problem} on {where}; {remedy}"


def shortened(text: str) -> str:
    """The text on one line, its middle left out where it is long.

    >>> shortened("18" + chr(10))
    "'18\\\\n'"
    """
    if len(text) <= MAX_SHOWN_CHARS:
        return repr(text)
    half = MAX_SHOWN_CHARS // 2
    return f"{text[:half]!r} ... {text[-half:]!r} ({len(text)} characters)"


def weighted_sum(by_reward: Mapping[str, list[list[float]]], weights: Mapping[str, float]) -> Scores:
    """Scores: total[p, g] = sum over rewards of weight x score, summed in float64; all `[P, G]` float32."""
    import torch

    exact = {name: torch.tensor(scores, dtype=torch.float64) for name, scores in by_reward.items()}
    total = torch.stack([weights[name] * scores for name, scores in exact.items()]).sum(0)
    return Scores(total=total.float(), by_reward={name: scores.float() for name, scores in exact.items()})
