"""Memory by part, against tensors that are really there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlft.config.compose import compose
from rlft.generation.memory import Part, When, peak
from rlft.model.config import LoraSettings
from rlft.planning.memory_demand import sizes_of
from rlft.planning.memory_parts import Demand, largest_micro_batch, parts
from rlft.planning.sft_plan import make_plan as make_sft_plan
from rlft.planning.train_plan import make_plan

DEMAND = Demand(
    adapters=2, trainable=1000, whole_model=False, prompt_tokens=10, completion_tokens=20, group=3, rows=12,
    update_rows=12, token_budget=100, through_head=True, entropy=False, recompute=False, own_critic=False,
    beside=0, device="cpu",
)  # fmt: skip


def by_name(found: list[Part]) -> dict[str, int]:
    return {part.name: part.bytes for part in found}


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_parameters_are_those_that_roles_have(targets, make_roles, model_config):
    lora = LoraSettings(rank=4, alpha=8.0, dropout=0.0, target_modules=targets, path=None)
    found, roles = sizes_of(model_config(), lora), make_roles(target_modules=targets)
    assert found.lora == sum(p.numel() for _, p in roles.named_parameters())
    base = [p for name, p in roles.model.named_parameters() if "lora_" not in name]
    assert found.parameters == sum(p.numel() for p in base)
    assert found.base_bytes == 4 * found.parameters
    roles.load_sampler(roles.publish(0), weights="merged")
    sums = [total for module in roles.model.modules() for total in getattr(module, "sums", {}).values()]
    assert found.adapted == sum(total.numel() for total in sums)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (70, 60)),  # a group of 10 + 3 x 20; a second one would make 140
        ({"token_budget": 140}, (140, 120)),
        ({"token_budget": 69}, (50, 40)),  # two of the three rows, then 30 for the third alone
        ({"token_budget": 30}, (30, 20)),
        ({"token_budget": 10**6}, (280, 240)),  # all four groups, and no more
        ({"token_budget": 10**6, "update_rows": 6}, (140, 120)),
        ({"group": 1, "token_budget": 100}, (90, 60)),
    ],
)
def test_the_largest_micro_batch_is_of_the_longest_rows(changes, expected):
    assert largest_micro_batch(replace(DEMAND, **changes), packed=True) == expected


def test_padded_rows_cost_their_prompts_each_time():
    assert largest_micro_batch(DEMAND, packed=False) == (90, 60)  # three rows of 30


def test_the_peak_is_what_is_always_there_and_the_larger_of_two_times():
    found = [Part(name=w, bytes=b, when=w) for w, b in ((When.always, 5), (When.sampling, 20), (When.updating, 30))]
    assert peak(found) == 35
    assert peak([*found, Part(name="x", bytes=11, when=When.sampling)]) == 36


@pytest.mark.parametrize(
    ("override", "part", "factor"),
    [
        ("lora.rank=32 lora.alpha=32", "optimizer and gradients", 2),
        ("token_budget=900", "activations", None),
        ("critic.kind=adapter algorithm=ppo", "optimizer and gradients", None),
        ("snapshot.reference=copy algorithm.kl_coef=0.1", "adapters", 1.5),  # policy and the engine's, now three
        ("generation.max_tokens=96", "keys and values", None),
        ("generation.transformers.weights=apart", "base and policy added up", 0),
        ("generation.transformers.weights=merged_bfloat16", "base and policy added up", 0.5),
    ],
)
def test_a_key_moves_its_part(override, part, factor):
    found = []
    for words in ("", override):
        plan = make_plan(compose(["+recipe=grpo_arithmetic", "generation=transformers", *words.split()]))
        model = sizes_of(plan.config.model, plan.config.lora)
        found.append(by_name(parts(model, plan.demand(model, recompute=False), 0)).get(part, 0))
    before, after = found
    assert before > 0
    assert after != before
    if factor is not None:
        assert after == pytest.approx(factor * before, rel=1e-3)


def test_checkpointing_keeps_less_and_whole_models_learn_all_of_it():
    plan = make_sft_plan(compose(["+recipe=sft_arithmetic", "lora=null", "eval.every=0"], verb="sft"))
    model = sizes_of(plan.config.model, None)
    plain, recomputed = (by_name(parts(model, plan.demand(model, on), 0)) for on in (False, True))
    assert recomputed["activations"] < 0.5 * plain["activations"]
    assert plain["optimizer and gradients"] == 3 * 4 * model.parameters
    assert plain["adapters"] == 0


@pytest.mark.parametrize(
    ("teacher", "role", "adapters", "own"),
    # The base needs nothing; an adapter is one beside the policy's; tiny-student has float32 weights of its own.
    [("base", 0, 1, False), ("embedded:tiny-student", None, 1, True)],
)
def test_a_teacher_is_counted_as_what_it_is(teacher, role, adapters, own, model_config):
    plan = make_plan(
        compose(["+recipe=grpo_arithmetic", "algorithm=opd", "algorithm.reward_coef=1", f"snapshot.teacher={teacher}"])
    )
    model = sizes_of(plan.config.model, plan.config.lora)
    weights = sizes_of(model_config(path="embedded:tiny-student"), None).parameters
    demand = plan.demand(model, recompute=False)
    assert demand.adapters == adapters
    counted = by_name(parts(model, demand, 0))
    assert counted.get("teacher", 0) == (4 * weights if own else 0)
    assert ("teacher's pass" in counted) == own
    assert plan.parameters(model)["teacher (does not learn)"] == (weights if own else role)
