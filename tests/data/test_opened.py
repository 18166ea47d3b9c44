"""Files that are not read are known by their first bytes, and the refusal says how their rows can be had."""

import gzip
import io
import json
import pickle
import subprocess
import zipfile
from itertools import product

import pytest

from rlft.types import Split, UserError


def test_what_is_not_read_is_named_with_the_way(make_data, tmp_path):
    """The way is run where a tool for it is everywhere."""
    rows = [{"prompt": f"{i}?", "answer": "1"} for i in range(8)]
    text = "prompt,answer\n" + "".join(f"{i}. Où?,Café\n" for i in range(20))
    (tmp_path / "latin.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.csv:2: .* as Windows-1252 it is '0\. Où\?,Café'") as refusal:
        make_data("jsonl", path=str(tmp_path / "latin.csv")).load(Split.train)
    command = str(refusal.value).rpartition(": ")[2]
    (tmp_path / "utf8.csv").write_bytes(subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout)
    assert (tmp_path / "utf8.csv").read_text(encoding="utf-8") == text
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        for name in "ab":
            opened.writestr(name, json.dumps(rows))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    by_number = {name: dict(enumerate(column)) for name, column in columns.items()}
    for content, problem in (
        (archive.getvalue(), "is an archive of several files.*unzip"),
        (pickle.dumps(rows), r"is a pickle.*to_parquet"),
        (b"SQLite format 3\x00...", "is an SQLite database.*sqlite3 -header -csv"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "pointer of Git LFS.*git lfs pull"),
        (b"<!DOCTYPE html><html>", "is a web page.*/resolve/"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1", r"Excel 97 to 2003.*\.xlsx"),
        (json.dumps(columns).encode(), "holds columns, not rows.*orient='records'"),
        (json.dumps(by_number, indent=1).encode(), "holds columns, not rows.*orient='records'"),
    ):
        for name, pack in product(("a.csv", "a.json", "a"), (bytes, gzip.compress)):
            (tmp_path / name).write_bytes(pack(content))
            with pytest.raises(UserError, match=f"^data.path: .*{problem}"):
                make_data("jsonl", path=str(tmp_path / name)).load(Split.train)
