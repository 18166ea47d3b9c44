"""Groups to score, without pytest, so that worker processes may import them."""

from collections.abc import Sequence

from rlft.types import Completion, FinishReason, Group, Prompt, Rollout


def make_group(texts: Sequence[str], answer: str = "18", id: str = "p0") -> Group:
    prompt = Prompt(id=id, messages=({"role": "user", "content": "What is 8 + 10?"},), answer=answer)
    completions = [
        Completion(text=text, token_ids=[1, 2], logprobs=[-0.5, -0.25], finish_reason=FinishReason.stop)
        for text in texts
    ]
    return Group(
        prompt=prompt, rollouts=tuple(Rollout(prompt=prompt, completion=c, policy_version=3) for c in completions)
    )
