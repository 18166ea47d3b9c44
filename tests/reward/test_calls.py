from rlft.batch import step_rewards
from rlft.reward.calls import Calls, turns_in_text
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, StepScores, ToolCall, Turn

PROMPT = Prompt(id="p", messages=({"role": "user", "content": "What is 1 + 2?"},), answer="3", token_ids=(7, 7))
GOOD = ToolCall(name="calculate", arguments="", answer="3")
BAD = ToolCall(name="calculate", arguments="", answer="Error: no", failed=True, cause="malformed")


def conversation(*turns):
    """Of (what is said, what is answered, its calls); a character is a token, and `|` stands where the turns meet."""
    text, mask, made = "", [], []
    for said, answer, calls in turns:
        mask += [True] * len(said)
        text += said
        made.append(Turn(end=len(text), text=said, answer=answer, calls=calls))
        between = f"|{answer}|" if answer else ""
        text, mask = text + between, [*mask, *[False] * len(between)]
    tokens = {"token_ids": tuple(map(ord, text)), "logprobs": (0.0,) * len(text), "mask": tuple(mask)}
    return Completion(text=text, finish_reason=FinishReason.stop, turns=tuple(made), **tokens)


def group(*completions):
    rollouts = tuple(Rollout(prompt=PROMPT, completion=each, policy_version=0) for each in completions)
    return Group(prompt=PROMPT, rollouts=rollouts)


def test_a_turn_that_calls_is_a_step_scored_by_whether_all_its_calls_were_answered():
    # "<a>" ends before character 3, "<b>" begins behind "|no|" and ends before 3 + 4 + 3 = 10.
    both = conversation(("<a>", "no", (GOOD, BAD)), ("<b>", "3", (GOOD,)), ("3", "", ()))
    one = conversation(("<a>", "3", (GOOD, GOOD)), ("3", "", ()))
    scored = Calls(max_turns=4)(group(both, one, conversation(("3", "", ()))))
    assert scored == [
        StepScores(values=(0.0, 1.0), ends=(3, 10)),
        StepScores(values=(1.0,), ends=(3,)),
        StepScores(values=(), ends=()),
    ]


def test_further_turns_with_calls_are_no_steps():
    completion = conversation(("<a>", "no", (BAD,)), ("<b>", "3", (GOOD,)), ("<b>", "3", (GOOD,)))
    assert Calls(max_turns=1)(group(completion)) == [StepScores(values=(0.0,), ends=(3,))]
    assert Calls(max_turns=2)(group(completion)) == [StepScores(values=(0.0, 1.0), ends=(3, 10))]


def test_an_answer_that_repeats_the_next_turn_is_passed_over():
    completion = conversation(("<a>", "try <b>!", (BAD,)), ("<b>", "3", (GOOD,)))
    # "<a>" is 3 characters, "|try <b>!|" 10, "<b>" 3.
    assert [end for _, end in turns_in_text(completion)] == [3, 16]


def test_a_step_stands_at_the_last_token_of_its_turn():
    completion = conversation(("<a>", "no", (BAD,)), ("<b>", "3", (GOOD,)), ("3", "", ()))
    groups = [group(completion)]
    steps = [Calls(max_turns=4)(groups[0])]
    shape = 1, len(PROMPT.token_ids) + len(completion.token_ids)
    rewards_BT, ends_BT = step_rewards(groups, steps, shape, lambda ids: "".join(map(chr, ids)))
    # Two tokens of the prompt; the turns' last tokens are the completion's 2 and 9.
    assert ends_BT[0].nonzero().flatten().tolist() == [4, 11]
    assert rewards_BT[0, [4, 11]].tolist() == [0.0, 1.0]
