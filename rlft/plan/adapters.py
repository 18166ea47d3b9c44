"""Rules for the folders of adapters and reward models that a config names; only small files are read, never weights.

Files, rank and alpha are checked first, which needs no model. Then comes whether an adapter was made for this base: by
the fingerprint in its rlft.json if there is one, and always by the names and shapes of its tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.config.choices import closest
from rlft.config.model import CriticKind, LoraSettings, ModelConfig, is_adapter
from rlft.config.schema import RunConfig
from rlft.model.adapter_folder import (
    OLD,
    POLICY,
    REFERENCE,
    Shapes,
    adapted_modules,
    adapter_shapes,
    check_adapter_folder,
    check_head,
    check_shape,
    content_fingerprint,
    head_shapes,
    read_record,
    switches_of,
)
from rlft.model.identity import OF_SAMPLES, Changed, differing
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.system.terminal import override
from rlft.types import UserError, require

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedConfig, PreTrainedModel


VARIANTS = ("lora_bias", "rank_pattern", "alpha_pattern")
"""Fields of adapter_config.json with which tensors compute a different function from that of a role made by rlft."""


class AdapterUse(Enum):
    """How a run uses a folder.

    Attributes:
        policy: the policy starts from its adapter.
        frozen: its adapter is the reference or the teacher, as PEFT reads it.
        scalar: a critic or a reward starts from its adapter and head.
        head: a critic starts from its head alone.
        any: a role starts from its adapter, whichever role that was saved from, and from its head if it has one.
    """

    policy = auto()
    frozen = auto()
    scalar = auto()
    head = auto()
    any = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A folder, the config key that names it, and how the run uses it.

    Attributes:
        key: the config key that names the folder.
        path: the folder.
        accepts: how the run uses it.
        words: the values of the key that are not folders, such as "base or reward"; empty where it is always a folder.
    """

    key: str
    path: str
    accepts: AdapterUse
    words: str = ""

    @property
    def has_adapter(self) -> bool:
        return self.accepts is not AdapterUse.head

    @property
    def has_head(self) -> bool:
        return self.accepts in (AdapterUse.scalar, AdapterUse.head)

    @property
    def is_sampled(self) -> bool:
        """Whether it samples as the run did that trained it: `rlft sample`."""
        return self.key == "adapter"

    @property
    def starts_role(self) -> bool:
        """Whether a role of the run starts from this adapter, and so has its rank, alpha and targets."""
        return self.accepts in (AdapterUse.policy, AdapterUse.scalar, AdapterUse.any)


def uses(config: RunConfig, rewards: Mapping[str, RewardSpec]) -> list[Use]:
    """The adapter folders that this config names, in the order of its sections."""
    adapter_uses = use_of_policy("lora.path", None if config.lora is None else config.lora.path)
    if config.snapshot.reference not in ("none", "base", "copy", "ema"):
        reference, words = config.snapshot.reference, "none, base, copy or ema"
        adapter_uses.append(Use(key="snapshot.reference", path=reference, accepts=AdapterUse.frozen, words=words))
    if (teacher := config.snapshot.teacher_adapter) is not None:
        adapter_uses.append(Use(key="snapshot.teacher", path=teacher, accepts=AdapterUse.frozen))
    if config.critic.kind is not CriticKind.none and config.critic.init not in ("base", "reward"):
        use = AdapterUse.scalar if config.critic.kind is CriticKind.adapter else AdapterUse.head
        adapter_uses.append(Use(key="critic.init", path=config.critic.init, accepts=use, words="base or reward"))
    return [*adapter_uses, *uses_of_rewards(rewards)]


def changed_base(use: Use, base: Mapping[str, str]) -> Changed:
    """What differs between the base that rlft.json records and this one; nothing where rlft did not make the folder."""
    return differing(read_record(use.path, use.key), base)


def fingerprints_of(used: Sequence[Use]) -> dict[str, str]:
    """{<key>_fingerprint: fingerprint of the content of the folder that it names}."""
    return {f"{use.key}_fingerprint": content_fingerprint(use.path) for use in used}


def use_of_policy(key: str, path: str | None) -> list[Use]:
    """The adapter folder that a policy starts from, in a list; an empty one if none is named."""
    return [] if path is None else [Use(key=key, path=path, accepts=AdapterUse.policy)]


def uses_of_rewards(rewards: Mapping[str, RewardSpec]) -> list[Use]:
    """The adapter folders of learned rewards."""
    return [
        Use(key=f"reward.{spec.name}.path", path=spec.kwargs["path"], accepts=AdapterUse.scalar)
        for spec in rewards.values()
        if spec.runs_in_trainer and spec.kwargs["path"] is not None and is_adapter(spec.kwargs["path"])
    ]


def check_folders(used: Sequence[Use], lora: LoraSettings | None) -> None:
    """Checks that each folder has the files that its use needs, and the run's rank if a role starts from it.

    lora: None where all weights are trained, so that no use is of an adapter.
    """
    for use in used:
        _check_exists(use)
        if use.has_adapter:
            assert lora is not None, "plan/learner_rules.py refuses adapters beside all weights"
            _check_fields(lora, use, check_adapter_folder(use.path, use.key))
        if use.has_head:
            check_head(use.path, use.key)
        role = read_record(use.path, use.key).get("role", POLICY)
        if use.accepts is not AdapterUse.any and not use.has_head and role not in (POLICY, OLD, REFERENCE):
            problem = f"holds the adapter of the role {role}, which is not a policy"
            raise UserError(use.key, problem, got=use.path, remedy="point it at the adapter of a policy")


def _check_exists(use: Use) -> None:
    if use.path and Path(use.path).expanduser().is_dir():
        return
    if use.words:
        close = closest(use.path, use.words.replace(" or ", ", ").split(", "))
        problem = f"is neither {use.words} nor an existing folder"
        remedy = f"did you mean {close}?" if close else "use one of these"
    else:
        problem, remedy = "there is no such folder", "point it at a PEFT adapter folder"
    raise UserError(use.key, problem, got=use.path or "nothing", remedy=remedy)


def _check_fields(lora: LoraSettings, use: Use, fields: Mapping[str, Any]) -> None:
    """Compares adapter_config.json with the run's `lora` section."""
    check_shape(fields, use.path, use.key)
    if not use.starts_role:
        return
    for name in VARIANTS:
        problem, remedy = f"adapters with {name} are not supported", "use an adapter without it"
        require(not fields.get(name), use.key, problem, got=use.path, remedy=remedy)
    for name, in_adapter in switches_of(fields).items():  # the `lora` section can set these
        in_run = getattr(lora, name)
        setting = f"{name}={str(in_adapter).lower()}"
        problem = f"the adapter at {use.key} was trained with {setting} and would be another function"
        remedy = f"set lora.{setting}, or another {use.key}"
        require(in_adapter == in_run, f"lora.{name}", problem, got=str(in_run).lower(), remedy=remedy)
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    problem, remedy = f"the adapter at {use.key} has rank {rank}", f"set lora.rank={rank}, or another {use.key}"
    require(rank == lora.rank, "lora.rank", problem, got=lora.rank, remedy=remedy)
    problem = f"the adapter at {use.key} was trained with {alpha} and would be another function"
    remedy = f"set lora.alpha={alpha}, or another {use.key}"
    require(alpha == lora.alpha, "lora.alpha", problem, got=lora.alpha, remedy=remedy)


def check_adapters(
    used: Sequence[Use],
    lora: LoraSettings | None,
    settings: ModelConfig,
    base: Mapping[str, str],
    model: PreTrainedConfig,
) -> None:
    """Checks that every adapter was made for the base of these fingerprints and config; called after `check_folders`.

    lora: as in `check_folders`.
    """
    from rlft.model.experts import mixture_of

    names: frozenset[str] = frozenset()
    if lora is not None and (lora.experts or lora.router):
        mixture = mixture_of(empty_model(settings, model))
        names = frozenset(mixture.parameters(experts=lora.experts, router=lora.router))
    for use in used:
        if changed := changed_base(use, base).without(() if use.is_sampled else OF_SAMPLES):
            raise _other_base(use, f"its rlft.json says it was made for a base with other {changed.both}")
        if use.has_head:
            _check_head(use, model.get_text_config().hidden_size)
        if lora is not None and use.has_adapter:
            others = _check_tensors(lora, settings, use, model)
            if names and others and names != others:  # which PEFT does not take on one base
                problem = f"adapts other experts or routers ({min(names ^ others)}) than another adapter of this run"
                remedy = "use one that adapts the same (lora.experts and lora.router), or none"
                raise UserError(use.key, problem, got=use.path, remedy=remedy)
            names = names or others


def _check_head(use: Use, hidden_size: int) -> None:
    shapes = head_shapes(use.path, use.key)
    for name, shape in {"weight": (1, hidden_size), "bias": (1,)}.items():
        if shapes.get(name) != shape:
            actual = f"{name} {shapes[name]}" if name in shapes else f"no {name}"
            raise _other_base(use, f"its head has {actual}, and this base takes {shape}")


def _check_tensors(lora: LoraSettings, settings: ModelConfig, use: Use, model: PreTrainedConfig) -> frozenset[str]:
    """The parameters besides linear layers that this adapter is on, if its tensors are those of its config."""
    from rlft.model.lora_config import linear_layers, modules_of, named_inside, without_adapter
    from rlft.model.text_model import names_of

    empty = empty_model(settings, model)
    modules = {name for name, _ in empty.named_modules()}
    names = names_of(empty)
    shapes = names.all_inside(adapter_shapes(use.path, use.key))
    for name in sorted(shapes):
        if ".lora_" not in name:
            problem = f"its tensor {name} is not LoRA's, and would be written into the base, which all roles share"
            remedy = "save it again with PEFT's save_embedding_layers=False if that tensor was not trained; if it was, "
            remedy += "merge the adapter into its base, and set model.path to the result"
            raise UserError(use.key, problem, got=use.path, remedy=remedy)
        if not adapted_modules([name]) <= modules:
            raise _other_base(use, f"this base has no module for its tensor {name}")
    layers = linear_layers(empty).keys() - without_adapter(empty, lora).keys()
    config = _lora_config(lora, use, empty)
    if names.prefixes and not use.starts_role:
        named_inside(config, names, shapes)
    expected = fresh_shapes(empty, config)
    for name in sorted(shapes.keys() & expected.keys()):
        if shapes[name] != expected[name]:
            raise _other_base(use, f"its tensor {name} is {shapes[name]}, and this base takes {expected[name]}")
    for name in sorted(shapes.keys() ^ expected.keys()):
        source = "lora.target_modules" if use.starts_role else "its adapter_config.json"
        problem = f"{'it has' if name in shapes else 'it lacks'} the tensor {name}, unlike what {source} says"
        remedy = "save it again"
        if use.starts_role:
            modules = adapted_modules(shapes) - modules_of(config.target_parameters)
            remedy = f"set {override('lora.target_modules', targets_of(modules, layers))}"
        raise UserError(use.key, problem, got=use.path, remedy=remedy)
    return frozenset(config.target_parameters or ())


def targets_of(modules: Collection[str], layers: Iterable[str]) -> list[str] | str:
    r"""A lora.target_modules that stands for these modules alone, among these linear layers of a model.

    >>> layers = [f"layers.{n}.{name}" for n in range(3) for name in ("q", "k", "v")]
    >>> targets_of([f"layers.{n}.q" for n in range(3)], layers)
    ['q']
    >>> targets_of(["layers.0.q", "layers.2.q", "layers.0.k", "layers.2.k", "layers.1.v"], layers)
    'layers\\.(0|2)(\\.k|\\.q)|layers\\.(1)(\\.v)'
    """
    ends = sorted({name.rpartition(".")[2] for name in modules})
    if {name for name in layers if name.rpartition(".")[2] in ends} == set(modules):
        return ends
    numbers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in modules:
        before, number, after = re.fullmatch(r"(\D*)(\d*)(.*)", name).groups()  # type: ignore[union-attr]
        numbers[before, after].append(number)
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (before, after), found in sorted(numbers.items()):
        alike[before, "|".join(sorted(found, key=lambda n: (len(n), n)))].append(re.escape(after))
    return "|".join(f"{re.escape(before)}({n})({'|'.join(afters)})" for (before, n), afters in sorted(alike.items()))


def _other_base(use: Use, problem: str) -> UserError:
    return UserError(use.key, problem, got=use.path, remedy="use the base it was made for, or an adapter for this one")


def _lora_config(lora: LoraSettings, use: Use, empty: PreTrainedModel) -> LoraConfig:
    """The PEFT config of the role that the adapter is loaded into."""
    from rlft.model.lora_config import folder_config, lora_config

    if use.starts_role:
        return lora_config(lora, empty)
    try:
        return folder_config(check_adapter_folder(use.path, use.key), empty)
    except (TypeError, ValueError) as error:
        problem = f"PEFT does not take its adapter_config.json ({str(error).splitlines()[0][:200]})"
        raise UserError(use.key, problem, got=use.path, remedy="save it again") from None


def empty_model(config: ModelConfig, model: PreTrainedConfig) -> PreTrainedModel:
    """The base with its modules and shapes, but without weights.

    Raises:
        UserError: transformers has no causal language model of this type, or its code does not take the config.
    """
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
