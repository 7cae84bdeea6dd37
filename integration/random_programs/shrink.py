"""Find the smallest program with a fault, and the other programs that it explains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from random_programs import blocks, losses
from random_programs.oracle import judged
from random_programs.program import Program, Term
from random_programs.trial import Outcome, attempt

_SIMPLE = Term(value=next(iter(losses.REDUCTIONS)), error=next(iter(losses.ERRORS)))
_SIMPLEST = Program(
    seed=0, sizes=(8, 4, 4, 4, 3), kind="vector", stem=next(iter(blocks.STEMS)), terms=(_SIMPLE,)
)

#: Fields of settings, which are simplified first; any remaining fault occurs on one device.
_SETTINGS = ("layout", "micro_batches", "clip", "optimizer", "groups", "batch", "metrics")


def fault_of(outcome: Outcome) -> tuple[str, str]:
    """Return a key that is equal for outcomes with the same cause."""
    return outcome.kind, "" if outcome.kind == "WRONG" else outcome.reason


def shrunk(program: Program, outcome: Outcome, most_runs: int = 120) -> tuple[Program, Outcome]:
    """Return a program with the same fault from which no block can be removed.

    Args:
        program, outcome: A program with a fault.
        most_runs: Number of runs after which the search ends.
    """
    fault, runs, going_on = fault_of(outcome), 0, True
    while going_on:
        going_on = False
        for simpler in _simpler(program):
            if runs == most_runs:
                return program, outcome
            if simpler == program or not simpler.fits:
                continue
            runs += 1
            made = judged(simpler, attempt(simpler))
            if fault_of(made) == fault:
                program, outcome, going_on = simpler, made, True
                break
    return program, outcome


def explains(minimal: Program, other: Program) -> bool:
    """Whether another program contains all choices of a shrunk program."""
    needed = minimal.choices - _SIMPLEST.choices
    return needed <= other.choices and (minimal.micro_batches > 1) <= (other.micro_batches > 1)


def _simpler(program: Program) -> Iterator[Program]:
    """Yield smaller programs, the smallest ones first."""
    settings = {name: getattr(_SIMPLEST, name) for name in _SETTINGS}
    yield replace(program, **settings)
    if program.micro_batches > 1:
        yield replace(program, **{**settings, "micro_batches": 2})
    bare = {"layers": (), "inputs": (), "outputs": (), "form": _SIMPLEST.form, "metrics": ()}
    yield replace(program, **bare, head=_SIMPLEST.head)
    yield from (replace(program, terms=(term,)) for term in program.terms)
    yield replace(program, terms=_SIMPLEST.terms)
    yield replace(program, kind="vector", stem=_SIMPLEST.stem)
    for name in (*_SETTINGS, "form", "head"):
        yield replace(program, **{name: getattr(_SIMPLEST, name)})
    yield replace(program, micro_batches=min(2, program.micro_batches))
    for name in ("layers", "inputs", "outputs", "metrics"):
        given = getattr(program, name)
        for at in range(len(given)):
            yield replace(program, **{name: given[:at] + given[at + 1 :]})
    for at, term in enumerate(program.terms):
        for other in _simpler_terms(term):
            yield replace(program, terms=(*program.terms[:at], other, *program.terms[at + 1 :]))


def _simpler_terms(term: Term) -> Iterator[Term]:
    yield _SIMPLE
    yield replace(term, scale="{}")
    if term.error:
        yield replace(term, weights=())
        yield replace(term, value=_SIMPLE.value)
        yield replace(term, error=_SIMPLE.error)
    for at in range(len(term.weights)):
        yield replace(term, weights=term.weights[:at] + term.weights[at + 1 :])
