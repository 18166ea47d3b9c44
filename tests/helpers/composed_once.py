"""rlft's YAML read and merged once in a process, where Hydra does it anew for every config that it composes.

A config's files depend only on the choices in groups: what is typed of single keys comes afterwards, from Hydra itself.
Folders and files of a test's own may change between two configs; nothing of them is kept. What is kept is pickled,
which makes a copy in a fifth of `copy.deepcopy`'s time.
"""

import pickle
from pathlib import Path
from typing import IO, Any

import yaml
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list
from omegaconf import OmegaConf

from rlft.config import catalog

_parse, _merge, _read = OmegaConf.load, ConfigLoaderImpl._compose_config_from_defaults_list, yaml.safe_load
_parsed: dict[str, bytes] = {}
_content: dict[str, bytes] = {}
_chosen: dict[Any, DefaultsList] = {}
_merged: dict[Any, bytes] = {}
_OURS = catalog.config_folder().resolve()


def install() -> None:
    """Puts this in the place of Hydra's own, for the life of the process."""
    yaml.safe_load = content_of
    OmegaConf.load = load
    config_loader_impl.create_defaults_list = chosen_files
    ConfigLoaderImpl._compose_config_from_defaults_list = merged_files


def content_of(stream: Any) -> Any:
    """As `yaml.safe_load`: of a text a copy of what the same text gave before."""
    if not isinstance(stream, str):
        return _read(stream)
    if stream not in _content:
        _content[stream] = pickle.dumps(_read(stream))
    return pickle.loads(_content[stream])


def load(file: str | Path | IO[Any]) -> Any:
    """As `OmegaConf.load`: of an open text file a copy of what the same text gave before."""
    if isinstance(file, str | Path):
        return _parse(file)
    text = file.read()
    file.seek(0)
    if text not in _parsed:
        _parsed[text] = pickle.dumps(_parse(file))
    return pickle.loads(_parsed[text])


def chosen_files(
    repo: Any, config_name: str | None, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
) -> DefaultsList:
    """As Hydra's `create_defaults_list`: once for the same choices in groups."""
    rest = config_name, overrides_list, prepend_hydra, skip_missing
    if (folders := _folders(repo)) is None or any("file:" in o.input_line for o in overrides_list):
        return create_defaults_list(repo, *rest)
    keys = Overrides(repo=repo, overrides_list=overrides_list).config_overrides
    groups = [o.input_line for o in overrides_list if not o.is_sweep_override() and not any(o is key for key in keys)]
    known = folders, config_name, tuple(groups), prepend_hydra, skip_missing
    if known not in _chosen:
        _chosen[known] = create_defaults_list(repo, *rest)
    found = _chosen[known]
    return DefaultsList(
        defaults=found.defaults,
        defaults_tree=found.defaults_tree,
        config_overrides=keys,
        overrides=found.overrides,
    )


def merged_files(loader: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
    """As the loader's own method: a copy of what the same files gave before."""
    if (folders := _folders(repo)) is None or any("/file:" in str(d.config_path) for d in defaults):
        return _merge(loader, defaults, repo)
    requires = tuple(getattr(source, "requires_keys", None) for source in repo.get_sources())
    known = folders, requires, tuple((d.config_path, d.package, d.parent, d.is_self, d.primary) for d in defaults)
    if known not in _merged:
        _merged[known] = pickle.dumps(_merge(loader, defaults, repo))
    return pickle.loads(_merged[known])


def _folders(repo: Any) -> tuple[str, ...] | None:
    """Where this config's files are looked for; None if a folder is not rlft's own."""
    sources = [(source.scheme(), source.path) for source in repo.get_sources()]
    if all(scheme != "file" or Path(path).resolve().is_relative_to(_OURS) for scheme, path in sources):
        return tuple(f"{scheme}:{path}" for scheme, path in sources)
    return None
