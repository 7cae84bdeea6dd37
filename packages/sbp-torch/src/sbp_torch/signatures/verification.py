"""`verify`: execute each signature (way to shard) that sharding rules claim for an operator call.

`trial` runs one signature. Only signatures that the rules claim are run, in forked workers: kernels
that get shards which do not fit each other may corrupt memory, and a crash is a verdict.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from sbp_core.errors import SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import local_shape
from sbp_core.signatures import (
    OpCall,
    RuleRegistry,
    combine,
    derive,
    enumerate_signatures,
    localize,
)
from sbp_core.strategy import Signature
from sbp_torch.signatures.isolate import Completed, run_isolated
from sbp_torch.signatures.torch_call import (
    Execute,
    abstract_call,
    call_of,
    describe,
    overload,
    random_arguments,
    run_op,
    tags_of,
    tensors_of,
)
from sbp_torch.signatures.trial import SEED, OpSample, refutation, set_seed

__all__ = [
    "Claim",
    "Execute",
    "Refutation",
    "VerifyReport",
    "abstract_call",
    "call_of",
    "overload",
    "random_arguments",
    "run_op",
    "tags_of",
    "verify",
]

#: How many signatures of a 2-D mesh are tried, from how many candidates.
_NUM_PRODUCTS = 12
_NUM_CONSIDERED = 240

#: Seconds that all ranks of one signature may take.
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A signature that the rules claim, and that was run.

    Args:
        mesh_shape: Extent of each mesh axis.
        signature: The signature, with one entry for each mesh axis.
        even: Whether, for every tensor, all ranks hold shards of equal shape.
        empty: Whether some rank holds an empty shard of a tensor that is not empty.
    """

    mesh_shape: tuple[int, ...]
    signature: Signature
    even: bool
    empty: bool

    @classmethod
    def of(cls, call: OpCall, signature: Signature, mesh_shape: tuple[int, ...]) -> Claim:
        """Return the claim, with the properties of its shards."""
        grid = [coordinate for _, coordinate in Placement.grid(mesh_shape).coordinates()]
        even, empty = True, False
        for entry, sbp in zip(
            (*call.inputs, *call.outputs), (*signature.inputs, *signature.outputs), strict=True
        ):
            shapes = {local_shape(entry.shape, sbp, mesh_shape, at) for at in grid}
            even = even and len(shapes) == 1
            empty = empty or (0 not in entry.shape and any(0 in shape for shape in shapes))
        return cls(mesh_shape=mesh_shape, signature=signature, even=even, empty=empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refutation:
    """A claimed signature that execution refutes."""

    signature: Signature
    mesh_shape: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.signature} on mesh {self.mesh_shape}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The results of running the signatures of one call.

    Args:
        op: The operator.
        claimed: Every signature that was run.
        wrong: The refuted signatures.
    """

    op: str
    claimed: tuple[Claim, ...]
    wrong: tuple[Refutation, ...]

    @property
    def ok(self) -> bool:
        """Whether at least one signature was claimed, and none was refuted."""
        return bool(self.claimed) and not self.wrong

    def __str__(self) -> str:
        head = f"{self.op}: {len(self.claimed)} signatures run, {len(self.wrong)} wrong"
        return "\n  ".join([head, *map(str, self.wrong)])


def verify(
    op: str,
    *args: Any,
    axis_sizes: Sequence[int] = (2, 3),
    rules: RuleRegistry | None = None,
    execute: Execute | None = None,
    isolated: bool = True,
    timeout_s: float = TIMEOUT_S,
    **kwargs: Any,
) -> VerifyReport:
    """Run every signature of a call on every axis size, and a sample of signatures on 2-D meshes.

    Args:
        op: Operator and overload, such as `aten.mm.default` or a custom operator.
        *args: A real call: tensors of any dtype (float64 for a tight comparison).
        axis_sizes: Sizes of the mesh axis. Sizes that divide no extent, or exceed one, test uneven
            and empty shards.
        rules: The rules to verify; the built-in ones if omitted.
        execute: Runs the operator; PyTorch's own if omitted.
        isolated: Run in forked workers, so that a crash or a hang is a verdict. Needs tensors on
            the CPU.
        timeout_s: Seconds (> 0) that one signature may take; isolated only.
        **kwargs: Arguments of the call by name.

    Raises:
        SignatureError: the operator has no rule.
        SbpLookupError: PyTorch has no such operator.
        SbpValueError: isolation is requested, but this system does not support it.
    """
    run = execute or run_op
    with torch.random.fork_rng(devices=[]):
        sample = _sample(op, args, kwargs, run)
        call = sample.call
        if isolated and any(tensor.device.type != "cpu" for tensor in sample.inputs):
            raise SbpValueError(
                f"a call of {op} on an accelerator cannot run in a forked worker",
                accepted="tensors on the CPU",
                todo="move them there, or say isolated=False",
            )
        claims: list[Claim] = []
        for size in axis_sizes:
            claims += [
                Claim.of(call, combine([part]), (size,)) for part in derive(call, size, rules=rules)
            ]
        claims += _products(call, (axis_sizes[0], axis_sizes[-1]), rules)
        trials = [partial(_reason, sample, claim, rules, run) for claim in claims]
        reasons = _reasons(trials, timeout_s) if isolated else [trial() for trial in trials]
    wrong = tuple(
        Refutation(signature=claim.signature, mesh_shape=claim.mesh_shape, reason=reason)
        for claim, reason in zip(claims, reasons, strict=True)
        if reason
    )
    return VerifyReport(op=op, claimed=tuple(claims), wrong=wrong)


def _sample(op: str, args: Sequence[Any], kwargs: dict[str, Any], run: Execute) -> OpSample:
    """Run the whole call on copies of its tensors."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return [copied(part) for part in value] if isinstance(value, list | tuple) else value

    set_seed(SEED, describe(op, args, kwargs, ())[1])
    made = tensors_of(
        run(op, list(map(copied, args)), {key: copied(value) for key, value in kwargs.items()})
    )
    call, tensors = describe(op, args, kwargs, made)
    return OpSample(call=call, inputs=tensors, outputs=made)


def _reason(sample: OpSample, claim: Claim, rules: RuleRegistry | None, run: Execute) -> str:
    """Run one signature; return why it is wrong, or an empty text."""
    mesh = Placement.grid(claim.mesh_shape)
    program = partial(localize, sample.call, claim.signature, mesh, rules=rules)
    return refutation(sample, claim.signature, mesh, run, program)


def _reasons(trials: Sequence[Callable[[], str]], timeout_s: float) -> Iterator[str]:
    """Run trials in forked workers; yield for each why it is wrong, or an empty text."""
    for verdict in run_isolated(trials, timeout_s=timeout_s):
        yield verdict.value if isinstance(verdict, Completed) else f"a rank run {verdict}"


def _products(call: OpCall, mesh_shape: tuple[int, int], rules: RuleRegistry | None) -> list[Claim]:
    """Return a repeatable sample of the signatures on a 2-D mesh, with every kind of shards."""
    found = list(islice(enumerate_signatures(call, mesh_shape, rules=rules), 1 << 16))
    considered = random.Random(0).sample(found, min(_NUM_CONSIDERED, len(found)))
    sorts: dict[tuple[bool, bool], list[Claim]] = {}
    for signature in considered:
        claim = Claim.of(call, signature, mesh_shape)
        sorts.setdefault((claim.even, claim.empty), []).append(claim)
    chosen: list[Claim] = []
    while sorts and len(chosen) < _NUM_PRODUCTS:
        for key in list(sorts)[: _NUM_PRODUCTS - len(chosen)]:
            chosen.append(sorts[key].pop())
            if not sorts[key]:
                del sorts[key]
    return chosen
