"""`rlft algorithms`: the list, the page of one algorithm, JSON, algorithms from outside the tree; and `rlft keys`."""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from in_one_test import each

import rlft
from rlft import cli
from rlft.commands.lists import algorithm_page, algorithm_text, all_keys
from rlft.config import catalog, command as commands
from rlft.config.compose import compose
from rlft.config.keys import flatten, is_below

NAMES = catalog.choices("algorithm")
FOLDER = catalog.config_folder() / "algorithm"
DOCS = Path(__file__).parents[2] / "docs" / "explanation"


def keys_of(algorithm):
    return {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}


@pytest.fixture
def shown(capsys, monkeypatch):
    """What the command prints for these words, in lines of 120 columns."""
    monkeypatch.setenv("COLUMNS", "120")

    def show(*words):
        code = cli.run(["algorithms", *words])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    return show


@pytest.fixture
def as_json(shown):
    return lambda *words: json.loads(shown(*words, "--json"))


@pytest.fixture(scope="module")
def pages():
    """(as JSON, as text) of every algorithm."""
    files = catalog.files("algorithm")
    made = {name: algorithm_page(name, files, (), None) for name in NAMES}
    return {name: (page, algorithm_text(page)) for name, page in made.items()}


def test_every_yaml_is_listed_with_family_and_paper(shown, pages):
    listed = json.loads(shown("--json"))
    assert [one["name"] for one in listed] == NAMES == sorted(file.stem for file in FOLDER.glob("*.yaml"))
    table = " ".join(shown().split())
    for one in listed:
        first, second = (FOLDER / f"{one['name']}.yaml").read_text().splitlines()[:2]
        assert (f"# {one['about']}", f"# Paper: {one['paper']}") == (first, second)
        assert re.search(r"arXiv \d{4}\.\d{5}|Machine Learning 8", one["paper"])
        assert re.search(r" (19|20)\d\d, ", one["paper"]), "its year"
        assert f"{one['name']} {one['family']} {one['about']} {one['paper']}" in table
        assert pages[one["name"]][0]["module"] == f"rlft.algorithm.{one['family']}"
    assert {one["family"] for one in listed} == {"grpo", "kimi", "opd", "ppo", "reinforce"}


@each("name", NAMES)
def test_a_page_has_every_key_with_its_default_and_all_comments(name, pages):
    page, text = pages[name]
    words = " ".join(text.split())
    keys = {key["key"]: key for key in page["keys"]}
    assert {key: one["value"] for key, one in keys.items()} == keys_of(rlft.load_algorithm(name))
    for key, one in keys.items():
        assert one["comments"], f"nothing explains {key}"
        value = one["value"] if isinstance(one["value"], str) else json.dumps(one["value"])
        for comment in one["comments"]:
            assert " ".join(comment.split()) in words
        assert f" {key}: {value} {' '.join(one['comments'][0].split())}" in words
    for key, entry in catalog.entries(FOLDER / f"{name}.yaml").items():
        value, written = keys[key]["value"], yaml.safe_load(entry.default)
        assert written in (value, str(value)) or float(entry.default) == value
        assert keys[key]["comments"][-1].endswith(entry.comment)


def test_a_key_is_explained_first_and_then_why_a_variant_changes_it(pages):
    comments = {key["key"]: key["comments"] for key in pages["dapo"][0]["keys"]}
    explained, changed = comments["clip_high"]
    assert explained.startswith("how far above 1 the ratio may push when A > 0")
    assert changed == "dapo: room for unlikely tokens to grow (paper: 0.28 over 0.2 below)"
    assert len(comments["clip_low"]) == 1


@each("name", NAMES)
def test_a_page_prints_the_loss_the_paper_and_a_recipe(name, pages):
    page, text = pages[name]
    assert page["loss"]["lines"][0].startswith("L = agg(")
    for line in page["loss"]["lines"]:
        assert f"\n  {line}\n" in text
    words = " ".join(text.split())
    for symbol, meaning in page["loss"]["symbols"].items():
        assert f" {symbol} {' '.join(meaning.split())}" in words
    assert f"paper {page['paper']}" in words
    assert f"family {page['family']} ({page['module']})" in words
    assert f"try it {page['example']}" in words
    teacher = " snapshot.teacher=<model, adapter or run>" if name == "opd" else ""
    assert page["example"] == f"rlft train +recipe={name}_arithmetic{teacher}"
    recipe = catalog.recipes("train")[f"{name}_arithmetic"]
    assert name == "grpo" or f"override /algorithm: {name}\n" in recipe.read_text()


def test_the_loss_is_the_one_of_the_yamls_own_choices(pages):
    text = {name: page[1] for name, page in pages.items()}
    assert "r = exp(mean_t(lp - lp_old))" in text["gspo"]
    assert "r = exp(lp - lp_old)" in text["grpo"]
    assert "agg(x) = sum_i(sum_t(x)) / (B * T_max)" in text["dr_grpo"]
    assert "- ptx_coef * mean_text(lp_text)" in text["ppo_ptx"]
    assert "- ptx_coef" not in text["ppo"]


def test_keys_on_the_command_line_change_the_loss_and_the_keys_that_are_shown(shown):
    text = shown("grpo", "algorithm.kl_coef=0.04", "algorithm.kl_estimator=k2")
    assert "  L = agg(w * m * S) + kl_coef * agg(KL)\n" in text
    assert "  KL = d ** 2 / 2\n" in text
    assert "\n  kl_coef: 0.04\n" in text


def test_lines_are_as_wide_as_the_terminal(shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    loss = set(json.loads(shown("ppo", "--json"))["loss"]["lines"])
    assert max(len(line) for line in shown("ppo").splitlines() if line.strip() not in loss) <= 60
    assert max(len(line) for line in shown().splitlines()[:-1]) <= 60


MINE = '''"""Mine: log-probs times rewards.

    L = agg(-lp * A)
      + bonus * agg(H)    if bonus > 0
    A = scaled(reward)
    scaled(x): x times ten
"""
from dataclasses import dataclass
from rlft.algorithm.grpo import GRPO

@dataclass(frozen=True, kw_only=True)
class Mine(GRPO):
    bonus: float
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder of YAML of the user's: an algorithm of their own class, and a variant of rlft's GRPO."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_of_a_test.py").write_text(MINE)
    (tmp_path / "yaml" / "algorithm").mkdir(parents=True)
    head = "# My own.\n# Paper: Me 2026.\ndefaults:\n  - grpo\n  - _self_\n"
    own = f"{head}_target_: mine_of_a_test.Mine\nbonus: 0.5  # more\n"
    (tmp_path / "yaml" / "algorithm" / "mine.yaml").write_text(own)
    (tmp_path / "yaml" / "algorithm" / "wider.yaml").write_text("# GRPO, wider.\ndefaults: [grpo]\n\nclip_high: 0.4\n")
    return tmp_path / "yaml"


def test_algorithms_of_the_users_own_folder_are_listed_and_shown(mine, shown, as_json):
    listed = {one["name"]: one for one in as_json("--config-dir", str(mine))}
    assert list(listed) == [*NAMES, "mine", "wider"]
    assert listed["mine"] == {"name": "mine", "about": "My own.", "family": "mine", "paper": "Me 2026."}
    assert listed["wider"]["family"] == "grpo"
    assert listed["wider"]["paper"] == listed["grpo"]["paper"]

    page = as_json(f"--config-dir={mine}", "mine")
    of_grpo = "agg(x) = sum_i(mean_t(x)) / B"
    assert page["loss"]["lines"] == ["L = agg(-lp * A) + bonus * agg(H)", "A = scaled(reward)", of_grpo]
    assert page["loss"]["symbols"]["scaled"] == "x times ten"
    keys = {key["key"]: key for key in page["keys"]}
    assert (keys["bonus"]["value"], keys["bonus"]["comments"]) == (0.5, ["more"])
    assert keys["clip_high"]["comments"], "inherited"
    assert page["example"] == f"rlft train --config-dir {mine} +recipe=grpo_arithmetic algorithm=mine name=mine"
    assert "S = -min(r * A" in shown("--config-dir", str(mine), "wider")


def test_a_class_that_states_no_loss_is_said_to_state_none(mine, shown):
    """Not the loss of the class that it builds on, which it may have changed."""
    (mine.parent / "mine_of_a_test.py").write_text(MINE.partition("    L =")[0] + '"""' + MINE.rpartition('"""')[2])
    sys.modules.pop("mine_of_a_test", None)
    assert "The docstring of mine_of_a_test does not state it." in shown("--config-dir", str(mine), "mine")
    sys.modules.pop("mine_of_a_test", None)


def test_a_file_of_the_users_that_cannot_be_read_is_named(mine, ran):
    for content, said in ((b"a: [1\nb: 2\n", "line 2 is not YAML "), (b"a: \xff\n", "cannot be read as UTF-8 text")):
        (mine / "algorithm" / "wider.yaml").write_bytes(content)
        out, err = ran(["algorithms", "--config-dir", str(mine)], ends=2)
        assert out == ""
        assert re.match(rf"rlft: \S+wider\.yaml: {said}", err)


def test_the_table_in_the_docs_is_the_list(as_json):
    rows = re.findall(r"(?m)^\| `(\w+)` \| `(\w+)` \| (.+?) \| (.+?) \|$", (DOCS / "algorithms.md").read_text())
    rows = [tuple(cell.replace("\\|", "|") for cell in row) for row in rows]
    assert rows == [tuple(one[column] for column in ("name", "family", "about", "paper")) for one in as_json()]


@each("command", commands.OWN)
def test_every_key_of_a_composed_config_is_listed_with_a_meaning(command):
    recipe = [] if command in ("train", "sample") else [f"+recipe={command}_arithmetic"]
    keys = [key for key in flatten(compose(recipe, None, command)) if not key.endswith("_target_")]
    listed = {row.key for row in all_keys() if row.meaning}
    assert len(keys) > 50
    assert [key for key in keys if not is_below(key, listed)] == []


@each("pattern, lines", [
    ("trainer.lr", ["trainer.lr = 1.0e-5", "[configs/base/training.yaml: train"]),
    ("algorithm.kl_c*", ["algorithm.kl_coef = ", "algorithm=grpo"]),
    ("serve.port", ["serve.port = ", "configs/base/serve.yaml: rlft serve"]),
    ("reward.code.*", ["reward.code.weight = ", "reward=code"]),
    ("first steps in which only the critic", ["critic.warmup_steps = 0"]),
    ("gradient_checkpointing", ["auto", "offload"]),
    ("prompts.over_limit", ["drop | refuse"]),
    ("algorithm", ["a group; its choices: a2c, "]),
])  # fmt: skip
def test_a_pattern_chooses_keys_by_path_or_text(pattern, lines, ran, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printed = ran(["keys", pattern]).out
    assert max(map(len, printed.splitlines())) <= 80
    assert [line for line in lines if line not in printed] == []
