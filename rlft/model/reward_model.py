"""Learned rewards: completions scored by an adapter with a scalar head on the shared base, or by a network of its own.

A score is scale x (the head's output - center). Both kinds forward their rows in micro-batches by token budget, and
give a completion the same score whatever else is in the step. The rows of token ids that `rlft rm` and `rlft dpo`
compare are made and divided here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlft.batch import Row, batch_of_rows
from rlft.config.model import is_adapter, resolve_path
from rlft.model.families import independent_limit
from rlft.model.network_files import Network, check_files, check_quantized, load_network, source_of
from rlft.model.networks import Networks
from rlft.model.packing import Layout
from rlft.model.roles import Roles
from rlft.system.device import resolve_dtype
from rlft.tokens.plain import PlainText
from rlft.tokens.text import RunTokenizer, render
from rlft.types import Batch, Completion, Group, Prompt, UserError, require


class Ranked(Protocol):
    """Completions of one prompt, which a loss compares with each other."""

    @property
    def prompt(self) -> tuple[int, ...]: ...
    @property
    def completions(self) -> Sequence[tuple[int, ...]]: ...


Item = TypeVar("Item", bound=Ranked)


def rows_of(items: Sequence[Ranked], ending: tuple[int, ...] = ()) -> list[Row]:
    """Every completion once, in order, with `ending` after it; those of one prompt are a group even across items."""
    groups = {prompt: number for number, prompt in enumerate(dict.fromkeys(item.prompt for item in items))}
    return [(groups[item.prompt], item.prompt, (*c, *ending)) for item in items for c in item.completions]


def parts_within(items: Sequence[Item], token_budget: int, *, packed: bool, ending: int = 0) -> list[list[Item]]:
    """The items in order, as many at a time as fit the token budget; one that exceeds it stands by itself.

    Packed, a prompt counts once in a part; otherwise every row counts as much as the longest. `ending` is the number of
    tokens that are added to each row.
    """
    parts: list[list[Item]] = []
    prompts: set[tuple[int, ...]] = set()
    tokens = longest = num_rows = 0
    for item in items:
        lengths = [len(completion) + ending for completion in item.completions]
        length = len(item.prompt) + max(lengths)
        total = tokens + sum(lengths) + (0 if item.prompt in prompts else len(item.prompt))
        fits = (total if packed else max(longest, length) * (num_rows + len(lengths))) <= token_budget
        if parts and fits:
            parts[-1].append(item)
        else:
            parts.append([item])
            prompts, longest, num_rows = set(), 0, 0
            total = len(item.prompt) + sum(lengths)
        prompts.add(item.prompt)
        tokens, longest, num_rows = total, max(longest, length), num_rows + len(lengths)
    return parts


def numbers_of_rows(
    roles: Roles, role: str | None, batch: Batch, token_budget: int, of_rows: Callable[[Batch, Layout], Tensor]
) -> Tensor:
    """float64 `[B]` on the CPU: a number for each row, computed with this role without gradient or dropout.

    `of_rows` computes the numbers `[rows]` of a micro-batch on the device, from its rows and their layout; role None is
    the bare base.
    """
    numbers_B = torch.zeros(len(batch.rewards), dtype=torch.float64)
    with torch.no_grad(), roles.using(role):
        found = [(part, of_rows(micro.batch, micro.layout)) for part, micro in roles.forward.parts(batch, token_budget)]
        for part, numbers in found:  # once all are computed, since each transfer waits for a GPU
            numbers_B[part] = numbers.cpu().double()
    return numbers_B


LearnedReward = Callable[[Sequence[Group]], list[list[float]]]
"""Scores P groups, `[P, G]`. It runs in the trainer's process, with the models, and takes a whole step at once."""

# -- rewards -----------------------------------------------------------------------------------------------------------
ENDING = 0  # the token that is added after each row, because a head is read before a token; nothing attends to it


def reward_role(name: str) -> str:
    """The adapter's role for the learned reward of this name."""
    return f"reward_{name}"


def open_learned(
    name: str,
    path: str | None,
    roles: Networks,
    *,
    token_budget: int,
    center: float,
    scale: float,
    learns: bool = False,  # whether the run trains it; without a path it is a new adapter with a head of zeros
) -> LearnedReward:
    """The learned reward of this name: an adapter folder becomes a role on the base, anything else is a classifier.

    Raises UserError: the folder cannot be read, does not fit, or has not exactly one label.
    """
    key = f"reward.{name}.path"
    if path is None or is_adapter(path):
        assert isinstance(roles, Roles), "plan/roles.py refuses reward adapters next to all weights"
        roles.add_scalar_role(reward_role(name), path, key, learns=learns)
        return AdapterReward(roles=roles, role=reward_role(name), token_budget=token_budget, center=center, scale=scale)
    device = roles.backbone.device
    model, tokenizer = load_classifier(path, key, device, resolve_dtype("auto", device))
    dated = RunTokenizer(tokenizer, date=roles.backbone.tokenizer.date)
    return ClassifierReward(model, dated, token_budget=token_budget, center=center, scale=scale)


# -- an adapter on the base ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReward:
    """Reads the head of `role` at the last token as sampled, or at the prompt's end if the completion is empty."""

    roles: Roles
    role: str
    token_budget: int
    center: float
    scale: float

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        rows = [
            (p, prompt, completion)
            for p, (prompt, completions) in enumerate(group.last_paths() for group in groups)
            for completion in completions
        ]
        scores = score_rows(self.roles, self.role, rows, self.token_budget)
        return _grouped([self.scale * (score - self.center) for score in scores], groups)


def scoring_batch(rows: Sequence[Row]) -> Batch:
    """The Batch of these rows, each with one more token (`ENDING`); on the CPU."""
    return batch_of_rows([(group, prompt, (*completion, ENDING)) for group, prompt, completion in rows])


def last_scores(roles: Roles, role: str, batch: Batch, layout: Layout | None = None) -> Tensor:
    """`[B]`: the role's head at the end of each row of a `scoring_batch`; the role must be the active one."""
    endings_B1 = batch.attention_mask.sum(1, keepdim=True) - 1
    return roles.forward.values(batch, roles.heads[role], layout).gather(1, endings_B1)[:, 0]


def score_rows(roles: Roles, role: str, rows: Sequence[Row], token_budget: int) -> list[float]:
    """The role's score of each row, without gradient or dropout."""
    return numbers_of_rows(roles, role, scoring_batch(rows), token_budget, partial(last_scores, roles, role)).tolist()


# -- a network of its own --------------------------------------------------------------------------------------------
@dataclass(eq=False)
class ClassifierReward:
    """The only logit of a sequence classifier, for the conversation as its own tokenizer writes it.

    With a chat template, the text is that of the prompt's messages and the completion as the assistant's turn; without
    one, their texts joined by line breaks. A text that is too long for the network loses its beginning.
    """

    model: PreTrainedModel
    tokenizer: RunTokenizer
    _: KW_ONLY
    token_budget: int
    center: float
    scale: float

    def __post_init__(self) -> None:
        text, most = self.model.config.get_text_config(), self.tokenizer.model_max_length
        self._max_tokens = min(most, getattr(text, "max_position_embeddings", None) or most)
        padding = getattr(text, "pad_token_id", None)
        self._own_padding = None if padding is None or padding < 0 else padding

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        rows = [self._encode(group.prompt, r.completion) for group in groups for r in group.rollouts]
        scores_B = torch.zeros(len(rows), dtype=torch.float64)
        limit = independent_limit(self.model.config)
        for part in micro_batches([len(row) for row in rows], self.token_budget):
            # next to a row beyond the limit another one would get another score
            alone = limit is not None and max(len(rows[b]) for b in part) > limit.tokens
            for together in [[b] for b in part] if alone else [part]:
                scores_B[together] = self._forward([rows[b] for b in together])
        return _grouped([self.scale * (score - self.center) for score in scores_B.tolist()], groups)

    def _encode(self, prompt: Prompt, completion: Completion) -> list[int]:
        messages = [
            *(dict(message) for message in prompt.messages),
            {"role": "assistant", "content": prompt.tail + completion.text},
        ]
        ids = self._tokenize(messages)
        cuts = len(ids) > self._max_tokens
        return self._tokenize(messages, truncation=True, max_length=self._max_tokens) if cuts else ids

    def _tokenize(self, messages: list[dict[str, str]], **limits: Any) -> list[int]:
        whole: Any
        if self.tokenizer.chat_template is None:
            whole = self.tokenizer("\n".join(message["content"] for message in messages), **limits)["input_ids"]
            return whole
        plain = PlainText(self.tokenizer)
        [cut], _, gap = plain.cut([messages])
        text = render(self.tokenizer, cut)
        if not gap:
            whole = self.tokenizer(text, add_special_tokens=False, **limits)["input_ids"]
            return whole
        [ids], most = plain.ids([text], gap), limits.get("max_length")
        return ids[-most:] if self.tokenizer.truncation_side == "left" and most else ids[:most]

    @torch.no_grad()
    def _forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """float64 `[B]` on the CPU. Rows are padded on the right, whichever side the tokenizer would choose."""
        ids, padding, device = [torch.tensor(row) for row in rows], self._padding_for(rows), self.model.device
        token_ids_BT = pad_sequence(ids, batch_first=True, padding_value=padding)
        mask_BT = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        logits_B1 = self.model(input_ids=token_ids_BT.to(device), attention_mask=mask_BT.to(device)).logits
        return logits_B1[:, 0].cpu().double()

    def _padding_for(self, rows: Sequence[Sequence[int]]) -> int:
        """The token id of padding: the model's own, or else one that ends no row.

        Decoders read their score at the last token that is not the padding token, and refuse batches if the config
        names none. Such a model was trained to be read at the last token, which must therefore not be the padding
        token.
        """
        if self._own_padding is not None:
            return self._own_padding
        padding = min(set(range(len(rows) + 1)) - {row[-1] for row in rows})
        for config in (self.model.config, self.model.config.get_text_config()):
            config.pad_token_id = padding
        return padding


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Row indices by length, as many at a time as fit the budget when padded; a row that exceeds it stands alone.

    >>> micro_batches([5, 2, 9, 3], token_budget=6), micro_batches([4, 4, 4], 8), micro_batches([], 8)
    ([[1, 3], [0], [2]], [[0, 1], [2]], [])
    """
    parts: list[list[int]] = []
    for b in sorted(range(len(lengths)), key=lambda b: lengths[b]):
        if parts and (len(parts[-1]) + 1) * lengths[b] <= token_budget:
            parts[-1].append(b)
        else:
            parts.append([b])
    return parts


def load_classifier(
    path: str, key: str, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A frozen sequence classifier with one label, and its tokenizer, from a folder or the hub; runs none of its code.

    Raises UserError: it cannot be read, has another number of labels, or lacks weights, such as those of its score.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source_of(resolve_path(path)))
        model = load_network(_network(path, key), dtype=dtype)
    except (OSError, ValueError) as error:
        raise _unreadable(error, path, key) from None
    model.config.use_cache = False
    tokenizer.truncation_side = "left"
    model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
    return model.requires_grad_(False).eval(), tokenizer


def check_classifier(path: str, key: str) -> Network:
    """Refuses what `load_classifier` does, by the headers of its files."""
    network = _network(path, key)
    check_files(network)
    return network


def _network(path: str, key: str) -> Network:
    config, source = read_classifier(path, key), source_of(resolve_path(path))
    return Network(loader=AutoModelForSequenceClassification, config=config, source=source, key=key)


def read_classifier(path: str, key: str) -> Any:
    """The config of a sequence classifier with one label, from a folder or the hub; reads no weights.

    Raises UserError: it cannot be read, or has another number of labels.
    """
    try:
        config = AutoConfig.from_pretrained(**source_of(resolve_path(path)))
    except (OSError, ValueError) as error:
        raise _unreadable(error, path, key) from None
    causal = [name for name in config.architectures or [] if name.endswith(("ForCausalLM", "LMHeadModel"))]
    if causal:
        problem = f"it holds a causal language model ({causal[0]}), which gives no score"
        remedy = "train a reward model with rlft rm, or point it at a sequence-classification model"
        raise UserError(key, problem, got=path, remedy=remedy)
    problem = "a reward model gives one score, this model's config has another num_labels"
    remedy = "point it at a sequence-classification model with num_labels 1, or at an adapter folder"
    require(config.num_labels == 1, key, problem, got=config.num_labels, remedy=remedy)
    check_quantized(config, path, key)
    return config


def _unreadable(error: Exception, path: str, key: str) -> UserError:
    problem = f"the reward model cannot be read ({str(error).strip().splitlines()[0][:200]})"
    remedy = "point it at an adapter folder that rlft has made, or at a sequence-classification model"
    return UserError(key, problem, got=path, remedy=remedy)


def _grouped(scores: Sequence[float], groups: Sequence[Group]) -> list[list[float]]:
    """`[P, G]` from the scores of all completions in order."""
    remaining = iter(scores)
    return [[next(remaining) for _ in group.rollouts] for group in groups]
