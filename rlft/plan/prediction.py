"""What `rlft plan` predicts of a run before weights are loaded: sizes, memory, disk, time, and what its parts give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from typing import Any, cast

import torch

from rlft.config.model import Recompute
from rlft.config.resolved import AUTO, Resolved, with_budget_of_device, with_token_budget
from rlft.config.schema import section_of
from rlft.environment.conversations import Conversations
from rlft.environment.endpoint.agents import Endpoint
from rlft.environment.endpoint.played import AgentGenerator
from rlft.environment.protocol import Environment
from rlft.environment.turn_template import Dialect
from rlft.generation.memory import MemoryPart, ModelSizes, peak
from rlft.generation.scripted import ScriptedGenerator
from rlft.plan.cards import CARDS
from rlft.plan.demand import Demand
from rlft.plan.duration import Duration, duration_of
from rlft.plan.fit import Remedy, context_bytes, needs_checkpointing, remedies, resolve_auto, settled, with_placement
from rlft.plan.memory_parts import engine_memory, layers_kept, memory_shortfall, parts, teacher_memory
from rlft.plan.model_rules import check_engine_on, check_quantized_on, has_bitsandbytes
from rlft.plan.rewards.tester import Brief, Writer, brief_of, doubts
from rlft.plan.run_plan import Advice, Facts, Plan, Schedule, TableRow, advice_for, config_rows
from rlft.plan.sizes import CUDA_CONTEXT, LOWERED_BY, on_a_gpu, sizes_of
from rlft.system.device import free_bytes, has_own_memory, resolve_device, resolve_dtype, total_bytes
from rlft.system.memory import resident_bytes
from rlft.system.terminal import pip_install
from rlft.tokens.text import RunTokenizer, turn_ends
from rlft.types import EnvironmentFailure, Prompt, Sampling, Schema, UserError

TIGHT = 0.97  # of the device's memory: what takes more than that may not fit after all
MAX_BINS = 32
MAX_CHARACTERS = 400  # of a text in the JSON (from data, a reward or a note): the JSON stays below 64 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted of a run."""

    sizes: Sequence[TableRow]
    parameters: Mapping[str, int]  # {role: number of parameters}
    model: ModelSizes
    demand: Demand
    process: int  # bytes that the process takes besides models and batches
    device: str
    limit: int  # bytes of the device's memory
    limit_name: str  # where the limit comes from
    lengths: Mapping[str, Sequence[int]]
    rewards: Brief
    conversation: EnvironmentTrial | None
    notes: Sequence[str]
    disk: Mapping[str, int]  # {part of the run's folder: the most bytes that it may take}
    schedule: Schedule
    duration: Duration | str  # an estimate, or why there is none
    advice: Sequence[Advice]

    def memory(self, *, recompute: Recompute) -> list[MemoryPart]:
        return parts(self.model, replace(self.demand, recompute=recompute), self.process)

    @property
    def peak(self) -> int:
        return peak(self.memory(recompute=self.demand.recompute))

    @property
    def has_engine_apart(self) -> bool:
        """Whether the engine takes memory of its own, which could be on another device."""
        engine = self.demand.engine
        if engine is None or engine.on_trainers_base:
            return False
        return any(part.bytes for part in engine.memory(self.model, self.demand.load).parts)

    @property
    def peak_without_engine(self) -> int:
        """The peak with the engine on a device of its own, if it can have one."""
        alone = replace(self.demand, engine=None) if self.has_engine_apart else self.demand
        return peak(parts(self.model, alone, self.process))

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit and not memory_shortfall(self.model, self.demand)

    @property
    def is_tight(self) -> bool:
        """Whether the run fits, with almost no memory left."""
        return self.fits and self.peak > TIGHT * self.limit

    def remedies(self) -> list[Remedy]:
        return [] if self.fits else remedies(self.model, self.demand, self.process, self.limit)

    @property
    def shortfalls(self) -> dict[str, int]:
        """{who: bytes by which its own share of the device is too small for it to start}."""
        found = {"engine": engine_memory(self.model, self.demand), "teacher": teacher_memory(self.demand)}
        return {who: memory.lacks for who, memory in found.items() if memory.lacks}

    @property
    def doubts(self) -> list[str]:
        return doubts(self.rewards.trials)

    @property
    def disk_rows(self) -> list[tuple[str, int, str | None]]:
        """(part of the run's folder, bytes, how to make it smaller)."""
        return [(name, size, LOWERED_BY.get(name)) for name, size in self.disk.items()]

    @property
    def fails(self) -> bool:
        """Whether the run does not fit, a reward cannot be computed, or its environment does not begin."""
        has_no_score = any(trial.score is None for trial in self.rewards.trials)
        return not self.fits or has_no_score or (self.conversation is not None and self.conversation.error is not None)

    def as_dict(self) -> dict[str, Any]:
        """All of it as values for JSON, sizes in bytes; it stays small, since lengths are summarised and texts cut."""

        def listed(how: Recompute) -> list[dict[str, Any]]:
            of_each = self.memory(recompute=how)
            return [{"part": p.name, "bytes": p.bytes, "when": str(p.when), "key": p.key} for p in of_each]

        recompute, duration = self.demand.recompute, self.duration
        return {
            "sizes": [{"what": what, "value": value, "explanation": text} for what, value, text in self.sizes],
            "parameters": dict(self.parameters),
            "device": self.device,
            "device_memory": self.limit,
            "peak": self.peak,
            "peak_without_engine": self.peak_without_engine,
            "fits": self.fits,
            "gradient_checkpointing": recompute,
            "memory": {"as_planned": listed(recompute), "with_gradient_checkpointing": listed(recompute or True)},
            "ways": [{"changes": dict(remedy.changes), "peak": remedy.peak} for remedy in self.remedies()],
            "lengths": [{"data": name, "tokens": summary(tokens)} for name, tokens in self.lengths.items()],
            "rewards": [_cut_texts(asdict(trial)) for trial in self.rewards.trials],
            "reward_try": [cut(line) for line in self.rewards.lines],
            "environment": _cut_texts(asdict(self.conversation)) if self.conversation else None,
            "disk": [{"part": name, "bytes": size, "lowered_by": key} for name, size, key in self.disk_rows],
            "schedule": asdict(self.schedule),
            "duration": {"no_estimate": duration} if isinstance(duration, str) else asdict(duration),
            "advice": [{**asdict(one), "warning": one.warning} for one in self.advice],
            "doubts": [cut(doubt) for doubt in self.doubts],
            "notes": [cut(note) for note in self.notes],
        }


def notes_of(plan: Plan) -> list[str]:
    """The notes with which a run of this plan begins, planned for this machine."""
    model = sizes_of(plan.config.model, plan.lora_settings)
    demand = plan.demand(model, False)
    return list(plan.notes) if demand is None else plan.notes_with(planned_facts(plan, model, demand))


def predict(resolved: Resolved, limit: int | None, card: str | None = None, *, tries: bool = True) -> Prediction:
    """Predicts the run of this config, which may run on another machine.

    Args:
        limit: bytes of the device's memory; None for those of the card, or the free memory of this machine's device.
        card: the GPU that it is to run on, a name in `rlft.plan.cards.CARDS`; None: the one that is here.
        tries: whether its rewards and its environment are tried.

    Raises UserError: the run would be refused, or a card is named for a run on a CPU.
    """
    settings, limit_name = resolved.config.model, "this machine has free" if limit is None else "device_memory"
    if limit is None and card is not None:
        limit, limit_name = CARDS[card].memory, f"of card={card}"
    on_another = settings.device.startswith("cuda") and not torch.cuda.is_available()
    if on_another and limit is None:
        problem = "this machine has no such GPU, so its memory cannot be read"
        remedy = "name it as card=4090, or its memory as device_memory=24GiB"
        raise UserError("model.device", problem, got=settings.device, remedy=remedy)
    where = settings.device if on_another else str(resolve_device(settings.device))  # as a run would name it
    plan: Plan = (without_gpu(resolved) if on_another else resolved).plan(runs_here=False)
    settings = plan.config.model
    if not on_another:
        check_quantized_on(settings.quantization, resolve_device(settings.device).type)
    model, device = sizes_of(settings, plan.lora_settings), resolve_device(settings.device)
    # This process has imported all libraries that the run needs, and has scanned its data.
    process, free = resident_bytes(), free_bytes(device)
    on_gpus, on_cuda = on_another or has_own_memory(device), on_another or device.type == "cuda"
    device_limit = free + (CUDA_CONTEXT if on_gpus else process) if limit is None else limit
    plan = with_placement(plan, model, device_limit if on_cuda else None, absent=on_another)
    if on_gpus:
        process = context_bytes(plan)
    demand = plan.demand(model, False)
    if demand is None:
        problem = "cannot be planned: it does not say how much memory its runs take"
        raise UserError("plan", problem, got=f"rlft {resolved.command.name}", remedy="plan a command that does")
    memory = total_bytes(device) if on_gpus and limit is None else limit or 0
    if on_gpus:
        demand = on_a_gpu(demand, plan, memory, absent=on_another, where=where)
    if demand.engine is not None:
        planned = (model, demand, memory) if on_gpus else None
        plan = settled(plan, demand.work.section, lambda: planned, where)
        if not demand.work.apart:
            demand = replace(demand, engine=plan.config.generation.named(demand.work.section))
    if on_gpus:
        plan = resolve_auto(plan, model, demand, memory, resolved.plain["token_budget"] == AUTO)
    if demand.engine is not None and plan.engine is not None and demand.work.section != section_of(plan.engine):
        plan = plan.sampled_by(demand.work.section, model.itemsize)
    if demand.engine is not None:
        quantized = settings.quantization is not None
        generation, itemsize = plan.config.generation, model.itemsize
        check_engine_on(generation, demand.work.section, where, itemsize=itemsize, quantized=quantized)
    recompute = plan.config.model.gradient_checkpointing
    if recompute == AUTO:  # on a CPU
        room = free if limit is None else max(0, limit - process - model.base_bytes)
        kept = layers_kept(model, demand)
        recompute = needs_checkpointing(model.config, plan.config.token_budget, model.itemsize, room, **kept)
    demand = replace(demand, token_budget=plan.config.token_budget, recompute=recompute)
    facts = planned_facts(plan, model, demand)
    return Prediction(
        sizes=[*config_rows(plan.config), *plan.planned_rows(), *plan.loaded_rows(facts)],
        parameters=plan.parameters(model),
        model=model,
        demand=demand,
        process=process,
        device="a GPU that is not here" if on_another else str(device),
        limit=device_limit,
        limit_name=limit_name,
        lengths=plan.lengths(),
        rewards=brief_on(plan) if tries else Brief(),
        conversation=conversation_of(plan) if tries else None,
        notes=[*plan.notes_with(facts), *_missing_here(plan), *_notes_of_demand(plan, demand, on_gpus)],
        disk=plan.disk_bytes(model),
        schedule=(schedule := plan.schedule),
        duration=duration_of(plan, model, demand, schedule, absent=on_another, card=card),
        advice=list(advice_for(plan.config, model.parameters)),
    )


def _notes_of_demand(plan: Plan, demand: Demand, on_gpus: bool) -> Iterator[str]:
    """Notes about another engine than on this machine, and about other ranks on this CPU, which no part includes."""
    if plan.engine is not None and demand.engine is not None and demand.work.section != section_of(plan.engine):
        yield f"the engine is planned as {demand.engine.title}, which generation=auto is on a GPU where it is installed"
    ranks = 0 if on_gpus else getattr(getattr(plan.config, "cluster", None), "ranks", 1) - 1
    if ranks > 0:
        others = "the other rank takes" if ranks == 1 else f"each of the {ranks} other ranks takes"
        yield f"memory is that of the run's own process and its engines; {others} as much again as this process"


def without_gpu(resolved: Resolved) -> Resolved:
    """The run as a machine without a GPU can check it, with the values that `auto` has on a GPU."""
    config = with_budget_of_device(resolved.config, resolved.plain)
    dtype = "bfloat16" if config.model.dtype == AUTO else config.model.dtype  # float16 before Ampere: of the same size
    config = replace(config, model=replace(config.model, device="cpu", dtype=dtype))
    return replace(resolved, plain=with_token_budget(resolved.plain, gpu=True), config=config)


def planned_facts(plan: Plan, model: ModelSizes, demand: Demand) -> Facts:
    """The facts about the model for the start-up table, before it is loaded."""
    settings = plan.config.model
    return Facts(
        base=model.parameters,
        trainable=demand.networks.trainable,
        dtype=str(resolve_dtype(settings.dtype, resolve_device(settings.device))).removeprefix("torch."),
        device=demand.device,
        forward="packed" if model.packed else "padded",
        reason="each prompt once for its group, no padding" if model.packed else f"padded rows: {model.padded}",
        kernels=model.kernels,
        base_copies=planned_copies(model, demand),
        layer_kinds=model.layer_kinds,
    )


def planned_copies(model: ModelSizes, demand: Demand) -> tuple[int, str] | None:
    if demand.engine is None:
        return None
    if demand.work.apart:
        return (1 + demand.work.apart, "an engine in a process of its own has one of its own")
    device = demand.load.device
    why = demand.engine.base_sharing_obstacle(device=device, itemsize=model.itemsize, quantized=model.quantized)
    if why is None:
        return (1, f"shared with {demand.engine.title}, tensor by tensor where both hold the same")
    return (2, why) if why else None


def brief_on(plan: Plan) -> Brief:
    """What the rewards give a few completions, and pay for; nothing if nothing is scored."""
    prompts = plan.scored_prompts
    return Brief() if prompts is None else brief_of(plan.config, prompts.prompts, Writer.of(plan.config))


def conversation_of(plan: Plan) -> EnvironmentTrial | None:
    """One conversation with the run's environment; None without one."""
    environment, prompts = getattr(plan, "environment", None), plan.scored_prompts or getattr(plan, "prompts", None)
    if environment is None or prompts is None:
        return None
    return try_environment(environment, Writer.of(plan.config).tokenizer, prompts.prompts[0])


def _missing_here(plan: Plan) -> Iterator[str]:
    """Notes about libraries that this machine lacks, without which no run starts here."""
    missing_engine = None if plan.engine is None else plan.config.generation.named(plan.engine).missing()
    if missing_engine is not None:
        yield f"{missing_engine.problem} here, and the run needs it where it runs: {missing_engine.remedy}"
    if plan.config.model.quantization is not None and not has_bitsandbytes():
        where = "is not installed here, and the run needs it where it runs"
        yield f"bitsandbytes {where}: {pip_install('rlft[quantization]')}"


# -- lengths and texts as values for JSON ------------------------------------------------------------------------------
def summary(tokens: Sequence[int]) -> dict[str, Any]:
    """Summarises the lengths of some data's items (in tokens); {"items": 0} if there are none."""
    if not tokens:
        return {"items": 0}
    ordered = sorted(tokens)
    return {
        "items": len(ordered),
        "total": sum(ordered),
        "shortest": ordered[0],
        "median": median_low(ordered),
        "longest": ordered[-1],
        **{f"p{percent}": ordered[(len(ordered) - 1) * percent // 100] for percent in (90, 99)},
        "histogram": [list(row) for row in histogram(tokens, MAX_BINS) if row[2]],
    }


def histogram(tokens: Sequence[int], bins: int) -> list[tuple[int, int, int]]:
    """(first length, last length, number of items) of at most `bins` ranges of equal width, empty ones included."""
    low, high = min(tokens), max(tokens)
    width = -(-(high - low + 1) // bins)
    counts = Counter((length - low) // width for length in tokens)
    starts = enumerate(range(low, high + 1, width))
    return [(start, min(high, start + width - 1), counts[number]) for number, start in starts]


def cut(text: str) -> str:
    """The text, or its first MAX_CHARACTERS characters and the number of all of them."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text):,} characters)"


def _cut_texts(values: dict[str, Any]) -> dict[str, Any]:
    texts = {name: cut(value) for name, value in values.items() if isinstance(value, str)}
    said = {name: [[cut(text) for text in pair] for pair in value] for name, value in values.items() if name == "said"}
    return {**values, **texts, **said}


# -- a conversation with the environment -------------------------------------------------------------------------------
ROOM = 10_000  # the most tokens of the conversation, so large that the trial does not reach its limits
MADE_UP: Mapping[str, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "null": None}
"""{type of a parameter: an argument}; a parameter of any other type gets the prompt's reference answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTrial:
    """A conversation with the environment, or the error that prevented one."""

    prompt: str  # id of the prompt that the conversation began with
    opening: str = ""  # text that the environment added to the prompt
    said: Sequence[tuple[str, str]] = ()  # (what the policy said, what the environment answered) for each turn
    failed: Sequence[str] = ()  # the cause of each failed call
    reward: float | None = None  # the sum of the environment's rewards; None if it gave none
    finish: str = ""  # why the conversation ended
    error: str | None = None  # of an environment that failed


def try_environment(environment: Environment, tokenizer: RunTokenizer, prompt: Prompt) -> EnvironmentTrial:
    """Has a scripted policy call the first tool, then answer, in the environment's own processes and time limits."""
    script, ends = ["done"], turn_ends(tokenizer, "chat")
    environment_alone = replace(environment, workers=1, turn_tokens=None)
    if environment.plays_itself:
        policy = ScriptedGenerator({"*": script}, tokenizer, ends)
        agents = cast(Endpoint, environment_alone)
        played = AgentGenerator(policy, agents, tokenizer, longest_row=2 * ROOM, traces=None)
    else:
        if not environment.plays_a_game:
            dialect, schema = Dialect(environment, tokenizer, prompt.messages), environment.schemas()[0]
            script.insert(0, dialect.written(schema["function"]["name"], made_up(schema, prompt)))
        policy = ScriptedGenerator({"*": [script]}, tokenizer, ends)
        played = Conversations(policy, environment_alone, tokenizer, at_once=None, longest_row=2 * ROOM)
    try:
        with closing(played):
            [group] = played.sample([prompt], 1, [0], Sampling(max_tokens=ROOM, temperature=1.0))
    except EnvironmentFailure as failure:
        return EnvironmentTrial(prompt=prompt.id, error=str(failure))
    completion = group.rollouts[0].completion
    prompt_text, opened_text = prompt.messages[-1]["content"], group.prompt.messages[-1]["content"]
    rewards = [turn.reward for turn in completion.turns if turn.reward is not None]
    return EnvironmentTrial(
        prompt=prompt.id,
        opening=opened_text.rpartition(prompt_text)[2].strip() if opened_text != prompt_text else "",
        said=[(turn.text, turn.answer) for turn in completion.turns],
        failed=[call.cause for turn in completion.turns for call in turn.calls if call.failed],
        reward=sum(rewards) if rewards else None,
        finish=str(completion.finish_reason),
    )


def made_up(schema: Schema, prompt: Prompt) -> dict[str, Any]:
    """Arguments of the right types for a tool."""
    parameters = schema["function"]["parameters"].get("properties", {})
    return {name: MADE_UP.get(str(of.get("type")), prompt.answer or "1") for name, of in parameters.items()}
