"""An export as it is asked for, checked before anything is computed; and the README.md that describes what is written.

The text of that card is assets/model_card.md.jinja; it is made from the run's folder alone. Its front matter is the one
that the hub reads. A base or data set without a hub id is named only in the text, and without its folder. A GGUF file
is made by llama.cpp's two scripts; rlft itself writes none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import rlft
from rlft.config.choices import choice_remedy
from rlft.config.instantiate import component_name
from rlft.config.keys import PATH_NAMES
from rlft.config.model import ALL_LINEAR, DTYPES, EMBEDDED, SWITCHES, looks_local
from rlft.config.resolved import AUTO
from rlft.data.files import is_data_file
from rlft.data.templates import PLACEHOLDER, for_typed, prompt_of
from rlft.generation.vllm.options import engine_rank
from rlft.logger.summary import ends
from rlft.model.adapter_folder import CONFIG, switches_of
from rlft.runs import checkpoint, run_folder
from rlft.runs.find import CheckpointKind, NamedRun, find_checkpoint, kind_of_checkpoint
from rlft.runs.lines import EVALUATIONS, read_lines
from rlft.system.terminal import command_line, overrides
from rlft.tokens.text import TurnEnds
from rlft.types import UserError, counted, require

LLAMA_CPP = "https://github.com/ggml-org/llama.cpp"
MODEL_SCRIPT, ADAPTER_SCRIPT = "llama.cpp/convert_hf_to_gguf.py", "llama.cpp/convert_lora_to_gguf.py"


def model_command(folder: str) -> str:
    """The command that converts a model folder into <folder>.gguf, in the model's 16-bit format.

    >>> model_command("exports/mine")
    'python llama.cpp/convert_hf_to_gguf.py exports/mine --outfile exports/mine.gguf --outtype auto'
    """
    return command_line("python", MODEL_SCRIPT, folder, "--outfile", f"{folder}.gguf", "--outtype", "auto")


def adapter_command(folder: str, base: str, *, base_is_folder: bool) -> str:
    """The command that converts an adapter folder into <folder>.gguf.

    `base` is a folder with the base's config, or its hub id.

    >>> adapter_command("mine", "Qwen/Qwen2.5-0.5B", base_is_folder=False)  # doctest: +ELLIPSIS
    'python llama.cpp/convert_lora_to_gguf.py mine --base-model-id Qwen/Qwen2.5-0.5B --outfile mine.gguf --outtype f32'
    """
    option = "--base" if base_is_folder else "--base-model-id"
    return command_line(
        "python", ADAPTER_SCRIPT, folder, option, base, "--outfile", f"{folder}.gguf", "--outtype", "f32"
    )


def why_no_adapter(adapter: Mapping[str, Any]) -> str | None:
    """Why the converter cannot take an adapter with this adapter_config.json; None if it can.

    The converter stores only A, B and `lora_alpha`, because llama.cpp scales every adapter by alpha / rank.
    """
    if adapter.get("use_dora"):
        return "llama.cpp has no DoRA"
    if adapter.get("use_rslora"):
        return "llama.cpp scales adapters by alpha / rank, not by rsLoRA's alpha / sqrt(rank)"
    if switches_of(adapter)["experts"]:
        return "its converter does not read adapters of stacked experts"
    return None


def gguf_line(folder: Path, adapter: Mapping[str, Any] | None) -> str:
    """The line printed after an export; `adapter` is the folder's adapter_config.json, or None for a model."""
    if adapter is None:
        return f"as GGUF, with {LLAMA_CPP}: {model_command(str(folder))}"
    if (problem := why_no_adapter(adapter)) is not None:
        return f"as GGUF: {problem}; export as=model and convert that"
    base = str(adapter["base_model_name_or_path"])
    return f"as GGUF, with {LLAMA_CPP}: {adapter_command(str(folder), base, base_is_folder=Path(base).is_dir())}"


FORMS = ("model", "adapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A validated request to export a checkpoint of the run `source` to the folder `out`."""

    source: NamedRun
    checkpoint: Path  # its folder, which is undamaged
    checkpoint_kind: CheckpointKind
    is_model: bool
    dtype: str  # `auto`, or one of DTYPES
    out: Path
    repo_id: str | None = None  # the repository that the folder is pushed to, for the model card; None: none


def prepare(
    source: NamedRun, out: str | None, kind: str | None, dtype: str | None, say: Callable[[str], None]
) -> Export:
    """Validates a request, in which None stands for a key that was not typed; imports no torch and writes nothing."""
    require(out, "out", "is missing" if out is None else "is empty", remedy="write out=<new folder>")
    folder = Path(out or "").expanduser()
    if kind == "gguf":
        remedy = f"use as=model, then `{model_command(str(folder))}`"
        raise UserError("as", "is written by llama.cpp's converter, not by rlft", got=kind, remedy=remedy)
    remedy = choice_remedy(kind, FORMS)
    require(kind in (None, *FORMS), "as", "is not a form that rlft writes", got=kind or "nothing", remedy=remedy)
    remedy = choice_remedy(dtype, (AUTO, *DTYPES))
    require(dtype in (None, AUTO, *DTYPES), "dtype", "is not a known dtype", got=dtype or "nothing", remedy=remedy)
    is_model = kind != "adapter"
    problem = "applies to a model's weights only: an adapter keeps its own dtype"
    require(is_model or dtype is None, "dtype", problem, got=dtype, remedy="leave it out, or use as=model")
    is_new, problem = not (folder.exists() or folder.is_symlink()), "exists already, and nothing is ever overwritten"
    require(is_new, "out", problem, got=folder, remedy="choose a new folder, or remove that one first")
    is_among_them = folder.resolve().is_relative_to(run_folder.checkpoints(source.run).resolve())
    problem = "lies among the run's checkpoints, which would no longer be whole"
    require(not is_among_them, "out", problem, got=folder, remedy="choose another folder")
    checkpoint = find_checkpoint(source, say)
    saved_kind = kind_of_checkpoint(checkpoint)
    has_it = is_model or saved_kind is not CheckpointKind.weights
    require(has_it, "as", "the run trained all weights and has no adapter", got=kind, remedy="use as=model")
    if is_model and saved_kind is CheckpointKind.reward:
        problem = "a reward model is an adapter with a scalar head, which no causal language model holds"
        raise UserError("as", problem, got="model", remedy=f"use as=adapter; then reward.learned.path={folder}")
    return Export(
        source=source,
        checkpoint=checkpoint,
        checkpoint_kind=saved_kind,
        is_model=is_model,
        dtype=dtype or AUTO,
        out=folder,
    )


TEMPLATE = Path(rlft.__file__).parent / "assets" / "model_card.md.jinja"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PASS_AT = re.compile(r"eval/pass@(\d+)")  # the largest is at the number of samples of each prompt
IN_THE_PROMPT = ("_target_", "system_prompt", "prompt_template")
STEPS = {"examples_per_step": "demonstrations", "rankings_per_step": "rankings"}
NEUTRAL = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "guidance_scale": 1.0, "typical_p": 1.0, "min_p": 0.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "num_beams": 1, "min_length": 0,
    "min_new_tokens": 0, "suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": None,
    "sequence_bias": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
}  # fmt: skip
"""{field of a generation config: the value with which it changes nothing}, of those that the code does not set."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An export, as its card describes it."""

    request: Export
    has_template: bool  # whether the tokenizer's chat template is used
    loader: str  # transformers' class that loads the model
    dtype: str  # of the model's weights
    ends: TurnEnds
    eos: object  # the tokenizer's end token
    names_ends: bool  # whether what loads the model finds all `ends` of turns in its generation config
    chain: str | None  # the digest of the run's chain after the checkpoint's step; None for a run without a chain
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the fields of the base's generation_config.json

    def text(self) -> str:
        from jinja2 import Environment, StrictUndefined

        request, config = self.request, self.request.source.config
        kind, is_model, step = request.checkpoint_kind, request.is_model, checkpoint.saved_step(request.checkpoint)
        data, generation = config.get("data") or {}, config.get("generation") or {}
        is_whole, base = kind is CheckpointKind.weights, config["model"]["path"]
        adapter = {} if is_whole else json.loads((request.checkpoint / kind / CONFIG).read_text())
        evaluations = [line for line in read_lines(request.source.run / EVALUATIONS) if line["step"] <= step]
        typed = for_typed(data.get("prompt_template") or PLACEHOLDER)
        sampling = {key: generation[key] for key in ("temperature", "top_p", "top_k") if key in generation}
        sampling |= {"min_p": generation["min_p"]} if generation.get("min_p") else {}
        changed = {k: v for k, v in self.defaults.items() if k in NEUTRAL and v not in (None, NEUTRAL[k])}
        stops = generation.get("stop") or ()
        stop_ids = [stop for stop in stops if isinstance(stop, int)]
        markdown = Environment(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
        )
        markdown.filters |= {"cell": cell, "json": partial(json.dumps, ensure_ascii=False), "repr": repr}
        return markdown.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
            card=self,
            request=request,
            config=config,
            adapter=adapter,
            switches=switches_of(adapter),
            step=step,
            steps=counted(step, "step"),
            front_matter=front_matter(config, kind, is_model),
            facts=facts(config),
            origin=run_folder.read(request.source.run, "run").get(run_folder.ORIGIN, {}),
            results=results(evaluations, config),
            measured_on=measured_on(config),
            reward_command=reward_command,
            messages=prompt_of("What is 17 + 25?", data.get("system_prompt"), typed),
            variables=(config.get("prompts") or {}).get("template_variables") or {},
            sampling=sampling,
            max_tokens=generation.get("max_tokens", 256),
            changed=changed,
            neutral={key: NEUTRAL[key] for key in changed if key not in sampling},
            stop_texts=[stop for stop in stops if isinstance(stop, str)],
            stop_ids=list(dict.fromkeys([*self.ends.ids, *stop_ids])) if stop_ids or not self.names_ends else [],
            with_stops=bool(generation.get("include_stop_str_in_output")),
            engine_rank=engine_rank,
            base_id=base if is_hub_id(base) else None,
            gguf={"url": LLAMA_CPP, "model": model_command, "adapter": adapter_command, "why_not": why_no_adapter},
        )


def cell(text: str) -> str:
    """A text as a cell of a table: in one line, without what would end the cell."""
    return " ".join(text.replace("|", "\\|").split())


def front_matter(config: Config, kind: CheckpointKind, is_model: bool) -> str:
    """The card's front matter: YAML that the hub reads."""
    fields: dict[str, Any] = {}
    if is_hub_id(config["model"]["path"]):
        fields["base_model"] = config["model"]["path"]
        fields["base_model_relation"] = "finetune" if is_model else "adapter"
    data = config.get("data") or {}
    if str(data.get("_target_", "")).startswith("rlft.data.hub.") and is_hub_id(data["path"]):
        fields["datasets"] = [data["path"]]
    fields["library_name"] = "transformers" if is_model else "peft"
    if kind is not CheckpointKind.reward:
        fields["pipeline_tag"] = "text-generation"
    algorithm = config.get("algorithm") or {}
    fields["tags"] = [
        "rlft",
        *(["reinforcement-learning", component_name(algorithm["_target_"])] if "_target_" in algorithm else []),
        *(["sft"] if config.get("demonstrations") else []),
        *([component_name(config["loss"]["_target_"])] if config.get("loss") else []),
        *(["reward-model"] if kind is CheckpointKind.reward else []),
        *([] if kind is CheckpointKind.weights else ["lora"]),
    ]
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def facts(config: Config) -> list[tuple[str, str]]:
    """Rows (name, value) of the table, from the sections of the run's config."""
    rows = [("Base", public_name(config["model"]["path"], config["model"].get("revision")))]
    if data := config.get("data"):
        rows.append(("Data", described(data)))
    for section in ("demonstrations", "preferences", "loss", "algorithm"):
        if config.get(section):
            rows.append((section.capitalize(), described(config[section])))
    if rewards := config.get("reward"):
        weights = ", ".join(f"{name} x {reward.get('weight')}" for name, reward in rewards.items())
        rows.append(("Rewards" if "algorithm" in config else "Rewards (only measured)", weights))
    if "group_size" in config:
        completions = counted(config["group_size"], "completion")
        rows.append(("A step", f"{counted(config['prompts_per_step'], 'prompt')} x {completions}"))
    rows += [("A step", f"{config[key]} {unit}") for key, unit in STEPS.items() if key in config]
    if lora := config.get("lora"):
        lora_kinds = {name: True for name in SWITCHES if lora.get(name)}
        lora_keys = {key: lora[key] for key in ("rank", "alpha", "dropout", "target_modules")}
        rows.append(("Adapter", keys_text({**lora_keys, **lora_kinds})))
    if trainer := config.get("trainer"):
        rows.append(("Optimizer", keys_text(trainer)))
    if generation := config.get("generation"):
        keys = ("temperature", "top_p", "top_k", "max_tokens")
        stops = {"stop": generation["stop"]} if generation.get("stop") else {}
        rows.append(("Completions", keys_text({**{k: generation[k] for k in keys}, **stops})))
    return [*rows, ("Seed", str(config.get("seed")))]


def described(section: Config) -> str:
    """A component as text: the name of its module and its keys."""
    keys = keys_text({key: value for key, value in section.items() if key not in IN_THE_PROMPT})
    return f"{component_name(section['_target_'])}: {keys}"


def keys_text(section: Config) -> str:
    return ", ".join(
        f"{key}={public_name(value) if key in PATH_NAMES else json.dumps(value, ensure_ascii=False)}"
        for key, value in section.items()
        if value is not None
    )


def is_hub_id(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and not is_data_file(path) and not looks_local(path)


def public_name(path: str, revision: str | None = None) -> str:
    """A hub id or embedded name unchanged, or the last part of a local path."""
    name = path if is_hub_id(path) or path.startswith(EMBEDDED) else Path(path).name
    return name if revision is None else f"{name} at {revision}"


def results(evaluations: Sequence[Config], config: Config) -> list[tuple[str, ...]]:
    """The table of the first and the last evaluation, its heading first; empty if there was no evaluation."""
    if not evaluations:
        return []
    columns = ends(evaluations)
    names = [n for n in dict.fromkeys(n for line in columns for n in line) if n.startswith("eval/") and n[-3:] != "_se"]
    rows = [(name.removeprefix("eval/"), *(value_text(line, name) for line in columns)) for name in names]
    if "sampled" in measured_on(config):
        sizes = [[int(match[1]) for name in line if (match := PASS_AT.fullmatch(name))] for line in columns]
        rows.insert(0, ("samples of each prompt", *(str(max(of_line, default="-")) for of_line in sizes)))
    return [("", *(f"step {line['step']}" for line in columns)), *rows]


def measured_on(config: Config) -> str:
    """A description of the data that an evaluation uses, and of how it samples."""
    settings = config.get("eval") or {}
    if "num_rankings" in settings:
        return f"rankings, at most {settings['num_rankings']}"
    if not config.get("data"):
        return f"demonstrations, at most {settings['num_prompts']}"
    temperature = settings["temperature"]
    sampling = "as in training" if temperature is None else f"at temperature {temperature:g}"
    return f"prompts, at most {settings['num_prompts']}, sampled {sampling}"


def value_text(line: Config, name: str) -> str:
    value, error = line.get(name), line.get(f"{name}_se")
    if value is None:
        return "-"
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def reward_command(config: Config, adapter: Config, name: str) -> str:
    """The `rlft train` command that uses this reward model, for an adapter of the same shape on the same base."""
    base, targets = (config.get("model") or {}).get("path") or "", (config.get("lora") or {}).get("target_modules")
    keys: dict[str, object] = {"model.path": base} if base.startswith(EMBEDDED) or is_hub_id(base) else {}
    keys |= {"reward.learned.path": name, "lora.rank": adapter["r"], "lora.alpha": f"{adapter['lora_alpha']:g}"}
    if targets not in (None, ALL_LINEAR):
        keys["lora.target_modules"] = targets
    keys |= {f"lora.{name}": "true" for name, is_on in switches_of(adapter).items() if is_on}
    return command_line("rlft", "train", "reward=[exact_match,learned]", *overrides(keys))
