"""One run of TRL's GRPOTrainer on a benchmark's work, in this process; the last line it prints is its `Measured`.

Started by bench_step.py. Its settings are the fastest that we found for it: transformers generation with a KV cache, or
vLLM in the same process; no gradient checkpointing, no reference model (beta 0), the fused LM head that TRL 1.16 always
uses, one optimizer step.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from bench_work import EMBEDDED, Measured, mean_of

from rlft.commands.doctor.work import Workload
from rlft.system.device import peak_memory_bytes

ENGINE_SHARE = 0.45
"""Of the GPU's memory, for vLLM: rlft's default as well (generation.vllm.gpu_memory_utilization)."""
ROOM = 8
"""Tokens that vLLM may take beside prompt and completion."""


def main() -> None:
    asked = arguments()
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    work, steps = Workload(**asked.work), asked.steps + 1
    cuda = torch.cuda.is_available()
    lora = LoraConfig(r=work.rank, lora_alpha=work.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=getattr(torch, asked.dtype))
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    if tokenizer.eos_token is None:  # TRL needs an end token: one that the model cannot sample
        tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer), model.config.vocab_size)])
        tokenizer.add_special_tokens({"eos_token": "<end>"})
    if model.generation_config.eos_token_id is None:  # else TRL takes it for a list of numbers
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    config = GRPOConfig(
        output_dir=str(asked.out),
        max_steps=steps,
        per_device_train_batch_size=asked.micro_batch,
        gradient_accumulation_steps=work.completions // asked.micro_batch,
        num_generations=work.group,
        max_completion_length=work.completion_tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-5,
        gradient_checkpointing=False,
        bf16=cuda and asked.dtype == "bfloat16",
        use_cpu=not cuda,
        report_to="none",
        save_strategy="no",
        logging_steps=steps,
        disable_tqdm=True,
        seed=0,
        **engine_options(asked.engine, work),
    )
    seconds: list[dict[str, float]] = []
    stage = {"sample": 0.0, "score": 0.0}

    def timed(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            if cuda:
                torch.cuda.synchronize()
            stage[name] += time.perf_counter() - start
            return result

        return run

    class Clock(TrainerCallback):
        """Takes the loop's whole time: a step begins where the one before has ended, as rlft's do."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            step, self.start = time.perf_counter() - self.start, time.perf_counter()
            seconds.append({**stage, "step": step, "train": step - sum(stage.values())})
            stage.update(sample=0.0, score=0.0)

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> Any:
        return [mean_of(ids) for ids in completion_ids]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": json.loads(line)["prompt"]} for line in asked.prompts.read_text().splitlines()]
        ),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Clock()],
    )
    trainer._generate = timed("sample", trainer._generate)
    trainer._calculate_rewards = timed("score", trainer._calculate_rewards)
    trainer.train()
    print(Measured(seconds=seconds[1:], peak=peak_memory_bytes()).dump())


def engine_options(engine: str, work: Workload) -> dict[str, Any]:
    """TRL's settings of how completions are sampled."""
    if engine == "transformers":
        return {}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": ENGINE_SHARE,
        "vllm_max_model_length": work.prompt_tokens + work.completion_tokens + ROOM,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=json.loads, required=True)
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
