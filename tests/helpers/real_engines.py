"""Real engines: vLLM with keys of tests, and workers of a cluster compared with the engine in this process."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlft.config.schema import RunConfig
from rlft.generation.engine import EngineArgs, Generator
from rlft.generation.loaded_adapter import difference, published
from rlft.generation.pool import EnginePool
from rlft.generation.vllm.engine import VLLM
from rlft.generation.vllm.generator import VLLMGenerator
from rlft.loop.driver import deterministic_on_cpu
from rlft.loop.freshness import Freshness
from rlft.loop.parts import engine_args
from rlft.loop.workers import open_engines
from rlft.model.backbone import Backbone
from rlft.model.networks import Networks
from rlft.system.process.placement import place
from rlft.system.process.worker import Launcher
from rlft.tokens.text import TurnEnds
from rlft.types import Group, Prompt


def vllm_engine(**changes: Any) -> VLLM:
    keys: dict[str, Any] = {"gpu_memory_utilization": 0.3, "max_num_seqs": 8, "sleep": False, "enforce_eager": True}
    return VLLM(**{**keys, "options": {}, **changes})


def open_vllm(model_path: Path | str, keys: VLLM | None = None, **changes: Any) -> VLLMGenerator:
    """The live engine; `changes` are those of its `EngineArgs`."""
    args: dict[str, Any] = {
        "slot": None, "tokenizer": None, "ends": TurnEnds(ids=(), names={}), "device": None,
        "model_path": str(model_path), "revision": None, "dtype": "float32", "quantization": None,
        "trust_remote_code": False, "lora_rank": 8, "max_sequence_tokens": 256, "seed": 0,
    }  # fmt: skip
    return (keys or vllm_engine()).open(EngineArgs(**{**args, **changes}))


def opened_here(config: RunConfig, engine: str, roles: Networks, backbone: Backbone) -> Generator:
    return config.generation.named(engine).open(engine_args(config, config.lora, roles))


def sampled(generator: Generator, config: RunConfig, prompts: Sequence[Prompt]) -> list[Group]:
    seeds = [100 * i for i in range(len(prompts))]
    return generator.sample(prompts, config.group_size, seeds, config.generation.sampling)


def check_pool_against(
    here: Generator, launcher: Launcher, config: RunConfig, engine: str, roles: Networks, prompts: Sequence[Prompt],
    notes: list[str], *disturbances: Callable[[EnginePool], None],
) -> None:  # fmt: skip
    """Publishes, samples in this process and by the pool, and again with each disturbance in the middle."""
    adapter = roles.publish(1)
    # Engines in workers start while the one here works.
    placement = place(config.cluster, on_gpus=False)
    plan: Any = SimpleNamespace(config=config, engine=engine, placement=placement, environment=None, images=0)
    pool = open_engines(plan, launcher, notes.append)
    try:
        with deterministic_on_cpu(roles.backbone.device):
            here.load(adapter)
            expected = sampled(here, config, prompts)
        pool.load(adapter)
        freshness = Freshness([prompts[0].token_ids[:8]], 1e-3, 1, notes.append)
        assert freshness.check(1, pool, roles, adapter) is not None
        assert not any("read back" in note for note in notes)
        name = next(iter(adapter.weights))
        moved = replace(adapter, weights={**adapter.weights, name: adapter.weights[name] + 1e-6})
        for found in pool._of_each("loaded_adapter").values():
            assert "1 of the" in str(difference(1, found, published(moved, found.dtype), {}))
        assert sampled(pool, config, prompts) == expected
        for number, disturb in enumerate(disturbances, 1):
            thread = threading.Thread(target=disturb, args=(pool,))
            thread.start()
            disturbed = sampled(pool, config, prompts)
            thread.join()
            assert disturbed == expected
            pool.sleep()  # all have joined
            assert pool.num_restarts == number, notes
    finally:
        pool.close()


def signal_to(seat: int, number: signal.Signals, after_s: float, pid_of: Callable[[Any], int]) -> Any:
    """A disturbance: a signal to the process of an engine, so many seconds after sampling has begun."""

    def disturb(pool: EnginePool) -> None:
        time.sleep(after_s)
        os.kill(pid_of(pool._slots[seat].worker), number)

    return disturb
