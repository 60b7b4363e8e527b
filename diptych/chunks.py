"""The chunk: the unit of 64 tokens in which KV is stored, shared and transferred. See docs/kv-layout.md."""

CHUNK_TOKENS = 64
# Versions of what workers exchange: the bytes of KV, the ticket and the hint that announce it. Each is raised when its
# meaning changes. Workers whose versions differ have other fingerprints, and are not paired.
KV_VERSION, TICKET_VERSION, HINT_VERSION = 4, 7, 1
# Name of the KV class whose pages are not coded.
RAW_CLASS = "raw"
# What a request or a list of codecs says if the router shall choose among the classes.
AUTO_CLASS = "auto"
# By how many percent perplexity may grow with a class that the router chooses, unless `--kv-quality-budget` is given.
DEFAULT_KV_BUDGET_PCT = 1.0
