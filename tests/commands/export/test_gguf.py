"""The commands that make a GGUF file of an exported folder: where they are named, and of what they are none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlft import cli
from rlft.commands.export.command import export
from rlft.commands.export.model_card import Card, Export, gguf_line, prepare
from rlft.model.roles import Roles
from rlft.runs.find import CheckpointKind, NamedRun
from rlft.tokens.text import TurnEnds

HUB_BASE = {"base_model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"}


def printed_command(out: str) -> list[str]:
    [line] = [
        line for line in out.splitlines() if line.startswith("as GGUF, with https://github.com/ggml-org/llama.cpp")
    ]
    return shlex.split(line.partition("llama.cpp: ")[2])


def test_an_exported_model_names_its_converter(
    policy_run: Callable[..., NamedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my model"
    assert cli.run(["export", f"run={policy_run().run}", f"out={out}"]) == 0
    script = ["python", "llama.cpp/convert_hf_to_gguf.py"]
    assert printed_command(capsys.readouterr().out) == [
        *script, str(out), "--outfile", f"{out}.gguf", "--outtype", "auto"
    ]  # fmt: skip
    card = (out / "README.md").read_text()
    assert f"\n{shlex.join(script)} 'my model' --outfile 'my model.gguf' --outtype auto\n" in card
    assert str(tmp_path) not in card


def test_an_exported_adapter_names_its_converter_with_its_base(
    policy_run: Callable[..., NamedRun], tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    assert cli.run(["export", f"run={policy_run().run}", f"out={out}", "as=adapter"]) == 0
    script = ["python", "llama.cpp/convert_lora_to_gguf.py"]
    expected = [str(out), "--base", str(tiny_path.resolve()), "--outfile", f"{out}.gguf", "--outtype", "f32"]
    assert printed_command(capsys.readouterr().out) == [*script, *expected]
    card = (out / "README.md").read_text()
    assert f"\n{shlex.join(script)} mine --base base --outfile mine.gguf --outtype f32\n" in card
    assert "`base` is a folder with the base model." in card
    assert str(tiny_path.resolve()) not in card


def card_of(place: NamedRun, base: str, **kind: bool) -> str:
    """The card of the run's adapter, as if it were of this kind and for a base of this id."""
    [file] = place.run.glob("checkpoints/*/policy/adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **kind}))
    config = {**place.config, "model": {**place.config["model"], "path": base}}
    request = Export(
        source=replace(place, config=config),
        checkpoint=file.parents[1],
        checkpoint_kind=CheckpointKind.policy,
        is_model=False,
        dtype="auto",
        out=Path("mine"),
    )
    return Card(
        request=request,
        has_template=True,
        loader="AutoModelForCausalLM",
        dtype="float32",
        ends=TurnEnds(ids=(), names={}),
        eos=None,
        names_ends=True,
        chain=None,
    ).text()


def test_a_base_on_the_hub_is_named_by_its_id(policy_run: Callable[..., NamedRun]) -> None:
    options = "--base-model-id Qwen/Qwen2.5-0.5B-Instruct --outfile mine.gguf --outtype f32"
    command = f"python llama.cpp/convert_lora_to_gguf.py mine {options}"
    assert gguf_line(Path("mine"), HUB_BASE).endswith(f": {command}")
    card = card_of(policy_run(), HUB_BASE["base_model_name_or_path"])
    assert f"\n{command}\n```\n\n## Licence" in card, "and no note on a folder"


@pytest.mark.parametrize(("kind", "problem"), [("use_dora", "has no DoRA"), ("use_rslora", "scales adapters by alpha")])
def test_an_adapter_that_would_become_another_one_is_not_converted(
    kind: str, problem: str, policy_run: Callable[..., NamedRun]
) -> None:
    adapter = {**HUB_BASE, kind: True}
    for text in (gguf_line(Path("mine"), adapter), card_of(policy_run(), "a/b", **{kind: True})):
        assert f"llama.cpp {problem}" in text
        assert "convert_lora_to_gguf" not in text
    assert gguf_line(Path("mine"), adapter).endswith("; export as=model and convert that")


def test_a_reward_model_is_nothing_for_llama_cpp(
    make_roles: Callable[..., Roles],
    save_run: Callable[..., NamedRun],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    roles = make_roles(noise=0.05)
    place = save_run(adapters={"reward": roles.weights("policy")}, config=roles.adapter_config())
    out = tmp_path / "mine"
    assert cli.run(["export", f"run={place.run}", f"out={out}", "as=adapter"]) == 0
    assert capsys.readouterr().out == f"exported to {out}\n"
    assert "GGUF" not in (out / "README.md").read_text()


def test_an_rslora_run_says_so_in_its_card(policy_run: Callable[..., NamedRun], tmp_path: Path) -> None:
    place = policy_run()
    [config] = place.run.glob("checkpoints/*/policy/adapter_config.json")
    asked = prepare(place, str(tmp_path / "mine"), "adapter", None, print)
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_rslora": True}))
    assert "## GGUF\n\nNot as an adapter: llama.cpp scales" in (export(asked, print) / "README.md").read_text()
