"""One program, run through `parallelize` and by plain PyTorch on the whole batch, compared."""

from __future__ import annotations

import linecache
import re
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from random_programs.program import Program
from sbp_core.errors import RunError, SbpError
from sbp_launch import parallelize

STEPS, TOLERANCE = 2, 1e-9

#: The file name of a program in error messages.
_FILE = "/programs/program.py"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a program.

    Args:
        kind: `equal`; `refused`, by an `SbpError`; `WRONG`; `crash`, by another error; `unstable`,
            if plain PyTorch gives other numbers when its values change in the last digits; or
            `invalid`, if plain PyTorch cannot run it.
        message: The differences, or the error.
        time_s: Processor seconds.
    """

    kind: str
    message: str = ""
    time_s: float = 0.0

    @property
    def reason(self) -> str:
        """The first line of the message, without the names and numbers of this program."""
        line = self.message.split("\n")[0]
        return re.sub(r"'[^']*'|\d[\d.e+-]*", "…", line)[:150]

    @property
    def failed(self) -> bool:
        """Whether the outcome is a fault of the system for any program."""
        return self.kind in ("WRONG", "crash")


def attempt(program: Program) -> Outcome:
    """Run a program and compare it; an exception becomes the outcome."""
    began = time.process_time()
    with quiet():
        try:
            made = compare(executed(program.source))
        except Exception:
            made = Outcome(kind="invalid", message=traceback.format_exc(limit=-3))
    return Outcome(kind=made.kind, message=made.message, time_s=time.process_time() - began)


def executed(source: str) -> dict[str, Any]:
    """Return the names that a source defines; errors show its lines."""
    lines = source.splitlines(keepends=True)
    linecache.cache[_FILE] = (len(source), None, lines, _FILE)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, _FILE, "exec"), names)
    return names


def compare(names: Mapping[str, Any]) -> Outcome:
    """Compare a program, by the names that its source defines."""
    wanted = plain_steps(names)
    if not all(value.isfinite() for name, value in wanted.items() if name.startswith("loss of")):
        # Nobody continues training after this, and kernels treat NaN differently.
        wanted = {name: value for name, value in wanted.items() if name.startswith("loss of")}
    try:
        found = _parallel_steps(names)
    except SbpError as error:
        if not isinstance(error, RunError):
            return Outcome(kind="refused", message=str(error))
        return Outcome(kind="crash", message=f"RunError: {error}")
    except Exception as error:
        told = traceback.format_exc(limit=-3)
        return Outcome(kind="crash", message=f"{type(error).__name__}: {error}\n{told}")
    if not (differing := differences(found, wanted)):
        return Outcome(kind="equal")
    moved = plain_steps(names, moved_by=1e-14)
    kind = "unstable" if differences(moved, wanted, TOLERANCE / 100) else "WRONG"
    return Outcome(kind=kind, message="\n".join(differing))


def plain_steps(names: Mapping[str, Any], moved_by: float = 0.0) -> dict[str, Tensor]:
    """Return all numbers of the steps of plain PyTorch on the whole batch.

    Args:
        names: The names of the program.
        moved_by: Relative change of parameters before the steps.
    """
    model = names["make_model"]()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(1 + moved_by * (-1) ** number)
    optimizer, clip = names["make_optimizer"](model), names["SETTINGS"]["update"]["clip_norm"]
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        made = names["loss"](model, names["make_batch"](step))
        loss, metrics = made if isinstance(made, tuple) else (made, {})
        metrics = {n: torch.as_tensor(value).detach().clone() for n, value in metrics.items()}
        loss.backward()
        if clip is not None:
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found |= _told(step, loss.detach().clone(), metrics)
    return found | _states(model, optimizer)


def _parallel_steps(names: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the same numbers of `parallelize`."""
    model = names["make_model"]()
    optimizer = names["make_optimizer"](model)
    found: dict[str, Tensor] = {}
    given = (model, names["loss"], names["make_batch"](0), optimizer)
    with parallelize(*given, **names["SETTINGS"]) as parallel:
        for step in range(STEPS):
            out = parallel(names["make_batch"](step))
            found |= _told(step, out.loss.detach().clone(), out.metrics)
        parallel.copy_to(model, optimizer)
    return found | _states(model, optimizer)


def _told(step: int, loss: Tensor, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    told = {f"{name} of step {step}": torch.as_tensor(value) for name, value in metrics.items()}
    return {f"loss of step {step}": loss, **told}


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found[f"{name}.{key}"] = torch.as_tensor(value).detach().clone()
    return found


def differences(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> list[str]:
    """Return the differences, one line each."""
    lines = []
    for name, value in wanted.items():
        if name not in found:
            lines.append(f"{name} is missing")
            continue
        other = found[name].double()
        if other.shape != value.shape:
            lines.append(f"{name} has shape {tuple(other.shape)}, not {tuple(value.shape)}")
        elif not torch.allclose(other, value.double(), tolerance, tolerance, equal_nan=True):
            off = (other - value).abs().max().item()
            shown = f" ({other:.9g} instead of {value:.9g})" if value.dim() == 0 else ""
            lines.append(f"{name} is off by {off:.3g}{shown}")
    return lines


@contextmanager
def quiet() -> Iterator[None]:
    """Restore global settings after programs, and suppress warnings of PyTorch."""
    dtype = torch.get_default_dtype()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
