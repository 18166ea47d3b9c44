"""Sampling with the trainer's own copy of the base: no second model, no server, any machine.

Each prompt is prefilled once per group. Where the model's attention is rlft's own, a prompt's keys and values are kept
once for its G completions; otherwise they are repeated. Finished rows leave the batch. Every completion has its own
stream of random numbers, so it depends on its seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from rlft.config.bounds import PositiveInt
from rlft.generation.engine import Engine, EngineArgs, Generator, Missing, TokenCallback
from rlft.generation.memory import Decoding, EngineMemory, Load, MemoryPart, ModelSizes, When
from rlft.generation.repeated_cache import RepeatedCache
from rlft.generation.stops import StopStrings, plain_decoder, shown_texts
from rlft.system.device import widest
from rlft.system.lazy import torch
from rlft.tokens.ends import turn_ends
from rlft.tokens.text import RunTokenizer
from rlft.types import (
    Adapter,
    Completion,
    FinishReason,
    Group,
    ImageRows,
    Prompt,
    Rollout,
    Sampling,
    UserError,
    counted,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rlft.generation.loaded_adapter import LoadedAdapter
    from rlft.generation.sending import Part

FLOAT32 = 4  # bytes

BLOCK = 64
"""Number of tokens in a block of the vocabulary: to draw a token, a block is drawn first, then a token inside it."""

AT_ONCE = 2**17  # the most probabilities that are turned into float64 at a time
COMPACT_AT = 0.25  # finished rows are dropped from the cache once they are this share of it: dropping copies the others
NOTES_AT_ONCE = 64  # number of tokens after which the experts that they went to leave the device

READ_EVERY = 8
"""Number of tokens after which the host reads what a GPU has sampled, for which it has to wait; each one if somebody
else is told of it at once. Rows that end in between are computed until then."""


class Weights(StrEnum):
    """Which weights decoding multiplies with."""

    merged = "merged"
    merged_bfloat16 = "merged_bfloat16"
    apart = "apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformers(Engine):
    """`generation.transformers`; meanings and defaults are in configs/generation/auto.yaml."""

    title: ClassVar[str] = "the transformers engine"
    on_trainers_base: ClassVar[bool] = True
    serves_whole_models: ClassVar[bool] = True
    notes_experts: ClassVar[bool] = True
    in_graphs: ClassVar[bool | None] = False
    divisible: ClassVar[bool] = False  # products of other shapes may differ in their last bits
    at_once_key: ClassVar[str | None] = "batch_size"
    may_change: ClassVar[tuple[str, ...]] = ("batch_size",)
    grows: ClassVar[Mapping[str, tuple[str, str]]] = {
        "sample": ("keys and values of the completions", "batch_size"),
        "publish": ("the engine's sum of base and adapter", "weights"),
    }

    batch_size: PositiveInt
    weights: Weights

    def check(self, *, plain_kernels: bool) -> None:
        """Refuses rounded sums of base and adapter where there are no sums, without rlft's LoRA layers."""
        if plain_kernels and self.rounds:
            problem = "needs rlft's LoRA layers, which model.kernels=plain does without"
            raise UserError("weights", problem, got=self.weights, remedy="use apart, or model.kernels=auto")

    @property
    def rounds(self) -> bool:
        return self.weights == Weights.merged_bfloat16

    @property
    def at_once(self) -> int:
        return self.batch_size

    def why_no_images(self, kind: str, device: str) -> Missing | None:
        return None

    def memory(self, model: ModelSizes, load: Load) -> EngineMemory:
        """Sums of base and adapter, keys and values, and logits, for the decoding that takes most."""
        if not load.decodings:
            return EngineMemory()
        largest = max(load.decodings, key=lambda each: sum(part.bytes for part in self._parts(model, load, each)))
        rows = self._prompts_at_once(largest) * largest.samples
        # The largest tensor is a layer's keys, or its values.
        freed = rows * load.max_tokens * model.key_size * model.itemsize // (2 * model.config.num_hidden_layers)
        return EngineMemory(parts=tuple(self._parts(model, load, largest)), freed_block=freed)

    def smaller(self, model: ModelSizes, load: Load, room: int) -> Iterator[Self]:
        if load.decodings and self.weights is Weights.merged:
            yield replace(self, weights=Weights.apart)
        group = max((decoding.samples for decoding in load.decodings), default=self.batch_size)
        if group < self.batch_size and any(self._prompts_at_once(decoding) > 1 for decoding in load.decodings):
            yield replace(self, batch_size=group)

    def open(self, args: EngineArgs) -> TransformersGenerator:
        return TransformersGenerator(
            args.slot, args.tokenizer, args.device, self.batch_size, weights=self.weights, ends=args.ends.ids
        )

    def _prompts_at_once(self, decoding: Decoding) -> int:
        return min(decoding.num_prompts, max(1, self.batch_size // decoding.samples))

    def _parts(self, model: ModelSizes, load: Load, decoding: Decoding) -> list[MemoryPart]:
        size = {"merged": model.itemsize if model.itemsize > 2 else 0, "merged_bfloat16": 2, "apart": 0}[self.weights]
        sums = 0 if model.plain else model.adapted * size
        prompts, longest = self._prompts_at_once(decoding), len(decoding.longest)
        rows = prompts * decoding.samples
        tokens = prompts * longest + rows * load.max_tokens
        prefill = prompts * longest * model.layer_width * model.itemsize
        logits = rows * model.vocabulary * FLOAT32 * 3 + AT_ONCE * 8
        return [
            MemoryPart(name="base and policy added up", bytes=sums, when=When.always, key="weights"),
            MemoryPart(
                name="keys and values",
                bytes=tokens * model.key_size * model.itemsize,
                when=When.sampling,
                key="batch_size",
            ),
            MemoryPart(name="decoding", bytes=max(prefill, logits), when=When.sampling, key="batch_size"),
        ]


class Decoder(Protocol):
    """The forward passes of one chunk: prompts once, then one token a row. Holds the keys and values."""

    def prefill(self, n: int) -> Tensor: ...

    def step(self, token_R: Tensor) -> Tensor: ...

    def keep(self, rows: Tensor) -> None:
        """Drops every other row from the batch. The rows to keep, int64 in ascending order, are on the host."""
        ...

    def fill(self) -> None: ...


class AdapterSlot(Protocol):
    """The place on the trainer's base where the engine keeps its own copy of a published adapter (`Roles`), or the
    policy itself where all weights are trained (`WholeModel`).

    `prefix_cache` gives a decoder that keeps each prompt once, or None where the model cannot be decoded like that.
    """

    def images_of(self, prompts: Sequence[Prompt]) -> ImageRows | None: ...

    def prefix_cache(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, images: ImageRows | None = None
    ) -> Decoder | None: ...

    def load_sampler(self, adapter: Adapter, *, weights: str = "apart") -> None: ...

    def sampler_tensors(self) -> tuple[dict[str, Tensor] | None, list[str]]: ...

    def using(self, role: str | None) -> AbstractContextManager[Any]: ...

    @property
    def routing(self) -> Any:
        """`rlft.model.routing.Routing`, which notes experts."""
        ...


class NotingDecoder:
    """A decoder that keeps the experts to which tokens go, `[tokens, layers, k]`, in main memory.

    noted: gives the experts of the tokens of its last pass.
    lengths: number of tokens of each prompt.
    """

    def __init__(self, decoder: Decoder, noted: Callable[[], Tensor], lengths: Sequence[int]) -> None:
        self._decoder, self._noted, self._lengths = decoder, noted, lengths
        self._prompts: Sequence[Tensor] = ()
        self._steps: list[tuple[Tensor, Tensor]] = []  # (rows, the experts of their tokens `[R, layers, k]`)
        self._rows = torch.empty(0, dtype=torch.int64)

    def prefill(self, n: int) -> Tensor:
        logits, experts = self._decoder.prefill(n), self._noted().cpu()
        width = len(experts) // len(self._lengths)
        if len(experts) == sum(self._lengths):  # one after the other; else padded on the left
            self._prompts = experts.split(list(self._lengths))
        else:
            rows = zip(experts.split(width), self._lengths, strict=True)
            self._prompts = [row[width - length :] for row, length in rows]
        self._rows = torch.arange(n * len(self._lengths))
        return logits

    def step(self, token_R: Tensor) -> Tensor:
        logits = self._decoder.step(token_R)
        self._steps.append((self._rows, self._noted()))
        if len(self._steps) % NOTES_AT_ONCE == 0:
            self._fetch()
        return logits

    def keep(self, rows: Tensor) -> None:
        self._decoder.keep(rows)
        self._rows = self._rows[rows]

    def fill(self) -> None:
        self._decoder.fill()

    def _fetch(self) -> None:
        """Moves what was noted to main memory, for which a GPU has to be waited for."""
        self._steps = [(rows, experts.cpu()) for rows, experts in self._steps]

    def experts(self, lengths: Sequence[int]) -> list[Tensor]:
        """The experts of each row's prompt and of its completion of this many tokens; those of the last token, which
        nothing was sampled after, are unknown."""
        from rlft.batch import unknown_expert

        self._fetch()
        each, n = self._prompts[0].shape[1:], len(lengths) // len(self._lengths)
        unknown = unknown_expert(self._prompts[0].dtype)
        shape = (len(lengths), max(len(self._steps), *lengths), *each)
        completions = self._prompts[0].new_full(shape, unknown)
        for t, (rows, experts) in enumerate(self._steps):
            completions[rows, t] = experts
        completions[range(len(lengths)), [length - 1 for length in lengths]] = unknown
        return [torch.cat([self._prompts[r // n], completions[r, :length]]) for r, length in enumerate(lengths)]


@dataclass(eq=False)
class TransformersGenerator(Generator):
    """The live generator of the transformers engine."""

    loads_parts: bool = field(default=True, init=False)

    slot: AdapterSlot
    tokenizer: RunTokenizer
    device: torch.device
    batch_size: int  # the most completions that are decoded together; a group is never split
    weights: Weights = Weights.merged  # which weights decoding multiplies with (configs/generation/auto.yaml)
    ends: Sequence[int] | None = None  # each ends a completion; None: those that model and tokenizer name
    version: int | None = field(default=None, init=False)

    def load_parts(self, parts: Sequence[Part], *, first: bool) -> None:
        tensors, _ = self.slot.sampler_tensors()
        assert tensors is not None, "the engine has weights of its own in a process of its own"
        with torch.no_grad():
            for part in parts:
                part.write_into(tensors[part.name])

    def load(self, adapter: Adapter) -> None:
        self.slot.load_sampler(adapter, weights=self.weights)
        self.version = adapter.version

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        at_once = max(1, self.batch_size // n)
        groups: list[Group] = []
        with torch.no_grad(), self._active() as model:
            for start in range(0, len(prompts), at_once):
                chunk = slice(start, start + at_once)
                groups += self._sample_chunk(model, prompts[chunk], n, seeds[chunk], sampling, start * n)
        return groups

    def loaded_adapter(self) -> LoadedAdapter:
        from rlft.generation.loaded_adapter import LoadedAdapter

        if self.version is None:
            return LoadedAdapter.of({})
        tensors, outdated = self.slot.sampler_tensors()
        if tensors is None:
            since = f"{counted(len(outdated), 'weight')} such as {outdated[0]} changed since then" if outdated else None
            return LoadedAdapter(tensors={}, is_trainers=True, faults=() if since is None else (since,))
        return LoadedAdapter.of(tensors, [f"{name} computes with another sum or copy of it" for name in outdated])

    def rehearse(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> None:
        """Takes the most memory that a batch of these prompts can take: a prefill, and a step of the longest rows."""
        at_once = max(1, self.batch_size // n)
        with torch.no_grad(), self._active() as model:
            decoder = self._decoder(model, prompts[:at_once], max_tokens)
            logits = decoder.prefill(n)
            uniforms = torch.full((len(logits),), 0.5, dtype=widest(logits.device), device=logits.device)
            token, _ = draw(logits, uniforms, Sampling(max_tokens=max_tokens, temperature=1.0))
            decoder.step(token)
            decoder.fill()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        from rlft.batch import score_sequences

        with torch.no_grad(), self._active() as model:
            return score_sequences(model, sequences, self.device)

    def best_tokens(self, sequences: Sequence[Sequence[int]]) -> list[list[tuple[int, float]]]:
        from rlft.batch import best_tokens

        with torch.no_grad(), self._active() as model:
            return best_tokens(model, sequences, self.device)

    def _active(self) -> AbstractContextManager[Any]:
        return self.slot.using(None if self.version is None else "sampler")

    def _decoder(
        self, model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, images: ImageRows | None = None
    ) -> Decoder:
        shared = self.slot.prefix_cache(prompts, max_tokens, images)
        return shared or RepeatedCache(model, prompts, max_tokens, self.device, images)

    def _sample_chunk(
        self, model: Any, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling, first: int
    ) -> list[Group]:
        """Groups of a chunk of prompts, whose first completion is number `first` of the whole call."""
        uniforms = _uniforms(seeds, n, sampling.max_tokens)
        limits = torch.tensor([sampling.tokens_of(prompt) for prompt in prompts]).repeat_interleave(n)
        own_ends = end_tokens(model, self.tokenizer) if self.ends is None else frozenset(self.ends)
        ends = own_ends | frozenset(sampling.stop_token_ids)
        ids, images = [p.token_ids for p in prompts], self.slot.images_of(prompts)
        decoder, experts = self._decoder(model, ids, sampling.max_tokens, images), None
        watch = None
        if sampling.stop:
            prompt_of_row = [prompt.token_ids for prompt in prompts for _ in range(n)]
            watch = StopStrings(sampling.stop, plain_decoder(self.tokenizer), prompt_of_row)
        callback = self.token_callback
        report = None if callback is None else lambda row, token: callback(first + row, token)
        with self.slot.routing.noting() if sampling.notes_experts else nullcontext() as noted:
            if noted is not None:
                decoder = NotingDecoder(decoder, noted, [len(prompt.token_ids) for prompt in prompts])
            tokens_RT, logprobs_RT = _decode(decoder, n, uniforms, ends, sampling, watch, limits, report)
        rows = [[token for token in row if token >= 0] for row in tokens_RT.tolist()]
        if isinstance(decoder, NotingDecoder):
            experts = decoder.experts([len(row) for row in rows])
        stopped = [row[-1] in ends or (watch is not None and r in watch.stopped) for r, row in enumerate(rows)]
        texts = shown_texts(self.tokenizer, rows, stopped, sampling, own_ends)
        groups = []
        for p, prompt in enumerate(prompts):
            rollouts = []
            for r in range(p * n, p * n + n):
                completion = Completion(
                    text=texts[r],
                    token_ids=tuple(rows[r]),
                    logprobs=tuple(logprobs_RT[r, : len(rows[r])].tolist()),
                    finish_reason=FinishReason.stop if stopped[r] else FinishReason.length,
                    experts=None if experts is None else experts[r].numpy(),
                )
                rollouts.append(Rollout(prompt=prompt, completion=completion, policy_version=self.version))
            groups.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
        return groups


def end_tokens(model: Any, tokenizer: RunTokenizer) -> frozenset[int]:
    """Every token that ends a completion of a model without turns: the generation config's and the tokenizer's."""
    return frozenset(turn_ends(tokenizer, "raw", model.generation_config.eos_token_id).ids)


def _uniforms(seeds: Sequence[int], n: int, max_tokens: int) -> Tensor:
    """float64 `[P * n, max_tokens]` in [0, 1): row r is drawn from its own seed, whatever else is in the batch."""
    rows = [
        torch.rand(max_tokens, generator=torch.Generator().manual_seed(seed + i), dtype=torch.float64)
        for seed in seeds
        for i in range(n)
    ]
    return torch.stack(rows)


def _decode(
    decoder: Decoder,
    n: int,
    uniforms_RT: Tensor,
    ends: frozenset[int],
    sampling: Sampling,
    watch: StopStrings | None,
    limits_R: Tensor,
    callback: TokenCallback | None = None,
) -> tuple[Tensor, Tensor]:
    """(token ids int64, log-probs float32), both `[P * n, max_tokens]`; after a row's end they hold -1 and 0.

    A row ends with one of the tokens in `ends`, where `watch` says so, or with its own limit.
    """
    tokens_RT = torch.full(uniforms_RT.shape, -1, dtype=torch.int64)
    logprobs_RT = torch.zeros(uniforms_RT.shape)
    rows, last = torch.arange(len(uniforms_RT)), int(limits_R.max())  # the completions that are still in the batch
    live = torch.ones_like(rows, dtype=torch.bool)  # those of them that have not ended, as far as is known
    logits = decoder.prefill(n)
    device, end_ids = logits.device, torch.tensor(sorted(ends), dtype=torch.int64)
    every = 1 if device.type == "cpu" or callback is not None else READ_EVERY
    uniforms_RT = uniforms_RT.to(device, widest(device))
    unread: list[tuple[Tensor, Tensor]] = []
    for t in range(last):
        token, logprob = draw(logits, uniforms_RT[:, t], sampling)
        unread.append((token, logprob))
        if len(unread) == every or t + 1 == last:
            for i, (token_R, logprob_R) in enumerate(_on_host(unread), t + 1 - len(unread)):
                tokens_RT[rows[live], i], logprobs_RT[rows[live], i] = token_R[live], logprob_R[live]
                if callback is not None:
                    for row in rows[live].tolist():
                        callback(row, int(tokens_RT[row, i]))
                live = live & ~torch.isin(token_R, end_ids)
                if watch is not None:
                    live = live & ~_complete_a_stop(watch, rows, token_R, live)
                live = live & (limits_R[rows] > i + 1)
            unread = []
            if not live.any():
                break
            if (~live).float().mean() >= COMPACT_AT:
                kept = live.nonzero()[:, 0]
                decoder.keep(kept)
                rows, live, there = rows[kept], live[kept], kept.to(device)
                uniforms_RT, token = uniforms_RT.index_select(0, there), token.index_select(0, there)
        logits = decoder.step(token)
    return tokens_RT, logprobs_RT


def _on_host(sampled: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """(token ids int64 `[R]`, their log-probs float32 `[R]`), one pair after the other; the host waits once for all."""
    tokens, logprobs = map(torch.stack, zip(*sampled, strict=True))
    both = torch.stack([tokens.int(), logprobs.view(torch.int32)], 1).cpu()
    return ((token_R.long(), logprob_R.view(torch.float32)) for token_R, logprob_R in both)


def _complete_a_stop(watch: StopStrings, rows_R: Tensor, token_R: Tensor, unfinished_R: Tensor) -> Tensor:
    """bool `[R]`: which of the unfinished rows complete a stop string with this token."""
    steps = zip(rows_R.tolist(), token_R.tolist(), unfinished_R.tolist(), strict=True)
    return torch.tensor([unfinished and watch.completes(row, token) for row, token, unfinished in steps])


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(token int64 `[R]`, its log-prob float32 `[R]`), by inverting the cumulative distribution at `uniform_R`.

    Temperature 0 takes the most likely token and gives its log-prob at temperature 1.
    """
    logits_RV = logits_RV.float()
    if sampling.temperature == 0:
        most_likely = logits_RV.max(-1)
        return most_likely.indices, most_likely.values - logits_RV.logsumexp(-1)
    scaled_RV = logits_RV if sampling.temperature == 1 else logits_RV / sampling.temperature
    logits_RV = _keep_most_likely(scaled_RV, sampling)
    top_R1 = logits_RV.amax(-1, keepdim=True)
    weights_RV = (logits_RV - top_R1).exp_()
    token_R1, total_R1 = _invert(weights_RV, uniform_R[:, None])
    shifted_R1 = logits_RV.gather(-1, token_R1) - top_R1
    return token_R1[:, 0], (shifted_R1 - total_R1.log().float())[:, 0]


def _invert(weights_RV: Tensor, uniform_R1: Tensor) -> tuple[Tensor, Tensor]:
    """(the first index whose cumulative weight exceeds the uniform's share of the total `[R, 1]`, the totals `[R, 1]`).

    Its block of 64 weights is found first, by the blocks' sums, then the index inside: so no running sum goes over the
    whole vocabulary. The sums are in float64 where the device has it (the dtype of `uniform`), because float32 loses
    the tail of a vocabulary of 150,000. On a CPU they are of a few rows at a time, because torch makes a float64 copy
    for them there, which has to stay in the processor's cache.
    """
    blocks_RKB = torch.nn.functional.pad(weights_RV, (0, -weights_RV.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    rows = max(1, AT_ONCE // weights_RV.shape[-1]) if weights_RV.device.type == "cpu" else len(weights_RV)
    sums_RK = torch.cat([part.sum(-1, dtype=uniform_R1.dtype) for part in blocks_RKB.split(rows)])
    until_RK = sums_RK.cumsum(-1)
    total_R1 = until_RK[:, -1:]
    threshold_R1 = uniform_R1 * total_R1
    block_R1 = (until_RK <= threshold_R1).sum(-1, keepdim=True).clamp(max=until_RK.shape[-1] - 1)
    inside_RB = blocks_RKB.gather(1, block_R1[..., None].expand(-1, -1, BLOCK))[:, 0].to(uniform_R1.dtype)
    before_R1 = (until_RK - sums_RK).gather(-1, block_R1)
    place_R1 = (inside_RB.cumsum(-1) + before_R1 <= threshold_R1).sum(-1, keepdim=True)
    # Where rounding leaves no such index, it is the last one with a weight.
    last_R1 = BLOCK - 1 - (inside_RB.flip(-1) > 0).int().argmax(-1, keepdim=True)
    return block_R1 * BLOCK + torch.minimum(place_R1, last_R1), total_R1


def _keep_most_likely(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """Sets logits outside min_p, top_k and top_p, in this order, to -inf; the most likely token always stays."""
    if sampling.min_p > 0:
        least_R1 = logits_RV.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
    if sampling.top_k > 0:
        kth = logits_RV.topk(min(sampling.top_k, logits_RV.shape[-1])).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits_RV.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        drop = torch.zeros_like(mass_before, dtype=torch.bool).scatter(-1, order, mass_before >= sampling.top_p)
        logits_RV = logits_RV.masked_fill(drop, -torch.inf)
    return logits_RV
