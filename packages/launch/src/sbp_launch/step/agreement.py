"""Compare, before the first step, all that must be equal on all ranks.

Every process makes the plan by itself. Two processes with different code or settings would wait
for each other in different places. This module raises an error that names the difference instead.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import torch
import xxhash
from torch import Tensor

from sbp_core.errors import ConfigError
from sbp_core.graph import graph_hash
from sbp_core.plugins import PluginRegistry
from sbp_core.runtime import BatchPart
from sbp_core.units import format_ranges
from sbp_launch.planning.flow import Planned
from sbp_launch.team import TEXT_BYTES

#: Names of manifest entries: a call that all ranks make, its batch, and the batch it evaluates.
THE_CALL, THE_BATCH, EVALUATED = "the call", "the batch", "the batch to evaluate"

_SAME_BATCHES = (
    "pass batch_is='local' if each process loads its own part, by a DistributedSampler(..., "
    "num_replicas=step.data_parallel_size, rank=step.data_parallel_rank); or seed the shuffling "
    "alike in all processes"
)

_SAME_CALLS = (
    "make this call on all ranks, in one order: one that only some of them make, as in "
    "`if step.world.rank == 0:`, leaves the others waiting. Print or write on one rank what all "
    "have computed"
)

#: By the entry in which ranks differ: what is accepted, and what to do.
_WAYS_OUT = {
    THE_CALL: ("the same calls on all ranks", _SAME_CALLS),
    THE_BATCH: ("", _SAME_BATCHES),
    EVALUATED: (
        "batches of one size on all ranks, in the same calls",
        "pad what processes load, as DistributedSampler does, or pass whole batches: "
        "step.evaluate(batch, batch_is='global')",
    ),
}

#: The largest number of characters of a value that a message shows.
_SHOWN = 200


def manifest(
    planned: Planned, registry: PluginRegistry, settings: Mapping[str, object]
) -> dict[str, str]:
    """Return all values that must be equal on all ranks: versions, the step, plan, settings."""
    found = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    for entry in registry.entries:
        if entry.version:
            found[f"package {entry.distribution}"] = entry.version
    found |= {
        name: importlib.metadata.version(name.removeprefix("package "))
        for name in ("package sbp-core", "package sbp-aten", "package sbp-torch")
        if name not in found and _is_installed(name.removeprefix("package "))
    }
    found |= {f"{name}": str(value) for name, value in settings.items()}
    found["the captured step"] = graph_hash(planned.graph)
    found["the strategy"] = _digest(repr(planned.strategy.nodes), repr(planned.strategy.storage))
    found["the plan"] = planned.plan.hash
    return found


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _digest(*texts: str) -> str:
    return blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of named tensors and their values; an expanded scalar is hashed once."""
    found = blake2b(digest_size=16)
    for name, value in sorted(tensors.items()):
        plain = value.detach()
        if plain.dim() and plain.numel() and not any(plain.stride()):
            plain = plain.flatten()[0]
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        flat = plain.cpu().contiguous().reshape(-1)
        # A single element counts as contiguous whatever its stride; the view as bytes needs 1.
        found.update(flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data)
    return found.hexdigest()


#: Gathers texts, such as `Team.gather`: (text of this rank, name of the exchange) -> all texts.
Gather = Callable[[str, str], Sequence[str]]


def compare(own: Mapping[str, str], gather: Gather) -> None:
    """Check that all ranks have the same manifest. All of them call this at the same time.

    Args:
        own: The manifest of this rank. If a value has a NUL, the text before it is compared, and
            the text after it is shown.
        gather: Gathers texts of all ranks.

    Raises:
        ConfigError: an entry differs; names it and the value of each rank. Raised on all ranks.
    """
    texts = gather(_fitting(own), "agreement on the program")
    found = {rank: json.loads(text) for rank, text in enumerate(texts)}
    names = dict.fromkeys(name for entries in found.values() for name in entries)
    for name in names:
        holders: dict[str, list[int]] = {}
        shown: dict[str, str] = {}
        for rank, entries in found.items():
            value, _, words = entries.get(name, "none").partition("\0")
            holders.setdefault(value, []).append(rank)
            shown.setdefault(value, words or value)
        if len(holders) > 1:
            raise _difference(name, holders, shown)


def _fitting(entries: Mapping[str, str]) -> str:
    """Return a manifest as text of at most `_WIDTH_BYTES`: in full, as hashes, or as one hash."""
    hashes = {name: _digest(value.partition("\0")[0])[:12] for name, value in entries.items()}
    whole = {"the program and what it runs with": _digest(json.dumps(dict(entries)))}
    texts = map(json.dumps, (dict(entries), hashes, whole))
    return next(text for text in texts if len(text.encode()) <= TEXT_BYTES)


def compare_batches(
    parts: Mapping[str, BatchPart], batch: Mapping[str, Tensor], gather: Gather
) -> None:
    """Check that ranks which hold the same samples of a batch were given the same values.

    Args:
        parts: The samples of each tensor that this rank was given, by name.
        batch: The values of these samples, by name.
        gather: Gathers texts of all ranks.

    Raises:
        ConfigError: two ranks were given different values; raised on all ranks.
    """
    own = {
        name: (str(part), digest_of({name: batch[name]}))
        for name, part in parts.items()
        if name in batch
    }
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, text in enumerate(gather(json.dumps(own), "the first batch")):
        for name, (samples, digest) in json.loads(text).items():
            other, wanted = first.setdefault((name, samples), (rank, digest))
            if digest != wanted:
                raise ConfigError(
                    f"ranks {other} and {rank} were given different values for {samples} of "
                    f"{name!r}",
                    where="the first batch",
                    accepted="the same values for the same samples",
                    todo=_SAME_BATCHES,
                )


def _difference(
    name: str, holders: Mapping[str, Sequence[int]], shown: Mapping[str, str]
) -> ConfigError:
    sides = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {format_ranges(sorted(ranks))}: {shown[value][:_SHOWN]}"
        for value, ranks in holders.items()
    )
    accepted, todo = _WAYS_OUT.get(name, ("", ""))
    if not todo and name.startswith("the "):
        todo = (
            "see that nothing in the model, the loss and the settings depends on the rank, and "
            "that all processes run the same files"
        )
    return ConfigError(
        f"the ranks differ in {name}: {sides}",
        accepted=accepted or "one program on all ranks, with the same versions and settings",
        todo=todo or "start all processes from the same environment, with the same arguments",
    )


#: How many bytes of each batch tensor are compared between processes.
_HASHED_BYTES = 2**20


def quick_digest(batch: Mapping[str, Tensor]) -> str:
    """Return a hash of a batch on the host; of a large tensor, only every n-th element counts."""
    found = xxhash.xxh3_64()
    for name, value in batch.items():
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        if value.device.type != "cpu":
            continue
        flat = value.detach().reshape(-1)
        if flat.nbytes > _HASHED_BYTES:
            flat = flat[:: -(-flat.nbytes // _HASHED_BYTES)]
        flat = flat.contiguous()
        found.update(flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data)
    return found.hexdigest()
