"""One run of TRL's GRPOTrainer with the config of a run of rlft's GRPO; it leaves the files of such a run.

    python scripts/compare_trl.py +recipe=grpo_arithmetic eval.kl_base=true seed=0 hydra.run.dir=runs/trl/seed_0

The words are those of `rlft train`. Both trainers have the same base, prompts (the same in each step), completions of
a prompt, rewards (rlft's functions) and weights, adapter, AdamW and seed; what is drawn from the seed differs. The
adapter of each evaluation is kept and evaluated afterwards as `rlft train` evaluates its own: the same held-out
prompts, sampled with the same seeds by rlft's engine. TRL's settings, and the keys of rlft that they come from:

    beta=0, delta=None, entropy_coef=0           algorithm.kl_coef=0, dual_clip=null, entropy_coef=0
    epsilon, epsilon_high                        algorithm.clip_low, clip_high
    loss_type="grpo"                             algorithm.aggregate=sequence_mean_token_mean
    importance_sampling_level="token"            algorithm.ratio=token
    scale_rewards="group"                        algorithm.std=sample; TRL adds 1e-4 to it, rlft algorithm.eps
    multi_objective_aggregation                  algorithm.reward_aggregation: both sum_then_normalize
    num_iterations=1                             epochs=1
    steps_per_generation                         minibatches: the updates of a step
    num_generations, generation batch            group_size, prompts_per_step x group_size
    max_completion_length, temperature, top_p,
    top_k, min_p                                 generation.max_tokens, temperature, top_p, top_k, min_p
    learning_rate                                trainer.lr
    lr_scheduler_type="constant"                 trainer.schedule=constant, warmup=0
    adam_beta1, adam_beta2, adam_epsilon,
    weight_decay, max_grad_norm                  trainer.beta1, beta2, eps, weight_decay, max_grad_norm
    LoraConfig: r, lora_alpha, lora_dropout,
    target_modules, use_rslora                   lora.rank, alpha, dropout, target_modules, use_rslora
    max_steps, seed                              steps x minibatches, seed

Another objective or schedule is refused. Micro-batches divide an update evenly, so that the mean of their means is the
update's mean. With several updates in a step TRL deals completions to them, rlft whole groups. Runs of TRL are not
resumed, they begin again. compare_algorithms.py --trl starts such runs.

Exit codes: 0 done, 2 a mistake the user can fix, 130 stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.config import compose as config
from rlft.config.schema import RunConfig
from rlft.logger.jsonl import EVALUATIONS, METRICS, encode
from rlft.reward.workers.reward_spec import RewardSpec, specs
from rlft.runs import run_folder
from rlft.system.terminal import pip_install
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from rlft.plan.train_plan import TrainPlan

MOST_ROWS = 64
"""Completions in one forward and backward pass of TRL's trainer, at most; it pads them to the longest."""

# What a config must say for TRL's trainer to do the same. Some other values have counterparts, too; GRPO needs none.
REQUIRED: dict[str, object] = {
    "algorithm._target_": "rlft.algorithm.grpo.GRPO",
    "algorithm.supervision": "outcome",
    "algorithm.std": "sample",
    "algorithm.reward_aggregation": "sum_then_normalize",
    "algorithm.aggregate": "sequence_mean_token_mean",
    "algorithm.surrogate": "clipped",
    "algorithm.ratio": "token",
    "algorithm.dual_clip": None,
    "algorithm.kl_coef": 0.0,
    "algorithm.entropy_coef": 0.0,
    "algorithm.mismatch": "off",
    "algorithm.off_policy_limit": None,
    "epochs": 1,
    "dynamic_sampling.max_rounds": 0,
    "environment": None,
    "cluster.engines": 0,
    "cluster.ranks": 1,
    "generation.stop": [],
    "lora.path": None,
    "lora.use_dora": False,
    "prompts.style": "chat",
    "trainer.reset_every": 0,
    "trainer.schedule": "constant",
    "trainer.warmup": 0,
}

Weights = dict[str, "Tensor"]
"""An adapter's tensors by PEFT's names."""


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code and prints its errors."""
    parser = argparse.ArgumentParser(prog="compare_trl.py", description=__doc__)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="as for rlft train")
    parser.add_argument("--config-dir", type=Path, help="folder with more recipes, as for rlft train")
    options = parser.parse_args(arguments)
    try:
        check_installed()
        composed = config.compose_run(options.overrides, options.config_dir)
        check(composed.plain)
        train_and_evaluate(composed.plain, composed.folder)
    except UserError as error:
        print(f"compare_trl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; a run of TRL begins again", file=sys.stderr)
        return 130
    return 0


def check_installed() -> None:
    """Refuses to go on without TRL."""
    if importlib.util.find_spec("trl") is None:
        raise UserError("trl", "is not installed", remedy=pip_install("rlft[bench]"))


def check(plain: Mapping[str, Any]) -> None:
    """Refuses a config that TRL's trainer would be told another objective for.

    Raises:
        UserError: the first key with a value that it has no counterpart of here.
    """
    for key, needed in REQUIRED.items():
        value = value_of(plain, key)
        # Both sample in float32 with their own base, where `auto` corrects nothing.
        if value != needed and (key, value) != ("algorithm.mismatch", "auto"):
            problem = "TRL's GRPO is compared with rlft's as the recipe grpo_arithmetic has it"
            shown = "a section" if isinstance(value, dict) else value
            raise UserError(key, problem, got=shown, remedy=f"use {key}={'null' if needed is None else needed}")
    if plain["prompts_per_step"] % plain["minibatches"]:
        problem = f"does not divide the {plain['prompts_per_step']} prompts of a step"
        raise UserError("minibatches", problem, got=plain["minibatches"], remedy="use minibatches=1")
    if not plain["eval"]["every"]:
        raise UserError("eval.every", "nothing would be measured", got=0, remedy="use eval.every=10")
    for name, spec in specs(plain["reward"]).items():
        if spec.runs_in_trainer or spec.scores_steps:
            problem = "has no counterpart in TRL's trainer"
            raise UserError(f"reward.{name}", problem, got=spec.target, remedy="use rewards of whole completions")


def train_and_evaluate(plain: dict[str, Any], folder: Path) -> None:
    """Trains, then evaluates; the folder holds config.yaml from the beginning, a line a step, and the evaluations."""
    from rlft.config.resolved import resolve

    plan = resolve({**plain, "logger": {}, "resume": None}).plan(trains=False)
    run_folder.check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_config(folder, plain, {"trl": metadata.version("trl")})
    adapters = train(plan, folder)
    evaluate(plan, folder, adapters)


# -- training with TRL -------------------------------------------------------------------------------------------------
def train(plan: TrainPlan, folder: Path) -> dict[int, Weights]:
    """Trains with TRL; {step: the adapter after it} of all steps that are evaluated, 0 among them."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from rlft.model.backbone import load_tokenizer, source
    from rlft.system.device import peak_memory_bytes, resolve_device, resolve_dtype

    run, prompts = plan.config, prompts_of(plan)
    device = resolve_device(run.model.device)
    dtype = resolve_dtype(run.model.dtype, device)
    tokenizer = load_tokenizer(run.model)
    rows = [{"prompt": [dict(message) for message in p.messages], "place": place} for place, p in enumerate(prompts)]
    check_tokens(tokenizer, prompts[0])
    model = AutoModelForCausalLM.from_pretrained(**source(run.model), dtype=dtype)
    if model.generation_config.eos_token_id is None:  # else TRL takes it for a list of numbers
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    rewards = specs(run.reward)
    functions: list[Any] = [reward_function(spec, prompts, tokenizer, run) for spec in rewards.values()]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=functions,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=device.type == "cpu",
            bf16=False,  # weights that are bfloat16 compute in it without
            reward_weights=[spec.weight for spec in rewards.values()],
            **settings(run),
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", **adapter_settings(run)),
    )
    adapters: dict[int, Weights] = {}

    class Recorder(TrainerCallback):
        """Times steps, writes a line of metrics of each and keeps the adapters that are evaluated."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            adapters[0] = weights_of(trainer.model)

        # TRL's steps are updates, of which a step of rlft has `minibatches`.
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % run.minibatches == 0:
                self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step, updates_after_it = divmod(state.global_step, run.minibatches)
            if updates_after_it:
                return
            self.seconds = time.perf_counter() - self.start
            if is_evaluated(step, run):
                adapters[step] = weights_of(trainer.model)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "reward" not in logs:  # the last one is of the whole training
                return
            line = {
                "step": state.global_step // run.minibatches,
                "reward/mean": float(logs["reward"]),
                "policy/grad_norm": float(logs["grad_norm"]),
                "length/mean": float(logs["completions/mean_length"]),
                "time/step": self.seconds,
                "memory/peak_bytes": peak_memory_bytes(),
            }
            append(folder / METRICS, line)

    trainer.add_callback(Recorder())
    trainer.train()
    return adapters


def value_of(plain: Mapping[str, Any], key: str) -> Any:
    """The value of a key with dots; a section if the key names one, None of a group that is not chosen.

    Raises:
        KeyError: the section has no such key, so that it would not be checked.
    """
    section, *rest = key.split(".")
    value: Any = plain.get(section)
    for part in rest:
        value = value[part]
    return value


def settings(run: RunConfig) -> dict[str, Any]:
    """TRL's settings of this config, as the module says, and how it runs."""
    rows = math.gcd(run.completions_per_step // run.minibatches, MOST_ROWS)
    sampling, adamw, algorithm = run.generation.sampling, run.trainer, run.algorithm
    return {
        "max_steps": run.steps * run.minibatches,
        "seed": run.seed,
        "shuffle_dataset": False,  # they come in the order of rlft's steps
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": run.completions_per_step // run.minibatches // rows,
        "steps_per_generation": run.completions_per_step // rows,
        "num_generations": run.group_size,
        "num_iterations": run.epochs,
        "max_completion_length": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "beta": algorithm["kl_coef"],
        "epsilon": algorithm["clip_low"],
        "epsilon_high": algorithm["clip_high"],
        "delta": algorithm["dual_clip"],
        "entropy_coef": algorithm["entropy_coef"],
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "learning_rate": adamw.lr,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "adam_beta1": adamw.beta1,
        "adam_beta2": adamw.beta2,
        "adam_epsilon": adamw.eps,
        "weight_decay": adamw.weight_decay,
        "max_grad_norm": adamw.max_grad_norm,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "logging_steps": run.minibatches,  # a line a step
        "report_to": "none",
        "save_strategy": "no",
    }


def adapter_settings(run: RunConfig) -> dict[str, Any]:
    """PEFT's settings of the adapter. UserError: the run trains all weights."""
    lora = run.lora
    if lora is None:
        raise UserError("lora", "TRL's adapter is compared with rlft's", got="null", remedy="leave it out")
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "use_rslora": lora.use_rslora,
    }


def prompts_of(plan: TrainPlan) -> list[Prompt]:
    """The prompts of all steps in their order: those that `rlft train` samples with the same seed."""
    from rlft.data.prompts import prompts_for_step

    run, known = plan.config, plan.train_prompts.prompts
    return [
        known[index]
        for step in range(run.steps)
        for index in prompts_for_step(len(known), run.prompts_per_step, run.seed, step)
    ]


def check_tokens(tokenizer: Any, prompt: Prompt) -> None:
    """Refuses a tokenizer by which TRL would read other tokens than rlft."""
    messages = [dict(message) for message in prompt.messages]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    if tuple(theirs["input_ids"]) != tuple(prompt.token_ids):
        problem = "its chat template gives TRL other tokens than rlft"
        raise UserError("model.path", problem, got=theirs["input_ids"], remedy="choose a model with a chat template")


def reward_function(
    spec: RewardSpec, prompts: Sequence[Prompt], tokenizer: Any, run: RunConfig
) -> Callable[..., list[float]]:
    """rlft's reward in the form that TRL calls. `place` is the column of the data that says which prompt it is."""
    from rlft.reward.workers.scorer import Scorer

    scorer = Scorer({spec.name: spec}, 0, run.scoring.timeout, run.scoring.on_error)

    def reward(completion_ids: Sequence[Sequence[int]], place: Sequence[int], **_: Any) -> list[float]:
        groups = as_groups(completion_ids, [prompts[index] for index in place], tokenizer, run)
        return scorer(groups).by_reward[spec.name].flatten().tolist()

    reward.__name__ = spec.name
    return reward


def as_groups(
    completion_ids: Sequence[Sequence[int]], prompts: Sequence[Prompt], tokenizer: Any, run: RunConfig
) -> list[Group]:
    """Completions as rewards read them. prompts: one a completion, those of a group in a row."""
    texts = tokenizer.batch_decode([list(ids) for ids in completion_ids], skip_special_tokens=True)
    rollouts = []
    for ids, text, prompt in zip(completion_ids, texts, prompts, strict=True):
        ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
        completion = Completion(
            text=text,
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            finish_reason=FinishReason.stop if ended else FinishReason.length,
        )
        rollouts.append(Rollout(prompt=prompt, completion=completion, policy_version=None))
    starts = range(0, len(rollouts), run.group_size)
    return [Group(prompt=prompts[i], rollouts=tuple(rollouts[i : i + run.group_size])) for i in starts]


def is_evaluated(step: int, run: RunConfig) -> bool:
    """Whether `rlft train` evaluates after so many steps."""
    return step % run.eval.every == 0 or step == run.steps


def weights_of(model: Any) -> Weights:
    """Copies of the adapter's tensors, in main memory."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


# -- evaluating with rlft ----------------------------------------------------------------------------------------------
def evaluate(plan: TrainPlan, folder: Path, adapters: Mapping[int, Weights]) -> None:
    """Evaluates each adapter as a run of `rlft train` evaluates its policy after that step; a line of eval.jsonl each.

    Raises:
        UserError: an adapter has other tensors than rlft's on this base.
    """
    from rlft.loop.engines import Engines
    from rlft.loop.session import open_session
    from rlft.model.roles import POLICY, Roles

    with Engines() as engines, open_session(plan, folder, engines, print) as session:
        roles = session.roles
        assert isinstance(roles, Roles), "adapter_settings refuses lora=null"
        known = roles.weights(POLICY)
        for step, weights in sorted(adapters.items()):
            if shapes(weights) != shapes(known):
                differ = sorted({*shapes(weights).items()} ^ {*shapes(known).items()})
                problem = "TRL's adapter has other tensors than rlft's"
                raise UserError("lora.target_modules", problem, got=differ[0], remedy="name the modules in a list")
            roles.restore_role(POLICY, weights)
            session.publish(step)
            evaluation = session.evaluation(step)
            append(folder / EVALUATIONS, {"step": step, **evaluation.metrics})


def shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Adds a line of JSON."""
    with file.open("ab") as stream:
        stream.write(encode(dict(line)))


if __name__ == "__main__":
    main()
