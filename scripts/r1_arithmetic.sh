#!/usr/bin/env bash
# DeepSeek-R1's pipeline (arXiv 2501.12948) on the embedded task, R1-Zero and three students beside it. Minutes on a CPU.
#   scripts/r1_arithmetic.sh [folder]     SEED=1: another seed
# Every stage is a run in the folder. Repeated, the script goes on where it was; a stage whose folder is removed is done
# again, and one that was made from something else than is there now is refused.
set -euo pipefail
out=${1:-runs/r1_arithmetic}
. "$(dirname "$0")/pipeline.sh"
needs py3langid language "the reward for the language of the reasoning"
english=(reward=[exact_match,format,language] reward.language.target=en reward.language.min_words=3)

learn train 0-zero +recipe=r1_grpo_arithmetic
learn sft 1-cold-start +recipe=r1_cold_start_arithmetic
learn train 2-grpo +recipe=r1_grpo_arithmetic model.path="$out/1-cold-start"
# Rejection sampling: right, well formatted and in English, once a prompt.
sample 3-keepers run="$out/2-grpo" n=2 num_prompts=2048 keep=above min_reward=1.35 max_per_prompt=1
learn sft 4-keepers-sft +recipe=r1_keepers_arithmetic model.path="$out/1-cold-start" \
  demonstrations.path="$out/3-keepers/samples.jsonl"
# The reward model learns from what the cold start said, good and bad.
sample 5-ranked run="$out/1-cold-start" n=4 num_prompts=1024 "${english[@]}"
learn rm 6-reward-model +recipe=rm_arithmetic model.path="$out/4-keepers-sft" max_completion_tokens=80 \
  preferences.path="$out/5-ranked/samples.jsonl" preferences.held_out_fraction=0.2 trainer.schedule=cosine trainer.beta2=0.99
learn train 7-final +recipe=r1_final_arithmetic model.path="$out/4-keepers-sft" \
  reward.learned.path="$out/6-reward-model"
# A smaller model taught by the result, and the same one taught by reinforcement alone.
sample 8-lessons run="$out/7-final" n=1 num_prompts=4000 keep=above min_reward=1.35 "${english[@]}"
learn sft 9-student-distilled +recipe=distill_arithmetic demonstrations.path="$out/8-lessons/samples.jsonl"
learn train 10-student-grpo +recipe=r1_grpo_arithmetic model.path=embedded:tiny-student
# The alternative to more traces: the student samples, and the model that wrote the lessons judges each of its tokens. It
# begins with a third of the updates on the lessons, since the bare student has not been trained on words.
learn sft 11-student-start +recipe=distill_arithmetic demonstrations.path="$out/8-lessons/samples.jsonl" steps=100
exported 7-final-model 7-final
learn train 12-student-opd +recipe=opd_arithmetic model.path="$out/11-student-start" snapshot.teacher="$out/7-final-model" \
  generation.max_tokens=80 algorithm.teacher_in=loss minibatches=4 trainer.lr=3e-3
table "R1-Zero=0-zero" "cold start=1-cold-start" "GRPO, rule rewards=2-grpo" "rejection sampling=3-keepers" \
  "SFT on the keepers=4-keepers-sft" "samples to rank=5-ranked" "reward model=6-reward-model" \
  "GRPO, rules and reward model=7-final" "lessons=8-lessons" "student, distilled=9-student-distilled" \
  "student, GRPO alone=10-student-grpo" \
  "student, a third of the lessons' updates=11-student-start" "student, taught by the teacher=12-student-opd"
