from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlft.types import Completion, FinishReason, Group, Prompt, Rollout

MakeGroup = Callable[..., Group]


def make_group(texts: Sequence[str], answer: str = "18", id: str = "p0") -> Group:
    prompt = Prompt(id=id, messages=({"role": "user", "content": "What is 8 + 10?"},), answer=answer)
    completions = [
        Completion(text=text, token_ids=[1, 2], logprobs=[-0.5, -0.25], finish_reason=FinishReason.stop) for text in texts
    ]
    return Group(
        prompt=prompt, rollouts=tuple(Rollout(prompt=prompt, completion=c, policy_version=3) for c in completions)
    )


@pytest.fixture
def group() -> MakeGroup:
    """group(texts, answer="18", id="p0"): a group with these completions."""
    return make_group


@pytest.fixture(autouse=True)
def naughty_rewards_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
