"""What clients see of rows."""

from __future__ import annotations

from msgspec import Raw, json, structs

from services.gateway.batches.records import BatchRecord
from services.gateway.openai.schemas.batch_schema import BatchList, BatchObject, BatchProblem
from services.gateway.preparation.line_check import MAX_PROBLEM_BYTES

RECORD = BatchRecord(
    id="batch_1", tenant="t", urgent=0, endpoint="/v1/completions", window="24h", status="failed", input_file="i",
    output_file="o", error_file="e", created_at=1, expires_at=2, output_expiry_s=3,
)  # fmt: skip


def test_what_is_stored_as_json_is_answered_as_it_is() -> None:
    problems = [BatchProblem("invalid_request", 'a "quoted" \u4e16', "body.model", 3)]
    record = structs.replace(
        RECORD, errors=json.encode(problems).decode(), metadata=json.encode({"a": "\u4e16"}).decode()
    )
    found = json.decode(json.encode(record.to_object()), type=BatchObject)
    assert found.errors is not None and found.errors.data == problems
    assert found.metadata == {"a": "\u4e16"}
    empty = json.decode(json.encode(RECORD.to_object()), type=BatchObject)
    assert (empty.errors, empty.metadata) == (None, None)


def test_a_list_of_batches_makes_no_objects_of_their_problems() -> None:
    """An answer has at most 100 batches; it costs its bytes, and these are bounded."""
    problems = [BatchProblem("invalid_request", "", "", number) for number in range(MAX_PROBLEM_BYTES // 70)]
    record = structs.replace(RECORD, errors=json.encode(problems).decode(), metadata='{"a":"b"}')
    listed = [record.to_object() for _ in range(100)]
    for one in listed:
        assert one.errors is not None
        parts: list[object] = [one.errors.data, one.metadata]
        assert all(isinstance(part, Raw) for part in parts)
    answer = json.encode(BatchList(data=listed, has_more=False, first_id="a", last_id="b"))
    assert 50 * MAX_PROBLEM_BYTES < len(answer) < 100 * (MAX_PROBLEM_BYTES + 1000)
