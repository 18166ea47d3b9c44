"""Starts `rlft` as a process of its own in which something happens: a kill at an exact place, Ctrl-C, a failure.

    python launcher.py run '<JSON: a list of events>' <rlft's arguments>
    python launcher.py nursery

The tested code knows nothing of its events: each wraps a function, found by name, that rlft calls anyway.

    {"at": "rlft.loop.session:Session.score", "call": 2, "do": "kill"}   on the 2nd call, before it; "when": "after" it
        do: kill (SIGKILL) | interrupt (SIGINT, as Ctrl-C) | terminate (SIGTERM) | hang up (SIGHUP) | warn (SIGUSR1)
            | warn again (SIGUSR2) | quit (SIGQUIT) | stop (SIGSTOP: until SIGCONT) | fail (RuntimeError)
            | wait (so many "seconds")
            | note (every call: a line of JSON with the process's id and its descendants' goes to the file "to", and
              the call's "argument" of that number, if one is named)
        A signal with "later" comes so many seconds later; one with "who": "everybody" goes to every process that rlft
        has started, then to rlft itself.
    {"half": "metrics.jsonl", "call": 2}   the 2nd write to a file of that name is done by half, then SIGKILL
    {"half": "shutil:rmtree", "call": 1}   the first removal of a folder is done by half, then SIGKILL
    {"half": "step_*.jsonl", "call": 1, "raises": "ENOSPC"}   the write, or copy, is done by half, then fails so
    {"file_size": 100000}   no file of the process may become larger (RLIMIT_FSIZE, as `ulimit -f` sets it)

A nursery has imported what a run imports and made a plan, which takes seconds, but loaded and computed nothing. For
each line of JSON on its stdin (arguments, events, cwd, environment, out, err) it forks a child that goes on as `rlft`,
and says the child's id; when the child has ended it says how, as `subprocess` would: the exit code, or minus the
signal.
"""

import atexit
import contextlib
import errno
import fnmatch
import functools
import gc
import importlib
import inspect
import io
import json
import os
import pathlib
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Event = dict[str, Any]
SIGNALS = {
    "kill": signal.SIGKILL,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "hang up": signal.SIGHUP,
    "warn": signal.SIGUSR1,
    "warn again": signal.SIGUSR2,
    "quit": signal.SIGQUIT,
    "stop": signal.SIGSTOP,
}


def main() -> None:
    order = None
    if sys.argv[1] == "nursery":
        order = nursery()
        if order is None:
            return
        arguments, events = order["arguments"], order["events"]
    else:
        arguments, events = sys.argv[3:], json.loads(sys.argv[2])
    for event in events:
        plant(event)
    from rlft import cli

    sys.argv = ["rlft", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        if order is not None and isinstance(end.code, int):
            leave(end.code)
        raise


# -- the nursery -----------------------------------------------------------------------------------------------------
def nursery() -> dict[str, Any] | None:
    """In a child: its order. In the nursery itself: None, when there are no more orders."""
    import composed_once
    import planned_once
    import pydantic
    import transformers
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from transformers.models.qwen2 import modeling_qwen2

    import rlft.commands.export.command
    import rlft.loop.session
    import rlft.train
    from rlft.config.compose import compose
    from rlft.config.resolved import resolve

    _ = (
        rlft.loop.session,
        rlft.train,
        rlft.commands.export.command,
        modeling_qwen2,
        pydantic.TypeAdapter,
        transformers.AutoModelForCausalLM,
        transformers.AutoTokenizer,
    )
    OverridesParser.create().parse_overrides(["+a=b", "c.d=[e,1]", "f={g:null}"])  # learns its grammar as it goes
    composed_once.install()
    planned_once.install()
    words = ["+recipe=grpo_arithmetic", "generation=transformers", "model.device=cpu", "console=null"]  # as most are
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a tokenizer that has had threads says so in every child
    with contextlib.redirect_stderr(io.StringIO()) as told:
        resolve(compose([*words, "data.size=16", "data.held_out_size=4"])).plan()
    rest = re.sub(r"Loading weights:[^\r\n]*", "", told.getvalue()).strip()  # a progress bar
    assert not rest, f"no forked run would say this again: {rest}"
    del os.environ["TOKENIZERS_PARALLELISM"]
    os.fsync = os.fstat  # of a file that is open: no test cuts the power
    gc.collect()
    gc.freeze()  # no child walks through what all share
    say({"ready": os.getpid()})
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            order = json.loads(line)
            settle(order)
            return order
        say({"pid": child})
        _, status = os.waitpid(child, 0)
        say({"code": os.waitstatus_to_exitcode(status)})
    return None


def settle(order: dict[str, Any]) -> None:
    """A session, a folder, an environment and streams of the child's own."""
    # A shell starts what it puts into the background deaf to Ctrl-C and Ctrl-\, nohup what it starts deaf to a dropped
    # connection, and so would all their children be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    sys.path[1:1] = filter(None, order["environment"].get("PYTHONPATH", "").split(os.pathsep))
    for number, file, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, order["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(file, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)


def leave(code: int) -> None:
    """Ends the process as Python does, but for taking every module apart, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


# -- events ----------------------------------------------------------------------------------------------------------
def plant(event: Event) -> None:
    if "file_size" in event:
        resource.setrlimit(resource.RLIMIT_FSIZE, (event["file_size"],) * 2)
    elif event.get("half") == "shutil:rmtree":
        wrap("shutil:rmtree", lambda original: half_removed(original, event))
    elif "half" in event:
        wrap("pathlib:Path.write_text", lambda original: half_written(original, event, 0))
        wrap("pathlib:Path.open", lambda original: torn(original, event))
        for library in ("safetensors.torch:save_file", "transformers.modeling_utils:safe_save_file"):
            wrap(library, lambda original: half_written(original, event, 1, of_tensors=True))
        if "raises" in event:
            wrap("shutil:copyfile", lambda original: half_written(original, event, 1))
    else:
        wrap(event["at"], lambda original: eventful(original, event))


def wrap(place: str, wrapper: Callable[[Any], Any]) -> None:
    """Replaces `module:name` or `module:Class.name` by what `wrapper` makes of it."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(owner, name, staticmethod(wrapped) if inspect.ismethod(original) else wrapped)


def eventful(original: Any, event: Event) -> Any:
    count = 0

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        due = event["do"] == "note" or count == event["call"]
        if due and event.get("when") != "after":
            happen(event, arguments)
        result = original(*arguments, **keywords)
        if due and event.get("when") == "after":
            happen(event, arguments)
        return result

    return wrapped


def happen(event: Event, arguments: Sequence[Any]) -> None:
    if event["do"] == "note":
        named = {"argument": list(arguments[event["argument"]])} if "argument" in event else {}
        note(event["to"], named)
    elif event["do"] == "fail":
        raise RuntimeError("this failure was planted")
    elif event["do"] == "wait":
        end = time.monotonic() + event["seconds"]
        while time.monotonic() < end:
            time.sleep(0.01)
    elif "later" in event:
        threading.Timer(event["later"], send, [event]).start()
    else:
        send(event)


def send(event: Event) -> None:
    for process in everybody() if event.get("who") == "everybody" else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, SIGNALS[event["do"]])
    if event["do"] == "interrupt":
        global _pressed_at
        time.sleep(max(0.0, _pressed_at + 0.5 - time.monotonic()))  # sooner it would count as the same Ctrl-C
        _pressed_at = time.monotonic()
    os.kill(os.getpid(), SIGNALS[event["do"]])


_pressed_at = -1.0


def everybody() -> list[int]:
    """The processes that this one has started, and theirs; whoever works for another one comes first."""
    import psutil

    return [child.pid for child in reversed(psutil.Process().children(recursive=True))]


def note(file: str, more: Event) -> None:
    children = everybody()
    with io.open(file, "a") as stream:  # noqa: UP020  # not Path.open, which may be wrapped
        stream.write(json.dumps({"pid": os.getpid(), "children": children, **more}) + "\n")


def break_off(event: Event, of_tensors: bool = False) -> None:
    """Ends the process, or fails as the system does; of tensors in the words of their library."""
    if "raises" not in event:
        os.kill(os.getpid(), signal.SIGKILL)
    code = getattr(errno, event["raises"])
    if of_tensors:
        message = f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})"
        raise importlib.import_module("safetensors").SafetensorError(message)
    raise OSError(code, os.strerror(code))


class Due:
    """Whether a write is the one to be torn: the `call`-th to a file whose name matches."""

    def __init__(self, event: Event) -> None:
        self.name, self.call, self.count = event["half"], event["call"], 0

    def __call__(self, file: Any) -> bool:
        is_named_so = fnmatch.fnmatch(pathlib.Path(file).name, self.name)
        self.count += is_named_so
        return is_named_so and self.count == self.call


def half_written(original: Any, event: Event, place: int, of_tensors: bool = False) -> Any:
    """Of the file that is the argument at this place, half is left of what was written."""
    due = Due(event)

    def writes(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        if due(file := arguments[place]):
            os.truncate(file, pathlib.Path(file).stat().st_size // 2)
            break_off(event, of_tensors)
        return result

    return writes


def torn(original: Any, event: Event) -> Any:
    due = Due(event)

    class Torn(io.FileIO):
        def write(self, data: Any) -> int:
            if due(self.name):
                super().write(data[: len(data) // 2])
                break_off(event)
            return super().write(data)

    def open_path(file: pathlib.Path, mode: str = "r", *rest: Any, **keywords: Any) -> Any:
        if mode == "ab":
            return Torn(file, "ab")
        if mode == "wb":
            return io.BufferedWriter(Torn(file, "wb"), keywords.get("buffering", io.DEFAULT_BUFFER_SIZE))
        return original(file, mode, *rest, **keywords)

    return open_path


def half_removed(original: Any, event: Event) -> Any:
    due = Due({**event, "half": "*"})

    def rmtree(folder: Any, *rest: Any, **keywords: Any) -> None:
        if due(folder):
            files = sorted(file for file in pathlib.Path(folder).rglob("*") if file.is_file())
            for file in files[: len(files) // 2]:
                file.unlink()
            break_off(event)
        original(folder, *rest, **keywords)

    return rmtree


if __name__ == "__main__":
    main()
