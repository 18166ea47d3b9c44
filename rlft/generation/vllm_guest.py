"""vLLM as a guest in the trainer's process: what it does to the process is undone. Read in vLLM 0.32.

It replaces `torch.set_num_threads`, reseeds and draws from the global random streams, sets LD_PRELOAD and
sys.excepthook, binds memory to one NUMA node. The trainer lives in the same process, so all of that is put back.
Two engines may live in it, the policy's and a teacher's: what ends one leaves the other what they have in common.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from rlft.system.interrupt import Deferred
from rlft.types import Heard, UserError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: kill -9 leaves nothing behind
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Set before vLLM is imported, unless the user has set them."""

START_ERRORS = (ValueError, RuntimeError, OSError, TypeError)
"""What vLLM raises where it cannot start."""

_running: list[Any] = []
"""vLLM's engines (`LLM`) that were started in this process and have not been ended."""


def start(options: Mapping[str, Any]) -> Any:
    """A new engine (vLLM's `LLM`) in this process, inside of `guest_while_starting`; `end` ends it."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    llm = LLM(**options)
    _running.append(llm)
    return llm


def end(llm: Any, on_cpu: bool) -> None:
    """Ends an engine.

    vLLM would take its groups of processes away, which are the process's and not the engine's: another one that runs
    would fail at its next step. The last one takes them.
    """
    _running[:] = [other for other in _running if other is not llm]
    with guest(on_cpu), _groups_kept() if _running else nullcontext():
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def _groups_kept() -> Iterator[None]:
    """Inside, an engine that ends frees its memory, and leaves the groups of processes to the others."""
    from vllm.v1.engine import core  # pyright: ignore[reportMissingImports]

    module: Any = core
    cleanup = module.cleanup_dist_env_and_memory
    module.cleanup_dist_env_and_memory = free_memory
    try:
        yield
    finally:
        module.cleanup_dist_env_and_memory = cleanup


def free_memory() -> None:
    """Gives back what nothing refers to any more, also on the device."""
    import torch

    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def answers(
    llm: Any, sequences: Sequence[Sequence[int]], params: Sequence[Any], on_cpu: bool, **settings: Any
) -> list[Any]:
    """vLLM's outputs for these token ids, in their order; on any error the engine is left without requests.

    Args:
        llm: the engine.
        params: vLLM's SamplingParams of each.
        settings: further arguments of `LLM.generate`.
    """
    requests = [{"prompt_token_ids": list(map(int, ids))} for ids in sequences]
    try:
        with guest(on_cpu), interrupted_between_steps(llm.llm_engine):
            return llm.generate(requests, list(params), use_tqdm=False, **settings)
    except BaseException:
        # Also on Ctrl-C: what is left in the engine would come back among the next call's answers.
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        raise


def runs_on_cpu() -> bool:
    """Whether this vLLM is built for CPUs; imports it."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    return current_platform.is_cpu()


@contextmanager
def guest(on_cpu: bool) -> Iterator[None]:
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

        engine.step = step_then_signals
        try:
            yield
        finally:
            engine.step = step


@contextmanager
def telling_tokens(engine: Any, heard: Heard | None) -> Iterator[None]:
    """Inside, `heard` is called with the tokens of each step of the engine (vLLM's `LLMEngine`), after the step.

    `LLM.generate` asks for whole outputs only; the tokens so far are in the states of the requests, which are in the
    order of the prompts, and of the completions of each.
    """
    if heard is None:
        yield
        return
    step, states, num_said = engine.step, [], []

    def step_then_say() -> Any:
        if not states:  # all requests are there before the first step, and none of them has ended
            states.extend(engine.output_processor.request_states.values())
            num_said.extend([0] * len(states))
        outputs = step()
        for row, state in enumerate(states):
            tokens = state.detokenizer.output_token_ids
            for token in tokens[num_said[row] :]:
                heard(row, int(token))
            num_said[row] = len(tokens)
        return outputs

    engine.step = step_then_say
    try:
        yield
    finally:
        engine.step = step


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


INVARIANT = "VLLM_BATCH_INVARIANT"


def set_batch_invariant(wanted: bool) -> None:
    """Sets vLLM's variable before it is imported: its kernels read it then, and never again. False leaves it as it is.

    Raises:
        UserError: this process has imported vLLM with the other value, for another job of a sweep.
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
    """Inside, vLLM may be imported and started; afterwards the process is fit for training, whatever happened."""
    import torch

    set_batch_invariant(batch_invariant)
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

            with guest(runs_on_cpu()), _memory_not_bound():
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

    if not runs_on_cpu():
        yield
        return
    # The attribute hides the operation of that name, which need not be registered yet.
    operations: Any = torch.ops._C
    operations.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        del operations.init_cpu_memory_env
