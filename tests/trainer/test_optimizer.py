"""Optimizers over named parameters, a state that goes through a checkpoint unchanged, and the metrics of a step."""

import itertools
import math
import sys
from types import ModuleType

import pytest
import torch
from in_one_test import each
from met_ranks import together
from safetensors.torch import load_file, save_file
from torch.nn import Parameter

from rlft.config.trainer import OptimizerKind, Schedule, TrainerConfig
from rlft.trainer.optimizer import NonFiniteGradientError, Optimizer, learning_rate
from rlft.trainer.ranks import LaneShare
from rlft.trainer.update import PassRecord, UpdateRecord, step_metrics


def config(**changes):
    keys = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 100.0, "reset_every": 0}
    keys |= {"optimizer": OptimizerKind.adamw, "lr": 0.5, "schedule": Schedule.constant, "warmup": 0}
    return TrainerConfig(**keys | changes)


def parameters(*values):
    return [(f"p{i}", Parameter(torch.tensor([value], dtype=torch.float64))) for i, value in enumerate(values)]


def set_gradients(named, *values):
    for (_, parameter), value in zip(named, values, strict=True):
        parameter.grad = torch.tensor([value], dtype=torch.float64)


def test_the_first_update_moves_each_parameter_by_the_rate_against_its_gradients_sign():
    """Adam's first step: m/(1-b1) = g and v/(1-b2) = g^2, so the move is lr * g / (|g| + eps) = lr * sign(g). AdamW's
    decay comes first, p <- p (1 - lr * decay); a zero gradient adds nothing."""
    named = parameters(1.0, 1.0, 2.0)
    optimizer = Optimizer(named, config(weight_decay=0.1))
    set_gradients(named, 3.0, -0.25, 0.0)
    assert optimizer.update(0.1) == pytest.approx(math.sqrt(3.0**2 + 0.25**2), rel=1e-15)
    # eps = 1e-8 beside a gradient of 0.25 shortens the second move by 4e-8 of it.
    assert [p.item() for _, p in named] == pytest.approx([0.99 - 0.1, 0.99 + 0.1, 2 * 0.99], abs=1e-8)
    assert named[2][1].item() == pytest.approx(2 * 0.99, rel=1e-15)


def test_the_norm_is_told_before_clipping_and_the_gradient_is_clipped():
    """Seen in the first moment, (1 - b1) g, g scaled from norm 5 (3 and 4) to 1; clip_grad_norm_ adds 1e-6 to 5."""
    named = parameters(0.0, 0.0)
    optimizer = Optimizer(named, config(max_grad_norm=1.0))
    set_gradients(named, 3.0, 4.0)
    assert optimizer.update(0.1) == pytest.approx(5.0, rel=1e-15)
    state = optimizer.state()
    assert state["exp_avg/p0"].item() == pytest.approx(0.1 * 0.6, rel=1e-6)
    assert state["exp_avg/p1"].item() == pytest.approx(0.1 * 0.8, rel=1e-6)


@each(("role", "bad", "remedy"), [("policy", math.nan, r"trainer\.lr"), ("policy", math.inf, r"trainer\.lr"),
                                  ("critic", math.nan, r"critic\.lr or use"),
                                  ("reward_model", math.nan, r"reward_model\.lr")])  # fmt: skip
def test_a_gradient_that_is_no_number_stops_the_run_before_any_parameter_moves(role, bad, remedy):
    named = parameters(1.0, 2.0)
    optimizer = Optimizer(named, config(), role)
    set_gradients(named, 1.0, bad)
    with pytest.raises(NonFiniteGradientError, match=rf"^{role}/grad_norm is {bad}: .* Lower {remedy}"):
        optimizer.update(0.1)
    assert [p.item() for _, p in named] == [1.0, 2.0]
    assert optimizer.state() == {}


def test_an_update_in_which_nothing_taught_anything_still_counts():
    """Without a backward there are no gradients; the moments decay and the count goes on, as with gradients of 0."""
    named = parameters(1.0)
    optimizer = Optimizer(named, config())
    set_gradients(named, 1.0)
    optimizer.update(0.1)
    assert named[0][1].grad is None
    assert optimizer.update(0.1) == 0.0
    state = optimizer.state()
    assert (state["step/p0"].item(), state["exp_avg/p0"].item()) == (2, pytest.approx(0.9 * 0.1, rel=1e-15))


QMAP = torch.linspace(0, 1, 256)


class EightBits(torch.optim.Optimizer):
    """Keeps its state as bitsandbytes' optimizers do: a number of updates, 8-bit codes and their scale."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            codes = state.get("state1", torch.zeros_like(p, dtype=torch.uint8)).double() * state.get("absmax1", 0) / 255
            mean = 0.9 * codes + 0.1 * p.grad.abs()
            state["step"] = state.get("step", 0) + 1
            state["qmap1"] = QMAP
            state["absmax1"] = mean.max()
            state["state1"] = (mean / mean.max() * 255).round().to(torch.uint8)
            p.data -= self.param_groups[0]["lr"] * p.grad / (mean * state["step"])


MATRICES = {
    "layers.0.q_proj.lora_A.policy.weight": (4, 6), "layers.0.q_proj.lora_B.policy.weight": (8, 4),
    "layers.0.q_proj.lora_magnitude_vector.policy": (8,), "layers.0.experts.lora_A.policy.weight": (8, 6),
    "layers.0.experts.base_layer.lora_B.policy.weight": (8, 8), "embed_tokens.weight": (9, 6),
    "transformer.word_embeddings.weight": (9, 6), "lm_head.weight": (9, 6), "output.weight": (9, 6),
    "layers.0.mixer.A_log": (6, 4), "layers.0.experts.gate_up_proj_bias": (2, 6), "critic.head.weight": (1, 6),
}  # fmt: skip
"""{name: shape} of an adapter's parameters, of a critic's head, and of what only whole models train: the first two are
matrices."""


def matrices():
    random = torch.Generator().manual_seed(0)
    return [(name, Parameter(torch.randn(size, generator=random).double())) for name, size in MATRICES.items()]


def moved(named, optimizer, seed):
    """What an update with random gradients at a rate of 0.1 takes from each parameter."""
    random, before = torch.Generator().manual_seed(seed), {name: p.detach().clone() for name, p in named}
    for _, parameter in named:
        parameter.grad = torch.randn(parameter.shape, generator=random).double()
    optimizer.update(0.1)
    return {name: before[name] - p.detach() for name, p in named}


@pytest.fixture
def eight_bits(monkeypatch):
    """`EightBits` in the place of bitsandbytes' AdamW."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    optim = ModuleType("bitsandbytes.optim")
    optim.AdamW8bit = EightBits
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optim)


@each("kind", list(OptimizerKind))
def test_the_state_of_every_kind_goes_through_a_checkpoint(kind, eight_bits, tmp_path):
    whole, first, second = matrices(), matrices(), matrices()
    one, before, after = (Optimizer(named, config(optimizer=kind)) for named in (whole, first, second))
    for seed in (1, 2):
        moved(whole, one, seed)
        moved(first, before, seed)
    assert all(parameter._version for _, parameter in whole), "copies in 16 bits are known to be old by that"
    save_file(before.state(), tmp_path / "optimizer.safetensors")
    for (_, own), (_, saved) in zip(second, first, strict=True):
        own.data.copy_(saved.data)
    after.restore(loaded := load_file(tmp_path / "optimizer.safetensors"))
    state, kept = one.state(), {name: tensor.clone() for name, tensor in one.state().items()}
    for seed in (3, 4):
        moved(whole, one, seed)
        moved(second, after, seed)
    for (name, found), (_, expected) in zip(second, whole, strict=True):
        assert torch.equal(found, expected), name
    assert after.state().keys() == one.state().keys()
    for copy in (state, loaded):
        assert all(torch.equal(copy[name], tensor) for name, tensor in kept.items()), "later updates touch no copy"


@each("kind", list(OptimizerKind))
def test_ranks_that_divide_the_moments_move_all_parameters_as_one_process_does(kind, eight_bits, met):
    """Three ranks, then two that go on with what the three held together."""
    keys = config(optimizer=kind, max_grad_norm=1.0, weight_decay=0.1)
    whole = matrices()
    one, held, seeds = Optimizer(whole, keys), {}, iter(range(9))
    for ranks in (3, 2):
        of_ranks, exchanges = [matrices() for _ in range(ranks)], met(ranks)
        optimizers = [Optimizer(named, keys) for named in of_ranks]
        for rank, (named, optimizer) in enumerate(zip(of_ranks, optimizers, strict=True)):
            optimizer.divide(LaneShare(lanes=ranks, rank=rank, ranks=ranks, exchange=exchanges[rank]))
            optimizer.restore(held)
            for (_, own), (_, trained) in zip(named, whole, strict=True):
                own.data.copy_(trained.data)
        for seed in itertools.islice(seeds, 3):
            moved(whole, one, seed)
            together([lambda n=n, o=o, s=seed: moved(n, o, s) for n, o in zip(of_ranks, optimizers, strict=True)])
        for named in of_ranks:
            assert all(torch.equal(p, expected) for (_, p), (_, expected) in zip(named, whole, strict=True))
        states = [optimizer.state() for optimizer in optimizers]
        held = {name: tensor for state in states for name, tensor in state.items()}
        assert len(held) == sum(map(len, states)), "no two ranks hold the same moment"
        assert held.keys() == one.state().keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in one.state().items())
        sizes = [sum(p.numel() for name, p in whole if f"step/{name}" in state) for state in states]
        assert kind is OptimizerKind.muon or max(sizes) < 1.1 * sum(sizes) / ranks  # its matrices count no updates


def test_muon_moves_matrices_along_an_orthogonal_one_as_far_as_adamw_and_adamw_the_rest():
    """Muon's five iterations bring singular values between 0.68 and 1.14 (Jordan, "Muon", 2024); the move is 0.2 lr
    sqrt(the larger size) times that (arXiv 2502.16982, equation 4). AdamW's first move is lr for every number."""
    named = matrices()
    for name, taken in moved(named, Optimizer(named, config(optimizer=OptimizerKind.muon, eps=1e-12)), 1).items():
        if name in list(MATRICES)[:2]:
            values = torch.linalg.svdvals(taken) / (0.1 * 0.2 * max(taken.shape) ** 0.5)
            assert 0.6 < values.min() <= values.max() < 1.25, name
        else:
            torch.testing.assert_close(taken.abs(), torch.full_like(taken, 0.1), rtol=1e-6, atol=0)


def test_after_a_reset_an_update_is_that_of_a_fresh_optimizer():
    """Adam's moments of 3, then of -0.5 without them: the first step is lr * sign(g), in any direction before."""
    named, fresh = parameters(1.0), parameters(0.9)
    old, new = Optimizer(named, config()), Optimizer(fresh, config())
    set_gradients(named, 3.0)
    old.update(0.1)
    assert named[0][1].item() == pytest.approx(0.9, abs=1e-8)
    old.reset()
    assert old.state() == {}
    fresh[0][1].data.copy_(named[0][1].data)
    for optimizer, parameter in ((old, named), (new, fresh)):
        set_gradients(parameter, -0.5)
        optimizer.update(0.1)
    assert named[0][1].item() == fresh[0][1].item() == pytest.approx(1.0, abs=1e-8)
    assert {n: t.tolist() for n, t in old.state().items()} == {n: t.tolist() for n, t in new.state().items()}


def test_discarded_gradients_move_nothing_and_leave_no_moments():
    named = parameters(1.0)
    optimizer = Optimizer(named, config())
    set_gradients(named, 3.0)
    optimizer.discard()
    assert (named[0][1].item(), named[0][1].grad, optimizer.state()) == (1.0, None, {})
    # Nor are they part of the next update: its gradient of 0.5 alone gives a first moment of (1 - 0.9) * 0.5.
    set_gradients(named, 0.5)
    optimizer.update(0.1)
    assert optimizer.state()["exp_avg/p0"].item() == pytest.approx(0.05, rel=1e-15)


# -- the rate of each update -------------------------------------------------------------------------------------------
@each(
    ("kind", "warmup", "num_updates", "expected"),
    [
        (Schedule.constant, 0, 3, [2.0] * 3),
        (Schedule.constant, 2, 9, [1.0] + [2.0] * 8),
        (Schedule.linear, 0, 4, [2.0, 1.5, 1.0, 0.5]),  # update u of 4 has done u/4 of the way: 2 * (1 - u/4)
        # 2 * (1 + cos(pi u/4)) / 2 for u = 0..3
        (Schedule.cosine, 0, 4, [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)]),
        # Four steps up, then the schedule from the whole rate on; a warm-up longer than the run only rises.
        (Schedule.linear, 4, 8, [0.5, 1.0, 1.5, 2.0, 2.0, 1.5, 1.0, 0.5]),
        (Schedule.cosine, 4, 6, [0.5, 1.0, 1.5, 2.0, 2.0, 1.0]),
        *((kind, 8, 4, [0.25, 0.5, 0.75, 1.0]) for kind in Schedule),
    ],
)
def test_rates_of_a_run_by_hand(kind, warmup, num_updates, expected):
    scheduled = config(lr=2.0, schedule=kind, warmup=warmup)
    found = [learning_rate(scheduled, update, num_updates) for update in range(num_updates)]
    assert found == pytest.approx(expected, rel=1e-15)


# -- the metrics of a step ---------------------------------------------------------------------------------------------
def done(share=1.0, *, real=0, network=0, **values):
    """A pass with these metrics, of which `__` stands for a slash."""
    metrics = {name.replace("__", "/"): torch.tensor(value).item() for name, value in values.items()}
    return PassRecord(metrics=metrics, share=share, real=real, network=network)


def update(*passes, **optimizers):
    """An update of one lane with these passes."""
    numbers = {name.replace("__", "/"): value for name, value in optimizers.items()}
    return UpdateRecord(passes={0: passes}, costs=[1.0], optimizers=numbers)


def optimizers(critic_lr, grad_norm):
    return {"critic__lr": critic_lr, "policy__grad_norm": grad_norm}


STEPS = {
    "passes are added up, and updates averaged": (
        [
            update(done(loss__total=1.0, kl__old=0.25), done(loss__total=2.0, kl__old=0.5), **optimizers(0.5, 4.0)),
            update(done(loss__total=-1.0, kl__old=0.25), **optimizers(0.25, 2.0)),
        ],
        {"loss/total": 1.0, "loss/policy": 0.0, "kl/old": 0.5, "critic/lr": 0.375, "policy/grad_norm": 3.0},
    ),
    "maxima are combined by maximum": (
        [update(done(0.5, sampler__logprob_gap_max=value)) for value in (0.5, 2.0, 1.0)],
        {"sampler/logprob_gap_max": 2.0},
    ),
    # A quarter of the tokens is forwarded; the algorithm divides by all of them.
    "means are of the forwarded tokens, losses of the whole batch": (
        [update(done(0.25, loss__policy=0.1, ratio__clip_high_fraction=0.05, sampler__logprob_gap_max=0.3))],
        {"loss/policy": 0.1, "ratio/clip_high_fraction": 0.2, "sampler/logprob_gap_max": 0.3},
    ),
    "where nothing was forwarded the loss is 0": (
        [update(policy__grad_norm=0.0, policy__lr=0.1)],
        {"loss/total": 0.0, "loss/policy": 0.0, "policy/lr": 0.1, "tokens/trained": 0, "waste/padding_fraction": 0.0},
    ),
    # Updates of 0 + 0, 0.25 + 0.5 and 1 + 0.25: their mean is (0 + 0.75 + 1.25) / 3, the last one 1.25.
    "the step has moved the policy by the KL of the last update alone": (
        [update(*(done(kl__old=part) for part in two)) for two in ((0.0, 0.0), (0.25, 0.5), (1.0, 0.25))],
        {"kl/old_last": 1.25, "kl/old": 2 / 3},
    ),
    "that KL is of the forwarded tokens, too": ([update(done(0.5, kl__old=0.125))], {"kl/old_last": 0.25}),
    "nothing was forwarded last": ([update(done(0.5, kl__old=0.125)), update()], {"kl/old_last": 0.0}),
    "without an update": ([], {"kl/old_last": 0.0}),
    # 30 and 20 tokens in rectangles of 40 and 24: 14 of 64 are padding. They are sums, not means over updates.
    "tokens are added up, and padding is their share": (
        [update(done(real=30, network=40)), update(done(real=20, network=24))],
        {"tokens/trained": 50, "waste/padding_fraction": 14 / 64},
    ),
    # Weights 1, 1, 1 and 3 in passes of three tokens and one: (sum w)^2 / (n sum w^2) = 36 / (4 x 12).
    "the effective sample size is of all passes together": (
        [update(*(done(sampler__weight=0.75, sampler__weight_squared=squared) for squared in (0.75, 2.25)))],
        {"sampler/effective_sample_size": 0.75},
    ),
}


@each("case", STEPS)
def test_metrics_of_a_step(case):
    updates, expected = STEPS[case]
    found = step_metrics([updates])
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    assert not {"sampler/weight", "sampler/weight_squared"} & found.keys()


def test_a_step_has_its_losses_the_counts_of_its_passes_and_what_these_and_the_optimizers_give():
    always = {"kl/old_last", "loss/policy", "loss/total", "tokens/trained", "waste/padding_fraction"}
    assert step_metrics([[]]).keys() == always
    assert step_metrics([[update(done(kl__reference=0.5), policy__lr=0.1)]]).keys() == always | {
        "kl/reference", "policy/lr",
    }  # fmt: skip


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_maximum_does_not_swallow_nan(values):
    passes = [done(sampler__logprob_gap_max=value) for value in values]
    assert math.isnan(step_metrics([[update(*passes)]])["sampler/logprob_gap_max"])


def test_lanes_of_all_ranks_are_added_in_their_order_and_say_how_balanced_they_are():
    # 1e16 + 1 - 1e16 is 0 in this order, and 1 in the order in which the ranks come.
    first = UpdateRecord(passes={0: [done(kl__old=1e16)], 2: [done(kl__old=-1e16)]}, costs=[3, 1, 2], optimizers={})
    second = UpdateRecord(passes={1: [done(kl__old=1.0)]}, costs=[3, 1, 2], optimizers={"policy/lr": 0.5})
    found = step_metrics([[first], [second]])
    assert (found["kl/old"], found["lanes/balance"]) == (0.0, 2 / 3)
    assert "policy/lr" not in found, "rank 0 has the numbers of the optimizers"
