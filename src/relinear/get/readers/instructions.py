"""Records of Alpaca's schema: an instruction, perhaps its input, and the output, which alone is learned."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from relinear.errors import UserError
from relinear.get.readers._document import Document

# The wording of Stanford Alpaca, which LoLCATs finetunes with.
PROMPT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def of(record: Mapping[str, str]) -> Document:
    """The document of a record with an instruction and an output."""
    template = PROMPT_WITH_INPUT if record.get("input") else PROMPT
    return Document(record["output"], template.format_map(record))


def read(path: Path) -> Iterator[Document]:
    """Records from `*.json` (a list) or `*.jsonl` (one a line), or from one such file."""
    paths = [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob("*.jsonl")])
    for file in paths:
        content = file.read_text(encoding="utf-8")
        records = map(json.loads, content.splitlines()) if file.suffix == ".jsonl" else json.loads(content)
        for number, record in enumerate(records):
            if not {"instruction", "input", "output"} <= record.keys():
                raise UserError(
                    f"{file}, record {number}: got {', '.join(record)}; expected instruction, input, output"
                )
            yield of(record)
