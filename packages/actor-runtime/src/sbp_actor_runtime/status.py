"""What a thread of actors is at, in words, for those who wonder why a run does not go on.

    rank 1, thread compute: at down.addmm@0(B), micro-batch 0; 6 of 20 firings of the step are done
      waits for: data in register gelu@0(B)#0 from rank 1
      last boxing: gelu@0(B) (all-gather), features@0(B) (all-gather)
      under way: down.grad.mm@0(B)
      registers: 1 of 14 is full: forward.0.1#0 (1 of 1, for backward.0.1)

It is read while the thread goes on, without a lock, and costs the thread nothing: each line holds
of the moment at which it was made, and two lines may be of two firings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from sbp_actor_runtime.register import OutRegister
from sbp_actor_runtime.worker import Worker
from sbp_core.boxing import BoxingStep
from sbp_core.compile import Actor, Collective, Receive, Send

#: Most boxing actors, and most registers, that are named.
_MOST = 8


def worker_status(worker: Worker, steps: Sequence[BoxingStep]) -> list[str]:
    """Return what a thread is at, in lines.

    Args:
        worker: The thread; it may be in the middle of a step.
        steps: Those of the plan.
    """
    rank, name = worker.id
    head, place = f"rank {rank}, thread {name}", worker.place
    if worker.current_actor:
        post, firing = worker.order[place]
        lines = [
            f"{head}: at {post.actor.name}, micro-batch {firing.micro_batch}; "
            f"{place} of {len(worker.order)} firings of the step are done"
        ]
        # What it waited for may have come by now.
        if worker.is_waiting and (missing := post.describe_missing(firing)):
            lines.append(f"  waits for: {missing}")
        elif kind := _boxing(post.actor, steps):
            lines.append(f"  is in boxing: {kind}")
        else:
            lines.append("  computes")
        place -= 1
    else:
        lines = [f"{head}: between steps"]
    fired = (worker.order[index][0].actor for index in range(place, -1, -1))
    boxed = (f"{one.name} ({_boxing(one, steps)})" for one in fired if _boxing(one, steps))
    if last := list(islice(boxed, _MOST)):
        lines.append(f"  last boxing: {', '.join(last)}")
    if under_way := list(worker.open.values()):
        lines.append(f"  under way: {', '.join(dict.fromkeys(under_way))}")
    # Those that carry states are full between steps.
    full = [end for end in worker.outputs.values() if not (end.has_credit or end.is_carrying)]
    are = "is" if len(full) == 1 else "are"
    registers = f"  registers: {len(full)} of {len(worker.outputs)} {are} full"
    return [*lines, registers + _listed([_register(end) for end in full])]


def _boxing(actor: Actor, steps: Sequence[BoxingStep]) -> str:
    """Return which part in boxing an actor has; `""` if none."""
    if isinstance(actor, Collective):
        return steps[actor.step].kind.value
    if isinstance(actor, Send):
        return "send"
    return "receive" if isinstance(actor, Receive) else ""


def _register(end: OutRegister) -> str:
    held = f"{end.filled - end.read} of {end.quota}"
    return f"{end.name} ({held}, for {end.slowest()})"


def _listed(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f": {', '.join(names[:_MOST])}{more}"
