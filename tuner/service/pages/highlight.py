"""Source text as HTML, with a class for each kind of token."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import Any, Literal

from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, String

Language = Literal["cuda", "python"]

#: The first that a token belongs to counts.
_KINDS = (
    *((Comment.Preproc, "directive"), (Comment.PreprocFile, "directive")),
    *((Name.Decorator, "directive"), (Comment, "comment"), (String, "string")),
    *((Number, "number"), (Keyword, "keyword")),
)


def highlight(text: str, language: Language) -> str:
    """The text as HTML: escaped, its tokens in ``<span class="tok-KIND">``.

    Args:
        text: text of a source file; all characters but carriage returns are kept.
        language: language of the tokens.
    """
    lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    parts = []
    for kind, tokens in groupby(lexer.get_tokens(text), lambda token: _kind(token[0])):
        piece = escape("".join(part for _, part in tokens))
        parts.append(f'<span class="tok-{kind}">{piece}</span>' if kind else piece)
    return "".join(parts)


def _kind(token: Any) -> str:
    return next((name for group, name in _KINDS if token in group), "")
