import time

import pytest
from in_one_test import each

from rlft.reward.format import Format, FormatMode
from rlft.reward.workers.scorer import Scorer, specs
from rlft.types import UserError

TAGS = ("think", "answer")
GOOD = "<think>8 + 10</think><answer>18</answer>"

# strict; soft in fifths: one for each of the four tags in place, one for a completion with nothing missing or added.
VERDICTS = [
    (GOOD, 1, 5),
    (f"\n {GOOD} \n", 1, 5),
    (GOOD.replace("><", ">\n\n<"), 1, 5),
    (f"Sure! {GOOD}", 0, 4),
    (f"{GOOD} Done.", 0, 4),
    (GOOD.replace("</think>", "</think> so "), 0, 4),
    ("<think></think><answer></answer>", 0, 4),
    ("<think>8</think><answer> </answer>", 0, 4),
    ("<think>8 + 10</think>", 0, 2),
    ("<answer>18</answer>", 0, 2),
    ("<think>8 + 10 <answer>18</answer>", 0, 3),
    ("<think>8 + 10</think><answer>18", 0, 3),
    # The answer first: its two tags come too early to count once the thought is in place.
    ("<answer>18</answer><think>8 + 10</think>", 0, 2),
    # Twice everything: no tag stands exactly once.
    (GOOD * 2, 0, 0),
    (GOOD + "<answer>19</answer>", 0, 2),
    ("<think><think></think>" + GOOD, 0, 2),
    ("<THINK>8</THINK><ANSWER>18</ANSWER>", 0, 0),
    ("18", 0, 0),
    ("", 0, 0),
]


@each(("text", "strict", "fifths"), VERDICTS)
def test_verdicts(group, text, strict, fifths):
    assert Format(mode=FormatMode.strict, tags=TAGS, pattern=None)(group([text])) == [float(strict)]
    [score] = Format(mode=FormatMode.soft, tags=TAGS, pattern=None)(group([text]))
    assert score == pytest.approx(fifths / 5, abs=1e-12)


def test_the_template_is_a_config_key(group):
    texts = ["<plan>a</plan><code>b</code><result>c</result>", GOOD]
    assert Format(mode=FormatMode.strict, tags=("plan", "code", "result"), pattern=None)(group(texts)) == [1.0, 0.0]


def test_a_template_needs_different_tags():
    for tags in ((), ("answer", "answer"), ("",)):
        with pytest.raises(UserError, match="must be different names"):
            Format(mode=FormatMode.soft, tags=tags, pattern=None)


HASHES = r".+\n#### -?[0-9]+"


# The whole completion has to match, and a dot also stands for the end of a line.
@each(("text", "follows"), [
    ("8 + 10 = 18\n#### 18", True), ("8 + 10\n= 18\n#### -18", True), ("8 + 10 = 18\n#### 18 apples", False),
    ("8 + 10 = 18\n#### 18\n", False), ("8 + 10 = 18\n#### １８", False), ("#### 18", False), (GOOD, False),
    ("", False),
])  # fmt: skip
def test_a_pattern_takes_the_place_of_the_tags(group, text, follows):
    assert Format(mode=FormatMode.strict, tags=TAGS, pattern=HASHES)(group([text])) == [float(follows)]


def test_a_pattern_that_is_no_regular_expression_or_has_parts_to_count_is_refused():
    with pytest.raises(UserError, match=r"mode: a pattern is matched or not, .*, got soft; use mode=strict"):
        Format(mode=FormatMode.soft, tags=TAGS, pattern=HASHES)
    with pytest.raises(UserError, match=r"pattern: is not a regular expression \(missing \), .*got \(unclosed"):
        Format(mode=FormatMode.strict, tags=TAGS, pattern="(unclosed")


def test_a_pattern_that_backtracks_for_ever_is_stopped_by_the_time_limit(group):
    # (a+)+b on a^40 tries every way to cut 40 letters into pieces, 2^39: days. The other completion keeps its score.
    config = {"_target_": "rlft.reward.format.Format", "weight": 1.0, "on_error": 0.0}
    scorer = Scorer(specs({"format": config | {"mode": "strict", "tags": TAGS, "pattern": "(a+)+b"}}), 0, 0.2, "stop")
    start = time.monotonic()
    scores = scorer([group(["a" * 40, "aab"])])
    scorer.close()
    assert scores.by_reward["format"].tolist() == [[0.0, 1.0]]
    assert time.monotonic() - start < 60
