"""What a model is, as named parts that are recorded by what trains on it and compared by what goes on from that.

    base_weights_fingerprint: 5f0c..          the numbers, in whatever files
    base_config_fingerprint: 12ab../9d3e..    config.json: its bytes / as transformers reads it
    base_tokenizer_fingerprint, base_template_fingerprint, base_ends_fingerprint, ..

A part with two digests is the same if one of them is: bytes stay the same when a library reads them otherwise, and what
a library reads stays the same when a file is written again. Where the hub's cache has not all files of a commit yet, a
part is left out. What was recorded before there were parts has one digest, which plan/identity.py makes again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

BASE = "base"
SUFFIX = "_fingerprint"
ALL, WEIGHTS, COMMIT = "files", "weights", "commit"
PARTS = {  # {part: its name in words}
    ALL: "files",
    WEIGHTS: "weights",
    "config": "config.json",
    "code": "code",
    "tokenizer": "tokenizer",
    "template": "chat template",
    "ends": "eos_token_id of generation_config.json",
    "images": "preprocessor_config.json",
    COMMIT: "commit on the hub",
}
OF_SAMPLES = ("template", "ends")  # parts on which no adapter's numbers rest: a new run may start from one with others


def name_of(what: str, part: str) -> str:
    """The key of the part's fingerprint.

    >>> name_of("base", "weights")
    'base_weights_fingerprint'
    """
    return f"{what}_{part}{SUFFIX}"


def models_in(fingerprints: Mapping[str, Any]) -> list[str]:
    """The models of which these are fingerprints, such as `base`, `teacher` or `reward.learned.path`."""
    end = name_of("", "config")
    return [name.removesuffix(end) for name in fingerprints if name.endswith(end)]


def are_of_a_model(name: str, models: list[str]) -> bool:
    """Whether the fingerprint of this key is one of these models', or of a part of one."""
    return any(name in (f"{what}{SUFFIX}", *(name_of(what, part) for part in PARTS)) for what in models)


@dataclass(frozen=True, slots=True)
class Changed:
    """Parts of a model that changed: {part: (its fingerprint before, and now)}; nothing changed if there are none."""

    parts: Mapping[str, tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def then(self) -> str:
        """The parts in words, with their fingerprints before."""
        return ", ".join(f"{PARTS[part]} ({_shown(before)} then)" for part, (before, _) in self.parts.items())

    @property
    def both(self) -> str:
        """The parts in words, with both fingerprints."""
        pairs = self.parts.items()
        return ", ".join(f"{PARTS[part]} ({_shown(before)} then, {_shown(now)} now)" for part, (before, now) in pairs)

    @property
    def now(self) -> str:
        return ", ".join(_shown(now) for _, now in self.parts.values())

    def without(self, parts: Collection[str]) -> Changed:
        return Changed({part: pair for part, pair in self.parts.items() if part not in parts})


def _shown(fingerprint: str) -> str:
    """Of two digests the one that is made of what transformers reads."""
    return fingerprint.strip("/").split("/")[-1][:12]


def described(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> str:
    """The parts that two records have in common, in words."""
    both = [part for part in PARTS if name_of(what, part) in before and name_of(what, part) in now]
    return ", ".join(PARTS[part] for part in both) or PARTS[ALL]


def recorded(state: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprints of the base in a checkpoint's state or an adapter's record."""
    return {name: value for name, value in state.items() if are_of_a_model(name, [BASE])}


def differing(before: Mapping[str, Any], now: Mapping[str, Any], what: str = BASE) -> Changed:
    """The parts of a model that differ between two records; ALL of it where the first is older than parts.

    A commit counts where weights cannot be compared: a later one may hold the same.
    """
    if name_of(what, "config") not in before:
        pairs = {ALL: (before.get(f"{what}{SUFFIX}"), now.get(f"{what}{SUFFIX}"))}
    else:
        pairs = {part: (before.get(name_of(what, part)), now.get(name_of(what, part))) for part in PARTS if part != ALL}
        if None not in pairs[WEIGHTS]:
            del pairs[COMMIT]
    apart = {part: pair for part, pair in pairs.items() if not _same(*pair, or_absent=part != COMMIT)}
    return Changed({part: (before or "none", now or "none") for part, (before, now) in apart.items()})


def _same(before: str | None, now: str | None, *, or_absent: bool) -> bool:
    if before is None or now is None or before == now:
        return or_absent or before == now
    pairs = zip(before.split("/")[::-1], now.split("/")[::-1], strict=False)
    return any(one and one == other for one, other in pairs)
