"""How full engines are, read from a metrics page."""

from __future__ import annotations

from rl.run.load import Load, read_load

PAGE = """# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="a",engine_index="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="b",engine_index="0",model_name="m"} 0.5
vllm:num_requests_running{engine="a"} 3.0
vllm:num_requests_running{engine="b"} 4.0
vllm:num_requests_waiting{engine="a"} 0.0
vllm:num_requests_waiting{engine="b"} 2.0
vllm:num_requests_waiting_by_reason{engine="b",reason="capacity"} 2.0
vllm:num_preemptions_total{engine="a"} 1.0
vllm:num_preemptions_total{engine="b"} 6.0
paceline_engine_up{engine="a"} 1.0
"""


def test_a_page_is_summed_over_engines_and_the_fullest_cache_counts() -> None:
    assert read_load(PAGE) == Load(kv_used=0.5, num_running=7, num_waiting=2, num_preempted=7.0)


def test_what_a_page_does_not_tell_is_not_made_up() -> None:
    assert read_load("") == Load(kv_used=None, num_running=0, num_waiting=0, num_preempted=None)


def test_who_waits_is_a_rollout_before_it_is_a_user() -> None:
    load = read_load(PAGE)
    reading = load.reading(now_s=5.0, num_seated=4, num_finished=11)
    assert (reading.num_running, reading.num_queued, reading.num_users) == (2, 2, 5)
    assert (reading.kv_used, reading.num_preempted, reading.num_finished) == (0.5, 7.0, 11.0)
    alone = load.reading(now_s=5.0, num_seated=0, num_finished=0)
    assert (alone.num_running, alone.num_queued, alone.num_users) == (0, 0, 9)
    assert load.reading(now_s=5.0, num_seated=20, num_finished=0).num_users == 0
