"""The files of the target that mock engines speak for: a gateway with its tokenizer lets one engine go on where another died."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from loadtest.recital import LETTERS


def write_target(directory: Path) -> Path:
    """The alphabet's tokenizer and the size of its vocabulary, in a new directory."""
    vocabulary = {letter: index for index, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": len(vocabulary)}))
    return directory
