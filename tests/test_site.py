"""The site of docs/, as `make docs` builds it: no link leads nowhere, and what is generated is whole."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from rlft import cli
from rlft.commands.lists import all_keys
from rlft.config import command as commands

REPOSITORY = Path(__file__).parents[1]
HREF = re.compile(r'(?:href|src)="?([^"\s>#?]+)')


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    [command] = [line for line in (REPOSITORY / "Makefile").read_text().splitlines() if "mkdocs build" in line]
    words = [sys.executable, *command.partition("python ")[2].split(), "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)}
    built = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stdout + built.stderr) == (0, ""), built.stderr
    return folder


def test_every_page_is_there_and_every_link_of_it_leads_to_a_file(site):
    for page in (REPOSITORY / "docs").rglob("*.md"):
        place = page.relative_to(REPOSITORY / "docs").with_suffix("")
        assert (site / (place if place.name == "index" else place / "index")).with_suffix(".html").exists(), page
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 50
    missing = [
        (page.relative_to(site), place)
        for page in pages
        for place in HREF.findall(page.read_text())
        if not place.startswith(("http", "mailto:", "data:"))
        and not (page.parent / unquote(html.unescape(place))).exists()
    ]
    assert missing == []


@pytest.mark.slow
def test_the_reference_has_every_command_of_the_help(site):
    page = html.unescape((site / "reference" / "cli" / "index.html").read_text())
    assert {*commands.OWN, *cli.TOOLS} <= set(re.findall(r'id="rlft-([a-z]+)"', page))


@pytest.mark.slow
def test_the_reference_has_every_key_with_its_meaning_and_its_links_lead_to_headings(site):
    page = (site / "reference" / "keys" / "index.html").read_text()
    rows = dict(re.findall(r"<dt><code>(\S+)[^<]*</code></dt><dd>(.*?)</dd>", page))
    assert rows.keys() == {row.key for row in all_keys()}
    assert all(len(meaning.partition("<br>")[0]) > 5 for meaning in rows.values())
    links = re.findall(r'href="\.\./\.\./([^"#]+/)(?:#([^"]+))?"', "".join(rows.values()))
    assert links
    for place, anchor in links:
        assert not anchor or f'id="{anchor}"' in (site / place / "index.html").read_text(), (place, anchor)
