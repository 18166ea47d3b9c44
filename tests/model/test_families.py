"""What families.json says of each family of models is what a tiny random model of it shows."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
import write_families
from family_models import TOKENIZER, families, tiny_config
from family_probe import DECODES_OTHERWISE, WRONG_FORWARD, probe, settings

from rlft import cli
from rlft.commands import lists
from rlft.model import families as data
from rlft.model.backbone import read_config
from rlft.model.families import Family, known
from rlft.types import UserError

OF_EACH_KIND = (
    "bert",  # an encoder
    "gpt2",  # packed, learned positions, Conv1D
    "llama",
    "qwen3_5_text",  # gated delta nets
)
PARTS = 12


def differences(kinds: list[str], folder: Path) -> dict[str, tuple[Family, Family]]:
    """{family: (what was found, what families.json says)} where they differ, but for vLLM."""
    found = {}
    for kind in kinds:
        place = folder / kind
        place.mkdir()
        tried, expected = probe(kind, place), replace(known().by_type[kind], vllm=None)
        shutil.rmtree(place)
        if tried != expected:
            found[kind] = tried, expected
    return found


def test_a_family_of_each_kind_is_what_the_file_says(tmp_path: Path) -> None:
    assert not differences(list(OF_EACH_KIND), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_is_what_the_file_says(part: int, tmp_path: Path) -> None:
    assert set(families()) == set(known().by_type) or transformers.__version__ != known().transformers
    assert not differences([kind for kind in families() if kind in known().by_type][part::PARTS], tmp_path)


# -- refusals ----------------------------------------------------------------------------------------------------------
def config_folder(kind: str, folder: Path) -> Path:
    """A model's folder without weights."""
    tiny_config(kind).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


RUN = "generation=transformers model.device=cpu data.size=8 data.held_out_size=2 prompts_per_step=2 eval.num_prompts=2"


def test_a_family_that_was_seen_to_fail_is_refused_by_name_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here = transformers.__version__
    of_llama = Family(wrong=WRONG_FORWARD), Family(decoding=DECODES_OTHERWISE)
    folder = config_folder("llama", tmp_path / "model")
    monkeypatch.setattr("rlft.commands.launch.check_whole", lambda *_, **__: None)  # the folder has a config alone
    run = ["train", *RUN.split(), f"model.path={folder}", f"hydra.run.dir={tmp_path / 'run'}"]
    for family in of_llama:
        monkeypatch.setattr(data, "known", lambda family=family: data.Families({"llama": family}, here, ""))
        assert cli.run(run) == 2
        refusal = capfd.readouterr().err
        assert refusal.startswith(
            f"rlft: model.path: with a llama, {family.wrong or family.decoding}, got {folder}; use "
        )
        # What another release of transformers does is seen when a run starts.
        monkeypatch.setattr(data, "known", lambda family=family: data.Families({"llama": family}, "4.0.0", ""))
        assert read_config(settings(folder)).model_type == "llama"


def test_encoders_and_models_without_layers_for_an_adapter_are_refused_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlft.commands.launch.check_whole", lambda *_, **__: None)  # the folders have a config alone
    for kind, problem in {
        "bert": "a bert is an encoder, which also reads the tokens behind",
        "bart": "a bart is an encoder-decoder, whose decoder reads more than the tokens before",
        "reformer": "a reformer has no linear layer that an adapter can learn on",
        "mllama": "transformers has no class of causal language models for a mllama_text_model",
    }.items():
        folder = config_folder(kind, tmp_path / kind)
        code = cli.run(["train", *RUN.split(), f"model.path={folder}", f"hydra.run.dir={tmp_path / 'run'}"])
        refusal = capfd.readouterr().err
        assert (code, refusal.startswith(f"rlft: model.path: {problem}")) == (2, True), refusal
        assert "; use " in refusal


# -- rlft models -------------------------------------------------------------------------------------------------------
def test_the_page_of_families_says_what_the_file_does() -> None:
    assert write_families.page() == write_families.DOCS.read_text(encoding="utf-8")


def test_families_that_read_images_are_found_though_their_language_model_stands_under_its_own_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["models", "qwen3-vl"]) == 0
    assert capsys.readouterr().out.startswith("qwen3_vl: reads images in prompts, and its language model is trained;")
    assert cli.run(["models", "qwen3-vl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["qwen3_vl"]["note"].startswith("reads images in prompts")


def test_families_are_listed_by_pattern(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["models", "Qwen3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "qwen3: packed training; generates with transformers; vLLM with LoRA; merged export" in lines
    assert "    LoRA on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; not lm_head" in lines
    names = [line.partition(":")[0] for line in lines if line[:1].isalpha()]
    assert names[:-2] == [*sorted(kind for kind in known().by_type if "qwen3" in kind), "qwen3_vl"]
    assert lines[-2] == "images in prompts: qwen2_5_vl, qwen3_vl, qwen3_5, idefics3, smolvlm, gemma3, gemma4"
    assert lines[-1].startswith(f"tried with transformers {known().transformers} and vLLM {known().vllm}")
    assert cli.run(["models", "gemma?", "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)) == ["gemma2", "gemma3", "gemma4"]


def test_a_word_that_names_no_family_is_refused_with_the_one_that_was_meant() -> None:
    for words, message in (
        (["quen3"], "models: there is no such family of causal language models, got quen3; did you mean qwen3?"),
        (["a", "b"], "models: takes one pattern, got a b; write rlft models <pattern>"),
        (["--yaml"], "models: has no such option, got --yaml; use --json"),
    ):
        with pytest.raises(UserError) as refusal:
            lists.models(words)
        assert str(refusal.value) == message
