"""What an unknown key may mean, of the settings of all groups."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sbp_core.plugins import discover
from sbp_launch.settings.config import GROUPS, ComposedConfig, TrainerConfig
from sbp_launch.settings.known_keys import OTHER_NAMES, Setting, keys_of, known_settings, meant

SETTINGS = [
    *(Setting(key=key) for key in keys_of(TrainerConfig, "trainer")),
    Setting(key="optimizer.lr"),
    Setting(key="cluster.memory_bytes"),
    Setting(key="compile.passes.recompute.memory_bytes"),
    Setting(key="planner.memory_bytes", options=("planner=osdp",)),
    Setting(key="data.path", options=("data=text",)),
    Setting(key="optimizer.momentum", options=("optimizer=lars", "optimizer=sgd")),
    *(Setting(key=f"{group}.width") for group in ("data", "model", "planner", "runtime")),
]


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("steps", "5", "did you mean trainer.steps=5?"),
        ("stpes", "", "did you mean 'trainer.steps'?"),
        ("trainer.lr", "0.1", "did you mean optimizer.lr=0.1?"),
        ("trianer.update.clip_norm", "1", "did you mean trainer.update.clip_norm=1?"),
        ("max_steps", "5", "did you mean trainer.steps=5?"),
        ("batch", "5", "did you mean trainer.batch_size=5?"),
        ("trainer.gradient_clipp1ng", "1", "did you mean trainer.update.clip_norm=1?"),
        (
            "memory_bytes",
            "1",
            "did you mean cluster.memory_bytes=1, or planner.memory_bytes=1 of planner=osdp, "
            "or compile.passes.recompute.memory_bytes=1?",
        ),
        ("width", "", "did you mean 'data.width', or 'model.width', or 'planner.width'?"),
        ("data.path", "x", "data=text takes data.path"),
        ("optimizer.momentum", "1", "optimizer=lars, optimizer=sgd take optimizer.momentum"),
        ("qqqq", "1", ""),
    ],
)
def test_an_unknown_key_is_answered_with_what_it_may_mean(key: str, value: str, hint: str) -> None:
    assert meant(key, SETTINGS, value) == hint


@pytest.mark.slow
@given(st.sampled_from(SETTINGS), st.data())
def test_a_key_that_lacks_a_letter_of_its_last_name_is_found(
    setting: Setting, data: st.DataObject
) -> None:
    leaf = setting.leaf
    at = data.draw(st.integers(0, len(leaf) - 1))
    slip = leaf[:at] + leaf[at + 1 :]
    assume(len(leaf) >= 5)
    assume(all(slip != one.leaf for one in SETTINGS))  # schedule is a name, too

    hint = meant(slip, SETTINGS)

    assert leaf in hint


def test_a_slip_in_a_name_of_ours_is_none_in_one_of_other_trainers() -> None:
    settings = [Setting(key="trainer.evaluate.batches"), Setting(key="trainer.batch_size")]

    assert meant("batche", settings) == "did you mean 'trainer.evaluate.batches'?"
    assert meant("batch", settings) == "did you mean 'trainer.batch_size'?"


def test_what_other_trainers_call_our_settings_are_settings_of_ours() -> None:
    registry = discover()
    values = {group: {"name": ""} for group in GROUPS}
    composed = ComposedConfig(values=values, files={}, overrides=())
    keys = {one.key for one in known_settings(composed, registry)}
    installed = {entry.kind for entry in registry.entries} | {"trainer", "compile"}

    missing = [key for key in OTHER_NAMES.values() if key.partition(".")[0] in installed]

    assert [key for key in missing if key not in keys] == []
    assert not {key for key in OTHER_NAMES if any(one.endswith(f".{key}") for one in keys)} - {
        "mixed_precision"
    }
