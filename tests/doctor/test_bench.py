# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``bench``: its figures are those of ``benchmarks``, and it prints what it measures; nothing depends on time."""

import goals
import pytest
import torch
from rounds import RESULTS, read_csv

from apex_npu.__main__ import main
from apex_npu.doctor import bench
from apex_npu.doctor.rounds import Spread


def test_the_published_figures_are_those_of_the_benchmarks():
    table = read_csv(RESULTS / "goals_cpu.csv")
    assert read_csv(bench.PUBLISHED) == goals.published(table)
    assert len(bench.comparisons()) == 10


@pytest.mark.parametrize("rule", bench.RULES)
def test_all_variants_compute_the_same(rule):
    results = []
    for make in bench.RULES[rule].variants().values():
        params = bench._params([(3, 4), (5,)])
        optimizer = make(params)
        optimizer.step()
        optimizer.step()
        results.append(params)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_fastest_of_each_round_counts():
    times = {"apex_npu": [1.0, 2.0], "torch for-loop": [4.0, 6.0], "torch foreach": [3.0, 8.0], "timm": [0.1, 0.1]}
    assert bench.ratios(times, "torch *") == [3.0, 3.0]
    assert bench.ratios(times, "torch foreach") == [3.0, 4.0]


@pytest.fixture
def measured(monkeypatch):
    """Instead of time: the ratio of each round of every comparison."""

    def times(rule, shapes, patterns, budget_s):
        return {"apex_npu": [1.0] * 4} | {name: list(measured.ratios) for name in rule.variants() if name != "apex_npu"}

    monkeypatch.setattr(bench, "_times", times)
    measured.ratios = [10.0] * 4
    return measured


def test_measured_and_published_ratios_are_printed_with_the_machine_of_the_published(measured, capsys):
    threads = torch.get_num_threads()
    measured.ratios = [0.5, 0.5, 0.5, 0.5]  # slower than published: figures of another machine are no goals
    assert main(["bench", "--only", "AdamW, small"]) == 0
    out = capsys.readouterr().out
    (row,) = [
        row
        for row in read_csv(RESULTS / "goals_cpu.csv")
        if (row["comparison"], row["workload"]) == ("step of AdamW", "small2000")
    ]
    median, low, high = (f"{float(row[name]):.2f}" for name in ("median", "low", "high"))
    line = (
        f"step of AdamW, small2000: apex_npu / torch fused  0.50 (0.50 .. 0.50), published {median} ({low} .. {high})\n"
    )
    assert line in out
    assert f"Published: {row['processor']}, one thread, commit {row['commit']}, torch {row['torch']}.\n" in out
    assert not any(word in out for word in ("goal", "missed"))
    assert torch.get_num_threads() == threads


def test_without_the_extension_it_says_so(measured, monkeypatch, capsys):
    from apex_npu import _extension

    monkeypatch.setattr(_extension, "extension", None)
    main(["bench", "--only", "Adadelta, small"])
    assert "The published figures were measured with the C++ extension" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "Lion"], "--only Lion: no comparison has this in its name:\nstep of SGD"),
        (["--seconds", "0"], "--seconds 0"),
    ],
)
def test_bad_arguments(arguments, words, capsys):
    assert main(["bench", *arguments]) == 2
    assert f" bench: error: {words}" in capsys.readouterr().err


def test_steps_are_measured(monkeypatch):
    monkeypatch.setitem(bench.WORKLOADS, "small2000", lambda: [(4, 4), (4,)])
    comparison = bench.Comparison("SGD", "small2000", "torch *", Spread(1.0, 1.0, 1.0), "")
    ((measured, here),) = bench.measure([comparison], 0.0)
    assert measured is comparison
    assert 0.0 < here.low <= here.middle <= here.high
