"""Preference optimisation: what an update learns, what is compared with a reference, what a run leaves behind."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlft import cli
from rlft.commands.preferences import REFERENCE_LOGPROBS, PreferenceTask, open_task
from rlft.config.compose import compose
from rlft.data.examples import RankedTokens, Rankings
from rlft.model.backbone import Backbone
from rlft.model.roles import POLICY, REFERENCE, Roles
from rlft.plan.preference_checks import check_config
from rlft.plan.preference_plan import PreferencePlan, make_plan
from rlft.runs import checkpoint
from rlft.runs.references import resolved

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
    return Rankings(rankings=tuple(found), fingerprint="", note=None)


def plan(*keys: str, train: Sequence[RankedTokens] = RANKINGS, reference: str | None = None) -> PreferencePlan:
    """reference: a folder's place in `Roles`; None: the one that the config means."""
    if not any(key.startswith("rankings_per_step=") for key in keys):
        keys = (*keys, f"rankings_per_step={len(train)}")
    words = ["preferences.path=embedded:arithmetic-preferences", *keys]
    config, loss, _ = check_config(compose(words, verb="dpo"))
    return PreferencePlan(
        config=config,
        plain={},
        engine=None,
        train=rankings(train),
        held_out=rankings(RANKINGS[:2]),
        loss=loss,
        reference=reference or ("base" if loss.needs_reference else "none"),
        loggers=(),
        fingerprints=FINGERPRINTS,
        notes=(),
    )


@pytest.fixture
def roles(make_roles: Callable[..., Roles], make_double: Callable[[], Backbone]) -> Roles:
    """A policy that is not its base, on a model of float64."""
    return make_roles(noise=0.05, backbone=make_double())


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


# -- an update ---------------------------------------------------------------------------------------------------------
def dpo_by_hand(roles: Roles, beta: float, role: str | None = None) -> Tensor:
    """-log sigmoid of beta times the difference of log-ratios: mean over a ranking's pairs, then over rankings."""
    losses = []
    for ranking in RANKINGS:
        ratios = logprobs(roles, ranking) - by_reference(roles, ranking, role)
        n = len(ratios)
        leads = torch.stack([beta * (ratios[i] - ratios[j]) for i in range(n) for j in range(i + 1, n)])
        losses.append(torch.log1p(torch.exp(-leads)).mean())
    return torch.stack(losses).mean()


def simpo_by_hand(roles: Roles, beta: float, gamma: float) -> Tensor:
    losses = []
    for ranking in RANKINGS:
        lengths = torch.tensor([len(completion) for completion in ranking.completions])
        rewards = beta * logprobs(roles, ranking) / lengths
        n = len(rewards)
        leads = torch.stack([rewards[i] - rewards[j] - gamma for i in range(n) for j in range(i + 1, n)])
        losses.append(torch.log1p(torch.exp(-leads)).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("words", "by_hand"),
    [
        (("loss.beta=0.7",), lambda roles: dpo_by_hand(roles, 0.7)),
        (("loss=simpo", "loss.beta=3", "loss.gamma=0.4"), lambda roles: simpo_by_hand(roles, 3.0, 0.4)),
    ],
    ids=["dpo", "simpo"],
)
def test_a_steps_gradient_is_that_of_the_loss_by_hand_whatever_the_token_budget(
    words: tuple[str, ...], by_hand: Callable[[Roles], Tensor], roles: Roles
) -> None:
    by_name = dict(roles.named_parameters(POLICY))
    loss = by_hand(roles)
    expected = dict(zip(by_name, torch.autograd.grad(loss, list(by_name.values())), strict=True))
    largest = max(gradient.abs().max() for gradient in expected.values())
    for token_budget in (1, 17, 40, 10**6):
        task = PreferenceTask(plan(*words), roles)
        task.config = replace(task.config, token_budget=token_budget)
        metrics = task.backward(0)
        assert metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-9)
        for name, parameter in task.parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad / largest, expected[name] / largest, rtol=1e-9, atol=1e-9)
            parameter.grad = None


def test_a_prompt_is_read_once_for_its_completions_and_no_row_has_an_ending(roles: Roles) -> None:
    # The first prompt's rows are one group, also across rankings: 3 + 3 + 2 + 2 + 3 tokens, the second's 2 + 2 + 4 + 1.
    task = PreferenceTask(plan(), roles)
    assert task.backward(0)["tokens/trained"] == 13 + 9
    task.config = replace(task.config, token_budget=22)
    assert [len(part) for part in task.micro_batches(RANKINGS)] == [3]
    task.config = replace(task.config, token_budget=21)
    assert [len(part) for part in task.micro_batches(RANKINGS)] == [2, 1]


def test_metrics_are_means_over_rankings_of_means_over_pairs(roles: Roles) -> None:
    task = PreferenceTask(plan("loss.beta=0.7"), roles)
    metrics = task.backward(0)
    with torch.no_grad():
        own = [logprobs(roles, ranking) for ranking in RANKINGS]
    ratios = [0.7 * (found - by_reference(roles, ranking)) for found, ranking in zip(own, RANKINGS, strict=True)]
    pairs = [[(i, j) for i in range(len(r)) for j in range(i + 1, len(r))] for r in ratios]
    sizes = [torch.tensor([len(completion) for completion in r.completions]) for r in RANKINGS]

    def mean(values: Sequence[Tensor], end: int) -> float:
        each = [sum(v[pair[end]].item() for pair in p) / len(p) for v, p in zip(values, pairs, strict=True)]
        return sum(each) / len(each)

    per_token = [found / size for found, size in zip(own, sizes, strict=True)]
    assert metrics["pairs/chosen_reward"] == pytest.approx(mean(ratios, 0), rel=1e-9)
    assert metrics["pairs/rejected_reward"] == pytest.approx(mean(ratios, 1), rel=1e-9)
    assert metrics["pairs/margin"] == pytest.approx(mean(ratios, 0) - mean(ratios, 1), rel=1e-9)
    assert metrics["pairs/chosen_logprob"] == pytest.approx(mean(per_token, 0), rel=1e-9)
    assert metrics["pairs/rejected_logprob"] == pytest.approx(mean(per_token, 1), rel=1e-9)
    assert metrics["loss/sft"] == pytest.approx(-sum(found[0].item() for found in per_token) / 3, rel=1e-9)


def test_a_policy_that_begins_as_its_reference_loses_log_2(make_roles: Callable[..., Roles], make_double: Any) -> None:
    task = PreferenceTask(plan(), make_roles(backbone=make_double()))
    evaluation = task.evaluate(0)
    assert (evaluation.accuracy, evaluation.accuracy_se) == (0.5, 0.0)
    assert evaluation.metrics["eval/loss"] == pytest.approx(math.log(2), abs=1e-12)
    metrics = task.backward(0)
    assert metrics["loss/total"] == pytest.approx(math.log(2), abs=1e-12)
    assert metrics["accuracy/pairs"] == 0.5


def test_an_evaluation_measures_the_held_out_rankings_as_an_update_does(roles: Roles) -> None:
    evaluated = PreferenceTask(plan(), roles).evaluate(3).metrics
    trained = PreferenceTask(plan(train=RANKINGS[:2]), roles).backward(0)
    names = {f"eval/{name.removeprefix('pairs/')}": name for name in trained}
    names |= {"eval/pairs": "accuracy/pairs", "eval/loss": "loss/total"}
    assert evaluated.keys() - names.keys() == {"eval/pairs_se"}
    for name in evaluated.keys() & names.keys():
        assert evaluated[name] == pytest.approx(trained[names[name]], rel=1e-9), name


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
    task = PreferenceTask(plan("rankings_per_step=1"), roles)
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
    task = PreferenceTask(plan("loss=orpo"), roles)
    task.backward(0)
    task.rehearse()
    assert passes == []
    assert task.saved(1, {}, {}).tensors == {}


def test_a_rehearsal_leaves_no_log_probs_behind(roles: Roles) -> None:
    """They would be those of another micro-batch, in their last bits."""
    task = PreferenceTask(plan(), roles)
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
    task = PreferenceTask(plan("loss.beta=0.7", reference=folder), roles)
    assert task.backward(0)["loss/total"] == pytest.approx(dpo_by_hand(roles, 0.7, REFERENCE).item(), rel=1e-9)
    assert dpo_by_hand(roles, 0.7, REFERENCE).item() != pytest.approx(dpo_by_hand(roles, 0.7).item(), rel=1e-3)


def test_a_checkpoint_has_them_to_the_last_bit_and_those_of_another_reference_are_not_used(roles: Roles) -> None:
    task = PreferenceTask(plan("rankings_per_step=2"), roles)
    task.backward(0)
    assert len(task.known) == 2
    saved = task.saved(1, {}, {"seed": 0})
    again = PreferenceTask(plan("rankings_per_step=2"), roles)
    again.restore(saved)
    assert again.known == task.known
    assert again.saved(1, {}, {"seed": 0}).tensors.keys() == {REFERENCE_LOGPROBS}
    for changed in ("preferences_fingerprint", "base_fingerprint"):
        other = replace(plan("rankings_per_step=2"), fingerprints={**FINGERPRINTS, changed: "other"})
        fork = PreferenceTask(other, roles)
        fork.restore(saved)
        assert fork.known == {}


# -- a run -------------------------------------------------------------------------------------------------------------
TINY = (
    "+recipe=dpo_arithmetic",
    "lora.rank=4",
    "lora.alpha=8",
    "steps=3",
    "rankings_per_step=8",
    "model.device=cpu",
    "eval.num_rankings=12",
    "logger=[jsonl]",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert cli.run(["dpo", *TINY, f"hydra.run.dir={folder}"]) == 0
    return folder


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def test_three_updates_move_the_pairs_apart(trained: Path) -> None:
    first, last = evaluations(trained)
    assert (first["eval/margin"], first["accuracy"]) == (0.0, 0.5)
    assert last["eval/margin"] > 0.005
    assert last["accuracy"] > 0.7
    files = {file.name for file in (trained / "checkpoints" / "step_000003").iterdir()}
    assert {"policy", f"{REFERENCE_LOGPROBS}.safetensors"} < files
    kept = load_file(trained / "checkpoints" / "step_000003" / f"{REFERENCE_LOGPROBS}.safetensors")
    assert (len(kept["positions"]), len(kept["logprobs"])) == (24, 48)  # 3 updates x 8 pairs, and both ends of each


def test_another_round_begins_as_its_reference_wherever_the_first_one_ended(trained: Path) -> None:
    """lora.path=<run> is the policy's start and, by snapshot.reference=auto, the reference: their log-ratios are 0."""
    with ExitStack() as stack:
        task = open_task(make_plan(resolved(compose([*TINY, f"lora.path={trained}"], verb="dpo"))), stack)
        assert task.plan.reference == str(trained / "checkpoints" / "step_000003" / "policy")
        metrics = task.evaluate(0).metrics
        assert metrics["eval/margin"] == 0.0
        assert metrics["eval/chosen_logprob"] == pytest.approx(
            evaluations(trained)[-1]["eval/chosen_logprob"], rel=1e-5
        )
    with ExitStack() as stack:  # held to the base, it begins where the first round ended
        words = [*TINY, f"lora.path={trained}", "snapshot.reference=base"]
        metrics = open_task(make_plan(resolved(compose(words, verb="dpo"))), stack).evaluate(0).metrics
        assert metrics["eval/margin"] == pytest.approx(evaluations(trained)[-1]["eval/margin"], rel=1e-4)


def test_its_run_is_evaluated_talked_to_and_exported_as_any_policys(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    small = ["generation=transformers", "generation.max_tokens=16", "model.device=cpu"]
    words = [f"run={trained}", "data=arithmetic", "data.size=16", "data.held_out_size=4", "scoring.workers=0", *small]
    assert cli.run(["eval", *words, "eval.num_samples=2"]) == 0
    assert "pass@2" in capfd.readouterr().out
    assert cli.run(["chat", f"run={trained}", "model.device=cpu"]) == 0
    assert cli.run(["export", f"run={trained}", f"out={tmp_path / 'model'}"]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| Loss | dpo: beta=0.1, " in card
    assert "- dpo" in card
    assert "| margin | 0.0000 |" in card


def test_its_plan_counts_the_log_probs_that_a_checkpoint_keeps() -> None:
    """926 pairs: a position and two log-probs each, of 8 bytes, are 2 x 3 x 926 numbers of 4; three copies are kept."""
    made = make_plan(compose(TINY, verb="dpo"))
    free = make_plan(compose([*TINY, "loss=simpo"], verb="dpo"))
    assert len(made.train.rankings) == 926
    every = made.config.checkpoint
    copies = min(every.keep + 1, 1 + (made.num_steps - 1) // every.every)
    assert made.disk_bytes()["checkpoints"] - free.disk_bytes()["checkpoints"] == copies * 4 * 2 * 3 * 926
