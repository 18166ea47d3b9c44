"""Files of samples, and the server of `rlft rank` in a thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest

from rlft.commands.rank import Rankings, RankServer, questions_of

Served = Callable[..., RankServer]


@pytest.fixture
def write_samples(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines of `rlft sample`: of each prompt these answers, sampled by two models in turn."""

    def write(prompts: int = 6, answers: tuple[str, ...] = ("red", "green", "blue"), name: str = "samples") -> Path:
        rows = [
            {
                "prompt_id": f"p{p}",
                "index": i,
                "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Colour {p}?"}],
                "answer": "",
                "completion": f"{text} {p}",
                "token_ids": [1, 2],
                "finish_reason": "stop",
                "rewards": {},
                "reward": 0.5,
                "model": f"secret-model-{i % 2}",
                "tokenizer": "0" * 12,
            }
            for p in range(prompts)
            for i, text in enumerate(answers)
        ]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:

        def started(samples: Path, out: str = "out.jsonl") -> RankServer:
            rankings = Rankings(tmp_path / out, questions_of([str(samples)], "anna", 0))
            server = RankServer(rankings)
            Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return server

        yield started
