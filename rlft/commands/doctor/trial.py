"""The small run that `rlft doctor` checks, with the user's model, adapter, engine and optimizer; and rows about it.

Its prompts are letters and its rewards alternate, so that it needs no data and every group has a gradient. All else
is an ordinary run of `rlft train` in the folder of the checks, which judge what it records: its engine follows the
trainer, its steps are fast, its memory is what was planned. Each verdict is a function of measured numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlft.commands.doctor.command import NotReadyError, Settings, judged
from rlft.commands.doctor.work import SIZES, Workload, make_model, write_prompts
from rlft.config.keys import with_values
from rlft.config.resolved import resolve
from rlft.config.schema import AUTO, RunConfig
from rlft.generation.memory import in_words, peak
from rlft.generation.sending import memory_folder
from rlft.logger.loggers import own_loggers
from rlft.loop.freshness import Freshness, Gap, Limits, StaleAdapterError, flatten
from rlft.loop.parts import Engines
from rlft.loop.session import Session, open_session
from rlft.model.activations import is_checkpointed
from rlft.model.backbone import read_config
from rlft.model.roles import POLICY, Roles
from rlft.plan.duration import network_of
from rlft.plan.fit import fit_to_device
from rlft.plan.memory_parts import OF_THE_MARGIN, OF_THE_PROCESS, parts
from rlft.plan.roofline import operations_of, update as model_of_update
from rlft.plan.sizes import on_a_gpu, sizes_of
from rlft.plan.train_plan import TrainPlan
from rlft.runs import run_folder
from rlft.runs.lines import METRICS, read_lines
from rlft.system.device import has_own_memory, resolve_device, resolve_dtype, total_bytes
from rlft.system.machine import peak_rate
from rlft.system.memory import resident_bytes
from rlft.system.terminal import CheckRow, Status
from rlft.train import train
from rlft.types import Group

SCALES = {
    "cpu": ("17m", Workload(prompts=2, group=4, prompt_tokens=64, completion_tokens=64)),
    "cuda": ("0.5b", Workload(prompts=16, group=8, prompt_tokens=256, completion_tokens=256)),
}
"""{kind of device: the sizes of the trial's model and of its steps}."""


class MachineTrial:
    """The trial of one process, with a folder for its files and the names of the checks that have failed so far.

    `run` is the folder of its run, `process` are the bytes of the process before the model was loaded.
    """

    def __init__(self, settings: Settings, folder: Path, failed: Sequence[str]) -> None:
        import transformers

        # What a run needs is imported here, so that its memory is not counted in later measurements.
        _ = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
        self.settings, self.folder, self.failed = settings, folder, failed
        self.run = folder / "run"
        self.process = 0
        self._open = ExitStack()
        self._session: Session | None = None

    # -- the config ------------------------------------------------------------------------------------------------
    @cached_property
    def device(self) -> torch.device:
        return resolve_device(self.settings.plain["model"]["device"])

    @cached_property
    def dtype(self) -> torch.dtype:
        return resolve_dtype(self.settings.plain["model"]["dtype"], self.device)

    @property
    def kind(self) -> str:
        return "cuda" if self.device.type == "cuda" else "cpu"

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The config, with this device's sizes in place of those that the user has not typed, a model and prompts."""
        (size, work), typed = SCALES[self.kind], self.settings.typed
        sizes = {"prompts_per_step": work.prompts, "group_size": work.group}
        sizes |= {"prompts.max_tokens": work.prompt_tokens, "generation.max_tokens": work.completion_tokens}
        plain = with_values(self.settings.plain, {key: value for key, value in sizes.items() if key not in typed})
        if self.settings.makes_model:
            dtype = str(self.dtype).removeprefix("torch.")
            model_folder = make_model(self.folder / f"{size}-{dtype}", SIZES[size], dtype)
            plain = with_values(plain, {"model.path": str(model_folder), "model.revision": None})
            # The adapter and the stop tokens in the config belong to another model.
            plain = with_values(plain, {"lora.path": None, "generation.stop": []})
        prompts = write_prompts(self.folder / "prompts.jsonl", work_of(plain), plain["steps"])
        return with_values(plain, {"data.path": str(prompts)})

    @property
    def work(self) -> Workload:
        return work_of(self.plain)

    @cached_property
    def plan(self) -> TrainPlan:
        if "model" in self.failed:
            raise NotReadyError("there is no model to look at")
        return fit_to_device(resolve(self.plain).plan())

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @cached_property
    def config_of_model(self) -> Any:
        return read_config(self.config.model)

    # -- the run ----------------------------------------------------------------------------------------------------
    def start(self) -> Session:
        """Loads the model and starts the engine, and records the memory of the process before that."""
        plan = replace(self.plan, loggers=own_loggers(self.config))  # whose lines the rows judge
        run_folder.check_writable(self.run)
        run_folder.claim(self.run, plan.plain, plan.fingerprints, plan.num_steps)
        self.process = resident_bytes()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        engines = self._open.enter_context(Engines())
        self._session = self._open.enter_context(open_session(plan, self.run, engines, print))
        return self._session

    @property
    def session(self) -> Session:
        """The open session; a NotReadyError if it could not be opened."""
        if self._session is None:
            raise NotReadyError("the engine has not started")
        return self._session

    @property
    def roles(self) -> Roles:
        assert isinstance(self.session.roles, Roles), "the command refuses lora=null"
        return self.session.roles

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What the run has recorded of each step so far."""
        return read_lines(self.run / METRICS)

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The lines of the steps that are measured; a NotReadyError if the run has not done all of them."""
        if len(lines := self.lines) < self.config.steps:
            raise NotReadyError("the run has not done its steps")
        return lines[1:]  # the first step warms up


def alternating(group: Group) -> list[float]:
    """The reward of the run: 1 for every second completion, so that every group has a gradient."""
    return [float(i % 2) for i in range(len(group.rollouts))]


def work_of(plain: Mapping[str, Any]) -> Workload:
    return Workload(
        prompts=plain["prompts_per_step"],
        group=plain["group_size"],
        prompt_tokens=plain["prompts"]["max_tokens"],
        completion_tokens=plain["generation"]["max_tokens"],
        rank=plain["lora"]["rank"],
    )


GAP = "sampler/logprob_gap"
"""The beginning of the names of two metrics: the mean and the largest gap of a step's sampled tokens."""
SWAPPED = 10**6  # a version beyond those of the run's steps
FIRST_SPREAD = 0.01  # standard deviation of the first noise on an adapter's B, doubled until log-probs move enough
MAX_DOUBLINGS = 12
MIN_MOVE = 0.1  # nats by which the changed adapter must move a log-prob, besides twice the freshness check's threshold
MAX_SAMPLING_RATIO = 20.0  # sampling may take this many times as long as the update
MIN_SHARE = {"cpu": 0.05, "cuda": 0.2}
"""{kind of device: lowest share of the product rate that an update should reach}; 0.5B on an H100 reaches 0.2."""
PRODUCT = {"cpu": (1024, 0.3), "cuda": (8192, 2.0)}
"""{kind of device: side of the product whose rate is measured, and the seconds for it}."""
MAX_PUBLISH_SHARE, MIN_PUBLISH_S = 0.1, 1.0
"""The share of a step that a publish may take; one of at most MIN_PUBLISH_S seconds is always fine."""
MAX_PLAN_ERROR = 0.15  # largest allowed relative difference between the planned and the measured peak


def model_rows(trial: MachineTrial) -> list[CheckRow]:
    """Makes or reads the model's config, and plans the trial."""
    plan, work = trial.plan, trial.work
    makes_model = trial.settings.makes_model
    model = "made here with random weights" if makes_model else trial.settings.plain["model"]["path"]
    dtype = str(trial.dtype).removeprefix("torch.")
    shape = f"{work.prompts} prompts x {work.group}, {work.prompt_tokens}+{work.completion_tokens} tokens"
    value = f"{model}, {dtype} on {trial.device}; {shape}; engine {plan.engine} ({plan.engine_reason})"
    numbers = {"prompts": work.prompts, "group": work.group, "prompt_tokens": work.prompt_tokens}
    numbers["completion_tokens"] = work.completion_tokens
    return [CheckRow("model", Status.ok, value, numbers=numbers)]


def engine_rows(trial: MachineTrial) -> list[CheckRow]:
    """Loads the model, starts the engine, and has it take the first adapter."""
    start = time.monotonic()
    trial.start().publish(0)
    seconds = time.monotonic() - start
    value = f"{trial.plan.engine} started and took an adapter in {seconds:.1f} s"
    return [CheckRow("engine", Status.ok, value, numbers={"seconds": seconds})]


def gap_rows(trial: MachineTrial) -> list[CheckRow]:
    """The log-prob gap of fixed tokens in the newest freshness check, and the widest of a step's sampled ones."""
    freshness, alarms = trial.session.freshness, trial.config.alarms
    if freshness.gap is None:
        raise NotReadyError("the engine's log-probs have not been compared")
    gaps = [Gap(mean=line[f"{GAP}_mean"], largest=line[f"{GAP}_max"]) for line in trial.lines]
    sampled = max(gaps, key=lambda gap: gap.mean, default=None)
    return [gap_row(freshness.gap, sampled, freshness.model_limits, None if alarms is None else alarms.logprob_gap)]


def gap_row(fixed: Gap, sampled: Gap | None, limits: Limits, alarm: float | None) -> CheckRow:
    """Whether a run with these gaps, in nats, is stopped by its freshness check, or raises an alarm.

    `limits` are what that check allows the fixed tokens, `alarm` is the mean gap of sampled ones that raises an alarm;
    `sampled` is None where the run was stopped before its first step.
    """
    value = f"fixed tokens: mean {fixed.mean:.1e}, largest {fixed.largest:.1e} (a run stops above {limits})"
    numbers = {"fixed_mean_nats": fixed.mean, "fixed_max_nats": fixed.largest, "threshold_nats": limits.threshold}
    would_alarm = False
    if sampled is not None:
        value += f"; sampled ones: mean {sampled.mean:.1e}, largest {sampled.largest:.1e} nats"
        numbers |= {"sampled_mean_nats": sampled.mean, "sampled_max_nats": sampled.largest}
        would_alarm = not sampled.mean <= (limits.threshold if alarm is None else min(alarm, limits.threshold))
    remedy = "compare with generation=transformers and with model.dtype=float32: one of them names the part that is off"
    return judged("log-prob gap", value, remedy, numbers, wrong=would_alarm or not limits.allow(fixed))


def swap_rows(trial: MachineTrial) -> list[CheckRow]:
    trial.session.freshness.samples_tell = False  # each publish is judged by log-probs
    return [swap_row(trial.session.publish, trial.session.freshness, trial.roles)]


def swap_row(publish: Callable[[int], None], freshness: Freshness, roles: Roles) -> CheckRow:
    """Publishes a changed adapter, then the original one again; leaves the policy as it was.

    The changed adapter moves log-probs by at least two thresholds, so that the freshness check after each publish does
    not take an engine with the other adapter for one that follows.
    """
    weights, version, problems = roles.weights(POLICY), SWAPPED * freshness.every, list[str]()

    def gap_after(version: int) -> float:
        try:
            publish(version)
        except StaleAdapterError as error:
            problems.append(str(error))
        return math.inf if freshness.gap is None else freshness.gap.largest

    try:
        move = _move(roles, weights, freshness)
        gap = gap_after(version)
    finally:
        roles.restore_role(POLICY, weights)
    gap_back = gap_after(2 * version)
    value = (
        f"moved by up to {move:.1e} nats the engine follows to {gap:.1e}, and back to {gap_back:.1e}"
        f" (allowed {freshness.model_limits})"
    )
    numbers = {"move_nats": move, "gap_nats": gap, "gap_back_nats": gap_back}
    numbers["threshold_nats"] = freshness.model_limits.threshold
    remedy = "the engine samples from a stale adapter: use generation=transformers, or another version of the engine"
    return judged("adapter swap", "; ".join([value, *problems]), remedy, numbers, wrong=bool(problems))


def _move(roles: Roles, weights: Mapping[str, Tensor], freshness: Freshness) -> float:
    """Loads the adapter with a changed B; the largest move of a fixed token's log-prob by that, in nats.

    RuntimeError: log-probs do not move by twice the limits of the freshness check, or none by MIN_MOVE.
    """
    sequences, limits, spread = freshness.sequences, freshness.model_limits, FIRST_SPREAD
    logprobs = flatten(roles.score(sequences))
    for _ in range(MAX_DOUBLINGS):
        roles.restore_role(POLICY, with_noise(weights, spread))
        move = Gap.between(logprobs, flatten(roles.score(sequences)))
        if move.largest >= max(MIN_MOVE, 2 * limits.threshold) and limits.judged(move) >= 2 * limits.threshold:
            return move.largest
        spread *= 2
    raise RuntimeError(
        f"the adapter has no effect in the trainer: no log-prob moves by {max(MIN_MOVE, 2 * limits.threshold):g} nats"
    )


def with_noise(weights: Mapping[str, Tensor], spread: float) -> dict[str, Tensor]:
    """The adapter with normal noise of standard deviation `spread` added to every B; the noise is always the same."""
    rng, noisy = torch.Generator().manual_seed(1), dict(weights)
    for name, tensor in weights.items():
        if ".lora_B" in name:
            noise: Any = torch.randn(tensor.shape, generator=rng)
            noisy[name] = tensor + spread * noise.to(tensor)
    return noisy


# -- speed and memory --------------------------------------------------------------------------------------------------
def step_rows(trial: MachineTrial) -> list[CheckRow]:
    """Trains, and judges the fastest of each stage's times: other programs can only slow a step down."""
    train(trial.session)
    steps, roles, work = trial.measured, trial.roles, trial.work
    sample, update, publish = (
        min(sum(line[f"time/{stage}"] for stage in stages) for line in steps)
        for stages in (("sample",), ("credit", "update"), ("publish",))
    )
    network = network_of(sizes_of(trial.config.model, trial.config.lora), whole=False)
    longest = replace(work, prompt_tokens=max(trial.plan.train_prompts.num_tokens)).rows
    flops = None if network is None else operations_of(model_of_update(network, longest))
    sampled, prompts = steps[-1]["tokens/completion"], steps[-1]["tokens/prompt"]
    tokens = sampled + prompts * (1 if roles.forward.packed else work.group)
    side, seconds = PRODUCT[trial.kind]
    rate = peak_rate(trial.device, trial.dtype, side=side, seconds=seconds)
    return [
        sampling_row(sampled, sample, update, str(trial.plan.engine)),
        update_row(tokens, update, flops, rate, MIN_SHARE[trial.kind]),
        publish_row(publish, sample + update + publish),
    ]


def sampling_row(tokens: int, seconds: float, update_s: float, engine: str) -> CheckRow:
    """The speed of sampling so many tokens, compared with the update on them (`update_s` seconds)."""
    ratio = seconds / update_s
    value = f"{tokens / seconds:,.0f} tokens/s by {engine}; {ratio:.1f} times as long as the update on them"
    numbers = {"tokens_per_s": tokens / seconds, "seconds": seconds, "times_the_update": ratio}
    remedy = "on a GPU use generation=vllm without enforce_eager; on a CPU look at what else runs"
    return judged("sampling", value, remedy, numbers, slow=ratio > MAX_SAMPLING_RATIO)


def update_row(tokens: int, seconds: float, flops: float | None, rate: float, least_share: float) -> CheckRow:
    """Tokens/s, and the share of the machine's arithmetic that credit and update reach.

    `flops` is the number of floating-point operations that they need, None for a model whose layers have no figures.
    `rate` is the FLOP/s of a large product in the same dtype, `least_share` the share below which the update is slow.
    """
    value, numbers = f"{tokens / seconds:,.0f} tokens/s", {"tokens_per_s": tokens / seconds, "seconds": seconds}
    if flops is None:
        return CheckRow("update", Status.ok, f"{value}; no figures for the layers of this model", numbers=numbers)
    share = flops / seconds / rate
    value += f", {share:.0%} of {rate / 1e9:,.0f} GFLOP/s, the rate of a large product"
    numbers |= {"share": share, "product_flops_per_s": rate}
    remedy = "look at what else runs here, at model.kernels (row kernels), and raise token_budget"
    return judged("update", value, remedy, numbers, slow=share < least_share)


def publish_row(seconds: float, step_s: float) -> CheckRow:
    """The seconds of a publish with its freshness check, and their share of the step's."""
    share = seconds / step_s
    value = f"{1000 * seconds:.0f} ms with the freshness check, {share:.0%} of the step"
    remedy = f"make room in memory for adapters (now {memory_folder()}), or lower lora.rank"
    slow = seconds > MIN_PUBLISH_S and share > MAX_PUBLISH_SHARE
    return judged("publish", value, remedy, {"seconds": seconds, "share": share}, slow=slow)


def memory_rows(trial: MachineTrial) -> list[CheckRow]:
    """The trial's peak compared with that of `rlft plan`: on a CPU the process's, on a GPU the allocator's."""
    model = sizes_of(trial.config.model, trial.config.lora)
    asked = trial.config.model.gradient_checkpointing
    recompute = is_checkpointed(trial.session.backbone.model) if asked == AUTO else asked
    demand = trial.plan.demand(model, recompute)
    apart = ()
    if has_own_memory(trial.device):
        demand = on_a_gpu(demand, trial.plan, total_bytes(trial.device), absent=False)
        apart = (OF_THE_PROCESS, OF_THE_MARGIN)
    counted = [part for part in parts(model, demand, trial.process) if part.name not in apart]
    return [memory_row(peak(counted), trial.measured[-1]["memory/peak_bytes"])]


def memory_row(planned: int, measured: int) -> CheckRow:
    """Whether the planned peak of `rlft plan` is close to the measured one, both in bytes."""
    ratio = planned / measured
    value = f"planned {in_words(planned)}, measured {in_words(measured)} ({ratio:.2f} of it)"
    numbers = {"planned_bytes": planned, "measured_bytes": measured, "ratio": ratio}
    remedy = "do not rely on rlft plan here: leave room, lower token_budget, and report these numbers"
    return judged("memory plan", value, remedy, numbers, wrong=abs(ratio - 1) > MAX_PLAN_ERROR)
