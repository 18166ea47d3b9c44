"""References in forms around their answers: opened by what they are, and never without a word where they hide one."""

import itertools
import random
import re
from itertools import product

import pytest
from in_one_test import each
from markdown_it import MarkdownIt
from reward_groups import make_group
from slow_cases import slow

from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.config.resolved import with_token_budget
from rlft.data.records import RowError
from rlft.reward.code import fenced
from rlft.reward.workers.reward_spec import specs
from rlft.tokens.answers import ReferenceIn, answers_in, blocks, opened, unfenced
from rlft.types import UserError
from tests.plan.rewards.test_references import notes, rows

AROUND = {
    "hashes": ["6 * 7 + 4 = 46\n#### {}", "#### {}", "She sold 3 <<1+2=3>>3.\n#### {}", "#### Step 1\nSo.\n#### {}"],
    "tag": ["<answer>{}</answer>", "So: <answer> {} </answer>", "<solution>{}</solution>", "<ANSWER>{}</ANSWER>"],
    "boxed": [r"\boxed{{{}}}", r"Hence $x = \boxed{{{}}}$.", r"\fbox{{{}}}", r"It is \boxed{{{}}} cm."],
    "sentence": ["The answer is {}.", "So the final answer is: {}", "Answer: {}", "Final answer = {}",
                 "Result: {}", "答案是{}", "It is so.\nThe answer is {}.", "The answer is:\n{}", "**Answer:** {}",
                 "Die Antwort ist {}."],
    "json": ['["{}"]', "['{}']", '{{"answer": "{}"}}', '{{"final_answer": "{}", "steps": []}}', "[{}]",
             '{{"answer": {}}}'],
    "markup": ["**{}**", "`{}`", "$${}$$", r"\({}\)", "__{}__", "<b>{}</b>"],
    "brackets": ["{} (forty-six)", "{} (in apples)"],
    "reasoning": ["<think>It is 3.</think>{}", "[THINK]3?[/THINK]\n{}", "<|START_THINKING|>3<|END_THINKING|>{}"],
}  # fmt: skip
"""{form: ways to write it}, of which JSON without quotes takes numbers alone."""
ANSWERS = ["46", "-7", "1080", "3.5", "12", "205"]
ONE_EACH = [[answer] for answer in ANSWERS]
WORDS = ["data=jsonl", "data.path=x.jsonl"]


@each(("form", "ways"), AROUND.items())
def test_each_form_is_opened_by_its_name_and_by_auto(form, ways):
    for way, answer in product(ways, [*ANSWERS, "New York", "x + 1"]):
        if way in ("[{}]", '{{"answer": {}}}') and answer not in ANSWERS:
            continue
        text = way.format(answer)
        assert answers_in(text, ReferenceIn(form)) == [answer], text
        assert opened(text) == ([ReferenceIn(form)], [answer]), text


def test_forms_around_each_other_are_opened_from_the_outermost_on():
    rng, number = random.Random(0), 0
    inner = {form: [way for way in ways if "\n" not in way] for form, ways in AROUND.items()}
    for outer, name in product(("reasoning", "hashes", "tag", "sentence"), ("boxed", "markup", "json")):
        for way, other, answer in product(AROUND[outer], inner[name], ANSWERS):
            text = way.format(other.format(answer))
            assert opened(text)[1] == [answer], text
            number += 1
    assert number > 1000, rng


@each(
    "text",
    ["46", "-1,080", "Paris", "Hello.", "x = 46", "f(x)", "(3, 4)", r"\frac{1}{2}", "U.S. Army", "a, b", "$5",
     "A: Rome", "3.5"],
)  # fmt: skip
def test_a_reference_that_is_its_answer_has_no_form(text):
    assert opened(text) == ([], [text])


@pytest.mark.parametrize(("name", "every"), [("exact_match", 9), ("math", 13), slow("exact_match", 1), slow("math", 1)])
def test_a_short_right_answer_scores_or_the_key_is_named_whose_remedy_is_then_typed(name, every):
    """For each way of each form, for some of them in one file, and for a tag that the reward alone knows."""
    ways = [way for ways in AROUND.values() for way in ways]
    mixed = [random.Random(n).sample(ways, 3) for n in range(14)]
    for chosen in [*([way] for way in ways), *mixed, ["<lös>{}</lös>"]][::every]:
        texts = [chosen[n % len(chosen)].format(answer) for n, answer in enumerate(ANSWERS)]
        words = [*WORDS, f"reward={name}", *[f"reward.{name}.tag='lös'"] * ("lös" in chosen[0])]
        if (remedy := refused(texts, words)) is None:
            assert are_right(texts, words, name), texts
            continue
        [typed] = re.findall(
            r"set (data\.answer_.*?)(?:, or start nevertheless with data\.allow_unscorable=true)?$", remedy
        )
        [note, *_] = notes(rows(*texts), *words, "data.allow_unscorable=true")
        assert note.startswith("data.answer_in: ")
        check_read(texts, typed, ONE_EACH, words)
        assert notes(rows(*ANSWERS), *words, typed) == []


def check_read(texts, typed, expected, words=WORDS):
    """What data gives as answers, once the remedy is typed."""
    data = instantiate({**compose([*words, typed])["data"]}, "data")
    assert [data._answers(text) for text in texts] == expected, typed


def refused(texts, words):
    """The remedy by data.answer_in, in a refusal, or in a note where few rows are so; None without a word."""
    try:
        found = notes(rows(*texts), *words)
    except UserError as error:
        return error.remedy if error.key == "data.answer_in" else f"{error.key}: {error.problem}"
    assert all(note.startswith("data.answer_in: ") for note in found)
    return found[0] if found else None


def are_right(texts, words, name):
    """Whether each answer alone scores where these are the references."""
    reward = specs(with_token_budget(compose(words))["reward"])[name].build()
    groups = [make_group([reward.written(answer)], answer=text) for text, answer in zip(texts, ANSWERS, strict=True)]
    return all(reward.right(group) == [True] for group in groups)


def test_sentences_with_numbers_are_noted_with_a_pattern_that_works():
    texts = [f"She has {answer} apples left." for answer in ANSWERS]
    [note] = notes(rows(*texts), *WORDS, "reward=exact_match")
    assert note.startswith("data.answer_in: 6 of 6 reference answers are more than the answer")
    [typed] = re.findall(r"set (data\.answer_pattern='.*')$", note)
    check_read(texts, typed, ONE_EACH)


def test_a_row_of_another_form_is_refused_and_lists_are_several_answers():
    data = instantiate({**compose([*WORDS, "data.answer_in=json"])["data"]}, "data")
    assert data._answers('["46", "46.0"]') == ["46", "46.0"]
    with pytest.raises(RowError, match=r"the answer is not in the form of data\.answer_in=json: '#### 46'"):
        data._answers("#### 46")


ANNOUNCED = [
    "Therefore, {}", "# {}", "So.\n## Answer\n{}", "So.\n**Final Answer**\n{}", "So.\n__Result__\n{}", "A: {}",
    "Ans: {}",
    "ans = {}", "Answer - {}", "Answer. {}", "Answer => {}", "Result -> {}", "La respuesta final es: {}",
    "所以答案是{}。", "故选{}", '```json\n{{"answer": {}}}\n```', "final_answer({})", "6*7+4 = {}", "(3 + 4) × 2 = {}",
    r"\text{{The answer is }} {}", "print('the answer is {}')", "const result = {};", "<p>The answer is <b>{}</b>.</p>",
    "The answer is {}, because 5 > 3.", r"\boxed{{{}}} and \boxed{{5}}", "So it must be {}.",
]  # fmt: skip
"""Whole solutions of which some may be refused, and none may pass without a word."""


@each("way", ANNOUNCED)
def test_a_whole_solution_never_passes_without_a_word(way):
    texts = [way.format(answer) for answer in ANSWERS]
    [told] = notes(rows(*texts), *WORDS, "reward=exact_match", "data.allow_unscorable=true")
    [typed] = re.findall(r"^data\.answer_in: .* set (data\.answer_\S*)$", told)
    if "boxed" not in way:
        check_read(texts, typed, ONE_EACH)


ONE_OF_MANY = [
    "It was a fine day, the solution: sleep.", "The study shows the result is promising: 0 patients died.",
    "SELECT a FROM b WHERE answer = 0", "result = 0", "3 (mod 7)", r"3 (\bmod 7)", "101 (base 2)", '"word"', "'word'",
    '{"name":"n","value":0}', "#### Title\nbody", "3.", "[3]", "**3**", "The answer is 3.", r"\boxed{1} or \boxed{2}",
]  # fmt: skip


def test_one_row_of_many_that_may_mean_what_it_is_never_refuses_them():
    others = ["Rome", "12", "x = 3", "Paris", "Oslo", "New York", "7"]
    for number, text in enumerate(ONE_OF_MANY):
        place = number % 8
        notes(rows(*others[:place], text, *others[place:]), *WORDS, "reward=exact_match")
    for text in ("<answer>46</answer>", r"It is \boxed{46}.", "So.\n#### 46"):
        with pytest.raises(UserError, match="1 of 8"):
            notes(rows(*others, text), *WORDS, "reward=exact_match")


def test_lists_are_answers_themselves_unless_json_is_named():
    rng = random.Random(0)
    for _ in range(20):
        lists = [[rng.randint(-9, 9) for _ in range(rng.randint(1, 4))] for _ in range(6)]
        texts = [str(each) for each in [*lists, [1, 2]]]
        assert notes(rows(*texts), *WORDS, "reward=exact_match") == []
        several = [text for text in texts if "," in text]
        assert all(answers_in(text, ReferenceIn.auto) == [text] for text in several)
    [note] = notes(rows('["Rome", "Roma"]', "['Oslo', 'Christiania']"), *WORDS, "reward=exact_match")
    assert note.endswith("if that is meant, set data.answer_in=json")


PIECES = ["{} }}", "> {}", "{}')", '{}"', "({}", "{}]", "<b>{}", "{}</p>", "{};", "`{}"]


def test_a_piece_of_code_or_markup_is_no_answer_of_a_sentence():
    for way, piece, answer in product(("The answer is {}", "Answer: {}", "result = {}"), PIECES, ANSWERS):
        text = way.format(piece.format(answer))
        assert answers_in(text, ReferenceIn.sentence) == [], text
    for whole in ("f(x)", "[0, 1)", "(3, 4)", "don't", "<b>3</b>", "'a'"):
        assert answers_in(f"The answer is {whole}.", ReferenceIn.sentence) == [whole]


TEXTS = ["Paris", "New York", "a cat", "x + y", "Rome", "B"]


@each(
    "begin",
    ["A: ", "Answer - ", "Antwort: ", "答案：", "故选", "The capital (of it) is: ", "So\n=> ", "**A**: ", "It's: "],
)
def test_references_that_all_begin_with_an_announcement_are_noted_with_a_pattern_that_works(begin):
    [told] = notes(rows(*(begin + text for text in TEXTS)), *WORDS, "reward=exact_match", "data.allow_unscorable=true")
    [typed] = re.findall(r"set (data\.answer_\S.*?)(?:, or start.*)?$", told, re.DOTALL)
    check_read([begin + text for text in TEXTS], typed, [[text] for text in TEXTS])


def test_references_that_merely_begin_alike_are_answers():
    for begin in ("", "New ", "the ", "A"):
        assert notes(rows(*(begin + text for text in TEXTS)), *WORDS, "reward=exact_match") == []


# -- fenced code -------------------------------------------------------------------------------------------------------
PROGRAMS = (
    "print(1)\n", "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n", "if True:\n\tprint('tab')\n",
    'def f():\n    """\n    ```python\n    >>> f()\n    ```\n    """\n',
    "x = '''\n~~\n``\n'''\n", "    return a + b\n",
)  # fmt: skip
AROUND_BLOCKS = {
    "at the line's start": ("", ""), "indented by one": (" ", " "), "indented by three": ("   ", "   "),
    "in a list": ("- ", "  "), "in a numbered list": ("1. ", "   "), "in a list in a list": ("- 2) ", "     "),
    "in a list, below its text": ("* So:\n\n  ", "  "), "quoted": ("> ", "> "), "in a quoted list": ("> - ", ">   "),
}  # fmt: skip
DEEPER = {name: (space, space) for name, space in (("by four", " " * 4), ("by a tab", "\t"), ("by nine", " " * 9))}
"""Where CommonMark has no fences, but models do."""
INFOS = ("python", "Python", "py", "python3", " python", "python title=x.py", "{.python .numberLines}", "")
ENDS = ("\n", "\r\n", "\r")
CLOSINGS = ("", "+", " ", "   ", "+  ")
"""What is different in a closing fence: + is one character more, spaces stand before it, as up to three may."""


def text_of(program, place, run, info, closing):
    """A text with the program in a fence; closing None: without one."""
    first, rest = place
    lines = [f"{first}{run}{info}", *(rest + line for line in program.splitlines())]
    if closing is not None:
        lines.append(rest + closing.replace("+", "") + run + run[0] * closing.count("+"))
    return "Here it is:\n\n" + "\n".join(lines) + "\n"


def cases(places):
    """[(program, run, place, info, closing)], without those in which the program would close its own fence."""
    runs = [character * length for character in "`~" for length in (3, 4, 6)]
    product = itertools.product(PROGRAMS, runs, places.values(), INFOS, (*CLOSINGS, None))
    return [case for case in product if not (case[1][0] == "~" and "~~~" in case[0])]


def test_a_program_is_read_from_every_fence_of_commonmark_and_from_deeper_ones():
    every = cases(AROUND_BLOCKS | DEEPER)
    assert len(every) == 6 * 6 * 12 * 8 * 6
    for number, (program, run, place, info, closing) in enumerate(random.Random(0).sample(every, 6000)):
        text = text_of(program, place, run, info, closing)
        text = text.replace("\n", ENDS[number % len(ENDS)])
        if closing is not None:
            text += "That was it.\n"
        assert fenced(text) == program, (text, number)


def test_a_program_is_read_behind_text_on_the_line_of_its_fence_and_from_a_longer_fence_than_its_end():
    before = ("Here: ", "So the answer is", "<answer>", "**Code**: ", "Use `add` so: ", "1. First ", "> x ", "\tSee ")
    for program, text, info, more in itertools.product(PROGRAMS[:2], before, INFOS[:4], ("", "`", "```")):
        fence = f"````{more}"[: 3 + len(more)]
        assert fenced(f"First.\n{text}{fence}{info}\n{program}{fence}\nThat was it.") == program, (text, info)
        assert fenced(f"First.\n{fence}{info}\n{program}```\nThat was it.") == program, (fence, info)
    assert [b.text for b in blocks("````\na\n```\nb\n````\n````python\nc\n```")] == ["a\n```\nb\n", "c\n"]


def test_blocks_are_those_of_another_reader_of_commonmark():
    reader = MarkdownIt("commonmark")
    strict = [case for case in cases(AROUND_BLOCKS) if case[4] in ("", "+", None)]
    for program, run, place, info, closing in random.Random(1).sample(strict, 600):
        text = text_of(program, place, run, info, closing)
        expected = [
            (t.content, t.info.strip().strip("{. ").split(" ")[0]) for t in reader.parse(text) if t.type == "fence"
        ]
        assert [(b.text, b.language) for b in blocks(text)] == [(c, i.lower()) for c, i in expected], text


@each(("text", "program"), [
    ("```python\na\n```</answer>", "a\n"),  # as models end a tag
    ("Inline ```a``` is none.", None),
    ("``\na\n``", None),
    ("~~~\na\n```\nb\n~~~", "a\n```\nb\n"),
    ("````\na\n```\nb\n````", "a\n```\nb\n"),
    ("```python\nx = '''\n ```\n'''\n```", "x = '''\n ```\n'''\n"),
    ("```python\na\n ```\nSo:\n```python\nb\n```", "b\n"),
    ("````markdown\n# Add\n```python\na\n```\n````", "a\n"),
    ("> ```python\n> a\n> ```\n\n```\nb\n```", "a\n"),
    ("1. ```python\nif a:\n    b\n```", "if a:\n    b\n"),
    ("1. x\n   ```python\na\n   ```", "a\n"),  # a line with less indentation than its list
    ("```text\na\n```", None),
    ("Inline ```a``` and ```b", None),
    ("1. Use ```python\n   a\n   ```", "a\n"),
])  # fmt: skip
def test_what_else_models_write(text, program):
    assert fenced(text) == program


@each(
    ("text", "bare"),
    [("```python\na\n```", "a\n"), ("~~~\na\n~~~\n", "a\n"), ("a", "a"), ("```\na\n```\nb", "```\na\n```\nb")],
)
def test_a_text_that_is_one_block_is_read_without_its_fence(text, bare):
    assert unfenced(text) == bare
