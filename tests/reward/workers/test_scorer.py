import pickle
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from in_one_test import each
from reward_groups import make_group
from run_processes import happens

from rlft.reward.workers.pool import packed_task
from rlft.reward.workers.reward_spec import RewardSpec, TrlReward
from rlft.reward.workers.scorer import AheadScorer, RewardError, Scorer, describe, mixed, shortened, specs
from rlft.reward.workers.worker import Loaded, Task, load, score
from rlft.types import Group, StepScores, Turn, UserError

TIMEOUT_S = 0.4


@pytest.fixture(scope="module")
def scorer():
    """Makes a Scorer of functions of naughty.py, or gives the one of the same arguments again, its workers warm."""
    made = {}

    def make(*names, workers=1, timeout_s=TIMEOUT_S, on_error="stop", **keys):
        rewards = {name: {"_target_": f"naughty.{name}", "weight": 1.0, **keys.get(name, {})} for name in names}
        arguments = repr((rewards, workers, timeout_s, on_error))
        if arguments not in made:
            made[arguments] = Scorer(specs(rewards), workers, timeout_s, on_error)
        made[arguments].num_failures = 0
        return made[arguments]

    yield make
    for opened in made.values():
        opened.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_total_is_the_weighted_sum(scorer, group, workers):
    score = scorer("length", "Bonus", workers=workers, length={"weight": 0.5}, Bonus={"weight": -2.0, "bonus": 3.0})
    scores = score([group(["a", "abc"], id="p0"), group(["", "ab"], id="p1")])
    assert scores.by_reward["length"].tolist() == [[1.0, 3.0], [0.0, 2.0]]
    # 0.5 * length - 2 * 3
    assert scores.total.tolist() == [[-5.5, -4.5], [-6.0, -5.0]]
    assert scores.total.dtype == scores.by_reward["Bonus"].dtype == torch.float64


def test_scores_stay_in_order_whichever_worker_is_done_first(scorer, group):
    scores = scorer("slow_first", workers=2)([group(["a", "b"], id=f"p{i}") for i in range(20)])
    expected = torch.tensor([[i, i + 0.1] for i in range(20)], dtype=torch.float64)
    assert torch.equal(scores.total, expected)


def test_workers_import_no_torch_and_the_caller_may_have_it(scorer, group):
    assert scorer("imports_torch")([group(["a"])]).total.tolist() == [[0.0]]
    assert scorer("imports_torch", workers=0)([group(["a"])]).total.tolist() == [[1.0]]


def test_a_scorer_returns_before_its_workers_are_up(scorer, group):
    start = time.monotonic()
    made = scorer("length", workers=3)
    returned = time.monotonic()
    made([group(["a"])])
    assert returned - start < time.monotonic() - returned


# (what the completion does, what the message says)
FAULTS = [
    ("raise", "raised ValueError: no such unit (naughty.py, line "),
    ("exit", "raised SystemExit: 0"),
    ("sleep", "exceeded its time limit of 0.4 s a group"),
    ("swallow", "exceeded its time limit of 0.4 s a group"),
    ("nan", "returned nan, not a finite number,"),
    ("text", "returned '1.0', not a finite number,"),
]
DEADLY_FAULTS = [
    ("hang", "exceeded its time limit of 0.4 s a group"),
    ("die", "took its worker process with it, which ended with exit code 0,"),
    ("segfault", "took its worker process with it, which was killed by SIGSEGV,"),
]


@pytest.mark.parametrize(("order", "message"), FAULTS + DEADLY_FAULTS)
def test_a_fault_stops_the_run_with_reward_prompt_and_completion(scorer, group, order, message):
    score = scorer("length", "naughty")
    with pytest.raises(RewardError) as stopped:
        score([group(["fine", "too"], id="p0"), group(["well", order, "yes"], id="gsm8k-17")])
    told = str(stopped.value)
    assert told.startswith(f"reward.naughty: {message}")
    assert f"on prompt 'gsm8k-17', completion 2 of 3: '{order}'; " in told
    assert "scoring.on_error" in told
    # The next call works: a worker that was killed has been replaced.
    assert score([group(["fine"])]).by_reward["naughty"].tolist() == [[4.0]]


def test_a_fixed_score_is_given_to_the_failing_completions_only(scorer, group):
    score, orders = scorer("length", "naughty", on_error=-1), [order for order, _ in FAULTS + DEADLY_FAULTS]
    scores = score([*(group(["ab", order, "abcd"], id=order) for order in orders), group(["a", "b", "c"], id="fine")])
    assert scores.by_reward["naughty"].tolist() == [*([2.0, -1.0, 4.0] for _ in orders), [1.0, 1.0, 1.0]]
    assert scores.by_reward["length"].tolist() == [*([2.0, len(order), 4.0] for order in orders), [1.0, 1.0, 1.0]]
    assert score.num_failures == len(orders)
    assert DEADLY_FAULTS[-1][1] in score.last_failure


@pytest.mark.parametrize(("order", "message"), FAULTS)
def test_without_workers_faults_are_told_all_the_same(scorer, group, order, message):
    with pytest.raises(RewardError, match=f"completion 2 of 2: '{order}'") as stopped:
        scorer("naughty", workers=0)([group(["fine", order])])
    assert message in str(stopped.value)


@pytest.mark.parametrize("order", ["raise", "sleep"])
@pytest.mark.parametrize("reward", ["naughty_later", "lazy"])
def test_the_completion_is_found_even_where_watching_doesnt_tell(scorer, group, reward, order):
    score = scorer(reward, on_error=0)
    assert score([group(["ab", order, "abcd"])]).total.tolist() == [[2.0, 0.0, 4.0]]
    assert "completion 2 of 3" in score.last_failure


def test_a_hang_that_is_known_is_not_gone_through_again(scorer, group, tmp_path):
    score = scorer("diary", on_error=0, diary={"path": str(tmp_path / "diary")})
    assert score([group(["ab", "sleep", "abcd"])]).total.tolist() == [[2.0, 0.0, 4.0]]
    # The group up to the hang, then only the others one at a time.
    assert (tmp_path / "diary").read_text() == "ab sleep ab abcd "


def test_several_faults_in_a_group_are_each_found(scorer, group):
    score = scorer("naughty", on_error=0)
    assert score([group(["raise", "ab", "nan", "die", "abcde"])]).total.tolist() == [[0.0, 2.0, 0.0, 0.0, 5.0]]
    assert score.num_failures == 3


def test_the_first_fault_in_order_is_the_one_told(scorer, group):
    # The first group's reward sleeps until its limit, while the other worker finds the second fault at once.
    with pytest.raises(RewardError, match="prompt 'p0', completion 1 of 1"):
        scorer("naughty", workers=2)([group(["sleep"], id="p0"), group(["raise"], id="p1")])


def test_hangs_do_not_add_up(scorer, group):
    score = scorer("naughty", on_error=0)
    score([group(["fine"])])  # so that the worker is up
    start = time.monotonic()
    scores = score([group(["sleep"] * 40)])
    # The limit once for the group and twice alone, 1.2 s; forty times alone would make it 16 s.
    assert time.monotonic() - start < 15
    assert scores.total.tolist() == [[0.0] * 40]
    assert score.num_failures == 40


def test_a_group_that_fails_only_as_a_whole_is_told_so(scorer, group):
    with pytest.raises(RewardError, match="prompt 'p0', its 2 completions as a whole"):
        scorer("dislikes_company")([group(["a", "b"])])
    score = scorer("dislikes_company", on_error=0.5)
    assert score([group(["a", "b"])]).total.tolist() == [[0.5, 0.5]]
    assert score.num_failures == 2


def returning(values):
    return lambda group: values


@each(
    ("values", "scores"),
    [
        ([1, True], [1.0, 1.0]),
        ((0.5, False), [0.5, 0.0]),
        (np.ones(2, dtype=np.float32), [1.0, 1.0]),
        ([np.float16(0.5), np.int64(2)], [0.5, 2.0]),
        ([np.array(0.5), np.array([2.0])], [0.5, 2.0]),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        ([torch.tensor(1), torch.tensor([2.0])], [1.0, 2.0]),
        ((float(n) for n in range(2)), [0.0, 1.0]),
        ([1e12, -1e12], [1e12, -1e12]),
    ],
)
def test_numbers_of_every_kind_are_scores(group, values, scores):
    assert score(Loaded(reward=returning(values), scores_steps=False), group(["a", "b"]), 10.0, [0, 0]) == scores


LISTED = "return a list of numbers, one for each completion, in their order"


@each(
    ("values", "problem", "remedy"),
    [
        (1.0, "returned float, not a list of 2 numbers", LISTED),
        (None, "returned NoneType, not a list of 2 numbers", LISTED),
        (np.float64(1), "returned float64, not a list of 2 numbers", LISTED),
        (np.array(1.0), "returned ndarray, not a list of 2 numbers", LISTED),
        (torch.tensor(1.0), "returned Tensor, not a list of 2 numbers", LISTED),
        (True, "returned bool, not a list of 2 numbers", LISTED),
        ("11", "returned str, not a list of 2 numbers", LISTED),
        (b"11", "returned bytes, not a list of 2 numbers", LISTED),
        ({0: 1.0, 1: 0.0}, "returned dict, not a list of 2 numbers", LISTED),
        ({0.0, 1.0}, "returned set, not a list of 2 numbers", LISTED),
        ([1.0], "returned 1 score for 2 completions", LISTED),
        ([1.0] * 3, "returned 3 scores for 2 completions", LISTED),
        ([], "returned 0 scores for 2 completions", LISTED),
        ([1.0, None], "returned None, not a finite number,", "return 0.0 where the reward does not apply"),
        ([1.0, float("nan")], "returned nan, not a finite number,", ""),
        ([1.0, float("inf")], "returned inf, not a finite number,", ""),
        ([1.0, "1"], "returned '1', not a finite number,", ""),
        ([1.0, 1j], "returned 1j, not a finite number,", ""),
        ([1.0, [1.0, 2.0]], "returned [1.0, 2.0], not a finite number,", ""),
        ([1.0, torch.ones(2)], "returned tensor([1., 1.]), not a finite number,", ""),
        ([1.0, 1e39], "returned 1e+39, larger than a score may be", "divide the reward by a constant"),
        ([1.0, -1e20], "returned -1e+20, larger than a score may be", "divide the reward by a constant"),
        ([1.0, 10**20], "returned 100000000000000000000, larger than", "divide the reward by a constant"),
    ],
)
def test_what_is_no_score_is_told_with_what_to_do(group, values, problem, remedy):
    for reward in (returning(values), TrlReward(function=lambda **_: values, keys={}, form="texts")):
        if isinstance(reward, TrlReward) and isinstance(values, list) and None in values:
            continue  # there None means that the reward does not apply
        failure = score(Loaded(reward=reward, scores_steps=False), group(["a", "b"]), 10.0, [0, 0])
        assert failure.problem.startswith(problem)
        assert failure.remedy == remedy
        message = describe("mine", group(["a", "b"]), failure, None)
        assert message.startswith(f"reward.mine: {problem}")
        assert message.endswith(remedy or "scoring.on_error=0")


def test_a_score_may_be_as_large_as_its_weight_allows(group):
    for weight, largest in ((1.0, 1e12), (1e-3, 1e15), (1e6, 1e6), (0.0, 1e12)):
        spec = RewardSpec(name="length", target="naughty.length", kwargs={}, weight=weight)
        assert load([spec])["length"].largest == pytest.approx(largest)


def test_a_small_difference_of_large_scores_counts():
    # In float32 1e8 + 1 = 1e8.
    scores = mixed({"length": [[1e8, 1e8 + 1]]}, {"length": 1.0}, [])
    assert scores.total.tolist() == scores.by_reward["length"].tolist() == [[1e8, 1e8 + 1]]


def test_a_rewards_own_on_error_goes_before_the_runs(scorer, group):
    score = scorer("naughty", naughty={"on_error": 0.25})
    assert score([group(["raise", "ab"])]).total.tolist() == [[0.25, 2.0]]


def test_a_reward_that_cannot_start_always_stops_the_run(scorer, group):
    with pytest.raises(RewardError, match="could not be started in its worker: OSError: the sandbox is not there"):
        scorer("StartsBadly", on_error=0)([group(["a"])])


def test_a_long_completion_is_shown_shortened(scorer, group):
    with pytest.raises(RewardError) as stopped:
        scorer("nothing", "naughty", nothing={"on_error": 0})([group(["raise"])])
    assert len(str(stopped.value)) < 400
    assert len(shortened("x\n" * 100_000)) < 350


def test_metadata_that_cannot_be_sent_is_told(scorer, group):
    whole = group(["a"])
    odd = replace(whole, prompt=replace(whole.prompt, metadata={"check": lambda text: True}))
    with pytest.raises(RewardError, match=r"prompt 'p0' cannot be sent .* scoring.workers=0"):
        scorer("length")([odd])
    assert scorer("length", workers=0)([odd]).total.tolist() == [[1.0]]


def test_a_group_arrives_in_the_worker_as_it_was(group):
    task = Task(key=3, group=with_turns_of(group(["a", "bc"]), [(None,), (0.5, None)]), rewards=("length",))
    assert pickle.loads(packed_task(task)) == task


def with_turns_of(group, rewards):
    """The group with these turns' rewards, a completion at a time; two tokens each, of which one is an answer's."""
    rollouts = []
    for rollout, row in zip(group.rollouts, rewards, strict=True):
        turns = tuple(Turn(end=2 * k + 1, reward=reward) for k, reward in enumerate(row))
        size = 2 * len(row)
        completion = replace(
            rollout.completion,
            token_ids=(5,) * size,
            logprobs=(0.0,) * size,
            mask=(True, False) * len(row),
            turns=turns,
        )
        rollouts.append(replace(rollout, completion=completion))
    return replace(group, rollouts=tuple(rollouts))


def test_what_an_environment_gave_for_turns_is_part_of_the_total_and_told_apart(scorer, group):
    groups = [with_turns_of(group(["ab", "abc"]), [(0.5, None), (-1.0, 0.25)]), group(["a", ""], id="p1")]
    scores = scorer("length")(groups)
    assert scores.by_reward["turns"].tolist() == [[0.5, -0.75], [0.0, 0.0]]
    assert list(scores.by_reward) == ["length", "turns"], "the first reward stays the one that says what is right"
    assert scores.total.tolist() == [[2.5, 2.25], [1.0, 0.0]]
    assert scores.outcome.tolist() == [[2.0, 3.0], [1.0, 0.0]]
    unrewarded = scorer("length")([with_turns_of(group(["ab", "abc"]), [(None,), (None,)])])
    assert list(unrewarded.by_reward) == ["length"]
    assert unrewarded.outcome is None


def test_no_reward_may_have_the_name_of_what_environments_give():
    with pytest.raises(UserError, match=r"^reward.turns: is the name under which .*; give the reward another name$"):
        specs({"turns": {"_target_": "naughty.naughty", "weight": 1.0}})


def test_a_closed_scorer_leaves_no_process(group):
    import psutil

    score = Scorer(specs({"pid": {"_target_": "naughty.reports_pid", "weight": 1.0}}), 2, TIMEOUT_S, "stop")
    pids = {int(pid) for row in score([group(["a"], id=f"p{i}") for i in range(8)]).total.tolist() for pid in row}
    assert pids
    score.close()
    score.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


# -- what the prompt has begun to say ----------------------------------------------------------------------------------
def begun(group, tail, texts, **fields):
    made = group(texts, **fields)
    prompt = replace(made.prompt, tail=tail)
    return Group(prompt=prompt, rollouts=tuple(replace(rollout, prompt=prompt) for rollout in made.rollouts))


@pytest.mark.parametrize("workers", [0, 1])
def test_rewards_read_what_the_prompt_has_begun_together_with_the_completion(group, workers):
    keys = {"_target_": "rlft.reward.format.Format", "weight": 1.0, "mode": "strict", "tags": ["think", "answer"]}
    made = begun(group, "<think>\n", ["so</think><answer>5</answer>", "<think>so</think><answer>5</answer>", "5"])
    with closing(Scorer(specs({"format": {**keys, "pattern": None}}), workers, 10.0, "stop")) as score:
        assert score([made]).total.tolist() == [[1.0, 0.0, 0.0]]


def test_ends_of_steps_are_offsets_into_the_completions_own_text(group):
    keys = {"_target_": "naughty.every_character", "weight": 1.0}
    with closing(Scorer(specs({"steps": keys}), 0, 10.0, "stop")) as score:
        [[full, empty]] = score([begun(group, "<t>", ["ab", ""])]).steps
    # Five characters with a value of 1 each: those of the tail and "a" count for the first one.
    assert full == StepScores(values=(4.0, 1.0), ends=(1, 2))
    assert empty == StepScores(values=(), ends=())


def test_completions_of_a_prompt_whose_reference_is_of_no_use_get_0_where_that_is_allowed(group):
    keys = {"_target_": "naughty.unscorable", "weight": 1.0}
    made = group(["a", "b"])
    scorer = Scorer(specs({"mine": keys}), 0, 10.0, "stop")
    with closing(scorer), pytest.raises(RewardError, match=r"data\.allow_unscorable=true"):
        scorer([made])
    with closing(Scorer(specs({"mine": keys}), 0, 10.0, "stop", allow_unscorable=True)) as score:
        assert score([made]).total.tolist() == [[0.0, 0.0]]


# -- scoring that begins before it is asked for ------------------------------------------------------------------------
LENGTHS = {name: {"_target_": f"naughty.{name}", "weight": 0.5} for name in ("length", "naughty")}
GROUPS = [make_group(["a" * (3 * i + j) for j in range(3)], id=f"p{i}") for i in range(6)]


@pytest.fixture
def open_scorers():
    """The scores, and the errors, of these two are the same."""
    opened = []

    def both(rewards, on_error="stop", timeout_s=20.0):
        alone = Scorer(specs(rewards), 1, timeout_s, on_error)
        ahead = AheadScorer(specs(rewards), 1, timeout_s, on_error)
        opened.extend([alone, ahead])
        return alone, ahead

    yield both
    for scorer in opened:
        scorer.close()


def plain(scores):
    return scores.total.tolist(), {name: values.tolist() for name, values in scores.by_reward.items()}


def naughty(name):
    return {"bad": {"_target_": f"naughty.{name}", "weight": 1.0}}


def test_scores_do_not_depend_on_when_scoring_began(open_scorers):
    alone, ahead = open_scorers(LENGTHS)
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
    _, ahead = open_scorers(LENGTHS)
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
    groups = [make_group(["fine"], id="p0"), make_group(["raise", "fine"], id="p1")]
    alone, ahead = open_scorers(naughty("naughty"))
    ahead.begin(groups)
    with pytest.raises(RewardError) as expected:
        alone(groups)
    with pytest.raises(RewardError) as caught:
        ahead(groups)
    assert str(caught.value) == str(expected.value)
    equal = [make_group(["raise", "fine"], id="p1"), make_group(["fine", "fine"], id="p2")]
    alone, ahead = open_scorers(naughty("naughty"), on_error=-2.0)
    ahead.begin(equal)
    assert plain(ahead(equal)) == plain(alone(equal))
    assert (ahead.num_failures, ahead.last_failure) == (alone.num_failures, alone.last_failure)
    assert ahead.num_failures == 1


def test_closing_does_not_wait_for_a_reward(open_scorers):
    _, ahead = open_scorers(naughty("naughty"), timeout_s=60.0)
    ahead(GROUPS[:1])  # the worker is up
    ahead.begin([make_group(["hang"])])
    time.sleep(0.3)
    begun = time.monotonic()
    ahead.close()
    assert time.monotonic() - begun < 50
