"""Home folders, and users who have none."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from sbp_core.errors import ConfigError
from sbp_core.user_cache import cache_folder, user_path


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Be a user without an entry, as in a container, with a folder for temporary files."""

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))


def test_a_home_folder_is_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    assert user_path("~/data.csv", key="data.path") == Path("/home/me/data.csv")
    assert user_path("a/~", key="data.path") == Path("a/~")


@pytest.mark.parametrize("given", ["~nobody-of-that-name/x", "a\0b"])
def test_a_path_that_nobody_knows_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.path="):
        user_path(given, key="data.path")


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_folder_is_told_so() -> None:
    with pytest.raises(ConfigError, match="there is no home folder for ~") as refused:
        user_path("~/x", key="data.path")
    assert "set HOME" in refused.value.todo


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_there_is_a_cache_of_this_user_alone(tmp_path: Path) -> None:
    found = cache_folder("data")

    assert found == tmp_path / f"sbp-cache-{os.getuid()}" / "data"
    assert found.parent.stat().st_mode & 0o777 == 0o700
    assert cache_folder("data") == found


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("kind", ["link", "open to all"])
def test_a_cache_that_somebody_else_may_write_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / f"sbp-cache-{os.getuid()}"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)

    with pytest.raises(ConfigError, match="not theirs alone"):
        cache_folder("data")
