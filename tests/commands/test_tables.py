"""The tables that several commands print."""

from rlft.commands.tables import print_rows
from rlft.system.terminal import CheckRow, Status


def test_rows_are_printed_with_what_to_do_and_counted_by_status(capsys):
    slow = CheckRow("disk", Status.slow, "is \x1b[2Jslow", "buy another")
    print_rows([CheckRow("driver", Status.ok, "580"), slow, CheckRow("kernel", Status.ok, "6.8")])
    *rows, empty, counts = capsys.readouterr().out.splitlines()
    words = [row.split() for row in rows]
    assert words[0] == ["driver", "ok", "580"]
    assert words[1][:2] == ["disk", "slow"]
    assert "\x1b" not in rows[1]
    assert words[2:] == [["->", "buy", "another"], ["kernel", "ok", "6.8"]]
    assert (empty, counts.strip()) == ("", "2 ok, 1 slow")
