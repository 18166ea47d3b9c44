from in_one_test import each

from rlft.system.text import ASCII, UNICODE, duration, glyphs_for, one_line, sparkline, visible


@each(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\u202eb", r"a\u202eb"),
        ("a\rb\x07", r"a\rb\x07"),
        ("\u2028\ud800", r"\u2028\ud800"),
        ("plain 答 é 👩\u200d💻\n\tkept", "plain 答 é 👩\u200d💻\n\tkept"),
    ],
)
def test_visible_spells_out_what_would_move_or_hide_text(raw, shown):
    assert visible(raw) == shown


def test_one_line_cuts_the_middle_and_keeps_the_end():
    # 12 characters: "…" and 11 others, of which 11 * 2 // 3 = 7 from the end
    assert one_line("abcdefgh ijklmnop\nqrs", 12) == "abcd…nop qrs"
    assert one_line("a \n  b", 12) == "a b"


@each(
    ("values", "width", "bars", "drawn"),
    [
        ([0.0, 1.0, 2.0, 3.0], 4, "0123", "0123"),
        ([4.0, 0.0, 0.0, 1.0, 1.0], 3, "01234", "401"),  # means of (4), (0, 0), (1, 1) where there is no room
        ([2.0, 2.0], 5, "0123", "11"),
        ([float("nan")], 5, "01", ""),
        ([float("nan"), 1.0, 2.0], 5, "01", "01"),
    ],
)
def test_a_sparkline_goes_from_lowest_to_highest(values, width, bars, drawn):
    assert sparkline(values, width, bars) == drawn


@each(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (725, "12:05"), (11045, "3:04:05"), (183845, "2d 3:04:05")])
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


def test_an_ascii_stream_gets_ascii_signs():
    assert glyphs_for("utf-8") is UNICODE
    assert glyphs_for("UTF8") is UNICODE
    assert glyphs_for("ascii") is ASCII
    assert all(value.isascii() for value in (ASCII.bars, ASCII.plus_minus, ASCII.arrow, ASCII.right, ASCII.cut))
