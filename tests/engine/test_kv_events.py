"""The gateway's view of KV against vLLM's own: its publisher, its event structs, its cache manager and its rendering.

Nothing here starts an engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
import torch
import zmq.asyncio
from msgspec import Raw
from prometheus_client import CollectorRegistry
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import kv_events
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.hf import HfRenderer
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from server.paths import CHAT_PATH
from server.routing.blocks import reusable_tokens
from server.routing.index import KvIndex
from server.routing.kv_events import EngineFeed, KvListener
from server.routing.metrics import RoutingMetrics
from server.routing.replay import ReplaySocket
from server.routing.tokens import Prompts
from wire.kv_blocks import prompt_chain

BLOCK = 16
DEADLINE_S = 120.0
PARTS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def stored(hashes: list[int], parent: int | None, tokens: list[int]) -> kv_events.BlockStored:
    return kv_events.BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=BLOCK,
        lora_id=None,
        medium=kv_events.MEDIUM_GPU,
        lora_name=None,
        extra_keys=[("salt",) if parent is None and number == 0 else None for number in range(len(hashes))],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def batch(*events: Any) -> kv_events.KVEventBatch:
    return kv_events.KVEventBatch(ts=0.0, events=list(events))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_vllms_publisher_is_understood_live_and_replayed() -> None:
    async def run() -> None:
        context = zmq.asyncio.Context()
        endpoint, replay = free_address(), free_address()
        index, registry = KvIndex(1 << 16), CollectorRegistry()
        listener = KvListener(context, endpoint, {"e0": replay}, index, RoutingMetrics(registry))
        publisher = kv_events.ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay, topic="kv@e0")
        tokens = list(range(4 * BLOCK))
        names = prompt_chain(tokens, BLOCK, "salt")
        # Before the gateway listens: only a replay can tell of these.
        publisher.publish(batch(stored([1, 2], None, tokens[: 2 * BLOCK])))
        publisher.publish(batch(stored([3], 2, tokens[2 * BLOCK : 3 * BLOCK])))
        await until(lambda: len(publisher._buffer) == 2)
        task = asyncio.create_task(listener.listen())
        try:
            await until(lambda: index.count_held("e0", names) == 3)
            publisher.publish(batch(stored([4], 3, tokens[3 * BLOCK :])))
            publisher.publish(batch(kv_events.BlockRemoved(block_hashes=[4], medium=kv_events.MEDIUM_GPU, group_idx=0)))
            # A publisher that has not connected yet drops what it sends; the next message reveals the gap.
            while index.count_held("e0", names) != 4:
                publisher.publish(batch(stored([4], 3, tokens[3 * BLOCK :])))
                await asyncio.sleep(0.2)
            publisher.publish(batch(kv_events.AllBlocksCleared()))
            await until(lambda: index.num_blocks == 0)
            assert registry.get_sample_value("paceline_kv_events_total", {"engine": "e0", "kind": "cleared"}) == 1
            assert registry.get_sample_value("paceline_kv_dropped_indexes_total", {"engine": "e0"}) is None
            assert registry.get_sample_value("paceline_bad_kv_events_total", {"engine": "e0"}) is None
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            publisher.shutdown()
            context.destroy(linger=0)

    asyncio.run(run())


class CacheManager:
    """vLLM's own, as an engine's scheduler drives it, with its events going to ours."""

    def __init__(self, *, speculative: bool, num_blocks: int) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        group = KVCacheGroupSpec(["layer"], spec, is_eagle_group=speculative)
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        self.speculative = speculative
        self._manager = KVCacheManager(
            config,
            max_model_len=4096,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            use_eagle=speculative,
            enable_kv_cache_events=True,
        )
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._running: list[Request] = []
        self._num_requests = 0
        self.index = KvIndex(1 << 16)
        self._feed = EngineFeed(
            "e0", ReplaySocket(zmq.asyncio.Context.instance(), ""), self.index, RoutingMetrics(CollectorRegistry())
        )

    def predict(self, tokens: list[int], salt: str | None) -> int:
        held = self.index.count_held("e0", prompt_chain(tokens, BLOCK, salt))
        return reusable_tokens(held, len(tokens), BLOCK, speculative=self.speculative)

    def serve(self, tokens: list[int], salt: str | None, answer: list[int]) -> int | None:
        """Take one request and decode its answer; returns the cached tokens, None where there was no room."""
        self._num_requests += 1
        params = SamplingParams(max_tokens=1000)
        params.update_from_generation_config({}, eos_token_id=0)
        request = Request(str(self._num_requests), tokens, params, None, cache_salt=salt, block_hasher=self._hasher)
        blocks, num_cached, _ = self._manager.get_computed_blocks(request)
        if self._manager.allocate_slots(request, len(tokens) - num_cached, num_cached, blocks) is None:
            return None
        request.num_computed_tokens = len(tokens)
        for token in answer:
            request.append_output_token_ids(token)
            if self._manager.allocate_slots(request, 1) is None:
                break
            request.num_computed_tokens += 1
        self._running.append(request)
        return num_cached

    def end_one(self, rng: random.Random) -> None:
        if self._running:
            self._manager.free(self._running.pop(rng.randrange(len(self._running))))

    def clear(self) -> None:
        while self._running:
            self._manager.free(self._running.pop())
        assert self._manager.reset_prefix_cache()

    def publish(self) -> int:
        events = self._manager.take_events()
        if events:
            self._feed.apply(msgspec.msgpack.encode(batch(*events)))
        return len(events)


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("num_blocks", [24, 4000])
def test_what_vllm_will_find_in_its_cache_is_predicted_exactly(speculative: bool, num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    manager = CacheManager(speculative=speculative, num_blocks=num_blocks)
    histories: list[list[int]] = [[1] * 40 for _ in range(6)]
    num_hits = num_events = num_served = 0
    for turn in range(800):
        history = histories[rng.randrange(6)]
        salt = rng.choice([None, None, "tenant"])
        prompt = history + [rng.randrange(3) for _ in range(rng.randrange(0, 40))]
        answer = [rng.randrange(3) for _ in range(rng.randrange(0, 30))]
        predicted = manager.predict(prompt, salt)
        reported = manager.serve(prompt, salt, answer)
        num_events += manager.publish()
        if reported is not None:
            num_served += 1
            assert predicted == reported
            num_hits += reported > 0
            if len(prompt) < 150:
                history[:] = prompt + answer
        while len(manager._running) > (0 if reported is None else 3):
            manager.end_one(rng)
        if rng.random() < 0.2:
            histories[rng.randrange(6)][:] = [1] * 40
        if turn % 200 == 199:
            manager.clear()
            manager.publish()
            assert manager.index.num_blocks == 0
    assert num_served > 300
    assert num_hits > 100
    assert num_events > 300


@pytest.mark.parametrize("takes_parts", [False, True])
def test_prompts_get_the_tokens_vllms_own_renderer_gives_them(tmp_path: Path, takes_parts: bool) -> None:
    target = tiny.make_target(tmp_path / "tiny")
    if takes_parts:
        config = json.loads((target / "tokenizer_config.json").read_text())
        config["chat_template"] = PARTS_TEMPLATE
        (target / "tokenizer_config.json").write_text(json.dumps(config))
    model_config = ModelConfig(model=str(target), tokenizer=str(target), dtype="float32", max_model_len=2048)
    renderer = HfRenderer(VllmConfig(model_config=model_config), get_tokenizer(str(target)))
    prompts = Prompts(target, lambda: 0)
    rng = random.Random(3)
    words = ["hello", " ", "\n", "é", "日本", "<|im_end|>", "{{ 1 }}", "🙂", ""]
    for _ in range(40):
        messages: list[Any] = [{"role": "system", "content": "be brief"}] if rng.random() < 0.5 else []
        for turn in range(rng.randrange(1, 6)):
            texts = ["".join(rng.choices(words, k=rng.randrange(0, 8))) for _ in range(rng.randrange(1, 3))]
            content = [{"type": "text", "text": text} for text in texts] if rng.random() < 0.5 else texts[0]
            messages.append({"role": ("user", "assistant")[turn % 2], "content": content})
        if rng.random() < 0.3:
            messages.insert(rng.randrange(len(messages) + 1), {"role": "developer", "content": "be kind"})
        request = ChatCompletionRequest.model_validate({"model": "m", "messages": messages})
        _, rendered = renderer.render_messages(request.messages, request.build_chat_params(None, "auto"))
        tokenized = renderer.tokenize_prompt(rendered, request.build_tok_params(model_config))
        fields = {"messages": Raw(json.dumps(messages).encode())}
        ours = asyncio.run(prompts.read(CHAT_PATH, fields))
        assert ours.token_ids == tuple(tokenized["prompt_token_ids"]), messages
    prompts.close()
