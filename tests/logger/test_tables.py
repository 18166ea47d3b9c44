"""Commands that are printed are copied as one line, however narrow the terminal is."""

import ast
import io
import random
from pathlib import Path
from typing import cast

import pytest
from rich.text import Text

from rlft.commands.tables import rows_table, wrapped
from rlft.logger.console import StandardOutput, grid, show_rows
from rlft.logger.summary import print_commands, print_facts
from rlft.logger.tables import Column, WordTable
from rlft.system.terminal import CheckRow, Status, command_line, pip_install, unbroken, with_spaces

RLFT = Path(__file__).parents[2] / "rlft"


def commands(seed):
    """Commands as rlft makes them, of words that occur in them."""
    rng = random.Random(seed)
    words = ["steps=80", "runs/grpo_arithmetic/2026-11-29_08-41-01", "runs/my first/a", "+recipe=grpo_gsm8k", "--json"]
    words += ["reward=[exact_match,format]", "trainer.lr=1e-05,3e-05", "model.path=~/models/Qwen2.5-7B", "-m", "out=a"]
    firsts = [("rlft", "resume"), ("rlft", "reward", "try"), ("../.venv/bin/rlft", "train"), ("hf", "upload")]
    made = [command_line(*rng.choice(firsts), *rng.sample(words, rng.randint(1, 5))) for _ in range(60)]
    return ["rlft resume", *made, pip_install("vllm>=0.10,<0.12"), pip_install("rlft[sweep]", "-e")]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_every_way_to_print_leaves_a_command_in_one_line(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for command in commands(width):
        terminal = StandardOutput(width=width, file=io.StringIO(), color_system=None)
        sentence = f"the run is interrupted after its step 20; resume it with: {command}, or leave it as it is"
        terminal.print(sentence)
        terminal.print(Text(sentence), style="dim")
        terminal.print(rows_table([CheckRow("packages", Status.wrong, sentence, remedy=f"{command} (for trackers)")]))
        terminal.print(grid([("the run", "no estimate", sentence), ("short", "1", "")]))
        terminal.print(WordTable((Column("part"), Column("bytes", right=True), Column("key")), [("a", 1, sentence)]))
        print_facts(terminal, [("again", sentence)])
        print_commands(terminal, [("train it further", command)])
        terminal.print("\n".join(wrapped(sentence, "about  ", "       ")))
        lines = cast("io.StringIO", terminal.file).getvalue().splitlines()
        assert sum(command in line for line in lines) == 9, (width, command, "\n".join(lines))


def test_other_words_are_broken_as_before():
    for text in ("no command", "of rlft sft, and not of this", "rlft", "the engine's pip", "a=b c=d", "hf is a hub"):
        assert with_spaces(unbroken(text)) == text
        assert "\ue000" not in unbroken(text).replace("rlft\ue000sft", "").replace("hf\ue000is\ue000a", "")


def test_what_prints_on_a_terminal_is_this_console():
    """rich's own would break lines; chat and others that are given a terminal have it from `open_terminal`."""
    consoles = ("Terminal", "StandardOutput")
    made = [
        (file.name, node.func.id)
        for file in RLFT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in consoles
    ]
    assert sorted(made) == [("chat.py", "Terminal"), ("console.py", "StandardOutput")]  # chat's reads lines


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("model", ["tiny", "Qwen/Qwen2.5-Math-1.5B-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"])
def test_a_long_value_stands_next_to_its_key_and_moves_what_explains_it(model, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    show_rows([("model", model, "on cpu with words that are wrapped and more of them"), ("rank", "8", "of adapters")])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(f"{'model':20}{model}")
    assert (f"{model:26}  on cpu" in lines[0]) == (width > 60)
    assert f"{'rank':20}8" in "\n".join(lines), "other rows stay aligned"
