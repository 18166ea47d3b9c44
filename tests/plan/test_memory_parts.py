"""Memory by part, against tensors that are there; a teacher that is a separate model, against sums by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from in_one_test import each
from plans import bytes_by_part, bytes_of, counted, planned
from slow_cases import slow
from torch import nn

from rlft.algorithm.ops.kl import Divergence, top_k_divergence
from rlft.config.compose import compose
from rlft.config.model import LoraSettings
from rlft.config.resolved import resolve
from rlft.generation.memory import TEACHER_SHARE, MemoryPart, ModelSizes, TeacherLoad, When, busiest, peak
from rlft.generation.vllm.memory import CPU_LIBRARIES
from rlft.model.activations import LayerModules, logit_rows
from rlft.model.backbone import load_backbone
from rlft.model.forward import Forward, padded_forward
from rlft.model.kernels.lm_head import Head, anchor_of, head_kl, top_k_logprobs
from rlft.plan.demand import Demand, LiveBytes, Networks, Rows, TeacherDemand
from rlft.plan.fit import remedies
from rlft.plan.memory_parts import (
    KL_LOGITS,
    OF_AN_UPDATE,
    PADDED_KL_LOGITS,
    TOP_K_FIELDS,
    TOP_K_LOGITS,
    Run,
    largest_micro_batch,
    longest_rows,
    memory_shortfall,
    teacher_memory,
    teacher_pass_bytes,
)
from rlft.plan.roles import check_teacher_engine, missing_engine
from rlft.plan.sizes import sizes_of
from rlft.plan.train_plan import roles_text
from rlft.system.terminal import pip_install
from rlft.types import UserError

DEMAND = Demand(
    networks=Networks(adapters=2, trainable=1000, matrices=1000),
    rows=Rows(prompt_tokens=10, completion_tokens=20, group=3, number=12, in_update=12),
    token_budget=100, recompute=False, device="cpu",
)  # fmt: skip


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
    assert found.adapted == sum(total.values.numel() for total in sums)


@each(
    ("changes", "expected"),
    [
        ({}, (70, 60)),  # a group of 10 + 3 x 20; a second one would make 140
        ({"token_budget": 140}, (140, 120)),
        ({"token_budget": 69}, (50, 40)),  # two of the three rows, then 30 for the third alone
        ({"token_budget": 30}, (30, 20)),
        ({"token_budget": 10**6}, (280, 240)),  # all four groups, and no more
        ({"token_budget": 10**6, "in_update": 6}, (140, 120)),
        ({"group": 1, "token_budget": 100}, (90, 60)),
    ],
)
def test_the_largest_micro_batch_is_of_the_longest_rows(changes, expected):
    of_rows = {name: value for name, value in changes.items() if name != "token_budget"}
    budget = changes.get("token_budget", DEMAND.token_budget)
    demand = replace(DEMAND, token_budget=budget, rows=replace(DEMAND.rows, **of_rows))
    assert largest_micro_batch(demand, packed=True) == expected


def test_padded_rows_cost_their_prompts_each_time():
    assert largest_micro_batch(DEMAND, packed=False) == (90, 60)  # three rows of 30


HEADED = 1 + 272 / (4 * 1536)  # with 272 tokens' numbers of the head next to those of four layers, of the same width


@pytest.mark.parametrize(
    ("override", "part", "factor"),
    [
        ("lora.rank=32 lora.alpha=32", "optimizer and gradients", 2),
        slow("trainer.optimizer=muon", "optimizer and gradients", 2 / 3),  # one average and a gradient
        slow("token_budget=900", "activations", None),
        ("critic.kind=adapter algorithm=ppo", "optimizer and gradients", None),
        slow("snapshot.reference=copy algorithm.kl_coef=0.1", "adapters", 1.5),  # policy and the engine's, now three
        slow("generation.max_tokens=96", "keys and values", None),
        slow("generation.transformers.weights=apart", "base and policy added up", 0),
        ("generation.transformers.weights=merged_bfloat16", "base and policy added up", 0.5 * HEADED),
        ("generation.transformers.weights=merged_int8", "base and policy added up", 0.25 * HEADED),
        slow("generation.transformers.weights=merged_int8 model.dtype=bfloat16", "base and policy added up", 0),
    ],
)
def test_a_key_moves_its_part(override, part, factor):
    words = ("+recipe=grpo_arithmetic", "generation=transformers")
    before, after = (bytes_of(*words, *more).get(part, 0) for more in ([], override.split()))
    assert before > 0
    assert after != before
    if factor is not None:
        assert after == pytest.approx(factor * before, rel=1e-3)


@pytest.mark.parametrize(
    ("teacher", "role", "adapters", "own"),
    # The base needs nothing; an adapter is one beside the policy's; tiny-student has float32 weights of its own.
    [("base", 0, 1, False), ("embedded:tiny-student", None, 1, True)],
)
def test_a_teacher_is_counted_as_what_it_is(teacher, role, adapters, own, model_config):
    plan = planned("+recipe=grpo_arithmetic", "algorithm=opd", "algorithm.reward_coef=1", f"snapshot.teacher={teacher}")
    model, demand = counted(plan)
    weights = sizes_of(model_config(path="embedded:tiny-student"), None).parameters
    assert demand.networks.adapters == adapters
    found = bytes_by_part(model, demand)
    assert found.get("teacher", 0) == (4 * weights if own else 0)
    assert ("teacher's pass" in found) == own
    assert plan.parameters(model)["teacher (does not learn)"] == (weights if own else role)


def of_two(words, *others):
    """(sizes, demand of the first, parts of the first and of the second, names of those that differ)."""
    (sizes, demand), (_, other) = (counted(planned(*words, more)) for more in others)
    first, second = bytes_by_part(sizes, demand), bytes_by_part(sizes, other)
    return sizes, demand, first, second, {name for name in first if first[name] != second[name]}


def test_a_teachers_most_likely_tokens_are_counted_in_the_batch_and_in_a_second_pass_through_the_head():
    words = ("algorithm=opd", "snapshot.teacher=base", "snapshot.teacher_hint=x", "data.size=64", "algorithm.top_k=16")
    in_loss, in_advantage = (f"algorithm.teacher_in={place}" for place in ("loss", "advantage"))
    sizes, demand, more, less, changed = of_two(words, in_loss, in_advantage)
    shape = demand.rows.number, demand.rows.tokens, 16
    ids, logprobs = torch.zeros(shape, dtype=torch.int64, device="meta"), torch.zeros(shape, device="meta")
    assert more["batch"] - less["batch"] == ids.nbytes + logprobs.nbytes
    _, predicted = largest_micro_batch(demand, packed=True)
    logits = logit_rows(sizes.vocabulary, "cpu", predicted) * sizes.vocabulary * 4
    view = predicted // demand.rows.completion_tokens * shape[1] * 16 * 4
    assert more["LM head"] - less["LM head"] == 3 * logits + TOP_K_FIELDS * view
    assert changed == {"batch", "LM head"}


@pytest.mark.parametrize("top_k", [4, 16])
def test_what_is_counted_of_a_second_pass_through_the_head_is_what_is_alive_at_most(top_k):
    """Log-probs, divergence and backward of 64 tokens in one chunk."""
    tokens, hidden, vocabulary = 64, 8, 4096
    head = nn.Linear(hidden, vocabulary, bias=False).requires_grad_(False)
    states = torch.randn(tokens, hidden, requires_grad=True)
    teacher = torch.randn(tokens, vocabulary).log_softmax(-1).topk(top_k, -1)
    with LiveBytes() as alive:
        student = top_k_logprobs(Head(head), states, teacher.indices, 1.0)
        top_k_divergence(student, teacher.values, Divergence.jensen_shannon).sum().backward()
    counted = TOP_K_LOGITS * tokens * vocabulary * 4 + TOP_K_FIELDS * tokens * top_k * 4
    assert alive.peak == pytest.approx(counted, rel=0.02)


def test_an_exact_kl_is_counted_in_the_heads_chunks_and_by_the_other_policys_hidden_states():
    words = ("+recipe=grpo_arithmetic", "snapshot.reference=base", "algorithm.kl_coef=0.1")
    exact, k3 = (f"algorithm.kl_estimator={kind}" for kind in ("exact", "k3"))
    sizes, demand, more, less, changed = of_two(words, exact, k3)
    _, predicted = largest_micro_batch(demand, packed=True)
    logits = logit_rows(sizes.vocabulary, "cpu", predicted) * sizes.vocabulary * 4
    states = torch.zeros(predicted, sizes.hidden, device="meta")
    assert more["LM head"] - less["LM head"] == (KL_LOGITS - 1) * logits + states.nbytes
    assert changed == {"LM head"}


@each(("dtype", "anchor_is_first"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
def test_what_is_counted_of_an_exact_kl_is_within_5_percent_of_what_is_alive(dtype, anchor_is_first):
    """KL and backward of 64 tokens in one chunk."""
    tokens, hidden, vocabulary = 64, 8, 4096
    head = Head(nn.Linear(hidden, vocabulary, bias=False, dtype=dtype).requires_grad_(False))
    states = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    anchor = anchor_of(head, torch.randn(tokens, hidden, dtype=dtype))._replace(is_first=anchor_is_first)
    with LiveBytes() as alive:
        head_kl(head, states, anchor, 0.7).sum().backward()
    assert alive.peak == pytest.approx(KL_LOGITS * tokens * vocabulary * 4, rel=0.05)


def test_in_padded_rows_the_other_policys_logits_add_as_much_as_is_counted(model_config):
    model = load_backbone(model_config()).model
    hook = model.get_input_embeddings().register_forward_hook(lambda *given: given[-1].requires_grad_())
    batch, padded = longest_rows(20, 12, 2, 4, 10**6), Forward(model=model, packed=False, reason="")
    peaks = []
    for is_exact in (False, True):
        with LiveBytes() as alive:
            anchor = padded.anchor(batch, 1.0) if is_exact else None
            outputs = padded_forward(model, batch, 1.0, False, anchor=anchor)
            (outputs.logprobs if outputs.kl is None else outputs.logprobs + outputs.kl).sum().backward()
        peaks.append(alive.peak)
    hook.remove()
    logits = batch.token_ids.numel() * model.config.vocab_size * 4
    assert peaks[1] - peaks[0] == pytest.approx(PADDED_KL_LOGITS * logits, rel=0.05)


GIB = 2**30
MODEL = ModelSizes(
    parameters=7_600_000_000, base_bytes=15_200_000_000, itemsize=2, lora=0, adapted=0, adapter=None,
    key_size=2 * 4 * 128 * 28, padded="", kernels=None, linear=6_500_000_000,
    config=SimpleNamespace(vocab_size=152_064, hidden_size=3584, intermediate_size=18944),
    modules=LayerModules(),
)  # fmt: skip
GENERATION = resolve(compose(["+recipe=grpo_arithmetic"])).config.generation
IN_VLLM = TeacherDemand(
    model=MODEL, engine=GENERATION.named("vllm"), section="vllm", row_tokens=1023, prompt_tokens=300, share=0.3
)
BY_TRANSFORMERS = replace(IN_VLLM, engine=GENERATION.named("transformers"), section="transformers")


def load_of(teacher, device, device_memory=0, *, libraries=True):
    return TeacherLoad(
        row_tokens=teacher.row_tokens, device=device, device_memory=device_memory, share=teacher.share,
        libraries=libraries,
    )  # fmt: skip


def taken_by(teacher, *load, **keys):
    return teacher.engine.teacher_memory(teacher.model, load_of(teacher, *load, **keys))


# Weights; 1,024 tokens x (3 x 18,944 + 3 x 3,584) x 2 bytes; logits of 32 rows twice in float32; the keys and values of
# 1,023 tokens and the one that is sampled, 28,672 elements of 2 bytes each.
LEAST = 15_200_000_000 + 1024 * 67584 * 2 + 2 * 32 * 152064 * 4 + 1024 * 28672 * 2


def test_by_transformers_the_largest_pass_of_its_rows_is_counted_beside_an_update_not_with_it():
    """One group of 4 completions of 200 after 300 tokens: 1,100 tokens of 3 x 18,944 + 3 x 3,584 elements of 2 bytes,
    and of 800 x 152,064 logits a chunk of 384 rows twice in float32. In padded rows all logits of 4 x 500 tokens,
    2 + 2 x 4 bytes each.
    """
    demand = Demand(
        networks=Networks(adapters=1, trainable=0, matrices=0),
        rows=Rows(prompt_tokens=100, completion_tokens=200, group=4, number=16, in_update=16),
        token_budget=1100, recompute=False, device="cuda", teacher=BY_TRANSFORMERS,
    )  # fmt: skip
    [row] = [row for row in OF_AN_UPDATE if row.name == "teacher's pass"]
    part = row.part(Run(MODEL, demand))
    assert (part.bytes, part.when) == (1100 * 67_584 * 2 + 384 * 152_064 * 8, When.annotating)
    padded = replace(BY_TRANSFORMERS, model=replace(MODEL, padded="why"))
    of_rows = teacher_pass_bytes(Run(MODEL, replace(demand, token_budget=2000, teacher=padded)))
    assert of_rows == 2000 * 67_584 * 2 + 2000 * 152_064 * 10
    assert teacher_pass_bytes(Run(MODEL, replace(demand, teacher=IN_VLLM))) is None
    beside = [
        MemoryPart(name=when, bytes=size, when=when)
        for when, size in zip(When, (1, 9, 20, 400, 300, 200, 100), strict=True)
    ]
    assert (peak(beside), busiest(beside)) == (401, When.annotating)


def test_on_a_gpu_it_is_its_share_and_the_log_probs_of_a_forwards_tokens_beside_it():
    """1,023 tokens of at most 1,024: logits of 2 bytes, log-probs of 4, and 4 to sort them, of 152,064 each."""
    taken = taken_by(IN_VLLM, "cuda", 80 * GIB)
    assert [(part.bytes, part.when, part.key) for part in taken.parts] == [
        (int(0.3 * 80 * GIB), When.always, TEACHER_SHARE),
        (1023 * 152_064 * 10, When.updating, "snapshot.teacher"),
    ]
    assert taken.lacks == 0
    long = taken_by(replace(IN_VLLM, row_tokens=9000), "cuda", 80 * GIB)
    assert long.parts[1].bytes == 1024 * 152_064 * 10


def test_a_share_in_which_vllm_does_not_start_is_told_and_so_is_one_in_which_it_does():
    """0.3 of 24 GiB are 7.73 GB; weights and the rest are 15.44 GB, of 25.77 GB the share 0.599."""
    taken, load = taken_by(IN_VLLM, "cuda", 24 * GIB), load_of(IN_VLLM, "cuda", 24 * GIB)
    assert taken.lacks == LEAST - int(0.3 * 24 * GIB)
    assert taken.parts[0].bytes == LEAST
    assert taken_by(replace(IN_VLLM, share=0.6), "cuda", 24 * GIB).lacks == 0
    # With room for 16 GiB of 24 a share of 0.8 goes down to 0.66; with 12 there is none that is large enough.
    for share, room, others in ((0.3, 0, [0.6]), (0.8, 16, [0.66]), (0.8, 12, [])):
        teacher = replace(IN_VLLM, share=share)
        assert [other.share for other in teacher.other_shares(load, room * GIB)] == others


def test_on_a_cpu_it_is_weights_and_cache_and_libraries_that_are_counted_once():
    """Of 32 rows of 1,024 tokens and a block of 32 the cache would be 1.9 GB; it is at most 4 GiB."""
    cache = 28672 * 2 * (1024 + 32) * 32
    for beside, libraries in ((False, CPU_LIBRARIES), (True, 0)):
        [part] = taken_by(IN_VLLM, "cpu", libraries=not beside).parts
        assert part.bytes == 15_200_000_000 + cache + libraries


@pytest.fixture(scope="module")
def plan():
    words = ("+recipe=grpo_arithmetic", "algorithm=opd", "snapshot.teacher=embedded:tiny-chains")
    return planned(*words, "snapshot.teacher_engine=vllm", "snapshot.teacher_gpu_memory_utilization=0.2")


def test_a_run_counts_both_and_says_which_share_of_the_teacher_fits(plan):
    """On a GPU of 2 GiB, a thousandth of which is less than the 3.3 MB of the teacher's weights."""
    assert roles_text(plan).endswith("; teacher = embedded:tiny-chains in vLLM")
    model, demand = counted(plan)
    demand = replace(demand, device="cuda", device_memory=2 * GIB)
    assert demand.teacher.row_tokens == plan.config.prompts.max_tokens + plan.config.generation.max_tokens
    assert bytes_by_part(model, demand)["teacher in vLLM"] == int(0.2 * 2 * GIB)
    assert memory_shortfall(model, demand) == 0
    tight = replace(demand, teacher=replace(demand.teacher, share=0.001))
    assert memory_shortfall(model, tight) == teacher_memory(tight).lacks > 0
    ways = {key: value for remedy in remedies(model, tight, 0, 2 * GIB) for key, value in remedy.changes.items()}
    fitting = replace(demand.teacher, share=float(ways[TEACHER_SHARE]))
    assert memory_shortfall(model, replace(tight, teacher=fitting)) == 0


def test_shares_of_both_engines_that_are_more_than_a_gpu_are_refused(run_config):
    """0.3, as the teacher has by default, and 0.75 are 1.05."""
    words = ("algorithm=opd", "snapshot.teacher=embedded:tiny-chains", "snapshot.teacher_engine=vllm")
    config = run_config(*words, "generation.vllm.gpu_memory_utilization=0.75")
    key = r"^snapshot\.teacher_gpu_memory_utilization"
    with pytest.raises(UserError, match=rf"{key}: with generation\.vllm\.gpu_memory_utilization=0\.75 .*, got 0\.3; "):
        check_teacher_engine(config, "vllm", "cuda:0", runs_here=False)
    for engine, device in (("transformers", "cuda:0"), ("vllm", "cpu")):
        check_teacher_engine(config, engine, device, runs_here=False)
    check_teacher_engine(run_config(*words), "vllm", "cuda:0", runs_here=False)  # 0.45 and 0.3


def test_a_plan_notes_a_missing_engine_that_a_run_is_refused_for(run_config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing_engine(run_config(), runs_here=True) is None
    config = run_config("algorithm=opd", "snapshot.teacher=embedded:tiny-chains", "snapshot.teacher_engine=vllm")
    said = missing_engine(config, runs_here=False)
    where = "vLLM is not installed here, and the teacher needs it where the run is: "
    assert said.startswith(where + pip_install("rlft[vllm]"))
    assert said.endswith("or use snapshot.teacher_engine=transformers")


def test_a_plan_counts_a_teachers_own_dtype():
    """Two bytes of four a weight in bfloat16."""
    words = ("+recipe=grpo_arithmetic", "algorithm=opd", "snapshot.teacher=embedded:tiny-chains", "model.dtype=float32")
    plans = [planned(*words, "data.size=64", *more) for more in ([], ["snapshot.teacher_dtype=bfloat16"])]
    whole, rounded = (counted(plan)[1].teacher.model for plan in plans)
    assert whole.base_bytes == 4 * whole.parameters
    assert rounded.base_bytes == 2 * whole.parameters
