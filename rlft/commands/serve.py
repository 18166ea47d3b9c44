"""`rlft serve`: serves a checkpoint, or a bare model, through an API like those of OpenAI and vLLM.

The main thread samples; another thread receives requests. A signal ends both.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import yaml

from rlft.commands import chat
from rlft.commands.arguments import check_names_a_model, of_a_run
from rlft.commands.eval import changed_to_sample
from rlft.commands.launch import import_libraries
from rlft.config import catalog
from rlft.config import compose as configs
from rlft.config.bounds import Port, PositiveFloat, PositiveInt
from rlft.config.instantiate import from_mapping
from rlft.config.resolved import build
from rlft.environment.endpoint.app import bound, check_installed
from rlft.runs.find import NamedRun, find_checkpoint, with_named_runs
from rlft.system.terminal import say
from rlft.types import UserError

if TYPE_CHECKING:
    import socket

    from rlft.environment.endpoint.service import Inbox, Service

SECTION = "serve"
USAGE = """\
usage: rlft serve run=<run or checkpoint folder> [serve.port=8000] [<key>=<value>] ...
       rlft serve model.path=<model> [serve.port=8000] [<key>=<value>] ...

Answers requests of any client of OpenAI's API, and of vLLM's with tokens, until Ctrl-C: /v1/models,
/v1/chat/completions, /inference/v1/generate, /tokenize. Listens on this machine alone, and asks for a key, unless told
otherwise; serve.<key> are described in docs/serve.md.
  rlft serve run=runs/grpo_arithmetic/<time>
  rlft serve run=latest serve.port=8001 serve.token=secret generation.temperature=0
  rlft serve model.path=embedded:tiny-arithmetic"""

MIN_TOKEN_CHARACTERS = 8
"""The least number of characters of a typed token: shorter ones are quickly guessed."""
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
    for override in configs.parse_overrides(words, "train"):
        values[override.key_or_group.partition(".")[2]] = override.value()
    return from_mapping(ServeConfig, values, SECTION)


def check_keys_are_read(words: Sequence[str]) -> None:
    """Refuses a key of `serve` without its section, and a key of an environment."""
    names = {field.name for field in fields(ServeConfig)} - {"name"}  # a run has a name, too
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        if key in names:
            raise UserError(
                key, "there is no such key", got=value or "nothing", remedy=f"did you mean {SECTION}.{key}?"
            )
        if key.partition(".")[0] == "environment":
            problem = "is not read by rlft serve, whose clients bring their own environment"
            raise UserError(
                key, problem, got=value, remedy=f"leave it out; the keys of this verb begin with {SECTION}."
            )


def command(arguments: list[str]) -> None:
    """Serves until a signal ends it."""
    serve_words = [word for word in arguments if word.startswith(f"{SECTION}.")]
    check_keys_are_read(arguments)
    parsed, source, changes = of_a_run([word for word in arguments if word not in serve_words])
    if source is None:
        check_names_a_model(parsed, "there is no model to serve")
    keys = read_config(serve_words)
    if source is None:
        plain = configs.compose(changes, parsed.config_dir)
        build(plain)
    else:
        plain = changed_to_sample(source, changes, parsed.config_dir)
    plain = {**plain, "environment": None}  # clients bring their own
    chat.check(plain, raw=True)
    check_installed(SECTION)
    with bound(keys.host, keys.port, SECTION) as listening:
        import_libraries()
        with opened(with_named_runs(plain), source, keys, listening, say) as (service, inbox):
            serve(service, inbox, say)


def serve(service: Service, inbox: Inbox, say: Callable[[str], None]) -> None:
    """Answers requests until a signal interrupts it."""
    while True:
        service.answer(inbox.take(wait_s=WAIT_S), lambda error: say(f"the engine has failed: {error}"))


@contextlib.contextmanager
def opened(
    plain: Mapping[str, Any],
    source: NamedRun | None,
    keys: ServeConfig,
    listening: socket.socket,
    say: Callable[[str], None],
) -> Iterator[tuple[Service, Inbox]]:
    """Opens the engine with the policy of the run, or the config's model if `source` is None, and the server."""
    from rlft.environment.endpoint.app import Limits, Server, make_app
    from rlft.environment.endpoint.service import Inbox, Service
    from rlft.environment.endpoint.speech import Speech
    from rlft.generation.stops import check_stops
    from rlft.loop.engines import Engines, engine_args
    from rlft.model.backbone import ends_of, load_backbone, load_tokenizer, read_config
    from rlft.plan.model_rules import check_adapted, choose_engine
    from rlft.runs import checkpoint
    from rlft.system.memory import Doing, explained

    saved, name, title = None, keys.name or "base", str(plain["model"]["path"])
    if source is None:
        settings = chat.read_settings(plain, raw=True)
    else:
        folder = find_checkpoint(source, say)
        settings = chat.settings_of(plain, folder, raw=True)
        saved = checkpoint.load(folder) if settings.lora is not None else None
        name, title = keys.name or str(plain["name"]), f"{source.run}, {folder.name}"
    vocabulary = read_config(settings.model).get_text_config().vocab_size
    tokenizer = load_tokenizer(settings.model)
    ends = ends_of(settings.model, "chat", tokenizer)
    check_stops(settings.generation, tokenizer, vocabulary, ends.ids)
    for note in ends.notes:
        say(f"note: {note}")
    engine, _ = choose_engine(settings.generation, settings.model, settings.lora, whole=settings.lora is None)
    if settings.lora is not None:
        check_adapted(settings.generation.named(engine), settings.lora, settings.model, read_config(settings.model))
    most_tokens = settings.prompts.max_tokens + settings.generation.max_tokens
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(Engines())
        with explained(Doing(), settings):
            backbone = load_backbone(settings.model)
            roles = chat.open_roles(settings, backbone)
            stack.callback(roles.close)
            # The messages of requests are always the chat template's.
            in_chat = replace(settings, prompts=replace(settings.prompts, style="chat"))
            args = engine_args(in_chat, settings.lora, roles)
            generator = stack.enter_context(engines.opened(settings.generation.named(engine), args))
        if saved is not None:
            roles.restore(saved.adapters)
        generator.load(roles.publish(0 if saved is None else saved.step))
        service = Service(
            generator,
            Speech(backbone.tokenizer, keys.syntax, f"{SECTION}.syntax"),
            settings.generation.sampling,
            model=name,
            most_tokens=most_tokens,
            vocabulary=vocabulary,
            seed=settings.seed,
            ends=args.ends.ids,
        )
        token = keys.token or secrets.token_urlsafe(24)
        inbox = Inbox()
        limits = Limits(body_bytes=keys.body_bytes, requests=keys.requests, timeout=keys.timeout, section=SECTION)
        app = make_app(inbox, {token}, limits, model=name, most_tokens=most_tokens)
        server = Server(app, listening)
        stack.callback(server.close)
        stack.callback(inbox.close)
        say(f"{title}, as model {name} with {engine}, at most {most_tokens} tokens; Ctrl-C ends it")
        say(f"OPENAI_BASE_URL={server.address}/v1" + (f" OPENAI_API_KEY={token}" if keys.token is None else ""))
        yield service, inbox
