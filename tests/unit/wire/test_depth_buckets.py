from __future__ import annotations

from wire.depth import bucket_of, buckets_up_to


def test_small_batches_stand_alone_and_large_ones_share() -> None:
    assert buckets_up_to(33) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]


def test_a_bucket_holds_its_own_limit_and_nothing_half_as_large() -> None:
    for num_requests in range(1, 600):
        limit = bucket_of(num_requests)
        assert bucket_of(limit) == limit
        assert limit // 1.5 <= num_requests <= limit
