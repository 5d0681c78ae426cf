"""Mistakes in keys, classes and files, found in a second: without torch and Lightning.

Left to the parser are values, the classes of others and of the user's, and configurations that are no files.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.command.overview import COMMANDS, DEFAULTS, NEGATIVE
from grpo_lightning.plugins.mistakes import keys, sentences
from grpo_lightning.plugins.mistakes.keys import Option
from grpo_lightning.policy import pretrained
from grpo_lightning.types import UsageError

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

CLASS = {"class_path", "init_args", "dict_kwargs"}
"""The keys of a class in YAML."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def mistake(args: Sequence[str]) -> str | None:
    """The first mistake in keys, classes and files of what follows `grpo`; None where only the parser can tell."""
    if not args or args[0] not in COMMANDS or any(arg in ("-h", "--help") or ".help" in arg for arg in args):
        return None
    line = Line(args[0])
    with suppress(Exception):  # whatever cannot be read here, the parser can
        line.read(args[1:])
        line.mistakes += [*([] if line.imports else line.classes), *line.missing()]
    return next(iter(line.mistakes), None)


class Line:
    """A command line as it is read: the classes chosen so far, and the mistakes."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.chosen: dict[str, str] = {}
        """Key -> import path of its class; empty if it is not known."""
        self.values: dict[str, Any] = {}
        self.mistakes: list[str] = []
        self.classes: list[str] = []
        """Mistakes in names of classes. A module of the user's could define them after all."""
        self.imports = False
        """True once the parser has to import a module of the user's."""
        self.dashes = ""
        """What stands before a key: nothing in a file."""
        self.section(DEFAULTS)

    def read(self, args: Sequence[str]) -> None:
        """Reads what follows the command."""
        rest = list(args)
        while rest:
            flag, equals, value = rest.pop(0).partition("=")
            if re.match(r"--?$|-[^-]", flag):
                raise LookupError
            if not flag.startswith("--"):
                self.mistakes.append(f"{flag}: this is no option; options are written --KEY VALUE or --KEY=VALUE")
                continue
            if not equals and rest and (not rest[0].startswith("-") or NEGATIVE.match(rest[0])):
                value = rest.pop(0)
            try:
                given = yaml.load(value, LOADER)
            except yaml.YAMLError:
                given = value
            self.dashes = "" if flag == "--config" else "--"
            if self.dashes:
                self.option(flag.removeprefix("--"), given)
            elif "://" in value:
                raise LookupError
            else:
                self.section(given if isinstance(given, dict) else self.file(value))

    def file(self, path: str) -> Any:
        """What a configuration holds."""
        try:
            content = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), LOADER)
            if not isinstance(content, str):
                return content
            begin = sentences.one_line(content, 60)
            wrong = f"expected keys and values, such as `loop: {{mu: 2}}`. It begins with: {begin}"
        except (FileNotFoundError, IsADirectoryError):
            wrong = "there is no such file"
        except yaml.YAMLError as error:
            wrong = "this is no YAML: " + re.sub(r'in "<[^"]*>", ', "", sentences.one_line(str(error)))
        self.mistakes.append(f"config={path.removeprefix(f'{Path.cwd()}/')}: {wrong}")

    def section(self, given: Any, key: str = "") -> None:
        """Reads the keys of a configuration, of a section or of a class."""
        for part, value in given.items() if isinstance(given, dict) else ():
            self.option(f"{key}{part}", value)

    def option(self, key: str, value: Any) -> None:
        """Reads one option, which may be an argument of the class of another."""
        option, here = Option(flat=True), ""
        known: keys.Options | None = keys.sections(self.command)
        for part in key.replace("+", "").split("."):
            if part == "class_path":
                break
            if part == "init_args":
                continue
            if known is None or part.startswith(("$", "_")):
                return self.look(value, Option(open=True), key)
            if part not in known:
                return self.unknown(option, here, known, key, part, value)
            option, here = known[part], f"{here}.{part}".lstrip(".")
            known = self.arguments(option, here)
        return self.look(value, option, here)

    def unknown(self, option: Option, here: str, known: keys.Options, key: str, part: str, value: Any) -> None:
        """Notes a key that is not there."""
        if not option.flat:
            owner = self.chosen.get(here, option.default).rpartition(".")[2]
            self.mistakes.append(f"{here}.{part}{sentences.no_such_argument(part, owner, [*known])}")
            return
        while not self.dashes and isinstance(value, dict) and value:
            inner, value = next(iter(value.items()))
            key = f"{key}.{inner}"
        self.mistakes.append(f"{self.dashes}{key}: there is no such option.{self.instead(key)}")

    def instead(self, key: str) -> str:
        """The option that was meant: of TRL's, of the same name in another section, or spelled alike."""
        for old, now in sentences.MOVED.items():
            if f"{key}.".startswith(f"{old}."):
                return f" It is {self.dashes}{now}{key.removeprefix(old)} now"
        nearest, names = sentences.nearest, keys.names_of(self.command)
        sections = [name for name, option in keys.sections(self.command).items() if option.flat]
        same = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
        if not same and (known := sentences.elsewhere(key)):
            return known
        head, dot, rest = key.partition(".")
        if not same and dot and head not in sections and (section := nearest(head, sections)):
            return f" Did you mean {self.dashes}{section[0]}.{rest}?"
        if close := same or nearest(key, names if "." in key else [*sections, *names]):
            return f" Did you mean {self.dashes}{close[0]}?"
        return f" The sections are {', '.join(sections)}; --help lists their options"

    def arguments(self, option: Option, key: str) -> keys.Options | None:
        """The arguments of the class that an option has now; None if it is not known."""
        path = self.chosen.get(key, option.default)
        return keys.arguments(path) if path else None

    def look(self, value: Any, option: Option, key: str) -> None:
        """Reads the value of an option."""
        if not option.family:
            self.values[key] = value
            self.imports |= option.open and imports(value)
        elif isinstance(value, list):
            for item in value:
                self.forget(key)
                self.look(item, option, key)
        elif isinstance(value, dict):
            if not option.flat and isinstance(name := value.get("class_path"), str):
                self.name(name, option, key)
            if option.flat or CLASS.isdisjoint(value):
                self.section(value, f"{key}.")
            elif (wrong := [*value.keys() - CLASS]) and (known := self.arguments(option, key)) is not None:
                self.unknown(option, key, known, key, wrong[0], None)
            else:
                self.section(value.get("init_args"), f"{key}.")
        elif isinstance(value, str) and value:
            self.name(value, option, key)
        elif isinstance(value, float) and option.default and not option.open:
            first = next(iter(self.arguments(option, key) or ["class_path"]))
            self.mistakes.append(f"{key}={value}: give keys and values, such as {{{first}: {value}}}")
        else:
            self.forget(key)

    def name(self, name: str, option: Option, key: str) -> None:
        """Reads the name of a class."""
        module, _, last = name.rpartition(".")
        own = keys.find(last) if module in ("", "grpo_lightning") else ""
        if own and keys.derives(own, option.family):
            if self.chosen.get(key) != own:
                self.forget(key)
            self.chosen[key] = own
            return
        self.forget(key)
        self.imports |= imports(name)
        if not option.open and (option.flat or not NAME.fullmatch(name) or Path(name).exists()):
            raise LookupError  # a file with the value
        if not option.open and not module:
            *names, family = (path.rpartition(".")[2] for path in (*keys.members(option.family), option.family))
            self.classes.append(f"{key}{sentences.no_such_class(name, [family], names)}")

    def forget(self, key: str) -> None:
        """The class of an option, and those of its arguments, are not known from here on."""
        self.chosen = {other: path for other, path in self.chosen.items() if not other.startswith(f"{key}.")}
        self.chosen[key] = ""

    def missing(self) -> Iterator[str]:
        """The checkpoint, and the model if it is a folder, where they are not there."""
        if "print_config" in self.values:
            return
        path, model = (str(self.values.get(key) or "") for key in ("ckpt_path", "model.policy.path"))
        if path not in ("", "last") and "://" not in path and self.command != "plan" and not Path(path).exists():
            wrong = "there is no such checkpoint. Give its path, or `last` for the newest of the run"
            yield f"ckpt_path={path}: {wrong}"
        try:
            pretrained.local(model, "model.policy.path")
        except UsageError as error:
            yield str(error)


def imports(value: Any) -> bool:
    """True where a value has an import path that is neither of this package nor of Lightning or torch."""
    if isinstance(value, str):
        path = NAME.fullmatch(value)
        return bool(path and path[1]) and value.partition(".")[0] not in ("grpo_lightning", "lightning", "torch")
    return isinstance(value, (list, dict)) and any(map(imports, value.values() if isinstance(value, dict) else value))
