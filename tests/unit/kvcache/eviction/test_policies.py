"""What heads keep, against the paper's definitions written out by hand, and on heads that are made for a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from diptych.eviction_spec import PROFILE_ROWS, KeepSpec
from kvcache.eviction.policies import (
    FREQUENT_FIRST_ORDER,
    FULL,
    PAPER_ORDER,
    PUNCT_KIND,
    SPECIAL_KIND,
    KeepRule,
    Part,
    choose_policies,
    kept_mask,
    pick_frequent,
)
from tests.support.keep_reference import (
    HeadProfile,
    mean_scores,
    pool_attention,
    profile_head,
    recovered_masses,
)
from tests.unit.kvcache.eviction import keep_oracle

ORDERS = {PAPER_ORDER: keep_oracle.PAPER, FREQUENT_FIRST_ORDER: keep_oracle.OTHER}
THRESHOLDS = (0.98, 0.95, 0.91, 0.85, 0.75, 0.5)


def random_kinds(rng: np.random.Generator, n: int) -> NDArray[np.uint8]:
    return rng.choice(np.array([0, PUNCT_KIND, SPECIAL_KIND, 3], np.uint8), n, p=[0.75, 0.2, 0.04, 0.01])


def as_dict(kinds: NDArray[np.uint8]) -> dict[int, int]:
    return dict(enumerate(kinds.tolist()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(25))
def test_profiles_of_random_tensors_are_those_of_the_definitions(order: tuple[Part, ...], seed: int) -> None:
    """Half of the queries are sharp, so that all policies occur; lengths around rows, frames and chunks."""
    rng, rule = np.random.default_rng(seed), KeepRule(order)
    n = int(rng.choice([17, 20, 40, 63, 64, 65, 100]))
    rows, group, depth = min(n, 1 + seed % 9 * 8), 1 + seed % 3, 8
    queries = rng.standard_normal((rows, group, depth)) * rng.choice([0.5, 2, 6])
    keys, kinds = rng.standard_normal((n, depth)), random_kinds(rng, n)
    boundary = int(rng.choice([0, n // 64 * 64]))
    attention = pool_attention(queries, keys)
    expected = keep_oracle.attention_rows(queries.tolist(), keys.tolist())
    for row, found in zip(expected, attention, strict=True):
        assert found[: len(row)] == pytest.approx(row, abs=1e-12) and not found[len(row) :].any()
    scores = mean_scores(attention)
    assert dict(enumerate(scores)) == pytest.approx(keep_oracle.mean_attention(expected), abs=1e-12)
    masses = recovered_masses(attention, scores, kinds, boundary, rule)
    parts = [ORDERS[order][: policy + 1] for policy in range(FULL)]
    by_hand = [keep_oracle.recovered_mass(expected, as_dict(kinds), one, boundary) for one in parts]
    assert masses == pytest.approx(by_hand, abs=1e-9)
    for threshold in THRESHOLDS:
        profile = profile_head(queries, keys, kinds, KeepSpec(threshold, boundary), rule)
        if min(abs(mass - threshold) for mass in by_hand) > 1e-9:
            assert profile.policy == keep_oracle.choose_policy(by_hand, threshold)
        found_mask = kept_mask(profile.policy, kinds, np.arange(n), profile.scores, n, n, boundary, rule)
        if profile.policy < FULL:
            assert {*np.flatnonzero(found_mask).tolist()} == keep_oracle.kept_positions(
                parts[profile.policy], as_dict(kinds), dict(enumerate(scores)), n, n, boundary
            )
            assert masses[profile.policy] >= threshold
        else:
            assert found_mask.all()


def profile_of(target: NDArray[np.float64], kinds: NDArray[np.uint8], rule: KeepRule) -> HeadProfile:
    """The profile of a head whose rows attend in proportion to `target` [rows, n]: a key is its own axis."""
    n = target.shape[1]
    queries = np.log(np.maximum(target, 1e-9))[:, None] * np.sqrt(n)
    return profile_head(queries, np.eye(n), kinds, KeepSpec(0.95), rule)


def constructed_heads(n: int) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.float64]]]:
    """Kinds of n tokens (every seventh is punctuation) and what the rows of each head attend to, [rows, n]."""
    positions, rows = np.arange(n), np.arange(n - PROFILE_ROWS, n)[:, None]
    kinds = np.where(positions % 7 == 5, PUNCT_KIND, 0).astype(np.uint8)
    distance = rows - positions
    columns = np.isin(positions, [8, 20, 31, 46, 60]) & (kinds == 0)
    heads = {
        "sink": positions == 0,
        "punctuation": kinds == PUNCT_KIND,
        "window": (distance >= 0) & (distance < 0.3 * n),
        "5 columns": columns,
        "uniform": positions >= 0,
    }
    assert columns.sum() == 5
    return kinds, {name: np.broadcast_to(one, distance.shape).astype(float) for name, one in heads.items()}


@pytest.mark.parametrize("n", [128, 200, 333])
def test_heads_that_are_made_for_a_policy_get_it(n: int) -> None:
    kinds, heads = constructed_heads(n)
    rule = KeepRule(PAPER_ORDER)
    found = {name: profile_of(target, kinds, rule).policy for name, target in heads.items()}
    assert found == {"sink": 0, "punctuation": 1, "5 columns": 2, "window": 3, "uniform": FULL}
    assert rule.policy_names == ("special", "+punct", "+frequent", "+local", "full")


def test_the_default_order_is_the_papers_and_another_one_asks_for_frequent_tokens_first() -> None:
    kinds, heads = constructed_heads(200)
    assert KeepRule() == KeepRule(PAPER_ORDER)
    rule = KeepRule(FREQUENT_FIRST_ORDER)
    found = {name: profile_of(target, kinds, rule).policy for name, target in heads.items()}
    assert found == {"sink": 0, "punctuation": 1, "5 columns": 1, "window": 2, "uniform": FULL}
    assert rule.policy_names == ("special", "+frequent", "+local", "+punct", "full")


def test_the_mean_over_rows_decides() -> None:
    """All rows but some look at the first tokens, and these at nothing that is cheap to keep."""
    kinds, heads = constructed_heads(200)
    target = np.repeat(heads["sink"][:1], PROFILE_ROWS, axis=0)
    target[17] = heads["uniform"][0]
    assert profile_of(target, kinds, KeepRule()).policy == 0
    target[17:25] = heads["uniform"][0]
    assert profile_of(target, kinds, KeepRule()).policy > 0


def test_equal_masses_take_the_cheaper_policy_and_one_keeps_everything() -> None:
    masses = np.array([[0.95, 0.95, 0.96, 0.97], [0.94, 0.95, 0.95, 1], [1, 1, 1, 1], [0, 0, 0, 0.9]])
    assert choose_policies(masses, 0.95, 17).tolist() == [0, 1, 0, FULL]
    assert choose_policies(masses, 1.0, 17).tolist() == [FULL] * 4
    assert choose_policies(masses, 0.95, 16).tolist() == [FULL] * 4
    assert choose_policies(np.full((2, 3, 4), np.nan), 0.5, 99).tolist() == [[FULL] * 3] * 2
    assert choose_policies(masses[0], 0.5, 99).shape == ()
    assert choose_policies(masses.astype(np.float32), 0.95, 17).tolist() == [2, 3, 0, FULL], (
        "0.95 is below it in float32"
    )


def test_a_lower_threshold_never_keeps_more() -> None:
    rng = np.random.default_rng(7)
    for order in ORDERS:
        rule = KeepRule(order)
        for _ in range(20):
            n, kinds = 90, random_kinds(rng, 90)
            queries, keys = 3 * rng.standard_normal((64, 2, 8)), rng.standard_normal((n, 8))
            before = np.ones(n, np.bool_)
            for threshold in (1.0, *THRESHOLDS, 0.3, 0.1):
                one = profile_head(queries, keys, kinds, KeepSpec(threshold), rule)
                kept = kept_mask(one.policy, kinds, np.arange(n), one.scores, n, n, 0, rule)
                assert not (kept & ~before).any() and (threshold < 1 or kept.all())
                before = kept


def test_frequent_tokens_are_picked_by_score_then_place() -> None:
    scores = np.array([0.1, 0.5, 0.5, np.nan, 0.5, 0.9, 0.5])
    every = np.ones(7, np.bool_)

    def picked(candidates: NDArray[np.bool_], count: int) -> list[int]:
        places: list[int] = np.flatnonzero(pick_frequent(scores, candidates, count)).tolist()
        return places

    assert picked(every, 3) == [1, 2, 5]
    assert picked(every, 0) == [] and picked(every, 9) == [*range(7)]
    assert picked(every, 6) == [0, 1, 2, 4, 5, 6]
    assert picked(scores < 0.9, 2) == [1, 2]
    with pytest.raises(ValueError, match="-1"):
        pick_frequent(scores, every, -1)


def test_shares_are_floors_of_the_true_product() -> None:
    rule = KeepRule()
    for boundary in (0, 64, 640):
        for n in range(boundary, 5000):
            expected = 3 * (n - boundary) // 10
            assert rule.num_frequent(n, boundary) == rule.window_tokens(n, boundary) == expected


def test_a_late_boundary_leaves_tokens_to_drop() -> None:
    """Each part keeps three tenths of what lies behind the boundary, so two keep six."""
    rng, n = np.random.default_rng(5), 960
    kinds, positions, scores = np.zeros(n, np.uint8), np.arange(n), rng.random(n)
    for boundary in (64, 384, 640, 704, 896, 960):
        behind = n - boundary
        for policy, expected in ((2, behind * 3 // 10), (3, 2 * (behind * 3 // 10))):
            kept = kept_mask(policy, kinds, positions, scores, n, n, boundary, KeepRule())
            assert kept[:boundary].all() and kept[boundary:].sum() == expected


@pytest.mark.parametrize("order", ORDERS)
def test_two_hundred_decision_points_are_those_of_a_dict(order: tuple[Part, ...]) -> None:
    """At each point 64 tokens come, with scores that are often equal, and each head drops what its policy drops."""
    rng, rule, points = np.random.default_rng(11), KeepRule(order), 0
    while points < 200:
        prompt, policy = int(rng.integers(1, 400)), int(rng.integers(0, FULL + 1))
        boundary = int(rng.integers(0, prompt // 64 + 1)) * 64
        kinds = random_kinds(rng, prompt + 64 * 12)
        positions, expected, length = np.arange(prompt), {*range(prompt)}, prompt
        for _ in range(12):
            scores = rng.integers(0, 12, len(positions)) / 12
            mask = kept_mask(policy, kinds[positions], positions, scores, length, prompt, boundary, rule)
            by_place = dict(zip(positions.tolist(), scores.tolist(), strict=True))
            if policy < FULL:
                expected = keep_oracle.kept_positions(
                    ORDERS[order][: policy + 1],
                    {place: int(kinds[place]) for place in expected},
                    by_place,
                    length,
                    prompt,
                    boundary,
                )
            positions = positions[mask]
            assert positions.tolist() == sorted(expected)
            positions = np.concatenate((positions, np.arange(length, length + 64)))
            expected |= {*range(length, length + 64)}
            length, points = length + 64, points + 1


def test_the_boundary_and_the_first_tokens_stay() -> None:
    kinds, positions = np.zeros(200, np.uint8), np.arange(200)
    for boundary, expected in ((0, 4), (64, 64), (128, 128)):
        kept = kept_mask(0, kinds, positions, None, 200, 200, boundary, KeepRule())
        assert kept.sum() == expected and kept[:expected].all()


def test_bad_values_are_refused() -> None:
    for threshold in (0, -0.1, 1.01, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="threshold"):
            KeepSpec(threshold)
    for boundary in (-64, 1, 65):
        with pytest.raises(ValueError, match="boundary"):
            KeepSpec(0.95, boundary)
    assert not KeepSpec().evicts and KeepSpec(0.99).evicts
    with pytest.raises(ValueError, match="special first"):
        KeepRule(("punct", "special", "frequent", "local"))
    with pytest.raises(ValueError, match="special first"):
        KeepRule(PAPER_ORDER[:3])
    with pytest.raises(ValueError, match="shares"):
        replace(KeepRule(), local_share=1.5)
    with pytest.raises(ValueError, match="shape"):
        choose_policies(np.ones((3, 5)), 0.9, 99)
    kinds, positions = np.zeros(30, np.uint8), np.arange(30)
    with pytest.raises(ValueError, match="scores"):
        kept_mask(2, kinds, positions, None, 30, 30, 0, KeepRule())
    with pytest.raises(ValueError, match="kinds"):
        kept_mask(0, kinds[:29], positions, None, 30, 30, 0, KeepRule())
    with pytest.raises(ValueError, match="policies"):
        kept_mask(5, kinds, positions, None, 30, 30, 0, KeepRule())
