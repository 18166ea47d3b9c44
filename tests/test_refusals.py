"""Every mistake a user can mend is refused with exit code 2, in a line that helps, before any weight is loaded."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from transformers import AutoModelForCausalLM

from rlft import cli, runfolder
from rlft.config import compose
from rlft.hub import hub_answers
from rlft.plan import make_plan

# What is typed after `rlft`, the key its refusal begins with, and a part of the refusal. The rows run in a folder that
# `workplace` fills: see there for `mine`, `run`, `file` and the .jsonl files.
TABLE = [
    # Verbs
    ("trian +recipe=grpo_arithmetic", "trian", "did you mean rlft train?"),
    ("recipes gsm8k", "recipes", "takes no more words, got gsm8k"),
    # Misspelt groups, choices and keys
    ("train algorithm=grpoo", "algorithm", "got grpoo; did you mean grpo? All: dr_grpo, grpo, gspo"),
    ("train algoritm=grpo", "algoritm", "did you mean algorithm?"),
    ("train generation=vlm", "generation", "did you mean vllm?"),
    ("train data=arithmatic", "data", "did you mean arithmetic?"),
    ("train logger=[console,wand]", "logger", "did you mean wandb?"),
    ("train stepz=10", "stepz", "there is no such key; did you mean steps?"),
    ("train trainer.lrr=1", "trainer.lrr", "did you mean trainer.lr?"),
    ("train traner.lr=1", "traner.lr", "did you mean trainer.lr?"),
    ("train eval.evry=3", "eval.evry", "did you mean eval.every?"),
    ("train algorithm.clip_hihg=3", "algorithm.clip_hihg", "did you mean algorithm.clip_high?"),
    ("train reward.format.wieght=1", "reward.format.wieght", "did you mean reward.format.weight?"),
    ("train hydra.run.dri=x", "hydra.run.dri", "there is no such key"),
    ("train foo=1", "foo", "`rlft train --cfg job` shows every key"),
    ("train +foo=1", "foo", "there is no such key, got 1; known here: name, seed, steps"),
    ("train +trainer.foo=1", "trainer.foo", "known here: lr, schedule"),
    ("train ~seed", "seed", "is missing"),
    ("train ~algorithm", "algorithm", "is missing; choose algorithm=dr_grpo or grpo or gspo"),
    # A key of a choice that wasn't made
    ("train data.path=x", "data.path", "it belongs to data=gsm8k and data=jsonl"),
    ("train data=gsm8k data.pth=x", "data.pth", "did you mean data.path?"),
    ("train reward.math.weight=1", "reward.math.weight", "reward has no math here; put it in: reward=[...,math]"),
    ("train logger.wandb.mode=offline", "logger.wandb.mode", "put it in: logger=[...,wandb]"),
    # Recipes
    ("train recipe=grpo_arithmetic", "recipe", "it takes a plus, got recipe=grpo_arithmetic; write +recipe=grpo"),
    ("train ++recipe=grpo_arithmetic", "recipe", "write +recipe=grpo_arithmetic"),
    ("train -m recipe=grpo_arithmetic", "recipe", "write +recipe=grpo_arithmetic"),
    ("train +recpie=grpo_arithmetic", "recpie", "got grpo_arithmetic; did you mean +recipe=grpo_arithmetic?"),
    ("train +recipe=grpo_arithmetik", "+recipe", "did you mean grpo_arithmetic?"),
    ("train +recipe=", "+recipe", "has no name; choose one of grpo_arithmetic, grpo_gsm8k"),
    ("train +recipe", "command line", "got +recipe; did you mean +recipe=<name>?"),
    ("train recipe grpo_arithmetic", "command line", "did you mean +recipe=grpo_arithmetic?"),
    ("train grpo_arithmetic", "command line", "did you mean +recipe=grpo_arithmetic?"),
    ("train -recipe=grpo_arithmetic", "command line", "got -recipe; keys have no dashes; did you mean +recipe=grpo_ar"),
    ("train --recipe grpo_arithmetic", "command line", "did you mean +recipe=grpo_arithmetic?"),
    ("train --config-dir mine +recipe=no_package", "+recipe", "make `# @package _global_` the first line"),
    ("train --config-dir mine +recipe=bad_yaml", "mine/recipe/bad_yaml.yaml", "line 4 is not YAML"),
    ("train --config-dir mine +recipe=dangling", "seed", "refers to a key that is not there, ${nothing}"),
    # Words that are no overrides, options that don't exist
    ("train steps 10", "command line", "got steps; did you mean steps=10?"),
    ("train --steps 10", "command line", "got --steps; keys have no dashes; did you mean steps=10?"),
    ("train --lr=1e-4", "command line", "did you mean trainer.lr=1e-4?"),
    ("train --group-size 4", "command line", "did you mean group_size=4?"),
    ("train --nonsense", "command line", "there is no such option, got --nonsense"),
    ("train --confg-dir mine", "command line", "did you mean --config-dir?"),
    ("train --config-name other", "command line", "there is no such option"),
    ("train --config-dir nowhere", "--config-dir", "there is no such folder, got nowhere"),
    ("train --config-dir", "--config-dir", "needs a value"),
    ("train --config-dir hiding", "--config-dir", "reward/format.yaml has the name of one of rlft's own"),
    ("train --cfg jobs", "--cfg", "got jobs; use job, hydra or all"),
    ("train --cfg", "--cfg", "needs a value"),
    ("train =5", "command line", "must be words such as key=value, got =5"),
    ("train ''", "command line", "got an empty word"),
    ("train seed=1 seed=2", "seed", "is given twice, got seed=1 and seed=2"),
    ("train seed=1 ++seed=2", "seed", "is given twice"),
    ("train seed=1,2", "seed", "has several values but this is no sweep, got 1,2"),
    ("train reward=exact_match,format", "reward", "or write a list as '[a,b]'"),
    ("train reward=[exact_match, format]", "reward", "its bracket is not closed, got [exact_match,"),
    ("train +algorithm=gspo", "+algorithm", "write algorithm=<choice>"),
    ("train trainer.lr=1e-3,", "trainer.lr", "the value cannot be read, got 1e-3,"),
    ("train 'name=my run; first'", "name", "quote it twice"),
    ("train 'seed=${nothing}'", "seed", "refers to a key that is not there, ${nothing}"),
    ("train hydra.mode=MULTIRUN", "hydra.mode", "sweep with rlft train -m"),
    ("train hydra/launcher=joblib", "hydra/launcher", "is not the user's to set"),
    # Types and bounds
    ("train steps=1e3", "steps", "must be a whole number, got 1000.0; write 1000"),
    ("train steps=10.5", "steps", "must be a whole number, got 10.5; for instance 100 (turns of the loop"),
    ("train steps=abc", "steps", "must be a whole number, got 'abc'"),
    ("train steps=0", "steps", "must be greater than 0, got 0; for instance 100 (turns of the loop"),
    ("train steps=-1", "steps", "must be greater than 0, got -1"),
    ("train seed=-1", "seed", "must be greater than or equal to 0, got -1"),
    ("train seed=null", "seed", "must be a whole number, got null"),
    ("train group_size=", "group_size", "must be a whole number, got ''"),
    ("train group_size=true", "group_size", "must be a whole number, got true"),
    ("train 'group_size=\"8\"'", "group_size", "must be a whole number, got '8'"),
    ("train prompts_per_step=0", "prompts_per_step", "must be greater than 0"),
    ("train epochs=0", "epochs", "must be greater than 0"),
    ("train trainer.lr=0", "trainer.lr", "must be greater than 0, got 0; for instance 1.0e-5 (AdamW's learning rate)"),
    ("train trainer.lr=abc", "trainer.lr", "must be a number, got 'abc'"),
    ("train trainer.lr=nan", "trainer.lr", "got nan"),
    ("train trainer.lr=inf", "trainer.lr", "must be finite, got inf"),
    ("train trainer.schedule=exponential", "trainer.schedule", "choose one of constant, linear, cosine"),
    ("train trainer=3", "trainer", "must be a section of keys, got 3; set one of trainer.lr, "),
    ("train model=gpt2", "model", "set one of model.path, "),
    ("train eval=false", "eval", "must be a section of keys, got false"),
    ("train eval.num_samples=0", "eval.num_samples", "must be greater than 0"),
    ("train eval.temperature=-1", "eval.temperature", "must not be negative"),
    ("train eval.temperature=hot", "eval.temperature", "must be a number, got 'hot'"),
    ("train checkpoint.keep=0", "checkpoint.keep", "must be greater than 0"),
    ("train lora.rank=0", "lora.rank", "must be greater than 0"),
    ("train lora.dropout=1", "lora.dropout", "must be less than 1"),
    ("train prompts.over_limit=droop", "prompts.over_limit", "use drop or refuse"),
    ("train freshness.threshold=often", "freshness.threshold", "use auto or a number"),
    ("train scoring.on_error=go", "scoring.on_error", "use stop or a number"),
    ("train scoring.timeout=0", "scoring.timeout", "must be greater than 0"),
    ("train generation.vllm.gpu_memory_utilization=90", "generation.vllm.gpu_memory_utilization", "equal to 1"),
    ("train algorithm.std=smaple", "algorithm.std", "choose one of"),
    ("train algorithm.kl_coef=-1", "algorithm.kl_coef", "must be greater than or equal to 0"),
    ("train model.revision=3", "model.revision", """quote it twice: "model.revision='3'\""""),
    ("train model.trust_remote_code=1", "model.trust_remote_code", "must be true or false, got 1"),
    ("train name=", "name", "got nothing"),
    ("train name=../mine", "name", "leave out slashes"),
    ("train name=..", "name", "got .."),
    ("train data.difficulty=10", "data.difficulty", "must be 1 to 9 digits"),
    ("train data.operations=[*]", "data.operations", "must be a list of + and -"),
    ("train data.size=100000000", "data.size", "there are not that many distinct train problems"),
    # Rules between keys
    ("train group_size=1", "group_size", "compares siblings and needs at least 2, got 1"),
    ("train minibatches=64", "minibatches", "a step has only prompts_per_step=16 groups, got 64"),
    ("train minibatches=3", "minibatches", "use one of 1, 2, 4, 8, 16"),
    ("train token_budget=10", "token_budget", "set token_budget=512 or more"),
    ("train algorithm.kl_coef=0.1", "snapshot.reference", "algorithm.kl_coef is above 0"),
    ("train algorithm.dual_clip=1", "algorithm.dual_clip", "must lie above the clip range"),
    ("train algorithm.mismatch_low=2", "algorithm.mismatch_low", "must have 1"),
    ("train snapshot.refresh_every=5", "snapshot.refresh_every", "set snapshot.reference=copy"),
    ("train snapshot.old=never", "snapshot.old", "choose one of auto, sampled, recompute"),
    ("train generation.top_p=0.9 algorithm.mismatch=token_mask", "generation.top_p", "undistorted sampling, got 0.9"),
    ("train generation.top_k=5 algorithm.mismatch=token_truncate", "generation.top_k", "undistorted sampling, got 5"),
    ("train generation.top_k=5 snapshot.old=sampled", "generation.top_k", "snapshot.old=sampled compares"),
    ("train generation.temperature=0", "generation.temperature", "needs completions that differ, got 0"),
    ("train generation.temperature=-1", "generation.temperature", "must be greater than or equal to 0"),
    ("train generation.engine=vlm", "generation.engine", "is not an engine, got vlm"),
    ("train generation.max_tokens=300", "generation.max_tokens", "exceeds the model's context of 512 tokens, got 300"),
    ("train prompts.max_tokens=4", "prompts.max_tokens", "4096 of 4096 train prompts are longer"),
    ("train prompts.max_tokens=21 prompts.over_limit=refuse", "prompts.max_tokens", "or set prompts.over_limit=drop"),
    # The machine
    ("train generation=vllm lora.rank=600", "lora.rank", "vLLM takes adapters up to rank 512, got 600"),
    ("train model.dtype=float8", "model.dtype", "is not a known dtype, got float8"),
    ("train model.device=gpu", "model.device", "is not a device, got gpu"),
    ("train model.device=cuda", "model.device", "there is no CUDA device here, got cuda"),
    ("train model.quantization=4bit", "model.quantization", "4-bit weights need a CUDA device"),
    ("train model.quantization=8bit", "model.quantization", "choose one of 4bit, null"),
    ("train model.attn_implementation=flash", "model.attn_implementation", "is not known to transformers"),
    ("train lora.target_modules=[q_proj,k_prj]", "lora.target_modules", "got k_prj; use all-linear, or a list of d"),
    ("train lora.target_modules=qproj", "lora.target_modules", "the model has no linear layer of that name, got qproj"),
    # Packages that are not installed (the last column)
    ("train generation=vllm", "generation.engine", "vLLM is not installed", "vllm"),
    ("train logger=[console,wandb]", "logger.wandb", "pip install 'rlft[wandb]'", "wandb"),
    ("train data=reasoning_gym reward=reasoning_gym", "data", "pip install 'rlft[reasoning-gym]'", "reasoning_gym"),
    # Paths
    ("train model.path=", "model.path", "is empty"),
    ("train model.path=/nowhere", "model.path", "got /nowhere"),
    ("train model.path=./mine", "model.path", "there is no config.json in that folder"),
    ("train model.path=nobody/nothing", "model.path", "the model cannot be read"),
    ("train model.path=embedded:big", "model.path", "use embedded:tiny-arithmetic"),
    ("train lora.path=nowhere", "lora.path", "there is no adapter_config.json in that folder, got nowhere"),
    ("train snapshot.reference=bas", "snapshot.reference", "is neither none, base or copy nor a folder"),
    ("train snapshot.reference=mine", "snapshot.reference", "there is no adapter_config.json in that folder"),
    ("train hydra.run.dir=file/run", "hydra.run.dir", "cannot be written (Not a directory)"),
    ("train hydra.run.dir=", "hydra.run.dir", "is empty"),
    # Data
    ("train data=jsonl", "data.path", "has no value yet; give data.path=<value>"),
    ("train data=jsonl data.path=nowhere.jsonl", "data.path", "there is no such file, got nowhere.jsonl"),
    ("train data=jsonl data.path=mine", "data.path", "is a folder, not a JSONL file"),
    ("train data=jsonl data.path=empty.jsonl", "data.path", "holds no data"),
    ("train data=jsonl data.path=broken.jsonl", "data.path", "broken.jsonl:2: is not JSON"),
    ("train data=jsonl data.path=other.jsonl", "data.path", "other.jsonl:1: there is no field 'prompt', only"),
    ("train data=gsm8k data.path=nowhere.jsonl", "data.path", "there is no such file or folder"),
    # Rewards and other components
    ("train reward=exactmatch", "reward", "did you mean exact_match?"),
    ("train reward=[exact_match,formt]", "reward", "did you mean format?"),
    ("train reward=[]", "reward", "is empty: nothing would be learned"),
    ("train reward.format.weight=abc", "reward.format.weight", "must be a finite number, got 'abc'"),
    ("train reward.format.mode=lax", "reward.format.mode", "got 'lax'; choose one of strict, soft"),
    ("train reward.exact_match=1", "reward.exact_match", "has no _target_, got 1"),
    ("train reward=reasoning_gym", "reward.reasoning_gym", "scores prompts of data=reasoning_gym only"),
    ("train --config-dir mine reward=[exact_match,mine]", "reward.mine._target_", "current folder, in --config-dir"),
    ("train algorithm._target_=no.such.Thing", "algorithm._target_", "No module named 'no'), got no.such.Thing"),
    ("train algorithm._target_=rlft.algorithm.grpo.GPRO", "algorithm._target_", "has no attribute 'GPRO'"),
    ("train logger.console._target_=Console", "logger.console._target_", "must be module.Name"),
    ("train generation.engine=no.such.Engine", "generation.engine", "cannot be imported"),
    # Resuming
    ("train resume=nowhere", "resume", "there is no run in that folder (config.yaml is missing), got nowhere"),
    ("train resume=file", "resume", "there is no run in that folder"),
    ("train resume=run hydra.run.dir=elsewhere", "resume", "take hydra.run.dir out"),
    ("train resume=run trainer.lr=3", "resume", "trainer.lr: 1e-05 -> 3"),
    ("train resume=run data=jsonl data.path=good.jsonl", "resume", "data._target_: rlft.data.arithmetic.Arithmetic ->"),
    ("train hydra.run.dir=run", "hydra.run.dir", "go on with it by `rlft resume run`"),
    ("resume", "resume", "names no run; write rlft resume runs/<name>/<time>"),
    ("resume run=", "resume", "names no run"),
    ("resume nowhere", "resume", "there is no run in that folder"),
    ("resume mine", "resume", "there is no run in that folder"),
    ("resume run seed=3", "resume", "seed: 0 -> 3"),
    ("resume run stepz=3", "stepz", "did you mean steps?"),
    ("resume run steps", "command line", "got steps"),
    ("resume run algorithm=gspo", "resume", "algorithm.ratio: token -> sequence"),
    ("resume changed", "data.path", "data changed since the run began"),
    # Sweeps
    ("train -m seed=1,1", "-m", "jobs 0 and 1 are the same"),
    ("train -m seed=1 seed=2", "seed", "is given twice"),
    ("train -m steps=1,0", "steps", "must be greater than 0 (job 1: steps=0), got 0"),
    ("train -m +recipe=grpo_arithmetic,grpo_x", "+recipe", "(job 1: +recipe=grpo_x)"),
    ("train -m hydra.run.dir=a,b", "hydra.run.dir", "cannot be swept"),
    ("train -m resume=run,other", "resume", "there is no run in that folder"),
    ("train -m resume=run", "resume", "cannot be used in a sweep"),
    ("train -m model.device=cpu,cuda", "model.device", "(job 1: model.device=cuda)"),
    ("train -m generation.max_tokens=100,300", "generation.max_tokens", "context of 512 tokens (job 1: "),
    ("train -m --cfg jobs", "--cfg", "got jobs"),
    # Evaluating
    ("eval", "run", "there is nothing to evaluate; give run=<run>, model.path=<model>"),
    ("eval run=", "run", "is empty"),
    ("eval run=nothing", "run", "there is no run in that folder"),
    ("eval nothing", "run", "there is no run in that folder"),
    ("eval run=mine", "run", "there is no run in that folder"),
    ("eval run=run", "run", "there is no checkpoint in that run yet"),
    ("eval run=run eval.num_sample=2", "eval.num_sample", "did you mean eval.num_samples?"),
    ("eval run=run data=gsm8kk", "data", "did you mean gsm8k?"),
    ("eval -m run=run", "command line", "this verb has no such option, got -m"),
    ("eval model.path=/nowhere", "model.path", "got /nowhere"),
]  # fmt: skip

Plant = Callable[[str], None]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the rows find where they run: files, YAML of a user's own, and two runs that were begun."""
    folder = tmp_path_factory.mktemp("templates")
    row = {"prompt": "What is 1 + 1?", "answer": "2"}
    rows = [json.dumps({**row, "prompt": f"What is {i} + 1?"}) for i in range(40)]
    texts = {
        "file": "not a folder",
        "good.jsonl": "\n".join(rows),
        "empty.jsonl": "\n",
        "broken.jsonl": f"{rows[0]}\n{{oops",
        "other.jsonl": json.dumps({"question": "1 + 1?", "answer": "2"}),
        "mine/reward/mine.yaml": "# Not there.\nmine:\n  _target_: not_there.reward\n  weight: 1.0\n",
        "mine/recipe/no_package.yaml": "# Forgot the package.\nseed: 1\n",
        "mine/recipe/bad_yaml.yaml": "# @package _global_\n# Unfinished.\nseed: [1\n",
        "mine/recipe/dangling.yaml": "# @package _global_\n# Refers to nothing.\nseed: ${nothing}\n",
        "hiding/reward/format.yaml": "# Would never be read.\nformat:\n  weight: 3.0\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, overrides in {"run": [], "changed": ["data=jsonl", f"data.path={folder}/good.jsonl"]}.items():
        plain = compose(overrides)
        (folder / name).mkdir()
        runfolder.start(folder / name, plain, make_plan(plain).fingerprints)
    (folder / "good.jsonl").write_text("\n".join(rows[1:]))
    return folder


@pytest.fixture
def workplace(templates: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, without network, accelerator or weights; what a command does to the process is undone."""
    monkeypatch.chdir(templates)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def load(*args: object, **keys: object) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    hub_answers.cache_clear()
    return templates


def row_name(row: tuple[str, ...]) -> str:
    return row[0] + "".join(f" without {package}" for package in row[3:])


@pytest.mark.parametrize("row", TABLE, ids=row_name)
def test_a_mistake_is_refused_in_a_line_that_helps(
    row: tuple[str, ...], workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, key, fragment, *absent = row
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in absent else find_spec(name, *a))
    before = sorted(workplace.rglob("*"))

    code = cli.run(shlex.split(typed))

    told = capsys.readouterr()
    line = told.err.replace(f"{workplace}/", "")
    assert code == 2, told.err
    assert line.startswith(f"rlft: {key}: ")
    assert fragment in line
    assert re.fullmatch(r"rlft: [^:]+: .+; \S.+\n", line), "it says what is wrong and what to do, in one line"
    assert told.out == ""
    assert sorted(workplace.rglob("*")) == before, "nothing is left behind"
    assert not GlobalHydra.instance().is_initialized()
