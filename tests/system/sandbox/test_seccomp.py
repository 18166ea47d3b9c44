"""The system-call filters, run on an interpreter of classic BPF against numbers from the kernel's own tables."""

import errno
import platform
import struct

import pytest

from rlft.system.sandbox import bubblewrap

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
REFUSED = ERRNO | errno.ENOSYS

# Numbers on x86_64 and aarch64: include/uapi/asm-generic/unistd.h and arch/x86/entry/syscalls/syscall_64.tbl.
ALLOWED = {
    "read": (0, 63), "openat": (257, 56), "mmap": (9, 222), "brk": (12, 214), "execve": (59, 221), "futex": (202, 98),
    "pipe2": (293, 59), "prctl": (157, 167), "wait4": (61, 260), "sendto": (44, 206), "recvfrom": (45, 207),
    "getrandom": (318, 278), "statx": (332, 291), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "rt_sigaction": (13, 134), "epoll_create1": (291, 20), "eventfd2": (290, 19), "close_range": (436, 436),
    "pidfd_open": (434, 434), "fork": (57, None), "open": (2, None),
}  # fmt: skip
FORBIDDEN = {
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "msgget": (68, 186),
    "msgsnd": (69, 189), "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "sendmsg": (46, 211), "sendmmsg": (307, 269), "recvmsg": (47, 212), "socket": (41, 198), "bind": (49, 200),
    "connect": (42, 203), "listen": (50, 201), "accept4": (288, 242), "setsockopt": (54, 208), "vmsplice": (278, 75),
    "splice": (275, 76), "tee": (276, 77), "unshare": (272, 97), "setns": (308, 268), "clone3": (435, 435),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsmount": (432, 432), "fsconfig": (431, 431),
    "mount_setattr": (442, 442), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "quotactl": (179, 60),
    "acct": (163, 89), "personality": (135, 92), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "sethostname": (170, 161),
    "setuid": (105, 146), "setgroups": (116, 159), "setresuid": (117, 147), "capset": (126, 91), "seccomp": (317, 277),
    "mbind": (237, 235), "migrate_pages": (256, 238), "move_pages": (279, 239), "remap_file_pages": (216, 234),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "the kernel's next": (600, 600),
}  # fmt: skip
# By arguments: number on both machines, position of the argument, values let through, values refused.
BY_ARGUMENT = {
    "clone": ((56, 220), 0, [0x11, 0x3D0F00], [0x10000011, 0x20000, 0x40000000, 0x80, 0x3D0F00 | 0x20000000]),
    "socketpair": ((53, 199), 0, [1], [2, 10, 16, 17]),
    "fcntl": ((72, 25), 1, [0, 1, 4, 6, 1030], [1031, 1031 + 2**32, 1024, 1026, 1033]),
    "ioctl": ((16, 29), 1, [0x5401, 0x5413, 0x541B], [0x5412, 0x5412 + 2**32, 0x541C, 0x5423]),
    "mknodat": ((259, 33), 2, [0o010600], [0o020600, 0o060600, 0o100600]),
}


def verdict(program, arch, number, *arguments):
    """What the filter returns for a call; the kernel's data are number, architecture, address and six arguments."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    jumps = {0x15: int.__eq__, 0x25: int.__gt__, 0x35: int.__ge__, 0x45: lambda a, k: bool(a & k)}
    while True:
        code, if_true, if_false, k = instructions[at]
        at += 1  # jumps go forwards only, so this ends
        if code == 0x06:
            return k
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif code == 0x54:
            accumulator &= k
        elif code == 0x05:
            at += k
        else:
            at += if_true if jumps[code](accumulator, k) else if_false


@pytest.fixture(params=MACHINES)
def machine(request):
    """(place in the tables, architecture, program)"""
    return (
        list(MACHINES).index(request.param),
        MACHINES[request.param],
        (bubblewrap.FILTERS / f"{request.param}.bpf").read_bytes(),
    )


def test_calls_that_python_needs_are_allowed_and_all_others_do_not_exist(machine):
    place, arch, program = machine
    for table, expected in ((ALLOWED, ALLOW), (FORBIDDEN, REFUSED)):
        wrong = [
            n for n, at in table.items() if at[place] is not None and verdict(program, arch, at[place]) != expected
        ]
        assert wrong == []


def test_some_calls_depend_on_an_argument(machine):
    place, arch, program = machine
    for name, (numbers, position, allowed, refused) in BY_ARGUMENT.items():
        for values, expected in ((allowed, ALLOW), (refused, REFUSED)):
            for value in values:
                found = verdict(program, arch, numbers[place], *[0] * position, value)
                assert found == expected, f"{name} with {value:#x}"


def test_calls_of_other_architectures_end_the_process(machine):
    _, arch, program = machine
    others = {0x40000003, 0x40000028, *MACHINES.values()} - {arch}  # i386, arm
    for other in others:
        assert verdict(program, other, 1) == KILL_PROCESS


def test_x32_calls_end_the_process():
    program = (bubblewrap.FILTERS / "x86_64.bpf").read_bytes()
    for number in (0, 1, 57, 520):
        assert verdict(program, MACHINES["x86_64"], 0x40000000 + number) == KILL_PROCESS


@pytest.fixture
def fresh_look():
    bubblewrap.system_call_filter.cache_clear()
    yield
    bubblewrap.system_call_filter.cache_clear()


@pytest.mark.usefixtures("fresh_look")
@pytest.mark.parametrize(("name", "file"), [("x86_64", "x86_64"), ("aarch64", "aarch64"), ("AMD64", "x86_64")])
def test_each_machine_gets_its_own_filter(name, file, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: name)
    assert bubblewrap.system_call_filter() == (bubblewrap.FILTERS / f"{file}.bpf").read_bytes()


@pytest.mark.usefixtures("fresh_look")
def test_machines_without_a_filter_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert bubblewrap.system_call_filter() is None
    assert bubblewrap.missing_filter() == "there is no system-call filter for riscv64, only for x86_64 and aarch64"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(bubblewrap, "ACTIONS", tmp_path / "actions_avail")
    assert bubblewrap.missing_filter() == "this kernel filters no system calls"
