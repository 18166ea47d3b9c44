"""Every mistake a user can fix is refused with exit code 2, in a line that helps, before any weight is loaded."""

import contextlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    T5Config,
)

from rlft import cli
from rlft.config.compose import compose
from rlft.config.resolved import build, resolve
from rlft.data.records import sampled_line
from rlft.model import adapter_folder
from rlft.model.backbone import fingerprint
from rlft.model.roles import Roles
from rlft.runs import checkpoint, run_folder
from rlft.runs.checkpoint import Checkpoint
from rlft.system.hub import hub_answers
from rlft.system.terminal import pip_install
from rlft.types import Completion, FinishReason, Prompt, Rollout

# What rows have in common.
CHOOSES = "train -m sweep=optuna 'trainer.lr=interval(1e-5,1e-3)'"
CHOOSES_K = (
    "train -m sweep=optuna algorithm=opd snapshot.teacher=base snapshot.teacher_hint=x algorithm.teacher_in=loss "
    "algorithm.top_k=16,9999"
)
PPO = "train algorithm=ppo critic.kind=adapter"
PPO_SHARED = "train algorithm=ppo critic.kind=shared"
PTX = "train algorithm=ppo_ptx critic.kind=adapter"
AS_IT_IS = "train algorithm=opd snapshot.teacher=base"
OPD = f"{AS_IT_IS} snapshot.teacher_hint=x data.size=64"
LARGER, IN_VLLM = "train algorithm=opd snapshot.teacher=embedded:tiny-chains", "snapshot.teacher_engine=vllm"
SMALL = "lora.rank=4 lora.alpha=8"
TEXT = "pretrain.path=embedded:arithmetic-text"
HTTP = "train reward=http"
LEARNED = "reward=[exact_match,learned]"
SFT = "sft demonstrations.path=embedded:arithmetic-demonstrations max_completion_tokens=64"
RM = "rm preferences.path=embedded:arithmetic-preferences max_completion_tokens=64"
ALL = "train lora=null"
DPO = "dpo preferences.path=embedded:arithmetic-preferences max_completion_tokens=64"
TWO_LEARNED = "+reward.second='${reward.learned}'"
REFRESH = "reward_model.refresh_every=10 reward_model.labels=exact_match"
FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
MAGNITUDE = "base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector"
DEEPER = "base_model.model.model.layers.99.mlp.down_proj.lora_A.weight"
OWN = "conversation_tools"
SERVE = "serve model.path=embedded:tiny-arithmetic"
TRY = "reward try +recipe=grpo_arithmetic"
AGENTS = "endpoint_agents"
TOOLS, AGENT = "train environment=tools environment.syntax=json", "train environment=endpoint"
GAME = "train environment=game environment.factory"
ALONE = "train algorithm=reinforce algorithm.baseline=none group_size=1"
EXACT = "train algorithm.kl_coef=0.1 snapshot.reference=base algorithm.kl_estimator=exact"
CARD = "model.device=cuda device_memory=24GiB"
ADAPTERS, COPY = (f"generation=vllm generation.vllm.weights={kind}" for kind in ("adapter", "copy"))
SCRIPTED = "generation=scripted generation.scripted.answers='{*: [yes]}'"
REPLAY, ATTENDS = "replay.path", "train model.attn_implementation"

# What is typed after `rlft`, the key its refusal begins with, where that is not the key of the last word, and a part of
# the refusal. The rows run in a folder that `templates` filled: see there for `mine`, `run`, `file`, the .jsonl files
# and the adapters. These are refused before a library is imported:
TABLE = [
    # Commands
    ("stf +recipe=sft_arithmetic", "stf", "did you mean rlft sft?"),
    ("train +recipe=sft_arithmetic", "is for rlft sft, got sft_arithmetic; write rlft sft +recipe=sft_ari"),
    ("rm +recipe=rm_arithmetik", "did you mean rm_arithmetic?"),
    ("sft group_size=4", "is a key of rlft train, and not of this command, got 4; leave it out here"),
    ("sft algorithm=grpo", "is a key of rlft train"),
    ("sample critic.kind=adapter", "is a key of rlft train"),
    ("sft demonstration.path=x", "did you mean demonstrations"),
    ("sft demonstrations=jsnl", "did you mean jsonl?"),
    (f"{SFT} command=train", "this is rlft sft, got train; leave it as it is"),
    ("recipes gsm9k_x", "recipes", "no recipe has that in its name or text, got gsm9k_x; "),
    ("recipes grpo_gsm9k", "recipes", "did you mean grpo_gsm8k?"),
    ("recipes a b", "recipes", "takes one pattern, got a b"),
    ("keys trainer.lrr", "keys", "no key has that in its name or meaning, got trainer.lrr; did you mean trainer.lr?"),
    ("keys a b", "keys", "takes one pattern, got a b"),
    # Commands that train nothing
    ("algorithms grpoo", "algorithms", "no such algorithm, got grpoo; did you mean grpo? All: a2c, cispo, "),
    ("algorithms GSPO", "algorithms", "did you mean gspo?"),
    ("algorithms zzz", "algorithms", "got zzz; choose one of a2c, "),
    ("algorithms grpo ppo", "algorithms", "takes one name, got grpo ppo; write rlft algorithms grpo"),
    ("algorithms +recipe=grpo_arithmetic", "recipe", "not a key of rlft algorithms, got +recipe=grpo_arithmetic;"),
    ("algorithms grpo steps=3", "is not a key of rlft algorithms, got steps=3"),
    ("algorithms algorithm=gspo", "named without its group here, got gspo; write rlft algorithms gspo"),
    ("algorithms algorithm.kl_coef=1", "none is named, got algorithm.kl_coef=1; write rlft alg"),
    ("algorithms grpo algorithm.kl_coff=1", "no such key, got 1; did you mean algorithm.kl_coef?"),
    ("algorithms grpo algorithm.kl_coef=-1", "must be greater than or equal to 0, got -1"),
    ("algorithms grpo -m", "command line", "this command has no such option"),
    ("algorithms grpo --jsn", "command line", "there is no such option, got --jsn"),
    ("algorithms --config-dir nowhere", "--config-dir", "there is no such folder, got nowhere"),
    ("audit", "takes one run; write rlft audit <run>"),
    ("audit a b", "audit", "takes one run, got a b; write rlft audit <run>"),
    ("audit nowhere", "run", "there is no such folder, got nowhere; rlft runs lists all runs"),
    ("audit mine", "run", "has no chain.jsonl that can be read (No such file or directory)"),
    ("audit nowhere replay=x", "must be a number of steps, got x; try replay=1"),
    ("audit nowhere recompute=", "must be a number of steps; try recompute=16"),
    ("diff run run at=first", "is not one of its choices, got first; choose one of common, last"),
    ("diff", "diff", "compares two runs, got "),
    ("diff one", "diff", "compares two runs, got "),
    ("diff one two three", "diff", "compares two runs, got "),
    ("doctor lora.rank=0", "must be greater than 0, got 0; "),
    ("doctor +recipe=sft_arithmetic", "for rlft sft, and a run of rlft train is tried, got sft_ari"),
    ("report nowhere", "report", "there is no such folder, got nowhere"),
    ("report x to=y.html", "is not a key of rlft report, got y.html; use out="),
    ("report run --json", "command line", "there is no such option, got --json; use --help"),
    ("reward", "reward", "needs a word for what to do; write rlft reward try"),
    ("reward +recipe=grpo_arithmetic", "reward", "needs a word for what to do; write rlft reward try"),
    ("reward tri", "tri", "there is no such command; did you mean rlft reward try?"),
    ("reward score", "score", "there is no such command; use rlft reward try"),
    (f"{TRY} row=4", "there is no such key, got 4; did you mean rows?"),
    (f"{TRY} rows=0", "must be a number of rows of the data, at least 1, got 0; try rows=4"),
    (f"{TRY} rows=all", "must be a number of rows of the data, at least 1, got all; try rows=4"),
    ("reward try +recipe=sft_arithmetic", "is for rlft sft, and a run of rlft train is tried"),
    (f"{TRY} reward=[learned] reward.learned.path=mine", "reward", "be tried without weights, got ['learned']; "),
    (f"{TRY} environment=calculator", "holds conversations, and single completions are tried here"),
    (f"{TRY} reward.exact_match.numerc=true", ""),
    (f"{TRY} reward=[exact_match] reward.exact_match.weight=high", ""),
    ("runs nowhere", "runs", "there is no such folder, got nowhere; "),
    ("runs . status=asleep", "is not one of its choices, got asleep; choose one of running, finished"),
    ("runs . command=traine", "is not one of its choices, got traine; did you mean train? All: dpo, rm"),
    ("runs . sort=luck", "is not one of its choices, got luck; choose one of age"),
    ("runs stat=killed", "is not a key of rlft runs, got killed; use status="),
    (f"runs {'x' * 300}=1", "is not a key of rlft runs, got 1; use status="),
    ("runs --all", "command line", "there is no such option, got --all; use --json or --help"),
    (f"{SERVE} serve.port=70000", "less than or equal to 65535"),
    (f"{SERVE} serve.prot=1", "there is no such key"),
    (f"{SERVE} port=1", "no such key, got 1; did you mean serve.port?"),
    (f"{SERVE} environment.port=1", "is not read by rlft serve, wh"),
    (f"{SERVE} +environment=tools", "environment", "is not read by rlft serve"),
    (f"{SERVE} serve.token=short", "cannot stand in a header, got ***"),
    (f"{SERVE} serve.requests=0", "must be greater than 0"),
    (f"{SERVE} serve.syntax=yaml", ""),
    ("serve serve.port=0", "run", "is missing: there is no model to serve"),
    ("serve run=mine", ""),
    ("watch a b", "watch", "takes one run, got a b; write rlft watch runs/<name>/<time>"),
    ("report", "there is no run below "),
    ("watch nowhere", "watch", "there is no such folder, got nowhere"),
    ("watch nowhere --json", "command line", "there is no such option, got --json; use --help"),
    ("watch", "watch", "train one first (rlft train +recipe=grpo_arithmetic), or name a run"),
    ("watch a=b", "is not a key of rlft watch, got b; use price="),
    ("watch nowhere price=cheap", "must be an amount per hour, got cheap; write it as 2.5/h or 2.5EUR/h"),
    # Environments
    ("train environment=none", "got none; write environment=null for none"),
    ("train environment=tools", "environment.tools", "has no value yet; give environment.tools=<value> (importable f"),
    ("train environment=tools environment.tools=[]", "is empty, so there is nothing to call"),
    ("train environment=tools environment.tools=[nothere.x]", "cannot be imported (ModuleNot"),
    (f"train environment=tools environment.tools=[{OWN}.add,{OWN}.add]", "two tools are called"),
    (f"train environment=class environment.factory={OWN}.NoReset",
     "is a class without reset, got conversation_tools.NoReset; give it a method reset(self, **row)"),
    (f"train environment=class environment.factory={OWN}.NeedsArguments",
     "needs the arguments sides, and it is made without any"),
    (f"train environment=game environment.factory={OWN}.Counter", "is a class without step"),
    ("train environment=calculator environment.turn_tokens=300",
     "is more than all turns have together (generation.max_tokens=256), got 300; set it to 256 or less"),
    ("train environment=calculator environment.timeout=3",
     "is less than a single call may take (environment.call_timeout=10), got 3; raise it to 10 or more"),
    ("train environment=calculator prompts.style=raw", "has no turns"),
    ("train environment=calculator environment.timeout=9999 cluster.engines=1", "environment.timeout",
     "is taken for dead, got 9999; lower it, or raise cluster.timeout above 9999"),
    ("train environment=calculator environment.syntax=yaml", "got 'yaml'"),
    ("train environment=calculator environment.wrokers=1", "did you mean environment.workers?"),
    ("train environment.workers=1", "the environment chosen here has no such key, got 1;"),
    ("train environment=endpoint", "environment.agent", "is missing; give environment.agent=mine.play, a function, or"),
    (f"{AGENT} environment.command=[sh] environment.agent={AGENTS}.once", "stands next to environment.command"),
    (f"train environment=endpoint environment.agent={AGENTS}.no_key", "has no parameter api_key"),
    (f"train environment=endpoint environment.agent={AGENTS}.ADD", "is not callable, got"),
    ("train environment=endpoint environment.command=[]", "is empty, got []; give a program"),
    ("train environment=endpoint environment.command=[no-such-program]",
     "there is no such program, got no-such-program; name an executable of PATH, or its path"),
    (f"{AGENT} environment.agent={AGENTS}.once cluster.engines=1",
     "agents of environment=endpoint speak to the engine of the run's own process, got 1; set it to 0"),
    (f"train environment=endpoint environment.agent={AGENTS}.once environment.port=70000", "less than or"),
    ("train environment=mcp environment.command=[]", "environment.command=[python,server.py]"),
    ("train environment=mcp environment.command=[no-such-program]", "there is no such program, got no-such-program; "),
    ("train environment=mcp environment.command=[sh] +environment.env.PORT=5", "environment.env",
     "must be a string, got {'PORT': 5}"),
    # Misspelt groups, choices and keys
    ("train algorithm=grpoo", "got grpoo; did you mean grpo? All: a2c, cispo, dapo, dr_grpo, gdpo, gmpo, grpo"),
    ("train algorithm=GRPO", "got GRPO; did you mean grpo? All: a2c"),
    ("train logger=none", "got none; write logger=null for none"),
    ("train data=foo.jsonl", "not as a file, got foo.jsonl; write data=jsonl data.path=foo.jsonl"),
    ("sft demonstrations=mine/foo.jsonl", "write demonstrations=jsonl demonstrations.path=mine"),
    ("train generation.n=4", "there is no such key, got 4; did you mean group_size?"),
    ("train algoritm=grpo", "did you mean algorithm?"),
    ("train logger=wand", "did you mean wandb?"),
    ("resume run logger=jsonl", "is not one of its choices, got jsonl; choose one of mlflow, "),
    ("train logger.console.live=false", "got false; did you mean console.live?"),
    ("train console=false", "must be a section of keys, got false; write console=null for none"),
    ("train --config-dir mine +recipe=with_console", "logger", "is not one of its choices, got jsonl; choose one of"),
    ("train --config-dir mine +recipe=with_keys", "logger.console", "has no _target_"),
    ("train stepz=10", "there is no such key, got 10; did you mean steps?"),
    ("train trainer.lrr=1", "did you mean trainer.lr?"),
    ("train reward.format.wieght=1", "did you mean reward.format.weight?"),
    ("train foo=1", "`rlft train --cfg job` shows every key"),
    ("train +foo=1", "foo", "there is no such key, got 1; known here: command, name, seed"),
    ("train +trainer.foo=1", "trainer.foo", "known here: optimizer, lr"),
    ("train ~seed", "seed", "is missing"),
    ("train ~algorithm", "algorithm", "is missing; choose algorithm=a2c or cispo or dapo or dr_grpo or "),
    # A key of a choice that wasn't made
    ("train data.path=x", "it belongs to data=gsm8k and data=hub and data=jsonl"),
    ("train reward.math.weight=1", "reward has no math here, got 1; add it: 'reward=[...,math]'"),
    ("train logger.wandb.mode=offline", "add it: logger=wandb"),
    # Values of groups that are no names (all groups: tests/test_group_values.py)
    ("train reward=1", "must be a name or a list of names, got 1; choose one of calls, choice, "),
    ("train reward=[exact_match,1]", "must be a name or a list of names, got [exact_match,1]"),
    ("train reward=null", "is empty: nothing would be learned"),
    ("train algorithm=null", "something must be chosen, got null; choose one of a2c, "),
    ("train -m algorithm=grpo,1", "must be a name (job 1: algorithm=1), got 1"),
    ("train --cfg job reward=1", "must be a name or a list of names, got 1"),
    ("resume run data=null", "something must be chosen, got null"),
    # Recipes
    ("train +recipe=[grpo_arithmetic,ppo_arithmetic]",
     "takes one name, got [grpo_arithmetic,ppo_arithmetic]; write +recipe=grpo_arithmetic, or for a run of each"),
    ("train algorithm=[grpo,ppo]", "takes one name, got [grpo,ppo]; write algorithm=grpo, or for a run"),
    ("resume run generation=[auto,vllm]", "takes one name, got [auto,vllm]"),
    ("train recipe=grpo_arithmetic", "it takes a plus, got recipe=grpo_arithmetic; write +recipe=grpo"),
    ("train +recpie=grpo_arithmetic", "recpie", "got grpo_arithmetic; did you mean +recipe=grpo_arithmetic?"),
    ("train +recipe=", "has no name; choose one of a2c_arithmetic, cispo_arithmetic, "),
    ("train +recipe", "command line", "got +recipe; did you mean +recipe=<name>?"),
    ("train recipe grpo_arithmetic", "command line", "did you mean +recipe=grpo_arithmetic?"),
    ("train grpo_arithmetic", "command line", "did you mean +recipe=grpo_arithmetic?"),
    ("train -recipe=grpo_arithmetic", "command line", "got -recipe; keys have no dashes; did you mean +recipe=grpo_ar"),
    ("train --config-dir mine +recipe=no_package", "make `# @package _global_` the first line"),
    ("train --config-dir mine +recipe=bad_yaml", "mine/recipe/bad_yaml.yaml", "line 4 is not YAML"),
    ("train --config-dir mine +recipe=lines", "recipe/lines.yaml", "must hold a section of keys"),
    ("train --config-dir latin +recipe=old", "latin/recipe/old.yaml", "as UTF-8 text in YAML (invalid start byte);"),
    ("recipes --config-dir latin", "latin/recipe/old.yaml", "as UTF-8 text in YAML (invalid start byte);"),
    ("train --config-dir bell +recipe=rings", "bell/recipe/rings.yaml", "(special characters are not allowed); save"),
    ("recipes --config-dir folded", "folded/recipe/nested.yaml", "cannot be read (Is a directory); name a file"),
    ("train +logger.mine._target_=rlft.logger.jsonl.Jsonl", "logger.mine._target_", "it is no tracker, got rlft.log"),
    ("train +logger.mine._target_=rlft.logger.loggers.Jsonl", "logger.mine._target_", "no tracker, got rlft.logger.lo"),
    ("train +logger.mine._target_=rlft.logger.loggers.Rollouts", "logger.mine._target_", "it is no tracker, got rlft"),
    ("train +logger.mine._target_=rlft.logger.console.Console", "logger.mine._target_", "leave out logger.mine"),
    ("train --config-dir mine +recipe=dangling", "seed", "refers to a key that does not exist, ${nothing}"),
    ("train +recipe=recipes/grpo_arithmetic.yaml", "recipes/grpo_arithmetic.yaml", "did you mean +recipe=grpo_arit"),
    ("train +recipe=grpo_arithmetic.yaml", "grpo_arithmetic.yaml", "did you mean +recipe=grpo_arithmetic?"),
    ("train recipe=recipes/grpo_arithmetik.yaml", "recipes/grpo_arithmetik.yaml", "did you mean +recipe=grpo_ar"),
    ("train nowhere/mine.yaml", "nowhere/mine.yaml", "no such file; name a YAML file, or see rlft recipes"),
    ("train mine/recipe/dangling.yaml", "seed", "refers to a key that does not exist, ${nothing}"),
    ("train +recipe=loose", "is no recipe of rlft's, got +recipe=loose; write loose.yaml"),
    # A choice that is made twice
    ("train reward=[exact_match,exact_match]", "twice, got exact_match; write 'reward=[exact_match]'"),
    ("train logger=[wandb,mlflow,wandb]", "got wandb; write 'logger=[wandb,mlflow]'"),
    # Words that are no overrides, options that don't exist
    ("train --help=foo", "takes no value, got foo; write --help"),
    ("train -m=3 seed=0,1", "-m", "takes no value, got 3; write -m"),
    ("train --help x", "command line", "must be words such as key=value, got x"),
    ("train steps 10", "command line", "got steps; did you mean steps=10?"),
    ("train --steps 10", "command line", "got --steps; keys have no dashes; did you mean steps=10?"),
    ("train --lr=1e-4", "command line", "did you mean trainer.lr=1e-4?"),
    ("train --nonsense", "command line", "there is no such option, got --nonsense"),
    ("train --confg-dir mine", "command line", "did you mean --config-dir?"),
    ("train --config-dir nowhere", "--config-dir", "there is no such folder, got nowhere"),
    ("train --config-dir", "--config-dir", "needs a value"),
    ("train --config-dir hiding", "--config-dir", "reward/format.yaml has the name of one of rlft's own"),
    ("train --cfg jobs", "--cfg", "got jobs; did you mean job? All: job, hydra, all"),
    ("train --cfg", "needs a value"),
    ("train =5", "command line", "must be words such as key=value, got =5"),
    ("train ''", "command line", "got an empty word"),
    ("train seed=1 seed=2", "is given twice, got seed=1 and seed=2"),
    ("train seed=1 ++seed=2", "seed", "is given twice"),
    ("train seed=1,2", "has several values but this is no sweep, got 1,2"),
    ("train reward=exact_match,format", "or write a list as '[a,b]'"),
    ("train reward=[exact_match, format]", "reward", "its bracket is not closed, got [exact_match,"),
    ("train +algorithm=gspo", "write algorithm=<choice>"),
    ("train trainer.lr=1e-3,", "ends with a comma, got 1e-3,; write trainer.lr=1e-3, with no comma betw"),
    ("train +recipe=grpo_arithmetic, steps=2", "+recipe", "ends with a comma, got grpo_arithmetic,; write +recipe="),
    ("train 'steps=3 trainer.lr=1e-3'", "the value cannot be read, got 3 trainer.lr=1e-3"),
    ("train 'name=my run; first'", "quote it twice"),
    ("train 'seed=${nothing}'", "refers to a key that does not exist, ${nothing}"),
    ("train hydra.mode=MULTIRUN", "sweep with rlft train -m"),
    ("train hydra/launcher=joblib", "cannot be set by the user"),
    # Types and bounds
    ("train steps=1e3", "must be a whole number, got 1000.0; write 1000"),
    ("train steps=10.5", "must be a whole number, got 10.5; for instance 100 (training steps"),
    ("train steps=0", "must be greater than 0, got 0; for instance 100 (training steps"),
    ("train cluster.ranks=two", "must be a whole number, got 'two'; for instance 1"),
    ("train cluster.ranks=null", "must be a whole number, got null; for instance 1"),
    ("train cluster.sequence_ranks=0", "must be greater than 0, got 0; for instance 1"),
    ("train cluster.sequence_ranks=two", "must be a whole number, got 'two'; for instance 1"),
    ("train seed=-1", "must be greater than or equal to 0, got -1"),
    ("train seed=99999999999999999999999", "must be at most 2**63-1, got 99999999999999999999999"),
    ("train trainer.lr=nan", "got nan"),
    ("train trainer.lr=inf", "must be finite, got inf"),
    ("train trainer.schedule=exponential", "choose one of constant, linear, cosine"),
    ("train trainer=3", "must be a section of keys, got 3; set one of trainer.optimizer, "),
    ("train model=Qwen/Qwen3-0.6B", "section of keys, got 'Qwen/Qwen3-0.6B'; write model.path=Qwen"),
    ("train eval.temperature=-1", "must not be negative"),
    (f"{RM} checkpoint.on_signal=soon", "use step or now or a number"),
    ("train freshness.threshold=often", "use auto or a number"),
    ("train model.revision=3", """quote it twice: "model.revision='3'\""""),
    ("train name=", "got nothing"),
    ("train name=../mine", "leave out slashes"),
    ("train name=null", "must be a text that can name a folder; for instance name=my_run"),
    ("train name=[a]", "must be a text that can name a folder; for instance name=my_run"),
    ("plan eval run=runs/a", "plan", "there is no plan of this command, got eval; name one of train, sft, rm,"),
    ("train data=jsonl data.path=a,b.jsonl", "if it is one text, quote it twice: \"data.path='a,b"),
    ("train name=..", "got .."),
    ("train data.difficulty=10", "must be 1 to 9 digits"),
    ("train data.operations=[/]", "must be a list of +, - and *"),
    # Rules between keys
    ("train group_size=1", "compares the completions of a group and needs at least 2, got 1"),
    ("train minibatches=64", "a step has only prompts_per_step=16 groups, got 64"),
    ("train minibatches=3", "use one of 1, 2, 4, 8, 16"),
    ("train cluster.ranks=3 cluster.lanes=4", "cluster.ranks", "does not divide cluster.lanes=4, which a run keeps"),
    ("train cluster.ranks=2 cluster.lanes=1", "cluster.ranks", "got 2; use one of 1, or begin a run with other lanes"),
    ("train cluster.sequence_ranks=2",
     "does not divide cluster.ranks=1, got 2; use one of 1, or set cluster.ranks=2 or a multiple of that"),
    ("train cluster.ranks=8 cluster.sequence_ranks=2 cluster.lanes=6", "cluster.ranks",
     "its first step, got 8; use one of 2, 4, 6, 12, or begin a run with other lanes"),
    ("train model.kernels=plain cluster.ranks=2 cluster.sequence_ranks=2",
     "divides packed rows, and model.kernels=plain has none, got 2; set it to 1"),
    ("train cluster.ranks=2 cluster.shard_base=true",
     "the run's own process needs the whole base, got true; set cluster.engines=1 or more, or"),
    ("train cluster.engines=1 cluster.shard_base=true", "there is one lane, got true; set clus"),
    ("train cluster.engines=1 cluster.ranks=2 cluster.shard_base=true lora.use_dora=true generation=transformers",
     "cluster.shard_base", "DoRA asks for the lengths of all weights"),
    ("train cluster.engines=1 lora.use_dora=true cluster.ranks=2 cluster.shard_base=true", "DoRA asks for the lengths"),
    ("train cluster.engines=1 cluster.lanes=2 model.quantization=4bit cluster.shard_base=true",
     "layers in 4 bits are not divided, got true; set model.quantization=null, or leave it out"),
    ("train token_budget=10", "set token_budget=512 or more"),
    ("train algorithm.kl_coef=0.1", "snapshot.reference", "algorithm.kl_coef is above 0"),
    ("train algorithm.kl_coef=0.1 algorithm.kl_to=old algorithm.kl_estimator=exact",
     "needs its network during the updates, got exact; set snapshot.old=copy, or"),
    (f"{EXACT} algorithm.kl_in=reward snapshot.old=sampled",
     "from the engine's log-probs of sampled tokens, got sampled; use auto"),
    (f"{EXACT} lora.target_modules=[q_proj,lm_head]", "not computed where the LM head has an adapter"),
    ("train algorithm.kl_coef=0.1 algorithm.kl_estimator=exact", "snapshot.reference", "algorithm.kl_coef is above 0"),
    ("train algorithm.dual_clip=1", "must lie above the clip range"),
    ("train algorithm=gspo algorithm.mismatch=token_mask",
     "ratio=sequence has one number for all of a completion's tokens, got token_mask; use algorithm.mismatch=sequence"),
    ("train algorithm=gmpo algorithm.mismatch=token_truncate", "surrogate=gmpo has one"),
    ("train algorithm=gspo overlap.lag=1", "set algorithm.mismatch=sequence_truncate, or overlap.lag=0"),
    ("train algorithm.mismatch_low=2", "must have 1"),
    # Sweeps whose values Optuna chooses
    ("train sweep=optuna", "belongs to a sweep, and this is one run, got optuna; write rlft train -m"),
    ("train 'trainer.lr=interval(1e-5,1e-3)'", "has an interval of values but this is no sweep"),
    ("train -m sweep.trials=3 trainer.lr=1e-5,1e-4", "sweep", "no sampler is chosen, got nothing; write sweep=optuna"),
    ("train -m ~sweep=optuna trainer.lr=1e-5,1e-4", "sweep", "takes no sign, got '~sweep=optuna'; write sweep=optuna"),
    ("sample -m sweep=optuna seed=1,2", "sweep", "by what evaluations measure, and rlft sample has none, got optuna"),
    ("train -m sweep=wandb trainer.lr=1e-5,1e-4", "sweep", "not one of its choices, got wandb; write sweep=optuna"),
    ("train -m sweep=optuna", "has nothing to choose: no key has an interval or several values"),
    (f"{CHOOSES} sweep.trials=3,4", "is one for the whole sweep"),
    (f"{CHOOSES} sweep.sampler=gird", "must be 'tpe', 'random' or 'grid', got 'gird'"),
    (f"{CHOOSES} sweep.metric=acuracy", "no evaluation has it, got acuracy; did you mean accuracy?"),
    (f"{CHOOSES} sweep.sampler=grid", "a grid goes through values one by one, and trainer.lr has an"),
    ("train -m sweep=optuna sweep.sampler=grid sweep.trials=3 lora.rank=4,8", "sweep.trials", "each of its 2 combin"),
    (f"{CHOOSES} name=a,b", "cannot be swept: it does not change what a run measures, got a, b"),
    (f"{CHOOSES} hydra.run.dir=x", "the folder of one run, and this is a sweep, got x; write"),
    (f"{CHOOSES} hydra.job.name=x", "no such key, got x; of Hydra's keys only hydra.run.dir"),
    (f"{CHOOSES} hydra.sweep.dir=file", "cannot be written (Not a directory), got file; choose"),
    (f"{CHOOSES} hydra.sweep.dir=run", "there is a run in that folder, got run; name another"),
    (f"{CHOOSES} hydra.sweep.dir=jobs", "runs in that folder that are not of such a sweep"),
    ("train -m seed=0,1 hydra.sweep.dir=study",
     "there is a sweep in that folder whose values Optuna chooses, got study; resume that one with rlft resume study"),
    (f"{CHOOSES} resume=auto", "is of one run, and this is a sweep, got auto; leave it out"),
    (f"{CHOOSES} 'lora.rank=interval(4,8)'", "write 'lora.rank=int(interval(..))' to draw whole numbers"),
    ("train -m sweep=optuna 'trainer.lr=choice(1e-3)'", "sweep", "has nothing to choose"),
    ("train -m sweep=optuna 'trainer.lr=intervall(1e-4,1e-2)'",
     "has a function that cannot be read (Unknown function 'intervall'), got intervall(1e-4,1e-2); write"),
    ("train -m sweep=optuna 'trainer.lr=interval(1e-4)'", "(missing a required argument: 'end')"),
    ("train -m sweep=optuna 'trainer.lr=interval(1e-4,1e-2'", "its bracket is not closed, got interval("),
    ("train sweep=optuna --cfg job", "sweep", "belongs to a sweep, and --cfg prints what one run has, got optuna"),
    ("train -m seed=0,1 --cfg job", "--cfg", "prints the config of one run, and -m is a sweep; leave -m out"),
    ("train -m sweep=optuna 'trainer.lr=interval(1e-4,1e-2)' --help", "sweep", "and --help prints what one run has"),
    (f"train -m {SMALL} seed=0,1 hydra.sweep.dir=/dev/null/x", "cannot be written (Not a directory"),
    (f"{CHOOSES} 'trainer.beta1=interval(0.9,1.5)'", "(tried with trainer.beta1=1.5)"),
    ("train -m seed=0,1 cluster.jobs=2 cluster.engines=1", "is one process"),
    ("train cluster.engines=2 cluster.address=auto", "is the address of a Ray cluster, got auto"),
    ("train cluster.scoring=true scoring.workers=0", "cluster.scoring", "scores in the run's own process, got true"),
    ("train cluster.gpus_per_engine=2", "applies to engines in processes of their own, and"),
    ("train generation=transformers cluster.engines=1 cluster.gpus_per_engine=2",
     "the transformers engine computes on one GPU, got 2"),
    ("train generation=vllm cluster.engines=1 generation.vllm.weights=copy",
     "makes vLLM's weights of the trainer's base, and cluster.engines do not"),
    ("train generation=vllm lora.use_dora=true cluster.engines=1", "lora.use_dora", "vLLM serves no DoRA adapters"),
    ("train overlap.lag=1", "an earlier policy sampled"),
    ("train overlap.lag=1 algorithm=kimi", "overlap.lag", "Kimi has no such weights"),
    ("train overlap.lag=1 algorithm.mismatch=token_mask snapshot.old=sampled", "overlap.lag=1"),
    ("train algorithm.credit_span=turn", "has one score for all turns of a completion"),
    ("train algorithm=ppo algorithm.credit_span=step", "choose one of trajectory, turn"),
    ("train algorithm=rloo algorithm.credit_span=turn", "algorithm=grpo and algorithm=ppo"),
    ("train algorithm=gmpo algorithm.ratio=sequence", "takes their geometric mean itself, got seq"),
    ("train algorithm=gdpo algorithm.supervision=process", "the rewards of whole completions"),
    ("train algorithm=gdpo algorithm.kl_coef=0.1 algorithm.kl_in=reward", "has no one score"),
    ("train algorithm=ppo algorithm.reward_aggregation=sum_then_normalize",
     "it belongs to algorithm=gdpo and algorithm=grpo"),
    ("train generation.top_p=0.9 algorithm.mismatch=token_mask", "generation.top_p", "undistorted sampling, got 0.9"),
    ("train generation.top_k=5 snapshot.old=sampled", "generation.top_k", "snapshot.old=sampled compares"),
    ("train stop.when=flat eval.every=0", "stop.when", "there are none, got flat; set eval.every to a number of steps"),
    (f"{SFT} stop.when=flat eval.every=0", "stop.when", "there are none, got flat"),
    ("train stop.when=flatt", "use never or flat"),
    (f"{CHOOSES} stop.when=flat", "compared at the same steps, got flat; leave it out"),
    ("train eval.kl_base=true eval.temperature=0", "eval.kl_base", "eval.temperature=0 samples another one, got true"),
    ("train eval.kl_base=true generation.top_k=5", "eval.kl_base", "leave some of them out, got true; use generation."),
    ("train generation.temperature=0", "needs completions that differ, got 0"),
    ("train generation.engine=vlm", "is not an engine, got vlm"),
    # Groups of one
    ("train algorithm=rloo group_size=1", "needs at least 2, got 1"),
    ("train algorithm=kimi group_size=1", "needs at least 2, got 1"),
    ("train algorithm=reinforce algorithm.baseline=group group_size=1", "needs at least 2, got 1"),
    ("train algorithm=reinforce algorithm.baseline=leave_one_out group_size=1", "at least 2, got 1"),
    (f"{ALONE} dynamic_sampling.max_rounds=2", "with group_size=1 each of them is, got 2; set group_size=8"),
    # Curricula
    ("train curriculum.above=0", "is read where pass rates are known, got 0.0; set curriculum.r"),
    ("train curriculum.below=1", "is read where pass rates are known, got 1.0; set curriculum.r"),
    ("train curriculum.replay=0.5", "is read where pass rates are known, got 0.5; set curriculum"),
    ("train curriculum.running=true curriculum.above=0.5 curriculum.below=0.5", "curriculum.above",
     "is not below curriculum.below=0.5, so that every prompt would be left out, got 0.5"),
    ("train curriculum.running=true curriculum.memory=0", "greater than 0"),
    (f"{GAME}={OWN}.Guessing reward=null curriculum.path=good.jsonl",
     "counts completions that are right by the first reward, and there is none"),
    # The critic
    ("train algorithm=ppo", "critic.kind", "needs values, and only a critic gives them, got none; set critic.kind=ada"),
    ("train algorithm=a2c", "critic.kind", "or shared (a value head on the policy's features)"),
    ("train critic.kind=adapter", "has no use for a critic's values, got adapter; set critic.kind=none"),
    ("train critic.init=critic", "with critic.kind=none, got critic; set critic.kind=adapter or sh"),
    ("train critic.warmup_steps=5", "with critic.kind=none, got 5"),
    (f"{PPO} steps=10 critic.warmup_steps=10", "would never learn, the run has steps=10, got 1"),
    (f"{PPO} critic.init=reward", "the one learned reward, and there are 0, got reward; set 'reward=["),
    (f"{PPO} {LEARNED} {TWO_LEARNED} critic.init=reward", "and there are 2, got reward"),
    (f"{PPO} {LEARNED} critic.init=reward {REFRESH}", "critic.init", "and reward.learned.path=null is none, got rewar"),
    (f"{PPO} {LEARNED} critic.init=reward reward.learned.path=mine", "critic.init", "reward.learned.path=mine is none"),
    # A teacher
    ("train algorithm=opd", "snapshot.teacher", "learns from a teacher's log-prob of each token, got none"),
    ("train snapshot.teacher=base", "has no use for a teacher, got base"),
    ("train snapshot.teacher_hint=x", "only a teacher reads it, and snapshot.teacher is none"),
    (f"{AS_IT_IS} snapshot.teacher_hint=' '", "is blank, got ''; use null for no hint"),
    (f"{AS_IT_IS} \"snapshot.teacher_hint='It is {{Answer}}.'\"",
     "has {Answer}, which nothing is put in the place of, got 'It is {Answer}.'; use {answer} for the prompt's answer"),
    (f"{AS_IT_IS} \"snapshot.teacher_hint='It is {{answer'\"",
     "has a { without its partner, got 'It is {answer'; use {answer} for the prompt's answer"),
    (f"{OPD} environment=calculator environment.syntax=json", "snapshot.teacher_hint",
     "goes into prompts that are answered in one turn"),
    (f"{OPD} generation.temperature=0.7", "student's at temperature 1, got 0.7"),
    (f"{OPD} generation.top_k=5", "leaves out tokens that the teacher would judge"),
    (f"{OPD} reward.exact_match.weight=0 reward.format.weight=0 algorithm.reward_coef=1",
     "[exact_match,format] has no weight but 0, got 1; use 0, or set for instance reward.exact_match.weight=1"),
    (f"{OPD} dynamic_sampling.max_rounds=2", "teaches by their tokens all the same"),
    (f"{OPD} algorithm.reward_coef=1 group_size=1", "compares the completions of a group and needs"),
    (AS_IT_IS, "is what the policy starts as: the teacher would agree with it on every token"),
    (f"train algorithm=opd {SMALL} lora.path=policy snapshot.teacher=./policy",
     "nothing be learned, got ./policy; set snapshot.teacher_hint, name another teacher, or set algorithm.reward_coef"),
    ("train algorithm=opd snapshot.teacher=embedded:tiny-arithmetic", "is what the policy starts"),
    (f"train algorithm=opd {SMALL} snapshot.teacher=critic", "adapter of the role critic"),
    (f"{OPD} snapshot.teacher_engine=vllm", "separate model, and snapshot.teacher is bas"),
    (f"train algorithm=opd {SMALL} snapshot.teacher=critic {IN_VLLM}",
     "snapshot.teacher is an adapter on the run's base (critic)"),
    ("train snapshot.teacher_engine=vllm", "separate model, and snapshot.teacher is non"),
    (f"{OPD} snapshot.teacher_dtype=bfloat16", "separate model, and snapshot.teacher is"),
    ("train snapshot.teacher_quantization=none", "snapshot.teacher is none, got none"),
    (f"{LARGER} {IN_VLLM} cluster.ranks=2 cluster.lanes=2", "snapshot.teacher_engine", "in each of the 2 ranks"),
    # Snapshots
    ("train snapshot.refresh_every=5", "set snapshot.reference=copy"),
    ("train snapshot.reference=ema snapshot.ema_decay=0.9 snapshot.refresh_every=5",
     "snapshot.reference is ema, got 5"),
    ("train snapshot.reference=ema", "snapshot.ema_decay", "needs the share of it that stays, per step, got null; use"),
    ("train snapshot.ema_decay=0.9", "snapshot.reference is none, got 0.9; set snapshot.referen"),
    ("train snapshot.reference=copy snapshot.ema_decay=0.9", "snapshot.reference is copy, got 0"),
    ("train snapshot.reference=ema snapshot.ema_decay=1", "so it never moves, got 1"),
    ("train algorithm=rloo algorithm.kl_coef=0.1", "snapshot.reference", "base, copy, ema or an adapter folder"),
    # KL controllers
    ("train algorithm.kl_controller=adaptive snapshot.reference=base", "algorithm.kl_target", "there is none"),
    ("train algorithm.kl_controller=proportional algorithm.kl_target=0.1", "algorithm.kl_coef", "and 0 stays 0"),
    # Step scores and pretraining text
    ("train algorithm=grpo_process", "reward", "gives any, got [exact_match,format]; add one, for instance 'reward=[e"),
    ("train algorithm.supervision=process", "reward", "learns from scores of single steps"),
    ("train algorithm=grpo_process reward=[exact_match,equations] reward.equations.weight=0", "reward", "gives any, g"),
    (PTX, "pretrain.path", "mixes pretraining text in, and none is given, got null; set pretrain.path=<JSONL"),
    (f"{PTX} pretrain.path=nowhere.jsonl", "got nowhere.jsonl"),
    (f"{PTX} pretrain.path=embedded:books", "embedded:books; use embedded:arithmetic-cold-start, "),
    (f"{PTX} {TEXT} pretrain.max_tokens=20000 token_budget=16384",
     "may have pretrain.max_tokens=20000 tokens, got 16384"),
    # Learned rewards
    (f"train {LEARNED}", "reward.learned.path", "scores every completion 0, and reward_model.refresh_every=0 never t"),
    (f"train {LEARNED} {TWO_LEARNED} {REFRESH}", "reward_model.refresh_every", "and there are 2, got 10"),
    (f"train {LEARNED} {REFRESH} reward.learned.path=three_labels", "reward_model.refresh_every", "is a network of it"),
    (f"train {LEARNED} reward_model.refresh_every=10 reward_model.labels=null", "got null; use"),
    (f"train {LEARNED} reward_model.refresh_every=10 reward_model.labels=learned", "got learne"),
    (f"train {LEARNED} reward_model.refresh_every=10 reward_model.labels=math", "got math; use"),
    (f"train reward=[learned] {REFRESH}", "got exact_match; put one in: 'reward=[exact_match"),
    (f"{ALONE} {LEARNED} {REFRESH}", "reward_model.refresh_every",
     "and group_size=1 has none, got 10; set group_size=8"),
    # Adapters of another rank
    ("train lora.path=policy", "lora.rank", "the adapter at lora.path has rank 4, got 32; set lora.rank=4"),
    ("train lora.path=policy lora.rank=4", "lora.alpha", "was trained with 8.0 and would be another function, got 32"),
    (f"{PPO} critic.init=critic", "lora.rank", "the adapter at critic.init has rank 4, got 32; set lora.rank=4, or an"),
    (f"{PPO} critic.init=critic lora.rank=4", "lora.alpha", "the adapter at critic.init was trained with 8"),
    (f"train {LEARNED} reward.learned.path=critic", "lora.rank", "the adapter at reward.learned.path has rank 4, got"),
    (f"train {LEARNED} reward.learned.path=critic lora.rank=4", "lora.alpha", "at reward.learned.path was trained wit"),
    # Adapters that cannot be used as they are
    (f"train {SMALL} lora.path=rslora", "lora.use_rslora",
     "the adapter at lora.path was trained with use_rslora=true and would be another function, got false; set "
     "lora.use_rslora=true, or another lora.path"),
    (f"train {SMALL} lora.path=policy lora.use_rslora=true", "with use_rslora=false and would be"),
    (f"train {SMALL} lora.path=policy lora.use_dora=true", "set lora.use_dora=false, or another lora"),
    (f"train {SMALL} {LEARNED} reward.learned.path=critic lora.use_rslora=true", "at reward.lea"),
    (f"train {ADAPTERS} lora.use_dora=true",
     "vLLM serves no DoRA adapters, got true; use generation=transformers, or lora.use_rslora=true"),
    ("train generation=vllm lora.target_modules=[q_proj,lm_head]",
     "vLLM serves no adapters of lm_head, got lm_head; leave it out, or use generation"),
    (f"{SFT} {ADAPTERS} data=arithmetic lora.use_dora=true", "vLLM serves no DoRA adapters"),
    (f"{PPO} {SMALL} critic.init=critic_patterns", "adapters with alpha_pattern are not supported"),
    (f"train {SMALL} lora.path=biased", "its bias changes the base, which all roles share"),
    (f"train {SMALL} snapshot.reference=biased", "its bias changes the base"),
    (f"train {SMALL} lora.path=pissa",
     "init_lora_weights=pissa has changed the base that it was trained on, and would change this one, got pissa; "
     "convert it to plain LoRA with PEFT's save_pretrained("),
    (f"train {SMALL} snapshot.reference=pissa", "init_lora_weights=pissa has changed the base"),
    (f"train {SMALL} algorithm=opd snapshot.teacher=./pissa", "init_lora_weights=pissa has"),
    (f"{PPO} {SMALL} critic.init=critic_loftq", "init_lora_weights=loftq has changed the base that"),
    (f"train {SMALL} {LEARNED} reward.learned.path=critic_loftq", "init_lora_weights=loftq has"),
    ("sample data=arithmetic adapter=pissa", "init_lora_weights=pissa has changed the base"),
    (f"train {SMALL} snapshot.reference=alora", "adapters with alora_invocation_tokens are no"),
    (f"train {SMALL} lora.path=newer", "adapter_config.json has shiny_scale=1.5, which may change what t"),
    (f"train {SMALL} lora.path=experts", "lora.experts",
     "the adapter at lora.path was trained with experts=true and would be another function, got false; set "
     "lora.experts=true, or another lora.path"),
    (f"train {SMALL} lora.path=routed", "lora.router", "the adapter at lora.path was trained with router=true and"),
    (f"train {SMALL} snapshot.reference=no_alpha", "adapter_config.json has no lora_alpha, got"),
    (f"train {SMALL} snapshot.reference=loha", "an adapter of the kind LOHA"),
    (f"train {SMALL} lora.path=critic", "holds the adapter of the role critic, which is not a policy"),
    (f"train {SMALL} snapshot.reference=critic", "the role critic, which is not a policy, got"),
    (f"{PPO} {SMALL} critic.init=policy", "there is no head.safetensors in that folder, got policy"),
    (f"{PPO} {SMALL} critic.init=shared", "there is no adapter_config.json in that folder, got shared"),
    (f"train {SMALL} {LEARNED} reward.learned.path=policy", "there is no head.safetensors in t"),
    # Exports that are pushed or converted
    ("export run=run out=new push=a/b/c", "is not a repository id of the Hugging Face hub"),
    ("export run=run ot=new", "there is no such key, got new; did you mean out?"),
    ("export run exports/x", "export", "got exports/x; write out=exports/x"),
    ("export run=run out=new push=", "is not a repository id of the Hugging Face hub"),
    ("export run=run out=new as=gguf", "use as=model, then `python llama.cpp/convert_hf_to_gguf.py new --outf"),
    ("export run=run out=new", "run", "there is no checkpoint in that run yet"),
    # Sampling that the trainer's log-probs are not of, and stops that never come
    ("train generation.min_p=0.1", "leaves out tokens that the trainer's log-probs count"),
    ("train generation.repetition_penalty=1.1", "makes a token's probability depend on how often it was said"),
    ("train repetition_penalty=1.1", "the policy learn it instead: 'reward=[...,repetition]'"),
    ("chat run=run eval.typical_p=0.9", "leaves unlikely tokens out"),
    ("train num_beams=4", "searches for likely completions, and a policy learns from its own samples"),
    ("train generation.vllm.ignore_eos=true", "forbids the end token"),
    ("train generation.stop_strings=[a]", "into the list generation.stop"),
    ("train eval.kl_base=true generation.min_p=0.1", "use 0 in training"),
    (f"{SFT} data=arithmetic eval.kl_base=true generation.min_p=0.1", "eval.kl_base", "and min_p leave some of them"),
    ("train generation.stop=word", "must be a list, got 'word'; write \"generation.stop=['word']\""),
    ("train ++recipe=grpo_arithmetic", "recipe", "so it takes a plus, got ++recipe=grpo_arithmetic; write +recipe="),
    ("eval run=run ~eval.num_prompts", "eval.num_prompts", "cannot be taken out of the config of a run"),
    ("eval run=run ~reward.exact_match", "reward.exact_match", "cannot be taken out of the config of a run"),
    ("eval run=run ++eval.nothing=1", "eval.nothing", "there is no such key, got 1"),
    ("train generation.stop=7", "must be a list, got 7; write 'generation.stop=[7]'"),
    ("train generation.stop=null", "must be a list, got null; write 'generation.stop=[]'"),
    ("train generation.stop=[1.5]", "must be a string or a whole number, got [1.5]; for"),
    ("train \"generation.stop=['']\"", "holds an empty string, which is in every completion"),
    ("train generation.stop=[-1]", "holds a token id below 0, got -1"),
    ("train \"generation.stop=['</answer>']\"",
     "is cut off the text, in which reward.exact_match looks for </answer>, got </answer>; set gen"),
    ("train reward=format \"generation.stop=['</think>']\"", "reward.format looks for </think>"),
    (f"{SFT} data=arithmetic \"generation.stop=['</']\"", "looks for </answer>, got </; set gener"),
    # The machine
    ("train generation=vllm generation.vllm.weights=adapter lora.rank=600",
     "vLLM takes adapters up to rank 512, got 600"),
    ("train generation=vllm generation.vllm.weights=merged", "did you mean copy? use"),
    ("train model.dtype=float8", "is not a known dtype, got float8"),
    ("train model.device=gpu", "is not a device, got gpu"),
    (f"train {SCRIPTED} generation.drafts=history",
     "the scripted engine samples without drafts, got history; use off, or generation=tr"),
    ("train generation=transformers cluster.engines=1 generation.drafts=history",
     "needs the engine in the run's own process, where its history is, got history; use off, or cluster.engines=0"),
    ("train model.kernels=plain generation.transformers.weights=merged_bfloat16",
     "needs rlft's LoRA layers, which model.kernels=plain does without"),
    ("train lora.target_modules=[]", "names no layer to adapt, got []; use all-linear"),
    ("train 'lora.target_modules=\"\"'", "names no layer to adapt, got []; use all-linear"),
    ("train snapshot.routing=r3", "r3"),
    ("train model.path=", "is empty"),
    ("train model.path=/nowhere", "got /nowhere"),
    # Paths
    ("train model.path=./nowhere", "there is no such folder"),
    ("train model.path=./mine", "there is no config.json in that folder, got ./mine"),
    ("train model.path=embedded:big", "use embedded:tiny-arithmetic"),
    ("train lora.path=nowhere", "there is no such folder, got nowhere; point it at a PEFT adapter folder"),
    ("train lora.path=mine", "there is no adapter_config.json in that folder, got mine"),
    ("train snapshot.reference=bas", "is neither none, base, copy or ema nor an existing"),
    (f"{PPO} critic.init=rewad", "is neither base or reward nor an existing folder, got rewad"),
    ("train hydra.run.dir=file", "cannot be written (Not a directory), got file; choose"),
    ("train hydra.sweep.dir=jobs", "belongs to a sweep, and this is one run, got jobs;"),
    ("train model.gradient_checkpointing=maybe", "must be true or false or 'tiles' or 'offload' or 'auto',"),
    ("train model.gradient_checkpointing=offload model.device=cpu", "model.gradient_checkpointing",
     "only a CUDA device has its layers' inputs kept in main memory, got offload; use true or tiles"),
    ("train hydra.run.dir=", "is empty"),
    # Data
    ("train data=jsonl data.path=nowhere.jsonl", "there is no such file, got nowhere.jsonl"),
    ("train data=jsonl data.path=array.json", "array.json, row 0: must be a JSON object, it is a string"),
    ("train data=jsonl data.path=broken.jsonl", "broken.jsonl:2: is not JSON"),
    ("train data=jsonl data.path=other.jsonl", "other.jsonl:1: there is no field 'prompt', only"),
    # Rewards and other components
    ("train reward=exactmatch", "did you mean exact_match?"),
    ("train reward.exact_match.weight=0 reward.format.weight=0 reward=[exact_match,format]",
     "has no weight but 0: nothing would be learned, got [exact_match,format]; set for instance reward"),
    ("train reward.format.mode=lax", "got 'lax'; choose one of strict, soft"),
    ("train reward.exact_match=1", "has no _target_, got 1"),
    (f"{HTTP} reward.http.url=localhost:8000/score", "no http:// or https:// address, got local"),
    (f"{HTTP} reward.http.url=ftp://host/score", "is no http:// or https:// address"),
    (f"{HTTP} reward.http.url=http:///score", "is no http:// or https:// address"),
    (f"{HTTP} \"reward.http.url='http://host name/score'\"", "is no http:// or https:// address"),
    (f"{HTTP} reward.http.url=http://host:99999/score", "is no address"),
    (f"{HTTP} reward.http.token_variable=NO_SUCH_TOKEN", "environment variable that is"),
    (f"{HTTP} reward.http.batch_size=0", "must be greater than 0"),
    (f"{HTTP} reward.http.retries=-1", "must be greater than or equal to 0"),
    (f"{HTTP} +reward.http.headers.run=7", "reward.http.headers", "must be a string"),
    (f"{HTTP} reward.http.timeout=9.9",
     "the 9 s for requests that scoring.timeout leaves (10 s a group), got 9.9; set scoring.timeout=11 or more"),
    ("train reward=judge reward.judge.url=http://host/v1",
     "OpenAI-compatible /chat/completions, got http://host/v1; try http://host/v1/chat/completions"),
    ("train reward=judge reward.judge.timeout=30", "exceeds the 9 s for requests that "),
    ("train reward=judge reward.judge.highest=1", "must be above lowest=1, got 1; "),
    ("train reward=judge \"reward.judge.rubric=' '\"", "is empty"),
    ("train reward=judge reward.judge.mode=pairs", "got 'pairs'; choose one of each, group"),
    ("train reward=judge reward.judge.response_format=json", "got 'json'; choose"),
    ("train reward=judge +reward.judge.options.messages=[]", "reward.judge.options.messages", "is set by the reward"),
    ("train reward=length reward.length.mode=target", "reward.length.target", "is null, and mode=target needs it"),
    ("train reward=length reward.length.mode=limit", "reward.length.limit", "is null, and mode=limit needs it"),
    ("train reward=overlong reward.overlong.cache=0", "1 to max_tokens=256 tokens, got 0"),
    ("train reward=overlong reward.overlong.cache=-1", "1 to max_tokens=256 tokens, got -1"),
    ("train reward=overlong reward.overlong.cache=257", "1 to max_tokens=256 tokens, got 257"),
    (f"train {LEARNED} reward.learned.token_budget=0", "must be greater than 0, got 0"),
    (f"train {LEARNED} reward.learned.center=inf", "must be finite"),
    (f"train {LEARNED} reward.learned.scale=big", "must be a number"),
    (f"train {LEARNED} reward.learned.path=3", "must be a string"),
    ("train --config-dir mine reward=[exact_match,mine]", "reward.mine._target_", "current folder, in --config-dir"),
    ("train --config-dir mine reward=[flat]", "got mine.flat; begin that YAML with `flat:` and indent"),
    ("train algorithm._target_=no.such.Thing", "No module named 'no'), got no.such.Thing"),
    ("train algorithm._target_=rlft.algorithm.grpo.GPRO", "did you mean GRPO?"),
    # Resuming
    ("train resume=run hydra.run.dir=elsewhere", "resume", "leave hydra.run.dir out"),
    ("train resume=run trainer.lr=3", "resume", "trainer.lr: 1e-05 -> 3"),
    ("train model.date=tomorrow", "is not a date, got 'tomorrow'; write it as 2026-11-25, or auto"),
    ("train model.date=25.11.2026", "is not a date, got "),
    ("train \"model.date='2026-13-01'\"", "is not a date, got "),
    ("train \"model.date='20261125'\"", "is not a date, got "),
    ("train resume=run data=jsonl data.path=good.jsonl", "resume", "data._target_: rlft.data.arithmetic.Arithmetic ->"),
    ("train hydra.run.dir=run", "continue it with `rlft resume run`"),
    ("resume", "resume", "there is no run below "),
    ("resume run=", "resume", "names no run; write rlft resume runs/<name>/<time>, or no name for the latest"),
    ("resume steps=3", "resume", "there is no run below "),
    ("resume mine", "resume", "there is no run in that folder"),
    ("resume saved_run/checkpoints/step_000099", "resume",
     "the run has no such checkpoint, got saved_run/checkpoints/step_000099; name one of step_000001, step_000002"),
    ("eval run=saved_run/checkpoints/step_000099", "the run has no such checkpoint"),
    ("resume run seed=3", "resume", "seed: 0 -> 3"),
    ("resume run stepz=3", "did you mean steps?"),
    ("resume run steps", "command line", "got steps"),
    ("resume run algorithm=gspo", "resume", "algorithm.ratio: token -> sequence"),
    # Sweeps
    ("train -m seed=1,1", "has a value twice, got 1"),
    ("train -m algorithm.clip_low=0.1,0.2",
     "cannot be swept: it has no effect in any of the runs, got 0.1, 0.2; it acts with several updates a step"),
    ("train -m algorithm.kl_estimator=k1,k2 epochs=1,2", "algorithm.kl_estimator",
     "cannot be swept: it has no effect in any of the runs, got k1, k2; it acts with algorithm.kl_coef above 0"),
    ("train -m seed=1 seed=2", "is given twice"),
    ("train -m steps=1,0", "must be greater than 0 (job 1: steps=0), got 0"),
    ("train -m +recipe=grpo_arithmetic,grpo_x", "(job 1: +recipe=grpo_x)"),
    ("train -m hydra.run.dir=a,b", "is the folder of one run, and this is a sweep, got a,b; write"),
    ("train -m hydra.sweep.dir=a,b", "cannot be swept"),
    ("train -m seed=0,1 hydra.sweep.dri=x", "there is no such key, got x; did you mean hydra.sweep"),
    ("train -m seed=0,1 hydra.sweep.subdir=x", "is set by the sweep, which finds its runs again"),
    ("train -m seed=0,1 hydra.sweep.dir=file", "cannot be written (Not a directory), got file;"),
    ("train hydra.verbose=true", "there is no such key, got true; of Hydra's keys only hydra.run.dir"),
    ("train -m --cfg jobs", "--cfg", "got jobs"),
    # Supervised fine-tuning
    ("sft", "demonstrations.path", '"completion": "2"}; to try it without one: rlft sft +recipe='),
    ("rm", "preferences.path", '"rejected": "3"}; to try it without one: rlft rm +recipe=rm_arithmetic'),
    ("dpo", "preferences.path", '"rejected": "3"}; to try it without one: rlft dpo +recipe=dpo_arithmetic'),
    ("train data=jsonl", "data.path", '{"prompt": "What is 1 + 1?", "answer": "2"}; data=arithmetic needs none'),
    ("sft demonstrations.path=other.jsonl max_completion_tokens=64", "demonstrations.path", "jsonl:1: is not a ch"),
    (f"{SFT} token_budget=100", "may have 512 tokens (prompts.max_tokens and a completion), got 100;"),
    (f"{SFT} max_completion_tokens=300", "is given twice"),
    (f"{SFT} lora=null lora.rank=4", "belongs to the section lora, which is null here, got 4; leave out"),
    ("train alarms=null alarms.kl=1", "the section alarms, which is null here, got 1; leave out"),
    (f"{ALL} model.quantization=4bit model.device=cuda", "model.quantization", "4-bit weights cannot be trained"),
    (f"{ALL} model.dtype=bfloat16", "of bfloat16 weights, got bfloat16; set"),
    (f"{ALL} checkpoint.on_signal=now", "could be saved in place of a step's, got now"),
    (f"{ALL} eval.kl_base=true", "lora=null changes the base itself"),
    (f"{ALL} lora.path=critic", "which is null here, got critic; leave out lora=null"),
    (f"{ALL} {LEARNED} reward.learned.path=critic", "stands on a frozen base, which lora=null"),
    (f"{ALL} {LEARNED} {REFRESH}", "reward.learned.path", "which lora=null changes, got null; use rule rewards"),
    (f"{ALL} algorithm=ppo critic.kind=adapter", "lora=null changes, got adapter; use shared"),
    (f"{ALL} snapshot.reference=policy", "lora=null changes that, got policy; use base"),
    (f"{ALL} algorithm=opd snapshot.teacher=policy", "lora=null changes that, got policy; use"),
    (f"{ALL} overlap.lag=1 algorithm.mismatch=token_truncate", "overlap.lag", "the update changes meanwhile, got 1"),
    (f"{ALL} generation=vllm cluster.engines=1 cluster.gpus_per_engine=2",
     "engines that divide the layers among GPUs are sent adapters only, and lora=null has none, got 2; set it to 1"),
    (f"{ALL} generation=transformers generation.transformers.weights=merged_bfloat16",
     "rounds the sum of base and adapter, and lora=null has none, got merged_bfloat16; leave it out"),
    (f"{ALL} generation=transformers generation.transformers.weights=fastest",
     "rounds the sum of base and adapter, and lora=null has none, got fastest; leave it out"),
    ("train generation=transformers generation.transformers.weights=fastest model.kernels=plain",
     "generation.transformers.weights",
     "needs rlft's LoRA layers, which model.kernels=plain does without, got fastest; use apart, or model.kernels"),
    ("train model.kernels=plain generation.transformers.weights=fastest", "plain does without, got fastest; use apart"),
    ("doctor lora=null", "the engine is tried with adapters, and null has none, got null; leave it out"),
    (f"{SFT} lora=null model.quantization=4bit", "4-bit weights cannot be trained"),
    (f"{SFT} lora=null model.dtype=bfloat16", "small updates are lost in the rounding of bfloat16"),
    (f"{SFT} steps=0", "for instance null (optimizer updates;"),
    (f"{SFT} lora=null checkpoint.on_signal=now", "no copy of all weights is kept that could"),
    (f"{SFT} lora=null eval.kl_base=true", "lora=null changes the base itself"),
    (f"{SFT} lora=null data=arithmetic {LEARNED} reward.learned.path=critic",
     "stands on a frozen base, which lora=null changes, got "),
    (f"{SFT} data=arithmetic {LEARNED}", "reward.learned.path", "scores every completion 0"),
    ("resume sft_run examples_per_step=5", "resume", "examples_per_step: 4 -> 5"),
    (f"sft -m {SFT[4:]} seed=1 token_budget=100,5000", "and a completion) (job 0: "),
    # Preference optimisation
    (f"{DPO} loss=dppo", "is not one of its choices, got dppo; did you mean dpo? All: dpo, ipo, orpo, simpo"),
    (f"{DPO} loss.label_smoothing=0.5", "must be less than 0.5, got 0.5"),
    (f"{DPO} loss.gamma=1", "the loss chosen here has no such key, got 1; it belongs to loss=simpo"),
    (f"{DPO} loss=orpo loss.label_smoothing=0.1", "it belongs to loss=dpo and loss=simpo"),
    (f"{DPO} loss._target_=unittest.mock.Mock", "is no rlft.algorithm.preference.PreferenceLoss"),
    (f"{DPO} loss=simpo snapshot.reference=base",
     "this loss uses no reference, got base; leave it out, or use loss=dpo or ipo"),
    (f"{DPO} snapshot.reference=none",
     "this loss compares the policy with a reference, got none; use copy, base or an adapter's folder, or loss=simpo"),
    (f"{DPO} snapshot.reference=ema", "once for each completion, so it cannot move"),
    (f"{DPO} {SMALL} snapshot.reference=nowhere",
     "is neither auto, none, base or copy nor an existing folder, got nowhere"),
    (f"{DPO} data=arithmetic", "is a key of rlft"),
    ("resume dpo_run loss.beta=0.2", "resume", "loss.beta: 0.1 -> 0.2"),
    ("resume dpo_run loss=ipo", "resume",
     "loss._target_: rlft.algorithm.preference.Dpo -> rlft.algorithm.preference.Ipo"),
    (f"{RM} token_budget=100", "may have 321 tokens (prompts.max_tokens, max_completion_tokens and an"),
    # Planning
    ("plan +recipe=grpo_arithmetic device_memory=lots", "must be a size, got lots; write it as 24GiB"),
    ("plan device_memory=24", "no device has so few bytes, got 24; write 24GiB"),
    ("chat run=run generation.top_p=5", "must be less than or equal to 1, got 5"),
    ("plan device_memory=0MiB", "no device has so few bytes, got 0MiB; write it as 24GiB"),
    # Sampling
    ("sample keep=above", "min_reward", "is null, and keep=above needs it; set min_reward=1.0, or keep=all"),
    ("sample min_reward=1", "is read by keep=above only, and keep=all, got 1.0; set keep=above, or"),
    ("sample keep=best min_reward=0", "is read by keep=above only, and keep=best, got 0.0"),
    ("sample keep=best max_per_prompt=2", "keep=best keeps one completion of each prompt, got 2"),
    ("sample resume=auto", "starts or continues the run in hydra.run.dir, which is not given"),
    ("sample run=run resume=auto", "starts or continues the run in hydra.run.dir, which is not given"),
    ("sample reward=http reward.http.group_timeout=30", "exceeds scoring.timeout=10"),
    ("sample adapter=critic", "holds the adapter of the role critic, which is not a policy"),
    ("sample run=run", "adapter", "that run has no checkpoint"),
    ("sample -m run=run n=1,2", "command line", "this command has no such option"),
    ("eval run=rm_run", "is a run of rlft rm, which has no policy"),
    # Evaluating
    ("chat run=rm_run", "has no policy, got rm_run; name one of rlft train or rlft sft or rlft dpo"),
    ("eval", "run", "yet; train one first (rlft train +recipe=grpo_arithmetic), or give run=<folder> or model.path="),
    ("chat raw=true", "run", "yet; train one first (rlft train +recipe=grpo_arithmetic), or give run=<folder> or mod"),
    ("eval run=", "is empty"),
    ("eval run=nothing", "there is no such folder"),
    ("eval run=run", "there is no checkpoint in that run yet"),
    ("eval run=done", "no checkpoint in that run, which is finished, got done; name another run, or train it"),
    ("report damaged", "report", "metrics.jsonl cannot be read (Is a directory), got damaged; restore it from a copy"),
    ("eval model.path=/nowhere", "got /nowhere"),
]  # fmt: skip

# What only a library can refuse: it has to read a model's folder, a tokenizer, data in tokens, tensors, or to ask for
# devices.
READ_BY_LIBRARIES = [
    # Environments, data and sweeps
    (f"{TOOLS} environment.tools=[{OWN}.no_types]",
     "cannot be shown as a tool (Argument a is missing a type hint in function no_types), got conversation_tools.no_"),
    (f"{TOOLS} environment.tools=[{OWN}.no_docstring]",
     "because it has no docstring!), got conversation_tools.no_docstring; give it a docstring with an Args: line"),
    ("train environment=calculator", "model.path", "cannot show tools and their answers (calculate is not shown)"),
    ("train environment=calculator", "model.path", "set environment.syntax=json or xml, or use a model with a chat te"),
    ("train data.size=100000000", "there are not that many distinct train problems"),
    (f"{CHOOSES} data.held_out_size=16,32", "got 16 and 32 prompts; give it one value"),
    (f"{CHOOSES} sweep.pruner=median eval.every=4 steps=4", "sweep.pruner",
     "never prunes a trial: its run is not evaluated before the last step, 4, got median; set eval.every below 4"),
    (CHOOSES_K, "vocabulary of"),
    (CHOOSES_K.replace(" sweep=optuna", ""), "vocabulary of"),
    ("train cluster=ray cluster.engines=1 cluster.address=head", "is no address, got head; use"),
    ("train cluster=ray cluster.engines=1 cluster.address=ray://head:10001", "is one of Ray Client"),
    ("train cluster=ray cluster.engines=1 cluster.address=127.0.0.1:1", "no Ray answers there (C"),
    ("plan model.device=cuda device_memory=1GiB cluster.engines=4 cluster.ranks=4 cluster.placement=pairs",
     "an engine and a rank do not fit on one GPU"),
    ("train generation.max_tokens=300", "exceeds the model's context of 512 tokens, got 300"),
    ("train model.path=long_rope prompts.max_tokens=60 generation.max_tokens=41",
     "context of 100 tokens, beyond which its longrope RoPE makes a row depend on its neighbours, got 41; use at"),
    ("train model.path=long_rope prompts.max_tokens=100", "longrope RoPE makes a row depend on"),
    (f"{SFT} model.path=long_rope prompts.max_tokens=60", "max_completion_tokens", "longrope RoPE makes"),
    ("train prompts.max_tokens=4", "4096 of 4096 train prompts are longer"),
    ("train prompts.max_tokens=21 prompts.over_limit=refuse", "prompts.max_tokens", "or set prompts.over_limit=drop"),
    ("train data=jsonl data.path=good.jsonl prompts_per_step=64 dynamic_sampling.max_rounds=2",
     "are in each step, got 2; use a lower prompts_per_step"),
    ("train curriculum.path=missing.jsonl", "there is no such file, got missing.jsonl"),
    ("train curriculum.path=good.jsonl", "is no line of rlft sample with the reward exact_match"),
    ("train data=jsonl data.path=good.jsonl curriculum.running=true prompts_per_step=64",
     "train prompts, of which a step takes different ones, got 64; use at most"),
    # A teacher
    (f"{OPD} algorithm.teacher_in=loss algorithm.top_k=999", "more than the model's vocabulary"),
    (f"{AS_IT_IS} snapshot.teacher_hint='{'so ' * 200}'", "with it the longest row has"),
    ("train algorithm=opd snapshot.teacher=no_tokenizer",
     "got no_tokenizer; the folder needs tokenizer files next to config.json"),
    ("train algorithm=opd snapshot.teacher=no_config", "else download it again"),
    ("train algorithm=opd snapshot.teacher=other_words", "has another vocabulary: 2 other tokens, e.g. '<answer>' is "),
    ("train algorithm=opd snapshot.teacher=fewer_rows",
     "has token ids up to 269, and the student may sample ids up to 271, got fewer_rows"),
    ("train algorithm=opd snapshot.teacher=short", "tokens exceeds its context of 64 tokens"),
    (f"train algorithm=opd {SMALL} snapshot.teacher=deeper", "this base has no module for its"),
    (f"{LARGER} {IN_VLLM} generation.vllm.batch_invariant=true", "on CUDA only"),
    (f"{LARGER} {IN_VLLM} prompts.max_tokens=256 generation.max_tokens=256", "snapshot.teacher",
     "the longest row of 512 tokens and the token that is sampled after it by vLLM exceeds its context of 512 tokens"),
    (f"{PTX} {TEXT} pretrain.max_tokens=600", "the model's context of 512 tokens, got 600; use"),
    (f"train {LEARNED} reward.learned.path=nowhere", "the reward model cannot be read"),
    (f"train {LEARNED} reward.learned.path=three_labels", "another num_labels, got 3; point it"),
    # Adapters of another base
    (f"train {SMALL} lora.path=elsewhere", "made for a base with other files (0123 then, "),
    (f"train {SMALL} lora.path=deeper", f"this base has no module for its tensor {DEEPER}, got deeper; u"),
    (f"train {SMALL} lora.path=wider", f"its tensor {FIRST} is (4, 999), and this base takes (4, "),
    (f"train {SMALL} snapshot.reference=elsewhere", "made for a base with other files (0123"),
    (f"train {SMALL} snapshot.reference=lacking", f"it lacks the tensor {FIRST}, unlike what it"),
    (f"{PPO} {SMALL} critic.init=critic_elsewhere", "made for a base with other files (0123"),
    (f"{PPO} {SMALL} critic.init=critic_wider", f"its tensor {FIRST} is (4, 999)"),
    (f"{PPO} {SMALL} critic.init=long_head", "its head has weight (1, 999), and this base takes (1, "),
    (f"{PPO} {SMALL} critic.init=no_bias", "its head has no bias, and this base takes (1,)"),
    (f"{PPO_SHARED} critic.init=shared_elsewhere", "made for a base with other files (0123"),
    (f"{PPO_SHARED} critic.init=long_head", "its head has weight (1, 999), and this base takes"),
    (f"train {SMALL} {LEARNED} reward.learned.path=critic_elsewhere", "other files (0123"),
    (f"train {SMALL} {LEARNED} reward.learned.path=critic_wider", f"its tensor {FIRST} is (4,"),
    (f"train -m {SMALL} lora.path=policy,wider", "(job 1: "),
    # Adapters that cannot be used as they are
    (f"train {SMALL} lora.target_modules=[q_proj] lora.path=policy",
     f"it has the tensor {FIRST}, unlike what lora.target_modules says, got policy; set 'lora.target_mod"),
    (f"train {SMALL} lora.path=lacking", f"it lacks the tensor {FIRST}, unlike what lora.target_modules"),
    (f"train {SMALL} lora.use_dora=true lora.path=half_dora",
     f"it lacks the tensor {MAGNITUDE}, unlike what lora.target_modules"),
    ("sample data=arithmetic generation=vllm adapter=headed", "adapts lm_head, which vLLM cannot serve"),
    ("train lora.target_modules=[q_proj,lm_head]",
     "the weights of lm_head are those of model.embed_tokens, so that its adapter could not be exported, got "
     "lm_head; use all-linear, or a list of down_proj, "),
    (f"{SFT} lora.target_modules=[lm_head]", "the weights of lm_head are those of model.embed"),
    (f"{RM} \"lora.target_modules='.*(q_proj|head)'\"", "the weights of lm_head are those of m"),
    ("train \"lora.target_modules='.*(q_proj|embed_tokens)'\"", "model.embed_tokens would be a"),
    ("train lora.target_modules=.*self_attn.*", "self_attn would be adapted, too, which is no"),
    (f"sample data=arithmetic {ADAPTERS} adapter=half_dora",
     "is a DoRA adapter, which vLLM cannot serve, got half_dora; use generation=transformers"),
    (f"train {SMALL} snapshot.reference=torn_layers", "PEFT does not take its adapter_config.js"),
    (f"train {SMALL} snapshot.reference=with_base",
     "its tensor base_model.model.lm_head.weight is not LoRA's, and would be written into the base, which all "
     "roles share, got with_base; save it again with"),
    (f"train {SMALL} lora.path=torn", "the adapter cannot be read"),
    # Sampling that the trainer's log-probs are not of, and stops that never come
    ("train generation.stop=[272]", "is not a token id of the model, which has 272, got 272; use 0"),
    ("train \"generation.stop=['<|im_start|>']\"", "holds the special token <|im_start|>, which"),
    # The machine
    ("train generation=vllm generation.vllm.share_base=true",
     "cannot hold one copy: vLLM lays out weights in its own way on cpu, got true; set"),
    (f"{SFT} data=arithmetic {COPY} generation.vllm.share_base=true",
     "those of the policy (generation.vllm.weights=copy), got true; set"),
    (f"plan {CARD} model.quantization=4bit {COPY}", "the trainer's base is quantised, got copy; set weights=adapter"),
    ("train generation=vllm generation.vllm.batch_invariant=true",
     "on CUDA only, and model.device is cpu, got true; set it to false"),
    (f"plan {CARD} generation=vllm model.dtype=float32 generation.vllm.share_base=true",
     "the base has 32 bits, not 16, got true; set it to auto"),
    ("train model.device=cuda", "there is no CUDA device here, got cuda"),
    ("train model.quantization=4bit", "4-bit weights need a CUDA device"),
    ("train trainer.optimizer=adamw8bit", "8-bit AdamW needs a CUDA device, got adamw8bit; use adamw or muon"),
    ("train model.attn_implementation=flash", "is not known to transformers"),
    ("train lora.target_modules=[q_proj,k_prj]", "got k_prj; use all-linear, or a list of d"),
    ("train cluster.ranks=3 cluster.sequence_ranks=3",
     "does not divide the attention of a qwen2 (4 heads, 2 of keys), got 3; use one of 1, 2, 4"),
    ("train lora.target_modules=qproj", "the model has no linear layer of that name, got qproj"),
    # of a folder that also sees, the text model alone is trained
    ("train model.path=sees lora.target_modules=[q_proj,fc1]", "no linear layer of that name"),
    ("train model.path=sees lora.target_modules='.*vision_tower.*'", "no linear layer of that"),
    ("train model.path=sees lora.target_modules='model.layers.0.*'", "would be adapted, too"),
    ("train model.path=only_sees lora.target_modules=[q_proj]", "model.path",
     "transformers has no class of causal language models for a siglip"),
    # mixtures of experts
    ("train lora.experts=true", "has no experts, got true; leave it out"),
    (f"{SFT} lora.router=true", "has no routers, got true; leave it out"),
    ("train model.path=mixture lora.experts=true lora.dropout=0.1", "got 0.1; set it to 0, or lora.e"),
    ("train model.path=mixture lora.router=true lora.use_dora=true", "or lora.router=false"),
    ("train model.path=mixture_of_both lora.use_dora=true", "PEFT takes the MLPs of a deepseek_v3"),
    ("train model.path=mixture lora.target_modules=[gate]",
     "names no layer that an adapter can learn on: it is a router of experts, and lora.router is false, got "
     "gate; use all-linear, or a list of k_proj, o_proj, q_proj, v_proj"),
    ("train model.path=mixture lora.target_modules=[w1]", "no linear layer of that name, got"),
    ("train model.path=mixture_of_llama lora.experts=true", "adapters of experts are not supported"),
    ("train model.path=mixture_of_llama lora.router=true", "cannot learn: no gradient reaches it from"),
    ("train snapshot.routing=old", "has no experts, got old; set it to free"),
    ("train model.path=mixture_of_llama snapshot.routing=engine",
     "the way in which a llama4_text chooses experts is not known to rlft, got engine; set i"),
    (f"train model.path=mixture {SCRIPTED} snapshot.routing=engine",
     "the scripted engine does not say which experts it chooses, got engine; use old, or gen"),
    (f"train model.path=mixture {ADAPTERS} model.device=cpu", "generation.engine",
     "vLLM on a cpu computes no adapters on a model with experts, got vLLM; use generation=trans"),
    (f"train {LEARNED} reward.learned.path=renamed", "holds a causal language model (Qwen2Fo"),
    ("train model.path=encoder", "a bert is an encoder, which also reads"),
    ("train model.path=encoder", "use a causal"),
    ("sft demonstrations.path=foreign.jsonl model.path=t5", "a t5 is an encoder-decoder"),
    ("train data=jsonl data.path=empty.jsonl", "holds no data"),
    ("train reward=reasoning_gym", "reward.reasoning_gym", "scores prompts of data=reasoning_gym only"),
    ("train data=jsonl data.path=good.jsonl reward=choice", "reward.choice", "answers are not right by themselves"),
    ("train data=jsonl data.path=good.jsonl reward=choice", "reward.choice", "with data.allow_unscorable=true"),
    ("sample data=jsonl data.path=good.jsonl reward=choice", "reward.choice", "is not a letter"),
    (f"{SFT} data=jsonl data.path=good.jsonl reward=choice", "reward.choice", "reference answers are not right by the"),
    ("resume changed", "data.path", "data changed since the run began"),
    ("train -m model.device=cpu,cuda", "(job 1: model.device=cuda)"),
    ("train -m generation.max_tokens=100,300", "context of 512 tokens (job 1: "),
    ("train prompts.max_tokens=600", "context of 512 tokens, got 600"),
    ("train prompts.max_tokens=512", "for instance to 256, and generation.max_tokens to 256"),
    # Commands that train otherwise
    ("sft demonstrations.path=embedded:arithmetic-demonstrations", "max_completion_tokens", "of 512 tokens, got 1024"),
    (f"{SFT} examples_per_step=2000", "demonstrations to train on, got 2000; use at most 9"),
    (f"{SFT} prompts.over_limit=refuse prompts.max_tokens=20", "max_completion_tokens", "demonstrations exceed pro"),
    (f"{ALL} model.path=mixture generation=vllm", "generation.engine", "vLLM does not take all weights of a model"),
    (f"{ALL} generation.transformers.weights=merged_int8", "got merged_int8; leave"),
    ("resume sft_run demonstrations.path=demonstrations.jsonl", "changed since the run began"),
    ("resume sft_changed", "demonstrations.path", "the demonstrations changed since the run began"),
    ("dpo preferences.path=identical.jsonl max_completion_tokens=64", "preferences.path",
     "no prompt has two different completions with different scores"),
    ("dpo preferences.path=foreign.jsonl max_completion_tokens=64", "preferences", "with another tokenizer (0123)"),
    (f"{DPO} rankings_per_step=2000", "rankings to train on, got 2000; use at most 9"),
    (f"{RM} {REPLAY}=embedded:arithmetic-preferences rankings_per_step=4", "replay.fraction",
     "gives the replay none of the 4 rankings of an update, got 0.1"),
    (f"{RM} {SMALL} lora.path=long_head", "its head has weight (1, 999), and this base takes (1, 128)"),
    ("train +recipe=grpo_arithmetic reward=code", "reward.code.tests_field", "holds no tests, got null; fix these"),
    ("sample adapter=elsewhere", "it was made for a base with other files (0123"),
]  # fmt: skip

# The same without these packages.
NOT_INSTALLED = [
    ("uvicorn", SERVE, "serve", "needs uvicorn, which is not installed; "),
    ("optuna", CHOOSES, "sweep", "pip install 'rlft[sweep]'"),
    ("vllm", f"{LARGER} {IN_VLLM}", "or use snapshot.teacher_engine=transformers"),
    ("vllm", "train generation=vllm", "generation.engine", "vLLM is not installed"),
    ("flash_attn kernels", f"{ATTENDS}=flash_attention_2",
     "flash-attn is not installed, got flash_attention_2; use auto or sdpa"),
    ("flash_attn_interface kernels", f"{ATTENDS}=flash_attention_3", "flash-attn-3 is not installed"),
    ("wandb", "train logger=wandb", "logger.wandb", pip_install("rlft[wandb]")),
    ("trackio", "train logger=trackio", "logger.trackio", pip_install("rlft[trackio]")),
    ("reasoning_gym", "train reward=reasoning_gym data=reasoning_gym", pip_install("rlft[reasoning-gym]")),
]  # fmt: skip

PACKAGE = "# @package _global_\n"
FILES = {
    "file": "not a folder",
    "empty.jsonl": "\n",
    "array.json": json.dumps(["a"], indent=1),
    "broken.jsonl": '{"prompt": "What is 0 + 1?", "answer": "2"}\n{oops',
    "other.jsonl": json.dumps({"sum": "1 + 1?", "answer": "2"}),
    "study/sweep.yaml": "{}",
    "jobs/0/config.yaml": "{}",
    "loose.yaml": f"{PACKAGE}# In no folder named recipe.\nseed: 1\n",
    "mine/reward/mine.yaml": "# Not there.\nmine:\n  _target_: not_there.reward\n  weight: 1.0\n",
    "mine/reward/flat.yaml": "# No name.\n_target_: mine.flat\nweight: 1.0\n",
    "mine/recipe/no_package.yaml": "# Forgot the package.\nseed: 1\n",
    "mine/recipe/bad_yaml.yaml": f"{PACKAGE}# Unfinished.\nseed: [1\n",
    "mine/recipe/lines.yaml": f"{PACKAGE}# A list.\n- seed\n",
    "mine/recipe/dangling.yaml": f"{PACKAGE}# Refers to nothing.\nseed: ${{nothing}}\n",
    "mine/recipe/with_console.yaml": f"{PACKAGE}defaults:\n  - override /logger: [console, jsonl]\n",
    "mine/recipe/with_keys.yaml": f"{PACKAGE}logger:\n  console:\n    live: false\n",
    "bell/recipe/rings.yaml": f"{PACKAGE}# Rings.\nname: a\a\n",
    "folded/recipe/nested.yaml/inner.yaml": "# In a folder that is named like a file.\n",
    "hiding/reward/format.yaml": "# Would never be read.\nformat:\n  weight: 3.0\n",
    "latin/recipe/old.yaml": f"{PACKAGE}# \xff.\nseed: 1\n",  # no UTF-8
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory, backbone, tiny_path):
    """What the rows find where they run: files, YAML of a user's own, runs that were begun, models and adapters."""
    folder = tmp_path_factory.mktemp("templates")
    numbers = range(40)
    rows = {
        "good.jsonl": [{"prompt": f"What is {i} + 1?", "answer": "2"} for i in numbers],
        "demonstrations.jsonl": [{"prompt": f"{i} + 1?", "completion": f"{i + 1}"} for i in numbers],
        "identical.jsonl": [{"prompt": f"{i}?", "chosen": "x", "rejected": "x"} for i in numbers],
        "foreign.jsonl": [sampled(i, reward) for i in numbers for reward in (0.0, 1.0)],
    }
    for name, text in (FILES | {name: "\n".join(map(json.dumps, lines)) for name, lines in rows.items()}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="latin-1")
    demonstrations = "sft max_completion_tokens=64 examples_per_step=4 demonstrations.path="
    begun = {
        "run": "train",
        "changed": f"train data=jsonl data.path={folder}/good.jsonl",
        "sft_run": f"{demonstrations}embedded:arithmetic-demonstrations",
        "sft_changed": f"{demonstrations}{folder}/demonstrations.jsonl",
        "rm_run": RM,
        "dpo_run": DPO,
    }
    for name, typed in begun.items():
        command, *overrides = typed.split()
        plain = compose(overrides, command=command)
        (folder / name).mkdir()
        run_folder.write_config(folder / name, plain, resolve(plain).plan().fingerprints)
    for name in ("good.jsonl", "demonstrations.jsonl"):
        (folder / name).write_text((folder / name).read_text().partition("\n")[2])
    for name in ("done", "damaged", "saved_run"):
        shutil.copytree(folder / "run", folder / name)
    (folder / "done" / "status.json").write_text(json.dumps({"status": "finished", "steps": 2}))
    (folder / "damaged" / "metrics.jsonl").mkdir()
    for step in (1, 2):
        (folder / "saved_run" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    save_adapters(folder, backbone)
    save_models(folder, tiny_path)
    return folder


def sampled(number, reward):
    """A line of `rlft sample` by a model with another tokenizer."""
    prompt = Prompt(id=str(number), messages=({"role": "user", "content": f"{number}?"},), answer="")
    said = Completion(text="x", token_ids=(7, int(reward)), logprobs=(0.0, 0.0), finish_reason=FinishReason.stop)
    rollout = Rollout(prompt=prompt, completion=said, policy_version=0)
    return sampled_line(rollout, index=0, rewards={}, reward=reward, model="other", tokenizer="0123")


def save_models(folder, tiny_path):
    """Copies of the embedded model that something is wrong with, and configs of other kinds of models."""
    for name in ("renamed", "other_words", "short", "fewer_rows", "no_tokenizer", "no_config", "long_rope"):
        shutil.copytree(tiny_path, folder / name)
    (folder / "no_tokenizer" / "tokenizer_config.json").write_text("{")
    (folder / "no_config" / "config.json").write_text("{")
    tokenizer = folder / "other_words" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"<answer>"', '"<solution>"'))
    edit_json(folder / "short" / "config.json", {"max_position_embeddings": 64})
    edit_json(folder / "fewer_rows" / "config.json", {"vocab_size": 270})
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 100}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    edit_json(folder / "long_rope" / "config.json", {"rope_parameters": rope})
    BertConfig().save_pretrained(folder / "encoder")
    T5Config().save_pretrained(folder / "t5")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    AutoConfig.for_model("gemma3", text_config=sizes, vision_config=sizes).save_pretrained(folder / "sees")
    AutoConfig.for_model("siglip_vision_model", **sizes).save_pretrained(folder / "only_sees")
    few = {"vocab_size": 272, **sizes, "num_key_value_heads": 2, "num_local_experts": 2, "pad_token_id": 0}
    for name, kind in (("", "mixtral"), ("_of_llama", "llama4_text"), ("_of_both", "deepseek_v3")):
        AutoConfig.for_model(kind, **few).save_pretrained(folder / f"mixture{name}")
    classifier = LlamaConfig()
    classifier.num_labels = 3
    classifier.save_pretrained(folder / "three_labels")


def save_adapters(folder, backbone):
    """`policy`, `critic` and `shared` (a head alone) as a run saves them, and copies that something is wrong with."""
    config = build(compose(["lora.rank=4", "lora.alpha=8", "critic.kind=adapter"]))
    roles = Roles(backbone, config.lora, config.snapshot, config.critic, temperature=1.0, token_budget=99, seed=0)
    with contextlib.closing(roles):
        head = roles.heads["critic"].weights()
        saved = Checkpoint(
            step=1,
            adapters={"policy": roles.weights("policy"), "critic": roles.weights("critic")},
            adapter_config=roles.adapter_config(),
            optimizer={},
            state={"base_fingerprint": fingerprint(config.model)},
            heads={"critic": head, "shared": head},
        )
    checkpoint.save(folder / "checkpoints", saved, keep=1)
    (folder / "checkpoints" / "step_000001").rename(folder / "saved")
    for role in ("policy", "critic", "shared"):
        (folder / "saved" / role).rename(folder / role)

    def spoil(source: str, name: str, **fields: Any) -> Path:
        """A copy of an adapter folder with other fields in its adapter_config.json."""
        shutil.copytree(folder / source, folder / name)
        if fields:
            edit_json(folder / name / "adapter_config.json", fields)
        return folder / name

    for source, name in (("policy", "elsewhere"), ("critic", "critic_elsewhere"), ("shared", "shared_elsewhere")):
        edit_json(spoil(source, name) / "rlft.json", {"base_fingerprint": "0123"})
    weights, wide, two = "adapter_model.safetensors", torch.zeros(4, 999), torch.zeros(2, 2)
    for source, name, file, tensors in (
        ("policy", "wider", weights, {FIRST: wide}),
        ("critic", "critic_wider", weights, {FIRST: wide}),
        ("policy", "deeper", weights, {DEEPER: torch.zeros(4, 128)}),
        ("policy", "lacking", weights, {FIRST: None}),
        ("policy", "with_base", weights, {"base_model.model.lm_head.weight": two}),
        ("critic", "long_head", "head.safetensors", {"weight": torch.zeros(1, 999)}),
        ("critic", "no_bias", "head.safetensors", {"bias": None}),
    ):
        edit_tensors(spoil(source, name) / file, tensors)
    (spoil("policy", "unrecorded") / "rlft.json").unlink()  # as another program saves it
    spoil("policy", "rslora", use_rslora=True)
    spoil("policy", "half_dora", use_dora=True)  # without the magnitudes
    spoil("policy", "biased", bias="all")
    spoil("policy", "loha", peft_type="LOHA")
    spoil("policy", "pissa", init_lora_weights="pissa")
    spoil("critic", "critic_loftq", init_lora_weights="loftq")
    spoil("policy", "alora", alora_invocation_tokens=[5, 6])
    spoil("policy", "newer", shiny_scale=1.5, shiny_option=None)
    spoil("policy", "experts", target_parameters=["mlp.experts.down_proj"])
    spoil("policy", "routed", target_parameters=["mlp.gate.weight"])
    spoil("policy", "no_alpha", lora_alpha=None)
    spoil("policy", "torn_layers", layers_to_transform=None, layers_pattern="layers")
    spoil("policy", "headed", target_modules=["q_proj", "lm_head"])
    spoil("critic", "critic_patterns", alpha_pattern={"q_proj": 16})
    torn = spoil("policy", "torn") / weights
    torn.write_bytes(torn.read_bytes()[:-1])


def edit_json(file, changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(file, changes):
    tensors = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@pytest.fixture
def workplace(templates, monkeypatch):
    """A folder to run in, without network, accelerator or weights; what a command does to the process is undone."""
    monkeypatch.chdir(templates)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def load(*args: object, **keys: object) -> None:
        pytest.fail("weights were loaded")

    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        monkeypatch.setattr(kind, "from_pretrained", load)
    monkeypatch.setattr(adapter_folder, "load_file", load)
    hub_answers.cache_clear()
    return templates


def everything_in(folder):
    """Its folders and files, in a fifth of the time of `Path.rglob`."""
    return sorted((place, sorted(folders), sorted(files)) for place, folders, files in os.walk(folder))


def problem_of(row, code, err, out, is_clean):
    """What is wrong with how a row was refused; empty if nothing is."""
    key = row[1] if len(row) > 2 else shlex.split(row[0])[-1].partition("=")[0]
    # A sweep whose first job is right has said how many there are.
    err = re.sub(r"^rlft \w+ -m: \d+ configs to check \.\.\n", "", err)
    if code != 2 or not err.startswith(f"rlft: {key}: ") or row[-1] not in err:
        return f"{code}, {err}"
    if not re.fullmatch(r"rlft: [^:]+: .+; \S.+\n", err):
        return f"it does not say in one line what is wrong and what to do: {err}"
    return f"it says something else, too: {out}" if out else "" if is_clean else "something is left behind"


@pytest.mark.parametrize("part", [0, 1])
def test_a_mistake_in_what_libraries_read_is_refused_in_a_line_that_helps(part, workplace, monkeypatch, capsys):
    monkeypatch.setattr("rlft.commands.launch.check_whole", lambda *_, **__: None)  # some folders have a config alone
    monkeypatch.setattr("rlft.logger.console.show_rows", lambda *_, **__: None)  # what the config says is shown before
    wrong, missing, find_spec = {}, "", importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in missing.split() else find_spec(name, *a)
    )
    before = everything_in(workplace)
    for missing, *row in [*(("", *row) for row in READ_BY_LIBRARIES), *NOT_INSTALLED][part::2]:  # noqa: B007
        hub_answers.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", list(sys.path))
            code = cli.run(shlex.split(row[0]))
        told = capsys.readouterr()
        is_clean = everything_in(workplace) == before and not GlobalHydra.instance().is_initialized()
        if problem := problem_of(tuple(row), code, told.err.replace(f"{workplace}/", ""), told.out, is_clean):
            wrong[row[0]] = problem
    assert wrong == {}


ACCEPTED = [
    "reward.exact_match.answer_in=pattern \"reward.exact_match.pattern='Answer: \\\\[([0-9]+)'\"",
    "algorithm=ppo critic.kind=adapter group_size=1",
    "algorithm=a2c critic.kind=shared group_size=1",
    "algorithm=reinforce algorithm.baseline=none group_size=1",
    "algorithm=grpo_process reward=[exact_match,equations]",
    f"algorithm=ppo_ptx critic.kind=adapter {TEXT}",
    f"algorithm=grpo {TEXT}",  # only measured
    "snapshot.reference=ema snapshot.ema_decay=0.99",
    "algorithm=ppo_penalty critic.kind=adapter minibatches=2",
    "snapshot.old=copy algorithm=rloo algorithm.kl_coef=0.1 snapshot.reference=base",
    "snapshot.old=sampled algorithm=rloo algorithm.kl_coef=0.1 snapshot.reference=base",
    "algorithm.kl_coef=0.1 algorithm.kl_to=old algorithm.kl_estimator=exact snapshot.old=copy minibatches=2",
    "algorithm.kl_estimator=exact snapshot.old=sampled algorithm.kl_coef=0.1 snapshot.reference=base",
    f"{LEARNED} {REFRESH}",
    f"{LEARNED} {REFRESH} {SMALL} reward.learned.path=critic",
    f"{SMALL} lora.path=policy snapshot.reference=policy",
    "algorithm.kl_coef=0.1 snapshot.reference=policy",  # of another rank than the run's
    "algorithm=opd snapshot.teacher=policy",
    f"{SMALL} lora.path=unrecorded",
    "lora.rank=4 lora.alpha=16 snapshot.reference=rslora",
    f"{SMALL} lora.path=rslora lora.use_rslora=true",
    "lora.use_dora=true lora.use_rslora=true",
    "\"generation.stop=['</answer>']\" generation.include_stop_str_in_output=true",
    "\"generation.stop=[0,271,';']\"",
    f"algorithm=ppo critic.kind=adapter critic.init=critic {SMALL}",
    "algorithm=ppo critic.kind=shared critic.init=shared",
    "algorithm=ppo critic.kind=shared critic.init=critic",  # its head alone
    f"algorithm=ppo critic.kind=adapter critic.init=reward {LEARNED} reward.learned.path=critic {SMALL}",
    f"{SMALL} lora.path=policy model.path=renamed",
    "eval.kl_base=true eval.temperature=1",
    "eval.kl_base=true eval.temperature=0 eval.every=0",
    "algorithm=opd snapshot.teacher=base algorithm.reward_coef=1",  # a teacher that equals the policy at first holds it
    "algorithm=opd snapshot.teacher=base algorithm.entropy_coef=0.01",
    # rewards are only measured
    "algorithm=opd snapshot.teacher=base snapshot.teacher_hint=x reward.exact_match.weight=0 reward.format.weight=0",
    "algorithm=opd snapshot.teacher=base resume=run",  # the policy is what its checkpoints hold
    f"algorithm=opd {SMALL} lora.path=policy snapshot.teacher=base",
    f"algorithm=opd {SMALL} lora.path=policy snapshot.teacher=policy snapshot.teacher_hint=x",
]


def test_what_only_looks_like_a_mistake_is_planned(workplace):
    for typed in ACCEPTED:
        notes = resolve(compose(shlex.split(typed))).plan().notes
        assert all("all of its lora_B are 0" in note for note in notes), (typed, notes)  # adapters nothing has trained


HARDLY_MEANT = [
    ("algorithm=gspo algorithm.clip_high=0.2 epochs=2", "the paper's are clip_low=3e-4 clip_high=4e-4"),
    ("algorithm=ppo_penalty critic.kind=adapter",
     "have no effect, got 1.0, loss, adaptive, 0.01; they act with several updates a step (epochs or"),
    ("algorithm=dapo",
     "algorithm.clip_high: has no effect, got 0.28; it acts with several updates a step (epochs or minibatches"),
    ("algorithm.kl_gain=0.2", "algorithm.kl_gain: has no effect, got 0.2; it acts with algorithm.kl_coef above 0 and"),
    ("algorithm=gdpo reward.format.weight=0",
     "algorithm.reward_aggregation: normalises several rewards one by one, and there is one that counts, got"),
    ("algorithm=opd snapshot.teacher=base algorithm.reward_coef=1 dynamic_sampling.max_rounds=2",
     "dynamic_sampling.max_rounds: also replaces groups of equal rewards, by whose tokens a teacher teaches"),
    ("generation.top_p=0.9", "generation.top_p: leaves out unlikely tokens that the trained policy could"),
    ("generation.top_k=5", "got 5; use generation.top_p=1 generation.top_k=0"),
    ("prompts_per_step=5000", "prompts_per_step: there are only 4096 train prompts"),
    ("eval.num_prompts=500", "eval.num_prompts: there are only 256 held-out prompts"),
    # 16 prompts x 8 are fewer than the 256 completions that the engine computes together.
    ("generation=transformers cluster.engines=4",
     "cluster.engines: only 1 of them will have something to sample: the transformers engine computes 256 completions "
     "of a step together, got 4; use generation.transformers.batch_size=32"),
    ("generation=transformers cluster.engines=3 prompts_per_step=2 generation.transformers.batch_size=8",
     "only 2 of them will have something to sample: a step has 2 prompts, got 3; raise prompts_per_step, or use"),
]  # fmt: skip


def test_what_is_hardly_ever_meant_is_said_and_goes_on(workplace):
    for typed, fragment in HARDLY_MEANT:
        [warning] = resolve(compose(shlex.split(typed))).plan().notes
        assert fragment in warning, typed


# -- before torch is imported ------------------------------------------------------------------------------------------
HEAVY = ("torch", "transformers", "datasets", "vllm", "peft", "accelerate")
WITHOUT_LIBRARIES = f"""
import json, os, shlex, sys
from without_libraries import Imported, forbid
forbid(*{HEAVY})
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from rlft import cli
import composed_once
composed_once.install()
from rlft.commands import launch
launch.check_whole = lambda *_, **__: None  # some folders have a config alone
lines = []
{inspect.getsource(everything_in)}
before = everything_in(".")
for typed in json.loads(sys.stdin.read()):
    argv, path = sys.argv, list(sys.path)
    with redirect_stderr(StringIO()) as told, redirect_stdout(StringIO()) as out:
        try:
            code = cli.run(shlex.split(typed))
        except Imported as wanted:
            code = f"imports {{wanted}}"
    sys.argv, sys.path[:] = argv, path
    lines.append([code, told.getvalue(), out.getvalue(), everything_in(".") == before])
assert not set({HEAVY}) & sys.modules.keys()
print(json.dumps(lines))
"""


def test_a_mistake_in_the_config_is_refused_in_a_line_that_helps_before_a_library_is_imported(templates):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES],
        cwd=templates,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent / "helpers")])},
        input=json.dumps([row[0] for row in TABLE]),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = zip(TABLE, json.loads(done.stdout), strict=True)
    wrong = {
        row[0]: problem
        for row, (code, err, out, is_clean) in found
        if (problem := problem_of(row, code, err.replace(f"{templates}/", ""), out, is_clean))
    }
    assert wrong == {}, "imports mean: the row belongs into READ_BY_LIBRARIES, or a check comes too late"
