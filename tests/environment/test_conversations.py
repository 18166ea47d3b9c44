"""Conversations over an engine: tokens, masks, seeds, limits and rewards."""

import json
from dataclasses import replace

import numpy
import pytest
from hypothesis import example, given, settings, strategies as st
from in_one_test import each

from rlft.batch import fault
from rlft.environment.conversations import Transcript
from rlft.environment.game import Game
from rlft.environment.tool_class import ToolClass
from rlft.environment.tools import Tools
from rlft.generation.scripted import ScriptedGenerator
from rlft.types import Branch, Completion, EnvironmentFailure, FinishReason, Prompt, Rollout, Sampling
from tests.helpers.family_tokenizers import family_tokenizer

LIMITS = {
    "max_turns": 8, "max_tool_calls": None, "turn_tokens": None, "call_timeout": 10.0, "timeout": 60.0,
    "max_answer": 400, "workers": 1, "syntax": "template", "show_tools": True,
}  # fmt: skip
TOOLS = ("conversation_tools.add", "conversation_tools.say", "conversation_tools.misbehave")
SAMPLING = Sampling(max_tokens=1000, temperature=1.0)
TOKENIZER = family_tokenizer("qwen2.5")


def call(name, **arguments):
    """A call as Qwen2.5's template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def prompt(name="p", tokenizer=TOKENIZER, **metadata):
    messages = ({"role": "user", "content": "2 + 3?"},)
    ids = tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=True, return_dict=False)
    return Prompt(id=name, messages=messages, answer="5", token_ids=tuple(ids), metadata=metadata)


class Recorder(ScriptedGenerator):
    """A scripted policy that keeps what it was asked."""

    def __init__(self, answers, tokenizer=TOKENIZER):
        super().__init__(answers, tokenizer)
        self.asked = []

    def sample(self, prompts, n, seeds, sampling):
        self.asked.append((list(prompts), n, list(seeds), sampling))
        return super().sample(prompts, n, seeds, sampling)


def tools(*names, **limits):
    return Tools(**{**LIMITS, **limits}, tools=names or TOOLS)


def duck(name, **limits):
    return ToolClass(**{**LIMITS, "reward": "get_reward", **limits}, factory=f"conversation_tools.{name}")


def game(name):
    return Game(**LIMITS, factory=f"conversation_tools.{name}", arguments={})


def one(groups):
    [group] = groups
    [rollout] = group.rollouts
    assert fault(rollout.completion) is None
    return rollout.completion


def sampled_text(completion):
    mask = completion.mask or [True] * len(completion.token_ids)
    return TOKENIZER.decode([t for t, own in zip(completion.token_ids, mask, strict=True) if own])


def test_a_call_is_answered_and_the_ids_are_those_of_the_templates_conversation(converse):
    said = [call("add", a=2, b=3), "It is 5."]
    conversations = converse({"*": [said]}, tools("conversation_tools.add"))
    asked = prompt()
    completion = one(conversations.sample([asked], 1, [0], SAMPLING))
    made = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    messages = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    whole = str(TOKENIZER.apply_chat_template(messages, tokenize=False)).removesuffix("\n")
    # The prompt of this test shows no tools: the plan's scan does. Qwen2.5 writes a newline before a call's tag.
    assert TOKENIZER.decode([*asked.token_ids, *completion.token_ids]) == whole
    # Only what was sampled is the policy's: both turns with their end tokens.
    assert sampled_text(completion) == f"{said[0]}<|im_end|>{said[1]}<|im_end|>"
    assert completion.finish_reason is FinishReason.stop
    first, last = completion.turns
    [made] = first.calls
    assert (made.name, made.arguments, made.answer, made.failed) == ("add", '{"a": 2, "b": 3}', "5", False)
    assert (last.end, last.text, last.calls) == (len(completion.token_ids), "It is 5.", ())
    assert completion.mask[first.end - 1]
    assert not completion.mask[first.end]


def test_a_policy_that_calls_nothing_says_what_it_says_without_an_environment(converse):
    """Also the seeds and limits that the engine gets are those of a run without an environment."""
    texts = {"*": ["one", "two", "three"]}
    conversations = converse(texts, tools())
    prompts, seeds = [prompt("p"), prompt("q")], [10, 13]
    groups = conversations.sample(prompts, 3, seeds, SAMPLING)
    alone = ScriptedGenerator(texts, TOKENIZER).sample(prompts, 3, seeds, SAMPLING)
    [(asked, n, given, sampling)] = conversations.generator.asked
    assert ([p.token_ids for p in asked], n, given) == ([p.token_ids for p in prompts], 3, seeds)
    assert sampling == SAMPLING
    for group, single in zip(groups, alone, strict=True):
        assert group.prompt is single.prompt
        for rollout, other in zip(group.rollouts, single.rollouts, strict=True):
            assert replace(rollout.completion, turns=()) == other.completion
            assert len(rollout.completion.turns) == 1


def test_a_rounds_prompts_are_whole_conversations_with_seeds_and_rests_of_their_own(converse):
    texts = {"*": [[call("say", text="a"), "done"], "nothing to call"]}
    conversations = converse(texts, tools())
    sampling = replace(SAMPLING, max_tokens=200)
    [group] = conversations.sample([prompt()], 4, [6], sampling)
    first, second = conversations.generator.asked
    assert (first[1], second[1]) == (4, 1)
    # Seeds 6, 7, 8, 9 modulo two texts: siblings 0 and 2 call.
    calling = [group.rollouts[0].completion, group.rollouts[2].completion]
    assert len(second[0]) == 2
    for asked, completion in zip(second[0], calling, strict=True):
        # What stands before the last turn: the whole completion but "done" and its end token.
        last = completion.turns[-1].end - len(TOKENIZER("done")["input_ids"]) - 1
        assert asked.token_ids == (*prompt().token_ids, *completion.token_ids[:last])
        assert asked.next_turn.max_tokens == 200 - last
    assert len({*first[2], *second[2]}) == 3, "a seed for each turn"
    again = converse(texts, tools()).sample([prompt()], 4, [6], sampling)
    assert again == [group], "it replays"


def test_conversations_do_not_depend_on_those_beside_them(converse):
    texts = {"*": [[call("increase", by=1), call("draw"), "done"], [call("draw"), "done"], "no"]}
    prompts, seeds = [prompt(str(i)) for i in range(6)], [100 * i for i in range(6)]
    together = converse(texts, duck("Counter", workers=2)).sample(prompts, 3, seeds, SAMPLING)
    in_parts = converse(texts, duck("Counter")).sample(prompts, 3, seeds, SAMPLING)
    cut = converse(texts, duck("Counter"), at_once=3)
    assert together == in_parts == cut.sample(prompts, 3, seeds, SAMPLING)
    # at_once=3 is a group at a time: its first round has one prompt.
    assert len(cut.generator.asked[0][0]) == 1
    turns = [turn for group in together for rollout in group.rollouts for turn in rollout.completion.turns]
    draws = {made.answer for turn in turns for made in turn.calls if made.name == "draw"}
    assert len(draws) == 12, "12 of 18 conversations draw, each from its own seed"


@pytest.mark.parametrize(("limits", "reason", "turns"), [
    ({"max_turns": 2}, FinishReason.turns, 2),
    ({"max_tool_calls": 2}, FinishReason.calls, 3),  # the third call is not made
    ({"timeout": 0.2, "call_timeout": 0.1}, FinishReason.time, 2),
    ({"turn_tokens": 5}, FinishReason.length, 1),
    ({"max_turns": 50}, FinishReason.length, None),
])  # fmt: skip
def test_each_limit_ends_a_conversation_with_its_own_reason(converse, limits, reason, turns):
    said = call("misbehave", how="hang" if reason is FinishReason.time else "well")
    conversations = converse({"*": [said]}, tools(**limits))
    completion = one(conversations.sample([prompt()], 1, [0], replace(SAMPLING, max_tokens=400)))
    assert completion.finish_reason is reason
    assert completion.finish_reason.is_limit
    assert len(completion.token_ids) <= 400
    if turns is not None:
        assert len(completion.turns) == turns
    else:  # another answer with the start of a turn would fill it: there is no room for a token after it
        assert len(completion.token_ids) > 400 - 100
    if reason is FinishReason.turns:
        assert completion.turns[-1].calls[0].answer == "well", "the last turn's calls are made: they may count"
        assert completion.turns[-1].end == len(completion.token_ids), "and not read"
    if reason is FinishReason.calls:
        assert [c.cause for t in completion.turns for c in t.calls] == ["", "", "limit"]
    if reason is FinishReason.length and "turn_tokens" in limits:
        assert completion.num_sampled == 5


def test_parallel_calls_are_made_and_answered_in_their_order(converse):
    both = f"{call('increase', by=2)}\n{call('increase', by=3)}"
    completion = one(converse({"*": [[both, "done"]]}, duck("Counter")).sample([prompt()], 1, [0], SAMPLING))
    assert [c.answer for c in completion.turns[0].calls] == ["2", "5"]
    text = TOKENIZER.decode(list(completion.token_ids))
    assert "<tool_response>\n2\n</tool_response>\n<tool_response>\n5\n</tool_response>" in text


def test_a_class_of_trls_form_begins_by_the_row_and_gives_a_reward(converse):
    conversations = converse({"*": [[call("increase", by=2), "done"]]}, duck("Counter"))
    [plain, opened] = conversations.sample([prompt("p"), prompt("q", start=40)], 2, [0, 2], SAMPLING)
    assert [r.completion.turns[-1].reward for r in plain.rollouts] == [2.0, 2.0]
    assert [r.completion.turns[-1].reward for r in opened.rollouts] == [42.0, 42.0]
    assert plain.prompt.token_ids == prompt().token_ids
    assert opened.prompt.messages[-1]["content"] == "2 + 3?\n\nIt stands at 40."
    assert "It stands at 40.<|im_end|>\n<|im_start|>assistant\n" in TOKENIZER.decode(list(opened.prompt.token_ids))
    assert all(r.prompt is opened.prompt for r in opened.rollouts)


def test_openings_that_differ_are_masked_parts_of_completions(converse):
    conversations = converse({"*": ["done"]}, duck("DiceAtReset"))
    [group] = conversations.sample([prompt()], 2, [0], SAMPLING)
    rows = [TOKENIZER.decode([*group.prompt.token_ids, *r.completion.token_ids]) for r in group.rollouts]
    # One worker: it draws 1, then 2.
    for row, drawn in zip(rows, "12", strict=True):
        assert row.endswith(f"You have drawn {drawn}.<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>")
    for rollout in group.rollouts:
        assert fault(rollout.completion) is None
        assert sampled_text(rollout.completion) == "done<|im_end|>"
        assert rollout.completion.text == "done"
        assert rollout.completion.turns[0].end == len(rollout.completion.token_ids)


def test_a_worker_that_dies_takes_no_conversations_state_along(converse):
    """Sibling 0 kills the worker that both live in, after both have counted; they go on from where they were."""
    scripts = [[*(call("increase", by=by) for by in steps), "done"] for steps in ((3, 99, 4), (10, -1, 20))]
    texts = {"*": scripts}
    [group] = converse(texts, duck("Counter")).sample([prompt(start=100)], 2, [0], SAMPLING)
    dying, other = (r.completion for r in group.rollouts)
    assert [c.cause for t in dying.turns for c in t.calls] == ["", "died", ""]
    assert [c.answer for t in other.turns for c in t.calls] == ["110", "Error: ValueError: it only goes up", "130"]
    assert [r.completion.turns[-1].reward for r in group.rollouts] == [107.0, 130.0]


THOUGHTS = [f"<think>\nthought {i}\n</think>\n\nanswer {i}" for i in range(3)]
QWEN3 = family_tokenizer("qwen3")


def test_where_the_template_rewrites_history_the_policy_reads_it_rewritten_in_a_branch(converse):
    """Qwen3's drops the thinking of earlier turns when a user speaks again."""
    conversations = converse({"*": [THOUGHTS]}, game("Chatty"), tokenizer=QWEN3)
    [group] = conversations.sample([prompt(tokenizer=QWEN3)], 2, [0], SAMPLING)
    completion = group.rollouts[0].completion
    assert fault(completion) is None
    # Each sampled token stands once, with its thinking; what is read again is masked.
    sampled = [t for t, own in zip(completion.token_ids, completion.mask or (), strict=True) if own]
    assert QWEN3.decode(sampled) == "".join(f"{text}<|im_end|>" for text in THOUGHTS)
    assert [turn.reward for turn in completion.turns] == [1.0, 2.0, 3.0]
    assert len(completion.branches) == 2
    # What the policy read last is the template of the conversation so far.
    conversation = [{"role": "user", "content": "2 + 3?\n\nBegin <|im_end|>."}]
    for i, text in enumerate(THOUGHTS):
        conversation.append({"role": "assistant", "content": text})
        if i < 2:
            conversation.append({"role": "user", "content": f"<|im_start|>no {i + 1}"})
    whole = str(QWEN3.apply_chat_template(conversation, tokenize=False)).removesuffix("\n")
    assert QWEN3.decode([*group.rollouts[0].last_path()]) == whole
    assert "thought 2" in whole
    assert "thought 1" not in whole
    # As the engine was asked: the last turn's prompt is that path, and specials that were only written are text.
    end = QWEN3.convert_tokens_to_ids("<|im_end|>")
    last = conversations.generator.asked[-1][0][0].token_ids
    assert list(group.rollouts[0].last_path()[: len(last)]) == list(last)
    assert list(last).count(end) == 5, "three messages of a user and two of the policy"
    start = QWEN3.convert_tokens_to_ids("<|im_start|>")
    assert list(last).count(start) == 6, "theirs, and that of the turn to come"


def test_branches_are_counted_behind_openings_that_differ(converse):
    conversations = converse({"*": [THOUGHTS]}, game("ChattyDice"), tokenizer=QWEN3)
    [group] = conversations.sample([prompt()], 2, [0], SAMPLING)
    for rollout, drawn in zip(group.rollouts, (1, 2), strict=True):
        assert fault(rollout.completion) is None
        path = QWEN3.decode([*rollout.last_path()])
        assert path.startswith(f"<|im_start|>user\n2 + 3?\n\nBegin {drawn}.<|im_end|>\n<|im_start|>assistant\nanswer 0")
        assert path.endswith(f"{THOUGHTS[2]}<|im_end|>")


@pytest.mark.parametrize("syntax", ["json", "xml"])
def test_other_syntaxes_explain_themselves_and_answer_as_users(converse, syntax):
    json_call, xml_call = '{"name": "add", "arguments": {"a": 2, "b": 3}}', '<call tool="add"><a>2</a><b>3</b></call>'
    written = {"json": f"So {json_call}", "xml": f"So {xml_call}"}
    environment = tools("conversation_tools.add", syntax=syntax)
    completion = one(converse({"*": [[written[syntax], "5"]]}, environment).sample([prompt()], 1, [0], SAMPLING))
    assert [c.answer for c in completion.turns[0].calls] == ["5"]
    assert "<|im_start|>user\n5<|im_end|>\n<|im_start|>assistant\n" in TOKENIZER.decode(list(completion.token_ids))


def test_an_environment_that_cannot_begin_stops_the_run(converse):
    conversations = converse({"*": ["x"]}, duck("Counter"))
    with pytest.raises(EnvironmentFailure, match=r"prompt 'p' \(Error: ValueError: invalid literal.*repair its reset"):
        conversations.sample([prompt(start="no number")], 1, [0], SAMPLING)
    assert conversations.sample([prompt()], 1, [0], SAMPLING), "and the next call is none the worse"


def test_what_an_environment_puts_behind_a_prompt_takes_no_room_that_was_not_planned(converse):
    """Rows have at most 1200 tokens: the prompt, three hundred digits behind it, and what is left for the policy."""
    conversations = converse({"*": ["x" * 2000]}, duck("Counter", max_answer=3000))
    [group] = conversations.sample([prompt(start=10**300)], 1, [0], replace(SAMPLING, max_tokens=1190))
    [rollout] = group.rollouts
    assert len(group.prompt.token_ids) + len(rollout.completion.token_ids) == 1200
    assert rollout.completion.finish_reason is FinishReason.length
    with pytest.raises(EnvironmentFailure, match=r"prompt 'p' leaves no token .* raise prompts.max_tokens by"):
        conversations.sample([prompt(start=10**1300)], 1, [0], SAMPLING)


# -- the tokens of a conversation --------------------------------------------------------------------------------------
def rollout_of(transcript, prompt):
    parts = {name: tuple(getattr(transcript, name)) for name in ("token_ids", "logprobs", "mask", "branches")}
    completion = Completion(text="", finish_reason=FinishReason.stop, **parts)
    asked = Prompt(id="p", messages=(), answer="", token_ids=tuple(prompt))
    return Rollout(prompt=asked, completion=completion, policy_version=0)


# What the policy says (negative) and the contexts that it reads, then the tokens and branches that are left.
TRANSCRIPTS = {
    "what goes on": ([1, 2], [[-10, -11], [1, 2, 10, 11, 3, 4], [-12]], [-10, -11, 3, 4, -12], []),
    # 11 is dropped: shared are 1, 2 and 10, the completion's token 0.
    "history written anew": (
        [1, 2], [[-10, -11, -12], [1, 2, 10, 12, 3], [-13]], [-10, -11, -12, 12, 3, -13], [(3, 0)]),
    # Shared is the prompt's first token, which is -3.
    "a branch inside the prompt": ([1, 2, 3], [[-10], [1, 5]], [-10, 5], [(1, -3)]),
    # 20 is the completion's token 2.
    "a branch from a branch": (
        [1], [[-10, -11], [1, 20, 21], [-12], [1, 20, 30]], [-10, -11, 20, 21, -12, 30], [(2, -1), (5, 2)]),
    "the same request again": ([1, 2], [[-10], [1, 2], [-11]], [-10, -11], [(1, -1)]),
    "an empty branch": ([1, 2], [[-10], [1, 2], [1]], [-10], [(1, -2)]),
}  # fmt: skip


@each(("prompt", "told", "tokens", "branches"), TRANSCRIPTS.values())
def test_only_what_a_context_changes_is_added(prompt, told, tokens, branches):
    transcript, context = Transcript(prompt), prompt
    for ids in told:
        if ids[0] < 0:
            transcript.add([-i for i in ids], [i / 10 for i in ids])
            context = [*context, *(-i for i in ids)]
        else:
            transcript.set_context(ids)
            context = ids
    assert transcript.token_ids == [abs(i) for i in tokens]
    assert transcript.mask == [i < 0 for i in tokens]
    assert transcript.logprobs == [min(i, 0) / 10 for i in tokens]
    assert transcript.branches == [Branch(start=start, after=after) for start, after in branches]
    assert transcript.context == context


def test_the_experts_of_a_token_are_those_of_the_turn_that_read_it_first():
    def noted(number, size):
        experts = numpy.full((size, 1, 2), number, numpy.uint8)
        experts[-1] = 255  # nothing was sampled after the last token
        return experts

    transcript = Transcript([1, 2])
    transcript.add([10, 11, 12], [-1.0] * 3)
    transcript.note_experts(noted(0, 5))
    transcript.set_context([1, 2, 10, 12, 3])  # 11 is dropped
    transcript.add([13, 14], [-1.0] * 2)
    transcript.note_experts(noted(1, 7))
    assert transcript.token_ids == [10, 11, 12, 12, 3, 13, 14]
    assert transcript.experts[:, 0, 0].tolist() == [0, 0, 0, 0, 255, 1, 1, 1, 255]


def test_a_conversation_that_shares_no_token_is_another_one():
    with pytest.raises(ValueError, match="none of its tokens"):
        Transcript([1]).set_context([2, 3])


STEP = st.tuples(st.integers(1, 12), st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), max_size=3))


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=6))
@example([(2, [], []), (1, [], [1])])  # an empty branch
def test_whatever_is_read_the_last_path_is_what_was_read_and_said(steps):
    """Each step keeps the first so many tokens of the context, reads others behind them, and may say something."""
    transcript, all_said, logprobs = Transcript([7, 8, 9]), [0], [-1.0]
    transcript.add([0], [-1.0])
    for kept, heard, said in steps:
        context = [*transcript.context[:kept], *heard]
        added = transcript.added_by(context)
        before = len(transcript.token_ids)
        transcript.set_context(context)
        assert transcript.context == context
        assert len(transcript.token_ids) - before == added <= len(heard)
        new = [-float(len(logprobs) + i + 1) for i in range(len(said))]
        transcript.add(said, new)
        all_said += said
        logprobs += new
        if said:  # a row ends with a turn of the policy's
            assert list(rollout_of(transcript, [7, 8, 9]).last_path()) == transcript.context
    assert [token for token, own in zip(transcript.token_ids, transcript.mask, strict=True) if own] == all_said
    own = iter(logprobs)
    assert transcript.logprobs == [next(own) if is_own else 0.0 for is_own in transcript.mask]
    starts = [branch.start for branch in transcript.branches]
    assert starts == sorted(set(starts)), "no branch is empty"
