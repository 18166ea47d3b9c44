"""The config of `rlft sample run=<run>`: the run's policy samples with its model, data, rewards and sampling keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft.config import compose as configs
from rlft.config.compose import Composed
from rlft.config.overrides import Arguments, check_no_options
from rlft.runs.find import NamedRun, find, one_run
from rlft.system.terminal import say

SHARED_WITH_RUNS = (
    "model",
    "prompts",
    "generation",
    "data",
    "reward",
    "environment",
    "scoring",
    "freshness",
    "token_budget",
)


def like_run(plain: Mapping[str, Any], source: NamedRun) -> dict[str, Any]:
    """The config with the run's model, data, rewards and sampling, and its policy as the sampler."""
    shared = {key: source.config[key] for key in SHARED_WITH_RUNS if key in source.config}
    shared.setdefault("data", {})  # a run without a task has no prompts: the user must name some
    policy = str(source.checkpoint or source.run)
    if source.config.get("lora", {}) is None:  # the policy is the model itself
        return {**plain, **shared, "model": {**source.config["model"], "path": policy}}
    return {**plain, **shared, "adapter": policy}


def composed_like_a_run(parsed: Arguments) -> Composed | None:
    """The config of `rlft sample run=<run>`; None if no run is named."""
    run_name = parsed.value("run")
    if run_name is None:
        return None
    check_no_options(parsed)
    source = find(one_run(run_name, "run", say))
    folder_overrides = [o for o in parsed.overrides if o.startswith(("hydra.", "resume=", "name="))]
    run = configs.compose_run(folder_overrides, parsed.config_dir, "sample")
    changes = [o for o in parsed.overrides if not o.startswith(("hydra.", "run="))]
    plain = configs.changed(like_run(run.plain, source), changes, parsed.config_dir, "sample")
    return Composed(plain=plain, folder=run.folder)
