import importlib.util
import time
from dataclasses import replace

import pytest
from in_one_test import each

from rlft.reward.language import Language, counts, windows, words
from rlft.reward.workers.reward_spec import specs
from rlft.types import UserError

CONFIG = {"_target_": "rlft.reward.language.Language", "weight": 1.0, "window": 12, "min_words": 4, "too_little": 0.0}

TEXTS = {
    "en": "So we first add the two numbers and then we check whether the result can be right",  # 17 words
    "de": "Also addieren wir zuerst die beiden Zahlen und prüfen danach ob das Ergebnis richtig sein kann",  # 16 words
    "fr": "Nous additionnons donc les deux nombres et nous vérifions ensuite si le résultat est juste",
    "es": "Primero sumamos los dos números y después comprobamos si el resultado puede ser correcto",
    "ru": "Сначала сложим два числа, потом проверим, может ли результат быть верным",
    "zh": "首先我们把两个数相加，然后检查结果是否正确",  # 20 characters and a comma
    "ja": "まず二つの数を足してから、その結果が正しいかどうかを確かめます",
    "ko": "먼저 두 수를 더하고 나서 그 결과가 맞는지 확인합니다",
    "th": "ก่อนอื่นเราบวกเลขสองจำนวนแล้วตรวจสอบว่าผลลัพธ์ถูกต้องหรือไม่",
}
ENGLISH, GERMAN, CHINESE = TEXTS["en"], TEXTS["de"], TEXTS["zh"]


def language(**keys):
    return Language(**{"target": "prompt", "window": 12, "min_words": 4, "too_little": 0.0, **keys})


def asked(group, question, texts):
    made = group(texts)
    return replace(made, prompt=replace(made.prompt, messages=({"role": "user", "content": question},)))


@each("code", TEXTS)
def test_a_text_is_wholly_in_its_language_and_in_no_other_also_where_it_is_the_prompts(group, code):
    texts = list(TEXTS.values())
    expected = [float(other == code) for other in TEXTS]
    assert language(target=code)(group(texts)) == language()(asked(group, TEXTS[code], texts)) == expected


def test_the_prompts_language_is_that_of_its_last_user_message(group):
    made = group([GERMAN, ENGLISH])
    turns = (("system", ENGLISH), ("user", ENGLISH), ("assistant", ENGLISH), ("user", GERMAN))
    messages = tuple({"role": role, "content": content} for role, content in turns)
    assert language()(replace(made, prompt=replace(made.prompt, messages=messages))) == [1.0, 0.0]


LONG = f"{ENGLISH} {ENGLISH} so we {GERMAN} " + " ".join(GERMAN.split()[:8])
MIXED = {  # {what: (the language, a text, the share of its words that are in it)}
    # 17 English words and 20 Chinese characters, which stand in different scripts.
    "a mixed text": ("en", f"{ENGLISH}. {CHINESE}。", 17 / 37),
    "of its other language": ("zh", f"{ENGLISH}. {CHINESE}。", 20 / 37),
    # 36 English words in three windows of 12, then 24 German ones in two.
    "a change of language within one script is noticed by windows": ("en", LONG, 36 / 60),
    # 16 English words (one of 17 is left out) and the two characters in its place.
    "a foreign word inside a sentence is found by its script": ("en", ENGLISH.replace("check", "检查"), 16 / 18),
    # 16 German words, 20 Chinese characters.
    **{f"text cannot hide in {around}": ("de", f"{GERMAN} {around.format(CHINESE)}", 16 / 36) for around in (
        "${}$", "`{}`", r"\({}\)", r"\[\text{{{}}}\]", "<b>{}</b>", "**{}**",
    )},
}  # fmt: skip


@each(("target", "text", "share"), MIXED.values(), ids=list(MIXED))
def test_a_mixed_text_gets_the_share_of_its_words(group, target, text, share):
    assert language(target=target)(group([text])) == [pytest.approx(share, abs=1e-12)]


# None of this is a word, so it changes nothing of a German text's score.
NO_LANGUAGE = [
    "<think></think><answer>18</answer>",
    "8 + 10 = 18, 3.5, 1,000, 2x, x1, 10cm",
    r"$x^2 + y^2 = z^2$ and",
    r"$$\int_0^\infty \frac{\sin(x)}{x} dx$$",
    r"\(\alpha + \beta\) \[\begin{align} AB &= CD \end{align}\]",
    "x y z a b c α β I",
    "```python\nfor item in items: print(item)\n```",
    "`some_name` https://example.org/some/page me@example.org",
    "** ### --- ... !!! ??? … — « » “ ”",
]


@each("text", [text.removesuffix(" and") for text in NO_LANGUAGE])
def test_markup_digits_and_formulas_are_no_language(group, text):
    assert list(words(text)) == []
    assert language(target="de")(group([f"{text} {GERMAN} {text}"])) == [1.0]


def test_dollars_may_be_money(group):
    text = "She has $18 and wants to buy eggs for $5 more than her brother paid for the milk"
    # All of the 18 pieces but the two sums of money.
    assert len(list(words(text))) == 16
    assert language(target="en")(group([text])) == [1.0]


@each("text", ["", "<answer>18</answer>", "8 + 10 = 18", "also drei Wörter", "?!"])
def test_too_little_to_judge_has_a_score_of_its_own(group, text):
    assert language(target="de")(group([text])) == [0.0]
    assert language(target="de", too_little=0.25)(group([text])) == [0.25]


def test_a_prompt_with_too_little_text_has_no_language_to_keep_to(group):
    assert language(too_little=0.25)(asked(group, "8 + 10 = ?", [GERMAN, ENGLISH])) == [0.25, 0.25]


def test_windows_are_of_one_script_and_a_short_rest_joins_the_last_one():
    # 5 words in windows of 3: the rest of 2 is at least half of 3 and stands alone; 4 words: the rest of 1 joins.
    assert [n for _, n in windows("aa bb cc dd ee", 3)] == [3, 2]
    assert [n for _, n in windows("aa bb cc dd", 3)] == [4]
    assert [n for _, n in windows("aa", 3)] == [1]
    assert windows("aa 首先 bb", 3) == [("aa bb", 2), ("首先", 2)]
    assert windows("", 3) == []


def test_all_words_are_counted():
    text = " ".join(f"w{chr(97 + i % 26)}" for i in range(1000))
    for size in (1, 2, 7, 12, 999, 1000, 5000):
        assert counts(text, lambda run: "en", size)["en"] == 1000


def test_the_missing_library_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"reward.language._target_: needs the py3langid library.*rlft\[language\]"):
        specs({"language": CONFIG | {"target": "prompt"}})


@each("target", ["deutsch", "DE", "xx", "yue", ""])
def test_an_unknown_language_is_refused(target):
    with pytest.raises(UserError, match=r"reward.language.target: is neither prompt nor the ISO 639-1 code"):
        specs({"language": CONFIG | {"target": target}})


@each("piece", ["<a", "$", "$ ", "$a", "`", "```", r"\(", r"\[", "\\", "{", "首", "a", "a ", "ab", "<", " "])
def test_a_hostile_text_is_read_in_linear_time(piece):
    # A quadratic search would need about 1e10 steps, minutes.
    text = piece * (200_000 // len(piece))
    start = time.process_time()
    windows(text, 12)
    assert time.process_time() - start < 10
