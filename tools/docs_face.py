"""Hooks of mkdocs for the site's look: formulas as MathML, pictures that open in full size, the notebook as a page.

Nothing is fetched and no script is needed: `$...$` and `$$...$$` become MathML here. fonttools cuts the characters that
the pages use out of STIX Two Math, the font in the package ziamath.
"""

import html
import io
import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
COPIED = ["docs/assets/*", "docs/live/*", "docs/notebooks/*"]
"""Files of the site that are no pages."""
FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)
PICTURE = re.compile(r"(<a [^>]*>\s*)?(<img [^>]*?src=\"([^\"]+)\"[^>]*>)")
LETTER = r'<mi(?: mathvariant="normal")?>%s</mi>'
WORD = re.compile(
    r'(?:<mi mathvariant="normal">\w</mi>){2,}|'
    + "|".join("".join(LETTER % letter for letter in word) for word in ("old", "ref"))
)
"""The letters of a word, upright or the name of a policy."""
SYMBOL = re.compile(
    r"(<(?:code|pre|math|script|style)\b.*?</(?:code|pre|math|script|style)>|<[^>]*>)|π_(θ|old|ref)\b", re.DOTALL
)
"""A policy in running text, or in the first group what is no running text."""
OPERATOR = re.compile(
    r"<m[io]>(log|exp|min|max|[a-z]{2,}(?<!old)(?<!ref))</m[io]>(?=(?:</mrow>)?(<mo[^>]*>(?:&#x00028;|\())?)"
)
OUTPUT = re.compile(r'<div id="output-(\d+)"></div>')
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CODE = re.compile(r"<code>([^<]{20,})</code>")
OPTION = re.compile(r"(?<!<pre>)<code>(?:[^<]|<wbr>)*--\w(?:[^<]|<wbr>)*</code>")
shown: set[str] = set()
"""The characters in formulas, of all pages."""
outputs: list[str] = []
"""The outputs of notebooks, which no Markdown may touch."""


def on_config(config: Any) -> Any:
    """Adds the notebook to the navigation, after the page on Python."""
    add_after(config.nav, "docs/how_to/python.md", {"See it in a notebook": "docs/notebooks/quickstart.md"})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the files that pages need, and a page for each notebook."""
    from mkdocs.structure.files import File  # here, so that the tests need no mkdocs

    outputs.clear()
    for path in sorted(path for pattern in COPIED for path in ROOT.glob(pattern)):
        name = str(path.relative_to(ROOT))
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))
        if path.suffix == ".ipynb":
            text = page_of(json.loads(path.read_text(encoding="utf-8")), path.name)
            files.append(File.generated(config, name.removesuffix(".ipynb") + ".md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A link to a notebook becomes one to its page."""
    return re.sub(r"(\]\([\w./-]+)\.ipynb\)", r"\1.md)", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, pictures as links to themselves, and places where code may break."""
    content = TABLE.sub(lambda table: CODE.sub(breakable, table[0]), content)
    content = OPTION.sub(with_dashes, content)
    content = FORMULA.sub(to_mathml, content)
    content = SYMBOL.sub(lambda text: text[1] or mathml_of(rf"\pi_{{{text[2]}}}"), content)
    content = PICTURE.sub(to_link, content)
    return OUTPUT.sub(lambda output: f'<div class="output">{outputs[int(output[1])]}</div>', content)


def on_post_build(config: Any) -> None:
    """Writes the font of the formulas."""
    target = Path(config.site_dir) / "docs" / "assets" / "math.woff"
    target.write_bytes(font_of("".join(shown)))


def add_after(nav: list[Any], page: str, entry: dict[str, str]) -> None:
    """Adds an entry to the list that has the page."""
    for index, item in enumerate(nav):
        for value in item.values() if isinstance(item, dict) else [item]:
            if value == page:
                nav.insert(index + 1, entry)
                return
            if isinstance(value, list):
                add_after(value, page, entry)


def to_mathml(formula: re.Match[str]) -> str:
    """The MathML of an element that arithmatex made; a block scrolls if it is too wide."""
    latex = html.unescape(formula[2]).strip()
    if formula[1] == "span":
        return mathml_of(latex)
    return f'<span class="formula">{mathml_of(latex, "block")}</span>'


@cache
def mathml_of(latex: str, display: Literal["inline", "block"] = "inline") -> str:
    """MathML, with words upright and operators spaced as TeX does it."""
    from latex2mathml.converter import convert

    # latex2mathml takes these two for signs between what stands left and right.
    latex = re.sub(r"\\lvert\b", r"\\left|", re.sub(r"\\rvert\b", r"\\right|", latex))
    mathml = convert(latex, display=display)
    mathml = WORD.sub(lambda word: f"<mi>{re.sub('<[^>]*>', '', word[0])}</mi>", mathml)
    mathml = OPERATOR.sub(spaced, mathml).replace(">\\{<", ">{<").replace(">\\}<", ">}<")
    shown.update(html.unescape(re.sub(r"<[^>]*>", "", mathml)))
    return mathml


def spaced(operator: re.Match[str]) -> str:
    """A log, a mean or the like, with the space of an operator: after it none before a bracket."""
    return f'<mo lspace="0.12em" rspace="{0 if operator[2] else 0.17}em">{operator[1]}</mo>'


def breakable(code: re.Match[str]) -> str:
    """A long name that may be broken after a dot, a slash, a comma or an equals sign, and nowhere else."""
    return re.sub(r"(?<=\w)([/,=]|\.(?=\w{3}))(?=\S)", r"\1<wbr>", code[0].removesuffix("</code>")) + "</code>"


def with_dashes(code: re.Match[str]) -> str:
    """Options, whose dashes stay with their name."""
    return re.sub(r"(?<![\w-])(--\w)", r'<span class="dashes">\1</span>', code[0])


def to_link(picture: re.Match[str]) -> str:
    """A picture in a link to the file, unless it is in a link."""
    return picture[0] if picture[1] else f'<a class="picture" href="{picture[3]}">{picture[2]}</a>'


def font_of(characters: str) -> bytes:
    """The font of formulas with these characters, upright and italic, and all sizes of brackets and sums."""
    from fontTools.subset import Options, Subsetter
    from fontTools.ttLib import TTFont

    italic = {ord("a") + i: 0x1D44E + i for i in range(26)} | {ord("A") + i: 0x1D434 + i for i in range(26)}
    italic |= {0x3B1 + i: 0x1D6FC + i for i in range(25)} | {0x391 + i: 0x1D6E2 + i for i in range(25)}
    italic |= {ord("h"): 0x210E, 0x3F5: 0x1D716, 0x3D5: 0x1D719}
    codes = {ord(one) for one in characters} | set(range(0x20, 0x7F)) | {0x221A}  # a root has no character in MathML
    package = find_spec("ziamath")  # which is not imported: its imports warn
    assert package is not None and package.origin is not None
    font = TTFont(Path(package.origin).parent / "fonts" / "STIXTwoMath-Regular.ttf")
    subsetter = Subsetter(Options(layout_features=["*"], notdef_outline=True, hinting=False))
    subsetter.populate(unicodes=codes | {italic[code] for code in codes if code in italic})
    subsetter.subset(font)
    font.flavor = "woff"
    out = io.BytesIO()
    font.save(out)
    return out.getvalue()


def page_of(notebook: dict[str, Any], name: str) -> str:
    """The Markdown of a notebook: its text, its code and the places of the outputs that are stored in it."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in map(output_of, cell.get("outputs", [])):
            parts.append(f'<div id="output-{len(outputs)}"></div>')
            outputs.append(output)
    return "\n\n".join([*parts, f'<a href="{name}" download>This page as a notebook</a>']) + "\n"


def output_of(output: dict[str, Any]) -> str:
    """An output of a cell as html: the richest form of it that is stored."""
    data = {kind: "".join(text) for kind, text in output.get("data", {"text/plain": output.get("text", "")}).items()}
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"].strip()}">'
    return data.get("text/html") or f"<pre><code>{html.escape(data['text/plain'].rstrip())}</code></pre>"
