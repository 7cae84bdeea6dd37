"""The second comparison: strategies that `torch.distributed.tensor` registers, against our claims.

    python -m signatures.peer --calls FILE [--aten aten.mm.default,...]

For every recorded call, this module looks up the strategies that DTensor registers for its operator
along one mesh axis (replicate, shard, partial sum, max and min). The survey has verified strategies
that we claim. A strategy that we do not claim is executed: if it holds, it is *missing* in our
rules, which is an error; if not, it is a wrong strategy of DTensor, or needs more than its shards.
Partial averages, norms and masks are not in the algebra, and are only counted.

The module uses private parts of torch (tried on 2.13), which the product does not.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops import strategy_validation as peer

# This lets `python integration/signatures/peer.py` find the package, too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from sbp_core.errors import SbpError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, Partial, S, Sbp, Split, local_shape
from sbp_core.signatures import LocalCall, LocalProgram, OpCall, Signature1d, combine, derive
from sbp_torch.signatures import (
    Completed,
    OpSample,
    call_of,
    overload,
    refutation,
    run_isolated,
    run_op,
    whole_sample,
)
from signatures.calls import RecordedCall
from signatures.judge import accident, redrawn, shown
from signatures.store import Calls

AXIS_SIZE = 2

#: Seconds that one strategy may run.
TRIAL_LIMIT_S = 20.0

#: The greatest number of strategies of one call that are run.
MOST_TRIALS = 200

#: A strategy of one call: the SBPs of inputs and outputs along the axis.
Strategy = tuple[tuple[Sbp, ...], tuple[Sbp, ...]]


@dataclass(slots=True)
class Tally:
    """The results of the strategies of all calls.

    Args:
        ops: Operators for which DTensor has strategies.
        calls: Number of their calls.
        counts: Strategies that are `claimed`, `missing`, `refuted`, or `foreign` to the algebra.
        missing: Missing strategies by operator, each with the call.
        refuted: Refuted strategies by operator, each with the reason.
    """

    ops: set[str] = field(default_factory=set)
    calls: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    missing: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    refuted: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def placement(text: str) -> Sbp | None:
    """Return the SBP of a printed DTensor placement; None if the algebra has none."""
    if text == "R":
        return B
    if text.startswith("S("):
        return S(int(text[2:-1]))
    if text in ("P(sum)", "P(max)", "P(min)"):
        return Partial(text[2:-1])
    return None


def strategies(recorded: RecordedCall, call: OpCall) -> Iterator[Strategy | None]:
    """Yield the strategies that DTensor registers for a call; None for foreign ones."""
    tensors = peer.extract_tensors_from_args(recorded.args, recorded.kwargs)
    if len(tensors) != len(call.inputs):
        return
    rules = peer._query_dtensor_rules(
        overload(recorded.op),
        tensors,
        recorded.args,
        recorded.kwargs,
        tuple(entry.shape for entry in call.inputs),
        tuple(entry.shape for entry in call.outputs),
        AXIS_SIZE,
        verbose=False,
    )
    arity = (len(call.inputs), len(call.outputs))
    for inputs, outputs in sorted(rules):
        found = [placement(text) for text in (*inputs, *outputs)]
        made = tuple(entry for entry in found if entry is not None)
        if len(made) < len(found) or (len(inputs), len(outputs)) != arity:
            yield None
        else:
            yield made[: len(inputs)], made[len(inputs) :]


def is_claimed(strategy: Strategy, claims: Sequence[Signature1d]) -> bool:
    """Return whether a claim has the same inputs, and outputs as strong as the strategy's."""
    inputs, outputs = strategy
    return any(
        claim.inputs == inputs
        and all(mine in (theirs, B) for mine, theirs in zip(claim.outputs, outputs, strict=True))
        for claim in claims
    )


def fits(strategy: Strategy, call: OpCall) -> bool:
    """Return whether every split has at least one element for each rank."""
    pairs = zip((*strategy[0], *strategy[1]), (*call.inputs, *call.outputs), strict=True)
    return all(
        entry.dim < len(kind.shape) and kind.shape[entry.dim] >= AXIS_SIZE
        for entry, kind in pairs
        if isinstance(entry, Split)
    )


def program(call: OpCall, outputs: tuple[Sbp, ...], rank: int) -> LocalProgram:
    """Return the program that DTensor runs: the call, with the local shape for a shape argument."""
    places = DTensor._op_dispatcher.sharding_propagator.op_to_shape_and_stride_idx
    place = places.get(overload(call.op))
    at = place[0] if isinstance(place, tuple) else place
    args = call.args
    if at is not None and at < len(args):
        shape = local_shape(call.outputs[0].shape, NdSbp(outputs[0]), (AXIS_SIZE,), (rank,))
        args = (*args[:at], shape, *args[at + 1 :])
    return LocalProgram(calls=(LocalCall(op=call.op, args=args, kwargs=call.kwargs),))


def run(sample: OpSample, strategy: Strategy) -> str:
    """Return how execution refutes a strategy; empty if it holds under three draws."""
    call = sample.call
    signature = combine([Signature1d(inputs=strategy[0], outputs=strategy[1], origin="DTensor")])
    mesh = Placement.grid((AXIS_SIZE,))
    for seed in range(3):
        reason = refutation(
            sample, signature, mesh, run_op, partial(program, call, strategy[1]), seed=seed
        )
        if reason:
            return reason
    return ""


def compare(recorded: RecordedCall, tally: Tally) -> None:
    """Compare one call."""
    try:
        call, tensors = call_of(recorded.op, recorded.args, recorded.kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return
    found = list(strategies(recorded, call))
    if not found:
        return
    tally.ops.add(recorded.op)
    tally.calls += 1
    tally.counts["foreign"] += sum(entry is None for entry in found)
    try:
        claims = derive(call, AXIS_SIZE)
    except SbpError:
        claims = ()
    if "seeded" in call.tags or any(0 in kind.shape for kind in (*call.inputs, *call.outputs)):
        return  # random results prove nothing, nor does splitting a tensor without elements
    legal = [entry for entry in found if entry is not None and fits(entry, call)]
    tally.counts["claimed"] += sum(is_claimed(entry, claims) for entry in legal)
    open_ones = [entry for entry in legal if not is_claimed(entry, claims)][:MOST_TRIALS]
    if not open_ones:
        return
    sample = whole_sample(call, tensors, run_op)
    others = redrawn(call, tensors)
    trials = [partial(run, sample, entry) for entry in open_ones]
    for entry, verdict in zip(
        open_ones, run_isolated(trials, timeout_s=TRIAL_LIMIT_S), strict=True
    ):
        text = f"{NdSbp(*entry[0])} -> {NdSbp(*entry[1])}"
        one = Signature1d(inputs=entry[0], outputs=entry[1], origin="DTensor")
        if (
            isinstance(verdict, Completed)
            and not verdict.value
            and accident(others, one, AXIS_SIZE)
        ):
            tally.counts["refuted"] += 1
            tally.refuted[recorded.op].append(f"{text}: by other values than the sample's")
        elif isinstance(verdict, Completed) and not verdict.value:
            tally.counts["missing"] += 1
            tally.missing[recorded.op].append(f"{text}   {shown(recorded)}")
        else:
            reason = verdict.value if isinstance(verdict, Completed) else str(verdict)
            tally.counts["refuted"] += 1
            tally.refuted[recorded.op].append(f"{text}: {reason}")


def report(tally: Tally, console: Console) -> None:
    """Print the results."""
    console.print(
        f"{len(tally.ops)} operators with strategies of DTensor, {tally.calls} calls; strategies: "
        + ", ".join(f"{tally.counts[name]} {name}" for name in ("claimed", "missing", "refuted"))
        + f", {tally.counts['foreign']} outside the algebra"
    )
    for title, found in (("missing here", tally.missing), ("refuted by execution", tally.refuted)):
        table = Table("operator", "count", "example", title=title, title_justify="left")
        for op, entries in sorted(found.items()):
            table.add_row(op, str(len(entries)), entries[0])
        if found:
            console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; exit with 1 if a strategy is missing."""
    parser = argparse.ArgumentParser(prog="signatures.peer", description="Compare with DTensor.")
    parser.add_argument("--calls", type=Path, required=True, help="file of recorded calls")
    parser.add_argument("--aten", default="", help="only these operators, by comma")
    parser.add_argument("--width", type=int, help="columns of the printed tables")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # A fake process group: strategies only need its size.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=AXIS_SIZE)
    console = Console(width=options.width)
    calls = Calls(options.calls)
    wanted = [op for op in options.aten.split(",") if op]
    ops = [op for op in calls.ops if not wanted or any(op.startswith(name) for name in wanted)]
    tally = Tally()
    for op in track(ops, "comparing", console=console):
        for recorded, _ in calls.of(op):
            compare(recorded, tally)
    report(tally, console)
    dist.destroy_process_group()
    return 1 if tally.missing else 0


if __name__ == "__main__":
    sys.exit(main())
