"""`rlft reward try`: what the rewards of a run pay for, tried on texts that a policy may find, before training."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rlft.commands.doctor.command import check_recipe
from rlft.commands.launch import import_libraries, settled
from rlft.commands.tables import counts_of, rows_table
from rlft.config.choices import closest
from rlft.config.compose import compose_run
from rlft.config.overrides import only_overrides
from rlft.config.resolved import resolve
from rlft.config.suggest import OWN_KEYS
from rlft.plan.rewards.verdicts import summary_of, verdicts_on
from rlft.system import interrupt
from rlft.system.terminal import CheckRow, Status, command_line, say
from rlft.system.text import visible
from rlft.types import Mistakes, Prompt, UserError, counted, require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlft.config.resolved import Resolved
    from rlft.config.schema import RunConfig
    from rlft.plan.rewards.verdicts import Tried
    from rlft.reward.workers.reward_spec import RewardSpec

TASK, COMMAND, ROWS = "try", "train", 4


def command(arguments: list[str]) -> int:
    """Prints the table, or the JSON; returns 1 if something is wrong, else 0."""
    check_task(arguments[:1])
    words = [word for word in arguments[1:] if word not in ("--json", "--all")]
    check_recipe(words, "rlft reward try reward=[<reward>]")
    parsed = only_overrides(words, COMMAND, OWN_KEYS["reward try"], mistakes := Mistakes())
    num_rows = rows_of(parsed.value("rows"))
    with contextlib.redirect_stdout(sys.stderr):  # rewards may print while they are built
        with mistakes.joined():
            run = compose_run(parsed.overrides, parsed.config_dir, COMMAND, requires=False)
        mistakes.refuse()
        resolved = resolve(settled(run.plain), COMMAND)
        config: RunConfig = resolved.config
        rewards = specs_of(config)
        interrupt.set_interrupt_message("nothing was changed")
        _, tried = try_rewards(resolved, rewards, num_rows)
    rows = verdicts_on(tried, config.completions_per_step, config.scoring.workers)
    if "--json" in arguments:
        found = {
            "sound": all(row.status is not Status.wrong for row in rows),
            "rows": [asdict(row) for row in rows],
            "summary": summary_of(tried),
            "form": tried.form,
            "weights": dict(tried.weights),
            "cheapest": tried.cheapest and asdict(tried.cheapest),
            "texts": [asdict(text) | {"total": text.total(tried.weights)} for text in tried.texts],
        }
        print(json.dumps(found, indent=1))
    else:
        print_page(tried, rows, None if "--all" in arguments else ["rlft", "reward", *arguments])
    return 1 if any(row.status is Status.wrong for row in rows) else 0


def check_task(words: Sequence[str]) -> None:
    """Requires the word `try` after `rlft reward`."""
    is_word = bool(words) and "=" not in words[0] and not words[0].startswith("-")
    require(is_word, "reward", "needs a word for what to do", remedy=f"write rlft reward {TASK}")
    remedy = f"did you mean rlft reward {TASK}?" if closest(words[0], [TASK]) else f"use rlft reward {TASK}"
    require(words[0] == TASK, words[0], "there is no such command", remedy=remedy)


def rows_of(text: str | None) -> int:
    """The number of rows to try. UserError if it is none."""
    is_number = text is None or (text.isascii() and text.isdigit() and int(text) > 0)
    require(is_number, "rows", "must be a number of rows of the data, at least 1", got=text, remedy=f"try rows={ROWS}")
    return ROWS if text is None else int(text)


def specs_of(config: RunConfig) -> dict[str, RewardSpec]:
    """The run's rewards. UserError if none can be tried, or if completions are conversations."""
    from rlft.reward.workers.reward_spec import specs

    problem = "holds conversations, and single completions are tried here"
    remedy = "leave it out with environment=null, or see one conversation scored with rlft plan"
    got = (config.environment or {}).get("_target_")
    require(not config.environment, "environment", problem, got=got, remedy=remedy)
    rewards, problem = specs(config.reward), "has none that can be tried without weights"
    can_be_tried = not all(spec.runs_in_trainer for spec in rewards.values())
    require(can_be_tried, "reward", problem, got=[*rewards], remedy="choose one, such as reward=[exact_match]")
    return rewards


def try_rewards(resolved: Resolved, rewards: Mapping[str, RewardSpec], num_rows: int) -> tuple[Sequence[Prompt], Tried]:
    """The rows of the data that were tried, and the results; prints the notes with which the run would begin."""
    from rlft.plan.rules import check_metadata, models_of

    config: RunConfig = resolved.config
    doing = f"rlft reward try: {', '.join(rewards)} on {counted(num_rows, 'row')} of the data"
    import_libraries(doing, models_of(config), needs_weights=False)
    from rlft.config.instantiate import instantiate
    from rlft.data.prompts import scan
    from rlft.plan.prediction import notes_of
    from rlft.plan.rewards.references import check_servers
    from rlft.plan.rewards.tester import RewardTester, Writer
    from rlft.reward.workers.reward_spec import reported
    from rlft.types import Split

    settings, writer = config.prompts, Writer.of(config)
    is_refused = False
    try:
        plan = resolved.plan(runs_here=False)
        texts, notes = plan.train_prompts.prompts, notes_of(plan)
    except UserError as error:  # its rewards can be tried all the same
        is_refused = True
        texts = instantiate(config.data, "data").load(Split.train)
        notes = [f"rlft train would refuse this: {error}"]
    number = min(num_rows, len(texts))
    chosen = [texts[k * len(texts) // number] for k in range(number)]
    limit, over_limit = settings.max_tokens, settings.over_limit
    prompts = scan(chosen, writer.tokenizer, limit, over_limit, Split.train, settings.style).prompts
    if is_refused:  # a plan has checked this
        check_metadata(rewards, prompts[0])
        check_servers(rewards, prompts[0])
        list(reported(rewards, "examine", prompts))
    for note in notes:
        say(f"note: {note}")
    return prompts, RewardTester(config, rewards, writer).try_all(prompts)


def print_page(tried: Tried, rows: Sequence[CheckRow], words: Sequence[str] | None) -> None:
    """Prints the verdict and the faults; words: of the command, or None to print the rows without a fault as well."""
    from rlft.logger.console import open_terminal

    terminal = open_terminal()
    terminal.print(counts_of(rows))
    for line in summary_of(tried):
        terminal.print(visible(line))
    terminal.print()
    faults = [row for row in rows if row.status is not Status.ok]
    terminal.print(rows_table(faults if words else rows))
    if words:
        terminal.print(f"\nall rows: {command_line(*words, '--all')}")
