"""Put the traces of the processes of a run together, through their boxing backend.

The clocks of hosts differ. A small exchange ends on all ranks at about the same time, so several of
them tell how far the clock of each host is from that of the first rank, up to what a message takes.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from sbp_core.boxing import BoxingBackend
from sbp_core.runtime import Held, Span, SpanKind, Trace
from sbp_torch.boxing.processes import gather_texts

#: Exchanges that compare the clocks.
_ROUNDS = 9

#: Seconds that a rank may wait for the others, which may still be at work on their step.
_DEADLINE_S = 120.0

#: Bytes of the text that says how long a trace is.
_SIZE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The trace of one process.

    Args:
        ranks: Whose it is.
        host: Name of its machine.
        process: Its number there.
        spans, held: What was noted.
        exits_ns: When each exchange that compares the clocks was over.
    """

    ranks: tuple[int, ...]
    host: str
    process: int
    spans: tuple[Span, ...]
    held: tuple[Held, ...]
    exits_ns: tuple[int, ...] = ()


def own_part(trace: Trace, ranks: Sequence[int]) -> Part:
    """Return what was noted in this process."""
    return Part(
        ranks=tuple(ranks),
        host=platform.node(),
        process=os.getpid(),
        spans=tuple(trace.spans),
        held=tuple(trace.held),
    )


def gather_parts(backend: BoxingBackend, ranks: Sequence[int], own: Part) -> list[Part]:
    """Return the parts of all processes; all of them call this between two steps.

    Args:
        backend: Open; one rank in each process.
        ranks: All ranks of the run.
        own: This process' part.

    Raises:
        BoxingError: a rank did not come.
    """
    communicator = backend.communicator(own.ranks[0])

    def exchange(text: str, what: str, width_bytes: int) -> list[str]:
        found = gather_texts(
            communicator, ranks, text, tag=what, width_bytes=width_bytes, deadline_s=_DEADLINE_S
        )
        return [found[rank] for rank in ranks]

    exits_ns = []
    for index in range(_ROUNDS):
        exchange("", f"comparison of clocks {index}", 1)
        exits_ns.append(Trace.now_ns())
    text = pack(replace(own, exits_ns=tuple(exits_ns)))
    sizes = exchange(str(len(text)), "sizes of traces", _SIZE_BYTES)
    return [unpack(part) for part in exchange(text, "traces", max(map(int, sizes)))]


def with_one_clock(parts: Sequence[Part]) -> tuple[list[Part], float]:
    """Return the parts with all times by the clock of the first one's host, and the error.

    Args:
        parts: Of all processes.

    Returns:
        The parts, and by how much clocks may still differ, in seconds; 0.0 on one host.
    """
    first, error_ns, moved = parts[0], 0.0, []
    for part in parts:
        if part.host == first.host:
            moved.append(part)
            continue
        ahead = [own - its for own, its in zip(part.exits_ns, first.exits_ns, strict=True)]
        offset_ns = round(median(ahead))
        error_ns = max(error_ns, (max(ahead) - min(ahead)) / 2)
        spans = tuple(
            replace(span, begin_ns=span.begin_ns - offset_ns, end_ns=span.end_ns - offset_ns)
            for span in part.spans
        )
        held = tuple(replace(one, time_ns=one.time_ns - offset_ns) for one in part.held)
        moved.append(replace(part, spans=spans, held=held))
    return moved, error_ns * 1e-9


def pack(part: Part) -> str:
    """Return a part as text."""
    value = {
        "ranks": part.ranks,
        "host": part.host,
        "process": part.process,
        "spans": [
            [
                str(span.kind), span.rank, span.thread, span.step, span.actor, span.micro_batch,
                span.begin_ns, span.end_ns, span.waits_for, span.node,
            ]
            for span in part.spans
        ],
        "held": [[one.rank, one.time_ns, one.num_bytes] for one in part.held],
        "exits_ns": part.exits_ns,
    }  # fmt: skip
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()


def unpack(text: str) -> Part:
    """Return the part that `pack` wrote."""
    value = json.loads(zlib.decompress(base64.b85decode(text)))
    return Part(
        ranks=tuple(value["ranks"]),
        host=value["host"],
        process=value["process"],
        spans=tuple(Span(SpanKind(kind), *rest) for kind, *rest in value["spans"]),
        held=tuple(Held(*entry) for entry in value["held"]),
        exits_ns=tuple(value["exits_ns"]),
    )
