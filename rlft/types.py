"""The nouns of rlft: what each stage of the loop hands to the next.

P prompts, G completions per prompt, B = P * G sequences, T tokens. One alignment law: `logprobs[b, t]` belongs to
`token_ids[b, t]`. Rows are right-padded; what lies under the padding never matters. Token ids go in and out of the
generator; text is never tokenised again.

This file imports no torch at run time, so that data and rule rewards (and their worker processes) stay light.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Message = Mapping[str, str]
"""One chat turn: {"role": "system" | "user" | "assistant", "content": text}."""


class Split(StrEnum):
    train = "train"
    held_out = "held_out"


class FinishReason(StrEnum):
    stop = "stop"
    length = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question with its reference answer. `token_ids` is filled by the scan that tokenises the data (prompts.py)."""

    id: str
    messages: tuple[Message, ...]
    answer: str
    token_ids: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and a completion to learn from.

    completion_ids: the tokens that were sampled, end token included; empty: `completion` is tokenised, and an end token
    put after it.
    """

    prompt: Prompt
    completion: str
    completion_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Completions of one prompt, from the best to the worst, with the scores that rank them; equal ones are unranked.

    completion_ids: as in Demonstration, one a completion; empty: all are tokenised.
    """

    prompt: Prompt
    completions: tuple[str, ...]
    scores: tuple[float, ...]
    completion_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine returned: `token_ids` include the end token where there is one; `text` shows no special tokens.

    Where a stop string or stop token ended it, `token_ids` run through it, and `text` ends as `Sampling` says.

    `logprobs` are the sampling policy's, natural log, temperature applied, one per token id.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A completion and the version of the policy adapter that sampled it (`None`: the bare base model)."""

    prompt: Prompt
    completion: Completion
    policy_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """G siblings: completions of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """What a process reward gives a completion: `values[k]` to the step whose text ends before character `ends[k]`.

    ends: offsets into `Completion.text`, exclusive, strictly increasing, at most its length. No steps: both empty.
    """

    values: tuple[float, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Rewards of a step, `[P, G]`.

    total: the weighted sum of everything. by_reward: each reward unweighted, a process reward as the sum of its steps.
    steps: weighted step scores of all process rewards together, `steps[p][g]` in the order of their ends; None where
    no reward scores steps. outcome: the weighted sum of the rewards that score whole completions; None: all of them do.
    """

    total: Tensor
    by_reward: Mapping[str, Tensor]
    outcome: Tensor | None = None
    steps: Sequence[Sequence[StepScores]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What a step trains on, and how many completions were sampled for it, those thrown away included."""

    groups: list[Group]
    scores: Scores
    num_sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The algorithm's view of a step, `[B, T]` float32 unless said; later fields are None until a stage adds them.

    rewards are of completions as a whole; what process rewards give single steps stands in token_rewards, at the last
    token of each step, and is not in rewards. None: no reward scores steps.
    """

    token_ids: Tensor  # int64
    attention_mask: Tensor  # bool: prompt and completion tokens
    loss_mask: Tensor  # bool: completion tokens
    sampled_logprobs: Tensor
    rewards: Tensor  # [B]
    group_ids: Tensor  # int64 [B]
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    token_rewards: Tensor | None = None
    step_ends: Tensor | None = None  # bool: a scored step ends with this token (its score may be 0)
    truncated: Tensor | None = None  # bool [B]: the length limit ended the completion; None: none was
    advantages: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The current policy on a batch, `[B, T]`, with grad; `entropy` and `values` where the algorithm needs them."""

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Sizes of the whole optimizer batch, so that any split into micro-batches gives the same gradient.

    value_scale: what errors of values are divided by (the returns' standard deviation where values are normalised).
    """

    num_tokens: int
    num_sequences: int
    max_completion_tokens: int
    value_scale: float = 1.0


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
    """How completions are drawn. `top_k = 0`, `top_p = 1` and `min_p = 0` mean the full distribution.

    min_p: tokens less likely than this share of the likeliest one are left out, before top_k and top_p.
    stop, stop_token_ids: a completion ends with the token that completes one of these texts, or is one of these tokens;
    that token is the last of its token_ids. Its text ends before the stop, unless include_stop_str_in_output.
    """

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False


class Generator(Protocol):
    """A generation engine: holds the base model and at most one adapter version at a time."""

    def load(self, adapter: Adapter) -> None:
        """Use this adapter version for all sampling from now on."""
        ...

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        """n completions of each prompt; completion i of prompt p is drawn with seed `seeds[p] + i`."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first, by the adapter in use: the freshness check."""
        ...

    def sleep(self) -> None:
        """Free what it can of the device's memory until it is used again; nothing where it has none of its own."""
        ...

    def close(self) -> None:
        """End the engine and every process it started. Safe to call twice."""
        ...


class Reward(Protocol):
    """Scores the completions of one group, in order. Runs in a worker process; must not import torch if rule-based.

    A process reward returns `StepScores` instead of numbers, and says so by a class (or function) attribute
    `scores_steps = True`. One that knows which completions it could not score raises `Unscored`.
    """

    def __call__(self, group: Group) -> Sequence[float | StepScores]: ...


class Unscored(RuntimeError):
    """A reward knows which completions it could not score, and why; trying them one at a time would tell nothing new.

    scores: of each completion, None where there is none; None as a whole where no completion has one.
    """

    def __init__(self, problem: str, scores: tuple[float | None, ...] | None) -> None:
        self.scores = scores
        super().__init__(problem)


class Data(Protocol):
    """A source of prompts; the two splits never share a prompt."""

    def load(self, split: Split) -> Sequence[Prompt]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A sampled and scored evaluation set: one line of eval.jsonl, plus a few completions to look at.

    metrics: `eval/<primary reward>` is mean@k, `eval/<primary reward>_se` its standard error over prompts;
    `eval/pass@<k>` and `eval/pass@<k>_se`; `eval/reward/<name>`; `eval/length/mean` and `/truncated_fraction`.
    accuracy: the headline number in [0, 1] (mean@k of the primary reward); None where only a loss is measured
    (`eval/loss`), and its error with it. examples: the same prompts every time;
    example_scores: the primary reward of each, in the same order. alarms: {name: its words}.
    """

    step: int
    accuracy: float | None
    accuracy_se: float | None
    metrics: Mapping[str, float]
    examples: tuple[Rollout, ...]
    example_scores: tuple[float, ...] = ()
    alarms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Of each token of a completion: the text it adds, and numbers in nats.

    old: its log-prob by the policy that sampled, as the trainer computes it. after: by the policy after the update.
    reference: by the reference, or by the bare base where there is none. entropy: of the policy's distribution there,
    after the update. advantage: as it was trained.
    """

    text: Sequence[str]
    old: Sequence[float]
    after: Sequence[float]
    reference: Sequence[float]
    entropy: Sequence[float]
    advantage: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a finished step hands to the loggers. `step` counts finished steps, from 1.

    scores and advantages are `[P, G]` nested lists: of each reward unweighted, of the weighted total, and the mean
    advantage over a completion's tokens. tokens: {row of the step's completions: its tokens' values}, of a few.
    alarms: {name: its words}.
    """

    step: int
    metrics: Mapping[str, float]
    groups: Sequence[Group]
    rewards: Mapping[str, Sequence[Sequence[float]]]
    total_rewards: Sequence[Sequence[float]]
    advantages: Sequence[Sequence[float]]
    tokens: Mapping[int, TokenValues] = field(default_factory=dict)
    alarms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What loggers are told at the start. `step` is 0, or that of the checkpoint a resumed run goes on from.

    sizes: rows of the start-up table, (what, value, explanation). watched: (word, metric) of the number whose curve is
    shown.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    step: int
    steps: int
    sizes: Sequence[tuple[str, str, str]]
    watched: tuple[str, str] = ("reward", "reward/mean")


class Logger(Protocol):
    """Where a run's numbers go. Calls come in order: start, then stage/step/evaluation, then finish exactly once."""

    def start(self, run: RunInfo) -> None: ...

    def stage(self, name: str) -> None:
        """The loop enters a stage: sample, score, credit, update, publish, evaluate, checkpoint."""
        ...

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def note(self, text: str) -> None:
        """A plain-word hint or warning for the person watching."""
        ...

    def finish(self, status: str) -> None:
        """`finished`, `interrupted`, or the reason why the run stopped."""
        ...


class UserError(Exception):
    """A mistake the user can mend, `<key>: <what is wrong>, got <value>; <what to do>`. The CLI exits with 2."""

    def __init__(self, key: str, problem: str, *, got: object = None, remedy: str) -> None:
        self.key, self.problem, self.got, self.remedy = key, problem, got, remedy
        value = "" if got is None else f", got {got}"
        super().__init__(f"{key}: {problem}{value}; {remedy}")


def lone_surrogate(text: str) -> str | None:
    r"""The first half of a UTF-16 pair in a text, as JSON escapes it; None where there is none.

    JSON and YAML can hold one, but no tokenizer, file or terminal takes it.

    >>> lone_surrogate("a" + chr(0xD83D)), lone_surrogate("a" + chr(0x1F600))
    ('\\ud83d', None)
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None
