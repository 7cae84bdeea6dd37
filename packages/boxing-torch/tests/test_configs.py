from typing import Any

import pytest

from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_core.errors import ConfigError


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "tpu"},
        {"device": "cuda:x"},
        {"transport": "mpi"},
        {"init_method": "127.0.0.1:29500"},
        {"world_size": 0},
        {"connect_timeout_s": 0.0},
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings

    with pytest.raises(ConfigError, match=f"^{name}=") as caught:
        TorchBoxingConfig(**settings)

    assert caught.value.accepted


@pytest.mark.parametrize(("rank", "world_size"), [(-1, None), (-1, 2), (2, 2)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int | None) -> None:
    with pytest.raises(ConfigError, match=f"^rank={rank}"):
        TorchBoxingConfig(rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    ("device", "transport"), [("cpu", "gloo"), ("cuda", "nccl"), ("cuda:3", "nccl")]
)
def test_auto_is_the_transport_of_the_device(device: str, transport: str) -> None:
    config = TorchBoxingConfig(device=device)

    assert config.chosen_transport == transport
    assert TorchBoxingConfig(device=device, transport=transport).chosen_transport == transport


@pytest.mark.parametrize(("device", "transport"), [("cpu", "nccl"), ("cuda", "gloo")])
def test_a_transport_that_does_not_fit_the_device_is_refused(device: str, transport: str) -> None:
    with pytest.raises(ConfigError, match=f"transport='{transport}'.*device='{device}'"):
        TorchBoxingConfig(device=device, transport=transport)
