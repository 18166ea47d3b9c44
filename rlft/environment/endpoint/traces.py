"""Records of the conversations of agents, so that a resumed run repeats them.

An agent may depend on the clock or on the world, and is not a function of seeds. So each call of `sample` is recorded
in the run's folder before anything is learned from it. A resume reads it when it repeats steps after its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlft.logger.jsonl import completion_of, conversation_fields
from rlft.system.files import write_atomically
from rlft.types import Group, Prompt, Rollout, Sampling, UserError

FOLDER = "traces"
FORMAT = 1
_NAME = re.compile(r"version_(\d+)-[0-9a-f]{16}\.json")


class Traces:
    """The traces of a run.

    Args:
        folder: the run's folder.
        kept: number of the newest versions of the policy that a resume may have to repeat; None: all.
    """

    def __init__(self, folder: Path, kept: int | None) -> None:
        self.folder, self._kept = folder / FOLDER, kept

    def read(
        self, version: int | None, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling
    ) -> list[Group] | None:
        """The recorded groups for these arguments; None if there is no record.

        Raises:
            UserError: the record is damaged.
        """
        file = self._file(version, prompts, n, seeds, sampling)
        if not file.is_file():
            return None
        head, _, payload = file.read_bytes().partition(b"\n")
        try:
            header = json.loads(head)
            if header["format"] != FORMAT:
                raise ValueError(f"its format is {header['format']}, and not {FORMAT}")
            if header["sha256"] != hashlib.sha256(payload).hexdigest():
                raise ValueError("its content is not what was written")
            groups = json.loads(payload)
        except (ValueError, KeyError, TypeError) as error:
            remedy = "restore it from a copy; or delete it: agents then play these conversations again, and differently"
            raise UserError("environment", f"a recorded trace is damaged ({error})", got=file, remedy=remedy) from None
        return [_group_of(values, prompt) for values, prompt in zip(groups, prompts, strict=True)]

    def write(
        self,
        version: int | None,
        prompts: Sequence[Prompt],
        n: int,
        seeds: Sequence[int],
        sampling: Sampling,
        groups: Sequence[Group],
    ) -> None:
        """Records the groups for these arguments, and removes records that no resume can need.

        Raises:
            DiskError: it cannot be written.
        """
        file = self._file(version, prompts, n, seeds, sampling)
        self.folder.mkdir(parents=True, exist_ok=True)
        payload = json.dumps([_values_of(group) for group in groups]).encode()
        head = json.dumps({"format": FORMAT, "sha256": hashlib.sha256(payload).hexdigest()}).encode()
        write_atomically(file, head + b"\n" + payload)
        if self._kept is None or version is None:
            return
        for old in self.folder.iterdir():
            match = _NAME.fullmatch(old.name)
            if match and int(match[1]) < version - self._kept:
                old.unlink()

    def _file(
        self, version: int | None, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling
    ) -> Path:
        prompt_inputs = [[prompt.id, list(prompt.token_ids)] for prompt in prompts]
        inputs = json.dumps([version, prompt_inputs, n, list(seeds), asdict(sampling)]).encode()
        return self.folder / f"version_{version or 0:06d}-{hashlib.sha256(inputs).hexdigest()[:16]}.json"


def _values_of(group: Group) -> dict[str, Any]:
    return {
        "messages": [dict(message) for message in group.prompt.messages],
        "token_ids": list(group.prompt.token_ids),
        "rollouts": [
            {
                "completion": rollout.completion.text,
                "token_ids": list(rollout.completion.token_ids),
                "logprobs": list(rollout.completion.logprobs),
                "finish_reason": str(rollout.completion.finish_reason),
                "policy_version": rollout.policy_version,
                **conversation_fields(rollout.completion),
            }
            for rollout in group.rollouts
        ],
    }


def _group_of(values: Mapping[str, Any], data_prompt: Prompt) -> Group:
    prompt = replace(data_prompt, messages=tuple(values["messages"]), token_ids=tuple(values["token_ids"]))
    return Group(
        prompt=prompt,
        rollouts=tuple(
            Rollout(prompt=prompt, completion=completion_of(line), policy_version=line["policy_version"])
            for line in values["rollouts"]
        ),
    )
