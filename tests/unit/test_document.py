"""Documents from outside: wrong ones end in one line that names the file."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from shipped_recordings import FILES

from tuner.base import document
from tuner.bench.results import Results
from tuner.cli import main
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Clocks, Environment, Measurement
from tuner.problem import SoftmaxProblem
from tuner.runners import recording
from tuner.tuning.job import read_problems

DEEP = 200_000
LISTS = "[" * DEEP + "]" * DEEP


@pytest.mark.parametrize("text", [LISTS, '{"a":' * DEEP + "1" + "}" * DEEP])
def test_what_is_nested_too_deeply_is_wrong_input(text: str) -> None:
    for pairs in (None, dict):
        with pytest.raises(ConfigError, match="nested too deeply"):
            document.parse(text, pairs)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("a.json", ["sweep", "--problems", "FILE"]),
        ("a.yaml", ["sweep", "--problems", "FILE"]),
        ("a.json", ["shapes", "--model", "FILE"]),
        ("a.json", ["bench", "attention", "--resume", "--json", "FILE"]),
        ("a.json.gz", ["report", "--recording", "FILE"]),
    ],
)
def test_every_reader_names_the_file(
    name: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(LISTS.encode()))
    else:
        file.write_text(LISTS if name.endswith(".json") else "[" * 5000 + "]" * 5000)
    assert main([str(file) if word == "FILE" else word for word in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line and "nested too deeply" in line


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("0100", 100),
        ("-012", -12),
        ("0o17", 15),
        ("0x40", 64),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1e3", 1000.0),
        ("012.5", 12.5),
        ("1__0.5", "1__0.5"),
        ("yes", "yes"),
        ("off", "off"),
        ("TRUE", True),
        ("~", None),
        ("", None),
        ("2026-13-45", "2026-13-45"),
        ("2026-11-28", "2026-11-28"),
        ("<<", "<<"),
        ("=", "="),
    ],
)
def test_yaml_has_the_values_of_its_version_1_2(value: str, wanted: object) -> None:
    [read] = document.parse_yaml(f"- {value}\n", dict)
    assert (type(read), read) == (type(wanted), wanted)


def test_numbers_of_yaml_1_1_tune_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("- {op: gemm, M: 0100, N: 64, K: 64}\n")
    assert [problem.label() for problem in read_problems(file)] == ["M=100,N=64,K=64,dtype=fp16"]
    file.write_text("- {S: 1:30, D: 64}\n")
    with pytest.raises(ConfigError, match="S=1:30 is not a whole number"):
        read_problems(file)


def test_yaml_is_read_in_one_place() -> None:
    """PyYAML's own loaders have the values of YAML 1.1, and no limits."""
    importing = re.compile(r"^\s*(import yaml|from yaml)", re.MULTILINE)
    root = Path(__file__).parents[2]
    files = [*(root / "tuner").rglob("*.py"), *(root / "scripts").rglob("*.py")]
    readers = {file.name for file in files if importing.search(file.read_text())}
    assert readers == {"document.py"}


BOMB = "- &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"- &{chr(c + 1)} [{', '.join([f'*{chr(c)}'] * 9)}]\n" for c in range(ord("a"), ord("i"))
)
HEX = "0x" + "f" * 6000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", BOMB, ": line 2: an alias is not allowed (write the value again)"),
        ("a.yaml", "- &a {S: 64, D: 64}\n- *a\n", ": line 2: an alias is not allowed"),
        ("a.yaml", "[" * 9 + "]" * 9, ": line 1: it is nested too deeply (allowed: 8 levels)"),
        ("a.yaml", "- " + "{a: [" * 100_000, ": line 1: it is nested too deeply"),
        ("a.yaml", f"- S=64,D=64\n- {{S: {HEX}}}", ": line 2: a value of 6002 characters"),
        ("a.yaml", f"- {{S: 0x{'f' * 254}, D: 64}}", "entry 1: S=702223"),
        ("a.yaml", "- !!int ''", ": line 1: a tag is not allowed"),
        ("a.yaml", "- !!bool x", ": line 1: a tag is not allowed"),
        ("a.yaml", "- !!timestamp x", ": line 1: a tag is not allowed"),
        ("a.yaml", "- !!python/object:os.system x", ": line 1: a tag is not allowed"),
        ("a.yaml", "- \x1b[2J", " is not YAML: unacceptable character"),
        ("a.yaml", '- "\\e[2J"', r"entry 1: '\x1b[2J' is not KEY=VALUE"),
        ("a.json", '[{"op": [1]}]', "entry 1: op=[1] is not known"),
        ("a.yaml", "- {op: {a: 1}}", "entry 1: op={'a': 1} is not known"),
        ("a.json", '[{"op": null}]', "entry 1: op=None is not known"),
        ("a.json", '[{"S": 64, "D": 64, "softcap": 1%s}]' % ("0" * 400), "entry 1: softcap=1000"),
        ("a.json", '[{"S": 64, "D": 64, "H": 2147483647, "HKV": 64}]', "(allowed: a divisor of H)"),
        ("a.json", "[" + "9" * 5000 + "]", " is not JSON: "),
        ("a.json", '["\\u001b[2J\\ud800"]', r"entry 1: '\x1b[2J\ud800' is not"),
        ("a.json", '["%s"]' % ("x" * 100_000), "entry 1: 'xxx"),
        ("a.json", '[{"%s": 1}]' % ("x" * 100_000), "entry 1: unknown key 'xxx"),
        ("a.json", "[%s]" % ("[" * 500 + "]" * 500), "entry 1: [[["),
        ("a.json", f'["{"x" * (4 << 20)}"]', " is too large (allowed: 4194304 bytes)"),
    ],
    ids=lambda value: value[:20],
)
def test_a_hostile_list_of_problems_ends_in_a_line(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert main(["sweep", "--problems", str(file)]) == 2
    told = capsys.readouterr().err
    *first, line = told.splitlines()
    assert told.startswith(f"tuner: {'1 of the 1' if first else 'problems file'}")
    assert len(first) == message.startswith(("entry", "(allowed"))
    assert message in line
    assert len(line.removeprefix(f"tuner: problems file {file}")) < 220
    assert line.isprintable()


def test_a_list_without_an_end_is_not_read_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "submit", "/dev/zero"]) == 2
    assert capsys.readouterr().err.startswith("tuner: problems file /dev/zero is too large")


def test_of_many_wrong_problems_some_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("- S=64,D=7\n" * 100 + "- S=64,D=64\n")
    assert main(["sweep", "--problems", str(file)]) == 2
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert "100 of the 101 problems" in first
    assert len(lines) == 20
    assert last == "and 80 more"


@pytest.mark.parametrize(
    ("cls", "data", "message"),
    [
        (Gpu, [], "Gpu: \\[\\] is not an object"),
        (Gpu, {"sm_count": "132"}, "sm_count='132' is not a whole number"),
        (Gpu, {"sm_count": True}, "sm_count=True is not a whole number"),
        (Gpu, {"name": 1}, "name=1 is not text"),
        (Clocks, {"power_w": None}, "power_w=None is not a number"),
        (Measurement, {"latency_us": "fast"}, "latency_us='fast' is not a number or null"),
        (Measurement, {"latency_us": float("inf")}, "latency_us=inf is not finite"),
        (Measurement, {"latency_us": 10**400}, "latency_us is too large for a floating"),
        (Measurement, {"is_final": 1}, "is_final=1 is not true or false"),
    ],
)
def test_a_field_of_another_type_is_named(cls: type, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        document.checked(cls, data)


def test_fields_of_their_types_pass() -> None:
    for data in ({"power_w": 700, "sm_mhz": 1980}, {"throttle": "whatever"}, {"other": 1}):
        assert document.checked(Clocks, data) == data


@pytest.mark.parametrize("data", [{"params": {1: 2}}, {"stages": {None: {"family": "toy"}}}])
def test_a_config_s_names_are_text(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not the name of a parameter or stage"):
        Config.from_json({"family": "toy", **data})


def _number_a_parameter(data: Any) -> None:
    table = next(t for t in data["configs"] if t["names"] and t["rows"])
    table["names"][0] = 5


def _spell_the_processors(data: Any) -> None:
    data["gpu"]["sm_count"] = "many"


@pytest.mark.parametrize("spoil", [_number_a_parameter, _spell_the_processors])
def test_a_damaged_recording(
    spoil: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = recording.read_document(FILES[0])
    spoil(data)
    file = tmp_path / ("a" + recording.SUFFIX)
    file.write_bytes(gzip.compress(json.dumps(data).encode()))
    assert main(["report", "--recording", str(file), "-o", str(tmp_path / "r.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"recording {file} is damaged" in line


def test_a_bench_with_a_time_as_text() -> None:
    timed = {"role": "own", "name": "a", "latency_us": "5"}
    row = {
        "suite": "shapes",
        "problem": SoftmaxProblem(64, 64).to_json(),
        "regime": "graph-warm",
        "kernels": [timed],
        "clocks": {"throttle": []},
    }
    data = Results(DEFAULT_GPU, Environment({})).to_json()
    with pytest.raises(ConfigError, match="latency_us='5' is not a number or null"):
        Results.from_json({**data, "rows": [row]})


def test_a_closed_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["list"]) == 1
    assert capsys.readouterr().err.startswith("tuner: standard output is closed")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b'{"a": [1, "}}]]", {"b": "\\\\"}]}', ""),
        (b'{"a": [[[["deep"]]]]}', "nested too deeply (allowed: 4 levels)"),
        (b'["[[[[[[", "\\"[[[[["]', ""),
        (b'"' + b'\\"[' * 100_000, ""),
        (b"[" + b"1," * 20, "it is too large (allowed: 16 strings, brackets and commas)"),
        (b'[""' * 20, "it is too large"),
        (b"]" * 10 + b"[" * 5, ""),
    ],
)
def test_the_extent_of_json_is_known_before_it_is_parsed(text: bytes, fault: str) -> None:
    if not fault:
        document.check_extent(text, tokens=16, depth=4)
        return
    with pytest.raises(ConfigError, match=re.escape(fault)):
        document.check_extent(text, tokens=16, depth=20 if "large" in fault else 4)
