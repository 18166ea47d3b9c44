"""Sampling with the trainer's own copy of the base: no second model, no server, any machine.

Each prompt is prefilled once per group. Where the model's attention is rlft's own, a prompt's keys and values are kept
once for its G completions; otherwise they are repeated. Finished rows leave the batch. Every completion has its own
stream of random numbers, so it depends on its seed alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self

from rlft.config.bounds import PositiveInt
from rlft.config.keys import Key
from rlft.config.schema import AUTO, FASTEST
from rlft.generation import graphs
from rlft.generation.decoding import AT_ONCE, Decoder, NotingDecoder, Sampled, bytes_of_a_draw, decode, draw, uniforms
from rlft.generation.drafts import widest_pass
from rlft.generation.engine import NO_FACTS, Engine, EngineArgs, EngineFacts, Generator, Ids, Missing, Modules
from rlft.generation.memory import FLOAT64, PLAIN, Decoding, EngineMemory, Load, MemoryPart, ModelSizes, When
from rlft.generation.repeated_cache import RepeatedCache
from rlft.generation.stops import StopStrings, plain_decoder, shown_texts
from rlft.system.device import kind_of, widest
from rlft.system.lazy import torch
from rlft.system.machine import processor
from rlft.system.products import fastest_dtype
from rlft.system.terminal import say
from rlft.tokens.text import RunTokenizer, turn_ends
from rlft.types import Adapter, Completion, FinishReason, Group, Prompt, Rollout, Sampling, UserError, counted

if TYPE_CHECKING:
    from torch import Tensor

    from rlft.config.model import LoraSettings
    from rlft.generation.loaded_adapter import LoadedAdapter
    from rlft.generation.sending import Part
    from rlft.types import ImageRows


class Weights(StrEnum):
    """Which weights decoding multiplies with."""

    merged = "merged"
    merged_bfloat16 = "merged_bfloat16"
    merged_int8 = "merged_int8"
    adapted_bfloat16 = "adapted_bfloat16"  # merged_bfloat16 as it was in older runs (`rlft.runs.run_folder`)
    apart = "apart"
    fastest = FASTEST  # of the three that are merged; it is measured once in a process


ITEMSIZE = {Weights.merged_bfloat16: 2, Weights.merged_int8: 1, Weights.adapted_bfloat16: 2}
"""Bytes of a weight that is rounded for decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformers(Engine):
    """`generation.transformers`; meanings and defaults are in configs/generation/auto.yaml."""

    title: ClassVar[str] = "the transformers engine"
    on_trainers_base: ClassVar[bool] = True
    serves_whole_models: ClassVar[bool] = True
    notes_experts: ClassVar[bool] = True
    why_no_drafts: ClassVar[str | None] = None
    divisible: ClassVar[bool] = False  # products of other shapes may differ in their last bits
    at_once_key: ClassVar[str | None] = "batch_size"
    may_change: ClassVar[tuple[str, ...]] = ("batch_size", "graphs")
    grows: ClassVar[Mapping[str, tuple[str, str]]] = {
        "sample": ("keys and values of the completions", "batch_size"),
        "publish": ("the engine's sum of base and adapter", "weights"),
    }

    batch_size: PositiveInt
    weights: Weights
    graphs: Annotated[Literal["auto", "off"], Key(before="off")]

    @property
    def chosen(self) -> Weights:
        """`weights`, with what was measured in place of `fastest`."""
        return _fastest() if self.weights is Weights.fastest else self.weights

    @property
    def in_graphs(self) -> bool:  # type: ignore[override]
        return self.graphs == AUTO

    @property
    def needs_sums(self) -> bool:
        return self.weights in (*ITEMSIZE, Weights.fastest)

    def check(self, *, plain_kernels: bool) -> None:
        """Refuses rounded sums of base and adapter where there are no sums, without rlft's LoRA layers."""
        if plain_kernels and self.needs_sums:
            problem = "needs rlft's LoRA layers, which model.kernels=plain does without"
            raise UserError("weights", problem, got=self.weights, remedy="use apart, or model.kernels=auto")

    @property
    def rounds(self) -> bool:
        return self.chosen in ITEMSIZE

    @property
    def is_corrected(self) -> bool:
        return self.rounds and self.weights is not Weights.adapted_bfloat16

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
        parts = [*self._parts(model, load, largest), *self._fixed_parts(model, load)]
        return EngineMemory(parts=tuple(parts), freed_block=freed)

    def settled(
        self, lora: LoraSettings | None, modules: Modules, fits: Callable[[Self], bool], device: str, quantized: bool
    ) -> Self:
        """Without CUDA graphs where a run on a GPU has no memory for what they hold."""
        has_graphs = self.graphs == AUTO and kind_of(torch.device(device)).has_kernels
        return self if not has_graphs or fits(self) else replace(self, graphs="off")

    def smaller(self, model: ModelSizes, load: Load, room: int) -> Iterator[Self]:
        if self._fixed_parts(model, load):
            yield replace(self, graphs="off")
        if load.decodings and self.chosen is Weights.merged:
            yield replace(self, weights=Weights.apart)
        group = max((decoding.samples for decoding in load.decodings), default=self.batch_size)
        if group < self.batch_size and any(self._prompts_at_once(decoding) > 1 for decoding in load.decodings):
            yield replace(self, batch_size=group)

    def open(self, args: EngineArgs) -> TransformersGenerator:
        of_run = args.slot, args.tokenizer, args.device, self.batch_size
        keys = {"weights": self.chosen, "ends": args.ends.ids, "in_graphs": self.in_graphs}
        return TransformersGenerator(*of_run, **keys, decodings=args.decodings)

    def _prompts_at_once(self, decoding: Decoding) -> int:
        return min(decoding.num_prompts, max(1, self.batch_size // decoding.samples))

    def _parts(self, model: ModelSizes, load: Load, decoding: Decoding) -> list[MemoryPart]:
        weights = model.linear + model.vocabulary * model.hidden if self.is_corrected else model.adapted
        has_sums = self.chosen is not Weights.apart and model.itemsize > 2 and not model.plain
        sums = weights * ITEMSIZE.get(self.chosen, model.itemsize) if has_sums else 0
        prompts, longest = self._prompts_at_once(decoding), len(decoding.longest)
        rows = prompts * decoding.samples
        tokens = prompts * longest + rows * load.max_tokens * (not self._fixed_parts(model, load))
        prefill = prompts * longest * model.layer_width * model.itemsize
        together = max(rows, math.prod(widest_pass(rows, load.max_tokens, load.draft_rows)))
        logits = together * bytes_of_a_draw(model.vocabulary, model.itemsize, decoding.sampling) + AT_ONCE * FLOAT64
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

    def _fixed_parts(self, model: ModelSizes, load: Load) -> list[MemoryPart]:
        """What CUDA graphs hold from the first sampling on, for the largest of all decodings; none without graphs."""
        packs = model.packed and not model.plain and model.itemsize == 2
        if self.graphs != AUTO or load.device != "cuda" or load.draft_rows or not packs:
            return []
        rows, prompt_tokens, step, layer = 0, 0, 0, model.layer_width * model.itemsize
        for each in reversed(load.decodings):  # as they are rehearsed
            prompts = self._prompts_at_once(each)
            size = graphs.bucket(prompts * each.samples)
            rows, prompt_tokens = max(rows, size), graphs.enlarged(prompt_tokens, prompts * len(each.longest))
            step = max(step, size * (bytes_of_a_draw(model.vocabulary, model.itemsize, each.sampling) + layer))
        step += rows * load.max_tokens * FLOAT64
        keys = (prompt_tokens + rows * load.max_tokens) * model.key_size * model.itemsize
        return [
            MemoryPart(name="keys and values for graphs", bytes=keys, when=When.always, key="graphs"),
            MemoryPart(name="CUDA graphs", bytes=step, when=When.always, key="graphs"),
        ]


@functools.cache
def _fastest() -> Weights:
    """The weights that this processor decodes fastest with; on a GPU, whose base has 16 bits, none are rounded."""
    if torch.cuda.is_available():
        return Weights.merged
    dtype = fastest_dtype()
    weights = Weights.merged if dtype == "float32" else Weights(f"merged_{dtype}")
    say(f"generation.transformers.weights: {weights} is fastest on {processor()}")
    return weights


class AdapterSlot(Protocol):
    """The place on the trainer's base where the engine keeps its own copy of a published adapter (`Roles`), or the
    policy itself where all weights are trained (`WholeModel`).

    `prefix_cache` gives a decoder that keeps each prompt once, or None where the model cannot be decoded like that.
    """

    def images_of(self, prompts: Sequence[Prompt]) -> ImageRows | None: ...

    def prefix_cache(self, prompts: Ids, max_tokens: int, images: ImageRows | None = None) -> Decoder | None: ...

    def load_sampler(self, adapter: Adapter, *, weights: str = "apart") -> None: ...

    def sampler_tensors(self) -> tuple[dict[str, Tensor] | None, list[str]]: ...

    def using(self, role: str | None) -> AbstractContextManager[Any]: ...

    @property
    def routing(self) -> Any:
        """`rlft.model.experts.Routing`, which notes experts."""
        ...


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
    in_graphs: bool = False  # whether to decode in CUDA graphs where that can be
    decodings: Sequence[Decoding] = ()  # as in `EngineArgs`
    version: int | None = field(default=None, init=False)

    @functools.cached_property
    def _graphs(self) -> graphs.Graphs | None:
        return graphs.Graphs(self.device) if self.in_graphs and kind_of(self.device).has_kernels else None

    @property
    def facts(self) -> EngineFacts:  # type: ignore[override]
        """Whether it decodes in CUDA graphs, on a GPU that has them."""
        if not kind_of(self.device).has_kernels:
            return NO_FACTS
        if self._graphs is None:
            return EngineFacts(rows=(("CUDA graphs", "no", "generation.transformers.graphs is off"),))
        asked = self.decodings or [Decoding(num_prompts=1, samples=1, longest=(0,))]
        found = [
            graphs.obstacle(self.slot.prefix_cache([ids], each.sampling.max_tokens), each.sampling, reports=False)
            for each in asked
            for ids in (each.longest, each.longest[:1])  # the longest prompt, and the shortest that may be
        ]
        why = self._graphs.problem or next((each for each in found if each is not None), None)
        value = "yes" if why is None else "no" if self._graphs.problem or None not in found else "for some rows"
        return EngineFacts(rows=(("CUDA graphs", value, why or "a launch for a token of all rows"),))

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
                if sampling.drafts is not None:
                    sampling.drafts.add(groups[chunk])
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

    def rehearse(self, prompts: Ids, n: int, max_tokens: int, draft_rows: int = 0, sampling: Sampling = PLAIN) -> None:
        """Takes the most memory that a batch of these prompts can take: a prefill, a step of the longest rows,
        and a pass of the most drafts."""
        at_once = max(1, self.batch_size // n)
        how = replace(sampling, max_tokens=max_tokens, drafts=draft_rows or None)
        with torch.no_grad(), self._active() as model:
            decoder = self._decoder(model, prompts[:at_once], max_tokens)
            if self._graphs is not None and graphs.obstacle(decoder, how, reports=False) is None:
                uniforms_RT = torch.full((n * len(prompts[:at_once]), max_tokens), 0.5)
                limits = torch.full((len(uniforms_RT),), min(3, max_tokens))  # a step is recorded, another one compared
                ends = self._own_ends(model) | frozenset(how.stop_token_ids)
                sampled = Sampled(uniforms_RT.shape, ends, None, limits, None)
                self._graphs.decode(decoder, n, uniforms_RT, how, sampled, role=self.version is not None)
                return
            logits = decoder.prefill(n)
            uniform_R = torch.full((len(logits),), 0.5, dtype=widest(logits.device), device=logits.device)
            token, _ = draw(logits, uniform_R, how)
            logits = decoder.step(token)
            decoder.fill()
            draw(logits, uniform_R, how)
            rows, each = widest_pass(len(logits), max_tokens, draft_rows)
            if rows and decoder.checks():
                decoder.keep(torch.arange(rows))
                row_N, last = torch.arange(rows).repeat_interleave(each), max_tokens - 1
                of_row_N = row_N.to(token.device)
                del logits
                logits = decoder.check(token[of_row_N], row_N, torch.arange(last - each, last).repeat(rows))
                draw(logits, uniform_R[of_row_N], how)

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

    def _decoder(self, model: Any, prompts: Ids, max_tokens: int, images: ImageRows | None = None) -> Decoder:
        shared = self.slot.prefix_cache(prompts, max_tokens, images)
        return shared or RepeatedCache(model, prompts, max_tokens, self.device, images)

    def _own_ends(self, model: Any) -> frozenset[int]:
        return end_tokens(model, self.tokenizer) if self.ends is None else frozenset(self.ends)

    def _sample_chunk(
        self, model: Any, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling, first: int
    ) -> list[Group]:
        """Groups of a chunk of prompts, whose first completion is number `first` of the whole call."""
        uniforms_RT = uniforms(seeds, n, sampling.max_tokens)
        limits = torch.tensor([sampling.tokens_of(prompt) for prompt in prompts]).repeat_interleave(n)
        own_ends = self._own_ends(model)
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
            sampled = Sampled(uniforms_RT.shape, ends, watch, limits, report)
            if self._graphs is None or graphs.obstacle(decoder, sampling, reports=report is not None) is not None:
                decode(decoder, ids, n, uniforms_RT, sampling, sampled)
            else:
                self._graphs.decode(decoder, n, uniforms_RT, sampling, sampled, role=self.version is not None)
        rows = [[token for token in row if token >= 0] for row in sampled.tokens_RT.tolist()]
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
                    logprobs=tuple(sampled.logprobs_RT[r, : len(rows[r])].tolist()),
                    finish_reason=FinishReason.stop if stopped[r] else FinishReason.length,
                    experts=None if experts is None else experts[r].numpy(),
                )
                rollouts.append(Rollout(prompt=prompt, completion=completion, policy_version=self.version))
            groups.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
        return groups


def end_tokens(model: Any, tokenizer: RunTokenizer) -> frozenset[int]:
    """Every token that ends a completion of a model without turns: the generation config's and the tokenizer's."""
    return frozenset(turn_ends(tokenizer, "raw", model.generation_config.eos_token_id).ids)
