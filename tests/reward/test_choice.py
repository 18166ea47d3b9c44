import random
from dataclasses import replace

import pytest
from in_one_test import each
from reward_groups import TAGGED, make_group

from rlft.reward.choice import Choice, ReferenceIs
from rlft.tokens.options import letters, options_of

CITIES = ["Rome", "Paris", "New York", "18"]


def choice(**keys) -> Choice:
    return Choice(**{**TAGGED, "ignore_case": True, "choices_field": None, **keys})


def with_choices(group, choices):
    return replace(group, prompt=replace(group.prompt, metadata={"choices": choices}))


# answer; right by its letter alone; right where the choices A Rome, B Paris, C New York, D 18 are known. Reference: B.
VERDICTS = [
    ("B", True, True, "the letter"),
    (" B\n", True, True, "white space around it"),
    ("(B)", True, True, "in brackets"),
    ("B)", True, True, "half a bracket, as choices are listed"),
    ("B.", True, True, "a full stop"),
    ("(B).", True, True, "brackets and a full stop"),
    ("B:", True, True, "a colon"),
    ("b", True, True, "a small letter"),
    ("**B**", True, True, "bold"),
    ("**(B)**", True, True, "bold, in brackets"),
    (r"\text{B}", True, True, "as text of a formula"),
    (r"$\textbf{B}$", True, True, "a formula of its own"),
    ("A", False, False, "another choice"),
    ("E", False, False, "a letter that may be no choice"),
    ("Paris", False, True, "the choice's text"),
    ("paris", False, True, "the choice's text without case"),
    ("B. Paris", True, True, "its letter and its text"),
    ("(B) Paris", True, True, "its letter and its text"),
    ("B: Paris", True, True, "its letter and its text"),
    ("B - Paris", True, True, "its letter and its text, with a dash"),
    ("B — Paris", True, True, "its letter and its text, with a dash"),
    ("B) Rome", True, False, "its letter and another's text, if the texts are known"),
    ("B. Paris or Rome", False, False, "its letter and two texts"),
    ("B) Paris, A) Rome", False, False, "two letters with their texts"),
    ("B) Paris, a) Rome", False, False, "two letters with their texts"),
    ("B) not Paris", False, False, "prose that says the contrary"),
    ("A. Paris", False, False, "another letter and its text"),
    ("B Paris", False, False, "nothing between letter and text"),
    ("Paris, Rome", False, False, "two texts"),
    ("A or B", False, False, "two letters"),
    ("A, B", False, False, "two letters"),
    ("B, A", False, False, "two letters, the right one first"),
    ("AB", False, False, "two letters"),
    ("(A)(B)", False, False, "two letters"),
    ("B B", False, False, "the letter twice"),
    ("ABCD", False, False, "all letters"),
    ("Option B", True, True, "the letter with its noun"),
    ("choice (B)", True, True, "the letter with its noun"),
    ("Option A", False, False, "another choice with its noun"),
    ("Options A, B", False, False, "two letters"),
    (r"\boxed{B}", True, True, "boxed"),
    (r"\(B\)", True, True, "as a formula"),
    (r"\[\textbf{(B)}\]", True, True, "bold, as a formula"),
    (r"\textbf{(B)}\ Paris", True, True, "its letter set apart from its text"),
    ("**B.** Paris", True, True, "its letter set apart from its text"),
    (r"\textbf{(B)}\ Rome", True, False, "its letter set apart from another's text, if the texts are known"),
    (r"\textbf{(A)}\ Paris", False, False, "another letter and its text"),
    (r"\textbf{(B)} or \textbf{(A)}", False, False, "two letters"),
    (r"\textbf{(B)}\textbf{(A)}", False, False, "two letters"),
    ("**B** A", False, False, "two letters"),
    ("*B*", True, True, "italic"),
    ("__(B)__", True, True, "bold, in brackets"),
    ("`B`", True, True, "as code"),
    ('"B"', True, True, "in quotes"),
    ("[B]", True, True, "in other brackets"),
    (r"(\text{B})", True, True, "brackets around a text command"),
    (r"\mathbf{B}", True, True, "bold in a formula"),
    (r"\boxed{\textbf{(B)}\ Paris}", True, True, "all of it boxed"),
    ("Answer: B", True, True, "what it is, then the letter"),
    ("answer = (b)", True, True, "what it is, then the letter"),
    ("**Answer: B**", True, True, "what it is, then the letter, all bold"),
    ("**Answer:** B.", True, True, "what it is in bold, then the letter"),
    ("Final answer: **B**", True, True, "what it is, then the letter in bold"),
    ("The answer is B", True, True, "a sentence that names it"),
    ("So the correct answer is: option (B).", True, True, "a sentence that names it"),
    ("The correct option is (B) Paris", True, True, "a sentence that names its letter and text"),
    ("My best choice is Paris.", False, True, "a sentence that names its text"),
    ("The answer is A", False, False, "a sentence that names another"),
    ("The answer is not B", False, False, "a sentence that says the contrary"),
    ("Answer: A or B", False, False, "two letters"),
    ("Answer: B, answer: A", False, False, "two letters"),
    ("'B' or 'A'", False, False, "two letters in quotes"),
    ("[B][A]", False, False, "two letters in brackets"),
    ("I think B", False, False, "prose"),
    ("Answer:", False, False, "no letter"),
    ("not B", False, False, "prose that says the contrary"),
    ("Ｂ", False, False, "a full-width letter"),
    ("В", False, False, "the Cyrillic letter that looks the same"),
    ("Ⓑ", False, False, "a letter in a circle"),
    ("(B", False, False, "a bracket that isn't closed"),
    ("2", False, False, "the choice's number"),
    ("B" * 500, False, False, "absurdly long"),
]


@each(("answer", "by_letter", "by_text", "why"), VERDICTS)
def test_verdicts(group, answer, by_letter, by_text, why):
    made = group([f"<think>hm</think><answer>{answer}</answer>"], answer="B")
    assert choice()(made) == [float(by_letter)], why
    assert choice(choices_field="choices")(with_choices(made, CITIES)) == [float(by_text)], why


# Numbers as the text of a choice, reference D (18): compared as exact_match compares them.
@each(
    ("answer", "right"),
    [
        ("18", True), ("18.0", True), ("D. 18", True), ("１８", False), ("1.8e1", False), ("18 apples", False),
        ("8+10", False),
    ],
)  # fmt: skip
def test_verdicts_on_texts_that_are_numbers(group, answer, right):
    made = with_choices(group([f"<answer>{answer}</answer>"], answer="D"), CITIES)
    assert choice(choices_field="choices")(made) == [float(right)]


def test_case_can_matter(group):
    made = with_choices(
        group(["<answer>b</answer>", "<answer>paris</answer>", "<answer>B</answer>"], answer="B"), CITIES
    )
    assert choice(ignore_case=False, choices_field="choices")(made) == [0.0, 0.0, 1.0]


@each("reference", ["B", "(B)", "b", "Paris"])
def test_the_reference_answer_may_be_written_in_every_way_an_answer_may(group, reference):
    made = with_choices(group(["<answer>B</answer>", "<answer>Paris</answer>"], answer=reference), CITIES)
    assert choice(choices_field="choices")(made) == [1.0, 1.0]


def test_a_letter_that_is_also_a_text_means_the_letter(group):
    # A: "C", B: "B", C: "A". The answer C is choice C, not choice A, whose text it is.
    made = with_choices(group(["<answer>C</answer>"] * 2, answer="C"), ["C", "B", "A"])
    assert choice(choices_field="choices")(made) == [1.0, 1.0]


def test_a_text_that_two_choices_share_names_neither(group):
    made = with_choices(group(["<answer>Rome</answer>", "<answer>A</answer>"], answer="A"), ["Rome", "rome"])
    assert choice(choices_field="choices")(made) == [0.0, 1.0]


def test_a_prompt_without_the_field_is_an_error_not_a_zero(group):
    with pytest.raises(ValueError, match="prompt 'p0' has no 'choices' in its metadata, only nothing"):
        choice(choices_field="choices")(group(["<answer>A</answer>"], answer="A"))


@each(
    ("kind", "reference", "letter"),
    [
        ("index", "0", "A"),
        ("index", "3", "D"),
        ("number", "1", "A"),
        ("number", "4", "D"),
        ("auto", "1", "B"),
        ("auto", "18", "D"),
    ],
)
def test_a_reference_may_be_a_place_in_the_choices(group, kind, reference, letter):
    made = with_choices(group([f"<answer>{each}</answer>" for each in "ABCD"], answer=reference), CITIES)
    scores = choice(choices_field="choices", reference_is=ReferenceIs(kind))(made)
    assert scores == [float(each == letter) for each in "ABCD"]


@each(
    ("kind", "reference"),
    [
        *(("auto", reference) for reference in ("E", "Berlin", "A or B")),
        *(("index", "4"), ("number", "0"), ("number", "5"), ("index", "B"), ("number", "B")),
    ],
)
def test_a_reference_that_is_no_choice_is_an_error_not_a_zero(group, kind, reference):
    made = with_choices(group(["<answer>A</answer>"], answer=reference), CITIES)
    with pytest.raises(ValueError, match="of prompt 'p0' is not one of its choices A, B, C, D"):
        choice(choices_field="choices", reference_is=ReferenceIs(kind))(made)


def test_numbered_choices_are_named_by_their_numbers(group):
    # As ARC has some: read as an index, 2 would be the third choice.
    numbered = {"label": ["1", "2", "3"], "text": ["Rome", "Paris", "Oslo"]}
    made = with_choices(group(["<answer>2</answer>", "<answer>3</answer>"], answer="2"), numbered)
    reward = choice(choices_field="choices")
    assert reward.examine([made.prompt]) is None
    assert reward(made) == [1.0, 0.0]


@each(
    "value",
    [
        None, "Rome", [], {"first": "Rome"}, {"label": ["A"], "text": ["Rome", "Paris"]},
        {"label": ["A", "A"], "text": ["Rome", "Paris"]}, {1: "Rome"},
    ],
)  # fmt: skip
def test_choices_of_another_shape_are_an_error(value):
    with pytest.raises(ValueError, match="choices must be a list of strings or a mapping from letters to strings"):
        options_of(value)


TEXTS = ["New York", "Salt and pepper", "18", "Paris, France", "Oslo", "The Hague", "2.5", "Rome"]
LABELS = {
    "letters": list("ABCDEFGH"),
    "small": list("abcdefgh"),
    "numbers": list("12345678"),
    "from 0": list("01234567"),
}
"""Labels of up to eight options; with numbers an option's text is no number."""
PREFIXES = ["", "({}) ", "{}) ", "{}. ", "{}: ", "[{}] ", "**{}.** ", "({})"]
WAYS = [
    "{}", "({})", "{}.", "{})", "**{}**", r"\text{{{}}}", r"\boxed{{{}}}", "Option {}", "The answer is {}.",
    "Answer: ({})",
]  # fmt: skip
SEVERAL = [", ", " and ", "; ", " ", " & ", "\n", ","]
AROUND = ["{}", "[{}]", "**{}**", r"\boxed{{{}}}", "The answers are {}.", "Answer: {}", "Options {}"]


def options(rng: random.Random, number: int | None = None) -> tuple[list[str], list[str], object]:
    """(labels, texts, the same in one of the shapes of data sets)."""
    kind = rng.choice(list(LABELS))
    number = number or rng.randint(2, 8)
    texts = rng.sample([text for text in TEXTS if kind in ("letters", "small") or text.isalpha() or " " in text], 5)[
        :number
    ]
    texts += [f"city {n}" for n in range(len(texts), number)]
    labels = LABELS[kind][:number] if number <= 8 else letters(number)
    prefix = rng.choice(PREFIXES)
    shown = [prefix.format(label) + text for label, text in zip(labels, texts, strict=True)]
    shapes: list[object] = [
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


def scored(answer: str, references: list[str], value: object, **keys) -> float:
    group = make_group([f"<answer>{answer}</answer>"], answer=references[0])
    prompt = replace(group.prompt, other_answers=tuple(references[1:]), metadata={"choices": value})
    [score] = choice(choices_field="choices", **keys)(replace(group, prompt=prompt))
    return score


def test_one_right_choice_in_every_shape_of_options_and_every_way_of_saying_it():
    rng = random.Random(0)
    for _ in range(600):
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


def test_several_right_choices_are_all_of_them_and_only_them_in_any_order():
    rng = random.Random(1)
    for _ in range(80):
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


@each(
    ("texts", "kept"),
    [
        (["A. Smith", "J. Jones"], ["A. Smith", "J. Jones"]),  # initials
        (["1.5", "2.5"], ["1.5", "2.5"]),
        (["(x) + 1", "(y) + 1"], ["(x) + 1", "(y) + 1"]),
        (["12:30", "1:20"], ["12:30", "1:20"]),
        (["A. Rome", "Paris"], ["A. Rome", "Paris"]),
        (["A. Rome", None, "B. Oslo"], ["Rome", "Oslo"]),  # what tables fill
        (["J. Jones", None], ["J. Jones"]),
    ],
)
def test_what_only_looks_like_a_label_stays(texts, kept):
    assert list(options_of(texts).values()) == kept
