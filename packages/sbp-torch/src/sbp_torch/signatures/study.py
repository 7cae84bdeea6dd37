"""`Study`: run one operator call on sharded inputs, to find how its outputs are sharded.

`discovery` uses it for operators without a rule. The methods that run the call should be called in
a forked worker; see `isolate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from sbp_core.graph import TensorType
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, Partial, S, Sbp, Split, split_bounds
from sbp_core.signatures import OpCall, Requirement, Signature1d, combine
from sbp_torch.signatures.candidates import Inputs
from sbp_torch.signatures.isolate import Completed, run_isolated
from sbp_torch.signatures.pieces import Pattern, difference, partial_kinds, reduce
from sbp_torch.signatures.torch_call import Execute, program_of_call, type_of
from sbp_torch.signatures.trial import SEED, OpSample, refutation, run_ranks, whole_sample

#: Draws of a candidate: the pattern of partial pieces, and the draw of the data (0: given data).
_DRAWS = ((Pattern.OPPOSED, 0), (Pattern.NORMAL, 1), (Pattern.OWNED, 2), (Pattern.OPPOSED, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Nature:
    """Properties of the whole call.

    Args:
        outputs: Types of its outputs.
        random: Whether it draws random numbers, or its outputs are not determined.
        evident: Whether some output has an element that is no NaN, so that it can be compared.
    """

    outputs: tuple[TensorType, ...]
    random: bool
    evident: bool


class Study:
    """One call, its data, and known facts about it.

    Args:
        call: The call; `outputs` may be missing before `described`.
        inputs: Its tensor arguments, on the CPU.
        axis_size: Ranks along the mesh axis.
        execute: Runs an operator.
    """

    def __init__(
        self, call: OpCall, inputs: Sequence[torch.Tensor], axis_size: int, execute: Execute
    ) -> None:
        self.call = call
        self.axis_size = axis_size
        self._inputs = tuple(tensor.detach() for tensor in inputs)
        self._execute = execute
        self._redrawn: frozenset[int] = frozenset()
        self._unread: frozenset[tuple[int, int]] = frozenset()
        self._samples: dict[int, OpSample] = {}

    def nature(self) -> Nature:
        """Run the whole call."""
        first = self._whole(self._inputs)
        second = self._whole(self._inputs, seed=SEED + 1)
        pairs = zip(first.outputs, second.outputs, strict=True)
        undetermined = any(map(first.undetermined, range(len(first.outputs))))
        return Nature(
            outputs=tuple(map(type_of, first.outputs)),
            random=undetermined or any(difference(b, a, relative=0.0) for a, b in pairs),
            evident=any(bool((~output.isnan()).any()) for output in first.outputs),
        )

    def add_trials(self, outputs: tuple[TensorType, ...], timeout_s: float) -> Study:
        """Return the study with facts from further runs of the whole call, made in a worker.

        These are the draws of the data that it accepts, and the inputs that each output ignores.
        """
        study = Study(
            replace(self.call, outputs=outputs), self._inputs, self.axis_size, self._execute
        )
        draws = [draw for _, draw in _DRAWS if draw]
        trials: list[Callable[[], object]] = [partial(study._takes, draw) for draw in draws]
        trials += [partial(study._unaffected_outputs, index) for index in range(len(self._inputs))]
        values = [
            verdict.value if isinstance(verdict, Completed) else ()
            for verdict in run_isolated(trials, timeout_s=timeout_s)
        ]
        study._redrawn = frozenset(
            draw for draw, taken in zip(draws, values, strict=False) if taken
        )
        study._unread = frozenset(
            (index, output)
            for index, ignored in enumerate(values[len(draws) :])
            if isinstance(ignored, tuple)
            for output in ignored
        )
        return study

    def _whole(self, inputs: Sequence[torch.Tensor], seed: int = SEED) -> OpSample:
        return whole_sample(self.call, inputs, self._execute, seed=seed)

    def _takes(self, draw: int) -> bool:
        """Whether other data of the same range gives outputs of the same types."""
        made = self._whole(_redraw(self._inputs, draw)).outputs
        given = self._whole(self._inputs).outputs
        return tuple(map(type_of, made)) == self.call.outputs and all(
            bool((new.isnan() == old.isnan()).all()) for new, old in zip(made, given, strict=True)
        )

    def _unaffected_outputs(self, index: int) -> tuple[int, ...]:
        """Return the outputs that do not change when the values of one input are replaced."""
        other = _other_values(self._inputs[index])
        if other is None:
            return ()
        made = self._whole([*self._inputs[:index], other, *self._inputs[index + 1 :]]).outputs
        given = self._whole(self._inputs).outputs
        return tuple(
            output
            for output, (new, old) in enumerate(zip(made, given, strict=True))
            if not difference(new, old, relative=0.0)
        )

    def _sample(self, draw: int) -> OpSample:
        """Return a draw of the data with its outputs, made once per worker."""
        if draw not in self._samples:
            self._samples[draw] = self._whole(_redraw(self._inputs, draw) if draw else self._inputs)
        return self._samples[draw]

    def outputs_of(self, inputs: Inputs) -> tuple[Sbp, ...] | None:
        """Return the strongest SBP of each output that every draw allows for these inputs.

        B is stronger than S, and S than P. Return None if an output has none.
        """
        mesh = Placement.grid((self.axis_size,))
        drawn = any(isinstance(entry, Partial) for entry in inputs)
        random = torch.Generator().manual_seed(SEED)
        fits = [self._all(entry) for entry in self.call.outputs]
        for at, (pattern, draw) in enumerate(_DRAWS):
            given = draw not in self._redrawn
            if at and given and not drawn:
                continue  # this draw would repeat an earlier one
            sample = self._sample(0 if given else draw)
            made = run_ranks(
                sample,
                [NdSbp(entry) for entry in inputs],
                mesh,
                self._execute,
                lambda _rank: program_of_call(self.call),
                pattern,
                random,
            )
            if isinstance(made, str):
                return None
            for output, still in enumerate(fits):
                pieces = [tensors[output] for tensors in made]
                fits[output] = [entry for entry in still if _fits(sample, output, pieces, entry)]
            if not all(fits):
                return None
        chosen = tuple(still[0] for still in fits)
        # A result may be equal by chance of the data, for example because all data is finite.
        by_chance = any(
            isinstance(before, Partial) and after == B and (index, output) not in self._unread
            for index, before in enumerate(inputs)
            for output, after in enumerate(chosen)
        )
        return None if by_chance else chosen

    @staticmethod
    def _all(entry: TensorType) -> list[Sbp]:
        """Return the possible SBPs of an output, the strongest first."""
        kinds = partial_kinds(getattr(torch, entry.dtype))
        return [B, *map(S, range(len(entry.shape))), *map(Partial, kinds)]

    def _extents(self, part: Signature1d) -> tuple[int, ...]:
        """Return the extents of all dims that a signature splits, each once."""
        pairs = zip(
            (*self.call.inputs, *self.call.outputs), (*part.inputs, *part.outputs), strict=True
        )
        found = {tensor.shape[sbp.dim] for tensor, sbp in pairs if isinstance(sbp, Split)}
        return tuple(sorted(found))

    def sizes(self, part: Signature1d) -> tuple[int, ...]:
        """Return the axis sizes to try: one for uneven shards, then one for empty shards."""
        extents = self._extents(part)
        if not extents:
            return ()
        sizes = []
        if not any(extent % self.axis_size for extent in extents):
            every = range(2, extents[-1] + 2)
            sizes.append(next(size for size in every if any(extent % size for extent in extents)))
        sizes.append(max(extents[0], self.axis_size, *sizes) + 1)
        return tuple(sizes)

    def requires(self, part: Signature1d, failed: int) -> tuple[Requirement, ...]:
        """Return the requirements of a signature that failed, at least, on this one of `sizes`."""
        index, dim = next(
            (index, entry.dim)
            for index, entry in enumerate((*part.inputs, *part.outputs))
            if isinstance(entry, Split)
        )
        sizes, extents = self.sizes(part), self._extents(part)
        even = len(sizes) == 2 and failed == sizes[0]
        return (Requirement(label=f"tensor{index}.dim{dim}", extents=extents, even=even),)

    def holds(self, part: Signature1d, axis_size: int) -> bool:
        """Whether a signature is right on another axis size."""
        return all(
            not refutation(
                self._sample(draw),
                combine([part]),
                Placement.grid((axis_size,)),
                self._execute,
                lambda _rank: program_of_call(self.call),
            )
            for draw in (0, *sorted(self._redrawn)[:1])
        )


def _fits(sample: OpSample, output: int, pieces: Sequence[torch.Tensor], entry: Sbp) -> bool:
    """Whether the pieces of one output form it under `entry`."""
    expected = sample.outputs[output]
    if any(piece.dtype != expected.dtype for piece in pieces):
        return False
    parts = [tuple(expected.shape)] * len(pieces)
    if isinstance(entry, Split):
        bounds = split_bounds(expected.shape[entry.dim], len(pieces))
        parts = [
            (*expected.shape[: entry.dim], stop - start, *expected.shape[entry.dim + 1 :])
            for start, stop in bounds
        ]
    if [tuple(piece.shape) for piece in pieces] != parts:
        return False
    relative, floor = sample.relative(output), sample.floor
    summands: Sequence[torch.Tensor] = ()
    if isinstance(entry, Split):
        joined = [torch.cat(list(pieces), entry.dim)]
    elif isinstance(entry, Partial):
        joined = [reduce(pieces, entry.reduction)]
        summands = pieces if entry.reduction == "sum" else ()
    else:
        joined = list(pieces)
    return not any(
        difference(found, expected, relative=relative, summands=summands, floor=floor)
        for found in joined
    )


def _redraw(inputs: Sequence[torch.Tensor], draw: int) -> list[torch.Tensor]:
    """Return other data: uniform reals in some range; data of other dtypes is not changed.

    The first draw has the range of the given data; later ranges are symmetric about zero. A
    constant `c` ranges from `c/2` to `3c/2`, zeros from 0 to 1. Infinities and NaN stay.
    """
    random = torch.Generator().manual_seed(draw)
    found = []
    for tensor in inputs:
        finite = tensor[tensor.isfinite()] if tensor.is_floating_point() else torch.empty(0)
        if not finite.numel():
            found.append(tensor)
            continue
        low, high = float(finite.min()), float(finite.max())
        if low == high:
            low, high = sorted((low / 2, low * 1.5)) if low else (0.0, 1.0)
        if draw > 1:
            high = max(-low, high)
            low = -high
        unit = torch.rand(tensor.shape, dtype=torch.float64, generator=random)
        other = (low + (high - low) * unit).to(tensor.dtype)
        found.append(torch.where(tensor.isfinite(), other, tensor))
    return found


def _other_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor with other values, within the range of an integer tensor.

    Return None if there are no other values.
    """
    if tensor.dtype == torch.bool:
        return ~tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, float("nan"))
    if not tensor.numel() or int(tensor.min()) == int(tensor.max()):
        return None
    return (tensor.min() + tensor.max() - tensor).to(tensor.dtype)
