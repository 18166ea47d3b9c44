"""Decoding with each prompt's keys once, on a CPU and, through stand-ins for flash attention, as a CUDA GPU does it."""

import flash_stand_in
import pytest
import torch
from in_one_test import each
from slow_cases import slow, slow_but

from rlft.config.model import KernelChoice
from rlft.generation.repeated_cache import RepeatedCache
from rlft.model.forward import choose, open_prefix_cache
from rlft.model.kernels import flash_attention, selection
from rlft.model.kernels.prefix_cache import FlashPrefixCache, PrefixCache

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]


def whole_logits(model, rows):
    """`[R, V]`: the logits of each row's last token, a row at a time."""
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1] for row in rows])


def check(logits, model, rows):
    torch.testing.assert_close(logits, whole_logits(model, rows), rtol=1e-6, atol=1e-6)


def longer(rows, tokens):
    return [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]


FAMILIES = ["llama", "llama_one_kv_head", "qwen3", "gemma", "gpt_oss", "mistral_window", "granite", "diffllama"]
QUICK = [
    kind if kind in ("llama_one_kv_head", "gpt_oss", "mistral_window", "diffllama") else slow(kind) for kind in FAMILIES
]


@pytest.fixture(params=[PrefixCache, FlashPrefixCache], ids=["blocks", "flash"])
def kind_of_cache(request):
    if request.param is FlashPrefixCache:
        request.getfixturevalue("gpu")
    return request.param


@pytest.mark.parametrize("kind", QUICK)
def test_logits_are_those_of_the_whole_row_at_every_step_and_after_rows_have_left(kind, random_model, kind_of_cache):
    model = random_model(kind).double()
    model.set_experts_implementation("eager")  # the others have no float64
    cache = open_prefix_cache(choose(model), PROMPTS, 7)
    assert type(cache) is kind_of_cache
    rows = [list(p) for p in PROMPTS for _ in range(3)]
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logits = cache.prefill(3)
        for step in range(7):
            check(logits, model, rows)
            if step in (2, 4):
                kept = torch.tensor([0, 2, 3, 8] if step == 2 else [1, 3])  # first no row of a prompt less, then two
                cache.keep(kept)
                rows = [rows[i] for i in kept.tolist()]
            tokens = torch.randint(1, 100, (len(rows),), generator=dice)
            rows = longer(rows, tokens)
            flash_stand_in.CALLS.clear()
            logits = cache.step(tokens)
            assert bool(flash_stand_in.CALLS) == (kind_of_cache is FlashPrefixCache)


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("steps", slow_but(2, [0, 2]))
def test_tokens_that_go_through_together_have_the_logits_of_their_rows_whatever_was_there_before(
    kind, steps, random_model, kind_of_cache
):
    model, dice = random_model(kind).double(), torch.Generator().manual_seed(steps)
    model.set_experts_implementation("eager")
    cache = open_prefix_cache(choose(model), PROMPTS, 9)
    rows = [list(p) for p in PROMPTS for _ in range(2)]
    with torch.no_grad():
        cache.prefill(2)
        for _ in range(steps):
            tokens = torch.randint(1, 100, (len(rows),), generator=dice)
            rows, _ = longer(rows, tokens), cache.step(tokens)
        assert cache.checks() == (kind != "mistral_window")
        if not cache.checks():  # its window is shorter than these rows
            return
        held = torch.full((len(rows),), steps)
        for width in (3, 1, 4, 2, 2):
            lengths = torch.randint(1, width + 1, held.shape, generator=dice).minimum(9 - held)
            row_N = torch.arange(len(rows)).repeat_interleave(lengths)
            place_N = torch.cat([torch.arange(first, first + n) for first, n in zip(held, lengths, strict=True)])
            together = torch.randint(1, 100, row_N.shape, generator=dice)
            found = cache.check(together, row_N, place_N).split(lengths.tolist())
            drafts = [draft.tolist() for draft in together.split(lengths.tolist())]
            for row, draft, logits in zip(rows, drafts, found, strict=True):
                check(logits, model, [row + draft[: i + 1] for i in range(len(draft))])
            kept = (torch.rand(held.shape, generator=dice) * lengths).long().add(1).minimum(8 - held)
            rows = [row + draft[:n] for row, draft, n in zip(rows, drafts, kept.tolist(), strict=True)]
            held = held + kept  # tokens after these are forgotten
            if width == 4:
                cache.keep(torch.tensor([1, 2, 5]))
                rows, held = [rows[i] for i in (1, 2, 5)], held[[1, 2, 5]]


UNLIKE = {"rank_pattern": {"k_proj": 3, "gate_proj": 1}, "alpha_pattern": {"v_proj": 5, "up_proj": 3}}
ADAPTERS = [
    None, {"targets": "all-linear"}, {"targets": ["q_proj", "v_proj", "up_proj"]}, {"targets": "all-linear"} | UNLIKE
]  # fmt: skip


@pytest.mark.parametrize(
    "kind", slow_but("qwen3", ["qwen2", "llama_one_kv_head", "qwen3", "mistral_window", "qwen2_window", "smollm3"])
)
@each("adapter", ADAPTERS)
def test_layers_that_are_known_are_decoded_as_a_whole_whatever_adapter_they_have(
    kind, adapter, random_model, with_lora, gpu
):
    model = random_model(kind).double()
    kernels = selection.install(model, KernelChoice.auto, own_attention=True)
    if adapter is not None:
        with_lora(model, ours=True, **adapter)
    rows = [[*prompt, row] for row, prompt in enumerate(PROMPTS) for _ in range(2)]
    with torch.no_grad():
        cache = open_prefix_cache(choose(model, kernels), PROMPTS, 6)
        cache.prefill(2)
        gpu.clear()
        for step in range(6):
            logits = cache.step(torch.tensor([row[-1] for row in rows]))
            check(logits, model, rows)
            if step == 2:
                cache.keep(torch.tensor([1, 4, 5]))
                rows = [rows[i] for i in (1, 4, 5)]
            rows = [[*row, 5 * step + i] for i, row in enumerate(rows)]
    number = 6 * model.config.num_hidden_layers
    assert gpu == {"decoded_mlp": number} | ({} if kind == "smollm3" else {"decoded_attention": number})


def test_a_prompts_keys_are_there_once_however_large_its_group(random_model, kind_of_cache):
    model = random_model("llama")
    choose(model)
    cache = kind_of_cache(model, PROMPTS, 100)
    with torch.no_grad():
        cache.prefill(50)
    keys, values = cache._prompt[0]
    number = len(PROMPTS) if kind_of_cache is PrefixCache else sum(map(len, PROMPTS))
    assert keys.shape[0] == values.shape[0] == number


def test_in_bfloat16_it_is_as_near_to_the_truth_as_transformers_own_cache(random_model, gpu):
    model = random_model("llama", dtype=torch.bfloat16)
    kernels = selection.install(model, KernelChoice.auto, own_attention=True)
    forward, exact = choose(model, kernels), random_model("llama", dtype=torch.bfloat16).double()
    dice = torch.Generator().manual_seed(0)
    rows = [list(p) for p in PROMPTS for _ in range(2)]
    caches = open_prefix_cache(forward, PROMPTS, 12), RepeatedCache(model, PROMPTS, 12, model.device)
    assert isinstance(caches[0], FlashPrefixCache)
    errors = [0.0, 0.0]
    with torch.no_grad():
        found = [cache.prefill(2) for cache in caches]
        for _ in range(12):
            truth = whole_logits(exact, rows)
            for i, logits in enumerate(found):
                errors[i] += float((logits.double() - truth).square().mean())
            tokens = torch.randint(1, 100, (len(rows),), generator=dice)
            rows = longer(rows, tokens)
            found = [cache.step(tokens) for cache in caches]
    assert errors[0] <= 1.4**2 * errors[1], errors


def test_a_gpu_has_its_own_where_it_takes_the_heads(random_model, monkeypatch):
    """Scores that are capped are decoded in blocks."""
    capped = random_model("gemma2").double()
    forward = choose(random_model("llama"))
    assert type(open_prefix_cache(forward, PROMPTS, 4)) is PrefixCache
    asked = []

    def takes(dtype, head_size, device, *, caps):
        asked.append((dtype, head_size, device.type))
        return not caps

    monkeypatch.setattr(flash_attention, "takes", takes)
    assert type(open_prefix_cache(forward, PROMPTS, 4)) is FlashPrefixCache
    assert asked == [(torch.float32, 8, "cpu")]
    cache, rows = open_prefix_cache(choose(capped), PROMPTS, 7), [list(prompt) for prompt in PROMPTS]
    assert type(cache) is PrefixCache
    with torch.no_grad():
        logits = cache.prefill(1)
        for token in (7, 8, 9):
            check(logits, capped, rows)
            rows, logits = longer(rows, (token, 3, 4)), cache.step(torch.tensor([token, 3, 4]))


def test_a_gpu_that_does_not_take_the_heads_has_none_and_neither_have_models_with_another_attention(
    random_model, monkeypatch
):
    assert open_prefix_cache(choose(random_model("falcon")), PROMPTS, 4) is None
    forward = choose(random_model("llama"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(type(forward.model), "device", torch.device("cuda"))  # where its float32 goes through a mask
    assert open_prefix_cache(forward, PROMPTS, 4) is None
