import random
from dataclasses import replace

import pytest
from in_one_test import each
from reward_groups import TAGGED, make_group
from slow_cases import slow

from rlft.reward.choice import Choice, ReferenceIs
from rlft.tokens.options import letters, options_of

CITIES = ["Rome", "Paris", "New York", "18"]


def choice(**keys):
    return Choice(**{**TAGGED, "ignore_case": True, "choices_field": None, **keys})


def with_choices(group, choices):
    return replace(group, prompt=replace(group.prompt, metadata={"choices": choices}))


# {what the answer is: (right by its letter alone, right where the choices A Rome, B Paris, C New York, D 18 are known,
# answers)}. Reference: B.
VERDICTS = {
    "the letter, however it is set": (True, True, [
        "B", " B\n", "(B)", "B)", "B.", "(B).", "B:", "b", "**B**", "**(B)**", r"\text{B}", r"$\textbf{B}$",
        r"\boxed{B}", r"\(B\)", r"\[\textbf{(B)}\]", "*B*", "__(B)__", "`B`", '"B"', "[B]", r"(\text{B})",
        r"\mathbf{B}",
    ]),
    "the letter and its text": (True, True, [
        "B. Paris", "(B) Paris", "B: Paris", "B - Paris", "B — Paris", r"\textbf{(B)}\ Paris", "**B.** Paris",
        r"\boxed{\textbf{(B)}\ Paris}",
    ]),
    "the letter with its noun, or in a sentence that names it": (True, True, [
        "Option B", "choice (B)", "Answer: B", "answer = (b)", "**Answer: B**", "**Answer:** B.", "Final answer: **B**",
        "The answer is B", "So the correct answer is: option (B).", "The correct option is (B) Paris",
    ]),
    "the choice's text": (False, True, ["Paris", "paris", "My best choice is Paris."]),
    "its letter and another's text": (True, False, ["B) Rome", r"\textbf{(B)}\ Rome"]),
    "another choice": (False, False, [
        "A", "E", "A. Paris", "Option A", r"\textbf{(A)}\ Paris", "The answer is A", "2", "Answer:", "not B",
    ]),
    "two letters or texts": (False, False, [
        "B. Paris or Rome", "B) Paris, A) Rome", "B) Paris, a) Rome", "Paris, Rome", "A or B", "A, B", "B, A", "AB",
        "(A)(B)", "B B", "ABCD", "Options A, B", r"\textbf{(B)} or \textbf{(A)}", r"\textbf{(B)}\textbf{(A)}",
        "**B** A", "Answer: A or B", "Answer: B, answer: A", "'B' or 'A'", "[B][A]", "B" * 500,
    ]),
    "prose, or the contrary": (False, False, ["B) not Paris", "B Paris", "The answer is not B", "I think B", "(B"]),
    "a letter that only looks the same": (False, False, ["Ｂ", "В", "Ⓑ"]),
}  # fmt: skip


@each(("why", "by_letter", "by_text", "answers"), [(why, *row) for why, row in VERDICTS.items()])
def test_verdicts(group, why, by_letter, by_text, answers):
    made = group([f"<think>hm</think><answer>{answer}</answer>" for answer in answers], answer="B")
    for keys, right in (({}, by_letter), ({"choices_field": "choices"}, by_text)):
        scores = choice(**keys)(with_choices(made, CITIES))
        assert dict(zip(answers, scores, strict=True)) == dict.fromkeys(answers, float(right)), why


ONLY = {letter: {each: each == letter for each in "ABCD"} for letter in "ABCD"}
NUMBERED = {"label": ["1", "2", "3"], "text": ["Rome", "Paris", "Oslo"]}
READINGS = {  # {what: (choices, keys, reference, {answer: whether it is right})}
    "texts that are numbers are compared as exact_match compares them": (CITIES, {}, "D", {
        "18": 1, "18.0": 1, "D. 18": 1, "１８": 0, "1.8e1": 0, "18 apples": 0, "8+10": 0,
    }),
    "case can matter": (CITIES, {"ignore_case": False}, "B", {"b": 0, "paris": 0, "B": 1}),
    "the reference may be in brackets": (CITIES, {}, "(B)", {"B": 1, "Paris": 1}),
    "the reference may be a small letter": (CITIES, {}, "b", {"B": 1, "Paris": 1}),
    "the reference may be a text": (CITIES, {}, "Paris", {"B": 1, "Paris": 1}),
    "a letter that is also a text means the letter": (["C", "B", "A"], {}, "C", {"C": 1, "A": 0}),
    "a text that two choices share names neither": (["Rome", "rome"], {}, "A", {"Rome": 0, "A": 1}),
    "labels may be numbers, as some of ARC: no index": (NUMBERED, {}, "2", {"2": 1, "3": 0}),
    "the first index": (CITIES, {"reference_is": ReferenceIs.index}, "0", ONLY["A"]),
    "the last index": (CITIES, {"reference_is": ReferenceIs.index}, "3", ONLY["D"]),
    "the first number": (CITIES, {"reference_is": ReferenceIs.number}, "1", ONLY["A"]),
    "the last number": (CITIES, {"reference_is": ReferenceIs.number}, "4", ONLY["D"]),
    "a number that is no choice's text is an index": (CITIES, {}, "1", ONLY["B"]),
    "a number that is a choice's text": (CITIES, {}, "18", ONLY["D"]),
}  # fmt: skip


@each(("choices", "keys", "reference", "answers"), READINGS.values(), ids=list(READINGS))
def test_answers_are_read_by_what_the_choices_and_the_reference_are(group, choices, keys, reference, answers):
    made = with_choices(group([f"<answer>{answer}</answer>" for answer in answers], answer=reference), choices)
    reward = choice(choices_field="choices", **keys)
    said = reward.examine([made.prompt])
    is_index = reference == "1" and not keys
    assert "are read as indices of choices, counted from 0" in said if is_index else said is None
    assert dict(zip(answers, reward(made), strict=True)) == answers


def test_a_prompt_without_the_field_is_an_error_not_a_zero(group):
    with pytest.raises(ValueError, match="prompt 'p0' has no 'choices' in its metadata, only nothing"):
        choice(choices_field="choices")(group(["<answer>A</answer>"], answer="A"))


def test_a_reference_that_is_no_choice_is_an_error_not_a_zero(group):
    for kind, references in {"auto": ["E", "Berlin", "A or B"], "index": ["4", "B"], "number": ["0", "5", "B"]}.items():
        for reference in references:
            made = with_choices(group(["<answer>A</answer>"], answer=reference), CITIES)
            with pytest.raises(ValueError, match="of prompt 'p0' is not one of its choices A, B, C, D"):
                choice(choices_field="choices", reference_is=ReferenceIs(kind))(made)


TEXTS = ["New York", "Salt and pepper", "18", "Paris, France", "Oslo", "The Hague", "2.5", "Rome"]
LABELS = {"letters": [*"ABCDEFGH"], "small": [*"abcdefgh"], "numbers": [*"12345678"], "from 0": [*"01234567"]}
"""Labels of up to eight options; with numbers an option's text is no number."""
PREFIXES = ["", "({}) ", "{}) ", "{}. ", "{}: ", "[{}] ", "**{}.** ", "({})"]
WAYS = [
    "{}", "({})", "{}.", "{})", "**{}**", r"\text{{{}}}", r"\boxed{{{}}}", "Option {}", "The answer is {}.",
    "Answer: ({})",
]  # fmt: skip
SEVERAL = [", ", " and ", "; ", " ", " & ", "\n", ","]
AROUND = ["{}", "[{}]", "**{}**", r"\boxed{{{}}}", "The answers are {}.", "Answer: {}", "Options {}"]


def options(rng, number=None):
    """(labels, texts, the same in one of the shapes of data sets)."""
    kind = rng.choice(list(LABELS))
    number = number or rng.randint(2, 8)
    allowed = [text for text in TEXTS if kind in ("letters", "small") or text.isalpha() or " " in text]
    texts = rng.sample(allowed, 5)[:number]
    texts += [f"city {n}" for n in range(len(texts), number)]
    labels = LABELS[kind][:number] if number <= 8 else letters(number)
    prefix = rng.choice(PREFIXES)
    shown = [prefix.format(label) + text for label, text in zip(labels, texts, strict=True)]
    shapes = [
        {"label": labels, "text": shown},
        dict(zip(labels, shown, strict=True)),
        [{"label": label, "text": text} for label, text in zip(labels, shown, strict=True)],
        {"label": [f"({label})" for label in labels], "text": shown},
    ]
    if prefix or labels[0] == "A":
        shapes += [shown, tuple(shown), repr(shown)]
    if labels[0].isdecimal() and not prefix:
        shapes.append({"label": list(map(int, labels)), "text": shown})
    return labels, texts, rng.choice(shapes)


def scored(answer, references, value, **keys):
    group = make_group([f"<answer>{answer}</answer>"], answer=references[0])
    prompt = replace(group.prompt, other_answers=tuple(references[1:]), metadata={"choices": value})
    [score] = choice(choices_field="choices", **keys)(replace(group, prompt=prompt))
    return score


@pytest.mark.parametrize("number", [150, slow(600)])
def test_one_right_choice_in_every_shape_of_options_and_every_way_of_saying_it(number):
    rng = random.Random(number)
    for _ in range(number):
        labels, texts, value = options(rng, rng.choice([None, None, 30]))
        right, other = rng.sample(range(len(labels)), 2)
        by_place = [({"reference_is": "number"}, str(right + 1)), ({"reference_is": "index"}, str(right))]
        keys, reference = rng.choice([({}, labels[right]), ({}, texts[right]), *by_place])
        keys = {name: ReferenceIs(kind) for name, kind in keys.items()}
        way = rng.choice(WAYS)
        for place in (right, other):
            for said in (way.format(labels[place]), texts[place], f"{labels[place]}. {texts[place]}"):
                assert scored(said, [reference], value, **keys) == float(place == right), (said, reference, value)
        both = f"{labels[right]}, {labels[other]}"
        assert scored(both, [reference], value, **keys) == 0, (both, reference, value)


@pytest.mark.parametrize("number", [15, slow(80)])
def test_several_right_choices_are_all_of_them_and_only_them_in_any_order(number):
    rng = random.Random(number)
    for _ in range(number):
        labels, texts, value = options(rng, rng.randint(4, 8))
        right = rng.sample(range(len(labels)), rng.randint(2, len(labels) - 1))
        missing, added = right[1:], [*right, next(n for n in range(len(labels)) if n not in right)]
        reference = [labels[n] for n in right]
        reference = rng.choice([reference, [", ".join(reference)], [repr(reference)], [texts[n] for n in right]])
        between, around = rng.choice(SEVERAL), rng.choice(AROUND)
        for places in (right, rng.sample(right, len(right)), missing, added):
            expected = float(set(places) == set(right))
            said = [labels[n] for n in places]
            whole = [f"{labels[n]}. {texts[n]}" for n in places]
            ways = [around.format(between.join(said)), "".join(f"({label})" for label in said), "".join(said),
                    "; ".join(texts[n] for n in places), ", ".join(whole)]  # fmt: skip
            for way in ways:
                assert scored(way, reference, value) == expected, (way, reference, value)
        assert scored(labels[right[0]], reference, value) == 0


@each(("texts", "kept"), [
    (["A. Smith", "J. Jones"], ["A. Smith", "J. Jones"]),  # initials
    (["1.5", "2.5"], ["1.5", "2.5"]),
    (["(x) + 1", "(y) + 1"], ["(x) + 1", "(y) + 1"]),
    (["12:30", "1:20"], ["12:30", "1:20"]),
    (["A. Rome", "Paris"], ["A. Rome", "Paris"]),
    (["A. Rome", None, "B. Oslo"], ["Rome", "Oslo"]),  # what tables fill
    (["J. Jones", None], ["J. Jones"]),
])  # fmt: skip
def test_what_only_looks_like_a_label_stays(texts, kept):
    assert list(options_of(texts).values()) == kept
