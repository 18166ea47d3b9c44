"""What is said, and what is refused, before torch is imported, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, shlex, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from without_libraries import Imported, forbid

def child(*_, **__):
    raise Imported("in a child")

forbid("torch", "transformers")
import rlft.commands.doctor.command
from rlft import cli
rlft.commands.doctor.command.run_checks = child
told = []
for typed in json.loads(sys.stdin.read()):
    path, written = list(sys.path), StringIO()
    with redirect_stderr(written), redirect_stdout(written):
        try:
            code = cli.run(shlex.split(typed))
        except Imported as wanted:
            code = f"imports {wanted}"
    sys.path[:] = path
    told.append([code, written.getvalue()])
print(json.dumps(told))
"""
RUN = "run=" + str(Path(__file__).parents[1] / "runs" / "recorded" / "train")
LONG = [
    "train +recipe=grpo_arithmetic",
    "train -m +recipe=grpo_arithmetic seed=0,1",
    *(f"{command} +recipe={command}_arithmetic" for command in ("sft", "rm", "dpo")),
    "sample data=arithmetic",
    f"resume {RUN} steps=9",
    "plan +recipe=grpo_arithmetic",
    "reward try",
    *(f"{command} {RUN}" for command in ("eval", "chat", "serve serve.port=0", "export out=out")),
    "chat model.path=embedded:tiny-arithmetic",
    "doctor",
]


def told_of(lines, folder):
    """[exit code or what was imported first, everything printed until then] of each command."""
    command, tests = [sys.executable, "-c", SCRIPT], Path(__file__).parents[1]
    environment = {"PYTHONPATH": f"{tests.parent}:{tests / 'helpers'}"}
    done = subprocess.run(
        command, input=json.dumps(lines), env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_what_takes_long_says_what_it_does_before_torch_is_imported(tmp_path):
    for line, (code, told) in zip(LONG, told_of(LONG, tmp_path), strict=True):
        words = line.split()
        name = "train" if words[0] == "resume" else " ".join(words[: 2 if words[0] == "reward" else 1])
        assert str(code).startswith("imports "), (line, code, told)
        lines = str(told).splitlines() or [""]
        said = next((line for line in lines if line.startswith("rlft ")), lines[-1])
        notes = lines[: lines.index(said)]
        rows = [line for line in lines[len(notes) :] if not line.startswith("rlft ")]
        assert said.startswith(f"rlft {name}"), (line, code, told)
        assert said.endswith(" .."), line
        assert all(note.startswith("note: ") for note in notes), line
        shows_table = words[0] in ("train", "sft", "rm", "dpo") and "-m" not in words
        model = "model               embedded:tiny-arithmetic    trains LoRA rank 16"
        assert (model in "\n".join(rows)) == bool(rows) == shows_table, (line, rows)


BEFORE = """
import json, os, shlex, sys
from rlft import cli
from rlft.system import terminal

def print_modules(text, stream):
    print(json.dumps([text, sorted(sys.modules)]), file=sys.__stdout__, flush=True)
    os._exit(0)

terminal._print = print_modules
cli.run(shlex.split(sys.argv[1]))
"""
LIBRARIES = {  # the packages outside Python that may be imported before the first line
    "hydra", "omegaconf", "antlr4", "yaml", "packaging", "pydantic", "pydantic_core", "psutil",
    "annotated_types", "typing_extensions", "typing_inspection", "attr", "safetensors", "cython_runtime",
}  # fmt: skip
SLOW = {"asyncio", "concurrent.futures.process", "http.client", "multiprocessing", "sqlite3", "ssl", "urllib.request"}
"""Modules of Python whose import takes 10 ms and more."""


@pytest.mark.parametrize("line", [*LONG[:1], *LONG[2:5], "chat model.path=embedded:tiny-arithmetic"])
def test_little_is_imported_before_the_first_line(line, tmp_path):
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", BEFORE, line]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    said, modules = json.loads(done.stdout)
    assert said.startswith("rlft ")
    packages = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    assert {name for name in packages if not name.startswith(("_", "rlft"))} <= LIBRARIES
    assert not SLOW & {*modules}
    assert len(modules) < 590, "549 of rlft train when this was written"


ROW = {"question": "1 + 1?", "answer": "2", "completion": "2", "chosen": "2", "rejected": "3"}
SECTIONS = {
    "data": ["train +recipe=grpo_arithmetic", "eval model.path=embedded:tiny-arithmetic", "reward try", "sample"],
    "demonstrations": ["sft +recipe=sft_arithmetic"],
    "preferences": ["rm +recipe=rm_arithmetic", "dpo +recipe=dpo_arithmetic"],
}
WRONG = {  # {what is wrong: (rows of the file, words, what is said)}
    "a name of one's own": ([ROW, ROW], ["{section}.prompt_field=nope"], "prompt_field: {folder}/mine.jsonl:1: "),
    "a field of a template": (
        [ROW],
        ["\"{section}.prompt_template='{{question}} {{x}}'\""],
        "prompt_template: {folder}/mine.jsonl:1: ",
    ),
    "a later row": ([ROW, {"answer": "2"}], ["{section}.prompt_field=question"], "path: {folder}/mine.jsonl:2: "),
}


@pytest.mark.parametrize("choice", ["jsonl", "hub"])
def test_wrong_data_are_refused_before_torch_is_imported(choice, tmp_path):
    lines, expected = [], []
    for number, (rows, words, said) in enumerate(WRONG.values()):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for section, commands in SECTIONS.items():
            path = f"{section}={choice} {section}.path={folder / 'mine.jsonl'}"
            lines += [f"{command} {path} {' '.join(words).format(section=section)}" for command in commands]
            expected += [f"rlft: {section}.{said.format(folder=folder)}"] * len(commands)
    for line, (code, told), start in zip(lines, told_of(lines, tmp_path), expected, strict=True):
        assert (code, str(told)[: len(start)], str(told).count("\n")) == (2, start, 1), (line, told)


def test_a_wrong_field_of_pretraining_text_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps(ROW) + "\n")
    line = "train +recipe=ppo_ptx_arithmetic pretrain.path=texts.jsonl pretrain.field=x pretrain.given_field=null"
    [[code, told]] = told_of([line], tmp_path)
    assert code == 2
    assert "there is no field 'x'" in str(told)
