"""Values in refusals: as they would be typed, and what one that is none of a key's choices probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LIKE = 0.6  # the least similarity (difflib's ratio) of a suggested choice
OTHER_NAMES = {"gpu": ["cuda"], "fp32": ["float32"], "float": ["float32"], "bf16": ["bfloat16"], "fp16": ["float16"],
               "half": ["float16"], "merged": ["copy"], "int4": ["4bit"], "nf4": ["4bit"], "hf": ["transformers"],
               "vpg": ["reinforce", "reinforce_arithmetic"], "policy_gradient": ["reinforce", "reinforce_arithmetic"],
               "actor_critic": ["a2c", "a2c_arithmetic"], "r1_zero": ["r1_zero_arithmetic", "grpo"],
               "grpo_zero": ["grpo_arithmetic", "grpo"], "rlhf": ["rlhf_ppo_arithmetic", "ppo"]}  # fmt: skip
"""{a value's name in other programs: its names here}, where it looks like another value or like none."""


def closest(name: object, choices: Iterable[str]) -> str | None:
    """The choice that was probably meant by a value that is none of them; None if it looks like none."""
    known, typed = list(choices), str(name)
    if other := [name for name in OTHER_NAMES.get(typed.lower(), []) if name in known]:
        return other[0]
    for spelled in dict.fromkeys((typed, typed.lower())):
        if close := difflib.get_close_matches(spelled, known, cutoff=LIKE):
            ratios = {choice: difflib.SequenceMatcher(a=choice, b=spelled).ratio() for choice in close}
            return max(close, key=lambda choice: (ratios[choice], sorted(choice) == sorted(spelled)))
    return None


def choice_remedy(name: object, choices: Iterable[str]) -> str:
    """What to do about a value that is none of these choices.

    >>> choice_remedy("adam", ["adamw", "muon"]), choice_remedy("sgd", ["adamw", "muon"])
    ('did you mean adamw? All: adamw, muon', 'choose one of adamw, muon')
    >>> choice_remedy("gpu", ["cpu", "cuda"])
    'did you mean cuda? All: cpu, cuda'
    """
    known = list(choices)
    close = closest(name, known)
    return (f"did you mean {close}? All: " if close else "choose one of ") + ", ".join(known)


def as_typed(value: object) -> str:
    """The value as it would be typed, cut: strings in quotes, and YAML's words for None, True and False."""
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or value is True or value is False
    text = words[value] if is_word else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
