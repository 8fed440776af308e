"""What the benchmark of cancels computes, and that it appends what is real but for the names."""

from __future__ import annotations

from bench import cancel


def test_a_ratio_is_the_median_of_neighbours_ratios() -> None:
    few = [(10.0, 1.0), (100.0, 10.0), (10.0, 1.0)]
    many = [(12.0, 2.0), (110.0, 10.0), (90.0, 3.0)]
    assert cancel.ratios(few, many) == (1.2, 2.0)
    assert cancel.ratios(many, many) == (1.0, 1.0)


def test_entries_get_new_names_and_nothing_else() -> None:
    entries = [b'{"dag":"old","nodes":["a"]}', b'{"dag":"old","sandbox":"sbx-0"}']
    assert cancel._renamed(entries, {"old": "new", "sbx-0": "sbx-1"}) == [
        b'{"dag":"new","nodes":["a"]}',
        b'{"dag":"new","sandbox":"sbx-1"}',
    ]
    assert cancel._renamed(entries, {"other": "new"}) == entries


def test_the_table_has_both_sizes_and_their_ratios() -> None:
    row = {"entries": 7, "takeover_s": 1.0, "cancel_ms": 20.0, "durable_ms": 5.0}
    result = {"holdings": 3, "few": "100", "many": "20000", "100": row, "20000": row}
    lines = cancel.table({**result, "ratio": 1.0, "ratio_durable": 1.1}).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["100", "20000"]
    assert lines[-1] == "many to few: 1.0 to the verdict, 1.1 to durable"
