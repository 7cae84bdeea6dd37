from typing import Any

import pytest

from sbp_boxing_nccl.configs import MpiBoxingConfig, NcclBoxingConfig
from sbp_core.errors import ConfigError


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_start_without_time_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"^connect_timeout_s=") as caught:
        MpiBoxingConfig(connect_timeout_s=seconds)

    assert caught.value.accepted == "seconds above 0"


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"bootstrap": "files"}, "bootstrap='files'"),
        ({"device": "cpu"}, "device='cpu'"),
        ({"device": "cuda"}, "device='cuda'"),
        ({"init_method": "here"}, "init_method='here'"),
        ({"rank": 0}, "rank=0 and world_size=None are given by MPI"),
        ({"bootstrap": "store", "world_size": 0}, "world_size=0"),
        ({"bootstrap": "store", "rank": 2, "world_size": 2}, "rank=2"),
        ({"connect_timeout_s": 0.0}, "connect_timeout_s=0.0"),
        ({"abort_timeout_s": float("nan")}, "abort_timeout_s=nan"),
    ],
)
def test_a_setting_of_nccl_that_cannot_be_meant_is_refused(
    settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        NcclBoxingConfig(**settings)

    assert caught.value.what.startswith(what)
    assert caught.value.accepted


@pytest.mark.parametrize(("device", "index"), [("auto", None), ("cuda:0", 0), ("cuda:12", 12)])
def test_a_gpu_is_named_by_its_number_or_found_out(device: str, index: int | None) -> None:
    assert NcclBoxingConfig(device=device).device_index == index
