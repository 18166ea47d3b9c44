"""What a run reads besides its prompts: pretraining text, and prompts with a hint that only the teacher reads.

PPO-ptx (InstructGPT, arXiv 2203.02155) adds gamma_ptx * (-mean log-prob per token of pretraining text) to the loss, so
that the policy keeps modelling it. A text may begin with a given part, which the model reads but does not learn to
predict, like the question of a chat.

With a hint, a base that has read the answer teaches itself without it. This is self-distillation as in "context
distillation" (Snell 2022, arXiv 2209.15189), on the student's own samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlft.config.model import ANSWER
from rlft.data.fields import MissingField, RowError, value_of
from rlft.data.files import files_at, parsed, tables
from rlft.data.first_rows import check_first_rows
from rlft.data.prompts import chunked, prompts_for_step, tokenised
from rlft.system.lazy import torch
from rlft.system.seeds import derive
from rlft.tokens.text import RunTokenizer
from rlft.types import Batch, Group, Prompt, UserError, are, counted, require

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

PATH = "pretrain.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to learn, and its context: the text before it that is not learned ("" where there is none)."""

    context: str
    text: str


def load_texts(path: str, field: str, given_field: str | None, nested: str | None = None) -> list[Text]:
    """The texts of all rows of `files_at(path)`, in order and unchanged; `given_field` has their contexts.

    UserError: a file cannot be read, or there is no row; a field is missing or of another type, or a text is empty.
    """
    texts = [text for _, text in parsed(path, PATH, nested, _parser(field, given_field))]
    require(texts, PATH, "holds no texts", got=path, remedy="give a file with one JSON object a line")
    return texts


def check_texts(path: str, field: str, given_field: str | None, nested: str | None = None) -> None:
    """Checks the first rows of what `load_texts` reads. Raises UserError."""
    check_first_rows(tables(files_at(path, PATH), PATH, nested), _parser(field, given_field), PATH)


def _parser(field: str, given_field: str | None) -> Callable[[Mapping[str, Any], str], list[Text]]:
    problem = "is the key of the text itself (pretrain.field)"
    remedy = "name the field of what stands before the text, or set it to null"
    require(given_field != field, "pretrain.given_field", problem, got=given_field, remedy=remedy)

    def parse(fields: Mapping[str, Any], row_id: str) -> list[Text]:
        context = "" if given_field is None else _string(fields, "given_field", given_field)
        text = _string(fields, "field", field)
        if not text.strip():
            raise RowError("the text is empty", remedy="fix or remove it")
        return [Text(context=context, text=text)]

    return parse


def _string(fields: Mapping[str, Any], key: str, field: str) -> str:
    """The text in `field`, which the config key `key` names. Raises RowError."""
    remedy = f"name the field that holds {'the text' if key == 'field' else 'what stands before the text'}"
    try:
        value = value_of(fields, field)
    except RowError as error:
        raise MissingField(str(error), remedy=remedy, key=key) from None
    if not isinstance(value, str):
        problem = f"it must hold a string, it holds {type(value).__name__}, got {field}"
        raise RowError(problem, remedy=f"{remedy}, or fix that row", key=key)
    return value


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
