"""What holds for every policy, and what each of them is for."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
from routing_rig import RouterRig, make_engine, prompt_of

from server.fleet import Engine
from server.routing.tokens import Prompt

POLICIES = ["kv_aware", "session", "power_of_two", "round_robin"]


def random_fleet(rng: random.Random) -> list[Engine]:
    engines = []
    for number in range(rng.randrange(1, 7)):
        engine = make_engine(f"e{number}", rng.choice(["combined", "decode", "prefill"]))
        engine.num_in_flight = rng.randrange(0, 5)
        if rng.random() < 0.3:
            engine.mark_down("died")
        engine.is_draining = rng.random() < 0.2
        engines.append(engine)
    return engines


@pytest.mark.parametrize("policy", POLICIES)
def test_only_engines_that_can_answer_are_chosen(policy: str) -> None:
    rng = random.Random(5)
    num_none = num_chosen = num_remote = 0
    for _ in range(400):
        engines = random_fleet(rng)
        exclude = {engine for engine in engines if rng.random() < 0.2}
        able = {engine for engine in engines if engine.ready and not engine.is_draining and engine.kind != "prefill"} - exclude
        prompt = rng.choice([Prompt(), prompt_of(rng.randrange(1, 600), session=rng.choice([None, "s"]))])
        route = RouterRig(*engines, policy=policy).router.choose(prompt, exclude)
        if route is None:
            num_none += 1
            assert not able
            continue
        num_chosen += 1
        assert route.engine in able
        assert (route.prefill is not None) == (route.path == "remote_prefill")
        if route.prefill is not None:
            num_remote += 1
            assert route.prefill.kind == "prefill"
            assert route.prefill.takes_requests
            assert route.prefill not in exclude
            assert route.engine.kind == "decode"
    assert min(num_none, num_chosen, num_remote) > 10


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_work_spreads_over_equal_engines(policy: str) -> None:
    engines = [make_engine(f"e{number}") for number in range(4)]
    router = RouterRig(*engines, policy=policy).router
    counts: Counter[Engine] = Counter()
    for number in range(400):
        route = router.choose(prompt_of(100, start=1000 * number, session=f"s{number}"))
        assert route is not None
        counts[route.engine] += 1
    assert set(counts) == set(engines)
    assert max(counts.values()) < 2 * min(counts.values())


def test_a_lost_engine_moves_only_its_own_sessions() -> None:
    engines = [make_engine(f"e{number}") for number in range(5)]
    router = RouterRig(*engines, policy="session").router
    sessions = [f"session-{number}" for number in range(300)]

    def places() -> dict[str, Engine]:
        routes = {session: router.choose(prompt_of(40, session=session)) for session in sessions}
        return {session: route.engine for session, route in routes.items() if route is not None}

    before = places()
    assert len(set(before.values())) == 5
    for lost in engines:
        lost.mark_down("died")
        after = places()
        assert {session for session in sessions if after[session] is not before[session]} == {
            session for session in sessions if before[session] is lost
        }
        lost.mark_ready()
    assert places() == before


def test_sessions_do_not_depend_on_the_order_or_load_of_engines() -> None:
    names = ["a", "b", "c"]
    first = RouterRig(*(make_engine(name) for name in names), policy="session").router
    second_engines = [make_engine(name) for name in reversed(names)]
    second_engines[0].num_in_flight = 50
    second = RouterRig(*second_engines, policy="session").router
    for number in range(50):
        prompt = prompt_of(40, session=f"s{number}")
        one, two = first.choose(prompt), second.choose(prompt)
        assert one is not None
        assert two is not None
        assert one.engine.id == two.engine.id


def test_round_robin_takes_every_engine_in_turn() -> None:
    engines = [make_engine(f"e{number}") for number in range(3)]
    router = RouterRig(*engines, policy="round_robin").router
    chosen = [route.engine.id for _ in range(6) if (route := router.choose(Prompt()))]
    assert chosen == ["e0", "e1", "e2"] * 2


def test_power_of_two_never_takes_the_busiest_of_all() -> None:
    engines = [make_engine(f"e{number}") for number in range(4)]
    for number, engine in enumerate(engines):
        engine.num_in_flight = number
    router = RouterRig(*engines, policy="power_of_two").router
    chosen = Counter(route.engine.id for _ in range(300) if (route := router.choose(Prompt())))
    assert chosen["e3"] == 0
    assert chosen["e0"] > chosen["e1"] > chosen["e2"] > 0


def test_kv_aware_follows_the_cache() -> None:
    engines = [make_engine(f"e{number}") for number in range(3)]
    rig = RouterRig(*engines)
    prompt = prompt_of(400)
    rig.hold(engines[2], prompt)
    for _ in range(5):
        route = rig.router.choose(prompt)
        assert route is not None
        assert route.engine is engines[2]
        assert (route.path, route.reason, route.num_cached_tokens) == ("kv_reuse", "cached", 384)


def test_kv_aware_leaves_a_warm_engine_that_is_much_busier() -> None:
    warm, cold = make_engine("warm"), make_engine("cold")
    rig = RouterRig(warm, cold)
    prompt = prompt_of(200)
    rig.hold(warm, prompt)
    warm.num_in_flight = 1
    first = rig.router.choose(prompt)
    warm.num_in_flight = 12
    second = rig.router.choose(prompt)
    assert first is not None
    assert second is not None
    assert (first.engine, second.engine) == (warm, cold)


def test_a_hot_shared_prompt_spreads_under_load() -> None:
    engines = [make_engine(f"e{number}") for number in range(4)]
    rig = RouterRig(*engines)
    shared = tuple(range(512))
    rig.hold(engines[0], Prompt(shared))
    running: list[Engine] = []
    counts: Counter[str] = Counter()
    rng = random.Random(2)
    for number in range(400):
        prompt = Prompt((*shared, *range(10_000 + 64 * number, 10_064 + 64 * number)))
        route = rig.router.choose(prompt)
        assert route is not None
        route.engine.num_in_flight += 1
        running.append(route.engine)
        rig.hold(route.engine, prompt)
        rig.router.observe(route, first_byte_s=0.1)
        counts[route.engine.id] += 1
        if len(running) > 32:
            running.pop(rng.randrange(len(running))).num_in_flight -= 1
    assert len(counts) == 4
    assert max(counts.values()) < 2 * min(counts.values())


def test_conversations_stay_where_their_history_is() -> None:
    """Eight conversations of six turns in random order: at least half the prefilling of round robin is saved."""

    def prefilled(policy: str) -> int:
        engines = [make_engine("e0", num_speculative_tokens=3), make_engine("e1", num_speculative_tokens=3)]
        rig = RouterRig(*engines, policy=policy)
        rng = random.Random(9)
        histories: dict[int, tuple[int, ...]] = defaultdict(lambda: tuple(range(200)))
        turns = [conversation for conversation in range(8) for _ in range(6)]
        rng.shuffle(turns)
        running: list[Engine] = []
        total = 0
        for number, conversation in enumerate(turns):
            prompt = Prompt((*histories[conversation], *range(10_000 * (number + 1), 10_000 * (number + 1) + 60)))
            route = rig.router.choose(prompt)
            assert route is not None
            total += len(prompt.token_ids or ()) - route.num_cached_tokens
            histories[conversation] = (*(prompt.token_ids or ()), *range(900_000 + 200 * number, 900_150 + 200 * number))
            rig.hold(route.engine, Prompt(histories[conversation]))
            rig.router.observe(route, first_byte_s=0.1)
            route.engine.num_in_flight += 1
            running.append(route.engine)
            if len(running) > 5:
                running.pop(0).num_in_flight -= 1
        return total

    assert 2 * prefilled("kv_aware") <= prefilled("round_robin")
