"""Chooses the completions that a report shows: whole groups of a few steps, within a limit of bytes.

The images of their prompts are read again from the run's data, and made small.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from rlft.config.instantiate import instantiate
from rlft.runs import lines
from rlft.system.terminal import say
from rlft.system.text import visible
from rlft.tokens.images import picture
from rlft.types import Image, Split

MAX_STEPS = 40
MAX_GROUPS_PER_STEP = 16
MAX_EVALUATIONS = 20
MAX_TEXT = 20_000  # the most characters of a prompt or completion; the page says where a text was cut
MAX_EDGE = 256  # the most pixels along an edge of a shown image
MAX_IMAGE_BYTES = 4_000_000  # of a page's images, as data URLs
DIGITS = 3
TRAINED, HELD_OUT = "trained on", "held out"

ShownGroup = dict[str, Any]


def choose(folder: Path, max_bytes: int) -> dict[str, Any]:
    """The completions of a run to show, at most about `max_bytes` of JSON, as the page's script reads them.

    These are the held-out examples of evaluations, then groups of evenly spaced steps.
    """
    files = {step: path for path, step in lines.rollout_files(folder) if path.suffix == ".jsonl"}
    chosen = [*fitting(held_out_groups(lines.read_lines(folder / lines.EVALUATIONS, lines.silent)), max_bytes // 2)]
    steps = sorted(files) if len(files) <= MAX_STEPS else spread(sorted(files), MAX_STEPS)
    candidates = (group for step in evenly(steps) for group in groups_of(files[step], step))
    chosen += fitting(candidates, max_bytes - sum(map(_size, chosen)))
    chosen.sort(key=lambda group: (group["kind"] != TRAINED, group["step"]))
    trained = [group for group in chosen if group["kind"] == TRAINED]
    return {
        "groups": chosen,
        "steps": len({group["step"] for group in trained}),
        "steps_on_disk": len(files),
        "completions": sum(len(group["rows"]) for group in trained),
    }


def fitting(groups: Iterable[ShownGroup], max_bytes: int) -> Iterator[ShownGroup]:
    """The groups that fit, in order; a group that is too large is tried again without its tokens' values."""
    remaining = max_bytes
    for group in groups:
        rows = [{name: v for name, v in row.items() if name != "tokens"} for row in group["rows"]]
        for version in (group, {**group, "rows": rows}):
            if (size := _size(version)) <= remaining:
                remaining -= size
                yield version
                break


def spread(steps: Sequence[int], number: int) -> list[int]:
    """`number` evenly spaced steps, including the first and the last.

    >>> spread([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    [1, 5, 9]
    """
    return [steps[round(i * (len(steps) - 1) / (number - 1))] for i in range(number)]


def evenly(steps: Sequence[int]) -> list[int]:
    """The last step, then the others in an order (van der Corput's) in which any first few are about evenly spaced.

    >>> evenly([1, 2, 3, 4, 5])
    [5, 1, 3, 2, 4]
    """
    digits = len(steps).bit_length()
    order = sorted(range(len(steps) - 1), key=lambda i: f"{i:0{digits}b}"[::-1])
    return [*steps[-1:], *(steps[i] for i in order)]


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of a file; none if it cannot be read, for instance because a running run has just deleted it."""
    with suppress(OSError), file.open("rb") as stream:
        yield from stream


def groups_of(file: Path, step: int) -> list[ShownGroup]:
    """At most MAX_GROUPS_PER_STEP groups of a step, those with tokens' values first; few more are ever in memory."""
    with_values, others = list[ShownGroup](), list[ShownGroup]()
    lost: list[lines.DamagedLines] = []
    for group in _groups(file, step, lost):
        of_kind = with_values if any("tokens" in row for row in group["rows"]) else others
        if len(of_kind) < MAX_GROUPS_PER_STEP:
            of_kind.append(group)
    if lost:
        say(lines.lost_text(file, lost))
    return [*with_values, *others][:MAX_GROUPS_PER_STEP]


def _groups(file: Path, step: int, lost: list[lines.DamagedLines]) -> Iterator[ShownGroup]:
    """The groups in the order of the file."""
    name, group = None, None
    for _, line in lines.complete_lines(_lines(file), lost):
        try:
            # If a group's first line is lost, its other lines must not be shown under another prompt.
            if line["index"] == 0 or group is None or name != line["prompt_id"]:
                new_group: ShownGroup = {"kind": TRAINED, "step": step, **_prompt_of(line), "rows": []}
                if group is not None:
                    yield group
                name, group = line["prompt_id"], new_group
            group["rows"].append(trained_row(line))
        except (KeyError, IndexError, TypeError, AttributeError):  # a damaged file: the lines before are shown
            break
    if group is not None:
        yield group


def _prompt_of(line: Mapping[str, Any]) -> dict[str, Any]:
    messages = [{"role": safe(str(m["role"])), **shortened(str(m["content"]))} for m in line["prompt"]]
    answer = shortened(str(line["answer"]))
    return {"id": safe(line["prompt_id"]), "prompt": messages, **shown_digests(line), "answer": answer}


def shown_digests(line: Mapping[str, Any]) -> dict[str, list[str]]:
    """{"images": the digests of the prompt's images} of a completion or an example whose prompt has any."""
    return {"images": [safe(str(digest)) for digest in line["images"]]} if line.get("images") else {}


def trained_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """A completion of a rollout file; its tokens' values are rounded, and left out if the text is cut.

    If the completion has turns with texts, `turns` has what the policy said, the answers to it, and its tool calls.
    """
    row = {
        **shortened(line["completion"]),
        "reward": line["reward"],
        "rewards": {safe(name): value for name, value in line["rewards"].items()},
        "advantage": line["advantage"],
        "finish": line["finish_reason"],
        "version": line["policy_version"],
        "length": sum(line["mask"]) if "mask" in line else len(line["token_ids"]),
    }
    row |= shown_turns(line)
    values = line.get("tokens")
    if values is not None and "cut" not in row:
        numbers = {name: _rounded(values[name]) for name in values if name != "text"}
        row["tokens"] = {
            "text": [safe(text) for text in values["text"]],
            **numbers,
            "sampled": _rounded(line["logprobs"]),
        }
        if "mask" in line:
            row["mask"] = line["mask"]
    return row


def shown_turns(line: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """{"turns": ..} of a completion or an example that has turns with texts."""
    turns = line.get("turns", ())
    return {"turns": list(map(shown_turn, turns))} if any(turn["text"] or turn["answer"] for turn in turns) else {}


def shown_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn whose texts are made visible and shortened, each as `shortened` returns it."""
    calls = [
        {"name": safe(call["name"]), "failed": call["failed"], "arguments": shortened(call["arguments"])}
        | {"answer": shortened(call["answer"])}
        for call in turn["calls"]
    ]
    texts = {"said": shortened(turn["text"]), "answer": shortened(turn["answer"])}
    return {**texts, "reward": turn["reward"], "calls": calls}


def held_out_groups(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[ShownGroup]:
    """A group with one completion for each example of at most MAX_EVALUATIONS evaluations."""
    if len(evaluations) > MAX_EVALUATIONS:
        evaluations = [evaluations[i] for i in spread(range(len(evaluations)), MAX_EVALUATIONS)]
    for line in evaluations:
        for example in line.get("examples", ()):
            yield {
                "kind": HELD_OUT,
                "step": line["step"],
                "id": safe(example["prompt_id"]),
                "prompt": [{"role": "user", **shortened(example["question"])}],
                **shown_digests(example),
                "answer": shortened(str(example["answer"])),
                "rows": [
                    {
                        **shortened(example["completion"]),
                        "reward": example["score"],
                        "rewards": {},
                        "finish": example["finish_reason"],
                        **shown_turns(example),
                    }
                ],
            }


def safe(text: str) -> str:
    """The text with all invisible characters made visible."""
    return visible(text, joiners=False)


def shortened(text: str) -> dict[str, Any]:
    """{"text": ..} and, if it was cut, {"cut": its number of characters}."""
    return {"text": safe(text)} if len(text) <= MAX_TEXT else {"text": safe(text[:MAX_TEXT]), "cut": len(text)}


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in values]


def _size(value: ShownGroup) -> int:
    return len(json.dumps(value, ensure_ascii=False))


# -- images ------------------------------------------------------------------------------------------------------------
def shown_images(config: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], max_bytes: int) -> dict[str, str]:
    """{digest: a data URL with the image, made small} of the groups' images that the run's data have and that fit.

    A line on stderr says why the data cannot be read, as where they have moved. The first groups are the most
    important; max_bytes is that of all URLs together.
    """
    shown, digests = dict[str, str](), [digest for group in groups for digest in group.get("images", ())]
    if not digests:
        return shown
    try:
        for image in _images_of(config, digests):
            if len(url := data_url(image)) <= max_bytes:
                max_bytes -= len(url)
                shown[image.digest] = url
    except Exception as error:  # a data source and its files are the user's own, and may raise anything
        say(f"the report lacks images, since the run's data cannot be read: {error}")
    return shown


def _images_of(config: Mapping[str, Any], digests: Sequence[str]) -> Iterator[Image]:
    """The images with these digests, in this order, as far as the data have them."""
    data, images = instantiate(config["data"], "data"), dict.fromkeys(digests)
    for split in Split:
        for image in (image for prompt in data.load(split) for image in prompt.images):
            if image.digest in images:
                images[image.digest] = image
        if None not in images.values():
            break
    return (image for image in images.values() if image is not None)


def data_url(image: Image) -> str:
    """The image as a JPEG in a data URL, at most MAX_EDGE pixels wide and high."""
    small, file = picture(image), BytesIO()
    small.thumbnail((MAX_EDGE, MAX_EDGE))
    small.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
