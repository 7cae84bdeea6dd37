"""Paths of a user who may have no home folder."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from sbp_core import user_paths
from sbp_core.errors import ConfigError
from sbp_core.user_paths import cache_folder, user_path


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user whom the system does not know."""

    def unknown(_: object) -> None:
        raise KeyError("unknown")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)
    user_paths._passing_folder.cache_clear()


def test_a_home_folder_is_put_for_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    assert user_path("~/n.csv", key="data.path") == Path("/home/me/n.csv")
    assert user_path("a/~/n.csv", key="data.path") == Path("a/~/n.csv")


def test_a_text_that_no_path_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.path='a\\x00b' is no path"):
        user_path("a\0b", key="data.path")


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("path", ["~", "~/n.csv", "~nobodyhere/n.csv"])
def test_a_home_that_is_not_known_is_named_with_its_setting(path: str) -> None:
    with pytest.raises(ConfigError, match=f"data.path={path}: the home folder"):
        user_path(path, key="data.path")


@pytest.mark.usefixtures("no_home")
def test_a_path_that_no_setting_names_is_named_with_what_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"^~/n\.csv: the home folder of ~") as caught:
        user_path("~/n.csv", where="step.save")
    assert caught.value.where == ("step.save",)
    with pytest.raises(ConfigError, match=r"^'a\\x00b' is no path"):
        user_path("a\0b")


@pytest.mark.usefixtures("no_home")
def test_without_a_home_things_are_kept_while_the_process_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = cache_folder("proofs")

    assert cache_folder("data").parent == found.parent
    assert found.parent.parent.is_dir()
    assert found.parent.parent.stat().st_mode & 0o777 == 0o700
    assert len(caplog.messages) == 1
    assert "set HOME or XDG_CACHE_HOME" in caplog.messages[0]


@pytest.mark.usefixtures("no_home")
def test_a_named_cache_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")

    assert cache_folder("data") == Path("/somewhere/sbp/data")
