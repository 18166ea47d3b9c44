"""The run that `rlft doctor` checks: a small one with the user's model, adapter, engine and optimizer.

Its prompts are letters and its rewards alternate, so that it needs no data and every group has a gradient. All else is
an ordinary run of `rlft train` in the folder of the checks, which judge what it records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rlft.commands.doctor.supervise import NotReadyError, Settings
from rlft.commands.doctor.work import SIZES, Workload, make_model, write_prompts
from rlft.config.keys import with_values
from rlft.config.resolved import resolve
from rlft.config.schema import RunConfig
from rlft.loop.engines import Engines
from rlft.loop.session import Session, open_session
from rlft.model.backbone import read_config
from rlft.model.roles import Roles
from rlft.plan.fit import fit_to_device
from rlft.plan.train_plan import TrainPlan
from rlft.runs import run_folder
from rlft.runs.lines import METRICS, read_lines
from rlft.system.device import resolve_device, resolve_dtype
from rlft.system.memory import resident_bytes
from rlft.types import Group

SCALES = {
    "cpu": ("17m", Workload(prompts=2, group=4, prompt_tokens=64, completion_tokens=64)),
    "cuda": ("0.5b", Workload(prompts=16, group=8, prompt_tokens=256, completion_tokens=256)),
}
"""{kind of device: the sizes of the trial's model and of its steps}."""


class MachineTrial:
    """The trial of one process, with a folder for its files and the names of the checks that have failed so far.

    `run` is the folder of its run, `process` are the bytes of the process before the model was loaded.
    """

    def __init__(self, settings: Settings, folder: Path, failed: Sequence[str]) -> None:
        import transformers

        # What a run needs is imported here, so that its memory is not counted in later measurements.
        _ = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
        self.settings, self.folder, self.failed = settings, folder, failed
        self.run = folder / "run"
        self.process = 0
        self._open = ExitStack()
        self._session: Session | None = None

    # -- the config ------------------------------------------------------------------------------------------------
    @cached_property
    def device(self) -> torch.device:
        return resolve_device(self.settings.plain["model"]["device"])

    @cached_property
    def dtype(self) -> torch.dtype:
        return resolve_dtype(self.settings.plain["model"]["dtype"], self.device)

    @property
    def kind(self) -> str:
        return "cuda" if self.device.type == "cuda" else "cpu"

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The config, with this device's sizes in place of those that the user has not typed, a model and prompts."""
        (size, work), typed = SCALES[self.kind], self.settings.typed
        sizes = {"prompts_per_step": work.prompts, "group_size": work.group}
        sizes |= {"prompts.max_tokens": work.prompt_tokens, "generation.max_tokens": work.completion_tokens}
        plain = with_values(self.settings.plain, {key: value for key, value in sizes.items() if key not in typed})
        if self.settings.makes_model:
            dtype = str(self.dtype).removeprefix("torch.")
            model_folder = make_model(self.folder / f"{size}-{dtype}", SIZES[size], dtype)
            plain = with_values(plain, {"model.path": str(model_folder), "model.revision": None})
            # The adapter and the stop tokens in the config belong to another model.
            plain = with_values(plain, {"lora.path": None, "generation.stop": []})
        prompts = write_prompts(self.folder / "prompts.jsonl", work_of(plain), plain["steps"])
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

    # -- the run ----------------------------------------------------------------------------------------------------
    def start(self) -> Session:
        """Loads the model and starts the engine, and records the memory of the process before that."""
        plan = self.plan
        run_folder.check_writable(self.run)
        run_folder.claim(self.run, plan.plain, plan.fingerprints, plan.num_steps)
        self.process = resident_bytes()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        engines = self._open.enter_context(Engines())
        self._session = self._open.enter_context(open_session(plan, self.run, engines, print))
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

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What the run has recorded of each step so far."""
        return read_lines(self.run / METRICS)

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The lines of the steps that are measured; a NotReadyError if the run has not done all of them."""
        if len(lines := self.lines) < self.config.steps:
            raise NotReadyError("the run has not done its steps")
        return lines[1:]  # the first step warms up


def alternating(group: Group) -> list[float]:
    """The reward of the run: 1 for every second completion, so that every group has a gradient."""
    return [float(i % 2) for i in range(len(group.rollouts))]


def work_of(plain: Mapping[str, Any]) -> Workload:
    return Workload(
        prompts=plain["prompts_per_step"],
        group=plain["group_size"],
        prompt_tokens=plain["prompts"]["max_tokens"],
        completion_tokens=plain["generation"]["max_tokens"],
        rank=plain["lora"]["rank"],
    )
