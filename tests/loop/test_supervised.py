"""Supervised fine-tuning: what is learned, by an adapter or by the model's own weights, and what comes of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from slow_cases import slow
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlft import cli
from rlft.config.compose import compose
from rlft.config.model import ModelConfig
from rlft.config.resolved import build, resolve
from rlft.config.schema import SftConfig
from rlft.data.examples import Examples, RankedTokens, Rankings, TextTokens
from rlft.loop.supervised import (
    BIAS,
    REFERENCE_LOGPROBS,
    REWARD,
    DemonstrationTask,
    PreferenceTask,
)
from rlft.model.backbone import Backbone, load_backbone, read_backbone
from rlft.model.forward import Forward
from rlft.model.full_weights import WholeModel
from rlft.model.reward_model import rows_of
from rlft.model.roles import POLICY, REFERENCE, Roles
from rlft.plan.supervised_plan import PreferencePlan, SftPlan
from rlft.runs import checkpoint

# (prompt, completion), ids under 60; two share their prompt, lengths differ.
ROWS = [([5, 6, 7], [20, 21, 2]), ([9, 10], [30, 2]), ([5, 6, 7], [22, 23, 24, 25, 2]), ([11, 12, 13, 14], [40, 2])]


def examples(rows: Sequence[tuple[list[int], list[int]]]) -> Examples:
    texts = (TextTokens(ids=np.array([*p, *c], dtype="<i4"), num_given=len(p)) for p, c in rows)
    return Examples(texts=tuple(texts), fingerprint="", notes=())


def make_task(learner: Roles | WholeModel, token_budget: int = 10**6) -> DemonstrationTask:
    """All of ROWS in one update."""
    keys = ["demonstrations.path=unread", f"examples_per_step={len(ROWS)}", f"token_budget={token_budget}"]
    plan = SftPlan(
        config=build(compose(keys, command="sft"), SftConfig, "sft"),
        plain={},
        engine=None,
        train=examples(ROWS),
        held_out_examples=examples(ROWS[:2]),
        held_out=None,
        loggers=(),
        fingerprints={},
        notes=(),
    )
    return DemonstrationTask(plan, learner, None, None, print)


@pytest.fixture(params=["an adapter", "all weights"])
def learner(request: pytest.FixtureRequest, make_double: Callable[[], Backbone], make_roles: Any) -> Any:
    """What learns, on a model of float64."""
    if request.param == "all weights":
        return WholeModel(make_double())
    return make_roles(noise=0.05, backbone=make_double())


def log_probs(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """Of each completion token, by the plainest forward there is."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0]


def gradients(learner: Roles | WholeModel) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in learner.named_parameters() if p.grad is not None}
    for _, p in learner.named_parameters():
        p.grad = None
    return found


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_the_loss_is_the_mean_over_completion_tokens_and_any_token_budget_gives_its_gradient(learner: Any) -> None:
    """3 + 2 + 5 + 2 = 12 tokens are learned; the 12 of the prompts are read, and cost nothing."""
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
        found = gradients(learner)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient / largest, expected[name] / largest, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_the_held_out_loss_is_the_mean_over_completion_tokens(learner: Any) -> None:
    evaluation = make_task(learner).evaluate(3)
    nll = -torch.cat([log_probs(learner.model, *row) for row in ROWS[:2]])
    assert evaluation.metrics == {"eval/loss": pytest.approx(nll.mean().item(), rel=1e-9)}
    assert (evaluation.step, evaluation.accuracy) == (3, None)


def test_demonstrations_of_one_prompt_go_through_the_network_as_one_group(make_double: Any) -> None:
    """Their prompt of 3 tokens once: 3 + 2 + 4 prompt tokens and 12 of completions."""
    metrics = make_task(WholeModel(make_double())).backward(0)
    assert metrics["tokens/trained"] == 21


# -- runs --------------------------------------------------------------------------------------------------------------
TINY = (
    "+recipe=sft_arithmetic", "steps=2", "examples_per_step=4", "lora.rank=2", "lora.alpha=4",
    "generation=transformers", "generation.max_tokens=32", "model.device=cpu", "scoring.workers=0",
    "eval.num_prompts=4", "eval.num_samples=2", "console=null",
)  # fmt: skip
ALL_WEIGHTS = (*(key for key in TINY if not key.startswith("lora.")), "lora=null", "trainer.lr=1e-4")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run that trained an adapter."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    assert cli.run(["sft", *TINY, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of one that trained all weights."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert cli.run(["sft", *ALL_WEIGHTS, f"hydra.run.dir={folder}"]) == 0
    return folder


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_training_all_weights_changes_the_runs_own_copy_and_no_other(
    whole: Path, tiny_path: Path, model_config: Callable[..., ModelConfig]
) -> None:
    before = load_file(tiny_path / "model.safetensors")
    after = load_file(whole / "checkpoints" / "step_000002" / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    for name, tensor in load_backbone(model_config()).model.state_dict().items():
        assert name not in before or torch.equal(tensor, before[name]), name
    assert not any(p.requires_grad for p in load_backbone(model_config()).model.parameters())


def test_a_checkpoints_model_folder_is_a_model_for_transformers(
    whole: Path, tiny_path: Path, model_config: Callable[..., ModelConfig]
) -> None:
    folder = whole / "checkpoints" / "step_000002" / "model"
    own = WholeModel(read_backbone(model_config()))
    own.restore_role(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_path)
    with torch.no_grad():
        for prompt, completion in ROWS:
            mine, saved = log_probs(own.model, prompt, completion), log_probs(theirs, prompt, completion)
            assert torch.equal(mine, saved) or (mine - saved).abs().max() < 1e-5  # attention of two implementations
            assert (saved - log_probs(base, prompt, completion)).abs().max() > 1e-3


def test_the_weights_of_another_model_are_not_restored(whole: Path, make_double: Callable[[], Backbone]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        WholeModel(make_double()).restore_role(whole / "checkpoints" / "step_000002" / "model")


@pytest.mark.parametrize("kind", ["adapted", slow("whole")])
def test_a_run_is_evaluated_as_it_evaluated_itself(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    last = lines(folder / "eval.jsonl")[-1]
    assert last["step"] == 2
    assert cli.run(["eval", f"run={folder}"]) == 0
    [file] = (folder / "evaluations").iterdir()
    again = lines(file)[0]
    file.unlink()
    names = [name for name in last if name.startswith("eval/") and name != "eval/loss"]
    assert len(names) > 6
    assert {name: again[name] for name in names} == {name: last[name] for name in names}


def test_weights_of_a_run_are_not_evaluated_as_another_models(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["eval", f"run={whole}", "model.path=embedded:tiny-arithmetic"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rlft: model.path: ")
    assert told.endswith(", got embedded:tiny-arithmetic; leave it out\n")
    assert not (whole / "evaluations").exists() or not list((whole / "evaluations").iterdir())


def test_all_weights_learn_the_same_with_gradient_checkpointing(
    model_config: Callable[..., ModelConfig], make_batch: Callable[..., Any]
) -> None:
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


@pytest.mark.parametrize(
    ("kind", "key", "keys"), [("adapted", "lora.path", TINY), slow("whole", "model.path", ALL_WEIGHTS)]
)
def test_another_run_goes_on_from_a_runs_newest_checkpoint(
    kind: str, key: str, keys: tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    before: Path = request.getfixturevalue(kind)
    assert cli.run(["sft", *keys, f"{key}={before}", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    section, _, name = key.partition(".")
    role = {"adapted": "policy", "whole": "model"}[kind]
    newest = before / "checkpoints" / "step_000002" / role
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())[section][name] == str(newest)
    ended, began = lines(before / "eval.jsonl")[-1], lines(tmp_path / "run" / "eval.jsonl")[0]
    assert began["step"] == 0
    # The same function on the same prompts and demonstrations, whatever engine slot it went through.
    assert began["eval/loss"] == pytest.approx(ended["eval/loss"], rel=1e-6)
    assert began["eval/exact_match"] == ended["eval/exact_match"]
    assert began["eval/loss"] != lines(before / "eval.jsonl")[0]["eval/loss"]


def test_the_kl_to_the_base_is_measured_where_it_is_asked_for(tmp_path: Path) -> None:
    """A fresh adapter is the base itself: 0; after a step it is not."""
    keys = [key for key in TINY if not key.startswith("steps=")]
    assert cli.run(["sft", *keys, "steps=1", "eval.kl_base=true", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    first, last = lines(tmp_path / "run" / "eval.jsonl")
    assert first["eval/kl_base"] == 0
    assert last["eval/kl_base"] > 0


def test_without_data_only_the_loss_is_measured(tmp_path: Path) -> None:
    words = ["demonstrations.path=embedded:arithmetic-demonstrations", "steps=1", "examples_per_step=2"]
    words += ["max_completion_tokens=64", "model.device=cpu", "console=null", f"hydra.run.dir={tmp_path / 'run'}"]
    assert cli.run(["sft", *words]) == 0
    first, last = lines(tmp_path / "run" / "eval.jsonl")
    assert [name for name in last if name.startswith("eval/")] == ["eval/loss"]
    assert first["accuracy"] is None


# -- rankings ----------------------------------------------------------------------------------------------------------
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # of LoRA on GPT-2

P, Q = (5, 6, 7), (9, 10)
# Best first, ids under 60: a pair, three ranked ones of another prompt, and a pair of the first prompt once more.
RANKINGS = (
    RankedTokens(prompt=P, completions=((20, 21, 2), (22, 2)), scores=(1.0, 0.0)),
    RankedTokens(prompt=Q, completions=((30, 2), (31, 32, 33, 2), (34,)), scores=(3.0, 1.0, 0.5)),
    RankedTokens(prompt=P, completions=((23, 2), (20, 21, 2)), scores=(1.0, 0.0)),
)
FINGERPRINTS = {"preferences_fingerprint": "p", "base_fingerprint": "b"}


def rankings(found: Sequence[RankedTokens]) -> Rankings:
    return Rankings(rankings=tuple(found), fingerprint="", notes=())


def plan(
    command: str,
    *keys: str,
    train: Sequence[RankedTokens] = RANKINGS,
    reference: str | None = None,
    replay: Sequence[RankedTokens] | None = None,
) -> PreferencePlan:
    """reference: a folder's place in `Roles`; None: the one that the config means."""
    if not any(key.startswith("rankings_per_step=") for key in keys):
        keys = (*keys, f"rankings_per_step={len(train)}")
    resolved = resolve(compose(["preferences.path=embedded:arithmetic-preferences", *keys], command=command))
    config, (loss, _) = resolved.config, resolved.parts
    return PreferencePlan(
        config=config,
        plain={},
        engine=None,
        train=rankings(train),
        held_out=rankings(RANKINGS[:2]),
        loss=loss,
        reference=reference or ("base" if loss.needs_reference else "none"),
        replay=None if replay is None else rankings(replay),
        fingerprints=FINGERPRINTS,
    )


@pytest.fixture
def roles(make_roles: Callable[..., Roles], make_double: Callable[[], Backbone]) -> Roles:
    """A policy that is not its base, and a reward's adapter and head, not all zeros, on a model of float64."""
    made = make_roles(noise=0.05, backbone=make_double())
    made.add_scalar_role(REWARD, None, "lora.path", learns=True)
    generator = torch.Generator().manual_seed(1)
    for _, parameter in made.named_parameters(REWARD):
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def logprob(roles: Roles, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Of the completion, summed over its tokens, by the plainest forward there is and the role that is active."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = roles.backbone.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).sum()


def logprobs(roles: Roles, ranking: RankedTokens) -> Tensor:
    return torch.stack([logprob(roles, ranking.prompt, completion) for completion in ranking.completions])


def by_reference(roles: Roles, ranking: RankedTokens, role: str | None = None) -> Tensor:
    with torch.no_grad(), roles.using(role):
        return logprobs(roles, ranking)


def score(roles: Roles, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """The head at the last token, by the plainest forward there is; the role is the active one."""
    hidden = roles.backbone.model.base_model(input_ids=torch.tensor([[*prompt, *completion]])).last_hidden_state
    return roles.heads[REWARD](hidden[0, -1])


# -- an update ---------------------------------------------------------------------------------------------------------
def mean_loss(leads_of: Callable[[RankedTokens], Sequence[Tensor]]) -> Tensor:
    """-log sigmoid of the lead of each pair's better one: mean over the pairs of a ranking, then over rankings."""
    leads = [torch.stack(list(leads_of(ranking))) for ranking in RANKINGS]
    return torch.stack([torch.log1p(torch.exp(-leads_N)).mean() for leads_N in leads]).mean()


def pairs(values: Sequence[Any] | Tensor) -> list[tuple[int, int]]:
    return [(i, j) for i in range(len(values)) for j in range(i + 1, len(values))]


def dpo_by_hand(roles: Roles, beta: float, role: str | None = None) -> Tensor:
    """Of beta times the difference of log-ratios."""

    def leads(ranking: RankedTokens) -> list[Tensor]:
        ratios = logprobs(roles, ranking) - by_reference(roles, ranking, role)
        return [beta * (ratios[i] - ratios[j]) for i, j in pairs(ratios)]

    return mean_loss(leads)


def simpo_by_hand(roles: Roles, beta: float, gamma: float) -> Tensor:
    def leads(ranking: RankedTokens) -> list[Tensor]:
        rewards = beta * logprobs(roles, ranking) / torch.tensor([len(c) for c in ranking.completions])
        return [rewards[i] - rewards[j] - gamma for i, j in pairs(rewards)]

    return mean_loss(leads)


def rm_by_hand(roles: Roles, margin: float) -> Tensor:
    """Of s_better - s_worse - margin x difference of ranks."""

    def leads(ranking: RankedTokens) -> list[Tensor]:
        s, ranks = [score(roles, ranking.prompt, completion) for completion in ranking.completions], ranking.scores
        return [s[i] - s[j] - margin * (ranks[i] - ranks[j]) for i, j in pairs(s)]

    return mean_loss(leads)


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
def test_a_steps_gradient_is_that_of_the_loss_by_hand_whatever_the_token_budget(
    words: tuple[str, ...], by_hand: Callable[[Roles], Tensor], roles: Roles
) -> None:
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
            assert parameter.grad is not None
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
def test_a_token_budget_parts_rankings_but_tears_none_and_a_prompt_is_read_once(
    command: str, trained: int, parts: dict[int, list[int]], roles: Roles
) -> None:
    task = PreferenceTask(plan(command), roles)
    assert task.backward(0)["tokens/trained"] == trained
    for token_budget, sizes in parts.items():
        task.config = replace(task.config, token_budget=token_budget)
        assert [len(part) for part in task.micro_batches(RANKINGS)] == sizes


def test_completions_of_one_prompt_are_a_group_even_in_two_rankings() -> None:
    assert [(group, completion) for group, _, completion in rows_of(RANKINGS)] == [
        (0, (20, 21, 2)), (0, (22, 2)), (1, (30, 2)), (1, (31, 32, 33, 2)), (1, (34,)), (0, (23, 2)), (0, (20, 21, 2)),
    ]  # fmt: skip


def test_metrics_are_means_over_rankings_of_means_over_pairs(roles: Roles) -> None:
    task = PreferenceTask(plan("dpo", "loss.beta=0.7"), roles)
    metrics = task.backward(0)
    with torch.no_grad():
        own = [logprobs(roles, ranking) for ranking in RANKINGS]
    ratios = [0.7 * (found - by_reference(roles, ranking)) for found, ranking in zip(own, RANKINGS, strict=True)]
    sizes = [torch.tensor([len(completion) for completion in r.completions]) for r in RANKINGS]

    def mean(values: Sequence[Tensor], end: int) -> float:
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
def test_a_policy_that_is_its_reference_and_a_head_of_zeros_are_right_by_half_and_lose_log_2(
    command: str, make_roles: Callable[..., Roles], make_double: Any
) -> None:
    made = make_roles(backbone=make_double())
    made.add_scalar_role(REWARD, None, "lora.path", learns=True)
    task = PreferenceTask(plan(command), made)
    evaluation = task.evaluate(0)
    assert (evaluation.accuracy, evaluation.accuracy_se) == (0.5, 0.0)
    assert evaluation.metrics["eval/loss"] == pytest.approx(math.log(2), abs=1e-12)
    metrics = task.backward(0)
    assert metrics["loss/total"] == pytest.approx(math.log(2), abs=1e-12)
    assert metrics["accuracy/pairs"] == 0.5


def test_an_evaluation_measures_the_held_out_rankings_as_an_update_does(roles: Roles) -> None:
    evaluated = PreferenceTask(plan("dpo"), roles).evaluate(3).metrics
    trained = PreferenceTask(plan("dpo", train=RANKINGS[:2]), roles).backward(0)
    names = {f"eval/{name.removeprefix('pairs/')}": name for name in trained}
    names |= {"eval/pairs": "accuracy/pairs", "eval/loss": "loss/total"}
    assert evaluated.keys() - names.keys() == {"eval/pairs_se"}
    for name in evaluated.keys() & names.keys():
        assert evaluated[name] == pytest.approx(trained[names[name]], rel=1e-9), name


def test_the_evaluation_is_of_the_held_out_rankings_without_a_margin(roles: Roles) -> None:
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
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The roles of all passes without gradient, in order."""
    found: list[str | None] = []
    computed = PreferenceTask._values_by

    def counted(self: PreferenceTask, role: str | None, rows: Sequence[RankedTokens]) -> Tensor:
        found.extend([role] * len(rows))
        return computed(self, role, rows)

    monkeypatch.setattr(PreferenceTask, "_values_by", counted)
    return found


def test_log_probs_by_the_reference_are_computed_once_for_each_ranking(roles: Roles, passes: list[str | None]) -> None:
    task = PreferenceTask(plan("dpo", "rankings_per_step=1"), roles)
    for step in range(9):  # three passes over three rankings
        task.backward(step)
    assert passes == [None] * 3
    for _ in range(2):
        task.evaluate(0)
    # The two held-out rankings once by the reference, and by the policy at each evaluation.
    assert passes[3:] == [None, None, POLICY, POLICY, POLICY, POLICY]
    for i, known in task.known.items():
        assert known == pytest.approx(by_reference(roles, RANKINGS[i]).tolist(), rel=1e-12)


def test_a_loss_without_a_reference_computes_none(roles: Roles, passes: list[str | None]) -> None:
    task = PreferenceTask(plan("dpo", "loss=orpo"), roles)
    task.backward(0)
    task.rehearse()
    assert passes == []
    assert task.saved(1, {}, {}).tensors == {}


def test_a_rehearsal_leaves_no_log_probs_behind(roles: Roles) -> None:
    """They would be those of another micro-batch, in their last bits."""
    task = PreferenceTask(plan("dpo"), roles)
    task.rehearse()
    assert task.known == {}


def test_the_reference_may_be_an_adapter(
    make_roles: Callable[..., Roles], make_double: Callable[[], Backbone], tmp_path: Path
) -> None:
    sft = make_roles(noise=0.1, backbone=make_double())
    saved = checkpoint.Checkpoint(
        step=1, adapters={POLICY: sft.weights(POLICY)}, adapter_config=sft.adapter_config(), optimizer={}, state={}
    )
    folder = str(checkpoint.save(tmp_path, saved, keep=1) / POLICY)
    roles = make_roles(noise=0.05, backbone=make_double(), reference=folder)
    task = PreferenceTask(plan("dpo", "loss.beta=0.7", reference=folder), roles)
    assert task.backward(0)["loss/total"] == pytest.approx(dpo_by_hand(roles, 0.7, REFERENCE).item(), rel=1e-9)
    assert dpo_by_hand(roles, 0.7, REFERENCE).item() != pytest.approx(dpo_by_hand(roles, 0.7).item(), rel=1e-3)


def test_a_checkpoint_has_them_to_the_last_bit_and_those_of_another_reference_are_not_used(roles: Roles) -> None:
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
def best_scores(roles: Roles, head: dict[str, Tensor]) -> list[float]:
    """Of the held-out rankings' best completions, with this head."""
    running = roles.heads[REWARD].weights()
    roles.heads[REWARD].load_state_dict(head)
    with roles.learning(REWARD), torch.no_grad():
        found = [score(roles, r.prompt, r.completions[0]).item() for r in RANKINGS[:2]]
    roles.heads[REWARD].load_state_dict(running)
    return found


def test_the_saved_head_gives_the_best_held_out_completions_a_mean_of_0(roles: Roles) -> None:
    centred = dict(PreferenceTask(plan("rm"), roles).saved(1, {}, {}).heads[REWARD])
    plain = dict(PreferenceTask(plan("rm", "center=false"), roles).saved(1, {}, {}).heads[REWARD])
    assert sum(best_scores(roles, centred)) / 2 == pytest.approx(0, abs=1e-12)
    assert abs(sum(best_scores(roles, plain)) / 2) > 1e-3
    assert plain["bias"].tolist() == [0.0]
    assert torch.equal(centred["weight"], plain["weight"])


def test_centring_changes_nothing_that_is_learned(roles: Roles) -> None:
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


def at(made: PreferencePlan, step: int) -> list[RankedTokens]:
    """The rankings of the update after `step` steps."""
    return [*(made.train.rankings[i] for i in made.positions(step)), *made.replayed(step)]


@pytest.mark.parametrize(
    ("size", "fraction", "num_replayed"),
    [(10, 0.1, 1), (10, 0.25, 2), (10, 0.35, 4), (4, 0.1, 0), (4, 0.5, 2), (4, 0.0, 0), (4, 0.9, 3), (1, 0.9, 0)],
)
def test_of_an_update_this_share_is_replayed_and_one_ranking_at_least_is_new(
    size: int, fraction: float, num_replayed: int
) -> None:
    # Rounded to the nearest: 10 x 0.25 = 2.5 and 10 x 0.35 = 3.5 go to the even one.
    made = plan("rm", f"rankings_per_step={size}", f"replay.fraction={fraction}", train=NEW, replay=EARLIER)
    for step in range(5):
        found = at(made, step)
        assert len(found) == size
        assert sum(r in EARLIER for r in found) == num_replayed
        assert at(made, step) == found
    assert made.num_steps == max(1, 12 // (size - num_replayed))


def test_without_replay_all_rankings_are_new() -> None:
    made = plan("rm", "rankings_per_step=4", "replay.fraction=0.5", train=NEW)
    passed = [ranking for step in range(3) for ranking in at(made, step)]
    assert set(passed) == set(NEW)
    assert made.num_steps == 3


def test_replayed_rankings_repeat_where_they_are_few() -> None:
    made = plan("rm", "rankings_per_step=8", "replay.fraction=0.5", train=NEW, replay=EARLIER[:1])
    assert [r in EARLIER for r in at(made, 0)] == [False] * 4 + [True] * 4


# -- rehearsals --------------------------------------------------------------------------------------------------------
def largest_part(rankings: list[RankedTokens], token_budget: int, per_step: int, *, packed: bool) -> list[RankedTokens]:
    """The rehearsed micro-batch of a policy that learns from these rankings."""
    task = object.__new__(PreferenceTask)  # without a model
    forward = Forward(model=None, packed=packed, reason="")  # type: ignore[arg-type]
    task.ending, task.roles = (), SimpleNamespace(forward=forward)  # type: ignore[assignment]
    task.config = SimpleNamespace(token_budget=token_budget, rankings_per_step=per_step)
    task.plan = SimpleNamespace(train=SimpleNamespace(rankings=rankings))  # type: ignore[assignment]
    return task.largest_part()


def ranking(prompt: int, *completions: int, token: int = 1) -> RankedTokens:
    return RankedTokens(
        prompt=(token,) * prompt, completions=tuple((2,) * n for n in completions), scores=(1.0,) * len(completions)
    )


@pytest.mark.parametrize("packed", [True, False])
def test_a_long_prompt_counts(packed: bool) -> None:
    # A prompt of 50 and 2 x 4 against one of 1 with 20 and 1: packed 58 and 22, padded 2 x 54 and 2 x 21.
    rankings = [ranking(1, 20, 1), ranking(50, 4, 4)]
    assert largest_part(rankings, 200, 1, packed=packed) == [rankings[1]]


def test_completions_of_unlike_lengths_take_most_where_rows_are_padded() -> None:
    # Packed 1 + 30 + 1 = 32 and 20 + 10 + 10 = 40; padded 2 x 31 = 62 and 2 x 30 = 60.
    unlike, alike = ranking(1, 30, 1), ranking(20, 10, 10)
    for packed, expected in ((True, alike), (False, unlike)):
        assert largest_part([unlike, alike], 200, 1, packed=packed) == [expected]


def test_two_that_fit_together_may_be_more_than_the_largest_alone() -> None:
    # 60, 50 and 50 tokens under a budget of 100: the second micro-batch has both of 50.
    first, *others = ranking(10, 25, 25, token=3), ranking(10, 20, 20, token=4), ranking(10, 20, 20, token=5)
    assert largest_part([first, *others], 100, 3, packed=True) == others
