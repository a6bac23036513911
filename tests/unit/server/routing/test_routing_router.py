"""The router's paths with their reasons, its costs, and how it judges its own predictions."""

from __future__ import annotations

from collections import deque
from math import inf

import msgspec
import pytest
from routing_rig import BLOCK, BYTES_PER_TOKEN, MAX_MODEL_LEN, RouterRig, make_engine, prompt_of

from server.fleet import Engine
from server.routing.cost import HANDSHAKE_S, PRIOR_SECONDS_PER_TOKEN, CostModel
from server.routing.estimates import HALF_LIFE_S, MAX_STEP
from server.routing.router import MAX_DECISIONS, Route
from server.routing.tokens import Prompt


def pd_rig() -> tuple[RouterRig, Engine, Engine]:
    prefill, decode = make_engine("p0", "prefill"), make_engine("d0", "decode")
    return RouterRig(prefill, decode), prefill, decode


def chosen(rig: RouterRig, prompt: Prompt) -> Route:
    route = rig.router.choose(prompt)
    assert route is not None
    return route


def test_a_long_prompt_is_prefilled_elsewhere_while_the_decode_engine_is_busy() -> None:
    rig, prefill, decode = pd_rig()
    decode.num_in_flight = 4
    route = chosen(rig, prompt_of(1000))
    assert (route.engine, route.prefill) == (decode, prefill)
    assert (route.path, route.reason) == ("remote_prefill", "remote_cheaper")
    assert rig.routed("remote_prefill", "remote_cheaper") == 1


def test_an_idle_decode_engine_prefills_by_itself() -> None:
    rig, _, _ = pd_rig()
    route = chosen(rig, prompt_of(1000))
    assert (route.path, route.reason, route.prefill) == ("combined", "local_cheaper", None)


def test_a_busy_prefill_engine_is_not_worth_waiting_for() -> None:
    rig, prefill, decode = pd_rig()
    decode.num_in_flight = 4
    for start in range(0, 5000, 1000):
        prefill.num_in_flight += chosen(rig, prompt_of(1000, start=start)).prefill is prefill
    assert 1 <= prefill.num_in_flight < 5
    assert chosen(rig, prompt_of(1000, start=9000)).reason == "local_cheaper"


def test_short_and_cached_prompts_skip_the_prefill_pool() -> None:
    rig, _, decode = pd_rig()
    decode.num_in_flight = 20
    short = chosen(rig, prompt_of(2 * BLOCK - 1))
    assert (short.path, short.reason) == ("combined", "short_prompt")
    prompt = prompt_of(1000)
    rig.hold(decode, prompt)
    cached = chosen(rig, prompt)
    assert (cached.path, cached.reason, cached.num_cached_tokens) == ("kv_reuse", "cached", 992)


def test_what_the_prefill_engine_holds_counts() -> None:
    one, two = make_engine("p0", "prefill"), make_engine("p1", "prefill")
    decode = make_engine("d0", "decode")
    decode.num_in_flight = 4
    rig = RouterRig(one, two, decode)
    prompt = prompt_of(1000)
    rig.hold(two, prompt)
    route = chosen(rig, prompt)
    assert route.prefill is two
    assert route.expected.num_tokens == 8


@pytest.mark.parametrize("state", ["down", "draining"])
def test_without_a_usable_prefill_engine_the_decode_engine_computes(state: str) -> None:
    rig, prefill, decode = pd_rig()
    decode.num_in_flight = 4
    if state == "down":
        prefill.mark_down("died")
    prefill.is_draining = state == "draining"
    route = chosen(rig, prompt_of(1000))
    assert (route.engine, route.prefill, route.path, route.reason) == (decode, None, "recompute", "no_prefill_engine")
    assert rig.routed("recompute", "no_prefill_engine") == 1


def test_a_failed_prefill_leg_leaves_its_request_where_it_is() -> None:
    rig, prefill, decode = pd_rig()
    decode.num_in_flight = 4
    route = chosen(rig, prompt_of(1000))
    assert rig.router.costs.queued_tokens(prefill) == 1000
    again = rig.router.degrade(route, "it died")
    assert (again.engine, again.prefill, again.path, again.reason) == (decode, None, "recompute", "prefill_failed")
    assert rig.router.costs.queued_tokens(prefill) == 0
    assert rig.router.costs.queued_tokens(decode) == 1000
    assert rig.router.decisions[-1].detail == "it died"


@pytest.mark.parametrize("difference", ["target", "block_size", "bytes", "producer", "consumer", "length", "unknown"])
def test_engines_that_cannot_share_kv_never_do(difference: str) -> None:
    rig, prefill, decode = pd_rig()
    decode.num_in_flight = 4
    assert prefill.status is not None
    assert decode.status is not None
    changes = {
        "block_size": {"block_size_tokens": 32},
        "bytes": {"bytes_per_token": 7},
        "producer": {"transfer": "none"},
        "length": {"max_model_len": 500},
    }
    if difference == "target":
        prefill.target_version = 5
    elif difference == "unknown":
        prefill.status = None
    elif difference == "consumer":
        kv = msgspec.structs.replace(decode.status.kv, transfer="none")
        decode.status = msgspec.structs.replace(decode.status, kv=kv)
    else:
        kv = msgspec.structs.replace(prefill.status.kv, **changes[difference])
        prefill.status = msgspec.structs.replace(prefill.status, kv=kv)
    route = chosen(rig, prompt_of(1000))
    assert (route.path, route.reason) == ("recompute", "mismatch")
    decision = rig.router.decisions[-1]
    assert decision.remote is not None
    assert decision.remote.total_s == inf
    assert decision.detail


def test_where_tokens_are_not_known_load_decides_and_the_decision_says_so() -> None:
    busy, idle = make_engine("d0", "decode"), make_engine("d1", "decode")
    rig = RouterRig(busy, idle, make_engine("p0", "prefill"))
    busy.num_in_flight = 3
    route = chosen(rig, Prompt(reason="not_text"))
    assert route.engine is idle
    assert (route.path, route.reason, route.num_prompt_tokens) == ("combined", "tokens_unknown", None)
    assert rig.router.decisions[-1].detail == "not_text"


def test_a_prompt_the_engine_will_refuse_is_not_looked_up() -> None:
    engine = make_engine("e0")
    rig = RouterRig(engine)
    prompt = prompt_of(MAX_MODEL_LEN + 1)
    rig.hold(engine, prompt)
    route = chosen(rig, prompt)
    assert (route.num_cached_tokens, route.prompt_hash) == (0, None)
    assert chosen(rig, prompt_of(MAX_MODEL_LEN)).prompt_hash is not None


def test_a_prompt_no_engine_can_serve_is_not_put_down_to_the_prefill_engine() -> None:
    rig, _, decode = pd_rig()
    decode.num_in_flight = 4
    route = chosen(rig, prompt_of(MAX_MODEL_LEN + 1))
    assert (route.path, route.reason, route.prefill) == ("combined", "prompt_too_long", None)
    assert str(MAX_MODEL_LEN) in rig.router.decisions[-1].detail
    assert chosen(rig, prompt_of(MAX_MODEL_LEN)).path == "remote_prefill"


def test_salted_prompts_do_not_meet() -> None:
    engine = make_engine("e0")
    rig = RouterRig(engine)
    prompt = prompt_of(160)
    rig.hold(engine, prompt)
    assert chosen(rig, prompt).num_cached_tokens == 144
    assert chosen(rig, Prompt(prompt.token_ids, salt="tenant")).num_cached_tokens == 0


def test_a_speculating_engine_is_expected_to_compute_its_last_block_again() -> None:
    engine = make_engine("e0", num_speculative_tokens=3)
    rig = RouterRig(engine)
    rig.hold(engine, prompt_of(160))
    assert chosen(rig, prompt_of(200)).num_cached_tokens == 144


def test_predictions_are_judged_within_a_block() -> None:
    engine = make_engine("e0")
    rig = RouterRig(engine)
    rig.hold(engine, prompt_of(160))
    for reported in (160, 144, 176, 100, 300):
        rig.router.judge(chosen(rig, prompt_of(200)), reported)
    assert (rig.predicted("correct"), rig.predicted("over"), rig.predicted("under")) == (3, 1, 1)
    rig.router.judge(chosen(rig, Prompt()), 0)
    assert rig.predicted("correct") == 3


def test_a_remote_prefill_says_nothing_about_the_decode_engines_cache() -> None:
    rig, _, decode = pd_rig()
    decode.num_in_flight = 4
    route = chosen(rig, prompt_of(1000))
    assert route.path == "remote_prefill"
    rig.router.judge(route, 1000)
    assert rig.predicted("over") + rig.predicted("under") + rig.predicted("correct") == 0


def test_decisions_are_kept_with_their_costs_and_bounded() -> None:
    rig, _, decode = pd_rig()
    decode.num_in_flight = 4
    for _ in range(MAX_DECISIONS + 10):
        chosen(rig, prompt_of(1000))
    assert len(rig.router.decisions) == MAX_DECISIONS
    first = rig.router.decisions[0]
    assert first.remote is not None
    assert first.local.prefill_s == pytest.approx(1000 * PRIOR_SECONDS_PER_TOKEN)
    assert first.remote.handshake_s == HANDSHAKE_S
    assert first.remote.transfer_s == pytest.approx(1000 * BYTES_PER_TOKEN / 1e9)
    assert first.local.total_s == pytest.approx(
        first.local.prefill_s + first.local.queue_s + first.local.active_s + first.local.disturbance_s
    )


def test_the_seconds_per_token_are_learned_and_one_outlier_does_not_undo_it() -> None:
    costs, engine = CostModel(), make_engine("e0")
    for _ in range(100):
        costs.learn_prefill(engine, prefill_s=0.8, num_uncached_tokens=100, num_queued_tokens=0)
    learned_s = costs.seconds_per_token("combined")
    assert learned_s == pytest.approx(0.008, rel=0.05)
    costs.learn_prefill(engine, prefill_s=500.0, num_uncached_tokens=100, num_queued_tokens=0)
    assert costs.seconds_per_token("combined") < 1.4 * learned_s


def test_a_pool_nothing_is_known_of_is_as_fast_as_the_others() -> None:
    costs = CostModel()
    assert costs.seconds_per_token("prefill") == PRIOR_SECONDS_PER_TOKEN
    for _ in range(100):
        costs.learn_prefill(make_engine("d0", "decode"), 0.01, num_uncached_tokens=100, num_queued_tokens=0)
    assert costs.seconds_per_token("prefill") == costs.seconds_per_token("decode") == pytest.approx(0.0001, rel=0.05)


def test_a_transfer_does_not_look_like_slow_prefilling() -> None:
    rig, _, decode = pd_rig()
    decode.num_in_flight = 4
    for number in range(40):
        route = chosen(rig, prompt_of(1000, start=5000 * number))
        assert route.prefill is not None
        rig.router.observe_prefill(route, 1000 * PRIOR_SECONDS_PER_TOKEN)
        rig.router.observe(route, first_byte_s=100.0)
    assert rig.router.costs.seconds_per_token("prefill") == pytest.approx(PRIOR_SECONDS_PER_TOKEN)


def test_what_was_never_measured_is_called_assumed() -> None:
    rig, prefill, _ = pd_rig()
    view = rig.router.view()
    assert (view.prefill_seconds_per_token, view.num_measured_prefills) == ({}, {})
    assert view.assumed_seconds_per_token == {"decode": PRIOR_SECONDS_PER_TOKEN, "prefill": PRIOR_SECONDS_PER_TOKEN}
    for _ in range(3):
        rig.router.costs.learn_prefill(prefill, 0.2, num_uncached_tokens=100, num_queued_tokens=0)
    view = rig.router.view()
    learned_s = view.prefill_seconds_per_token["prefill"]
    assert learned_s > PRIOR_SECONDS_PER_TOKEN
    assert (view.assumed_seconds_per_token, view.num_measured_prefills) == ({"decode": learned_s}, {"prefill": 3})


def test_a_pool_that_was_slow_is_tried_again_and_believed_when_it_is_fast() -> None:
    rig, prefill, decode = pd_rig()
    now_s = [0.0]
    rig.router.costs = costs = CostModel(lambda: now_s[0])
    decode.num_in_flight = 4
    for _ in range(100):
        costs.learn_prefill(decode, 1.0, num_uncached_tokens=1000, num_queued_tokens=0)
        costs.learn_prefill(prefill, 10.0, num_uncached_tokens=1000, num_queued_tokens=0)
    number = iter(range(0, 10**6, 5000))

    def route() -> Route:
        found = chosen(rig, prompt_of(1000, start=next(number)))
        rig.router.forget(found)
        return found

    assert route().reason == "local_cheaper"
    now_s[0] += 10.0 * HALF_LIFE_S
    costs.learn_prefill(decode, 1.0, num_uncached_tokens=1000, num_queued_tokens=0)
    tried = route()
    assert tried.prefill is prefill
    rig.router.observe_prefill(tried, 10.0)
    assert route().reason == "local_cheaper", "it is slow still"
    now_s[0] += 10.0 * HALF_LIFE_S
    tried = route()
    rig.router.observe_prefill(tried, 10.0 / MAX_STEP)
    now_s[0] += 2.0 * HALF_LIFE_S
    rig.router.observe_prefill(route(), 1.0)
    assert costs.seconds_per_token("prefill") < 2.0 * costs.seconds_per_token("decode")


def test_a_first_byte_after_hardly_any_prefill_teaches_nothing() -> None:
    costs, engine = CostModel(), make_engine("e0")
    costs.learn_prefill(engine, prefill_s=3.0, num_uncached_tokens=4, num_queued_tokens=0)
    assert costs.seconds_per_token("combined") == PRIOR_SECONDS_PER_TOKEN


def test_waiting_behind_others_does_not_look_like_slow_prefilling() -> None:
    costs, engine = CostModel(), make_engine("e0")
    for _ in range(50):
        costs.learn_prefill(engine, prefill_s=0.4, num_uncached_tokens=100, num_queued_tokens=300)
    assert costs.seconds_per_token("combined") == pytest.approx(PRIOR_SECONDS_PER_TOKEN)


def test_the_bandwidth_is_learned_from_what_was_pulled() -> None:
    costs, engine, other = CostModel(lambda: 0.0), make_engine("d0", "decode"), make_engine("d1", "decode")
    for number in range(1, 101):
        costs.learn_transfer(engine, 1e8 * number, 1.0 * number)
        costs.learn_transfer(other, 2e8 * number, 2.0 * number)
    assert costs.bytes_per_second == pytest.approx(1e8, rel=0.05)
    learned = costs.bytes_per_second
    costs.learn_transfer(engine, 1e10, 100.0)
    costs.learn_transfer(engine, 1e10 + 10, 103.0)
    assert costs.bytes_per_second == learned


def test_an_engine_that_counts_anew_teaches_from_its_new_counts() -> None:
    costs, engine = CostModel(), make_engine("d0", "decode")
    costs.learn_transfer(engine, 1e12, 1e3)
    before = costs.bytes_per_second
    costs.learn_transfer(engine, 1e7, 1.0)
    assert costs.bytes_per_second < before


def test_under_steady_load_just_the_requests_that_wait_are_waited_for() -> None:
    rig = RouterRig(make_engine("e0"))
    engine, costs = rig.engines[0], rig.router.costs
    waiting: deque[Route] = deque()
    for number in range(100):
        waiting.append(chosen(rig, prompt_of(100 + number, start=5000 * number)))
        engine.num_in_flight += 1
        if len(waiting) < 4:
            continue
        # Every other one breaks off before its first byte, the newest first; its place in flight is taken at once.
        if number % 2:
            rig.router.forget(waiting.pop())
            engine.num_in_flight -= 1
        else:
            rig.router.observe(waiting.popleft(), first_byte_s=None)
        assert costs.queued_tokens(engine) == sum(route.num_prompt_tokens or 0 for route in waiting)
    for route in [*waiting, *waiting]:
        rig.router.forget(route)
    assert costs.queued_tokens(engine) == 0


def test_equal_prompts_are_told_apart() -> None:
    rig = RouterRig(make_engine("e0"))
    first, second = chosen(rig, prompt_of(100)), chosen(rig, prompt_of(100))
    rig.router.forget(first)
    rig.router.forget(first)
    assert rig.router.costs.queued_tokens(rig.engines[0]) == 100
    rig.router.forget(second)
    assert rig.router.costs.queued_tokens(rig.engines[0]) == 0


@pytest.mark.parametrize("first_byte_s", [3.0, None])
def test_the_beginning_of_an_answer_ends_the_wait_behind_its_request(first_byte_s: float | None) -> None:
    rig = RouterRig(make_engine("e0"))
    engine = rig.engines[0]
    route = chosen(rig, prompt_of(300))
    assert rig.router.costs.queued_tokens(engine) == 300
    rig.router.observe(route, first_byte_s=first_byte_s)
    assert rig.router.costs.queued_tokens(engine) == 0
    is_taught = rig.router.costs.seconds_per_token("combined") > PRIOR_SECONDS_PER_TOKEN
    assert is_taught == (first_byte_s is not None)
