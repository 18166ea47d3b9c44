"""Supervised fine-tuning: what is learned, by an adapter or by the model's own weights, and what comes of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
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
from rlft.config.resolved import build
from rlft.config.schema import SftConfig
from rlft.data.examples import Examples
from rlft.data.texts import TextTokens
from rlft.loop.demonstration_task import DemonstrationTask
from rlft.model.backbone import Backbone, load_backbone, read_backbone
from rlft.model.full_weights import WholeModel
from rlft.model.roles import Roles
from rlft.plan.sft_plan import SftPlan

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
