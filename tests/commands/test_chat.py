"""A conversation with a checkpoint: with what was trained, asked as it was trained, in a pipe and in a terminal."""

import contextlib
import io
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest
import torch

import rlft
from rlft.commands import chat
from rlft.commands.chat import COMMANDS, Terminal, open_talk
from rlft.config.compose import compose
from rlft.generation.transformers import TransformersGenerator
from rlft.logger.console import open_terminal
from rlft.runs import checkpoint, run_folder
from rlft.runs.find import find
from rlft.runs.lines import silent
from rlft.system.interrupt import Terminated
from rlft.system.text import visible
from rlft.types import Completion, FinishReason, Group, Rollout, Sampling, UserError

QUESTION, ANSWER = "What is 47 + 85?", "132"
BARE = ["model.path=embedded:tiny-arithmetic", "model.device=cpu", "generation.max_tokens=32", "scoring.workers=0"]


@pytest.fixture
def open_chat():
    """Opens conversations, by a run's place or a bare model's config; the one before is closed."""
    opened = []

    def open_it(place=None, raw=False, plain=None):
        while opened:
            opened.pop().__exit__(None, None, None)
        config = plain or (compose(BARE) if place is None else place.config)
        opened.append(open_talk(chat.read(config, raw), place, raw, silent))
        return opened[-1].__enter__()

    yield open_it
    while opened:
        opened.pop().__exit__(None, None, None)


@pytest.fixture
def typed(monkeypatch, capsys):
    """Types these lines into a pipe; returns what is printed, as lines."""

    def talk(*lines, place=None, plain=None):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        config = plain or (compose(BARE) if place is None else place.config)
        chat.run(chat.read(config, False), place, False, silent)
        return capsys.readouterr().out.splitlines()

    return talk


def answer_by(roles, prompt, adapter):
    """The most likely answer of the policy, or of the bare base."""
    generator = TransformersGenerator(roles, roles.backbone.tokenizer, torch.device("cpu"), 1)
    if adapter:
        generator.load(roles.publish(0))
    [group] = generator.sample([prompt], 1, [0], Sampling(max_tokens=32, temperature=0.0))
    return group.rollouts[0].completion


# -- who answers -----------------------------------------------------------------------------------------------------
def test_the_trained_policy_answers_and_the_base_to_compare(trained, make_roles, make_prompt, typed):
    roles, prompt, place = make_roles(), make_prompt(QUESTION), find(trained)
    greedy = {**place.config, "generation": {**place.config["generation"], "temperature": 0.0}}
    saved = checkpoint.load_newest(run_folder.checkpoints(trained), silent)
    roles.restore(saved.adapters)
    policy, base = answer_by(roles, prompt, True), answer_by(roles, prompt, False)
    assert policy.text != base.text, "there is something to compare"
    roles.close()
    shown = typed(QUESTION, "", "/base", place=replace(place, config=greedy))
    told = [f"[{who}{len(c.token_ids)} tokens" for who, c in (("", policy), ("base, ", base))]
    shown = [line.split(" (cut")[0].removesuffix("]") for line in shown]
    assert shown == [*visible(policy.text).splitlines(), told[0], *visible(base.text).splitlines(), told[1]]


def test_sampled_answers_are_the_same_in_every_chat_and_differ_within_one(trained, open_chat):
    first, second = (open_chat(find(trained)).ask(QUESTION).completion for _ in range(2))
    assert first == second
    talk = open_chat(find(trained))
    ids = []
    for _ in range(4):
        ids.append(tuple(talk.ask(QUESTION).completion.token_ids))
        talk.begin_anew()
    assert len(set(ids)) > 1, "each question has random numbers of its own"


def test_a_bare_model_is_its_own_base(typed):
    shown = typed(QUESTION, "/base", plain=compose([*BARE, "generation.temperature=0"]))
    half = len(shown) // 2
    assert len(shown) >= 4
    assert shown[: half - 1] == shown[half:-1]
    assert shown[-1] == f"[base, {shown[half - 1].removeprefix('[')}"


def test_a_run_of_all_weights_answers_by_them(trained, tiny_path, tmp_path, open_chat):
    shutil.copytree(trained, tmp_path / "run")
    _, folder = checkpoint.finished(run_folder.checkpoints(tmp_path / "run"))
    shutil.rmtree(folder / "policy")
    shutil.copytree(tiny_path, folder / "model")
    checkpoint._write_manifest(folder)
    place = find(tmp_path / "run")
    talk = open_chat(place)
    bare = compose([*BARE, f"seed={place.config['seed']}"])
    assert talk.ask(QUESTION).completion == open_chat(plain=bare).ask(QUESTION).completion
    talk = open_chat(place)
    talk.ask(QUESTION)
    with pytest.raises(UserError, match=r"^/base: the run trained all weights"):
        talk.ask_base()


def test_a_reward_model_is_refused(make_roles, save_run, open_chat):
    roles = make_roles(noise=0.05)
    weights, config = roles.weights("policy"), roles.adapter_config()
    roles.close()
    with pytest.raises(UserError, match=r"^run: holds a reward model, which writes no text"):
        open_chat(save_run(adapters={"reward": weights}, config=config))


# -- how it is asked -------------------------------------------------------------------------------------------------
def test_the_conversation_is_asked_with_the_runs_prompt_and_its_history(open_chat, tmp_path):
    data = ["data=jsonl", f"data.path={tmp_path / 'gone.jsonl'}", "data.system_prompt=Hi."]
    plain = compose([*BARE, *data, "data.prompt_template='Q: {question}'"])
    talk = open_chat(plain=plain)
    first = talk.ask("one")
    assert first.prompt.messages == ({"role": "system", "content": "Hi."}, {"role": "user", "content": "Q: one"})
    second = talk.ask("two")
    assert second.prompt.messages == (
        *first.prompt.messages,
        {"role": "assistant", "content": first.completion.text},
        {"role": "user", "content": "Q: two"},
    )
    tokenizer = talk.tokenizer
    messages = list(second.prompt.messages)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(second.prompt.token_ids) == expected
    talk = open_chat(plain=plain, raw=True)
    assert talk.ask("one").prompt.messages == ({"role": "user", "content": "one"},)
    talk = open_chat(plain={**plain, "prompts": {**plain["prompts"], "style": "raw"}})
    assert list(talk.ask("one").prompt.token_ids) == tokenizer("Hi.\n\nQ: one")["input_ids"]


def test_an_answer_ends_at_a_stop_string_and_its_text_before_it(typed, open_chat):
    """The model writes <think>..</think><answer>..</answer>; stopped at </think>, it never comes to the answer."""
    greedy = [*BARE, "generation.temperature=0"]
    whole_stop = [*greedy, "generation.stop=['</think>']", "generation.include_stop_str_in_output=true"]
    shown = typed(QUESTION, plain=compose(whole_stop))
    whole = open_chat(plain=compose(greedy)).ask(QUESTION).completion
    thought, stop, rest = whole.text.partition("</think>")
    assert stop
    assert rest
    for include, text in (("false", thought), ("true", thought + stop)):
        stopping = ["generation.stop=['</think>']", f"generation.include_stop_str_in_output={include}"]
        talk = open_chat(plain=compose([*greedy, *stopping]))
        answer = talk.ask(QUESTION).completion
        assert (answer.text, answer.finish_reason) == (text, FinishReason.stop)
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert talk.tokenizer.decode(list(answer.token_ids)) == thought + stop, "all of its tokens are kept"
        assert talk.ask("and now?").prompt.messages[1] == {"role": "assistant", "content": text}
    assert shown == [*visible(thought + stop).splitlines(), f"[{len(answer.token_ids)} tokens]"]


def test_a_stop_that_never_comes_is_refused_in_a_chat(open_chat):
    with pytest.raises(UserError, match=r"^generation\.stop: is not a token id of the model, which has 272, got 999"):
        open_chat(plain=compose([*BARE, "generation.stop=[999]"]))


def test_raw_is_true_or_false():
    assert [chat.read_raw(word) for word in (None, "false", "true")] == [False, False, True]
    with pytest.raises(UserError, match=r"^raw: must be true or false, got yes; write raw=true$"):
        chat.read_raw("yes")


def always_says(patch, text, finish=FinishReason.stop):
    """Has every answer be this text, a token of one byte each; (messages, temperature) of each question from now on."""
    asked = []

    def sample(self, prompts, n, seeds, sampling):
        ids = tuple(self.tokenizer(text)["input_ids"])
        said = Completion(text=text, token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason=finish)
        asked.extend((tuple(m["content"] for m in prompt.messages), sampling.temperature) for prompt in prompts)
        return [Group(prompt=p, rollouts=(Rollout(prompt=p, completion=said, policy_version=0),)) for p in prompts]

    patch.setattr(TransformersGenerator, "sample", sample)
    return asked


def test_commands_change_the_conversation(monkeypatch, typed):
    asked = always_says(monkeypatch, "ok")
    lines = ["a", "b", "/new", "c", "/temperature 0.5", "/system Be brief.", "d", "//e", "/system", "f", "/quit", "g"]
    shown = typed(*lines)
    assert asked == [
        (("a",), 1.0), (("a", "ok", "b"), 1.0), (("c",), 1.0), (("Be brief.", "d"), 0.5),
        (("Be brief.", "d", "ok", "/e"), 0.5), (("f",), 0.5),
    ]  # fmt: skip
    assert shown.count("ok") == 6
    assert "a new conversation with this system prompt" in shown
    assert "a new conversation with no system prompt" in shown


WRONG = {  # {what is typed: what is told}
    "/scroe": "/scroe: there is no such command; did you mean /score? /help lists them; "
    "begin with // to say it to the model",
    "/base": "/base: there is no question yet; ask one first",
    "/score 3": "/score: there is no question yet; ask one first",
    "/score": "/score: there is no question yet; ask one first",
    "/temperature hot": "/temperature: must be a number, 0 or more, got hot; try 0.7",
    "/temperature -1": "/temperature: must be a number, 0 or more, got -1; try 0.7",
    "/temperature nan": "/temperature: must be a number, 0 or more, got nan; try 0.7",
    "/temperature": "/temperature: must be a number, 0 or more, got nothing; try 0.7",
}


def test_a_wrong_word_is_told_and_the_chat_goes_on(typed):
    assert typed(*WRONG, "/help") == [*WRONG.values(), *COMMANDS.splitlines()]


def test_a_conversation_longer_than_the_context_is_not_cut_in_silence(open_chat):
    talk = open_chat()
    with pytest.raises(
        UserError, match=r"^/new: the conversation has \d{3} tokens, and 32 more .* context of 512 tokens; start a new"
    ):
        talk.ask("x" * 480)
    assert talk.turns == ()
    talk.ask("x" * 400)


def test_what_is_interrupted_was_never_said(open_chat, monkeypatch):
    talk = open_chat()
    first = talk.ask("one")
    turns = talk.turns
    with monkeypatch.context() as patched:
        patched.setattr("rlft.generation.decoding.draw", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            talk.ask("two")
    assert (talk.turns, talk.last) == (turns, first)
    assert talk.ask("two").prompt.messages[-1] == {"role": "user", "content": "two"}


def press(terminal, monkeypatch, *presses):
    """Does at the prompt what a person does, lines and exceptions one after the other; returns how many were read."""
    read = iter(presses)
    count = 0

    def answer(prompt):
        nonlocal count
        count += 1
        what = next(read)
        if isinstance(what, str):
            return what
        raise what

    monkeypatch.setattr(terminal, "is_person", True)
    monkeypatch.setattr(terminal, "_read", answer)
    terminal.run()
    return count


def test_a_second_ctrl_c_at_the_prompt_ends_the_chat_and_sigterm_always_does(open_chat, monkeypatch):
    terminal = Terminal(open_chat(), open_terminal())
    ctrl_c = KeyboardInterrupt()
    assert press(terminal, monkeypatch, ctrl_c, "/help", ctrl_c, "/new", EOFError()) == 5, "never twice in a row"
    for presses in ((ctrl_c, ctrl_c, "/help"), (Terminated(), "/help")):
        with pytest.raises(KeyboardInterrupt):
            press(terminal, monkeypatch, *presses)


# -- what is shown ---------------------------------------------------------------------------------------------------
def test_nothing_that_a_model_writes_moves_or_recolours_anything(monkeypatch, typed):
    always_says(monkeypatch, "\x1b[2J\x1b]0;title\x07a\rb\u202e[red]c\n\x9bd", FinishReason.length)
    *shown, told = typed("go")
    assert shown == [r"\x1b[2J\x1b]0;title\x07a\rb\u202e[red]c", r"\x9bd"]
    assert told.endswith(" tokens (cut: generation.max_tokens)]")


# -- rewards ---------------------------------------------------------------------------------------------------------
RIGHT = "<think>47 + 85 = 132</think><answer>132</answer>"


@pytest.fixture
def says_right(monkeypatch):
    """Every answer is the right one to QUESTION, in its format."""
    always_says(monkeypatch, RIGHT)


def test_rewards_are_shown_given_the_right_answer_which_nobody_is_asked_for_in_a_pipe(typed, says_right):
    plain = compose([*BARE, "reward.format.weight=0.1"])
    shown = typed(QUESTION, f"/score {ANSWER}", "/score 133", "/score", QUESTION, plain=plain)
    assert shown[2:5] == ["exact_match 1 x 1", "format 1 x 0.1", "total 1.1"]
    assert shown[5:8] == ["exact_match 0 x 1", "format 1 x 0.1", "total 0.1"]
    problem = "/score: names no right answer, and in a pipe nobody is asked for it"
    assert shown[8] == f"{problem}; write it in the same line: /score <answer>"
    assert shown[9:] == shown[:2], "the next line is a question"


def test_a_reward_that_fails_is_told_and_the_chat_goes_on(typed, says_right):
    plain = compose([*BARE, "reward=[exact_match,learned]", "reward.learned.path=/gone"])
    shown = typed(QUESTION, "/score 1", "/score 1", "/new", plain=plain)
    assert all(line.startswith("reward.learned.path: the reward model cannot be read") for line in shown[2:4])
    assert shown[4:] == ["a new conversation"]


def test_a_learned_reward_scores_as_the_run_trained_it(make_roles, save_run, open_chat, says_right):
    roles = make_roles(noise=0.05)
    head = {"weight": torch.zeros(1, 128), "bias": torch.tensor([2.5])}  # says 2.5 of everything
    adapters = {"policy": roles.weights("policy"), "reward_learned": roles.weights("policy")}
    config = roles.adapter_config()
    roles.close()
    words = ["reward=[learned]", "reward.learned.weight=1.0"]
    talk = open_chat(save_run(*words, adapters=adapters, heads={"reward_learned": head}, config=config))
    assert not talk.needs_answer
    talk.ask(QUESTION)

    restore = talk.roles.restore

    def interrupted(*saved):
        signal.raise_signal(signal.SIGINT)
        restore(*saved)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(talk.roles, "restore", interrupted)
        talk.score("")
    signal.signal(signal.SIGINT, previous)
    assert talk.score("") == {"learned": (2.5, 1.0)}
    assert talk.score("") == {"learned": (2.5, 1.0)}


def test_a_run_without_rewards_says_so(open_chat, says_right):
    talk = open_chat(plain={key: value for key, value in compose(BARE).items() if key != "reward"})
    talk.ask(QUESTION)
    with pytest.raises(UserError, match=r"^/score: there are no rewards in this run's config"):
        talk.score("1")


# -- in a terminal ---------------------------------------------------------------------------------------------------
PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests in the background ignores it
from pathlib import Path
from rlft.commands import chat as chat_command
from rlft.runs.find import find
original = chat_command.Talk.ask

def ask(talk, question):
    if question == "slow":
        print("at it", file=sys.stderr)
        time.sleep(60)
    return original(talk, question)

chat_command.Talk.ask = ask
place = find(Path(sys.argv[1]))
chat_command.run(chat_command.read(place.config, False), place, False, lambda text: print(text, file=sys.stderr))
"""


def wait_until_it_sleeps(pid):
    """Returns when the main thread of the process has been waiting for something for a fifth of a second."""
    file, deadline, calm = Path(f"/proc/{pid}/stat"), time.monotonic() + 60, 0
    while file.exists() and calm < 10:
        calm = calm + 1 if file.read_text().rpartition(")")[2].split()[0] == "S" else 0
        assert time.monotonic() < deadline
        time.sleep(0.02)


STOPPED, TOKENS = r"\(stopped; Ctrl-D quits\)", r"\[\d+ tokens.*\]"
DIALOGUE = [  # (what a person types, what is shown then)
    (f"{QUESTION}\n", [TOKENS, "> "]),
    ("half a question", ["half a question"]),
    ("\x03", [STOPPED, "> "]),  # Ctrl-C
    ("slow\n", ["at it"]),
    ("\x03", [STOPPED, "> "]),
    ("/score\n", [r"the right answer \(Enter: none\): "]),
    (f"{ANSWER}\n", ["exact_match [01] x 1", "> "]),
    ("\x1b[A" * 4, [re.escape(QUESTION)]),  # up, past the answer, /score and slow: the question again
    ("\n", [TOKENS, "> "]),
    ("\x04", [pexpect.EOF]),  # Ctrl-D
]


def test_a_person_asks_edits_stops_and_leaves(trained):
    environment = {**os.environ, "PYTHONPATH": str(Path(rlft.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment |= {"TERM": "xterm-256color", "NO_COLOR": "1", "INPUTRC": os.devnull}
    child = pexpect.spawn(sys.executable, ["-c", PROGRAM, str(trained)], env=environment, encoding="utf-8", timeout=120)
    assert child.pid is not None
    child.expect_exact(f"{trained}, step_000003: temperature 1, at most 32 tokens; /help")
    child.expect_exact("> ")
    for typed, shown in DIALOGUE:
        wait_until_it_sleeps(child.pid)  # Python's input() sees a Ctrl-C between two keys only once it waits for one
        child.send(typed)
        for text in shown:
            child.expect(text)
    child.close()
    assert child.exitstatus == 0
