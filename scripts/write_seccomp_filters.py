"""Writes the system-call filters of the code sandbox, rlft/assets/seccomp/<machine>.bpf, with libseccomp.

    python -m venv /tmp/seccomp && /tmp/seccomp/bin/pip install pyseccomp    # on libseccomp 2.5 or newer
    /tmp/seccomp/bin/python scripts/write_seccomp_filters.py

Only for those who change the list: the files are part of the project, and a run needs neither libseccomp nor pyseccomp.
tests/system/sandbox/test_seccomp.py runs the files on an interpreter of its own and holds them to tables of numbers.

A list of what is allowed, not of what is forbidden: what a newer kernel adds stays out. All else fails with ENOSYS, as
on a kernel that never had it, so that C libraries take their older way (clone3 becomes clone). Calls of another
architecture (32-bit and x32 programs) end the process.

What is left out on purpose, because it holds memory that no resource limit counts: System V shared memory, semaphores
and queues, POSIX queues, memfd_create and memfd_secret, descriptors sent over sockets (sendmsg; send and write carry
none), vmsplice, splice and tee (they pin pages in pipes), larger pipes, every socket but a connected pair, io_uring,
inotify, extended attributes. Or because it has been a way out of sandboxes: namespaces, mounts, ptrace, memory of
others, keys, bpf, perf events, userfaultfd, pidfd_getfd, modules, kexec, quotas, clocks, personality.
"""

from __future__ import annotations

import errno
import importlib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "rlft" / "assets" / "seccomp"

FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate
fchdir fchmod fchmodat fchmodat2 fchown fchownat fdatasync flock fstat fstatfs fsync ftruncate getcwd getdents
getdents64 lchown link linkat lseek lstat mkdir mkdirat newfstatat open openat openat2 pread64 preadv preadv2 pwrite64
pwritev pwritev2 read readlink readlinkat readv rename renameat renameat2 rmdir sendfile stat statfs statx symlink
symlinkat sync_file_range truncate umask unlink unlinkat utime utimensat utimes futimesat write writev getxattr
lgetxattr fgetxattr listxattr llistxattr flistxattr
"""
WAITING = """
epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 pipe pipe2 poll ppoll pselect6
select timerfd_create timerfd_gettime timerfd_settime
"""
MEMORY = "brk madvise mincore mlock mlock2 mmap mprotect mremap msync munlock munmap membarrier"
PROCESSES = """
execve execveat exit exit_group fork getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority
getresgid getresuid getrlimit getrusage getsid gettid getuid kill pidfd_open pidfd_send_signal prctl prlimit64 rseq
sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler sched_setaffinity
sched_yield set_robust_list get_robust_list set_tid_address setpgid setpriority setrlimit setsid tgkill tkill vfork
wait4 waitid arch_prctl futex getcpu restart_syscall sysinfo times uname getrandom
"""
SIGNALS = """
alarm getitimer pause rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
rt_sigtimedwait rt_tgsigqueueinfo setitimer sigaltstack signalfd signalfd4 timer_create timer_delete timer_getoverrun
timer_gettime timer_settime
"""
TIME = "clock_getres clock_gettime clock_nanosleep gettimeofday nanosleep time"
SOCKET_PAIRS = "getpeername getsockname getsockopt recvfrom sendto shutdown"
"""asyncio and subprocess need a connected pair; socket, bind, connect, sendmsg, recvmsg and setsockopt are not here."""

ALLOWED = tuple(" ".join([FILES, WAITING, MEMORY, PROCESSES, SIGNALS, TIME, SOCKET_PAIRS]).split())

NAMESPACES = 0x7E020080  # CLONE_NEWUSER, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWCGROUP, NEWNS and NEWTIME
FILE_TYPE, FIFO = 0o170000, 0o010000
LOW_HALF = 0xFFFFFFFF  # the kernel looks at 32 bits of these arguments, and so must the filter (CVE-2019-10063)
BY_ARGUMENT = {
    # AF_UNIX
    ("socketpair", 0): (1,),
    # F_DUPFD to F_GETOWN, SETSIG, GETSIG, SETOWN_EX, GETOWN_EX, open-file locks, F_DUPFD_CLOEXEC, F_GETPIPE_SZ
    ("fcntl", 1): (*range(12), 15, 16, 36, 37, 38, 1030, 1032),
    # TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    ("ioctl", 1): (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451),
}
"""Calls that are allowed for some values of one argument only. F_SETPIPE_SZ and TIOCSTI are not among them."""


def main() -> None:
    pyseccomp: Any = importlib.import_module("pyseccomp")
    FOLDER.mkdir(exist_ok=True)
    for machine, arch in (("x86_64", pyseccomp.Arch.X86_64), ("aarch64", pyseccomp.Arch.AARCH64)):
        made = system_call_filter(pyseccomp, arch)
        with (FOLDER / f"{machine}.bpf").open("wb") as file:
            made.export_bpf(file)
        print(f"{machine}: {(FOLDER / f'{machine}.bpf').stat().st_size // 8} instructions")


def system_call_filter(library: Any, arch: int) -> Any:
    """The filter of one architecture; names that it lacks (such as fork on aarch64) are left out."""
    made = library.SyscallFilter(library.ERRNO(errno.ENOSYS))
    made.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
    made.set_attr(library.Attr.CTL_OPTIMIZE, 2)  # a binary tree instead of a chain
    if arch != library.system_arch():
        made.add_arch(arch)
        made.remove_arch(library.system_arch())
    for name in ALLOWED:
        if library.resolve_syscall(arch, name) >= 0:
            made.add_rule(library.ALLOW, name)
    arg, masked = library.Arg, library.MASKED_EQ
    made.add_rule(library.ALLOW, "clone", arg(0, masked, NAMESPACES, 0))
    made.add_rule(library.ALLOW, "mknodat", arg(2, masked, FILE_TYPE, FIFO))
    if library.resolve_syscall(arch, "mknod") >= 0:
        made.add_rule(library.ALLOW, "mknod", arg(1, masked, FILE_TYPE, FIFO))
    for (name, position), values in BY_ARGUMENT.items():
        for value in values:
            made.add_rule(library.ALLOW, name, arg(position, masked, LOW_HALF, value))
    return made


if __name__ == "__main__":
    main()
