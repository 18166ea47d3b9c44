"""The hooks of mkdocs.yml: pages that are generated, and what a page of docs/ means on GitHub and in the site alike.

Generated are the reference of commands and of keys, and one page for each file outside of docs/ that a page links to:
the site needs no repository next to it. Nothing of that is committed.
"""

from __future__ import annotations

import html
import io
import os
import re
from contextlib import redirect_stdout
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from rlft import cli
from rlft.commands.lists import Listed, all_keys
from rlft.config import command as commands

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)((?:#[^)]+)?\))")
NAMED_BLOCK = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
PAGE = re.compile(r"docs/([\w/-]+)\.md(#[\w-]+)?")
AS_IT_IS = (".json", ".png", ".svg", ".gif", ".ipynb")
KEYS = """# Keys

What `rlft keys` prints. Below each meaning are the commands that have the key, or the choices of its group
(`algorithm=grpo`), and the file that sets its default. Set a key on the command line, `rlft train trainer.lr=1e-4`, or
in [a YAML file](../how-to/data.md#one-file-for-a-run); a key that does not exist is refused.
"""
SOURCES: dict[str, Path] = {}
"""{address in the site: its file} of the files outside of docs/."""
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"
"""The search leaves the pages of files out: they would hide those of docs/."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are generated."""
    files.append(File.generated(config, "reference/cli.md", content=commands_page()))
    files.append(File.generated(config, "reference/keys.md", content=keys_page()))
    waiting = {path for page in DOCS.rglob("*.md") for path in outside(page)}
    SOURCES.clear()
    while remaining := waiting - set(SOURCES.values()):
        path = min(remaining)
        SOURCES[uri_of(path)] = path
        if path.suffix in AS_IT_IS:
            files.append(File.generated(config, uri_of(path), abs_src_path=str(path)))
        else:
            files.append(File.generated(config, uri_of(path), content=HIDDEN + page_of(path)))
            waiting |= outside(path) if path.suffix == ".md" else set(listed(path))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files outside of docs/ lead to their pages; a block that is a file has its name as its title."""
    uri: str = page.file.src_uri
    source = SOURCES.get(uri, DOCS / uri)
    if source.suffix == ".md":
        markdown = LINK.sub(lambda match: match[1] + moved(source, match[2], uri) + match[3], markdown)
    return NAMED_BLOCK.sub(r'```\1 title="\2"', markdown)


def outside(page: Path) -> set[Path]:
    """The files and folders outside of docs/ that a page links to."""
    found = {(page.parent / place).resolve() for _, place, _ in LINK.findall(page.read_text(encoding="utf-8"))}
    return {path for path in found if path.exists() and not path.is_relative_to(DOCS) and path != ROOT}


def listed(folder: Path) -> list[Path]:
    """The files that the page of a folder lists; none of a file."""
    return sorted(path for path in folder.glob("[!_.]*") if path.suffix in LANGUAGES) if folder.is_dir() else []


def uri_of(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = f"files/{path.relative_to(ROOT).as_posix()}"
    if path.is_dir():
        return f"{uri}/index.md"
    return uri if path.suffix in AS_IT_IS else f"{uri}.md"


def moved(source: Path, place: str, uri: str) -> str:
    """A link on the page of this file, as the site has it at this address."""
    target = (source.parent / place).resolve()
    return os.path.relpath(uri_of(target), Path(uri).parent) if target.exists() else place


def page_of(path: Path) -> str:
    """The page of a file outside of docs/."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return title + "".join(f"- [{file.name}]({file.name}.md)\n" for file in listed(path))
    return f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}````\n"


def commands_page() -> str:
    """Every command with its help, in the order of `rlft --help`."""
    names = [*commands.names(), *cli.TOOLS]
    parts = ["# Commands\n", "What `rlft --help` and `rlft <command> --help` print.\n", block(cli.usage())]
    for name in names:
        with redirect_stdout(io.StringIO()) as printed:
            cli.run([name, "--help"])
        parts += [f"## rlft {name}\n", block(printed.getvalue())]
    return "\n".join(parts)


def keys_page() -> str:
    """Every key, by section: its default, its meaning, and the commands or choices of a group that have it."""
    parts = [KEYS]
    listed = sorted(all_keys(), key=lambda row: (section_of(row.key), row.key))
    for section, rows in groupby(listed, key=lambda row: section_of(row.key)):
        parts.append(f"## {section or 'Without a section'}\n\n<dl>\n{''.join(map(entry_of, rows))}</dl>\n")
    return "\n".join(parts)


def section_of(key: str) -> str:
    """`trainer` of `trainer.lr`, `reward.code` of `reward.code.memory`, "" of `steps`."""
    first, *rest = key.split(".")[:-1] or [""]
    return ".".join([first, *rest[:1]]) if first == "reward" else first


def entry_of(row: Listed) -> str:
    """A key of the list of keys, as HTML: meanings have characters that Markdown would read."""
    meaning = PAGE.sub(r'<a href="../../\1/\2">\1</a>', html.escape(row.meaning))
    owners = html.escape(", ".join(owner.rpartition("=")[2] for owner in row.owners))
    name = html.escape(f"{row.key} = {row.default}" if row.default else row.key)
    return f"<dt><code>{name}</code></dt><dd>{meaning}<br><small>{owners}; {row.file}</small></dd>\n"


def block(text: str) -> str:
    return f"````text\n{text.rstrip()}\n````\n"
