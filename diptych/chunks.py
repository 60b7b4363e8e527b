"""The chunk: the unit of 64 tokens in which KV is stored, shared and transferred. See docs/kv-layout.md."""

CHUNK_TOKENS = 64
# Name of the KV class whose pages are not coded.
RAW_CLASS = "raw"
