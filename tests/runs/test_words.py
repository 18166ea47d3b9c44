"""From a config back to the words that compose it."""

import random
from pathlib import Path

import pytest

from rlft.config import catalog
from rlft.config.compose import compose
from rlft.runs import run_folder
from rlft.runs.words import changed_keys, choices_of, words_of

RECIPES = [(command, name) for command in ("train", "sft", "rm", "dpo") for name in catalog.recipes(command)]
MORE = ["seed=3", "lora=null", "trainer.lr=3e-5", "console=null", "checkpoint.every=7", "trainer.schedule=cosine"]
MORE += ["lora.target_modules=[q_proj,v_proj]", "token_budget=512", "name=mine", "model.path='my models/a'", "name='1'"]


@pytest.mark.parametrize(("command", "recipe"), random.Random(0).sample(RECIPES, 12))
def test_the_words_of_a_config_compose_it_again(command, recipe):
    chosen = random.Random(recipe).sample(MORE, 3)
    chosen = [word for word in chosen if not (word.startswith("lora.") and "lora=null" in chosen)]
    plain = compose([f"+recipe={recipe}", *chosen], None, command, requires=False)
    words = words_of(plain, command)
    assert words is not None
    assert compose(words, None, command, requires=False) == plain


TEXTS = ["{question} Answer:", "Think: then say: x", "[INST] be brief", "Let's: go", "- a", "~", "null", "1e3", "a\\"]
TEXTS += ["".join(random.Random(i).choices("a {}[]:'\"\\,=#%&*!|>?@`~-1", k=1 + i % 12)) for i in range(60)]


def test_a_text_of_any_characters_is_composed_again():
    plain = compose(["data=jsonl", "data.path=a.jsonl"])
    for text in TEXTS:
        changed = plain | {"data": plain["data"] | {"system_prompt": text}}
        words = words_of(changed, "train")
        assert words is not None, text
        assert compose(words)["data"]["system_prompt"] == text, (text, words)


def test_a_recipes_words_begin_with_it_and_other_choices_are_named():
    assert words_of(compose(["+recipe=grpo_arithmetic"]), "train") == ["+recipe=grpo_arithmetic"]
    plain = compose(["algorithm=gspo", "reward=[exact_match]", "data=jsonl", "data.path=a.jsonl", "steps=5"])
    words = ["algorithm=gspo", "data=jsonl", "reward=[exact_match]", "data.path=a.jsonl", "steps=5"]
    assert words_of(plain, "train") == words
    assert choices_of(plain, "train")["algorithm"] == "gspo"
    tools = compose(["environment=tools", "environment.tools=[mine.search]"])
    assert words_of(tools, "train") == ["environment=tools", "environment.tools=[mine.search]"]
    assert changed_keys(plain, "train") == {"steps": (5, 100)}, "keys of the chosen algorithm are its defaults"


@pytest.mark.parametrize("folder", sorted((Path(__file__).parent / "recorded").glob("*/")), ids=lambda f: f.name)
def test_a_recorded_run_has_changed_no_key_that_says_nothing(folder):
    plain = {key: value for key, value in run_folder.read(folder).items() if key != run_folder.ORIGIN}
    command = plain["command"]
    assert {} not in (now for now, _ in changed_keys(plain, command).values())
    assert words_of(plain, command) is not None, "a command that repeats it"


def test_a_reward_in_a_file_of_ones_own_is_named_and_one_that_is_gone_gives_no_words(here):
    (here / "mine.py").write_text("def close(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    plain = compose(["reward=[exact_match,mine.py:close]", "reward.close.weight=0.5"])
    words = words_of(plain, "train")
    assert words is not None
    assert compose(words) == plain
    plain["reward"]["close"]["_target_"] = "gone.py:close"
    assert words_of(plain, "train") is None
