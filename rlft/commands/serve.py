"""`rlft serve`: serves a checkpoint, or a bare model, through an API like those of OpenAI and vLLM.

The main thread samples; another thread receives requests. A signal ends both.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import yaml

from rlft.commands import chat
from rlft.commands.launch import import_libraries
from rlft.commands.policy import base_of, check_ends, names_a_model, open_roles, policy_of, sampled_by
from rlft.config import catalog
from rlft.config.bounds import Port, PositiveFloat, PositiveInt
from rlft.config.instantiate import from_mapping
from rlft.config.overrides import parse_overrides
from rlft.config.resolved import Resolved
from rlft.config.suggest import OWN_KEYS
from rlft.environment.endpoint.app import bound, check_installed
from rlft.runs.find import NamedRun, with_named_runs
from rlft.system.terminal import Say, say
from rlft.types import Mistakes, UserError, require

if TYPE_CHECKING:
    import socket

    from rlft.environment.endpoint.service import Inbox, Service

SECTION = "serve"

MIN_TOKEN_CHARACTERS = 8  # the least number of characters of a typed token: shorter ones are quickly guessed
WAIT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The keys of configs/base/serve.yaml, which has their meanings and defaults."""

    host: str
    port: Port
    token: str | None
    name: str | None
    syntax: Literal["template", "json", "xml"]
    body_bytes: PositiveInt
    requests: PositiveInt
    timeout: PositiveFloat

    def __post_init__(self) -> None:
        token = self.token
        if token is not None and (len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable()):
            remedy = f"give {MIN_TOKEN_CHARACTERS} letters, digits and signs or more, or leave it out for a random one"
            raise UserError("serve.token", "is too short, or cannot stand in a header", got="***", remedy=remedy)


def read_config(words: list[str]) -> ServeConfig:
    """The keys from words such as serve.port=8001, with the defaults of configs/base/serve.yaml."""
    values = yaml.safe_load((catalog.config_folder() / "base" / "serve.yaml").read_text())[SECTION]
    for override in parse_overrides(words, "train"):
        values[override.key_or_group.partition(".")[2]] = override.value()
    return from_mapping(ServeConfig, values, SECTION)


def check_environment(word: str) -> None:
    """Refuses a key of an environment."""
    key, _, value = word.lstrip("+~").partition("=")
    problem = "is not read by rlft serve, whose clients bring their own environment"
    remedy = f"leave it out; the keys of this command begin with {SECTION}."
    require(key.partition(".")[0] != "environment", key, problem, got=value, remedy=remedy)


def command(arguments: list[str]) -> None:
    own = [*OWN_KEYS[SECTION], *(f"{SECTION}.{field.name}" for field in fields(ServeConfig))]
    mistakes, words = Mistakes(), []
    for word in arguments:
        with mistakes:
            check_environment(word)
            words.append(word)
    with mistakes.joined():
        parsed, source, plain = sampled_by(words, own, else_latest=False)
    mistakes.refuse()
    remedy = "give run=<run>, such as run=latest, or model.path=<model> or +recipe=<name>"
    require(source or names_a_model(parsed), "run", "is missing: there is no model to serve", remedy=remedy)
    keys = read_config([word for word in parsed.own if word.startswith(f"{SECTION}.")])
    resolved = read(with_named_runs(plain))
    check_installed(SECTION)
    with bound(keys.host, keys.port, SECTION) as listening:
        doing = f"rlft serve: {source.run if source else resolved.config.model.path}"
        import_libraries(doing, base_of(resolved.plain, source))
        with opened(resolved, source, keys, listening, say) as (service, inbox):
            while True:
                service.answer(inbox.take(wait_s=WAIT_S), lambda error: say(f"the engine has failed: {error}"))


def read(plain: Mapping[str, Any]) -> Resolved:
    """Reads the config; clients bring their own environment, and their messages are always the chat template's."""
    resolved = chat.read({**plain, "environment": None}, raw=True)
    prompts = replace(resolved.config.prompts, style="chat")
    return replace(resolved, config=replace(resolved.config, prompts=prompts))


@contextlib.contextmanager
def opened(
    resolved: Resolved, source: NamedRun | None, keys: ServeConfig, listening: socket.socket, say: Say
) -> Iterator[tuple[Service, Inbox]]:
    """Opens the engine with the policy of the run, or the config's model if `source` is None, and the server."""
    from rlft.environment.endpoint.app import Limits, Server, make_app
    from rlft.environment.endpoint.service import Inbox, Service, Speech
    from rlft.loop.parts import Engines, engine_args
    from rlft.model.backbone import read_config
    from rlft.plan.model_rules import check_adapted, choose_engine, settle_engine
    from rlft.system.memory import Doing, explained

    policy = policy_of(resolved, source, say)
    config, lora = policy.config, policy.lora
    name = keys.name or ("base" if source is None else str(resolved.plain["name"]))
    vocabulary = check_ends(config, say)
    engine, _ = choose_engine(config.generation, config.model, lora, whole=lora is None)
    if lora is not None:
        check_adapted(config.generation.named(engine), lora, config.model, read_config(config.model))
    config = replace(config, generation=settle_engine(config.generation, engine, lora, config.model))
    most_tokens = config.prompts.max_tokens + config.generation.max_tokens
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(Engines())
        with explained(Doing(), config):
            roles = open_roles(policy)
            stack.callback(roles.close)
            args = engine_args(config, lora, roles)
            generator = stack.enter_context(engines.opened(config.generation.named(engine), args))
        generator.load(roles.publish(policy.step))
        service = Service(
            generator,
            Speech(args.tokenizer, keys.syntax, f"{SECTION}.syntax"),
            config.generation.sampling,
            model=name,
            most_tokens=most_tokens,
            vocabulary=vocabulary,
            seed=config.seed,
            ends=args.ends.ids,
        )
        token = keys.token or secrets.token_urlsafe(24)
        inbox = Inbox()
        limits = Limits(body_bytes=keys.body_bytes, requests=keys.requests, timeout=keys.timeout, section=SECTION)
        app = make_app(inbox, {token}, limits, model=name, most_tokens=most_tokens, completes=True)
        server = Server(app, listening)
        stack.callback(server.close)
        stack.callback(inbox.close)
        say(f"{policy.title}, as model {name} with {engine}, at most {most_tokens} tokens; Ctrl-C ends it")
        say(f"OPENAI_BASE_URL={server.address}/v1" + (f" OPENAI_API_KEY={token}" if keys.token is None else ""))
        yield service, inbox
