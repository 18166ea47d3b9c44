"""What rlft plan says of a learning rate and a rank, and of every recipe's."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_one_test import each
from slow_cases import slow

from rlft.config import catalog
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.plan.run_plan import EMBEDDED_RATE, RANKS, RATES, Plan, Schedule, advice_for

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "algorithms.md"
LARGE, SMOLLM2, TINY = 494_000_000, 134_515_008, 823_424
SFT = ("demonstrations.path=embedded:arithmetic-demonstrations",)
PAIRS = ("preferences.path=embedded:arithmetic-preferences",)


@cache
def config_of(command, *words):
    return resolve(compose(list(words), command=command), command).config


def warned(command, *words, parameters=LARGE, path="org/some-model"):
    """The keys that are ten times off in a run of this command, on a model that has this path."""
    config = config_of(command, *words)
    config = replace(config, model=replace(config.model, path=path))
    return [one.key for one in advice_for(config, parameters) if one.warning]


@each(
    ("command", "words", "expected"),
    [
        ("train", (), []),  # 1e-5
        ("train", ("trainer.lr=1e-3",), []),  # ten times 1e-4, and no more
        ("train", ("trainer.lr=1.1e-3",), ["trainer.lr"]),
        ("train", ("trainer.lr=6e-7",), []),
        ("train", ("trainer.lr=4e-7",), ["trainer.lr"]),
        ("train", ("lora.rank=320",), []),
        ("train", ("lora.rank=321", "trainer.lr=0.1"), ["trainer.lr", "lora.rank"]),
        ("train", ("trainer.optimizer=muon", "trainer.lr=0.1"), []),  # no rule
        ("train", ("trainer.optimizer=adamw8bit", "trainer.lr=0.1", "model.device=cuda"), ["trainer.lr"]),
        ("train", ("lora=null", "trainer.lr=2e-4"), []),  # of all weights: 1e-6 to 2e-5
        ("train", ("lora=null", "trainer.lr=2.1e-4"), ["trainer.lr"]),
        ("train", ("lora=null", "trainer.lr=1e-7"), []),
        ("train", ("lora=null", "trainer.lr=9e-8"), ["trainer.lr"]),
        ("sft", (*SFT, "trainer.lr=1e-5"), []),
        ("sft", (*SFT, "trainer.lr=9e-6"), ["trainer.lr"]),
        ("sft", (*SFT, "lora=null", "trainer.lr=9e-6"), []),  # of all weights a tenth of an adapter's
        ("sft", (*SFT, "lora=null", "trainer.lr=1.1e-3"), ["trainer.lr"]),
        ("sft", (*SFT, "trainer.lr=1e-3", "lora.rank=2"), ["lora.rank"]),
        ("dpo", (*PAIRS, "trainer.lr=2e-3"), ["trainer.lr"]),
        ("rm", (*PAIRS, "trainer.lr=10"), []),  # no rule
    ],
)
def test_a_value_more_than_ten_times_off_is_warned_of(command, words, expected):
    assert warned(command, *words) == expected
    assert warned(command, *words, parameters=TINY) == [], "nothing is published of so small a model"


def test_the_words_name_the_value_the_range_and_the_sources():
    config = resolve(compose(["trainer.lr=0.01", "trainer.optimizer=adamw"]), "train").config
    rate, rank = advice_for(config, LARGE)
    assert rate.warning == (
        "trainer.lr: is more than 10 times above published values (Unsloth's guide for GRPO and Tinker's cookbook for "
        "mathematics), got 0.01; they are from 5e-06 to 0.0001"
    )
    assert rank.row[:2] == ("lora.rank", "32")
    assert rank.row[2].startswith("published: 1 to 32, LoRA Without Regret")
    (small, _) = advice_for(config, TINY)
    said = "no published value is for a model of 823,424 parameters; rlft's recipes for embedded"
    assert small.row[2].startswith(said)


@each(
    ("command", "words", "expected"),
    [
        ("train", (), ["trainer.lr"]),  # 1e-5 is for larger models
        ("train", ("trainer.lr=9e-5",), ["trainer.lr"]),
        ("train", ("trainer.lr=1e-4",), []),
        ("train", ("trainer.lr=0.1",), []),  # nothing is known of rates above
        ("train", ("lora=null",), []),
        ("train", ("trainer.optimizer=muon",), []),
        ("dpo", PAIRS, ["trainer.lr"]),
        ("sft", SFT, []),  # 1e-4
    ],
)
def test_an_embedded_model_is_warned_of_a_rate_at_which_it_learns_nothing(command, words, expected):
    assert warned(command, *words, parameters=TINY, path="embedded:tiny-arithmetic") == expected


def test_the_warning_has_the_lowest_rate_of_the_recipes():
    rate, _ = advice_for(resolve(compose([]), "train").config, TINY)
    assert str(rate.warning).endswith("learn next to nothing there, got 1e-05; write trainer.lr=0.001")
    models = ("grpo_arithmetic", "grpo_shapes", "sft_arithmetic", "rm_arithmetic", "dpo_arithmetic", "ppo_arithmetic")
    recipes = [compose([f"+recipe={name}"], command=catalog.command_of(name), requires=False) for name in models]
    assert all(plain["model"]["path"].startswith("embedded:") for plain in recipes)
    assert min(plain["trainer"]["lr"] for plain in recipes) == EMBEDDED_RATE


OF_EACH_SIZE = ("ppo_arithmetic", "sft_smollm2_gsm8k", "gspo_gsm8k")


@pytest.mark.parametrize(
    "recipe", [recipe if recipe in OF_EACH_SIZE else slow(recipe) for recipe in catalog.choices("recipe")]
)
def test_no_recipe_is_ten_times_off(recipe):
    command = catalog.command_of(recipe)
    plain = compose([f"+recipe={recipe}"], command=command, requires=False)
    trainer, lora = (plain[key] and SimpleNamespace(**plain[key]) for key in ("trainer", "lora"))
    config, path = SimpleNamespace(command=command, trainer=trainer, lora=lora), plain["model"]["path"]
    config.model = SimpleNamespace(path=path)
    parameters = TINY if path.startswith("embedded:") else SMOLLM2 if "smollm2" in path.lower() else LARGE
    assert not [one.warning for one in advice_for(config, parameters) if one.warning]


def test_the_page_has_every_published_value():
    page = PAGE.read_text(encoding="utf-8")
    for low, high, _ in (*RATES.values(), *RANKS.values()):
        assert f"| {low:g} to {high:g} |" in page


def scheduled(steps, **every):
    """The schedule of a run of so many steps, whose config has these sections with this `every`."""
    config = SimpleNamespace(**{name: SimpleNamespace(every=number) for name, number in every.items()})
    return Plan.schedule.__get__(SimpleNamespace(num_steps=steps, config=config))


@each(
    ("steps", "every", "first", "evaluations", "checkpoints"),
    [
        (10, {"eval": 4, "checkpoint": 3}, 4, 4, 4),  # evaluated at 0, 4, 8 and 10, saved at 3, 6, 9 and 10
        (8, {"eval": 4, "checkpoint": 4}, 4, 3, 2),
        (3, {"eval": 20, "checkpoint": 0}, 3, 2, 1),  # before and after; saved at the end
        (3, {"eval": 0, "checkpoint": 1}, None, 0, 3),
        (5, {}, None, 0, 0),  # a command that does neither
    ],
)
def test_the_last_step_is_evaluated_and_saved_too(steps, every, first, evaluations, checkpoints):
    expected = {"first_evaluation": first, "evaluations": evaluations, "checkpoints": checkpoints}
    assert scheduled(steps, **every) == Schedule(steps=steps, **expected)
