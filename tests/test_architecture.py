"""The house rules that a reader relies on, kept by looking at the source (CONTRIBUTING)."""

from __future__ import annotations

import ast
import importlib
import operator
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import rlft
from rlft.keys import catalog

PACKAGE = Path(rlft.__file__).parent
TESTS = Path(__file__).parent
MODULES = sorted(f.relative_to(PACKAGE).with_suffix("") for f in PACKAGE.rglob("*.py"))

# The rooms of rlft/ (a package, or a module at its root), lowest first. A room imports only from rooms of lower levels
# and from itself; rooms of one level do not import each other. Every module is in one of them.
LEVELS = (
    ("types",),
    ("keys", "system", "ops", "batch", "tokens"),
    ("algorithm", "data", "generation", "logger", "loss", "model", "sandbox", "scoring"),
    ("trainer", "environment"),
    ("cluster",),
    ("config", "reward"),
    ("checks", "prepare", "run"),
    ("planning", "export", "watch"),
    ("loop",),
    ("train", "supervised", "doctor"),
    ("verbs",),
    ("cli",),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
MOST_ROOMS, MOST_ROOT_MODULES = 31, 8

# Modules whose tests have another name than theirs: what they are for is seen where they are used.
TESTED_ELSEWHERE = {
    "algorithm/protocol": "algorithm/test_grpo.py",
    "checks/adapters": "test_refusals.py",
    "checks/dpo": "test_refusals.py",
    "checks/environments": "test_refusals.py",
    "checks/device_memory": "test_refusals.py",
    "checks/files": "test_refusals.py",
    "checks/ranks": "test_refusals.py",
    "checks/rm": "test_refusals.py",
    "checks/roles": "test_refusals.py",
    "checks/rules": "test_refusals.py",
    "checks/sample": "test_refusals.py",
    "checks/servers": "planning/test_tried_servers.py",
    "checks/sft": "test_refusals.py",
    "checks/teachers": "test_refusals.py",
    "checks/train": "test_refusals.py",
    "data/lines": "data/test_jsonl.py",
    "cluster/config": "config/test_compose.py",
    "cluster/member": "cluster/test_processes.py",
    "cluster/launcher": "whole_runs/test_engines_apart.py",
    "cluster/ray_host": "cluster/test_ray_actors.py",
    "cluster/ray_keeper": "cluster/test_ray_actors.py",
    "cluster/ray_own_gpu": "cluster/test_ray_actors.py",
    "cluster/ray_session": "cluster/test_ray_actors.py",
    "cluster/serve": "cluster/test_processes.py",
    "config/schema": "config/test_compose.py",
    "data/records": "data/test_jsonl.py",
    "doctor/arithmetic": "test_bench_scripts.py",
    "doctor/checks": "verbs/test_doctor.py",
    "doctor/engine": "verbs/test_doctor.py",
    "doctor/kernels": "verbs/test_doctor.py",
    "doctor/machine": "verbs/test_doctor.py",
    "doctor/row": "verbs/test_doctor.py",
    "doctor/settings": "verbs/test_doctor.py",
    "doctor/speed": "verbs/test_doctor.py",
    "doctor/supervise": "verbs/test_doctor.py",
    "doctor/trial": "verbs/test_doctor.py",
    "doctor/versions": "verbs/test_doctor.py",
    "doctor/work": "test_bench_scripts.py",
    "environment/dialect": "environment/test_conversations.py",
    "environment/duck_type": "environment/test_conversations.py",
    "environment/endpoint/agents": "environment/endpoint/test_played.py",
    "environment/endpoint/bodies": "environment/endpoint/test_app.py",
    "environment/endpoint/inbox": "environment/endpoint/test_app.py",
    "environment/endpoint/replies": "environment/endpoint/test_app.py",
    "environment/endpoint/server": "environment/endpoint/test_app.py",
    "environment/endpoint/service": "environment/endpoint/test_app.py",
    "environment/endpoint/speech": "environment/endpoint/test_app.py",
    "environment/endpoint/traces": "environment/endpoint/test_played.py",
    "environment/endpoint/trajectory": "environment/endpoint/test_played.py",
    "environment/game": "environment/test_conversations.py",
    "environment/protocol": "environment/test_conversations.py",
    "environment/tools": "environment/test_conversations.py",
    "environment/worker": "environment/test_conversations.py",
    "export/model_card": "verbs/test_export.py",
    "generation/config": "config/test_compose.py",
    "generation/engine": "generation/test_outside_engine.py",
    "generation/memory": "planning/test_memory_parts.py",
    "generation/vllm_generator": "generation/test_vllm.py",
    "generation/vllm_guest": "generation/test_vllm.py",
    "generation/vllm_memory": "generation/test_vllm_sharing.py",
    "keys/bounds": "config/test_compose.py",
    "keys/catalog": "test_recipes.py",
    "keys/instantiate": "config/test_compose.py",
    "keys/verbs": "verbs/test_outside_verb.py",
    "loop/conversing": "environment/test_runs.py",
    "loop/engine_members": "loop/test_engine_worker.py",
    "loop/outcome": "verbs/test_launch.py",
    "loop/rank_worker": "cluster/test_ranked_trainer.py",
    "loop/ranks": "whole_runs/test_ranks.py",
    "loop/saving": "whole_runs/test_giving_up_a_step.py",
    "loop/sampling": "loop/test_dynamic_sampling.py",
    "loop/session": "loop/test_schedule_of_snapshots.py",
    "loop/shell": "whole_runs/test_interrupts.py",
    "model/config": "config/test_compose.py",
    "model/kernels/families": "model/kernels/test_selection.py",
    "model/full_weights": "verbs/test_sft.py",
    "planning/dpo_plan": "verbs/test_dpo.py",
    "planning/memory_demand": "planning/test_memory_parts.py",
    "planning/ranking_plan": "verbs/test_rm.py",
    "planning/rm_plan": "verbs/test_rm.py",
    "planning/run_plan": "verbs/test_plan.py",
    "planning/sample_plan": "verbs/test_sample.py",
    "planning/sampling_shapes": "planning/test_memory_parts.py",
    "planning/sft_plan": "verbs/test_sft.py",
    "planning/environment_trial": "environment/test_plans_and_chats.py",
    "planning/shown": "test_refusals.py",
    "planning/startup_table": "verbs/test_plan.py",
    "planning/train_plan": "verbs/test_plan.py",
    "run/config_file": "run/test_damaged_files.py",
    "run/find": "verbs/test_export.py",
    "run/like": "verbs/test_sample.py",
    "run/paths": "run/test_moved.py",
    "run/run_folder": "run/test_damaged_files.py",
    "sandbox/required": "reward/test_code.py",
    "sandbox/launch": "sandbox/test_escapes.py",
    "scoring/worker": "scoring/test_pool.py",
    "supervised": "verbs/test_sft.py",
    "system/children": "scoring/test_pool.py",
    "system/hub": "data/test_hub.py",
    "system/running_time": "scoring/test_signals_to_a_job.py",
    "system/signals": "scoring/test_signals_to_a_job.py",
    "system/terminal": "test_doctests.py",
    "train": "loop/test_schedule_of_snapshots.py",
    "trainer/config": "config/test_compose.py",
    "trainer/protocol": "trainer/test_local.py",
    "types": "test_batch.py",
    "verbs/doctor_page": "verbs/test_doctor.py",
    "verbs/job_process": "verbs/test_sweep_jobs.py",
    "verbs/plan_page": "verbs/test_plan.py",
    "verbs/policy_page": "test_hints.py",
    "verbs/ranking_lesson": "verbs/test_rm.py",
    "verbs/study/config": "test_refusals.py",
    "verbs/study/record": "verbs/study/test_command.py",
    "verbs/sweep": "whole_runs/test_sweeps.py",
    "verbs/train": "test_cli.py",
    "verbs/arguments": "test_refusals.py",
    "verbs/begin": "test_cli.py",
    "verbs/own": "config/test_compose.py",
    "verbs/plan_command": "verbs/test_plan.py",
    "verbs/recipes": "test_recipes.py",
    "verbs/resume": "whole_runs/test_resume_refusals.py",
    "watch/arguments": "config/test_overrides.py",
    "watch/diff": "watch/test_runs.py",
    "watch/report_completions": "watch/test_report.py",
    "watch/report_data": "watch/test_report.py",
    "watch/watch": "watch/test_runs.py",
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


@pytest.mark.parametrize("module", [m for m in MODULES if m != Path("__init__")], ids=str)
def test_imports_run_one_way(module: Path) -> None:
    """Those for type checkers, too. rlft/__init__.py alone, the address of load_algorithm, fetches from above."""
    room = module.parts[0]
    assert room in LEVEL_OF, f"{module} stands in no room that LEVELS names"
    above = {m for m in ours(module) if m.parts[0] != room and LEVEL_OF[m.parts[0]] >= LEVEL_OF[room]}
    assert not above, f"{module} is on level {LEVEL_OF[room]} and imports from its own or a higher one"


def test_the_first_floor_can_be_seen_at_a_glance() -> None:
    rooms = {module.parts[0] for module in MODULES} - {"__init__"}
    assert rooms == set(LEVEL_OF)
    assert len(rooms) <= MOST_ROOMS
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_ROOT_MODULES


@pytest.mark.parametrize("package", sorted({m.parent for m in MODULES if m.parent != Path()}), ids=str)
def test_every_package_says_what_it_is_for(package: Path) -> None:
    assert ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text()))


def test_no_module_imports_itself_by_way_of_others() -> None:
    # rlft/__init__.py fetches load_algorithm late; names for type checkers close no circle either.
    below = {module: ours(module, typing=False) for module in MODULES if module != Path("__init__")}
    done: set[Path] = set()
    while ready := {m for m, needs in below.items() if m not in done and needs <= done | {Path("__init__")}}:
        done |= ready
    assert set(below) - done == set()


def test_the_command_line_is_on_top() -> None:
    assert [str(m) for m in MODULES if Path("cli") in ours(m)] == ["__init__"], "which only handles signals before it"


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("vllm", {"generation/vllm_generator", "generation/vllm_guest", "generation/vllm_teacher"}),
        ("hydra", {"config/compose", "verbs/sweep"}),
        ("omegaconf", {"config/compose"}),
        ("wandb", set()),  # trackers are imported by name, in logger/scalars.py
        ("tensorboard", set()),
        ("mlflow", set()),
        ("trackio", {"logger/trackio"}),
        ("reasoning_gym", {"data/reasoning_gym", "reward/reasoning_gym"}),
        ("math_verify", {"reward/math"}),
        ("datasets", {"data/hub"}),
        ("py3langid", {"reward/language"}),
        ("httpx2", {"reward/remote"}),
        ("optuna", {"verbs/study/trials"}),
        ("matplotlib", {"verbs/study/page"}),
    ],
)
def test_a_library_is_imported_in_its_place_only(library: str, places: set[str]) -> None:
    assert {str(m) for m in MODULES if library in libraries(m)} <= places


def test_the_kernels_stand_behind_one_door() -> None:
    """Whoever is not of the model asks rlft/model/kernels/selection.py alone which kernels there are."""
    kernels = Path("model/kernels")
    for module in MODULES:
        if module.parts[0] != "model":
            asked = {m for m in ours(module) if kernels in m.parents}
            assert asked <= {kernels / "selection"}, module


def test_ops_algorithms_and_losses_are_pure_functions_of_tensors() -> None:
    """No model, tokenizer or config: nothing but torch, the standard library and what checks a field's bounds."""
    allowed = {*sys.stdlib_module_names, "torch", "annotated_types"}
    for module in MODULES:
        if module.parts[0] in ("ops", "algorithm", "loss"):
            assert libraries(module) <= allowed, module


LIGHT_VERBS = (
    "own",
    "arguments",
    "begin",
    "launch",
    "sweep",
    "resume",
    "recipes",
    "algorithms",
    "plan_command",
    "doctor",
    "chat",
    "eval",
    "export",
    "serve",
)
LIGHT_ROOMS = (
    *(
        "types",
        "keys",
        "data",
        "reward",
        "scoring",
        "sandbox",
        "environment",
        "checks",
        "config",
        "run",
        "watch",
    ),
)
LIGHT = [
    m
    for m in MODULES
    if m.parts[0] in LIGHT_ROOMS
    or str(m) in ("cli", "prepare/prompts", "algorithm/formula")
    or (m.parts[0] == "verbs" and m.name in LIGHT_VERBS)
]


@pytest.mark.parametrize("module", [m for m in MODULES if m.parts[0] in ("data", "reward", "sandbox")], ids=str)
def test_data_and_rewards_know_no_torch(module: Path) -> None:
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


@pytest.mark.parametrize("module", [m for m in MODULES if m.name != "__init__"], ids=str)
def test_tests_mirror_the_tree(module: Path) -> None:
    expected = TESTED_ELSEWHERE.get(str(module), f"{module.parent}/test_{module.name}.py")
    assert (TESTS / expected).is_file()


def places_of_events() -> list[tuple[str, str]]:
    """Where tests plant events in other processes, `module:name`; also in tests that run with a CUDA GPU only."""
    named = re.compile(r"""["'](rlft(?:\.\w+)+):([\w.]+)["']""")
    return sorted({place for file in TESTS.rglob("*.py") for place in named.findall(file.read_text())})


@pytest.mark.parametrize(("module", "name"), places_of_events())
def test_the_places_that_tests_name_exist(module: str, name: str) -> None:
    operator.attrgetter(name)(importlib.import_module(module))


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    names = {m.name for m in MODULES}
    assert not names & {"utils", "util", "helpers", "helper", "misc", "common", "manager", "base"}


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
