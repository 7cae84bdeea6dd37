"""Ranks that are threads of this process, each with a backend over fake GPUs."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from fake_device import FakeDevice, ThreadNetwork

from sbp_boxing_nccl.configs import NcclBoxingConfig
from sbp_boxing_nccl.nccl.nccl_backend import NcclBackend
from sbp_boxing_nccl.nccl.world import NcclWorld
from sbp_core.processes import KeyValueControlStore

#: Seconds that ranks may take before the tests give up.
LIMIT_S = 120.0


class DictStore:
    """What a store of torch.distributed does, for threads. (`HashStore` is for one at a time.)"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            assert expected == "", "only used to set first"
            return self._values.setdefault(key, desired.encode())

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None


class Ranks:
    """Fake GPUs of ranks 0 .. n-1, to be prepared by a test, and then run."""

    def __init__(self, num_ranks: int, **config: Any) -> None:
        network, store = ThreadNetwork(), DictStore()
        self.config = NcclBoxingConfig(bootstrap="store", **({"connect_timeout_s": 10.0} | config))
        self.devices = [FakeDevice(network, rank) for rank in range(num_ranks)]
        self.worlds = [
            NcclWorld(
                rank=rank,
                size=num_ranks,
                local_rank=rank,
                control_store=KeyValueControlStore(store, rank, num_ranks),
            )
            for rank in range(num_ranks)
        ]

    def run(self, job: Callable[[int, NcclBackend], Any]) -> Sequence[Any]:
        """Open a backend on each rank, call `job(rank, backend)`, close it; return the results."""
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            backend = NcclBackend(self.config, world=self.worlds[rank], device=self.devices[rank])
            try:
                backend.open(range(len(self.worlds)))
                results[rank] = job(rank, backend)
            except BaseException as error:
                errors[rank] = error
                backend.fail(error)
            finally:
                backend.close()

        threads = [
            threading.Thread(target=work, args=(rank,), daemon=True)
            for rank in range(len(self.worlds))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), "ranks hang"
        for device in self.devices:
            device.end()
        if errors:
            raise errors[min(errors)]
        return [results[rank] for rank in sorted(results)]
