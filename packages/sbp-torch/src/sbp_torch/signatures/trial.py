"""Test one way to shard an operator call: run every rank on its shards, and compare the results.

`verification` and `study` use it. A way to shard a call is a signature. The whole call is the
oracle. Kernels that get shards which do not fit each other may corrupt memory: run trials of
signatures that are not known to be legal through `isolate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Partial, Sbp, Split, local_shape
from sbp_core.signatures import LocalProgram, OpCall
from sbp_core.strategy import Signature
from sbp_torch.signatures.pieces import (
    Pattern,
    cut,
    difference,
    magnitude,
    partial_kinds,
    reduce,
    tolerance,
)
from sbp_torch.signatures.torch_call import Execute, program_of_call, run_program, type_of

#: Returns the program of a rank.
ProgramOf = Callable[[int], LocalProgram]

#: Every rank and the whole call draw random numbers from this seed.
SEED = 20231

#: Operators with uninitialized outputs: only their shapes and dtypes are compared.
_UNDETERMINED = frozenset(
    f"aten.{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize",
    )
)

#: Single outputs that are partly uninitialized: the table of a sum over paths has unused corners.
_UNDETERMINED_OUTPUTS = {"aten._ctc_loss": (1,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSample:
    """A call with its data.

    Args:
        call: The call.
        inputs: Its tensor arguments, in argument order.
        outputs: The outputs of the whole call.
    """

    call: OpCall
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    def relative(self, output: int) -> float:
        """Return the relative tolerance for one output."""
        return tolerance([self.outputs[output].dtype, *(entry.dtype for entry in self.inputs)])

    @property
    def floor(self) -> float:
        """The magnitude of the inputs, at most 1: cancellation may make results smaller."""
        found = [magnitude(entry) for entry in self.inputs if entry.is_floating_point()]
        return min(1.0, max(found, default=1.0))

    def undetermined(self, output: int) -> bool:
        """Whether the values of an output are undefined."""
        op = self.call.op.rpartition(".")[0]
        return op in _UNDETERMINED or output in _UNDETERMINED_OUTPUTS.get(op, ())


def set_seed(seed: int, tensors: Sequence[torch.Tensor]) -> None:
    """Seed the random numbers of the devices that hold these tensors, and of the CPU."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        torch.manual_seed(seed)
    else:  # avoids the stack trace that seeding a lazy accelerator stores
        torch.default_generator.manual_seed(seed)


def whole_sample(
    call: OpCall, inputs: Sequence[torch.Tensor], execute: Execute, *, seed: int = SEED
) -> OpSample:
    """Run a call on given tensors, which are not changed, and return it with its outputs."""
    copies = [entry.detach().clone() for entry in inputs]
    set_seed(seed, inputs)
    made = run_program(
        program_of_call(call), dict(zip(call.tensor_names, copies, strict=True)), execute
    )
    return OpSample(call=call, inputs=tuple(inputs), outputs=made)


def refutation(
    sample: OpSample,
    signature: Signature,
    mesh: Placement,
    execute: Execute,
    program: ProgramOf,
    *,
    seed: int = 0,
) -> str:
    """Return how the joined results of ranks differ from the whole call; empty if they agree.

    Args:
        sample: The call and its data.
        signature: How it is cut.
        mesh: The simulated ranks.
        execute: Runs an operator.
        program: Returns the program of a rank.
        seed: Seed of partial pieces, which are drawn by every `Pattern`.
    """
    draw = torch.Generator().manual_seed(seed)
    drawn = any(sbp.has_partial for sbp in signature.inputs)
    for pattern in Pattern if drawn else (Pattern.NORMAL,):
        made = run_ranks(sample, signature.inputs, mesh, execute, program, pattern, draw)
        if isinstance(made, str):
            return made
        for output, sbp in enumerate(signature.outputs):
            reason = _compare(sample, output, [tensors[output] for tensors in made], sbp, mesh)
            if reason:
                return f"output {output}: {reason}"
    return ""


def run_ranks(
    sample: OpSample,
    inputs: Sequence[NdSbp],
    mesh: Placement,
    execute: Execute,
    program: ProgramOf,
    pattern: Pattern,
    draw: torch.Generator,
) -> list[tuple[torch.Tensor, ...]] | str:
    """Cut the inputs, run every rank, and return the outputs of each, in mesh order.

    Return a text instead if a rank fails, or has another number of outputs than the whole call.
    """
    shards = [
        cut(tensor, sbp, mesh.mesh_shape, pattern, draw)
        for tensor, sbp in zip(sample.inputs, inputs, strict=True)
    ]
    made = []
    for index, rank in enumerate(mesh.rank_list):
        pieces = [tensor_pieces[index] for tensor_pieces in shards]
        set_seed(SEED, pieces)
        try:
            by_name = dict(zip(sample.call.tensor_names, pieces, strict=True))
            outputs = run_program(program(rank), by_name, execute)
        except Exception as error:  # any error of a kernel means that its shards do not fit
            lines = str(error).splitlines() or [type(error).__name__]
            return f"rank {rank} fails: {lines[0]}"
        if len(outputs) != len(sample.outputs):
            return f"rank {rank} makes {len(outputs)} outputs instead of {len(sample.outputs)}"
        made.append(outputs)
    return made


def _compare(
    sample: OpSample, output: int, pieces: Sequence[torch.Tensor], sbp: NdSbp, mesh: Placement
) -> str:
    """Join the pieces of one output, last mesh axis first, and compare."""
    expected = sample.outputs[output]
    relative, floor = sample.relative(output), sample.floor
    for (rank, coordinate), piece in zip(mesh.coordinates(), pieces, strict=True):
        shape = local_shape(expected.shape, sbp, mesh.mesh_shape, coordinate)
        if tuple(piece.shape) != shape or piece.dtype != expected.dtype:
            return f"rank {rank} has {type_of(piece)} instead of {expected.dtype} {list(shape)}"
    if sample.undetermined(output):
        return ""
    joined = list(pieces)
    # Partial values, and their rounding errors, may be much larger than their sum.
    summed = list(pieces) if Partial("sum") in sbp else []
    for size, entry in reversed(list(zip(mesh.mesh_shape, sbp, strict=True))):
        groups = _groups(joined, size)
        behind = [group[:1] for group in _groups(summed, size)] or [[] for _ in groups]
        if isinstance(entry, Split):
            joined = [torch.cat(group, entry.dim) for group in groups]
        elif isinstance(entry, Partial):
            if entry.reduction not in partial_kinds(expected.dtype):
                return f"{expected.dtype} has no {entry}"
            joined = [reduce(group, entry.reduction) for group in groups]
        else:
            for (first, *others), lost in zip(groups, behind, strict=True):
                if any(
                    difference(other, first, relative=relative, summands=lost, floor=floor)
                    for other in others
                ):
                    return "ranks that should hold the same value differ"
            joined = [group[0] for group in groups]
        summed = [_behind(group, entry) for group in _groups(summed, size)]
    return difference(joined[0], expected, relative=relative, summands=summed, floor=floor)


def _groups(pieces: list[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    return [pieces[at : at + size] for at in range(0, len(pieces), size)]


def _behind(group: list[torch.Tensor], entry: Sbp) -> torch.Tensor:
    """Return the summed magnitudes of the partial values in a piece that is joined from `group`."""
    if isinstance(entry, Split):
        return torch.cat(group, entry.dim)
    if isinstance(entry, Partial):
        return reduce([part.abs() for part in group], "sum")
    return group[0]
