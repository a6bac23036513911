"""The engine's private routes, over a core that does not answer as a live one does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from server.engine.control import EngineControl, _BadRequest
from wire.control import DepthRequest, GenerateAbilities

ABILITIES = GenerateAbilities(
    serves_tokens=False,
    logprobs_mode="raw_logprobs",
    scheduling_policy="fcfs",
    returns_sampling_mask=False,
    rejection_sample_method="standard",
)


def control_over(error: Exception) -> EngineControl:
    """Its core raises that, whatever it is asked."""

    async def refuse(*_question: Any) -> Any:
        raise error

    model = SimpleNamespace(get_diff_sampling_param=dict, generation_config="auto", override_generation_config={})
    core = SimpleNamespace(call_utility_async=refuse)
    client = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model), engine_core=core, errored=True)
    return EngineControl(client, ABILITIES)


@pytest.mark.parametrize(
    ("error", "told"), [(EngineDeadError(), EngineDeadError), (Exception("depth must lie in 0..3, got 4"), _BadRequest)]
)
def test_a_dead_core_is_not_told_as_a_bad_request(error: Exception, told: type[Exception]) -> None:
    with pytest.raises(told):
        asyncio.run(control_over(error).set_depth(DepthRequest(depth=4)))
