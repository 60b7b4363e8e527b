"""Writes log-probabilities as JSON text, several times faster than by encoding objects.

The JSON of each token is made once and cached.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from services.gateway.generation.scored_tokens import ScoredToken
from services.gateway.openai.schemas.response_schema import MIN_LOGPROB
from services.gateway.tokenization.tokenizer import GatewayTokenizer

# Most tokens whose JSON is cached, per route and kind. A cache then takes some megabytes.
MAX_CACHED_NAMES = 1 << 16


class LogprobJson:
    """Writes one model's tokens and their log-probabilities in the form of either route.

    With `ids_as_names`, `token_id:5` stands for token 5 instead of its text.
    """

    def __init__(self, tokenizer: GatewayTokenizer, ids_as_names: bool = False) -> None:
        self._tokens, self._ids_as_names = tokenizer, ids_as_names
        self._chat: dict[int, tuple[str, str]] = {}
        self._names: dict[int, str] = {}
        self._texts: dict[int, str] = {}

    def chat_entries(self, scored_tokens: Iterable[ScoredToken], most: int) -> str:
        """The elements of `logprobs.content` of chats, separated by commas, with up to `most` alternatives each."""
        return ",".join(
            f'{{{self._chat_entry(row.token, row.logprob)},"top_logprobs":['
            + ",".join([f"{{{self._chat_entry(token, value)}}}" for token, value in row.top[:most]])
            + "]}"
            for row in scored_tokens
        )

    def token_names(self, scored_tokens: Iterable[ScoredToken]) -> str:
        """The elements of `logprobs.tokens` of completions, separated by commas."""
        return ",".join([self._name(row.token) for row in scored_tokens])

    def completion_tops(self, scored_tokens: Iterable[ScoredToken], most: int) -> str:
        """The elements of `logprobs.top_logprobs` of completions: up to `most` alternatives, and the token itself."""
        return ",".join([self._top_logprobs(row, most) for row in scored_tokens])

    def prompt_entries(self, ranked_tokens: Iterable[tuple[ScoredToken, int]]) -> str:
        """The elements of `prompt_logprobs`, separated by commas, in vLLM's form: objects whose keys are token ids."""
        return ",".join([self._prompt_entry(row, rank) for row, rank in ranked_tokens])

    def _prompt_entry(self, row: ScoredToken, rank: int) -> str:
        """One element of `prompt_logprobs`: the token itself, then the most likely ones; null for the first token."""
        if row.logprob is None:
            return "null"
        values = {token: (value, place) for place, (token, value) in enumerate(row.top, 1)}
        values = {row.token: (row.logprob, rank)} | values | {row.token: (row.logprob, rank)}
        return (
            "{"
            + ",".join(
                [
                    f'"{token}":{{"logprob":{floor_logprob(value)!r},"rank":{place or "null"},'
                    f'"decoded_token":{self._text(token)}}}'
                    for token, (value, place) in values.items()
                ]
            )
            + "}"
        )

    def _top_logprobs(self, scored_token: ScoredToken, most: int) -> str:
        """One element of `logprobs.top_logprobs` of completions; null for the first token of a prompt."""
        if scored_token.logprob is None:
            return "null"
        values = {self._name(token): value for token, value in scored_token.top[:most]}
        values[self._name(scored_token.token)] = scored_token.logprob
        return "{" + ",".join([f"{name}:{floor_logprob(value)!r}" for name, value in values.items()]) + "}"

    def _chat_entry(self, token: int, logprob: float | None) -> str:
        """The fields of one token in a chat's log-probabilities."""
        found = self._chat.get(token)
        if found is None:
            found = self._chat_parts(token)
        return f"{found[0]}{floor_logprob(logprob)!r}{found[1]}"

    def _chat_parts(self, token: int) -> tuple[str, str]:
        """The constant JSON around a token's log-probability: (before, after), from the cache's miss path."""
        if len(self._chat) >= MAX_CACHED_NAMES:
            self._chat.clear()
        raw = self._tokens.token_bytes(token)
        text = f"token_id:{token}" if self._ids_as_names else raw.decode("utf-8", "replace")
        name = msgspec.json.encode(text).decode()
        found = f'"token":{name},"logprob":', f',"bytes":{msgspec.json.encode(list(raw)).decode()}'
        self._chat[token] = found
        return found

    def _text(self, token: int) -> str:
        """A token's text as JSON; what is no whole character shows as U+FFFD."""
        found = self._texts.get(token)
        if found is None:
            if len(self._texts) >= MAX_CACHED_NAMES:
                self._texts.clear()
            found = self._texts[token] = msgspec.json.encode(self._tokens.token_text(token)).decode()
        return found

    def _name(self, token: int) -> str:
        """A token's text as JSON. A token that is not whole characters shows its bytes, so names stay distinct."""
        found = self._names.get(token)
        if found is not None:
            return found
        if len(self._names) >= MAX_CACHED_NAMES:
            self._names.clear()
        raw = f"token_id:{token}".encode() if self._ids_as_names else self._tokens.token_bytes(token)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        self._names[token] = msgspec.json.encode(name).decode()
        return self._names[token]


def floor_logprob(logprob: float | None) -> float:
    """A log-probability that JSON can hold: `MIN_LOGPROB` instead of None, minus infinity or anything lower."""
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
