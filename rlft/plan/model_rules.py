"""Rules for the model, the shape of its adapters, and the engine; and which engine `auto` is.

What reads the config alone imports no library, so that a config is checked before torch is imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rlft.algorithm.objective import Objective
from rlft.config.choices import choice_remedy
from rlft.config.model import (
    ALL_LINEAR,
    DEVICES,
    DTYPES,
    HEAD,
    OFFLOAD,
    TILES,
    LoraSettings,
    ModelConfig,
    RoutingSource,
    SnapshotConfig,
    check_local,
)
from rlft.config.schema import ANYWHERE, AUTO, HISTORY, ON_A_GPU, GenerationConfig, RunConfig, own_engines, section_of
from rlft.config.trainer import OptimizerKind
from rlft.generation.engine import Engine
from rlft.model.adapter_folder import POLICY, Shapes, adapted_modules
from rlft.model.families import limit_of, recorded_family
from rlft.system.terminal import pip_install
from rlft.types import UserError, require

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedConfig, PreTrainedModel


# -- the model and its device ------------------------------------------------------------------------------------------
def check_model(settings: ModelConfig) -> None:
    """Checks the model's keys by themselves: the folder exists, the device and the dtype are possible."""
    check_local(settings.path)
    kind = settings.device.partition(":")[0]
    is_device, remedy = kind in DEVICES, f"{choice_remedy(kind, DEVICES)}, or cuda:<n>"
    require(is_device, "model.device", "is not a device", got=settings.device, remedy=remedy)
    is_dtype, remedy = settings.dtype in ("auto", *DTYPES), choice_remedy(settings.dtype, ("auto", *DTYPES))
    require(is_dtype, "model.dtype", "is not a known dtype", got=settings.dtype, remedy=remedy)
    check_device(settings, settings.device)


def check_machine(settings: ModelConfig, *, runs_here: bool = True) -> None:
    """Checks that this machine has the model's device and libraries; imports torch and transformers, reads no file.

    runs_here: False if the run is only planned, so that the libraries for 4-bit weights may be missing.
    """
    from transformers import AttentionInterface

    from rlft.system.device import resolve_device, resolve_dtype

    device = resolve_device(settings.device)
    resolve_dtype(settings.dtype, device)
    attention, usual = settings.attn_implementation, ("auto", "sdpa", "eager")
    is_known, remedy = attention in (*usual, *AttentionInterface().valid_keys()), choice_remedy(attention, usual)
    require(is_known, "model.attn_implementation", "is not known to transformers", got=attention, remedy=remedy)
    if not runs_here:
        return
    # Or `kernels`, through which transformers downloads the kernel of this attention.
    module, package = FLASH_ATTENTION.get(attention, ("", ""))
    if module and not any(importlib.util.find_spec(name) for name in (module, "kernels")):
        problem = f"{package} is not installed"
        raise UserError("model.attn_implementation", problem, got=attention, remedy="use auto or sdpa")
    check_device(settings, device.type)
    _check_bitsandbytes("model.quantization", settings.quantization)


def check_optimizer(optimizer: OptimizerKind, settings: ModelConfig, *, runs_here: bool = True) -> None:
    """Checks that the optimizer runs on the model's device; `runs_here` is as in `check_machine`."""
    from rlft.system.device import resolve_device

    if optimizer is not OptimizerKind.adamw8bit:
        return
    key, got = "trainer.optimizer", optimizer.value
    is_there = resolve_device(settings.device).type == "cuda"
    require(is_there, key, "8-bit AdamW needs a CUDA device", got=got, remedy="use adamw or muon")
    _check_bitsandbytes(key, got if runs_here else None)


def check_device(settings: ModelConfig, device: str) -> None:
    """Checks that a device of this type supports quantised weights, and that layers' inputs can leave it."""
    check_quantized_on(settings.quantization, device)
    problem = "only a CUDA device has its layers' inputs kept in main memory"
    fits = settings.gradient_checkpointing != OFFLOAD or _may_be_cuda(device)
    require(fits, "model.gradient_checkpointing", problem, got=OFFLOAD, remedy="use true or tiles")


def check_quantized_on(quantization: str | None, device: str) -> None:
    """Checks that a device of this type supports quantised weights."""
    problem, remedy = "4-bit weights need a CUDA device", "set model.quantization=null"
    fits = quantization is None or _may_be_cuda(device)
    require(fits, "model.quantization", problem, got=quantization, remedy=remedy)


def _may_be_cuda(device: str) -> bool:
    return device.partition(":")[0] in ("cuda", "auto")


FLASH_ATTENTION = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn", "flash-attn-4"),
}
"""{value of model.attn_implementation: (the module that it needs, the package that installs this module)}."""


def _check_bitsandbytes(key: str, got: str | None) -> None:
    """Refuses what needs bitsandbytes, unless it is None or that is installed."""
    remedy = pip_install("rlft[quantization]")
    require(got is None or has_bitsandbytes(), key, "bitsandbytes is not installed", got=got, remedy=remedy)


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed; does not import it."""
    return importlib.util.find_spec("bitsandbytes") is not None


def empty_model(config: ModelConfig, model: PreTrainedConfig) -> PreTrainedModel:
    """The base with its modules and shapes, but without weights; refuses a model that transformers does not build."""
    from rlft.model import text_model

    try:
        return text_model.empty_model(model, trust_remote_code=config.trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # whatever the code of a model raises for a config
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"no causal language model can be built from its config.json, of type {model.model_type}"
        remedy = "use a model that transformers loads with AutoModelForCausalLM"
        raise UserError("model.path", f"{problem} ({first_line[:200]})", got=config.path, remedy=remedy) from None


# -- the length of rows ------------------------------------------------------------------------------------------------
def check_context(config: RunConfig, model: PreTrainedConfig) -> None:
    """Checks that the longest row and text are within the model's limit, according to its config.json."""
    check_row(config.prompts.max_tokens, config.generation.max_tokens, "generation.max_tokens", model)
    limit, tokens = limit_of(model), config.pretrain.max_tokens
    if limit is not None and config.pretrain.path is not None and tokens > limit.tokens:
        problem, remedy = f"exceeds the model's {limit.words}", f"use at most {limit.tokens}"
        raise UserError("pretrain.max_tokens", problem, got=tokens, remedy=remedy)


def check_row(prompt_tokens: int, completion_tokens: int, key: str, model: PreTrainedConfig) -> None:
    """Checks that a prompt and a completion, whose length has this key, are within the model's limit for a row."""
    limit = limit_of(model)
    if limit is None or prompt_tokens + completion_tokens <= limit.tokens:
        return
    if prompt_tokens >= limit.tokens:  # no completion fits, however short
        half = limit.tokens // 2
        problem = f"leaves no room for a completion in the model's {limit.words}"
        remedy = f"lower it, for instance to {half}, and {key} to {limit.tokens - half}"
        raise UserError("prompts.max_tokens", problem, got=prompt_tokens, remedy=remedy)
    problem = f"with prompts.max_tokens={prompt_tokens} it exceeds the model's {limit.words}"
    remedy = f"use at most {limit.tokens - prompt_tokens}, or lower prompts.max_tokens"
    raise UserError(key, problem, got=completion_tokens, remedy=remedy)


# -- the engine --------------------------------------------------------------------------------------------------------
def check_engine(generation: GenerationConfig, model: ModelConfig) -> None:
    """Checks that the engine exists and that its keys fit together."""
    engine = ANYWHERE if generation.engine == AUTO else generation.engine
    section = section_of(engine)
    if section not in generation.engines:
        remedy = f"{choice_remedy(engine, ('auto', *own_engines()))}, or one of your own (docs/how-to/engines.md)"
        raise UserError("generation.engine", "is not an engine", got=engine, remedy=remedy)
    with _keys_of(engine):
        generation.named(engine).check(plain_kernels=model.kernels == "plain")
    _check_drafts(generation, engine)


def choose_engine(
    generation: GenerationConfig,
    model: ModelConfig,  # the settings of the trainer's base; the engine's keys are checked against them if `runs_here`
    lora: LoraSettings | None = None,  # the shape of the adapters that the engine will load; None if it loads none
    *,
    runs_here: bool = True,  # False if the run is only planned, which needs no engine
    whole: bool = False,  # whether a whole model is trained
    apart: bool = False,  # whether the engine runs in processes of its own
) -> tuple[str, str]:
    """(engine, reason), with `auto` resolved: vLLM if it is installed and there is a GPU, else transformers."""
    name, reason, quantized = generation.engine, "as configured", model.quantization is not None
    if name == AUTO:
        import torch

        why_not = "no GPU here"
        if torch.cuda.is_available():
            why_not = why_not_on_a_gpu(generation, lora, model, whole=whole, apart=apart)
        name, reason = (ANYWHERE, why_not) if why_not else (ON_A_GPU, "installed, with a GPU")
    elif runs_here and (missing := generation.named(name).missing()) is not None:
        raise UserError("generation.engine", missing.problem, got=name, remedy=missing.remedy)
    if runs_here:
        from rlft.system.device import resolve_device, resolve_dtype

        device = resolve_device(model.device)
        itemsize = resolve_dtype(model.dtype, device).itemsize
        check_engine_on(generation, name, str(device), itemsize=itemsize, quantized=quantized)
    _check_drafts(generation, name)
    return name, reason


def _check_drafts(generation: GenerationConfig, engine: str) -> None:
    chosen = generation.named(engine)
    if generation.drafts == HISTORY and chosen.why_no_drafts is not None:
        problem, remedy = f"{chosen.title} {chosen.why_no_drafts}", "use off, or generation=transformers"
        raise UserError("generation.drafts", problem, got=HISTORY, remedy=remedy)


def notes_of_drafts(generation: GenerationConfig) -> list[str]:
    """That drafts have no effect in this command, which has no history."""
    unused = "generation.drafts: only rlft train and its evaluations use drafts, so that history has no effect here"
    return [unused] if generation.drafts == HISTORY else []


def why_not_on_a_gpu(
    generation: GenerationConfig,
    lora: LoraSettings | None,
    model: ModelConfig,
    *,
    whole: bool = False,
    apart: bool = False,
    is_absent: bool = False,
    device: str | None = None,
) -> str | None:
    """Why `auto` does not choose the engine for GPUs on a GPU; None if it does.

    Args:
        whole, apart: as in `choose_engine`.
        is_absent: whether the GPU is in another machine, on which that engine is assumed to be installed.
        device: as in `settle_engine`.
    """
    engine = generation.named(ON_A_GPU)
    if whole:
        return f"{engine.title} would hold all weights a second time"
    if not is_absent and (missing := engine.missing()) is not None:
        return missing.problem
    if lora is not None:
        with _keys_of(ON_A_GPU):
            would_run = engine.standalone() if apart else _settled_for(engine, lora, model, device)
        if problems := unserved(would_run, lora):
            return next(iter(problems.values()))
    return None if model.quantization is None else engine.quantization_obstacle()


def _settled_for(engine: Engine, lora: LoraSettings, model: ModelConfig, device: str | None) -> Engine:
    """The engine as `settle_engine` makes it for these adapters, if nothing else asks for more memory."""
    from rlft.model.backbone import read_config
    from rlft.system.device import resolve_device

    def modules() -> set[str]:
        try:
            return modules_to_adapt(lora, model, read_config(model))
        except ValueError:  # PEFT's, where the adapter is not one of this model, which is refused later
            return {""}

    device = device or str(resolve_device(model.device))
    return engine.settled(lora, modules, lambda engine: False, device, model.quantization is not None)


def check_engine_on(generation: GenerationConfig, engine: str, device: str, *, itemsize: int, quantized: bool) -> None:
    """Checks the engine's keys against the trainer's device, such as "cuda:1", and the bytes of its base's weights."""
    with _keys_of(engine):
        generation.named(engine).check_device(device=device, itemsize=itemsize, quantized=quantized)


def check_apart(config: RunConfig, engine: str) -> None:
    """Checks that this engine can run in processes of its own, with `cluster.gpus_per_engine` GPUs each."""
    with _keys_of(engine):
        separate = config.generation.named(engine).standalone()
    drafts, problem = config.generation.drafts, "needs the engine in the run's own process, where its history is"
    require(drafts != HISTORY, "generation.drafts", problem, got=drafts, remedy="use off, or cluster.engines=0")
    separate.with_gpus(config.cluster.gpus_per_engine)
    if config.lora is not None:
        _refuse_unserved(separate, config.lora)


def settle_engine(
    generation: GenerationConfig,
    name: str,  # the engine's
    lora: LoraSettings | None,  # the shape of the adapters that it will load; None if it loads none
    model: ModelConfig,
    *,
    device: str | None = None,  # the trainer's, such as "cuda:1"; None: that of `model`
    fits: Callable[[Engine], bool] = lambda engine: True,  # whether the run has enough memory for this engine
) -> GenerationConfig:
    """The generation with what those of the engine's `auto` keys are that decide numbers (`Engine.settled`).

    Raises UserError: the engine does not serve such adapters then.
    """
    from rlft.model.backbone import read_config
    from rlft.system.device import resolve_device

    engine, device = generation.named(name), device or str(resolve_device(model.device))

    def modules() -> set[str]:
        return set() if lora is None else modules_to_adapt(lora, model, read_config(model))

    settled = engine.settled(lora, modules, fits, device, model.quantization is not None)
    if settled != engine and lora is not None:
        _refuse_unserved(settled, lora)
        check_adapted(settled, lora, model, read_config(model))
    return replace(generation, engines={**generation.engines, section_of(name): settled})


def _keys_of(engine: str) -> AbstractContextManager[None]:
    """Prefixes the keys of UserErrors raised inside with the engine's section, but for those of the model's."""
    return with_keys(lambda key: key if key.startswith("model.") else f"generation.{section_of(engine)}.{key}")


@contextmanager
def with_keys(key: Callable[[str], str], remedy: Callable[[str], str] = str) -> Iterator[None]:
    """Replaces the keys of UserErrors raised inside, and what their remedies say."""
    try:
        yield
    except UserError as error:
        raise UserError(key(error.key), error.problem, got=error.got, remedy=remedy(error.remedy)) from None


def resolve_mismatch(config: RunConfig, algorithm: Objective, engine: str, *, itemsize: int) -> Objective:
    """The algorithm with `algorithm.mismatch: auto` resolved for this engine.

    It is off where sampling is distorted, which a correction cannot undo, and with `snapshot.old: sampled`, which takes
    the engine's log-probs for the trainer's. `itemsize` is the bytes of a weight of the trainer's base.
    """
    generation, chosen = config.generation, config.generation.named(engine)
    differs = chosen.is_corrected or (chosen.rounds_apart and itemsize <= 2)
    undistorted = generation.top_p == 1 and generation.top_k == 0 and config.snapshot.old != "sampled"
    return algorithm.with_mismatch_of(rounds_apart=differs and undistorted)


def check_routing(snapshot: SnapshotConfig, engine: Engine, settings: ModelConfig, model: PreTrainedConfig) -> None:
    """Checks that the model has experts whose choice can be imposed, and that the engine can say what it has chosen."""
    from rlft.model.experts import replay_obstacle

    source, key = snapshot.routing, "snapshot.routing"
    if source is RoutingSource.free:
        return
    problem = replay_obstacle(empty_model(settings, model))
    problem = problem or recorded_family(model.model_type, model.get_text_config().model_type).routing
    require(problem is None, key, problem or "", got=source, remedy="set it to free")
    problem, remedy = f"{engine.title} does not say which experts it chooses", "use old, or generation=transformers"
    require(source is not RoutingSource.engine or engine.notes_experts, key, problem, got=source, remedy=remedy)


# -- adapters that the engine serves -----------------------------------------------------------------------------------
def check_served(generation: GenerationConfig, lora: LoraSettings) -> None:
    """Checks that the named engine serves adapters of this rank and kind."""
    check_pattern(lora)
    if generation.engine != AUTO:
        _refuse_unserved(generation.named(generation.engine), lora)


def _refuse_unserved(engine: Engine, lora: LoraSettings) -> None:
    problems = unserved(engine, lora)
    for key, got, remedy in (
        ("lora.rank", lora.rank, "lower it, or choose generation=transformers"),
        ("lora.use_dora", "true", "use generation=transformers, or lora.use_rslora=true instead"),
        ("lora.target_modules", HEAD, "leave it out, or use generation=transformers"),
    ):
        require(key not in problems, key, problems.get(key, ""), got=got, remedy=remedy)


def unserved(engine: Engine, lora: LoraSettings) -> dict[str, str]:
    """{key: why the engine cannot serve such adapters}; empty if it can."""
    limit, problems = engine.largest_rank, dict[str, str]()
    if lora.use_dora and not engine.serves_dora:
        problems["lora.use_dora"] = f"{engine.title} serves no DoRA adapters"
    if lora.adapts_head and not engine.serves_head:
        problems["lora.target_modules"] = f"{engine.title} serves no adapters of {HEAD}"
    if limit is not None and lora.rank > limit:
        problems["lora.rank"] = f"{engine.title} takes adapters up to rank {limit}"
    return problems


def check_adapted(
    engine: Engine, lora: LoraSettings, settings: ModelConfig, model: PreTrainedConfig, folder: str | None = None
) -> None:
    """Checks that the engine can load an adapter of these settings, which is in this folder if `adapter` names one."""
    from rlft.model.experts import mixture_of
    from rlft.system.device import resolve_device

    device = resolve_device(settings.device).type
    if not engine.serves_experts(device) and mixture_of(empty_model(settings, model)).stacked:
        problem = f"{engine.title} on a {device} computes no adapters on a model with experts"
        remedy = "use generation=transformers"
        raise UserError("generation.engine", problem, got=engine.title, remedy=remedy)
    if engine.on_trainers_base and (
        problem := recorded_family(model.model_type, model.get_text_config().model_type).decoding
    ):
        remedy = "use generation.engine=vllm if vLLM serves it, or another model"
        raise UserError("model.path", f"with a {model.model_type}, {problem}", got=settings.path, remedy=remedy)
    problem = engine.unserved(lambda: sorted(modules_to_adapt(lora, settings, model)))
    if problem is not None and folder is not None:
        raise UserError("adapter", problem, got=folder, remedy="use generation=transformers")
    if problem is not None:
        remedy = "set it to false, or use generation.vllm.weights=adapter or generation=transformers"
        raise UserError("lora.experts", problem, got="true", remedy=remedy)


def check_whole(engine: Engine, settings: ModelConfig, model: PreTrainedConfig) -> None:
    """Checks that the engine can follow all weights of this model."""
    from rlft.model.experts import mixture_of

    if engine.serves_whole_mixtures:
        return
    mixture = mixture_of(empty_model(settings, model))
    if mixture.stacked or mixture.linear:
        problem = f"{engine.title} does not take all weights of a model with experts"
        raise UserError("generation.engine", problem, got=engine.title, remedy="use transformers, or train an adapter")


# -- the layers that adapters are on -----------------------------------------------------------------------------------
def check_pattern(lora: LoraSettings) -> None:
    """Refuses a lora.target_modules that names nothing, or is no regular expression; a list is none."""
    names_any = lora.target_modules or lora.experts or lora.router
    remedy = "use all-linear, or a list of layers' names; lora=null trains all weights"
    require(names_any, "lora.target_modules", "names no layer to adapt", got=lora.target_modules or "[]", remedy=remedy)
    if isinstance(lora.target_modules, str):
        try:
            re.compile(lora.target_modules)
        except re.error as error:
            problem, remedy = f"is not a regular expression ({error})", "use all-linear, or a list of layers' names"
            raise UserError("lora.target_modules", problem, got=lora.target_modules, remedy=remedy) from None


def check_targets(lora: LoraSettings, settings: ModelConfig, model: PreTrainedConfig) -> None:
    """Checks that lora.target_modules names linear layers that can learn, with weights of their own; loads no weights.

    An adapter on a weight that another module shares could not be exported as a model, and engines do not serve it.
    """
    from rlft.model.lora_config import linear_layers, without_adapter

    check_pattern(lora)
    empty = empty_model(settings, model)
    if lora.experts or lora.router or lora.use_dora:
        check_mixture(lora, empty)
    without = without_adapter(empty, lora)
    can_learn = linear_layers(empty).keys() - without.keys()
    if lora.target_modules == ALL_LINEAR:
        problem = f"a {model.model_type} has no linear layer that an adapter can learn on"
        require(can_learn, "model.path", problem, got=settings.path, remedy="use another model")
        return
    remedy = f"use all-linear, or a list of {', '.join(sorted({name.rpartition('.')[2] for name in can_learn}))}"
    names = [name for name, _ in empty.named_modules()]
    if isinstance(pattern := lora.target_modules, str):  # as in PEFT, a regular expression over whole names
        named = {pattern: [name for name in names if re.fullmatch(pattern, name)]}
    else:  # ends of names
        named = {end: [name for name in names if f".{name}".endswith(f".{end}")] for end in pattern}
    for target, problem in _bad_targets(named, empty, without):
        raise UserError("lora.target_modules", problem, got=target, remedy=remedy)


def _bad_targets(
    named: Mapping[str, Sequence[str]], empty: PreTrainedModel, without: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(target, why no adapter can be on the modules that `named` gives it); without: {layer without adapter: why}."""
    import torch

    from rlft.model.lora_config import linear_layers

    modules = dict(empty.named_modules())
    layers = {*linear_layers(empty), *(name for name, module in modules.items() if isinstance(module, torch.nn.Linear))}
    of_weight: dict[int, list[str]] = defaultdict(list)
    for name, module in modules.items():
        of_weight[id(getattr(module, "weight", None))].append(name)
    for target, names in named.items():
        linear = layers.intersection(names)
        if names and without.keys() >= (linear or set(names)):
            why = next(without[name] for name in names if name in without)
            yield target, f"names no layer that an adapter can learn on: {why}"
        if not linear:
            yield target, "the model has no linear layer of that name"
        for name in names:
            if name not in layers:
                yield target, f"{name or 'the model'} would be adapted, too, which is no linear layer"
            for other in of_weight[id(modules[name].weight)]:
                if other != name:
                    why = f"the weights of {name} are those of {other}"
                    yield target, f"{why}, so that its adapter could not be exported"


def check_mixture(lora: LoraSettings, empty: PreTrainedModel) -> None:
    """Checks that the model has the experts and routers that `lora.experts` and `lora.router` ask for, and that LoRA
    can be on them: with stacked matrices there is neither dropout nor DoRA, nor where PEFT reads MLPs as such."""
    from rlft.model.experts import is_mistaken, mixture_of
    from rlft.model.lora_config import left_out, linear_layers

    mixture, kind = mixture_of(empty), empty.config.model_type
    if lora.experts:
        has_experts, remedy = bool(mixture.stacked or mixture.linear), "leave it out"
        require(has_experts, "lora.experts", f"a {kind} has no experts", got="true", remedy=remedy)
        takes = not mixture.linear and all(mixture.stacked.values())
        problem, remedy = f"adapters of experts are not supported in a {kind}", "set lora.experts=false"
        require(takes, "lora.experts", problem, got="true", remedy=remedy)
    if lora.router:
        require(bool(mixture.routers), "lora.router", f"a {kind} has no routers", got="true", remedy="leave it out")
        why = next((left_out(empty)[name] for name in mixture.routers if name in left_out(empty)), None)
        problem, remedy = f"the routers of a {kind} cannot learn: {why}", "set lora.router=false"
        require(why is None, "lora.router", problem, got="true", remedy=remedy)
    if mixture.parameters(experts=lora.experts, router=lora.router):
        keys = " and ".join(f"lora.{name}=false" for name in ("experts", "router") if getattr(lora, name))
        problem = f"adapters of a {kind}'s experts or routers have none"
        require(lora.dropout == 0, "lora.dropout", problem, got=lora.dropout, remedy=f"set it to 0, or {keys}")
        problem, remedy = f"adapters of a {kind}'s experts or routers have no magnitudes", f"set it to false, or {keys}"
        require(not lora.use_dora, "lora.use_dora", problem, got="true", remedy=remedy)
    if lora.use_dora and lora.target_modules == ALL_LINEAR:
        mistaken = sorted(name for name in linear_layers(empty) if is_mistaken(name, kind))
        problem, remedy = f"PEFT takes the MLPs of a {kind} for experts", "set it to false, or name other layers"
        require(not mistaken, "lora.use_dora", f"{problem} and could not read them", got="true", remedy=remedy)


def modules_to_adapt(lora: LoraSettings, settings: ModelConfig, model: PreTrainedConfig) -> set[str]:
    """Names of the base's modules that an adapter of these settings is on."""
    from rlft.model.lora_config import lora_config

    empty = empty_model(settings, model)
    return adapted_modules(fresh_shapes(empty, lora_config(lora, empty)))


def fresh_shapes(empty: PreTrainedModel, lora: LoraConfig) -> Shapes:
    """The shapes of a new adapter's tensors, under PEFT's names; the adapter stays on the empty base."""
    import torch
    from peft import PeftModel, get_peft_model_state_dict

    from rlft.model.lora_config import as_configured

    with torch.device("meta"), as_configured():
        model = PeftModel(empty, lora, adapter_name=POLICY)
    state = get_peft_model_state_dict(model, adapter_name=POLICY, save_embedding_layers=False)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


# -- how the model is computed -----------------------------------------------------------------------------------------
def notes_of_tiles(settings: ModelConfig, lora: LoraSettings | None, model: PreTrainedConfig) -> list[str]:
    """A note where gradient checkpointing cannot compute MLPs in tiles, though its value says so; else nothing."""
    from rlft.model.kernels.selection import decide

    how, kind = settings.gradient_checkpointing, model.get_text_config().model_type
    if how not in (TILES, OFFLOAD):
        return []
    if lora is None:
        why = "all weights are trained"
    elif lora.dropout or lora.use_dora:
        why = f"{'lora.dropout' if lora.dropout else 'lora.use_dora'} is set"
    elif not decide(settings.kernels, kind).fused_layers:
        why = f"the layers of a {kind} are not fused"
    else:
        return []
    effect = "is the same as true" if how == TILES else "keeps their inputs in main memory and nothing else"
    return [f"model.gradient_checkpointing: MLPs are not computed in tiles, since {why}; {how} {effect}"]


def check_shared_tokens(config: RunConfig, model: PreTrainedConfig) -> None:
    """Checks that ranks can share the tokens of a pass (`cluster.sequence_ranks`); loads no weights."""
    from rlft.model.forward import possible_shares

    ranks = config.cluster.sequence_ranks
    if ranks > 1:
        possible, problem = possible_shares(empty_model(config.model, model))
        numbers = ", ".join(map(str, possible))
        remedy = f"use one of {numbers}" if len(possible) > 1 else "set it to 1, or use another model"
        require(ranks in possible, "cluster.sequence_ranks", problem, got=ranks, remedy=remedy)
