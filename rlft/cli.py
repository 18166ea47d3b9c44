"""The command line: verbs, exit codes, and the only place that knows Hydra's main.

Exit codes: 0 done, 1 the run stopped by itself (the message says why), 2 a mistake the user can mend, 130 interrupted.
Nothing heavy is imported before it is needed: `rlft --help` and `rlft train --help` import no torch.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import rlft
from rlft import catalog
from rlft import config as configs
from rlft.arguments import Arguments, parse
from rlft.types import UserError

USAGE = """\
rlft: fine-tune language models with reinforcement learning on the hardware you have

  rlft train +recipe=<name> [<key>=<value>] ...   train; -m with several values sweeps; --help lists groups and recipes
  rlft resume <run> [<key>=<value>] ...           go on from a run's newest checkpoint
  rlft eval run=<run or checkpoint> [...]         mean@k and pass@k on the held-out split; or a model: model.path=<path>
  rlft recipes                                    list the recipes
  rlft --version

First: rlft train +recipe=grpo_arithmetic         two minutes on a CPU, nothing to download
"""
RESUME_USAGE = """\
usage: rlft resume <run> [<key>=<value>] ...

Goes on from the newest checkpoint, exactly as if never stopped. Keys that would change the run are refused.
  rlft resume runs/grpo_arithmetic/<time>
  rlft resume runs/grpo_arithmetic/<time> steps=80"""


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code and prints its errors."""
    verbs: dict[str, Callable[[list[str]], int]] = {
        "train": train,
        "resume": resume,
        "eval": evaluate,
        "recipes": recipes,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"rlft {rlft.__version__}")
        return 0
    verb, rest = arguments[0], list(arguments[1:])
    try:
        if verb not in verbs:
            close = difflib.get_close_matches(verb, verbs, n=1)
            remedy = f"did you mean rlft {close[0]}?" if close else f"use one of {', '.join(verbs)}"
            raise UserError(verb, "there is no such verb", remedy=remedy)
        with ExitStack() as stack:
            _quiet()
            return _stopped(stack, verbs[verb], rest)
    except UserError as error:
        print(f"rlft: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _stopped(stack: ExitStack, verb: Callable[[list[str]], int], rest: list[str]) -> int:
    """Runs the verb; a run that stops itself is told in a line, not in a traceback."""
    try:
        return verb(rest)
    except RuntimeError as error:
        if not _is_told(error):
            raise
        print(f"rlft: stopped: {error}", file=sys.stderr)
        return 1


def _is_told(error: RuntimeError) -> bool:
    """Whether the error is one of ours, whose message already holds cause and remedy."""
    return type(error).__module__.startswith("rlft.")


def _quiet() -> None:
    """Other libraries' progress bars and chatter, unless the user has asked for them."""
    for name, value in {
        "HYDRA_FULL_ERROR": "1",  # Hydra raises, and we tell it our way
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # Threads of torch that wait sleep instead of spinning: beside other work on the machine, steps of a small model
        # take a fifth of the time.
        "OMP_WAIT_POLICY": "PASSIVE",
    }.items():
        os.environ.setdefault(name, value)


# -- train -------------------------------------------------------------------------------------------------------------
def train(arguments: list[str]) -> int:
    """`rlft train`, one job or with -m a sweep."""
    asked = parse(arguments)
    _make_importable(asked.config_dir)
    _check_resume_argument(asked)
    if asked.asks:
        _hydra(arguments, _job)
    elif asked.sweep:
        return _sweep(asked)
    else:
        run = configs.compose_run(asked.overrides, asked.config_dir)
        _train(run.plain, Path(os.path.relpath(run.folder)))
    return 0


def _make_importable(config_dir: Path | None) -> None:
    """A user's own modules are found beside where rlft runs and beside their YAML; reward workers inherit the path.

    Last on the path: a folder of theirs named `datasets` must not hide the library.
    """
    for folder in (Path.cwd(), config_dir):
        if folder is not None and str(folder.resolve()) not in sys.path:
            sys.path.append(str(folder.resolve()))


def _hydra(arguments: Sequence[str], job: Callable[[Any], None]) -> None:
    import hydra

    configs.register_resolvers()
    sys.argv = ["rlft train", *arguments]
    folder = str(catalog.config_folder().resolve())
    failures: list[Exception] = []

    def guarded(composed: Any) -> None:
        # Hydra would print a job's exception its own way; the other jobs of a sweep go on.
        try:
            job(composed)
        except Exception as error:
            failures.append(error)

    try:
        hydra.main(config_path=folder, config_name="train", version_base="1.3")(guarded)()
    except Exception as error:
        told = configs.explain(error)
        if told is None:
            raise
        raise told from None
    except SystemExit as end:  # how Hydra ends after --help
        if end.code:
            raise
    if failures:
        raise failures[0]


def _check_resume_argument(asked: Arguments) -> None:
    """resume=<run> must name a run, and goes on in its folder."""
    resumed, folder = asked.value("resume"), asked.value("hydra.run.dir")
    if resumed is None:
        return
    from rlft import runfolder

    runfolder.read(Path(resumed))
    if folder is not None and Path(folder).resolve() != Path(resumed).resolve():
        problem = "a resumed run goes on in its own folder, not in hydra.run.dir"
        raise UserError("resume", problem, got=resumed, remedy="take hydra.run.dir out")


def _job(composed: Any) -> None:
    """One job of a sweep with the config Hydra composed, in the folder Hydra made."""
    from hydra.core.hydra_config import HydraConfig

    from rlft import runfolder
    from rlft.sweep import is_finished

    plain = configs.plain(composed)
    folder = Path(os.path.relpath(HydraConfig.get().runtime.output_dir))
    if runfolder.config_file(folder).exists():
        runfolder.check_same_config(folder, plain)
        if is_finished(folder, plain["steps"]):
            print(f"job {HydraConfig.get().job.num} is finished already: {folder}")
            return
        plain["resume"] = str(folder)
    try:
        _train(plain, folder)
    except (UserError, KeyboardInterrupt):
        with suppress(OSError):  # nothing is left of a job that was refused or stopped before it began
            for place in (folder, *list(folder.parents)[:2]):
                place.rmdir()
        raise


_engines: Any = None


def _train(plain: dict[str, Any], folder: Path) -> None:
    """Trains to the end, or to an interruption (KeyboardInterrupt, after saving)."""
    import dataclasses

    _import_libraries()
    from rlft import check, runfolder
    from rlft.engine import Engines
    from rlft.plan import make_plan
    from rlft.session import open_session
    from rlft.sweep import is_finished
    from rlft.train import train as loop

    plan = make_plan(plain)
    check.check_writable(folder)
    if plan.config.resume is None:
        runfolder.start(folder, plain, plan.fingerprints)
    else:
        runfolder.check_resume(folder, plain, plan.fingerprints)
        if is_finished(folder, plan.config.steps):
            raise UserError(
                "resume",
                f"the run is finished: it has all its {plan.config.steps} steps",
                got=folder,
                remedy=f"raise steps (rlft resume {folder} steps={2 * plan.config.steps}), or rlft eval run={folder}",
            )
    try:
        with ExitStack() as stack:
            stack.enter_context(runfolder.held(folder))
            runfolder.go_on(folder, plain)
            engines = _engines if _engines is not None else stack.enter_context(Engines())
            session = stack.enter_context(open_session(plan, folder, engines, _say))
            state = loop(session)
            interrupted = session.interrupted and state.step < plan.config.steps
    except KeyboardInterrupt:
        _say(f"stopped at once; go on from the newest checkpoint with: rlft resume {folder}")
        raise
    if interrupted:
        how_far = "saved" if state.step else "before the first one"
        _say(f"stopped after step {state.step}, {how_far}; go on with: rlft resume {folder}")
        raise KeyboardInterrupt
    if "console" in plan.config.logger and _engines is None:
        from rlft.logger.summary import print_summary

        print_summary(folder, _next_commands(folder, dataclasses.asdict(plan.config)))


def _next_commands(folder: Path, config: dict[str, Any]) -> list[tuple[str, str]]:
    rlft_command = _program()
    recipe = f"+recipe={config['name']} " if (catalog.recipe_folder() / f"{config['name']}.yaml").exists() else ""
    lr, steps = config["trainer"]["lr"], config["steps"]
    return [
        ("evaluate with more samples", f"{rlft_command} eval run={folder} eval.num_samples=8"),
        ("train on", f"{rlft_command} resume {folder} steps={2 * steps}"),
        ("sweep", f"{rlft_command} train -m {recipe}trainer.lr={lr:g},{lr / 3:.2g} seed=0,1"),
        ("the main job, on a GPU", f"{rlft_command} train +recipe=grpo_gsm8k"),
    ]


def _program() -> str:
    """How the user can call rlft again from here: `rlft` where it is on PATH, else this environment's command."""
    import shutil

    command = Path(sys.prefix) / "bin" / "rlft"
    return "rlft" if shutil.which("rlft") or not command.exists() else os.path.relpath(command)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _import_libraries() -> None:
    """torch, transformers and all that stands on them: seconds, in which Ctrl-C just ends the process."""
    from rlft.interrupt import ends_the_process

    with ends_the_process():
        import transformers

        import rlft.session

        # transformers imports its parts when they are first asked for.
        _ = rlft.session, transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    from transformers.utils import logging

    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        logging.disable_progress_bar()


# -- sweep -------------------------------------------------------------------------------------------------------------
def _sweep(asked: Arguments) -> int:
    """Every job is checked before the first one trains; afterwards the table, whatever became of them."""
    global _engines
    from rlft import sweep

    jobs = _expand(asked.overrides)
    sweep.check_jobs(jobs)
    _check_jobs(jobs, asked.config_dir)
    from rlft.engine import Engines

    folders: list[Path] = []

    def job(composed: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        hydra_config = HydraConfig.get()
        if not folders:
            folders.append(Path(os.path.relpath(hydra_config.sweep.dir)))
            _say(f"sweep of {len(jobs)} jobs; if it is stopped, repeat it with hydra.sweep.dir={folders[0]}")
        number = hydra_config.job.num
        _say(f"job {number}: {' '.join(jobs[int(number)])}")
        try:
            _job(composed)
        except Exception as error:
            _say(f"job {number} failed: {error}")  # only the first failure of a sweep is raised at its end
            raise

    try:
        with Engines() as _engines:
            _hydra([*asked.options, *asked.overrides], job)
    finally:
        _engines = None
        if folders:
            table = sweep.rows(folders[0], jobs)
            sweep.print_table(table, sweep.write_csv(folders[0], table))
    return 0


def _expand(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job, in Hydra's own order."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise configs.explain(error) or error from None
    return [list(job) for batch in BasicSweeper.split_arguments(parsed, max_batch_size=None) for job in batch]


def _check_jobs(jobs: Sequence[Sequence[str]], config_dir: Path | None) -> None:
    """All that can be refused in any job; files that several jobs have in common are looked at once."""
    _import_libraries()
    from rlft.plan import check_components, make_plan

    scanned: list[Any] = []
    for number, overrides in enumerate(jobs):
        try:
            plain = configs.compose([o for o in overrides if not o.startswith("hydra.")], config_dir)
            check_components(configs.build(plain))
            sections = ("model", "data", "prompts", "generation", "reward", "lora", "snapshot", "critic", "pretrain")
            of_the_files = [plain[key] for key in sections]
            if of_the_files not in scanned:
                make_plan(plain)
                scanned.append(of_the_files)
            _check_repeated(number, overrides, plain)
        except UserError as error:
            problem = f"{error.problem} (job {number}: {' '.join(overrides)})"
            raise UserError(error.key, problem, got=error.got, remedy=error.remedy) from None


def _check_repeated(number: int, overrides: Sequence[str], plain: dict[str, Any]) -> None:
    """A sweep that is repeated in its folder: what a job reached there must not get another job's label."""
    from rlft import runfolder

    for folder in (Path(o.partition("=")[2]) / str(number) for o in overrides if o.startswith("hydra.sweep.dir=")):
        if runfolder.config_file(folder).exists():
            runfolder.check_same_config(folder, plain)


# -- the other verbs -------------------------------------------------------------------------------------------------
def resume(arguments: list[str]) -> int:
    """`rlft resume <run> [key=value ..]`: the run's own config, with changes that do not change the run."""
    from rlft import runfolder

    if arguments and arguments[0] in ("-h", "--help"):
        print(RESUME_USAGE)
        return 0
    if not arguments or not arguments[0].removeprefix("run="):
        raise UserError("resume", "names no run", remedy="write rlft resume runs/<name>/<time>")
    folder = Path(arguments[0].removeprefix("run="))
    asked = _only_overrides(arguments[1:])
    plain = runfolder.read(folder)
    plain.pop(runfolder.ORIGIN, None)
    plain = _override(plain, asked.overrides, asked.config_dir)
    plain["resume"] = str(folder)
    _train(plain, folder)
    return 0


def evaluate(arguments: list[str]) -> int:
    """`rlft eval run=<run or checkpoint>`, or of a model: a table, and a JSONL of every completion."""
    from rlft import evaluation_verb

    if arguments and arguments[0] in ("-h", "--help"):
        print(evaluation_verb.USAGE)
        return 0
    if arguments and not arguments[0].startswith(("-", "+")) and "=" not in arguments[0]:
        arguments = [f"run={arguments[0]}", *arguments[1:]]
    asked = _only_overrides(arguments)
    place = asked.value("run") or asked.value("checkpoint")
    changes = [o for o in asked.overrides if o.partition("=")[0] not in ("run", "checkpoint")]
    if not place and len(changes) < len(asked.overrides):
        raise UserError("run", "is empty", remedy="write run=runs/<name>/<time>")
    if not place and not any(asked.value(key) for key in ("model.path", "recipe")):
        raise UserError(
            "run",
            "is missing: there is nothing to evaluate",
            remedy="give run=<run>, model.path=<model> or +recipe=<name>",
        )
    if not place:
        plain, where = configs.compose(changes, asked.config_dir), None
    else:
        where = evaluation_verb.find(Path(place))
        plain = _override(where.config, changes, asked.config_dir)
    _import_libraries()
    evaluation_verb.run(plain, where, _say)
    return 0


def _only_overrides(arguments: Sequence[str]) -> Arguments:
    """The words of a verb that neither sweeps nor prints the config; its own modules are made importable."""
    asked = parse(arguments)
    if asked.sweep or asked.asks:
        raise UserError(
            "command line", "this verb has no such option", got=asked.options[0], remedy="give it to rlft train"
        )
    _make_importable(asked.config_dir)
    return asked


def _override(plain: dict[str, Any], overrides: Sequence[str], config_dir: Path | None) -> dict[str, Any]:
    """A run's config with `key=value` changes, of keys that are there; `data=<choice>` changes the whole section."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    changed = OmegaConf.create(plain)
    for override in sorted(overrides, key=lambda o: o.partition("=")[0] not in catalog.groups()):
        key = override.partition("=")[0]
        if key in catalog.groups() and key in plain:
            changed[key] = configs.compose([override], config_dir).get(key, {})
        elif OmegaConf.select(changed, key, default=_MISSING) is _MISSING:
            raise configs.unknown_key(key)
        else:
            try:
                OmegaConf.update(changed, key, OverridesParser.create().parse_override(override).value())
            except HydraException as error:
                raise configs.explain(error) or error from None
    return configs.plain(changed)


_MISSING = object()


def recipes(arguments: list[str]) -> int:
    """`rlft recipes`: names with the first comment line of their YAML."""
    if arguments and arguments[0] not in ("-h", "--help"):
        raise UserError("recipes", "takes no more words", got=arguments[0], remedy="write rlft recipes")
    names = catalog.choices("recipe")
    for name in names:
        print(f"{name:<{max(map(len, names))}}  {catalog.first_comment(catalog.recipe_folder() / f'{name}.yaml')}")
    print("\nrlft train +recipe=<name>")
    return 0


if __name__ == "__main__":
    main()
