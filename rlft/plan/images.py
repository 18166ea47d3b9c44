"""What does not go with prompts that have images."""

from __future__ import annotations

from typing import Any

from rlft.config.schema import RunConfig
from rlft.data.prompts import PromptSet
from rlft.generation.engine import Engine
from rlft.model.backbone import read_config, source
from rlft.model.images import network_of_tower
from rlft.model.network_files import check_files
from rlft.reward.workers.reward_spec import specs
from rlft.system.device import resolve_device
from rlft.types import UserError, require


def check_images(config: Any, kind: str, engine: Engine, *sets: PromptSet | None) -> None:
    """Refuses what does not go with images, if a prompt of the sets has any.

    Args:
        config: a root that samples.
        kind: the type of its model.
        engine: what samples.
        sets: its prompts.

    Raises UserError.
    """
    if not any(prompts.images for prompts in sets if prompts is not None):
        return
    if (missing := engine.why_no_images(kind, resolve_device(config.model.device).type)) is not None:
        got = config.generation.engine
        raise UserError("generation.engine", missing.problem, got=got, remedy=missing.remedy)
    problem, environment = "goes on with texts alone, and the data have images", config.environment
    require(environment is None, "environment", problem, remedy="leave it out, or use data without images")
    for name, spec in specs(config.reward).items():
        problem = "reads texts alone, and the data have images"
        require(not spec.runs_in_trainer, f"reward.{name}", problem, remedy="use a reward of the answer")
    check_files(network_of_tower(read_config(config.model), source(config.model)))
    if not isinstance(config, RunConfig):
        return
    snapshot, remedy = config.snapshot, "leave it out, or use data without images"
    is_apart = snapshot.teacher_model is not None or snapshot.teacher_hint is not None
    problem = "reads no images: it is another model, or reads other prompts"
    require(not is_apart, "snapshot.teacher", problem, got=snapshot.teacher, remedy=remedy)
