"""`rlft init`: makes a folder with run.yaml, rewards and data, to be changed; or run.yaml is another library's run."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable
from pathlib import Path

from rlft.commands.translate import LIBRARIES, arguments_of, translated
from rlft.config.keys import is_path_key
from rlft.config.recipe_file import is_local
from rlft.config.suggest import ASSETS
from rlft.system.disk import writing
from rlft.system.files import write_atomically
from rlft.system.terminal import command_line, program, show
from rlft.types import require

EXAMPLE = {
    "train": {"data.path": "data.jsonl", "reward": "[reward.py:close, reward.py:tagged]"},
    "sft": {"demonstrations.path": "data.jsonl"},
    "rm": {"preferences.path": "embedded:arithmetic-preferences"},
    "dpo": {"preferences.path": "embedded:arithmetic-preferences"},
}
"""{command: the keys of the example's data and rewards}."""
FILE_OF = {"data.path": "data.jsonl", "demonstrations.path": "data.jsonl", "reward": "reward.py"}
COLUMNS = 100  # of comments


def command(arguments: list[str]) -> None:
    name, *like = arguments or [""]
    remedy = "write rlft init <folder>, for instance rlft init qa"
    require(name.strip() and name[0] not in "-+~", "init", "needs a folder's name first", got=name or "nothing",
            remedy=remedy)  # fmt: skip
    remedy = f"write rlft init {name} --like {LIBRARIES} <file or arguments>"
    require(not like or (like[0] == "--like" and len(like) > 2), "init", "takes one folder, and --like with a library",
            got=" ".join(arguments), remedy=remedy)  # fmt: skip
    folder = Path(name)
    is_free = not any(folder.iterdir()) if folder.is_dir() else not os.path.lexists(folder)
    problem = "holds files already, and is left as it is" if folder.is_dir() else "is a file"
    require(is_free, "init", problem, got=name, remedy="choose another folder")
    templates = (ASSETS / "init").iterdir()
    files = {file.name.removesuffix(".txt"): file.read_text(encoding="utf-8") for file in templates}
    kind, files = _translated(like[1], like[2:], folder, files) if like else ("train", files)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        write_atomically(folder / file, text)
    following = {"score adversarial completions by its rewards": ["reward", "try"], "see whether it fits": ["plan"],
                 "train": [kind]}  # fmt: skip
    if kind != "train":
        del following["score adversarial completions by its rewards"]
    show(f"{name} holds {', '.join(sorted(files))}.\n\nNext")
    run = folder / "run.yaml"
    show("\n".join(f"  # {purpose}\n  {command_line(program(), *words, run)}" for purpose, words in following.items()))


def _translated(peer: str, words: list[str], folder: Path, files: dict[str, str]) -> tuple[str, dict[str, str]]:
    """(the command, {file: text}) of another library's run, completed by the example's files."""
    translation, given = translated(peer, words)
    example = {"model.path": "embedded:tiny-arithmetic", **EXAMPLE[translation.command]}
    example = {key: value for key, value in example.items() if key not in translation.words}
    own_data = next((key.partition(".")[0] for key in example if key in FILE_OF and key.endswith(".path")), None)
    text = [*_comment(f"A run of {translation.title}, translated by rlft. Above each key is the argument that it comes "
                      "from. Paths are relative to this file."), f"command: {translation.command}"]  # fmt: skip
    written, left_out = set[str](), dict[str, str]()
    for row in translation.rows:
        keys = [key for key, word in row.words.items() if translation.words[key] == word and key not in written]
        written.update(keys)
        told = ", ".join(arguments_of(row))
        # The folder of runs is no key of a recipe, and fields of rows that are not there are none of the example's.
        if left := [key for key in keys if key.startswith("hydra.") or key.partition(".")[0] == own_data]:
            left_out[told] = " ".join([*(row.words[key] for key in left), *([f"({row.note})"] if row.note else [])])
        if keys := [key for key in keys if key not in left]:
            text += ["", *_comment(f"{told}: {row.note}" if row.note else told)]
            text += [f"{key}: {_in_yaml(key, row.words[key], folder)}" for key in keys]
    text += ["", *_comment("Of the example, to be changed"), *(f"{key}: {value}" for key, value in example.items())]
    without = {", ".join(row.theirs): row.note for row in translation.rows if row.note and not row.words}
    text += _listed("Left out: a folder of runs is for the command line, fields are for data of your own", left_out)
    text += _listed("No counterpart here", without)
    text += _listed("Could not be read: write the key of each that matters", given.unread)
    needed = {FILE_OF[key] for key in example if key in FILE_OF}
    return translation.command, {"run.yaml": "\n".join([*text, ""]), **{file: files[file] for file in needed}}


def _in_yaml(key: str, word: str, folder: Path) -> str:
    """The value of an override as YAML has it, a path as it is from this folder."""
    text = word.partition("=")[2].replace("\\'", "''")
    path = text.strip("'").replace("''", "'")
    if is_path_key(key) and is_local(path) and path[0] not in "/~":
        return json.dumps(Path(os.path.relpath(path, folder)).as_posix(), ensure_ascii=False)
    return text


def _listed(title: str, notes: dict[str, str]) -> list[str]:
    told = [f"{name}: {note}" if name else note for name, note in notes.items()]
    return ["", *_comment(title), *(line for each in told for line in _comment(each, "  "))] if told else []


def _comment(text: str, indent: str = "") -> Iterable[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent=f"# {indent}", subsequent_indent=f"# {indent * 2}",
                         break_on_hyphens=False, break_long_words=False)  # fmt: skip
