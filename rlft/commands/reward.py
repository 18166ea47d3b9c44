"""`rlft reward try`: what the rewards of a run pay for, tried on texts that a policy may find, before training."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlft.commands.arguments import only_overrides
from rlft.commands.doctor.command import check_recipe, print_rows
from rlft.config.compose import compose_run
from rlft.config.resolved import resolve
from rlft.runs.find import with_named_runs
from rlft.system import interrupt
from rlft.system.terminal import say
from rlft.types import Prompt, UserError, counted, require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlft.config.schema import RunConfig
    from rlft.reward.verdicts import Row, Tried
    from rlft.reward.workers.reward_spec import RewardSpec

USAGE = """\
usage: rlft reward try [+recipe=<name>] [<key>=<value>] ... [rows=4] [--json]

Tries the rewards of a run of rlft train on its own data before anything is trained, and loads no weights: right answers
in the forms that models write, wrong ones in the right form, two answers, the answer only in the reasoning, empty,
endless and repeated texts, other languages, the prompt echoed, injections for judges, texts that name the reward,
special tokens. It prints what gets which score, the cheapest text with the full reward, how long the rewards take, and
what that says about their weights.

  rows     rows of the data that are tried; each is some 150 texts, which a judge or a server of your own scores as well
  --json   one JSON object with every text and score, for scripts

A row is ok, limit (to be known), wrong or skipped. The exit code is 1 if one is wrong, else 0.

  rlft reward try +recipe=grpo_arithmetic
  rlft reward try --config-dir mine +recipe=grpo_gsm8k reward=[mine,format]"""

ROWS = 4
LIMIT_S = 60.0
"""Seconds for each reward."""
STYLES = {"ok": "green", "limit": "yellow", "wrong": "red", "skipped": "dim"}
COMMAND = "train"


def command(arguments: list[str]) -> int:
    """Prints the table, or the JSON; returns 1 if something is wrong, else 0."""
    task, *words = arguments or [""]
    require(task == "try", "reward", "has no such task", got=task or None, remedy="write rlft reward try")
    words = [word for word in words if word != "--json"]
    check_recipe(words)
    parsed = only_overrides(words, COMMAND)
    overrides = [o for o in parsed.overrides if not o.startswith("rows=")]
    num_rows = rows_of(parsed.value("rows"))
    run = compose_run(overrides, parsed.config_dir, COMMAND)
    config: RunConfig = resolve(with_named_runs(run.plain), COMMAND).config
    rewards = tried_rewards(config)
    interrupt.set_interrupt_message("nothing was changed")
    prompts, tried = attack(config, rewards, num_rows)
    rows = [*left_out(config, rewards), *tried.rows(config.completions_per_step, config.scoring.workers)]
    if "--json" in arguments:
        print(json.dumps(as_dict(tried, rows), indent=1))
    else:
        print_scores(tried, len(prompts))
        print_rows(rows, STYLES)
    return 1 if any(row.status == "wrong" for row in rows) else 0


def rows_of(text: str | None) -> int:
    """The number of rows to try. UserError if it is none."""
    if text is None:
        return ROWS
    is_number = text.isascii() and text.isdigit() and int(text) > 0
    require(is_number, "rows", "must be a number of rows of the data, at least 1", got=text, remedy=f"try rows={ROWS}")
    return int(text)


def tried_rewards(config: RunConfig) -> dict[str, RewardSpec]:
    """The rewards that can be tried. UserError if there is none, or if completions are conversations."""
    from rlft.reward.workers.reward_spec import specs

    problem = "holds conversations, and single completions are tried here"
    remedy = "leave it out with environment=null, or see one conversation scored with rlft plan"
    require(
        not config.environment, "environment", problem, got=(config.environment or {}).get("_target_"), remedy=remedy
    )
    rewards = {name: spec for name, spec in specs(config.reward).items() if not spec.runs_in_trainer}
    if not rewards:
        problem = "has none that can be tried without weights"
        raise UserError("reward", problem, got=list(config.reward), remedy="choose one, such as reward=[exact_match]")
    return rewards


def left_out(config: RunConfig, rewards: Mapping[str, RewardSpec]) -> list[Row]:
    from rlft.reward.verdicts import Row, Verdict

    value = "needs weights, and is not part of the sums below"
    return [Row(name=name, status=Verdict.skipped, value=value) for name in config.reward if name not in rewards]


def attack(config: RunConfig, rewards: Mapping[str, RewardSpec], num_rows: int) -> tuple[Sequence[Prompt], Tried]:
    """The rows of the data that were tried, and what came of it."""
    from rlft.config.instantiate import instantiate
    from rlft.data.prompts import scan
    from rlft.model.backbone import ends_of, load_tokenizer
    from rlft.plan.attack import Range
    from rlft.plan.scoring_rules import check_metadata, prompt_additions
    from rlft.plan.trials import check_servers
    from rlft.reward.workers.reward_spec import check_with_rewards
    from rlft.types import Split

    settings, style = config.prompts, config.prompts.style
    tokenizer = load_tokenizer(config.model, settings.template_variables)
    ends = ends_of(config.model, style, tokenizer)
    texts = instantiate(config.data, "data").load(Split.train)
    chosen = [texts[k * len(texts) // num_rows] for k in range(min(num_rows, len(texts)))]
    shown = prompt_additions(None, tokenizer, chosen)
    prompts = scan(chosen, tokenizer, settings.max_tokens, settings.over_limit, Split.train, style, shown).prompts
    check_metadata(rewards, prompts[0])
    check_servers(rewards, prompts[0])
    for note in check_with_rewards(rewards, prompts):
        say(f"note: {note}")
    return prompts, Range.of(config, rewards, tokenizer, ends, LIMIT_S).try_all(prompts)


def as_dict(tried: Tried, rows: Sequence[Row]) -> dict[str, Any]:
    """What was tried and found, as values for JSON."""
    return {
        "sound": all(row.status != "wrong" for row in rows),
        "rows": [asdict(row) for row in rows],
        "summary": tried.summary(),
        "form": tried.form,
        "weights": dict(tried.weights),
        "cheapest": tried.cheapest and asdict(tried.cheapest),
        "texts": [asdict(shot) | {"total": shot.total(tried.weights)} for shot in tried.shots],
    }


def print_scores(tried: Tried, num_rows: int) -> None:
    """Prints the mean scores: of gold answers by form, of wrong texts the highest of each family."""
    from rich.table import Table
    from rich.text import Text

    from rlft.logger.console import open_terminal
    from rlft.logger.text import one_line, visible
    from rlft.reward.verdicts import score_lines

    terminal, table = open_terminal(), Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("text", "example"):
        table.add_column(title, overflow="fold", style="dim" if title == "example" else "")
    for name in (*tried.weights, "total"):
        table.add_column(Text(visible(name)), justify="right", no_wrap=True)
    for title, example, means in score_lines(tried):
        cells = ["" if mean is None else f"{mean:.3g}" for mean in means]
        table.add_row(Text(title), Text(one_line(visible(example), 48)), *cells)
    terminal.print(f"Mean scores over {counted(num_rows, 'row')} of the data, before weights; answers {tried.form}")
    terminal.print(table)
    terminal.print()
