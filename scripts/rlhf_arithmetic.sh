#!/usr/bin/env bash
# RLHF as InstructGPT did it (arXiv 2203.02155), on the embedded task: SFT, a reward model, PPO against it. Minutes on a CPU.
#   scripts/rlhf_arithmetic.sh [folder]     SEED=1: another seed     PTX=1: pretraining text mixed into PPO's loss
# Every stage is a run in the folder. Repeated, the script goes on where it was; a stage whose folder is removed is done
# again, and one that was made from something else than is there now is refused.
set -euo pipefail
out=${1:-runs/rlhf_arithmetic}
. "$(dirname "$0")/pipeline.sh"
ppo=(); [ -z "${PTX:-}" ] || ppo=(algorithm=ppo_ptx pretrain.path=embedded:arithmetic-text pretrain.given_field=given)

learn sft 1-sft +recipe=sft_arithmetic epochs=1 steps=6 trainer.lr=5e-4
sample 2-sample run="$out/1-sft" n=4
learn rm 3-reward-model +recipe=rlhf_rm_arithmetic lora.path="$out/1-sft" preferences.path="$out/2-sample/samples.jsonl"
learn train 4-ppo +recipe=rlhf_ppo_arithmetic lora.path="$out/1-sft" snapshot.reference="$out/1-sft" \
  reward.learned.path="$out/3-reward-model" ${ppo[@]+"${ppo[@]}"}
table SFT=1-sft samples=2-sample "reward model=3-reward-model" PPO=4-ppo
