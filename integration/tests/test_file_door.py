"""Files that come from elsewhere are opened by one door: `sbp_core.serialize.open_file`.

Each call in the packages that can open a file to read it is looked for in the source. What is no
file from elsewhere stands below, with the reason; what is not needed there any more is found, too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "packages"

#: Methods and functions that open a file by its name, of Python and of libraries.
OPENING = frozenset(
    {
        "open",
        "open_code",
        "fdopen",
        "FileIO",
        "read_text",
        "read_bytes",
        "fromfile",
        "memmap",
        "loadtxt",
        "genfromtxt",
        "mmap",
        "memory_map",
        "ParquetFile",
        "read_table",
        "read_csv",
        "open_csv",
        "read_parquet",
        "safe_open",
        "load_file",
        "load_from_disk",
        "load_dataset",
        "from_file",
        "ZipFile",
        "TarFile",
        "copyfile",
    }
)

#: Modules of which a `load` opens a file; elsewhere it is one of ours.
LOADING = frozenset({"np", "numpy", "torch", "pickle", "json", "yaml", "OmegaConf"})

#: The door, and what is built of it: each names a size.
DOOR = frozenset({"open_file", "read_text", "read_bytes"})

#: Objects whose `open` is no opening of a file of ours by name: transports, actors' registers, and
#: storages of checkpoints, of which the local one goes through the door.
NO_FILES = frozenset(
    {
        "backend",
        "self._backend",
        "self.inner",
        "end",
        "super()",
        "storage",
        "self._storage",
        "staged",
        "archive",
    }
)

PROC = "what the kernel says of processes and memory"
OWN = "a file of the package itself"
NOTHING = "os.devnull"

#: Calls that are no reading of a file from elsewhere, by module; the reason stands behind.
ALLOWED = {
    "sbp_core/processes/membership.py": {
        "(_PROC / 'sys/kernel/random/boot_id').read_text": PROC,
    },
    "sbp_core/processes/reaper.py": {
        "(_PROC / str(process) / 'environ').read_bytes": PROC,
        "(_PROC / str(process) / 'stat').read_text": PROC,
    },
    "sbp_core/machine_memory.py": {
        "(_PROC / 'meminfo').read_text": PROC,
        "_CGROUP.read_text": PROC,
    },
    "sbp_core/output.py": {"os.open": NOTHING},
    "sbp_core/plugins/template.py": {
        "(texts / f'{kind}.py.txt').read_text": OWN,
        "own.read_text": OWN,
    },
    "sbp_core/serialize/file.py": {"os.open": "the door itself", "FileIO": "the door itself"},
    "sbp_launch/checkpoint/durable_files.py": {
        "mmap.mmap": "memory without a file",
        "os.open": "a folder, to flush it",
    },
    "sbp_launch/checkpoint/formats/torch_file.py": {
        "zipfile.ZipFile": "a window of what the door has opened"
    },
    "sbp_launch/checkpoint/folder_storage.py": {"os.open": "a lock that is written"},
    "sbp_launch/checkpoint/objects.py": {
        "self.files.open": "objects of a storage, which has neither pipes nor devices",
        "files.open": "an object that is written",
        "self._storage.files.open": "objects of a storage, which has neither pipes nor devices",
    },
    "sbp_launch/explaining/plan_page.py": {
        "here.joinpath('page.css').read_text": OWN,
        "here.joinpath('page.js').read_text": OWN,
    },
    "sbp_launch/machine.py": {"(_PROC / 'cpuinfo').read_text": PROC},
    "sbp_launch/run/status.py": {"os.open": "a folder, to flush it"},
    "sbp_launch/settings/catalog.py": {
        "file.read_bytes": "a file in the archive of a package",
        "yaml.load": "a text, with the safe loader",
    },
    "sbp_models/click_files.py": {
        "parquet.ParquetFile": "the descriptor of what the door has opened",
        "library_csv.open_csv": "what the door has opened",
    },
    "sbp_models/hf_dataset.py": {
        "mmap.mmap": "what the door has opened",
        "datasets.load_from_disk": "the library opens files itself, of kinds looked at before",
    },
    "sbp_models/pictures.py": {"self._image.open": "bytes that the door has read"},
    "sbp_models/record_cache.py": {
        "np.memmap": "what the door has opened",
        "os.open": "a folder, to flush it",
    },
    "sbp_models/webdataset.py": {"tarfile.open": "what the door has opened"},
    "sbp_planner/choice/__main__.py": {"Path('/proc/self/stat').read_text": PROC},
    "sbp_planner/choice/program.py": {"os.open": NOTHING},
    "sbp_planner/choice/large/worker.py": {
        "os.fdopen": "the output of this process",
        "pickle.load": "a pipe to a process that this one has started",
    },
    "sbp_torch/result_file.py": {"os.fdopen": "a file that is written"},
    "sbp_torch/runtime/devices.py": {"mmap.mmap": "memory without a file"},
    "sbp_torch/signatures/isolate.py": {
        "os.open": NOTHING,
        "Path('/proc/self/statm').read_text": PROC,
    },
}


def opened(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each call that can open a file to read it, other than the door."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        parent, _, name = called.rpartition(".")
        # `read_text(path)` is the door's; `path.read_text()` is not.
        is_door = parent in ("", "serialize") and name in DOOR
        is_loading = name in ("load", "full_load", "unsafe_load") and parent in LOADING
        if is_door or not (name in OPENING or is_loading):
            continue
        if name == "open" and (parent in NO_FILES or _writes(node, of_path=parent != "")):
            continue
        yield node.lineno, called


def _writes(call: ast.Call, *, of_path: bool) -> bool:
    """Whether a call of `open` names a mode in which nothing is read."""
    given = [*call.args[0 if of_path else 1 :][:1]]
    given += [word.value for word in call.keywords if word.arg == "mode"]
    modes = [one.value for one in given if isinstance(one, ast.Constant)]
    return any(isinstance(mode, str) and mode[:1] in ("w", "a", "x") for mode in modes)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGES.glob("*/src/**/*.py")):
        name = path.relative_to(PACKAGES).as_posix().partition("/src/")[2]
        if not name.startswith("sbp_core/testing/"):  # suites of plugins' tests
            yield name, path


def test_files_from_elsewhere_are_opened_by_the_door() -> None:
    others = [
        f"{path}:{line}: {called}"
        for name, path in modules()
        for line, called in opened(ast.parse(path.read_text("utf-8")))
        if called not in ALLOWED.get(name, {})
    ]

    assert not others, "open_file, read_text or read_bytes of sbp_core.serialize opens files"


def test_what_is_allowed_to_open_files_does() -> None:
    found = {
        (name, called)
        for name, path in modules()
        for _, called in opened(ast.parse(path.read_text("utf-8")))
    }

    assert {(name, called) for name, calls in ALLOWED.items() for called in calls} <= found


def test_openings_are_found_and_writing_is_none() -> None:
    text = """
open("a"); open("b", "w"); path.open("rb"); path.open("x"); Path("c").read_text(); read_text(path)
np.load("d"); cluster.load("e"); os.open("f", flags); path.open(mode="a"); backend.open(ranks)
"""

    assert [called for _, called in opened(ast.parse(text))] == [
        "open",
        "path.open",
        "Path('c').read_text",
        "np.load",
        "os.open",
    ]
