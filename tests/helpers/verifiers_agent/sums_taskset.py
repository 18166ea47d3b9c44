"""A taskset and its harness for verifiers: sums, asked in two turns of a plain chat."""

import json

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(f"<answer>{self.data.answer}</answer>" in trace.last_reply)

    @vf.reward(weight=0.1)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / (1 + len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    row: str = "{}"


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        row = json.loads(self.config.row)
        prompt = row["prompt"][-1]["content"]
        return [SumsTask(SumsData(prompt=prompt, answer=row["answer"]), self.config.task)]


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
        _, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = reply.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumsHarness", "SumsTaskset"]
