"""`rlft chat`: talk to a checkpoint, or to a bare model, in the terminal.

`Talk` is the conversation, without a terminal; `Terminal` reads lines and prints answers. Answers are sampled by rlft's
own generator from the trainer's base, so the model that answers is the model that was trained.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlft.commands.launch import import_libraries
from rlft.commands.policy import Policy, base_of, check_ends, open_roles, policy_of, sampled_by
from rlft.config.choices import closest
from rlft.config.resolved import Resolved, resolve
from rlft.config.suggest import OWN_KEYS
from rlft.runs.find import NamedRun, with_named_runs
from rlft.system.interrupt import Deferred, Terminated, handled_inside
from rlft.system.terminal import Say, command_line, override, say
from rlft.types import (
    Completion,
    FinishReason,
    Group,
    Message,
    Prompt,
    Rollout,
    Sampling,
    Split,
    UserError,
    counted,
    require,
)

if TYPE_CHECKING:
    from rich.console import Console

    from rlft.config.schema import SamplingRoot
    from rlft.environment.protocol import Environment
    from rlft.generation.engine import Generator
    from rlft.model.reward_model import LearnedReward
    from rlft.model.roles import Roles
    from rlft.reward.workers.reward_spec import RewardSpec

COMMANDS = """\
/base             the bare base answers the last question
/score [<answer>] the run's rewards for the last answer, given what would be right
/new              forgets the conversation
/system [<text>]  starts a new conversation with this system prompt, or with none
/temperature <t>  0: always the most likely token
/help             this
/quit             or Ctrl-D; Ctrl-C stops an answer
A message that begins with / is written with two."""

CUT_BY = {
    FinishReason.length: "generation.max_tokens",
    FinishReason.turns: "environment.max_turns",
    FinishReason.calls: "environment.max_tool_calls",
    FinishReason.time: "environment.timeout",
}
"""{why an answer ended: the key of the limit}."""


def check_config(config: SamplingRoot, *, raw: bool) -> Environment | None:
    """The environment whose tools the policy may call; None without one, and for agents that play by themselves.

    Refuses what the config alone shows to be wrong; `raw` leaves out the data's system prompt and template.
    """
    from rlft.data.templates import check_template
    from rlft.environment.protocol import read_environment

    # A command of another package may have no more than `generation` of what `rlft train` has.
    environment = read_environment(getattr(config, "environment", None))
    if not raw:
        check_template(template_of(getattr(config, "data", None) or {}), "data.prompt_template", rows=False)
    return None if environment is None or environment.plays_itself else environment


def template_of(data: Mapping[str, Any]) -> str:
    """The text with the placeholder {question} in which questions are asked."""
    from rlft.data.templates import PLACEHOLDER, for_typed

    return for_typed(data.get("prompt_template") or PLACEHOLDER)


def read(plain: Mapping[str, Any], raw: bool) -> Resolved:
    """Reads the config of a run of any command that samples; `parts` are as of `check_config`."""
    return resolve(plain, check=partial(check_config, raw=raw))


def read_raw(word: str | None) -> bool:
    """The value of raw=<word>; `word` is None if raw was not typed."""
    is_one = word in (None, "true", "false")
    require(is_one, "raw", "must be true or false", got=word or "nothing", remedy="write raw=true")
    return word == "true"


def command(arguments: list[str]) -> None:
    """Starts a conversation with the policy of a run, or with a model."""
    parsed, source, plain = sampled_by(arguments, OWN_KEYS["chat"])
    raw = read_raw(parsed.value("raw"))
    resolved = read(with_named_runs(plain), raw)
    doing = f"rlft chat: {source.run if source else resolved.config.model.path}"
    import_libraries(doing, base_of(resolved.plain, source))
    run(resolved, source, raw, say)


def run(resolved: Resolved, source: NamedRun | None, raw: bool, say: Say) -> None:
    """Chats with the policy of the run, or with the config's model if `source` is None, until the input ends."""
    from rlft.logger.console import open_terminal

    with open_talk(resolved, source, raw, say) as talk:
        terminal = Terminal(talk, open_terminal())
        with handled_inside() if terminal.is_person else contextlib.nullcontext():
            terminal.run()


@contextlib.contextmanager
def open_talk(resolved: Resolved, source: NamedRun | None, raw: bool, say: Say) -> Iterator[Talk]:
    """Opens a conversation with the policy of the run, or the config's model if `source` is None; reads no data."""
    from rlft.system.memory import Doing, explained

    policy = policy_of(resolved, source, say)
    check_ends(policy.config, say)
    data = {} if raw else getattr(policy.config, "data", None) or {}
    if data.get("few_shot"):
        say("the data's few-shot examples are left out: a chat reads no data")
    with contextlib.ExitStack() as stack:
        with explained(Doing(), policy.config):
            roles = open_roles(policy)
            stack.callback(roles.close)
            talk = Talk(policy, roles, resolved.parts, data)
            stack.callback(talk.end_tools)
        most = f"at most {counted(talk.sampling.max_tokens, 'token')}"
        say(f"{policy.title}: temperature {talk.sampling.temperature:g}, {most}; /help")
        yield talk


class Talk:
    """A conversation. An error or an interruption leaves it unchanged.

    `turns` holds the messages of both sides without the system prompt; `last` is the rollout shown last, which may be
    the base's.
    """

    def __init__(self, policy: Policy, roles: Roles, environment: Environment | None, data: Mapping[str, Any]) -> None:
        from rlft.config.schema import ANYWHERE
        from rlft.environment.conversations import Conversations
        from rlft.loop.parts import engine_args
        from rlft.plan.rules import prompt_additions
        from rlft.types import NOTHING

        self.policy, self.config, self.saved = policy, policy.config, policy.saved
        self.roles, self.environment = roles, environment
        self.sampling: Sampling = self.config.generation.sampling
        self.system_prompt, self.template = data.get("system_prompt"), template_of(data)
        self.turns: tuple[Message, ...] = ()
        self.last: Rollout | None = None
        self._num_questions = 0
        self._learned: dict[str, LearnedReward] | UserError | None = None
        args = engine_args(self.config, policy.lora, roles)
        engine = self.config.generation.named(ANYWHERE)  # even if the run sampled with another engine
        self._policy, self._base = engine.open(args), engine.open(args)
        self.tokenizer = args.tokenizer
        self._shown = NOTHING
        if environment is not None:
            alone = replace(environment, workers=1)
            prompt = Prompt(id="chat", messages=self._messages(({"role": "user", "content": ""},)), answer="")
            self._shown = prompt_additions(alone, args.tokenizer, [prompt])
            self._policy, self._base = (
                Conversations(generator, alone, args.tokenizer, at_once=None, longest_row=sys.maxsize)
                for generator in (self._policy, self._base)
            )
        self._policy.load(roles.publish(policy.step))

    def ask(self, question: str) -> Rollout:
        """Adds this question to the conversation and returns the policy's answer."""
        from rlft.data.templates import filled

        turns = (*self.turns, {"role": "user", "content": filled(self.template, question)[0]})
        rollout = self._answer(self._policy, self._prompt(turns), self._num_questions)
        self.turns = (*turns, *self._answer_messages(rollout.completion))
        self.last, self._num_questions = rollout, self._num_questions + 1
        return rollout

    def ask_base(self) -> Rollout:
        """Answers the last question with the adapter off and the same random numbers."""
        if self.policy.lora is None:
            problem = "the run trained all weights, so the base is not loaded"
            command = command_line("rlft", "chat", override("model.path", self.policy.base))
            raise UserError("/base", problem, remedy=f"chat with it: {command}")
        self.last = self._answer(self._base, self._last_rollout("/base").prompt, self._num_questions - 1)
        return self.last

    def begin_anew(self) -> None:
        self.turns, self.last = (), None

    def _last_rollout(self, command: str) -> Rollout:
        if self.last is None:
            raise UserError(command, "there is no question yet", remedy="ask one first")
        return self.last

    def _prompt(self, turns: Sequence[Message]) -> Prompt:
        from rlft.data.prompts import scan
        from rlft.model.families import limit_of

        style, held_out = self.config.prompts.style, Split.held_out
        prompt = Prompt(id="chat", messages=self._messages(turns), answer="")
        scanned = scan([prompt], self.tokenizer, sys.maxsize, "refuse", held_out, style, self._shown)
        prompt = scanned.prompts[0]
        limit = limit_of(self.roles.model.config)
        num_tokens, max_tokens = len(prompt.token_ids), self.sampling.max_tokens
        if limit is not None and num_tokens + max_tokens > limit.tokens:
            raise UserError(
                "/new",
                f"the conversation has {counted(num_tokens, 'token')}, and {max_tokens} more (generation.max_tokens) "
                f"the model's {limit.words}",
                remedy="start a new conversation with /new, or restart with a lower generation.max_tokens",
            )
        return prompt

    def _messages(self, turns: Sequence[Message]) -> tuple[Message, ...]:
        system = () if self.system_prompt is None else ({"role": "system", "content": self.system_prompt},)
        return (*system, *turns)

    def _answer_messages(self, completion: Completion) -> Iterator[Message]:
        """The messages of an answer: what the policy said in each turn, and the answers of tools or environment."""
        environment = self.environment
        if environment is None or not completion.turns:
            yield {"role": "assistant", "content": completion.text}
            return
        by_tools = environment.syntax == "template" and not environment.plays_a_game
        *earlier, last = completion.turns
        for turn in earlier:
            yield {"role": "assistant", "content": turn.text}
            if by_tools:
                yield from ({"role": "tool", "name": call.name, "content": call.answer} for call in turn.calls)
            else:
                yield {"role": "user", "content": turn.answer}
        yield {"role": "assistant", "content": last.text}

    def end_tools(self) -> None:
        """Ends the processes in which tools run, if there are any."""
        if self.environment is not None:
            self._policy.close()
            self._base.close()

    def _answer(self, generator: Generator, prompt: Prompt, number: int) -> Rollout:
        from rlft.system.memory import Doing, explained
        from rlft.system.seeds import derive

        seeds = [derive(self.config.seed, number, "chat")]
        with explained(Doing(current="answer"), self.config):
            return generator.sample([prompt], 1, seeds, self.sampling)[0].rollouts[0]

    # -- rewards -------------------------------------------------------------------------------------------------------
    @property
    def needs_answer(self) -> bool:
        """Whether a reward may compare with a reference answer; a learned reward reads only the conversation."""
        return any(not spec.runs_in_trainer for spec in self._rewards().values())

    def score(self, answer: str) -> dict[str, tuple[float, float]]:
        """{reward: (score, weight)} for the answer shown last, with `answer` as the reference answer."""
        from rlft.reward.workers.scorer import Scorer

        last, rewards, scoring = self._last_rollout("/score"), self._rewards(), self.config.scoring
        prompt = replace(last.prompt, answer=answer)
        group = Group(prompt=prompt, rollouts=(replace(last, prompt=prompt),))
        scorer = Scorer(rewards, min(1, scoring.workers), scoring.timeout, "stop", self._learned_rewards(rewards))
        with contextlib.closing(scorer):
            scores = scorer([group])
        return {name: (scores.by_reward[name].item(), spec.weight) for name, spec in rewards.items()}

    def _rewards(self) -> dict[str, RewardSpec]:
        from rlft.reward.workers.reward_spec import specs

        problem = "there are no rewards in this run's config"
        rewards = getattr(self.config, "reward", None) or {}
        require(rewards, "/score", problem, remedy="chat with a run that has some")
        return specs(rewards)

    def _learned_rewards(self, rewards: Mapping[str, RewardSpec]) -> dict[str, LearnedReward]:
        """The learned rewards, loaded at the first call, with the weights that the run trained if it trained them."""
        from rlft.loop.parts import open_resident
        from rlft.model.reward_model import reward_role

        saved = self.saved
        if self._learned is None:
            trained = saved is not None and any(reward_role(name) in saved.adapters for name in rewards)
            with Deferred():  # a half-loaded adapter can neither be used nor be loaded again
                try:
                    self._learned = open_resident(rewards, self.roles, learns=trained)
                except UserError as error:
                    self._learned = error
                else:
                    if saved is not None:
                        self.roles.restore(saved.adapters, saved.heads)
        if isinstance(self._learned, UserError):
            raise self._learned
        return self._learned


class Terminal:
    """Reads lines from a person or a pipe until the input ends; prints the answers."""

    def __init__(self, talk: Talk, console: Console) -> None:
        self.talk, self.console = talk, console
        self.is_person = sys.stdin.isatty()
        self.commands: dict[str, Callable[[str], None]] = {
            "base": lambda _: self._show(self.talk.ask_base),
            "score": self._score,
            "new": self._new,
            "system": self._system,
            "temperature": self._temperature,
            "help": lambda _: self._print(COMMANDS, style="dim"),
        }
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() its history and its editing

    def run(self) -> None:
        """Reads lines until the input ends or /quit. Ctrl-C stops an answer; in a pipe it ends the chat."""
        from rlft.reward.workers.scorer import RewardError
        from rlft.system.memory import OutOfMemoryError
        from rlft.types import EnvironmentFailure

        idle_since_interrupt = False
        while True:
            line = None
            try:
                line = self._read("> ").strip()
                if line == "/quit":
                    return
                if line:
                    idle_since_interrupt = False
                    self.handle(line)
            except EOFError:
                return
            except KeyboardInterrupt as interruption:
                if not self.is_person or idle_since_interrupt or isinstance(interruption, Terminated):
                    raise
                idle_since_interrupt = line is None
                self._print("\n(stopped; Ctrl-D quits)", style="dim")
            except (UserError, RewardError, EnvironmentFailure, OutOfMemoryError) as error:
                self._print(str(error), style="red")

    def handle(self, line: str) -> None:
        """Handles a line that the user typed: a command or a question."""
        if not line.startswith("/") or line.startswith("//"):
            self._show(lambda: self.talk.ask(line.removeprefix("/")))
            return
        name, _, rest = line[1:].partition(" ")
        close = closest(name, self.commands)
        meant = f"did you mean /{close}? " if close else ""
        remedy = f"{meant}/help lists them; begin with // to say it to the model"
        require(name in self.commands, f"/{name}", "there is no such command", remedy=remedy)
        self.commands[name](rest.strip())

    # -- commands ------------------------------------------------------------------------------------------------------
    def _score(self, rest: str) -> None:
        if self.talk.last is not None and not rest and self.talk.needs_answer:
            problem = "names no right answer, and in a pipe nobody is asked for it"
            require(self.is_person, "/score", problem, remedy="write it in the same line: /score <answer>")
            rest = self._read("the right answer (Enter: none): ").strip()
        scores = self.talk.score(rest)
        for name, (score, weight) in scores.items():
            self._print(f"{name} {score:g} x {weight:g}")
        self._print(f"total {math.fsum(score * weight for score, weight in scores.values()):g}")

    def _new(self, rest: str) -> None:
        self.talk.begin_anew()
        self._print("a new conversation", style="dim")

    def _system(self, rest: str) -> None:
        self.talk.system_prompt = rest or None
        self.talk.begin_anew()
        self._print(f"a new conversation with {'this' if rest else 'no'} system prompt", style="dim")

    def _temperature(self, rest: str) -> None:
        try:
            temperature = float(rest)
        except ValueError:
            temperature = math.nan
        is_one = 0 <= temperature < math.inf
        require(is_one, "/temperature", "must be a number, 0 or more", got=rest or "nothing", remedy="try 0.7")
        self.talk.sampling = replace(self.talk.sampling, temperature=temperature)
        self._print(f"temperature {temperature:g}", style="dim")

    # -- the terminal --------------------------------------------------------------------------------------------------
    def _read(self, prompt: str) -> str:
        return input(prompt if self.is_person else "")

    def _show(self, answer: Callable[[], Rollout]) -> None:
        with self.console.status("..."):
            rollout = answer()
        completion = rollout.completion
        if self.talk.environment is None:
            self._print(completion.text)
        else:
            self._show_turns(completion)
        cut = f" (cut: {CUT_BY[completion.finish_reason]})" if completion.finish_reason.is_limit else ""
        who = "base, " if rollout.policy_version is None else ""
        self._print(f"[{who}{counted(completion.num_sampled, 'token')}{cut}]", style="dim")

    def _show_turns(self, completion: Completion) -> None:
        """Prints what the policy said in each turn, and each call with its answer."""
        for turn in completion.turns:
            self._print(turn.text)
            for call in turn.calls:
                self._print(f"  {call.name}({call.arguments})", style="dim")
                self._print(f"  -> {call.answer or '(not called)'}", style="red" if call.failed else "cyan")
            if turn.answer and not turn.calls:
                self._print(f"  -> {turn.answer}", style="cyan")
            if turn.reward is not None:
                self._print(f"  [reward {turn.reward:g}]", style="dim")

    def _print(self, text: str, style: str = "") -> None:
        """Prints text of a model, whose control characters must not move the cursor, hide or recolour anything."""
        from rich.text import Text

        from rlft.system.text import visible

        self.console.print(Text(visible(text), style=style))
