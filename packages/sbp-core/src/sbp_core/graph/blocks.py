"""Blocks: the repeated parts of a model, told from the paths of its modules."""

from __future__ import annotations


def block_of(module: str) -> str:
    """Return the block that a module, or what is named by its path, is in.

    >>> block_of("blocks.3.norm"), block_of("embed.tokens.weight"), block_of("")
    ('blocks.3', 'embed', '')
    """
    parts = module.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return parts[0]
