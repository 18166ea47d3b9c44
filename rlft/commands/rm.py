"""`rlft rm`: a reward model from preferences, which `reward=learned` and `critic.init` accept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlft.commands.next_steps import print_page
from rlft.config.command import Command, lazy
from rlft.config.schema import RmConfig
from rlft.system.terminal import override, overrides

if TYPE_CHECKING:
    from rlft.plan.supervised_plan import PreferencePlan


def print_summary(plan: PreferencePlan, folder: Path) -> None:
    words = ["train", "+recipe=ppo_arithmetic", override("model.path", plan.config.model.path)]
    words += [*overrides(plan.config.lora.keys_of_shape), "reward=[exact_match,learned]"]
    words += [override("reward.learned.path", folder), "critic.init=reward"]
    print_page(folder, [("train a policy with it, its critic begun from it", words)])


COMMAND = Command(
    name="rm",
    usage="+recipe=<name> [...]",
    help="train a reward model on preferences",
    root=RmConfig,
    check=lazy("rlft.plan.rules:check_preferences"),
    make_plan=lazy("rlft.plan.supervised_plan:plan_rankings"),
    run=lazy("rlft.loop.supervised:run_preferences"),
    print_summary=print_summary,
)
