"""``scripts/bench batching``: requests, tokens and its report, over a tiny model on CPU tensors."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks import batching, flash_attention_package
from benchmarks.batching import SHORTEST, Load, Server, report, same_share, summary
from tuner.errors import BenchmarkError, ConfigError

LOAD = Load("tiny", requests=3, prompt=32, new=4, page_size=16)


def row(way: str, speed: float, tokens: list[list[int]], **more: Any) -> dict[str, Any]:
    counts: dict[str, Any] = {"hits": 0, "fallbacks": {}, "errors": {}}
    speeds = {"requests_per_s": speed, "tokens_per_s": 4 * speed}
    return {"attention": way, "tokens": tokens} | counts | speeds | more


def test_prompts_are_unlike_and_the_same_each_time() -> None:
    load = Load("1b", requests=64, prompt=1024, new=1, page_size=16)
    lengths = [len(prompt) for prompt in load.prompts()]
    assert load.prompts() == load.prompts()
    assert 1024 // SHORTEST <= min(lengths) < 256 < 900 < max(lengths) <= 1024


def test_tokens_count_up_to_the_first_that_differs() -> None:
    assert same_share([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6
    assert same_share([], []) == 0.0


def test_the_report_is_beside_sdpa() -> None:
    lost = {"attention": "flash_attention_2", "lost": "no answer after 1 s"}
    rows = [row("sdpa", 2.0, [[1, 2]]), row("tuner", 3.0, [[1, 3]], fallbacks={"no": 7}), lost]
    *_, tuned, failed = report(rows).splitlines()
    assert tuned.split() == ["tuner", "3.00", "12", "1.500", "50.0%", "0", "7", "no"]
    assert failed.endswith("failed: no answer after 1 s")
    assert "1.500" not in report(rows[1:])


@pytest.mark.parametrize("way", ["sdpa", "tuner"])
def test_every_request_has_its_tokens(runtime: Any, way: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    server = Server(way, LOAD, "cpu")
    try:
        found = summary(server.start(), [server.run(), server.run()])
    finally:
        server.close()
    assert [len(tokens) for tokens in found["tokens"]] == [4, 4, 4]
    assert len(found["seconds"]) == 2 and found["requests_per_s"] > 0
    assert bool(found["fallbacks"]) == (way == "tuner")


@pytest.mark.parametrize(("found", "by"), [(True, "its own kernel"), (False, "PyTorch's op")])
def test_the_report_says_who_writes_flash_attention_s_cache(
    monkeypatch: pytest.MonkeyPatch, found: bool, by: str
) -> None:
    module = SimpleNamespace(appends=lambda: found)
    monkeypatch.setitem(sys.modules, flash_attention_package.MODULE, module)
    assert batching.appends() is found
    text = report([row("sdpa", 2.0, [[1]]), row("flash_attention_3", 2.0, [[1]], appends=found)])
    assert f"flash_attention_3: new keys and values are written to the cache by {by}" in text
    assert text.count("written to the cache") == 1
    del module.appends  # of an installed FlashAttention-3
    assert batching.appends()


def test_flash_attention_s_row_tells_it(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = batching._model
    monkeypatch.setattr(batching, "_model", lambda way, *given: model("sdpa", *given))
    monkeypatch.setattr(batching, "appends", lambda: False)
    for way in ("sdpa", "flash_attention_3"):
        server = Server(way, LOAD, "cpu")
        try:
            assert server.start().get("appends") == (None if way == "sdpa" else False)
        finally:
            server.close()


def test_the_limit_is_for_the_start_and_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        batching.main(["--help"])
    assert "for an attention's start, and for each of its passes" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_median_pass_counts() -> None:
    passes = [{"seconds": s, "tokens": [[1, 2], [3, 4]], "hits": 3} for s in (4.0, 1.0, 2.0)]
    found = summary({"first_seconds": 9.0, "hits": 0}, passes)
    assert (found["requests_per_s"], found["tokens_per_s"]) == (1.0, 2.0)
    assert (found["seconds"], found["hits"]) == ([4.0, 1.0, 2.0], 3)


def test_wrong_options_and_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "detect", lambda: None)
    monkeypatch.setattr(batching.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="--new-tokens 0"):
        batching.main(["--new-tokens", "0"])
    with pytest.raises(BenchmarkError, match="no GPU found"):
        batching.main([])
    monkeypatch.setattr(batching.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match="Transformers is not installed"):
        batching.main([])


class Child:
    """A worker that is lost at a call of an attention."""

    calls: ClassVar[list[tuple[str, int]]] = []
    lost: ClassVar[tuple[str, int]] = ("tuner", 0)

    def __init__(self, command: Any, limit_s: float) -> None:
        self.way = command[-1]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, index: int) -> dict[str, Any]:
        self.calls.append((self.way, index))
        if (self.way, index) == self.lost:
            return {"lost": "gone"}
        counts: dict[str, Any] = {"hits": 0, "fallbacks": {}, "errors": {}}
        return {"seconds": 1.0, "tokens": [[1]], **counts} if index else {"first_seconds": 2.0}


@pytest.mark.parametrize("is_at_once", [False, True])
@pytest.mark.parametrize("lost", [0, 2])
def test_each_attention_has_its_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, is_at_once: bool, lost: int
) -> None:
    """One that is not installed is left out in one line, and one that is lost costs one row."""
    monkeypatch.setattr(Child, "calls", [])
    monkeypatch.setattr(Child, "lost", ("tuner", lost))
    monkeypatch.setattr(batching, "Worker", Child)
    has = {"torch", "transformers"}
    monkeypatch.setattr(
        batching.importlib.util, "find_spec", lambda name: name if name in has else None
    )
    options = ["--device", "cpu", "--model", "tiny", *["--at-once"] * is_at_once]
    assert batching.main(options) == 1
    sdpa, tuned = ([i for way, i in Child.calls if way == name] for name in ("sdpa", "tuner"))
    assert (sdpa, tuned) == ([0, 1, 2, 3], list(range(lost + 1)))
    starts = [index for index, (_, i) in enumerate(Child.calls) if i == 0]
    assert starts == ([0, 1] if is_at_once else [0, 4])
    said = capsys.readouterr()
    assert said.err.count("is left out") == 2 and "failed: gone" in said.out
    assert "1.00" in said.out


def test_a_package_of_the_serving_build_is_one_to_python(tmp_path: Path) -> None:
    """Transformers looks for a module, and for the distribution that it belongs to."""
    folder = flash_attention_package.written(tmp_path)
    text = (folder / "flash_attn_interface.py").read_text()
    names = re.findall(r"import (\w+)", text)
    assert names and all(hasattr(flash_attention_package, name) for name in names)
    [found] = importlib.metadata.distributions(path=[str(folder)])
    assert (found.metadata["Name"], found.read_text("top_level.txt")) == (
        "flash_attn_3",
        "flash_attn_interface\n",
    )


def test_new_keys_are_written_behind_those_that_are_there() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    caches = [torch.zeros(3, 4, 1, 2) for _ in range(2)]
    new = [torch.full((2, 1, 1, 2), value) for value in (5.0, 7.0)]
    used, table = torch.tensor([3, 4]), torch.tensor([[2, 0], [1, 0]])
    flash_attention_package._append(*caches, *new, used, table)
    for cache, value in zip(caches, (5.0, 7.0), strict=True):
        assert (cache[2, 3] == value).all() and (cache[0, 0] == value).all()
        assert int((cache != 0).sum()) == 4


def test_padding_behind_its_table_is_written_nowhere() -> None:
    """A graph's padding may count more keys than its table has slots, or name no page."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    caches = [torch.full((3, 4, 1, 2), 3.0).bfloat16() for _ in range(2)]
    new = [torch.full((3, 1, 1, 2), value).bfloat16() for value in (5.0, 7.0)]
    used, table = torch.tensor([0, 8, 1]), torch.tensor([[0, 1], [0, 0], [-1, 0]])
    flash_attention_package._append(*caches, *new, used, table)
    for cache, value in zip(caches, (5.0, 7.0), strict=True):
        assert (cache[0, 0] == value).all() and int((cache != 3).sum()) == 2


def test_tokens_are_judged_by_the_model_in_fp32(
    runtime: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The first choices of sdpa pass; a token that is changed to another does not."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    server = Server("sdpa", LOAD, "cpu")
    try:
        tokens = server.start() and server.run()["tokens"]
    finally:
        server.close()
    wrong = [[*one[:-1], (one[-1] + 1) % 512] for one in tokens]
    rows = [row("tuner", 1.0, wrong) | vars(LOAD), row("sdpa", 1.0, tokens) | vars(LOAD)]
    rows.append({"attention": "flash_attention_3", "lost": "gone"})
    source, out = tmp_path / "batching.json.gz", tmp_path / "judged.json"
    source.write_bytes(gzip.compress(json.dumps({"rows": rows}).encode()))
    argv = ["--judge", str(source), "--device", "cpu", "--json", str(out)]
    assert batching.main(argv) == 0
    found = json.loads(out.read_text())
    assert list(found["of"]) == ["sdpa", "tuner"] and found["model"] == "tiny"
    good, bad = found["of"]["sdpa"], found["of"]["tuner"]
    assert good["tokens"] == bad["tokens"] == 12
    assert good["within"] == 1.0 and good["largest_gap"] <= found["rounding"]["largest"]
    assert bad["within"] <= 0.75 + 1e-9 and bad["largest_gap"] > 0.01
    assert found["ties"]["median"] > 0
    text = capsys.readouterr().out
    assert re.search(r"^sdpa +12 +[\d.]+% +100.00%", text, re.MULTILINE)
    assert "first to second logit in fp32: median" in text
    source.write_text(json.dumps({"rows": rows[2:]}))
    with pytest.raises(ConfigError, match="no attention has tokens"):
        batching.main(argv)


def test_what_is_asked_of_the_peer_leaves_the_model_s_weights() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(0)
    wanted = torch.randn(4)
    torch.manual_seed(0)
    drawn = flash_attention_package._drawn("cpu")
    assert [tuple(one.shape) for one in drawn[2:4]] == [(2, 1, 2, 64), (4, 16, 2, 64)]
    assert torch.equal(torch.randn(4), wanted)
