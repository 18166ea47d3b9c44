"""Whole runs with vLLM on a GPU: steps of the embedded model, a kill and a resume, and `rlft doctor`."""

import json
import math

import pytest
from run_folders import metrics
from run_processes import happens, marked, start_fresh

END_S = 15.0
SMALL = (
    "+recipe=grpo_arithmetic", "model.device=cuda", "generation=vllm", "generation.vllm.max_num_seqs=16",
    "generation.vllm.enforce_eager=true", "generation.vllm.gpu_memory_utilization=0.2", "prompts_per_step=4",
    "group_size=4", "generation.max_tokens=24", "lora.rank=4", "data.size=64", "data.held_out_size=8", "eval.every=0",
    "checkpoint.every=1", "scoring.workers=1", "console=null",
)  # fmt: skip


def test_steps_with_vllm_have_finite_numbers_and_a_small_gap(tmp_path):
    run = start_fresh("train", *SMALL, "steps=3", "hydra.run.dir=run", cwd=tmp_path)
    assert run.wait().code == 0, run.wait().err
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert max(line["sampler/logprob_gap_mean"] for line in lines) < 0.05
    assert happens(lambda: not marked(run.mark), within_s=END_S)


def test_a_run_that_is_killed_leaves_no_process_and_goes_on_with_its_next_step(tmp_path):
    kill = {"at": "rlft.generation.vllm.generator:VLLMGenerator.sample", "call": 2, "do": "kill", "when": "after"}
    killed = start_fresh("train", *SMALL, "steps=3", "hydra.run.dir=run", cwd=tmp_path, events=(kill,))
    assert killed.wait().code == -9, killed.wait().err
    assert happens(lambda: not marked(killed.mark), within_s=END_S)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
    resumed = start_fresh("resume", "run", cwd=tmp_path)
    assert resumed.wait().code == 0, resumed.wait().err
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    for step in (1, 2, 3):
        rollouts = (tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        assert [json.loads(line)["policy_version"] for line in rollouts] == [step - 1] * 16
    assert happens(lambda: not marked(resumed.mark), within_s=END_S)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_the_doctor_finds_nothing_wrong(engine, tmp_path):
    """With `transformers` the trainer's own base decodes, by flash attention with each prompt's keys once."""
    variables = {"HF_HUB_OFFLINE": "1"}
    asked = start_fresh(
        "doctor", "--json", "model.device=cuda", f"generation={engine}", cwd=tmp_path, variables=variables
    )
    done = asked.wait()
    wrong = [row for row in json.loads(done.out)["rows"] if row["status"] == "wrong"] if done.out else done.err
    assert (done.code, wrong) == (0, [])
    assert happens(lambda: not marked(asked.mark), within_s=END_S)
