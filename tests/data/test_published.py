"""What docs/how-to/data.md says of published sets: each command reads rows of the set's form, made for this project."""

import json
import re
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
from in_one_test import each

from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.config.resolved import resolve
from rlft.types import Prompt, Ranking, Split
from tests.data.data_rows import says, user

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "data.md"
LINE = re.compile(r"^\| ([^|]+) \| `(plan [^`]+)` \|$", re.MULTILINE)
COMMANDS = dict(LINE.findall(PAGE.read_text().replace(r"\|", "¦")))


def chat(*contents):
    return [(user, says)[i % 2](content) for i, content in enumerate(contents)]


def shared(*values):
    return [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(values)]


SYSTEM = {"role": "system", "content": "Be brief."}
HH = "\n\nHuman: Hi, Ada\n\nAssistant: Hello.\n\nHuman: A name, Ada?\n\nAssistant:"
SVAMP = {"ID": "chal-1", "Body": "Ada had 5 apples and ate 2", "Question": "How many are left?",
         "Equation": "( 5.0 - 2.0 )", "Answer": 3.0, "Type": "Subtraction"}  # fmt: skip
EACH = {
    "GSM8K": (
        {"question": "Ada has 2,000 apples and 10 more.", "answer": "2000 + 10 = <<2000+10=2010>>2010\n#### 2,010"},
        ["Ada has 2,000 apples and 10 more."], ["2010"],
    ),
    "MATH": (
        {"problem": "Ada's half of $1$?", "level": "Level 1", "type": "Algebra",
         "solution": r"It is $\boxed{\frac{1}{2}}$."},
        ["Ada's half of $1$?"], [r"\frac{1}{2}"],
    ),
    "MATH-500": (
        {"problem": "Ada's half of $1$?", "solution": "..", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 1,
         "unique_id": "test/algebra/1.json"},
        ["Ada's half of $1$?"], [r"\frac{1}{2}"],
    ),
    "SVAMP": (SVAMP, ["Ada had 5 apples and ate 2 How many are left?"], ["3"]),
    "SVAMP's equations": (SVAMP, ["Ada had 5 apples and ate 2 How many are left?"], "( 5.0 - 2.0 ) = 3"),
    "ASDiv": (
        {"body": "Ada has 9 apples.", "question": "How many has she?", "solution_type": "Addition",
         "answer": "9 (apples)", "formula": "9+0=9"},
        ["Ada has 9 apples. How many has she?"], ["9"],
    ),
    "MMLU": (
        {"question": "Capital of Italy, Ada?", "subject": "geography", "choices": ["Bonn", "Rome", "Oslo", "Bern"],
         "answer": 1},
        ["Capital of Italy, Ada?\nA) Bonn\nB) Rome\nC) Oslo\nD) Bern"], ["1"],
    ),
    "NQ-open": ({"question": "where is Ada", "answer": ["Rome", "Roma"]}, ["where is Ada"], ["Rome", "Roma"]),
    "MBPP": (
        {"task_id": 1, "text": "Write an addition for Ada.", "code": "def add(a, b):\n    return a + b",
         "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], "test_setup_code": "",
         "challenge_test_list": []},
        ["Write an addition for Ada.\nIt has to pass this test: assert add(1, 2) == 3"],
        ["def add(a, b):\n    return a + b"],
    ),
    "HumanEval": (
        {"task_id": "Own/0", "prompt": "def add(a, b):\n    pass  # Ada\n", "canonical_solution": "    return a + b\n",
         "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"},
        ["Write the whole function.\ndef add(a, b):\n    pass  # Ada\n"],
        ["def check(candidate):\n    assert candidate(1, 2) == 3\n\n\ncheck(add)"],
    ),
    "verl's files": (
        {"data_source": "own/set", "prompt": [SYSTEM, user("1 + 1, Ada?")], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0}},
        ["Be brief.", "1 + 1, Ada?"], ["2"],
    ),
    "TRL's prompts": ({"prompt": chat("1 + 1, Ada?"), "solution": "2"}, ["1 + 1, Ada?"], ["2"]),
    "HH-RLHF": (
        {"chosen": f"{HH} Ada.", "rejected": f"{HH} No."}, ["Hi, Ada", "Hello.", "A name, Ada?"], ["Ada.", "No."]
    ),
    "UltraFeedback, binarized": (
        {"prompt": "A name, Ada?", "prompt_id": "0", "chosen": chat("A name, Ada?", "Ada."),
         "rejected": chat("A name, Ada?", "No."), "messages": chat("A name, Ada?", "Ada."),
         "score_chosen": 8.5, "score_rejected": 3.0},
        ["A name, Ada?"], ["Ada.", "No."],
    ),
    "UltraFeedback": (
        {"source": "own", "instruction": "A name, Ada?", "models": ["x", "y"],
         "completions": [{"model": "x", "response": "No.", "overall_score": 3.0},
                         {"model": "y", "response": "Ada.", "overall_score": 8.5}]},
        ["A name, Ada?"], ["Ada.", "No."],
    ),
    "TRL's pairs, with a prompt": (
        {"prompt": chat("A name, Ada?"), "chosen": [says("Ada.")], "rejected": [says("No.")]},
        ["A name, Ada?"], ["Ada.", "No."],
    ),
    "TRL's pairs, without one": (
        {"chosen": "Ada's sky is blue.", "rejected": "Ada's sky is green."}, ["Ada's sky is"], [" blue.", " green."]
    ),
    "ShareGPT, FastChat": (
        {"id": "x_0", "conversations": shared("Hi, Ada", "Hello.", "A name, Ada?", "Ada.")}, ["Hi, Ada"], "Hello."
    ),
    "Alpaca": (
        {"instruction": "Translate, Ada.", "input": "Hallo", "output": "Hello", "text": "Below is .."},
        ["Translate, Ada.\n\nHallo"], "Hello",
    ),
    "AlpacaEval": (
        {"instruction": "A name, Ada?", "output": "Ada.", "generator": "own", "dataset": "own"},
        ["A name, Ada?"], "Ada.",
    ),
    "OpenAI's and TRL's chats": ({"messages": [SYSTEM, *chat("1, Ada?", "2")]}, ["Be brief.", "1, Ada?"], "2"),
}  # fmt: skip
"""{set: (a row as published, the prompt's messages without ours, what is read of its answers or completions)}."""


def write(file, rows):
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), file)
    else:
        file.write_text(json.dumps(rows, indent=1) if file.suffix == ".json" else "\n".join(map(json.dumps, rows)))


def varied(row, i):
    """The row with another question: every one asks Ada, or is about her."""
    return json.loads(json.dumps(row).replace("Ada", f"Ada{i}"))


def read_by(found):
    """(the prompt's messages, what is read beside them)."""
    if isinstance(found, Prompt):
        return [m["content"] for m in found.messages], [found.answer, *found.other_answers]
    messages = [m["content"] for m in found.prompt.messages]
    return messages, list(found.completions) if isinstance(found, Ranking) else found.completion


def test_every_set_of_the_page_is_tried():
    assert sorted(COMMANDS) == sorted(EACH)


@each("name", list(EACH))
def test_the_command_of_a_published_set_reads_its_rows(name, hub_sets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A shell splits the words: the page has its quotes.
    split = ["bash", "-c", f"printf '%s\\0' {COMMANDS[name]}"]
    _, *words = subprocess.run(split, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    command = words.pop(0) if words[0] in ("sft", "rm", "dpo") else "train"
    section = {"train": "data", "sft": "demonstrations"}.get(command, "preferences")
    row, messages, read = EACH[name]
    rows = [row, *(varied(row, i) for i in range(60))]
    keys = dict(word.split("=", 1) for word in words)
    hub_sets[keys.get(f"{section}.held_out_split", "test")] = rows[5:9]
    hub_sets[keys.get(f"{section}.train_split", "train")] = rows
    for key, held in ((f"{section}.path", rows), (f"{section}.held_out_path", rows[5:9])):
        if "." in keys.get(key, ""):
            write(tmp_path / keys[key], held)
    more = [] if command == "train" else ["max_completion_tokens=64"]
    resolved = resolve(compose([*words, *more], command=command))
    loaded = [instantiate(resolved.plain[section], section).load(part) for part in Split]
    found = [row for part in loaded for row in getattr(part, "rankings", part)]
    assert len(found) > 36
    if name == "GSM8K":  # the only one with a system prompt of ours
        messages = [found[0].messages[0]["content"], *messages]
    assert (messages, read) in [read_by(one) for one in found]
