import json
import re
from math import prod
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_core.plugins import ChecksCombination, merge_settings
from sbp_planner.configs import (
    AXES,
    FileConfig,
    ManualConfig,
    OsdpConfig,
    check_axes,
    check_split_axis,
)
from sbp_planner.search_configs import AlpaConfig, DlplacerConfig, IlpConfig


def test_pins_may_be_text_or_mappings_and_keep_their_order():
    pins = {"batch": "S(0)", "*.weight": {"tensor": "S(1)"}}

    config = merge_settings(ManualConfig, {"pins": pins})

    assert list(config.pins.items()) == list(pins.items())


def test_stage_patterns_are_read_from_lists():
    config = merge_settings(ManualConfig, {"stage_patterns": [["embed", "blocks.0"], ["head"]]})

    assert config.stage_patterns == (("embed", "blocks.0"), ("head",))


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (ManualConfig, {"pipeline": "zigzag"}, "pipeline"),
        (ManualConfig, {"chunks": 0}, "chunks"),
        (ManualConfig, {"stage_patterns": [[]]}, r"stage_patterns\[0\]"),
        (ManualConfig, {"pin": {}}, "pin"),
        (ManualConfig, {"pins": {"batch": "T(0)"}}, r"^pins: the pin 'batch: T\(0\)' cannot be"),
        (ManualConfig, {"pins": {"batch": {"data": "S"}}}, r"^pins: the pin 'batch: \{data: S\}'"),
        (ManualConfig, {"pins": {"batch": {}}}, "^pins: the pin 'batch: {}' names no mesh axis"),
        (OsdpConfig, {"axis": ""}, "axis"),
        (OsdpConfig, {"memory_bytes": 0}, "memory_bytes"),
        (OsdpConfig, {"memory_bytes": -1.0}, "memory_bytes"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(config, settings, message):
    with pytest.raises(ConfigError, match=message):
        merge_settings(config, settings)


@settings(derandomize=True, max_examples=200)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.lists(st.sampled_from(AXES), min_size=1, unique=True),
    st.permutations([*AXES, "node", "rack"]),
)
def test_the_words_that_mend_a_mesh_name_one_of_as_many_ranks_that_is_taken(mesh, needed, names):
    axes = tuple(names[: len(mesh)])
    try:
        check_axes(needed, mesh, axes)
    except ConfigError as error:
        say_mesh = re.search(r"cluster\.mesh=(\[\S+\])", error.todo)
        say_axes = re.search(r"cluster\.axes=\[(\S+)\]", error.todo)
        new_mesh = json.loads(say_mesh[1]) if say_mesh else mesh
        new_axes = say_axes[1].split(",")
        product, asked = 1, 1
        for size in new_mesh:
            product *= size
        for size in mesh:
            asked *= size
        assert product == asked
        assert len(set(new_axes)) == len(new_axes) == len(new_mesh)
        check_axes(needed, new_mesh, new_axes)
    else:
        assert set(needed) <= set(axes)


def test_a_preset_looks_at_the_mesh_before_anything_is_captured():
    config = ManualConfig(needs_axes=("pipe",))

    assert isinstance(config, ChecksCombination)
    config.check_combination({"cluster": SimpleNamespace(mesh=(2,), axes=("pipe",))})
    with pytest.raises(ConfigError) as caught:
        config.check_combination({"cluster": SimpleNamespace(mesh=(2,), axes=("data",))})
    assert "cluster.axes=[pipe];" in caught.value.todo
    assert "planner=propagate" in caught.value.todo


@settings(derandomize=True, max_examples=200)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.permutations(AXES),
    st.sampled_from([*AXES, "node", None]),
)
def test_the_words_that_mend_a_mesh_for_osdp_lead_to_one_that_it_takes(mesh, names, axis):
    axes = tuple(names[: len(mesh)])
    config = OsdpConfig(axis=axis)
    try:
        config.check_combination({"cluster": SimpleNamespace(mesh=tuple(mesh), axes=axes)})
    except ConfigError as error:
        said = re.search(r"cluster\.mesh=\[(\d+)\] cluster\.axes=\[(\w+)\]", error.todo)
        assert int(said[1]) == prod(mesh)
        check_split_axis(None, [int(said[1])], [said[2]])
        if other := re.search(r"planner\.axis=(\w+)", error.todo):
            check_split_axis(other[1], mesh, axes)
    else:
        found = check_split_axis(axis, mesh, axes)
        assert found in axes
        assert found != "pipe"
        assert axis in (None, found)


@pytest.mark.parametrize("name", ["strategy.yaml", "strategy.json"])
def test_the_folder_of_a_run_is_answered_with_the_strategy_in_it(tmp_path, name):
    tmp_path.joinpath(name).touch()

    with pytest.raises(ConfigError, match="it is a folder") as caught:
        FileConfig(path=str(tmp_path))

    assert caught.value.todo == f"set planner.path={tmp_path / name}"


@pytest.mark.parametrize("config", [IlpConfig, AlpaConfig, DlplacerConfig])
@pytest.mark.parametrize("gap", [-0.1, 1.0, 2.0, float("nan")])
def test_a_gap_that_any_plan_would_be_within_is_refused(config, gap):
    with pytest.raises(ConfigError, match=r"^gap=") as caught:
        config(gap=gap)

    assert "less than 1" in caught.value.accepted
    assert caught.value.todo == ("gap=0.02 is 2 %" if gap == 2 else caught.value.todo)
