"""Memory and launches of an update of TRL's GRPOTrainer on the pretended card: models and rows are card_peaks.py's."""

import gc
import random
import string
import tempfile
from pathlib import Path
from typing import Any

import torch
from card_peaks import CASES, GROUP, PROMPTS, Case, hollow, model_folder, planned, updates
from pretended_card import COUNTS
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from rlft.model.backbone import load_backbone


def main(*names: str) -> dict[str, Any]:
    """{case: (bytes, launches) of an update of rlft and of one of TRL}"""
    found = {}
    for name in names:
        counted = []
        for update in (of_rlft, of_trl):
            load_backbone.cache_clear()
            gc.collect()
            with tempfile.TemporaryDirectory() as folder:
                counted.append(update(CASES[name], Path(folder)))
        found[name] = counted
    return found


def of_rlft(case: Case, folder: Path) -> tuple[int, int]:
    """The second update's, which finds the optimizer's moments."""
    before = COUNTS.live
    with updates(planned(case, folder), case) as update:
        for _ in range(2):
            begin()
            update()
    return COUNTS.peak - before, COUNTS.launches.total()


def of_trl(case: Case, folder: Path) -> tuple[int, int]:
    """The second update's, whose completions are random tokens of full length: nothing is sampled.

    A Triton kernel, which the card cannot run, counts as one launch.
    """
    import trl.kernels.chunked_logprob as kernels
    from datasets import Dataset
    from peft import LoraConfig
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    before, path = COUNTS.live, model_folder(case, folder)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, case.dtype))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer), case.size.vocabulary)])
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    dice = random.Random(0)
    prompts = ["".join(dice.choices(string.ascii_lowercase, k=case.prompt)) for _ in range(8 * PROMPTS)]
    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=2, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        max_completion_length=case.completion, beta=0.0, gradient_checkpointing=False, bf16=True, report_to="none",
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer: Any = GRPOTrainer(
        model=model,
        reward_funcs=lambda completion_ids, **_: [sum(ids) / 1e5 for ids in completion_ids],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer._generate_single_turn = lambda ids, *_, **__: (
        [[dice.randrange(30, 200) for _ in range(case.completion)] for _ in ids],
        None,
    )
    trainer.add_callback(FromTheStep())
    for name, function in vars(kernels).copy().items():
        if type(function).__name__ in ("JITFunction", "Autotuner", "Heuristics"):
            setattr(kernels, name, Launch(name))
    with hollow():
        trainer.train()
    return COUNTS.peak - before, COUNTS.launches.total()


class FromTheStep(TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        begin()


def begin() -> None:
    COUNTS.clear()
    COUNTS.peak = COUNTS.live


class Launch:
    """Stands in for a Triton kernel."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: COUNTS.launch(self.name)
