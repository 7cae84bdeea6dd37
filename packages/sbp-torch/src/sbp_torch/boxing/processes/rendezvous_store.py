"""The rendezvous store of torch.distributed, which listens only on the address that it is given.

`torch.distributed.rendezvous` lets rank 0 listen on all interfaces of its host, whatever address
is given: anyone who can reach the host can read and write the store. This store listens on the
given address only:

    MASTER_ADDR=127.0.0.1    the loopback interface
    MASTER_ADDR=node3        the interface that has the address of node3
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from sbp_core.errors import BoxingError, ConfigError, SbpError
from sbp_core.processes import CountingStore, Siblings, run_abandonable

_LOG = logging.getLogger(__name__)

#: Seconds between two checks of the other processes; and seconds beyond the timeout for torch to
#: raise its own error.
_LOOK_S, _MORE_S = 0.1, 1.0


def store_at(url: str, rank: int, size: int, timeout: timedelta) -> CountingStore:
    """Return the store that the processes reach at `url`; rank 0 or torchrun holds it.

    Args:
        url: `env://`, `tcp://HOST:PORT` or `file:///PATH`.
        rank: Rank of this process.
        size: Number of processes.
        timeout: Limit for the store to be reached and to answer.

    Raises:
        ConfigError: the URL, or a variable that it refers to, is invalid.
        BoxingError: a process has ended before it connected, or the program that listens at the
            address does not answer.
        RuntimeError, ValueError, OSError: it cannot be reached; see `naming_rendezvous`.
    """
    place = _where(url)

    def connect() -> CountingStore:
        listening = _listen(url, timeout) if rank == 0 else None
        # `rendezvous` finds a server of this process by its port, and keeps it alive.
        store, _, _ = next(cast(Any, rendezvous)(url, rank, size, timeout=timeout))
        del listening
        store.add("sbp/answers", 0)  # fails if another program listens there
        return cast(CountingStore, store)

    limit_s = timeout.total_seconds()
    try:
        # PyTorch waits without limit for a listener that accepts the connection and never answers.
        return run_abandonable(
            connect,
            thread_name="sbp-store",
            check=Siblings(rank).check,
            look_s=_LOOK_S,
            limit_s=limit_s + _MORE_S,
        )
    except TimeoutError:
        raise BoxingError(
            f"the program at {place} has accepted the connection, but has not answered within "
            f"{limit_s:g} s",
            where=f"rank {rank} of {size}",
            todo="check that this is the address of rank 0, and that no other program has the port",
        ) from None


@contextmanager
def naming_rendezvous(url: str, rank: int, size: int) -> Iterator[None]:
    """Turn errors that `store_at`, with these arguments, raises in the block into our own errors.

    Raises:
        BoxingError: the store cannot be reached.
    """
    try:
        yield
    except SbpError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        # Without the C++ frames that torch appends.
        raise BoxingError(
            f"no rendezvous at {_where(url)}: {str(error).partition(chr(10))[0]}",
            where=f"rank {rank} of {size}",
            todo="check that every process was started, that this is the address of rank 0 and can "
            "be reached, and that no other program has the port",
        ) from None


def _where(url: str) -> str:
    """Return the address of a store for messages, with the variables that give it."""
    host, port = _place(url) or ("", 0)
    return f"MASTER_ADDR={host}, MASTER_PORT={port}" if url.startswith("env:") else url


def is_on_loopback(url: str) -> bool:
    """Whether `url` has a loopback address, so that all its processes are on this machine."""
    try:
        host, _ = _place(url) or ("", 0)
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, ConfigError):
        return False
    addresses = [str(address[0]) for *_, address in found]
    return bool(addresses) and all(one == "::1" or one.startswith("127.") for one in addresses)


def _place(url: str) -> tuple[str, int] | tuple[()]:
    """Return the host and port of a URL; empty if this kind of URL has none.

    Raises:
        ConfigError: host or port is missing or invalid. The error names the environment variable.
    """
    parts = urlparse(url)
    if parts.scheme == "tcp":
        host, _, port = parts.netloc.rpartition(":")
        return _host("init_method", host.strip("[]"), url), _port("init_method", port, url)
    if parts.scheme != "env":
        return ()
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return _host("MASTER_ADDR", host, host), _port("MASTER_PORT", port, port)


def _host(name: str, host: str, given: str) -> str:
    if not host or any(letter.isspace() or letter in "/,@" for letter in host):
        raise _invalid(name, given, "the name or address of the host of rank 0")
    return host


def _port(name: str, text: str, given: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**16):
        raise _invalid(name, given, "a port, 1 .. 65535, that is free on the host of rank 0")
    return int(text)


def _invalid(name: str, given: str, accepted: str) -> ConfigError:
    return ConfigError(
        f"{name}={given!r} does not say where the processes meet",
        where="the environment" if name.isupper() else "boxing.init_method",
        accepted=accepted,
        todo="start the processes with torchrun, or set MASTER_ADDR and MASTER_PORT to a host and "
        "a free port of rank 0",
    )


def _listen(url: str, timeout: timedelta) -> object:
    """Return a store that listens on the given address; None if `rendezvous` has to do it."""
    host, port = _place(url) or ("", 0)
    if not host or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None  # the error of `rendezvous` is better
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
    """Return a socket that listens on the first of these addresses that belongs to this machine."""
    for family, *_, address in addresses:
        try:
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None  # `rendezvous` uses the listener of this process, or raises
    # For example, the address of a service that forwards to this machine.
    _LOG.warning(
        "the store listens on all interfaces, because %s is no address of this machine",
        addresses[0][-1][0],
    )
    return None
