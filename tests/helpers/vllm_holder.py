"""Holds a vLLM engine until it is told to go; test_engine.py interrupts it with Ctrl-C, then kills it.

Usage: python vllm_holder.py <model folder> <adapter folder>. Prints a line of JSON at each stage.
"""

import json
import os
import signal
import sys
from pathlib import Path

from real_engines import open_vllm, vllm_engine

from rlft.types import Adapter, Prompt, Sampling


def say(stage: str, **facts: object) -> None:
    print(json.dumps({"stage": stage, **facts}), flush=True)


def main(model_path: str, adapter_path: str) -> None:
    from safetensors.torch import load_file

    # A shell ignores Ctrl-C in what it starts in the background, and everything started from there inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    generator = open_vllm(model_path, vllm_engine(max_num_seqs=64))
    weights = load_file(Path(adapter_path) / "adapter_model.safetensors")
    config = json.loads((Path(adapter_path) / "adapter_config.json").read_text())
    generator.load(Adapter(version=0, weights=weights, config=config))
    prompts = [Prompt(id=str(i), messages=(), answer="", token_ids=(5, 6, 7, i)) for i in range(10, 40)]
    say("ready", pid=os.getpid(), folders=[str(generator._files.root)])
    try:
        while True:
            generator.sample(prompts, 8, range(0, 8 * len(prompts), 8), Sampling(max_tokens=64, temperature=1.0))
    except KeyboardInterrupt:
        say("interrupted")
    groups = generator.sample(prompts[:1], 2, [3], Sampling(max_tokens=8, temperature=1.0))
    say("still working", completions=len(groups[0].rollouts))
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
