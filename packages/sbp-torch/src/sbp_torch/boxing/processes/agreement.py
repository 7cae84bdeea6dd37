"""Compare a short text, such as the hash of a plan, over all ranks.

This uses only the tagged messages of a communicator, so it works with every backend. Collectives
carry no tags: if another rank were in a step, its data would be mistaken for texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b

import torch

from sbp_core.boxing import BoxingStep, Communicator, StepKind
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, S

#: Bytes of UTF-8 that `agree` exchanges. Longer texts are cut and end with a hash of the text.
_WIDTH_BYTES = 128


def agree(
    communicator: Communicator,
    ranks: Sequence[int],
    what: str,
    value: str,
    deadline_s: float,
) -> None:
    """Check that a text is the same on all ranks; all of them call this at the same time.

    Args:
        communicator: The communicator of one of the ranks.
        ranks: The ranks to compare, in the same order on all of them.
        what: Name of the text, such as `plan`; the same on all ranks.
        value: The text. If it exceeds 128 bytes in UTF-8, messages show its beginning and a hash.
        deadline_s: Seconds to wait for the other ranks.

    Raises:
        BoxingError: two ranks have different texts (raised on all ranks), or a rank did not call.
    """
    texts = gather_texts(
        communicator,
        ranks,
        _shorten(value),
        tag=f"agreement on the {what}",
        width_bytes=_WIDTH_BYTES,
        deadline_s=deadline_s,
    )
    holders: dict[str, list[int]] = {}
    for rank, text in texts.items():
        holders.setdefault(text, []).append(rank)
    if len(holders) == 1:
        return
    sides = ", ".join(
        f"{'rank' if len(held) == 1 else 'ranks'} {', '.join(map(str, held))} "
        f"{'has' if len(held) == 1 else 'have'} {text}"
        for text, held in holders.items()
    )
    raise BoxingError(
        f"the ranks have different values of {what}: {sides}",
        where=f"rank {communicator.rank}",
        accepted=f"one {what} on all ranks",
        todo="the program or its config differs between the processes: start all of them with the "
        "same files, arguments and versions",
    )


def _shorten(text: str) -> str:
    """Return a text that fits into `_WIDTH_BYTES`; different texts stay different."""
    data = text.encode()
    if len(data) <= _WIDTH_BYTES:
        return text
    end = f"... {blake2b(data, digest_size=8).hexdigest()}"
    return data[: _WIDTH_BYTES - len(end)].decode("utf-8", "ignore") + end


def gather_texts(
    communicator: Communicator,
    ranks: Sequence[int],
    text: str,
    *,
    tag: str,
    width_bytes: int,
    deadline_s: float,
) -> dict[int, str]:
    """Return a text of every rank, by rank; all of them call this at the same time.

    Args:
        communicator: The communicator of one of the ranks.
        ranks: The ranks, in the same order on all of them.
        text: The text of this rank, cut to `width_bytes`.
        tag: Names the exchange; the same on all ranks.
        width_bytes: Bytes of UTF-8 for each text, the same on all ranks.
        deadline_s: Seconds to wait for the other ranks; as long again if texts differ, until all
            ranks have seen this.
    """
    own = text_tensor(text, width_bytes, communicator.device)
    others = [rank for rank in ranks if rank != communicator.rank]
    found = {communicator.rank: tensor_text(own)}
    if others:
        for rank in others:
            step = _to_one(rank, ranks, width_bytes)
            communicator.send(step, own, tag=tag, deadline_s=deadline_s)
        step = _to_one(communicator.rank, ranks, width_bytes)
        theirs = communicator.receive(step, None, tag=tag, deadline_s=deadline_s)
        found |= zip(others, map(tensor_text, theirs.chunk(len(others))), strict=True)
    if len(set(found.values())) > 1:
        # A rank that raises because texts differ ends the run. Let all ranks get the texts first,
        # or some would only learn that another rank failed. These texts agree, so recursion ends.
        with suppress(BoxingError):
            seen = f"{tag}, seen by all"
            gather_texts(communicator, ranks, "", tag=seen, width_bytes=1, deadline_s=deadline_s)
    return {rank: found[rank] for rank in ranks}


def _to_one(receiver: int, ranks: Sequence[int], width_bytes: int) -> BoxingStep:
    """Return the step in which all other ranks send their texts to a rank."""
    others = [rank for rank in ranks if rank != receiver]
    size_bytes = len(others) * width_bytes
    return BoxingStep(
        kind=StepKind.TRANSFER,
        shape=(size_bytes,),
        dtype="uint8",
        source=(Placement(others, ("rank",)), NdSbp(S(0))),
        target=(Placement([receiver], ("rank",)), NdSbp(B)),
        axes=(),
        size_bytes=size_bytes,
    )


def text_tensor(text: str, width_bytes: int, device: str | torch.device) -> torch.Tensor:
    """Return a text as uint8 of shape (width_bytes,), padded with zeros or cut."""
    data = bytearray(text.encode()[:width_bytes].ljust(width_bytes, b"\0"))
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def tensor_text(values: torch.Tensor) -> str:
    """Return the text that `text_tensor` wrote."""
    return bytes(values.tolist()).rstrip(b"\0").decode("utf-8", "ignore")
