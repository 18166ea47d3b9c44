"""The rules of the house (CONTRIBUTING), checked by reading the source of every module."""

import ast
import functools
import importlib
import operator
import re
import subprocess
import sys
from pathlib import Path

import yaml

import rlft
from rlft.config import catalog

PACKAGE = Path(rlft.__file__).parent
TESTS = Path(__file__).parent
MODULES = sorted(f.relative_to(PACKAGE).with_suffix("") for f in PACKAGE.rglob("*.py"))

# The rooms of rlft/ (a folder, or a module at its root), lowest first. A room imports only from rooms of lower levels
# and from itself; rooms of one level do not import each other, so that `plan` imports no logger. Every module is in one
# of them.
LEVELS = (
    ("types",), ("batch", "config", "system", "tokens"),
    ("algorithm", "generation", "model", "reward", "data", "runs"), ("trainer", "environment"), ("plan", "logger"),
    ("loop",), ("train",), ("commands",), ("cli",),
)  # fmt: skip
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
MOST_FOLDERS, MOST_ROOT_MODULES, MOST_LEVELS, MOST_ARROWS = 15, 5, 9, 95

# {library: where it may be imported}; what is imported by name (trackers, see logger/scalars.py) has no place.
PLACES = {
    "vllm": {"generation/vllm/generator", "generation/vllm/guest", "generation/vllm/teacher"},
    "hydra": {"config/compose", "config/overrides"},
    "omegaconf": {"config/compose"},
    "wandb": set(),
    "tensorboard": set(),
    "mlflow": set(),
    "trackio": {"logger/trackio"},
    "reasoning_gym": {"data/reasoning_gym", "reward/reasoning_gym"},
    "math_verify": {"reward/math"},
    "mcp": {"environment/mcp"},
    "datasets": {"data/hub"},
    "py3langid": {"reward/language"},
    "httpx2": {"reward/http"},
    "optuna": {"commands/sweep/study"},
    "PIL": {"data/shapes", "tokens/images"},
    "matplotlib": {"commands/sweep/study"},
}
HEAVY = ("torch", "transformers", "peft", "datasets", "vllm", "math_verify", "reasoning_gym", "httpx2")
LIGHT_ROOMS = ("types", "config", "data", "reward", "environment", "runs", "logger", "cli", "commands/watch")
HEAVY_IN_LIGHT_ROOMS = {"data/examples"}
LIGHT_COMMANDS = (
    "audit/command", "chat", "doctor/command", "eval", "export/command", "init", "launch", "lists",
    "plan", "policy", "rank", "resume", "reward", "sample", "serve",
    "sweep/command", "tables", "training", "translate",
)  # fmt: skip
"""Workers, refusals and `rlft --help` import these: they import no heavy library, not even by way of others."""


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """{module: its source}; not read where another process of the suite runs these tests."""
    return {module: ast.parse((PACKAGE / module).with_suffix(".py").read_text()) for module in MODULES}


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def walk(node, *, typing):
    """The nodes below, with or without what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if typing or not is_type_checking(child):
            yield child
            yield from walk(child, typing=typing)


@functools.cache
def imports(module: Path, *, typing: bool = True) -> set[str]:
    """Dotted names that a module imports, also inside functions."""
    found = set()
    for node in walk(trees()[module], typing=typing):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def ours(module: Path) -> set[Path]:
    """The modules of rlft that a module imports."""
    found = set()
    for name in imports(module):
        parts = name.split(".")
        if parts[0] == "rlft":
            longest = next((n for n in range(len(parts), 1, -1) if Path(*parts[1:n]) in trees()), 1)
            found.add(Path(*parts[1:longest]))
    return found - {Path()}


def libraries(module, *, typing=True):
    return {name.split(".")[0] for name in imports(module, typing=typing)} - {"rlft"}


def test_rooms_are_few_and_imports_run_one_way():
    """Imports for type checkers count, too. rlft/__init__.py alone imports from above, when it is called."""
    rooms = {module.parts[0] for module in MODULES} - {"__init__"}
    assert rooms == set(LEVEL_OF)
    assert len([room for room in rooms if (PACKAGE / room).is_dir()]) <= MOST_FOLDERS
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_ROOT_MODULES
    assert len(LEVELS) <= MOST_LEVELS
    arrows = set()
    for module in MODULES:
        if (room := module.parts[0]) == "__init__":
            continue
        for other in {m.parts[0] for m in ours(module)} - {room, "__init__"}:
            arrows.add((room, other))
            assert LEVEL_OF[other] < LEVEL_OF[room], f"{module} imports from {other}, of its own or a higher level"
    assert len(arrows) <= MOST_ARROWS


def test_no_module_imports_itself_by_way_of_others():
    """Imports within functions and for type checkers count, too. Only rlft/__init__.py imports from above."""
    below = {module: ours(module) for module in MODULES if module != Path("__init__")}
    done: set[Path] = set()
    while ready := {m for m, needs in below.items() if m not in done and needs <= done | {Path("__init__")}}:
        done |= ready
    assert set(below) - done == set()


def test_each_module_keeps_the_rules_of_its_source():
    for module, tree in trees().items():
        assert module.name not in {"utils", "util", "helpers", "helper", "misc", "common", "manager", "base"}
        if module.name == "__init__":
            assert ast.get_docstring(tree), f"{module} says what its folder is for"
        for library in libraries(module) & PLACES.keys():
            assert str(module) in PLACES[library], f"{module} imports {library}"
        if module.parts[0] == "algorithm":  # pure functions of tensors; bounds check a field
            assert libraries(module) <= {*sys.stdlib_module_names, "torch", "annotated_types"}, module
        if (
            module.parts[0] in ("reward", "data")
            and module.parts[1] != "workers"
            and str(module) not in HEAVY_IN_LIGHT_ROOMS
        ):
            assert "torch" not in libraries(module, typing=False), module
        if module.parts[0] != "model":  # the kernels stand behind one door
            kernels = {m for m in ours(module) if Path("model/kernels") in m.parents}
            assert kernels <= {Path("model/kernels/selection")}, module
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{module}:{node.lineno} catches everything"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                called = ast.unparse(node.func)
                # Between the trainer and processes it has started itself, never from a file.
                tensors_alone = str(module) == "model/network_files" and "weights_only=True" in ast.unparse(node)
                assert called != "torch.load" or tensors_alone, f"{module}:{node.lineno}"
                assert called != "pickle.load", f"{module}:{node.lineno}"


def test_importing_every_light_module_imports_no_heavy_library():
    light = [
        m
        for m in MODULES
        if (any(Path(room) in (m, *m.parents) for room in LIGHT_ROOMS) and str(m) not in HEAVY_IN_LIGHT_ROOMS)
        or str(m) in {f"commands/{name}" for name in LIGHT_COMMANDS}
    ]
    names = [".".join(("rlft", *module.parts)).removesuffix(".__init__") for module in light]
    assert len(names) > 100
    code = f"import sys\nfor name in {names}: __import__(name)\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "[]"


def targets(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "_target_":
                yield inner
            else:
                yield from targets(inner)


FOLDERS = {"loss": "algorithm.preference", "demonstrations": "data", "preferences": "data"}
"""{group of configs/: the folder of its code}; other groups have a folder of their own name."""


def test_a_yamls_address_is_its_codes_address():
    """Or it is a variant: another choice's code with other keys."""
    for group in catalog.groups():
        for choice in catalog.choices(group) if group not in ("recipe", "generation") else ():
            text = (catalog.config_folder() / group / f"{choice}.yaml").read_text()
            for target in targets(yaml.safe_load(text)):
                folder = FOLDERS.get(group, group)
                assert target.startswith(f"rlft.{folder}."), f"{group}={choice}"
                module = Path(*target.split(".")[1:-1])
                assert module in trees(), f"{group}={choice}"
                if folder == group:
                    assert module == Path(group, choice) or not (PACKAGE / group / f"{choice}.py").exists()
    engines = set(catalog.choices("generation")) - {"auto"}
    assert {m.name for m in MODULES if m.parent == Path("generation")} >= engines - {"vllm"}


def test_every_module_has_a_file_of_tests_with_its_name():
    modules = [module for module in MODULES if module.name != "__init__"]
    assert [str(m) for m in modules if not (TESTS / m.parent / f"test_{m.name}.py").is_file()] == []


def places_of_events():
    """Where tests plant events in other processes, `module:name`; also in tests that run with a CUDA GPU only."""
    named = re.compile(r"""["'](rlft(?:\.\w+)+):([\w.]+)["']""")
    return sorted({place for file in TESTS.rglob("*.py") for place in named.findall(file.read_text())})


def test_the_places_that_tests_name_exist():
    for module, name in places_of_events():
        operator.attrgetter(name)(importlib.import_module(module))
