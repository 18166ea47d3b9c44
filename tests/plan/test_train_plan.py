"""A plan of engines and ranks: where they are, why, and what they take of a GPU's or a machine's memory."""

from dataclasses import replace
from functools import cache

import pytest
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.plan import train_plan
from rlft.plan.fit import check_base, gpu_memory
from rlft.plan.prediction import predict, without_gpu
from rlft.plan.sizes import CUDA_CONTEXT, sizes_of
from rlft.system.disk import size_text
from rlft.types import UserError

GIB = 2**30
ON_A_CARD = ("model.device=cuda", "generation=vllm")


@cache
def planned(*words, limit=80 * GIB):
    few = ("scoring.workers=0", "data.size=64", "data.held_out_size=32")
    return predict(resolve(compose(["+recipe=grpo_arithmetic", *few, *words])), limit)


def row(plan, name):
    [[_, value, note]] = [row for row in plan.sizes if row[0] == name]
    return value, note


def bytes_of(plan):
    return {part.name: part.bytes for part in plan.memory(recompute=plan.demand.recompute)}


@pytest.mark.parametrize("engine", ["vllm", slow("auto")])
def test_an_engine_and_a_rank_share_a_gpu_where_both_fit(engine):
    """`auto` chooses vLLM on the GPU that is not here."""
    assert [row for row in planned(*ON_A_CARD).sizes if row[0] == "cluster"] == []
    plan = planned("model.device=cuda", f"generation.engine={engine}", "cluster.engines=4", "cluster.ranks=4")
    value, why = row(plan, "cluster")
    assert value == "4 engines, 4 ranks"
    assert why.startswith("local: 4 GPUs, pairs: an engine sleeps while its rank trains; together they take 42.")
    parts = bytes_of(plan)
    assert parts["process and libraries"] == 2 * CUDA_CONTEXT
    assert parts["vLLM, its base and KV cache"] == int(0.45 * 80 * GIB)
    assert "bases of the engines" not in parts
    assert row(plan, "copies of the base")[0] == "2"


def test_gpus_are_divided_where_both_do_not_fit():
    plan = planned(*ON_A_CARD, "cluster.engines=4", "cluster.ranks=4", limit=GIB)
    assert row(plan, "cluster")[1] == (
        "local: 8 GPUs, divided: an engine and a rank do not fit on one GPU: 1.61 GiB of 1.00 GiB;"
        " an engine takes 0.95 GiB of 1.00 GiB"
    )
    assert plan.demand.engine is None
    assert bytes_of(plan)["process and libraries"] == CUDA_CONTEXT
    assert plan.fits


def test_a_joined_cluster_is_planned_from_a_laptop():
    words = ("cluster=ray", "cluster.address=10.0.0.1:6379", "cluster.engines=2", "cluster.ranks=1")
    assert row(planned(*ON_A_CARD, *words), "cluster") == (
        "2 engines, 1 rank",
        "ray: 3 GPUs, divided: the GPUs of a cluster that is joined are given out whole;"
        " an engine takes 36.50 GiB of 80.00 GiB",
    )


def test_each_gpu_of_an_engine_holds_a_part_of_its_base():
    """Where vLLM's share of the GPU is less than what it needs at least, of which weights and keys are a part."""
    words = (*ON_A_CARD, "cluster.engines=1", "generation.vllm.gpu_memory_utilization=0.001")
    needed = []
    for gpus in (1, 2):
        plain = compose(["+recipe=grpo_arithmetic", *words, f"cluster.gpus_per_engine={gpus}"])
        plan = without_gpu(resolve(plain)).plan(runs_here=False)
        model = sizes_of(plan.config.model, plan.config.lora)
        needed.append(gpu_memory(plan, model, GIB, absent=True)[1].needed)
    tokens = plan.config.prompts.max_tokens + plan.config.generation.max_tokens
    whole = model.base_bytes + model.key_size * model.itemsize * tokens
    assert needed[0] - needed[1] == pytest.approx(whole / 2, abs=model.itemsize * tokens)
    two = row(planned(*words, "cluster.gpus_per_engine=2", "cluster.placement=divided"), "cluster")[1]
    assert two.startswith("local: 3 GPUs, divided: as cluster.placement says; an engine takes ")
    assert two.endswith(" of 80.00 GiB each")


def test_an_engine_that_does_not_fit_on_its_gpu_is_refused():
    said = r"^cluster\.engines: an engine does not fit: 0\.76 GiB of 0\.59 GiB, got 4; give"
    with pytest.raises(UserError, match=said):
        planned(*ON_A_CARD, "cluster.engines=4", "cluster.placement=divided", limit=600 * 2**20)


def test_engines_on_a_cpu_count_as_often_as_they_are_there():
    words = ("model.device=cpu", "generation=transformers")
    alone, three = planned(*words), planned(*words, "cluster.engines=3", "cluster.ranks=2")
    assert row(three, "cluster") == ("3 engines, 2 ranks", "local: processes on the cores of the CPU")
    one, all_three = bytes_of(alone), bytes_of(three)
    assert all_three["bases of the engines"] == 3 * one["base"]
    assert all_three["keys and values"] == 3 * one["keys and values"]
    assert all_three["activations"] == one["activations"]
    assert three.notes[2:] == [
        "memory is that of the run's own process and its engines; the other rank takes as much again as this process"
    ]


def test_engines_that_follow_all_weights_hold_them_and_are_sent_them_in_buckets():
    """In 32 bits all weights are less than a bucket, of which two are held beside five for each engine."""
    words = ("lora=null", "trainer.lr=1e-4", "model.device=cpu", "generation=transformers")
    alone, three = planned(*words), planned(*words, "cluster.engines=3")
    weights = 4 * three.model.parameters
    assert bytes_of(three)["bases of the engines"] == 3 * bytes_of(alone)["base"] == 3 * weights
    assert bytes_of(three)["weights on their way to engines"] == (2 + 5 * 3) * weights
    assert row(three, "publish") == (
        size_text(weights), "all weights to each engine after each step, in buckets of at most 64 MiB"
    )  # fmt: skip
    assert [name for name, *_ in alone.sizes if name == "publish"] == []
    assert "weights on their way to engines" not in bytes_of(alone)
    on_a_card = planned("lora=null", "trainer.lr=1e-4", *ON_A_CARD, "model.dtype=float32", "cluster.engines=1")
    assert "weights on their way to engines" not in bytes_of(on_a_card), "they are in main memory"
    assert row(on_a_card, "publish")[0] == size_text(weights)


def test_ranks_that_train_all_weights_hold_their_lanes_gradients_and_a_part_of_the_averages():
    """In 32 bits. The embedded model's tensors are small beside a sixth of its weights, so that ranks hold nearly equal
    parts; rank 0 with several lanes holds two gradients, and other ranks one for each of their lanes."""
    whole = ("lora=null", "trainer.lr=1e-4", "model.device=cuda", "model.dtype=float32", "generation=transformers")
    weights = planned(*whole).model.parameters

    def learned(*words):
        return bytes_of(planned(*whole, *words))["optimizer and gradients"]

    assert learned() == 12 * weights
    assert learned("cluster.lanes=4") == 16 * weights, "the sum so far, and the next lane's"
    for ranks, gradients in ((2, 3), (6, 1)):
        averages = learned(f"cluster.ranks={ranks}", "cluster.lanes=6") - 4 * gradients * weights
        assert 8 * weights / ranks <= averages < 8.5 * weights / ranks
    two = planned(*whole, "cluster.ranks=2")
    assert row(two, "ranks")[1].endswith("; each holds all weights, and a part of the optimizer's averages")
    assert bytes_of(two)["exchange of gradients"] == 2 * 4 * weights, "less than two buckets"
    step = [bytes_of(plan)["optimizer's step"] for plan in (planned(*whole), two)]
    assert step[1] == pytest.approx(step[0] / 2, rel=0.05)


# -- a base that ranks divide ------------------------------------------------------------------------------------------
def test_each_rank_holds_its_layers_and_two_buffers():
    """The embedded model has four layers of 2 * 128 * 128 weights in queries and outputs, 2 * 64 * 128 in keys and
    values and 3 * 384 * 128 in the MLP, in 16 bits. Two ranks hold two and two buffers each, so nothing is won; four
    hold one and two buffers."""
    layer = 2 * (2 * 128**2 + 2 * 64 * 128 + 3 * 384 * 128)
    plan = planned(*ON_A_CARD, "cluster.engines=1", "cluster.ranks=4", "cluster.shard_base=true")
    assert row(plan, "ranks")[1].endswith("; each holds a part of the base's layers")

    def base(device=plan.demand.device, **changes):
        ranks = replace(plan.demand.ranks, **changes)
        return bytes_of(replace(plan, demand=replace(plan.demand, ranks=ranks, device=device)))["base"]

    whole = base(sharded=False)
    assert [base(number=ranks) for ranks in (1, 2, 4)] == [whole - fewer * layer for fewer in (2, 0, 1)]
    assert base("cpu") == whole + 2 * layer, "in main memory rank 0 has all layers, and the buffers"


def test_dividing_the_base_is_named_where_it_makes_a_run_fit():
    plan = planned(*ON_A_CARD, "cluster.engines=1", "cluster.ranks=4", "cluster.placement=divided")
    limit = plan.peak - 2**18  # a layer is 393,216 bytes
    told = {str(remedy) for remedy in replace(plan, limit=limit).remedies()}
    assert "cluster.shard_base=true" in told
    with_dora = planned("model.device=cuda", "generation=transformers", "cluster.engines=1", "lora.use_dora=true")
    assert with_dora.demand.ranks.sharded is None


@pytest.mark.parametrize(
    ("words", "gpu", "text"),
    [
        (("cluster.ranks=4", "cluster.engines=1"), 9, "set cluster.shard_base=true: each of the 4 ranks then holds 8"),
        (("cluster.ranks=2", "cluster.engines=1"), 9, "cluster.shard_base=true cluster.engines=1 cluster.ranks=4 (or"),
        ((), 9, "model.path: the base takes 10.00 GiB, and a GPU has 9.00 GiB, got embedded:tiny-arithmetic; divide"),
        (("cluster.ranks=2", "cluster.engines=1", "cluster.shard_base=true"), 9,
         "what a rank holds of the base takes 10.00 GiB, and a GPU has 9.00 GiB, got"),
        (("cluster.ranks=2", "cluster.engines=1"), 3, "use a smaller model, or model.quantization=4bit"),
    ],
)  # fmt: skip
def test_a_base_that_no_gpu_can_hold_is_refused_with_the_numbers(words, gpu, text):
    """10 GiB, of which four layers of 2 GiB; four ranks hold 2 + 2 + 2 * 2 = 8 GiB of it each, sixteen no less."""
    plan = resolve(compose(["+recipe=grpo_arithmetic", *words])).plan(runs_here=False)
    model = sizes_of(plan.config.model, plan.config.lora)
    large = replace(model, itemsize=2, base_bytes=10 * GIB, layers=(GIB,) * 4)
    with pytest.raises(UserError) as refused:
        check_base(plan.config, large, gpu * GIB)
    assert text in str(refused.value)
    check_base(plan.config, large, 10 * GIB)


def test_layers_that_are_not_known_are_not_divided(monkeypatch):
    monkeypatch.setattr(train_plan, "decoder_layers", lambda model: [])
    said = r"^cluster\.shard_base: the layers of a qwen2 are not one list, or have weights"
    with pytest.raises(UserError, match=said):
        planned("cluster.engines=1", "cluster.ranks=2", "cluster.shard_base=true")


def test_a_plan_says_who_shares_tokens():
    for ranks, said in (
        (4, "share 2 lanes; a resume may have one of these numbers of ranks: 2, 4; 2 share the tokens of each pass"),
        (2, "share 1 lane; 2 share the tokens of each pass"),
    ):
        assert row(planned(f"cluster.ranks={ranks}", "cluster.sequence_ranks=2"), "ranks")[1] == said
