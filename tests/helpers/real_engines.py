"""Compares real engines in members of a cluster with the same engine in this process, while they are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rlft.config.schema import RunConfig
from rlft.generation.engine import Generator
from rlft.generation.pool import EnginePool
from rlft.loop.driver import deterministic_on_cpu
from rlft.loop.engines import engine_args
from rlft.loop.freshness import Freshness
from rlft.loop.members import open_engines
from rlft.model.backbone import Backbone
from rlft.model.roles import Roles
from rlft.system.process.member import Launcher
from rlft.system.process.placement import place
from rlft.types import Group, Prompt


def opened_here(config: RunConfig, engine: str, roles: Roles, backbone: Backbone) -> Generator:
    return config.generation.named(engine).open(engine_args(config, config.lora, roles))


def sampled(generator: Generator, config: RunConfig, prompts: Sequence[Prompt]) -> list[Group]:
    seeds = [100 * i for i in range(len(prompts))]
    return generator.sample(prompts, config.group_size, seeds, config.generation.sampling)


def check_pool_against(
    here: Generator,
    launcher: Launcher,
    config: RunConfig,
    engine: str,
    roles: Roles,
    prompts: Sequence[Prompt],
    notes: list[str],
    *disturbances: Callable[[EnginePool], None],
) -> None:
    """Publishes, samples in this process and by the pool, and again with each disturbance in the middle."""
    adapter = roles.publish(1)
    # Engines in members start while the one here works.
    placement = place(config.cluster, on_gpus=False)
    plan: Any = SimpleNamespace(config=config, engine=engine, placement=placement, environment=None)
    pool = open_engines(plan, launcher, notes.append)
    try:
        with deterministic_on_cpu(roles.backbone.device):
            here.load(adapter)
            expected = sampled(here, config, prompts)
        pool.load(adapter)
        gap = Freshness([prompts[0].token_ids[:8]], 1e-3, 1).check(1, pool, roles)
        assert gap is not None
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
        os.kill(pid_of(pool._slots[seat].member), number)

    return disturb
