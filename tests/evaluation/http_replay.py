"""Replays small workloads over HTTP against a fake server with a given behaviour."""

from __future__ import annotations

from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, PromptTokens, WorkloadSpec, make_workload
from evaluation.measure.http import replay_workload
from evaluation.measure.server import connect_server
from tests.evaluation.fake_server import FakeServer


def workload(*rows):
    spec = WorkloadSpec("osc", len(rows))
    lengths = Lengths(spec, "OSC", Origin("fitted", "for tests"), tuple(TraceRow(*row) for row in rows))
    return make_workload(lengths, PromptTokens(100))


def replayed(behave, *rows, **limits):
    """The result of a workload (input, output, arrival) on a server with this behaviour, and the requests it got."""
    with FakeServer(behave) as fake:
        return replay_workload(
            connect_server("fake", fake.url, 60.0), workload(*(rows or [(4, 6, 0.0)])), **limits
        ), fake.requests


def only_record(behave, **limits):
    (record,) = replayed(behave, **limits)[0].records
    return record
