"""What is told of a worker's log; workers themselves are tested with their launchers."""

from rlft.system.process.worker import last_lines


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "engine-0.log"
    assert last_lines(log) == ""
    log.write_text("".join(f"line {i}\n" for i in range(20)))
    assert last_lines(log, 2) == "line 18\nline 19"
