"""`python -m services.host.model_probe_main`: probes a model in a separate process, with JSON on stdin and stdout.

A model from the hub may have to be downloaded first, which takes long and cannot be interrupted. The caller can end
this process instead.
"""

from __future__ import annotations

import sys

import msgspec

from diptych.errors import DiptychError
from diptych.process import die_with_parent
from services.host.model_probe import ProbeReply, ProbeRequest, probe_model
from services.host.supervision.supervisor import ErrorReport


def main() -> None:
    """Read a `ProbeRequest` from standard input and print the `ProbeReply`, with the error if there was one."""
    # A download must not outlive the one who waits for it.
    die_with_parent()
    probe = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)
    try:
        answer = ProbeReply(model=probe_model(probe))
    except DiptychError as error:
        answer = ProbeReply(error=ErrorReport(error.what, error.why, error.fix))
    # The reply is on the last line, since libraries may have printed something before.
    print("\n" + msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    main()
