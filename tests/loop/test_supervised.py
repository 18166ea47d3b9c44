"""Supervised fine-tuning: what is learned, by an adapter or by the model's own weights, and what comes of a run."""

import functools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from slow_cases import slow
from transformers import AutoModelForCausalLM

from rlft import cli
from rlft.config.compose import compose
from rlft.config.resolved import build, resolve
from rlft.config.schema import SftConfig
from rlft.data.examples import Examples, RankedTokens, Rankings, TextTokens
from rlft.loop.supervised import BIAS, REFERENCE_LOGPROBS, REWARD, DemonstrationTask, PreferenceTask
from rlft.model.backbone import load_backbone, read_backbone
from rlft.model.forward import Forward
from rlft.model.full_weights import WholeModel
from rlft.model.roles import POLICY, REFERENCE
from rlft.plan.supervised_plan import PreferencePlan, SftPlan
from rlft.runs import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # of LoRA on GPT-2

# (prompt, completion), ids under 60; two share their prompt, lengths differ.
ROWS = [([5, 6, 7], [20, 21, 2]), ([9, 10], [30, 2]), ([5, 6, 7], [22, 23, 24, 25, 2]), ([11, 12, 13, 14], [40, 2])]


def examples(rows):
    texts = (TextTokens(ids=np.array([*p, *c], dtype="<i4"), num_given=len(p)) for p, c in rows)
    return Examples(texts=tuple(texts), fingerprint="", notes=())


def make_task(learner, token_budget=10**6):
    """All of ROWS in one update."""
    keys = ["demonstrations.path=unread", f"examples_per_step={len(ROWS)}", f"token_budget={token_budget}"]
    plan = SftPlan(
        config=build(compose(keys, command="sft"), SftConfig, "sft"), plain={}, engine=None, train=examples(ROWS),
        held_out_examples=examples(ROWS[:2]), held_out=None, loggers=(), fingerprints={}, notes=(),
    )  # fmt: skip
    return DemonstrationTask(plan, learner, None, None, print)


@pytest.fixture(params=["an adapter", "all weights"])
def learner(request, make_double, make_roles):
    """What learns, on a model of float64."""
    if request.param == "all weights":
        return WholeModel(make_double())
    return make_roles(noise=0.05, backbone=make_double())


def log_probs(model, prompt, completion):
    """Of each completion token, by the plainest forward there is."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_the_loss_is_the_mean_over_completion_tokens_and_any_token_budget_gives_its_gradient(learner):
    """3 + 2 + 5 + 2 = 12 tokens are learned; those of the prompts are read, 3 + 2 + 4 of three, and cost nothing."""
    nll = -torch.cat([log_probs(learner.model, *row) for row in ROWS])
    assert nll.shape == (12,)
    names, parameters = zip(*learner.named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(nll.mean(), parameters), strict=True))
    largest = max(g.abs().max() for g in expected.values())
    assert largest > 0
    for token_budget in (1, 9, 14, 10**6):
        metrics = make_task(learner, token_budget).backward(0)
        assert metrics["loss/total"] == pytest.approx(nll.mean().item(), rel=1e-9)
        assert metrics["tokens/completion"] == 12
        for name, p in learner.named_parameters():
            torch.testing.assert_close(p.grad / largest, expected[name] / largest, rtol=1e-9, atol=1e-9)
            p.grad = None
    assert metrics["tokens/trained"] == 12 + 9, "a prompt that two rows share is read once"
    evaluation = make_task(learner).evaluate(3)
    held_out = nll[: sum(len(completion) for _, completion in ROWS[:2])].mean().item()
    assert evaluation.metrics == {"eval/loss": pytest.approx(held_out, rel=1e-9)}
    assert (evaluation.step, evaluation.accuracy) == (3, None)


# -- runs --------------------------------------------------------------------------------------------------------------
TINY = (
    "+recipe=sft_arithmetic", "steps=2", "examples_per_step=4", "lora.rank=2", "lora.alpha=4",
    "generation=transformers", "generation.max_tokens=32", "model.device=cpu", "scoring.workers=0",
    "eval.num_prompts=4", "eval.num_samples=2", "eval.kl_base=true", "console=null",
)  # fmt: skip
OF_AN_ADAPTER = ("lora.", "eval.kl_base=")
ALL_WEIGHTS = (*(key for key in TINY if not key.startswith(OF_AN_ADAPTER)), "lora=null", "trainer.lr=1e-4")


def sft(folder, *words, keys=TINY):
    """Runs it with these words, and those of `keys` that they do not give."""
    given = {word.partition("=")[0] for word in words}
    kept = [key for key in keys if key.partition("=")[0] not in given]
    assert cli.run(["sft", *kept, *words, f"hydra.run.dir={folder}"]) == 0
    return folder


KINDS = {"adapter": ("lora.path", "policy", TINY), "whole": ("model.path", "model", ALL_WEIGHTS)}
"""{what is trained: (key that names such a folder, its name in a checkpoint, words of a run)}"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run that trained an adapter, or all weights."""
    return functools.cache(lambda kind: sft(tmp_path_factory.mktemp(kind) / "run", keys=KINDS[kind][2]))


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_training_all_weights_changes_the_runs_own_copy_alone_and_saves_a_model_for_transformers(
    trained, tiny_path, model_config
):
    before = load_file(tiny_path / "model.safetensors")
    folder = trained("whole") / "checkpoints" / "step_000002" / "model"
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    for name, tensor in load_backbone(model_config()).model.state_dict().items():
        assert name not in before or torch.equal(tensor, before[name]), name
    assert not any(p.requires_grad for p in load_backbone(model_config()).model.parameters())
    own = WholeModel(read_backbone(model_config()))
    own.restore_role(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_path)
    with torch.no_grad():
        for prompt, completion in ROWS:
            mine, saved = log_probs(own.model, prompt, completion), log_probs(theirs, prompt, completion)
            assert torch.equal(mine, saved) or (mine - saved).abs().max() < 1e-5  # attention of two implementations
            assert (saved - log_probs(base, prompt, completion)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["adapter", slow("whole")])
def test_a_run_is_evaluated_as_it_evaluated_itself(kind, trained):
    folder = trained(kind)
    first, last = lines(folder / "eval.jsonl")
    assert last["step"] == 2
    if kind == "adapter":  # a fresh one is the base itself; after a step it is not
        assert first["eval/kl_base"] == 0 < last["eval/kl_base"]
    assert cli.run(["eval", f"run={folder}"]) == 0
    [file] = (folder / "evaluations").iterdir()
    again = lines(file)[0]
    file.unlink()
    names = [name for name in last if name.startswith("eval/") and name not in ("eval/loss", "eval/kl_base")]
    assert len(names) > 6
    assert {name: again[name] for name in names} == {name: last[name] for name in names}


def test_weights_of_a_run_are_not_evaluated_as_another_models(trained, capsys):
    whole = trained("whole")
    assert cli.run(["eval", f"run={whole}", "model.path=embedded:tiny-arithmetic"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rlft: model.path: ")
    assert told.endswith(", got embedded:tiny-arithmetic; leave it out\n")
    assert not (whole / "evaluations").exists() or not list((whole / "evaluations").iterdir())


def test_all_weights_learn_the_same_with_gradient_checkpointing(model_config, make_batch):
    batch = make_batch([(0, [5, 6, 7], [20, 21, 2]), (1, [9, 10], [22, 23, 24, 25])])
    found, calls = [], []
    for recompute in (False, True):
        learner = WholeModel(read_backbone(model_config(gradient_checkpointing=recompute)))
        layer = learner.model.get_submodule("model.layers.0.self_attn")
        layer.register_forward_hook(lambda *_, to=recompute: calls.append(to))
        with learner.training():
            learner.forward(batch, 1.0, False).logprobs.sum().backward()
        assert not learner.model.training
        learner.check_gradients()
        found.append({name: p.grad for name, p in learner.named_parameters()})
    assert calls == [False, True, True], "once forward, and where it is on once again in backward"
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


@pytest.mark.parametrize("kind", ["adapter", slow("whole")])
def test_another_run_goes_on_from_a_runs_newest_checkpoint(kind, trained, tmp_path):
    before, (key, role, keys) = trained(kind), KINDS[kind]
    sft(tmp_path / "run", f"{key}={before}", "steps=1", keys=keys)
    section, _, name = key.partition(".")
    newest = before / "checkpoints" / "step_000002" / role
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())[section][name] == str(newest)
    ended, began = lines(before / "eval.jsonl")[-1], lines(tmp_path / "run" / "eval.jsonl")[0]
    assert began["step"] == 0
    # The same function on the same prompts and demonstrations, whatever engine slot it went through.
    assert began["eval/loss"] == pytest.approx(ended["eval/loss"], rel=1e-6)
    assert began["eval/exact_match"] == ended["eval/exact_match"]
    assert began["eval/loss"] != lines(before / "eval.jsonl")[0]["eval/loss"]


def test_without_data_only_the_loss_is_measured(tmp_path):
    words = ["demonstrations.path=embedded:arithmetic-demonstrations", "steps=1", "examples_per_step=2"]
    words += ["max_completion_tokens=64", "model.device=cpu", "console=null"]
    first, last = lines(sft(tmp_path / "run", *words, keys=()) / "eval.jsonl")
    assert [name for name in last if name.startswith("eval/")] == ["eval/loss"]
    assert first["accuracy"] is None


# -- rankings ----------------------------------------------------------------------------------------------------------
P, Q = (5, 6, 7), (9, 10)
# Best first, ids under 60: a pair, three ranked ones of another prompt, and a pair of the first prompt once more.
RANKINGS = (
    RankedTokens(prompt=P, completions=((20, 21, 2), (22, 2)), scores=(1.0, 0.0)),
    RankedTokens(prompt=Q, completions=((30, 2), (31, 32, 33, 2), (34,)), scores=(3.0, 1.0, 0.5)),
    RankedTokens(prompt=P, completions=((23, 2), (20, 21, 2)), scores=(1.0, 0.0)),
)
FINGERPRINTS = {"preferences_fingerprint": "p", "base_fingerprint": "b"}


def plan(command, *keys, train=RANKINGS, reference=None, replay=None):
    """All of `train` in one update, unless the keys say otherwise.

    reference: a folder's place in `Roles`; None: the one that the config means.
    """
    if "rankings_per_step" not in str(keys):
        keys = (*keys, f"rankings_per_step={len(train)}")
    resolved = resolve(compose(["preferences.path=embedded:arithmetic-preferences", *keys], command=command))

    def rankings(found):
        return Rankings(rankings=tuple(found), fingerprint="", notes=())

    config, (loss, _) = resolved.config, resolved.parts
    return PreferencePlan(
        config=config, plain={}, engine=None, train=rankings(train), held_out=rankings(RANKINGS[:2]), loss=loss,
        reference=reference or ("base" if loss.needs_reference else "none"),
        replay=None if replay is None else rankings(replay), fingerprints=FINGERPRINTS,
    )  # fmt: skip


@pytest.fixture
def roles(make_roles, make_double):
    """A policy that is not its base, and a reward's adapter and head, not all zeros, on a model of float64."""
    made = make_roles(noise=0.05, backbone=make_double())
    made.add_scalar_role(REWARD, None, "lora.path", learns=True)
    generator = torch.Generator().manual_seed(1)
    for _, parameter in made.named_parameters(REWARD):
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def logprobs(roles, ranking):
    """Of each completion, by the role that is active."""
    return torch.stack([log_probs(roles.backbone.model, ranking.prompt, each).sum() for each in ranking.completions])


def by_reference(roles, ranking, role=None):
    with torch.no_grad(), roles.using(role):
        return logprobs(roles, ranking)


def score(roles, prompt, completion):
    """The head at the last token, by the plainest forward there is; the role is the active one."""
    hidden = roles.backbone.model.base_model(input_ids=torch.tensor([[*prompt, *completion]])).last_hidden_state
    return roles.heads[REWARD](hidden[0, -1])


# -- an update ---------------------------------------------------------------------------------------------------------
def mean_loss(values_of, margin_of=lambda *ranks: 0.0):
    """-log sigmoid of the lead of each pair's better one: mean over the pairs of a ranking, then over rankings."""
    losses = []
    for ranking in RANKINGS:
        v, ranks = values_of(ranking), ranking.scores
        leads = [v[i] - v[j] - margin_of(ranks[i], ranks[j]) for i, j in pairs(v)]
        losses.append(torch.log1p(torch.exp(-torch.stack(leads))).mean())
    return torch.stack(losses).mean()


def pairs(values):
    return [(i, j) for i in range(len(values)) for j in range(i + 1, len(values))]


def dpo_by_hand(roles, beta, role=None):
    """Of beta times the difference of log-ratios."""
    return mean_loss(lambda ranking: beta * (logprobs(roles, ranking) - by_reference(roles, ranking, role)))


def simpo_by_hand(roles, beta, gamma):
    def rewards(ranking):
        return beta * logprobs(roles, ranking) / torch.tensor([len(c) for c in ranking.completions])

    return mean_loss(rewards, lambda *_: gamma)


def rm_by_hand(roles, margin):
    """Of s_better - s_worse - margin x difference of ranks."""
    return mean_loss(lambda r: [score(roles, r.prompt, c) for c in r.completions], lambda i, j: margin * (i - j))


@pytest.mark.parametrize(
    ("words", "by_hand"),
    [
        (("dpo", "loss.beta=0.7"), lambda roles: dpo_by_hand(roles, 0.7)),
        (("dpo", "loss=simpo", "loss.beta=3", "loss.gamma=0.4"), lambda roles: simpo_by_hand(roles, 3.0, 0.4)),
        (("rm",), lambda roles: rm_by_hand(roles, 0.0)),
        (("rm", "margin=0.3"), lambda roles: rm_by_hand(roles, 0.3)),
    ],
    ids=["dpo", "simpo", "rm", "rm with a margin"],
)
def test_a_steps_gradient_is_that_of_the_loss_by_hand_whatever_the_token_budget(words, by_hand, roles):
    task = PreferenceTask(plan(*words), roles)
    by_name = dict(task.parameters())
    with roles.learning(task.role):
        loss = by_hand(roles)
        expected = dict(zip(by_name, torch.autograd.grad(loss, list(by_name.values())), strict=True))
    largest = max(gradient.abs().max() for gradient in expected.values())
    for token_budget in (1, 17, 40, 10**6):
        task = PreferenceTask(plan(*words), roles)
        task.config = replace(task.config, token_budget=token_budget)
        metrics = task.backward(0)
        assert metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-9)
        assert [name for name, _ in task.parameters()] == list(expected)
        for name, parameter in task.parameters():
            torch.testing.assert_close(parameter.grad / largest, expected[name] / largest, rtol=1e-9, atol=1e-9)
            parameter.grad = None


@pytest.mark.parametrize(
    ("command", "trained", "parts"),
    [
        # The first prompt's rows are one group, also across rankings: 3 + 3 + 2 + 2 + 3, the second's 2 + 2 + 4 + 1.
        ("dpo", 22, {22: [3], 21: [2, 1]}),
        # Each row is a token longer: 3 + 4 + 3, 2 + 3 + 5 + 2, 3 + 3 + 4; in all 17 of the first prompt and 12.
        ("rm", 29, {1: [1, 1, 1], 21: [1, 1, 1], 22: [2, 1], 28: [2, 1], 29: [3]}),
    ],
)
def test_a_token_budget_parts_rankings_but_tears_none_and_a_prompt_is_read_once(command, trained, parts, roles):
    task = PreferenceTask(plan(command), roles)
    assert task.backward(0)["tokens/trained"] == trained
    for token_budget, sizes in parts.items():
        task.config = replace(task.config, token_budget=token_budget)
        assert [len(part) for part in task.micro_batches(RANKINGS)] == sizes


def test_metrics_are_means_over_rankings_of_means_over_pairs(roles):
    task = PreferenceTask(plan("dpo", "loss.beta=0.7"), roles)
    metrics = task.backward(0)
    with torch.no_grad():
        own = [logprobs(roles, ranking) for ranking in RANKINGS]
    ratios = [0.7 * (found - by_reference(roles, ranking)) for found, ranking in zip(own, RANKINGS, strict=True)]
    sizes = [torch.tensor([len(completion) for completion in r.completions]) for r in RANKINGS]

    def mean(values, end):
        each = [sum(v[pair[end]].item() for pair in pairs(v)) / len(pairs(v)) for v in values]
        return sum(each) / len(each)

    per_token = [found / size for found, size in zip(own, sizes, strict=True)]
    assert metrics["pairs/chosen_reward"] == pytest.approx(mean(ratios, 0), rel=1e-9)
    assert metrics["pairs/rejected_reward"] == pytest.approx(mean(ratios, 1), rel=1e-9)
    assert metrics["pairs/margin"] == pytest.approx(mean(ratios, 0) - mean(ratios, 1), rel=1e-9)
    assert metrics["pairs/chosen_logprob"] == pytest.approx(mean(per_token, 0), rel=1e-9)
    assert metrics["pairs/rejected_logprob"] == pytest.approx(mean(per_token, 1), rel=1e-9)
    assert metrics["loss/sft"] == pytest.approx(-sum(found[0].item() for found in per_token) / 3, rel=1e-9)


@pytest.mark.parametrize("command", ["dpo", "rm"])
def test_a_policy_that_is_its_reference_and_a_head_of_zeros_are_right_by_half(command, make_roles, make_double):
    made = make_roles(backbone=make_double())
    made.add_scalar_role(REWARD, None, "lora.path", learns=True)
    task = PreferenceTask(plan(command), made)
    evaluation = task.evaluate(0)
    assert (evaluation.accuracy, evaluation.accuracy_se) == (0.5, 0.0)
    assert evaluation.metrics["eval/loss"] == pytest.approx(math.log(2), abs=1e-12)
    metrics = task.backward(0)
    assert metrics["loss/total"] == pytest.approx(math.log(2), abs=1e-12)
    assert metrics["accuracy/pairs"] == 0.5


def test_an_evaluation_measures_the_held_out_rankings_as_an_update_does(roles):
    evaluated = PreferenceTask(plan("dpo"), roles).evaluate(3).metrics
    trained = PreferenceTask(plan("dpo", train=RANKINGS[:2]), roles).backward(0)
    names = {f"eval/{name.removeprefix('pairs/')}": name for name in trained}
    names |= {"eval/pairs": "accuracy/pairs", "eval/loss": "loss/total"}
    assert evaluated.keys() - names.keys() == {"eval/pairs_se"}
    for name in evaluated.keys() & names.keys():
        assert evaluated[name] == pytest.approx(trained[names[name]], rel=1e-9), name


def test_the_evaluation_is_of_the_held_out_rankings_without_a_margin(roles):
    task = PreferenceTask(plan("rm", "margin=5"), roles)
    with roles.learning(REWARD):
        s = [[score(roles, r.prompt, c).item() for c in r.completions] for r in RANKINGS[:2]]
    found = task.evaluate(7).metrics
    leads = [[scores[i] - scores[j] for i, j in pairs(scores)] for scores in s]
    right = [sum(lead > 0 for lead in of_one) / len(of_one) for of_one in leads]
    losses = [sum(math.log1p(math.exp(-lead)) for lead in of_one) / len(of_one) for of_one in leads]
    assert found["eval/pairs"] == pytest.approx(sum(right) / 2, abs=1e-12)
    assert found["eval/loss"] == pytest.approx(sum(losses) / 2, rel=1e-9)
    assert found["eval/score_best"] == pytest.approx((s[0][0] + s[1][0]) / 2, rel=1e-9)
    assert found["eval/score_worst"] == pytest.approx((s[0][1] + s[1][2]) / 2, rel=1e-9)


# -- the reference -----------------------------------------------------------------------------------------------------
@pytest.fixture
def passes(monkeypatch):
    """The roles of all passes without gradient, in order."""
    found = []
    computed = PreferenceTask._values_by

    def counted(self, role, rows):
        found.extend([role] * len(rows))
        return computed(self, role, rows)

    monkeypatch.setattr(PreferenceTask, "_values_by", counted)
    return found


def test_log_probs_by_the_reference_are_computed_once_for_each_ranking(roles, passes):
    task = PreferenceTask(plan("dpo", "rankings_per_step=1"), roles)
    task.rehearse()
    assert task.known == {}, "they would be those of another micro-batch, in their last bits"
    passes.clear()
    for step in range(9):  # three passes over three rankings
        task.backward(step)
    assert passes == [None] * 3
    for _ in range(2):
        task.evaluate(0)
    # The two held-out rankings once by the reference, and by the policy at each evaluation.
    assert passes[3:] == [None, None, POLICY, POLICY, POLICY, POLICY]
    for i, known in task.known.items():
        assert known == pytest.approx(by_reference(roles, RANKINGS[i]).tolist(), rel=1e-12)


def test_a_loss_without_a_reference_computes_none(roles, passes):
    task = PreferenceTask(plan("dpo", "loss=orpo"), roles)
    task.backward(0)
    task.rehearse()
    assert passes == []
    assert task.saved(1, {}, {}).tensors == {}


def test_the_reference_may_be_an_adapter(make_roles, make_double, tmp_path):
    sft = make_roles(noise=0.1, backbone=make_double())
    saved = checkpoint.Checkpoint(
        step=1, adapters={POLICY: sft.weights(POLICY)}, adapter_config=sft.adapter_config(), optimizer={}, state={}
    )
    folder = str(checkpoint.save(tmp_path, saved, keep=1) / POLICY)
    roles = make_roles(noise=0.05, backbone=make_double(), reference=folder)
    task = PreferenceTask(plan("dpo", "loss.beta=0.7", reference=folder), roles)
    assert task.backward(0)["loss/total"] == pytest.approx(dpo_by_hand(roles, 0.7, REFERENCE).item(), rel=1e-9)
    assert dpo_by_hand(roles, 0.7, REFERENCE).item() != pytest.approx(dpo_by_hand(roles, 0.7).item(), rel=1e-3)


def test_a_checkpoint_has_them_to_the_last_bit_and_those_of_another_reference_are_not_used(roles):
    task = PreferenceTask(plan("dpo", "rankings_per_step=2"), roles)
    task.backward(0)
    assert len(task.known) == 2
    saved = task.saved(1, {}, {"seed": 0})
    again = PreferenceTask(plan("dpo", "rankings_per_step=2"), roles)
    again.restore(saved)
    assert again.known == task.known
    assert again.saved(1, {}, {"seed": 0}).tensors.keys() == {REFERENCE_LOGPROBS}
    for changed in ("preferences_fingerprint", "base_fingerprint"):
        other = replace(plan("dpo", "rankings_per_step=2"), fingerprints={**FINGERPRINTS, changed: "other"})
        fork = PreferenceTask(other, roles)
        fork.restore(saved)
        assert fork.known == {}


# -- centring ----------------------------------------------------------------------------------------------------------
def best_scores(roles, head):
    """Of the held-out rankings' best completions, with this head."""
    running = roles.heads[REWARD].weights()
    roles.heads[REWARD].load_state_dict(head)
    with roles.learning(REWARD), torch.no_grad():
        found = [score(roles, r.prompt, r.completions[0]).item() for r in RANKINGS[:2]]
    roles.heads[REWARD].load_state_dict(running)
    return found


def test_the_saved_head_gives_the_best_held_out_completions_a_mean_of_0(roles):
    centred = dict(PreferenceTask(plan("rm"), roles).saved(1, {}, {}).heads[REWARD])
    plain = dict(PreferenceTask(plan("rm", "center=false"), roles).saved(1, {}, {}).heads[REWARD])
    assert sum(best_scores(roles, centred)) / 2 == pytest.approx(0, abs=1e-12)
    assert abs(sum(best_scores(roles, plain)) / 2) > 1e-3
    assert plain["bias"].tolist() == [0.0]
    assert torch.equal(centred["weight"], plain["weight"])


def test_centring_changes_nothing_that_is_learned(roles):
    """The bias is no parameter of the run, it is 0 in it, and 0 again after a resume from a centred checkpoint."""
    task = PreferenceTask(plan("rm"), roles)
    before = {name: p.detach().clone() for name, p in roles.named_parameters(REWARD)}
    saved = task.saved(1, {}, {})
    assert saved.heads[REWARD]["bias"].item() != 0
    assert before[BIAS].item() == 0
    task.restore(saved)
    for name, parameter in roles.named_parameters(REWARD):
        assert torch.equal(parameter, before[name]), name
    assert BIAS not in dict(task.parameters())


# -- replay ------------------------------------------------------------------------------------------------------------
EARLIER = tuple(RankedTokens(prompt=(50 + i,), completions=((1,), (2,)), scores=(1.0, 0.0)) for i in range(6))
NEW = tuple(RankedTokens(prompt=(20 + i,), completions=((1,), (2,)), scores=(1.0, 0.0)) for i in range(12))


@pytest.mark.parametrize(
    ("size", "fraction", "num_earlier", "num_replayed"),
    [
        (10, 0.1, 6, 1), (10, 0.25, 6, 2), (10, 0.35, 6, 4),  # rounded to the nearest: 2.5 and 3.5 to the even one
        (4, 0.1, 6, 0), (4, 0.5, 6, 2), (4, 0.0, 6, 0),
        (4, 0.9, 6, 3), (1, 0.9, 6, 0),  # one at least is new
        (8, 0.5, 1, 4),  # they repeat where they are few
        (4, 0.5, None, 0),  # without any all are new
    ],
)  # fmt: skip
def test_of_an_update_this_share_is_replayed_and_one_ranking_at_least_is_new(size, fraction, num_earlier, num_replayed):
    replay = None if num_earlier is None else EARLIER[:num_earlier]
    made = plan("rm", f"rankings_per_step={size}", f"replay.fraction={fraction}", train=NEW, replay=replay)

    def update(step):
        return [*(made.train.rankings[i] for i in made.positions(step)), *made.replayed(step)]

    for step in range(5):
        assert [r in EARLIER for r in update(step)] == [False] * (size - num_replayed) + [True] * num_replayed
        assert update(step) == update(step)
    assert made.num_steps == max(1, 12 // (size - num_replayed))
    passed = [ranking for step in range(made.num_steps) for ranking in update(step) if ranking in NEW]
    assert len(set(passed)) == len(passed) == made.num_steps * (size - num_replayed)


# -- rehearsals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "token_budget", "per_step", "packed", "largest"),  # sizes: (prompt, completions) of each ranking
    [
        # A prompt of 1 with 20 and 1 against one of 50 and 2 x 4: packed 22 and 58, padded 2 x 21 and 2 x 54.
        ([(1, 20, 1), (50, 4, 4)], 200, 1, True, [1]),
        ([(1, 20, 1), (50, 4, 4)], 200, 1, False, [1]),
        # Of unlike lengths or alike: packed 1 + 30 + 1 = 32 and 20 + 10 + 10 = 40; padded 2 x 31 = 62 and 2 x 30 = 60.
        ([(1, 30, 1), (20, 10, 10)], 200, 1, True, [1]),
        ([(1, 30, 1), (20, 10, 10)], 200, 1, False, [0]),
        # 60, 50 and 50 tokens under a budget of 100: the second micro-batch has both of 50.
        ([(10, 25, 25), (10, 20, 20), (10, 20, 20)], 100, 3, True, [1, 2]),
    ],
    ids=["a long prompt, packed", "a long prompt, padded", "packed", "padded", "two that fit together"],
)
def test_the_rehearsed_micro_batch_is_the_largest(sizes, token_budget, per_step, packed, largest):
    rankings = [
        RankedTokens(prompt=(3 + i,) * prompt, completions=tuple((2,) * n for n in sizes), scores=(1.0,) * len(sizes))
        for i, (prompt, *sizes) in enumerate(sizes)
    ]
    task = object.__new__(PreferenceTask)  # without a model
    forward = Forward(model=None, packed=packed, reason="")
    task.ending, task.roles = (), SimpleNamespace(forward=forward)
    task.config = SimpleNamespace(token_budget=token_budget, rankings_per_step=per_step)
    task.plan = SimpleNamespace(train=SimpleNamespace(rankings=rankings))
    assert task.largest_part() == [rankings[i] for i in largest]
