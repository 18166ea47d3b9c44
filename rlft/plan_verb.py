"""`rlft plan`: what a run is, needs and begins with, before any weight is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from typing import Any, cast

import torch

from rlft import rm, sft, sizes
from rlft.auto import AUTO, resolved
from rlft.auto_budget import settled
from rlft.check import check_quantized_device, has_bitsandbytes, has_vllm
from rlft.demand import CUDA_CONTEXT, demand_of, sizes_of, with_vllm
from rlft.fitting import Way, ways
from rlft.footprint import Demand, ModelSizes, Part, parts, peak
from rlft.memory import status_bytes
from rlft.metrics import peak_memory_bytes
from rlft.model.backbone import load_tokenizer, resolve_device, resolve_dtype
from rlft.model.config import CriticKind
from rlft.plan import Plan, make_plan
from rlft.prompts import left_out
from rlft.reward.spec import specs
from rlft.reward_trial import Trial, doubts, try_rewards
from rlft.rm import RmPlan
from rlft.roots import Verb
from rlft.sft import SftPlan
from rlft.sizes import Facts, Row
from rlft.training_base import free_bytes, needs_checkpointing
from rlft.types import UserError

NO_VLLM = "vLLM is not installed here, and the run needs it where it runs: pip install 'rlft[vllm]'"
NO_BITSANDBYTES = (
    "bitsandbytes is not installed here, and the run needs it where it runs: pip install 'rlft[quantization]'"
)
TRIED_PROMPTS = 2
MAX_BINS = 32
MAX_CHARACTERS = 400
"""Of a text of the data, of a reward or of a note in the JSON; all of it together stays below 64 KiB."""

AUTO_IS_VLLM = "the engine is planned as vLLM, which generation=auto is on a GPU where it is installed"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each item of some data, and what was left out of it and why, or None."""

    name: str
    tokens: Sequence[int]
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What `rlft plan` tells. memory: by whether activations are recomputed, as the run will do it first."""

    sizes: Sequence[Row]
    parameters: Mapping[str, int]
    model: ModelSizes
    demand: Demand
    process: int
    device: str
    limit: int
    named_limit: bool
    lengths: Sequence[Lengths]
    trials: Sequence[Trial]
    notes: Sequence[str]

    def memory(self, *, recompute: bool) -> list[Part]:
        return parts(self.model, replace(self.demand, recompute=recompute), self.process)

    @property
    def peak(self) -> int:
        return peak(self.memory(recompute=self.demand.recompute))

    @property
    def peak_without_engine(self) -> int:
        """As far as vLLM were on a device of its own."""
        alone = replace(self.demand, engine=0)
        return peak(parts(self.model, alone, self.process))

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit

    def ways(self) -> list[Way]:
        """What would make it fit; nothing where it does."""
        return [] if self.fits else ways(self.model, self.demand, self.process, self.limit)


def plan_of(plain: dict[str, Any], limit: int | None) -> Planned:
    """The plan of this config's run; limit: bytes of the device, None for what is free on this machine's.

    Raises:
        UserError: for whatever the run would refuse.
    """
    on_another = needs_absent_gpu(plain)
    if on_another and limit is None:
        problem = "there is no such GPU on this machine, whose memory could be asked for"
        got = plain["model"]["device"]
        raise UserError("model.device", problem, got=got, remedy="name its memory: device_memory=24GiB")
    is_auto = plain["token_budget"] == AUTO
    if on_another:
        plain = without_gpu(plain)
    plan = without_running(plain)
    settings = plan.config.model
    if not on_another:
        check_quantized_device(settings)
    model, device = sizes_of(settings, plan.config.lora), resolve_device(settings.device)
    # What this process holds with all libraries that a run imports and its data scanned.
    process, free = status_bytes("VmRSS") or peak_memory_bytes(), free_bytes(device)
    if on_another or device.type == "cuda":
        process = CUDA_CONTEXT
    whole = free + process if limit is None else limit
    demand = demand_of(plan, model, False)
    if on_another or demand.device == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory if limit is None else limit
        demand = with_vllm(replace(demand, device="cuda"), plan, memory, absent=on_another)
        plan = settled(plan, model, demand, memory, is_auto)
    recompute = plan.config.model.gradient_checkpointing
    if recompute == AUTO:  # on a CPU
        room = free if limit is None else max(0, limit - process - model.base_bytes)
        recompute = needs_checkpointing(model.config, plan.config.token_budget, model.itemsize, room)
    demand = replace(demand, token_budget=plan.config.token_budget, recompute=recompute)
    return Planned(
        sizes=size_rows(plan, model, demand),
        parameters=parameters_by_role(plan, model),
        model=model,
        demand=demand,
        process=process,
        device="a GPU that is not here" if on_another else str(device),
        limit=whole,
        named_limit=limit is not None,
        lengths=lengths_of(plan),
        trials=trials_of(plan),
        notes=[*notes_of(plan), *([AUTO_IS_VLLM] if demand.engine and getattr(plan, "engine", "") != "vllm" else [])],
    )


def without_running(plain: dict[str, Any]) -> Plan | SftPlan | RmPlan:
    """The plan of a run that may run on another machine."""
    match Verb(plain["verb"]):
        case Verb.sft:
            return sft.make_plan(plain, runs_here=False)
        case Verb.rm:
            return rm.make_plan(plain, runs_here=False)
        case _:
            return make_plan(plain, runs_here=False)


def needs_absent_gpu(plain: Mapping[str, Any]) -> bool:
    """Whether the run is meant for a GPU and this machine has none."""
    return str(plain["model"]["device"]).startswith("cuda") and not torch.cuda.is_available()


def without_gpu(plain: dict[str, Any]) -> dict[str, Any]:
    """The same run as far as a machine without a GPU can check it, with what a GPU would make of `auto`."""
    settings = plain["model"]
    dtype = "bfloat16" if settings["dtype"] == AUTO else settings["dtype"]
    return {**resolved(plain), "model": {**settings, "device": "cpu", "dtype": dtype}}


def size_rows(plan: Plan | SftPlan | RmPlan, model: ModelSizes, demand: Demand) -> list[Row]:
    """The rows that the run will begin with."""
    settings = plan.config.model
    facts = Facts(
        base=model.parameters,
        trainable=demand.trainable,
        dtype=str(resolve_dtype(settings.dtype, resolve_device(settings.device))).removeprefix("torch."),
        device=demand.device if demand.device == "cuda" else str(resolve_device(settings.device)),
        forward="packed" if model.packed else "padded",
        reason="each prompt once for its group, no padding" if model.packed else "this model's attention needs it",
    )
    if isinstance(plan, Plan):
        return sizes.size_rows(plan, facts)
    return sft.size_rows(plan, facts) if isinstance(plan, SftPlan) else rm.size_rows(plan, facts)


def parameters_by_role(plan: Plan | SftPlan | RmPlan, model: ModelSizes) -> dict[str, int]:
    """Parameters of the base and of every role beside it."""
    found = {"base (frozen)": model.parameters}
    if isinstance(plan, RmPlan):
        return found | {"reward (learns)": model.lora + model.hidden + 1}
    if isinstance(plan, SftPlan):
        whole = plan.config.lora is None
        return {"base (learns)": model.parameters} if whole else found | {"policy (learns)": model.lora}
    critic = plan.config.critic.kind
    for role in sizes.role_names(plan):
        head = model.hidden + 1 if role in ("critic", "reward") else 0
        on_the_base = role == "reference" and plan.config.snapshot.reference == "base"
        adapter = 0 if on_the_base or (role == "critic" and critic is CriticKind.shared) else model.lora
        learns = role in ("policy", "critic") or (role == "reward" and plan.config.reward_model.refresh_every > 0)
        found[f"{role} ({'learns' if learns else 'does not learn'})"] = adapter + head
    return found


def lengths_of(plan: Plan | SftPlan | RmPlan) -> list[Lengths]:
    """How long the data are, in tokens, and what was left out of them."""
    if isinstance(plan, SftPlan):
        texts = [("demonstrations", plan.train), ("held-out demonstrations", plan.held_out_examples)]
        return [Lengths(name, [len(text.ids) for text in found.texts], found.note) for name, found in texts]
    if isinstance(plan, RmPlan):
        ranked = [("rankings", plan.train), ("held-out rankings", plan.held_out)]
        return [
            Lengths(name, [len(r.prompt) + max(map(len, r.completions)) for r in found.rankings], found.note)
            for name, found in ranked
        ]
    result = []
    for name, split, prompts in (("train", "train", plan.train_prompts), ("held out", "held-out", plan.held_out)):
        if prompts is not None:
            dropped = next(left_out(prompts, split, plan.config.prompts.max_tokens), None)
            result.append(Lengths(f"{name} prompts", [len(p.token_ids) for p in prompts.prompts], dropped))
    return result


def trials_of(plan: Plan | SftPlan | RmPlan) -> list[Trial]:
    """What the rewards say of a few prompts; nothing where nothing is scored."""
    prompts = plan.train_prompts if isinstance(plan, Plan) else getattr(plan, "held_out", None)
    if isinstance(plan, RmPlan) or prompts is None:
        return []
    tokenizer = load_tokenizer(plan.config.model)

    def tokens(text: str) -> list[int]:
        return cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"])  # of one text

    return try_rewards(specs(plan.config.reward), prompts.prompts[:TRIED_PROMPTS], tokens, plan.config.scoring.timeout)


def notes_of(plan: Plan | SftPlan | RmPlan) -> list[str]:
    """What the run will say when it begins, and what it needs that is missing on this machine."""
    missing = []
    if getattr(plan, "engine", "") == "vllm" and not has_vllm():
        missing.append(NO_VLLM)
    if plan.config.model.quantization is not None and not has_bitsandbytes():
        missing.append(NO_BITSANDBYTES)
    return [*(plan.warnings if isinstance(plan, Plan) else plan.notes), *missing]


def summary(tokens: Sequence[int]) -> dict[str, Any]:
    """How long the items of some data are, in a few numbers however many there are; {"items": 0} without any.

    histogram: [first length, last length, items] of at most MAX_BINS ranges of equal width.
    """
    if not tokens:
        return {"items": 0}
    ordered, low, high = sorted(tokens), min(tokens), max(tokens)
    width = -(-(high - low + 1) // MAX_BINS)
    counts = Counter((length - low) // width for length in tokens)
    return {
        "items": len(ordered),
        "total": sum(ordered),
        "shortest": low,
        "median": median_low(ordered),
        "longest": high,
        **{f"p{percent}": ordered[(len(ordered) - 1) * percent // 100] for percent in (90, 99)},
        "histogram": [[low + i * width, min(high, low + (i + 1) * width - 1), counts[i]] for i in sorted(counts)],
    }


def cut(text: str) -> str:
    """The text, or its first MAX_CHARACTERS characters and how many there are."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text):,} characters)"


def as_dict(planned: Planned) -> dict[str, Any]:
    """Everything, for scripts; sizes in bytes. It stays small for any data: lengths are summed up, texts are cut."""
    memory = {
        name: [
            {"part": p.name, "bytes": p.bytes, "when": str(p.when), "key": p.key} for p in planned.memory(recompute=on)
        ]
        for name, on in (("as_planned", planned.demand.recompute), ("with_gradient_checkpointing", True))
    }
    return {
        "sizes": [{"what": what, "value": value, "explanation": text} for what, value, text in planned.sizes],
        "parameters": dict(planned.parameters),
        "device": planned.device,
        "device_memory": planned.limit,
        "peak": planned.peak,
        "peak_without_engine": planned.peak_without_engine,
        "fits": planned.fits,
        "gradient_checkpointing": planned.demand.recompute,
        "memory": memory,
        "ways": [{"changes": dict(way.changes), "peak": way.peak} for way in planned.ways()],
        "lengths": [
            {"data": found.name, "tokens": summary(found.tokens), "left_out": found.note and cut(found.note)}
            for found in planned.lengths
        ],
        "rewards": [
            {name: cut(value) if isinstance(value, str) else value for name, value in asdict(trial).items()}
            for trial in planned.trials
        ],
        "notes": [cut(note) for note in (*planned.notes, *doubts(planned.trials))],
    }
