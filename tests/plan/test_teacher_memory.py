"""What a teacher that is a separate model takes, against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.memory import MemoryPart, ModelSizes, When, busiest, peak
from rlft.generation.vllm.memory import CPU_LIBRARIES
from rlft.plan.fit import remedies
from rlft.plan.memory_demand import sizes_of
from rlft.plan.memory_parts import Demand, memory_shortfall, parts, teacher_memory, teachers_pass
from rlft.plan.teacher_memory import TEACHER_SHARE, TeacherDemand
from rlft.plan.teachers import check_teacher_engine, missing_engine
from rlft.types import UserError

GIB = 2**30
MODEL = ModelSizes(
    parameters=7_600_000_000, base_bytes=15_200_000_000, itemsize=2, lora=0, adapted=0, adapter=None,
    key_size=2 * 4 * 128 * 28, packed=True, kernels=None, linear=6_500_000_000,
    config=SimpleNamespace(vocab_size=152_064, hidden_size=3584, intermediate_size=18944),
)  # fmt: skip
IN_VLLM = TeacherDemand(model=MODEL, row_tokens=1023, prompt_tokens=300, share=0.3)
# Weights; 1,024 tokens x (3 x 18,944 + 3 x 3,584) x 2 bytes; logits of 32 rows twice in float32; the keys and values of
# 1,023 tokens and the one that is sampled, 28,672 elements of 2 bytes each.
LEAST = 15_200_000_000 + 1024 * 67584 * 2 + 2 * 32 * 152064 * 4 + 1024 * 28672 * 2


def test_by_transformers_it_is_its_weights() -> None:
    [part] = replace(IN_VLLM, share=None).memory("cuda", 80 * GIB, beside_vllm=True).parts
    assert (part.name, part.bytes, part.when, part.key) == (
        "teacher", 15_200_000_000, When.always, "snapshot.teacher",
    )  # fmt: skip


def test_by_transformers_the_largest_pass_of_its_rows_is_counted_beside_an_update_not_with_it() -> None:
    """One group of 4 completions of 200 after 300 tokens: 1,100 tokens of 3 x 18,944 + 3 x 3,584 elements of 2 bytes,
    and of 800 x 152,064 logits a chunk of 2^26 twice in float32. In padded rows all logits of 4 x 500 tokens, 2 + 2 x 4
    bytes each.
    """
    demand = Demand(
        adapters=1, trainable=0, prompt_tokens=100, completion_tokens=200, group=4, rows=16, update_rows=16,
        token_budget=1100, recompute=False, device="cuda", teacher=replace(IN_VLLM, share=None),
    )  # fmt: skip
    [part] = teachers_pass(demand)
    assert (part.bytes, part.when) == (1100 * 67_584 * 2 + 2**26 * 8, When.annotating)
    padded = replace(IN_VLLM, share=None, model=replace(MODEL, packed=False))
    [part] = teachers_pass(replace(demand, token_budget=2000, teacher=padded))
    assert part.bytes == 2000 * 67_584 * 2 + 2000 * 152_064 * 10
    assert teachers_pass(replace(demand, teacher=IN_VLLM)) == []
    beside = [MemoryPart(name=when, bytes=size, when=when) for when, size in zip(When, (1, 20, 400, 300), strict=True)]
    assert (peak(beside), busiest(beside)) == (401, When.annotating)


def test_on_a_gpu_it_is_its_share_and_the_log_probs_of_a_forwards_tokens_beside_it() -> None:
    """1,023 tokens of at most 1,024: logits of 2 bytes, log-probs of 4, and 4 to sort them, of 152,064 each."""
    taken = IN_VLLM.memory("cuda", 80 * GIB, beside_vllm=False)
    assert [(part.bytes, part.when, part.key) for part in taken.parts] == [
        (int(0.3 * 80 * GIB), When.always, TEACHER_SHARE),
        (1023 * 152_064 * 10, When.updating, "snapshot.teacher"),
    ]
    assert taken.lacks == 0
    long = replace(IN_VLLM, row_tokens=9000).memory("cuda", 80 * GIB, beside_vllm=False)
    assert long.parts[1].bytes == 1024 * 152_064 * 10


def test_a_share_in_which_vllm_does_not_start_is_told_and_so_is_one_in_which_it_does() -> None:
    """0.3 of 24 GiB are 7.73 GB; weights and the rest are 15.44 GB, of 25.77 GB the share 0.599."""
    taken = IN_VLLM.memory("cuda", 24 * GIB, beside_vllm=False)
    assert taken.lacks == LEAST - int(0.3 * 24 * GIB)
    assert taken.parts[0].bytes == LEAST
    assert [other.share for other in IN_VLLM.other_shares(24 * GIB, 0)] == [0.6]
    assert replace(IN_VLLM, share=0.6).memory("cuda", 24 * GIB, beside_vllm=False).lacks == 0
    # With room for 16 GiB of 24 a share of 0.8 goes down to 0.66; with 12 there is none that is large enough.
    assert [other.share for other in replace(IN_VLLM, share=0.8).other_shares(24 * GIB, 16 * GIB)] == [0.66]
    assert list(replace(IN_VLLM, share=0.8).other_shares(24 * GIB, 12 * GIB)) == []


def test_on_a_cpu_it_is_weights_and_cache_and_libraries_that_are_counted_once() -> None:
    """Of 32 rows of 1,024 tokens and a block of 32 the cache would be 1.9 GB; it is at most 4 GiB."""
    cache = 28672 * 2 * (1024 + 32) * 32
    for beside, libraries in ((False, CPU_LIBRARIES), (True, 0)):
        [part] = IN_VLLM.memory("cpu", 0, beside_vllm=beside).parts
        assert part.bytes == 15_200_000_000 + cache + libraries


@pytest.fixture(scope="module")
def plan():
    words = ["+recipe=grpo_arithmetic", "algorithm=opd", "snapshot.teacher=embedded:tiny-chains"]
    words += ["snapshot.teacher_engine=vllm", "snapshot.teacher_gpu_memory_utilization=0.2"]
    return resolve(compose(words)).plan()


def test_a_run_counts_both_and_says_which_share_of_the_teacher_fits(plan) -> None:
    """On a GPU of 2 GiB, a thousandth of which is less than the 3.3 MB of the teacher's weights."""
    model = sizes_of(plan.config.model, plan.config.lora)
    demand = replace(plan.demand(model, recompute=False), device="cuda", device_memory=2 * GIB)
    assert demand.teacher is not None
    assert demand.teacher.row_tokens == plan.config.prompts.max_tokens + plan.config.generation.max_tokens
    taken = {part.name: part.bytes for part in parts(model, demand, 0)}
    assert taken["teacher in vLLM"] == int(0.2 * 2 * GIB)
    assert memory_shortfall(model, demand) == 0
    tight = replace(demand, teacher=replace(demand.teacher, share=0.001))
    assert memory_shortfall(model, tight) == teacher_memory(tight).lacks > 0
    ways = {key: value for remedy in remedies(model, tight, 0, 2 * GIB) for key, value in remedy.changes.items()}
    assert (
        memory_shortfall(model, replace(tight, teacher=replace(demand.teacher, share=float(ways[TEACHER_SHARE])))) == 0
    )


def test_shares_of_both_engines_that_are_more_than_a_gpu_are_refused(run_config) -> None:
    """0.3, as the teacher has by default, and 0.75 are 1.05."""
    words = ("algorithm=opd", "snapshot.teacher=embedded:tiny-chains", "snapshot.teacher_engine=vllm")
    config = run_config(*words, "generation.vllm.gpu_memory_utilization=0.75")
    said = (
        r"^snapshot\.teacher_gpu_memory_utilization: with generation\.vllm\.gpu_memory_utilization=0\.75 .*, got 0\.3; "
    )
    with pytest.raises(UserError, match=said):
        check_teacher_engine(config, "vllm", "cuda:0", runs_here=False)
    for engine, device in (("transformers", "cuda:0"), ("vllm", "cpu")):
        check_teacher_engine(config, engine, device, runs_here=False)
    check_teacher_engine(run_config(*words), "vllm", "cuda:0", runs_here=False)  # 0.45 and 0.3


def test_a_plan_notes_a_missing_engine_that_a_run_is_refused_for(run_config, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing_engine(run_config(), runs_here=True) is None
    config = run_config("algorithm=opd", "snapshot.teacher=embedded:tiny-chains", "snapshot.teacher_engine=vllm")
    note = missing_engine(config, runs_here=False)
    assert note is not None
    assert note.startswith("vLLM is not installed here, and the teacher needs it where the run is: pip install")
    assert note.endswith("or use snapshot.teacher_engine=transformers")


def test_the_start_up_table_says_what_computes_the_teacher(plan) -> None:
    from rlft.plan.train_plan import roles_text

    assert roles_text(plan).endswith("; teacher = embedded:tiny-chains in vLLM")


def test_a_plan_counts_a_teachers_own_dtype() -> None:
    """Two bytes of four a weight in bfloat16."""
    words = ["+recipe=grpo_arithmetic", "algorithm=opd", "snapshot.teacher=embedded:tiny-chains", "model.dtype=float32"]

    def teacher(*more: str) -> ModelSizes:
        plan = resolve(compose([*words, "data.size=64", *more])).plan(runs_here=False)
        demand = plan.demand(sizes_of(plan.config.model, plan.config.lora), recompute=False)
        assert demand.teacher is not None
        return demand.teacher.model

    whole, rounded = teacher(), teacher("snapshot.teacher_dtype=bfloat16")
    assert whole.base_bytes == 4 * whole.parameters
    assert rounded.base_bytes == 2 * whole.parameters
