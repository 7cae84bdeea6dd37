"""The judgement of one recorded call: the claims of rules, compared with execution.

*Wrong* is a claim that execution refutes. *Missed* is a signature that execution discovers and no
claim implies; it is explained if the notation rejects it for a reason that it states.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sbp_core.errors import SbpError, SignatureError
from sbp_core.placement import Placement
from sbp_core.sbp import B, Partial, Sbp, Split
from sbp_core.signatures import (
    Derivation,
    Effect,
    LocalProgram,
    OpCall,
    Signature1d,
    combine,
    derivation,
    derive,
    installed_rules,
)
from sbp_torch.signatures import (
    OpSample,
    call_of,
    discover,
    program_of_call,
    refutation,
    run_op,
    verify,
    whole_sample,
)
from signatures.calls import RecordedCall

#: Axis sizes for running claims, and axis sizes for discovering signatures.
VERIFIED_SIZES = (2, 3, 5)
DISCOVERED_SIZES = (2, 5)

#: The signatures that discovery found, by axis size.
Found = dict[int, list[Signature1d]]

#: Number of other draws on which a missed signature has to hold.
_NUM_REDRAWS = 12

#: Number of candidates that discovery tries, the promising ones first: for calls with up to three
#: tensor arguments, and for all other calls, which are slower and have far too many candidates.
_BUDGETS = (500, 200)

#: Calls with more tensor arguments are not searched for further signatures.
MOST_SEARCHED_INPUTS = 12

#: The reason that a notation gives for any label marked `!`; it does not count as an explanation.
_GENERIC_REASON = "needs that dim whole"

#: Modules that are executed in addition to the rules: changes in them make verdicts stale.
_EXECUTING = (
    "sbp_torch.signatures.isolate",
    "sbp_torch.signatures.pieces",
    "sbp_torch.signatures.torch_call",
    "sbp_torch.signatures.trial",
)
_VERIFYING = (
    *_EXECUTING,
    "sbp_core.signatures.axes",
    "sbp_core.signatures.derivations",
    "sbp_core.signatures.localization",
    "sbp_torch.signatures.verification",
)
_DISCOVERING = (
    *_EXECUTING,
    "sbp_torch.signatures.candidates",
    "sbp_torch.signatures.discovery",
    "sbp_torch.signatures.study",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A signature that is wrong or missed.

    Args:
        text: The signature.
        size: Size of the mesh axis; 0 on several axes.
        even: Whether the size divides every extent that is split.
        reason: How execution refutes it; or why it is not claimed, empty if unknown.
    """

    text: str
    size: int
    even: bool
    reason: str


@dataclass(slots=True)
class Verdict:
    """The verdict on one call.

    Args:
        op, key, shapes: The call; shapes for messages.
        rule: `own`, `pointwise`, or empty if the operator has no rule.
        refused: Why the call could not be judged; empty if it was.
        why: The reasons that the notation states.
        even, uneven, product: Number of claims that were run, on one axis and on two.
        useful: Whether a claim is not all B.
        wrong, missed: The findings.
        searched: Whether discovery searched for signatures.
        verify_s, discover_s: Time spent, in seconds; 0 for a cached result.
    """

    op: str
    key: str
    shapes: str
    rule: str = ""
    refused: str = ""
    why: str = ""
    even: int = 0
    uneven: int = 0
    product: int = 0
    useful: bool = False
    wrong: list[Finding] = field(default_factory=list)
    missed: list[Finding] = field(default_factory=list)
    searched: bool = False
    verify_s: float = 0.0
    discover_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Verdict:
        """Read the result of `to_json`."""
        lists = {name: [Finding(**entry) for entry in value[name]] for name in ("wrong", "missed")}
        return cls(**{**value, **lists})

    @property
    def claimed(self) -> int:
        """The number of claims that were run."""
        return self.even + self.uneven + self.product

    def unexplained(self, even: bool) -> list[Finding]:
        """Return the unexplained missed signatures of even, or of uneven, shards."""
        return [entry for entry in self.missed if entry.even == even and not entry.reason]


def opcall(recorded: RecordedCall) -> OpCall:
    """Return the `OpCall` of a recorded call, which is run once."""
    return call_of(recorded.op, recorded.args, recorded.kwargs)[0]


def rule_hash(recorded: RecordedCall) -> str:
    """Return a text that changes with everything that a verdict on the claims depends on."""
    judged = Path(__file__).read_text("utf-8")
    parts = [search_hash(recorded), recorded.key, _sources(_VERIFYING), judged]
    try:
        call = opcall(recorded)
        rule = installed_rules().rule(call)
        found = derivation(call)
        parts += [repr(entry) + repr(entry.requires) for entry in found.legal]
        parts += [repr(found.rejected), repr(found.notation)]
        if rule.localize is not None:
            parts.append(Path(inspect.getfile(rule.localize)).read_text("utf-8"))
    except (SbpError, RuntimeError, ValueError, TypeError, IndexError) as error:
        parts.append(str(error))
    return _hash(parts)


def search_hash(recorded: RecordedCall) -> str:
    """Return a text that changes with everything that discovery depends on."""
    # A signature that holds in float32 also holds in float64.
    like = recorded.key.replace("float64", "float32")
    return _hash([like, torch.__version__, str(_BUDGETS), _sources(_DISCOVERING)])


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@cache
def _sources(modules: tuple[str, ...]) -> str:
    """Return a hash of the source of modules."""
    return _hash([inspect.getsource(import_module(name)) for name in modules])


def judge(
    recorded: RecordedCall,
    found: Found | None,
    *,
    isolated: bool = False,
) -> Verdict:
    """Return the verdict on one call.

    Args:
        recorded: The call.
        found: The result of discovery, by axis size; None without discovery.
        isolated: Whether each claim runs in its own process, which is slower.
    """
    verdict = Verdict(op=recorded.op, key=recorded.key, shapes=shown(recorded))
    try:
        call = opcall(recorded)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        verdict.rule = "own"
        verdict.refused = f"cannot be run again: {_line(error)}"
        return verdict
    try:
        rule = installed_rules().rule(call)
    except SignatureError:
        return verdict
    tagged = "pointwise" in call.tags and call.op not in installed_rules().ops
    verdict.rule = "pointwise" if tagged else "own"
    try:
        rule.notation(call)
        derived = derivation(call)
    except Exception as error:  # a rule may fail in any way
        verdict.refused = f"the rule fails: {_line(error)}"
        return verdict
    verdict.useful = len(derived.legal) > 1
    verdict.why = getattr(derived.notation, "why", "") or getattr(derived.notation, "note", "")
    _verify(recorded, verdict, isolated=isolated)
    if found is not None:
        verdict.searched = True
        for size, signatures in found.items():
            verdict.missed += _missed(recorded, derived, size, signatures)
    return verdict


def refusal(recorded: RecordedCall, reason: str) -> Verdict:
    """Return the verdict on a call that could not be judged."""
    return Verdict(
        op=recorded.op, key=recorded.key, shapes=shown(recorded), rule="own", refused=reason
    )


def searchable(recorded: RecordedCall) -> bool:
    """Return whether discovery is used: for calls with some, but not too many tensor arguments."""
    return 0 < _num_tensors(recorded) <= MOST_SEARCHED_INPUTS


def _num_tensors(recorded: RecordedCall) -> int:
    leaves = tree_leaves((recorded.args, recorded.kwargs))
    return sum(isinstance(leaf, torch.Tensor) for leaf in leaves)


def discovered(recorded: RecordedCall) -> Found:
    """Return the signatures of a call that execution discovers."""
    budget = _BUDGETS[_num_tensors(recorded) > 3]
    return {
        size: [
            entry
            for entry in discover(
                recorded.op,
                *recorded.args,
                axis_size=size,
                budget=budget,
                cache=False,
                **recorded.kwargs,
            ).signatures
            if not any(need.failure(size) for need in entry.requires)
        ]
        for size in DISCOVERED_SIZES
        if size == DISCOVERED_SIZES[0] or _longest(recorded) >= size
    }


def _longest(recorded: RecordedCall) -> int:
    """Return the largest extent of a tensor argument: larger axis sizes allow no split."""
    leaves = tree_leaves((recorded.args, recorded.kwargs))
    extents = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return max((extent for shape in extents for extent in shape), default=0)


def _verify(recorded: RecordedCall, verdict: Verdict, *, isolated: bool) -> None:
    started = time.perf_counter()
    report = verify(
        recorded.op, *recorded.args, axis_sizes=VERIFIED_SIZES, isolated=isolated, **recorded.kwargs
    )
    verdict.verify_s = time.perf_counter() - started
    even = {}
    for claim in report.claimed:
        even[claim.mesh_shape, claim.signature] = claim.even
        if len(claim.mesh_shape) > 1:
            verdict.product += 1
        elif claim.even:
            verdict.even += 1
        else:
            verdict.uneven += 1
    for entry in report.wrong:
        size = entry.mesh_shape[0] if len(entry.mesh_shape) == 1 else 0
        verdict.wrong.append(
            Finding(
                text=f"{entry.signature} on {entry.mesh_shape}",
                size=size,
                even=even[entry.mesh_shape, entry.signature],
                reason=entry.reason,
            )
        )


def _is_even(call: OpCall, entries: Sequence[Sbp], size: int) -> bool:
    return not any(extent % size for extent in _split_extents(call, entries))


def _split_extents(call: OpCall, entries: Sequence[Sbp]) -> Iterator[int]:
    for kind, entry in zip((*call.inputs, *call.outputs), entries, strict=True):
        if isinstance(entry, Split):
            yield kind.shape[entry.dim]


def _missed(
    recorded: RecordedCall, derived: Derivation, size: int, found: Sequence[Signature1d]
) -> Iterator[Finding]:
    """Yield the discovered signatures that no claim implies."""
    call, inputs = call_of(recorded.op, recorded.args, recorded.kwargs)
    claims: dict[tuple[Sbp, ...], list[tuple[Sbp, ...]]] = {}
    for claim in derive(call, size):
        claims.setdefault(claim.inputs, []).append(claim.outputs)
    unread = {
        dependence.inputs[0]
        for dependence in derived.notation.dependences
        if dependence.effect in (Effect.UNREAD, Effect.IGNORED)
    }
    ignored = {
        index
        for dependence in derived.notation.dependences
        if dependence.effect is Effect.IGNORED
        for index in dependence.inputs
    }
    redraws: list[OpSample] | None = None
    for entry in found:
        entries = (*entry.inputs, *entry.outputs)
        if any(extent < size for extent in _split_extents(call, entries)):
            continue
        if any(
            cut != B and 0 in kind.shape
            for kind, cut in zip(call.inputs, entry.inputs, strict=True)
        ):
            continue  # splitting a tensor without elements proves nothing
        if any(
            _covers(inputs, entry.inputs, unread, ignored) and _implies(outputs, entry.outputs)
            for inputs, several in claims.items()
            for outputs in several
        ):
            continue
        reason = _rejection(derived, entry)
        if not reason:
            redraws = redrawn(call, inputs) if redraws is None else redraws
            reason = accident(redraws, entry, size)
        even = _is_even(call, entries, size)
        yield Finding(text=str(entry), size=size, even=even, reason=reason)


def _covers(
    claimed: Sequence[Sbp], found: Sequence[Sbp], unread: set[int], ignored: set[int]
) -> bool:
    """Return whether claimed inputs equal the found ones, or cover them without boxing.

    A whole value is its own maximum and minimum on every rank. Partial values that are never read
    are as good as whole ones, and ignored values may be cut in any way.
    """
    return all(
        have == want
        or (want == B and have in (Partial("max"), Partial("min")))
        or (at in unread and have == B and isinstance(want, Partial))
        or at in ignored
        for at, (have, want) in enumerate(zip(claimed, found, strict=True))
    )


def _implies(claimed: Sequence[Sbp], found: Sequence[Sbp]) -> bool:
    """Return whether claimed outputs equal the found ones, or imply them without boxing.

    A whole value implies every SBP, and a split value is a partial sum with zeros elsewhere.
    """
    return all(
        have in (want, B) or (isinstance(have, Split) and want == Partial())
        for have, want in zip(claimed, found, strict=True)
    )


def redrawn(call: OpCall, inputs: Sequence[torch.Tensor]) -> list[OpSample]:
    """Return the call on other values of the same shapes, if it runs on them."""
    draw = torch.Generator().manual_seed(0)
    # In other calls, integers are often indices, and some kernels do not check them.
    integers = "pointwise" in call.tags or len(inputs) == 1
    made = []
    for number in range(_NUM_REDRAWS):
        values = [_redrawn(entry, number, draw, integers=integers) for entry in inputs]
        try:
            made.append(whole_sample(call, values, run_op))
        except Exception:  # an operator may need special values
            return made
    return made


def _redrawn(
    tensor: torch.Tensor, number: int, draw: torch.Generator, *, integers: bool
) -> torch.Tensor:
    """Return values of both signs; booleans are seldom, often, or evenly true.

    In every third draw some reals are zero, in every third draw some are NaN.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        scale = 10.0**number if number % 2 else 2.0
        values = scale * torch.randn(tensor.shape, dtype=tensor.dtype, generator=draw)
        if number % 3 and tensor.numel() > 1:
            chosen = torch.rand(tensor.shape, generator=draw) < 0.2
            chosen.view(-1)[number % tensor.numel()] = True
            values[chosen] = 0.0 if number % 3 == 1 else torch.nan
        return values
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.shape, generator=draw) < (0.5, 0.05, 0.95)[number % 3]
    if integers:
        most = min(2**40 if number % 2 else 5, torch.iinfo(tensor.dtype).max - 1)
        least = 0 if tensor.dtype == torch.uint8 else -most
        return torch.randint(least, most + 1, tensor.shape, dtype=tensor.dtype, generator=draw)
    return tensor


def accident(redraws: Sequence[OpSample], entry: Signature1d, size: int) -> str:
    """Return how a discovered signature fails on other values; empty if it does not."""
    signature, mesh = combine([entry]), Placement.grid((size,))
    for sample in redraws:
        same_everywhere = partial(_program, sample)
        if refutation(sample, signature, mesh, run_op, same_everywhere):
            return "holds for the values of this sample only"
    return ""


def _program(sample: OpSample, rank: int) -> LocalProgram:
    """Return the program of every rank if the arguments do not change on a shard."""
    return program_of_call(sample.call)


def _rejection(derived: Derivation, entry: Signature1d) -> str:
    """Return why the notation rejects a signature; empty if it gives no reason."""
    for rejected in derived.rejected:
        if rejected.inputs == entry.inputs and not rejected.reason.endswith(_GENERIC_REASON):
            return rejected.reason
    return ""


def shown(recorded: RecordedCall) -> str:
    """Return a call with shapes for tensors, such as `aten.neg.default(float32[2, 3])`."""
    named = [f"{name}={_shown(value)}" for name, value in recorded.kwargs.items()]
    return f"{recorded.op}({', '.join([*map(_shown, recorded.args), *named])})"[:240]


def _shown(argument: Any) -> str:
    if hasattr(argument, "shape"):
        return f"{str(argument.dtype).removeprefix('torch.')}{list(argument.shape)}"
    if isinstance(argument, list | tuple):
        return f"[{', '.join(map(_shown, argument))}]"
    return repr(argument)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}".splitlines()[0]
