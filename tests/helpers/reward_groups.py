"""Groups to score, without pytest, so that worker processes may import them; and processes of scripts that score."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlft.reward.answer import AnswerIn, Which
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout

REPOSITORY = Path(__file__).parents[2]


def start_script(folder: Path, source: str, *words: str) -> subprocess.Popen[str]:
    """Starts a script that imports rlft and the helpers of tests, in a session of its own."""
    script = folder / "score.py"
    script.write_text(source)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests" / "helpers")))}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, str(script), *words]
    return subprocess.Popen(command, env=variables, text=True, start_new_session=True, **pipes)


def make_group(texts: Sequence[str], answer: str = "18", id: str = "p0") -> Group:
    prompt = Prompt(id=id, messages=({"role": "user", "content": "What is 8 + 10?"},), answer=answer)
    one = Completion(text="", token_ids=[1, 2], logprobs=[-0.5, -0.25], finish_reason=FinishReason.stop)
    rollouts = [Rollout(prompt=prompt, completion=replace(one, text=text), policy_version=3) for text in texts]
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def group_of(prompt: Prompt, rows: Sequence[Sequence[int]]) -> Group:
    """Completions of these tokens, each cut by the limit on its length; they have no text."""
    completions = [
        Completion(text="", token_ids=tuple(ids), logprobs=(0.0,) * len(ids), finish_reason=FinishReason.length)
        for ids in rows
    ]
    rollouts = tuple(Rollout(prompt=prompt, completion=c, policy_version=0) for c in completions)
    return Group(prompt=prompt, rollouts=rollouts)


def sized_group(texts: Sequence[str], lengths: Sequence[int], *, answer: str = "18", **keys: Any) -> Group:
    """A group of completions with these texts and numbers of tokens; `keys` are further fields of each completion."""
    made = make_group(texts, answer)
    rollouts = tuple(
        replace(rollout, completion=replace(rollout.completion, token_ids=[1] * length, **keys))
        for rollout, length in zip(made.rollouts, lengths, strict=True)
    )
    return replace(made, rollouts=rollouts)


TAGGED: dict[str, Any] = {"answer_in": AnswerIn.tag, "tag": "answer", "pattern": None, "which": Which.only}
"""The keys of AnswerKeys for answers in tags."""
