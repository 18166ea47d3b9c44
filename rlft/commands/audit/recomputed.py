"""What an audit does again: fingerprints, and prompts, texts, rewards and advantages of random steps, without weights.

Other random steps are replayed from their checkpoints, and what they leave is compared with the run's chain.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlft.batch import collate
from rlft.commands.audit.files import Audited, made_with_config_now, steps_text
from rlft.config import command as commands
from rlft.data.prompts import prompts_for_step
from rlft.generation.stops import shown_texts
from rlft.logger.interface import Logger
from rlft.loop.parts import Engines
from rlft.model.backbone import load_tokenizer
from rlft.plan.fit import fit_to_device
from rlft.plan.train_plan import TrainPlan
from rlft.reward.http import ServerKeys
from rlft.reward.workers.reward_spec import TURNS, specs
from rlft.reward.workers.scorer import RewardError, Scorer, mixed, with_turns
from rlft.runs import checkpoint, fingerprints, run_folder
from rlft.runs.chain import CHAIN, MEASURED, batch_parts, made_on
from rlft.runs.lines import METRICS, StepRecord, completion_of, number, read_lines, rollout_file, silent
from rlft.runs.run_folder import CONFIG, named_input
from rlft.system.crash import escaped
from rlft.system.device import resolve_device
from rlft.system.locks import owned_folder
from rlft.system.machine import machine
from rlft.tokens.text import decode
from rlft.types import Batch, FinishReason, Group, Prompt, Rollout, UserError, counted

if TYPE_CHECKING:
    from rlft.plan.run_plan import Plan

REPEATS = 3  # how often a reward is computed again before a score counts as wrong, in case it gives another each time
BOUND = 1e-6
"""A score, total or advantage differs if it is further than this from the recomputed one, relative to numbers above 1:
float32 on another processor."""
REPLAY_BOUND = 1e-3  # up to which metrics of the same tokens count as replayed on another machine, relative above 1
REPEATABLE = ("transformers",)  # engines that sample the same bits again on the same machine

Lines = Sequence[Mapping[str, Any]]


def check_inputs(run: Audited, plan: Plan) -> bool:
    """Compares data, base and adapters as they are now with those of the run's last step: whether all are the same."""
    same = True
    parts = run.lines[run.last]["sha256"]
    models = fingerprints.models_in(plan.fingerprints)
    recorded = {f"{what}{fingerprints.SUFFIX}": digest for what, digest in parts.items()}
    for what in models:
        noun, key, _ = named_input(what)
        changed = fingerprints.differing(recorded, plan.fingerprints, what)
        with run.findings.checking(noun, f"as in the run, {fingerprints.described(plan.fingerprints, recorded, what)}"):
            if changed:
                same = False
                run.findings.differ(noun, f"{key} has other {changed.both}, step {run.last}")
    for name, now in plan.fingerprints.items():
        if fingerprints.are_of_a_model(name, models):
            continue
        what = name.removesuffix("_fingerprint")
        noun, key, _ = named_input(what)
        before = parts.get(what)
        if before is None or not now:
            continue
        with run.findings.checking(noun, f"as in the run, fingerprint {now[:12]}"):
            if before != now:
                same = False
                text = f"{key} has the fingerprint {now[:12]} now, and had {before[:12]} in step {run.last}"
                run.findings.differ(noun, text)
    return same


def check_steps(run: Audited, plan: TrainPlan, number_of_steps: int) -> set[str]:
    """Recomputes that many random steps whose completions are on disk; returns the rewards that are not repeatable."""
    candidates = [step for step in run.lines if rollout_file(run.folder, step).is_file()]
    chosen = sorted(random.SystemRandom().sample(candidates, min(number_of_steps, len(candidates))))
    if not chosen:
        run.findings.leave_open("recomputed", "no step was chosen, or no completions are on disk")
        return set()
    recomputing = Recomputing(run, plan)
    with run.findings.checking("rollouts", ""):
        try:
            for step in chosen:
                recomputing.step(step)
        finally:
            recomputing.scorer.close()
    for what in ("prompts", "texts", "rewards", "masks", "advantages"):
        if why := recomputing.open.get(what):
            run.findings.leave_open(what, "; ".join(dict.fromkeys(why)))
        elif what not in recomputing.wrong:
            run.findings.confirm(what, f"recomputed of {steps_text(chosen)}")
    return recomputing.unrepeatable


class Recomputing:
    """The parts of a run that recompute its steps.

    Attributes:
        scored: the rewards that are computed here; others need weights or a server.
        open: {what: why it could not be recomputed}.
        wrong: what was found to differ.
        unrepeatable: rewards that score the same completions differently each time.
        here: the machine of this audit, as a line of the chain names it.
    """

    def __init__(self, run: Audited, plan: TrainPlan) -> None:
        self.run, self.plan, config, scoring = run, plan, plan.config, plan.config.scoring
        self.tokenizer: Any = load_tokenizer(config.model, config.prompts.template_variables)
        self.rewards = specs(config.reward)
        here = {name: spec for name, spec in self.rewards.items() if not spec.runs_in_trainer}
        self.scored = {name: spec for name, spec in here.items() if not isinstance(spec.build(), ServerKeys)}
        limits = (scoring.workers, scoring.timeout, scoring.on_error)
        self.scorer = Scorer(self.scored, *limits, allow_unscorable=config.allows_unscorable)
        why = [f"{name} needs weights or a server" for name in self.rewards if name not in self.scored]
        self.open: dict[str, list[str]] = {"rewards": why} if why else {}
        self.wrong: set[str] = set()
        self.unrepeatable: set[str] = set()
        self.here = made_on(machine(resolve_device(config.model.device)), plan.engine)

    def step(self, step: int) -> None:
        file = rollout_file(self.run.folder, step)
        name = str(file.relative_to(self.run.folder))
        try:
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            groups = self._groups(step, lines, name)
            self._check_texts(step, groups, name)
            self._check_rewards(step, lines, groups, name)
            self._check_batch(step, lines, groups, name)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:  # of a damaged line
            self._differ("rollouts", name, f"step {step}: cannot be read as completions ({type(error).__name__})")

    def _differ(self, what: str, name: str, how: str) -> None:
        self.wrong.add(what)
        self.run.findings.differ(name, how)

    def _leave_open(self, what: str, why: str) -> None:
        self.open.setdefault(what, []).append(why)

    # -- prompts and texts ---------------------------------------------------------------------------------------------
    def _groups(self, step: int, lines: Lines, name: str) -> list[Group]:
        """The groups of the file, with the prompts of the data; differs where they are not those of the step."""
        config = self.plan.config
        starts = [i for i, line in enumerate(lines) if line["index"] == 0]
        parts = [lines[i:j] for i, j in zip(starts, [*starts[1:], len(lines)], strict=True)]
        if any(len(part) != config.group_size for part in parts) or len(parts) != config.prompts_per_step:
            due = f"{config.prompts_per_step} x {counted(config.group_size, 'line')}"
            self._differ("prompts", name, f"step {step}: has not {due}")
        prompts = self._prompts(step, [part[0]["prompt_id"] for part in parts], name)
        versions = {max(0, step - 1 - config.overlap.lag), step - 1}
        groups = []
        for prompt, part in zip(prompts, parts, strict=True):
            for line in part:
                where = f"step {step}, prompt {line['prompt_id']}, completion {line['index']}"
                if line["step"] != step or line["prompt_id"] != prompt.id:
                    self._differ("prompts", name, f"{where}: is of another step or prompt")
                same = line["prompt"] == [dict(message) for message in prompt.messages]
                images = [image.digest for image in prompt.images]
                if line.get("images", []) != images:
                    self._differ("prompts", name, f"{where}: its images are not those of the data")
                if line["answer"] != prompt.answer or not (same or config.environment):
                    self._differ("prompts", name, f"{where}: prompt or answer are not those of the data")
                if line["policy_version"] not in versions:
                    text = f"policy version {line['policy_version']} sampled it instead of {step - 1}"
                    self._differ("prompts", name, f"{where}: {text}")
                if not same:
                    self._leave_open("masks", "an environment adds to the prompts")
            said = [(completion_of(line), line["policy_version"]) for line in part]
            rollouts = tuple(Rollout(prompt=prompt, completion=each, policy_version=v) for each, v in said)
            groups.append(Group(prompt=prompt, rollouts=rollouts))
        return groups

    def _prompts(self, step: int, ids: Sequence[str], name: str) -> list[Prompt]:
        """The data's prompts of this step; those of these ids where the run chose by what had been solved."""
        config, prompts = self.plan.config, self.plan.train_prompts.prompts
        if config.dynamic_sampling.max_rounds or (config.curriculum is not None and config.curriculum.is_on):
            wanted = {prompt.id: prompt for prompt in prompts if prompt.id in ids}
            if unknown := [each for each in ids if each not in wanted]:
                raise ValueError(f"prompts {unknown} are not in the data")
            return [wanted[each] for each in ids]
        places = prompts_for_step(len(prompts), config.prompts_per_step, config.seed, step - 1)
        expected = [prompts[i] for i in places]
        if [prompt.id for prompt in expected] != list(ids):
            self._differ("prompts", name, f"step {step}: its prompts are not those that data and seed give")
        return expected

    def _check_texts(self, step: int, groups: Sequence[Group], name: str) -> None:
        sampling, ends = self.plan.config.generation.sampling, () if self.plan.ends is None else self.plan.ends.ids
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            said = rollout.completion
            if said.mask is not None or said.turns:
                self._leave_open("texts", "conversations have texts that no token decodes to")
                continue
            ended = said.finish_reason is FinishReason.stop
            if shown_texts(self.tokenizer, [said.token_ids], [ended], sampling, ends) != [said.text]:
                where = f"step {step}, prompt {rollout.prompt.id}: a completion's text is not that of its tokens"
                if self.plan.engine == "transformers":
                    self._differ("texts", name, where)
                else:
                    self._leave_open("texts", f"{self.plan.engine} decodes by itself, and {where}")

    # -- rewards -------------------------------------------------------------------------------------------------------
    def _check_rewards(self, step: int, lines: Lines, groups: Sequence[Group], name: str) -> None:
        try:
            computed = self._scores(groups)
            for reward, scores in computed.items():
                recorded = [line["rewards"].get(reward) for line in lines]
                apart = [i for i in range(len(lines)) if _apart(scores[i], recorded[i])]
                if failed := [i for i in apart if self._fixed_score(reward) in (scores[i], recorded[i])]:
                    apart = [i for i in apart if i not in failed]
                    self._leave_open("rewards", f"{reward} may have failed, in step {step} {_place(lines[failed[0]])}")
                if apart and any(self._scores(groups)[reward] != scores for _ in range(REPEATS)):
                    self.unrepeatable.add(reward)
                    self._leave_open("rewards", f"{reward} scores the same completions differently each time")
                elif apart:
                    how = f"reward {reward} is {recorded[apart[0]]}, recomputed {scores[apart[0]]:g}"
                    self._differ("rewards", name, f"step {step}, {_place(lines[apart[0]])}: {how}")
        except RewardError as error:
            self._leave_open("rewards", f"step {step}: {error}")
        for line, rollout in zip(lines, (r for group in groups for r in group.rollouts), strict=True):
            turns = [turn.reward for turn in rollout.completion.turns if turn.reward is not None]
            weighted = {reward: score * self._weight(reward) for reward, score in line["rewards"].items()}
            if TURNS in line["rewards"] and _apart(sum(turns), line["rewards"][TURNS]):
                self._differ("rewards", name, f"step {step}, {_place(line)}: per-turn rewards do not add up")
            if _apart(sum(weighted.values()), line["reward"]):
                how = f"total reward is {line['reward']}, its parts give {sum(weighted.values()):g}"
                self._differ("rewards", name, f"step {step}, {_place(line)}: {how}")

    def _fixed_score(self, reward: str) -> float | None:
        """The score of completions on which the reward fails, for instance by its time limit; None: that ends a run."""
        own = self.rewards[reward].on_error
        score = self.plan.config.scoring.on_error if own is None else own
        return None if score == "stop" else float(score)

    def _weight(self, reward: str) -> float:
        return 1.0 if reward == TURNS else self.rewards[reward].weight

    def _scores(self, groups: Sequence[Group]) -> dict[str, list[Any]]:
        if not self.scored:
            return {}
        by_reward = self.scorer(groups).by_reward
        return {name: [number(s) for s in by_reward[name].flatten().tolist()] for name in self.scored}

    # -- masks and advantages ------------------------------------------------------------------------------------------
    def _check_batch(self, step: int, lines: Lines, groups: Sequence[Group], name: str) -> None:
        algorithm, expected = self.plan.algorithm, self.run.lines[step]["sha256"]
        if "masks" in self.open:
            self._leave_open("advantages", "without masks")
            return
        if any(spec.scores_steps for spec in self.rewards.values()):
            self._leave_open("advantages", "scores of steps are not in the files of completions")
            return
        batch = self._batch(lines, groups)
        if batch_parts(batch)["masks"] != expected.get("masks"):
            self._differ("masks", name, f"step {step}: tokens or masks are not those that were trained on")
        if algorithm.needs_values or algorithm.needs_teacher or algorithm.needs_old_in_credit:
            self._leave_open("advantages", "they depend on values, a teacher or a KL, which need weights")
            return
        credited = algorithm.credit(batch)
        assert credited.advantages is not None, "credit gives them"
        mask, of_tokens = batch.loss_mask, credited.advantages
        means = (of_tokens.where(mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)).tolist()
        for line, mean in zip(lines, means, strict=True):
            if _apart(mean, line["advantage"]):
                how = f"advantage is {line['advantage']}, recomputed {mean:g}"
                self._differ("advantages", name, f"step {step}, {_place(line)}: {how}")
                return
        if batch_parts(credited).get("advantages") != expected.get("advantages"):
            if self.run.lines[step]["machine"] == self.here:
                self._differ("advantages", name, f"step {step}: those of tokens are not those that were trained with")
            else:
                self._leave_open("advantages", f"within {BOUND:g}, on another machine or with other libraries")

    def _batch(self, lines: Lines, groups: Sequence[Group]) -> Batch:
        """The step as it was trained on, with the rewards that the file records."""
        size = len(groups[0].rollouts)
        names = [name for name in lines[0]["rewards"] if name != TURNS]
        rows = {name: [line["rewards"][name] for line in lines] for name in names}
        by_reward: Any = {n: [v[i : i + size] for i in range(0, len(v), size)] for n, v in rows.items()}
        scores = with_turns(mixed(by_reward, {name: self._weight(name) for name in names}, ()), groups)
        return collate(groups, scores, lambda ids: decode(self.tokenizer, ids))


def _place(line: Mapping[str, Any]) -> str:
    return f"prompt {line['prompt_id']}, completion {line['index']}"


def _apart(a: float | None, b: float | None) -> bool:
    """Whether two numbers differ by more than BOUND; None is one that is not finite."""
    return a != b and (a is None or b is None or not abs(a - b) <= BOUND * max(1.0, abs(a)))


# -- replayed steps ----------------------------------------------------------------------------------------------------
class OneStep(Logger):
    """Keeps the first step's metrics, and ends the run after it by the signal of Ctrl-C, as a user would."""

    def __init__(self) -> None:
        self.metrics: Mapping[str, float] = {}

    def step(self, record: StepRecord) -> None:
        self.metrics = record.metrics
        signal.raise_signal(signal.SIGINT)


def replayable(run: Audited) -> list[int]:
    """Steps that begin with a checkpoint that is whole, or with the run."""
    folders = checkpoint.finished(run_folder.checkpoints(run.folder))
    whole = {checkpoint.step_of(folder) for folder in folders if checkpoint.find_damage(folder) is None}
    first = set() if run.forked_from else {0}
    return sorted(step for step in run.lines if step - 1 in (whole | first))


def check_replay(run: Audited, plan: Any, steps: int, unrepeatable: set[str]) -> None:
    candidates = replayable(run)
    chosen = sorted(random.SystemRandom().sample(candidates, min(steps, len(candidates))))
    if not chosen:
        run.findings.leave_open("replay", "no step was chosen, or none begins with a checkpoint that is kept")
    for step in chosen:
        try:
            again, metrics = replayed(run, plan, step)
        except (UserError, RuntimeError, OSError) as error:
            run.findings.leave_open("replay", f"step {step} cannot be replayed here: {escaped(error)}")
            continue
        compare(run, plan, step, again, metrics, unrepeatable)


def replayed(run: Audited, plan: Any, step: int) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """(the step's line of the chain, its metrics), of a resume in a temporary folder from the checkpoint before it."""
    stop = OneStep()
    config = replace(plan.config, console=None, checkpoint=replace(plan.config.checkpoint, on_signal="step"))
    # What was recorded of the inputs, which are the same: older rlft recorded less.
    parts = run.lines[step]["sha256"]
    recorded = {n: parts[what] for n in plan.fingerprints if (what := n.removesuffix("_fingerprint")) in parts}
    plan = replace(fit_to_device(plan), config=config, loggers=(stop,), fingerprints=recorded)
    with owned_folder() as folder, Engines() as engines:
        shutil.copyfile(run.folder / CONFIG, folder / CONFIG)
        if step > 1:
            source = run_folder.checkpoints(run.folder) / f"step_{step - 1:06d}"
            shutil.copytree(source, run_folder.checkpoints(folder) / source.name)
        commands.named(plan.config.command).run(plan, folder, engines, lambda text: None)
        return read_lines(folder / CHAIN, silent)[-1], stop.metrics


def compare(
    run: Audited, plan: Any, step: int, again: Mapping[str, Any], metrics: Mapping[str, float], unrepeatable: set[str]
) -> None:
    """Confirms, or says what differs: bit for bit where the machine allows that, else within REPLAY_BOUND."""
    findings, line = run.findings, run.lines[step]
    parts, new = line["sha256"], again["sha256"]
    differing = [part for part in sorted({*parts, *new} - {"config"}) if parts.get(part) != new.get(part)]
    if not differing:
        findings.confirm("replay", f"step {step}, bit for bit: {', '.join(sorted(new.keys() - {'config'}))}")
        return
    if not made_with_config_now(run, step):
        text = f"was made with another config.yaml than the run has now, with which {', '.join(differing)} differs"
        findings.leave_open("replay", f"step {step} {text}")
        return
    then, now = line["machine"], again["machine"]
    changed = [what for what in sorted({*then, *now}) if then.get(what) != now.get(what)]
    plays = getattr(plan, "environment", None) is not None
    if not changed and plan.engine in (None, *REPEATABLE) and not unrepeatable and not plays:
        text = f"{', '.join(differing)} differ from what the checkpoint before it gives"
        findings.differ("replay", f"step {step}: {text}")
        return
    why = f"other {', '.join(changed)}" if changed else "its engine, environment or rewards do not repeat their bits"
    recorded = next((line for line in read_lines(run.folder / METRICS, silent) if line["step"] == step), {})
    gap = None if parts.get("masks") != new.get("masks") else largest_gap(recorded, metrics)
    if gap is not None and gap <= REPLAY_BOUND:
        findings.confirm(
            "replay", f"step {step}, metrics within {REPLAY_BOUND:g}, tokens the same; not bit for bit: {why}"
        )
        return
    beyond = "samples other tokens" if gap is None else f"has metrics that differ by up to {gap:.2g}"
    findings.leave_open("replay", f"step {step} {beyond} here, which says nothing: {why}")


def largest_gap(recorded: Mapping[str, Any], metrics: Mapping[str, float]) -> float | None:
    """The largest difference of two steps' metrics, relative to numbers above 1; None if there are none."""
    names = [name for name in recorded if name in metrics and not name.startswith(MEASURED)]
    pairs = [(recorded[name], number(metrics[name])) for name in names]
    return max((abs(a - b) / max(1.0, abs(a)) for a, b in pairs if a is not None and b is not None), default=None)
