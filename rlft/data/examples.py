"""Tokenises, measures and fingerprints texts, demonstrations and rankings, before the model is loaded.

Texts are what a run reads besides its prompts. PPO-ptx (InstructGPT, arXiv 2203.02155) adds gamma_ptx * (-mean log-prob
per token of pretraining text) to the loss, so that the policy keeps modelling it. A text may begin with a given part,
which the model reads but does not learn to predict, like the question of a chat. With a hint in its prompts, a base
that has read the answer teaches itself without it. This is self-distillation as in "context distillation" (Snell 2022,
arXiv 2209.15189), on the student's own samples.

A completion that was sampled keeps its tokens. Any other is tokenised separately from its prompt, as an engine would
have returned it, with what the model's chat template writes after the prompt, and the tokens that end a turn. Some
templates write more than the text: Qwen3 an empty `<think></think>`, gpt-oss a channel. It is learned with the text, so
that prompt and completion have the tokens of the template's own conversation.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from rlft.config.model import ANSWER
from rlft.config.schema import PromptsConfig
from rlft.data.fields import text_of
from rlft.data.files import check_first_rows, files_at, parsed, tables
from rlft.data.prompts import Findings, chunked, prompts_for_step, tokenised, tokenizer_fingerprint, uses_template
from rlft.data.records import check_tokenizer, sampled_with
from rlft.system.lazy import torch
from rlft.system.seeds import derive
from rlft.tokens.plain import PlainText, Tally
from rlft.tokens.text import (
    THINKING_FIELDS,
    RunTokenizer,
    TurnEnds,
    last_tag,
    num_common,
    rendered,
    special_pattern,
    turn_ends,
    without_tail,
)
from rlft.types import Batch, Demonstration, Group, Message, Prompt, Ranking, Split, UserError, are, counted, require

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

PATH = "pretrain.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to learn, and its context: the text before it that is not learned ("" where there is none)."""

    context: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextKeys:
    """The config keys that say which fields of a row hold a text and, unless null, its context."""

    field: str
    given_field: str | None

    def __post_init__(self) -> None:
        problem = "is the key of the text itself (pretrain.field)"
        remedy = "name the field of what stands before the text, or set it to null"
        require(self.given_field != self.field, "pretrain.given_field", problem, got=self.given_field, remedy=remedy)

    def parse(self, fields: Mapping[str, Any], row_id: str) -> list[Text]:
        """The row's text. Raises RowError."""
        context = "" if self.given_field is None else text_of(fields, self.given_field, blank=True)
        return [Text(context=context, text=text_of(fields, self.field))]


def load_texts(path: str, field: str, given_field: str | None, nested: str | None = None) -> list[Text]:
    """The texts of all rows of `files_at(path)`, in order and unchanged; `given_field` has their contexts.

    UserError: a file cannot be read, or there is no row; a field is missing or of another type, or a text is empty.
    """
    keys = TextKeys(field=field, given_field=given_field)
    texts = [text for _, text in parsed(path, PATH, nested, keys.parse)]
    require(texts, PATH, "holds no texts", got=path, remedy="give a file with one JSON object a line")
    return texts


def check_texts(path: str, field: str, given_field: str | None, nested: str | None = None) -> None:
    """Checks the first rows of what `load_texts` reads. Raises UserError."""
    keys = TextKeys(field=field, given_field=given_field)
    check_first_rows(tables(files_at(path, PATH), PATH, nested), keys.parse, PATH)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextTokens:
    """The tokens of a text, int32 `[tokens]`; the first `num_given` (1 or more) are given and not learned."""

    ids: NDArray[np.int32]
    num_given: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PretrainText:
    """Tokenised texts for training, in the order of the file, and for evaluation; they share no token sequence."""

    train_texts: tuple[TextTokens, ...]
    held_out_texts: tuple[TextTokens, ...]
    sequences_per_update: int
    updates_per_step: int
    fingerprint: str  # sha256 (hex) over given tokens (4 bytes, little-endian) and digest of the ids, of all texts
    note: str | None  # how many were cut, or dropped as they have no token to learn within the limit

    def batch(self, seed: int, step: int, update: int) -> Batch:
        """The texts of optimizer update number `update` (from 0) of the step that follows `step` finished steps.

        Like `prompts_for_step`, a pure function of its arguments; no text occurs twice in a pass over the texts.
        """
        if not 0 <= update < self.updates_per_step:
            raise ValueError(f"a step has {self.updates_per_step} updates, there is none with number {update}")
        update_number = step * self.updates_per_step + update
        order = derive(seed, 0, "pretrain")  # not the order of the prompts
        indices = prompts_for_step(len(self.train_texts), self.sequences_per_update, order, update_number)
        return as_batch([self.train_texts[i] for i in indices])

    def held_out(self) -> Batch:
        """The texts that are never trained on, the same ones every time."""
        return as_batch(self.held_out_texts)


def scan_texts(
    texts: Sequence[Text],
    tokenizer: RunTokenizer,
    *,
    max_tokens: int,
    sequences_per_update: int,
    held_out: int,
    updates_per_step: int,
) -> PretrainText:
    """Tokenises the texts, cuts them after `max_tokens`, and sets `held_out` of them aside for evaluation.

    Special tokens that are written in a text are read as such, and none are added. The given and the learned part are
    tokenised separately and joined, so no token belongs to both. A hash of its tokens decides whether a text is held
    out: equal texts are in the same split, whichever part of them is given, and neither order nor seed changes that.

    UserError: the limit is below 2 tokens, or there are too few texts to hold out that many or to fill an update.
    """
    contexts, learned = [text.context for text in texts], [text.text for text in texts]
    problem = "a text's first token is given, so it needs a second one to learn from"
    require(max_tokens >= 2, "pretrain.max_tokens", problem, got=max_tokens, remedy="use 2 or more")
    parts = zip(*(_text_ids(part, tokenizer) for part in (contexts, learned)), strict=True)
    whole = [TextTokens(ids=np.concatenate(both), num_given=max(len(both[0]), 1)) for both in parts]
    learnable = [text for text in whole if text.num_given < min(len(text.ids), max_tokens)]
    kept = [replace(text, ids=text.ids[:max_tokens]) for text in learnable]
    digests = [hashlib.sha256(text.ids.tobytes()).digest() for text in kept]
    distinct = dict(zip(digests, kept, strict=True))
    within, found = f"pretrain.max_tokens={max_tokens}", counted(len(distinct), "different text")
    problem = f"there {are(len(distinct))} only {found} with a token to learn within {within}"
    problem += ", and some must be left to train on"
    remedy = "use fewer, more text, or a higher pretrain.max_tokens"
    require(len(distinct) > held_out, "pretrain.held_out", problem, got=held_out, remedy=remedy)
    held_out_digests = set(sorted(distinct)[:held_out])
    train_texts = [text for text, digest in zip(kept, digests, strict=True) if digest not in held_out_digests]
    key, number = "pretrain.sequences_per_update", len(train_texts)
    problem = f"pretrain.held_out={held_out} leaves only {counted(number, 'text')} to train on"
    remedy = f"use at most {number}, a lower pretrain.held_out, or more text"
    require(number >= sequences_per_update, key, problem, got=sequences_per_update, remedy=remedy)
    num_dropped, num_cut = len(whole) - len(learnable), sum(len(text.ids) > max_tokens for text in learnable)
    notes = [f"{num_cut} were cut after {within}"] if num_cut else []
    notes += [f"{num_dropped} with no token to learn within {within} were dropped"] if num_dropped else []
    numbered = [text.num_given.to_bytes(4, "little") + digest for text, digest in zip(kept, digests, strict=True)]
    return PretrainText(
        train_texts=tuple(train_texts),
        held_out_texts=tuple(text for digest, text in distinct.items() if digest in held_out_digests),
        sequences_per_update=sequences_per_update,
        updates_per_step=updates_per_step,
        fingerprint=hashlib.sha256(b"".join(numbered)).hexdigest(),
        note=f"of {len(texts)} pretraining texts {', '.join(notes)}" if notes else None,
    )


def as_batch(texts: Sequence[TextTokens]) -> Batch:
    """The texts as right-padded rows `[B, T]`, each its own group: given tokens are the prompt, others the completion.

    They were not sampled and have no reward: `sampled_logprobs` and `rewards` are 0.
    """
    from rlft.batch import batch_of_rows  # which imports torch

    parts = ((text.ids[: text.num_given].tolist(), text.ids[text.num_given :].tolist()) for text in texts)
    return batch_of_rows([(number, *both) for number, both in enumerate(parts)])


def _text_ids(texts: Sequence[str], tokenizer: RunTokenizer) -> list[NDArray[np.int32]]:
    """The tokens of each text; special tokens written in it are read as such, and none are added."""
    return [
        np.array(ids, dtype="<i4")
        for chunk in chunked(texts, len)
        # Not verbose: a text that exceeds the model's context is cut afterwards, so no warning is needed.
        for ids in tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
    ]


def with_hint(prompt: Prompt, hint: str) -> Prompt:
    """The prompt with the hint at the end of its last message, after a blank line; not tokenised."""
    last = prompt.messages[-1]
    text = f"{last['content']}\n\n{hint.replace(ANSWER, prompt.answer)}"
    return replace(prompt, messages=(*prompt.messages[:-1], {**last, "content": text}), token_ids=())


def teacher_prompts(groups: Sequence[Group], hint: str, tokenizer: RunTokenizer, style: str) -> Tensor:
    """int64 `[B, P]`: for each row of a Batch, the tokens of its prompt with the hint, padded with -1."""
    hinted = tokenised((with_hint(group.prompt, hint) for group in groups), tokenizer, style)
    rows = [prompt.token_ids for group, prompt in zip(groups, hinted, strict=True) for _ in group.rollouts]
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-1)


def longest_with_hint(prompts: Iterable[Prompt], hint: str, tokenizer: RunTokenizer, style: str) -> int:
    """Number of tokens of the longest prompt with the hint. UserError: it shows the answer, and some have none."""
    longest, without = 0, []
    for prompt in tokenised((with_hint(prompt, hint) for prompt in prompts), tokenizer, style):
        longest = max(longest, len(prompt.token_ids))
        if ANSWER in hint and not prompt.answer.strip():
            without.append(prompt.id)
    if without:
        lacking = counted(len(without), "train prompt")
        has = "has" if len(without) == 1 else "have"
        problem = f"shows the prompt's answer, and {lacking} {has} none, first {without[0]}"
        remedy = f"leave {ANSWER} out, or name the field that has the answer (data.answer_field)"
        raise UserError("snapshot.teacher_hint", problem, got=repr(hint), remedy=remedy)
    return longest


# -- demonstrations and rankings ---------------------------------------------------------------------------------------
PART_OF_A_TAG = re.compile(r"<[^<>\s]*$")

Said = tuple[Prompt, str | Message]
"""A prompt and what answers it: a text, or an assistant's message, which may have calls of tools and thoughts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTokens:
    """A prompt and its completions as token ids, the best first, with the scores that rank them."""

    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    reference: tuple[float, ...] = ()  # log-prob of each by a reference, in nats, summed; empty without one


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """The tokenised demonstrations of one split, the sha256 (hex) over their tokens, and notes about them."""

    texts: tuple[TextTokens, ...]
    fingerprint: str
    notes: tuple[str, ...]

    def batch(self, chosen: Iterable[int]) -> Batch:
        """The examples at these positions as rows; those with the same prompt form a group, which computes it once."""
        texts = sorted((self.texts[i] for i in chosen), key=lambda text: text.ids[: text.num_given].tobytes())
        prompts = [text.ids[: text.num_given].tobytes() for text in texts]
        groups = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        return replace(as_batch(texts), group_ids=torch.tensor([groups[prompt] for prompt in prompts]))

    def at(self, seed: int, step: int, count: int) -> Batch:
        """The examples of the update that follows `step` steps; none occurs twice in a pass over them."""
        return self.batch(prompts_for_step(len(self.texts), count, derive(seed, 0, "examples"), step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rankings:
    """The tokenised rankings of one split; fingerprint and notes are as in Examples."""

    rankings: tuple[RankedTokens, ...]
    fingerprint: str
    notes: tuple[str, ...]

    def positions(self, seed: int, step: int, count: int, purpose: str) -> list[int]:
        """Positions of the rankings of the update that follows `step` steps; none occurs twice in a pass over them."""
        return prompts_for_step(len(self.rankings), count, derive(seed, 0, purpose), step)


def scan_demonstrations(
    demonstrations: Sequence[Demonstration],
    tokenizer: RunTokenizer,
    prompts: PromptsConfig,
    max_completion_tokens: int,
    split: Split,
) -> Examples:
    """Tokenises the demonstrations; those over a limit are dropped or refused (prompts.over_limit).

    Raises UserError: they were sampled with another tokenizer, are too long and refused, or none is left.
    """
    given = _given([d.prompt for d in demonstrations], tokenizer, prompts.style, "demonstrations")
    what = f"{split} demonstrations"
    said = [
        (prompt, {"role": "assistant", "content": d.completion, **d.fields}, d.completion_ids)
        for d, prompt in zip(demonstrations, given, strict=True)
    ]
    completion_ids, unlike = _completions(said, tokenizer, prompts.style, what)
    texts = [
        TextTokens(ids=np.array([*prompt, *ids], dtype="<i4"), num_given=max(len(prompt), 1))
        for prompt, ids in zip((each.token_ids for each in given), completion_ids, strict=True)
        if len(prompt) <= prompts.max_tokens and len(ids) <= max_completion_tokens
    ]
    dropped = _note_of_dropped(len(demonstrations), len(texts), prompts, max_completion_tokens, what)
    tails = [(last_tag(prompt.tail), d) for prompt, d in zip(given, demonstrations, strict=True) if not d.fields]
    opened = [tag for tag, d in tails if tag and f"{tag[0]}/{tag[1:]}" not in d.completion]
    number = f"{counted(len(opened), f'{split} demonstration')} {are(len(opened))}"
    unclosed = f"{number} learned inside {opened[0]}, opened by the prompt and never closed" if opened else None
    spelled = _notes_of_spelled(given, [d.completion for d in demonstrations], tokenizer, prompts.style, what)
    notes = (*filter(None, [dropped, unlike, unclosed]), *spelled)
    parts = (f"{text.num_given}:".encode() + text.ids.tobytes() for text in texts)
    return Examples(texts=tuple(texts), fingerprint=_digest(parts), notes=notes)


def scan_rankings(
    rankings: Sequence[Ranking],
    tokenizer: RunTokenizer,
    prompts: PromptsConfig,
    max_completion_tokens: int,
    split: Split,
) -> Rankings:
    """Tokenises the rankings without completions over the limit; rankings that are left without a pair are dropped.

    UserError: as in `scan_demonstrations`.
    """
    given = _given([r.prompt for r in rankings], tokenizer, prompts.style, "preferences")
    what = f"completions of {split} rankings"
    said = [
        (prompt, text, ids)
        for r, prompt in zip(rankings, given, strict=True)
        for text, ids in zip(r.completions, r.completion_ids or [()] * len(r.completions), strict=True)
    ]
    completion_ids, unlike = _completions(said, tokenizer, prompts.style, what)
    rows = iter(completion_ids)
    kept, num_cut = [], 0
    for ranking, prompt in zip(rankings, (prompt.token_ids for prompt in given), strict=True):
        tokens = [next(rows) for _ in ranking.completions]
        short = [i for i, row in enumerate(tokens) if len(row) <= max_completion_tokens]
        scores = tuple(ranking.scores[i] for i in short)
        if len(prompt) <= prompts.max_tokens and len(set(scores)) > 1:
            kept.append(RankedTokens(prompt=prompt, completions=tuple(tokens[i] for i in short), scores=scores))
            num_cut += len(tokens) - len(short)
    notes = [_note_of_dropped(len(rankings), len(kept), prompts, max_completion_tokens, f"{split} rankings")]
    if num_cut:
        problem = f"kept {split} rankings have {counted(num_cut, 'completion')} beyond {max_completion_tokens=}"
        notes.append(_dropped(problem, prompts, "raise it, or set prompts.over_limit=drop"))
    completions = [text for ranking in rankings for text in ranking.completions]
    spelled = _notes_of_spelled(given, completions, tokenizer, prompts.style, f"{split} rankings")
    parts = (repr((r.prompt, r.completions, r.scores)).encode() for r in kept)
    return Rankings(rankings=tuple(kept), fingerprint=_digest(parts), notes=(*filter(None, [*notes, unlike]), *spelled))


def _given(prompts: Sequence[Prompt], tokenizer: RunTokenizer, style: str, key: str) -> list[Prompt]:
    """The prompts with their tokens. UserError of `key`: completions of theirs were sampled with another tokenizer."""
    if samplers := sampled_with(prompts):
        check_tokenizer(samplers, tokenizer_fingerprint(tokenizer), key)
    return list(tokenised(prompts, tokenizer, style))


def _completions(
    texts: Sequence[tuple[Prompt, str | Message, Sequence[int]]], tokenizer: RunTokenizer, style: str, what: str
) -> tuple[list[tuple[int, ...]], str | None]:
    """(the tokens of each completion: those that were sampled, or else those of its turn; a note about the turns)."""
    turns, note = turns_of([(prompt, text) for prompt, text, ids in texts if not ids], tokenizer, style, what)
    written = iter(turns)
    return [tuple(ids) if ids else next(written) for _, _, ids in texts], note


def turns_of(
    said: Sequence[Said], tokenizer: RunTokenizer, style: str, what: str
) -> tuple[list[tuple[int, ...]], str | None]:
    """(the tokens of each turn with those that end it, a note if some of `what` are not as the template writes them).

    Raises UserError: nothing ends a turn; or there are calls of tools or thoughts that no template writes.
    """
    ends = turn_ends(tokenizer, style)
    problem = "its tokenizer has no end token, so completions could never end"
    require(ends.closing, "model.path", problem, remedy="set one")
    turns = [(p, {"role": "assistant", "content": turn} if isinstance(turn, str) else turn) for p, turn in said]
    plain, rows, problems = PlainText(tokenizer), list[tuple[int, ...]](), list[str]()
    if style != "chat" or not tokenizer.chat_template:
        for prompt, turn in turns:
            _check_written(prompt, turn, turn["content"])
        return [(*row, *ends.closing) for row in plain.ids_said([t["content"] + ends.lead for _, t in turns])], None
    for chunk in chunked(turns, lambda each: sum(len(m["content"]) for m in (*each[0].messages, each[1]))):
        for _, alike in groupby(chunk, key=lambda each: each[0].tools):
            texts, gap, found = _written(list(alike), tokenizer, ends, plain)
            problems += found
            ids = plain.ids([text for text, _ in texts], gap)
            rows += [(*row, *ends.closing) if closes else (*row,) for row, (_, closes) in zip(ids, texts, strict=True)]
    if not problems:
        return rows, None
    unlike = f"{len(problems)} of {len(said)} {what} are not learned as the chat template writes them"
    return rows, f"{unlike}: {Counter(problems).most_common(1)[0][0]}"


def _written(
    said: Sequence[tuple[Prompt, Message]], tokenizer: RunTokenizer, ends: TurnEnds, plain: PlainText
) -> tuple[list[tuple[str, bool]], str, list[str]]:
    """(what is learned of each turn, and whether its end is missing there; what cuts special tokens; what is unlike).

    The prompts show the same tools.
    """
    answered, tools, gap = plain.cut([[*prompt.messages, turn] for prompt, turn in said], said[0][0].tools)
    prompts = rendered(tokenizer, [messages[:-1] for messages in answered], tools=tools, start=True)
    try:
        whole = rendered(tokenizer, answered, tools=tools)
    except Exception as error:  # a template is a program of somebody else's: it may raise anything
        for prompt, turn in said:
            _check_written(prompt, turn, "", f" ({error})")
        refused = f"it refuses them ({error})"
        return [(messages[-1]["content"] + ends.lead, True) for messages in answered], gap, [refused] * len(said)
    texts, problems = [], []
    for start, conversation, messages, (prompt, turn) in zip(prompts, whole, answered, said, strict=True):
        if turn.get("tool_calls"):
            text, problem = learned(start, conversation, "", "")
            last = max((text.rfind(end) + len(end) for end in ends.names.values() if end in text), default=0)
            text, closes = text[: last or None], not last
            drops = "".join(messages[-1]["content"].split()) not in "".join(text.split())
            problem = "it drops a part of their text" if drops else problem
        else:
            text, problem = learned(start, conversation, messages[-1]["content"], ends.last)
            text, closes = text + ends.lead, True
        _check_written(prompt, turn, text.replace(gap, "") if gap else text)
        texts.append((text, closes))
        problems += [problem.replace(gap, "") if gap else problem] if problem else []
    return texts, gap, problems


def _check_written(prompt: Prompt, turn: Message, text: str, why: str = "") -> None:
    """Refuses a turn of which the template leaves out the calls or the thoughts: it would teach a turn without them."""
    bare = "".join(text.split())
    missing = [
        *("tool_calls" for call in turn.get("tool_calls", ()) if call["function"]["name"] not in text),
        *(key for key in THINKING_FIELDS if "".join(turn.get(key, "").split()) not in bare),
    ]
    if missing:
        answer = f"the answer to prompt {prompt.id!r}{why}"
        problem = f"the model's chat template does not write the {missing[0]} of {answer}"
        remedy = "leave them out of the data, write them into the content, or use a model whose template writes them"
        raise UserError("demonstrations", problem, remedy=remedy)


def learned(prompt: str, conversation: str, text: str, last: str) -> tuple[str, str]:
    """(what follows the prompt in this conversation, without its end, `last`; why that is not the text's turn, or "").

    If the prompt ends with what the template does not write there, such as an opened `<think>`, it is not repeated.

    >>> learned("Q A:", "Q A:<think></think>5<end>", "5", "<end>")
    ('<think></think>5', '')
    >>> learned("Q A:<think>", "Q A:5<end>", "<think>2+3</think>5", "<end>")
    ('2+3</think>5', 'it drops a part of their text')
    """
    turn = conversation.removesuffix(last)
    common = num_common(prompt, turn)
    if common < len(prompt):
        common = len(PART_OF_A_TAG.sub("", prompt[:common]))
    opened, rest = prompt[common:], turn[common:]
    problem = f"it does not write the end of the prompt, {opened!r}, in a conversation" if opened else ""
    if not (conversation.endswith(last) and "".join(turn.split()).endswith("".join(text.split()))):
        rest, problem = text, "it drops a part of their text"
    overlap = next((n for n in range(len(opened), 0, -1) if rest.startswith(opened[-n:])), 0)
    return rest[overlap:] if overlap else without_tail(rest, opened), problem


def _notes_of_spelled(
    prompts: Sequence[Prompt], completions: Sequence[str], tokenizer: RunTokenizer, style: str, what: str
) -> Iterator[str]:
    """Notes about prompts and completions that spell what a chat template writes."""
    plain = PlainText(tokenizer)
    found, marked = Findings(by_template=uses_template(tokenizer, style)), Tally()
    for prompt in prompts:
        found.look(prompt, plain)
    yield from found.notes(len(prompts), f"prompts of {what}")
    ends = special_pattern([name for name in turn_ends(tokenizer, style).names.values() if len(name) > 1])
    for text in completions:
        match = ends.search(text)
        marked.add(match[0] if match else plain.markers.in_text(text))
    if marked.number:
        such = f"spell what ends or begins a turn, such as {marked.first}, which is learned as text"
        yield f"{marked.number} of {len(completions)} completions of {what} {such}: leave it out of the data"


def _note_of_dropped(num_all: int, num_kept: int, prompts: PromptsConfig, limit: int, what: str) -> str | None:
    if num_kept == num_all > 0:
        return None
    limits = f"prompts.max_tokens={prompts.max_tokens} or max_completion_tokens={limit}"
    problem = f"{num_all - num_kept} of {num_all} {what} exceed {limits}"
    if not num_kept:
        raise UserError("max_completion_tokens", problem, remedy="raise them, or choose other data")
    return _dropped(problem, prompts, "raise them, or set prompts.over_limit=drop")


def _dropped(problem: str, prompts: PromptsConfig, remedy: str) -> str:
    """The note of what is dropped, or its refusal (prompts.over_limit)."""
    if prompts.over_limit == "refuse":
        raise UserError("max_completion_tokens", problem, remedy=remedy)
    return f"{problem}: dropped"


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
