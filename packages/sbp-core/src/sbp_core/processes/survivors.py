"""The surviving processes of a run after a failure: they agree on who survived, and exchange texts.

The trainer saves a checkpoint with them. The transport is broken then, on all ranks. The control
store mostly works:

    rank 0   fails, waits for those that still run     survivors 0, 2     gather("step 7") ...
    rank 1   has ended
    rank 2   fails, waits for those that still run     survivors 0, 2     gather("step 7") ...

A rank that raised an exception still runs, and is a survivor. On this host, it is seen at once if a
process has ended or a signal has stopped it; on other hosts, a survivor waits for the limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from sbp_core.errors import BoxingError
from sbp_core.processes.control_store import ControlStore

#: Seconds that a process waits for the others to read its last text.
_LEAVE_S = 1.0


class Survivors:
    """The surviving processes, on which all of them have agreed.

    Args:
        ranks: The survivors, ascending.
        store: The control store of this rank.
    """

    def __init__(self, ranks: Sequence[int], store: ControlStore) -> None:
        self.ranks, self._store = tuple(ranks), store
        self._num_texts = 0

    @classmethod
    def agree(cls, store: ControlStore, limit_s: float) -> Survivors:
        """Wait for all processes that still run, and agree on the survivors, who all call this.

        Args:
            store: The control store of this rank, which has registered.
            limit_s: Seconds to wait for ranks about which nothing else is known.

        Returns:
            All that still run; this rank alone if the control store is lost, such as with the agent
            of torchrun that hosted it.

        Raises:
            BoxingError: the control store is silent, or the others did not wait for this rank.
        """
        store.say("survivor")
        everyone = range(store.size)

        def over() -> bool:
            # If the store is silent while a process hangs, that process most likely hosts it.
            stands_still = bool(_gone(store, everyone))
            return store.is_lost(if_silent=stands_still) or not _awaited(store, everyone)

        store.wait_for(over, limit_s)
        found = store.agree_on_survivors(json.dumps(store.announcing("survivor", everyone)))
        if found is None and store.is_lost():
            return cls((store.rank,), store)
        ranks = () if found is None else json.loads(found)
        if store.rank not in ranks:
            raise BoxingError(
                f"rank {store.rank} cannot reach the other surviving ranks: "
                + ("the store does not answer" if found is None else f"{ranks} did not wait for it")
            )
        return cls(ranks, store)

    def gather(self, text: str, limit_s: float) -> list[str]:
        """Return a text of each survivor, in the order of `ranks`; all of them call this.

        Args:
            text: The text of this rank.
            limit_s: Seconds to wait for the others.

        Raises:
            BoxingError: another survivor has ended too, or did not come.
        """
        self._num_texts += 1
        key = f"survivor/{self._num_texts}"
        self._store.publish(f"{key}/{self._store.rank}", text, self.ranks)
        texts = {self._store.rank: text}

        def missing() -> list[int]:
            for rank in self.ranks:
                if rank not in texts and (found := self._store.lookup(f"{key}/{rank}")) is not None:
                    texts[rank] = found
            return [rank for rank in self.ranks if rank not in texts]

        self._wait_for(missing, limit_s)
        if late := missing():
            raise BoxingError(
                f"of the surviving ranks, {', '.join(map(str, late))} did not continue",
                where=f"rank {self._store.rank}",
            )
        return [texts[rank] for rank in self.ranks]

    def leave(self) -> None:
        """Wait until the others have read the last text: rank 0 may host the store."""
        self._store.publish(f"survivor/left/{self._store.rank}", "1", self.ranks)
        if self._store.rank == 0:
            key, ranks = "survivor/left", self.ranks
            self._wait_for(
                lambda: [one for one in ranks if self._store.lookup(f"{key}/{one}") is None],
                _LEAVE_S,
            )

    def _wait_for(self, missing: Callable[[], list[int]], limit_s: float) -> None:
        """Wait until no rank is missing, or the missing ranks cannot come any more."""
        store = self._store

        def over() -> bool:
            return store.is_lost() or not (late := missing()) or bool(_gone(store, late))

        store.wait_for(over, limit_s)


def _awaited(store: ControlStore, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have not come, but still may."""
    absent = {*ranks} - {*store.announcing("survivor", ranks)}
    return sorted(absent - {*_gone(store, absent), *store.deregistered(absent)})


def _gone(store: ControlStore, ranks: Iterable[int]) -> list[int]:
    """Return the ranks, among those given, that have been seen to run no more."""
    store.members()
    return store.standing_still(ranks)
