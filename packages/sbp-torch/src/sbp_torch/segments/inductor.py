"""Compile segments (operators without communication in between) with Inductor: `compile=inductor`.

The tensor part of a segment (`segments.host_parts`) is traced once to an FX graph, with the shapes
and strides of its first execution, and compiled by Inductor. Numbers that change from step to step
are passed as 0-d tensors, so that no later step recompiles. Segments that compute the same on equal
shapes, such as the layers of a model and the ranks of a mesh, are compiled once in a session.

Inductor fuses operators, so results are rounded differently. It allocates memory itself, so the
plan does not predict the peak inside a segment. Compilation happens in the first step, one segment
at a time, and may take minutes: other ranks wait for it (`first_deadline_s`).
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sbp_core.boxing import BoxingStep
from sbp_core.compile import Compute
from sbp_core.errors import ConfigError, RunError, words_of
from sbp_torch._torch_compat import compile_graph, cpp_compiler_problem, fake_mode, trace_graph
from sbp_torch.segments.host_parts import PartedSegment, SegmentParts

logger = logging.getLogger(__name__)

#: A function compiled by Inductor: tensors -> tensors.
Compiled = Callable[..., Sequence[Any]]

_DTYPES = {float: torch.float64, int: torch.int64}


class InductorSegments:
    """Creates compiled segments; equal segments are compiled once.

    Args:
        fallback: Whether to run a segment that cannot be compiled operator by operator, with a
            warning, instead of failing.
        compiler: Turns an FX graph and example inputs into a function; Inductor, except in tests.

    Raises:
        ConfigError: there is no C++ compiler.
    """

    def __init__(
        self,
        *,
        fallback: bool = False,
        compiler: Callable[[torch.fx.GraphModule, Sequence[Tensor]], Compiled] = compile_graph,
    ) -> None:
        if problem := cpp_compiler_problem():
            raise ConfigError(
                f"compile=inductor needs a C++ compiler: {problem}",
                accepted="compile=eager",
                todo="install g++ or clang++, or name one in CXX",
            )
        self.fallback, self.compiler = fallback, compiler
        self.num_compiled = 0
        self._done: dict[Any, Compiled] = {}
        self._one_at_a_time = threading.Lock()

    def __call__(self, actor: Compute, rank: int, steps: Sequence[BoxingStep], /) -> _Segment:
        """See `SegmentMaker`; the segment is compiled at its first call."""
        return _Segment(self, actor, rank, steps)

    def compile(self, segment: SegmentParts, given: Sequence[Tensor], kinds: Any) -> Compiled:
        """Return the compiled tensor part of a segment; equal segments share it.

        Raises:
            RunError: it cannot be compiled.
        """
        key = (segment.identity, kinds)
        with self._one_at_a_time:
            if key not in self._done:
                self._done[key] = self._compile(segment, given, kinds)
            return self._done[key]

    def _compile(self, segment: SegmentParts, given: Sequence[Tensor], kinds: Any) -> Compiled:
        began = time.perf_counter()
        try:
            # Trace on fake tensors, also for the numbers.
            mode = fake_mode()
            fakes = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in given]
            traced = trace_graph(
                lambda *tensors: segment.run_tensor(_with_numbers(tensors, kinds)), mode, fakes
            )
            made = self.compiler(traced, given)
        except Exception as error:
            # Only the first lines, because Inductor's messages take pages.
            told = "\n".join(words_of(error).strip().splitlines()[:3])
            what = f"Inductor cannot compile segment {segment.actor.name!r}: {told}"
            if not self.fallback:
                raise RunError(
                    what,
                    where=f"rank {segment.rank}, {len(segment.tensor)} operators of "
                    f"{segment.tensor[0].node!r} to {segment.tensor[-1].node!r}",
                    todo="compile=eager, or compile_fallback=true to run such segments so",
                ) from error
            warnings.warn(f"{what}; it runs operator by operator", stacklevel=2)
            return lambda *given: segment.run_tensor(_with_numbers(given, kinds))
        self.num_compiled += 1
        logger.info("compiled %s in %.1f s", segment.actor.name, time.perf_counter() - began)
        return made


class _Segment(PartedSegment):
    """The function of one segment on one rank."""

    def __init__(
        self, maker: InductorSegments, actor: Compute, rank: int, steps: Sequence[BoxingStep]
    ) -> None:
        super().__init__(actor, rank, steps)
        self._maker = maker
        #: Shapes and strides of the inputs -> compiled function.
        self._compiled: dict[Any, Compiled] = {}

    def run_tensor(self, segment: SegmentParts, given: list[Any]) -> Sequence[Any]:
        """See `PartedSegment`."""
        kinds = tuple(map(_kind, given))
        tensors = [
            one if isinstance(one, Tensor) else torch.tensor(one, dtype=_DTYPES.get(type(one)))
            for one in given
        ]
        given.clear()
        if kinds not in self._compiled:
            self._compiled[kinds] = self._maker.compile(segment, tensors, kinds)
        return self._compiled[kinds](*tensors)


def _kind(value: Any) -> Any:
    """Return the key of specialised code: shape, strides, dtype and device; or type of a number."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.device)
    return value if isinstance(value, bool) else type(value)


def _with_numbers(tensors: Sequence[Tensor], kinds: Any) -> list[Any]:
    return [
        tensor if isinstance(kind, tuple) else kind if isinstance(kind, bool) else tensor.item()
        for tensor, kind in zip(tensors, kinds, strict=True)
    ]
