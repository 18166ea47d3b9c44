"""`rlft rank`: a person ranks the answers of `rlft sample` in a browser; two people's agreement is printed.

The file of rankings, which `rlft rm` and `rlft dpo` read, has rows with the keys ranker (who ranked), prompt_id,
messages (the prompt), completions (in the order in which they were shown), models (what sampled each), scores (0 for
the worst; equal ones are tied) and skipped (all scores are 0 then).

The page is served to browsers on this machine. A request needs the random token in the page's address, and this
server's Host, so that no other site's name can stand for it (DNS rebinding). One that changes something must come
from the page itself, by its Origin.
"""

from __future__ import annotations

import errno
import json
import os
import random
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from itertools import combinations
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import Lock
from typing import Any

from rlft.commands.tables import html_page
from rlft.commands.watch.runs import read_words
from rlft.config.overrides import unquoted
from rlft.data.fields import RowError
from rlft.data.files import parsed
from rlft.data.records import Sampled, check_prompt_ids, is_sampled, parse_sampled
from rlft.runs.lines import DamagedLines, complete_lines, encode
from rlft.system import crash, interrupt
from rlft.system.disk import DiskError, blame_key, writing
from rlft.system.files import append, flush
from rlft.system.locks import Taken, take
from rlft.system.terminal import command_line, program, say
from rlft.system.text import visible
from rlft.types import IMAGE, counted, require

Row = dict[str, Any]

MOST_ANSWERS = 9  # of a prompt: there are as many keys to choose them
BEGINNING = b'{"ranker": '  # of each row, by which one that a kill has cut is recognised


def questions_of(paths: Iterable[str], ranker: str, seed: int) -> list[Row]:
    """Rows without scores, for the prompts of these files of `rlft sample` that have at least two different answers.

    Seed and ranker give the order of rows and of answers, and which MOST_ANSWERS are shown of more. Raises UserError.
    """
    lines = [line for path in paths for _, line in parsed(path, "samples", None, _line)]
    check_prompt_ids([sampled.prompt for sampled, _ in lines], "samples")
    models: dict[str, dict[str, str]] = {}
    for sampled, model in lines:
        models.setdefault(sampled.prompt.id, {}).setdefault(sampled.completion, model)
    messages = {sampled.prompt.id: [dict(message) for message in sampled.prompt.messages] for sampled, _ in lines}
    found: list[tuple[float, Row]] = []
    for name, model_of in models.items():
        rng = random.Random(f"{seed} {ranker} {name}")
        place, texts = rng.random(), rng.sample(sorted(model_of), min(MOST_ANSWERS, len(model_of)))
        row: Row = {"ranker": ranker, "prompt_id": name, "messages": messages[name], "completions": texts}
        found += [(place, row | {"models": [model_of[text] for text in texts]})] if len(texts) > 1 else []
    remedy = "sample several completions of each prompt: rlft sample n=4"
    require(found, "samples", "no prompt has two different answers", got=", ".join(paths), remedy=remedy)
    return [row for _, row in sorted(found, key=lambda each: each[0])]


def _line(fields: Mapping[str, Any], row_id: str) -> list[tuple[Sampled, str]]:
    """(a line of `rlft sample`, the model that sampled it). Raises RowError."""
    if not is_sampled(fields):
        raise RowError("is no line of rlft sample", remedy="name a file that rlft sample has written")
    sampled = parse_sampled(fields, with_tokens=False)
    if any(IMAGE in message["content"] for message in sampled.prompt.messages):
        raise RowError("its prompt has an image, which is not in the file", remedy="sample prompts of text alone")
    return [(sampled, str(fields.get("model")))]


def read_rows(file: Path, key: str) -> list[tuple[int, Row]]:
    """(bytes up to its end, row) of each ranking, without a last one that a kill has cut. UserError: others are bad."""
    lost, keys = list[DamagedLines](), {"ranker", "prompt_id", "messages", "completions", "scores"}
    with file.open("rb") as lines:
        rows = [*complete_lines(lines, lost, lambda row: row.keys() >= keys)]
    remedy = "remove what is no ranking, or name another file"
    require(not lost, key, f"{', '.join(map(str, lost))}: no ranking of rlft rank", got=file, remedy=remedy)
    return rows


class Rankings:
    """The rankings in one person's file; each is on disk when `add` returns.

    Attributes:
        done: (where its row begins, in bytes, question) of each ranking.
        left: the questions without one; the last is the next.

    Raises UserError: the file is another person's or of other samples, or another process writes it.
    """

    def __init__(self, file: Path, questions: Sequence[Row]) -> None:
        self.file, self.done = file, list[tuple[int, Row]]()
        with blame_key("out"), writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = file.open("ab", buffering=0)
            flush(file.parent)
        is_free = take(self._stream.fileno()) is not Taken.no
        require(is_free, "out", "another rlft rank writes it", got=file, remedy="end that one, or name another file")
        left, end = {question["prompt_id"]: question for question in questions}, 0
        for next_end, row in read_rows(file, "out"):
            question = left.pop(row["prompt_id"], {})
            is_ours = all(row[name] == question.get(name) for name in ("ranker", "messages"))
            problem = f"its ranking {len(self.done) + 1} is by another person or of other samples"
            require(is_ours, "out", problem, got=file, remedy="name another file, one for each person")
            self.done.append((end, question))
            end = next_end
        self.left = [*reversed(left.values())]
        if rest := file.read_bytes()[end:]:
            is_row = rest.startswith(BEGINNING[: len(rest)])
            require(is_row, "out", "is no file of rankings", got=file, remedy="name another file")
            self._cut(end)
            say(f"{file}: the last ranking was cut by a kill; its prompt is shown again")

    def add(self, scores: Sequence[int] | None) -> None:
        """Adds the scores of the next question's answers; None skips it. DiskError: the file is as it was."""
        skipped = [0] * len(self.left[-1]["completions"])
        row, begin = {**self.left[-1], "scores": scores or skipped, "skipped": scores is None}, self._size()
        append(self._stream, encode(row), durable=True)
        self.done.append((begin, self.left.pop()))

    def undo(self) -> None:
        """Removes the last ranking, whose question is the next one again."""
        self._cut(self.done[-1][0])
        self.left.append(self.done.pop()[1])

    def _size(self) -> int:
        """The bytes of the file that is written. DiskError: it is no longer that of this name."""
        written = os.fstat(self._stream.fileno())
        with writing(self.file):
            if not self.file.exists() or not os.path.samestat(written, self.file.stat()):
                raise FileNotFoundError(errno.ENOENT, "the file was moved or replaced meanwhile")
        return written.st_size

    def _cut(self, end: int) -> None:
        self._size()
        with writing(self.file):
            os.ftruncate(self._stream.fileno(), end)
            os.fsync(self._stream.fileno())

    def shown(self) -> dict[str, Any]:
        """What the page is told: how many are done, of how many, and the next question, without what sampled it."""
        question = self.left[-1] if self.left else {"messages": [], "completions": []}
        return {
            "done": len(self.done),
            "of": len(self.done) + len(self.left),
            "prompt": [{"role": message["role"], "text": _text(message)} for message in question["messages"]],
            "answers": [visible(text, joiners=False) for text in question["completions"]],
        }


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message, and its other fields, such as calls of tools, as JSON."""
    others = [f"{key}: {json.dumps(value)}" for key, value in message.items() if key not in ("role", "content")]
    return visible("\n".join([message["content"], *others]), joiners=False)


HOST = "127.0.0.1"
MAX_BODY_BYTES = 10_000
STALE = "Nothing was saved: another window has changed the rankings. This is the next prompt."
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class RankServer(ThreadingTCPServer):
    """Listens at a free port. `lock` is held while the rankings change."""

    daemon_threads = True

    def __init__(self, rankings: Rankings) -> None:
        styles, scripts = ("report/report.css", "rank/rank.css"), ("report/dom.js", "rank/rank.js")
        page = html_page("rlft rank", "rank/rank.html", styles, scripts, policy="connect-src 'self'")
        self.rankings, self.page, self.lock = rankings, page.encode(), Lock()
        super().__init__((HOST, 0), Handler)
        self.path = f"/{secrets.token_urlsafe(24)}/"
        self.hosts = [f"{name}:{self.server_address[1]}" for name in (HOST, "localhost")]
        self.url = f"http://{self.hosts[0]}{self.path}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Says an unexpected error, which the browser is not told; one that is closed only breaks its connections."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, ConnectionError | TimeoutError):
            say(f"a request could not be answered: {crash.report(error)}")

    def answer(self, request: object) -> tuple[int, str]:
        """Does what the page asks; returns the HTTP status, and what was wrong or "".

        request: {} for nothing; {"number": len(done), "scores": one for each answer, or None to skip}; or
            {"number": len(done), "undo": true}.
        """
        done, left = self.rankings.done, self.rankings.left
        try:
            match request:
                case {"number": int(number), "undo": True} if number == len(done) > 0:
                    self.rankings.undo()
                case {"number": int(number), "scores": scores} if number == len(done) and left and self._fit(scores):
                    self.rankings.add(scores)
                case _ if request != {}:
                    return 409, STALE
        except DiskError as error:
            return 507, f"Nothing was saved: {error}"
        return 200, ""

    def _fit(self, scores: Any) -> bool:
        """Whether these are None or whole numbers from 0 without a gap, one for each answer of the next question."""
        if not isinstance(scores, list):
            return scores is None
        kinds = [int] * len(self.rankings.left[-1]["completions"])
        return [*map(type, scores)] == kinds and {*scores} == {*range(max(scores) + 1)}


class Handler(BaseHTTPRequestHandler):
    server: RankServer  # type: ignore[assignment]
    timeout = 30  # seconds that a request may take to arrive
    server_version, sys_version = "rlft", ""

    def do_GET(self) -> None:
        if self._is_allowed(changes=False):
            self._send(200, self.server.page, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._send(413, json.dumps({"problem": f"a request has up to {MAX_BODY_BYTES} bytes"}).encode())
            return
        body = self.rfile.read(int(length))  # before a refusal, which the client might else not receive
        if not self._is_allowed(changes=True):
            return
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            request = None
        with self.server.lock:
            status, problem = self.server.answer(request)
            self._send(status, json.dumps({**self.server.rankings.shown(), "problem": problem}).encode())

    def _is_allowed(self, *, changes: bool) -> bool:
        """Whether the token and the host are this server's, and for changes the origin, too; else refuses."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        has_token = secrets.compare_digest(self.path.encode(), self.server.path.encode())
        is_allowed = has_token and host in self.server.hosts and (not changes or origin == f"http://{host}")
        if not is_allowed:
            self._send(403, json.dumps({"problem": "Open the address that rlft rank printed last."}).encode())
        return is_allowed

    def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing about requests."""


def command(arguments: Sequence[str]) -> None:
    others, values, _ = read_words("rank", arguments)
    if "agree" in values:
        remedy = "write rlft rank agree=[anna.jsonl,ben.jsonl], and no other key"
        paths = [Path(name) for name in _names(values["agree"])]
        is_alone = len(paths) == 2 and len(values) == 1 and not others
        require(is_alone, "agree", "takes two files", got=" ".join(arguments), remedy=remedy)
        missing = next((path for path in paths if not path.is_file()), None)
        require(missing is None, "agree", "there is no such file", got=missing, remedy=remedy)
        print_agreement(*([row for _, row in read_rows(path, "agree")] for path in paths))
        return
    remedy = "write rlft rank samples=<samples.jsonl> out=<preferences.jsonl>"
    require(not others, "rank", "takes keys alone", got=" ".join(others), remedy=remedy)
    for key in ("samples", "out"):
        require(values.get(key), key, "is missing", remedy=remedy)
    ranker = unquoted(values.get("ranker") or os.environ.get("USER", "user"))
    out, seed = Path(unquoted(values["out"])), values.get("seed", "0")
    require(out.suffix == ".jsonl", "out", "must be a JSONL file", got=out, remedy="name one: out=preferences.jsonl")
    require(seed.isdecimal(), "seed", "must be a whole number, at least 0", got=seed, remedy="try seed=1")
    rankings = Rankings(out, questions_of(_names(values["samples"]), ranker, int(seed)))
    server = RankServer(rankings)
    say(f"{len(rankings.done)} done, {counted(len(rankings.left), 'prompt')} left to rank by {ranker}, in a browser at")
    say(f"  {server.url}\nCtrl-C ends; all rankings until then are in {out}")
    try:
        server.serve_forever()
    finally:
        server.lock.acquire()  # and not released: what is being written is finished, and nothing else is begun
        done, of = len(rankings.done), counted(len(rankings.done) + len(rankings.left), "prompt")
        again = f"continue with {command_line(program(), 'rank', *arguments)}"
        learn = f"learn from them with {command_line(program(), 'rm', f'preferences.path={out}')} model.path=<model>"
        interrupt.set_interrupt_message(f"{done} of {of} are done, in {out}; {again if rankings.left else learn}")


def print_agreement(first: Sequence[Row], second: Sequence[Row]) -> None:
    """Prints how far two people agree on the pairs of answers that both have ranked. UserError: there is none."""
    verdicts, prompts = verdicts_of(first, second)
    number, same = verdicts.total(), sum(count for (one, other), count in verdicts.items() if one == other)
    require(number, "agree", "no two answers were ranked by both", remedy="let both rank the same samples")
    names = " and ".join(", ".join(dict.fromkeys(row["ranker"] for row in rows)) for rows in (first, second))
    found = kappa(verdicts)
    print(f"{names}: {counted(number, 'pair')} in {counted(prompts, 'prompt')} that both ranked")
    print(f"same verdict   {same / number:.3f}  ({same} of {number}: better, worse or equal)")
    print(f"Cohen's kappa  {'undefined' if found is None else f'{found:.3f}'}  (1: always the same; 0: as by chance)")


def verdicts_of(first: Sequence[Row], second: Sequence[Row]) -> tuple[Counter[tuple[int, int]], int]:
    """({(one person's verdict on a pair, the other's): number of pairs}, number of prompts); a verdict is 1, 0 or -1.

    Prompts that one of them has skipped are left out.
    """

    def sign(difference: int) -> int:
        return (difference > 0) - (difference < 0)

    ranked = [{json.dumps(row["messages"]): row for row in rows if not row.get("skipped")} for rows in (first, second)]
    verdicts, prompts = Counter[tuple[int, int]](), 0
    for prompt in ranked[0].keys() & ranked[1].keys():
        one, other = (dict(zip(rows[prompt]["completions"], rows[prompt]["scores"], strict=True)) for rows in ranked)
        pairs = [*combinations(sorted(one.keys() & other.keys()), 2)]
        verdicts.update((sign(one[a] - one[b]), sign(other[a] - other[b])) for a, b in pairs)
        prompts += bool(pairs)
    return verdicts, prompts


def kappa(verdicts: Mapping[tuple[int, int], int]) -> float | None:
    """Cohen's kappa (1960) of `verdicts_of`; None if both call every pair equal, where it is undefined.

    Which answer of a pair comes first is arbitrary: each pair counts in both orders, so 1 is as frequent as -1.
    """
    number = sum(verdicts.values())
    same = sum(count for (one, other), count in verdicts.items() if one == other) / number
    tied = [sum(count for pair, count in verdicts.items() if not pair[i]) / number for i in (0, 1)]
    chance = tied[0] * tied[1] + (1 - tied[0]) * (1 - tied[1]) / 2
    return None if chance == 1 else (same - chance) / (1 - chance)


def _names(text: str) -> list[str]:
    """The names in `a` or `[a,b]`."""
    is_list = text[:1] == "[" and text[-1:] == "]"
    return [unquoted(name.strip()) for name in text[1:-1].split(",")] if is_list else [unquoted(text)]
