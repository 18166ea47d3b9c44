"""Sampling with vLLM, in this process: nothing is started that could outlive the run.

An adapter reaches the engine as a folder (`sending`), under a name, an id and a path never used before: vLLM finds
weights by the id and its prefix cache by the name. With `weights: copy` its own matrices are those of the policy
(`copied_weights`). All weights of a model are loaded in place (`whole_model`). What vLLM does to the process that it
lives in is undone by `vllm_guest`. This relies on the source of vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.generation.engine import NO_FACTS, EngineArgs, EngineFacts, Generator, TokenCallback
from rlft.generation.loaded_adapter import DOWN, UP, LoadedAdapter
from rlft.generation.sending import AdapterFiles
from rlft.generation.stops import shown_texts
from rlft.generation.vllm.copied_weights import CopiedWeights, parameters_of
from rlft.generation.vllm.experts import of_experts, one_by_one
from rlft.generation.vllm.guest import (
    answers,
    end,
    explained,
    guest,
    guest_while_starting,
    of_tokens,
    plain_matrices,
    runs_on_cpu,
    start,
    telling_tokens,
)
from rlft.generation.vllm.images import check_tokens, image_options, read_as_the_trainer, request
from rlft.generation.vllm.memory import CPU_BLOCK_SIZE, cpu_cache_of
from rlft.generation.vllm.options import VLLMKeys, engine_rank
from rlft.generation.vllm.slots import EXPERTS, UnknownLayoutError, known_layout, num_cached_blocks, read_slots
from rlft.generation.vllm.whole_model import Arriving, load_some, load_whole, read_whole
from rlft.tokens.images import ImageProcessor, processor_of
from rlft.tokens.text import RunTokenizer
from rlft.types import Adapter, Completion, FinishReason, Group, Prompt, Rollout, Sampling, UserError, counted

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
    from vllm.outputs import RequestOutput  # pyright: ignore[reportMissingImports]

    from rlft.generation.sending import Part
    from rlft.generation.shared_base import Shape

MIN_TEMPERATURE = 0.01
"""vLLM quietly samples at 0.01 for temperatures between 0 and this, and its log-probs would not be the trainer's."""

OF_V1 = (
    "vLLM runs its V1 model runner, which draws each row that has a seed by itself: about 11 ms more a token at 256 "
    "rows. VLLM_LOGGING_LEVEL=WARNING shows why it is not V2: an engine argument, the model, a missing triton, or "
    "VLLM_USE_V2_MODEL_RUNNER=0"
)

CPU_BATCHED_TOKENS = 8192
"""Tokens of one forward pass on a CPU, unless a sequence or one token of every sequence needs more."""


class VLLMGenerator(Generator):
    """A vLLM engine with at most one adapter. On a CPU the size of its KV cache is given by `memory.cpu_cache_of`.

    keys: the engine's keys. With `weights: copy`, its own matrices hold the policy, made from the base of the networks
    that it serves (`serve`).
    args: what it is opened with. A completion also ends with the tokens that model and tokenizer name.

    Raises UserError: by the key generation.engine: vLLM cannot start.
    """

    loads_parts = True

    def __init__(self, keys: VLLMKeys, args: EngineArgs) -> None:
        self.max_sequence_tokens, self._ends = args.max_sequence_tokens, tuple(args.ends.ids)
        self.version: int | None = None
        options: dict[str, Any] = {
            "model": args.model_path,
            "dtype": args.dtype,
            "trust_remote_code": args.trust_remote_code,
            "revision": args.revision,
            "tokenizer_revision": args.revision,
            "quantization": "bitsandbytes" if args.quantization == "4bit" else None,
            "max_model_len": args.max_sequence_tokens,
            "max_num_seqs": keys.max_num_seqs,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",  # after temperature
            "generation_config": "auto",  # only for its end tokens: all sampling settings are given with each request
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
            "seed": args.seed % 2**32,  # NumPy takes no more
        }
        self._is_whole = args.lora_rank is None
        self._copies = keys.weights == "copy" and not self._is_whole
        if args.lora_rank is not None and not self._copies:
            # With one slot, a version that is loaded replaces the one before. Rows of base and adapter are never mixed,
            # which would give wrong base rows on a CPU when all slots are taken.
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": engine_rank(args.lora_rank)}
            if args.lora_modules is not None:
                # Else it also wraps an output head, whose wrapper computes no log-probs of prompts.
                options["lora_target_modules"] = sorted(args.lora_modules)
        with guest_while_starting(keys.batch_invariant):
            self._on_cpu = runs_on_cpu()
            options |= image_options(args.images, on_cpu=self._on_cpu)
            if self._on_cpu:
                options |= {
                    "enforce_eager": True,
                    "block_size": CPU_BLOCK_SIZE,
                    "kv_cache_memory_bytes": cpu_cache_of(options),
                    # A prompt prefilled in two parts makes vLLM rewind its generator, which CPU ones cannot do. Without
                    # that there is no prefix cache of recurrent states.
                    "enable_chunked_prefill": False,
                    "enable_prefix_caching": not _is_recurrent(options, keys.options),
                    "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, args.max_sequence_tokens, keys.max_num_seqs),
                }
            else:
                options |= {
                    "enforce_eager": keys.enforce_eager,
                    "gpu_memory_utilization": keys.gpu_memory_utilization,
                    "enable_sleep_mode": keys.sleep,
                }
            images = processor_of(args.tokenizer) if args.images else None
            with plain_matrices() if self._copies and self._on_cpu else nullcontext():
                self._llm: Any = _start(options, keys.options, images)
        self._can_sleep = keys.sleep and not self._on_cpu
        self._asleep = False
        self._slot: Any = args.slot
        self._copied: CopiedWeights | None = None
        self._written: dict[str, int] = {}  # where the matrices lie that hold a policy, of all jobs (`CopiedWeights`)
        self._tokenizer = RunTokenizer(self._llm.get_tokenizer())
        self._files = AdapterFiles()
        self._model_path = args.model_path
        self._base = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
        self._folder: Path | None = None
        self._lora: LoRARequest | None = None
        self._shapes: Mapping[str, Shape] = {}  # {name: shape} of the adapter's or model's weights in use
        self._arriving = Arriving()
        self._old_blocks: int | None = 0
        self._num_loads = 0

    def adopt(self, model: nn.Module, device: torch.device) -> None:
        """As of any generator.

        Sleeping then frees the KV cache alone. A model that was adopted before can no longer be used.
        """
        from rlft.generation.shared_base import share

        self._release()
        [engine] = self._awake().apply_model(_itself)
        names = getattr(model, "own_names", None)  # of a text model inside a folder's own class
        self.shared_base = share(model, engine, device, str if names is None else names.outside)

    def serve(self, slot: Any) -> None:
        self._slot, self._copied = slot, None

    @property
    def metrics(self) -> Mapping[str, float]:  # type: ignore[override]
        return {} if self._copied is None else {"sampler/rounding": self._copied.rounding}

    @property
    def facts(self) -> EngineFacts:  # type: ignore[override]
        """By which runner, schedule and graphs vLLM computes, which its log says at a level that is not shown."""
        config = self._awake().llm_engine.vllm_config
        try:
            with known_layout():
                graphs, is_v2 = config.compilation_config.cudagraph_mode.name, config.use_v2_model_runner
                runner, is_ahead = self._llm.collective_rpc(_runner)[0], config.scheduler_config.async_scheduling
        except UnknownLayoutError:
            return NO_FACTS
        ahead = "vLLM plans a step while it computes the one before" if is_ahead else "it plans between its steps"
        rows = (
            ("vLLM's runner", "V2" if is_v2 else "V1", runner),
            ("vLLM's schedule", "asynchronous" if is_ahead else "synchronous", ahead),
            ("CUDA graphs", graphs.lower(), "by which vLLM starts its kernels"),
        )
        return EngineFacts(rows=rows if not self._on_cpu else rows[:2], notes=() if is_v2 or self._on_cpu else (OF_V1,))

    def _copied_weights(self) -> CopiedWeights:
        llm = self._awake()
        if self._copied is None:
            assert self._slot is not None, "only an engine in the process of the trainer's base copies it"
            [engine] = llm.apply_model(_itself)
            self._copied = CopiedWeights(parameters_of(self._slot.backbone.model), engine, self._written)
        return self._copied

    def load(self, adapter: Adapter) -> None:
        self._awake()
        if self._copies:
            self._copied_weights().load(adapter)
        elif self._is_whole:
            self._load_whole(adapter)
        else:
            self._load_lora(adapter)
        self._forget_prefixes()
        self.version = adapter.version
        self._check_addresses()

    def _load_lora(self, adapter: Adapter) -> None:
        """Names count loads, not versions, so that the same version in another job of a sweep has another name."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        self._num_loads += 1
        name = f"policy-v{adapter.version}-{self._num_loads}"
        folder = self._files.write(self._as_it_reads(adapter))
        request = LoRARequest(name, self._num_loads, str(folder))
        engine, remedy = self._llm.llm_engine, "change the adapter's settings, or choose generation=transformers"
        try:
            # What it took once it takes again: a later error is the machine's, and a cluster replaces the engine.
            key = "generation.engine" if self._num_loads == 1 else None
            with explained("vLLM refuses the adapter", remedy, key), guest(self._on_cpu):
                engine.add_lora(request)
        except Exception:
            self._files.remove(folder)
            raise
        assert engine.list_loras() == {self._num_loads}, "the engine holds exactly the version just loaded"
        self._shapes = {name: tuple(weight.shape) for name, weight in adapter.weights.items()}
        if self._folder is not None:
            self._files.remove(self._folder)
        self._folder, self._lora = folder, request

    def load_parts(self, parts: Sequence[Part], *, first: bool) -> None:
        if first:
            self._arriving = Arriving()
        with self._loading_whole():
            for layer in self._arriving.layers(parts):
                load_some(self._awake(), layer)

    def _load_whole(self, policy: Adapter) -> None:
        arrived, self._arriving = self._arriving, Arriving()
        with self._loading_whole():
            load_whole(self._awake(), {**arrived.rest, **policy.weights})
        self._shapes = arrived.shapes | {name: tuple(weight.shape) for name, weight in policy.weights.items()}

    @contextmanager
    def _loading_whole(self) -> Iterator[None]:
        key = None if self._shapes else "generation.engine"
        with explained("vLLM refuses the model's weights", "choose generation=transformers", key), guest(self._on_cpu):
            yield

    def _forget_prefixes(self) -> None:
        """Empties the prefix cache: blocks of older versions only take room, or in a copy would be found."""
        engine = self._awake().llm_engine
        engine.reset_prefix_cache()
        try:
            self._old_blocks = num_cached_blocks(engine)
        except UnknownLayoutError:
            self._old_blocks = None

    def loaded_adapter(self) -> LoadedAdapter | str:
        if self._old_blocks is None:
            return "this vLLM keeps its prefix cache in another way"
        of_earlier = f"its prefix cache has {counted(self._old_blocks, 'block')} of an earlier version"
        faults = [of_earlier] if self._old_blocks else ()
        if self._copies:
            return self._copied_weights().held(faults)
        if self._lora is None and not self._shapes:
            return LoadedAdapter.of({})
        if self._num_processes > 1:
            return f"vLLM divides its layers among {counted(self._num_processes, 'process')}"
        [model] = self._awake().apply_model(_itself)
        try:
            if self._lora is None:
                return read_whole(model, self._shapes, tuple(faults))
            unread = [module + end for module in self._rows if EXPERTS in module for end in (DOWN, UP)]
            return LoadedAdapter.of(read_slots(model, self._lora.lora_int_id, self._rows), faults, unread)
        except UnknownLayoutError as error:
            return f"this vLLM keeps adapters in another way ({error})"

    @property
    def _num_processes(self) -> int:
        """How many processes the engine is divided among. Others than this one would send their part of the model."""
        return self._awake().llm_engine.vllm_config.parallel_config.world_size

    @property
    def _rows(self) -> dict[str, int]:
        """{adapted module: rows of its B} of the adapter in use."""
        return {name.removesuffix(UP): shape[0] for name, shape in self._shapes.items() if name.endswith(UP)}

    def _as_it_reads(self, adapter: Adapter) -> Adapter:
        """The adapter, with experts one by one unless this model of vLLM's takes them stacked."""
        if not of_experts(adapter):
            return adapter
        [engine] = self._awake().apply_model(_itself)
        stacked = getattr(engine, "is_3d_moe_weight", False)
        return adapter if stacked else one_by_one(adapter, self._model_path, **self._base)

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        """As of any generator; at temperature 0 all n are the same, drawn once, with log-probs at temperature 1.

        Raises ValueError: a temperature between 0 and 0.01, or a request longer than `max_sequence_tokens`.
        """
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        self._check(prompts, n, seeds, sampling)
        copies = n if sampling.temperature == 0 else 1
        settings: dict[str, Any] = {
            "n": n // copies,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": list(dict.fromkeys((*self._ends, *sampling.stop_token_ids))),
            "logprobs": 0,  # the sampled token's only
            "flat_logprobs": True,
            "detokenize": bool(sampling.stop),  # without stop strings once at the end is enough
        }
        params = [
            SamplingParams(seed=int(seed), max_tokens=sampling.tokens_of(prompt), **settings)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        # Completions that are all the same are drawn once, and their tokens are not reported.
        callback = self.token_callback if copies == 1 else None
        outputs = self._generate([request(prompt) for prompt in prompts], params, callback)
        for prompt, output in zip(prompts, outputs, strict=True):
            check_tokens(prompt, output.prompt_token_ids or (), self._model_path)
        return [self._group(prompt, output, copies, sampling) for prompt, output in zip(prompts, outputs, strict=True)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first.

        They are always computed, since vLLM reads no prefix cache for such requests. A sequence must be shorter than
        `max_sequence_tokens`, since vLLM insists on sampling a token after it.
        """
        for ids in sequences:
            if not 2 <= len(ids) < self.max_sequence_tokens:
                raise ValueError(f"a sequence to score has 2 .. {self.max_sequence_tokens - 1} tokens, not {len(ids)}")
        outputs = self._generate(of_tokens(sequences), [_scoring() for _ in sequences])
        return [_flat(output.prompt_logprobs, len(ids) - 1) for output, ids in zip(outputs, sequences, strict=True)]

    def sleep(self) -> None:
        """Frees the device's memory until the next call; adapters stay. Does nothing on a CPU or with `sleep: false`.

        A base that is shared with the trainer stays where it is: only the KV cache is freed.
        """
        if not self._can_sleep or self._asleep:
            return
        if self.shared_base is None:
            self._llm.sleep(level=1)  # level 2 would drop the base and the adapters
        else:
            self._llm.sleep(level=0)
            self._llm.release_kv_cache_memory()
        self._asleep = True
        self._check_addresses()

    def wake(self) -> None:
        """Takes the memory again; `load`, `sample` and `score` do so themselves."""
        if not self._asleep:
            return
        if self.shared_base is None:
            self._llm.wake_up()
        else:
            self._llm.wake_up(["kv_cache"])
        self._asleep = False
        self._check_addresses()

    def _check_addresses(self) -> None:
        if self.shared_base is not None:
            self.shared_base.check_addresses()

    def close(self) -> None:
        """Ends the engine and removes the adapter folders. Safe to call twice.

        The model that was adopted can no longer be used: what it reads is the engine's.
        """
        self._release()
        self.serve(None)
        if self._llm is not None:
            end(self._llm, self._on_cpu)
            self._llm = None
        self._files.close()

    def _release(self) -> None:
        if self.shared_base is not None:
            self.shared_base.release()
        self.shared_base = None

    def _awake(self) -> Any:
        """The engine (vLLM's `LLM`), ready to work."""
        if self._llm is None:
            raise ValueError("this generator is closed")
        self.wake()
        return self._llm

    def _generate(
        self, requests: Sequence[Mapping[str, Any]], params: Sequence[Any], callback: TokenCallback | None = None
    ) -> list[RequestOutput]:
        llm = self._awake()
        with telling_tokens(llm.llm_engine, callback):
            return answers(llm, requests, params, self._on_cpu, lora_request=self._lora)

    def _check(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> None:
        if n < 1 or len(prompts) != len(seeds):
            raise ValueError(f"n >= 1 and one seed a prompt, got n={n}, {len(prompts)} prompts, {len(seeds)} seeds")
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(f"vLLM samples at 0 or at {MIN_TEMPERATURE} and above, not at {sampling.temperature}")
        for prompt in prompts:
            limit = sampling.tokens_of(prompt)
            if not prompt.token_ids or len(prompt.token_ids) + limit > self.max_sequence_tokens:
                raise ValueError(
                    f"prompt {prompt.id}: {counted(len(prompt.token_ids), 'token')} and {limit} to come; "
                    f"the engine was made for 1 or more, and {self.max_sequence_tokens} together"
                )

    def _group(self, prompt: Prompt, output: RequestOutput, copies: int, sampling: Sampling) -> Group:
        children = sorted(output.outputs, key=lambda child: child.index) * copies
        stopped = [child.finish_reason == "stop" for child in children]
        rows = [child.token_ids for child in children]
        texts = shown_texts(self._tokenizer, rows, stopped, sampling, self._ends)
        completions = [
            Completion(
                text=text,
                token_ids=tuple(child.token_ids),
                logprobs=tuple(_flat(child.logprobs, len(child.token_ids))),
                finish_reason=_finish_reason(child.finish_reason, prompt),
            )
            for child, text in zip(children, texts, strict=True)
        ]
        rollouts = (Rollout(prompt=prompt, completion=c, policy_version=self.version) for c in completions)
        return Group(prompt=prompt, rollouts=tuple(rollouts))


def _itself(model: nn.Module) -> nn.Module:
    return model


def _runner(worker: Any) -> str:
    """The class of a worker's model runner."""
    runner = type(worker.model_runner)
    return f"{runner.__module__.removeprefix('vllm.')}.{runner.__name__}"


def _is_recurrent(options: Mapping[str, Any], further: Mapping[str, Any]) -> bool:
    """Whether some layers of the model have recurrent states in place of keys and values."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    with explained("vLLM cannot read the model", "use generation=transformers", "generation.engine"):
        names = ("model", "dtype", "trust_remote_code", "revision", "max_model_len", "language_model_only")
        known = {name: options[name] for name in names if name in options}
        config = EngineArgs(**{**known, **further}).create_model_config()
        return config.is_hybrid or config.is_attention_free


def _start(options: Mapping[str, Any], further: Mapping[str, Any], images: ImageProcessor | None = None) -> Any:
    for name, value in further.items():
        # The trainer may hold the base in 4 bits and the engine hold it otherwise.
        if options.get(name) is not None and name != "quantization":
            problem = f"is set to {options[name]} on this machine"
            raise UserError(f"generation.vllm.options.{name}", problem, got=value, remedy="leave it out")
    without = f"leave out generation.vllm.options ({', '.join(further)}), " if further else ""
    room = "make room for it (generation.vllm.gpu_memory_utilization), "
    remedy = f"{without}{'or ' if without else ''}choose generation=transformers"
    with explained("vLLM could not start", remedy, "generation.engine", room=room):
        llm = start({**options, **further})
        try:
            if images is not None:
                read_as_the_trainer(llm, images)
            # What it has no kernels for shows in the shortest row, and not in the first step.
            row = [0] * min(2, options["max_model_len"] - 1)
            answers(llm, of_tokens([row]), [_scoring()], runs_on_cpu())
        except BaseException:
            end(llm, runs_on_cpu())
            raise
        return llm


def _scoring() -> SamplingParams:
    """Settings of a request that gives the log-probs of its prompt's tokens."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    settings: dict[str, Any] = {"prompt_logprobs": 0, "flat_logprobs": True, "detokenize": False}
    return SamplingParams(temperature=1.0, seed=0, max_tokens=1, **settings)


def _flat(logprobs: Any, expected: int) -> list[float]:
    """The chosen tokens' log-probs from vLLM's FlatLogprobs: one a position, none for a prompt's first token."""
    values = list(logprobs.logprobs)
    assert len(values) == expected, f"{len(values)} log-probs for {expected} tokens"
    return values


def _finish_reason(reason: str | None, prompt: Prompt) -> FinishReason:
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion of prompt {prompt.id} with {reason!r}")
    return FinishReason(reason)
