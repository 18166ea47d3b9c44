"""Tries rewards on texts that a policy may find (`rlft.reward.attacks`), for rows of the run's own data.

Completions are scored alone, one after the other, in one worker process with the run's time limit, so that each has its
own time and its own failure. First comes the form in which each reward pays most for the reference answer; then all
texts in that form. No weights are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Self

from rlft.config.schema import SamplingRoot
from rlft.generation.stops import shown_texts
from rlft.plan.trials import as_sampled
from rlft.reward.answer import AnswerKeys
from rlft.reward.attacks import Aim, Attack, Family, Form, another_answer, attacks, filler, forms
from rlft.reward.code import Code
from rlft.reward.http import ServerKeys
from rlft.reward.verdicts import AGAIN, EPS, SIBLINGS, Shot, Tried
from rlft.reward.workers.pool import InProcess, Pool, WorkerPool
from rlft.reward.workers.reward_spec import OnError, RewardSpec
from rlft.reward.workers.scorer import with_tail
from rlft.reward.workers.worker import Cause, Failure, Outcome, Reply, Task
from rlft.tokens.ends import special_tokens
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, Sampling, StepScores, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlft.tokens.ends import TurnEnds

MAX_TIME_LIMITS = 2
"""After so many completions on which a reward exceeds its time limit it is tried no further."""
NUM_TWICE = 12
"""About so many texts, and the gold answer in each form, are scored again, and as siblings."""
NUM_WORDS = 50
"""Words of which the tokens are counted."""
MAX_CHARS = 12
"""Of a token, about: no more of an endless text is tokenised than a completion may hold."""
MAX_REDUCED = 200
"""Characters of the longest text that is made shorter: each of them is a try."""


PLAN_S = 3.0
"""Seconds for each reward in a plan."""


def brief_summary(
    config: SamplingRoot,
    rewards: Mapping[str, RewardSpec],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    ends: TurnEnds,
) -> list[str]:
    """What `rlft plan` says of these rewards, in two lines; nothing where trying them costs more than a moment.

    So it is with judges and other servers, programs, conversations, and data without reference answers.
    """
    tried = {name: spec for name, spec in rewards.items() if not spec.runs_in_trainer}
    is_costly = any(isinstance(spec.build(), ServerKeys | Code) for spec in tried.values())
    if is_costly or not tried or config.environment or not all(prompt.answer.strip() for prompt in prompts):
        return []
    is_own = all(spec.target.startswith("rlft.") for spec in tried.values())
    return Range.of(config, tried, tokenizer, ends, PLAN_S, is_isolated=not is_own).try_all(prompts).summary()


@dataclass(slots=True, kw_only=True)
class Range:
    """Where rewards are tried: a worker, and what makes completions of texts.

    Attributes:
        on_error: the run's, for rewards without one of their own.
        limit_s: seconds that each reward may take for all texts; those that are left over have no scores by it. A
            reward that sends several requests at once may take so many times as long: here it sends one.
        is_isolated: whether rewards run in a process of their own.
    """

    rewards: Mapping[str, RewardSpec]
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    ends: TurnEnds
    on_error: OnError
    timeout_s: float
    limit_s: float
    is_isolated: bool = True
    _left_s: dict[str, float] = field(default_factory=dict)
    _hangs: dict[str, int] = field(default_factory=dict)
    _per_word: float = 1.0

    @classmethod
    def of(
        cls,
        config: SamplingRoot,
        rewards: Mapping[str, RewardSpec],
        tokenizer: PreTrainedTokenizerBase,
        ends: TurnEnds,
        limit_s: float,
        *,
        is_isolated: bool = True,
    ) -> Self:
        """The range for these rewards of a run."""
        scoring, sampling = config.scoring, config.generation.sampling
        limits = {"timeout_s": scoring.timeout, "limit_s": limit_s, "is_isolated": is_isolated}
        return cls(
            rewards=rewards, tokenizer=tokenizer, sampling=sampling, ends=ends, on_error=scoring.on_error, **limits
        )

    def try_all(self, prompts: Sequence[Prompt]) -> Tried:
        """Scores of all texts for these prompts by all rewards."""
        built = {name: spec.build() for name, spec in self.rewards.items()}
        at_once = {name: each.concurrency for name, each in built.items() if isinstance(each, ServerKeys)}
        self._left_s = {name: self.limit_s * at_once.get(name, 1) for name in self.rewards}
        self._hangs = dict.fromkeys(self.rewards, 0)
        self._per_word = max(1.0, len(self.tokenizer(filler(NUM_WORDS))["input_ids"]) / NUM_WORDS)
        weights = {name: spec.weight for name, spec in self.rewards.items()}
        known = forms(own_forms(self.rewards))
        specs, timeout_s = tuple(self.rewards.values()), self.timeout_s
        with closing(WorkerPool(specs, 1, timeout_s) if self.is_isolated else InProcess(specs, timeout_s)) as pool:
            self._start(pool, prompts[0])
            shots = [shot for prompt in prompts for shot in self._in_forms(pool, prompt, prompts, known)]
            best = {name: best_form(shots, known, {name: weight or 1.0}) for name, weight in weights.items()}
            total = best_form(shots, known, weights)
            for form in {form.name: form for form in (total, *best.values())}.values():
                for prompt in prompts:
                    shots += self._score(pool, prompt, form.name, self._attacks(prompt, prompts, form))
            differing = self._differing(pool, prompts[0], [shot for shot in shots if shot.prompt == prompts[0].id])
            cheapest = cheapest_of(shots, weights, total.name)
            if cheapest is not None:
                prompt = next(prompt for prompt in prompts if prompt.id == cheapest.prompt)
                cheapest = self._reduced(pool, prompt, cheapest, weights)
        return Tried(
            shots=tuple(shots),
            weights=weights,
            form=total.name,
            forms={name: form.name for name, form in best.items()},
            differing=differing,
            at_once=at_once,
            cheapest=cheapest,
        )

    def _start(self, pool: Pool | InProcess, prompt: Prompt) -> None:
        """Lets the worker start, which counts for no text."""
        [completion] = as_sampled([(prompt, prompt.answer)], self.tokenizer, self.sampling, self.ends)
        for _ in pool.run([Task(key=0, group=group_of(prompt, [completion]), rewards=())], lambda reply: False):
            pass

    def _in_forms(
        self, pool: Pool | InProcess, prompt: Prompt, prompts: Sequence[Prompt], known: Sequence[Form]
    ) -> list[Shot]:
        """The reference answer and another row's, in each form."""
        if not prompt.answer.strip():
            return []
        aims = [self._aim(prompt, prompts, form) for form in known]
        tries = [
            Attack(family=family, kind=aim.form.name, text=aim.form(answer))
            for aim in aims
            for family, answer in ((Family.gold, aim.gold), (Family.wrong, aim.wrong))
        ]
        return [replace(shot, form=shot.kind) for shot in self._score(pool, prompt, "", tries)]

    def _attacks(self, prompt: Prompt, prompts: Sequence[Prompt], form: Form) -> list[Attack]:
        """All texts in this form, without spelled special tokens that the tokenizer takes for the tokens themselves."""

        def can_be_said(text: str) -> bool:
            try:
                self._completions(prompt, [text])
            except UserError:
                return False
            return True

        found = attacks(self._aim(prompt, prompts, form))
        return [attack for attack in found if attack.family is not Family.special or can_be_said(attack.text)]

    def _aim(self, prompt: Prompt, prompts: Sequence[Prompt], form: Form) -> Aim:
        golds = (prompt.answer.strip(), *prompt.other_answers)
        few, many = (filler(max(2, int(self.sampling.max_tokens * part / self._per_word))) for part in (0.1, 0.4))
        return Aim(
            question=str(prompt.messages[-1]["content"]),
            gold=golds[0],
            others=golds[1:],
            wrong=another_answer(golds, [other.answer.strip() for other in prompts]),
            form=form,
            rewards=tuple(self.rewards),
            special=tuple(special_tokens(self.tokenizer)),
            few=few,
            many=many,
        )

    def _completions(self, prompt: Prompt, texts: Sequence[str]) -> list[Completion]:
        """The texts as the policy would say them: none is longer than a completion may be."""
        most = self.sampling.max_tokens
        said = as_sampled(
            [(prompt, text[: MAX_CHARS * most]) for text in texts], self.tokenizer, self.sampling, self.ends
        )
        for index, completion in enumerate(said):
            if len(completion.token_ids) > most:
                ids = tuple(completion.token_ids[:most])
                [text] = shown_texts(self.tokenizer, [ids], [False], self.sampling, self.ends.ids)
                said[index] = replace(completion, text=text, token_ids=ids, logprobs=(0.0,) * most,
                                      finish_reason=FinishReason.length)  # fmt: skip
        return said

    def _score(self, pool: Pool | InProcess, prompt: Prompt, form: str, tries: Sequence[Attack]) -> list[Shot]:
        completions = self._completions(prompt, [attack.text for attack in tries])
        shots = [
            Shot(family=attack.family, kind=attack.kind, form=form, prompt=prompt.id, gold=prompt.answer,
                 text=completion.text, tokens=len(completion.token_ids), scores={}, errors={}, seconds={})
            for attack, completion in zip(tries, completions, strict=True)
        ]  # fmt: skip
        for name in self.rewards:
            for index, score, error, seconds in self._by(pool, name, prompt, completions):
                shot = shots[index]
                shots[index] = replace(
                    shot,
                    scores={**shot.scores, name: score},
                    errors={**shot.errors, name: error} if error else shot.errors,
                    seconds={**shot.seconds, name: seconds},
                )
        return shots

    def _by(
        self, pool: Pool | InProcess, name: str, prompt: Prompt, completions: Sequence[Completion]
    ) -> Iterator[tuple[int, float | None, str, float]]:
        """(index of a completion, its score, its error, seconds), each scored alone, while there is time."""
        if self._left_s[name] <= 0 or self._hangs[name] >= MAX_TIME_LIMITS:
            return
        tasks = [
            with_tail(Task(key=key, group=group_of(prompt, [completion]), rewards=(name,)))
            for key, completion in enumerate(completions)
        ]
        began = time.monotonic()

        def enough(reply: Reply) -> bool:
            late = self._left_s[name] <= time.monotonic() - began
            outcome = reply.get(name)
            self._hangs[name] += isinstance(outcome, Failure) and outcome.cause is Cause.time_limit
            return late or self._hangs[name] >= MAX_TIME_LIMITS

        last = began
        for task, reply in pool.run(tasks, enough):
            now = time.monotonic()
            if (outcome := reply.get(name)) is not None:
                score, error = self._settled(name, outcome)
                yield task.key, score, error, now - last
            last = now
        self._left_s[name] -= last - began

    def _settled(self, name: str, outcome: Outcome) -> tuple[float | None, str]:
        """(the first completion's score, or what a failure gives in the run; the error)."""
        if isinstance(outcome, Failure):
            own = self.rewards[name].on_error
            on_error = self.on_error if own is None else own
            stops = on_error == "stop" or outcome.cause is Cause.not_built
            return (None if stops else float(on_error)), outcome.problem
        return number(outcome[0]), ""

    def _differing(self, pool: Pool | InProcess, prompt: Prompt, shots: Sequence[Shot]) -> dict[str, str]:
        """{reward: when it gave the same texts other scores than before}, of a few texts with different scores."""
        differing = {}
        for name in self.rewards:
            scored = [s for s in shots if s.scores.get(name) is not None and name not in s.errors]
            in_forms = [shot for shot in scored if shot.kind == shot.form and shot.family is Family.gold]
            chosen = [*in_forms, *scored[:: max(1, len(scored) // NUM_TWICE)]]
            completions = self._completions(prompt, [shot.text for shot in chosen])
            before = [shot.scores[name] or 0.0 for shot in chosen]
            again = {index: score for index, score, *_ in self._by(pool, name, prompt, completions)}
            if any(score is None or abs(score - before[index]) > EPS for index, score in again.items()):
                differing[name] = AGAIN
                continue
            task = with_tail(Task(key=0, group=group_of(prompt, completions), rewards=(name,)))
            for _, reply in pool.run([task] if again else [], lambda reply: False):
                together = reply.get(name)
                scores = [number(score) for score in together] if isinstance(together, list) else before
                if any(abs(score - alone) > EPS for score, alone in zip(scores, before, strict=True)):
                    differing[name] = SIBLINGS
        return differing

    def _reduced(self, pool: Pool | InProcess, prompt: Prompt, shot: Shot, weights: Mapping[str, float]) -> Shot:
        """The shot, without what can be left out of its text while its total stays."""
        full = shot.total(weights)
        size = len(shot.text) // 2 if len(shot.text) <= MAX_REDUCED and full is not None else 0
        while size:
            start = 0
            while start < len(shot.text):
                text = shot.text[:start] + shot.text[start + size :]
                attack = Attack(family=shot.family, kind=shot.kind, text=text)
                [tried] = self._score(pool, prompt, shot.form, [attack])
                total = tried.total(weights)
                if total is not None and full is not None and total >= full - EPS and tried.tokens <= shot.tokens:
                    shot = tried
                else:
                    start += size
            size //= 2
        return shot


def own_forms(rewards: Mapping[str, RewardSpec]) -> list[Form]:
    """The forms that these rewards' keys ask for."""
    found = []
    for name, spec in rewards.items():
        reward, tags = spec.build(), spec.kwargs.get("tags")
        if isinstance(reward, AnswerKeys) and (template := reward.written("{}")) is not None:
            found.append(Form(name=f"as {name} reads it", template=template))
        if isinstance(tags, Sequence) and not isinstance(tags, str) and len(tags) > 1:
            first, *others, last = map(str, tags)
            template = "".join(f"<{tag}>-</{tag}>" for tag in others) + f"<{last}>{{}}</{last}>"
            found.append(Form(name=f"in the tags of {name}", template=template, thinks=first))
    return found


def best_form(shots: Sequence[Shot], known: Sequence[Form], weights: Mapping[str, float]) -> Form:
    """The form in which the weighted sum for reference answers is highest, the shortest one of equals.

    If none pays more for them than for wrong ones, but one less, it is that one.
    """

    def paid(form: Form, family: Family) -> float:
        totals = [s.total(weights) for s in shots if s.form == form.name and s.family is family]
        return round(sum(-inf if total is None else total for total in totals), 9)

    gains = {form.name: paid(form, Family.gold) - paid(form, Family.wrong) for form in known}  # nan: neither is known
    if not any(gain > EPS for gain in gains.values()) and any(gain < -EPS for gain in gains.values()):
        return min(known, key=lambda form: (gains[form.name], len(form("-"))))
    return max(known, key=lambda form: (paid(form, Family.gold), -len(form("-"))))


def cheapest_of(shots: Sequence[Shot], weights: Mapping[str, float], form: str) -> Shot | None:
    """The text with the fewest tokens whose total is at least that of the reference answer in the best form."""
    full = {s.prompt: s.total(weights) for s in shots if s.family is Family.gold and s.kind == s.form == form}
    enough = [
        shot
        for shot in shots
        if (due := full.get(shot.prompt)) is not None and (total := shot.total(weights)) is not None
        if total >= due - EPS
    ]
    return min(enough, key=lambda shot: (shot.tokens, len(shot.text), not shot.is_right), default=None)


def number(score: float | StepScores) -> float:
    return sum(score.values) if isinstance(score, StepScores) else float(score)


def group_of(prompt: Prompt, completions: Sequence[Completion]) -> Group:
    return Group(
        prompt=prompt, rollouts=tuple(Rollout(prompt=prompt, completion=c, policy_version=0) for c in completions)
    )
