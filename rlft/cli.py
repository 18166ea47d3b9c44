"""The command line: verbs, exit codes, and the only place that knows Hydra's main.

Exit codes: 0 done, 1 the run stopped by itself (the message says why), 2 a mistake the user can mend, 130 interrupted.
Nothing heavy is imported before it is needed: `rlft --help` and `rlft train --help` import no torch.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import rlft
from rlft import config as configs
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


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code and prints its errors."""
    verbs: dict[str, Callable[[list[str]], int]] = {"train": train, "resume": resume, "eval": evaluate, "recipes": recipes}
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
            raise UserError("rlft", "there is no such verb", got=verb, remedy=remedy)
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
    sweep = any(a in ("-m", "--multirun") for a in arguments)
    asks = any(a in ("-h", "--help", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version") for a in arguments)
    overrides = [a for a in arguments if not a.startswith("-") and "=" in a]
    _check_resume_argument(overrides)
    if not sweep or asks:
        _hydra(arguments, _job)
        return 0
    return _sweep(arguments)


def _hydra(arguments: Sequence[str], job: Callable[[Any], None]) -> None:
    import hydra

    configs.register_resolvers()
    sys.argv = ["rlft train", *arguments]
    folder = str(configs.config_folder().resolve())
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
        told = _explain(error)
        if told is None:
            raise
        raise told from None
    if failures:
        raise failures[0]


def _explain(error: BaseException) -> UserError | None:
    """Hydra's errors about the command line, in our words; None for anything else."""
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, MissingConfigException) and (match := re.search(r"[Cc]ould not (?:find|load) '([^']+)'", str(error))):
        group, _, name = match[1].rpartition("/")
        choices = configs.choices(group)
        close = difflib.get_close_matches(name, choices, n=1)
        hint = f"did you mean {close[0]}? All: " if close else "choose one of "
        key = f"+{group}" if group == "recipe" else group
        return UserError(key, "is not one of its choices", got=name, remedy=hint + ", ".join(choices))
    if isinstance(error, OSError) and error.filename is not None:
        problem = f"cannot be written ({error.strerror})"
        return UserError("hydra.run.dir", problem, got=error.filename, remedy="choose another folder")
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    text = str(error)
    if match := re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^'=@]+)", text):
        return _unknown_key(match[1])
    if match := re.search(r"Ambiguous value for argument '([^=]+)=(.*?)'", text):
        remedy = "sweep with rlft train -m, or quote a list as '[a,b]'"
        return UserError(match[1], "has several values but this is no sweep", got=match[2], remedy=remedy)
    if match := re.search(r"Multiple values for (\S+)\.", text):
        return UserError(match[1], "is given twice", remedy="give it once")
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return UserError("command line", f"cannot be understood ({first.strip()})", remedy="see rlft train --help")


def _unknown_key(key: str) -> UserError:
    defaults = configs.compose([])
    from rlft.runfolder import flatten

    groups = [p.name for p in configs.config_folder().iterdir() if p.is_dir()]
    known = [*flatten(defaults), *groups]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    suggestion = f"+{close[0]}" if close and close[0] == "recipe" else close[0] if close else None
    remedy = f"did you mean {suggestion}?" if suggestion else "see rlft train --cfg job for every key"
    return UserError(key, "there is no such key", remedy=remedy)


def _check_resume_argument(overrides: Sequence[str]) -> None:
    """Before Hydra makes a folder of it: resume=<run> must name a run."""
    given = dict(o.split("=", 1) for o in overrides)
    resumed = given.get("resume", "null")
    if resumed == "null":
        return
    from rlft import runfolder

    runfolder.read(Path(resumed))
    if "hydra.run.dir" in given and Path(given["hydra.run.dir"]).resolve() != Path(resumed).resolve():
        raise UserError(
            "resume", "a resumed run goes on in its own folder, not in hydra.run.dir", got=resumed, remedy="take hydra.run.dir out"
        )


def _job(composed: Any) -> None:
    """One training job with the config Hydra composed, in the folder Hydra made."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from rlft import runfolder
    from rlft.sweep import is_finished

    plain = configs.plain(composed)
    folder = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN and runfolder.config_file(folder).exists():
        runfolder.check_same_config(folder, plain)
        if is_finished(folder, plain["steps"]):
            print(f"job {HydraConfig.get().job.num} is finished already: {folder}")
            return
        plain["resume"] = str(folder)
    if plain.get("resume") is None:
        folder = Path(os.path.relpath(folder))
    else:
        folder = Path(plain["resume"])
    try:
        _train(plain, folder)
    except (UserError, KeyboardInterrupt):
        # Hydra made the folder before anything was checked; a refusal leaves nothing behind.
        with suppress(OSError):
            for place in (folder, *list(folder.parents)[:2]):
                place.rmdir()
        raise


_engines: Any = None


def _train(plain: dict[str, Any], folder: Path) -> None:
    """Trains to the end, or to an interruption (KeyboardInterrupt, after saving)."""
    import dataclasses

    from rlft import check, runfolder
    from rlft.engine import Engines
    from rlft.session import make_plan, open_session
    from rlft.sweep import is_finished
    from rlft.train import train as loop

    _quiet_transformers()
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
                remedy=f"raise steps to go on (rlft resume {folder} steps={2 * plan.config.steps}), or rlft eval run={folder}",
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
        _say(f"stopped after step {state.step}, {'saved' if state.step else 'before the first one'}; go on with: rlft resume {folder}")
        raise KeyboardInterrupt
    if "console" in plan.config.logger and _engines is None:
        from rlft.logger.summary import print_summary

        print_summary(folder, _next_commands(folder, dataclasses.asdict(plan.config)))


def _next_commands(folder: Path, config: dict[str, Any]) -> list[tuple[str, str]]:
    recipe = f"+recipe={config['name']} " if (configs.recipe_folder() / f"{config['name']}.yaml").exists() else ""
    lr, steps = config["trainer"]["lr"], config["steps"]
    return [
        ("evaluate with more samples", f"rlft eval run={folder} eval.num_samples=8"),
        ("train on", f"rlft resume {folder} steps={2 * steps}"),
        ("sweep", f"rlft train -m {recipe}trainer.lr={lr:g},{lr / 3:.2g} seed=0,1"),
        ("the main job, on a GPU", "rlft train +recipe=grpo_gsm8k"),
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _quiet_transformers() -> None:
    from transformers.utils import logging

    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        logging.disable_progress_bar()


# -- sweep -------------------------------------------------------------------------------------------------------------
def _sweep(arguments: list[str]) -> int:
    """Every job is checked before the first one trains; afterwards the table, whatever became of them."""
    global _engines
    from rlft import sweep
    from rlft.engine import Engines

    jobs = _expand(arguments)
    sweep.check_jobs(jobs)
    config_dir = _config_dir(arguments)
    for number, overrides in enumerate(jobs):
        try:
            _check_job(number, overrides, config_dir)
        except UserError as error:
            raise UserError(error.key, f"{error.problem} (job {number}: {' '.join(overrides)})", got=error.got, remedy=error.remedy) from None
    folders: list[Path] = []

    def job(composed: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        hydra_config = HydraConfig.get()
        if not folders:
            folders.append(Path(os.path.relpath(hydra_config.sweep.dir)))
            _say(f"sweep of {len(jobs)} jobs in {folders[0]}; if it is stopped, repeat it with hydra.sweep.dir={folders[0]}")
        number = hydra_config.job.num
        _say(f"job {number}: {' '.join(jobs[int(number)])}")
        try:
            _job(composed)
        except Exception as error:
            _say(f"job {number} failed: {error}")  # only the first failure of a sweep is raised at its end
            raise

    try:
        with Engines() as _engines:
            _hydra(arguments, job)
    finally:
        _engines = None
        if folders:
            table = sweep.rows(folders[0], jobs)
            sweep.print_table(table, sweep.write_csv(folders[0], table))
    return 0


def _expand(arguments: Sequence[str]) -> list[list[str]]:
    """The overrides of each job, in Hydra's own order."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    overrides = [a for i, a in enumerate(arguments) if not a.startswith("-") and arguments[i - 1] not in ("--config-dir", "-cd")]
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise _explain(error) or error from None
    return [list(job) for batch in BasicSweeper.split_arguments(parsed, max_batch_size=None) for job in batch]


def _config_dir(arguments: Sequence[str]) -> str | None:
    for i, argument in enumerate(arguments):
        if argument in ("--config-dir", "-cd") and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith("--config-dir="):
            return argument.partition("=")[2]
    return None


def _check_job(number: int, overrides: Sequence[str], config_dir: str | None) -> None:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from rlft import runfolder
    from rlft.session import check_components

    try:
        composed = configs.compose([o for o in overrides if not o.startswith("hydra.")], config_dir)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error) or error from None
    check_components(configs.build(composed))
    for folder in (Path(o.partition("=")[2]) / str(number) for o in overrides if o.startswith("hydra.sweep.dir=")):
        if runfolder.config_file(folder).exists():  # a sweep that is repeated: its results must not get other labels
            runfolder.check_same_config(folder, composed)


# -- the other verbs -----------------------------------------------------------------------------------------------------
def resume(arguments: list[str]) -> int:
    """`rlft resume <run> [key=value ..]`: the run's own config, with changes that do not change the run."""
    from rlft import runfolder

    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: rlft resume <run> [<key>=<value>] ...\n\nGoes on from the newest checkpoint, exactly as if never stopped.")
        return 0 if arguments else 2
    folder = Path(arguments[0].removeprefix("run="))
    plain = runfolder.read(folder)
    plain.pop(runfolder.ORIGIN, None)
    plain = _override(plain, arguments[1:])
    plain["resume"] = str(folder)
    _train(plain, folder)
    return 0


def _override(plain: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The plain config with `key=value` changes; only keys that are there."""
    from omegaconf import OmegaConf

    changed = OmegaConf.create(plain)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError("command line", "must be <key>=<value>", got=override, remedy="for instance steps=200")
        if OmegaConf.select(changed, key, default=_MISSING) is _MISSING:
            raise _unknown_key(key)
        OmegaConf.update(changed, key, OmegaConf.create(f"v: {value}").v)
    return configs.plain(changed)


_MISSING = object()


def evaluate(arguments: list[str]) -> int:
    """`rlft eval run=<run or checkpoint>` or `rlft eval model.path=<model>`: a table and a JSONL of every completion."""
    from rlft import evaluation_verb

    if arguments and arguments[0] in ("-h", "--help"):
        print(evaluation_verb.USAGE)
        return 0
    given = dict(a.split("=", 1) for a in arguments if "=" in a)
    if bad := [a for a in arguments if "=" not in a]:
        raise UserError("command line", "must be <key>=<value>", got=bad[0], remedy=f"for instance run={bad[0]}")
    place = given.pop("run", None) or given.pop("checkpoint", None)
    changes = [f"{key}={value}" for key, value in given.items()]
    if place is None:
        from hydra.errors import HydraException

        try:
            plain, where = configs.compose(changes), None
        except HydraException as error:
            raise _explain(error) or error from None
    else:
        where = evaluation_verb.find(Path(place))
        plain = _override(where.config, changes)
    _quiet_transformers()
    evaluation_verb.run(plain, where)
    return 0


def recipes(arguments: list[str]) -> int:
    """`rlft recipes`: names with the first comment line of their YAML."""
    files = sorted(configs.recipe_folder().glob("*.yaml"))
    width = max(len(f.stem) for f in files)
    for file in files:
        comments = (line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#"))
        first = next((line for line in comments if not line.startswith("@")), "")
        print(f"{file.stem:<{width}}  {first}")
    print("\nrlft train +recipe=<name>")
    return 0


if __name__ == "__main__":
    main()
