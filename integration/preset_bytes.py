"""Compare the bytes of presets with those of inference: a preset must not be worse than no preset.

    python -m preset_bytes [TEXT]      presets x models of the zoo x meshes whose line has the text

A preset says how states are stored, which is its purpose. It also says how activations are split,
which can only make a plan worse than what inference finds for the same storage. So each preset is
planned, then `planner=propagate` with the storage of every input of the step pinned as in the
preset's plan. Two figures of a step are compared: the bytes that all ranks send, and the largest
memory of a rank. A preset is at fault if one of them is above 1.05 of the other's, unless `REASONS`
has the reason, which its options file states, too.

It prints a line for each case, and fails if a case is at fault.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from replay import run_plan

#: Models of the zoo with few layers, otherwise as users find them; and batch sizes.
ZOO = {
    "gpt": "model.num_layers=2 trainer.batch_size=16",
    "llama": "model.num_layers=2 trainer.batch_size=16",
    "moe": "model.num_layers=1 trainer.batch_size=16",
    "bert": "model.num_layers=2 trainer.batch_size=16",
    "t5": "model.num_layers=1 trainer.batch_size=16",
    "resnet": "trainer.batch_size=64",
    "vit": "model.num_layers=2 trainer.batch_size=64",
    "dlrm": "trainer.batch_size=256",
    "hf/gpt2": "model.overrides.n_layer=2 trainer.batch_size=16",
    "hf/llama": "model.overrides.num_hidden_layers=2 trainer.batch_size=16",
    "hf/mixtral": "model.overrides.num_hidden_layers=1 trainer.batch_size=16",
}

_TRANSFORMERS = {name: ZOO[name] for name in ("gpt", "llama", "bert", "t5", "hf/llama")}

#: For presets of a pattern, the models that have it, where it is worth it.
PATTERNS = {
    "class_parallel": {
        "resnet": "model.num_classes=20000 trainer.batch_size=64",
        "vit": "model.num_layers=2 model.num_classes=20000 trainer.batch_size=64",
    },
    "expert_parallel": {name: ZOO[name] for name in ("moe", "hf/mixtral")},
    "table_parallel": {"dlrm": "trainer.batch_size=64"},
    "sequence_parallel": {name: ZOO[name] for name in ("gpt", "llama", "t5")},
    "tensor_parallel": _TRANSFORMERS,
    "megatron": _TRANSFORMERS,
    "data_tensor": _TRANSFORMERS,
}

#: Presets -> names of the mesh axes that they need, which are the last of the mesh.
PRESETS = {
    "class_parallel": (),
    "data_parallel": (),
    "data_tensor": ("data", "tensor"),
    "expert_parallel": (),
    "hsdp": ("replica", "shard"),
    "megatron": ("tensor",),
    "sequence_parallel": ("sequence",),
    "table_parallel": (),
    "tensor_parallel": ("tensor",),
    "zero": (),
    "zero1": (),
    "zero2": (),
}

MESHES = ((2,), (4,), (2, 2))

#: The most that a preset may send or hold, relative to inference with the same storage.
MOST = 1.05

_GATHERED_AGAIN = "parameters are gathered for forward and again for backward, as in ZeRO stage 3"
_TENSOR = {
    "sends": "activations travel in place of parameters, as in Megatron-LM",
    "holds": "ranks of the axis 'tensor' hold whole activations between layers",
}

#: Preset -> figures that may be above -> why. Others may not.
REASONS = {
    "data_parallel": {"holds": "gradients are whole on each rank"},
    "data_tensor": _TENSOR,
    "hsdp": {"sends": _GATHERED_AGAIN},
    "megatron": _TENSOR,
    "tensor_parallel": _TENSOR,
    "zero": {"sends": _GATHERED_AGAIN},
}

Case = tuple[str, tuple[str, ...]]


def cases() -> Iterator[Case]:
    """Yield the preset of each case, and its overrides without the planner."""
    for preset, names in PRESETS.items():
        for model, small in PATTERNS.get(preset, ZOO).items():
            for mesh in MESHES:
                if len(names) > len(mesh):
                    continue
                of = [f"model={model}", *small.split()]
                if preset == "sequence_parallel":  # a sample of each micro-batch for a rank
                    of.append(f"trainer.micro_batches={16 if len(mesh) == 1 else 8}")
                axes = ("data", "other")[: len(mesh) - len(names)] + names
                shape = ",".join(map(str, mesh))
                yield preset, (*of, f"cluster.mesh=[{shape}]", f"cluster.axes=[{','.join(axes)}]")


def inferred_with(strategy: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a planner `propagate` that stores inputs as a strategy does."""
    source = files("sbp_planner.conf").joinpath("planner", "propagate.yaml")
    config: dict[str, Any] = yaml.safe_load(source.read_text(encoding="utf-8"))
    stored = {
        glob.escape(name): entry.partition(" @")[0].strip()[1:-1]
        for name, entry in strategy["storage"].items()
    }
    for pins in config["pin_sets"].values():
        pins.update(stored)
    return config


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Return the bytes that all ranks send in a step, and the largest memory of a rank."""
    ranks = found["memory"]["ranks"].values()
    return {"sends": found["sent_bytes"], "holds": max(rank["peak_bytes"] for rank in ranks)}


def compared(case: Case) -> dict[str, tuple[float, float]] | str:
    """Plan a case with the preset and with inference; return both figures of each, or a refusal."""
    preset, of = case
    planned = run_plan((*of, f"planner=manual/{preset}"))
    if isinstance(planned, str):
        return planned
    with TemporaryDirectory() as place:
        folder = Path(place, "planner")
        folder.mkdir()
        config = yaml.safe_dump(inferred_with(planned[1]))
        Path(folder, "inferred.yaml").write_text(config, encoding="utf-8")
        other = run_plan((*of, "planner=inferred", "--config-dir", place))
    if isinstance(other, str):
        return f"inference: {other}"
    one, two = figures(planned[0]), figures(other[0])
    return {name: (one[name], two[name]) for name in one}


def faults(preset: str, found: dict[str, tuple[float, float]]) -> list[str]:
    """Return the figures in which a preset is worse without a reason."""
    return [
        name
        for name, (own, inferred) in found.items()
        if own > MOST * inferred and name not in REASONS.get(preset, {})
    ]


def main(arguments: list[str]) -> int:
    """Compare and print; return the exit code."""
    text = " ".join(arguments)
    every = [case for case in cases() if text in " ".join((case[0], *case[1]))]
    failed = 0
    with get_context("spawn").Pool(2, maxtasksperchild=20) as pool:
        for (preset, of), found in zip(every, pool.imap(compared, every), strict=True):
            line = f"{preset:18} {of[0]:16} {' '.join(of[-2:]):52}"
            if isinstance(found, str):
                print(line, "refused:", found, flush=True)
                failed += 1
                continue
            wrong = faults(preset, found)
            failed += bool(wrong)
            told = (f"{name} {a:.4g} of {b:.4g} B: {a / b:.2f}" for name, (a, b) in found.items())
            print(line, "FAULT" if wrong else "ok   ", "; ".join(told), flush=True)
    print(f"{len(every)} cases, of which {failed} are at fault or refused")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
