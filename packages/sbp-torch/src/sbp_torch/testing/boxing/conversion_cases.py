"""`BoxingCase`: one conversion of a tensor between layouts, for the boxing conformance suite.

It is done by a route (list of communication steps) or by one step. `families` lists the cases;
`values` makes their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbp_core.boxing import BoxingStep, Route, StepKind, collective_bytes, route, transfer_bytes
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp

#: A tensor's placement and nd-SBP.
State = tuple[Placement, NdSbp]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxingCase:
    """One conversion to test.

    Args:
        shape, dtype: Shape and dtype of the logical tensor.
        source, target: (placement, nd-SBP) before and after.
        kind: Kind of the single step; None to let the router choose the steps.
        axes: The mesh axes of the single step.
    """

    shape: tuple[int, ...]
    dtype: str
    source: State
    target: State
    kind: StepKind | None = None
    axes: tuple[int, ...] = ()

    @property
    def route(self) -> Route:
        """The steps that the backend has to run."""
        if self.kind is None:
            return route(self.shape, self.dtype, self.source, self.target)
        return Route(
            shape=self.shape,
            dtype=self.dtype,
            source=self.source,
            target=self.target,
            steps=(hand_made_step(self, self.kind),),
        )

    def __str__(self) -> str:
        places = f"{self.source[0].ranks} to {self.target[0].ranks}"
        return f"{self.dtype}{list(self.shape)}, {places}:\n{self.route}"


def hand_made_step(case: BoxingCase, kind: StepKind) -> BoxingStep:
    """Return the step of a kind that converts a case from its source to its target."""
    step = BoxingStep(
        kind=kind,
        shape=case.shape,
        dtype=case.dtype,
        source=case.source,
        target=case.target,
        axes=case.axes,
        size_bytes=0,
    )
    count = transfer_bytes if kind is StepKind.TRANSFER else collective_bytes
    return replace(step, size_bytes=count(step))
