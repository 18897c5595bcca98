"""Versions of engines that the runtime serves, and the places that state them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")  # `tuner.runtime` imports it

from tuner.runtime.engines.versions import TRANSFORMERS, VLLM, Versions

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGE = (ROOT / "docs" / "pages" / "engines.md").read_text()


@pytest.mark.parametrize("version", ["1.9", "1.9.4", "1.10.0+cu130", "2.0.1rc1", "2.1.0.dev3"])
def test_versions_that_are_served(version: str) -> None:
    assert not Versions("An engine", (1, 9), (2, 1)).refusal(version)


@pytest.mark.parametrize("version", ["1.8.9", "1.0", "2.2.0", "19.0", "dev", ""])
def test_versions_that_are_not(version: str) -> None:
    wanted = f"An engine {version} (served: 1.9 to 2.1)"
    assert Versions("An engine", (1, 9), (2, 1)).refusal(version) == wanted


def test_the_extra_installs_a_transformers_that_is_served() -> None:
    oldest, newest = (".".join(map(str, ends)) for ends in (TRANSFORMERS.first, TRANSFORMERS.last))
    [bound] = [text for text in EXTRAS["transformers"] if text.startswith("transformers")]
    after = f"{TRANSFORMERS.last[0]}.{TRANSFORMERS.last[1] + 1}"
    assert bound == f"transformers>={oldest},<{after}"
    assert any(text.startswith(f"transformers=={newest}.") for text in EXTRAS["dev"])


def test_the_page_states_them() -> None:
    assert f"vLLM {VLLM}" in PAGE and f"Transformers {TRANSFORMERS}" in PAGE
