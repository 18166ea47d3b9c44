"""What is printed and written to be copied into a shell is read there as it stands, by bash and zsh alike."""

import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rlft.system.terminal import for_a_shell

REPOSITORY = Path(__file__).parents[1]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), REPOSITORY / "recipes" / "README.md"]
FENCE = re.compile(r"^ *```(\w*)")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def of_a_page(page):
    """The lines of its blocks for shells, and the code in its sentences."""
    language: str | None = None
    for line in page.read_text().splitlines():
        if match := FENCE.match(line):
            language = match[1] if language is None else None
        elif language in ("sh", "bash", "console", "") or (language is None and line.startswith("    rlft ")):
            yield line
        elif language is None:
            yield from CODE.findall(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_pages_are_quoted(page):
    for line in of_a_page(page):
        plain = re.sub(r"\$'[^']*'", "", line)  # bash's and zsh's own quotes
        assert for_a_shell(plain) == plain
        assert re.search(r"pip install [^'\"]*\[", plain) is None


def test_commands_in_help_and_comments_are_quoted():
    files = (REPOSITORY / "rlft" / "assets" / "usage").iterdir()
    lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("  rlft ")]
    assert [for_a_shell(line) for line in lines] == lines
    assert len(lines) > 30
    for folder in ("configs", "recipes"):
        for file in (REPOSITORY / folder).rglob("*.yaml"):
            for line in file.read_text().splitlines():
                comment = line.partition("#")[2]
                assert for_a_shell(comment) == comment, file
    help_text = yaml.safe_load((REPOSITORY / "configs" / "hydra" / "help" / "rlft.yaml").read_text())["template"]
    assert for_a_shell(help_text) == help_text


def test_any_override_in_a_sentence_is_one_word_of_a_shell():
    for line in ("rlft train 'name=use x=[a] here'", 'the text is "use a=[b] now"', "run=runs/a (steps=3)"):
        assert for_a_shell(line) == line, "what is quoted already stays as it is"
    rng, said = random.Random(0), []
    keys = ["reward", "data.metadata_fields", "+a.b", "trainer.lr", "logger"]
    parts = ["a", "b1", ",", "[", "]", "..", "(", ")", "*", "{x:1}", "?", "/", "1e-5", "~"]
    for word in [f"{rng.choice(keys)}={''.join(rng.choices(parts, k=rng.randint(1, 7)))}" for _ in range(400)]:
        plain = word.rstrip(".,;:?")
        if plain.count(")") > plain.count("(") or "?" in word[len(plain) :]:
            continue  # which ends a parenthesis of the sentence, or a question
        sentence = for_a_shell(f"set {word}, or")
        assert shlex.split(sentence)[1] == f"{word},"
        said.append(sentence.split(" ")[1].removesuffix(","))
    bare = [re.sub(r"'[^']*'", "", word) for word in said]
    assert not any(re.search(r"[\[*?{(]", word) for word in bare)
    assert len(said) > 200
    for shell in filter(None, map(shutil.which, ("bash", "zsh"))):
        printed = subprocess.run([shell, "-c", f"printf '%s\\n' {' '.join(said)}"], capture_output=True, text=True)
        assert printed.stdout.splitlines() == [shlex.split(word)[0] for word in said], shell
