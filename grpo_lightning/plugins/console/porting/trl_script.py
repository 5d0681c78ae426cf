"""Reads a Python script for TRL, without running it."""

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from grpo_lightning.plugins.console.porting.trl_rules import TABLE
from grpo_lightning.types import UsageError

NO_ARITHMETIC = (ast.Call, ast.Attribute, ast.Lambda, ast.Await, ast.comprehension, ast.Pow, ast.LShift)
"""What would run code of the script, or may take long."""
HARMLESS = ("shuffle", "remove_columns", "select_columns", "with_format")
"""Methods of a dataset that change nothing which is read here."""


UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""Exceptions for a value that is known only when the script runs."""


class TrlScript:
    """A script that calls GRPOConfig and GRPOTrainer.

    Args:
        path: Its path.
        text: Its text.
    """

    def __init__(self, path: Path, text: str) -> None:
        try:
            # A dtype of torch is its name.
            self.tree = ast.parse(re.sub(r"(?<![\w'\"])torch\.(b?float\d\d)\b", r"'\1'", text))
        except SyntaxError as error:
            raise UsageError(f"{path}:{error.lineno}: this is not Python: {error.msg}") from error
        self.path = path
        self.remarks: list[str] = []
        """What could not be read, by the number of its line."""
        self._names: dict[str, str] = {}
        """The full name of each name that is imported or defined."""
        self._assigned: dict[str, dict[int, Any]] = defaultdict(dict)
        """The values that a name or attribute is assigned, by the last line of the assignment."""
        self._scopes: list[Any] = []
        """The functions and classes."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
                    self._assigned[ast.unparse(target)][node.end_lineno or 0] = value
                case (
                    ast.AugAssign(target=target)
                    | ast.Subscript(value=target, ctx=ast.Store())
                    | ast.Call(func=ast.Attribute(value=target, attr="append" | "extend" | "update"))
                ):
                    # What changes a value, a list or a dict is no expression that can be read.
                    self._assigned[ast.unparse(target)][node.lineno] = node
                case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                    self._names |= {alias.asname or alias.name: module + alias.name for alias in aliases}
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    self._names[name] = f"{path.stem}.{name}"
                    self._scopes.append(node)

    def options(self) -> dict[str, Any]:
        """Returns the options of the run, by TRL's names. Raises UsageError without exactly one GRPOConfig."""
        config = self._call_of("GRPOConfig")
        if config is None:
            raise UsageError(
                f"{self.path}: there is no GRPOConfig(...) in it. If the script takes its options from the command "
                "line or from a YAML file, give that file"
            )
        # Options may be assigned after the config is made.
        owners = [name for name, values in self._assigned.items() if config in values.values()]
        for name, values in self._assigned.items():
            owner, dot, option = name.partition(".")
            if dot and owner in owners:
                config.keywords += [ast.keyword(option, value) for value in values.values()]
        options = self._arguments(config, "output_dir")
        trainer = self._call_of("GRPOTrainer")
        names = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
        for keyword in keywords_of(trainer, names) if trainer else ():
            try:
                options |= self._trainer_option(str(keyword.arg), self._resolved(keyword.value))
            except UNREADABLE:
                self._remark(keyword.value, TABLE["by_hand"].get(keyword.arg, "set it by hand"))
        is_imported = f"{self.path}:" in str(options)
        if is_imported and "__name__" not in ast.unparse(self.tree):
            self.remarks.append(TABLE["by_hand"]["main"].format(path=self.path))
        return options

    def _call_of(self, name: str) -> ast.Call | None:
        """Returns the call of a class; None if there is none. Raises UsageError for several."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self._called(node) == name]
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            raise UsageError(f"{self.path}: {name}(...) is in lines {lines}: leave one of them in a copy of the file")
        return calls[0] if calls else None

    def _full_name(self, node: ast.AST) -> str:
        """Returns the name of a function or class, with its module."""
        head, dot, tail = ast.unparse(node).partition(".")
        return self._names.get(head, head) + dot + tail

    def _called(self, node: ast.AST) -> str:
        """Returns the last name of what is called; empty if nothing is."""
        return self._full_name(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""

    def _remark(self, node: ast.expr, advice: str) -> None:
        """Notes what could not be read."""
        text = " ".join(ast.unparse(node).split())[:80]
        self.remarks.append(f"line {node.lineno}: {text} is known only when the script runs: {advice}")

    def _arguments(self, call: ast.AST, *names: Any) -> dict[str, Any]:
        """Returns the arguments of a call that can be read, and notes the others.

        Args:
            call: The call.
            names: The names of its positional arguments.
        """
        values: dict[str, Any] = {}
        for keyword in keywords_of(call, names):
            try:
                value = self._value(keyword.value)
                values |= value if keyword.arg is None else {keyword.arg: value}
            except UNREADABLE:
                self._remark(keyword.value, TABLE["by_hand"]["option"].format(name=keyword.arg or "**"))
        return values

    def _resolved(self, node: Any) -> Any:
        """Returns the value that a name was assigned last above its line; other expressions as they are."""
        while isinstance(node, ast.Name):
            values = self._assigned[node.id]
            # In a function that ends above the line, a name is another one.
            lines = [
                line
                for line in values
                if line < node.lineno
                and not any(scope.lineno < line <= scope.end_lineno < node.lineno for scope in self._scopes)
            ]
            if not lines:
                break
            node = values[max(lines)]
        return node

    def _value(self, node: ast.expr) -> Any:
        """Returns the value of an expression of literals, names and arithmetic."""
        node = self._resolved(node)
        if isinstance(node, ast.Dict):
            return self._arguments(ast.Call(node, node.values, []), *[key and self._value(key) for key in node.keys])
        if self._called(node) == "dict":
            return self._arguments(node)
        if any(isinstance(inner, NO_ARITHMETIC) for inner in ast.walk(node)):
            raise ValueError
        names = {inner.id: inner for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        if node in names.values():
            raise ValueError
        values = {name: self._value(inner) for name, inner in names.items()}
        return eval(compile(ast.Expression(node), str(self.path), "eval"), {"__builtins__": {}}, values)

    def _trainer_option(self, name: str, node: Any) -> dict[str, Any]:
        """Returns the options in an argument of GRPOTrainer."""
        match name, self._called(node):
            case _ if ast.unparse(node) == "None":
                return {}
            case "model", "from_pretrained":
                values = self._arguments(node, "model_name_or_path")
                return {"model_name_or_path": values.pop("model_name_or_path", None), "model_init_kwargs": values}
            case "model", _:
                return {"model_name_or_path": self._value(node)}
            case "reward_funcs", _:
                items = node.elts if isinstance(node, ast.List) else [node]
                return {name: [self._reward(self._resolved(item)) for item in items]}
            case "environment_factory", _:
                return {name: self._location(node)}
            case "peft_config", "LoraConfig":
                names = TABLE["adapter"]["names"]
                values = {names.get(key, key): value for key, value in self._arguments(node).items()}
                return TABLE["adapter"]["defaults"] | values
            case "train_dataset" | "eval_dataset", _:
                return {name: self._dataset(node)}
        return {name: ast.unparse(node)}

    def _reward(self, node: Any) -> Any:
        """Returns a reward: the import path of a function, or the configuration of a model or of one of TRL's own."""
        if isinstance(node, ast.Constant):
            return {"class_path": "LearnedReward", "init_args": {"path": node.value}}
        if rule := TABLE["rewards"].get(self._called(node)):
            arguments = self._arguments(node, *TABLE["overlong"])
            return rule | {"init_args": {TABLE["overlong"][name]: value for name, value in arguments.items()}}
        try:
            return self._location(node)
        except UNREADABLE:
            self._remark(node, TABLE["by_hand"]["reward_funcs"])
            return "my_rewards.py:NAME"

    def _location(self, node: ast.expr) -> str:
        """Returns the import path of a function or a class."""
        module, _, name = self._full_name(node).rpartition(".")
        if ast.unparse(node).partition(".")[0] not in self._names:
            raise ValueError
        file = self.path.parent / f"{module.replace('.', '/')}.py"
        return f"{file}:{name}" if file.exists() else f"{module}.{name}"

    def _dataset(self, node: Any) -> dict[str, Any]:
        """Returns the arguments of load_dataset, with the split that is taken of it."""
        split = {}
        while self._called(node) != "load_dataset":
            match node:
                case ast.Subscript(value=source, slice=key):
                    split = {"split": self._value(key)}
                case ast.Call(func=ast.Attribute(value=source, attr=method)):
                    if method not in HARMLESS:
                        self._remark(node, TABLE["by_hand"]["map"])
                case _:
                    raise ValueError
            node = self._resolved(source)
        return self._arguments(node, "path", "name") | split


def keywords_of(call: Any, names: tuple[str, ...]) -> list[ast.keyword]:
    """Returns the arguments of a call as keywords; `names` are the names of the positional ones."""
    return [*map(ast.keyword, names, call.args), *call.keywords]
