"""The pages of the configuration: a page per section, with a heading per key, and a page per key that takes a class.

The keys are read from the parser of `grpo fit`, so that the pages cannot differ from the program.
"""

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from grpo_lightning.command.overview import ALWAYS, SECTIONS, SEEDED
from reference import api, explained
from reference.options import Option, classes_in, options_of_class, options_of_command, parser_of
from reference.places import REFERENCE, first_sentence, public_classes, relative
from reference.ranges import ranges_of

FOLDER = f"{REFERENCE}/configuration"

RUN = "run"
"""The page of the keys without a section."""

OWNERS = {"model": "GRPOModule", "model.policy": "Policy", "data": "PromptDataModule", **SECTIONS}
"""The class whose arguments are the keys of a section."""

MADE_BY_PROGRAM = [*SECTIONS.values(), *ALWAYS, "SaveConfig", "StepLines", "StepTimer", "AtomicCheckpointIO"]
"""Callbacks and plugins of the trainer that every run has: no configuration names them."""

SECTION_PAGES = [RUN, "model", "data", *SECTIONS, "trainer"]


FIRST_IN_SEARCH = "---\nsearch: {boost: %d}\n---\n\n"
"""The front matter of a page: a search for a key finds this page before the pages that use the key."""


class Entry(NamedTuple):
    """A key of the configuration that has a heading."""

    option: Option
    range: str
    """The values that are allowed; empty if nothing checks them."""

    @property
    def key(self) -> str:
        """The key."""
        return self.option.key


def titles() -> list[tuple[str, str]]:
    """Returns the file name and the title of each page, in the order of the navigation."""
    return [("index", "All keys"), *((page, page) for page in pages() if page != "index")]


@cache
def pages() -> dict[str, str]:
    """Returns the pages by their file names."""
    texts = {"index": index()}
    for page in SECTION_PAGES:
        # A title counts more than a heading: model.objective would find the pages of its parts.
        texts[page] = FIRST_IN_SEARCH % (8 if page == "model" else 3) + section_page(page)
        texts |= {key: FIRST_IN_SEARCH % 3 + family_page(key) for key in families() if key.split(".")[0] == page}
    return texts


@cache
def entries() -> dict[str, list[Entry]]:
    """Returns the keys of each section's page. Settings that are one object, such as `model.sampling`, are unfolded."""
    by_page: dict[str, list[Entry]] = {page: [] for page in SECTION_PAGES}
    for option in options_of_command("fit"):
        section, dot, _ = option.key.partition(".")
        by_page[section if dot else RUN] += unfold(option, ranges_of_key(option.key))
    for key in SEEDED:
        action = next(action for action in parser_of("fit")._actions if action.dest == key)
        text = f"{action.help} It follows from `seed_everything`, and cannot be set by itself."
        by_page[key.partition(".")[0]].append(Entry(Option(key, int, None, False, text), ""))
    return by_page


def unfold(option: Option, range_text: str) -> Iterator[Entry]:
    """Yields a key, and the keys below it if its type is a single class of settings."""
    yield Entry(option, range_text)
    for settings in classes_in(option.hint):
        if is_settings(settings):
            ranges = ranges_of(settings)
            for nested in options_of_class(settings):
                key = f"{prefix_below(option)}.{nested.key}"
                yield from unfold(dataclasses.replace(nested, key=key), ranges.get(nested.key.rpartition(".")[2], ""))


def is_settings(kind: type) -> bool:
    """Returns whether a class is a set of keys, and no family with a choice."""
    return dataclasses.is_dataclass(kind) and len(members_of(kind)) <= 1


def prefix_below(option: Option) -> str:
    """Returns what stands before the keys below a key. In a dict, `data.validations`, the user chooses a name."""
    return f"{option.key}.NAME" if "dict[" in option.type else option.key


def ranges_of_key(key: str) -> str:
    """Returns the range of a key of a section, from the class that is the section."""
    section, _, name = key.rpartition(".")
    return ranges_of(public_classes()[OWNERS[section]]).get(name, "") if section in OWNERS else ""


def prefix_of(name: str) -> str | None:
    """Returns what stands before an argument of a public class in its heading; None for a class without headings."""
    for section, owner in OWNERS.items():
        if owner == name:
            return section
    if name not in public_classes():
        return None
    kind = public_classes()[name]
    for entry in (entry for page in SECTION_PAGES for entry in entries()[page]):
        if is_settings(kind) and kind in classes_in(entry.option.hint):
            return prefix_below(entry.option)
    return name if page_of_class(kind) else None


@cache
def families() -> dict[str, list[type]]:
    """Returns the public classes that each key with `class_path` takes. The first key with a family has its page."""
    by_key: dict[str, list[type]] = {}
    with_page: set[type] = set()
    for entry in (entry for page in SECTION_PAGES for entry in entries()[page]):
        for base in classes_in(entry.option.hint):
            if base in with_page or is_settings(base):
                continue
            classes = members_of(base)
            if classes:
                with_page.add(base)
                by_key[entry.key] = by_key.get(entry.key, []) + classes
    return by_key


def keys_by_api_page() -> dict[str, list[str]]:
    """Returns the keys whose classes stand on each page of the API."""
    keys: dict[str, list[str]] = {}
    for key, classes in families().items():
        for page in dict.fromkeys(api.family_of(kind.__name__) for kind in classes):
            keys.setdefault(page, []).append(key)
    return keys


def keys_with(classes: list[type]) -> list[str]:
    """Returns the keys that take these classes."""
    return [
        entry.key
        for page in SECTION_PAGES
        for entry in entries()[page]
        if any(classes[0] in members_of(base) for base in classes_in(entry.option.hint))
    ]


@cache
def nested_classes(key: str) -> list[type]:
    """Returns the classes that only arguments of a family's classes take: they stand on the page of the family."""
    elsewhere = {kind for classes in families().values() for kind in classes}
    inner_classes: list[type] = []
    queue = [*families()[key]]
    while queue:
        for option in options_of_class(queue.pop(0)):
            for base in classes_in(option.hint):
                classes = [kind for kind in members_of(base) if kind not in elsewhere and kind not in inner_classes]
                inner_classes += classes
                queue += classes
    return inner_classes


@cache
def members_of(base: type) -> list[type]:
    """Returns the public classes of a family that can be made, in the order of the API."""
    names = [name for page in api.members().values() for name in page if name not in MADE_BY_PROGRAM]
    classes = [public_classes()[name] for name in names if name in public_classes()]
    return [kind for kind in classes if issubclass(kind, base) and not inspect.isabstract(kind)]


def page_of_class(kind: type) -> str | None:
    """Returns the file name of the page that has a class's arguments."""
    for key, classes in families().items():
        if kind in classes or kind in nested_classes(key):
            return key
    return None


@cache
def num_owners() -> Counter[str]:
    """Returns how many public classes have an argument of each name."""
    kinds = [kind for kind in public_classes().values() if not issubclass(kind, Exception | str)]
    return Counter(name for kind in kinds for name in inspect.signature(kind).parameters)


def index() -> str:
    """Returns the page that lists every key."""
    lines = [
        "# All keys of the configuration",
        "",
        "Every key of `grpo fit`, read from its parser. A key goes into a YAML file or on the command line:",
        "`loop: {group_size: 8}` and `--loop.group_size 8` are the same. `grpo validate`, `test`, `predict` and `plan`",
        "read the same files. `grpo fit --config FILE --print_config` prints every key with its value.",
        "`None` in a description is `null` in YAML.",
        "",
    ]
    for page in SECTION_PAGES:
        lines += [f"## {page}", ""]
        lines += [f"- [`{entry.key}`]({page}.md#{entry.key}): {first(entry.option.text)}" for entry in entries()[page]]
        lines += [""]
    lines += ["## Keys that take a class", ""]
    for key in families():
        names = [f"[`{kind.__name__}`]({key}.md#{kind.__name__})" for kind in families()[key]]
        lines += [f"- [`{key}`]({key}.md): {', '.join(names)}"]
    return "\n".join([*lines, ""])


def section_page(page: str) -> str:
    """Returns the page of a section."""
    lines = [f"# `{page}`", "", *introduction(page), ""]
    keys = {page, "", *(entry.key for entry in entries()[page])}
    for entry in entries()[page]:
        parent = entry.key.rpartition(".")[0].removesuffix(".NAME")
        if parent not in keys:
            keys.add(parent)
            lines += [f"## `{parent}` {{ #{parent} }}", ""]
        lines += entry_lines(entry)
    return "\n".join(lines)


def introduction(page: str) -> list[str]:
    """Returns the first paragraph of a section's page."""
    if page == RUN:
        return ["Keys of a run that belong to no section."]
    if page == "trainer":
        return [
            "The options of Lightning's trainer, with Lightning's own descriptions. Some defaults are this package's.",
            "`trainer.max_epochs` is the number of exploration steps.",
        ]
    kind = public_classes()[OWNERS[page]]
    return [f"{first_sentence(kind)} These keys are the arguments of {api_link(kind, page)}."]


def entry_lines(entry: Entry) -> list[str]:
    """Returns the heading and the text of a key."""
    page = page_of_key(entry.key)
    section = explained.section_of_key(entry.key, num_owners()[entry.key.rpartition(".")[2]])
    return [
        heading(2 if entry.key.count(".") < 2 else 3, entry.key),
        "",
        facts(entry.option, entry.range, page),
        "",
        entry.option.text,
        "",
        *choices(entry, page),
        *([explained.link(f"{FOLDER}/{page}.md", section), ""] if section else []),
    ]


def heading(level: int, key: str) -> str:
    """Returns the heading of a key. The table of contents has its last word alone, below the heading of the others."""
    label = f" data-toc-label='{key.rpartition('.')[2]}'" if level == 3 else ""
    return f"{'#' * level} `{key}` {{ #{key}{label} }}"


def page_of_key(key: str) -> str:
    """Returns the file name of the page of a key's section."""
    section, dot, _ = key.partition(".")
    return section if dot else RUN


def facts(option: Option, range_text: str, page: str) -> str:
    """Returns the line with type, default and range."""
    if option.key in SEEDED:
        return "`int`"
    if option.is_required:
        default = "**required**"
    else:
        default = "default: the values below" if option.default == {} else f"default `{option.default_text}`"
    return " · ".join([type_text(option, page), default, *([range_text] if range_text else [])])


def type_text(option: Option, page: str) -> str:
    """Returns the type of an option, with links to the classes in it."""
    names = {kind.__name__: kind for kind in classes_in(option.hint) if kind in public_classes().values()}
    if not names:
        return f"`{option.type}`"
    return re.sub(r"\w+", lambda match: api_link(names[match[0]], page) if match[0] in names else match[0], option.type)


def choices(entry: Entry, page: str) -> list[str]:
    """Returns the list of the classes that a key takes, each with the link to its arguments."""
    bases = [base for base in classes_in(entry.option.hint) if not is_settings(base)]
    classes = list(dict.fromkeys(kind for base in bases for kind in members_of(base)))
    if not classes:
        return []
    lines = []
    for kind in classes:
        lines += [f"- [`{kind.__name__}`]({page_of_class(kind)}.md#{kind.__name__}): {first_sentence(kind)}"]
    return [*lines, ""]


def family_page(key: str) -> str:
    """Returns the page of the classes that a key takes, and of the classes inside them."""
    lines = [f"# `{key}`: the classes", "", *usage(key), ""]
    for kind in families()[key]:
        lines += class_lines(kind, key)
    if nested := nested_classes(key):
        lines += ["## Classes inside these { #inside }", ""]
        for kind in nested:
            lines += class_lines(kind, key)
    return "\n".join(lines)


def usage(key: str) -> list[str]:
    """Returns how the key takes a class, with an example."""
    entry = next(entry for page in SECTION_PAGES for entry in entries()[page] if entry.key == key)
    keys = [f"[`{other}`]({page_of_key(other)}.md#{other})" for other in keys_with(families()[key])]
    lines = [f"What {', '.join(keys)} {'takes' if len(keys) == 1 else 'take'}. {entry.option.text}", ""]
    is_list = entry.option.type.startswith(("list[", "List["))
    for kind in families()[key]:
        for option in options_of_class(kind):
            if option.default not in (None, "", [], {}) and not option.is_required and "." not in option.key:
                return [*lines, *example(key, kind.__name__, option, is_list)]
    return lines


def example(key: str, name: str, option: Option, is_list: bool) -> list[str]:
    """Returns how a class is named for a key, in YAML and on the command line."""
    parts = key.split(".")
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(parts)]
    margin = "  " * len(parts)
    first_margin = f"{margin}- " if is_list else margin
    margin = " " * len(first_margin)
    lines += [
        f"{first_margin}class_path: {name}",
        f"{margin}init_args:",
        f"{margin}  {option.key}: {option.default_text}",
    ]
    flags = [f"--{key} {name} \\", f"  --{key}.{option.key} {option.default_text}"]
    return ["```yaml", *lines, "```", "", "On the command line:", "", "```sh", *flags, "```", ""]


def class_lines(kind: type, key: str) -> list[str]:
    """Returns the heading, the first sentence and the arguments of a class."""
    name = kind.__name__
    page = f"{FOLDER}/{key}.md"
    ranges = ranges_of(kind)
    class_section = explained.section_of_class(name)
    lines = [f"## `{name}` {{ #{name} }}", "", first_sentence(kind), ""]
    lines += [f"API: {api_link(kind, key)}. {explained.link(page, class_section)}", ""]
    for option in options_of_class(kind):
        section = explained.section_of_argument(name, option.key.rpartition(".")[2])
        lines += [
            heading(3, f"{name}.{option.key}"),
            "",
            facts(option, ranges.get(option.key, ""), key),
            "",
            option.text,
            "",
            *([explained.link(page, section), ""] if section and section != class_section else []),
        ]
    return lines


def api_link(kind: type, page: str) -> str:
    """Returns the link from a page of this folder to the API of a public class."""
    name = kind.__name__
    return f"[`{name}`]({relative(api.page_of(name), f'{FOLDER}/{page}.md')}#{name})"


def first(text: str) -> str:
    """Returns the first sentence of a text."""
    return re.split(r"(?<=[.!?]) (?=[A-ZΑ-Ω`])", text, maxsplit=1)[0]


def keys() -> Iterable[str]:
    """Yields every key and argument that has a heading."""
    for text in pages().values():
        yield from re.findall(r"^#+ `([^`]+)` \{", text, re.MULTILINE)
