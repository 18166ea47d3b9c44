"""`rlft models`: what holds for each family of causal language models."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import metadata

from rlft.commands.tables import matching, wrapped
from rlft.model.families import Families, Family, known
from rlft.tokens.images import EXACT
from rlft.types import require

OF_A_LANGUAGE_MODEL = (
    "reads images in prompts, and its language model is trained; rlft plan model.path=<folder> says what is adapted"
)
INDENT = " " * 4


def command(arguments: list[str]) -> None:
    options = [word for word in arguments if word.startswith("-")]
    patterns = [word for word in arguments if word not in options]
    wrong = next((word for word in options if word != "--json"), None)
    require(wrong is None, "models", "has no such option", got=wrong, remedy="use --json")
    families = known()
    with_images = [kind for kind in EXACT if kind not in families.by_type]
    names = dict.fromkeys([*families.by_type, *with_images], "")
    named = matching(patterns, names, "models", "there is no such family of causal language models")
    chosen = {kind: families.by_type[kind] for kind in named if kind in families.by_type}
    if "--json" in options:
        facts = {kind: asdict(family) for kind, family in chosen.items()}
        facts |= {kind: {"note": OF_A_LANGUAGE_MODEL} for kind in with_images if kind in named}
        print(json.dumps(facts, indent=1))
    else:
        lines = [line for item in chosen.items() for line in lines_of(*item)]
        lines += [
            line for kind in with_images if kind in named for line in wrapped(OF_A_LANGUAGE_MODEL, f"{kind}: ", INDENT)
        ]
        print("\n".join([*lines, "", *notes(families)]))


def lines_of(kind: str, family: Family) -> list[str]:
    """The name of a family with what holds for it, and the layers with and without adapters."""
    if not family.is_trained:
        return wrapped(why_not(family), f"{kind}: ", INDENT)
    refused = f"refused with generation=transformers: {family.decoding}"
    decoding = "generates with transformers" if family.decoding is None else refused
    export = "merged export" if family.exported else "export with as=adapter only"
    rows = "packed training" if family.padded is None else f"training in padded rows ({family.padded})"
    facts = [rows, decoding, vllm_of(family), export]
    left = f"; not {family.not_adapted}" if family.not_adapted else ""
    return [
        *wrapped("; ".join(facts), f"{kind}: ", INDENT),
        *wrapped(f"LoRA on {family.adapted}{left}", INDENT, INDENT),
    ]


def notes(families: Families) -> list[str]:
    """Which families read images; where the facts come from, and a warning where transformers is of another release."""
    images = f"images in prompts: {', '.join(EXACT)}"
    tried = f"tried with transformers {families.transformers} and vLLM {families.vllm}"
    installed = metadata.version("transformers")
    if installed != families.transformers:
        tried += f"; transformers {installed} is installed, with which a run finds out at its start"
    return [images, tried]


def why_not(family: Family) -> str:
    if family.untried:
        return f"not tried: {family.untried}"
    return f"refused: {family.refused or family.wrong}"


def vllm_of(family: Family) -> str:
    return {True: "vLLM with LoRA", False: "vLLM without LoRA", None: "not in vLLM"}[family.vllm]
