"""The first process of a sandbox: it fences itself in and becomes the program. Run by path, alone; standard library only.

usage: python -I -S sandbox_init.py LIMITS, a JSON object with the fields of `rl.environments.sandbox.Limits` besides `directory`,
`is_isolation_required` and `status_fd`. Says on `status_fd` what it achieved, `isolated` or `limits: why not more`, right before the
program begins, or `failed: why`.

The fence is that of container runtimes: new user (unless root), mount, PID, network and IPC namespaces; a root of its own that
holds the interpreter and the system's libraries read-only, and one small writable file system in memory; another user where we
are root, because root is above the limit of processes; then rlimits, and no new privileges.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_KEPT_FLAGS = {os.ST_NOEXEC: 8, os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}
"""Flags of a mount that a user namespace may not take away, as statvfs and as mount call them."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
_FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
_FIRST_SCRATCH_UID = 1 << 30
"""Far above anybody's; with the process id added it is nobody else's, and so is its count of processes."""
_libc = ctypes.CDLL(None, use_errno=True)


def main(limits: dict[str, Any]) -> int:
    _die_with_parent()
    status_fd = limits["status_fd"]
    directory = Path(limits["directory"])
    scratch_uid = _FIRST_SCRATCH_UID + os.getpid()
    try:
        is_root = _fence_in()
    except OSError as error:
        if limits["is_isolation_required"]:
            os.write(status_fd, f"failed: this kernel or container refuses namespaces: {error}".encode())
            return 1
        os.chdir(directory)
        return _become_program(limits, f"limits: {error}")
    init = os.fork()  # the first child of a new PID namespace is its init: when it ends, everything in there does
    if init:
        os.close(status_fd)
        return _code_of(os.waitpid(init, 0)[1])
    _die_with_parent()
    achieved, program_uid = "isolated", scratch_uid if is_root else None
    try:
        _change_root(directory, limits["disk_bytes"])
    except OSError as error:
        if limits["is_isolation_required"]:
            os.write(status_fd, f"failed: cannot build the root of the sandbox: {error}".encode())
            return 1
        os.chdir(directory)
        achieved, program_uid = f"limits: cannot build the root of the sandbox: {error}", None  # the directory is ours alone
    program = os.fork()
    if program == 0:
        return _become_program(limits, achieved, program_uid)
    os.close(status_fd)
    while True:
        ended, how = os.wait()
        if ended == program:
            return _code_of(how)


def _fence_in() -> bool:
    """Enter new namespaces; whether we are the machine's root and need no user namespace for it. Raises OSError."""
    is_root = os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    uid, gid = os.getuid(), os.getgid()
    fences = _NEWNS | _NEWPID | _NEWNET | _NEWIPC
    _check(_libc.unshare(fences if is_root else fences | _NEWUSER), "unshare")
    if not is_root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return is_root


def _change_root(directory: Path, disk_bytes: int) -> None:
    """Inside, `/work` is all that can be written to. Raises OSError."""
    program = (directory / "program.py").read_bytes()
    root = directory / "root"
    root.mkdir()
    _mount("none", Path("/"), flags=_REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=0755")
    prefix = os.path.realpath(sys.base_prefix)
    for name in dict.fromkeys([*_SYSTEM, prefix]):
        if os.path.islink(name):
            (root / name[1:]).symlink_to(os.readlink(name))
        elif os.path.isdir(name) and not (name == prefix and name.startswith("/usr/")):
            (root / name[1:]).mkdir(parents=True, mode=0o755)
            _bind(name, root / name[1:], _RDONLY)
    for name in _FILES:
        if os.path.exists(name):
            (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            (root / name[1:]).touch()
            _bind(name, root / name[1:], 0 if name.startswith("/dev/") else _RDONLY)
    work = root / "work"
    work.mkdir()
    _mount("tmpfs", work, "tmpfs", _NOSUID | _NODEV, f"size={disk_bytes},nr_inodes=4096,mode=0777")
    (work / "program.py").write_bytes(program)
    (work / "program.py").chmod(0o444)
    _mount("none", root, flags=_REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chroot(root)  # besides, the kernel gives no user namespace, and so no capability, to who is in one
    os.chdir("/work")


def _bind(source: str, target: Path, more: int) -> None:
    """Devices work through a mount only where it does not say NODEV."""
    _mount(source, target, flags=_BIND | _REC)
    kept = sum(flag for seen, flag in _KEPT_FLAGS.items() if os.statvfs(target).f_flag & seen)
    device = 0 if source.startswith("/dev/") else _NODEV
    with contextlib.suppress(PermissionError) if device == 0 else contextlib.nullcontext():
        _mount("none", target, flags=_REMOUNT | _BIND | _NOSUID | device | kept | more)


def _become_program(limits: dict[str, Any], achieved: str, scratch_uid: int | None = None) -> int:
    """Only returns where it fails."""
    try:
        for which, value in (
            (resource.RLIMIT_CPU, limits["cpu_s"]),
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["file_bytes"]),
            (resource.RLIMIT_NPROC, limits["num_processes"]),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(which, (value, value))
        if scratch_uid is not None:
            os.setgroups([])
            os.setresgid(scratch_uid, scratch_uid, scratch_uid)
            os.setresuid(scratch_uid, scratch_uid, scratch_uid)
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        os.set_inheritable(limits["status_fd"], False)
        os.write(limits["status_fd"], achieved.encode())
        os.execve(_python(), [_python(), "-I", "-S", "-B", "-X", "utf8", "program.py"], {})
    except (OSError, ValueError) as error:
        os.write(limits["status_fd"], f"\nfailed: {error}".encode())
    return 1


def _python() -> str:
    """The interpreter itself: a virtual environment's is a link to it, and programs have no packages but the standard library."""
    return os.path.realpath(sys.executable)


def _die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [word.encode() or None for word in (source, str(target), kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def _check(answer: int, what: str) -> None:
    if answer != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _code_of(how: int) -> int:
    """A shell's convention: 128 and the signal where one ended it."""
    code = os.waitstatus_to_exitcode(how)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    os._exit(code)
