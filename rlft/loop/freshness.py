"""Checks that the engine samples from the policy just published: by what it holds, and by what it computes.

The proof is what the engine holds: its copy of the adapter is read back, and equals what was published bit for bit,
rounded as it rounds (`rlft.generation.loaded_adapter`). In 16 bits nothing else can see a step: it moves log-probs by
1e-3, and two forwards differ by more. What the engine does with its copy is judged by fixed tokens, which both score.

The forward over fixed tokens runs after the first publishes and after every WHOLE_EVERY-th, and always where the copy
cannot be read back; the policy's own also before a checkpoint, which none is whose log-probs are not finite. Where a
step's first forward computes the very policy that has sampled its rows (`samples_tell`), the log-probs of all of these
are compared as well, before the optimizer moves.

Fixed tokens see no fault of decoding: a cache that mixes up rows or forgets a state, padding that leaks into one, a
model that reads tokens behind. Nor do they see what is random in training alone. So before the first step a few
completions are sampled by the engine itself, and compared with the trainer's forward over the whole rows, in the mode
in which updates run (`check_decoding`).

The first step's own completions would do for the plainest run. But with a lag, in conversations, at temperature 0 or
with top_p their log-probs differ for good reasons, and with one update a step the trainer's first log-probs are those
of a gradient. So these are samples of their own: 60 tokens, once. They draw from no random numbers of the run, and
begin with a prompt's second token, so that no later prompt finds its first blocks in an engine's prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch import Tensor

from rlft.config.schema import FreshnessConfig, RunConfig
from rlft.data.prompts import PromptSet
from rlft.generation.engine import Engine, FreshnessCheck, Generator, StaleEngineError
from rlft.generation.loaded_adapter import Fingerprint, LoadedAdapter, difference, published
from rlft.loop.driver import BrokenRunError
from rlft.model.backbone import Backbone
from rlft.model.networks import Networks, rounded_once_more
from rlft.system.device import fork_rng
from rlft.types import Adapter, Batch, Group, NextTurn, Prompt, Sampling, Scores, UserError, counted

REMEDY = "freshness.threshold=<nats> loosens the check"
NOT_READ_BACK = "freshness.read_back=false compares log-probs alone"
FIXED_TOKENS = 512
"""Number of fixed tokens that are compared in 16 bits, where there are as many: 5 lie above the 99th percentile."""
WHOLE_FIRST, WHOLE_EVERY = 3, 50
"""After how many publishes at first, and then after every how many, fixed tokens are compared in any case."""
OWN_ROUNDINGS = 3.0
"""How many times as far as one more rounding in each layer moves log-probs an engine's may lie from the trainer's.

SmolLM2-135M in bfloat16, the mean over 542 tokens in nats: one more rounding 0.079; two attentions of transformers
0.062; vLLM on an H100 0.102, while it held the published adapter (tests/model/test_networks.py).
"""
MIN_TOKENS_OF_PERCENTILE = 256
"""With fewer tokens the 99th percentile is next to the largest gap, and only the mean is judged."""


class StaleAdapterError(RuntimeError):
    """The engine's log-probs are not those of the adapter version that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far log-probs of the same tokens lie apart, in nats; inf if one of them is NaN or infinite."""

    mean: float  # the mean of the absolute differences
    largest: float  # the largest of them
    # What 99 % of them do not exceed; None with fewer than MIN_TOKENS_OF_PERCENTILE tokens.
    percentile_99: float | None = None

    @classmethod
    def between(cls, first: Sequence[float], second: Sequence[float]) -> Gap:
        differences = [x - y for x, y in zip(first, second, strict=True)]
        return cls.of(torch.tensor(differences, dtype=torch.float64))

    @classmethod
    def of(cls, differences: Tensor) -> Gap:
        """That of log-probs with these differences `[n]`, in main memory."""
        gaps = differences.double().abs().nan_to_num(nan=math.inf, posinf=math.inf).sort().values
        enough = len(gaps) >= MIN_TOKENS_OF_PERCENTILE
        percentile = gaps[math.ceil(0.99 * len(gaps)) - 1].item() if enough else None
        return cls(mean=gaps.mean().item(), largest=gaps[-1].item(), percentile_99=percentile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The gap up to which an engine counts as fresh, in nats; inf: not judged by that.

    Two float32 computations agree to 2e-5 nats, and to 1.4e-4 where log-probs reach -90, while nothing below -37 is
    sampled: so the largest gap tells, however unlikely a token is (tests/loop/test_freshness.py). In 16 bits it does
    not: with identical weights gaps in bfloat16 have a standard deviation of 0.05 and a 95th percentile of 0.11, but
    single tokens differ by 0.5 to 1.6 (huggingface/trl#6789, torchtitan's notes on RL). Whatever the shape of the tail,
    their mean is then at most 0.05, and known to 0.0022 from FIXED_TOKENS tokens; the limit of the mean is twice that.
    More than 5 of 512 tokens beyond 1.5 do not occur. float16 rounds 8 times as finely, and its limits are an eighth.
    Some models amplify their roundings more than that; theirs are measured where an engine exceeds these limits
    (`widened_by`).
    """

    largest: float = math.inf
    mean: float = math.inf
    percentile_99: float = math.inf

    @property
    def threshold(self) -> float:
        """The number that says most: of the largest gap, or else of the mean."""
        return self.largest if math.isfinite(self.largest) else self.mean

    def judged(self, gap: Gap) -> float:
        """What of the gap is compared with `threshold`."""
        return gap.largest if math.isfinite(self.largest) else gap.mean

    def allow(self, gap: Gap) -> bool:
        """Whether the gap is within the limits."""
        is_small = gap.largest <= self.largest and gap.mean <= self.mean
        return math.isfinite(gap.largest) and is_small and (gap.percentile_99 or 0.0) <= self.percentile_99

    def widened_by(self, noise: Gap) -> Limits:
        """The limits for a model whose log-probs one more rounding in each layer moves by `noise`.

        What is judged by the largest gap is not judged by roundings.
        """
        if math.isfinite(self.largest) or not math.isfinite(noise.largest):
            return self
        return Limits(
            mean=max(self.mean, OWN_ROUNDINGS * noise.mean),
            percentile_99=max(self.percentile_99, OWN_ROUNDINGS * (noise.percentile_99 or 0.0)),
        )

    def __str__(self) -> str:
        if math.isfinite(self.largest):
            return f"{self.largest:g}"
        return f"a mean of {self.mean:.3g} or a 99th percentile of {self.percentile_99:.3g}"


LIMITS_IN_32_BITS = Limits(largest=1e-3)
LIMITS_IN_16_BITS = Limits(mean=0.1, percentile_99=1.5)
LIMITS_IN_FLOAT16 = Limits(mean=0.1 / 8, percentile_99=1.5 / 8)


def limits_of(dtype: torch.dtype, *, rounds: bool = False) -> Limits:
    """The limits for a trainer's base of this dtype; `rounds`: whether the engine rounds more than that."""
    if dtype == torch.float16 and not rounds:
        return LIMITS_IN_FLOAT16
    return LIMITS_IN_16_BITS if dtype.itemsize <= 2 or rounds else LIMITS_IN_32_BITS


class Freshness:
    """Compares engine and trainer after a publish; remembers earlier versions to name the one a stale engine holds.

    It scores a few short sequences of token ids, after every so many publishes; a number as `threshold` is the largest
    allowed gap, in nats. With `samples_tell`, sampled tokens are compared as well (`check_sampled`), and after most
    publishes only what the engine holds. `note` takes a line, once, where an engine's adapter cannot be read back
    (`read_back`), or the limits are the model's own.

    Attributes:
        limits: those of `threshold`.
        model_limits: those that judge engines: `limits`, or wider ones where an engine exceeded them and the model's
            own roundings explain it.
        gap: that of the engine whose log-probs were compared last, also if it is too large; None if what it held told
            already.
    """

    samples_tell = False
    compared = False  # whether log-probs of an engine have been compared: one without weights has none

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        threshold: float | Limits,
        every: int,
        note: Callable[[str], None] = lambda text: None,
        *,
        read_back: bool = True,
    ) -> None:
        self.sequences = [list(ids) for ids in sequences]
        self.limits = threshold if isinstance(threshold, Limits) else Limits(largest=threshold)
        self.every = every
        self.model_limits = self.limits
        self.gap: Gap | None = None
        self.history: dict[int, list[float]] = {}
        self.num_checks = 0
        self._published: dict[int, dict[str, Mapping[str, Fingerprint]]] = {}  # {version: {dtype: what was published}}
        self._note, self._noted, self._read_back = note, set[str](), read_back
        self._holds_it = False  # whether the engine was read back as a whole when it was checked last
        self._finite: int | None = None  # the last version whose log-probs were finite

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are compared: all but the first of each sequence."""
        return sum(len(ids) - 1 for ids in self.sequences)

    def check(
        self,
        version: int,
        generator: Generator,
        trainer: Networks,
        adapter: Adapter | None = None,
    ) -> float | None:
        """The largest gap of all engines in nats; None if no log-probs are compared now, or they have no weights.

        They have to hold `adapter`, the version that was published; where it is None, log-probs alone are compared.

        Raises:
            StaleAdapterError: an engine holds something else, or the gap exceeds the limits; the message says which.
            BrokenRunError: the policy's own log-probs are not finite.
        """
        is_due = not self.num_checks or version % self.every == 0
        if not (is_due or generator.replaces_engines):
            return None
        self.num_checks += is_due
        self._published.pop(version, None)
        held = self.samples_tell and self._holds_it and not generator.replaces_engines and adapter is not None
        if held and self.num_checks > WHOLE_FIRST and version % WHOLE_EVERY:
            self._verify(version, generator, [], adapter, now=True)
            if self._holds_it:
                return None
        expected = self._expected(version, trainer)
        self.model_limits = self.limits
        gaps = self._verify(version, generator, expected, adapter, now=is_due, trainer=trainer)
        if gaps or generator.replaces_engines:
            self.history = {**dict(list(self.history.items())[-3:]), version: expected}
        return max(gaps, default=None)

    def check_finite(self, version: int, trainer: Networks) -> None:
        """Raises BrokenRunError: the log-probs of this version, which the trainer holds, are not finite."""
        if self._finite != version:
            self._expected(version, trainer)

    def _expected(self, version: int, trainer: Networks) -> list[float]:
        expected = flatten(trainer.score(self.sequences))
        if not all(map(math.isfinite, expected)):  # no engine's fault: bases and adapters are finite when loaded
            raise BrokenRunError(_not_finite(version))
        self._finite = version
        return expected

    def check_again(self, version: int, generator: Generator, adapter: Adapter | None = None) -> None:
        """Checks that the engines sample from a version that was checked before; does nothing if it was not.

        Raises StaleAdapterError: an engine does not hold it, or its log-probs are not those of that earlier check.
        """
        if expected := self.history.get(version):
            self._verify(version, generator, expected, adapter, now=True)

    def _verify(
        self,
        version: int,
        generator: Generator,
        expected: list[float],
        adapter: Adapter | None,
        *,
        now: bool,
        trainer: Networks | None = None,
    ) -> list[float]:
        """The gaps of all engines that are checked now, in nats; empty if they have no weights.

        `expected`: the log-probs of the fixed tokens; empty: only what engines hold is compared. `trainer` measures the
        model's own roundings where an engine exceeds the limits; None: they were measured.
        """
        gaps: list[float] = []
        self.gap = None if expected else self.gap

        def accept(scores: list[list[float]]) -> str | None:
            engine = flatten(scores)
            if not engine:  # it has no weights
                return None
            self.compared = True
            self.gap = gap = Gap.between(engine, expected)
            if not self.model_limits.allow(gap) and trainer is not None:
                self._measure_roundings(trainer, expected)
            if not self.model_limits.allow(gap):
                return self._explain(version, gap, engine, expected)
            gaps.append(gap.largest)
            return None

        accept_adapter = None
        if self._read_back and adapter is not None:
            accept_adapter = partial(self._accept_adapter, adapter)
        self._holds_it = False
        sequences = self.sequences if expected else []
        check = FreshnessCheck(sequences=sequences, accept=accept, accept_adapter=accept_adapter)
        try:
            generator.verify(check, now=now)
        except StaleEngineError as error:
            raise StaleAdapterError(f"{error}; stopped rather than train on stale rollouts. {REMEDY}") from error
        return gaps

    def allows(self, gap: Gap, learner: Networks) -> bool:
        """Whether the limits allow the gap, or else those that the model's own roundings widen now."""
        self.model_limits = self.limits
        if not self.limits.allow(gap) and not math.isfinite(self.limits.largest):
            self._measure_roundings(learner, flatten(learner.score(self.sequences)))
        return self.model_limits.allow(gap)

    def _measure_roundings(self, trainer: Networks, expected: list[float]) -> None:
        """Sets `model_limits` for the model with the weights that it has now, whose log-probs are `expected`."""
        if math.isfinite(self.limits.largest) or self.model_limits != self.limits:
            return
        noise = Gap.between(flatten(trainer.score(self.sequences, rounded=True)), expected)
        self.model_limits = self.limits.widened_by(noise)
        if self.model_limits != self.limits and "roundings" not in self._noted:
            self._noted.add("roundings")
            self._note(
                f"freshness: one more rounding in each layer moves this model's log-probs by {noise.mean:.2g} nats on"
                f" average, so that an engine may differ by {self.model_limits}"
            )

    def _accept_adapter(self, adapter: Adapter, found: LoadedAdapter | str) -> str | None:
        why = found if isinstance(found, str) else f"tensors such as {found.unread[0]}" if found.unread else None
        if why is not None and why not in self._noted:
            self._noted.add(why)
            self._note(f"freshness: log-probs alone prove what the engine holds where it is not read back: {why}")
        self._holds_it = why is None
        if isinstance(found, str):
            return None
        of_version = self._published.setdefault(adapter.version, {})
        self._published = dict(list(self._published.items())[-4:])
        if found.dtype not in of_version:
            of_version[found.dtype] = {} if found.is_trainers else published(adapter, found.dtype)
        earlier = {
            v: kept[found.dtype] for v, kept in self._published.items() if v != adapter.version and found.dtype in kept
        }
        problem = difference(adapter.version, found, of_version[found.dtype], earlier)
        return problem and f"freshness: the engine does not hold {problem} ({NOT_READ_BACK})"

    def _explain(self, version: int, gap: Gap, engine: list[float], expected: list[float]) -> str:
        text = f"freshness: the engine does not sample from policy version {version}: "
        if math.isfinite(self.limits.largest) or not math.isfinite(gap.largest):
            actual, trained = max(zip(engine, expected, strict=True), key=lambda pair: distance(*pair))
            text += f"it gives a fixed token log-prob {actual:.6f}, the trainer {trained:.6f} "
            text += f"(gap {abs(actual - trained):.2e}, threshold {self.limits.threshold:.0e})"
        else:
            percentile = "" if gap.percentile_99 is None else f", 99th percentile {gap.percentile_99:.2e}"
            text += f"the log-probs of {counted(len(engine), 'fixed token')} differ from the trainer's "
            text += f"(mean gap {gap.mean:.2e}{percentile}; allowed is {self.model_limits})"
        gaps = {v: Gap.between(engine, scores) for v, scores in self.history.items() if len(scores) == len(engine)}
        far = self.limits.judged(gap) / 2  # what is hardly nearer than this version is no evidence
        held = [v for v, older in gaps.items() if self.limits.allow(older) and self.limits.judged(older) < far]
        if held:
            held_version = min(held, key=lambda v: self.limits.judged(gaps[v]))
            text += f"; it still holds version {held_version} (gap {self.limits.judged(gaps[held_version]):.2e})"
        return text


def _not_finite(version: int) -> str:
    problem = "log-probs of fixed tokens are NaN or infinite"
    if version == 0:
        remedy = "use model.dtype=bfloat16 or float32 if it is float16, or another model"
        return f"model.path: the base's {problem} before the first update; {remedy}"
    stopped = "so the run stops here; checkpoints of earlier steps are good"
    remedy = "Start again with a lower trainer.lr, or with model.dtype=float32 if it was a 16-bit type"
    return f"step {version}: the policy has diverged, its {problem} after this step's updates, {stopped}. {remedy}"


def flatten(scores: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in scores for value in row]


def distance(x: float, y: float) -> float:
    """|x - y|; inf if one of them is NaN or infinite."""
    return gap if math.isfinite(gap := abs(x - y)) else math.inf


def open_freshness(
    settings: FreshnessConfig, prompts: PromptSet, backbone: Backbone, engine: Engine, note: Callable[[str], None]
) -> Freshness:
    """The freshness check of this run, which in 16 bits compares more tokens, by mean and 99th percentile."""
    dtype = backbone.model.dtype
    limits = limits_of(dtype, rounds=engine.rounds or (engine.rounds_sums and dtype.itemsize <= 2))
    sequences = fixed_sequences(prompts, backbone, 0 if limits == LIMITS_IN_32_BITS else FIXED_TOKENS)
    threshold = limits if settings.threshold == "auto" else settings.threshold
    return Freshness(sequences, threshold, settings.every, note, read_back=settings.read_back)


def fixed_sequences(prompts: PromptSet, backbone: Backbone, num_tokens: int = 0) -> list[list[int]]:
    """Token ids of the first two prompts with their answers, which all freshness checks of a run score, and of as many
    more as have this many tokens to compare."""
    sequences: list[list[int]] = []
    for p in prompts.prompts:
        if len(sequences) >= 2 and sum(len(ids) - 1 for ids in sequences) >= num_tokens:
            break
        answer = backbone.tokenizer(p.answer, add_special_tokens=False)["input_ids"]
        sequences.append([*p.token_ids, *answer][-64:])
    return sequences


# -- what was sampled --------------------------------------------------------------------------------------------------
def samples_tell(config: RunConfig) -> bool:
    """Whether the first forward of a step's first update computes what the engine has sampled its rows by.

    Not so with a lag, in conversations, at another temperature or where tokens were left out, with dropout, and where
    several ranks share the rows; nor is it judged with a threshold for fixed tokens alone.
    """
    sampling, dropout = config.generation.sampling, 0.0 if config.lora is None else config.lora.dropout
    is_plain = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    is_simple = not config.overlap.lag and config.environment is None and config.cluster.num_parts == 1
    return is_plain and is_simple and not dropout and config.freshness.threshold == "auto"


def check_sampled(freshness: Freshness, learner: Networks, rows: Batch, gaps: Tensor | None, step: int) -> None:
    """Compares the log-probs of a step's first minibatch with those it was sampled by (`LocalTrainer.check_samples`).

    `freshness` has seen the engine's log-probs of fixed tokens before, unless it has no weights.

    Raises StaleAdapterError: the gap exceeds the limits, also those of the model's own roundings.
    """
    if not freshness.compared or (gaps is not None and freshness.limits.allow(Gap.of(gaps))):
        return
    with torch.no_grad():
        computed = learner.forward.logprobs(rows, learner.token_budget)[rows.loss_mask].tolist()
    if not all(map(math.isfinite, computed)):
        return  # the update refuses its gradient
    found = Gap.between(rows.sampled_logprobs[rows.loss_mask].tolist(), computed)
    if not freshness.allows(found, learner):
        tokens = counted(len(computed), "sampled token")
        raise StaleAdapterError(
            f"freshness: the engine did not sample step {step + 1} from policy version {step}, or decodes otherwise"
            f" than the trainer's forward: log-probs of {tokens} differ by up to {found.largest:.2g} nats,"
            f" {found.mean:.2g} on average (allowed is {freshness.model_limits}); stopped before the update."
            f" {REMEDY}"
        )


# -- decoding ----------------------------------------------------------------------------------------------------------
NUM_SAMPLES = 2  # completions of each prompt

LENGTHS = ((33, 4), (5, 16), (18, 10))
"""(tokens, the most tokens of a completion) of each prompt: they are padded, and rows leave the batch in between."""


def check_decoding(
    generator: Generator, learner: Networks, prompts: PromptSet, config: Any, limits: Limits
) -> float | None:
    """The largest gap in nats between the engine's log-probs and the trainer's; None if the engine has no weights.

    The engine has the learner's weights. Tokens of these prompts are used, and the longest prompt with images.

    Raises UserError: the gap exceeds the limits of the freshness check, by the key model.path.
    """
    max_tokens, token_budget = config.generation.max_tokens, config.token_budget
    probes = _probes(prompts, config.prompts.max_tokens, max_tokens)
    if prompts.longest_with_images is not None:
        turn = NextTurn(turn=0, seed=0, max_tokens=min(LENGTHS[0][1], max_tokens))
        probes.append(replace(prompts.prompts[prompts.longest_with_images], next_turn=turn))
    if not any(generator.score([probes[0].token_ids[:2]])):
        return None
    sampling = Sampling(max_tokens=max_tokens, temperature=1.0)
    seeds = [NUM_SAMPLES * number for number in range(len(probes))]
    samples = generator.sample_each(probes, NUM_SAMPLES, seeds, sampling)
    return max(_check(groups, learner, token_budget, limits) for groups in samples)


def _probes(prompts: PromptSet, max_prompt_tokens: int, max_tokens: int) -> list[Prompt]:
    first = [prompt.token_ids for prompt in prompts.prompts[:3]]
    tokens = cycle(islice(chain.from_iterable(first), 1, None) if sum(map(len, first)) > 1 else first[0])
    return [
        Prompt(
            id=f"check of decoding {number}",
            messages=(),
            answer="",
            token_ids=tuple(islice(tokens, min(length, max_prompt_tokens))),
            next_turn=NextTurn(turn=0, seed=0, max_tokens=min(limit, max_tokens)),
        )
        for number, (length, limit) in enumerate(LENGTHS)
    ]


def _check(groups: Sequence[Group], learner: Networks, token_budget: int, limits: Limits) -> float:
    shape = len(groups), NUM_SAMPLES
    batch = learner.backbone.collated(groups, Scores(total=torch.zeros(shape), by_reward={}))
    sampled, model = batch.sampled_logprobs[batch.loss_mask].tolist(), learner.backbone.model
    gap = Gap.between(sampled, _logprobs(batch, learner, token_budget, training=True))
    if limits.allow(gap):
        return gap.largest
    plain, only_in_training = _logprobs(batch, learner, token_budget, training=False), ""
    with rounded_once_more(model):
        limits = limits.widened_by(Gap.between(_logprobs(batch, learner, token_budget, training=False), plain))
    if limits.allow(gap):
        return gap.largest
    if limits.allow(Gap.between(sampled, plain)):
        only_in_training = " in training mode, and not otherwise (its dropout, or another noise, is on there)"
    tokens = counted(int(batch.loss_mask.sum()), "sampled token")
    problem = (
        f"decoding does not give the log-probs of the trainer's forward for a {model.config.model_type}"
        f"{only_in_training}: log-probs of {tokens} differ by up to {gap.largest:.2g} nats, "
        f"{gap.mean:.2g} on average ({limits} is allowed); stopped rather than train on them"
    )
    remedy = f"try model.kernels=plain, another generation.engine, release of transformers or model; {REMEDY}"
    raise UserError("model.path", problem, got=learner.backbone.path, remedy=remedy)


def _logprobs(batch: Batch, learner: Networks, token_budget: int, *, training: bool) -> list[float]:
    mode = learner.training(dropout=False) if training else nullcontext()
    with torch.no_grad(), fork_rng(learner.backbone.device), mode:
        logprobs_BT = learner.forward.logprobs(batch, token_budget)
    return logprobs_BT[batch.loss_mask].tolist()
