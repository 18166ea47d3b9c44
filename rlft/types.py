"""The nouns of rlft: the values that each stage of the loop hands to the next.

P prompts, G completions per prompt, B = P * G sequences, T tokens. One alignment law: `logprobs[b, t]` belongs to
`token_ids[b, t]`. Rows are right-padded; what lies under the padding never matters. Token ids go in and out of the
generator; text is never tokenised again.

This file imports no torch at run time, so that data and rule rewards (and their worker processes) stay light.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from numpy import ndarray
    from torch import Tensor

Message = Mapping[str, Any]
"""One chat turn: {"role": "system" | "user" | "assistant" | "tool", "content": text}, with other fields of its role."""


Schema = Mapping[str, Any]  # a tool as chat templates show it: `transformers.utils.get_json_schema`


IMAGE = "\ufffc"  # stands for an image in the text of a message: Unicode's character for an object among text


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image of a prompt, as the data give it: a file (PNG, JPEG ..) or its content, decoded where it is used."""

    digest: str  # 16 hex digits that identify the content
    path: str = ""  # the file; "": the data give the content
    data: bytes = field(default=b"", repr=False)  # the content; empty: it is in `path`


class Split(StrEnum):
    train = "train"
    held_out = "held_out"


class FinishReason(StrEnum):
    """Why a completion ended: the policy ended it (or an environment, whose game is over), or a limit did."""

    stop = "stop"
    length = "length"  # generation.max_tokens, or environment.turn_tokens
    turns = "turns"  # environment.max_turns
    calls = "calls"  # environment.max_tool_calls
    time = "time"  # environment.timeout

    @property
    def is_limit(self) -> bool:
        return self is not FinishReason.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTurn:
    """Where the conversation stands whose next turn is sampled."""

    turn: int  # number of the policy's turns before it
    seed: int  # of the conversation's first turn
    max_tokens: int  # bounds this turn, where it is less than the sampling's


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question with its reference answer. `token_ids` is filled by the scan that tokenises the data (prompts.py)."""

    id: str
    messages: tuple[Message, ...]
    answer: str
    token_ids: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # Of a conversation whose next turn is asked for; `token_ids` hold all of it up to there.
    next_turn: NextTurn | None = None
    # What the prompt has begun to say for the policy at its end, such as an opened <think>; filled with token_ids. It
    # belongs to the turn: rewards read tail and completion as one text.
    tail: str = ""
    num_examples: int = 0  # messages after the system's that are worked examples (data.few_shot)
    other_answers: tuple[str, ...] = ()  # further reference answers: a completion that gives any of them is right
    tools: tuple[Schema, ...] = ()  # schemas of tools that the data show, not an environment
    images: tuple[Image, ...] = ()  # one for each IMAGE in the messages' texts, in order
    # With images, the tokens that the chat template writes, one for each image, where `token_ids` have those of the
    # image's vectors. Engines that read images themselves take these.
    template_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a prompt shows besides its own messages: schemas, and a text before the user's first message or ""."""

    tools: tuple[Schema, ...] = ()
    preamble: str = ""

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the preamble."""
        shown = [dict(message) for message in messages]
        if self.preamble:
            first = next((m for m in shown if m["role"] == "user"), shown[0])
            first["content"] = f"{self.preamble}\n\n{first['content']}"
        return shown


NOTHING = Shown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and a completion to learn from."""

    prompt: Prompt
    completion: str
    completion_ids: tuple[int, ...] = ()  # as sampled, end token included; if empty, `completion` is tokenised with one
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the message besides: calls of tools, and thoughts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Completions of one prompt, the best first, with the scores that rank them; equal ones have no rank."""

    prompt: Prompt
    completions: tuple[str, ...]
    scores: tuple[float, ...]
    completion_ids: tuple[tuple[int, ...], ...] = ()  # of each as in Demonstration; if empty, all are tokenised


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call in a turn of the policy, name and arguments as the policy wrote them, and what it was answered."""

    name: str
    arguments: str
    answer: str  # the text that the policy reads next; the error's where the call failed
    failed: bool = False  # whether the call was malformed, or its tool raised or ran out of time
    cause: str = ""  # why it failed, a `rlft.environment.protocol.Cause`; "" where it did not


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy said in one go, and what it was answered."""

    end: int  # number of the completion's tokens up to the last one that was sampled in this turn, that one included
    text: str = ""
    answer: str = ""  # what the environment said then, without what the chat template puts around it
    reward: float | None = None  # what the environment gave for the turn; None: it gave nothing
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Where a completion leaves what stands before it and goes on from an earlier place: history was written anew.

    Its tokens are those from `start` up to the next branch. The policy has read the token at `after`, and all that was
    read before that one.
    """

    start: int  # number of the completion's tokens before the branch, at least 1
    # Index of the token that is read before the branch's first one, among the completion's tokens; negative: among the
    # prompt's, counted from its end, so that -1 is its last one.
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What followed a prompt: one turn of the policy, or several with what an environment or tools answered between.

    `token_ids` include the end token if there is one; `text` is what they decode to without the special tokens that
    mark turns (rlft/tokens/text.py), and without what the prompt has begun to say (`Prompt.tail`). If a stop
    string or stop token ended it, `token_ids` include that stop, and `text` ends as `Sampling` says.
    """

    text: str
    token_ids: Sequence[int]
    # Of the sampling policy, one per token id: natural log, with temperature applied; 0 where `mask` is False.
    logprobs: Sequence[float]
    finish_reason: FinishReason
    # One per token id: whether the policy sampled it. False: an environment or the chat template put it there; the
    # policy reads it and is not trained on it. None: all were sampled.
    mask: Sequence[bool] | None = None
    turns: tuple[Turn, ...] = ()  # in order; empty for a completion of a single turn that nothing answered
    # In order; empty where each token was read behind all tokens that stand before it.
    branches: tuple[Branch, ...] = ()
    # uint8 or int16 `[tokens of prompt and completion, layers, k]`, the experts that the engine has chosen for each
    # token (`Sampling.notes_experts`); the dtype's largest number where it has chosen none.
    experts: ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def num_sampled(self) -> int:
        """The completion's length, wherever one is meant: the tokens that the policy sampled."""
        return len(self.token_ids) if self.mask is None else sum(self.mask)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickling, which takes a frozen dataclass several times as long by itself."""
        return _completion, tuple(getattr(self, name) for name in self.__slots__)


def _completion(*values: Any) -> Completion:
    return Completion(**dict(zip(Completion.__slots__, values, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A completion and the version of the policy adapter that sampled it (`None`: the bare base model)."""

    prompt: Prompt
    completion: Completion
    policy_version: int | None

    def last_path(self) -> tuple[int, ...]:
        """The token ids that the policy has read and said up to the completion's last one, prompt and all."""
        prompt, said = tuple(self.prompt.token_ids), tuple(self.completion.token_ids)
        path: tuple[int, ...] = ()
        end = len(said)
        for branch in reversed(self.completion.branches):
            if branch.start < end:  # not one that has been left before the place where the path comes from
                path, end = (*said[branch.start : end], *path), branch.after + 1
        return (*prompt[: len(prompt) + min(end, 0)], *said[: max(end, 0)], *path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """G siblings: completions of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    def last_paths(self) -> tuple[Sequence[int], list[Sequence[int]]]:
        """(token ids with which all last paths begin, up to the prompt's end; those that follow in each)."""
        prompt = self.prompt.token_ids
        if not any(rollout.completion.branches for rollout in self.rollouts):
            return prompt, [rollout.completion.token_ids for rollout in self.rollouts]
        paths = [rollout.last_path() for rollout in self.rollouts]
        columns = enumerate(zip(prompt, *paths, strict=False))
        shared = next((i for i, column in columns if len({*column}) > 1), len(prompt))
        return prompt[:shared], [path[shared:] for path in paths]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """A process reward's scores: `values[k]` is that of the step whose text ends before character `ends[k]`.

    `ends` are exclusive offsets into `Completion.text`, strictly increasing, at most its length. Without steps both
    are empty.
    """

    values: tuple[float, ...]
    ends: tuple[int, ...]


class Verdict(float):
    """The score of a completion by a reward that reads an answer in it: a number that also has the answer.

    `answer` is a normal form: answers that the reward takes for the same have the same one. None: it read no answer.
    """

    __slots__ = ("answer",)
    answer: str | None

    def __new__(cls, score: float, answer: str | None = None) -> Verdict:
        if not isinstance(answer, str | None):
            raise TypeError(f"the answer of a Verdict is text or None, got {answer!r:.80}")
        verdict = super().__new__(cls, score)
        verdict.answer = answer
        return verdict


MAX_SCORE = 1e12
"""The largest size of a score times its weight: squares of it, and their sums, are finite in float32, and a difference
of 1 between two scores still counts in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Rewards of a step, `[P, G]` float64."""

    total: Tensor  # the weighted sum of all rewards, plus what environments gave for turns
    # Each reward unweighted, a process reward as the sum of its steps; `turns`, where an environment gave any: the sum
    # of what it gave for the turns of a completion.
    by_reward: Mapping[str, Tensor]
    # The weighted sum of the rewards that score whole completions; None if nothing else is in `total`.
    outcome: Tensor | None = None
    # The weighted step scores of all process rewards together, `steps[p][g]` in the order of their ends; None if no
    # reward scores steps.
    steps: Sequence[Sequence[StepScores]] | None = None
    # Each reward's factor in `total`; one that is not named has 1.
    weights: Mapping[str, float] = field(default_factory=dict)
    # {reward that reads answers: the answer in each completion, `[P][G]`}, as in a Verdict.
    answers: Mapping[str, Sequence[Sequence[str | None]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The groups that a step trains on, and how many completions were sampled for it, discarded ones included."""

    groups: list[Group]
    scores: Scores
    num_sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRows:
    """What a model reads in rows of tokens `[B, T]`, some of which are images'."""

    vectors: Tensor  # `[K, hidden]`, in the model's dtype
    # `[L, K, hidden]`, what the first L layers add to their results at these tokens (Qwen3-VL); None: nothing.
    deep: Tensor | None
    # int64 `[B, T]`, which of the vectors is in the place of each token; TEXT: none, it is a token's embedding.
    rows: Tensor
    # int64 `[B, T, 3]`, of each token in time, height and width; None: the model has ordinary ones.
    positions: Tensor | None
    # A `rlft.model.images.ImageMasks`, which tokens see the rest of their image; None: each token sees only those
    # before it.
    masks: Any = None

    TEXT: ClassVar[int] = -1

    def __getitem__(self, rows: Tensor) -> ImageRows:
        """Those of these rows (int64 `[N]`) of the batch, with the vectors that they need."""
        chosen = self.rows[rows]
        used, places = chosen.flatten().unique(return_inverse=True)
        first = int(len(used) > 0 and used[0].item() == self.TEXT)
        return ImageRows(
            vectors=self.vectors[used[first:]],
            deep=None if self.deep is None else self.deep[:, used[first:]],
            rows=(places - first).view_as(chosen),
            positions=None if self.positions is None else self.positions[rows],
            masks=self.masks,
        )

    def to(self, device: torch.device) -> ImageRows:
        deep, positions = (None if x is None else x.to(device) for x in (self.deep, self.positions))
        vectors, rows = self.vectors.to(device), self.rows.to(device)
        return replace(self, vectors=vectors, deep=deep, rows=rows, positions=positions)

    def gathered(self, sources: Tensor) -> ImageRows:
        """Of rows `[B', N]` whose tokens stand at these places in the flattened rows (int64 `[B', N]`)."""
        positions = None if self.positions is None else self.positions.flatten(0, 1)[sources]
        return replace(self, rows=self.rows.flatten()[sources], positions=positions)

    def narrowed(self, width: int) -> ImageRows:
        """Of the first tokens of each row."""
        positions = None if self.positions is None else self.positions[:, :width]
        return replace(self, rows=self.rows[:, :width], positions=positions)

    def shifts(self, lengths: Tensor) -> Tensor:
        """int64 `[B]`: what is added to the number of a token behind `lengths` tokens to get its position."""
        if self.positions is None:
            return lengths * 0
        return self.positions.amax(-1).gather(1, lengths[:, None] - 1)[:, 0] + 1 - lengths

    def inputs(self, model: Any, token_ids: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        """The arguments of a forward of these rows' tokens in place of `input_ids`, of `position_ids` if the model has
        positions in height and width, and of `attention_mask` for padded rows with this mask (int64 `[B, T]`)."""
        is_image = self.rows != self.TEXT
        # Some vocabularies lack the token of an image, and what else is looked up for it is that of padding.
        token_ids = token_ids.masked_fill(is_image, model.config.get_text_config().pad_token_id or 0)
        embedded = model.get_input_embeddings()(token_ids)
        embedded = embedded.masked_scatter(is_image[..., None], self.vectors[self.rows[is_image]].to(embedded.dtype))
        arguments: dict[str, Any] = {"inputs_embeds": embedded}
        if mask is not None:
            arguments["attention_mask"] = (
                mask if self.masks is None else self.masks.of_rows(model, embedded, is_image, mask)
            )
        if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None):
            arguments["per_layer_inputs"] = model.get_decoder().get_per_layer_inputs(token_ids, None)
        if self.positions is not None:
            arguments["position_ids"] = self.positions.permute(2, 0, 1)
        if self.deep is not None:
            arguments["visual_pos_masks"] = is_image
            arguments["deepstack_visual_embeds"] = self.deep[:, self.rows[is_image]]
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The algorithm's view of a step, `[B, T]` float32 unless said; later fields are None until a stage adds them.

    Rewards are float64 until they are advantages: a small difference between large ones counts.

    `rewards` are of whole completions. What process rewards give for single steps, and environments for turns, is in
    `token_rewards`, at the last token of each step or turn, and not in `rewards`; None if there is nothing of the kind.

    A row is a tree where its completion has branches: `previous` names for each token the one that is read before it.
    """

    token_ids: Tensor  # int64
    attention_mask: Tensor  # bool: prompt and completion tokens
    loss_mask: Tensor  # bool: completion tokens that the policy sampled
    sampled_logprobs: Tensor
    rewards: Tensor  # float64 [B]
    group_ids: Tensor  # int64 [B]
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    reference_kl: Tensor | None = None  # KL(old || reference) over the whole vocabulary in the place of each token
    teacher_prompts: Tensor | None = None  # int64 [B, P]: what the teacher reads as the prompt, -1 after its end
    teacher_logprobs: Tensor | None = None
    teacher_top_k_ids: Tensor | None = None  # int64 [B, T, K]: the teacher's most likely tokens in the place of each
    teacher_top_k_logprobs: Tensor | None = None  # [B, T, K]: of these, by the teacher
    old_values: Tensor | None = None
    each_reward: Tensor | None = None  # float64 [B, K]: single rewards, of steps and turns their sum; weight 0 left out
    each_weight: Tensor | None = None  # float64 [B, K]: their weights, the same in all rows
    token_rewards: Tensor | None = None  # float64
    step_ends: Tensor | None = None  # bool: a scored step ends with this token (its score may be 0)
    turn_ends: Tensor | None = None  # bool: a turn ends with this token; None: each completion is one turn
    previous: Tensor | None = None  # int64: the column of the token read before; None: it is the column before
    truncated: Tensor | None = None  # bool [B]: a limit ended the completion; None: none was
    experts: Tensor | None = None  # uint8 or int16 [B, T, layers, k]: of each token; the largest number: unknown
    images: ImageRows | None = None  # what the model reads in place of images' tokens; None: there are no images
    advantages: Tensor | None = None
    returns: Tensor | None = None

    def select(self, rows: Tensor) -> Batch:
        """The rows with these indices (int64 `[N]`), in this order."""
        chosen = {f.name: value[rows] for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(self, **chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The current policy on a batch, `[B, T]`, with grad; the later ones if the algorithm needs them."""

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    top_k_logprobs: Tensor | None = None  # [B, T, K]: of the teacher's most likely tokens (Batch.teacher_top_k_ids)
    kl: Tensor | None = None  # over the whole vocabulary: KL(policy || reference), or KL(old || policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Sizes of the whole optimizer batch, so that any split into micro-batches gives the same gradient."""

    num_tokens: int
    num_sequences: int
    max_completion_tokens: int
    value_scale: float = 1.0  # divides errors of values: the returns' standard deviation if values are normalised


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`total []` to call backward on, and `metrics {name: []}`.

    Metrics add up over micro-batches (they are already divided by the whole optimizer batch), except names ending in
    `_max`, which combine by maximum.
    """

    total: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One published version of the policy: PEFT's own tensor names, and the fields of its adapter_config.json."""

    version: int
    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are drawn. `top_k = 0`, `top_p = 1` and `min_p = 0` mean the full distribution."""

    max_tokens: int
    temperature: float  # 0 takes the most likely token
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0  # tokens less likely than this share of the most likely one are dropped, before top_k and top_p
    # A completion ends with the token that completes one of these texts; it is the last of its token_ids.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # a completion ends with one of these tokens
    # Whether the completion's text includes the stop; otherwise it ends before it.
    include_stop_str_in_output: bool = False
    notes_experts: bool = False  # whether the completion says which experts its tokens went to (`Completion.experts`)
    # A `rlft.generation.drafts.Drafts`, from which an engine may take drafts of tokens, and to which it then adds.
    drafts: Any = field(default=None, compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides what is drawn: drafts do not."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "drafts"}

    def tokens_of(self, prompt: Prompt) -> int:
        """The most tokens of a completion of this prompt."""
        return self.max_tokens if prompt.next_turn is None else min(self.max_tokens, prompt.next_turn.max_tokens)


class Reward(Protocol):
    """Scores the completions of one group, in order. Runs in a worker process; must not import torch if rule-based.

    A process reward returns `StepScores` instead of numbers, and says so by a class (or function) attribute
    `scores_steps = True`. One that reads answers returns a `Verdict` for each, and has `reads_answers = True`. One that
    knows which completions it could not score raises `Unscored`.
    """

    def __call__(self, group: Group) -> Sequence[float | StepScores]: ...


class Unscored(RuntimeError):
    """A reward knows which completions it could not score, and why; trying them one at a time would tell nothing new.

    `scores` has one per completion, None for those without; None as a whole if no completion has a score.
    """

    def __init__(self, problem: str, scores: tuple[float | None, ...] | None) -> None:
        self.scores = scores
        super().__init__(problem)


class Unscorable(ValueError):
    """A reward cannot use a prompt's reference answer; no completion of the prompt can be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A sampled and scored evaluation set: one line of eval.jsonl, plus a few completions to look at."""

    step: int  # the number of steps done before it
    # The headline number in [0, 1] (mean@k of the primary reward); None if only a loss is measured.
    accuracy: float | None
    accuracy_se: float | None  # its standard error over prompts; None without an accuracy
    metrics: Mapping[str, float]  # by the names that rlft.loop.evaluations has, and with `_se` their standard errors
    examples: tuple[Rollout, ...]  # completions of the same prompts every time
    example_scores: tuple[float, ...] = ()  # the primary reward of each example, in the same order
    alarms: Mapping[str, str] = field(default_factory=dict)  # {name: text}


class UserError(Exception):
    """A mistake that the user can fix: `<key>: <what is wrong>, got <value>; <what to do>`. The CLI exits with 2.

    `more` are other mistakes that were found with this one, each of which gets a line.
    """

    more: tuple[UserError, ...] = ()

    def __init__(self, key: str, problem: str, *, got: object = None, remedy: str) -> None:
        self.key, self.problem, self.got, self.remedy = key, problem, got, remedy
        value = "" if got is None else f", got {got}"
        super().__init__(f"{key}: {problem}{value}; {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickling: processes that work for a run send it what is wrong."""
        return partial(type(self), got=self.got, remedy=self.remedy), (self.key, self.problem)


class Mistakes:
    """Collects the mistakes of several keys, so that a user fixes all of them at once.

    `with mistakes:` suppresses and keeps a `UserError` raised inside; `refuse()` raises the first with all others.
    """

    def __init__(self) -> None:
        self._found: list[UserError] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, UserError):
            self._found += [error, *error.more]
        return isinstance(error, UserError)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Raises what is raised in the block together with what was found before."""
        try:
            yield
        except UserError as error:
            self._found += [error, *error.more]
            self.refuse()

    def refuse(self) -> None:
        if self._found:
            first, *others = self._found
            first.more = tuple(others)
            raise first


def require(ok: object, key: str, problem: str, *, got: object = None, remedy: str) -> None:
    """Raises the `UserError` of these words unless `ok` is true (as Python's `if` sees it)."""
    if not ok:
        raise UserError(key, problem, got=got, remedy=remedy)


def counted(number: float, noun: str, spec: str = "") -> str:
    """A number, in the format `spec`, with its noun in the singular or plural.

    >>> counted(1, "step"), counted(2000, "held-out prompt", ","), counted(0, "entry"), counted(2, "batch")
    ('1 step', '2,000 held-out prompts', '0 entries', '2 batches')
    """
    if number == 1:
        ending = ""
    elif noun.endswith(("s", "x", "tch", "sh")):
        ending = "es"
    else:
        ending = "s"
        if noun.endswith("y") and noun[-2] not in "aeiou":
            noun, ending = noun[:-1], "ies"
    return f"{number:{spec}} {noun}{ending}"


def are(number: float) -> str:
    """What follows a subject of this number: "is" or "are"."""
    return "is" if number == 1 else "are"


def well_formed(text: str) -> str:
    """The text with `?` for lone surrogates, see `lone_surrogate`."""
    return text.encode("utf-8", "replace").decode()


def lone_surrogate(text: str) -> str | None:
    r"""The first lone surrogate (half of a UTF-16 pair) in a text, as JSON escapes it; None if there is none.

    JSON and YAML can hold one, but no tokenizer, file or terminal takes it.

    >>> lone_surrogate("a" + chr(0xD83D)), lone_surrogate("a" + chr(0x1F600))
    ('\\ud83d', None)
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None


class EnvironmentFailure(RuntimeError):
    """An environment cannot be used at all; the message says which one, and what to do."""
