"""`/inference/v1/generate` on the public port: token ids in and out, for rollouts.

vLLM takes fields it does not know for none, and computes with whatever it was started with. What would spoil training without a
word is refused here: a misspelled field, log-probabilities of another distribution than tokens are drawn from, a choice among
fewer tokens than the trainer believes, a place in the queue before users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from server.completions import ModelRoute
from server.errors import ApiError
from server.fleet import Engine, Fleet
from server.identity import Identity
from server.paths import GENERATE_PATH
from server.relay.exchange import Fields, versioned_salt
from wire.control import GenerateAbilities

FIRST_PRIORITY = 1
"""Users' requests have 0, and smaller numbers go first."""
MAX_SALT_CHARS = 512
MIN_TEMPERATURE = 0.01
"""Above 0. What is colder vLLM draws at this one (sampling_params.py: _MAX_TEMP)."""

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""At most as of vLLM's OpenAI routes; this route of it has no bound, and fails over a larger one. It takes -1 for none."""


class GenerateSampling(Struct, forbid_unknown_fields=True):
    """How tokens are drawn. Those that may only have the one value that changes nothing are taken for trainers that write all out."""

    max_tokens: Count
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    n: Count = 1
    seed: Seed | None = None
    stop: list[str] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    """That many beside the drawn token's own, which always come."""
    top_p: float = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = 0
    min_p: float = 0.0
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


class StreamOptions(Struct, forbid_unknown_fields=True, omit_defaults=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerateBody(Struct, forbid_unknown_fields=True):
    """What a client may send."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: GenerateSampling
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] = ""
    """Beside the target's version and the tenant, which are always part of the salt."""
    priority: Annotated[int, Meta(ge=FIRST_PRIORITY, lt=2**31)] = FIRST_PRIORITY


_decoder = msgspec.json.Decoder(GenerateBody)
_NEUTRAL = {"min_p": 0.0, "min_tokens": 0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Values that leave the distribution as it is."""


class GenerateRoute(ModelRoute):
    """The route for rollouts."""

    def __init__(self, *args: Any, fleet: Fleet, target_version: Callable[[], int]) -> None:
        super().__init__(GENERATE_PATH, *args)
        self._fleet = fleet
        self._target_version = target_version

    def _prepare(self, body: bytes, identity: Identity) -> Fields:
        asked = read_generate(body, max_choices=self._admission.settings.max_choices)
        for engine in self._fleet.engines:
            if engine.can_answer:
                require_able(engine, asked)
        return engine_fields(asked, identity, self._target_version())


def read_generate(body: bytes, *, max_choices: int) -> GenerateBody:
    """Raises ApiError (400) saying what is wrong with it."""
    try:
        asked = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no request for tokens: {error}", code="bad_body") from None
    if asked.sampling_params.n > max_choices:
        message = f"n must be at most {max_choices}, got {asked.sampling_params.n}"
        raise ApiError(400, message, code="too_many_choices", param="n")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options are for streams; leave them out", code="bad_body", param="stream_options")
    _refuse_reshaped(asked.sampling_params)
    return asked


def _refuse_reshaped(sampling: GenerateSampling) -> None:
    """Log-probabilities are of the distribution after the temperature; what changes it further by the text so far, or by what is
    likely, makes it another than the trainer computes. `min_tokens` takes the end of the answer out of it."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(sampling, name)
        if value != neutral:
            raise ApiError(
                400,
                f"{name} is {value:g}: tokens would be drawn from another distribution than the trainer computes; leave it at {neutral:g}",
                code="breaks_training",
                param=name,
            )
    if 0.0 < sampling.temperature < MIN_TEMPERATURE:
        raise ApiError(
            400,
            f"temperature is {sampling.temperature:g}, for which the engine takes {MIN_TEMPERATURE:g} without a word; use that, or 0",
            code="breaks_training",
            param="temperature",
        )


def require_able(engine: Engine, asked: GenerateBody) -> None:
    """Raises ApiError (501) where an engine is started with what breaks training, (400) where only this request does not go with it."""
    abilities = engine.status.generate if engine.status is not None else None
    if problem := why_unable(abilities):
        message = f"engine {engine.id} cannot serve rollouts: {problem}"
        raise ApiError(501, message, code="generate_unsupported")
    assert abilities is not None, "an engine without any is unable"
    sampling = asked.sampling_params
    if not abilities.returns_sampling_mask and (sampling.top_p != 1.0 or sampling.top_k not in (0, -1)):
        raise ApiError(
            400,
            f"top_p is {sampling.top_p:g} and top_k {sampling.top_k}, but engines do not tell which tokens these leave; use top_p 1 and "
            "top_k 0",
            code="breaks_training",
            param="top_p" if sampling.top_p != 1.0 else "top_k",
        )


def why_unable(abilities: GenerateAbilities | None) -> str:
    """Why an engine cannot make rollouts that can be trained on, and what to set; empty where it can."""
    if abilities is None or not abilities.serves_tokens:
        return "it was started without its token routes; set rollouts.enabled"
    if abilities.logprobs_mode != "processed_logprobs":
        return (
            f"its log-probabilities are {abilities.logprobs_mode}, not of the distribution it draws from; set rollouts.enabled"
        )
    if abilities.scheduling_policy != "priority":
        return f"it schedules by {abilities.scheduling_policy}, so rollouts would stand before users; set rollouts.enabled"
    if abilities.rejection_sample_method == "synthetic":
        return "its speculation accepts at random, so tokens are not the target's; take rejection_sample_method out"
    return ""


def engine_fields(asked: GenerateBody, identity: Identity, target_version: int) -> Fields:
    """What the engine gets: every parameter, so that none is the model's own default. Text is only made to find stop strings in."""
    encode = msgspec.json.encode
    ours = {"detokenize": bool(asked.sampling_params.stop), "extra_args": identity.engine_args()}
    sampling = msgspec.to_builtins(asked.sampling_params) | ours
    # No tenant's name has a plus: what one adds to its salt never makes it another's.
    salt = versioned_salt(target_version, f"{identity.tenant}+{asked.cache_salt}")
    fields = {
        "token_ids": Raw(encode(asked.token_ids)),
        "sampling_params": Raw(encode(sampling)),
        "stream": Raw(encode(asked.stream)),
        "cache_salt": Raw(encode(salt)),
        "priority": Raw(encode(asked.priority)),
    }
    if asked.model is not None:
        fields["model"] = Raw(encode(asked.model))
    if asked.stream_options is not None:
        fields["stream_options"] = Raw(encode(asked.stream_options))
    return fields
