#!/usr/bin/env bash
# RLHF as InstructGPT did it (arXiv 2203.02155), on the embedded task: SFT, a reward model, PPO against it. Minutes on a CPU.
#   scripts/rlhf_arithmetic.sh [folder]     PTX=1: pretraining text mixed into PPO's loss
# Every stage is a run in the folder. Repeated, the script goes on where it was; a stage whose folder is removed is done
# again, and one that was made from something else than is there now is refused.
set -euo pipefail
out=${1:-runs/rlhf_arithmetic}
rlft=${RLFT:-rlft}
ppo=(); [ -z "${PTX:-}" ] || ppo=(algorithm=ppo_ptx pretrain.path=embedded:arithmetic-text pretrain.given_field=given)
quiet=(logger=jsonl)

$rlft sft +recipe=sft_arithmetic "${quiet[@]}" resume=auto hydra.run.dir="$out/1-sft" epochs=1 steps=6 trainer.lr=5e-4
$rlft sample run="$out/1-sft" resume=auto hydra.run.dir="$out/2-sample" n=4 num_prompts=3000
$rlft rm +recipe=rm_arithmetic "${quiet[@]}" resume=auto hydra.run.dir="$out/3-reward-model" lora.path="$out/1-sft" \
  preferences.path="$out/2-sample/samples.jsonl" rankings_per_step=16 epochs=4 eval.every=100 \
  trainer.lr=2e-3 trainer.schedule=cosine trainer.warmup=20
$rlft train +recipe=rlhf_ppo_arithmetic "${quiet[@]}" resume=auto hydra.run.dir="$out/4-ppo" lora.path="$out/1-sft" \
  snapshot.reference="$out/1-sft" reward.learned.path="$out/3-reward-model" ${ppo[@]+"${ppo[@]}"}
"${PYTHON:-python}" "$(dirname "$0")/stage_table.py" SFT="$out/1-sft" samples="$out/2-sample" \
  "reward model=$out/3-reward-model" PPO="$out/4-ppo"
