"""What teachers say of the student's tokens: an adapter, the base, the base with a hint, and a model of their own."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import half_model
import pytest
import torch
from in_one_test import each
from transformers import AutoModelForCausalLM

from rlft.config.model import resolve_path, teacher_settings
from rlft.loop.parts import load_teacher
from rlft.model import forward
from rlft.model.networks import NO_SNAPSHOTS
from rlft.model.teacher import teacher_logprobs, with_other_prompts

model_config, backbone = half_model.model_config, half_model.backbone


ROWS = [[20, -21, 22], [22], [23, 24, 25], [26]]
"""A token that was not sampled stands within the first completion."""


@pytest.fixture
def batch_of(make_batch):
    """Builds two groups of two rows with these prompts."""
    return lambda one, two: make_batch([(b // 2, (one, two)[b // 2], row) for b, row in enumerate(ROWS)])


@pytest.fixture
def batch(batch_of):
    return batch_of([5, 6, 7], [9, 8])


SNAPSHOT = replace(NO_SNAPSHOTS, teacher="embedded:tiny-student")


@pytest.fixture(scope="module")
def student_as_teacher(model_config):
    """The forward of `tiny-student`, which has the same tokens, as a teacher that is a separate model."""
    return load_teacher(SNAPSHOT, model_config())


@pytest.fixture(scope="module")
def by_transformers():
    """Log-probs `[T, V]` that `tiny-student` gives the tokens after the first of one row, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(resolve_path("embedded:tiny-student"), dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(ids):
        return model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)

    return logprobs


@each("role", ["teacher", "reference"])
def test_a_frozen_adapter_says_what_it_says_as_a_policy_with_its_own_rank_and_scale_also_in_the_users_home(
    adapter, make_roles, batch, nobody, role, monkeypatch
):
    folder = Path(adapter[0])
    expected = make_roles(path=str(folder)).logprobs(batch, "policy")
    monkeypatch.setenv("HOME", str(folder.parent))
    roles = make_roles(noise=0.05, rank=2, alpha=32.0, **{role: f"~/{folder.name}"})
    annotated = roles.annotate(batch, nobody, needs_old=True)
    found = getattr(annotated, f"{role}_logprobs")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (found[~batch.loss_mask] == 0).all()
    assert not torch.allclose(annotated.old_logprobs, expected, atol=1e-3)
    assert {name: config.r for name, config in roles.model.peft_config.items()} == {"policy": 2, role: 4}
    assert roles.moving == ("policy",)
    roles.outputs(batch, False).logprobs.sum().backward()
    roles.check_gradients()


def test_the_base_is_a_teacher_without_an_adapter_and_is_not_asked_of_rows_with_zero_gradient(
    make_roles, batch, nobody
):
    roles = make_roles(noise=0.05, teacher="base", reference="base")
    annotated = roles.annotate(batch, nobody, needs_old=False)
    assert torch.equal(annotated.teacher_logprobs, annotated.reference_logprobs)
    assert (annotated.teacher_logprobs[batch.loss_mask] != 0).all()
    some = roles.annotate(batch, torch.tensor([True, True, False, False]), needs_old=False).teacher_logprobs
    assert (some[:2] == 0).all()
    torch.testing.assert_close(some[2:], annotated.teacher_logprobs[2:], rtol=1e-5, atol=1e-5)


def test_tokens_beyond_the_students_vocabulary_are_not_among_the_most_likely(student_as_teacher, batch):
    """With a vocabulary of 20 the teacher's most likely tokens all come from those 20; its log-probs stay whole."""
    ids, of_ids = (student_as_teacher.most_likely(batch, 20, 20)[i] for i in (1, 2))
    assert (ids[batch.loss_mask].sort(-1).values == torch.arange(20)).all()
    assert (of_ids[batch.loss_mask].exp().sum(-1) < 1).all()


@each("rows", ["awkward", "tree"])
def test_padded_rows_and_rows_with_branches_give_the_same(backbone, awkward_batch, tree_batch, make_roles, rows):
    batch = awkward_batch if rows == "awkward" else tree_batch[0]
    model = make_roles(noise=0.05).backbone.model
    both = (forward.Forward(model=model, packed=is_packed, reason="") for is_packed in (True, False))
    packed, padded = (one.most_likely(batch, 3, 999) for one in both)
    at = batch.loss_mask
    torch.testing.assert_close(packed[0], padded[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(packed[1][at], padded[1][at])
    torch.testing.assert_close(packed[2], padded[2], rtol=1e-5, atol=1e-5)
    asked = replace(batch, teacher_top_k_ids=packed[1])
    with torch.no_grad():
        one = forward.packed_forward(model, asked, 1.0, False, top_k=True).top_k_logprobs
        two = forward.padded_forward(model, asked, 1.0, False, top_k=True).top_k_logprobs
    torch.testing.assert_close(one, packed[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(two, packed[2], rtol=1e-5, atol=1e-5)


def test_the_policys_log_probs_of_these_tokens_have_the_gradient_of_autograd(make_roles, batch, nobody):
    """Against the policy's own logits, row by row, through transformers and PEFT alone."""
    roles = make_roles(noise=0.05, teacher="base")
    batch = roles.annotate(batch, nobody, needs_old=False, teacher_top_k=3)
    weight = torch.randn(batch.teacher_top_k_logprobs.shape, generator=torch.Generator().manual_seed(0))
    weight = weight * batch.loss_mask.unsqueeze(-1)

    def gradients(total):
        total.backward()
        found = {name: p.grad.clone() for name, p in roles.named_parameters()}
        roles.model.zero_grad(set_to_none=True)
        return found

    made = gradients((roles.outputs(batch, False, top_k=True).top_k_logprobs * weight).sum())
    total = torch.zeros(())
    for b in range(4):
        real = batch.attention_mask[b]
        logp = roles.model(input_ids=batch.token_ids[b][real][None], use_cache=False).logits[0, :-1].log_softmax(-1)
        total = total + (logp.gather(-1, batch.teacher_top_k_ids[b][real][1:]) * weight[b][real][1:]).sum()
    for name, expected in gradients(total).items():
        torch.testing.assert_close(made[name], expected, rtol=1e-3, atol=5e-5)


HINTED = [[5, 6, 7, 30, 31], [9, 8, 32]]


@pytest.fixture
def hinted(batch_of, batch):
    """The batch with what the teacher reads, and the rows that it then has before it, written by hand."""
    prompts = torch.full((4, 5), -1)
    for b in range(4):
        prompts[b, : len(HINTED[b // 2])] = torch.tensor(HINTED[b // 2])
    return replace(batch, teacher_prompts=prompts), batch_of(*HINTED)


@each("top_k", [0, 3])
def test_with_a_hint_the_completions_are_judged_in_its_light(make_roles, hinted, nobody, top_k):
    batch, by_hand = hinted
    roles = make_roles(noise=0.05, teacher="base")
    annotated = roles.annotate(batch, nobody, needs_old=True, teacher_top_k=top_k)
    expected = roles.logprobs(by_hand, None)
    at = batch.loss_mask
    torch.testing.assert_close(annotated.teacher_logprobs[at], expected[by_hand.loss_mask], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(annotated.teacher_logprobs[at], roles.logprobs(batch, None)[at], atol=1e-3)
    # The student itself does not see it.
    assert torch.equal(annotated.old_logprobs, roles.logprobs(batch, "policy"))
    if top_k:
        with torch.no_grad(), roles.using(None):
            ids = roles.forward.most_likely(by_hand, 3, 999)[1]
        assert torch.equal(annotated.teacher_top_k_ids[at], ids[by_hand.loss_mask])


def test_rows_longer_by_a_hint_go_through_the_teacher_within_the_budget(make_roles, hinted, entering):
    """13 tokens packed without it (3 + 3 + 1 + 2 + 3 + 1), 16 with it: a budget of 13 takes the groups one by one."""
    batch, _ = hinted
    roles, keys = make_roles(noise=0.05), {"top_k": 0, "vocabulary": 999}
    parts = list(roles.forward.parts(batch, 99))
    with entering(roles.backbone.model) as seen:
        run = partial(teacher_logprobs, roles.forward, batch, parts, **keys)
        apart, together = (run(token_budget=budget) for budget in (13, 99))
    assert seen == [(1, 9), (1, 7), (1, 16)]
    for name in apart:
        torch.testing.assert_close(apart[name], together[name], rtol=1e-5, atol=1e-5)


def test_branches_cannot_be_read_with_another_prompt(tree_batch):
    trees = tree_batch[0]
    with pytest.raises(ValueError, match="a row with branches cannot be read with another prompt"):
        with_other_prompts(trees, torch.zeros(4, 3, dtype=torch.int64))


def test_padded_rows_of_a_teacher_go_through_it_within_the_budget_that_packed_ones_of_the_student_fill(
    make_roles, batch, entering
):
    """Packed the rows have 13 tokens; padded, two rows of 6 fit into 13, and then two of 5 and 3: 2 x 5 = 10."""
    roles = make_roles(noise=0.05)
    padded = replace(roles.forward, packed=False)
    [(_, micro)] = parts = list(roles.forward.parts(batch, 13))
    assert micro.network_tokens == 13
    keys = {"top_k": 3, "vocabulary": 999, "token_budget": 13}
    expected = teacher_logprobs(roles.forward, batch, parts, **keys)
    with entering(roles.backbone.model) as seen:
        made = teacher_logprobs(padded, batch, parts, **keys)
    assert seen == [(2, 6), (2, 5)]
    for name, values in expected.items():
        torch.testing.assert_close(made[name], values, rtol=1e-5, atol=1e-5)


# -- a teacher that an engine computes -------------------------------------------------------------------------------
class RowByRow:
    """Stands for a teacher in an engine: transformers on each row by itself. Notes what it was asked for."""

    def __init__(self, logprobs):
        self.of_row, self.asked = logprobs, []

    def logprobs(self, rows, top_k, vocabulary):
        self.asked.append([list(row) for row in rows])
        computed = []
        for row in rows:
            logp = self.of_row(torch.tensor(row))
            best = logp[:, :vocabulary].topk(top_k, -1)
            computed.append((logp.gather(-1, torch.tensor(row)[1:, None])[:, 0], best.indices, best.values))
        return computed


@pytest.fixture
def by_engine(make_roles, by_transformers):
    """Builds roles with `tiny-student` as a teacher that an engine computes; gives them and the engine."""

    def build(**keys):
        engine = RowByRow(by_transformers)
        return make_roles(teacher="embedded:tiny-student", teacher_forward=engine, **keys), engine

    return build


def judged(roles, batch, top_k):
    """{field: values} of the teacher's, of every row."""
    zero_rows = torch.zeros(len(batch.rewards), dtype=torch.bool)
    annotated = roles.annotate(batch, zero_rows, needs_old=False, teacher_top_k=top_k)
    names = ("teacher_logprobs", "teacher_top_k_ids", "teacher_top_k_logprobs")
    return {name: found for name in names if (found := getattr(annotated, name)) is not None}


@each(("rows", "top_k"), product(("with holes", "with a hint", "with branches"), (0, 4)))
def test_an_engine_that_runs_transformers_row_by_row_says_of_all_rows_what_a_forward_says(
    make_roles, by_engine, student_as_teacher, awkward_batch, hinted, tree_batch, rows, top_k
):
    batch = {"with holes": awkward_batch, "with a hint": hinted[0], "with branches": tree_batch[0]}[rows]
    expected = judged(make_roles(teacher="embedded:tiny-student", teacher_forward=student_as_teacher), batch, top_k)
    roles, _ = by_engine()
    found = judged(roles, batch, top_k)
    assert found.keys() == expected.keys()
    assert len(found) == (3 if top_k else 1)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-5)
    assert found["teacher_logprobs"].any()
    assert not top_k or (expected["teacher_top_k_logprobs"][~batch.loss_mask] == 0).all()


def test_an_engine_is_asked_once_in_the_order_of_the_rows_whatever_the_token_budget(
    by_engine, awkward_batch, tree_batch
):
    """Of the six rows the third has nothing that was sampled; of a conversation that forks it reads each path."""
    trees, paths, _ = tree_batch
    for batch, rows, several in ((awkward_batch, awkward_batch, (0, 1, 3, 4, 5)), (trees, paths, range(10))):
        lengths = rows.attention_mask.sum(1).tolist()
        for budget in (20, 10**6):
            roles, engine = by_engine(token_budget=budget)
            judged(roles, batch, 0)
            assert engine.asked == [[rows.token_ids[b, : lengths[b]].tolist() for b in several]]


def test_an_engine_is_not_asked_of_rows_with_zero_gradient_and_of_none_if_all_are(by_engine, batch, monkeypatch):
    roles, engine = by_engine()
    monkeypatch.setattr(forward, "pack", None)  # for an engine alone nothing is packed
    annotated = roles.annotate(batch, torch.tensor([True, False, True, True]), needs_old=False)
    assert engine.asked == [[[5, 6, 7, 22]]]
    assert (annotated.teacher_logprobs != 0).nonzero().tolist() == [[1, 3]]
    roles.annotate(batch, torch.ones(4, dtype=torch.bool), needs_old=False)
    assert len(engine.asked) == 1


def test_a_separate_teacher_may_have_another_dtype_than_the_base(model_config, make_batch):
    """bfloat16 has 8 bits: the log-probs of some tokens are off by hundredths, none by more than a few tenths."""
    settings = (replace(SNAPSHOT, teacher_dtype=dtype) for dtype in (None, "bfloat16"))
    as_the_base, rounded = (load_teacher(snapshot, model_config()) for snapshot in settings)
    assert as_the_base.model.dtype == torch.float32
    assert {p.dtype for p in rounded.model.parameters()} == {torch.bfloat16}
    batch = make_batch([(0, [5, 6, 7], [20, 21, 22, 23]), (1, [9, 8], [24, 25, 26])])
    with torch.no_grad():
        gap = (rounded(batch, 1.0).logprobs - as_the_base(batch, 1.0).logprobs).abs().max()
    assert 1e-4 < gap < 0.5


@each(("base", "own", "expected"), [
    (("float32", None), (None, None), ("float32", None)),
    (("bfloat16", "4bit"), (None, None), ("bfloat16", "4bit")),
    (("bfloat16", None), (None, "4bit"), ("bfloat16", "4bit")),
    (("bfloat16", "4bit"), ("float16", "none"), ("float16", None)),
])  # fmt: skip
def test_a_separate_teacher_is_loaded_as_the_base_where_it_has_no_key(model_config, base, own, expected):
    snapshot = replace(SNAPSHOT, teacher_dtype=own[0], teacher_quantization=own[1])
    settings = teacher_settings(snapshot, model_config(dtype=base[0], quantization=base[1]))
    assert (settings.dtype, settings.quantization) == expected
    assert settings.path == "embedded:tiny-student"
