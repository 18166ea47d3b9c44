"""The README.md of an exported model, made from its run folder alone, and the commands that make a GGUF file of it.

Its front matter is the one that the hub reads. A base or data set without a hub id is named only in the text, and
without its folder. llama.cpp's two scripts, in the folder `llama.cpp`, write GGUF files; rlft itself writes none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlft.config.instantiate import component_name
from rlft.config.model import ALL_LINEAR, EMBEDDED, SWITCHES, looks_local
from rlft.data.files import is_data_file
from rlft.data.templates import PLACEHOLDER, for_typed, prompt_of
from rlft.generation.vllm.options import engine_rank
from rlft.logger.jsonl import EVALUATIONS, read_lines
from rlft.model.adapter_folder import CONFIG, switches_of
from rlft.runs import checkpoint, run_folder
from rlft.runs.config_file import PATH_NAMES
from rlft.runs.find import CheckpointKind, NamedRun
from rlft.system.terminal import command_line, overrides
from rlft.tokens.ends import TurnEnds
from rlft.types import counted

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
IN_THE_PROMPT = ("_target_", "system_prompt", "prompt_template")
STEPS = {"examples_per_step": "demonstrations", "rankings_per_step": "rankings"}
PLAIN_PROMPT = '"\\n\\n".join(message["content"] for message in messages)'
"""The prompt's text for a tokenizer without a chat template (rlft.data.prompts)."""
NEUTRAL = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "min_p": 0.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1.0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": None,
    "sequence_bias": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
}
"""{field of a generation config: the value with which it changes nothing}, of those that the code does not set."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the card says.

    Attributes:
        source: the run.
        checkpoint: the checkpoint's folder.
        kind: what the checkpoint holds.
        is_model: whether a whole model is exported, rather than only an adapter.
        name: the exported folder's name.
        repo_id: the repository that the folder is pushed to.
        has_template: whether the tokenizer's chat template is used.
        loader: transformers' class that loads the model.
        dtype: the dtype of the model's weights.
        ends: what ends a turn.
        eos: the tokenizer's end token.
        names_ends: whether what loads the model finds all of them in its generation config.
        chain: the digest of the run's chain after the checkpoint's step; None for a run without a chain.
        defaults: the fields of the base's generation_config.json.
    """

    source: NamedRun
    checkpoint: Path
    kind: CheckpointKind
    is_model: bool
    name: str
    repo_id: str | None
    has_template: bool
    loader: str
    dtype: str
    ends: TurnEnds
    eos: object
    names_ends: bool
    chain: str | None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The card, in Markdown."""
        config, kind, ends = self.source.config, self.kind, self.ends
        step = checkpoint.saved_step(self.checkpoint)
        origin = run_folder.read(self.source.run, "run").get(run_folder.ORIGIN, {})
        evaluations = [line for line in read_lines(self.source.run / EVALUATIONS) if line["step"] <= step]
        is_whole = kind is CheckpointKind.weights
        adapter = {} if is_whole else json.loads((self.checkpoint / kind / CONFIG).read_text())
        base_id = config["model"]["path"] if is_hub_id(config["model"]["path"]) else None
        end = (ends.ids[0], ends.names[ends.ids[0]]) if ends.ids and ends.ids[0] != self.eos else None
        exported_as = "reward model" if kind is CheckpointKind.reward else "model" if self.is_model else "adapter"
        trained_with = ", ".join(f"{k} {v}" for k, v in origin.items())
        sections = [
            front_matter(config, kind, self.is_model),
            f"# {config['name']}",
            f"A {exported_as}, trained with rlft for {counted(step, 'step')}.",
            table(("", ""), [*facts(config), *end_fact(ends), ("Trained with", trained_with)]),
            results(evaluations, config),
            usage(self, adapter),
            provenance(self.chain, self.name, step),
        ]
        if kind is not CheckpointKind.reward:
            sections.append(card_section(self.name, None if self.is_model else adapter, base_id, end))
        licence = "## Licence\n\nNot recorded in the run: whoever publishes this chooses it, as base and data allow."
        return "\n\n".join(part for part in (*sections, licence) if part) + "\n"


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
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


# -- the table of the run's settings -----------------------------------------------------------------------------------
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


# -- results -----------------------------------------------------------------------------------------------------------
def results(evaluations: Sequence[Config], config: Config) -> str:
    """The section with the first and the last evaluation, with standard errors; empty if there was no evaluation."""
    if not evaluations:
        return ""
    columns = [evaluations[0], evaluations[-1]][-min(2, len(evaluations)) :]
    names = [n for n in dict.fromkeys(n for line in columns for n in line) if n.startswith("eval/") and n[-3:] != "_se"]
    rows = [(name.removeprefix("eval/"), *(value_text(line, name) for line in columns)) for name in names]
    samples = ("samples of each prompt", *(num_samples(line) for line in columns))
    heading = ("", *(f"step {line['step']}" for line in columns))
    introduction = f"Held-out {measured_on(config)}; ± is a standard error over them."
    by_samples = [samples] if "sampled" in introduction else []
    return f"## Results\n\n{introduction}\n\n{table(heading, [*by_samples, *rows])}"


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


def num_samples(line: Config) -> str:
    """The number of samples per prompt, which is the largest k of pass@k."""
    sizes = [int(match[1]) for name in line if (match := re.fullmatch(r"eval/pass@(\d+)", name))]
    return str(max(sizes)) if sizes else "-"


def provenance(chain: str | None, name: str, step: int) -> str:
    """The section that cites the run's chain; empty without one."""
    if chain is None:
        return ""
    cited = f"`chain.jsonl` has the sha256 of all that the run made, up to step {step}. It ends with\n`{chain}`."
    checked = f"`rlft audit {name}` verifies it, and `rlft audit <run>` recomputes and replays steps of the run."
    return f"## Provenance\n\n{cited}\n{checked}"


# -- use ---------------------------------------------------------------------------------------------------------------
def reward_command(config: Config, adapter: Config, name: str) -> str:
    """The `rlft train` command that uses this reward model, for an adapter of the same shape on the same base."""
    base, targets = (config.get("model") or {}).get("path") or "", (config.get("lora") or {}).get("target_modules")
    keys: dict[str, object] = {"model.path": base} if base.startswith(EMBEDDED) or is_hub_id(base) else {}
    keys |= {"reward.learned.path": name, "lora.rank": adapter["r"], "lora.alpha": f"{adapter['lora_alpha']:g}"}
    if targets not in (None, ALL_LINEAR):
        keys["lora.target_modules"] = targets
    keys |= {f"lora.{name}": "true" for name, is_on in switches_of(adapter).items() if is_on}
    return command_line("rlft", "train", "reward=[exact_match,learned]", *overrides(keys))


def usage(card: Card, adapter: Config) -> str:
    """Python code that loads the export with transformers and with vLLM, and prompts it as the run did."""
    config, is_model, loader, name = card.source.config, card.is_model, card.loader, card.repo_id or card.name
    if card.kind is CheckpointKind.reward:
        return f"## Use\n\n```\n{reward_command(config, adapter, name)}\n```"
    generation = config.get("generation") or {}
    sampling = [f"{key}={generation[key]}" for key in ("temperature", "top_p", "top_k") if key in generation]
    sampling += [f"min_p={generation['min_p']}"] if generation.get("min_p") else []
    variables = (config.get("prompts") or {}).get("template_variables") or {}
    own_options = "".join(f', "{name}": {value!r}' for name, value in variables.items())
    length = generation.get("max_tokens", 256)
    by_transformers, by_vllm = stop_code(generation, card.ends, names_ends=card.names_ends)
    neutral, note = without_defaults(card.defaults)
    neutral = [option for option in neutral if option.partition("=")[0] not in "".join(sampling)]
    generate_options = ["do_sample=True", *sampling, *neutral, f"max_new_tokens={length}", *by_transformers]
    shared_lines = [
        f'path = "{name}"',
        *(["base = path"] if is_model else ["base = PeftConfig.from_pretrained(path).base_model_name_or_path"]),
        *messages_code(config),
    ]
    transformers_lines = [
        *([] if is_model else ["from peft import PeftConfig, PeftModel"]),
        f"from transformers import {', '.join(sorted(('AutoTokenizer', loader)))}",
        "",
        *shared_lines,
        "tokenizer = AutoTokenizer.from_pretrained(path)",
        f'model = {loader}.from_pretrained(base, dtype="auto")',
        *([] if is_model else ["model = PeftModel.from_pretrained(model, path)"]),
        f'options = {{"return_dict": True, "return_tensors": "pt"{own_options}}}',
        "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)"
        if card.has_template
        else f'inputs = tokenizer({PLAIN_PROMPT}, return_tensors="pt")',
        f"output = model.generate(**inputs, {', '.join(generate_options)})",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    # vLLM rounds float32 weights to 16 bits by default.
    dtype_option = ', dtype="float32"' if card.dtype == "float32" else ""
    lora_options = "" if is_model else f", enable_lora=True, max_lora_rank={engine_rank(adapter['r'])}"
    vllm_lines = [
        *([] if is_model else ["from peft import PeftConfig"]),
        "from vllm import LLM, SamplingParams",
        *([] if is_model else ["from vllm.lora.request import LoRARequest"]),
        "",
        *shared_lines,
        f"sampling = SamplingParams({', '.join([*sampling, f'max_tokens={length}', *by_vllm])})",
        f"answers = LLM(base{dtype_option}{lora_options})."
        f"{'chat(messages' if card.has_template else f'generate({PLAIN_PROMPT}'}, sampling"
        + (f", chat_template_kwargs={variables!r}" if variables and card.has_template else "")
        + ("" if is_model else ', lora_request=LoRARequest("policy", 1, path)')
        + ")",
        "print(answers[0].outputs[0].text)",
    ]
    switches = switches_of(adapter)
    vllm_can_load = is_model or not (switches["use_dora"] or switches["experts"])  # vLLM refuses such adapters
    programs = [code(transformers_lines), *([code(vllm_lines)] if vllm_can_load else [])]
    return "\n\n".join(filter(None, ("## Use", "\n\nor\n\n".join(programs), note)))


def without_defaults(defaults: Mapping[str, Any]) -> tuple[list[str], str]:
    """(arguments that keep `generate` from changing log-probs as the base's generation config would, a sentence on it).

    >>> without_defaults({"repetition_penalty": 1.05, "typical_p": 1.0, "top_k": 20})[0]
    ['repetition_penalty=1.0']
    """
    differing = {k: v for k, v in defaults.items() if k in NEUTRAL and v not in (None, NEUTRAL[k])}
    if not differing:
        return [], ""
    listed = ", ".join(f"`{name}: {value}`" for name, value in differing.items())
    note = f"The base's generation_config.json has {listed}: the run sampled without it, and so does this code."
    return [f"{name}={NEUTRAL[name]}" for name in differing], note


def end_fact(ends: TurnEnds) -> list[tuple[str, str]]:
    """The row of the table that says what ends a turn."""
    texts = [f"`{ends.names[token]}` ({token})" for token in ends.ids]
    return [("A turn ends with", " or ".join(texts))] if texts else []


def stop_code(generation: Config, ends: TurnEnds, *, names_ends: bool) -> tuple[list[str], list[str]]:
    """Arguments for transformers' `generate` and vLLM's `SamplingParams` that make both stop where the run did."""
    texts = [stop for stop in generation.get("stop", ()) if isinstance(stop, str)]
    tokens = [stop for stop in generation.get("stop", ()) if isinstance(stop, int)]
    tokens = list(dict.fromkeys([*ends.ids, *tokens])) if tokens or not names_ends else []
    by_transformers = [f"stop_strings={texts!r}", "tokenizer=tokenizer"] if texts else []
    by_transformers += [f"eos_token_id={tokens!r}"] if tokens else []
    by_vllm = [f"stop={texts!r}"] if texts else []
    by_vllm += [f"stop_token_ids={tokens!r}"] if tokens else []
    if by_vllm and generation.get("include_stop_str_in_output"):
        by_vllm.append("include_stop_str_in_output=True")
    return by_transformers, by_vllm


def messages_code(config: Config) -> list[str]:
    """Python code of the messages that the run would make of a question."""
    data = config.get("data") or {}
    template = for_typed(data.get("prompt_template") or PLACEHOLDER)
    messages = prompt_of("What is 17 + 25?", data.get("system_prompt"), template)
    return ["messages = [", *(f"    {json.dumps(dict(m), ensure_ascii=False)}," for m in messages), "]"]


def code(lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    return f"```python\n{text}\n```"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(' '.join(cell.replace('|', chr(92) + '|').split()) for cell in cells)} |"

    return "\n".join([line(heading), line(["---"] * len(heading)), *(line(row) for row in rows)])


REPOSITORY = "https://github.com/ggml-org/llama.cpp"
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


def instructions(folder: Path, adapter: Mapping[str, Any] | None) -> str:
    """The line printed after an export; `adapter` is the folder's adapter_config.json, or None for a model."""
    if adapter is None:
        return f"as GGUF, with {REPOSITORY}: {model_command(str(folder))}"
    if (problem := why_no_adapter(adapter)) is not None:
        return f"as GGUF: {problem}; export as=model and convert that"
    base = str(adapter["base_model_name_or_path"])
    return f"as GGUF, with {REPOSITORY}: {adapter_command(str(folder), base, base_is_folder=Path(base).is_dir())}"


def card_section(
    folder: str, adapter: Mapping[str, Any] | None, base_id: str | None, end: tuple[int, str] | None = None
) -> str:
    """The section of a model card about GGUF.

    Args:
        folder: the exported folder's name.
        adapter: its adapter_config.json, or None for a model.
        base_id: the base's hub id; None if the base is a folder.
        end: (id, text) of the token that ends a turn, if the tokenizer names another one; else None.
    """
    if adapter is None:
        command = model_command(folder)
        note = "`--outtype q8_0` makes it half as large."
    elif (problem := why_no_adapter(adapter)) is not None:
        return f"## GGUF\n\nNot as an adapter: {problem}. Export the merged model and convert that."
    else:
        command = adapter_command(folder, base_id or "base", base_is_folder=base_id is None)
        note = "" if base_id else "`base` is a folder with the base model."
    introduction = (
        f"For [llama.cpp]({REPOSITORY}) and programs built on it, beside a clone of it and this folder as `{folder}`:"
    )
    parts = ("## GGUF", introduction, f"```\n{command}\n```", note, *([] if end is None else [end_note(*end)]))
    return "\n\n".join(part for part in parts if part)


def end_note(token: int, text: str) -> str:
    """How llama.cpp stops at the end of a turn: the file holds the tokenizer's end token, and not this one."""
    option = f"--override-kv tokenizer.ggml.eot_token_id=int:{token}"
    return f"A turn ends with `{text}`. If llama.cpp does not know that token by its name, start it with `{option}`."
