"""Images in rows: every form of them, their places in the question, and what is refused by row and key."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.data import hub
from rlft.data.fields import RowError
from rlft.data.images import image_of, with_images
from rlft.data.shapes import drawing
from rlft.types import IMAGE, Prompt, Split, UserError

CONTENT = {name: drawing(name).data for name in ("3-a", "4-b", "1-c", "2-d", "5-e", "6-f")}
A, B, *_ = CONTENT.values()


def loaded(file: Path, *words: str) -> list[Prompt]:
    plain = compose(["data=jsonl", f"data.path={file}", *words])
    return [p for split in Split for p in instantiate(plain["data"], "data").load(split)]


def test_an_image_has_one_digest_in_each_form(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(A)
    text = base64.b64encode(A).decode()
    forms = [A, str(file), text, f"data:image/png;base64,{text}", {"bytes": A, "path": None}, {"path": str(file)}]
    images = [image_of(form, "picture") for form in forms]
    assert len({image.digest for image in images}) == 1
    assert image_of(B, "picture").digest != images[0].digest
    assert [bool(image.data) for image in images] == [True, False, True, True, True, False]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "must be an image"),
        (7, "must be an image"),
        ({"bytes": None, "path": None}, "must be an image"),
        ("missing.png", "names no file that can be read"),
        ("https://example.org/a.png", "is an address"),
        ("data:image/png;base64,%", "no base64"),
    ],
)
def test_what_is_no_image_is_refused(value: Any, problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        image_of(value, "picture")


def asked(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


IMAGE_PART = {"type": "image", "image": A}
TEXT_PART = {"type": "text", "text": "How many?"}


@pytest.mark.parametrize(
    ("question", "field", "expected"),
    [
        ("How many?", [A], f"{IMAGE}How many?"),
        ("How many?", [A, B], f"{IMAGE}{IMAGE}How many?"),
        ("Is <image> like <image>?", [A, B], f"Is {IMAGE} like {IMAGE}?"),
        ("What is <image>?", [A, B], f"{IMAGE}{IMAGE}What is <image>?"),
        (asked("How many?"), A, f"{IMAGE}How many?"),
        (asked([TEXT_PART, IMAGE_PART]), None, f"How many?{IMAGE}"),
        (asked([{"type": "image"}, TEXT_PART]), A, f"{IMAGE}How many?"),
        (asked([{"type": "image_url", "image_url": {"url": IMAGE_PART["image"]}}, TEXT_PART]), None,
         f"{IMAGE}How many?"),
        (asked([{"type": "image", "text": None, "image": A}, {"type": "text", "text": "?", "image": None}]), None,
         f"{IMAGE}?"),
    ],
)  # fmt: skip
def test_images_stand_where_the_row_says(question: Any, field: Any, expected: str) -> None:
    row, images = with_images({"asked": question, "picture": field}, "asked", "picture" if field else None)
    found = row["asked"]
    if isinstance(found, list):
        content = found[0]["content"]
        found = content if isinstance(content, str) else "".join(part["text"] for part in content)
    assert found == expected
    assert [image.data for image in images] == [A, B][: len(images)]
    assert len(images) == expected.count(IMAGE)


@pytest.mark.parametrize(
    ("question", "field", "problem"),
    [
        (asked([{"type": "image"}, TEXT_PART]), None, "has no image"),
        (asked([{"type": "image"}, TEXT_PART]), [A, B], "1 more than the chat has parts for"),
        ([{"role": "system", "content": "Count."}], [A], "no text of a user"),
        (None, [A], "the question is null"),
    ],
)
def test_images_without_a_place_are_refused(question: Any, field: Any, problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        with_images({"asked": question, "picture": field}, "asked", "picture" if field else None)


def test_rows_of_parquet_with_bytes_and_of_json_with_base64_are_the_same_prompts(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "How many?", "answer": name[0], "picture": {"bytes": data, "path": None}}
            for name, data in CONTENT.items()]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    texts = [{**row, "picture": base64.b64encode(row["picture"]["bytes"]).decode()} for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    words = ("data.image_field=picture", "data.held_out_fraction=0.5")
    found = [
        {prompt.answer: prompt.images for prompt in loaded(tmp_path / name, *words)}
        for name in ("a.parquet", "a.jsonl")
    ]
    # Equal questions about other pictures are other questions, so that each row is in its own split.
    assert found[0] == found[1]
    expected = {name[0]: data for name, data in CONTENT.items()}
    assert {answer: images[0].data for answer, images in found[0].items()} == expected


def test_images_of_a_hub_set_stay_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a column, in a list, and in the parts of a chat; `datasets` would decode each at every access."""
    import datasets

    stored = [{"bytes": data, "path": None} for data in CONTENT.values()]
    part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()}
    chat = datasets.List({"role": datasets.Value("string"), "content": datasets.List(part)})
    features = {"answer": datasets.Value("string"), "one": datasets.Image(), "all": datasets.List(datasets.Image())}
    rows = [
        {
            "answer": str(number),
            "one": image,
            "all": [image, image],
            "prompt": [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}]}],
        }
        for number, image in enumerate(stored)
    ]
    made = datasets.Dataset.from_list(rows, features=datasets.Features({**features, "prompt": chat}))
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    table = hub.HubTable(hub._undecoded(made), "some/set", "train")
    assert [record.content["one"] for record in table.records()] == stored
    assert [record.content["all"] for record in table.records()] == [[image, image] for image in stored]
    words = ["data=hub", "data.path=some/set", "data.messages_field=prompt", "data.held_out_fraction=0.5"]
    data = instantiate(compose(words)["data"], "data")
    found = {prompt.answer: prompt for split in Split for prompt in data.load(split)}
    assert {answer: prompt.images[0].data for answer, prompt in found.items()} == {
        str(number): data for number, data in enumerate(CONTENT.values())
    }
    assert all(prompt.messages[0]["content"] == f"{IMAGE}?" for prompt in found.values())


def test_a_bad_image_is_refused_by_row_and_key(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "How many?", "answer": "1", "picture": "missing.png"}\n')
    with pytest.raises(UserError, match=r"^data\.image_field: .*a\.jsonl.*1.*names no file"):
        loaded(file, "data.image_field=picture")
    with pytest.raises(UserError, match=r"^data\.few_shot: examples are shown without images"):
        loaded(file, "data.image_field=picture", "data.few_shot=1")
