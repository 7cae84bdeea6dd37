"""`prove`: check by execution that the planned step computes the same as the captured one.

It runs before the first step of training. Results are cached on disk by the two graphs, so they
hold for all meshes and planners that plan the same graph, and for all processes and later runs of a
user. `sbp_launch.planning.proving` calls it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import GraphError, SbpError
from sbp_core.graph import InputKind, LogicalGraph, Node, OutputKind, graph_hash
from sbp_core.passes import accumulate, unalias_outputs
from sbp_core.units import format_bytes, format_seconds
from sbp_core.user_paths import cache_folder
from sbp_torch.proof.double_precision import graph_to_double
from sbp_torch.proof.drawing import Draw
from sbp_torch.proof.parts import MOST_BYTES, Sweep, run_s
from sbp_torch.proof.whole import DRAWS, OutputDifference, WholeStep
from sbp_torch.result_file import ResultFile

#: Version of the cache files: increased when their meaning, or the comparison, changes.
FORMAT = 2

_PACKAGES = ("sbp-core", "sbp-aten", "sbp-torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProof:
    """The result of a proof of a step.

    Args:
        operators: Number of operators of the planned step.
        alike: Number of them that are operators of the captured step on equal values, so that they
            were not run (proof part by part).
        parts: Number of different parts in which the other operators were run.
        num_not_run: Operators that would need too much time or memory, or do not run in float64 on
            the CPU.
        not_run: Source line of the first of them; empty if there is none.
        draws: For each whole step that was run, which rows were ignored.
        of: Text about the smaller batch of whole steps; empty if it was the whole batch.
        but: Text about outputs that differ without a verdict: rounding errors, or the loss is NaN.
        reason: Why nothing was proved; empty if something was.
        took_s: Duration of the proof, in seconds.
        is_known: Whether the result comes from the cache.
    """

    operators: int
    alike: int = 0
    parts: int = 0
    num_not_run: int = 0
    not_run: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    of: str = ""
    but: str = ""
    reason: str = ""
    took_s: float = 0.0
    is_known: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all of the step was proved."""
        return not self.reason and not self.num_not_run

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        when = "by an earlier run" if self.is_known else f"in {format_seconds(self.took_s)}"
        if self.reason:
            return [f"not proved that the planned step is the captured one: {self.reason}"]
        if self.draws:
            rows = ", ".join(self.draws)
            return [
                f"proved {when}: loss, metrics and new states are those of the captured step, "
                f"run{self.of} in float64 on random data (rows ignored: {rows})",
                *([f"  {self.but}"] if self.but else []),
            ]
        run = self.operators - self.alike - self.num_not_run
        lines = [
            f"proved {when}: of {self.operators} operators {self.alike} are those of the captured "
            f"step, {run} give the same in float64 on random data"
        ]
        if self.num_not_run:
            lines.append(
                f"  not proved of {self.num_not_run}, which take longer than compile.prove_s or "
                f"more than {format_bytes(MOST_BYTES)}, or do not run: {', '.join(self.not_run)}"
            )
        return lines


def _from_json(value: Mapping[str, Any]) -> StepProof:
    known = {one.name for one in fields(StepProof)} & value.keys()
    found: Any = {name: value[name] for name in known}
    found = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
    return StepProof(**found)


#: Time limit of a whole step, in budgets, if parts differ: only the whole step can decide then.
_SUSPECT = 30.0

#: Errors of operators that do not run on the given numbers.
_FAILURES = (SbpError, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The captured graph and the planned graph of a step.

    Args:
        before: The captured graph, of the whole batch or of one micro-batch.
        after: The planned graph, with the types of one micro-batch.
        example: A batch of the captured step: names -> tensors.
    """

    before: LogicalGraph
    after: LogicalGraph
    example: Mapping[str, Tensor]

    @property
    def is_cut(self) -> bool:
        """Whether the captured step takes the rows of several micro-batches at once."""
        return any(
            self.before.types[entry.name] != self.after.types[entry.name]
            for entry in self.after.inputs
            if entry.kind is InputKind.BATCH
        )


def prove(
    step: PlannedStep,
    *,
    states: Callable[[], Mapping[str, Tensor]] = dict,
    small: Callable[[], PlannedStep] | None = None,
    budget_s: float = 10.0,
    cache: bool | Path = True,
) -> StepProof:
    """Run the planned step and the captured step on random data, and compare the results.

    Loss, metrics and new states are compared in double precision. A step captured on one
    micro-batch is compared part by part: only operators that differ are run (`proof.parts`). With
    several micro-batches, gradients are accumulated in the captured step, too. A step captured on
    the whole batch is run on all rows at once, and cut into micro-batches (`proof.whole`).

    Args:
        step: The two graphs.
        states: Returns values of the states, for whole steps; states on `meta` have none.
        small: Makes the same step of fewer rows, if the step would take too long.
        budget_s: Limit on the estimated seconds of all runs.
        cache: Whether to keep results in the user's cache folder, or the folder to keep them in, so
            that no pair of graphs is proved twice. False neither reads nor writes.

    Returns:
        The parts of the step that were proved, and how; and those that take too long or do not run.

    Raises:
        GraphError: an output differs; names it, both numbers and a line of the user's code.
    """
    entry = None
    if cache is not False:
        packages = (f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
        texts = [f"format {FORMAT}", f"torch {torch.__version__}", *packages]
        key = ", ".join([*texts, f"{graph_hash(step.before)} as {graph_hash(step.after)}"])
        digest = hashlib.sha256(key.encode()).hexdigest()
        folder = cache_folder("proofs") if cache is True else cache
        entry = ResultFile(
            path=folder / f"{digest[:32]}.json",
            key=key,
            budget=budget_s,  # an incomplete proof is tried again with a larger budget
            what="proofs",
            dump=asdict,
            load=_from_json,
            is_whole=attrgetter("is_whole"),
        )
        known = entry.read()
        if known is not None:
            return replace(known, is_known=True)
    begin = time.perf_counter()
    with torch.no_grad():
        found = _prove(step, states, small, budget_s)
    found = replace(found, took_s=time.perf_counter() - begin)
    if entry is not None:
        entry.write(found)
    return found


def _prove(
    step: PlannedStep,
    states: Callable[[], Mapping[str, Tensor]],
    small: Callable[[], PlannedStep] | None,
    budget_s: float,
) -> StepProof:
    if step.is_cut:
        copy, of = step, ""
        if _whole_s(step) > budget_s and small is not None:
            try:
                copy = small()
            except SbpError as error:
                reason = f"a smaller batch: {error.what}"
                return StepProof(operators=len(step.after.nodes), reason=reason)
            after = copy.after
            batch = (after.tensor(e.name).shape for e in after.inputs if e.kind is InputKind.BATCH)
            rows = next((shape[0] for shape in batch if shape), 1)
            of = f" of {after.num_micro_batches} micro-batches of {rows} samples"
        before, after = graph_to_double(copy.before), graph_to_double(copy.after)
        whole = WholeStep(before=before, after=after, example=copy.example, states=states())
        return _run_whole(whole, copy, [], None, budget_s, of)
    before, after = step.before, step.after
    if after.num_micro_batches > 1:
        count, updates = after.num_micro_batches, after.num_updates
        before = accumulate(unalias_outputs(before), count, num_updates=updates)
    before, after = graph_to_double(before), graph_to_double(after)
    found = Sweep(before, after, budget_s).run()
    if not found.open:
        return StepProof(
            operators=len(after.nodes),
            alike=found.alike,
            parts=found.parts,
            not_run=tuple(", ".join(node.where()) for node in found.skipped[:1]),
            num_not_run=len(found.skipped),
        )
    whole = WholeStep(before=before, after=after, example=step.example, states=states())
    return _run_whole(whole, step, found.open, found.first, budget_s * _SUSPECT, "")


def _states(graph: LogicalGraph) -> list[str]:
    """Return the names of the states that are tensors."""
    return [one.name for one in graph.inputs if one.kind.is_state and graph.is_tensor(one.name)]


def _whole_s(step: PlannedStep) -> float:
    """Return the estimated seconds of one draw of a step: the captured graph runs twice."""
    return 2 * run_s(step.before, step.before.nodes) + run_s(step.after, step.after.nodes)


def _run_whole(
    whole: WholeStep,
    step: PlannedStep,
    suspects: list[str],
    first: Node | None,
    budget_s: float,
    of: str,
) -> StepProof:
    """Run whole steps, as many as the budget allows."""
    made = StepProof(operators=len(step.after.nodes), of=of)
    each_s = _whole_s(step)
    if each_s > budget_s:
        about = f"it would take about {format_seconds(each_s)}"
        seen = f"; {', '.join(suspects[:3])} may differ" if suspects else ""
        return replace(made, reason=about + seen)
    held = sum(whole.before.tensor(name).size_bytes for name in _states(whole.before))
    if held > MOST_BYTES and not suspects:
        return replace(made, reason=f"its states have {format_bytes(held)} in float64")
    draws: Sequence[Draw] = DRAWS if whole.can_ignore() else DRAWS[:1]
    draws = draws[: max(1, int(budget_s / max(each_s, 1e-9)))]
    told = ""
    for near in (False, True):
        try:
            found = list(replace(whole, near=near).differences(draws))
        except _FAILURES as error:
            told = str(error).splitlines()[0] if str(error) else type(error).__name__
            continue
        but = ""
        real = [one for one in found if not one.is_rounding]
        if real and real[0].has_loss:
            raise _refusal(real, step, first, of)
        if found and not real:
            but = (
                f"{found[0].name!r} is only a rounding error, {found[0].wanted:.3g} of one and "
                f"{found[0].found:.3g} of the other, so it was not compared"
            )
        elif found:
            draws = draws[:-1]
            but = (
                f"with all rows ignored, the loss is NaN in both, and {real[0].name!r} is "
                f"{real[0].found:.6g} instead of {real[0].wanted:.6g}"
            )
        return replace(made, draws=tuple(how.ignored for how in draws), but=but)
    return replace(made, reason=f"it does not run on random numbers: {told}")


def _refusal(
    found: list[OutputDifference], step: PlannedStep, first: Node | None, of: str
) -> GraphError:
    """Return the error for outputs that differ."""
    order = (OutputKind.LOSS, OutputKind.METRIC, OutputKind.STATE)
    worst = min(found, key=lambda one: order.index(one.kind))
    others = len(found) - 1
    more = f", and {others} more output{'s' * (others > 1)} differ" if others else ""
    after = step.after
    several = after.num_micro_batches > 1 and step.is_cut
    todo = "leave out the pass that changes it: compile.plugins, or a switch of compile.passes"
    if several:
        todo = "train with micro_batches=1, or with MicroBatches(..., loss='mean_of_micro_batches')"
    return GraphError(
        f"the planned step gives another {worst.kind.value} {worst.name!r} than the captured "
        f"step: {worst.found:.9g} instead of {worst.wanted:.9g}{more}",
        where=(
            *_where(worst, step.before, first),
            f"both, run on random numbers in float64{of}; rows ignored: {worst.ignored}",
        ),
        accepted="rewrites that change no loss, metric or new state",
        todo=f"{todo}; compile.prove=false takes such steps all the same",
    )


def _where(worst: OutputDifference, before: LogicalGraph, first: Node | None) -> tuple[str, ...]:
    """Return the source line of the first value that differs, or of the output's first use."""
    if first is not None:
        return first.where()
    value = {out.name: out.value for out in before.outputs}.get(worst.name, worst.name)
    if worst.kind is OutputKind.STATE:
        value = before.input_kinds[worst.name].of or worst.name
        return next((node.where() for node in before.users[value] if node.source), ())
    node = before.producers.get(value)
    return node.where() if node is not None else ()
