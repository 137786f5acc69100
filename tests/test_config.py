"""The policy file: what it may say, what it is refused for, and its documentation."""

import codecs
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.config import Config, Size, Tier, section_models
from tiermem.config.documentation import document
from tiermem.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent

EVERY_KEY = """
[device]
kind = "cuda:1"
budget = "20GiB"
[host]
budget = 4_294_967_296
pinned = false
[disk]
paths = ["/nvme0/run", "/nvme1/run"]
budget = "1TiB"
keep = true
max_written_per_day = "2TB"
[placement]
parameters = "device"
gradients = "host"
optimizer = "disk"
activations = "disk"
activation_size = "256KiB"
[policy]
eviction = "lru"
prefetch = "lookahead"
lookahead = "2GiB"
units = ["blocks.*", "head"]
[precision]
parameters = "bfloat16"
[ranks]
stage = 2
timeout = 30
shards = 2
reduce = "float32"
[io]
engine = "threads"
request = "256KiB"
depth = 8
[durability]
mode = "off"
commits = 2
[integrity]
checksums = false
[trace]
file = "run.trace"
"""


def refusal(source: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)  # type: ignore[arg-type]
    return caught.value


def one_problem(source: object) -> str:
    (problem,) = refusal(source).problems
    return problem


def policy_file(folder: Path, text: str) -> Path:
    path = folder / "policy.toml"
    path.write_text(text)
    return path


# Reading


def test_every_key_is_read_from_a_file(tmp_path: Path) -> None:
    config = Config.load(policy_file(tmp_path, EVERY_KEY))
    assert config.device.kind == "cuda:1"
    assert config.device.budget == Size(20 * 2**30)
    assert config.host.budget == Size(2**32)
    assert config.host.pinned is False
    assert config.disk.paths == (Path("/nvme0/run"), Path("/nvme1/run"))
    assert config.disk.keep is True
    assert (config.durability.every, config.durability.commits) == (None, 2)
    assert config.integrity.checksums is False
    assert list(dict(config.placement).values()) == [
        Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.DISK, Size(2**18),
    ]  # fmt: skip
    assert config.policy.lookahead == Size(2 * 2**30)
    assert config.policy.units == ("blocks.*", "head")
    assert config.precision.parameters == "bfloat16"
    assert (config.ranks.stage, config.ranks.shards, config.ranks.timeout) == (2, 2, 30.0)
    assert config.io.request == Size(2**18)
    assert config.trace.file == Path("run.trace")
    given = {f"{name}.{key}" for name in section_models() for key, _ in getattr(config, name).changed()}
    assert given == {
        f"{name}.{key}" for name, model in section_models().items() for key in model.model_fields
    }


def test_nothing_gives_the_defaults() -> None:
    config = Config.load(None)
    assert config == Config() == Config.load({})
    assert [str(budget) for budget in (config.device.budget, config.host.budget, config.disk.budget)] == [
        "90%",
        "80%",
        "90%",
    ]
    assert {config.placement.parameters, config.placement.gradients, config.placement.optimizer} == {
        Tier.DISK
    }
    assert (config.policy.eviction, config.policy.prefetch, config.policy.lookahead) == (
        "plan",
        "lookahead",
        "auto",
    )
    assert config.precision.parameters is None
    assert config.trace.file is None


def test_a_config_is_given_back_and_any_mapping_is_read() -> None:
    config = Config.load(MappingProxyType({"host": MappingProxyType({"budget": 4096})}))
    assert config.host.budget == Size(4096)
    assert Config.load(config) is config
    assert Config(host={"budget": 4096}) == config


def test_a_path_may_be_text_and_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy_file(tmp_path, '[disk]\npaths = ["~/pages"]')
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config.load("~/policy.toml").disk.paths == (tmp_path / "pages",)


def test_the_disk_folder_without_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/scratch")
    (folder,) = Config().disk.folders
    assert folder.parent == Path("/scratch")
    monkeypatch.delenv("TMPDIR")
    (folder,) = Config().disk.folders
    assert folder.parent == Path("/var/tmp")
    assert folder.name.startswith("tiermem-")
    assert Config(disk={"paths": ["/a"]}).disk.folders == (Path("/a"),)


@pytest.mark.parametrize(
    ("written", "read"), [("auto", "auto"), (3, 3), ("2GiB", Size(2**31)), ("3B", Size(3))]
)
def test_lookahead_is_units_or_a_size(written: object, read: object) -> None:
    assert Config(policy={"lookahead": written}).policy.lookahead == read


def test_tiers_go_down() -> None:
    assert [str(tier) for tier in Tier] == ["device", "host", "disk"]


# A value


def test_a_config_is_frozen_and_hashable(tmp_path: Path) -> None:
    config = Config.load(policy_file(tmp_path, EVERY_KEY))
    assert hash(config) == hash(Config.load(policy_file(tmp_path, EVERY_KEY)))
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.device.kind = "cpu"
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.device = Config().device


def test_repr_has_what_was_given() -> None:
    assert repr(Config()) == str(Config()) == "Config()"
    text = repr(Config.load({"host": {"budget": "48GiB"}, "policy": {"eviction": "lru"}}))
    assert text == ("Config(host=HostSection(budget=Size('48GiB')), policy=PolicySection(eviction='lru'))")


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"policy": {"prefetch": "none"}},
        {"device": {"kind": "cpu"}, "host": {"budget": "12.5%"}},
        {"disk": {"paths": ['/with "quotes"/and \\ more\x7f\n', "/ü"]}, "trace": {"file": "t"}},
        {"host": {"budget": "80%"}, "precision": {"parameters": None}},
    ],
)
def test_to_toml_loads_as_an_equal_config(source: dict[str, object], tmp_path: Path) -> None:
    config = Config.load(source)
    assert Config.load(policy_file(tmp_path, config.to_toml())) == config


def test_to_toml_of_every_key(tmp_path: Path) -> None:
    config = Config.load(policy_file(tmp_path, EVERY_KEY))
    assert Config.load(policy_file(tmp_path, config.to_toml())) == config
    assert '[host]\nbudget = "4GiB"\npinned = false\n' in config.to_toml()


# Refusals


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ({"device": {"kind": "gpu"}}, ["device.kind", 'read "gpu"', '"cuda:N"']),
        ({"device": {"kind": "cuda:-1"}}, ["device.kind", 'read "cuda:-1"']),
        ({"host": {"budget": "5XB"}}, ["host.budget", 'read "5XB"', "'XB' is not a unit", "512MiB"]),
        ({"host": {"budget": 0}}, ["host.budget", "read 0", "at least one byte"]),
        ({"host": {"budget": -1}}, ["host.budget", "read -1", "at least one byte"]),
        ({"host": {"budget": "101%"}}, ["host.budget", 'read "101%"', "at most 100"]),
        ({"host": {"budget": "0%"}}, ["host.budget", 'read "0%"', "above 0"]),
        ({"host": {"budget": 1.5}}, ["host.budget", "read 1.5"]),
        ({"host": {"budget": True}}, ["host.budget", "read true"]),
        ({"host": {"budget": {"most": 1}}}, ["host.budget", 'read {"most" = 1}', "it is not a size"]),
        ({"host": {"pinned": "true"}}, ["host.pinned", 'read "true"', '"auto", true or false']),
        ({"host": {"pinned": 1}}, ["host.pinned", "read 1"]),
        ({"disk": {"paths": "/a"}}, ["disk.paths", 'read "/a"', "a list of paths"]),
        ({"disk": {"paths": ["/a", ""]}}, ["disk.paths", 'read ["/a", ""]']),
        ({"disk": {"keep": "yes"}}, ["disk.keep", 'read "yes"', "true or false"]),
        ({"placement": {"parameters": "ram"}}, ["placement.parameters", 'read "ram"', '"host"']),
        ({"placement": {"gradients": ["host"]}}, ["placement.gradients", 'read ["host"]']),
        (
            {"policy": {"eviction": "LRU"}},
            ["policy.eviction", 'read "LRU"', '"plan", "lru", "belady" or "module:Class"'],
        ),
        ({"policy": {"prefetch": "all"}}, ["policy.prefetch", 'read "all"', '"none" or "lookahead"']),
        ({"policy": {"lookahead": 0}}, ["policy.lookahead", "read 0", "from 1 up"]),
        ({"policy": {"lookahead": True}}, ["policy.lookahead", "read true"]),
        ({"policy": {"lookahead": "3"}}, ["policy.lookahead", 'read "3"', "no unit"]),
        ({"policy": {"lookahead": "50%"}}, ["policy.lookahead", 'read "50%"', "a percentage"]),
        ({"policy": {"units": "head"}}, ["policy.units", 'read "head"', "a list of patterns"]),
        ({"policy": {"units": [""]}}, ["policy.units", 'read [""]']),
        ({"precision": {"parameters": "fp8"}}, ["precision.parameters", 'read "fp8"', '"bfloat16"']),
        ({"io": {"request": "5000B"}}, ["io.request", 'read "5000B"', "5,000 bytes", "multiple of 4096"]),
        ({"io": {"request": "1GiB"}}, ["io.request", 'read "1GiB"', "up to 256MiB"]),
        ({"io": {"request": "10%"}}, ["io.request", 'read "10%"', "a percentage"]),
        ({"io": {"depth": 0}}, ["io.depth", "read 0", "from 1 to 1024"]),
        ({"io": {"depth": 1025}}, ["io.depth", "read 1025", "from 1 to 1024"]),
        ({"io": {"engine": "uring"}}, ["io.engine", 'read "uring"', '"libaio"']),
        ({"trace": {"file": ""}}, ["trace.file", 'read ""', "a path"]),
        ({"trace": {"file": object()}}, ["trace.file", "read <object"]),
        ({"trace": "run.trace"}, ["trace", 'read "run.trace"', "a table of the keys file"]),
    ],
)
def test_a_value_that_is_not_allowed(source: object, parts: list[str]) -> None:
    problem = one_problem(source)
    for part in parts:
        assert part in problem
    assert "allowed is" in problem


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ({"host": {"buget": 1}}, ["host.buget", "did you mean host.budget?", "allowed: budget, pinned"]),
        ({"device": {"pinned": True}}, ["device.pinned", "did you mean host.pinned?"]),
        ({"devise": {}}, ["devise", "no such section", "did you mean device?"]),
        ({"request": "1MiB"}, ["request", "did you mean io.request?"]),
        ({"zebra": 1}, ["zebra: there is no such section (allowed: device, host"]),
        ({3: 1}, ["3: there is no such section"]),
        ({"self": {}}, ["self: there is no such section"]),
    ],
)
def test_an_unknown_key(source: object, parts: list[str]) -> None:
    problem = one_problem(source)
    for part in parts:
        assert part in problem


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (
            {"device": {"kind": "cpu", "budget": "1GiB"}},
            ["device.budget", 'read "1GiB"', 'device.kind = "cpu"', "host.budget alone"],
        ),
        ({"device": {"kind": "cpu"}, "host": {"pinned": True}}, ["host.pinned", 'device.kind = "cpu"']),
        (
            {"policy": {"prefetch": "none", "lookahead": 4}},
            ["policy.lookahead", "read 4", 'policy.prefetch = "none"'],
        ),
        ({"disk": {"paths": ["/a/b", "/a/./b"]}}, ["disk.paths", '"/a/b" and "/a/b"', "each folder once"]),
        ({"disk": {"paths": ["/a/b", "/a/c/../b"]}}, ["disk.paths", '"/a/b" and "/a/c/../b"']),
    ],
)
def test_a_contradiction(source: object, parts: list[str]) -> None:
    problem = one_problem(source)
    for part in parts:
        assert part in problem


def test_all_problems_at_once_with_the_file(tmp_path: Path) -> None:
    path = policy_file(tmp_path, '[host]\nbudget = "x"\nbuget = 1\n[io]\ndepth = 0\n[devise]\n')
    error = refusal(path)
    assert error.source == str(path)
    assert [problem.split(":")[0] for problem in error.problems] == [
        "host.budget",
        "host.buget",
        "io.depth",
        "devise",
    ]
    assert str(error).startswith(f"{path}: 4 problems\n  - host.budget: read")


def test_all_contradictions_at_once() -> None:
    error = refusal(
        {"device": {"kind": "cpu", "budget": 1}, "host": {"pinned": True}, "disk": {"paths": ["/a", "/a"]}}
    )
    assert len(error.problems) == 3
    assert error.source == "dict"


def test_a_constructor_refuses_likewise() -> None:
    with pytest.raises(ConfigError, match=r"^io\.depth: read 0; allowed is"):
        Config(io={"depth": 0})


def test_what_is_not_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    error = refusal(policy_file(tmp_path, '[host]\nbudget = "1GiB"\npinned = yes\n'))
    assert "this is not TOML" in str(error)
    assert "line 3" in str(error)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert str(refusal(missing)) == f"{missing}: the policy file can't be read: No such file or directory"
    assert "Is a directory" in str(refusal(tmp_path))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"[host]\xff")
    assert "byte 6 is not UTF-8" in str(refusal(binary))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(codecs.BOM_UTF8 + b'[host]\r\nbudget = "1GiB"\r\n')
    assert Config.load(path).host.budget == Size(2**30)
    path.write_bytes(codecs.BOM_UTF8 + b"[host]\xff")
    assert "byte 9 is not UTF-8" in str(refusal(path))


def test_what_is_no_source_is_refused() -> None:
    assert "read an object of type int" in str(refusal(3))


# Sizes


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (1, 1),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("20GB", 20 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 1 kib ", 1024),
        (".5KB", 500),
        ("1.0009KB", 1000),
        ("2PiB", 2**51),
    ],
)
def test_a_size_in_bytes(written: str | int, nbytes: int) -> None:
    assert Size.parse(written).resolve(free=7) == nbytes


@pytest.mark.parametrize(
    ("written", "free", "nbytes"),
    [("80%", 1000, 800), ("33.3 %", 1000, 333), ("100%", 2**60 + 1, 2**60 + 1), ("50%", 3, 1)],
)
def test_a_percentage_of_what_is_free(written: str, free: int, nbytes: int) -> None:
    assert Size.parse(written).resolve(free) == nbytes


@pytest.mark.parametrize("written", ["", "GiB", "-1", "1e9", "1,5GB", "nan", "0.1B", "5 XB", 0, -4, "100.1%"])
def test_what_is_no_size(written: str | int) -> None:
    with pytest.raises(ValueError):
        Size.parse(written)


@pytest.mark.parametrize(("nbytes", "percent"), [(None, None), (1, 1.0)])
def test_a_size_is_bytes_or_a_percentage(nbytes: int | None, percent: float | None) -> None:
    with pytest.raises(ValueError, match="either bytes or a percentage"):
        Size(nbytes, percent)


@given(
    st.one_of(
        st.builds(Size, nbytes=st.integers(1, 2**70)),
        st.builds(Size, percent=st.floats(0, 100, exclude_min=True)),
    )
)
def test_the_text_of_a_size_parses_to_it(size: Size) -> None:
    assert Size.parse(str(size)) == size


# Documentation


def test_the_committed_documentation_is_the_generated_one() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tiermem.config"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stderr == ""
    assert printed.stdout == document()
    assert (ROOT / "docs" / "policy.md").read_text() == document(), (
        "write it anew: python -m tiermem.config > docs/policy.md"
    )


def test_the_documented_defaults_are_the_defaults(tmp_path: Path) -> None:
    block = document().split("```toml\n")[1].split("```")[0]
    assert Config.load(policy_file(tmp_path, block)) == Config()


def test_every_documented_example_is_allowed() -> None:
    for name, model in section_models().items():
        for key, field in model.model_fields.items():
            assert field.description
            assert f"### {name}.{key}" in document()
            for example in field.examples or []:
                Config.load({name: {key: example}})


@pytest.mark.parametrize(
    ("mode", "every"), [("off", None), ("step", 1), ("every:1", 1), ("every:250", 250), ("manual", 0)]
)
def test_how_many_steps_apart_commits_are(mode: str, every: int | None) -> None:
    assert Config.load({"durability": {"mode": mode}}).durability.every == every


@pytest.mark.parametrize("mode", ["every", "every:0", "every:-1", "every:1.5", "steps", True])
def test_other_modes_are_refused(mode: object) -> None:
    assert one_problem({"durability": {"mode": mode}}).startswith(f"durability.mode: read {toml_of(mode)}")


def toml_of(value: object) -> str:
    return "true" if value is True else f'"{value}"'
