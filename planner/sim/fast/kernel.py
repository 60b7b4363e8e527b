"""The fast simulator as machine code: the same events in the same order as `planner.sim.fast.cluster`, to the bit.

It knows one class of KV, no eviction, and the costs of `planner.sim.fast.compiled`. Each function does what the method
of the same name does; comments there hold here. Imported only when runs are simulated, since numba takes long to load.
"""

from __future__ import annotations

import math
from typing import Any

from diptych.kernels.cache import cached
from planner.sim.fast.kernel_data import (
    AT_S,
    BOTH,
    BYTES_PER_S,
    CAPACITY,
    CERTAIN,
    CONTEXT,
    DECODE_ROWS,
    DECODED,
    DUE,
    END_S,
    ENTER,
    EVENT,
    FIRST_BOTH,
    FIRST_DECODE,
    FIRST_S,
    FREE,
    JOINS,
    KIND,
    LATENCY_S,
    MISSED,
    MIXED,
    MOVED,
    MOVED_S,
    NEXT,
    NONE,
    NUM_EVENTS,
    NUM_INSTANCES,
    OUTPUT_STEPS,
    PORT_S,
    PREFILLED,
    PREFILLING,
    PROMPT,
    PULLS,
    QUEUE,
    QUEUED_TOKENS,
    READY_S,
    REQ_BEGAN_S,
    ROLE,
    ROW_S,
    ROWS,
    SEATS,
    SOURCE,
    START,
    STEP,
    STEPS,
    STOP,
    TOKEN_BYTES,
    TOKEN_S,
    TOTAL,
    append,
    drop_top,
    inner,
    pop,
    pop_due,
    schedule,
    stage_s,
    step_s,
)
from planner.sim.fast.kernel_steps import enter_pipeline, kv_needed, release_kv, start_step, wake


@inner
def _count_miss(s: Any, req: Any) -> None:
    """A request misses an SLO: with more misses than `spare` the run's answer is certain."""
    if s.req[req, MISSED] == 0:
        s.req[req, MISSED] = 1
        kind = s.req[req, KIND]
        if kind != NONE:
            s.spare[kind] -= 1
            if s.spare[kind] < 0 and s.now[STOP] == 0:
                s.now[STOP] = CERTAIN


@inner
def _end_request(s: Any, req: Any) -> None:
    now_s, first_s = s.now_s[0], s.req_s[req, FIRST_S]
    s.req_s[req, END_S] = now_s
    kind, steps = s.req[req, KIND], s.req[req, OUTPUT_STEPS]
    tpot_s = (now_s - first_s) / steps if steps > 0 and now_s > first_s else 0.0
    if kind != NONE and not (first_s - s.req_s[req, AT_S] <= s.slo_s[kind, 0] and tpot_s <= s.slo_s[kind, 1]):
        _count_miss(s, req)


@inner
def _decoder_range(s: Any) -> Any:
    """The instances that KV may be sent to: those that only decode, else the colocated ones."""
    if s.now[FIRST_DECODE] < s.now[NUM_INSTANCES]:
        return s.now[FIRST_DECODE], s.now[NUM_INSTANCES]
    return s.now[FIRST_BOTH], s.now[FIRST_DECODE]


@inner
def _needs_decode(s: Any, req: Any) -> Any:
    first, end = _decoder_range(s)
    return s.req[req, OUTPUT_STEPS] > 0 and first < end


@inner
def _can_move(s: Any, req: Any) -> Any:
    if not _needs_decode(s, req):
        return True
    first, end = _decoder_range(s)
    most = 0.0
    for inst in range(first, end):
        most = max(most, s.inst_s[inst, CAPACITY])
    return s.req[req, TOTAL] <= most


@inner
def _dispatch_prompt(s: Any, req: Any) -> None:
    now_s, prompt = s.now_s[0], s.req[req, PROMPT]
    for moment in (REQ_BEGAN_S, FIRST_S, READY_S, MOVED_S):
        s.req_s[req, moment] = now_s
    can_move = _can_move(s, req)
    best, best_s, best_rows_s = NONE, 0.0, 0.0
    for inst in range(s.now[FIRST_DECODE]):
        fits = kv_needed(s, inst, req) <= s.inst_s[inst, CAPACITY]
        if not (fits and (s.inst[inst, ROLE] == BOTH or can_move)):
            continue
        wait_s = (s.inst[inst, QUEUED_TOKENS] + prompt) * s.inst_s[inst, TOKEN_S]
        rows_s = s.inst[inst, SEATS] * s.inst_s[inst, ROW_S]
        if best == NONE or wait_s < best_s or (wait_s == best_s and rows_s < best_rows_s):
            best, best_s, best_rows_s = inst, wait_s, rows_s
    if best != NONE:
        append(s, best, QUEUE, req)
        s.inst[best, QUEUED_TOKENS] += prompt
        wake(s, best)
    elif s.now[FIRST_DECODE] > 0 or not can_move:
        s.req_s[req, FIRST_S], s.req_s[req, END_S] = math.inf, now_s
        _count_miss(s, req)
    else:
        _start_handoff(s, req)


@inner
def _start_handoff(s: Any, req: Any) -> None:
    if not _needs_decode(s, req):
        _end_request(s, req)
        return
    first, end = _decoder_range(s)
    target, least_s = NONE, 0.0
    for inst in range(first, end):
        if s.req[req, TOTAL] <= s.inst_s[inst, CAPACITY]:
            load_s = (s.inst[inst, SEATS] + 1) * s.inst_s[inst, ROW_S]
            if target == NONE or load_s < least_s:
                target, least_s = inst, load_s
    s.inst[target, SEATS] += 1
    append(s, target, PULLS, req)
    _pull_ready(s, target)


@inner
def _pull_ready(s: Any, inst: Any) -> None:
    while s.inst[inst, PULLS] != NONE:
        req = s.inst[inst, PULLS]
        if s.req[req, TOTAL] > s.inst_s[inst, FREE]:
            break
        pop(s, inst, PULLS)
        s.inst_s[inst, FREE] -= s.req[req, TOTAL]
        _start_transfer(s, inst, req)


@inner
def _start_transfer(s: Any, inst: Any, req: Any) -> None:
    now_s, latency_s = s.now_s[0], s.limits[LATENCY_S]
    s.req_s[req, READY_S] = now_s
    taken_s = s.limits[TOKEN_BYTES] * s.req[req, PROMPT] / s.limits[BYTES_PER_S]
    if taken_s + latency_s <= 0:
        _on_moved(s, inst, req)
        return
    source = s.req[req, SOURCE] if s.req[req, SOURCE] != NONE else inst
    begin_s = max(now_s, s.inst_s[inst, PORT_S], s.inst_s[source, PORT_S])
    s.inst_s[inst, PORT_S] = s.inst_s[source, PORT_S] = begin_s + taken_s
    schedule(s, begin_s + taken_s + latency_s, 0, MOVED, inst, req)


@inner
def _on_moved(s: Any, inst: Any, req: Any) -> None:
    s.req_s[req, MOVED_S] = s.now_s[0]
    _start_decode(s, inst, req)
    source = s.req[req, SOURCE]
    if source != NONE:
        release_kv(s, source, kv_needed(s, source, req))


@inner
def _start_decode(s: Any, inst: Any, req: Any) -> None:
    append(s, inst, JOINS, req)
    if s.inst[inst, ROWS] < s.limits[DECODE_ROWS]:
        wake(s, inst)


@inner
def _advance_rows(s: Any, inst: Any, steps: Any, bits: Any) -> None:
    s.inst[inst, STEP] += steps
    s.inst[inst, CONTEXT] += steps * s.inst[inst, ROWS]
    while s.inst[inst, DUE] > 0 and (s.due[inst, 0] >> bits) <= s.inst[inst, STEP]:
        req = pop_due(s, inst) & ((1 << bits) - 1)
        s.inst[inst, ROWS] -= 1
        s.inst[inst, CONTEXT] -= s.req[req, PROMPT] + s.req[req, OUTPUT_STEPS]
        # `FastCluster.on_finished`.
        _end_request(s, req)
        s.inst[inst, SEATS] -= 1
        release_kv(s, inst, s.req[req, TOTAL])
        _pull_ready(s, inst)


@inner
def _finish_prefill(s: Any, inst: Any, req: Any) -> None:
    """The prompts of a chain are prefilled (`FastInstance.finish_prefill`, `FastCluster.on_prefilled`)."""
    now_s = s.now_s[0]
    while req != NONE:
        following, kind = s.req[req, NEXT], s.req[req, KIND]
        s.inst[inst, QUEUED_TOKENS] -= s.req[req, PROMPT]
        s.inst[inst, PREFILLING] -= 1
        for moment in (FIRST_S, READY_S, MOVED_S):
            s.req_s[req, moment] = now_s
        if kind != NONE and now_s - s.req_s[req, AT_S] > s.slo_s[kind, 0]:
            _count_miss(s, req)
        if not _needs_decode(s, req):
            _end_request(s, req)
            release_kv(s, inst, kv_needed(s, inst, req))
        elif s.inst[inst, ROLE] == BOTH:
            s.inst[inst, SEATS] += 1
            _start_decode(s, inst, req)
        else:
            s.req[req, SOURCE] = inst
            _start_handoff(s, req)
        req = following


@inner
def _run_event(s: Any, bits: Any) -> None:
    """Runs the first event."""
    kind, inst, what = s.event[0, 1], s.event[0, 2], s.event[0, 3]
    s.now_s[0] = s.event_s[0]
    drop_top(s)
    if kind == START:
        start_step(s, inst, bits)
    elif kind == DECODED:
        if what == s.inst[inst, EVENT]:
            steps = s.inst[inst, STEPS]
            s.inst[inst, STEPS] = 0
            _advance_rows(s, inst, steps, bits)
            start_step(s, inst, bits)
    elif kind == MIXED:
        if s.inst[inst, ROWS] > 0:
            _advance_rows(s, inst, 1, bits)
        _finish_prefill(s, inst, what)
        start_step(s, inst, bits)
    elif kind == PREFILLED:
        _finish_prefill(s, inst, what)
        start_step(s, inst, bits)
    elif kind == MOVED:
        _on_moved(s, inst, what)
    elif kind == ENTER:
        enter_pipeline(s, inst)
    else:
        _finish_prefill(s, inst, what)


def _run_all(s: Any, order: Any, bits: Any) -> None:
    for req in order:
        at_s = s.req_s[req, AT_S]
        while s.now[NUM_EVENTS] > 0 and s.event_s[0] < at_s and s.now[STOP] == 0:
            _run_event(s, bits)
        if s.now[STOP] != 0:
            return
        s.now_s[0] = at_s
        _dispatch_prompt(s, req)
    while s.now[NUM_EVENTS] > 0 and s.now[STOP] == 0:
        _run_event(s, bits)


run_all = cached(_run_all, error_model="numpy")


def _fill_step_s(row: Any, batches: Any, whole: Any, took_s: Any) -> None:
    """Writes the seconds of each batch (prompt tokens, squares, rows, context), of all stages or of the slowest."""
    for place in range(len(batches)):
        tokens, squares = batches[place, 0], batches[place, 1]
        if whole:
            took_s[place] = step_s(row, tokens, squares, batches[place, 2], batches[place, 3])
        else:
            took_s[place] = stage_s(row, tokens, squares, batches[place, 2], batches[place, 3])


fill_step_s = cached(_fill_step_s, error_model="numpy")
