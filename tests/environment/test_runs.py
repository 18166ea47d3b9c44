"""Whole runs of conversations: killed, resumed and sampled by an engine of a process of its own, they are one run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from run_folders import check_same
from run_processes import Nursery
from slow_cases import slow

KEYS = (
    "+recipe=grpo_arithmetic", "steps=3", "prompts_per_step=2", "group_size=3", "generation=transformers",
    "generation.max_tokens=40", "model.device=cpu", "lora.rank=2", "data.size=64", "data.held_out_size=8",
    "eval.every=3", "eval.num_prompts=2", "eval.num_samples=1", "scoring.workers=0", "console=null",
    "reward=[exact_match]", "environment=game", "environment.factory=conversation_tools.Guessing",
    "environment.workers=1", "environment.turn_tokens=16", "checkpoint.every=1", "checkpoint.keep=99",
)  # fmt: skip
UPDATE = "rlft.trainer.optimizer:Optimizer.update"


@pytest.mark.slow
def test_a_run_of_conversations_is_the_same_killed_and_resumed_with_an_engine_apart(
    forks: Nursery, tmp_path: Path
) -> None:
    done = forks.run("train", *KEYS, "hydra.run.dir=whole", cwd=tmp_path)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "whole/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert any(len(line["turns"]) == 2 and 0 in line["mask"] for line in lines), "some conversations have two turns"
    metrics = json.loads((tmp_path / "whole/metrics.jsonl").read_text().splitlines()[0])
    assert metrics["reward/turns"] > 0
    assert metrics["tokens/environment"] > 0
    killed = forks.start(
        "train", *KEYS, "hydra.run.dir=apart", cwd=tmp_path, events=[{"at": UPDATE, "call": 2, "do": "kill"}]
    )
    assert killed.wait().code == -9
    done = forks.run("resume", "apart", "cluster.engines=1", cwd=tmp_path)
    assert done.code == 0, done.err
    check_same(tmp_path / "apart", tmp_path / "whole")


REWRITING = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set earlier = message.role == 'assistant' and not loop.last %}
    {%- if earlier %}{%- set content = content.replace('<think>', '') %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""The embedded model's chat template, but for a word that it drops of earlier turns, as Qwen3's drops thinking."""


@pytest.mark.parametrize("algorithm", [("algorithm=grpo",), slow(("algorithm=ppo", "critic.kind=shared"))])
def test_a_policy_learns_in_branches_what_it_sampled_in_them(
    algorithm: tuple[str, ...], forks: Nursery, tiny_path: Path, tmp_path: Path
) -> None:
    model = tmp_path / "rewriting"
    shutil.copytree(tiny_path, model)
    (model / "chat_template.jinja").write_text(REWRITING, encoding="utf-8")
    changed = {"environment.factory": "conversation_tools.Letters", "steps": 1, "eval.every": 0}
    keys = [word for word in KEYS if word.partition("=")[0] not in changed]
    keys += [*(f"{key}={value}" for key, value in changed.items()), f"model.path={model}"]
    keys += [*algorithm, "algorithm.mismatch=token_mask"]
    done = forks.run("train", *keys, "hydra.run.dir=run", cwd=tmp_path)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    branched = [line for line in lines if "branches" in line]
    assert branched, "some had a second turn after having thought"
    for line in branched:
        [branch] = line["branches"]
        assert line["mask"][branch["start"]] == 0
        assert line["mask"][-1] == 1
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert metrics["turns/branches"] == len(branched) / len(lines)
    # The trainer gives each token the log-prob that the engine had for it: in a branch that was read behind another
    # place, they would be nats apart.
    assert metrics["sampler/logprob_gap_max"] < 1e-3
    assert metrics["policy/grad_norm"] > 0
