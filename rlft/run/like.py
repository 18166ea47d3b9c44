"""The config of `rlft sample run=<run>`: what the run was trained on and with, and its policy as what samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft.place import Place

SHARED_WITH_RUNS = ("model", "prompts", "generation", "data", "reward", "scoring", "freshness", "token_budget")


def like_run(plain: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The config with what the run was trained on and with, and its policy as what samples."""
    shared = {key: place.config[key] for key in SHARED_WITH_RUNS if key in place.config}
    shared.setdefault("data", {})  # a run without a task has no prompts: they must be named
    policy = str(place.checkpoint or place.run)
    if place.config.get("lora", {}) is None:  # the policy is the model itself
        return {**plain, **shared, "model": {**place.config["model"], "path": policy}}
    return {**plain, **shared, "adapter": policy}
