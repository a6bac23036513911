"""Where target versions go: anything that takes weights and gives them a number; here a directory of whole models.

    <root>/<version>/{model.safetensors, config.json, tokenizer files, manifest.json}

A version is complete once it has its name: written aside, flushed, renamed, the manifest with the checksums last.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from wire.errors import TrainerError
from wire.spec import SCHEMA_VERSION, file_sha256, fsync_path

WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
_STAGING_PREFIX = ".staging-"


class TargetSink(Protocol):
    @property
    def canary_token_ids(self) -> tuple[int, ...]:
        """A text whose log-probabilities go with each version, so that engines can prove that they serve it; empty: none."""
        ...

    def write(self, state: Mapping[str, Tensor], canary_logprobs: Sequence[float]) -> int:
        """Make the weights durable as the next version, all or nothing, and return its number.

        state: every tensor of the model's own files by its name there, on the CPU, in the engines' dtype. canary_logprobs: of each
        token of the canary but the first, at temperature 1.
        """
        ...


class PolicyManifest(Struct, frozen=True, kw_only=True, tag="policy_manifest"):
    schema_version: int = SCHEMA_VERSION
    version: int
    sha256: dict[str, str]
    """Of every file but the manifest."""


class DirectorySink:
    """Versions count on from the highest in the directory, or from `first`. All but weights is copied from the model's directory.

    Each is a model of its own that transformers and engines load; one process writes.
    """

    canary_token_ids: tuple[int, ...] = ()

    def __init__(self, root: Path, model_dir: Path, *, first: int = 1) -> None:
        self.root, self._model_dir, self._first = root, model_dir, first

    def directory(self, version: int) -> Path:
        return self.root / str(version)

    def versions(self) -> list[int]:
        """Complete ones, ascending."""
        if not self.root.is_dir():
            return []
        names = [path.name for path in self.root.iterdir() if path.name.isdecimal() and path.is_dir()]
        return sorted(int(name) for name in names)

    def write(self, state: Mapping[str, Tensor], canary_logprobs: Sequence[float] = ()) -> int:
        """Raises OSError on a full disk; nothing of the version is left then."""
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob(f"{_STAGING_PREFIX}*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        version = max([self._first - 1, *self.versions()]) + 1
        staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=self.root))
        try:
            self._fill(staging, state, version)
            staging.chmod(0o755)
            os.rename(staging, self.directory(version))
        except SafetensorError as error:
            raise OSError(f"cannot write target {version}: {error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        fsync_path(self.root)
        return version

    def verify(self, version: int) -> PolicyManifest:
        """The manifest, after every file's checksum was recomputed; raises TrainerError naming the file that is wrong."""
        directory = self.directory(version)
        try:
            manifest = msgspec.json.decode((directory / MANIFEST_FILE).read_bytes(), type=PolicyManifest)
            if (manifest.schema_version, manifest.version) != (SCHEMA_VERSION, version):
                raise TrainerError(
                    f"target {version}: its manifest is of target {manifest.version} in schema {manifest.schema_version}, this "
                    f"release reads {SCHEMA_VERSION}; write the version anew"
                )
            for name, expected in manifest.sha256.items():
                if file_sha256(directory / Path(name).name) != expected:
                    raise TrainerError(f"target {version}: {name} is not what its manifest says; write the version anew")
        except (OSError, msgspec.DecodeError) as error:
            raise TrainerError(f"target {version} cannot be read: {error}") from error
        return manifest

    def _fill(self, directory: Path, state: Mapping[str, Tensor], version: int) -> None:
        for path in sorted(self._model_dir.iterdir()):
            is_weights = path.suffix in {".safetensors", ".bin", ".pt", ".pth"} or path.name.endswith(".index.json")
            if path.is_file() and not is_weights and path.name != MANIFEST_FILE:
                shutil.copyfile(path, directory / path.name)
        contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(contiguous, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        checksums = {path.name: file_sha256(path) for path in sorted(directory.iterdir())}
        manifest = PolicyManifest(version=version, sha256=checksums)
        (directory / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
        for path in directory.iterdir():
            fsync_path(path)
        fsync_path(directory)
