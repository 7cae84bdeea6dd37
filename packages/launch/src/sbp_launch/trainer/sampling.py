"""Continue a text with a trained language model, on one device."""

from __future__ import annotations

import torch

from sbp_core.errors import SbpValueError
from sbp_torch.kinds import LanguageModel, TextDataset


def printable(text: str) -> str:
    r"""Return a text in which characters are escaped unless printable, a line feed or a tab.

    A terminal would interpret control characters.

    >>> printable("a\x1b[2J\n")
    'a\\x1b[2J\n'
    """
    return "".join(
        letter
        if letter.isprintable() or letter in "\n\t"
        else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def sample_text(
    model: LanguageModel, data: TextDataset, prompt: str, num_tokens: int, seed: int
) -> str:
    """Return `prompt` and its continuation, drawn token by token at temperature 0.8.

    Args:
        model: The model with trained parameters; it gets at most the last `context` tokens.
        data: Converts text to tokens and back.
        prompt: The beginning of the text; not empty.
        num_tokens: Number of tokens to draw.
        seed: The seed of the draws.

    Raises:
        SbpValueError: the model returns logits that are infinite or NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(data.encode(prompt))
    with torch.no_grad():
        for _ in range(num_tokens):
            seen = torch.tensor([tokens[-model.context :]])
            logits = model.logits(seen)[0, -1].float()
            if not logits.isfinite().all():
                raise SbpValueError("the scores of the model are infinite or no numbers")
            chances = torch.softmax(logits / 0.8, dim=-1)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return data.decode(tokens)
