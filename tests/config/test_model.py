"""Which folder model.path means, and what is refused of it before a library could read it."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

import rlft
from rlft.cli import run
from rlft.config.model import check_local, looks_local, resolve_path
from rlft.types import UserError


def test_a_recipes_folder_that_nothing_brings_is_refused_with_the_page_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    repository = Path(__file__).parents[2]
    texts = {file.name: yaml.safe_load(file.read_text()) for file in (repository / "recipes").glob("*.yaml")}
    paths = {path for text in texts.values() if (path := text.get("model", {}).get("path")) and looks_local(path)}
    assert paths == {"./models/SmolLM2-135M-Instruct"}
    for path in paths:
        with pytest.raises(UserError, match=r"^model.path: .*; make it as in docs/tutorials/\w+\.md, or") as refused:
            check_local(path)
        [page] = re.findall(r"docs/tutorials/\w+\.md", str(refused.value))
        assert str(Path(path)) in (repository / page).read_text()


def test_a_folder_with_a_config_an_embedded_model_and_a_hub_id_pass(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for path in (str(tmp_path), "embedded:tiny-arithmetic", "org/model"):
        check_local(path)
    assert looks_local(str(tmp_path))
    assert not looks_local("org/model")
    assert resolve_path("org/model") == "org/model"


TRAINED = Path(__file__).parents[1] / "runs/recorded/train"
BASE, TEACHER, REWARD = "model.path", "snapshot.teacher", "reward.learned.path"
LOADING: list[tuple[str, str]] = [
    (BASE, "train +recipe=grpo_arithmetic"),
    (BASE, "train -m +recipe=grpo_arithmetic seed=0,1"),
    *((BASE, f"{command} +recipe={command}_arithmetic") for command in ("sft", "rm", "dpo")),
    (BASE, "sample"),
    (BASE, "eval data=arithmetic"),
    (BASE, "chat"),
    (BASE, "serve serve.port=0"),
    (BASE, "doctor"),
    *((BASE, f"{command} run={TRAINED}") for command in ("eval", "chat", "serve serve.port=0", "export out=out")),
    (BASE, f"resume {TRAINED} steps=9"),
    (TEACHER, "train +recipe=opd_arithmetic"),
    (REWARD, "train +recipe=grpo_arithmetic reward=[exact_match,learned]"),
    (REWARD, "eval data=arithmetic model.path=embedded:tiny-arithmetic reward=[exact_match,learned]"),
]
PLANNING = [(BASE, "plan +recipe=grpo_arithmetic"), (BASE, "reward try"), (TEACHER, "plan +recipe=opd_arithmetic")]
MISSING = {"weights": "*.safetensors", "a tokenizer": "tokenizer*", "config.json": "config.json"}


@pytest.mark.parametrize(
    ("missing", "key", "words"),
    [(what, *words) for what in MISSING for words in LOADING + (PLANNING if what != "weights" else [])],
)
def test_a_folder_that_lacks_files_is_refused_before_torch_is_imported(
    missing, key, words, tmp_path, monkeypatch, capsys
):
    shutil.copytree(Path(rlft.__file__).parent / "assets/tiny-arithmetic", folder := tmp_path / "model")
    for file in folder.glob(MISSING[missing]):
        file.unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlft.system.interrupt.ends_the_process", lambda: pytest.fail("imports torch"))
    monkeypatch.setattr("rlft.commands.doctor.command.report", lambda *_, **__: pytest.fail("looks at the machine"))
    assert run([*words.split(), f"{key}={folder}"]) == 2
    what = "no config.json" if missing == "config.json" else f"no file with {missing}"
    refusal = capsys.readouterr().err
    assert f"rlft: {key}: there is {what} in that folder" in refusal
    assert f", got {folder}; " in refusal
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model"]
