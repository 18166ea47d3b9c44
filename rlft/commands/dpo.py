"""`rlft dpo`: a policy from preferences, without sampling."""

from rlft.commands.next_steps import print_policy_page
from rlft.config.command import Command, lazy
from rlft.config.schema import DpoConfig

COMMAND = Command(
    name="dpo",
    usage="+recipe=<name> [...]",
    help="fine-tune on preferences without a reward model",
    root=DpoConfig,
    check=lazy("rlft.plan.rules:check_preferences"),
    make_plan=lazy("rlft.plan.supervised_plan:plan_rankings"),
    run=lazy("rlft.loop.supervised:run_preferences"),
    print_summary=print_policy_page,
    has_policy=True,
)
