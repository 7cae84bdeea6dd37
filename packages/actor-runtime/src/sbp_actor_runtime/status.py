"""Describe what a worker thread does or waits for, to find out why a run hangs (`sbp-watch`).

    rank 1, thread compute: at down.addmm@0(B), micro-batch 0; 6 of 20 firings of the step are done
      waits for: data in register gelu@0(B)#0 from rank 1
      under way: down.grad.mm@0(B)
      last boxing:
        gelu@0(B) (all-gather), step 3, micro-batch 0: ended 1.4 s ago, took 2 ms
        features@0(B) (all-gather), step 3, micro-batch 0: ended 1.4 s ago, took 310 us
      registers: 1 of 14 is full; alive of quota, and who reads last:
        forward.0.1#0: 1 of 1, for backward.0.1

The worker is read without a lock while it runs, and is not slowed down. So each line is true for
the moment at which it is made, and two lines may describe two different firings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sbp_actor_runtime.register import OutRegister
from sbp_actor_runtime.worker import ActorThread, LastBoxing
from sbp_core.boxing import BoxingStep
from sbp_core.compile import Actor, Collective, Receive, Send
from sbp_core.graph import Rate
from sbp_core.units import format_seconds

#: Largest number of boxing actors in the text.
_MOST = 8


def worker_status(worker: ActorThread, steps: Sequence[BoxingStep]) -> list[str]:
    """Return the status of a worker thread, as lines.

    Args:
        worker: The thread; it may be in the middle of a step.
        steps: The boxing steps of the plan.
    """
    rank, name = worker.id
    head, place = f"rank {rank}, thread {name}", worker.place
    if worker.current_actor:
        post, firing = worker.order[place]
        lines = [
            f"{head}: at {post.actor.name}{_number(post.actor, firing.number)}; "
            f"{place} of {len(worker.order)} firings of the step are done"
        ]
        # The missing message may have arrived by now.
        if worker.is_waiting and (missing := post.describe_missing(firing)):
            lines.append(f"  waits for: {missing}")
        elif kind := _boxing(post.actor, steps):
            lines.append(f"  is in boxing: {kind}")
        else:
            lines.append("  computes")
    else:
        lines = [f"{head}: between steps"]
    if under_way := list(worker.open.values()):
        lines.append(f"  under way: {', '.join(dict.fromkeys(under_way))}")
    actors = {post.actor.name: post.actor for post, _ in worker.order}
    now_s = time.monotonic()
    boxed = list(worker.boxed.items())  # in one go, because the thread may add to it meanwhile
    if boxed:
        boxed.sort(key=lambda one: one[1].began_s, reverse=True)
        lines.append("  last boxing:")
        lines += [
            f"    {name} ({_boxing(actors[name], steps)}), {_when(one, now_s)}"
            for name, one in boxed[:_MOST]
        ]
    # Registers that carry states are always full between steps, so they are not listed.
    full = [end for end in worker.outputs.values() if not (end.has_credit or end.initial)]
    alive = [end for end in worker.outputs.values() if end.filled > end.read]
    are = "is" if len(full) == 1 else "are"
    told = f"  registers: {len(full)} of {len(worker.outputs)} {are} full"
    lines.append(told + "; alive of quota, and who reads last:" * bool(alive))
    return [*lines, *map(_register, alive)]


def _number(actor: Actor, number: int) -> str:
    """Return the number of a firing, as text, for an actor that fires several times a step."""
    each = {Rate.MICRO: "micro-batch", Rate.UPDATE: "update", Rate.STEP: ""}[actor.rate]
    return f", {each} {number}" if each else ""


def _boxing(actor: Actor, steps: Sequence[BoxingStep]) -> str:
    """Return the kind of boxing step of an actor; `""` for other actors."""
    if isinstance(actor, Collective):
        return steps[actor.step].kind.value
    if isinstance(actor, Send):
        return "send"
    return "receive" if isinstance(actor, Receive) else ""


def _when(boxed: LastBoxing, now_s: float) -> str:
    where = f"step {boxed.step + 1}, micro-batch {boxed.micro_batch}"
    if boxed.ended_s is None:
        return f"{where}: begun {format_seconds(max(0.0, now_s - boxed.began_s))} ago, not ended"
    ago = format_seconds(max(0.0, now_s - boxed.ended_s))
    return f"{where}: ended {ago} ago, took {format_seconds(boxed.ended_s - boxed.began_s)}"


def _register(end: OutRegister) -> str:
    return f"    {end.name}: {end.filled - end.read} of {end.quota}, for {end.slowest()}"
