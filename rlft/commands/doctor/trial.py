"""The run that `rlft doctor` checks: a small one with the user's model, adapter, engine and optimizer.

Its prompts are letters and its rewards alternate, so that it needs no data and every group has a gradient. Plan, model
and engine are those of an ordinary run, opened when a check first needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlft.commands.doctor.supervise import NotReadyError, Settings
from rlft.commands.doctor.work import SIZES, Workload, make_model, write_prompts
from rlft.config.resolved import resolve
from rlft.config.schema import RunConfig
from rlft.loop.engines import Engines
from rlft.loop.metrics import Clock
from rlft.loop.session import Session, open_session
from rlft.model.backbone import read_config
from rlft.model.roles import Roles
from rlft.plan.fit import fit_to_device
from rlft.plan.train_plan import TrainPlan
from rlft.system.device import peak_memory_bytes, resolve_device, resolve_dtype
from rlft.system.memory import resident_bytes
from rlft.system.rates import peak_rate
from rlft.types import Batch, Group, Scores

STEPS = 3
"""Number of steps; the first, which warms up, is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of the trial on a kind of device; `side` and `product_s` are of the product whose rate is measured."""

    size: str
    work: Workload
    side: int
    product_s: float


SMALL = Workload(prompts=2, group=4, prompt_tokens=64, completion_tokens=64)
LARGE = Workload(prompts=16, group=8, prompt_tokens=256, completion_tokens=256)
SCALES: Mapping[str, Scale] = {
    "cpu": Scale(size="17m", work=SMALL, side=1024, product_s=0.3),
    "cuda": Scale(size="0.5b", work=LARGE, side=8192, product_s=2.0),
}


@dataclass(slots=True, kw_only=True)
class Measured:
    """Measurements of the trial's steps.

    Attributes:
        seconds: {stage: seconds} of each measured step.
        peak: peak memory, in bytes.
    """

    seconds: list[dict[str, float]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    peak: int = 0

    def fastest(self, stage: str) -> float:
        """The least seconds of a stage: the fastest step counts, because other programs can only slow a step down."""
        return min(step[stage] for step in self.seconds)


class MachineTrial:
    """The trial of one process, with a folder for its files and the names of the checks that have failed so far.

    `process` are the bytes of the process before the model was loaded.
    """

    def __init__(self, settings: Settings, folder: Path, failed: Sequence[str]) -> None:
        import transformers

        # What a run needs is imported here, so that its memory is not counted in later measurements.
        _ = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
        self.settings, self.folder, self.failed = settings, folder, failed
        self.process = 0
        self.num_published = 0
        self._open = ExitStack()
        self._session: Session | None = None

    # -- the config ------------------------------------------------------------------------------------------------
    @cached_property
    def device(self) -> torch.device:
        return resolve_device(self.settings.plain["model"]["device"])

    @cached_property
    def dtype(self) -> torch.dtype:
        return resolve_dtype(self.settings.plain["model"]["dtype"], self.device)

    @cached_property
    def scale(self) -> Scale:
        return SCALES["cuda" if self.device.type == "cuda" else "cpu"]

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The config, with this device's sizes in place of those that the user has not typed, a model and prompts."""
        scale, typed = self.scale, self.settings.typed
        sizes = {
            "prompts_per_step": scale.work.prompts,
            "group_size": scale.work.group,
            "prompts.max_tokens": scale.work.prompt_tokens,
            "generation.max_tokens": scale.work.completion_tokens,
        }
        plain = with_values(self.settings.plain, {key: value for key, value in sizes.items() if key not in typed})
        if self.settings.makes_model:
            dtype = str(self.dtype).removeprefix("torch.")
            model_folder = make_model(self.folder / f"{scale.size}-{dtype}", SIZES[scale.size], dtype)
            plain = with_values(plain, {"model.path": str(model_folder), "model.revision": None})
            # The adapter and the stop tokens in the config belong to another model.
            plain = with_values(plain, {"lora.path": None, "generation.stop": []})
        prompts = write_prompts(self.folder / "prompts.jsonl", work_of(plain), STEPS)
        return with_values(plain, {"data.path": str(prompts)})

    @property
    def work(self) -> Workload:
        return work_of(self.plain)

    @cached_property
    def plan(self) -> TrainPlan:
        if "model" in self.failed:
            raise NotReadyError("there is no model to look at")
        return fit_to_device(resolve(self.plain).plan())

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @cached_property
    def config_of_model(self) -> Any:
        return read_config(self.config.model)

    # -- the open session -------------------------------------------------------------------------------------------
    def start(self) -> Session:
        """Loads the model and starts the engine, and records the memory of the process before that."""
        plan = self.plan
        self.process = resident_bytes()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        engines = self._open.enter_context(Engines())
        self._session = self._open.enter_context(open_session(plan, self.folder, engines, print))
        return self._session

    @property
    def session(self) -> Session:
        """The open session; a NotReadyError if it could not be opened."""
        if self._session is None:
            raise NotReadyError("the engine has not started")
        return self._session

    @property
    def roles(self) -> Roles:
        assert isinstance(self.session.roles, Roles), "the command refuses lora=null"
        return self.session.roles

    def publish(self) -> None:
        self.num_published += 1
        self.session.publish(self.num_published)

    # -- measurements -----------------------------------------------------------------------------------------------
    @cached_property
    def product_rate(self) -> float:
        """FLOP/s of a large product in the model's dtype."""
        return peak_rate(self.device, self.dtype, side=self.scale.side, seconds=self.scale.product_s)

    @cached_property
    def measured(self) -> Measured:
        """The measurements of the steps, which run after a rehearsal of the longest rows, as in a run."""
        session, measured = self.session, Measured()
        self.publish()
        session.rehearse_sampling(0)
        session.rehearse_update()
        for step in range(STEPS):
            clock = Clock(lambda stage: None)
            with clock("sample"):
                groups = session.sample(step)
            with clock("update"):
                self._learn(step, groups)
            with clock("publish"):
                self.publish()
            if step:
                measured.seconds.append(clock.seconds)
            completions = [rollout.completion for group in groups for rollout in group.rollouts]
            measured.completion_tokens = sum(len(completion.token_ids) for completion in completions)
            measured.prompt_tokens = sum(len(group.prompt.token_ids) for group in groups)
        measured.peak = peak_memory_bytes()
        return measured

    def _learn(self, step: int, groups: Sequence[Group]) -> None:
        algorithm, trainer = self.plan.algorithm, self.session.trainer
        batch = self.collated(groups)
        zero_gradient_B = algorithm.zero_gradient_rows(batch)
        batch = algorithm.credit(trainer.annotate(batch, zero_gradient_B))
        trainer.update(algorithm, batch, zero_gradient_B, step)

    def collated(self, groups: Sequence[Group]) -> Batch:
        """The batch of these groups, in which every second completion has reward 1."""
        return self.session.backbone.collated(groups, alternating(groups))


def alternating(groups: Sequence[Group]) -> Scores:
    total: Tensor = torch.tensor([[float(i % 2) for i in range(len(group.rollouts))] for group in groups])
    return Scores(total=total, by_reward={"alternating": total})


def work_of(plain: Mapping[str, Any]) -> Workload:
    return Workload(
        prompts=plain["prompts_per_step"],
        group=plain["group_size"],
        prompt_tokens=plain["prompts"]["max_tokens"],
        completion_tokens=plain["generation"]["max_tokens"],
        rank=plain["lora"]["rank"],
    )


def with_values(plain: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other values at these keys, such as {"lora.rank": 4}; sections that change are copied."""
    result = dict(plain)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if section:
            result[section] = {**result[section], name: value}
        else:
            result[name] = value
    return result
