"""An HTML page with its styles and scripts in it, which loads nothing and runs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from pathlib import Path

import rlft

ASSETS = Path(rlft.__file__).parent / "assets"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {policy}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
{styles}
</head>
{body}
{data}{scripts}
</html>
"""


def html_page(
    title: str, body: str, styles: Sequence[str], scripts: Sequence[str], *, data: bytes = b"", policy: str = ""
) -> str:
    """The page of these files below assets/, which its content security policy allows by their hashes, and `policy`.

    `data` is for the scripts, in the element of that name as base64, which cannot hold markup.
    """
    style_texts, script_texts = ([*map(_text, names)] for names in (styles, scripts))
    allowed = ["img-src data:", _allowed("script-src", script_texts), _allowed("style-src", style_texts), policy]
    return PAGE.format(
        policy="; ".join(filter(None, allowed)),
        title=html.escape(title),
        styles="\n".join(f"<style>{text}</style>" for text in style_texts),
        body=_text(body),
        data=f'<script type="text/plain" id="data">{base64.b64encode(data).decode()}</script>\n' if data else "",
        scripts="\n".join(f"<script>{text}</script>" for text in script_texts),
    )


def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _allowed(kind: str, texts: Sequence[str]) -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join([kind, *(f"'sha256-{digest}'" for digest in hashes)])
