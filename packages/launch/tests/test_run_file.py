"""The settings of a run, written once and read by every rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_launch.run.folder import load_run, save_run
from sbp_launch.settings.config import ComposedConfig

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("aZ0 é'\":#-[{,&*!|>%@\n\t"),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["a", "b", "3", "on"]), inner),
    max_leaves=8,
)


@pytest.mark.slow
@examples(derandomize=True, max_examples=100)
@given(settings=st.dictionaries(st.sampled_from(["width", "lr", "path"]), VALUES))
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    values = {"model": {"name": "toy", **settings}, "trainer": {"steps": 3, "lr": 1e-08}}

    save_run(ComposedConfig(values={**values, "out": "x"}, files={}, overrides=("a=b",)), folder)

    found = load_run(folder)
    assert found.values == values
    assert found.files["model"] == str(folder / "config.yaml")


def test_infinity_survives(tmp_path: Path) -> None:
    save_run(ComposedConfig(values={"trainer": {"x": math.inf}}, files={}, overrides=()), tmp_path)
    assert load_run(tmp_path).values == {"trainer": {"x": math.inf}}


@pytest.mark.parametrize("text", [None, "a: [1"])
def test_a_folder_without_settings_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_run(tmp_path)

    assert str(tmp_path / "config.yaml") in caught.value.where[0]
    assert "share" in caught.value.todo
