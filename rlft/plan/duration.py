"""How long a planned run takes, by stage and with an interval, by a model of the machine: nothing was measured yet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlft.generation.memory import ModelSizes
from rlft.model.activations import layer_sizes
from rlft.plan.cards import CARDS, NAMES, Machine
from rlft.plan.demand import Demand
from rlft.plan.memory_parts import FLOAT32, averages_bytes
from rlft.plan.roofline import Network, StepWork, Work, publishing, sampling, seconds_of, update
from rlft.runs.forecast import Forecast
from rlft.system.device import resolve_device, resolve_dtype
from rlft.system.machine import host_rates, machine
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.plan.run_plan import Plan, Schedule

FACTOR, UNMEASURED = 2.0, 3.0
"""What was measured lies within FACTOR of the model, or within UNMEASURED where nothing has been compared with it:
docs/benchmarks/performance.md has the comparisons, tests/plan/test_duration.py holds them."""

SHORT = 0.25  # the share of generation.max_tokens that completions have at the lower end of an interval
LAUNCH_ON_A_CPU = 20e-6  # seconds of Python and torch around an operation, by recorded steps of the smallest model
OF_A_FORWARD = 0.5  # the most that a pass without gradient takes of a pass with one
DISK, FILES_S = 100e6, 0.1  # bytes per second to write a checkpoint, seconds for its files: assumptions of a slow disk
SAME_SHAPE = 0.05  # share by which the number of a model's weights may differ from that of attention and gated MLPs

EVALUATE, CHECKPOINT = "evaluate", "checkpoint"
BETWEEN_STEPS = (EVALUATE, CHECKPOINT)

CHECKED = {2: 512}  # {bytes of a weight: tokens of a freshness check}; others have the 128 of two short sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """Seconds that a run is estimated to take."""

    machine: str  # the device, and how fast it is taken to be
    stages: Mapping[str, Forecast]  # of a step, and of what is between two (BETWEEN_STEPS)
    step: Forecast  # of all stages of a step
    run: Forecast  # of all steps, evaluations and checkpoints, without the start
    completion_tokens: tuple[int, int] | None  # at the lower ends, and at all others; None where nothing is sampled

    @property
    def of_a_step(self) -> dict[str, Forecast]:
        return {name: stage for name, stage in self.stages.items() if name not in BETWEEN_STEPS}

    @property
    def between_steps(self) -> dict[str, Forecast]:
        return {name: self.stages[name] for name in BETWEEN_STEPS}


def duration_of(
    plan: Plan, model: ModelSizes, demand: Demand, schedule: Schedule, *, absent: bool, card: str | None = None
) -> Duration | str:
    """The estimate for this plan, or why there is none; refuses a card for a run that would not be on a GPU.

    absent: whether the device is not in this machine.
    card: the GPU that is meant, by its name in CARDS.
    """
    if card is not None and demand.device == "cpu":
        remedy = "leave out model.device=cpu, or card"
        raise UserError("card", "the run is planned for a CPU", got=card, remedy=remedy)
    work, network = plan.step_work(), network_of(model, whole=demand.networks.whole_model)
    if work is None:
        return "the command does not say what its steps compute"
    if why := why_unknown(plan, model, demand, work):
        return why
    if network is None:
        return "no figures for the layers of this model"
    if absent and card is None:
        return "unknown card: the GPU is not here; name it as card=4090"
    known = machine_of(plan.config.model) if card is None else of_card(card, card, network.itemsize)
    if isinstance(known, str):
        return known
    device, words = known
    return estimate(work, network, device, demand, schedule, words)


def why_unknown(plan: Plan, model: ModelSizes, demand: Demand, work: StepWork) -> str | None:
    """Why nothing is known of the speed of such a run on any machine; None if something is."""
    config, engine = plan.config, demand.engine
    cluster = getattr(config, "cluster", None)
    if getattr(config, "environment", None):
        return "it depends on how many turns a conversation has"
    if not model.packed or model.plain:
        return "no figures for padded rows"
    if model.quantized:
        return "no figures for quantised weights"
    if demand.teacher is not None:
        return "no figures for a teacher that is a separate model"
    if getattr(plan, "pretrain_text", None) is not None:
        return "no figures for runs with pretraining text"
    if cluster is not None and (cluster.engines or cluster.ranks > 1):
        return "no figures for several processes"
    of_gpus = engine is not None and engine.in_graphs and not engine.on_trainers_base
    if work.samples and (engine is None or engine.in_graphs is None or (of_gpus and demand.device == "cpu")):
        title = "this engine" if engine is None else engine.title
        return f"no figures for {title} on {demand.device.replace('cuda', 'a GPU').replace('cpu', 'a CPU')}"
    return None


def network_of(model: ModelSizes, *, whole: bool) -> Network | None:
    """The shapes of a model of attention and gated MLPs; None for another one, such as a mixture of experts."""
    sizes = {"hidden": model.hidden, "vocabulary": model.vocabulary, "layers": tuple(layer_sizes(model.config))}
    network = Network(**sizes, rank=0, itemsize=model.itemsize)
    if abs(model.linear / network.linear - 1) > SAME_SHAPE:
        return None
    return network if whole else replace(network, rank=model.lora / network.widths)


def machine_of(settings: Any) -> tuple[Machine, str] | str:
    """(how fast the device of this `model` section is, in words too), or why that is not known. A CPU is probed."""
    device = resolve_device(settings.device)
    dtype, name = resolve_dtype(settings.dtype, device), machine(device)["device"]
    if device.type == "cpu":
        rate, bandwidth = host_rates(dtype)
        words = f"this CPU, as fast as it is now: {rate / 1e9:.3g} GFLOP/s, {bandwidth / 1e9:.2g} GB/s"
        return cpu(rate, bandwidth), words
    return of_card(NAMES.get(name.strip()), name, dtype.itemsize)


def of_card(card: str | None, name: str, itemsize: int) -> tuple[Machine, str] | str:
    """The rates of a card of CARDS for weights of so many bytes, and in words, or why they are not known."""
    if card is None:
        return f"unknown card: {name}"
    if itemsize != 2:
        return f"no figures for weights of {8 * itemsize} bits on a GPU"
    return CARDS[card], f"{name}, by its published rates"


def cpu(rate: float, bandwidth: float) -> Machine:
    """A CPU that multiplies and copies so fast (FLOP/s, bytes per second)."""
    return Machine(rate=rate, bandwidth=bandwidth, launch=LAUNCH_ON_A_CPU, is_host=True, is_compared=True)


# -- seconds -----------------------------------------------------------------------------------------------------------
def estimate(
    work: StepWork, network: Network, device: Machine, demand: Demand, schedule: Schedule, words: str
) -> Duration:
    """The seconds of the run by stage. The lower ends are those of short completions."""
    longest, shortest = (seconds_by_stage(some, network, device, demand) for some in (work, work.shorter(SHORT)))
    stages = {
        name: Forecast(seconds, shortest[name] / factor, seconds * factor)
        for name, seconds in longest.items()
        for factor in [factor_of(name, device)]
    }
    step = _sum((1, stage) for name, stage in stages.items() if name not in BETWEEN_STEPS)
    numbers = {EVALUATE: schedule.evaluations, CHECKPOINT: schedule.checkpoints}
    run = _sum([(schedule.steps, step), *((numbers[name], stages[name]) for name in numbers if name in stages)])
    tokens = (work.trained if work.is_sampled else work.sampled or work.trained).completion
    lengths = (max(1, round(SHORT * tokens)), round(tokens)) if work.samples else None
    return Duration(machine=words, stages=stages, step=step, run=run, completion_tokens=lengths)


def seconds_by_stage(work: StepWork, network: Network, device: Machine, demand: Demand) -> dict[str, float]:
    """{stage: seconds} of a step, of an evaluation and of a checkpoint."""

    def sampled(rows: Work) -> float:
        """As many rows at once as the engine computes together, in whole groups."""
        assert demand.engine is not None, "something samples"
        in_graphs = bool(demand.engine.in_graphs)
        by_vllm = in_graphs and not demand.engine.on_trainers_base
        in_graphs &= by_vllm or (demand.device == "cuda" and not demand.work.draft_rows)  # as in `Transformers.memory`
        times = math.ceil(rows.prompts / max(1, demand.engine.at_once // rows.group))
        part = replace(rows, prompts=rows.prompts / times)
        return times * seconds_of(sampling(network, part, in_graphs=in_graphs, by_vllm=by_vllm), device)

    passes = seconds_of(update(network, work.trained), device)
    checked = CHECKED.get(network.itemsize, 128)
    publish = seconds_of(publishing(network, checked, by_the_host=device.is_host), device)
    evaluation = OF_A_FORWARD * seconds_of(update(network, work.read), device) if work.read else 0.0
    if work.sampled:
        evaluation += sampled(work.sampled) + (0.0 if work.is_sampled else publish)
    stages = {
        "sample": sampled(work.trained) if work.is_sampled else 0.0,
        "score": OF_A_FORWARD * work.scorers * passes,
        "credit": OF_A_FORWARD * work.forwards * passes,
        "update": work.epochs
        * ((1 + work.critics) * (1 + OF_A_FORWARD * bool(demand.recompute)) + OF_A_FORWARD * work.anchors)
        * passes,
        "publish": publish if work.is_sampled and work.epochs else 0.0,
    }
    of_a_step = {name: value for name, value in stages.items() if value}
    if not work.epochs:
        return of_a_step
    saved = (FLOAT32 * demand.networks.trainable + averages_bytes(demand)) / DISK + FILES_S
    return {**of_a_step, EVALUATE: evaluation, CHECKPOINT: saved}


def factor_of(stage: str, device: Machine) -> float:
    """The factor by which the estimate of a stage may be wrong; no engine's has been compared on a GPU."""
    if device.is_host:
        return UNMEASURED if stage == CHECKPOINT else FACTOR
    return FACTOR if device.is_compared and stage in ("score", "credit", "update") else UNMEASURED


def _sum(parts: Iterable[tuple[int, Forecast]]) -> Forecast:
    """The sum of so many of each; its ends are the sums of the ends, as errors of a machine go the same way."""
    added = [(number * f.seconds, number * f.low, number * f.high) for number, f in parts]
    return Forecast(*map(sum, zip(*added, strict=True)))
