"""The data of the compiled fast simulator (`planner.sim.fast.kernel`): arrays, step costs, chains and heaps.

Requests and instances are rows of arrays; lists of requests are chains through `NEXT`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

NONE = -1
# Columns of `State.inst`, an instance's numbers. A chain has a head and a tail.
ROLE, PIPELINE, STAGES, BUSY, STEPS, EVENT = 0, 1, 2, 3, 4, 5
QUEUE, PULLS, JOINS = 6, 8, 10
QUEUED_TOKENS, PREFILLING, SEATS, ROWS, STEP, CONTEXT, DUE = 12, 13, 14, 15, 16, 17, 18
NUM_INST = 19
# Columns of `State.inst_s`, an instance's seconds and tokens of memory.
CAPACITY, FREE, PORT_S, TOKEN_S, ROW_S, BEGAN_S, STEP_S, SLOPE_S = 0, 1, 2, 3, 4, 5, 6, 7
NUM_INST_S = 8
# Columns of `State.req` and `State.req_s`, a request's numbers and moments.
PROMPT, OUTPUT_STEPS, TOTAL, DONE, NEXT, SOURCE, KIND, MISSED = 0, 1, 2, 3, 4, 5, 6, 7
NUM_REQ = 8
AT_S, REQ_BEGAN_S, FIRST_S, READY_S, MOVED_S, END_S = 0, 1, 2, 3, 4, 5
NUM_REQ_S = 6
PREFILL, BOTH, DECODE = 0, 1, 2
START, PREFILLED, DECODED, MIXED, MOVED, ENTER, FINISH = 0, 1, 2, 3, 4, 5, 6
# Columns of a row of costs. Lines of decoding (constant, context, rows) follow from `LINES` on.
ROOFLINE, EXTRA_S, PP, HOP_S, FIXED, WEIGHTS, PRODUCT, LOGIT = 0, 1, 2, 3, 4, 5, 6, 7
SQUARE, CONTEXT_S, TOUCH, SHARED, CROSS, NUM_LINES = 8, 9, 10, 11, 12, 13
ENLARGED, MORE_PREFILL, MORE_DECODE, LINES = 14, 15, 16, 17
SHARPNESS = 4.0
LINE_ERROR = 1e-6
# Columns of `State.limits`.
PREFILL_TOKENS, DECODE_ROWS, CHUNK_TOKENS, LIMIT_STEP_S, SLICE_TOKENS = 0, 1, 2, 3, 4
BYTES_PER_S, LATENCY_S, TOKEN_BYTES = 5, 6, 7
# Columns of `State.now`: numbers of live events and of all, first instance of each role, end, and whether to stop.
NUM_EVENTS, COUNT, FIRST_BOTH, FIRST_DECODE, NUM_INSTANCES, STOP = 0, 1, 2, 3, 4, 5
LAST = 1 << 60
OVERFLOW, CERTAIN = 1, 2


OPTIONS: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class State(NamedTuple):
    """All arrays of a run. `due` and `events` are heaps; `slo_s` holds limits by kind, `spare` allowed misses."""

    inst: Any
    inst_s: Any
    req: Any
    req_s: Any
    costs: Any
    limits: Any
    due: Any
    free_s: Any
    parts: Any
    now: Any
    now_s: Any
    event_s: Any
    event: Any
    slo_s: Any
    spare: Any


def inner(function: Any) -> Any:
    """Compiles `function` into the kernel. No sum is reordered, so results are those of the Python code."""
    return numba.njit(**OPTIONS)(function)


# ---- costs


@inner
def _work_s(row: Any, tokens: Any, squares: Any, rows: Any, context: Any) -> Any:
    if row[ROOFLINE] > 0.0:
        whole = tokens + rows
        if whole == 0.0:
            return 0.0
        reads = 1.0 if tokens > 0.0 else 0.0
        compute = row[PRODUCT] * whole + row[LOGIT] * (rows + reads)
        products = (row[WEIGHTS] ** SHARPNESS + compute**SHARPNESS) ** (1 / SHARPNESS)
        attention = row[SQUARE] * squares + row[CONTEXT_S] * context
        return row[FIXED] + products + attention + row[TOUCH] * whole
    if rows == 0.0:
        return 0.0 if tokens == 0.0 else row[FIXED] + row[PRODUCT] * tokens + row[SQUARE] * squares
    longest, first = 0.0, row[FIXED]
    for line in range(int(row[NUM_LINES])):
        at = LINES + 3 * line
        constant = row[at]
        if tokens > 0.0:
            smaller = constant if constant < first else first
            constant = first + constant - row[SHARED] * smaller
        seconds = constant + row[at + 1] * context + row[at + 2] * rows
        longest = max(longest, seconds)
    if tokens == 0.0:
        return longest
    return longest + (row[PRODUCT] * tokens + row[SQUARE] * squares + row[CROSS] * tokens * rows)


@inner
def _whole_s(row: Any, tokens: Any, squares: Any, rows: Any, context: Any) -> Any:
    work = _work_s(row, tokens, squares, rows, context)
    return (work + row[PP] * row[HOP_S] if row[PP] > 1.0 and work > 0.0 else work) + row[EXTRA_S]


@inner
def _slowest_s(row: Any, tokens: Any, squares: Any, rows: Any, context: Any) -> Any:
    work = _work_s(row, tokens, squares, rows, context)
    return (work / row[PP] + row[HOP_S] if row[PP] > 1.0 and work > 0.0 else work) + row[EXTRA_S]


@inner
def step_s(row: Any, tokens: Any, squares: Any, rows: Any, context: Any) -> Any:
    """Seconds of a step through all stages (`CostModel.step_s`)."""
    whole_s = _whole_s(row, tokens, squares, rows, context)
    if row[ENLARGED] == 0.0:
        return whole_s
    # `planner.placement.enlarged.EnlargedCost`.
    if rows == 0.0:
        return whole_s / row[MORE_PREFILL]
    rows_s = _whole_s(row, 0.0, 0.0, rows, context)
    return rows_s / row[MORE_DECODE] + ((whole_s - rows_s) / row[MORE_PREFILL] if tokens > 0.0 else 0.0)


@inner
def stage_s(row: Any, tokens: Any, squares: Any, rows: Any, context: Any) -> Any:
    """Seconds of a step that only prefills, in its slowest stage (`CostModel.stage_s`)."""
    slowest_s = _slowest_s(row, tokens, squares, rows, context)
    return slowest_s / row[MORE_PREFILL] if row[ENLARGED] > 0.0 else slowest_s


# ---- chains and heaps


@inner
def append(s: Any, inst: Any, chain: Any, req: Any) -> None:
    """Adds a request to the end of an instance's chain."""
    s.req[req, NEXT] = NONE
    if s.inst[inst, chain] == NONE:
        s.inst[inst, chain] = req
    else:
        s.req[s.inst[inst, chain + 1], NEXT] = req
    s.inst[inst, chain + 1] = req


@inner
def pop(s: Any, inst: Any, chain: Any) -> Any:
    """Takes the first request of an instance's chain, which is not empty."""
    req = s.inst[inst, chain]
    s.inst[inst, chain] = s.req[req, NEXT]
    return req


@inner
def _move_event(s: Any, source: Any, target: Any) -> None:
    s.event_s[target] = s.event_s[source]
    for column in range(4):
        s.event[target, column] = s.event[source, column]


@inner
def schedule(s: Any, at_s: Any, order: Any, kind: Any, what: Any, more: Any) -> None:
    """Puts an event into the heap; without room for it the run stops, and is repeated with more."""
    place = s.now[NUM_EVENTS]
    if place >= len(s.event_s):
        s.now[STOP] = OVERFLOW
        return
    s.now[NUM_EVENTS] += 1
    s.now[COUNT] += 1
    key = s.now[COUNT] + order
    while place > 0:
        above = (place - 1) >> 1
        if s.event_s[above] < at_s or (s.event_s[above] == at_s and s.event[above, 0] < key):
            break
        _move_event(s, above, place)
        place = above
    s.event_s[place] = at_s
    s.event[place, 0], s.event[place, 1], s.event[place, 2], s.event[place, 3] = key, kind, what, more


@inner
def drop_top(s: Any) -> None:
    """Removes the first event from the heap."""
    s.now[NUM_EVENTS] -= 1
    count = s.now[NUM_EVENTS]
    at_s, key, place = s.event_s[count], s.event[count, 0], 0
    while 2 * place + 1 < count:
        below = 2 * place + 1
        other = below + 1
        if other < count and (
            s.event_s[other] < s.event_s[below]
            or (s.event_s[other] == s.event_s[below] and s.event[other, 0] < s.event[below, 0])
        ):
            below = other
        if at_s < s.event_s[below] or (at_s == s.event_s[below] and key < s.event[below, 0]):
            break
        _move_event(s, below, place)
        place = below
    _move_event(s, count, place)


@inner
def push_due(s: Any, inst: Any, key: Any) -> None:
    """Notes a row that decodes: its last step, and its number in the lowest bits."""
    heap, place = s.due[inst], s.inst[inst, DUE]
    s.inst[inst, DUE] += 1
    while place > 0 and heap[(place - 1) >> 1] > key:
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    heap[place] = key


@inner
def pop_due(s: Any, inst: Any) -> Any:
    """Takes the row that ends first."""
    heap = s.due[inst]
    s.inst[inst, DUE] -= 1
    count, top, place = s.inst[inst, DUE], heap[0], 0
    key = heap[count]
    while 2 * place + 1 < count:
        below = 2 * place + 1
        if below + 1 < count and heap[below + 1] < heap[below]:
            below += 1
        if key < heap[below]:
            break
        heap[place] = heap[below]
        place = below
    heap[place] = key
    return top
