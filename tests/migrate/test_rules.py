# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Each rule's example and each golden case; the tables against what they are about."""

import re
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from devices import DEVICE, VENDOR, needs
from migrate import golden

from apex_npu import compat
from apex_npu.migrate import rewrite
from apex_npu.migrate.files import reports
from apex_npu.migrate.rules import apex
from apex_npu.migrate.rules.catalogue import RULES
from apex_npu.migrate.rules.tables import NPU_PROPERTIES, PROFILER_NAMES, RENAMED, SAME_NAMES, SUBMODULES

CASES = sorted(golden.CASES.glob("*.txt"))


# Rules for files that an example cannot be.
WITHOUT_EXAMPLE = ("F906", "F908", "F909")


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_the_example_of_a_rule(rule):
    assert (rule.example == "") == (rule.id in WITHOUT_EXAMPLE)
    if rule.example:
        rewritten = rewrite(rule.example.encode(), options=rule.options)
        assert rule.id in {finding.rule for finding in rewritten.findings}
        assert rewrite(rewritten.source, options=rule.options).source == rewritten.source


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_golden_case(case):
    assert golden.parts(case) == golden.expected(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_second_run_changes_nothing(case):
    _, after = golden.before_and_after(case)
    assert rewrite(after, options=golden.options_of(after)).source == after


@pytest.mark.parametrize("to", ["npu", "portable"])
def test_unsure_changes_may_follow_later(to):
    for case in CASES:
        before = golden.parts(case)[0]
        sure = replace(golden.options_of(before), to=to, unsure=False)
        every = replace(sure, unsure=True)
        later = rewrite(rewrite(before, options=sure).source, options=every)
        assert later.source == rewrite(before, options=every).source, case


def test_every_rule_has_a_golden_case():
    reported = "".join(golden.parts(case)[2] for case in CASES)
    # Those of --rules are in test_own_rules.py; those of advice have examples.
    assert [rule for rule in RULES if rule[0] not in "FRN" and rule not in reported and rule != "D170"] == []


@needs("names_of_torch_cuda")
def test_names_of_torch_cuda():
    public = set(torch.cuda.__all__)
    assert SAME_NAMES | RENAMED.keys() <= public
    assert {name for name in SUBMODULES if "." not in name} <= public
    if VENDOR:
        import torch_npu

        assert {name for name in SAME_NAMES if not hasattr(torch_npu.npu, name)} == set()
        assert all(hasattr(torch_npu.npu, name) for name in RENAMED.values())


def test_names_that_are_similar():
    assert all(hasattr(torch.cuda.nvtx, name) for name in SUBMODULES["nvtx"])
    for name in PROFILER_NAMES:
        assert name.partition(".")[0] in vars(torch.profiler)
    if VENDOR:
        import torch_npu

        assert all(callable(getattr(torch_npu.npu.mstx, name)) for name in SUBMODULES["nvtx"])
        for name in PROFILER_NAMES.values():
            assert attrgetter(name)(torch_npu.profiler)


def test_names_of_apex_are_read_from_the_sources():
    for old, ours in compat.MODULES.items():
        names = apex.exports(ours)
        module = __import__(ours, fromlist=["x"])
        assert all(hasattr(module, name) for name in names), old


def test_properties_of_an_npu():
    if DEVICE.type == "npu":
        given = torch.npu.get_device_properties(0)
        assert all(getattr(given, name) is not None for name in NPU_PROPERTIES)
        assert getattr(given, "major", None) is getattr(given, "multi_processor_count", None) is None
        assert torch.npu.get_device_capability() is None


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_an_explanation_is_that_of_its_rule(rule):
    text = reports.explanation(rule)
    assert text.splitlines()[0] == f"{rule.id}: {rule.title}"
    assert all(f"    {line}" in text for line in rule.example.splitlines())
    rewritten = rewrite(rule.example.encode(), options=rule.options)
    found, new = rewritten.findings, rewritten.source.decode()
    said = {finding.message for finding in found if finding.rule == rule.id} - {""}
    others = {finding.message for finding in found} - said - {""}
    assert all(message in text for message in said)
    assert not any(message in text for message in others)
    assert ("\nbecomes\n" in text) == any(one.status == "changed" for one in found)
    assert all(f"    {line}" in text for line in new.splitlines())


@pytest.mark.parametrize("family", [("A35", "torch_amp_refused_*.txt"), ("P", "parallel_refused_*.txt")])
def test_explanations_have_more_than_their_example(family):
    prefix, cases = family
    for case in golden.CASES.glob(cases):
        rules = set(re.findall(rf"\b({prefix}\w+) refused", golden.parts(case)[2]))
        assert rules, case
        assert all("It refuses:" in reports.explanation(RULES[rule]) for rule in rules)
    assert "enabled=" in reports.explanation(RULES["A355"])
