"""The exception tree. Every message says what was wrong, with which value, and what to do.

PacelineError
    ConfigError             a setting is unusable; raised before anything starts
    WireError               two processes disagree
        SchemaMismatch      different SCHEMA_VERSION
        SpecMismatch        different CaptureSpec (another target, other layers, another tokenizer)
        FrameError          a tensor frame does not have the bytes its header promises
    ArtifactError           a draft artifact is absent, incomplete, altered or unsuitable
    SwapError               an engine or the gateway refuses to change the active draft
        StaleExpectation    compare-and-swap failed: the active version is another one
    EngineError             an engine does not answer, or answers with an error
    RolloutError            a rollout's record contradicts itself, or it is where it must not be
    TrainerError            a trainer's checkpoint or dump is absent, damaged or of another run
"""

from __future__ import annotations


class PacelineError(Exception):
    """Root of every error this project raises on purpose.

    `code` is a stable machine-readable word, the one clients find in `error.code`.
    """

    code = "paceline_error"


class ConfigError(PacelineError, ValueError):
    code = "bad_config"


class WireError(PacelineError, ValueError):
    code = "wire_error"


class SchemaMismatch(WireError):
    code = "schema_mismatch"


class SpecMismatch(WireError):
    code = "spec_mismatch"


class FrameError(WireError):
    code = "bad_frame"


class ArtifactError(PacelineError, ValueError):
    code = "bad_artifact"


class SwapError(PacelineError):
    code = "swap_refused"


class StaleExpectation(SwapError):
    code = "stale_expected_active"


class EngineError(PacelineError):
    code = "engine_error"


class RolloutError(PacelineError, ValueError):
    code = "bad_rollout"


class TrainerError(PacelineError):
    code = "trainer_error"
