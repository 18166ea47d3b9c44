"""Messages of rows of data, and all that is read of a source."""

from typing import Any

from rlft.types import Prompt, Split


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def every(source: Any) -> list[Prompt]:
    """The prompts of both splits."""
    return [prompt for split in Split for prompt in source.load(split)]
