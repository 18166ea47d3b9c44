"""Memory by part, against tensors that are really there."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from in_one_test import each
from slow_cases import slow
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlft.algorithm.ops.distillation import Divergence, top_k_divergence
from rlft.config.compose import compose
from rlft.config.model import LoraSettings
from rlft.config.resolved import resolve
from rlft.generation.memory import MemoryPart, When, peak
from rlft.model.activations import LOGIT_CHUNK
from rlft.model.kernels.lm_head import top_k_logprobs
from rlft.plan.memory_demand import sizes_of
from rlft.plan.memory_parts import TOP_K_FIELDS, TOP_K_LOGITS, Demand, largest_micro_batch, parts

DEMAND = Demand(
    adapters=2, trainable=1000, whole_model=False, prompt_tokens=10, completion_tokens=20, group=3, rows=12,
    update_rows=12, token_budget=100, through_head=True, entropy=False, recompute=False, own_critic=False,
    beside=0, device="cpu",
)  # fmt: skip


def by_name(found: list[MemoryPart]) -> dict[str, int]:
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


@each(
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
    found = [
        MemoryPart(name=w, bytes=b, when=w) for w, b in ((When.always, 5), (When.sampling, 20), (When.updating, 30))
    ]
    assert peak(found) == 35
    assert peak([*found, MemoryPart(name="x", bytes=11, when=When.sampling)]) == 36


@pytest.mark.parametrize(
    ("override", "part", "factor"),
    [
        ("lora.rank=32 lora.alpha=32", "optimizer and gradients", 2),
        slow("token_budget=900", "activations", None),
        ("critic.kind=adapter algorithm=ppo", "optimizer and gradients", None),
        ("snapshot.reference=copy algorithm.kl_coef=0.1", "adapters", 1.5),  # policy and the engine's, now three
        slow("generation.max_tokens=96", "keys and values", None),
        slow("generation.transformers.weights=apart", "base and policy added up", 0),
        ("generation.transformers.weights=merged_bfloat16", "base and policy added up", 0.5),
    ],
)
def test_a_key_moves_its_part(override, part, factor):
    found = []
    for words in ("", override):
        plan = resolve(compose(["+recipe=grpo_arithmetic", "generation=transformers", *words.split()])).plan()
        model = sizes_of(plan.config.model, plan.config.lora)
        found.append(by_name(parts(model, plan.demand(model, recompute=False), 0)).get(part, 0))
    before, after = found
    assert before > 0
    assert after != before
    if factor is not None:
        assert after == pytest.approx(factor * before, rel=1e-3)


def test_checkpointing_keeps_less_and_whole_models_learn_all_of_it():
    plan = resolve(compose(["+recipe=sft_arithmetic", "lora=null", "eval.every=0"], verb="sft")).plan()
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
    plan = resolve(
        compose(["+recipe=grpo_arithmetic", "algorithm=opd", "algorithm.reward_coef=1", f"snapshot.teacher={teacher}"])
    ).plan()
    model = sizes_of(plan.config.model, plan.config.lora)
    weights = sizes_of(model_config(path="embedded:tiny-student"), None).parameters
    demand = plan.demand(model, recompute=False)
    assert demand.adapters == adapters
    counted = by_name(parts(model, demand, 0))
    assert counted.get("teacher", 0) == (4 * weights if own else 0)
    assert ("teacher's pass" in counted) == own
    assert plan.parameters(model)["teacher (does not learn)"] == (weights if own else role)


def test_a_teachers_most_likely_tokens_are_counted_in_the_batch_and_in_a_second_pass_through_the_head():
    words = ["algorithm=opd", "snapshot.teacher=base", "snapshot.teacher_hint=x", "data.size=64", "algorithm.top_k=16"]
    plans = [resolve(compose([*words, f"algorithm.teacher_in={place}"])).plan() for place in ("loss", "advantage")]
    sizes = sizes_of(plans[0].config.model, plans[0].config.lora)
    demands = [plan.demand(sizes, False) for plan in plans]
    more, less = (by_name(parts(sizes, demand, 0)) for demand in demands)
    demand = demands[0]
    shape = demand.rows, demand.prompt_tokens + demand.completion_tokens, 16
    ids, logprobs = torch.zeros(shape, dtype=torch.int64, device="meta"), torch.zeros(shape, device="meta")
    assert more["batch"] - less["batch"] == ids.nbytes + logprobs.nbytes
    _, predicted = largest_micro_batch(demand, packed=True)
    logits = min(LOGIT_CHUNK["cpu"], predicted * sizes.vocabulary) * 4
    view = predicted // demand.completion_tokens * shape[1] * 16 * 4
    assert more["LM head"] - less["LM head"] == 3 * logits + TOP_K_FIELDS * view
    assert {name for name in more if more[name] != less[name]} == {"batch", "LM head"}


@pytest.mark.parametrize("top_k", [4, 16])
def test_what_is_counted_of_a_second_pass_through_the_head_is_what_is_alive_at_most(top_k):
    """Log-probs, divergence and backward of 64 tokens in one chunk."""
    tokens, hidden, vocabulary = 64, 8, 4096
    head = nn.Linear(hidden, vocabulary, bias=False).requires_grad_(False)
    states = torch.randn(tokens, hidden, requires_grad=True)
    teacher = torch.randn(tokens, vocabulary).log_softmax(-1).topk(top_k, -1)
    with Alive(head.weight) as alive:
        student = top_k_logprobs(head, states, teacher.indices, 1.0)
        top_k_divergence(student, teacher.values, Divergence.jensen_shannon).sum().backward()
    counted = TOP_K_LOGITS * tokens * vocabulary * 4 + TOP_K_FIELDS * tokens * top_k * 4
    assert alive.peak == pytest.approx(counted, rel=0.02)


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they are alive. but: a tensor that was there before."""

    def __init__(self, but):
        super().__init__()
        self.sizes, self.now, self.peak = {but.untyped_storage()._cdata: 0}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata)
        return made

    def _gone(self, storage):
        self.now -= self.sizes.pop(storage)
