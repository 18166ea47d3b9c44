"""vLLM as a guest in the trainer's process: what it does to the process is undone. This relies on vLLM 0.33's source.

It replaces `torch.set_num_threads`, reseeds and draws from the global random streams, sets LD_PRELOAD and
sys.excepthook, and binds memory to one NUMA node. The trainer lives in the same process, so all of that is undone.
Two engines may live in it, the policy's and a teacher's: ending one leaves the other what they have in common.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from rlft.generation.engine import TokenCallback
from rlft.generation.vllm.options import DEAD_ENGINE
from rlft.system.interrupt import Deferred
from rlft.system.memory import is_memory_error
from rlft.types import UserError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: kill -9 leaves nothing behind
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "FLASHINFER_LOGGING_LEVEL": "error",  # a library of vLLM's on CUDA, which says when it tunes a kernel
}
"""Set before vLLM is imported, unless the user has set them."""

ELSEWHERE = "choose generation=transformers, or transformers for a teacher"  # what to do where vLLM cannot compute


_SPEAKS_OF_MEMORY = re.compile(r"memory|kv.?cache|cache blocks|max_model_len|max seq len|\broom\b", re.IGNORECASE)


def lacks_memory(error: BaseException) -> bool:
    """Whether this error of vLLM's, or one that caused it, is about memory, so that room for it would help."""
    causes: BaseException | None = error
    while causes is not None:
        if _SPEAKS_OF_MEMORY.search(str(causes)) or isinstance(causes, MemoryError):
            return True
        causes = causes.__cause__ or causes.__context__
    return False


_running: list[Any] = []  # instances of vLLM's `LLM` that were started in this process and have not been ended


class VLLMError(RuntimeError):
    """vLLM failed while it computed; the message has what it said."""


@contextmanager
def explained(doing: str, remedy: str, key: str | None = None, *, room: str = "") -> Iterator[None]:
    """Inside, vLLM works: an error of its own says what it was doing, what it said and what to do.

    vLLM has no type of error for what it does not support. It raises ValueError for arguments, KeyError for weights,
    AssertionError or NotImplementedError for layers, RuntimeError for kernels, ImportError for packages, and others.

    Args:
        doing: what failed, such as "vLLM could not start".
        key: the config key that led to it; None where the run has computed with vLLM before.
        room: what to do first where the error is about memory, before `remedy`.

    Raises:
        UserError: with `key`.
        VLLMError: without it. Then memory errors, whose remedy depends on the stage, are left as they are, and so are
            those of rlft's own code that vLLM calls.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if type(error).__name__ == DEAD_ENGINE:
            raise
        cause = error.__cause__ if isinstance(error, VLLMError) and error.__cause__ is not None else error
        problem = f"{doing}: {error_text(cause)}"
        if key is not None:
            first = room if lacks_memory(error) else ""
            raise UserError(key, problem, got="vllm", remedy=f"{first}{remedy}") from error
        if is_memory_error(error) or not _module_of(error)[0].startswith("vllm"):
            raise
        raise VLLMError(f"{problem}; {remedy}") from error


def error_text(error: BaseException) -> str:
    """An error in words: its text if that is a sentence, else also its type and where in vLLM it was raised.

    >>> error_text(ValueError("LoRA rank 32 is greater than max_lora_rank 16."))
    'LoRA rank 32 is greater than max_lora_rank 16'
    >>> error_text(KeyError("layers.0.weight"))
    "KeyError: 'layers.0.weight'"
    """
    text = str(error).strip().rstrip(".")
    if " " in text:
        return text
    module, line = _module_of(error)
    where = f" in {module}, line {line}" if module else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def _module_of(error: BaseException) -> tuple[str, int]:
    """The last module of vLLM or rlft that the error went through, and its line; ("", 0): it is the caller's."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in ("vllm", "rlft"):
            return module, line
    return "", 0


def start(options: Mapping[str, Any]) -> Any:
    """A new engine (vLLM's `LLM`) in this process. Call it inside `guest_while_starting`; `end` ends the engine."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    llm = LLM(**options)
    _running.append(llm)
    return llm


@contextmanager
def plain_matrices() -> Iterator[None]:
    """Inside, a vLLM on a CPU starts with linear layers whose matrices stay as they are, where they can be written.

    It would pack them for its own kernels, as it still does with an output head, whose matrix it keeps.
    """
    import torch
    from vllm.model_executor.layers import utils  # pyright: ignore[reportMissingImports]

    pack: Any = utils.dispatch_cpu_unquantized_gemm

    def kept(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2 and remove_weight:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            pack(layer, remove_weight=remove_weight)

    with mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", kept):
        yield


def end(llm: Any, on_cpu: bool) -> None:
    """Ends an engine.

    vLLM would destroy its process groups, which belong to the process and not to the engine: another running engine
    would fail at its next step. So only the last engine destroys them.
    """
    _running[:] = [other for other in _running if other is not llm]
    groups_kept = mock.patch("vllm.v1.engine.core.cleanup_dist_env_and_memory", free_memory)
    with guest(on_cpu), groups_kept if _running else nullcontext():
        llm.llm_engine.engine_core.shutdown()


def free_memory() -> None:
    """Frees what nothing refers to any more, also on the device."""
    import torch

    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def answers(
    llm: Any, requests: Sequence[Mapping[str, Any]], params: Sequence[Any], on_cpu: bool, **settings: Any
) -> list[Any]:
    """vLLM's outputs for these requests, in their order; on any error the engine is left without requests.

    Args:
        requests: vLLM's prompts, such as those of `of_tokens`.
        params: vLLM's SamplingParams of each request.
        settings: further arguments of `LLM.generate`.
    """
    try:
        with (
            explained("vLLM failed while it computed", ELSEWHERE),
            guest(on_cpu),
            interrupted_between_steps(llm.llm_engine),
        ):
            return llm.generate(list(requests), list(params), use_tqdm=False, **settings)
    except BaseException:
        # Also on Ctrl-C: requests left in the engine would come back among the next call's answers.
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        raise


def of_tokens(sequences: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
    """vLLM's requests for these token ids."""
    return [{"prompt_token_ids": list(map(int, ids))} for ids in sequences]


def runs_on_cpu() -> bool:
    """Whether this vLLM is built for CPUs; imports it."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    return current_platform.is_cpu()


@contextmanager
def guest(on_cpu: bool) -> Iterator[None]:
    """Inside, vLLM may work; afterwards the trainer's random streams are where they were before.

    On a CPU vLLM draws from torch's global stream at every token, even though each request has a seed. There, too, its
    small `torch.compile` functions run eagerly: compiling them takes 15 s and a C++ compiler, and gains nothing.
    """
    import torch

    with _random_state_kept(), torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
        yield


@contextmanager
def interrupted_between_steps(engine: Any) -> Iterator[None]:
    """Inside, a signal waits until the engine (vLLM's `LLMEngine`) has finished its step, some milliseconds.

    A KeyboardInterrupt in the middle of one leaves vLLM's scheduler with requests that its other tables no longer hold,
    and the next call fails with a KeyError.
    """
    step = engine.step
    with Deferred() as signals:

        def step_then_signals() -> Any:
            outputs = step()
            signals.deliver()
            return outputs

        with mock.patch.object(engine, "step", step_then_signals):
            yield


@contextmanager
def telling_tokens(engine: Any, callback: TokenCallback | None) -> Iterator[None]:
    """Inside, `callback` is called with the tokens of each step of the engine (vLLM's `LLMEngine`), after the step.

    `LLM.generate` returns whole outputs only; the tokens so far are in the states of the requests, which are in the
    order of the prompts and, for each prompt, of its completions.
    """
    if callback is None:
        yield
        return
    step, states, num_reported = engine.step, [], []

    def step_then_report() -> Any:
        if not states:  # all requests exist before the first step, and none of them has ended
            states.extend(engine.output_processor.request_states.values())
            num_reported.extend([0] * len(states))
        outputs = step()
        for row, state in enumerate(states):
            tokens = state.detokenizer.output_token_ids
            for token in tokens[num_reported[row] :]:
                callback(row, int(token))
            num_reported[row] = len(tokens)
        return outputs

    with mock.patch.object(engine, "step", step_then_report):
        yield


@contextmanager
def _random_state_kept() -> Iterator[None]:
    import numpy
    import torch

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


INVARIANT = "VLLM_BATCH_INVARIANT"


def set_batch_invariant(wanted: bool) -> None:
    """Sets vLLM's environment variable before vLLM is imported: its kernels read it then, and never again.

    False leaves the variable as it is.

    Raises UserError: this process has imported vLLM with the other value, for another job of a sweep.
    """
    invariant_now = os.environ.get(INVARIANT, "0") not in ("", "0")
    if "vllm" in sys.modules and wanted != invariant_now:
        problem = f"vLLM reads it once in a process, and this one has it {'on' if invariant_now else 'off'}"
        remedy = "run the jobs that differ in it one by one, not in one sweep"
        raise UserError("generation.vllm.batch_invariant", problem, got=str(wanted).lower(), remedy=remedy)
    if wanted:
        os.environ[INVARIANT] = "1"


@contextmanager
def guest_while_starting(batch_invariant: bool = False) -> Iterator[None]:
    """Inside, vLLM may be imported and started; afterwards the process is fit for training, even after an error."""
    import torch

    set_batch_invariant(batch_invariant)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    environment, excepthook = dict(os.environ), sys.excepthook
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with _random_state_kept(), warnings.catch_warnings(action="ignore"):
            # It also logs before it has set its own level.
            logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
            import vllm  # noqa: F401  # pyright: ignore[reportMissingImports]

            # It would bind all memory of the process, also the trainer's, to one NUMA node. The attribute hides vLLM's
            # operation of that name, which may not be registered yet.
            not_bound = mock.patch.object(torch.ops._C, "init_cpu_memory_env", create=True, return_value=None)
            with guest(runs_on_cpu()), not_bound if runs_on_cpu() else nullcontext():
                yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        sys.excepthook = excepthook
        _restore_environment(environment)


def _restore_environment(before: dict[str, str]) -> None:
    """Resets all variables but vLLM's own, which it reads again: LD_PRELOAD and others would reach later processes."""
    for name in set(os.environ) - set(before):
        if not name.startswith("VLLM_"):
            del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if not name.startswith("VLLM_")})
