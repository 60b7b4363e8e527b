"""How an instance works in the compiled fast simulator (`planner.sim.fast.serial`, and `PrefillPipeline`).

Each function does what the method of the same name does, and comments there hold here.
"""

from __future__ import annotations

import math
from typing import Any

from planner.sim.fast.kernel_data import (
    BEGAN_S,
    BOTH,
    BUSY,
    CHUNK_TOKENS,
    CONTEXT,
    DECODE_ROWS,
    DECODED,
    DONE,
    ENTER,
    EVENT,
    FINISH,
    FREE,
    JOINS,
    LAST,
    LIMIT_STEP_S,
    LINE_ERROR,
    MIXED,
    NEXT,
    NONE,
    OUTPUT_STEPS,
    PIPELINE,
    PREFILL,
    PREFILL_TOKENS,
    PREFILLED,
    PREFILLING,
    PROMPT,
    QUEUE,
    REQ_BEGAN_S,
    ROLE,
    ROWS,
    SEATS,
    SLICE_TOKENS,
    SLOPE_S,
    STAGES,
    START,
    STEP,
    STEP_S,
    STEPS,
    TOTAL,
    inner,
    pop,
    push_due,
    schedule,
    stage_s,
    step_s,
)


@inner
def wake(s: Any, inst: Any) -> None:
    """Starts work if the instance is idle, or cuts its run of decode steps."""
    if s.inst[inst, BUSY] == 0:
        s.inst[inst, BUSY] = 1
        schedule(s, s.now_s[0], LAST, ENTER if s.inst[inst, PIPELINE] else START, inst, 0)
    elif s.inst[inst, STEPS] > 1:
        _end_after_current_step(s, inst)


@inner
def _steps_seconds(s: Any, inst: Any, steps: Any) -> Any:
    return steps * s.inst_s[inst, STEP_S] + s.inst_s[inst, SLOPE_S] * (steps * (steps - 1) / 2)


@inner
def _schedule_end(s: Any, inst: Any, steps: Any) -> None:
    s.inst[inst, EVENT] += 1
    end_s = s.inst_s[inst, BEGAN_S] + _steps_seconds(s, inst, steps)
    schedule(s, end_s, 0, DECODED, inst, s.inst[inst, EVENT])


@inner
def _end_after_current_step(s: Any, inst: Any) -> None:
    one_s, slope_s = s.inst_s[inst, STEP_S], s.inst_s[inst, SLOPE_S]
    if one_s <= 0:
        return
    began_s, now_s = s.inst_s[inst, BEGAN_S], s.now_s[0]
    passed_s = now_s - began_s
    base_s = one_s - slope_s / 2
    if slope_s > 1e-12 * one_s:
        root_s = math.sqrt(base_s * base_s + 2 * slope_s * passed_s)
        steps = max(1, math.ceil((root_s - base_s) / slope_s))
    else:
        steps = max(1, math.ceil(passed_s / one_s))
    while steps > 1 and began_s + _steps_seconds(s, inst, steps - 1) >= now_s:
        steps -= 1
    while began_s + _steps_seconds(s, inst, steps) < now_s:
        steps += 1
    if steps < s.inst[inst, STEPS]:
        s.inst[inst, STEPS] = steps
        _schedule_end(s, inst, steps)


@inner
def kv_needed(s: Any, inst: Any, req: Any) -> Any:
    """KV tokens that must be free to begin the prompt."""
    return s.req[req, TOTAL] if s.inst[inst, ROLE] == BOTH else s.req[req, PROMPT]


@inner
def release_kv(s: Any, inst: Any, tokens: Any) -> None:
    """Frees KV memory; prompts may have waited for it."""
    s.inst_s[inst, FREE] += tokens
    if s.inst[inst, QUEUE] != NONE:
        wake(s, inst)


@inner
def _begin_prompt(s: Any, inst: Any, req: Any) -> Any:
    """Reserves memory and notes the begin of prefill; False if memory or a seat is missing."""
    if s.inst[inst, ROLE] == BOTH and s.inst[inst, SEATS] + s.inst[inst, PREFILLING] >= s.limits[DECODE_ROWS]:
        return False
    needed = kv_needed(s, inst, req)
    if needed > s.inst_s[inst, FREE]:
        return False
    s.inst_s[inst, FREE] -= needed
    s.inst[inst, PREFILLING] += 1
    s.req_s[req, REQ_BEGAN_S] = s.now_s[0]
    return True


@inner
def _take_batch(s: Any, inst: Any) -> Any:
    """The first of the chain of prompts that are prefilled together, with their tokens and squares."""
    first, last, tokens, squares = NONE, NONE, 0, 0.0
    while s.inst[inst, QUEUE] != NONE:
        req = s.inst[inst, QUEUE]
        prompt = s.req[req, PROMPT]
        if first != NONE and tokens + prompt > s.limits[PREFILL_TOKENS]:
            break
        if not _begin_prompt(s, inst, req):
            break
        pop(s, inst, QUEUE)
        s.req[req, NEXT] = NONE
        first, last = _extend(s, first, last, req)
        tokens += prompt
        squares += prompt * prompt
    return first, float(tokens), squares


@inner
def _decode_s(s: Any, inst: Any, steps: Any) -> Any:
    rows = s.inst[inst, ROWS]
    context = s.inst[inst, CONTEXT] + steps * rows
    if s.inst[inst, STAGES] > 1:
        parts = min(s.inst[inst, STAGES], rows)
        rows, context = -(-rows // parts), context // parts
    return step_s(s.costs[inst], 0.0, 0.0, float(rows), float(context))


@inner
def _start_decode_steps(s: Any, inst: Any, bits: Any) -> None:
    steps = (s.due[inst, 0] >> bits) - s.inst[inst, STEP]
    first_s = _decode_s(s, inst, 0)
    s.inst_s[inst, STEP_S], s.inst_s[inst, SLOPE_S] = first_s, 0.0
    while steps > 1:
        last = steps - 1
        last_s = _decode_s(s, inst, last)
        slope_s = (last_s - first_s) / last
        s.inst_s[inst, SLOPE_S] = slope_s
        middle = last // 2
        if steps == 2:
            break
        if abs(_decode_s(s, inst, middle) - first_s - slope_s * middle) <= LINE_ERROR * last_s:
            break
        steps = middle + 1 if middle > 1 else 2
    s.inst[inst, STEPS], s.inst_s[inst, BEGAN_S] = steps, s.now_s[0]
    _schedule_end(s, inst, steps)


@inner
def _mixed_s(s: Any, inst: Any, tokens: Any, squares: Any) -> Any:
    rows = s.inst[inst, ROWS]
    parts = max(1, min(s.inst[inst, STAGES], rows))
    context = s.inst[inst, CONTEXT] // parts
    return step_s(s.costs[inst], float(tokens), float(squares), float(-(-rows // parts)), float(context))


@inner
def _fits_step_limit(s: Any, inst: Any, tokens: Any) -> Any:
    done = s.req[s.inst[inst, QUEUE], DONE]
    end = done + tokens
    return _mixed_s(s, inst, tokens, end * end - done * done) <= s.limits[LIMIT_STEP_S]


@inner
def _prompt_budget(s: Any, inst: Any) -> Any:
    limits, rows = s.limits, s.inst[inst, ROWS]
    if s.inst[inst, ROLE] == PREFILL and limits[PREFILL_TOKENS] < math.inf:
        return int(limits[PREFILL_TOKENS])
    low = int(limits[SLICE_TOKENS])
    most = max(low, int(limits[CHUNK_TOKENS]) - -(-rows // s.inst[inst, STAGES]))
    if rows == 0 or limits[LIMIT_STEP_S] == math.inf or _fits_step_limit(s, inst, most):
        return most
    slice_tokens = low
    while most - low > slice_tokens:
        middle = (low + most) // 2
        if _fits_step_limit(s, inst, middle):
            low = middle
        else:
            most = middle
    return low


@inner
def _least_part(s: Any, stages: Any) -> Any:
    least = 0
    for part in range(1, stages):
        if s.parts[part, 0] < s.parts[least, 0] or (
            s.parts[part, 0] == s.parts[least, 0] and s.parts[part, 1] < s.parts[least, 1]
        ):
            least = part
    return least


@inner
def _extend(s: Any, first: Any, last: Any, req: Any) -> Any:
    """The ends of a chain with one more request behind its last one."""
    if first == NONE:
        return req, req
    s.req[last, NEXT] = req
    return first, req


@inner
def _start_mixed(s: Any, inst: Any) -> Any:
    budget, stages = _prompt_budget(s, inst), s.inst[inst, STAGES]
    s.parts[:stages] = 0.0
    over = over_tail = kept = kept_tail = NONE
    while s.inst[inst, QUEUE] != NONE:
        part = _least_part(s, stages)
        tokens = int(s.parts[part, 0])
        if tokens >= budget:
            break
        req = s.inst[inst, QUEUE]
        done, prompt = s.req[req, DONE], s.req[req, PROMPT]
        if done == 0 and not _begin_prompt(s, inst, req):
            break
        cut = min(prompt - done, budget - tokens)
        end = done + cut
        s.parts[part, 0] += cut
        s.parts[part, 1] += end * end - done * done
        s.req[req, DONE] = end
        pop(s, inst, QUEUE)
        s.req[req, NEXT] = NONE
        if end == prompt:
            over, over_tail = _extend(s, over, over_tail, req)
        else:
            kept, kept_tail = _extend(s, kept, kept_tail, req)
    if kept != NONE:
        s.req[kept_tail, NEXT] = s.inst[inst, QUEUE]
        if s.inst[inst, QUEUE] == NONE:
            s.inst[inst, QUEUE + 1] = kept_tail
        s.inst[inst, QUEUE] = kept
    longest_s, any_part = 0.0, False
    for part in range(stages):
        if s.parts[part, 0] > 0.0:
            longest_s = max(longest_s, _mixed_s(s, inst, s.parts[part, 0], s.parts[part, 1]))
            any_part = True
    if any_part:
        schedule(s, s.now_s[0] + longest_s, 0, MIXED, inst, over)
    return any_part


@inner
def start_step(s: Any, inst: Any, bits: Any) -> None:
    """Starts the next step; else the instance is idle."""
    while s.inst[inst, JOINS] != NONE and s.inst[inst, ROWS] < s.limits[DECODE_ROWS]:
        req = pop(s, inst, JOINS)
        ends = s.inst[inst, STEP] + s.req[req, OUTPUT_STEPS]
        push_due(s, inst, (ends << bits) + req)
        s.inst[inst, CONTEXT] += s.req[req, PROMPT]
        s.inst[inst, ROWS] += 1
    if s.inst[inst, QUEUE] != NONE:
        if s.limits[CHUNK_TOKENS] > 0:
            if _start_mixed(s, inst):
                return
        else:
            first, tokens, squares = _take_batch(s, inst)
            if first != NONE:
                took_s = step_s(s.costs[inst], tokens, squares, 0.0, 0.0)
                schedule(s, s.now_s[0] + took_s, 0, PREFILLED, inst, first)
                return
    if s.inst[inst, ROWS] > 0:
        _start_decode_steps(s, inst, bits)
    else:
        s.inst[inst, BUSY] = 0


@inner
def enter_pipeline(s: Any, inst: Any) -> None:
    """Takes a batch, and schedules its end and the next batch."""
    first, tokens, squares = _take_batch(s, inst)
    s.inst[inst, BUSY] = int(first != NONE)
    if first == NONE:
        return
    free_s, now_s, stages = s.free_s[inst], s.now_s[0], s.inst[inst, STAGES]
    whole_s = step_s(s.costs[inst], tokens, squares, 0.0, 0.0)
    first_s = stage_s(s.costs[inst], tokens, squares, 0.0, 0.0)
    other_s = (whole_s - first_s) / (stages - 1)
    for rank in range(stages):
        now_s = free_s[rank] = max(now_s, free_s[rank]) + (other_s if rank else first_s)
    schedule(s, free_s[0], 0, ENTER, inst, 0)
    schedule(s, now_s, 0, FINISH, inst, first)
