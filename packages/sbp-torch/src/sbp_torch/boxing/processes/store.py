"""The store of torch.distributed that processes meet at, which listens where its address says.

`torch.distributed.rendezvous` lets rank 0 listen on all interfaces of its host, whatever address
the processes are told: whoever reaches the host reads and writes the store. Here it listens on that
address only:

    MASTER_ADDR=127.0.0.1    the loopback interface
    MASTER_ADDR=node3        the interface that has the address of node3
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from sbp_core.boxing.processes import CountingStore

_LOG = logging.getLogger(__name__)


def store_at(url: str, rank: int, size: int, timeout: timedelta) -> CountingStore:
    """Return the store that the processes reach at `url`; rank 0 holds it, or torchrun does.

    Args:
        url: `env://`, `tcp://HOST:PORT` or `file:///PATH`.
        rank: Of this process.
        size: Number of processes.
        timeout: For it to be reached.

    Raises:
        RuntimeError, ValueError, OSError: it cannot be reached, or the URL cannot be meant.
    """
    listening = _listen(url, timeout) if rank == 0 else None
    # It finds a server of this process by its port, and holds it from then on.
    store, _, _ = next(cast(Any, rendezvous)(url, rank, size, timeout=timeout))
    del listening
    return cast(CountingStore, store)


def is_on_loopback(url: str) -> bool:
    """Return whether processes that meet at `url` are all on this machine, as its address says."""
    host, _ = _place(url)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    addresses = [str(address[0]) for *_, address in found]
    return bool(addresses) and all(one == "::1" or one.startswith("127.") for one in addresses)


def _place(url: str) -> tuple[str, int]:
    """Return the host and port that a URL leads to; `""` and 0 if it says none."""
    parts = urlparse(url)
    if parts.scheme == "tcp":
        return parts.hostname or "", parts.port or 0
    if parts.scheme != "env":
        return "", 0
    port = os.environ.get("MASTER_PORT", "")
    return os.environ.get("MASTER_ADDR", ""), int(port) if port.isdecimal() else 0


def _listen(url: str, timeout: timedelta) -> object:
    """Return a store that listens on the address of its host; None where another one listens."""
    host, port = _place(url)
    if not host or not 0 < port < 2**16 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None  # which `rendezvous` says better
    server = _bound(found)
    if server is None:
        return None
    asked = parse_qs(urlparse(url).query).get("use_libuv", [os.environ.get("USE_LIBUV", "1")])
    return cast(Any, dist).TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=server.detach(),
        use_libuv=asked[0] == "1",
    )


def _bound(addresses: Sequence[tuple[Any, ...]]) -> socket.socket | None:
    """Return a socket that listens on the first of some addresses that is one of this machine."""
    for family, *_, address in addresses:
        try:
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None  # by this process, which `rendezvous` knows, or it says so
    # Such as the address of a service, which leads here from elsewhere.
    _LOG.warning(
        "the store listens on all interfaces, as %s is no address of this machine",
        addresses[0][-1][0],
    )
    return None
