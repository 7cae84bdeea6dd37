"""Record segments as CUDA graphs, and replay them: `compile=cudagraph`.

A segment (operators without communication in between) runs operator by operator at first, because
libraries allocate workspaces and choose kernels then. Its third firing (execution) is recorded, and
from then on replayed with one launch:

    firing       1, 2                    3                          4, 5, ...
    input        as it comes             copied into static ones    copied into static ones
    work         operators, side stream  recorded, replayed         replayed
    output       as it is made           copied out                 copied out

Because inputs and outputs are copied, the plan may use any addresses: registers that hold several
values, states that outlive the step. A recording is valid for its input shapes; each new
combination of shapes is recorded separately.

A number that changes from step to step cannot be recorded, so segments whose operators take such a
number (mostly the optimizer's) run operator by operator, as do segments that read a number from a
tensor. Random numbers are drawn before a segment (`segments.host_parts`). Only `CudaGraphDevice`
uses the GPU, so that the rest can be tested without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sbp_core.boxing import BoxingStep
from sbp_core.compile import Compute
from sbp_core.errors import ConfigError, RunError, words_of
from sbp_torch.segments.codegen import segment_function
from sbp_torch.segments.host_parts import PartedSegment, SegmentParts, tensor_keys

logger = logging.getLogger(__name__)

#: Number of firings before the recorded one.
WARM_UP = 2

Work = Callable[[], list[Tensor]]


class CudaGraphDevice:
    """The GPU that is current when a segment fires; needs PyTorch with CUDA.

    The recordings of a rank share their memory, because they are replayed one at a time, and their
    results are copied out before the next replay.

    Attributes:
        kind: Device type of the tensors whose work can be recorded.
    """

    kind = "cuda"

    def __init__(self) -> None:
        self._pools: dict[int, Any] = {}

    def problem(self) -> str:
        """Return why this machine cannot record CUDA graphs; empty if it can."""
        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA"
        return "" if torch.cuda.is_available() else "torch sees no GPU"

    def aside(self, work: Work) -> list[Tensor]:
        """Run work on a new stream, after earlier and before later work of the current stream."""
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch leaves it untyped
        side.wait_stream(current)
        with torch.cuda.stream(side):
            made = work()
        current.wait_stream(side)
        for tensor in made:
            # Made on the new stream, used on the current one: keep its memory until then.
            tensor.record_stream(current)
        return made

    def record(self, rank: int, work: Work) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        """Record work of a rank without running it; return the recording and its output tensors.

        Only this thread is in capture mode: other ranks of the process may continue.
        """
        graph = torch.cuda.CUDAGraph()
        if rank not in self._pools:
            self._pools[rank] = torch.cuda.graph_pool_handle()
        pool = self._pools[rank]
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            made = work()
        return graph, made


class GraphSegments:
    """Creates segments that are recorded and replayed.

    Raises:
        ConfigError: this machine cannot record CUDA graphs.
    """

    def __init__(self, device: CudaGraphDevice | None = None) -> None:
        self.device = CudaGraphDevice() if device is None else device
        if problem := self.device.problem():
            raise ConfigError(
                f"compile=cudagraph needs a GPU: {problem}",
                accepted="compile=eager, compile=inductor",
            )

    def __call__(self, actor: Compute, rank: int, steps: Sequence[BoxingStep], /) -> _Segment:
        """See `SegmentMaker`."""
        return _Segment(self.device, actor, rank, steps)


class _Segment(PartedSegment):
    """The function of one segment on one rank."""

    def __init__(
        self, device: CudaGraphDevice, actor: Compute, rank: int, steps: Sequence[BoxingStep]
    ) -> None:
        super().__init__(actor, rank, steps)
        self._device = device
        self._eager = segment_function(actor, rank, steps, owns=True)
        #: Whether the segment is never recorded; None before the first call.
        self._stays_eager: bool | None = None
        self._tapes: dict[Any, _Tape] = {}

    def __call__(self, values: list[Any], /) -> tuple[Any, ...]:
        """See `OwningSegment`."""
        if self._stays_eager is None:
            obstacle = _obstacle(self.parts(values), values, self._device.kind)
            self._stays_eager = bool(obstacle)
            if obstacle:
                logger.info("segment %s is not recorded: %s", self._of[0].name, obstacle)
        return self._eager(values) if self._stays_eager else super().__call__(values)

    def run_tensor(self, segment: SegmentParts, given: list[Any]) -> Sequence[Any]:
        """See `PartedSegment`."""
        kinds = tuple((value.shape, value.stride(), value.dtype, value.device) for value in given)
        return self._tapes.setdefault(kinds, _Tape(self._device, segment)).run(given)


def _obstacle(segment: SegmentParts, values: Sequence[Any], kind: str) -> str:
    """Return why a segment cannot be recorded; empty if it can."""
    for value in values:
        if isinstance(value, Tensor) and value.device.type != kind:
            return f"it takes a tensor on device {value.device}"
    if not segment.tensor:
        return "it holds no operator on tensors"
    tensors = {*tensor_keys(segment.segment_inputs, values)}
    for entry in segment.before:
        if entry.op.startswith("sbp."):
            tensors.update(entry.outputs)
    numbers = [key for key in segment.tensor_inputs if key not in tensors]
    if numbers:
        return f"its operators take the number {numbers[0]!r}"
    reading = next((entry for entry in segment.tensor if entry.op.startswith("host.")), None)
    return f"it computes the number {reading.outputs[0]!r}" if reading is not None else ""


class _Tape:
    """The recording of a segment for inputs of some shapes and strides."""

    def __init__(self, device: CudaGraphDevice, segment: SegmentParts) -> None:
        self._device, self._segment = device, segment
        self._firings = 0
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._recording: torch.cuda.CUDAGraph | None = None

    def run(self, given: list[Tensor]) -> list[Tensor]:
        """Return the outputs of the tensor part for its inputs; `given` is emptied on replay.

        Raises:
            RunError: the segment cannot be recorded.
        """
        self._firings += 1
        if self._firings <= WARM_UP:
            return self._device.aside(lambda: self._segment.run_tensor(given))
        is_new = self._recording is None
        if is_new:
            self._inputs = [torch.empty_like(tensor) for tensor in given]
        for static, value in zip(self._inputs, given, strict=True):
            static.copy_(value)
        given.clear()
        if is_new:
            self._record()
        assert self._recording is not None, "recorded above"
        self._recording.replay()
        return [static.clone() for static in self._outputs]

    def _record(self) -> None:
        try:
            self._recording, self._outputs = self._device.record(
                self._segment.rank, lambda: self._segment.run_tensor(self._inputs)
            )
        except Exception as error:
            raise RunError(
                f"segment {self._segment.actor.name!r} cannot be recorded as a CUDA graph: "
                f"{words_of(error)}",
                where=f"rank {self._segment.rank}",
                todo="compile=eager or compile=inductor",
            ) from error
