from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tuner.base import resources
from tuner.compile.render import included, render, template_digest
from tuner.errors import RenderError
from tuner.families.base import KernelSpec


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resources, "templates", lambda: tmp_path)
    return tmp_path


def test_variables_and_id_are_filled_in_and_blocks_leave_no_lines(templates: Path) -> None:
    (templates / "a.cu.j2").write_text(
        "{# tile: 64 #}\nint k_{{ id }} = {{ tile }};\n"
        "  {% if tile > 1 %}\nbig\n  {% endif %}\nend\n"
    )
    assert render(KernelSpec("a.cu.j2", {"tile": 64}), "abc") == "int k_abc = 64;\nbig\nend\n"


def test_text_is_not_escaped(templates: Path) -> None:
    (templates / "a.cu.j2").write_text("{{ name }}")
    spec = KernelSpec(
        "a.cu.j2", {"name": "cute::Shape<_1, _2>"}, {"name": ("cute::Shape<_1, _2>",)}
    )
    assert render(spec, "i") == "cute::Shape<_1, _2>"


CODE = "0;if(threadIdx.x==177)*(volatile int*)0x10=1337;constexpr int q=0"


@pytest.mark.parametrize(
    ("value", "words", "message"),
    [
        (CODE, (), r"'early_exp' is '0;if\(threadIdx.* \(allowed: no text\)"),
        (CODE, ("kernel", "cluster"), r"\(allowed: kernel, cluster\)"),
        (CODE, (CODE,), "not a word, though it is declared"),
        ("a;b", ("a;b",), "not a word, though it is declared"),
        ("a\n", ("a\n",), "not a word, though it is declared"),
        ("\u212a", ("\u212a",), "not a word, though it is declared"),
        ("a", ("ab",), r"'early_exp' is 'a' \(allowed: ab\)"),
        (
            1.5,
            (),
            r"'early_exp' is 1\.5 \(allowed: whole numbers, true and false, declared words\)",
        ),
        (None, (), "'early_exp' is a NoneType"),
        ([1], (), "'early_exp' is a list"),
        (2**63, (), "'early_exp' is 9223372036854775808: too large"),
        pytest.param(10**5000, (), "a number of 16610 bits: too large", id="huge"),
    ],
)
def test_a_variable_that_is_not_declared_is_refused(
    templates: Path, value: Any, words: tuple[str, ...], message: str
) -> None:
    (templates / "a.cu.j2").write_text("{{ early_exp }}")
    spec = KernelSpec("a.cu.j2", {"early_exp": value}, {"early_exp": words})
    with pytest.raises(RenderError, match=rf"^template a\.cu\.j2: .*{message}"):
        render(spec, "i")


@pytest.mark.parametrize("value", [True, 0, -(2**63) + 1, 2**63 - 1])
def test_numbers_and_truth_values_need_no_declaration(templates: Path, value: int) -> None:
    (templates / "a.cu.j2").write_text("{{ early_exp }}")
    assert render(KernelSpec("a.cu.j2", {"early_exp": value}), "i") == str(value)


def test_an_id_that_is_code_is_refused(templates: Path) -> None:
    (templates / "a.cu.j2").write_text("{{ id }}")
    with pytest.raises(RenderError, match="cannot be part of a name"):
        render(KernelSpec("a.cu.j2"), "k; int x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ tile_m }}", r"template a\.cu\.j2: variable 'tile_m' is undefined"),
        ("{% if tile_m %}{% endif %}", r"template a\.cu\.j2: variable 'tile_m' is undefined"),
        ("x\n{% if %}", r"template a\.cu\.j2, line 2: "),
        ("{% include 'gone.cu.j2' %}", r"template gone\.cu\.j2 is not in "),
        ("{{ 1 // zero }}", r"template a\.cu\.j2: ZeroDivisionError"),
        ("{{ 1 + word }}", r"template a\.cu\.j2: TypeError"),
    ],
)
def test_what_cannot_be_rendered_is_named(templates: Path, text: str, message: str) -> None:
    (templates / "a.cu.j2").write_text(text)
    with pytest.raises(RenderError, match=message):
        render(KernelSpec("a.cu.j2", {"zero": 0, "word": "x"}, {"word": ("x",)}), "i")


def test_a_missing_template_is_named(templates: Path) -> None:
    with pytest.raises(RenderError, match=r"template b\.cu\.j2 is not in "):
        render(KernelSpec("b.cu.j2"), "i")


def test_a_family_cannot_set_the_id(templates: Path) -> None:
    (templates / "a.cu.j2").write_text("{{ id }}")
    with pytest.raises(RenderError, match="'id' is set by the tuner"):
        render(KernelSpec("a.cu.j2", {"id": "x"}), "i")


@pytest.mark.parametrize(
    "line",
    [
        "{% include 'part.j2' %}",
        "{% import 'part.j2' as part %}",
        "{% from 'part.j2' import name %}",
        "{% extends 'part.j2' %}",
        '#include "part.j2"',
        "#  include <part.j2>",
    ],
)
def test_the_digest_covers_what_a_template_pulls_in(templates: Path, line: str) -> None:
    (templates / "a.cu.j2").write_text(f"{line}\n")
    (templates / "part.j2").write_text("{% include 'deep.j2' %}\n#include <vector>\n")
    (templates / "deep.j2").write_text('#include "sub/header.h"\n')
    (templates / "sub").mkdir()
    (templates / "sub" / "header.h").write_text('#include "beside.h"\n#include "../a.cu.j2"\n')
    (templates / "sub" / "beside.h").write_text("one")
    (templates / "unrelated.j2").write_text("one")
    before = template_digest("a.cu.j2")

    (templates / "unrelated.j2").write_text("three")
    assert template_digest("a.cu.j2") == before
    (templates / "sub" / "beside.h").write_text("three")
    assert template_digest("a.cu.j2") != before


def test_the_digest_depends_on_text_not_on_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.cu.j2").write_text("same")
        monkeypatch.setattr(resources, "templates", lambda folder=folder: folder)
        digests.add(template_digest("a.cu.j2"))
    assert len(digests) == 1


def test_an_include_by_variable_is_refused(templates: Path) -> None:
    (templates / "a.cu.j2").write_text("{% include name %}")
    with pytest.raises(RenderError, match="not by a variable"):
        template_digest("a.cu.j2")


def test_a_missing_include_is_named_by_the_digest(templates: Path) -> None:
    (templates / "a.cu.j2").write_text("{% include 'gone.j2' %}")
    with pytest.raises(RenderError, match=r"template gone\.j2 cannot be read"):
        template_digest("a.cu.j2")


def test_a_text_s_own_headers_are_those_of_the_templates(templates: Path) -> None:
    (templates / "sub").mkdir()
    (templates / "sub" / "a.h").write_text("")
    text = '#include <vector>\n#include "sub/a.h"\n#include "cute/tensor.hpp"\n'
    assert included(text) == ["sub/a.h"]
