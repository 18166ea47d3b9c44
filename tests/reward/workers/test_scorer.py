"""Scores of groups from several rewards: how they are mixed, which failure is whose, and rewards of the trainer."""

import pickle
import time
from contextlib import closing
from dataclasses import replace

import psutil
import pytest
import torch
from in_one_test import each
from reward_groups import TAGGED, make_group
from run_processes import happens

from rlft.loop.evaluations import compared
from rlft.loop.metrics import summarise
from rlft.reward.workers import pool
from rlft.reward.workers.pool import packed_task
from rlft.reward.workers.scorer import AheadScorer, RewardError, Scorer, shortened, specs
from rlft.reward.workers.worker import Task
from rlft.types import Group, StepScores, Turn, UserError

TIMEOUT_S = 0.4
NONE = StepScores(values=(), ends=())


def naughty(*names, **rewards):
    """The specs of functions of naughty.py: those of these names, then `name={key: ..}`, where `target` may differ."""
    config = {
        name: {"weight": 1.0, "_target_": f"naughty.{keys.get('target', name)}"}
        | {key: value for key, value in keys.items() if key != "target"}
        for name, keys in ({name: {} for name in names} | rewards).items()
    }
    return specs(config)


@pytest.fixture(scope="module")
def scorer():
    """Makes a Scorer of `naughty(*names, **rewards)`, or gives that of the same arguments again, its workers warm."""
    made = {}
    patch = pytest.MonkeyPatch()
    patch.setattr(pool, "GRACE_S", 0.4)  # of a hang that no alarm ends

    def make(*names, workers=1, on_error="stop", resident=None, **rewards):
        arguments = repr((names, rewards, workers, on_error, resident))
        if arguments not in made:
            made[arguments] = Scorer(naughty(*names, **rewards), workers, TIMEOUT_S, on_error, resident or {})
        made[arguments].num_failures = 0
        return made[arguments]

    yield make
    patch.undo()
    for opened in made.values():
        opened.close()


def digits(groups):
    """1 for each digit in a completion."""
    return [[float(sum(map(str.isdigit, r.completion.text))) for r in group.rollouts] for group in groups]


# -- the mixture -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2])
def test_rewards_are_mixed_by_weight_in_the_configured_order(scorer, group, workers):
    score = scorer(
        length={"weight": 0.5}, Judge={"weight": 10.0, "taste": "good"}, stepwise={"weight": -1.0},
        Bonus={"weight": -2.0, "bonus": 3.0}, workers=workers, resident={"Judge": digits},
    )  # fmt: skip
    scores = score([group(["ab 1", ""], id="p0"), group(["abc", "a 2"], id="p1")])
    assert list(scores.by_reward) == ["length", "Judge", "stepwise", "Bonus"]
    assert {name: values.tolist() for name, values in scores.by_reward.items()} == {
        "length": [[4.0, 0.0], [3.0, 3.0]],
        "Judge": [[1.0, 0.0], [0.0, 1.0]],
        "stepwise": [[3.0, 0.0], [3.0, 2.0]],  # a word is a step of its length
        "Bonus": [[3.0, 3.0], [3.0, 3.0]],
    }
    # 0.5 x length + 10 x digits - 2 x 3; the total has the steps, too.
    assert scores.outcome.tolist() == [[6.0, -6.0], [-4.5, 5.5]]
    assert scores.total.tolist() == [[3.0, -6.0], [-7.5, 3.5]]
    assert scores.steps == [
        [StepScores(values=(-2.0, -1.0), ends=(2, 4)), NONE],
        [StepScores(values=(-3.0,), ends=(3,)), StepScores(values=(-1.0, -1.0), ends=(1, 3))],
    ]
    assert {t.dtype for t in (scores.total, scores.outcome, *scores.by_reward.values())} == {torch.float64}


def test_steps_of_several_rewards_are_merged_in_the_order_of_their_ends(scorer, group):
    score = scorer("stepwise", SameSteps={"weight": 10.0, "values": [1, 2, 3], "ends": [1, 2, 3]}, workers=0)
    scores = score([group(["ab c", "xyz"])])
    # 10, 20, 30 at 1, 2, 3, and the words' 2 at 2 and 1 at 4; then 3 at 3.
    merged = StepScores(values=(10.0, 22.0, 30.0, 1.0), ends=(1, 2, 3, 4))
    assert scores.steps == [[merged, StepScores(values=(10.0, 20.0, 33.0), ends=(1, 2, 3))]]
    assert scores.total.tolist() == [[63.0, 63.0]]


def test_a_process_reward_of_weight_0_is_looked_at_only(scorer, group):
    scores = scorer("length", stepwise={"weight": 0.0}, workers=0)([group(["ab c"])])
    assert scores.by_reward["stepwise"].tolist() == [[3.0]]
    assert scores.total.tolist() == scores.outcome.tolist() == [[4.0]]
    assert scores.steps == [[NONE]]


def test_steps_and_rewards_are_summed_in_float64(scorer, group):
    # In float32 1e8 + 1 = 1e8, and the sums would be 0.
    steps = {"target": "SameSteps", "values": [1e8, 1.0, -1e8], "ends": [1, 2, 3]}
    bonuses = {name: {"target": "Bonus", "bonus": bonus} for name, bonus in zip("abc", (1e8, 1.0, -1e8), strict=True)}
    scores = scorer(one=steps, two=steps | {"weight": 2.0}, **bonuses, workers=0)([group(["abc"])])
    assert scores.by_reward["one"].tolist() == scores.outcome.tolist() == [[1.0]]
    assert scores.total.tolist() == [[4.0]]


def test_scores_stay_in_order_whichever_worker_is_done_first(scorer, group):
    scores = scorer("slow_first", workers=2)([group(["a", "b"], id=f"p{i}") for i in range(20)])
    expected = torch.tensor([[i, i + 0.1] for i in range(20)], dtype=torch.float64)
    assert torch.equal(scores.total, expected)


def test_workers_import_no_torch_and_the_caller_may_have_it(scorer, group):
    assert scorer("imports_torch")([group(["a"])]).total.tolist() == [[0.0]]
    assert scorer("imports_torch", workers=0)([group(["a"])]).total.tolist() == [[1.0]]


def test_a_scorer_returns_before_its_workers_are_up(scorer, group):
    start = time.monotonic()
    made = scorer("length", on_error=0.5)
    returned = time.monotonic()
    made([group(["a"])])
    assert returned - start < time.monotonic() - returned


def test_a_closed_scorer_leaves_no_process(group):
    score = Scorer(naughty("reports_pid"), 2, TIMEOUT_S, "stop")
    pids = {int(pid) for row in score([group(["a"], id=f"p{i}") for i in range(8)]).total.tolist() for pid in row}
    assert pids
    score.close()
    score.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


# -- failures ----------------------------------------------------------------------------------------------------------
LATE = "exceeded its time limit of 0.4 s a group"
FAULTS = [  # (reward, what the completion makes it do, what the message says)
    ("naughty", "raise", "raised ValueError: no such unit (naughty.py, line "),
    ("naughty", "exit", "raised SystemExit: 0"),
    ("naughty", "sleep", LATE),
    ("naughty", "swallow", LATE),
    ("naughty", "nan", "returned nan, not a finite number,"),
    ("naughty", "text", "returned '1.0', not a finite number,"),
    ("naughty", "hang", LATE),
    ("naughty", "die", "took its worker process with it, which ended with exit code 0,"),
    ("naughty", "segfault", "took its worker process with it, which was killed by SIGSEGV,"),
    ("stepwise", "late", "returned an end of 5 for step 2, outside 1 .. 4 (the characters of the text),"),
    ("stepwise", "raise", "raised ValueError: no such unit (naughty.py, line "),
    ("stepwise", "sleep", LATE),
    ("stepwise", "die", "took its worker process with it, which ended with exit code 0,"),
    ("unsaid", "steps", "returned StepScores(values=(1.0,), ends=(1,)), not a finite number,"),
]
WITHOUT_WORKERS = [(0, *fault) for fault in FAULTS if fault[1] in ("exit", "sleep")]


@pytest.mark.parametrize(
    ("workers", "reward", "order", "message"), [*((1, *fault) for fault in FAULTS), *WITHOUT_WORKERS]
)
def test_a_fault_stops_the_run_with_reward_prompt_and_completion(scorer, group, workers, reward, order, message):
    score = scorer("length", reward, workers=workers)
    texts = [order] if reward == "unsaid" else ["well", order, "yes"]
    with pytest.raises(RewardError) as stopped:
        score([*[group(["fine", "too"], id="p0")] * (reward != "unsaid"), group(texts, id="gsm8k-17")])
    told = str(stopped.value)
    assert told.startswith(f"reward.{reward}: {message}")
    assert f"on prompt 'gsm8k-17', completion {len(texts) // 2 + 1} of {len(texts)}: '{order}'; " in told
    assert "'; fix" in told.replace("raise scoring.timeout, ", "")
    assert "scoring.on_error" in told
    if reward != "unsaid":  # the next call works: a worker that was killed has been replaced
        assert score([group(["fine"])]).by_reward[reward].tolist() == [[4.0]]


@pytest.mark.parametrize("reward", ["naughty", "stepwise"])
def test_a_fixed_score_is_given_to_the_failing_completions_only(scorer, group, reward):
    faults = [(order, message) for name, order, message in FAULTS if name == reward]
    score = scorer(**{"length": {"weight": 0.5}, reward: {"weight": 2.0}}, on_error=-1)
    scores = score([group(["ab c", order, "abc"], id=order) for order, _ in faults])
    whole = 3.0 if reward == "stepwise" else 4.0  # a step for each word, of its length
    assert scores.by_reward[reward].tolist() == [[whole, -1.0, 3.0] for _ in faults]
    failed = [0.5 * len(order) - 2.0 for order, _ in faults]
    assert scores.total.tolist() == [[2.0 + 2 * whole, score, 7.5] for score in failed]
    assert score.num_failures == len(faults)
    assert faults[-1][1] in score.last_failure
    if reward == "stepwise":  # the fixed score is one of the completion as a whole
        assert scores.outcome.tolist() == [[2.0, score, 1.5] for score in failed]
        steps = [StepScores(values=(4.0, 2.0), ends=(2, 4)), NONE, StepScores(values=(6.0,), ends=(3,))]
        assert scores.steps == [steps] * len(faults)


@pytest.mark.parametrize(("reward", "order"), [("naughty_later", "sleep"), ("lazy", "raise")])
def test_the_completion_is_found_even_where_watching_doesnt_tell(scorer, group, reward, order):
    score = scorer(reward, on_error=0)
    assert score([group(["ab", order, "abcd"])]).total.tolist() == [[2.0, 0.0, 4.0]]
    assert "completion 2 of 3" in score.last_failure


def test_hangs_are_not_gone_through_again_and_do_not_add_up(scorer, group, tmp_path):
    score = scorer(diary={"path": str(tmp_path / "diary")}, on_error=0)
    assert score([group(["ab", "sleep", "abcd"])]).total.tolist() == [[2.0, 0.0, 4.0]]
    # The group up to the hang, then only the others one at a time.
    assert (tmp_path / "diary").read_text() == "ab sleep ab abcd "
    (tmp_path / "diary").unlink()
    assert score([group(["sleep"] * 40)]).total.tolist() == [[0.0] * 40]
    # Once for the group, twice alone, and the one that is suspected.
    assert (tmp_path / "diary").read_text() == "sleep " * 4
    assert score.num_failures == 41


def test_several_faults_in_a_group_are_each_found(scorer, group):
    score = scorer("naughty", on_error=0)
    assert score([group(["raise", "ab", "nan", "die", "abcde"])]).total.tolist() == [[0.0, 2.0, 0.0, 0.0, 5.0]]
    assert score.num_failures == 3


def test_the_first_fault_in_order_is_the_one_told(scorer, group):
    # The first group's reward sleeps until its limit, while the other worker finds the second fault at once.
    with pytest.raises(RewardError, match="prompt 'p0', completion 1 of 1"):
        scorer("naughty", workers=2)([group(["sleep"], id="p0"), group(["raise"], id="p1")])


def test_a_group_that_fails_only_as_a_whole_is_told_so(scorer, group):
    with pytest.raises(RewardError, match="prompt 'p0', its 2 completions as a whole"):
        scorer("dislikes_company", workers=0)([group(["a", "b"])])
    score = scorer("dislikes_company", on_error=0.5, workers=0)
    assert score([group(["a", "b"])]).total.tolist() == [[0.5, 0.5]]
    assert score.num_failures == 2


def test_a_rewards_own_on_error_goes_before_the_runs(scorer, group):
    score = scorer(naughty={"on_error": 0.25}, workers=0)
    assert score([group(["raise", "ab"])]).total.tolist() == [[0.25, 2.0]]


def test_a_reward_that_cannot_start_always_stops_the_run(scorer, group):
    with pytest.raises(RewardError, match="could not be started in its worker: OSError: the sandbox is not there"):
        scorer("StartsBadly", on_error=0)([group(["a"])])


def test_a_long_completion_is_shown_shortened():
    assert len(shortened("x\n" * 100_000)) < 350


def test_metadata_that_cannot_be_sent_is_told(scorer, group):
    whole = group(["a"])
    odd = replace(whole, prompt=replace(whole.prompt, metadata={"check": lambda text: True}))
    with pytest.raises(RewardError, match=r"prompt 'p0' cannot be sent .* scoring.workers=0"):
        scorer("length")([odd])
    assert scorer("length", workers=0)([odd]).total.tolist() == [[1.0]]


def test_completions_of_a_prompt_whose_reference_is_of_no_use_get_0_where_that_is_allowed(group):
    made = group(["a", "b"])
    with pytest.raises(RewardError, match=r"data\.allow_unscorable=true"):
        Scorer(naughty("unscorable"), 0, 10.0, "stop")([made])
    allowed = Scorer(naughty("unscorable"), 0, 10.0, "stop", allow_unscorable=True)
    assert allowed([made]).total.tolist() == [[0.0, 0.0]]


# -- what groups hold --------------------------------------------------------------------------------------------------
def with_turns_of(group, rewards):
    """The group with these turns' rewards, a completion at a time; two tokens each, of which one is an answer's."""
    rollouts = []
    for rollout, row in zip(group.rollouts, rewards, strict=True):
        turns = tuple(Turn(end=2 * k + 1, reward=reward) for k, reward in enumerate(row))
        tokens = {"token_ids": (5, 5) * len(row), "logprobs": (0.0, 0.0) * len(row), "mask": (True, False) * len(row)}
        rollouts.append(replace(rollout, completion=replace(rollout.completion, turns=turns, **tokens)))
    return replace(group, rollouts=tuple(rollouts))


def test_a_group_arrives_in_the_worker_as_it_was(group):
    task = Task(key=3, group=with_turns_of(group(["a", "bc"]), [(None,), (0.5, None)]), rewards=("length",))
    assert pickle.loads(packed_task(task)) == task


def test_what_an_environment_gave_for_turns_is_part_of_the_total_and_told_apart(scorer, group):
    groups = [with_turns_of(group(["ab", "abc"]), [(0.5, None), (-1.0, 0.25)]), group(["a", ""], id="p1")]
    scores = scorer("length")(groups)
    assert scores.by_reward["turns"].tolist() == [[0.5, -0.75], [0.0, 0.0]]
    assert list(scores.by_reward) == ["length", "turns"], "the first reward stays the one that says what is right"
    assert scores.total.tolist() == [[2.5, 2.25], [1.0, 0.0]]
    assert scores.outcome.tolist() == [[2.0, 3.0], [1.0, 0.0]]
    unrewarded = scorer("length")([with_turns_of(group(["ab", "abc"]), [(None,), (None,)])])
    assert list(unrewarded.by_reward) == ["length"]
    assert unrewarded.outcome is unrewarded.steps is None
    with pytest.raises(UserError, match=r"^reward.turns: is the name under which .*; give the reward another name$"):
        naughty(turns={"target": "naughty"})


def begun(group, tail, texts):
    made = group(texts)
    prompt = replace(made.prompt, tail=tail)
    return Group(prompt=prompt, rollouts=tuple(replace(rollout, prompt=prompt) for rollout in made.rollouts))


def test_ends_of_steps_are_offsets_into_the_completions_own_text(scorer, group):
    [[full, empty]] = scorer("every_character", workers=0)([begun(group, "<t>", ["ab", ""])]).steps
    # Five characters with a value of 1 each: those of the tail and "a" count for the first one.
    assert full == StepScores(values=(4.0, 1.0), ends=(1, 2))
    assert empty == NONE


@pytest.mark.parametrize("workers", [0, 1])
def test_a_format_is_read_together_with_what_the_prompt_has_begun(group, workers):
    keys = {"_target_": "rlft.reward.format.Format", "weight": 1.0, "mode": "strict", "tags": ["think", "answer"]}
    made = begun(group, "<think>\n", ["so</think><answer>5</answer>", "<think>so</think><answer>5</answer>", "5"])
    with closing(Scorer(specs({"format": {**keys, "pattern": None}}), workers, 10.0, "stop")) as score:
        assert score([made]).total.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("workers", [0, 1])
def test_rewards_read_what_the_prompt_has_begun_and_scores_have_the_answers_that_they_read(group, workers):
    exact = {"_target_": "rlft.reward.exact_match.ExactMatch", "weight": 1.0, **TAGGED}
    used = specs({"exact_match": {**exact, "numeric": True, "ignore_case": False}})
    used |= naughty("length", verdicts={"on_error": 0.0})
    groups = [group(["<answer>18.0</answer>", "raise"])]
    groups += [begun(group, "<think>", ["AB", "</think><answer>7</answer>"])]
    with closing(Scorer(used, workers, 10.0, "stop")) as scorer:
        scores = scorer(groups)
    # A failed completion has a score alone.
    assert scores.answers == {
        "exact_match": [["18", None], [None, "7"]],
        "verdicts": [["<answer>18.0</answer>", None], ["<think>ab", "<think></think><answer>7</answer>"]],
    }
    assert scores.by_reward["exact_match"].tolist() == [[1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(("target", "has_it"), [("verdicts", True), ("naughty", False)])
def test_an_evaluation_whose_groups_all_failed_has_the_metrics_that_a_study_expects(target, has_it):
    """A reward says whether it reads answers: what came of an evaluation does not decide which metrics it has."""
    groups = [make_group(["raise", "raise"])] * 2
    with closing(Scorer(naughty(first={"target": target, "on_error": 0.0}), 0, 10.0, "stop")) as scorer:
        scores = scorer(groups)
    assert scorer.num_failures == 4
    metrics = summarise(groups, scores, step=0, correct_at=1.0, num_examples=0).metrics
    reward = {"first": {"_target_": f"naughty.{target}", "weight": 1.0, "on_error": 0.0}}
    expected = compared({"command": "train", "eval": {"num_samples": 2}, "reward": reward})
    assert ("eval/maj@2" in metrics, "eval/maj@2" in expected) == (has_it, has_it)


# -- rewards that the trainer computes ---------------------------------------------------------------------------------
JUDGE = {"Judge": {"weight": 10.0, "taste": "good"}}


def test_a_resident_reward_gets_all_groups_at_once_and_where_it_is_the_only_one_no_worker_is_started(group):
    before, seen = psutil.Process().children(recursive=True), []

    def look(groups):
        seen.append([g.prompt.id for g in groups])
        return digits(groups)

    with closing(Scorer(naughty(**JUDGE), 2, TIMEOUT_S, "stop", {"Judge": look})) as score:
        totals = score([group(["12", "3"], id="p0"), group(["", "4"], id="p1")]).total.tolist()
        assert psutil.Process().children(recursive=True) == before
    assert (totals, seen) == ([[20.0, 10.0], [0.0, 10.0]], [["p0", "p1"]])


def test_a_reward_that_runs_in_the_trainer_needs_its_callable_and_each_callable_its_reward(scorer):
    with pytest.raises(ValueError, match=r"rewards \['Judge'\] run in the trainer, and no resident callable"):
        scorer("length", **JUDGE)
    with pytest.raises(ValueError, match=r"resident rewards \['Jugde'\] are not among the rewards \['length'\]"):
        scorer("length", resident={"Jugde": digits})


NAN = float("nan")


@each(("returned", "message"), [
    ([[1.0, NAN], [1.0, 1.0]], "returned nan, not a finite number, on prompt 'p0', completion 2 of 2: 'b'; "),
    ([[1.0, 1.0], ["1", 1.0]], "returned '1', not a finite number, on prompt 'p1', completion 1 of 2: 'c'; "),
    ([[1.0, 1.0], [1.0]], "returned 1 score for 2 completions on prompt 'p1', its 2 completions as a whole; "),
    ([[1.0, 1.0], 1.0], "returned float, not a list of 2 numbers on prompt 'p1'"),
    ([[1.0, 1.0]], "returned scores of 1 group, not a list for each of 2 groups; "),
    ([[1.0, 1.0]] * 3, "returned scores of 3 groups, not a list for each of 2 groups; "),
    (None, "returned NoneType, not a list for each of 2 groups; "),
])  # fmt: skip
def test_what_is_wrong_with_scores_of_the_trainer_stops_the_run(group, returned, message):
    score = Scorer(naughty(**JUDGE), 0, 5.0, 0.0, {"Judge": lambda groups: returned})
    with pytest.raises(RewardError) as stopped:
        score([group(["a", "b"], id="p0"), group(["c", "d"], id="p1")])
    assert str(stopped.value).startswith(f"reward.Judge: {message}")
    assert str(stopped.value).endswith("look at the model, adapter and numbers this reward is made of")


def test_an_error_of_the_callable_itself_is_not_hidden(group):
    def broken(groups):
        raise MemoryError("too long")

    with pytest.raises(MemoryError, match="too long"):
        Scorer(naughty(**JUDGE), 0, 5.0, "stop", {"Judge": broken})([group(["a"])])


# -- scoring that begins before it is asked for ------------------------------------------------------------------------
LENGTHS = {"length": {"weight": 0.5}, "naughty": {"weight": 0.5}}
GROUPS = [make_group(["a" * (3 * i + j) for j in range(3)], id=f"p{i}") for i in range(6)]


@pytest.fixture
def open_scorers():
    """The scores, and the errors, of these two are the same."""
    opened = []

    def both(on_error="stop", timeout_s=20.0, **rewards):
        opened.extend(made(naughty(**rewards), 1, timeout_s, on_error) for made in (Scorer, AheadScorer))
        return opened[-2:]

    yield both
    for scorer in opened:
        scorer.close()


def plain(scores):
    return scores.total.tolist(), {name: values.tolist() for name, values in scores.by_reward.items()}


def test_scores_do_not_depend_on_when_scoring_began(open_scorers):
    alone, ahead = open_scorers(**LENGTHS)
    expected = plain(alone(GROUPS))
    later = GROUPS[4:]
    ahead.begin(GROUPS[2:4])
    ahead.begin(GROUPS[:1])
    ahead.begin(later)
    assert plain(ahead(GROUPS[:4])) == plain(alone(GROUPS[:4]))  # one of them was not begun
    assert plain(ahead(later)) == plain(alone(later))
    ahead.begin(GROUPS[3:])
    assert plain(ahead(GROUPS)) == expected


def test_a_group_that_was_begun_is_not_scored_again(open_scorers, monkeypatch):
    _, ahead = open_scorers(**LENGTHS)
    asked = []
    run = ahead.run

    def counted(tasks, stop_when):
        asked.extend(task.group.prompt.id for task in tasks)
        return run(tasks, stop_when)

    monkeypatch.setattr(ahead, "run", counted)
    ahead.begin(GROUPS[:2])
    assert happens(lambda: asked == ["p0", "p1"], within_s=60)  # before anybody asks for scores
    ahead(GROUPS[:3])
    assert asked == ["p0", "p1", "p2"]


def test_a_reward_that_fails_stops_the_run_or_gets_its_fixed_score(open_scorers):
    groups = [make_group(["fine", "too"], id="p0"), make_group(["raise", "fine"], id="p1")]
    alone, ahead = open_scorers(naughty={})
    ahead.begin(groups)
    with pytest.raises(RewardError) as expected:
        alone(groups)
    with pytest.raises(RewardError) as caught:
        ahead(groups)
    assert str(caught.value) == str(expected.value)
    alone, ahead = open_scorers(naughty={}, on_error=-2.0)
    ahead.begin(groups)
    assert plain(ahead(groups)) == plain(alone(groups))
    assert (ahead.num_failures, ahead.last_failure) == (alone.num_failures, alone.last_failure)
    assert ahead.num_failures == 1


def test_closing_does_not_wait_for_a_reward(open_scorers):
    _, ahead = open_scorers(naughty={}, timeout_s=60.0)
    ahead(GROUPS[:1])  # the worker is up
    ahead.begin([make_group(["hang"])])
    time.sleep(0.3)
    begun = time.monotonic()
    ahead.close()
    assert time.monotonic() - begun < 50
