"""Environments of OpenEnv, by the addresses of their servers: `pip install openenv`."""

import json
from collections.abc import Sequence
from typing import Any

import requests
from openenv.core.generic_client import GenericEnvClient

from grpo_lightning import Environment, Question, Task, Turn
from grpo_lightning.tasks.task import Split
from grpo_lightning.types import Message, at_least, require

SEED = "seed"  # the key of a question's metadata that holds its seed


class OpenEnv(Environment, Task):
    """An environment of OpenEnv, by the address of its server. Each conversation holds a session there.

    The server must allow as many sessions as there are conversations at once: `max_concurrent_envs` of OpenEnv. A group
    begins with the same seed, if the environment takes one. Validation has the first `num_val` seeds, test (and
    predict) the next `num_val`, training the ones after them. `ImportedEnv` has tasks instead of seeds, and tools.

    Args:
        url: Address of the server, such as `http://localhost:8000`.
        action: The field of the environment's action that is what the policy wrote, such as `code` or `message`.
        observation: The field of the observation that the policy reads; empty shows all of it as JSON.
        reset: Arguments of the environment's `reset`, besides the seed.
        num_train: Seeds to train on.
        num_val: Seeds held out for validation, and as many others for test.

    Raises:
        UsageError: The address is none, or a number is below 1.
    """

    grader = "EnvironmentReward"

    def __init__(
        self,
        url: str = "http://localhost:8000",
        action: str = "message",
        observation: str = "",
        reset: dict[str, Any] | None = None,
        num_train: int = 8000,
        num_val: int = 100,
    ) -> None:
        is_address = url.startswith(("http://", "https://", "ws://", "wss://"))
        require(is_address, f"url={url} of OpenEnv: give the address of a server, such as http://localhost:8000")
        at_least("num_train", num_train, 1, "OpenEnv")
        at_least("num_val", num_val, 1, "OpenEnv")
        self.url, self.action, self.observation, self.arguments = url, action, observation, reset or {}
        self.num_train, self.num_val = num_train, num_val

    def questions(self, split: Split) -> Sequence[Question]:
        """The seeds of a split."""
        bounds = {"val": (0, self.num_val), "train": (2 * self.num_val, 2 * self.num_val + self.num_train)}
        seeds = range(*bounds.get(split, (self.num_val, 2 * self.num_val)))
        return [Question(f"{self.url}, seed {seed}", "", f"{self.url}:{seed}", {SEED: seed}) for seed in seeds]

    def reset(self, question: Question) -> list[Message]:
        """Opens a session. Returns what is seen first."""
        self._client = GenericEnvClient(base_url=self.url).sync()
        self._client.connect()
        seed = {SEED: question.metadata[SEED]} if SEED in question.metadata else {}
        return [{"role": "user", "content": self._text(self._client.reset(**seed, **self.arguments).observation)}]

    def step(self, message: Message) -> Turn:
        """Sends the turn as an action."""
        result = self._client.step({self.action: message["content"]})
        seen = [{"role": "user", "content": self._text(result.observation)}]
        return Turn(seen, float(result.reward or 0), bool(result.done))

    def close(self) -> None:
        """Ends the session."""
        self._client.close()

    def _text(self, observation: dict[str, Any]) -> str:
        if not self.observation:
            return json.dumps(observation, ensure_ascii=False)
        require(
            self.observation in observation,
            f"the observation has no {self.observation}: give one of {', '.join(observation)}",
        )
        return str(observation[self.observation])


class ImportedEnv(OpenEnv):
    """An imported environment, by the address of its server. Its questions are tasks, and its actions calls of tools.

    One of verifiers has the tool `submit` alone: what the policy wrote is submitted, and scored. Otherwise the policy
    calls the tools. Validation has the first `num_val` tasks, test the next, training the others.

    Args:
        name: The name that `openenv import` was given.
        url: Address of the server.
        split: The split whose tasks are played.
        num_val: Tasks held out for validation, and as many others for test.
    """

    def __init__(self, name: str, url: str = "http://localhost:8000", split: str = "train", num_val: int = 100) -> None:
        super().__init__(url, num_val=num_val)
        self.name, self.split = name, split
        with GenericEnvClient(base_url=url).sync() as client:
            tools = client.step({"type": "list_tools"}).observation["tools"]
        functions = [{key: tool[key] for key in ("name", "description")} | parameters_of(tool) for tool in tools]
        submits = [function["name"] for function in functions] == ["submit"]
        self.tools = [] if submits else [{"type": "function", "function": function} for function in functions]

    def questions(self, split: Split) -> Sequence[Question]:
        """The tasks of a split."""
        answer = requests.post(f"{self.url}/{self.name}/tasks", json={"split": self.split}, timeout=600)
        answer.raise_for_status()
        tasks = answer.json()["tasks"]
        enough = len(tasks) > 2 * self.num_val
        require(enough, f"num_val={self.num_val}: {self.name} has {len(tasks)} tasks; give less than half of it")
        bounds = {"val": slice(self.num_val), "train": slice(2 * self.num_val, None)}
        indices = range(len(tasks))[bounds.get(split, slice(self.num_val, 2 * self.num_val))]
        return [
            Question(f"{self.name}, task {index}", "", f"{self.url}:{index}", {"task_spec": tasks[index]})
            for index in indices
        ]

    def reset(self, question: Question) -> list[Message]:
        """Opens a session. Returns the prompt of the task."""
        self._client = GenericEnvClient(base_url=self.url).sync()
        self._client.connect()
        prompt = self._client.reset(**question.metadata).observation["metadata"]["prompt"]
        return [
            {"role": message.get("role", "user"), "content": message.get("content") or message.get("text", "")}
            for message in prompt
        ]

    def step(self, message: Message) -> Turn:
        """Makes the calls in the message, or submits it. Without a call the conversation is done."""
        submitted = [{"name": "submit", "arguments": {"completion": message["content"]}}]
        calls = message["tool_calls"] if self.tools else submitted
        turn = Turn(done=not calls)
        for call in calls:
            error, text = call.get("error"), ""
            if not error and not turn.done:
                action = {"type": "call_tool", "tool_name": call["name"], "arguments": call["arguments"]}
                result = self._client.step(action)
                turn.reward, turn.done = turn.reward + float(result.reward or 0), bool(result.done)
                error = (result.observation["error"] or {}).get("message")
                blocks = (result.observation["result"] or {}).get("blocks", [])
                text = "".join(block.get("text", "") for block in blocks)
            turn.num_failed_calls += bool(error)
            turn.messages.append({"role": "tool", "name": call.get("name", "tool"), "content": error or text})
        return turn


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, as a function has it."""
    return {"parameters": {"properties": {}} | (tool["input_schema"] or {})}
