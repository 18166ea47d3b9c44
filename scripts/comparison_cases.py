"""The runs by which two commits are compared: seconds each, all algorithms, commands and kinds of roles between them.

A case is a few command lines of `rlft` in one folder, and nothing else: neither the package's modules nor its layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ALGORITHMS = (
    "a2c", "cispo", "dapo", "dr_grpo", "gdpo", "gmpo", "grpo", "grpo_process", "gspo", "gspo_token", "kimi", "ppo",
    "ppo_penalty", "ppo_ptx", "reinforce", "reinforce_pp", "rloo", "sapo",
)  # fmt: skip

MODEL = "model.device=cpu"
LORA = "lora.rank=4 lora.alpha=8 lora.dropout=0.1"
SAVING = "checkpoint.every=1 checkpoint.keep=9 console=null"
SAMPLING = "generation=transformers generation.max_tokens=24 scoring.workers=0"
EVALUATION = "eval.every=3 eval.num_prompts=2 eval.num_samples=2"
PROMPTS = "data.size=64 data.held_out_size=8"
STEPS = "steps=3 prompts_per_step=4 group_size=4 token_values.every=3"

TRAIN = f"{MODEL} {LORA} {SAVING} {SAMPLING} {EVALUATION} {STEPS}"
GRPO = f"train +recipe=grpo_arithmetic {TRAIN} {PROMPTS}"
PPO = f"train +recipe=ppo_arithmetic {TRAIN} {PROMPTS}"
EXAMPLES = f"{MODEL} {SAVING} {SAMPLING} {EVALUATION} {PROMPTS} steps=3 examples_per_step=8"
SFT = f"{EXAMPLES} {LORA}"
WHOLE = f"{EXAMPLES} checkpoint.every=0"
RM = f"{MODEL} {LORA} {SAVING} steps=3 rankings_per_step=4 eval.every=2 eval.num_rankings=8"
SAMPLE = f"{MODEL} {SAMPLING} {PROMPTS} n=3 num_prompts=24 prompts_per_step=8"

INTERRUPTED, KILLED = 130, -9
"""Exit codes of a run after Ctrl-C, and of one that was killed (minus the signal)."""

STOPPING = """\
import os
import signal
from pathlib import Path


def stopping(group):
    \"\"\"Scores nothing; ends the run in its 6th group (step 2) as if by `kill -9`, in its 13th (step 3) by Ctrl-C.

    Groups are counted in a file: a step that is done again after the kill has its groups counted again.
    \"\"\"
    count = Path("groups.txt")
    number = int(count.read_text()) + 1 if count.exists() else 1
    count.write_text(str(number))
    if number in (6, 13):
        os.kill(os.getpid(), signal.SIGKILL if number == 6 else signal.SIGINT)
    return [0.0 for _ in group.rollouts]
"""
"""A reward of a user's own. Four groups a step: steps 1 (groups 1-4), 2 (5-6, killed), 2 again (7-10), 3 (11-14)."""

STOPPING_YAML = """\
stopping:
  _target_: stopping.stopping
  weight: 0.0
"""
QUESTIONS = [{"question": f"{a}+{b}?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"} for a in range(2, 8) for b in (3, 5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """commands: `rlft`'s arguments, run one after the other in the case's folder. codes: what they exit with, 0 unless
    said. files: {name: content} that are written there first.
    """

    name: str
    commands: Sequence[str]
    codes: Mapping[int, int] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def lines(values: Sequence[object]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def case(
    name: str, *commands: str, codes: Mapping[int, int] | None = None, files: Mapping[str, str] | None = None
) -> Case:
    return Case(name=name, commands=[*map(each_key_once, commands)], codes=codes or {}, files=files or {})


def each_key_once(command: str) -> str:
    """The command with the last value of each key alone.

    >>> each_key_once("train steps=3 seed=0 steps=2")
    'train seed=0 steps=2'
    """
    words = command.split()
    last = {word.partition("=")[0]: i for i, word in enumerate(words) if "=" in word}
    return " ".join(word for i, word in enumerate(words) if last.get(word.partition("=")[0], i) == i)


MORE = {"ppo_ptx": "pretrain.sequences_per_update=4 pretrain.held_out=4"}
"""What an algorithm's recipe needs besides to be short."""
RUN, FIRST, SECOND = "hydra.run.dir=run", "hydra.run.dir=first", "hydra.run.dir=second"

CASES: tuple[Case, ...] = (
    *(
        case(name, f"train +recipe={name}_arithmetic {TRAIN} {PROMPTS} {MORE.get(name, '')} {RUN}")
        for name in ALGORITHMS
    ),
    # -- roles
    case("ppo_shared", f"{PPO} critic.kind=shared critic.normalize_values=true critic.warmup_steps=1 {RUN}"),
    case(
        "iterative_grpo",
        f"train +recipe=iterative_grpo_arithmetic {TRAIN} {PROMPTS} reward=[exact_match,format,learned] "
        f"snapshot.refresh_every=2 reward_model.refresh_every=1 reward_model.pairs_per_update=4 {RUN}",
    ),
    case(
        "ema",
        f"{GRPO} snapshot.reference=ema snapshot.ema_decay=0.9 snapshot.old=copy algorithm.kl_coef=0.05 minibatches=2 "
        f"algorithm.kl_controller=adaptive algorithm.kl_target=0.01 eval.kl_base=true {RUN}",
    ),
    case(
        "opd",
        f"{GRPO} steps=1 hydra.run.dir=teacher",
        f"{GRPO} algorithm=opd snapshot.teacher=teacher snapshot.reference=base algorithm.reward_coef=0.5 {FIRST}",
        f"train +recipe=opd_arithmetic {TRAIN} {PROMPTS} snapshot.teacher=embedded:tiny-arithmetic "
        "algorithm.teacher_in=loss algorithm.divergence=jensen_shannon algorithm.top_k=4 "
        f"\"snapshot.teacher_hint='{{answer}}'\" {RUN}",
    ),
    # -- ways to compute
    case("bfloat16", f"{GRPO} model.dtype=bfloat16 generation.transformers.weights=merged_bfloat16 {RUN}"),
    case(
        "dora",
        f"{GRPO} lora.use_dora=true lora.use_rslora=true generation.transformers.weights=apart "
        f"model.gradient_checkpointing=true token_budget=160 algorithm.mismatch=token_mask {RUN}",
    ),
    case("sdpa", f"{GRPO} model.attn_implementation=sdpa trainer.schedule=cosine trainer.weight_decay=0.01 {RUN}"),
    case(
        "lanes",
        f"train +recipe=ppo_ptx_arithmetic {TRAIN} {PROMPTS} {MORE['ppo_ptx']} steps=2 minibatches=2 cluster.lanes=4 "
        f"token_budget=256 {FIRST}",
        f"{GRPO} steps=2 epochs=2 snapshot.reference=copy algorithm.kl_coef=0.05 "
        f"cluster.ranks=2 cluster.lanes=4 cluster.shard_base=true cluster.engines=1 {RUN}",
    ),
    case(
        "all_weights",
        f"train +recipe=grpo_arithmetic {MODEL} {SAVING} {SAMPLING} {EVALUATION} {STEPS} {PROMPTS} lora=null "
        "trainer.lr=1e-4 snapshot.reference=ema snapshot.ema_decay=0.9 snapshot.old=copy algorithm.kl_coef=0.05 "
        f"minibatches=2 {RUN}",
    ),
    case(
        "ranks_of_all_weights",
        f"train +recipe=ppo_arithmetic {MODEL} {SAVING} {SAMPLING} {EVALUATION} {STEPS} {PROMPTS} lora=null "
        f"trainer.lr=1e-4 trainer.optimizer=muon critic.kind=shared cluster.ranks=2 cluster.lanes=4 {RUN}",
    ),
    case(
        "engines_of_all_weights",
        f"train +recipe=grpo_arithmetic {MODEL} {SAVING} {SAMPLING} {EVALUATION} {STEPS} {PROMPTS} lora=null "
        f"trainer.lr=1e-4 snapshot.reference=base algorithm.kl_coef=0.05 cluster.engines=2 cluster.ranks=2 {RUN}",
    ),
    # -- data and rewards
    case("images", f"train +recipe=grpo_shapes {TRAIN} {PROMPTS} {RUN}"),
    case(
        "rewards",
        f"{GRPO} reward=[exact_match,format,math,length,cosine,repetition,overlong] scoring.workers=1 "
        "algorithm.entropy_coef=0.01 trainer.reset_every=2 \"generation.stop=['</answer>']\" "
        f"generation.include_stop_str_in_output=true {RUN}",
    ),
    case(
        "gsm8k",
        f"train +recipe=grpo_gsm8k {TRAIN} data.path=questions data.system_prompt=null data.few_shot=1 "
        f"reward=[math,format] model.path=embedded:tiny-arithmetic prompts.max_tokens=256 {RUN}",
        files={"questions/train.jsonl": lines(QUESTIONS[:8]), "questions/test.jsonl": lines(QUESTIONS[8:])},
    ),
    # -- commands
    case("sft", f"sft +recipe=sft_arithmetic {SFT} {RUN}"),
    case("whole_model", f"sft +recipe=r1_cold_start_arithmetic {WHOLE} {RUN}"),
    case(
        "rm",
        f"rm +recipe=rm_arithmetic {RM} {FIRST}",
        f"rm +recipe=rm_arithmetic {RM} margin=0.3 lora.path=first replay.fraction=0.5 "
        f"replay.path=embedded:arithmetic-preferences {RUN}",
    ),
    case("dpo", f"dpo +recipe=dpo_arithmetic {RM} {RUN}"),
    case(
        "dpo_rounds",
        f"dpo +recipe=dpo_arithmetic {RM} loss=orpo {FIRST}",
        f"dpo +recipe=dpo_arithmetic {RM} loss=ipo loss.sft_coef=0.1 lora.path=first {RUN}",
        f"dpo +recipe=dpo_arithmetic {RM} loss=simpo loss.label_smoothing=0.1 {SECOND}",
    ),
    case(
        "rlhf",
        f"sft +recipe=sft_arithmetic {SFT} hydra.run.dir=sft",
        f"sample run=sft {SAMPLE} hydra.run.dir=samples",
        f"rm +recipe=rlhf_rm_arithmetic {RM} lora.path=sft preferences.path=samples/samples.jsonl hydra.run.dir=rm",
        f"train +recipe=rlhf_ppo_arithmetic {TRAIN} {PROMPTS} lora.path=sft snapshot.reference=sft "
        f"reward.learned.path=rm {RUN}",
    ),
    case(
        "distillation",
        f"sample {SAMPLE} keep=best hydra.run.dir=samples",
        f"sft +recipe=distill_arithmetic {WHOLE} demonstrations.path=samples/samples.jsonl {RUN}",
    ),
    case(
        "after",
        f"{GRPO} steps=1 {RUN}",
        "eval run=run eval.num_samples=3 eval.num_prompts=4",
        "export run=run out=model",
        "export run=run out=adapter as=adapter",
        "eval model.path=model generation=transformers generation.max_tokens=24 model.device=cpu eval.num_prompts=2",
    ),
    case("sweep", f"train -m +recipe=grpo_arithmetic {TRAIN} {PROMPTS} steps=2 seed=0,1 hydra.sweep.dir=sweep"),
    # -- going on
    case(
        "resume",
        f"{PPO} steps=2 {FIRST}",
        "resume first steps=3",
        f"resume first/checkpoints/step_000001 trainer.lr=5e-4 {SECOND}",
    ),
    case(
        "interrupted",
        f"{GRPO} --config-dir mine reward=[exact_match,format,stopping] {RUN}",
        "resume run --config-dir mine",
        "resume run --config-dir mine",
        codes={0: KILLED, 1: INTERRUPTED},
        files={"mine/reward/stopping.yaml": STOPPING_YAML, "stopping.py": STOPPING},
    ),
)
