"""The store that processes meet at listens on the address that they are told, and nowhere else."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from sbp_core.errors import BoxingError, ConfigError
from sbp_core.processes.launchers import free_port
from sbp_core.testing.holdings import listening
from sbp_torch.boxing.processes import is_on_loopback, store_at

SOON = timedelta(seconds=20)

linux = pytest.mark.skipif(sys.platform != "linux", reason="sockets are listed by /proc")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(autouse=True)
def nobody_else_listens() -> Iterator[None]:
    before = listening()
    yield
    assert listening() == before


@linux
@pytest.mark.parametrize("libuv", ["1", "0"])
def test_the_store_listens_on_its_address(port: int, libuv: str) -> None:
    url = f"tcp://127.0.0.1:{port}/?use_libuv={libuv}"

    store = store_at(url, 0, 1, SOON)
    other = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=SOON)
    other.set("key", "value")

    assert store.get("key") == b"value"
    assert listening() == {"127.0.0.1"}


@linux
def test_two_stores_of_one_process_are_one(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))

    first = store_at("env://", 0, 1, SOON)
    second = store_at("env://", 0, 1, SOON)
    first.set("key", "value")
    del first  # who goes first does not end it

    assert second.get("key") == b"value"
    assert listening() <= {"127.0.0.1", "::1"}


@linux
def test_the_store_of_torchrun_is_left_to_it(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    with pytest.raises(RuntimeError):
        store_at(f"tcp://127.0.0.1:{port}", 0, 1, timedelta(seconds=0.5))

    assert listening() == set()


@linux
def test_an_address_that_is_not_here_is_told(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a network for documents (RFC 5737), which stands for that of a service.
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))],
    )

    with caplog.at_level(logging.WARNING):
        store = store_at(f"tcp://127.0.0.1:{port}", 0, 1, SOON)

    assert "listens on all interfaces, because 192.0.2.1 is no address" in caplog.text
    store.set("key", "value")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tcp://127.0.0.1:29500", True),
        ("tcp://localhost:29500", True),
        ("tcp://192.0.2.1:29500", False),
        ("file:///tmp/store", False),
        ("env://", False),
    ],
)
def test_who_meets_on_the_loopback_interface_is_here(
    url: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    assert is_on_loopback(url) is expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PORT", value) for value in ("abc", "0", "70000", "-1", "")),
        *(("ADDR", value) for value in ("", "two words", "tcp://node3")),
    ],
)
def test_a_variable_that_says_no_place_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one, usual in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(one, usual)
    monkeypatch.setenv(f"MASTER_{name}", value)

    with pytest.raises(ConfigError, match=f"^MASTER_{name}={value!r} does not say where"):
        store_at("env://", 1, 2, SOON)


def test_a_listener_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        with pytest.raises(BoxingError, match=f"{place} has accepted the connection, but has not"):
            store_at(place, 1, 2, timedelta(seconds=0.5))
