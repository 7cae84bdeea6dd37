"""Whether all ranks mean the same: compares a short text, such as the hash of a plan, over them.

Uses nothing but a communicator's own messages, so that it works over every backend. Collectives do
not say what they are: where another rank is in a step meanwhile, its data would be taken for texts.
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

#: Bytes of UTF-8 that `agree` exchanges; of longer texts, the beginning and a hash of all.
_WIDTH_BYTES = 128


def agree(
    communicator: Communicator,
    ranks: Sequence[int],
    what: str,
    value: str,
    deadline_s: float,
) -> None:
    """See that a text is the same on all ranks; all of them call this at the same time.

    Args:
        communicator: Of one of the ranks.
        ranks: Who compares, in an order that is the same on all of them.
        what: What the text is, such as `plan`; the same on all ranks.
        value: The text; of one beyond 128 bytes in UTF-8, messages show the beginning and a hash.
        deadline_s: Seconds to wait for the others.

    Raises:
        BoxingError: two ranks have different texts (raised on all ranks), or a rank did not come.
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
    """Return a text that fits into `_WIDTH_BYTES`, another one for another text."""
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
        communicator: Of one of the ranks.
        ranks: In an order that is the same on all of them.
        text: This rank's; what does not fit into `width_bytes` is cut off.
        tag: Names the exchange; the same on all ranks.
        width_bytes: Bytes of UTF-8 for each text, the same on all ranks.
        deadline_s: Seconds to wait for the others; once more if texts differ, until all know that.
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
        # A rank that raises because texts differ ends the run: not before all ranks have them, or
        # some would only hear that another rank failed. All say the same now, so this ends.
        with suppress(BoxingError):
            seen = f"{tag}, seen by all"
            gather_texts(communicator, ranks, "", tag=seen, width_bytes=1, deadline_s=deadline_s)
    return {rank: found[rank] for rank in ranks}


def _to_one(receiver: int, ranks: Sequence[int], width_bytes: int) -> BoxingStep:
    """Return the step in which all others send their texts to a rank."""
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
