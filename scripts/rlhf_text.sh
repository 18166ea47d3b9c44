#!/usr/bin/env bash
# RLHF on text with a real model, SmolLM2-135M-Instruct: answers ranked by a rule that stands for a person's taste, a
# reward model of the rankings, and PPO against it, once with a KL to the base and once without.
#   scripts/rlhf_text.sh [folder]     SEED=1: another seed     MODEL=<folder made by scripts/make_smollm2.py>
# Every stage is a run in the folder. Repeated, the script goes on where it was. Half an hour of two cores for each seed.
set -euo pipefail
out=${1:-runs/rlhf_text}
. "$(dirname "$0")/pipeline.sh"
text=$here/rlhf_text
file=$text/policy.yaml
model=(); [ -z "${MODEL:-}" ] || model=(model.path="$MODEL")

"$python" "$text/taste.py" prompts "$text/prompts.jsonl"
sample 1-sample "$file" ${model[@]+"${model[@]}"} "reward=[$text/taste.py:taste]" n=4
"$python" "$text/taste.py" rank "$out/1-sample/samples.jsonl" "$out/rankings.jsonl"
learn rm 2-reward-model "$file" ${model[@]+"${model[@]}"} preferences.path="$out/rankings.jsonl" \
  preferences.held_out_fraction=0.4 epochs=2 steps=30 rankings_per_step=8 max_completion_tokens=32 trainer.lr=5e-4
for kl in 0.1 0; do
  learn train "3-ppo-kl-$kl" "$file" ${model[@]+"${model[@]}"} reward.learned.path="$out/2-reward-model" \
    algorithm.kl_coef=$kl
done
table samples=1-sample "reward model=2-reward-model" "PPO, KL 0.1=3-ppo-kl-0.1" "PPO, no KL=3-ppo-kl-0"
