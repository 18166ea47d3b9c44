import pytest

from rlft.reward.format import Format, Mode
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


@pytest.mark.parametrize(("text", "strict", "fifths"), VERDICTS)
def test_verdicts(group, text, strict, fifths):
    assert Format(mode=Mode.strict, tags=TAGS)(group([text])) == [float(strict)]
    assert Format(mode=Mode.soft, tags=TAGS)(group([text])) == [pytest.approx(fifths / 5, abs=1e-12)]


def test_the_template_is_a_config_key(group):
    texts = ["<plan>a</plan><code>b</code><result>c</result>", GOOD]
    assert Format(mode=Mode.strict, tags=("plan", "code", "result"))(group(texts)) == [1.0, 0.0]


def test_a_template_needs_different_tags():
    for tags in ((), ("answer", "answer"), ("",)):
        with pytest.raises(UserError, match="must be different names"):
            Format(mode=Mode.soft, tags=tags)


def test_a_million_tags_take_no_time(group):
    text = "<think></think><answer>" * 50_000
    assert Format(mode=Mode.soft, tags=TAGS)(group([text])) == [0.0]
