"""Images in rows: every form of them, their places in the question, and what is refused by row and key."""

import base64
import json
from itertools import product

import pytest

from rlft.data import hub
from rlft.data.fields import MARK, RowError, image_of, messages_of, with_images
from rlft.data.shapes import drawing
from rlft.types import IMAGE, UserError
from tests.data.data_rows import every

CONTENT = {name: drawing(name).data for name in ("3-a", "4-b", "1-c", "2-d", "5-e", "6-f")}
A, B, *_ = CONTENT.values()


def test_an_image_has_one_digest_in_each_form(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(A)
    text = base64.b64encode(A).decode()
    forms = [A, str(file), text, f"data:image/png;base64,{text}", {"bytes": A, "path": None}, {"path": str(file)}]
    images = [image_of(form, "picture") for form in forms]
    assert len({image.digest for image in images}) == 1
    assert image_of(B, "picture").digest != images[0].digest
    assert [bool(image.data) for image in images] == [True, False, True, True, True, False]


@pytest.mark.parametrize(("value", "problem"), [
    (None, "must be an image"),
    (7, "must be an image"),
    ({"bytes": None, "path": None}, "must be an image"),
    ("missing.png", "names no file that can be read"),
    ("https://example.org/a.png", "is an address"),
    ("data:image/png;base64,%", "no base64"),
])  # fmt: skip
def test_what_is_no_image_is_refused(value, problem):
    with pytest.raises(RowError, match=problem):
        image_of(value, "picture")


def asked(content):
    return [{"role": "user", "content": content}]


IMAGE_PART = {"type": "image", "image": A}
TEXT_PART = {"type": "text", "text": "How many?"}


@pytest.mark.parametrize(("question", "field", "expected"), [
    ("How many?", [A], f"{IMAGE}How many?"),
    ("How many?", [A, B], f"{IMAGE}{IMAGE}How many?"),
    ("Is <image> like <image>?", [A, B], f"Is {IMAGE} like {IMAGE}?"),
    (asked("How many?"), A, f"{IMAGE}How many?"),
    (asked([TEXT_PART, IMAGE_PART]), None, f"How many?{IMAGE}"),
    (asked([{"type": "image"}, TEXT_PART]), A, f"{IMAGE}How many?"),
    (asked([{"type": "image_url", "image_url": {"url": IMAGE_PART["image"]}}, TEXT_PART]), None, f"{IMAGE}How many?"),
    (asked([{"type": "image", "text": None, "image": A}, {"type": "text", "text": "?", "image": None}]), None,
     f"{IMAGE}?"),
])  # fmt: skip
def test_images_stand_where_the_row_says(question, field, expected):
    row, images = with_images({"asked": question, "picture": field}, "asked", "picture" if field else None)
    found = row["asked"]
    if isinstance(found, list):
        content = found[0]["content"]
        found = content if isinstance(content, str) else "".join(part["text"] for part in content)
    assert found == expected
    assert [image.data for image in images] == [A, B][: len(images)]
    assert len(images) == expected.count(IMAGE)


@pytest.mark.parametrize(("question", "field", "problem"), [
    (asked([{"type": "image"}, TEXT_PART]), None, "has no image"),
    (asked([{"type": "image"}, TEXT_PART]), [A, B], "1 more than the chat has parts for"),
    ([{"role": "system", "content": "Count."}], [A], "no text of a user"),
    (None, [A], "the question is null"),
])  # fmt: skip
def test_images_without_a_place_are_refused(question, field, problem):
    with pytest.raises(RowError, match=problem):
        with_images({"asked": question, "picture": field}, "asked", "picture" if field else None)


def test_rows_of_parquet_with_bytes_and_of_json_with_base64_are_the_same_prompts(make_data, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "How many?", "answer": name[0], "picture": {"bytes": data, "path": None}}
            for name, data in CONTENT.items()]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    texts = [{**row, "picture": base64.b64encode(row["picture"]["bytes"]).decode()} for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    keys = {"image_field": "picture", "held_out_fraction": 0.5}
    sets = [make_data("jsonl", path=str(tmp_path / name), **keys) for name in ("a.parquet", "a.jsonl")]
    found = [{prompt.answer: prompt.images for prompt in every(data)} for data in sets]
    # Equal questions about other pictures are other questions, so that each row is in its own split.
    assert found[0] == found[1]
    expected = {name[0]: data for name, data in CONTENT.items()}
    assert {answer: images[0].data for answer, images in found[0].items()} == expected


def test_images_of_a_hub_set_stay_as_they_are_stored(make_data, monkeypatch):
    """In a column, in a list, and in the parts of a chat; `datasets` would decode each at every access."""
    import datasets

    stored = [{"bytes": data, "path": None} for data in CONTENT.values()]
    part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()}
    chat = datasets.List({"role": datasets.Value("string"), "content": datasets.List(part)})
    features = {"answer": datasets.Value("string"), "one": datasets.Image(), "all": datasets.List(datasets.Image())}
    rows = [{"answer": str(number), "one": image, "all": [image, image]} for number, image in enumerate(stored)]
    for row in rows:
        row["prompt"] = asked([{"type": "image", "image": row["one"]}, {"type": "text", "text": "?"}])
    made = datasets.Dataset.from_list(rows, features=datasets.Features({**features, "prompt": chat}))
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    table = hub.HubTable(made, "some/set", "train")
    assert [record.fields["one"] for record in table.records()] == stored
    assert [record.fields["all"] for record in table.records()] == [[image, image] for image in stored]
    prompts = every(make_data("hub", path="some/set", messages_field="prompt", held_out_fraction=0.5))
    found = {int(prompt.answer): prompt.images[0].data for prompt in prompts}
    assert found == dict(enumerate(CONTENT.values()))
    assert all(prompt.messages[0]["content"] == f"{IMAGE}?" for prompt in prompts)


def test_a_bad_image_is_refused_by_row_and_key(load):
    row = {"prompt": "How many?", "answer": "1", "picture": "missing.png"}
    with pytest.raises(UserError, match=r"^data\.image_field: .*a\.jsonl.*1.*names no file"):
        load(row, image_field="picture")
    with pytest.raises(UserError, match=r"^data\.few_shot: examples are shown without images"):
        load(row, image_field="picture", few_shot=1)


def test_images_stand_at_their_marks_or_before_the_question_and_any_other_number_is_refused(tmp_path):
    """Marks and images of each number up to 3, as text, in chats of both forms and in parts, over one or two turns."""
    images = list(CONTENT.values())[:3]
    for marks, number, form, turns in product(range(4), range(4), ("text", "role", "from", "parts"), (1, 2)):
        if form == "text" and turns == 2:
            continue
        earlier = marks // 2 if turns == 2 else 0
        texts = [f"{MARK} " * earlier + "a"] * (turns - 1) + [f"b {MARK}" * (marks - earlier) + "c"]
        question = texts[0]
        if form != "text":
            said = [asked(text)[0] if form == "role" else asked([{"type": "text", "text": text}])[0] for text in texts]
            said = [{"from": "human", "value": text} for text in texts] if form == "from" else said
            question = [said[0], {"role": "assistant", "content": "x"}, said[1]] if turns == 2 else said
        fields = {"asked": question, "picture": images[:number] or None}
        if marks not in (0, number):
            with pytest.raises(RowError, match=f"has <image> in {marks} place.* holds {number} image") as refusal:
                with_images(fields, "asked", "picture")
            assert (refusal.value.key, "once for each image" in str(refusal.value.remedy)) == ("image_field", True)
            continue
        row, found = with_images(fields, "asked", "picture")
        read = row["asked"] if form == "text" else "|".join(m["content"] for m in messages_of(row, "asked"))
        expected = [text.replace(MARK, IMAGE) for text in texts]
        expected[-1] = ("" if marks else IMAGE * number) + expected[-1]
        assert (read, [image.data for image in found]) == ("|x|".join(expected), images[:number])


def test_images_stand_where_their_numbers_are():
    """Each order of up to three numbered marks, and numbers that are none of the images'."""
    images = list(CONTENT.values())[:3]
    for count in (1, 2, 3):
        for order in product(range(1, 4), repeat=count):
            fields = {"asked": "".join(f"<image {i}>" for i in order), "picture": images[:count]}
            if count > 1 and sorted(order) != list(range(1, count + 1)):
                with pytest.raises(RowError, match="its question numbers"):
                    with_images(fields, "asked", "picture")
                continue
            row, found = with_images(fields, "asked", "picture")
            expected = [images[0]] if count == 1 else [images[i - 1] for i in order]
            assert (row["asked"], [image.data for image in found]) == (IMAGE * count, expected)


def test_images_that_no_key_names_are_refused_where_the_text_has_places_for_them(makers, tmp_path):
    """Each form of an image x names of fields x prompts, demonstrations and preferences; the named key then works."""

    def parsed(row, section="data", **keys):
        return makers[section]("jsonl", path="a.jsonl", **keys).parse(row, "a")

    file = tmp_path / "a.png"
    file.write_bytes(A)
    text = base64.b64encode(A).decode()
    forms = [str(file), [str(file)], text, f"data:image/png;base64,{text}", {"bytes": None, "path": str(file)}]
    answers = {"answer": "1", "completion": "1", "chosen": "1", "rejected": "2"}
    for name, image in product(("image", "images", "img", "picture", "image_path", "photo"), forms):
        row = {"prompt": "What is <image>?", name: image, **answers}
        fields = [row] if name != "images" else [row, {**row, "prompt": asked(row["prompt"])}]
        for each in fields:
            with pytest.raises(RowError, match="no key names its field") as refusal:
                parsed(each)
            assert refusal.value.remedy == f"set data.image_field={name}"
            [made] = parsed(each, image_field=name)
            assert [image.digest for image in made.made.prompt.images] == [image_of(A, "a").digest]
            for section in ("demonstrations", "preferences"):
                with pytest.raises(RowError, match="no key names its field") as refusal:
                    parsed(each, section)
                assert "texts alone" in str(refusal.value.remedy)
    for mark, name in product(("<image 1>", "<image_1>", "<image1>", "<image>"), ("image_1", "image1", "image")):
        row = {"prompt": f"What is {mark}?", name: str(file), "image_7": None, **answers}
        with pytest.raises(RowError, match=f"{mark}, and no key names its field") as refusal:
            parsed(row)
        assert refusal.value.remedy == f"set data.image_field={name}"
        [made] = parsed(row, image_field=name)
        assert made.made.prompt.messages[-1]["content"] == f"What is {IMAGE}?"
        if name == "image_1":
            with pytest.raises(RowError) as refusal:
                parsed(row | {"image_2": str(file)})
            assert refusal.value.remedy == "write image_1, image_2 as one field, a list, and name it"
    for other in ({"caption": "a"}, {"image_id": 5}, {"image": None}, {"images": []}):  # nothing is lost
        parsed({"prompt": "What is the tag <image>?", **answers, **other})


# -- messages ----------------------------------------------------------------------------------------------------------
def test_other_names_of_roles_are_these_roles():
    """Names x upper and lower case x both forms of messages."""
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    names = {"human": "user", "prompter": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
             "model": "assistant", "chatgpt": "assistant", "observation": "tool", "function": "tool",
             "ipython": "tool", "tool": "tool", "developer": "system", "system": "system"}  # fmt: skip
    number, keys = 0, (("role", "content"), ("from", "value"))
    for (name, role), change, (key, content) in product(names.items(), (str, str.upper, str.title), keys):
        [message] = messages_of({"m": [{key: change(name), content: "x"}]}, "m")
        assert message == {"role": role, "content": "x"}
        number += 1
    assert number == 78
    for key, content in keys:
        for text in (call, f"[{call}]"):
            [message] = messages_of({"m": [{key: "function_call", content: text}]}, "m")
            assert message["role"] == "assistant"
            assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
