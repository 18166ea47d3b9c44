"""Training on texts and rankings: the loop of `rlft sft`, `rlft rm` and `rlft dpo`."""
