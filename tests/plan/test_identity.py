"""A model's identity: forms of its files x changes, alone and drawn together, each with the parts that it changes."""

import json
import os
import random
import shutil
from dataclasses import replace

import pytest
import torch
from in_one_test import each
from safetensors.torch import load_file, save_file

from rlft.config.compose import compose
from rlft.model.backbone import read_config, source
from rlft.plan import identity
from rlft.plan.identity import digest_of_weights, fingerprints, of_source
from rlft.runs import run_folder
from rlft.runs.fingerprints import PARTS, differing, models_in
from rlft.types import UserError

FIRST, SECOND = (f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1))
LAST = "model.norm.weight"


# -- forms: how a model lies on disk -----------------------------------------------------------------------------------
def sharded(tensors, folder, suffix, stem, shards, save):
    """Shards of whole tensors in the order of the names, with an index."""
    names, places = sorted(tensors), {}
    for shard in range(shards):
        file = f"{stem}-{shard + 1:05d}-of-{shards:05d}.{suffix}"
        places |= dict.fromkeys(names[shard::shards], file)
        save({name: tensors[name] for name in names[shard::shards]}, folder / file)
    index = "model.safetensors.index.json" if suffix == "safetensors" else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


FORMS = {
    "single": lambda tensors, folder: save_file(tensors, folder / "model.safetensors"),
    "sharded": lambda tensors, folder: sharded(tensors, folder, "safetensors", "model", 3, save_file),
    "bin": lambda tensors, folder: torch.save(tensors, folder / "pytorch_model.bin"),
    "sharded bin": lambda tensors, folder: sharded(tensors, folder, "bin", "pytorch_model", 3, torch.save),
}


def rewrite(folder, form, tensors):
    """Writes the weights again in this form, in place of those that are there."""
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.index.json")]:
        file.unlink()
    FORMS[form](tensors, folder)


@pytest.fixture(scope="module")
def tensors(tiny_path):
    """Of the embedded model, with its first two layers alone."""
    found = load_file(tiny_path / "model.safetensors")
    return {name: tensor for name, tensor in found.items() if not any(f"layers.{n}." in name for n in (2, 3))}


@pytest.fixture(scope="module")
def make(tiny_path, tensors, tmp_path_factory):
    """Makes the folder of a model in this form."""

    def make_folder(form):
        folder = tmp_path_factory.mktemp("model") / "x"
        shutil.copytree(tiny_path, folder)
        config = json.loads((folder / "config.json").read_text())
        kinds = config["layer_types"][:2]
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "layer_types": kinds}))
        rewrite(folder, form, tensors)
        return folder

    return make_folder


# -- changes: {name: (what is done to the folder, the parts that are others then)} -------------------------------------
def json_of(file, edit):
    def change(folder, form, tensors):
        fields = json.loads((folder / file).read_text())
        edit(fields)
        (folder / file).write_text(json.dumps(fields))

    return change


def of_the_tokenizer(**keys):
    return json_of("tokenizer_config.json", lambda fields: fields.update(keys))


def weights(edit):
    def change(folder, form, tensors):
        new = {name: tensor.clone() for name, tensor in tensors.items()}
        edit(new)
        rewrite(folder, form, new)

    return change


def of_a_number(name, place):
    def edit(new):
        new[name].view(-1)[place] += 1e-3

    return weights(edit)


def swapped_tensors(new):
    new[FIRST], new[SECOND] = new[SECOND], new[FIRST]


def swapped_ids(fields):
    vocabulary = fields["model"]["vocab"]
    first, second = sorted(vocabulary)[3:5]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def another_merge(fields):
    fields["model"]["vocab"]["12"] = 300
    fields["model"]["merges"].append(["1", "2"])


def touched(folder, form, tensors):
    for file in folder.iterdir():
        os.utime(file, (1, 1))


def edited_template(folder, form, tensors):
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        text = (folder / file).read_text() if (folder / file).is_file() else ""
        (folder / file).write_text(text.replace("<|im_start|>", "<|im_start|> "))


def moved_template(folder, form, tensors):
    """Into tokenizer_config.json, where it used to be."""
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text()
        json_of("tokenizer_config.json", lambda fields: fields.update(chat_template=template))(folder, form, tensors)
        (folder / "chat_template.jinja").unlink()


def stray(folder, form, tensors):
    """Files that transformers does not load."""
    torch.save({"x": torch.zeros(3)}, folder / "optimizer.bin")
    torch.save({"x": torch.zeros(3)}, folder / "training_args.bin")
    if form == "single":
        torch.save({"x": torch.zeros(3)}, folder / "pytorch_model.bin")
        save_file({"x": torch.zeros(3)}, folder / "consolidated.safetensors")


SAME = {
    "nothing": lambda folder, form, tensors: None,
    "touched": touched,
    "written again": weights(lambda new: None),
    "config indented": lambda folder, form, tensors: (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()), indent=7, sort_keys=True)
    ),
    "the config's own note": json_of("config.json", lambda fields: fields.update(transformers_version="1.2.3")),
    "tokenizer indented": json_of("tokenizer.json", lambda fields: None),
    "template moved": moved_template,
    "stray files": stray,
    "sampling defaults": json_of("generation_config.json", lambda fields: fields.update(temperature=0.3, top_k=7)),
    "no ends but the config's": json_of("generation_config.json", lambda fields: fields.pop("eos_token_id")),
    "no generation config": lambda folder, form, tensors: (folder / "generation_config.json").unlink(),
    "eos as a list": json_of("generation_config.json", lambda fields: fields.update(eos_token_id=[2])),
}
OTHERS = {
    "first number": (of_a_number(FIRST, 0), "weights"),
    "middle number": (of_a_number(SECOND, 5000), "weights"),
    "last number": (of_a_number(LAST, -1), "weights"),
    "tensors swapped": (weights(swapped_tensors), "weights"),
    "a tensor less": (weights(lambda new: new.pop(LAST)), "weights"),
    "another dtype": (weights(lambda new: new.update({LAST: new[LAST].to(torch.bfloat16)})), "weights"),
    "another shape": (weights(lambda new: new.update({FIRST: new[FIRST].reshape(-1)})), "weights"),
    "rope": (json_of("config.json", lambda fields: fields["rope_parameters"].update(rope_theta=10001.0)), "config"),
    "norm": (json_of("config.json", lambda fields: fields.update(rms_norm_eps=1e-5)), "config"),
    "two ends": (json_of("generation_config.json", lambda fields: fields.update(eos_token_id=[2, 5])), "ends"),
    "ids swapped": (json_of("tokenizer.json", swapped_ids), "tokenizer"),
    "a merge more": (json_of("tokenizer.json", another_merge), "tokenizer"),
    "the end's name": (of_the_tokenizer(eos_token="<|im_start|>"), "tokenizer"),
    "special tokens split": (of_the_tokenizer(split_special_tokens=True), "tokenizer"),
    "spaces cleaned up": (of_the_tokenizer(clean_up_tokenization_spaces=True), "tokenizer"),
    "template": (edited_template, "template"),
}


def parts_of(folder, config):
    settings = replace(config, path=str(folder))
    return of_source(source(settings), read_config(settings), "base", "model.path")


def apart(before, now):
    return set(differing(before, now).parts)


@pytest.fixture(scope="module")
def base(model_config):
    return model_config()


@each("form", FORMS)
def test_each_change_changes_its_part_and_no_other_in_every_form(form, make, base, tensors):
    folder = make(form)
    before = parts_of(folder, base)
    original = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name, (change, parts) in {
        **{name: (change, set[str]()) for name, change in SAME.items()},
        **{name: (change, {part}) for name, (change, part) in OTHERS.items()},
    }.items():
        change(folder, form, tensors)
        assert apart(before, parts_of(folder, base)) == parts, name
        for file in folder.iterdir():
            file.unlink()
        for file, content in original.items():
            (folder / file).write_bytes(content)


@each("seed", range(12))
def test_changes_together_change_their_parts(seed, make, base, tensors):
    draw = random.Random(seed)
    form = draw.choice(sorted(FORMS))
    folder = make(form)
    before = parts_of(folder, base)
    of_weights = [name for name, (_, part) in OTHERS.items() if part == "weights"]  # which write all of them again
    names = [draw.choice(of_weights), *draw.sample(sorted(OTHERS.keys() - of_weights), 2)][draw.randrange(2) :]
    for name in draw.sample(sorted(SAME.keys() - {"written again", "no generation config"}), 3):
        SAME[name](folder, form, tensors)
    for name in names:
        OTHERS[name][0](folder, form, tensors)
    assert apart(before, parts_of(folder, base)) == {OTHERS[name][1] for name in names}, names


def test_equal_tensors_are_equal_in_any_safetensors_files(make, base, tensors):
    folder = make("single")
    before = parts_of(folder, base)
    for shards in (1, 2, 5, len(tensors)):
        rewrite(folder, "single", {})
        (folder / "model.safetensors").unlink()
        sharded(tensors, folder, "safetensors", f"part{shards}", shards, save_file)
        assert apart(before, parts_of(folder, base)) == set(), shards
    changed = {**tensors, LAST: tensors[LAST] + 1}
    sharded(changed, folder, "safetensors", "part5", 5, save_file)
    assert apart(before, parts_of(folder, base)) == {"weights"}


def test_a_bin_of_the_older_format_is_read_as_a_file(tensors, tmp_path):
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    before, content = digest_of_weights(tmp_path), bytearray(file.read_bytes())
    file.write_bytes(content)
    assert digest_of_weights(tmp_path) == before
    content[-1] ^= 1
    file.write_bytes(content)
    assert digest_of_weights(tmp_path) != before


def test_a_bin_is_the_same_under_another_name(make, base):
    folder = make("bin")
    before = parts_of(folder, base)
    (folder / "pytorch_model.bin").rename(folder / "all.bin")
    index = {"metadata": {}, "weight_map": {LAST: "all.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert apart(before, parts_of(folder, base)) == set()


# -- large weights -----------------------------------------------------------------------------------------------------
def test_of_large_weights_every_tensor_is_read_at_its_ends_and_between(tensors, tmp_path, monkeypatch):
    """Blocks of 64 bytes, 2 of each of 30 tensors: a change of a whole tensor is seen, of any."""
    monkeypatch.setattr(identity, "WHOLE", 1000)
    monkeypatch.setattr(identity, "BLOCK", 64)
    monkeypatch.setattr(identity, "BLOCKS", 2 * len(tensors))
    for form in ("single", "sharded", "bin"):
        rewrite(tmp_path, form, tensors)
        before = digest_of_weights(tmp_path)
        assert before == digest_of_weights(tmp_path)
        for name, tensor in tensors.items():
            rewrite(tmp_path, form, {**tensors, name: tensor + 1e-3})
            assert digest_of_weights(tmp_path) != before, (form, name)
    rewrite(tmp_path, "single", tensors)
    before = digest_of_weights(tmp_path)
    sharded(tensors, tmp_path, "safetensors", "x", 4, save_file)
    (tmp_path / "model.safetensors").unlink()
    assert digest_of_weights(tmp_path) == before, "which blocks are read does not depend on the shards"


def test_of_sixteen_gigabytes_sixty_megabytes_are_read(tmp_path, monkeypatch):
    """In a sparse file: 291 tensors, 4096 // 291 = 14 blocks of 16 KiB of each."""
    length = 16 * 2**30 // 291
    header = {f"t{n}": {"dtype": "U8", "shape": [length], "data_offsets": [n * length, (n + 1) * length]}
              for n in range(291)}  # fmt: skip
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 291 * length)
    read = []
    spread = identity._spread

    def noted(length, blocks):
        read.append(blocks)
        return spread(length, blocks)

    monkeypatch.setattr(identity, "_spread", noted)
    before = digest_of_weights(tmp_path)
    assert read == [14] * 291
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(8 + len(text) + 200 * length)  # the first byte of one tensor
        file.write(b"\1")
    assert digest_of_weights(tmp_path) != before


# -- the hub's cache ---------------------------------------------------------------------------------------------------
COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub, which does not answer."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("rlft.model.network_files.hub_answers", lambda: False)
    monkeypatch.setattr("rlft.system.hub.hub_answers", lambda: False)
    return tmp_path / "hub" / "models--org--name"


def push(hub, folder, commit, without=()):
    """Puts these files into the cache as this commit, the newest of the main branch."""
    snapshot = hub / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir(exist_ok=True)
    (hub / "blobs").mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.name not in without:
            blob = hub / "blobs" / f"{commit}_{file.name}"
            shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(blob)
    (hub / "refs" / "main").write_text(commit)


@each("form", FORMS)
def test_a_hub_id_is_told_by_what_is_in_its_commit(form, make, base, tensors, hub):
    shutil.rmtree(hub, ignore_errors=True)
    folder = make(form)
    local = parts_of(folder, base)
    remote = replace(base, path="org/name")

    def now(**keys):
        settings = replace(remote, **keys)
        return of_source(source(settings), read_config(settings), "base", "model.path")

    push(hub, folder, COMMITS[0])
    before = now()
    assert before["base_commit_fingerprint"] == COMMITS[0]
    assert apart(before, local) == apart(local, before) == set(), "a copy of the files is the same"
    OTHERS["last number"][0](folder, form, tensors)
    OTHERS["template"][0](folder, form, tensors)
    push(hub, folder, COMMITS[1])
    assert apart(before, now()) == {"weights", "template"}
    assert apart(before, now(revision=COMMITS[0])) == set()


def test_what_the_cache_lacks_is_told_by_the_commit(make, base, hub):
    folder = make("sharded")
    shards = tuple(file.name for file in folder.glob("*.safetensors"))
    remote = replace(base, path="org/name")
    push(hub, folder, COMMITS[0], without=shards)
    before = of_source(source(remote), read_config(remote), "base", "model.path")
    assert "base_weights_fingerprint" not in before
    for name in shards:  # downloaded by the run
        (hub / "snapshots" / COMMITS[0] / name).symlink_to(folder / name)
    loaded = of_source(source(remote), read_config(remote), "base", "model.path")
    assert apart(before, loaded) == set()
    push(hub, folder, COMMITS[1])
    assert apart(before, of_source(source(remote), read_config(remote), "base", "model.path")) == {"commit"}
    assert apart(loaded, of_source(source(remote), read_config(remote), "base", "model.path")) == set()
    assert apart(before, parts_of(folder, base)) == {"commit"}, "which nothing proves to be the same"


def test_a_run_names_the_commit_that_it_began_with(make, hub, tmp_path, monkeypatch):
    folder = make("single")
    push(hub, folder, COMMITS[0])

    def kept(resumed=None, **keys):
        plain = compose([])
        model = {**plain["model"], "path": "org/name", **keys}
        return run_folder.with_kept_values({**plain, "model": model}, resumed)

    begun = kept()
    assert begun["model"]["revision"] == COMMITS[0]
    (tmp_path / "run").mkdir()
    run_folder.claim(tmp_path / "run", begun, {}, 3)
    push(hub, folder, COMMITS[1])
    assert kept()["model"]["revision"] == COMMITS[1]
    assert kept(tmp_path / "run")["model"]["revision"] == COMMITS[0]
    assert kept(tmp_path / "run", revision="main")["model"]["revision"] == "main", "which the run's config refuses"
    for path in ("embedded:tiny-arithmetic", str(folder), "elsewhere/name"):
        assert kept(path=path)["model"]["revision"] is None
    assert kept(revision="v1")["model"]["revision"] == "v1"


# -- records -----------------------------------------------------------------------------------------------------------
def test_code_counts_where_it_is_run(make, base):
    folder = make("single")
    (folder / "modeling_x.py").write_text("x = 1\n")
    plain, trusting = base, replace(base, trust_remote_code=True)
    before = parts_of(folder, plain), parts_of(folder, trusting)
    (folder / "modeling_x.py").write_text("x = 2\n")
    assert apart(before[0], parts_of(folder, plain)) == set()
    assert apart(before[1], parts_of(folder, trusting)) == {"code"}


def test_a_record_without_parts_is_compared_by_its_one_digest(make, base):
    now = fingerprints(replace(base, path=str(make("single"))))
    assert models_in(now) == ["base"]
    old = {"base_fingerprint": now["base_fingerprint"]}
    assert not differing(old, now)
    assert apart({"base_fingerprint": "0123"}, now) == {"files"}
    assert not differing({}, now)  # an adapter that another program made


def test_two_digests_are_the_same_part_if_one_of_them_is():
    before = {"base_config_fingerprint": "ab/cd"}
    for value, is_same in {"ab/cd": True, "ab/xx": True, "xx/cd": True, "cd/ab": False, "/": False}.items():
        assert (apart(before, {"base_config_fingerprint": value}) == set()) is is_same, value


def test_weights_that_cannot_be_read_are_refused_by_the_key(make, base):
    folder = make("single")
    for content in (b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]", b'\x10\0\0\0\0\0\0\0{"a": {"x": 1}}  '):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=r"^model\.path: its weights cannot be read"):
            parts_of(folder, base)
    assert PARTS["weights"] == "weights"
