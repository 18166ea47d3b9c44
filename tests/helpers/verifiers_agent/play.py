"""Plays a row with verifiers' own environment of a single agent: `python play.py <train or eval> <tokenizer>`.

It runs in an environment of its own, which has verifiers and not rlft. `train` is verifiers' client that tokenises by
itself and asks for tokens, `eval` the one that sends messages.
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from sums_taskset import SumsConfig
from verifiers.v1.utils.loaders import load_environment

kind, tokenizer = sys.argv[1:]
common = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
if kind == "train":
    from renderers.configs import DefaultRendererConfig

    client = vf.TrainClientConfig(**common, renderer=DefaultRendererConfig(), renderer_model_name=tokenizer)
else:
    client = vf.EvalClientConfig(**common)
taskset = SumsConfig(id="sums_taskset", row=sys.stdin.read())
agent = vf.AgentConfig(runtime=vf.SubprocessConfig())
env = load_environment(vf.SingleAgentEnvConfig(id="single-agent", taskset=taskset, agent=agent))


async def main() -> vf.Episode:
    context = vf.ModelContext(model=os.environ["OPENAI_MODEL"], client=client)
    async with env.serving():
        [task] = env.taskset
        return await env.run_episode(task, context)


episode = asyncio.run(main())
if not episode.ok:
    sys.exit(str([*episode.errors, *(error for trace in episode.traces for error in trace.errors)])[-2000:])
[trace] = episode.traces
print(json.dumps({"reward": trace.reward}))
