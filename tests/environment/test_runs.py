"""Whole runs of conversations and of agents from outside: killed, resumed and sampled by engines of their own, they are
one run, whatever the agents look at."""

import shutil

import pytest
from audited_runs import lines_of
from run_folders import check_same
from slow_cases import slow

COMMON = (
    "+recipe=grpo_arithmetic", "generation=transformers", "model.device=cpu", "lora.rank=2", "data.size=64",
    "data.held_out_size=8", "eval.num_prompts=2", "eval.num_samples=1", "scoring.workers=0", "console=null",
    "reward=[exact_match]", "checkpoint.keep=99", "hydra.run.dir=run",
)  # fmt: skip
GAME = (
    *COMMON, "steps=3", "prompts_per_step=2", "group_size=3", "generation.max_tokens=40", "environment=game",
    "environment.factory=conversation_tools.Guessing", "environment.workers=1", "environment.turn_tokens=16",
    "checkpoint.every=1", "eval.every=3",
)  # fmt: skip
AGENT = (
    *COMMON, "steps=4", "prompts_per_step=4", "group_size=2", "generation.max_tokens=24", "environment=endpoint",
    "environment.agent=endpoint_agents.by_the_clock", "environment.workers=2", "checkpoint.every=2",
)  # fmt: skip


def kill(update):
    return [{"at": "rlft.trainer.optimizer:Optimizer.update", "call": update, "do": "kill"}]


@pytest.mark.slow
def test_a_run_of_conversations_is_the_same_killed_and_resumed_with_an_engine_apart(forks, tmp_path):
    forks.run("train", *GAME, cwd=tmp_path, ends=0)
    whole = (tmp_path / "run").rename(tmp_path / "whole")
    lines = lines_of(whole / "rollouts/step_000001.jsonl")
    assert any(len(line["turns"]) == 2 and 0 in line["mask"] for line in lines), "some conversations have two turns"
    metrics = lines_of(whole / "metrics.jsonl")[0]
    assert metrics["reward/turns"] > 0
    assert metrics["tokens/environment"] > 0
    forks.run("train", *GAME, cwd=tmp_path, events=kill(2), ends=-9)
    forks.run("resume", "run", "cluster.engines=1", cwd=tmp_path, ends=0)
    check_same(tmp_path / "run", whole)


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
def test_a_policy_learns_in_branches_what_it_sampled_in_them(algorithm, forks, tiny_path, tmp_path):
    model = tmp_path / "rewriting"
    shutil.copytree(tiny_path, model)
    (model / "chat_template.jinja").write_text(REWRITING, encoding="utf-8")
    changed = {"environment.factory": "conversation_tools.Letters", "steps": 1, "eval.every": 0}
    keys = [word for word in GAME if word.partition("=")[0] not in changed]
    keys += [*(f"{key}={value}" for key, value in changed.items()), f"model.path={model}"]
    forks.run("train", *keys, *algorithm, "algorithm.mismatch=token_mask", cwd=tmp_path, ends=0)
    lines = lines_of(tmp_path / "run/rollouts/step_000001.jsonl")
    branched = [line for line in lines if "branches" in line]
    assert branched, "some had a second turn after having thought"
    for line in branched:
        [branch] = line["branches"]
        assert line["mask"][branch["start"]] == 0
        assert line["mask"][-1] == 1
    [metrics] = lines_of(tmp_path / "run/metrics.jsonl")
    assert metrics["turns/branches"] == len(branched) / len(lines)
    # The trainer gives each token the log-prob that the engine had for it: in a branch that was read behind another
    # place, they would be nats apart.
    assert metrics["sampler/logprob_gap_max"] < 1e-3
    assert metrics["policy/grad_norm"] > 0


# -- agents ------------------------------------------------------------------------------------------------------------
def check_repeated(forks, tmp_path):
    """A run of four steps, killed in the update of the last, ends as it would have; and so without its checkpoint."""
    run, again = tmp_path / "run", tmp_path / "again"
    third = (run / "rollouts/step_000003.jsonl").read_bytes()
    forks.run("resume", "run", cwd=tmp_path, ends=0)
    assert (run / "rollouts/step_000003.jsonl").read_bytes() == third
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints/step_000004")
    forks.run("resume", "again", cwd=tmp_path, ends=0)
    check_same(again, run)


@pytest.mark.slow
def test_a_run_with_an_agent_by_the_clock_is_the_same_killed_and_resumed(forks, tmp_path):
    """The last checkpoint is of two steps: the two behind it are repeated as they were."""
    forks.run("train", *AGENT, "eval.every=2", cwd=tmp_path, events=kill(4), ends=-9)
    run, again = tmp_path / "run", tmp_path / "again"
    lines, third = lines_of(run / "metrics.jsonl"), run / "rollouts/step_000003.jsonl"
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0 < line["reward/turns"] < 1 for line in lines)
    silent = [line for line in lines_of(third) if not any(line.get("mask", [1]))]
    assert 0 < len(silent) < 8  # of prompts for which the agent asks nothing: nothing of them is trained
    assert len(list((run / "traces").iterdir())) == 6  # of four steps and the evaluations before and behind two
    check_repeated(forks, tmp_path)
    traces = sorted((run / "traces").iterdir())
    forks.run("eval", "run=run", "eval.num_prompts=3", "eval.num_samples=1", cwd=tmp_path, ends=0)
    assert sorted((run / "traces").iterdir()) == traces  # an evaluation by itself is not the run's
    shutil.rmtree(again / "checkpoints/step_000004")
    shutil.rmtree(again / "traces")  # without them it is another run
    forks.run("resume", "again", cwd=tmp_path, ends=0)
    assert (again / "rollouts/step_000003.jsonl").read_bytes() != third.read_bytes()


@pytest.mark.slow
def test_an_overlapped_run_with_an_agent_by_the_clock_is_the_same_killed_and_resumed(forks, tmp_path):
    """Killed while the last checkpoint is of two steps and a third is sampled."""
    overlapped = ("overlap.lag=1", "algorithm.mismatch=token_truncate", "eval.every=0")
    forks.run("train", *AGENT, *overlapped, cwd=tmp_path, events=kill(4), ends=-9)
    traces = {file.name: file.read_bytes() for file in (tmp_path / "run/traces").iterdir()}
    assert sorted(name[:14] for name in traces) == [f"version_{version:06d}" for version in (0, 0, 1, 2)]
    check_repeated(forks, tmp_path)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run/traces").iterdir()} == traces
