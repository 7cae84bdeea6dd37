"""What a GPU test runs in a process of its own, as NCCL may keep the thread that called it."""

import os
import sys
import threading
import time

import torch

from sbp_boxing_nccl.nccl.bootstrap import Bootstrap, release
from sbp_boxing_nccl.nccl.device import load_device
from sbp_boxing_nccl.nccl.nccl_group import launch
from sbp_core.boxing.collective_call import CollectiveCall
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.processes import KeyValueControlStore
from sbp_core.sbp import B, NdSbp, P


def alone() -> None:
    """Enter `ncclCommInitRank` for two ranks, of which the other one only says that it would."""
    from thread_ranks import DictStore

    key_values = DictStore()
    store = KeyValueControlStore(key_values, 0, 2)
    ghost = KeyValueControlStore(key_values, 1, 2)
    ghost.say("join/0-1", ranks=[0, 1])
    ghost.say("join/0-1/id", ranks=[0, 1])
    bootstrap = Bootstrap(store, load_device(0, 0), lambda call: None)
    mesh = Placement([0, 1], ("x",))
    step = BoxingStep(
        kind=StepKind.ALL_REDUCE,
        shape=(4,),
        dtype="float32",
        source=(mesh, NdSbp(P)),
        target=(mesh, NdSbp(B)),
        axes=(0,),
        size_bytes=0,
    )
    started = time.monotonic()
    try:
        bootstrap.connect(CollectiveCall.begin(step, "alone", 0, 3.0), "0-1", (0, 1))
    except BoxingError as error:
        sys.stdout.write(f"{error}\nafter {time.monotonic() - started:.1f} s\n")


def stuck() -> None:
    """Receive from oneself what nobody sends, and abort."""
    device = load_device(0, 0)
    channel = device.connect(1, device.unique_id(), 0)
    values = torch.zeros(1000, device=device.torch_device)

    def abort_soon() -> None:
        time.sleep(1.0)
        release({"stuck": channel}, device, 10.0, abort=True)

    threading.Thread(target=abort_soon, daemon=True).start()
    try:
        work = launch(
            device,
            channel,
            lambda: channel.receive(values.data_ptr(), values.nbytes, "uint8", 0),
            values,
        )
        end = time.monotonic() + 30.0
        while not work.event.is_done() and time.monotonic() < end:
            time.sleep(0.01)
        ended = work.event.is_done()
    except RuntimeError as error:
        sys.stdout.write(f"NCCL reported: {error}\n")
        ended = True
    sys.stdout.write("refused or aborted\n" if ended else "still under way\n")


if __name__ == "__main__":
    {"alone": alone, "stuck": stuck}[sys.argv[1]]()
    sys.stdout.flush()
    # A thread may be inside NCCL, which the end of the interpreter would wait for.
    os._exit(0)
