"""Which engine takes a call: its episode's, else the one with least to do; one that is out takes none."""

from __future__ import annotations

import pytest

from lightning_rl.errors import EngineError
from lightning_rl.proxy.live.engines import Engines

URLS = ["http://a", "http://b", "http://c"]


def test_an_episode_stays_where_it_began_while_that_engine_is_in_rotation() -> None:
    engines = Engines(URLS)
    first = engines.choose("e1", "base")
    first.in_flight = 100
    assert engines.choose("e1", "base") is first
    engines.refused(first)
    second = engines.choose("e1", "base")
    assert second is not first
    engines.admit_engine(first, fingerprint_id="f")
    assert engines.choose("e1", "base") is second  # its cache is there by now


def test_new_episodes_and_calls_without_one_go_to_the_engine_with_least_to_do() -> None:
    engines = Engines(URLS)
    for engine, running in zip(engines.all, (5, 2, 9), strict=True):
        engine.in_flight = running
    assert engines.choose("new", "base").url == "http://b"
    assert engines.choose(None, "base").url == "http://b"


def test_equals_take_turns() -> None:
    engines = Engines(URLS)
    assert {engines.choose(None, "base").url for _ in range(3)} == set(URLS)
    assert {engines.choose(f"e{i}", "base").url for i in range(3)} == set(URLS)


def test_proxies_that_share_engines_agree_on_an_episodes_engine() -> None:
    mine, theirs = Engines(URLS), Engines(URLS[::-1])
    for engines in (mine, theirs):
        engines.is_shared = True
    mine.all[0].in_flight = 3  # what one proxy sees of the load is noise
    chosen = [(mine.choose(f"e{i}", "base").url, theirs.choose(f"e{i}", "base").url) for i in range(60)]
    assert all(a == b for a, b in chosen)
    assert {a for a, _ in chosen} == set(URLS)
    mine.all[0].in_flight = 50
    assert "http://a" not in {mine.choose(f"later{i}", "base").url for i in range(60)}


def test_an_engine_that_lacks_an_older_adapter_does_not_get_its_calls() -> None:
    engines = Engines(URLS)
    engines.admit_engine(engines.all[0], fingerprint_id=None, lacks={"policy@1"})
    engines.admit_engine(engines.all[1], fingerprint_id=None, lacks={"policy@1"})
    assert {engines.choose(f"e{i}", "policy@1").url for i in range(9)} == {"http://c"}
    assert {engines.choose(f"f{i}", "policy@2").url for i in range(9)} == set(URLS)


def test_where_no_engine_is_in_rotation_a_policy_is_refused_and_the_engines_own_names_are_not() -> None:
    engines = Engines(URLS)
    for engine in engines.all[:2]:
        engines.refused(engine)
    engines.withdraw(engines.all[2], is_up=True)
    with pytest.raises(EngineError, match="no engine of 3 is reachable and holds what is live"):
        engines.choose(None, "base")
    assert engines.choose(None, "embedder", any_engine=True).url == "http://c"
    engines.refused(engines.all[2])
    assert engines.choose(None, "embedder", any_engine=True).url in URLS


def test_one_engine_that_is_out() -> None:
    engines = Engines(["http://a"])
    assert engines.choose("e", "base").url == "http://a"
    engines.refused(engines.all[0])
    with pytest.raises(EngineError, match="http://a is not reachable, or it is being set up"):
        engines.choose("e", "base")
    assert engines.choose(None, None, any_engine=True).url == "http://a"
    with pytest.raises(EngineError):
        engines.choose(None, None, any_engine=True, tried=[engines.all[0]])
