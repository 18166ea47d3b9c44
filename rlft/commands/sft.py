"""`rlft sft`: supervised fine-tuning on demonstrations."""

from rlft.commands.next_steps import print_policy_page
from rlft.config.command import Command, lazy
from rlft.config.schema import SftConfig

COMMAND = Command(
    name="sft",
    usage="+recipe=<name> [...]",
    help="supervised fine-tuning on demonstrations",
    root=SftConfig,
    check=lazy("rlft.plan.rules:check_sft"),
    make_plan=lazy("rlft.plan.supervised_plan:plan_demonstrations"),
    run=lazy("rlft.loop.supervised:run_demonstrations"),
    print_summary=print_policy_page,
    has_policy=True,
)
