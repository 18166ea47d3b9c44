"""Rows of data (mappings of fields) and how prompts are made of them: the part that all sources of rows share.

Rows may be in a temporary file and read from it each time they are used, so that data can be larger than memory.

Lines of the files that `rlft sample` writes are rows, too: one completion, its prompt and its rewards. Keys: prompt_id,
index (number of the completion within its prompt, from 0), prompt (the messages the model was given, without worked
examples), examples (only with data.few_shot: their messages, which came before the prompt's, after its system message),
answer (the reference, "" where there is none), completion (text), token_ids (as sampled, the end token included),
finish_reason, rewards ({name: unweighted reward}), reward (their weighted total), model (a description of the model
that sampled it), tokenizer (12 hex digits, `rlft.data.prompts.tokenizer_fingerprint`). A conversation also has mask (1
for each token that was sampled, else 0) and turns. Such a line is refused as training data, because the environment's
tokens would be learned, too.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import pickle
import re
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import IO, TYPE_CHECKING, Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, overload

from rlft.config.bounds import NonNegativeInt
from rlft.config.keys import Key
from rlft.data import templates
from rlft.data.fields import (
    TOOLS,
    MissingField,
    RowError,
    UselessRow,
    as_text,
    check_none_unread,
    kind,
    messages_of,
    tools_of,
    value_of,
    with_images,
)
from rlft.data.templates import chat
from rlft.tokens.answers import ReferenceIn, answers_in
from rlft.types import IMAGE, FinishReason, Message, Prompt, Rollout, Split, UserError, are, counted, require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_FEW_SHOT_PLACEHOLDER = re.compile(r"\{(answer|final)\}")  # of data.few_shot_template
BOXED = "boxed"  # as data.answer_pattern: what is in the last box, or behind it, as in the solutions of MATH
_IN_BRACES = r"(?:\\.|[^{}\\])*"
for _ in range(5):
    _IN_BRACES = rf"(?:\\.|[^{{}}\\]|\{{{_IN_BRACES}\}})*"
_BOX = rf"\\(?:boxed|fbox)\s*(?:\{{({_IN_BRACES})\}}|([^\s{{$]+))"
_NUMBER_GOES_ON = re.compile(r"[,.]?[0-9]")
_NUMBER_BEFORE = re.compile(r"[0-9][,.]?$")
MAX_CHECKED_ANSWERS = 20_000  # rows that are looked at for cut numbers, and for other answers to the same question

Made = TypeVar("Made")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow(Generic[Made]):
    """What is made of a row, with a hash of its question, which equal questions share whatever else the rows hold."""

    identity: str
    made: Made


MOST_LEFT_OUT = 0.5  # the share of rows without use above which the data are not what the keys say that they are
Parse = Callable[[Mapping[str, Any], str], Sequence[RecordRow[Made]]]
"""A function that maps (fields, id) of a row to the objects made of it, all with one identity. It raises RowError."""


class RowSource(ABC):
    """A component with rows, from JSONL files or a hub set; `section` is the part of the config with its keys."""

    __slots__ = ()

    section: ClassVar[str]

    @abstractmethod
    def read(self, split: Split, parse: Parse[Made]) -> Sequence[RecordRow[Made]]:
        """The rows of a split in the order of the data. Raises UserError."""

    @abstractmethod
    def parse(self, fields: Mapping[str, Any], row_id: str) -> Sequence[RecordRow[Any]]:
        """What is made of a row: a `Parse`. Raises RowError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedKeys(templates.PromptKeys, RowSource):
    """The config keys of rows that are learned: one from which nothing can be is left out and counted, not refused."""

    def useful(self, split: Split) -> list[Any]:
        """What is made of the split's rows from which something can be learned. UserError: they are less than half."""
        made = [row.made for row in self.read(split, self.parse)]
        if others := [error for error in made if isinstance(error, UselessRow)]:
            key = f"{self.section}.path"
            problem = f"nothing can be learned from {len(others)} of {len(made)} {split} rows: {others[0]}"
            remedy = f"correct them, or the keys that say what a row is ({self.section}.*)"
            require(len(others) <= MOST_LEFT_OUT * len(made), key, problem, remedy=remedy)
            logger.warning("%s: %s; they are left out", key, problem)
        return [each for each in made if not isinstance(each, UselessRow)]

    def parse(self, fields: Mapping[str, Any], row_id: str) -> Sequence[RecordRow[Any]]:
        """What is learned of the row; of a useless one the error, which its id puts into one split. Raises RowError."""
        try:
            return self.learned(fields, row_id)
        except UselessRow as error:
            made = UselessRow(f"{row_id} {error}")
            return [RecordRow(identity=hashlib.sha256(row_id.encode()).hexdigest(), made=made)]

    @abstractmethod
    def learned(self, fields: Mapping[str, Any], row_id: str) -> Sequence[RecordRow[Any]]:
        """What is learned of the row. Raises RowError."""


class Question(NamedTuple):
    """A row's prompt, without examples, and the text that its answer is a part of."""

    prompt: Prompt
    worked_answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKeys(templates.PromptKeys, RowSource):
    """The config keys that say how a row becomes a prompt, besides those of all prompts.

    The prompt of a chat ends before its last message if that is an assistant message. The worked examples (few_shot)
    are the training questions with the lowest hashes, but never the question itself.
    """

    section: ClassVar[str] = "data"

    prompt_field: str
    messages_field: str | None
    image_field: str | None
    answer_field: str | None
    answer_in: Annotated[ReferenceIn | None, Key(before=None)]
    answer_pattern: str | None
    answer_remove: str
    few_shot: NonNegativeInt
    few_shot_template: str
    metadata_fields: Sequence[str]

    def __post_init__(self) -> None:
        templates.check_template(self.prompt_template, "data.prompt_template", self.answer_field)
        templates.check_answer_template(self.answer_field or "", "data.answer_field")
        problem, remedy = "has neither {answer} nor {final}", "put {answer} where the worked answer goes"
        shows_answer, got = _FEW_SHOT_PLACEHOLDER.search(self.few_shot_template), repr(self.few_shot_template)
        require(shows_answer, "data.few_shot_template", problem, got=got, remedy=remedy)
        problem = "is null, so that examples have no answer to show"
        has_answer = self.answer_field is not None or self.messages_field is not None
        require(has_answer or not self.few_shot, "data.answer_field", problem, remedy="set data.few_shot=0, or name it")
        problem, shows = "examples are shown without images", self.image_field is not None and self.few_shot
        require(not shows, "data.few_shot", problem, got=self.few_shot, remedy="set it to 0 with data.image_field")
        try:
            re.compile(self.answer_pattern or "")
        except re.error as error:
            problem, remedy = f"is not a regular expression ({error})", "fix it, or use null"
            raise UserError("data.answer_pattern", problem, got=self.answer_pattern, remedy=remedy) from None

    def load(self, split: Split) -> Sequence[Prompt]:
        """The split's prompts in the order of the data. Raises UserError, which names a bad row."""
        rows = self.read(split, self.parse)
        if self.answer_pattern is not None:
            self._warn_of_cut_numbers(rows)
        _warn_of_other_answers(rows)
        if not self.few_shot:
            return mapped(rows, lambda row: row.made.prompt)
        training = rows if split is Split.train else self.read(Split.train, self.parse)
        # One more than is shown, because a question is never one of its own examples.
        examples = first_by_identity(training, self.few_shot + 1)
        return mapped(rows, lambda row: self._with_examples(row, examples))

    def parse(self, fields: Mapping[str, Any], row_id: str) -> list[RecordRow[Question]]:
        """The row's question. Raises RowError."""
        fields, images = with_images(fields, self.messages_field or self.prompt_field, self.image_field)
        if self.messages_field is None:
            turns = templates.question_of(fields, self.prompt_field, self.template)
        else:
            turns = messages_of(fields, self.messages_field)
        worked_answers = self._worked_answers(fields, turns)
        if turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        if not turns or turns[-1]["role"] != "user":
            raise RowError(f"field {self.messages_field!r} holds no user message for the model to answer")
        if self.messages_field is not None and TOOLS not in self.metadata_fields and tools_of(fields):
            problem = f"field {TOOLS!r} has tools, which prompts show only of an environment"
            raise RowError(problem, remedy="use environment=tools (docs/how-to/tools.md), or leave the field out")
        answers = [answer for worked in worked_answers for answer in self._answers(worked)]
        answer, *others = dict.fromkeys(answers) if answers else [""]
        turns, question = self.filled(turns, fields)
        if not images:
            check_none_unread(fields, turns)
        places = sum(turn["content"].count(IMAGE) for turn in turns)
        if images and places != len(images):
            raise RowError(f"its question has places for {places} of {len(images)} images")
        self.note_unread(fields, prompt=None if self.messages_field else self.prompt_field)
        try:
            metadata = {name: value_of(fields, name) for name in self.metadata_fields}
        except RowError as error:
            raise MissingField(f"{error} (data.metadata_fields)") from None
        if options := self.options(fields):
            columns = enumerate(("label", "text"))
            metadata[templates.OPTIONS] = {key: [option and option[i] for option in options] for i, key in columns}
        prompt = Prompt(
            id=row_id,
            messages=templates.chat(turns, self.system_prompt),
            answer=answer,
            other_answers=tuple(others),
            metadata=metadata,
            images=images,
        )
        made = Question(prompt, worked_answers[0] if worked_answers else "")
        pictures = ({"role": "image", "content": image.digest} for image in images)
        return [RecordRow(identity=identity([*question, *pictures]), made=made)]

    def _worked_answers(self, fields: Mapping[str, Any], turns: Sequence[Message]) -> list[str]:
        """The texts of the row's answers, any of which is right; none where no field has them."""
        if self.answer_field is not None:
            if templates.placeholders(self.answer_field):
                return [templates.filled(self.answer_field, None, fields, "answer_field")[0]]
            value = value_of(fields, self.answer_field)
            values = value if isinstance(value, list | tuple) else [value]
            if not values:
                raise RowError(f"field {self.answer_field!r} is an empty list")
            return [as_text(value, self.answer_field, numbers=True) for value in values]
        if self.messages_field is None:
            return []
        if turns[-1]["role"] == "assistant":
            return [turns[-1]["content"]]
        raise RowError(f"field {self.messages_field!r} does not end with an assistant message, the answer")

    def _answers(self, text: str) -> list[str]:
        """The answers in one that is worked out, of which there are several only in lists."""
        if self.answer_in is None:
            return [self._answer(text)]
        found = answers_in(text, self.answer_in)
        if not found:
            raise RowError(f"the answer is not in the form of data.answer_in={self.answer_in}: {text!r:.60}")
        return list(map(self._answer, found))

    def _answer(self, text: str) -> str:
        if self.answer_pattern is not None:
            match = self._last_match(text)
            if match is None:
                raise RowError(f"the answer has no match of data.answer_pattern={self.answer_pattern}")
            text = match[_group(match)] or ""
        answer = text.translate({ord(c): None for c in self.answer_remove}).strip()
        if not answer:
            raise RowError("the answer is empty")
        return answer

    def _last_match(self, text: str) -> re.Match[str] | None:
        pattern = _BOX if self.answer_pattern == BOXED else self.answer_pattern or ""
        return next(iter(deque(re.finditer(pattern, text), maxlen=1)), None)

    def _warn_of_cut_numbers(self, rows: Sequence[RecordRow[Question]]) -> None:
        """Warns once if the pattern takes part of a number, such as 1 of 1,080: the answers would be wrong."""
        number, first = 0, None
        for row in islice(rows, MAX_CHECKED_ANSWERS):
            text = row.made.worked_answer
            match = self._last_match(text)
            if match is not None and _cuts_number(text, *match.span(_group(match))):
                number += 1
                first = first or row.made
        if first is not None:
            logger.warning(
                "data.answer_pattern: cuts a number in %d of %d answers: %s has the answer %r of %r; let the pattern "
                r"take digits, commas and points: (-?[\d,.]*\d)",
                *(number, min(len(rows), MAX_CHECKED_ANSWERS)),
                *(first.prompt.id, first.prompt.answer, first.worked_answer[-40:]),
            )

    def _with_examples(self, row: RecordRow[Question], candidates: Sequence[RecordRow[Question]]) -> Prompt:
        """The prompt with worked examples before its question."""
        others = [example.made for example in candidates if example.identity != row.identity][: self.few_shot]
        found = counted(len(others), "training question")
        problem = f"there {are(len(others))} only {found} besides {row.made.prompt.id} to show"
        remedy = f"use data.few_shot={len(others)}, or more data"
        require(len(others) == self.few_shot, "data.few_shot", problem, got=self.few_shot, remedy=remedy)
        examples = [turn for example in others for turn in self._example(example)]
        prompt = row.made.prompt
        messages = templates.chat(prompt.messages, None, examples)
        return replace(prompt, messages=messages, num_examples=len(examples))

    def _example(self, example: Question) -> tuple[Message, ...]:
        values = {"answer": example.worked_answer, "final": example.prompt.answer}
        answer_turn = _FEW_SHOT_PLACEHOLDER.sub(lambda match: values[match[1]], self.few_shot_template)
        turns = [turn for turn in example.prompt.messages if turn["role"] != "system"]
        return (*turns, {"role": "assistant", "content": answer_turn})


def _warn_of_other_answers(rows: Sequence[RecordRow[Question]]) -> None:
    """Warns once if a question occurs again with none of its answers, since a policy cannot be right both times."""
    import numpy as np

    numbers = np.fromiter((number_of(row.identity) for row in rows), dtype=np.uint64, count=len(rows))
    values, counts = np.unique(numbers, return_counts=True)
    first_of: dict[str, Prompt] = {}
    number, example = 0, None
    for position in np.flatnonzero(np.isin(numbers, values[counts > 1]))[:MAX_CHECKED_ANSWERS]:
        row = rows[int(position)]
        first = first_of.setdefault(row.identity, row.made.prompt)
        if {*_answers(first)}.isdisjoint(_answers(row.made.prompt)):
            number, example = number + 1, example or (first, row.made.prompt)
    if example is not None:
        first, other = example
        logger.warning(
            "data.path: a question is repeated with another answer in %s: %s has %r, %s has %r",
            *(counted(number, "row"), first.id, first.answer[:40], other.id, other.answer[:40]),
        )


def _answers(prompt: Prompt) -> list[str]:
    """The answers, without differences in white space."""
    return [" ".join(answer.split()) for answer in (prompt.answer, *prompt.other_answers)]


def identity(turns: Sequence[Message]) -> str:
    """A hash (sha256, hex) of the question, which ignores differences in white space."""
    text = "\x1e".join(f"{turn['role']}\x1f{' '.join(turn['content'].split())}" for turn in turns)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def number_of(question_identity: str) -> int:
    """The first 64 bits of an identity."""
    return int(question_identity[:16], 16)


def split_of(question_identity: str, held_out_fraction: float) -> Split:
    """The split a question belongs to, by its hash alone: no order, seed or size can make the two splits overlap."""
    return Split.held_out if number_of(question_identity) < held_out_fraction * 2**64 else Split.train


def first_by_identity(rows: Iterable[RecordRow[Made]], number: int) -> list[RecordRow[Made]]:
    """The `number` rows with the lowest identities, in order, all that memory holds; of equal questions the last."""
    first: dict[str, RecordRow[Made]] = {}
    for row in rows:
        first[row.identity] = row
        if len(first) > number:
            del first[max(first)]
    return [first[identity] for identity in sorted(first)]


def _group(match: re.Match[str]) -> int:
    """The number of the group that has the answer: the first that took part, or all of the match."""
    return next((number for number, text in enumerate(match.groups(), 1) if text is not None), int(match.re.groups > 0))


def _cuts_number(text: str, begin: int, end: int) -> bool:
    """Whether text[begin:end] begins or ends inside a number.

    >>> [_cuts_number("= 1,080.", 2, end) for end in (3, 5, 7)], _cuts_number("= 1,080", 4, 7)
    ([True, True, False], True)
    """
    found = text[begin:end]
    begins_inside = found[:1].isdigit() and _NUMBER_BEFORE.search(text, 0, begin) is not None
    return begins_inside or (found[-1:].isdigit() and _NUMBER_GOES_ON.match(text, end) is not None)


# -- more than memory holds --------------------------------------------------------------------------------------------
class Stored(Sequence[Item]):
    """Items in a temporary file, each read whenever it is used; memory holds its place there, 16 bytes.

    Slices, and what is chosen by a list of indices, are in the same file.
    """

    def __init__(self, file: IO[bytes], places: NDArray[np.uint64], make: Callable[[Any], Item]) -> None:
        self._file, self._places, self._make = file, places, make  # places `[N, 2]`: first byte, number of bytes

    @classmethod
    def of(cls, items: Iterable[Item], key: str) -> Stored[Item]:
        """These items, pickled. UserError of the config key `key`: the folder for temporary files has no room."""
        import numpy as np

        places, start = array("Q"), 0
        with _storing(key):
            file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the items)
        for item in items:
            content = pickle.dumps(item)
            places.extend((start, len(content)))
            with _storing(key):
                start += file.write(content)
        with _storing(key):
            file.flush()
        return cls(file, np.frombuffer(places, dtype=np.uint64).reshape(-1, 2), lambda item: item)

    def mapped(self, make: Callable[[Item], Made]) -> Stored[Made]:
        """What the function makes of each item, each time that it is used."""
        return Stored(self._file, self._places, lambda stored: make(self._make(stored)))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> Stored[Item]: ...

    def __getitem__(self, index: Any) -> Item | Stored[Item]:
        places = self._places[index]
        if places.ndim > 1:
            return Stored(self._file, places, self._make)
        start, size = places.tolist()
        return self._make(pickle.loads(os.pread(self._file.fileno(), size, start)))


@contextmanager
def _storing(key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f", {tempfile.tempdir}" if tempfile.tempdir else ""  # None: there is no such folder
        problem = f"its rows do not fit into the folder for temporary files{where} ({error})"
        raise UserError(key, problem, remedy="set TMPDIR to a folder with more room") from None


class Joined(Sequence[Item]):
    """The items of both sequences."""

    def __init__(self, first: Sequence[Item], second: Sequence[Item]) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        place = range(len(self))[index]
        return self._first[place] if place < len(self._first) else self._second[place - len(self._first)]


def mapped(items: Sequence[Made], make: Callable[[Made], Item]) -> Sequence[Item]:
    """The result of the function for each item: a list, or what is stored if the items are."""
    return items.mapped(make) if isinstance(items, Stored) else [make(item) for item in items]


# -- lines of rlft sample ----------------------------------------------------------------------------------------------
TOKENIZER = "tokenizer"
"""Key of the tokenizer's fingerprint, in a line and in the metadata of prompts whose sampled token ids are learned."""
EXAMPLES = "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The contents of a line. A reward is None where it was not a finite number or was not computed."""

    prompt: Prompt
    completion: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    rewards: Mapping[str, float | None]
    reward: float | None


def sampled_line(
    rollout: Rollout, *, index: int, rewards: Mapping[str, float], reward: float | None, model: str, tokenizer: str
) -> dict[str, Any]:
    """The line of one completion, without NaN or infinity; its keys are at the top of this file."""
    completion = rollout.completion
    conversation: dict[str, Any] = {}
    if completion.mask is not None:
        conversation = {"mask": [*map(int, completion.mask)], "turns": [*map(asdict, completion.turns)]}
    if completion.branches:
        conversation["branches"] = [asdict(branch) for branch in completion.branches]
    question, examples = _apart(rollout.prompt)
    return {
        "prompt_id": rollout.prompt.id,
        "index": index,
        "prompt": question,
        **({EXAMPLES: examples} if examples else {}),
        "answer": rollout.prompt.answer,
        "completion": completion.text,
        "token_ids": [int(token) for token in completion.token_ids],
        "finish_reason": str(completion.finish_reason),
        "rewards": {name: _finite(value) for name, value in sorted(rewards.items())},
        "reward": None if reward is None else _finite(reward),
        "model": model,
        TOKENIZER: tokenizer,
        **conversation,
    }


def _apart(prompt: Prompt) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages of a prompt without its worked examples, and those of the examples."""
    messages = [dict(message) for message in prompt.messages]
    start = int(messages[0]["role"] == "system")
    end = start + prompt.num_examples
    return messages[:start] + messages[end:], messages[start:end]


def is_sampled(fields: Mapping[str, Any]) -> bool:
    """Whether a row is such a line: only these have a tokenizer, a prompt that is a list, and a completion."""
    return TOKENIZER in fields and isinstance(fields.get("prompt"), list) and "completion" in fields


def parse_sampled(fields: Mapping[str, Any], *, with_tokens: bool, with_examples: bool = False) -> Sampled:
    """The contents of a line; with `with_tokens` its token ids are used, and the prompt's metadata names the tokenizer.

    The prompt has the worked examples that were shown before it only with `with_examples`.

    RowError: a key is missing or of another type, or there are no tokens to use.
    """
    if "mask" in fields:
        raise RowError("it is a conversation, and what an environment said in it would be learned; leave it out")
    token_ids = _of(fields, "token_ids", list)
    if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
        raise _foreign("field 'token_ids' must be whole numbers, not below 0")
    if with_tokens and not token_ids:
        raise _foreign("field 'token_ids' is empty")
    finish_reason = _of(fields, "finish_reason", str)
    if finish_reason not in list(FinishReason):
        raise _foreign(f"field 'finish_reason' must be {' or '.join(FinishReason)}, it is {finish_reason!r}")
    messages = messages_of(fields, "prompt")
    if with_examples and EXAMPLES in fields:
        messages = chat(messages, None, messages_of(fields, EXAMPLES))
    prompt = Prompt(
        id=_of(fields, "prompt_id", str),
        messages=messages,
        answer=_of(fields, "answer", str),
        metadata={TOKENIZER: _of(fields, TOKENIZER, str)} if with_tokens else {},
    )
    return Sampled(
        prompt=prompt,
        completion=_of(fields, "completion", str),
        token_ids=tuple(token_ids),
        finish_reason=FinishReason(finish_reason),
        rewards={name: _number(value, f"rewards.{name}") for name, value in _of(fields, "rewards", dict).items()},
        reward=_number(fields.get("reward"), "reward"),
    )


def sampled_with(prompts: Iterable[Prompt]) -> set[str]:
    """Fingerprints of the tokenizers whose sampled token ids are learned; empty where all completions are text."""
    return {prompt.metadata[TOKENIZER] for prompt in prompts if TOKENIZER in prompt.metadata}


def check_tokenizer(fingerprints: Iterable[str], expected: str, key: str) -> None:
    """Refuses, by `key`, token ids of another tokenizer than the model's, of which `expected` is the fingerprint."""
    others = sorted(set(fingerprints) - {expected})
    problem = f"was sampled with another tokenizer ({', '.join(others)}) than this model's ({expected})"
    remedy = f"set {key.partition('.')[0]}.token_ids=text to tokenise its texts again, or sample with this model"
    require(not others, key, problem, remedy=remedy)


def check_prompt_ids(prompts: Iterable[Prompt], key: str) -> None:
    """Refuses an id that several prompts have, as can happen where samples of different data share a file."""
    prompt_of_id: dict[str, Prompt] = {}
    for prompt in prompts:
        is_same = prompt_of_id.setdefault(prompt.id, prompt).messages == prompt.messages
        remedy = "put only samples of the same data into one file"
        require(is_same, key, "two different prompts have the same id", got=prompt.id, remedy=remedy)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: Any, name: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise _foreign(f"field {name!r} must be a number or null, it is {kind(value)}")
    return None if value is None else _finite(value)


def _of(fields: Mapping[str, Any], name: str, expected_type: type) -> Any:
    value = fields.get(name)
    if not isinstance(value, expected_type):
        names = {list: "a list", dict: "an object", str: "a string"}
        raise _foreign(f"field {name!r} of a sampled line must be {names[expected_type]}, it is {kind(value)}")
    return value


def _foreign(problem: str) -> RowError:
    return RowError(problem, remedy="fix or remove that line, or sample again")
