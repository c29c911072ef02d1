"""Settings: which source counts, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest

from ortolan.errors import UsageError
from ortolan.runtime.serve.config import DEFAULTS, TYPES, gather


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "serve.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_flag_wins_over_environment_over_file_over_default(toml: Any) -> None:
    """Whoever overrides a setting for one run must not be overruled by a file."""
    file = toml("grpc_port = 1\nhttp_port = 2\nmax_slots = 3\ngap_ms = 5\n")
    environment = {"ORTOLAN_SERVE_HTTP_PORT": "off", "ORTOLAN_SERVE_MAX_SLOTS": "5", "HOME": "/"}
    flags = {"max_slots": 6, "grpc_port": None, "threads": None}
    settings = gather(flags, environment, file)
    assert (settings.serve.grpc_port, settings.serve.http_port) == (1, "off")
    assert (settings.engine.max_slots, settings.engine.gap_ms) == (6, 5)
    origins = {one.name: one.origin for one in settings.listed}
    assert origins["max_slots"] == "--max-slots"
    assert origins["http_port"] == "ORTOLAN_SERVE_HTTP_PORT"
    assert origins["grpc_port"] == str(file)
    assert origins["host"] == "default"
    assert {one.name: one.value for one in settings.listed}["max_slots"] == 6


def test_defaults_are_the_dataclasses(toml: Any) -> None:
    settings = gather({}, {}, None)
    assert {one.name: one.value for one in settings.listed} == DEFAULTS
    assert {one.origin for one in settings.listed} == {"default"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_slot = 1", "max_slot is no setting; did you mean max_slots?"),
        ("[engine]\nmax_slots = 1", "engine is no setting"),
        ('max_slots = "many"', "max_slots is 'many'; it must be a whole number"),
        ("max_slots = true", "max_slots is True"),
        ("max_slots = 1.5", "max_slots is 1.5"),
        ("grpc_port = 'on'", "grpc_port is 'on'; it must be a whole number or off"),
        ("accuracy = 'high'", "accuracy is 'high'; it must be default or exact"),
        ("max_slots = ", "is not TOML"),
        (f"max_slots = {'9' * 5000}", "thousands of digits"),
        (f"max_slots = {'[' * 5000}", "brackets hundreds deep"),
        (f"grace = 1{'0' * 400}", "it must be a number"),
        ('cache_dir = "a\\u0000b"', "cache_dir holds a zero character"),
    ],
)
def test_file_that_says_something_else_is_refused(toml: Any, text: str, said: str) -> None:
    """A mistyped setting that is ignored is found in production."""
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        gather({}, {}, toml(text))
    assert "serve.toml" in str(caught.value)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml: cannot be read"):
        gather({}, {}, tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MAX_SLOT", "1", "ORTOLAN_SERVE_MAX_SLOT is no setting; did you mean ORTOLAN_SERVE_MAX_S"),
        ("MAX_SLOTS", "many", "ORTOLAN_SERVE_MAX_SLOTS is 'many'; it must be a whole number"),
        ("MAX_SLOTS", "", "ORTOLAN_SERVE_MAX_SLOTS is ''"),
        ("MAX_SLOTS", "0", "max_slots (from ORTOLAN_SERVE_MAX_SLOTS) is 0"),
        ("GRACE", "nan", "grace (from ORTOLAN_SERVE_GRACE) is nan"),
        ("ACCURACY", "high", "ORTOLAN_SERVE_ACCURACY is 'high'; it must be default or exact"),
    ],
)
def test_variable_that_says_something_else_is_refused(variable: str, value: str, said: str) -> None:
    """The same for the environment, where nobody sees a typing error."""
    with pytest.raises(UsageError, match=re.escape(said)):
        gather({}, {"ORTOLAN_SERVE_" + variable: value}, None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"grpc_port": 65536}, "--grpc-port is 65536"),
        ({"grpc_port": "off", "http_port": "off"}, "both off"),
        ({"grpc_port": 7000, "http_port": 7000}, "--http-port is 7000"),
        ({"host": ""}, "--host is empty"),
        ({"grace": -1}, "--grace is -1"),
        ({"prefill_chunk": 1}, "--prefill-chunk is 1"),
    ],
)
def test_refused_value_is_named_as_it_was_given(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        gather(flags, {}, None)


def test_provider_options_come_from_all_three_places(toml: Any) -> None:
    """The most special source counts as a whole: options of two would be of two providers."""
    variable = {"ORTOLAN_SERVE_PROVIDER_OPTIONS": "device_type=AUTO:GPU,CPU; precision=FP16"}
    file = toml("[provider_options]\ndevice_id = 1\nuse_tf32 = true\n")
    assert gather({}, {}, file).engine.provider_options == {"device_id": 1, "use_tf32": True}
    by_variable = gather({}, variable, file).engine.provider_options
    assert by_variable == {"device_type": "AUTO:GPU,CPU", "precision": "FP16"}
    flags = {"provider_options": {"device_id": "2"}}
    settings = gather(flags, variable, file)
    assert settings.engine.provider_options == {"device_id": "2"}
    assert {one.name: one.origin for one in settings.listed}["provider_options"] == (
        "--provider-option"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("provider_options = 7", "provider_options is 7; it must be a table"),
        ("provider_options = { device_id = [1] }", "provider_options"),
        ("strict = 'yes'", "strict is 'yes'; it must be true or false"),
    ],
)
def test_provider_settings_of_another_form_are_refused(toml: Any, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        gather({}, {}, toml(text))


@pytest.mark.parametrize(("text", "value"), [("true", True), ("on", True), ("off", False)])
def test_switch_is_read_from_words(text: str, value: bool) -> None:
    assert gather({}, {"ORTOLAN_SERVE_STRICT": text}, None).engine.strict is value


def test_two_free_ports_are_two() -> None:
    """0 is no port that two could quarrel about."""
    assert gather({"grpc_port": 0, "http_port": 0}, {}, None).serve.grpc_port == 0


def test_every_setting_has_a_type_that_can_be_read() -> None:
    """A new field of EngineConfig works in all three places, or fails here."""
    texts = {int: "7", float: "7", str: "7"}
    for name, kind in TYPES.items():
        if get_origin(kind) is Literal or name in ("strict", "kv_copies"):  # words
            continue
        if name == "provider_options":  # a mapping
            continue
        text = next((t for k, t in texts.items() if str(k.__name__) in str(kind)), None)
        assert text is not None, name
        settings = gather({}, {"ORTOLAN_SERVE_" + name.upper(): text}, None)
        (found,) = (one for one in settings.listed if one.name == name)
        assert str(found.value).startswith("7"), name
