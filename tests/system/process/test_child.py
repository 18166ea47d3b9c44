"""A Python process that ends with this one; what pools and workers make of it is tested with them."""

import signal

from run_processes import happens

from rlft.system.process.child import Child, Ended, start_python, wait_for
from rlft.system.process.running_time import RunningTime


def test_a_command_line_has_its_output_in_a_file_and_takes_a_signal(tmp_path):
    log = tmp_path / "job.log"
    with log.open("ab") as output:
        words = ["train", "lr=1e-4"]
        process = start_python(
            "cluster_workers:show_and_wait", words, output=output.fileno(), environment={"EXTRA": "yes"}, cwd="/"
        )
    assert happens(lambda: log.read_text() == "['train', 'lr=1e-4'] yes /\n", within_s=60)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT


def test_a_child_that_ends_says_how_and_one_that_is_late_is_ended():
    clock = RunningTime()
    for target, how in [("os:abort", "was killed by SIGABRT"), ("sys:exit", "ended with exit code 0")]:
        child = Child("test", "cluster_workers:call", (target,))
        while not wait_for([child], clock):
            pass
        assert child.receive() == Ended(how=how, is_late=False, was_stopped=False)
    late = Child("test", "cluster_workers:call", ("signal:pause",))
    late.left_s = 0.5
    while not wait_for([late], clock):
        pass
    ended = late.receive()
    assert (ended.is_late, ended.was_stopped, late.is_alive()) == (True, False, False)
