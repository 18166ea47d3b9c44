"""Agents that play through the endpoint: their requests are one row of tokens, their failures are told and counted."""

from dataclasses import replace

import endpoint_agents
import pytest

from rlft.batch import fault
from rlft.environment.endpoint.played import Traces
from rlft.generation.scripted import ScriptedGenerator
from rlft.loop.metrics import turn_metrics
from rlft.system.seeds import derive
from rlft.types import FinishReason, Sampling, UserError
from tests.environment.test_conversations import LIMITS as OTHERS, TOKENIZER as QWEN, Recorder, one, prompt

LIMITS = {
    **OTHERS, "call_timeout": 30.0, "timeout": 30.0, "workers": 2, "port": 0, "body_bytes": 100_000, "command": None,
}  # fmt: skip
SAMPLING = Sampling(max_tokens=200, temperature=1.0)
ASKED = prompt().messages
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TALK = "endpoint_agents.talks"


def ids_of(messages, **more):
    shown = [dict(message) for message in messages]
    return list(QWEN.apply_chat_template(shown, add_generation_prompt=True, return_dict=False, **more))


def sampled(text):
    """The tokens of a turn of the policy's."""
    return [*QWEN(text)["input_ids"], QWEN.eos_token_id]


def completions(groups):
    found = [rollout.completion for group in groups for rollout in group.rollouts]
    assert [fault(completion) for completion in found] == [None] * len(found)
    return found


def rewards(groups):
    return [[turn.reward for turn in completion.turns] for completion in completions(groups)]


def test_an_agent_that_asks_once_samples_what_a_run_without_one_does(play):
    """The same prompts, seeds and lengths reach the engine, and the same rows come back; with a reward."""
    played = play(["5", "6"], agent="endpoint_agents.once")
    prompts = [prompt("p"), prompt("q")]
    groups = played.sample(prompts, 2, [10, 20], SAMPLING)
    plain = ScriptedGenerator({"*": ["5", "6"]}, QWEN).sample(prompts, 2, [10, 20], SAMPLING)
    for group, other in zip(groups, plain, strict=True):
        assert group.prompt == other.prompt
        for rollout, expected in zip(group.rollouts, other.rollouts, strict=True):
            assert rollout.completion.mask is None
            assert rollout.completion.text == expected.completion.text
            assert rollout.completion.token_ids == expected.completion.token_ids
            assert rollout.completion.finish_reason is FinishReason.stop
    assert rewards(groups) == [[1.0], [0.0], [1.0], [0.0]]
    seeds = {p.id: set() for p in prompts}
    for asked, n, own, sampling in played.generator.asked:
        assert (n, sampling) == (1, SAMPLING)
        for p, seed in zip(asked, own, strict=True):
            seeds[p.id].add(seed)
    assert seeds == {"p": {10, 11}, "q": {20, 21}}


def test_calls_and_their_answers_are_one_row_whose_answers_are_masked(play):
    """By OpenAI's own client; the row is what the template writes, with the sampled tokens as they were sampled."""
    played = play([[f"Let me see.\n{CALL}", "It is 5."]], agent="endpoint_agents.adds")
    [group] = played.sample([prompt()], 1, [0], SAMPLING)
    [completion] = completions([group])
    tools = [endpoint_agents.ADD]
    assert group.prompt.token_ids == tuple(ids_of(ASKED, tools=tools))
    first, second = sampled(f"Let me see.\n{CALL}"), sampled("It is 5.")
    between = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    middle = QWEN(between, add_special_tokens=False)["input_ids"]
    assert list(completion.token_ids) == [*first, *middle, *second]
    assert completion.mask == (*[True] * len(first), *[False] * len(middle), *[True] * len(second))
    assert completion.branches == ()
    [turn, last] = completion.turns
    [call] = turn.calls
    assert (call.name, call.arguments, call.answer, call.failed) == ("add", '{"a": 2, "b": 3}', "5", False)
    assert (turn.answer, turn.reward, last.reward, last.text) == ("5", None, 1.0, "It is 5.")


class Letters(Recorder):
    """A policy that samples each letter as a token of its own, which no tokenizer makes of its text."""

    def sample(self, prompts, n, seeds, sampling):
        groups = super().sample(prompts, n, seeds, sampling)
        return [replace(group, rollouts=tuple(map(self._in_letters, group.rollouts))) for group in groups]

    def _in_letters(self, rollout):
        ids = [token for letter in rollout.completion.text for token in QWEN(letter)["input_ids"]]
        ids.append(QWEN.eos_token_id)
        completion = replace(rollout.completion, token_ids=tuple(ids), logprobs=(0.0,) * len(ids))
        return replace(rollout, completion=completion)


def test_sampled_tokens_are_never_made_again_from_text(play):
    played = play([["user", "assistant"]], agent=TALK)
    played.generator = Letters({"*": [["user", "assistant"]]})
    [group] = played.sample([prompt()], 1, [0], SAMPLING)
    [completion] = completions([group])
    letters = [QWEN(letter)["input_ids"][0] for letter in "user"]
    assert letters != QWEN("user")["input_ids"]
    assert list(completion.token_ids[:5]) == [*letters, QWEN.eos_token_id]
    assert completion.branches == ()
    [second] = [asked[0] for asked, *_ in played.generator.asked if asked[0].next_turn and asked[0].next_turn.turn == 1]
    assert list(second.token_ids[len(group.prompt.token_ids) :][:5]) == [*letters, QWEN.eos_token_id]


def test_seeds_of_later_turns_are_those_of_other_environments(play):
    played = play([["a", "b"]], agent=TALK)
    completion = one(played.sample([prompt()], 1, [41], SAMPLING))
    asked = played.generator.asked
    assert [own for _, _, own, _ in asked] == [[41], [derive(41, 1, "turn")]]
    assert [p.next_turn.turn for prompts, *_ in asked for p in prompts if p.next_turn] == [0, 1]
    end = QWEN.eos_token_id
    assert sum(t == end and not own for t, own in zip(completion.token_ids, completion.mask or (), strict=True)) == 1
    # The user's turn ends once: what was written like that token in it has stayed text.
    assert completion.text.count("<|im_end|>") == 1


def test_history_that_an_agent_rewrites_makes_a_branch(play):
    played = play([["first words", "second"]], agent="endpoint_agents.rewrites")
    completion = one(played.sample([prompt()], 1, [0], SAMPLING))
    first = sampled("first words")
    assert list(completion.token_ids[: len(first)]) == first
    [branch] = completion.branches
    assert (branch.start, branch.after) == (len(first), -1)  # behind the prompt's last token
    said = "something else<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    read = QWEN(said, add_special_tokens=False)["input_ids"]
    second = sampled("second")
    assert list(completion.token_ids[len(first) :]) == [*read, *second]
    assert completion.mask == (*[True] * len(first), *[False] * len(read), *[True] * len(second))
    assert turn_metrics([completion])["turns/branches"] == 1


def test_tokens_go_in_and_out_and_those_of_others_are_refused(play):
    played = play([["a b", "c"]], agent="endpoint_agents.by_tokens")
    ids = ids_of(ASKED)
    [group] = played.sample([prompt(ids=ids)], 1, [0], SAMPLING)
    [completion] = completions([group])
    first, second = sampled("a b"), sampled("c")
    assert list(completion.token_ids) == [*first, *ids[-3:], *second]
    assert rewards([group]) == [[None, float(len(second))]]


def test_limits_end_a_conversation_with_their_reason(play):
    """Each is told to the agent, by OpenAI's status 400, and is the row's finish reason."""
    for keys, sampling, turns, end in (
        ({"max_turns": 2}, SAMPLING, 2, FinishReason.turns),
        ({}, Sampling(max_tokens=30, temperature=1.0), 2, FinishReason.length),  # 2 turns of 3 tokens, 20 between
        ({"turn_tokens": 1}, SAMPLING, 3, FinishReason.length),  # the last turn was cut
    ):
        played = play([["a b", "c d", "e f"]], agent=TALK, **keys)
        completion = one(played.sample([prompt(turns=3)], 1, [0], sampling))
        assert (len(completion.turns), completion.finish_reason) == (turns, end)
        assert completion.turns[-1].reward == turns
        assert len(completion.token_ids) <= sampling.max_tokens


def test_requests_beside_each_other_of_one_conversation_and_several_answers_are_refused(play):
    played = play(["word"], agent="endpoint_agents.asks_at_once")
    assert rewards(played.sample([prompt()], 1, [0], SAMPLING)) == [[400.0]]  # n=2


def test_what_the_policy_would_never_read_is_refused_in_every_turn(play):
    """Names, fields and wishes that are not known, and the name of a tool that was not called; the rest goes on."""
    played = play([["five", "six"]], agent="endpoint_agents.is_unread")
    groups = played.sample([prompt()], 1, [0], SAMPLING)
    assert rewards(groups) == [[None, 10.0]]  # 5 in each turn
    [completion] = completions(groups)
    assert completion.branches == ()


def test_what_was_recorded_is_played_again_bit_for_bit_until_nobody_can_come_back_to_it(play, tmp_path):
    """An agent by the clock plays otherwise each time, but what is recorded; a row that branches comes back, too."""
    agent = "endpoint_agents.by_the_clock"
    first = play(["one two three four", "b"], Traces(tmp_path, 2), agent=agent)
    prompts = [prompt("p"), prompt("q")]
    played = first.sample(prompts, 2, [3, 5], SAMPLING)
    second = play(["something else"], Traces(tmp_path, 2), agent=agent)
    assert second.sample(prompts, 2, [3, 5], SAMPLING) == played
    assert second.generator.asked == []
    assert second.sample(prompts, 2, [3, 6], SAMPLING) != played
    branched = play([["first words", "second"]], Traces(tmp_path, 2), agent="endpoint_agents.rewrites")
    row = branched.sample([prompt()], 1, [0], SAMPLING)
    assert branched.sample([prompt()], 1, [0], SAMPLING) == row
    assert row[0].rollouts[0].completion.branches
    [newest, *_] = sorted((tmp_path / "traces").iterdir())
    newest.write_bytes(newest.read_bytes()[:-2] + b"9]")

    def everything_again():
        for seeds in ([3, 5], [3, 6]):
            second.sample(prompts, 2, seeds, SAMPLING)
        branched.sample([prompt()], 1, [0], SAMPLING)

    with pytest.raises(UserError, match=r"^environment: a recorded trace is damaged \(its content is not what was"):
        everything_again()
    names = [f"version_{version:06d}-{'0' * 16}.json" for version in (4, 6, 7)]
    for name in names:
        (tmp_path / "traces" / name).touch()
    Traces(tmp_path, 2).recorded(8, prompts, 2, [1, 1], SAMPLING, lambda: played)
    kept = {file.name for file in (tmp_path / "traces").iterdir()}
    assert {name for name in names if name in kept} == set(names[1:])
    assert not any(name.startswith("version_000000") for name in kept)
