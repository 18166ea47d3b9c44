"""Every page in docs/: its commands are run, its files are written first, its links lead somewhere.

A page's `sh` blocks are run line by line, in a folder of its own; `# refused` after one means exit code 2. A block that
names a file (as in "yaml mine/reward/brief.yaml") is written there. `<time>` stands for the newest run of that name; a
run that is resumed without more steps has lost its newest checkpoint before, as by a kill. What a page does not say of
sizes is made small, and what needs a GPU or a hub is replaced: the engine by transformers, `<model>` and `<gsm8k>` by
ones that are here. A command that ends with ` &`, a server, goes on until the end of its page, at a port that is free.
"""

import ast
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from in_one_test import each
from packages import install
from slow_cases import slow_but

from rlft import cli
from rlft.config import catalog, command as commands
from rlft.config.compose import compose
from rlft.config.keys import is_below, keys_of
from rlft.config.schema import free_keys

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)")
PROBLEMS = Path(__file__).parent / "data" / "gsm8k_mini"
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]

SMALL = {
    "steps": "2", "prompts_per_step": "4", "group_size": "2", "lora.rank": "2", "lora.alpha": "4", "eval.every": "2",
    "eval.num_prompts": "4", "checkpoint.every": "1", "generation.max_tokens": "16", "generation": "transformers",
    "model.device": "cpu", "scoring.workers": "0",
}  # fmt: skip
TASK = {"data.size": "64", "data.held_out_size": "16"}
"""The same of the task that is made, where a recipe brings it."""
FEWER = {"steps=80": "steps=4", "step_000078": "step_000002", "steps=84": "steps=6", "steps=50": "steps=12",
         "sweep.trials=20": "sweep.trials=3", "sweep.trials=40": "sweep.trials=4"}  # fmt: skip
"""What a page's continued run becomes when the run before it has SMALL's two steps."""

READ = (".md", ".yaml", ".yml", ".py", ".jinja", ".svg")
UNUSUAL = re.compile(
    r"\b(main job|(go|goes|going|went) on (from|with(?! the next step))|odd texts|is it what it says"
    r"|does all of it work|return minus a baseline|taught by a stronger model|functions? of a group|right in \d+ %"
    r"|installing elsewhere|met the limit|(so|they) choose nothing|beside|(what )?(learned|gave) nothing"
    r"|is right by itself|are texts, |text is text|the words after `rlft`|paid like an answer|pays a text"
    r"|no verdict is|siblings?|ratio runs away|rewards of turns|a line an? (step|evaluation)|at work in"
    r"|nobody foresaw|what grew|multiplies it out|made (runs|curves)|pretended|turns of the loop|a pass more"
    r"|numbers of single tokens|how it stands|what came of|(a|the) turn ends with|packed; decodes)\b",
    re.IGNORECASE,
)
"""Words that texts do not have, since the field has its own, such as "completions of a group" for siblings."""

ONLY = dict.fromkeys(("sft", "rm", "dpo"), ("steps", "lora.rank", "lora.alpha", "model.device"))
ONLY["sample"] = ("generation.max_tokens", "generation", "model.device", "scoring.workers")


def blocks(page):
    """(language, file or empty, text) of each fenced block."""
    for match in BLOCK.finditer(page.read_text()):
        yield match[1], match[2] or "", match[3]


def filled(command, model):
    """With the newest run for <time>, and what is here for what is not."""
    for steps, fewer in FEWER.items():
        command = command.replace(steps, fewer)
    for folder in re.findall(r"runs/[a-z0-9_]+/<time>", command):
        newest = max(Path(folder).parent.iterdir(), key=lambda found: found.stat().st_mtime)
        command = command.replace(folder, str(newest))
    return command.replace("<model>", str(model)).replace("<gsm8k>", str(PROBLEMS))


def smaller(words, model):
    """The words with sizes that the page leaves open made small."""
    command, given = words[0], {word.partition("=")[0] for word in words}
    if command not in ("train", "sft", "rm", "dpo", "sample", "plan") or {"--help", "--cfg"} & set(words):
        return words
    names = [name for name in ONLY.get(command, SMALL) if name not in given]
    if "run" in given:
        names = [name for name in names if not name.startswith(("lora.", "model."))]
    if command == "plan":  # of the sizes that it says itself
        groups = catalog.groups(words[1] if words[1] in commands.names() else "train")
        names = [name for name in names if name == "model.device" or name in {*groups} & {"generation"}]
        names = [name for name in names if name != "model.device" or "card" not in given]
    added = [f"{name}={SMALL[name]}" for name in names]
    recipe = next((word for word in words if word.startswith("+recipe=")), "")
    if command == "train" and "arithmetic" in recipe and not {"data", "resume"} & given:
        added += [f"{name}={value}" for name, value in TASK.items() if name not in given]
    if "gsm8k" in recipe:
        places = {"model.path": str(model), "data.path": str(PROBLEMS), "prompts.max_tokens": "1200"}
        added += [f"{name}={value}" for name, value in places.items() if name not in given]
        added = [word for word in added if not (command == "plan" and word.startswith("generation="))]
    return [*words, *added]


def start(command, port):
    """Starts a server at this port, which has said where it listens when this returns."""
    words = [sys.executable, "-m", "rlft.cli", *shlex.split(command)[1:-1], f"serve.port={port}"]
    started = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    assert any("OPENAI_BASE_URL" in line for line in started.stderr), command  # else it has ended
    return started


def run(command, model):
    program, *words = shlex.split(command.partition(" < ")[0])
    if program == "python":
        script = Path(words[0]) if Path(words[0]).exists() else REPOSITORY / words[0]
        return subprocess.run([sys.executable, script, *words[1:]], check=False).returncode
    if program == "pip":  # what the page needs is installed here
        assert re.fullmatch(rf"rlft\[({'|'.join(EXTRAS)})\]", words[1]), command
        return 0
    assert program == "rlft", command
    words = smaller(words, model)
    if words[0] == "resume" and words[1].startswith("runs") and not any(word.startswith("steps=") for word in words):
        shutil.rmtree(max((Path(words[1]) / "checkpoints").iterdir()))
    if " < " in command:
        with Path(command.partition(" < ")[2]).open() as lines, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", lines)
            return cli.run(words)
    return cli.run(words)


@pytest.mark.parametrize(
    "page", slow_but(DOCS / "tutorials" / "first-run.md", PAGES), ids=[page.stem for page in PAGES]
)
def test_every_command_of_a_page_does_what_it_says(page, long_context_path, tmp_path, monkeypatch, capfd, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.syspath_prepend(str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for language, file, text in blocks(page):
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(text.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
            if file == "pyproject.toml":
                project = tomllib.loads(text)["project"]
                install(tmp_path, project["name"], project["entry-points"][commands.GROUP])
                commands.plugins.cache_clear()
        elif language == "sh":
            for line in text.splitlines():
                command, _, remark = map(str.strip, line.partition("  # "))
                if command.endswith(" &"):
                    request.addfinalizer(start(command, port).kill)
                    continue
                code = run(filled(command, long_context_path), long_context_path)
                told = capfd.readouterr()
                assert code == (2 if remark == "refused" else 0), f"{command}\n{told.out[-2000:]}{told.err[-2000:]}"
    commands.plugins.cache_clear()
    if page.stem == "data":  # its example is a run that learns: of at most 1.2, by more than 0.15
        metrics, _ = sorted(Path("runs/sums").glob("*/metrics.jsonl"))  # the other is of sums/run.yaml
        rewards = [json.loads(line)["reward/mean"] for line in metrics.read_text().splitlines()]
        assert len(rewards) >= 10
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


@each("page", [*PAGES, REPOSITORY / "README.md", REPOSITORY / "recipes" / "README.md"])
def test_links_lead_somewhere(page):
    for place, anchor in LINK.findall(page.read_text()):
        target = page.parent / place
        assert target.exists(), place
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            known = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in known, f"{place}#{anchor}"


def test_the_keys_that_may_change_on_resume_are_those_of_the_page():
    page = (DOCS / "how-to" / "resume-and-sweeps.md").read_text()
    paragraph = page.partition("Keys that change no number may differ:")[2].partition("Any other is refused")[0]
    of_engines = {*free_keys(compose([])["generation"])}
    told = {*re.findall(r"`([a-z_.]+)`", paragraph), "resume"}
    tables = [keys_of(commands.named(command).root) for command in commands.OWN]
    for table in tables:
        leaves = [key for key in table if not any(other.startswith(f"{key}.") for other in table)]
        assert [key for key in leaves if table[key].free] == [key for key in leaves if is_below(key, told)]
    assert {key for key in told if not any(key in table for table in tables)} == of_engines


def test_sizes_of_the_demo_are_the_recipes():
    run = compose(["+recipe=grpo_arithmetic"])
    told = f"{run['prompts_per_step']} prompts x {run['group_size']} completions a step, {run['steps']} steps"
    assert told in (DOCS / "tutorials" / "first-run.md").read_text()
    page = (DOCS / "explanation" / "batch-sizes.md").read_text()
    for key in ("prompts_per_step", "group_size", "epochs", "minibatches"):
        assert f"| `{key}` | {run[key]} |" in page
    assert f"together {run['prompts_per_step'] * run['group_size']} a step" in page


def test_what_commands_of_the_pages_write_is_ignored_by_git():
    """Runs, sweeps, evaluations, and the `out=` of exports and reports, where they are written into a clone."""
    ignored = set((REPOSITORY / ".gitignore").read_text().split())
    pages = "".join(page.read_text() for page in [*PAGES, REPOSITORY / "README.md"])
    folders = {*re.findall(r"out=(\w+)/", pages), "runs", "sweeps"}
    assert "exports" in folders
    assert {f"/{folder}/" for folder in folders} <= ignored
    assert re.search(r"out=\w+\.html", pages)
    assert "/*.html" in ignored


def test_the_index_names_every_page():
    linked = {place for place, _ in LINK.findall((DOCS / "index.md").read_text())}
    assert linked == {str(page.relative_to(DOCS)) for page in PAGES} - {"index.md"} | {"tutorials/start.ipynb"}


def words_of(file):
    """The text of a file that a user reads: of Python its strings without docstrings, of others all of it."""
    if file.suffix != ".py":
        yield file.read_text(encoding="utf-8")
        return
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    shown = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    yield from (text.value for text in texts if id(text) not in shown)


def unusual_words(text):
    return [found[0] for found in UNUSUAL.finditer(re.sub(r"\s+(# )?", " ", text))]


def test_texts_that_users_read_have_the_fields_own_terms():
    folders = ("docs", "configs", "recipes", "rlft")
    files = [file for folder in folders for file in (REPOSITORY / folder).rglob("*") if file.suffix in READ]
    files += [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "mkdocs.yml")]
    assert len(files) > 400
    found = {str(file.relative_to(REPOSITORY)): words for file in files
             if (words := unusual_words("\0".join(words_of(file))))}  # fmt: skip
    assert not found
    assert unusual_words("# of the main\n# job\n goes on\n  from") == ["main job", "goes on from"]


def test_what_is_named_for_adding_things_exists():
    """In CONTRIBUTING: each file and folder without an x, and each name of code."""
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    table = page.partition("## Adding things")[2].partition("\n## ")[0]
    paths = {path for path in re.findall(r"[\w./-]+/[\w./-]*", table) if not re.search(r"\bx(_|\.)", path)}
    assert len(paths) > 15
    assert not [path for path in paths if not (REPOSITORY / path).exists()]
    source = "".join(file.read_text() for file in (REPOSITORY / "rlft").rglob("*.py"))
    names = {name for name in re.findall(r"`(\w+)`", table) if name.lower() != "sh"}
    assert len(names) > 25
    assert not [name for name in names if not re.search(rf"\b{name}\b", source)]
    pictured = (DOCS / "assets" / "stages.svg").read_text()
    subprocess.run([sys.executable, DOCS / "assets" / "stages.py"], check=True)
    assert (DOCS / "assets" / "stages.svg").read_text() == pictured
    fields = {name for text in re.findall(r"monospace[^>]*>([^<]*)", pictured) for name in re.findall(r"\w+_\w+", text)}
    assert {"loss_mask", "by_reward"} <= fields
    assert not [name for name in fields if not re.search(rf"^    {name}: ", source, re.MULTILINE)]


def test_every_script_that_a_page_names_is_run_by_a_test_or_was_there_at_the_commit_beside_it():
    tests = "".join(file.read_text() for file in Path(__file__).parent.rglob("test_*.py"))
    for page in [*PAGES, REPOSITORY / "recipes" / "README.md"]:
        for paragraph in page.read_text().split("\n\n"):
            for name in re.findall(r"scripts/(\w+)\.py", paragraph):
                if (REPOSITORY / "scripts" / f"{name}.py").exists():
                    assert name in tests, name
                else:
                    assert re.search(r"commit [0-9a-f]{7}", paragraph.replace("\n", " ")), (page.name, name)
