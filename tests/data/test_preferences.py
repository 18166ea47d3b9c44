"""Preferences as rankings: pairs, lists, samples of a prompt and completions with a score each."""

from functools import partial
from itertools import product

import pytest

from rlft.data.fields import RowError, TypedRow, UselessRow
from rlft.data.records import sampled_with
from rlft.types import Split, UserError
from tests.data.data_rows import says, user

PAIR = {"prompt": "1?", "chosen": "good", "rejected": "bad"}


@pytest.fixture
def scan(make_preferences, trained_rows):
    return partial(trained_rows, make_preferences)


def told(found):
    """(prompt id, contents of the prompt, completions with their scores) of each."""
    scored = [(r.prompt, list(zip(r.completions, r.scores, strict=True))) for r in found.rankings]
    return [(prompt.id, [m["content"] for m in prompt.messages], completions) for prompt, completions in scored]


# -- pairs -------------------------------------------------------------------------------------------------------------
def test_a_pair_after_a_prompt_scores_one_and_zero(scan):
    chat = {"messages": [user("a"), says("b"), user("c")], "chosen": [says("good")], "rejected": [says("")]}
    found = scan(PAIR, chat, system_prompt="ours", prompt_template="Q: {question}")
    assert told(found) == [
        ("mine.jsonl:1", ["ours", "Q: 1?"], [("good", 1.0), ("bad", 0.0)]),
        ("mine.jsonl:2", ["ours", "a", "b", "Q: c"], [("good", 1.0), ("", 0.0)]),
    ]
    assert all(r.completion_ids == () for r in found.rankings)
    assert (found.num_identical, found.num_tied, found.note) == (0, 0, None)


def test_the_common_beginning_of_two_whole_chats_is_the_prompt(scan):
    start = [{"role": "system", "content": "own"}, user("a"), says("b"), user("c")]
    line = {"prompt": "another text", "chosen": [*start, says("good")], "rejected": [*start, says("bad")]}
    found = scan(line, system_prompt="ours")
    assert told(found) == [("mine.jsonl:1", ["own", "a", "b", "c"], [("good", 1.0), ("bad", 0.0)])]


def test_a_margin_says_by_how_much_the_chosen_one_is_better(scan):
    found = scan(PAIR | {"by": 2.5}, PAIR | {"prompt": "2?", "by": 0}, margin_field="by")
    assert told(found) == [("mine.jsonl:1", ["1?"], [("good", 2.5), ("bad", 0.0)])]
    assert found.num_tied == 1


# -- ranked lists ------------------------------------------------------------------------------------------------------
def test_completions_are_ranked_by_their_scores(scan):
    found = scan({"prompt": "1?", "completions": ["a", "b", "c", "d"], "scores": [0.5, 2, -1, 2]})
    assert told(found) == [("mine.jsonl:1", ["1?"], [("b", 2.0), ("d", 2.0), ("a", 0.5), ("c", -1.0)])]


def test_completions_without_scores_are_in_order_only_where_it_is_said(scan):
    line = {"prompt": "1?", "completions": ["a", "b", "c"]}
    assert told(scan(line, ranked=True)) == [("mine.jsonl:1", ["1?"], [("a", 2.0), ("b", 1.0), ("c", 0.0)])]
    with pytest.raises(UserError, match=r"mine\.jsonl:1: there are no scores .*; set preferences\.ranked=true if"):
        scan(line)


# -- what rlft sample wrote --------------------------------------------------------------------------------------------
def test_sampled_lines_of_a_prompt_are_ranked_together_by_the_reward_asked_for(scan, sample):
    lines = [
        sample("p", "a", 0.5, rewards={"math": 1.0}),
        sample("q", "x", 0.0, rewards={"math": 0.0}),
        sample("p", "b", 2.0, rewards={"math": 0.0}),
        sample("q", "y", 1.0, rewards={"math": 0.0}),
    ]
    found = scan(*lines, prompt_template="not: {question}")
    assert told(found) == [
        ("p", ["What is p?"], [("b", 2.0), ("a", 0.5)]),
        ("q", ["What is q?"], [("y", 1.0), ("x", 0.0)]),
    ]
    assert [r.completion_ids for r in found.rankings] == [((98, 0), (97, 0)), ((121, 0), (120, 0))]
    assert sampled_with(r.prompt for r in found.rankings) == {"0123456789ab"}
    by_math = scan(*lines, rank_by="math")
    assert told(by_math) == [("p", ["What is p?"], [("a", 1.0), ("b", 0.0)])]
    assert by_math.num_tied == 1


def test_the_same_tokens_count_once_and_other_tokens_of_the_same_text_count(scan, sample):
    lines = [sample("p", "a", 1.0), sample("p", "a", 1.0), sample("p", "a", 0.5, token_ids=[7, 0]), sample("p", "b")]
    (tokens,) = scan(*lines).rankings
    assert (tokens.completions, tokens.scores) == (("a", "a", "b"), (1.0, 0.5, 0.0))
    (texts,) = scan(*lines, token_ids="text").rankings
    assert (texts.completions, texts.scores, texts.completion_ids) == (("a", "b"), (1.0, 0.0), ())
    assert sampled_with([texts.prompt]) == set()


def test_a_reward_that_is_not_there_is_told_with_those_that_are(scan, sample):
    said = r"mine\.jsonl:1: there is no reward 'math'; set .*rank_by to reward or format$"
    with pytest.raises(UserError, match=said):
        scan(sample("p", "a"), rank_by="math")
    with pytest.raises(UserError, match=r"mine\.jsonl:1: 'reward' is null; rank by another reward"):
        scan(sample("p", "a", float("nan")))


def test_two_samplings_whose_ids_clash_are_refused(scan, sample):
    with pytest.raises(UserError, match=r"^preferences\.path: two different prompts have the same id, got p"):
        scan(sample("p", "a"), sample("p", "b") | {"prompt": [user("something else")]})


# -- what teaches nothing ----------------------------------------------------------------------------------------------
def test_what_teaches_nothing_is_left_out_and_counted(scan, sample):
    found = scan(
        PAIR,
        {"prompt": "2?", "chosen": "same", "rejected": "same"},
        {"prompt": "3?", "completions": ["a", "b"], "scores": [1, 1]},
        {"prompt": "4?", "completions": ["a", "a", "b"], "scores": [1, 0, 1]},  # a counts as it first occurs
        sample("p", "a", 1.0),  # alone
        sample("q", "a", 1.0),
        sample("q", "a", 1.0),
    )
    assert [r.prompt.id for r in found.rankings] == ["mine.jsonl:1"]
    assert (found.num_identical, found.num_tied) == (2, 3)
    said = "5 of 6 preferences are left out: 2 whose completions are the same, 3 without a difference in score."
    assert found.note == said


def test_where_nothing_is_left_it_is_refused(scan):
    with pytest.raises(UserError) as refusal:
        scan(PAIR | {"rejected": "good"}, {"prompt": "3?", "completions": ["a", "b"], "scores": [1, 1]})
    assert str(refusal.value) == (
        "preferences.path: no prompt has two different completions with different scores: of 2 train prompts 1 have "
        "the same completion throughout, and 1 the same score; give data with better and worse completions, or sample "
        "more of each prompt"
    )


# -- splits and refusals -----------------------------------------------------------------------------------------------
def test_no_question_is_in_both_splits(make_preferences, write, sample, tmp_path):
    pairs = [PAIR | {"prompt": f"{i}?", "chosen": f"{i} {j}"} for i in range(60) for j in range(2)]
    samples = [sample(f"{i}", text, reward) for text, reward in (("a", 0.0), ("b", 1.0)) for i in range(60)]
    data = make_preferences("jsonl", path=str(write(tmp_path / "a.jsonl", *pairs, *samples)), held_out_fraction=0.5)

    def questions(rankings):
        return {r.prompt.messages[0]["content"] for r in rankings}

    train, held_out = data.load(Split.train).rankings, data.load(Split.held_out).rankings
    assert not questions(train) & questions(held_out)
    assert len(train) + len(held_out) == 120 + 60  # each pair, and both samples of a prompt together


def test_pairs_without_a_prompt_of_their_own_have_it_in_their_texts(scan):
    start = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: A name?\n\nAssistant:"
    hh = {"chosen": f"{start} Ada.", "rejected": f"{start} No.\n\nWhy?"}
    ranked = [("Ada.", 1.0), ("No.\n\nWhy?", 0.0)]
    assert told(scan(hh, format="hh")) == [("mine.jsonl:1", ["Hi", "Hello.", "A name?"], ranked)]
    implicit = {"chosen": "The sky is blue.", "rejected": "The sky is black."}
    # "bl" is common as well, but no word of the prompt.
    ranked = [(" blue.", 1.0), (" black.", 0.0)]
    assert told(scan(implicit, format="implicit")) == [("mine.jsonl:1", ["The sky is"], ranked)]
    with pytest.raises(UserError, match=r"mine\.jsonl:1: has no prompt, .*; set preferences\.format=hh to read"):
        scan(hh)
    with pytest.raises(UserError, match=r"mine\.jsonl:1: field 'chosen' is no transcript"):
        scan(PAIR, format="hh")


def test_a_hub_set_is_read_as_a_file_is(make_preferences, hub_sets):
    rows = [{"chosen": [user(f"{i}"), says("a")], "rejected": [user(f"{i}"), says("b")]} for i in range(3)]
    hub_sets.update(train_prefs=rows, test_prefs=rows[:1])
    data = make_preferences("hub", path="some/set", train_split="train_prefs", held_out_split="test_prefs")
    assert [r.prompt.id for r in data.load(Split.held_out).rankings] == ["test_prefs:0"]
    assert [r.prompt.id for r in data.load(Split.train).rankings] == ["train_prefs:1", "train_prefs:2"]
    assert data.load(Split.train).num_tied == 0


# -- completions with a score each -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("completion", "score", "values"),
    [("completion", "label", [True, False]), ("response", "helpfulness", [4, 1.5]), ("text", "s", ["3", "-1e1"])],
)
def test_completions_with_a_score_each_are_ranked_by_prompt(
    make_preferences, write, tmp_path, completion, score, values
):
    rows = [
        {"prompt": f"{i}?", completion: f"{i} {'worse' if value is values[-1] else 'better'}", score: value}
        for value in reversed(values)
        for i in range(20)
    ]
    file = write(tmp_path / "a.jsonl", *rows, {"prompt": "alone?", completion: "x", score: values[0]})
    keys = {"path": str(file), "held_out_fraction": 0.5}
    if completion in ("completion", "response"):
        with pytest.raises(UserError, match=f"set preferences.completions_field={completion} .*scores_field={score}"):
            make_preferences("jsonl", **keys).load(Split.train)
    source = make_preferences("jsonl", completions_field=completion, scores_field=score, **keys)
    sets = [source.load(split) for split in Split]
    completions = [ranking.completions for found in sets for ranking in found.rankings]
    assert sorted(completions) == sorted((f"{i} better", f"{i} worse") for i in range(20))
    assert sum(found.num_tied for found in sets) == 1


def test_completions_that_are_chats_or_null_are_ranked_as_texts_are(make_preferences):
    """Each completion as text, chat of a table and null x one with its score, lists and columns."""
    forms = (
        lambda text: text,
        lambda text: [says(text)],
        lambda text: [says(text) | {"tool_calls": None}],
        lambda text: None,
    )
    number = 0
    for form, score in product(forms[:3], (True, 0.5, "3")):
        for prompt in ("1?", [{"role": "user", "content": "1?"}]):
            row = TypedRow({"prompt": prompt, "completion": form("x"), "label": score})
            with pytest.raises(RowError) as refusal:
                make_preferences("jsonl", path="x").parse(row, "x")
            if not isinstance(score, str):
                assert "completions_field=completion preferences.scores_field=label" in str(refusal.value.remedy)
            source = make_preferences("jsonl", path="x", completions_field="completion", scores_field="label")
            [made] = [row.made for row in source.parse(row, "x")]
            assert (made.completions, made.scores) == (("x",), (float(score),))
            assert made.prompt.messages == ({"role": "user", "content": "1?"},)
            number += 1
    for chosen, scores in product(product(forms, repeat=3), (["3", 2, 1.0], [True, None, 0.5])):
        texts = [form(text) for form, text in zip(chosen, "xyz", strict=True)]
        expected = [(t, s) for t, text, s in zip("xyz", texts, scores, strict=True) if text is not None]
        row = TypedRow({"prompt": "1?", "texts": texts, "scores": scores, **dict(zip("abc", texts, strict=True))})
        row |= dict(zip("def", scores, strict=True))
        for keys in (("texts", "scores"), (list("abc"), list("def"))):
            source = make_preferences("jsonl", path="x", completions_field=keys[0], scores_field=keys[1])
            number += 1
            if any(score is None for _, score in expected):
                with pytest.raises(RowError, match=f"must be a list of {len(expected)} number"):
                    source.parse(row, "x")
            elif not expected and keys[0] != "texts":
                with pytest.raises(RowError, match="is not a pair"):
                    source.parse(row, "x")
            elif not expected:
                assert isinstance(source.parse(row, "x")[0].made, UselessRow)
            else:
                [made] = [row.made for row in source.parse(row, "x")]
                found = list(zip(made.completions, made.scores, strict=True))
                assert found == [(text, float(score)) for text, score in expected]
    assert number == 18 + 64 * 2 * 2
