"""`rlft sample`: scored completions of a data set in a JSONL file, that `rlft sft` and `rlft rm` learn from.

The run's folder holds samples.jsonl, to which each step appends the completions of its prompts that are kept, and
progress.json, written after it: what a kill leaves beyond that is cut when the run goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlft import check, run_status, runfolder
from rlft.check_adapters import check_adapters, check_classifiers
from rlft.checks.sample import check_config, lora_of, uses_of
from rlft.checks.servers import check_servers
from rlft.data.sampled import sampled_line
from rlft.engine import Engines
from rlft.generation.stops import check_stops
from rlft.logger.console import open_terminal
from rlft.logger.jsonl import encode
from rlft.memory import keep_blocks
from rlft.model.adapter_folder import content_fingerprint
from rlft.model.backbone import fingerprint, load_backbone, load_tokenizer, read_config
from rlft.model.config import LoraSettings
from rlft.model.roles import policy_alone
from rlft.out_of_memory import Doing, explained
from rlft.prompts import PromptSet, left_out, scan, tokenizer_fingerprint
from rlft.reward.scorer import Scorer
from rlft.reward.spec import examined, notes, specs
from rlft.roots import Keep, SampleConfig
from rlft.run.next_steps import after_sampling
from rlft.seeds import sampling_seeds
from rlft.session import open_freshness, open_resident, same_every_time
from rlft.targets import instantiate
from rlft.trainer.checkpoint import write_atomically
from rlft.types import Generator, Group, Prompt, Scores, Split, UserError
from rlft.work import Outcome, Work, program, resuming

SAMPLES = "samples.jsonl"
PROGRESS = "progress.json"
PLAIN_SECONDS = 10.0
DIGITS = 6
"""Of a total reward after the point: a sum in float32 says 1.2000000476837158, which min_reward=1.2 must equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """Everything known before a weight is loaded.

    lora: of the adapter that samples, or of a reward's. said_of_data: what the rewards have to say of the prompts.
    """

    config: SampleConfig
    plain: Mapping[str, Any]
    engine: str
    prompts: PromptSet
    said_of_data: tuple[str, ...]
    lora: LoraSettings
    tokenizer: str
    fingerprints: Mapping[str, str]

    @property
    def num_steps(self) -> int:
        return -(-len(self.chosen) // self.config.prompts_per_step)

    @property
    def chosen(self) -> tuple[Prompt, ...]:
        """The prompts that are sampled, in the order of the data."""
        return self.prompts.prompts[: self.config.num_prompts]

    def at(self, step: int) -> tuple[Prompt, ...]:
        """The prompts of the step that follows `step` steps."""
        size = self.config.prompts_per_step
        return self.chosen[step * size : (step + 1) * size]


def _check_vllm(lora: LoraSettings, adapter: str) -> None:
    """vLLM serves the adapter that samples; this verb has no `lora` section that could be changed instead."""
    if lora.use_dora:
        problem = "is a DoRA adapter, and vLLM serves none"
        raise UserError("adapter", problem, got=adapter, remedy="use generation=transformers")
    check.check_vllm(lora)


def make_plan(plain: Mapping[str, Any]) -> SamplePlan:
    """Checks the whole config, reads the model's config.json and tokenizer, and scans the data.

    Raises:
        UserError: for whatever a user can mend.
    """
    config = check_config(plain)
    check.check_machine(config.model)
    rewards, lora, used = specs(config.reward), lora_of(config), uses_of(config)
    engine, _ = check.choose_engine(config.generation.engine, None if config.adapter is None else lora)
    if config.generation.engine == "vllm" and config.adapter is not None:
        _check_vllm(lora, config.adapter)
    model_config, base_fingerprint = read_config(config.model), fingerprint(config.model)
    limits = config.prompts
    check.check_row(limits.max_tokens, config.generation.max_tokens, "generation.max_tokens", model_config)
    check_adapters(used, lora, config.model, base_fingerprint, model_config)
    check_classifiers(rewards)
    tokenizer, split = load_tokenizer(config.model), Split(config.split)
    check_stops(config.generation, tokenizer, model_config.get_text_config().vocab_size)
    data = instantiate(config.data, "data").load(split)
    prompts = scan(data, tokenizer, limits.max_tokens, limits.over_limit, split, limits.style)
    check.check_metadata(rewards, prompts.prompts[0])
    said_of_data = examined(rewards, prompts.prompts)
    check_servers(rewards, prompts.prompts[0])
    return SamplePlan(
        config=config,
        plain=plain,
        engine=engine,
        prompts=prompts,
        said_of_data=said_of_data,
        lora=lora,
        tokenizer=tokenizer_fingerprint(tokenizer),
        fingerprints={
            "data_fingerprint": prompts.fingerprint,
            "base_fingerprint": base_fingerprint,
            **{f"{use.key}_fingerprint": content_fingerprint(use.path) for use in used},
        },
    )


def kept(tokens: Sequence[Sequence[int]], totals: Sequence[float], config: SampleConfig) -> list[int]:
    """Which of a prompt's completions are kept, as places in their order; totals: their rewards.

    Of equally good ones the first.
    """
    first = {tuple(ids): i for i, ids in reversed(list(enumerate(tokens)))}
    found = [i for i, ids in enumerate(tokens) if not config.dedupe or first[tuple(ids)] == i]
    if config.min_reward is not None:
        found = [i for i in found if totals[i] >= config.min_reward]
    limit = 1 if config.keep is Keep.best else config.max_per_prompt
    best_first = sorted(found, key=lambda i: -totals[i])
    return sorted(best_first[:limit])


NOTHING_DONE: Mapping[str, Any] = {
    "step": 0,
    "bytes": 0,
    "sampled": 0,
    "kept": 0,
    "prompts_kept": 0,
    "rewards": {},
}
"""What progress.json would say before the first step."""


def read_progress(folder: Path) -> dict[str, Any]:
    """What progress.json says; NOTHING_DONE where there is none yet.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    try:
        state = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        if all(type(state[name]) is type(value) for name, value in NOTHING_DONE.items()):
            return state
    except FileNotFoundError:
        return dict(NOTHING_DONE)
    except run_status.UNREADABLE:
        pass
    remedy = "put it back as it was, or start another run"
    raise UserError("resume", f"{PROGRESS} in that folder is damaged", got=folder, remedy=remedy)


class Samples:
    """The file and what is known of it: prompts done, completions sampled and kept, sums of rewards."""

    def __init__(self, plan: SamplePlan, folder: Path) -> None:
        self.plan, self.file, self.record = plan, folder / SAMPLES, folder / PROGRESS
        self.state = read_progress(folder)
        self.file.touch()
        if self.file.stat().st_size < self.state["bytes"]:
            problem = f"{SAMPLES} is shorter than {PROGRESS} says"
            raise UserError("resume", problem, got=folder, remedy="put it back as it was, or start another run")
        os.truncate(self.file, self.state["bytes"])

    def add(self, step: int, groups: Sequence[Group], scores: Scores) -> None:
        """Appends what is kept of a step's groups, then says so in progress.json."""
        config, lines = self.plan.config, []
        sums: dict[str, float] = dict(self.state["rewards"])
        what = config.model.path if config.adapter is None else f"{config.model.path} with {config.adapter}"
        prompts_kept = 0
        for p, group in enumerate(groups):
            totals = [round(total, DIGITS) for total in scores.total[p].tolist()]
            places = kept([r.completion.token_ids for r in group.rollouts], totals, config)
            prompts_kept += bool(places)
            for i in places:
                by_name = {name: float(values[p, i]) for name, values in scores.by_reward.items()}
                lines.append(
                    sampled_line(
                        group.rollouts[i],
                        index=i,
                        rewards=by_name,
                        reward=totals[i],
                        model=what,
                        tokenizer=self.plan.tokenizer,
                    )
                )
        for name, values in scores.by_reward.items():
            sums[name] = sums.get(name, 0.0) + values.double().sum().item()
        with self.file.open("ab") as file:
            file.write(b"".join(map(encode, lines)))
            file.flush()
            os.fsync(file.fileno())
        self.state = {
            "step": step + 1,
            "bytes": self.file.stat().st_size,
            "sampled": self.state["sampled"] + sum(len(group.rollouts) for group in groups),
            "kept": self.state["kept"] + len(lines),
            "prompts_kept": self.state["prompts_kept"] + prompts_kept,
            "rewards": sums,
        }
        write_atomically(self.record, json.dumps(self.state, indent=2) + "\n")


class Bar:
    """How far it is: a bar on a terminal, a line now and then in a pipe."""

    def __init__(self, stack: ExitStack, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.total, self.told, self.live = total, time.monotonic(), sys.stdout.isatty()
        columns = (
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.progress = Progress(*columns, console=open_terminal(), disable=not self.live)
        stack.enter_context(self.progress)
        self.task = self.progress.add_task("", total=total)

    def show(self, done: int, state: Mapping[str, Any]) -> None:
        said = f"{state['kept']:,} of {state['sampled']:,} completions kept"
        self.progress.update(self.task, completed=done, description=said)
        if not self.live and (time.monotonic() - self.told > PLAIN_SECONDS or done == self.total):
            self.told = time.monotonic()
            print(f"{done}/{self.total} prompts  {said}", flush=True)


def do(plan: SamplePlan, folder: Path, engines: Engines, say: Callable[[str], None]) -> Outcome:
    """Samples to the last prompt or an interruption."""
    config, doing = plan.config, Doing()
    with ExitStack() as stack:
        stack.enter_context(explained(doing, config, resuming(folder)))
        keep_blocks(config.token_budget)
        backbone = load_backbone(config.model)
        stack.enter_context(same_every_time(backbone.device))
        roles = policy_alone(backbone, plan.lora, token_budget=config.token_budget, seed=config.seed)
        stack.callback(roles.close)
        rewards, scoring = specs(config.reward), config.scoring
        resident = open_resident(rewards, roles, learns=False)
        scorer = Scorer(rewards, scoring.workers, scoring.timeout, scoring.on_error, resident)
        stack.callback(scorer.close)
        generator = engines.open(plan.engine, config, plan.lora.rank, roles, backbone)
        if config.adapter is not None:
            generator.load(roles.publish(0))
            open_freshness(config.freshness, plan.prompts, backbone, config.generation).check(0, generator, roles)
        dropped = left_out(plan.prompts, config.split.replace("_", "-"), config.prompts.max_tokens)
        for note in (*dropped, plan.prompts.note, *notes(rewards), *plan.said_of_data):
            if note:
                say(f"note: {note}")
        samples = Samples(plan, folder)
        doing.current = "sample"
        bar = Bar(stack, len(plan.chosen))
        while samples.state["step"] < plan.num_steps:
            doing.finished = step = samples.state["step"]
            groups = sample(plan, generator, step)
            samples.add(step, groups, scorer(groups))
            bar.show(min(len(plan.chosen), (step + 1) * config.prompts_per_step), samples.state)
        return Outcome(step=samples.state["step"], interrupted=False)


def sample(plan: SamplePlan, generator: Generator, step: int) -> list[Group]:
    """The groups of a step, by seeds that derive from (seed, step)."""
    config, prompts = plan.config, plan.at(step)
    seeds = sampling_seeds(config.seed, step, len(prompts), config.n, "sample verb")
    return generator.sample(prompts, config.n, seeds, config.generation.sampling)


def stopped(folder: Path) -> str:
    """What is kept of a sampling that was interrupted: whole steps, so that a resume goes on with the next one."""
    record = folder / PROGRESS
    state = json.loads(record.read_text()) if record.exists() else {"step": 0, "sampled": 0, "kept": 0}
    done = f"{state['kept']:,} of {state['sampled']:,} completions are kept in {folder / SAMPLES}"
    return f"interrupted after step {state['step']}: {done}; go on with: {resuming(folder)}"


def steps_done(folder: Path, plan: SamplePlan) -> int:
    """How many steps the run in this folder has done.

    Raises:
        UserError: num_prompts was changed to fewer prompts than are sampled, or to more where the last step was cut.
    """
    step, size = read_progress(folder)["step"], plan.config.prompts_per_step
    if not step:
        return 0
    before = runfolder.read(folder).get("num_prompts")
    num_sampled = min(step * size, len(plan.prompts.prompts[:before]))
    if len(plan.chosen) < num_sampled:
        remedy = "leave it as it was"
        if num_sampled % size == 0 and num_sampled < len(plan.prompts.prompts):  # else there is no step to add
            remedy += f", or raise it ({resuming(folder)} num_prompts={2 * num_sampled})"
        problem = f"the run has sampled {num_sampled} prompts already"
        raise UserError("num_prompts", problem, got=plan.config.num_prompts, remedy=remedy)
    if len(plan.chosen) > num_sampled and num_sampled % size:
        problem = f"the run ended with {num_sampled} prompts inside a step of {size}, and can take no more"
        raise UserError("num_prompts", problem, got=plan.config.num_prompts, remedy="start another run")
    return step


def closing(plan: SamplePlan, folder: Path) -> None:
    """What was sampled and kept, and what to do with it."""
    from rich.table import Table
    from rich.text import Text

    from rlft.logger.summary import print_commands

    state = read_progress(folder)
    terminal, table = open_terminal(), Table.grid(padding=(0, 2))
    for label, value in (
        ("sampled", f"{state['sampled']:,} completions of {len(plan.chosen):,} prompts"),
        *((f"reward {name}", f"{total / state['sampled']:.4f}") for name, total in state["rewards"].items()),
        ("kept", f"{state['kept']:,} completions of {state['prompts_kept']:,} prompts"),
        ("file", str(folder / SAMPLES)),
    ):
        table.add_row(Text(label, style="dim"), Text(value, overflow="fold"))
    terminal.print(table)
    config = plan.config
    limits = (config.prompts.max_tokens, config.generation.max_tokens)
    print_commands(terminal, after_sampling(program(), folder / SAMPLES, config.model.path, *limits))


WORK = Work(
    make_plan=make_plan,
    check=lambda plain: check.check_machine(check_config(plain).model),
    do=do,
    steps_done=steps_done,
    stopped=stopped,
    closing=closing,
)
