from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import rlft
from rlft.data.arithmetic import split_of
from rlft.data.examples import (
    PretrainText,
    Text,
    TextTokens,
    as_batch,
    load_texts,
    longest_with_hint,
    scan_texts,
    teacher_prompts,
    with_hint,
)
from rlft.data.files import files_at
from rlft.data.prompts import permutation, prompts_for_step
from rlft.loop.metrics import text_loss
from rlft.model.backbone import Backbone
from rlft.model.forward import Forward, choose, packed_forward, padded_forward
from rlft.model.packing import micro_batches
from rlft.types import Batch, Completion, FinishReason, Group, Outputs, Rollout, Split, UserError

ASSETS = Path(rlft.__file__).parent / "assets"
SCRIPTS = Path(__file__).parents[2] / "scripts"


def write(path: Path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# -- reading -----------------------------------------------------------------------------------------------------------
def test_texts_come_in_file_order_and_as_they_stand(tmp_path: Path) -> None:
    rows = [{"body": " a\n", "id": 7}, {"body": "é <|im_end|>"}, {"body": "a"}, {"body": "a"}]
    found = load_texts(write(tmp_path / "a.jsonl", *rows), "body", None)
    assert found == [Text(context="", text=text) for text in (" a\n", "é <|im_end|>", "a", "a")]


def test_what_stands_before_a_text_is_read_from_its_own_field_and_may_be_empty(tmp_path: Path) -> None:
    rows = [{"before": " q\n", "body": "a "}, {"body": "b", "before": ""}, {"before": " ", "body": "c"}]
    found = load_texts(write(tmp_path / "a.jsonl", *rows), "body", "before")
    assert [(text.context, text.text) for text in found] == [(" q\n", "a "), ("", "b"), (" ", "c")]


REFUSED_FILES = {
    "no such file": (
        None,
        "pretrain.path: there is no such file, got {file}; give the path of a file or "
        "folder (a set of the hub: choose hub in place of jsonl)",
    ),
    "nothing in it": (b"\n", "pretrain.path: holds no texts, got {file}; give a file with one JSON object a line"),
    "another field": (
        b'{"text": "a"}\n\n{"body": "a", "id": 1}',
        "pretrain.path: {file}:3: there is no field 'text', only 'body', 'id'; "
        "fix or remove that line, or set pretrain.field to another",
    ),
    "no field at all": (
        b"{}",
        "pretrain.path: {file}:1: there is no field 'text', only none at all; "
        "fix or remove that line, or set pretrain.field to another",
    ),
    "not a text": (
        b'{"text": ["a"]}',
        "pretrain.path: {file}:1: field 'text' must be a string, it is a list; "
        "fix or remove that line, or name other fields (pretrain.*field)",
    ),
    "null": (
        b'{"text": null}',
        "pretrain.path: {file}:1: field 'text' must be a string, it is null; "
        "fix or remove that line, or name other fields (pretrain.*field)",
    ),
    "empty": (
        b'{"text": "a"}\n{"text": " \\n"}',
        "pretrain.path: {file}:2: field 'text' is empty; "
        "fix or remove that line, or name other fields (pretrain.*field)",
    ),
    "not JSON": (b"plain text", "pretrain.path: {file}:1: is not JSON (Expecting value); fix or remove that line"),
    "nothing given": (
        b'{"given": "q", "text": "a"}\n{"text": "a"}',
        "pretrain.path: {file}:2: there is no field 'given', only 'text'; "
        "fix or remove that line, or set pretrain.given_field to another",
    ),
    "null given": (
        b'{"given": null, "text": "a"}',
        "pretrain.path: {file}:1: field 'given' must be a string, it is null; "
        "fix or remove that line, or name other fields (pretrain.*field)",
    ),
    "nothing after what is given": (
        b'{"given": "q", "text": ""}',
        "pretrain.path: {file}:1: field 'text' is empty; "
        "fix or remove that line, or name other fields (pretrain.*field)",
    ),
}
"""Where a line has a field `given`, that is read, too."""


@pytest.mark.parametrize(("content", "message"), REFUSED_FILES.values(), ids=REFUSED_FILES)
def test_what_holds_no_texts_is_refused_by_its_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "a.jsonl"
    if content is not None:
        file.write_bytes(content)
    given = "given" if b"given" in (content or b"") else None
    with pytest.raises(UserError) as refusal:
        load_texts(str(file), "text", given)
    assert str(refusal.value) == message.format(file=file)


def test_one_key_cannot_be_both_given_and_learned(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        load_texts(write(tmp_path / "a.jsonl", {"text": "a"}), "text", "text")
    assert str(refusal.value) == (
        "pretrain.given_field: is the key of the text itself (pretrain.field), got text; "
        "name the field of what stands before the text, or set it to null"
    )


# -- the text that ships -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def maker():
    """The module of scripts/make_arithmetic_examples.py."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("make_arithmetic_examples")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / "tiny-arithmetic")


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return load_texts("embedded:arithmetic-text", "text", "given")


START, TURN = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def parts(text: Text) -> tuple[int, str, int, str]:
    """(47, "+", 85, answer) of a chat about 47 + 85."""
    asked = text.context.removeprefix(START).removesuffix(TURN)
    a, operation, b = asked.removeprefix("What is ").removesuffix("?").split()
    return int(a), operation, int(b), text.text.removesuffix("<|im_end|>")


def test_the_script_gives_the_text_that_ships(maker, tokenizer, texts) -> None:
    assert maker.make_texts(tokenizer, 1350, seed=0) == texts
    assert maker.make_texts(tokenizer, 20, seed=1) != texts[:20]
    [file] = files_at("embedded:arithmetic-text", "pretrain.path")
    assert file.stat().st_size <= 200_000


def test_it_is_about_problems_of_the_training_split_each_once(texts) -> None:
    problems = [parts(text)[:3] for text in texts]
    assert {split_of(*numbers) for numbers in problems} == {Split.train}
    assert len(set(problems)) == len(texts) == 1350


LIMITS: dict[str, Any] = {"max_tokens": 256, "sequences_per_update": 1, "held_out": 1, "updates_per_step": 1}


def letters(texts: Sequence[str], **keys: Any) -> dict[str, list[list[int]]]:
    """A tokenizer whose tokens are characters, with their code points: a is 97."""
    return {"input_ids": [[ord(sign) for sign in text] for text in texts]}


def parted(texts: Sequence[str]) -> list[Text]:
    """Texts written as given^learned, or as learned alone."""
    return [Text(context=given, text=text) for given, _, text in (written.rpartition("^") for written in texts)]


def scan(texts: Sequence[str], **keys: Any) -> PretrainText:
    return scan_texts(parted(texts), letters, **LIMITS | keys)  # type: ignore[arg-type]


def words(texts: Sequence[TextTokens]) -> list[str]:
    return ["".join(map(chr, text.ids)) for text in texts]


def written(texts: Sequence[TextTokens]) -> list[str]:
    """Each as given^learned."""
    return [
        f"{word[: text.num_given]}^{word[text.num_given :]}" for word, text in zip(words(texts), texts, strict=True)
    ]


def rows(batch: Batch) -> list[str]:
    """The texts of a batch."""
    kept = (ids[mask].tolist() for ids, mask in zip(batch.token_ids, batch.attention_mask, strict=True))
    return ["".join(map(chr, ids)) for ids in kept]


def digest(text: str) -> bytes:
    """sha256 of the tokens, int32 with the lowest byte first."""
    return hashlib.sha256(b"".join(ord(sign).to_bytes(4, "little") for sign in text)).digest()


# -- scan_texts --------------------------------------------------------------------------------------------------------
def test_texts_are_cut_at_the_limit_and_dropped_below_two_tokens_with_a_word() -> None:
    # Of 5 texts "a" has 1 token; "bcdef" has 5 and "ghij" 4, which are more than 3; "klm" is exactly at the limit.
    found = scan(["a", "bcdef", "ghij", "klm", "no"], max_tokens=3)
    assert sorted(words([*found.train_texts, *found.held_out_texts])) == ["bcd", "ghi", "klm", "no"]
    assert found.note == (
        "of 5 pretraining texts 2 were cut after pretrain.max_tokens=3, "
        "1 with no token to learn within pretrain.max_tokens=3 were dropped"
    )
    assert scan(["klm", "no"], max_tokens=3).note is None
    assert scan(["klm", "no", "p"]).note == (
        "of 3 pretraining texts 1 with no token to learn within pretrain.max_tokens=256 were dropped"
    )


def test_what_is_given_counts_towards_the_limit_and_is_never_learned() -> None:
    # 4 tokens in all: "ab^cdef" loses "ef"; "ghij^k" and "lmnop^q" have nothing left to learn; "rst^u" just fits; of
    # "^vw" and "xy" the first token is given.
    texts = ["ab^cdef", "ghij^k", "lmnop^q", "rst^u", "^vw", "xy", "z^0"]
    found = scan(texts, max_tokens=4)
    assert sorted(written([*found.train_texts, *found.held_out_texts])) == ["ab^cd", "rst^u", "v^w", "x^y", "z^0"]
    assert found.note == (
        "of 7 pretraining texts 1 were cut after pretrain.max_tokens=4, "
        "2 with no token to learn within pretrain.max_tokens=4 were dropped"
    )


def test_what_is_given_and_what_is_learned_are_tokenised_each_for_itself() -> None:
    def pairs(texts: Sequence[str], **keys: Any) -> dict[str, list[list[int]]]:
        """A tokenizer whose tokens are characters, except that "ab" is one, "X"."""
        return letters([text.replace("ab", "X") for text in texts])

    found = scan_texts(parted(["ca^bd", "cab^d"]), pairs, **LIMITS)  # type: ignore[arg-type]
    assert sorted(written([*found.train_texts, *found.held_out_texts])) == ["cX^d", "ca^bd"]


def test_equal_tokens_are_on_one_side_whatever_is_given_of_them() -> None:
    texts = [f"{i:02d}" for i in range(20)]
    found = scan([*(f"a^{text}" for text in texts), *(f"a{text[0]}^{text[1]}" for text in texts)], held_out=5)
    held_out, train = words(found.held_out_texts), words(found.train_texts)
    assert len(held_out) == len(set(held_out)) == 5
    assert len(train) == 2 * 15
    assert not set(held_out) & set(train)


def test_special_tokens_in_a_text_are_read_as_such_and_none_are_added(backbone: Backbone, caplog) -> None:
    long = "<|im_start|>" + "A" * 600  # more than the model's 512
    with caplog.at_level(logging.WARNING):
        found = scan_texts(parted([long, "A<|im_end|>"]), backbone.tokenizer, **LIMITS | {"max_tokens": 3})
    # <|im_start|> and <|im_end|> are 1 and 2, then come the bytes in the order of their signs: "!" is 3, "A" is 35.
    assert sorted(text.ids.tolist() for text in (*found.train_texts, *found.held_out_texts)) == [[1, 35, 35], [35, 2]]
    assert caplog.text == ""


def test_held_out_texts_are_those_of_the_lowest_hashes_in_the_order_of_the_file() -> None:
    texts = [f"text {i}" for i in range(40)]
    found = scan(texts, held_out=6)
    lowest = set(sorted(texts, key=digest)[:6])
    assert words(found.held_out_texts) == [text for text in texts if text in lowest]
    assert words(found.train_texts) == [text for text in texts if text not in lowest]
    # So another order moves none, and holding out more only adds to them.
    assert set(words(scan(texts[::-1], held_out=6).held_out_texts)) == lowest
    assert set(words(scan(texts, held_out=9).held_out_texts)) > lowest


def test_a_text_that_is_held_out_is_trained_on_nowhere() -> None:
    # Each text three times, once with an end that is cut off: after the cut all three are the same.
    texts = [f"{i:03d}{end}" for end in ("", "", " more") for i in range(40)]
    found = scan(texts, max_tokens=3, held_out=10)
    held_out, train = words(found.held_out_texts), words(found.train_texts)
    assert len(held_out) == len(set(held_out)) == 10  # measured once each
    assert len(train) == 3 * 30  # what the file repeats, training repeats
    assert not set(held_out) & set(train)


def test_the_fingerprint_covers_the_tokens_of_all_texts_which_are_given_and_their_order() -> None:
    # Each text: how many tokens are given, in 4 bytes with the lowest first, and the digest of all its tokens.
    one = b"\x01\0\0\0"
    by_hand = hashlib.sha256(one + digest("ab") + one + digest("cde") + one + digest("f g")).hexdigest()
    assert scan(["ab", "cde", "f g"]).fingerprint == by_hand
    assert scan(["ab", "cde", "f g", "x"]).fingerprint == by_hand  # one token: dropped
    assert scan(["ab", "cde", "f g"], held_out=2).fingerprint == by_hand  # a key of its own
    others = [["ab", "cde"], ["cde", "ab", "f g"], ["abc", "de", "f g"], ["ab", "cde", "f h"]]
    assert len({by_hand, *(scan(other).fingerprint for other in others)}) == 5
    assert scan(["a^b", "c^de", "f g"]).fingerprint == by_hand  # the first token is given in any case
    two = hashlib.sha256(one + digest("ab") + b"\x02\0\0\0" + digest("cde") + one + digest("f g")).hexdigest()
    assert scan(["ab", "cd^e", "f g"]).fingerprint == two


REFUSALS = {
    "no second token": (
        {"max_tokens": 1},
        "pretrain.max_tokens: a text's first token is given, so it needs a second one to learn from, got 1; "
        "use 2 or more",
    ),
    # "ab" twice, "cd", "ef", and "x", which is too short. "ab" has the lowest hash: both are held out by held_out=1.
    "nothing left to train on": (
        {"held_out": 3},
        "pretrain.held_out: there are only 3 different texts with a token to learn within pretrain.max_tokens=256, and "
        "some must be left to train on, got 3; use fewer, more text, or a higher pretrain.max_tokens",
    ),
    "an update that cannot be filled": (
        {"sequences_per_update": 3},
        "pretrain.sequences_per_update: pretrain.held_out=1 leaves only 2 texts to train on, got 3; "
        "use at most 2, a lower pretrain.held_out, or more text",
    ),
}


@pytest.mark.parametrize(("keys", "message"), REFUSALS.values(), ids=REFUSALS)
def test_too_little_text_is_refused(keys: dict[str, int], message: str) -> None:
    texts = ["ab", "cd", "ef", "ab", "x"]
    with pytest.raises(UserError) as refusal:
        scan(texts, **keys)
    assert str(refusal.value) == message
    assert str(scan(texts, max_tokens=2, held_out=2).note).startswith("of 5 pretraining texts 1 with no token to learn")
    assert words(scan(texts, sequences_per_update=2).train_texts) == ["cd", "ef"]


# -- batches -----------------------------------------------------------------------------------------------------------
def tokens(ids: Sequence[int], num_given: int) -> TextTokens:
    return TextTokens(ids=np.array(ids, dtype=np.int32), num_given=num_given)


def test_a_text_is_a_row_whose_given_tokens_are_the_prompt_and_the_rest_predicted() -> None:
    # Token 0 is a token like others, also at the end of a text: lengths say what is padding.
    batch = as_batch([tokens([7, 5, 0], 1), tokens([3, 4], 1), tokens([0, 6, 8, 9], 3)])
    assert batch.token_ids.tolist() == [[7, 5, 0, 0], [3, 4, 0, 0], [0, 6, 8, 9]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    assert batch.group_ids.tolist() == [0, 1, 2]
    assert batch.rewards.tolist() == [0.0] * 3
    assert batch.sampled_logprobs.tolist() == [[0.0] * 4] * 3
    assert (batch.token_ids.dtype, batch.group_ids.dtype) == (torch.int64, torch.int64)
    assert (batch.attention_mask.dtype, batch.loss_mask.dtype) == (torch.bool, torch.bool)


@pytest.fixture
def ten() -> PretrainText:
    """9 texts to train on, 2 an update, 3 updates a step."""
    return scan([f"text {i}" for i in range(10)], sequences_per_update=2, updates_per_step=3)


def test_updates_go_through_the_texts_pass_after_pass(ten: PretrainText) -> None:
    # A pass of 9 texts has 4 whole updates; so updates 0..3 (step 0, and the first of step 1) are one pass, and so on.
    updates = [rows(ten.batch(5, step, update)) for step in range(8) for update in range(3)]
    for start in range(0, 24, 4):
        taken = [text for update in updates[start : start + 4] for text in update]
        assert len(taken) == len(set(taken)) == 8
    assert {text for update in updates for text in update} == set(words(ten.train_texts))
    assert updates[0] != updates[4]


def test_an_updates_texts_depend_on_nothing_but_seed_step_and_update(ten: PretrainText) -> None:
    forwards = [rows(ten.batch(5, step, update)) for step in range(8) for update in range(3)]
    permutation.cache_clear()
    backwards = [rows(ten.batch(5, step, update)) for step in reversed(range(8)) for update in reversed(range(3))]
    assert backwards[::-1] == forwards
    assert [rows(ten.batch(6, step, update)) for step in range(8) for update in range(3)] != forwards
    # A value of the stream itself: a change here breaks the resumption of runs begun before it.
    assert forwards[:2] == [["text 2", "text 4"], ["text 9", "text 7"]]


def test_texts_do_not_come_in_the_order_of_the_prompts(ten: PretrainText) -> None:
    train = words(ten.train_texts)
    as_prompts = [[train[i] for i in prompts_for_step(9, 2, 5, turn)] for turn in range(3)]
    assert [rows(ten.batch(5, 0, update)) for update in range(3)] != as_prompts


@pytest.mark.parametrize("update", [-1, 3])
def test_an_update_that_a_step_does_not_have_is_refused(ten: PretrainText, update: int) -> None:
    with pytest.raises(ValueError, match="a step has 3 updates"):
        ten.batch(5, 0, update)


# -- text_loss ---------------------------------------------------------------------------------------------------------
class Known:
    """A forward whose log-prob of token t in row b is -token / 10, the worse the higher; notes how it was called."""

    def __init__(self) -> None:
        self.temperatures: list[float] = []
        self.sizes: list[int] = []

    def __call__(self, batch: Batch, temperature: float, layout: str) -> Outputs:
        assert layout == "its layout"
        assert not torch.is_grad_enabled()
        self.temperatures.append(temperature)
        self.sizes.append(len(batch.rewards))
        return Outputs(logprobs=(-batch.token_ids.float() / 10).where(batch.loss_mask, 0.0))

    def micro_batches(self, batch: Batch, chosen: Tensor, token_budget: int) -> list[Tensor]:
        return micro_batches(batch, chosen, token_budget)

    parts = Forward.parts

    def placed(self, batches: list[Batch]) -> list[Any]:
        return [SimpleNamespace(batch=self.on_device(batch), layout="its layout") for batch in batches]

    def on_device(self, batch: Batch) -> Batch:
        return batch


def known_roles() -> Any:
    return SimpleNamespace(forward=Known())


@pytest.mark.parametrize(("token_budget", "sizes"), [(100, [3]), (6, [2, 1]), (1, [1, 1, 1])])
def test_the_loss_is_the_mean_over_tokens_however_the_texts_are_split(
    make_batch: Callable[..., Batch], token_budget: int, sizes: list[int]
) -> None:
    batch = make_batch([(0, [9], [1, 2]), (1, [9], [10, 20]), (2, [9], [30])])
    roles = known_roles()
    # (0.1 + 0.2 + 1 + 2 + 3) / 5 = 1.26; a mean over texts would be (0.15 + 1.5 + 3) / 3 = 1.55. Exact in float32 to
    # 1e-7 relative.
    assert text_loss(roles, batch, token_budget) == pytest.approx(1.26, rel=1e-7)
    assert roles.forward.sizes == sizes
    assert set(roles.forward.temperatures) == {1.0}


def test_each_micro_batch_goes_to_the_device(make_batch: Callable[..., Batch]) -> None:
    roles = known_roles()
    roles.forward.on_device = lambda batch: replace(batch, token_ids=batch.token_ids * 2)
    batch = make_batch([(0, [9], [1, 2]), (1, [9], [3])])
    assert text_loss(roles, batch, 3) == pytest.approx(0.4, rel=1e-7)  # 2 * (0.1 + 0.2 + 0.3) / 3


@pytest.fixture(scope="module")
def some_texts() -> list[Text]:
    answer = "<think>3+4=7</think><answer>7</answer><|im_end|>"
    return parted(["<|im_start|>user\n^What is 1 + 2?", "2+2=4", "a^b", f"3 + 4?^{answer}"])


def test_the_loss_is_that_of_each_text_by_itself(backbone: Backbone, some_texts: list[Text]) -> None:
    """Each text alone in the model's own forward, without packing, padding or masks, is the reference."""
    tokenizer, model = backbone.tokenizer, backbone.model
    found = scan_texts(some_texts, tokenizer, **LIMITS | {"max_tokens": 20, "sequences_per_update": 3})
    roles: Any = SimpleNamespace(forward=choose(model))
    assert roles.forward.packed
    total = tokens = 0.0
    for text in found.train_texts:
        ids_1T = torch.tensor(text.ids.tolist())[None]
        with torch.no_grad():
            logits_TV = model(input_ids=ids_1T).logits[0, text.num_given - 1 : -1].double()
        total += torch.nn.functional.cross_entropy(logits_TV, ids_1T[0, text.num_given :], reduction="sum").item()
        tokens += len(text.ids) - text.num_given
    for token_budget in (1, 30, 1000):
        # float32 logits of some 10 nats: 1e-6 each.
        assert text_loss(roles, found.batch(0, 0, 0), token_budget) == pytest.approx(total / tokens, rel=2e-6)


def test_packed_and_padded_rows_of_text_agree_in_loss_and_gradient(backbone: Backbone, some_texts: list[Text]) -> None:
    keys = LIMITS | {"max_tokens": 20, "sequences_per_update": 3}
    batch = scan_texts(some_texts, backbone.tokenizer, **keys).batch(0, 0, 0)
    model: Any = backbone.model
    weight = model.get_input_embeddings().weight.requires_grad_(True)
    losses, gradients = [], []
    try:
        for forward in (packed_forward, padded_forward):
            loss = -forward(model, batch, 1.0, False).logprobs.sum() / batch.loss_mask.sum()
            gradients.append(torch.autograd.grad(loss, weight)[0])
            losses.append(loss.item())
    finally:
        weight.requires_grad_(False)
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5 * gradients[0].abs().max()


def test_a_uniform_model_loses_the_logarithm_of_its_vocabulary(backbone: Backbone, some_texts: list[Text]) -> None:
    """ln V a token, whatever the text: with the final norm at 0 every logit is 0."""
    model: Any = backbone.model
    norm = model.base_model.norm.weight
    before = norm.data.clone()
    keys = LIMITS | {"max_tokens": 20, "held_out": 3}
    batch = scan_texts(some_texts, backbone.tokenizer, **keys).held_out()
    roles: Any = SimpleNamespace(forward=choose(model))
    try:
        norm.data.zero_()
        loss = text_loss(roles, batch, 1000)
    finally:
        norm.data.copy_(before)
    assert loss == pytest.approx(math.log(model.config.vocab_size), rel=1e-6)


def test_the_shipped_text_begins_at_the_loss_that_the_embedded_model_was_taught(backbone: Backbone) -> None:
    """Only answers are learned: the questions, which the model was never taught, would cost it 10 nats per token."""
    texts = load_texts("embedded:arithmetic-text", "text", "given")
    found = scan_texts(texts, backbone.tokenizer, **LIMITS | {"held_out": 128})
    roles: Any = SimpleNamespace(forward=choose(backbone.model))
    assert found.note is None
    assert text_loss(roles, found.held_out(), 4096) == pytest.approx(0.174, abs=0.0005)


# -- what a teacher reads that the student does not --------------------------------------------------------------------
def group_of(prompt, size):
    said = Completion(text="1", token_ids=(5,), logprobs=(0.0,), finish_reason=FinishReason.stop)
    return Group(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=said, policy_version=0),) * size)


def test_a_hint_stands_at_the_end_of_the_last_message_with_the_answer_in_it(make_prompt):
    hinted = with_hint(make_prompt("What is 1 + 1?", "2"), "The answer is {answer}.")
    assert hinted.messages == ({"role": "user", "content": "What is 1 + 1?\n\nThe answer is 2."},)
    assert hinted.token_ids == ()


def test_each_completion_has_its_prompts_tokens_with_the_hint(make_prompt, backbone):
    one, two = make_prompt("1?", "1"), make_prompt("What is 20 + 20?", "40")
    made = teacher_prompts([group_of(one, 2), group_of(two, 1)], "It is {answer}.", backbone.tokenizer, "chat")
    expected = [make_prompt(f"{text}\n\nIt is {answer}.").token_ids for text, answer in (("1?", 1), (two.id, 40))]
    assert made.dtype == torch.int64
    assert [tuple(row[row >= 0].tolist()) for row in made] == [expected[0], expected[0], expected[1]]
    assert (made[0, len(expected[0]) :] == -1).all()
    assert longest_with_hint([one, two], "It is {answer}.", backbone.tokenizer, "chat") == len(expected[1])


def test_an_answer_that_a_prompt_has_not_is_shown_to_no_teacher(make_prompt, backbone):
    prompts = [make_prompt("1?", "1"), make_prompt("2?", " "), make_prompt("3?", "")]
    with pytest.raises(UserError, match=r"2 train prompts have none, first 2\?, got 'It is {answer}\.'") as refused:
        longest_with_hint(prompts, "It is {answer}.", backbone.tokenizer, "chat")
    assert refused.value.key == "snapshot.teacher_hint"
    assert longest_with_hint(prompts, "Think.", backbone.tokenizer, "chat") > 0
