"""A learned reward that is trained during a run: which pairs, when, and that it resumes to the same bits."""

import math
from itertools import product

import half_model
import pytest
import torch
from reward_groups import group_of
from slow_cases import slow

from rlft.config.model import RewardModelConfig
from rlft.config.trainer import OptimizerKind, Schedule, TrainerConfig
from rlft.model.forward import Forward
from rlft.model.reward_model import open_learned, parts_within
from rlft.runs import checkpoint
from rlft.trainer.reward_training import Pair, RewardRefresh, flat, pairs_of, unflat
from rlft.types import Prompt, Scores

model_config, backbone = half_model.model_config, half_model.backbone

ROLE = "reward_taste"
TRAINER = TrainerConfig(
    optimizer=OptimizerKind.adamw, lr=1e-5, schedule=Schedule.cosine, warmup=9, beta1=0.9, beta2=0.999, eps=1e-8,
    weight_decay=0.0, max_grad_norm=1.0, reset_every=0,
)  # fmt: skip


@pytest.fixture
def make_refresh(make_roles):
    """Builds a RewardRefresh of a fresh reward on the embedded model; `noise` is added to its adapter and head."""

    def make(noise=0.0, seed=0, token_budget=10**6, dropout=0.0, **keys):
        roles = make_roles(noise=0.05, token_budget=token_budget, dropout=dropout)
        open_learned("taste", None, roles, token_budget=10**6, center=0.0, scale=1.0, learns=True)
        generator = torch.Generator().manual_seed(3)
        for _, parameter in roles.named_parameters(ROLE):
            parameter.data += noise * torch.randn(parameter.shape, generator=generator)
        fixed = {
            "refresh_every": 2, "labels": "right", "pairs": 100, "pairs_per_group": 100, "replay": 0.1,
            "capacity": 100, "epochs": 1, "pairs_per_update": 100, "lr": 1e-3,
        }  # fmt: skip
        return RewardRefresh(RewardModelConfig(**fixed | keys), roles, ROLE, TRAINER, seed)

    return make


@pytest.fixture
def form_pairs(make_prompt, backbone):
    """Pairs of a whole answer and one that lacks a tag, of the sums of these two ranges."""

    def ids(text):
        return tuple(backbone.tokenizer(text, add_special_tokens=False)["input_ids"])

    def pair(x, y):
        lacking = f"<answer>{x + y}" if (x + y) % 2 else f"{x + y}</answer>"
        prompt = make_prompt(f"What is {x} + {y}?").token_ids
        return Pair(prompt=prompt, chosen=ids(f"<answer>{x + y}</answer>"), rejected=ids(lacking))

    return lambda first, second: [pair(x, y) for x, y in product(first, second)]


def group(number, *completions):
    """Siblings of a prompt of its own, by their token ids."""
    return group_of(Prompt(id=str(number), messages=(), answer="", token_ids=(5, 6, 7, 10 + number)), completions)


def scores(*labels):
    """The run's total says the opposite of the labels: it must not be read."""
    values = torch.tensor(labels)
    return Scores(total=-values, by_reward={"right": values, "wrong": -values})


def some_step(number, size=4):
    """Two groups that differ from step to step, half of each right."""
    made = [group(p, *([20 + number, 30 + p, 40 + i] for i in range(size))) for p in range(2)]
    return made, scores(*[[float(i % 2) for i in range(size)]] * 2)


def numbered(*numbers):
    return [Pair(prompt=(5, 6), chosen=(20 + n, 9), rejected=(21 + n,)) for n in numbers]


def tensors(refresh):
    """Everything of it that moves, copied."""
    head = {f"head/{name}": w for name, w in refresh.roles.heads[ROLE].weights().items()}
    return {**refresh.roles.weights(ROLE), **head, **refresh.state()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- pairs -----------------------------------------------------------------------------------------------------------
def test_pairs_are_siblings_with_unlike_labels_and_equal_tokens_count_once():
    a, b, c = (1,), (2, 2), (3,)
    # a and b are right, c is wrong; a comes twice. Of (a, c), (a, c) and (b, c) two remain.
    assert pairs_of(group(0, a, c, a, b), [1.0, 0.0, 1.0, 1.0]) == [
        Pair(prompt=(5, 6, 7, 10), chosen=a, rejected=c),
        Pair(prompt=(5, 6, 7, 10), chosen=b, rejected=c),
    ]
    # Three ranked answers are 3 x 2 / 2 pairs.
    ranked = [(pair.chosen, pair.rejected) for pair in pairs_of(group(0, a, b, c), [0.0, 0.5, 1.0])]
    assert ranked == [(b, a), (c, a), (c, b)]
    assert pairs_of(group(0, a, b), [1.0, 1.0]) == []


def test_a_step_gives_a_bounded_number_of_pairs_of_each_group_by_the_label_reward(make_refresh):
    refresh = make_refresh(pairs_per_group=3)
    groups = [group(0, (1,), (2,), (3,), (4,)), group(1, (1,), (2,), (3,), (4,)), group(2, (1,), (2,), (3,), (4,))]
    refresh.collect(1, groups, scores([1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]))
    # 4 pairs, 3 pairs, none.
    assert [pair.prompt[-1] for pair in refresh.waiting] == [10] * 3 + [11] * 3
    assert {pair.chosen for pair in refresh.waiting if pair.prompt[-1] == 10} <= {(1,), (3,)}
    others = {(pair.chosen, pair.rejected) for pair in refresh.waiting if pair.prompt[-1] == 11}
    assert others == {((4,), (1,)), ((4,), (2,)), ((4,), (3,))}


def test_which_pairs_are_taken_is_a_function_of_seed_and_step(make_refresh):
    def taken(seed, step):
        refresh = make_refresh(seed=seed, pairs_per_group=3)
        torch.manual_seed(step)
        refresh.collect(step, *some_step(0, size=12))
        return list(refresh.waiting)

    assert taken(0, 1) == taken(0, 1)
    assert taken(0, 1) != taken(0, 2)
    assert taken(0, 1) != taken(1, 1)


def test_only_the_newest_pairs_wait(make_refresh):
    refresh = make_refresh(pairs=3)
    for n in range(5):
        refresh.collect(n, [group(n, (1,), (2,))], scores([1.0, 0.0]))
    assert [pair.prompt[-1] for pair in refresh.waiting] == [12, 13, 14]


def test_pairs_go_into_tensors_and_back():
    pairs = [*numbered(1, 2), Pair(prompt=(5,), chosen=(), rejected=(8, 8, 8))]
    # Three pairs of 2 + 2 + 1, 2 + 2 + 1 and 1 + 0 + 3 tokens.
    assert flat(pairs)["lengths"].tolist() == [[2, 2, 1], [2, 2, 1], [1, 0, 3]]
    assert flat(pairs)["token_ids"].tolist() == [5, 6, 21, 9, 22, 5, 6, 22, 9, 23, 5, 8, 8, 8]
    assert unflat(flat(pairs)) == pairs
    assert unflat(flat([])) == []


# -- when ------------------------------------------------------------------------------------------------------------
def test_a_training_is_due_every_so_many_steps_if_there_are_pairs(make_refresh):
    refresh, due = make_refresh(refresh_every=2), []
    for step in range(1, 9):
        if step < 6:
            refresh.collect(step, *some_step(step))
        if refresh.train_if_due(step):
            due.append((step, len(refresh.earlier)))
    # A step gives 8 pairs: two groups of 2 right and 2 wrong. None is new when step 8 is done.
    assert due == [(2, 16), (4, 32), (6, 40)]


# -- replay ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("replay", "num_newest", "num_earlier", "total"),
    # Earlier pairs are newest x replay / (1 - replay): 18 x 1/9 = 2, 3 x 1 = 3, 9 x 0; or all there are.
    [(0.1, 18, 30, 20), (0.5, 3, 30, 6), (0.0, 9, 30, 9), (0.5, 6, 4, 10), (0.1, 18, 0, 18)],
)
def test_so_many_earlier_pairs_are_mixed_in_that_they_are_their_share(
    replay, num_newest, num_earlier, total, make_refresh
):
    refresh = make_refresh(replay=replay)
    refresh.earlier.extend(numbered(*range(100, 100 + num_earlier)))
    refresh.waiting.extend(numbered(*range(num_newest)))
    assert refresh.train_if_due(2)["reward_model/pairs"] == total


def test_earlier_pairs_are_drawn_by_seed_and_step_without_repetition(make_refresh):
    refresh = make_refresh(replay=0.5)
    refresh.earlier.extend(numbered(*range(50)))
    drawn = {step: refresh._replayed(step, 10) for step in (2, 4)}
    assert drawn[2] == refresh._replayed(2, 10)
    assert drawn[2] != drawn[4]
    assert len(set(drawn[2])) == 10


def test_trained_pairs_become_the_newest_of_the_earlier_ones_up_to_the_capacity(make_refresh):
    refresh = make_refresh(capacity=5)
    refresh.earlier.extend(numbered(1, 2, 3))
    refresh.waiting.extend(numbered(4, 5, 6))
    refresh.train_if_due(2)
    assert list(refresh.earlier) == numbered(2, 3, 4, 5, 6)
    assert not refresh.waiting


# -- the training ----------------------------------------------------------------------------------------------------
def test_the_first_update_of_a_fresh_reward_is_what_the_hidden_states_say(make_refresh, backbone):
    refresh = make_refresh()
    pairs = [
        Pair(prompt=(5, 6, 7), chosen=(20, 21), rejected=(22,)),
        Pair(prompt=(9, 8), chosen=(23,), rejected=(24, 25, 26)),
    ]

    def last_hidden(ids):
        with torch.no_grad(), refresh.roles.using(ROLE):
            return backbone.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]

    # A head of zeros gives every score 0: a tie, worth half, and the loss -log sigmoid(0) = log 2. Its gradient by
    # the head's weight is -(1 - sigmoid(0)) x (h_chosen - h_rejected) a pair, and 0 by all else.
    by_pair = [last_hidden(p.prompt + p.chosen) - last_hidden(p.prompt + p.rejected) for p in pairs]
    expected = -0.5 * torch.stack(by_pair).mean(0)
    refresh.waiting.extend(pairs)
    metrics = refresh.train_if_due(2)
    assert metrics["reward_model/accuracy"] == 0.5
    assert metrics["reward_model/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["reward_model/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-5)
    # AdamW's first step is lr x sign(gradient), against it, where the gradient is far above eps.
    moved = refresh.roles.heads[ROLE].weight.data[0]
    clear = expected.abs() > 1e-3
    assert clear.sum() > 100
    torch.testing.assert_close(moved[clear], -1e-3 * expected[clear].sign(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("packed", [True, False])
def test_any_split_of_an_update_gives_the_same_gradient(packed, make_refresh, form_pairs):
    pairs = [*form_pairs(range(3), range(2)), *numbered(1)]

    def gradients(token_budget):
        refresh = make_refresh(noise=0.05, token_budget=token_budget)
        roles = refresh.roles
        if not packed:
            roles.forward = Forward(model=roles.backbone.model, packed=False, reason="")
        parts = len(parts_within(pairs, token_budget, packed=packed, ending=1))
        loss = refresh._backward(pairs)
        return parts, loss, {name: p.grad.clone() for name, p in roles.named_parameters(ROLE)}

    _, whole_loss, whole = gradients(10**6)
    split = {budget: gradients(budget) for budget in (1, 150, 10**6)}
    assert [parts for parts, _, _ in split.values()][::2] == [7, 1]
    assert 1 < split[150][0] < 7
    for _, loss, found in split.values():
        assert loss == pytest.approx(whole_loss, rel=1e-5)
        for name, gradient in whole.items():
            scale = gradient.abs().max().item()
            # The bias cancels between chosen and rejected: all its gradient is rounding.
            atol = 1e-6 if name.endswith("head.bias") else 1e-4 * scale
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=atol)


def test_epochs_deal_all_pairs_to_updates_of_even_size(make_refresh, monkeypatch):
    refresh = make_refresh(epochs=2, pairs_per_update=4, lr=1e-9)
    seen, backward = [], refresh._backward
    monkeypatch.setattr(refresh, "_backward", lambda pairs: seen.append(pairs) or backward(pairs))
    refresh.waiting.extend(numbered(*range(10)))
    metrics = refresh.train_if_due(2)
    # Ten pairs are three updates of at most four.
    assert [len(pairs) for pairs in seen] == [4, 3, 3] * 2
    for epoch in (seen[:3], seen[3:]):
        assert {pair for pairs in epoch for pair in pairs} == set(numbered(*range(10)))
    assert seen[0] != seen[3]
    # At this rate every score stays 0: log 2 a pair in each epoch, and so in their mean.
    assert metrics["reward_model/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_dropout_acts_in_a_training_and_not_in_scores(make_refresh):
    def trained(dropout):
        refresh = make_refresh(noise=0.05, dropout=dropout)
        before = refresh.accuracy(numbered(*range(9)))
        refresh.waiting.extend(numbered(*range(9)))
        metrics = refresh.train_if_due(2)
        return before, metrics["reward_model/accuracy"], metrics["reward_model/loss"]

    calm, noisy = trained(0.0), trained(0.5)
    assert noisy[:2] == calm[:2]
    assert noisy[2] != pytest.approx(calm[2], rel=1e-3)


def test_the_accuracy_is_that_of_the_new_pairs_before_the_training(make_refresh):
    refresh, earlier, newest = make_refresh(replay=0.5, lr=0.1), numbered(*range(10, 30)), numbered(*range(10))
    refresh.roles.heads[ROLE].weight.data[0, :] = torch.randn(128, generator=torch.Generator().manual_seed(0))
    refresh.earlier.extend(earlier)
    refresh.waiting.extend(newest)
    expected = refresh.accuracy(newest)
    assert expected != refresh.accuracy(earlier)
    assert refresh.train_if_due(2)["reward_model/accuracy"] == expected


def test_the_policy_is_untouched_by_a_training(make_refresh, form_pairs, make_batch):
    refresh = make_refresh(noise=0.05, dropout=0.3)
    roles, batch = refresh.roles, make_batch([(0, [5, 6, 7], [20, 21]), (0, [5, 6, 7], [22])])
    roles.outputs(batch, False).logprobs.sum().backward()
    kept = {name: (p.detach().clone(), p.grad.clone()) for name, p in roles.named_parameters()}
    asks = {name: p.requires_grad for name, p in roles.model.named_parameters()}
    reward = roles.weights(ROLE)
    refresh.waiting.extend(form_pairs(range(2), range(2)))
    assert refresh.train_if_due(2)
    for name, p in roles.named_parameters():
        assert torch.equal(p, kept[name][0])
        assert torch.equal(p.grad, kept[name][1])
    assert {name: p.requires_grad for name, p in roles.model.named_parameters()} == asks
    assert roles.tuner.active_adapters == ["policy"]
    assert not any(module.training for module in roles.model.modules())
    moved = roles.weights(ROLE)
    assert all(not torch.equal(moved[name], w) for name, w in reward.items())


# -- resuming --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("killed_after", [slow(1), 2, slow(3)])
def test_a_run_killed_and_resumed_is_the_uninterrupted_one_bit_for_bit(killed_after, make_refresh, tmp_path):
    keys = {"dropout": 0.2, "replay": 0.4, "pairs_per_group": 3, "pairs_per_update": 4, "epochs": 2, "capacity": 7}

    def go_on(refresh, steps):
        metrics = []
        for step in steps:
            refresh.collect(step, *some_step(step))
            metrics.append(refresh.train_if_due(step))
        return metrics

    whole = make_refresh(noise=0.05, **keys)
    expected = go_on(whole, range(1, 7)), tensors(whole)
    killed = make_refresh(noise=0.05, **keys)
    before, roles = go_on(killed, range(1, killed_after + 1)), killed.roles
    weights = {role: roles.weights(role) for role in roles.moving}
    heads = {role: head.weights() for role, head in roles.heads.items()}
    kept = {"adapters": weights, "adapter_config": roles.adapter_config(), "optimizer": killed.state(), "heads": heads}
    checkpoint.save(tmp_path, checkpoint.Checkpoint(step=killed_after, state={}, **kept), 1)
    torch.manual_seed(123)
    resumed = make_refresh(noise=0.0, **keys)
    saved = checkpoint.load_newest(tmp_path, print)
    resumed.roles.restore(saved.adapters, saved.heads)
    resumed.restore(saved.optimizer)
    after = go_on(resumed, range(killed_after + 1, 7))
    assert before + after == expected[0]
    assert [bool(metrics) for metrics in before + after] == [False, True] * 3
    assert same(tensors(resumed), expected[1])
