"""What an engine that is starting does just now, read from the marks its log leaves. Only a display: readiness is a probe."""

from __future__ import annotations

from pathlib import Path

from launch import logs

_STAGES = (
    ("Starting vLLM server", "opens its port"),
    ("Loaded endpoint plugin", "opens its port"),
    ("Warming up done", "sets up the KV cache"),
    ("Warming up model", "compiles, the longest part: one to two minutes on a CPU that nobody else uses"),
    ("Capturing CUDA graphs", "captures CUDA graphs"),
    ("Loading drafter model", "loads the draft"),
    ("Starting to load model", "loads the target"),
    ("Initializing a V1 LLM engine", "starts its processes"),
)
"""Marks of vLLM 0.32.0, the last stage first."""
_SHOWN_LINES = 400


def stage(log_file: Path) -> str:
    """The stage the log has reached; the interpreter's start where it has reached none."""
    text = "\n".join(logs.tail(log_file, _SHOWN_LINES))
    return next((words for mark, words in _STAGES if mark in text), "imports its libraries")
