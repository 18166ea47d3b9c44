"""What a model thinks aloud, in the markers of any family, is no answer and no program."""

import random
from itertools import product

from in_one_test import each
from reward_groups import make_group

from rlft.config.compose import compose
from rlft.reward.workers.reward_spec import specs
from rlft.tokens.reasoning import END_OF_MESSAGE, MARKERS, without_reasoning

IN_CAPITALS = MARKERS | {opens.upper(): closes.upper() for opens, closes in MARKERS.items()}
VARIANTS = (str.upper, str.title, lambda m: m.replace("|", "｜"), lambda m: m.replace(">", " >"), str.swapcase)


@each(("opens", "closes"), MARKERS.items())
def test_the_reasoning_of_every_family_is_left_out_also_in_capitals_with_full_width_bars_and_with_space(opens, closes):
    cases = [
        (f"{opens}a{closes}b", "b"), (f"a{opens}b{closes}c{opens}d{closes}e", "ace"), (f"a{opens}b", "a"),
        (f"{opens}a{opens}b{closes}c", "c"),
    ]  # fmt: skip
    cases += [(f"a{vary(opens)}b{close(closes)}c", "ac") for vary, close in product(VARIANTS, (*VARIANTS, str))]
    for text, spoken in cases:
        assert without_reasoning(text).replace(" ", "") == spoken, text
        assert len(without_reasoning(text)) == len(text), "offsets stay"
    for close in (*VARIANTS, str):
        assert without_reasoning(f"{close(closes)[:1]}a{opens}b{closes}c")[:1] != " ", "what is no marker stays"


def test_the_channels_of_gpt_oss_are_left_out_with_recipients_and_space():
    for bar, channel, space, to in product(
        "|｜", ("analysis", "commentary"), ("", " ", "\n"), ("", " to=python", " to=f.a")
    ):
        text = f"<{bar}channel{bar}>{space}{channel}{to}<{bar}message{bar}>18<|end|>19"
        assert without_reasoning(text).replace(" ", "") == "19", text


@each(("text", "spoken"), [
    ("", ""), ("a", "a"), ("a</think>b", "b"), ("a</think>b</think>c", "c"), ("a</think>b<think>c</think>d", "bd"),
    ("<think>a[/THINK]b</think>c", "c"), ("<think>a<thinking>b</think>c", "c"), ("a<|end|>", "a<|end|>"),
    ("a <Think>b", "a"), ("I think>b", "Ithink>b"),
])  # fmt: skip
def test_only_what_the_markers_of_one_kind_enclose_is_reasoning(text, spoken):
    assert without_reasoning(text).replace(" ", "") == spoken


FORMS = {
    "tag": ("<answer>{}</answer>", {}),
    "boxed": (r"\boxed{{{}}}", {}),
    "hashes": ("\n#### {}\n", {}),
    "pattern": ("Answer: {}\n", {"pattern": "Answer: (.+)"}),
}
KINDS = {"exact_match": "18", "math": "18", "choice": "B", "equations": "18"}
PLACES = {
    # where the answer stands: whether it is outside of all reasoning
    "{opens}{right}{closes}": False,
    "{opens}{right}": False,
    "Well. {opens}Hm. {right}{closes} That is it.": False,
    "{opens}{right}{closes}{opens}again{closes}": False,
    "{opens}a{opens}{right}{closes}": False,
    "{right}{closes}": False,  # the prompt has opened it
    "{opens}{wrong}{closes}{right}": True,
    "{right}{opens}{wrong}": True,
    "{opens}{wrong}{closes}So: {right}{opens}{wrong}{closes}": True,
    "{wrong}{closes}{right}": True,
}


def test_an_answer_in_reasoning_is_unpaid_whatever_marks_it_and_whatever_reads_it():
    config = compose([f"reward=[{','.join(KINDS)}]"])["reward"]
    every = list(product(PLACES, KINDS, FORMS, IN_CAPITALS))
    assert len(every) > 13_000
    for place, name, answer_in, opens in random.Random(0).sample(every, 1200):
        (form, more), closes = FORMS[answer_in], IN_CAPITALS[opens]
        reward = specs({name: {**config[name], "answer_in": answer_in, **more}})[name].build()
        right, wrong = form.format(KINDS[name]), form.format("A" if name == "choice" else "29")
        if closes.lower() == END_OF_MESSAGE and place.startswith(("{right}{closes}", "{wrong}{closes}")):
            continue  # it ends other messages, too
        text = place.format(opens=opens, closes=closes, right=right, wrong=wrong)
        assert reward.right(make_group([text], answer=KINDS[name])) == [PLACES[place]], (name, answer_in, text)


def test_a_program_in_reasoning_is_none_whatever_marks_it():
    config = compose(["reward=code"])["reward"]["code"]
    for program_in, program in (
        ("fence", "\n```python\na = 1\n```\n"),
        ("tag", "<answer>a = 1</answer>"),
        ("text", "a = 1"),
    ):
        reward = specs({"code": {**config, "program_in": program_in}})["code"].build()
        for opens, closes in MARKERS.items():
            assert reward.extract(f"{opens}{program}{closes}") is None
            assert reward.extract(f"{opens}{program}") is None
            assert (reward.extract(f"{opens}b = 2{closes}{program}") or "").strip() == "a = 1"
