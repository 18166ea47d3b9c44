"""Prompts from a data set on the Hugging Face hub (through `datasets`), or from local copies of its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rlft.config.bounds import PositiveFraction
from rlft.config.keys import Key
from rlft.config.recipe_file import DATA_SUFFIXES
from rlft.data.files import check_first_rows, files_at, files_of_split, is_data_file, is_saved, tables
from rlft.data.jsonl import hash_split, rows, training
from rlft.data.records import Made, Parse, RecordKeys, RecordRow, RowSource
from rlft.data.tables import ROWS_AT_A_TIME, Record, Table, numbered
from rlft.system.hub import hub_answers
from rlft.types import Split, UserError, require

UNREACHABLE = "the hub cannot be reached and its cache here has no such set"


@dataclass(frozen=True, kw_only=True)
class HubSet(RowSource):
    """The config keys with which a component names the hub set, or the local files in its format, that it reads.

    A path that exists locally, or that looks like a path (starts with / . ~ or ends as a file of data), is local.
    Questions that are in both splits are left out of training.
    """

    __slots__ = ()  # the component defines the slots, as it also inherits the keys of its rows

    path: str
    rows: Annotated[str | None, Key(before=None)]
    subset: str | None
    revision: str | None
    train_split: str
    held_out_split: str | None
    held_out_fraction: PositiveFraction

    def check(self) -> None:
        """Checks that a local path exists, and the first rows in it; a hub id is not looked up. Raises UserError."""
        key = f"{self.section}.path"
        if (path := local_path(self.path, key)) is None:
            return
        if path.is_file() or is_saved(path):
            found = files_at(self.path, key)
        else:
            splits = filter(None, (self.train_split, self.held_out_split))
            found = [file for split in splits for file in files_of_split(path, split, self.subset)]
        check_first_rows(tables(found, key, self.rows), self.parse, key)

    def read(self, split: Split, parse: Parse[Made]) -> Sequence[RecordRow[Made]]:
        """The split's rows, in the order of the set. Raises UserError."""
        key = f"{self.section}.path"
        path = local_path(self.path, key)
        if path is not None and (path.is_file() or is_saved(path)):
            found = tables(files_at(self.path, key), key, self.rows)
            return hash_split(found, parse, split, self.held_out_fraction, path, self.section)
        if self.held_out_split is None:
            found = self._tables(self.train_split, "train_split", path)
            return hash_split(found, parse, split, self.held_out_fraction, self.path, self.section)
        held_out, _ = rows(self._tables(self.held_out_split, "held_out_split", path), parse, key)
        if split is Split.held_out:
            return held_out
        return training(self._tables(self.train_split, "train_split", path), parse, held_out, self.path, key)

    def _tables(self, name: str, named_by: str, folder: Path | None) -> Sequence[Table]:
        """The tables of the split `name`, which the key `named_by` names, in a local folder; None: on the hub."""
        key, name_key = f"{self.section}.path", f"{self.section}.{named_by}"
        if folder is None:
            return [HubTable(self._download(name, name_key), self.path, name, self.rows)]
        files = files_of_split(folder, name, self.subset)
        problem = f"the folder has no files of the split {name}"
        remedy = f"put {self._files()} there (or {', '.join(DATA_SUFFIXES[1:])}), or give one file"
        if named_by == "held_out_split":
            remedy += f"; {name_key}=null holds out a part of the split {self.train_split}"
        require(files, key, problem, got=self.path, remedy=remedy)
        return tables(files, key, self.rows)

    def _download(self, name: str, key: str) -> Any:
        import datasets.config
        from datasets.exceptions import DatasetNotFoundError, DatasetsError

        if not hub_answers():
            datasets.config.HF_HUB_OFFLINE = True  # it uses only its cache, instead of retrying
        online = not datasets.config.HF_HUB_OFFLINE
        try:
            return datasets.load_dataset(self.path, self.subset, split=name, revision=self.revision)
        except DatasetNotFoundError as error:
            problem = "is neither a local path nor a set on the hub that you may read"
            raise self._not_loaded(problem if online else UNREACHABLE) from error
        except (OSError, DatasetsError) as error:
            reached = online and not isinstance(error, ConnectionError)
            raise self._not_loaded(f"cannot be loaded ({error})" if reached else UNREACHABLE) from error
        except ValueError as error:
            # "BuilderConfig 'x' not found. ...", "Config name is missing. ..." or 'Unknown split "x". ...'
            wrong_key, got = (f"{self.section}.subset", self.subset) if "onfig" in str(error) else (key, name)
            problem = f"does not fit the set ({' '.join(str(error).split())[:300]})"
            raise UserError(wrong_key, problem, got=got, remedy="choose another") from error

    def _not_loaded(self, problem: str) -> UserError:
        local = f"{self.section}.path=<folder with {self._files()}, or a file>"
        remedy = f"use local copies: {local}, and for the model model.path=<folder>"
        return UserError(f"{self.section}.path", problem, got=self.path, remedy=remedy)

    def _files(self) -> str:
        return " and ".join(f"{name}.jsonl" for name in (self.train_split, self.held_out_split) if name is not None)


class HubTable(Table):
    """The rows of a split of a hub set, as `datasets` has them on disk: images are not decoded."""

    has_types = True

    def __init__(self, dataset: Any, path: str, split: str, nested: str | None = None) -> None:
        self._dataset, self.name, self.where, self.nested = dataset, split, f"{path}, {split}", nested

    @property
    def num_bytes(self) -> int:
        return self._dataset.data.nbytes

    @property
    def extent(self) -> int:
        return len(self._dataset)

    def records(self) -> Iterator[Record]:
        return numbered(self._dataset.with_format("arrow").iter(ROWS_AT_A_TIME))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub(HubSet, RecordKeys):
    """Prompts in a hub set or local files in its format."""


def local_path(path: str, key: str) -> Path | None:
    """The local file or folder that `path`, the value of `key`, names; None for a hub id. UserError: there is none."""
    local = Path(path).expanduser()
    if local.exists():
        return local
    looks_local = path.startswith(("/", ".", "~")) or is_data_file(path)
    remedy = "give an existing one, or the id of a hub set"
    require(not looks_local, key, "there is no such file or folder", got=path, remedy=remedy)
    return None
