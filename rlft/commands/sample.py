"""`rlft sample`: writes scored completions of a data set to a JSONL file, from which `sft`, `rm` and `dpo` learn.

The run's folder holds samples.jsonl, to which each step appends the completions that are kept, and progress.json, which
is written afterwards: bytes beyond it, left by a kill, are cut off when the run is resumed.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.config.command import Command, lazy
from rlft.config.schema import SampleConfig
from rlft.data.records import identity, is_sampled, number_of, sampled_line, split_of
from rlft.logger.console import open_terminal
from rlft.runs import run_folder, run_status
from rlft.runs.lines import each_line, encode
from rlft.runs.run_status import FORMAT, PROGRESS
from rlft.system.disk import writing
from rlft.system.files import append, write_atomically
from rlft.system.memory import Doing, explained, keep_blocks
from rlft.system.seeds import sampling_seeds
from rlft.system.terminal import command_line, override, program, resuming, show
from rlft.types import Group, Scores, Split, UserError, counted, require

if TYPE_CHECKING:
    from rlft.generation.engine import Generator
    from rlft.loop.driver import Outcome
    from rlft.loop.parts import Engines
    from rlft.plan.sample_plan import SamplePlan

SAMPLES = "samples.jsonl"
PLAIN_SECONDS = 10.0
DIGITS = 6  # decimal places of a total reward: a float32 sum gives 1.2000000476837158, which must equal min_reward=1.2


def kept_indices(tokens: Sequence[Sequence[int]], totals: Sequence[float], config: SampleConfig) -> list[int]:
    """The indices of a prompt's completions that are kept; the first of equally good ones."""
    first_index = {tuple(ids): i for i, ids in reversed(list(enumerate(tokens)))}
    indices = [i for i, ids in enumerate(tokens) if not config.dedupe or first_index[tuple(ids)] == i]
    if config.min_reward is not None:
        indices = [i for i in indices if totals[i] >= config.min_reward]
    limit = 1 if config.keep == "best" else config.max_per_prompt
    best_first = sorted(indices, key=lambda i: -totals[i])
    return sorted(best_first[:limit])


NOTHING_DONE: Mapping[str, Any] = {"step": 0, "bytes": 0, "sampled": 0, "kept": 0, "prompts_kept": 0, "rewards": {}}
"""The content of progress.json before the first step."""


def read_progress(folder: Path) -> dict[str, Any]:
    """The content of progress.json; NOTHING_DONE if there is no such file yet. Refuses damaged files."""
    file, remedy = folder / SAMPLES, "restore the file from a copy, or start a new run"
    try:
        state: Any = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return dict(NOTHING_DONE)
    except run_status.UNREADABLE:
        state = None
    is_whole = isinstance(state, dict) and _is_progress(state)
    require(is_whole, "resume", f"{PROGRESS} in that folder is damaged", got=folder, remedy=remedy)
    is_there = (file.stat().st_size if file.is_file() else 0) >= state["bytes"]
    require(is_there, "resume", f"{SAMPLES} is shorter than {PROGRESS} says", got=folder, remedy=remedy)
    return {name: state[name] for name in NOTHING_DONE}


def _is_progress(state: Mapping[str, Any]) -> bool:
    """Whether every value is present, has its type, and is possible."""
    if any(type(state.get(n)) is not type(v) for n, v in NOTHING_DONE.items()):
        return False
    counts, sums = [v for v in state.values() if type(v) is int], state["rewards"].values()
    return min(counts) >= 0 and all(type(v) is float for v in sums) and bool(state["sampled"] or not sums)


class Samples:
    """The samples file and its state: steps done, completions sampled and kept, sums of rewards."""

    def __init__(self, plan: SamplePlan, folder: Path) -> None:
        self.plan, self.file, self.record = plan, folder / SAMPLES, folder / PROGRESS
        self.state = read_progress(folder)
        with writing(self.file):
            self.file.touch()
        os.truncate(self.file, self.state["bytes"])
        deque(each_line(self.file, is_sampled), maxlen=0)  # which tells of damaged ones

    def add(self, step: int, groups: Sequence[Group], scores: Scores) -> None:
        """Appends the kept completions of a step, then writes progress.json."""
        config, lines = self.plan.config, []
        sums: dict[str, float] = dict(self.state["rewards"])
        model_name = config.model.path if config.adapter is None else f"{config.model.path} with {config.adapter}"
        prompts_kept = 0
        for p, group in enumerate(groups):
            totals = [round(total, DIGITS) for total in scores.total[p].tolist()]
            indices = kept_indices([r.completion.token_ids for r in group.rollouts], totals, config)
            prompts_kept += bool(indices)
            for i in indices:
                rewards = {name: float(values[p, i]) for name, values in scores.by_reward.items()}
                of_all: dict[str, Any] = {"reward": totals[i], "model": model_name, "tokenizer": self.plan.tokenizer}
                lines.append(sampled_line(group.rollouts[i], index=i, rewards=rewards, **of_all))
        for name, values in scores.by_reward.items():
            sums[name] = sums.get(name, 0.0) + values.double().sum().item()
        with self.file.open("ab", buffering=0) as file:
            append(file, b"".join(map(encode, lines)), durable=True)
        self.state = {
            "step": step + 1,
            "bytes": self.file.stat().st_size,
            "sampled": self.state["sampled"] + sum(len(group.rollouts) for group in groups),
            "kept": self.state["kept"] + len(lines),
            "prompts_kept": self.state["prompts_kept"] + prompts_kept,
            "rewards": sums,
        }
        write_atomically(self.record, json.dumps({"format": FORMAT, **self.state}, indent=2) + "\n")


def run(plan: SamplePlan, folder: Path, engines: Engines, say: Callable[[str], None]) -> Outcome:
    from rlft.loop.driver import Outcome, deterministic_on_cpu
    from rlft.loop.freshness import check_decoding, open_freshness
    from rlft.loop.parts import largest_of, open_scorer
    from rlft.model.backbone import load_backbone
    from rlft.model.roles import policy_alone
    from rlft.plan.run_plan import facts_of

    config, doing = plan.config, Doing()
    engine = config.generation.named(plan.engine)
    with ExitStack() as stack:
        stack.enter_context(explained(doing, config, resuming(folder), largest_of(plan)))
        keep_blocks(config.token_budget)
        adopt = engines.adopting(plan, plan.lora)
        backbone = load_backbone(config.model) if adopt is None else load_backbone(config.model, adopt)
        stack.enter_context(deterministic_on_cpu(backbone.device))
        roles = policy_alone(backbone, plan.lora, token_budget=config.token_budget, seed=config.seed)
        stack.callback(roles.close)
        scorer = stack.enter_context(open_scorer(config, roles))
        generator = stack.enter_context(engines.opened_for(plan, roles, plan.lora, plan.environment))
        freshness = open_freshness(config.freshness, plan.prompts, backbone, engine, lambda text: say(f"note: {text}"))
        if config.adapter is not None:
            adapter = roles.publish(0)
            generator.load(adapter)
            freshness.check(0, generator, roles, adapter)
        for note in plan.notes_with(facts_of(roles.model, (), backbone, roles.forward)):
            say(f"note: {note}")
        samples = Samples(plan, folder)
        doing.current = "sample"
        check_decoding(generator, roles, plan.prompts, config, freshness.limits)
        total, shown_at = len(plan.chosen), time.monotonic()
        while samples.state["step"] < plan.num_steps:
            doing.finished = step = samples.state["step"]
            groups = sample(plan, generator, step)
            samples.add(step, groups, scorer(groups))
            done, state = min(total, (step + 1) * config.prompts_per_step), samples.state
            if done == total or time.monotonic() - shown_at > PLAIN_SECONDS:
                shown_at = time.monotonic()
                kept = f"{state['kept']:,} of {state['sampled']:,} completions kept"
                show(f"{done}/{counted(total, 'prompt')}  {kept}")
        return Outcome(step=samples.state["step"], interrupted=False)


def sample(plan: SamplePlan, generator: Generator, step: int) -> list[Group]:
    """The groups of a step, sampled with seeds that derive from (seed, step)."""
    config, prompts = plan.config, plan.at(step)
    # Another purpose would draw other samples.
    seeds = sampling_seeds(config.seed, step, len(prompts), config.n, "sample verb")
    return generator.sample(prompts, config.n, seeds, config.generation.sampling)


def stopped(folder: Path) -> str:
    """The message about an interrupted run: whole steps are kept, and a resume continues with the next one."""
    state = read_progress(folder)
    done = f"{state['kept']:,} of {state['sampled']:,} completions are kept in {folder / SAMPLES}"
    return f"interrupted after step {state['step']}: {done}; resume with: {resuming(folder)}"


def steps_done(folder: Path, plan: SamplePlan) -> int:
    """The number of steps that the run in this folder has finished; refuses a num_prompts that these do not fit."""
    state, size = read_progress(folder), plan.config.prompts_per_step
    step = state["step"]
    if not step:
        return 0
    earlier_limit = run_folder.read(folder).get("num_prompts")
    num_sampled = min(step * size, len(plan.prompts.prompts[:earlier_limit]))
    if len(plan.chosen) < num_sampled:
        remedy = "leave it as it was"
        if num_sampled % size == 0 and num_sampled < len(plan.prompts.prompts):  # otherwise no step can be added
            remedy += f", or raise it ({resuming(folder)} num_prompts={2 * num_sampled})"
        problem = f"the run has sampled {counted(num_sampled, 'prompt')} already"
        raise UserError("num_prompts", problem, got=plan.config.num_prompts, remedy=remedy)
    if len(plan.chosen) > num_sampled and num_sampled % size:
        problem = f"the run ended with {counted(num_sampled, 'prompt')} inside a step of {size}, so none can be added"
        raise UserError("num_prompts", problem, got=plan.config.num_prompts, remedy="start a new run")
    return step


def print_run_summary(plan: SamplePlan, folder: Path) -> None:
    """Prints what was sampled and kept, and the commands that learn from it."""
    from rlft.logger.summary import print_commands, print_facts

    state, terminal, config = read_progress(folder), open_terminal(), plan.config
    facts = [
        ("sampled", f"{counted(state['sampled'], 'completion', ',')} of {counted(len(plan.chosen), 'prompt', ',')}"),
        *((f"reward {name}", f"{total / state['sampled']:.4f}") for name, total in state["rewards"].items()),
        ("kept", f"{counted(state['kept'], 'completion', ',')} of {counted(state['prompts_kept'], 'prompt', ',')}"),
        ("file", str(folder / SAMPLES)),
    ]
    print_facts(terminal, facts)
    limits = (config.prompts.max_tokens, config.generation.max_tokens)
    print_commands(terminal, after_sampling(program(), folder / SAMPLES, config.model.path, *limits))


LARGEST_STEP = 32
HELD_OUT = 0.1  # the default fraction of held-out data of these commands


def after_sampling(
    rlft: str, file: Path, model: str, max_prompt_tokens: int, max_completion_tokens: int
) -> list[tuple[str, str]]:
    """(what it does, command) of each command for which the file has enough lines; `rlft` is how it is called."""
    rewards: dict[str, list[float | None]] = {}

    def is_scored(line: Mapping[str, Any]) -> bool:
        return isinstance(line.get("prompt"), list) and "reward" in line

    for line in each_line(file, is_scored):
        rewards.setdefault(identity(line["prompt"]), []).append(line["reward"])
    ranked = [question for question, scores in rewards.items() if len({r for r in scores if r is not None}) > 1]
    limits = [f"prompts.max_tokens={max_prompt_tokens}", f"max_completion_tokens={max_completion_tokens}"]
    shared = [override("model.path", model), *limits]
    commands = []
    for purpose, command, data, unit, questions in (
        ("learn from them", "sft", "demonstrations", "examples_per_step", list(rewards)),
        ("a reward model from their ranking", "rm", "preferences", "rankings_per_step", ranked),
        ("a policy from their ranking", "dpo", "preferences", "rankings_per_step", ranked),
    ):
        if len(questions) < 2:  # one is needed for learning and one is held out
            continue
        fraction = held_out_fraction(questions)
        split_override = [] if fraction == HELD_OUT else [f"{data}.held_out_fraction={fraction}"]
        num_training = sum(split_of(question, fraction) is Split.train for question in questions)
        step_override = [f"{unit}={num_training}"] if num_training < LARGEST_STEP else []
        words = [command, override(f"{data}.path", file), *shared, *split_override, *step_override]
        commands.append((purpose, command_line(rlft, *words)))
    return commands


def held_out_fraction(questions: Sequence[str]) -> float:
    """The default fraction if it gives both splits a question, else another that does; needs at least two questions."""
    numbers = sorted(number_of(question) / 2**64 for question in questions)
    if numbers[0] < HELD_OUT <= numbers[-1]:
        return HELD_OUT
    num_held_out = min(len(numbers) - 1, max(1, round(HELD_OUT * len(numbers))))
    return round((numbers[num_held_out - 1] + numbers[num_held_out]) / 2, 9)


SAMPLE = Command(
    name="sample",
    usage="[run=<run>] [...]",
    help="write scored completions of a data set to a JSONL file",
    root=SampleConfig,
    check=lazy("rlft.plan.rules:check_sample"),
    make_plan=lazy("rlft.plan.sample_plan:make_plan"),
    run=run,
    steps_done=steps_done,
    stopped=stopped,
    print_summary=print_run_summary,
    compose=lazy("rlft.runs.find:composed_like_a_run"),
    headline=None,
)
