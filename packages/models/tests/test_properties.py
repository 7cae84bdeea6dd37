import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_models.configs import TextTask
from sbp_models.text import MASK, MASKED_PART, NO_TARGET, ByteText

settings.register_profile("quick", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("quick")


def make(size: int, context: int, seed: int, task: TextTask = "next") -> ByteText:
    content = bytes(number % 251 for number in range(size))
    return ByteText([("file", content)], context=context, seed=seed, label="test", task=task)


def some(data: ByteText, index: int, split: str = "train") -> npt.NDArray[np.int64]:
    """Return the numbers of three samples of a split."""
    return (index + np.arange(3)) % data.num_samples(split)


@given(st.integers(1, 30), st.integers(0, 500), st.integers(0, 2**64), st.integers(0, 2**50))
def test_samples_are_always_whole_windows(context: int, more: int, seed: int, index: int) -> None:
    data = make(20 * (context + 1) + 10 + more, context, seed)

    for split in ("train", "validation"):
        batch = data.samples(some(data, index, split), split)
        assert batch["tokens"].shape == (3, context)
        assert torch.equal((batch["tokens"] + 1) % 251, batch["targets"])


@given(st.integers(1, 30), st.integers(0, 2**64), st.integers(0, 2**50))
def test_equally_many_tokens_of_every_sample_are_masked_and_only_they_are_asked_for(
    context: int, seed: int, index: int
) -> None:
    data = make(1500, context, seed, "masked")

    batch = data.samples(some(data, index))

    masked = batch["tokens"] == MASK
    assert masked.sum(1).tolist() == [max(1, round(MASKED_PART * context))] * 3
    assert torch.equal(batch["targets"] == NO_TARGET, ~masked)
    whole = torch.where(masked, batch["targets"], batch["tokens"])
    assert torch.equal((whole[:, :-1] + 1) % 251, whole[:, 1:])


@given(st.integers(1, 30), st.integers(0, 2**64), st.integers(0, 2**50))
def test_what_is_to_be_continued_goes_on_where_the_tokens_end(
    context: int, seed: int, index: int
) -> None:
    data = make(1500, context, seed, "continue")

    batch = data.samples(some(data, index))

    whole = torch.cat([batch["tokens"], batch["targets"]], dim=1)
    assert batch["tokens"].shape == batch["targets"].shape == (3, context)
    assert torch.equal((whole[:, :-1] + 1) % 251, whole[:, 1:])


@given(st.text())
def test_text_survives_encoding_and_decoding(text: str) -> None:
    data = make(400, 5, 0)

    encodable = text.encode("utf-8", errors="replace").decode()

    assert data.decode(data.encode(text)) == encodable
