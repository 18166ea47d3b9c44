"""Makes the fingerprints of a model's parts, which runs/fingerprints.py names and compares."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.config.model import TOKENIZER_FILES
from rlft.model.stored_weights import digest_of_weights
from rlft.runs.fingerprints import BASE, COMMIT, PARTS, SUFFIX, WEIGHTS, name_of
from rlft.system import digests
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.config.model import ModelConfig

IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


def fingerprints(config: ModelConfig, what: str = BASE, key: str = "model.path") -> dict[str, str]:
    """{key of a fingerprint: its value} of the parts of a causal language model, and of what older rlft recorded."""
    from rlft.model.backbone import fingerprint, read_config, source

    older = {f"{what}{SUFFIX}": fingerprint(config)}
    return older | of_source(source(config), read_config(config), what, key)


def of_source(source: Mapping[str, Any], config: Any, what: str, key: str) -> dict[str, str]:
    """{key of a fingerprint: its value} of the parts of the model that transformers loads with these arguments.

    `config` is as transformers reads it; a UserError about weights that cannot be read names `key`.
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
    own = " ".join(map(str, configured_ids(generation_ends(source))))
    taken = own or " ".join(map(str, configured_ids(getattr(config.get_text_config(), "eos_token_id", None))))
    ends = f"{taken}/{own or 'none'}"
    parts: dict[str, str | None] = {"config": f"{_of_files(folder, 'config.json')}/{_short(fields)}", "ends": ends}
    with contextlib.suppress(ImportError, OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(**source)
        parts["tokenizer"] = f"{_of_files(folder, *TOKENIZER_FILES)}/{_contents(tokenizer)}"
        parts["template"] = _short(tokenizer.chat_template)
    return parts


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
