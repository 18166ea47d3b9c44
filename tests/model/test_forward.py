from dataclasses import replace
from functools import partial

import pytest
import torch
from in_one_test import each
from slow_cases import slow
from torch.utils._python_dispatch import TorchDispatchMode

from rlft.model import activations
from rlft.model.critic import ScalarHead
from rlft.model.forward import Forward, choose, packed_forward, padded_forward
from rlft.model.kernels.lm_head import head_of
from rlft.model.packing import num_packed_tokens, pack

PACKED = ["llama", "llama_one_kv_head", "qwen2", "qwen3", "gemma", "mistral", "gpt2"]
MORE = ["mistral_window", "qwen2_window", "gemma2", "gemma2_full", "granite", "gpt_oss"]
PADDED = {
    "falcon": "FalconForCausalLM has an attention of its own",
    "lfm2": "Lfm2ForCausalLM has layers in which a token sees those before it, and which are not those of packed rows",
    "doge": "DogeAttention has a mask of its own",
}
"""{kind: why its rows are not packed}."""


def close(value, expected, tolerance):
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def results(weighted):
    """(log-probs, entropy and values, if a head gives some; gradients of these parameters) of one forward."""

    def compute(run, batch, parameters):
        outputs = run(batch)
        if not isinstance(outputs, tuple):
            outputs = outputs.logprobs, outputs.entropy, outputs.values
        outputs = [x for x in outputs if x is not None]
        gradients = torch.autograd.grad(weighted(*outputs), parameters, retain_graph=True)  # rows may be asked again
        return [x.detach() for x in outputs], gradients

    return compute


def check(found, expected, tolerance):
    for n, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        # A small value has the rounding of the large terms of its sum.
        scale = float(other.abs().max()) if n == 2 or len(found[0]) == 1 else 1.0
        close(one / scale, other / scale, tolerance)
    scale = max(gradient.abs().max() for gradient in expected[1])
    close([g / scale for g in found[1]], [g / scale for g in expected[1]], tolerance)


def some_head(model, seed=0):
    """A scalar head that says something."""
    head = ScalarHead(model.config.get_text_config().hidden_size, model.device, model.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return head


# -- exactness -------------------------------------------------------------------------------------------------------
# GPT-2 has no operation that transformers computes in float32 whatever the model's dtype (RMSNorm, rotary).
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(("kind", "temperature", "dtype"), [
    *((kind, 0.6, torch.float32) for kind in (*PACKED, *MORE, *PADDED)),
    ("llama", 1.0, torch.float32),
    *(slow(kind, 1.0, torch.float32) for kind in PACKED if kind != "llama"),
    ("gpt2", 0.6, torch.float64),
])  # fmt: skip
def test_packed_and_padded_rows_have_the_numbers_and_gradients_of_rows_run_one_by_one(
    kind, temperature, dtype, random_model, with_lora, plain, awkward_batch, results
):
    """Log-probs, entropies and values."""
    model = random_model(kind, dtype)
    tolerance, head = 1e-12 if dtype == torch.float64 else 1e-5, some_head(model)
    parameters = [*with_lora(model), *head.parameters()]
    one_by_one = plain(model, awkward_batch, temperature, head)
    expected = results(lambda _: one_by_one, awkward_batch, parameters)
    assert all(g.abs().max() > 0.01 for g in expected[1])  # or equal gradients would say nothing
    chosen = choose(model)
    assert chosen.packed == (kind not in PADDED)
    if kind in PADDED:
        assert chosen.reason == f"padded rows: {PADDED[kind]}"
    of_values = results(lambda _: one_by_one[2:], awkward_batch, parameters)
    for packed in {False, chosen.packed}:
        forward = replace(chosen, packed=packed)
        found = results(lambda b, run=forward: run(b, temperature, True, head), awkward_batch, parameters)
        assert {x.dtype for x in found[0]} == {dtype}
        check(found, expected, tolerance)
        check(results(lambda b, run=forward: (run.values(b, head),), awkward_batch, parameters), of_values, tolerance)


def folded(values, linear, own, trees):
    """The linear rows' values at the places of the trees."""
    result = values.new_zeros(trees.token_ids.shape)
    for r, places in enumerate(own):
        length = int(linear.attention_mask[r].sum())
        for k, (b, column) in enumerate(places, start=length - len(places)):
            result[b, column] = values[r, k]
    return result


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("kind", ["gpt2", *map(slow, ("llama_one_kv_head", "qwen3")), "gemma2", "gpt_oss"])
def test_rows_with_branches_have_the_numbers_of_their_paths_run_one_by_one(
    kind, random_model, with_lora, plain, tree_batch, results
):
    dtype, tolerance = (torch.float64, 1e-12) if kind == "gpt2" else (torch.float32, 1e-5)
    model = random_model(kind, dtype)
    head = some_head(model)
    parameters = [*with_lora(model), *head.parameters()]
    trees, linear, own = tree_batch

    one_by_one = tuple(folded(numbers, linear, own, trees) for numbers in plain(model, linear, 0.6, head))
    expected = results(lambda _: one_by_one, trees, parameters)
    assert (expected[0][0][trees.loss_mask] != 0).all()
    for first in (False, True):
        layout = pack(trees, prompts_first=first)
        packed = results(partial(packed_forward, model, trees, 0.6, True, head), layout, parameters)
        check(packed, expected, tolerance)
    check(results(lambda b: padded_forward(model, b, 0.6, True, head), trees, parameters), expected, tolerance)
    of_values = results(lambda _: one_by_one[2:], trees, parameters)
    for forward in (Forward(model=model, packed=packed, reason="") for packed in (False, True)):
        check(results(lambda b, run=forward: (run.values(b, head),), trees, parameters), of_values, tolerance)


def test_the_embedded_models_fused_layers_compute_trees(make_roles, tree_batch, results):
    roles = make_roles(noise=0.1)
    trees, _, _ = tree_batch
    trees = replace(trees, token_ids=trees.token_ids % 31)
    model, parameters = roles.backbone.model, [p for _, p in roles.named_parameters()]
    assert roles.forward.packed
    both = (packed_forward, padded_forward)
    packed, padded = (results(lambda b, run=run: run(model, b, 0.6, True), trees, parameters) for run in both)
    check(packed, padded, 1e-5)


def test_a_tree_goes_through_the_network_once(random_model, tree_batch):
    trees, linear, _ = tree_batch
    # Prompts of 6 and 4, completions of 12 + 9 + 1 and 5 tokens; the paths one by one have 87.
    assert num_packed_tokens(trees) == 10 + 27 == pack(trees).num_tokens
    assert pack(trees, prompts_first=True).lengths() is None  # a GPU's kernel knows no branches
    assert int(linear.attention_mask.sum()) == 87
    model = random_model("llama")
    forward = Forward(model=model, packed=False, reason="")
    assert forward.network_tokens(trees) == 10 * 11  # ten paths, the longest of 6 + 5 tokens
    assert [part.tolist() for part in forward.micro_batches(trees, torch.arange(4), 44)] == [[0], [1, 2], [3]]


@each(("rows", "number"), [
    # The second row's completion starts with a masked token, so its tokens before the first trained one are longer.
    ([(0, [3, 4, 5], [10, 11]), (0, [3, 4, 5], [-12, 13]), (0, [3, 4, 6], [10, 11])], 5 + 5 + 5),
    ([(0, [3, 4, 5], [10, 11]), (1, [3, 4, 5], [12]), (0, [3, 4, 5], [13, 14, 15])], (3 + 2 + 3) + (3 + 1)),
])  # fmt: skip
def test_only_rows_of_a_group_with_the_same_prompt_share_it(rows, number, random_model, plain, make_batch):
    batch, model = make_batch(rows), random_model("llama")
    close(packed_forward(model, batch, 1.0, False).logprobs, plain(model, batch)[0], 1e-5)
    assert num_packed_tokens(batch) == number


# -- the head --------------------------------------------------------------------------------------------------------
class LogitRows(TorchDispatchMode):
    """Notes how many rows each tensor has that is as wide as the vocabulary, but for the head's own weight turned."""

    def __init__(self, weight_VH):
        super().__init__()
        self.vocabulary, self.weight, self.seen = len(weight_VH), weight_VH.untyped_storage().data_ptr(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        wide = isinstance(made, torch.Tensor) and made.ndim == 2 and made.shape[1] == self.vocabulary
        if wide and made.untyped_storage().data_ptr() != self.weight:
            self.seen.append(len(made))
        return made


@pytest.mark.parametrize("tokens_at_once", [1, 7])
def test_the_size_of_logit_chunks_changes_nothing(
    tokens_at_once, random_model, with_lora, awkward_batch, monkeypatch, results
):
    model = random_model("llama")
    parameters = with_lora(model)
    whole = results(lambda b: packed_forward(model, b, 0.6, True), awkward_batch, parameters)
    monkeypatch.setattr(activations, "LOGIT_CHUNK", {"cpu": tokens_at_once * 120 + 1})
    sizes = LogitRows(model.get_output_embeddings().weight)
    with sizes:
        chunked = results(lambda b: packed_forward(model, b, 0.6, True), awkward_batch, parameters)
    assert max(sizes.seen) == tokens_at_once
    check(chunked, whole, 1e-6)
    with torch.no_grad():
        close(packed_forward(model, awkward_batch, 0.6, False).logprobs, whole[0][0], 1e-6)


def test_only_completion_positions_reach_the_head_and_only_packed_tokens_the_network(
    random_model, awkward_batch, head_calls, entering
):
    model = random_model("llama")
    chosen = choose(model)
    head_calls.clear()
    with entering(model) as network:
        chosen(awkward_batch, 1.0)
    # Completions 4 + 8 + 0 + 1 + 3 + 9 = 25 tokens, two of them masked; prompts 6 + 2 + 4 = 12, each once.
    assert (head_calls, network) == ([23], [(1, 37)])


@each("kind", ["llama", "falcon"])
def test_the_lm_head_is_not_run_for_values_alone(kind, random_model, awkward_batch, head_calls):
    model = random_model(kind)
    chosen = choose(model)
    head_calls.clear()
    hook = model.get_output_embeddings().register_forward_hook(lambda *args: head_calls.append(1))
    chosen.values(awkward_batch, some_head(model))
    assert not head_calls
    chosen(awkward_batch, 1.0, False, some_head(model))
    assert len(head_calls) == 1
    hook.remove()


def test_a_batch_of_empty_completions_only_has_gradient_0(random_model, with_lora, make_batch):
    model = random_model("llama")
    parameters, head = with_lora(model), some_head(model)
    outputs = packed_forward(model, make_batch([(0, [3, 4], []), (0, [3, 4], [])]), 1.0, True, head)
    assert (outputs.values == 0).all()
    total = outputs.logprobs.sum() + outputs.entropy.sum() + outputs.values.sum()
    assert all((g == 0).all() for g in torch.autograd.grad(total, [*head.parameters(), *parameters]))


@each("packed", [True, False])
def test_what_lies_under_the_padding_does_not_matter(packed, random_model, awkward_batch):
    model = random_model("qwen2")
    forward, head = Forward(model=model, packed=packed, reason=""), some_head(model)
    garbage = torch.where(awkward_batch.attention_mask, awkward_batch.token_ids, -(10**9))
    spoiled = replace(awkward_batch, token_ids=garbage)
    clean, dirty = (forward(batch, 1.0, True, head) for batch in (awkward_batch, spoiled))
    for name in ("logprobs", "entropy", "values"):
        assert torch.equal(getattr(dirty, name), getattr(clean, name)), name
    assert torch.equal(forward.values(spoiled, head), clean.values)


# -- which forward ---------------------------------------------------------------------------------------------------
def test_a_model_that_does_something_else_behind_its_head_is_found_out(random_model, monkeypatch):
    model = random_model("llama")
    plain = type(model).forward

    def squared(self, *args, **keys):
        output = plain(self, *args, **keys)
        output.logits = output.logits.square()
        return output

    monkeypatch.setattr(type(model), "forward", squared)
    words = "LlamaForCausalLM makes something else of its head's numbers than to scale or cap them"
    assert choose(model).reason == f"padded rows: {words}"


@pytest.mark.parametrize("widest", [torch.float64, torch.float32])  # Apple's devices have no float64
def test_scale_and_cap_behind_a_head_are_those_of_the_config(widest, random_model, monkeypatch):
    monkeypatch.setattr("rlft.model.kernels.lm_head.widest", lambda device: widest)
    heads = {kind: head_of(random_model(kind))[1:] for kind in ("llama", "granite", "gemma2")}
    assert heads == {
        "llama": (1.0, None), "granite": (pytest.approx(1 / 3), None), "gemma2": (pytest.approx(1.0), 2.0),
    }  # fmt: skip


@pytest.mark.parametrize(("dtype", "every", "one", "packed"), [
    (torch.bfloat16, 0.0, 1.5, True),  # single tokens of healthy models differ by as much
    (torch.bfloat16, 0.05, 0.3, True), (torch.bfloat16, 0.3, 0.0, False), (torch.float16, 0.0, 0.2, True),
    (torch.float16, 0.05, 0.0, False), (torch.float32, 0.0, 2e-4, False), (torch.bfloat16, 0.0, torch.nan, False),
])  # fmt: skip
def test_in_16_bits_packing_is_given_up_for_a_difference_of_all_tokens_and_not_of_one(
    dtype, every, one, packed, random_model, monkeypatch
):
    plain = packed_forward

    def off(*args, **kwargs):
        outputs = plain(*args, **kwargs)
        logprobs_BT = outputs.logprobs - every
        logprobs_BT[0, 6] += one + every
        return replace(outputs, logprobs=logprobs_BT)

    monkeypatch.setattr("rlft.model.forward.packed_forward", off)
    chosen = choose(random_model("qwen2", dtype=dtype))
    assert chosen.packed == packed
    if not packed and dtype.itemsize == 2:
        assert "in the mean for Qwen2ForCausalLM" in chosen.reason


def test_a_tiny_vocabulary_is_enough_for_the_probe(random_model):
    assert choose(random_model("llama", vocab_size=5)).packed


@each(("kind", "real", "whole"), [("llama", 37, 37), ("falcon", 51, 6 * 14)])
def test_micro_batches_keep_to_the_budget_in_tokens_that_enter_the_network(
    kind, real, whole, random_model, awkward_batch
):
    # Rows are 10, 14, 2, 7, 5 and 13 tokens long, 51 in all; packed, 37 (see above).
    chosen = choose(random_model(kind))
    assert (chosen.real_tokens(awkward_batch), chosen.network_tokens(awkward_batch)) == (real, whole)
    parts = chosen.micro_batches(awkward_batch, torch.arange(6), 28)
    assert sorted(torch.cat(parts).tolist()) == list(range(6))
    assert all(chosen.network_tokens(awkward_batch.select(part)) <= 28 for part in parts)
    assert len(parts) < 6
