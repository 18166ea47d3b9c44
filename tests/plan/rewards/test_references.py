"""All reference answers are scored before a run: those that are not right by themselves are refused."""

import copy
import json
import unicodedata
from dataclasses import replace

import pytest
from in_one_test import each
from scripted_server import Reply, ScriptedServer, chat, rated, scores
from slow_cases import slow
from tokenizers import AddedToken
from tokenizers.normalizers import NFC

from rlft.config.compose import compose
from rlft.config.instantiate import from_mapping, instantiate
from rlft.config.resolved import with_token_budget
from rlft.config.schema import RunConfig
from rlft.plan.rewards import references
from rlft.plan.rewards.references import check_references, check_servers
from rlft.plan.rewards.tester import Writer
from rlft.reward.answer import AnswerKeys
from rlft.reward.exact_match import ExactMatch
from rlft.reward.workers.reward_spec import reported, specs
from rlft.reward.workers.worker import Cause, Failure
from rlft.tokens.text import turn_ends
from rlft.types import Prompt, Split, UserError
from tests.helpers.family_tokenizers import family_tokenizer

CITIES = ["Rome", "Paris", "Oslo", "Bern"]


def rows(*answers, tail="", **metadata):
    return [
        Prompt(id=f"p{k}", messages=({"role": "user", "content": "?"},), answer=answer, tail=tail, metadata=metadata)
        for k, answer in enumerate(answers)
    ]


def notes(prompts, *words, tokenizer=None, limit_s=20.0):
    plain = with_token_budget(compose(list(words)))
    config = from_mapping(RunConfig, plain, "")
    tokenizer = tokenizer or family_tokenizer("qwen2.5")
    writer = Writer(tokenizer, turn_ends(tokenizer, "chat"), config.generation.sampling)
    found = check_references(config, specs(config.reward), prompts, writer, limit_s)
    return [*reported(specs(config.reward), "examine", prompts), *found]


PASS = [
    "exact_match", "exact_match reward.exact_match.answer_in=boxed", "exact_match reward.exact_match.answer_in=hashes",
    "exact_match reward.exact_match.answer_in=text", "equations", "math", "[cosine,length] reward.length.mode=kimi",
    r"exact_match reward.exact_match.answer_in=pattern reward.exact_match.pattern='answer:(\S+)'",
]  # fmt: skip


@each("words", PASS)
def test_references_that_are_right_by_themselves_pass_without_a_word(words):
    assert notes(rows("18", "1,080", "-2.5", "0", "7", "12"), *f"reward={words}".split()) == []


@each("normal", ["NFC", "NFD", "NFKD"])
@each("reward", ["exact_match", "math", "[cosine,length]"])
def test_references_are_right_in_whatever_form_their_letters_are_stored(reward, normal):
    tokenizer = copy.deepcopy(family_tokenizer("qwen2.5"))
    tokenizer.backend_tokenizer.normalizer = NFC()  # as Qwen's own tokenizer has it
    answers = [unicodedata.normalize(normal, text) for text in ("Hà Nội", "São Paulo", "Đà Nẵng", "Zürich")]
    assert notes(rows(*answers), f"reward={reward}", tokenizer=tokenizer) == []


CUT = ["reward=exact_match", "reward.exact_match.answer_in=pattern", r"reward.exact_match.pattern='#### (-?\d+)'"]

HASHES = ["reward=exact_match", "reward.exact_match.answer_in=hashes"]


@each(
    ("answers", "words", "problem"),
    [
        (["18", "1,080", "7"], CUT, "1 of 3 .* by themselves: '1,080' of prompt 'p1'"),
        (["18", " ", "7", ""], ["reward=exact_match"], "2 of 4 .* has no reference answer"),
        (["18", "</answer>"], ["reward=exact_match"], "1 of 2 .*'</answer>'"),
        (["A", "Rome", "E"], ["reward=choice"], "1 of 3 .*'Rome' of prompt 'p1' .*is not a letter"),
        (["18", "a\nb"], HASHES, "1 of 2"),
        ([*map(str, range(2999)), ""], ["reward=exact_match"], r"1 of 3,?000"),  # the last of many
    ],
)
def test_references_that_are_not_right_by_themselves_are_refused_with_count_and_examples(answers, words, problem):
    with pytest.raises(UserError, match=problem) as refused:
        notes(rows(*answers), *words)
    assert refused.value.key == words[0].replace("=", ".")
    if len(answers) < 9:
        [note] = notes(rows(*answers), *words, "data.allow_unscorable=true")
        assert note.startswith(f"{refused.value.key}: ")
        assert "are not right by themselves" in note


def test_a_reward_that_takes_each_row_for_every_other_is_refused():
    anything = ["reward=exact_match", "reward.exact_match.answer_in=pattern", "reward.exact_match.pattern='(x).*'"]
    assert notes(rows("x", "x ", " x", "x"), *anything) == [], "there is nothing to tell apart"
    with pytest.raises(UserError, match="in 5 of 5 pairs of rows, the reference answer of one is right for the other"):
        notes(rows(*"abcdef"), *mine("Anything"))


KEYS = "weight: 1.0, answer_in: tag, tag: answer, pattern: null, which: only"


def mine(name, keys=KEYS):
    return ["reward=[]", f"+reward.mine={{_target_: {__name__}.{name}, {keys}}}"]


class Anything(AnswerKeys):
    def __call__(self, group):
        return [1.0 for _ in group.rollouts]

    def right(self, group):
        return [True for _ in group.rollouts]


class Graded(ExactMatch):
    """A user's own, whose full marks are 10."""

    def __call__(self, group):
        return [10 * score for score in ExactMatch.__call__(self, group)]


def test_a_class_of_a_users_own_is_not_judged_by_full_marks_of_1():
    assert notes(rows("1", "2"), *mine("Graded", f"{KEYS}, numeric: true, ignore_case: false")) == []


def test_references_for_which_the_time_does_not_suffice_are_said_and_not_refused(monkeypatch):
    assert notes(rows("1", "2", "3"), "reward=exact_match", limit_s=-1.0) == [
        "reward.exact_match: only 0 reference answers could be scored in time, 3 could not"
    ]
    late = Failure(cause=Cause.time_limit, problem="took longer", completion=None)
    monkeypatch.setattr(references, "score", lambda *_: late)
    [note] = notes(rows("1", "2"), "reward=exact_match")
    assert note.startswith("reward.exact_match: only 0 reference answers could be scored in time, 2")


def test_verifiers_of_reasoning_gym_whose_questions_have_no_single_answer_are_not_asked_for_one(gym_here):
    data = instantiate(compose(["data=reasoning_gym", "data.task=propositional_logic", "data.size=3"])["data"], "data")
    prompts = [replace(prompt, token_ids=(1, 2)) for prompt in data.load(Split.train)]
    assert {prompt.answer for prompt in prompts} == {""}
    assert notes(prompts, "reward=reasoning_gym") == []


def test_indices_of_choices_stand_for_letters_where_no_row_could_mean_anything_else():
    field = ["reward=choice", "reward.choice.choices_field=choices"]
    [note] = notes(rows("2", "0", "3", choices=CITIES), *field)
    assert note == "reward.choice: all 3 reference answers are read as indices of choices, counted from 0"
    assert notes(rows("B", "Rome", "(C)", choices=CITIES), *field) == []
    with pytest.raises(UserError, match=r"1 of 2 reference answers name a choice only by its index"):
        notes(rows("2", "B", choices=CITIES), *field)


def test_numbers_that_may_be_indices_or_choices_are_refused_unless_a_key_says_which():
    """MMLU with numbers as choices: answer 2 is C, 4, and not the letter of the choice 2."""
    field = ["reward=choice", "reward.choice.choices_field=choices"]
    numeric = rows("2", "0", "1", choices=["1", "2", "4", "0"])
    with pytest.raises(UserError, match="all 3 reference answers may be indices, and 3 of them are also") as refused:
        notes(numeric, *field)
    assert refused.value.key == "reward.choice.reference_is"
    for kind, right in (("index", "C"), ("choice", "B")):
        chosen = [*field, f"reward.choice.reference_is={kind}"]
        assert notes(numeric, *chosen) == []
        reward = specs(with_token_budget(compose(chosen))["reward"])["choice"].build()
        assert reward.reference_text(numeric[0]) == f"<answer>{right}</answer>"
    assert notes(rows("15", "12", "15", choices=["12", "15", "18"]), *field) == [], "no index goes so far"


def test_references_are_read_as_the_policy_would_write_them():
    boxed = ["reward=exact_match", "reward.exact_match.answer_in=text"]
    with pytest.raises(UserError, match="2 of 2"):  # what follows an opened <think> is never the answer alone
        notes(rows("18", "7", tail="<think>\n"), *boxed, "reward.exact_match.in_reasoning=true")
    assert notes(rows("18", "7", tail="<think>\n"), *boxed) == [], "it is after the reasoning"
    assert notes(rows("18", "7", tail="<think>\n"), "reward=exact_match") == []
    tags = copy.deepcopy(family_tokenizer("qwen2.5"))
    special = [AddedToken(token, special=True, normalized=False) for token in ("<answer>", "</answer>")]
    tags.add_special_tokens({"additional_special_tokens": special})
    assert notes(rows("18", "7"), "reward=exact_match", tokenizer=tags) == []
    stops = ["reward=exact_match", "generation.stop=['</answer>']"]
    with pytest.raises(UserError, match="2 of 2"):
        notes(rows("18", "7"), *stops)
    assert notes(rows("18", "7"), *stops, "generation.include_stop_str_in_output=true") == []


def test_rewards_that_compare_with_nothing_and_rewards_with_sandboxes_take_no_part():
    words = ["reward=[format,length]", "reward.length.mode=limit", "reward.length.limit=9"]
    assert notes(rows("", "", ""), *words) == []


# -- servers -----------------------------------------------------------------------------------------------------------
ONE = Prompt(id="p", messages=({"role": "user", "content": "1 + 1?"},), answer="2")


@pytest.fixture
def server():
    with ScriptedServer() as running:
        yield running


def asked(name, url, *overrides):
    words = [f"reward=[{name}]", f"reward.{name}.url={url}/chat/completions"]
    check_servers(specs(compose([*words, *(f"reward.{name}.{key}" for key in overrides)])["reward"]), ONE)


@pytest.mark.parametrize(("name", "reply"), [("http", scores(1.0)), ("judge", rated(7))])
def test_a_server_that_scores_is_asked_once(name, reply, server):
    server.script = [reply]
    asked(name, server.address)
    assert len(server.bodies) == 1
    assert "2" in json.dumps(server.bodies[0])


@pytest.mark.parametrize(
    ("name", "reply", "problem"),
    [
        ("http", Reply(status=401, text="no such key"), "401"),
        slow("http", Reply(status=503, text="busy"), "503"),
        ("http", Reply(delay_s=5.0), "no answer within 0.2 s"),
        ("judge", chat("it is good"), "the judge's reply is not JSON"),
    ],
)
def test_a_server_that_gives_no_score_is_refused_by_its_key(name, reply, problem, server):
    server.script = [reply]
    asked_once = rf"^reward\.{name}\.url: was asked for one score before the start, and got no score"
    with pytest.raises(UserError, match=asked_once) as no:
        asked(name, server.address, "timeout=0.2" if reply.delay_s else "retries=3")
    assert problem in no.value.problem
    assert f"reward.{name}.try_first=false" in no.value.remedy
    assert len(server.bodies) == 1, "no further attempts"


def test_a_server_that_is_away_is_refused_or_left_for_later():
    away = "http://127.0.0.1:9"
    with pytest.raises(UserError, match=rf"^reward.http.url: was asked .* got {away}/chat/completions; start"):
        asked("http", away)
    asked("http", away, "try_first=false")
