"""An environment of verifiers, as the Environments Hub has them: `pip install "verifiers<0.4"`. It needs no server."""

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import verifiers as vf
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.types import Response, ResponseMessage, ToolCall

from grpo_lightning import Environment, Question, Task, Turn
from grpo_lightning.tasks.task import Split
from grpo_lightning.types import Message, at_least, require


class VerifiersEnv(Environment, Task):
    """An environment of verifiers, by its name: a package that has `load_environment`.

    verifiers runs the rollout, and the policy is its client. So turns, tools, stop conditions and rewards are its own.
    Validation has the first `num_val` rows of the evaluation set, test the next. Where there is no such set, these rows
    are taken from the others, and training has the rest.

    Args:
        name: Name of the environment, such as `reverse-text`.
        arguments: Arguments of its `load_environment`.
        num_val: Rows held out for validation, and as many others for test.

    Raises:
        UsageError: `num_val` is below 1, no rows are left, or the rewards compare the rollouts of a group.
    """

    grader = "EnvironmentReward"

    def __init__(self, name: str, arguments: dict[str, Any] | None = None, num_val: int = 32) -> None:
        at_least("num_val", num_val, 1, "VerifiersEnv")
        self.name, self.arguments, self.num_val = name, json.dumps(arguments or {}), num_val
        environment = load(name, self.arguments)
        require(not environment.requires_group_rollouts, f"{name}: its rewards compare the rollouts of a group")
        keys = {"name", "description", "parameters"}
        functions = [tool.model_dump(include=keys) for tool in environment.tool_defs or []]
        self.tools = [{"type": "function", "function": function} for function in functions]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loads the environment, once for all processes that are copied from this one."""
        self.__dict__ |= state
        load(self.name, self.arguments)

    def questions(self, split: Split) -> Sequence[Question]:
        """The rows of a split."""
        environment = load(self.name, self.arguments)
        rows = [*environment.get_dataset()]
        held_out = environment.build_eval_dataset()
        if held_out is None:
            held_out, rows = rows[: 2 * self.num_val], rows[2 * self.num_val :]
        require(bool(rows), f"num_val={self.num_val}: {self.name} has no rows left to train on; give less")
        splits = {"train": rows, "val": [*held_out][: self.num_val]}
        chosen = splits.get(split, [*held_out][self.num_val : 2 * self.num_val])
        return [
            Question(text_of(row["prompt"][-1]), str(row.get("answer", "")), f"{split}:{index}", {"row": row})
            for index, row in enumerate(chosen)
        ]

    def reset(self, question: Question) -> list[Message]:
        """Begins a rollout. Returns its prompt."""
        self._loop, self._policy, self._num_seen = asyncio.new_event_loop(), Policy(), 0
        rollout = load(self.name, self.arguments).run_rollout(question.metadata["row"], self._policy, "policy", {})
        self._rollout = self._loop.create_task(rollout)
        return self._until_asked()

    def step(self, message: Message) -> Turn:
        """Gives the turn to the rollout. One with a call that cannot be read is answered here, and none is made."""
        calls = message.get("tool_calls", [])
        if errors := [call["error"] for call in calls if "error" in call]:
            answers = [{"role": "tool", "name": "tool", "content": error} for error in errors]
            return Turn(answers, num_failed_calls=len(errors))
        self._policy.turns.put_nowait((message["content"], calls))
        self._num_seen += 1
        return Turn(self._until_asked(), done=self._rollout.done())

    def outcome(self) -> float:
        """The reward of the rubric; 0 where a limit ended the rollout."""
        return float(self._rollout.result()["reward"]) if self._rollout.done() else 0.0

    def close(self) -> None:
        """Ends the rollout, which cleans up."""
        self._rollout.cancel()
        self._loop.run_until_complete(asyncio.gather(self._rollout, return_exceptions=True))

    def _until_asked(self) -> list[Message]:
        """Runs the rollout until it asks the policy. Returns the messages that are new; none where it has ended."""
        next_prompt = self._loop.create_task(self._policy.prompts.get())
        self._loop.run_until_complete(asyncio.wait({next_prompt, self._rollout}, return_when=asyncio.FIRST_COMPLETED))
        if not next_prompt.done():
            next_prompt.cancel()
            if error := self._rollout.result().get("error"):
                raise RuntimeError(str(error))
            return []
        messages = next_prompt.result()
        new_messages = messages[self._num_seen :]
        self._num_seen = len(messages)
        return [{"role": message["role"], "content": text_of(message)} for message in new_messages]


class Policy(OpenAIChatCompletionsClient):
    """The policy, as verifiers asks it: a prompt goes out, and a turn comes back."""

    def __init__(self) -> None:
        super().__init__(None)
        self.prompts, self.turns = asyncio.Queue[Any](), asyncio.Queue[Any]()

    async def get_response(self, prompt: Any, model: str, *arguments: Any, **options: Any) -> Response:
        """The policy's next turn."""
        await self.prompts.put(prompt)
        text, calls = await self.turns.get()
        made = [
            ToolCall(id=str(index), name=call["name"], arguments=json.dumps(call["arguments"]))
            for index, call in enumerate(calls)
        ]
        reason = "tool_calls" if made else "stop"
        message = ResponseMessage(content=text, finish_reason=reason, is_truncated=False, tool_calls=made or None)
        return Response(id="", created=0, model=model, message=message)


@cache
def load(name: str, arguments: str) -> Any:
    """The environment, loaded once per process."""
    return vf.load_environment(name, **json.loads(arguments))


def text_of(message: Any) -> str:
    """The text of a message, whose content may be text or parts."""
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
