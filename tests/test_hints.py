"""Every command that the program suggests runs as it was printed, from the folder in which it was printed.

The commands are taken from the output of real short runs. Their sizes are made small by words at the end, which repeat
none of theirs; of the recipe on GSM8K the model and the data, which are on the hub, are replaced by ones that are here.
"""

import io
import re
import shlex
import sys
from pathlib import Path

import pytest
from slow_cases import slow

from rlft import cli
from rlft.system.interrupt import Interrupt

REPOSITORY = Path(__file__).parents[1]
ON_CPU = ("lora.rank=2", "model.device=cpu")
ROLLOUTS = ("steps=1", "prompts_per_step=2", "group_size=2", "generation.max_tokens=16", "data.size=16",
            "data.held_out_size=8", "scoring.workers=0", "generation=transformers")  # fmt: skip
LEARN = ("steps=1", *ON_CPU, "console=null", "eval.every=0")
SMALL = {"train": (*ROLLOUTS, "model.device=cpu", "console=null", "eval.every=0"), "eval": ("eval.num_prompts=2",),
         "sft": LEARN, "rm": LEARN, "dpo": LEARN}  # fmt: skip
FIRST = ("eval.every=1", *ON_CPU, "lora.alpha=4")
TRAIN = (*ROLLOUTS, *FIRST, "eval.num_prompts=2")
TEACH = ("demonstrations.path=embedded:arithmetic-demonstrations", "examples_per_step=2", "max_completion_tokens=64",
         "steps=1", "eval.num_prompts=2", *FIRST)  # fmt: skip
RANK = ("preferences.path=embedded:arithmetic-preferences", "rankings_per_step=2", "max_completion_tokens=64",
        "steps=1", *FIRST)  # fmt: skip
COMMAND = re.compile(r"(?:\S*/)?rlft (?:train|sft|rm|dpo|sample|resume|eval|chat|export|plan|report|runs) [^\n]*")


def hints(text):
    """The words after `rlft` of every command in the text; one inside a sentence ends with its bracket."""
    found = []
    text = text.replace(", or ", "\n")
    for match in COMMAND.finditer(text):
        before = text[: match.start()]
        command = match[0]
        if before.endswith("("):
            command = command[: command.index(")")]
        found.append(shlex.split(command)[1:])
    return found


def run_hint(words, problems, model):
    """The command itself, small, and with nothing to say to a chat."""
    given = {word.partition("=")[0].lstrip("+") for word in words}
    more = [word for word in SMALL.get(words[0], ()) if word.partition("=")[0] not in given]
    if "+recipe=grpo_gsm8k" in words:
        more = [f"model.path={model}", f"data.path={problems}"]
    if "-m" in words:
        more.append("hydra.sweep.dir=swept")
    elif words[0] in ("train", "sft", "rm", "dpo"):  # two runs begun in one second would have one folder
        more.append(f"hydra.run.dir=followed/{words[0]}-{len(list(Path().glob('followed/*')))}")
    assert cli.run([*words, *more]) == 0, shlex.join(words)


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A folder to work in, whose runs have names that a shell and Hydra would both misread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "number"),
    [
        slow(["train", "+recipe=grpo_arithmetic", *TRAIN], 5),
        slow(["train", *TRAIN, "trainer.schedule=cosine", "name=mine"], 4),
        slow(["sft", *TEACH], 3),
        slow(["sft", *TEACH, "data=arithmetic", "data.size=16", "data.held_out_size=8", "scoring.workers=0",
          "lora.target_modules=[q_proj,v_proj]", "lora.use_rslora=true"], 3),
        slow(["sft", *[w for w in TEACH if not w.startswith("lora.")], "lora=null"], 3),
        (["rm", *RANK, "lora.target_modules='.*mlp.*(up|down)_proj'"], 1),
        slow(["dpo", *RANK], 3),
        slow(["sample", "n=4", "num_prompts=8", "generation=transformers", "generation.max_tokens=48", "data.size=16",
          "data.held_out_size=8", "model.device=cpu", "scoring.workers=0"], 3),
    ],
    ids=["train", "train without a recipe", "sft", "sft with a task", "sft of all weights", "rm", "dpo", "sample"],
)  # fmt: skip
def test_what_a_run_suggests_next_runs(words, number, at_home, long_context_path, capfd):
    folder = "runs/first try, lr=0.1"
    assert cli.run([*words, f"hydra.run.dir='{folder}'"]) == 0
    page = capfd.readouterr().out
    found = hints(page.partition("\nNext\n")[2])
    assert len(found) == number == page.count("\n  # ")
    for command in found:
        run_hint(command, REPOSITORY / "tests" / "data" / "gsm8k_mini", long_context_path)
        capfd.readouterr()


@pytest.mark.slow
def test_what_interruptions_and_refusals_suggest_runs(at_home, long_context_path, capfd, monkeypatch):
    folder, problems = "runs/first try", REPOSITORY / "tests" / "data" / "gsm8k_mini"
    words = ["train", *TRAIN[1:], "steps=3", "checkpoint.every=1", f"hydra.run.dir='{folder}'"]

    def asked_to_stop(interrupt: Interrupt) -> Interrupt:
        interrupt.requested = True
        return interrupt

    with monkeypatch.context() as patch:
        patch.setattr(Interrupt, "__enter__", asked_to_stop)
        assert cli.run(words) == 130
    found = hints(capfd.readouterr().err)
    assert found == [["resume", folder]]
    run_hint(found[0], problems, long_context_path)
    for refused, number in (([*words], 1), (["resume", folder], 2), (["resume", folder, "steps=2"], 1)):
        capfd.readouterr()
        assert cli.run(refused) == 2
        found = hints(capfd.readouterr().err.replace("`", "\n"))
        assert len(found) == number, refused
        for command in found if refused != words else []:  # the run is finished now: it was told before
            run_hint(command, problems, long_context_path)


@pytest.mark.slow
def test_checkpoints_and_samples_suggest_what_runs(at_home, capfd):
    folder = "runs/first try"
    assert cli.run(["train", *TRAIN[1:], "steps=2", "checkpoint.every=1", f"hydra.run.dir='{folder}'"]) == 0
    last = f"{folder}/checkpoints/step_000002"
    for refused, expected in (
        (["resume", folder, "hydra.run.dir='runs/a fork'"], ["resume", last, "steps=4", "hydra.run.dir='runs/a fork'"]),
        (["train", f"resume={last}"], ["resume", last, "steps=4"]),
    ):
        capfd.readouterr()
        assert cli.run(refused) == 2
        assert hints(capfd.readouterr().err) == [expected]
        assert cli.run(expected) == 0
    sampled = [
        "sample", f"run={folder}", "n=2", "num_prompts=4", "prompts_per_step=2", "hydra.run.dir='runs/what it says'",
    ]  # fmt: skip
    assert cli.run(sampled) == 0
    capfd.readouterr()
    assert cli.run(["resume", "runs/what it says", "num_prompts=2"]) == 2
    found = hints(capfd.readouterr().err)
    assert found == [["resume", "runs/what it says", "num_prompts=8"]]
    assert cli.run(found[0]) == 0


@pytest.mark.parametrize(("refused", "hint"), [
    slow("train +recipe=sft_arithmetic", "sft +recipe=sft_arithmetic"),
    slow("sft +recipe=grpo_arithmetic", "train +recipe=grpo_arithmetic"),
    slow("eval run=latest", "train +recipe=grpo_arithmetic"),
    ("train nonsense=1", "train --cfg job"),
    ("sft nonsense=1", "sft --cfg job"),
    ("rm nonsense=1", "rm --cfg job"),
    ("sample nonsense=1", "sample --cfg job"),
    ("eval model.path=embedded:tiny-arithmetic nonsense=1", "train --cfg job"),
    ("plan +recipe=sft_arithmetic nonsense=1", "sft --cfg job"),
    slow("watch", "train +recipe=grpo_arithmetic"),
])  # fmt: skip
def test_commands_inside_refusals_run(refused, hint, at_home, capfd, monkeypatch):
    (at_home / "runs").mkdir()
    assert cli.run(refused.split()) == 2
    assert f"rlft {hint}" in capfd.readouterr().err
    words = hint.split()
    more = [*SMALL.get(words[0], ())] if "--cfg" not in words else []
    if "sft_arithmetic" in hint:
        more += ["examples_per_step=2"]
    assert cli.run([*words, *more]) == 0
