"""Source text as HTML, with a class for each kind of token."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Literal

Language = Literal["cuda", "python"]

_CUDA = """alignas alignof asm auto bool break case catch char class const const_cast constexpr
    continue decltype default delete do double else enum explicit extern false float for friend if
    inline int long namespace new noexcept nullptr operator private protected public
    reinterpret_cast return short signed sizeof static static_assert static_cast struct switch
    template this throw true try typedef typename union unsigned using virtual void volatile while
    __align__ __constant__ __device__ __forceinline__ __global__ __grid_constant__ __host__
    __launch_bounds__ __noinline__ __restrict__ __shared__ uint8_t uint16_t uint32_t uint64_t
    int8_t int16_t int32_t int64_t size_t"""
_PYTHON = """False None True and as assert async await break class continue def del elif else except
    finally for from global if import in is lambda nonlocal not or pass raise return try while with
    yield"""
_STRING = r'"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])+'"
_NUMBER = r"\b(?:0[xX][\da-fA-F]+|\d[\d.]*(?:[eE][+-]?\d+)?)\w*"


def _pattern(words: str, **kinds: str) -> re.Pattern[str]:
    kinds |= {
        "string": _STRING,
        "number": _NUMBER,
        "keyword": rf"\b(?:{'|'.join(words.split())})\b",
    }
    alternatives = "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in kinds.items())
    return re.compile(alternatives, re.DOTALL | re.MULTILINE)


#: What begins first wins: no keyword is marked within a comment or a string.
_PATTERNS: Mapping[Language, re.Pattern[str]] = {
    "cuda": _pattern(_CUDA, comment=r"//[^\n]*|/\*.*?\*/", directive=r"^[ \t]*#[^\n]*"),
    "python": _pattern(_PYTHON, comment=r'#[^\n]*|""".*?"""', directive=r"^[ \t]*@[\w.]+"),
}


def highlight(text: str, language: Language) -> str:
    """The text as HTML: escaped, its tokens in ``<span class="tok-KIND">``.

    Args:
        text: text of a source file; all characters are kept.
        language: language of the tokens.
    """
    return "".join(_parts(text, _PATTERNS[language]))


def _parts(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    end = 0
    for match in pattern.finditer(text):
        yield escape(text[end : match.start()])
        yield f'<span class="tok-{match.lastgroup}">{escape(match[0])}</span>'
        end = match.end()
    yield escape(text[end:])
