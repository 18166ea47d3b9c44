"""`rlft report <run> ..`: writes one HTML file with curves, alarms, configs and completions, which needs no network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rlft
from rlft.commands.watch.arguments import read_words
from rlft.commands.watch.report_data import folders_of, report_of
from rlft.commands.watch.runs import REPORT
from rlft.system import interrupt
from rlft.system.disk import named_by, writing
from rlft.system.files import write_atomically
from rlft.types import UserError

USAGE = """\
usage: rlft report <run or folder above runs> ... [out=<file.html>]

One HTML file, to open in any browser, without network or account: curves with held-out accuracy beside the reward,
seconds by stage, waste, alarms, the config and how runs differ, and a browser for completions, whose tokens are
coloured by what the policy, the reference and the update say of them. Seeds of a sweep can be drawn as a band.

  out    the file; by default report.html in the run's folder, of several runs in the current one

  rlft report runs/grpo_arithmetic/<time>
  rlft report sweeps/grpo_arithmetic/<time> out=sweep.html"""

ASSETS = Path(rlft.__file__).parent / "assets" / "report"
MAX_BYTES = 8_000_000
"""The most bytes of completions as JSON, before compression. Random letters, which compress worst, then take 5.6 MB of
the file, and the page is usable 0.55 to 0.85 s after it is opened (test_report_in_a_browser.py)."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {policy}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
{styles}
</head>
{body}
<script type="text/plain" id="data">{data}</script>
{scripts}
</html>
"""


def command(arguments: Sequence[str]) -> None:
    """Writes the report and prints its path."""
    print(report(arguments))


def report(arguments: Sequence[str]) -> Path:
    """Writes the page of the named runs and returns its path.

    Raises:
        UserError: there is no such run, or the file cannot be written.
    """
    words = read_words("report", arguments, ("out",))
    folders = folders_of(words.folders)
    default = folders[0] / REPORT if len(folders) == 1 else Path(REPORT)
    out = Path(words.values.get("out", default))
    if out.suffix != ".html" or out.is_dir():
        raise UserError("out", "must be an HTML file", got=out, remedy="name one such as out=report.html")
    text = page(report_of(folders, MAX_BYTES, words.folders))
    with named_by("out"):
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, text)
    interrupt.set_interrupt_message(f"the report is {out}")
    return out


def page(data: Mapping[str, Any]) -> str:
    """The whole page.

    The runs' values are base64, which cannot hold markup, and the page's content security policy allows only the
    scripts and styles written here, by their hashes.
    """
    styles = [(ASSETS / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "report.css")]
    scripts = [(ASSETS / name).read_text(encoding="utf-8") for name in ("uPlot.iife.min.js", "report.js")]
    packed = gzip.compress(json.dumps(data, ensure_ascii=True, allow_nan=False).encode(), mtime=0)
    return PAGE.format(
        policy="; ".join([_allowed("script-src", scripts), _allowed("style-src", styles)]),
        title=html.escape(f"rlft: {data['runs'][0]['name']}"),
        styles="\n".join(f"<style>{text}</style>" for text in styles),
        body=(ASSETS / "report.html").read_text(encoding="utf-8"),
        data=base64.b64encode(packed).decode(),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts),
    )


def _allowed(kind: str, texts: list[str]) -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join([kind, *(f"'sha256-{digest}'" for digest in hashes)])
