"""What a run has in other processes: engines, ranks and reward workers, which GPUs each gets, and what each holds.

An engine, and a rank that does its lanes' passes, hold a base of their own.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlft.algorithm.objective import Objective
from rlft.config.schema import RunConfig
from rlft.environment.protocol import Environment
from rlft.generation.engine import Engine, EngineArgs, rehearse, units_of
from rlft.generation.loaded_adapter import LoadedAdapter
from rlft.generation.pool import EnginePool
from rlft.generation.sending import Incoming, parts_of
from rlft.loop.driver import deterministic_on_cpu
from rlft.loop.parts import engine_args, layers_of_rank, load_teacher, open_roles, wrap_with_environment
from rlft.model.backbone import load_backbone, read_backbone
from rlft.model.full_weights import FollowingModel
from rlft.model.roles import policy_alone
from rlft.plan.train_plan import TrainPlan
from rlft.reward.workers.pool import ClusterPool
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.system.device import resolve_device
from rlft.system.memory import keep_blocks
from rlft.system.process.launcher import open_launcher
from rlft.system.process.placement import Placement, all_gpus
from rlft.system.process.worker import Launcher, WorkerSpec
from rlft.trainer.local import LocalTrainer, open_optimizers
from rlft.trainer.ranked_trainer import RankedTrainer, Trainer
from rlft.trainer.ranks import Exchange, LaneShare, Rendezvous, Shapes, shapes_of
from rlft.trainer.update import UpdateRecord
from rlft.types import Adapter, Batch, Completion, Group, Prompt, Sampling

NOT_BOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Engines of vLLM on a CPU would all bind their threads to the same cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """What a run has in other processes; None where it has none."""

    # The engines. Those that have GPUs of their own, or none, still start: they load their bases while this process
    # loads its own.
    pool: EnginePool | None = None
    open_rewards: Callable[[Sequence[RewardSpec]], ClusterPool] | None = None
    # Gives the trainer of ranks 0, 1, .., of which it gets rank 0; the others load their bases meanwhile.
    ranked: Callable[[LocalTrainer], Trainer] | None = None


@contextmanager
def open_workers(
    plan: TrainPlan, folder: Path, note: Callable[[str], None], again: str | None = None
) -> Iterator[Workers]:
    """Starts engines and ranks in other processes as far as the plan has any; they end afterwards.

    note: called with a line when a worker is replaced. again: the command that resumes the run from its newest
    checkpoint; None for one that does not train, and so has no ranks.
    """
    cluster = plan.config.cluster
    has_ranks = again is not None and cluster.ranks > 1
    if not (cluster.engines or has_ranks or cluster.scoring):
        yield Workers()
        return
    with ExitStack() as stack:
        launcher, pool, ranked = stack.enter_context(opened_launcher(plan, folder)), None, None
        if cluster.engines:  # before ranks: with several GPUs each, engines are the hardest to place
            pool = open_engines(plan, launcher, note)
            stack.callback(pool.close)
            if plan.placement is not None and plan.placement.kind == "pairs":
                # vLLM measures what it takes of a GPU by what is free before and after: a base that a rank loads there
                # meanwhile would count as its own.
                pool.wait_until_started()
        if again is not None and has_ranks:
            specs = rank_specs(plan)
            ranked = partial(
                RankedTrainer,
                launcher=launcher,
                specs=specs,
                workers=[launcher.start(spec) for spec in specs],
                lanes=cluster.num_lanes,
                sequence=cluster.sequence_ranks,
                timeout=cluster.timeout,
                note=note,
                again=again,
            )

        def open_rewards(rewards: Sequence[RewardSpec]) -> ClusterPool:
            scoring = plan.config.scoring
            times = {"timeout_s": scoring.timeout, "answer_s": cluster.timeout}
            return ClusterPool(launcher, rewards, scoring.workers, **times, note=note)

        yield Workers(pool=pool, ranked=ranked, open_rewards=open_rewards if cluster.scoring else None)


def opened_launcher(plan: TrainPlan, folder: Path) -> AbstractContextManager[Launcher]:
    """Opens the launcher of a run's engines and ranks; it keeps the run's own GPU from them unless they share it."""
    config, device = plan.config, resolve_device(plan.config.model.device)
    on_gpus = device.type == "cuda"
    own_gpu = all_gpus(device)[0] if on_gpus else None
    scorers = config.scoring.workers if config.cluster.scoring else 0
    threads = torch.get_num_threads()
    return open_launcher(config.cluster, folder, on_gpus=on_gpus, own_gpu=own_gpu, threads=threads, scorers=scorers)


# -- engines -----------------------------------------------------------------------------------------------------------
def open_engines(plan: TrainPlan, launcher: Launcher, note: Callable[[str], None]) -> EnginePool:
    """The pool of engines; `note` is called with a line when one is replaced."""
    cluster = plan.config.cluster
    assert plan.placement is not None, "a run with engines is placed"
    engine = plan.config.generation.named(plan.engine)
    return EnginePool(
        launcher,
        engine_specs(plan.config, plan.engine, plan.placement, plan.environment, plan.images),
        unit=units_of(engine.at_once, divisible=engine.divisible, num_engines=cluster.engines),
        timeout_s=cluster.timeout,
        max_restarts=cluster.max_engine_restarts,
        note=note,
        with_rows=plan.environment is not None,
    )


def engine_specs(
    config: RunConfig, engine: str, placement: Placement, environment: Environment | None = None, images: int = 0
) -> list[WorkerSpec]:
    """The engines' specs, for prompts with at most so many images."""
    arguments = {"engine": engine, "environment": environment, "images": images}
    return [
        _spec(
            f"engine-{number}",
            "EngineWorker",
            config,
            None if placement.kind == "processes" else placement.engines[number],
            **arguments,
        )
        for number in range(config.cluster.engines)
    ]


def rank_specs(plan: TrainPlan) -> list[WorkerSpec]:
    """The specs of the workers that are ranks 1, 2, .."""
    config, cluster = plan.config, plan.config.cluster
    assert plan.placement is not None, "a run with ranks is placed"
    gpus = plan.placement.ranks
    arguments = {"lanes": cluster.num_lanes, **plan.annotated}
    return [
        _spec(f"rank-{rank}", "RankWorker", config, gpus[rank : rank + 1], rank=rank, **arguments)
        for rank in range(1, cluster.ranks)
    ]


def _spec(name: str, factory: str, config: RunConfig, gpus: Sequence[int] | None, **arguments: Any) -> WorkerSpec:
    """The spec of a worker with as many threads as this process: on a CPU the bits of a product depend on them.

    gpus: those of the run's placement that it gets; None if the run is placed on none. A cluster that the run has
    joined assigns GPUs itself. Workers on this machine see theirs through environment variables.
    """
    device, asked, environment = resolve_device(config.model.device), 0, {}
    if gpus is None:
        environment = NOT_BOUND
    elif device.type == "cuda" and config.cluster.is_joined:
        asked = len(gpus)
    elif device.type == "cuda":
        names = all_gpus(device)
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus)}
    model = replace(config.model, device=device.type)  # it sees only its own GPUs
    return WorkerSpec(
        name=name,
        factory=f"rlft.loop.workers:{factory}",
        arguments={"config": replace(config, model=model), **arguments},
        threads=torch.get_num_threads(),
        gpus=asked,
        environment=environment,
    )


# -- in its process, an engine -----------------------------------------------------------------------------------------
class EngineWorker:
    """The object of a worker (`rlft.system.process.worker`) that is an engine; the pool calls its methods.

    `engine` is its name in `generation`, `images` are the most of a prompt.
    """

    def __init__(self, config: RunConfig, engine: str, environment: Environment | None, images: int) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(deterministic_on_cpu(resolve_device(config.model.device)))
        chosen: Engine = config.generation.named(engine).standalone().with_gpus(config.cluster.gpus_per_engine)
        args = self._args(chosen, config, images)
        self._engine, self._dead = chosen.open(args), chosen.dead
        # Conversations are held here: each group continues with its own engine, without waiting for other engines.
        self._generator = wrap_with_environment(self._engine, chosen, environment, args)
        self._version: int | None = None
        self._is_whole = config.lora is None
        self._incoming = Incoming()

    def load_part(self, number: int, sha256: str, weights: bytes) -> str:
        """Takes the bucket of this number (`generation.sending`) of a version that `load` completes.

        Returns the SHA-256 of all bytes of the version that have arrived. If it is another one, nothing was taken.
        """
        if number == 0:  # what has come of another version is void
            self._incoming = Incoming()
        return self._take(sha256, weights)

    def load(self, version: int, config: Mapping[str, Any], sha256: str, weights: bytes) -> tuple[int, str]:
        """Takes the last bucket of a version as `load_part`, and loads the version: (version, SHA-256 of the bytes)."""
        actual, arrived = self._take(sha256, weights), self._incoming.weights
        self._incoming = Incoming()
        if actual == sha256:
            self._generator.load(Adapter(version=version, weights=arrived, config=config))
            self._version = version
        return version, actual

    def _take(self, sha256: str, weights: bytes) -> str:
        incoming = self._incoming
        is_first = incoming.count(weights) == 1
        if incoming.sha256 == sha256:
            if self._is_whole and self._engine.loads_parts:
                self._engine.load_parts(parts_of(weights), first=is_first)
            else:
                incoming.keep(weights)
        return incoming.sha256

    def sample(
        self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling
    ) -> tuple[int | None, list[list[Completion]], list[Prompt | None]]:
        """(version, completions of each prompt, each prompt if an environment has changed it, else None)."""
        with _ending_if_dead(self._dead):
            groups = self._generator.sample(prompts, n, seeds, sampling)
        versions = {rollout.policy_version for group in groups for rollout in group.rollouts}
        [version] = versions or {self._version}
        opened = [None if g.prompt is prompt else g.prompt for g, prompt in zip(groups, prompts, strict=True)]
        return version, _completions(groups), opened

    def sample_alone(
        self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """The completions of each prompt by the engine without conversations over it."""
        with _ending_if_dead(self._dead):
            return _completions(self._engine.sample(prompts, n, seeds, sampling))

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        with _ending_if_dead(self._dead):
            return self._generator.score(sequences)

    def loaded_adapter(self) -> LoadedAdapter | str:
        with _ending_if_dead(self._dead):
            return self._engine.loaded_adapter()

    def rehearse(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int, further: Mapping[str, Any]) -> None:
        rehearse(self._generator, prompts, n, max_tokens, **further)

    def sleep(self) -> None:
        self._generator.sleep()

    def started(self) -> None:
        """Returns once the engine is open; the call fails if opening it failed."""

    def close(self) -> None:
        if self._generator is not self._engine:
            self._generator.close()
        self._engine.close()
        self._stack.close()

    def _args(self, engine: Engine, config: RunConfig, images: int) -> EngineArgs:
        if not engine.on_trainers_base:
            return engine_args(config, config.lora, images=images)
        lora = config.lora
        limits: dict[str, Any] = {"token_budget": config.token_budget, "temperature": config.generation.temperature}
        # The policy's weights arrive with the first version.
        roles = (
            FollowingModel(read_backbone(config.model), **limits)
            if lora is None
            else policy_alone(load_backbone(config.model), replace(lora, path=None), seed=config.seed, **limits)
        )
        self._stack.callback(roles.close)
        return engine_args(config, config.lora, roles, images=images)


def _completions(groups: Sequence[Group]) -> list[list[Completion]]:
    return [[rollout.completion for rollout in group.rollouts] for group in groups]


@contextmanager
def _ending_if_dead(dead: str | None) -> Iterator[None]:
    """Ends the process if its engine turns out to be dead: an actor of Ray would live on, and fail every call."""
    try:
        yield
    except Exception as error:
        if any(kind.__name__ == dead for kind in type(error).__mro__):
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)
        raise


# -- in its process, a rank --------------------------------------------------------------------------------------------
@contextmanager
def opened_trainer(config: RunConfig, *, rank: int = 0, **asked: Any) -> Iterator[LocalTrainer]:
    """The trainer of this config on a base and roles of its own, without pretraining text and learned rewards.

    asked: as in `LocalTrainer`.
    """
    base = layers_of_rank(config.cluster, rank)
    teacher = load_teacher(config.snapshot, config.model)  # before the base, as in a session
    with open_roles(config, teacher, base=base) as roles:
        if base is not None and rank > 0:
            base.drop_copies()
        optimizers = open_optimizers(roles, config.trainer, config.critic.lr)
        yield LocalTrainer(roles, optimizers, config, base=base, **asked)


class RankWorker:
    """A rank in a worker, which `RankedTrainer` calls; rank: from 1 on, as the run's own process is rank 0.

    asked: as in `LocalTrainer`; lanes: number of lanes of the run.
    """

    def __init__(self, *, config: RunConfig, rank: int, lanes: int, **asked: Any) -> None:
        self._rank, self._lanes = rank, lanes
        self._stack = ExitStack()
        self._stack.enter_context(deterministic_on_cpu(resolve_device(config.model.device)))
        keep_blocks(config.token_budget)
        trainer = opened_trainer(config, rank=rank, **asked)
        self._trainer = self._stack.enter_context(trainer)
        self._exchange: Exchange | None = None

    def ready(self) -> None:
        """Returns once the base is loaded."""

    def join(self, rendezvous: Rendezvous, shapes: Shapes, critic: Mapping[str, Any] | None) -> None:
        """Connects to the other ranks, and takes over rank 0's state."""
        self._leave()
        self._exchange = Exchange(rendezvous, self._rank, self._trainer.roles.backbone.device)
        self._trainer.share = LaneShare(
            lanes=self._lanes,
            rank=self._rank,
            ranks=rendezvous.ranks,
            sequence=rendezvous.sequence,
            exchange=self._exchange,
        )
        with self._exchanging():
            self._trainer.join(shapes, critic)

    def annotate(self, batch: Batch, zero_gradient_B: Tensor) -> dict[str, Tensor]:
        """{field: values `[N, T]`} for the rows of this rank's lanes, one lane after the other."""
        rows_of_lane = self._trainer.rows_of_lanes(batch, zero_gradient_B)
        rows = torch.cat([rows_of_lane[lane] for lane in self._trainer.share.mine])
        with self._exchanging():
            return {name: values[rows] for name, values in self._trainer.annotations(batch, zero_gradient_B).items()}

    def update(
        self, algorithm: Objective, batch: Batch, zero_gradient_B: Tensor, step: int, texts: list[Batch]
    ) -> list[UpdateRecord]:
        """Computes this rank's part of all updates of a step, as `LocalTrainer.update_lanes`.

        texts: the text of each update, where the algorithm needs pretraining text; else empty.
        """
        self._trainer.text = lambda seed, step, update: texts[update]
        with self._exchanging():
            return self._trainer.update_lanes(algorithm, batch, zero_gradient_B, step)

    def refresh(self, step: int) -> None:
        """Moves the snapshots that are due after `step` steps."""
        self._trainer.roles.refresh(step)

    def rehearse(self, algorithm: Objective, micro: Batch) -> None:
        with self._exchanging():
            self._trainer.rehearse(algorithm, micro)

    def digest(self) -> str:
        return self._trainer.digest()

    def shapes_of_moments(self) -> Shapes:
        """The shapes of the moments that this rank holds."""
        return shapes_of(self._trainer.moments())

    def gather(self, shapes: Sequence[Shapes]) -> None:
        """Sends this rank's moments to rank 0."""
        with self._exchanging():
            self._trainer.gather(shapes)

    def close(self) -> None:
        self._leave()
        self._stack.close()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Leaves the exchange between ranks if the code inside fails, so that no other rank waits for this one."""
        try:
            yield
        except Exception:
            self._leave()
            raise

    def _leave(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
