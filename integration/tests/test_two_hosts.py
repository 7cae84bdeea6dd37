"""Two hosts, as two network namespaces of this machine: torchrun with a process on each.

They reach each other by an address that is not the loopback's, so that whatever is bound to
127.0.0.1 by mistake is not found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import DATA, SMALL, losses

#: The namespaces, each with the name of its end of the cable, and its address.
HOSTS = {"sbp-host-1": ("sbp-1", "10.77.0.1"), "sbp-host-2": ("sbp-2", "10.77.0.2")}


def ip(*arguments: str) -> bool:
    """Call `ip`; say whether it did what it was asked to."""
    done = subprocess.run(["ip", *arguments], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces with a cable between them."""
    if shutil.which("ip") is None or not ip("netns", "add", next(iter(HOSTS))):
        pytest.skip("network namespaces take root and the program `ip`")
    try:
        first, second = HOSTS
        assert ip("netns", "add", second)
        (end, _), (other_end, _) = HOSTS.values()
        cable = ("type", "veth", "peer", "name", other_end, "netns", second)
        assert ip("link", "add", end, "netns", first, *cable)
        for name, (device, address) in HOSTS.items():
            assert ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            assert ip("-n", name, "link", "set", device, "up")
            assert ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in HOSTS:
            ip("netns", "del", name)


@pytest.mark.exhaustive
def test_torchrun_trains_on_two_hosts_bit_for_bit_as_threads_do(
    tmp_path: Path, hosts: None
) -> None:
    running = []
    for number, (name, (device, _)) in enumerate(HOSTS.items()):
        torchrun = (
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"),
            *("--master-addr=10.77.0.1", "--master-port=29511"),
        )
        command = ["ip", "netns", "exec", name, *torchrun, "-m", "sbp_launch.apps.train"]
        running.append(
            subprocess.Popen(
                [*command, *SMALL, *DATA, "boxing=torch", "hydra.run.dir=run"],
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        told = [process.communicate(timeout=250)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(told)
    assert "step 3/3" in told[0] and "step 3/3" not in told[1]

    subprocess.run(
        [sys.executable, "-m", "sbp_launch.apps.train", *SMALL, *DATA, "hydra.run.dir=threads"],
        cwd=tmp_path,
        capture_output=True,
        timeout=200,
        check=True,
    )
    assert losses(tmp_path / "run") == losses(tmp_path / "threads")
