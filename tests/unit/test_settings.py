"""File < environment < flags, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rl.errors import SettingsError
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.settings.train import TrainSettings

ROOT = Path(__file__).parents[2]


def test_flags_win_over_environment_and_environment_over_the_file(tmp_path, monkeypatch):
    file = tmp_path / "proxy.toml"
    file.write_text('db = "sqlite:///file.db"\nport = 1\npolicy = "from-file"\n')
    monkeypatch.setenv("LIGHTNING_DB", "sqlite:///environment.db")
    monkeypatch.setenv("LIGHTNING_PROXY_PORT", "2")
    loaded = ProxySettings.load(file, port=3, host=None)
    assert (loaded.db, loaded.port, loaded.policy, loaded.host) == (
        "sqlite:///environment.db",
        3,
        "from-file",
        "127.0.0.1",
    )
    assert ProxySettings.load(file).port == 2


def test_a_file_read_once_does_not_colour_the_next(tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text("port = 1\n")
    assert ProxySettings.load(file).port == 1
    assert ProxySettings.load().port == 8400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "unknown setting 'prot' in"),
        ("port = 99999", r"setting 'port': [^(]*\(got 99999\)$"),
        ('engine_url = "localhost:8000"', "not a URL like http://HOST:PORT"),
        ('engine_url = "http://me:secret@host:8000"', "an address with a user or password"),
        (
            '[providers.x]\nmodel = "a/b"\napi_base = "https://me:x@h/v1"',
            "an address with a user or password",
        ),
        ("port = ", "not valid TOML"),
        ('durability = "maybe"', "setting 'durability'"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path, text, says):
    file = tmp_path / "proxy.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=says) as caught:
        ProxySettings.load(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('unrewarded = "maybe"', "'unrewarded': write skip, error or fill=NUMBER .got 'maybe'.$"),
        ("weights = 1", "'weights' must|'weights': must be 'lora' or 'full'"),
        ("credit = 3", r"setting 'credit': write a rule's name .* or a table \[credit\] \(got 3\)$"),
        ("epochs = 0", "'epochs': must be at least 1"),
    ],
)
def test_a_trainer_s_mistake_is_in_our_words(tmp_path, text, says):
    file = tmp_path / "train.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=says):
        TrainSettings.load(file, model=tmp_path)


def test_a_misspelt_setting_is_named_before_the_one_that_it_leaves_out(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text('modle = "x"\n')
    with pytest.raises(SettingsError, match=r"unknown setting 'modle' in .*and 1 more"):
        TrainSettings.load(file)


def test_no_library_shows_through(tmp_path, monkeypatch):
    file = tmp_path / "proxy.toml"
    for text, says in (
        ("[redact]\nx = 1", r"setting 'redact': write it as tables: \[\[redact\]\]"),
        ('engine_url = "nonsense"', r"setting 'engine_url.0': not a URL like"),
        ("[providers.judge]\nkind = 'judge'", r"setting 'providers.judge.model' is missing: name it in"),
        ('[providers.judge]\nmodel = "x"', "write VENDOR/MODEL"),
    ):
        file.write_text(text)
        with pytest.raises(SettingsError, match=says):
            ProxySettings.load(file)
    monkeypatch.setenv("LIGHTNING_PROXY_ALIASES", "gpt-4=policy")
    with pytest.raises(SettingsError, match="the variable LIGHTNING_PROXY_ALIASES can't be read; write"):
        ProxySettings.load()


def test_a_missing_file_and_a_missing_setting_are_named(tmp_path):
    with pytest.raises(SettingsError, match=r"no such configuration file: .*nope\.toml"):
        ProxySettings.load(tmp_path / "nope.toml")
    with pytest.raises(SettingsError, match="'model'"):
        TrainSettings.load()


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda file: file.name)
def test_every_shipped_configuration_loads(file):
    if file.name.startswith("proxy"):
        ProxySettings.load(file)
    else:
        TrainSettings.load(file, model=Path("anywhere"))


def test_a_variable_called_db_is_somebody_elses(monkeypatch):
    monkeypatch.setenv("DB", "mysql")
    assert ProxySettings.load().db == "sqlite:///lightning.db"


def test_aliases_lead_to_the_policy_whatever_its_name():
    assert ProxySettings.load(policy="math").aliases["gpt-*"] == "math"


def test_a_variable_that_can_not_be_read_is_one_line(monkeypatch):
    monkeypatch.setenv("LIGHTNING_PROXY_ALIASES", "not json")
    with pytest.raises(SettingsError, match="LIGHTNING_PROXY_ALIASES"):
        ProxySettings.load()


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://a:1", ("http://a:1",)),
        (["http://a:1/v1", "http://b:2/"], ("http://a:1", "http://b:2")),
        ("http://a:1, http://b:2,http://a:1", ("http://a:1", "http://b:2")),
    ],
)
def test_engines_are_one_url_or_a_list(given, urls, monkeypatch):
    assert ProxySettings.load(engine_url=given).engine_url == urls
    if isinstance(given, str):
        monkeypatch.setenv("LIGHTNING_PROXY_ENGINE_URL", given)
        assert ProxySettings.load().engine_url == urls


def test_no_engine_at_all_is_a_mistake():
    with pytest.raises(SettingsError, match="name at least one engine"):
        ProxySettings.load(engine_url=[])
