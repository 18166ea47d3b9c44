from dataclasses import replace

import pytest
from in_one_test import each

from rlft.reward.repetition import Repetition, Unit

# text, n, different n-grams, all n-grams.
TABLE = [
    ("one two three four", 3, 2, 2),
    ("one two one two one two", 2, 2, 5),
    ("so so so so so so so so so so", 1, 1, 10),
    ("so so so so so so so so so so", 3, 1, 8),
    ("So so\nSO", 1, 1, 3),
    ("one two", 2, 1, 1),
    ("1+1+1+1+1+1", 3, 0, 0),
    ("one two", 3, 0, 0),
    ("", 1, 0, 0),
]


@each(("text", "n", "different", "total"), TABLE)
def test_the_penalty_is_the_share_of_repeated_ngrams_of_words(group, text, n, different, total):
    expected = -2.0 * (1 - different / total) if total else 0.0
    scores = Repetition(unit=Unit.words, ngram=n, max_penalty=2.0)(group([text]))
    assert scores == [pytest.approx(expected, abs=1e-12)]


def test_tokens_serve_texts_without_spaces(group):
    made = group(["所以所以所以", "所以"])
    first, second = made.rollouts
    first = replace(first, completion=replace(first.completion, token_ids=[5, 6, 5, 6, 5, 6]))
    made = replace(made, rollouts=(first, second))
    # Pairs 56 65 56 65 56: 2 of 5 differ. The second completion's tokens, 1 2, are one pair.
    assert Repetition(unit=Unit.tokens, ngram=2, max_penalty=1.0)(made) == [pytest.approx(-0.6, abs=1e-12), 0.0]
    assert Repetition(unit=Unit.words, ngram=2, max_penalty=1.0)(made) == [0.0, 0.0]


def test_the_answer_repeated_fifty_times_costs_nearly_everything(group):
    # 50 words, 48 triples, all the same: 1 - 1/48.
    scores = Repetition(unit=Unit.words, ngram=3, max_penalty=1.0)(group(["<answer>18</answer> " * 50]))
    assert scores == [pytest.approx(-47 / 48, abs=1e-12)]
