"""`rlft rank` as it is typed: refusals, a kill, Ctrl-C, and the agreement of two people."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from in_one_test import each

from rlft import cli
from rlft.commands.rank import kappa, verdicts_of


def start(*words: str) -> tuple[subprocess.Popen[str], str]:
    """(the process, the address that it has printed)."""
    command = [sys.executable, "-m", "rlft.cli", "rank", *words]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "USER": "anna"})
    assert started.stderr is not None
    said = ""
    for line in started.stderr:
        said += line
        if match := re.search(r"http://127\.0\.0\.1:\d+/\S+", line):
            return started, match[0]
    raise AssertionError(said)


def post(url: str, body: object) -> dict[str, object]:
    origin = {"Origin": url.rpartition("/")[0].rpartition("/")[0]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), origin)) as answer:
        return json.load(answer)


def test_a_kill_loses_no_ranking_and_ctrl_c_says_how_to_continue(
    tmp_path: Path, write_samples: Callable[..., Path]
) -> None:
    words = (f"samples={write_samples(3)}", f"out={tmp_path / 'out.jsonl'}")
    killed, url = start(*words)
    post(url, {"number": 0, "scores": [2, 1, 0]})
    killed.kill()
    killed.communicate()
    for done, follows in (
        (2, f"continue with .*rlft rank {' '.join(words)}"),
        (3, "learn from them with .*rlft rm pref"),
    ):
        interrupted, url = start(*words)
        assert post(url, {})["done"] == done - 1
        post(url, {"number": done - 1, "scores": [0, 1, 2]})
        interrupted.send_signal(signal.SIGINT)
        _, said = interrupted.communicate(timeout=20)
        assert interrupted.returncode == 130
        assert re.search(f"interrupted: {done} of 3 prompts are done, in {words[1][4:]}; {follows}", said), said
        assert "Traceback" not in said
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["ranker"], row["scores"]) for row in rows] == [("anna", s) for s in ([2, 1, 0], [0, 1, 2], [0, 1, 2])]


@each(
    ("words", "refusal"),
    [
        ([], "samples: is missing; write rlft rank samples="),
        (["samples=a.jsonl"], "out: is missing; "),
        (["a.jsonl", "out=b.jsonl"], "rank: takes keys alone, got a.jsonl; "),
        (["samples=none.jsonl", "out=b.jsonl"], "samples: there is no such file, got none.jsonl; "),
        (["samples=pairs.jsonl", "out=b.jsonl"], "samples: pairs.jsonl:1: is no line of rlft sample; "),
        (["samples=image.jsonl", "out=b.jsonl"], "samples: image.jsonl:1: its prompt has an image"),
        (["samples=a.jsonl", "out=b.csv"], "out: must be a JSONL file, got b.csv; "),
        (["samples=a.jsonl", "out=b.jsonl", "seed=-1"], "seed: must be a whole number, at least 0, got -1; "),
        (["samples=a.jsonl", "out=b.jsonl", "sed=1"], "sed: is not a key of rlft rank, got 1; "),
        (
            ["agree=a.jsonl"],
            "agree: takes two files, got agree=a.jsonl; write rlft rank 'agree=[anna.jsonl,",
        ),
        (["agree=[a.jsonl,b.jsonl]", "seed=1"], "agree: takes two files, got"),
        (["agree=[pairs.jsonl,none.jsonl]"], "agree: there is no such file, got none.jsonl; "),
        (["agree=[pairs.jsonl,pairs.jsonl]"], "agree: line 1: no ranking of rlft rank, got pairs.jsonl; "),
        (["agree=[one.jsonl,two.jsonl]"], "agree: no two answers were ranked by both; let both rank the same samples"),
    ],
)
def test_a_mistake_is_refused(
    words: list[str],
    refusal: str,
    tmp_path: Path,
    write_samples: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "?", "chosen": "a", "rejected": "b"}\n')
    (tmp_path / "image.jsonl").write_text(write_samples(1).read_text().replace("Colour", "\ufffc"))
    for name, prompt in (("one", "1?"), ("two", "2?")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ranking(name, prompt, {"a": 0, "b": 1})) + "\n")
    assert cli.run(["rank", *words]) == 2
    assert f"rlft: {refusal}" in capsys.readouterr().err
    assert not (tmp_path / "b.jsonl").exists()


# -- agreement ---------------------------------------------------------------------------------------------------------
def ranking(ranker: str, prompt: str, scores: dict[str, int], *, skipped: bool = False) -> dict[str, object]:
    row: dict[str, object] = {"ranker": ranker, "prompt_id": prompt, "messages": [{"role": "user", "content": prompt}]}
    return row | {"completions": [*scores], "scores": [*scores.values()], "skipped": skipped}


def test_agreement_is_that_of_all_pairs_in_both_orders() -> None:
    rng = random.Random(0)
    for _ in range(200):
        rows: list[list[dict[str, object]]] = [[], []]
        verdicts: list[tuple[bool, ...]] = []
        for p in range(rng.randint(1, 5)):
            texts = [*"abcd"[: rng.randint(2, 4)]]
            scores = [{text: rng.randint(0, 2) for text in rng.sample(texts, len(texts))} for _ in rows]
            skipped = [rng.random() < 0.1 for _ in rows]
            for i in (0, 1):
                rows[i].append(ranking("x", str(p), scores[i], skipped=skipped[i]))
            if not any(skipped):
                both = [(a, b) for a in texts for b in texts if a != b]
                verdicts += [tuple((s[a] > s[b]) - (s[a] < s[b]) for s in scores) for a, b in both]
        counts, prompts = verdicts_of(*rows)
        assert counts.total() == len(verdicts) / 2
        assert prompts == sum(not any(r[p]["skipped"] for r in rows) for p in range(len(rows[0])))
        if not verdicts:
            continue
        same = sum(a == b for a, b in verdicts) / len(verdicts)
        shares = [[sum(v[i] == kind for v in verdicts) / len(verdicts) for kind in (-1, 0, 1)] for i in (0, 1)]
        chance = sum(a * b for a, b in zip(*shares, strict=True))  # as Cohen defines it
        assert kappa(counts) == (None if chance == 1 else pytest.approx((same - chance) / (1 - chance), abs=1e-12))


def test_two_peoples_agreement_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"a": 2, "b": 1, "c": 0}
    anna = [ranking("anna", str(p), scores) for p in range(4)]
    ben = [*(ranking("ben", str(p), scores) for p in range(3)), ranking("ben", "3", {"c": 2, "b": 1, "a": 0})]
    for name, rows in (("anna", anna), ("ben", ben)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.run(["rank", f"agree=[{tmp_path}/anna.jsonl,{tmp_path}/ben.jsonl]"]) == 0
    who, same, cohens = capsys.readouterr().out.splitlines()
    assert who == "anna and ben: 12 pairs in 4 prompts that both ranked"
    assert same.startswith("same verdict   0.750  (9 of 12")
    assert cohens.startswith("Cohen's kappa  0.500  ")
