"""FakeModel: says a fixed text token by token, in the chunks vLLM 0.32 makes of it, on a real byte-level tokenizer.

(vllm/entrypoints/openai/{chat_completion,completion}/serving.py, v1/engine/detokenizer.py.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

CREATED_S = 1_700_000_000
EOS_ID = 1
_CORPUS = ["the quick brown fox jumps over the lazy dog and the lazy cat"] * 4


def build_tokenizer(target_dir: Path) -> Tokenizer:
    """A byte-level tokenizer with a few merges, on disk as a target's is."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    target_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target_dir / "tokenizer.json"))
    return tokenizer


class FakeModel:
    """One engine's model. Asked to go on after some of its text, it says the rest."""

    def __init__(self, tokenizer: Tokenizer, text: str, base: list[int], *, tokens_per_chunk: int = 2) -> None:
        self.tokenizer = tokenizer
        self.tokens_per_chunk = tokens_per_chunk
        self.base = base
        """The prompt before anything was said; all replicas share the list."""
        self.ids: list[int] = []
        self.say(text)

    def say(self, text: str) -> None:
        self.ids = [*self.tokenizer.encode(text).ids, EOS_ID]

    def chunks(self, path: str, body: dict[str, Any], request_id: str) -> list[bytes]:
        """All events of a stream."""
        is_chat = path.endswith("/chat/completions")
        prompt_ids, start = self._prompt(body)
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or (1000 if is_chat else 16)
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": CREATED_S,
            "model": "fake",
        }
        asks_ids = bool(body.get("return_token_ids"))
        options = body.get("stream_options") or {}
        events: list[bytes] = []
        if is_chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            told = {"prompt_token_ids": prompt_ids if asks_ids else None, "prompt_text": None}
            events.append(_event({**head, "choices": [role], **told}))
        num_emitted = 0
        for text, ids, finish, stop in self._deltas(body, prompt_ids, start, max_tokens):
            shown_ids = ids if asks_ids else None
            end = {"logprobs": None, "finish_reason": finish}
            if is_chat:
                choice = {"index": 0, "delta": {"content": text}, **end}
                choice |= {"stop_reason": stop} if finish else {}
            else:
                first_ids = prompt_ids if asks_ids and not num_emitted else None
                choice = {"index": 0, "text": text, **end, "stop_reason": stop, "prompt_token_ids": first_ids}
            num_emitted += len(ids)
            chunk = {**head, "choices": [{**choice, "token_ids": shown_ids}]}
            if options.get("include_usage") and options.get("continuous_usage_stats"):
                chunk["usage"] = _usage(len(prompt_ids), num_emitted)
            events.append(_event(chunk))
        if options.get("include_usage"):
            events.append(_event({**head, "choices": [], "usage": _usage(len(prompt_ids), num_emitted)}))
        return [*events, b"data: [DONE]\n\n"]

    def _prompt(self, body: dict[str, Any]) -> tuple[list[int], int]:
        """The prompt's ids, and how many of this model's own follow them."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and self.base and prompt[: len(self.base)] == self.base:
            return prompt, len(prompt) - len(self.base)
        text = prompt if isinstance(prompt, str) else json.dumps(body.get("messages", prompt))
        self.base[:] = self.tokenizer.encode(text).ids
        return list(self.base), 0

    def _deltas(
        self, body: dict[str, Any], prompt_ids: list[int], start: int, max_tokens: int
    ) -> list[tuple[str, list[int], str | None, str | None]]:
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        num_held = max((len(stop) for stop in stops), default=1) - 1
        stream = DecodeStream(ids=prompt_ids[-8:], skip_special_tokens=True)
        text, sent, pending = "", 0, []
        deltas: list[tuple[str, list[int], str | None, str | None]] = []
        for index, token in enumerate(self.ids[start:]):
            text += stream.step(self.tokenizer, token) or ""
            pending.append(token)
            stop = next((one for one in stops if one in text), None)
            finish = "stop" if stop or token == EOS_ID else "length" if index + 1 == max_tokens else None
            if stop is not None:
                text = text[: text.index(stop)]
            if finish is None and len(pending) < self.tokens_per_chunk:
                continue
            end = len(text) - (0 if finish else num_held)
            deltas.append((text[sent:end] if end > sent else "", pending, finish, stop))
            sent, pending = max(sent, end), []
            if finish is not None:
                break
        return deltas


def _usage(num_prompt: int, num_emitted: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_emitted, "completion_tokens": num_emitted}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
