import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_core.plugins import ChecksOthers, merge_settings
from sbp_planner.configs import AXES, ManualConfig, OsdpConfig, check_axes


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
        (ManualConfig, {"schedule": "zigzag"}, "schedule"),
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

    assert isinstance(config, ChecksOthers)
    config.check_beside({"cluster": SimpleNamespace(mesh=(2,), axes=("pipe",))})
    with pytest.raises(ConfigError) as caught:
        config.check_beside({"cluster": SimpleNamespace(mesh=(2,), axes=("data",))})
    assert "cluster.axes=[pipe];" in caught.value.todo
    assert "planner=infer" in caught.value.todo
