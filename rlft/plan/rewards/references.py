"""What is tried of rewards before any run that scores: their servers, and all reference answers.

Each reference must be right by itself. One that no completion can match costs a prompt's completions in every epoch, or
ends the run where its reward refuses it; one that other references match rewards wrong answers. Only rewards that say
how a completion gives an answer take part (`reference_text`); `rlft plan` tries the others on a few completions.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, cast

from rlft.config.schema import SamplingRoot
from rlft.data.prompts import PromptSet, untokenised
from rlft.data.records import Joined
from rlft.plan.rewards.tester import Writer, group_of
from rlft.plan.rules import check_metadata
from rlft.reward.answer import AnswerIn, AnswerKeys, composed, plain_number
from rlft.reward.exact_match import ExactMatch
from rlft.reward.http import ServerKeys, shown_url
from rlft.reward.math import Math
from rlft.reward.workers.reward_spec import RewardSpec, reported
from rlft.reward.workers.worker import NOWHERE, Cause, Failure, Loaded, score
from rlft.system.terminal import with_progress
from rlft.tokens.answers import ReferenceIn, answers_in, boxes, names_an_answer, opened
from rlft.tokens.reasoning import end_of
from rlft.tokens.text import RunTokenizer
from rlft.types import Completion, FinishReason, Group, Prompt, Unscored, UserError, counted

if TYPE_CHECKING:
    from rlft.tokens.text import TurnEnds

LIMIT_S = 20.0  # processor seconds that a reward may take for all references together; GSM8K's 7,473 take less than one
NUM_PAIRS, FEW_PAIRS = 64, 4  # the most pairs of rows that are compared, and the least that tell anything
NUM_SHOWN = 3
MAX_OPENED, MAX_HIDDEN = 20_000, 256
"""The most references of which the forms around their answers are looked at, and found."""
MOST_WORDS = 3  # the most words of an answer in a sentence, with which the sentence is nothing else for sure
A_NUMBER = r"(-?[0-9](?:[0-9,.]*[0-9])?)"
_WITH_NUMBER = re.compile(
    r"(?=.*[^\W\d_]{2})[^\\^_={}]*|A\s*[-:.)][^\\^_={}]*|"
    r"[^=\n]{0,200}[0-9)]\s*[-+*/×÷]\s*[0-9(][^=\n]{0,200}=[^=\n]*",
    re.DOTALL,
)
"""Texts that may be words or a calculation with a number as the answer."""
_ANNOUNCEMENT = re.compile(r"(?s).*(?:\w\W*?(?:[-=]>|[:：=→]|[-–](?=\s))|[是为选])[\s*_]*")
"""What ends with a mark or a word behind which an answer follows."""
_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()]")
NEVERTHELESS = ", or start nevertheless with data.allow_unscorable=true"
CHUNK = 256
TIME_LIMIT_S = 10.0  # time limit of a server's one request in seconds, if the reward's own timeout is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """A reference that is more than its answer."""

    prompt: Prompt
    short: Prompt  # the prompt with the answer alone as its reference
    way: str  # the key of the data, with its value, by which that is read
    is_sure: bool = False  # whether nothing else can be meant
    is_likely: bool = False  # whether nothing else can be meant if most references are such


@dataclass(slots=True, kw_only=True)
class Found:
    """What a reward says of the references: how many were scored, and which of them are not right by themselves."""

    num_scored: int = 0
    num_unscorable: int = 0
    num_formless: int = 0  # no completion is known that gives the reference
    examples: list[str] = field(default_factory=list)

    def add(self, prompt: Prompt, problem: str | None) -> None:
        self.num_scored += 1
        if problem is not None:
            self.num_unscorable += 1
            if len(self.examples) < NUM_SHOWN:
                self.examples.append(f"{prompt.answer!r:.60} of prompt {prompt.id!r}{problem}")


def check_scoring(
    config: SamplingRoot,
    rewards: Mapping[str, RewardSpec],
    prompts: PromptSet,
    tokenizer: RunTokenizer,
    ends: TurnEnds,
    held_out: PromptSet | None = None,
) -> tuple[str, ...]:
    """Notes about the rewards and the prompts whose completions they score, after all that can be tried beforehand."""
    first = prompts.prompts[0]
    check_metadata(rewards, first)
    texts = Joined(untokenised(prompts), untokenised(held_out) if held_out else ())
    writer = Writer(tokenizer, ends, config.generation.sampling)
    notes = (*reported(rewards, "examine", texts), *check_references(config, rewards, texts, writer))
    check_servers(rewards, first)
    return (*reported(rewards, "note"), *notes)


def check_servers(rewards: Mapping[str, RewardSpec], prompt: Prompt) -> None:
    """Asks each reward's server to score one completion of this prompt, its reference answer, without retries."""
    completion = Completion(text=prompt.answer, token_ids=(), logprobs=(), finish_reason=FinishReason.stop)
    group = group_of(prompt, [completion])
    for name, spec in rewards.items():
        reward = spec.build()
        if not isinstance(reward, ServerKeys) or not reward.try_first:
            continue
        single_attempt = replace(reward, retries=0, timeout=min(reward.timeout, TIME_LIMIT_S))
        try:
            cast("Callable[[Group], Any]", single_attempt)(group)  # whatever has ServerKeys is a reward
        except Unscored as error:
            problem = f"was asked for one score before the start, and {' '.join(str(error).split()).rstrip(',')}"
            remedy = f"start the server, correct its keys, or set reward.{name}.try_first=false to begin without it"
            raise UserError(f"reward.{name}.url", problem, got=shown_url(reward.url), remedy=remedy) from None


def check_references(
    config: SamplingRoot,  # says whether unscorable references are only noted (data.allow_unscorable)
    rewards: Mapping[str, RewardSpec],  # the run's
    prompts: Sequence[Prompt],  # of both splits
    writer: Writer,  # what the policy cannot write is not right
    # Processor seconds for each reward; with streamed data and slow rewards only a part is scored.
    limit_s: float = LIMIT_S,
) -> Iterator[str]:
    """Scores all reference answers as completions, as far as the time limit allows, and yields notes about them.

    Raises UserError: references are not right by themselves, or a reward takes each for every other.
    """
    allowed = config.allows_unscorable
    for name, spec in rewards.items():
        reward = None if spec.runs_in_trainer else spec.build()
        if not isinstance(reward, AnswerKeys) or not _says_what_is_right(reward):
            continue
        start = getattr(reward, "start", None)
        if callable(start):
            start()
        judge = _Judge(reward, writer, config.scoring.timeout)
        if "answer_in" in config.data:
            yield from _more_than_answers(name, judge, prompts, config.data, allowed)
        found = _scored(judge, prompts, limit_s, f"reward.{name}: scoring the reference answers")
        if found.num_formless and reward.answer_in is AnswerIn.pattern:
            yield f"reward.{name}: its pattern is too intricate for scoring the reference answers beforehand"
        yield from _reported(name, found, len(prompts), allowed)
        yield from _confused(name, judge, prompts, allowed)


def _says_what_is_right(reward: AnswerKeys) -> bool:
    """Not so a class of a user's own, on one of rlft's, whose full marks may be another number than 1."""
    return type(reward).__module__.startswith("rlft.") or "right" in vars(type(reward))


class _Judge:
    """Asks a reward whether texts are right, as completions that the policy would have sampled."""

    def __init__(self, reward: AnswerKeys, writer: Writer, each_s: float) -> None:
        self.reward, self.writer, self.each_s = reward, writer, each_s
        self._right = Loaded(reward=lambda group: [float(right) for right in reward.right(group)], scores_steps=False)

    def written(self, prompt: Prompt) -> str | None:
        """A completion that gives the prompt's reference. None: the reward has none, or the reference is of no use."""
        with suppress(ValueError):
            return self.reward.reference_text(prompt)
        return None

    def read(self, reference: str) -> tuple[str, str] | None:
        """(the answer that the reward reads in a reference, a pattern that does so); None if that is all of it."""
        answer, pattern = self.reward.extract(reference), self.reward.pattern
        if answer is None or answer == reference.strip():
            return None
        form = re.escape(self.reward.written("ANSWER") or "").replace("ANSWER", "(.*)")
        return answer, (pattern or "") if self.reward.answer_in is AnswerIn.pattern else form

    def problem(self, prompt: Prompt, completion: Completion) -> str | None:
        """Why a completion is not right; None if it is. TimeoutError: the reward did not say so in time."""
        read = replace(completion, text=prompt.tail + end_of(prompt.tail) + completion.text)
        outcome = score(self._right, group_of(prompt, [read]), self.each_s, [0, NOWHERE])
        if isinstance(outcome, Failure):
            if outcome.cause is Cause.time_limit:
                raise TimeoutError
            return f" ({outcome.problem})"
        return None if outcome == [1.0] else ""

    def is_right(self, prompt: Prompt, completion: Completion) -> bool:
        """Whether it said in time that a completion is right."""
        with suppress(TimeoutError):
            return self.problem(prompt, completion) is None
        return False


def _scored(judge: _Judge, prompts: Sequence[Prompt], limit_s: float, title: str) -> Found:
    found, began = Found(), time.process_time()
    progress = with_progress(iter(prompts), title, len(prompts))
    while chunk := list(islice(progress, CHUNK)):
        written: list[tuple[Prompt, str]] = []
        for prompt in chunk:
            try:
                text = judge.reward.reference_text(prompt)
            except ValueError as error:
                found.add(prompt, f" ({error})")
                continue
            if text is None:
                found.num_formless += 1
            else:
                written.append((prompt, text))
        for (prompt, _), completion in zip(written, judge.writer.completions(written), strict=True):
            if time.process_time() - began > limit_s:
                return found
            with suppress(TimeoutError):  # how fast the machine is says nothing of the reference
                found.add(prompt, judge.problem(prompt, completion))
    return found


def _right_alone(judge: _Judge, candidates: Iterable[Hidden]) -> Iterator[Hidden]:
    """The references of which the answer alone is not right, though it would be if it were the reference."""
    written = [(hidden, text) for hidden in candidates if (text := judge.written(hidden.short))]
    said = judge.writer.completions([(hidden.prompt, text) for hidden, text in written])
    for (hidden, _), completion in zip(written, said, strict=True):
        if not judge.is_right(hidden.prompt, completion) and judge.is_right(hidden.short, completion):
            yield hidden


def _announced(judge: _Judge, prompts: Sequence[Prompt]) -> list[Hidden]:
    """The references with the answers in them where all begin with the same announcement, such as "A: "."""
    begun = os.path.commonprefix([prompt.answer for prompt in prompts])  # noqa: RUF071 (of texts, not of paths)
    match = _ANNOUNCEMENT.match(begun) if isinstance(judge.reward, ExactMatch | Math) else None
    shorts = [prompt.answer[match.end() :].strip() for prompt in prompts] if match else []
    if match is None or len({*shorts}) < FEW_PAIRS or not all(shorts):
        return []
    prefix = _SPECIAL.sub(r"\\\g<0>", match[0]).replace("'", r"\'")
    way = f"data.answer_pattern='{prefix}(.*)'"
    of_rows = [
        Hidden(prompt=prompt, short=replace(prompt, answer=short, other_answers=()), way=way)
        for prompt, short in zip(prompts, shorts, strict=True)
    ]
    first = list(_right_alone(judge, of_rows[:NUM_SHOWN]))
    return of_rows if len(first) == len(of_rows[:NUM_SHOWN]) else []


def _candidate(judge: _Judge, prompt: Prompt) -> Hidden | None:
    """The reference with the answer in it: in a form, as the reward reads it, or the last number in a sentence."""
    forms, answers = opened(prompt.answer)
    way = f"data.answer_in={forms[0] if len(forms) == 1 else ReferenceIn.auto}"
    is_sure = is_likely = False
    if forms:
        is_sure = _is_sure(prompt.answer.strip(), forms)
        is_likely = is_sure or _is_likely(forms, answers[0])
    elif own := judge.read(prompt.answer):
        answers, way, is_sure = [own[0]], f"data.answer_pattern='{own[1]}'", True
    elif _is_list(prompt.answer) and '"' in prompt.answer.replace("'", '"'):
        answers, way = answers_in(prompt.answer, ReferenceIn.json), f"data.answer_in={ReferenceIn.json}"
    elif isinstance(judge.reward, ExactMatch | Math) and (
        _WITH_NUMBER.fullmatch(prompt.answer) or names_an_answer(prompt.answer)
    ):
        answers, way = re.findall(A_NUMBER, prompt.answer)[-1:], f"data.answer_pattern='{A_NUMBER}'"
    if (not forms and answers == [prompt.answer.strip()]) or not answers:
        return None
    short = replace(prompt, answer=answers[0], other_answers=tuple(answers[1:]))
    return Hidden(prompt=prompt, short=short, way=way, is_sure=is_sure, is_likely=is_likely)


def _is_sure(text: str, forms: Sequence[ReferenceIn]) -> bool:
    """Whether one such reference is enough: a tag, one box, reasoning, or hashes on the last line."""
    by_form = {
        ReferenceIn.tag: True,
        ReferenceIn.reasoning: True,
        ReferenceIn.boxed: len({*boxes(text)}) == 1,
        ReferenceIn.hashes: text.splitlines()[-1].lstrip().startswith("####"),
    }
    return by_form.get(forms[0], False)


def _is_likely(forms: Sequence[ReferenceIn], answer: str) -> bool:
    if plain_number(answer) is not None:
        return forms[0] not in (ReferenceIn.boxed, ReferenceIn.hashes)
    return forms[0] is ReferenceIn.json or (forms[0] is ReferenceIn.sentence and len(answer.split()) <= MOST_WORDS)


def _is_list(text: str) -> bool:
    """Whether a reference is a list of several, as JSON or as Python prints it."""
    return text.lstrip().startswith("[") and len(answers_in(text, ReferenceIn.json)) > 1


def _more_than_answers(
    name: str, judge: _Judge, prompts: Sequence[Prompt], data: Mapping[str, Any], allowed: bool
) -> Iterator[str]:
    """Notes about references that are more than their answers. UserError where that is certain and not allowed."""
    found, read, rows, has_lists = list[Hidden](), list[Prompt](), iter(prompts), False
    while len(read) < MAX_OPENED and len(found) < MAX_HIDDEN and (chunk := list(islice(rows, CHUNK))):
        found += _right_alone(judge, filter(None, (_candidate(judge, prompt) for prompt in chunk)))
        read += chunk
        has_lists = has_lists or any(_is_list(prompt.answer) for prompt in chunk)
    found, number = found or (_announced(judge, read) if data["answer_in"] is None else []), len(read)
    likely = 2 * sum(each.is_likely for each in found) >= number
    as_json = f"data.answer_in={ReferenceIn.json}"
    if has_lists:  # then [3] is one as well
        found = [each for each in found if each.way != as_json or plain_number(each.short.answer) is None]
    for is_sure in (True, False):
        hidden = [
            each
            for each in found
            if is_sure is ((each.is_sure or (each.is_likely and likely)) and not (has_lists and each.way == as_json))
        ]
        if not hidden or (A_NUMBER in hidden[0].way and 2 * len(hidden) < number):
            continue
        ways = {each.way for each in hidden}
        is_one = len(ways) == 1 and (len(hidden) == number or "answer_pattern" in hidden[0].way)
        way = hidden[0].way if is_one and data["answer_in"] is None else f"data.answer_in={ReferenceIn.auto}"
        if has_lists and as_json in ways and not is_one:
            way = f"{as_json} after making each a list"
        way += " data.answer_pattern=null" * (data["answer_pattern"] is not None and "answer_pattern" not in way)
        prompt, answer = hidden[0].prompt, hidden[0].short.answer
        problem = f"{len(hidden)} of {number} reference answers are more than the answer, which alone gets nothing "
        problem += f"from reward.{name}: {prompt.answer!r:.60} of prompt {prompt.id!r}, in which it is {answer!r}"
        if is_sure and not allowed:
            raise UserError("data.answer_in", problem, got=data["answer_in"], remedy=f"set {way}{NEVERTHELESS}")
        yield f"data.answer_in: {problem}; if that is meant, set {way}"


def _reported(name: str, found: Found, total: int, allowed: bool) -> Iterator[str]:
    """Notes about what was found. UserError for unscorable references, unless they are allowed."""
    if found.num_unscorable:
        problem = f"{found.num_unscorable} of {found.num_scored} reference answers are not right by themselves"
        problem += f": {', '.join(found.examples)}"
        if not allowed:
            remedy = "correct them, change how the reward reads answers (answer_in, pattern)"
            remedy += f" or the data (data.answer_in, data.answer_pattern){NEVERTHELESS}"
            raise UserError(f"reward.{name}", problem, remedy=remedy)
        yield f"reward.{name}: {problem}"
    if (left := total - found.num_scored - found.num_formless) > 0:
        scored = counted(found.num_scored, "reference answer", ",")
        yield f"reward.{name}: only {scored} could be scored in time, {left:,} could not"


def _confused(name: str, judge: _Judge, prompts: Sequence[Prompt], allowed: bool) -> Iterator[str]:
    """A note where many references are right for other rows. UserError where all are, unless that is allowed."""
    number = min(NUM_PAIRS, len(prompts))
    rows = [prompts[k * len(prompts) // number] for k in range(number)]
    pairs = [(one, other) for one, other in pairwise(rows) if _normalized(one) != _normalized(other)]
    turns = [(one, text) for one, other in pairs if (text := judge.written(other)) is not None]
    if len(pairs) < FEW_PAIRS or len(turns) < len(pairs):
        return
    completions = judge.writer.completions(turns)
    right = [pair for pair, c in zip(pairs, completions, strict=True) if judge.is_right(pair[0], c)]
    if 4 * len(right) < len(pairs):
        return
    one, other = right[0]
    problem = f"in {len(right)} of {len(pairs)} pairs of rows, the reference answer of one is right for the other"
    problem += f" (such as {other.answer!r:.60} for {one.answer!r:.60})"
    if len(right) == len(pairs) and not allowed:
        remedy = f"change how the reward reads and compares answers{NEVERTHELESS}"
        raise UserError(f"reward.{name}", problem, remedy=remedy)
    yield f"reward.{name}: {problem}"


def _normalized(prompt: Prompt) -> str:
    return " ".join(composed(prompt.answer).casefold().split())
