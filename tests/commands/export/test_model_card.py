"""The card of an export: what it says of a run, that its Python runs, and the commands that make a GGUF file."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from audited_runs import lines_of
from slow_cases import slow

from rlft import cli
from rlft.commands.export.command import export
from rlft.commands.export.model_card import Card, facts, front_matter, gguf_line, measured_on, prepare, results
from rlft.config.compose import compose
from rlft.runs import run_folder
from rlft.runs.find import CheckpointKind
from rlft.tokens.text import TurnEnds

HUB_BASE = {"base_model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"}


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_an_export_names_its_converter_and_an_adapters_its_base(kind, policy_run, tiny_path, tmp_path, capsys):
    out, base = tmp_path / "my model", str(tiny_path.resolve())
    assert cli.run(["export", f"run={policy_run().run}", f"out={out}", f"as={kind}"]) == 0
    script, own, outtype = {
        "model": ("llama.cpp/convert_hf_to_gguf.py", [], "auto"),
        "adapter": ("llama.cpp/convert_lora_to_gguf.py", ["--base", base], "f32"),
    }[kind]
    start = "as GGUF, with https://github.com/ggml-org/llama.cpp: "
    [printed] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(start)]
    command = ["python", script, str(out), *own, "--outfile", f"{out}.gguf", "--outtype", outtype]
    assert shlex.split(printed.removeprefix(start)) == command
    card = (out / "README.md").read_text()
    of_base = " --base base" if own else ""
    assert f"\npython {script} 'my model'{of_base} --outfile 'my model.gguf' --outtype {outtype}\n" in card
    assert ("`base` is a folder with the base model." in card) == bool(own)
    assert str(tmp_path) not in card
    assert base not in card


def card_of(place, base, **kind):
    """The card of the run's adapter, as if it were of this kind and for a base of this id."""
    [file] = place.run.glob("checkpoints/*/policy/adapter_config.json")
    asked = prepare(place, "mine", "adapter", None, print)
    file.write_text(json.dumps({**json.loads(file.read_text()), **kind}))
    source = replace(place, config={**place.config, "model": {**place.config["model"], "path": base}})
    ends = TurnEnds(ids=(), names={})
    of_text = {"has_template": True, "loader": "AutoModelForCausalLM", "dtype": "float32", "chain": None}
    return Card(request=replace(asked, source=source), ends=ends, eos=None, names_ends=True, **of_text).text()


def test_a_base_on_the_hub_is_named_by_its_id(policy_run):
    options = "--base-model-id Qwen/Qwen2.5-0.5B-Instruct --outfile mine.gguf --outtype f32"
    command = f"python llama.cpp/convert_lora_to_gguf.py mine {options}"
    assert gguf_line(Path("mine"), HUB_BASE).endswith(f": {command}")
    card = card_of(policy_run(), HUB_BASE["base_model_name_or_path"])
    assert f"\n{command}\n```\n\n## Licence" in card, "and no note on a folder"


@pytest.mark.parametrize(("kind", "problem"), [("use_dora", "has no DoRA"), ("use_rslora", "scales adapters by alpha")])
def test_an_adapter_that_would_become_another_one_is_not_converted(kind, problem, policy_run):
    adapter = {**HUB_BASE, kind: True}
    for text in (gguf_line(Path("mine"), adapter), card_of(policy_run(), "a/b", **{kind: True})):
        assert f"llama.cpp {problem}" in text
        assert "convert_lora_to_gguf" not in text
    assert gguf_line(Path("mine"), adapter).endswith("; export as=model and convert that")


# -- the card --------------------------------------------------------------------------------------------------------
def read_card(out):
    """The front matter, and the text."""
    _, front, text = (out / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_says_what_the_run_folder_says(trained, exports):
    front, text = read_card(exports["model"])
    assert front == {  # the embedded base is no hub id
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlft", "reinforcement-learning", "grpo", "lora"],
    }
    assert text.startswith("\n# grpo_arithmetic\n\nA model, trained with rlft for 3 steps.\n")
    first, *_, last = lines_of(trained / "eval.jsonl")
    assert (first["step"], last["step"]) == (0, 3)
    for name in ("eval/exact_match", "eval/pass@2"):
        told = [f"{line[name]:.4f} ± {line[f'{name}_se']:.4f}" for line in (first, last)]
        assert f"| {name[5:]} | {told[0]} | {told[1]} |" in text
    for told in (
        "|  | step 0 | step 3 |", "| samples of each prompt | 2 | 2 |", "| Base | embedded:tiny-arithmetic |",
        "Held-out prompts, at most 8, sampled as in training; ", "| Data | arithmetic: difficulty=2, ",
        "| Rewards | exact_match x 1.0, format x ", "| A step | 4 prompts x 8 completions |",
    ):  # fmt: skip
        assert told in text, told
    origin = run_folder.read(trained)["origin"]
    for told in (
        f"commit {origin['commit']}",
        f"torch {origin['torch']}",
        "base_fingerprint",
        "Not recorded in the run",
    ):
        assert told in text, told
    assert str(trained.parent) not in text


def exported(place, out, kind):
    return export(prepare(place, str(out), kind, None, print), print)


def test_the_card_asks_with_the_runs_own_prompt(policy_run, tmp_path):
    (tmp_path / "my.jsonl").touch()
    data = ["data=jsonl", f"data.path={tmp_path / 'my.jsonl'}", "data.system_prompt='Say \"yes\"'"]
    place = policy_run(*data, "data.prompt_template='Q|: {question}'")
    _, text = read_card(exported(place, tmp_path / "out", "adapter"))
    assert '{"role": "system", "content": "Say \\"yes\\""},' in text
    assert '{"role": "user", "content": "Q|: What is 17 + 25?"},' in text
    assert "| Data | jsonl: path=my.jsonl, held_out_fraction=0.1, " in text
    assert str(tmp_path) not in text
    assert "## Results" not in text, "there was no evaluation"


def test_the_card_says_what_runs_of_other_commands_learned_from_and_were_measured_on():
    line = {"step": 3, "eval/loss": 0.5, "eval/accuracy": 0.75, "eval/accuracy_se": 0.1}
    sft = compose(["demonstrations.path=mine/a.jsonl"], command="sft")
    assert ("A step", "32 demonstrations") in facts(sft)
    assert dict(facts(sft))["Demonstrations"].startswith("demonstrations: path=a.jsonl, ")
    assert measured_on(sft) == "demonstrations, at most 128"
    told = results([line], sft)
    assert ("loss", "0.5000") in told
    assert all("samples" not in name for name, _ in told)
    assert measured_on({**sft, "data": {"x": 1}}) == "prompts, at most 128, sampled as in training"
    rm = compose(["preferences.path=mine/a.jsonl"], command="rm")
    assert ("A step", "32 rankings") in facts(rm)
    assert measured_on(rm) == "rankings, at most 512"
    assert results([line], rm) == [("", "step 3"), ("loss", "0.5000"), ("accuracy", "0.7500 ± 0.1000")]


def test_hub_ids_stand_in_the_front_matter(policy_run):
    config = policy_run("data=gsm8k").config
    config = {**config, "model": {**config["model"], "path": "Qwen/Qwen2.5-0.5B-Instruct"}}
    front = yaml.safe_load(front_matter(config, CheckpointKind.policy, is_model=False))
    assert front["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert front["base_model_relation"] == "adapter"
    assert front["library_name"] == "peft"
    assert front["datasets"] == ["openai/gsm8k"]


@pytest.mark.parametrize(
    ("kind", "template"), [("adapter", True), slow("model", True), slow("adapter", False), slow("model", False)]
)
def test_the_python_of_the_card_runs(policy_run, tiny_path, monkeypatch, capsys, tmp_path, kind, template):
    base, variables = tmp_path / "base", list[str]()
    shutil.copytree(tiny_path, base)
    if not template:
        (base / "chat_template.jinja").unlink()
    else:
        file = base / "chat_template.jinja"
        file.write_text("{% if brief is defined %}Be brief.{% endif %}" + file.read_text())
        variables = ["prompts.template_variables={brief: true}"]
    defaults = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**defaults, "repetition_penalty": 1.5, "typical_p": 1.0}))
    place = policy_run(f"model.path={base}", "generation.max_tokens=8", *variables, noise=0.0)
    _, text = read_card(exported(place, tmp_path / "out", kind))
    by_transformers, by_vllm = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(by_vllm, "card", "exec")
    assert "repetition_penalty=1.0" in by_transformers, "the run sampled without the base's"
    assert "typical_p" not in by_transformers
    assert "has `repetition_penalty: 1.5`: the run sampled without it" in text
    assert ('"brief": True' in by_transformers) == ("chat_template_kwargs={'brief': True}" in by_vllm) == template
    assert 'LLM(base, dtype="float32"' in by_vllm, "vLLM would make bfloat16 of it"
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(by_transformers, {})
    assert capsys.readouterr().out.strip(), "it answers"


def test_an_rslora_run_says_so_in_its_card(policy_run, tmp_path):
    place = policy_run()
    [config] = place.run.glob("checkpoints/*/policy/adapter_config.json")
    asked = prepare(place, str(tmp_path / "mine"), "adapter", None, print)
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_rslora": True}))
    assert "## GGUF\n\nNot as an adapter: llama.cpp scales" in (export(asked, print) / "README.md").read_text()
