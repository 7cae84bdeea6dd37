"""Store plans of models, layouts and planners, and compare new ones: a refactor must change none.

    python -m replay store FILE [TEXT]      plans every case and writes the results
    python -m replay compare FILE [TEXT]    plans again, prints differences, fails if there are any

With a text, such as `planner=osdp`, only cases whose settings contain it are planned.

The result of a case has the hashes of graph, strategy and plan, the predicted time, the bytes that
are moved, and the memory of each rank; or the error of a refusal. A strategy is `worse` if it no
longer fits, or takes more time, or takes equal time and more memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

#: Settings that make each model of the zoo small.
MODELS = {
    "gpt": "model.num_layers=2 model.hidden=32 model.num_heads=4 model.context=16",
    "llama": "model.num_layers=2 model.hidden=32 model.num_heads=4 model.num_key_heads=2 "
    "model.mlp_hidden=48 model.context=16",
    "moe": "model.num_layers=1 model.hidden=32 model.num_heads=4 model.num_key_heads=2 "
    "model.mlp_hidden=48 model.context=16",
    "bert": "model.num_layers=2 model.hidden=32 model.num_heads=4 model.context=16",
    "t5": "model.num_layers=1 model.hidden=32 model.num_heads=4 model.head_width=8 "
    "model.mlp_hidden=64 data.context=16",
    "resnet": "model.width=4",
    "vit": "model.num_layers=2 model.hidden=32 model.num_heads=4 model.image_size=16",
    "dlrm": "model.rows=[40,20,10,4] model.hidden=8 model.bottom=[16] model.top=[16]",
}

MESHES = ("[2]", "[2,2]")

PRESETS = {
    "data_parallel": "cluster.mesh=[4]",
    "tensor_parallel": "cluster.mesh=[2] cluster.axes=[tensor]",
    "data_tensor": "cluster.mesh=[2,2]",
    "zero": "cluster.mesh=[4]",
    "zero1": "cluster.mesh=[4]",
    "zero2": "cluster.mesh=[4]",
    "pipeline": "cluster.mesh=[2,2] cluster.axes=[pipe,data] trainer.micro_batches=4",
}

PLANNERS = {
    "greedy": ("[4]", "[2,2]"),
    "osdp": ("[4]",),
    "ilp": ("[4]", "[2,2]"),
    "optcnn": ("[4]",),
    "tofu": ("[4]",),
    "mcmc": ("[2]",),
    "gpipe": ("[2]", "[4]"),
    "pipedream": ("[4]",),
    "stanza": ("[4]",),
    "dlplacer": ("[2]",),
    "alpa": ("[4]",),
    "galvatron": ("[4]",),
    "auto": ("[4]",),
}

PIPELINES = ("gpipe", "pipedream", "alpa", "galvatron")

#: Settings of compiling a step.
COMPILED = (
    "compile.overlap=true",
    "compile.boxing_thread=true",
    "compile.bucket_bytes=4096",
    "compile.prefetch=2",
    "compile.regather=true",
    "compile.passes.recompute.memory_bytes=200000",
    "compile.passes.slices={'*mlp*':{count:2}}",
    "trainer.micro_batches=2",
    "trainer.micro_batches=2 trainer.loss=mean_of_micro_batches",
    "trainer.micro_batches=4 trainer.loss=each_micro_batch trainer.micro_batches_per_update=2",
    "trainer.update.clip_norm=1.0",
    "planner=osdp planner.offload=[optimizer_states] cluster=h100",
)

#: Planners that respect a limit of memory, and limits from tight to loose.
LIMITED = ("osdp", "ilp", "alpa", "galvatron", "auto")
LIMITS = {"gpt": (300e3, 500e3, 900e3), "resnet": (300e3, 600e3)}


def cases() -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each case."""
    batch = "trainer.batch_size=8"
    for model, small in MODELS.items():
        of = (f"model={model}", *small.split(), batch)
        for mesh in MESHES:
            yield (*of, f"cluster.mesh={mesh}")
        yield (*of, "cluster=h100", "cluster.mesh=[2,4]")
        for preset, layout in PRESETS.items():
            if model not in ("t5", "vit"):
                yield (*of, f"planner=manual/{preset}", *layout.split())
    for model in ("gpt", "moe", "resnet", "dlrm"):
        of = (f"model={model}", *MODELS[model].split(), batch)
        for planner, meshes in PLANNERS.items():
            for mesh in meshes:
                more = ("trainer.micro_batches=4",) if planner in PIPELINES else ()
                yield (*of, f"planner={planner}", f"cluster.mesh={mesh}", *more)
    of = ("model=gpt", *MODELS["gpt"].split(), batch)
    for how in COMPILED:
        yield (*of, "cluster.mesh=[4]", *how.split())
        if "planner" not in how:
            yield (*of, "cluster.mesh=[2,2]", "planner=manual/data_tensor", *how.split())
    for model, limits in LIMITS.items():
        of = (f"model={model}", *MODELS[model].split(), batch, "cluster.mesh=[4]")
        for planner in LIMITED:
            for limit in limits:
                limited = f"planner={planner}", f"cluster.memory_bytes={limit:.0f}"
                # Batch normalisation has statistics for each micro-batch.
                chosen = "trainer.micro_batches=auto", "trainer.loss=mean_of_micro_batches"
                yield (*of, *limited, *chosen)


def digest(value: Any) -> str:
    """Return 16 hex digits of a value of plain JSON."""
    text = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def run_plan(overrides: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]] | str:
    """Run `sbp-plan` in this process; return its figures and its strategy, or the refusal."""
    with TemporaryDirectory() as place:
        out, figures = Path(place, "strategy.json"), Path(place, "figures.json")
        sys.argv = ["sbp-plan", *overrides, f"out={out}", f"figures={figures}"]
        sys.modules.pop("sbp_launch.apps.plan", None)
        told = io.StringIO()
        with redirect_stdout(told), redirect_stderr(told), suppress(SystemExit):
            runpy.run_module("sbp_launch.apps.plan", run_name="__main__")
        if not figures.exists():
            return told.getvalue().partition("sbp-plan: ")[2]
        found, decided = (json.loads(file.read_text("utf-8")) for file in (figures, out))
        return found, decided


def planned(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Plan one case; return the result."""
    result = run_plan(overrides)
    if isinstance(result, str):
        return {"refused": result.splitlines()[:1]}
    found, decided = result
    for name in ("report", "planner"):  # texts and a name, which do not affect the computation
        decided.pop(name, None)
    ranks = found["memory"]["ranks"] or {}
    return {
        "graph": found["graph_hash"],
        "strategy": digest(decided),
        "plan": found["plan_hash"],
        "step_s": found["step_s"],
        "sent_bytes": found["sent_bytes"],
        "memory": [rank["peak_bytes"] for rank in ranks.values()],
    }


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the difference of two results of a case as one word, with ` worse` if it applies."""
    names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    if not names:
        return ""
    if "plan" not in after or "plan" not in before:
        worse = "plan" in before
    else:
        was, now = ((one["step_s"], max(one["memory"], default=0)) for one in (before, after))
        worse = now[0] > was[0] * (1 + 1e-9) or (now[0] >= was[0] and now[1] > was[1])
    return ", ".join(sorted(names)) + (": worse" if worse else "")


def main(arguments: list[str]) -> int:
    """Store or compare; return the exit code."""
    if len(arguments) not in (2, 3) or arguments[0] not in ("store", "compare"):
        print(__doc__)
        return 2
    way, file, text = arguments[0], Path(arguments[1]), "".join(arguments[2:])
    every = [case for case in dict.fromkeys(cases()) if text in " ".join(case)]
    with get_context("spawn").Pool(2, maxtasksperchild=20) as pool:
        results = {}
        for overrides, result in zip(every, pool.imap(planned, every), strict=True):
            results[" ".join(overrides)] = result
    if way == "store":
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        refused = sum("refused" in result for result in results.values())
        print(f"stored {len(results)} cases, {refused} of which are refused, in {file}")
        return 0
    stored = json.loads(file.read_text(encoding="utf-8"))
    known = {name: one for name, one in stored.items() if text in name}
    differ = 0
    for name in known.keys() | results.keys():
        found = difference(known.get(name, {}), results.get(name, {}))
        if found:
            differ += 1
            print(f"{name}\n  {found}\n  before {known.get(name)}\n  after  {results.get(name)}")
    print(f"{len(results)} cases, of which {differ} differ")
    return min(differ, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
