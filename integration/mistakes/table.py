"""The table of mistakes: the commands, and the texts that their answers must contain."""

from __future__ import annotations

from dataclasses import dataclass

from mistakes.files import PLANNED, SMALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One mistake.

    Args:
        command: Module and arguments after `python -m`.
        says: Texts that the answer must contain: the key or the file, and the remedy.
        plugins: Folder with additional plugins, or "".
        code: Exit code; 1 is for errors that only the author of a plugin can fix.
        imports_torch: Whether detecting the mistake may need PyTorch.
    """

    command: tuple[str, ...]
    says: tuple[str, ...]
    plugins: str = ""
    code: int = 2
    imports_torch: bool = False


def _train(text: str, *says: str, plugins: str = "") -> Mistake:
    """Return a mistake in a setting of `sbp-train`, detected before PyTorch is imported."""
    return Mistake(command=("sbp_launch.apps.train", *text.split(" ")), says=says, plugins=plugins)


def _model(text: str, *says: str, plugins: str = "", code: int = 2) -> Mistake:
    """Return a mistake that `sbp-train` can only detect with a small model."""
    command = ("sbp_launch.apps.train", *SMALL, "trainer.steps=1", *text.split(" "))
    return Mistake(command=command, says=says, plugins=plugins, code=code, imports_torch=True)


def _data(path: str, *says: str) -> Mistake:
    """Return a mistake in the files of a data set."""
    command = ("sbp_launch.apps.plan", "data=text", f"data.path={path}")
    return Mistake(command=command, says=(f"data.path={path}", *says), imports_torch=True)


def _strategy(name: str, *says: str, imports_torch: bool = False) -> Mistake:
    """Return a mistake in a strategy that was edited by hand; detecting it may need the graph."""
    return Mistake(
        command=(
            "sbp_launch.apps.plan",
            *SMALL,
            *PLANNED[1:],
            "planner=file",
            f"planner.path={name}",
        ),
        says=(name, *says),
        imports_torch=imports_torch,
    )


MISTAKES: dict[str, Mistake] = {
    # Weights to start from.
    "weights that are not there": _train(
        "trainer.init_from=nowhere", "trainer.init_from=nowhere: there is no nowhere", "safetensors"
    ),
    # Checkpoints to resume from, and how often they are saved.
    "a checkpoint that is not there": _train(
        "trainer.resume=nowhere",
        "trainer.resume=nowhere: there is no folder",
        "the folder of a run",
    ),
    "a folder without a checkpoint": _train("trainer.resume=.", "there is no checkpoint in ."),
    "no time between saves": _train("trainer.checkpoint.every=10m", "every='10m'", "10min"),
    # Keys.
    "a letter is missing": _train("trainer.step=5", "trainer.steps", "did you mean"),
    "no group": _train("steps=5", "trainer.steps=5"),
    "a rate without optimizer": _train("lr=0.1", "optimizer.lr=0.1"),
    "a mesh without cluster": _train("mesh=[2]", "cluster.mesh=[2]"),
    "group mistyped": _train("modle=llama", "model"),
    "key of another group": _train("trainer.lr=0.1", "optimizer.lr"),
    "key of another option": _train("data.path=text.txt", "data=text"),
    "limit of another planner": _train("planner.memory_bytes=90e6", "planner=osdp"),
    "deep key mistyped": _train("trainer.update.clipnorm=1", "clip_norm"),
    "another trainer's key mistyped": _train(
        "trainer.gradient_clipp1ng=1", "'trainer.gradient_clipp1ng'", "trainer.update.clip_norm=1"
    ),
    "the same key twice": _train(
        "trainer.steps=1 trainer.steps=2", "trainer.steps=1", "trainer.steps=2"
    ),
    "two planners": _train("planner=osdp planner=file", "planner=osdp", "planner=file"),
    # Options.
    "letters swapped": _train("model=gtp", "did you mean model=gpt?"),
    "planner mistyped": _train("planner=ospd", "did you mean planner=osdp?"),
    "preset without its folder": _train(
        "planner=tensor_parallel", "did you mean planner=manual/tensor_parallel?"
    ),
    "zero's third stage": _train("planner=zero3", "planner=manual/zero"),
    "optimizer mistyped": _train("optimizer=admaw", "did you mean optimizer=adamw?"),
    "backend mistyped": _train("boxing=ncll", "did you mean boxing=nccl?"),
    "runtime mistyped": _train("runtime=actr", "did you mean runtime=actor?"),
    "unknown flag": _train("--stpes", "--stpes"),
    # Values.
    "no steps": _train("trainer.steps=0", "trainer.steps", "an integer >= 1"),
    "a word for a number": _train("trainer.steps=many", "trainer.steps", "an integer"),
    "a fraction of a step": _train("trainer.steps=1.5", "trainer.steps", "an integer"),
    "micro-batches that leave a rest": _train(
        "trainer.micro_batches=3", "micro_batches", "1, 2, 4, 8, 16"
    ),
    "half precision": _train("trainer.dtype=float16", "float32, float64", "compile.autocast"),
    "a word for a rate": _train("optimizer.lr=fast", "optimizer.lr", "a number"),
    "a negative rate": _train("optimizer.lr=-1", "lr"),
    "unknown autocast": _train("compile.autocast=int8", "compile.autocast", "bfloat16"),
    "unknown pass of a plugin": _train("compile.plugins=[faster]", "compile.plugins", "faster"),
    "heads that do not divide": _train("model.num_heads=3", "num_heads", "hidden"),
    "no context": _train("model.context=0", "context"),
    "metrics outside the run": _train("logger.file=/tmp/metrics.jsonl", "logger", "run folder"),
    "an SBP without quotes": _train(
        "planner=manual/custom +planner.pins={batch:S(0)}", '+planner.pins={batch:"S(0)"}'
    ),
    # Meshes.
    "a mesh that is a number": _train("cluster.mesh=4", "cluster.mesh", "[2, 2]"),
    "a mesh of nothing": _train("cluster.mesh=[0]", "cluster.mesh", "[2, 2]"),
    "one name for two axes": _train("cluster.axes=[data]", "cluster.axes", "cluster.mesh"),
    "two axes of one name": _train("cluster.axes=[data,data]", "cluster.axes", "distinct"),
    "axes that do not make up the world": _train(
        "cluster.mesh=[2,3] cluster.axes=[tensor,pipe] cluster.world_size=8",
        "has 6 ranks, and world_size=8",
        "a mesh of 8 ranks",
    ),
    "another world size": _train("cluster.world_size=3", "world_size=3", "4"),
    "a pipeline without its axis": _train(
        "planner=manual/pipeline cluster.mesh=[2]", "pipe", "cluster.axes=[pipe]"
    ),
    "a planner's axis that the mesh lacks": _train(
        "planner=osdp cluster.mesh=[2,2] planner.axis=batch",
        "one of data, tensor",
        "set planner.axis=data",
    ),
    "help on another option": _train("--help planner.memory_bytes", "--help planner=osdp"),
    "threads for processes": _train(
        "boxing=torch launcher=threads", "boxing=torch", "launcher=spawn"
    ),
    "processes for threads": _train("launcher=spawn", "boxing=local", "add boxing=torch"),
    "mpiexec for threads": _train("launcher=mpiexec", "boxing=local", "add boxing=mpi"),
    "a launcher of another name": _train("launcher=slrum boxing=torch", "slurm", "torchrun"),
    "the rank of one process": _train("boxing=torch boxing.rank=1", "rank=1", "boxing.rank"),
    "hosts that do not divide the ranks": _train(
        "boxing=torch launcher=slurm launcher.nodes=3", "4 ranks", "launcher.nodes=3", "divisor"
    ),
    # Files.
    "text without path": _train("data=text", "set data.path=FILE_OR_FOLDER"),
    "a model of no kind": _train("model=hf", "model.kind", "gpt2, llama", "model=hf/bert"),
    "no such text": _data("missing.txt"),
    "an empty text": _data("empty.txt"),
    "a short text": _data("short.txt", "data.context"),
    "no text": _data("pictures", "pictures", "UTF-8"),
    "no cluster file": _train("cluster=measured", "cluster.json", "sbp-calibrate"),
    "half a cluster file": _train(
        "cluster=measured cluster.file=cluster_cut.json", "cluster_cut.json", "line 1"
    ),
    "another JSON file": _train(
        "cluster=measured cluster.file=cluster_other.json", "cluster_other.json"
    ),
    "no strategy file": _train("planner=file planner.path=missing.yaml", "missing.yaml"),
    "a folder for a strategy": _train("planner=file planner.path=conf", "conf"),
    "no such config folder": _train("--config-dir missing model=gpt", "missing"),
    "a broken option": _train("--config-dir conf planner=broken", "planner/broken.yaml", "line"),
    "an option without name": _train(
        "--config-dir conf_nameless planner=nameless", "planner/nameless.yaml", "name"
    ),
    "a run folder below a file": _train("hydra.run.dir=not_a_folder/run", "not_a_folder"),
    "a run folder that is a file": _train("hydra.run.dir=not_a_folder", "not_a_folder"),
    "a run folder that is used": _train("trainer.steps=1 hydra.run.dir=used", "used", "overwrite"),
    "a plan in no known form": Mistake(
        command=("sbp_launch.apps.plan", "out=plan.txt"), says=("plan.txt", ".yaml")
    ),
    "a plan over a plan": Mistake(
        command=("sbp_launch.apps.plan", "out=good.yaml"), says=("good.yaml",)
    ),
    "calibrating nobody": Mistake(
        command=("sbp_launch.calibrate.command", "ranks=0"), says=("ranks",)
    ),
    # Edited strategies.
    "an input too many": _strategy("extra_input.yaml", "line", "gelu", imports_torch=True),
    "a dim that is not there": _strategy(
        "no_such_dim.yaml", "line", "gelu", "S(7)", imports_torch=True
    ),
    "an axis too few": _strategy(
        "one_axis.yaml", "line", "embed.tokens.weight", imports_torch=True
    ),
    "an unknown letter": _strategy("no_sbp.yaml", "line", "embed.tokens.weight", "S(dim)"),
    "an illegal signature": _strategy("illegal.yaml", "line", "gelu", imports_torch=True),
    "an op mistyped": _strategy("unknown_op.yaml", "line", "gelo", imports_torch=True),
    "an op deleted": _strategy("missing_op.yaml", "line", "blocks.0.mlp"),
    "a parameter mistyped": _strategy(
        "unknown_tensor.yaml", "line", "haed.weight", imports_torch=True
    ),
    "a parameter twice": _strategy("twice.yaml", "line", "head.weight"),
    "a tab": _strategy("tab.yaml", "line", "tab"),
    "a bracket left open": _strategy("open.yaml", "line"),
    "a word for a count": _strategy("words.yaml", "line", "num_micro_batches"),
    "partial values as storage": _strategy(
        "partial.yaml", "line", "head.weight", "nothing is stored as P", "S(dim), B"
    ),
    "half a strategy": _strategy("cut.yaml", "storage"),
    "not UTF-8": _strategy("not_utf8.yaml", "UTF-8"),
    "an empty strategy": _strategy("empty.yaml", "empty"),
    "a list": _strategy("a_list.yaml", "line 1"),
    "half a JSON file": _strategy("cut.json", "line 1"),
    "another mesh": Mistake(
        command=(
            "sbp_launch.apps.plan",
            *SMALL,
            "planner=file",
            "planner.path=good.yaml",
            "cluster.mesh=[4]",
        ),
        says=("good.yaml", "cluster.mesh=[2,2]"),
    ),
    "other micro-batches": Mistake(
        command=(
            "sbp_launch.apps.plan",
            *SMALL,
            "planner=file",
            "planner.path=good.yaml",
            "trainer.micro_batches=2",
        ),
        says=("good.yaml", "trainer.micro_batches=1"),
        imports_torch=True,
    ),
    # Models, data, pins.
    "images for a language model": _model("data=images", "model=gpt", "data=stdlib"),
    "another task": Mistake(
        command=("sbp_launch.apps.train", "model=bert", "data.task=next"),
        says=("data.task", "masked"),
        imports_torch=True,
    ),
    "a pattern that is not in the model": Mistake(
        command=("sbp_launch.apps.train", "model=llama", "planner=manual/expert_parallel"),
        says=("planner.patterns", "'experts'", "tensor", "planner=auto"),
        imports_torch=True,
    ),
    "a dim that no batch has": _model(
        'planner=manual/custom +planner.pins={batch:{data:"S(9)"}}', "batch", "S(9)"
    ),
    "a pin on nothing": _model(
        "planner=manual/custom +planner.pins={blocks.*.atention.*:{tensor:B}}",
        "atention",
        "attention",
    ),
    "a pin on no axis": _train(
        'planner=manual/custom +planner.pins={batch:{dta:"S(0)"}}', "dta", "data"
    ),
    "gathers of nothing": _model("compile.regather=[blocs.*]", "compile.regather", "blocks"),
    "a limit that nothing meets": _model(
        "planner=osdp cluster.mesh=[4] planner.memory_bytes=1e5",
        "planner.memory_bytes",
        "trainer.micro_batches",
    ),
    "a machine that is too small": _model("cluster.memory_bytes=100000", "cluster.memory_bytes"),
    "a machine that is too small for osdp": _model(
        "planner=osdp cluster.mesh=[4] cluster.memory_bytes=100000", "cluster.memory_bytes >= "
    ),
    # Plugins.
    "a plugin that cannot be imported": _train(
        "planner=mine", "broken-plugin", "no_such_module", plugins="plugins"
    ),
    "a plugin of another age": _train("planner=old", "old-plugin", "99", plugins="plugins_old"),
    "a planner that raises": _model(
        "planner=raising", "raising", "bad-plugin", "no_such_thing", plugins="plugins_bad", code=1
    ),
    "a planner without an answer": _model(
        "planner=silent", "silent", "bad-plugin", "None", plugins="plugins_bad", code=1
    ),
    # The other commands.
    "an operator mistyped": Mistake(
        command=("sbp_torch.signatures", "aten.mn.default", "4x4", "4x4"),
        says=("aten.mm.default",),
        imports_torch=True,
    ),
    "a shape that is none": Mistake(
        command=("sbp_torch.signatures", "aten.mm.default", "4xx4", "4x4"),
        says=("4xx4",),
        imports_torch=True,
    ),
}
