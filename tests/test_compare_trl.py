"""TRL's trainer on what rlft's GRPO is told: the same prompts, rewards and settings, and the same evaluation."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare_trl
import pytest
import torch
from safetensors.torch import load_file

from rlft.config.compose import compose
from rlft.config.resolved import build, resolve
from rlft.config.schema import RunConfig
from rlft.loop.sampling import StepSampler
from rlft.model.backbone import load_tokenizer
from rlft.plan.train_plan import TrainPlan
from rlft.reward.workers.reward_spec import specs
from rlft.runs import run_folder
from rlft.system.terminal import pip_install
from rlft.types import Prompt, UserError

pytestmark = pytest.mark.slow

RECIPE = ("+recipe=grpo_arithmetic", "generation=transformers", "model.device=cpu", "logger=[jsonl]")


@pytest.fixture(scope="module")
def plan() -> TrainPlan:
    """Of three steps of four prompts with two completions each."""
    return resolve(compose([*RECIPE, "steps=3", "prompts_per_step=4", "group_size=2", "seed=5"])).plan(trains=False)


def typed(*overrides: str) -> RunConfig:
    config = build(compose([*RECIPE, *overrides]))
    assert isinstance(config, RunConfig)
    return config


# -- settings ----------------------------------------------------------------------------------------------------------
def test_trls_settings_are_those_of_the_config() -> None:
    words = ["trainer.lr=0.01", "trainer.beta2=0.9", "algorithm.clip_high=0.3", "seed=3", "minibatches=2"]
    assert compare_trl.settings(typed(*words)) == {
        # 32 prompts x 8 completions = 256 rows a step: 2 updates of 2 micro-batches of 64, 40 steps of 2 updates.
        "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 8,
        "num_iterations": 1,
        "max_steps": 80,
        "logging_steps": 2,
        "seed": 3,
        "shuffle_dataset": False,
        "max_completion_length": 48,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "beta": 0.0,
        "delta": None,
        "entropy_coef": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.3,
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "adam_beta1": 0.9,
        "adam_beta2": 0.9,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
    }


@pytest.mark.parametrize(
    ("prompts", "group", "updates", "rows"), [(3, 5, 1, 1), (3, 8, 1, 8), (40, 8, 1, 64), (1, 2, 1, 2), (32, 8, 4, 64)]
)
def test_micro_batches_divide_an_update_evenly(prompts: int, group: int, updates: int, rows: int) -> None:
    words = [f"prompts_per_step={prompts}", f"group_size={group}", f"minibatches={updates}"]
    settings = compare_trl.settings(typed(*words))
    assert settings["per_device_train_batch_size"] == rows
    assert rows * settings["gradient_accumulation_steps"] * updates == prompts * group
    assert rows * settings["steps_per_generation"] == prompts * group


def test_the_adapter_is_the_configs() -> None:
    told = compare_trl.adapter_settings(typed("lora.rank=4", "lora.alpha=8", "lora.target_modules=[q_proj,v_proj]"))
    assert (told["r"], told["lora_alpha"], told["target_modules"]) == (4, 8.0, ["q_proj", "v_proj"])
    assert compare_trl.adapter_settings(typed())["target_modules"] == "all-linear"


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("algorithm=rloo", r"^algorithm\._target_: .*use algorithm\._target_=rlft\.algorithm\.grpo\.GRPO"),
        ("algorithm=dr_grpo", r"^algorithm\.std: .*got none; use algorithm\.std=sample"),
        ("algorithm.kl_coef=0.1", r"^algorithm\.kl_coef: .*got 0\.1; use algorithm\.kl_coef=0\.0"),
        ("epochs=2", r"^epochs: .*got 2; use epochs=1"),
        ("minibatches=3", r"^minibatches: does not divide the 32 prompts of a step, got 3; use minibatches=1"),
        ("environment=calculator", r"^environment: .*got a section; use environment=null"),
        ("trainer.schedule=linear", r"^trainer\.schedule: .*use trainer\.schedule=constant"),
        ("generation.stop=[x]", r"^generation\.stop: .*use generation\.stop=\[\]"),
        ("lora.path=some", r"^lora\.path: .*got some; use lora\.path=null"),
        ("eval.every=0", r"^eval\.every: .*got 0; use eval\.every=10"),
        ("reward=[exact_match,equations]", r"^reward\.equations: .*use rewards of whole completions"),
    ],
)
def test_what_trl_would_do_otherwise_is_refused(override: str, refused: str) -> None:
    compare_trl.check(compose(RECIPE))
    with pytest.raises(UserError, match=refused):
        compare_trl.check(compose([*RECIPE, override]))


def test_without_trl_it_is_said_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compare_trl.run([*RECIPE, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert capsys.readouterr().err == f"compare_trl: trl: is not installed; {pip_install('rlft[bench]')}\n"
    assert not (tmp_path / "run").exists()


# -- prompts and rewards -----------------------------------------------------------------------------------------------
def test_each_step_has_the_prompts_that_rlft_samples_in_it(plan: TrainPlan) -> None:
    ours = StepSampler(None, plan.train_prompts.prompts, plan.config)  # pyright: ignore[reportArgumentType]
    theirs = compare_trl.prompts_of(plan)
    assert len(theirs) == 3 * 4
    for step in range(3):
        assert [p.id for p in theirs[4 * step : 4 * step + 4]] == [p.id for p in ours.prompts_at(step)]


def test_a_chat_template_that_gives_other_tokens_is_refused(plan: TrainPlan) -> None:
    tokenizer, prompt = load_tokenizer(plan.config.model), plan.train_prompts.prompts[0]
    compare_trl.check_tokens(tokenizer, prompt)
    other = Prompt(id="x", messages=prompt.messages, answer="1", token_ids=(*prompt.token_ids, 1))
    with pytest.raises(UserError, match=r"^model\.path: its chat template gives TRL other tokens"):
        compare_trl.check_tokens(tokenizer, other)


def test_rewards_are_rlfts_of_each_completion_in_trls_order(plan: TrainPlan) -> None:
    tokenizer = load_tokenizer(plan.config.model)
    prompts = compare_trl.prompts_of(plan)

    def ids(text: str, *, ended: bool = True) -> list[int]:
        end = [tokenizer.eos_token_id] if ended else []
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]

    # Prompts 7 and 2, two completions each: right, badly formatted; cut off, right.
    right = "<think>1</think><answer>{}</answer>"
    said = [
        ids(right.format(prompts[7].answer)),
        ids(f"<answer>{prompts[7].answer}</answer>"),
        ids("<think>1", ended=False),
        ids(right.format(prompts[2].answer)),
    ]
    place = [7, 7, 2, 2]
    found = {
        name: compare_trl.reward_function(spec, prompts, tokenizer, plan.config)(
            completions=["not read"] * 4, completion_ids=said, place=place, trainer_state=None
        )
        for name, spec in specs(plan.config.reward).items()
    }
    assert found == {"exact_match": [1.0, 1.0, 0.0, 1.0], "format": [1.0, 0.0, 0.0, 1.0]}
    first, second = compare_trl.as_groups(said, [prompts[i] for i in place], tokenizer, plan.config)
    assert (first.prompt.id, second.prompt.id) == (prompts[7].id, prompts[2].id)
    assert [rollout.completion.finish_reason for rollout in second.rollouts] == ["length", "stop"]
    assert second.rollouts[0].completion.text == "<think>1"


@pytest.mark.parametrize(("steps", "evaluated"), [(25, [10, 20, 25]), (20, [10, 20]), (7, [7])])
def test_evaluations_come_when_rlfts_do(steps: int, evaluated: list[int]) -> None:
    run = typed("eval.every=10", f"steps={steps}")
    assert [step for step in range(1, steps + 1) if compare_trl.is_evaluated(step, run)] == evaluated


# -- evaluation --------------------------------------------------------------------------------------------------------
def evaluated(folder: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


def test_an_adapter_is_evaluated_as_the_run_that_trained_it_evaluates_its_policy(trained: Path, tmp_path: Path) -> None:
    saved = run_folder.read(trained)
    saved.pop(run_folder.ORIGIN)
    plan = resolve({**saved, "logger": {}, "resume": None}).plan(trains=False)
    checkpoints = run_folder.checkpoints(trained)
    adapters = {
        step: load_file(checkpoints / f"step_{step:06d}" / "policy" / "adapter_model.safetensors") for step in (2, 3)
    }
    compare_trl.evaluate(plan, tmp_path, adapters)
    ours, again = evaluated(trained), evaluated(tmp_path)
    assert set(again) == {2, 3}
    assert again == {step: {key: ours[step][key] for key in again[step]} for step in again}
    assert ours[2]["eval/length/mean"] != ours[3]["eval/length/mean"], "the two adapters say different things"

    name, tensor = next(iter(adapters[3].items()))
    wrong = {**adapters[3], name: torch.zeros(tensor.shape[0] + 1, tensor.shape[1])}
    with pytest.raises(UserError, match=r"^lora\.target_modules: TRL's adapter has other tensors than rlft's"):
        compare_trl.evaluate(plan, tmp_path, {4: wrong})
    assert set(evaluated(tmp_path)) == {2, 3}


# -- the real thing ----------------------------------------------------------------------------------------------------
def test_a_run_of_trl_leaves_the_files_of_a_run(tmp_path: Path) -> None:
    small = ["steps=3", "prompts_per_step=4", "group_size=8", "eval.every=2", "eval.num_prompts=8", "eval.kl_base=true"]
    words = [*RECIPE, *small, "trainer.lr=0.01", f"hydra.run.dir={tmp_path / 'run'}"]
    command = [sys.executable, compare_trl.__file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0.0 <= line["reward/mean"] <= 1.2 and line["time/step"] > 0 for line in lines)
    found = evaluated(tmp_path / "run")
    assert list(found) == [0, 2, 3]
    assert found[0]["eval/kl_base"] == 0.0, "a fresh adapter is the base"
    assert found[3]["eval/kl_base"] > 1e-4
    assert run_folder.read(tmp_path / "run")[run_folder.ORIGIN]["trl"].startswith("1.16")
