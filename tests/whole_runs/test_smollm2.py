"""A real pretrained model, made from a Python package: what a user does with one, small enough for minutes."""

import io
import json
import os
import re
import signal
from pathlib import Path

import httpx2
import make_smollm2
import pytest
import safetensors.torch
import torch
from ran_commands import here
from run_folders import metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlft import cli
from tests.commands.test_serve import addressed

__all__ = ["here"]
SUMS = (
    "train", "+recipe=grpo_smollm2_sums", "generation.max_tokens=6",
    "prompts_per_step=2", "group_size=4", "eval.every=0", "data.size=16", "data.held_out_size=4", "scoring.workers=0",
    "lora.rank=2", "console=null", "checkpoint.every=1", "reward=[exact_match,length]", "reward.length.mode=target",
    "reward.length.target=3", "freshness.threshold=1e-3",
)  # fmt: skip
HERE = "generation=transformers", "steps=1", "prompts.max_tokens=64"
ENGINES = {"transformers": ("generation=transformers",), "vllm": ("generation=vllm", "generation.vllm.max_num_seqs=16")}
LARGEST_GAP = {"transformers": 1e-4, "vllm": 1e-3}
"""Nats between an engine's log-probs and the trainer's, both in float32."""
LEARNS = ("lora.rank=2", "console=null", "steps=1", "checkpoint.every=1")
QUESTIONS = ("7 + 5", "12 + 30", "9 - 4", "20 + 22")
TOOL = '''
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b
'''


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    make_smollm2.make(folder)
    return folder


def run(smollm2, folder, *words):
    """The metrics of a run of this model that is in this folder and ends well."""
    assert cli.run([*words, f"model.path={smollm2}", f"hydra.run.dir={folder}"]) == 0
    return metrics(Path(folder))


def test_a_real_model_is_made_answers_and_is_trained_by_the_recipe(smollm2, here):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    model = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    assert model.dtype == torch.float32
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."

    (line,) = run(smollm2, "run", *SUMS, *HERE)
    assert line["sampler/logprob_gap_max"] < 1e-4  # nats; both compute in float32
    assert line["policy/grad_norm"] > 0
    policy = safetensors.torch.load_file("run/checkpoints/step_000001/policy/adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in policy.items() if "lora_B" in name)


@pytest.mark.slow
def test_two_conversions_of_a_real_model_give_the_same_weights(smollm2):
    read = AutoModelForCausalLM.from_pretrained(make_smollm2.find_package(), gguf_file=make_smollm2.FILE)
    made = AutoModelForCausalLM.from_pretrained(smollm2).state_dict()
    assert made.keys() == read.state_dict().keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in read.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "critic"), [("vllm", False), ("vllm", True), ("transformers", True)])
def test_a_real_model_trains_and_is_the_model_that_the_engine_samples_from(smollm2, here, engine, critic):
    words = ("algorithm=ppo", "critic.kind=adapter") if critic else ("trainer.lr=1e-3",)
    lines = run(smollm2, "run", *SUMS, *ENGINES[engine], "steps=2", *words)
    assert [line["step"] for line in lines] == [1, 2]
    assert max(line["sampler/logprob_gap_max"] for line in lines) < LARGEST_GAP[engine]
    assert not critic or lines[0]["loss/value"] > 0


@pytest.mark.slow
def test_a_real_model_learns_from_demonstrations_and_from_pairs(smollm2, here):
    answers = {question: str(eval(question)) for question in QUESTIONS}  # of this file
    rows = [{"prompt": f"What is {question}?", "completion": answer} for question, answer in answers.items()]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "I do not know"} for row in rows]
    for name, content in {"rows": rows, "pairs": pairs}.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    held_out = "held_out_fraction=0.25"
    words = ("demonstrations.path=rows.jsonl", f"demonstrations.{held_out}", "examples_per_step=2")
    (taught,) = run(smollm2, "sft", "sft", *LEARNS, *words)
    assert 0 < taught["loss/total"] < 10
    for command in ("rm", "dpo"):
        words = ("preferences.path=pairs.jsonl", f"preferences.{held_out}", "rankings_per_step=2")
        (line,) = run(smollm2, command, command, *LEARNS, *words)
        assert line["loss/total"] == pytest.approx(0.693, abs=0.01), "no opinion yet: log 2"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_real_model_calls_tools_is_exported_and_answers(smollm2, here, monkeypatch, capsys, engine):
    Path("tools_of_mine.py").write_text(TOOL)
    monkeypatch.syspath_prepend(str(here))
    words = ("environment=tools", "environment.tools=[tools_of_mine.add]", "environment.syntax=json")
    (line,) = run(smollm2, "run", *SUMS, *words, *ENGINES[engine], "steps=1", "prompts.max_tokens=512")
    assert line["sampler/logprob_gap_max"] < LARGEST_GAP[engine]
    assert cli.run(["eval", "run=run", "eval.num_prompts=2", "eval.num_samples=1"]) == 0
    assert cli.run(["export", "run=run", "out=merged"]) == 0
    merged = safetensors.torch.load_file(Path("merged") / "model.safetensors")
    base = safetensors.torch.load_file(smollm2 / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert merged[name].shape == base[name].shape
    assert not torch.equal(merged[name], base[name])
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n"))
    words = (f"model.path={smollm2}", "generation.temperature=0.01", "generation.max_tokens=8", *ENGINES[engine])
    assert cli.run(["chat", *words]) == 0
    assert re.search(r"The capital of France is Paris\.", capsys.readouterr().out)


@pytest.mark.slow
def test_a_real_model_learns_equations_and_is_then_rewarded_for_their_results(smollm2, here):
    """docs/tutorials/start.md's two commands for word problems, on problems made in SVAMP's form."""
    problems = [
        {"ID": f"own-{a}", "Body": f"Ada had {a} apples and ate 2", "Question": "How many are left?",
         "Equation": f"( {a}.0 - 2.0 )", "Answer": float(a - 2), "Type": "Subtraction"}
        for a in range(3, 23)
    ]  # fmt: skip
    Path("data").mkdir()
    Path("data/SVAMP.json").write_text(json.dumps(problems))
    words = ("scoring.workers=0", "console=null", "eval.num_prompts=4", "eval.every=100")
    long = ("steps=15", "examples_per_step=4", "trainer.warmup=0")
    taught = run(smollm2, "taught", "sft", "+recipe=sft_smollm2_svamp", *long, *words)
    assert taught[-1]["loss/total"] < taught[0]["loss/total"] / 4
    short = ("steps=2", "prompts_per_step=2", "group_size=4", "lora.path=taught", "generation=transformers")
    lines = run(smollm2, "rewarded", "train", "+recipe=grpo_smollm2_svamp", *short, *words)
    assert [line["step"] for line in lines] == [1, 2]
    rollouts = Path("rewarded/rollouts/step_000001.jsonl").read_text().splitlines()
    texts = [json.loads(line)["completion"] for line in rollouts]
    equations = [text for text in texts if re.fullmatch(r"\( \d+\.\d \S \d+\.\d \) = -?\d+", text)]
    assert len(equations) > len(texts) / 2, texts


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_real_model_is_served(smollm2, here, forks, engine):
    words = (f"model.path={smollm2}", "serve.port=0", "generation.max_tokens=8", *ENGINES[engine])
    server = forks.start("serve", *words, cwd=here)
    url, key = addressed(server, seconds=300)
    wish = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    headers = {"authorization": f"Bearer {key}"}
    reply = httpx2.post(f"{url}/chat/completions", json=wish, headers=headers, timeout=300).json()
    assert reply["choices"][0]["message"]["content"] == "The capital of France is Paris."
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait().code == 130
