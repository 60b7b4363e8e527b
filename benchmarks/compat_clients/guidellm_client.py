"""GuideLLM: a short run of made-up prompts over each format of requests that it has for text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FORMATS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def run_format(path: str, folder: Path) -> None:
    """Run three requests of a format, one after the other. Raises if one was not answered."""
    url, model, key = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"], os.environ["OPENAI_API_KEY"]
    report = folder / "report.json"
    options = {
        "--backend": f"kind=openai_http,target={url},model={model},api_key={key},request_format={path}",
        "--profile": "kind=synchronous",
        "--constraint": "kind=max_requests,count=3",
        "--tokenizer": f"kind=hf_auto,model={os.environ['COMPAT_FOLDER']}",
        "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output": f"kind=json,path={report}",
    }
    program = Path(sys.executable).parent / "guidellm"
    words = [word for option in options.items() for word in option]
    subprocess.run([program, "run", "--disable-console-interactive", *words], check=True)
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 3 and not totals["errored"], totals


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for one in FORMATS:
            run_format(one, Path(scratch))
