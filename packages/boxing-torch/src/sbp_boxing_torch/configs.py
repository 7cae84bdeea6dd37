"""Validated settings of the boxing backend `torch`: how ranks connect and move tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from sbp_core.errors import ConfigError
from sbp_core.processes import check_rendezvous, check_timeouts

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBoxingConfig:
    """Settings of `sbp_boxing_torch.backend.TorchBackend`.

    Args:
        transport: `gloo` for tensors on CPUs, `nccl` for tensors on GPUs, or `auto` to choose by
            `device`.
        device: Device of the shards of this process: `cpu`, `cuda:N`, or `cuda` for the GPU with
            the index LOCAL_RANK of the environment (0 if that is not set).
        init_method: Address of the rendezvous: `env://` (MASTER_ADDR and MASTER_PORT, as torchrun
            sets them), `tcp://HOST:PORT` or `file:///PATH`.
        rank: Rank of this process; from RANK in the environment if None.
        world_size: Number of processes; from WORLD_SIZE in the environment if None.
        connect_timeout_s: Seconds to wait for the other processes at the start, above 0.

    Raises:
        ConfigError: a setting is invalid, or two settings contradict each other.
    """

    #: Each rank is a process.
    spans_processes: ClassVar[bool] = True

    transport: Literal["auto", "gloo", "nccl"] = "auto"
    device: str = "cpu"
    init_method: str = "env://"
    rank: int | None = None
    world_size: int | None = None
    connect_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device={self.device!r} is unknown", accepted="cpu, cuda, cuda:N")
        if self.transport not in ("auto", "gloo", "nccl"):
            raise ConfigError(
                f"transport={self.transport!r} is unknown", accepted="auto, gloo, nccl"
            )
        if self.transport not in ("auto", self.chosen_transport):
            raise ConfigError(
                f"transport={self.transport!r} does not move tensors of device={self.device!r}",
                accepted=f"auto, {self.chosen_transport}",
            )
        check_rendezvous(self.init_method, self.rank, self.world_size)
        check_timeouts(connect_timeout_s=self.connect_timeout_s)

    @property
    def chosen_transport(self) -> str:
        """The transport: `gloo` or `nccl`, chosen by the device if it is `auto`."""
        return "nccl" if self.device.startswith("cuda") else "gloo"
