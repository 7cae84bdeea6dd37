"""Prove that padding batches to larger sizes (`buckets`) changes neither loss nor gradients.

The step is captured for the example, and for the example with more padding. Both graphs run on the
values of the example and of the model. They usually differ because padded labels are not ignored,
because other positions attend to padding, or because the loss is a mean over all positions.

The model keeps its mode if it draws no random numbers, because these depend on the shape.
Otherwise it is put into evaluation mode, except its batch norms, whose means padding would change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import ConfigError, SbpError, SbpValueError
from sbp_core.graph import InputKind, LogicalGraph, OutputKind
from sbp_launch.planning.flow import PlanSettings, evaluating
from sbp_launch.step.buckets import BucketPadding, Padding
from sbp_launch.step.numbers import Places
from sbp_launch.step.program import OneDeviceProgram
from sbp_torch.graph_capture import NO_NUMBERS, VELOCITY, capture, flatten_batch, rebuild_batch
from sbp_torch.guards import Guard
from sbp_torch.proof import OutputDifference, PaddedStep

logger = logging.getLogger(__name__)

#: The largest number of samples of the example that are used.
_MOST_SAMPLES = 8

#: The ending of the names of gradients: SGD adds them to a momentum of zero.
_GRADIENT = f".{VELOCITY}"

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_CAUSES = (
    "usual causes: labels are padded with another number than the loss ignores (-100 of "
    "cross_entropy); the model attends to, pools or normalises over padding, for want of a mask; "
    "the loss is a mean over all positions, not over those that count"
)


def prove_padding(
    program: OneDeviceProgram,
    padding: Padding,
    settings: PlanSettings,
    given: Mapping[str, Tensor] | None,
    numbers: Places = NO_NUMBERS,
) -> None:
    """Prove that padding changes neither the loss of a batch nor its gradients.

    Args:
        program: The program; its model is unchanged afterwards.
        padding: How batches are padded, with an example. Its `lines` for the report are set here.
        settings: The precision of the captured step, and the time limit of the proof.
        given: Values of states that replace those of the program.
        numbers: Python numbers that are inputs of the captured step.

    Raises:
        ConfigError: padding changes them; names the amount.
    """
    if not isinstance(padding, BucketPadding):
        return
    names = ", ".join(map(str, padding.buckets.sizes))
    told = f"padding: to {names} at dim {padding.buckets.dim}; "
    if not settings.compile.prove:
        padding.lines = (f"{told}not proved to be neutral, because compile.prove=false",)
        return
    padding.lines = (told + _prove(program, padding, settings, given, numbers),)


def _prove(
    program: OneDeviceProgram,
    padding: BucketPadding,
    settings: PlanSettings,
    given: Mapping[str, Tensor] | None,
    numbers: Places,
) -> str:
    """Return what was proved, or why the proof was not possible.

    Raises:
        ConfigError: padding changes something.
    """
    samples = program.samples
    reason, few = "", samples.moved_back(_few_samples(samples.in_front(padding.example)))
    with _as_it_was(program):
        for short, size in _lengths(padding):
            batch = padding.resize(few, short)  # truncates it if it is longer
            try:
                step = _capture(program, batch, padding.resize(batch, size), settings, numbers)
                states = partial(_states, program, given, step.before)
                found = step.differences(states, settings.compile.prove_s)
            except SbpError as error:
                reason = reason or error.what
                continue
            _check(found, short, size)
            return f"proved: a loss and gradients of {short} positions are those of {size}"
    logger.warning("it is not proved that padding is neutral: %s", reason)
    return f"not proved to be neutral: {reason}"


def _few_samples(batch: Any) -> Any:
    few = {
        name: value[:_MOST_SAMPLES] if value.dim() else value
        for name, value in flatten_batch(batch).items()
    }
    return rebuild_batch(batch, few)


def _lengths(padding: BucketPadding) -> Iterator[tuple[int, int]]:
    """Yield pairs of a length and a larger size that may be compared, the best ones first.

    A model that accepts certain lengths only may reject the shorter lengths, so these come last.
    """
    length, sizes = padding.length, padding.buckets.sizes
    size = next(size for size in sizes if size >= length)
    if length < size:
        yield length, size
    larger = [one for one in sizes if one > size]
    if larger:
        yield size, larger[0]
    for shorter in (size - 1, size // 2):
        if shorter >= 1:
            yield shorter, size


def _capture(
    program: OneDeviceProgram, short: Any, padded: Any, settings: PlanSettings, numbers: Places
) -> PaddedStep:
    """Capture the step for a batch and for the padded batch, with SGD, which keeps gradients.

    Raises:
        SbpError: one of them cannot be captured.
    """
    trained = [one for one in program.model.parameters() if one.requires_grad]
    if not trained:
        raise SbpValueError("no parameter is trained")
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    def once(batch: Any) -> LogicalGraph:
        return capture(
            program.model,
            program.loss,
            batch,
            optimizer,
            autocast=settings.compile.autocast,
            device=settings.mesh.device,
            numbers=numbers,
        )

    before = once(short)
    if not any(entry.kind is InputKind.RNG for entry in before.inputs):
        after = once(padded)
    else:
        norms = [one for one in program.model.modules() if isinstance(one, _BATCH_NORMS)]
        trained_norms = [one for one in norms if one.training]
        with evaluating(program.model):
            for module in trained_norms:
                module.training = True  # as it was
            before, after = once(short), once(padded)
    if any(entry.kind is InputKind.RNG for entry in before.inputs):
        raise SbpValueError("the step draws random numbers in evaluation mode, too")
    return PaddedStep(
        before=before, after=after, batch=flatten_batch(short), padded=flatten_batch(padded)
    )


def _states(
    program: OneDeviceProgram, given: Mapping[str, Tensor] | None, graph: LogicalGraph
) -> Mapping[str, Tensor]:
    """Return parameters and buffers; the optimizer's states start at 0 and become gradients."""
    try:
        found = program.first_states(given)
    except SbpValueError:  # some states have no values
        found = program.own_states()
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    names = (entry.name for entry in graph.inputs if entry.kind in kinds)
    return {name: found[name] for name in names if name in found}


def _check(found: list[OutputDifference], short: int, size: int) -> None:
    """Check that padding has changed nothing; a change of a metric is only logged.

    Raises:
        ConfigError: it has changed the loss, a gradient or a buffer.
    """
    order = (OutputKind.LOSS, OutputKind.STATE, OutputKind.METRIC)

    def rank(one: OutputDifference) -> tuple[int, bool]:
        return order.index(one.kind), not one.name.endswith(_GRADIENT)

    for one in sorted(found, key=rank):
        what = f"{one.wanted:.6g} of {short} positions, {one.found:.6g} padded to {size}"
        if one.kind is OutputKind.METRIC:
            logger.warning("padding changes the metric %r: %s", one.name, what)
            continue
        if one.kind is OutputKind.LOSS:
            by = f", {abs(one.gap / one.wanted):.2g} of it" if one.wanted else ""
            subject = f"the loss: {what}{by}"
        else:
            subject = f"{one.name.removesuffix(_GRADIENT)!r}, but not the loss: {what}"
            if one.name.endswith(_GRADIENT):
                subject = f"the gradient of {subject}"
        raise ConfigError(
            f"padding changes {subject}",
            where="the argument pad_to",
            accepted="padding that changes neither loss nor gradients",
            todo=f"{_CAUSES}; compile.prove=false pads all the same",
        )


@contextmanager
def _as_it_was(program: OneDeviceProgram) -> Iterator[None]:
    """Restore values that the loss reads and changes, such as a cache that it fills."""
    guard = Guard(program.model, program.loss, program.optimizer, program.update)
    try:
        yield
    finally:
        if guard.changes():
            guard.restore()
