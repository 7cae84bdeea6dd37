"""Write small files of every kind that data sets read: `python make_data.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as arrow
import tokenizers
from pyarrow import parquet

TEXT = "the quick brown fox jumps over a lazy dog and runs on until it is night"


def main(folder: Path) -> None:
    """Write a folder of texts with their tokenizer, and a log of clicks."""
    words = TEXT.split()
    (folder / "texts").mkdir()
    for number in range(300):
        line = " ".join(words[number * place % len(words)] for place in range(1, 60))
        (folder / "texts" / f"{number}.txt").write_text(line, "utf-8")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = range(1000)
    log = {
        "clicked": [number % 3 == 0 for number in rows],
        "age": [20 + number % 50 for number in rows],
        "price": [number / 8 for number in rows],
        "city": [f"city {number % 40}" for number in rows],
        "shop": [number % 50 for number in rows],
    }
    parquet.write_table(arrow.table(log), folder / "log.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
