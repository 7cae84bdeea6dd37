import pytest

from sbp_core.errors import ConfigError
from sbp_core.plugins import merge_settings
from sbp_planner.configs import ManualConfig, OsdpConfig


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
