"""The engine on the trainer's own base: what a completion depends on, what it costs, how it ends, what is drawn."""

import functools
import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import half_model
import pytest
import torch
from slow_cases import slow
from transformers import AutoModelForCausalLM, MistralConfig

from rlft.config.schema import RunConfig
from rlft.generation.decoding import draw
from rlft.generation.transformers import Transformers, TransformersGenerator, Weights, _fastest, end_tokens
from rlft.model.backbone import read_backbone
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.runs.run_folder import completed
from rlft.types import FinishReason, NextTurn, Sampling
from tests.helpers.family_tokenizers import with_attributes

HOT = Sampling(max_tokens=24, temperature=1.0)
QUESTIONS = ["12+5=?", "7-3=?", "40+41=?", "99-1=?", "3+3=?"]
SEEDS = [0, 10, 20, 30, 40]


model_config = half_model.model_config


@pytest.fixture(scope="session")
def backbone(model_config):
    """The embedded model in float64, because decoding adds up in another order than a plain forward."""
    exact = read_backbone(model_config())
    exact.model.double()
    return exact


@pytest.fixture
def prompts(make_prompt):
    return [make_prompt(q) for q in QUESTIONS]


@pytest.fixture
def roles(make_roles):
    """A policy with an opinion of its own, so that its completions are not the base's."""
    return make_roles(noise=0.02)


@pytest.fixture
def make_generator(roles, backbone):
    """Builds an engine that holds the policy as version 3."""

    def make(batch_size=256, **keys):
        generator = TransformersGenerator(roles, backbone.tokenizer, backbone.device, batch_size, **keys)
        generator.load(roles.publish(3))
        return generator

    return make


@pytest.fixture
def forwards(backbone):
    """Records (rows, columns) of every forward pass through the base."""
    shapes = []
    embedding = backbone.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, args, output: shapes.append(tuple(args[0].shape)))
    yield shapes
    hook.remove()


def completions(groups):
    return [[tuple(r.completion.token_ids) for r in group.rollouts] for group in groups]


def plain_logits(model, rollout):
    """Of a plain forward of the whole row, from which each of its completion's tokens is drawn."""
    prompt, ids = rollout.prompt.token_ids, rollout.completion.token_ids
    with torch.no_grad():
        return model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]


def logprobs(model, groups, temperature=1.0):
    """(the engine's, those of the plain forward) of all completions."""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        logits, ids = plain_logits(model, rollout) / temperature, rollout.completion.token_ids
        yield torch.tensor(rollout.completion.logprobs), logits.log_softmax(-1)[range(len(ids)), ids].float()


def check_logprobs(model, groups, temperature=1.0):
    for found, expected in logprobs(model, groups, temperature):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# -- what a completion depends on ------------------------------------------------------------------------------------
def test_completions_are_drawn_with_their_seeds_and_nothing_else(make_generator, prompts):
    generator = make_generator()
    torch.manual_seed(1)
    first, after = generator.sample(prompts, 4, SEEDS, HOT), torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after), "the global random state is neither read nor moved"
    assert generator.sample(prompts, 4, SEEDS, HOT) == first
    other = completions(generator.sample(prompts, 4, [100 + seed for seed in SEEDS], HOT))
    assert all(a != b for a, b in zip(completions(first), other, strict=True))
    alone = completions(generator.sample(prompts[1:2], 1, [SEEDS[1] + 2], HOT))
    assert alone == [[completions(first)[1][2]]], "completion i with its prompt's seed plus i"
    in_graphs = make_generator(in_graphs=True)
    assert in_graphs.sample(prompts, 4, SEEDS, HOT) == first, "a CPU has none"
    assert not in_graphs.facts.rows


@pytest.mark.parametrize("batch_size", [1, 4, 8, 20])
def test_completions_do_not_depend_on_the_batch_size_or_on_what_else_is_in_the_batch(
    batch_size, make_generator, prompts
):
    whole = make_generator().sample(prompts, 4, SEEDS, HOT)
    split = make_generator(batch_size).sample(prompts, 4, SEEDS, HOT)
    turned = make_generator().sample(prompts[::-1], 4, SEEDS[::-1], HOT)[::-1]
    assert completions(split) == completions(turned) == completions(whole)
    expected = [torch.tensor(r.completion.logprobs) for g in whole for r in g.rollouts]
    for groups in (split, turned):
        found = [torch.tensor(r.completion.logprobs) for g in groups for r in g.rollouts]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_size", [4, 256])
def test_tokens_are_said_when_they_are_sampled(batch_size, make_generator, prompts):
    generator, said = make_generator(batch_size), {}
    silent = generator.sample(prompts, 2, SEEDS, HOT)
    order = []
    generator.token_callback = lambda row, token: (said.setdefault(row, []).append(token), order.append(row))
    assert generator.sample(prompts, 2, SEEDS, HOT) == silent
    assert [tuple(said[row]) for row in range(10)] == [ids for group in completions(silent) for ids in group]
    assert order[:4] == [0, 1, 2, 3], "the first tokens of all come before the second of any"


# -- log-probs -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_a_plain_forward_at_this_temperature(
    temperature, make_generator, prompts, roles, backbone
):
    groups = make_generator().sample(prompts, 4, SEEDS, replace(HOT, temperature=temperature))
    check_logprobs(backbone.model, groups, temperature)
    assert sum(len(ids) for group in completions(groups) for ids in group) > 100
    assert roles.tuner.active_adapters == ["policy"]
    assert all(p.requires_grad for _, p in roles.named_parameters()), "as before it has sampled"
    unloaded = TransformersGenerator(roles, backbone.tokenizer, backbone.device, 64)
    groups = unloaded.sample(prompts[:1], 2, [0], replace(HOT, temperature=temperature))
    assert {r.policy_version for r in groups[0].rollouts} == {None}
    with torch.no_grad(), roles.using(None):  # the base, before the first adapter
        check_logprobs(backbone.model, groups, temperature)


def test_it_samples_from_what_was_loaded_however_the_policy_moves_on(make_generator, roles, prompts):
    generator = make_generator()
    before = generator.sample(prompts, 2, SEEDS, HOT)
    for _, parameter in roles.named_parameters():
        parameter.data += 0.02
    assert generator.sample(prompts, 2, SEEDS, HOT) == before
    generator.load(roles.publish(4))
    after = generator.sample(prompts, 2, SEEDS, HOT)
    assert completions(after) != completions(before)
    assert {r.policy_version for g in after for r in g.rollouts} == {4}


# -- cost ------------------------------------------------------------------------------------------------------------
def test_finished_rows_leave_the_batch(make_generator, prompts, forwards):
    generator = make_generator()
    groups = generator.sample(prompts, 8, SEEDS, replace(HOT, max_tokens=48))
    lengths = [len(ids) for group in completions(groups) for ids in group]
    assert max(lengths) > min(lengths) + 3
    for t, (_, rows) in enumerate(forwards[1:], start=1):
        going = sum(length > t for length in lengths)  # rows that still want a token number t
        assert 0 < going <= rows < going / 0.75 + 1e-9  # finished ones are less than a quarter
    assert len(forwards) == max(lengths)


def test_batch_size_bounds_the_rows_of_a_forward_in_whole_groups(make_generator, prompts, forwards):
    make_generator(batch_size=9).sample(prompts, 4, SEEDS, HOT)
    sizes, columns = [len(p.token_ids) for p in prompts], [columns for _, columns in forwards]
    prefills = [sum(sizes[:2]), sum(sizes[2:4]), sizes[4]]
    assert [c for c in columns if c > 8] == prefills, "a prompt once for its whole group, without padding"
    assert {rows for rows, _ in forwards} == {1}, "all in one packed row"
    forwards.clear()
    groups = make_generator(batch_size=2).sample(prompts[:2], 4, [0, 10], HOT)
    assert [len(g.rollouts) for g in groups] == [4, 4], "a larger group is not split"
    assert [c for _, c in forwards if c > 4] == sizes[:2]


# -- how a completion ends -------------------------------------------------------------------------------------------
def test_a_completion_that_reaches_the_limit_is_truncated(make_generator, prompts, backbone):
    generator, eos = make_generator(), backbone.tokenizer.eos_token_id
    full = [c for g in generator.sample(prompts, 8, SEEDS, replace(HOT, max_tokens=60)) for c in g.rollouts]
    stopped = next(r.completion for r in full if r.completion.finish_reason is FinishReason.stop)
    assert stopped.token_ids[-1] == eos
    assert eos not in stopped.token_ids[:-1]
    for completion in (r.completion for r in full):
        text = backbone.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        assert completion.text == text
        assert backbone.tokenizer.eos_token not in text
    length = len(stopped.token_ids)
    for limit, reason in ((length, "stop"), (length - 1, "length"), (1, "length")):
        groups = generator.sample(prompts, 8, SEEDS, replace(HOT, max_tokens=limit))
        cut = [r.completion for g in groups for r in g.rollouts]
        for whole, short in zip((r.completion for r in full), cut, strict=True):
            assert short.token_ids == whole.token_ids[:limit]
            assert len(short.logprobs) == len(short.token_ids) <= limit
            assert short.finish_reason == ("stop" if short.token_ids[-1] == eos else "length")
        assert cut[[r.completion for r in full].index(stopped)].finish_reason == reason


def test_a_turn_of_a_conversation_ends_with_its_own_limit(make_generator, prompts):
    """What it says until there is what it says without one, whatever the rows beside it may say."""
    generator = make_generator()
    whole = completions(generator.sample(prompts, 2, [0, 2, 4, 6, 8], HOT))
    limits = [1, 5, 24, 99, 7]  # at most HOT.max_tokens = 24
    asked = [replace(p, next_turn=NextTurn(turn=1, seed=0, max_tokens=m)) for p, m in zip(prompts, limits, strict=True)]
    groups = generator.sample(asked, 2, [0, 2, 4, 6, 8], HOT)
    for group, before, limit in zip(groups, whole, limits, strict=True):
        for rollout, ids in zip(group.rollouts, before, strict=True):
            assert rollout.completion.token_ids == ids[:limit]
            assert len(ids) <= limit or rollout.completion.finish_reason is FinishReason.length


def test_any_of_several_end_tokens_or_none_ends_a_completion(make_generator, prompts, backbone, monkeypatch):
    generator = make_generator()
    eos = backbone.tokenizer.eos_token_id
    plain = completions(generator.sample(prompts, 4, SEEDS, HOT))
    common = Counter(t for g in plain for ids in g for t in ids[3:-1] if t != eos).most_common(1)[0][0]
    monkeypatch.setattr(backbone.model.generation_config, "eos_token_id", [common, eos])
    assert end_tokens(backbone.model, backbone.tokenizer) == {common, eos}
    ended = generator.sample(prompts, 4, SEEDS, HOT)
    wholes = [ids for group in plain for ids in group]
    for whole, short in zip(wholes, (r.completion for g in ended for r in g.rollouts), strict=True):
        ends = [i for i, token in enumerate(whole) if token in (common, eos)]
        assert short.token_ids == (whole[: ends[0] + 1] if ends else whole)
        assert short.finish_reason == ("stop" if ends else "length")
    generator.tokenizer = with_attributes(backbone.tokenizer, eos_token=None)
    monkeypatch.setattr(backbone.model.generation_config, "eos_token_id", None)
    assert end_tokens(backbone.model, generator.tokenizer) == frozenset()
    endless = [r.completion for g in generator.sample(prompts[:2], 2, [0, 10], HOT) for r in g.rollouts]
    assert {(len(c.token_ids), c.finish_reason) for c in endless} == {(24, "length")}, "without any, to the limit"


# -- the distribution ------------------------------------------------------------------------------------------------
def test_temperature_0_takes_the_most_likely_token_and_gives_its_logprob_at_1(make_generator, prompts, backbone):
    groups = make_generator().sample(prompts, 2, SEEDS, replace(HOT, temperature=0))
    check_logprobs(backbone.model, groups)
    for first, second in (group.rollouts for group in groups):
        assert first == second
        assert plain_logits(backbone.model, first).argmax(-1).tolist() == list(first.completion.token_ids)


PROBABILITIES = torch.tensor([0.4, 0.05, 0.3, 0.2, 0.05])


def chi_square(token, probabilities):
    expected = probabilities.double() * len(token)
    counts = torch.bincount(token, minlength=len(probabilities)).double()
    there = expected > 0
    assert (counts[~there] == 0).all()
    return ((counts - expected)[there] ** 2 / expected[there]).sum().item()


@pytest.mark.parametrize(("keys", "kept"), [
    *(({"temperature": temperature}, [0, 1, 2, 3, 4]) for temperature in (0.5, 1.0, 2.0)),
    ({"top_k": 1}, [0]),
    ({"top_k": 2}, [0, 2]),
    ({"top_k": 9}, [0, 1, 2, 3, 4]),
    ({"top_p": 0.01}, [0]),  # the most likely always stays
    ({"top_p": 0.5}, [0, 2]),  # 0.4 is not enough, 0.4 + 0.3 is
    ({"top_p": 0.75}, [0, 2, 3]),
    ({"top_k": 3, "top_p": 0.7}, [0, 2]),  # of the three that top_k leaves: 4/9 + 3/9 = 0.78
])  # fmt: skip
def test_tokens_are_drawn_with_their_probabilities_of_which_top_k_and_top_p_keep_the_largest(keys, kept):
    sampling = Sampling(**{"max_tokens": 1, "temperature": 1.0, **keys})
    uniform = torch.rand(40_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    token, logprob = draw(PROBABILITIES.log().expand(len(uniform), -1), uniform, sampling)
    probabilities = torch.zeros(5)
    probabilities[kept] = PROBABILITIES[kept] ** (1 / sampling.temperature)
    probabilities /= probabilities.sum()
    assert chi_square(token, probabilities) < 18.5  # 4 degrees of freedom: exceeded once in a thousand
    torch.testing.assert_close(logprob, probabilities.log()[token], rtol=1e-6, atol=1e-6)


def test_the_edges_of_the_uniform_number_fall_on_tokens_that_can_be_drawn():
    # Tokens 0 and 3 are impossible; the largest number below 1 must not fall past the last possible one.
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64)
    token, logprob = draw(logits, uniform, Sampling(max_tokens=1, temperature=1.0))
    assert token.tolist() == [1, 1, 2, 2]
    torch.testing.assert_close(logprob, torch.full((4,), -math.log(2)))
    # The tail of a large vocabulary.
    size = 200_000
    uniform = (torch.tensor([0, 1, size // 2, size - 1], dtype=torch.float64) + 0.5) / size
    token, _ = draw(torch.zeros(4, size), uniform, Sampling(max_tokens=1, temperature=1.0))
    assert token.tolist() == [0, 1, size // 2, size - 1]
    # A token of one in a thousand million: between 1 - 1e-9 and 1 float32 has no number to tell the two ends apart.
    uniform = torch.tensor([1 - 2e-9, 1 - 0.5e-9], dtype=torch.float64)
    token, _ = draw(torch.tensor([[0.0, math.log(1e-9)]] * 2), uniform, Sampling(max_tokens=1, temperature=1.0))
    assert token.tolist() == [0, 1]


def test_neighbouring_seeds_draw_independent_first_tokens(make_generator, make_prompt, backbone):
    # Siblings have neighbouring seeds: their first numbers must be as uniform as any.
    prompt = make_prompt("12+5=?")
    logits = torch.linspace(-1, 1, 272)
    generator = make_generator(batch_size=4096)
    head = backbone.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, args, output: logits.expand_as(output))
    (group,) = generator.sample([prompt], 4096, [123], Sampling(max_tokens=1, temperature=1.0))
    hook.remove()
    token = torch.tensor([r.completion.token_ids[0] for r in group.rollouts])
    buckets = logits.softmax(-1).view(16, 17).sum(1)
    assert chi_square(token // 17, buckets) < 37.7  # 15 degrees of freedom: exceeded once in a thousand


# -- other attentions ------------------------------------------------------------------------------------------------
def test_a_sliding_window_shorter_than_the_prompt_is_sampled_exactly(backbone, make_prompt):
    config = MistralConfig(
        vocab_size=272, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=5, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()

    class Slot:
        def images_of(self, prompts):
            return None

        def prefix_cache(self, prompts, max_tokens, images=None):
            return None

        @contextmanager
        def using(self, role):
            yield model

    prompts = [make_prompt(q) for q in ("1+1=?", "40+41=?")]
    assert len(prompts[0].token_ids) != len(prompts[1].token_ids)
    generator = TransformersGenerator(Slot(), backbone.tokenizer, torch.device("cpu"), 64)
    check_logprobs(model, generator.sample(prompts, 3, [0, 10], HOT))


# -- what is multiplied with -----------------------------------------------------------------------------------------
BOUNDS = {"apart": 1e-5, "merged": 1e-5, "merged_bfloat16": 0.02, "merged_int8": 0.02}  # nats, in the mean
HELD = {"merged": torch.float64, "merged_bfloat16": torch.bfloat16, "merged_int8": torch.int8}


TARGETS = {"all-linear": 1, "q_proj v_proj": 11, "down_proj lm_head": 12}
"""{modules with an adapter: number of linear layers and heads without one}"""
QUICK = {("q_proj v_proj", "merged_bfloat16"), ("down_proj lm_head", "merged_int8")}


@pytest.mark.parametrize(("targets", "weights"), [
    (targets, weights) if targets == "all-linear" or (targets, weights) in QUICK else slow(targets, weights)
    for targets in TARGETS
    for weights in BOUNDS
])  # fmt: skip
def test_whatever_is_multiplied_with_it_samples_the_policy(targets, weights, make_roles, backbone, prompts):
    roles = make_roles(noise=0.02, target_modules=targets if "all" in targets else targets.split())
    copied = TARGETS[targets]
    sequence = [*prompts[0].token_ids, 5, 6, 7]
    policys = roles.score([sequence])
    generator = TransformersGenerator(roles, backbone.tokenizer, backbone.device, 64, weights=Weights(weights))
    for version in (1, 2):  # the second one is written over the first
        generator.load(roles.publish(version))
        found, expected = zip(*logprobs(backbone.model, generator.sample(prompts, 4, SEEDS, HOT)), strict=True)
        assert (torch.cat(found) - torch.cat(expected)).abs().mean() < BOUNDS[weights]
        assert roles.score([sequence]) == policys  # the trainer's stay what they were, to the bit
        layers = [m for m in roles.model.modules() if isinstance(m, LoraLinear)]
        assert {layer.sums["sampler"].values.dtype for layer in layers if layer.sums} == {
            HELD[name] for name in [weights] if name != "apart"
        }
        assert len(roles._rounded) == (copied if weights in ("merged_bfloat16", "merged_int8") else 0)
        assert {copy.values.dtype for copy in roles._rounded.values()} <= {HELD.get(weights)}
        for parameter in (parameter for _, parameter in roles.named_parameters()):
            parameter.data *= 1.1
        policys = roles.score([sequence])


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_head_the_copy_alone_is_rounded_and_only_while_the_sampler_is_in_use(tied, roles, backbone):
    head, embeddings = backbone.model.get_output_embeddings(), backbone.model.get_input_embeddings()
    own = head.weight
    assert own is embeddings.weight
    try:
        if not tied:
            head.weight = torch.nn.Parameter(own.detach().clone() * 1.01, requires_grad=False)
        before, x = head.weight.detach().clone(), torch.ones(1, head.in_features, dtype=own.dtype)
        roles.load_sampler(roles.publish(1), weights="merged_int8")
        exact = head(x)
        with torch.no_grad(), roles.using("sampler"):
            rounded = head(x)
        assert not torch.equal(rounded, exact)
        torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0.02)
        assert torch.equal(head(x), exact)
        assert torch.equal(head.weight, before)
        roles.load_sampler(roles.publish(2), weights="merged")
        with torch.no_grad(), roles.using("sampler"):
            assert torch.equal(head(x), exact)
    finally:
        head.weight = own


made = functools.partial(Transformers, batch_size=8, graphs="off")


def test_fastest_is_what_the_processor_decodes_fastest_with(monkeypatch, capsys):
    for dtype, weights in {"float32": "merged", "bfloat16": "merged_bfloat16", "int8": "merged_int8"}.items():
        monkeypatch.setattr("rlft.generation.transformers.fastest_dtype", lambda dtype=dtype: dtype)
        monkeypatch.setattr("rlft.generation.transformers._fastest", _fastest.__wrapped__)
        assert made(weights=Weights.fastest).chosen == weights
        assert f"generation.transformers.weights: {weights} is fastest on " in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert made(weights=Weights.fastest).chosen is Weights.merged


# -- CUDA graphs -----------------------------------------------------------------------------------------------------
def test_graphs_are_left_out_where_a_gpu_has_no_memory_for_them_and_in_runs_from_before():
    auto, off = (made(weights=Weights.apart, graphs=graphs) for graphs in ("auto", "off"))
    for engine, device, fits, expected in (
        (auto, "cuda:0", True, auto), (auto, "cuda", False, off), (auto, "cpu", False, auto), (off, "cuda", True, off),
    ):  # fmt: skip
        assert engine.settled(None, set, lambda _, fits=fits: fits, device, quantized=False) == expected
    before_there_were_any = {"generation": {"transformers": {"batch_size": 8, "weights": "merged"}}}
    assert completed(before_there_were_any, RunConfig)["generation"]["transformers"]["graphs"] == "off"
