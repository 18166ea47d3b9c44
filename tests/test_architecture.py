"""The house rules that a reader relies on, kept by looking at the source (DESIGN sections 1 and 3, CONTRIBUTING)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import rlft
from rlft import catalog

PACKAGE = Path(rlft.__file__).parent
TESTS = Path(__file__).parent
MODULES = sorted(f.relative_to(PACKAGE).with_suffix("") for f in PACKAGE.rglob("*.py"))

# What the folders stand on, lowest first: a folder imports these, itself, and of its siblings only what is said here.
GROUND = ("types", "fields", "seeds", "hub", "catalog", "suggest", "sampling_keys", "targets", "collate")
FOLDERS = {
    "ops": (),
    "algorithm": ("ops",),
    "data": (),
    "reward": (),
    "generation": (),
    "model": (),
    "trainer": (),
    "logger": (),
}
# Modules whose tests have another name than theirs: what they are for is seen where they are used.
TESTED_ELSEWHERE = {
    "algorithm/protocol": "algorithm/test_grpo.py",
    "data/records": "data/test_jsonl.py",
    "generation/config": "test_config.py",
    "model/config": "test_config.py",
    "model/whole": "test_sft.py",
    "trainer/config": "test_config.py",
    "reward/sandbox_launch": "reward/test_escapes.py",
    "reward/spec": "reward/test_reward_spec.py",
    "reward/pool": "reward/test_reward_workers.py",
    "reward/worker": "reward/test_reward_workers.py",
}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def walk(node: ast.AST, *, typing: bool) -> Iterator[ast.AST]:
    """The nodes below, with or without what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if typing or not is_type_checking(child):
            yield child
            yield from walk(child, typing=typing)


def imports(module: Path, *, typing: bool = True) -> set[str]:
    """Dotted names that a module imports, also inside functions."""
    found = set()
    for node in walk(ast.parse((PACKAGE / module).with_suffix(".py").read_text()), typing=typing):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(module: Path, *, typing: bool = True) -> set[Path]:
    """The modules of rlft that a module imports."""
    found = set()
    for name in imports(module, typing=typing):
        parts = name.split(".")
        if parts[0] == "rlft":
            longest = next((n for n in range(len(parts), 1, -1) if Path(*parts[1:n]) in MODULES), 1)
            found.add(Path(*parts[1:longest]))
    return found - {Path()}


def libraries(module: Path, *, typing: bool = True) -> set[str]:
    return {name.split(".")[0] for name in imports(module, typing=typing)} - {"rlft"}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_run_one_way(module: Path) -> None:
    place = module.parts[0]
    if place in FOLDERS:
        allowed = {*GROUND, place, *FOLDERS[place]}
        assert {m.parts[0] for m in ours(module)} <= allowed, f"{module} stands on {sorted(allowed)} only"
    elif place in GROUND:
        below = GROUND[: GROUND.index(place)]
        assert {m.parts[0] for m in ours(module)} <= set(below), f"{module} is ground: it stands on {below} only"


def test_no_module_imports_itself_by_way_of_others() -> None:
    # rlft/__init__.py fetches load_algorithm late; names for type checkers close no circle either.
    below = {module: ours(module, typing=False) for module in MODULES if module != Path("__init__")}
    done: set[Path] = set()
    while ready := {m for m, needs in below.items() if m not in done and needs <= done | {Path("__init__")}}:
        done |= ready
    assert set(below) - done == set()


def test_the_command_line_is_on_top() -> None:
    assert [str(m) for m in MODULES if Path("cli") in ours(m)] == []


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("vllm", {"generation/vllm"}),
        ("hydra", {"cli", "config", "multirun"}),
        ("omegaconf", {"cli", "config"}),
        ("wandb", {"logger/wandb"}),
        ("reasoning_gym", {"data/reasoning_gym", "reward/reasoning_gym"}),
        ("math_verify", {"reward/math"}),
        ("datasets", {"data/hub"}),
        ("py3langid", {"reward/language"}),
        ("httpx2", {"reward/remote"}),
    ],
)
def test_a_library_is_imported_in_its_place_only(library: str, places: set[str]) -> None:
    assert {str(m) for m in MODULES if library in libraries(m)} <= places


def test_ops_and_algorithms_are_pure_functions_of_tensors() -> None:
    """No model, tokenizer or config: nothing but torch, the standard library and what checks a field's bounds."""
    allowed = {*sys.stdlib_module_names, "torch", "annotated_types"}
    for module in MODULES:
        if module.parts[0] in ("ops", "algorithm"):
            assert libraries(module) <= allowed, module


LIGHT = [
    module
    for module in MODULES
    if module.parts[0] in ("data", "reward", "checks", *GROUND, "prompts", "arguments", "config", "cli")
    and module != Path("collate")
]


@pytest.mark.parametrize("module", [m for m in LIGHT if m != Path("reward/scorer")], ids=str)
def test_data_rule_rewards_and_the_command_line_know_no_torch(module: Path) -> None:
    """The scorer alone, which runs in the trainer, makes tensors."""
    assert "torch" not in libraries(module, typing=False)


def test_importing_every_light_module_imports_neither_torch_nor_transformers() -> None:
    """Not even by way of others: reward workers and `rlft --help` start without them."""
    names = [".".join(("rlft", *module.parts)).removesuffix(".__init__") for module in LIGHT]
    heavy = ("torch", "transformers", "peft", "datasets", "vllm", "math_verify", "reasoning_gym", "httpx2")
    code = f"import sys\nfor name in {names}: __import__(name)\nprint([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_loop_fits_one_screen_and_names_its_five_stages() -> None:
    functions = {
        n.name: n for n in ast.parse((PACKAGE / "train.py").read_text()).body if isinstance(n, ast.FunctionDef)
    }
    loop = functions["train"]
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno + 1 <= 45
    clocks = [n for n in ast.walk(loop) if isinstance(n, ast.With) and isinstance(n.items[0].context_expr, ast.Call)]
    stages = [ast.literal_eval(n.items[0].context_expr.args[0]) for n in clocks]  # type: ignore[attr-defined]
    assert stages == ["sample", "score", "credit", "update", "publish"]


def targets(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "_target_":
                yield inner
            else:
                yield from targets(inner)


CHOICES = [(g, c) for g in catalog.groups() if g not in ("recipe", "generation") for c in catalog.choices(g)]
READ_FROM_DATA = ("demonstrations", "preferences")  # one module a group, whatever the file they come from


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_a_yamls_address_is_its_codes_address(group: str, choice: str) -> None:
    """Or it is a variant: another choice's code with other keys."""
    text = (catalog.config_folder() / group / f"{choice}.yaml").read_text()
    for target in targets(yaml.safe_load(text)):
        if group in READ_FROM_DATA:
            assert target.startswith(f"rlft.data.{group}.")
            continue
        assert target.startswith(f"rlft.{group}.")
        module = Path(*target.split(".")[1:-1])
        assert module in MODULES
        assert module == Path(group, choice) or not (PACKAGE / group / f"{choice}.py").exists()


def test_every_engine_has_its_yaml_and_its_code() -> None:
    engines = set(catalog.choices("generation")) - {"auto"}
    assert {m.name for m in MODULES if m.parent == Path("generation")} >= engines


@pytest.mark.parametrize("module", [m for m in MODULES if m.parts[0] in FOLDERS and m.name != "__init__"], ids=str)
def test_tests_mirror_the_tree(module: Path) -> None:
    expected = TESTED_ELSEWHERE.get(str(module), f"{module.parent}/test_{module.name}.py")
    assert (TESTS / expected).is_file()


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_is_a_drawer_for_odds_and_ends(folder: str) -> None:
    names = {m.name for m in MODULES}
    assert not names & {"utils", "util", "helpers", "helper", "misc", "common", "manager", "base"}, folder


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_nothing_is_caught_bare_and_nothing_pickled_is_loaded(module: Path) -> None:
    tree = ast.parse((PACKAGE / module).with_suffix(".py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{module}:{node.lineno} catches everything"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            called = ast.unparse(node.func)
            # Between the trainer and processes it has started itself, never from a file.
            assert called != "torch.load", f"{module}:{node.lineno}"
            assert called != "pickle.load" or str(module) == "data/reasoning_gym", f"{module}:{node.lineno}"
