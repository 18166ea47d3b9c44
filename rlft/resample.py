"""Dynamic sampling: groups that are all right or all wrong give way to groups of fresh prompts (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlft.metrics import Clock
from rlft.prompts import permutation
from rlft.seeds import derive
from rlft.session import Session
from rlft.types import Group, Prompt, Rollouts, Scores


def fill(session: Session, step: int, clock: Clock, groups: list[Group], scores: Scores) -> Rollouts:
    """The step's groups with the uninformative ones replaced, in their places, as far as `max_rounds` goes.

    A group informs when some of its completions are right and some wrong, by the first reward and `eval.correct_at`.
    Each round samples one fresh prompt for every group still to be replaced; what is left at the end stays as it is (it
    has no advantage, and costs no forward). Prompts and seeds of a round derive from (seed, step, round) alone, so a
    resumed run repeats them exactly.
    """
    num_sampled = sum(len(group.rollouts) for group in groups)
    seen = {group.prompt.id for group in groups}
    for turn in range(1, session.config.dynamic_sampling.max_rounds + 1):
        lacking = uninformative(scores, session.config.eval.correct_at)
        prompts = fresh_prompts(session, step, turn, len(lacking), seen)
        if not prompts:
            break
        with clock("sample"):
            new = session.sample_prompts(prompts, step, f"resample {turn}")
        with clock("score"):
            new_scores = session.score(new)
        num_sampled += sum(len(group.rollouts) for group in new)
        seen |= {prompt.id for prompt in prompts}
        lost = set(uninformative(new_scores, session.config.eval.correct_at))
        informing = [i for i in range(len(new)) if i not in lost]
        places = lacking[: len(informing)]
        for place, i in zip(places, informing, strict=True):
            groups[place] = new[i]
        scores = replaced(scores, places, new_scores, informing)
    return Rollouts(groups=groups, scores=scores, num_sampled=num_sampled)


def uninformative(scores: Scores, correct_at: float) -> list[int]:
    """Places of the groups of which all completions are right, or all wrong, by the first reward."""
    right_PG = next(iter(scores.by_reward.values())) >= correct_at
    return (right_PG.all(1) | ~right_PG.any(1)).nonzero()[:, 0].tolist()


def fresh_prompts(session: Session, step: int, turn: int, num: int, seen: set[str]) -> list[Prompt]:
    """At most `num` training prompts that this step has not used, in an order that (seed, step, turn) gives."""
    prompts = session.plan.train_prompts.prompts
    order = permutation(len(prompts), derive(session.config.seed, step, f"resample {turn}"), 0)
    found: list[Prompt] = []
    for index in order:
        if len(found) == num:
            break
        if prompts[index].id not in seen:
            found.append(prompts[index])
    return found


def replaced(scores: Scores, places: Sequence[int], new: Scores, rows: Sequence[int]) -> Scores:
    """`scores` with its rows at `places` taken from `new`'s `rows`."""
    at, of = torch.tensor(places, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)
    steps = None
    if scores.steps is not None and new.steps is not None:
        taken = dict(zip(places, rows, strict=True))
        steps = [new.steps[taken[p]] if p in taken else row for p, row in enumerate(scores.steps)]
    return Scores(
        total=scores.total.index_copy(0, at, new.total[of]),
        by_reward={n: v.index_copy(0, at, new.by_reward[n][of]) for n, v in scores.by_reward.items()},
        outcome=None
        if scores.outcome is None or new.outcome is None
        else scores.outcome.index_copy(0, at, new.outcome[of]),
        steps=steps,
    )
