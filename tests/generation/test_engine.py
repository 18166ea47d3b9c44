"""What an engine is, by ones from outside: a module with keys, availability, memory and remedies, always closed."""

import json
import re
import shlex
from pathlib import Path

import pytest
from run_folders import metrics, rollouts
from slow_cases import slow

from rlft import cli
from rlft.generation.engine import units_of

PLAIN = """
from dataclasses import dataclass

from rlft.generation.engine import Engine, EngineArgs, Generator
from rlft.types import Completion, FinishReason, Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Engine):
    texts: list[str]

    def open(self, args: EngineArgs) -> Generator:
        return Says(self.texts, args.tokenizer)


class Says(Generator):
    def __init__(self, texts, tokenizer):
        self.texts, self.tokenizer, self.version = texts, tokenizer, None

    def load(self, adapter):
        self.version = adapter.version

    def sample(self, prompts, n, seeds, sampling):
        return [
            Group(prompt=prompt, rollouts=tuple(self.rollout(prompt, seed + i) for i in range(n)))
            for prompt, seed in zip(prompts, seeds)
        ]

    def rollout(self, prompt, seed):
        said = self.say(self.texts[seed % len(self.texts)].replace("{answer}", prompt.answer), seed)
        return Rollout(prompt=prompt, completion=said, policy_version=self.version)

    def say(self, text, seed):
        ids = (*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id)
        return Completion(text=text, token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason=FinishReason.stop)

    def score(self, sequences):
        return []

    def rehearse(self, prompts, n, max_tokens):  # without drafts
        print("rehearsed")
"""
MODULE = """
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Self

from plain_engine import Says

from rlft.config.bounds import NonNegativeInt, PositiveInt
from rlft.generation.engine import Engine, EngineArgs, Generator, Missing
from rlft.generation.memory import EngineMemory, Load, ModelSizes, MemoryPart, When
from rlft.types import Completion, FinishReason, ToolCall, Turn, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Canned(Engine):
    title: ClassVar[str] = "the canned engine"
    rewards_turns: ClassVar[bool] = True
    serves_dora: ClassVar[bool] = False
    serves_head: ClassVar[bool] = False
    largest_rank: ClassVar[int | None] = 16
    may_change: ClassVar[tuple[str, ...]] = ("megabytes", "fails_at", "runs_out")
    grows: ClassVar[Mapping[str, tuple[str, str]]] = {"sample": ("its cans", "megabytes")}

    texts: Sequence[str]
    journal: str = "journal.txt"
    megabytes: PositiveInt = 64
    needs: str = "json"
    fails_at: NonNegativeInt = 0
    runs_out: bool = False
    talks: bool = False

    def missing(self) -> Missing | None:
        problem = f"{self.needs} is not installed"
        return None if find_spec(self.needs) else Missing(problem, f"pip install {self.needs}")

    def check(self, *, plain_kernels: bool) -> None:
        if not self.texts:
            raise UserError("texts", "is empty", remedy="give some")

    def memory(self, model: ModelSizes, load: Load) -> EngineMemory:
        size = self.megabytes * 2**20
        return EngineMemory(parts=(MemoryPart(name="cans", bytes=size, when=When.always, key="megabytes"),))

    def smaller(self, model: ModelSizes, load: Load, room: int) -> Iterator[Self]:
        yield replace(self, megabytes=1)

    def open(self, args: EngineArgs) -> Generator:
        return Cans(self, args)


class Cans(Says):
    def __init__(self, keys: Canned, args: EngineArgs) -> None:
        super().__init__(keys.texts, args.tokenizer)
        self.keys, self.calls = keys, 0
        self.write("opened")

    def write(self, text: str) -> None:
        with Path(self.keys.journal).open("a") as journal:
            journal.write(text + "\\n")

    def sample(self, prompts, n, seeds, sampling):
        self.calls += 1
        self.write("sampled")
        if self.calls == self.keys.fails_at:
            raise MemoryError if self.keys.runs_out else RuntimeError("the can is empty")
        return super().sample(prompts, n, seeds, sampling)

    def say(self, text: str, seed: int) -> Completion:
        if not self.keys.talks:
            return super().say(text, seed)
        # A first turn that calls a tool and earns something or nothing, the answer of the tool, and the text.
        ids = self.tokenizer
        question, answer, end = (ids(t, add_special_tokens=False)["input_ids"] for t in ("2+2", "\\n4\\n", text))
        mask = (True,) * len(question) + (False,) * len(answer) + (True,) * (len(end) + 1)
        call = ToolCall(name="add", arguments="2+2", answer="4", failed=seed % 5 == 0)
        first = Turn(end=len(question), text="2+2", answer="4", reward=float(seed % 2), calls=(call,))
        return Completion(
            text="2+2\\n4\\n" + text, token_ids=(*question, *answer, *end, ids.eos_token_id), mask=mask,
            logprobs=tuple(-0.5 * sampled for sampled in mask), finish_reason=FinishReason.stop,
            turns=(first, Turn(end=len(mask), text=text)),
        )

    def close(self) -> None:
        self.write("closed")


class Half(Engine):
    pass


class NoEngine:
    pass
"""
YAML = """\
# Canned answers.
defaults:
  - auto
  - _self_

engine: canned
canned:
  _target_: canned_engine.Canned
  texts: ["<think></think><answer>{answer}</answer>", "<think></think><answer>?</answer>", "?"]
  megabytes: 64
  fails_at: 0
  runs_out: false
  talks: false
"""
KILL = {"at": "rlft.loop.session:Session.sample", "call": 3, "do": "kill"}
TINY = (
    "hydra.run.dir=run", "+recipe=grpo_arithmetic", "generation=canned", "steps=3", "prompts_per_step=2",
    "group_size=4", "generation.max_tokens=24", "model.device=cpu", "lora.rank=2", "lora.alpha=4", "data.size=32",
    "data.held_out_size=4", "eval.every=0", "scoring.workers=0", "checkpoint.every=1", "console=null",
)  # fmt: skip


def typed(*words):
    """These words, and those of TINY whose keys are not among them."""
    given = {word.partition("=")[0] for word in words}
    return [*(word for word in TINY if word.partition("=")[0] not in given), *words]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the module and its YAML, in which a user types."""
    (tmp_path / "plain_engine.py").write_text(PLAIN)
    (tmp_path / "canned_engine.py").write_text(MODULE)
    (tmp_path / "mine" / "generation").mkdir(parents=True)
    (tmp_path / "mine" / "generation" / "canned.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def train(forks, workplace):
    """`rlft train` with this engine and more words, in a process of its own."""
    words = ("train", "--config-dir", "mine")
    return lambda *more, events=(): forks.run(*words, *typed(*more), cwd=workplace, events=events)


def test_a_run_samples_with_it_and_resumed_with_another_size_it_is_the_same_run(forks, train, workplace, capsys):
    assert cli.run(["train", "--config-dir", "mine", *typed()]) == 0
    assert {line["reward/std"] for line in metrics(workplace / "run")} != {0.0}
    assert Path("journal.txt").read_text().split() == ["opened", "sampled", "sampled", "sampled", "closed"]
    assert train("hydra.run.dir=killed", events=[KILL]).code == -9
    resumed = forks.run("resume", "killed", "generation.canned.megabytes=32", cwd=workplace)
    assert resumed.code == 0, resumed.err
    assert metrics(workplace / "killed") == metrics(workplace / "run")
    assert rollouts(workplace / "killed") == rollouts(workplace / "run")
    assert cli.run(["resume", "killed", "steps=4", "generation.canned.texts=[x]"]) == 2
    assert "generation.canned.texts: " in capsys.readouterr().err


def test_an_algorithm_learns_from_the_rewards_of_turns_without_a_reward_that_scores_steps(workplace):
    words = ("generation.canned.talks=true", "algorithm=grpo_process", "algorithm.std=none", "steps=1")
    assert cli.run(["train", "--config-dir", "mine", *typed(*words, "algorithm.credit_span=turn")]) == 0
    rows = [json.loads(line) for line in rollouts(workplace / "run")["step_000001.jsonl"].splitlines()]
    assert {row["turns"][0]["reward"] for row in rows} == {0.0, 1.0}
    # The mean over a row's tokens: the first turn's three have its normalised reward besides the completion's.
    for group in (rows[:4], rows[4:]):
        turns = [row["turns"][0]["reward"] for row in group]
        whole = [row["reward"] - reward for row, reward in zip(group, turns, strict=True)]
        for row, turn, outcome in zip(group, turns, whole, strict=True):
            expected = outcome - sum(whole) / 4 + (turn - sum(turns) / 4) * 3 / sum(row["mask"])
            assert row["advantage"] == pytest.approx(expected, abs=1e-6)


FAILURE = {"at": "rlft.trainer.local:LocalTrainer.update", "call": 2, "do": "fail"}
INTERRUPT = {"at": "rlft.loop.session:Session.score", "call": 2, "do": "interrupt"}
AGAIN = {"at": "rlft.trainer.optimizer:Optimizer.update", "call": 2, "do": "interrupt"}
FAILS = "generation.canned.fails_at=2"


@pytest.mark.parametrize(
    ("words", "events", "code", "said"),
    [
        slow((), [FAILURE], 1, "this failure was planted"),
        ((FAILS,), [], 1, "the can is empty"),
        slow((), [INTERRUPT], 130, "stopped after step 2, which is saved"),
        slow((), [INTERRUPT, AGAIN], 130, "stopped at once"),
        slow((FAILS, "generation.canned.runs_out=true"), [], 1, "what grows there is its cans; resume with a lower "
             "generation.canned.megabytes (now 64): rlft resume run generation.canned.megabytes=32"),
    ],
    ids=["an error in the loop", "an error in the engine", "Ctrl-C", "Ctrl-C twice", "no memory"],
)  # fmt: skip
def test_it_is_closed_once_whatever_ends_the_run(words, events, code, said, train):
    done = train(*words, events=events)
    assert done.code == code, done.err
    assert said in done.err
    journal = Path("journal.txt").read_text().split()
    assert (journal[0], journal[-1]) == ("opened", "closed")
    assert journal.count("opened") == journal.count("closed") == 1


@pytest.mark.parametrize(("words", "line"), [
    (".megabites=3", ".megabites: there is no such key, got 3; did you mean generation.canned.megabytes? "
     "known here: texts, megabytes, fails_at, runs_out"),
    ("+.zzz=3", ".zzz: there is no such key, got 3; "
     "known here: texts, journal, megabytes, needs, fails_at, runs_out"),
    (".megabytes=many", ".megabytes: must be a whole number, got 'many'; "),
    (".megabytes=0", ".megabytes: must be greater than 0, got 0; "),
    ("~.texts", ".texts: is missing; "),
    (".texts=[]", ".texts: is empty; give some"),
    ("lora.use_dora=true", "lora.use_dora: the canned engine serves no DoRA adapters, got true; "),
    ("lora.target_modules=lm_head|.*proj",
     "lora.target_modules: the canned engine serves no adapters of lm_head, got lm_head; leave it out, or use "),
    ("generation.engine=uncanned",
     "generation.engine: is not an engine, got uncanned; choose one of auto, transformers, "),
    ("lora.rank=17", "lora.rank: the canned engine takes adapters up to rank 16, got 17; "),
    ("+.needs=no_such_library",
     "generation.engine: no_such_library is not installed, got canned; pip install no_such_library"),
    ("._target_=canned_engine.NoEngine",
     "._target_: is not an engine's class, got canned_engine.NoEngine; make it a subclass of "),
    ("._target_=canned_engine.Half",
     "._target_: is an engine's class without open, got canned_engine.Half; define open in it"),
    ("~._target_", ": has no _target_; name the engine's class"),
])  # fmt: skip
def test_what_is_wrong_with_it_is_refused_by_its_own_keys(words, line, workplace, capsys):
    """What begins with a dot, or says no key at all, is below generation.canned."""
    key = re.sub(r"^([+~]?)\.", r"\1generation.canned.", words)
    assert cli.run(["train", "--config-dir", "mine", *typed(*shlex.split(key))]) == 2
    below = "generation.canned" if line.startswith((".", ":")) else ""
    assert capsys.readouterr().err.startswith(f"rlft: {below}{line}")
    assert not Path("run").exists()


def test_its_memory_and_what_makes_it_smaller_are_planned(workplace, capsys):
    def planned(*words, fits):
        assert cli.run(["plan", "--json", "--config-dir", "mine", *typed(*words)]) == (0 if fits else 1)
        return json.loads(capsys.readouterr().out)

    whole = planned("+generation.canned.needs=no_such_library", fits=True)
    parts = {part["part"]: (part["bytes"], part["key"]) for part in whole["memory"]["as_planned"]}
    assert parts["cans"] == (64 * 2**20, "generation.canned.megabytes")
    assert "keys and values" not in parts, "it does not decode on the trainer's base"
    assert ("engine", "canned") in {(row["what"], row["value"]) for row in whole["sizes"]}
    missing = "no_such_library is not installed here, and the run needs it where it runs: pip install no_such_library"
    assert missing in whole["notes"]
    assert whole["peak"] - whole["peak_without_engine"] == 64 * 2**20
    # Half of what the engine can do without: the process, which is part of both plans, may grow or shrink in between.
    short = planned(f"device_memory={whole['peak'] - 32 * 2**20}", fits=False)
    ways = {key: value for way in short["ways"] for key, value in way["changes"].items()}
    assert ways["generation.canned.megabytes"] == "1"


def test_one_without_keys_is_named_by_its_class(workplace, capsys):
    words = ["train", *typed("generation=auto", "steps=1")]
    words.append("generation.engine=canned_engine.Canned")
    assert cli.run(words) == 2, "this one needs a key"
    assert capsys.readouterr().err.startswith("rlft: generation.Canned.texts: is missing; ")
    assert cli.run([*words, "+generation.Canned={texts: [x]}"]) == 0
    assert Path("journal.txt").read_text().split() == ["opened", "sampled", "closed"]


def test_a_module_and_a_yaml_are_enough(workplace, capsys):
    """Nothing but its keys, `open` and the three methods of a generator: no memory, no remedies, no list to be on."""
    section = "plain:\n  _target_: plain_engine.Plain\n  texts: [aye, <think></think>, nay]\n"
    Path("mine/generation/plain.yaml").write_text(f"defaults: [auto, _self_]\nengine: plain\n{section}")
    words = ["--config-dir", "mine", *typed("generation=plain", "steps=1")]
    assert cli.run(["plan", "--json", *words]) == 0
    assert ("engine", "plain") in {(row["what"], row["value"]) for row in json.loads(capsys.readouterr().out)["sizes"]}
    capsys.readouterr()
    assert cli.run(["train", *words]) == 0
    assert "rehearsed" in capsys.readouterr().out
    [line] = metrics(Path("run"))
    assert line["step"] == 1
    [rows] = rollouts(Path("run")).values()
    assert {json.loads(row)["completion"] for row in rows.splitlines()} == {"aye", "<think></think>", "nay"}


def test_an_engine_that_rounds_the_trainers_base_is_refused_where_all_weights_are_trained(workplace, capsys):
    keys = "    on_trainers_base = serves_whole_models = rounds = True\n    texts: list[str]"
    Path("rounding_engine.py").write_text(PLAIN.replace("    texts: list[str]", keys))
    section = "plain:\n  _target_: rounding_engine.Plain\n  texts: [aye]\n"
    Path("mine/generation/plain.yaml").write_text(f"defaults: [auto, _self_]\nengine: plain\n{section}")
    words = [word for word in typed("generation=plain", "lora=null") if not word.startswith("lora.")]
    assert cli.run(["train", "--config-dir", "mine", *words]) == 2
    assert "rounds the sum of base and adapter, and lora=null has none" in capsys.readouterr().err


def test_units_keep_what_an_engine_computes_together():
    whole = units_of(64, divisible=False, num_engines=4)
    assert [whole(8, 16), whole(8, 3), whole(128, 16)] == [8, 8, 1]  # 64 / 8; the same for fewer prompts; at least one
    parts = units_of(64, divisible=True, num_engines=4)
    assert [parts(8, 16), parts(8, 100), parts(8, 3)] == [4, 8, 1]  # 16 / 4 engines; 64 / 8; 3 / 4 rounded up
