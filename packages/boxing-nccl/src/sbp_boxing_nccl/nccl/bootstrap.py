"""Connect ranks over NCCL in bounded time; NCCL itself has no timeouts for that.

`ncclCommInitRank` waits for all ranks for ever. So the ranks first announce in the control store
that they are ready. The first rank creates the unique id and sends it, or the error why it could
not. When all ranks have the id, each connects in a thread that can be abandoned.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sbp_boxing_nccl.nccl.device import NcclChannel, NcclDevice
from sbp_core.boxing import CollectiveCall
from sbp_core.errors import BoxingError
from sbp_core.processes import ControlStore, run_abandonable

#: Seconds between two checks of the other ranks.
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Connects the ranks of a group over NCCL, in bounded time.

    Args:
        store: Control store of this rank.
        device: GPU of this rank.
        check: Raises `BoxingError` when waiting for other ranks has become hopeless.
    """

    store: ControlStore
    device: NcclDevice
    check: Callable[[CollectiveCall], None]

    def gather(self, call: CollectiveCall, groups: Mapping[str, tuple[int, ...]]) -> None:
        """Wait until the ranks of some groups are ready to connect them.

        Raises:
            BoxingError: some ranks were not ready in time; the message names them.
        """
        store = self.store
        for name, ranks in groups.items():
            store.say(f"join/{name}", ranks=ranks)

        def missing() -> set[int]:
            return {rank for name in groups for rank in store.not_joined(name, groups[name])}

        def over() -> bool:
            self.check(call)
            return not missing()

        if not store.wait_for(over, call.left_s):
            raise call.missing(sorted(missing()))

    def connect(self, call: CollectiveCall, name: str, ranks: tuple[int, ...]) -> NcclChannel:
        """Connect the ranks of a group, all of which call this.

        Raises:
            BoxingError: a rank was not ready, could not create an id, or did not connect in time.
        """
        self.gather(call, {name: ranks})
        unique_id = self._share_id(call, name, ranks)
        # All ranks need the id before one enters NCCL, from where it cannot send.
        self.gather(call, {f"{name}/id": ranks})
        # In a thread, which may be abandoned inside NCCL.
        index, limit_s = ranks.index(self.store.rank), call.left_s
        try:
            return run_abandonable(
                lambda: self.device.connect(len(ranks), unique_id, index),
                thread_name="sbp-nccl-init",
                check=lambda: self.check(call),
                look_s=_LOOK_S,
                limit_s=limit_s,
                discard=lambda channel: channel.abort(),
            )
        except BoxingError:  # `check` raised it
            raise
        except TimeoutError as error:
            raise call.failed(
                f"NCCL did not connect ranks {list(ranks)} within {limit_s:.3g} s, although "
                "all have started",
                todo="see what NCCL says with NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME chooses the "
                "network",
                involved=ranks,
            ) from error
        except Exception as error:
            raise call.failed(f"NCCL could not connect ranks {list(ranks)}: {error}") from error

    def _share_id(self, call: CollectiveCall, name: str, ranks: tuple[int, ...]) -> bytes:
        """Return the id that the first rank of the group creates."""
        key, first = f"id/{name}", ranks[0]
        if self.store.rank == first:
            try:
                unique_id, error = self.device.unique_id(), ""
            except Exception as caught:  # the other ranks need to know of any error
                unique_id, error = b"", f"{type(caught).__name__}: {caught}"
            entry = {"ok": not error, "id": unique_id.hex(), "error": error}
            self.store.publish(key, json.dumps(entry), ranks)
        text: str | None = None

        def come() -> bool:
            nonlocal text
            self.check(call)
            text = self.store.lookup(key)
            return text is not None

        if not self.store.wait_for(come, call.left_s) or text is None:
            raise call.missing([first])
        entry = json.loads(text)
        if not entry["ok"]:
            raise call.failed(f"rank {first} could not make an NCCL id: {entry['error']}")
        return bytes.fromhex(entry["id"])


def check_devices(store: ControlStore, device: NcclDevice, limit_s: float) -> None:
    """Check, on all ranks together, that each has a separate GPU and all have the same NCCL.

    NCCL hangs or fails with an obscure error if two ranks share a GPU.

    Raises:
        BoxingError: a rank did not take part in time, two ranks have one GPU, or versions differ.
    """
    everyone = range(store.size)
    card = [device.host, device.bus_id, ".".join(map(str, device.nccl_version))]
    store.publish(f"device/{store.rank}", json.dumps(card), everyone)
    cards: dict[int, list[str]] = {}

    def over() -> bool:
        # Read first, so that an entry of a rank from before its failure is seen.
        has_failed = store.failure() is not None
        for rank in everyone:
            if rank not in cards and (text := store.lookup(f"device/{rank}")):
                cards[rank] = json.loads(text)
        return len(cards) == store.size or has_failed

    if not store.wait_for(over, limit_s) or len(cards) < store.size:
        late = ", ".join(str(rank) for rank in everyone if rank not in cards)
        raise BoxingError(
            f"rank {store.rank} waited {limit_s:g} s for the GPUs of the other ranks; these did "
            f"not announce theirs: {late}",
            where=store.failure() or "",
            todo="read the output of those ranks",
        )
    owners: dict[tuple[str, str], int] = {}
    for rank, (host, bus_id, version) in sorted(cards.items()):
        other = owners.setdefault((host, bus_id), rank)
        if other != rank:
            raise BoxingError(
                f"ranks {other} and {rank} have the same GPU: {bus_id} of host {host}",
                accepted="one GPU for each rank",
                todo="start at most as many processes on a host as it has GPUs, and let "
                "CUDA_VISIBLE_DEVICES or boxing.device give each its own",
            )
        if version != cards[0][2]:
            raise BoxingError(
                f"rank 0 has NCCL {cards[0][2]}, but rank {rank} has NCCL {version}",
                where=f"hosts {cards[0][0]} and {host}",
                accepted="the same NCCL on all ranks",
            )


def release(
    channels: Mapping[str, NcclChannel], device: NcclDevice, limit_s: float, *, abort: bool
) -> bool:
    """Abort or destroy channels, all together, in a thread; return whether that ended in time.

    If they were aborted one by one, the first could wait for work of one that is not aborted yet.

    Args:
        channels: The channels by name.
        device: Their GPU.
        limit_s: Seconds to wait; a thread that needs longer is abandoned.
        abort: Whether to abort unfinished work; otherwise there must be none.
    """

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            device.use()
            if abort:
                with device.grouped():
                    for name in sorted(channels):
                        with contextlib.suppress(RuntimeError):
                            channels[name].abort()
            else:
                # In one order on all ranks: NCCL may wait for the other ranks of each.
                for name in sorted(channels):
                    channels[name].destroy()

    if not channels:
        return True
    thread = threading.Thread(target=work, name="sbp-nccl-release", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()
