"""Tests that hold real time against a bound: a machine that stands still for a moment fails one run of them, what is
slow or late by construction fails every run."""

import pytest

real_time = pytest.mark.flaky(reruns=2)
