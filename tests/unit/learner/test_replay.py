from __future__ import annotations

import random

import pytest
import torch

from drafter.head import Head
from drafter.vocabulary import DraftVocabulary
from learner.config import ReplaySettings
from learner.replay import OTHER_GROUP, Replay, Reservoir, TokenWindow
from learner.request import ROWS_PER_TOKEN, is_held_out
from learner.teaching import TeacherCache


def settings(**values) -> ReplaySettings:
    return ReplaySettings(**({"recent_tokens": 100, "reservoir_tokens": 60, "holdout_share": 0.2} | values))


def prompts(held_out: bool, share: float = 0.2):
    return (f"p{n}" for n in range(10_000) if is_held_out(f"p{n}", share) == held_out)


def test_share_of_prompts_is_held_out_and_never_changes():
    chosen = [is_held_out(f"p{n}", 0.1) for n in range(5000)]
    assert sum(chosen) / 5000 == pytest.approx(0.1, abs=0.02)
    assert chosen == [is_held_out(f"p{n}", 0.1) for n in range(5000)]


def test_window_is_bounded_in_tokens_and_drops_the_oldest(make_request):
    window = TokenWindow(30)
    fallen = [old.key for n in range(4) for old in window.add(make_request(f"k{n}"))]
    assert fallen == ["k0", "k1"]
    assert window.num_tokens == sum(request.num_tokens for request in window) <= 30


def test_reservoir_shares_its_budget_between_domains(make_request):
    reservoir = Reservoir(100, 8, random.Random(0))
    for n in range(20):
        reservoir.offer(make_request(f"a{n}", domain="a"))
    for n in range(3):
        reservoir.offer(make_request(f"b{n}", domain="b"))
    assert {name: len(kept) for name, kept in reservoir.groups().items()} == {"t/a": 4, "t/b": 3}
    for n in range(20):
        reservoir.offer(make_request(f"c{n}", domain="c"))
    sizes = {name: len(kept) for name, kept in reservoir.groups().items()}
    assert sum(sizes.values()) * 13 == reservoir.num_tokens <= 100
    assert min(sizes.values()) >= 2


def test_reservoir_is_bounded_whatever_labels_clients_choose(make_request):
    reservoir = Reservoir(80, 4, random.Random(0))
    for n in range(500):
        reservoir.offer(make_request(f"k{n}", domain=f"d{n}"))
        assert reservoir.num_tokens == sum(request.num_tokens for request in reservoir) <= 80
    assert set(reservoir.groups()) == {"t/d0", "t/d1", "t/d2", "t/d3", OTHER_GROUP}
    assert reservoir.offer(make_request("long", total=100, prompt=4)) != []


def test_short_answers_to_long_prompts_are_bounded_by_their_rows(make_request):
    replay = Replay(settings(recent_tokens=200, reservoir_tokens=200), 64, seed=0)
    for n in range(300):
        replay.add(make_request(f"k{n}", prompt_key=f"p{n}", prompt=159, total=160))
    num_rows = sum(request.rows.positions_T.numel() for request in replay.trainable())
    assert 0.8 * 400 * ROWS_PER_TOKEN < num_rows <= 400 * ROWS_PER_TOKEN
    assert replay.num_tokens == sum(request.num_tokens for request in replay.trainable())


def test_a_label_that_went_is_room_for_another(make_request):
    reservoir = Reservoir(80, 1, random.Random(0))
    reservoir.offer(make_request("a", domain="a"))
    reservoir.remove({"a"})
    reservoir.offer(make_request("b", domain="b"))
    assert list(reservoir.groups()) == ["t/b"]


def test_reservoir_sample_is_uniform_also_after_a_shrink(make_request):
    """40 requests, then a second domain halves the first one's room, then 40 more: early and late ones are kept alike."""
    first = [make_request(f"a{n}", domain="a") for n in range(80)]
    second = [make_request(f"b{n}", domain="b") for n in range(40)]
    kept: list[int] = []
    for seed in range(150):
        reservoir = Reservoir(13 * 8, 8, random.Random(seed))
        for request in (*first[:40], *second, *first[40:]):
            reservoir.offer(request)
        kept += [int(request.key[1:]) for request in reservoir.groups()["t/a"]]
    assert sum(number < 40 for number in kept) / len(kept) == pytest.approx(0.5, abs=0.06)


def test_reservoir_names_everything_it_drops(make_request):
    reservoir = Reservoir(60, 8, random.Random(0))
    gone = [old.key for n in range(30) for old in reservoir.offer(make_request(f"k{n}"))]
    assert sorted(gone + [request.key for request in reservoir]) == sorted(f"k{n}" for n in range(30))


def test_held_out_requests_are_never_drawn(make_request):
    replay = Replay(settings(), 64, seed=0)
    evidence, training = prompts(True), prompts(False)
    for n in range(4):
        replay.add(make_request(f"h{n}", prompt_key=next(evidence)))
        replay.add(make_request(f"t{n}", prompt_key=next(training)))
    replay.add(make_request("t4", prompt_key=next(training)))
    replay.note_counted()
    drawn = {request.key for _ in range(10) for request in replay.draw(30)}
    assert drawn == {"t0", "t1", "t2", "t3"}
    assert [request.key for request in replay.held_out] == ["h3"]
    assert replay.counts_V.sum() == replay.num_tokens_distinct == 5 * make_request().num_tokens


def test_counts_by_domain_are_of_what_is_remembered_to_learn_from(make_request):
    large = settings(recent_tokens=5000, reservoir_tokens=5000, max_groups=2, fresh_tokens=0)
    replay, training = Replay(large, 64, seed=0), prompts(False)
    for domain, num_requests in (("code", 12), ("chat", 11), ("maths", 10), ("rare", 1)):
        for n in range(num_requests):
            replay.add(make_request(f"{domain}{n}", domain=domain, total=144, prompt_key=next(training)))
    replay.add(make_request("held", total=144, prompt_key=next(prompts(True))))
    counts = {name: tokens.counts_V for name, tokens in replay.domain_tokens().items()}
    assert {name: int(counts_V.sum()) for name, counts_V in counts.items()} == {"t/code": 12 * 141, "t/chat": 11 * 141}
    assert (counts["t/code"] > 0).sum() == 4  # the tiny world goes round in four tokens from 1 on


def test_each_request_is_drawn_once_a_pass_and_not_beyond_max_passes(make_request):
    replay = Replay(settings(max_passes=2, fresh_tokens=0), 64, seed=0)
    keys = prompts(False)
    for n in range(4):
        replay.add(make_request(f"k{n}", prompt_key=next(keys)))
    first = [request.key for _ in range(4) for request in replay.draw(1)]
    second = [request.key for _ in range(4) for request in replay.draw(1)]
    assert sorted(first) == sorted(second) == ["k0", "k1", "k2", "k3"]
    assert replay.draw(1) == []
    replay.add(make_request("new", prompt_key=next(keys)))
    assert [request.key for request in replay.draw(1)] == ["new"]


def test_everything_forgotten_is_named_once(make_request):
    replay = Replay(settings(), 64, seed=0)
    gone = [key for n in range(80) for key in replay.add(make_request(f"k{n}", prompt_key=f"p{n}"))]
    kept = [request.key for request in replay.everything()]
    assert sorted(gone + kept) == sorted(f"k{n}" for n in range(80))


def test_same_seed_draws_the_same(make_request):
    def draw() -> list[str]:
        replay = Replay(settings(), 64, seed=3)
        for n in range(12):
            replay.add(make_request(f"k{n}", prompt_key=f"p{n}"))
        return [request.key for _ in range(5) for request in replay.draw(20)]

    assert draw() == draw()


def test_dropped_requests_are_gone_from_everywhere(make_request):
    replay = Replay(settings(), 64, seed=0)
    for n, key in zip(range(12), prompts(False), strict=False):
        replay.add(make_request(f"k{n}", prompt_key=key))
    kept = [request.key for request in replay.trainable()]
    replay.drop({kept[0], kept[-1], "never seen"})
    assert [request.key for request in replay.trainable()] == kept[1:-1]
    assert replay.num_tokens == sum(request.num_tokens for request in replay.trainable())
    assert not {kept[0], kept[-1]} & {request.key for _ in range(10) for request in replay.draw(30)}


def test_nothing_forgotten_is_drawn_or_counted_again(make_request, target):
    replay = Replay(settings(), 64, seed=0)
    teachers = TeacherCache(temperature=1.0)
    head = Head.of_target(DraftVocabulary(torch.arange(64), 64), target.head_VD)
    for n in range(300):
        teachers.forget(replay.add(make_request(f"k{n}", prompt_key=f"p{n}")))
        for request in replay.draw(13) if n % 3 == 0 else []:
            teachers.rows(request, head)
        live = {request.key for request in replay.trainable()}
        assert replay.visits().keys() <= live
        assert teachers._rows.keys() <= live
    assert teachers._rows.keys()


def test_dropped_evidence_is_gone(make_request):
    replay = Replay(settings(reservoir_tokens=600), 64, seed=0)
    for n, key in zip(range(6), prompts(True), strict=False):
        replay.add(make_request(f"h{n}", prompt_key=key))
    kept = {request.key for request in (*replay.held_out, *replay.anchors)}
    replay.drop({next(iter(replay.held_out)).key, next(iter(replay.anchors)).key})
    assert len({request.key for request in replay.everything()}) == len(kept) - 2


def test_the_newest_requests_judge_before_they_teach(make_request):
    replay = Replay(settings(recent_tokens=1000, fresh_tokens=40), 64, seed=0)
    arrived = [make_request(f"k{n}", prompt_key=name) for n, name in zip(range(30), prompts(False), strict=False)]
    for request in arrived:
        replay.add(request)
    assert [request.key for request in replay.evidence()] == ["k29", "k28", "k27"]
    taught = {request.key for _ in range(40) for request in replay.draw(13)}
    assert taught == {f"k{n}" for n in range(27)}
    assert all(request.key in replay for request in arrived)
    replay.add(
        make_request("later", prompt_key=next(name for name in prompts(False) if name not in {r.prompt_key for r in arrived}))
    )
    assert "k27" in {request.key for _ in range(40) for request in replay.draw(13)}


def test_a_young_draft_is_taught_half_of_what_comes_at_once_and_nearly_all_of_it_once_that_is_counted(make_request):
    replay = Replay(settings(recent_tokens=1000, fresh_tokens=500), 64, seed=0)
    for n, name in zip(range(8), prompts(False), strict=False):
        replay.add(make_request(f"k{n}", prompt_key=name))
    assert [request.key for request in replay.evidence()] == ["k7", "k6", "k5", "k4"]
    assert replay.note_counted() == []
    assert [request.key for request in replay.evidence()] == ["k7"]
    assert {request.key for _ in range(10) for request in replay.draw(13)} == {f"k{n}" for n in range(7)}


def test_a_fresh_request_to_a_prompt_that_taught_before_is_no_evidence(make_request):
    replay = Replay(settings(recent_tokens=1000, fresh_tokens=40), 64, seed=0)
    names = [name for _, name in zip(range(20), prompts(False), strict=False)]
    for n, name in enumerate([*names, names[3]]):
        replay.add(make_request(f"k{n}", prompt_key=name))
    assert [request.key for request in replay.evidence()] == ["k19", "k18"]


def test_what_taught_before_a_restart_is_fresh_no_longer(make_request):
    replay = Replay(settings(recent_tokens=1000, fresh_tokens=40), 64, seed=0)
    for n, name in zip(range(30), prompts(False), strict=False):
        replay.add(make_request(f"k{n}", prompt_key=name))
    replay.restore_visits({f"k{n}": 1 for n in range(29)})
    assert [request.key for request in replay.evidence()] == ["k29"]
    assert replay.visits()["k28"] == 1
