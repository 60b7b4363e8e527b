"""What a decode role says of a request whose KV it pulls, whatever its engine is: is the ticket right, what has failed.

Both roles, `decode_worker.worker.DecodeWorker` and `vllm_worker.decode_role.VllmDecodeRole`, use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.kv_fetcher import KvArrival
from diptych.errors import DiptychError, StaleTicket
from diptych.eviction_spec import KEEP_ALL
from diptych.messages import Fetch, Pulled
from engine.sequence import Sequence, SequenceRefused
from kvcache.layout import KvLayout
from kvtransfer import ticket as tickets
from kvtransfer.digests import ChunkDigester
from kvtransfer.transports.links import KvLinks

EXPIRED_TEXT = "the request's time was up before its KV had arrived"


@dataclass(frozen=True, slots=True)
class TicketCheck:
    """Checks tickets for a worker. `key` is the deployment's transfer key, which signs them."""

    key: bytes
    fingerprint: str
    links: KvLinks

    def read_ticket(self, arrival: KvArrival, raw: bytes, layout: KvLayout) -> tickets.Ticket:
        """The ticket in `raw`, which is for this arrival and this layout.

        Raises:
            SequenceRefused: it is not right. Nothing has changed.
        """
        seq = arrival.seq
        try:
            ticket = tickets.decode_ticket(raw, self.key)
            tickets.check_ticket(
                ticket,
                request=seq.id,
                epoch=seq.epoch,
                num_tokens=arrival.num_tokens,
                layout=layout,
                fingerprint=self.fingerprint,
                keep=seq.keep if seq.keep.evicts else KEEP_ALL,
            )
        except DiptychError as error:
            code = "stale_ticket" if isinstance(error, StaleTicket) else "transfer_failed"
            raise SequenceRefused(code, error.what, error.why) from error
        return ticket

    def store_ticket(self, arrival: KvArrival, ticket: tickets.Ticket, now_s: float) -> None:
        """Give the arrival its ticket and what checks its chunks."""
        route = self.links.route_to(ticket.worker)
        arrival.transport = route.transport if route else ""
        arrival.digester, arrival.ticket_s = ChunkDigester(self.key, ticket.context), now_s
        arrival.ticket = ticket  # set last, because the fetcher's thread waits for it


def check_tokens(message: Fetch, seq: Sequence) -> None:
    """Check that the tokens that come with a ticket follow those of its request.

    Raises:
        SequenceRefused: they do not, or there are none.
    """
    if message.output[:-1] != seq.output or not message.output:
        raise SequenceRefused("internal_error", "the tokens of the ticket do not follow those of the request")


def describe_pull(arrival: KvArrival, num_bytes: int) -> Pulled:
    """What the gateway is told of an arrival whose KV is here: how many bytes were copied, and where the time went."""
    seconds = {
        "reserve": arrival.reserved_s - arrival.arrived_s,
        "transfer": arrival.pull_s,
        "verify": arrival.verify_s,
        "hidden": arrival.hidden_s,
        "exposed": arrival.exposed_s,
    }
    return Pulled(arrival.seq.id, arrival.seq.epoch, arrival.transport, num_bytes, seconds)


def describe_error(error: Exception) -> str:
    """An error and its reason on one line."""
    why = error.why if isinstance(error, DiptychError) else ""
    return " ".join(f"{error}{': ' if why else ''}{why}".split())
