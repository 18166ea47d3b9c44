"""Every mistake a user can fix is refused with exit code 2, in a line that helps, before any weight is loaded."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
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
from rlft.model.backbone import Backbone, fingerprint
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

# What is typed after `rlft`, the key its refusal begins with, and a part of the refusal. The rows run in a folder that
# `templates` filled: see there for `mine`, `run`, `file`, the .jsonl files and the adapters.
TABLE = [
    # Commands
    ("stf +recipe=sft_arithmetic", "stf", "did you mean rlft sft?"),
    ("train +recipe=sft_arithmetic", "+recipe", "is for rlft sft, got sft_arithmetic; write rlft sft +recipe=sft_ari"),
    ("rm +recipe=rm_arithmetik", "+recipe", "did you mean rm_arithmetic?"),
    ("sft group_size=4", "group_size", "is a key of rlft train, and not of this command, got 4; leave it out here"),
    ("sft algorithm=grpo", "algorithm", "is a key of rlft train"),
    ("sample critic.kind=adapter", "critic.kind", "is a key of rlft train"),
    ("sft demonstration.path=x", "demonstration.path", "did you mean demonstrations"),
    ("sft demonstrations=jsnl", "demonstrations", "did you mean jsonl?"),
    (f"{SFT} command=train", "command", "this is rlft sft, got train; leave it as it is"),
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
    ("algorithms grpo steps=3", "steps", "is not a key of rlft algorithms, got steps=3"),
    ("algorithms algorithm=gspo", "algorithm", "named without its group here, got gspo; write rlft algorithms gspo"),
    ("algorithms algorithm.kl_coef=1", "algorithm.kl_coef", "none is named, got algorithm.kl_coef=1; write rlft alg"),
    ("algorithms grpo algorithm.kl_coff=1", "algorithm.kl_coff", "no such key, got 1; did you mean algorithm.kl_coef?"),
    ("algorithms grpo algorithm.kl_coef=-1", "algorithm.kl_coef", "must be greater than or equal to 0, got -1"),
    ("algorithms grpo -m", "command line", "this command has no such option"),
    ("algorithms grpo --jsn", "command line", "there is no such option, got --jsn"),
    ("algorithms --config-dir nowhere", "--config-dir", "there is no such folder, got nowhere"),
    ("audit", "audit", "takes one run; write rlft audit <run>"),
    ("audit a b", "audit", "takes one run, got a b; write rlft audit <run>"),
    ("audit nowhere", "run", "there is no such folder, got nowhere; rlft runs lists all runs"),
    ("audit mine", "run", "has no chain.jsonl that can be read (No such file or directory)"),
    ("audit nowhere replay=x", "replay", "must be a number of steps, got x; try replay=1"),
    ("audit nowhere recompute=", "recompute", "must be a number of steps; try recompute=16"),
    ("diff run run at=first", "at", "is not one of its choices, got first; choose one of common, last"),
    ("diff", "diff", "compares two runs, got "),
    ("diff one", "diff", "compares two runs, got "),
    ("diff one two three", "diff", "compares two runs, got "),
    ("doctor lora.rank=0", "lora.rank", "must be greater than 0, got 0; "),
    ("doctor +recipe=sft_arithmetic", "+recipe", "for rlft sft, and a run of rlft train is tried, got sft_ari"),
    ("report nowhere", "report", "there is no such folder, got nowhere"),
    ("report x to=y.html", "to", "is not a key of rlft report, got y.html; use out="),
    ("report run --json", "command line", "there is no such option, got --json; use --help"),
    ("reward", "reward", "needs a word for what to do; write rlft reward try"),
    ("reward +recipe=grpo_arithmetic", "reward", "needs a word for what to do; write rlft reward try"),
    ("reward tri", "tri", "there is no such command; did you mean rlft reward try?"),
    ("reward score", "score", "there is no such command; use rlft reward try"),
    (f"{TRY} row=4", "row", "there is no such key, got 4; did you mean rows?"),
    (f"{TRY} rows=0", "rows", "must be a number of rows of the data, at least 1, got 0; try rows=4"),
    (f"{TRY} rows=all", "rows", "must be a number of rows of the data, at least 1, got all; try rows=4"),
    ("reward try +recipe=sft_arithmetic", "+recipe", "is for rlft sft, and a run of rlft train is tried"),
    (f"{TRY} reward=[learned] reward.learned.path=mine", "reward", "be tried without weights, got ['learned']; "),
    (f"{TRY} environment=calculator", "environment", "holds conversations, and single completions are tried here"),
    (f"{TRY} reward.exact_match.numerc=true", "reward.exact_match.numerc", ""),
    (f"{TRY} reward=[exact_match] reward.exact_match.weight=high", "reward.exact_match.weight", ""),
    ("runs nowhere", "runs", "there is no such folder, got nowhere; "),
    ("runs . status=asleep", "status", "is not one of its choices, got asleep; choose one of running, finished"),
    ("runs . command=traine", "command", "is not one of its choices, got traine; did you mean train? All: dpo, rm"),
    ("runs . sort=luck", "sort", "is not one of its choices, got luck; choose one of age"),
    ("runs stat=killed", "stat", "is not a key of rlft runs, got killed; use status="),
    (f"runs {'x' * 300}=1", "x" * 300, "is not a key of rlft runs, got 1; use status="),
    ("runs --all", "command line", "there is no such option, got --all; use --json or --help"),
    (f"{SERVE} serve.port=70000", "serve.port", "less than or equal to 65535"),
    (f"{SERVE} serve.prot=1", "serve.prot", "there is no such key"),
    (f"{SERVE} port=1", "port", "no such key, got 1; did you mean serve.port?"),
    (f"{SERVE} environment.port=1", "environment.port", "is not read by rlft serve, wh"),
    (f"{SERVE} +environment=tools", "environment", "is not read by rlft serve"),
    (f"{SERVE} serve.token=short", "serve.token", "cannot stand in a header, got ***"),
    (f"{SERVE} serve.requests=0", "serve.requests", "must be greater than 0"),
    (f"{SERVE} serve.syntax=yaml", "serve.syntax", ""),
    ("serve serve.port=0", "run", "is missing: there is no model to serve"),
    ("serve run=mine", "run", ""),
    (SERVE, "serve", "needs uvicorn, which is not installed; ", "uvicorn"),
    ("watch", "watch", "there is no run below ", "train one first (rlft train +recipe=grpo_arithmetic), or name a run"),
    ("watch a b", "watch", "takes one run, got a b; write rlft watch runs/<name>/<time>"),
    ("report", "report", "there is no run below "),
    ("watch nowhere", "watch", "there is no such folder, got nowhere"),
    ("watch nowhere --json", "command line", "there is no such option, got --json; use --help"),
    ("watch a=b", "a", "is not a key of rlft watch, got b; use price="),
    ("watch nowhere price=cheap", "price", "must be an amount per hour, got cheap; write it as 2.5/h or 2.5EUR/h"),
    # Environments
    ("train environment=none", "environment", "got none; write environment=null for none"),
    ("train environment=tools", "environment.tools", "has no value yet; give environment.tools=<value> (importable f"),
    ("train environment=tools environment.tools=[]", "environment.tools", "is empty, so there is nothing to call"),
    ("train environment=tools environment.tools=[nothere.x]", "environment.tools", "cannot be imported (ModuleNot"),
    (f"train environment=tools environment.tools=[{OWN}.no_types] environment.syntax=json", "environment.tools",
     "cannot be shown as a tool (Argument a is missing a type hint in function no_types), got conversation_tools.no_"),
    (f"train environment=tools environment.tools=[{OWN}.no_docstring] environment.syntax=json", "environment.tools",
     "because it has no docstring!), got conversation_tools.no_docstring; give it a docstring with an Args: line"),
    (f"train environment=tools environment.tools=[{OWN}.add,{OWN}.add]", "environment.tools", "two tools are called"),
    (f"train environment=class environment.factory={OWN}.NoReset", "environment.factory",
     "is a class without reset, got conversation_tools.NoReset; give it a method reset(self, **row)"),
    (f"train environment=class environment.factory={OWN}.NeedsArguments", "environment.factory",
     "needs the arguments sides, and it is made without any"),
    (f"train environment=game environment.factory={OWN}.Counter", "environment.factory", "is a class without step"),
    ("train environment=calculator", "model.path", "cannot show tools and their answers (calculate is not shown)"),
    ("train environment=calculator", "model.path", "set environment.syntax=json or xml, or use a model with a chat te"),
    ("train environment=calculator environment.turn_tokens=300", "environment.turn_tokens",
     "is more than all turns have together (generation.max_tokens=256), got 300; set it to 256 or less"),
    ("train environment=calculator environment.timeout=3", "environment.timeout",
     "is less than a single call may take (environment.call_timeout=10), got 3; raise it to 10 or more"),
    ("train environment=calculator prompts.style=raw", "prompts.style", "has no turns"),
    ("train environment=calculator environment.timeout=9999 cluster.engines=1", "environment.timeout",
     "is taken for dead, got 9999; lower it, or raise cluster.timeout above 9999"),
    ("train environment=calculator environment.syntax=yaml", "environment.syntax", "got 'yaml'"),
    ("train environment=calculator environment.wrokers=1", "environment.wrokers", "did you mean environment.workers?"),
    ("train environment.workers=1", "environment.workers", "the environment chosen here has no such key, got 1;"),
    ("train environment=endpoint", "environment.agent", "is missing; give environment.agent=mine.play, a function, or"),
    (f"train environment=endpoint environment.agent={AGENTS}.once environment.command=[sh]", "environment.agent",
     "stands next to environment.command"),
    (f"train environment=endpoint environment.agent={AGENTS}.no_key", "environment.agent", "has no parameter api_key"),
    (f"train environment=endpoint environment.agent={AGENTS}.ADD", "environment.agent", "is not callable, got"),
    ("train environment=endpoint environment.command=[]", "environment.command", "is empty, got []; give a program"),
    ("train environment=endpoint environment.command=[no-such-program]", "environment.command",
     "there is no such program, got no-such-program; name an executable of PATH, or its path"),
    (f"train environment=endpoint environment.agent={AGENTS}.once cluster.engines=1", "cluster.engines",
     "agents of environment=endpoint speak to the engine of the run's own process, got 1; set it to 0"),
    (f"train environment=endpoint environment.agent={AGENTS}.once environment.port=70000", "environment.port",
     "less than or"),
    ("train environment=mcp environment.command=[]", "environment.command", "environment.command=[python,server.py]"),
    ("train environment=mcp environment.command=[no-such-program]", "environment.command",
     "there is no such program, got no-such-program; "),
    ("train environment=mcp environment.command=[sh] +environment.env.PORT=5", "environment.env",
     "must be a string, got {'PORT': 5}"),
    # Misspelt groups, choices and keys
    ("train algorithm=grpoo",
     "algorithm", "got grpoo; did you mean grpo? All: a2c, cispo, dapo, dr_grpo, gdpo, gmpo, grpo"),
    ("train algorithm=GRPO", "algorithm", "got GRPO; did you mean grpo? All: a2c"),
    ("train logger=none", "logger", "got none; write logger=null for none"),
    ("train data=foo.jsonl", "data", "not as a file, got foo.jsonl; write data=jsonl data.path=foo.jsonl"),
    ("sft demonstrations=mine/foo.jsonl", "demonstrations", "write demonstrations=jsonl demonstrations.path=mine"),
    ("train generation.n=4", "generation.n", "there is no such key, got 4; did you mean group_size?"),
    ("train algoritm=grpo", "algoritm", "did you mean algorithm?"),
    ("train logger=wand", "logger", "did you mean wandb?"),
    ("resume run logger=jsonl", "logger", "is not one of its choices, got jsonl; choose one of mlflow, "),
    ("train logger.console.live=false", "logger.console.live", "got false; did you mean console.live?"),
    ("train console=false", "console", "must be a section of keys, got false; write console=null for none"),
    ("train --config-dir mine +recipe=with_console", "logger", "is not one of its choices, got jsonl; choose one of"),
    ("train --config-dir mine +recipe=with_keys", "logger.console", "has no _target_"),
    ("train stepz=10", "stepz", "there is no such key, got 10; did you mean steps?"),
    ("train trainer.lrr=1", "trainer.lrr", "did you mean trainer.lr?"),
    ("train reward.format.wieght=1", "reward.format.wieght", "did you mean reward.format.weight?"),
    ("train foo=1", "foo", "`rlft train --cfg job` shows every key"),
    ("train +foo=1", "foo", "there is no such key, got 1; known here: command, name, seed"),
    ("train +trainer.foo=1", "trainer.foo", "known here: optimizer, lr"),
    ("train ~seed", "seed", "is missing"),
    ("train ~algorithm", "algorithm", "is missing; choose algorithm=a2c or cispo or dapo or dr_grpo or "),
    # A key of a choice that wasn't made
    ("train data.path=x", "data.path", "it belongs to data=gsm8k and data=hub and data=jsonl"),
    ("train reward.math.weight=1", "reward.math.weight", "reward has no math here, got 1; add it: 'reward=[...,math]'"),
    ("train logger.wandb.mode=offline", "logger.wandb.mode", "add it: logger=wandb"),
    # Values of groups that are no names (all groups: tests/test_group_values.py)
    ("train reward=1", "reward", "must be a name or a list of names, got 1; choose one of calls, choice, "),
    ("train reward=[exact_match,1]", "reward", "must be a name or a list of names, got [exact_match,1]"),
    ("train reward=null", "reward", "is empty: nothing would be learned"),
    ("train algorithm=null", "algorithm", "something must be chosen, got null; choose one of a2c, "),
    ("train -m algorithm=grpo,1", "algorithm", "must be a name (job 1: algorithm=1), got 1"),
    ("train --cfg job reward=1", "reward", "must be a name or a list of names, got 1"),
    ("resume run data=null", "data", "something must be chosen, got null"),
    # Recipes
    ("train +recipe=[grpo_arithmetic,ppo_arithmetic]", "+recipe",
     "takes one name, got [grpo_arithmetic,ppo_arithmetic]; write +recipe=grpo_arithmetic, or for a run of each"),
    ("train algorithm=[grpo,ppo]", "algorithm", "takes one name, got [grpo,ppo]; write algorithm=grpo, or for a run"),
    ("resume run generation=[auto,vllm]", "generation", "takes one name, got [auto,vllm]"),
    ("train recipe=grpo_arithmetic", "recipe", "it takes a plus, got recipe=grpo_arithmetic; write +recipe=grpo"),
    ("train +recpie=grpo_arithmetic", "recpie", "got grpo_arithmetic; did you mean +recipe=grpo_arithmetic?"),
    ("train +recipe=", "+recipe", "has no name; choose one of a2c_arithmetic, cispo_arithmetic, "),
    ("train +recipe", "command line", "got +recipe; did you mean +recipe=<name>?"),
    ("train recipe grpo_arithmetic", "command line", "did you mean +recipe=grpo_arithmetic?"),
    ("train grpo_arithmetic", "command line", "did you mean +recipe=grpo_arithmetic?"),
    ("train -recipe=grpo_arithmetic", "command line", "got -recipe; keys have no dashes; did you mean +recipe=grpo_ar"),
    ("train --config-dir mine +recipe=no_package", "+recipe", "make `# @package _global_` the first line"),
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
    ("train +recipe=loose", "+recipe", "is no recipe of rlft's, got +recipe=loose; write loose.yaml"),
    # A choice that is made twice
    ("train reward=[exact_match,exact_match]", "reward", "twice, got exact_match; write 'reward=[exact_match]'"),
    ("train logger=[wandb,mlflow,wandb]", "logger", "got wandb; write 'logger=[wandb,mlflow]'"),
    # Words that are no overrides, options that don't exist
    ("train --help=foo", "--help", "takes no value, got foo; write --help"),
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
    ("train --cfg", "--cfg", "needs a value"),
    ("train =5", "command line", "must be words such as key=value, got =5"),
    ("train ''", "command line", "got an empty word"),
    ("train seed=1 seed=2", "seed", "is given twice, got seed=1 and seed=2"),
    ("train seed=1 ++seed=2", "seed", "is given twice"),
    ("train seed=1,2", "seed", "has several values but this is no sweep, got 1,2"),
    ("train reward=exact_match,format", "reward", "or write a list as '[a,b]'"),
    ("train reward=[exact_match, format]", "reward", "its bracket is not closed, got [exact_match,"),
    ("train +algorithm=gspo", "+algorithm", "write algorithm=<choice>"),
    ("train trainer.lr=1e-3,", "trainer.lr", "ends with a comma, got 1e-3,; write trainer.lr=1e-3, with no comma betw"),
    ("train +recipe=grpo_arithmetic, steps=2", "+recipe", "ends with a comma, got grpo_arithmetic,; write +recipe="),
    ("train 'steps=3 trainer.lr=1e-3'", "steps", "the value cannot be read, got 3 trainer.lr=1e-3"),
    ("train 'name=my run; first'", "name", "quote it twice"),
    ("train 'seed=${nothing}'", "seed", "refers to a key that does not exist, ${nothing}"),
    ("train hydra.mode=MULTIRUN", "hydra.mode", "sweep with rlft train -m"),
    ("train hydra/launcher=joblib", "hydra/launcher", "cannot be set by the user"),
    # Types and bounds
    ("train steps=1e3", "steps", "must be a whole number, got 1000.0; write 1000"),
    ("train steps=10.5", "steps", "must be a whole number, got 10.5; for instance 100 (training steps"),
    ("train steps=0", "steps", "must be greater than 0, got 0; for instance 100 (training steps"),
    ("train cluster.ranks=two", "cluster.ranks", "must be a whole number, got 'two'; for instance 1"),
    ("train cluster.ranks=null", "cluster.ranks", "must be a whole number, got null; for instance 1"),
    ("train cluster.sequence_ranks=0", "cluster.sequence_ranks", "must be greater than 0, got 0; for instance 1"),
    ("train cluster.sequence_ranks=two", "cluster.sequence_ranks", "must be a whole number, got 'two'; for instance 1"),
    ("train seed=-1", "seed", "must be greater than or equal to 0, got -1"),
    ("train seed=99999999999999999999999", "seed", "must be at most 2**63-1, got 99999999999999999999999"),
    ("train trainer.lr=nan", "trainer.lr", "got nan"),
    ("train trainer.lr=inf", "trainer.lr", "must be finite, got inf"),
    ("train trainer.schedule=exponential", "trainer.schedule", "choose one of constant, linear, cosine"),
    ("train trainer=3", "trainer", "must be a section of keys, got 3; set one of trainer.optimizer, "),
    ("train model=Qwen/Qwen3-0.6B", "model", "section of keys, got 'Qwen/Qwen3-0.6B'; write model.path=Qwen"),
    ("train eval.temperature=-1", "eval.temperature", "must not be negative"),
    (f"{RM} checkpoint.on_signal=soon", "checkpoint.on_signal", "use step or now or a number"),
    ("train freshness.threshold=often", "freshness.threshold", "use auto or a number"),
    ("train model.revision=3", "model.revision", """quote it twice: "model.revision='3'\""""),
    ("train name=", "name", "got nothing"),
    ("train name=../mine", "name", "leave out slashes"),
    ("train name=null", "name", "must be a text that can name a folder; for instance name=my_run"),
    ("train name=[a]", "name", "must be a text that can name a folder; for instance name=my_run"),
    ("plan eval run=runs/a", "plan", "there is no plan of this command, got eval; name one of train, sft, rm,"),
    ("train data=jsonl data.path=a,b.jsonl", "data.path", "if it is one text, quote it twice: \"data.path='a,b"),
    ("train name=..", "name", "got .."),
    ("train data.difficulty=10", "data.difficulty", "must be 1 to 9 digits"),
    ("train data.operations=[/]", "data.operations", "must be a list of +, - and *"),
    ("train data.size=100000000", "data.size", "there are not that many distinct train problems"),
    # Rules between keys
    ("train group_size=1", "group_size", "compares the completions of a group and needs at least 2, got 1"),
    ("train minibatches=64", "minibatches", "a step has only prompts_per_step=16 groups, got 64"),
    ("train minibatches=3", "minibatches", "use one of 1, 2, 4, 8, 16"),
    ("train cluster.ranks=3 cluster.lanes=4", "cluster.ranks", "does not divide cluster.lanes=4, which a run keeps"),
    ("train cluster.ranks=2 cluster.lanes=1", "cluster.ranks", "got 2; use one of 1, or begin a run with other lanes"),
    ("train cluster.sequence_ranks=2", "cluster.sequence_ranks",
     "does not divide cluster.ranks=1, got 2; use one of 1, or set cluster.ranks=2 or a multiple of that"),
    ("train cluster.ranks=8 cluster.sequence_ranks=2 cluster.lanes=6",
     "cluster.ranks", "its first step, got 8; use one of 2, 4, 6, 12, or begin a run with other lanes"),
    ("train cluster.ranks=2 cluster.sequence_ranks=2 model.kernels=plain",
     "cluster.sequence_ranks", "divides packed rows, and model.kernels=plain has none, got 2; set it to 1"),
    ("train cluster.ranks=2 cluster.shard_base=true",
     "cluster.shard_base", "the run's own process needs the whole base, got true; set cluster.engines=1 or more, or"),
    ("train cluster.engines=1 cluster.shard_base=true", "cluster.shard_base", "there is one lane, got true; set clus"),
    ("train cluster.engines=1 cluster.ranks=2 cluster.shard_base=true lora.use_dora=true generation=transformers",
     "cluster.shard_base", "DoRA asks for the lengths of all weights"),
    ("train cluster.engines=1 cluster.lanes=2 cluster.shard_base=true model.quantization=4bit",
     "cluster.shard_base", "layers in 4 bits are not divided, got true; set model.quantization=null, or leave it out"),
    ("train token_budget=10", "token_budget", "set token_budget=512 or more"),
    ("train algorithm.kl_coef=0.1", "snapshot.reference", "algorithm.kl_coef is above 0"),
    ("train algorithm.kl_coef=0.1 algorithm.kl_to=old algorithm.kl_estimator=exact",
     "algorithm.kl_estimator", "needs its network during the updates, got exact; set snapshot.old=copy, or"),
    ("train algorithm.kl_coef=0.1 snapshot.reference=base algorithm.kl_estimator=exact algorithm.kl_in=reward"
     " snapshot.old=sampled", "snapshot.old", "from the engine's log-probs of sampled tokens, got sampled; use auto"),
    ("train algorithm.kl_coef=0.1 snapshot.reference=base algorithm.kl_estimator=exact"
     " lora.target_modules=[q_proj,lm_head]", "lora.target_modules", "not computed where the LM head has an adapter"),
    ("train algorithm.kl_coef=0.1 algorithm.kl_estimator=exact", "snapshot.reference", "algorithm.kl_coef is above 0"),
    ("train algorithm.dual_clip=1", "algorithm.dual_clip", "must lie above the clip range"),
    ("train algorithm=gspo algorithm.mismatch=token_mask", "algorithm.mismatch",
     "ratio=sequence has one number for all of a completion's tokens, got token_mask; use algorithm.mismatch=sequence"),
    ("train algorithm=gmpo algorithm.mismatch=token_truncate", "algorithm.mismatch", "surrogate=gmpo has one"),
    ("train algorithm=gspo overlap.lag=1", "overlap.lag", "set algorithm.mismatch=sequence_truncate, or overlap.lag=0"),
    ("train algorithm.mismatch_low=2", "algorithm.mismatch_low", "must have 1"),
    # Sweeps whose values Optuna chooses
    ("train sweep=optuna", "sweep", "belongs to a sweep, and this is one run, got optuna; write rlft train -m"),
    ("train 'trainer.lr=interval(1e-5,1e-3)'", "trainer.lr", "has an interval of values but this is no sweep"),
    ("train -m sweep.trials=3 trainer.lr=1e-5,1e-4", "sweep", "no sampler is chosen, got nothing; write sweep=optuna"),
    ("train -m ~sweep=optuna trainer.lr=1e-5,1e-4", "sweep", "takes no sign, got '~sweep=optuna'; write sweep=optuna"),
    ("sample -m sweep=optuna seed=1,2", "sweep", "by what evaluations measure, and rlft sample has none, got optuna"),
    ("train -m sweep=wandb trainer.lr=1e-5,1e-4", "sweep", "not one of its choices, got wandb; write sweep=optuna"),
    ("train -m sweep=optuna", "sweep", "has nothing to choose: no key has an interval or several values"),
    (f"{CHOOSES} sweep.trials=3,4", "sweep.trials", "is one for the whole sweep"),
    (f"{CHOOSES} sweep.sampler=gird", "sweep.sampler", "must be 'tpe', 'random' or 'grid', got 'gird'"),
    (f"{CHOOSES} sweep.metric=acuracy", "sweep.metric", "no evaluation has it, got acuracy; did you mean accuracy?"),
    (f"{CHOOSES} sweep.sampler=grid", "sweep.sampler", "a grid goes through values one by one, and trainer.lr has an"),
    ("train -m sweep=optuna sweep.sampler=grid sweep.trials=3 lora.rank=4,8", "sweep.trials", "each of its 2 combin"),
    (f"{CHOOSES} data.held_out_size=16,32", "data.held_out_size", "got 16 and 32 prompts; give it one value"),
    (f"{CHOOSES} name=a,b", "name", "cannot be swept: it does not change what a run measures, got a, b"),
    (f"{CHOOSES} hydra.run.dir=x", "hydra.run.dir", "the folder of one run, and this is a sweep, got x; write"),
    (f"{CHOOSES} hydra.job.name=x", "hydra.job.name", "no such key, got x; of Hydra's keys only hydra.run.dir"),
    (f"{CHOOSES} hydra.sweep.dir=file", "hydra.sweep.dir", "cannot be written (Not a directory), got file; choose"),
    (f"{CHOOSES} hydra.sweep.dir=run", "hydra.sweep.dir", "there is a run in that folder, got run; name another"),
    (f"{CHOOSES} hydra.sweep.dir=jobs", "hydra.sweep.dir", "runs in that folder that are not of such a sweep"),
    ("train -m seed=0,1 hydra.sweep.dir=study", "hydra.sweep.dir",
     "there is a sweep in that folder whose values Optuna chooses, got study; resume that one with rlft resume study"),
    (f"{CHOOSES} sweep.pruner=median eval.every=4 steps=4", "sweep.pruner",
     "never prunes a trial: its run is not evaluated before the last step, 4, got median; set eval.every below 4"),
    (f"{CHOOSES} resume=auto", "resume", "is of one run, and this is a sweep, got auto; leave it out"),
    (f"{CHOOSES} 'lora.rank=interval(4,8)'", "lora.rank", "write 'lora.rank=int(interval(..))' to draw whole numbers"),
    ("train -m sweep=optuna 'trainer.lr=choice(1e-3)'", "sweep", "has nothing to choose"),
    ("train -m sweep=optuna 'trainer.lr=intervall(1e-4,1e-2)'", "trainer.lr",
     "has a function that cannot be read (Unknown function 'intervall'), got intervall(1e-4,1e-2); write"),
    ("train -m sweep=optuna 'trainer.lr=interval(1e-4)'", "trainer.lr", "(missing a required argument: 'end')"),
    ("train -m sweep=optuna 'trainer.lr=interval(1e-4,1e-2'", "trainer.lr", "its bracket is not closed, got interval("),
    ("train sweep=optuna --cfg job", "sweep", "belongs to a sweep, and --cfg prints what one run has, got optuna"),
    ("train -m seed=0,1 --cfg job", "--cfg", "prints the config of one run, and -m is a sweep; leave -m out"),
    ("train -m sweep=optuna 'trainer.lr=interval(1e-4,1e-2)' --help", "sweep", "and --help prints what one run has"),
    (f"train -m {SMALL} seed=0,1 hydra.sweep.dir=/dev/null/x", "hydra.sweep.dir", "cannot be written (Not a directory"),
    (f"{CHOOSES} 'trainer.beta1=interval(0.9,1.5)'", "trainer.beta1", "(tried with trainer.beta1=1.5)"),
    (CHOOSES_K, "algorithm.top_k", "vocabulary of"),
    (CHOOSES_K.replace(" sweep=optuna", ""), "algorithm.top_k", "vocabulary of"),
    (CHOOSES, "sweep", "pip install 'rlft[sweep]'", "optuna"),
    ("train -m seed=0,1 cluster.jobs=2 cluster.engines=1", "cluster.engines", "is one process"),
    ("train cluster.engines=2 cluster.address=auto", "cluster.address", "is the address of a Ray cluster, got auto"),
    ("train cluster.scoring=true scoring.workers=0", "cluster.scoring", "scores in the run's own process, got true"),
    ("train cluster.gpus_per_engine=2", "cluster.gpus_per_engine", "applies to engines in processes of their own, and"),
    ("train generation=transformers cluster.engines=1 cluster.gpus_per_engine=2",
     "cluster.gpus_per_engine", "the transformers engine computes on one GPU, got 2"),
    ("train generation=vllm generation.vllm.weights=copy cluster.engines=1",
     "generation.vllm.weights", "makes vLLM's weights of the trainer's base, and cluster.engines do not"),
    ("train generation=vllm lora.use_dora=true cluster.engines=1", "lora.use_dora", "vLLM serves no DoRA adapters"),
    ("train cluster=ray cluster.engines=1 cluster.address=head", "cluster.address", "is no address, got head; use"),
    ("train cluster=ray cluster.engines=1 cluster.address=ray://head:10001", "cluster.address", "is one of Ray Client"),
    ("train cluster=ray cluster.engines=1 cluster.address=127.0.0.1:1", "cluster.address", "no Ray answers there (C"),
    ("plan cluster.engines=4 cluster.ranks=4 cluster.placement=pairs model.device=cuda device_memory=1GiB",
     "cluster.placement", "an engine and a rank do not fit on one GPU"),
    ("train overlap.lag=1", "overlap.lag", "an earlier policy sampled"),
    ("train overlap.lag=1 algorithm=kimi", "overlap.lag", "Kimi has no such weights"),
    ("train overlap.lag=1 algorithm.mismatch=token_mask snapshot.old=sampled", "snapshot.old", "overlap.lag=1"),
    ("train algorithm.credit_span=turn", "algorithm.credit_span", "has one score for all turns of a completion"),
    ("train algorithm=ppo algorithm.credit_span=step", "algorithm.credit_span", "choose one of trajectory, turn"),
    ("train algorithm=rloo algorithm.credit_span=turn", "algorithm.credit_span", "algorithm=grpo and algorithm=ppo"),
    ("train algorithm=gmpo algorithm.ratio=sequence", "algorithm.ratio", "takes their geometric mean itself, got seq"),
    ("train algorithm=gdpo algorithm.supervision=process", "algorithm.supervision", "the rewards of whole completions"),
    ("train algorithm=gdpo algorithm.kl_coef=0.1 algorithm.kl_in=reward", "algorithm.kl_in", "has no one score"),
    ("train algorithm=ppo algorithm.reward_aggregation=sum_then_normalize",
     "algorithm.reward_aggregation", "it belongs to algorithm=gdpo and algorithm=grpo"),
    ("train generation.top_p=0.9 algorithm.mismatch=token_mask", "generation.top_p", "undistorted sampling, got 0.9"),
    ("train generation.top_k=5 snapshot.old=sampled", "generation.top_k", "snapshot.old=sampled compares"),
    ("train stop.when=flat eval.every=0", "stop.when", "there are none, got flat; set eval.every to a number of steps"),
    (f"{SFT} stop.when=flat eval.every=0", "stop.when", "there are none, got flat"),
    ("train stop.when=flatt", "stop.when", "use never or flat"),
    (f"{CHOOSES} stop.when=flat", "stop.when", "compared at the same steps, got flat; leave it out"),
    ("train eval.kl_base=true eval.temperature=0", "eval.kl_base", "eval.temperature=0 samples another one, got true"),
    ("train eval.kl_base=true generation.top_k=5", "eval.kl_base", "leave some of them out, got true; use generation."),
    ("train generation.temperature=0", "generation.temperature", "needs completions that differ, got 0"),
    ("train generation.engine=vlm", "generation.engine", "is not an engine, got vlm"),
    ("train generation.max_tokens=300", "generation.max_tokens", "exceeds the model's context of 512 tokens, got 300"),
    ("train model.path=long_rope prompts.max_tokens=60 generation.max_tokens=41", "generation.max_tokens",
     "context of 100 tokens, beyond which its longrope RoPE makes a row depend on its neighbours, got 41; use at"),
    ("train model.path=long_rope prompts.max_tokens=100", "prompts.max_tokens", "longrope RoPE makes a row depend on"),
    (f"{SFT} model.path=long_rope prompts.max_tokens=60", "max_completion_tokens", "longrope RoPE makes"),
    ("train prompts.max_tokens=4", "prompts.max_tokens", "4096 of 4096 train prompts are longer"),
    ("train prompts.max_tokens=21 prompts.over_limit=refuse", "prompts.max_tokens", "or set prompts.over_limit=drop"),
    # Groups of one
    ("train algorithm=rloo group_size=1", "group_size", "needs at least 2, got 1"),
    ("train algorithm=kimi group_size=1", "group_size", "needs at least 2, got 1"),
    ("train algorithm=reinforce algorithm.baseline=group group_size=1", "group_size", "needs at least 2, got 1"),
    ("train algorithm=reinforce algorithm.baseline=leave_one_out group_size=1", "group_size", "at least 2, got 1"),
    ("train algorithm=reinforce algorithm.baseline=none group_size=1 dynamic_sampling.max_rounds=2",
     "dynamic_sampling.max_rounds", "with group_size=1 each of them is, got 2; set group_size=8"),
    ("train data=jsonl data.path=good.jsonl prompts_per_step=64 dynamic_sampling.max_rounds=2",
     "dynamic_sampling.max_rounds", "are in each step, got 2; use a lower prompts_per_step"),
    # Curricula
    ("train curriculum.above=0", "curriculum.above", "is read where pass rates are known, got 0.0; set curriculum.r"),
    ("train curriculum.below=1", "curriculum.below", "is read where pass rates are known, got 1.0; set curriculum.r"),
    ("train curriculum.replay=0.5", "curriculum.replay", "is read where pass rates are known, got 0.5; set curriculum"),
    ("train curriculum.running=true curriculum.above=0.5 curriculum.below=0.5", "curriculum.above",
     "is not below curriculum.below=0.5, so that every prompt would be left out, got 0.5"),
    ("train curriculum.running=true curriculum.memory=0", "curriculum.memory", "greater than 0"),
    ("train curriculum.path=missing.jsonl", "curriculum.path", "there is no such file, got missing.jsonl"),
    ("train curriculum.path=good.jsonl", "curriculum.path", "is no line of rlft sample with the reward exact_match"),
    ("train data=jsonl data.path=good.jsonl prompts_per_step=64 curriculum.running=true", "prompts_per_step",
     "train prompts, of which a step takes different ones, got 64; use at most"),
    (f"train environment=game environment.factory={OWN}.Guessing reward=null curriculum.path=good.jsonl",
     "curriculum.path", "counts completions that are right by the first reward, and there is none"),
    # The critic
    ("train algorithm=ppo", "critic.kind", "needs values, and only a critic gives them, got none; set critic.kind=ada"),
    ("train algorithm=a2c", "critic.kind", "or shared (a value head on the policy's features)"),
    ("train critic.kind=adapter", "critic.kind", "has no use for a critic's values, got adapter; set critic.kind=none"),
    ("train critic.init=critic", "critic.init", "with critic.kind=none, got critic; set critic.kind=adapter or sh"),
    ("train critic.warmup_steps=5", "critic.warmup_steps", "with critic.kind=none, got 5"),
    (f"{PPO} steps=10 critic.warmup_steps=10", "critic.warmup_steps", "would never learn, the run has steps=10, got 1"),
    (f"{PPO} critic.init=reward", "critic.init", "the one learned reward, and there are 0, got reward; set 'reward=["),
    (f"{PPO} {LEARNED} {TWO_LEARNED} critic.init=reward", "critic.init", "and there are 2, got reward"),
    (f"{PPO} {LEARNED} critic.init=reward {REFRESH}", "critic.init", "and reward.learned.path=null is none, got rewar"),
    (f"{PPO} {LEARNED} critic.init=reward reward.learned.path=mine", "critic.init", "reward.learned.path=mine is none"),
    # References that move, or don't
    ("train snapshot.refresh_every=5", "snapshot.refresh_every", "set snapshot.reference=copy"),
    # A teacher
    ("train algorithm=opd", "snapshot.teacher", "learns from a teacher's log-prob of each token, got none"),
    ("train snapshot.teacher=base", "snapshot.teacher", "has no use for a teacher, got base"),
    ("train snapshot.teacher_hint=x", "snapshot.teacher_hint", "only a teacher reads it, and snapshot.teacher is none"),
    (f"{AS_IT_IS} snapshot.teacher_hint=' '", "snapshot.teacher_hint", "is blank, got ''; use null for no hint"),
    (f"{AS_IT_IS} \"snapshot.teacher_hint='It is {{Answer}}.'\"", "snapshot.teacher_hint",
     "has {Answer}, which nothing is put in the place of, got 'It is {Answer}.'; use {answer} for the prompt's answer"),
    (f"{AS_IT_IS} \"snapshot.teacher_hint='It is {{answer'\"", "snapshot.teacher_hint",
     "has a { without its partner, got 'It is {answer'; use {answer} for the prompt's answer"),
    (f"{OPD} environment=calculator environment.syntax=json", "snapshot.teacher_hint",
     "goes into prompts that are answered in one turn"),
    (f"{OPD} generation.temperature=0.7", "generation.temperature", "student's at temperature 1, got 0.7"),
    (f"{OPD} generation.top_k=5", "generation.top_k", "leaves out tokens that the teacher would judge"),
    (f"{OPD} algorithm.teacher_in=loss algorithm.top_k=999", "algorithm.top_k", "more than the model's vocabulary"),
    (f"{OPD} algorithm.reward_coef=1 reward.exact_match.weight=0 reward.format.weight=0", "algorithm.reward_coef",
     "[exact_match,format] has no weight but 0, got 1; use 0, or set for instance reward.exact_match.weight=1"),
    (f"{OPD} dynamic_sampling.max_rounds=2", "dynamic_sampling.max_rounds", "teaches by their tokens all the same"),
    (f"{OPD} algorithm.reward_coef=1 group_size=1", "group_size", "compares the completions of a group and needs"),
    (f"{AS_IT_IS} snapshot.teacher_hint='{'so ' * 200}'", "snapshot.teacher_hint", "with it the longest row has"),
    (AS_IT_IS, "snapshot.teacher", "is what the policy starts as: the teacher would agree with it on every token"),
    (f"train algorithm=opd {SMALL} lora.path=policy snapshot.teacher=./policy", "snapshot.teacher",
     "nothing be learned, got ./policy; set snapshot.teacher_hint, name another teacher, or set algorithm.reward_coef"),
    ("train algorithm=opd snapshot.teacher=embedded:tiny-arithmetic", "snapshot.teacher", "is what the policy starts"),
    ("train algorithm=opd snapshot.teacher=no_tokenizer", "snapshot.teacher",
     "got no_tokenizer; the folder needs tokenizer files next to config.json"),
    ("train algorithm=opd snapshot.teacher=no_config", "snapshot.teacher", "else download it again"),
    ("train algorithm=opd snapshot.teacher=other_words", "snapshot.teacher",
     "has another vocabulary: 2 other tokens, e.g. '<answer>' is "),
    ("train algorithm=opd snapshot.teacher=fewer_rows", "snapshot.teacher",
     "has token ids up to 269, and the student may sample ids up to 271, got fewer_rows"),
    ("train algorithm=opd snapshot.teacher=short", "snapshot.teacher", "tokens exceeds its context of 64 tokens"),
    (f"train algorithm=opd {SMALL} snapshot.teacher=critic", "snapshot.teacher", "adapter of the role critic"),
    (f"train algorithm=opd {SMALL} snapshot.teacher=deeper", "snapshot.teacher", "this base has no module for its"),
    (f"{OPD} snapshot.teacher_engine=vllm", "snapshot.teacher_engine", "separate model, and snapshot.teacher is bas"),
    (f"train algorithm=opd {SMALL} snapshot.teacher=critic snapshot.teacher_engine=vllm", "snapshot.teacher_engine",
     "snapshot.teacher is an adapter on the run's base (critic)"),
    ("train snapshot.teacher_engine=vllm", "snapshot.teacher_engine", "separate model, and snapshot.teacher is non"),
    (f"{OPD} snapshot.teacher_dtype=bfloat16", "snapshot.teacher_dtype", "separate model, and snapshot.teacher is"),
    ("train snapshot.teacher_quantization=none", "snapshot.teacher_quantization", "snapshot.teacher is none, got none"),
    (f"{LARGER} {IN_VLLM} cluster.ranks=2 cluster.lanes=2", "snapshot.teacher_engine", "in each of the 2 ranks"),
    (f"{LARGER} {IN_VLLM} generation.vllm.batch_invariant=true", "generation.vllm.batch_invariant", "on CUDA only"),
    (f"{LARGER} {IN_VLLM}", "snapshot.teacher_engine", "or use snapshot.teacher_engine=transformers", "vllm"),
    (f"{LARGER} {IN_VLLM} prompts.max_tokens=256 generation.max_tokens=256", "snapshot.teacher",
     "the longest row of 512 tokens and the token that is sampled after it by vLLM exceeds its context of 512 tokens"),
    # Snapshots
    ("train snapshot.reference=ema snapshot.ema_decay=0.9 snapshot.refresh_every=5",
     "snapshot.refresh_every", "snapshot.reference is ema, got 5"),
    ("train snapshot.reference=ema", "snapshot.ema_decay", "needs the share of it that stays, per step, got null; use"),
    ("train snapshot.ema_decay=0.9", "snapshot.ema_decay", "snapshot.reference is none, got 0.9; set snapshot.referen"),
    ("train snapshot.reference=copy snapshot.ema_decay=0.9", "snapshot.ema_decay", "snapshot.reference is copy, got 0"),
    ("train snapshot.reference=ema snapshot.ema_decay=1", "snapshot.ema_decay", "so it never moves, got 1"),
    ("train algorithm=rloo algorithm.kl_coef=0.1", "snapshot.reference", "base, copy, ema or an adapter folder"),
    # KL controllers
    ("train algorithm.kl_controller=adaptive snapshot.reference=base", "algorithm.kl_target", "there is none"),
    ("train algorithm.kl_controller=proportional algorithm.kl_target=0.1", "algorithm.kl_coef", "and 0 stays 0"),
    # Step scores and pretraining text
    ("train algorithm=grpo_process", "reward", "gives any, got [exact_match,format]; add one, for instance 'reward=[e"),
    ("train algorithm.supervision=process", "reward", "learns from scores of single steps"),
    ("train algorithm=grpo_process reward=[exact_match,equations] reward.equations.weight=0", "reward", "gives any, g"),
    (PTX, "pretrain.path", "mixes pretraining text in, and none is given, got null; set pretrain.path=<JSONL"),
    (f"{PTX} pretrain.path=nowhere.jsonl", "pretrain.path", "got nowhere.jsonl"),
    (f"{PTX} pretrain.path=embedded:books", "pretrain.path", "embedded:books; use embedded:arithmetic-cold-start, "),
    (f"{PTX} {TEXT} pretrain.max_tokens=600", "pretrain.max_tokens", "the model's context of 512 tokens, got 600; use"),
    (
        f"{PTX} {TEXT} pretrain.max_tokens=20000 token_budget=16384", "token_budget",
        "may have pretrain.max_tokens=20000 tokens, got 16384",
    ),
    # Learned rewards
    (f"train {LEARNED}", "reward.learned.path", "scores every completion 0, and reward_model.refresh_every=0 never t"),
    (f"train {LEARNED} reward.learned.path=nowhere", "reward.learned.path", "the reward model cannot be read"),
    (f"train {LEARNED} reward.learned.path=three_labels", "reward.learned.path", "another num_labels, got 3; point it"),
    (f"train {LEARNED} {TWO_LEARNED} {REFRESH}", "reward_model.refresh_every", "and there are 2, got 10"),
    (f"train {LEARNED} {REFRESH} reward.learned.path=three_labels", "reward_model.refresh_every", "is a network of it"),
    (f"train {LEARNED} reward_model.refresh_every=10 reward_model.labels=null", "reward_model.labels", "got null; use"),
    (f"train {LEARNED} reward_model.refresh_every=10 reward_model.labels=learned", "reward_model.labels", "got learne"),
    (f"train {LEARNED} reward_model.refresh_every=10 reward_model.labels=math", "reward_model.labels", "got math; use"),
    (f"train reward=[learned] {REFRESH}", "reward_model.labels", "got exact_match; put one in: 'reward=[exact_match"),
    (f"train {LEARNED} {REFRESH} algorithm=reinforce algorithm.baseline=none group_size=1",
     "reward_model.refresh_every", "and group_size=1 has none, got 10; set group_size=8"),
    # Adapters of another rank
    ("train lora.path=policy", "lora.rank", "the adapter at lora.path has rank 4, got 32; set lora.rank=4"),
    ("train lora.path=policy lora.rank=4", "lora.alpha", "was trained with 8.0 and would be another function, got 32"),
    (f"{PPO} critic.init=critic", "lora.rank", "the adapter at critic.init has rank 4, got 32; set lora.rank=4, or an"),
    (f"{PPO} critic.init=critic lora.rank=4", "lora.alpha", "the adapter at critic.init was trained with 8"),
    (f"train {LEARNED} reward.learned.path=critic", "lora.rank", "the adapter at reward.learned.path has rank 4, got"),
    (f"train {LEARNED} reward.learned.path=critic lora.rank=4", "lora.alpha", "at reward.learned.path was trained wit"),
    # Adapters of another base
    (f"train {SMALL} lora.path=elsewhere", "lora.path", "made for a base with other files (0123 then, "),
    (f"train {SMALL} lora.path=deeper", "lora.path", f"this base has no module for its tensor {DEEPER}, got deeper; u"),
    (f"train {SMALL} lora.path=wider", "lora.path", f"its tensor {FIRST} is (4, 999), and this base takes (4, "),
    (f"train {SMALL} snapshot.reference=elsewhere", "snapshot.reference", "made for a base with other files (0123"),
    (f"train {SMALL} snapshot.reference=lacking", "snapshot.reference", f"it lacks the tensor {FIRST}, unlike what it"),
    (f"{PPO} {SMALL} critic.init=critic_elsewhere", "critic.init", "made for a base with other files (0123"),
    (f"{PPO} {SMALL} critic.init=critic_wider", "critic.init", f"its tensor {FIRST} is (4, 999)"),
    (f"{PPO} {SMALL} critic.init=long_head", "critic.init", "its head has weight (1, 999), and this base takes (1, "),
    (f"{PPO} {SMALL} critic.init=no_bias", "critic.init", "its head has no bias, and this base takes (1,)"),
    (f"{PPO_SHARED} critic.init=shared_elsewhere", "critic.init", "made for a base with other files (0123"),
    (f"{PPO_SHARED} critic.init=long_head", "critic.init", "its head has weight (1, 999), and this base takes"),
    (f"train {SMALL} {LEARNED} reward.learned.path=critic_elsewhere", "reward.learned.path", "other files (0123"),
    (f"train {SMALL} {LEARNED} reward.learned.path=critic_wider", "reward.learned.path", f"its tensor {FIRST} is (4,"),
    (f"train -m {SMALL} lora.path=policy,wider", "lora.path", "(job 1: "),
    # Adapters that cannot be used as they are
    (f"train {SMALL} lora.path=policy lora.target_modules=[q_proj]",
     "lora.path", f"it has the tensor {FIRST}, unlike what lora.target_modules says, got policy; set 'lora.target_mod"),
    (f"train {SMALL} lora.path=lacking", "lora.path", f"it lacks the tensor {FIRST}, unlike what lora.target_modules"),
    (f"train {SMALL} lora.path=rslora",
     "lora.use_rslora", "the adapter at lora.path was trained with use_rslora=true and would be another function, got "
     "false; set lora.use_rslora=true, or another lora.path"),
    (f"train {SMALL} lora.path=policy lora.use_rslora=true", "lora.use_rslora", "with use_rslora=false and would be"),
    (f"train {SMALL} lora.path=policy lora.use_dora=true", "lora.use_dora", "set lora.use_dora=false, or another lora"),
    (f"train {SMALL} {LEARNED} reward.learned.path=critic lora.use_rslora=true", "lora.use_rslora", "at reward.lea"),
    (f"train {SMALL} lora.path=half_dora lora.use_dora=true",
     "lora.path", f"it lacks the tensor {MAGNITUDE}, unlike what lora.target_modules"),
    ("train generation=vllm generation.vllm.weights=adapter lora.use_dora=true",
     "lora.use_dora", "vLLM serves no DoRA adapters, got true; use generation=transformers, or lora.use_rslora=true"),
    ("train generation=vllm lora.target_modules=[q_proj,lm_head]",
     "lora.target_modules", "vLLM serves no adapters of lm_head, got lm_head; leave it out, or use generation"),
    ("sample data=arithmetic generation=vllm adapter=headed", "adapter", "adapts lm_head, which vLLM cannot serve"),
    ("train lora.target_modules=[q_proj,lm_head]", "lora.target_modules", "the weights of lm_head are those of model.em"
     "bed_tokens, so that its adapter could not be exported, got lm_head; use all-linear, or a list of down_proj, "),
    (f"{SFT} lora.target_modules=[lm_head]", "lora.target_modules", "the weights of lm_head are those of model.embed"),
    (f"{RM} \"lora.target_modules='.*(q_proj|head)'\"", "lora.target_modules", "the weights of lm_head are those of m"),
    ("train \"lora.target_modules='.*(q_proj|embed_tokens)'\"", "lora.target_modules", "model.embed_tokens would be a"),
    ("train lora.target_modules=.*self_attn.*", "lora.target_modules", "self_attn would be adapted, too, which is no"),
    (f"{SFT} generation=vllm generation.vllm.weights=adapter lora.use_dora=true data=arithmetic",
     "lora.use_dora", "vLLM serves no DoRA adapters"),
    ("sample data=arithmetic generation=vllm generation.vllm.weights=adapter adapter=half_dora",
     "adapter", "is a DoRA adapter, which vLLM cannot serve, got half_dora; use generation=transformers"),
    (f"{PPO} {SMALL} critic.init=critic_patterns", "critic.init", "adapters with alpha_pattern are not supported"),
    (f"train {SMALL} lora.path=biased", "lora.path", "its bias changes the base, which all roles share"),
    (f"train {SMALL} snapshot.reference=biased", "snapshot.reference", "its bias changes the base"),
    (f"train {SMALL} lora.path=pissa", "lora.path", "init_lora_weights=pissa has changed the base that it was trained "
     "on, and would change this one, got pissa; convert it to plain LoRA with PEFT's save_pretrained("),
    (f"train {SMALL} snapshot.reference=pissa", "snapshot.reference", "init_lora_weights=pissa has changed the base"),
    (f"train {SMALL} algorithm=opd snapshot.teacher=./pissa", "snapshot.teacher", "init_lora_weights=pissa has"),
    (f"{PPO} {SMALL} critic.init=critic_loftq", "critic.init", "init_lora_weights=loftq has changed the base that"),
    (f"train {SMALL} {LEARNED} reward.learned.path=critic_loftq", "reward.learned.path", "init_lora_weights=loftq has"),
    ("sample data=arithmetic adapter=pissa", "adapter", "init_lora_weights=pissa has changed the base"),
    (f"train {SMALL} snapshot.reference=alora", "snapshot.reference", "adapters with alora_invocation_tokens are no"),
    (f"train {SMALL} lora.path=newer", "lora.path", "adapter_config.json has shiny_scale=1.5, which may change what t"),
    (f"train {SMALL} lora.path=experts", "lora.experts", "the adapter at lora.path was trained with experts=true and "
     "would be another function, got false; set lora.experts=true, or another lora.path"),
    (f"train {SMALL} lora.path=routed", "lora.router", "the adapter at lora.path was trained with router=true and"),
    (f"train {SMALL} snapshot.reference=no_alpha", "snapshot.reference", "adapter_config.json has no lora_alpha, got"),
    (f"train {SMALL} snapshot.reference=torn_layers", "snapshot.reference", "PEFT does not take its adapter_config.js"),
    (f"train {SMALL} snapshot.reference=with_base", "snapshot.reference", "its tensor base_model.model.lm_head.weight "
     "is not LoRA's, and would be written into the base, which all roles share, got with_base; save it again with"),
    (f"train {SMALL} snapshot.reference=loha", "snapshot.reference", "an adapter of the kind LOHA"),
    (f"train {SMALL} lora.path=critic", "lora.path", "holds the adapter of the role critic, which is not a policy"),
    (f"train {SMALL} snapshot.reference=critic", "snapshot.reference", "the role critic, which is not a policy, got"),
    (f"{PPO} {SMALL} critic.init=policy", "critic.init", "there is no head.safetensors in that folder, got policy"),
    (f"{PPO} {SMALL} critic.init=shared", "critic.init", "there is no adapter_config.json in that folder, got shared"),
    (f"train {SMALL} {LEARNED} reward.learned.path=policy", "reward.learned.path", "there is no head.safetensors in t"),
    (f"train {SMALL} lora.path=torn", "lora.path", "the adapter cannot be read"),
    # Exports that are pushed or converted
    ("export run=run out=new push=a/b/c", "push", "is not a repository id of the Hugging Face hub"),
    ("export run=run ot=new", "ot", "there is no such key, got new; did you mean out?"),
    ("export run exports/x", "export", "got exports/x; write out=exports/x"),
    ("export run=run out=new push=", "push", "is not a repository id of the Hugging Face hub"),
    ("export run=run out=new as=gguf", "as", "use as=model, then `python llama.cpp/convert_hf_to_gguf.py new --outf"),
    ("export run=run out=new", "run", "there is no checkpoint in that run yet"),
    # Sampling that the trainer's log-probs are not of, and stops that never come
    ("train generation.min_p=0.1", "generation.min_p", "leaves out tokens that the trainer's log-probs count"),
    ("train generation.repetition_penalty=1.1",
     "generation.repetition_penalty", "makes a token's probability depend on how often it was said"),
    ("train repetition_penalty=1.1", "repetition_penalty", "the policy learn it instead: 'reward=[...,repetition]'"),
    ("chat run=run eval.typical_p=0.9", "eval.typical_p", "leaves unlikely tokens out"),
    ("train num_beams=4", "num_beams", "searches for likely completions, and a policy learns from its own samples"),
    ("train generation.vllm.ignore_eos=true", "generation.vllm.ignore_eos", "forbids the end token"),
    ("train generation.stop_strings=[a]", "generation.stop_strings", "into the list generation.stop"),
    ("train eval.kl_base=true generation.min_p=0.1", "generation.min_p", "use 0 in training"),
    (f"{SFT} data=arithmetic eval.kl_base=true generation.min_p=0.1", "eval.kl_base", "and min_p leave some of them"),
    ("train generation.stop=word", "generation.stop",
     "must be a list, got 'word'; write \"generation.stop=['word']\""),
    ("train ++recipe=grpo_arithmetic", "recipe", "so it takes a plus, got ++recipe=grpo_arithmetic; write +recipe="),
    ("eval run=run ~eval.num_prompts", "eval.num_prompts", "cannot be taken out of the config of a run"),
    ("eval run=run ~reward.exact_match", "reward.exact_match", "cannot be taken out of the config of a run"),
    ("eval run=run ++eval.nothing=1", "eval.nothing", "there is no such key, got 1"),
    ("train generation.stop=7", "generation.stop", "must be a list, got 7; write 'generation.stop=[7]'"),
    ("train generation.stop=null", "generation.stop", "must be a list, got null; write 'generation.stop=[]'"),
    ("train generation.stop=[1.5]", "generation.stop", "must be a string or a whole number, got [1.5]; for"),
    ("train \"generation.stop=['']\"", "generation.stop", "holds an empty string, which is in every completion"),
    ("train generation.stop=[-1]", "generation.stop", "holds a token id below 0, got -1"),
    ("train generation.stop=[272]", "generation.stop", "is not a token id of the model, which has 272, got 272; use 0"),
    ("train \"generation.stop=['<|im_start|>']\"", "generation.stop", "holds the special token <|im_start|>, which"),
    ("train \"generation.stop=['</answer>']\"",
     "generation.stop", "is cut off the text, in which reward.exact_match looks for </answer>, got </answer>; set gen"),
    ("train reward=format \"generation.stop=['</think>']\"", "generation.stop", "reward.format looks for </think>"),
    (f"{SFT} data=arithmetic \"generation.stop=['</']\"", "generation.stop", "looks for </answer>, got </; set gener"),
    # The machine
    ("train generation=vllm generation.vllm.weights=adapter lora.rank=600",
     "lora.rank", "vLLM takes adapters up to rank 512, got 600"),
    ("train generation=vllm generation.vllm.share_base=true",
     "generation.vllm.share_base", "cannot hold one copy: vLLM lays out weights in its own way on cpu, got true; set"),
    (f"{SFT} data=arithmetic generation=vllm generation.vllm.weights=copy generation.vllm.share_base=true",
     "generation.vllm.share_base", "those of the policy (generation.vllm.weights=copy), got true; set"),
    ("plan generation=vllm model.quantization=4bit model.device=cuda device_memory=24GiB generation.vllm.weights=copy",
     "generation.vllm.weights", "the trainer's base is quantised, got copy; set weights=adapter"),
    ("train generation=vllm generation.vllm.weights=merged", "generation.vllm.weights", "did you mean copy? use"),
    ("train generation=vllm generation.vllm.batch_invariant=true",
     "generation.vllm.batch_invariant", "on CUDA only, and model.device is cpu, got true; set it to false"),
    ("plan generation=vllm model.dtype=float32 model.device=cuda device_memory=24GiB generation.vllm.share_base=true",
     "generation.vllm.share_base", "the base has 32 bits, not 16, got true; set it to auto"),
    ("train model.dtype=float8", "model.dtype", "is not a known dtype, got float8"),
    ("train model.device=gpu", "model.device", "is not a device, got gpu"),
    ("train model.device=cuda", "model.device", "there is no CUDA device here, got cuda"),
    ("train model.quantization=4bit", "model.quantization", "4-bit weights need a CUDA device"),
    ("train trainer.optimizer=adamw8bit", "trainer.optimizer",
     "8-bit AdamW needs a CUDA device, got adamw8bit; use adamw or muon"),
    ("train generation=scripted generation.scripted.answers='{*: [yes]}' generation.drafts=history",
     "generation.drafts", "the scripted engine samples without drafts, got history; use off, or generation=tr"),
    ("train generation=transformers cluster.engines=1 generation.drafts=history", "generation.drafts",
     "needs the engine in the run's own process, where its history is, got history; use off, or cluster.engines=0"),
    ("train model.kernels=plain generation.transformers.weights=merged_bfloat16",
     "generation.transformers.weights", "needs rlft's LoRA layers, which model.kernels=plain does without"),
    ("train model.attn_implementation=flash", "model.attn_implementation", "is not known to transformers"),
    ("train lora.target_modules=[q_proj,k_prj]", "lora.target_modules", "got k_prj; use all-linear, or a list of d"),
    ("train cluster.ranks=3 cluster.sequence_ranks=3", "cluster.sequence_ranks",
     "does not divide the attention of a qwen2 (4 heads, 2 of keys), got 3; use one of 1, 2, 4"),
    ("train lora.target_modules=[]", "lora.target_modules", "names no layer to adapt, got []; use all-linear"),
    ("train 'lora.target_modules=\"\"'", "lora.target_modules", "names no layer to adapt, got []; use all-linear"),
    ("train lora.target_modules=qproj", "lora.target_modules", "the model has no linear layer of that name, got qproj"),
    # of a folder that also sees, the text model alone is trained
    ("train model.path=sees lora.target_modules=[q_proj,fc1]", "lora.target_modules", "no linear layer of that name"),
    ("train model.path=sees lora.target_modules='.*vision_tower.*'", "lora.target_modules", "no linear layer of that"),
    ("train model.path=sees lora.target_modules='model.layers.0.*'", "lora.target_modules", "would be adapted, too"),
    ("train model.path=only_sees lora.target_modules=[q_proj]", "model.path",
     "transformers has no class of causal language models for a siglip"),
    # mixtures of experts
    ("train lora.experts=true", "lora.experts", "has no experts, got true; leave it out"),
    (f"{SFT} lora.router=true", "lora.router", "has no routers, got true; leave it out"),
    ("train model.path=mixture lora.experts=true lora.dropout=0.1", "lora.dropout", "got 0.1; set it to 0, or lora.e"),
    ("train model.path=mixture lora.router=true lora.use_dora=true", "lora.use_dora", "or lora.router=false"),
    ("train model.path=mixture_of_both lora.use_dora=true", "lora.use_dora", "PEFT takes the MLPs of a deepseek_v3"),
    ("train model.path=mixture lora.target_modules=[gate]",
     "lora.target_modules", "names no layer that an adapter can learn on: it is a router of experts, and lora.router "
     "is false, got gate; use all-linear, or a list of k_proj, o_proj, q_proj, v_proj"),
    ("train model.path=mixture lora.target_modules=[w1]", "lora.target_modules", "no linear layer of that name, got"),
    ("train model.path=mixture_of_llama lora.experts=true", "lora.experts", "adapters of experts are not supported"),
    ("train model.path=mixture_of_llama lora.router=true", "lora.router", "cannot learn: no gradient reaches it from"),
    ("train snapshot.routing=old", "snapshot.routing", "has no experts, got old; set it to free"),
    ("train model.path=mixture_of_llama snapshot.routing=engine",
     "snapshot.routing", "the way in which a llama4_text chooses experts is not known to rlft, got engine; set i"),
    ("train model.path=mixture generation=scripted generation.scripted.answers='{*: [yes]}' snapshot.routing=engine",
     "snapshot.routing", "the scripted engine does not say which experts it chooses, got engine; use old, or gen"),
    ("train snapshot.routing=r3", "snapshot.routing", "r3"),
    ("train model.path=mixture generation=vllm generation.vllm.weights=adapter model.device=cpu",
     "generation.engine", "vLLM on a cpu computes no adapters on a model with experts, got vLLM; use generation=trans"),
    # Packages that are not installed (the last column)
    ("train generation=vllm", "generation.engine", "vLLM is not installed", "vllm"),
    ("train model.attn_implementation=flash_attention_2",
     "model.attn_implementation", "flash-attn is not installed, got flash_attention_2; use auto or sdpa", "flash_attn",
     "kernels"),
    ("train model.attn_implementation=flash_attention_3",
     "model.attn_implementation", "flash-attn-3 is not installed", "flash_attn_interface", "kernels"),
    ("train logger=wandb", "logger.wandb", pip_install("rlft[wandb]"), "wandb"),
    ("train logger=trackio", "logger.trackio", pip_install("rlft[trackio]"), "trackio"),
    ("train data=reasoning_gym reward=reasoning_gym", "data", pip_install("rlft[reasoning-gym]"), "reasoning_gym"),
    (f"train {LEARNED} reward.learned.path=renamed", "reward.learned.path", "holds a causal language model (Qwen2Fo"),
    # Paths
    ("train model.path=", "model.path", "is empty"),
    ("train model.path=/nowhere", "model.path", "got /nowhere"),
    ("train model.path=./nowhere", "model.path", "there is no such folder"),
    ("train model.path=./mine", "model.path", "there is no config.json in that folder"),
    ("train model.path=encoder", "model.path", "a bert is an encoder, which also reads", "use a causal"),
    ("sft demonstrations.path=foreign.jsonl model.path=t5", "model.path", "a t5 is an encoder-decoder"),
    ("train model.path=embedded:big", "model.path", "use embedded:tiny-arithmetic"),
    ("train lora.path=nowhere", "lora.path", "there is no such folder, got nowhere; point it at a PEFT adapter folder"),
    ("train lora.path=mine", "lora.path", "there is no adapter_config.json in that folder, got mine"),
    ("train snapshot.reference=bas", "snapshot.reference", "is neither none, base, copy or ema nor an existing"),
    (f"{PPO} critic.init=rewad", "critic.init", "is neither base or reward nor an existing folder, got rewad"),
    ("train hydra.run.dir=file", "hydra.run.dir", "cannot be written (Not a directory), got file; choose"),
    ("train hydra.sweep.dir=jobs", "hydra.sweep.dir", "belongs to a sweep, and this is one run, got jobs;"),
    ("train model.gradient_checkpointing=maybe", "model.gradient_checkpointing",
     "must be true or false or 'tiles' or 'offload' or 'auto',"),
    ("train model.gradient_checkpointing=offload model.device=cpu", "model.gradient_checkpointing",
     "only a CUDA device has its layers' inputs kept in main memory, got offload; use true or tiles"),
    ("train hydra.run.dir=", "hydra.run.dir", "is empty"),
    # Data
    ("train data=jsonl data.path=nowhere.jsonl", "data.path", "there is no such file, got nowhere.jsonl"),
    ("train data=jsonl data.path=empty.jsonl", "data.path", "holds no data"),
    ("train data=jsonl data.path=array.json", "data.path", "array.json, row 0: must be a JSON object, it is a string"),
    ("train data=jsonl data.path=broken.jsonl", "data.path", "broken.jsonl:2: is not JSON"),
    ("train data=jsonl data.path=other.jsonl", "data.path", "other.jsonl:1: there is no field 'prompt', only"),
    # Rewards and other components
    ("train reward=exactmatch", "reward", "did you mean exact_match?"),
    ("train reward=[exact_match,format] reward.exact_match.weight=0 reward.format.weight=0",
     "reward", "has no weight but 0: nothing would be learned, got [exact_match,format]; set for instance reward"),
    ("train reward.format.mode=lax", "reward.format.mode", "got 'lax'; choose one of strict, soft"),
    ("train reward.exact_match=1", "reward.exact_match", "has no _target_, got 1"),
    (f"{HTTP} reward.http.url=localhost:8000/score", "reward.http.url", "no http:// or https:// address, got local"),
    (f"{HTTP} reward.http.url=ftp://host/score", "reward.http.url", "is no http:// or https:// address"),
    (f"{HTTP} reward.http.url=http:///score", "reward.http.url", "is no http:// or https:// address"),
    (f"{HTTP} \"reward.http.url='http://host name/score'\"", "reward.http.url", "is no http:// or https:// address"),
    (f"{HTTP} reward.http.url=http://host:99999/score", "reward.http.url", "is no address"),
    (f"{HTTP} reward.http.token_variable=NO_SUCH_TOKEN", "reward.http.token_variable", "environment variable that is"),
    (f"{HTTP} reward.http.batch_size=0", "reward.http.batch_size", "must be greater than 0"),
    (f"{HTTP} reward.http.retries=-1", "reward.http.retries", "must be greater than or equal to 0"),
    (f"{HTTP} +reward.http.headers.run=7", "reward.http.headers", "must be a string"),
    # 0.9 * 10 s = 9 s; 9.9 s = 0.9 * 11 s
    (f"{HTTP} reward.http.timeout=9.9", "reward.http.timeout",
     "the 9 s for requests that scoring.timeout leaves (10 s a group), got 9.9; set scoring.timeout=11 or more"),
    ("train reward=judge reward.judge.url=http://host/v1", "reward.judge.url",
     "OpenAI-compatible /chat/completions, got http://host/v1; try http://host/v1/chat/completions"),
    ("train reward=judge reward.judge.timeout=30", "reward.judge.timeout", "exceeds the 9 s for requests that "),
    ("train reward=judge reward.judge.highest=1", "reward.judge.highest", "must be above lowest=1, got 1; "),
    ("train reward=judge \"reward.judge.rubric=' '\"", "reward.judge.rubric", "is empty"),
    ("train reward=judge reward.judge.mode=pairs", "reward.judge.mode", "got 'pairs'; choose one of each, group"),
    ("train reward=judge reward.judge.response_format=json", "reward.judge.response_format", "got 'json'; choose"),
    ("train reward=judge +reward.judge.options.messages=[]", "reward.judge.options.messages", "is set by the reward"),
    ("train reward=length reward.length.mode=target", "reward.length.target", "is null, and mode=target needs it"),
    ("train reward=length reward.length.mode=limit", "reward.length.limit", "is null, and mode=limit needs it"),
    ("train reward=overlong reward.overlong.cache=0", "reward.overlong.cache", "1 to max_tokens=256 tokens, got 0"),
    ("train reward=overlong reward.overlong.cache=-1", "reward.overlong.cache", "1 to max_tokens=256 tokens, got -1"),
    ("train reward=overlong reward.overlong.cache=257", "reward.overlong.cache", "1 to max_tokens=256 tokens, got 257"),
    (f"train {LEARNED} reward.learned.token_budget=0", "reward.learned.token_budget", "must be greater than 0, got 0"),
    (f"train {LEARNED} reward.learned.center=inf", "reward.learned.center", "must be finite"),
    (f"train {LEARNED} reward.learned.scale=big", "reward.learned.scale", "must be a number"),
    (f"train {LEARNED} reward.learned.path=3", "reward.learned.path", "must be a string"),
    ("train reward=reasoning_gym", "reward.reasoning_gym", "scores prompts of data=reasoning_gym only"),
    ("train --config-dir mine reward=[exact_match,mine]", "reward.mine._target_", "current folder, in --config-dir"),
    ("train --config-dir mine reward=[flat]", "reward", "got mine.flat; begin that YAML with `flat:` and indent"),
    ("train algorithm._target_=no.such.Thing", "algorithm._target_", "No module named 'no'), got no.such.Thing"),
    ("train algorithm._target_=rlft.algorithm.grpo.GPRO", "algorithm._target_", "did you mean GRPO?"),
    # Resuming
    ("train resume=run hydra.run.dir=elsewhere", "resume", "leave hydra.run.dir out"),
    ("train resume=run trainer.lr=3", "resume", "trainer.lr: 1e-05 -> 3"),
    ("train data=jsonl data.path=good.jsonl reward=choice", "reward.choice", "answers are not right by themselves"),
    ("train data=jsonl data.path=good.jsonl reward=choice", "reward.choice", "with data.allow_unscorable=true"),
    ("sample data=jsonl data.path=good.jsonl reward=choice", "reward.choice", "is not a letter"),
    (f"{SFT} data=jsonl data.path=good.jsonl reward=choice", "reward.choice", "reference answers are not right by the"),
    ("train model.date=tomorrow", "model.date", "is not a date, got 'tomorrow'; write it as 2026-11-25, or auto"),
    ("train model.date=25.11.2026", "model.date", "is not a date, got "),
    ("train \"model.date='2026-13-01'\"", "model.date", "is not a date, got "),
    ("train \"model.date='20261125'\"", "model.date", "is not a date, got "),
    ("train resume=run data=jsonl data.path=good.jsonl", "resume", "data._target_: rlft.data.arithmetic.Arithmetic ->"),
    ("train hydra.run.dir=run", "hydra.run.dir", "continue it with `rlft resume run`"),
    ("resume", "resume", "there is no run below "),
    ("resume run=", "resume", "names no run; write rlft resume runs/<name>/<time>, or no name for the latest"),
    ("resume steps=3", "resume", "there is no run below "),
    ("resume mine", "resume", "there is no run in that folder"),
    ("resume saved_run/checkpoints/step_000099", "resume",
     "the run has no such checkpoint, got saved_run/checkpoints/step_000099; name one of step_000001, step_000002"),
    ("eval run=saved_run/checkpoints/step_000099", "run", "the run has no such checkpoint"),
    ("resume run seed=3", "resume", "seed: 0 -> 3"),
    ("resume run stepz=3", "stepz", "did you mean steps?"),
    ("resume run steps", "command line", "got steps"),
    ("resume run algorithm=gspo", "resume", "algorithm.ratio: token -> sequence"),
    ("resume changed", "data.path", "data changed since the run began"),
    # Sweeps
    ("train -m seed=1,1", "seed", "has a value twice, got 1"),
    (
        "train -m algorithm.clip_low=0.1,0.2",
        "algorithm.clip_low",
        "cannot be swept: it has no effect in any of the runs, got 0.1, 0.2; it acts with several updates a step",
    ),
    (
        "train -m algorithm.kl_estimator=k1,k2 epochs=1,2",
        "algorithm.kl_estimator",
        "cannot be swept: it has no effect in any of the runs, got k1, k2; it acts with algorithm.kl_coef above 0",
    ),
    ("train -m seed=1 seed=2", "seed", "is given twice"),
    ("train -m steps=1,0", "steps", "must be greater than 0 (job 1: steps=0), got 0"),
    ("train -m +recipe=grpo_arithmetic,grpo_x", "+recipe", "(job 1: +recipe=grpo_x)"),
    ("train -m hydra.run.dir=a,b", "hydra.run.dir", "is the folder of one run, and this is a sweep, got a,b; write"),
    ("train -m hydra.sweep.dir=a,b", "hydra.sweep.dir", "cannot be swept"),
    ("train -m seed=0,1 hydra.sweep.dri=x", "hydra.sweep.dri", "there is no such key, got x; did you mean hydra.sweep"),
    ("train -m seed=0,1 hydra.sweep.subdir=x", "hydra.sweep.subdir", "is set by the sweep, which finds its runs again"),
    ("train -m seed=0,1 hydra.sweep.dir=file", "hydra.sweep.dir", "cannot be written (Not a directory), got file;"),
    ("train hydra.verbose=true", "hydra.verbose", "there is no such key, got true; of Hydra's keys only hydra.run.dir"),
    ("train -m model.device=cpu,cuda", "model.device", "(job 1: model.device=cuda)"),
    ("train -m generation.max_tokens=100,300", "generation.max_tokens", "context of 512 tokens (job 1: "),
    ("train -m --cfg jobs", "--cfg", "got jobs"),
    # More than the model takes
    ("train prompts.max_tokens=600", "prompts.max_tokens", "context of 512 tokens, got 600"),
    ("train prompts.max_tokens=512", "prompts.max_tokens", "for instance to 256, and generation.max_tokens to 256"),
    # Supervised fine-tuning
    ("sft", "demonstrations.path", '"completion": "2"}; to try it without one: rlft sft +recipe='),
    ("rm", "preferences.path", '"rejected": "3"}; to try it without one: rlft rm +recipe=rm_arithmetic'),
    ("dpo", "preferences.path", '"rejected": "3"}; to try it without one: rlft dpo +recipe=dpo_arithmetic'),
    ("train data=jsonl", "data.path", '{"prompt": "What is 1 + 1?", "answer": "2"}; data=arithmetic needs none'),
    ("sft demonstrations.path=other.jsonl max_completion_tokens=64", "demonstrations.path", "jsonl:1: is not a ch"),
    (f"{SFT} token_budget=100", "token_budget", "may have 512 tokens (prompts.max_tokens and a completion), got 100;"),
    (f"{SFT} max_completion_tokens=300", "max_completion_tokens", "is given twice"),
    ("sft demonstrations.path=embedded:arithmetic-demonstrations", "max_completion_tokens", "of 512 tokens, got 1024"),
    (f"{SFT} examples_per_step=2000", "examples_per_step", "demonstrations to train on, got 2000; use at most 9"),
    (f"{SFT} prompts.over_limit=refuse prompts.max_tokens=20", "max_completion_tokens", "demonstrations exceed pro"),
    (f"{SFT} lora=null lora.rank=4", "lora.rank", "belongs to the section lora, which is null here, got 4; leave out"),
    ("train alarms=null alarms.kl=1", "alarms.kl", "the section alarms, which is null here, got 1; leave out"),
    (f"{ALL} model.path=mixture generation=vllm", "generation.engine", "vLLM does not take all weights of a model"),
    (f"{ALL} model.quantization=4bit model.device=cuda", "model.quantization", "4-bit weights cannot be trained"),
    (f"{ALL} model.dtype=bfloat16", "model.dtype", "of bfloat16 weights, got bfloat16; set"),
    (f"{ALL} checkpoint.on_signal=now", "checkpoint.on_signal", "could be saved in place of a step's, got now"),
    (f"{ALL} eval.kl_base=true", "eval.kl_base", "lora=null changes the base itself"),
    (f"{ALL} lora.path=critic", "lora.path", "which is null here, got critic; leave out lora=null"),
    (f"{ALL} {LEARNED} reward.learned.path=critic", "reward.learned.path", "stands on a frozen base, which lora=null"),
    (f"{ALL} {LEARNED} {REFRESH}", "reward.learned.path", "which lora=null changes, got null; use rule rewards"),
    (f"{ALL} algorithm=ppo critic.kind=adapter", "critic.kind", "lora=null changes, got adapter; use shared"),
    (f"{ALL} snapshot.reference=policy", "snapshot.reference", "lora=null changes that, got policy; use base"),
    (f"{ALL} algorithm=opd snapshot.teacher=policy", "snapshot.teacher", "lora=null changes that, got policy; use"),
    (f"{ALL} overlap.lag=1 algorithm.mismatch=token_truncate", "overlap.lag", "the update changes meanwhile, got 1"),
    (
        f"{ALL} generation=vllm cluster.engines=1 cluster.gpus_per_engine=2",
        "cluster.gpus_per_engine",
        "engines that divide the layers among GPUs are sent adapters only, and lora=null has none, got 2; set it to 1",
    ),
    (
        f"{ALL} generation=transformers generation.transformers.weights=merged_bfloat16",
        "generation.transformers.weights",
        "rounds the sum of base and adapter, and lora=null has none, got merged_bfloat16; leave it out",
    ),
    (
        f"{ALL} generation=transformers generation.transformers.weights=fastest",
        "generation.transformers.weights",
        "rounds the sum of base and adapter, and lora=null has none, got fastest; leave it out",
    ),
    (f"{ALL} generation.transformers.weights=merged_int8", "generation.transformers.weights", "got merged_int8; leave"),
    (
        "train generation=transformers generation.transformers.weights=fastest model.kernels=plain",
        "generation.transformers.weights",
        "needs rlft's LoRA layers, which model.kernels=plain does without, got fastest; use apart, or model.kernels",
    ),
    ("doctor lora=null", "lora", "the engine is tried with adapters, and null has none, got null; leave it out"),
    (f"{SFT} lora=null model.quantization=4bit", "model.quantization", "4-bit weights cannot be trained"),
    (f"{SFT} lora=null model.dtype=bfloat16", "model.dtype", "small updates are lost in the rounding of bfloat16"),
    (f"{SFT} steps=0", "steps", "for instance null (optimizer updates;"),
    (f"{SFT} lora=null checkpoint.on_signal=now", "checkpoint.on_signal", "no copy of all weights is kept that could"),
    (f"{SFT} lora=null eval.kl_base=true", "eval.kl_base", "lora=null changes the base itself"),
    (f"{SFT} lora=null data=arithmetic {LEARNED} reward.learned.path=critic",
     "reward.learned.path", "stands on a frozen base, which lora=null changes, got "),
    (f"{SFT} data=arithmetic {LEARNED}", "reward.learned.path", "scores every completion 0"),
    ("resume sft_run demonstrations.path=demonstrations.jsonl", "demonstrations.path", "changed since the run began"),
    ("resume sft_run examples_per_step=5", "resume", "examples_per_step: 4 -> 5"),
    ("resume sft_changed", "demonstrations.path", "the demonstrations changed since the run began"),
    (f"sft -m {SFT[4:]} seed=1 token_budget=100,5000", "token_budget", "and a completion) (job 0: "),
    # Preference optimisation
    ("dpo preferences.path=identical.jsonl max_completion_tokens=64", "preferences.path",
     "no prompt has two different completions with different scores"),
    ("dpo preferences.path=foreign.jsonl max_completion_tokens=64", "preferences", "with another tokenizer (0123)"),
    (f"{DPO} rankings_per_step=2000", "rankings_per_step", "rankings to train on, got 2000; use at most 9"),
    (f"{DPO} loss=dppo", "loss", "is not one of its choices, got dppo; did you mean dpo? All: dpo, ipo, orpo, simpo"),
    (f"{DPO} loss.label_smoothing=0.5", "loss.label_smoothing", "must be less than 0.5, got 0.5"),
    (f"{DPO} loss.gamma=1", "loss.gamma", "the loss chosen here has no such key, got 1; it belongs to loss=simpo"),
    (f"{DPO} loss=orpo loss.label_smoothing=0.1", "loss.label_smoothing", "it belongs to loss=dpo and loss=simpo"),
    (f"{DPO} loss._target_=unittest.mock.Mock", "loss._target_",
     "is no rlft.algorithm.preference.PreferenceLoss"),
    (f"{DPO} loss=simpo snapshot.reference=base", "snapshot.reference",
     "this loss uses no reference, got base; leave it out, or use loss=dpo or ipo"),
    (f"{DPO} snapshot.reference=none", "snapshot.reference",
     "this loss compares the policy with a reference, got none; use copy, base or an adapter's folder, or loss=simpo"),
    (f"{DPO} snapshot.reference=ema", "snapshot.reference", "once for each completion, so it cannot move"),
    (f"{DPO} {SMALL} snapshot.reference=nowhere", "snapshot.reference",
     "is neither auto, none, base or copy nor an existing folder, got nowhere"),
    (f"{DPO} data=arithmetic", "data", "is a key of rlft"),
    ("resume dpo_run loss.beta=0.2", "resume", "loss.beta: 0.1 -> 0.2"),
    ("resume dpo_run loss=ipo", "resume",
     "loss._target_: rlft.algorithm.preference.Dpo -> rlft.algorithm.preference.Ipo"),
    # Reward models
    (f"{RM} token_budget=100", "token_budget", "may have 321 tokens (prompts.max_tokens, max_completion_tokens and an"),
    (
        f"{RM} replay.path=embedded:arithmetic-preferences rankings_per_step=4",
        "replay.fraction",
        "gives the replay none of the 4 rankings of an update, got 0.1",
    ),
    (f"{RM} {SMALL} lora.path=long_head", "lora.path", "its head has weight (1, 999), and this base takes (1, 128)"),
    # Planning
    ("plan +recipe=grpo_arithmetic device_memory=lots", "device_memory", "must be a size, got lots; write it as 24GiB"),
    ("plan device_memory=24", "device_memory", "no device has so few bytes, got 24; write 24GiB"),
    ("chat run=run generation.top_p=5", "generation.top_p", "must be less than or equal to 1, got 5"),
    ("plan device_memory=0MiB", "device_memory", "no device has so few bytes, got 0MiB; write it as 24GiB"),
    # Sampling
    ("sample keep=above", "min_reward", "is null, and keep=above needs it; set min_reward=1.0, or keep=all"),
    ("sample min_reward=1", "min_reward", "is read by keep=above only, and keep=all, got 1.0; set keep=above, or"),
    ("sample keep=best min_reward=0", "min_reward", "is read by keep=above only, and keep=best, got 0.0"),
    ("sample keep=best max_per_prompt=2", "max_per_prompt", "keep=best keeps one completion of each prompt, got 2"),
    ("sample resume=auto", "resume", "starts or continues the run in hydra.run.dir, which is not given"),
    ("sample run=run resume=auto", "resume", "starts or continues the run in hydra.run.dir, which is not given"),
    ("sample reward=http reward.http.group_timeout=30", "reward.http.group_timeout", "exceeds scoring.timeout=10"),
    ("train +recipe=grpo_arithmetic reward=code", "reward.code.tests_field", "holds no tests, got null; fix these"),
    ("sample adapter=critic", "adapter", "holds the adapter of the role critic, which is not a policy"),
    ("sample adapter=elsewhere", "adapter", "it was made for a base with other files (0123"),
    ("sample run=run", "adapter", "that run has no checkpoint"),
    ("sample -m run=run n=1,2", "command line", "this command has no such option"),
    # Evaluating
    ("eval run=rm_run", "run", "is a run of rlft rm, which has no policy"),
    ("chat run=rm_run", "run", "has no policy, got rm_run; name one of rlft train or rlft sft or rlft dpo"),
    ("eval", "run", "yet; train one first (rlft train +recipe=grpo_arithmetic), or give run=<folder> or model.path="),
    ("chat raw=true", "run", "yet; train one first (rlft train +recipe=grpo_arithmetic), or give run=<folder> or mod"),
    ("eval run=", "run", "is empty"),
    ("eval run=nothing", "run", "there is no such folder"),
    ("eval run=run", "run", "there is no checkpoint in that run yet"),
    ("eval run=done", "run", "no checkpoint in that run, which is finished, got done; name another run, or train it"),
    ("report damaged", "report", "metrics.jsonl cannot be read (Is a directory), got damaged; restore it from a copy"),
    ("eval model.path=/nowhere", "model.path", "got /nowhere"),
]  # fmt: skip


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone, tiny_path: Path) -> Path:
    """What the rows find where they run: files, YAML of a user's own, two runs that were begun, and adapters."""
    folder = tmp_path_factory.mktemp("templates")
    row = {"prompt": "What is 1 + 1?", "answer": "2"}
    rows = [json.dumps({**row, "prompt": f"What is {i} + 1?"}) for i in range(40)]
    texts = {
        "file": "not a folder",
        "good.jsonl": "\n".join(rows),
        "empty.jsonl": "\n",
        "array.json": json.dumps(["a"], indent=1),
        "broken.jsonl": f"{rows[0]}\n{{oops",
        "other.jsonl": json.dumps({"sum": "1 + 1?", "answer": "2"}),
        "demonstrations.jsonl": lines({"prompt": f"{i} + 1?", "completion": f"{i + 1}"} for i in range(40)),
        "identical.jsonl": lines({"prompt": f"{i}?", "chosen": "x", "rejected": "x"} for i in range(40)),
        "foreign.jsonl": lines(sampled(i, reward) for i in range(40) for reward in (0.0, 1.0)),
        "study/sweep.yaml": "{}",
        "jobs/0/config.yaml": "{}",
        "loose.yaml": "# @package _global_\n# In no folder named recipe.\nseed: 1\n",
        "mine/reward/mine.yaml": "# Not there.\nmine:\n  _target_: not_there.reward\n  weight: 1.0\n",
        "mine/reward/flat.yaml": "# No name.\n_target_: mine.flat\nweight: 1.0\n",
        "mine/recipe/no_package.yaml": "# Forgot the package.\nseed: 1\n",
        "mine/recipe/bad_yaml.yaml": "# @package _global_\n# Unfinished.\nseed: [1\n",
        "mine/recipe/lines.yaml": "# @package _global_\n# A list.\n- seed\n",
        "mine/recipe/with_console.yaml": "# @package _global_\ndefaults:\n  - override /logger: [console, jsonl]\n",
        "mine/recipe/with_keys.yaml": "# @package _global_\nlogger:\n  console:\n    live: false\n",
        "bell/recipe/rings.yaml": "# @package _global_\n# Rings.\nname: a\a\n",
        "folded/recipe/nested.yaml/inner.yaml": "# In a folder that is named like a file.\n",
        "mine/recipe/dangling.yaml": "# @package _global_\n# Refers to nothing.\nseed: ${nothing}\n",
        "hiding/reward/format.yaml": "# Would never be read.\nformat:\n  weight: 3.0\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latin" / "recipe").mkdir(parents=True)
    (folder / "latin" / "recipe" / "old.yaml").write_bytes(b"# @package _global_\n# \xff.\nseed: 1\n")
    demonstrations = "max_completion_tokens=64 examples_per_step=4 demonstrations.path="
    begun: dict[str, tuple[str, str]] = {
        "run": ("train", ""),
        "changed": ("train", f"data=jsonl data.path={folder}/good.jsonl"),
        "sft_run": ("sft", f"{demonstrations}embedded:arithmetic-demonstrations"),
        "sft_changed": ("sft", f"{demonstrations}{folder}/demonstrations.jsonl"),
        "rm_run": ("rm", RM.removeprefix("rm ")),
        "dpo_run": ("dpo", DPO.removeprefix("dpo ")),
    }
    for name, (command, overrides) in begun.items():
        plain = compose(overrides.split(), command=command)
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
    for name in ("renamed", "other_words", "short", "fewer_rows", "no_tokenizer", "no_config", "long_rope"):
        shutil.copytree(tiny_path, folder / name)
    (folder / "no_tokenizer" / "tokenizer_config.json").write_text("{")
    (folder / "no_config" / "config.json").write_text("{")
    tokenizer = (folder / "other_words" / "tokenizer.json").read_text()
    (folder / "other_words" / "tokenizer.json").write_text(tokenizer.replace('"<answer>"', '"<solution>"'))
    edit_json(folder / "short" / "config.json", {"max_position_embeddings": 64})
    edit_json(folder / "fewer_rows" / "config.json", {"vocab_size": 270})
    BertConfig().save_pretrained(folder / "encoder")
    T5Config().save_pretrained(folder / "t5")
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 100}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    edit_json(folder / "long_rope" / "config.json", {"rope_parameters": rope})
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    AutoConfig.for_model("gemma3", text_config=sizes, vision_config=sizes).save_pretrained(folder / "sees")
    AutoConfig.for_model("siglip_vision_model", **sizes).save_pretrained(folder / "only_sees")
    few = {"vocab_size": 272, **sizes, "num_key_value_heads": 2, "num_local_experts": 2, "pad_token_id": 0}
    for name, kind in (("", "mixtral"), ("_of_llama", "llama4_text"), ("_of_both", "deepseek_v3")):
        AutoConfig.for_model(kind, **few).save_pretrained(folder / f"mixture{name}")
    classifier = LlamaConfig()
    classifier.num_labels = 3
    classifier.save_pretrained(folder / "three_labels")
    return folder


def lines(rows: Iterable[dict[str, Any]]) -> str:
    return "\n".join(map(json.dumps, rows))


def sampled(number: int, reward: float) -> dict[str, Any]:
    """A line of `rlft sample` by a model with another tokenizer."""
    prompt = Prompt(id=str(number), messages=({"role": "user", "content": f"{number}?"},), answer="")
    said = Completion(text="x", token_ids=(7, int(reward)), logprobs=(0.0, 0.0), finish_reason=FinishReason.stop)
    rollout = Rollout(prompt=prompt, completion=said, policy_version=0)
    return sampled_line(rollout, index=0, rewards={}, reward=reward, model="other", tokenizer="0123")


def save_adapters(folder: Path, backbone: Backbone) -> None:
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
    for source, name in (("policy", "wider"), ("critic", "critic_wider")):
        edit_tensors(spoil(source, name) / "adapter_model.safetensors", {FIRST: torch.zeros(4, 999)})
    edit_tensors(spoil("policy", "deeper") / "adapter_model.safetensors", {DEEPER: torch.zeros(4, 128)})
    edit_tensors(spoil("policy", "lacking") / "adapter_model.safetensors", {FIRST: None})
    edit_tensors(spoil("critic", "long_head") / "head.safetensors", {"weight": torch.zeros(1, 999)})
    edit_tensors(spoil("critic", "no_bias") / "head.safetensors", {"bias": None})
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
    edit_tensors(
        spoil("policy", "with_base") / "adapter_model.safetensors",
        {"base_model.model.lm_head.weight": torch.zeros(2, 2)},
    )
    spoil("critic", "critic_patterns", alpha_pattern={"q_proj": 16})
    weights = spoil("policy", "torn") / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def edit_json(file: Path, changes: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(file: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@pytest.fixture
def workplace(templates: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def problem_of(row: tuple[str, ...], code: Any, err: str, out: str, is_clean: bool) -> str:
    """What is wrong with how a row was refused; empty if nothing is."""
    _, key, fragment = row[:3]
    err = re.sub(
        r"^rlft \w+ -m: \d+ configs to check \.\.\n", "", err
    )  # the first line of a sweep whose first job is right
    if code != 2 or not err.startswith(f"rlft: {key}: ") or fragment not in err:
        return f"{code}, {err}"
    if not re.fullmatch(r"rlft: [^:]+: .+; \S.+\n", err):
        return f"it does not say in one line what is wrong and what to do: {err}"
    return f"it says something else, too: {out}" if out else "" if is_clean else "something is left behind"


def is_read_by_libraries(row: tuple[str, ...]) -> bool:
    return any(part in f"{row[0]} {row[2]}" for part in READ_BY_LIBRARIES)


@pytest.mark.parametrize("half", [0, 1])
def test_a_mistake_in_what_libraries_read_is_refused_in_a_line_that_helps(
    half: int, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlft.commands.launch.check_whole", lambda *_, **__: None)  # some folders have a config alone
    monkeypatch.setattr("rlft.logger.console.show_rows", lambda *_, **__: None)  # what the config says is shown before
    wrong = {}
    missing: dict[str, None] = {}
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in missing else find_spec(name, *a))
    before = sorted(workplace.rglob("*"))
    for row in [row for row in TABLE if len(row) > 3 or is_read_by_libraries(row)][half::2]:
        hub_answers.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", list(sys.path))
            for name in row[3:]:
                patch.setitem(missing, name, None)
            code = cli.run(shlex.split(row[0]))
        told = capsys.readouterr()
        is_clean = sorted(workplace.rglob("*")) == before and not GlobalHydra.instance().is_initialized()
        if problem := problem_of(row, code, told.err.replace(f"{workplace}/", ""), told.out, is_clean):
            wrong[row] = problem
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


def test_what_only_looks_like_a_mistake_is_planned(workplace: Path) -> None:
    for typed in ACCEPTED:
        notes = resolve(compose(shlex.split(typed))).plan().notes
        assert all("all of its lora_B are 0" in note for note in notes), (typed, notes)  # adapters nothing has trained


@pytest.mark.parametrize(
    ("typed", "fragment"),
    [
        ("algorithm=gspo algorithm.clip_high=0.2 epochs=2", "the paper's are clip_low=3e-4 clip_high=4e-4"),
        (
            "algorithm=ppo_penalty critic.kind=adapter",
            "have no effect, got 1.0, loss, adaptive, 0.01; they act with several updates a step (epochs or",
        ),
        (
            "algorithm=dapo",
            "algorithm.clip_high: has no effect, got 0.28; it acts with several updates a step (epochs or minibatches",
        ),
        (
            "algorithm.kl_gain=0.2",
            "algorithm.kl_gain: has no effect, got 0.2; it acts with algorithm.kl_coef above 0 and",
        ),
        (
            "algorithm=gdpo reward.format.weight=0",
            "algorithm.reward_aggregation: normalises several rewards one by one, and there is one that counts, got",
        ),
        (
            "algorithm=opd snapshot.teacher=base algorithm.reward_coef=1 dynamic_sampling.max_rounds=2",
            "dynamic_sampling.max_rounds: also replaces groups of equal rewards, by whose tokens a teacher teaches",
        ),
        (
            "generation.top_p=0.9",
            "generation.top_p: leaves out unlikely tokens that the trained policy could",
        ),
        ("generation.top_k=5", "got 5; use generation.top_p=1 generation.top_k=0"),
        ("prompts_per_step=5000", "prompts_per_step: there are only 4096 train prompts"),
        ("eval.num_prompts=500", "eval.num_prompts: there are only 256 held-out prompts"),
        # 16 prompts x 8 are fewer than the 256 completions that the engine computes together.
        (
            "generation=transformers cluster.engines=4",
            "cluster.engines: only 1 of them will have something to sample: the transformers engine computes 256 "
            "completions of a step together, got 4; use generation.transformers.batch_size=32",
        ),
        (
            "generation=transformers cluster.engines=3 prompts_per_step=2 generation.transformers.batch_size=8",
            "only 2 of them will have something to sample: a step has 2 prompts, got 3; raise prompts_per_step, or use",
        ),
    ],
)
def test_what_is_hardly_ever_meant_is_said_and_goes_on(typed: str, fragment: str, workplace: Path) -> None:
    [warning] = resolve(compose(shlex.split(typed))).plan().notes
    assert fragment in warning


def test_a_penalty_on_the_old_policy_is_at_work_with_several_updates(workplace: Path) -> None:
    assert resolve(compose(["algorithm=ppo_penalty", "critic.kind=adapter", "minibatches=2"])).plan().notes == ()


# -- before torch is imported ------------------------------------------------------------------------------------------
HEAVY = ("torch", "transformers", "datasets", "vllm", "peft", "accelerate")
WITHOUT_LIBRARIES = f"""
import json, shlex, sys
from without_libraries import Imported, forbid
forbid(*{HEAVY})
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from rlft import cli
import composed_once
composed_once.install()
from rlft.commands import launch
launch.check_whole = lambda *_, **__: None  # some folders have a config alone
lines = []
before = sorted(Path().rglob("*"))
for typed in json.loads(sys.stdin.read()):
    argv, path = sys.argv, list(sys.path)
    with redirect_stderr(StringIO()) as told, redirect_stdout(StringIO()) as out:
        try:
            code = cli.run(shlex.split(typed))
        except Imported as wanted:
            code = f"imports {{wanted}}"
    sys.argv, sys.path[:] = argv, path
    lines.append([code, told.getvalue(), out.getvalue(), sorted(Path().rglob("*")) == before])
assert not set({HEAVY}) & sys.modules.keys()
print(json.dumps(lines))
"""


# Rows that nothing but a library can refuse, by what it has to read: a part of what is typed, or of the refusal.
READ_BY_LIBRARIES = (
    # the model's config.json, tokenizer and chat template, for which transformers describes tools
    "cannot show tools and", "syntax=json or xml, or use a model", "cannot be shown as a tool",
    "because it has no docstring",
    "context of 512 tokens", "of 512 tokens, got 1024", "model.path=long_rope", "model.path=sees",
    "model.path=only_sees", "no linear layer of that name", "model.path=mixture",
    "does not divide the attention of",
    "has no experts", "has no routers", "which experts it chooses",
    "lora.target_modules=[lm_head]", "lora.target_modules='.*", "lora.target_modules=.*", "torn_layers",
    "data.path=good.jsonl reward=choice",
    "train curriculum.path=", "prompts_per_step=64 curriculum.running=true",
    "use all-linear, or a list of", "and generation.max_tokens to 256", "generation.stop=[272]", "<|im_start|>",
    "is not known to transformers", "encoder-decoder", "causal language model", "another num_labels",
    "the reward model cannot be read", "8-bit AdamW needs",
    # a teacher's config.json and tokenizer, and prompts with its hint
    "more than the model's vocabulary", "e.g. '<answer>' is ", "its context of", "no_tokenizer", "no_config",
    "has token ids up to", "with it the longest row has", "algorithm.top_k=16,9999",
    # what is in the data, in tokens
    "train prompts are longer", "or set prompts.over_limit=drop", "are in each step",
    "array.json, row 0: must be a JSON object",
    "holds no tests", "got 16 and 32 prompts",
    "never prunes a trial",
    "holds no data", "is not JSON", "there is no field", "is not a ch", "another tokenizer", "to train on",
    "exceed pro", "no prompt has two", "gives the replay none", "distinct train problems", "scores prompts of",
    "changed since the run began",
    # tensors, and the base that an adapter was made for
    "other files (0123", "this base", "its tensor", "its head has", "it lacks the tensor", "it has the tensor",
    "cannot be read", "policy,wider", "vLLM cannot serve",
    # a folder that shows only when it is made that it cannot be
    "hydra.sweep.dir=/dev/null/x",
    # devices, by which `auto` chooses an engine
    "train lora=null generation.transformers.weights=merged_int8",
    "no CUDA device", "need a CUDA device", "(job 1: model.device=cuda)",
    "share_base=true", "weights=copy", "batch_invariant=true", "fit on one GPU", "no Ray answers",
    "cluster.address=head", "cluster.address=ray://",
)  # fmt: skip


def test_a_mistake_in_the_config_is_refused_in_a_line_that_helps_before_a_library_is_imported(templates: Path) -> None:
    rows = [row for row in TABLE if len(row) == 3]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES],
        cwd=templates,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent / "helpers")])},
        input=json.dumps([row[0] for row in rows]),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wrong = {}
    for row, (code, err, out, is_clean) in zip(rows, json.loads(done.stdout), strict=True):
        problem = problem_of(row, code, err.replace(f"{templates}/", ""), out, is_clean)
        if problem and (isinstance(code, int) or not is_read_by_libraries(row)):
            wrong[row] = problem
    assert wrong == {}, "imports mean: READ_BY_LIBRARIES lacks a part of the row, or a check comes too late"
