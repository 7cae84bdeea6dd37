import json
import subprocess
import sys

import numpy as np
import pytest
from released_pipedream import released_stages

from sbp_planner.pipedream import main
from sbp_planner.stages import (
    HierarchyProblem,
    MachineLevel,
    Stage,
    cut_hierarchy,
    evaluate,
    parse_profile,
)


def profile(seed, modules=6):
    """A network with residual branches, two sources and parameters that grow, in shuffled lines."""
    random = np.random.default_rng(seed)
    nodes, edges = ["node0 -- Input0", "node1 -- Embedding"], [("node0", "node1")]

    def add(text, *before):
        name = f"node{len(nodes)}"
        nodes.append(f"{name} -- {text}")
        edges.extend((one, name) for one in before)
        return name

    last, memory = "node1", add("Embedding")
    for at in range(modules):
        first = add("Conv2d(3, 3)", last)
        second = add("BatchNorm2d(3)", first)
        skip = add("Conv2d(1, 1)", last) if random.random() < 0.5 else last
        last = add("Add(inplace)", second, skip, *([memory] if at == 2 else []))
    add("__getitem__(1)", last)
    lines = []
    for at, text in enumerate(nodes):
        forward, backward = random.gamma(2.0, 3.0, 2)
        size = random.integers(1, 50) * 2**20 // (1 + at // 4)
        weights = random.integers(0, 20) * 2**18 * (1 + at)
        lines.append(
            f"{text} -- forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}, "
            f"activation_size={size:.1f}, parameter_size={weights:.3f}"
        )
    lines += [f"\t{one} -- {two}" for one, two in edges]
    random.shuffle(lines)
    return "\n".join(lines)


MACHINES = [((4,), (1e9,)), ((6,), (1e8,)), ((2, 2), (1e9, 1e8)), ((3, 2), (1e10, 1e9))]


@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize(("counts", "rates"), MACHINES)
def test_the_released_optimizer_is_never_better(counts, rates, transfers, straight):
    levels = tuple(
        MachineLevel(components=n, bytes_per_s=rate) for n, rate in zip(counts, rates, strict=True)
    )
    for seed in range(4):
        graph = parse_profile(profile(seed)).graph
        _, stages = released_stages(graph, levels, straight=straight, transfers=transfers)

        plan = cut_hierarchy(HierarchyProblem(graph=graph, levels=levels, replicate=not straight))

        theirs = evaluate(graph, levels, stages).pipeline_s
        assert plan.evaluation.pipeline_s <= theirs * (1 + 1e-12)


def run(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text(profile(7), encoding="utf-8")
    return file


def test_the_answer_holds_every_node_once_and_its_figures_agree(capsys, path):
    words = ("--topology", 2, 3, "--bandwidth", "1e10", "1e9", "--memory", "1.5e9")

    code, out, _ = run(capsys, path, *words)

    answer = json.loads(out)
    assert code == 0
    assert answer["feasible"] is True
    graph = parse_profile(path.read_text(encoding="utf-8")).graph
    stages = answer["stages"]
    nodes = [name for stage in stages for name in stage["nodes"]]
    assert sorted(nodes) == sorted(graph.index)
    assert len(answer["dropped"]) == 2
    assert sum(stage["replicas"] for stage in stages) == 6
    times = [max(max(s["compute_s"], s["sync_s"]) / s["replicas"], s["transfer_s"]) for s in stages]
    assert answer["pipeline_s"] == pytest.approx(max(times))
    assert answer["in_flight"] == [stage["in_flight"] for stage in stages]
    assert answer["memory_bytes"] == [stage["memory_bytes"] for stage in stages]
    assert max(answer["memory_bytes"]) <= 1.5e9
    assert answer["search"]["bound_s"] == answer["pipeline_s"]


def test_straight_stages_have_one_replica_each(capsys, path):
    _, out, _ = run(capsys, path, "--topology", 4, "--bandwidth", "1e9", "--straight")

    assert [stage["replicas"] for stage in json.loads(out)["stages"]] == [1, 1, 1, 1]


def test_memory_that_is_too_small_is_an_answer_with_what_is_needed(capsys, path):
    words = (path, "--topology", 4, "--bandwidth", "1e9")

    code, out, _ = run(capsys, *words, "--memory", "1e6")
    answer = json.loads(out)
    least = answer["least_memory_bytes"]
    _, enough, _ = run(capsys, *words, "--memory", least)
    _, short, _ = run(capsys, *words, "--memory", least - 1)

    assert code == 0
    assert answer["feasible"] is False
    assert answer["data_parallel_fits"] is False
    assert answer["stages"] == []
    assert json.loads(enough)["feasible"] is True
    assert json.loads(short)["feasible"] is False


def test_data_parallelism_is_priced_as_one_stage(capsys, path):
    graph = parse_profile(path.read_text(encoding="utf-8")).graph
    levels = (MachineLevel(components=3, bytes_per_s=1e8),)
    whole = Stage(blocks=tuple(graph.index), replicas=(3,), segment=(0,))

    _, out, _ = run(capsys, path, "--topology", 3, "--bandwidth", "1e8")

    found = evaluate(graph, levels, [whole])
    answer = json.loads(out)
    assert answer["data_parallel_s"] == pytest.approx(found.pipeline_s)
    assert answer["data_parallel_memory_bytes"] == pytest.approx(found.memory_bytes)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_flushed_pipeline_is_cut_for_the_time_of_its_step(capsys, path, schedule):
    words = (path, "--topology", 2, 2, "--bandwidth", "1e9", "1e8", "--schedule", schedule)

    code, out, _ = run(capsys, *words, "--micro-batches", 8, "--memory", "3e9")

    answer = json.loads(out)
    assert code == 0
    stages = answer["stages"]
    assert sum(stage["replicas"] for stage in stages) == 4
    times = [max(s["compute_s"], s["sync_s"]) for s in stages]
    times += [stage["transfer_s"] for stage in stages[:-1]]
    assert answer["pipeline_s"] == pytest.approx(max(times))
    assert answer["step_s"] == pytest.approx(7 * max(times) + sum(times))
    expected = [8] * len(stages) if schedule == "gpipe" else list(range(len(stages), 0, -1))
    assert answer["in_flight"] == expected
    assert max(answer["memory_bytes"]) <= 3e9


def test_a_flushed_pipeline_that_does_not_fit_is_an_answer(capsys, path):
    words = (path, "--topology", 2, "--bandwidth", "1e9", "--micro-batches", 4, "--memory", 1)

    code, out, _ = run(capsys, *words)

    assert code == 0
    assert json.loads(out)["feasible"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--topology", "4", "--bandwidth", "1e9", "--micro-batches", "0"], "micro-batches"),
        (["--topology", "4", "--bandwidth", "1e9", "--micro-batches", "2", "--idle"], "--idle"),
        (["--topology", "4", "--bandwidth", "1e9", "1e9"], "one bandwidth for each level"),
        (["--topology", "0", "--bandwidth", "1e9"], "--topology 0"),
        (["--topology", "4", "--bandwidth", "0"], "--bandwidth 0"),
        (["--topology", "4", "2", "--bandwidth", "1e9", "nan"], "--bandwidth nan"),
        (["--topology", "4", "--bandwidth", "1e9", "--memory", "4 apples"], "is no size"),
        (["--topology", "4", "--bandwidth", "1e9", "--memory", "-1"], "memory"),
        (["--topology", "x", "--bandwidth", "1e9"], "invalid int"),
        (["--bandwidth", "1e9"], "--topology"),
    ],
)
def test_settings_that_cannot_be_are_refused(capsys, path, words, said):
    code, out, err = run(capsys, path, *words)

    assert code == 2
    assert out == ""
    assert said in err


def test_memory_may_have_a_unit(capsys, path):
    words = ["--topology", "4", "--bandwidth", "1e9", "--memory"]

    plain = json.loads(run(capsys, path, *words, "1e9")[1])
    other = json.loads(run(capsys, path, *words, "1GB")[1])

    for answer in (plain, other):
        answer.get("search", {}).pop("seconds", None)
    assert plain == other


def test_a_bad_line_is_named_without_a_traceback(tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text("node1 -- ReLU\n", encoding="utf-8")
    words = [file, "--topology", "2", "--bandwidth", "1e9"]

    done = subprocess.run(
        [sys.executable, "-m", "sbp_planner.pipedream", *words],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "graph.txt:1" in done.stderr
    assert "Traceback" not in done.stderr
