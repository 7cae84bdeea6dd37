import json
from itertools import product
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_planner.osdp_tables import BlockTables, main, plan_setting, read_tables

#: Published with OSDP (Youhe-Jiang/OptimalShardedDataParallel), measured on 8 GPUs.
PATH = Path(__file__).with_name("data") / "osdp_block_tables.json"


def counts(layers, modes):
    """Return all ways to divide layers among modes, int (ways, modes)."""
    if modes == 1:
        return np.array([[layers]])
    grid = np.indices((layers + 1,) * (modes - 1)).reshape(modes - 1, -1).T
    grid = grid[grid.sum(axis=1) <= layers]
    return np.concatenate([layers - grid.sum(axis=1, keepdims=True), grid], axis=1)


def best_of_all(tables, layers, hidden, limit_mb, whole_mb=True):
    """Return the least seconds of each row, infinite where nothing fits."""
    at = tables.hidden.index(hidden)
    ways = counts(layers, len(tables.time_s[at][0]))
    found = []
    for seconds, sizes in zip(tables.time_s[at], tables.mem_mb[at], strict=True):
        sizes = np.trunc(sizes) if whole_mb else np.array(sizes)
        fits = ways @ sizes + tables.overhead_mb <= limit_mb
        found.append(min((ways[fits] @ np.array(seconds)).tolist(), default=inf))
    return found


def check_against_all(tables, layers, hidden, limit_mb, whole_mb=True):
    expected = best_of_all(tables, layers, hidden, limit_mb, whole_mb)

    plan = plan_setting(tables, layers=layers, hidden=hidden, limit_mb=limit_mb, whole_mb=whole_mb)

    assert [row.seconds or inf for row in plan.rows] == pytest.approx(expected)
    rates = [row / seconds for row, seconds in enumerate(expected)]
    assert plan.feasible is (max(rates) > 0)
    if plan.feasible:
        assert rates[plan.best_row] == pytest.approx(max(rates))
        released = min((1, 2, 3), key=lambda row: expected[row])
        if expected[released] == inf:
            assert plan.released_row is None
        else:
            assert plan.released_row == released
            assert plan.gain == pytest.approx(max(rates) / rates[released])


@pytest.mark.parametrize("limit_mb", [3_000, 8_192])
@pytest.mark.parametrize("layers", [1, 13, 24])
def test_the_published_tables_are_solved_to_the_optimum(layers, limit_mb):
    tables = read_tables(PATH)

    for hidden in tables.hidden:
        check_against_all(tables, layers, hidden, limit_mb)


@pytest.mark.exhaustive
@pytest.mark.parametrize("limit_mb", [8_192, 16_384])
@pytest.mark.parametrize("layers", [8, 12, 24, 48, 96])
def test_the_whole_grid_is_solved_to_the_optimum(layers, limit_mb):
    tables = read_tables(PATH)

    for hidden, whole_mb in product(tables.hidden, (True, False)):
        check_against_all(tables, layers, hidden, limit_mb, whole_mb)


costs = st.integers(0, 300).map(lambda value: value / 8)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 4).flatmap(
        lambda modes: st.lists(
            st.tuples(*[st.lists(costs, min_size=modes, max_size=modes)] * 2),
            min_size=4,
            max_size=5,
        )
    ),
    st.integers(1, 7),
    st.integers(0, 200),
    st.booleans(),
)
def test_random_tables_are_solved_to_the_optimum(rows, layers, limit_mb, whole_mb):
    tables = BlockTables(
        hidden=(7,),
        time_s=(tuple(tuple(1 + value for value in seconds) for seconds, _ in rows),),
        mem_mb=(tuple(tuple(sizes) for _, sizes in rows),),
        overhead_mb=5.0,
    )

    check_against_all(tables, layers, 7, limit_mb, whole_mb)


def test_the_best_batch_is_the_one_with_most_samples_a_second_not_with_the_shortest_step():
    tables = BlockTables(
        hidden=(8,),
        time_s=(((0.5,), (1.0,), (1.5,), (4.0,), (9.0,)),),
        mem_mb=(((1.0,),) * 5,),
        overhead_mb=0.0,
    )

    plan = plan_setting(tables, layers=2, hidden=8, limit_mb=2)

    assert (plan.best_row, plan.released_row) == (2, 1)
    assert plan.gain == pytest.approx(4 / 3)
    assert plan.rows[2].throughput == pytest.approx(192 / 3.0)
    assert plan.rows[3].relative_throughput == pytest.approx(288 / 8.0 / 64)


def test_what_is_cut_off_can_be_counted():
    tables = BlockTables(
        hidden=(8,), time_s=(((1.0,),) * 2,), mem_mb=(((1.9,),) * 2,), overhead_mb=0
    )

    cut, whole = (
        plan_setting(tables, layers=10, hidden=8, limit_mb=12, whole_mb=whole_mb)
        for whole_mb in (True, False)
    )

    assert cut.feasible
    assert (cut.rows[1].memory_mb, cut.rows[1].measured_mb) == (10, pytest.approx(19))
    assert not whole.feasible


def run(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.slow
def test_the_authors_plan_of_48_layers_is_printed(capsys):
    words = ("--layers", 48, "--hidden", 1536)

    code, out, _ = run(capsys, PATH, *words, "--limit-mb", 8192)
    _, in_bytes, _ = run(capsys, PATH, *words, "--limit", 8192 * 2**20)
    assert run(capsys, PATH, *words, "--limit", "8GiB")[1] == in_bytes

    answer = json.loads(out)
    assert code == 0
    assert answer["best_row"] == 1
    assert answer["rows"][1]["modes"] == [0, 2, 46, 0]
    assert answer["rows"][1]["memory_mb"] == 8104
    assert in_bytes == out


def test_a_grid_is_printed_with_a_summary(capsys):
    code, out, _ = run(capsys, PATH, "--layers", 8, 12, "--limit-mb", 8192, 16384)

    answer = json.loads(out)
    assert code == 0
    assert answer["num_settings"] == 2 * 8 * 2
    assert answer["num_feasible"] == 14 + 13
    assert answer["num_feasible"] == sum(one["feasible"] for one in answer["settings"])


def test_nothing_that_fits_is_an_answer(capsys):
    code, out, _ = run(capsys, PATH, "--layers", 96, "--hidden", 8192, "--limit-mb", 8192)

    answer = json.loads(out)
    assert code == 0
    assert answer["feasible"] is False
    assert answer["best_row"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hidden", "1000"], "512, 1024"),
        (["--layers", "0"], "0 layers"),
        (["--limit", "1", "--limit-mb", "1"], "not allowed"),
    ],
)
def test_settings_that_cannot_be_are_refused(capsys, words, said):
    code, out, err = run(capsys, PATH, *words)

    assert (code, out) == (2, "")
    assert said in err


GOOD = {"hidden": [8], "time_s": [[[1, 2], [1, 2]]], "mem_MB": [[[1, 2], [1, 2]]], "overhead_MB": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({**GOOD, "hidden": [8, 9]}),
        json.dumps({**GOOD, "hidden": []}),
        json.dumps({**GOOD, "time_s": [[[1, 2]]]}),
        json.dumps({**GOOD, "time_s": [[[1, -2], [1, 2]]]}),
        json.dumps({**GOOD, "time_s": [[[1], [1, 2]]], "mem_MB": [[[1], [1, 2]]]}),
        json.dumps({**GOOD, "mem_MB": 4}),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, text):
    path = tmp_path / "tables.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(SbpValueError, match=r"tables|rows") as caught:
        read_tables(path)

    assert caught.value.where == (str(path),)
    with pytest.raises(SbpValueError, match="cannot read"):
        read_tables(tmp_path / "none.json")


def test_a_good_file_is_read(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(GOOD), encoding="utf-8")

    assert read_tables(path).mem_mb == (((1.0, 2.0), (1.0, 2.0)),)
