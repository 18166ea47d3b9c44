"""`rlft models`: what holds for each family of causal language models, as text, JSON or docs/reference/models.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from fnmatch import fnmatch
from importlib import metadata

from rlft.commands.tables import wrapped
from rlft.config.choices import closest
from rlft.model.families import Families, Family, known
from rlft.tokens.images import EXACT
from rlft.types import UserError, require

USAGE = """\
usage: rlft models [<pattern>] [--json] [--markdown]

What holds for each family of causal language models (model_type in config.json) of the transformers with which rlft was
tested: what LoRA is on and what it leaves out, whether rows are packed, decoding in the transformers engine, vLLM with
adapters, export with the adapter merged; or why such a model is refused.

  <pattern>    families whose names contain it, or match it: qwen, gemma3*
  --json       the same as JSON
  --markdown   the whole page docs/reference/models.md

  rlft models qwen
  rlft models"""

OF_A_LANGUAGE_MODEL = (
    "reads images in prompts, and its language model is trained; rlft plan model.path=<folder> says what is adapted"
)
INDENT = " " * 4
PAGE = """\
# Families of models

`rlft models` prints these facts, `rlft models qwen` those of some families. Each was found with a tiny random model
(float32, CPU): log-probs against transformers' own model, one row at a time, and decoding against
training, both within 1e-4 nats; whether a gradient reaches every weight of an adapter; the exported model against base
and adapter. transformers {transformers}, vLLM {vllm}. `tests/helpers/write_families.py` writes it.

- **Adapted** are the layers of `lora.target_modules: all-linear`; `rlft plan` says how many weights they have. Left out
  is what no gradient reaches, what is read past its layer, and what shares its weights.
- **Rows** are packed (each prompt once for its group, no padding) or padded, for the reason given.
- **Decoding** is that of `generation=transformers`. Every run compares it with training before its first step.
- **vLLM**: whether it has the family, and takes adapters on it. It may run others through its backend for transformers.
- **Routing replay** (`snapshot.routing`) works in mixtures of experts; not in {routed}.
- **Images** in prompts ([vision.md](../how-to/vision.md)): of {images}; other families are trained on texts alone.
- **Export** is `rlft export` with the adapter merged (`as=adapter` always works).
- **GGUF**: llama.cpp's converter decides by `architectures` in config.json; `convert_hf_to_gguf.py
  --print-supported-models` lists what it takes.

| family | adapted | not adapted | rows | decoding | vLLM | export |
|---|---|---|---|---|---|---|
{rows}

Refused before weights are loaded, by `model.path`:

| family | why |
|---|---|
{refused}
"""


def command(arguments: list[str]) -> None:
    options = [word for word in arguments if word.startswith("-")]
    patterns = [word for word in arguments if word not in options]
    wrong = next((word for word in options if word not in ("--json", "--markdown")), None)
    require(wrong is None, "models", "has no such option", got=wrong, remedy="use --json or --markdown")
    remedy = "write rlft models <pattern>"
    require(len(patterns) < 2, "models", "takes one pattern", got=" ".join(patterns), remedy=remedy)
    families = known()
    with_images = [kind for kind in EXACT if kind not in families.by_type]
    names = [*families.by_type, *with_images]
    named = matching(names, patterns[0]) if patterns else names
    chosen = {kind: families.by_type[kind] for kind in named if kind in families.by_type}
    if "--json" in options:
        facts = {kind: asdict(family) for kind, family in chosen.items()}
        facts |= {kind: {"note": OF_A_LANGUAGE_MODEL} for kind in with_images if kind in named}
        print(json.dumps(facts, indent=1))
    elif "--markdown" in options:
        print(page(), end="")
    else:
        lines = [line for item in chosen.items() for line in lines_of(*item)]
        lines += [
            line for kind in with_images if kind in named for line in wrapped(OF_A_LANGUAGE_MODEL, f"{kind}: ", INDENT)
        ]
        print("\n".join([*lines, "", *notes(families)]))


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names of families that contain the pattern or match it, whatever its case; there must be one."""
    wanted = pattern.lower().replace("-", "_")
    named = {kind: kind.lower().replace("-", "_") for kind in names}
    found = [kind for kind, name in named.items() if wanted in name or fnmatch(name, wanted)]
    if not found:
        close = closest(wanted, named.values())
        remedy = f"did you mean {close}?" if close else "rlft models lists all"
        raise UserError("models", "there is no such family of causal language models", got=pattern, remedy=remedy)
    return found


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


def rows_of(family: Family) -> str:
    return "packed" if family.padded is None else f"padded ({family.padded})"


def vllm_of(family: Family) -> str:
    return {True: "vLLM with LoRA", False: "vLLM without LoRA", None: "not in vLLM"}[family.vllm]


def page() -> str:
    """The text of docs/reference/models.md."""
    families = known()
    trained = {kind: family for kind, family in families.by_type.items() if family.is_trained}
    rows = [
        (
            f"`{kind}`",
            family.adapted,
            family.not_adapted,
            rows_of(family),
            "yes" if family.decoding is None else f"no: {family.decoding}",
            vllm_of(family).removeprefix("vLLM "),
            "yes" if family.exported else "as=adapter",
        )
        for kind, family in trained.items()
    ]
    refused = [(f"`{kind}`", why_not(family)) for kind, family in families.by_type.items() if kind not in trained]
    tables = ["\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, refused)]
    routed = ", ".join(f"`{kind}`" for kind, family in trained.items() if family.routing is not None)
    return PAGE.format(
        images=", ".join(f"`{kind}`" for kind in EXACT),
        routed=routed,
        transformers=families.transformers,
        vllm=families.vllm,
        rows=tables[0],
        refused=tables[1],
    )
