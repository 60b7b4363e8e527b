"""Lengths of requests whose rates `closed_form` knows, and a policy."""

from __future__ import annotations

from planner.replan.decide import ReplanPolicy
from planner.replan.traffic_windows import LengthMix, bin_of

# Short prompts, long answers: 10 requests/s per prefill worker, 1.56 per decode worker.
SHORT = LengthMix((("", bin_of(100), bin_of(64), 1.0),))
# Long prompts, short answers: 0.98 requests/s per prefill worker, 3.1 per decode worker.
LONG = LengthMix((("", bin_of(1024), bin_of(32), 1.0),))
POLICY = ReplanPolicy(budget=8)
