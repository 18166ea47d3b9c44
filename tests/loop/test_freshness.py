"""What an engine holds and computes is what was published: copies, fixed tokens, sampled ones, and decoding."""

import math
import signal
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import hybrid_models
import pytest
import torch
from in_one_test import each
from slow_cases import slow, slow_but
from transformers import AutoConfig, AutoModelForCausalLM

from rlft import cli
from rlft.config.model import KernelChoice
from rlft.config.schema import FreshnessConfig
from rlft.data.prompts import PromptSet
from rlft.generation import repeated_cache
from rlft.generation.engine import Generator, GeneratorOver
from rlft.generation.loaded_adapter import LoadedAdapter
from rlft.generation.repeated_cache import RepeatedCache
from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.transformers import TransformersGenerator, Weights
from rlft.loop import session
from rlft.loop.driver import BrokenRunError
from rlft.loop.freshness import (
    FIXED_TOKENS,
    LIMITS_IN_16_BITS,
    LIMITS_IN_32_BITS,
    LIMITS_IN_FLOAT16,
    Freshness,
    Gap,
    Limits,
    StaleAdapterError,
    _probes,
    check_decoding,
    check_sampled,
    distance,
    flatten,
    limits_of,
    open_freshness,
    samples_tell,
)
from rlft.loop.session import Session
from rlft.model.activations import set_checkpointing
from rlft.model.backbone import load_backbone
from rlft.model.kernels import selection
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.model.networks import Networks
from rlft.system.products import Weight
from rlft.trainer.optimizer import Optimizer
from rlft.types import Adapter, Prompt, Sampling, UserError

SEQUENCES = [[5, 6, 7, 8], [9, 10, 11]]


class Fixed(Generator):
    """Scores that were written down, as an engine or a trainer would give them."""

    def __init__(self, *values, noise=0.0):
        self.values, self.calls, self.noise = values, 0, noise

    def load(self, adapter):
        raise NotImplementedError

    def sample(self, prompts, n, seeds, sampling):
        raise NotImplementedError

    def score(self, sequences, *, rounded=False):
        self.calls += 1
        return [[value + self.noise if rounded else value for value in self.values]]


@pytest.fixture
def policy(make_roles):
    return make_roles(noise=0.02)


def engine_of(policy, weights):
    return TransformersGenerator(policy, policy.backbone.tokenizer, policy.backbone.device, 64, weights=weights)


@pytest.fixture
def engine(policy):
    """It computes as the trainer does, so that a gap of nothing is exactly 0."""
    return engine_of(policy, Weights.apart)


def publish(version, policy, engine):
    adapter = policy.publish(version)
    engine.load(adapter)
    return adapter


# -- a healthy engine --------------------------------------------------------------------------------------------------
@each("times", [1, 4])
def test_in_float32_gaps_are_small_in_long_rows_of_tokens_that_nobody_would_sample(backbone, make_roles, times):
    """With the model's logits, and with logits that are four times as large. Nothing below -37 is sampled, since
    uniform numbers of 53 bits find nothing less likely."""
    [norm] = [module.weight for name, module in backbone.model.named_modules() if name == "model.norm"]
    before, lowest = norm.detach().clone(), 0.0
    norm.data.mul_(times)
    for seed in range(3):
        roles, dice = make_roles(noise=0.02), torch.Generator().manual_seed(seed)
        ids = torch.randint(5, backbone.model.config.vocab_size, (4, 200), generator=dice).tolist()
        expected = flatten(roles.score(ids))
        lowest = min(lowest, *expected)
        for weights in (Weights.merged, Weights.apart):
            engine = engine_of(roles, weights)
            engine.load(roles.publish(1))
            gap = Gap.between(flatten(engine.score(ids)), expected)
            assert gap.largest < LIMITS_IN_32_BITS.largest * times / 16, "there is room"
    norm.data.copy_(before)
    assert lowest < -20 * times


def test_the_largest_gap_of_all_tokens_is_measured():
    gap = Freshness(SEQUENCES, 1.0, 1).check(0, Fixed(-1.0, -2.0, -3.0), Fixed(-1.1, -2.5, -2.8))
    assert gap == pytest.approx(0.5, abs=1e-12)
    assert [distance(-2.0, -2.25), distance(-1.0, math.nan), distance(math.inf, math.inf)] == [0.25, math.inf, math.inf]
    assert Freshness(SEQUENCES, 0.5, 1).check(0, Fixed(-1.0), Fixed(-1.5)) == 0.5, "exactly the threshold passes"
    freshness = Freshness(SEQUENCES, 0.1, 1)
    freshness.check(0, Fixed(-1.0), Fixed(-1.0))
    numbers = r"log-prob -2\.000000, the trainer -2\.250000 \(gap 2\.50e-01"
    with pytest.raises(StaleAdapterError, match=numbers) as stopped:
        freshness.check(1, Fixed(-1.0, -2.0), Fixed(-1.0, -2.25))
    assert "still holds" not in str(stopped.value), "it fits no earlier version"
    with pytest.raises(ValueError, match="zip"):
        Freshness(SEQUENCES, 1.0, 1).check(0, Fixed(-1.0), Fixed(-1.0, -1.0))
    gap = Gap.between([0.0] * 1000, [float(i) for i in range(1, 1001)])
    assert gap == Gap(mean=500.5, largest=1000.0, percentile_99=990.0), "which 99 of 100 tokens do not exceed"


@pytest.mark.parametrize(
    ("every", "first", "checked"),
    [(1, 0, [0, 1, 2, 3, 4, 5, 6]), (3, 0, [0, 3, 6]), (10, 7, [7, 10])],  # the first of a resumed run always
)
def test_it_checks_every_so_many_publishes(every, first, checked, backbone):
    freshness, engine, without_weights = Freshness(SEQUENCES, 1.0, every), Fixed(-1.0), Freshness(SEQUENCES, 1.0, 1)
    results = {version: freshness.check(version, engine, Fixed(-1.25)) for version in range(first, first + 7)}
    assert [version for version, gap in results.items() if gap is not None] == checked
    assert engine.calls == len(checked)
    assert without_weights.check(0, ScriptedGenerator({}, backbone.tokenizer), Fixed(-1.0)) is None


def test_where_samples_tell_and_bits_are_read_fixed_tokens_are_compared_now_and_then():
    """By an engine that computes with the trainer's own tensors, and cannot tell so for some versions."""
    engine, trainer, freshness = Fixed(-1.0), Fixed(-1.0), Freshness(SEQUENCES, 1.0, 1)
    freshness.samples_tell, compared, found = True, [], LoadedAdapter(tensors={}, is_trainers=True)
    for version in range(104):
        engine.loaded_adapter = lambda busy=version in (20, 40): "it is busy" if busy else found
        if freshness.check(version, engine, trainer, Adapter(version=version, weights={}, config={})) is not None:
            compared.append(version)
    assert compared == [0, 1, 2, 20, 21, 40, 41, 50, 100]
    assert engine.calls == trainer.calls == len(compared)
    assert freshness.gap is not None, "that of the last comparison"


# -- a stale one -------------------------------------------------------------------------------------------------------
def test_a_generator_that_ignores_a_load_stops_the_run_with_both_numbers_and_the_version_it_holds(policy, engine):
    freshness = Freshness(SEQUENCES, 1e-3, 1)
    for version in (0, 1, 2):
        publish(version, policy, engine)
        freshness.check(version, engine, policy)
        for _, parameter in policy.named_parameters():  # stands for an update
            parameter.data += 0.01
    held, policy_now = engine.score(SEQUENCES), policy.score(SEQUENCES)
    engine.version = 3  # it says that it took version 3, and did nothing
    with pytest.raises(StaleAdapterError) as stopped:
        freshness.check(3, engine, policy)
    pairs = [(e, t) for row, other in zip(held, policy_now, strict=True) for e, t in zip(row, other, strict=True)]
    worst = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    message = str(stopped.value)
    assert "does not sample from policy version 3" in message
    assert f"log-prob {worst[0]:.6f}, the trainer {worst[1]:.6f}" in message
    assert "it still holds version 2 (gap 0.00e+00)" in message
    assert "threshold 1e-03" in message


def test_a_sum_that_is_not_the_policys_is_found_though_the_policy_learns_on_it(policy, backbone):
    engine = engine_of(policy, Weights.merged)
    freshness = Freshness(SEQUENCES, 1e-3, 1)
    for version in range(2):
        publish(version, policy, engine)
        freshness.check(version, engine, policy)
        policy.share_merged_weights()
    assert all(layer.lent for layer in layers_of(policy))
    for layer in layers_of(policy):
        layer.sums["sampler"].values.mul_(1.1)
    with pytest.raises(StaleAdapterError):
        freshness.check(1, engine, policy)


def test_an_engine_that_samples_from_the_bare_base_is_found(policy, engine):
    engine.version = None  # the load was lost: `TransformersGenerator` then uses the base
    with pytest.raises(StaleAdapterError) as stopped:
        Freshness(SEQUENCES, 1e-3, 1).check(0, engine, policy)
    assert "still holds" not in str(stopped.value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_stale_or_the_trainers_own_fault_by_step_and_key(number):
    with pytest.raises(StaleAdapterError):
        Freshness(SEQUENCES, 1e9, 1).check(0, Fixed(-1.0, number), Fixed(-1.0, -1.0))
    for version, said in ((0, r"^model\.path: the base's .* before the first"), (3, r"^step 3: .* lower trainer\.lr")):
        for engine_says in (-1.0, math.nan):
            with pytest.raises(BrokenRunError, match=said):
                Freshness(SEQUENCES, 1e9, 1).check(version, Fixed(-1.0, engine_says), Fixed(-1.0, number))


# -- what the engine holds, bit for bit --------------------------------------------------------------------------------
def step(policy, rate=1e-6):
    """Stands for a step of Adam."""
    for number, (_, parameter) in enumerate(policy.named_parameters()):
        with torch.no_grad():
            parameter += rate if number % 2 else -rate


def layers_of(policy):
    return [layer for layer in policy.model.modules() if isinstance(layer, LoraLinear)]


def lose(policy, engine, new):
    pass


def exchanged(policy, engine, new):
    names = {name: name.replace(".0.", "~").replace(".1.", ".0.").replace("~", ".1.") for name in new.weights}
    engine.load(replace(new, weights={names[name]: tensor for name, tensor in new.weights.items()}))


def after(spoil):
    """The engine loads the version, and what it holds is spoilt."""
    return lambda policy, engine, new: (engine.load(new), spoil(policy))


def flip_adapter(policy):
    layers_of(policy)[0].lora_A["sampler"].weight.data.view(torch.int32)[0, 0] ^= 1


def wrong_scale(policy):
    layers_of(policy)[3].scaling["sampler"] *= 1.5


def old_sum(policy, engine, new):
    sums = [Weight(*(x if x is None else x.clone() for x in layer.sums["sampler"])) for layer in layers_of(policy)]
    engine.load(new)
    for layer, total in zip(layers_of(policy), sums, strict=True):
        layer.sums["sampler"] = total


def copies_of(policy, kind):
    """What decoding multiplies with, {layer: Weight}: sums with adapters, or copies of layers without one."""
    return {layer: layer.sums["sampler"] for layer in layers_of(policy)} if kind == "sums" else policy._rounded


def flipped(kind, place):
    def flip(policy):
        values = list(copies_of(policy, kind).values())[place].values
        values.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[values.itemsize])[-1, -1] ^= 1

    return after(flip)


def swapped(kind):
    def swap(policy):
        copies = copies_of(policy, kind)
        first = next(iter(copies))
        shape = copies[first].values.shape
        second = next(layer for layer in copies if layer is not first and copies[layer].values.shape == shape)
        for layer, weight in {first: copies[second], second: copies[first]}.items():
            if kind == "sums":
                layer.sums["sampler"] = weight
            else:
                policy._rounded[layer] = weight

    return after(swap)


ANOTHER = "computes with another sum or copy of it"
ROUNDED = Weights.merged_bfloat16, Weights.merged_int8
FAULTS_OF_COPIES = (
    old_sum,
    *(fault for kind in ("sums", "copies") for fault in (swapped(kind), flipped(kind, 0), flipped(kind, -1))),
)


@each(
    ("weights", "fault", "said"),
    [
        (Weights.apart, lose,
         r"policy version 3: \d+ of the \d+ tensors that it was given .*; it still holds version 2 \("),
        (Weights.merged, lose, "it still holds version 2"),
        (Weights.merged_bfloat16, lose, "it still holds version 2"),
        (Weights.merged_int8, lose, "it still holds version 2"),
        (Weights.apart, exchanged, "which is that of mod"),
        (Weights.apart, after(flip_adapter), r"1 of the \d+ tensors .*lora_A"),
        (Weights.apart, after(wrong_scale),
         r"1 of the \d+ tensors .*lora_B with a norm of .* instead of .*, 1\.5 times"),
        (Weights.merged, old_sum, rf"version 3: base_model.*{ANOTHER}"),
        *((weights, fault, ANOTHER) for weights in ROUNDED for fault in FAULTS_OF_COPIES),
    ],
)  # fmt: skip
def test_an_engine_that_holds_something_else_is_stopped_at_a_rate_of_1e_6(make_roles, backbone, weights, fault, said):
    policy = make_roles(noise=0.02, **({"target_modules": ["q_proj", "o_proj"]} if said == ANOTHER else {}))
    engine = engine_of(policy, weights)
    freshness = Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1)
    for version in range(1, 3):
        freshness.check(version, engine, policy, publish(version, policy, engine))
        step(policy)
    new = policy.publish(3)
    fault(policy, engine, new)
    engine.version = 3
    with pytest.raises(StaleAdapterError, match=rf"^freshness: the engine does not hold .*{said}"):
        freshness.check(3, engine, policy, new)
    if fault in (lose, old_sum):  # which log-probs alone do not see
        assert Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1, read_back=False).check(3, engine, policy, new) is not None


def test_in_bfloat16_a_copy_of_the_matrices_that_was_not_made_again_is_seen(make_roles, model_config):
    base = load_backbone.__wrapped__(model_config(dtype="bfloat16"))
    policy = make_roles(backbone=base, noise=0.02)
    engine = engine_of(policy, Weights.merged)
    freshness = Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1)
    freshness.check(0, engine, policy, publish(0, policy, engine))
    step(policy, 1e-3)
    new = publish(1, policy, engine)
    freshness.check(1, engine, policy, new)
    for layer in layers_of(policy):
        copies, matrices, versions = layer.copies["sampler"]
        layer.copies["sampler"] = tuple(copy * 1.01 for copy in copies), matrices, versions
    with pytest.raises(StaleAdapterError, match="computes with another sum or copy"):
        freshness.check(1, engine, policy, new)


def test_an_engine_that_cannot_tell_what_it_holds_is_noted_once(backbone):
    notes = []
    freshness = Freshness(SEQUENCES, 1.0, 1, notes.append)
    adapter = Adapter(version=0, weights={}, config={})
    for version in range(3):
        freshness.check(version, Fixed(-1.0), Fixed(-1.0), replace(adapter, version=version))
    freshness.check(3, ScriptedGenerator({}, backbone.tokenizer), Fixed(-1.0), replace(adapter, version=3))
    assert notes == [
        "freshness: log-probs alone prove what the engine holds where it is not read back: it has no way to tell"
    ]


# -- in 16 bits --------------------------------------------------------------------------------------------------------
def bfloat16_gaps(num_tokens, seed, largest=1.56):
    """Gaps of identical weights as published: normal with a standard deviation of 0.05 nats, 95 % below 0.11, and a few
    tokens (one in 250) up to 1.56 apart."""
    dice = torch.Generator().manual_seed(seed)
    gaps = 0.05 * torch.randn(num_tokens, generator=dice, dtype=torch.float64)
    gaps[:: max(250, num_tokens // 8)] = largest
    return gaps


def scored(gaps):
    trainer = -5 * torch.rand(len(gaps), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Fixed(*(trainer + gaps).tolist()), Fixed(*trainer.tolist())


@each(
    ("share", "largest"),  # of the tokens beyond the bulk, as many as a standard deviation of 0.05 allows by Chebyshev
    [(0.0, 0.0), (0.05**2 / 0.5**2, 0.5), (0.05**2, 1.0), (0.05**2 / 1.5**2, 1.5)],
)
def test_in_bfloat16_10000_publishes_of_a_healthy_engine_raise_nothing_whatever_the_tail(share, largest):
    dice = torch.Generator().manual_seed(3)
    shape = 2500, FIXED_TOKENS
    gaps = 0.05 * torch.randn(shape, generator=dice) * (share < 0.005)
    tail = (torch.rand(shape, generator=dice) < share) * largest * (2 * torch.rand(shape, generator=dice).round() - 1)
    zeros = [0.0] * FIXED_TOKENS
    for row in gaps.where(tail == 0, tail).tolist():
        assert LIMITS_IN_16_BITS.allow(Gap.between(row, zeros))


def test_in_bfloat16_an_engine_with_few_tokens_to_compare_is_judged_by_their_mean():
    gaps = bfloat16_gaps(60, 0)
    assert Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1).check(0, *scored(gaps)) == pytest.approx(1.56, abs=1e-9)
    assert Gap.between([0.0] * 255, [1.0] * 255).percentile_99 is None
    with pytest.raises(StaleAdapterError):
        Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1).check(0, *scored(3 * bfloat16_gaps(60, 0, largest=0.0)))


@each(("spread", "share"), [
    (0.15, 1.0),  # a stale adapter that has moved every token by some tenths of a nat
    (1.0, 0.2),  # one that has moved a fifth of them by a nat
    (4.0, 0.05),  # a few of them by several nats: the mean stays below its limit
    (3.0, 1.0),  # another policy
])  # fmt: skip
def test_in_bfloat16_an_engine_with_another_adapter_stops_the_run(spread, share):
    for seed in range(20):
        dice = torch.Generator().manual_seed(1000 + seed)
        moved = torch.rand(FIXED_TOKENS, generator=dice) < share
        shift = spread * torch.randn(FIXED_TOKENS, generator=dice, dtype=torch.float64).where(moved, 0.0)
        gaps = bfloat16_gaps(FIXED_TOKENS, seed, largest=0.0) + shift
        assert (gaps.abs() > 1.5).float().mean() > 0.01 or gaps.abs().mean() > 0.1
        with pytest.raises(StaleAdapterError) as stopped:
            Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1).check(3, *scored(gaps))
        said = str(stopped.value)
        assert f"the log-probs of {FIXED_TOKENS} fixed tokens differ from the trainer's (mean gap " in said
        assert "allowed is a mean of 0.1 or a 99th percentile of 1.5" in said


def test_a_model_that_amplifies_its_roundings_has_limits_of_its_own():
    """As SmolLM2 with vLLM on an H100: a healthy engine is 0.102 nats from the trainer."""
    notes, gaps = [], torch.full((FIXED_TOKENS,), 0.102, dtype=torch.float64)
    engine, trainer = scored(gaps)
    trainer.noise = 0.079
    freshness = Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1, notes.append)
    for version in range(3):
        assert freshness.check(version, engine, trainer) == pytest.approx(0.102, abs=1e-9)
    freshness.check_again(2, engine)
    assert notes == [
        "freshness: one more rounding in each layer moves this model's log-probs by 0.079 nats on average, so that an "
        "engine may differ by a mean of 0.237 or a 99th percentile of 1.5"
    ]
    far = Fixed(*(value + 0.25 for value in trainer.values))
    with pytest.raises(StaleAdapterError, match=r"\(mean gap 2\.50e-01, .*allowed is a mean of 0\.237"):
        freshness.check(3, far, trainer)
    trainer.noise = 0.01  # the policy has other weights by now
    with pytest.raises(StaleAdapterError, match=r"\(mean gap 1\.02e-01, .*allowed is a mean of 0\.1 ") as stopped:
        freshness.check(4, engine, trainer)
    assert "it still holds" not in str(stopped.value)


def test_roundings_are_measured_where_an_engine_exceeds_the_limits_of_its_dtype_alone():
    engine, trainer = scored(bfloat16_gaps(FIXED_TOKENS, 0))
    Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1).check(0, engine, trainer)
    assert trainer.calls == 1
    for threshold in (1e-3, LIMITS_IN_32_BITS):  # a threshold of the user's, and float32
        trainer = Fixed(-1.0, noise=0.5)
        with pytest.raises(StaleAdapterError):
            Freshness(SEQUENCES, threshold, 1).check(0, Fixed(-1.2), trainer)
        assert trainer.calls == 1
    for noise in (math.nan, math.inf):  # of a model without finite log-probs when rounded
        engine, trainer = scored(torch.full((FIXED_TOKENS,), 0.11, dtype=torch.float64))
        trainer.noise = noise
        with pytest.raises(StaleAdapterError, match=r"allowed is a mean of 0\.1 "):
            Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1).check(0, engine, trainer)


def test_in_bfloat16_the_version_that_a_stale_engine_holds_is_named():
    freshness = Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1)
    engine, trainer = scored(bfloat16_gaps(FIXED_TOKENS, 0))
    freshness.check(4, engine, trainer)
    moved = torch.tensor(trainer.values) - 0.5 * torch.rand(FIXED_TOKENS, generator=torch.Generator().manual_seed(2))
    with pytest.raises(StaleAdapterError, match=r"policy version 5: .*; it still holds version 4 \(gap 4\.\d+e-02\)"):
        freshness.check(5, engine, Fixed(*moved.tolist()))


def test_what_is_rounded_decides_the_limits_and_how_many_tokens_are_compared(backbone):
    prompts = [Prompt(id=str(i), messages=(), token_ids=tuple(range(5, 25 + i % 7)), answer="1") for i in range(100)]

    def opened(dtype, threshold="auto", *, rounds=False, sums=False):
        settings = FreshnessConfig(threshold=threshold, every=1, read_back=True)
        base = SimpleNamespace(model=SimpleNamespace(dtype=dtype), tokenizer=backbone.tokenizer)
        keys = SimpleNamespace(rounds=rounds, rounds_sums=sums)
        return open_freshness(settings, SimpleNamespace(prompts=prompts), base, keys, print)

    # float16 has three more bits than bfloat16, so that it rounds 8 times as finely.
    sixteen, finer = limits_of(torch.bfloat16), limits_of(torch.float16)
    assert (sixteen.mean, sixteen.percentile_99) == (8 * finer.mean, 8 * finer.percentile_99) == (0.1, 1.5)
    assert limits_of(torch.float16, rounds=True) == limits_of(torch.float32, rounds=True) == sixteen
    assert limits_of(torch.float32) == LIMITS_IN_32_BITS
    assert opened(torch.float16).limits == LIMITS_IN_FLOAT16
    assert opened(torch.float16, sums=True).limits == opened(torch.bfloat16, sums=True).limits == LIMITS_IN_16_BITS
    assert opened(torch.float32, sums=True).limits == LIMITS_IN_32_BITS
    exact, rounded = opened(torch.float32), opened(torch.float32, rounds=True)
    assert (exact.limits, rounded.limits) == (LIMITS_IN_32_BITS, LIMITS_IN_16_BITS)
    assert exact.num_tokens < FIXED_TOKENS <= rounded.num_tokens
    assert exact.sequences == rounded.sequences[:2], "two prompts"
    asked = opened(torch.float32, 2.0, rounds=True)
    assert (asked.limits.largest, asked.limits.mean) == (2.0, math.inf)


# -- sampled tokens ----------------------------------------------------------------------------------------------------
FAULTY = 3
"""The version with which a fault begins, after the checks of 0, 1 and 2 by fixed tokens."""
WORDS = (
    "train", "steps=5", "prompts_per_step=2", "group_size=4", "generation=transformers",
    "generation.transformers.weights=apart", "generation.max_tokens=24", "lora.rank=2", "data.size=16",
    "data.held_out_size=4", "eval.every=0", "checkpoint.every=0", "model.device=cpu", "scoring.workers=0",
    "console=null", "algorithm.entropy_coef=0.01", "alarms=null", "minibatches=2",
)  # fmt: skip


def stale(load, engine, new):
    engine.version = new.version


def bit_flipped(load, engine, new):
    load(engine, new)
    flip_adapter(engine.slot)


def healthy(load, engine, new):
    load(engine, new)


def moved(groups, by):
    """By so much for (group, row, token)."""
    changed = []
    for p, group in enumerate(groups):
        rollouts = []
        for i, rollout in enumerate(group.rollouts):
            logprobs = tuple(x + by(p, i, t) for t, x in enumerate(rollout.completion.logprobs))
            rollouts.append(replace(rollout, completion=replace(rollout.completion, logprobs=logprobs)))
        changed.append(replace(group, rollouts=tuple(rollouts)))
    return changed


def wrong_beyond(groups):
    """Log-probs as of a decoder that is wrong from a position on."""
    return moved(groups, lambda p, i, t: -0.01 * (t >= 16))


@pytest.mark.parametrize("fault", [stale, wrong_beyond, slow(bit_flipped), slow(healthy)])
def test_a_fault_that_begins_late_stops_the_run_before_an_update(fault, tmp_path, monkeypatch, capsys):
    load, sample = TransformersGenerator.load, TransformersGenerator.sample
    score, update = Networks.score, Optimizer.update
    scores, updates = [], []

    def loaded(engine, new):
        (fault if new.version >= FAULTY and fault is not wrong_beyond else healthy)(load, engine, new)

    def sampled(engine, *args):
        groups = sample(engine, *args)
        return wrong_beyond(groups) if fault is wrong_beyond and engine.version >= FAULTY else groups

    def scored(roles, *args, **keys):
        scores.append(args)
        return score(roles, *args, **keys)

    monkeypatch.setattr(TransformersGenerator, "load", loaded)
    monkeypatch.setattr(TransformersGenerator, "sample", sampled)
    monkeypatch.setattr(Networks, "score", scored)
    monkeypatch.setattr(Optimizer, "update", lambda optimizer, lr: updates.append(lr) or update(optimizer, lr))
    code = cli.run([*WORDS, f"hydra.run.dir={tmp_path / 'run'}"])
    if fault is healthy:  # fixed tokens after 0, 1, 2; the policy's own before the checkpoint
        assert (code, len(scores), len(updates)) == (0, 4, 2 * 5)
    else:
        said = "did not sample step 4 from" if fault is wrong_beyond else "does not hold"
        assert (code, len(scores), len(updates)) == (1, 3, 2 * FAULTY)
        assert f"{said} policy version {FAULTY}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word",
    slow_but("", ["", "checkpoint.on_signal=now", "checkpoint.every=3", "freshness.every=9 checkpoint.every=3"]),
)
def test_no_checkpoint_is_kept_of_a_policy_whose_log_probs_are_not_finite(word, tmp_path, monkeypatch, capsys):
    """Also where a signal asks for it, before the first forward that would notice."""
    score, publish = Networks.score, Session.publish
    last, words = -1, [given for given in WORDS if given.split("=")[0] not in word]

    def scored(roles, *args, **keys):
        return [[math.nan] for _ in range(2)] if last == FAULTY else score(roles, *args, **keys)

    def published(session, version):
        nonlocal last
        publish(session, version)
        last = version
        if version == FAULTY and not word:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Session, "publish", published)
    monkeypatch.setattr(Networks, "score", scored)
    assert cli.run([*words, *word.split(), f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    assert f"step {FAULTY}: the policy has diverged" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob(f"checkpoints/*{FAULTY}"))


class Learner:
    """Whose log-probs of 1,000 sampled tokens lie so far from the engine's, those of the first `number` by `other`.

    One more rounding moves its log-probs by `noise`.
    """

    token_budget = 0

    def __init__(self, usual, other=0.0, number=0, *, noise=0.0):
        self.gaps, self.noise = torch.where(torch.arange(1000) < number, other, usual), noise
        sampled = torch.full((10, 100), -2.0)
        computed = sampled + self.gaps.view(10, 100)
        self.rows = SimpleNamespace(loss_mask=sampled < 0, sampled_logprobs=sampled)
        self.forward = SimpleNamespace(logprobs=lambda rows, token_budget: computed)

    def score(self, sequences, *, rounded=False):
        return [[-1.0 - self.noise * rounded] * 300]


@each(
    ("limits", "learner", "is_stopped"),
    [
        (LIMITS_IN_32_BITS, Learner(1e-5), False),
        (LIMITS_IN_32_BITS, Learner(1e-5, 0.002, 1), True),
        (LIMITS_IN_16_BITS, Learner(0.05, 1.4, 30), False),
        (LIMITS_IN_16_BITS, Learner(0.05, 1.6, 10), False),
        (LIMITS_IN_16_BITS, Learner(0.05, 1.6, 11), True),  # by the 99th percentile
        (LIMITS_IN_16_BITS, Learner(0.11), True),  # by the mean
        (LIMITS_IN_16_BITS, Learner(0.11, noise=0.05), False),  # which the model's own roundings explain
        (LIMITS_IN_32_BITS, Learner(0.11, noise=0.05), True),
        (LIMITS_IN_16_BITS, Learner(0.01, math.nan, 1), False),  # the trainer's own fault, which the update names
    ],
)
def test_sampled_tokens_are_judged_as_fixed_ones(limits, learner, is_stopped):
    freshness = Freshness([[1, 2]], limits, 1)
    check = partial(check_sampled, freshness, learner)
    check(learner.rows, learner.gaps, 4)  # an engine without weights, whose log-probs were never compared
    freshness.compared = True
    for given in (learner.gaps, None):
        if is_stopped:
            with pytest.raises(StaleAdapterError, match=r"log-probs of 1000 sampled tokens differ by up to"):
                check(learner.rows, given, 4)
        else:
            check(learner.rows, given, 4)
    learner.rows.sampled_logprobs[0, 0] = math.inf
    if not learner.gaps.isnan().any():
        with pytest.raises(StaleAdapterError, match="by up to inf nats"):
            check(learner.rows, None, 4)


@each(
    ("word", "expected"),
    [
        ("", True), ("generation.temperature=0.9", False), ("generation.top_p=0.9", False), ("lora.dropout=0.1", False),
        ("overlap.lag=1", False), ("freshness.threshold=0.01", False), ("environment=calculator", False),
        ("cluster.ranks=2", False),
    ],
)  # fmt: skip
def test_samples_tell_where_the_first_forward_computes_what_has_sampled_them(run_config, word, expected):
    assert samples_tell(run_config(*word.split())) is expected


# -- decoding, before the first step -----------------------------------------------------------------------------------
CONFIG = SimpleNamespace(
    generation=SimpleNamespace(max_tokens=20), prompts=SimpleNamespace(max_tokens=64), token_budget=256
)
TOKENS = [tuple(3 + (7 * i + 5 * k) % 200 for k in range(9 + 4 * i)) for i in range(3)]
PROMPTS = PromptSet(
    prompts=[Prompt(id=str(i), messages=(), answer="", token_ids=tokens) for i, tokens in enumerate(TOKENS)],
    num_tokens=[len(tokens) for tokens in TOKENS], fingerprint="", notes=(),
)  # fmt: skip


@pytest.fixture
def opened(backbone, make_roles):
    """The transformers engine and roles on this model, or on the embedded one, with an adapter that does something."""

    def build(model=None, **keys):
        mine = backbone
        if model is not None:
            plain = selection.install(model, KernelChoice.plain, own_attention=False)
            mine = replace(backbone, model=model, path="a folder", kernels=plain)
        roles = make_roles(backbone=mine, noise=0.05, **keys)
        generator = engine_of(roles, Weights.apart)
        generator.load(roles.publish(3))
        return generator, roles

    return build


def check(generator, roles, limits=LIMITS_IN_32_BITS):
    return check_decoding(generator, roles, PROMPTS, CONFIG, limits)


def test_right_decoding_passes_with_dropout_of_the_adapter_and_leaves_no_trace(opened):
    generator, roles = opened(dropout=0.5)
    seeds, sampling = [5, 9, 11], Sampling(max_tokens=6, temperature=1.0)
    before, state = generator.sample(PROMPTS.prompts, 2, seeds, sampling), torch.random.get_rng_state()
    gap = check(generator, roles)
    assert 0 < gap < 1e-4
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module.training for module in roles.model.modules())
    assert generator.sample(PROMPTS.prompts, 2, seeds, sampling) == before


def test_a_run_is_the_same_with_and_without_it(tmp_path, monkeypatch):
    of_these = {"steps": 1, "group_size": 2, "generation.max_tokens": 8, "lora.dropout": 0.1, "eval.every": 1}
    words = [word for word in WORDS if not word.startswith((*of_these, "checkpoint.every"))]
    words += [f"{key}={value}" for key, value in of_these.items()]
    checked = []

    def run(folder):
        assert cli.run([*words, f"hydra.run.dir={folder}"]) == 0
        files = [*(folder / "checkpoints").rglob("*.safetensors"), *(folder / "rollouts").iterdir()]
        return [file.read_bytes() for file in sorted(files)]

    def counted(*args):
        checked.append(check_decoding(*args))

    monkeypatch.setattr(session, "check_decoding", counted)
    with_it = run(tmp_path / "a")
    assert [gap < 1e-4 for gap in checked if gap is not None] == [True]
    monkeypatch.setattr(session, "check_decoding", lambda *args: None)
    assert run(tmp_path / "b") == with_it


def test_prompts_of_unlike_lengths_within_the_limits_are_made_of_any_data():
    for tokens in ([(1,)], [(1, 2)], TOKENS):
        prompts = [Prompt(id="", messages=(), answer="", token_ids=ids) for ids in tokens]
        probes = _probes(replace(PROMPTS, prompts=prompts), 20, 8)
        assert [len(probe.token_ids) for probe in probes] == [20, 5, 18]
        assert [Sampling(max_tokens=8, temperature=1.0).tokens_of(probe) for probe in probes] == [4, 8, 8]
        # A prefix cache would give a prompt of the run what was computed here.
        assert len(tokens[0]) == 1 or probes[0].token_ids[0] == tokens[0][1]


@pytest.mark.parametrize("wrong", ["prefill", "later"])
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text"])
def test_a_cache_with_wrong_rows_is_stopped(wrong, kind, opened, monkeypatch):
    generator, roles = opened(hybrid_models.random_model(kind))
    assert check(generator, roles) is not None
    keep = RepeatedCache.keep
    if wrong == "prefill":
        monkeypatch.setattr(repeated_cache, "take_rows", lambda cache, rows: cache.reorder_cache(rows.flip(0)))
    else:  # as many rows of the cache, but not those that are kept
        monkeypatch.setattr(RepeatedCache, "keep", lambda self, rows: keep(self, (rows - 1).clamp(min=0)))
    with pytest.raises(UserError, match=r"^model\.path: decoding does not give the log-probs of the trainer's forward"):
        check(generator, roles)


def test_a_state_that_padding_leaks_into_is_stopped(opened, monkeypatch):
    """A model that ignores the mask, as one does whose recurrent layers read what stands before a short prompt."""
    model = hybrid_models.random_model("lfm2")
    plain = model.forward
    generator, roles = opened(model)

    def forward(*args, attention_mask=None, **keys):
        left_padded = attention_mask is not None and not attention_mask[:, 0].all()
        return plain(*args, attention_mask=None if left_padded else attention_mask, **keys)

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(repeated_cache, "forward_arguments", lambda model: ("position_ids", "past_key_values"))
    with pytest.raises(UserError, match=r"^model\.path: decoding does not give"):
        check(generator, roles)


def test_a_model_that_reads_tokens_behind_is_stopped(opened):
    fields = hybrid_models.SIZES | {"head_dim": 8, "use_bidirectional_attention": True}
    config = AutoConfig.for_model("gemma3_text", **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").requires_grad_(False).eval()
    with pytest.raises(UserError, match=r"^model\.path: decoding .* gemma3_text: log-probs of \d+ sampled tokens"):
        check(*opened(model))


def test_what_is_random_in_training_alone_is_stopped_and_named(opened):
    """OPT's layers, which are recomputed in updates, call dropout by their config's number, which loading sets to 0."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    config = AutoConfig.for_model("opt", vocab_size=272, num_attention_heads=4, dropout=0.1, init_std=0.2, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
    set_checkpointing(model, True)
    generator, roles = opened(model)
    state = torch.random.get_rng_state()
    with pytest.raises(UserError, match=r"for a opt in training mode, and not otherwise \(its dropout"):
        check(generator, roles)
    assert torch.equal(torch.random.get_rng_state(), state)


class Shifted(GeneratorOver):
    """An engine whose log-probs are off by this much, in the first token of a completion alone or in all."""

    def __init__(self, generator, by, *, first_only):
        super().__init__(generator)
        self.by, self.first_only = by, first_only

    def sample(self, prompts, n, seeds, sampling):
        groups = self.generator.sample(prompts, n, seeds, sampling)
        return moved(groups, lambda *place: self.by * (not self.first_only or place == (0, 0, 0)))

    def sample_each(self, *args):
        return [self.sample(*args)]


def test_in_16_bits_the_mean_decides_and_in_float32_every_token(opened):
    generator, roles = opened()
    exact, rounded = LIMITS_IN_32_BITS, LIMITS_IN_16_BITS
    for by, first_only, limits, is_right in [
        (2e-3, True, exact, False),  # one token above the threshold
        (5e-4, False, exact, True),
        (1.0, True, rounded, True),  # of some 60 tokens: 0.02 on average
        (0.2, False, rounded, False),  # 0.2 on average; no token differs by more
        (math.nan, True, rounded, False),
        (0.0, False, Limits(mean=1e-12), True),  # the gap is a few roundings: below those of the model it is no fault
        (1.0, False, Limits(mean=1e-12), False),
    ]:
        shifted = Shifted(generator, by, first_only=first_only)
        if is_right:
            gap = check(shifted, roles, limits)
            assert gap > limits.mean or limits.mean > 1e-6
            continue
        by_1 = "does not give .* by up to 1 nats.* " if limits.mean == 1e-12 else ""
        said = rf"^model\.path: decoding {by_1}.*freshness\.threshold=<nats> loosens the check"
        with pytest.raises(UserError, match=said):
            check(shifted, roles, limits)
    without_weights = ScriptedGenerator({"*": ["1"]}, generator.tokenizer)
    assert check(without_weights, roles) is None
