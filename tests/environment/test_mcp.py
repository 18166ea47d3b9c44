"""Tools of servers of the Model Context Protocol, made with the official SDK and without it."""

import json
import os
import signal
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from run_processes import happens, is_alive

from rlft import cli
from rlft.environment.mcp import Mcp, checked
from rlft.environment.pool import EnvironmentPool, Job, Order
from rlft.environment.protocol import Cause
from rlft.types import UserError
from tests.environment.test_conversations import LIMITS

HERE = Path(__file__).parent
COMMAND = (sys.executable, str(HERE / "mcp_server.py"))
# Starting a server takes seconds of processor time, on a machine that may have other work.
SERVER = Mcp(**LIMITS | {"call_timeout": 300.0, "timeout": 900.0}, command=COMMAND, env={}, shared=False)


def bare(how, **changed):
    return replace(SERVER, command=(sys.executable, str(HERE / "bare_mcp_server.py"), how), **changed)


def job(key, *calls, left_s=SERVER.timeout):
    orders = [Order(kind="call", seed=0, name=name, values=values) for name, values in calls]
    return Job(key=key, orders=orders, left_s=left_s)


def texts(replies):
    return [reply.text for reply in replies]


@pytest.fixture(scope="module")
def pool():
    """Of servers that go on after their input has ended."""
    with closing(EnvironmentPool(bare("stays"))) as opened:
        yield opened


# -- calls -------------------------------------------------------------------------------------------------------------
def test_each_conversation_has_a_server_of_its_own_with_its_state_whose_errors_are_answers_with_a_cause(pool):
    """The errors are those of a server of the official SDK."""
    opened = pool.run([job(6, ("add", {"number": 2}), ("add", {"number": 3})), job(7, ("add", {"number": 10}))])
    assert [texts(replies) for replies in opened] == [["2", "5"], ["10"]]
    assert [texts(replies) for replies in pool.run([job(6, ("add", {"number": 4}))])] == [["9"]]
    calls = (
        ("subtract", {}), ("add", {"number": "two"}), ("add", {}), ("misbehave", {"how": "fail"}),
        ("say", {"text": "x" * 1000}), ("add", {"number": 1}), ("misbehave", {"how": "exit"}), ("add", {"number": 1}),
    )  # fmt: skip
    with closing(EnvironmentPool(SERVER)) as official:
        first = job(0, ("add", {"number": 10}), ("say", {"text": "hello", "times": 2}))
        opened = official.run([first, job(1, ("add", {"number": 3}))])
        assert [texts(replies) for replies in opened] == [["10", "hello\nhello"], ["3"]]
        [replies] = official.run([job(0, *calls)])
    causes = [Cause.malformed] * 3 + [Cause.raised, None, None, Cause.raised, Cause.raised]
    assert [reply.cause for reply in replies] == causes
    assert texts(replies)[0] == "Error: there is no tool 'subtract'; the tools are add, say, misbehave"
    assert texts(replies)[1] == "Error: add: number: 'two' is not of type 'integer'"
    assert texts(replies)[2] == "Error: add: 'number' is a required property"
    assert "misbehave" in texts(replies)[3]
    assert texts(replies)[4] == "x" * 400 + " [cut: 600 more characters]"
    assert texts(replies)[5] == "11"
    # The state of a server that has ended is lost: no other one takes its place.
    assert texts(replies)[6] == "Error: RuntimeError: the tool's server has ended"
    assert texts(replies)[7].startswith("Error: RuntimeError: the tool's server has ended: it has closed")


def test_what_is_no_message_is_skipped_and_other_content_is_named(pool):
    [replies] = pool.run([job(0, *(("misbehave", {"how": how}) for how in ("garbage", "refuses")))])
    told = [(reply.text, reply.cause) for reply in replies]
    assert told == [("0\n[image]", None), ("Error: RuntimeError: not today", Cause.raised)]


def test_nothing_that_a_server_has_started_outlives_its_conversation_or_its_worker(pool):
    [[own], [other]] = pool.run([job(3, ("pids", {})), job(4, ("pids", {}))])
    of_own, of_other = ([int(pid) for pid in reply.text.split()] for reply in (own, other))
    assert all(map(is_alive, [*of_own, *of_other]))
    pool.forget([3])
    assert happens(lambda: not any(map(is_alive, of_own)), within_s=60)
    assert all(map(is_alive, of_other))
    os.kill(pool._workers.all[0].pid, signal.SIGKILL)
    assert happens(lambda: not any(map(is_alive, of_other)), within_s=60)


def test_a_call_that_takes_too_long_ends_its_server(pool):
    pool.run([job(5, ("pids", {}))])  # no limit of a call counts the start of its server
    [[late]] = pool.run([job(5, ("misbehave", {"how": "hangs"}), left_s=0.5)])
    [[after]] = pool.run([job(5, ("pids", {}))])
    assert (late.text, late.cause) == ("Error: no answer within 0.5 s", Cause.time)
    ended = "Error: RuntimeError: the tool's server has ended: an earlier call took too long"
    assert (after.text, after.cause) == (ended, Cause.raised)


def test_a_shared_server_keeps_its_state_between_conversations_and_is_replaced():
    with closing(EnvironmentPool(bare("answers", shared=True))) as pool:
        replies = pool.run([job(key, ("add", {"number": 1})) for key in range(3)])
        assert sorted(map(texts, replies)) == [["1"], ["2"], ["3"]]
        [replies] = pool.run([job(4, ("misbehave", {"how": "exits"}), ("add", {"number": 1}))])
        assert texts(replies)[1] == "1"


# -- lists -------------------------------------------------------------------------------------------------------------
def test_the_list_of_tools_is_shown_page_by_page():
    schemas = bare("stays").schemas()
    assert [schema["function"]["name"] for schema in schemas] == ["add", "misbehave", "pids"]
    assert schemas[-1]["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("how", "fragment"),
    [("hangs", r"\(Error: no answer within 1 s\)"), ("ends", r"\(Error: RuntimeError: the tool's server has ended\)")],
)
def test_a_server_that_does_not_list_its_tools_is_refused(how, fragment):
    with pytest.raises(UserError, match=f"^environment.command: its server does not list its tools {fragment}, got"):
        bare(how, call_timeout=1.0 if how == "hangs" else 300.0).schemas()


TOOL = {"name": "add", "description": "", "parameters": {"type": "object"}}


@pytest.mark.parametrize(("tools", "fragment"), [
    ([], "its server lists no tool"),
    ([TOOL, TOOL], "its server lists two tools called add"),
    ([TOOL | {"name": ""}], "its server lists a tool without a name"),
    ([TOOL | {"parameters": {}}], "the arguments of its tool add are not an object, but of type None"),
    ([TOOL | {"parameters": {"type": "array"}}], "add are not an object, but of type 'array'"),
    ([TOOL | {"parameters": {"type": "object", "properties": {"x": {"type": "int"}}}}],
     "the arguments of its tool add have no valid JSON schema"),
])  # fmt: skip
def test_tools_that_cannot_be_called_are_refused(tools, fragment):
    assert checked([TOOL], "serve") == [TOOL]
    with pytest.raises(UserError, match=f"^environment.command: .*{fragment}.*, got serve; "):
        checked(tools, "serve")


# -- a run -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_policy_calls_a_servers_tools(tmp_path):
    words = (
        "train", "+recipe=grpo_calculator", "environment=mcp", f"environment.command=[{','.join(COMMAND)}]",
        "environment.call_timeout=300", "environment.timeout=900", "environment.workers=1", "steps=1",
        "prompts_per_step=2", "group_size=2", "eval.every=0", "generation=transformers", "model.device=cpu",
        "console=null", "scoring.workers=0",
    )  # fmt: skip
    assert cli.run([*words, f"hydra.run.dir={tmp_path}"]) == 0
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    # The model has been taught to call `calculate`, which this server lacks.
    assert metrics["turns/calls"] > 0
    assert metrics["calls/malformed_fraction"] == 1
    [first, *_] = (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert "the tools are add, say, misbehave" in first
