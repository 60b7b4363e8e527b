"""A worker that only says which devices it was given: a line `devices=...` in its log. For tests of Ray."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    json.loads(sys.stdin.buffer.readline())
    print(f"devices={os.environ.get('CUDA_VISIBLE_DEVICES')}", file=sys.stderr, flush=True)
    print(json.dumps({"phase": "ready", "done": 1, "total": 1}), flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
