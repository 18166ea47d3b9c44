"""Tokenises, measures and fingerprints prompts, before the model is loaded; chooses the prompts of each step."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from rlft.data.records import Stored
from rlft.system.terminal import with_progress
from rlft.tokens.images import in_parts, processor_of
from rlft.tokens.messages import Unread, unread
from rlft.tokens.plain import PlainText, Tally
from rlft.tokens.text import RunTokenizer, rendered, tail
from rlft.types import NOTHING, Prompt, Shown, Split, UserError, counted, require

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK, CHUNK_CHARACTERS = 1000, 250_000  # the most that are tokenised in one call

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The tokenised prompts of one split, in the order of the data.

    Those of large data (rlft/data/jsonl.py) are stored: each access reads and tokenises a prompt.
    """

    prompts: Sequence[Prompt]
    texts: Stored[Prompt] | None = None  # those that are stored, not tokenised
    num_tokens: Sequence[int]
    fingerprint: str  # the sha256 (hex) over ids, token ids and answers in order, which a resumed run compares
    notes: tuple[str, ...]  # sentences for the person watching
    images: int = 0  # the most images of a prompt
    longest_with_images: int | None = None  # the index of the longest of those with images

    def longest(self, number: int | None = None) -> Prompt:
        """The longest of the first `number` prompts, or of all; the first one of equally long prompts."""
        lengths = self.num_tokens[:number]
        return self.prompts[max(range(len(lengths)), key=lengths.__getitem__)]


def scan(
    prompts: Sequence[Prompt],
    tokenizer: RunTokenizer,
    max_prompt_tokens: int,
    over_limit: Literal["drop", "refuse"],
    split: Split,
    style: Literal["chat", "raw"] = "chat",
    shown: Shown = NOTHING,
) -> PromptSet:
    """Tokenises the prompts of a split; prompts over the limit are dropped or refused.

    Style `chat` uses the tokenizer's chat template, which alone can render what is `shown` of an environment. `raw`, or
    a tokenizer without a template, joins the texts of the messages with blank lines.

    Raises UserError: there are no prompts, or none is left; an id occurs twice; prompts are too long and refused; the
    chat template does not accept the messages; or a prompt has no token.
    """
    require(len(prompts), "data", f"the {split} split is empty", remedy="choose other data")
    if not isinstance(prompts, Stored):  # the ids of large data are numbers of lines
        repeated = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
        problem = f"the {split} split has {counted(len(repeated), 'id')} more than once"
        require(not repeated, "data", problem, got=next(iter(repeated), None), remedy="give each prompt its own id")
    kept_in_memory: list[Prompt] = []
    kept, num_tokens, digest = array("I"), array("I"), hashlib.sha256()
    empty, long, longest, images, longest_with_images = list[str](), Tally(), 0, 0, None
    by_template, of_split = uses_template(tokenizer, style), split.replace("_", "-")
    find, found = PlainText(tokenizer), Findings(by_template=by_template)
    made, what = tokenised(prompts, tokenizer, style, shown), f"data: tokenising the {split} prompts"
    for index, prompt in enumerate(with_progress(made, what, len(prompts))):
        number = len(prompt.token_ids)
        if not number:
            empty.append(prompt.id)
        longest = max(longest, number)
        if number > max_prompt_tokens:
            long.add(f"{prompt.id} with {number}")
            continue
        if prompt.images and (longest_with_images is None or number > num_tokens[longest_with_images]):
            longest_with_images = len(kept)
        found.look(prompt, find)
        images = max(images, len(prompt.images))
        kept.append(index)
        num_tokens.append(number)
        digest.update(fingerprinted(prompt))
        if not isinstance(prompts, Stored):
            kept_in_memory.append(prompt)
    problem = f"{len(empty)} of {len(prompts)} {split} prompts have no token, so nothing can be predicted from them"
    remedy = "leave them out, or use prompts.style=chat, whose template gives each some tokens"
    require(not empty, "data", problem, got=next(iter(empty), None), remedy=remedy)
    problem = f"{long.number} of {len(prompts)} {split} prompts are longer, first {long.first}"
    remedy, is_fine = f"raise prompts.max_tokens (the longest has {longest})", bool(kept)
    if over_limit == "refuse":
        remedy, is_fine = f"{remedy}, or set prompts.over_limit=drop", not long.number
    require(is_fine, "prompts.max_tokens", problem, got=max_prompt_tokens, remedy=remedy)
    what, were = counted(long.number, f"{of_split} prompt"), "was" if long.number == 1 else "were"
    dropped = f"{what} longer than prompts.max_tokens={max_prompt_tokens} {were} dropped"
    kept_prompts: Sequence[Prompt] = tuple(kept_in_memory)
    texts = prompts[kept] if isinstance(prompts, Stored) else None
    if texts is not None:
        kept_prompts = texts.mapped(lambda prompt: next(tokenised([prompt], tokenizer, style, shown)))
    return PromptSet(
        prompts=kept_prompts,
        texts=texts,
        num_tokens=num_tokens,
        fingerprint=digest.hexdigest(),
        notes=(*([dropped] if long.number else []), *found.notes(len(kept), f"{of_split} prompts")),
        images=images,
        longest_with_images=longest_with_images,
    )


@dataclass(slots=True)
class Findings:
    """Counts of prompts in which texts spell what a chat template writes: its markers, or other special tokens."""

    by_template: bool
    marked: Tally = field(default_factory=Tally)
    rendered: Tally = field(default_factory=Tally)
    spelled: Tally = field(default_factory=Tally)

    def look(self, prompt: Prompt, plain: PlainText) -> None:
        texts = [message["content"] for message in prompt.messages]
        text = joined(prompt)
        if not self.by_template and plain.markers.is_rendering(text):
            self.rendered.add(plain.markers.answer)
            return
        spelled = "" if self.by_template else plain.spelled(texts)
        self.spelled.add(spelled)
        self.marked.add("" if spelled else next(filter(None, map(plain.markers.in_text, texts)), ""))

    def notes(self, number: int, what: str) -> Iterator[str]:
        """What the person watching should know about the `number` prompts."""
        if self.rendered.number:
            read = "renderings of the model's own chat template, whose special tokens are read as such"
            yield f"{self.rendered.number} of {number} {what} are {read}"
        if self.spelled.number:
            such = f"spell the special token {self.spelled.first}, which stays text"
            yield f"{self.spelled.number} of {number} {what} {such}: only a chat template writes special tokens"
        if self.marked.number:
            such = f"hold markers of a chat template, such as {self.marked.first}"
            style = "the model's own is written around them: prompts.style=raw reads such texts as they are"
            then = f"and {style}" if self.by_template else "which stay text"
            yield f"{self.marked.number} of {number} {what} {such}, {then}"


def untokenised(prompt_set: PromptSet) -> Sequence[Prompt]:
    """The prompts of the set; those that are stored without token ids, and with the first one's tail."""
    prompts, texts = prompt_set.prompts, prompt_set.texts
    if texts is None:
        return prompts
    tail = prompts[0].tail
    return texts.mapped(partial(replace, tail=tail)) if tail else texts


def joined(prompt: Prompt) -> str:
    """The text of a prompt without a chat template."""
    return "\n\n".join(message["content"] for message in prompt.messages)


def fingerprinted(prompt: Prompt) -> bytes:
    """A prompt's part of a set's fingerprint: JSON of id, token ids, answers and digests of images, and a newline."""
    images = [image.digest for image in prompt.images]
    return json.dumps([prompt.id, prompt.token_ids, prompt.answer, *prompt.other_answers, *images]).encode() + b"\n"


def tokenizer_fingerprint(tokenizer: RunTokenizer) -> str:
    """12 hex digits of a sha256 over the vocabulary with added tokens, the chat template and the end token."""
    contents = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:12]


def prompts_for_step(num_prompts: int, prompts_per_step: int, seed: int, step: int) -> list[int]:
    """Indices of the prompts of one step; `step` is the number of steps finished before it, from 0.

    Epoch e is a permutation of all prompts drawn from (seed, e), cut into whole steps. A remainder smaller than a step
    is skipped; the next epoch permutes all prompts again. So no prompt occurs twice in an epoch or in a step. If a step
    takes more prompts than exist, epochs follow each other without a gap, and prompts repeat. This is a pure function
    of its arguments: a resumed run needs no other cursor than its step.

    >>> prompts_for_step(4, 2, seed=0, step=0), prompts_for_step(4, 2, seed=0, step=1)
    ([3, 1], [0, 2])
    """
    if num_prompts < 1 or prompts_per_step < 1 or step < 0:
        numbers = f"{num_prompts}, {prompts_per_step}, {step}"
        raise ValueError(f"need num_prompts >= 1, prompts_per_step >= 1, step >= 0: {numbers}")
    if num_prompts >= prompts_per_step:
        epoch, step_of_epoch = divmod(step, num_prompts // prompts_per_step)
        start = step_of_epoch * prompts_per_step
        return permutation(num_prompts, seed, epoch)[start : start + prompts_per_step].tolist()
    positions = range(step * prompts_per_step, (step + 1) * prompts_per_step)
    return [int(permutation(num_prompts, seed, p // num_prompts)[p % num_prompts]) for p in positions]


@lru_cache(maxsize=2)
def permutation(num_prompts: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of the prompts in an epoch, read-only. numpy promises that the stream of RandomState never changes."""
    seed_words = np.frombuffer(hashlib.sha256(f"{seed}/{epoch}".encode()).digest(), dtype="<u4")
    order = np.random.RandomState(seed_words).permutation(num_prompts)
    order.flags.writeable = False
    return order


def tokenised(
    prompts: Iterable[Prompt], tokenizer: RunTokenizer, style: str, shown: Shown = NOTHING
) -> Iterator[Prompt]:
    """The prompts with their tokens, up to the start of their completions; `style` and `shown` are as in `scan`."""
    by_template = uses_template(tokenizer, style)
    for chunk in chunked(prompts, lambda prompt: sum(len(message["content"]) for message in prompt.messages)):
        for tools, alike in groupby(chunk, key=lambda prompt: prompt.tools):
            same = list(alike)
            texts, ids, short = _tokenise(same, tokenizer, style, replace(shown, tools=tools) if tools else shown)
            for prompt, text, prompt_ids, template_ids in zip(same, texts, ids, short, strict=True):
                begun = tail(tokenizer, text, by_template=by_template)
                of_images = tuple(template_ids) if prompt.images else ()
                yield replace(prompt, token_ids=tuple(prompt_ids), tail=begun, template_ids=of_images)


def chunked(items: Iterable[Item], characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in order, in chunks for one call of the tokenizer, which takes about 100 bytes of memory per token."""
    chunk: list[Item] = []
    size = 0
    for item in items:
        item_size = characters(item)
        if chunk and (len(chunk) == CHUNK or size + item_size > CHUNK_CHARACTERS):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += item_size
    if chunk:
        yield chunk


def _tokenise(
    prompts: Sequence[Prompt], tokenizer: RunTokenizer, style: str, shown: Shown
) -> tuple[Sequence[str], Sequence[Sequence[int]], Sequence[Sequence[int]]]:
    """(the text of each prompt, its tokens, its tokens with one for each image)."""
    plain = PlainText(tokenizer)
    if not uses_template(tokenizer, style):
        with_images = next((prompt.id for prompt in prompts if prompt.images), None)
        problem, remedy = f"{with_images!r} has images, which only a chat template places", "use chat, and such a model"
        require(with_images is None, "prompts.style", problem, got=style, remedy=remedy)
        texts = list(map(joined, prompts))
        for prompt, text in zip(prompts, texts, strict=True):
            for missing in unread(tokenizer, prompt.messages, text, prompt.tools, by_template=False):
                raise _unread(prompt, missing)
        ids = plain.ids(*plain.cut_texts(texts, said=False), partial(raw_prompt_ids, tokenizer))
        return texts, ids, ids
    from jinja2.exceptions import TemplateError

    processor = processor_of(tokenizer) if any(prompt.images for prompt in prompts) else None
    conversations = [shown.messages(p.messages) for p in prompts]
    cut, tools, gap = plain.cut(conversations, shown.tools)
    try:
        parted = [in_parts(c) if p.images else c for p, c in zip(prompts, cut, strict=True)]
        texts = rendered(tokenizer, parted, tools=tools, start=True)
    except TemplateError as error:
        has_system = any(p.messages[0]["role"] == "system" for p in prompts)
        problem = f"the model's chat template refuses it ({error})"
        raise _refused(problem, is_system=has_system, otherwise="use data whose turns it takes") from error
    except Exception as error:  # a template is a program of somebody else's: it may raise anything
        problem = f"its chat template fails ({type(error).__name__}: {error})"
        remedy = "put a template that works into the model's folder as chat_template.jinja, or set prompts.style=raw"
        raise UserError("model.path", problem, got=tokenizer.name_or_path or None, remedy=remedy) from error
    ids = short = plain.ids(texts, gap)
    if processor is not None:
        texts = [processor.expanded(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
        ids = plain.ids(texts, gap)
    texts = [text.replace(gap, "") for text in texts] if gap else texts
    for prompt, conversation, text in zip(prompts, conversations, texts, strict=True):
        for missing in unread(tokenizer, conversation, text, shown.tools):
            raise _unread(prompt, missing)
    return texts, ids, short


def raw_prompt_ids(tokenizer: RunTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text that a model is to continue: the tokenizer's own beginning once, and no end.

    Some tokenizers also put an end token behind a text, which the policy would take for the end of what it continues.
    """
    rows: Any = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    begin = _beginning(tokenizer)
    return [row if begin and row[: len(begin)] == begin else [*begin, *row] for row in rows]


def _beginning(tokenizer: RunTokenizer) -> list[int]:
    """The special tokens that the tokenizer puts before a text, or is configured to (`add_bos_token`)."""
    encoded: Any = [tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)]
    whole, text = encoded
    begin: list[int] = list(takewhile(lambda token: token != text[0], whole))
    bos = tokenizer.bos_token_id
    if not begin and isinstance(bos, int) and tokenizer.init_kwargs.get("add_bos_token"):
        return [bos]
    return list(dict.fromkeys(begin))


def _unread(prompt: Prompt, missing: Unread) -> UserError:
    """The error of what the chat template leaves out of a prompt."""
    if missing.index is None:
        problem = f"the model's chat template does not show {missing.what} of prompt {prompt.id!r}"
        remedy = "use a model whose template shows tools, or leave the rows' tools out"
        return UserError("model.path", problem, remedy=remedy)
    leaves_out = f"leaves out {missing.what} of prompt {prompt.id!r}, so the policy never reads it"
    problem, is_system = f"the model's chat template {leaves_out}", missing.what == "the system's message"
    otherwise = "use data whose turns it writes, or prompts.style=raw"
    return _refused(problem, got=repr(missing.said[:60]), is_system=is_system, otherwise=otherwise)


def _refused(problem: str, *, is_system: bool, otherwise: str, got: str | None = None) -> UserError:
    """The error of a message that the template does not take; `otherwise` is the remedy if it is no system message."""
    remedy = "set data.system_prompt=null and say it in data.prompt_template" if is_system else otherwise
    return UserError("data.system_prompt" if is_system else "data", problem, got=got, remedy=remedy)


def uses_template(tokenizer: RunTokenizer, style: str) -> bool:
    """Whether prompts of this style are written by the tokenizer's chat template."""
    return style != "raw" and bool(tokenizer.chat_template)
