"""Prose of pages, public docstrings and help texts: openings, "is no", length of sentences and
paragraphs; files and modules that the architecture's page names; entries of the changelog.

Code blocks and inline code are left out. Table cells and headings are held to the wording, not to
the lengths.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_SENTENCE_WORDS, MAX_PARAGRAPH_WORDS = 25, 80
MAX_README_LINES = 110
#: A sentence opens with a noun phrase or an imperative.
OPENINGS = ("What", "Who", "Whether", "Of", "Where")
#: So does the text of an argument, which names the thing.
ARGUMENT_OPENINGS = ("what", "who", "whose", "whether", "where", "which", "how", "of", "those")
#: Names that do not say what they hold.
VAGUE = frozenset(
    "found known one made chosen given said seen kept taken others rest these those it asked "
    "wanted held left there both each all_ ones".split()
)
#: Wording that the rules name, and what to write in its place.
WORDING = {r"(?<!there )\b(?:is|are|was|were) no\b(?! longer)": "is not a"}

FOLDERS = ("cache", "docs", "examples", "scripts", "templates", "tests", "tuner")
PAGES = sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))])
#: Places of public docstrings: each package and module of `tuner`, and what lies elsewhere.
PLACES = sorted(
    [
        *(path for path in (ROOT / "tuner").iterdir() if (path / "__init__.py").is_file()),
        *(ROOT / "tuner").glob("*.py"),
        ROOT / "cache",
        ROOT / "scripts",
        ROOT / "tests" / "support",
    ]
)
#: Places of argument parsers.
COMMANDS = sorted([*(ROOT / "tuner" / "cli").glob("*.py"), *(ROOT / "scripts").rglob("*.py")])


def plain(text: str) -> str:
    """Markdown without code, pictures and targets of links; code counts as one word."""
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"", text)
    text = re.sub(r"(``?)[^`]+?\1", "Code", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("*", "").replace("_", " ")


def sentences(paragraph: str) -> list[str]:
    """A paragraph's sentences."""
    text = re.sub(r"\b(e\.g|i\.e|vs|cf|approx)\.", r"\1", " ".join(paragraph.split()))
    return [part for part in re.split(r"(?<=[.!?])(?<!\.\.)[)\"']?\s+", text) if part]


def words(text: str) -> int:
    """Words with a letter, as a reader counts them."""
    return sum(any(c.isalpha() for c in word) for word in text.split())


def faults(text: str, lengths: bool = True) -> Iterator[str]:
    """The rules that a paragraph breaks, each with the words that break it."""
    text = plain(text)
    if lengths and words(text) > MAX_PARAGRAPH_WORDS:
        yield f"{words(text)} words in a paragraph (at most {MAX_PARAGRAPH_WORDS}): {text[:60]}"
    for sentence in sentences(text):
        if sentence.split()[0].strip("(\"'").rstrip(",:") in OPENINGS:
            yield f"opens with {sentence.split()[0]}: {sentence[:60]}"
        if lengths and words(sentence) > MAX_SENTENCE_WORDS:
            yield f"{words(sentence)} words (at most {MAX_SENTENCE_WORDS}): {sentence[:60]}"
    for pattern, instead in WORDING.items():
        for match in re.finditer(pattern, text):
            yield f"'{match[0]}' (say '{instead}'): {text[match.start() :][:60]}"


def paragraphs(page: str) -> Iterator[tuple[str, bool]]:
    """Paragraphs, list items, headings and cells of a page; True where lengths are held."""
    page = re.sub(r"^\s*```.*?^\s*```", "\n", page, flags=re.DOTALL | re.MULTILINE)
    block: list[str] = []
    for line in [*page.splitlines(), ""]:
        bare = line.strip()
        starts = re.match(r"(?:[-*]|\d+\.)\s+|#|\|", bare)
        if block and (not bare or starts):
            yield " ".join(block), True
            block = []
        if bare.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", bare):
                if cell.strip(" -:"):
                    yield cell.strip(), False
        elif bare.startswith("#"):
            yield bare.lstrip("# "), False
        elif bare:
            block.append(bare[starts.end() :] if starts else bare)


def documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Public docstrings of a module by name: its own, and those of its attributes among them."""

    def below(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
        for before, child in pairwise(node.body):
            match before, child:
                case (ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str() as text))):
                    target = before.targets[0] if isinstance(before, ast.Assign) else before.target
                    yield prefix + ast.unparse(target), text
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if child.name.startswith("_"):
                continue
            if text := ast.get_docstring(child):
                yield prefix + child.name, text
            if isinstance(child, ast.ClassDef):
                yield from below(child, f"{prefix}{child.name}.")

    if text := ast.get_docstring(tree):
        yield "module", text
    yield from below(tree, "")


def docstring_faults(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", text):
        if "::" in block or re.match(r" {4,}\S", block):
            continue
        if block.lstrip().startswith("|"):
            for cell in block.replace("\n", "").split("|"):
                yield from faults(cell, lengths=False)
            continue
        parts = re.split(r"\n(?=\s*(?:\w+: |[-*] |Args:|Returns:|Raises:|Yields:))", block)
        for part in parts:
            body = re.sub(r"^\s*(?:[-*] |Args:|Returns:|Raises:|Yields:|\w+: )", "", part)
            if body.strip():
                yield from faults(body)
            argument = re.match(r"\s+(\w+): (\w+)", part)
            if argument and argument[2] in ARGUMENT_OPENINGS:
                yield f"argument opens with '{argument[2]}': {part.strip()[:60]}"


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Names of the arguments and variables of a module, once for each binding."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    parts = paragraphs(page.read_text())
    found = [fault for part, lengths in parts for fault in faults(part, lengths)]
    assert found == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_arguments_name_the_thing() -> None:
    text = "Sum.\n\nArgs:\n    one: what is added.\n    other: the other number."
    assert list(docstring_faults(text)) == ["argument opens with 'what': one: what is added."]


def test_names_say_the_thing() -> None:
    """At most 1 % of what is bound has a name that would fit anything."""
    trees = (ast.parse(file.read_text()) for file in (ROOT / "tuner").rglob("*.py"))
    names = [name for tree in trees for name in bound_names(tree)]
    vague = Counter(name for name in names if name in VAGUE)
    assert 100 * vague.total() <= len(names), vague.most_common(10)


def test_the_page_on_the_architecture_names_files_that_exist() -> None:
    page = (ROOT / "tuner" / "README.md").read_text()
    (table,) = re.findall(r"^## Finding things\n(.*?)^## ", page, flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"`([\w./]*/[\w./]*)`", table)
    places = ROOT / "tuner", ROOT
    missing = [name for name in named if not any((at / name).exists() for at in places)]
    assert len(named) > 20 and missing == []


def test_the_page_on_the_architecture_names_every_module_of_the_runtime() -> None:
    page = (ROOT / "tuner" / "README.md").read_text()
    runtime = ROOT / "tuner" / "runtime"
    modules = {path.stem for path in [*runtime.glob("[a-z]*.py"), *runtime.glob("*/[a-z]*.py")]}
    assert len(modules) > 30 and {name for name in modules if f"`{name}`" not in page} == set()


def test_the_changelog_says_nothing_twice() -> None:
    """Branches that mend the same entry leave both of its versions when they are merged."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    openings = Counter(line[:36] for line in lines if line.startswith("- "))
    assert openings and {text for text, count in openings.items() if count > 1} == set()


def help_texts(tree: ast.Module) -> Iterator[str]:
    """Texts of arguments and commands, and of constants that are called a description."""

    def text_of(node: ast.AST) -> str:
        match node:
            case ast.Constant(str() as text):
                return text
            case ast.JoinedStr(values):
                return "".join(text_of(value) or "Code" for value in values)
            case ast.BinOp(left, ast.Add(), right):
                return text_of(left) + text_of(right)
        return ""

    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="help" | "description" | "epilog", value=value):
                yield text_of(value)
            case ast.Assign(targets=[ast.Name(name)], value=value) if "DESCRIPTION" in name:
                yield text_of(value)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("place", PLACES, ids=name_of)
def test_public_docstrings(place: Path) -> None:
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    found = [
        f"{name_of(file)} {name}: {fault}"
        for file in files
        for name, text in documented(ast.parse(file.read_text()))
        for fault in docstring_faults(text)
    ]
    assert files and found == []


def test_help_texts() -> None:
    texts = [
        (file, block)
        for file in COMMANDS
        for text in help_texts(ast.parse(file.read_text()))
        for block in re.split(r"\n\s*\n", text)
        if block.strip()
    ]
    found = [
        f"{name_of(file)}: {fault}"
        for file, block in texts
        for fault in faults(block[0].upper() + block[1:])
    ]
    assert len(texts) > 300 and found == []
