from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from in_one_test import each

from rlft.config.schema import FreshnessConfig
from rlft.generation.engine import Generator
from rlft.generation.loaded_adapter import LoadedAdapter
from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.transformers import TransformersGenerator, Weights
from rlft.loop.driver import BrokenRunError
from rlft.loop.freshness import (
    FIXED_TOKENS,
    LIMITS_IN_16_BITS,
    LIMITS_IN_32_BITS,
    LIMITS_IN_FLOAT16,
    Freshness,
    Gap,
    StaleAdapterError,
    distance,
    fixed_sequences,
    flatten,
    limits_of,
    open_freshness,
)
from rlft.model.backbone import load_backbone
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.system.products import Weight
from rlft.types import Adapter, Prompt

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


@pytest.fixture
def engine(policy, backbone):
    """It computes as the trainer does, so that a gap of nothing is exactly 0."""
    return TransformersGenerator(policy, backbone.tokenizer, backbone.device, 64, weights=Weights.apart)


def move(policy):
    """Stands for an update."""
    for _, parameter in policy.named_parameters():
        parameter.data += 0.01


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
            engine = TransformersGenerator(roles, backbone.tokenizer, backbone.device, 64, weights=weights)
            engine.load(roles.publish(1))
            gap = Gap.between(flatten(engine.score(ids)), expected)
            assert gap.largest < LIMITS_IN_32_BITS.largest * times / 16, "there is room"
    norm.data.copy_(before)
    assert lowest < -20 * times


def test_the_largest_gap_of_all_tokens_is_measured():
    gap = Freshness(SEQUENCES, 1.0, 1).check(0, Fixed(-1.0, -2.0, -3.0), Fixed(-1.1, -2.5, -2.8))
    assert gap == pytest.approx(0.5, abs=1e-12)
    assert [distance(-2.0, -2.25), distance(-1.0, math.nan), distance(math.inf, math.inf)] == [0.25, math.inf, math.inf]
    with pytest.raises(StaleAdapterError, match=r"log-prob -2\.000000, the trainer -2\.250000 \(gap 2\.50e-01"):
        Freshness(SEQUENCES, 0.1, 1).check(0, Fixed(-1.0, -2.0), Fixed(-1.0, -2.25))


def test_a_gap_of_exactly_the_threshold_passes():
    assert Freshness(SEQUENCES, 0.5, 1).check(0, Fixed(-1.0), Fixed(-1.5)) == 0.5


def test_an_engine_without_weights_is_not_checked(backbone, policy):
    assert Freshness(SEQUENCES, 1e-3, 1).check(0, ScriptedGenerator({}, backbone.tokenizer), policy) is None


@pytest.mark.parametrize(("every", "checked"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])])
def test_it_checks_every_so_many_publishes(every, checked):
    freshness, engine = Freshness(SEQUENCES, 1.0, every), Fixed(-1.0)
    results = [freshness.check(version, engine, Fixed(-1.25)) for version in range(7)]
    assert [v for v, gap in enumerate(results) if gap is not None] == checked
    assert engine.calls == len(checked)


def test_the_first_publish_of_a_resumed_run_is_always_checked():
    freshness = Freshness(SEQUENCES, 1.0, 10)
    assert [freshness.check(v, Fixed(-1.0), Fixed(-1.0)) for v in (7, 8, 9, 10)] == [0.0, None, None, 0.0]


class Readable(Fixed):
    """An engine that computes with the trainer's own tensors, and cannot tell so for some versions."""

    unreadable = (20, 40)

    def loaded_adapter(self):
        if self.adapter.version in self.unreadable:
            return "it is busy"
        return LoadedAdapter(tensors={}, is_trainers=True)


def test_where_samples_tell_and_bits_are_read_fixed_tokens_are_compared_now_and_then():
    engine, trainer, freshness = Readable(-1.0), Fixed(-1.0), Freshness(SEQUENCES, 1.0, 1)
    freshness.samples_tell, compared = True, []
    for version in range(104):
        engine.adapter = Adapter(version=version, weights={}, config={})
        if freshness.check(version, engine, trainer, engine.adapter) is not None:
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
        move(policy)
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
    engine = TransformersGenerator(policy, backbone.tokenizer, backbone.device, 64, weights=Weights.merged)
    freshness = Freshness(SEQUENCES, 1e-3, 1)
    for version in range(2):
        publish(version, policy, engine)
        freshness.check(version, engine, policy)
        policy.share_merged_weights()
    layers = [layer for layer in policy.model.modules() if isinstance(layer, LoraLinear)]
    assert all(layer.lent for layer in layers)
    for layer in layers:
        layer.sums["sampler"].values.mul_(1.1)
    with pytest.raises(StaleAdapterError):
        freshness.check(1, engine, policy)


def test_an_engine_that_samples_from_the_bare_base_is_found(policy, engine):
    engine.version = None  # the load was lost: `TransformersGenerator` then uses the base
    with pytest.raises(StaleAdapterError) as stopped:
        Freshness(SEQUENCES, 1e-3, 1).check(0, engine, policy)
    assert "still holds" not in str(stopped.value)


def test_a_gap_that_fits_no_earlier_version_names_none():
    freshness = Freshness(SEQUENCES, 0.1, 1)
    freshness.check(0, Fixed(-1.0), Fixed(-1.0))
    with pytest.raises(StaleAdapterError) as stopped:
        freshness.check(1, Fixed(-3.0), Fixed(-2.0))
    assert "still holds" not in str(stopped.value)
    assert "-3.000000, the trainer -2.000000 (gap 1.00e+00" in str(stopped.value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_of_the_engine_that_is_not_finite_counts_as_stale(number):
    with pytest.raises(StaleAdapterError):
        Freshness(SEQUENCES, 1e9, 1).check(0, Fixed(-1.0, number), Fixed(-1.0, -1.0))


@pytest.mark.parametrize("engine_says", [-1.0, math.nan])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_of_the_trainer_that_is_not_finite_is_its_own_fault_by_step_and_key(number, engine_says):
    for version, said in ((0, r"^model\.path: the base's .* before the first"), (3, r"^step 3: .* lower trainer\.lr")):
        with pytest.raises(BrokenRunError, match=said):
            Freshness(SEQUENCES, 1e9, 1).check(version, Fixed(-1.0, engine_says), Fixed(-1.0, number))


def test_an_engine_that_scores_another_number_of_tokens_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        Freshness(SEQUENCES, 1.0, 1).check(0, Fixed(-1.0), Fixed(-1.0, -1.0))


# -- what the engine holds, bit for bit --------------------------------------------------------------------------------
def step(policy, rate=1e-6):
    """Stands for a step of Adam."""
    for number, (_, parameter) in enumerate(policy.named_parameters()):
        with torch.no_grad():
            parameter += rate if number % 2 else -rate


def layers_of(policy):
    return [layer for layer in policy.model.modules() if isinstance(layer, LoraLinear)]


def exchanged(weights):
    names = {name: name.replace(".0.", "~").replace(".1.", ".0.").replace("~", ".1.") for name in weights}
    return {names[name]: tensor for name, tensor in weights.items()}


def lose(policy, engine, new):
    pass


def wrong_scale(policy, engine, new):
    engine.load(new)
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
    def fault(policy, engine, new):
        engine.load(new)
        values = list(copies_of(policy, kind).values())[place].values
        values.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[values.itemsize])[-1, -1] ^= 1

    return fault


def swapped(kind):
    def fault(policy, engine, new):
        engine.load(new)
        copies = copies_of(policy, kind)
        first = next(iter(copies))
        second = next(
            each for each in copies if each is not first and copies[each].values.shape == copies[first].values.shape
        )
        for layer, weight in {first: copies[second], second: copies[first]}.items():
            if kind == "sums":
                layer.sums["sampler"] = weight
            else:
                policy._rounded[layer] = weight

    return fault


ANOTHER = "computes with another sum or copy of it"


@each(
    ("weights", "fault", "said"),
    [
        (
            Weights.apart,
            lose,
            r"policy version 3: \d+ of the \d+ tensors that it was given .*; it still holds version 2 \(",
        ),
        (Weights.merged, lose, "it still holds version 2"),
        (Weights.merged_bfloat16, lose, "it still holds version 2"),
        (Weights.merged_int8, lose, "it still holds version 2"),
        (Weights.apart, lambda p, e, new: e.load(replace(new, weights=exchanged(new.weights))), "which is that of mod"),
        (Weights.apart, wrong_scale, r"1 of the \d+ tensors .*lora_B with a norm of .* instead of .*, 1\.5 times"),
        (Weights.merged, old_sum, rf"version 3: base_model.*{ANOTHER}"),
        *(
            (weights, fault, ANOTHER)
            for weights in (Weights.merged_bfloat16, Weights.merged_int8)
            for fault in (
                old_sum,
                swapped("sums"),
                flipped("sums", 0),
                flipped("sums", -1),
                swapped("copies"),
                flipped("copies", 0),
                flipped("copies", -1),
            )
        ),
    ],
)
def test_an_engine_that_holds_something_else_is_stopped_at_a_learning_rate_of_1e_6(
    make_roles, backbone, weights, fault, said
):
    policy = make_roles(noise=0.02, **({"target_modules": ["q_proj", "o_proj"]} if said == ANOTHER else {}))
    engine = TransformersGenerator(policy, backbone.tokenizer, backbone.device, 64, weights=weights)
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
    engine = TransformersGenerator(policy, base.tokenizer, base.device, 64)
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
def bfloat16_gaps(num_tokens: int, seed: int, largest: float = 1.56) -> torch.Tensor:
    """Gaps of identical weights as published: normal with a standard deviation of 0.05 nats, 95 % below 0.11, and a few
    tokens (one in 250) up to 1.56 apart."""
    dice = torch.Generator().manual_seed(seed)
    gaps = 0.05 * torch.randn(num_tokens, generator=dice, dtype=torch.float64)
    gaps[:: max(250, num_tokens // 8)] = largest
    return gaps


def scored(gaps: torch.Tensor) -> tuple[Fixed, Fixed]:
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


def test_limits_follow_from_the_dtype():
    """float16 has three more bits than bfloat16, so that it rounds 8 times as finely."""
    sixteen, finer = limits_of(torch.bfloat16), limits_of(torch.float16)
    assert (sixteen.mean, sixteen.percentile_99) == (8 * finer.mean, 8 * finer.percentile_99) == (0.1, 1.5)
    assert limits_of(torch.float16, rounds=True) == limits_of(torch.float32, rounds=True) == sixteen
    assert limits_of(torch.float32) == LIMITS_IN_32_BITS


def test_in_bfloat16_an_engine_with_few_tokens_to_compare_is_judged_by_their_mean():
    gaps = bfloat16_gaps(60, 0)
    assert Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1).check(0, *scored(gaps)) == pytest.approx(1.56, abs=1e-9)
    assert Gap.between([0.0] * 255, [1.0] * 255).percentile_99 is None
    with pytest.raises(StaleAdapterError):
        Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1).check(0, *scored(3 * bfloat16_gaps(60, 0, largest=0.0)))


@each(
    ("spread", "share"),
    [
        (0.15, 1.0),  # a stale adapter that has moved every token by some tenths of a nat
        (1.0, 0.2),  # one that has moved a fifth of them by a nat
        (4.0, 0.05),  # a few of them by several nats: the mean stays below its limit
        (3.0, 1.0),  # another policy
    ],
)
def test_in_bfloat16_an_engine_with_another_adapter_stops_the_run(spread, share):
    for seed in range(20):
        dice = torch.Generator().manual_seed(1000 + seed)
        moved = torch.rand(FIXED_TOKENS, generator=dice) < share
        shift = spread * torch.randn(FIXED_TOKENS, generator=dice, dtype=torch.float64).where(moved, 0.0)
        gaps = bfloat16_gaps(FIXED_TOKENS, seed, largest=0.0) + shift
        assert (gaps.abs() > 1.5).float().mean() > 0.01 or gaps.abs().mean() > 0.1
        with pytest.raises(StaleAdapterError) as stopped:
            Freshness(SEQUENCES, LIMITS_IN_16_BITS, 1).check(3, *scored(gaps))
        assert f"the log-probs of {FIXED_TOKENS} fixed tokens differ from the trainer's (mean gap " in str(
            stopped.value
        )
        assert "allowed is a mean of 0.1 or a 99th percentile of 1.5" in str(stopped.value)


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


@pytest.mark.parametrize("noise", [math.nan, math.inf])
def test_a_model_without_finite_log_probs_when_rounded_keeps_the_limits_of_its_dtype(noise):
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


def test_a_percentile_is_what_99_of_100_tokens_do_not_exceed():
    gap = Gap.between([0.0] * 1000, [float(i) for i in range(1, 1001)])
    assert gap == Gap(mean=500.5, largest=1000.0, percentile_99=990.0)


class _Rounds:
    def __init__(self, rounds, sums=False):
        self.rounds, self.rounds_sums = rounds, sums


def test_float32_is_judged_as_ever_by_the_largest_gap_of_two_prompts(backbone, arithmetic_prompts, settings_of):
    exact = open_freshness(settings_of("auto"), arithmetic_prompts, backbone, _Rounds(False), print)
    assert exact.limits == LIMITS_IN_32_BITS
    assert exact.sequences == fixed_sequences(arithmetic_prompts, backbone)
    assert len(exact.sequences) == 2
    rounded = open_freshness(settings_of("auto"), arithmetic_prompts, backbone, _Rounds(True), print)
    assert rounded.limits == LIMITS_IN_16_BITS
    assert rounded.num_tokens >= FIXED_TOKENS
    assert rounded.sequences[:2] == exact.sequences
    asked = open_freshness(settings_of(2.0), arithmetic_prompts, backbone, _Rounds(True), print)
    assert (asked.limits.largest, asked.limits.mean) == (2.0, math.inf)


@each(
    ("dtype", "sums", "limits"),
    [
        (torch.float16, False, LIMITS_IN_FLOAT16),
        (torch.float16, True, LIMITS_IN_16_BITS),
        (torch.bfloat16, True, LIMITS_IN_16_BITS),
        (torch.float32, True, LIMITS_IN_32_BITS),
    ],
)
def test_sums_of_base_and_adapter_that_are_rounded_to_16_bits_have_their_limits(
    dtype, sums, limits, backbone, arithmetic_prompts, settings_of
):
    based = SimpleNamespace(model=SimpleNamespace(dtype=dtype), tokenizer=backbone.tokenizer)
    assert open_freshness(settings_of("auto"), arithmetic_prompts, based, _Rounds(False, sums), print).limits == limits


@pytest.fixture
def settings_of():
    return lambda threshold: FreshnessConfig(threshold=threshold, every=1, read_back=True)


@pytest.fixture
def arithmetic_prompts(backbone):
    prompts = [Prompt(id=str(i), messages=(), token_ids=tuple(range(5, 25 + i % 7)), answer="1") for i in range(100)]
    return SimpleNamespace(prompts=prompts)
