from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import half_model
import pytest
import torch
import transformers
from in_one_test import each
from slow_cases import slow

from rlft.batch import batch_of_rows
from rlft.model.adapter_folder import HEAD
from rlft.model.forward import Forward
from rlft.model.packing import num_packed_tokens
from rlft.model.reward_model import (
    AdapterReward,
    ClassifierReward,
    load_classifier,
    numbers_of_rows,
    open_learned,
    parts_within,
    rows_of,
)
from rlft.model.roles import POLICY
from rlft.runs import checkpoint
from rlft.tokens.text import RunTokenizer
from rlft.types import Completion, FinishReason, Group, Rollout, UserError

model_config, backbone = half_model.model_config, half_model.backbone

ROLE = "reward_taste"
KEY = "reward.taste.path"
CPU = torch.device("cpu")


@pytest.fixture
def groups(make_prompt, backbone):
    """Two groups of three completions, of unlike lengths; one is empty."""

    def rollout(prompt, text):
        ids = backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
        completion = Completion(text=text, token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=FinishReason.stop)
        return Rollout(prompt=prompt, completion=completion, policy_version=0)

    texts = {"1 + 2": ("3", "the answer is 12", ""), "17 + 25": ("42", "42 42 42 42 42 42", "7")}
    prompts = [(make_prompt(question), several) for question, several in texts.items()]
    return [Group(prompt=p, rollouts=tuple(rollout(p, text) for text in several)) for p, several in prompts]


@pytest.fixture
def adapter_reward(make_roles):
    """Builds an adapter reward whose adapter and head say something, on a policy that is not the base either."""

    def make(token_budget=10**6, center=0.0, scale=1.0, **keys):
        roles = make_roles(noise=0.05, **keys)
        reward = open_learned("taste", None, roles, token_budget=token_budget, center=center, scale=scale)
        generator = torch.Generator().manual_seed(3)
        for _, parameter in roles.named_parameters(ROLE):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        return reward

    return make


def flat(scores):
    return torch.tensor([score for row in scores for score in row])


def check_scores(reward, groups, expected):
    """Whatever is scored with a completion, and within which budget; no two completions get the same."""
    for budget in (1, 60, 150, 10**6):
        if isinstance(reward, AdapterReward):
            reward = replace(reward, token_budget=budget)
        else:
            reward.token_budget = budget
        torch.testing.assert_close(flat(reward(groups)), expected, rtol=1e-5, atol=1e-5)
        backwards = flat(reward(groups[::-1])).view(2, 3).flip(0).flatten()
        torch.testing.assert_close(backwards, expected, rtol=1e-5, atol=1e-5)
    least = 1e-3 if isinstance(reward, AdapterReward) else 1e-4
    assert (expected[:, None] - expected).abs().add(torch.eye(6)).min() > least


# -- an adapter on the base ------------------------------------------------------------------------------------------
@each("packed", [True, False])
def test_an_adapters_score_is_its_head_on_the_last_tokens_hidden_state(packed, adapter_reward, groups, backbone):
    reward = adapter_reward()
    if not packed:
        reward.roles.forward = Forward(model=reward.roles.backbone.model, packed=False, reason="")
    head, expected = reward.roles.heads[ROLE], []
    with torch.no_grad(), reward.roles.using(ROLE):
        for group in groups:
            for rollout in group.rollouts:
                ids = torch.tensor([[*group.prompt.token_ids, *rollout.completion.token_ids]])
                expected.append(head(backbone.model.base_model(input_ids=ids).last_hidden_state[0, -1]))
    check_scores(reward, groups, torch.stack(expected))


def test_siblings_share_their_prompt_and_micro_batches_keep_to_the_budget(adapter_reward, groups, backbone, entering):
    reward = adapter_reward()
    # A group's prompt once, and each completion with the one token that ends its row.
    lengths = [len(g.prompt.token_ids) + sum(len(r.completion.token_ids) + 1 for r in g.rollouts) for g in groups]
    with entering(backbone.model) as seen:
        reward(groups)
        replace(reward, token_budget=max(lengths))(groups)
    assert seen == [(1, sum(lengths)), (1, lengths[0]), (1, lengths[1])]


def test_a_score_is_scale_times_what_exceeds_the_center(make_roles, groups):
    roles = make_roles()
    reward = open_learned("taste", None, roles, token_budget=10**6, center=0.5, scale=3.0)
    roles.heads[ROLE].bias.data.fill_(2.0)
    # The weights of a fresh head are 0: every score is 3 x (2 - 0.5).
    assert reward(groups) == [[4.5] * 3] * 2


def test_scoring_is_without_dropout_and_leaves_the_policy_and_the_random_numbers_alone(adapter_reward, groups):
    reward = adapter_reward(dropout=0.5)
    roles = reward.roles
    policy, state = roles.weights("policy"), torch.get_rng_state()
    first = reward(groups)
    assert reward(groups) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert roles.tuner.active_adapters == ["policy"]
    assert all(torch.equal(policy[name], w) for name, w in roles.weights("policy").items())
    trainable = [name for name, p in roles.model.named_parameters() if p.requires_grad]
    assert trainable == [name for name, _ in roles.named_parameters("policy")]


def test_an_adapter_folder_of_a_checkpoint_gives_the_same_scores_and_is_refused_without_its_head(
    adapter_reward, make_roles, groups, tmp_path
):
    reward = adapter_reward()
    expected, roles = reward(groups), reward.roles
    kept = {"adapters": {ROLE: roles.weights(ROLE)}, "heads": {ROLE: roles.heads[ROLE].weights()}}
    config = roles.adapter_config()
    saved = checkpoint.Checkpoint(step=1, adapter_config=config, optimizer={}, state={}, **kept)
    folder = checkpoint.save(tmp_path, saved, 1) / ROLE
    again = open_learned("taste", str(folder), make_roles(seed=7), token_budget=10**6, center=0.0, scale=1.0)
    assert isinstance(again, AdapterReward)
    assert again(groups) == expected
    assert again.roles.moving == ("policy",)
    (folder / HEAD).unlink()
    with pytest.raises(UserError, match=r"^reward\.taste\.path: the scalar head cannot be read"):
        open_learned("taste", str(folder), make_roles(), token_budget=1, center=0.0, scale=1.0)


# -- a network of its own --------------------------------------------------------------------------------------------
SIZES = {
    "vocab_size": 272, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture
def save_classifier(tmp_path, tiny_path):
    """Saves a random classifier with the embedded tokenizer beside it; returns the folder."""

    def save(kind, head="ForSequenceClassification", chat=True, padding_side="right", **keys):
        config = getattr(transformers, f"{kind}Config")(**SIZES | {"num_labels": 1} | keys)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            getattr(transformers, kind + head)(config).save_pretrained(tmp_path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_path)
        tokenizer.padding_side = padding_side
        if not chat:
            tokenizer.chat_template = None
        tokenizer.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def classifier(folder, token_budget=10**6, center=0.0, scale=1.0):
    model, tokenizer = load_classifier(folder, KEY, CPU, torch.float32)
    return ClassifierReward(model, RunTokenizer(tokenizer), token_budget=token_budget, center=center, scale=scale)


def conversations(groups):
    """What the embedded chat template makes of them, written out."""
    return [
        f"<|im_start|>user\n{group.prompt.id}<|im_end|>\n<|im_start|>assistant\n{r.completion.text}<|im_end|>\n"
        for group in groups
        for r in group.rollouts
    ]


def logits(folder, rows):
    """What transformers itself gives, a row of tokens at a time: no padding, no batches."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([row])).logits[0, 0] for row in rows])


def rows_of_texts(folder, texts):
    return transformers.AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]


@pytest.mark.parametrize("padding_side", ["left", slow("right")])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [("Qwen2", {}), ("Llama", {"pad_token_id": -1}), ("Bert", {}), slow("Qwen2", {"pad_token_id": 0}),
     slow("GPT2", {"n_head": 4})],
)  # fmt: skip
def test_a_classifiers_score_is_its_logit_whatever_is_scored_with_it(kind, keys, padding_side, save_classifier, groups):
    folder = save_classifier(kind, padding_side=padding_side, **keys)
    expected = logits(folder, rows_of_texts(folder, conversations(groups)))
    check_scores(classifier(folder), groups, expected)


def test_a_row_that_ends_with_the_first_token_ids_is_read_at_its_last_token_too(save_classifier, groups, monkeypatch):
    # Any token id may stand under the padding but one that ends a row: 0, 1 and 2 do here, alone 3 is free.
    folder = save_classifier("Qwen2")
    reward, rows = classifier(folder), [[9, 8, 7, 0], [5, 1], [6, 4, 2]]
    monkeypatch.setattr(reward, "_encode", lambda prompt, completion: rows[len(completion.text) - 1])
    prompt, rollout = groups[0].prompt, groups[0].rollouts[0]
    texts = [replace(rollout, completion=replace(rollout.completion, text="x" * n)) for n in (1, 2, 3)]
    scores = reward([Group(prompt=prompt, rollouts=tuple(texts))])
    torch.testing.assert_close(flat(scores), logits(folder, rows), rtol=1e-5, atol=1e-5)


@each("longest", [512, 8])
def test_without_a_chat_template_a_classifier_reads_the_plain_texts_of_which_too_long_ones_keep_their_end(
    longest, save_classifier, groups
):
    folder = save_classifier("Bert", chat=False, max_position_embeddings=longest)
    rows = rows_of_texts(folder, [f"{g.prompt.id}\n{r.completion.text}" for g in groups for r in g.rollouts])
    assert max(map(len, rows)) > 8
    expected = logits(folder, [row[-longest:] for row in rows])
    torch.testing.assert_close(flat(classifier(folder)(groups)), expected, rtol=1e-5, atol=1e-5)


def test_a_classifiers_score_is_scaled_and_centered(save_classifier, groups):
    folder = save_classifier("Qwen2")
    expected = 3 * (flat(classifier(folder)(groups)) - 0.5)
    found = flat(classifier(folder, center=0.5, scale=3.0)(groups))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_classifier_rows_go_by_length_and_keep_to_the_budget(save_classifier, groups, entering):
    reward = classifier(save_classifier("Qwen2"))
    tokens = sorted(len(reward.tokenizer(text)["input_ids"]) for text in conversations(groups))
    with entering(reward.model) as seen:
        reward(groups)
        reward.token_budget = 2 * tokens[-1]
        reward(groups)
    assert seen[0] == (6, tokens[-1])
    assert all(rows * width <= reward.token_budget for rows, width in seen[1:])
    assert [width for _, width in seen[1:]] == sorted(width for _, width in seen[1:])
    assert sum(rows for rows, _ in seen[1:]) == 6


def test_a_folder_of_a_classifier_is_opened_as_one_and_adds_no_role(make_roles, save_classifier, groups):
    roles = make_roles()
    folder = save_classifier("Qwen2")
    reward = open_learned("taste", folder, roles, token_budget=10**6, center=0.0, scale=1.0)
    assert isinstance(reward, ClassifierReward)
    assert not any(p.requires_grad for p in reward.model.parameters())
    assert roles.heads == {}
    assert reward(groups) == classifier(folder)(groups)


@each(("kind", "head", "keys", "problem"), [
    ("Qwen2", "ForSequenceClassification", {"num_labels": 3}, r".* num_labels, got 3; .*num_labels 1"),
    ("Qwen2", "ForCausalLM", {}, r"it holds a causal language model \(Qwen2ForCausalLM\), .*rlft rm"),
    ("GPT2", "LMHeadModel", {}, r"it holds a causal language model \(GPT2LMHeadModel\), .*rlft rm"),
])  # fmt: skip
def test_what_is_no_classifier_with_one_score_is_refused(kind, head, keys, problem, save_classifier):
    with pytest.raises(UserError, match=rf"^reward\.taste\.path: {problem}"):
        load_classifier(save_classifier(kind, head, **keys), KEY, CPU, torch.float32)


def test_a_model_without_a_trained_score_and_what_is_no_model_are_refused(save_classifier, tmp_path):
    file = Path(save_classifier("Qwen2", "ForCausalLM")) / "config.json"
    file.write_text(file.read_text().replace("ForCausalLM", "ForSequenceClassification"))
    with pytest.raises(UserError, match=r"^reward\.taste\.path: its files lack score\.weight, which would be random"):
        load_classifier(str(tmp_path), KEY, CPU, torch.float32)
    file.unlink()
    with pytest.raises(UserError, match=r"^reward\.taste\.path: the reward model cannot be read"):
        load_classifier(str(tmp_path), KEY, CPU, torch.float32)


ROWS = [(0, (5, 6, 7), (20, 21, 2)), (0, (5, 6, 7), (22,)), (1, (9,), (30, 31))]


def test_each_rows_number_is_the_same_in_micro_batches_of_any_size(make_roles, make_double):
    """The sum of the log-probs of a row, by the policy and by the bare base, which is not the policy."""
    roles = make_roles(noise=0.05, backbone=make_double())

    def total(batch, layout):
        return roles.forward(batch, 1.0, layout=layout).logprobs.sum(1)

    found = {role: numbers_of_rows(roles, role, batch_of_rows(ROWS), 10**6, total) for role in (POLICY, None)}
    assert found[POLICY].dtype == torch.float64
    assert (found[POLICY] - found[None]).abs().min() > 1e-3
    for role, numbers in found.items():
        for token_budget in (1, 8):
            again = numbers_of_rows(roles, role, batch_of_rows(ROWS), token_budget, total)
            torch.testing.assert_close(again, numbers, rtol=1e-12, atol=1e-12)


# -- parts within the token budget -------------------------------------------------------------------------------------
class Item(NamedTuple):
    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]


def drawn(number):
    """Items of one to four completions, some prompts in several items."""
    random = torch.Generator().manual_seed(number)

    def draw(high, low=1):
        return int(torch.randint(low, high, (), generator=random))

    prompts = [tuple(draw(9) for _ in range(draw(12))) for _ in range(3)]
    return [
        Item(prompts[draw(3, 0)], tuple(tuple(draw(9) for _ in range(draw(20))) for _ in range(draw(5))))
        for _ in range(number)
    ]


def tokens_by_hand(items, packed, ending):
    """What enters the network for these items, counted in the batch that is made of them."""
    batch = batch_of_rows(rows_of(items, (0,) * ending))
    return num_packed_tokens(batch) if packed else int(batch.attention_mask.sum(1).max()) * len(batch.rewards)


@each("ending", [0, 1])
@each("packed", [True, False])
@each("budget", [1, 40, 100, 300, 10_000])
def test_parts_are_those_that_counting_each_batch_gives(budget, packed, ending):
    items = drawn(30)
    by_hand = []
    for item in items:
        if by_hand and tokens_by_hand([*by_hand[-1], item], packed, ending) <= budget:
            by_hand[-1].append(item)
        else:
            by_hand.append([item])
    assert parts_within(items, budget, packed=packed, ending=ending) == by_hand
    assert {1: 30, 10_000: 1}.get(budget, len(by_hand)) == len(by_hand)
