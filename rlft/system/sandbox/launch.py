"""The first program in a sandbox: it drops remaining rights, reports that all is set, and becomes the script.

    python -c <this file> <JSON of the settings>

Standard library only. It begins with the capabilities that it needs and gives them up before the script's first
instruction; it exits with 1 if a step fails, so that no script runs with less protection than requested. Settings:

    user           user and group id to change to; 0: keep the current ones
    isolated       whether bubblewrap runs it; if not, limits that the system does not know are skipped
    limits         {name in `resource`: limit}
    max_files      most files, folders and links in /tmp, which is a tmpfs; 0: no limit is set
    seccomp        system-call filter, a BPF program in hexadecimal; empty: none
    started        descriptor to which a byte is written once all is set
    script         the script and its arguments
"""

import builtins
import json
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAP_AMBIENT = 1, 22, 47
SECCOMP_MODE_FILTER, PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
CAPABILITY_VERSION_3 = 0x20080522
MS_NOSUID, MS_NODEV, MS_REMOUNT = 2, 4, 32


def prepare(settings):
    if settings["max_files"]:
        limit_files(settings["max_files"])
    for name, limit in settings["limits"].items():
        try:
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
        except (AttributeError, ValueError, OSError):
            if settings["isolated"]:
                raise
    if settings["user"]:
        os.setgroups([])
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)
    if settings["isolated"]:
        drop_capabilities()
    elif sys.platform == "linux":
        libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # otherwise bubblewrap does so
    if settings["seccomp"]:
        filter_system_calls(bytes.fromhex(settings["seccomp"]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.write(settings["started"], b"1")
    os.close(settings["started"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def libc():
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def limit_files(number):
    """Limits the number of files, since bubblewrap limits only bytes; `memory_bound` reports where that fails."""
    libc().mount(b"tmpfs", b"/tmp", None, MS_REMOUNT | MS_NOSUID | MS_NODEV, b"nr_inodes=%d" % number)


def drop_capabilities():
    """Gives up every capability; with no_new_privs, which bubblewrap has set, no program can regain one."""
    import ctypes

    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    library = libc()
    library.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    check(library.capset(header, none))


def filter_system_calls(program):
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    filtering = Program(len(program) // 8, program)
    check(libc().prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filtering), 0, 0))


def check(status):
    if status != 0:
        import ctypes

        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def become(script, names):
    sys.argv[:] = script
    builtins.exit = builtins.quit = sys.exit  # as when Python loads `site`
    code = compile(Path(script[0]).read_bytes(), script[0], "exec")
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    names["__doc__"] = None
    names["__file__"] = script[0]
    exec(code, names)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    prepare(settings)
    become(settings["script"], globals())
