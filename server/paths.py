"""The routes that generate, on the public port as on an engine's."""

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
GENERATE_PATH = "/inference/v1/generate"
"""Token ids in and out, for rollouts."""
