"""The file of recorded calls: a zip archive with an entry per operator, and an index of variants.

So the calls of a few operators can be read alone.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import pickle
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from signatures.calls import RecordedCall, Recording, Use, record
from signatures.variants import variants

_INDEX = "index.json"


def collect(
    names: Sequence[str],
    *,
    samples: int,
    dtypes: Sequence[torch.dtype],
    jobs: int,
    advanced: Callable[[str, int, int], None],
) -> Recording:
    """Record the calls of the named variants, or of all if none are named, in `jobs` processes.

    Args:
        names: Names of variants.
        samples: Number of samples of each variant in its first dtype.
        dtypes: The wanted dtypes.
        jobs: Number of processes.
        advanced: Called with (name, variants done, variants in total).
    """
    chosen = [entry.name for entry in variants() if not names or entry.name in names]
    made = Recording()
    # Forked, so that the operator database is loaded once.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        jobs, context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        tasks = {pool.submit(_packed, name, samples, dtypes): name for name in chosen}
        for done, task in enumerate(as_completed(tasks)):
            made.update(torch.load(io.BytesIO(task.result()), weights_only=False))
            advanced(tasks[task], done + 1, len(chosen))
    return made


def _packed(name: str, samples: int, dtypes: Sequence[torch.dtype]) -> bytes:
    """Return the recorded calls of a variant, pickled."""
    (variant,) = (entry for entry in variants() if entry.name == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _pickled(record(variant, samples, dtypes))


def _pickled(value: Any) -> bytes:
    packed = io.BytesIO()
    torch.save(value, packed, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return packed.getvalue()


def save(recording: Recording, file: Path) -> None:
    """Write recorded calls to a file."""
    by_op: dict[str, list[tuple[RecordedCall, list[Use]]]] = defaultdict(list)
    for call, uses in recording.calls.values():
        by_op[call.op].append((call, sorted(uses)))
    part = file.with_suffix(f"{file.suffix}.part")
    with zipfile.ZipFile(part, "w") as archive:
        left_out = [[*key, reason] for key, reason in sorted(recording.left_out.items())]
        archive.writestr(_INDEX, json.dumps(left_out))
        for op, calls in sorted(by_op.items()):
            archive.writestr(op, _pickled(calls))
    part.replace(file)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which uses of calls count; an empty list means all."""

    variants: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    grounds: Sequence[str] = ()

    def __contains__(self, use: object) -> bool:
        assert isinstance(use, Use)
        pairs = (
            (use.variant, self.variants),
            (use.dtype, self.dtypes),
            (use.ground, self.grounds),
        )
        return all(not wanted or value in wanted for value, wanted in pairs)


class Calls:
    """The calls of a file, read an operator at a time.

    Args:
        file: A file that `save` wrote.
        selection: The uses that count; calls without such a use are left out.
    """

    def __init__(self, file: Path, selection: Selection | None = None) -> None:
        self._archive = zipfile.ZipFile(file)
        self._selection = selection or Selection()
        index = json.loads(self._archive.read(_INDEX))
        self.left_out = {(variant, ground): reason for variant, ground, reason in index}
        self.ops = sorted(set(self._archive.namelist()) - {_INDEX})

    def of(self, op: str) -> list[tuple[RecordedCall, list[Use]]]:
        """Return the calls of an operator, each with its uses."""
        packed = io.BytesIO(self._archive.read(op))
        calls: list[tuple[RecordedCall, list[Use]]] = torch.load(packed, weights_only=False)
        selected = ((call, [use for use in uses if use in self._selection]) for call, uses in calls)
        return [(call, uses) for call, uses in selected if uses]

    def __iter__(self) -> Iterator[str]:
        return iter(self.ops)
