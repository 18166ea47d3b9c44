"""What is said, and what is refused, before torch is imported, which takes seconds."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, shlex, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from without_libraries import Imported, forbid

def child(*_, **__):
    raise Imported("in a child")

forbid("torch", "transformers")
import composed_once
import rlft.commands.doctor.command
from rlft import cli
rlft.commands.doctor.command.run_checks = child
composed_once.install()
for typed in json.loads(sys.stdin.read()):
    path, written = list(sys.path), StringIO()
    with redirect_stderr(written), redirect_stdout(written):
        try:
            code = cli.run(shlex.split(typed))
        except Imported as wanted:
            code = f"imports {wanted}"
    sys.path[:] = path
    print(json.dumps([code, written.getvalue()]))
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


def told_of(lines, folder, script=SCRIPT):
    """What the script says of each command; SCRIPT: [exit code or what was imported first, everything printed]."""
    tests = Path(__file__).parents[1]
    environment = {"PYTHONPATH": f"{tests.parent}:{tests / 'helpers'}"}
    how = {"env": environment, "cwd": folder, "capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", script], input=json.dumps(lines), **how)
    return [json.loads(told) for told in done.stdout.splitlines()]


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
for line in json.loads(sys.stdin.read()):
    if os.fork() == 0:
        cli.run(shlex.split(line))
        os._exit(1)
    os.wait()
"""
LIBRARIES = {  # the packages outside Python that may be imported before the first line
    "hydra", "omegaconf", "antlr4", "yaml", "packaging", "pydantic", "pydantic_core", "psutil",
    "annotated_types", "typing_extensions", "typing_inspection", "attr", "safetensors", "cython_runtime",
}  # fmt: skip
SLOW = {"asyncio", "concurrent.futures.process", "http.client", "multiprocessing", "sqlite3", "ssl", "urllib.request"}
"""Modules of Python whose import takes 10 ms and more."""


def test_little_is_imported_before_the_first_line(tmp_path):
    lines = [*LONG[:1], *LONG[2:5], "chat model.path=embedded:tiny-arithmetic"]
    for line, (said, modules) in zip(lines, told_of(lines, tmp_path, BEFORE), strict=True):
        assert said.startswith("rlft "), line
        packages = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
        assert {name for name in packages if not name.startswith(("_", "rlft"))} <= LIBRARIES, line
        assert not SLOW & {*modules}, line
        assert len(modules) < 590, f"{line}: 549 of rlft train when this was written"


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


def test_wrong_data_are_refused_before_torch_is_imported(tmp_path):
    lines, expected = [], []
    for number, (rows, words, said) in enumerate(WRONG.values()):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for choice, (section, commands) in itertools.product(("jsonl", "hub"), SECTIONS.items()):
            path = f"{section}={choice} {section}.path={folder / 'mine.jsonl'}"
            lines += [f"{command} {path} {' '.join(words).format(section=section)}" for command in commands]
            expected += [f"rlft: {section}.{said.format(folder=folder)}"] * len(commands)
    (tmp_path / "texts.jsonl").write_text(json.dumps(ROW) + "\n")
    field = "train +recipe=ppo_ptx_arithmetic pretrain.path=texts.jsonl pretrain.field=x pretrain.given_field=null"
    *told_of_lines, [code_of_field, told_of_field] = told_of([*lines, field], tmp_path)
    for line, (code, told), start in zip(lines, told_of_lines, expected, strict=True):
        assert (code, str(told)[: len(start)], str(told).count("\n")) == (2, start, 1), (line, told)
    assert code_of_field == 2
    assert "there is no field 'x'" in str(told_of_field)
