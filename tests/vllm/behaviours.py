"""What every engine behind an `EnginePort` does: one suite, run on vLLM (`test_behaviours`) and on the toy port.

Each behaviour gets a `Rig` at rest, and leaves it at rest. Tokens are compared with those of the same engine without a
hand-off, prefix cache or company.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from diptych.request import Grammar
from engine.sequence import Sequence, SequenceRefused
from tests.vllm.rig import Answer, Rig, greedy
from vllm_worker.port import SavedKv

SCOPE, OTHER_SCOPE = b"\x01" * 32, b"\x02" * 32


def expect_refusal(call: Callable[[], object], code: str) -> None:
    """`call` must be refused with this code."""
    try:
        call()
    except SequenceRefused as refusal:
        assert refusal.code == code, f"{refusal.code} instead of {code}: {refusal.what}; {refusal.why}"
        assert refusal.what
        return
    raise AssertionError(f"it was not refused with {code}")


# ---- tokens


def tokens_are_those_of_one_engine(rig: Rig) -> None:
    """Prompts of many lengths, handed over, continue exactly."""
    longest = min(1500, rig.port.facts.max_model_len - 40)
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 200, 511, 512, 513, 1000, longest]
    for length in [one for one in lengths if one <= longest]:
        prompt = rig.prompt(length, seed=length)
        alone = rig.run(prompt, greedy(12))
        moved = rig.hand_over(prompt, greedy(12))
        assert moved.tokens == alone.tokens, f"{length} tokens"
        assert moved.finish == alone.finish == "length"


def deferred_first_tokens_are_the_same(rig: Rig) -> None:
    """The prefill attempt reports no token, and the decode attempt draws it, with seeds, penalties and grammars."""
    kinds = {"greedy": greedy(10)}
    if "seed" in rig.traits:
        kinds["seed"] = greedy(10, temperature=0.9, top_p=0.95, seed=77)
    if "penalties" in rig.traits:
        kinds["penalties"] = greedy(10, presence_penalty=1.5, frequency_penalty=0.5)
    if "grammar" in rig.traits:
        kinds["grammar"] = greedy(20, grammar=Grammar("regex", "[a-z]{3} [0-9]{4}"))
    for number, (name, sampling) in enumerate(kinds.items()):
        for length in (1, 64, 100, 128):
            prompt = rig.prompt(length, seed=500 + number)
            alone = rig.run(prompt, sampling)
            moved = rig.hand_over(prompt, sampling, defer_first=True)
            assert moved.outputs[0].tokens == [], "the first output has no token"
            assert moved.tokens == alone.tokens, f"{name}, {length} tokens"


def company_changes_nothing(rig: Rig) -> None:
    """Answers beside others are those alone."""
    prompts = [rig.prompt(20 + 30 * i, seed=900 + i) for i in range(8)]
    alone = [rig.run(prompt, greedy(16)).tokens for prompt in prompts]
    answers = [rig.add(rig.sequence(prompt, greedy(16))) for prompt in prompts]
    rig.drive()
    assert [answer.tokens for answer in answers] == alone


def delivered_output_is_continued(rig: Rig) -> None:
    """An answer goes on from tokens that another worker delivered, within the request's own limits."""
    prompt = rig.prompt(90, seed=31)
    whole = rig.run(prompt, greedy(20, repetition_penalty=1.3, min_tokens=12))
    begun = whole.tokens[:7]
    rest = rig.run(prompt, greedy(20, repetition_penalty=1.3, min_tokens=12), output=begun)
    assert begun + rest.tokens == whole.tokens
    assert rest.finish == whole.finish


def seeds_are_repeated_or_refused(rig: Rig) -> None:
    """The same seed gives the same tokens, alone and beside others; where it would end vLLM, it is refused in words."""
    prompts = [rig.prompt(length, seed=35) for length in (30, 300, 900)]
    drawn = greedy(10, temperature=0.8, seed=5)
    if not rig.port.facts.chunks_seeded:
        for prompt in prompts:
            sequence = rig.sequence(prompt, drawn)
            expect_refusal(lambda seq=sequence: rig.add(seq), "unsupported_parameter")  # type: ignore[misc]
        # The client gave no seed, so any noise will do.
        free = rig.run(prompts[-1], greedy(10, temperature=0.8, seeded=False))
        assert len(free.tokens) == 10
        return
    if "seed" not in rig.traits:
        return
    alone = [rig.run(prompt, drawn).tokens for prompt in prompts]
    beside = [rig.add(rig.sequence(prompt, drawn)) for prompt in prompts]
    rig.drive()
    assert [answer.tokens for answer in beside] == alone
    assert rig.run(prompts[0], greedy(10, temperature=0.8, seed=6)).tokens != alone[0]


# ---- ends


def answers_end_where_they_should(rig: Rig) -> None:
    """At a stop token, at the limit, and at the end of the context."""
    prompt = rig.prompt(70, seed=41)
    free = rig.run(prompt, greedy(12))
    stop = free.tokens[5]
    place = free.tokens.index(stop)
    stopped = rig.run(prompt, greedy(12, stop_token_ids=(stop,)))
    assert (stopped.tokens, stopped.finish) == (free.tokens[: place + 1], "stop")
    assert (len(free.tokens), free.finish) == (12, "length")
    longest = rig.port.facts.max_model_len
    full = rig.run(rig.prompt(longest - 5, seed=42), greedy(50))
    assert (len(full.tokens), full.finish) == (5, "length")
    later = rig.run(prompt, greedy(12, stop_token_ids=(stop,), min_tokens=place + 2))
    assert stop not in later.tokens[: place + 1], "no stop token before min_tokens"


def what_ends_at_once_is_not_saved(rig: Rig) -> None:
    """A prefill attempt whose only token is its last, or a stop, leaves no KV behind."""
    prompt = rig.prompt(80, seed=51)
    one = rig.run(prompt, greedy(1), hold_kv=True)
    assert (len(one.tokens), one.finish) == (1, "length")
    stop = rig.run(prompt, greedy(9, stop_token_ids=(one.tokens[0],)), hold_kv=True)
    assert (stop.tokens, stop.finish) == (one.tokens, "stop")
    assert not rig.saved


def prompts_are_scored(rig: Rig) -> None:
    """Log-probabilities of tokens and of prompts; with no token wanted, only those."""
    if "logprobs" not in rig.traits:
        return
    prompt = rig.prompt(75, seed=61)
    scored = rig.run(prompt, greedy(0, prompt_logprobs=2))
    first = scored.outputs[0]
    assert (scored.tokens, scored.finish) == ([], "length")
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(prompt)
    assert first.prompt_logprobs[0] is None
    assert [one.token for one in first.prompt_logprobs[1:] if one] == prompt[1:]
    answer = rig.run(prompt, greedy(4, logprobs=2))
    for output, token in zip(answer.outputs, answer.tokens, strict=True):
        assert output.logprobs is not None and output.logprobs[0].token == token
        assert output.logprobs[0].top[0][0] == token, "a greedy token is the most likely one"
        assert len(output.logprobs[0].top) == 2


def grammars_are_obeyed(rig: Rig) -> None:
    """All kinds of grammar shape the answer, and end it."""
    if "grammar" not in rig.traits:
        return
    schema = (
        '{"type":"object","properties":{"a":{"enum":[1,2]}},"required":["a"],"additionalProperties":false}'
    )
    for grammar in (
        Grammar("json_schema", schema),
        Grammar("regex", "[0-9]{2}-[0-9]{2}"),
        Grammar("lark", 'start: "yes" | "no"'),
    ):
        answer = rig.run(rig.prompt(30, seed=71), greedy(60, grammar=grammar))
        assert answer.finish == "stop", f"{grammar.kind} ended with {answer.finish}, {answer.failed}"
    free = rig.run(rig.prompt(30, seed=71), greedy(15, grammar=Grammar("json_object")))
    assert free.tokens and free.failed is None
    expect_refusal(
        lambda: rig.add(rig.sequence([7, 8], greedy(9, grammar=Grammar("lark", "start: (")))),
        "invalid_grammar",
    )


# ---- aborts


def aborts_free_everything(rig: Rig) -> None:
    """In each phase: waiting, prefilling, decoding, being saved, about to be loaded, decoding after a load."""
    prompt = rig.prompt(300, seed=81)

    def begin(hold_kv: bool = False) -> tuple[Sequence, Answer]:
        seq = rig.sequence(prompt, greedy(50), hold_kv=hold_kv)
        return seq, rig.add(seq)

    def begin_load() -> tuple[Sequence, Answer]:
        kept, answer = begin(hold_kv=True)
        rig.drive()
        _, saved = rig.saved.pop(kept.key)
        seq = rig.sequence(prompt, greedy(50), output=answer.tokens)
        return seq, rig.adopt(seq, saved)

    def end(phase: str, seq: Sequence, answer: Answer) -> None:
        outputs = len(answer.outputs)
        assert [one.key for one in rig.engine.abort(seq.id, seq.epoch)] == [seq.key], phase
        rig.drive()
        assert len(answer.outputs) == outputs and answer.failed is None, f"{phase}: something was emitted"
        try:
            rig.check_rest()
        except AssertionError as error:
            raise AssertionError(f"{phase}: {error}") from error

    end("waiting", *begin())
    prefilling = begin()
    rig.step()
    end("prefilling", *prefilling)
    decoding = begin()
    rig.step_until(lambda: len(decoding[1].tokens) >= 3)
    end("decoding", *decoding)
    saving = begin(hold_kv=True)
    rig.step_until(lambda: bool(saving[1].tokens))
    assert saving[0].key not in rig.saved, "KV is copied in the step after"
    end("being saved", *saving)
    end("about to be loaded", *begin_load())
    loaded = begin_load()
    rig.step_until(lambda: len(loaded[1].tokens) >= 2)
    end("decoding after a load", *loaded)


def newer_attempts_survive_aborts(rig: Rig) -> None:
    """An abort ends its epoch and older ones, and no newer one."""
    old = rig.sequence(rig.prompt(40, seed=85), greedy(8))
    rig.add(old)
    new = rig.sequence(rig.prompt(40, seed=85), greedy(8))
    new.id, new.epoch, new.key = old.id, 2, f"{old.id}#2"
    answer = rig.add(new)
    assert [seq.key for seq in rig.engine.abort(old.id, 1)] == [old.key]
    rig.drive()
    assert len(answer.tokens) == 8


def deadlines_end_sequences(rig: Rig) -> None:
    """A sequence whose time is up fails, wherever it is; the others go on."""
    late = rig.add(rig.sequence(rig.prompt(50, seed=91), greedy(500), seconds=0.05))
    fine = rig.add(rig.sequence(rig.prompt(50, seed=92), greedy(20)))
    gone = rig.add(rig.sequence(rig.prompt(50, seed=93), greedy(5), seconds=-1.0))
    time.sleep(0.06)
    rig.drive()
    assert late.failed == gone.failed == "deadline_exceeded"
    assert (len(fine.tokens), fine.finish) == (20, "length")


# ---- caches and memory


def prefixes_are_shared_within_a_scope(rig: Rig) -> None:
    """A prompt that was computed before is cached for its scope, and for no other; tokens stay the same."""
    rig.port.clear_prefixes()
    prompt = rig.prompt(200, seed=101)
    first = rig.run(prompt, greedy(6), scope=SCOPE)
    again = rig.run(prompt, greedy(6), scope=SCOPE)
    other = rig.run(prompt, greedy(6), scope=OTHER_SCOPE)
    alone = rig.run(prompt, greedy(6))
    assert (first.cached_tokens, again.cached_tokens) == (0, 192)
    assert other.cached_tokens == alone.cached_tokens == 0
    assert first.tokens == again.tokens == other.tokens == alone.tokens
    stats = rig.engine.stats
    assert stats.prefix_hits >= 192 and stats.prefix_queries >= 800
    # What is cached need not be loaded, and what is loaded is cached.
    assert rig.hand_over(prompt, greedy(6), scope=SCOPE).tokens == first.tokens
    rig.port.clear_prefixes()
    fresh = rig.prompt(200, seed=102)
    moved = rig.hand_over(fresh, greedy(6), scope=OTHER_SCOPE)
    warm = rig.run(fresh, greedy(6), scope=OTHER_SCOPE)
    assert warm.cached_tokens == 192 and warm.tokens == moved.tokens


def preempted_sequences_go_on(rig: Rig) -> None:
    """More sequences than the blocks hold: some are preempted, and all answers are as they would be alone."""
    blocks, before = rig.port.facts.num_blocks, rig.engine.stats.preemptions.get("recompute", 0)
    # Each begins with one block and needs a quarter of all.
    length = 64 * (blocks // 4)
    assert length < rig.port.facts.max_model_len, "the rig has too many blocks to preempt in reasonable time"
    prompts = [rig.prompt(40, seed=110 + i) for i in range(7)]
    answers = [rig.add(rig.sequence(prompt, greedy(length - 40))) for prompt in prompts]
    rig.drive()
    assert rig.engine.stats.preemptions.get("recompute", 0) > before, "nothing was preempted"
    for prompt, answer in zip(prompts[:2] + prompts[-2:], answers[:2] + answers[-2:], strict=True):
        assert answer.tokens == rig.run(prompt, greedy(length - 40)).tokens


def failed_loads_can_be_retried(rig: Rig) -> None:
    """KV that cannot be loaded ends its request, which may be served elsewhere, and no other one gets that KV."""
    prompt = rig.prompt(260, seed=121)
    longer = prompt + rig.prompt(140, seed=122)
    alone, longer_alone = rig.run(prompt, greedy(8)), rig.run(longer, greedy(8))
    first = rig.sequence(prompt, greedy(8), hold_kv=True)
    begun = rig.add(first)
    rig.drive()
    _, saved = rig.saved.pop(first.key)
    second = rig.sequence(prompt, greedy(8), output=begun.tokens, scope=SCOPE)
    # A slab is missing from the plan.
    short = SavedKv(saved.key, saved.slabs[:-1], saved.num_tokens)
    rest = rig.adopt(second, short)
    # These find the blocks of the load under its prefix, in the same step or later.
    beside = [rig.add(rig.sequence(longer, greedy(8), scope=SCOPE)) for _ in range(2)]
    rig.drive()
    rig.buffer.give_back(saved.slabs[-1:], saved.key)
    assert rig.failed_loads.pop() == second.key
    assert (rest.failed, rest.tokens) == ("transfer_failed", [])
    for answer in beside:
        assert answer.failed == "transfer_failed" or answer.tokens == longer_alone.tokens
    again = rig.run(prompt, greedy(8), output=begun.tokens, scope=SCOPE)
    assert begun.tokens + again.tokens == alone.tokens
    for _ in range(2):
        assert rig.run(longer, greedy(8), scope=SCOPE).tokens == longer_alone.tokens


def a_full_buffer_is_waited_for(rig: Rig) -> None:
    """Without room in the buffer KV stays in its blocks; the engine rests meanwhile, and goes on when there is room."""
    taken = rig.buffer.take_free(rig.buffer.num_slabs, "somebody")
    seq = rig.sequence(rig.prompt(130, seed=131), greedy(9), hold_kv=True)
    answer = rig.add(seq)
    rig.step_until(lambda: bool(answer.tokens))
    steps, ends_s = 0, time.monotonic() + 0.5
    while time.monotonic() < ends_s:
        if rig.engine.has_work:
            rig.step()
            steps += 1
        else:
            time.sleep(0.0005)
    assert seq.key not in rig.saved and rig.port.held_blocks > 0
    assert steps < 100, f"{steps} steps in half a second: the engine spins"
    assert rig.engine.deadline_s is not None
    rig.buffer.give_back(taken, "somebody")
    assert rig.engine.has_work, "room in the buffer ends the rest"
    rig.drive()
    assert len(rig.saved[seq.key][1].slabs) == 3
    rig.free_saved()


# ---- limits


def priorities_come_first(rig: Rig) -> None:
    """Of those that wait, the one with the best priority starts first."""
    seats = rig.port.facts.max_num_seqs
    low = [rig.add(rig.sequence([9, 9, 9 + i], greedy(6), priority=5)) for i in range(2 * seats)]
    high = rig.add(rig.sequence([8, 8, 8], greedy(6), priority=-1))
    rig.step()
    assert high.tokens and not all(answer.tokens for answer in low)
    rig.drive()


def what_cannot_be_served_is_refused(rig: Rig) -> None:
    """With a code and a reason, and nothing is held for it."""
    longest = rig.port.facts.max_model_len
    expect_refusal(lambda: rig.add(rig.sequence([7] * longest, greedy(1))), "unsupported_parameter")
    expect_refusal(lambda: rig.add(rig.sequence([7] * (longest + 1), greedy(1))), "internal_error")
    expect_refusal(lambda: rig.add(rig.sequence([], greedy(1))), "internal_error")
    full = rig.sequence([7, 8], greedy(2), output=[1, 2])
    expect_refusal(lambda: rig.add(full), "internal_error")
    short = SavedKv("nobody#1", (0,), 3)
    seq = rig.sequence(rig.prompt(100, seed=1), greedy(9), output=[3])
    expect_refusal(lambda: rig.adopt(seq, short), "internal_error")
    assert not list(rig.engine.sequences())


def a_storm_leaves_nothing(rig: Rig) -> None:
    """Random arrivals, hand-overs and aborts at random moments: every answer is right, and nothing stays held."""
    chance = random.Random(7)
    prompts = [rig.prompt(chance.randrange(1, 200), seed=200 + i) for i in range(12)]
    right = [rig.run(prompt, greedy(10)).tokens for prompt in prompts]
    running: dict[str, tuple[int, Answer, list[int]]] = {}
    checked = 0
    for _ in range(250):
        if len(running) < 8 and chance.random() < 0.5:
            which = chance.randrange(len(prompts))
            scope = chance.choice((b"", SCOPE, OTHER_SCOPE))
            seq = rig.sequence(prompts[which], greedy(10), hold_kv=chance.random() < 0.6, scope=scope)
            running[seq.key] = (which, rig.add(seq), [])
        if running and chance.random() < 0.15:
            key = chance.choice(list(running))
            running.pop(key)
            rig.engine.abort(key.partition("#")[0], 1)
            if key in rig.saved:
                rig.buffer.give_back(rig.saved[key][1].slabs, rig.saved.pop(key)[1].key)
        if rig.port.has_work:
            rig.step()
        for key in [key for key in rig.saved if key in running and chance.random() < 0.5]:
            which, answer, _ = running.pop(key)
            _, saved = rig.saved.pop(key)
            seq = rig.sequence(prompts[which], greedy(10), output=answer.tokens)
            running[seq.key] = (which, rig.adopt(seq, saved), answer.tokens)
        for key, (which, answer, begun) in list(running.items()):
            assert answer.failed is None
            if answer.finish is not None:
                assert begun + answer.tokens == right[which]
                checked += 1
                del running[key]
    for key in running:
        rig.engine.abort(key.partition("#")[0], 1)
    rig.drive()
    rig.free_saved()
    assert checked > 15, f"only {checked} answers were checked"


BEHAVIOURS: dict[str, Callable[[Rig], None]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        tokens_are_those_of_one_engine,
        deferred_first_tokens_are_the_same,
        company_changes_nothing,
        delivered_output_is_continued,
        seeds_are_repeated_or_refused,
        answers_end_where_they_should,
        what_ends_at_once_is_not_saved,
        prompts_are_scored,
        grammars_are_obeyed,
        aborts_free_everything,
        newer_attempts_survive_aborts,
        deadlines_end_sequences,
        prefixes_are_shared_within_a_scope,
        preempted_sequences_go_on,
        failed_loads_can_be_retried,
        a_full_buffer_is_waited_for,
        priorities_come_first,
        what_cannot_be_served_is_refused,
        a_storm_leaves_nothing,
    )
}


def run_behaviour(name: str, rig: Rig) -> None:
    """Run one behaviour, and check that it leaves the rig at rest."""
    BEHAVIOURS[name](rig)
    rig.check_rest()
