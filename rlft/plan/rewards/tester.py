"""Tries rewards on texts that a policy may find (`attacks.py`), for rows of the run's own data.

Completions are scored alone, one after the other, with the run's time limit, so that each has its own time and its own
failure. First comes the form in which each reward pays most for the reference answer; then all texts in that form, row
by row, as far as the time allows. No weights are loaded.

`rlft plan` does so with rules of rlft's own only, since a reward of the user's own may have side effects, and says in
three lines what they pay for. It shows what all rules give a few completions, scored as a run would score them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any

from rlft.config.schema import SamplingRoot
from rlft.generation.stops import shown_texts
from rlft.model.backbone import ends_of, load_tokenizer
from rlft.plan.rewards.attacks import Aim, Attack, Family, Form, another_answer, attacks, filler, forms
from rlft.plan.rewards.verdicts import AGAIN, EPS, SIBLINGS, ScoredText, Tried, best_form, cheapest_of, summary_of
from rlft.reward.answer import AnswerKeys, composed
from rlft.reward.code import Code
from rlft.reward.http import ServerKeys
from rlft.reward.workers.pool import InProcess, RewardError, WorkerPool
from rlft.reward.workers.reward_spec import RewardSpec, specs
from rlft.reward.workers.scorer import Scorer, number, policy_on, with_tail
from rlft.reward.workers.worker import Cause, Failure, Outcome, Reply, Task
from rlft.system.text import one_line
from rlft.tokens.plain import PlainText
from rlft.tokens.text import RunTokenizer, TurnEnds, special_tokens, without_tail
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, Sampling, UserError, counted

MAX_CHARS = 12  # of a token, about: no more of an endless text is tokenised than a completion may hold


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes texts as the policy of a run would: with its tokenizer, ends of turns, stop strings and limit."""

    tokenizer: RunTokenizer
    ends: TurnEnds
    sampling: Sampling

    @classmethod
    def of(cls, config: SamplingRoot) -> Writer:
        """That of this config, whose tokenizer is read."""
        tokenizer = load_tokenizer(config.model, config.prompts.template_variables)
        return cls(tokenizer, ends_of(config.model, config.prompts.style, tokenizer), config.generation.sampling)

    def completions(self, turns: Sequence[tuple[Prompt, str]], *, cuts: bool = False) -> list[Completion]:
        """The completions that say these texts, each as the rest of a turn that its prompt may have begun.

        As in a run they consist of the tokenizer's tokens with those that end a turn, and their texts are what these
        decode to. With `cuts` none is longer than a completion may be.
        """
        if not turns:
            return []
        most = self.sampling.max_tokens if cuts else None
        chars = None if most is None else MAX_CHARS * most
        texts = [without_tail(text[:chars], prompt.tail) + self.ends.lead for prompt, text in turns]
        said = [[*row, *self.ends.closing] for row in PlainText(self.tokenizer).ids_said(texts)]
        stopped = [most is None or len(ids) <= most for ids in said]
        said = [ids[:most] for ids in said]
        shown = shown_texts(self.tokenizer, said, stopped, self.sampling, self.ends.ids)
        reasons = [FinishReason.stop if is_stopped else FinishReason.length for is_stopped in stopped]
        return [
            Completion(text=text, token_ids=tuple(ids), logprobs=(0.0,) * len(ids), finish_reason=reason)
            for text, ids, reason in zip(shown, said, reasons, strict=True)
        ]


def group_of(prompt: Prompt, completions: Sequence[Completion]) -> Group:
    rollouts = (Rollout(prompt=prompt, completion=completion, policy_version=0) for completion in completions)
    return Group(prompt=prompt, rollouts=tuple(rollouts))


# -- trying ------------------------------------------------------------------------------------------------------------
LIMIT_S = 60.0  # seconds for each reward
FOR_FORMS = 0.5  # the part of them after which no further row is scored in all forms
MAX_TIME_LIMITS = 2  # after so many completions on which a reward exceeds its time limit it is tried no further
NUM_TWICE = 12  # about so many texts, and the gold answer in each form, are scored again, and as siblings
NUM_WORDS = 50  # words of which the tokens are counted


@dataclass(slots=True)
class RewardTester:
    """Tries the rewards of a run."""

    config: SamplingRoot
    rewards: Mapping[str, RewardSpec]  # all of them; those that need weights are left out
    writer: Writer
    # Seconds that each reward may take for all texts; those that are left over have no scores by it. A reward that
    # sends several requests at once may take so many times as long: here it sends one.
    limit_s: float = LIMIT_S
    is_isolated: bool = True  # whether rewards run in a process of their own
    _run: Callable[..., Iterator[tuple[Task, Reply]]] = field(init=False)
    _left_s: dict[str, float] = field(init=False)
    _hangs: dict[str, int] = field(init=False)
    _late: set[str] = field(default_factory=set)
    _left_out: dict[str, str] = field(default_factory=dict)

    def try_all(self, prompts: Sequence[Prompt]) -> Tried:
        """Scores of all texts for these prompts. UserError: the workers that score cannot be started."""
        self._left_out = {name: "needs weights" for name, spec in self.rewards.items() if spec.runs_in_trainer}
        specs = tuple(spec for name, spec in self.rewards.items() if name not in self._left_out)
        timeout_s = self.config.scoring.timeout
        try:
            with closing(WorkerPool(specs, 1, timeout_s) if self.is_isolated else InProcess(specs, timeout_s)) as pool:
                self._run = pool.run
                return self._try_all(prompts)
        except RewardError as error:
            raise UserError("reward", str(error), remedy="fix the reward") from error

    def _try_all(self, prompts: Sequence[Prompt]) -> Tried:
        built = {name: spec.build() for name, spec in self.rewards.items()}
        at_once = {name: each.concurrency for name, each in built.items() if isinstance(each, ServerKeys)}
        self._left_s = {name: self.limit_s * at_once.get(name, 1) for name in self.rewards}
        self._hangs = dict.fromkeys(self.rewards, 0)
        weights = {name: spec.weight for name, spec in self.rewards.items()}
        known = forms(own_forms(self.rewards))
        self._find_those_of_groups(prompts[0], known)
        texts: list[ScoredText] = []
        for prompt in prompts:
            texts += self._in_forms(prompt, prompts, known, is_first=prompt is prompts[0])
        tried = [name for name in self.rewards if name not in self._left_out]
        best = {name: best_form(texts, known, {name: weights[name] or 1.0}) for name in tried}
        total = best_form(texts, known, weights)
        for prompt in prompts:
            for form in {form.name: form for form in (total, *best.values()) if form}.values():
                texts += self._score(prompt, form.name, self._attacks(prompt, prompts, form))
        again = self._again(prompts[0], [text for text in texts if text.prompt == prompts[0].id])
        main = next(iter(weights))
        if again["differing"].get(main) == SIBLINGS and len({text.scores.get(main) for text in texts}) == 1:
            self._left_out[main] = "compares the completions of a group, and texts are tried alone: each gets the same"
        over, hangs = f"its {self.limit_s:g} s were over", f"{MAX_TIME_LIMITS} texts took longer than scoring.timeout"
        return Tried(
            texts=tuple(texts),
            weights=weights,
            form=total.name if total else "",
            forms={name: form.name if form else "" for name, form in best.items()},
            left_out=self._left_out,
            stopped={
                name: over if self._hangs[name] < MAX_TIME_LIMITS else hangs
                for name in tried
                if any(name not in text.scores for text in texts)
            },
            at_once=at_once,
            cheapest=None if total is None else cheapest_of(texts, weights, total.name),
            **again,
        )

    def _find_those_of_groups(self, prompt: Prompt, known: Sequence[Form]) -> None:
        """Leaves out rewards that score siblings and fail on a completion alone. The worker starts here, untimed."""
        completions = self._completions(prompt, [form(prompt.answer) for form in known])
        for name in [name for name in self.rewards if name not in self._left_out]:
            alone = [self._outcome(name, prompt, [completion]) for completion in completions[:2]]
            failed = [outcome for outcome in alone if isinstance(outcome, Failure)]
            fails_alone = len(failed) == len(alone) and failed[0].cause in (Cause.raised, Cause.invalid)
            if fails_alone and isinstance(self._outcome(name, prompt, completions), list):
                problem = failed[0].problem.rstrip(",")
                self._left_out[name] = f"scores groups only, and texts are tried one by one: alone, one {problem}"

    def _outcome(self, name: str, prompt: Prompt, completions: Sequence[Completion]) -> Outcome | None:
        """What a reward makes of a group; None: a signal came meanwhile."""
        [(_, reply)] = self._run([self._task(name, 0, prompt, completions)], lambda reply: False)
        return reply.get(name)

    def _task(self, name: str, key: int, prompt: Prompt, completions: Sequence[Completion]) -> Task:
        return with_tail(Task(key=key, group=group_of(prompt, completions), rewards=(name,)))

    def _in_forms(
        self, prompt: Prompt, prompts: Sequence[Prompt], known: Sequence[Form], *, is_first: bool
    ) -> list[ScoredText]:
        """The reference answer and another row's, in each form."""
        if not prompt.answer.strip():
            return []
        aims = [self._aim(prompt, prompts, form) for form in known]
        tries = [
            Attack(family=family, kind=aim.form.name, text=aim.form(answer))
            for aim in aims
            for family, answer in ((Family.gold, aim.gold), (Family.wrong, aim.wrong))
        ]
        least_s = 0.0 if is_first else self.limit_s * FOR_FORMS
        return [replace(text, form=text.kind) for text in self._score(prompt, "", tries, least_s)]

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
        golds = [composed(answer) for answer in (prompt.answer.strip(), *prompt.other_answers)]
        per_word = max(1.0, len(self.writer.tokenizer(filler(NUM_WORDS))["input_ids"]) / NUM_WORDS)
        most = self.writer.sampling.max_tokens
        few, many = (filler(max(2, int(most * part / per_word))) for part in (0.1, 0.4))
        return Aim(
            question=str(prompt.messages[-1]["content"]),
            gold=golds[0],
            others=tuple(golds[1:]),
            wrong=another_answer(golds, [composed(other.answer.strip()) for other in prompts]),
            form=form,
            rewards=tuple(self.rewards),
            special=tuple(special_tokens(self.writer.tokenizer)),
            few=few,
            many=many,
        )

    def _completions(self, prompt: Prompt, texts: Sequence[str]) -> list[Completion]:
        """The texts as the policy would say them: none is longer than a completion may be."""
        return self.writer.completions([(prompt, text) for text in texts], cuts=True)

    def _score(self, prompt: Prompt, form: str, tries: Sequence[Attack], least_s: float = 0.0) -> list[ScoredText]:
        completions = self._completions(prompt, [attack.text for attack in tries])
        found: list[dict[str, Any]] = [{"scores": {}, "errors": {}, "seconds": {}} for _ in tries]
        for name in self.rewards:
            for index, outcome, seconds in self._by(name, prompt, completions, least_s):
                score, error = self._settled(name, outcome)
                found[index]["scores"][name], found[index]["seconds"][name] = score, seconds
                if error:
                    found[index]["errors"][name] = error
                if tries[index].gives_gold and isinstance(outcome, Failure) and outcome.cause is Cause.time_limit:
                    self._late.add(name)
        return [
            ScoredText(family=attack.family, kind=attack.kind, form=form, prompt=prompt.id,
                       gold=composed(prompt.answer), text=completion.text, tokens=len(completion.token_ids),
                       **of_rewards)
            for attack, completion, of_rewards in zip(tries, completions, found, strict=True)
        ]  # fmt: skip

    def _by(
        self, name: str, prompt: Prompt, completions: Sequence[Completion], least_s: float = 0.0
    ) -> Iterator[tuple[int, Outcome, float]]:
        """(index of a completion, what came of it, seconds), each scored alone, while more than `least_s` are left."""
        if name in self._left_out or self._left_s[name] <= least_s or self._hangs[name] >= MAX_TIME_LIMITS:
            return
        tasks = [self._task(name, key, prompt, [completion]) for key, completion in enumerate(completions)]
        began = last = time.monotonic()

        def enough(reply: Reply) -> bool:
            outcome = reply.get(name)
            self._hangs[name] += isinstance(outcome, Failure) and outcome.cause is Cause.time_limit
            return self._left_s[name] <= time.monotonic() - began or self._hangs[name] >= MAX_TIME_LIMITS

        for task, reply in self._run(tasks, enough):
            now = time.monotonic()
            if (outcome := reply.get(name)) is not None:
                yield task.key, outcome, now - last
            last = now
        self._left_s[name] -= last - began

    def _settled(self, name: str, outcome: Outcome) -> tuple[float | None, str]:
        """(the first completion's score, or what a failure gives in the run; the error)."""
        if isinstance(outcome, Failure):
            usual, allowed = self.config.scoring.on_error, self.config.allows_unscorable
            policy = policy_on(outcome, self.rewards[name], usual, allow_unscorable=allowed)
            return (None if policy == "stop" else float(policy)), outcome.problem
        return number(outcome[0]), ""

    def _again(self, prompt: Prompt, texts: Sequence[ScoredText]) -> dict[str, Any]:
        """What `Tried` says of a few texts with different scores that are scored again: alone, and as a group."""
        differing, noise, failed = {}, {}, {}
        size = max(2, getattr(self.config, "group_size", NUM_TWICE))
        for name in self.rewards:
            scored = [text for text in texts if text.scores.get(name) is not None and name not in text.errors]
            if not scored or self._hangs[name] >= MAX_TIME_LIMITS:
                continue
            golds = [text for text in scored if text.tries_form(Family.gold)]
            chosen = [*golds, *scored[:: max(1, len(scored) // NUM_TWICE)]]
            completions = self._completions(prompt, [text.text for text in chosen])
            before = [text.scores[name] or 0.0 for text in chosen]
            again = list(self._by(name, prompt, completions))
            moved = [abs(number(o[0]) - before[index]) for index, o, _ in again if not isinstance(o, Failure)]
            noise[name] = max(moved, default=0.0)
            if len(moved) < len(again) or noise[name] > EPS:
                differing[name] = AGAIN
            group = list(islice(cycle(zip(completions, before, strict=True)), max(size, len(chosen))))
            outcome = self._outcome(name, prompt, [completion for completion, _ in group])
            if isinstance(outcome, Failure) and outcome.cause is Cause.time_limit:  # it counts for the run's size alone
                outcome = self._outcome(name, prompt, [completion for completion, _ in group[:size]])
            if isinstance(outcome, Failure):
                failed[name] = outcome.problem
                self._late |= {name} if outcome.cause is Cause.time_limit else set()
            elif outcome is not None and name not in differing:
                pairs = zip(outcome, group, strict=False)
                if any(abs(number(score) - alone) > EPS for score, (_, alone) in pairs):
                    differing[name] = SIBLINGS
        return {"differing": differing, "noise": noise, "groups": failed, "late": frozenset(self._late)}


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


# -- the brief of rlft plan --------------------------------------------------------------------------------------------
TRIED_PROMPTS = 2
SHOWN_CHARACTERS = 32
ANSWERED = "<think>-</think><answer>{}</answer>"
"""A completion with its answer in the tags that `reward=format` requires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrial:
    """One reward's score of one completion, before weighting, and the error that it raised in its group."""

    reward: str
    kind: str
    prompt: str
    completion: str
    score: float | None  # None where the error would end the run, else what its `on_error` gives
    error: str | None = None

    @property
    def shown(self) -> str:
        """The kind and the beginning of the completion."""
        return f"{self.kind}: {one_line(self.completion, SHOWN_CHARACTERS)}" if self.completion else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """What a plan says of the rewards."""

    trials: Sequence[RewardTrial] = ()  # their scores of a few completions
    lines: Sequence[str] = ()  # what texts that a policy may find are paid; none unless all are rules of rlft's


def brief_of(config: SamplingRoot, prompts: Sequence[Prompt], writer: Writer) -> Brief:
    """The brief on the config's rewards, which score completions of these prompts."""
    rewards, few = specs(config.reward), prompts[:TRIED_PROMPTS]
    trials = try_rewards(config, rewards, few, writer)
    lines = paid_for(config, rewards, few, writer)
    return Brief(trials=trials, lines=lines and [*lines, *most_common_answer([prompt.answer for prompt in prompts])])


def tried_completions(
    prompt: Prompt, others: Sequence[Prompt], readers: Mapping[str, AnswerKeys] = MappingProxyType({})
) -> list[tuple[str, str]]:
    """(kind, text) of the completions to try: empty, another prompt's answer, the reference.

    These two are also tried in tags, and in the form that each of `readers`, {name: reward}, reads if that is another.
    """
    right = prompt.answer, *prompt.other_answers
    wrong = next((p.answer for p in others if p.answer not in right), f"{prompt.answer}0")
    answers = {"wrong": wrong, "reference": prompt.answer}
    texts = {"empty": "", **answers, **{f"{kind}, in tags": ANSWERED.format(text) for kind, text in answers.items()}}
    for name, reader in readers.items():
        with suppress(ValueError):  # such an answer is of no use to it
            told = {
                f"{kind}, as {name} reads it": reader.reference_text(replace(prompt, answer=answer))
                for kind, answer in answers.items()
            }
            texts |= {kind: text for kind, text in told.items() if text and not any(text in t for t in texts.values())}
    return list(texts.items())


def try_rewards(
    config: SamplingRoot, rewards: Mapping[str, RewardSpec], prompts: Sequence[Prompt], writer: Writer
) -> list[RewardTrial]:
    """Scores completions of these prompts with every rule reward, one at a time, so that no failure hides another."""
    trials: list[RewardTrial] = []
    rules = {name: spec for name, spec in rewards.items() if not spec.runs_in_trainer}
    built = {name: spec.build() for name, spec in rules.items()}
    readers = {name: reward for name, reward in built.items() if isinstance(reward, AnswerKeys)}
    groups = []
    for prompt in prompts:
        texts = tried_completions(prompt, prompts, readers)
        groups.append((texts, group_of(prompt, writer.completions([(prompt, text) for _, text in texts]))))
    timeout_s, on_error, allowed = config.scoring.timeout, config.scoring.on_error, config.allows_unscorable
    for name, spec in rules.items():
        with closing(Scorer({name: spec}, 1, timeout_s, on_error, allow_unscorable=allowed)) as scorer:
            for texts, group in groups:
                scores: Sequence[float | None] = [None] * len(texts)
                scorer.last_failure = None
                try:
                    scores = scorer([group]).by_reward[name][0].tolist()
                    error = scorer.last_failure  # of a reward whose on_error is a number
                except RewardError as failed:
                    error = str(failed)
                of_group = {"reward": name, "prompt": group.prompt.id, "error": error}
                trials += [
                    RewardTrial(kind=kind, completion=text, score=score, **of_group)
                    for (kind, text), score in zip(texts, scores, strict=True)
                ]
    return trials


def doubts(trials: Sequence[RewardTrial]) -> list[str]:
    """Warnings about rewards that failed, or that do not tell a right answer from a wrong or an empty one."""
    texts = []
    for name in dict.fromkeys(trial.reward for trial in trials):
        tried = [trial for trial in trials if trial.reward == name]
        if failed := next((trial for trial in tried if trial.error), None):
            texts.append(f"reward.{name} failed: {failed.error}")
        elif len({trial.score for trial in tried}) == 1:
            same = f"gave all of these {tried[0].score:g}"
            texts.append(f"reward.{name} {same}: it may read something that they do not have")
        elif _pays_wrong_more(tried, "") and _pays_wrong_more(tried, ", in tags"):
            texts.append(f"reward.{name} gives a wrong answer more than the reference, in both forms")
    return texts


def _pays_wrong_more(trials: Sequence[RewardTrial], form: str) -> bool:
    """Whether wrong answers in this form have a higher mean score than right ones."""
    wrong, right = (
        sum(trial.score or 0.0 for trial in trials if trial.kind == f"{answer}{form}")
        for answer in ("wrong", "reference")
    )
    return wrong > right


def paid_for(
    config: SamplingRoot, rewards: Mapping[str, RewardSpec], prompts: Sequence[Prompt], writer: Writer
) -> list[str]:
    """What these rewards pay for; nothing unless all are rules of rlft's own, and each prompt has an answer."""
    is_rule = [
        spec.target.startswith("rlft.") and not spec.runs_in_trainer and not isinstance(spec.build(), ServerKeys | Code)
        for spec in rewards.values()
    ]
    if not is_rule or not all(is_rule) or config.environment or not all(prompt.answer.strip() for prompt in prompts):
        return []
    return summary_of(RewardTester(config, rewards, writer, is_isolated=False).try_all(prompts))


def most_common_answer(answers: Sequence[str]) -> list[str]:
    """What a policy gets that answers all prompts alike, which a small model learns first; nothing if no two answers
    are the same."""
    [(answer, number)] = Counter(answers).most_common(1)
    if number == 1:
        return []
    share = f"{number / len(answers):.1%} of the {counted(len(answers), 'prompt')}"
    return [
        f"most common answer: '{one_line(answer, SHOWN_CHARACTERS)}', of {share}: always written, it is right as often"
    ]
