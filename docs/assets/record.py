"""Runs a command in a terminal of 88 x 24 and writes what it shows as an animated SVG; needs `pip install pyte`.

python docs/assets/record.py docs/assets/live-view.svg rlft train +recipe=grpo_arithmetic
"""

import codecs
import fcntl
import html
import os
import pty
import struct
import sys
import termios
import time
from pathlib import Path

import pyte

COLUMNS, ROWS = 88, 24
CELL, LINE, MARGIN = 8.43, 18, 14  # pixels
EVERY, SPEED, LAST = 1.5, 6.0, 5.0  # seconds of the run between frames; times as fast; seconds that the end stays
COLOURS = {
    "black": "#484f58", "red": "#ff7b72", "green": "#56d364", "brown": "#e3b341", "blue": "#79c0ff",
    "magenta": "#d2a8ff", "cyan": "#56d4dd", "white": "#e6edf3", "default": "#d0d7de",
}  # fmt: skip


def record(command: list[str]) -> list[tuple[float, str]]:
    """[(seconds since the start, text)] of all that the command writes to its terminal."""
    child, terminal = pty.fork()
    if child == 0:
        time.sleep(0.2)  # the size is set first
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    start, decoder, events = time.monotonic(), codecs.getincrementaldecoder("utf-8")("replace"), []
    while True:
        try:
            text = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        events.append((time.monotonic() - start, decoder.decode(text)))
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"the command ended with {code}")
    return events


def screens(events: list[tuple[float, str]]) -> list[tuple[float, list[str]]]:
    """[(seconds, SVG of each line)] of the screen, at most one in EVERY seconds, and the last one."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    frames: list[tuple[float, list[str]]] = []
    for i, (seconds, text) in enumerate(events):
        stream.feed(text)
        quiet = i + 1 == len(events) or events[i + 1][0] - seconds > 0.1  # not half a redraw
        if i + 1 == len(events) or (quiet and (not frames or seconds - frames[-1][0] >= EVERY)):
            lines = [line_of(screen, row) for row in range(ROWS)]
            if not frames or lines != frames[-1][1]:
                frames.append((seconds, lines))
    return frames


def line_of(screen: pyte.Screen, row: int) -> str:
    spans, cells = [], [screen.buffer[row][column] for column in range(COLUMNS)]
    start = 0
    for column in range(1, COLUMNS + 1):
        if column < COLUMNS and (cells[column].fg, cells[column].bold) == (cells[start].fg, cells[start].bold):
            continue
        text, cell = "".join(cell.data for cell in cells[start:column]).rstrip(), cells[start]
        if text:
            indent = len(text) - len(text.lstrip())
            colour = COLOURS.get(cell.fg.removeprefix("bright"), f"#{cell.fg}")
            bold = ' font-weight="bold"' if cell.bold else ""
            width = (len(text) - indent) * CELL
            spans.append(
                f'<text x="{(start + indent) * CELL:.1f}" fill="{colour}"{bold} textLength="{width:.1f}" '
                f'lengthAdjust="spacingAndGlyphs">{html.escape(text.lstrip())}</text>'
            )
        start = column
    return "".join(spans)


def svg_of(frames: list[tuple[float, list[str]]]) -> str:
    """The frames below each other, and an animation that moves them past a window; equal lines are written once."""
    width, height = COLUMNS * CELL + 2 * MARGIN, ROWS * LINE + 2 * MARGIN
    names: dict[str, str] = {}
    body = []
    for i, (_, lines) in enumerate(frames):
        for row, line in enumerate(lines):
            if line:
                name = names.setdefault(line, f"l{len(names)}")
                body.append(f'<use href="#{name}" y="{i * height + MARGIN + (row + 0.75) * LINE:.1f}"/>')
    total = frames[-1][0] / SPEED + LAST
    steps = "".join(
        f"{100 * at / SPEED / total:.3f}%{{transform:translateY({-i * height}px)}}" for i, (at, _) in enumerate(frames)
    )
    last = f"100%{{transform:translateY({-(len(frames) - 1) * height}px)}}"
    defs = "".join(f'<g id="{name}">{line}</g>' for line, name in names.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">'
        f"<style>text{{font:14px Menlo,Consolas,DejaVu Sans Mono,monospace;white-space:pre}}"
        f"@keyframes play{{0%{{transform:translateY(0)}}{steps}{last}}}"
        f".film{{animation:play {total:.1f}s steps(1,end) infinite}}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/><defs>{defs}</defs>'
        f'<g transform="translate({MARGIN} 0)"><g class="film">{"".join(body)}</g></g></svg>\n'
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg_of(screens(record(sys.argv[2:]))), encoding="utf-8")
