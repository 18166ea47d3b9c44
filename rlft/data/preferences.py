"""Completions ranked by preference, in JSONL files or a hub set: pairs, ranked lists, and samples of rlft."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from rlft.data.fields import (
    TOOLS,
    MissingField,
    RowError,
    TypedRow,
    UselessRow,
    check_none_unread,
    completion_of,
    has,
    kind,
    messages_of,
    only,
    only_text,
    text_of,
    tools_of,
    value_of,
    values_of,
)
from rlft.data.hub import HubSet
from rlft.data.jsonl import JsonlFiles
from rlft.data.records import LearnedKeys, RecordRow, check_prompt_ids, identity, is_sampled, parse_sampled
from rlft.data.templates import chat, check_template, question_of, takes_question
from rlft.tokens.text import num_common
from rlft.types import Message, Prompt, Ranking, Split, counted, require

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")  # the beginning of a turn in a transcript of HH-RLHF

Pair = tuple[tuple[Message, ...], str, str]  # turns of the prompt, chosen completion, rejected completion


@dataclass(slots=True)
class RankingSet:
    """The rankings of a split, and the numbers of prompts left out because there is nothing to learn from them."""

    rankings: list[Ranking]
    num_identical: int = 0  # all completions are the same
    num_tied: int = 0  # all completions have the same score, or there is only one

    @property
    def note(self) -> str | None:
        """A message for the user; None where nothing was left out."""
        left_out = self.num_identical + self.num_tied
        why = f"{self.num_identical} whose completions are the same, {self.num_tied} without a difference in score"
        number = left_out + len(self.rankings)
        return f"{left_out} of {number} preferences are left out: {why}." if left_out else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceKeys(LearnedKeys):
    """The config keys that say how a row becomes a ranking. A row has one of three shapes:

    - a pair in chosen_field and rejected_field: two texts (or one assistant message each) with a prompt, or two whole
      chats that differ in their last message. The common beginning of the chats is the prompt; if the row has another
      prompt, that is not used.
    - a list of texts in completions_field with a prompt, or one text with its score
    - a line of `rlft sample`, recognised by its keys (rlft/data/records.py); its prompt is used unchanged

    The single texts of a prompt are ranked together, and so are its lines of `rlft sample`.
    Pairs that answer different questions are left out and counted. A chat in messages_field takes precedence over
    prompt_field. The rejected completion of a pair scores 0, the chosen one its margin.
    """

    section: ClassVar[str] = "preferences"

    format: Literal["auto", "hh", "implicit"]
    prompt_field: str
    messages_field: str
    chosen_field: str
    rejected_field: str
    margin_field: str | None
    completions_field: str | Sequence[str]
    scores_field: str | Sequence[str]
    ranked: bool
    rank_by: str
    token_ids: Literal["sampled", "text"]

    def __post_init__(self) -> None:
        check_template(self.prompt_template, f"{self.section}.prompt_template", self.chosen_field)

    def load(self, split: Split) -> RankingSet:
        """The split's rankings in the order in which their prompts first occur; no question is in both splits.

        UserError: no ranking has two different completions with different scores.
        """
        rows: list[Ranking] = self.useful(split)
        check_prompt_ids([row.prompt for row in rows], "preferences.path")
        rows_of_prompt: dict[str, list[Ranking]] = {}
        for row in rows:
            rows_of_prompt.setdefault(row.prompt.id, []).append(row)
        found = RankingSet([])
        for same in rows_of_prompt.values():
            candidates: list[tuple[str, float, tuple[int, ...]]] = []
            for row in same:
                ids = row.completion_ids or [()] * len(row.completions)
                candidates += zip(row.completions, row.scores, ids, strict=True)
            # Of equal completions (the same tokens, or the same text if there are no tokens) the first counts.
            first = {each[2] or each[0]: each for each in reversed(candidates)}
            ranked = [each for each in candidates if first[each[2] or each[0]] is each]
            completions, scores, ids = zip(*sorted(ranked, key=lambda each: -each[1]), strict=True)
            if len(ranked) == 1 < len(candidates):
                found.num_identical += 1
            elif scores[0] == scores[-1]:
                found.num_tied += 1
            else:
                ids = ids if ids[0] else ()
                found.rankings.append(replace(same[-1], completions=completions, scores=scores, completion_ids=ids))
        problem = "no prompt has two different completions with different scores"
        numbers = f"{found.num_identical} have the same completion throughout, and {found.num_tied} the same score"
        problem = f"{problem}: of {len(rows_of_prompt)} {split} prompts {numbers}"
        remedy = "give data with better and worse completions, or sample more of each prompt"
        require(found.rankings, "preferences.path", problem, remedy=remedy)
        return found

    def learned(self, fields: Mapping[str, Any], row_id: str) -> list[RecordRow[Ranking]]:
        """The row's completions with their scores, in its order. Raises RowError."""
        if is_sampled(fields):
            return [self._sampled(fields)]
        is_pair = has(fields, self.chosen_field, self.rejected_field)
        is_chat = has(fields, self.messages_field) or (is_pair and self._has_own_prompt(fields))
        self.note_unread(fields, TOOLS, prompt=None if is_chat else self.prompt_field)
        if is_pair:
            turns, chosen, rejected = self._pair(fields)
            margin: Any = 1.0
            if (name := self.margin_field) is not None:
                margin = value_of(fields, name) if has(fields, name) else None
            if not _is_number(margin) or margin < 0:
                raise RowError(f"field {name!r}, by how much the chosen one is better, must be a number of at least 0")
            scored = [(chosen, float(margin)), (rejected, 0.0)]
        elif any(has(fields, name) for name in _names(self.completions_field)):
            turns, scored = self._prompt(fields), self._list(fields)
        else:
            raise MissingField(
                f"is not a pair (fields {self.chosen_field!r}, {self.rejected_field!r}), not a list of completions "
                f"(field {self.completions_field!r}) and not a line of rlft sample; it has {only(fields)}",
                remedy=_way_of_scored(fields),
            )
        turns, question = self.filled(turns, fields)
        check_none_unread(fields, turns, "leave such rows out: preferences are learned from texts alone")
        messages = chat(turns, self.system_prompt)
        if len(scored) == 1:  # the id that all rows of the prompt share
            row_id = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
        prompt = Prompt(id=row_id, messages=messages, answer="", tools=tools_of(fields))
        completions, scores = zip(*scored, strict=True)
        made = Ranking(prompt=prompt, completions=completions, scores=scores)
        return [RecordRow(identity=identity(question), made=made)]

    def _prompt(self, fields: Mapping[str, Any]) -> tuple[Message, ...]:
        for name in (self.messages_field, self.prompt_field):
            if has(fields, name) or not takes_question(self.prompt_template):
                return question_of(fields, name, self.template)
        problem = (
            f"has no prompt, neither field {self.messages_field!r} nor {self.prompt_field!r}; it has {only(fields)}"
        )
        is_transcript = _TURN.match(str(fields.get(self.chosen_field))) is not None
        raise MissingField(problem, remedy="set preferences.format=hh to read transcripts" if is_transcript else None)

    def _pair(self, fields: Mapping[str, Any]) -> Pair:
        names = self.chosen_field, self.rejected_field
        if self.format == "hh":
            return _pair_of_chats(*(transcript(text_of(fields, name), name) for name in names))
        if self.format == "implicit" and all(isinstance(value_of(fields, name), str) for name in names):
            return _pair_of_texts(*(text_of(fields, name) for name in names))
        if self._has_own_prompt(fields):
            return _pair_of_chats(*(messages_of(fields, name) for name in names))
        chosen, rejected = (only_text(completion_of(fields, name), "a completion of the pair") for name in names)
        return self._prompt(fields), chosen, rejected

    def _has_own_prompt(self, fields: Mapping[str, Any]) -> bool:
        """Whether the completions of a pair have the prompt as their beginning."""
        pair = [value_of(fields, name) for name in (self.chosen_field, self.rejected_field)]
        if self.format == "hh" or (self.format == "implicit" and all(isinstance(each, str) for each in pair)):
            return True
        return all(isinstance(turns, list | tuple) and len(turns) > 1 for turns in pair)

    def _list(self, fields: Mapping[str, Any]) -> list[tuple[str, float]]:
        name = self.completions_field
        texts = values_of(fields, name)
        has_scores = any(has(fields, each) for each in _names(self.scores_field))
        scores = values_of(fields, self.scores_field) if has_scores else None
        if _is_one(texts):
            if scores is None:
                raise RowError(f"there is no score (field {self.scores_field!r}) of its completion")
            texts, scores = [texts], scores if isinstance(scores, list | tuple) else [scores]
        forms = str | list | tuple | None
        if not isinstance(texts, list | tuple) or not all(isinstance(text, forms) for text in texts):
            raise RowError(f"field {name!r} must be a list of strings, it is {kind(texts)}")
        places = [i for i, text in enumerate(texts) if text is not None]
        if not places:
            raise UselessRow(f"has no completions in field {name!r}")
        if isinstance(scores, list | tuple) and len(scores) == len(texts):
            scores = [scores[i] for i in places]
        texts = [_completion(fields, str(name), texts[i]) for i in places]
        if scores is None:
            if not self.ranked:
                problem = f"there are no scores (field {self.scores_field!r})"
                raise RowError(problem, remedy="set preferences.ranked=true if the first completion is the best")
            return [(text, float(len(texts) - 1 - i)) for i, text in enumerate(texts)]
        numbers = [_score(score) for score in scores] if isinstance(scores, list | tuple) else []
        if len(numbers) != len(texts) or None in numbers:
            wanted = counted(len(texts), "number")
            raise RowError(f"field {self.scores_field!r} must be a list of {wanted}, one a completion")
        return [(text, number) for text, number in zip(texts, numbers, strict=True) if number is not None]

    def _sampled(self, fields: Mapping[str, Any]) -> RecordRow[Ranking]:
        line = parse_sampled(fields, with_tokens=self.token_ids == "sampled")
        rewards = {**line.rewards, "reward": line.reward}
        if self.rank_by not in rewards:
            known = " or ".join(["reward", *line.rewards])
            raise RowError(f"there is no reward {self.rank_by!r}", remedy=f"set preferences.rank_by to {known}")
        score = rewards[self.rank_by]
        if score is None:
            raise RowError(f"{self.rank_by!r} is null", remedy="rank by another reward (preferences.rank_by)")
        ids = (line.token_ids,) if self.token_ids == "sampled" else ()
        made = Ranking(prompt=line.prompt, completions=(line.completion,), scores=(score,), completion_ids=ids)
        return RecordRow(identity=identity(line.prompt.messages), made=made)


def transcript(text: str, name: str) -> tuple[Message, ...]:
    """The turns of a transcript of HH-RLHF, which is in the field `name`."""
    before, *turns = _TURN.split(text)
    if before.strip() or not turns:
        raise RowError(f"field {name!r} is no transcript of turns that begin with 'Human:' and 'Assistant:'")
    spoken = zip(turns[::2], turns[1::2], strict=True)
    return tuple({"role": SPEAKERS[speaker], "content": content.strip()} for speaker, content in spoken)


def _pair_of_chats(chosen: Sequence[Message], rejected: Sequence[Message]) -> Pair:
    """The pair of chats that differ in their last message. UselessRow for others."""
    if chosen[:-1] != rejected[:-1]:
        raise UselessRow("has chats that differ before their last messages, so they answer different questions")
    roles = [turn["role"] for turn in chosen]
    if roles[-1] != "assistant" or roles[-2] not in ("user", "tool") or rejected[-1]["role"] != "assistant":
        raise UselessRow("has chats that do not end with an assistant message after a user message")
    better, worse = (only_text(turns[-1], "the last message of a chat") for turns in (chosen, rejected))
    return tuple(chosen[:-1]), better, worse


def _pair_of_texts(chosen: str, rejected: str) -> Pair:
    """The pair of texts whose common beginning, up to the white space before the first other word, is the prompt."""
    prompt = re.sub(r"\s*\S*\Z", "", chosen[: num_common(chosen, rejected)])
    if not prompt.strip():
        raise UselessRow("has two texts that do not begin alike, so there is no prompt")
    return ({"role": "user", "content": prompt},), chosen[len(prompt) :], rejected[len(prompt) :]


def _names(field: str | Sequence[str]) -> Sequence[str]:
    return [field] if isinstance(field, str) else field


def _is_one(completion: Any) -> bool:
    """Whether this is one completion, a text or a chat, and not a list of completions."""
    chat = completion if isinstance(completion, list | tuple) else ()
    return isinstance(completion, str) or isinstance(next(iter(chat), None), Mapping)


def _completion(fields: Mapping[str, Any], name: str, value: Any) -> str:
    """The text of a completion in the field `name` of a row, a text or one assistant message. Raises RowError."""
    row = TypedRow({name: value}) if isinstance(fields, TypedRow) else {name: value}
    return only_text(completion_of(row, name), f"a completion in field {name!r}")


def _score(value: Any) -> float | None:
    """A score, which may be a number in the text of a table, or whether a completion is good: 1 or 0; else None."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
        with contextlib.suppress(ValueError):
            value = float(value)
    return float(value) if isinstance(value, bool) or _is_number(value) else None


def _way_of_scored(fields: Mapping[str, Any]) -> str | None:
    """How to read rows of one completion with its score, where a row looks like one."""
    texts = [name for name in ("completion", "response", "output") if _is_one(fields.get(name))]
    scores = [name for name, value in fields.items() if isinstance(value, int | float)]
    if not texts or not scores:
        return None
    keys = f"preferences.completions_field={texts[0]} preferences.scores_field={scores[0]}"
    return f"set {keys} for completions with a score each, of which those of one prompt are ranked"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlPreferences(JsonlFiles, PreferenceKeys):
    """Rankings in files. A prompt's id is `<file>:<line>`; for sampled lines it is the prompt_id on the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPreferences(HubSet, PreferenceKeys):
    """Rankings in a hub set or local files in its format."""
