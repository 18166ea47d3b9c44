"""What a model is, as named parts that are recorded by what trains on it and compared by what goes on from that.

    base_weights_fingerprint: 5f0c..          the numbers, in whatever files
    base_config_fingerprint: 12ab../9d3e..    config.json: its bytes / as transformers reads it
    base_tokenizer_fingerprint, base_template_fingerprint, base_ends_fingerprint, ..

A part with two digests is the same if one of them is: bytes stay the same when a library reads them otherwise, and what
a library reads stays the same when a file is written again. Where the hub's cache has not all files of a commit yet, a
part is left out. What was recorded before there were parts has one digest, which `older` makes again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.model.stored_weights import digest_of_weights
from rlft.system import digests
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.config.model import ModelConfig

BASE = "base"
SUFFIX = "_fingerprint"
ALL, WEIGHTS, COMMIT = "files", "weights", "commit"
PARTS = {
    ALL: "files",
    WEIGHTS: "weights",
    "config": "config.json",
    "code": "code",
    "tokenizer": "tokenizer",
    "template": "chat template",
    "ends": "eos_token_id of generation_config.json",
    "images": "preprocessor_config.json",
    COMMIT: "commit on the hub",
}
"""{part: its name in words}."""
OF_SAMPLES = ("template", "ends")
"""Parts on which no adapter's numbers rest: a new run may start from one with others."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "tekken.json",
)  # fmt: skip
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


def name_of(what: str, part: str) -> str:
    """The key of the part's fingerprint.

    >>> name_of("base", "weights")
    'base_weights_fingerprint'
    """
    return f"{what}_{part}{SUFFIX}"


def fingerprints(config: ModelConfig, what: str = BASE, key: str = "model.path") -> dict[str, str]:
    """{key of a fingerprint: its value} of the parts of a causal language model, and of what older rlft recorded."""
    from rlft.model.backbone import fingerprint, read_config, source

    older = {f"{what}{SUFFIX}": fingerprint(config)}
    return older | of_source(source(config), read_config(config), what, key)


def of_source(source: Mapping[str, Any], config: Any, what: str, key: str) -> dict[str, str]:
    """{key of a fingerprint: its value} of the parts of the model that transformers loads with these arguments.

    config: the model's, as transformers reads it.

    Raises:
        UserError: its weights cannot be read; names `key`.
    """
    path, revision = source["pretrained_model_name_or_path"], source.get("revision")
    folder = Path(path) if Path(path).is_dir() else cached_folder(path, revision)
    commit = None if folder is None or Path(path).is_dir() else folder.name
    parts = {**_as_read(source, config, folder), WEIGHTS: None, COMMIT: commit}
    if folder is not None:
        code = sorted(folder.rglob("*.py")) if source["trust_remote_code"] else []
        images = [folder / name for name in IMAGE_FILES if (folder / name).is_file()]
        # The hub's cache has files that were read once: those that were not yet are the same in the same commit.
        parts |= {n: f"{_of_files(folder, *f)}/{commit or ''}" for n, f in (("code", code), ("images", images)) if f}
    try:
        if folder is not None:
            parts[WEIGHTS] = digest_of_weights(folder, getattr(config, "transformers_weights", None))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # of whatever the file holds
        problem = f"its weights cannot be read ({(str(error) or type(error).__name__).splitlines()[0]})"
        raise UserError(key, problem, got=path, remedy="copy or download the model's files again") from None
    return {name_of(what, part): value for part in PARTS if (value := parts.get(part)) is not None}


def cached_folder(repo: str, revision: str | None) -> Path | None:
    """The folder of this revision in the hub's cache, which has the name of its commit; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(file).parent if isinstance(file, str) else None


def _as_read(source: Mapping[str, Any], config: Any, folder: Path | None) -> dict[str, str | None]:
    """The parts that transformers reads; without a tokenizer that cannot be read, which is refused where it is used."""
    from transformers import AutoTokenizer

    from rlft.model.backbone import generation_ends
    from rlft.tokens.ends import configured_ids

    fields = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    # What a run takes (`configured_ends`), then what generation_config.json says; once only the latter was recorded.
    own = " ".join(map(str, configured_ids(generation_ends(source)))) or "none"
    ends = f"{' '.join(map(str, configured_ids(_end_of(config)))) if own == 'none' else own}/{own}"
    parts: dict[str, str | None] = {"config": f"{_of_files(folder, 'config.json')}/{_short(fields)}", "ends": ends}
    with contextlib.suppress(ImportError, OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(**source)
        parts["tokenizer"] = f"{_of_files(folder, *TOKENIZER_FILES)}/{_contents(tokenizer)}"
        parts["template"] = _short(tokenizer.chat_template)
    return parts


def _end_of(config: Any) -> Any:
    return getattr(config.get_text_config(), "eos_token_id", None)


OUTSIDE = (
    "split_special_tokens",
    "clean_up_tokenization_spaces",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
)
"""What transformers does around a tokenizer's own code, to the ids or to the text of them."""


def _contents(tokenizer: Any) -> str:
    """The digest of all that decides a tokenizer's ids; empty where only its files say that, as in Python classes.

    Padding and truncation are set by whoever calls it.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return ""
    fields = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("padding", "truncation")}
    switches = {name: True for name in OUTSIDE if getattr(tokenizer, name, False)}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _short([fields, special, *([switches] if switches else [])])


def _of_files(folder: Path | None, *names: str | Path) -> str:
    """The digest of those of these files that are there; empty without a folder."""
    if folder is None:
        return ""
    files = [folder / name for name in names if (folder / name).is_file()]
    return _short({str(file.relative_to(folder)): digests.of_file(file) for file in files})


def template_in(folder: Path) -> str | None:
    """The fingerprint of the chat template among a folder's files, such as an adapter's; None without one."""
    jinja, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if jinja.is_file():
        return _short(jinja.read_text(encoding="utf-8"))
    try:
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    except ValueError:
        return None
    return _short(template) if isinstance(template, str) else None


def _short(value: Any) -> str:
    return digests.of_json(value)[:16]


# -- comparing ---------------------------------------------------------------------------------------------------------
def models_in(fingerprints: Mapping[str, Any]) -> list[str]:
    """The models of which these are fingerprints, such as `base`, `teacher` or `reward.learned.path`."""
    end = name_of("", "config")
    return [name.removesuffix(end) for name in fingerprints if name.endswith(end)]


def are_of_a_model(name: str, models: list[str]) -> bool:
    """Whether the fingerprint of this key is one of these models', or of a part of one."""
    return any(name in (f"{what}{SUFFIX}", *(name_of(what, part) for part in PARTS)) for what in models)


@dataclass(frozen=True, slots=True)
class Changed:
    """Parts of a model that changed: {part: (its fingerprint before, and now)}; nothing changed if there are none."""

    parts: Mapping[str, tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def then(self) -> str:
        """The parts in words, with their fingerprints before."""
        return ", ".join(f"{PARTS[part]} ({_shown(before)} then)" for part, (before, _) in self.parts.items())

    @property
    def both(self) -> str:
        """The parts in words, with both fingerprints."""
        pairs = self.parts.items()
        return ", ".join(f"{PARTS[part]} ({_shown(before)} then, {_shown(now)} now)" for part, (before, now) in pairs)

    @property
    def now(self) -> str:
        return ", ".join(_shown(now) for _, now in self.parts.values())

    def without(self, parts: Collection[str]) -> Changed:
        return Changed({part: pair for part, pair in self.parts.items() if part not in parts})


def _shown(fingerprint: str) -> str:
    """Of two digests the one that is made of what transformers reads."""
    return fingerprint.strip("/").split("/")[-1][:12]


def described(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> str:
    """The parts that two records have in common, in words."""
    both = [part for part in PARTS if name_of(what, part) in before and name_of(what, part) in now]
    return ", ".join(PARTS[part] for part in both) or PARTS[ALL]


def recorded(state: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprints of the base in a checkpoint's state or an adapter's record."""
    return {name: value for name, value in state.items() if are_of_a_model(name, [BASE])}


def differing(before: Mapping[str, Any], now: Mapping[str, Any], what: str = BASE) -> Changed:
    """The parts of a model that differ between two records; ALL of it where the first is older than parts.

    A commit counts where weights cannot be compared: a later one may hold the same.
    """
    if name_of(what, "config") not in before:
        pairs = {ALL: (before.get(f"{what}{SUFFIX}"), now.get(f"{what}{SUFFIX}"))}
    else:
        pairs = {part: (before.get(name_of(what, part)), now.get(name_of(what, part))) for part in PARTS if part != ALL}
        if None not in pairs[WEIGHTS]:
            del pairs[COMMIT]
    apart = {part: pair for part, pair in pairs.items() if not _same(*pair, or_absent=part != COMMIT)}
    return Changed({part: (before or "none", now or "none") for part, (before, now) in apart.items()})


def _same(before: str | None, now: str | None, *, or_absent: bool) -> bool:
    if before is None or now is None or before == now:
        return or_absent or before == now
    pairs = zip(before.split("/")[::-1], now.split("/")[::-1], strict=False)
    return any(one and one == other for one, other in pairs)
