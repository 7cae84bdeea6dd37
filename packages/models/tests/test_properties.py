import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_models.text import ByteText

settings.register_profile("quick", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("quick")

SPLIT = st.sampled_from(["train", "validation"])


def make(size: int, context: int, seed: int) -> ByteText:
    content = bytes(number % 251 for number in range(size))
    return ByteText([("file", content)], context=context, seed=seed, label="test")


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 2**70), SPLIT)
def test_every_batch_size_sees_the_same_sequence_of_samples(
    index: int, batch_size: int, seed: int, split: str
) -> None:
    data = make(400, 5, seed)

    whole = data.batch(index, batch_size, split)
    singles = [data.batch(index * batch_size + row, 1, split) for row in range(batch_size)]

    for name in ("tokens", "targets"):
        assert torch.equal(whole[name], torch.cat([single[name] for single in singles]))


@given(st.integers(1, 30), st.integers(0, 500), st.integers(0, 2**64), st.integers(0, 2**50))
def test_samples_are_always_whole_windows(context: int, more: int, seed: int, index: int) -> None:
    data = make(20 * (context + 1) + 10 + more, context, seed)

    for split in ("train", "validation"):
        batch = data.batch(index, 3, split)
        assert batch["tokens"].shape == (3, context)
        assert torch.equal((batch["tokens"] + 1) % 251, batch["targets"])


@given(st.text())
def test_text_survives_encoding_and_decoding(text: str) -> None:
    data = make(400, 5, 0)

    encodable = text.encode("utf-8", errors="replace").decode()

    assert data.decode(data.encode(text)) == encodable
