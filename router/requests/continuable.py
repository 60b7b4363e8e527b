"""Decides whether a worker can continue an answer exactly where another worker stopped (pure).

If so, the prefill worker's first token is delivered at once, and an answer whose worker is lost goes on elsewhere. If
not, the decode worker draws the first token (`diptych.messages.Prefill.defer_first`), and an answer that has begun
stays with its worker: if that is lost, its client gets an error, and may send the request again.

Whatever else a request asks for depends on its tokens so far alone, and not on who computed them.
"""

from __future__ import annotations

from collections.abc import Collection

from diptych.request import BANS, GRAMMAR, PENALTIES, SEED, SamplingParams

NO_TRAITS: frozenset[str] = frozenset()
_BANS = frozenset({BANS})


def can_continue(sampling: SamplingParams, traits: Collection[str]) -> bool:
    """Whether workers with these traits (`diptych.messages.Hello.traits`) continue such an answer exactly."""
    return traits_to_continue(sampling).issubset(traits)


def traits_to_continue(sampling: SamplingParams) -> frozenset[str]:
    """The traits that a worker needs to continue such an answer exactly.

    A repetition penalty counts the prompt too, so it makes no difference which tokens are counted as the prompt.
    Bad words look for their first tokens in the output. Without a seed of the client's, or with temperature 0, there is
    no noise that has to be the same.
    """
    needs = {
        GRAMMAR: sampling.grammar is not None or sampling.thought is not None,
        PENALTIES: bool(sampling.presence_penalty or sampling.frequency_penalty)
        or any(len(word) > 1 for word in sampling.bad_words),
        SEED: sampling.seeded and sampling.temperature > 0,
    }
    return frozenset(trait for trait, needed in needs.items() if needed)


def traits_to_begin(sampling: SamplingParams) -> frozenset[str]:
    """The traits that every worker of such a request needs: one without them would pass over what it asks for."""
    is_choice = sampling.grammar is not None and sampling.grammar.kind == "choice"
    return _BANS if sampling.allowed_token_ids or sampling.bad_words or is_choice else NO_TRAITS
