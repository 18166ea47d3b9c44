"""Whether a run fits, what to change where it does not, and what `auto` becomes on a GPU."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from in_one_test import each
from plans import counted, planned
from slow_cases import slow, slow_but
from transformers import AutoTokenizer, Qwen2Config

from rlft.commands.plan import read_bytes
from rlft.config.model import LESS_MEMORY
from rlft.config.resolved import GPU_TOKENS
from rlft.generation.memory import peak
from rlft.plan import fit, sizes
from rlft.plan.demand import Ranks
from rlft.plan.fit import LOWERED_TOKENS, fit_to_device, largest_budget, remedies
from rlft.plan.memory_parts import MARGIN, longest_rows, parts
from rlft.plan.sizes import CUDA_CONTEXT, on_a_gpu
from rlft.types import UserError

MIB = 2**20


@pytest.fixture(scope="module")
def wide():
    """(model, demand) of a run whose activations are what is largest."""
    return counted(planned("+recipe=grpo_arithmetic", "generation=transformers", "token_budget=16000"))


@each(
    ("text", "expected"),
    [("24GiB", 24 * 2**30), ("1.5 GB", 1_500_000_000), ("512mib", 512 * MIB), ("8000000000", 8_000_000_000)],
)
def test_sizes_are_read_as_they_are_written(text, expected):
    assert read_bytes(text) == expected


NO_SIZES = ["", "GiB", "24 gigs", "-3GB", "1e9", "24GiB/h", "24GiB x 2", "80GB,80GB", "24gbit", "24,5GiB", "24.5.6GiB",
            "1_000GB"]  # fmt: skip


@each("text", NO_SIZES)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match=r"^device_memory: must be a size, .*write it as 24GiB"):
        read_bytes(text)


def test_the_largest_budget_fits_and_a_larger_one_does_not(wide):
    model, demand = wide
    limit = peak(parts(model, demand, 0)) - 100 * MIB
    found = largest_budget(model, demand, 0, limit)
    assert peak(parts(model, replace(demand, token_budget=found), 0)) <= limit
    group = demand.rows.prompt_tokens + demand.rows.group * demand.rows.completion_tokens
    assert peak(parts(model, replace(demand, token_budget=found + 64 + group), 0)) > limit


def test_where_not_even_the_longest_row_fits_there_is_no_budget(wide):
    model, demand = wide
    assert largest_budget(model, demand, 0, model.base_bytes) is None


def test_every_way_that_is_told_fits(wide):
    model, demand = wide
    needed = peak(parts(model, demand, 0))
    limit = needed - 150 * MIB
    told = {key: way for way in remedies(model, demand, 0, limit) for key in way.changes}
    assert {"token_budget", "model.gradient_checkpointing"} <= told.keys()
    assert all(way.peak <= limit and len(way.changes) == 1 for way in told.values())
    budget = int(told["token_budget"].changes["token_budget"])
    assert peak(parts(model, replace(demand, token_budget=budget), 0)) == told["token_budget"].peak


def test_where_no_single_key_suffices_the_least_is_told_if_it_does(wide):
    model, demand = wide
    longest, networks = demand.rows.tokens, replace(demand.networks, adapters=demand.networks.adapters + 1)
    bare = replace(demand, token_budget=longest, recompute=True, engine=None, networks=networks)
    limit = peak(parts(model, bare, 0)) + 4 * MIB  # the completions of one group, but no sums
    [least] = remedies(model, demand, 0, limit)
    assert str(least) == (
        f"token_budget={longest} model.gradient_checkpointing=true generation.transformers.batch_size=8"
        " generation.transformers.weights=apart"
    )
    assert least.peak <= limit
    assert remedies(model, demand, 0, model.base_bytes) == []


WORDS = (
    "+recipe=grpo_arithmetic",
    "model.device=cpu",
    "data.size=64",
    "data.held_out_size=32",
    "generation=transformers",
)


@pytest.fixture
def on_gpu(monkeypatch):
    """Plans sized as if for a GPU of which so many bytes may be filled, with its budget for `auto`."""

    def of(num_bytes, *words):
        plan = planned(*WORDS, *words)
        if plan.plain["token_budget"] == "auto":
            plan = replace(plan, config=replace(plan.config, token_budget=GPU_TOKENS))
        for module in (fit, sizes):
            monkeypatch.setattr(module, "resolve_device", lambda name: torch.device("cuda"))
        total = math.ceil(num_bytes / (1 - MARGIN)) + 1
        properties = SimpleNamespace(total_memory=total, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return plan

    return of


def needed(plan, budget, recompute):
    model, demand = counted(plan, recompute)
    asked = on_a_gpu(demand, plan, 0, absent=False)
    return peak(parts(model, replace(asked, token_budget=budget), CUDA_CONTEXT))


@pytest.mark.parametrize("checkpointing", ["auto", slow("false")])
def test_a_small_one_takes_the_largest_that_fits_and_a_large_one_keeps_its_budget(checkpointing, on_gpu):
    words, recompute = f"model.gradient_checkpointing={checkpointing}", checkpointing == "auto"
    plan = on_gpu(0, words)
    limit = (needed(plan, GPU_TOKENS, recompute) + needed(plan, 512, recompute)) // 2
    config = fit_to_device(on_gpu(limit, words)).config
    found, group = config.token_budget, 22 + 8 * 48
    assert group < found < GPU_TOKENS
    assert needed(plan, found, recompute) <= limit < needed(plan, found + 64 + group, recompute)
    assert config.model.gradient_checkpointing is recompute
    large = fit_to_device(on_gpu(80 * 2**30, words)).config
    assert (large.token_budget, large.model.gradient_checkpointing) == (GPU_TOKENS, False)


def test_the_budget_is_lowered_before_activations_are_computed_again(on_gpu):
    """All rows of a step are 12,992 tokens, more than fit."""
    plan = on_gpu(0)
    limit = (needed(plan, LOWERED_TOKENS, False) + needed(plan, GPU_TOKENS, False)) // 2
    for memory, recomputes in ((limit, False), (needed(plan, LOWERED_TOKENS, False) - MIB, True)):
        config = fit_to_device(on_gpu(memory)).config
        assert config.model.gradient_checkpointing is recomputes
        assert needed(plan, config.token_budget, recomputes) <= memory < needed(plan, GPU_TOKENS, False)


def test_a_step_of_fewer_prompts_is_offered_where_its_batch_is_too_large(on_gpu):
    words = ("prompts_per_step=256", "group_size=16", "data.size=512", "token_budget=1024", "eval.num_prompts=256")
    plan = on_gpu(0, *words)
    model, demand = counted(plan)
    demand = replace(on_a_gpu(demand, plan, 0, absent=False), recompute="offload")
    limit = peak(parts(model, demand.with_groups(70), CUDA_CONTEXT))
    [way] = [way for way in remedies(model, demand, CUDA_CONTEXT, limit) if "prompts_per_step" in way.changes]
    assert (way.changes, way.peak) == (
        {"prompts_per_step": "64"}, peak(parts(model, demand.with_groups(64), CUDA_CONTEXT)),
    )  # fmt: skip
    assert way.peak <= limit < peak(parts(model, demand.with_groups(128), CUDA_CONTEXT))
    first, second = demand.work.decodings
    work = replace(demand.work, decodings=(first, replace(second, num_prompts=256)))
    assert [each.num_prompts for each in replace(demand, work=work).with_groups(64).work.decodings] == [64, 256]
    of_lanes = remedies(model, replace(demand, ranks=Ranks(gradients=2)), CUDA_CONTEXT, limit)
    assert not [way for way in of_lanes if "prompts_per_step" in way.changes]


def test_a_group_of_more_rows_than_a_micro_batch_has_is_not_made():
    assert len(longest_rows(22, 48, 10**9, 10**12, 4096).rewards) == 4096 // 48 + 2


LONG_ROW = (
    "prompts.max_tokens=64", "generation.max_tokens=32704", "group_size=2", "prompts_per_step=2", "lora.rank=16",
    "model.dtype=bfloat16", "generation.transformers.batch_size=1",
)  # fmt: skip


@pytest.fixture
def of_1_5b(tmp_path, tiny_path):
    """A folder with the config of Qwen2.5-1.5B and another tokenizer, but no weights."""
    Qwen2Config(
        hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960,
        vocab_size=151936, max_position_embeddings=131072, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path)
    return tmp_path


def test_a_row_of_32k_tokens_of_a_1_5b_model_fits_into_24_gb(of_1_5b, on_gpu):
    """Its logits are no N x V matrix, its activations no layers x N x 8960 one, and with offloaded inputs most is the
    base (3.1 GB)."""
    plan = on_gpu(0, *LONG_ROW, f"model.path={of_1_5b}")
    model, demand = counted(plan)
    demand = replace(on_a_gpu(demand, plan, 24 * 10**9, absent=False), engine=None)
    peaks = {how: peak(parts(model, replace(demand, recompute=how), CUDA_CONTEXT)) for how in (False, *LESS_MEMORY)}
    assert peaks[False] > 24 * 10**9 > peaks[True] > peaks["tiles"] > peaks["offload"]
    tokens = demand.rows.tokens
    assert peaks["tiles"] - peaks["offload"] == (28 - 1) * tokens * 1536 * 2, "one layer's input stays"


def test_ranks_that_share_a_row_have_a_part_of_its_activations_each(of_1_5b, on_gpu):
    """Base, adapters and the batch are whole on every rank."""
    plan = on_gpu(0, *LONG_ROW, f"model.path={of_1_5b}", "cluster.ranks=4", "cluster.sequence_ranks=4")
    model, demand = counted(plan, recompute=True)
    demand = replace(on_a_gpu(demand, plan, 24 * 10**9, absent=False), engine=None)
    assert demand.ranks.sharing == 4
    of_one, of_four = (
        {part.name: part.bytes for part in parts(model, replace(demand, ranks=ranks), CUDA_CONTEXT)}
        for ranks in (replace(demand.ranks, sharing=1), demand.ranks)
    )
    halved = {name for name, size in of_one.items() if of_four[name] != size}
    assert halved == {"activations", "gradients of activations"}
    assert of_one["activations"] / 4 <= of_four["activations"] <= of_one["activations"] / 4 + 2**22
    # Where multiprocessors have fewer heads, more of them add up gradients of each.
    assert of_four["gradients of activations"] > of_one["gradients of activations"] / 2
    assert sum(of_four[name] for name in halved) < sum(of_one[name] for name in halved)


@pytest.mark.parametrize("how", slow_but("tiles", LESS_MEMORY))
def test_as_much_is_computed_again_as_a_row_needs_that_fits_into_no_smaller_budget(how, of_1_5b, on_gpu):
    """A row of 32,768 tokens has eight tiles."""
    words = (*LONG_ROW, f"model.path={of_1_5b}", "token_budget=32768")
    limit = needed(on_gpu(0, *words), 32768, how)
    assert fit_to_device(on_gpu(limit, *words)).config.model.gradient_checkpointing == how
    less = fit_to_device(on_gpu(limit - MIB, *words)).config.model.gradient_checkpointing
    assert less == {True: "tiles", "tiles": "offload", "offload": True}[how], "True again where nothing fits"


def test_a_number_that_a_user_gave_is_kept_and_so_is_a_cpus(on_gpu, monkeypatch):
    assert fit_to_device(on_gpu(600 * 2**20, "token_budget=9000")).config.token_budget == 9000
    monkeypatch.setattr(fit, "resolve_device", lambda name: torch.device("cpu"))
    plan = planned(*WORDS)
    assert fit_to_device(plan) is plan


def test_vllms_weights_are_a_copy_where_two_bases_fit_and_the_run_records_which(on_gpu):
    words, seen = ("generation=vllm", "model.dtype=bfloat16", "model.gradient_checkpointing=false"), []
    for mib in (200, 1000, 2800):
        plan = on_gpu(mib * MIB, *words, "token_budget=512")
        found = fit_to_device(plan)
        weights = found.config.generation.named("vllm").weights
        assert found.plain["generation"]["vllm"] == {**plan.plain["generation"]["vllm"], "weights": weights}
        assert plan.config.generation.named("vllm").weights == "auto"
        model, demand, limit = fit.planned_here(found)
        assert peak(parts(model, demand, CUDA_CONTEXT)) <= limit or weights == "adapter"
        seen.append(weights)
    assert seen[0] == "adapter"
    assert seen[-1] == "copy"
    dora = fit_to_device(on_gpu(100 * MIB, *words, "lora.use_dora=true"))
    assert dora.config.generation.named("vllm").weights == "copy", "vLLM has no other way to serve it"
    whole = fit_to_device(on_gpu(3000 * MIB, *words, "lora=null", "model.dtype=float32"))
    assert whole.config.generation.named("vllm").weights == "adapter", "nothing is added up"


def test_where_nothing_fits_the_rehearsal_is_to_say_so(on_gpu):
    found = fit_to_device(on_gpu(300 * 2**20)).config
    assert (found.token_budget, found.model.gradient_checkpointing) == (GPU_TOKENS, True)


def test_a_learned_reward_that_says_auto_takes_the_lowered_budget_and_one_with_a_number_keeps_it(on_gpu):
    words = ("reward=[exact_match,learned]", "reward_model.refresh_every=5", "reward_model.labels=exact_match")
    plan = on_gpu(0, *words)
    limit = (needed(plan, GPU_TOKENS, True) + needed(plan, 512, True)) // 2
    found = fit_to_device(on_gpu(limit, *words)).config
    assert found.token_budget < GPU_TOKENS
    assert found.reward["learned"]["token_budget"] == found.token_budget
    assert "token_budget" not in found.reward["exact_match"]
    kept = fit_to_device(on_gpu(limit, *words, "reward.learned.token_budget=700")).config
    assert kept.reward["learned"]["token_budget"] == 700
