"""The patterns of tensor parallelism send what Megatron-LM sends, counted for models of the zoo.

Two plans that differ by one layer differ by the transfers of that layer.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent))

from replay import run_plan

BATCH, CONTEXT, RANKS = 4, 64, 4

#: Of each model: the setting of its number of layers, its width, and the all-reduces of a layer.
MODELS = {
    "gpt": ("model.num_layers", 256, 4),
    "llama": ("model.num_layers", 128, 4),
    "bert": ("model.num_layers", 128, 4),
    "t5": ("model.num_layers", 128, 4 + 6),  # a layer of the encoder, and of the decoder
    "hf/llama": ("model.overrides.num_hidden_layers", 128, 4),
    "hf/bert": ("model.overrides.num_hidden_layers", 128, 4),
}


def traffic(*overrides: str) -> Counter[tuple[str, str]]:
    """Return the calls and the bytes that all ranks send in a step, by kind of collective."""
    planned = run_plan((*overrides, "compile.bucket_bytes=0"))
    assert not isinstance(planned, str), planned
    found: Counter[tuple[str, str]] = Counter()
    for one in planned[0]["traffic"]:
        for kind in ("calls", "sent_bytes"):
            found[one["collective"], kind] += one[kind]
    return found


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("preset", ["tensor_parallel", "megatron"])
@pytest.mark.parametrize(("autocast", "itemsize"), [("", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_sends_the_all_reduces_of_megatron_and_nothing_else(
    model: str, autocast: str, itemsize: int, preset: str
) -> None:
    layers, width, count = MODELS[model]
    context = "data.context" if model == "t5" else "model.context"
    given = (
        f"model={model}",
        f"{context}={CONTEXT}",
        f"trainer.batch_size={BATCH}",
        f"cluster.mesh=[{RANKS}]",
        "cluster.axes=[tensor]",
        f"planner=manual/{preset}",
        f"compile.autocast={autocast}",
    )

    fewer, more = (traffic(*given, f"{layers}={number}") for number in (2, 3))

    # A ring sends 2 (p - 1) / p of an activation from each of p ranks.
    activation = BATCH * CONTEXT * width * itemsize
    more.subtract(fewer)
    assert {key: value for key, value in more.items() if value} == {
        ("all-reduce", "calls"): count,
        ("all-reduce", "sent_bytes"): count * 2 * (RANKS - 1) * activation,
    }
