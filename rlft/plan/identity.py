"""Makes the fingerprints of a model's parts, which runs/fingerprints.py names and compares.

That of the weights is a digest by tensor, so that shards do not count. Weights of up to 512 MiB are read whole; of
more, each tensor's first and last 16 KiB and blocks between them, 4096 in all and at least 2 of a tensor: training
changes every block; an edit of single numbers between them is not seen. Of a safetensors file the header has names,
dtypes, shapes and places. A pytorch_model.bin is a zip archive, whose pickle is compared as bytes and never loaded: the
same numbers in other shards of this form, or in both forms, count as others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.config.model import TOKENIZER_FILES, WEIGHT_FILES
from rlft.runs.fingerprints import BASE, COMMIT, PARTS, SUFFIX, WEIGHTS, name_of
from rlft.system.files import digest_of_bytes, digest_of_file, digest_of_json
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
    from rlft.tokens.text import configured_ids

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
    return _short({str(file.relative_to(folder)): digest_of_file(file) for file in files})


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
    return digest_of_json(value)[:16]


# -- weights -----------------------------------------------------------------------------------------------------------
WHOLE = 2**29  # weights of up to so many bytes are read whole, at about 1 GB/s
BLOCK = 2**14
BLOCKS = 4096  # blocks that are read of larger weights
LOCAL_HEADER = 30  # bytes of a zip entry's header before its name


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of one tensor. label: what they are, wherever they lie."""

    label: str
    file: Path
    start: int
    length: int


def digest_of_weights(folder: Path, named: str | None = None) -> str | None:
    """16 hex digits for the weights in this folder; None if they are not all there.

    `named` is the file that config.json names as `transformers_weights`. OSError or ValueError: a file is unreadable.
    """
    files = files_of_weights(folder, named)
    if files is None:
        return None
    pieces = [piece for file in files for piece in pieces_of(file)]
    is_whole = sum(piece.length for piece in pieces) <= WHOLE
    blocks = None if is_whole else max(2, BLOCKS // len(pieces))
    return digest_of_json(sorted([piece.label, piece.length, _content(piece, blocks)] for piece in pieces))[:16]


def files_of_weights(folder: Path, named: str | None = None) -> list[Path] | None:
    """The files that transformers loads, which takes the first form that is there; None if one of them is missing."""
    first = next((folder / name for name in (named, *WEIGHT_FILES) if name and (folder / name).is_file()), None)
    if first is None:
        return None
    files = [first]
    if first.name.endswith(".index.json"):
        files = [folder / name for name in sorted(set(json.loads(first.read_text())["weight_map"].values()))]
    return files if all(file.is_file() for file in files) else None


def pieces_of(file: Path) -> list[Piece]:
    if file.suffix == ".safetensors":
        return list(_tensors(file))
    if zipfile.is_zipfile(file):
        return list(_entries(file))
    return [Piece(file.suffix, file, 0, file.stat().st_size)]  # such as what torch wrote before 1.6


def _tensors(file: Path) -> Iterator[Piece]:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > file.stat().st_size:
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(stream.read(size))
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            yield Piece(f"{name} {tensor['dtype']} {tensor['shape']}", file, 8 + size + start, end - start)


def _entries(file: Path) -> Iterator[Piece]:
    """The archive's pickle, and the numbers that it places; without the archive's name, which begins each entry's."""
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        pickled = digest_of_bytes(archive.read(entries["data.pkl"])) if "data.pkl" in entries else ""
        for name, entry in entries.items():
            if name.startswith("data"):  # the others are the version, and a number of this very file
                stream.seek(entry.header_offset)
                header = stream.read(LOCAL_HEADER)
                start = LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                yield Piece(f"{pickled} {name}", file, entry.header_offset + start, entry.compress_size)


def _content(piece: Piece, blocks: int | None) -> str:
    """The digest of the piece, or of as many blocks of it."""
    whole = blocks is None or piece.length <= blocks * BLOCK
    places: Sequence[int] = range(0, piece.length, 2**24) if whole else _spread(piece.length, blocks or 0)
    digest = hashlib.sha256()
    with piece.file.open("rb") as stream:
        for place in places:
            stream.seek(piece.start + place)
            digest.update(stream.read(min(2**24 if whole else BLOCK, piece.length - place)))
    return digest.hexdigest()


def _spread(length: int, blocks: int) -> list[int]:
    return [(length - BLOCK) * i // (blocks - 1) for i in range(blocks)]
