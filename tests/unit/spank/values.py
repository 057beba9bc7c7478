"""Values for the directive grammar: mostly near the border between good and bad."""

from __future__ import annotations

from hypothesis import strategies as st

from slurm_ext.domain.directive import parse_options
from slurm_ext.domain.options import OPTIONS, Grammar, Option

NOW_S = 1_764_450_000

_digits = st.text("0123456789", min_size=1, max_size=13)
_word = st.text("abzAZ09._/+:@-~#%,=x", min_size=1, max_size=20)
_clock = st.lists(st.text("0123456789", min_size=1, max_size=3), min_size=1, max_size=4).map(
    ":".join
)
_date = st.builds(
    "{:04d}-{:02d}-{:02d}{}{}".format,
    st.integers(1990, 2210),
    st.integers(0, 13),
    st.integers(0, 32),
    st.sampled_from(
        ["", "T10:30", "T23:59:59", "T24:00", "T1:00", "t10:30", "T10:61", "T00:00:60"]
    ),
    st.sampled_from(["", "Z", "+02:00", "-11:30", "+15:00", "z", "+0200", " "]),
)
_ranges = st.lists(
    st.one_of(
        st.integers(0, 40).map(str),
        st.builds("{}-{}".format, st.integers(0, 5000), st.integers(0, 5000)),
        st.sampled_from(["", "-", "1-", "-4", "01", "+1", "4096", "4097", "1-2-3"]),
    ),
    min_size=1,
    max_size=24,
).map(",".join)
_decimals = st.one_of(
    st.builds("{}.{}".format, _digits, st.text("0123456789", max_size=7)),
    _digits,
    st.sampled_from([".5", "5.", "1e3", "-1", "+1", "0.0", "00.5", "nan", "inf", "1,5", "0x10"]),
)

_SHAPED: dict[Grammar, st.SearchStrategy[str]] = {
    Grammar.MODEL: st.one_of(_word, st.builds("{}@{}".format, _word, _word)),
    Grammar.PATH: _word,
    Grammar.COUNT: _digits,
    Grammar.DECIMAL: _decimals,
    Grammar.BATCH: st.one_of(_digits, st.builds("{}-{}".format, _digits, _digits), _ranges),
    Grammar.GPUS: st.one_of(_ranges, st.sampled_from(["auto", "requested", "Auto"])),
    Grammar.SHAPE: st.lists(_digits, min_size=1, max_size=6).map("x".join),
    Grammar.DEADLINE: st.one_of(
        _date,
        _clock.map("now+{}".format),
        st.builds("now+{}-{}".format, _digits, _clock),
        st.builds(
            "now+{}{}".format,
            _digits,
            st.sampled_from(["minutes", "hour", "days", "weeks", "week", "s", "dayss", "minute "]),
        ),
    ),
    Grammar.QUALITY: st.builds(
        "{}{}{}".format, _word, st.sampled_from([">=", "<=", "=", ">", "=>", "<"]), _decimals
    ),
    Grammar.TIME: st.one_of(_clock, st.builds("{}-{}".format, _digits, _clock)),
}


def longest(size: int) -> dict[str, str]:
    """Values at their own limits, with a data set path that makes the document ``size`` bytes."""
    values = {
        "model": "m" * 96 + "@" + "r" * 64,
        "samples": "1000000000000",
        "epochs": "999999.9999",
        "batch": "16777215-16777216",
        "gpus": ",".join(f"{4000 + 3 * n}-{4001 + 3 * n}" for n in range(16)),
        "input": "9999999x9999999x9999999x9999999",
        "frozen": "backbone",
        "precision": "bf16",
        "grad-checkpointing": "yes",
        "class": "preemptible",
        "deadline": "2199-01-01T00:00:00Z",
        "merge": "account",
        "switch": "yes",
        "quality": "q" * 48 + ">=-123456789.123456",
        "max-pause": "29-23:59:59",
        "max-gpu-hours": "9999999.9999",
    }
    without = len(parse_options({**values, "dataset": "d"}, now_s=NOW_S).to_json())
    return {**values, "dataset": "d" * (size - without + 1)}


def _mutated(text: str, at: int, insert: str) -> str:
    at %= len(text) + 1
    return text[:at] + insert + text[at:]


def values_for(option: Option) -> st.SearchStrategy[bytes]:
    """Good, nearly good and wild values for one option, as bytes."""
    known = [*option.choices, option.default] if option.choices else [option.default or "1"]
    shaped = st.one_of(_SHAPED.get(option.grammar, _digits), st.sampled_from(known))
    mutated = st.builds(
        _mutated,
        shaped,
        st.integers(0, 40),
        st.sampled_from([" ", "\n", "\t", "'", "é", "\x7f", "0"]),
    )
    wild = st.binary(max_size=40).filter(lambda value: b"\0" not in value)
    long = st.integers(1, 600).map(lambda n: b"9" * n)
    return st.one_of(
        shaped.map(str.encode), shaped.map(str.encode), mutated.map(str.encode), wild, long
    )


def one_option() -> st.SearchStrategy[tuple[str, bytes]]:
    """An option's name and a value for it."""
    return st.sampled_from(OPTIONS).flatmap(
        lambda option: st.tuples(st.just(option.name), values_for(option))
    )
