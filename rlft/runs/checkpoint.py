"""Checkpoints: adapter-sized, whole or absent, checked before they are used. Nothing pickled is read or written.

    checkpoints/step_000100/
      policy/ reference/ old/ critic/ ..   PEFT adapters: adapter_config.json, adapter_model.safetensors;
                              head.safetensors where the role has a scalar head; rlft.json: role, base, step
      model/ reference/       complete Hugging Face models, where the model's own weights are trained
      sampled.safetensors     token ids and log-probs of the groups that are sampled ahead (overlap.lag=1), whose texts
                              are in state.json; or sampler.safetensors: the adapter that samples them
      drafts.safetensors, evaluation_drafts.safetensors  the newest completions, from which drafts come
                              (generation.drafts)
      curriculum.safetensors  right and wrong completions of the prompts so far, where a curriculum counts them
      reference_logprobs.safetensors  for preference optimisation: the reference's log-probs of the rankings so far
      optimizer.safetensors   moments by parameter name, for every role that learns; the reward model's pairs of tokens
      state.json              the step and everything else that changes
      MANIFEST                sha256 of each file above, one a line, as `sha256sum -c` reads it

A checkpoint is written to a temporary folder next to its place, flushed to disk and renamed: a kill at any time leaves
either the whole checkpoint or none, and the one before untouched.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.runs import fingerprints
from rlft.runs.run_status import FORMAT, KEY, NewerError, check_format
from rlft.system.disk import BLOCK, writing
from rlft.system.files import atomic_folder, digest_of_each, digest_of_file, digest_of_json
from rlft.types import UserError

if TYPE_CHECKING:
    from torch import Tensor  # not at run time: commands that only read a run, or refuse one, do not wait for torch

MANIFEST = "MANIFEST"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
ADAPTER, HEAD = "adapter_model.safetensors", "head.safetensors"
WRITING = ".writing_"
RECORD = "rlft.json"
SAMPLED, SAMPLER = "sampled", "sampler"
"""Names of what was sampled ahead for the next step, and of the adapter that would sample it."""
DRAFTS, EVALUATION_DRAFTS = "drafts", "evaluation_drafts"
"""Names of the completions from which drafts come, in training and in evaluations."""
CHECKSUMS = "base_checksums"
"""Key in state.json of the checksums by which a resume notices that a base shared with the engine has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Everything that changes in a run. `records` are for runs that start from a role's folder, not for resumes."""

    step: int
    adapters: Mapping[str, Mapping[str, Tensor]]  # {role: {PEFT name: tensor}}
    adapter_config: Mapping[str, Any]  # the fields of adapter_config.json, the same for all adapters
    optimizer: Mapping[str, Tensor]  # {name: tensor} of all optimizers' moments
    state: Mapping[str, Any]  # plain values, saved as JSON
    heads: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # a role may have one without an adapter
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # {role: further fields of its rlft.json}
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # each saved as <name>.safetensors
    write_folders: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)  # {whole model's folder: writer}
    folder: Path | None = None


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after.

    >>> step_of(Path("checkpoints/step_000040"))
    40
    """
    return int(folder.name.removeprefix("step_"))


def saved_step(folder: Path) -> int:
    """The number of steps after which this checkpoint was written, whatever its folder is called."""
    return json.loads((folder / STATE).read_text())["step"]


def save(root: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes `root/step_N`, and removes all others but the newest `keep` - 1 before it. Returns the folder."""
    final = root / f"step_{checkpoint.step:06d}"
    with writing(final, num_bytes(checkpoint)):
        root.mkdir(parents=True, exist_ok=True)
        for left_by_a_kill in root.glob(f"{WRITING}*"):
            shutil.rmtree(left_by_a_kill)
        # A step that is repeated because its checkpoint is damaged replaces that checkpoint.
        with atomic_folder(final, root / f"{WRITING}{final.name}", replaces=True) as temporary:
            _write(temporary, checkpoint)
    others = [folder for folder in finished(root) if folder != final]
    earlier = [folder for folder in others if step_of(folder) < checkpoint.step]
    later = [folder for folder in others if step_of(folder) > checkpoint.step]
    # Later checkpoints were damaged when the run went back to an earlier one: they must not displace good ones.
    for unneeded in [*later, *earlier[: max(0, len(earlier) - keep + 1)]]:
        # A folder that cannot be removed now (NFS, while it is read) is removed the next time.
        shutil.rmtree(unneeded, ignore_errors=True)
    return final


def num_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of its tensors, and a few blocks for each file; without the folders of `write_folders`."""
    roles = {*checkpoint.adapters, *checkpoint.heads}
    of_names = (checkpoint.adapters, checkpoint.heads, checkpoint.tensors)
    groups = [*(group for named in of_names for group in named.values()), checkpoint.optimizer]
    tensors = sum(tensor.numel() * tensor.element_size() for group in groups for tensor in group.values())
    return tensors + BLOCK * (4 * len(groups) + 3 * len(roles) + 3)


def _write(temporary: Path, checkpoint: Checkpoint) -> None:
    for role in sorted({*checkpoint.adapters, *checkpoint.heads}):
        (temporary / role).mkdir()
        if role in checkpoint.adapters:
            _write_tensors(temporary / role / ADAPTER, checkpoint.adapters[role])
            _write_json(temporary / role / "adapter_config.json", checkpoint.adapter_config)
        if role in checkpoint.heads:
            _write_tensors(temporary / role / HEAD, checkpoint.heads[role])
        _write_json(temporary / role / RECORD, record_of(checkpoint, role))
    for name, write in checkpoint.write_folders.items():
        write(temporary / name)
    for name, tensors in checkpoint.tensors.items():
        _write_tensors(temporary / f"{name}.safetensors", tensors)
    _write_tensors(temporary / OPTIMIZER, checkpoint.optimizer)
    _write_json(temporary / STATE, {KEY: FORMAT, "step": checkpoint.step, **checkpoint.state})
    _write_manifest(temporary)


def record_of(checkpoint: Checkpoint, role: str) -> dict[str, Any]:
    record = {"role": role, "step": checkpoint.step, "base_fingerprint": checkpoint.state.get("base_fingerprint")}
    return {**record, **fingerprints.recorded(checkpoint.state), **checkpoint.records.get(role, {})}


def parts_of(checkpoint: Checkpoint) -> dict[str, str]:
    """{part: its sha256} of all that the checkpoint holds but `write_folders`, the checksums of a shared base, and what
    was sampled ahead: a run that is made longer has not sampled ahead after what was its last step, and the completions
    of the step after it have a digest of their own, as have those that drafts come from."""
    return digest_of_each(tensors_of_parts(checkpoint)) | plain_parts(checkpoint)


def tensors_of_parts(checkpoint: Checkpoint) -> dict[str, Mapping[str, Tensor]]:
    """{part: its tensors} of those parts that have tensors."""
    apart = (SAMPLED, SAMPLER, DRAFTS, EVALUATION_DRAFTS)
    tensors = {name: of_name for name, of_name in checkpoint.tensors.items() if name not in apart}
    named = {"adapters": checkpoint.adapters, "tensors": tensors}
    heads = {f"{role}/{n}": t for role, of_role in checkpoint.heads.items() for n, t in of_role.items()}
    return {
        **{f"{kind}/{name}": of_name for kind, groups in named.items() for name, of_name in groups.items()},
        # Each tensor apart: a reward model's bias, its center, takes a forward pass and is made only for what is saved.
        **{f"heads/{name}": {name: tensor} for name, tensor in heads.items()},
        "optimizer": checkpoint.optimizer,
    }


def plain_parts(checkpoint: Checkpoint) -> dict[str, str]:
    """{part: its sha256} of the others."""
    state = {key: value for key, value in checkpoint.state.items() if key not in (CHECKSUMS, SAMPLED)}
    roles = {*checkpoint.adapters, *checkpoint.heads}
    # A base that has moved is told by its fingerprint, which is in the state.
    config = {key: value for key, value in checkpoint.adapter_config.items() if key != "base_model_name_or_path"}
    return {
        "state": digest_of_json([checkpoint.step, state, config]),
        "records": digest_of_json({role: record_of(checkpoint, role) for role in roles}),
    }


def change_state(folder: Path, values: Mapping[str, Any]) -> None:
    """Replaces values in the state.json of a checkpoint that nothing refers to yet."""
    state = json.loads((folder / STATE).read_text())
    _write_json(folder / STATE, {**state, **values})
    _write_manifest(folder)


def _write_manifest(folder: Path) -> None:
    lines = [f"{digest_of_file(f)}  {f.relative_to(folder)}" for f in _files(folder)]
    (folder / MANIFEST).write_text("\n".join(lines) + "\n")


def finished(root: Path) -> list[Path]:
    """Checkpoint folders by step, oldest first, without those that a kill has left half written."""
    folders = (p for p in root.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdecimal())
    return sorted(folders, key=step_of)  # by number: from a million steps on, names have a digit more


def load_newest(root: Path, say: Callable[[str], None]) -> Checkpoint | None:
    folder = newest_to_resume(root, say)
    return None if folder is None else load(folder)


def newest_to_resume(root: Path, say: Callable[[str], None]) -> Path | None:
    """Like `newest_whole`, but refuses a run of whose checkpoints none is whole, which must not restart at step 0."""
    folder = newest_whole(root, say)
    if folder is None and finished(root):
        remedy = "start the run again in a new folder"
        raise UserError("resume", "every checkpoint of this run is damaged", got=root, remedy=remedy)
    return folder


def newest_whole(root: Path, say: Callable[[str], None]) -> Path | None:
    """The folder of the newest checkpoint that is whole; damaged ones are reported through `say` and skipped."""
    for folder in reversed(finished(root)):
        damage = find_damage(folder)
        if damage is None:
            return folder
        say(f"checkpoint {folder.name} is damaged ({damage}); going back to the one before")
    return None


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None if all files match its manifest.

    Raises UserError: it is whole, but was written by a newer rlft: going back to an earlier one would lose it.
    """
    try:
        lines = (folder / MANIFEST).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return f"{MANIFEST} cannot be read"
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    # All files must be listed: otherwise the files that a truncated manifest lacks would not be checked.
    unlisted = {STATE, OPTIMIZER, *(str(f.relative_to(folder)) for f in _files(folder))} - listed.keys()
    if unlisted:
        return f"{MANIFEST} does not list {min(unlisted)}"
    for name, digest in listed.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        try:
            if digest_of_file(file) != digest:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    try:
        check_format(json.loads((folder / STATE).read_bytes()))
    except NewerError as error:
        raise UserError("checkpoint", f"its {STATE} {error}", got=folder, remedy="update rlft") from None
    except (ValueError, RecursionError):
        return f"{STATE} is not JSON"
    return None


def load(folder: Path) -> Checkpoint:
    from safetensors.torch import load_file

    state = json.loads((folder / STATE).read_text())
    state.pop(KEY, None)

    adapters, heads = (
        {file.parent.name: load_file(file) for file in sorted(folder.glob(f"*/{name}"))} for name in (ADAPTER, HEAD)
    )
    configs = sorted(folder.glob("*/adapter_config.json"))
    return Checkpoint(
        step=state.pop("step"),
        adapters=adapters,
        adapter_config=json.loads(configs[0].read_text()) if configs else {},
        optimizer=load_file(folder / OPTIMIZER),
        state=state,
        heads=heads,
        records={file.parent.name: json.loads(file.read_text()) for file in folder.glob(f"*/{RECORD}")},
        tensors={file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors")) if file.name != OPTIMIZER},
        folder=folder,
    )


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    contiguous = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(contiguous, file, metadata={"format": "pt"})
    set_usual_mode(file, file.parent)


def set_usual_mode(path: Path, folder: Path) -> None:
    """Gives a file or folder the mode that the umask gave to `folder`, which was made by mkdir.

    The safetensors library writes files that only their owner can read.
    """
    path.chmod(folder.stat().st_mode & (0o777 if path.is_dir() else 0o666))


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
