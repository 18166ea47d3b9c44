"""What `rlft plan` says of time: beside all that was measured in this project, and where nothing is known."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import roofline as script
from in_one_test import each
from plans import counted, planned
from slow_cases import slow

from rlft.commands.doctor.work import SIZES, Size
from rlft.commands.plan import time_rows
from rlft.config.compose import compose_run
from rlft.config.resolved import resolve
from rlft.plan.cards import CARDS
from rlft.plan.demand import Demand, EngineWork, Networks, Rows
from rlft.plan.duration import (
    FACTOR,
    UNMEASURED,
    Duration,
    StepWork,
    cpu,
    duration_of,
    estimate,
    machine_of,
    network_of,
    seconds_by_stage,
)
from rlft.plan.roofline import Work, seconds_of, update
from rlft.plan.run_plan import Schedule
from rlft.runs.forecast import Forecast, Price
from rlft.system import machine as rates

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "performance.md"

XEON = cpu(313e9, 12e9)
"""The products' rate is in docs/benchmarks/performance.md; its bandwidth was not recorded."""
EPYC, ONE_THREAD = cpu(130e9, 14e9), cpu(65e9, 13e9)
"""What `rlft plan` read on such a machine, on both cores and on one, while other programs left it alone."""

SMOLLM2 = Size(hidden=576, layers=30, heads=9, key_heads=3, intermediate=1536, vocabulary=49152)
EMBEDDED = Size(hidden=128, layers=4, heads=4, key_heads=2, intermediate=384, vocabulary=272)
SIZED = {"17m": SIZES["17m"], "SmolLM2": SMOLLM2, "embedded": EMBEDDED}


def demand_of(at_once=256):
    """What a plan says beside its work, of a run whose engine is the transformers engine."""
    engine = SimpleNamespace(at_once=at_once, in_graphs=False, title="it")
    networks = Networks(adapters=1, trainable=0, matrices=0)
    rows = Rows(prompt_tokens=1, completion_tokens=1, group=1, number=1, in_update=1)
    demand = Demand(networks=networks, rows=rows, token_budget=1, recompute=False, device="cpu")
    return replace(demand, engine=engine)


def seconds_of_stages(prompts, group, prompt, completion, budget=1536):
    """By the estimate, of the 17m model on the Xeon."""
    work = Work(prompts=prompts, group=group, prompt=prompt, completion=completion, budget=budget)
    network = script.network(SIZED["17m"], itemsize=4)
    stages = seconds_by_stage(StepWork(trained=work, is_sampled=True), network, XEON, demand_of())
    step = sum(stages[name] for name in ("sample", "update", "publish"))
    return {"sample": stages["sample"], "update": stages["update"], "step": step}


# Median seconds of a step whose completions have the same length, from a table of benchmarks/performance.md, by name:
# sampling, update and the whole step; prompts, completions of each, tokens of a prompt and of a completion, and budget.
STEPS = {
    "384 + 64": ((2.24, 3.01, 5.48), (8, 8, 384, 64)),
    "128 + 128": ((3.46, 3.59, 7.19), (8, 8, 128, 128)),
    "64 + 512": ((17.79, 17.56, 35.51), (8, 8, 64, 512, 4096)),
    "128 + 128, G 32": ((9.25, 15.79, 25.21), (8, 32, 128, 128, 4096)),
    "128 + 64, G 2": ((1.13, 0.90, 2.18), (8, 2, 128, 64)),
    "128 + 64": ((1.68, 2.23, 4.07), (8, 8, 128, 64)),
    "128 + 64, G 32": ((4.14, 7.35, 11.66), (8, 32, 128, 64, 2176)),
    "128 + 64, G 64": ((8.04, 14.68, 22.89), (8, 64, 128, 64, 4096)),
    "64 + 64": ((1.87, 2.14, 4.17), (8, 8, 64, 64)),
    "256 + 64": ((2.05, 2.63, 4.84), (8, 8, 256, 64)),
    "512 + 64": ((2.68, 3.67, 6.54), (8, 8, 512, 64)),
    "1024 + 64": ((4.09, 6.50, 10.75), (8, 8, 1024, 64)),
    "2048 + 64": ((6.71, 13.40, 20.29), (8, 8, 2048, 64, 2560)),
    "128 + 16": ((0.50, 0.90, 1.55), (8, 8, 128, 16)),
    "128 + 32": ((0.89, 1.29, 2.33), (8, 8, 128, 32)),
    "128 + 256": ((7.52, 7.84, 15.51), (8, 8, 128, 256, 2176)),
}


def step_of(device, model, prompts, group, prompt, completion):
    """Of a run whose completions end where they like, of at most so many tokens."""
    work = Work(prompts=prompts, group=group, prompt=prompt, completion=completion, budget=1536)
    schedule = Schedule(steps=1, first_evaluation=None, evaluations=0, checkpoints=0)
    network, step_work = script.network(SIZED[model], itemsize=4), StepWork(trained=work, is_sampled=True)
    return estimate(step_work, network, device, demand_of(), schedule, "").step


RUNS = {  # the least and the most seconds of its steps, and arguments of `step_of`
    "embedded model, 8 x 8 (Xeon)": (0.25, 0.35, (XEON, "embedded", 8, 8, 32, 48)),
    "grpo_arithmetic (EPYC)": (0.7, 0.7, (EPYC, "embedded", 32, 8, 32, 48)),
    "grpo_smollm2_sums, alone (EPYC)": (13.0, 20.0, (EPYC, "SmolLM2", 16, 8, 53, 16)),
    "grpo_smollm2_sums, median concurrently with other work": (54.0, 54.0, (EPYC, "SmolLM2", 16, 8, 53, 16)),
    "grpo_smollm2_sums, one thread": (18.4, 29.0, (ONE_THREAD, "SmolLM2", 16, 8, 53, 16)),
}


def table():
    """The lines of docs/benchmarks/performance.md."""
    lines = []
    for name, (measured, rows) in STEPS.items():
        estimated = seconds_of_stages(*rows)
        cells = [f"{seconds:.2f} / {stage:.2f}" for seconds, stage in zip(measured, estimated.values(), strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} | {measured[2] / estimated['step']:.2f} |")
    for name, (least, most, run) in RUNS.items():
        step, range_of = step_of(*run), f"{least:g} to {most:g}" if least < most else f"{least:g}"
        lines.append(f"| {name} | {range_of} | {step.seconds:.3g} ({step.low:.3g} to {step.high:.3g}) |")
    return lines


def test_the_page_has_each_comparison():
    page = PAGE.read_text()
    missing = [line for line in table() if line not in page]
    assert not missing, "\n".join(table())


def test_the_factor_covers_each_stage_that_was_measured():
    for name, (measured, rows) in STEPS.items():
        for seconds, stage in zip(measured, seconds_of_stages(*rows).values(), strict=True):
            assert 1 / FACTOR <= seconds / stage <= FACTOR, name


def test_the_interval_covers_runs_whose_completions_end_where_they_like():
    for name, (least, most, run) in RUNS.items():
        assert step_of(*run).low <= least <= most <= step_of(*run).high, name


def seconds_of_recorded_steps(name):
    """The median seconds of a step of each run of this name in recipes/chains.json."""
    for run in json.loads((ROOT / "recipes" / "chains.json").read_text())["runs"]:
        if run["name"] == name:
            yield median(run["seconds"])


OF_CHAINS = ("cispo", "dapo", "dr_grpo", "gdpo", "gmpo", "grpo_process", "gspo", "gspo_token", "iterative_grpo", "sapo",
             "kimi", "reinforce", "reinforce_pp", "rloo", "a2c", "ppo", "ppo_penalty", "ppo_ptx")  # fmt: skip


@pytest.mark.parametrize("name", ["grpo", *map(slow, OF_CHAINS)])
def test_the_interval_covers_the_recorded_runs_of_every_algorithm(name):
    words = ("data=chains", "epochs=1", "minibatches=4", "model.path=embedded:tiny-chains", "generation=transformers")
    plan = planned(f"+recipe={name}_arithmetic", *words, "generation.max_tokens=64", "model.device=cpu")
    model, demand = counted(plan)
    work, network = plan.step_work(), network_of(model, whole=False)
    step = estimate(work, network, ONE_THREAD, demand, plan.schedule, "").step
    recorded = list(seconds_of_recorded_steps(name))
    assert len(recorded) == 5
    assert all(step.low <= seconds <= step.high for seconds in recorded), (step, recorded)


# -- what a run computes -----------------------------------------------------------------------------------------------
SMALL = ("data.size=200", "data.held_out_size=40", "generation=transformers", "model.device=cpu")
EXACT = ("snapshot.reference=base", "algorithm.kl_coef=0.1", "algorithm.kl_estimator=exact")


@each(
    ("words", "epochs", "critics", "forwards"),
    [
        (("+recipe=grpo_arithmetic",), 1, 0, 0),
        (("+recipe=grpo_arithmetic", "minibatches=2", "epochs=3"), 3, 0, 1),  # the old policy, once
        (("+recipe=grpo_arithmetic", "snapshot.old=recompute"), 1, 0, 1),
        (("+recipe=grpo_arithmetic", "minibatches=2", "snapshot.old=sampled"), 1, 0, 0),
        (("+recipe=grpo_arithmetic", "snapshot.reference=copy"), 1, 0, 1),
        (("+recipe=ppo_arithmetic",), 2, 1, 3),  # old, reference, values
        (("+recipe=grpo_arithmetic", *EXACT), 1, 0, 0),  # the reference's pass is the updates' own
        (("+recipe=grpo_arithmetic", *EXACT, "algorithm.kl_in=reward"), 1, 0, 2),
    ],
)
def test_a_step_has_the_passes_of_its_roles(words, epochs, critics, forwards):
    work = planned(*words, *SMALL).step_work()
    assert (work.epochs, work.critics, work.forwards) == (epochs, critics, forwards)
    assert work.anchors == ("algorithm.kl_estimator=exact" in words and "algorithm.kl_in=reward" not in words)
    assert work.scorers == 0
    assert work.is_sampled
    assert (work.trained.prompts, work.trained.group, work.trained.completion) == (32, 8, 48)
    assert (work.sampled.prompts, work.sampled.group) == (40, 4)


# -- sums --------------------------------------------------------------------------------------------------------------
NETWORK = script.network(SIZED["embedded"], itemsize=4)
ROWS = Work(prompts=4, group=2, prompt=10, completion=20, budget=1000)


def test_a_run_is_the_sum_of_its_steps_evaluations_and_checkpoints():
    work = StepWork(trained=ROWS, epochs=3, critics=1, forwards=2, scorers=1, is_sampled=True, sampled=ROWS)
    schedule = Schedule(steps=10, first_evaluation=5, evaluations=3, checkpoints=2)
    found = estimate(work, NETWORK, XEON, demand_of(), schedule, "words")
    passes = seconds_of(update(NETWORK, ROWS), XEON)
    stages = {name: stage.seconds for name, stage in found.stages.items()}
    assert list(stages) == ["sample", "score", "credit", "update", "publish", "evaluate", "checkpoint"]
    assert stages["score"] == pytest.approx(0.5 * passes)
    assert stages["update"] == pytest.approx(6 * passes)
    compared = estimate(replace(work, anchors=1), NETWORK, XEON, demand_of(), schedule, "words")
    assert compared.stages["update"].seconds == pytest.approx((6 + 3 * 0.5) * passes)
    assert stages["credit"] == pytest.approx(2 * 0.5 * passes)
    assert stages["evaluate"] == stages["sample"]
    assert stages["checkpoint"] == 0.1
    of_a_step = ("sample", "score", "credit", "update", "publish")
    assert found.step.seconds == pytest.approx(sum(stages[name] for name in of_a_step))
    assert found.run.seconds == pytest.approx(10 * found.step.seconds + 3 * stages["evaluate"] + 2 * 0.1)
    # The upper end is FACTOR times as long, the lower one that of completions of 5 tokens.
    assert found.step.high == pytest.approx(FACTOR * found.step.seconds)
    short = estimate(replace(work, trained=replace(ROWS, completion=5)), NETWORK, XEON, demand_of(), schedule, "")
    assert found.step.low == pytest.approx(short.step.seconds / FACTOR)
    assert found.completion_tokens == (5, 20)


def test_more_rows_than_the_engine_takes_are_sampled_one_part_after_the_other():
    work = StepWork(trained=ROWS, is_sampled=True)
    whole, halves = (seconds_by_stage(work, NETWORK, XEON, demand_of(at_once))["sample"] for at_once in (8, 4))
    half = seconds_by_stage(replace(work, trained=replace(ROWS, prompts=2)), NETWORK, XEON, demand_of())["sample"]
    assert halves == pytest.approx(2 * half)
    assert whole < halves


def test_checkpointed_gradients_take_half_a_pass_more():
    stages = [
        seconds_by_stage(StepWork(trained=ROWS), NETWORK, XEON, replace(demand_of(), recompute=recompute))
        for recompute in (False, True)
    ]
    assert stages[1]["update"] == pytest.approx(1.5 * stages[0]["update"])


def test_a_gpus_engine_is_less_certain_than_its_updates():
    schedule = Schedule(steps=1, first_evaluation=None, evaluations=0, checkpoints=0)
    work = StepWork(trained=ROWS, is_sampled=True)
    stages = estimate(work, NETWORK, CARDS["H100"], demand_of(), schedule, "").stages
    assert stages["update"].high == FACTOR * stages["update"].seconds
    assert stages["sample"].high == UNMEASURED * stages["sample"].seconds
    on_another = estimate(work, NETWORK, CARDS["L4"], demand_of(), schedule, "").stages
    assert on_another["update"].high == UNMEASURED * on_another["update"].seconds


# -- machines and models -----------------------------------------------------------------------------------------------
@each(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA L4", "bfloat16", (CARDS["L4"], "NVIDIA L4, by its published rates")),
        ("NVIDIA L4", "float16", (CARDS["L4"], "NVIDIA L4, by its published rates")),
        ("NVIDIA L4", "float32", "no figures for weights of 32 bits on a GPU"),
        ("NVIDIA A10G", "bfloat16", "unknown card: NVIDIA A10G"),
    ],
)
def test_a_gpu_is_judged_by_its_name_and_dtype(name, dtype, expected, monkeypatch):
    import torch

    monkeypatch.setattr("rlft.plan.duration.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("rlft.plan.duration.resolve_dtype", lambda dtype, device: getattr(torch, dtype))
    monkeypatch.setattr("rlft.plan.duration.machine", lambda device: {"device": name})
    assert machine_of(SimpleNamespace(device="cuda", dtype=dtype)) == expected


def test_the_probe_of_a_cpu_is_short(monkeypatch):
    import torch

    asked = []

    def fake(run, device, total_s):
        run()
        asked.append(total_s)
        return [1.0, 2.0, 10.0]

    monkeypatch.setattr(rates, "seconds_of_calls", fake)
    state = torch.random.get_rng_state()
    # Medians of 2 s: 2 x 512^3 operations, and 2^25 bytes read and written.
    assert rates.host_rates(torch.float32) == (512.0**3, 2.0**25)
    assert sum(asked) <= 0.1
    assert torch.equal(torch.random.get_rng_state(), state)


def test_only_the_plan_command_probes():
    """A training or any other command never estimates, so that it never spends time on a probe."""
    callers = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "rlft").rglob("*.py")
        if any(f"{name}(" in file.read_text().replace(f"def {name}(", "") for name in ("duration_of", "host_rates"))
    ]
    assert sorted(callers) == ["rlft/plan/duration.py", "rlft/plan/prediction.py"]


def test_only_models_of_attention_and_gated_mlps_are_known():
    """0.5B: 24 layers of 896 x (896 + 2 x 128) + 896 x 896 + 3 x 896 x 4864 weights."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
        vocab_size=151936,
    )  # fmt: skip
    linear = 24 * (896 * (896 + 2 * 128) + 896 * 896 + 3 * 896 * 4864)
    sizes = {"config": config, "hidden": 896, "vocabulary": 151936, "itemsize": 2, "lora": 8_798_208}

    def network(linear, *, whole=False):
        return network_of(SimpleNamespace(**sizes, linear=linear), whole=whole)

    found = network(linear)
    assert found == replace(script.MODELS["0.5B"], rank=16.0)
    assert found.linear == linear
    whole = network(linear, whole=True)
    assert whole.rank == 0
    assert network(int(0.9 * linear)) is None  # others have fewer, such as experts, which are no linear layers
    assert network(0) is None


GAME = "environment=game reward=null environment.factory=rlft.environment.oracle_game.OracleGame"
TEACHER = "algorithm=opd snapshot.teacher=embedded:tiny-chains"
TEXT = "algorithm=ppo_ptx critic.kind=adapter pretrain.path=embedded:arithmetic-text"


@each(
    ("words", "changes", "why"),
    [
        (GAME, {}, "how many turns"),
        ("model.kernels=plain", {}, "padded rows"),
        ("", {"padded": "why"}, "padded rows"),
        ("", {"base_bytes": 1}, "quantised"),
        (TEACHER, {}, "teacher"),
        (TEXT, {}, "pretraining text"),
        ("cluster.engines=1", {}, "several processes"),
        ("cluster.ranks=2 cluster.lanes=2", {}, "several processes"),
        ("generation=vllm", {}, "no figures for vLLM on a CPU"),
        ("", {}, "unknown card: the GPU is not here"),
    ],
)
def test_what_is_not_known_is_said(words, changes, why, monkeypatch):
    """Each of these makes of a run that is known one that is not."""
    monkeypatch.setattr("rlft.plan.duration.machine_of", lambda settings: (XEON, "words"))
    known = planned("+recipe=grpo_arithmetic", *SMALL)
    assert isinstance(duration_of(known, *counted(known), known.schedule, absent=False), Duration)
    plan = planned("+recipe=grpo_arithmetic", *SMALL, *words.split(), runs_here=False)
    model, demand = counted(plan)
    said = duration_of(plan, replace(model, **changes), demand, plan.schedule, absent=not words)
    assert why in said


def test_nothing_is_known_of_an_engine_that_says_nothing_of_graphs_nor_of_steps_that_are_not_told(monkeypatch):
    monkeypatch.setattr("rlft.plan.duration.machine_of", lambda settings: (XEON, "words"))
    plan = planned("+recipe=grpo_arithmetic", *SMALL)
    model, demand = counted(plan)
    engine = SimpleNamespace(title="vLLM", in_graphs=None, on_trainers_base=False)
    for device, where in (("cpu", "a CPU"), ("cuda", "a GPU")):
        of_device = replace(demand, engine=engine, device=device)
        assert duration_of(plan, model, of_device, plan.schedule, absent=False) == f"no figures for vLLM on {where}"
    monkeypatch.setattr(type(plan), "step_work", lambda plan: None)
    told = "the command does not say what its steps compute"
    assert duration_of(plan, model, demand, plan.schedule, absent=False) == told


# -- the transformers engine in CUDA graphs ----------------------------------------------------------------------------
def test_the_estimate_differs_by_whether_the_transformers_engine_decodes_in_graphs():
    """On an NVIDIA GPU and without drafts; vLLM always does."""
    network, work = script.MODELS["0.5B"], StepWork(trained=ROWS, is_sampled=True)

    def seconds(graphs, device="cuda", draft_rows=0):
        engine = compose_engine(graphs)
        demand = replace(demand_of(), engine=engine, device=device, work=EngineWork(draft_rows=draft_rows))
        machine = XEON if device == "cpu" else CARDS["H100"]
        return seconds_by_stage(work, network, machine, demand)["sample"]

    assert seconds("auto") < 0.2 * seconds("off")
    for how in ({"device": "cpu"}, {"device": "rocm"}, {"draft_rows": 8}):
        assert seconds("auto", **how) == seconds("off", **how)


def compose_engine(graphs):
    words = ["+recipe=grpo_arithmetic", "generation=transformers", f"generation.transformers.graphs={graphs}"]
    return resolve(compose_run(words).plain).config.generation.named("transformers")


# -- the rows of the page ----------------------------------------------------------------------------------------------
SCHEDULE = Schedule(steps=10, first_evaluation=4, evaluations=4, checkpoints=3)


def test_the_rows_give_seconds_by_stage_an_interval_and_the_cost():
    stages = {"sample": 2.5, "update": 0.051, "evaluate": 70.0, "checkpoint": 0.1}
    estimated = Duration(
        machine="a machine",
        stages={name: Forecast(seconds, seconds / 2, 2 * seconds) for name, seconds in stages.items()},
        step=Forecast(2.551, 1.0, 5.2),
        run=Forecast(3600.0, 1800.0, 7200.0),
        completion_tokens=(12, 48),
    )
    rows = {name: (value, text) for name, value, text in time_rows(SCHEDULE, estimated, Price(2.5, "EUR"))}
    assert list(rows) == ["steps", "evaluations", "checkpoints", "a step", "the run", "price"]
    assert rows["a step"][0] == "2.6 s (1 s to 5.2 s)"
    assert rows["a step"][1].startswith("sample 2.5 s, update 0.051 s; if completions have all 48 tokens")
    assert "at the lower end 12" in rows["a step"][1]
    assert rows["the run"][0] == "1:00:00 (30:00 to 2:00:00)"
    assert rows["the run"][1].startswith("evaluate 1:10, checkpoint 0.1 s; an estimate for a machine; after 5 steps")
    assert rows["price"] == ("2.50 (1.25 to 5.00) EUR", "at 2.50 EUR/h, without the start")
    supervised = time_rows(SCHEDULE, replace(estimated, completion_tokens=None), None)
    assert supervised[3][2] == "sample 2.5 s, update 0.051 s"
    assert supervised[-1][0] == "the run"


def test_the_rows_say_why_there_is_no_estimate():
    rows = time_rows(SCHEDULE, "unknown card: NVIDIA L40S", Price(2.5))
    assert [row[0] for row in rows] == ["steps", "evaluations", "checkpoints", "the run", "price"]
    assert rows[3][1:] == (
        "no estimate", "unknown card: NVIDIA L40S; after 5 steps rlft watch says it from what they took"
    )  # fmt: skip
    assert rows[4][:2] == ("price", "2.50/h")
