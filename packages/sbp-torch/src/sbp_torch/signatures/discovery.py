"""Find how an operator without a sharding rule may be sharded (its signatures), by running it.

Candidate cuts of the inputs are run on every rank with unchanged arguments, in forked workers:
shards that do not fit each other crash some kernels, and then the candidate is illegal. The results
of the ranks show the SBP of the outputs; further draws of partial pieces and of the data have to
confirm it. If an operator needs other arguments on shards, only signatures that work without this
are found.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sbp_core.errors import SbpValueError, SignatureError
from sbp_core.graph import Argument, Ref, map_refs
from sbp_core.sbp import B, Sbp
from sbp_core.signatures import OpCall, Signature1d
from sbp_core.user_paths import cache_folder
from sbp_torch.signatures.candidates import Inputs, candidates
from sbp_torch.signatures.discovery_cache import ORIGIN, Discovery, discovery_file
from sbp_torch.signatures.isolate import (
    Completed,
    Crash,
    Timeout,
    Verdict,
    iter_isolated,
    run_isolated,
)
from sbp_torch.signatures.study import Study
from sbp_torch.signatures.torch_call import Execute, describe, made_up, overload, run_op
from sbp_torch.signatures.trial import SEED

#: The SBP of the outputs of a candidate; None if it is illegal.
_Verdict = Verdict[tuple[Sbp, ...] | None]

#: Seconds that one candidate may take.
TIMEOUT_S = 20.0

#: Number of candidates that run out of time after which the search ends.
_MAX_TIMEOUTS = 3


def discover(
    op: str,
    *args: Any,
    axis_size: int = 2,
    timeout_s: float = TIMEOUT_S,
    budget: int = 4000,
    cache: bool | Path = True,
    execute: Execute | None = None,
    **kwargs: Any,
) -> Discovery:
    """Find the legal signatures of a call along one mesh axis by running it.

    The signatures are verified for the given data only: give a typical sample, without symmetries,
    small, and with extents that differ from each other.

    Args:
        op: Operator and overload, such as `mylib.myop.default`.
        *args: A real call, on the CPU.
        axis_size: Ranks along the mesh axis (>= 2).
        timeout_s: Seconds (> 0) that one candidate may take.
        budget: The greatest number of candidates to try.
        cache: Keep the result in the user's cache folder, or in the folder given here; False
            neither reads nor writes. The kernel's code is no part of the key.
        execute: Runs the operator, and disables the cache; PyTorch's own operator if omitted.
        **kwargs: Arguments of the call by name.

    Raises:
        SbpLookupError: PyTorch has no such operator.
        SignatureError: the whole call cannot be run.
        SbpValueError: a tensor is not on the CPU, or a number is out of range.
    """
    call, inputs = describe(op, args, kwargs, ())
    kept = cache if execute is None else False
    return _cached_discovery(call, inputs, axis_size, timeout_s, budget, kept, execute or run_op)


def discover_call(
    call: OpCall,
    *,
    axis_size: int = 2,
    timeout_s: float = TIMEOUT_S,
    budget: int = 4000,
    cache: bool | Path = True,
) -> Discovery:
    """Find the signatures of a call with known types, on made-up data.

    See `torch_call.made_up`: integers are 0 or 1, so that they can be indices.

    Args:
        call: The call; host scalars among its arguments cannot be made up.
        axis_size: Ranks along the mesh axis (>= 2).
        timeout_s: Seconds (> 0) that one candidate may take.
        budget: The greatest number of candidates to try.
        cache: See `discover`.

    Raises:
        SbpLookupError: PyTorch has no such operator.
        SignatureError: the call cannot be run on such data.
    """
    draw = torch.Generator().manual_seed(SEED)
    inputs = tuple(made_up(entry, draw) for entry in call.inputs)
    names = tuple(f"input{index}" for index in range(len(inputs)))
    renamed = _rename_arguments(call, names)
    return _cached_discovery(renamed, inputs, axis_size, timeout_s, budget, cache, run_op)


def _rename_arguments(call: OpCall, names: tuple[str, ...]) -> OpCall:
    """Return the call with a distinct name for each tensor argument, even for repeated tensors."""
    left = iter(names)
    tensors = set(call.tensor_names)

    def rename(ref: Ref) -> Argument:
        return Ref(next(left)) if ref.name in tensors else ref

    return replace(
        call,
        args=map_refs(call.args, rename),
        kwargs={key: map_refs(value, rename) for key, value in call.kwargs.items()},
        tensor_names=names,
    )


def _cached_discovery(
    call: OpCall,
    inputs: tuple[torch.Tensor, ...],
    axis_size: int,
    timeout_s: float,
    budget: int,
    cache: bool | Path,
    execute: Execute,
) -> Discovery:
    """Return the cached result, or find the result and cache it."""
    if axis_size < 2 or budget < 0:
        raise SbpValueError(
            f"axis_size={axis_size}, budget={budget}", accepted="axis_size >= 2, budget >= 0"
        )
    if any(tensor.device.type != "cpu" for tensor in inputs):
        raise SbpValueError(
            f"a call of {call.op} on an accelerator cannot run in a forked worker",
            accepted="tensors on the CPU",
        )
    entry = None
    if cache is not False:
        entry = discovery_file(
            cache_folder("signatures") if cache is True else cache,
            call,
            schema=str(overload(call.op)),
            torch=torch.__version__,
            axis_size=axis_size,
            budget=budget,
        )
        stored = entry.read()
        if stored is not None:
            return stored
    found = _run_study(Study(call, inputs, axis_size, execute), timeout_s, budget)
    if entry is not None:
        entry.write(found)
    return found


def _run_study(study: Study, timeout_s: float, budget: int) -> Discovery:
    """Run the whole search."""
    call = study.call
    (verdict,) = run_isolated([study.nature], timeout_s=timeout_s)
    if not isinstance(verdict, Completed):
        raise SignatureError(
            f"{call.op} cannot be run whole: it {verdict}",
            where=call.where,
            accepted="a call that runs on one device, within the time limit",
            todo="give a sample of real arguments",
        )
    nature = verdict.value
    if nature.random:
        return Discovery(signatures=(), tried=0, crashed=0, complete=True)
    whole = Signature1d(
        inputs=(B,) * len(call.inputs), outputs=(B,) * len(nature.outputs), origin=ORIGIN
    )
    if not nature.evident:
        return Discovery(signatures=(whole,), tried=0, crashed=0, complete=True)
    study = study.add_trials(nature.outputs, timeout_s)
    cuts, complete = candidates(call.inputs, study.axis_size, budget)
    verdicts = _try_candidates(study, cuts, timeout_s)
    held = [
        Signature1d(inputs=inputs, outputs=verdict.value, origin=ORIGIN)
        for inputs, verdict in zip(cuts, verdicts, strict=False)
        if isinstance(verdict, Completed) and verdict.value is not None
    ]
    return Discovery(
        signatures=(*_with_requirements(study, held, timeout_s), whole),
        tried=len(verdicts),
        crashed=sum(isinstance(verdict, Crash | Timeout) for verdict in verdicts),
        complete=complete and len(verdicts) == len(cuts),
    )


def _try_candidates(study: Study, cuts: Sequence[Inputs], timeout_s: float) -> list[_Verdict]:
    """Return the verdict on each candidate, or on the first ones if the search ends early.

    A candidate that corrupts memory may harm later ones. So candidates that succeeded, and those
    that crashed with another signal than SIGFPE, are run again in new workers.
    """
    trials = [partial(study.outputs_of, inputs) for inputs in cuts]
    verdicts: list[_Verdict] = []
    late = 0
    with closing(iter_isolated(trials, timeout_s=timeout_s)) as found:
        for verdict in found:
            verdicts.append(verdict)
            late += isinstance(verdict, Timeout)
            if late == _MAX_TIMEOUTS:
                break
    held = [at for at, one in enumerate(verdicts) if isinstance(one, Completed) and one.value]
    late_crash = [
        at
        for at, one in enumerate(verdicts)
        if isinstance(one, Crash) and one.signal is not signal.SIGFPE
    ]
    for again in (held, late_crash):
        second = run_isolated([trials[at] for at in again], timeout_s=timeout_s)
        for at, verdict in zip(again, second, strict=True):
            verdicts[at] = (
                verdict if at in late_crash or verdict == verdicts[at] else Completed(None)
            )
    return verdicts


def _with_requirements(
    study: Study, found: Sequence[Signature1d], timeout_s: float
) -> list[Signature1d]:
    """Run signatures with splits on other axis sizes, and add the requirements that they need."""
    plans = [(index, size) for index, part in enumerate(found) for size in study.sizes(part)]
    trials = [partial(study.holds, found[index], size) for index, size in plans]
    verdicts = run_isolated(trials, timeout_s=timeout_s)
    failed: dict[int, list[int]] = {}
    for (index, size), verdict in zip(plans, verdicts, strict=True):
        if not (isinstance(verdict, Completed) and verdict.value):
            failed.setdefault(index, []).append(size)
    return [
        replace(part, requires=study.requires(part, min(failed[index])))
        if index in failed
        else part
        for index, part in enumerate(found)
    ]
