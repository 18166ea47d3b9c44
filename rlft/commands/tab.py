"""What a shell's script runs at each TAB: `python -I -S tab.py <shell> <line up to the cursor> [<word breaks>]`.

It has 150 ms, so it imports nothing of rlft, and reads the list that `rlft.commands.completion` has made: from
the user's cache folder, until one of the files that it was made of changes.
"""

import json
import os
import re
import shlex
import sys
import zlib
from contextlib import suppress
from pathlib import Path

CONTINUES = ("=", ".", "/", ",", "[", "]")  # how words end that are not whole, or may not be
KINDS = {"<run>": (), "<path>": ("",), "<yaml>": (".yaml", ".yml")}  # {kind of path: how its files may end}
CURSOR = "\0"


def cached() -> dict:
    """The list; made anew where it is missing or no longer true."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "rlft")
    file = folder / f"completion-{zlib.crc32(__file__.encode()):08x}.json"
    with suppress(OSError, ValueError, KeyError):
        listed = json.loads(file.read_text(encoding="utf-8"))
        if all(os.stat(path).st_mtime_ns == time for path, time in listed["watched"].items()):  # noqa: PTH116
            return listed
    import subprocess

    maker = [sys.executable, "-P", "-m", "rlft.commands.completion"]
    made = subprocess.run(maker, capture_output=True, text=True, check=True).stdout
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(made, encoding="utf-8")
        written.replace(file)
    return json.loads(made)


def parsed(line: str) -> tuple[list[str], str]:
    """(the words of a line up to the cursor, without their quotes; the quote that is open at the cursor or "")."""
    for quote in ("", "'", '"'):
        with suppress(ValueError):
            return [word.replace(CURSOR, "") for word in shlex.split(f"{line}{CURSOR}{quote}")], quote
    return [], ""


def words_for(words: list[str], word: str, listed: dict) -> list[str]:
    """What the last word, as far as it was typed, may become after these words."""
    if not words:
        return [*listed["commands"], "--help", "--version"]
    takes = listed["commands"].get(words[0])
    if takes is None:
        return []
    if words[-1] in ("--config-dir", "-cd"):
        return paths(word, ())
    if words[-1] in ("--cfg", "-c"):
        return ["job", "hydra", "all"]
    if word.startswith("-"):
        return takes["options"]
    recipe = next((each.partition("=")[2] for each in words if each.startswith("+recipe=")), "")
    command = next((each for each in words if each in listed["keys"]), listed["recipes"].get(recipe, "train"))
    keys = listed["keys"][command] if takes["prefix"] is not None else {}
    keys = {key: choices for key, choices in keys.items() if key.startswith(takes["prefix"])}
    key, equals, value = word.partition("=")
    if equals:
        return [f"{key}={found}" for found in of_value(value, takes["own"].get(key) or keys.get(key, []))]
    named = takes["words"] if len(words) == 1 else [each for each in takes["words"] if each in KINDS]
    return sections(takes["own"] | keys, word) + offered(named, word)


def of_value(value: str, choices: list[str]) -> list[str]:
    """Values of a key; in a list or a sweep, of its last one."""
    start = max(value.rfind("["), value.rfind(",")) + 1
    before, last = value[:start], value[start:]
    others = re.split(r"[\[,]", before)
    found = [f"{before}{each}" for each in offered(choices, last) if each.startswith(last) and each not in others]
    if "[" in before and len(found) == 1:  # two candidates, so that the shell neither closes a quote nor ends the word
        return [f"{found[0]}]", f"{found[0]},"]
    return found


def sections(keys: dict, word: str) -> list[str]:
    """The keys that begin with the word, up to the next section: `trainer.`, then `trainer.lr=`."""
    words = (f"{key}=" for key in keys if key.startswith(word))
    return [*dict.fromkeys(each[: each.find(".", len(word)) + 1] or each for each in words)]


def offered(choices: list[str], word: str) -> list[str]:
    """The choices, with paths that begin with the word for each kind of path."""
    found = []
    for choice in choices:
        if choice == "<run>":
            found += runs(word)
        elif choice != "<yaml>" or word:
            found += paths(word, KINDS[choice]) if choice in KINDS else [choice]
    return found


def runs(word: str) -> list[str]:
    """`latest`, the runs in runs/, in sweeps/ or where the word leads, and folders that begin with the word."""
    tops = {"runs", "sweeps", *([os.path.dirname(word)] if "/" in word else [])}  # noqa: PTH120
    below = [Path(top).glob(f"{depth}/config.yaml") for top in tops for depth in ("*", "*/*", "*/*/*")]
    found = [str(config.parent) for configs in below for config in configs]
    return ["latest", *found, *(path for path in paths(word, ()) if word and path[:-1] not in found)]


def paths(word: str, endings: tuple[str, ...]) -> list[str]:
    """Folders, and files with these endings, that begin with the word."""
    folder, slash, name = word.rpartition("/")
    with suppress(OSError), os.scandir(os.path.expanduser(folder + slash) or ".") as entries:  # noqa: PTH111
        return [folder + slash + entry.name + "/" * entry.is_dir() for entry in entries
                if (name or entry.name[0] != ".") and (entry.is_dir() or entry.name.endswith(endings))]  # fmt: skip
    return []


def main(shell: str, line: str, breaks: str = "") -> None:
    words, quote = parsed(line)
    while words and "=" in words[0]:  # variables of the environment before the command
        words.pop(0)
    _, *words, word = words
    for found in sorted({found for found in words_for(words, word, cached()) if found.startswith(word)}):
        is_whole = not found.endswith(CONTINUES) and not quote and shell != "fish"
        if shell == "bash" and not quote:
            # bash replaces only what follows the last of its word breaks.
            found = found[max((word.rfind(c) for c in "=:@" if c in breaks), default=-1) + 1 :]
            found = re.sub(r"([\s'\"()&;<>|$`\\*?!])", r"\\\1", found)
        print(found + " " * is_whole)


if __name__ == "__main__":
    main(*sys.argv[1:])
