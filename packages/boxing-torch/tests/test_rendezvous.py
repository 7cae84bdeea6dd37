import socket
from pathlib import Path

import pytest

from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_boxing_torch.rendezvous import device_name, rendezvous
from sbp_core.errors import BoxingError, ConfigError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_rank_and_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    world = rendezvous(TorchBoxingConfig())
    world.store.set("note", "here")

    assert (world.rank, world.size) == (0, 1)
    assert world.store.get("note") == b"here"


def test_the_config_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "7")

    world = rendezvous(
        TorchBoxingConfig(init_method=f"file://{tmp_path}/store", rank=2, world_size=3)
    )

    assert (world.rank, world.size) == (2, 3)


@pytest.mark.parametrize(("variable", "key"), [("RANK", "rank"), ("WORLD_SIZE", "world_size")])
def test_a_missing_variable_is_named_with_its_setting_and_torchrun(
    monkeypatch: pytest.MonkeyPatch, variable: str, key: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv(variable)

    with pytest.raises(ConfigError, match=f"^{key} is not set.*{variable}") as caught:
        rendezvous(TorchBoxingConfig())

    assert "torchrun" in caught.value.todo
    assert f"boxing.{key}" in caught.value.todo


def test_a_rank_outside_the_world_of_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ConfigError, match=r"^rank=2 is no rank of world_size=2"):
        rendezvous(TorchBoxingConfig(rank=2))


def test_a_place_where_nobody_is_gives_an_error_that_names_it() -> None:
    place = f"tcp://127.0.0.1:{free_port()}"
    config = TorchBoxingConfig(init_method=place, rank=1, world_size=2, connect_timeout_s=0.5)

    with pytest.raises(BoxingError, match=place):
        rendezvous(config)


@pytest.mark.parametrize(
    ("device", "local_rank", "expected"),
    [
        ("cpu", "1", "cpu"),
        ("cuda:3", "1", "cuda:3"),
        ("cuda", "1", "cuda:1"),
        ("cuda", "", "cuda:0"),
    ],
)
def test_each_process_of_a_host_has_the_gpu_of_its_own_number(
    device: str, local_rank: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)

    assert device_name(TorchBoxingConfig(device=device)) == expected
