"""A model's sampling defaults, for fields that a request does not set.

They come from its `generation_config.json`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from diptych.errors import ModelError
from engine.model.tokenizer import read_json_object
from services.gateway.openai.schemas.request_schema import (
    Count,
    MinP,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)

GENERATION_CONFIG = "generation_config.json"
CONFIG_FIX = "correct it, or ignore it with --generation-config none"


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields that vLLM takes from the file, too. None: the file does not set it, and OpenAI's default holds.

    `max_new_tokens` is the most tokens of an answer. `do_sample` is ignored.
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: Count | None = None

    @classmethod
    def load(cls, folder: Path, required: bool = False) -> SamplingDefaults:
        """Read the file in `folder`. Without a file there are no defaults, unless it is `required`.

        Raises:
            ModelError: a required file is missing, or it cannot be read, or it holds a value that no request may have.
        """
        path = folder / GENERATION_CONFIG
        if required and not path.is_file():
            raise ModelError(f"there is no {GENERATION_CONFIG} in {folder}", fix="see --generation-config")
        try:
            found = read_json_object(path)
            set_here = {name: found[name] for name in cls.__struct_fields__ if found.get(name) is not None}
            defaults = msgspec.convert(set_here, cls)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be used", str(error)[:200], CONFIG_FIX) from error
        if defaults.max_new_tokens == 0:
            raise ModelError(f"{path} cannot be used", "max_new_tokens is 0", CONFIG_FIX)
        return defaults

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value:g}" for name, value in msgspec.structs.asdict(self).items() if value is not None
        )
