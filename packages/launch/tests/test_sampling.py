import torch
from trainable import Bigram, Counting

from sbp_launch.trainer.sampling import printable, sample_text


class Certain(Bigram):
    """Always counts up by one."""

    def logits(self, tokens):
        assert tokens.shape[1] <= self.context
        return 100.0 * torch.nn.functional.one_hot((tokens + 1) % 8, 8).float()


def test_a_sample_continues_the_prompt_within_the_context():
    text = sample_text(Certain(), Counting(), "\x00\x01", 6, seed=0)

    assert text == "01234567"


def test_what_a_terminal_would_obey_is_escaped():
    text = printable("a\x1b[2Jé\x00\r\n\t\u202e\x9b")

    assert text == "a\\x1b[2Jé\\x00\\r\n\t\\u202e\\x9b"


def test_a_sample_is_repeatable():
    torch.manual_seed(0)
    model = Bigram()

    first, again = (sample_text(model, Counting(), "\x03", 20, seed=5) for _ in range(2))

    assert first == again
    assert first != sample_text(model, Counting(), "\x03", 20, seed=6)
