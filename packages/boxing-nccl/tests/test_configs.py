import pytest

from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_core.errors import ConfigError


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_start_without_time_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"^connect_timeout_s=") as caught:
        MpiBoxingConfig(connect_timeout_s=seconds)

    assert caught.value.accepted == "seconds above 0"
