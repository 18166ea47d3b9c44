"""What plans find out about the embedded task and models, found out once in a process, by all that it depends on.

Other tasks, models and tokenizers are read each time. Nothing here changes what a test computes.
"""

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

from rlft.config.model import EMBEDDED
from rlft.config.suggest import ASSETS
from rlft.data import prompts as data_prompts
from rlft.data.arithmetic import Arithmetic
from rlft.data.demonstrations import JsonlDemonstrations
from rlft.data.preferences import JsonlPreferences
from rlft.data.records import Stored
from rlft.model import network_files
from rlft.plan import identity, sizes, supervised_plan
from rlft.plan.rewards import references, tester

MANY, SMALL = 100, 1000
"""Only so many prompts at once, of a tokenizer with fewer tokens: fewer may be those of a test of these functions."""
PURE = ("rlft.reward.exact_match.ExactMatch", "rlft.reward.format.Format")
"""Rewards whose scores depend on their keys and the texts alone."""


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Puts functions that look first at what they gave before in the place of these."""
    for owner, name, key in (
        (network_files, "_read_without_numbers", of_an_embedded_network),
        (identity, "of_source", of_an_embedded_source),
        (sizes, "sizes_of", of_embedded_sizes),
        (Arithmetic, "load", lambda task, split: (repr(task), split)),
        (JsonlDemonstrations, "load", of_embedded_data),
        (JsonlPreferences, "load", of_embedded_data),
        (sizes, "scan", of_a_scan),
        (supervised_plan, "scan_demonstrations", of_a_scan),
        (supervised_plan, "scan_rankings", of_a_scan),
        (data_prompts, "_tokenise", of_tokens),
        (references, "_scored", of_scores),
        (tester, "try_rewards", of_trials),
        (tester, "paid_for", of_trials),
    ):
        put(owner, name, once(getattr(owner, name), key))


def once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which gives a shallow copy of what it gave before for the same key; a key of None is not kept."""
    found: dict[Any, Any] = {}

    @wraps(function)
    def cached(*args: Any) -> Any:
        if (known := key(*args)) is None:
            return function(*args)
        if known not in found:
            found[known] = args, function(*args)  # a key may hold addresses, which stay those of the arguments
        return copy.copy(found[known][1])

    return cached


def of_an_embedded_network(network: Any, tensors: Any, renamings: Any) -> Any:
    contents = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
    known = of_an_embedded_source(network.source, network.config, network.loader, renamings)
    return known and (contents, known)


def of_an_embedded_source(source: Any, config: Any, *settings: Any) -> Any:
    if not str(source["pretrained_model_name_or_path"]).startswith(str(ASSETS)):  # files that no test changes
        return None
    return repr((source, settings)), config.to_json_string(use_diff=False)


def of_embedded_sizes(settings: Any, lora: Any) -> Any:
    if not settings.path.startswith(EMBEDDED):
        return None
    kernels = sizes.decide(settings.kernels, "qwen2")  # which follow from the versions and the machine
    return repr((settings, lora, sizes.resolve_device(settings.device), kernels))


def of_embedded_data(data: Any, split: Any) -> Any:
    return (repr(data), split) if data.path.startswith(EMBEDDED) and data.held_out_path is None else None


def of_a_scan(prompts: Any, tokenizer: Any, *settings: Any) -> Any:
    if isinstance(prompts, Stored):  # made anew at each look, so that their addresses say nothing
        return None
    return of_prompts(tuple(map(id, prompts)), tokenizer, repr(settings))


def of_tokens(prompts: Any, tokenizer: Any, style: str, shown: Any) -> Any:
    contents = tuple(tuple((m["role"], m["content"]) for m in prompt.messages) for prompt in prompts)
    return of_prompts(contents, tokenizer, repr((style, shown)))


def of_scores(judge: Any, prompts: Any, limit_s: float, title: str) -> Any:
    contents = tuple((prompt.tail, prompt.answer, prompt.token_ids) for prompt in prompts)
    writer = judge.writer
    return of_prompts(
        contents, writer.tokenizer, repr((judge.reward, writer.sampling, writer.ends, judge.each_s, limit_s))
    )


def of_trials(config: Any, rewards: Any, prompts: Any, writer: tester.Writer) -> Any:
    if not all(spec.target in PURE for spec in rewards.values()):
        return None
    contents = tuple((prompt.messages, prompt.tail, prompt.answer, prompt.metadata) for prompt in prompts)
    keys = config.scoring, config.allows_unscorable, getattr(config, "environment", None)
    return what_writes(writer.tokenizer), repr((rewards, contents, writer.sampling, writer.ends, keys))


def of_prompts(contents: tuple[Any, ...], tokenizer: Any, settings: str) -> Any:
    if len(contents) < MANY or len(tokenizer) >= SMALL or " at 0x" in settings:  # an address says nothing of an object
        return None
    return what_writes(tokenizer), settings, contents


def what_writes(tokenizer: Any) -> tuple[str, str]:
    of_run = tokenizer.date, tokenizer.variables, tokenizer.ends, tokenizer.special_tokens_map, tokenizer.chat_template
    return tokenizer.backend_tokenizer.to_str(), repr(of_run)
