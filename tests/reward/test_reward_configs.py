"""The reward group composes through Hydra, in a primary config with only what rewards refer to."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from in_one_test import each
from omegaconf import OmegaConf

from rlft.reward.workers.reward_spec import specs

CONFIGS = Path(__file__).parents[2] / "configs"

PRIMARY = """
defaults:
  - reward: [exact_match, format]
  - _self_
token_budget: 4096
generation:
  max_tokens: 80
scoring:
  timeout: 10.0
hydra:
  searchpath: [file://{configs}]
"""
RECIPE = """
# @package _global_
defaults:
  - override /reward: [math, format]
reward:
  format:
    weight: 0.5
"""
MINE = """
# A reward from outside the tree.
mine:
  _target_: naughty.Bonus
  weight: 2.0
  bonus: 1.5
"""


@pytest.fixture
def composed(tmp_path):
    """Composes: `composed(*overrides)` is the `reward` section as plain data."""
    (tmp_path / "train.yaml").write_text(PRIMARY.format(configs=CONFIGS))
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mathematics.yaml").write_text(RECIPE)
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text(MINE)

    def compose_reward(*overrides):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return OmegaConf.to_container(compose("train", list(overrides)).reward, resolve=True)

    return compose_reward


@each(
    ("words", "weights"),
    [
        ((), [("exact_match", 1.0), ("format", 0.2)]),
        (("reward=format",), [("format", 0.2)]),
        (("reward=[math,format]", "reward.format.weight=0.3"), [("math", 1.0), ("format", 0.3)]),
        (("+recipe=mathematics",), [("math", 1.0), ("format", 0.5)]),
        (
            ("+recipe=mathematics", "reward=[exact_match,format]", "reward.format.weight=0.1"),
            [("exact_match", 1.0), ("format", 0.1)],
        ),
    ],
)
def test_the_command_line_goes_before_a_recipe_and_that_before_the_defaults(composed, words, weights):
    assert [(name, keys["weight"]) for name, keys in composed(*words).items()] == weights


def test_a_reward_from_outside_the_tree_joins_in(composed):
    built = specs(composed("reward=[exact_match,mine]", "reward.mine.bonus=4.0"))
    assert list(built) == ["exact_match", "mine"]
    assert built["mine"].weight == 2.0
    assert built["mine"].kwargs == {"bonus": 4.0}


@each("path", sorted((CONFIGS / "reward").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_builds_its_namesake(composed, path):
    assert path.read_text().startswith("# ")
    spec = specs(composed(f"reward={path.stem}"))[path.stem]
    assert spec.target.startswith(f"rlft.reward.{path.stem}.")
    spec.build()


def test_limits_of_the_run_reach_the_rewards_that_need_them(composed):
    built = specs(composed("reward=[overlong,learned,http]"))
    assert built["overlong"].kwargs["max_tokens"] == 80
    assert built["learned"].kwargs["token_budget"] == 4096
    assert built["http"].kwargs["group_timeout"] == 10.0
