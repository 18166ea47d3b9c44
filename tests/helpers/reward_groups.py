"""Groups to score, without pytest, so that worker processes may import them; and processes of scripts that score."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlft.types import Completion, FinishReason, Group, Prompt, Rollout

REPOSITORY = Path(__file__).parents[2]


def start_script(folder: Path, source: str, *words: str) -> subprocess.Popen[str]:
    """Starts a script that imports rlft and the helpers of tests, in a session of its own."""
    script = folder / "score.py"
    script.write_text(source)
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")])
    return subprocess.Popen(
        [sys.executable, str(script), *words],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def make_group(texts: Sequence[str], answer: str = "18", id: str = "p0") -> Group:
    prompt = Prompt(id=id, messages=({"role": "user", "content": "What is 8 + 10?"},), answer=answer)
    completions = [
        Completion(text=text, token_ids=[1, 2], logprobs=[-0.5, -0.25], finish_reason=FinishReason.stop)
        for text in texts
    ]
    return Group(
        prompt=prompt, rollouts=tuple(Rollout(prompt=prompt, completion=c, policy_version=3) for c in completions)
    )
