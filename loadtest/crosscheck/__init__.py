"""Our load tester beside others: one server, the same prompts and concurrency, in turn. Do they read the same numbers?

`bench run` against vLLM's own `bench serve` and against aiperf. Where their definitions agree with ours (METRICS.md), a
difference is a mistake of one of them.
"""
