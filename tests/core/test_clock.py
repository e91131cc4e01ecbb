"""The clock of processes that have a time limit."""

import os
import time

from trainworthy.core.base import clock


def test_waiting_for_a_processor_does_not_count(monkeypatch):
    monkeypatch.setattr(clock, "_read", (0, 0.0, 0.0))
    monkeypatch.setattr(clock, "waited", lambda: 100.0)
    before = time.monotonic()
    assert before - 100.0 <= clock.now() <= time.monotonic() - 100.0
    monkeypatch.setattr(clock, "waited", lambda: 200.0)
    assert clock.now() > before - 101.0  # a reading is used again
    time.sleep(clock.FRESH)
    assert clock.now() < before - 190.0


def test_a_fork_reads_its_own(monkeypatch):
    monkeypatch.setattr(clock, "_read", (os.getpid() + 1, time.monotonic(), 1000.0))
    assert clock.now() > time.monotonic() - 900.0


def test_systems_that_do_not_count(tmp_path):
    assert clock.waited(10**9) == 0.0
