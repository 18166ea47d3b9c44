"""`rlft rank`: the file of rankings, the server, the agreement of two people, the command, and the page in a browser.

Screenshots for looking at are left in build/screenshots.
"""

import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest
from audited_runs import lines_of
from in_one_test import each
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from rlft.commands.rank import MAX_BODY_BYTES, MOST_ANSWERS, Rankings, RankServer, kappa, questions_of, verdicts_of
from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.config.resolved import resolve
from rlft.system import disk, files
from rlft.system.disk import DiskError
from rlft.types import Split, UserError


@pytest.fixture
def write_samples(tmp_path):
    """Writes lines of `rlft sample`: of each prompt these answers, sampled by two models in turn."""

    def write(prompts=6, answers=("red", "green", "blue"), name="samples"):
        usual = {"answer": "", "token_ids": [1, 2], "finish_reason": "stop", "rewards": {}, "reward": 0.5}
        usual["tokenizer"] = "0" * 12
        system, file = {"role": "system", "content": "Be brief."}, tmp_path / f"{name}.jsonl"
        with file.open("w") as lines:
            for p, (i, text) in itertools.product(range(prompts), enumerate(answers)):
                row = {"prompt_id": f"p{p}", "index": i, "completion": f"{text} {p}", "model": f"secret-model-{i % 2}"}
                row["prompt"] = [system, {"role": "user", "content": f"Colour {p}?"}]
                lines.write(json.dumps(usual | row) + "\n")
        return file

    return write


@pytest.fixture
def rank(tmp_path, write_samples):
    """Begins or goes on with anna's rankings of so many prompts, with these answers."""

    def ranked(*samples, out="out.jsonl"):
        return Rankings(tmp_path / out, questions_of([str(write_samples(*samples))], "anna", 0))

    return ranked


@pytest.fixture
def serve(rank):
    """Serves the page that ranks so many prompts."""
    with ExitStack() as stack:

        def started(*samples, out="out.jsonl"):
            server = RankServer(rank(*(samples or (2,)), out=out))
            Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return server

        yield started


def test_seed_and_ranker_give_the_order_and_equal_answers_are_shown_once(write_samples):
    samples = [str(write_samples(30, ("a", "b", "b", "c")))]
    orders = {(ranker, seed): questions_of(samples, ranker, seed) for ranker in ("anna", "ben") for seed in (0, 1)}
    assert questions_of(samples, "anna", 0) == orders["anna", 0]
    for key in ("prompt_id", "completions"):
        assert len({json.dumps([row[key] for row in rows]) for rows in orders.values()}) == 4
    for rows in orders.values():
        assert sorted(row["prompt_id"] for row in rows) == sorted(f"p{p}" for p in range(30))
        assert all(len(row["completions"]) == 3 for row in rows)
        firsts = [row["completions"][0][0] for row in rows]
        assert {*firsts} == {*"abc"}, "no answer is always the first"
    [many] = questions_of([str(write_samples(1, tuple("abcdefghijkl")))], "anna", 0)
    assert len({*many["completions"]}) == MOST_ANSWERS
    with pytest.raises(UserError, match="no prompt has two different answers"):
        questions_of([str(write_samples(3, ("a", "a")))], "anna", 0)
    both = [str(write_samples(2, ("a", "b"), "one")), str(write_samples(2, ("b", "c"), "two"))]
    assert [sorted(text[0] for text in row["completions"]) for row in questions_of(both, "x", 0)] == [[*"abc"]] * 2


def test_any_course_of_rankings_is_on_disk_after_each_step_and_continues_in_a_new_process(
    tmp_path, write_samples, monkeypatch
):
    flushed = []
    monkeypatch.setattr(files.os, "fsync", lambda handle: flushed.append(handle))
    questions = questions_of([str(write_samples(40, ("a", "b", "c")))], "anna", 0)
    file, rng, expected = tmp_path / "new" / "out.jsonl", random.Random(0), []
    rankings = Rankings(file, questions)
    for _ in range(120):
        flushed.clear()
        scores = rng.choice([[0, 1, 2], [2, 0, 1], [0, 1, 1], [0, 0, 0], None])
        if expected and (rng.random() < 0.3 or not rankings.left):
            rankings.undo()
            expected.pop()
        else:
            expected.append((rankings.left[-1]["prompt_id"], scores or [0, 0, 0], scores is None))
            rankings.add(scores)
        assert flushed
        assert [(row["prompt_id"], row["scores"], row["skipped"]) for row in lines_of(file)] == expected
        if rng.random() < 0.3:
            next_one = rankings.left[-1:]
            with file.open("ab") as torn:  # a kill in the middle of a row
                torn.write(b'{"ranker": "anna", "prompt_id": "p1", "mess'[: rng.randint(0, 40)])
            rankings._stream.close()
            rankings = Rankings(file, questions)
            assert len(rankings.done) == len(expected)
            assert not expected or rankings.done[-1][1]["prompt_id"] == expected[-1][0]
            assert rankings.left[-1:] == next_one or {*map(str, next_one)} <= {*map(str, rankings.left)}
    assert {row["ranker"] for row in lines_of(file)} == {"anna"}
    assert all(
        f"secret-model-{'abc'.index(row['completions'][0][0]) % 2}" == row["models"][0] for row in lines_of(file)
    )


def test_a_full_disk_leaves_the_file_and_the_question_as_they_were(rank, monkeypatch):
    rankings = rank()
    rankings.add([0, 1, 2])
    before = rankings.shown(), rankings.file.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(disk.DiskError, match="disk is full"):
        rankings.add([0, 1, 2])
    assert (rankings.shown(), rankings.file.read_bytes()) == before


@each("how", ["removed", "replaced"])
def test_a_file_that_was_moved_meanwhile_takes_no_ranking(how, tmp_path, rank):
    rankings = rank()
    rankings.add([0, 1, 2])
    rankings.file.rename(tmp_path / "moved.jsonl")
    if how == "replaced":
        rankings.file.write_bytes((tmp_path / "moved.jsonl").read_bytes())
    before = rankings.shown()
    for change in (lambda: rankings.add([0, 1, 2]), rankings.undo):
        with pytest.raises(disk.DiskError):
            change()
        assert rankings.shown() == before
    assert len(lines_of(tmp_path / "moved.jsonl")) == 1


@each(
    "content", ['{"prompt": "?", "chosen": "a"}\n', "text", '{"prompt": "?"', "[1]\n", "\n", "{}\n", '{"ranker": 1}\n']
)
def test_another_file_is_refused_and_left_alone(content, tmp_path, rank):
    file = tmp_path / "out.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=r"^out: .*name another file"):
        rank()
    assert file.read_text() == content


def test_a_file_belongs_to_one_person_one_set_of_samples_and_one_process(tmp_path, write_samples):
    samples, other = write_samples(), write_samples(2, ("a", "b"), "other")
    file = tmp_path / "out.jsonl"
    rankings = Rankings(file, questions_of([str(samples)], "anna", 0))
    for _ in range(6):
        rankings.add([0, 1, 2])
    with pytest.raises(UserError, match="another rlft rank writes it"):
        Rankings(file, questions_of([str(samples)], "anna", 0))
    rankings._stream.close()
    for others in (questions_of([str(samples)], "ben", 0), questions_of([str(other)], "anna", 0)):
        with pytest.raises(UserError, match=r"ranking . is by another person or of other samples"):
            Rankings(file, others)
    with pytest.raises(UserError, match="out: cannot be written"):
        Rankings(tmp_path, [])


def test_rm_and_dpo_read_each_pair_and_no_tie(tmp_path, write_samples):
    questions = questions_of([str(write_samples(40))], "anna", 0)
    rankings = Rankings(tmp_path / "out.jsonl", questions)
    for i in range(40):
        rankings.add([[2, 1, 0], [0, 1, 1], [0, 0, 0], None][i % 4])
    scores_of = {
        q["messages"][1]["content"]: [[2, 1, 0], [0, 1, 1]][i % 2] for i, q in enumerate(questions) if i % 4 < 2
    }
    for command in ("rm", "dpo"):
        words = [f"preferences.path={rankings.file}", "max_completion_tokens=16", "rankings_per_step=4"]
        resolved = resolve(compose(words, command=command))
        preferences = instantiate(resolved.config.preferences, "preferences")
        read = [ranking for split in Split for ranking in preferences.load(split).rankings]
        assert len(read) == 20, "a prompt of ties alone and a skipped one teach nothing"
        for ranking in read:
            system, user = ranking.prompt.messages
            question = next(q for q in questions if q["messages"] == [system, user])
            scores = dict(zip(question["completions"], scores_of[user["content"]], strict=True))
            assert [scores[text] for text in ranking.completions] == sorted(scores.values(), reverse=True)
            assert [*ranking.scores] == sorted(scores.values(), reverse=True)
        plan = resolved.plan()
        assert len(plan.train.rankings) + len(plan.held_out.rankings) == 20


def ask(server, request=None, *, method="POST", path=None, headers=None):
    """(status, answer) of a request as the page sends it; `headers` replace some of those, None leaves one out."""
    host, port = server.server_address[:2]
    connection = http.client.HTTPConnection(str(host), int(port), timeout=10)
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    sent = {"Host": server.hosts[0], "Origin": f"http://{server.hosts[0]}", "Content-Length": str(len(body))}
    connection.putrequest(method, server.path if path is None else path, skip_host=True, skip_accept_encoding=True)
    for name, value in {**sent, **(headers or {})}.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body if method == "POST" else None)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert answer.getheader("Cache-Control") == "no-store"
    assert answer.getheader("Content-Security-Policy") == "frame-ancestors 'none'"
    assert answer.getheader("Access-Control-Allow-Origin") is None
    is_json = answer.getheader("Content-Type") == "application/json"
    return answer.status, json.loads(content) if is_json else content.decode()


def test_the_page_ranks_skips_and_undoes(serve):
    server = serve()
    status, page = ask(server, method="GET", headers={"Origin": None})
    assert (status, page.count("<script>")) == (200, 2)
    status, first = ask(server, {})
    assert status == 200
    assert (first["done"], first["of"], first["problem"]) == (0, 2, "")
    assert [m["role"] for m in first["prompt"]] == ["system", "user"]
    assert "secret-model" not in page + json.dumps(first), "what sampled an answer is hidden"
    status, second = ask(server, {"number": 0, "scores": [1, 0, 1]})
    assert (status, second["done"]) == (200, 1)
    assert second["prompt"] != first["prompt"]
    status, last = ask(server, {"number": 1, "scores": None})
    assert (status, last["done"], last["answers"]) == (200, 2, [])
    assert ask(server, {"number": 2, "scores": None})[0] == 409, "there is none left"
    assert ask(server, {"number": 2, "undo": True}) == (200, second)
    assert ask(server, {"number": 1, "undo": True}) == (200, first)
    assert ask(server, {"number": 0, "undo": True})[0] == 409, "there is none before"
    assert server.rankings.file.read_bytes() == b""


@each(("error", "said"), [
    (ValueError("of no kind that was foreseen"), "ValueError: of no kind that was"),
    (PermissionError(13, "not yours"), "PermissionError: [Errno 13] not yours; "),
    (BrokenPipeError(32, "a closed browser"), None),
    (ConnectionResetError(104, "a closed browser"), None),
    (TimeoutError("a browser that sends no more"), None),
])  # fmt: skip
def test_an_unexpected_error_is_said_and_a_closed_browser_is_not(error, said, serve, monkeypatch, capsys):
    def fail(request):
        raise error

    server = serve(out=f"{type(error).__name__}.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(server, "answer", fail)
        with pytest.raises(http.client.RemoteDisconnected):
            ask(server, {})
    told = capsys.readouterr().err
    assert told.startswith("" if said is None else f"a request could not be answered: {said}")
    assert len(told.splitlines()) == (said is not None)
    assert ask(server, {})[0] == 200, "the next request is answered"


@each("request_", [
    {"number": 1, "scores": [0, 1, 2]},  # of another window
    *({"number": 0, "scores": scores} for scores in (
        [0, 1], [0, 1, 3], [1, 1, 2], [0, True, 1], [0.0, 1, 2], ["0", 1, 2], [], {},
    )),
    {"number": 0}, {"number": "0", "scores": None}, {"number": 0, "undo": 1}, {"scores": None}, [], None,
    b"{", b"\xff", b"", b"[" * MAX_BODY_BYTES,
])  # fmt: skip
def test_what_is_no_ranking_of_the_next_prompt_changes_nothing(request_, serve):
    server = serve(out=f"{abs(hash(str(request_)))}.jsonl")
    status, answer = ask(server, request_)
    assert (status, answer["done"]) == (409, 0)
    assert "Nothing was saved" in answer["problem"]
    assert server.rankings.file.read_bytes() == b""


FOREIGN = [
    {"path": "/"}, {"path": "/wrong/"}, {"headers": {"Host": "evil.example"}},
    {"headers": {"Host": "evil.example", "Origin": "http://evil.example"}}, {"headers": {"Host": None}},
    {"headers": {"Host": "127.0.0.1"}},
]  # fmt: skip
FOREIGN_ORIGIN = [
    {"headers": {"Origin": origin}}
    for origin in (None, "", "null", "http://evil.example", "https://{}", "http://{}.evil.example", "http://127.0.0.1")
]


def test_no_request_from_another_page_is_accepted(serve):
    server = serve()
    ranking = {"number": 0, "scores": [0, 1, 2]}
    token = server.path[1:-1]
    near = [{"path": f"/{token[:-1]}/"}, {"path": f"/{token}"}, {"path": f"/?{token}/"}]
    for foreign in (*FOREIGN, *FOREIGN_ORIGIN, *near):
        headers = {k: v and v.format(server.hosts[0]) for k, v in foreign.get("headers", {}).items()}
        for request in (ranking, {}):
            status, answer = ask(server, request, path=foreign.get("path"), headers=headers)
            assert (status, [*answer]) == (403, ["problem"]), foreign
    for foreign in (*FOREIGN, *near):
        status, answer = ask(server, method="GET", **foreign)
        assert (status, [*answer]) == (403, ["problem"]), foreign
    assert server.rankings.file.read_bytes() == b""
    other = {"Host": server.hosts[1], "Origin": f"http://{server.hosts[1]}"}
    assert ask(server, ranking, headers=other)[0] == 200, "localhost is this server as well"
    assert len({serve(out=f"{i}.jsonl").path for i in range(5)}) == 5
    assert len(token) == 32


def test_it_listens_on_this_machine_alone_and_limits_bodies(serve, monkeypatch):
    server = serve()
    assert server.socket.getsockname()[0] == "127.0.0.1"
    for length in (str(MAX_BODY_BYTES + 1), "9" * 30, "-1", "x", "", None):
        status, answer = ask(server, b"", headers={"Content-Length": length})
        assert (status, [*answer]) == (413, ["problem"]), length
    with socket.create_connection(server.server_address[:2]):  # says nothing, and holds nobody up
        assert ask(server, {})[0] == 200

    def fails(scores):
        raise DiskError(28, server.rankings.file)

    monkeypatch.setattr(server.rankings, "add", fails)
    status, answer = ask(server, {"number": 0, "scores": None})
    assert (status, answer["done"]) == (507, 0)
    assert "Nothing was saved: the disk is full" in answer["problem"]


def start(*words):
    """(the process, the address that it has printed)."""
    command = [sys.executable, "-m", "rlft.cli", "rank", *words]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "USER": "anna"})
    said = ""
    for line in started.stderr:
        said += line
        if match := re.search(r"http://127\.0\.0\.1:\d+/\S+", line):
            return started, match[0]
    raise AssertionError(said)


def post(url, body):
    origin = {"Origin": url.rpartition("/")[0].rpartition("/")[0]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), origin)) as answer:
        return json.load(answer)


def test_a_kill_loses_no_ranking_and_ctrl_c_says_how_to_continue(tmp_path, write_samples):
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
    rows = lines_of(tmp_path / "out.jsonl")
    assert [(row["ranker"], row["scores"]) for row in rows] == [("anna", s) for s in ([2, 1, 0], [0, 1, 2], [0, 1, 2])]


@each(("words", "refusal"), [
    ([], "samples: is missing; write rlft rank samples="),
    (["samples=a.jsonl"], "out: is missing; "),
    (["a.jsonl", "out=b.jsonl"], "rank: takes keys alone, got a.jsonl; "),
    (["samples=none.jsonl", "out=b.jsonl"], "samples: there is no such file, got none.jsonl; "),
    (["samples=pairs.jsonl", "out=b.jsonl"], "samples: pairs.jsonl:1: is no line of rlft sample; "),
    (["samples=image.jsonl", "out=b.jsonl"], "samples: image.jsonl:1: its prompt has an image"),
    (["samples=a.jsonl", "out=b.csv"], "out: must be a JSONL file, got b.csv; "),
    (["samples=a.jsonl", "out=b.jsonl", "seed=-1"], "seed: must be a whole number, at least 0, got -1; "),
    (["samples=a.jsonl", "out=b.jsonl", "sed=1"], "sed: is not a key of rlft rank, got 1; "),
    (["agree=a.jsonl"], "agree: takes two files, got agree=a.jsonl; write rlft rank 'agree=[anna.jsonl,"),
    (["agree=[a.jsonl,b.jsonl]", "seed=1"], "agree: takes two files, got"),
    (["agree=[pairs.jsonl,none.jsonl]"], "agree: there is no such file, got none.jsonl; "),
    (["agree=[pairs.jsonl,pairs.jsonl]"], "agree: line 1: no ranking of rlft rank, got pairs.jsonl; "),
    (["agree=[one.jsonl,two.jsonl]"], "agree: no two answers were ranked by both; let both rank the same samples"),
])  # fmt: skip
def test_a_mistake_is_refused(words, refusal, here, write_samples, ran):
    (here / "pairs.jsonl").write_text('{"prompt": "?", "chosen": "a", "rejected": "b"}\n')
    (here / "image.jsonl").write_text(write_samples(1).read_text().replace("Colour", "\ufffc"))
    for name, prompt in (("one", "1?"), ("two", "2?")):
        (here / f"{name}.jsonl").write_text(json.dumps(ranking(name, prompt, {"a": 0, "b": 1})) + "\n")
    assert f"rlft: {refusal}" in ran(["rank", *words], ends=2).err
    assert not (here / "b.jsonl").exists()


# -- agreement ---------------------------------------------------------------------------------------------------------
def ranking(ranker, prompt, scores, *, skipped=False):
    row = {"ranker": ranker, "prompt_id": prompt, "messages": [{"role": "user", "content": prompt}]}
    return row | {"completions": [*scores], "scores": [*scores.values()], "skipped": skipped}


def test_agreement_is_that_of_all_pairs_in_both_orders():
    rng = random.Random(0)
    for _ in range(200):
        rows = [[], []]
        verdicts = []
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


def test_two_peoples_agreement_is_printed(tmp_path, ran):
    scores = {"a": 2, "b": 1, "c": 0}
    anna = [ranking("anna", str(p), scores) for p in range(4)]
    ben = [*(ranking("ben", str(p), scores) for p in range(3)), ranking("ben", "3", {"c": 2, "b": 1, "a": 0})]
    for name, rows in (("anna", anna), ("ben", ben)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    who, same, cohens = ran(["rank", f"agree=[{tmp_path}/anna.jsonl,{tmp_path}/ben.jsonl]"]).out.splitlines()
    assert who == "anna and ben: 12 pairs in 4 prompts that both ranked"
    assert same.startswith("same verdict   0.750  (9 of 12")
    assert cohens.startswith("Cohen's kappa  0.500  ")


# -- in a browser ------------------------------------------------------------------------------------------------------
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=document.title='owned'>",
    "</div></article><a href=\"javascript:document.title='owned'\">click</a>",
    "\u202e hidden \x1b[31m",
)
LONG = (
    "The sky is blue because air scatters short waves more than long ones. " * 6,
    "Blue.",
    "x" * 300,
    "def f():\n\n  1",
)


class Page:
    """The page in the browser, and what a person sees and types there."""

    def __init__(self, driver, server, width=1400, theme="light"):
        self.driver, self.server = driver, server
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        driver.get_log("browser")
        driver.get(server.url)
        self.wait(lambda: driver.execute_script("return document.documentElement.dataset.ready") == "true")

    def wait(self, happens):
        WebDriverWait(self.driver, 10).until(lambda _: happens())

    def press(self, keys):
        ActionChains(self.driver).send_keys(keys).perform()

    def text(self, selector):
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return "\n".join(each.text for each in found if each.is_displayed())

    def answers(self):
        return [str(each.text) for each in self.driver.find_elements(By.CSS_SELECTOR, ".card .text")]

    def judged(self, keys):
        """(answers, their scores, whether they were skipped) of the ranking that these keys add."""
        shown, number = self.answers(), len(self.server.rankings.done)
        self.press(keys)
        self.wait(lambda: self.text("#progress").startswith(f"{number + 1} of"))
        row = json.loads(self.server.rankings.file.read_text().splitlines()[-1])
        assert shown == row["completions"]
        return shown, row["scores"], row["skipped"]

    def shot(self, name):
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(SCREENSHOTS / f"rank_{name}.png"))


@pytest.mark.slow
def test_a_person_ranks_with_the_keyboard_alone(driver, serve):
    page = Page(driver, serve(7))
    done = page.server.rankings.done
    assert page.text("#progress") == "0 of 7 done"
    assert "secret-model" not in driver.page_source
    assert [page.judged(keys)[1:] for keys in ("21", "10", "0", "2=1", "s")] == [
        ([1, 2, 0], False),  # the last one needs no key
        ([1, 0, 0], False),
        ([0, 0, 0], False),
        ([1, 1, 0], False),
        ([0, 0, 0], True),
    ]
    assert page.judged("3=1")[1] == [1, 0, 1]
    page.press("31u")  # the second key is the last: it saves, and undo takes that back
    page.wait(lambda: page.text("#progress") == "6 of 7 done" and len(done) == 6)
    page.press("3")
    assert page.text("#order") == "3 > ?"
    assert page.text(".chosen .place") == "best"
    page.press("33=")
    assert page.text("#order") == "3 = ?", "an answer is chosen once"
    page.press("uu")
    assert page.text("#order") == "Which is best?"
    before = page.answers()
    page.press(Keys.BACKSPACE)  # with nothing chosen: the ranking before it
    page.wait(lambda: page.text("#progress") == "5 of 7 done")
    assert page.answers() != before
    page.press("u")
    page.wait(lambda: page.text("#progress") == "4 of 7 done")
    for keys in ("12", "12", "12"):
        page.judged(keys)
    assert page.text("#finished").startswith("All prompts are done.")
    page.press("12s0=")
    page.press("?")
    page.wait(lambda: "choose the next best answer" in page.text("#help"))
    page.press("u")  # is not heard behind the dialog
    page.press(Keys.ESCAPE)
    page.wait(lambda: not page.text("#help"))
    assert len(done) == 7
    page.press("u")
    page.wait(lambda: len(done) == 6)
    page.press(Keys.TAB * 4 + Keys.ENTER)  # buttons have the focus in turn
    assert driver.get_log("browser") == []


@pytest.mark.slow
def test_a_page_that_is_out_of_date_or_alone_says_so_and_loses_nothing(driver, serve):
    page = Page(driver, serve(3))
    page.server.rankings.add(None)  # as from another window
    page.press("12")
    page.wait(lambda: "another window" in page.text("#problem"))
    assert page.text("#progress") == "1 of 3 done"
    page.judged("12")
    assert page.text("#problem") == ""
    page.server.shutdown()
    page.server.server_close()
    page.press("1")
    page.press("2")
    page.wait(lambda: "rlft rank has ended" in page.text("#problem"))
    assert page.text("#order") == "Which is best?"
    assert len(page.server.rankings.done) == 2


@pytest.mark.slow
def test_answers_are_shown_as_text_alone(driver, serve):
    page = Page(driver, serve(1, HOSTILE))
    assert driver.title == "rlft rank"
    shown = "\n".join(page.answers())
    assert all(text in shown for text in HOSTILE[:3])
    assert "\\u202e hidden \\x1b[31m" in shown
    assert driver.get_log("browser") == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_answers_are_next_to_each_other_and_nothing_is_cut(width, theme, driver, serve):
    for number in (2, 4):
        page = Page(driver, serve(3, LONG[:number], out=f"{number}.jsonl"), width, theme)
        assert driver.find_element(By.TAG_NAME, "html").get_attribute("data-theme") == theme
        cards = driver.find_elements(By.CSS_SELECTOR, ".card")
        assert len({card.rect["y"] for card in cards}) == (1 if width == 1400 else number)
        page.press("2")
        page.shot(f"{width}_{theme}_{number}")
        content, window = driver.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert content <= window
        cut = driver.execute_script(
            "return [...document.querySelectorAll('.text, .message, button, h1, #order')]"
            ".filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map((e) => e.textContent)"
        )
        assert cut == []
        footer = driver.find_element(By.TAG_NAME, "footer")
        bottom = driver.execute_script("return arguments[0].getBoundingClientRect().bottom", footer)
        assert bottom <= 801, "the keys are in sight"
